"""Rotating queries and keys: beside a copy of the same bytes, and beside the usual float32 phases."""
import functools

import jax
import jax.numpy as jnp
import numpy as np

from posjax.bench.measure import Clock, compiled, kernels, rounded, temporaries
from posjax.ops.rotary import LAYOUTS, Rotary, apply_rotary
from posjax.schemes.rope_scaling import inverse_frequencies

HEADS, HEAD_DIM, BASE = 8, 64, 1e4
# As a multiple of a copy, and of the usual rotation, which is off by 3e-2 rad at a million.
COPY_BAR, PHASES_BAR = 1.3, 1.1


def run(say, *, lengths=(4096,), repeats=40):
    """Rows of times, for each layout, forward and with the gradient; B = 1, 8 heads of 64 channels, float32.

    Args:
      say: is told, in a few words, what comes next.
      lengths: numbers of tokens.
      repeats: rounds on the clock.
    """
    return [row for length in lengths for way in ("forward", "forward, backward") for row in _rows(say, length, way, repeats)]


def _rows(say, length, way, repeats):
    rng = np.random.default_rng(0)
    arguments = [jnp.asarray(rng.normal(size=(1, length, HEADS, HEAD_DIM)), jnp.float32) for _ in range(4)]
    positions = jnp.arange(length, dtype=jnp.int32)
    inv_freq = inverse_frequencies(HEAD_DIM, BASE)
    rotations = {("copy", "-"): lambda x, positions: jnp.copy(x)}
    for layout in LAYOUTS:
        rotations["rotation", layout] = functools.partial(
            apply_rotary, rotary=Rotary.from_inv_freq(inv_freq, layout=layout))
        rotations["float32 phases", layout] = functools.partial(
            float32_phases, inv_freq=jnp.asarray(inv_freq, jnp.float32), layout=layout)
    say(f"{length} tokens, {way}: {len(rotations)} programs")
    programs = {}
    for name, rotate in rotations.items():
        def forward(q, k, positions, rotate=rotate):
            return rotate(q, positions), rotate(k, positions)

        def both(q, k, to_q, to_k, positions, forward=forward):
            out, pull = jax.vjp(lambda q, k: forward(q, k, positions), q, k)
            return out, pull((to_q, to_k))
        given = (*arguments[:2], positions) if way == "forward" else (*arguments, positions)
        programs[name] = compiled(forward if way == "forward" else both, *given), given
    clock = Clock({name: functools.partial(program, *given) for name, (program, given) in programs.items()}, repeats)
    rows = []
    for name, (program, _) in programs.items():
        what, layout = name
        of_copy = clock.ratio(name, ("copy", "-"))
        of_phases = clock.ratio(name, ("float32 phases", layout)) if what == "rotation" else None
        rows.append({
            "rope": what, "layout": layout, "pass": way, "tokens": length, "ms": rounded(clock.median(name)),
            "best_ms": rounded(clock.best(name)), "of_copy": rounded(of_copy), "of_phases": rounded(of_phases),
            "temp_mib": rounded(temporaries(program)), "kernels": " ".join(kernels(program)),
            "bar": f"of_copy <= {COPY_BAR}, of_phases <= {PHASES_BAR}" if what == "rotation" else None,
            "met": of_copy <= COPY_BAR and of_phases <= PHASES_BAR if what == "rotation" else None})
    return rows


def float32_phases(x, positions, inv_freq, layout):
    """The usual rotation: float32 positions times float32 frequencies."""
    angles = positions.astype(jnp.float32)[:, None] * inv_freq[None]
    cos, sin = (f(angles)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    half = HEAD_DIM // 2
    if layout == "interleaved":
        a, b = x[..., 0::2], x[..., 1::2]
        return jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
