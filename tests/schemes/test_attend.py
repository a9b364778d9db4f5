"""What attention refuses, on every path in one line."""
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.conformance.expect import close, same
from posjax.conformance.layer import T, backends, inputs, layer, project
from posjax.errors import UserError
from posjax.schemes.attend import attend
from posjax.schemes.registry import make_scheme

ROPE = make_scheme("rope", num_heads=4, head_dim=8)


def call(q_shape=(2, 3, 4, 8), k_shape=(2, 5, 2, 8), v_shape=None, scheme=ROPE, **options):
    return attend(scheme, jnp.ones(q_shape), jnp.ones(k_shape), jnp.ones(v_shape or k_shape), **options)


@pytest.mark.parametrize(("options", "message"), [
    ({"q_shape": (2, 3, 4, 16), "k_shape": (2, 5, 2, 16)}, "made for 4 heads of 8 channels.*got shape .2, 3, 4, 16."),
    ({"q_shape": (2, 3, 32)}, "got shape .2, 3, 32."),
    ({"k_shape": (2, 5, 3, 8)}, "4 query heads are not a multiple of the 3 key heads"),
    ({"k_shape": (3, 5, 2, 8)}, "do not fit together"),
    ({"v_shape": (2, 4, 2, 8)}, "do not fit together"),
    ({"q_shape": (2, 6, 4, 8)}, "6 queries on 5 keys: queries cannot outnumber keys"),
    ({"window": 0}, "window is 0"),
    ({"q_positions": np.arange(4)}, r"q_positions must be integers of shape \(3,\) or \(2, 3\); got int64 of shape \(4,\)"),
    ({"q_positions": np.arange(1)}, "q_positions must be integers"),
    ({"k_positions": np.zeros(5)}, "k_positions must be integers.*float64"),
    ({"q_segment_ids": np.zeros((2, 3), int)}, "both q_segment_ids and k_segment_ids"),
    ({"q_segment_ids": np.zeros((2, 5), int), "k_segment_ids": np.zeros((2, 5), int)}, "Segment ids must have shapes"),
    ({"backend": "dens"}, "Unknown attention backend 'dens'. Did you mean dense.*Known: auto, "),
])
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        call(**options)


def test_unsigned_positions_are_distances_too():
    # A difference of unsigned positions wraps around where the key lies after the query.
    alibi = make_scheme("alibi", num_heads=4, head_dim=8)
    q, k, v = project(alibi, inputs(alibi))
    positions = np.arange(T)
    results = [attend(alibi, q, k, v, q_positions=jnp.asarray(positions, dtype), k_positions=jnp.asarray(positions, dtype),
                      causal=False) for dtype in (jnp.int32, jnp.uint32, jnp.uint8)]
    same(results[1], results[0])
    same(results[2], results[0])


def test_values_of_positions_do_not_decide_causality():
    # NoPE with positions that fall sees what it saw before: the index decides.
    nope = make_scheme("nope", num_heads=4, head_dim=8)
    x = inputs(nope)
    same(layer(nope, x, np.arange(9)[::-1].copy()), layer(nope, x))


@pytest.mark.parametrize("backend", backends())
def test_the_last_queries_see_the_window_of_the_full_pass(backend):
    # A window, or the causal mask, counted from the first query and not from the last key.
    nope = make_scheme("nope", num_heads=4, head_dim=8)
    full = layer(nope, inputs(nope), window=3, backend=backend)
    for queries in (1, 2):
        close(layer(nope, inputs(nope), queries=queries, window=3, backend=backend), full[:, -queries:], 5e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_as_exact_as_a_plain_implementation(dtype):
    head_dim = 8  # its scale is no number of bf16
    scheme = make_scheme("nope", num_heads=2, head_dim=head_dim)
    q, k, v = (jnp.asarray(2 * np.random.default_rng(i).normal(size=(2, 33, 2, head_dim)), dtype) for i in range(3))
    exact = attend(scheme, *(x.astype(jnp.float32) for x in (q, k, v)), backend="reference")

    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * head_dim ** -0.5
    weights = jnp.exp(jnp.where(np.tri(33, dtype=bool)[None, None], logits, -jnp.inf))
    weights = (weights / weights.sum(-1, keepdims=True)).astype(dtype)
    plain = jnp.einsum("bhqk,bkhd->bqhd", weights, v).astype(jnp.float32)

    def error(x):
        return float(jnp.sqrt(((x.astype(jnp.float32) - exact) ** 2).mean()))
    assert error(attend(scheme, q, k, v)) <= 2 * error(plain)
