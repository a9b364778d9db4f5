"""8-bit keys and values are as close as they say."""
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.ops.caches.codecs import decode, encode, quantisation_error

X = np.random.default_rng(0).normal(size=(2, 5, 3, 16)).astype(np.float32) * np.asarray([1e-3, 1.0, 1e4], np.float32)[:, None]


def test_no_element_is_off_by_more_than_half_a_step_of_its_token_and_head():
    held = encode(X, "int8")
    assert held.steps.dtype == jnp.int8 and held.scales.shape == (2, 5, 3) and held.scales.dtype == jnp.float32
    off = np.abs(decode(held, jnp.float32) - X) / np.abs(X).max(-1, keepdims=True)
    assert 0.9 / 254 < off.max() <= 1.001 / 254


def test_zeros_stay_zeros_and_the_largest_stay_as_they_are():
    zeros = np.zeros((1, 1, 1, 4), np.float32)
    np.testing.assert_array_equal(decode(encode(zeros, "int8"), jnp.float32), zeros)
    np.testing.assert_allclose(decode(encode(zeros - 3e38, "int8"), jnp.float32), zeros - 3e38, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_error_is_told(dtype):
    """Uniform over a step of max/127, of numbers with a root mean square of 1: about 1 / (127 sqrt(12)) times the maximum."""
    x = jnp.asarray(X, dtype)
    expected = np.linalg.norm(decode(encode(x, "int8"), jnp.float32) - np.asarray(x, np.float32)) / np.linalg.norm(
        np.asarray(x, np.float32))
    assert float(quantisation_error(x)) == pytest.approx(expected, rel=1e-5)
    assert 2e-3 < expected < 8e-3
    assert float(quantisation_error(jnp.zeros((1, 4)))) == 0
