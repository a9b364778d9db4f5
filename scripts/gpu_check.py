"""Whether attention is right and how fast it is on the accelerator that is here: run it once on a new machine.

    python scripts/gpu_check.py            # under 5 minutes on one GPU
    python scripts/gpu_check.py --small    # the same at tiny sizes, for a CPU: a test of this script

First every backend against the float32 reference, output and gradients, in float32 and bfloat16. Then a table, printed last:
milliseconds and planned memory in bfloat16, at 2k to 64k tokens, beside `jax.nn.dot_product_attention` through XLA and cuDNN,
with and without an explicit bias. Exit code 1 if anything is wrong.
"""
import argparse
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posjax.bench.measure import MIB, Clock, compiled, rounded, temporaries
from posjax.listing import text
from posjax.ops.attention import BACKENDS, run
from posjax.schemes.attend import attend, attend_call
from posjax.schemes.registry import make_scheme

SCHEMES = ("nope", "rope", "alibi", "t5")
SECONDS = 285  # after which no further row is begun
STARTED = time.monotonic()


def say(words):
    print(f"[{time.monotonic() - STARTED:5.0f} s] {words}", file=sys.stderr, flush=True)


def scheme_of(name, heads, head_dim):
    return nnx.split(make_scheme(name, num_heads=heads, head_dim=head_dim, rngs=nnx.Rngs(0)))


def in_words(error):
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:90]}"


def checked(length, schemes=SCHEMES, most_kinds=3):
    """A row for each backend, scheme, dtype and kind of call."""
    rng, heads, head_dim = np.random.default_rng(0), 4, 64
    arrays = [rng.normal(size=(2, length, n, head_dim)).astype(np.float32) for n in (heads, 2, 2)]
    weights = jnp.asarray(rng.normal(size=(2, length, heads, head_dim)), jnp.bfloat16).astype(jnp.float32)
    ids = (np.arange(length)[None] >= np.asarray([[length // 3], [length // 2]])).astype(np.int32)
    kinds = {"window": {"window": length // 4}, "causal": {}, "segments": {"q_segment_ids": ids, "k_segment_ids": ids}}
    rows = []
    for name in schemes:
        graphdef, state = scheme_of(name, heads, head_dim)
        for kind, options in list(kinds.items())[:most_kinds]:
            def results(backend, dtype, graphdef=graphdef, state=state, options=options):
                def loss(state, arrays):
                    out = attend(nnx.merge(graphdef, state), *arrays, backend=backend, **options).astype(jnp.float32)
                    return (out * weights).sum(), out
                given = [jnp.asarray(x, dtype) for x in arrays]
                found = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(state, given)
                return [np.asarray(x, np.float32) for x in jax.tree.leaves(found)]
            for dtype in (jnp.float32, jnp.bfloat16):
                # The inputs as this dtype has them: their rounding is no fault of a backend.
                rounding = [np.asarray(jnp.asarray(x, dtype), np.float32) for x in arrays]
                with jax.default_matmul_precision("highest"):
                    exact = exact_of(graphdef, state, rounding, weights, options)
                plain = results("dense", dtype)
                for backend in BACKENDS[:-1]:
                    row = {"backend": backend.name, "scheme": name, "call": kind, "dtype": jnp.dtype(dtype).name}
                    call = attend_call(nnx.merge(graphdef, state), *(jnp.asarray(x, dtype) for x in arrays), **options)
                    reason = backend.supports(call)
                    if reason is not None:
                        rows.append({**row, "error": None, "of_plain": None, "result": f"cannot: {reason}"})
                        continue
                    say(f"{backend.name}, {name}, {kind}, {row['dtype']}")
                    try:
                        mine = plain if backend.name == "dense" else results(backend.name, dtype)
                    except Exception as error:  # what a kernel raises here is the finding
                        rows.append({**row, "error": None, "of_plain": None, "result": f"FAILED: {in_words(error)}"})
                        continue
                    off, most = (max(np.abs(a - e).max() / max(1.0, np.abs(e).max()) for a, e in zip(found, exact, strict=True))
                                 for found in (mine, plain))
                    fine = bool(off <= 2 * most + 1e-5)
                    rows.append({**row, "error": rounded(float(off)), "of_plain": rounded(float(off / max(most, 1e-12))),
                                 "result": "ok" if fine else "WRONG"})
    return rows


def exact_of(graphdef, state, arrays, weights, options):
    def loss(state, arrays):
        out = attend(nnx.merge(graphdef, state), *arrays, backend="reference", **options)
        return (out * weights).sum(), out
    found = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(state, [jnp.asarray(x) for x in arrays])
    return [np.asarray(x, np.float32) for x in jax.tree.leaves(found)]


def contenders(length, heads, head_dim):
    """Functions of q, k and v, by name."""
    def of_posjax(name, backend):
        graphdef, state = scheme_of(name, heads, head_dim)

        def attention(q, k, v):
            return run(attend_call(nnx.merge(graphdef, state), q, k, v), backend)
        return attention

    def of_jax(implementation, biased):
        def attention(q, k, v):
            bias = None
            if biased:
                graphdef, state = scheme_of("alibi", heads, head_dim)
                where = jnp.arange(length, dtype=jnp.int32)
                bias = nnx.merge(graphdef, state).bias().block(where, where)[None].astype(q.dtype)
            return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True, implementation=implementation)
        return attention
    found = {f"posjax {name}, auto": of_posjax(name, "auto") for name in SCHEMES}
    found |= {f"posjax alibi, {backend}": of_posjax("alibi", backend) for backend in ("folded", "chunked")}
    return found | {f"jax {how}{', bias' if biased else ''}": of_jax(how, biased)
                    for how in ("xla", "cudnn") for biased in (False, True)}


def timed(lengths, heads=8, head_dim=64):
    """A row for each contender, length and pass."""
    limit = ((jax.devices()[0].memory_stats() or {}).get("bytes_limit", 16 * 1024 * MIB)) / MIB
    rows = []
    for length in lengths:
        keys = jax.random.split(jax.random.key(0), 4)
        arrays = [jax.random.normal(key, (1, length, heads, head_dim), jnp.bfloat16) for key in keys]
        for way in ("forward", "forward, backward"):
            calls, memory, said = {}, {}, {}
            for name, attention in contenders(length, heads, head_dim).items():
                if time.monotonic() - STARTED > SECONDS:
                    said[name] = "no time left"
                    continue
                if name.endswith("bias") and heads * length**2 * 2 / MIB > limit / 4:
                    said[name] = "its bias alone would take a quarter of the memory"
                    continue
                say(f"{length} tokens, {way}: {name}")

                def both(q, k, v, d_out, attention=attention):
                    out, pull = jax.vjp(attention, q, k, v)
                    return out, pull(d_out)
                given = arrays[:3] if way == "forward" else arrays
                try:
                    program = compiled(attention if way == "forward" else both, *given)
                    memory[name] = temporaries(program)
                    if memory[name] > limit / 2:
                        said[name] = "more than half of the memory"
                        continue
                    jax.block_until_ready(program(*given))
                except Exception as error:  # what a kernel raises here is the finding
                    said[name] = in_words(error)
                    continue
                calls[name] = lambda program=program, given=given: program(*given)
            clock = Clock(calls, 5)
            for name in contenders(length, heads, head_dim):
                rows.append({"tokens": length, "pass": way, "attention": name,
                             "ms": rounded(clock.median(name)) if name in calls else None,
                             "of_xla": rounded(clock.ratio(name, "jax xla")), "temp_mib": rounded(memory.get(name)),
                             "said": said.get(name)})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a CPU")
    small = parser.parse_args().small
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {device.platform}, {device.device_kind}")
    errors = checked(24, ("rope", "alibi"), 1) if small else checked(512)
    print(text(errors))
    wrong = [row for row in errors if row["result"].startswith(("WRONG", "FAILED"))]
    print(f"\n{sum(row['result'] == 'ok' for row in errors)} right, {len(wrong)} wrong.\n")
    print(text(timed((32,) if small else (2048, 4096, 8192, 16384, 32768, 65536))))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
