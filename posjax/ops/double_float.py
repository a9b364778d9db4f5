"""Numbers as the sum of two float32: what must be computed on the device and yet be better than float32.

A number is a pair `(high, low)` of arrays, right to about 2**-46. After Dekker 1971 (Numerische Mathematik 18).

Compilers keep the order of float operations but for two things, around which this is written: they contract a product and
a sum into one operation with one rounding, in some places and not in others; and XLA takes `(x + c) - c` for `x` where c is a
constant. So nothing here adds a constant where the sum must be rounded, and neither must a caller: hide what is one
behind `jax.lax.optimization_barrier`.
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
    return _renormalised(high.astype(jnp.float32), (n - high).astype(jnp.float32))


def add(x, y):
    high, error = _two_sum(x[0], y[0])
    return _renormalised(high, error + (x[1] + y[1]))


def multiply(x, y):
    # Of halves of 12 bits, whose products are exact, contracted or not.
    (a, b), (c, d) = _halves(x[0]), _halves(y[0])
    middle, error = _two_sum(a * d, b * c)
    high, more = _two_sum(a * c, middle)
    return _renormalised(high, more + (error + b * d + (x[0] * y[1] + x[1] * y[0])))


def scale(x, factor):
    """`x` times a power of two, or a sign."""
    return x[0] * factor, x[1] * factor


def expm1(x):
    """For |x| up to about 40, by eight doublings of `expm1(x / 256)`."""
    small = scale(x, 2.0**-8)
    term = total = small
    for n in range(2, 9):
        term = multiply(multiply(term, small), from_host(1 / n))
        total = add(total, term)
    for _ in range(8):
        total = add(scale(total, 2.0), multiply(total, total))
    return total


def log(x):
    """The power of two apart, float32's logarithm of the rest, and one step that corrects it."""
    exponent = (jax.lax.bitcast_convert_type(x[0], jnp.int32) >> 23) - 127
    mantissa = scale(x, jax.lax.bitcast_convert_type((127 - exponent) << 23, jnp.float32))
    guess = jnp.log(mantissa[0])
    zero = jnp.zeros_like(guess)
    # mantissa * exp(-guess) - 1, of the size of 1e-7: its own logarithm but for 1e-14. The difference from 1 is exact.
    off = add((mantissa[0] - 1.0, mantissa[1]), multiply(mantissa, expm1((-guess, zero))))
    whole = multiply((exponent.astype(jnp.float32), zero), from_host(np.log(2.0)))
    return add(whole, add((guess, zero), (off[0], zero)))


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
