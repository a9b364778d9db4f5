"""Running sums and lookups along the keys of a row."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.ops.rows import look_up, reverse_cumsum, sum_by_index

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("count", [1, 64, 65, 130, 4099])  # one block, a partial one, and blocks of blocks
def test_reverse_cumsum_is_that_of_float64(count):
    x = RNG.uniform(size=(2, 3, count)).astype(np.float32)
    expected = np.cumsum(x[..., ::-1].astype(np.float64), -1)[..., ::-1]
    # Of sums in blocks: a dozen roundings of the largest.
    np.testing.assert_allclose(reverse_cumsum(jnp.asarray(x)), expected, rtol=0, atol=12 * 6e-8 * count)


def test_zeros_leave_no_trace_in_a_sum():
    x = np.zeros((1, 200), np.float32)
    x[:, 100:150] = RNG.uniform(size=50)
    sums = np.asarray(reverse_cumsum(jnp.asarray(x)))
    assert (sums[:, 150:] == 0).all()
    assert (sums[:, :100] == sums[:, 100]).mean() > 0.3  # whole blocks of zeros repeat the sum bit for bit
    longer = np.concatenate([x, np.zeros((1, 56), np.float32)], 1)
    np.testing.assert_array_equal(reverse_cumsum(jnp.asarray(longer))[:, :200], sums)


def test_lookups_and_their_transpose():
    tables, index = RNG.normal(size=(2, 3, 5, 2)).astype(np.float32), RNG.integers(0, 5, (2, 3, 7)).astype(np.int32)
    found = look_up(jnp.asarray(tables), index)
    np.testing.assert_array_equal(found, np.take_along_axis(tables, index[..., None], 2))
    np.testing.assert_array_equal(look_up(jnp.asarray(tables[..., 0]), index), found[..., 0])

    x = RNG.normal(size=(2, 3, 7)).astype(np.float32)
    summed = sum_by_index(jnp.asarray(x), index, 5)
    expected = np.stack([np.where(index == n, x, 0).sum(-1) for n in range(5)], -1)
    np.testing.assert_allclose(summed, expected, rtol=0, atol=1e-6)
    _, pull = jax.vjp(lambda t: look_up(t, index), jnp.asarray(tables[..., 0]))
    np.testing.assert_allclose(pull(jnp.asarray(x))[0], expected, rtol=0, atol=1e-6)
