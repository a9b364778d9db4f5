"""Linear biases as channels: the same attention, by a kernel that knows no bias."""
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from posjax.errors import UserError
from posjax.ops import folded
from posjax.ops.attention import attention, choose, make_call
from posjax.ops.bias import LinearBias
from posjax.schemes.attend import attend, attend_call
from posjax.schemes.registry import make_scheme

B, H, DH = 4, 4, 8
SLOPES = np.asarray([0.5, 0.3, 0.011, 1.0], np.float32)  # not all powers of two: those would fit one piece
DTYPES = [np.float32, jnp.bfloat16, np.float16]


@pytest.fixture(autouse=True)
def quick():
    with tiny.quick_compilation():
        yield


def qkv(q_len=12, k_len=12, groups=2, head_dim=DH, dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = (B, q_len, H, head_dim), (B, k_len, groups, head_dim), (B, k_len, groups, head_dim)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def options(q_len=12, k_len=12, slopes=SLOPES, **more):
    positions = np.arange(k_len)
    return {"bias": LinearBias(slopes), "q_positions": positions[k_len - q_len:], "k_positions": positions, **more}


@functools.cache
def gradients(backend, window):
    """Output and gradients of slopes, q, k and v, for each row by itself."""
    def loss(slopes, *arrays):
        out = attention(*(x[None] for x in arrays), **options(arrays[0].shape[0], arrays[1].shape[0], slopes, window=window),
                        backend=backend)
        # Cotangents that bfloat16 has: their rounding would be no fault of a backend.
        weights = np.cos(np.arange(out.size)).astype(jnp.bfloat16).astype(np.float32).reshape(out.shape)
        return (out.astype(np.float32) * weights).sum(), out
    return jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True), in_axes=(None, 0, 0, 0)))


def errors(backend, arrays, window):
    """From the float32 reference, relative to its largest: the largest of output and of gradients of q, k and v, and, since
    there are few of them, the root mean square of the slopes' gradients."""
    def run(backend, arrays):
        return [np.asarray(x, np.float32) for x in jax.tree.leaves(gradients(backend, window)(SLOPES, *arrays))]
    exact = run("reference", [x.astype(np.float32) for x in arrays])
    d_slopes, *others = [(a - e) / np.abs(e).max() for a, e in zip(run(backend, arrays), exact, strict=True)]
    return [np.sqrt((d_slopes ** 2).mean()), *(np.abs(x).max() for x in others)]


@pytest.mark.parametrize("window, dtype", [(None, np.float32), (None, jnp.bfloat16), (None, np.float16), (40, np.float32)])
def test_output_and_gradients_are_as_exact_as_those_of_the_dense_backend(window, dtype):
    arrays = qkv(24, 700, dtype=dtype)
    # A sum of float32 rounds at the largest part, a slope times half the positions; in half precision that is nothing.
    rounding = 2.0**-23 * 350 if dtype is np.float32 else 0
    for mine, plain in zip(errors("folded", arrays, window), errors("dense", arrays, window), strict=True):
        assert mine <= 2 * plain + rounding


def test_far_positions_in_bfloat16_stay_apart():
    """A bias of `m j` rounded to bfloat16 would be the same for both keys."""
    arrays = qkv(1, 2, dtype=jnp.bfloat16)
    where = {"bias": LinearBias(SLOPES), "q_positions": np.asarray([400_000]), "k_positions": np.asarray([399_998, 399_999])}
    actual, exact = (attention(*arrays, **where, backend=name).astype(np.float32) for name in ("folded", "reference"))
    np.testing.assert_allclose(actual, exact, atol=2.0**-7 * np.abs(exact).max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_channels_hold_slopes_and_positions_exactly(dtype):
    """What a kernel multiplies in float32 sums up to `m (j - i)`, but for what all keys of a query share."""
    positions = np.asarray([3, 77, 5_001, 70_000, 200_001])
    call = make_call(*qkv(5, 5, dtype=dtype), bias=LinearBias(SLOPES), q_positions=positions, k_positions=positions)
    more = folded.fold(dataclasses.replace(call, q=jnp.zeros_like(call.q)))
    q, k = (np.asarray(x, np.float64)[0, :, :, DH:] for x in (more.q, more.k))
    product = np.einsum("qhd,kd->hqk", q, k[:, 0])
    expected = SLOPES.astype(np.float64)[:, None, None] * (positions - positions[-1])
    np.testing.assert_allclose(product - product[..., -1:], np.broadcast_to(expected, product.shape), atol=4e-3)


def test_it_serves_where_positions_are_known_to_be_in_order():
    def reason(**more):
        return folded.supports(make_call(*qkv(), **(options() | more)))

    def traced(positions):
        reasons.append(reason(k_positions=positions, q_positions=positions))
    reasons = []
    jax.eval_shape(traced, jnp.arange(12))
    assert reason() is None and "positions are traced" in reasons[0]
    assert reason(q_positions=np.arange(12) * 3, k_positions=np.arange(12) * 3) is None
    assert "stands after it" in reason(k_positions=np.arange(12)[::-1].copy())
    assert "stands after it" in reason(causal=False)
    assert reason(causal=False, q_positions=np.arange(12) + 11) is None
    assert reason(bias=None, causal=False) is None
    assert "span" in reason(q_positions=np.arange(12) + 2**25)


def test_default_positions_are_known_under_jit():
    alibi = make_scheme("alibi", num_heads=H, head_dim=DH)
    q, k, v = qkv()
    by_name = jax.jit(lambda q, k, v: attend(alibi, q, k, v, backend="folded"))(q, k, v)
    np.testing.assert_allclose(by_name, attend(alibi, q, k, v, backend="reference"), atol=1e-5)


def test_other_biases_are_refused_in_words():
    t5 = make_scheme("t5", num_heads=H, head_dim=DH, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match="folded cannot serve this call: its bias is a .*, not linear"):
        attend(t5, *qkv(), backend="folded")


def gpu_call(scheme="alibi", length=256, head_dim=64, dtype=jnp.bfloat16, **more):
    q, k, v = (jnp.zeros((1, length, n, head_dim), dtype) for n in (H, 2, 2))
    return attend_call(make_scheme(scheme, num_heads=H, head_dim=head_dim), q, k, v, platform="gpu", **more)


def test_auto_takes_it_on_gpu_where_cudnn_has_a_kernel():
    assert choose(gpu_call()).name == choose(gpu_call("rope", window=9)).name == "folded"
    ids = np.zeros((1, 256), np.int32)
    for call, reason in ((gpu_call(dtype=np.float32), "bfloat16 or float16"), (gpu_call(head_dim=128), "136 channels"),
                         (gpu_call(q_segment_ids=ids, k_segment_ids=ids), "segment"),
                         (gpu_call("rope", causal=False, window=3), "window")):
        assert reason in folded.supports(call) and choose(call).name == "chunked"
    assert choose(attend_call(make_scheme("alibi", num_heads=H, head_dim=DH), *qkv(256, 256), platform="cpu")).name == "chunked"


def test_it_lowers_to_cudnn_for_gpu(monkeypatch):
    """Without a GPU jax knows no version of cuDNN, and says so before it lowers anything: here it is told one."""
    from jax._src.cudnn import fused_attention_stablehlo
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)

    def loss(q, k, v):
        call = attend_call(make_scheme("alibi", num_heads=H, head_dim=64), q, k, v, platform="gpu")
        return folded.run(call).astype(np.float32).sum()
    q, k, v = (jax.ShapeDtypeStruct((1, 256, n, 64), jnp.bfloat16) for n in (H, 2, 2))
    unchecked = [jax.export.DisabledSafetyCheck.custom_call(f"__cudnn$fmhaSoftmax{part}") for part in ("", "Backward")]
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    text = jax.export.export(gradient, platforms=["cuda"], disabled_checks=unchecked)(q, k, v).mlir_module()
    assert "__cudnn$fmhaSoftmax" in text and "__cudnn$fmhaSoftmaxBackward" in text and "x72xbf16" in text
    assert "256x256" not in text
