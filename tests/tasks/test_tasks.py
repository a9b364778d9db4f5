"""What every task promises; and that its answer follows from its prompt, by a solver in plain Python."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.compilations import compilations
from posjax.errors import UserError
from posjax.tasks.base import BOS, FILLER, PAD, SEP, SPECIALS, TASKS, stream_key


def copied(task, prompt):
    assert prompt[0] == BOS
    assert prompt[-1] == SEP
    return prompt[1:-1] * task.times


def reversed_(task, prompt):
    return prompt[-2:0:-1]


def recalled(task, prompt):
    split = prompt.index(SEP)
    pairs = prompt[1:split - task.gap]
    assert prompt[split - task.gap:split] == [FILLER] * task.gap
    value = dict(zip(pairs[::2], pairs[1::2], strict=True))
    assert len(value) == len(pairs) // 2
    return value[prompt[-1]]


def found(task, prompt):
    split = prompt.index(SEP)
    context, key = prompt[1:split], prompt[split + 1:]
    starts = [i for i in range(len(context)) if context[i:i + len(key)] == key]
    assert len(starts) == 1  # fault 51: once, and whole
    return context[starts[0] + len(key):][:task.value_length]


# A task, its hyper-parameters, its solver, and a smallest, a middle and a largest length.
CASES = [
    ("copy", {}, copied, (1, 4, 8)),
    ("copy", {"times": 2, "symbols": 2}, copied, (1, 4, 8)),
    ("copy", {"unique": True, "symbols": 8}, copied, (1, 4, 8)),
    ("reverse", {}, reversed_, (1, 4, 8)),
    ("mqar", {"keys": 8, "values": 3}, recalled, (1, 4, 8)),
    ("mqar", {"gap": 3, "queries": 2}, recalled, (1, 4, 8)),
    ("needle", {}, found, (6, 17, 24)),
    ("needle", {"needles": 3, "key_length": 1, "value_length": 2, "key_symbols": 3}, found, (11, 17, 24)),
]


@functools.partial(jax.jit, static_argnums=(0, 3))
def compiled(task, key, sizes, max_length):
    return task.sample(key, sizes, max_length=max_length)


def setup(name, hyper, lengths, rows=60):
    task = TASKS.make(name, hyper)
    sizes = jnp.asarray(np.resize(lengths, rows), jnp.int32)
    return task, sizes, lambda key, sizes: compiled(task, key, sizes, lengths[-1])


def test_every_task_is_tested_here():
    assert {name for name, *_ in CASES} == set(TASKS.names())


@pytest.mark.parametrize(("name", "hyper", "solve", "lengths"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_examples(name, hyper, solve, lengths):
    task, sizes, sample = setup(name, hyper, lengths)
    batch = sample(jax.random.key(0), sizes)
    tokens, targets, weights = (np.asarray(x) for x in (batch.tokens, batch.targets, batch.weights))

    assert tokens.shape == targets.shape == weights.shape == (60, task.sequence_length(lengths[-1]) - 1)
    assert (tokens.dtype, targets.dtype, weights.dtype) == (np.int32, np.int32, np.float32)
    np.testing.assert_array_equal(tokens[:, 1:], targets[:, :-1])
    assert set(np.unique(weights)) == {0, 1}
    assert tokens.min() >= 0
    assert max(tokens.max(), targets.max()) < task.vocab_size

    for size, row, answer in zip(np.resize(lengths, 60), np.c_[tokens[:, :1], targets].tolist(), weights, strict=True):
        end = task.sequence_length(int(size))
        assert PAD not in row[:end]
        assert row[end:] == [PAD] * (len(row) - end)
        assert answer[end - 2] == 1  # an example ends with its answer
        assert not answer[end - 1:].any()
        marked = 1 + np.flatnonzero(answer)
        if solve is recalled:
            assert len(marked) == min(hyper.get("queries", size), size)
            solved = [solve(task, row[:i]) for i in marked]
        else:
            solved = solve(task, row[:marked[0]])
        assert [row[i] for i in marked] == solved


@pytest.mark.parametrize(("name", "hyper", "solve", "lengths"), CASES[::2], ids=[case[0] for case in CASES[::2]])
def test_batches_come_from_the_key_alone_and_lengths_compile_once(name, hyper, solve, lengths):
    # Fault 48, of another kind: a compilation for each length.
    _, sizes, sample = setup(name, hyper, lengths)
    first, again, other = (sample(jax.random.key(k), sizes) for k in (0, 0, 1))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert (first.tokens != other.tokens).any()
    assert len(np.unique(np.asarray(first.tokens)[np.resize(lengths, 60) == lengths[-1]], axis=0)) > 10
    with compilations() as again:
        sample(jax.random.key(0), sizes[::-1])
    assert "jit(compiled)" not in again


@pytest.mark.parametrize(("name", "hyper", "step"), [("copy", {}, 1), ("copy", {"times": 2}, 1), ("reverse", {}, -1)])
def test_coupled_positions_tie_a_symbol_to_its_answer(name, hyper, step):
    # Positions of tokens that are taken for those of targets, one later; or of the bucket in place of the row.
    task, sizes, sample = setup(name, hyper | {"unique": True}, (1, 4, 8))
    batch = sample(jax.random.key(0), sizes)
    assert batch.positions.shape == batch.tokens.shape and batch.positions.dtype == np.int32
    highest = {}
    arrays = [np.asarray(x) for x in (batch.tokens, batch.targets, batch.weights, batch.positions)]
    for size, used, *rows in zip(np.resize((1, 4, 8), 60), np.asarray(batch.used), *arrays, strict=True):
        tokens, targets, weights, positions = (row[:used] for row in rows)
        place = dict(zip(tokens[1:1 + size].tolist(), positions[1:1 + size].tolist(), strict=True))
        assert positions[0] == 0 and sorted(place.values()) == list(range(1, size + 1))
        for t in np.flatnonzero(weights):
            assert tokens[t] not in place or positions[t] == place[int(tokens[t])]
            # What is to be predicted stands next to the input, save where the string begins anew.
            assert place[int(targets[t])] == positions[t] + step or (positions[t], place[int(targets[t])]) == (size, 1)
        highest[int(size)] = max(highest.get(int(size), 0), positions.max())
    assert {size: task.num_positions(size) - 1 for size in highest} == highest


def test_a_task_without_coupled_positions_gives_none():
    assert setup("mqar", {"keys": 8}, (4,))[2](jax.random.key(0), jnp.array([4])).positions is None


def test_training_and_evaluation_never_share_a_key():
    counters = jnp.concatenate([jnp.arange(5000), 2**31 - 1 - jnp.arange(100)]).astype(jnp.uint32)
    keys = [jax.random.key_data(jax.vmap(lambda c, s=s: stream_key(3, s, c))(counters)) for s in ("train", "eval")]
    assert len(np.unique(np.concatenate(keys), axis=0)) == 2 * len(counters)
    train, evaluation = (jax.random.key_data(stream_key(3, s, 7)) for s in ("train", "eval"))
    np.testing.assert_array_equal(keys[0][7], train)
    np.testing.assert_array_equal(keys[1][7], evaluation)


def test_unique_symbols_differ():
    _, sizes, sample = setup("copy", {"unique": True, "symbols": 8}, (8,))
    strings = np.asarray(sample(jax.random.key(0), sizes).tokens)[:, 1:9]
    np.testing.assert_array_equal(np.sort(strings), np.broadcast_to(np.arange(8) + SPECIALS, strings.shape))


@pytest.mark.parametrize(("name", "hyper", "message"), [
    ("copy", {"times": 3}, "times is 3"),
    ("reverse", {"symbols": 0}, "symbols is 0; it must be at least 1"),
    ("mqar", {"keys": 0}, "keys is 0; it must be at least 1"),
    ("mqar", {"gap": -1}, "gap is -1; it must be at least 0"),
    ("mqar", {"queries": 0}, "queries is 0"),
    ("needle", {"needles": 0}, "needles is 0"),
    ("needle", {"depth": 1.5}, "Depth 1.5 is not between 0"),
    ("needle", {"depths": (0.5, -0.1)}, "Depth -0.1 is not between 0"),
    ("needle", {"needles": 10, "key_length": 2, "key_symbols": 3}, "10 needles need as many keys; 2 of 3 symbols make 9"),
    ("mqar", {"kyes": 3}, "Unknown hyper-parameter of task mqar: 'kyes'. Did you mean keys"),
])
def test_bad_hyper_parameters_are_refused(name, hyper, message):
    with pytest.raises(UserError, match=message):
        TASKS.make(name, hyper)


@pytest.mark.parametrize(("name", "hyper", "length", "message"), [
    ("copy", {"unique": True, "symbols": 4}, 5, "5 unique symbols needs as many symbols; there are 4"),
    ("mqar", {"keys": 4}, 5, "5 pairs needs as many keys; there are 4"),
    ("needle", {}, 5, r"5 tokens is too short: 1 needle.* of 6 tokens.* at least 6"),
    ("needle", {"needles": 3}, 22, r"22 tokens is too short: 3 needle.* of 6 tokens.* at least 23"),
    *((name, {}, 0, "0 is too short|0 tokens is too short") for name in ("copy", "reverse", "mqar", "needle")),
])
def test_lengths_without_an_example_are_refused(name, hyper, length, message):
    task = TASKS.make(name, hyper)
    with pytest.raises(UserError, match=message):
        task.check_length(length)
    with pytest.raises(UserError, match=message):
        task.sample(jax.random.key(0), jnp.array([length]), max_length=max(length, 1))


def test_a_length_above_the_bucket_is_refused():
    with pytest.raises(UserError, match="Length 9 is above the max_length of the batch, 8"):
        TASKS.make("copy", {}).sample(jax.random.key(0), jnp.array([3, 9]), max_length=8)
