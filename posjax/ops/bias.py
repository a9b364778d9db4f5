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


def block_of(bias, q_positions, k_positions):
    """`bias.block(...)`, by way of the distances alone where the bias depends on no more and the positions are consecutive.

    A block of n x m tokens has n + m - 1 distances: the bias is made for those, then laid out along the diagonals.

    Args:
      bias: a lazy bias; with an attribute `of_distance = True` where `i - j` decides and making it costs more than a copy.
      q_positions, k_positions: int32 `[..., Q]`, `[..., K]`.

    Returns:
      float32 `[..., H, Q, K]`.
    """
    if not getattr(bias, "of_distance", False) or q_positions.ndim > 1:
        return bias.block(q_positions, k_positions)
    q_len, k_len = q_positions.shape[0], k_positions.shape[0]

    def consecutive(positions):
        return (positions == positions[0] + jnp.arange(positions.shape[0], dtype=jnp.int32)).all()

    def along_diagonals():
        # Entry (i, j) is value q_len - 1 - i + j of those from the largest distance down.
        distance = q_positions[-1] - k_positions[0] - jnp.arange(q_len + k_len - 1, dtype=jnp.int32)
        values = bias.block(distance, jnp.zeros(1, jnp.int32))[..., 0]
        heads, count = values.shape
        # Copies of the values, one entry longer than the rows that are read from them: each row starts one entry earlier.
        copies = jnp.broadcast_to(jnp.pad(values, ((0, 0), (0, 1)))[:, None], (heads, q_len, count + 1))
        return copies.reshape(heads, -1)[:, :q_len * count].reshape(heads, q_len, count)[:, :, q_len - 1:]
    return jax.lax.cond(consecutive(q_positions) & consecutive(k_positions), along_diagonals,
                        lambda: bias.block(q_positions, k_positions))


def beyond_linear(call):
    """The reason why a kernel that makes no logits but `scale * q.k` and a `LinearBias` cannot serve `call`, or None."""
    if call.logits is not None or call.values is not None:
        return "the scheme makes its own " + ("logits" if call.logits is not None else "addition to the values")
    if call.bias is not None and not isinstance(call.bias, LinearBias):
        return f"its bias is a {type(call.bias).__name__}, not linear in the distance"
    return None
