"""A cache gives what was written, keeps it, and says when it is full."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.ops.cache import KVCache


def tokens(count, start=0, *, batch=2):
    x = np.arange(batch * count, dtype=np.float32).reshape(batch, count, 1, 1) + 100 * start
    index = np.broadcast_to(np.arange(start, start + count, dtype=np.int32), (batch, count))
    return {"k": x, "v": x + 0.5, "positions": index, "segment_ids": np.zeros_like(index)}


def empty(size=5):
    return KVCache.empty(size, **{name: tokens(1)[name] for name in "kv"})


def test_holds_what_was_appended():
    first, second = tokens(2), tokens(3, 2)
    cache = empty().append(**first).append(**second)
    for name in first:
        np.testing.assert_array_equal(getattr(cache, name), np.concatenate([first[name], second[name]], 1))
    assert int(cache.length) == 5 and not cache.overfull


def test_the_next_tokens_go_on_from_each_rows_last():
    new = tokens(2) | {"positions": np.asarray([[0, 1], [6, 7]], np.int32), "segment_ids": np.asarray([[0, 0], [1, 2]], np.int32)}
    positions, segments = empty().append(**new).following(3)
    np.testing.assert_array_equal(positions, [[2, 3, 4], [8, 9, 10]])
    np.testing.assert_array_equal(segments, [[0, 0, 0], [2, 2, 2]])
    np.testing.assert_array_equal(empty().following(2)[0], [[0, 1], [0, 1]])


def test_writing_past_the_end_is_refused():
    with pytest.raises(ValueError, match="room for 5 tokens and holds 4; 2 more do not fit"):
        empty().append(**tokens(4)).append(**tokens(2, 4))


def test_inside_a_trace_writing_past_the_end_is_told_and_changes_nothing_written():
    """An update of a slice would shift the block onto what is there."""
    full = empty().append(**tokens(4))
    after = jax.jit(lambda cache: cache.append(**tokens(2, 4)))(full)
    np.testing.assert_array_equal(after.k[:, :4], full.k[:, :4])
    assert after.overfull


def test_bad_tokens_are_named():
    with pytest.raises(ValueError, match=r"\(2, 3, 1, 2\)"):
        empty().append(**tokens(3) | {"k": jnp.zeros((2, 3, 1, 2))})
    with pytest.raises(ValueError, match="size of a cache is 0"):
        empty(0)
