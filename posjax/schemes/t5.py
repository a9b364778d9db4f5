import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posjax.errors import UserError
from posjax.ops.bias import distances
from posjax.schemes.base import Scheme, required_rngs
from posjax.schemes.registry import register_scheme

_FARTHEST = 2**31 - 1


@functools.cache
def bucket_starts(num_buckets, max_distance):
    """The distance at which each bucket past the exact ones begins, int32 `[num_buckets - num_buckets // 2 - 1]`.

    Bucket E + b, with E = `num_buckets // 2` exact buckets below and S = `num_buckets - E` wide ones, begins at the
    smallest n with `ln(n/E) / ln(max_distance/E) * S >= b`, that is `n^S >= max_distance^b * E^(S-b)`: compared as
    integers, since logarithms in float32 are a bucket low at some exact boundaries (n = 36 and 54 of 48 buckets up to 81).
    """
    exact, starts = num_buckets // 2, []
    wide = num_buckets - exact
    for b in range(1, wide):
        bound = max_distance**b * exact**(wide - b)
        n = round(exact * (max_distance / exact) ** (b / wide))  # within one of the answer, or a few units in its last place
        while n**wide >= bound:
            n -= 1
        while n**wide < bound:
            n += 1
        starts.append(n)
    return np.array(starts, np.int32)


def t5_bucket(relative_position, *, num_buckets=32, max_distance=128, bidirectional=False):
    """The bucket of a relative position, as T5 numbers them.

    Half of the buckets hold one distance each, the other half grow with the logarithm of the distance, and the last one
    holds all that is far. One-sided, a key after the query counts as distance 0. Two-sided, the first half of the buckets
    is for keys up to the query, the second for keys after it. The last bucket begins before `max_distance` (at 113 of
    128), as in all published code. Raffel et al. 2020 (arXiv 1910.10683). Exact for any setting and any int32.

    Args:
      relative_position: position of the key minus position of the query, integers of any shape.
      num_buckets: at least 2; two-sided an even number, at least 4.
      max_distance: scale of the wide buckets, in positions; above the number of exact buckets.
      bidirectional: whether keys after the query have buckets of their own.

    Returns:
      int32 in the shape of `relative_position`, 0 to `num_buckets - 1`.

    Raises:
      ValueError: numbers outside these ranges, or relative positions that are not integers.
    """
    check_buckets(num_buckets, max_distance, bidirectional)
    relative_position = jnp.asarray(relative_position)
    if not jnp.issubdtype(relative_position.dtype, jnp.integer):
        raise UserError(f"Relative positions must be integers; got {relative_position.dtype}.")
    ahead = jnp.maximum(relative_position.astype(jnp.int32), -_FARTHEST)  # the most negative int32 has no opposite
    side = num_buckets // 2 if bidirectional else num_buckets
    n = jnp.abs(ahead) if bidirectional else jnp.maximum(-ahead, 0)
    starts = bucket_starts(side, int(max_distance)).reshape((-1,) + (1,) * n.ndim)
    bucket = jnp.minimum(n, side // 2) + (n[None] >= starts).sum(0, dtype=jnp.int32)
    return bucket + jnp.where(ahead > 0, side, 0) if bidirectional else bucket


def check_buckets(num_buckets, max_distance, bidirectional):
    """Raises `ValueError` unless T5's buckets are defined for these numbers."""
    fewest = 4 if bidirectional else 2
    if num_buckets < fewest or (bidirectional and num_buckets % 2):
        raise UserError(f"num_buckets is {num_buckets}; it must be at least {fewest}"
                        f"{' and even, for two sides' if bidirectional else ''}.")
    exact = num_buckets // fewest
    if not exact < max_distance <= _FARTHEST or max_distance != int(max_distance):
        raise UserError(f"max_distance is {max_distance}; it must be an integer above {exact}, the number of distances with "
                        f"a bucket of their own{' on a side' if bidirectional else ''}, and below 2^31.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BucketBias:
    """`table[t5_bucket(j - i), h]`, of a table `[num_buckets, H]`."""
    table: jax.Array
    max_distance: int = dataclasses.field(metadata={"static": True})
    bidirectional: bool = dataclasses.field(metadata={"static": True})
    of_distance: ClassVar[bool] = True

    def block(self, q_positions, k_positions):
        bucket = t5_bucket(-distances(q_positions, k_positions), num_buckets=self.table.shape[0],
                           max_distance=self.max_distance, bidirectional=self.bidirectional)
        return jnp.moveaxis(self.table.astype(jnp.float32)[bucket], -1, -3)


@register_scheme("t5")
class T5(Scheme):
    """A learned bias for each head and each bucket of distances (`posjax.t5_bucket`).

    Raffel et al. 2020 (arXiv 1910.10683). One table, shared by all layers of a decoder, as in T5. It starts as
    N(0, 1/model_dim), the initialisation of Hugging Face; t5x draws from a uniform distribution.

    Args:
      num_buckets: rows of the table.
      max_distance: scale of the wide buckets, in positions.
      bidirectional: False for a causal model; True (an encoder) gives half of the buckets to keys after the query.
      scaled: whether `q.k` is divided by `sqrt(head_dim)`, as everywhere else in posjax. T5 does not divide, and starts
        from smaller query weights instead: False is for its checkpoints, too sharp for weights of the usual size.

    Training and evaluation:
      Clamps: all distances from the start of the last bucket (113 by default) share one bias, at any length. A bucket that
      no trained distance reaches keeps its random start, but for weight decay: 33 training tokens reach bucket 21 of 31.

    Where implementations differ:
      T5 itself does not divide `q.k` (`scaled=False`); x-transformers and GPT-NeoX multiply the bias by a scale of their own,
      which is left out. Float32 logarithms put some distances a bucket low (36 and 54 of 48 buckets up to 81), bfloat16 in
      JAX even by default (76, 112); here buckets are compared as integers. T5's layers share one table, and so do a decoder's
      here, unless `--config.layers.parameters=own`.
    """
    formula = "logit + b_h[bucket(i - j)], b learned"
    reference = "Raffel et al. 2020, arXiv 1910.10683"
    cost = "bias: O(num_buckets T^2), and a lookup O(T^2) a head"
    relative = True

    def __init__(self, *, num_buckets=32, max_distance=128, bidirectional=False, scaled=True, **dims):
        super().__init__(**dims)
        check_buckets(num_buckets, max_distance, bidirectional)
        rngs = required_rngs("t5", dims)
        self.max_distance, self.bidirectional = int(max_distance), bidirectional
        self.logit_scale = None if scaled else 1.0
        shape = (num_buckets, self.num_heads)
        self.table = nnx.Param(self.model_dim ** -0.5 * jax.random.normal(rngs.params(), shape))

    def bias(self):
        return BucketBias(self.table[...], self.max_distance, self.bidirectional)
