"""Results in words and numbers: the same in the terminal, on the page and in a figure's legend."""
import json

from posjax.eval.statistics import evaluated_positions, setting, summarize
from posjax.nested import flatten
from posjax.registry import beside_scheme

GOOD, FAILED = 0.9, 0.05


def task_key(record):
    """Runs with equal keys may be compared: the same task with the same hyper-parameters and training lengths."""
    return json.dumps([setting(record.config, "task"), setting(record.config, "train.lengths")], sort_keys=True)


def differing(records):
    """Sorted dotted config keys in which the runs differ."""
    flats = [flatten(record.config) for record in records]
    keys = sorted(set().union(*flats)) if flats else []
    return [key for key in keys if len({json.dumps(flat.get(key), sort_keys=True) for flat in flats}) > 1]


def labels(records):
    """What each run of one task is called: its scheme, and where several runs have it, what tells them apart."""
    names = [", ".join([setting(record.config, "scheme.name"), *beside_scheme(record.config)]) for record in records]
    result = []
    for record, name in zip(records, names):
        same = [other for other, other_name in zip(records, names) if other_name == name]
        flat = flatten(record.config)
        told = ", ".join(f"{key.removeprefix('scheme.').removeprefix('train.')}={plain(flat.get(key))}"
                         for key in differing(same))
        result.append(f"{name} ({told})" if told else name)
    # Copies of one run in two places are told apart by where they are.
    return [f"{label} [{record.name}]" if result.count(label) > 1 else label for label, record in zip(result, records)]


def plain(value):
    return value if isinstance(value, str) else json.dumps(value)


def sections(records):
    """Runs grouped by task: a list of (records, summaries), tasks and schemes in the order given.

    A run evaluated under several position policies comes once for each, that of its config first.
    """
    groups = {}
    for record in records:
        groups.setdefault(task_key(record), []).append(record)
    return [_section(group) for group in groups.values()]


def _section(group):
    repeated, summaries = [], []
    for record, label in zip(group, labels(group)):
        own = evaluated_positions(record.config)
        for policy in dict.fromkeys([own, *(row.get("positions", own) for row in record.evals)]):
            repeated.append(record)
            summaries.append(summarize(record.evals, record.config, finished=record.done, failed=record.failed, positions=policy,
                                       label=label if policy == own else f"{label} [positions {policy}]"))
    return repeated, summaries


def trim(value):
    """A length: whole numbers without decimals, means with one."""
    return f"{value:.0f}" if abs(value - round(value)) < 0.05 else f"{value:.1f}"


def effective(length, *, ascii_only=False):
    """An `EffectiveLength` in words: "24", "22.7 (seeds 20 to 24)", "≥ 90.7 (seeds 32 to ≥ 128)", "< 4"."""
    at_least, seeds = (">=", "") if ascii_only else ("≥ ", "seeds ")

    def one(value, is_open):
        return f"< {length.shortest}" if not value else (at_least if is_open else "") + trim(value)

    opened = [length.seeds[seed] for seed in length.open]
    if length.min == length.max:
        return one(length.mean, len(opened) > 0)
    low = one(length.min, all(value in opened for value in length.seeds.values()))
    return f"{(at_least if opened else '') + trim(length.mean)} ({seeds}{low} to {one(length.max, length.max in opened)})"


def fit(summary):
    """"3/3": seeds that fit of all seeds."""
    return f"{len(summary.fit)}/{len(summary.seeds)}" if summary.fit_judged else f"?/{len(summary.seeds)}"


def times(ratio):
    return f"{ratio:.2f}".rstrip("0").rstrip(".") + "×"


def with_interval(estimate):
    """"0.47 (95 % interval 0.31 to 0.63)"; for one seed "0.47 (one seed, no interval)"."""
    if estimate.interval is None:
        return f"{estimate.mean:.2f} (one seed, no interval)"
    low, high = estimate.interval
    return f"{estimate.mean:.2f} (95 % interval {low:.2f} to {high:.2f})"


def join(parts):
    parts = list(parts)
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def probe_length(summaries):
    """The evaluated length beyond training that is nearest to twice the longest trained one; None if there is none."""
    train_max = summaries[0].train_max
    beyond = {n for s in summaries if s.has_result for n in s.exact_match if n > train_max}
    return min(beyond, key=lambda n: (abs(n - 2 * train_max), n), default=None)


def headline(summaries):
    """(headline, further sentences) that say what survives beyond the training length, made from the numbers."""
    results = [s for s in summaries if s.has_result]
    train_max, task = summaries[0].train_max, summaries[0].task
    trained = f"trained on {task} up to length {train_max}"
    if not results:
        return f"No result yet for runs {trained}.", remarks(summaries)
    probe = probe_length(summaries)
    if probe is None:
        return f"Nothing was evaluated beyond the training length, {train_max}.", remarks(summaries)

    beyond = sorted((s for s in results if s.effective[GOOD].mean > train_max), key=lambda s: -s.effective[GOOD].mean)
    keeping = [f"{s.label} to length {effective(s.effective[GOOD])}, {times(s.effective[GOOD].mean / train_max)}"
               for s in beyond]
    others = [s for s in results if s not in beyond and not s.ends]
    if beyond:
        first = (f"Of the schemes {trained}, " if len(results) > 1 else f"A model {trained}: ")
        head = f"{first}{len(beyond)} of {len(results)} stay{'s' * (len(beyond) == 1)} at or above {GOOD} exact match beyond it: "
        head += "; ".join(keeping[:3]) + (f"; and {len(keeping) - 3} more." if len(keeping) > 3 else ".")
    else:
        head = f"No scheme {trained} stays at or above {GOOD} exact match beyond it."

    lines = ["Also: " + "; ".join(keeping[3:]) + "."] if len(keeping) > 3 else []
    at = [(s, s.exact_match[probe]) for s in results if probe in s.exact_match]
    at.sort(key=lambda pair: -pair[1].mean)
    alive = [f"{s.label} {with_interval(e)}" for s, e in at if e.mean >= FAILED]
    gone = [f"{s.label} (best seed {e.max:.2f})" for s, e in at if e.mean < FAILED]
    where = f"At length {probe}, {times(probe / train_max)} the longest trained"
    if alive:
        lines.append(f"{where}, exact match: {', '.join(alive)}" + (f"; below {FAILED}: {join(gone)}." if gone else "."))
    elif gone:
        lines.append(f"{where}, every scheme is below {FAILED}: {join(gone)}.")
    if beyond and others:
        lines.append("Not beyond the training length: "
                     + join(f"{s.label} (to {effective(s.effective[GOOD])})" for s in others) + ".")
    return head, lines + remarks(summaries)


def remarks(summaries):
    """Sentences on what the numbers alone do not say: positions that are not the usual ones, and what has no result."""
    policies = {}
    for s in summaries:
        if (s.trained_positions, s.positions) != ("sequential", "sequential"):
            policies.setdefault((s.trained_positions, s.positions), []).append(s.label)
    lines = [f"Positions of {join(labels)}: {train} in training, {evaluation} in evaluation."
             for (train, evaluation), labels in policies.items()]
    return lines + absences(summaries)


def absences(summaries):
    """Sentences on what has no result, or not everywhere, and why."""
    lines = [f"{s.label} did not fit: {len(s.fit)} of {len(s.seeds)} seeds reach {s.fit_threshold} exact match at every "
             f"evaluated length within the training lengths, so it has no extrapolation result."
             for s in summaries if s.did_not_fit and not s.unfinished]
    lines += [f"{s.label}: only {len(s.fit)} of {len(s.seeds)} seeds fit; the numbers are over those."
              for s in summaries if s.has_result and len(s.fit) < len(s.seeds)]
    lines += [f"{s.label}: no evaluated length lies within the training lengths ({s.train_min} to {s.train_max}), "
              f"so whether it fits was not judged." for s in summaries if s.has_result and not s.fit_judged]
    for s in summaries:
        for reason in s.ends if s.has_result else ():
            lines.append(f"{s.label}: {reason} (length {spans([n for n, r in s.statuses.items() if r == reason], s.lengths)}).")
    return lines + [f"{s.label} {'has' if s.absence == 'failed' else 'is'} {s.unfinished}." for s in summaries if s.unfinished]


def spans(lengths, evaluated):
    """"20 and longer" where nothing longer was evaluated with a result, else the lengths."""
    if list(lengths) == [n for n in evaluated if n >= lengths[0]]:
        return f"{lengths[0]} and longer" if len(lengths) > 1 else str(lengths[0])
    return ", ".join(map(str, lengths))
