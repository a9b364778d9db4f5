import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import tiny

from posjax import load_run
from posjax.cli import main

ROOT = pathlib.Path(__file__).parents[1]
COPY = str(ROOT / "configs/copy.py")
SWEEP = str(ROOT / "configs/extrapolation.py")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A tiny run made through the command line."""
    path = tmp_path_factory.mktemp("cli") / "run"
    with tiny.quick_compilation():
        assert main(["train", f"--config={COPY}:alibi", *tiny.words("--config.train.steps=5"), f"--workdir={path}"]) == 0
    return path


@pytest.fixture
def ends_in_one_line(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder: exit code 2, one line on standard error, nothing written."""
    def check(words, *says):
        folder = tmp_path / "here"
        folder.mkdir()
        monkeypatch.chdir(folder)
        assert main(words) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("posjax: ") and err.count("\n") == 1 and err.endswith(".\n"), err
        for text in says:
            assert text in err
        assert not list(folder.iterdir())
    return check


@pytest.mark.parametrize("words, says", [
    (["--config.train.stepz=5"], "Did you mean train.steps"),
    (["--config.train.steps=five"], "train.steps='five'"),
    (["--config.train.steps"], "--config.train.steps needs a value"),
    (["--config.train.steps=0"], "train.steps is 0; it must be at least 1"),
    (["--config.train.steps=3000000000"], "train.steps is 3000000000; it must stay below"),
    (["--config.train.learning_rate=-1"], "train.learning_rate is -1.0; it must be above 0"),
    (["--config.train.learning_rate=1e999"], "train.learning_rate is inf; it must be finite"),
    (["--config.train.beta2=1.0"], "train.beta2 is 1.0; it must be at least 0 and below 1"),
    (["--config.task=cpoy"], "Unknown task 'cpoy'. Did you mean copy"),
    (["--config.task.times=3"], "times is 3"),
    (["--config.positions.train=randomized"], "Did you mean randomised"),
    (["--config.positions.train=even", "--config.positions.train.max_position=8"], "has max_position 8, too small for 33 tokens"),
    (["--config.train=5"], "train is a section"),
    (["--config.train.lengths.max=-4"], "train.lengths.min is 1, above train.lengths.max -4"),
    (["--config.train.lengths.min=-4"], "train.lengths.min is -4"),
    (["--config.eval.lengths=-4,8"], "-4, 8"),
    (["--config.eval.lengths=40,80"], "none of the training lengths 1 to 16"),
    (["--config.model.num_heads=3"], "model.width 64 does not divide by model.num_heads 3"),
    (["--config.model.head_dim=7"], "head_dim must be even; it is 7"),
    (["--config.model.head_dim=7.5"], "model.head_dim"),
    (["--config.model.dtype=float63"], "Did you mean float"),
    (["--confg=x"], "Did you mean --config"),
    (["--stpes=3"], "Unknown argument '--stpes=3'"),
    (["extra"], "Unknown argument 'extra'"),
    (["--import=nope_at_all"], "Cannot import nope_at_all"),
    (["--import=nope.py"], "Cannot import nope.py: no such file"),
    (["--workdir=/dev/null/run"], "/dev/null"),
])
@pytest.mark.parametrize("command", ["train", "sweep"])
def test_a_mistake_in_a_config_ends_in_one_line(ends_in_one_line, command, words, says):
    ends_in_one_line([command, f"--config={COPY if command == 'train' else SWEEP}", *words], says)


@pytest.mark.parametrize("words, says", [
    (["--config.scheme=alibbi"], "Unknown scheme 'alibbi'. Did you mean alibi"),
    (["--config.scheme.name=alibbi"], "Unknown scheme 'alibbi'. Did you mean alibi"),
    (["--config.scheme.bose=3"], "Did you mean scheme.base"),
    (["--config.scheme.base=-3"], "rope's base is -3.0; it must be above 0"),
    (["--config.scheme.layout=halfsplit"], "half_split"),
    (["--config.scheme=learned", "--config.scheme.max_length=16"], "scheme.max_length is 16, but training reaches position 32"),
    (["--config.task=mqar", "--config.task.queries=1.5"], "queries of the task mqar is 1.5; it must be int | None"),
    (["--config.task=needle", "--config.task.depth=middle"], "task.depth='middle' cannot be read"),
])
def test_a_mistake_in_a_scheme_or_task_ends_in_one_line(ends_in_one_line, words, says):
    ends_in_one_line(["train", f"--config={COPY}", *words], says)


def test_a_sweep_refuses_what_one_of_its_runs_does_not_know(ends_in_one_line):
    ends_in_one_line(["sweep", f"--config={SWEEP}", "--config.scheme.base=500"], "Unknown config key 'scheme.base'")


@pytest.mark.parametrize("words, says", [
    ([], ["required: COMMAND"]),
    (["trian"], ["'trian'", "train"]),
    (["train"], ["--config=FILE is missing"]),
    (["sweep"], ["--config=FILE is missing"]),
    (["train", "--config=configs/cpoy.py"], ["Unknown config file 'configs/cpoy.py'"]),
    (["train", f"--config={ROOT / 'configs/cpoy.py'}"], ["Did you mean", "configs/copy.py"]),
    (["train", f"--config={COPY}:alibbi"], ["Did you mean alibi"]),
    (["train", f"--config={ROOT}"], ["Unknown config file"]),
    (["sweep", f"--config={COPY}"], ["defines no sweep()"]),
    (["sweep", f"--config={SWEEP}", "--jobs=0"], ["--jobs is 0; it must be at least 1"]),
    (["sweep", f"--config={SWEEP}", "--jobs=two"], ["--jobs", "'two'"]),
    (["sweep", f"--config={SWEEP}", "--dryrun"], ["Did you mean --dry_run"]),
    (["eval", "nowhere", "--lengths=4"], ["nowhere is not a run directory: there is no such directory"]),
    (["eval", "nowhere"], ["--lengths"]),
    (["report"], ["RUN"]),
    (["report", "nowhere"], ["nowhere does not exist"]),
    (["report", str(ROOT / "configs")], ["holds no run"]),
    (["list", "scheme"], ["'scheme'", "schemes"]),
    (["list"], ["Say what to list: schemes, temperatures"]),
    (["list", "configs"], ["nothing to list"]),
    (["list", "tasks", "--pages=docs"], ["--pages=docs goes with `posjax list schemes` alone"]),
    (["list", "schemes", "--pages=/dev/null/docs"], ["cannot be written to /dev/null/docs: Not a directory"]),
    (["list", "schemes", "--config.train.steps=3"], ["--config.train.steps is only for train and sweep"]),
    (["report", "nowhere", "--config.train.steps=3"], ["--config.train.steps is only for train and sweep"]),
    (["eval", "nowhere", "--lengths=4", "--config=x"], ["Unknown argument '--config=x'"]),
    (["report", "nowhere", "--positions.max_position=9"], ["--positions.max_position is only for eval"]),
    (["eval", "nowhere", "--lengths=4", "--positions.max_position"], ["--positions.max_position needs a value"]),
    (["eval", "nowhere", "--lengths=4", "--position=even"], ["Did you mean --positions"]),
])
def test_a_mistake_in_a_command_ends_in_one_line(ends_in_one_line, words, says):
    ends_in_one_line(words, *says)


@pytest.mark.parametrize("words, says", [
    (["--lengths="], "--lengths= cannot be read"),
    (["--lengths=4;8"], "--lengths=4;8 cannot be read"),
    (["--lengths=-4"], "Evaluation lengths are -4"),
    (["--lengths=0,4"], "Evaluation lengths are 0, 4"),
    (["--lengths=4", "--num_examples=0"], "num_examples is 0; it must be at least 1"),
    (["--lengths=4", "--num_examples=many"], "'many'"),
    (["--lengths=4", "--num_example=4"], "Did you mean --num_examples"),
    (["--lengths=4", "--positions=evne"], "Unknown position policy 'evne'. Did you mean even"),
    (["--lengths=4", "--positions=even", "--positions.max_positon=40"], "Did you mean positions.eval.max_position"),
    (["--lengths=4", "--positions=even", "--positions.max_position=8"], "max_position 8, too small for 9 tokens"),
    (["--lengths=4", "--positions=even", "--positions.max_position=far"], "'far' cannot be read"),
])
def test_a_mistake_in_an_evaluation_leaves_the_records_alone(ends_in_one_line, finished, words, says):
    before = (finished / "evals.jsonl").read_text()
    ends_in_one_line(["eval", str(finished), *words], says)
    assert (finished / "evals.jsonl").read_text() == before


def test_a_fault_in_the_users_own_file_names_file_and_line(ends_in_one_line, tmp_path):
    (tmp_path / "mine.py").write_text("import posjax\n\ndef get_config(:\n    pass\n")
    ends_in_one_line(["train", f"--config={tmp_path / 'mine.py'}"], "mine.py line 3: SyntaxError")


def test_a_directory_of_something_else_is_left_alone(ends_in_one_line, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    ends_in_one_line(["train", f"--config={COPY}", f"--workdir={tmp_path / 'mine'}"], "not a run directory", "notes.txt")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_the_record_of_a_run_has_the_command_that_makes_it_again(finished):
    command = json.loads((finished / "environment.json").read_text())["command"]
    assert command.startswith(f"posjax train --config={COPY}:alibi --config.num_seeds=2 ")
    assert "'--config.eval.lengths=(1, 4, 6, 9)'" in command and command.endswith(f"--workdir={finished}")


def test_a_runs_own_config_is_a_config(finished, capsys):
    assert main(["train", f"--config={finished / 'config.json'}", f"--workdir={finished}"]) == 0
    assert "is finished: 5 steps. Nothing to do." in capsys.readouterr().err


@pytest.mark.parametrize("what, name", [("schemes", "rope"), ("tasks", "mqar"), ("policies", "randomised"),
                                        ("configs", "configs/copy.py")])
def test_listing(capsys, monkeypatch, what, name):
    monkeypatch.chdir(ROOT)
    assert main(["list", what]) == 0
    assert name in capsys.readouterr().out
    assert main(["list", what, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert name in [row["name"] for row in rows]
    assert len({tuple(row) for row in rows}) == 1


def test_listing_shows_what_an_import_adds(capsys, tmp_path):
    (tmp_path / "mine.py").write_text("from posjax import *\n@register_scheme('from_a_file')\nclass Mine(Scheme):\n    pass\n")
    code = [sys.executable, "-m", "posjax.cli", "list", "schemes", f"--import={tmp_path / 'mine.py'}"]
    assert "from_a_file" in subprocess.run(code, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_report_writes_page_table_and_figure(finished, tmp_path, capsys):
    out, figure = tmp_path / "r.html", tmp_path / "f.png"
    assert main(["report", str(finished), f"--out={out}", f"--figure={figure}"]) == 0
    shown = capsys.readouterr().out
    assert "alibi" in shown and f"Report: {out}" in shown and f"Figure: {figure}" in shown
    assert "<html" in out.read_text() and figure.read_bytes()[:4] == b"\x89PNG"
    assert main(["report", str(finished), f"--out={out}", "--markdown"]) == 0
    assert "|---" in capsys.readouterr().out.replace(" ", "")


def test_a_figure_that_cannot_be_written_is_told(finished, tmp_path, capsys):
    assert main(["report", str(finished), f"--out={tmp_path / 'r.html'}", f"--figure={tmp_path / 'nowhere/x.png'}"]) == 2
    err = capsys.readouterr().err
    assert "nowhere/x.png" in err and err.count("\n") == 1


def test_eval_adds_records_at_more_lengths(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    before = (run / "evals.jsonl").read_text()
    assert main(["eval", str(run), "--lengths=12,3", "--num_examples=7"]) == 0
    after = (run / "evals.jsonl").read_text()
    new = [json.loads(line) for line in after.removeprefix(before).splitlines()]
    assert [(row["length"], row["seed"], row["step"], row["num_examples"]) for row in new] == [
        (3, 0, 5, 7), (3, 1, 5, 7), (12, 0, 5, 7), (12, 1, 5, 7)]
    assert "alibi" in capsys.readouterr().out


def test_eval_under_another_position_policy_is_kept_apart(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    before = (run / "evals.jsonl").read_text()
    # Too few positions for the config's own evaluation lengths, and enough for the one asked for.
    assert main(["eval", str(run), "--lengths=4", "--positions=even", "--positions.max_position=11"]) == 0
    new = [json.loads(line) for line in (run / "evals.jsonl").read_text().removeprefix(before).splitlines()]
    assert {row["positions"] for row in new} == {"even (max_position=11)"} and len(new) == 2
    assert {json.loads(line)["positions"] for line in before.splitlines()} == {"sequential"}
    out = capsys.readouterr().out
    assert "alibi [positions even (max_position=11)]" in out and "sequential in training, even (max_position=11)" in out
    loaded = load_run(run)
    assert loaded.summary().lengths == (1, 4, 6, 9)
    other = loaded.summary(positions={"name": "even", "max_position": 11})
    assert other.lengths == (4,) and other.unfinished is None
    assert main(["report", str(run), f"--out={tmp_path / 'report.html'}"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "alibi [positions even (max_position=11)]" in page and page.count("Resolved config") == 1


def test_eval_of_a_run_without_checkpoint(finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints", "DONE"))
    assert main(["eval", str(run), "--lengths=3"]) == 2
    assert "There is no readable checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["eval", "--help"]])
def test_help(capsys, words):
    with pytest.raises(SystemExit) as done:
        main(words)
    assert done.value.code == 0 and "--config" in capsys.readouterr().out or words[0] == "eval"


def test_a_process_ends_as_main_does():
    """No traceback, exit code 2, nothing heavy imported for it; and a reader that leaves early is no error."""
    python = [sys.executable, "-W", "error", "-X", "importtime", "-m", "posjax.cli"]
    wrong = subprocess.run([*python, "train", "--config=x.py", "--stpes=3"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 2 and "Unknown argument '--stpes=3'" in wrong.stderr and "Traceback" not in wrong.stderr
    assert " jax" not in wrong.stderr and " numpy" not in wrong.stderr
    read, write = os.pipe()
    os.close(read)
    listing = [*python[:3], "-m", "posjax.cli", "list", "schemes"]
    gone = subprocess.run(listing, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True)
    assert gone.stderr == ""
