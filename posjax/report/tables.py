"""The tables of the HTML page. All text that comes from files goes through `escape`."""
import html

from posjax.eval.statistics import THRESHOLDS
from posjax.report import words
from posjax.report.style import MARKERS


def escape(text):
    return html.escape(str(text), quote=True)


def mark(summary, looks):
    """The scheme's marker in its colour, as in the figures."""
    if summary.did_not_fit or summary.unfinished:
        return '<span class="mark grey" aria-hidden="true">╌</span> '
    look = looks[summary.label]
    return f'<span class="mark" style="color:var(--s{look.slot})" aria-hidden="true">{MARKERS[look.marker]}</span> '


def key(summaries, looks, *, band=True):
    """The legend of the figures below it."""
    items = []
    for s in summaries:
        if s.unfinished:
            continue
        note = f": did not fit ({words.fit(s)} seeds)" if s.did_not_fit else ""
        items.append(f"<li>{mark(s, looks)}{escape(s.label + note)}</li>")
    if band and any(e.interval for s in summaries for e in s.exact_match.values()):
        items.append('<li class="band">Band: 95 % interval over seeds; thin lines: seeds</li>')
    return f'<ul class="key">{"".join(items)}</ul>'


def length_table(summaries, looks):
    """Lengths down, schemes across: every cell a mean, its interval, min and max."""
    train_max = summaries[0].train_max
    lengths = sorted({n for s in summaries if not s.unfinished for n in s.lengths})
    head = "".join(f'<th scope="col">{mark(s, looks)}{escape(s.label)}</th>' for s in summaries)
    body = [line("seeds that fit", [plain_cell("" if s.unfinished else words.fit(s)) for s in summaries])]
    body += [line(f"effective length at {threshold}", [effective_cell(s, threshold) for s in summaries])
             for threshold in THRESHOLDS]
    body.append(divider(f"trained on {summaries[0].train_min} to {train_max}", summaries))
    for index, n in enumerate(lengths):
        if n > train_max and (index == 0 or lengths[index - 1] <= train_max):
            body.append(divider(f"beyond {train_max}", summaries))
        name = f"{n}" + (f" ({words.times(n / train_max)})" if n > train_max else "")
        body.append(line(name, [value_cell(s, n) for s in summaries]))
    return (f'<div class="scroll" tabindex="0"><table><thead><tr><th scope="col">length</th>{head}</tr></thead>'
            f"<tbody>{''.join(body)}</tbody></table></div>")


def line(name, cells):
    return f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>'


def divider(name, summaries):
    return f'<tr class="edge"><th scope="rowgroup">{escape(name)}</th><td colspan="{len(summaries)}"></td></tr>'


def plain_cell(value):
    return f"<td>{escape(value)}</td>"


def absent(reason):
    return f'<td class="none">{escape(reason)}</td>'


def effective_cell(summary, threshold):
    if summary.unfinished:
        return absent(summary.absence)
    if summary.did_not_fit:
        return absent("did not fit")
    mean, _, seeds = words.effective(summary.effective[threshold]).partition(" (")
    return f"<td><b>{escape(mean)}</b>" + (f"<small>{escape(seeds.rstrip(')'))}</small>" if seeds else "") + "</td>"


def value_cell(summary, length):
    """One scheme at one length."""
    estimate = None if summary.unfinished else summary.exact_match.get(length)
    if estimate is None:
        reason = "did not fit" if summary.did_not_fit and length > summary.train_max else summary.statuses.get(length, "")
        return absent("" if summary.unfinished else reason or "not evaluated")
    small = ""
    if estimate.interval:
        low, high = estimate.interval
        seeds = f"min {estimate.min:.2f} max {estimate.max:.2f}"
        small = f"<small>{low:.2f} to {high:.2f}</small><small>{seeds}</small>"
        if len({f"{value:.2f}" for value in (low, high, *estimate.values)}) == 1:
            small = "<small>every seed</small>"
    return f'<td class="value" style="--v:{estimate.mean:.3f}"><b>{estimate.mean:.2f}</b>{small}</td>'


def condition_map(summary, looks):
    """Conditions down (a depth), lengths across, exact match as the colour."""
    lengths = sorted({n for estimates in summary.by_condition.values() for n in estimates})
    head = "".join(f'<th scope="col">{n}</th>' for n in lengths)
    body = []
    for condition, estimates in summary.by_condition.items():
        name = ", ".join(f"{k} {words.plain(v)}" for k, v in condition)
        cells = [f'<td class="value" style="--v:{estimates[n].mean:.3f}">{estimates[n].mean:.2f}</td>' if n in estimates
                 else absent("") for n in lengths]
        body.append(line(name, cells))
    note = " (did not fit)" if summary.did_not_fit else ""
    return (f'<div><h4>{mark(summary, looks)}{escape(summary.label + note)}</h4><div class="scroll" tabindex="0"><table>'
            f"<thead><tr><th></th>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div></div>")


def seed_table(summaries):
    """Exact match of every seed at every length, with nothing left out."""
    lengths = sorted({n for s in summaries for n in s.lengths})
    head = "".join(f'<th scope="col">{n}</th>' for n in lengths)
    body = []
    for s in summaries:
        for seed, curve in s.curves.items():
            note = "" if seed in s.fit else ", did not fit"
            note += f", step {s.step} of {s.steps}" if s.unfinished else ""
            cells = []
            for n in lengths:
                point = curve.get(n)
                value = point.exact_match if point else None
                cells.append(absent("" if not point else "no row" if "no row" in point.status else point.status) if value is None
                             else f'<td class="value" style="--v:{value:.3f}">{value:.3f}</td>')
            body.append(line(f"{s.label}, seed {seed}{note}", cells))
    return (f'<div class="scroll dense" tabindex="0"><table><thead><tr><th></th>{head}</tr></thead>'
            f"<tbody>{''.join(body)}</tbody></table></div>")
