"""The decoder with a cache, and with blocks that differ."""
import jax
import numpy as np
import pytest
import tiny
from flax import nnx

from posjax.compilations import compilations
from posjax.models.decoder import Decoder, DecoderConfig
from posjax.schemes.layers import Layers, make_layers
from posjax.schemes.registry import make_scheme
from posjax.schemes.temperature import make_temperature

SIZES = DecoderConfig(vocab_size=11, width=16, depth=3, num_heads=2)
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 16)).astype(np.int32)


@pytest.fixture(autouse=True)
def quick():
    with tiny.quick_compilation():
        yield


def maker(name, **hyper):
    return lambda: make_scheme(name, num_heads=2, head_dim=8, model_dim=16, rngs=nnx.Rngs(0), **hyper)


def decoder(layers):
    return Decoder(SIZES, layers, rngs=nnx.Rngs(1))


def alternating():
    """Every kind of difference at once: a window, another base, a block of NoPE with a temperature."""
    return make_layers(maker("rope"), 3, window=4, other=maker("nope", temperature=make_temperature("log_n", length=4)),
                       other_every=2)


def cached(model, tokens, *, prompt, options=None, **given):
    """Logits of the prompt in one call and of the others one by one."""
    cache = model.new_cache(tokens.shape[1] + 2, batch_size=tokens.shape[0], **(options or {}))
    out, cache = model.decode(tokens[:, :prompt], cache, **given)
    outs = [out]
    for t in range(prompt, tokens.shape[1]):
        out, cache = model.decode(tokens[:, t:t + 1], cache)
        outs.append(out)
    return np.concatenate(outs, 1)


@pytest.mark.parametrize("layers", [maker("learned"), maker("t5"), alternating], ids=["learned", "t5", "alternating"])
def test_decoding_from_a_cache_equals_the_full_pass(layers):
    model = decoder(layers())
    np.testing.assert_allclose(cached(model, TOKENS, prompt=6), model(TOKENS), atol=2e-5)


@pytest.mark.parametrize(("options", "atol"), [({"page_size": 3, "num_pages": 12}, 2e-5), ({"quantise": "int8"}, 0.1)],
                         ids=["paged", "int8"])
def test_pages_and_8_bits_serve_blocks_with_and_without_a_window(options, atol):
    model = decoder(alternating())
    np.testing.assert_allclose(cached(model, TOKENS, prompt=6, options=options), model(TOKENS), atol=atol)


@pytest.mark.parametrize("layers", [maker("learned"), alternating], ids=["learned", "alternating"])
def test_rows_of_different_lengths_decode_as_if_alone(layers):
    """And one takes the place of another that has ended."""
    model = decoder(layers())
    full, cache = model(TOKENS), model.new_cache(18, batch_size=2)

    def decode(*rows):  # (row of TOKENS, first, last) of each, padded to 6
        nonlocal cache
        tokens = np.stack([np.pad(TOKENS[i, first:last], (0, 6 - last + first)) for i, first, last in rows])
        out, cache = model.decode(tokens, cache, counts=np.asarray([last - first for _, first, last in rows]))
        for logits, (i, first, last) in zip(out, rows):
            np.testing.assert_allclose(logits[:last - first], full[i, first:last], atol=2e-5)
    decode((0, 0, 6), (1, 0, 2))
    decode((0, 6, 7), (1, 2, 3))
    cache = tuple(c.release(np.asarray([True, False])) for c in cache)
    decode((1, 0, 4), (1, 3, 3))
    decode((1, 4, 5), (1, 3, 4))


def test_windows_in_all_blocks_decode_without_end():
    model = decoder(make_layers(maker("rope"), 3, window=4))
    cache, outs = model.new_cache(batch_size=2), []
    for tokens in np.split(TOKENS, [6, 12, 13], 1)[:3]:
        out, cache = model.decode(tokens, cache)
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs, 1), model(TOKENS)[:, :13], atol=2e-5)
    with pytest.raises(ValueError, match="needs a size"):
        decoder(alternating()).new_cache(batch_size=2)


def test_a_left_padded_prompt_decodes_as_if_alone():
    model, pad = decoder(alternating()), 3
    tokens, index = np.concatenate([np.zeros((2, pad), np.int32), TOKENS[:, pad:]], 1), np.arange(6)
    given = {"positions": np.broadcast_to(np.maximum(index - pad, 0), (2, 6)),
             "segment_ids": np.broadcast_to((index >= pad).astype(np.int32), (2, 6))}
    alone = model(np.concatenate([TOKENS[:, pad:], tokens[:, :pad]], 1))
    np.testing.assert_allclose(cached(model, tokens, prompt=6, **given)[:, pad:], alone[:, :-pad], atol=2e-5)


def test_one_compilation_serves_all_decode_steps():
    graphdef, state = nnx.split(decoder(alternating()))
    step = jax.jit(lambda state, tokens, cache: nnx.merge(graphdef, state).decode(tokens, cache))
    cache = nnx.merge(graphdef, state).new_cache(16, batch_size=2)
    with compilations() as compiled:
        for t in range(16):
            _, cache = step(state, TOKENS[:, t:t + 1], cache)
    assert compiled.count("jit(<lambda>)") == 1
    assert np.isnan(step(state, TOKENS[:, :1], cache)[0]).all()  # a 17th token has no room


def test_a_full_cache_is_refused():
    model = decoder(maker("nope")())
    with pytest.raises(ValueError, match="room for 4 tokens"):
        model.decode(TOKENS[:, :5], model.new_cache(4, batch_size=2))


def test_the_blocks_alternate():
    layers = make_layers(maker("rope"), 5, window=4, other=maker("rope", base=1e6), other_every=3, other_window=9)
    assert [(scheme.base, window) for scheme, window in map(layers.__getitem__, range(5))] == [
        (1e4, 4), (1e4, 4), (1e6, 9), (1e4, 4), (1e4, 4)]
    assert len(layers.schemes) == 2


def test_a_window_is_the_only_difference_that_it_makes():
    x = TOKENS[:, :6]
    full, windowed = (decoder(make_layers(maker("alibi"), 3, window=w))(x) for w in (None, 2))
    np.testing.assert_allclose(full[:, :2], windowed[:, :2], atol=1e-6)
    assert np.abs(full[:, 2:] - windowed[:, 2:]).max() > 1e-3


@pytest.mark.parametrize("parameters, count", [("published", 1), ("shared", 1), ("own", 3)])
def test_blocks_share_what_a_scheme_learns_or_do_not(parameters, count):
    model = decoder(make_layers(maker("t5"), 3, parameters=parameters))
    graphdef, state = nnx.split(model)
    gradient = jax.grad(lambda state: nnx.merge(graphdef, state)(TOKENS).var())(state)
    leaves = jax.tree.leaves(gradient["layers"])
    assert len(leaves) == count
    assert all(np.any(leaf != 0) for leaf in leaves)


@pytest.mark.parametrize("options, words", [
    ({"parameters": "mine"}, "published"),
    ({"window": 0}, "window is 0"),
    ({"other_every": 4}, "other_every is 4; it must be from 0"),
    ({"other_window": 3}, "no block is of the other kind"),
])
def test_bad_layers_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        make_layers(maker("rope"), 3, other=maker("nope"), **options)


def test_only_one_scheme_adds_to_the_embeddings():
    with pytest.raises(ValueError, match="no second of them"):
        make_layers(maker("learned"), 3, parameters="own")
    with pytest.raises(ValueError, match="made for 2 blocks, but the decoder has 3"):
        decoder(Layers.of(maker("rope")(), 2))
