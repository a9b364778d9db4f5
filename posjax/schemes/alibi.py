import jax.numpy as jnp
import numpy as np
from flax import nnx

from posjax.errors import UserError
from posjax.ops.bias import LinearBias
from posjax.schemes.base import Scheme
from posjax.schemes.registry import register_scheme


def alibi_slopes(num_heads, *, max_bias=8.0):
    """The slope of each head, float64 `[num_heads]` on the host.

    For a power of two: `2 ** (-max_bias * h / num_heads)`, h = 1 .. num_heads. Otherwise, as the authors' code
    does it (the paper's text reads as another rule): the slopes of the power of two below, then every other
    slope of the power of two above. So the slopes of, say, 6 heads do not fall from head to head.

    Raises:
      ValueError: `num_heads` below 1, or `max_bias` not above 0.
    """
    if num_heads < 1:
        raise UserError(f"num_heads is {num_heads}; it must be at least 1.")
    if not max_bias > 0:
        raise UserError(f"alibi's max_bias is {max_bias}; it must be above 0.")
    below = 2 ** int(np.log2(num_heads))
    exponents = np.arange(1, below + 1) / below
    between = np.arange(1, 2 * below + 1, 2) / (2 * below)
    return 2.0 ** (-max_bias * np.concatenate([exponents, between])[:num_heads])


@register_scheme("alibi")
class ALiBi(Scheme):
    """Attention with linear biases: a head's logits fall by its slope for every position of distance.

    The distance has no sign, so that an encoder (no causal mask) has the symmetric form. Press et al. 2021 (arXiv
    2108.12409), whose slopes are fixed.

    Args:
      max_bias: the last of 2^n heads falls by `2 ** -max_bias` a position (8 in the paper; MPT-65k uses 16).
      learned: whether the slopes are learned, from the fixed ones on. Their logarithms to base 2 are the parameters, so
        that a slope stays above 0 and a step changes small and large ones in proportion.

    Training and evaluation:
      The bias is known at every distance and has no bound, so nothing clamps: a key far past `1 / m_h` positions weighs
      nothing in head h, at any length, and only the flattest heads see beyond the trained one.

    Where implementations differ:
      - Slopes: by the paper's text they fall by `2^(-8/H)` for any H; the authors' code, and all others, take two series where
        H is no power of two (6 heads: exponents -2, -4, -6, -8, -1, -3), and so does this.
      - Form: BLOOM and Falcon add `m_h j` per key, which in bfloat16 gives the 8 nearest of 4096 keys one bias (slope 1/2);
        here the distance is taken first, in integers.
      - Scale: added after the division by `sqrt(Dh)`, as in BLOOM and MPT; Hugging Face's Falcon divides the bias too.
      - `max_bias` is MPT's `alibi_bias_max`, which Hugging Face's MPT ignores.
    """
    formula = "logit - m_h * |i - j|, m_h = 2^(-max_bias h/H)"
    reference = "Press et al. 2021, arXiv 2108.12409"
    cost = "bias: O(T^2) a head"
    relative = True

    def __init__(self, *, max_bias=8.0, learned=False, **dims):
        super().__init__(**dims)
        slopes = alibi_slopes(self.num_heads, max_bias=max_bias)  # a bad value is refused here, not at the first use
        self.max_bias = max_bias
        self.log2_slopes = nnx.Param(jnp.asarray(np.log2(slopes), jnp.float32)) if learned else None

    def bias(self):
        if self.log2_slopes is not None:
            return LinearBias(jnp.exp2(self.log2_slopes[...].astype(jnp.float32)))
        return LinearBias(jnp.asarray(alibi_slopes(self.num_heads, max_bias=self.max_bias), jnp.float32))
