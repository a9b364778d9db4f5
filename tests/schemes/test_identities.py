"""What follows from the formulas, over drawn shapes and positions, for every scheme that it applies to by what it overrides."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from posjax.models import decoder
from posjax.ops.rotary import apply_rotary
from posjax.schemes.attend import attend
from posjax.schemes.base import Scheme
from posjax.schemes.registry import SCHEMES, make_scheme
from posjax.schemes.rope_scaling import SCALINGS, Plain, inverse_frequencies, keys_of, scale

H = 3
L = 20  # original length of the extensions
DRAWS = [np.random.default_rng(seed) for seed in range(3)]
HOOKS = ("embed", "rotary", "rotate", "bias", "features", "logits", "values")


def extension(rope_type, head_dim=8, factor=3.0):
    """The hyper-parameters of `scaled_rope` for a type of scaling: those of its keys that have no default, and the factor."""
    ones = (1.0,) * (head_dim // 2)
    values = {"factor": factor, "original_max_position_embeddings": L, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "short_factor": ones, "long_factor": tuple(np.linspace(1, factor, head_dim // 2).tolist())}
    return {"rope_type": rope_type, **{key: value for key, value in values.items() if key in keys_of(rope_type)}}


# Every scheme by its defaults, and hyper-parameters that make another formula of it.
KINDS = [(name, {}) for name in SCHEMES.names()] + [
    ("alibi", {"learned": True}), ("kerple", {"kind": "power"}), ("p_rope", {"fraction": 0.5}),
    ("rope", {"layout": "interleaved", "base": 100.0}), ("rope", {"fraction": 0.5}), ("sandwich", {"first_index": 0}),
    ("sinusoidal", {"layout": "concatenated"}), ("sinusoidal", {"exponent": "tensor2tensor"}),
    ("sinusoidal", {"layout": "concatenated", "exponent": "tensor2tensor", "base": 100.0}),
    ("t5", {"bidirectional": True}), *(("scaled_rope", extension(kind)) for kind in SCALINGS
                                   if kind not in ("default", "proportional"))]


def make(name, hyper, head_dim=8):
    """A scheme whose parameters, some of which start at 0, have drawn values."""
    scheme = make_scheme(name, num_heads=H, head_dim=head_dim, rngs=nnx.Rngs(0), **hyper)
    rng = np.random.default_rng(0)
    for _, param in nnx.iter_graph(scheme):
        if isinstance(param, nnx.Param):
            param[...] = param[...] + jnp.asarray(rng.uniform(0, 0.5, param.shape), jnp.float32)
    return scheme


def overrides(scheme, *hooks):
    return any(getattr(type(scheme), hook) is not getattr(Scheme, hook) for hook in hooks)


def title(name, hyper):
    """The words among its hyper-parameters, or where there are none the numbers, tell a kind from others of its scheme."""
    words = {key: value for key, value in hyper.items() if isinstance(value, str)} or hyper
    return ",".join([name, *(f"{key}={value}" for key, value in words.items())])


MADE = {title(name, hyper): (name, hyper, make(name, hyper)) for name, hyper in KINDS}


def those(condition):
    """A test for each kind of scheme for which the condition holds."""
    chosen = [key for key, (*_, scheme) in MADE.items() if condition(scheme)]
    assert chosen
    return pytest.mark.parametrize("key", chosen)


def drawn(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def inner(q, k):
    """Products of all queries and keys, exactly: float64 `[B, H, Q, K]`."""
    return np.einsum("bqhd,bkhd->bhqk", *(np.asarray(x, np.float64) for x in (q, k)))


def size(q, k):
    """The products of the lengths of queries and keys: what the rounding of an inner product is relative to."""
    q, k = (np.linalg.norm(np.asarray(x, np.float64), axis=-1).transpose(0, 2, 1) for x in (q, k))
    return q[..., :, None] * k[..., None, :]


def within(scheme, shift, span):
    """A shift after which positions below `span` still exist."""
    return shift if scheme.max_length is None else min(shift, scheme.max_length - span)


@those(lambda scheme: scheme.relative and overrides(scheme, "rotary", "rotate") and scheme.logits is None)
def test_products_of_rotated_queries_and_keys_depend_on_the_distance_alone(key):
    *_, scheme = MADE[key]
    for rng in DRAWS:
        q, k = drawn(rng, 2, 5, H, 8), drawn(rng, 2, 9, H, 8)
        q_positions, k_positions = rng.integers(0, 60, 5), rng.integers(0, 60, 9)
        here = scheme.rotate(q, k, q_positions, k_positions)
        shift = within(scheme, int(rng.integers(1, 2**20)), 60)
        there = scheme.rotate(q, k, q_positions + shift, k_positions + shift)
        assert (np.abs(inner(*there) - inner(*here)) <= 1e-6 * size(*here)).all()


def rotations(scheme):
    """The rotations of a scheme: one, or where the length matters, within the original and far beyond it."""
    return [scheme.rotary(length) for length in ((None, 7 * L) if scheme.depends_on_length else (None,))]


@those(lambda scheme: scheme.rotary() is not None)
def test_a_rotation_by_two_positions_is_one_by_their_difference(key):
    # <R_m q, R_n k> = <q, R_(n-m) k>.
    for rotary in rotations(MADE[key][-1]):
        for rng in DRAWS:
            q, k = drawn(rng, 1, 6, H, 8), drawn(rng, 1, 6, H, 8)
            m, n = rng.integers(0, 2**22, (2, 6))
            both = [apply_rotary(x, positions, rotary) for x, positions in ((q, m), (k, n))]
            one = [apply_rotary(x, positions, rotary) for x, positions in ((q, 0 * m), (k, n - m))]
            left, right = (np.diagonal(inner(*pair), axis1=2, axis2=3) for pair in (both, one))
            assert (np.abs(left - right) <= 1e-6 * np.diagonal(size(*both), axis1=2, axis2=3)).all()


@those(lambda scheme: scheme.rotary() is not None)
def test_a_rotation_keeps_norms_but_for_its_amplitude(key):
    for rotary in rotations(MADE[key][-1]):
        for rng in DRAWS:
            x = drawn(rng, 2, 7, H, 8)
            rotated = np.asarray(apply_rotary(x, rng.integers(0, 2**24, 7), rotary), np.float64)
            r = rotary.rotary_dim
            norms = [np.linalg.norm(np.asarray(y, np.float64)[..., :r], axis=-1) for y in (x, rotated)]
            np.testing.assert_allclose(norms[1], norms[0] * float(rotary.amplitude), rtol=5e-7)


@those(lambda scheme: overrides(scheme, "embed") and not nnx.state(scheme, nnx.Param))
def test_encodings_further_on_are_a_fixed_linear_map_of_those_here(key):
    # The map to k positions further on, found from some positions, holds for all others, and is a rotation.
    *_, scheme = MADE[key]
    for rng in DRAWS:
        k, positions = int(rng.integers(1, 1000)), rng.integers(0, 2**20, 400)

        def encoding(positions):
            return np.asarray(scheme.embed(np.zeros((1, 400, scheme.model_dim), np.float32), positions)[0], np.float64)
        here, there = encoding(positions), encoding(positions + k)
        found, *_ = np.linalg.lstsq(here[:200], there[:200], rcond=None)
        np.testing.assert_allclose(here[200:] @ found, there[200:], rtol=0, atol=1e-6)
        np.testing.assert_allclose(found @ found.T, np.eye(scheme.model_dim), rtol=0, atol=1e-6)


def attended(scheme, x, positions, **options):
    """A layer's attention, of inputs that are `q`, `k` and `v` beside one another."""
    x = scheme.embed(x, positions)
    q, k, v = np.split(np.asarray(x).reshape(*x.shape[:2], H, -1), 3, axis=-1)
    return np.asarray(attend(scheme, q, k, v, q_positions=positions, k_positions=positions,
                             features=scheme.features(x[..., :scheme.model_dim]), **options))


@those(lambda scheme: scheme.relative and not overrides(scheme, "embed"))
def test_attention_is_blind_to_a_shift_of_all_positions(key):
    *_, scheme = MADE[key]
    for rng in DRAWS:
        x = drawn(rng, 2, 11, 3 * H * 8)
        positions = np.sort(rng.choice(100, (2, 11), replace=False), axis=-1)
        here = attended(scheme, x, positions)
        for shifts in ((1, 0), (10**6, 17), (2**20, 10**6)):
            shift = np.array([[within(scheme, shift, 100)] for shift in shifts])
            np.testing.assert_allclose(attended(scheme, x, positions + shift), here, rtol=0, atol=5e-6)
        # Phases kept in a model's bfloat16 would collide from 257 on; of float32, they leave the rounding of q, k and outputs.
        half = [attended(scheme, jnp.asarray(x, jnp.bfloat16), positions + by).astype(np.float32) for by in (0, shift)]
        np.testing.assert_allclose(*half, rtol=0, atol=0.05)


def rotates_alike(extended, plain, head_dim, last, rng):
    q, k = drawn(rng, 2, 5, H, head_dim), drawn(rng, 2, 5, H, head_dim)
    positions = rng.integers(0, last, (2, 5))
    for actual, expected in zip(extended.rotate(q, k, positions, positions), plain.rotate(q, k, positions, positions)):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("head_dim", [8, 48])
@pytest.mark.parametrize("rope_type", [rope_type for rope_type in SCALINGS if "factor" in keys_of(rope_type)])
def test_every_extension_at_factor_1_is_the_plain_rotation_bit_for_bit(rope_type, head_dim):
    hyper = extension(rope_type, head_dim, factor=1.0)
    options = {key: value for key, value in hyper.items() if key != "rope_type"}
    for length in (None, 1, L, L + 1, 1000):
        inv_freq, amplitude = scale(Plain(1e4, head_dim, head_dim, length), rope_type, options)
        np.testing.assert_array_equal(inv_freq, inverse_frequencies(head_dim, 1e4))
        assert amplitude == 1.0
    name, hyper = ("p_rope", {"factor": 1.0, "fraction": 1.0}) if rope_type == "proportional" else ("scaled_rope", hyper)
    extended, plain = make(name, hyper, head_dim), make("rope", {}, head_dim)
    for rng in DRAWS:
        rotates_alike(extended, plain, head_dim, 2**20, rng)


@those(lambda scheme: scheme.depends_on_length and scheme.rotary() is not None and scheme.rotary().amplitude == 1)
def test_a_dynamic_extension_within_the_original_length_is_the_plain_rotation_bit_for_bit(key):
    # A static base for the longest, or a ratio below 1.
    _, hyper, scheme = MADE[key]
    options = {key: value for key, value in hyper.items() if key != "rope_type"}
    for length in (None, 1, L // 2, L):
        inv_freq, _ = scale(Plain(1e4, 8, 8, length), hyper["rope_type"], options)
        np.testing.assert_array_equal(inv_freq, inverse_frequencies(8, 1e4))
    for rng in DRAWS:
        rotates_alike(scheme, make("rope", {}), 8, L, rng)


@those(lambda scheme: overrides(scheme, "bias"))
def test_biases_of_a_decode_step_are_a_row_of_the_full_matrix(key):
    # Built from the number of queries, it would be constant for one.
    bias = MADE[key][-1].bias()
    for rng in DRAWS:
        positions = np.sort(rng.choice(1000, (2, 23), replace=False), axis=-1).astype(np.int32)
        full = np.asarray(bias.block(jnp.asarray(positions), jnp.asarray(positions)))
        for step in (22, int(rng.integers(0, 22))):
            row = bias.block(jnp.asarray(positions[:, step:step + 1]), jnp.asarray(positions))
            # Bit for bit, unless a matrix product, whose sums depend on the shape, is what it is made of.
            summed = "dot_general" in str(jax.make_jaxpr(bias.block)(positions, positions))
            np.testing.assert_allclose(row, full[..., step:step + 1, :], rtol=0, atol=summed * 1e-6 * np.abs(full).max())


@those(lambda scheme: not scheme.causal_only)
def test_without_a_mask_only_positions_tell_the_order_of_tokens(key, monkeypatch):
    monkeypatch.setattr(decoder, "attend", functools.partial(attend, causal=False))
    name, hyper, _ = MADE[key]
    config = decoder.DecoderConfig(vocab_size=11, width=24, depth=2, num_heads=H)
    scheme = make(name, hyper)
    model = decoder.Decoder(config, scheme, rngs=nnx.Rngs(1))
    tokens, order = np.random.default_rng(0).integers(0, 11, (2, 9)), np.random.default_rng(1).permutation(9)
    error = np.abs(np.asarray(model(tokens[:, order])) - np.asarray(model(tokens))[:, order]).max()
    if overrides(scheme, *HOOKS):
        assert error > 1e-2
    else:
        assert error < 1e-5
