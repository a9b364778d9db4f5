"""Position policies: what every one promises, and what each draws."""
import functools

import jax
import numpy as np
import pytest

from posjax.errors import UserError
from posjax.schemes.positions import POLICIES

ROWS, LENGTH = 64, 12
POLICY = [("sequential", {}), ("random_offset", {"max_position": 40}), ("randomised", {"max_position": 40}),
          ("randomised", {"max_position": 40, "per": "batch"}), ("even", {"max_position": 40}),
          ("skips", {"max_position": 40}), ("skips", {"max_position": 40, "chunks": 5}),
          ("random_offset", {"max_position": LENGTH}), ("randomised", {"max_position": LENGTH}),
          ("even", {"max_position": LENGTH}), ("skips", {"max_position": LENGTH, "chunks": LENGTH})]


@functools.partial(jax.jit, static_argnums=0)
def compiled(policy, key, used):
    return policy.positions(key, used, LENGTH)


def draw(name, hyper, seed=0, used=LENGTH):
    policy = POLICIES.make(name, hyper)
    used = np.full(ROWS, used, np.int32) if np.ndim(used) == 0 else used
    return policy, np.asarray(compiled(policy, jax.random.key(seed), used))


def test_every_policy_is_tested_here():
    assert {name for name, _ in POLICY} == set(POLICIES.names()) - {"coupled"}  # below


def test_coupled_positions_are_those_given_and_shifted_as_far_as_each_row_has_room():
    # A shift of the batch, or one that takes the padding's positions for those of the row.
    used = np.asarray([4, 6] * 200, np.int32)
    given = np.asarray([[0, 2, 1, 0, 50, 50], [5, 4, 3, 2, 1, 0]] * 200, np.int32)
    plain, shifted = (POLICIES.make("coupled", hyper) for hyper in ({}, {"max_position": 8}))
    expected = given.copy()
    expected[used == 4, 4:] = 0
    np.testing.assert_array_equal(plain.positions(jax.random.key(0), used, 6, given), expected)
    shifts = np.asarray(shifted.positions(jax.random.key(0), used, 6, given)) - expected
    assert shifts.dtype == np.int32 and (shifts == shifts[:, :1]).all()
    for count, room in ((4, 6), (6, 3)):  # highest given 2 and 5: up to 7 in both
        assert set(shifts[used == count, 0]) == set(range(room))
    assert (plain.span(6), shifted.span(6)) == (6, 8)
    plain.check(9)
    with pytest.raises(UserError, match="coupled has max_position 8, too small for 9 positions"):
        shifted.check(9)


@pytest.mark.parametrize(("name", "hyper"), POLICY, ids=str)
def test_positions_are_distinct_rising_and_within_the_span(name, hyper):
    policy, positions = draw(name, hyper)
    assert positions.dtype == np.int32
    assert positions.shape in ((LENGTH,), (ROWS, LENGTH))
    assert (np.diff(positions, axis=-1) >= 1).all()
    assert positions.min() >= 0
    assert positions.max() < policy.span(LENGTH)
    if "max_position" in hyper:
        assert policy.span(LENGTH) <= hyper["max_position"]
    np.testing.assert_array_equal(draw(name, hyper)[1], positions)


@pytest.mark.parametrize("name", ["random_offset", "randomised", "skips"])
def test_rows_and_keys_differ(name):
    _, positions = draw(name, {"max_position": 40})
    assert len(np.unique(positions, axis=0)) > 20  # of 64 rows; 29 offsets and 29 skips exist
    assert (draw(name, {"max_position": 40}, seed=1)[1] != positions).any()


def test_every_position_can_be_drawn():
    for name, hyper in POLICY[1:3]:
        assert set(draw(name, hyper)[1].ravel()) == set(range(40))


def test_randomised_per_batch_draws_once():
    assert len(np.unique(draw("randomised", {"per": "batch"})[1], axis=0)) == 1
    assert len(np.unique(draw("randomised", {"per": "example"})[1], axis=0)) == ROWS


@pytest.mark.parametrize(("name", "hyper"), POLICY, ids=str)
def test_padding_takes_no_part_in_the_draw(name, hyper):
    """A row gets the positions of its own length: the same range, from the same possibilities, as alone."""
    policy = POLICIES.make(name, hyper)
    used = np.asarray([3, 7, LENGTH] * (ROWS // 3 + 1), np.int32)[:ROWS]
    positions = np.broadcast_to(draw(name, hyper, used=used)[1], (ROWS, LENGTH))
    for row, count in zip(positions, used):
        assert (np.diff(row[:count]) >= 1).all() and 0 <= row[0] and row[count - 1] < policy.span(int(count))
        assert name == "sequential" or (row[count:] == row[count - 1]).all()
    if hyper.get("max_position", 0) > LENGTH and name != "skips":
        # With the room of twelve tokens, three could not reach so far: padding would have kept it.
        assert positions[used == 3, 2].max() > policy.max_position - 10


def test_a_bucket_may_be_larger_than_the_room_as_long_as_its_rows_are_not():
    used = np.full(ROWS, 5, np.int32)
    for name in ("random_offset", "randomised", "even", "skips"):
        positions = draw(name, {"max_position": 8}, used=used)[1][:, :5]
        assert (np.diff(positions, axis=1) >= 1).all() and positions.min() >= 0 and positions.max() < 8


def test_offsets_keep_neighbours_and_skips_keep_chunks():
    assert (np.diff(draw("random_offset", {})[1], axis=1) == 1).all()
    positions = draw("skips", {"chunks": 3})[1]
    steps = np.diff(positions, axis=1)
    assert (positions[:, 0] == 0).all()
    assert (np.delete(steps, [3, 7], axis=1) == 1).all()
    assert (steps[:, [3, 7]] > 1).any()


def test_even_positions_go_from_the_first_to_the_last_in_steps_that_differ_by_one_at_most():
    policy, positions = draw("even", {"max_position": 40})
    assert (positions[:, 0] == 0).all() and (positions[:, -1] == 39).all() and policy.span(LENGTH) == 40
    assert set(np.diff(positions).ravel()) == {3, 4}


@pytest.mark.parametrize("name", ["random_offset", "randomised", "even", "skips"])
def test_too_many_tokens_are_refused_with_both_numbers(name):
    policy = POLICIES.make(name, {"max_position": 8})
    with pytest.raises(UserError, match=f"policy {name} has max_position 8, too small for 9 tokens"):
        policy.check(9)
    policy.check(8)


def test_bad_values_and_names_are_refused():
    with pytest.raises(UserError, match="per is 'row'; it must be example or batch"):
        POLICIES.make("randomised", {"per": "row"})
    with pytest.raises(UserError, match="skips has 0 chunks; it must have at least 1"):
        POLICIES.make("skips", {"chunks": 0})
    with pytest.raises(UserError, match="Unknown position policy 'randomized'. Did you mean randomised.*Known: coupled, even, "):
        POLICIES.get("randomized")
