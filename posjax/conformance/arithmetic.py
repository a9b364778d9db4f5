"""Numbers: precision and dtypes, grouped heads, agreement of backends."""
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posjax.conformance import expect
from posjax.conformance.layer import ATOL, Layer, T, backends, inputs, quick_compilation


@quick_compilation()
def check_half_precision(subject):
    """bf16 and f16 are of the input's dtype and near float32, and finite where products of queries and keys are not."""
    scheme, layer = subject.scheme, subject.layer
    q, k, _, _ = layer.projected(inputs(scheme), np.arange(T))
    overflowing = np.sqrt(1e6 / np.einsum("bqhd,bkhd->bhqk", q, k).max())
    for dtype in (jnp.bfloat16, jnp.float16):
        name, out = jnp.dtype(dtype).name, layer(inputs(scheme, dtype=dtype))
        expect.that(out.dtype == dtype, f"dtype of the output for {name} inputs: expected the same, found {out.dtype}.")
        expect.close(out, layer(inputs(scheme)), 0.1, f"outputs in {name}, against float32")
        expect.finite(layer((overflowing * inputs(scheme)).astype(dtype)), f"outputs in {name} where q.k reaches 1e6")


def check_float32_phases(subject):
    """Sines, cosines and exponentials are of float32 whatever the dtype of the model."""
    jaxpr = jax.make_jaxpr(lambda x: Layer(subject.scheme)(x))(inputs(subject.scheme, dtype=jnp.bfloat16))
    seen = [(e.primitive.name, e.invars[0].aval.dtype) for e in _equations(jaxpr.jaxpr)
            if e.primitive.name in ("sin", "cos", "exp")]
    expect.that(("exp", jnp.float32) in seen, "the softmax of a bfloat16 model: expected an exp of float32, found none.")
    other = sorted({f"{name} of {dtype}" for name, dtype in seen if dtype != jnp.float32})
    expect.that(not other, f"sines, cosines and exponentials of a bfloat16 model: expected float32, found {', '.join(other)}.")


@quick_compilation()
def check_grouped_heads(subject):
    """Grouped keys and values are the same as repeated ones, on every backend."""
    x, layer, heads = inputs(subject.scheme), subject.layer, subject.scheme.num_heads
    groups = _groups(heads)
    q, k, v, features = layer.projected(x, np.arange(T), groups=groups)
    for backend in backends():
        grouped, repeated = (layer.attend(q, *(np.repeat(y, times, axis=2) for y in (k, v)), features, np.arange(T),
                                          np.arange(T), backend=backend) for times in (1, heads // groups))
        expect.close(grouped, repeated, ATOL, f"{heads} heads on {groups} of keys, against repeated keys, backend {backend}")


@quick_compilation()
def check_backends_agree(subject):
    """Every backend agrees with the reference, with grouped heads, a window and segments at once."""
    scheme, x, layer = subject.scheme, inputs(subject.scheme), subject.layer
    segments = np.asarray([[0] * 3 + [1] * 6, [0] * 7 + [1] * 2])
    calls = [{}, {"window": 4, "segments": segments, "groups": _groups(scheme.num_heads)}]
    for options in calls if scheme.causal_only else [*calls, {"causal": False}]:
        expected = layer(x, backend="reference", **options)
        for backend in backends():
            expect.close(layer(x, backend=backend, **options), expected, ATOL,
                         f"backend {backend} against the reference with {', '.join(options) or 'no options'}")


def check_strict(subject):
    """It is made and traced, forwards and backwards, without a warning and without mixing dtypes by accident."""
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("strict"):
        warnings.simplefilter("error")
        graphdef, state = nnx.split(subject.make())
        for dtype in (jnp.float32, jnp.bfloat16):
            def total(state, x):
                return Layer(nnx.merge(graphdef, state))(x).sum()
            jax.eval_shape(jax.grad(total, argnums=(0, 1)), state, inputs(subject.scheme, dtype=dtype))


def _groups(heads):
    """The number of key heads: half of the query heads, or the next that divides them."""
    return max(g for g in range(1, heads // 2 + 1) if heads % g == 0) if heads > 1 else 1


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)
