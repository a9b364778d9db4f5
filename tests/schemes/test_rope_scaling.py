"""RoPE scaling on the host: the numbers of other libraries, published constants, boundaries, and what is refused."""
import json
import math
import pathlib

import numpy as np
import pytest

import posjax
from posjax.errors import UserError
from posjax.schemes.rope_scaling import SCALINGS, inverse_frequencies, yarn_bounds

GOLD = json.loads((pathlib.Path(__file__).parents[1] / "data" / "rope_scaling.json").read_text())["entries"]
PLAIN = inverse_frequencies(64, 1e4)
# Every scaling with the keys that it needs, but for the factor: head_dim 64, base 1e4, original length 256.
KEYS = {
    "default": {}, "linear": {}, "ntk": {}, "proportional": {},
    "dynamic": {"original_max_position_embeddings": 256}, "dynamic_paper": {"original_max_position_embeddings": 256},
    "ntk_by_parts": {"original_max_position_embeddings": 256}, "yarn": {"original_max_position_embeddings": 256},
    "llama3": {"original_max_position_embeddings": 256, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"original_max_position_embeddings": 256, "short_factor": [1.0] * 32, "long_factor": [1.0] * 32},
}
NO_FACTOR = {"default", "dynamic_paper"}


def scaled(rope_type, head_dim=64, base=1e4, *, length=None, reach=None, **keys):
    return posjax.rope_parameters(head_dim, {"rope_type": rope_type, "rope_theta": base, **keys}, length=length,
                                  max_position_embeddings=reach)


def base_of(inv_freq):
    """The base of frequencies that fall geometrically."""
    return inv_freq[1] ** (-len(inv_freq))


@pytest.mark.parametrize("entry", GOLD, ids=lambda entry: entry["name"])
def test_frequencies_equal_those_of_the_hugging_face_library(entry):
    # What others got wrong: the switch, the bounds, the amplitude, the share, the base, types of layers.
    given = entry["rope_parameters"][entry["layer_type"]] if entry["layer_type"] else entry["rope_parameters"]
    inv_freq, attention_factor = posjax.rope_parameters(entry["head_dim"], given, length=entry["length"],
                                                        max_position_embeddings=entry["max_position_embeddings"])
    assert inv_freq.dtype == np.float64
    assert isinstance(attention_factor, float)
    np.testing.assert_allclose(inv_freq, entry["inv_freq"], rtol=1e-9)
    np.testing.assert_allclose(attention_factor, entry["attention_factor"], rtol=1e-12)
    # DeepSeek's second factor, never applied.
    if "softmax_scale_multiplier" in entry:
        np.testing.assert_allclose(posjax.softmax_scale_multiplier(given), entry["softmax_scale_multiplier"], rtol=1e-12)


def test_every_scaling_is_tested_here():
    assert set(KEYS) == set(SCALINGS)


def test_published_bases():
    for factor, base in ((4.0, 40889.94243248622), (8.0, 82684.62264056221)):
        inv_freq, _ = scaled("ntk", 128, factor=factor)
        np.testing.assert_allclose(base_of(inv_freq), base, rtol=1e-12)
        np.testing.assert_allclose(inv_freq[-1], inverse_frequencies(128, 1e4)[-1] / factor, rtol=1e-12)
    for length, base in ((2048, 1e4), (2049, 10009.920711785855), (4096, 30527.7367488067), (8192, 72195.86008650938)):
        np.testing.assert_allclose(base_of(scaled("dynamic", 128, factor=2.0, length=length, reach=2048)[0]), base, rtol=1e-12)
    np.testing.assert_allclose(base_of(scaled("dynamic_paper", 128, length=4096, reach=2048)[0]), 20221.261689737912, rtol=1e-12)


@pytest.mark.parametrize(("dim", "base", "original", "raw", "used"), [
    (128, 1e4, 4096, (20.9445, 45.0269), (20, 46)),
    (128, 1e6, 32768, (23.5959, 39.6509), (23, 40)),
    (64, 1.5e5, 4096, (8.0928, 17.3980), (8, 18)),
    (64, 1e4, 4096, (10.4722, 22.5134), (10, 23)),
    (64, 1e4, 131072, (22.5134, 34.5546), (22, 35)),  # past the last pair, 31, and still so
])
def test_bounds_of_yarns_ramp(dim, base, original, raw, used):
    # Bounds always rounded, and another clamp.
    np.testing.assert_allclose(yarn_bounds(dim, base, original, truncate=False), raw, atol=5e-5)
    assert yarn_bounds(dim, base, original) == used


def test_yarn_with_a_tiny_original_length_scales_what_never_turns():
    # The library's upper bound turns negative there, and it then scales nothing.
    inv_freq, _ = scaled("yarn", 16, factor=4.0, original_max_position_embeddings=2)
    np.testing.assert_array_equal(inv_freq[1:], inverse_frequencies(16, 1e4)[1:] / 4)


def test_amplitudes():
    for factor, amplitude in ((16.0, 1.277259), (4.0, 1.138629), (32.0, 1.346574), (40.0, 1.368888)):
        keys = {"factor": factor, "original_max_position_embeddings": 4096}
        assert scaled("yarn", **keys)[1] == pytest.approx(amplitude, abs=5e-7)
        # An explicit one that is ignored: it replaces the formula.
        assert scaled("yarn", attention_factor=1.0, mscale=0.5, mscale_all_dim=1.0, **keys)[1] == 1.0
        assert scaled("yarn", ramp="rotations", **keys)[1] == scaled("yarn", **keys)[1]
    long = {**KEYS["longrope"], "original_max_position_embeddings": 4096}
    assert scaled("longrope", reach=131072, **long)[1] == pytest.approx(1.1902380714238083, rel=1e-15)
    assert scaled("longrope", reach=131072, factor=4.0, **long)[1] == math.sqrt(1 + math.log(4) / math.log(4096))
    for factor in (0.5, 1.0):  # an amplitude although nothing is extended
        assert scaled("longrope", factor=factor, **long)[1] == 1.0
    # Equal mscales leave no amplitude, and the softmax takes it all.
    for mscale, multiplier in ((1.0, 1.87385), (0.707, 1.58963)):
        deepseek = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40, "mscale": mscale, "mscale_all_dim": mscale,
                    "original_max_position_embeddings": 4096}
        assert posjax.rope_parameters(64, deepseek)[1] == 1.0
        assert posjax.softmax_scale_multiplier(deepseek) == pytest.approx(multiplier, abs=5e-6)
    assert posjax.softmax_scale_multiplier({"rope_type": "yarn", "factor": 40, "mscale": 0.707}) == 1.0


def test_llama_3_is_ntk_by_parts_with_its_own_bounds():
    keys = {"factor": 8.0, "original_max_position_embeddings": 8192}
    llama, _ = scaled("llama3", 128, 5e5, low_freq_factor=1.0, high_freq_factor=4.0, **keys)
    by_parts, _ = scaled("ntk_by_parts", 128, 5e5, beta_slow=1.0, beta_fast=4.0, **keys)
    np.testing.assert_allclose(llama, by_parts, rtol=1e-12)
    plain = inverse_frequencies(128, 5e5)
    assert np.flatnonzero(llama != plain)[0] == 29
    assert np.flatnonzero(llama == plain / 8)[0] == 35
    gold = [2.16657076e-03, 1.37189357e-03, 1.78507813e-04, 3.06892599e-07]
    np.testing.assert_allclose(llama[[29, 30, 34, 63]], gold, rtol=5e-9)


@pytest.mark.parametrize(("head_dim", "base", "original", "factor", "excess"), [
    (128, 1e4, 4096, 16.0, 2.04), (128, 1e6, 32768, 4.0, 0.71), (64, 1.5e5, 4096, 32.0, 3.28), (64, 1e4, 4096, 40.0, 3.28)])
def test_the_ramps_of_yarn_differ_by_what_is_known(head_dim, base, original, factor, excess):
    keys = {"factor": factor, "original_max_position_embeddings": original}
    index, rotations = (scaled("yarn", head_dim, base, ramp=ramp, **keys)[0] for ramp in ("index", "rotations"))
    assert (index / rotations).max() - 1 == pytest.approx(excess, abs=0.006)
    np.testing.assert_array_equal(rotations, scaled("ntk_by_parts", head_dim, base, **keys)[0])


def test_longrope_switches_beyond_the_original_length():
    # A mixture of both lists, or the long one always: it is one list for a sequence, by its length, the long from L + 1.
    keys = {**KEYS["longrope"], "long_factor": list(np.linspace(1, 4, 32)), "factor": 4.0}
    for length in (None, 1, 256):
        np.testing.assert_array_equal(scaled("longrope", length=length, **keys)[0], PLAIN)
    np.testing.assert_array_equal(scaled("longrope", length=257, **keys)[0], PLAIN / np.linspace(1, 4, 32))


@pytest.mark.parametrize("rope_type", sorted(set(KEYS) - {"longrope"}))
def test_a_share_of_the_channels_is_a_smaller_head(rope_type):
    # A share that some type does not read. p-RoPE's is of another kind: the pairs of the whole head remain.
    keys = KEYS[rope_type] | ({} if rope_type in NO_FACTOR else {"factor": 2.0})
    partial, _ = scaled(rope_type, 64, length=600, partial_rotary_factor=0.5, **keys)
    if rope_type == "proportional":
        np.testing.assert_array_equal(partial, np.where(np.arange(32) < 16, PLAIN / 2, 0))
    else:
        np.testing.assert_array_equal(partial, scaled(rope_type, 32, length=600, **keys)[0])


def test_the_older_spelling():
    newer = scaled("longrope", factor=4.0, **KEYS["longrope"])
    keys = {"factor": 4.0, **{key: KEYS["longrope"][key] for key in ("short_factor", "long_factor")}}
    for older in ({"type": "su", "rope_theta": 1e4, "original_max_position_embeddings": 256, **keys},
                  {"rope_theta": 1e4, "original_max_position_embeddings": 256, "rope_scaling": {"type": "longrope", **keys}},
                  {"rope_theta": 1e4, "rope_scaling": {"type": "su", "rope_type": "longrope", **keys,
                                                       "original_max_position_embeddings": 256}}):
        inv_freq, amplitude = posjax.rope_parameters(64, older)
        np.testing.assert_array_equal(inv_freq, newer[0])
        assert amplitude == newer[1]
    for older in ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 5e5}):
        np.testing.assert_array_equal(posjax.rope_parameters(64, older)[0], inverse_frequencies(64, 5e5))


@pytest.mark.parametrize("rope_type", sorted(KEYS))
def test_a_key_that_would_not_be_used_is_named(rope_type):
    # A key that is read by nobody.
    keys = KEYS[rope_type] | ({} if rope_type in NO_FACTOR else {"factor": 2.0})
    for key in ("attn_factor", "mrope_section", *({"beta_fast", "low_freq_factor", "truncate"} - allowed(rope_type))):
        with pytest.raises(ValueError, match=f"rope_type {rope_type} does not use the key '{key}'"):
            scaled(rope_type, **keys, **{key: 1.0})


def allowed(rope_type):
    return {"yarn": {"beta_fast", "truncate"}, "ntk_by_parts": {"beta_fast"}, "llama3": {"low_freq_factor"}}.get(rope_type, set())


@pytest.mark.parametrize(("given", "message"), [
    ({"rope_type": "yarm"}, "Unknown rope_type 'yarm'. Did you mean yarn.*Known: default, dynamic, .*, yarn"),
    ({"type": "mrope"}, "Unknown rope_type 'mrope'"),
    ({"rope_type": None}, "Unknown rope_type"),
    ({"rope_type": "linear", "type": "dynamic"}, "rope_type is given twice, as 'dynamic' and as 'linear'"),
    ({"rope_theta": None}, "rope_theta is missing. In an older config.json it stands beside"),
    ({"rope_theta": -1.0}, "rope_theta is -1.0; it must be a number above 0"),
    ({"rope_theta": "10000"}, "rope_theta is '10000'"),
    ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; it must be above 0 and at most 1"),
    ({"partial_rotary_factor": 0.4}, "head_dim 64 with partial_rotary_factor 0.4 gives 25"),
    ({"rope_type": "linear"}, "rope_type linear needs the key 'factor'"),
    ({"rope_type": "linear", "factor": None}, "rope_type linear needs the key 'factor'"),
    ({"rope_type": "linear", "factor": 0.5}, "factor is 0.5; it must be at least 1"),
    ({"rope_type": "linear", "factor": float("nan")}, "factor is nan"),
    ({"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings, the length that the model .* is missing"),
    ({"rope_type": "yarn", "original_max_position_embeddings": 8}, "factor is missing, and so is max_position_embeddings"),
    ({"rope_type": "yarn", "factor": 4.0, **KEYS["yarn"], "beta_fast": 1}, "beta_fast is 1; it must be above beta_slow 1"),
    ({"rope_type": "yarn", "factor": 4.0, **KEYS["yarn"], "truncate": 1}, "truncate is 1; it must be true or false"),
    ({"rope_type": "yarn", "factor": 4.0, **KEYS["yarn"], "ramp": "idx"}, "Unknown ramp of yarn 'idx'.*Known: index, rotations"),
    ({"rope_type": "llama3", "factor": 4.0, **KEYS["llama3"], "high_freq_factor": 1.0}, "high_freq_factor is 1; it must be"),
    ({"rope_type": "longrope", **KEYS["longrope"], "long_factor": [1.0]}, "long_factor has 1 numbers.*each of the 32"),
    ({"rope_type": "longrope", **KEYS["longrope"], "long_factor": [0.0] * 32}, "long_factor must be a list of numbers above 0"),
    ({"rope_type": "ntk", "factor": 2.0, "partial_rotary_factor": 1 / 32}, "it needs 4 rotated channels; there are 2"),
    ({"rope_scaling": {}, "head_dim": 64}, "The key 'head_dim' beside rope_scaling is not used"),
    ({"rope_scaling": {"rope_theta": 5e5}}, "rope_theta is given twice, as 10000.0 and as 500000.0"),
])
def test_what_cannot_be_is_refused(given, message):
    with pytest.raises(UserError, match=message):
        posjax.rope_parameters(64, {"rope_theta": 1e4} | given)


def test_refusals_that_need_other_arguments():
    with pytest.raises(UserError, match="one mapping for each type of layer, full_attention, sliding_attention; give one"):
        posjax.rope_parameters(64, {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}})
    with pytest.raises(UserError, match="original_max_position_embeddings is 256 and max_position_embeddings 512, but a dynamic"):
        scaled("dynamic", factor=2.0, reach=512, **KEYS["dynamic"])
    for head_dim, gives in ((7, 7), (1, "at least 2")):  # odd dimensions
        with pytest.raises(UserError, match=f"{gives}"):
            scaled("default", head_dim)
    with pytest.raises(UserError, match="length is 0; it must be a number of at least 1"):
        scaled("default", length=0)
    with pytest.raises(UserError, match="must be a mapping"):
        posjax.rope_parameters(64, None)
