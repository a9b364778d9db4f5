from made_up_runs import config, curves

from posjax.eval.statistics import summarize
from posjax.report.table import markdown_table, table_lengths, text_table

STATUS = "no row past max_length 34"


def summaries():
    def of(scheme, *seeds, **keywords):
        return summarize(curves(*seeds), config(scheme), **keywords)
    return [of("alibi", {8: 1.0, 16: 1.0, 32: 0.4}, {8: 1.0, 16: 1.0, 32: 0.5}, {8: 1.0, 16: 1.0, 32: 0.6}),
            of("learned", {8: 1.0, 16: 1.0, 32: STATUS}), of("nope", {8: 0.3, 16: 0.1, 32: 0.0}),
            of("rope", {8: 1.0, 16: 1.0, 32: 1.0}), of("t5", {8: 1.0}, finished=False)]


def test_text_table():
    lines = text_table(summaries()).splitlines()
    assert lines[1].split() == ["scheme", "fit", "len@0.9", "8", "16", "32", "(2x)"]
    rows = {line.split()[0]: " ".join(line.split()) for line in lines[3:8]}
    assert rows == {"alibi": "alibi 3/3 16 1.00 ±0.00 1.00 ±0.00 0.50 ±0.25", "learned": "learned 1/1 16 1.00 1.00 no row",
                    "nope": "nope 0/1 did not fit 0.30 0.10 -", "rope": "rope 1/1 >=32 1.00 1.00 1.00", "t5": "t5 unfinished"}
    notes = " ".join(" ".join(lines[8:]).split())
    assert "95 % Student t interval over seeds" in notes
    assert f"learned: {STATUS} (length 32)." in notes and "nope did not fit" in notes and "t5 is unfinished" in notes


def test_text_table_fits_the_terminal():
    curve = {n: 1.0 for n in range(1, 129)}
    wide = [summarize(curves(curve, curve), config("sinusoidal"))]
    for width in (80, 110):
        assert max(map(len, text_table(wide, width=width).splitlines())) <= width


def test_the_lengths_shown_are_multiples_of_the_trained_one():
    curve = {n: 1.0 for n in range(1, 129)}
    assert table_lengths([summarize(curves(curve), config("rope"))], 5) == [16, 24, 32, 64, 128]


def test_markdown_table():
    lines = markdown_table(summaries()).splitlines()
    assert lines[0] == "| scheme | fit | len@0.9 | 8 | 16 | 32 (2x) |"
    assert lines[1] == "| --- | ---: | ---: | ---: | ---: | ---: |"
    assert lines[2] == "| alibi | 3/3 | 16 | 1.00 ±0.00 | 1.00 ±0.00 | 0.50 ±0.25 |"


def test_the_note_says_what_was_averaged():
    unfit = text_table([summarize(curves({16: 0.1, 32: 0.0}, {16: 0.2, 32: 0.0}), config("nope"))], width=999)
    assert "95 % Student t interval" in unfit and "mean over all its seeds" in unfit
    single = text_table([summarize(curves({16: 1.0, 32: 0.0}), config("rope"))], width=999)
    assert "of one seed, so without an interval" in single and "did not fit" not in single
