import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from posjax.errors import UserError
from posjax.ops.bias import per_head
from posjax.ops.rotary import Rotary
from posjax.schemes.base import Scheme
from posjax.schemes.registry import register_scheme


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SandwichBias:
    """The bias of `Sandwich`, of `rotary` with the frequencies of its encodings."""
    rotary: Rotary
    num_heads: int = dataclasses.field(metadata={"static": True})
    of_distance: ClassVar[bool] = True

    def block(self, q_positions, k_positions):
        half = self.rotary.rotary_dim // 2
        total = jnp.float32(0)
        # A few frequencies at a time: so the sum stays small where tokens are near and weights large, and there its rounding,
        # which differs between shapes, moves no logit by more than 1e-6.
        for some in np.array_split(np.arange(half), -(-half // 8)):
            # cos(a - b) = cos a cos b + sin a sin b: matrix products, not dim/2 cosines for every pair of tokens.
            few = slice(some[0], some[-1] + 1)
            rotary = dataclasses.replace(self.rotary, turns=self.rotary.turns[few], rest=self.rotary.rest[few])
            q, k = (jnp.concatenate(rotary.cos_sin(positions), -1) for positions in (q_positions, k_positions))
            total = total + (jnp.einsum("...qd,...kd->...qk", q, k, precision="highest") - len(some))
        steepness = 8 * np.arange(1, self.num_heads + 1) / self.num_heads
        return total[..., None, :, :] / per_head(steepness, total[..., None, :, :])


@register_scheme("sandwich")
class Sandwich(Scheme):
    """The inner product of two sinusoidal position encodings as a bias, flatter from head to head.

    Nothing is learned. Chi et al. 2023 (arXiv 2212.10356): `(sum_k cos((i - j) base^(-2k/dim)) - dim/2) / (8 h/H)`, over
    dim/2 values of k, for heads h = 1 .. H. It is 0 at distance 0 and negative elsewhere.

    Args:
      dim: channels of the encodings, even; apart from any size of the model.
      base: of the wavelengths, which grow from `2 pi` towards `2 pi base` positions.
      first_index: the first k: 1 as in the paper's sum (and NeMo), 0 as in a sinusoidal encoding.

    Training and evaluation:
      The bias is known at every distance, falls on the whole, with ripples, and is never below `-dim / (8 h/H)`: the
      farthest keys keep some weight, where ALiBi's lose all. Nothing clamps.

    Where implementations differ:
      k runs from 1 to dim/2 in the paper's sum and in NeMo (the default), from 0 in a sinusoidal encoding (`first_index=0`);
      an older NeMo had one frequency fewer and no cosine. `dim` belongs to the bias and not to the model (128 in the paper).
    """
    formula = "logit + (sum_k cos((i - j) base^(-2k/dim)) - dim/2) / (8h/H)"
    reference = "Chi et al. 2023, arXiv 2212.10356"
    cost = "a product of encodings: O(dim T^2), and bias: O(T^2) a head"
    relative = True

    def __init__(self, *, dim=128, base=10_000.0, first_index=1, **dims):
        super().__init__(**dims)
        if dim < 2 or dim % 2:
            raise UserError(f"sandwich's dim is {dim}; it must be even and at least 2.")
        if not base > 0:
            raise UserError(f"sandwich's base is {base}; it must be above 0.")
        if first_index not in (0, 1):
            raise UserError(f"sandwich's first_index is {first_index}; it must be 0 or 1.")
        self.dim, self.base, self.first_index = dim, base, first_index

    def bias(self):
        indices = np.arange(self.first_index, self.first_index + self.dim // 2)
        return SandwichBias(Rotary.from_inv_freq(float(self.base) ** (-2 * indices / self.dim)), self.num_heads)
