"""Linear biases as channels: the same attention, by a kernel that knows no bias."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.errors import UserError
from posjax.ops import folded
from posjax.ops.attention import attention, choose, make_call
from posjax.ops.bias import LinearBias
from posjax.schemes.attend import attend, attend_call
from posjax.schemes.registry import make_scheme

B, H, DH = 2, 4, 8
SLOPES = np.asarray([0.5, 0.3, 0.011, 1.0], np.float32)  # not all powers of two: those would fit one piece
DTYPES = [np.float32, jnp.bfloat16, np.float16]


def qkv(q_len=12, k_len=12, groups=2, head_dim=DH, dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = (B, q_len, H, head_dim), (B, k_len, groups, head_dim), (B, k_len, groups, head_dim)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def options(q_len=12, k_len=12, slopes=SLOPES, **more):
    positions = np.arange(k_len)
    return {"bias": LinearBias(slopes), "q_positions": positions[k_len - q_len:], "k_positions": positions, **more}


def error(backend, arrays, **more):
    """Of output and of gradients of everything, from those of the reference in float32, relative to its largest."""
    def run(backend, arrays):
        def loss(arrays, slopes):
            out = attention(*arrays, **options(arrays[0].shape[1], arrays[1].shape[1], slopes, **more), backend=backend)
            return (out.astype(np.float32) * np.cos(np.arange(out.size, dtype=np.float32)).reshape(out.shape)).sum(), out
        (d_arrays, d_slopes), out = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(arrays, SLOPES)
        return [np.asarray(x, np.float32) for x in (out, *d_arrays, d_slopes)]
    exact = run("reference", [x.astype(np.float32) for x in arrays])
    return [np.abs(a - e).max() / np.abs(e).max() for a, e in zip(run(backend, arrays), exact, strict=True)]


CASES = {
    "causal": {},
    "fewer queries, a window": {"q_len": 5, "window": 4},
    "many positions": {"q_len": 24, "k_len": 700},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_as_exact_as_those_of_the_dense_backend(case, dtype):
    more = dict(CASES[case])
    arrays = qkv(more.pop("q_len", 12), more.pop("k_len", 12), dtype=dtype)
    # A float32 sums positions times slopes: it rounds at the largest of those.
    rounding = 2.0**-23 * max(1, arrays[1].shape[1]) if dtype is np.float32 else 2.0**-20
    for mine, plain in zip(error("folded", arrays, **more), error("dense", arrays, **more), strict=True):
        assert mine <= 2 * plain + rounding


def test_far_positions_in_bfloat16_stay_apart():
    """A bias of `m j` rounded to bfloat16 is the same for the 8 nearest of 4,096 keys."""
    arrays, where = qkv(1, 2, dtype=jnp.bfloat16), {"q_positions": np.asarray([200_000]), "k_positions": np.asarray([0, 199_999])}
    arrays[0] *= 0
    out = {k: attention(*arrays, bias=LinearBias(SLOPES), backend="folded",
                        **(where | {"k_positions": np.asarray([k, 199_999])})) for k in (0, 199_998)}
    exact = attention(*arrays, bias=LinearBias(SLOPES), backend="reference", **(where | {"k_positions": np.asarray([199_998, 199_999])}))
    np.testing.assert_allclose(out[199_998].astype(np.float32), exact.astype(np.float32), atol=2.0**-8)
    np.testing.assert_array_equal(out[0], np.repeat(arrays[2], 2, axis=2)[:, 1:])


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
    t5 = make_scheme("t5", num_heads=H, head_dim=DH, rngs=None or __import__("flax").nnx.Rngs(0))
    with pytest.raises(UserError, match="folded cannot serve this call: its bias is a .*, not linear"):
        attend(t5, *qkv(), backend="folded")


def gpu_call(scheme="alibi", length=256, head_dim=64, dtype=jnp.bfloat16, **more):
    q, k, v = (jnp.zeros((1, length, n, head_dim), dtype) for n in (H, 2, 2))
    return attend_call(make_scheme(scheme, num_heads=H, head_dim=head_dim), q, k, v, platform="gpu", **more)


def test_auto_takes_it_on_gpu_where_cudnn_has_a_kernel():
    assert choose(gpu_call()).name == choose(gpu_call("rope", window=9)).name == "folded"
    ids = np.zeros((1, 256), np.int32)
    for call, reason in ((gpu_call(dtype=np.float32), "bfloat16 or float16"), (gpu_call(head_dim=128), "136 channels"),
                         (gpu_call(q_segment_ids=ids, k_segment_ids=ids), "segment"), (gpu_call("rope", causal=False, window=3), "window")):
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
    text = jax.export.export(jax.jit(jax.grad(loss, argnums=(0, 1, 2))), platforms=["cuda"],
                             disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("__cudnn$fmhaSoftmax"),
                                              jax.export.DisabledSafetyCheck.custom_call("__cudnn$fmhaSoftmaxBackward")])(q, k, v).mlir_module()
    assert "__cudnn$fmhaSoftmax" in text and "__cudnn$fmhaSoftmaxBackward" in text and "x72xbf16" in text
    assert "256x256" not in text
