from posjax.ops.rotary import Rotary
from posjax.schemes.registry import register_scheme
from posjax.schemes.rope import RoPE
from posjax.schemes.rope_scaling import Plain, scale


@register_scheme("p_rope")
class PRoPE(RoPE):
    """p-RoPE, or proportional RoPE: RoPE whose slowest pairs stand still, so that they carry content at any distance.

    The frequencies are `base ** (-2k / Dh)` of the whole head for its first pairs, and 0 for the rest; the pairs are
    those of the whole head too. Barbero et al. 2024 (arXiv 2410.06205).

    Args:
      base: as in rope.
      fraction: share p of the pairs that turns (0.25 in Gemma 4).
      layout: as in rope.
      factor: divides the frequencies, for longer contexts.

    Training and evaluation:
      As rope in the pairs that turn. Those that stand still score content alike at every distance, trained or not.

    Where implementations differ:
      Hugging Face calls both this ("proportional") and the rotation of a part of the head `partial_rotary_factor`; this one
      keeps the frequencies of the whole head, and pairs (k, k + Dh/2) in layout "half_split". It rounds `fraction * Dh / 2`
      down to whole pairs; here a fraction that does not make whole pairs is refused. `factor` is the library's, 1 by default.
    """
    formula = "as rope, but only the fastest pairs turn: base^(-2k/Dh) for k < fraction * Dh/2, else 0"
    reference = "Barbero et al. 2024, arXiv 2410.06205"
    cost = "rotates q and k: O(T Dh) a head"

    def __init__(self, *, base=10_000.0, fraction=0.25, layout="half_split", factor=1.0, **dims):
        super().__init__(base=base, fraction=fraction, layout=layout, **dims)
        self.factor = factor
        self.rotary()  # a bad factor is refused here

    def rotary(self, length=None):
        return self._divided_by(self.factor)

    def plain(self):
        return self._divided_by(1.0)

    def _divided_by(self, factor):
        inv_freq, _ = scale(Plain(self.base, self.head_dim, self.rotary_dim), "proportional", {"factor": factor})
        return Rotary.from_inv_freq(inv_freq, layout=self.layout)
