import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from posjax.compilations import compilations
from posjax.errors import UserError
from posjax.eval import extrapolation
from posjax.eval.extrapolation import Evaluator, bucket, check_eval_lengths
from posjax.experiment import Experiment
from posjax.tasks.base import SEP, SPECIALS, TASKS, stream_key
from posjax.train.chunk import init_state
from posjax.train.replicas import place, replica_mesh

SEEDS = (0, 1)
MESH = replica_mesh(2)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """So that 20 examples are several batches, the last one not full."""
    monkeypatch.setattr(extrapolation, "_BATCH_TOKENS", 64)
    with tiny.quick_compilation():
        yield


@functools.cache
def made(scheme="rope", task="copy", **overrides):
    """(experiment, params, evaluator) of an untrained tiny run; keys with `__` for dots."""
    overrides = {key.replace("__", "."): value for key, value in overrides.items()}
    experiment = Experiment.build(tiny.config(scheme, task, **overrides))
    params = init_state(experiment, place(experiment.replica_values(), MESH), MESH)["params"]
    # An untrained decoder answers with the token that it reads. This one mostly answers some symbol, now and then the right one.
    params["blocks"] = jax.tree.map(lambda leaf: leaf * 3, params["blocks"])
    params["tokens"]["embedding"] = params["tokens"]["embedding"].at[:, :SPECIALS].set(0.0)
    return experiment, params, Evaluator(experiment, MESH)


def rows_of(parts, lengths, num_examples):
    return parts[2](parts[1], place(parts[0].replica_values(), MESH), 7, lengths, num_examples)


def with_apply(experiment, apply):
    """An experiment with another decoder: `apply(params, tokens) -> logits`."""
    kept = {name: getattr(experiment, name) for name in ("task", "eval_policy", "config", "max_length", "replicas")}
    return types.SimpleNamespace(**kept, apply=lambda params, tokens, positions, scheme: apply(params, tokens))


def knowing(tokens, vocab_size=9):
    """Logits of a decoder that knows copy's answer: it reads the string back out of the tokens before."""
    length = (tokens == SEP).argmax(1)[:, None] - 1  # after BOS and the string
    index = jnp.clip(jnp.arange(tokens.shape[1])[None] - length, 0, tokens.shape[1] - 1)
    return 30.0 * jax.nn.one_hot(jnp.take_along_axis(tokens, index, 1), vocab_size)


def oracle(wrong_on=None):
    """An evaluator of a decoder that is always right, except on sequences where `wrong_on(tokens)` is true."""
    def apply(params, tokens):
        right = knowing(tokens)
        return right if wrong_on is None else jnp.where(wrong_on(tokens)[:, None, None], -right, right)
    experiment = made()[0]
    return experiment, made()[1], Evaluator(with_apply(experiment, apply), MESH)


@functools.cache
def jitted(experiment):
    return jax.jit(experiment.apply)


def logits_of(experiment, params, replica, tokens):
    own = jax.tree.map(lambda leaf: leaf[replica], params)
    return np.asarray(jitted(experiment)(own, tokens))


@functools.cache
def sampler(task, size):
    return jax.jit(functools.partial(task.sample, max_length=size))


def held_out(experiment, seed, length, index, num_examples, **condition):
    """The evaluated examples, drawn batch by batch as the evaluator documents it: its own keys and batch sizes."""
    size = bucket(experiment.task, length, experiment.config.train.lengths.max)
    batch_size = max(1, extrapolation._BATCH_TOKENS // experiment.task.sequence_length(size))
    found = []
    for number in range(-(-num_examples // batch_size)):
        key = jax.random.fold_in(jax.random.fold_in(stream_key(seed, "eval", length), index), number)
        sample_key, _ = jax.random.split(key)
        found.append(sampler(experiment.task, size)(sample_key, jnp.full(batch_size, length), **condition))
    return jax.tree.map(lambda *parts: np.concatenate(parts)[:num_examples], *found)


def recompute(logits, batch):
    """exact match, token accuracy, loss and accuracy by place: one example and one token at a time."""
    exact, right, losses, by_place = [], [], [], {}
    for row in range(len(batch.tokens)):
        hits = []
        for t in np.flatnonzero(batch.weights[row]):
            scores = logits[row, t].astype(np.float64)
            target = batch.targets[row, t]
            hits.append(scores.argmax() == target)
            by_place.setdefault(len(hits) - 1, []).append(hits[-1])
            losses.append(np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[target])
        exact.append(all(hits))
        right += hits
    return np.mean(exact), np.mean(right), np.mean(losses), [np.mean(by_place[place]) for place in sorted(by_place)]


def assert_matches(row, logits, batch):
    exact, right, loss, by_place = recompute(logits, batch)
    assert row["exact_match"] == pytest.approx(exact, abs=1e-9)
    assert row["token_accuracy"] == pytest.approx(right, abs=1e-6)
    assert row["loss"] == pytest.approx(loss, rel=1e-5)
    assert row["per_position"] == pytest.approx(by_place, abs=1e-6)


def test_scores_are_those_of_a_slow_recomputation():
    experiment, params, _ = parts = made()
    for row in rows_of(parts, (3, 6), 20):
        batch = held_out(experiment, row["seed"], row["length"], 0, 20)
        assert_matches(row, logits_of(experiment, params, SEEDS.index(row["seed"]), batch.tokens), batch)
        assert 0 < row["token_accuracy"] < 1  # else the comparison would say little


def test_an_oracle_scores_one_and_the_row_says_what_was_evaluated():
    rows = rows_of(oracle(), (1, 4, 9), 20)
    assert [(row["length"], row["seed"]) for row in rows] == [(n, s) for n in (1, 4, 9) for s in SEEDS]
    for row in rows:
        assert row | {"loss": 0, "seed": 0} == {
            "step": 7, "seed": 0, "length": row["length"], "condition": {}, "num_examples": 20, "status": "ok",
            "positions": "sequential",
            "exact_match": 1.0, "token_accuracy": 1.0, "loss": 0, "per_position": [1.0] * row["length"]}
        assert row["loss"] < 1e-6


@pytest.mark.parametrize("policy", ["coupled", "sequential"])
def test_the_decoder_gets_the_positions_of_the_policy(policy):
    # Positions that fall along a row, cut off at that of the last token, as those of a table's end are.
    def apply(params, tokens, positions):  # knows reverse's answer from positions alone: the first token one place before
        found = positions[:, None, :] == positions[:, :, None] - 1
        return 30.0 * jax.nn.one_hot(jnp.take_along_axis(tokens, found.argmax(-1), 1), 9)
    experiment, params, _ = made(task="reverse", positions__eval=policy)
    kept = {name: getattr(experiment, name) for name in ("task", "eval_policy", "config", "max_length", "replicas")}
    evaluate = Evaluator(types.SimpleNamespace(**kept, apply=lambda params, tokens, positions, scheme: apply(
        params, tokens, jnp.broadcast_to(positions, tokens.shape))), MESH)
    for row in rows_of((experiment, params, evaluate), (4, 9), 20):
        assert row["exact_match"] == (1.0 if policy == "coupled" else pytest.approx(0.0, abs=0.2))


def begins_with_4(tokens):
    return tokens[:, 1] == 4


@pytest.mark.parametrize("batch_tokens", [64, 2**12])
def test_as_many_examples_are_counted_as_asked_for_and_the_first_stay_the_same(monkeypatch, batch_tokens):
    monkeypatch.setattr(extrapolation, "_BATCH_TOKENS", batch_tokens)
    parts = experiment, _, _ = oracle(begins_with_4)
    for count in (1, 3, 100, 600):  # less than a batch, and more than one
        for row in rows_of(parts, (4,), count):
            wrong = begins_with_4(held_out(experiment, row["seed"], 4, 0, count).tokens).sum()
            assert row["num_examples"] == count and round(count * (1 - row["exact_match"])) == wrong
            assert row["token_accuracy"] == pytest.approx(row["exact_match"])
    assert 0 < wrong < 300


def test_one_wrong_token_spoils_the_exact_match_alone():
    experiment = made()[0]

    def apply(params, tokens):  # wrong at the answer's last token: what it reads is the third symbol of the string again
        index = jnp.arange(tokens.shape[1])
        return jnp.where((index == 4 + 4)[None, :, None], -1.0, 1.0) * knowing(tokens)
    for row in rows_of((experiment, made()[1], Evaluator(with_apply(experiment, apply), MESH)), (4,), 20):
        assert (row["exact_match"], row["token_accuracy"], row["per_position"]) == (0.0, 0.75, [1.0, 1.0, 1.0, 0.0])


def test_at_most_one_compilation_a_power_of_two_for_any_grid():
    parts = oracle()
    with compilations() as compiled:
        for lengths, count in (((1, 2, 3, 4), 5), ((1, 2), 400), ((5, 6, 7, 8, 9, 15), 5), ((16,), 9), ((1, 4, 7, 12), 1)):
            rows_of(parts, lengths, count)
    assert parts[2].compilations == compiled.count("jit(local)") == 3


def test_a_length_scores_the_same_whatever_else_is_in_the_grid():
    parts = made()
    alone, among = rows_of(parts, (6,), 20), rows_of(parts, (1, 6, 8), 20)
    assert alone == [row for row in among if row["length"] == 6]


@pytest.mark.parametrize("train_max, length, size", [(4, 1, 4), (4, 4, 4), (4, 5, 8), (4, 9, 16), (5, 11, 20)])
def test_buckets_are_the_training_maximum_times_powers_of_two(train_max, length, size):
    assert bucket(TASKS.make("copy", {}), length, train_max) == size


def test_a_bucket_ends_with_the_task():
    task = TASKS.make("copy", {"symbols": 10, "unique": True})
    assert [bucket(task, n, 4) for n in (4, 8, 9, 10)] == [4, 8, 10, 10]
    Experiment.build(tiny.config(**{"task.symbols": 10, "task.unique": True, "eval.lengths": (4, 9, 10)}))


def test_a_learned_table_has_results_up_to_its_last_row_and_says_so_beyond():
    parts = made("learned", scheme__max_length=11)  # copy of 5 symbols feeds 11 tokens; its bucket, 8, feeds 17
    rows = rows_of(parts, (4, 5, 6, 9), 20)
    for row in rows:
        if row["length"] <= 5:
            assert row["status"] == "ok" and np.isfinite([row["loss"], row["token_accuracy"], *row["per_position"]]).all()
        else:
            assert row == {"step": 7, "seed": row["seed"], "length": row["length"], "condition": {}, "num_examples": 20,
                           "positions": "sequential", "status": "no row past max_length 11", "exact_match": None,
                           "token_accuracy": None, "loss": None, "per_position": []}
    experiment, params, _ = parts
    batch = jax.tree.map(lambda x: x[:, :11], held_out(experiment, 0, 5, 0, 20))
    assert_matches(rows[2], logits_of(experiment, params, 0, batch.tokens), batch)


def test_conditions_are_evaluated_one_by_one_and_recorded():
    experiment, params, evaluate = made(task="needle", task__depths=(0.0, 1.0), train__lengths__min=8, train__lengths__max=12,
                                        eval__lengths=(12, 20))
    with compilations() as compiled:
        rows = rows_of((experiment, params, evaluate), (12,), 20)
    assert evaluate.compilations == compiled.count("jit(local)") == 1
    assert [(row["condition"], row["seed"]) for row in rows] == [({"depth": d}, s) for d in (0.0, 1.0) for s in SEEDS]
    assert len({row["loss"] for row in rows}) == 4 and all(len(row["per_position"]) == 4 for row in rows)
    for row in rows[::2]:
        index = (0.0, 1.0).index(row["condition"]["depth"])
        batch = held_out(experiment, 0, 12, index, 20, depth=jnp.float32(row["condition"]["depth"]))
        place = np.argmax(batch.tokens[:, 1:13] >= 20, 1)  # the first token of a needle's alphabets
        assert set(place) == {0 if index == 0 else 6}
        assert_matches(row, logits_of(experiment, params, 0, batch.tokens), batch)


def test_greedy_decoding_is_right_exactly_where_the_teacher_forced_pass_is():
    experiment, params, _ = made()
    apply = jax.jit(lambda params, tokens: experiment.apply(params, tokens) + 0.05 * knowing(tokens))  # knows the half of it
    own = jax.tree.map(lambda leaf: leaf[0], params)
    batch = held_out(experiment, 0, 3, 0, 40)
    decoded = np.where(np.cumsum(batch.weights, 1) - batch.weights > 0, 0, batch.tokens)  # the answer is taken away
    answer = np.flatnonzero(batch.weights[0])
    for t in answer:
        assert t == answer[0] or (decoded[:, t] != 0).any()
        decoded[:, t + 1] = np.asarray(apply(own, decoded))[:, t].argmax(-1)
    right = (decoded[:, answer + 1] == batch.targets[:, answer]).all(1)
    forced = (np.asarray(apply(own, batch.tokens)).argmax(-1) == batch.targets)[:, answer]
    np.testing.assert_array_equal(right, forced.all(1))
    assert 0 < right.mean() < forced.mean() < 1
    evaluate = Evaluator(with_apply(experiment, apply), MESH)
    assert rows_of((experiment, params, evaluate), (3,), 40)[0]["exact_match"] == pytest.approx(right.mean())


@pytest.mark.parametrize("lengths, says", [((), "empty"), ((4, 2), "4, 2"), ((2, 2), "2, 2"), ((0, 2), "0, 2"), ((-4,), "-4")])
def test_lengths_that_are_no_rising_grid_are_refused(lengths, says):
    experiment, _, _ = made()
    with pytest.raises(UserError, match=says):
        check_eval_lengths(experiment.task, experiment.eval_policy, lengths)


@pytest.mark.parametrize("overrides", [
    {"positions.eval": "even", "positions.eval.max_position": 12},  # length 9 feeds 19 tokens
    {"task": "mqar", "task.keys": 6},
    {"task.unique": True},
])
def test_what_cannot_be_evaluated_is_refused_before_training(overrides):
    with pytest.raises(UserError, match="12, too small|there are 6|there are 5"):
        Experiment.build(tiny.config(**overrides))
