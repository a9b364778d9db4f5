"""What every positional scheme must do, as functions of a factory `make(rngs=...) -> scheme`.

A new scheme is tested by `CHECKS` before its author writes a test. Each check names the faults that it is for: the
numbers are those of the collection of faults that users reported in published code, whose kinds it covers.
"""
import inspect

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import posjax.schemes  # noqa: F401
from posjax.ops.attention import BACKENDS
from posjax.schemes.attend import attend

B, T, H, DH = 2, 9, 4, 8
D = H * DH
DIMS = {"num_heads": H, "head_dim": DH, "model_dim": D}
# Two orders of summing a softmax of nine float32 logits: some ten roundings of values around 1.
ATOL = 5e-6


def host(x):
    """A numpy array, whose slices cost no compilation; a traced value as it is."""
    return x if isinstance(x, jax.core.Tracer) else np.asarray(x)


def inputs(length=T, *, batch=B, dtype=jnp.float32, seed=0):
    """Token embeddings `[B, T, D]`."""
    return np.random.default_rng(seed).normal(size=(batch, length, D)).astype(dtype)


def project(x, *, groups=H, seed=1):
    """Queries, keys and values of embeddings, with fixed weights that make attention neither flat nor a maximum."""
    weights = np.random.default_rng(seed).normal(size=(D, 3 * H * DH)) / np.sqrt(D) * 1.3
    q, k, v = np.split(np.arange(3 * H * DH).reshape(3 * H, DH), 3)
    qkv = host(jnp.matmul(x, weights.astype(x.dtype)))
    return [qkv[..., which[:heads]] for which, heads in ((q, H), (k, groups), (v, groups))]


def layer(scheme, x, positions=None, *, queries=None, groups=H, segments=None, **options):
    """A decoder's attention layer up to its output `[B, Q, H, Dh]`; the last `queries` tokens ask, all if None."""
    length = x.shape[1]
    first = length - (length if queries is None else queries)
    positions = np.arange(length) if positions is None else positions
    # As in a cached decode step, the new tokens are embedded alone.
    q = project(scheme.embed(x[:, first:], positions[..., first:]), groups=groups)[0]
    _, k, v = project(scheme.embed(x, positions), groups=groups)
    if segments is not None:
        options |= {"q_segment_ids": segments[:, first:], "k_segment_ids": segments}
    options |= {"features": scheme.features(jnp.asarray(scheme.embed(x, positions)))}
    return host(attend(scheme, q, k, v, q_positions=positions[..., first:], k_positions=positions, **options))


def close(actual, expected, atol=ATOL):
    np.testing.assert_allclose(np.asarray(actual, np.float32), np.asarray(expected, np.float32), rtol=0, atol=atol)


def same(actual, expected):
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def differ(actual, expected, by=1e-3):
    assert np.abs(np.asarray(actual) - np.asarray(expected)).max() > by


def check_causal(make):
    """A token has no influence on what stands before it."""
    scheme, x = make(), inputs()
    changed = np.concatenate([x[:, :5], inputs(T - 5, seed=7)], 1)
    before, after = layer(scheme, x), layer(scheme, changed)
    same(after[:, :5], before[:, :5])
    differ(after[:, 5:], before[:, 5:])


def check_relative_as_declared(make):
    """Shifting all positions changes nothing where a scheme says so (faults 5, 6, 25), and something where it does not."""
    scheme, x = make(), inputs()
    shift = 1000 if scheme.max_length is None else min(1000, scheme.max_length - T)
    here, there = layer(scheme, x), layer(scheme, x, np.arange(T) + shift)
    if scheme.relative:
        close(there, here, 2e-5)  # besides the sums, an angle at 1000 is rounded to 2e-7 of pi
    else:
        differ(there, here)


def check_decode(make):
    """One query at the end of a cache is the last row of the full pass (faults 7, 35, 40, 46)."""
    scheme, x = make(), inputs()
    full = layer(scheme, x)
    for queries in (1, 4):
        close(layer(scheme, x, queries=queries), full[:, T - queries:])
    q, k, v = project(x)
    features = scheme.features(x)
    same(attend(scheme, q[:, -1:], k, v, features=features),
         attend(scheme, q[:, -1:], k, v, features=features, q_positions=np.arange(T)[-1:]))


def check_jit_once(make):
    """Positions are data: one compilation serves all offsets, and none is frozen into it (faults 12, 16, 48)."""
    scheme, x = make(), inputs()
    step = jax.jit(lambda x, start: layer(scheme, x, np.arange(T) + start))
    for start in (0, 5, 3):
        close(step(x, start), layer(scheme, x, np.arange(T) + start))
    assert step._cache_size() == 1


def check_packed(make):
    """Packed documents are as if alone (fault 32), and exactly untouched by their neighbours (fault 33)."""
    scheme, first, second = make(), inputs(4), inputs(5, seed=3)
    segments = np.asarray([[0] * 4 + [1] * 5] * B)
    positions = np.asarray([*range(4), *range(5)])
    packed = layer(scheme, np.concatenate([first, second], 1), positions, segments=segments)
    close(packed[:, :4], layer(scheme, first))
    close(packed[:, 4:], layer(scheme, second))
    other = layer(scheme, np.concatenate([inputs(4, seed=9), second], 1), positions, segments=segments)
    same(other[:, 4:], packed[:, 4:])


def check_rows(make):
    """Rows with positions of their own, gaps among them, are as if alone (faults 29, 31)."""
    scheme, x = make(), inputs()
    positions = np.stack([np.arange(T), 3 + 2 * np.arange(T)])
    rows = layer(scheme, x, positions)
    for i in range(B):
        close(rows[i], layer(scheme, x[i:i + 1], positions[i])[0])
    if not scheme.relative:
        differ(rows[1], layer(scheme, x)[1])


def check_mixed_ranks(make):
    """Positions of rows for the queries, and one row of positions for all keys."""
    scheme, (q, k, v) = make(), project(inputs())
    q, positions, features = q[:, -1:], np.full((B, 1), T - 1), scheme.features(inputs())
    close(attend(scheme, q, k, v, q_positions=positions, k_positions=np.arange(T), features=features),
          attend(scheme, q, k, v, features=features))


def check_left_padding(make):
    """A left-padded row is as if alone: the whole prompt, and the token decoded after it (faults 29, 30)."""
    scheme, x, pad = make(), inputs(), 3
    positions = np.stack([np.arange(T), np.maximum(np.arange(T) - pad, 0)])
    segments = np.stack([np.ones(T, int), (np.arange(T) >= pad).astype(int)])
    alone = layer(scheme, x[1:, pad:])[0]
    close(layer(scheme, x, positions, segments=segments)[1, pad:], alone)
    close(layer(scheme, x, positions, segments=segments, queries=1)[1], alone[-1:])
    close(layer(scheme, x, positions, segments=segments, queries=1)[0], layer(scheme, x, queries=1)[0])


def check_window(make):
    """A window of w shows w keys, in the full pass and in a decode step, on every backend (fault 43)."""
    scheme = make()
    q, k, _ = project(inputs(5))
    v = np.broadcast_to(np.eye(5, DH, dtype=np.float32)[None, :, None], k.shape)  # an output channel is a key's weight

    def seen(queries=5, **options):
        # Less what a scheme adds to the values.
        with_v, without = (host(attend(scheme, q[:, -queries:], k, x, features=scheme.features(inputs(5)), **options))
                           for x in (v, np.zeros_like(v)))
        return (with_v - without)[..., :5] > 0
    near = (np.subtract.outer(np.arange(5), np.arange(5)) < 3)[None, :, None]
    for backend in backends():
        # A scheme may give some heads narrower windows of its own, but not all.
        expected = seen(backend=backend) & near
        same(expected.sum(-1).max(2)[0], [1, 2, 3, 3, 3])
        for queries in (5, 1, 2):
            same(seen(queries, window=3, backend=backend), expected[:, -queries:])
    # Without a window, the query at position 4 sees all five keys (fault 46).
    same(seen(1).sum(-1).max(2), np.full((B, 1), 5))


def check_masked_rows(make):
    """A row that sees no key is zero with finite gradients, in bf16 and with all masks at once (faults 44, 45)."""
    scheme = make()
    for dtype in (jnp.float32, jnp.bfloat16):
        for backend in backends():
            def run(x, backend=backend):
                q, k, v = project(x)
                nowhere = np.asarray([[1] * (T - 1) + [2]] * B)
                return attend(scheme, q, k, v, q_segment_ids=nowhere, k_segment_ids=np.ones((B, T), int), window=4,
                              features=scheme.features(x), backend=backend)
            out, pullback = jax.vjp(run, inputs(dtype=dtype))
            (gradient,) = map(host, pullback(jnp.ones_like(out)))
            assert not host(out)[:, -1].any()
            assert host(out)[:, :-1].any(-1).all()
            assert np.isfinite(gradient.astype(np.float32)).all()
            assert gradient.any()


def check_half_precision(make):
    """Finite in bf16 and f16, where a product of queries and keys would not be, and of the input's dtype (fault 6)."""
    scheme = make()
    for dtype in (jnp.bfloat16, jnp.float16):
        out = layer(scheme, inputs(dtype=dtype))
        assert out.dtype == dtype
        close(out, layer(scheme, inputs()), 0.1)
        q, k, v = project((100 * inputs()).astype(dtype))
        assert np.einsum("bqhd,bkhd->bhqk", q.astype(np.float32), k.astype(np.float32)).max() > 65504
        features = scheme.features((100 * inputs()).astype(dtype))
        assert np.isfinite(host(attend(scheme, q, k, v, features=features)).astype(np.float32)).all()


def check_float32_phases(make):
    """Sines, cosines and exponentials are of float32 whatever the dtype of the model (faults 1 to 4)."""
    scheme = make()
    jaxpr = jax.make_jaxpr(lambda x: layer(scheme, x))(inputs(dtype=jnp.bfloat16))
    seen = [(e.primitive.name, e.invars[0].aval.dtype) for e in _equations(jaxpr.jaxpr)
            if e.primitive.name in ("sin", "cos", "exp")]
    assert ("exp", jnp.float32) in seen
    assert {dtype for _, dtype in seen} == {jnp.dtype("float32")}


def check_grouped_heads(make):
    """Grouped keys and values are the same as repeated ones, on every backend (fault 26)."""
    scheme, x = make(), inputs()
    q, k, v = project(x, groups=2)
    for backend in backends():
        options = {"features": scheme.features(x), "backend": backend}
        close(attend(scheme, q, k, v, **options), attend(scheme, q, np.repeat(k, 2, axis=2), np.repeat(v, 2, axis=2), **options))


def check_state(make):
    """What can be computed is not state: a scheme has learned parameters or nothing (faults 3, 49, 52)."""
    scheme = make()
    state = nnx.state(scheme)
    assert jax.tree.leaves(state) == [] or inspect.signature(make).parameters.get("rngs") is not None
    same(len(jax.tree.leaves(state)), len(jax.tree.leaves(nnx.state(scheme, nnx.Param))))


def check_abstract_restore(make):
    """Built without values, then given those of another: equal to it (fault 50)."""
    scheme, x = make(), inputs()
    graphdef, _ = nnx.split(nnx.eval_shape(make))
    same(layer(nnx.merge(graphdef, nnx.state(scheme)), x), layer(scheme, x))


def check_backends_agree(make):
    """Every backend against the reference, with grouped heads, a window and segments at once."""
    scheme, x = make(), inputs()
    segments = np.asarray([[0] * 3 + [1] * 6, [0] * 7 + [1] * 2])
    for options in ({}, {"causal": False}, {"window": 4, "segments": segments, "groups": 2}):
        if scheme.causal_only and "causal" in options:
            continue
        expected = layer(scheme, x, backend="reference", **options)
        for backend in backends():
            close(layer(scheme, x, backend=backend, **options), expected)


def check_gradients(make):
    """Gradients are finite, those of the parameters too, and no parameter is without one."""
    graphdef, state = nnx.split(make())

    def loss(state, x):
        return (layer(nnx.merge(graphdef, state), x) * np.linspace(-1, 1, DH, dtype=np.float32).reshape(1, 1, 1, DH)).sum()
    by_state, by_x = jax.grad(loss, argnums=(0, 1))(state, inputs())
    for leaf in jax.tree.leaves((by_state, by_x)):
        assert np.isfinite(host(leaf)).all()
        assert host(leaf).any()


def backends():
    """Names of those backends that serve the calls made here."""
    return [b.name for b in BACKENDS]


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


CHECKS = tuple(check for name, check in sorted(globals().items()) if name.startswith("check_"))
