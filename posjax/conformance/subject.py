"""What is checked: how a scheme is made, and one of it."""
import functools
import inspect

import jax
from flax import nnx

from posjax.conformance.layer import Layer, T, project
from posjax.errors import UserError
from posjax.schemes.attend import attend_cached
from posjax.schemes.base import Scheme
from posjax.schemes.registry import SCHEMES, make_scheme

# The checks place tokens up to here, far positions apart.
_NEEDED_LENGTH = 2 * T + 3


class Subject:
    """A scheme under test.

    Its layer is compiled as the checks ask for it, so a second check of one `Subject` takes less time than the first.
    """

    def __init__(self, make):
        self._make = make

    def make(self, seed=0):
        """A new scheme, its parameters drawn from `seed`."""
        return self._make(rngs=nnx.Rngs(seed))

    @functools.cached_property
    def scheme(self):
        return self.make()

    @functools.cached_property
    def layer(self):
        """The compiled `Layer` of `scheme`."""
        return Layer(self.scheme, compiled=True)

    @functools.cached_property
    def cached_step(self):
        """The jitted layer of `scheme` from a cache: a function `(state, cache, x, positions, segments)`."""
        graphdef, _ = nnx.split(self.scheme)

        @jax.jit
        def step(state, cache, x, positions, segments):
            scheme = nnx.merge(graphdef, state)
            positions, segments = cache.place(x.shape[1], positions=positions, segment_ids=segments)
            x = scheme.embed(x, positions)
            return attend_cached(scheme, *project(scheme, x), cache, positions=positions, segment_ids=segments,
                                 features=scheme.features(x))
        return step


def subject(scheme, *, num_heads=4, head_dim=8, **hyper):
    """What the checks of `posjax.conformance.CHECKS` take.

    Args:
      scheme: a registered name, a subclass of `posjax.Scheme`, or a function of `num_heads`, `head_dim`, `model_dim`,
        `rngs` and hyper-parameters that makes one.
      num_heads, head_dim: of the scheme that is checked.
      **hyper: its hyper-parameters; the others keep their defaults.

    Raises:
      ValueError: no scheme, an unknown hyper-parameter or a bad value, or too few positions for the checks.
    """
    dims = {"num_heads": num_heads, "head_dim": head_dim, "model_dim": num_heads * head_dim}
    if isinstance(scheme, str):
        make = functools.partial(make_scheme, scheme)
    elif inspect.isclass(scheme):
        if not issubclass(scheme, Scheme):
            raise UserError(f"{scheme.__name__} is no subclass of posjax.Scheme.")
        make = functools.partial(_build, scheme)
    else:
        make = scheme
    found = Subject(functools.partial(make, **dims, **hyper))
    if not isinstance(found.scheme, Scheme):
        raise UserError(f"A posjax.Scheme is expected; {scheme!r} makes {type(found.scheme).__name__}.")
    if found.scheme.max_length is not None and found.scheme.max_length < _NEEDED_LENGTH:
        raise UserError(f"max_length is {found.scheme.max_length}; the checks need at least {_NEEDED_LENGTH} positions.")
    return found


def _build(cls, *, num_heads, head_dim, model_dim, rngs, **hyper):
    return SCHEMES.build(cls.__name__, cls, hyper, num_heads=num_heads, head_dim=head_dim, model_dim=model_dim, rngs=rngs)
