"""Rotation: exact angles at far positions, layouts, dtypes, and what it costs."""
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posjax.errors import UserError
from posjax.ops.rotary import Rotary, apply_rotary
from posjax.schemes.rope import inverse_frequencies


@pytest.mark.parametrize("base", [10.0, 1e4, 5e5, 1e6, 1e8])
def test_angles_are_exact_at_far_positions(base):
    # A phase of float32 is off by 0.5 rad at 2**24. One of float64 is off by less than 1e-8.
    drawn = np.random.default_rng(0).integers(0, 2**24 + 1, 2000)
    positions = np.unique(np.concatenate([drawn, np.arange(70), 2 ** np.arange(25), 2 ** np.arange(1, 25) - 1]))
    inv_freq = inverse_frequencies(128, base)
    angles = Rotary.from_inv_freq(inv_freq).angles(jnp.asarray(positions, jnp.int32))
    error = np.asarray(angles, np.float64) - positions[:, None] * inv_freq
    assert np.abs((error + np.pi) % (2 * np.pi) - np.pi).max() < 1e-6


def test_angles_of_far_and_negative_positions():
    positions = np.array([2**31 - 1, -1, -(2**20)])
    inv_freq = inverse_frequencies(64, 1e4)
    angles = Rotary.from_inv_freq(inv_freq).angles(jnp.asarray(positions, jnp.int32))
    error = np.asarray(angles, np.float64) - positions[:, None] * inv_freq
    assert np.abs((error + np.pi) % (2 * np.pi) - np.pi).max() < 1e-5


def test_bfloat16_rotation_is_the_float32_one_rounded():
    # Faults 2 to 5: frequencies in bf16 are off by radians at 4095.
    rotary = Rotary.from_inv_freq(inverse_frequencies(64, 1e4))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 2, 64)), jnp.bfloat16)
    position = jnp.array([4095])
    expected = apply_rotary(x.astype(jnp.float32), position, rotary).astype(jnp.bfloat16)
    np.testing.assert_array_equal(apply_rotary(x, position, rotary), expected)


def test_sines_are_of_positions_and_not_of_heads_nor_once_more_for_gradients():
    # What a rotation costs is measured by `posjax bench rope`; this is what makes it little.
    rotary, x = Rotary.from_inv_freq(inverse_frequencies(16, 1e4)), jnp.ones((3, 5, 4, 16))

    def gradient(x):
        return jax.vjp(lambda x: apply_rotary(x, jnp.arange(5), rotary), x)[1](x)
    assert re.findall(r"f32\[([\d,]+)\] = round\b", str(jax.make_jaxpr(gradient)(x))) == ["1,5,8"]


def test_cosines_and_sines_are_those_of_the_angles():
    # In every eighth of a turn and on their borders; `jnp.cos` of a rounded angle is off by 4e-7.
    rotary = Rotary.from_inv_freq(2 * np.pi * np.asarray([2.0**-12, 3.1 / 64]))
    positions = np.arange(-4096, 4097)
    exact = 2 * np.pi * positions[:, None] * np.asarray([2.0**-12, 3.1 / 64])
    for actual, expected in zip(rotary.cos_sin(jnp.asarray(positions)), (np.cos(exact), np.sin(exact))):
        np.testing.assert_allclose(actual, expected, atol=3e-7)


def test_layouts_are_a_permutation_of_channels_apart():
    # Fault 27: interleaved channel 2k is half-split channel k, 2k + 1 is k + r/2.
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, 2, 8)), jnp.float32)
    to_half = np.concatenate([np.arange(0, 8, 2), np.arange(1, 8, 2)])
    inv_freq, positions = inverse_frequencies(8, 100.0), jnp.arange(5)
    interleaved = apply_rotary(x, positions, Rotary.from_inv_freq(inv_freq, layout="interleaved"))
    half = apply_rotary(x[..., to_half], positions, Rotary.from_inv_freq(inv_freq))
    np.testing.assert_allclose(interleaved[..., to_half], half, rtol=0, atol=1e-6)


def test_amplitude_scales_what_is_rotated():
    x = jnp.ones((1, 3, 1, 8))
    inv_freq = inverse_frequencies(4, 100.0)
    plain, scaled = (apply_rotary(x, jnp.arange(3), Rotary.from_inv_freq(inv_freq, amplitude=a)) for a in (1.0, 1.5))
    np.testing.assert_allclose(scaled[..., :4], 1.5 * plain[..., :4], rtol=1e-6)
    np.testing.assert_array_equal(scaled[..., 4:], x[..., 4:])


def test_positions_of_another_shape_are_refused():
    # Broadcast, one position would have served all tokens.
    rotary = Rotary.from_inv_freq(inverse_frequencies(8, 1e4))
    for positions in (jnp.arange(1), jnp.zeros((3, 5), int), jnp.zeros(5)):
        with pytest.raises(UserError, match=r"positions must be integers of shape \(5,\) or \(2, 5\)"):
            apply_rotary(jnp.ones((2, 5, 1, 8)), positions, rotary)


def test_a_rotation_is_a_pytree():
    rotary = Rotary.from_inv_freq(inverse_frequencies(8, 1e4), layout="interleaved")
    again = jax.jit(lambda r: r)(rotary)
    assert again.layout == "interleaved"
    np.testing.assert_array_equal(again.turns, rotary.turns)
