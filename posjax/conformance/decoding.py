"""Generation: a step against the full pass, and one compilation for all steps."""
import jax
import numpy as np
from flax import nnx

from posjax.compilations import compilations
from posjax.conformance import expect
from posjax.conformance.layer import ATOL, B, Layer, T, inputs, quick_compilation


@quick_compilation()
def check_decode(subject):
    """The last queries alone, on all keys, are the last rows of the full pass; so are they without positions given."""
    x, layer = inputs(subject.scheme), subject.layer
    full = layer(x)
    for queries in (1, 4):
        expect.close(layer(x, queries=queries), full[:, T - queries:], ATOL, f"the last {queries} tokens, against the full pass")
    q, k, v, features = layer.projected(x, np.arange(T), first=T - 1)
    expect.close(layer.attend(q, k, v, features, None, None), full[:, -1:], ATOL, "the last token, without positions given")


@quick_compilation()
def check_mixed_ranks(subject):
    """Positions `[B, Q]` of queries go with positions `[K]` of all keys."""
    layer = subject.layer
    q, k, v, features = layer.projected(inputs(subject.scheme), np.arange(T), first=T - 1)
    expect.close(layer.attend(q, k, v, features, np.full((B, 1), T - 1), np.arange(T)),
                 layer.attend(q, k, v, features, np.arange(T)[-1:], np.arange(T)), ATOL, "the last token")


def check_jit_once(subject):
    """Positions are data: one compilation serves all of them, none is frozen into it, and it equals the eager layer."""
    x = inputs(subject.scheme)
    graphdef, state = nnx.split(subject.scheme)

    @jax.jit
    def step(state, x, start):
        return Layer(nnx.merge(graphdef, state))(x, np.arange(T) + start)
    times = 0
    for start in (0, 5, 3):
        with compilations() as compiled:
            jitted = step(state, x, start)  # with all optimisations, since they are what a user's jit has
        times += compiled.count("jit(step)")
        with quick_compilation():
            eager = Layer(subject.scheme)(x, np.arange(T) + start)
        expect.close(jitted, eager, ATOL, f"the jitted layer from position {start} on, against the eager one")
    expect.that(times == 1, f"compilations for three offsets: expected 1, found {times}.")
