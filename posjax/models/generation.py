"""Generation: the prompts in one pass, then a token at a time from the cache, compiled once for a bucket of lengths."""
import functools
import math
import numbers

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posjax.errors import UserError

# Below this many tokens, another compilation would cost more than the padding.
_SMALLEST_BUCKET = 16


def generate(model, prompts, *, max_new_tokens, temperature=0.0, top_k=None, top_p=None, stop=(), seed=0):
    """The tokens that a decoder goes on with, after each of several prompts.

    Prompts of different lengths go through in one batch; what a row gets does not depend on the others. The longest
    prompt and `max_new_tokens` are rounded up to powers of two, and all calls of one such bucket and batch size share one
    compilation, whatever the lengths, temperature, `top_k`, `top_p` and seed.

    Args:
      model: a `posjax.Decoder`.
      prompts: sequences of token ids, none of them empty; or an array `[B, T]`.
      max_new_tokens: where a row ends that meets no stop token.
      temperature: 0 for the most likely token; else logits are divided by it and a token is drawn.
      top_k: draws among this many most likely tokens; None for all.
      top_p: draws among the fewest most likely tokens that together have this probability, above 0 and up to 1; None for all.
      stop: token ids that end a row, itself included in what is returned.
      seed: of the draws. Row r at its n-th token draws the same number in every call.

    Returns:
      A list of int32 arrays, the new tokens of each row.

    Raises:
      ValueError: an empty prompt, a token that does not exist, a bad option or one without effect, more tokens than the
        model has positions for, or logits that are not finite.
    """
    prompts = _checked_prompts(prompts, model.config.vocab_size)
    stop = [_checked_token(token, model.config.vocab_size, "stop") for token in stop]
    _check_options(max_new_tokens, temperature, top_k, top_p)
    longest = max(map(len, prompts))
    needed, held = longest + max_new_tokens - 1, model.layers.max_length  # the last token is never read
    if held is not None and needed > held:
        raise UserError(f"A prompt of {longest} tokens and {max_new_tokens} new ones need {needed} positions; "
                        f"the model has {held} (its max_length).")
    padded, room = _bucket(longest), _bucket(max_new_tokens)
    tokens = np.zeros((len(prompts), padded), np.int32)
    pads = np.asarray([padded - len(prompt) for prompt in prompts], np.int32)
    for row, pad, prompt in zip(tokens, pads, prompts, strict=True):
        row[pad:] = prompt
    stops = np.full(2 ** math.ceil(math.log2(max(len(stop), 1))), -1, np.int32)
    stops[:len(stop)] = stop
    choice = None
    if temperature:
        choice = {"temperature": np.float32(temperature), "top_p": np.float32(1.0 if top_p is None else top_p),
                  "top_k": np.int32(model.config.vocab_size if top_k is None else min(top_k, model.config.vocab_size))}
    graphdef, state = nnx.split(model)
    out, counts, finite = (np.asarray(x) for x in _run(
        state, tokens, pads, np.int32(max_new_tokens), stops, choice, jax.random.key(seed), graphdef=graphdef, room=room))
    if not finite.all():
        row = int(np.argmin(finite))
        raise UserError(f"The logits of new token {counts[row] - 1} of row {row} are not finite.")
    return [row[:count] for row, count in zip(out, counts, strict=True)]


@functools.partial(jax.jit, static_argnames=("graphdef", "room"))
def _run(state, tokens, pads, limit, stops, choice, key, *, graphdef, room):
    """New tokens `[B, room]`, how many of them `[B]`, and whether all their logits were finite `[B]`."""
    model = nnx.merge(graphdef, state)
    batch, length = tokens.shape
    index = jnp.arange(length, dtype=jnp.int32)[None] - pads[:, None]
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(batch))

    def chosen(n, logits, out, counts, open_rows, finite):
        """With the n-th new token, for the rows that have not ended."""
        if choice is None:
            token = logits.argmax(-1).astype(jnp.int32)
        else:
            token = jax.vmap(functools.partial(draw, **choice))(jax.vmap(lambda k: jax.random.fold_in(k, n))(keys), logits)
        out = out.at[:, n].set(jnp.where(open_rows, token, 0))
        counts = counts + open_rows.astype(jnp.int32)
        fine = jnp.isfinite(logits).all(-1)
        # A row ends where its logits do, so that the error can name the token.
        return out, counts, open_rows & fine & (token[:, None] != stops[None]).all(-1), finite & (fine | ~open_rows)

    def step(carry):
        n, cache, rows = carry
        logits, cache = model.decode(jax.lax.dynamic_slice_in_dim(rows[0], n - 1, 1, 1), cache)
        return n + 1, cache, chosen(n, logits[:, 0], *rows)
    cache = model.new_cache(length + room, batch_size=batch)
    logits, cache = model.decode(tokens, cache, positions=jnp.maximum(index, 0), segment_ids=(index >= 0).astype(jnp.int32))
    rows = chosen(0, logits[:, -1], jnp.zeros((batch, room), jnp.int32), jnp.zeros(batch, jnp.int32),
                  jnp.ones(batch, bool), jnp.ones(batch, bool))
    _, _, (out, counts, _, finite) = jax.lax.while_loop(
        lambda carry: (carry[0] < limit) & carry[2][2].any(), step, (jnp.int32(1), cache, rows))
    return out, counts, finite


def draw(key, logits, *, temperature, top_k, top_p):
    """A token for logits `[V]`, int32: among the `top_k` most likely ones and the fewest that reach `top_p` together."""
    logits, order = jax.lax.top_k(logits / temperature, logits.size)
    weights = jax.nn.softmax(logits)
    kept = (jnp.arange(logits.size) < top_k) & (jnp.cumsum(weights) - weights < top_p)
    return order[jax.random.categorical(key, jnp.where(kept, logits, -jnp.inf))].astype(jnp.int32)


def _bucket(length):
    return max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length())


def _checked_token(token, vocab_size, where):
    if isinstance(token, bool) or not isinstance(token, numbers.Integral) or not 0 <= token < vocab_size:
        raise UserError(f"{where} holds {token!r}; a token is a whole number from 0 to {vocab_size - 1}.")
    return int(token)


def _checked_prompts(prompts, vocab_size):
    rows = []
    for n, prompt in enumerate(prompts):
        if np.ndim(prompt) != 1 or not len(prompt):
            raise UserError(f"Prompt {n} must be a sequence of at least one token; got {prompt!r}.")
        rows.append([_checked_token(token, vocab_size, f"Prompt {n}") for token in np.asarray(prompt).tolist()])
    if not rows:
        raise UserError("There are no prompts.")
    return rows


def _check_options(max_new_tokens, temperature, top_k, top_p):
    for name, value in (("max_new_tokens", max_new_tokens), *((("top_k", top_k),) if top_k is not None else ())):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
            raise UserError(f"{name} is {value!r}; it must be a whole number of at least 1.")
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature is {temperature}; it must be 0 (the most likely token) or above.")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p is {top_p}; it must be above 0 and at most 1.")
    if not temperature and (top_k, top_p) != (None, None):
        raise UserError("top_k and top_p say what is drawn from; with temperature 0 nothing is drawn.")
