"""A temperature is a factor on the logits of a query, for schemes of every kind, and never on their bias."""
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.schemes.attend import attend
from posjax.schemes.base import Scheme
from posjax.schemes.registry import make_scheme
from posjax.schemes.temperature import TEMPERATURES, make_temperature

DIMS = {"num_heads": 2, "head_dim": 4}
POSITIONS = np.asarray([0, 3, 511, 512, 9000, 2**24], np.int32)


class OwnLogits(Scheme):
    name = "own_logits"

    def logits(self, q, k, q_positions, k_positions, *, visible, scale, features):
        return scale * jnp.einsum("bqhd,bkhd->bhqk", q, k)


@pytest.mark.parametrize("name, hyper, expected", [
    ("none", {}, np.ones(6)),
    ("constant", {"multiplier": 1.58963}, np.full(6, 1.58963)),
    ("yarn", {"scale": 16.0}, np.full(6, 1.2772588722239782**2)),
    ("yarn", {"scale": 0.5}, np.ones(6)),
    ("log_n", {"length": 512}, [1, 1, 1, np.log(513) / np.log(512), np.log(9001) / np.log(512), np.log(2**24 + 1) / np.log(512)]),
    ("log_n", {"length": 16, "below": True}, np.log(POSITIONS + 1.0) / np.log(16)),
    ("ssmax", {"start": 0.5}, 0.5 * np.log(POSITIONS + 1.0)),
    ("llama4", {}, [1, 1, 1, 1, 1 + 0.1 * np.log(2), 1 + 0.1 * np.log(2049)]),
])
def test_factor(name, hyper, expected):
    factor = make_temperature(name, **hyper).factor(jnp.asarray(POSITIONS))
    assert factor.shape == (6, 1) and factor.dtype == jnp.float32
    np.testing.assert_allclose(factor[:, 0], expected, rtol=1e-6)


def qkv(length=6):
    return np.random.default_rng(0).normal(size=(3, 2, length, 2, 4)).astype(np.float32)


@pytest.mark.parametrize("kind", ["alibi", "rope", "own_logits"])
@pytest.mark.parametrize("rows", [False, True], ids=["one row of positions", "rows of positions"])
def test_multiplies_the_queries_and_not_the_bias(kind, rows):
    """Under every kind of scheme: as if the queries had come multiplied."""
    plain, sharp = (OwnLogits(**DIMS) if kind == "own_logits" else make_scheme(kind, **DIMS) for _ in range(2))
    sharp.temperature = make_temperature("log_n", length=2)
    q, k, v = qkv()
    positions = np.stack([np.arange(6), np.arange(6) * 3]) if rows else np.arange(6)
    factor = np.maximum(np.log(positions + 1.0) / np.log(2), 1).astype(np.float32)
    expected = attend(plain, q * factor.reshape(-1, 6, 1, 1), k, v, q_positions=positions, k_positions=positions)
    for backend in ("dense", "reference"):
        actual = attend(sharp, q, k, v, q_positions=positions, k_positions=positions, backend=backend)
        np.testing.assert_allclose(actual, expected, atol=2e-6)
    assert np.abs(np.asarray(attend(plain, q, k, v) - actual)).max() > 1e-2


def test_a_scheme_is_as_relative_as_its_temperature():
    assert make_scheme("rope", **DIMS, temperature=make_temperature("yarn")).relative
    assert not make_scheme("rope", **DIMS, temperature=make_temperature("log_n")).relative
    assert make_scheme("rope", **DIMS, temperature=make_temperature("none")).temperature is None


@pytest.mark.parametrize("name, hyper, words", [
    ("logn", {}, "log_n"),
    ("log_n", {"length": 1}, "length is 1; it must be above 1"),
    ("constant", {"multiplier": 0.0}, "multiplier is 0.0"),
    ("yarn", {"factor": 2.0}, "factor"),
])
def test_bad_input_is_named(name, hyper, words):
    with pytest.raises(ValueError, match=words):
        make_temperature(name, **hyper)


def test_every_temperature_says_what_it_is():
    assert all(TEMPERATURES.get(name).formula for name in TEMPERATURES.names())
