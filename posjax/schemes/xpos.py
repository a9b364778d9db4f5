import math

import jax.numpy as jnp
import numpy as np

from posjax.errors import UserError
from posjax.ops.rotary import apply_rotary, check_positions
from posjax.schemes.base import concrete
from posjax.schemes.registry import register_scheme
from posjax.schemes.rope import RoPE


@register_scheme("xpos")
class XPos(RoPE):
    """xPos: RoPE whose scores also decay with the distance, each pair at its own rate.

    Pair k of a query at position p is multiplied by `zeta_k ** ((p - c) / scale_base)` and that of a key by its inverse,
    so that their product carries `zeta_k ** ((i - j) / scale_base)`, whatever the center c;
    `zeta_k = (2k / Dh + gamma) / (1 + gamma)`. Sun et al. 2022 (arXiv 2212.10554).

    One side grows as the other shrinks, so c decides only which positions fit into the numbers of a dtype: those up to
    26,770 from c in float32 and bfloat16, 2,974 in float16 (with the defaults, at any head_dim), where channels of up to 45
    (float16; 2**32 in the others) still fit. A position beyond is an error where its value can be read, and NaN under jit.

    Args:
      base: as in rope.
      scale_base: B, positions over which a pair decays by its zeta.
      gamma: how much milder the decay is than `2k / Dh` alone, above 0.
      center: c, a position; keys stay in a cache as they were made. None for the middle of the sequence, as published,
        which fits twice as many positions but moves as the sequence grows: a cache then keeps raw keys.
      layout: as in rope.

    Training and evaluation:
      The same at any length, up to `max_length`: the decay goes on as it does within the trained length, and at
      scale_base times ten little is left of the fast pairs. The paper also makes attention blockwise when it evaluates, which
      is a window (`attend(..., window=)`), not part of this scheme.

    Where implementations differ:
      The center is ceil(T/2) in torchscale, floor(T/2) in x-transformers and rotary-embedding-torch, floor((T-1)/2) here:
      queries and keys differ, scores do not. scale_base is 512 in all three and here; 2048 in NeMo.
    """
    formula = "as rope, and logit's pair k times zeta_k^((i - j)/B), zeta_k = (2k/Dh + gamma)/(1 + gamma)"
    reference = "Sun et al. 2022, arXiv 2212.10554"
    cost = "rotates and scales q and k: O(T d)"
    causal_only = True  # a key after its query would grow with the distance

    def __init__(self, *, base=10_000.0, scale_base=512.0, gamma=0.4, center: int | None = None, layout="interleaved", **dims):
        super().__init__(base=base, layout=layout, **dims)
        for name, value in (("scale_base", scale_base), ("gamma", gamma)):
            if not value > 0:
                raise UserError(f"xpos's {name} is {value}; it must be above 0.")
        self.scale_base, self.gamma, self.center = scale_base, gamma, center
        self.depends_on_length = center is None
        if (reach := self.reach(jnp.float32)) < 1:
            raise UserError(f"xpos's scale_base is {scale_base}; with gamma {gamma} a single position leaves float32.")
        if center is not None and not 0 <= center <= reach:
            raise UserError(f"xpos's center is {center}; it must be from 0 to {reach}, or None for the middle of the sequence.")
        self.max_length = min(1 + reach + (reach if center is None else center), 2**31 - 1)

    def rotary(self, length=None):
        """None: what is done to queries and keys is more than a rotation."""
        return None

    def rates(self):
        """By how many octaves (powers of two) a query's pairs change for one position, float64 `[Dh / 2]`, none above 0."""
        share = np.arange(0, self.head_dim, 2) / self.head_dim
        return np.log2((share + self.gamma) / (1 + self.gamma)) / self.scale_base

    def reach(self, dtype):
        """The largest distance from the center whose amplitudes leave a channel a quarter of the exponents of `dtype`."""
        octaves = -0.75 * int(jnp.finfo(dtype).minexp)
        return math.floor(min(octaves / max(-self.rates()[0], 2.0**-24), 2**30))

    def rotate(self, q, k, q_positions, k_positions):
        for x, positions, name in ((q, q_positions, "q_positions"), (k, k_positions, "k_positions")):
            check_positions(positions, x.shape[:2], name)
        if concrete(q_positions) and concrete(k_positions):
            on_host = [np.atleast_2d(np.asarray(positions)) for positions in (q_positions, k_positions)]
            for positions in on_host:
                self._check(positions, self._center(on_host[1]), q.dtype)
        center = self._center(jnp.atleast_2d(jnp.asarray(k_positions, jnp.int32)))
        return self._decayed(q, q_positions, center, 1), self._decayed(k, k_positions, center, -1)

    def _center(self, k_positions):
        """The center of each row, `[1 or B, 1]`, for positions of that many rows."""
        if self.center is not None:
            return np.full((1, 1), self.center, np.int32)
        # Of all middles the one with which exactly `max_length` tokens fit.
        return k_positions.max(axis=-1, keepdims=True) // 2

    def _check(self, positions, center, dtype):
        distances, reach = np.abs(positions - center), self.reach(dtype)
        if distances.size and distances.max() > reach:
            worst = np.unravel_index(distances.argmax(), distances.shape)
            position = np.broadcast_to(positions, distances.shape)[worst]
            raise UserError(
                f"Position {position} is {distances[worst]} from xpos's center; with scale_base {self.scale_base:g} and gamma "
                f"{self.gamma:g}, {jnp.dtype(dtype)} holds its amplitudes up to {reach}.")

    def _decayed(self, x, positions, center, side):
        """One side, rotated and scaled in float32."""
        rotated = apply_rotary(x.astype(jnp.float32), positions, RoPE.rotary(self))
        distances = (jnp.atleast_2d(jnp.asarray(positions, jnp.int32)) - center)[..., None]
        amplitude = jnp.where(jnp.abs(distances) <= self.reach(x.dtype), self._amplitude(side * distances), jnp.nan)
        amplitude = jnp.repeat(amplitude, 2, -1) if self.layout == "interleaved" else jnp.concatenate([amplitude] * 2, -1)
        return (rotated * amplitude[:, :, None, :]).astype(x.dtype)

    def _amplitude(self, distances):
        """`zeta ** (distance / scale_base)`, float32 `[.., Dh / 2]` for int32 `[.., 1]`, as exact far from the center as at it.

        The exponent is held in fixed point, as the angles of `Rotary` are: rounded to float32, 90 octaves are off by 4e-6.
        """
        rates = self.rates()
        fixed = np.round(rates * 2.0**24)
        exponent = distances * fixed.astype(np.int32)[None, None]  # below 2**31 within reach
        fraction = (exponent & (2**24 - 1)).astype(jnp.float32) * jnp.float32(2.0**-24)
        rest = distances.astype(jnp.float32) * (rates - fixed * 2.0**-24).astype(np.float32)[None, None]
        return jnp.ldexp(jnp.exp2(fraction + rest), exponent >> 24)
