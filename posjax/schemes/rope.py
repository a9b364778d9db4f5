from posjax.errors import UserError, unknown
from posjax.ops.rotary import LAYOUTS, Rotary
from posjax.schemes.base import Scheme
from posjax.schemes.registry import register_scheme
from posjax.schemes.rope_scaling import inverse_frequencies


@register_scheme("rope")
class RoPE(Scheme):
    """Rotary position embedding: pair k of the r rotated channels turns by `position * base ** (-2k / r)`.

    The inner product of a rotated query and key depends on their distance alone. Su et al. 2021 (arXiv 2104.09864).

    Args:
      base: the slowest pair turns once in about `2 pi * base` positions.
      fraction: share of the channels of a head that is rotated, the first r of them; the others carry no position
        (GPT-NeoX 0.25, Phi 0.4 or 0.5). Not p-RoPE, which keeps the pairs and frequencies of the whole head.
      layout: "half_split" pairs channels (k, k + r/2), as NeoX and Llama checkpoints do; "interleaved" pairs
        (2k, 2k + 1), as the paper and GPT-J do. A fixed permutation of channels apart, so equal for a new model.

    Training and evaluation:
      Nothing is learned, and any position has its rotation: nothing clamps. But a pair that has not turned once within the
      trained length meets angles beyond it that it has never seen. Angles are right to 1e-6 rad at any int32 position,
      where float32 is off by 3e-2 at a million.

    Where implementations differ:
      - Pairs: half-split in Llama and NeoX checkpoints (the default), interleaved in the paper, GPT-J and Meta's own code.
      - A part of the head: the frequencies of GPT-NeoX and Phi are those of r channels, as here; those of p_rope are of the
        whole head, though Hugging Face calls both `partial_rotary_factor`, and its plain Llama ignores the key.
      - Angles made in the dtype of the model are wrong (bfloat16 takes position 257 for 256); here that dtype has no say.
    """
    formula = "pair k of q and k turns by p * base^(-2k/r), r = fraction * Dh"
    reference = "Su et al. 2021, arXiv 2104.09864"
    cost = "rotates q and k: O(T Dh) a head"
    relative = True

    def __init__(self, *, base=10_000.0, fraction=1.0, layout="half_split", **dims):
        super().__init__(**dims)
        if self.head_dim % 2:
            raise UserError(f"{self.name} turns pairs of channels, so head_dim must be even; it is {self.head_dim}.")
        if not base > 0:
            raise UserError(f"{self.name}'s base is {base}; it must be above 0.")
        if layout not in LAYOUTS:
            raise unknown("pair layout", layout, LAYOUTS)
        self.base, self.layout = base, layout
        channels = fraction * self.head_dim
        self.rotary_dim = round(channels)
        if not 2 <= self.rotary_dim <= self.head_dim or self.rotary_dim % 2 or abs(channels - self.rotary_dim) > 1e-6:
            raise UserError(f"{self.name}'s fraction is {fraction}, which is {channels:g} of head_dim {self.head_dim}; "
                            f"it must make an even number of channels, from 2 to {self.head_dim}.")

    def rotary(self, length=None):
        return Rotary.from_inv_freq(inverse_frequencies(self.rotary_dim, self.base), layout=self.layout)
