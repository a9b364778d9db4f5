import subprocess
import sys

from made_up_runs import config, curves

from posjax.eval.statistics import summarize
from posjax.report import figure
from posjax.report.style import PALETTE, styles

PNG = b"\x89PNG\r\n\x1a\n"


def summary(scheme, *seeds, label=None, finished=True):
    return summarize(curves(*seeds), config(scheme), label=label, finished=finished)


FIT, UNFIT = {8: 1.0, 16: 1.0, 32: 0.3}, {8: 0.4, 16: 0.1, 32: 0.0}


def texts(drawn):
    entries = [t.get_text() for box in drawn.legends for t in box.get_texts()]
    return entries + [t.get_text() for ax in drawn.axes for t in ax.texts]


def test_figures_are_png():
    both = [summary("alibi", FIT, FIT), summary("nope", UNFIT)]
    for data in (figure.extrapolation_figure(both), figure.position_figure(both), figure.run_figure(both[0])):
        assert data.startswith(PNG) and len(data) > 5000


def test_what_did_not_fit_and_what_ends_is_said():
    learned = summary("learned", {8: 1.0, 16: 1.0, 32: "no row past max_length 34"})
    shown = texts(figure.draw_extrapolation([learned, summary("nope", UNFIT), summary("rope", FIT, FIT, UNFIT)]))
    assert {"nope: did not fit (0/1 seeds)", "learned: no row past max_length 34", "rope (2/3 seeds fit)"} <= set(shown)
    assert "95 % interval over seeds (Student t)" in shown


def test_nothing_is_drawn_beyond_training_for_what_did_not_fit():
    drawn = figure.draw_extrapolation([summary("nope", UNFIT)])
    curves = [line.get_xdata() for line in drawn.axes[0].lines if len(line.get_xdata()) > 2 or list(line.get_xdata()) == [8, 16]]
    assert [list(x) for x in curves] == [[8, 16]]


def test_token_accuracy_is_labelled_teacher_forced():
    assert "teacher-forced" in figure.draw_extrapolation([summary("rope", FIT)]).axes[1].get_ylabel()


def test_unfinished_runs_are_drawn_alone_but_not_in_a_comparison():
    part = summary("rope", FIT, finished=False)
    assert not texts(figure.draw_extrapolation([part]))[1:]
    assert figure.run_figure(part).startswith(PNG)
    assert figure.run_figure(summary("rope")).startswith(PNG)


def test_names_are_drawn_as_they_are():
    odd = [summary("_hidden", FIT), summary("$\\frac$", FIT), summary("位置", FIT)]
    assert figure.extrapolation_figure(odd).startswith(PNG)
    assert {" _hidden", "$\\frac$", "位置"} <= set(texts(figure.draw_extrapolation(odd)))


def test_a_scheme_has_its_colour_whatever_it_is_shown_with():
    alone = styles([summary("rope", FIT)])["rope"]
    mine = styles([summary("mine", FIT)])["mine"]
    assert styles([summary("mine", FIT), summary("alibi", FIT), summary("rope", FIT)])["rope"] == alone
    assert styles([summary("other", FIT), summary("mine", FIT)])["mine"].colour == mine.colour
    many = styles([summary("rope", FIT, label=f"rope {i}") for i in range(20)])
    assert len({(s.colour, s.dash) for s in many.values()}) == 20
    assert set(PALETTE) == {s.colour for s in many.values()}


def test_ticks_are_evaluated_lengths_and_have_room():
    ticks = figure.tick_lengths(list(range(1, 129)), 16)
    assert {1, 16, 32, 64, 128} <= set(ticks) and len(ticks) < 18


def test_the_report_needs_no_jax_and_no_pyplot():
    code = "import sys, posjax.report.html; print([m for m in ('jax', 'flax', 'matplotlib.pyplot') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
