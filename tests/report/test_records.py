import json
import re

import pytest
from made_up_runs import config, curves, write_run

from posjax.errors import UserError
from posjax.report.html import write_report
from posjax.report.records import RunRecord, find_runs
from posjax.report.table import text_table
from posjax.report.words import sections


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


def test_a_run_that_diverged_is_shown_as_failed(tmp_path):
    run = write_run(tmp_path / "run", config("rope"), curves({16: 1.0}, step=500), done=False)
    record = {"step": 612, "seeds": [1], "reason": "The loss is not finite at step 612 (seed 1). Last finite: 0.1."}
    (run / "FAILED").write_text(json.dumps(record))
    ((_, summaries),) = sections(find_runs([run]))
    table = text_table(summaries, width=999)
    assert ["rope", "failed"] in [line.split() for line in table.splitlines()]
    assert "rope has failed: The loss is not finite at step 612 (seed 1)." in table
    assert "rope has failed: The loss is not finite at step 612" in write_report([run], tmp_path / "page.html").read_text()
    (run / "DONE").write_text("{}")
    assert RunRecord.load(run).failed is None
    (run / "DONE").unlink()
    (run / "FAILED").write_text('{"step": 612}')
    with pytest.raises(UserError, match="FAILED has no reason, seeds"):
        RunRecord.load(run)


def damage(run, name, content):
    (run / name).write_text(content)
    return run


@pytest.mark.parametrize(("name", "content", "says"), [
    ("evals.jsonl", '{"step": 1500, "seed": 0, "length": 16}\n', "are damaged: KeyError: 'exact_match'"),
    ("evals.jsonl", "[]\n", "line 1"),
    ("config.json", "{", "not valid JSON"),
    ("config.json", "{}", "no train.steps"),
    ("metrics.jsonl", '{"step": 50, "loss": null}\n', "damaged: TypeError"),
])
def test_a_damaged_run_in_a_folder_is_named_and_left_out(tmp_path, capsys, name, content, says):
    write_run(tmp_path / "good", config("alibi"), curves({16: 1.0}))
    bad = damage(write_run(tmp_path / "bad", config("rope"), curves({16: 1.0})), name, content)
    assert [run.name for run in find_runs([tmp_path])] == ["good"]
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("posjax: Left out: ") and str(bad) in told and re.search(says, told)
    with pytest.raises(UserError, match=says):  # asked for by name
        find_runs([tmp_path, bad])
    (tmp_path / "good/config.json").unlink()
    with pytest.raises(UserError, match=says):  # and with none left
        find_runs([tmp_path])


def test_a_run_that_has_only_started_is_a_run(tmp_path):
    run = write_run(tmp_path / "run", config("rope"), [], done=False)
    for name in ("environment.json", "metrics.jsonl", "evals.jsonl"):
        (run / name).unlink()
    record = RunRecord.load(run)
    assert (record.environment, record.metrics, record.evals, record.done) == ({}, [], [], False)
