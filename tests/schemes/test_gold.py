"""Every gold rotation, encoding, bias and attention output of another library or of the definition (float64), each on the path
that a model takes. `tests/data` has them rounded to float32, which with the rounding of one's own operations is what differs."""
import itertools
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from posjax.conformance.layer import backends
from posjax.schemes.attend import attend
from posjax.schemes.registry import make_scheme

DATA = pathlib.Path(__file__).parents[1] / "data"
ROTATIONS = json.loads((DATA / "rotary.json").read_text())["cases"]
ROTATED = np.load(DATA / "rotary.npz")
SINUSOIDS = np.load(DATA / "sinusoidal.npz")
OUTPUTS = np.load(DATA / "attention_outputs.npz")
T5_HYPER = {"num_buckets": 8, "max_distance": 16}
FIRE_SHORT = {"mlp_width": 8, "c": 1.7, "threshold": 8.0}

# Of each gold entry: the scheme, its hyper-parameters, the entry with its learned parameters or None.
ENTRIES = {
    "none": ("nope", {}, None),
    "bidirectional/none": ("nope", {}, None),
    "window3": ("nope", {}, None),
    "rope_half": ("rope", {}, None),
    "rope_interleaved": ("rope", {"layout": "interleaved"}, None),
    "rope_half_partial": ("rope", {"fraction": 0.5}, None),
    "alibi": ("alibi", {}, None),
    "alibi_window3": ("alibi", {}, None),
    "bidirectional/alibi_symmetric": ("alibi", {"learned": True}, None),
    "hard_alibi": ("hard_alibi", {}, None),
    "t5": ("t5", T5_HYPER, "t5"),
    "t5_unscaled": ("t5", T5_HYPER | {"scaled": False}, "t5"),
    "bidirectional/t5_unscaled": ("t5", T5_HYPER | {"scaled": False, "bidirectional": True}, "t5"),
    "kerple_log": ("kerple", {}, "kerple_log"),
    "kerple_power": ("kerple", {"kind": "power"}, "kerple_power"),
    "sandwich": ("sandwich", {"dim": 32}, None),
    "sandwich_from0": ("sandwich", {"dim": 32, "first_index": 0}, None),
    "fire": ("fire", {"mlp_width": 8}, "fire"),
    "fire_short_threshold": ("fire", FIRE_SHORT, "fire"),
    "fire_offset40": ("fire", FIRE_SHORT, "fire"),
}
NAMES = {"table": "table", "r1": "r1", "r2": "r2", "hidden_kernel": "w1", "hidden_bias": "b1", "out_kernel": "w2"}
# An entry is of 4 heads or of 6, those without a mask of 4 alone.
OF_HEADS = [(entry, heads) for entry in ENTRIES for heads in (4, 6) if f"H{heads}/{entry}/out" in OUTPUTS]


def close(actual, expected):
    """Agreement relative to the largest number: a small one that is a difference of large ones has their rounding."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def gold_scheme(entry, heads):
    name, hyper, learned = ENTRIES[entry]
    if entry == "hard_alibi" and heads == 6:
        hyper = {"windows": (1, 2, 3, 4)}
    scheme = make_scheme(name, num_heads=heads, head_dim=16, rngs=nnx.Rngs(0), **hyper)
    for mine, theirs in NAMES.items() if learned else ():
        if (key := f"H{heads}/{learned}/{theirs}") in OUTPUTS:
            value = OUTPUTS[key].T if theirs == "w2" else OUTPUTS[key]
            getattr(scheme, mine)[...] = jnp.asarray(value)
    if entry in ("fire_short_threshold", "fire_offset40"):
        scheme.threshold_factor[...] = jnp.float32(-0.75)
    return scheme


def test_every_gold_number_is_compared():
    of_entry = {f"H{heads}/{entry}/{name}" for entry, heads in OF_HEADS for name in ("out", "bias")}
    assert {key for key in OUTPUTS if key.endswith(("/out", "/bias"))} <= of_entry
    assert {entry for entry, _ in OF_HEADS} == ENTRIES.keys()


@pytest.mark.parametrize(("entry", "heads"), [pair for pair in OF_HEADS if f"H{pair[1]}/{pair[0]}/bias" in OUTPUTS])
def test_biases_are_those_of_the_definition(entry, heads):
    positions = jnp.arange(17) + (40 if entry == "fire_offset40" else 0)
    expected, actual = OUTPUTS[f"H{heads}/{entry}/bias"], gold_scheme(entry, heads).bias().block(positions, positions)
    if entry.startswith("fire"):
        actual = actual + OUTPUTS[f"H{heads}/fire/b2"][:, None, None]  # the same for all keys: left out here
    if not entry.startswith("bidirectional"):
        expected, actual = np.tril(expected), np.tril(actual)
    close(actual, expected)


@pytest.mark.parametrize(("entry", "heads"), OF_HEADS)
def test_attention_gives_the_outputs_of_the_definition(entry, heads):
    scheme, positions = gold_scheme(entry, heads), np.arange(17) + (40 if entry == "fire_offset40" else 0)
    q, k, v = (OUTPUTS[f"H{heads}/{name}"] for name in "qkv")
    expected = OUTPUTS[f"H{heads}/{entry}/out"]
    for backend, queries in itertools.product(backends(), (17, 1)):
        out = attend(scheme, q[:, -queries:], k, v, q_positions=positions[-queries:], k_positions=positions,
                     causal=not entry.startswith("bidirectional"), window=3 if entry.endswith("window3") else None,
                     backend=backend)
        close(out, expected[:, -queries:])


@pytest.mark.parametrize("case", ROTATIONS, ids=lambda case: case["name"])
def test_rotations_are_those_of_other_libraries(case):
    # Layout, base, share, scaling, or the positions of rows, lost on the path that rotates. Float32 phases are off by up to
    # 6e-3 at the far positions here; these are exact.
    q, k, positions = (ROTATED[f"{case['name']}/{name}"] for name in ("q", "k", "positions"))
    scheme = make_scheme(case["scheme"], num_heads=q.shape[2], head_dim=q.shape[3], **case["hyper"])
    for name, x, rotated in zip("qk", (q, k), scheme.rotate(q, k, positions, positions)):
        rotated = np.asarray(rotated)
        if case.get("output_order") == "deinterleaved":  # DeepSeek's: the same pairs, stored all evens first
            rotated = np.concatenate([rotated[..., 0::2], rotated[..., 1::2]], -1)
        close(rotated, ROTATED[f"{case['name']}/{name}_rot"])
        np.testing.assert_array_equal(rotated[..., case["rotary_dim"]:], x[..., case["rotary_dim"]:])


@pytest.mark.parametrize("key", [key for key in SINUSOIDS if key != "positions"])
def test_sinusoids_are_those_of_the_definition_and_of_other_libraries(key):
    source, dim, layout, exponent = key.split("/")
    expected = SINUSOIDS[key]
    positions = SINUSOIDS["positions"][: len(expected)]
    scheme = make_scheme("sinusoidal", num_heads=1, head_dim=int(dim), layout=layout, exponent=exponent)
    # The rows of M2M100 are those of its padding and one further on. Libraries compute the phase in float32.
    actual = scheme.encoding(jnp.asarray(positions + 2 * (source == "m2m_100")))
    tolerance = 1e-6 if source == "definition" else np.maximum(1e-6, 1.2e-7 * positions)[:, None]
    assert (np.abs(actual - expected) <= tolerance).all()
