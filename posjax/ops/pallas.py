"""Flash attention as one Pallas kernel: the rotation, the linear bias and all masks are made inside it, forward and backward.

Written for TPU: blocks of 128 lanes, accumulators in VMEM scratch, scalars in SMEM. On CPU it runs interpreted, which is for
tests. On GPU it does not serve: Pallas reaches GPUs through Triton, deprecated since jax 0.11, or through Mosaic GPU, whose
interface changes with each release. There cuDNN's kernel (`posjax.ops.folded`) and `posjax.ops.chunked` serve.

After Dao 2023 (FlashAttention-2, arXiv 2307.08691): an online softmax over blocks of keys, and a backward pass that makes each
block again from the saved log-sum-exp. Queries and keys come raw and leave rotated for the product alone, by sines and cosines
that are made outside, from exact angles, once for all heads. Gradients reach the slopes, and the rotation.
"""

import jax.numpy as jnp

from posjax.ops.bias import beyond_linear

Q_BLOCK = K_BLOCK = 512


def supports(call):
    if call.platform == "gpu":
        return "Pallas has no path to GPUs that keeps its interface and does not warn"
    if call.q.dtype not in (jnp.float32, jnp.bfloat16) or not call.q.dtype == call.k.dtype == call.v.dtype:
        return f"the kernel takes float32 or bfloat16, not {call.q.dtype}"
    if jnp.ndim(call.first_query):
        return "rows differ in where their queries stand among the keys"
    return beyond_linear(call)


def declines(call):
    """Only on TPU is the kernel compiled."""
    return None if call.platform == "tpu" else f"on {call.platform} the kernel runs interpreted, which is slow"


def run(call):
    from posjax.ops import pallas_kernels  # Pallas takes half a second to import
    q_len, k_len = call.q.shape[1], call.k.shape[1]
    first = call.first_query if isinstance(call.first_query, int) else None
    q_block, k_block = block_sizes(call)
    spec = pallas_kernels.Spec(
        causal=call.causal, window=call.window, scale=float(call.scale), q_block=q_block, k_block=k_block, k_len=k_len,
        first_query=first, interpret=call.platform != "tpu")

    def rows(x, block, axis=-1):
        """`[1 or B, T, ...]`, padded to whole blocks."""
        if x is None:
            return None
        extra = [(0, 0)] * x.ndim
        extra[axis] = (0, -x.shape[axis] % block)
        return jnp.pad(x, extra)
    where = {"first_query": jnp.asarray(call.first_query, jnp.int32).reshape(1)}
    if call.q_segment_ids is not None:
        where |= {"q_segments": rows(call.q_segment_ids, q_block)[..., None],
                  "k_segments": rows(call.k_segment_ids, k_block)[:, None]}
    positions = [rows(jnp.atleast_2d(p), block) for p, block in ((call.q_positions, q_block), (call.k_positions, k_block))]
    if call.bias is not None:
        where |= {"q_positions": positions[0][..., None], "k_positions": positions[1][:, None]}
    tables = None if call.rotary is None else tuple(_tables(call.rotary, p, call.q.shape[-1]) for p in positions)
    q, k, v = (rows(x.transpose(0, 2, 1, 3), block, 2) for x, block in
               ((call.q, q_block), (call.k, k_block), (call.v, k_block)))
    slopes = None if call.bias is None else jnp.asarray(call.bias.slopes, jnp.float32)
    layout = None if call.rotary is None else (call.rotary.layout, call.rotary.rotary_dim)
    out = pallas_kernels.attend(spec, layout, q, k, v, slopes, tables, where)
    return out[:, :, :q_len].transpose(0, 2, 1, 3)


def block_sizes(call):
    """Queries and keys of a block: whole tiles of 128, no more than there are."""
    return tuple(min(most, length + -length % 128) for most, length in
                 ((Q_BLOCK, call.q.shape[1]), (K_BLOCK, call.k.shape[1])))


def _tables(rotary, positions, channels):
    """Cosines and sines for each channel, float32 `[1 or B, T, Dh]`; 1 and 0 where a channel is not rotated."""
    cos, sin = rotary.cos_sin(positions)
    rest = [(0, 0)] * (cos.ndim - 1) + [(0, channels - rotary.rotary_dim)]

    def wide(x, fill):
        x = x * rotary.amplitude
        x = jnp.repeat(x, 2, -1) if rotary.layout == "interleaved" else jnp.concatenate([x, x], -1)
        return jnp.pad(x, rest, constant_values=fill)
    return wide(cos, 1.0), wide(sin, 0.0)
