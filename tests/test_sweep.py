import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import tiny

from posjax import sweeps
from posjax.cli import main
from posjax.errors import UserError
from posjax.io.run_dir import RunDir
from posjax.sweep_runner import plan

HERE = pathlib.Path(__file__).parent
CONFIG = f"""
import os, time, posjax
from posjax import sweeps
from posjax.train import loop

record = loop._Training._record
def slowly(*args):  # so that a signal finds the run at work
    time.sleep(float(os.environ.get("SLOW", 0)))
    return record(*args)
loop._Training._record = slowly

def get_config(which=None):
    config = posjax.default_config()
    return posjax.config.override(config, {tiny.OVERRIDES | {"num_seeds": 1, "eval.lengths": (1, 4), "eval.every": 0}})

def sweep(which="good"):
    good = sweeps.sweep("scheme", ["nope", "alibi"])
    bad = sweeps.sweep("train.learning_rate", [1e30])
    return {{"good": good, "bad_first": bad + good, "twice": good + good, "typo": good + [{{"train.stepz": 1}}],
            "none": [], "text": ["alibi"], "broken": lambda: 0}}[which]
"""


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "mine.py"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture(autouse=True)
def children(monkeypatch, tmp_path_factory):
    """The environment of the runs: warnings are errors, and what one run compiles the others need not."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parent), str(HERE)]))
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "compiled"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def states(spec, root):
    return [job.state() for job in plan(spec, {}, (), root)]


def test_helpers():
    a, b = sweeps.sweep("a", [1, 2]), sweeps.sweep("b", [3, 4])
    assert a == [{"a": 1}, {"a": 2}]
    assert sweeps.product(a, b) == [{"a": 1, "b": 3}, {"a": 1, "b": 4}, {"a": 2, "b": 3}, {"a": 2, "b": 4}]
    assert sweeps.zip(a, b) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]
    assert sweeps.chain(a, b) == [{"a": 1}, {"a": 2}, {"b": 3}, {"b": 4}]
    assert sweeps.product(a, iter(b)) == sweeps.product(a, b) and sweeps.zip() == []


def test_helpers_refuse_what_does_not_fit():
    a = sweeps.sweep("a", [1, 2])
    with pytest.raises(UserError, match=r"equal length; got \[2, 1\]"):
        sweeps.zip(a, [{"b": 3}])
    with pytest.raises(UserError, match="Two parts of a sweep set a"):
        sweeps.product(a, a)


@pytest.mark.parametrize("which, says", [("twice", "Two runs of the sweep have the same config"),
                                         ("typo", "Did you mean train.steps"), ("none", "yields nothing"),
                                         ("text", "yields 'alibi'"), ("broken", "TypeError"),
                                         ("nope", "mine.py line 19: KeyError: 'nope'")])
def test_a_sweep_that_cannot_work_runs_nothing(spec, tmp_path, capsys, which, says):
    assert main(["sweep", f"--config={spec}:{which}", f"--workdir={tmp_path / 'runs'}"]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and not (tmp_path / "runs").exists()


def test_a_dry_run_lists_the_runs_and_writes_nothing(spec, tmp_path, capsys):
    assert main(["sweep", f"--config={spec}", f"--workdir={tmp_path / 'runs'}", "--dry_run", "--config.train.steps=7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[-1] == "2 runs; nothing was run."
    assert lines[0].startswith("copy-nope-") and lines[0].split()[1:] == ["new", "train.steps=7", "scheme.name=nope"]
    assert not list(tmp_path.iterdir())


def test_what_a_sweep_sets_cannot_be_set_for_all_its_runs(spec, tmp_path):
    with pytest.raises(UserError, match="scheme.name is set by the sweep"):
        plan(spec, {"scheme": "rope"}, (), tmp_path)


def test_the_runs_of_a_sweep_read_what_was_planned(spec, tmp_path):
    jobs = plan(spec, {"train.steps": "7"}, (), tmp_path)
    assert [(job.config.scheme.name, job.config.train.steps) for job in jobs] == [("nope", 7), ("alibi", 7)]
    assert all(job.overrides["scheme.name"] == job.config.scheme.name for job in jobs)


def test_a_failed_run_stops_the_sweep_unless_told_to_go_on(spec, tmp_path, capfd):
    words = ["sweep", f"--config={spec}:bad_first", f"--workdir={tmp_path}"]
    assert main(words) == 1
    out, err = capfd.readouterr()
    assert "0 of 3 runs are finished" in out and "FAILED copy-rope-" in err and "not finite" in err and "Traceback" not in err
    failed, *others = states(f"{spec}:bad_first", tmp_path)
    assert failed.startswith("failed: ") and "not finite" in failed and others == ["new", "new"]

    assert main([*words, "--jobs=2", "--keep_going"]) == 1
    out, err = capfd.readouterr()
    assert "2 of 3 runs are finished" in out and err.strip().splitlines()[-1].startswith("FAILED copy-rope-")
    assert states(f"{spec}:good", tmp_path) == ["finished", "finished"]
    assert len(list(tmp_path.glob("logs/*.log"))) == 3
    assert list(tmp_path.glob("*tfevents*.experiment"))  # the HParams table's columns

    assert main(["sweep", f"--config={spec}:good", f"--workdir={tmp_path}"]) == 0  # nothing left to do
    out = capfd.readouterr().out
    assert "started" not in out and "2 of 2 runs are finished" in out and out.count("  finished\n") == 2


def test_a_stopped_sweep_saves_its_runs_and_the_same_command_goes_on(spec, tmp_path, monkeypatch):
    command = [sys.executable, "-m", "posjax.cli", "sweep", f"--config={spec}", f"--workdir={tmp_path}", "--jobs=2"]
    monkeypatch.setenv("SLOW", "0.5")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    jobs = plan(spec, {}, (), tmp_path)
    while not all(job.step() for job in jobs):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in err
    assert out.count("stopped at step") == 2 and "0 of 2 runs are finished" in out
    assert all(job.state().startswith("interrupted at step ") for job in jobs)
    assert all(any((job.path / "checkpoints").iterdir()) for job in jobs)

    monkeypatch.delenv("SLOW")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "2 of 2 runs are finished" in done.stdout
    for job in jobs:
        log = (tmp_path / f"logs/{job.name}.log").read_text()
        assert "Resuming at step" in log and RunDir.open(job.path).done["steps"] == 20
