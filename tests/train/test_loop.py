import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import tiny

from posjax import config as configs
from posjax.errors import UserError
from posjax.experiment import Experiment
from posjax.io.checkpoints import restore_params
from posjax.io.run_dir import RunDir
from posjax.train import interrupt, loop

# What a clock says, and nothing else, may differ between two runs of the same config.
TIMES = {"tokens_per_second", "steps_per_second", "seconds"}


CONFIG = tiny.config(**{"train.steps": 60, "eval.every": 20})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run never interrupted, and what it showed."""
    path, stream = tmp_path_factory.mktemp("loop") / "run", io.StringIO()
    with tiny.quick_compilation():
        loop.train(CONFIG, path, command="the command", stream=stream)
    return path, stream.getvalue()


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """The environment of a child process: two virtual devices, as here, and programs compiled once for all children."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1",
                         "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # as the run that they are compared with
                         "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
                         "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}


def start(path, shell, slow=0.0):
    """A process that trains; its chunks take `slow` seconds longer, so that a signal finds it at work."""
    code = ("import sys, time, jax; from posjax.cli import main; from posjax.train import loop\n"
            "jax.config.update('jax_num_cpu_devices', 2)\n"
            "record = loop._Training._record\n"
            f"loop._Training._record = lambda *args: (time.sleep({slow}), record(*args))[1]\n"
            f"sys.exit(main(['train', '--config={path.parent / 'config.json'}', '--workdir={path}']))")
    (path.parent / "config.json").write_text(json.dumps(configs.to_json(CONFIG)))
    return subprocess.Popen([sys.executable, "-W", "error", "-c", code], env=shell, stderr=subprocess.PIPE, text=True)


def wait_for(process, ready):
    while not ready():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)


def steps_of(path):
    return [row["step"] for row in RunDir.open(path).metrics()] if (path / "config.json").exists() else []


def assert_same_run(path, other):
    (step, params), (other_step, other_params) = (restore_params(p / "checkpoints") for p in (path, other))
    assert step == other_step
    leaves, other_leaves = (dict(paths(tree)) for tree in (params, other_params))
    assert leaves.keys() == other_leaves.keys()
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(leaf, other_leaves[name], err_msg=name)
    run, other = RunDir.open(path), RunDir.open(other)
    assert [untimed(row) for row in run.metrics()] == [untimed(row) for row in other.metrics()]
    assert run.evals() == other.evals()


def paths(tree, prefix=""):
    if not isinstance(tree, dict):
        yield prefix, np.asarray(tree)
        return
    for key, value in tree.items():
        yield from paths(value, f"{prefix}/{key}")


def untimed(row):
    return {key: value for key, value in row.items() if key not in TIMES}


def test_a_run_writes_all_its_records(finished):
    path, _ = finished
    assert {entry.name for entry in path.iterdir()} == {
        "config.json", "environment.json", "metrics.jsonl", "evals.jsonl", "tensorboard", "checkpoints", "DONE", "lock"}
    assert json.loads((path / "config.json").read_text()) == configs.to_json(CONFIG)
    environment = json.loads((path / "environment.json").read_text())
    assert environment["command"] == "the command" and environment["device_count"] == jax.device_count()
    assert {"posjax", "jax", "flax", "optax", "numpy", "python", "platform", "devices", "cpu_count", "git_commit",
            "started"} <= environment.keys()
    done = json.loads((path / "DONE").read_text())
    assert done["steps"] == 60 and done["eval_compilations"] == 3
    # 6 N + 12 L H Dh T a token: 2 seeds x 4 rows x 9 tokens, 1 block of 2 heads x 8.
    assert done["step_flops"] == 72 * (6 * Experiment.build(CONFIG).num_params + 12 * 16 * 9)
    assert done["tokens_per_second"] == pytest.approx(72 / done["step_seconds"])
    utilisation = done["step_flops"] / done["step_seconds"] / done["matmul_flops_per_second"]
    assert done["model_flop_utilisation"] == pytest.approx(utilisation) and 0 < utilisation < 1
    assert done["peak_memory_bytes"] > 2**20
    assert any(path.joinpath("tensorboard").iterdir())


def test_a_profile_is_a_trace_of_one_chunk_beside_the_curves(tmp_path):
    stream = io.StringIO()
    with tiny.quick_compilation():
        loop.train(tiny.config(**{"train.steps": 10, "eval.every": 0}), tmp_path / "run", stream=stream, profile=True)
    traces = list((tmp_path / "run" / "tensorboard").glob("plugins/profile/*/*.xplane.pb"))
    assert len(traces) == 1 and traces[0].stat().st_size and "Wrote a trace to" in stream.getvalue()


def test_metrics_have_a_row_for_each_chunk_and_a_value_for_each_seed(finished):
    rows = [json.loads(line) for line in (finished[0] / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(5, 61, 5))
    for row in rows:
        assert row.keys() == {"step", "seeds", "loss", "grad_norm", "train_token_accuracy", "learning_rate", *TIMES}
        assert row["seeds"] == [0, 1]
        assert all(len(row[name]) == 2 for name in ("loss", "grad_norm", "train_token_accuracy"))
        assert row["tokens_per_second"] == pytest.approx(row["steps_per_second"] * 2 * 4 * 9)
    assert rows[-1]["seconds"] > rows[0]["seconds"] > 0
    assert rows[-1]["learning_rate"] == pytest.approx(3e-4, rel=0.2)  # a tenth of the peak, nearly


def test_evals_have_a_row_for_each_step_seed_and_length(finished):
    rows = [json.loads(line) for line in (finished[0] / "evals.jsonl").read_text().splitlines()]
    assert [(row["step"], row["num_examples"], row["length"], row["seed"]) for row in rows] == [
        (*when, length, seed) for when in ((20, 10), (40, 10), (60, 20)) for length in (1, 4, 6, 9) for seed in (0, 1)]
    for row in rows:
        assert row["status"] == "ok" and row["condition"] == {} and len(row["per_position"]) == row["length"]
        assert 0 <= row["exact_match"] <= row["token_accuracy"] <= 1 and 0 < row["loss"] < 10


def test_a_person_sees_what_runs_and_how_far_it_is(finished):
    shown = finished[1]
    for text in ("scheme rope (", "; task copy (", "parameters x 2 seeds; 72 tokens a step; 60 steps",
                 f"2 of {jax.device_count()} cpu devices", "] 60/60  loss ", "steps/s", "tokens/s", str(finished[0])):
        assert text in shown
    assert shown.count("60/60") == 1


def test_the_same_command_again_says_that_it_is_finished(finished):
    path, _ = finished
    before = {p: p.stat().st_mtime_ns for p in path.rglob("*") if p.is_file() and p.name != "lock"}
    stream = io.StringIO()
    assert loop.train(CONFIG, path, stream=stream) == path
    assert stream.getvalue() == f"{path} is finished: 60 steps. Nothing to do.\n"
    assert before == {p: p.stat().st_mtime_ns for p in path.rglob("*") if p.is_file() and p.name != "lock"}


def test_another_config_in_the_same_directory_is_refused(finished):
    with pytest.raises(UserError, match="run of another config: train.learning_rate is 0.003 there, 0.1 here"):
        loop.train(configs.override(CONFIG, {"train.learning_rate": 0.1}), finished[0], stream=io.StringIO())


def test_a_config_that_cannot_work_leaves_nothing(tmp_path):
    with pytest.raises(UserError, match="model.width 16 does not divide"):
        loop.train(tiny.config(**{"model.num_heads": 3}), tmp_path / "a/run", stream=io.StringIO())
    assert not list(tmp_path.iterdir())


@pytest.fixture
def interrupts():
    """What a shell ignores in the background comes."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_unpolled_signal_waits_and_the_second_acts_at_once(interrupts):
    with interrupt.deferred_signals() as flag:
        os.kill(os.getpid(), signal.SIGINT)
        assert flag.signum == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupted_again_and_again_a_run_ends_in_the_same_bits(finished, tmp_path, shell):
    """By both signals, which save, and by kills at moments that nobody chose, which do not."""
    path = tmp_path / "run"
    for signum in (signal.SIGTERM, signal.SIGINT):
        known = len(steps_of(path))
        process = start(path, shell, slow=0.3)
        wait_for(process, lambda known=known: len(steps_of(path)) > known)
        process.send_signal(signum)
        said = process.communicate()[1]
        assert process.returncode == 128 + signum
        last = said.strip().splitlines()[-1]
        assert last.startswith("posjax: Interrupted at step ") and "Traceback" not in said
        assert RunDir.open(path).done is None
    for _ in range(2):
        process = start(path, shell, slow=0.3)
        known = len(steps_of(path))
        wait_for(process, lambda known=known: len(steps_of(path)) != known)  # at work: rows are dropped, then added
        time.sleep(random.uniform(0, 1.2))
        process.kill()
        process.communicate()
    process = start(path, shell)
    said = process.communicate()[1]
    assert process.returncode == 0 and ("Resuming at step " in said or "is finished" in said), said
    assert_same_run(path, finished[0])


def test_a_second_process_on_the_same_directory_is_refused(tmp_path, shell):
    path = tmp_path / "run"
    first = start(path, shell, slow=30)
    wait_for(first, lambda: (path / "lock").exists() and (path / "lock").read_text())
    second = start(path, shell)
    assert second.communicate()[1] == f"posjax: Run directory {path} is in use by process {first.pid}.\n"
    assert second.returncode == 2
    first.kill()
    first.communicate()


def test_a_learned_table_that_no_evaluation_fits_is_recorded_as_such(tmp_path):
    config = tiny.config("learned", **{"scheme.max_length": 9, "positions.eval": "random_offset", "train.steps": 2,
                                       "eval.every": 0})
    with tiny.quick_compilation():
        loop.train(config, tmp_path / "run", stream=io.StringIO())
    run = RunDir.open(tmp_path / "run")
    assert {row["status"] for row in run.evals()} == {"no row past max_length 9"} and run.done


def test_a_run_trains_with_positions_that_its_task_gives(tmp_path):
    config = tiny.config("learned", "reverse", **{
        "positions.train": "coupled", "positions.train.max_position": 12, "positions.eval": "coupled", "scheme.max_length": 12,
        "train.steps": 2, "eval.every": 0, "eval.lengths": (1, 4, 9, 11)})
    with tiny.quick_compilation():
        loop.train(config, tmp_path / "run", stream=io.StringIO())
    rows = RunDir.open(tmp_path / "run").evals()
    assert {row["positions"] for row in rows} == {"coupled (max_position=None)"}
    # The table's 12 rows hold a string of 10 with what stands before and after it; 21 tokens, of which none has its own row.
    assert {row["length"]: row["status"] for row in rows} == {1: "ok", 4: "ok", 9: "ok", 11: "no row past max_length 12"}
    assert all(row["loss"] is not None and np.isfinite(row["loss"]) for row in rows if row["status"] == "ok")


@pytest.mark.parametrize(("task", "overrides", "says"), [
    ("mqar", {"positions.train": "coupled"}, "and the task mqar gives none; those that do: copy, reverse"),
    ("mqar", {"positions.eval": "coupled"}, "the task mqar gives none"),
    ("copy", {"positions.train": "coupled", "positions.train.max_position": 4}, "has max_position 4, too small for 5 positions"),
])
def test_coupled_positions_that_cannot_be_are_refused_before_training(task, overrides, says):
    with pytest.raises(UserError, match=says):
        Experiment.build(tiny.config("rope", task, **overrides))


def test_a_finished_run_that_lost_records_is_evaluated_again(finished, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(finished[0], copy)
    lines = (copy / "evals.jsonl").read_text().splitlines(keepends=True)
    (copy / "evals.jsonl").write_text("".join(lines[:-2]))
    again = io.StringIO()
    with tiny.quick_compilation():
        loop.train(CONFIG, copy, stream=again)
    assert "has lost 2 records" in again.getvalue() and "Evaluating" in again.getvalue()

    def final(path):
        return {(row["seed"], row["length"]): row for row in RunDir.open(path).evals() if row["step"] == 60}
    assert final(copy) == final(finished[0])
