"""RoPE in part, proportional and scaled, as schemes: lengths known on the device, and what is refused."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posjax
from posjax import conformance
from posjax.compilations import compilations
from posjax.conformance.expect import differ
from posjax.conformance.layer import inputs
from posjax.errors import UserError
from posjax.ops.rotary import apply_rotary
from posjax.schemes.registry import make_scheme

L = 6
AT_LENGTH = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": L},
    "dynamic_paper": {"rope_type": "dynamic_paper", "original_max_position_embeddings": L},
    "longrope": {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": L,
                 "short_factor": (1.0, 1.0, 1.0, 1.0), "long_factor": (1.0, 1.5, 2.0, 3.0)},
}
# The suite's sequences are of 9 tokens, its packed documents of 4 and 5, and a row ends at 19: on both sides of 6 and 12.
CONFORMING = [("rope", {"fraction": 0.5, "layout": "interleaved"}), ("scaled_rope", AT_LENGTH["dynamic"]),
              ("scaled_rope", AT_LENGTH["longrope"] | {"original_max_position_embeddings": 12})]


def scaled(head_dim=8, **hyper):
    return make_scheme("scaled_rope", num_heads=4, head_dim=head_dim, **hyper)


def turns(rotary):
    return np.asarray(rotary.turns, np.float64) * 2.0**-32 + np.asarray(rotary.rest, np.float64)


@functools.cache
def subject(case):
    name, hyper = CONFORMING[case]
    return conformance.subject(name, **hyper)


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("case", range(len(CONFORMING)), ids=["fraction", "dynamic", "longrope"])
def test_conforms(case, check):
    check(subject(case))


def test_p_rope_leaves_its_slowest_pairs_alone():
    scheme, x = make_scheme("p_rope", num_heads=4, head_dim=8, fraction=0.5), np.ones((1, 3, 4, 8), np.float32)
    rotated, _ = scheme.rotate(x, x, np.arange(3), np.arange(3))
    still = [2, 3, 6, 7]  # pairs (2, 6) and (3, 7) of four
    np.testing.assert_array_equal(rotated[..., still], x[..., still])
    plain, _ = make_scheme("rope", num_heads=4, head_dim=8).rotate(x, x, np.arange(3), np.arange(3))
    np.testing.assert_array_equal(rotated[..., [0, 1, 4, 5]], plain[..., [0, 1, 4, 5]])


@pytest.mark.parametrize("base", [1e4, 1e6])
@pytest.mark.parametrize("kind", AT_LENGTH)
def test_a_length_of_the_device_gives_the_angles_of_the_host(kind, base):
    # In float32 the changed frequencies would be off by 1e-7 of themselves: by a radian at 2**24.
    scheme = scaled(base=base, **AT_LENGTH[kind])
    lengths = (1, L, L + 1, 7 * L, 100_000, 2**24)
    traced = jax.jit(scheme.rotary)
    with compilations() as compiled:
        rotaries = [traced(jnp.int32(length)) for length in lengths]
    assert compiled.count("jit(rotary)") == 1
    for length, rotary in zip(lengths, rotaries, strict=True):
        positions = np.array([1, length // 2, length - 1])
        inv_freq, _ = scheme.frequencies(length)
        error = np.asarray(rotary.angles(jnp.asarray(positions)), np.float64) - positions[:, None] * inv_freq
        assert np.abs((error + np.pi) % (2 * np.pi) - np.pi).max() < 1e-6


@pytest.mark.parametrize("kind", AT_LENGTH)
def test_the_length_of_each_row_decides(kind):
    # Selection by capacity, or off by one: at L still plain bit for bit, at L + 1 not; and never by the longest row.
    scheme, plain = scaled(**AT_LENGTH[kind]), make_scheme("rope", num_heads=4, head_dim=8).rotary()
    rows = scheme.rotary(jnp.array([1, L, L + 1, 9]))
    known = jax.jit(lambda: scheme.rotary(jnp.array([1, L, L + 1, 9])))()  # to the compiler, which must not use it
    np.testing.assert_allclose(turns(known), turns(rows), rtol=0, atol=1e-14)
    for row in (0, 1):
        np.testing.assert_array_equal(rows.turns[row], plain.turns)
        np.testing.assert_array_equal(rows.rest[row], plain.rest)
    for row, length in ((2, L + 1), (3, 9)):
        np.testing.assert_allclose(turns(rows)[row], turns(scheme.rotary(length)), rtol=0, atol=1e-14)
        differ(turns(rows)[row], turns(plain), by=1e-6)


@pytest.mark.parametrize("kind", AT_LENGTH)
def test_keys_are_rotated_by_the_length_of_now(kind):
    # A step past L with the keys of the cache rotated as they were before it.
    scheme = scaled(**AT_LENGTH[kind])
    assert scheme.depends_on_length and not scheme.relative
    x = inputs(scheme, 1)[:, :, None, :8].repeat(L + 1, 1)
    for length in (L, L + 1):
        positions = np.arange(length)
        _, keys = scheme.rotate(x[:, :1], x[:, :length], positions[-1:], positions)
        expected = apply_rotary(jnp.asarray(x[:, :length]), jnp.asarray(positions), scheme.rotary(length))
        np.testing.assert_allclose(keys, expected, rtol=0, atol=1e-6)


def test_a_dynamic_extension_by_1_does_not_depend_on_the_length():
    scheme = scaled(rope_type="dynamic", factor=1.0, original_max_position_embeddings=L)
    assert scheme.relative and not scheme.depends_on_length


def test_scaling_counts_the_rotated_channels():
    hyper = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100, "mscale": 0.7}
    inv_freq, amplitude = scaled(64, fraction=0.5, base=1e5, **hyper).frequencies()
    expected = posjax.rope_parameters(64, {"rope_theta": 1e5, "partial_rotary_factor": 0.5, **hyper})
    np.testing.assert_array_equal(inv_freq, expected[0])
    assert amplitude == expected[1]


def test_an_amplitude_that_needs_another_factor_is_told():
    # Equal mscales without DeepSeek's softmax factor.
    with pytest.warns(UserWarning, match="softmax_scale_multiplier"):
        scaled(rope_type="yarn", factor=40.0, original_max_position_embeddings=100, mscale=1.0, mscale_all_dim=1.0)


@pytest.mark.parametrize(("name", "hyper", "message"), [
    ("rope", {"fraction": 0.3}, "rope's fraction is 0.3, which is 2.4 of head_dim 8; it must make an even number"),
    ("rope", {"fraction": 0.125}, "which is 1 of head_dim 8"),
    ("rope", {"fraction": 0.0}, "which is 0 of head_dim 8"),
    ("rope", {"fraction": 1.5}, "from 2 to 8"),
    ("p_rope", {"fraction": 0.3}, "p_rope's fraction is 0.3"),
    ("p_rope", {"factor": 0.5}, "factor is 0.5; it must be at least 1"),
    ("scaled_rope", {"rope_type": "yarm"}, "Unknown rope_type 'yarm'. Did you mean yarn"),
    ("scaled_rope", {"rope_type": "proportional"}, "p_rope"),
    ("scaled_rope", {"factor": 4.0}, "rope_type default does not use the key 'factor'; it uses none"),
    ("scaled_rope", {"rope_type": "linear", "factor": 4.0, "ramp": "rotations"}, "linear does not use the key 'ramp'"),
    ("scaled_rope", {"rope_type": "dynamic", "factor": 4.0}, "original_max_position_embeddings, .* is missing"),
    ("scaled_rope", {"rope_type": "longrope", "factor": 4.0, "short_factor": (1.0,) * 4}, "longrope needs the key 'long_factor'"),
])
def test_bad_values_are_refused(name, hyper, message):
    with pytest.raises(UserError, match=message):
        make_scheme(name, num_heads=2, head_dim=8, **hyper)
