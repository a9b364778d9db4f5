"""The report: one HTML file that needs nothing else, made from run records alone."""
import importlib.resources
import json
import os
import pathlib

from posjax.errors import UserError
from posjax.eval.statistics import evaluated_positions
from posjax.report import figure, words
from posjax.report.records import find_runs
from posjax.report.style import styles
from posjax.report.tables import condition_map, escape, key, length_table, mark, seed_table

READING = """\
Exact match is the gate: an answer counts only if all its tokens are right. It is measured in one pass with the right
answer as context, which is the same as greedy decoding for this purpose: a first wrong token fails either way.

Token accuracy, per-position accuracy and loss are teacher-forced: every token is predicted from the right ones before
it. They say how a scheme fails, not that it works; they can stay high where no answer is right.

A seed fits if its final exact match reaches the threshold (eval.fit_threshold) at every evaluated length within the
training lengths. Means, intervals, min and max are over the seeds that fit. A scheme with no such seed did not fit:
it has no extrapolation result, and is not counted as zero.

Intervals are 95 % Student t intervals over seeds, cut to [0, 1]. They need two seeds, are wide with three, and say
nothing about other sizes of model or other training. Where all seeds agree they have no width; the examples a seed
was evaluated on still limit what can be told apart.

The effective length at 0.9 (0.5) is the longest evaluated length at which, and at all evaluated lengths up to which,
exact match is at least 0.9 (0.5). “≥” means that even the longest evaluated length passes. It can only be a length
that was evaluated. Where a task has conditions (such as a depth), curves are averaged over them.

A run without its final evaluation is named as unfinished, or as failed, and takes no part in the comparison.
"""


def write_report(run_paths, out_path):
    """Writes the report on all runs at `run_paths`, and returns its path.

    Args:
      run_paths: run directories, or folders that contain them.
      out_path: the HTML file; its folder is made. It appears whole or not at all.

    Raises:
      UserError: no run, an unreadable one, or a place that cannot be written to.
    """
    return write_page(find_runs(run_paths), out_path)


def write_page(records, out_path):
    """Writes the report on `RunRecord`s, as `write_report` does."""
    out = pathlib.Path(out_path)
    if out.is_dir():
        raise UserError(f"{out} is a folder; give the name of the HTML file to write.")
    page = render(records)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(page, encoding="utf-8")
            os.replace(partial, out)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"The report cannot be written to {out}: {error.strerror}.") from None
    return out


def render(records):
    """The page on `RunRecord`s, as text."""
    css = importlib.resources.files("posjax.report").joinpath("report.css").read_text(encoding="utf-8")
    groups = words.sections(records)
    looks = styles([summary for _, summaries in groups for summary in summaries])
    body = "".join(section(index, *group, looks) for index, group in enumerate(groups))
    links = "".join(f'<a href="#task-{i}">{escape(summaries[0].task)}</a>' for i, (_, summaries) in enumerate(groups))
    reading = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in READING.split("\n\n"))
    count = f"{len(records)} run{'s' * (len(records) != 1)}"
    tasks = ", ".join(dict.fromkeys(summaries[0].task for _, summaries in groups))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(f"posjax: {tasks}, {count}")}</title>
<style>
{css}</style>
</head>
<body>
<header>
<h1>Which positional scheme works beyond the length it was trained on?</h1>
<p>posjax report on {count}</p>
{f"<nav>{links}</nav>" if len(groups) > 1 else ""}
</header>
<main>
{body}</main>
<footer>
<h3>How to read this</h3>
{reading}
</footer>
</body>
</html>
"""


def section(index, records, summaries, looks):
    """All on one task: the result first, then what it rests on."""
    head, facts = words.headline(summaries)
    config = records[0].config
    lengths = config["train"]["lengths"]
    hyper = [f"{k}={words.plain(v)}" for k, v in config["task"].items() if k != "name"]
    how = [f"trained on lengths {lengths['min']} to {lengths['max']}"]
    if lengths.get("name"):
        how[0] += f" ({lengths['name']})"
    examples = sorted({n for s in summaries for n in s.num_examples})
    if examples:
        how.append(f"evaluated on {' or '.join(map(str, examples))} examples a seed and length")
    apart = [k for k in words.differing(records) if not k.startswith("scheme.")]
    if apart:
        how.append("the runs also differ in " + ", ".join(apart))
    parts = [f'<section id="task-{index}">',
             f"<h2>{escape(summaries[0].task)}</h2>",
             f'<p class="meta">{escape("; ".join([", ".join(hyper)] * bool(hyper) + how))}</p>',
             f'<p class="headline">{escape(head)}</p>',
             '<ul class="facts">' + "".join(f"<li>{escape(fact)}</li>" for fact in facts) + "</ul>" if facts else ""]
    if any(s.lengths and not s.unfinished for s in summaries):
        parts += [key(summaries, looks), '<div class="grid">']
        panels = {"exact_match": "Exact match: the whole answer right.",
                  "token_accuracy": "Token accuracy, teacher-forced: high values do not mean that an answer is right."}
        for panel, caption in panels.items():
            drawn = figure.draw_extrapolation(summaries, panels=(panel,), looks=looks, key=False)
            parts.append(picture(drawn, f"t{index}-{panel}", caption))
        parts += ["</div>", "<h3>Exact match by length</h3>",
                  ('<p class="note">Mean over the seeds that fit, 95 % Student t interval over seeds, min and max of the seeds. '
                   "Where none fits, over all seeds, and only within the training lengths.</p>"),
                  length_table(summaries, looks),
                  "<details><summary>Every seed, also those that did not fit</summary>", seed_table(summaries), "</details>"]
    maps = [condition_map(s, looks) for s in summaries if s.by_condition and not s.unfinished]
    if maps:
        names = list(dict.fromkeys(k for s in summaries for condition in s.by_condition for k, _ in condition))
        parts += [f"<h3>{escape(words.join(names).capitalize())} × length</h3>",
                  '<p class="note">Exact match, mean over the seeds that fit.</p>', f'<div class="maps">{"".join(maps)}</div>']
    spots = figure.position_lengths([s for s in summaries if s.has_result])
    if spots:
        parts += ["<h3>Where in the answer it fails</h3>",
                  '<p class="note">Teacher-forced accuracy at every token of the answer, mean over the seeds that fit.</p>',
                  key([s for s in summaries if s.has_result], looks, band=False), '<div class="grid">']
        parts += [picture(figure.draw_positions(summaries, looks=looks, lengths=[n], key=False), f"t{index}-p{n}",
                          f"Accuracy by answer token at length {n} (teacher-forced).") for n in spots]
        parts.append("</div>")
    runs = [(r, s) for r, s in zip(records, summaries) if s.positions == evaluated_positions(r.config)]
    losses = [(s, r.metrics) for r, s in runs if r.metrics]
    if losses:
        parts += ["<h3>Training</h3>", key([s for _, s in runs], looks, band=False), '<div class="grid">',
                  picture(figure.draw_losses(losses, looks), f"t{index}-loss",
                          "Training loss: mean over seeds, thin lines for each. "
                          "Grey and dashed: did not fit, or unfinished."), "</div>"]
    parts += ["<h3>Runs</h3>",
              '<p class="note">The command that reproduces each run, its resolved config and where it ran.</p>']
    parts += [run(record, summary, looks) for record, summary in runs]
    return "\n".join(part for part in parts if part) + "\n</section>\n"


def picture(drawn, name, caption):
    return f"<figure>{figure.svg(drawn, name, caption)}<figcaption>{escape(caption)}</figcaption></figure>"


def run(record, summary, looks):
    state = summary.unfinished or ("did not fit" if summary.did_not_fit else f"finished, {words.fit(summary)} seeds fit")
    command = record.environment.get("command")
    environment = {k: v for k, v in record.environment.items() if k != "command"}
    return (f"<h4>{mark(summary, looks)}{escape(summary.label)} "
            f"<span class='note'>{escape(record.name)}: {escape(state)}</span></h4>"
            f'<pre class="command">{escape(command or "(the run has no record of its command)")}</pre>'
            + folded("Resolved config", record.config) + folded("Environment", environment))


def folded(title, data):
    text = escape(json.dumps(data, indent=2, ensure_ascii=False))
    return f"<details><summary>{title}</summary><pre>{text}</pre></details>"
