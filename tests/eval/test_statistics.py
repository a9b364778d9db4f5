"""Numbers worked out by hand."""
import math

import pytest

from posjax.errors import UserError
from posjax.eval.estimates import Estimate, t_quantile
from posjax.eval.statistics import summarize

CONFIG = {"scheme": {"name": "rope"}, "task": {"name": "copy"},
          "train": {"steps": 100, "lengths": {"min": 1, "max": 16}}, "eval": {"fit_threshold": 0.95}}


def row(seed, length, exact, *, step=100, condition=None, status="ok", num_examples=512, positions=()):
    return {"step": step, "seed": seed, "length": length, "condition": condition or {}, "num_examples": num_examples,
            "exact_match": exact, "token_accuracy": exact, "loss": 0.1, "per_position": list(positions), "status": status}


def curves(*seeds, **keywords):
    return [row(seed, n, value, **keywords) for seed, curve in enumerate(seeds) for n, value in curve.items()]


@pytest.mark.parametrize("degrees, printed", [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (9, 2.262),
                                             (10, 2.228), (30, 2.042), (120, 1.980)])
def test_t_quantiles_are_those_of_the_printed_tables(degrees, printed):
    assert t_quantile(degrees) == pytest.approx(printed, abs=5e-4)


def test_interval_over_three_seeds():
    estimate = Estimate((0.4, 0.5, 0.6))  # standard deviation 0.1
    assert estimate.mean == pytest.approx(0.5)
    assert estimate.half_width == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)
    assert estimate.interval == pytest.approx((0.251586, 0.748414), abs=1e-6)
    assert (estimate.min, estimate.max, estimate.n) == (0.4, 0.6, 3)


def test_one_seed_has_no_interval_and_proportions_stay_proportions():
    assert Estimate((0.7,)).interval is None and Estimate((0.7,)).half_width is None
    low, high = Estimate((0.9, 1.0)).interval
    assert high == 1.0 and low == pytest.approx(0.95 - 12.7062 * 0.05, abs=1e-3)
    assert Estimate((0.0, 0.1)).interval[0] == 0.0


def test_effective_length_ends_at_the_first_failure_not_at_the_last_success():
    s = summarize(curves({8: 1.0, 16: 0.95, 24: 0.89, 32: 0.93, 64: 0.4}, {8: 1.0, 16: 1.0, 24: 0.9, 32: 0.6, 64: 0.5}), CONFIG)
    assert s.effective[0.9].seeds == {0: 16, 1: 24}
    assert (s.effective[0.9].mean, s.effective[0.9].min, s.effective[0.9].max) == (20, 16, 24)
    assert s.effective[0.5].seeds == {0: 32, 1: 64}
    assert s.effective[0.5].open == {1} and not s.effective[0.9].open


def test_statistics_are_over_the_seeds_that_fit():
    s = summarize(curves({8: 1.0, 16: 1.0, 32: 0.4}, {8: 1.0, 16: 0.94, 32: 0.9}, {8: 1.0, 16: 0.96, 32: 0.6}), CONFIG)
    assert s.fit == (0, 2) and s.seeds == (0, 1, 2)
    assert s.exact_match[32].values == (0.4, 0.6)
    assert s.curves[1][32].exact_match == 0.9  # raw records stay


def test_a_scheme_that_did_not_fit_has_no_extrapolation_result():
    s = summarize(curves({8: 0.5, 16: 0.2, 32: 0.0}, {8: 0.7, 16: 0.4, 32: 0.1}), CONFIG)
    assert s.did_not_fit and not s.has_result and not s.effective
    assert set(s.exact_match) == {8, 16} and s.exact_match[8].mean == pytest.approx(0.6)


def test_a_table_without_rows_ends_and_says_why():
    status = "no row past max_length 34"
    s = summarize(curves({8: 1.0, 16: 1.0}) + curves({32: None, 64: None}, status=status), CONFIG)
    assert s.fit == (0,) and s.statuses == {32: status, 64: status} and s.ends == (status,)
    assert list(s.exact_match) == [8, 16]
    assert s.effective[0.9].seeds == {0: 16} and not s.effective[0.9].open  # it ends: not "at least"


def test_conditions_are_averaged_and_kept():
    rows = [row(0, n, value, condition={"depth": depth}) for n, depth, value in
            [(16, 0.0, 1.0), (16, 1.0, 0.96), (32, 0.0, 0.8), (32, 1.0, 0.2)]]
    s = summarize(rows, CONFIG)
    assert s.exact_match[16].mean == pytest.approx(0.98) and s.exact_match[32].mean == pytest.approx(0.5)
    assert s.by_condition[(("depth", 1.0),)][32].mean == 0.2


def test_the_last_step_counts_and_of_equal_rows_the_last_and_of_sizes_the_largest():
    rows = [row(0, 16, 0.1, step=50), row(0, 16, 0.2), row(0, 16, 0.97), row(0, 16, 0.99, num_examples=2048),
            row(0, 16, 0.3, num_examples=64)]
    s = summarize(rows, CONFIG)
    assert s.step == 100 and s.exact_match[16].mean == 0.99 and s.num_examples == (2048,)


def test_unfinished_runs_say_how_far_they_are():
    assert summarize([], CONFIG, finished=False).unfinished == "unfinished: no evaluation yet"
    early = summarize(curves({8: 1.0, 16: 1.0, 32: 0.5}, step=50), CONFIG)
    assert early.unfinished == "unfinished: last evaluation at step 50 of 100" and not early.has_result
    assert early.exact_match[32].mean == 0.5  # for a plot while it trains
    torn = summarize(curves({8: 1.0}), CONFIG, finished=False)
    assert "not complete" in torn.unfinished


def test_a_length_that_a_seed_lacks_has_no_mean():
    s = summarize(curves({8: 1.0, 16: 1.0, 32: 0.5}, {8: 1.0, 16: 1.0}), CONFIG)
    assert 32 not in s.exact_match and s.statuses[32] == "not evaluated for every seed"
    assert s.effective[0.9].open == {1}


def test_not_a_number_is_no_result():
    s = summarize(curves({8: 1.0, 16: 1.0, 32: math.nan}), CONFIG)
    assert s.statuses == {32: "not a number"}


def test_fit_is_not_judged_without_trained_lengths():
    s = summarize(curves({32: 0.95, 64: 0.2}), CONFIG)
    assert not s.fit_judged and s.fit == (0,)


def test_positions_are_averaged_over_seeds():
    s = summarize([row(0, 16, 1.0, positions=[1.0, 0.5]), row(1, 16, 1.0, positions=[0.5, 0.0])], CONFIG)
    assert s.per_position[16] == (0.75, 0.25)


def test_a_config_of_something_else_is_a_user_error():
    with pytest.raises(UserError, match="train.steps"):
        summarize([], {"scheme": {"name": "rope"}})


def test_a_finished_run_that_has_lost_records_is_no_result_and_says_which():
    """Else a shorter table would pass for a whole one."""
    rows = [{"step": 100, "seed": seed, "length": n, "condition": {}, "num_examples": 8, "exact_match": 1.0,
             "token_accuracy": 1.0, "loss": 0.0, "per_position": [1.0], "status": "ok"} for seed in (0, 1) for n in (8, 16, 32)]
    config = {**CONFIG, "eval": {**CONFIG["eval"], "lengths": [8, 16, 32]}}
    assert summarize(rows, config).has_result
    lost = summarize(rows[:-1], config)
    assert not lost.has_result and "length 32" in lost.unfinished


def test_evaluations_under_another_position_policy_are_a_result_of_their_own():
    """One of them must not count as the other, nor old rows, which name none, as neither."""
    config = {**CONFIG, "positions": {"train": {"name": "randomised", "max_position": 64}, "eval": {"name": "sequential"}},
              "eval": {**CONFIG["eval"], "lengths": [16, 32]}}
    old = curves({16: 1.0, 32: 0.2}, {16: 1.0, 32: 0.4})
    even = [r | {"positions": "even (max_position=64)"} for r in curves({16: 0.97, 32: 0.9, 64: 0.5}, {16: 0.9, 32: 0.7})]
    own = summarize(old + even, config)
    assert own.exact_match[32].values == (0.2, 0.4) and 64 not in own.lengths
    assert (own.trained_positions, own.positions) == ("randomised (max_position=64)", "sequential")
    other = summarize(old + even, config, positions="even (max_position=64)")
    assert other.fit == (0,) and other.exact_match[64].values == (0.5,) and other.positions == "even (max_position=64)"
    again = summarize(old + [row(0, 32, 0.3) | {"positions": "sequential"}] + even, config)
    assert again.exact_match[32].values == (0.3, 0.4)
    # The lengths of the config are those of its own policy.
    assert summarize(old + even[:1], config, positions="even (max_position=64)").unfinished is None
    assert "length 32" in summarize(old[:-1] + even, config).unfinished
