import functools
import io

import jax
import numpy as np
import pytest
import tiny

from posjax.compilations import compilations
from posjax.experiment import Experiment
from posjax.io.checkpoints import Checkpoints
from posjax.io.run_dir import RunDir
from posjax.runs import load_run
from posjax.train import chunk as chunks
from posjax.train import loop
from posjax.train.replicas import place, replica_mesh


@functools.cache
def trainer(num_replicas, num_devices):
    """A function from seeds and numbers of steps to the final state and all metrics."""
    experiment = Experiment.build(tiny.config())
    mesh = jax.make_mesh((num_devices,), ("replica",), devices=jax.devices()[:num_devices],
                         axis_types=(jax.sharding.AxisType.Auto,))
    chunk = chunks.make_chunk(experiment, mesh)
    replicas = jax.tree.map(lambda leaf: leaf[:num_replicas], experiment.replica_values())

    def run(seeds, *counts):
        assert len(seeds) == num_replicas
        on_device = place(replicas | {"seed": np.asarray(seeds, np.uint32)}, mesh)
        state, step, found = chunks.init_state(experiment, on_device, mesh), 0, []
        for count in counts:
            state, metrics = chunk(state, on_device, np.int32(step), np.int32(count))
            found.append({name: np.asarray(metrics[name])[:, :count] for name in chunks.METRICS})
            step += count
        metrics = {name: np.concatenate([part[name] for part in found], 1) for name in chunks.METRICS}
        return jax.tree.map(np.asarray, state), metrics
    return run


BOTH = (0, 1)


def two(*counts):
    return trainer(2, 2)(BOTH, *counts)


def assert_same_bits(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def assert_same_training(left, right):
    """Equal but for rounding: XLA fuses one program in another way than the other, never the same program in two.

    Sums of products in another order differ by units in the last place (6e-8), which ten steps of Adam carry on: 2e-7 of a
    loss and 6e-8 of a parameter were seen. A replica with the data or the start of another is off by 1e-1.
    """
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(left[1][name], right[1][name], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), left[0]["params"], right[0]["params"])


def test_a_step_depends_on_seed_and_number_alone_however_steps_are_grouped():
    by_one = two(*[1] * 10)
    with compilations() as compiled:
        by_two, by_five = two(*[2] * 5), two(5, 5)
    assert_same_bits(by_one, by_two)
    assert_same_bits(by_one, by_five)
    assert "jit(chunk)" not in compiled


def test_replicas_are_the_single_runs_of_their_seeds():
    together = two(5, 5)
    for index, seed in enumerate(BOTH):
        alone = trainer(1, 1)((seed,), 5, 5)
        assert_same_training(jax.tree.map(lambda leaf, index=index: leaf[index:index + 1], together), alone)


def test_one_device_and_two_give_the_same_training():
    assert_same_training(two(5, 5), trainer(2, 1)(BOTH, 5, 5))


def test_seeds_differ_in_parameters_and_data():
    state, metrics = two(5)
    assert all((leaf[0] != leaf[1]).any() for leaf in jax.tree.leaves(state["params"]["blocks"]))
    assert (metrics["loss"][0] != metrics["loss"][1]).all()


def test_the_first_loss_is_that_of_guessing():
    _, metrics = two(1)
    assert metrics["loss"] == pytest.approx(np.log(9), abs=1.5)  # 5 symbols and 4 special tokens


def test_training_batches_hold_all_lengths_and_never_repeat():
    experiment = Experiment.build(tiny.config(**{"train.batch_size": 64}))
    batch, positions = chunks.train_batch(experiment, 0, 0)
    answers = np.asarray(batch.weights).sum(1)
    assert set(answers) == {1, 2, 3, 4}
    assert positions.shape in ((experiment.train_tokens,), batch.tokens.shape)
    again, other_step, other_seed = (np.asarray(chunks.train_batch(experiment, *which)[0].tokens)
                                     for which in ((0, 0), (0, 1), (1, 0)))
    np.testing.assert_array_equal(batch.tokens, again)
    assert (batch.tokens != other_step).any() and (batch.tokens != other_seed).any()


def test_the_loss_counts_answers_only():
    experiment = Experiment.build(tiny.config())
    batch, _ = chunks.train_batch(experiment, 0, 0)
    logits = np.where(np.arange(9) == np.asarray(batch.targets)[..., None], 50.0, 0.0)
    logits = np.where(np.asarray(batch.weights)[..., None] == 1, logits, -logits)  # wrong wherever it does not count
    assert chunks.answer_loss(logits.astype(np.float32), batch) < 1e-6


def test_the_loss_falls():
    _, metrics = two(*[5] * 30)
    assert (metrics["loss"][:, -20:].mean(1) < metrics["loss"][:, :5].mean(1) - 0.2).all()
    assert (metrics["token_accuracy"][:, -20:].mean(1) > metrics["token_accuracy"][:, :5].mean(1)).all()


def test_the_mesh_has_as_many_devices_as_share_the_replicas_evenly():
    assert [replica_mesh(count).size for count in (1, 3, 5, 6, 8)] == [1, 3, 1, 3, 4]


@pytest.fixture
def spoil(monkeypatch):
    """Makes training steps return a NaN from step 12 on, for seed 1 alone, in the named place."""
    def spoil(place):
        make_step = chunks.make_step

        def bad_step(experiment):
            good = make_step(experiment)

            def step_fn(state, step, replica):
                state, metrics = good(state, step, replica)
                factor = jax.numpy.where((step >= 11) & (replica["seed"] == 1), np.float32(np.nan), np.float32(1))
                if place == "params":
                    return jax.tree.map(lambda x: x * factor if x.dtype == np.float32 else x, state), metrics
                return state, metrics | {place: metrics[place] * factor}
            return step_fn
        monkeypatch.setattr(chunks, "make_step", bad_step)
    return spoil


@pytest.mark.parametrize("place, chunk_steps, says", [
    ("loss", 11, "not finite at step 12 (seed 1). Last finite metrics: step 11: loss "),
    ("params", 12, "parameters are not finite after step 12 (seed 1). Last finite metrics: step 12: loss "),
])
def test_what_is_not_finite_stops_the_run_which_starts_from_its_last_checkpoint(tmp_path, spoil, monkeypatch, place, chunk_steps,
                                                                                says):
    spoil(place)
    config = tiny.config(**{"train.chunk_steps": chunk_steps, "train.checkpoint_every": 4, "eval.every": 0, "train.steps": 12})
    with pytest.raises(loop.Diverged) as caught, tiny.quick_compilation():
        loop.train(config, tmp_path / "run", stream=io.StringIO())
    assert says in str(caught.value) and "nan" not in str(caught.value) and "grad_norm" in str(caught.value)
    assert Checkpoints(tmp_path / "run/checkpoints").latest() == 8
    run = RunDir.open(tmp_path / "run")
    assert run.done is None and np.isfinite([row["loss"] for row in run.metrics()]).all()
    assert run.failed == {"step": 12, "seeds": [1], "reason": str(caught.value)}
    assert load_run(tmp_path / "run").summary().absence == "failed"

    monkeypatch.undo()
    with tiny.quick_compilation():
        loop.train(config, tmp_path / "run", stream=(told := io.StringIO()))
    assert "Resuming at step 8 of 12" in told.getvalue()
    assert run.done["steps"] == 12 and run.failed is None and not (tmp_path / "run/FAILED").exists()
