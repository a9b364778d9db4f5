"""The time of one more token, by how many are cached."""
import functools
import math

import jax
import numpy as np
from flax import nnx

from posjax.bench.measure import Clock, compiled, rounded, temporaries
from posjax.compilations import compilations
from posjax.models.decoder import Decoder, DecoderConfig
from posjax.schemes.layers import Layers
from posjax.schemes.registry import make_scheme

SIZES = DecoderConfig(vocab_size=256, width=256, depth=2, num_heads=4)


def run(say, *, lengths=(1024, 4096, 16384), window=256, scheme="alibi", repeats=30):
    """Rows of times for each length, in windows of `window` tokens and without; one row of text, 2 layers, 4 heads of 64.

    Args:
      say: is told, in a few words, what comes next.
      lengths: numbers of cached tokens.
      window: visible keys with the query's own.
      scheme: a registered scheme.
      repeats: tokens on the clock.
    """
    rows = []
    for each in (window, None):
        rows += _rows(say, lengths, each, scheme, repeats)
    return rows


def _rows(say, lengths, window, scheme, repeats):
    made = make_scheme(scheme, num_heads=SIZES.num_heads, head_dim=SIZES.head_dim, model_dim=SIZES.width, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(Decoder(SIZES, Layers([made], (0,) * SIZES.depth, (window,) * SIZES.depth), rngs=nnx.Rngs(0)))

    def decode(state, tokens, cache):
        return nnx.merge(graphdef, state).decode(tokens, cache)
    # The cache is given away, so that a token is written into it and not into a copy.
    fill, step = (jax.jit(decode, donate_argnums=2) for _ in range(2))
    called = "without window" if window is None else f"window {window}"
    caches = {}
    token = np.zeros((1, 1), np.int32)
    for length in lengths:
        say(f"{called}: filling a cache with {length} tokens")
        room = length + repeats + 1 if window is None else None  # a window has no end
        cache = nnx.merge(graphdef, state).new_cache(room, batch_size=1)
        tokens = np.random.default_rng(0).integers(0, SIZES.vocab_size, (1, length)).astype(np.int32)
        part = math.gcd(length, 512)
        for start in range(0, length, part):
            _, cache = fill(state, tokens[:, start:start + part], cache)
        caches[length] = cache

    def one(length):
        logits, caches[length] = step(state, token, caches[length])
        return logits
    say(f"{called}: {repeats} tokens for each length")
    with compilations() as names:
        clock = Clock({length: functools.partial(one, length) for length in lengths}, repeats)
    # Only now: what has been compiled for this would not be compiled on the clock.
    mib = {length: temporaries(compiled(decode, state, token, cache, donate_argnums=2)) for length, cache in caches.items()}
    return [{"decode": scheme, "window": window, "cached": length, "ms_a_token": rounded(clock.median(length)),
             "best_ms": rounded(clock.best(length)), f"of_{lengths[0]}": rounded(clock.ratio(length, lengths[0])),
             "cache_mib": rounded(sum(leaf.nbytes for leaf in jax.tree.leaves(caches[length])) / 2**20),
             "temp_mib": rounded(mib[length]), "compilations": names.count("jit(decode)")} for length in lengths]
