"""Learned numbers that must stay within bounds."""
import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def clamp(x, low, high):
    """`x` within bounds, with the gradient that a descent within them has.

    A plain clip has half of it or none at a bound and none beyond. Here only a gradient that leads farther out is stopped, and
    only beyond a bound: a parameter that left can return. That is not linear in the gradient, which must be whole when it gets
    here: where a batch is computed in parts, clamp the parameters before it is divided (`Scheme.clamp_parameters`).
    """
    return jnp.clip(x, low, high)


def _backward(low, high, x, gradient):
    outwards = ((x < low) & (gradient > 0)) | ((x > high) & (gradient < 0))
    return (jnp.where(outwards, 0, gradient),)


clamp.defvjp(lambda x, low, high: (jnp.clip(x, low, high), x), _backward)
