import numpy as np

from posjax.errors import UserError, unknown
from posjax.ops.rotary import LAYOUTS, Rotary
from posjax.schemes.base import Scheme
from posjax.schemes.registry import register_scheme


def inverse_frequencies(rotary_dim, base):
    """`base ** (-2k / rotary_dim)` for k = 0 .. rotary_dim/2 - 1, in radians a position, float64 on the host."""
    return float(base) ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


@register_scheme("rope")
class RoPE(Scheme):
    """Rotary position embedding: pair k of the channels turns by `position * base ** (-2k / head_dim)`.

    The inner product of a rotated query and key depends on their distance alone. Su et al. 2021 (arXiv 2104.09864).

    Args:
      base: the slowest pair turns once in about `2 pi * base` positions.
      layout: "half_split" pairs channels (k, k + Dh/2), as NeoX and Llama checkpoints do; "interleaved" pairs
        (2k, 2k + 1), as the paper and GPT-J do. A fixed permutation of channels apart, so equal for a new model.
    """
    formula = "pair k of q and k turns by p * base^(-2k/Dh)"
    reference = "Su et al. 2021, arXiv 2104.09864"
    relative = True

    def __init__(self, *, base=10_000.0, layout="half_split", **dims):
        super().__init__(**dims)
        if self.head_dim % 2:
            raise UserError(f"rope turns pairs of channels, so head_dim must be even; it is {self.head_dim}.")
        if not base > 0:
            raise UserError(f"rope's base is {base}; it must be above 0.")
        if layout not in LAYOUTS:
            raise unknown("pair layout", layout, LAYOUTS)
        self.base, self.layout = base, layout

    def rotary(self):
        return Rotary.from_inv_freq(inverse_frequencies(self.head_dim, self.base), layout=self.layout)
