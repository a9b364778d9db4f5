import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posjax.errors import UserError, unknown
from posjax.ops.rotary import Rotary, check_positions
from posjax.schemes.base import Scheme, required_rngs
from posjax.schemes.registry import register_scheme


@register_scheme("pope")
class PoPE(Scheme):
    """PoPE: content decides how long the channels' vectors are, position alone where they point.

    Each channel c of a query and a key is a vector in the plane, of length softplus(q_c) or softplus(k_c), that turns by
    `base ** (-c / Dh)` a position; so Dh frequencies, twice as many as in RoPE, and Dh products of
    `softplus(q_c) softplus(k_c) cos((j - i) theta_c + delta_c)`, which no content can turn. Gopalakrishnan et al. 2025
    (arXiv 2509.10534). Queries and keys get 2 Dh channels, values keep Dh; logits are divided by sqrt(Dh).

    Args:
      base: the slowest channel turns once in about `2 pi * base` positions.
      delta_init: "zero", or "uniform" over -2 pi .. 0: where the learned phases `delta` `[H, Dh]` start. They stay within those
        bounds: a gradient that points out of them stops there, one that points back does not, so none gets stuck.

    Training and evaluation:
      The same at any length; angles are exact at every position. The authors find that it needs no retuning beyond the
      trained length, and start at "zero" for that.

    Where implementations differ:
      The phase belongs to the key in x-transformers (key at j theta + delta), and is taken from the query's angle here, which
      is the same number and works where several query heads share a key head; others have one phase for each key head
      and divide by sqrt(2 Dh), the channels of the product; here it is sqrt(Dh), as in x-transformers, whose clamp has no
      gradient beyond the bounds, so that with "zero" the phases that first step upwards never move again.
    """
    formula = "sum_c softplus(q_c) softplus(k_c) cos((j - i) base^(-c/Dh) + delta_hc), delta learned"
    reference = "Gopalakrishnan et al. 2025, arXiv 2509.10534"
    cost = "q.k of 2 Dh channels, keys in a cache too"
    relative = True

    def __init__(self, *, base=10_000.0, delta_init="zero", **dims):
        super().__init__(**dims)
        if not base > 0:
            raise UserError(f"pope's base is {base}; it must be above 0.")
        if delta_init not in ("zero", "uniform"):
            raise unknown("delta_init", delta_init, ("zero", "uniform"))
        rngs = required_rngs("pope", dims)
        shape = (self.num_heads, self.head_dim)
        self.base = base
        self.delta = nnx.Param(jnp.zeros(shape, jnp.float32) if delta_init == "zero" else
                               jax.random.uniform(rngs.params(), shape, jnp.float32, -2 * math.pi, 0.0))

    def bounds(self):
        return {"delta": (-2 * math.pi, 0.0)}

    def rotate(self, q, k, q_positions, k_positions):
        return (self._turned(q, q_positions, -self.within("delta")),
                self._turned(k, k_positions, jnp.zeros((1, self.head_dim), jnp.float32)))

    def _turned(self, x, positions, phase):
        """`[B, T, heads, Dh]` as vectors in the plane, `[B, T, heads, 2 Dh]`: all cosines, then all sines."""
        check_positions(positions, x.shape[:2])
        turning = Rotary.from_inv_freq(self.base ** (-np.arange(self.head_dim) / self.head_dim))
        angles = turning.angles(jnp.atleast_2d(jnp.asarray(positions, jnp.int32)))[:, :, None, :] + phase[None, None]
        length = jax.nn.softplus(x.astype(jnp.float32))
        return jnp.concatenate([length * jnp.cos(angles), length * jnp.sin(angles)], -1).astype(x.dtype)
