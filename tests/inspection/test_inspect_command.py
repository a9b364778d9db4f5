"""The command: its files, and one line for a mistake."""
import csv

import numpy as np
import pytest
import tiny
from flax import nnx

import posjax
from posjax.cli import main
from posjax.inspection.draw import draw
from posjax.schemes.registry import make_scheme

SIZES = ["--num_heads=2", "--head_dim=8", "--train_length=8", "--length=16"]


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_the_files_hold_the_numbers(tmp_path, capsys):
    out = tmp_path / "fire.png"
    assert main(["inspect", "fire", *SIZES, "--threshold=4", "--head=1", "--seed=3", f"--out={out}"]) == 0
    assert capsys.readouterr().out == f"Figure: {out}\nNumbers: {tmp_path / 'fire.csv'}\n"
    assert out.read_bytes().startswith(b"\x89PNG") and out.stat().st_size > 10_000
    scheme = make_scheme("fire", num_heads=2, head_dim=8, threshold=4.0, rngs=nnx.Rngs(3))
    expected = [(panel.name, s.label, x, y) for panel in posjax.inspect(scheme, train_length=8, length=16, head=1).panels
                for s in panel.series for x, y in zip(s.x, s.y)]
    rows = read(tmp_path / "fire.csv")
    assert [(row["panel"], row["series"], int(row["x"])) for row in rows] == [row[:3] for row in expected]
    np.testing.assert_allclose([float(row["y"]) for row in rows], [row[3] for row in expected], rtol=1e-8)


def test_the_name_of_the_files_is_the_schemes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "scaled_rope", *SIZES, "--rope_type=longrope", "--factor=4", "--short_factor=(1,1,1,1)",
                 "--long_factor=(1,2,3,4)", "--original_max_position_embeddings=8"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inspect_scaled_rope.csv", "inspect_scaled_rope.png"]
    labels = {row["series"] for row in read("inspect_scaled_rope.csv") if row["panel"] == "wavelengths"}
    assert labels == {"before the extension", "at length 8, amplitude 1.29099", "at length 16, amplitude 1.29099"}


def drawn(name, title="a\nb", **hyper):
    scheme = make_scheme(name, num_heads=2, head_dim=8, rngs=nnx.Rngs(0), **hyper)
    return draw(posjax.inspect(scheme, train_length=64), title)


def test_the_figure_marks_the_training_length_and_says_what_is_learned():
    figure = drawn("rope", title="rope\nlearned parameters at initialisation (seed 0)")
    assert "learned parameters at initialisation (seed 0)" in figure.get_suptitle()
    score, waves = figure.axes[:2]
    assert 64 in [line.get_xdata()[0] for line in score.lines] and 64 in [line.get_ydata()[0] for line in waves.lines]
    assert [t.get_text().strip() for ax in (score, waves) for t in ax.texts] == ["train_length 64"] * 2


def test_the_map_is_blank_above_the_diagonal():
    [image] = drawn("nope").axes[0].images
    assert (np.ma.getmaskarray(image.get_array()) == np.triu(np.ones((64, 64), bool), 1)).all()


def test_a_mask_does_not_flatten_the_colours():
    """Logits of -1e9 would leave one colour for all others."""
    figure = drawn("hard_alibi")
    assert figure.axes[1].images[0].get_clim() == pytest.approx((8**0.5 - 40, 8**0.5))
    assert figure.axes[0].get_ylim()[0] == -40


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = tiny.config("kerple", **{"train.steps": 1, "train.chunk_steps": 1, "eval.every": 0, "eval.lengths": (1,),
                                      "eval.num_examples": 1})
    with tiny.quick_compilation():
        return posjax.run(config, tmp_path_factory.mktemp("inspect") / "run")


def test_a_run_is_drawn_as_it_was_trained(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", str(run.path), "--seed=1", "--layer=0"]) == 0
    rows = [row for row in read("inspect_run.csv") if (row["panel"], row["series"]) == ("bias", "head 1")]
    scheme = run.model(1).layers[0][0]
    assert len(rows) > 20 and int(rows[-1]["x"]) == 8 * 9 - 1  # copying 4 symbols takes 9 tokens
    np.testing.assert_allclose([float(row["y"]) for row in rows],
                               [-scheme.r1[1] * np.log1p(scheme.r2[1] * int(row["x"])) for row in rows], atol=1e-6)


@pytest.mark.parametrize("words, says", [
    (["ropee"], "Unknown scheme 'ropee'. Did you mean rope"),
    (["rope", "--bas=3"], "Unknown hyper-parameter of rope, or option, 'bas'. Did you mean base"),
    (["rope", "--hed=3"], "Did you mean head"),
    (["rope", "--base=many"], "scheme.base='many' cannot be read; a value like 10000.0"),
    (["rope", "--base=-3"], "rope's base is -3.0; it must be above 0"),
    (["rope", "--base"], "--base needs a value: --base=VALUE"),
    (["rope", "--base", "3"], "--base needs a value: --base=VALUE"),
    (["rope", "more"], "Unknown argument 'more'"),
    (["rope", "--config.scheme.base=3"], "--config.scheme.base is only for train and sweep"),
    (["rope", "--head=8"], "head is 8; the scheme has heads 0 to 7"),
    (["rope", "--head=first"], "'first'"),
    (["rope", "--num_heads=0"], "num_heads is 0; it must be at least 1"),
    (["rope", "--layer=0"], "only a run has layers"),
    (["rope", "--seed=-1"], "seed is -1"),
    (["learned", "--length=600"], "positions 0 to 511 only"),
    (["scaled_rope", "--factor=2"], "rope_type default does not use the key 'factor'"),
    (["rope", "--out=x.jpg"], "must end in .png"),
    (["nope", "--out=nowhere/x.png"], "cannot be written to nowhere/x.png: No such file"),
    ([], "required: SCHEME"),
    (["."], "is not a run directory"),
    (["RUN", "--slope=3"], "slope cannot be set"),
    (["RUN", "--head_dim=3"], "head_dim cannot be set"),
    (["RUN", "--layer=1"], "layer is 1; the run has layers 0 to 0"),
    (["RUN", "--seed=9"], "no seed 9; it has 0, 1"),
])
def test_a_mistake_ends_in_one_line(run, tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", *(str(run.path) if word == "RUN" else word for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err, err
    assert not list(tmp_path.iterdir())
