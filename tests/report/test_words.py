import dataclasses

from made_up_runs import config, curves

from posjax.eval.estimates import EffectiveLength
from posjax.eval.statistics import summarize
from posjax.report import words
from posjax.report.records import RunRecord


def summary(scheme, *seeds, **keywords):
    return summarize(curves(*seeds), config(scheme), **keywords)


def record(name, config):
    return RunRecord(name=name, path=None, config=config, environment={}, metrics=[], evals=[], done=True)


def test_effective_lengths_in_words():
    def of(seeds, open=()):
        return words.effective(EffectiveLength(0.9, dict(enumerate(seeds)), frozenset(open), 8))
    assert of([24, 24]) == "24"
    assert of([20, 24, 24]) == "22.7 (seeds 20 to 24)"
    assert of([128, 128], open=[0, 1]) == "≥ 128"
    assert of([64, 128], open=[1]) == "≥ 96 (seeds 64 to ≥ 128)"
    assert of([0, 0]) == "< 8"
    assert of([0, 16]) == "8 (seeds < 8 to 16)"


def test_headline_says_what_survives_with_its_uncertainty():
    good = summary("alibi", {16: 1.0, 24: 0.95, 32: 0.4}, {16: 1.0, 24: 0.92, 32: 0.5}, {16: 1.0, 24: 0.8, 32: 0.6})
    bad = summary("rope", {16: 1.0, 24: 0.0, 32: 0.0}, {16: 1.0, 24: 0.1, 32: 0.02})
    unfit = summary("nope", {16: 0.1, 24: 0.0, 32: 0.0})
    head, facts = words.headline([good, bad, unfit])
    assert "1 of 2 stays at or above 0.9 exact match beyond it: alibi to length 21.3 (seeds 16 to 24), 1.33×." in head
    assert facts[0] == ("At length 32, 2× the longest trained, exact match: alibi 0.50 (95 % interval 0.25 to 0.75); "
                        "below 0.05: rope (best seed 0.02).")
    assert any(fact.startswith("nope did not fit: 0 of 1 seeds") for fact in facts)
    assert not any("rope did not" in fact for fact in facts)


def test_headline_where_nothing_survives_or_nothing_is_there():
    bad = summary("rope", {16: 1.0, 32: 0.0})
    assert words.headline([bad])[0].startswith("No scheme trained on copy up to length 16 stays at or above 0.9")
    assert "Nothing was evaluated beyond" in words.headline([summary("rope", {8: 1.0, 16: 1.0})])[0]
    assert "No result yet" in words.headline([summary("rope", {16: 1.0}, finished=False)])[0]


def test_runs_of_one_scheme_are_told_apart_by_what_differs():
    runs = [record("a", config("rope", base=1e4)), record("b", config("rope", base=5e5)), record("c", config("alibi"))]
    assert words.labels(runs) == ["rope (base=10000.0)", "rope (base=500000.0)", "alibi"]
    assert words.labels([runs[2], record("d", config("alibi"))]) == ["alibi [c]", "alibi [d]"]


def test_sections_are_tasks_with_the_same_training_lengths():
    runs = [record("a", config("rope")), record("b", config("rope", train_max=32)), record("c", config("alibi"))]
    assert [[r.name for r in group] for group, _ in words.sections(runs)] == [["a", "c"], ["b"]]


def test_a_run_evaluated_under_two_position_policies_has_two_results_and_the_report_says_which():
    randomised = config("rope") | {"positions": {"train": {"name": "randomised", "max_position": 64},
                                                 "eval": {"name": "even", "max_position": 64}}}
    rows = curves({16: 1.0, 32: 0.9}) + [row | {"positions": "sequential"} for row in curves({16: 1.0, 32: 0.1})]
    run, plain = dataclasses.replace(record("a", randomised), evals=rows), record("b", config("alibi"))
    ((records, summaries),) = words.sections([run, plain])
    assert [r.name for r in records] == ["a", "a", "b"]
    assert [(s.label, s.exact_match[32].mean) for s in summaries[:2]] == [("rope", 0.9), ("rope [positions sequential]", 0.1)]
    assert words.remarks(summaries)[:2] == [
        "Positions of rope: randomised (max_position=64) in training, even (max_position=64) in evaluation.",
        "Positions of rope [positions sequential]: randomised (max_position=64) in training, sequential in evaluation."]
    assert not any("Positions of" in line for line in words.remarks(summaries[2:]))
