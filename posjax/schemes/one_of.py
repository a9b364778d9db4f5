"""A scheme whose hyper-parameters differ between the replicas of a run."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posjax.errors import UserError
from posjax.schemes.base import Scheme

# What a scheme says of itself is asked while tracing, when nobody knows which of several it is: they must agree.
_STATED = ("relative", "causal_only", "depends_on_length", "max_length", "original_length", "logit_scale")
# Hooks that compute with activations; the others give data.
_COMPUTING = ("embed", "rotate", "features", "logits", "values")


class OneOf(Scheme):
    """One of several schemes of a kind, made with different hyper-parameters; `index`, which may be traced, says which.

    Every scheme is made as it would be alone, so all that it computes on the host from its hyper-parameters, in float64, is what
    it is alone, and a bad value is refused in the same words. What the schemes give as data (rotations, biases) is stacked
    and indexed; a hook that computes with activations is a branch each. Made by `one_of`.

    Raises:
      ValueError: the schemes differ in more than numbers.
    """

    def __init__(self, schemes, index):
        first = schemes[0]
        super().__init__(num_heads=first.num_heads, head_dim=first.head_dim, model_dim=first.model_dim)
        self.schemes, self.index = nnx.List(schemes), index
        self.temperature = first.temperature
        for name in _STATED:
            values = [getattr(scheme, name) for scheme in schemes]
            if len(set(values)) > 1:
                raise UserError(f"the {name} of {first.name} would be {' and '.join(map(str, dict.fromkeys(values)))}")
            setattr(self, name, values[0])
        for hook in ("logits", "values"):
            if getattr(first, hook) is None:  # of this object, whatever its class has
                setattr(self, hook, None)

    def rotary(self, length=None):
        return pick(self.index, [scheme.rotary(length) for scheme in self.schemes])

    def plain(self):
        return pick(self.index, [scheme.plain() for scheme in self.schemes])

    def bias(self):
        return pick(self.index, [scheme.bias() for scheme in self.schemes])


def one_of(schemes, index):
    """The scheme among `schemes`, of one class, that int32 `index` names: a `OneOf` with the hooks of that class."""
    return _kind(type(schemes[0]))(schemes, index)


@functools.cache
def _kind(kind):
    class Kind(OneOf):
        pass
    Kind.__name__ = kind.__name__
    for hook in _COMPUTING:
        # Which hooks a class overrides tells attention what to expect.
        if getattr(kind, hook) is not getattr(Scheme, hook):
            setattr(Kind, hook, _branches(hook))
    return Kind


def _branches(hook):
    def call(self, *args, **kwargs):
        return jax.lax.switch(self.index, [functools.partial(lambda scheme: getattr(scheme, hook)(*args, **kwargs), scheme)
                                           for scheme in self.schemes])
    return call


def pick(index, trees):
    """The tree among `trees` that int32 `index` names; leaves that are all the same stay as they are, known when tracing.

    Raises:
      ValueError: the trees differ in their structure, or in the shape of a leaf.
    """
    leaves, structures = zip(*map(jax.tree.flatten, trees))
    if any(structure != structures[0] for structure in structures):
        raise UserError("what it makes would differ in more than numbers")

    def choose(*options):
        if all(_same(options[0], option) for option in options[1:]):
            return options[0]
        options = [jnp.asarray(option) for option in options]
        if len({(option.shape, option.dtype) for option in options}) > 1:
            raise UserError("what it makes would differ in shape: "
                            f"{' and '.join(dict.fromkeys(str(option.shape) for option in options))}")
        return jnp.stack(options)[index]
    return jax.tree.unflatten(structures[0], list(map(choose, *leaves)))


def _same(a, b):
    if isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer):
        return a is b
    return np.array_equal(a, b)
