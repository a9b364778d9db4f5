"""What is particular to each scheme: gold numbers, boundaries, and what it refuses."""
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from posjax.conformance.expect import differ, same
from posjax.conformance.layer import inputs, layer
from posjax.errors import UserError
from posjax.ops.bias import LinearBias
from posjax.schemes.alibi import alibi_slopes
from posjax.schemes.base import Scheme
from posjax.schemes.registry import SCHEMES, make_scheme

DATA = pathlib.Path(__file__).parents[1] / "data"


def learned(max_length=12, offset=0):
    return make_scheme("learned", num_heads=2, head_dim=4, max_length=max_length, offset=offset, rngs=nnx.Rngs(0))


def test_alibi_slopes_for_any_number_of_heads():
    # Numbers of heads that are no power of two, and the first exponent.
    for max_bias, exponents in json.loads((DATA / "alibi_exponents.json").read_text())["exponents"].items():
        for heads, expected in enumerate(exponents, 1):
            np.testing.assert_allclose(alibi_slopes(heads, max_bias=float(max_bias)), np.exp2(expected), rtol=1e-6)
    assert alibi_slopes(8)[[0, -1]].tolist() == [0.5, 0.00390625]


def test_alibi_bias_falls_on_both_sides():
    # Symmetric, zero on the diagonal, nowhere positive; and not constant for a single query.
    bias = LinearBias(jnp.array([0.5, 0.25])).block(jnp.arange(4), jnp.arange(4))
    np.testing.assert_array_equal(bias, bias.transpose(0, 2, 1))
    np.testing.assert_array_equal(bias[0], -0.5 * np.abs(np.subtract.outer(np.arange(4), np.arange(4))))
    np.testing.assert_array_equal(LinearBias(jnp.array([1.0])).block(jnp.array([3]), jnp.arange(4))[0, 0], [-3, -2, -1, 0])


@pytest.mark.parametrize("offset", [0, 2])
@pytest.mark.parametrize("position", [12, 40, -1, 2**31 - 1])
def test_a_learned_table_has_no_row_past_its_end(position, offset):
    # An index past the table that is clamped to its last row, or -1 that is the last row, or one of the offset's.
    scheme, x = learned(offset=offset), jnp.ones((1, 2, 8))
    positions = jnp.array([11, position])
    with pytest.raises(UserError, match=f"Position {position} has no row.* max_length 12 "):
        scheme.embed(x, positions)
    with pytest.raises(UserError, match="has no row"):  # known while x is traced
        jax.jit(lambda x: scheme.embed(x, positions))(x)
    added = jax.jit(scheme.embed)(x, positions)
    assert jnp.isfinite(added[0, 0]).all()
    assert jnp.isnan(added[0, 1]).all()


@pytest.mark.parametrize("offset", [0, 2])
def test_a_learned_row_is_that_of_its_position(offset):
    # An offset that is dropped, or that makes the table's last positions fall off its end.
    scheme = learned(offset=offset)
    positions = jnp.array([[3, 0], [11, 3]])
    added = scheme.embed(jnp.zeros((2, 2, 8)), positions)
    assert scheme.table[...].shape == (12 + offset, 8)
    np.testing.assert_array_equal(added, scheme.table[...][np.asarray(positions) + offset])


def test_no_position_reaches_the_rows_of_an_offset():
    graphdef, state = nnx.split(learned(offset=2))
    grad = jax.grad(lambda state: nnx.merge(graphdef, state).embed(jnp.zeros((1, 12, 8)), jnp.arange(12)).sum())(state)
    np.testing.assert_array_equal(grad["table"][...], np.r_[np.zeros((2, 8)), np.ones((12, 8))])


@pytest.mark.parametrize("name", ["alibi", "learned", "rope", "sinusoidal"])
def test_positions_matter(name):
    # Reset or permuted positions without effect. (NoPE has none, by definition.)
    scheme = make_scheme(name, num_heads=4, head_dim=8, rngs=nnx.Rngs(0))
    x = inputs(scheme)
    plain = layer(scheme, x)
    for positions in (np.array([0, 1, 2, 3, 0, 1, 2, 3, 4]), np.array([4, 0, 7, 1, 8, 2, 6, 3, 5])):
        differ(layer(scheme, x, positions), plain)
    nope = make_scheme("nope", num_heads=4, head_dim=8)
    same(layer(nope, x, np.zeros(9, int)), layer(nope, x))


@pytest.mark.parametrize("hyper", [{"base": 500_000.0}, {"layout": "interleaved"}])
def test_rope_uses_its_hyper_parameters(hyper):
    # A base that is silently the default.
    plain = make_scheme("rope", num_heads=4, head_dim=8)
    x = inputs(plain)
    differ(layer(make_scheme("rope", num_heads=4, head_dim=8, **hyper), x), layer(plain, x), by=1e-4)


@pytest.mark.parametrize(("name", "dims", "hyper", "message"), [
    ("rope", {"head_dim": 7}, {}, "head_dim must be even; it is 7"),  # an odd number of channels
    ("sinusoidal", {"model_dim": 9}, {}, "model_dim must be even; it is 9"),
    ("sinusoidal", {"model_dim": 2}, {"exponent": "tensor2tensor"}, "model_dim of at least 4; it is 2"),
    ("rope", {}, {"base": 0.0}, "base is 0.0; it must be above 0"),
    ("sinusoidal", {}, {"base": -1.0}, "base is -1.0"),
    ("rope", {}, {"layout": "interleave"}, "Did you mean interleaved.*Known: half_split, interleaved"),
    ("sinusoidal", {}, {"layout": "half"}, "Known: concatenated, interleaved"),
    ("sinusoidal", {}, {"exponent": "papr"}, "Did you mean paper"),
    ("alibi", {}, {"max_bias": 0}, "max_bias is 0; it must be above 0"),
    ("alibi", {"num_heads": 0}, {}, "num_heads is 0; it must be at least 1"),
    ("learned", {}, {"max_length": 0}, "max_length is 0"),
    ("learned", {}, {"offset": -1}, "offset is -1; it must be a whole number of at least 0"),
    ("learned", {"rngs": None}, {}, "pass rngs"),
])
def test_bad_values_are_refused(name, dims, hyper, message):
    with pytest.raises(UserError, match=message):
        make_scheme(name, **{"num_heads": 2, "head_dim": 8, "rngs": nnx.Rngs(0)} | dims, **hyper)


def test_unknown_names_list_everything():
    with pytest.raises(ValueError, match="Unknown scheme 'ropee'. Did you mean rope") as error:
        make_scheme("ropee", num_heads=2, head_dim=8)
    assert all(name in str(error.value) for name in SCHEMES.names())
    # A mistyped or misplaced hyper-parameter that is silently ignored.
    with pytest.raises(ValueError, match="hyper-parameter of scheme rope: 'bse'. Did you mean base.*: base, fraction, layout"):
        make_scheme("rope", num_heads=2, head_dim=8, bse=1.0)
    with pytest.raises(ValueError, match="Unknown hyper-parameter of scheme nope.*Known: .none."):
        make_scheme("nope", num_heads=2, head_dim=8, base=1.0)


@pytest.mark.parametrize("name", ["learned", "sinusoidal"])
def test_embedded_positions_are_never_broadcast(name):
    # One position for all tokens.
    scheme = make_scheme(name, num_heads=2, head_dim=4, rngs=nnx.Rngs(0))
    for positions in (jnp.array([3]), jnp.zeros((1, 1, 5), int), jnp.zeros(5)):
        with pytest.raises(UserError, match=r"positions must be integers of shape \(5,\) or \(2, 5\)"):
            scheme.embed(jnp.zeros((2, 5, 8)), positions)


@pytest.mark.parametrize("name", SCHEMES.names())
def test_no_hyper_parameter_has_the_name_of_a_hook(name):
    """One would switch the other: a scheme's own `scale`, kept as an attribute, once became the factor on its logits."""
    hooks = {attribute for attribute in vars(Scheme) if not attribute.startswith("_")} - {"max_length"}
    assert not hooks & set(SCHEMES.hyper(name))


@pytest.mark.parametrize("name", SCHEMES.names())
def test_attention_divides_by_the_root_of_the_head_dim(name):
    """By default, whatever the scheme's hyper-parameters are called."""
    assert make_scheme(name, num_heads=4, head_dim=8, rngs=nnx.Rngs(0)).logit_scale is None
