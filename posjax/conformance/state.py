"""What a scheme is made from and what it learns: hyper-parameters, state, gradients, replicas."""
import inspect

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posjax.conformance import expect
from posjax.conformance.layer import ATOL, Layer, T, inputs, quick_compilation
from posjax.schemes.registry import SCHEMES


def check_described(subject):
    """It has a name, a formula and a reference, which lists and pages are made of."""
    for attribute in ("name", "formula", "reference"):
        hint = ": register it with posjax.register_scheme(name)" if attribute == "name" else ""
        expect.that(getattr(subject.scheme, attribute, ""), f"{attribute}: expected a text, found none{hint}.")


def check_hyper_parameters(subject):
    """Hyper-parameters are keyword-only and have defaults."""
    parameters = list(inspect.signature(type(subject.scheme).__init__).parameters.values())[1:]
    for p in parameters:
        if p.kind is not p.VAR_KEYWORD and p.name not in SCHEMES.supplied:
            expect.that(p.kind is p.KEYWORD_ONLY, f"the parameter {p.name} of __init__: expected keyword-only (after a *), "
                                                  f"found {p.kind.description}.")
            expect.that(p.default is not p.empty, f"the parameter {p.name} of __init__: expected a default, found none.")


def check_state(subject):
    """What can be computed is not state: a scheme has learned parameters (`nnx.Param`) or nothing."""
    leaves = jax.tree_util.tree_flatten_with_path(nnx.state(subject.scheme))[0]
    learned = {path for path, _ in jax.tree_util.tree_flatten_with_path(nnx.state(subject.scheme, nnx.Param))[0]}
    other = [jax.tree_util.keystr(path) for path, _ in leaves if path not in learned]
    expect.that(not other, f"state: expected nnx.Param alone, found others at {', '.join(other)}.")


@quick_compilation()
def check_abstract_restore(subject):
    """Made without values (`nnx.eval_shape`), then given those of another, it equals that other."""
    graphdef, _ = nnx.split(nnx.eval_shape(subject.make))
    restored = nnx.merge(graphdef, nnx.state(subject.scheme))
    x = inputs(subject.scheme)
    expect.same(Layer(restored, compiled=True)(x), subject.layer(x), "outputs with parameters restored")


@quick_compilation()
def check_gradients(subject):
    """Gradients are finite, those of the parameters too, and no parameter is without one."""
    graphdef, state = nnx.split(subject.scheme)
    weights = np.linspace(-1, 1, subject.scheme.head_dim, dtype=np.float32).reshape(1, 1, 1, -1)

    def loss(state, x):
        return (Layer(nnx.merge(graphdef, state))(x) * weights).sum()
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(state, inputs(subject.scheme))
    for path, leaf in jax.tree_util.tree_flatten_with_path(dict(zip(("parameters", "inputs"), gradients)))[0]:
        what = f"gradients of {jax.tree_util.keystr(path)}"
        expect.finite(leaf, what)
        expect.that(np.asarray(leaf).any(), f"{what}: expected some other than zero, found none.")


@quick_compilation()
def check_replicas(subject):
    """Replicas on a leading axis of parameters and inputs, under `jax.vmap`, are as if alone."""
    graphdef, first = nnx.split(subject.scheme)
    # Parameters that start at fixed values would be the same in both.
    second = jax.tree.map(lambda leaf: leaf * jnp.asarray(1.25, leaf.dtype), nnx.state(subject.make(seed=1)))
    states, xs = (first, second), np.stack([inputs(subject.scheme), inputs(subject.scheme, seed=5)])
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *states)
    together = jax.jit(jax.vmap(lambda state, x: Layer(nnx.merge(graphdef, state))(x, np.arange(T))))(stacked, xs)
    for i in range(2):
        alone = Layer(nnx.merge(graphdef, states[i]), compiled=True)(xs[i])
        expect.close(together[i], alone, ATOL, f"replica {i + 1} of 2, against itself alone")
