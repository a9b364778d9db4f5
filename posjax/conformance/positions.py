"""What a scheme declares about positions is true."""
import numpy as np

from posjax.conformance import expect
from posjax.conformance.layer import ATOL, Layer, T, inputs, overridden, quick_compilation

# Far beyond where float32 holds an angle; odd, and no multiple of a table's size.
FAR = 10_000_019
# Besides the sums, an exact angle is rounded to 2e-7 of pi.
_SHIFTED = 2e-5


@quick_compilation()
def check_relative(subject):
    """Shifting all positions changes nothing where a scheme declares `relative`, and something where it does not."""
    scheme, x, layer = subject.scheme, inputs(subject.scheme), subject.layer
    shift = 1000 if scheme.max_length is None else min(1000, scheme.max_length - T)
    here, there = layer(x), layer(x, np.arange(T) + shift)
    if scheme.relative:
        expect.close(there, here, _SHIFTED, f"relative is True, so outputs with all positions shifted by {shift}")
    else:
        expect.differ(there, here, what=f"relative is False, so outputs with all positions shifted by {shift}")


@quick_compilation()
def check_max_length(subject):
    """Positions up to `max_length - 1` work; one past it raises, or is NaN under jit. Without a limit, far ones work."""
    scheme, x, layer = subject.scheme, inputs(subject.scheme), subject.layer
    if scheme.max_length is None:
        far = layer(x, FAR - T + 1 + np.arange(T))
        expect.finite(far, f"max_length is None, so outputs at position {FAR}")
        if scheme.relative:
            expect.close(far, layer(x), _SHIFTED, f"relative is True and max_length None, so outputs at position {FAR}")
        return
    last = np.arange(T) + scheme.max_length - T
    expect.finite(layer(x, last), f"outputs at position max_length - 1 = {last[-1]}")
    beyond = layer(x, last + 1)[:, -1]
    expect.that(np.isnan(beyond).any(), f"output at position max_length = {last[-1] + 1} under jit: expected NaN, found numbers.")
    try:
        Layer(scheme)(x, last + 1)
    except ValueError:
        return
    raise expect.CheckFailed(f"position max_length = {last[-1] + 1}, known outside of jit: expected a ValueError, found none.")


@quick_compilation()
def check_depends_on_length(subject):
    """Rotated keys change as the sequence grows where a scheme declares `depends_on_length`, and nowhere else."""
    scheme, layer = subject.scheme, subject.layer
    _, keys, _, _ = layer.projected(inputs(scheme), np.arange(T))
    farthest = FAR if scheme.max_length is None else scheme.max_length - 1

    def rotated(keys, last):
        """The first keys but one, in a sequence of this many keys that ends at position `last`."""
        positions = np.append(np.arange(keys.shape[1] - 1), last)
        return layer.scheme.rotate(keys[:, :1], keys, positions[:1], positions)[1][:, :T - 1]
    here, grown = rotated(keys, T - 1), rotated(keys, farthest)
    if scheme.depends_on_length:
        what = f"depends_on_length is True, so keys rotated in a sequence that ends at position {farthest}, not {T - 1}"
        return expect.differ(grown, here, what=what)
    what = "depends_on_length is False, so keys rotated in a "
    expect.close(grown, here, ATOL, f"{what}sequence that ends at position {farthest}, not {T - 1}")
    length = 4096 if scheme.max_length is None else min(4096, scheme.max_length)
    longer = rotated(np.concatenate([keys, np.zeros((keys.shape[0], length - T, *keys.shape[2:]), keys.dtype)], 1), length - 1)
    expect.close(longer, here, ATOL, f"{what}batch of {length} tokens, not {T}")


@quick_compilation()
def check_permutation(subject):
    """Without a causal mask, permuted tokens permute the outputs where no hook is overridden, and only there."""
    scheme, x, layer = subject.scheme, inputs(subject.scheme), subject.layer
    if scheme.causal_only:
        try:
            layer(x, causal=False)
        except ValueError:
            return
        raise expect.CheckFailed("causal_only is True, so causal=False: expected a ValueError, found none.")
    order = np.array([4, 0, 7, 1, 8, 2, 6, 3, 5])
    permuted, expected = layer(x[:, order], causal=False), layer(x, causal=False)[:, order]
    if overridden(scheme) or scheme.temperature is not None:
        expect.differ(permuted, expected, what="a hook of the scheme is overridden, so outputs of permuted tokens")
    else:
        expect.close(permuted, expected, _SHIFTED, "no hook of the scheme is overridden, so outputs of permuted tokens")
