import pytest
from made_up_runs import config, curves, write_run

from posjax.errors import UserError
from posjax.report.records import RunRecord, find_runs


def test_runs_are_found_in_a_sweep_once_and_named_by_their_place(tmp_path):
    for name in ("sweep/b", "sweep/deep/a"):
        write_run(tmp_path / name, config("rope"), curves({16: 1.0}))
    (tmp_path / "sweep/b/checkpoints").mkdir()
    (tmp_path / "sweep/b/checkpoints/config.json").write_text("{}")
    runs = find_runs([tmp_path / "sweep", tmp_path / "sweep/b"])
    assert [run.name for run in runs] == ["b", "deep/a"]
    assert runs[0].done and runs[0].environment["jax"] == "0.10.2"


def test_a_torn_last_line_is_left_out_and_a_broken_one_before_it_is_not(tmp_path):
    run = write_run(tmp_path / "run", config("rope"), curves({16: 1.0, 32: 0.5}))
    with open(run / "evals.jsonl", "ab") as file:
        file.write(b'{"step": 1500, "na\xc3')
    assert len(RunRecord.load(run).evals) == 2
    with open(run / "evals.jsonl", "ab") as file:
        file.write(b'\n{"step": 1}\n')
    with pytest.raises(UserError, match="line 3"):
        RunRecord.load(run)


def test_what_is_not_a_run_is_a_clear_error(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="holds no run"):
        find_runs([tmp_path])
    with pytest.raises(UserError, match="No run was given"):
        find_runs([])
    with pytest.raises(UserError, match="no config.json"):
        RunRecord.load(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(UserError, match="not a JSON object"):
        RunRecord.load(tmp_path)


def test_a_run_that_has_only_started_is_a_run(tmp_path):
    run = write_run(tmp_path / "run", config("rope"), [], done=False)
    for name in ("environment.json", "metrics.jsonl", "evals.jsonl"):
        (run / name).unlink()
    record = RunRecord.load(run)
    assert (record.environment, record.metrics, record.evals, record.done) == ({}, [], [], False)
