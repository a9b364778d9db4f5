"""Schemes that add a bias to the logits: starts, buckets, far distances, and what they refuse."""
import decimal
import functools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posjax
from posjax import config, conformance
from posjax.conformance.expect import differ
from posjax.conformance.layer import backends, inputs, layer
from posjax.errors import UserError
from posjax.schemes.attend import attend
from posjax.schemes.registry import SCHEMES, make_scheme

DATA = pathlib.Path(__file__).parents[1] / "data"


def make(name, *, num_heads=4, head_dim=8, seed=0, **hyper):
    return make_scheme(name, num_heads=num_heads, head_dim=head_dim, rngs=nnx.Rngs(seed), **hyper)


def block(scheme, q_positions, k_positions):
    """The bias `[..., H, Q, K]` of positions given as numbers."""
    return np.asarray(scheme.bias().block(jnp.asarray(q_positions, jnp.int32), jnp.asarray(k_positions, jnp.int32)))


VARIANTS = [("alibi", {"learned": True}), ("kerple", {"kind": "power"}), ("hard_alibi", {"windows": (4, 2, 1)}),
            ("t5", {"bidirectional": True, "num_buckets": 8, "max_distance": 6}), ("t5", {"scaled": False})]
# What other numbers in a bias, and parameters of other kinds, could break.
CHECKED = ("relative", "decode", "left_padding", "half_precision", "backends_agree", "gradients", "replicas", "state",
           "abstract_restore")
CHECKS = [check for check in conformance.CHECKS if check.__name__.removeprefix("check_") in CHECKED]


@functools.cache
def variant(case):
    name, hyper = VARIANTS[case]
    return conformance.subject(name, **hyper)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("case", range(len(VARIANTS)), ids=lambda case: str(VARIANTS[case]))
def test_variants_conform(case, check):
    check(variant(case))


@pytest.mark.parametrize("name", ["fire", "hard_alibi", "kerple", "sandwich", "t5"])
def test_positions_matter(name):
    # Reset or permuted positions without effect.
    scheme = make(name)
    x = inputs(scheme)
    plain = layer(scheme, x)
    for positions in (np.array([0, 1, 2, 3, 0, 1, 2, 3, 4]), np.array([4, 0, 7, 1, 8, 2, 6, 3, 5])):
        differ(layer(scheme, x, positions), plain)


@pytest.mark.parametrize(("name", "hyper"), [("alibi", {}), ("alibi", {"learned": True}), ("hard_alibi", {}), ("kerple", {}),
                                             ("kerple", {"kind": "power"}), ("sandwich", {})], ids=str)
def test_biases_fall_on_both_sides_of_the_query(name, hyper):
    # Right below the diagonal only.
    bias = block(make(name, **hyper), range(9), range(9))
    np.testing.assert_array_equal(bias, bias.transpose(0, 2, 1))
    assert np.abs(np.diagonal(bias, axis1=1, axis2=2)).max() < 1e-5
    assert bias.max() < 1e-5
    assert np.ptp(bias[0, -1]) > 0


@pytest.mark.parametrize("name", [name for name in SCHEMES.names() if make(name).bias() is not None])
def test_far_and_odd_positions_give_finite_numbers(name):
    # A table or a power that ends. Padding may leave any position, a query before all keys too.
    bias = block(make(name), [[0, 2**24], [2**31 - 1, -5]], [[0, 3, 2**24], [0, -7, 2**31 - 1]])
    assert bias.dtype == np.float32
    assert bias.shape == (2, 4, 2, 3)
    assert np.isfinite(bias).all()


def test_t5_buckets_are_those_of_hugging_face():
    gold = json.loads((DATA / "t5_buckets.json").read_text())
    first, last = gold["relative_position"]["range"]
    relative = np.array([*range(first, last + 1), *gold["relative_position"]["far"]])
    for entry in gold["entries"]:
        expected = np.repeat(*np.array(entry.pop("runs")).T)
        np.testing.assert_array_equal(posjax.t5_bucket(relative, **entry), expected)


def test_t5_buckets_are_exact_where_float32_is_not():
    # ln(n/E) / ln(max_distance/E) is an integer over S there, and rounding decides.
    assert posjax.t5_bucket(jnp.array([-36, -54, -35, -53]), num_buckets=48, max_distance=81).tolist() == [32, 40, 31, 39]
    assert posjax.t5_bucket(jnp.array([-72, -108]), num_buckets=96, max_distance=162).tolist() == [64, 80]
    assert posjax.t5_bucket(jnp.array([-76, -112, -113])).tolist() == [27, 30, 31]
    decimal.getcontext().prec = 50
    for num_buckets, max_distance in ((2, 2), (3, 50), (7, 4), (10, 6), (33, 128), (48, 81), (64, 2**20), (96, 162)):
        exact = num_buckets // 2
        ratio = [((decimal.Decimal(n) / exact).ln() / (decimal.Decimal(max_distance) / exact).ln()) for n in range(exact, 200)]
        wide = [math.floor(r * (num_buckets - exact) + decimal.Decimal("1e-40")) for r in ratio]
        expected = [*range(exact), *(min(exact + w, num_buckets - 1) for w in wide)]
        actual = posjax.t5_bucket(-np.arange(200), num_buckets=num_buckets, max_distance=max_distance)
        np.testing.assert_array_equal(actual, expected, err_msg=f"{num_buckets} {max_distance}")


def test_t5_buckets_end_and_do_not_fall():
    # An index past the table.
    relative = -np.concatenate([np.arange(2000), [10**6, 2**31 - 1, 2**31]]).astype(np.int32)
    bucket = np.asarray(jax.jit(posjax.t5_bucket)(relative))
    assert bucket.dtype == np.int32
    assert (np.diff(bucket) >= 0).all()
    assert bucket[0] == 0 and (bucket[-3:] == 31).all()
    assert (posjax.t5_bucket(np.arange(5)) == 0).all()
    two_sided = np.asarray(posjax.t5_bucket(np.array([-2**31, -1, 0, 1, 2**31 - 1]), bidirectional=True))
    assert two_sided.tolist() == [15, 1, 0, 17, 31]
    assert posjax.t5_bucket(np.int8(-100)) == posjax.t5_bucket(-100) == 30


@pytest.mark.parametrize(("kind", "bounds"), [("log", (2, 1)), ("power", (1, 2))])
def test_kerple_starts_as_its_authors_do_and_never_without_position(kind, bounds):
    # A kernel of 0 would be NoPE in disguise.
    scheme = make("kerple", kind=kind, num_heads=4096)
    for param, bound in zip((scheme.r1, scheme.r2), bounds):
        assert 0 <= param[...].min() < 0.01 * bound
        assert 0.99 * bound < param[...].max() <= bound
        assert abs(param[...].mean() - bound / 2) < 0.02 * bound
    bias = block(scheme, [100], [0, 99, 100])
    assert (bias[:, 0, :2] < 0).all()
    assert (bias[:, 0, 2] == 0).all()


def test_t5_starts_as_in_hugging_face():
    table = make_scheme("t5", num_heads=512, head_dim=8, model_dim=64, rngs=nnx.Rngs(0)).table[...]
    assert table.shape == (32, 512)
    assert abs(table.std() - 64 ** -0.5) < 0.005
    assert abs(table.mean()) < 0.005


def test_fire_starts_as_linear_layers_of_pytorch_do():
    scheme = make("fire", mlp_width=400, num_heads=16)
    for param, bound in ((scheme.hidden_kernel, 1), (scheme.hidden_bias, 1), (scheme.out_kernel, 0.05)):
        assert -bound <= param[...].min() < -0.98 * bound
        assert 0.98 * bound < param[...].max() <= bound
        assert abs(param[...].std() - bound / 3 ** 0.5) < 0.05 * bound


@pytest.mark.parametrize(("c", "factor"), [(0.1, 1.0), (0.0, 1.0), (0.1, 0.0), (0.0, 0.0)])
def test_fire_has_finite_gradients_at_distance_0_and_without_a_scale(c, factor):
    scheme = make("fire", threshold=2.0)
    scheme.c[...], scheme.threshold_factor[...] = jnp.float32(c), jnp.float32(factor)
    graphdef, state = nnx.split(scheme)

    def total(state):
        return nnx.merge(graphdef, state).bias().block(jnp.arange(5), jnp.arange(5)).sum()
    value, gradients = jax.value_and_grad(total)(state)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_fire_sees_no_new_fraction_at_any_length():
    far, farther = block(make("fire"), [1000], [0]), block(make("fire"), [10**6], [0])
    np.testing.assert_allclose(far, farther, atol=1e-6)
    assert np.abs(far - block(make("fire"), [1000], [500])).max() > 1e-2


def test_learned_alibi_slopes_start_at_the_fixed_ones_and_move():
    scheme = make("alibi", num_heads=6, learned=True)
    np.testing.assert_allclose(scheme.bias().slopes, posjax.alibi_slopes(6), rtol=2e-7)
    assert jax.tree.leaves(nnx.state(make("alibi"))) == []
    scheme.log2_slopes[...] = scheme.log2_slopes[...] + 1
    np.testing.assert_allclose(block(scheme, [9], [4])[:, 0, 0], -10 * posjax.alibi_slopes(6), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_hard_alibi_without_a_key_in_its_window_is_no_nan(dtype):
    # Positions with a gap before the last query, whose own key is of another segment: its window is empty.
    scheme, segments = make("hard_alibi"), np.array([[0, 0, 0, 1]])
    positions = np.array([0, 1, 2, 50])

    def run(q, k, v, backend):
        return attend(scheme, q, k, v, q_positions=positions, k_positions=positions,
                      q_segment_ids=np.zeros((1, 4), int), k_segment_ids=segments, backend=backend)
    q, k, v = (jnp.asarray(np.random.default_rng(i).normal(size=(1, 4, 4, 8)), dtype) for i in range(3))
    for backend in backends():
        out, pullback = jax.vjp(lambda q, k, v, backend=backend: run(q, k, v, backend), q, k, v)
        for array in (out, *pullback(jnp.ones_like(out))):
            assert np.isfinite(np.asarray(array, np.float32)).all()
        # The first head sees its own key alone.
        np.testing.assert_array_equal(out[:, :3, 0], v[:, :3, 0])


def test_windows_come_from_a_command_line_and_back_from_a_record():
    given = config.override(config.default_config("hard_alibi"), {"scheme.windows": "1, 5"})
    read = config.from_json(config.to_json(given))
    assert make("hard_alibi", windows=read.scheme.windows).bias().windows == (1, 5, None, None)
    assert make("hard_alibi").bias().windows == (1, 2, 3, None)


@pytest.mark.parametrize(("name", "hyper", "message"), [
    ("hard_alibi", {"windows": 3}, "windows is 3; give one for each windowed head"),
    ("hard_alibi", {"windows": ()}, "allowed are 1 to 4 .num_heads. integers of at least 1"),
    ("hard_alibi", {"windows": (1, 0)}, r"windows is \(1, 0\)"),
    ("hard_alibi", {"windows": (1, 2, 3, 4, 5)}, "allowed are 1 to 4"),
    ("hard_alibi", {"num_heads": 1}, "num_heads is 1"),
    ("t5", {"num_buckets": 1}, "num_buckets is 1; it must be at least 2"),
    ("t5", {"num_buckets": 9, "bidirectional": True}, "num_buckets is 9; it must be at least 4 and even"),
    ("t5", {"max_distance": 16}, "max_distance is 16; it must be an integer above 16"),
    ("t5", {"max_distance": 8, "bidirectional": True}, "above 8.*on a side"),
    ("kerple", {"kind": "logs"}, "Unknown kind of kerple 'logs'. Did you mean log.*Known: log, power"),
    ("sandwich", {"dim": 7}, "dim is 7; it must be even"),
    ("sandwich", {"base": 0.0}, "base is 0.0"),
    ("sandwich", {"first_index": 2}, "first_index is 2; it must be 0 or 1"),
    ("fire", {"mlp_width": 0}, "mlp_width is 0"),
    ("fire", {"c": 0.0}, "fire's c is 0.0; it must be above 0"),
    ("fire", {"threshold": -1.0}, "fire's threshold is -1.0"),
])
def test_bad_values_are_refused(name, hyper, message):
    with pytest.raises(UserError, match=message):
        make(name, **hyper)


def test_what_has_no_numbers_to_start_from_or_no_integers_is_refused():
    for name in ("t5", "kerple", "fire"):
        with pytest.raises(UserError, match=f"scheme {name} has parameters: pass rngs"):
            make_scheme(name, num_heads=4, head_dim=8)
    with pytest.raises(UserError, match="must be integers; got float32"):
        posjax.t5_bucket(jnp.array([1.0]))
