"""The figure of an inspection."""
import textwrap

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from posjax.report.figure import dress, text
from posjax.report.style import GREY, INK, PALETTE

_ONLY = {"linestyle": "-", "linewidth": 1.4}
# Of two queries, the far one is wide and lies below: where both agree, both can be seen.
_NEAR = {"linestyle": (0, (4, 1.5)), "linewidth": 1.4, "zorder": 3}
_BEFORE = {"linestyle": "-", "linewidth": 2.4, "zorder": 1.9}
_FAR = {"linestyle": "-", "linewidth": 2.8, "alpha": 0.5, "zorder": 2}
_SHOWN_HEADS = 8  # in a legend
_LOGITS = ("bias", "content", "map")
_FAINT = 40  # so far below the largest logit, a key has no weight: exp(-40) is 4e-18


def draw(inspection, title):
    """A Figure with all panels of an `Inspection` beside one another; `title` may have several lines."""
    panels = inspection.panels
    width = 4.9 * len(panels)
    lines = [part for line in title.split("\n") for part in textwrap.wrap(text(line), int(12.5 * width))]
    figure = Figure(figsize=(width, 4.3 + 0.2 * len(lines)), layout="constrained")
    for ax, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        dress(ax, panel.y_label)
        ax.set_title(panel.title, fontsize=9, color=INK, pad=16)
        ax.set_xlabel(panel.x_label, fontsize=9, color=INK)
        if panel.x_axis == "key":
            _map(figure, ax, panel)
            continue
        _curves(ax, panel)
        if panel.x_axis == "pair":
            _pair_axes(ax, panel, inspection.train_length)
        else:
            _length_axis(ax, panel, inspection.train_length)
    figure.suptitle("\n".join(lines), fontsize=10, color=INK).set_parse_math(False)
    return figure


def _curves(ax, panel):
    heads = sorted({s.head for s in panel.series if s.head is not None})
    queries = sorted({s.query for s in panel.series if s.query is not None})
    # From dark to light, so that the order of heads shows; without the light end, which is lost on paper.
    colours = matplotlib.colormaps["viridis"](np.linspace(0, 0.88, max(len(heads), 1)))
    named = heads[::-(-len(heads) // _SHOWN_HEADS) or 1]
    free = iter(PALETTE)
    for s in panel.series:
        colour = GREY if s.before else next(free) if s.head is None else colours[heads.index(s.head)]
        look = _BEFORE if s.before else _ONLY if len(queries) < 2 else _FAR if s.query == queries[-1] else _NEAR
        label = s.label if s.head is None else f"head {s.head}" if s.head in named and s.query in (None, *queries[-1:]) else None
        if s.spread is not None:
            ax.fill_between(s.x, s.y - s.spread, s.y + s.spread, color=colour, alpha=0.1, linewidth=0)
        finite = np.isfinite(s.y)
        ax.plot(s.x[finite], s.y[finite], color=colour, marker="." if panel.x_axis == "pair" else None, label=label, **look)
    if len(queries) > 1 and heads:
        for query, look in zip(queries, (_NEAR, _FAR)):
            ax.plot([], [], color=INK, label=f"query at {query}", **look)
    ax.set_ylim(auto=True)
    ax.relim()
    ax.autoscale_view()
    if len(panel.series) > 1:
        ax.legend(frameon=False, fontsize=7.5, labelcolor=INK, loc="upper center", bbox_to_anchor=(0.5, -0.13),
                  ncols=4 if heads else 2, handlelength=2.4)


def _length_axis(ax, panel, train_length):
    """Distances (or positions) on a logarithmic axis with a place for 0, the trained ones shaded."""
    last = max(int(s.x[-1]) for s in panel.series)
    ax.set_xscale("symlog", base=2, linthresh=1, linscale=0.6)
    ticks = [n for n in (4**k for k in range(16)) if n <= last]
    ticks = [0, *ticks[::-(-len(ticks) // 8) or 1]]
    ax.set_xticks(ticks, [str(n) for n in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlim(0, max(last, train_length) * 1.15)
    ax.axvspan(0, train_length, color=INK, alpha=0.06, linewidth=0, zorder=0)
    ax.axvline(train_length, color=INK, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    ax.annotate(f"train_length {train_length} ", (train_length, 1), xycoords=("data", "axes fraction"), xytext=(-2, 2),
                textcoords="offset points", ha="right", va="bottom", fontsize=8, color=INK)
    low, high = (f([f(s.y) for s in panel.series]) for f in (np.min, np.max))
    if panel.name in _LOGITS and high - low > 1.5 * _FAINT:
        ax.set_ylim(high - _FAINT, high + 0.04 * _FAINT)
        ax.set_ylabel(f"{panel.y_label} (cut {_FAINT} below the top)", fontsize=9, color=INK)


def _pair_axes(ax, panel, train_length):
    """Wavelengths on a logarithmic axis, the training length as a line: above it, a pair never came round in training."""
    ax.set_yscale("log")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.axhline(train_length, color=INK, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    ax.annotate(f"train_length {train_length}", (1, train_length), xycoords=("axes fraction", "data"), xytext=(-2, 2),
                textcoords="offset points", ha="right", va="bottom", fontsize=8, color=INK)
    still = panel.series[-1].x[~np.isfinite(panel.series[-1].y)]
    if still.size:
        ax.set_xlim(-0.5, panel.series[-1].x[-1] + 0.5)
        ax.axvspan(still[0] - 0.5, still[-1] + 0.5, color=INK, alpha=0.06, linewidth=0, zorder=0)
        ax.annotate(f"pairs {still[0]} to {still[-1]}\nstand still", ((still[0] + still[-1]) / 2, 0.5),
                    xycoords=("data", "axes fraction"), ha="center", va="center", fontsize=8, color=INK)


def _map(figure, ax, panel):
    n = len(panel.series)
    square = np.full((n, n), np.nan)
    for i, row in enumerate(panel.series):
        square[i, :i + 1] = row.y
    low, high = np.nanmin(square), np.nanmax(square)
    faint = panel.name in _LOGITS and low < high - _FAINT
    image = ax.imshow(square, cmap="viridis", vmin=high - _FAINT if faint else low, vmax=high, interpolation="nearest")
    ax.grid(False)
    ax.set_ylim(n - 0.5, -0.5)
    ax.set_ylabel(panel.x_label if panel.x_label == "position" else "query", fontsize=9, color=INK)
    bar = figure.colorbar(image, ax=ax, shrink=0.8, extend="min" if faint else "neither")
    bar.set_label(panel.y_label, fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=8, colors=INK, width=0.6)
    bar.outline.set_visible(False)
