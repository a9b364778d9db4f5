"""Attention over a sequence whose tokens are spread over devices."""
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from posjax.errors import UserError, unknown
from posjax.ops.attention import check_call
from posjax.schemes.attend import attend_rotated, check_causal, check_features, check_queries


def attend_sharded(scheme, q, k, v, *, mesh, axis="sequence", positions=None, segment_ids=None, features=None, window=None,
                   causal=True, backend="auto"):
    """`attend` of a sequence on itself, its tokens in equal shards over an axis of a mesh: the same output and gradients.

    Each of N devices rotates and attends for its own T / N queries. Before that it gathers keys, values, positions, segment
    ids and features of the whole sequence, and the backward pass sends their gradients back: a device holds `G (Dk + Dv)`
    numbers for each of T tokens of a row, and blocks of logits as large as on one device. Under a causal window of w it
    fetches only the `ceil((w - 1) N / T)` shards before its own, unless the scheme `depends_on_length`. Positions are those
    of the whole sequence in every shard. Under the causal mask the last shard has the most to do.

    Args:
      scheme: a `posjax.Scheme`; what it learns is replicated, and has the gradient of the whole sequence.
      q: `[B, T, H, Dh]`, and so all arrays, as they are globally: laid out over the mesh already, or moved there.
      k, v: `[B, T, G, Dh]`; H is a multiple of G.
      mesh: a `jax.sharding.Mesh` whose other axes, if any, are `AxisType.Auto`; rows may lie along those.
      axis: the axis of the mesh that divides the tokens.
      positions: int32 `[T]` or `[B, T]`; None for 0 .. T-1.
      segment_ids: int32 `[B, T]`: tokens of different segments never see each other.
      features: `scheme.features(x)` of the T tokens, for a scheme that has any.
      window, causal, backend: as in `attend`.

    Returns:
      `[B, T, H, Dh]` in the dtype of `q`, its tokens along `axis`.

    Raises:
      ValueError: as `attend`; no such axis, or a number of tokens that its devices do not divide.
    """
    check_queries(scheme, q)
    check_features(scheme, features)
    check_causal(scheme, causal)
    if positions is None:
        positions = jnp.arange(k.shape[1], dtype=jnp.int32)
    check_call(q, k, v, positions, positions, segment_ids, segment_ids, causal, window)
    if axis not in mesh.shape:
        raise unknown("mesh axis", axis, mesh.axis_names)
    shards, tokens = mesh.shape[axis], q.shape[1]
    if tokens % shards:
        raise UserError(f"{tokens} tokens do not divide by the {shards} devices of the mesh axis {axis!r}: pad them to "
                        f"{tokens + -tokens % shards}, with segment_ids that give the padding a segment of its own.")
    graphdef, state = nnx.split(scheme)
    return _attend(state, q, k, v, jnp.asarray(positions, jnp.int32), segment_ids, features, graphdef=graphdef, mesh=mesh,
                   axis=axis, window=window, causal=causal, backend=backend)


@functools.partial(jax.jit, static_argnames=("graphdef", "mesh", "axis", "window", "causal", "backend"))
def _attend(state, q, k, v, positions, segment_ids, features, *, graphdef, mesh, axis, window, causal, backend):
    # Made of what is learned before anything is divided: how KERPLE holds it in bounds depends on the gradient of all shards.
    bias = nnx.merge(graphdef, state).bias()

    def local(state, bias, q, k, v, positions, segment_ids, features):
        return attend_shard(nnx.merge(graphdef, state), q, k, v, axis=axis, positions=positions, segment_ids=segment_ids,
                            features=features, window=window, causal=causal, backend=backend, bias=bias)
    tokens = PartitionSpec(None, axis)
    of_positions = tokens if positions.ndim == 2 else PartitionSpec(axis)
    return jax.shard_map(
        local, mesh=mesh, axis_names={axis}, check_vma=False, out_specs=tokens,
        in_specs=(PartitionSpec(), PartitionSpec(), tokens, tokens, tokens, of_positions, tokens, tokens),
    )(state, bias, q, k, v, positions, segment_ids, features)


def attend_shard(scheme, q, k, v, *, axis, positions, segment_ids=None, features=None, window=None, causal=True, backend="auto",
                 **bias):
    """What each device does in `attend_sharded`, for code that is under `jax.shard_map` over `axis` already.

    All arrays are the device's own shard, `[B, t, ...]`, positions int32 `[t]` or `[B, t]`; so is the result. `bias` is
    `scheme.bias()` where it is made already.
    """
    shards, here = jax.lax.axis_size(axis), q.shape[1]
    behind = shards - 1
    if causal and window is not None and not scheme.depends_on_length:
        behind = min(behind, -(-(window - 1) // here))
    gather = functools.partial(jax.tree.map, functools.partial(_gathered, axis=axis, shards=shards, behind=behind))
    k_positions = gather(positions)
    if scheme.depends_on_length:  # of all keys, which are rotated for it where they are used
        q, k = scheme.rotate(q, gather(k), positions, k_positions)
    else:
        q, k = scheme.rotate(q, k, positions, positions)
        k = gather(k)
    first_query = jnp.minimum(jax.lax.axis_index(axis), behind) * here
    return attend_rotated(scheme, q, k, gather(v), q_positions=positions, k_positions=k_positions,
                          q_segment_ids=segment_ids, k_segment_ids=gather(segment_ids), features=gather(features),
                          causal=causal, window=window, first_query=first_query, backend=backend, **bias)


def _gathered(x, *, axis, shards, behind):
    """The shards from `behind` before its own on, `[B, (behind + 1) t, ...]` of `[B, t, ...]`, or `[t]` likewise.

    A device with fewer before it has all those, its own, and then others, which causality hides.
    """
    dim = min(1, x.ndim - 1)
    if behind == shards - 1:
        return jax.lax.all_gather(x, axis, axis=dim, tiled=True)
    fetched = [jax.lax.ppermute(x, axis, [(n, (n + back) % shards) for n in range(shards)]) for back in range(behind, 0, -1)]
    missing = jnp.maximum(behind - jax.lax.axis_index(axis), 0)
    return jnp.roll(jnp.concatenate([*fetched, x], dim), -missing * x.shape[dim], dim)
