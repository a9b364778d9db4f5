"""Helpers that a config's `sweep()` combines: each yields flat overrides, as `{"scheme.name": "rope", "seed": 1}`."""
import itertools

from posjax.errors import UserError


def sweep(key, values):
    """One override a value: `sweep("train.learning_rate", [1e-3, 3e-3])`."""
    return [{key: value} for value in values]


def product(*sweeps):
    """Every combination of one override from each."""
    return [_merge(parts) for parts in itertools.product(*(list(s) for s in sweeps))]


def zip(*sweeps):
    """The first of each together, then the second of each, and so on; all must have the same number."""
    sweeps = [list(s) for s in sweeps]
    counts = [len(s) for s in sweeps]
    if len(set(counts)) > 1:
        raise UserError(f"zip needs sweeps of equal length; got {counts}.")
    return [_merge(parts) for parts in itertools.zip_longest(*sweeps)]


def chain(*sweeps):
    """One after another."""
    return [overrides for s in sweeps for overrides in s]


def _merge(parts):
    merged = {}
    for part in parts:
        if both := merged.keys() & part.keys():
            raise UserError(f"Two parts of a sweep set {', '.join(sorted(both))}.")
        merged |= part
    return merged
