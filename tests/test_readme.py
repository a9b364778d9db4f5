"""What the README shows is true: its table of schemes, and a scheme pasted from it."""
import importlib.metadata
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from posjax import cli, config, conformance, listing
from posjax.schemes.registry import SCHEMES

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_table_of_schemes_is_what_the_classes_say():
    assert listing.markdown(listing.table("schemes")) in README, "Out of date: run `python scripts/update_docs.py`."


@pytest.fixture
def pasted(tmp_path):
    """The README's scheme in a file of its own, forgotten again afterwards."""
    source = re.search(r"```python\n(# my_scheme\.py\n.*?)```", README, re.DOTALL)[1]
    assert len(source.splitlines()) <= 40
    (tmp_path / "my_scheme.py").write_text(source)
    SCHEMES.names()
    known = dict(SCHEMES._classes)
    yield tmp_path / "my_scheme.py"
    SCHEMES._classes.clear()
    SCHEMES._classes.update(known)


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_a_pasted_scheme_passes_the_conformance_suite(pasted, check):
    config.import_modules([str(pasted)])
    with jax.numpy_rank_promotion("allow"):  # as outside of our tests
        check(conformance.subject("log_distance"))


def test_a_pasted_scheme_trains_through_import(pasted, tmp_path, capsys):
    arguments = ["train", f"--config={ROOT / 'configs' / 'copy.py'}:log_distance", f"--import={pasted}",
                 f"--workdir={tmp_path / 'run'}", "--config.scheme.start=2.0", "--config.train.steps=2",
                 "--config.model.width=8", "--config.model.depth=1", "--config.num_seeds=1", "--config.eval.every=0",
                 "--config.eval.lengths=1", "--config.eval.num_examples=2", "--config.train.lengths.max=2"]
    assert cli.main(arguments) == 0
    assert cli.main(["report", str(tmp_path / "run"), f"--out={tmp_path / 'report.html'}"]) == 0
    assert "log_distance" in capsys.readouterr().out


def test_an_installed_package_announces_its_scheme(pasted, tmp_path):
    """As pip would install it: a module, and metadata with an entry point."""
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[posjax.schemes]\nmine = my_scheme\n")
    code = ("import sys; sys.path[:0] = sys.argv[1:]; import posjax; "
            "print(posjax.make_scheme('log_distance', num_heads=4, head_dim=8).slopes.shape)")
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path), str(ROOT)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "(4,)"
    assert "mine" not in {entry.name for entry in importlib.metadata.entry_points(group="posjax.schemes")}
