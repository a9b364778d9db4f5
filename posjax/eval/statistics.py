"""From raw evaluation rows to a result with its uncertainty: which seeds fit, intervals over them, effective lengths.

Works on plain records (dicts as in evals.jsonl and config.json) and imports no jax, so that a report is quick.
"""
import dataclasses
import math

from posjax.errors import UserError
from posjax.eval.estimates import EffectiveLength, Estimate
from posjax.registry import described

THRESHOLDS = (0.9, 0.5)


@dataclasses.dataclass(frozen=True)
class Point:
    """One seed at one length, averaged over the task's conditions. Without a result, the values are None."""
    exact_match: float | None
    token_accuracy: float | None
    per_position: tuple
    status: str


@dataclasses.dataclass(frozen=True)
class Summary:
    """The result of one run (one scheme, several seeds) at its last evaluated step.

    `exact_match`, `token_accuracy` (teacher-forced), `per_position`, `by_condition` are over the seeds that fit. Where none
    does, there is no extrapolation result: they are over all seeds, and end with the training lengths. `curves` keeps
    every seed at every length. A length is in `exact_match` only if every seed that counts has a value there.

    An unfinished run (`unfinished` says how far it is) has the numbers of its last evaluation here, for a plot during
    training; tables and comparisons name it and leave its numbers out, since they are not those of the same training.
    """
    label: str
    scheme: str
    task: str
    trained_positions: str    # the position policy in training
    positions: str            # and that of these evaluations
    train_min: int
    train_max: int
    step: int | None
    steps: int
    unfinished: str | None
    fit_threshold: float
    fit_judged: bool          # False: no evaluated length lies within the training lengths
    seeds: tuple
    fit: tuple                # the seeds that fit; all of them where it could not be judged
    lengths: tuple
    curves: dict              # seed -> length -> Point
    exact_match: dict         # length -> Estimate
    token_accuracy: dict      # length -> Estimate
    per_position: dict        # length -> mean accuracy at answer token 0, 1, ...
    by_condition: dict        # condition as ((key, value), ...) -> length -> Estimate of exact match
    statuses: dict            # length -> why there is no result
    effective: dict           # threshold -> EffectiveLength; empty without a result
    num_examples: tuple       # the distinct numbers of examples a row, ascending

    @property
    def absence(self):
        """"unfinished" or "failed" of a run without a final result, None of one that is finished."""
        return self.unfinished and self.unfinished.partition(":")[0]

    @property
    def did_not_fit(self):
        return bool(self.seeds) and not self.fit

    @property
    def has_result(self):
        """Finished and fitted: may stand in a comparison beyond the training length."""
        return self.unfinished is None and bool(self.fit)

    @property
    def ends(self):
        """Distinct reasons why lengths have no result, in the order of length."""
        return tuple(dict.fromkeys(self.statuses.values()))


def setting(config, path):
    """The value at dotted `path` of a nested config; a missing one is a `UserError`."""
    value = config
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            raise UserError(f"The run's config has no {path}; is it a run of posjax?")
        value = value[key]
    return value


def evaluated_positions(config):
    """The position policy that a config evaluates with, as its rows name it."""
    return _policy(config, "eval")


def _policy(config, part):
    section = config.get("positions", {}).get(part)
    return described(section) if section else "sequential"


def final_rows(rows):
    """The rows of the highest step, one for each (seed, length, condition).

    Of rows with equal step, seed, length, condition, number of examples the last counts; of different numbers of
    examples the largest.
    """
    step = max((row["step"] for row in rows), default=None)
    best = {}
    for row in rows:
        if row["step"] == step:
            key = (row["seed"], row["length"], condition_key(row))
            if key not in best or row["num_examples"] >= best[key]["num_examples"]:
                best[key] = row
    return best


def condition_key(row):
    return tuple(sorted((row.get("condition") or {}).items()))


def number(value):
    """A finite float, or None for null and NaN."""
    return float(value) if value is not None and math.isfinite(value) else None


def mean_of(values):
    """The mean, or None if there is nothing or a value is missing."""
    values = list(values)
    return None if not values or None in values else math.fsum(values) / len(values)


def mean_positions(curves):
    """The mean of curves over answer tokens, over those that have the token."""
    longest = max((len(curve) for curve in curves), default=0)
    columns = ([curve[i] for curve in curves if i < len(curve)] for i in range(longest))
    return tuple(math.fsum(column) / len(column) for column in columns)


def point(rows):
    """One seed at one length: the mean over the rows of its conditions; a row without a result leaves none."""
    status = next((row["status"] for row in rows if row.get("status", "ok") != "ok"), "ok")
    exact = mean_of(number(row["exact_match"]) for row in rows)
    if exact is None and status == "ok":
        status = "not a number"
    if status != "ok":
        return Point(None, None, (), status)
    return Point(exact, mean_of(number(row.get("token_accuracy")) for row in rows),
                 mean_positions([row.get("per_position") or () for row in rows]), "ok")


def effective_length(curve, threshold):
    """(length, open) of one seed's `{length: exact match or None}`; see `EffectiveLength`."""
    reached = 0
    for length in sorted(curve):
        if curve[length] is None or curve[length] < threshold:
            return reached, False
        reached = length
    return reached, bool(curve)


def _lost(final, config):
    """The lengths of the config that not every seed has a final row of."""
    return sorted({n for n in config["eval"].get("lengths", ()) for s in {seed for seed, *_ in final} if n not in
                   {length for seed, length, _ in final if seed == s}})


def summarize(rows, config, *, label=None, finished=True, failed=None, positions=None):
    """The result of a run from its evaluation rows.

    Args:
      rows: records as in evals.jsonl, of one variant (`posjax.variants`).
      config: the resolved config, nested dicts.
      label: what it is called beside others; the scheme's name if not given.
      finished: whether the run says that it is done.
      failed: the record of a run that diverged (see `RunDir.failed`), or None.
      positions: the position policy whose evaluations count, as the rows name it; None for the config's. Rows that name none
        are of the config's, too.

    Returns:
      a `Summary`. A run whose last evaluation is not that of its last step counts as unfinished whatever it says.
    """
    if any(row.get("variant") != rows[0].get("variant") for row in rows):
        raise UserError("The evaluations are of several variants, whose seeds are no seeds of one another: summarize each alone.")
    own = evaluated_positions(config)
    positions = positions or own
    rows = [row for row in rows if row.get("positions", own) == positions]
    final = final_rows(rows)
    step = max((row["step"] for row in rows), default=None)
    steps = setting(config, "train.steps")
    train_min, train_max = setting(config, "train.lengths.min"), setting(config, "train.lengths.max")
    threshold = setting(config, "eval.fit_threshold")
    unfinished = None
    if failed:
        unfinished = f"failed: {failed['reason'].rstrip('.')}"
    elif step is None:
        unfinished = "unfinished: no evaluation yet"
    elif step < steps or not finished:
        unfinished = f"unfinished: last evaluation at step {step} of {steps}" + (", not complete" if step >= steps else "")
    elif positions == own and (lost := _lost(final, config)):
        unfinished = (f"unfinished: records of the final evaluation are missing (length {', '.join(map(str, lost))}); "
                      "the command that made the run evaluates again")

    groups = {}
    for (seed, length, _), row in final.items():
        groups.setdefault(seed, {}).setdefault(length, []).append(row)
    curves = {seed: {n: point(groups[seed][n]) for n in sorted(groups[seed])} for seed in sorted(groups)}
    lengths = tuple(sorted({length for curve in curves.values() for length in curve}))
    trained = [length for length in lengths if train_min <= length <= train_max]

    def fits(curve):
        return all(n in curve and curve[n].exact_match is not None and curve[n].exact_match >= threshold for n in trained)

    seeds = tuple(curves)
    fit = tuple(seed for seed in seeds if fits(curves[seed]))
    counted = fit or seeds
    shown = lengths if fit else tuple(n for n in lengths if n <= train_max)

    def over_seeds(value):
        """{length: Estimate} of `value(seed, length)`, where every seed that counts has one."""
        found = {n: [value(seed, n) for seed in counted] for n in shown}
        return {n: Estimate(tuple(values)) for n, values in found.items() if values and None not in values}

    def of_point(name):
        return over_seeds(lambda seed, n: getattr(curves[seed][n], name) if n in curves[seed] else None)

    def of_condition(condition):
        return over_seeds(lambda seed, n: number(final.get((seed, n, condition), {}).get("exact_match")))

    exact = of_point("exact_match")
    statuses = {}
    for n in lengths:
        if n not in exact and n in shown:
            reasons = [curves[seed][n].status if n in curves[seed] else "not evaluated for every seed" for seed in counted]
            statuses[n] = next(reason for reason in reasons if reason != "ok")
    effective = {}
    for limit in THRESHOLDS if fit else ():
        found = {s: effective_length({n: p.exact_match for n, p in curves[s].items()}, limit) for s in fit}
        effective[limit] = EffectiveLength(limit, {s: n for s, (n, _) in found.items()},
                                           frozenset(s for s, (_, is_open) in found.items() if is_open), lengths[0])
    conditions = sorted({condition for _, _, condition in final if condition}, key=str)
    return Summary(
        label=label or setting(config, "scheme.name"), scheme=setting(config, "scheme.name"),
        task=setting(config, "task.name"), train_min=train_min, train_max=train_max, step=step, steps=steps,
        trained_positions=_policy(config, "train"), positions=positions, unfinished=unfinished, fit_threshold=threshold,
        fit_judged=bool(trained), seeds=seeds, fit=fit, lengths=lengths, curves=curves, exact_match=exact,
        token_accuracy=of_point("token_accuracy"),
        per_position={n: mean_positions([curves[seed][n].per_position for seed in counted]) for n in exact},
        by_condition={condition: of_condition(condition) for condition in conditions}, statuses=statuses,
        effective=effective, num_examples=tuple(sorted({row["num_examples"] for row in final.values()})))
