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

# In each of them T new tokens see SIZE keys: one shape, so one compilation of each operation for all tests.
T, SIZE = 5, 9
LAYOUTS = {"dense": {}, "sliding": {"window": 4}, "paged": {"page_size": 3, "num_pages": 6}}
# Keys and values are within 1/254 of their largest channel: logits around 1 move by hundredths, and so do outputs.
INT8_ATOL = 0.05


@pytest.fixture(autouse=True)
def quick():
    with quick_compilation():
        yield


@functools.cache
def make(name, **hyper):
    return make_scheme(name, num_heads=4, head_dim=8, rngs=nnx.Rngs(0), **hyper)


def empty(scheme, layout, **options):
    return make_cache(scheme, SIZE, batch_size=2, num_groups=2, **LAYOUTS[layout], **options)


def decoded(scheme, x, cache, counts, start=(0, 0)):
    """The outputs of each row and the cache, for `counts` `[calls][2]` more tokens of the rows, padded on the right to T each."""
    at, rows = np.asarray(start), [[], []]
    for count in np.asarray(counts):
        part = np.stack([np.pad(row[i:i + n], ((0, T - n), (0, 0))) for row, i, n in zip(x, at, count)])
        embedded = np.asarray(scheme.embed(part, cache.place(T, counts=count)[0]))
        out, cache = attend_cached(scheme, *project(scheme, embedded, groups=2), cache, counts=count,
                                   features=scheme.features(embedded))
        assert np.isfinite(out).all()  # padding too
        for row, o, n in zip(rows, np.asarray(out), count):
            row.append(o[:n])
        at = at + count
    return [np.concatenate(row) for row in rows], cache


def full(scheme, x, layout):
    return layer(scheme, x, groups=2, window=LAYOUTS[layout].get("window"))


def of_its_moment(scheme, x, layout, count):
    """The output of each of `count` tokens when it is the last of its row."""
    each = [layer(scheme, x, np.minimum(np.arange(SIZE), t), groups=2, window=LAYOUTS[layout].get("window"))[:, t]
            for t in range(count)]
    return np.stack(each, 1)


def assert_close(found, expected, quantise=None):
    np.testing.assert_allclose(found, expected, rtol=0, atol=INT8_ATOL if quantise else ATOL)


@pytest.mark.parametrize("quantise", [None, "int8"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SCHEMES.names())
def test_rows_of_different_lengths_equal_rows_alone(name, layout, quantise):
    scheme, x = make(name), inputs(make(name), SIZE)
    expected = full(scheme, x, layout)
    rows, _ = decoded(scheme, x, empty(scheme, layout, quantise=quantise), [(5, 3), (1, 1), (1, 1), (2, 1)])
    for row, alone in zip(rows, expected):
        assert_close(row, alone[:len(row)], quantise)


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
    x = inputs(scheme, SIZE)
    counts = [(1, 1), (1, 1), (1, 1), (1, 0), (1, 1), (1, 0), (1, 1)]
    rows, _ = decoded(scheme, x, empty(scheme, layout, quantise=quantise), counts)
    expected = of_its_moment(scheme, x, layout, 7)
    for row, alone in zip(rows, expected):
        assert_close(row, alone[:len(row)], quantise)
    assert np.abs(full(scheme, x, layout)[:, :7] - expected).max() > 2 * INT8_ATOL  # the switch matters


@pytest.mark.parametrize("quantise", [None, "int8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sequence_in_a_released_row_is_as_if_alone(layout, quantise):
    """Under a scheme that looks at the longest position of a row, so that a position left behind shows."""
    scheme = make("scaled_rope", rope_type="dynamic", original_max_position_embeddings=2, factor=4.0)
    x = inputs(scheme, SIZE)
    new = empty(scheme, layout, quantise=quantise)
    _, cache = decoded(scheme, x, new, [(5, 5), (0, 3)])
    cache = cache.release(np.asarray([False, True]))
    rows, _ = decoded(scheme, x, cache, [(0, 3), (1, 1)], start=(5, 2))
    assert_close(rows[0], of_its_moment(scheme, x, layout, 6)[0, 5:], quantise)
    np.testing.assert_array_equal(rows[1], decoded(scheme, x, new, [(0, 3), (0, 1)], start=(0, 2))[0][1])


@pytest.mark.parametrize("layout", ["sliding", "paged"])
def test_left_padding_is_not_seen(layout):
    scheme, pad = make("t5"), 2
    x, index = inputs(scheme, SIZE), np.arange(T)
    out, cache = attend_cached(scheme, *project(scheme, x[:, :T], groups=2), empty(scheme, layout),
                               positions=np.maximum(index - pad, 0),
                               segment_ids=np.broadcast_to((index >= pad).astype(np.int32), (2, T)))
    rows, _ = decoded(scheme, x, cache, [(1, 1), (2, 0)], start=(T, T))
    alone = full(scheme, np.pad(x[:, pad:], ((0, 0), (0, pad), (0, 0))), layout)
    assert_close(out[:, pad:], alone[:, :3])
    assert_close(rows[0], alone[0, 3:6])
    assert_close(rows[1], alone[1, 3:4])


def test_a_prompt_longer_than_the_window():
    scheme = make("alibi")
    x = inputs(scheme, SIZE + 10)
    alone = layer(scheme, x, groups=2, window=4)
    cache = make_cache(scheme, batch_size=2, num_groups=2, window=4)
    out, cache = attend_cached(scheme, *project(scheme, x[:, :SIZE], groups=2), cache)
    assert_close(out, alone[:, :SIZE])
    rows, _ = decoded(scheme, x, cache, [(5, 5), (5, 5)], start=(SIZE, SIZE))
    assert_close(np.stack(rows), alone[:, SIZE:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_compilation_serves_all_steps_and_a_donated_cache(layout):
    scheme = make("rope")
    x = inputs(scheme, SIZE)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, x, counts):
        return attend_cached(scheme, *project(scheme, x, groups=2), cache, counts=counts)[::-1]
    cache, outs = empty(scheme, layout), []
    with compilations() as compiled:
        for t in range(SIZE):
            before = cache
            cache, out = step(cache, x[:, t:t + 1], jnp.ones(2, jnp.int32))
            outs.append(out)
    assert compiled.count("jit(step)") == 1
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.layout))
    assert_close(np.concatenate(outs, 1), full(scheme, x, layout))
    cache, out = step(cache, x[:, :1], jnp.asarray([1, 0]))
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all() and cache.overfull.tolist() == [True, False]


def test_the_error_of_8_bits_is_bounded():
    """A key is off by at most max|k| / 254 an element, a logit then by e, a weight by a factor within exp(2 e)."""
    scheme = make("nope")
    q, k, v = (3 * y for y in project(scheme, inputs(scheme, SIZE)))
    exact = attend(scheme, q, k, v)
    out, _ = attend_cached(scheme, q, k, v, make_cache(scheme, SIZE, batch_size=2, quantise="int8"))
    e = np.abs(q).sum(-1).max() * 8 ** -0.5 * np.abs(k).max() / 254
    bound = (np.exp(2 * e) - 1) * np.abs(v).max() + np.abs(v).max() / 254
    assert 0 < np.abs(out - exact).max() < bound
    relative = np.linalg.norm(out - exact) / np.linalg.norm(exact)
    assert relative < 4 * max(float(quantisation_error(k)), float(quantisation_error(v)))


def test_8_bits_serve_a_scheme_that_makes_some_channels_far_larger():
    """Scaled as xPos scales them far from its center, the slow channels of a key would be less than a step."""
    scheme = make("xpos", center=0)
    q, k, v = project(scheme, inputs(scheme, SIZE))
    positions = np.arange(SIZE, dtype=np.int32) + 4000
    exact = attend(scheme, q, k, v, q_positions=positions, k_positions=positions)
    out, _ = attend_cached(scheme, q, k, v, make_cache(scheme, SIZE, batch_size=2, quantise="int8"), positions=positions)
    assert_close(out, exact, "int8")


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
