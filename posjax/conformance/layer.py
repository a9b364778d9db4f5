"""An attention layer as a decoder has it, with fixed projections: what the checks look at."""
import contextlib
import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posjax.ops.attention import BACKENDS
from posjax.schemes.attend import attend
from posjax.schemes.base import Scheme

# Rows and tokens; odd, so that no length divides by a power of two.
B, T = 2, 9
# Two orders of summing a softmax of nine float32 logits: some ten roundings of values around 1.
ATOL = 5e-6
_HOOKS = ("embed", "rotary", "rotate", "bias", "features", "logits", "values")
@contextlib.contextmanager
def quick_compilation():
    """Without most optimisations: for many programs that each run a few times, compilation is all the cost."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def host(x):
    """A numpy array, whose slices cost no compilation; a traced value as it is."""
    return x if isinstance(x, jax.core.Tracer) else np.asarray(x)


def inputs(scheme, length=T, *, batch=B, dtype=jnp.float32, seed=0):
    """Token embeddings `[B, T, D]`."""
    return np.random.default_rng(seed).normal(size=(batch, length, scheme.model_dim)).astype(dtype)


def project(scheme, x, *, groups=None):
    """Queries, keys and values of embeddings, with fixed weights that make attention neither flat nor a maximum."""
    heads, dim = scheme.num_heads, scheme.head_dim
    weights = _weights(x.shape[-1], 3 * heads * dim).astype(x.dtype)
    if isinstance(x, jax.core.Tracer):
        qkv = jnp.matmul(x, weights)
    else:
        qkv = np.matmul(x.astype(np.float32), weights.astype(np.float32)).astype(x.dtype)
    qkv = qkv.reshape(*x.shape[:-1], 3 * heads, dim)
    groups = heads if groups is None else groups
    return qkv[:, :, :heads], qkv[:, :, heads:heads + groups], qkv[:, :, 2 * heads:2 * heads + groups]


def layer(scheme, x, positions=None, **options):
    """A decoder's attention layer up to its output `[B, Q, H, Dh]`, one operation at a time (see `Layer`)."""
    return Layer(scheme)(x, positions, **options)


def backends():
    """Names of the attention backends that serve every scheme; a kernel for one kind of bias has tests of its own."""
    return [b.name for b in BACKENDS if b.general]


class Layer:
    """The attention layer of a scheme.

    Attention itself runs one operation at a time, which costs a compilation of each operation once in a process, not
    once for each scheme, option and mask.

    Args:
      scheme: a `posjax.Scheme`.
      compiled: whether the scheme's own hooks are compiled, with positions and parameters as data; else values of positions
        can be read in them.
    """

    def __init__(self, scheme, *, compiled=False):
        self.scheme = compile_hooks(scheme) if compiled else scheme

    def __call__(self, x, positions=None, *, queries=None, groups=None, segments=None, **options):
        """The output `[B, Q, H, Dh]` for token embeddings `[B, T, D]`.

        Args:
          positions: `[T]` or `[B, T]`; None for 0 .. T-1.
          queries: how many of the last tokens ask; None for all.
          groups: heads of keys and values; None for as many as queries have.
          segments: `[B, T]`, or None.
          **options: of `posjax.attend`.
        """
        positions = np.arange(x.shape[1]) if positions is None else positions
        first = 0 if queries is None else x.shape[1] - queries
        q, k, v, features = self.projected(x, positions, first=first, groups=groups)
        return self.attend(q, k, v, features, positions[..., first:], positions, segments, **options)

    def projected(self, x, positions, *, first=0, groups=None):
        """Queries of the tokens from `first` on; keys, values and features of all."""
        embedded = host(self.scheme.embed(x, positions))
        # As in a cached decode step, the new tokens are embedded alone.
        asking = host(self.scheme.embed(x[:, first:], positions[..., first:])) if first else embedded
        q = project(self.scheme, asking, groups=groups)[0]
        _, k, v = project(self.scheme, embedded, groups=groups)
        return q, k, v, jax.tree.map(host, self.scheme.features(embedded))

    def attend(self, q, k, v, features, q_positions, k_positions, segments=None, **options):
        """Attention alone, of queries that stand at the end of the keys."""
        if segments is not None:
            options |= {"q_segment_ids": segments[:, -q.shape[1]:], "k_segment_ids": segments}
        return host(attend(self.scheme, q, k, v, q_positions=q_positions, k_positions=k_positions, features=features, **options))


def overridden(scheme):
    """Names of the hooks that are a scheme's own."""
    return [hook for hook in _HOOKS if getattr(type(scheme), hook) is not getattr(Scheme, hook)]


def compile_hooks(scheme):
    """The same scheme with its own hooks compiled, once for each shape."""
    graphdef, state = nnx.split(scheme)
    other = nnx.merge(graphdef, state)
    own = {"rotate" if hook == "rotary" else hook for hook in overridden(scheme)}
    for hook in own - {"bias"}:
        def run(state, *args, scale=None, hook=hook, **kwargs):
            kwargs |= {} if scale is None else {"scale": scale}
            return getattr(nnx.merge(graphdef, state), hook)(*args, **kwargs)
        setattr(other, hook, functools.partial(jax.jit(run, static_argnames="scale"), state))
    if "bias" in own:
        other.bias = lambda: _compiled_block(nnx.merge(graphdef, state).bias())
    return other


def _compiled_block(bias):
    """The same bias, of the same type, that backends may know; its blocks are compiled."""
    if bias is None:
        return None
    other = copy.copy(bias)
    object.__setattr__(other, "block", functools.partial(_block, bias))
    return other


@jax.jit
def _block(bias, q_positions, k_positions):
    return bias.block(q_positions, k_positions)


@functools.cache
def _weights(rows, columns):
    return np.random.default_rng(1).normal(size=(rows, columns)) / np.sqrt(rows) * 1.3
