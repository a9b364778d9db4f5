"""Attention in blocks, under several schemes, beside `jax.nn.dot_product_attention`."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posjax.bench.measure import Clock, compiled, memory_of_machine, rounded, temporaries
from posjax.schemes.attend import attend
from posjax.schemes.registry import make_scheme

HEADS, HEAD_DIM = 8, 64
SCHEMES = ("nope", "rope", "alibi", "t5", "kerple", "fire")
PEER = "jax.nn"
# What a bias may cost, as a multiple of the time without any.
BARS = {"alibi": 1.15, "t5": 1.5, "kerple": 1.5}
# Of temporaries at `MEMORY_TOKENS`, in MiB.
MEMORY_BARS = {"forward": 400, "forward, backward": 1024}
MEMORY_TOKENS = 32768
# Queries, keys and values; and the gradient of the output.
_ARRAYS = {"forward": 3, "forward, backward": 4}


def run(say, *, lengths=(2048, 4096, 8192), repeats=5, memory_tokens=MEMORY_TOKENS):
    """Rows of times and memory, then of memory alone at `memory_tokens`; B = 1, 8 heads of 64 channels, float32, causal.

    Args:
      say: is told, in a few words, what comes next.
      lengths: numbers of tokens.
      repeats: rounds on the clock.
    """
    rows = []
    for length in lengths:
        for way in MEMORY_BARS:
            rows += _timed(say, length, way, repeats)
    for way, bar in MEMORY_BARS.items():
        for name in SCHEMES:
            say(f"{memory_tokens} tokens, {way}: compiling {name}")
            function, state = _program(name, way)
            array = jax.ShapeDtypeStruct((1, memory_tokens, HEADS, HEAD_DIM), jnp.float32)
            mib = temporaries(compiled(function, state, *(array for _ in range(_ARRAYS[way]))))
            rows.append(_row(name, way, memory_tokens, mib, f"temp_mib <= {bar}" if memory_tokens == MEMORY_TOKENS else None,
                             mib <= bar))
    return rows


def _timed(say, length, way, repeats):
    programs, calls, mib = {}, {}, {}
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(1, length, HEADS, HEAD_DIM)), jnp.float32) for _ in range(_ARRAYS[way])]
    for name in (PEER, *SCHEMES):
        say(f"{length} tokens, {way}: compiling {name}")
        function, state = _program(name, way)
        programs[name] = compiled(function, state, *arrays)
        mib[name] = temporaries(programs[name])
        if mib[name] < memory_of_machine() / 2:
            calls[name] = functools.partial(programs[name], state, *arrays)
    say(f"{length} tokens, {way}: {repeats + 1} rounds of {len(calls)}")
    clock = Clock(calls, repeats)
    rows = []
    for name in programs:
        times = {"ms": clock.median(name), "best_ms": clock.best(name)} if name in calls else {}
        of_nope, of_peer = clock.ratio(name, "nope"), clock.ratio(name, PEER)
        bar = met = None
        if name in BARS and way == "forward":
            bar, met = f"of_nope <= {BARS[name]}", of_nope <= BARS[name]
        elif name == "nope" and way == "forward":
            bar, met = f"of_{PEER} <= 1", of_peer is None or of_peer <= 1
        rows.append(_row(name, way, length, mib[name], bar, met, of_nope=of_nope, of_peer=of_peer, **times))
    return rows


def _row(name, way, length, mib, bar, met, *, ms=None, best_ms=None, of_nope=None, of_peer=None):
    return {"attention": name, "pass": way, "tokens": length, "ms": rounded(ms), "best_ms": rounded(best_ms),
            "of_nope": rounded(of_nope), f"of_{PEER}": rounded(of_peer), "temp_mib": rounded(mib), "bar": bar,
            "met": None if bar is None else met}


def _program(name, way):
    """A function of what is learned and of queries, keys, values and, backward, the gradient of the output; what is learned."""
    if name == PEER:
        state = {}

        def forward(state, q, k, v):
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
    else:
        graphdef, state = nnx.split(make_scheme(name, num_heads=HEADS, head_dim=HEAD_DIM, rngs=nnx.Rngs(0)))

        def forward(state, q, k, v):
            return attend(nnx.merge(graphdef, state), q, k, v, backend="chunked")

    def both(state, q, k, v, d_out):
        out, pull = jax.vjp(forward, state, q, k, v)
        return out, pull(d_out)
    return (forward if way == "forward" else both), state
