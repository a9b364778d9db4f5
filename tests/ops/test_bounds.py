import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from posjax.conformance import subject
from posjax.ops.bounds import clamp
from posjax.schemes.registry import SCHEMES

BOUNDED = [name for name in SCHEMES.names() if subject(name).make().bounds()]


def test_what_left_its_bounds_can_return_but_goes_no_further():
    # A plain clip has half of the gradient or none at a bound, where some parameters start, and none beyond.
    x = jnp.array([-0.5, 0.01, 1.0, 2.0, 3.0])
    kept, pull = jax.vjp(lambda x: clamp(x, 0.01, 2.0), x)
    np.testing.assert_array_equal(kept, jnp.array([0.01, 0.01, 1.0, 2.0, 2.0]))
    np.testing.assert_array_equal(pull(-jnp.ones(5))[0], [-1, -1, -1, -1, 0])  # descent raises x
    np.testing.assert_array_equal(pull(jnp.ones(5))[0], [0, 1, 1, 1, 1])


def test_schemes_have_bounds():
    assert {"kerple", "pope"} <= set(BOUNDED)


@pytest.mark.parametrize("name", BOUNDED)
def test_clamped_parameters_give_the_same_and_take_gradients_in_parts(name):
    scheme = subject(name).make()
    for parameter, (low, high) in scheme.bounds().items():
        learned = getattr(scheme, parameter)
        learned[...] = jnp.linspace(max(low, -9.0) - 1, min(high, 9.0) + 1, learned.size).reshape(learned.shape)
    graphdef, raw = nnx.split(scheme)

    def clamped(raw):
        scheme = nnx.merge(graphdef, raw)
        scheme.clamp_parameters()
        return nnx.state(scheme)

    def loss(state, factor):
        scheme = nnx.merge(graphdef, state)
        return factor * sum(jnp.sin(scheme.within(parameter)).sum() for parameter in scheme.bounds())
    inside, pull = jax.vjp(clamped, raw)
    assert loss(inside, 1.0) == loss(raw, 1.0)
    assert all((a[...] != b[...]).any() for a, b in zip(jax.tree.leaves(raw), jax.tree.leaves(inside)))
    # A batch whose halves pull in opposite ways: the smaller pull must not get through on its own.
    parts = jax.tree.map(jnp.add, jax.grad(loss)(inside, 3.0), jax.grad(loss)(inside, -1.0))
    for left, right in zip(jax.tree.leaves(pull(parts)[0]), jax.tree.leaves(jax.grad(loss)(raw, 2.0))):
        np.testing.assert_allclose(left, right, rtol=1e-6)
