"""Additive biases on attention logits that are never built whole.

A bias is a pytree with one method, `block(q_positions, k_positions)`: the float32 bias of a block of queries
against a block of keys, `[..., H, Q, K]` for int32 positions `[..., Q]` and `[..., K]`. A backend asks for the
blocks that it needs, or recognises a structure that it can make by itself.
"""
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


def distances(q_positions, k_positions):
    """`i - j` as int32 `[..., Q, K]`: positive where the key lies before the query."""
    return q_positions[..., :, None] - k_positions[..., None, :]


def per_head(values, block):
    """A value for each head, `[H]`, as float32 of a shape that meets blocks `[..., 1, Q, K]`."""
    return jnp.asarray(values, jnp.float32).reshape((1,) * (block.ndim - 3) + (-1, 1, 1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearBias:
    """`-slope * |i - j|`, one slope a head.

    The distance is taken before it is scaled: `slope * j` alone would lose the nearest keys in bfloat16.

    Attributes:
      slopes: float32 `[H]`.
    """
    slopes: Any

    def block(self, q_positions, k_positions):
        distance = jnp.abs(distances(q_positions, k_positions)).astype(jnp.float32)[..., None, :, :]
        return -per_head(self.slopes, distance) * distance
