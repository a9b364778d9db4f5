"""The conformance suite over every registered scheme, and over one that a user might write."""
import functools

import jax.numpy as jnp
import pytest

from posjax import conformance
from posjax.ops.bias import distances
from posjax.schemes.base import Scheme
from posjax.schemes.registry import SCHEMES


class Toy(Scheme):
    """Mixes content and position, as only the `logits` hook can: a query chooses how much it minds the distance."""
    name, formula, reference = "toy", "logit - |q_0| |i - j|", "this file"
    relative = True

    def logits(self, q, k, q_positions, k_positions, *, visible, scale, features):
        logits = scale * jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
        minds = jnp.abs(q[..., 0]).astype(jnp.float32).transpose(0, 2, 1)[..., None]
        distance = jnp.abs(distances(q_positions, k_positions)).astype(jnp.float32)
        return logits - minds * (distance[:, None] if distance.ndim == 3 else distance[None, None])


# Kept, so that what one check has compiled serves the next.
subject = functools.cache(lambda name: conformance.subject(Toy if name == "toy" else name))


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", ["toy", *SCHEMES.names()])
def test_conforms(name, check):
    check(subject(name))
