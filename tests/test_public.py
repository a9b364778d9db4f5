"""The package as a notebook uses it: no flags, no command line."""
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import posjax

COPY = pathlib.Path(__file__).parents[1] / "configs/copy.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = posjax.load_config(f"{COPY}:alibi", **tiny.OVERRIDES | {"train.steps": 4, "eval.lengths": (1, 4)})
    with tiny.quick_compilation():
        return posjax.run(config, tmp_path_factory.mktemp("public") / "run")


@pytest.mark.parametrize("name", posjax.__all__)
def test_every_public_name_is_there(name):
    assert getattr(posjax, name) is not None and name in dir(posjax)


def test_a_name_that_is_not_public():
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        getattr(posjax, "nope")  # noqa: B009


def test_a_run_is_read_back_with_its_config_and_records(run):
    again = posjax.load_run(run.path)
    assert again.config.to_dict() == run.config.to_dict() and again.config.train.steps == 4
    assert again.done["steps"] == 4 and [row["step"] for row in again.metrics()] == [4]
    assert {(row["length"], row["seed"]) for row in again.evals()} == {(1, 0), (1, 1), (4, 0), (4, 1)}
    assert again.environment["command"] == f"posjax train --config={run.path / 'config.json'} --workdir={run.path}"


def test_the_command_in_the_record_of_a_notebooks_run_finds_it_again(run):
    assert posjax.run(posjax.load_config(run.path / "config.json"), run.path).done == run.done


def test_the_summary_is_that_of_the_records(run):
    summary = posjax.load_run(run.path).summary()
    assert (summary.scheme, summary.task, summary.step, summary.seeds) == ("alibi", "copy", 4, (0, 1))
    by_seed = {row["seed"]: row["token_accuracy"] for row in run.evals() if row["length"] == 4}
    assert summary.token_accuracy[4].values == (by_seed[0], by_seed[1])


def test_the_model_of_a_seed_is_ready_to_call(run):
    tokens = jnp.array([[1, 4, 5, 2, 4]], jnp.int32)
    first, second = run.model(), run.model(seed=1)
    assert first(tokens).shape == (1, 5, 9) and first(tokens).dtype == jnp.float32
    np.testing.assert_array_equal(first(tokens), run.model(seed=0)(tokens))
    assert (first(tokens) != second(tokens)).any()
    step, params = run.params()
    assert step == 4
    np.testing.assert_array_equal(first.tokens.embedding[...], params["tokens"]["embedding"][0])
    with pytest.raises(posjax.UserError, match="no seed 2; it has 0, 1"):
        run.model(seed=2)


def test_evaluating_again_gives_the_same_rows_and_more_lengths_more(run):
    before = run.evals()
    with tiny.quick_compilation():
        rows = run.evaluate((4,))
    assert rows == [row for row in before if row["length"] == 4] and run.evals() == before
    with pytest.raises(posjax.UserError, match="4, 2"):
        run.evaluate((4, 2))


def test_a_finished_run_is_only_read(run, capsys):
    assert posjax.run(run.config, run.path).done == run.done
    assert "is finished" in capsys.readouterr().err


def test_mistakes_are_value_errors_of_one_line(tmp_path):
    with pytest.raises(ValueError, match="Did you mean train.steps"):
        posjax.load_config(COPY, **{"train.stepz": 4})
    with pytest.raises(ValueError, match="is not a run directory: there is no such directory"):
        posjax.load_run(tmp_path / "nowhere")


def test_names_of_runs_tell_configs_apart():
    from posjax.runs import run_name
    names = {run_name(tiny.config(**change)) for change in ({}, {"seed": 1}, {"scheme.base": 5.0}, {"scheme": "alibi"})}
    assert len(names) == 4 and run_name(tiny.config()) in names
    assert all(name.startswith(("copy-rope-", "copy-alibi-")) for name in names)
