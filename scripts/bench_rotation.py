"""What exact angles cost: `apply_rotary` beside a plain float32 rotation, in one process, taking turns.

    python scripts/bench_rotation.py [--length=4096] [--repeats=40]

Both rotate the same queries and keys; the plain one multiplies float32 positions by float32 frequencies, and is off by 3e-2
rad at a million. Medians in milliseconds, and their ratio, which should stay under 1.10.
"""
import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from posjax.ops.rotary import LAYOUTS, Rotary, apply_rotary
from posjax.schemes.rope_scaling import inverse_frequencies

HEADS, HEAD_DIM, BASE = 8, 64, 1e4


def plain(x, positions, inv_freq, layout):
    """The usual rotation, with phases of float32."""
    angles = positions.astype(jnp.float32)[:, None] * inv_freq
    cos, sin = (f(angles)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    half = HEAD_DIM // 2
    if layout == "interleaved":
        a, b = x[..., 0::2], x[..., 1::2]
        return jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def measured(functions, arguments, repeats):
    """The median milliseconds of each function, called in turn so that what else runs here meets all of them."""
    times = [[] for _ in functions]
    for repeat in range(repeats + 3):
        for function, own in zip(functions, times):
            started = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            if repeat >= 3:
                own.append(1e3 * (time.perf_counter() - started))
    return [statistics.median(own) for own in times]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=40)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    q, k, to_q, to_k = (jnp.asarray(rng.normal(size=(1, arguments.length, HEADS, HEAD_DIM)), jnp.float32) for _ in range(4))
    positions, inv_freq = jnp.arange(arguments.length), inverse_frequencies(HEAD_DIM, BASE)
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {device.device_kind}; B=1 T={arguments.length} H={HEADS} Dh={HEAD_DIM}, queries and keys")
    print(f"{'layout':<12} {'pass':<18} {'plain ms':>9} {'exact ms':>9} {'ratio':>6}")
    for layout in LAYOUTS:
        rotary = Rotary.from_inv_freq(inv_freq, layout=layout)
        rotations = (functools.partial(plain, inv_freq=jnp.asarray(inv_freq, jnp.float32), layout=layout),
                     functools.partial(apply_rotary, rotary=rotary))

        def both(rotate, q, k, positions):
            return rotate(q, positions), rotate(k, positions)

        def with_gradients(rotate, q, k, positions):
            out, pullback = jax.vjp(lambda q, k: both(rotate, q, k, positions), q, k)
            return out, pullback((to_q, to_k))
        for name, run in (("forward", both), ("forward, backward", with_gradients)):
            functions = [jax.jit(functools.partial(run, rotate)) for rotate in rotations]
            slow, exact = measured(functions, (q, k, positions), arguments.repeats)
            print(f"{layout:<12} {name:<18} {slow:>9.2f} {exact:>9.2f} {exact / slow:>6.2f}")


if __name__ == "__main__":
    main()
