import jax.numpy as jnp
import numpy as np

from posjax.errors import UserError, unknown
from posjax.ops.rotary import Rotary, check_positions
from posjax.schemes.base import Scheme
from posjax.schemes.registry import register_scheme

LAYOUTS = ("interleaved", "concatenated")
EXPONENTS = ("paper", "tensor2tensor")


@register_scheme("sinusoidal")
class Sinusoidal(Scheme):
    """Sines and cosines of the position, of geometrically growing wavelength, added to the token embedding.

    Vaswani et al. 2017 (arXiv 1706.03762), section 3.5. Nothing is learned.

    Args:
      base: the wavelengths grow from `2 pi` towards `2 pi * base` positions.
      layout: "interleaved" puts sine k in channel 2k and cosine k in 2k + 1, as the paper; "concatenated" all
        sines before all cosines, as tensor2tensor and fairseq.
      exponent: "paper" divides k by D/2; "tensor2tensor" by D/2 - 1, so that the last wavelength is `2 pi * base`.
      scale: factor on the encoding, whose channels have the size of 0.7; token embeddings are scaled to match.

    Training and evaluation:
      Positions beyond the trained ones are computed like any other and nothing clamps, but the vectors that they make are
      new to every layer. The angles are right to 1e-6 rad at any int32 position.

    Where implementations differ:
      The paper interleaves sines and cosines and divides k by D/2: the default. tensor2tensor and fairseq concatenate them
      and divide by D/2 - 1 (layout "concatenated", exponent "tensor2tensor"); DeepMind's randomised positions concatenate
      and divide by D/2. x-transformers learns a scale, from `D ** -0.5` on; here `scale` is fixed, and 1. An odd D raises.
    """
    formula = "x + [sin, cos](p * base^(-2k/D))"
    reference = "Vaswani et al. 2017, arXiv 1706.03762"
    cost = "adds sines and cosines to each token, once: O(T D)"

    def __init__(self, *, base=10_000.0, layout="interleaved", exponent="paper", scale=1.0, **dims):
        super().__init__(**dims)
        if self.model_dim % 2:
            raise UserError(f"sinusoidal needs pairs of channels, so model_dim must be even; it is {self.model_dim}.")
        if layout not in LAYOUTS:
            raise unknown("sinusoidal layout", layout, LAYOUTS)
        if exponent not in EXPONENTS:
            raise unknown("sinusoidal exponent", exponent, EXPONENTS)
        if exponent == "tensor2tensor" and self.model_dim < 4:
            raise UserError(f"exponent tensor2tensor needs a model_dim of at least 4; it is {self.model_dim}.")
        if not base > 0:
            raise UserError(f"sinusoidal's base is {base}; it must be above 0.")
        self.base, self.layout, self.exponent, self.scale = base, layout, exponent, scale

    def encoding(self, positions):
        """The encoding alone, float32 `[..., D]` for int32 positions `[...]`."""
        half = self.model_dim // 2
        steps = half if self.exponent == "paper" else half - 1
        inv_freq = float(self.base) ** (-np.arange(half, dtype=np.float64) / steps)
        angles = Rotary.from_inv_freq(inv_freq).angles(positions)
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        if self.layout == "concatenated":
            return jnp.concatenate([sin, cos], -1)
        return jnp.stack([sin, cos], -1).reshape(*positions.shape, self.model_dim)

    def embed(self, x, positions):
        check_positions(positions, x.shape[:2])
        added = self.encoding(positions) * self.scale
        return (x.astype(jnp.float32) + (added if added.ndim == 3 else added[None])).astype(x.dtype)
