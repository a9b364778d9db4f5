"""One forward pass of a decoder over very many tokens."""
import time

import jax
import numpy as np
from flax import nnx

from posjax.bench.measure import compiled, peak_resident, rounded, temporaries
from posjax.models.decoder import Decoder, DecoderConfig
from posjax.schemes.layers import Layers
from posjax.schemes.registry import make_scheme

SIZES = DecoderConfig(vocab_size=32, width=64, depth=2, num_heads=4)


def run(say, *, tokens=131_072, window=None, scheme="alibi"):
    """One row: the seconds of one pass, compiled before, and the most memory that the process ever had.

    Args:
      say: is told, in a few words, what comes next.
      tokens: of the one sequence.
      window: visible keys with the query's own; None for all.
      scheme: a registered scheme.
    """
    made = make_scheme(scheme, num_heads=SIZES.num_heads, head_dim=SIZES.head_dim, model_dim=SIZES.width, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(Decoder(SIZES, Layers([made], (0,) * SIZES.depth, (window,) * SIZES.depth), rngs=nnx.Rngs(0)))
    text = np.random.default_rng(0).integers(0, SIZES.vocab_size, (1, tokens)).astype(np.int32)
    say(f"compiling for {tokens:,} tokens")
    program = compiled(lambda state, text: nnx.merge(graphdef, state)(text), state, text)
    say(f"one pass over {tokens:,} tokens")
    started = time.perf_counter()
    logits = jax.block_until_ready(program(state, text))
    seconds = time.perf_counter() - started
    assert logits.shape == (1, tokens, SIZES.vocab_size)
    return [{"forward": scheme, "window": window, "tokens": tokens, "seconds": rounded(seconds),
             "tokens_a_second": rounded(tokens / seconds), "temp_mib": rounded(temporaries(program)),
             "peak_process_mib": rounded(peak_resident())}]
