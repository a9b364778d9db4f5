"""Linear biases as channels of queries and keys, for flash kernels that know no bias: cuDNN's on GPU.

Where no key stands after its query in position, `-m |i - j|` is `m (j - i)`: a product of channels that queries and keys carry
beside their own. The slope is split into pieces of the dtype, the largest first, and so is the position of the key; a channel
for each pair of pieces makes their product exact in the float32 in which a kernel sums. What is left is the rounding of that
sum, a float32's at `m` times half the span of positions: below the rounding of bfloat16 weights up to 64k tokens, but not what
the distance itself would give in float32. `-m i`, the same for all keys of a query, changes no weight and needs one piece;
it keeps the logits small. (`m j` rounded to bfloat16 instead is wrong by 2.4 at 4,096 tokens.)

On GPU the kernel is cuDNN's, by `jax.nn.dot_product_attention`; elsewhere dense attention stands in for it. A learned slope gets
its gradient from `posjax.ops.chunked`, which takes distances: out of bfloat16 products with positions it would be noise.
"""
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from posjax.ops import chunked, dense
from posjax.ops.bias import LinearBias, beyond_linear

MOST_SPAN = 2**24  # positions: beyond it a float32 skips integers
_SHIFT = 2.0**8  # from positions to slopes, so that float16 holds both
_ARRAYS = ("q", "k", "v", "q_positions", "k_positions", "q_segment_ids", "k_segment_ids", "first_query")


def supports(call):
    reason = beyond_linear(call)
    if reason is None and call.bias is not None:
        reason = _not_ordered(call)
    if reason is None and call.platform == "gpu":
        reason = _beyond_cudnn(call)
    return reason


def declines(call):
    """Without such a kernel, more channels are only more work."""
    return None if call.platform == "gpu" else f"it is for the flash kernel of GPUs, and this is {call.platform}"


def run(call):
    """The output for `call`, whose queries and keys are rotated."""
    out = _kernel(fold(call))[..., :call.v.shape[-1]]
    if call.bias is None:
        return out
    arrays = {name: getattr(call, name) for name in _ARRAYS}
    static = dataclasses.replace(call, bias=None, given_positions=None, **dict.fromkeys(_ARRAYS))
    return _with_slopes(static, out, call.bias.slopes, arrays)


def fold(call):
    """The same call without a bias, scale 1; channels of q, k and v padded to one multiple of 8. No gradient into slopes."""
    q = call.q * jnp.asarray(call.scale, call.q.dtype)  # rounded as the dense backend does it
    more_q, more_k = [], []
    if call.bias is not None:
        dtype, (of_slope, of_key), (low, high) = call.q.dtype, _pieces(call), _span(call)
        slopes = jax.lax.stop_gradient(jnp.asarray(call.bias.slopes, jnp.float32))[None, None, :]
        middle = jnp.int32((low + high) // 2)
        q_offset, k_offset = (jnp.atleast_2d(p - middle).astype(jnp.float32)[..., None]
                              for p in (call.q_positions, call.k_positions))
        for slope in _split(slopes * _SHIFT, dtype, of_slope):
            for key in _split(k_offset / _SHIFT, dtype, of_key):
                more_q.append(slope)
                more_k.append(key)
        more_q.append((-slopes / _SHIFT * q_offset).astype(dtype))
        more_k.append(jnp.full((1, 1, 1), _SHIFT, dtype))
    width = _width(call)
    return dataclasses.replace(call, q=_widened(q, more_q, width), k=_widened(call.k, more_k, width),
                               v=_widened(call.v, [], width), bias=None, scale=1.0)


def _span(call):
    """The lowest and the highest position."""
    known = call.known_positions()
    return int(min(p.min() for p in known)), int(max(p.max() for p in known))


def _pieces(call):
    """How many pieces the slopes take, and the positions of keys as far from the middle as they may be."""
    digits = jnp.finfo(call.q.dtype).nmant + 1
    low, high = _span(call)

    def count(bits):  # rounding to the nearest leaves a signed rest, which holds one digit more
        return 1 + max(0, -(-(bits - digits) // (digits + 1)))
    return count(24), count((high - (low + high) // 2).bit_length())


def _width(call):
    """Channels of the folded heads."""
    more = 0 if call.bias is None else 1 + math.prod(_pieces(call))
    width = max(call.q.shape[-1] + more, call.v.shape[-1])
    return width + -width % 8


def _split(x, dtype, count):
    """float32 `x` as `count` arrays of `dtype`, the largest first, that sum up to it."""
    pieces = []
    for _ in range(count):
        # Not by casting there and back, which a compiler may take for nothing.
        rounded = jax.lax.reduce_precision(x, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)
        pieces.append(rounded.astype(dtype))
        x = x - rounded
    return pieces


def _widened(x, more, width):
    """`x` `[B, T, H, D]` with channels `more`, each broadcast from `[1 or B, 1 or T, 1 or H]`, and zeros, up to `width`."""
    channels = [x, *(jnp.broadcast_to(channel, x.shape[:3])[..., None] for channel in more)]
    rest = width - x.shape[-1] - len(more)
    return jnp.concatenate([*channels, jnp.zeros((*x.shape[:3], rest), x.dtype)], -1)


def _kernel(call):
    if call.platform != "gpu":
        return dense.run(call)
    window = None if call.window is None else (call.window - 1, 0)
    return jax.nn.dot_product_attention(call.q, call.k, call.v, scale=call.scale, is_causal=call.causal,
                                        local_window_size=window, implementation="cudnn")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_slopes(static, out, slopes, arrays):
    """`out`, as it depends on the slopes: on everything else it does so by itself."""
    return out


def _with_slopes_fwd(static, out, slopes, arrays):
    return out, (slopes, arrays)


def _with_slopes_bwd(static, saved, d_out):
    slopes, arrays = saved
    call = dataclasses.replace(static, **arrays)
    _, pull = jax.vjp(lambda slopes: chunked.run(dataclasses.replace(call, bias=LinearBias(slopes))), slopes)
    return d_out, *pull(d_out), None


_with_slopes.defvjp(_with_slopes_fwd, _with_slopes_bwd)


def _not_ordered(call):
    """Why a visible key may stand after its query in position, or None."""
    known = call.known_positions()
    if known is None:
        return ("positions are traced, and a bias can be folded only where no key is known to stand after its query: leave "
                "them out, or give NumPy arrays")
    q_positions, k_positions = known
    last = np.full(q_positions.shape[-1], k_positions.shape[-1] - 1)
    if call.causal and not isinstance(call.first_query, jax.core.Tracer) and not np.ndim(call.first_query):
        last = np.minimum(last, np.arange(last.size) + int(call.first_query))
    if (np.maximum.accumulate(k_positions, -1)[..., last] > q_positions).any():
        return "a query sees a key that stands after it in position, where a folded bias would have the wrong sign"
    span = int(max(q_positions.max(), k_positions.max())) - int(min(q_positions.min(), k_positions.min()))
    return f"positions span {span}, more than {MOST_SPAN}" if span > MOST_SPAN else None


def _beyond_cudnn(call):
    """Why cuDNN's kernel, as jax calls it, cannot serve a call on GPU, or None."""
    if call.q.dtype not in (jnp.bfloat16, jnp.float16) or not call.q.dtype == call.k.dtype == call.v.dtype:
        return f"cuDNN's kernel takes bfloat16 or float16, not {call.q.dtype}"
    if call.q_segment_ids is not None:
        return "cuDNN's kernel takes no segment ids, as jax calls it"
    first = call.first_query
    if call.causal and (isinstance(first, jax.core.Tracer) or np.any(np.asarray(first) != 0)):
        return "cuDNN's causal mask lets the first query see one key: it takes as many queries as keys"
    if call.window is not None and not call.causal:
        return "cuDNN's kernel has no window on later keys"
    width, most = _width(call), _most_channels()
    if width > most:
        return f"it would take {width} channels a head, and cuDNN's kernel has at most {most} here"
    return None


def _most_channels():
    """Channels of a head that cuDNN has kernels for, by the GPU that is here; jax takes none for an older one."""
    gpus = [device for device in jax.local_devices() if device.platform == "gpu"]
    return 256 if gpus and all(float(getattr(gpu, "compute_capability", 0)) >= 9 for gpu in gpus) else 128
