import json
import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from posjax.errors import UserError
from posjax.io.environment import environment_record
from posjax.io.run_dir import RunDir

CONFIG = {"seed": 1, "train": {"steps": 500, "lengths": {"min": 1, "max": 16}}, "eval": {"lengths": (4, 8)}}

WRITER = """
import sys, time
from posjax.io.run_dir import RunDir
run = RunDir.create(sys.argv[1], {"seed": 1})
step = 0
while True:
    step += 1
    run.append_metrics([{"step": step, "loss": [0.1] * 2000}])
    print(step, flush=True)
"""


@pytest.fixture
def run(tmp_path):
    with RunDir.create(tmp_path / "run", CONFIG) as run:
        yield run


def make(tmp_path, config=CONFIG):
    RunDir.create(tmp_path / "run", config).close()
    return tmp_path / "run"


def start_writer(path, last_line):
    """A process that holds the run and writes; returns once it printed `last_line`."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    while process.stdout.readline().strip() != last_line:
        assert process.poll() is None
    return process


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.communicate()


def eval_row(step, exact_match, length=8, seed=0, condition=None, num_examples=64):
    return {"step": step, "seed": seed, "length": length, "condition": condition or {}, "num_examples": num_examples,
            "exact_match": exact_match}


def test_config_reads_back_and_same_config_opens_again(tmp_path):
    path = make(tmp_path)
    assert RunDir.open(path).config == json.loads(json.dumps(CONFIG))
    RunDir.create(path, CONFIG).close()
    RunDir.create(path, RunDir.open(path).config).close()


def test_another_config_is_refused_with_the_keys_and_both_values(tmp_path):
    path = make(tmp_path)
    before = (path / "config.json").read_bytes()
    other = CONFIG | {"train": {"steps": 900, "lengths": {"min": 1, "max": 16}}, "new": "x"}
    with pytest.raises(UserError) as error:
        RunDir.create(path, other)
    message = str(error.value)
    assert "train.steps is 500 there, 900 here" in message and "new is absent there" in message and str(path) in message
    assert "seed" not in message and "\n" not in message
    assert (path / "config.json").read_bytes() == before
    RunDir.create(path, CONFIG).close()  # the refused attempt kept no lock


def test_config_with_nan_equals_itself(tmp_path):
    make(tmp_path, {"x": math.nan})
    make(tmp_path, {"x": math.nan})


def test_what_is_not_a_run_is_refused_and_left_alone(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("mine")
    with pytest.raises(UserError, match="is a file"):
        RunDir.create(tmp_path / "file", CONFIG)
    with pytest.raises(UserError, match=r"not empty \(chapter.tex\)"):
        RunDir.create(tmp_path / "thesis", CONFIG)
    assert [entry.name for entry in (tmp_path / "thesis").iterdir()] == ["chapter.tex"]


def test_refusals_leave_nothing_behind(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="Cannot write"):
        RunDir.create(tmp_path / "file" / "run", CONFIG)
    with pytest.raises(TypeError):
        RunDir.create(tmp_path / "a" / "b", {"x": object()})
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_failing_disk_leaves_no_directory(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        RunDir.create(tmp_path / "a" / "run", CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_and_one_of_a_killed_start_are_fine(tmp_path):
    (tmp_path / "run").mkdir()
    make(tmp_path)
    (tmp_path / "run" / "config.json").unlink()
    (tmp_path / "run" / ".config.json.tmp").write_text('{"se')
    make(tmp_path)


def test_open_needs_a_run(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        RunDir.open(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"no config\.json"):
        RunDir.open(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        print(RunDir.open(tmp_path).config)


def test_second_process_is_refused_until_the_first_is_killed(tmp_path):
    path = tmp_path / "run"
    writer = start_writer(path, "3")
    try:
        with pytest.raises(UserError, match=f"in use by process {writer.pid}"):
            RunDir.create(path, {"seed": 1})
        assert len(RunDir.open(path).metrics()) >= 3  # reading needs no lock
    finally:
        kill(writer)
    RunDir.create(path, {"seed": 1}).close()


def test_records_survive_a_kill_and_appending_goes_on(tmp_path):
    path = tmp_path / "run"
    kill(start_writer(path, "20"))
    rows = RunDir.open(path).metrics()
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 20
    with RunDir.create(path, {"seed": 1}) as run:
        run.append_metrics([{"step": 10_000}])
        assert run.metrics()[-1] == {"step": 10_000} and run.metrics()[:-1] == rows


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3}', "x" * 200_000])
def test_torn_last_line_is_ignored_then_repaired(run, torn):
    run.append_metrics([{"step": 1}, {"step": 2}])
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write(torn)
    assert [row["step"] for row in run.metrics()] == [1, 2]
    run.append_metrics([{"step": 4}])
    assert (run.path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n{"step": 4}\n'


def test_a_file_that_is_only_a_torn_line(run):
    (run.path / "metrics.jsonl").write_text('{"st')
    assert run.metrics() == []
    run.append_metrics([{"step": 1}])
    assert run.metrics() == [{"step": 1}]


def test_a_broken_line_in_the_middle_is_named(run):
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2"):
        run.metrics()


def test_floats_are_exact_and_arrays_and_nan_survive(run):
    jnp = pytest.importorskip("jax.numpy")
    third = np.float32(1) / np.float32(3)
    run.append_metrics([{"step": np.int64(1), "a": 0.1 + 0.2, "b": third, "c": np.array([math.nan, -math.inf]),
                         "d": jnp.float32(third), "e": jnp.asarray([1.5], jnp.bfloat16), "f": np.bool_(True),
                         "g": (1, 2)}])
    (row,) = run.metrics()
    assert row["a"] == 0.1 + 0.2 and np.float32(row["b"]) == third and row["d"] == row["b"]
    assert math.isnan(row["c"][0]) and row["c"][1] == -math.inf
    assert (row["step"], row["e"], row["f"], row["g"]) == (1, [1.5], True, [1, 2])


def test_of_equal_evaluations_the_last_counts(run):
    run.append_evals([eval_row(5, 0.1), eval_row(5, 0.2, seed=1), eval_row(5, 0.3, condition={"depth": 0.5})])
    run.append_evals([eval_row(5, 0.9), eval_row(5, 0.4, num_examples=128), eval_row(10, 0.5)])
    run.append_evals([eval_row(5, 0.7) | {"positions": "sequential"}, eval_row(5, 0.6) | {"positions": "even (max_position=40)"}])
    assert [row["exact_match"] for row in run.evals()] == [0.9, 0.2, 0.3, 0.4, 0.5, 0.7, 0.6]


def test_records_without_a_row_are_kept(run):
    row = {"step": 5, "seed": 0, "length": 64, "condition": {}, "status": "no row past max_length 34",
           "exact_match": None, "token_accuracy": None, "loss": None, "per_position": []}
    run.append_evals([row, row])
    assert run.evals() == [row]


def test_truncation_drops_later_steps_only(run):
    run.append_metrics([{"step": step} for step in (50, 100, 150)])
    run.append_evals([eval_row(100, 0.1), eval_row(150, 0.2)])
    run.truncate_after(100)
    assert [row["step"] for row in run.metrics()] == [50, 100]
    assert [row["step"] for row in run.evals()] == [100]
    run.truncate_after(0)
    assert run.metrics() == run.evals() == []


def test_done_is_what_finish_wrote(run):
    assert run.done is None
    run.finish({"steps": 500, "loss": 0.25})
    assert RunDir.open(run.path).done == {"steps": 500, "loss": 0.25}


def test_reading_does_not_write(tmp_path):
    reader = RunDir.open(make(tmp_path))
    for write, value in ((reader.append_metrics, [{"step": 1}]), (reader.finish, {}), (reader.truncate_after, 0)):
        with pytest.raises(RuntimeError, match="not open for writing"):
            write(value)
    assert not (reader.path / "metrics.jsonl").exists()


def test_environment_says_what_ran(run):
    assert run.environment == {}
    run.write_environment(environment_record("posjax train --config=x"))
    environment = run.environment
    assert environment["command"] == "posjax train --config=x"
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert environment["device_count"] == len(environment["devices"]) >= 1
    assert {"posjax", "jax", "flax", "optax", "numpy"} <= environment.keys()
    assert {"platform", "cpu_count", "git_commit", "started"} <= environment.keys()
