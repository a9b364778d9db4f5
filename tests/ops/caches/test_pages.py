"""Rows share a pool of pages: each takes what it needs, gives back what it had, and waits for no other."""
import jax
import numpy as np
import pytest

from posjax.ops.caches.cache import KVCache, Tokens

STEP = jax.jit(lambda cache, new, counts: cache.extend(new, counts)[:2])


def tokens(count, value, batch=3):
    k = np.broadcast_to(np.asarray(value, np.float32).reshape(-1, 1, 1, 1), (batch, count, 1, 1))
    index = np.zeros((batch, count), np.int32)
    return Tokens(k, k, index, index)


def pool(num_pages):
    one = tokens(1, 0)
    return KVCache.empty(6, k=one.k, v=one.v, page_size=2, num_pages=num_pages)


def used(cache):
    """The pages of each row."""
    return [row[:-(-n // 2)] for row, n in zip(cache.layout.table.tolist(), cache.length.tolist())]


def assert_sound(cache):
    """No page has two owners, and none is lost."""
    free = cache.layout.free[:cache.layout.num_free].tolist()
    assert sorted(free + sum(used(cache), [])) == list(range(cache.layout.free.shape[0]))


def test_random_rows_keep_their_tokens_and_no_page_is_lost():
    rng, cache = np.random.default_rng(0), pool(6)
    rows, broken = [[], [], []], [False] * 3
    refused = 0
    for step in range(40):
        ends = rng.random(3) < 0.2
        cache = cache.release(ends)
        rows = [[] if end else row for row, end in zip(rows, ends)]
        broken = [False if end else flag for flag, end in zip(broken, ends)]
        counts = rng.integers(0, 4, 3)
        cache, held = STEP(cache, tokens(3, [step, step + 100, step + 200]), counts)
        left = 6 - sum(-(-len(row) // 2) for row in rows)
        for i, n in enumerate(counts):
            pages = -(-(len(rows[i]) + n) // 2) - -(-len(rows[i]) // 2)
            if n and (broken[i] or len(rows[i]) + n > 6 or pages > left):
                broken[i], refused = True, refused + 1
            else:
                rows[i], left = rows[i] + [step + 100 * i] * n, left - pages
        assert cache.overfull.tolist() == broken
        assert cache.length.tolist() == [len(row) for row in rows]
        assert [held.k[i, :len(row), 0, 0].tolist() for i, row in enumerate(rows)] == rows
        assert_sound(cache)
    assert refused > 5  # or nothing was tested


def test_an_empty_pool_is_told_and_harms_the_row_alone_that_asked():
    cache = pool(3).extend(tokens(3, [1, 2, 3]), np.asarray([2, 2, 0]))[0]
    with pytest.raises(ValueError, match="of the pool's 3 pages of 2 tokens, 1 are free; row 0 holds 2 and 3 more do not fit"):
        cache.extend(tokens(3, [4, 5, 6]), np.asarray([3, 0, 2]))
    cache, held = STEP(cache, tokens(3, [4, 5, 6]), np.asarray([3, 0, 2]))
    assert cache.overfull.tolist() == [True, False, False] and cache.length.tolist() == [2, 2, 2]
    assert held.k[..., 0, 0].tolist() == [[1, 1, 0, 0, 0, 0], [2, 2, 0, 0, 0, 0], [6, 6, 0, 0, 0, 0]]
    assert_sound(cache)


def test_a_page_is_taken_when_a_row_reaches_it_and_given_back_with_the_row():
    cache, taken = pool(9), []
    for _ in range(4):
        cache, _ = STEP(cache, tokens(1, [1, 2, 3]), np.asarray([1, 1, 0]))
        taken.append(9 - int(cache.layout.num_free))
    assert taken == [2, 2, 4, 4]
    cache = jax.jit(KVCache.release)(cache, np.asarray([True, False, True]))
    assert int(cache.layout.num_free) == 7
    assert_sound(cache)
