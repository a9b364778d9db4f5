"""Pairs of float32: as exact as they say, compiled too, where compilers contract and reorder."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.ops import double_float
from posjax.ops.rotary import Rotary

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(2, 2000)) * np.exp(RNG.normal(size=(2, 2000)))


def value(pair):
    return sum(np.asarray(part, np.float64) for part in pair)


# Where the terms of a sum cancel, its error is that of the terms.
@pytest.mark.parametrize(("function", "exact", "arguments", "scale"), [
    ("add", np.add, (X, Y), np.maximum(np.abs(X), np.abs(Y))),
    ("multiply", np.multiply, (X, Y), np.abs(X * Y)),
    ("expm1", np.expm1, (-np.exp(RNG.uniform(-9, 1, 2000)),), 1.0),
    ("log", np.log, (np.append(1 + np.exp(RNG.uniform(-20, 18, 2000)), 1.0),), 10.0),
])
def test_functions_are_right_to_46_bits(function, exact, arguments, scale):
    pairs = [double_float.from_host(x) for x in arguments]
    result = jax.jit(getattr(double_float, function))(*pairs)
    error = value(result) - exact(*map(value, pairs))
    assert np.abs(error / scale).max() < 2.0**-45


def test_integers_are_exact():
    n = np.array([0, 1, 4095, 4096, 2**24 + 1, 2**31 - 1], np.int32)
    pair = double_float.from_int(jnp.asarray(n))
    np.testing.assert_array_equal(value(pair), n)
    # The low part is a rest of the high one, which a product relies on.
    np.testing.assert_array_equal(pair[0], n.astype(np.float32))


def test_turns_of_the_device_are_those_of_the_host():
    turns = np.concatenate([RNG.uniform(0, 1, 50), np.exp(RNG.uniform(-20, 0, 50))])
    device = jax.jit(Rotary.from_turns)(double_float.from_host(turns))
    host = Rotary.from_inv_freq(2 * np.pi * turns)
    fixed = (np.asarray(r.turns, np.float64) * 2.0**-32 + np.asarray(r.rest, np.float64) for r in (device, host))
    np.testing.assert_allclose(*fixed, rtol=0, atol=1e-14)
