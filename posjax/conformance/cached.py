"""Generation from a cache: against the full pass, in one batch with other rows, in one compilation."""
import functools

import jax
import numpy as np
from flax import nnx

from posjax.compilations import compilations
from posjax.conformance import expect
from posjax.conformance.layer import ATOL, inputs, layer, quick_compilation
from posjax.schemes.attend import make_cache

PROMPT, STEPS = 6, 10
LENGTH = PROMPT + STEPS


@quick_compilation()
def check_cached_decoding(subject):
    """A prompt and 10 tokens one by one from a cache equal the full pass, and all steps take one compilation."""
    x = inputs(subject.scheme, LENGTH)
    out, compiled = decode(subject, x)
    expect.close(out, uncached(subject.layer, subject.scheme, x), ATOL,
                 "a prompt and 10 tokens from a cache, against the full pass")
    expect.that(not compiled, f"compilations from the second of {STEPS} steps on: expected none, found {compiled}.")


@quick_compilation()
def check_cached_rows(subject):
    """In a cache, packed documents and a row padded on the left are as if alone, and another first document moves nothing."""
    scheme, whole, first = subject.scheme, subject.layer, 2
    x, index = inputs(scheme, LENGTH), np.arange(PROMPT)
    # Row 0 holds documents of 2 and 14 tokens, row 1 two tokens of padding before its own 14.
    positions = np.stack([np.where(index < first, index, index - first), np.maximum(index - first, 0)]).astype(np.int32)
    segments = np.stack([index >= first] * 2).astype(np.int32)
    out, _ = decode(subject, x, positions, segments)
    expect.close(out[:1, :first], whole(x[:1, :first]), ATOL, "the first document, against itself alone")
    expect.close(out[:, first:], uncached(whole, scheme, x[:, first:]), ATOL, "the second document and the padded row, alone")
    other = np.concatenate([inputs(scheme, first, seed=9), x[:, first:]], 1)
    expect.same(decode(subject, other, positions, segments)[0][:, first:], out[:, first:],
                "the second document and the padded row, after another first document and padding")


def decode(subject, x, positions=None, segments=None):
    """A layer's output `[B, T, H, Dh]` for the prompt and each later token, and how often a step after the first compiled."""
    cache = make_cache(subject.scheme, x.shape[1] + 3, batch_size=x.shape[0])  # with room left, which nobody may see
    state = nnx.state(subject.scheme)
    outs = []

    def step(tokens, *given):
        nonlocal cache
        out, cache = subject.cached_step(state, cache, tokens, *given)
        outs.append(np.asarray(out))
    step(x[:, :PROMPT], positions, segments)
    step(x[:, PROMPT:PROMPT + 1], None, None)
    with compilations() as compiled:
        for t in range(PROMPT + 1, x.shape[1]):
            step(x[:, t:t + 1], None, None)
    return np.concatenate(outs, 1), compiled.count("jit(step)")


def uncached(whole, scheme, x):
    """The output of each token when it is the last: where the rotation depends on the length, that of its moment."""
    if not scheme.depends_on_length:
        return whole(x)
    prompt = x[:, :PROMPT - LENGTH + x.shape[1]]  # with the prompt, padding may have gone
    steps = range(prompt.shape[1], x.shape[1])
    last = jax.jit(functools.partial(layer, scheme, queries=1))  # one program a length, not one an operation and length
    return np.concatenate([whole(prompt), *(last(x[:, :t + 1]) for t in steps)], 1)
