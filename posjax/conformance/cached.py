"""Generation from a cache: against the full pass, in one batch with other rows, in one compilation."""
import jax
import numpy as np
from flax import nnx

from posjax.conformance import expect
from posjax.conformance.layer import ATOL, inputs, layer, project, quick_compilation
from posjax.schemes.attend import attend_cached, make_cache

PROMPT, STEPS = 6, 10
LENGTH = PROMPT + STEPS


@quick_compilation()
def check_cached_decoding(subject):
    """A prompt and 10 tokens one by one from a cache equal the full pass, and all steps take one compilation."""
    x = inputs(subject.scheme, LENGTH)
    out, compilations = decode(subject.scheme, x)
    expect.close(out, uncached(subject.layer, subject.scheme, x), ATOL,
                 "a prompt and 10 tokens from a cache, against the full pass")
    expect.that(compilations == 2, f"compilations for a prompt and {STEPS} steps: expected 1 and 1, found {compilations} in all.")


@quick_compilation()
def check_cached_rows(subject):
    """In a cache, packed documents and a row padded on the left are as if alone, and another first document moves nothing."""
    scheme, whole, first = subject.scheme, subject.layer, 2
    x, index = inputs(scheme, LENGTH), np.arange(PROMPT)
    # Row 0 holds documents of 2 and 14 tokens, row 1 two tokens of padding before its own 14.
    positions = np.stack([np.where(index < first, index, index - first), np.maximum(index - first, 0)]).astype(np.int32)
    segments = np.stack([index >= first] * 2).astype(np.int32)
    out, _ = decode(scheme, x, positions, segments)
    expect.close(out[:1, :first], whole(x[:1, :first]), ATOL, "the first document, against itself alone")
    expect.close(out[:, first:], uncached(whole, scheme, x[:, first:]), ATOL, "the second document and the padded row, alone")
    other = np.concatenate([inputs(scheme, first, seed=9), x[:, first:]], 1)
    expect.same(decode(scheme, other, positions, segments)[0][:, first:], out[:, first:],
                "the second document and the padded row, after another first document and padding")


def decode(scheme, x, positions=None, segments=None):
    """A layer's output `[B, T, H, Dh]` for the prompt and for each later token, and the number of compilations."""
    graphdef, state = nnx.split(scheme)

    @jax.jit
    def run(state, cache, x, positions, segments):
        scheme = nnx.merge(graphdef, state)
        following = cache.following(x.shape[1])
        positions, segments = (f if given is None else given for given, f in zip((positions, segments), following))
        x = scheme.embed(x, positions)
        return attend_cached(scheme, *project(scheme, x), cache, positions=positions, segment_ids=segments,
                             features=scheme.features(x))
    cache = make_cache(scheme, x.shape[1] + 3, batch_size=x.shape[0])  # with room left, which nobody may see
    out, cache = run(state, cache, x[:, :PROMPT], positions, segments)
    outs = [np.asarray(out)]
    for t in range(PROMPT, x.shape[1]):
        out, cache = run(state, cache, x[:, t:t + 1], None, None)
        outs.append(np.asarray(out))
    return np.concatenate(outs, 1), run._cache_size()


def uncached(whole, scheme, x):
    """The output of each token when it is the last: where the rotation depends on the length, that of its moment."""
    if not scheme.depends_on_length:
        return whole(x)
    prompt = x[:, :PROMPT - LENGTH + x.shape[1]]  # with the prompt, padding may have gone
    steps = range(prompt.shape[1], x.shape[1])
    return np.concatenate([whole(prompt), *(layer(scheme, x[:, :t + 1], queries=1) for t in steps)], 1)
