"""Lists and pages say what is true of the classes, and can be read."""
import json
import pathlib
import re

import jax
import pytest

from posjax import cli, listing, pages
from posjax import config as configs
from posjax.experiment import Experiment
from posjax.schemes.registry import SCHEMES

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT_OF_DATE = "docs/schemes is out of date: run `python scripts/update_docs.py`."
MINE = '''
import posjax


@posjax.register_scheme("mine")
class Mine(posjax.Scheme):
    """Mine.

    As in arXiv 2104.09864:
    no section, since what follows is not indented.

    Args:
      power, speed: of both, over
        two lines.
      other (int): with a type.

    After all.
    """
    formula = "a | b"

    def __init__(self, *, power, speed=1.0, other=2, **dims):
        super().__init__(**dims)
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A file with a scheme that says little of itself and cannot be made by default; forgotten afterwards."""
    SCHEMES.names()
    monkeypatch.setattr(SCHEMES, "_classes", dict(SCHEMES._classes))
    (tmp_path / "mine.py").write_text(MINE)
    configs.import_modules([tmp_path / "mine.py"])
    return tmp_path / "mine.py"


@pytest.fixture(scope="module")
def made():
    return pages.pages()


def test_parameters_are_what_the_default_decoder_has_more_than_without_a_scheme():
    def count(name):
        return Experiment.build(configs.default_config(name)).num_params
    without = count("nope")
    assert {row["name"]: row["parameters"] for row in listing.rows("schemes")} == {
        name: count(name) - without for name in SCHEMES.names()}


@pytest.mark.parametrize("width", [120, 160])
def test_a_table_of_schemes_fits_the_terminal_and_loses_no_word(width):
    found = listing.table("schemes")
    shown = listing.text(found, width)
    assert max(map(len, shown.split("\n"))) <= width
    words = set(shown.split())
    assert all(set(row["formula"].split() + row["cost"].split()) <= words for row in found)
    assert "Su et al. 2021" in re.sub(r"\s+", " ", shown) and "arXiv" not in shown


def test_a_table_that_fits_is_not_wrapped():
    assert listing.text([{"name": "a", "what": "two words"}], 15) == "name  what\na     two words"


def test_hyper_parameters_are_in_the_json(capsys, mine):
    assert cli.main(["list", "schemes", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["rope"]["hyper"] == {"base": 10000.0, "fraction": 1.0, "layout": "half_split"}
    assert rows["learned"]["max_length"] == 512 and rows["rope"]["max_length"] is None
    assert rows["mine"]["hyper"]["power"] == "(required)" and rows["mine"]["parameters"] is None


@pytest.mark.parametrize("name", SCHEMES.names())
def test_a_scheme_says_all_that_its_page_has(name):
    cls = SCHEMES.get(name)
    parts = pages.sections(cls.__doc__)
    assert cls.formula and cls.reference and cls.cost and parts[""]
    assert all(parts.get(title) for title in pages.SECTIONS), f"{name}'s docstring needs the sections {pages.SECTIONS}."
    assert pages.arguments(parts.get("Args", "")).keys() == SCHEMES.hyper(name).keys()


def test_the_pages_in_docs_are_what_the_classes_say(made):
    found = {path.name: path.read_text() for path in (ROOT / "docs" / "schemes").glob("*")}
    assert found.keys() == made.keys(), OUT_OF_DATE
    assert found == made, OUT_OF_DATE


@pytest.mark.parametrize("name", SCHEMES.names())
def test_the_example_of_a_page_runs(made, name):
    example = re.search(r"```python\n(.*?)```", made[f"{name}.md"], re.DOTALL)[1]

    def run():
        names = {}
        exec(example, names)
        return names["out"]
    with jax.numpy_rank_promotion("allow"):  # as outside of our tests
        assert jax.eval_shape(run).shape == (2, 32, 4, 16)  # traced alone, since compiling it would take seconds


def test_where_a_scheme_acts(made):
    assert "| acts on | nothing |" in made["nope.md"]
    assert "| acts on | token embeddings |" in made["learned.md"]
    assert "| acts on | queries and keys, by rotation |" in made["p_rope.md"]
    assert "| acts on | the logits, by a bias |" in made["t5.md"]
    assert "| parameters | 128 (shared by the layers) |" in made["t5.md"]


def test_the_page_of_a_scheme_that_says_little(mine, tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    assert cli.main(["list", "schemes", f"--pages={folder}", f"--import={mine}"]) == 0
    assert capsys.readouterr().out == f"{len(list(folder.iterdir()))} pages in {folder}\n"
    page = (folder / "mine.md").read_text()
    assert "[arXiv 2104.09864](https://arxiv.org/abs/2104.09864):\nno section" in page and "After all." in page
    assert "| `power` | `(required)` | of both, over two lines. |\n| `speed` | `1.0` | of both, over two lines. |" in page
    assert "| `other` | `2` | with a type. |" in page
    assert "## Training" not in page and "make_scheme" not in page and "| parameters | - |" in page
    assert f"posjax train --config=configs/copy.py:mine --import={mine}" in page
    assert f"--import={mine}" not in (folder / "rope.md").read_text()
    assert "| [mine](mine.md) | a \\| b | - |" in (folder / "README.md").read_text()
