"""Which tokens meet: causality, documents, rows, padding, windows."""
import functools

import jax
import jax.numpy as jnp
import numpy as np

from posjax.conformance import expect
from posjax.conformance.layer import ATOL, B, T, backends, inputs, quick_compilation
from posjax.schemes.attend import attend


@quick_compilation()
def check_causal(subject):
    """A token has no influence on what stands before it."""
    x, layer = inputs(subject.scheme), subject.layer
    changed = np.concatenate([x[:, :5], inputs(subject.scheme, T - 5, seed=7)], 1)
    before, after = layer(x), layer(changed)
    expect.same(after[:, :5], before[:, :5], "outputs before a token that was changed")
    expect.differ(after[:, 5:], before[:, 5:], what="outputs from a token on that was changed")


@quick_compilation()
def check_packed(subject):
    """Packed documents are as if alone, and do not move at all when their neighbour changes."""
    scheme, layer = subject.scheme, subject.layer
    first, second = inputs(scheme, 4), inputs(scheme, 5, seed=3)
    segments = np.asarray([[0] * 4 + [1] * 5] * B)
    # Rows of positions, though equal: one program with padded rows.
    positions = np.asarray([[*range(4), *range(5)]] * B)
    packed = layer(np.concatenate([first, second], 1), positions, segments=segments)
    expect.close(packed[:, :4], layer(first), ATOL, "the first of two packed documents, against itself alone")
    expect.close(packed[:, 4:], layer(second), ATOL, "the second of two packed documents, against itself alone")
    other = layer(np.concatenate([inputs(scheme, 4, seed=9), second], 1), positions, segments=segments)
    expect.same(other[:, 4:], packed[:, 4:], "the second document, after a change in the first")


@quick_compilation()
def check_rows(subject):
    """Rows with positions of their own, gaps among them, are as if alone."""
    x, layer = inputs(subject.scheme), subject.layer
    positions = np.stack([np.arange(T), 3 + 2 * np.arange(T)])
    rows = layer(x, positions)
    for i in range(B):
        alone = layer(np.stack([x[i], x[i]]), positions[i])
        expect.close(rows[i], alone[0], ATOL, f"a row with positions {positions[i].tolist()}, against itself alone")
    if not subject.scheme.relative:
        expect.differ(rows[1], layer(x)[1], what="a row with other positions than 0, 1, 2, ...")


@quick_compilation()
def check_left_padding(subject):
    """A left-padded row is as if alone: the whole prompt, and the token decoded after it."""
    x, layer, pad = inputs(subject.scheme), subject.layer, 4
    positions = np.stack([np.arange(T), np.maximum(np.arange(T) - pad, 0)])
    segments = np.stack([np.ones(T, int), (np.arange(T) >= pad).astype(int)])
    alone = layer(np.stack([x[1, pad:]] * B))[1]
    expect.close(layer(x, positions, segments=segments)[1, pad:], alone, ATOL, "a left-padded prompt, against itself alone")
    step = layer(x, positions, segments=segments, queries=1)
    expect.close(step[1], alone[-1:], ATOL, "the token decoded after a left-padded prompt, against itself alone")
    expect.close(step[0], layer(x, queries=1)[0], ATOL, "the token decoded in the row beside a left-padded one")


@quick_compilation()
def check_window(subject):
    """A window of w shows w keys, in the full pass and in a decode step, on every backend."""
    x, layer = inputs(subject.scheme), subject.layer
    positions = np.arange(T)

    # A row for each key, in which its value is large, and one in which none is: what it adds to a query is its weight. More
    # than rounding, which may differ from row to row: a weight below 1e-9 counts for none.
    same_tokens = np.repeat(x[:1], T + 1, axis=0)
    large = (np.arange(T + 1)[:, None] == positions)[:, :, None, None] * np.float32(1e6)

    def seen(queries=T, **options):
        """Whether a query has weight on a key, `[1, Q, H, K]`."""
        q, k, v, features = layer.projected(same_tokens, positions, first=T - queries)
        run = jax.jit(functools.partial(attend, subject.scheme, features=features, q_positions=positions[T - queries:],
                                        k_positions=positions, **options))
        out = np.asarray(run(q, k, large + np.zeros_like(v)))
        return np.moveaxis((np.abs(out[:T] - out[T]) > 1e-3).any(-1), 0, -1)[None]
    near = (np.subtract.outer(positions, positions) < 3)[None, :, None]
    for backend in backends():
        # A scheme may give some heads narrower windows of its own, but not all.
        expected = seen(backend=backend) & near
        _most_keys(expected, np.minimum(positions + 1, 3), "keys that a query sees at most 2 tokens back")
        for queries in (T, 1):
            expect.same(seen(queries, window=3, backend=backend), expected[:, T - queries:],
                        f"keys seen by the last {queries} tokens in a window of 3, backend {backend}")
    _most_keys(seen(1), [T], "keys that the last token sees without a window")


def _most_keys(seen, expected, what):
    found, expected = seen.sum(-1).max(2)[0].tolist(), np.asarray(expected).tolist()
    expect.that(found == expected, f"{what}: expected {expected} in some head, found {found}.")


@quick_compilation()
def check_masked_rows(subject):
    """A row that sees no key is zero with finite gradients, in bf16 and with all masks at once."""
    scheme = subject.scheme
    nowhere = np.asarray([[1] * (T - 1) + [2]] * B)
    # The reference computes in float32 whatever it is given.
    for backend, dtype in [(name, jnp.float32) for name in backends()] + [("auto", jnp.bfloat16)]:
        *qkv, features = subject.layer.projected(inputs(scheme, dtype=dtype), np.arange(T))
        out, gradients = _with_gradients(subject.layer.scheme, *qkv, features, backend=backend, q_segment_ids=nowhere,
                                         k_segment_ids=np.ones((B, T), int), window=4)
        out, where = np.asarray(out, np.float32), f"backend {backend}, {jnp.dtype(dtype).name}"
        expect.that(not out[:, -1].any(), f"the output of a token that sees no key: expected zeros, found "
                                          f"{np.abs(out[:, -1]).max():.3g} ({where}).")
        expect.that(out[:, :-1].any(-1).all(), f"outputs of tokens that see keys: expected other than zero ({where}).")
        for name, gradient in zip("qkv", gradients):
            expect.finite(gradient, f"gradients of {name} beside a token that sees no key ({where})")
        expect.that(np.asarray(gradients[2], np.float32).any(), f"gradients of v: expected other than zero ({where}).")


def _with_gradients(scheme, q, k, v, features, **options):
    """Attention, and the gradients of its sum by q, k and v: in one program, since no other check shares operations of these."""
    @jax.jit
    def run(*qkv):
        out, pullback = jax.vjp(functools.partial(attend, scheme, features=features, **options), *qkv)
        return out, pullback(jnp.ones_like(out))
    return run(q, k, v)
