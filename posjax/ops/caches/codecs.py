"""How keys and values are held in a cache, whatever its layout: as they come, or as 8-bit integers."""
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from posjax.errors import unknown


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8:
    """Vectors as integers from -127 to 127, each with a scale of its own: in a cache, one for each token and head.

    No element is off by more than half a step, `max|x| / 254` of its vector.

    Attributes:
      steps: int8 `[..., D]`.
      scales: float32 `[...]`, the size of a step.
    """
    steps: Any
    scales: Any

    @classmethod
    def of(cls, x):
        x = x.astype(jnp.float32)
        scales = jnp.abs(x).max(-1) / 127
        steps = jnp.round(x / jnp.where(scales == 0, 1.0, scales)[..., None])  # a vector of zeros stays one
        return cls(steps.astype(jnp.int8), scales)

    def array(self, dtype):
        return (self.steps.astype(jnp.float32) * self.scales[..., None]).astype(dtype)


CODECS = {"int8": Int8.of}


def encode(x, name):
    """`x` `[..., D]` as the codec holds it, a pytree of arrays; as it is where `name` is None."""
    if name is None:
        return x
    if name not in CODECS:
        raise unknown("quantisation of a cache", name, CODECS)
    return CODECS[name](x)


def decode(held, dtype):
    """What `encode` was given, or close to it."""
    return held.array(dtype) if hasattr(held, "array") else held.astype(dtype)


def quantisation_error(x, quantise="int8"):
    """How far a cache that quantises is off: the norm of the error over that of `x`, a float32 scalar.

    Args:
      x: keys or values `[..., D]`.
      quantise: as in `posjax.make_cache`.
    """
    x = jnp.asarray(x)
    exact, held = x.astype(jnp.float32), decode(encode(x, quantise), jnp.float32)
    return jnp.linalg.norm((held - exact).ravel()) / jnp.maximum(jnp.linalg.norm(exact.ravel()), 1e-30)
