import html.parser
import re

import pytest
from made_up_runs import config, curves, row, write_run

from posjax.errors import UserError
from posjax.report.html import write_report

STATUS = "no row past max_length 34"
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(html.parser.HTMLParser):
    """Checks that tags close in order; collects attributes and visible text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.visible, self.tags = [], [], [], set()
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += [(tag, *pair) for pair in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += [(tag, *pair) for pair in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.visible.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.visible).split())


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "alibi", config("alibi"), curves(*[{16: 1.0, 24: 0.95, 32: v} for v in (0.4, 0.5, 0.6)]),
              command="posjax train --config=configs/copy.py:alibi --config.train.steps=1500")
    write_run(root / "learned", config("learned", max_length=34), curves({16: 1.0, 24: STATUS, 32: STATUS}))
    write_run(root / "nope", config("nope"), curves({16: 0.3, 24: 0.0, 32: 0.0}))
    write_run(root / "rope", config("rope"), curves({16: 1.0, 24: 1.0}, step=500), done=False, metrics=[])
    write_run(root / "evil", config("--><script>alert('x')</script>&"), curves({16: 1.0, 24: "<b>gone</b>", 32: 0.1}),
              command="echo '<img src=http://example.org/x>'")
    write_run(root / "needle", config("rope", task="needle"),
              [row(s, n, v, condition={"depth": d}, positions=[v]) for s in (0, 1) for n, d, v in
               [(16, 0.0, 1.0), (16, 1.0, 1.0), (32, 0.0, 0.75), (32, 1.0, 0.25)]])
    out = write_report([root], root / "out" / "report.html")
    assert [path.name for path in out.parent.iterdir()] == ["report.html"]  # nothing half-written is left
    return Page(out.read_text(encoding="utf-8"))


def test_it_needs_nothing_from_elsewhere(page):
    assert not page.tags & {"link", "script", "img", "iframe", "object"}
    for tag, name, value in page.attributes:
        assert not name.startswith("xmlns") and "http" not in (value or "")
        if name in ("src", "href"):
            assert value.startswith("#"), (tag, name, value)
        assert "url(" not in (value or "") or "url(#" in value


def test_references_inside_the_page_resolve(page):
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    used = {value[1:] for _, name, value in page.attributes if name == "href"}
    used |= {match for _, _, value in page.attributes for match in re.findall(r"url\(#([^)]*)\)", value or "")}
    assert used <= set(ids)


def test_text_from_files_is_escaped(page):
    assert "script" not in page.tags and "b" in page.tags
    assert "--><script>alert('x')</script>&" in page.text and "<b>gone</b>" in page.text
    assert "echo '<img src=http://example.org/x>'" in page.text


def test_it_says_what_was_found(page):
    assert "alibi to length 24, 1.5×" in page.text
    assert "0.50 0.25 to 0.75 min 0.40 max 0.60" in page.text
    assert "nope did not fit: 0 of 1 seeds" in page.text
    assert f"learned: {STATUS} (length 24 and longer)." in page.text
    assert "rope is unfinished: last evaluation at step 500 of 1500." in page.text
    assert "Depth × length" in page.text and "depth 1.0 1.00 0.25" in page.text
    assert "Exact match is the gate" in page.text and "teacher-forced" in page.text and "Student t" in page.text


def test_it_says_how_to_reproduce_it(page):
    assert "posjax train --config=configs/copy.py:alibi --config.train.steps=1500" in page.text
    assert '"batch_size": 64' in page.text and '"jax": "0.10.2"' in page.text


def test_the_same_runs_give_the_same_bytes(tmp_path):
    write_run(tmp_path / "run", config("rope"), curves({16: 1.0, 32: 0.5}))
    first = write_report([tmp_path / "run"], tmp_path / "a.html").read_bytes()
    assert write_report([tmp_path / "run"], tmp_path / "b.html").read_bytes() == first


def test_places_that_cannot_be_written(tmp_path):
    write_run(tmp_path / "run", config("rope"), [], done=False)
    with pytest.raises(UserError, match="is a folder"):
        write_report([tmp_path / "run"], tmp_path)
    with pytest.raises(UserError, match="cannot be written"):
        write_report([tmp_path / "run"], tmp_path / "run" / "config.json" / "report.html")
