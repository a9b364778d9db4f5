"""Generation against a slow one without a cache, its draws against probabilities, and what it refuses."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posjax
from posjax.compilations import compilations
from posjax.errors import UserError
from posjax.models.generation import draw, generate
from posjax.schemes.layers import make_layers
from posjax.schemes.registry import make_scheme

V = 11
PROMPTS = [[1, 2, 3, 4, 5], [7], [3, 9, 3]]


def decoder(name, depth=1, window=None, **hyper):
    def make():
        return make_scheme(name, num_heads=2, head_dim=8, model_dim=16, rngs=nnx.Rngs(0), **hyper)
    config = posjax.DecoderConfig(vocab_size=V, width=16, depth=depth, num_heads=2)
    model = posjax.Decoder(config, make_layers(make, depth, window=window), rngs=nnx.Rngs(1))
    graphdef, state = nnx.split(model)
    # An untrained decoder repeats the token that it reads; this one does not.
    state["blocks"] = jax.tree.map(lambda leaf: leaf * 4, state["blocks"])
    return nnx.merge(graphdef, state)


def slowly(model, prompt, count):
    """The most likely tokens, each by a pass over the whole sequence; what follows in the array is hidden by causality."""
    logits, tokens = jax.jit(lambda tokens: model(tokens)[0]), np.zeros((1, 9), np.int32)
    tokens[0, :len(prompt)] = prompt
    for n in range(len(prompt), len(prompt) + count):
        tokens[0, n] = logits(tokens)[n - 1].argmax()
    return tokens[0, len(prompt):len(prompt) + count].tolist()


@pytest.mark.parametrize(("name", "options"), [
    ("rope", {"depth": 2}), ("alibi", {"depth": 2, "window": 3}), ("learned", {"depth": 2, "max_length": 9}), ("fox", {}),
], ids=lambda value: value if isinstance(value, str) else "")
def test_greedy_tokens_are_those_of_the_full_pass_whatever_the_other_prompts(name, options):
    model = decoder(name, **options)
    found = generate(model, PROMPTS, max_new_tokens=4)
    assert [row.tolist() for row in found] == [slowly(model, prompt, 4) for prompt in PROMPTS]
    assert len({token for row in found for token in row.tolist()}) > 2  # else any mistake would give the same


def test_a_row_ends_with_its_stop_token_and_the_others_go_on():
    model = decoder("rope")
    whole = [row.tolist() for row in generate(model, PROMPTS, max_new_tokens=6)]
    stop = whole[0][2]
    for row, full in zip(generate(model, PROMPTS, max_new_tokens=6, stop=[stop, V - 1]), whole, strict=True):
        ends = [n + 1 for n, token in enumerate(full) if token in (stop, V - 1)]
        assert row.tolist() == full[:min(ends, default=6)]


def test_draws_have_the_probabilities_of_the_model():
    model, rows = decoder("rope"), 1000
    expected = np.asarray(jax.nn.softmax(model(np.asarray([[7, 2]], np.int32))[0, -1] / 2.0))
    found = np.concatenate(generate(model, np.tile([7, 2], (rows, 1)), max_new_tokens=1, temperature=2.0))
    share = np.bincount(found, minlength=V) / rows
    assert (np.abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / rows) + 1e-9).all()


def test_a_seed_and_a_row_decide_the_draws_alone():
    def tokens(prompts, **options):
        return [row.tolist() for row in generate(decoder("rope"), prompts, max_new_tokens=8, temperature=3.0, **options)]
    assert tokens(PROMPTS) == tokens(PROMPTS) != tokens(PROMPTS, seed=1)
    assert tokens(PROMPTS)[:1] == tokens(PROMPTS[:1])
    first, second = tokens([[1, 2], [1, 2]])
    assert first != second


@jax.jit
def draws(logits, options):
    return jax.vmap(lambda key: draw(key, logits, **options))(jax.random.split(jax.random.key(0), 400))


@pytest.mark.parametrize(("options", "allowed"), [
    ({"top_k": 1}, {2}), ({"top_k": 3}, {2, 0, 4}), ({"top_k": 99}, {0, 1, 2, 3, 4}),
    ({"top_p": 0.3}, {2}), ({"top_p": 0.6}, {2, 0}), ({"top_p": 1.0}, {0, 1, 2, 3, 4}), ({"top_k": 2, "top_p": 0.9}, {2, 0}),
])
def test_what_is_drawn_from(options, allowed):
    logits = jnp.log(jnp.array([0.3, 0.05, 0.4, 0.1, 0.15]))
    full = {"temperature": 1.0, "top_k": 5, "top_p": 1.0} | options
    assert set(draws(logits, full).tolist()) == allowed


def test_one_compilation_for_a_bucket():
    model = decoder("rope")
    generate(model, PROMPTS, max_new_tokens=5, temperature=1.0)
    with compilations() as compiled:
        generate(model, [[1] * 16, [2], [3, 4]], max_new_tokens=16, temperature=0.5, top_k=2, top_p=0.5, seed=3)
    assert "jit(_run)" not in compiled


@pytest.mark.parametrize(("prompts", "options", "words"), [
    ([], {}, "There are no prompts"), ([[1], []], {}, "Prompt 1 must be a sequence of at least one token"),
    ([[1, V]], {}, f"Prompt 0 holds {V}; a token is a whole number from 0 to {V - 1}"), ([[1.5]], {}, "Prompt 0 holds 1.5"),
    ([[-1]], {}, "Prompt 0 holds -1"), ([[1]], {"stop": [V]}, f"stop holds {V}"),
    ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"), ([[1]], {"temperature": -1.0}, "temperature is -1.0"),
    ([[1]], {"temperature": float("nan")}, "temperature is nan"), ([[1]], {"temperature": 1.0, "top_k": 0}, "top_k is 0"),
    ([[1]], {"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0"), ([[1]], {"top_k": 2}, "with temperature 0 nothing is drawn"),
    ([[1] * 8], {"max_new_tokens": 3}, "8 tokens and 3 new ones need 10 positions; the model has 9"),
])
def test_what_is_refused(prompts, options, words):
    with pytest.raises(UserError, match=words):
        generate(decoder("learned", max_length=9), prompts, **{"max_new_tokens": 2} | options)


def test_logits_that_are_not_finite_are_an_error():
    model = decoder("learned", max_length=9)
    scheme = model.layers.schemes[0]
    scheme.table[...] = scheme.table[...].at[4].set(jnp.nan)
    assert len(generate(model, [[1, 2]], max_new_tokens=3)[0]) == 3
    with pytest.raises(UserError, match="new token 3 of row 1 are not finite"):
        generate(model, [[1], [1, 2]], max_new_tokens=4)
