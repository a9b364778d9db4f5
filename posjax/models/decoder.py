"""The decoder: pre-norm, tied embedding, per-token all the way. It knows no scheme by name."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from posjax.errors import UserError, unknown
from posjax.schemes.attend import attend, attend_cached, make_cache
from posjax.schemes.layers import Layers

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder.

    Attributes:
      vocab_size: number of token ids, V.
      width: channels of the residual stream, D.
      depth: number of blocks.
      num_heads: query heads, H.
      head_dim: channels a head, Dh; None for width / num_heads.
      mlp_ratio: hidden channels of the MLP, as a multiple of the width.
      dtype: of the computation; parameters are float32, and so are positions, softmax, norms and logits.
    """
    vocab_size: int
    width: int = 64
    depth: int = 2
    num_heads: int = 4
    head_dim: int | None = None
    mlp_ratio: float = 4.0
    dtype: str = "float32"

    def __post_init__(self):
        for name in ("vocab_size", "width", "depth", "num_heads"):
            if getattr(self, name) < 1:
                raise UserError(f"model.{name} is {getattr(self, name)}; it must be at least 1.")
        if self.head_dim is None:
            if self.width % self.num_heads:
                raise UserError(f"model.width {self.width} does not divide by model.num_heads {self.num_heads}; "
                                "change one, or set model.head_dim.")
            object.__setattr__(self, "head_dim", self.width // self.num_heads)
        if not isinstance(self.head_dim, int) or self.head_dim < 1:
            raise UserError(f"model.head_dim is {self.head_dim!r}; it must be a whole number of at least 1.")
        if int(self.mlp_ratio * self.width) < 1:
            raise UserError(f"model.mlp_ratio is {self.mlp_ratio}; it must leave the MLP at least 1 channel.")
        if self.dtype not in DTYPES:
            raise unknown("model.dtype", self.dtype, DTYPES)


class Norm(nnx.Module):
    """Root-mean-square norm over the last axis, in float32 (Zhang and Sennrich 2019, arXiv 1910.07467).

    The activations meet the scale last: the factor of a token is never laid out for all channels, as `nnx.RMSNorm` has it.
    """

    def __init__(self, width, *, dtype):
        self.scale = nnx.Param(jnp.ones(width))
        self.dtype = dtype

    def __call__(self, x):
        x = x.astype(jnp.float32)
        unit = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        return (unit * self.scale[...]).astype(self.dtype)


# Its derivative is made again in the backward pass: on a CPU the hyperbolic tangent costs less than keeping it.
_gelu = jax.checkpoint(nnx.gelu)


class Block(nnx.Module):
    """Attention and MLP, each on a normed copy of the residual stream."""

    def __init__(self, config, *, rngs):
        dtype = DTYPES[config.dtype]
        attention_dim = config.num_heads * config.head_dim
        hidden_dim = int(config.mlp_ratio * config.width)

        def linear(d_in, d_out):
            return nnx.Linear(d_in, d_out, use_bias=False, dtype=dtype, rngs=rngs)

        def norm():
            return Norm(config.width, dtype=dtype)
        self.heads = (config.num_heads, config.head_dim)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.query, self.key, self.value = (linear(config.width, attention_dim) for _ in range(3))
        self.out = linear(attention_dim, config.width)
        self.up, self.down = linear(config.width, hidden_dim), linear(hidden_dim, config.width)

    def __call__(self, x, shape, scheme, mix):
        """`x` is `[B * T, D]`: dense layers on flat activations spare XLA a transposed copy for each weight gradient.

        `mix(q, k, v, features)` is attention; whatever it returns beside its output `[B, T, H, Dh]` comes back too.
        """
        normed = self.attention_norm(x)
        q, k, v = (part.reshape(*shape, *self.heads) for part in self._project(normed))
        mixed, rest = mix(q, k, v, scheme.features(normed.reshape(*shape, -1)))
        x = x + self.out(mixed.reshape(x.shape[0], -1))
        return x + self.down(_gelu(self.up(self.mlp_norm(x)))), rest

    def _project(self, normed):
        """Queries, keys and values, each `[B * T, H * Dh]`: one product with the three kernels side by side."""
        kernels = [layer.kernel[...].astype(normed.dtype) for layer in (self.query, self.key, self.value)]
        return jnp.split(normed @ jnp.concatenate(kernels, axis=1), 3, axis=1)


class Decoder(nnx.Module):
    """Tokens in, logits of the next token out, for every position.

    Args:
      config: sizes.
      scheme: the positional scheme, shared by all blocks, or `posjax.schemes.layers.Layers` where blocks differ; made for
        the same `num_heads`, `head_dim` and width.
      rngs: for the parameters.
    """

    def __init__(self, config, scheme, *, rngs):
        self.config = config
        self.layers = Layers.of(scheme, config.depth)
        # Unit-size token vectors (embedding of 1/sqrt(D), times sqrt(D)), the size of what schemes add to them.
        self.tokens = nnx.Embed(config.vocab_size, config.width, dtype=DTYPES[config.dtype], rngs=rngs,
                                embedding_init=nnx.initializers.normal(config.width ** -0.5))
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.depth)])
        self.final_norm = Norm(config.width, dtype=DTYPES[config.dtype])

    def __call__(self, tokens, *, positions=None, segment_ids=None, backend="auto"):
        """Logits, float32 `[B, T, V]`.

        Args:
          tokens: int32 `[B, T]`.
          positions: int32 `[T]` or `[B, T]`; None for 0 .. T-1.
          segment_ids: int32 `[B, T]`; tokens of different segments never see each other.
          backend: of attention.
        """
        if positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)

        def mix(block, scheme, window, q, k, v, features):
            return attend(scheme, q, k, v, q_positions=positions, k_positions=positions, q_segment_ids=segment_ids,
                          k_segment_ids=segment_ids, features=features, window=window, backend=backend), None
        return self._run(tokens, positions, mix)[0]

    def new_cache(self, size=None, *, batch_size, page_size=None, num_pages=None, quantise=None):
        """An empty cache for `batch_size` rows: a tuple of one `posjax.KVCache` a block.

        Args:
          size: the most tokens that a row may have; None for no end, where all blocks have a window.
          batch_size: rows, B.
          page_size, num_pages: as in `posjax.make_cache`, for each block without a window.
          quantise: as in `posjax.make_cache`.
        """
        caches = []
        for block in range(self.config.depth):
            scheme, window = self.layers[block]
            pages = {"page_size": page_size, "num_pages": num_pages} if window is None else {}
            caches.append(make_cache(scheme, size, batch_size=batch_size, dtype=DTYPES[self.config.dtype], window=window,
                                     quantise=quantise, **pages))
        return tuple(caches)

    def decode(self, tokens, cache, *, positions=None, segment_ids=None, counts=None, backend="auto"):
        """Logits, float32 `[B, T, V]`, of T more tokens after those in the cache, and the cache with them.

        The first call takes the prompt, each later one what came since; one compilation serves all calls of one T. Where a
        sequence has ended, `tuple(c.release(rows) for c in cache)` empties its row, and another may begin there, with
        `counts` 0 for the rows that wait.
        A scheme that `depends_on_length` has its keys rotated anew at each call, but deeper blocks keep keys and values of
        hidden states that were made at the length of their moment; under every other scheme this is the full pass.

        Args:
          tokens: int32 `[B, T]`.
          cache: from `new_cache`, or from the last call.
          positions: int32 `[T]` or `[B, T]`; None to go on from each row's last.
          segment_ids: int32 `[B, T]`; None for each row's last. Give left padding a segment of its own.
          counts: int32 `[B]`: how many of the T tokens of each row are real, the first ones; None for all. The others are
            padding, whose logits mean nothing.
          backend: of attention.

        Raises:
          ValueError: the cache has no room. Under `jit`, where that cannot be read, the logits of the rows concerned are NaN.
        """
        positions, segment_ids = cache[0].place(tokens.shape[1], positions=positions, segment_ids=segment_ids, counts=counts)

        def mix(block, scheme, window, q, k, v, features):
            return attend_cached(scheme, q, k, v, cache[block], positions=positions, segment_ids=segment_ids, counts=counts,
                                 features=features, window=window, backend=backend)
        return self._run(tokens, positions, mix)

    def _run(self, tokens, positions, mix):
        """The logits, and for each block what `mix(block, scheme, window, q, k, v, features)` returned beside its output."""
        x = self.tokens(tokens)
        x = self.layers.embed(x * jnp.asarray(self.config.width ** 0.5, x.dtype), positions)
        x = x.reshape(tokens.size, -1)
        rest = []
        for n, block in enumerate(self.blocks):
            scheme, window = self.layers[n]
            x, kept = block(x, tokens.shape, scheme, functools.partial(mix, n, scheme, window))
            rest.append(kept)
        logits = self.tokens.attend(self.final_norm(x))
        return logits.astype(jnp.float32).reshape(*tokens.shape, -1), tuple(rest)
