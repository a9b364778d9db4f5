"""Variants: values of a config that differ between the replicas of one run, which is compiled once for all of them.

A config's `vary` is a tuple of "KEY=V,V"; every combination is a variant, a flat dict of overrides as
`{"train.learning_rate": 0.003, "scheme.base": 100.0}`. Each variant is trained with every seed. Imports no jax.
"""
import functools
import itertools
import json
import math

from posjax import config as configs
from posjax.errors import UserError, unknown

# Of the optimiser: all that `posjax.experiment.optimiser_numbers` reads.
OPTIMISER = ("train.learning_rate", "train.warmup_fraction", "train.final_lr_fraction", "train.beta1", "train.beta2",
             "train.weight_decay", "train.clip_norm")


def variants(config):
    """All variants of a config, those of its first key slowest; `({},)` where nothing is varied.

    Raises:
      ValueError: an entry that cannot be read, a key that does not exist or cannot be varied, no number, a value twice.
    """
    axes = {}
    for entry in config.get("vary", ()):  # configs of runs from before it existed lack it
        key, values = _read(config, entry)
        if key in axes:
            raise UserError(f"vary has {key} twice; give all of its values at once, as {key}=V,V.")
        axes[key] = values
    return _combinations(axes)


def num_replicas(config):
    """How many replicas a config trains: its seeds times its variants."""
    return config.num_seeds * len(variants(config))


def configured(config, variant):
    """The config of a run of that variant alone."""
    return configs.override(config, {"vary": (), **variant})


def recorded(config):
    """All variants of a run, from its config.json."""
    axes = (entry.partition("=") for entry in config.get("vary", ()))
    return _combinations({key: [float(word) for word in listed.split(",")] for key, _, listed in axes})


def recorded_config(config, variant):
    """The config.json of a run of that variant alone."""
    config = json.loads(json.dumps(config)) | {"vary": []}
    for key, value in variant.items():
        *path, last = key.split(".")
        functools.reduce(dict.__getitem__, path, config)[last] = value
    return config


def evals_of(rows, variant):
    """The records of evals.jsonl of a variant; those of a run that varies nothing name none."""
    return [row for row in rows if row.get("variant", {}) == variant]


def metrics_of(rows, variant):
    """The records of metrics.jsonl as those of a run of that variant alone; the speed is that of the whole run."""
    return [_metrics_of(row, variant) if "variants" in row else row for row in rows]


def _metrics_of(row, variant):
    own = [n for n, other in enumerate(row["variants"]) if other == variant]
    lists = {key: [value[n] for n in own] for key, value in row.items() if not isinstance(value, int | float)}
    return row | lists | {"learning_rate": row["learning_rate"][own[0]]}


def find(known, values):
    """The one of the variants `known` that has `values`, of as many keys as tell it from the others.

    Raises:
      ValueError: none has them, or several.
    """
    found = [variant for variant in known if all(variant.get(key) == value for key, value in (values or {}).items())]
    if len(found) == 1:
        return found[0]
    said = f"{len(found)} variants have {text(values)}" if values else f"The run has {len(known)} variants"
    raise UserError(f"{said}; say which, by the values of one of: {'; '.join(map(text, found or known))}.")


def wanted(words):
    """What `find` takes, of words "KEY=V"."""
    try:
        return {key: float(value) for key, _, value in (word.partition("=") for word in words)}
    except ValueError:
        raise UserError(f"variant {', '.join(words)} cannot be read; KEY=V is expected, as train.learning_rate=0.01.") from None


def text(variant):
    """`train.learning_rate=0.01, scheme.base=100.0`."""
    return ", ".join(f"{key}={value}" for key, value in variant.items())


def _combinations(axes):
    return tuple(dict(zip(axes, values)) for values in itertools.product(*axes.values()))


def _read(config, entry):
    """The key and the values of an entry."""
    key, equals, listed = str(entry).partition("=")
    if not equals or not isinstance(entry, str):
        raise UserError(f"vary={entry!r} cannot be read; KEY=V,V is expected, as train.learning_rate=0.003,0.01.")
    old = configs.get(config, key)
    if key.startswith("train.") and key not in OPTIMISER:
        raise unknown("number of the optimiser to vary:", key, OPTIMISER)
    if key not in OPTIMISER and not key.startswith("scheme."):
        raise UserError(f"{key} cannot be varied within a run, only numbers of the optimiser and of the scheme: "
                        f"{', '.join(OPTIMISER)}, scheme.KEY. A sweep can vary it.")
    if not isinstance(old, float | None):
        raise UserError(f"{key} cannot be varied within a run: it is {old!r}, and only a real number may differ between replicas "
                        "of one compiled program. A sweep can vary it.")
    try:
        values = [float(word) for word in listed.split(",")]
    except ValueError:
        raise UserError(f"vary={entry!r} cannot be read; numbers with commas are expected, as {key}=0.5,1.0.") from None
    for value in values:
        if not math.isfinite(value):
            raise UserError(f"vary={entry!r} has {value}; it must be finite.")
        if values.count(value) > 1:
            raise UserError(f"vary={entry!r} has {value} twice.")
    if len(values) < 2:
        raise UserError(f"vary={entry!r} has one value; give several, or set it with --config.{key}={values[0]}.")
    return key, values
