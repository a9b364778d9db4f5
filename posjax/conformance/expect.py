"""What a check expects, and the sentence that says what it found instead."""
import numpy as np


class CheckFailed(AssertionError):
    """A property does not hold; the message says what was expected and what was found, in one line."""


def that(condition, message):
    """Not `assert`, which `python -O` strips."""
    if not condition:
        raise CheckFailed(message)


def close(actual, expected, atol, what="the values"):
    actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    _same_shape(actual, expected, what)
    finite(actual, what)
    finite(expected, what)
    difference = np.abs(actual - expected).max(initial=0.0)
    that(difference <= atol, f"{what}: expected equal to within {atol:g}, found a difference of {difference:.3g}.")


def same(actual, expected, what="the values"):
    actual, expected = np.asarray(actual), np.asarray(expected)
    _same_shape(actual, expected, what)
    differing = (actual != expected) & ~((actual != actual) & (expected != expected))
    that(not differing.any(),
         f"{what}: expected equal bit for bit, found {differing.sum()} of {differing.size} different.")


def differ(actual, expected, by=1e-3, what="the values"):
    difference = np.abs(np.asarray(actual, np.float32) - np.asarray(expected, np.float32)).max(initial=0.0)
    that(difference > by, f"{what}: expected to differ by more than {by:g}, found a difference of {difference:.3g}.")


def finite(values, what="the values"):
    bad = ~np.isfinite(np.asarray(values, np.float32))
    that(not bad.any(), f"{what}: expected finite, found {bad.sum()} of {bad.size} NaN or infinite.")


def _same_shape(actual, expected, what):
    that(actual.shape == expected.shape, f"{what}: expected shape {expected.shape}, found {actual.shape}.")
