"""Attention in blocks is attention: values, gradients, masks; and it holds no array of T x T."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from posjax.ops import chunked
from posjax.ops.attention import attention
from posjax.ops.bias import LinearBias, block_of
from posjax.schemes.attend import attend, attend_rotated
from posjax.schemes.registry import SCHEMES, make_scheme

B, T, H, DH = 2, 13, 4, 8
DIMS = {"num_heads": H, "head_dim": DH}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks that divide nothing evenly, so that 13 tokens are several of them with padding."""
    monkeypatch.setattr(chunked, "block_sizes", lambda call: (4, 3))
    with tiny.quick_compilation():
        yield


def arrays(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def qkv(q_len=T, groups=2, dtype=np.float32):
    return arrays(B, q_len, H, DH, dtype=dtype), *(arrays(B, T, groups, DH, seed=n, dtype=dtype) for n in (1, 2))


def scheme_and_state(name, **hyper):
    return nnx.split(make_scheme(name, **DIMS, rngs=nnx.Rngs(0), **hyper))


SEGMENTS = np.asarray([[0] * 5 + [1] * 8, [0] * 2 + [1] * 10 + [2]], np.int32)
ROWS = np.stack([np.arange(T), 3 * np.arange(T)]).astype(np.int32)
CALLS = {
    "causal": {},
    "fewer queries, a window, segments and rows of positions": {
        "q_len": 5, "window": 6, "k_positions": ROWS, "k_segment_ids": SEGMENTS, "q_segment_ids": SEGMENTS[:, -5:]},
    "both ways with a window": {"causal": False, "window": 4},
}
CASES = [(name, call) for name in SCHEMES.names() for call in CALLS
         if CALLS[call].get("causal", True) or name in ("nope", "alibi", "t5")]


@pytest.mark.parametrize("name, call", CASES)
def test_output_and_gradients_are_those_of_the_reference(name, call):
    options = dict(CALLS[call])
    graphdef, state = scheme_and_state(name)
    q, k, v = qkv(options.pop("q_len", T))
    d_out = arrays(*q.shape, seed=5)

    def run(backend):
        def loss(state, q, k, v):
            scheme = nnx.merge(graphdef, state)
            x = arrays(B, T, H * DH, seed=9)
            out = attend(scheme, q, k, v, features=scheme.features(x), backend=backend, **options)
            return (out * d_out).sum(), out
        gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(state, q, k, v)
        return jax.tree.leaves((gradients, out))
    for actual, expected in zip(run("chunked"), run("reference"), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("backend", ["chunked", "dense", "reference"])
@pytest.mark.parametrize("name", ["alibi", "cope"])  # in blocks of keys, and against all keys at once
def test_rows_may_begin_at_different_keys(name, backend):
    """As in a cache of rows of different lengths: each row equals itself with a first query of its own."""
    scheme = make_scheme(name, **DIMS, rngs=nnx.Rngs(0))
    first, positions = np.asarray([8, 2], np.int32), np.arange(T)

    def run(q, k, v, first, backend):
        q_positions = jnp.atleast_1d(first)[:, None] + jnp.arange(5)[None]
        return attend_rotated(scheme, q, k, v, features=None, q_positions=jnp.broadcast_to(q_positions, q.shape[:2]),
                              k_positions=positions, window=4, first_query=first, backend=backend)
    q, k, v = qkv(5)
    out = jax.jit(run, static_argnames="backend")(q, k, v, first, backend)
    for i in range(B):
        alone = run(*(x[i:i + 1] for x in (q, k, v)), int(first[i]), "reference")
        np.testing.assert_allclose(out[i], alone[0], atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_as_near_as_the_dense_backend_twice(dtype):
    options = {"bias": LinearBias(np.asarray([0.5, 0.25, 0.1, 1.0], np.float32)), "q_positions": np.arange(T),
               "k_positions": np.arange(T)}
    call = qkv(dtype=dtype)
    exact = np.asarray(attention(*(x.astype(np.float32) for x in call), backend="reference", **options))
    errors = [np.abs(np.asarray(attention(*call, backend=b, **options), np.float32) - exact).max() for b in ("chunked", "dense")]
    assert errors[0] <= 2 * errors[1]


def test_rows_that_see_nothing_are_zero_with_finite_gradients():
    nowhere = np.full((B, T), 7, np.int32)
    nowhere[:, :3] = 0

    def run(q):
        return attention(q, *qkv()[1:], q_positions=np.arange(T), k_positions=np.arange(T), q_segment_ids=nowhere,
                         k_segment_ids=np.zeros((B, T), np.int32), backend="chunked")
    out, pull = jax.vjp(run, qkv()[0])
    assert not out[:, 3:].any() and out[:, :3].any(-1).all()
    assert np.isfinite(pull(jnp.ones_like(out))[0]).all()


def test_blocks_that_nobody_sees_are_not_visited():
    """By causality, by the window, by the segments: first and past-the-last key block of each query block."""
    def bounds(causal=True, window=None, segments=None, first=(0,)):
        x, first = jnp.zeros((1, 1, 12, 2)), jnp.asarray(first, jnp.int32)
        tile = chunked._Tile(chunked._Spec(causal, window, 4, 3, 12, 12), x, x, None, None, None, segments, segments, first)
        return [np.asarray(bound).tolist() for bound in tile.key_blocks()]
    assert bounds(causal=False) == [[0, 0, 0], [4, 4, 4]]
    assert bounds() == [[0, 0, 0], [2, 3, 4]]
    assert bounds(window=2) == [[0, 1, 2], [2, 3, 4]]
    assert bounds(window=2, first=(1, 4)) == [[0, 1, 2], [3, 4, 4]]  # what any row sees
    assert bounds(causal=False, window=2) == [[0, 1, 2], [2, 3, 4]]
    assert bounds(segments=jnp.asarray([[0] * 6 + [1] * 6])) == [[0, 0, 2], [2, 3, 4]]


@pytest.mark.parametrize("name", SCHEMES.names())
def test_no_array_of_all_pairs_is_made(name, monkeypatch):
    """Forward and backward hold at most a block of queries against all keys."""
    length = 80
    monkeypatch.setattr(chunked, "block_sizes", lambda call: (8, 16))
    graphdef, state = scheme_and_state(name)

    def loss(state, q):
        scheme = nnx.merge(graphdef, state)
        x = jnp.zeros((1, length, H * DH), jnp.float32)
        return attend(scheme, q, q, q, features=scheme.features(x), backend="chunked").sum()
    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(state, jnp.zeros((1, length, H, DH)))
    shapes = {v.aval.shape for e in equations(jaxpr.jaxpr) for v in e.outvars if hasattr(v.aval, "shape")}
    assert (1, H, length, DH) in shapes or (1, length, H, DH) in shapes
    assert not [shape for shape in shapes if shape.count(length) > 1 or np.prod(shape, initial=1) >= H * length * length]


@pytest.mark.parametrize("name", ["nope", "rope", "alibi", "t5", "kerple", "fire"])
def test_memory_is_linear_in_the_number_of_tokens(name, monkeypatch):
    """As XLA plans it, forward and backward; all pairs would take four times as much for twice the tokens."""
    monkeypatch.setattr(chunked, "block_sizes", lambda call: (8, 16))
    graphdef, state = scheme_and_state(name)

    def temporaries(length):
        def loss(state, q, k, v):
            return attend(nnx.merge(graphdef, state), q, k, v, backend="chunked").sum()
        x = jax.ShapeDtypeStruct((1, length, H, DH), jnp.float32)
        program = jax.jit(jax.grad(loss, argnums=range(4))).lower(state, x, x, x).compile()
        return program.memory_analysis().temp_size_in_bytes
    assert temporaries(512) <= 2.05 * temporaries(256)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize("q_len, k_len", [(4, 3), (3, 5), (1, 4), (4, 1)])
def test_a_bias_of_distance_is_laid_out_along_the_diagonals(q_len, k_len):
    """Exactly the block that it stands for, in gradient too; where positions have gaps, the block itself."""
    bias, weights = make_scheme("t5", **DIMS, rngs=nnx.Rngs(0)).bias(), arrays(H, q_len, k_len)

    def both(f, *positions):
        out, pull = jax.vjp(lambda bias: f(bias, *positions), bias)
        return out, pull(weights)[0].table
    for k_positions in (np.arange(k_len) + 2, np.arange(k_len) * 2):
        positions = jnp.arange(q_len) + 7, jnp.asarray(k_positions)
        actual, expected = both(block_of, *positions), both(type(bias).block, *positions)
        np.testing.assert_array_equal(actual[0], expected[0])
        np.testing.assert_allclose(actual[1], expected[1], atol=1e-5)
