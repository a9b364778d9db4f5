"""PoPE: its definition in float64, its phases, and that none of them gets stuck."""
import numpy as np
import pytest
from flax import nnx

from posjax import conformance
from posjax.conformance.expect import differ
from posjax.conformance.layer import inputs, project
from posjax.errors import UserError
from posjax.schemes.attend import attend
from posjax.schemes.registry import make_scheme


def pope(**hyper):
    return make_scheme("pope", num_heads=4, head_dim=8, **{"rngs": nnx.Rngs(0), "delta_init": "uniform"} | hyper)


def oracle(q, k, q_positions, k_positions, delta, base=1e4):
    """Scores `[B, H, Q, K]` one channel at a time, in float64."""
    q, k = (np.log1p(np.exp(np.asarray(x, np.float64))) for x in (q, k))
    k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    distance = np.subtract.outer(-q_positions, -k_positions).astype(np.float64)  # key - query
    scores = np.zeros((q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    for head in range(q.shape[2]):
        for c in range(q.shape[3]):
            turn = np.cos(distance * base ** (-c / q.shape[3]) + float(delta[head, c]))
            scores[:, head] += q[:, :, None, head, c] * k[:, None, :, head, c] * turn
    return scores


@pytest.mark.parametrize("first", [0, 100_000, 2**24 - 9])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_scores_are_those_of_the_definition(groups, first):
    # A phase of the wrong sign or head, frequencies of pairs, float32 angles.
    scheme = pope(base=500.0)
    q, k, _ = project(scheme, inputs(scheme), groups=groups)
    positions = np.arange(9) + first
    rotated = scheme.rotate(q[:, 4:], k, positions[4:], positions)
    assert [x.shape for x in rotated] == [(2, 5, 4, 16), (2, 9, groups, 16)]
    found = np.einsum("bqhd,bkhd->bhqk", *(np.repeat(np.asarray(x, np.float64), 4 // x.shape[2], axis=2) for x in rotated))
    expected = oracle(q[:, 4:], k, positions[4:], positions, scheme.delta[...], 500.0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6)
    # The longest single product is about 5: phases of the other sign are off by as much.
    differ(oracle(q[:, 4:], k, positions[4:], positions, -scheme.delta[...], 500.0), expected, by=1.0)


def test_logits_are_divided_by_the_root_of_the_head_dim():
    # Of the doubled channels, that is sqrt(2) less.
    scheme = pope()
    q, k, v = project(scheme, inputs(scheme))
    scores = oracle(q, k, np.arange(9), np.arange(9), scheme.delta[...]) / np.sqrt(8)
    weights = np.exp(np.where(np.tri(9, dtype=bool), scores, -np.inf))
    expected = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(attend(scheme, q, k, v), expected, rtol=0, atol=3e-6)


def test_phases_start_where_they_are_told_to():
    assert not pope(delta_init="zero").delta[...].any()
    phases = np.asarray(pope().delta[...])
    assert phases.shape == (4, 8) and phases.min() > -2 * np.pi and phases.max() < 0 and phases.std() > 1


@pytest.mark.parametrize("check", [check for check in conformance.CHECKS if "gradients" in check.__name__ or
                                   "grouped" in check.__name__], ids=lambda check: check.__name__)
def test_conforms_away_from_zero(check):
    check(conformance.subject("pope", delta_init="uniform"))


@pytest.mark.parametrize(("hyper", "message"), [
    ({"base": 0.0}, "base is 0.0; it must be above 0"),
    ({"delta_init": "unifrom"}, "Unknown delta_init 'unifrom'. Did you mean uniform"),
    ({"rngs": None}, "pass rngs"),
])
def test_bad_values_are_refused(hyper, message):
    with pytest.raises(UserError, match=message):
        pope(**hyper)
