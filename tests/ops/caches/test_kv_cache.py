"""A cache gives what was written, keeps it, and says when it is full, in every layout."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.ops.caches.cache import KVCache, Tokens

LAYOUTS = {"dense": {}, "sliding": {"window": 3}, "paged": {"page_size": 2, "num_pages": 7}}
# The pages are more than both rows can use.
layouts = pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)


def tokens(count, start=0, *, batch=2):
    k = np.arange(batch * count, dtype=np.float32).reshape(batch, count, 1, 1) + 100 * start + 1
    index = np.broadcast_to(np.arange(start, start + count, dtype=np.int32), (batch, count))
    return Tokens(k, k + 0.5, index, np.zeros_like(index), {"gate": k[..., 0] + 0.25})


def empty(size=5, *, batch=2, **options):
    one = tokens(1, batch=batch)
    return KVCache.empty(size, k=one.k, v=one.v, features=one.features, **options)


def seen(cache, new, counts=None):
    """What the new tokens attend to in each row, up to the last real one of them: lists of `k`; and the cache."""
    counts = None if counts is None else np.asarray(counts)
    cache, held, first = cache.extend(new, counts)
    end = np.broadcast_to(first, cache.length.shape) + (new.k.shape[1] if counts is None else counts)
    shown = (np.arange(held.k.shape[1]) < end[:, None]) & (np.asarray(held.segment_ids) >= 0)
    k, v, gate = (np.asarray(x).reshape(shown.shape) for x in (held.k, held.v, held.features["gate"]))
    np.testing.assert_array_equal(v[shown], k[shown] + 0.5)
    np.testing.assert_array_equal(gate[shown], k[shown] + 0.25)
    return [row[here].tolist() for row, here in zip(k, shown)], cache


@layouts
def test_holds_what_was_appended(options):
    first, second = tokens(2), tokens(3, 2)
    rows, cache = seen(seen(empty(**options), first)[1], second)
    expected = np.concatenate([first.k, second.k], 1)[..., 0, 0]
    assert rows == expected.tolist()  # a window of 3 keeps both of the first
    assert cache.length.tolist() == [5, 5] and not cache.overfull.any()


@layouts
def test_rows_have_their_own_lengths(options):
    """Padding on the right is dropped, and the row goes on where its own tokens end."""
    prompt, more = tokens(4), tokens(1, 2)
    _, cache = seen(empty(**options), prompt, [4, 1])
    rows, cache = seen(cache, more)
    keep = options.get("window", 9)
    assert rows[0] == [*prompt.k[0, -keep:, 0, 0], more.k[0, 0, 0, 0]]
    assert rows[1] == [prompt.k[1, 0, 0, 0], more.k[1, 0, 0, 0]]
    assert seen(cache, tokens(1, 3), [0, 1])[1].length.tolist() == [5, 3]


@layouts
def test_padding_is_not_kept(options):
    """Not even behind the end, where its weight is zero: zero times NaN is NaN."""
    prompt = tokens(4)
    prompt.k[1, 1:], prompt.v[1, 1:] = np.nan, np.nan
    cache = empty(**options).extend(prompt, np.asarray([4, 1]))[0]
    _, held, _ = cache.extend(tokens(1, 4))
    assert np.isfinite(held.k).all() and np.isfinite(held.v).all()


@layouts
def test_the_next_tokens_go_on_from_each_rows_last(options):
    new = tokens(2)._replace(positions=np.asarray([[0, 1], [6, 7]], np.int32), segment_ids=np.asarray([[0, 0], [1, 2]], np.int32))
    cache = empty(**options)
    np.testing.assert_array_equal(cache.place(2)[0], [[0, 1], [0, 1]])
    positions, segments = cache.extend(new)[0].place(3)
    np.testing.assert_array_equal(positions, [[2, 3, 4], [8, 9, 10]])
    np.testing.assert_array_equal(segments, [[0, 0, 0], [2, 2, 2]])
    positions, segments = cache.extend(new, np.asarray([2, 1]))[0].place(3, counts=np.asarray([2, 0]))
    np.testing.assert_array_equal(positions, [[2, 3, 3], [6, 6, 6]])  # padding stands still
    np.testing.assert_array_equal(segments, [[0, 0, 0], [1, 1, 1]])


@layouts
def test_writing_past_the_end_is_refused(options):
    cache = empty(**options).extend(tokens(4), np.asarray([2, 4]))[0]
    with pytest.raises(ValueError, match="room for 5 tokens a row; row 1 holds 4 and 2 more do not fit"):
        cache.extend(tokens(2, 4))
    with pytest.raises(ValueError, match="room for 5 tokens a row; 6 at a time"):
        cache.extend(tokens(6, 4))


@layouts
def test_inside_a_trace_writing_past_the_end_is_told_and_changes_nothing_written(options):
    """An update of a slice would shift the block onto what is there; and the other row goes on."""
    full = empty(**options).extend(tokens(4), np.asarray([2, 4]))[0]
    after = jax.jit(lambda cache: cache.extend(tokens(2, 4))[0])(full)
    assert after.overfull.tolist() == [False, True] and after.length.tolist() == [4, 4]
    again = jax.jit(lambda cache: cache.extend(tokens(1, 6))[0])(after)  # which would fit
    assert again.overfull.tolist() == [False, True] and again.length.tolist() == [5, 4]
    rows, _ = seen(again, tokens(1, 7), [0, 0])
    keep = options.get("window", 9)
    assert rows[1] == tokens(4).k[1, -keep:, 0, 0].tolist()
    assert rows[0] == [*tokens(4).k[0, :2, 0, 0], *tokens(2, 4).k[0, :, 0, 0], *tokens(1, 6).k[0, :, 0, 0]][-keep:]
    with pytest.raises(ValueError, match="Row 1 of the cache is overfull"):
        again.extend(tokens(1, 7), np.asarray([0, 1]))


@layouts
def test_a_released_row_begins_anew(options):
    """Nothing of the old row is left, not even NaN times a weight of zero; the other row keeps its own."""
    broken = tokens(3)
    broken.k[1], broken.v[1] = np.nan, np.nan
    cache = empty(**options).extend(broken)[0].release(np.asarray([False, True]))
    assert cache.length.tolist() == [3, 0] and cache.place(1)[0].tolist() == [[3], [0]]
    cache, held, _ = cache.extend(tokens(2, 5), np.asarray([0, 2]))
    assert np.isfinite(held.k).all() and np.isfinite(held.v).all()
    rows, _ = seen(cache, tokens(1, 7))
    assert rows[0] == [*tokens(3).k[0, :, 0, 0], tokens(1, 7).k[0, 0, 0, 0]]
    assert rows[1] == [*tokens(2, 5).k[1, :, 0, 0], tokens(1, 7).k[1, 0, 0, 0]]


def test_a_window_has_no_end():
    cache = empty(None, window=2)
    for start in range(0, 12, 3):
        rows, cache = seen(cache, tokens(3, start))
    assert rows == np.concatenate([tokens(3, 6).k[:, 1:], tokens(3, 9).k], 1)[..., 0, 0].tolist()
    assert {x.shape[1] for x in jax.tree.leaves(cache.layout)} == {2}


def test_bad_tokens_are_named():
    with pytest.raises(ValueError, match=r"\(2, 3, 1, 2\)"):
        empty().extend(tokens(3)._replace(k=jnp.zeros((2, 3, 1, 2))))
    with pytest.raises(ValueError, match=r"counts must be integers of shape \(2,\)"):
        empty().extend(tokens(3), np.ones(3, int))
    with pytest.raises(ValueError, match="counts is 4 for row 1; it must be from 0 to the 3"):
        empty().extend(tokens(3), np.asarray([0, 4]))
    with pytest.raises(ValueError, match="rows must be bool"):
        empty().release(np.asarray([1, 0]))


@pytest.mark.parametrize(("size", "options", "message"), [
    (0, {}, "size of a cache is 0"),
    (None, {}, "needs a size"),
    (5, {"window": 0}, "window is 0"),
    (5, {"page_size": 4}, "go together"),
    (5, {"page_size": 4, "num_pages": 0}, "num_pages is 0"),
    (5, {"page_size": 4, "num_pages": 4, "window": 3}, r"window \(3\) has no pages"),
    (5, {"quantise": "int4"}, "Unknown quantisation of a cache 'int4'. .*int8"),
])
def test_bad_caches_are_named(size, options, message):
    with pytest.raises(ValueError, match=message):
        empty(size, **options)
