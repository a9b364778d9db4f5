"""Figures from summaries, as matplotlib Figures, PNG bytes or SVG text. No pyplot, so no state and no display."""
import html
import io
import math
import re
import warnings

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

from posjax.report.style import GREY, INK, PALETTE, styles

EXACT, TOKEN = "exact match", "token accuracy (teacher-forced)"


def extrapolation_figure(summaries):
    """PNG bytes: exact match and teacher-forced token accuracy against length, a line a scheme with its 95 % band."""
    return png(draw_extrapolation(summaries))


def position_figure(summaries):
    """PNG bytes: teacher-forced accuracy at every answer token, a panel for each of up to four lengths."""
    return png(draw_positions(summaries))


def run_figure(summary):
    """PNG bytes of one run alone, also while it trains: every seed's curves, and at which step."""
    figure = draw_extrapolation([summary], everything=True)
    figure.suptitle(text(f"{summary.label} on {summary.task}, step {summary.step} of {summary.steps}"), fontsize=11, color=INK)
    return png(figure)


def draw_extrapolation(summaries, *, panels=("exact_match", "token_accuracy"), looks=None, everything=False, key=True):
    """A Figure of curves over length.

    `everything` also draws unfinished runs; `looks` are `styles` of a larger set; without `key` the page has the legend.
    """
    looks = looks or styles(summaries)
    shown = [s for s in summaries if s.lengths and (everything or not s.unfinished)]
    figure = Figure(figsize=(5.4 * len(panels), 4.4 if key else 3.7), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for ax, panel in zip(axes, panels):
        dress(ax, EXACT if panel == "exact_match" else TOKEN)
        length_axis(ax, shown)
        for index, summary in enumerate(shown):
            # The first wide, the last thin: where curves coincide (at 0 and at 1), all can be seen.
            curve(ax, summary, panel, looks[summary.label], thin=index / max(1, len(shown) - 1))
        mark_ends(ax, shown, panel, looks)
    if key:
        legend(figure, shown, looks, band=any(e.interval for s in shown for e in s.exact_match.values()))
    return figure


def curve(ax, summary, panel, look, thin):
    """Mean and band over the seeds that count, thin lines for the seeds themselves."""
    estimates = getattr(summary, panel)
    lengths = list(estimates)
    if not lengths:
        return
    means = [estimates[n].mean for n in lengths]
    if summary.did_not_fit:
        ax.plot(lengths, means, color=GREY, linestyle=(0, (4, 2)), linewidth=1.3, zorder=2)
        return
    if estimates[lengths[0]].interval:
        low, high = zip(*(estimates[n].interval for n in lengths))
        ax.fill_between(lengths, low, high, color=look.colour, alpha=0.14, linewidth=0)
        for seed in range(estimates[lengths[0]].n):
            ax.plot(lengths, [estimates[n].values[seed] for n in lengths], color=look.colour, alpha=0.45, linewidth=0.6)
    ax.plot(lengths, means, color=look.colour, linestyle=look.dash, linewidth=3 - 1.6 * thin, marker=look.marker,
            markersize=6.5 - 2.5 * thin, zorder=3 + thin)


def mark_ends(ax, summaries, panel, looks):
    """Where a scheme ends for want of a result, which is not the same as failing: a bar, and the reason above the panel."""
    used = {}
    for s in summaries:
        estimates = getattr(s, panel)
        last = max(estimates, default=None)
        reason = next((reason for n, reason in s.statuses.items() if last and n > last), None)
        if reason is None or s.did_not_fit:
            continue
        mean = estimates[last].mean
        ax.plot([last] * 2, [mean - 0.05, min(1.03, mean + 0.05)], color=looks[s.label].colour, linewidth=3, zorder=5,
                clip_on=False)
        row = used[last] = used.get(last, -1) + 1
        late = ax.transData.transform((last, 0))[0] > ax.transAxes.transform((0.6, 0))[0]
        # Left of the training line stands its own label.
        note = ax.annotate(text(f"{s.label}: {reason}"), (last, 1.0), xycoords=("data", "axes fraction"),
                           xytext=(-3 if late else 3, 2 + 10 * (row + late)), textcoords="offset points",
                           ha="right" if late else "left", va="bottom", fontsize=7.5, color=INK)
        note.set_parse_math(False)


def draw_positions(summaries, *, looks=None, lengths=None, key=True):
    """A Figure of accuracy over answer tokens; None if no answer is longer than one token."""
    looks = looks or styles(summaries)
    shown = [s for s in summaries if s.has_result]
    lengths = lengths or position_lengths(shown)
    if not lengths:
        return None
    rows = math.ceil(len(lengths) / 2)
    columns = min(2, len(lengths))
    figure = Figure(figsize=(4.6 * columns, 2.5 * rows + 0.6 * key), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for ax in axes[len(lengths):]:
        ax.remove()
    for index, (ax, n) in enumerate(zip(axes, lengths)):
        dress(ax, "accuracy (teacher-forced)" if index % columns == 0 else "")
        for order, s in enumerate(shown):
            values, look, thin = s.per_position.get(n, ()), looks[s.label], order / max(1, len(shown) - 1)
            ax.plot(range(1, len(values) + 1), values, color=look.colour, linestyle=look.dash, linewidth=3 - 1.6 * thin,
                    marker=look.marker if len(values) < 40 else None, markersize=5 - 2 * thin)
        train_max = shown[0].train_max
        relative = "trained" if n <= train_max else f"{n / train_max:.3g}× trained"
        ax.set_title(f"length {n} ({relative})", fontsize=9, color=INK)
        ax.set_xlabel("answer token", fontsize=9, color=INK)
        ax.xaxis.get_major_locator().set_params(integer=True)
    if key:
        legend(figure, shown, looks, band=False)
    return figure


def position_lengths(summaries):
    """The longest trained length, and those nearest to 1.5, 2 and 4 times it, that have answers of several tokens."""
    have = sorted({n for s in summaries for n, values in s.per_position.items() if len(values) > 1})
    if not have:
        return []
    train_max = summaries[0].train_max
    nearest = (min(have, key=lambda n: abs(n - factor * train_max)) for factor in (1, 1.5, 2, 4))
    return sorted(set(nearest))


def draw_losses(summary_metrics, looks):
    """A Figure of training loss over steps from [(summary, metrics rows)]: the mean over seeds, thin lines for each."""
    figure = Figure(figsize=(5.4, 3.2), layout="constrained")
    ax = figure.subplots()
    dress(ax, "training loss")
    ax.set_ylim(auto=True)
    ax.set_yscale("log")
    for summary, rows in summary_metrics:
        colour = looks[summary.label].colour if summary.has_result else GREY
        dash = looks[summary.label].dash if summary.has_result else (0, (4, 2))
        # A resumed run may have logged a step twice: the last counts.
        rows = sorted({row["step"]: row for row in rows if row.get("loss")}.items())
        losses = [[positive(value) for value in row["loss"]] for _, row in rows]
        steps = [step for step, _ in rows]
        for seed in range(max(map(len, losses), default=0)):
            values = [values[seed] if seed < len(values) else math.nan for values in losses]
            ax.plot(steps, values, color=colour, alpha=0.3, linewidth=0.6)
        ax.plot(steps, [math.fsum(v) / len(v) for v in losses], color=colour, linestyle=dash, linewidth=1.6)
    ax.set_xlabel("step", fontsize=9, color=INK)
    low, high = ax.get_ylim()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    return figure


def positive(value):
    return value if isinstance(value, (int, float)) and math.isfinite(value) and value > 0 else math.nan


def dress(ax, label):
    """The look of all panels: quiet axes, a grid only for reading values."""
    ax.set_ylim(-0.03, 1.03)
    ax.set_ylabel(label, fontsize=9, color=INK)
    ax.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.6)
    ax.tick_params(which="both", labelsize=8, colors=INK, width=0.6)
    ax.set_facecolor("none")
    for side, spine in ax.spines.items():
        spine.set(visible=side in ("left", "bottom"), color=INK, linewidth=0.6)


def length_axis(ax, summaries):
    """log2 axis with ticks at lengths that were evaluated; the training lengths shaded up to a line at the longest."""
    ax.set_xscale("log", base=2)
    ax.set_xlabel("length", fontsize=9, color=INK)
    ax.minorticks_off()
    lengths = sorted({n for s in summaries for n in s.lengths})
    if not lengths:
        return
    train_max = summaries[0].train_max
    ticks = tick_lengths(lengths, train_max)
    ax.set_xticks(ticks, [str(n) for n in ticks])
    left, right = min(lengths[0], train_max) * 0.92, max(lengths[-1], train_max) * 1.1
    ax.set_xlim(left, right)
    ax.axvspan(left, train_max, color=INK, alpha=0.06, linewidth=0, zorder=0)
    ax.axvline(train_max, color=INK, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    ax.annotate(f"trained to {train_max} ", (train_max, 1.0), xycoords=("data", "axes fraction"), xytext=(-2, 2),
                textcoords="offset points", ha="right", va="bottom", fontsize=8, color=INK)


def tick_lengths(lengths, train_max):
    """As many of the evaluated lengths as can be read side by side, the important ones first."""
    span = math.log2(lengths[-1] / lengths[0]) or 1
    wanted = [n for n in (train_max, lengths[-1], lengths[0], 2 * train_max, 4 * train_max) if n in lengths]
    wanted += sorted(lengths, key=lambda n: (n & (n - 1) != 0, n))
    ticks = []
    for n in wanted:
        if all(abs(math.log2(n / other)) > 0.055 * span for other in ticks):
            ticks.append(n)
    return sorted(ticks)


def legend(figure, summaries, looks, *, band):
    handles = []
    for s in summaries:
        look, name = looks[s.label], text(s.label)
        if s.did_not_fit:
            handles.append(Line2D([], [], color=GREY, linestyle=(0, (4, 2)), linewidth=1.3,
                                  label=f"{name}: did not fit ({len(s.fit)}/{len(s.seeds)} seeds)"))
            continue
        handles.append(Line2D([], [], color=look.colour, linestyle=look.dash, linewidth=1.9, marker=look.marker, markersize=4.5,
                              label=name + (f" ({len(s.fit)}/{len(s.seeds)} seeds fit)" if len(s.fit) < len(s.seeds) else "")))
    if band and handles:
        handles.append(Patch(facecolor=GREY, alpha=0.3, label="95 % interval over seeds (Student t)"))
    if not handles:
        return
    longest = max(len(handle.get_label()) for handle in handles)
    columns = max(1, min(len(handles), int(figure.get_figwidth() * 14 / (longest + 6))))
    box = figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5, labelcolor=INK)
    for entry in box.get_texts():
        entry.set_parse_math(False)


def text(name):
    """A name as matplotlib shows it as it is: a leading underscore would hide it, a line break would tear the legend."""
    name = " ".join(str(name).split())
    return f" {name}" if name.startswith("_") else name


def png(figure):
    """PNG bytes at twice the usual resolution, on white."""
    figure.set_facecolor("white")
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes: no reason to fail, or to complain.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        FigureCanvasAgg(figure)
        figure.savefig(buffer, format="png", dpi=200, metadata={"Software": None})
    return buffer.getvalue()


def svg(figure, name, description):
    """SVG to stand in a page: ids made unique by `name`, ink and colours those of the page, no outside reference."""
    figure.set_facecolor("none")
    buffer = io.StringIO()
    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": "posjax", "svg.fonttype": "path"}):
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    source = buffer.getvalue()
    source = source[source.index("<svg"):]
    # Comments hold the drawn text, the metadata the addresses of vocabularies; neither is of use in a page.
    source = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", source, flags=re.DOTALL)
    source = re.sub(r'<svg[^>]*?(viewBox="[^"]*")[^>]*>',
                    lambda tag: f'<svg {tag[1]} role="img" aria-label="{html.escape(description)}">', source, count=1)
    source = source.replace("xlink:href", "href")
    source = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", source)
    source = source.replace(INK, "currentColor")
    for slot, colour in enumerate(PALETTE):
        source = source.replace(colour, f"var(--s{slot})")
    return source
