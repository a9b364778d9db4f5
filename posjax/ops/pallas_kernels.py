"""The kernels of `posjax.ops.pallas`: one forward, two backward (for queries, and for keys and values)."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posjax.ops.dense import MASKED


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is fixed when a call is traced. `first_query` is None where it is not known by then."""
    causal: bool
    window: int | None
    scale: float
    q_block: int
    k_block: int
    k_len: int
    first_query: int | None
    interpret: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(spec, layout, q, k, v, slopes, tables, where):
    """Attention of queries on keys, padded to whole blocks.

    Args:
      spec: a `Spec`.
      layout: pair layout and rotated channels of the rotation, or None for none.
      q: `[B, H, Q, Dh]`, not rotated, not scaled.
      k, v: `[B, G, K, Dh]`, `[B, G, K, Dv]`.
      slopes: float32 `[H]` of a linear bias, or None.
      tables: cosines and sines for queries and for keys, `((cos, sin), (cos, sin))`, float32 `[1 or B, T, Dh]`, or None.
      where: int32 arrays by name: `first_query` `[1]`; with segments, `q_segments` `[B, Q, 1]` and `k_segments` `[B, 1, K]`;
        with slopes, `q_positions` and `k_positions` likewise.

    Returns:
      `[B, H, Q, Dv]` in the dtype of `q`.
    """
    return _forward(spec, layout, q, k, v, slopes, tables, where)[0]


def _attend_fwd(spec, layout, q, k, v, slopes, tables, where):
    out, lse = _forward(spec, layout, q, k, v, slopes, tables, where)
    return out, (q, k, v, slopes, tables, where, out, lse[..., 0])


def _attend_bwd(spec, layout, saved, d_out):
    q, k, v, slopes, tables, where, out, lse = saved
    # The part of a logit's gradient that all keys of a row share.
    shared = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    rows = {"d_out": d_out, "lse": lse[..., None], "shared": shared[..., None]}
    tile = _Tile(spec, layout, q, k, v, slopes, tables, where, rows)
    exact = jnp.float32 if layout else None  # to be rotated back, and rounded once
    outputs = {"d_q": (q.shape, exact or q.dtype)}
    scratch = {"d_q_sum": (tile.q_block(q), jnp.float32), "rotated": (tile.q_block(q), q.dtype)}
    if slopes is not None:
        outputs["d_slopes"] = (lse.shape + (1,), jnp.float32)
        scratch |= {name: ((spec.q_block, 1), jnp.float32) for name in _OF_SLOPES}
    d_q, *d_slopes = tile.call(_d_q_kernel, tile.by_queries, outputs, scratch)
    d_k, d_v = tile.call(
        _d_kv_kernel, tile.by_keys, {"d_k": (k.shape, exact or k.dtype), "d_v": (v.shape, v.dtype)},
        {"d_k_sum": (tile.k_block(k), jnp.float32), "d_v_sum": (tile.k_block(v), jnp.float32),
         "rotated": (tile.k_block(k), k.dtype)})
    d_tables = None
    if layout:
        (d_q, *d_q_tables), (d_k, *d_k_tables) = (
            jax.vjp(functools.partial(_rotated, layout), x, *table)[1](d_x)
            for x, table, d_x in ((q, tables[0], d_q), (k, tables[1], d_k)))
        d_tables = tuple(d_q_tables), tuple(d_k_tables)
    d_slopes = d_slopes[0].sum((0, 2, 3)) if d_slopes else None
    return d_q, d_k, d_v, d_slopes, d_tables, None


attend.defvjp(_attend_fwd, _attend_bwd)


def _forward(spec, layout, q, k, v, slopes, tables, where):
    """The output, and the log-sum-exp `[B, H, Q, 1]` of each query's logits."""
    tile = _Tile(spec, layout, q, k, v, slopes, tables, where, {})
    rows = (*q.shape[:3], 1)
    outputs = {"out": ((*q.shape[:3], v.shape[-1]), q.dtype), "lse": (rows, jnp.float32)}
    scratch = {"rotated": (tile.q_block(q), q.dtype), "peak": ((spec.q_block, 1), jnp.float32),
               "total": ((spec.q_block, 1), jnp.float32), "acc": ((spec.q_block, v.shape[-1]), jnp.float32)}
    return tile.call(_forward_kernel, tile.by_queries, outputs, scratch)


def _rotated(layout, x, cos, sin):
    """float32 `[B, H, T, Dh]`: in XLA, for the gradient."""
    swapped = _dot(x, _swap(layout, x.shape[-1], x.dtype), ((x.ndim - 1,), (0,)), _exact(x.dtype))
    return x.astype(jnp.float32) * cos[:, None] + swapped * sin[:, None]


def _swap(layout, channels, dtype):
    """The matrix `[Dh, Dh]` that puts at each rotated channel its partner, with the sign of its sine.

    A product moves channels exactly, whatever the layout, where lanes would have to be cut at odds with the tiles.
    """
    name, r = layout
    first = np.arange(0, r, 2) if name == "interleaved" else np.arange(r // 2)
    second = first + (1 if name == "interleaved" else r // 2)
    matrix = np.zeros((channels, channels), np.float32)
    matrix[second, first], matrix[first, second] = -1, 1
    return jnp.asarray(matrix, dtype)


def _dot(a, b, contract, precision=None):
    return jax.lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=jnp.float32, precision=precision)


def _quotient(x, size):
    """Of numbers of at least 0. (`//` asks for signs, and for those jax asks which TPU is here.)"""
    return jax.lax.div(jnp.asarray(x, jnp.int32), jnp.int32(size))


def _block_of(index, size):
    """The block that holds a token; the first one for tokens before it."""
    return _quotient(jnp.maximum(index, 0), size)


def _exact(dtype):
    """The precision at which a product with ones moves numbers as they are."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


# Sums over the keys of each query that make the slopes' gradient: weight times distance, times gradient, times both.
_OF_SLOPES = ("distance_sum", "d_weights_sum", "both_sum")
_A_BT = ((1,), (1,))
_A_B = ((1,), (0,))


class _Tile:
    """One block of queries against one block of keys: what the kernels share.

    Inside a kernel, `refs` are its blocks by name, and `at` is (row, head, block of queries, block of keys).
    """

    def __init__(self, spec, layout, q, k, v, slopes, tables, where, rows):
        self.spec, self.layout = spec, layout
        self.batch, self.heads = q.shape[:2]
        self.groups = k.shape[1]
        self.q_count, self.k_count = q.shape[2] // spec.q_block, k.shape[2] // spec.k_block
        self.inputs = {"q": q, "k": k, "v": v, **where, **rows}
        if slopes is not None:
            self.inputs["slopes"] = slopes
        if layout:
            self.inputs["swap"] = _swap(layout, q.shape[-1], q.dtype)
            (self.inputs["q_cos"], self.inputs["q_sin"]), (self.inputs["k_cos"], self.inputs["k_sin"]) = tables

    def q_block(self, x):
        return self.spec.q_block, x.shape[-1]

    def k_block(self, x):
        return self.spec.k_block, x.shape[-1]

    def by_queries(self):
        """A grid that ends with the blocks of keys, and where a step of it is; blocks that nobody sees are not fetched."""
        def at(b, h, i, j):
            if self.spec.first_query is not None:
                j = jnp.clip(j, *self.key_blocks(i, self.spec.first_query))
            return b, h, i, j
        return (self.batch, self.heads, self.q_count, self.k_count), at, lambda b, h, i, j: (b, h, i, j)

    def by_keys(self):
        """A grid that ends with the blocks of queries of all heads that share the keys."""
        group = self.heads // self.groups

        def raw(b, g, j, n):
            return b, g * group + _quotient(n, self.q_count), jax.lax.rem(n, jnp.int32(self.q_count)), j

        def at(b, g, j, n):
            b, h, i, j = raw(b, g, j, n)
            if self.spec.first_query is not None:
                i = jnp.clip(i, *self.query_blocks(j, self.spec.first_query))
            return b, h, i, j
        return (self.batch, self.groups, self.k_count, group * self.q_count), at, raw

    def key_blocks(self, i, first_query):
        """The first and the last block of keys that block `i` of queries may see."""
        spec = self.spec
        low = first_query + i * spec.q_block
        high = low + spec.q_block - 1
        first, last = 0, self.k_count - 1
        if spec.causal:
            last = jnp.minimum(last, _block_of(high, spec.k_block))
        if spec.window is not None:
            first = jnp.minimum(_block_of(low - spec.window + 1, spec.k_block), last)
            if not spec.causal:
                last = jnp.minimum(last, _block_of(high + spec.window - 1, spec.k_block))
        return first, last

    def query_blocks(self, j, first_query):
        """The first and the last block of queries that may see block `j` of keys."""
        spec = self.spec
        low = j * spec.k_block - first_query
        high = low + spec.k_block - 1
        first, last = 0, self.q_count - 1
        if spec.window is not None:
            last = jnp.minimum(last, _block_of(high + spec.window - 1, spec.q_block))
            if not spec.causal:
                first = jnp.minimum(_block_of(low - spec.window + 1, spec.q_block), last)
        if spec.causal:
            first = jnp.minimum(_block_of(low, spec.q_block), last)
        return first, last

    def call(self, kernel, grid_of, outputs, scratch):
        """Runs `kernel(tile, refs, at, step, steps)` on a grid; `outputs` and `scratch` are shapes and dtypes by name."""
        grid, at, raw = grid_of()
        names = [*self.inputs, *outputs, *scratch]

        def body(*refs):
            step = tuple(pl.program_id(axis) for axis in range(4))
            kernel(self, dict(zip(names, refs, strict=True)), raw(*step), step[3], grid[3])
        specs = {name: self.block_spec(name, x.shape, at) for name, x in self.inputs.items()}
        out_specs = [self.block_spec(name, shape, at) for name, (shape, _) in outputs.items()]
        return pl.pallas_call(
            body, grid=grid, in_specs=list(specs.values()), out_specs=out_specs,
            out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs.values()],
            scratch_shapes=[pltpu.VMEM(shape, dtype) for shape, dtype in scratch.values()], interpret=self.spec.interpret,
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        )(*self.inputs.values())

    def block_spec(self, name, shape, at):
        """Which block of an array a step of the grid has."""
        spec, group = self.spec, self.heads // self.groups
        if name in ("first_query", "slopes"):
            return pl.BlockSpec(memory_space=pltpu.SMEM)
        if name == "swap":
            return pl.BlockSpec(shape, lambda *step: (0, 0))
        of_keys = name in ("k", "v", "d_k", "d_v") or name.startswith("k_")
        size = spec.k_block if of_keys else spec.q_block
        if len(shape) == 4:
            def index(*step):
                b, h, i, j = at(*step)
                return (b, _quotient(h, group), j, 0) if of_keys else (b, h, i, 0)
            return pl.BlockSpec((None, None, size, shape[-1]), index)
        in_lanes = name in ("k_positions", "k_segments")

        def index_of_rows(*step):
            b, h, i, j = at(*step)
            n, row = j if of_keys else i, b if shape[0] > 1 else 0
            return (row, 0, n) if in_lanes else (row, n, 0)
        return pl.BlockSpec((None, 1, size) if in_lanes else (None, size, shape[-1]), index_of_rows)

    def rotated(self, refs, name):
        """Queries or keys of the block, rotated, in the dtype of products."""
        x = refs[name][...]
        if not self.layout:
            return x
        swapped = _dot(x, refs["swap"][...], _A_B, _exact(x.dtype))
        return (x.astype(jnp.float32) * refs[f"{name}_cos"][...] + swapped * refs[f"{name}_sin"][...]).astype(x.dtype)

    def is_seen(self, refs, at):
        """Whether the block may have a visible pair, by causality and the window."""
        _, _, i, j = at
        first, last = self.key_blocks(i, self.first_query(refs))
        return (first <= j) & (j <= last)

    def first_query(self, refs):
        return refs["first_query"][0] if self.spec.first_query is None else self.spec.first_query

    def distances(self, refs):
        """float32 `[Bq, Bk]`."""
        return jnp.abs(refs["q_positions"][...] - refs["k_positions"][...]).astype(jnp.float32)

    def logits(self, refs, at, q, k):
        """float32 `[Bq, Bk]`, masked."""
        spec, (_, h, i, j) = self.spec, at
        logits = _dot(q, k, _A_BT) * spec.scale  # in float32: a scaled bfloat16 query would be rounded once more
        if "slopes" in refs:
            logits = logits - refs["slopes"][h] * self.distances(refs)
        k_index = j * spec.k_block + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        lag = self.first_query(refs) + i * spec.q_block + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 0) - k_index
        seen = k_index < spec.k_len
        if spec.causal:
            seen &= lag >= 0
        if spec.window is not None:
            seen &= jnp.abs(lag) < spec.window
        if "q_segments" in refs:
            seen &= refs["q_segments"][...] == refs["k_segments"][...]
        return jnp.where(seen, logits, MASKED)

    def weights_again(self, refs, at, q, k):
        """The weights of a block, and their gradients, float32 `[Bq, Bk]`."""
        logits = self.logits(refs, at, q, k)
        weights = jnp.where(logits > MASKED / 2, jnp.exp(logits - refs["lse"][...]), 0.0)
        return weights, _dot(refs["d_out"][...], refs["v"][...], _A_BT)


def _fill(ref, value):
    ref[...] = jnp.full(ref.shape, value, ref.dtype)


def _forward_kernel(tile, refs, at, step, steps):
    @pl.when(step == 0)
    def _():
        refs["rotated"][...] = tile.rotated(refs, "q")
        for name, value in (("peak", MASKED), ("total", 0.0), ("acc", 0.0)):
            _fill(refs[name], value)

    @pl.when(tile.is_seen(refs, at))
    def _():
        logits = tile.logits(refs, at, refs["rotated"][...], tile.rotated(refs, "k"))
        peak = refs["peak"][...]
        new_peak = jnp.maximum(peak, logits.max(-1, keepdims=True))
        weights, keep = jnp.exp(logits - new_peak), jnp.exp(peak - new_peak)
        v = refs["v"][...]
        refs["peak"][...] = new_peak
        refs["total"][...] = refs["total"][...] * keep + weights.sum(-1, keepdims=True)
        refs["acc"][...] = refs["acc"][...] * keep + _dot(weights.astype(v.dtype), v, _A_B)

    @pl.when(step == steps - 1)
    def _():
        peak, total = refs["peak"][...], jnp.maximum(refs["total"][...], 1e-30)
        seen = peak > MASKED / 2  # else no key was visible: the row is zero by definition
        refs["out"][...] = jnp.where(seen, refs["acc"][...] / total, 0.0).astype(refs["out"].dtype)
        refs["lse"][...] = jnp.where(seen, peak + jnp.log(total), 0.0)


def _d_q_kernel(tile, refs, at, step, steps):
    learned = "d_slopes" in refs

    @pl.when(step == 0)
    def _():
        refs["rotated"][...] = tile.rotated(refs, "q")
        for name in ("d_q_sum", *(_OF_SLOPES if learned else ())):
            _fill(refs[name], 0.0)

    @pl.when(tile.is_seen(refs, at))
    def _():
        k = tile.rotated(refs, "k")
        weights, d_weights = tile.weights_again(refs, at, refs["rotated"][...], k)
        d_logits = weights * (d_weights - refs["shared"][...])
        refs["d_q_sum"][...] += _dot(d_logits.astype(k.dtype), k, _A_B) * tile.spec.scale
        if learned:
            far = weights * tile.distances(refs)
            for name, part in zip(_OF_SLOPES, (far, weights * d_weights, far * d_weights)):
                refs[name][...] += part.sum(-1, keepdims=True)

    @pl.when(step == steps - 1)
    def _():
        refs["d_q"][...] = refs["d_q_sum"][...].astype(refs["d_q"].dtype)
        if learned:
            # What all keys share comes from these sums, not from `shared`: that has the rounding of the output in it,
            # times the mean distance.
            distance, shared, both = (refs[name][...] for name in _OF_SLOPES)
            refs["d_slopes"][...] = distance * shared - both


def _d_kv_kernel(tile, refs, at, step, steps):
    @pl.when(step == 0)
    def _():
        refs["rotated"][...] = tile.rotated(refs, "k")
        for name in ("d_k_sum", "d_v_sum"):
            _fill(refs[name], 0.0)

    @pl.when(tile.is_seen(refs, at))
    def _():
        q, d_out = tile.rotated(refs, "q"), refs["d_out"][...]
        weights, d_weights = tile.weights_again(refs, at, q, refs["rotated"][...])
        d_logits = weights * (d_weights - refs["shared"][...])
        refs["d_v_sum"][...] += _dot(weights.T.astype(d_out.dtype), d_out, _A_B)
        refs["d_k_sum"][...] += _dot(d_logits.T.astype(q.dtype), q, _A_B) * tile.spec.scale

    @pl.when(step == steps - 1)
    def _():
        for name in ("d_k", "d_v"):
            refs[name][...] = refs[name + "_sum"][...].astype(refs[name].dtype)
