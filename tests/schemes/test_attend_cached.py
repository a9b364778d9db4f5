"""Decoding from every kind of cache equals the full pass, under every scheme."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from posjax.compilations import compilations
from posjax.conformance.layer import ATOL, inputs, layer, project, quick_compilation
from posjax.errors import UserError
from posjax.ops.caches.codecs import quantisation_error
from posjax.schemes.attend import attend, attend_cached, make_cache
from posjax.schemes.registry import SCHEMES, make_scheme

LAYOUTS = {"dense": {}, "sliding": {"window": 4}, "paged": {"page_size": 3, "num_pages": 6}}
PROMPT, STEPS, COUNTS = 5, 3, np.asarray([5, 3])
# Keys and values within 1/254 of the largest channel: logits of 1 or 2 move by hundredths, outputs of that size too.
INT8_ATOL = 0.05


@functools.cache
def make(name, **hyper):
    return make_scheme(name, num_heads=4, head_dim=8, rngs=nnx.Rngs(0), **hyper)


def decoded(scheme, x, counts, cache, *, steps=STEPS, groups=2):
    """The real outputs of each row: of a prompt padded on the right, and of later tokens one by one."""
    rows = [[], []]
    count, new = x.shape[1] - steps, np.asarray(counts)
    at = np.zeros(2, int)
    for t in range(steps + 1):
        part = np.stack([row[i:i + count] for row, i in zip(x, at)])
        embedded = scheme.embed(part, cache.place(count, counts=new)[0])
        out, cache = attend_cached(scheme, *project(scheme, np.asarray(embedded), groups=groups), cache, counts=new,
                                   features=scheme.features(embedded))
        assert np.isfinite(out).all()  # padding too
        for row, o, n in zip(rows, np.asarray(out), new):
            row.append(o[:n])
        at, count, new = at + new, 1, np.ones(2, int)
    return [np.concatenate(row) for row in rows]


@pytest.mark.parametrize("quantise", [None, "int8"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SCHEMES.names())
def test_rows_of_different_lengths_equal_rows_alone(name, layout, quantise):
    scheme, options = make(name), LAYOUTS[layout]
    x = inputs(scheme, PROMPT + STEPS)
    with quick_compilation():
        full = layer(scheme, x, groups=2, window=options.get("window"))
        cache = make_cache(scheme, 8, batch_size=2, num_groups=2, quantise=quantise, **options)
        rows = decoded(scheme, x, COUNTS, cache)
    for row, expected in zip(rows, full):
        np.testing.assert_allclose(row, expected[:len(row)], rtol=0, atol=INT8_ATOL if quantise else ATOL)


AT_LENGTH = {
    "dynamic": {"factor": 4.0},
    "longrope": {"factor": 4.0, "short_factor": (1.0,) * 4, "long_factor": (1.0, 2.0, 3.0, 4.0)},
}


@pytest.mark.parametrize("quantise", [None, "int8"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", AT_LENGTH)
def test_keys_are_rotated_for_the_length_of_now(kind, layout, quantise):
    """Keys kept as they were rotated at a shorter length, or by the length of the longest row."""
    scheme = make("scaled_rope", rope_type=kind, original_max_position_embeddings=5, **AT_LENGTH[kind])
    x, options = inputs(scheme, PROMPT + STEPS), LAYOUTS[layout]
    with quick_compilation():
        one = functools.partial(layer, scheme, groups=2, window=options.get("window"))
        cache = make_cache(scheme, 8, batch_size=2, num_groups=2, quantise=quantise, **options)
        rows = decoded(scheme, x, COUNTS, cache)
        for i, (row, count) in enumerate(zip(rows, COUNTS)):
            expected = [one(x[:, :count])[i], *(one(x[:, :t + 1], queries=1)[i] for t in range(count, count + STEPS))]
            np.testing.assert_allclose(row, np.concatenate(expected), rtol=0, atol=INT8_ATOL if quantise else ATOL)
        apart = np.abs(one(x)[0] - rows[0])[:PROMPT].max()
    assert apart > 5e-3  # the switch matters


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_compilation_serves_all_steps_and_a_donated_cache(layout):
    scheme = make("rope")
    x, options = inputs(scheme, 9), LAYOUTS[layout]
    full = layer(scheme, x, window=options.get("window"))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, x, counts):
        return attend_cached(scheme, *project(scheme, x), cache, counts=counts)[::-1]
    cache, outs = make_cache(scheme, 9, batch_size=2, **options), []
    with compilations() as compiled:
        for t in range(9):
            before = cache
            cache, out = step(cache, x[:, t:t + 1], jnp.ones(2, jnp.int32))
            outs.append(out)
    assert compiled.count("jit(step)") == 1
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.layout))
    np.testing.assert_allclose(np.concatenate(outs, 1), full, rtol=0, atol=ATOL)
    cache, out = step(cache, x[:, :1], jnp.asarray([1, 0]))
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all() and cache.overfull.tolist() == [True, False]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_left_padding_is_not_seen(layout):
    scheme, pad, options = make("t5"), 2, LAYOUTS[layout]
    x, index = inputs(scheme, 8), np.arange(6)
    alone = layer(scheme, x[:, pad:], window=options.get("window"))
    cache = make_cache(scheme, 9, batch_size=2, **options)
    out, cache = attend_cached(scheme, *project(scheme, x[:, :6]), cache, positions=np.maximum(index - pad, 0),
                               segment_ids=np.broadcast_to((index >= pad).astype(np.int32), (2, 6)))
    np.testing.assert_allclose(out[:, pad:], alone[:, :4], rtol=0, atol=ATOL)
    for t in (6, 7):
        out, cache = attend_cached(scheme, *project(scheme, x[:, t:t + 1]), cache)
        np.testing.assert_allclose(out, alone[:, t - pad:t - pad + 1], rtol=0, atol=ATOL)


@pytest.mark.parametrize("quantise", [None, "int8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sequence_in_a_released_row_is_as_if_alone(layout, quantise):
    """Under a scheme that looks at the longest position of a row, so that a position left behind shows."""
    scheme = make("scaled_rope", rope_type="dynamic", original_max_position_embeddings=2, factor=4.0)
    x, options = inputs(scheme, 8), LAYOUTS[layout]
    empty = make_cache(scheme, 9, batch_size=2, quantise=quantise, **options)
    waits = np.asarray([0, 1])

    def run(cache, start, count, counts=None):
        return attend_cached(scheme, *project(scheme, x[:, start:start + count]), cache, counts=counts)
    _, cache = run(empty, 0, 8)
    cache = cache.release(np.asarray([False, True]))
    out, cache = run(cache, 2, 3, 3 * waits)
    expected, alone = run(empty, 2, 3)
    np.testing.assert_allclose(out[1], expected[1], rtol=0, atol=ATOL)
    np.testing.assert_allclose(run(cache, 5, 1)[0][1], run(alone, 5, 1)[0][1], rtol=0, atol=ATOL)
    np.testing.assert_allclose(run(cache, 6, 1)[0][0], run(run(empty, 0, 8)[1], 6, 1)[0][0], rtol=0, atol=ATOL)


def test_a_prompt_longer_than_the_window_and_blocks_of_tokens():
    """Chunked prompts, each longer than the window or not, on every backend that serves many queries."""
    scheme = make("alibi")
    x = inputs(scheme, 400)
    full = layer(scheme, x, window=7, groups=1)
    cache, at = make_cache(scheme, batch_size=2, num_groups=1, window=7), 0
    for count in (150, 3, 200, 1, 46):
        out, cache = attend_cached(scheme, *project(scheme, x[:, at:at + count], groups=1), cache)
        np.testing.assert_allclose(out, full[:, at:at + count], rtol=0, atol=ATOL)
        at += count


@pytest.mark.parametrize("backend", ["dense", "chunked", "reference"])
def test_each_row_has_its_own_first_query(backend):
    """Rows that differ by more than a block of keys: no row may lose the blocks that another does not need."""
    scheme = make("nope")
    x, counts = inputs(scheme, 600), np.asarray([600, 20])
    full = layer(scheme, x, window=300)
    cache = make_cache(scheme, 900, batch_size=2)
    _, cache = attend_cached(scheme, *project(scheme, x), cache, counts=counts, window=300)
    more = inputs(scheme, 150, seed=1)
    out, _ = attend_cached(scheme, *project(scheme, more), cache, window=300, backend=backend)
    for i, n in enumerate(counts):
        alone = layer(scheme, np.concatenate([x[i:i + 1, :n], more[i:i + 1]], 1), window=300)
        np.testing.assert_allclose(out[i], alone[0, n:], rtol=0, atol=ATOL)
    assert full.shape == x.shape[:2] + (4, 8)


def test_the_error_of_8_bits_is_bounded():
    """A key is off by at most max|k| / 254 an element, a logit then by e, a weight by a factor within exp(2 e)."""
    scheme = make("nope")
    q, k, v = (3 * y for y in project(scheme, inputs(scheme, 40)))
    exact = attend(scheme, q, k, v)
    out, _ = attend_cached(scheme, q, k, v, make_cache(scheme, 40, batch_size=2, quantise="int8"))
    e = np.abs(q).sum(-1).max() * 8 ** -0.5 * np.abs(k).max() / 254
    bound = (np.exp(2 * e) - 1) * np.abs(v).max() + np.abs(v).max() / 254
    assert 0 < np.abs(out - exact).max() < bound
    relative = np.linalg.norm(out - exact) / np.linalg.norm(exact)
    assert relative < 4 * max(float(quantisation_error(k)), float(quantisation_error(v)))


def test_8_bits_serve_a_scheme_that_makes_some_channels_far_larger():
    """Scaled as xPos scales them far from its center, the slow channels of a key would be less than a step."""
    scheme = make("xpos", center=0)
    q, k, v = project(scheme, inputs(scheme, 9))
    positions = np.arange(9, dtype=np.int32) + 4000
    exact = attend(scheme, q, k, v, q_positions=positions, k_positions=positions)
    out, _ = attend_cached(scheme, q, k, v, make_cache(scheme, 9, batch_size=2, quantise="int8"), positions=positions)
    np.testing.assert_allclose(out, exact, rtol=0, atol=INT8_ATOL)


@pytest.mark.parametrize(("made", "given", "message"), [
    ({"window": 4}, {"window": 5}, "window is 5, but the cache keeps 4 tokens"),
    ({}, {"counts": np.ones(3, int)}, r"counts must be integers of shape \(2,\)"),
    ({}, {"segment_ids": np.zeros((2, 4), int)}, r"segment_ids must have shape \(2, 2\)"),
    ({}, {"positions": np.arange(3)}, "positions must be integers of shape"),
])
def test_what_does_not_fit_is_refused(made, given, message):
    scheme = make("nope")
    with pytest.raises(UserError, match=message):
        attend_cached(scheme, *project(scheme, inputs(scheme, 2)), make_cache(scheme, 8, batch_size=2, **made), **given)
