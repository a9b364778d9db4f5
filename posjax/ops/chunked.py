"""Attention a block at a time: memory linear in the number of tokens, forward and backward.

Blocks of queries meet blocks of keys under an online softmax (Milakov and Gimelshein 2018; Rabe and Staats 2021, arXiv
2112.05682); the backward pass makes each block again from the saved log-sum-exp (Dao 2023, arXiv 2307.08691), and runs
the bias's own gradient block by block. Blocks that causality, the window or the segments rule out are never visited.
Where a scheme makes its own logits, a block of queries meets all keys at once.
"""
import dataclasses
import functools

import jax
import jax.numpy as jnp

from posjax.ops import dense
from posjax.ops.bias import block_of

MASKED = dense.MASKED


@dataclasses.dataclass(frozen=True)
class _Spec:
    """What is fixed when a call is traced."""
    causal: bool
    window: int | None
    q_block: int
    k_block: int
    q_len: int
    k_len: int


def supports(call):
    return None


def run(call):
    q_block, k_block = block_sizes(call)
    if call.logits is not None or call.values is not None:
        return _by_rows(call, q_block)
    batch, q_len, heads, _ = call.q.shape
    k_len, groups = call.k.shape[1:3]
    spec = _Spec(call.causal, call.window, q_block, k_block, q_len, k_len)

    def padded(x, block, axis):
        if x is None:
            return None
        extra = [(0, 0)] * x.ndim
        extra[axis] = (0, -x.shape[axis] % block)
        return jnp.pad(x, extra)
    # Scaling the queries is cheaper than scaling the logits, and keeps bf16 products in range.
    q = padded((call.q * jnp.asarray(call.scale, call.q.dtype)).transpose(0, 2, 1, 3), q_block, 2)
    k, v = (padded(x.transpose(0, 2, 1, 3), k_block, 2) for x in (call.k, call.v))
    out = _attend(spec, q, k, v, call.bias, padded(call.q_positions, q_block, -1), padded(call.k_positions, k_block, -1),
                  padded(call.q_segment_ids, q_block, -1), padded(call.k_segment_ids, k_block, -1),
                  jnp.asarray(call.first_query, jnp.int32).reshape(-1))
    return out[:, :, :q_len].transpose(0, 2, 1, 3)


def block_sizes(call):
    """Queries and keys of a block: as measured on two CPU cores, at 2,048 and 4,096 tokens of 8 heads of 64 channels."""
    return min(256, call.q.shape[1]), min(256, call.k.shape[1])


def _by_rows(call, q_block):
    """Blocks of queries against all keys, made again in the backward pass."""
    batch, q_len = call.q.shape[:2]
    count = -(-q_len // q_block)

    def blocks(x, axis):
        extra = [(0, 0)] * x.ndim
        extra[axis] = (0, count * q_block - q_len)
        shape = (*x.shape[:axis], count, q_block, *x.shape[axis + 1:])
        return jnp.moveaxis(jnp.pad(x, extra).reshape(shape), axis, 0)

    @jax.checkpoint
    def one(block):
        index, q, positions, segments = block
        return dense.run(dataclasses.replace(call, q=q, q_positions=positions, q_segment_ids=segments,
                                             first_query=call.first_query + index * q_block))
    segments = None if call.q_segment_ids is None else blocks(call.q_segment_ids, 1)
    out = jax.lax.map(one, (jnp.arange(count, dtype=jnp.int32), blocks(call.q, 1),
                            blocks(call.q_positions, call.q_positions.ndim - 1), segments))
    return jnp.moveaxis(out, 0, 1).reshape(batch, count * q_block, *out.shape[3:])[:, :q_len]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(spec, q, k, v, bias, q_positions, k_positions, q_segments, k_segments, first_query):
    """Queries `[B, H, Q, Dh]`, keys and values `[B, G, K, D]`, padded to whole blocks; returns `[B, H, Q, Dv]`."""
    return _forward(spec, q, k, v, bias, q_positions, k_positions, q_segments, k_segments, first_query)[0]


def _forward(spec, q, k, v, bias, *where):
    """The output, and the log-sum-exp `[B, H, Q]` of each query's logits."""
    batch, heads, q_total, _ = q.shape
    tile = _Tile(spec, q, k, bias, *where)
    first, last = tile.key_blocks()

    def one(index):
        def step(n, carry):
            peak, total, acc = carry
            logits = tile.logits(index, n, bias)
            new_peak = jnp.maximum(peak, logits.max(-1))
            weights = jnp.exp(logits - new_peak[..., None])
            keep = jnp.exp(peak - new_peak)
            here = tile.keys(v, n)
            part = _dot(tile.grouped(weights).astype(v.dtype), here, ((3,), (2,)))
            return new_peak, total * keep + weights.sum(-1), acc * keep[..., None] + tile.ungrouped(part)
        rows = (batch, heads, spec.q_block)
        start = (jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32),
                 jnp.zeros((*rows, v.shape[-1]), jnp.float32))
        peak, total, acc = jax.lax.fori_loop(first[index], last[index], step, start)
        seen = peak > MASKED / 2  # else no key was visible: the row is zero by definition
        out = jnp.where(seen[..., None], acc / jnp.maximum(total, 1e-30)[..., None], 0.0)
        return out.astype(q.dtype), jnp.where(seen, peak + jnp.log(jnp.maximum(total, 1e-30)), 0.0)
    out, lse = jax.lax.map(one, jnp.arange(q_total // spec.q_block, dtype=jnp.int32))
    return _joined(out), _joined(lse)


def _attend_fwd(spec, q, k, v, bias, *where):
    out, lse = _forward(spec, q, k, v, bias, *where)
    return out, (q, k, v, bias, where, out, lse)


def _attend_bwd(spec, saved, d_out):
    q, k, v, bias, where, out, lse = saved
    tile = _Tile(spec, q, k, bias, *where)
    first, last = tile.key_blocks()
    # The part of a logit's gradient that all keys of a row share.
    shared = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)

    def one(carry, index):
        d_out_here, lse_here, shared_here = (tile.queries(x, index) for x in (d_out, lse, shared))
        q_here = tile.grouped(tile.queries(q, index))
        d_out_here = tile.grouped(d_out_here)

        def step(n, carry):
            d_q, d_k, d_v, d_bias = carry
            if bias is None:
                logits = tile.logits(index, n, None)
            else:
                logits, pull = jax.vjp(lambda bias: tile.logits(index, n, bias), bias)
            weights = jnp.where(logits > MASKED / 2, jnp.exp(logits - lse_here[..., None]), 0.0)
            low = tile.grouped(weights).astype(v.dtype)
            d_v = tile.add(d_v, _dot(low, d_out_here, ((2,), (2,))), n)
            d_weights = tile.ungrouped(_dot(d_out_here, tile.keys(v, n), ((3,), (3,))))
            d_logits = weights * (d_weights - shared_here[..., None])
            if bias is not None:
                # None, of what is no float, must meet its (empty) gradient.
                d_bias = jax.tree.map(_plus, d_bias, pull(d_logits)[0], is_leaf=lambda leaf: leaf is None)
            low = tile.grouped(d_logits).astype(q.dtype)
            d_q = d_q + _dot(low, tile.keys(k, n), ((3,), (2,)))
            return d_q, tile.add(d_k, _dot(low, q_here, ((2,), (2,))), n), d_v, d_bias
        d_q, *carry = jax.lax.fori_loop(first[index], last[index], step, (jnp.zeros(q_here.shape, jnp.float32), *carry))
        return tuple(carry), tile.ungrouped(d_q).astype(q.dtype)
    empty = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32), jax.tree.map(_zeros, bias))
    (d_k, d_v, d_bias), d_q = jax.lax.scan(one, empty, jnp.arange(q.shape[2] // spec.q_block, dtype=jnp.int32))
    return _joined(d_q), d_k.astype(k.dtype), d_v.astype(v.dtype), d_bias, *(None for _ in where)


_attend.defvjp(_attend_fwd, _attend_bwd)


class _Tile:
    """One block of queries against one block of keys."""

    def __init__(self, spec, q, k, bias, q_positions, k_positions, q_segments, k_segments, first_query):
        self.spec, self.q, self.k = spec, q, k
        self.q_positions, self.k_positions = q_positions, k_positions
        self.q_segments, self.k_segments = q_segments, k_segments
        self.first_query = first_query

    def queries(self, x, index):
        """Block `index` of `x`, along the axis of queries (the third of `[B, H, Q, ...]`, else the last)."""
        axis = 2 if x.ndim > 2 else x.ndim - 1
        return jax.lax.dynamic_slice_in_dim(x, index * self.spec.q_block, self.spec.q_block, axis)

    def keys(self, x, n):
        axis = 2 if x.ndim > 2 else x.ndim - 1
        return jax.lax.dynamic_slice_in_dim(x, n * self.spec.k_block, self.spec.k_block, axis)

    def add(self, x, part, n):
        """`x` `[B, G, K, D]` with `part` added to block `n` of its keys."""
        start = n * self.spec.k_block
        here = jax.lax.dynamic_slice_in_dim(x, start, self.spec.k_block, 2)
        return jax.lax.dynamic_update_slice_in_dim(x, here + part, start, 2)

    def grouped(self, x):
        """`[B, H, Bq, ...]` as `[B, G, H / G * Bq, ...]`: the queries that share a key head are rows of one product."""
        return x.reshape(x.shape[0], self.k.shape[1], -1, *x.shape[3:])

    def ungrouped(self, x):
        return x.reshape(x.shape[0], self.q.shape[1], -1, *x.shape[3:])

    def logits(self, index, n, bias):
        """float32 `[B, H, Bq, Bk]`, masked."""
        q = self.grouped(self.queries(self.q, index))
        logits = self.ungrouped(_dot(q, self.keys(self.k, n), ((3,), (3,))))
        if bias is not None:
            block = block_of(bias, self.queries(self.q_positions, index), self.keys(self.k_positions, n))
            logits = logits + (block if block.ndim == 4 else block[None])
        return jnp.where(self.visible(index, n), logits, MASKED)

    def visible(self, index, n):
        """bool `[1 or B, 1, Bq, Bk]`."""
        spec = self.spec
        k_index = n * spec.k_block + jnp.arange(spec.k_block, dtype=jnp.int32)
        q_index = index * spec.q_block + jnp.arange(spec.q_block, dtype=jnp.int32)
        lag = self.first_query[:, None, None] + (q_index[:, None] - k_index[None])[None]
        seen = jnp.broadcast_to((k_index < spec.k_len)[None, None], lag.shape)
        if spec.causal:
            seen &= lag >= 0
        if spec.window is not None:
            seen &= jnp.abs(lag) < spec.window
        seen = seen[:, None]
        if self.q_segments is not None:
            q, k = self.queries(self.q_segments, index), self.keys(self.k_segments, n)
            seen = seen & (q[:, None, :, None] == k[:, None, None, :])
        return seen

    def key_blocks(self):
        """For each block of queries, the first block of keys that it may see, and one past the last: int32 `[n]` each."""
        spec = self.spec
        count, q_count = self.k.shape[2] // spec.k_block, self.q.shape[2] // spec.q_block
        start = jnp.arange(q_count, dtype=jnp.int32) * spec.q_block
        # Of all rows, which share the blocks that are visited.
        low, high = self.first_query.min() + start, self.first_query.max() + start + spec.q_block - 1
        first, last = jnp.zeros_like(low), jnp.full_like(low, count)
        if spec.causal:
            last = jnp.minimum(last, high // spec.k_block + 1)
        if spec.window is not None:
            first = jnp.maximum(first, (low - spec.window + 1) // spec.k_block)
            if not spec.causal:
                last = jnp.minimum(last, (high + spec.window - 1) // spec.k_block + 1)
        if self.q_segments is not None:
            # Segments usually follow one another: their ranges rule out what lies before and after.
            q, k = (x.reshape(x.shape[0], -1, size) for x, size in
                    ((self.q_segments, spec.q_block), (self.k_segments, spec.k_block)))
            meet = ((q.min(-1)[:, :, None] <= k.max(-1)[:, None]) & (q.max(-1)[:, :, None] >= k.min(-1)[:, None])).any(0)
            block = jnp.arange(count, dtype=jnp.int32)[None]
            first = jnp.maximum(first, jnp.where(meet, block, count).min(-1))
            last = jnp.minimum(last, jnp.where(meet, block + 1, 0).max(-1))
        return first, last


def _dot(a, b, contract):
    """The product of `[B, G, ...]` arrays over one axis each, in float32."""
    return jax.lax.dot_general(a, b, (contract, ((0, 1), (0, 1))), preferred_element_type=jnp.float32)


def _joined(blocks):
    """`[n, B, H, Bq, ...]` as `[B, H, n * Bq, ...]`."""
    out = jnp.moveaxis(blocks, 0, 2)
    return out.reshape(*out.shape[:2], -1, *out.shape[4:])


def _zeros(leaf):
    return jnp.zeros(leaf.shape, leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else None


def _plus(total, part):
    return total if total is None else total + part
