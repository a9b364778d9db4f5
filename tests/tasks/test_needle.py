"""Needles stand whole, once, and where they were asked for (fault 51)."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.compilations import compilations
from posjax.tasks.base import SPECIALS
from posjax.tasks.retrieval import Needle, _distinct_words


def planted(task, context):
    """Starts of the needles in a context, each checked to be whole; everything else is filler."""
    filler, keys = SPECIALS + task.filler_symbols, SPECIALS + task.filler_symbols + task.key_symbols
    starts, i = [], 0
    while i < len(context):
        if context[i] < filler:
            i += 1
            continue
        needle = np.asarray(context[i:i + task.needle_length])
        assert len(needle) == task.needle_length
        assert ((needle >= filler) & (needle < keys)).tolist() == [True] * task.key_length + [False] * task.value_length
        starts.append(i)
        i += task.needle_length
    return starts


@pytest.mark.parametrize("hyper", [{}, {"needles": 4, "key_length": 1, "value_length": 2}])
def test_needles_are_whole_and_at_the_depth_asked(hyper):
    task = Needle(**hyper, depths=(0.0, 0.25, 0.3, 0.5, 0.99, 1.0))
    least = 6 if not hyper else 5 * 3 - 1
    lengths = jnp.asarray(np.resize([least, least + 1, 29, 40], 40), jnp.int32)
    sample = jax.jit(lambda key, depth: task.sample(key, lengths, max_length=40, depth=depth))
    with compilations() as compiled:
        batches = [sample(jax.random.key(1), jnp.float32(condition["depth"])) for condition in task.conditions()]
    assert compiled.count("jit(<lambda>)") == 1
    for condition, batch in zip(task.conditions(), batches, strict=True):
        for length, row in zip(lengths.tolist(), np.asarray(batch.tokens).tolist(), strict=True):
            context, query = row[1:1 + length], row[2 + length:2 + length + task.key_length]
            starts = planted(task, context)
            keys = [tuple(context[s:s + task.key_length]) for s in starts]
            assert len(starts) == len(set(keys)) == task.needles
            asked = starts[keys.index(tuple(query))]
            assert abs(asked - condition["depth"] * (length - task.needle_length)) < 1


def test_training_asks_at_every_depth_and_for_every_needle():
    task = Needle(needles=3, key_length=1, value_length=1)
    batch = jax.jit(lambda key: task.sample(key, jnp.full(600, 12, jnp.int32), max_length=12))(jax.random.key(0))
    tokens = np.asarray(batch.tokens)
    starts = np.array([planted(task, row[1:13]) for row in tokens.tolist()])
    ranks = [row[1 + s].tolist().index(row[14]) for row, s in zip(tokens, starts, strict=True)]
    assert set(ranks) == {0, 1, 2}
    asked = starts[np.arange(600), ranks]
    counts = np.bincount(asked, minlength=11)  # 600 draws of 11 places: 54.5 each, 7 the standard deviation
    assert len(counts) == 11
    assert counts.min() > 25
    assert set(starts.ravel()) == set(range(11))


def test_a_fixed_depth_holds_in_training():
    task = Needle(depth=1.0, depths=())
    assert task.conditions() == ({},)
    batch = jax.jit(lambda key: task.sample(key, jnp.full(5, 20, jnp.int32), max_length=20))(jax.random.key(0))
    assert all(planted(task, row[1:21]) == [14] for row in np.asarray(batch.tokens).tolist())


@pytest.mark.parametrize(("count", "length", "symbols"), [(9, 2, 3), (3, 2, 3), (5, 40, 10)])
def test_keys_differ_and_all_can_be_drawn(count, length, symbols):
    words = np.asarray(jax.jit(jax.vmap(lambda key: _distinct_words(key, count, length, symbols)))(
        jax.random.split(jax.random.key(0), 200)))
    assert words.shape == (200, count, length)
    assert all(len(np.unique(drawn, axis=0)) == count for drawn in words)
    assert all(set(words[:, i].ravel()) == set(range(symbols)) for i in range(count))
