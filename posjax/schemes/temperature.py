"""How sharply a query attends, by its position: a factor on the logits, for any scheme."""
import math
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx

from posjax.errors import UserError
from posjax.registry import Registry

TEMPERATURES = Registry("temperature", package="posjax.schemes.temperature", entry_points="posjax.temperatures",
                        supplied=("num_heads",))
register_temperature = TEMPERATURES.register


def make_temperature(name, *, num_heads=1, **hyper):
    """Makes a temperature by name, for the `temperature` of `posjax.make_scheme`.

    Raises:
      ValueError: an unknown name or hyper-parameter, or a bad value.
    """
    return TEMPERATURES.make(name, hyper, num_heads=num_heads)


@register_temperature("none")
class Temperature(nnx.Module):
    """The logits as they are."""
    formula: ClassVar[str] = "1"
    relative: ClassVar[bool] = True
    """Whether the factor is the same at all positions."""

    def __init__(self, *, num_heads=1):
        self.num_heads = num_heads

    def factor(self, positions):
        """float32 `[..., Q, 1]`, or `[..., Q, H]` where heads differ, for int32 `positions` `[..., Q]`."""
        return jnp.ones((*positions.shape, 1), jnp.float32)


@register_temperature("constant")
class Constant(Temperature):
    """The same factor everywhere, as DeepSeek's softmax scale (`posjax.softmax_scale_multiplier`)."""
    formula = "multiplier"

    def __init__(self, *, multiplier=1.0, **dims):
        super().__init__(**dims)
        _above(self, 0, multiplier=multiplier)
        self.multiplier = multiplier

    def factor(self, positions):
        return jnp.full((*positions.shape, 1), self.multiplier, jnp.float32)


@register_temperature("yarn")
class YaRN(Temperature):
    """The factor of YaRN, by which it turns queries and keys up together. Peng et al. 2023 (arXiv 2309.00071).

    `scaled_rope` with rope_type yarn applies it already, to the rotated channels.

    Args:
      scale: how many times longer than the trained length; nothing changes up to 1.
      mscale: weight of the logarithm.
    """
    formula = "(0.1 mscale ln(scale) + 1)^2"

    def __init__(self, *, scale=4.0, mscale=1.0, **dims):
        super().__init__(**dims)
        _above(self, 0, scale=scale)
        self.scale, self.mscale = scale, mscale

    def factor(self, positions):
        one_side = 0.1 * self.mscale * math.log(max(self.scale, 1.0)) + 1
        return jnp.full((*positions.shape, 1), one_side**2, jnp.float32)


@register_temperature("log_n")
class LogN(Temperature):
    """Grows with the logarithm of the number of tokens, so that attention over more of them does not flatten.

    Chiang and Cholak 2022 (arXiv 2202.12172); as "logn" in Qwen's first checkpoints, where it starts past the trained length.

    Args:
      length: the trained length, from which on the factor is above 1.
      below: whether the factor also falls below 1 before it; else it stays 1 there.
    """
    formula = "max(1, ln(p + 1) / ln(length))"
    relative = False

    def __init__(self, *, length=512, below=False, **dims):
        super().__init__(**dims)
        _above(self, 1, length=length)
        self.length, self.below = length, below

    def factor(self, positions):
        factor = _log_count(positions) / math.log(self.length)
        return factor if self.below else jnp.maximum(factor, 1.0)


@register_temperature("ssmax")
class ScalableSoftmax(Temperature):
    """A factor `s_h ln(n)` whose `s_h` each head learns. Nakanishi 2025, "Scalable-Softmax" (arXiv 2501.19399).

    Args:
      start: initial `s_h`.
    """
    formula = "s_h ln(p + 1), s learned"
    relative = False

    def __init__(self, *, start=0.43, **dims):
        super().__init__(**dims)
        self.s = nnx.Param(jnp.full(self.num_heads, start, jnp.float32))

    def factor(self, positions):
        return _log_count(positions) * self.s[...].reshape((1,) * positions.ndim + (-1,))


@register_temperature("llama4")
class Llama4(Temperature):
    """Grows by steps, as on the layers of Llama 4 that have no rotation.

    Args:
      scale: weight of the logarithm.
      floor_scale: tokens a step.
    """
    formula = "1 + scale ln(1 + floor((p + 1) / floor_scale))"
    relative = False

    def __init__(self, *, scale=0.1, floor_scale=8192, **dims):
        super().__init__(**dims)
        _above(self, 0, floor_scale=floor_scale)
        if scale < 0:
            raise UserError(f"The temperature llama4's scale is {scale}; it must not be negative.")
        self.scale, self.floor_scale = scale, floor_scale

    def factor(self, positions):
        steps = ((jnp.maximum(positions, 0) + 1) // self.floor_scale).astype(jnp.float32)
        return (1 + self.scale * jnp.log1p(steps))[..., None]


def _log_count(positions):
    """`ln(p + 1)`: a query at position p sees p + 1 tokens of its document; padding before position 0 counts as its first."""
    return jnp.log(jnp.maximum(positions, 0).astype(jnp.float32) + 1)[..., None]


def _above(temperature, bound, **values):
    for key, value in values.items():
        if not value > bound:
            raise UserError(f"The temperature {temperature.name}'s {key} is {value}; it must be above {bound}.")
