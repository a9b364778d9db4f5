"""xPos: the numbers of other libraries, the center that changes nothing, and the end of a dtype's range."""
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax import conformance
from posjax.conformance.expect import differ, same
from posjax.conformance.layer import inputs, project
from posjax.errors import UserError
from posjax.schemes.attend import attend
from posjax.schemes.registry import make_scheme

DATA = pathlib.Path(__file__).parents[1] / "data"
GOLD = np.load(DATA / "xpos.npz")  # queries, keys and float64 scores of the posjax-gold shared set; they depend on no center
INPUTS = np.load(DATA / "attention_outputs.npz")  # queries, keys and values of its attention outputs, which are in xpos.npz
CENTERS = [None, 0, 6, 40]
REACH = 26_770  # positions from the center in float32, with the defaults


def xpos(head_dim=8, num_heads=4, **hyper):
    return make_scheme("xpos", num_heads=num_heads, head_dim=head_dim, **hyper)


@functools.cache
def fixed():
    return conformance.subject("xpos", center=3, layout="half_split", scale_base=32.0)


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_conforms_with_a_fixed_center(check):
    check(fixed())


@pytest.mark.parametrize("center", CENTERS)
@pytest.mark.parametrize(("case", "scale_base"), [("xpos_even_T12_B512", 512.0), ("xpos_odd_T13_B16", 16.0)])
def test_scores_equal_other_libraries(case, scale_base, center):
    # A decay of the wrong sign, base or pair; a center on one side only.
    q, k, positions, scores = (GOLD[f"{case}/{name}"] for name in ("q", "k", "positions", "scores_f64"))
    rotated = xpos(q.shape[3], q.shape[2], scale_base=scale_base, center=center).rotate(q, k, positions, positions)
    found = np.einsum("bqhd,bkhd->bhqk", *(np.asarray(x, np.float64) for x in rotated))
    # Keys after their query grow with the distance, so to the size of the row's largest score.
    assert (np.abs(found - scores) / np.abs(scores).max(-1, keepdims=True)).max() < 1e-6
    if center == 6:
        np.testing.assert_allclose(rotated[0], GOLD[f"{case}/q_rot_f64"], rtol=1e-6, atol=2e-6)
        np.testing.assert_allclose(rotated[1], GOLD[f"{case}/k_rot_f64"], rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("heads", [4, 6])
def test_attention_equals_a_float64_oracle(heads):
    q, k, v = (INPUTS[f"H{heads}/{name}"].astype(np.float32) for name in "qkv")
    scheme = xpos(16, heads, scale_base=24.0)
    np.testing.assert_allclose(attend(scheme, q, k, v), GOLD[f"H{heads}/out"], rtol=0, atol=2e-6)
    np.testing.assert_allclose(attend(scheme, q[:, -1:], k, v), GOLD[f"H{heads}/decode_last"], rtol=0, atol=2e-6)


@pytest.mark.parametrize("first", [0, REACH - 8, 2 * REACH - 8])
def test_scores_do_not_depend_on_the_center_however_far(first):
    q, k, _ = project(xpos(), inputs(xpos()))
    positions = np.arange(9) + first
    centers = [center for center in (None, 0, 9_000, REACH) if first + 8 <= (2 * REACH if center is None else center + REACH)]
    assert None in centers and REACH in centers
    near = [np.asarray(x, np.float64) for x in xpos(center=0).rotate(q, k, np.arange(9), np.arange(9))]
    expected = np.einsum("bqhd,bkhd->bhqk", *near)
    for center in centers:
        found = np.einsum("bqhd,bkhd->bhqk", *(np.asarray(x, np.float64) for x in xpos(center=center).rotate(
            q, k, positions, positions)))
        # Sums of eight products of up to 10, of factors rounded three times (94 octaves in float32 would be off by 4e-5).
        np.testing.assert_allclose(found, expected, rtol=0, atol=1.2e-5)


@pytest.mark.parametrize("center", [None, 5])
@pytest.mark.parametrize(("dtype", "reach"), [(jnp.float32, REACH), (jnp.bfloat16, REACH), (jnp.float16, 2974)])
def test_the_range_ends_with_an_error_or_nan_and_never_before(center, dtype, reach):
    # Overflow of one side times underflow of the other: NaN, or attention to nothing, without a word.
    scheme, last = xpos(center=center), (2 * reach if center is None else center + reach)
    if dtype == jnp.float32:
        assert scheme.max_length == last + 1
    x = jnp.asarray(inputs(xpos(), 2, batch=1).reshape(1, 2, 4, 8) * 10, dtype)
    inside, beyond = np.array([0, last]), np.array([0, last + 1])
    for rotate in (scheme.rotate, jax.jit(scheme.rotate)):
        for side in rotate(x, x, inside, inside):
            assert side.dtype == dtype and jnp.isfinite(side).all() and (side != 0).all()
    with pytest.raises(UserError, match=f"from xpos's center; .* {jnp.dtype(dtype)} holds its amplitudes up to {reach}"):
        scheme.rotate(x, x, beyond, beyond)
    with pytest.raises(UserError, match="from xpos's center"):  # known while x is traced
        jax.jit(lambda x: scheme.rotate(x, x, beyond, beyond))(x)
    assert jnp.isnan(jnp.stack(jax.jit(scheme.rotate)(x, x, beyond, beyond))).any()


def test_a_moving_center_needs_raw_keys_and_a_fixed_one_does_not():
    assert xpos().depends_on_length and not xpos(center=0).depends_on_length
    x = project(xpos(), inputs(xpos()))[1]
    longer, shorter = (xpos().rotate(x[:, :n], x[:, :n], np.arange(n), np.arange(n))[1] for n in (9, 5))
    differ(longer[:, :5], shorter)
    longer, shorter = (xpos(center=0).rotate(x[:, :n], x[:, :n], np.arange(n), np.arange(n))[1] for n in (9, 5))
    same(longer[:, :5], shorter)


@pytest.mark.parametrize(("hyper", "message"), [
    ({"scale_base": 0.0}, "scale_base is 0.0; it must be above 0"),
    ({"scale_base": 0.01}, "scale_base is 0.01; with gamma 0.4 a single position leaves float32"),
    ({"gamma": 0.0}, "gamma is 0.0; it must be above 0"),
    ({"center": -1}, f"center is -1; it must be from 0 to {REACH}, or None"),
    ({"center": REACH + 1}, f"center is {REACH + 1}; it must be from 0"),
    ({"center": "middle"}, "center of the scheme xpos is 'middle'; it must be int | None"),
    ({"layout": "half"}, "Unknown pair layout 'half'"),
    ({"head_dim": 7}, "xpos turns pairs of channels, so head_dim must be even; it is 7"),
])
def test_bad_values_are_refused(hyper, message):
    with pytest.raises(UserError, match=message):
        xpos(**hyper)


def test_a_key_after_its_query_is_refused():
    q, k, v = project(xpos(), inputs(xpos()))
    with pytest.raises(UserError, match="XPos is defined under the causal mask only"):
        attend(xpos(), q, k, v, causal=False)
