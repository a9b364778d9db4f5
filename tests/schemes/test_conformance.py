"""The conformance suite over every registered scheme, and over one that a user might write."""
import conformance
import jax.numpy as jnp
import pytest
from flax import nnx

from posjax.ops.bias import distances
from posjax.schemes.base import Scheme
from posjax.schemes.registry import SCHEMES, make_scheme


class Toy(Scheme):
    """Mixes content and position, as only the `logits` hook can: a query chooses how much it minds the distance."""
    relative = True

    def logits(self, q, k, q_positions, k_positions, *, visible, scale, features):
        logits = scale * jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
        minds = jnp.abs(q[..., 0]).astype(jnp.float32).transpose(0, 2, 1)[..., None]
        distance = jnp.abs(distances(q_positions, k_positions)).astype(jnp.float32)
        return logits - minds * (distance[:, None] if distance.ndim == 3 else distance[None, None])


def factory(name):
    """How the checks make a scheme: with random numbers only if it asks for them."""
    if name == "toy":
        return lambda: Toy(**conformance.DIMS)
    try:
        make_scheme(name, **conformance.DIMS)
    except ValueError:
        return lambda rngs=None: make_scheme(name, rngs=rngs or nnx.Rngs(0), **conformance.DIMS)
    return lambda: make_scheme(name, **conformance.DIMS)


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", ["toy", *SCHEMES.names()])
def test_conforms(name, check):
    check(factory(name))
