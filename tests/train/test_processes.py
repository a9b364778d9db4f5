"""Two real processes train one run together, and leave the records of one."""
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
import tiny

from posjax import cli
from posjax.errors import UserError
from posjax.runs import load_run
from posjax.train import processes

ROOT = pathlib.Path(__file__).parents[2]


def start(workdir, *more, words=()):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "posjax.cli", "train", f"--config={ROOT / 'configs/copy.py'}", f"--workdir={workdir}",
               *tiny.words(*words), *more]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process):
    told, _ = process.communicate(timeout=300)
    return process.returncode, told


def together(workdir, words):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [start(workdir, f"--coordinator=127.0.0.1:{port}", "--num_processes=2", f"--process_id={index}", words=words)
               for index in range(2)]
    return [ended(process) for process in started]


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["replica", "data"])
def test_two_processes_leave_the_records_of_one(tmp_path, axis):
    words = ["--config.mesh.data=2", "--config.num_seeds=1"] if axis == "data" else []
    for code, told in (ended(start(tmp_path / "one", words=words)), *(found := together(tmp_path / "two", words))):
        assert code == 0, told
    assert "20/20" in found[0][1] and "posjax" not in found[1][1]  # one of them tells
    one, two = load_run(tmp_path / "one"), load_run(tmp_path / "two")
    assert two.done["steps"] == 20 and [row["step"] for row in two.metrics()] == [row["step"] for row in one.metrics()]
    for left, right in zip(one.metrics(), two.metrics(), strict=True):
        np.testing.assert_allclose(left["loss"], right["loss"], rtol=1e-4)
    assert [(row["seed"], row["step"], row["length"]) for row in one.evals()] == [
        (row["seed"], row["step"], row["length"]) for row in two.evals()]
    assert [path.parent.name for path in sorted(two.path.glob("checkpoints/*/seal.json"))] == ["10", "20"]
    if axis == "replica":
        return
    # Two processes go on from the checkpoint of one.
    (one.path / "DONE").unlink()
    (one.path / "evals.jsonl").unlink()
    assert [code for code, _ in together(one.path, words)] == [0, 0]
    assert len(one.evals()) == len([row for row in two.evals() if row["step"] == 20])


@pytest.mark.parametrize("words, says", [
    (["--coordinator=localhost:1"], "--num_processes, --process_id is missing"),
    (["--coordinator=localhost:1", "--num_processes=2", "--process_id=2"], "--process_id is 2 and --num_processes is 2"),
])
def test_half_a_meeting_is_refused(words, says, tmp_path, capsys):
    assert cli.main(["train", f"--config={ROOT / 'configs/copy.py'}", f"--workdir={tmp_path / 'run'}", *words]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_the_tasks_of_a_cluster_are_counted(monkeypatch):
    assert processes.num_tasks() == 1
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert processes.num_tasks() == 3
    monkeypatch.setenv("SLURM_NTASKS", "4")  # of a job, within which no srun started this process
    assert processes.num_tasks() == 3
    for name, value in {"SLURM_STEP_NODELIST": "a", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    assert processes.num_tasks() == 2


def test_who_is_not_first_writes_nothing(tmp_path, monkeypatch):
    with processes.open_run(tmp_path / "run", {"seed": 0}) as run:
        run.append_metrics([{"step": 1}])
        monkeypatch.setattr(processes, "is_first", lambda: False)
        with processes.open_run(tmp_path / "run", {"seed": 0}) as other:
            other.append_metrics([{"step": 2}])
            other.finish({})
            assert other.metrics() == [{"step": 1}] and other.done is None
    assert processes.Silent().scalars({}, 1) is None


def test_a_run_that_the_first_cannot_open_is_refused_by_all(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="is a file"), processes.open_run(tmp_path / "run", {}):
        pass
