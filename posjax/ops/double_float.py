"""Numbers as the sum of two float32: what must be computed on the device and yet be better than float32.

A number is a pair `(high, low)` of arrays, right to about 2**-46. After Dekker 1971 (Numerische Mathematik 18).
"""
import jax
import jax.numpy as jnp
import numpy as np


def from_host(x):
    """A float64 number or array of the host as a pair."""
    high = np.asarray(x, np.float32)
    return jnp.asarray(high), jnp.asarray(np.asarray(x, np.float64) - high, jnp.float32)


def from_int(n):
    """An int32 array as a pair, exactly."""
    high = (n >> 12) << 12  # 20 bits, and the 12 below them
    return high.astype(jnp.float32), (n - high).astype(jnp.float32)


def add(x, y):
    high, error = _two_sum(x[0], y[0])
    return _renormalised(high, error + (x[1] + y[1]))


def multiply(x, y):
    # Of halves of 12 bits, whose products are exact: compilers contract a product and a sum into one operation with one
    # rounding, in some places and not in others, and a rounded product would then be two different numbers.
    (a, b), (c, d) = _halves(x[0]), _halves(y[0])
    middle, error = _two_sum(a * d, b * c)
    high, more = _two_sum(a * c, middle)
    return _renormalised(high, more + (error + b * d + (x[0] * y[1] + x[1] * y[0])))


def scale(x, factor):
    """`x` times a power of two, or a sign."""
    return x[0] * factor, x[1] * factor


def exp(x):
    """For |x| up to about 40: eight doublings of `exp(x / 256) - 1`, which keeps its digits as `exp` would not."""
    small = scale(x, 2.0**-8)
    result = total = small
    for n in range(2, 9):
        result = multiply(multiply(result, small), from_host(1 / n))
        total = add(total, result)
    for _ in range(8):
        total = add(scale(total, 2.0), multiply(total, total))
    return add(total, (jnp.ones_like(x[0]), jnp.zeros_like(x[1])))


def log(x):
    """For x of at least 1: the power of two apart, float32's logarithm of the rest and one step that corrects it."""
    exponent = (jax.lax.bitcast_convert_type(x[0], jnp.int32) >> 23) - 127
    mantissa = scale(x, jax.lax.bitcast_convert_type((127 - exponent) << 23, jnp.float32))
    guess = jnp.log(mantissa[0])
    ratio = multiply(mantissa, exp((-guess, jnp.zeros_like(guess))))
    off = add(ratio, (-jnp.ones_like(guess), jnp.zeros_like(guess)))[0]  # exact to 1e-14, and the log of 1 + off is off
    whole = multiply((exponent.astype(jnp.float32), jnp.zeros_like(guess)), from_host(np.log(2.0)))
    return add(whole, add((guess, jnp.zeros_like(guess)), (off, jnp.zeros_like(guess))))


def _two_sum(a, b):
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _renormalised(high, low):
    total = high + low
    return total, low - (total - high)


def _halves(x):
    high = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.int32) & -4096, jnp.float32)
    return high, x - high
