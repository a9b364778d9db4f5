"""The flash kernel, interpreted, is attention: values, gradients, masks; and it lowers for TPU."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from posjax.ops import pallas
from posjax.ops.attention import attention, choose, make_call
from posjax.ops.bias import LinearBias
from posjax.schemes.attend import attend, attend_call
from posjax.schemes.registry import make_scheme

B, T, H, DH = 2, 13, 4, 8
SEGMENTS = np.asarray([[0] * 5 + [1] * 8, [0] * 2 + [1] * 10 + [2]], np.int32)
ROWS = np.stack([np.arange(T), 3 * np.arange(T)]).astype(np.int32)
SCHEMES = {
    "nope": {}, "alibi": {"learned": True}, "rope": {"fraction": 0.5},
    "scaled_rope": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 8, "layout": "interleaved"},
}
CALLS = {
    "causal": {},
    "fewer queries, a window, segments and rows of positions": {
        "q_len": 5, "window": 6, "k_positions": ROWS, "k_segment_ids": SEGMENTS, "q_segment_ids": SEGMENTS[:, -5:]},
    "both ways with a window": {"causal": False, "window": 4},
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks that divide nothing evenly, so that 13 tokens are several of them with padding."""
    monkeypatch.setattr(pallas, "block_sizes", lambda call: (4, 3))
    with tiny.quick_compilation():
        yield


def qkv(q_len=T, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(dtype) for shape in ((B, q_len, H, DH), (B, T, 2, DH), (B, T, 2, DH))]


def results(backend, scheme, arrays, call):
    """Output, and gradients of q, k, v and of what the scheme learns, in float32."""
    graphdef, state = scheme

    def loss(state, arrays):
        out = attend(nnx.merge(graphdef, state), *arrays, backend=backend, **call)
        # Cotangents that bfloat16 has: their rounding would be no fault of a backend.
        weights = np.cos(np.arange(out.size)).astype(jnp.bfloat16).astype(np.float32).reshape(out.shape)
        return (out.astype(np.float32) * weights).sum(), out
    found = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(state, arrays)
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(found)]


CASES = [("nope", "both ways with a window", np.float32), ("rope", "causal", np.float32), ("rope", "causal", jnp.bfloat16),
         *((name, list(CALLS)[1], np.float32) for name in ("rope", "scaled_rope")),
         *(("alibi", call, dtype) for call in CALLS for dtype in (np.float32, jnp.bfloat16))]


@pytest.mark.parametrize("name, call, dtype", CASES)
def test_error_is_at_most_twice_that_of_the_dense_backend(name, call, dtype):
    """Of output and all gradients, from those of the float32 reference."""
    scheme = nnx.split(make_scheme(name, num_heads=H, head_dim=DH, rngs=nnx.Rngs(0), **SCHEMES[name]))
    call = dict(CALLS[call])
    arrays = qkv(call.pop("q_len", T), dtype)
    exact = results("reference", scheme, [x.astype(np.float32) for x in arrays], call)
    for mine, plain, true in zip(*(results(b, scheme, arrays, call) for b in ("pallas", "dense")), exact, strict=True):
        scale = max(1.0, np.abs(true).max())
        # Where the plain implementation is right to the last bit by luck: a few roundings of the float32 reference itself.
        assert np.abs(mine - true).max() <= 2 * np.abs(plain - true).max() + 4 * 2.0**-23 * scale


def test_gradients_reach_the_rotation():
    """As a scheme that learned its frequencies would need."""
    rotary = make_scheme("rope", num_heads=H, head_dim=DH).rotary()

    def gradient(backend):
        def loss(rest, amplitude):
            turned = type(rotary)(rotary.turns, rest, amplitude)
            out = attention(*qkv(), rotary=turned, q_positions=np.arange(T), k_positions=np.arange(T), backend=backend)
            return (out ** 2).sum()
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(rotary.rest, rotary.amplitude)
    for actual, expected in zip(gradient("pallas"), gradient("reference"), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4)


def test_rows_that_see_nothing_are_zero_with_finite_gradients():
    nowhere = np.full((B, T), 7, np.int32)
    nowhere[:, :3] = 0

    def run(q):
        return attention(q, *qkv()[1:], q_positions=np.arange(T), k_positions=np.arange(T), q_segment_ids=nowhere,
                         k_segment_ids=np.zeros((B, T), np.int32), backend="pallas")
    out, pull = jax.vjp(run, qkv()[0])
    assert not out[:, 3:].any() and out[:, :3].any(-1).all()
    assert np.isfinite(pull(jnp.ones_like(out))[0]).all()


def test_vmap_and_a_traced_first_query():
    """As seeds are trained, and as a cache is read: each replica with slopes of its own."""
    slopes = np.asarray([[0.5, 0.1, 1.0, 0.3], [0.2, 0.7, 0.0, 0.4]], np.float32)
    q, k, v = qkv(3)

    def one(slopes, q, first, backend):
        return attention(q, k, v, bias=LinearBias(slopes), q_positions=np.arange(5, 8), k_positions=np.arange(T),
                         first_query=first, backend=backend)

    def all_of(backend):
        f = jax.vmap(jax.value_and_grad(lambda *a: (one(*a, backend) ** 2).sum(), argnums=(0, 1)), in_axes=(0, 0, None))
        return jax.tree.leaves(jax.jit(f)(slopes, np.stack([q, 2 * q]), 5))
    for actual, expected in zip(all_of("pallas"), all_of("reference"), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5 * max(1, np.abs(expected).max()))


def test_blocks_that_nobody_sees_are_neither_computed_nor_fetched():
    from posjax.ops.pallas_kernels import Spec, _Tile

    def bounds(causal=True, window=None, first=0):
        spec = Spec(causal=causal, window=window, scale=1.0, q_block=4, k_block=3, k_len=12, first_query=first, interpret=True)
        x, y = np.zeros((1, 1, 12 - first, 2)), np.zeros((1, 1, 12, 2))
        tile = _Tile(spec, None, x, y, y, None, None, {}, {})
        of_queries = [tile.key_blocks(i, first) for i in range(tile.q_count)]
        of_keys = [tile.query_blocks(j, first) for j in range(tile.k_count)]
        return [[(int(a), int(b)) for a, b in rows] for rows in (of_queries, of_keys)]
    assert bounds() == [[(0, 1), (0, 2), (0, 3)], [(0, 2), (0, 2), (1, 2), (2, 2)]]
    assert bounds(window=2) == [[(0, 1), (1, 2), (2, 3)], [(0, 0), (0, 1), (1, 2), (2, 2)]]
    assert bounds(causal=False, window=2) == [[(0, 1), (1, 2), (2, 3)], [(0, 0), (0, 1), (1, 2), (2, 2)]]
    assert bounds(first=4) == [[(0, 2), (0, 3)], [(0, 1), (0, 1), (0, 1), (1, 1)]]


@pytest.mark.parametrize("name", ["rope", "alibi"])
def test_it_lowers_for_tpu(name, monkeypatch):
    """To one kernel forward and two backward, for blocks of 128 lanes, with the rotation inside: no product outside."""
    monkeypatch.undo()
    ids = jax.ShapeDtypeStruct((1, 300), np.int32)

    def loss(q, k, v, ids):
        call = attend_call(make_scheme(name, num_heads=H, head_dim=64), q, k, v, q_segment_ids=ids, k_segment_ids=ids,
                           window=200, platform="tpu")
        assert choose(call).name == "pallas"
        return pallas.run(call).astype(np.float32).sum()
    q, k, v = (jax.ShapeDtypeStruct((1, 300, n, 64), jnp.bfloat16) for n in (H, 2, 2))
    lowered = jax.export.export(jax.jit(jax.grad(loss, argnums=(0, 1, 2))), platforms=["tpu"])(q, k, v, ids)
    assert lowered.mlir_module().count("stablehlo.custom_call @tpu_custom_call") == 3


def test_reasons_are_given_in_words():
    def reason(name="rope", dtype=np.float32, **more):
        scheme = make_scheme(name, num_heads=H, head_dim=DH, rngs=nnx.Rngs(0))
        return pallas.supports(attend_call(scheme, *qkv(dtype=dtype), **more))
    assert reason() is None and reason("alibi", window=3, causal=False) is None
    assert "Pallas" in reason(platform="gpu") and "not linear" in reason("t5") and "float16" in reason(dtype=np.float16)
    call = make_call(*qkv(), q_positions=np.arange(T), k_positions=np.arange(T), platform="cpu")
    assert "interpreted" in pallas.declines(call)
