"""Schemes whose logits mix content and position: gold numbers, definitions as double loops, starts, and what they refuse."""
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from posjax.errors import UserError
from posjax.schemes.attend import attend
from posjax.schemes.registry import make_scheme

GOLD = np.load(pathlib.Path(__file__).parents[1] / "data" / "content.npz")
NAMES = ["cope", "fox", "shaw", "transformer_xl"]
B, T, H, DH, D = 2, 9, 4, 8, 12

SHAW = {"key_table": "shaw/key_table", "value_table": "shaw/value_table"}
XL = {"u": "transformer_xl/u", "v": "transformer_xl/v", "w_r": "transformer_xl/w_r"}
# Of each gold entry: the scheme, its hyper-parameters, and the arrays of its learned parameters.
ENTRIES = {
    "shaw_keys": ("shaw", {"max_distance": 4, "value_vectors": False}, SHAW),
    "shaw_keys_values": ("shaw", {"max_distance": 4}, SHAW),
    "bidirectional/shaw_keys": ("shaw", {"max_distance": 4, "value_vectors": False}, SHAW),
    "transformer_xl": ("transformer_xl", {"dim": 32}, XL),
    "bidirectional/transformer_xl": ("transformer_xl", {"dim": 32}, XL),
    "cope": ("cope", {"max_position": 18}, {"table": "cope/table"}),
    "cope_divided": ("cope", {"max_position": 18, "divided": True}, {"table": "cope/table"}),
    "cope_clamped": ("cope", {"max_position": 5}, {"table": "cope_clamped/table"}),
    "cope_clamped_divided": ("cope", {"max_position": 5, "divided": True}, {"table": "cope_clamped/table"}),
}


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("entry", ENTRIES)
def test_outputs_are_those_of_the_definition(entry, heads):
    if entry.startswith("bidirectional") and heads == 6:
        pytest.skip("no gold numbers")
    name, hyper, learned = ENTRIES[entry]
    scheme = make_scheme(name, num_heads=heads, head_dim=16, rngs=nnx.Rngs(0), **hyper)
    for param, array in learned.items():
        if hasattr(scheme, param):
            getattr(scheme, param)[...] = jnp.asarray(GOLD[f"H{heads}/{array}"])
    q, k, v = (GOLD[f"H{heads}/{array}"] for array in "qkv")
    expected = GOLD[f"H{heads}/{entry}/out"]
    for backend, queries in (("reference", 17), ("dense", 17), ("dense", 1)):
        out = attend(scheme, q[:, -queries:], k, v, causal=not entry.startswith("bidirectional"), backend=backend)
        # Of another order of summing the softmax 4e-6, in float32.
        np.testing.assert_allclose(out, expected[:, -queries:], rtol=0, atol=2e-5)


def make(name, seed=0, **hyper):
    """A scheme with no parameter left at a start that hides its effect."""
    scheme = make_scheme(name, num_heads=H, head_dim=DH, model_dim=D, rngs=nnx.Rngs(seed), **hyper)
    if name == "cope":
        scheme.table[...] = 0.7 * jax.random.normal(jax.random.key(seed), scheme.table.shape)
    return scheme


def inputs(length=T, *, groups=H, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(B, length, *shape)).astype(np.float32) for shape in ((H, DH), (groups, DH), (groups, DH), (D,))]


def seen(segments, window):
    """bool `[B, T, T]`: earlier keys of the same segment, in a window."""
    lag = np.subtract.outer(np.arange(T), np.arange(T))
    return (lag >= 0) & (lag < window) & (segments[:, :, None] == segments[:, None, :])


def by_definition(q, k, v, visible, logit, value=lambda i, j: 0.0):
    """Attention in float64 as a double loop; `logit(b, h, i, j)` of a visible pair, `value(i, j)` added to the key's value."""
    out, group = np.zeros((*q.shape[:3], v.shape[-1])), q.shape[2] // k.shape[2]
    for b, i, h in np.ndindex(q.shape[:3]):
        keys = np.flatnonzero(visible[b, i])
        weights = np.exp([logit(b, h, i, j) for j in keys])
        rows = np.stack([v[b, j, h // group].astype(np.float64) + value(i, j) for j in keys])
        out[b, i, h] = weights @ rows / weights.sum()
    return out


# Tokens of another document in between, too: those a running sum could take along.
SEGMENTS = np.array([[0] * 4 + [1] * 5, [0, 1, 0, 0, 1, 1, 0, 1, 0]])
MASKS = {"q_segment_ids": SEGMENTS, "k_segment_ids": SEGMENTS, "window": 6}
VISIBLE = seen(SEGMENTS, 6)


@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_fox_forgets_by_the_tokens_since_the_key_that_the_query_sees(backend):
    scheme, (q, k, v, x) = make("fox", bias_init=0.5), inputs(groups=2)
    gate = x.astype(np.float64) @ np.asarray(scheme.gate.kernel[...], np.float64) + 0.5
    log_f = -np.log1p(np.exp(-gate))

    def logit(b, h, i, j):
        return q[b, i, h] @ k[b, j, h // 2] / DH ** 0.5 + sum(log_f[b, m, h] for m in range(j + 1, i + 1) if VISIBLE[b, i, m])
    out = attend(scheme, q, k, v, features=scheme.features(x), backend=backend, **MASKS)
    np.testing.assert_allclose(out, by_definition(q, k, v, VISIBLE, logit), rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_cope_counts_only_what_the_query_sees(backend):
    scheme, (q, k, v, _) = make("cope", max_position=4), inputs(groups=2)
    table = np.asarray(scheme.table[...], np.float64)

    def logit(b, h, i, j):
        def product(m):
            return q[b, i, h].astype(np.float64) @ k[b, m, h // 2] / DH ** 0.5
        count = min(sum(1 / (1 + np.exp(-product(m))) for m in range(j, i + 1) if VISIBLE[b, i, m]), 3)
        low, high = table[int(np.floor(count))], table[int(np.ceil(count))]
        return product(j) + q[b, i, h] @ (low + (count - np.floor(count)) * (high - low))
    out = attend(scheme, q, k, v, backend=backend, **MASKS)
    np.testing.assert_allclose(out, by_definition(q, k, v, VISIBLE, logit), rtol=0, atol=5e-6)


@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_shaw_adds_to_the_values_by_clipped_distance_of_positions(backend):
    scheme, (q, k, v, _) = make("shaw", max_distance=2), inputs(groups=2)
    keys, values = (np.asarray(table[...], np.float64) for table in (scheme.key_table, scheme.value_table))
    positions = np.array([3, 0, 1, 5, 6, 7, 2, 9, 14])

    def row(i, j):
        return np.clip(positions[j] - positions[i], -2, 2) + 2
    out = attend(scheme, q, k, v, q_positions=positions, k_positions=positions, backend=backend, **MASKS)
    expected = by_definition(q, k, v, VISIBLE, lambda b, h, i, j: q[b, i, h] @ (k[b, j, h // 2] + keys[row(i, j)]) / DH ** 0.5,
                             lambda i, j: values[row(i, j)])
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_document_is_untouched_by_another_before_and_between_its_tokens(name):
    # Running sums and counts over all keys could carry the one into the other.
    scheme, mine = make(name), np.r_[20:24, 70:75]
    segments, positions = np.zeros((B, 79), int), np.arange(79)
    segments[:, mine], positions[mine] = 1, np.arange(9)

    @jax.jit
    def run(q, k, v, x):
        out = attend(scheme, q, k, v, features=scheme.features(x), q_positions=positions, k_positions=positions,
                     q_segment_ids=segments, k_segment_ids=segments)
        return out[:, mine]
    given = inputs(79)
    changed = [100 * other for other in inputs(79, seed=1)]
    for theirs, y in zip(changed, given):
        theirs[:, mine] = y[:, mine]
    out = run(*given)
    np.testing.assert_array_equal(run(*changed), out)
    alone = jax.jit(lambda q, k, v, x: attend(scheme, q, k, v, features=scheme.features(x)))
    np.testing.assert_allclose(alone(*(y[:, mine] for y in given)), out, rtol=0, atol=5e-6)


def test_transformer_xl_is_relative_at_a_million():
    # A float32 product of position and frequency is off by 3e-2 rad there.
    scheme, (q, k, v, _) = make("transformer_xl"), inputs()
    far = np.arange(T) + 1_000_000
    np.testing.assert_allclose(attend(scheme, q, k, v, q_positions=far, k_positions=far), attend(scheme, q, k, v),
                               rtol=0, atol=1e-5)


def test_gates_are_float32_whatever_the_model():
    x = jnp.asarray(inputs()[3], jnp.bfloat16)
    scheme = make("fox", bias_init=6.0)
    features = scheme.features(x)
    assert features.dtype == jnp.float32
    np.testing.assert_allclose(features, scheme.features(x.astype(jnp.float32)), rtol=1e-6)


def test_starts():
    big = {"num_heads": 8, "head_dim": 64, "model_dim": 256, "rngs": nnx.Rngs(0)}
    shaw = make_scheme("shaw", **big)
    for table in (shaw.key_table[...], shaw.value_table[...]):
        bound = (6 / (33 + 64)) ** 0.5
        assert table.shape == (33, 64)
        assert 0.97 * bound < jnp.abs(table).max() <= bound
    assert np.abs(np.asarray(shaw.key_table[...] - shaw.value_table[...])).max() > 0.1
    xl = make_scheme("transformer_xl", **big)
    for param, std in ((xl.u, 0.02), (xl.v, 0.02), (xl.w_r, 256 ** -0.5)):
        assert abs(float(param[...].std()) / std - 1) < 0.1
    assert not jnp.any(make_scheme("cope", **big).table[...])
    # Half is left after one token, or after 103.
    x = jnp.zeros((1, 1, 256))
    for bias, tokens in ((0.0, 1), (5.0, 103.2)):
        log_f = make_scheme("fox", bias_init=bias, **big).features(x)
        np.testing.assert_allclose(tokens * log_f, np.log(0.5), rtol=1e-3)


@pytest.mark.parametrize(("name", "hyper", "message"), [
    ("shaw", {"max_distance": 0}, "shaw's max_distance is 0; it must be at least 1"),
    ("transformer_xl", {"dim": 7}, "transformer_xl's dim is 7; it must be even, at least 2"),
    ("transformer_xl", {"dim": 0}, "dim is 0; it must be even"),
    ("cope", {"max_position": 1}, "cope's max_position is 1; it must be at least 2"),
])
def test_bad_values_are_refused(name, hyper, message):
    with pytest.raises(UserError, match=message):
        make(name, **hyper)


@pytest.mark.parametrize("name", NAMES)
def test_what_has_no_numbers_to_start_from_is_refused(name):
    with pytest.raises(UserError, match=f"scheme {name} has parameters: pass rngs"):
        make_scheme(name, num_heads=4, head_dim=8)


@pytest.mark.parametrize("name", ["cope", "fox"])
def test_what_is_defined_by_the_tokens_between_needs_the_causal_mask(name):
    scheme, (q, k, v, x) = make(name), inputs()
    with pytest.raises(UserError, match="defined under the causal mask only"):
        attend(scheme, q, k, v, features=scheme.features(x), causal=False)
