"""What a positional scheme is: a module that overrides the hooks it needs, and says what it is."""
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from posjax.errors import UserError
from posjax.ops.bounds import clamp
from posjax.ops.rotary import apply_rotary


class Scheme(nnx.Module):
    """How position enters a decoder. The base class lets none in.

    A scheme overrides the hooks that it needs and no other; whatever it learns is an ordinary `nnx.Param`, and
    whatever it can compute (tables, frequencies, slopes) it computes from integer positions when asked, so that
    no table is state. Hyper-parameters are keyword-only, with defaults; the signature of `__init__` is their list.

    Class attributes state what the scheme is, for people, for the caches and for the conformance suite:
      formula: one line.
      reference: where it was published.
      cost: what it takes beside plain attention, in a few words.
      per_layer: each layer of a decoder has parameters of its own, as published; else all layers share them.
      causal_only: it means something only where a query sees no later key.
      relative: attention depends on the distance of positions only, so shifting all positions changes nothing.
      depends_on_length: keys already rotated are wrong once the sequence grows, so a cache must keep raw keys. Where
        hyper-parameters decide, `__init__` sets this, and `relative`, on the instance.
    """
    name: ClassVar[str]
    formula: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    cost: ClassVar[str] = ""
    per_layer: ClassVar[bool] = False
    causal_only: ClassVar[bool] = False
    relative: ClassVar[bool] = False
    depends_on_length: ClassVar[bool] = False

    max_length: int | None = None
    """Positions from 0 to `max_length - 1` exist; None where there is no end."""

    original_length: int | None = None
    """Tokens that a model was trained with before this scheme extends its context; None where it extends none."""

    logit_scale: float | None = None
    """Factor on `q.k`; None for `head_dim ** -0.5`."""

    temperature = None
    """A `posjax.schemes.temperature.Temperature`, which multiplies the logits of a query before any bias, or None."""

    def __init__(self, *, num_heads, head_dim, model_dim=None, rngs=None):
        for dim_name, dim in (("num_heads", num_heads), ("head_dim", head_dim), ("model_dim", model_dim)):
            if dim is not None and dim < 1:
                raise UserError(f"{dim_name} is {dim}; it must be at least 1.")
        self.num_heads, self.head_dim = num_heads, head_dim
        self.model_dim = num_heads * head_dim if model_dim is None else model_dim

    def bounds(self):
        """What it learns within bounds: `{name of the parameter: (lowest, highest)}`; read it as `self.within(name)`."""
        return {}

    def within(self, name):
        """The parameter `name` within its bounds, with the gradient of `posjax.ops.bounds.clamp`."""
        return clamp(getattr(self, name)[...], *self.bounds()[name])

    def clamp_parameters(self):
        """Sets the parameters to what `within` gives: once for all that follows, as a batch computed in parts needs it."""
        for name in self.bounds():
            getattr(self, name)[...] = self.within(name)

    def embed(self, x, positions):
        """Token embeddings `[B, T, D]` with the position added; `positions` int32 `[T]` or `[B, T]`."""
        return x

    def rotary(self, length=None):
        """The rotation of queries and keys as data (`posjax.ops.rotary.Rotary`), or None.

        `length` matters only to a scheme that `depends_on_length`: the tokens of the sequence, an int or int32 `[]` or
        `[B]`, which may be traced; None for no more than it was trained with.
        """
        return None

    def rotary_of(self, k_positions):
        """`rotary` for the lengths of rows with keys at `k_positions`, int32 `[K]` or `[B, K]`.

        The length of a row is its last key's position and one: not the size of a cache, nor of the longest row.
        """
        if not self.depends_on_length:
            return self.rotary()
        return self.rotary(jnp.max(jnp.asarray(k_positions, jnp.int32), axis=-1) + 1)

    def plain(self):
        """What `rotary` was before the scheme scaled it for longer contexts, a `Rotary`; None where it scales nothing."""
        return None

    def rotate(self, q, k, q_positions, k_positions):
        """Queries `[B, Q, H, Dh]` and keys `[B, K, G, Dh]`, transformed: by default rotated as `rotary()` says."""
        rotary = self.rotary_of(k_positions)
        if rotary is None:
            return q, k
        return apply_rotary(q, q_positions, rotary), apply_rotary(k, k_positions, rotary)

    def bias(self):
        """A lazy additive bias on the logits (see `posjax.ops.bias`), or None."""
        return None

    def features(self, x):
        """What a token brings to attention besides q, k and v: a pytree of `[B, T, ...]`, or None.

        Made from `x` `[B, T, D]`, the input of the layer's projections; kept beside the keys in a cache.
        """
        return None

    logits = None
    """Where content and position mix: a method `(q, k, q_positions, k_positions, *, visible, scale, features)` that
    returns the logits `[B, H, Q, K]` of a block of queries `[B, Q, H, Dh]` against all keys `[B, K, H, Dh]` (grouped keys
    come repeated); `visible` is bool `[1 or B, Q, K]`, `features` those of all keys. None where the logits are
    `scale * q.k` and a bias."""

    values = None
    """What attention adds to the values: a method `(weights, q_positions, k_positions)` that returns float32
    `[B, Q, H, Dh]`, linear in the float32 weights `[B, H, Q, K]` of a block of queries on all keys. None for nothing."""


def concrete(positions):
    """Whether the values of `positions` can be read now, outside any trace."""
    return not isinstance(positions, jax.core.Tracer)


def required_rngs(name, dims):
    """The `rngs` among a scheme's constructor arguments; `UserError` if a scheme that draws parameters was given none."""
    if dims.get("rngs") is None:
        raise UserError(f"The scheme {name} has parameters: pass rngs=flax.nnx.Rngs(seed).")
    return dims["rngs"]
