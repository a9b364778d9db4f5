"""What people pass by mistake to any scheme ends in one line, and small integer types are as good as int32."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from posjax.errors import UserError
from posjax.schemes.attend import attend, attend_cached, make_cache
from posjax.schemes.registry import SCHEMES, make_scheme
from posjax.schemes.temperature import TEMPERATURES, make_temperature

DIMS = {"num_heads": 2, "head_dim": 8}
Q = np.random.default_rng(0).normal(size=(1, 4, 2, 8)).astype(np.float32)


def make(name, **hyper):
    return make_scheme(name, **DIMS, rngs=nnx.Rngs(0), **hyper)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int64])
@pytest.mark.parametrize("name", ["learned", "sinusoidal", "rope", "t5"])
def test_positions_of_any_integer_type_mean_the_same(name, dtype):
    """A bound or an offset computed in 8 bits wraps around."""
    scheme, positions, x = make(name), np.asarray([0, 5, 100, 120]), np.zeros((1, 4, 16), np.float32)

    def run(positions):
        return scheme.embed(x, positions), attend(scheme, Q, Q, Q, q_positions=positions, k_positions=positions)
    given = [positions.astype(dtype)]
    if dtype != np.int64:  # which no array of the device has
        given.append(jnp.asarray(given[0]))
    for f in (run, jax.jit(run)):
        for these in given:
            jax.tree.map(np.testing.assert_array_equal, f(these), f(positions.astype(np.int32)))


@pytest.mark.parametrize(("options", "words"), [
    ({"window": float("nan")}, "window is nan; it counts"), ({"window": 2.5}, "window is 2.5"),
    ({"window": True}, "window is True"), ({"window": "3"}, "window is '3'"),
    ({"k_positions": [0, 1, 2, 3]}, "k_positions must be an array of integers; got list"),
    ({"k_positions": np.arange(4) + 3 * 10**9}, "k_positions reach 3000000003; positions are 32-bit integers"),
    ({"q_segment_ids": [[0] * 4], "k_segment_ids": [[0] * 4]}, "q_segment_ids must be an array"),
])
def test_arguments_of_attention(options, words):
    with pytest.raises(UserError, match=words):
        attend(make("rope"), Q, Q, Q, **options)


@pytest.mark.parametrize("name", SCHEMES.names())
def test_nothing_to_attend_to(name):
    scheme = make(name)
    with pytest.raises(UserError, match="at least one row, token and head"):
        attend(scheme, Q[:, :0], Q[:, :0], Q[:, :0], features=scheme.features(np.zeros((1, 1, 16), np.float32)))


NUMBERS = [(registry, name, key) for registry in (SCHEMES, TEMPERATURES) for name in registry.names()
           for key, default in registry.hyper(name).items() if isinstance(default, int | float)]


@pytest.mark.parametrize(("registry", "name", "key"), NUMBERS, ids=lambda value: value if isinstance(value, str) else value.kind)
def test_no_number_takes_what_is_none(registry, name, key):
    """Not finite, of another kind, or nothing: for every hyper-parameter that has a number or a truth value as its default."""
    for value in (float("nan"), float("inf"), None, "many", object()):
        with pytest.raises(UserError, match=f"{key}.*{name}|{name}.*{key}"):
            (make_scheme if registry is SCHEMES else make_temperature)(
                name, **{key: value}, **({**DIMS, "rngs": nnx.Rngs(0)} if registry is SCHEMES else {}))


@pytest.mark.parametrize(("name", "hyper"), [
    ("shaw", {"max_distance": True}), ("shaw", {"max_distance": 2.5}), ("pope", {"base": True}), ("xpos", {"center": True}),
    ("shaw", {"value_vectors": 1}), ("transformer_xl", {"dim": 4.0}), ("learned", {"init_scale": -1.0}),
])
def test_a_truth_value_is_no_number_and_a_fraction_no_whole_one(name, hyper):
    with pytest.raises(UserError, match=next(iter(hyper))):
        make(name, **hyper)


@pytest.mark.parametrize("hyper", [{"scale_base": 1e30}, {"gamma": 1e30}])
def test_a_decay_that_is_none_has_positions_without_end(hyper):
    assert 2**30 <= make("xpos", **hyper).max_length < 2**31


@pytest.mark.parametrize("name", ["log_n", "ssmax", "llama4"])
def test_padding_before_position_0_has_a_finite_temperature(name):
    """What is NaN in padding reaches all tokens through the values of the next layer."""
    scheme = make("rope", temperature=make_temperature(name))
    positions, segments = np.arange(4) - 2, np.asarray([[0, 0, 1, 1]])
    out = attend(scheme, Q, Q, Q, q_positions=positions, k_positions=positions, q_segment_ids=segments, k_segment_ids=segments)
    assert np.isfinite(out).all()


def test_temperatures_of_another_kind_or_size():
    with pytest.raises(UserError, match="posjax.make_temperature"):
        make("rope", temperature="log_n")
    with pytest.raises(UserError, match="made for 3 heads; the scheme has 2"):
        make("rope", temperature=make_temperature("ssmax", num_heads=3))


def test_a_cache_of_another_dtype():
    """Keys scaled for float32 overflow in float16, without a word."""
    scheme = make("xpos", center=0)
    cache = make_cache(scheme, 8, batch_size=1, dtype=jnp.float16)
    with pytest.raises(UserError, match="k is float32, but the cache holds float16"):
        attend_cached(scheme, Q, Q, Q, cache, positions=np.arange(4) + 6000)
    with pytest.raises(UserError, match="size of a cache is 6.0"):
        make_cache(scheme, 6.0, batch_size=1)
