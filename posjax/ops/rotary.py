"""Rotation of queries and keys, with angles that stay exact at far positions."""
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posjax.errors import UserError, unknown

LAYOUTS = ("half_split", "interleaved")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotary:
    """A rotation as data: how far each pair of channels turns for one position.

    A frequency is held in turns a position, as a 32-bit fixed-point fraction and the float32 rest. The
    product of an integer position with the fraction wraps around by itself, as whole turns should, so an
    angle is right to 1e-6 rad at every int32 position, where a float32 product is off by 3e-2 rad at a million.

    Attributes:
      turns: uint32 `[r / 2]`, or `[B, r / 2]` where rows differ: the fraction of a turn in units of 2**-32.
      rest: float32, of the same shape: what the fraction leaves, in turns.
      amplitude: float32 scalar; cos and sin are multiplied by it (YaRN's attention factor).
      layout: "half_split" pairs channels (k, k + r/2); "interleaved" pairs (2k, 2k + 1).
    """
    turns: Any
    rest: Any
    amplitude: Any
    layout: str = dataclasses.field(metadata={"static": True}, default="half_split")

    @classmethod
    def from_inv_freq(cls, inv_freq, *, amplitude=1.0, layout="half_split"):
        """From inverse frequencies in radians a position, float64 `[r / 2]`, on the host."""
        if layout not in LAYOUTS:
            raise unknown("pair layout", layout, LAYOUTS)
        turns = np.mod(np.asarray(inv_freq, np.float64) / (2 * np.pi), 1.0)
        fixed = np.floor(turns * 2.0**32)
        rest = turns - fixed * 2.0**-32
        return cls(jnp.asarray(fixed.astype(np.uint32)), jnp.asarray(rest.astype(np.float32)),
                   jnp.float32(amplitude), layout)

    @classmethod
    def from_turns(cls, turns, *, amplitude=1.0, layout="half_split"):
        """From turns a position that were computed on the device, a pair of `posjax.ops.double_float`."""
        high, low = turns
        high = high - jnp.floor(high)
        fixed = (high * 2.0**32).astype(jnp.uint32)  # has no more digits than a float32
        return cls(fixed, (high - fixed.astype(jnp.float32) * 2.0**-32) + low, jnp.float32(amplitude), layout)

    @property
    def rotary_dim(self):
        return 2 * self.turns.shape[-1]

    def angles(self, positions):
        """Angles, whole turns taken off, float32 `[..., T, r / 2]`, for int32 `positions` of shape `[..., T]`.

        Where rows differ, `positions` are `[B, T]`, or `[1, T]` for all rows.
        """
        return self._turns_at(positions) * jnp.float32(2 * np.pi)

    def cos_sin(self, positions):
        """The cosines and sines of `angles(positions)`, float32 `[..., T, r / 2]` each, right to 2e-7.

        By the first terms of their series within an eighth of a turn of a quarter, which turns make exact. On a CPU that takes a
        tenth of the time of `jnp.cos` and `jnp.sin`, and is nearer.
        """
        turns = self._turns_at(positions)
        quarters = jnp.round(4 * turns)
        x = (turns - 0.25 * quarters) * jnp.float32(2 * np.pi)
        cos, sin = _series(x, 0), x * _series(x, 1)
        quarters = quarters.astype(jnp.int32)
        cos, sin = jnp.where(quarters & 1, sin, cos), jnp.where(quarters & 1, cos, sin)
        return jnp.where((quarters + 1) & 2, -cos, cos), jnp.where(quarters & 2, -sin, sin)

    def _turns_at(self, positions):
        p = positions.astype(jnp.int32)[..., None]
        rows = self.turns.shape[:-1]
        fold = rows + (1,) * (p.ndim - 1 - len(rows)) + self.turns.shape[-1:]
        wrapped = jax.lax.bitcast_convert_type(p, jnp.uint32) * self.turns.reshape(fold)
        turns = jax.lax.bitcast_convert_type(wrapped, jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-32)
        return turns + p.astype(jnp.float32) * self.rest.reshape(fold)


def _series(x, first):
    """`1 - x^2 / ((first + 1) (first + 2)) + ...`: of the cosine for 0, of `sin(x) / x` for 1; to 3e-8 up to pi/4."""
    total = jnp.float32(0)
    for term in reversed(range(5)):
        total = total * (x * x) + jnp.float32((-1)**term / math.factorial(first + 2 * term))
    return total


def check_positions(positions, shape, name="positions"):
    """Raises `ValueError` unless `positions` are 32-bit integers for `shape` = (B, T): of shape `[T]` or `[B, T]`."""
    batch, length = shape
    if not hasattr(positions, "shape"):
        raise UserError(f"{name} must be an array of integers; got {type(positions).__name__}.")
    if positions.shape not in ((length,), (batch, length)) or not jnp.issubdtype(positions.dtype, jnp.integer):
        raise UserError(f"{name} must be integers of shape {(length,)} or {(batch, length)}; "
                        f"got {positions.dtype} of shape {positions.shape}.")
    if isinstance(positions, np.ndarray) and positions.size:
        far = max(positions.min(), positions.max(), key=abs)
        if not -2**31 <= int(far) < 2**31:
            raise UserError(f"{name} reach {far}; positions are 32-bit integers, below {2**31}.")


def as_data(positions):
    """int32 positions to compute with, of those that a caller gave.

    Consecutive ones that are known when tracing become an iota: what follows from a literal, XLA would compute while it
    compiles, sines of a million positions among it.
    """
    if isinstance(positions, np.ndarray) and positions.ndim == 1 and (np.diff(positions) == 1).all():
        return jnp.arange(positions.size, dtype=jnp.int32) + jnp.int32(positions[0])
    return jnp.asarray(positions, jnp.int32)


def computed_in(x):
    """The dtype to compute with `x` in: float64 of float64, float32 of all others."""
    return jnp.float64 if jnp.result_type(x) == jnp.float64 else jnp.float32


def _made_once(x):
    """`x` `[..., n]`, as an array of its own that XLA does not make anew for every head, and once more for the gradient.

    XLA on a CPU does not heed a barrier, and fuses whatever is no product: there it is multiplied by 1, as a matrix, which
    changes no bit. A rotation forward and backward took a fifth of the time, at 4,096 tokens and 8 heads of 64 channels.
    """
    def product(x):
        return jnp.matmul(x, jnp.eye(x.shape[-1], dtype=x.dtype), precision=jax.lax.Precision.HIGHEST)
    return jax.lax.platform_dependent(x, cpu=product, default=jax.lax.optimization_barrier)


def apply_rotary(x, positions, rotary):
    """Rotates the first `rotary.rotary_dim` channels of `x`; the others pass through bit for bit.

    After the definition in Su et al. 2021 (RoFormer, arXiv 2104.09864). Computed in float32, or in float64 if `x` is that.

    Args:
      x: `[B, T, H, Dh]`.
      positions: int32 `[T]`, or `[B, T]` where rows differ.
      rotary: the rotation.

    Returns:
      `[B, T, H, Dh]` in the dtype of `x`.

    Raises:
      ValueError: positions of another shape (they would be broadcast) or not integers.
    """
    check_positions(positions, x.shape[:2])
    r = rotary.rotary_dim
    rows = positions if positions.ndim == 2 else positions[None]
    cos, sin = (_made_once(wave * rotary.amplitude)[:, :, None, :] for wave in rotary.cos_sin(rows))
    rotated = x[..., :r].astype(computed_in(x))
    cos, sin = cos.astype(rotated.dtype), sin.astype(rotated.dtype)
    if rotary.layout == "interleaved":
        a, b = rotated[..., 0::2], rotated[..., 1::2]
    else:
        a, b = rotated[..., : r // 2], rotated[..., r // 2:]
    a, b = a * cos - b * sin, b * cos + a * sin
    out = jnp.stack([a, b], -1).reshape(rotated.shape) if rotary.layout == "interleaved" else jnp.concatenate([a, b], -1)
    out = out.astype(x.dtype)
    # Not of an empty rest: its gradient, zeros to be added, would cost a third of the backward pass (jax 0.12, CPU).
    return out if r == x.shape[-1] else jnp.concatenate([out, x[..., r:]], -1)
