"""The numbers of an inspection, against closed forms and against attention itself."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posjax
from posjax.inspection import panels
from posjax.schemes.base import Scheme
from posjax.schemes.registry import SCHEMES, make_scheme

H, DH = 4, 16
THETA = 10_000.0 ** (-np.arange(DH // 2) / (DH // 2))


def inspect(name, *, train_length=32, length=None, head=0, **hyper):
    scheme = make_scheme(name, num_heads=H, head_dim=DH, rngs=nnx.Rngs(0), **hyper)
    return panels_of(scheme, train_length=train_length, length=length, head=head)


def panels_of(scheme, **options):
    return {panel.name: panel for panel in posjax.inspect(scheme, **options).panels}


class Forgetting(Scheme):
    """Content and position mix, by what a token brings: half its mean is forgotten at each token between."""
    relative = True

    def features(self, x):
        return 1 + x.mean(-1)

    def logits(self, q, k, q_positions, k_positions, *, visible, scale, features):
        total = jnp.cumsum(features, 1)
        behind = total[:, None, -q.shape[1]:, None] - total[:, None, None, :]
        return scale * jnp.einsum("bqhd,bkhd->bhqk", q, k) - behind


class Doubling(Scheme):
    """A transform of another kind: more channels, and another in each head."""
    relative = True

    def rotate(self, q, k, q_positions, k_positions):
        phase = jnp.arange(1.0, 1 + self.num_heads)[None, :, None] / 100
        q, k = ((x[0], p[:, None, None] * phase) for x, p in ((q, q_positions), (k, k_positions)))
        return tuple(jnp.concatenate([x * jnp.cos(a), x * jnp.sin(a)], -1)[None] for x, a in (q, k))


def test_alibis_bias_is_its_slope_times_the_distance():
    panel = inspect("alibi")["bias"]
    assert [s.head for s in panel.series] == list(range(H)) and {s.query for s in panel.series} == {None}
    for s, slope in zip(panel.series, posjax.alibi_slopes(H)):
        assert s.x[0] == 0 and s.x[-1] == 8 * 32 - 1
        np.testing.assert_allclose(s.y, -slope * s.x, rtol=1e-6)


def test_ropes_score_is_the_mean_cosine():
    [s] = inspect("rope", length=100_000)["score"].series
    assert s.head is None and s.x[-1] == 99_999
    np.testing.assert_allclose(s.y, np.cos(s.x[:, None] * THETA).mean(1), atol=3e-6)


def test_ropes_score_is_the_mean_over_directions():
    """As the title of its panel says, also where a part of the channels is rotated."""
    [s] = inspect("rope", fraction=0.5)["score"].series
    scheme = make_scheme("rope", num_heads=1, head_dim=DH, fraction=0.5)
    basis = jnp.eye(DH)[:, None, None, :]  # the mean over any orthogonal frame is that over all directions
    q, k = scheme.rotate(basis, basis, jnp.array([7]), jnp.array([0]))
    np.testing.assert_allclose(s.y[s.x == 7], (q * k).sum(-1).mean(), atol=1e-6)


def test_ropes_wavelengths():
    [s] = inspect("rope")["wavelengths"].series
    np.testing.assert_allclose(s.y, 2 * np.pi / THETA, rtol=1e-9)


def test_an_extension_is_shown_beside_what_it_extends():
    found = inspect("scaled_rope", rope_type="linear", factor=4.0, train_length=None, original_max_position_embeddings=None)
    before, after = found["wavelengths"].series
    assert before.before and not after.before
    np.testing.assert_allclose(after.y, 4 * before.y, rtol=1e-9)
    np.testing.assert_allclose(before.y, 2 * np.pi / THETA, rtol=1e-9)
    before, after = found["score"].series
    np.testing.assert_allclose(after.y[after.x == 8], before.y[before.x == 2], atol=1e-6)


def test_an_amplitude_is_in_score_and_label():
    scheme = make_scheme("scaled_rope", num_heads=H, head_dim=DH, rope_type="yarn", factor=4.0,
                         original_max_position_embeddings=64)
    found = posjax.inspect(scheme)
    assert (found.train_length, found.length) == (64, 512)
    score, waves = (next(p for p in found.panels if p.name == name) for name in ("score", "wavelengths"))
    amplitude = 0.1 * np.log(4) + 1
    assert waves.series[1].label == f"extended, amplitude {amplitude:.6g}"
    np.testing.assert_allclose([s.y[0] for s in score.series], [1, amplitude**2], rtol=1e-6)


def test_a_scheme_that_depends_on_length_is_shown_at_both():
    scheme = make_scheme("scaled_rope", num_heads=H, head_dim=DH, rope_type="dynamic", factor=2.0,
                         original_max_position_embeddings=64)
    found = panels_of(scheme, length=256)
    before, short, long = found["wavelengths"].series
    assert (short.label, long.label) == ("at length 64", "at length 256")
    np.testing.assert_array_equal(short.y, before.y)
    np.testing.assert_allclose(long.y, 2 * np.pi / scheme.frequencies(256)[0], rtol=1e-9)
    before, short, long = found["score"].series
    assert (short.query, long.query) == (63, 255)
    np.testing.assert_allclose(long.y, np.cos(long.x[:, None] * scheme.frequencies(256)[0]).mean(1), atol=3e-6)


def test_pairs_that_stand_still_have_no_wavelength():
    before, after = inspect("p_rope", fraction=0.5, factor=2.0)["wavelengths"].series
    assert np.isinf(after.y[4:]).all()
    np.testing.assert_allclose(after.y[:4], 4 * np.pi / THETA[:4], rtol=1e-9)
    assert [s.before for s in inspect("p_rope")["wavelengths"].series] == [False]


def test_a_bias_that_depends_on_the_query_is_shown_for_two():
    scheme = make_scheme("fire", num_heads=H, head_dim=DH, rngs=nnx.Rngs(0), threshold=8.0)
    series = panels_of(scheme, train_length=16, length=64)["bias"].series
    assert {(s.head, s.query) for s in series} == {(h, query) for h in range(H) for query in (15, 63)}
    block = scheme.bias().block(jnp.array([63]), jnp.arange(64))
    [far] = [s for s in series if (s.head, s.query) == (2, 63)]
    np.testing.assert_allclose(far.y, np.asarray(block)[2, 0, 63 - far.x], atol=1e-6)


def test_sinusoidal_embeddings_have_the_inner_product_of_their_distance():
    short, long = inspect("sinusoidal")["embedding"].series
    theta = 10_000.0 ** (-np.arange(H * DH // 2) / (H * DH // 2))
    for s in (short, long):
        np.testing.assert_allclose(s.y, np.cos(s.x[:, None] * theta).sum(1), atol=1e-4)


def test_learned_positions_end_where_the_table_does():
    scheme = make_scheme("learned", num_heads=H, head_dim=DH, rngs=nnx.Rngs(0), max_length=40)
    found = posjax.inspect(scheme)
    assert (found.train_length, found.length) == (40, 40)
    embedding, square = found.panels
    table = np.asarray(scheme.table[...], np.float64)
    [s] = embedding.series
    np.testing.assert_allclose(s.y, table[39 - s.x] @ table[39], rtol=1e-6)
    assert len(square.series) == 40 and square.name == "embedding_map"


def test_what_position_adds_to_mixed_logits_is_a_mean_with_its_spread():
    scheme = Forgetting(num_heads=H, head_dim=DH)
    content = panels_of(scheme, train_length=4, length=17)["content"]
    assert [s.head for s in content.series] == list(range(H))
    for s in content.series:
        # The features of the tokens between: mean 1, variance 1 / model_dim each.
        np.testing.assert_allclose(s.y, -s.x, atol=5 * np.sqrt(16 / (H * DH) / panels.DRAWS))
        np.testing.assert_allclose(s.spread, np.sqrt(s.x / (H * DH)), rtol=0.5, atol=1e-5)


def test_another_transform_is_shown_by_what_it_does():
    found = panels_of(Doubling(num_heads=H, head_dim=DH), train_length=4, length=9)
    assert "wavelengths" not in found
    for head, s in enumerate(found["score"].series):
        np.testing.assert_allclose(s.y, np.cos((head + 1) * s.x / 100), atol=1e-6)


def test_a_temperature_is_shown_and_in_the_map():
    scheme = make_scheme("rope", num_heads=H, head_dim=DH, temperature=posjax.make_temperature("log_n", length=8))
    found = panels_of(scheme, train_length=8, length=64)
    [s] = found["temperature"].series
    np.testing.assert_allclose(s.y, np.maximum(1, np.log(s.x + 1) / np.log(8)), rtol=1e-6)
    rows = found["map"].series
    np.testing.assert_allclose(rows[63].y[63], DH**0.5 * np.log(64) / np.log(8), rtol=1e-6)


@pytest.mark.parametrize("name, hyper", [("rope", {}), ("t5", {"scaled": False}), ("fire", {})])
def test_the_map_is_what_attention_sees(name, hyper):
    """The softmax of its rows are the weights of the attention that a model runs."""
    scheme = make_scheme(name, num_heads=H, head_dim=DH, rngs=nnx.Rngs(0), **hyper)
    rows = panels_of(scheme, head=2)["map"].series
    ones = jnp.ones((1, DH, H, DH))
    v = jnp.broadcast_to(jnp.eye(DH)[None, :, None, :], ones.shape)
    weights = np.asarray(jax.jit(lambda q, k, v: posjax.attend(scheme, q, k, v))(ones, ones, v))[0, :, 2]
    for i, row in enumerate(rows[:DH]):
        assert row.x.tolist() == list(range(i + 1))
        np.testing.assert_allclose(jax.nn.softmax(row.y), weights[i, :i + 1], atol=1e-6)


@pytest.mark.parametrize("name", SCHEMES.names())
def test_every_scheme_can_be_inspected(name):
    found = inspect(name, train_length=8, length=20, head=1)
    assert found and any(name in ("map", "embedding_map") for name in found)
    assert len(found) > 1 or name == "nope"
    for panel in found.values():
        assert len({s.label for s in panel.series}) == len(panel.series)
        for s in panel.series:
            assert s.x.shape == s.y.shape and not np.isnan(s.y).any() and (s.spread is None or s.spread.shape == s.y.shape)


@pytest.mark.parametrize("options, says", [
    ({"train_length": 0}, "train_length is 0; it must be at least 1"),
    ({"train_length": 8, "length": 7}, "length is 7; it must be at least train_length, 8"),
    ({"head": H}, "head is 4; the scheme has heads 0 to 3"),
    ({"head": -1}, "head is -1"),
    ({"length": 17}, "length is 17, but the scheme has positions 0 to 15"),
    ({"train_length": 17}, "train_length is 17, but the scheme has positions 0 to 15"),
])
def test_what_cannot_be_shown_is_told(options, says):
    scheme = make_scheme("learned", num_heads=H, head_dim=DH, rngs=nnx.Rngs(0), max_length=16)
    with pytest.raises(posjax.UserError, match=says):
        posjax.inspect(scheme, **options)
