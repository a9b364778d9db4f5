"""The table of scheme x length, for a terminal and for a README."""
import textwrap

from posjax.report import words

MEAN = "Exact match (the whole answer right), mean over the seeds that fit ± half the 95 % Student t interval over seeds."
ONE = "Exact match (the whole answer right) of one seed, so without an interval."
LENGTH = "len@0.9: longest evaluated length up to which it stays at or above 0.9."
UNFIT = "What did not fit: mean over all its seeds, within the training lengths only."


def table_lengths(summaries, count):
    """At most `count` evaluated lengths, of which the longest trained one, 2x, 1.5x, 4x, the longest ... come first."""
    lengths = sorted({n for s in summaries for n in s.lengths})
    if not lengths:
        return []
    train_max = summaries[0].train_max
    factors = (1, 2, 1.5, 4, lengths[-1] / train_max, 1.25, 3, 0.5, 6, 8, 0.25)
    chosen = []
    for factor in factors:
        nearest = min(lengths, key=lambda n: (abs(n - factor * train_max), n))
        # A length stands for a multiple only if it is near it.
        if nearest not in chosen and abs(nearest - factor * train_max) <= 0.15 * factor * train_max:
            chosen.append(nearest)
    chosen += [n for n in lengths if n not in chosen]
    return sorted(chosen[:count])


def cell(summary, length, plus_minus):
    """Mean and half interval at a length; a word where there is none."""
    if summary.unfinished:
        return ""
    estimate = summary.exact_match.get(length)
    if estimate is None:
        if summary.did_not_fit:
            return "-"
        return "no row" if "no row" in summary.statuses.get(length, "") else "-"
    half = estimate.half_width
    return f"{estimate.mean:.2f}" if half is None else f"{estimate.mean:.2f} {plus_minus}{half:.2f}"


def effective_cell(summary):
    if summary.unfinished:
        return summary.absence
    return "did not fit" if summary.did_not_fit else words.effective(summary.effective[words.GOOD], ascii_only=True)


def rows(summaries, lengths, plus_minus="±"):
    """The table as lists of strings, the head first."""
    train_max = summaries[0].train_max
    head = ["scheme", "fit", "len@0.9"]
    head += [f"{n}" if n <= train_max else f"{n} ({words.times(n / train_max).replace('×', 'x')})" for n in lengths]
    return [head] + [[s.label, "" if s.unfinished else words.fit(s), effective_cell(s),
                      *(cell(s, n, plus_minus) for n in lengths)] for s in summaries]


def notes(summaries):
    """Sentences on what the cells cannot say."""
    estimates = [e for s in summaries if not s.unfinished for e in s.exact_match.values()]
    note = [ONE if estimates and all(e.n == 1 for e in estimates) else MEAN, LENGTH]
    if any(s.did_not_fit and not s.unfinished for s in summaries):
        note.append(UNFIT)
    return [" ".join(note)] + words.remarks(summaries)


def text_table(summaries, *, width=110):
    """The table of one task in plain text, at most `width` characters wide where the names allow it.

    Args:
      summaries: `Summary`s of runs with the same task and training lengths.
      width: of the terminal, in characters.
    """
    count = 12
    while True:
        lengths = table_lengths(summaries, count)
        grid = rows(summaries, lengths)
        widths = [max(len(row[i]) for row in grid) for i in range(len(grid[0]))]
        if count <= 3 or sum(widths) + 2 * (len(widths) - 1) <= width:
            break
        count -= 1
    task = summaries[0].task
    lines = [f"Exact match on {task} by length, trained on lengths {summaries[0].train_min} to {summaries[0].train_max}"]
    for index, row in enumerate(grid):
        cells = [row[0].ljust(widths[0])] + [value.rjust(size) for value, size in zip(row[1:], widths[1:])]
        lines.append("  ".join(cells).rstrip())
        if index == 0:
            lines.append("-" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(lines + [""] + [part for note in notes(summaries)
                             for part in textwrap.wrap(note, width, subsequent_indent="  ")])


def markdown_table(summaries, *, lengths=None, columns=6):
    """The same table in Markdown, with its notes below."""
    lengths = lengths or table_lengths(summaries, columns)
    grid = [[value.replace("|", "\\|") for value in row] for row in rows(summaries, lengths)]
    lines = ["| " + " | ".join(row) + " |" for row in grid]
    lines.insert(1, "| --- |" + " ---: |" * (len(grid[0]) - 1))
    return "\n".join(lines + [""] + [note + "\n" for note in notes(summaries)]).rstrip()
