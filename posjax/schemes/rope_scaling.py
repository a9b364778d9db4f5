"""RoPE scaling: what each published extension of the context does to the frequencies. Host float64, nothing else.

A scaling is a function of the plain rotation whose keyword arguments are the keys that it uses, by the names of the
Hugging Face library. At factor 1 each is the plain rotation bit for bit. `posjax.rope_parameters` reads a model's config.
"""
import dataclasses
import inspect
import math

import numpy as np

from posjax.errors import UserError, unknown


def inverse_frequencies(rotary_dim, base):
    """`base ** (-2k / rotary_dim)` for k = 0 .. rotary_dim/2 - 1, in radians a position, float64 on the host."""
    return float(base) ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


@dataclasses.dataclass(frozen=True)
class Plain:
    """The rotation before it is scaled, and what is known of lengths.

    Attributes:
      base: rope_theta.
      head_dim: channels a head.
      rotary_dim: how many of them are rotated, r.
      length: tokens of the sequence; None for no more than the original length.
      max_position_embeddings: what the model is said to reach: a fallback for keys that are not given.
    """
    base: float
    head_dim: int
    rotary_dim: int
    length: int | None = None
    max_position_embeddings: int | None = None

    @property
    def inv_freq(self):
        return inverse_frequencies(self.rotary_dim, self.base)


def scale(plain, rope_type, options):
    """Inverse frequencies (float64 `[r / 2]`) and amplitude (a float) of `plain` under a scaling.

    Raises:
      ValueError: an unknown `rope_type`, a key that it does not use or that it misses, or a bad value.
    """
    if not isinstance(rope_type, str) or rope_type not in SCALINGS:
        raise unknown("rope_type", rope_type, SCALINGS)
    keys = keys_of(rope_type)
    for key in options:
        if key not in keys:
            raise UserError(f"rope_type {rope_type} does not use the key {key!r}; it uses {', '.join(keys) or 'none'}.")
    options = {key: value for key, value in options.items() if value is not None}
    for key, default in keys.items():
        if default is inspect.Parameter.empty and key not in options:
            raise UserError(f"rope_type {rope_type} needs the key {key!r}.")
    inv_freq, amplitude = SCALINGS[rope_type](plain, **{key: _checked(key, value) for key, value in options.items()})
    return inv_freq, float(amplitude)


def keys_of(rope_type):
    """The keys that a scaling uses, with their defaults."""
    parameters = inspect.signature(SCALINGS[rope_type]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def default(plain):
    """No scaling."""
    return plain.inv_freq, 1.0


def linear(plain, *, factor):
    """Position interpolation: all frequencies divided by the factor. Chen et al. 2023, arXiv 2306.15595."""
    return plain.inv_freq / _at_least_1(factor), 1.0


def ntk(plain, *, factor):
    """NTK-aware: a larger base, by which the slowest pair is divided by the factor and the fastest kept (bloc97, 2023)."""
    return _ntk(plain, _at_least_1(factor)), 1.0


def dynamic(plain, *, factor, original_max_position_embeddings=None):
    """NTK-aware by `factor * length / L - (factor - 1)` beyond the original length L, plain up to it: the library's form.

    At factor 1 that expression still grows; here factor 1 is no extension, as it is for every scaling.
    """
    original, factor = _window(plain, original_max_position_embeddings), _at_least_1(factor)
    return _grown(plain, original, 0.0 if factor == 1 else factor), 1.0


def dynamic_paper(plain, *, original_max_position_embeddings=None):
    """NTK-aware by `length / L` beyond the original length L, plain up to it. Peng et al. 2023 (YaRN), arXiv 2309.00071."""
    return _grown(plain, _window(plain, original_max_position_embeddings), 1.0), 1.0


def ntk_by_parts(plain, *, factor, original_max_position_embeddings=None, beta_fast=32.0, beta_slow=1.0):
    """Pairs with under `beta_slow` turns in L positions are divided, those with over `beta_fast` kept. Peng et al. 2023."""
    turns = _original(plain, original_max_position_embeddings) * plain.inv_freq / (2 * np.pi)
    return _blend(plain, factor, _between(turns, beta_slow, beta_fast, "beta_slow", "beta_fast")), 1.0


def yarn(plain, *, factor=None, original_max_position_embeddings=None, beta_fast=32.0, beta_slow=1.0, truncate=True,
         ramp="index", attention_factor=None, mscale=None, mscale_all_dim=None):
    """NTK-by-parts with an amplitude of `0.1 ln(factor) + 1`. Peng et al. 2023, arXiv 2309.00071.

    Every published checkpoint has `ramp="index"`, where the share kept falls linearly with the index of the pair, from
    that of `beta_fast` turns to that of `beta_slow`, both rounded outwards if `truncate`. The paper has "rotations",
    linear in turns: up to four times apart on single pairs. An `attention_factor` replaces the amplitude;
    `mscale` counts only beside `mscale_all_dim`, and then as the ratio of both.
    """
    original = _original(plain, original_max_position_embeddings)
    factor = _or_reach(plain, factor, original)
    if ramp == "rotations":
        kept = _between(original * plain.inv_freq / (2 * np.pi), beta_slow, beta_fast, "beta_slow", "beta_fast")
    elif ramp == "index":
        low, high = yarn_bounds(plain.rotary_dim, plain.base, original, beta_fast, beta_slow, truncate)
        kept = 1 - np.clip((np.arange(plain.rotary_dim // 2) - low) / (high - low), 0, 1)
    else:
        raise unknown("ramp of yarn", ramp, ("index", "rotations"))
    if attention_factor is None:
        pair = (mscale, mscale_all_dim) if mscale and mscale_all_dim else (1.0, 0.0)
        attention_factor = mscale_amplitude(factor, pair[0]) / mscale_amplitude(factor, pair[1])
    return _blend(plain, factor, kept), attention_factor


def yarn_bounds(rotary_dim, base, original_length, beta_fast=32.0, beta_slow=1.0, truncate=True):
    """The pair indices between which YaRN's ramp falls, `(low, high)`, low < high.

    Where no pair turns even `beta_slow` times the upper bound is negative, by which the library's code comes to scale
    nothing; here the ramp then starts at the first pair.
    """
    if not beta_fast > beta_slow:
        raise UserError(f"beta_fast is {beta_fast:g}; it must be above beta_slow {beta_slow:g}.")
    if not base > 1:
        raise UserError(f"yarn's index of a pair needs a base above 1; it is {base:g}.")
    low, high = (rotary_dim * math.log(original_length / (2 * math.pi * n)) / (2 * math.log(base))
                 for n in (beta_fast, beta_slow))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low = max(low, 0)
    high = max(min(high, rotary_dim - 1), low)
    return low, high + 0.001 if high == low else high


def longrope(plain, *, short_factor, long_factor, factor=None, original_max_position_embeddings=None, attention_factor=None):
    """A divisor for each pair: `short_factor` up to the original length L, `long_factor` beyond. Ding et al. 2024, 2402.13753.

    The amplitude, of both, is `sqrt(1 + ln(factor) / ln(L))` for a factor above 1; without `factor`, the factor is
    max_position_embeddings / L.
    """
    original = _original(plain, original_max_position_embeddings)
    pairs = plain.rotary_dim // 2
    for name, divisors in (("short_factor", short_factor), ("long_factor", long_factor)):
        if divisors.shape != (pairs,):
            raise UserError(f"{name} has {divisors.size} numbers; longrope needs one for each of the {pairs} rotated pairs.")
    if not original > 1:
        raise UserError(f"original_max_position_embeddings is {original:g}; longrope divides by its logarithm.")
    if attention_factor is None:
        factor = _or_reach(plain, factor, original)
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    beyond = plain.length is not None and plain.length > original
    return plain.inv_freq / (long_factor if beyond else short_factor), attention_factor


def llama3(plain, *, factor, low_freq_factor, high_freq_factor, original_max_position_embeddings=None):
    """NTK-by-parts with `low_freq_factor` and `high_freq_factor` turns as its bounds (Llama 3.1, 2024)."""
    turns = _original(plain, original_max_position_embeddings) * plain.inv_freq / (2 * np.pi)
    kept = _between(turns, low_freq_factor, high_freq_factor, "low_freq_factor", "high_freq_factor")
    return _blend(plain, factor, kept), 1.0


def proportional(plain, *, factor=1.0):
    """p-RoPE: the frequencies of the whole head, of which the slowest are 0, so pairs stay put. Barbero et al. 2024, 2410.06205.

    As many pairs turn as with a rotation of `rotary_dim` channels; `factor` divides their frequencies.
    """
    inv_freq = inverse_frequencies(plain.head_dim, plain.base) / _at_least_1(factor)
    inv_freq[plain.rotary_dim // 2:] = 0.0
    return inv_freq, 1.0


SCALINGS = {f.__name__: f for f in (default, linear, ntk, dynamic, dynamic_paper, ntk_by_parts, yarn, longrope, llama3,
                                    proportional)}


def _ntk(plain, ratio):
    """Frequencies of the base `base * ratio ** (r / (r - 2))`, so that the slowest pair is divided by the ratio."""
    if plain.rotary_dim < 4:
        raise UserError(f"NTK scaling keeps one pair and slows another, so it needs 4 rotated channels; there are "
                        f"{plain.rotary_dim}.")
    return inverse_frequencies(plain.rotary_dim, plain.base * ratio ** (plain.rotary_dim / (plain.rotary_dim - 2)))


def _grown(plain, original, slope):
    beyond = 0 if plain.length is None else max(plain.length - original, 0)
    return _ntk(plain, 1 + slope * beyond / original)


def _between(turns, low, high, low_name, high_name):
    if not high > low:
        raise UserError(f"{high_name} is {high:g}; it must be above {low_name} {low:g}.")
    return np.clip((turns - low) / (high - low), 0, 1)


def _blend(plain, factor, kept):
    """Frequencies of which the share `kept` is as it was and the rest divided by the factor."""
    theta = plain.inv_freq
    slow = theta / _at_least_1(factor)
    return np.where(kept == 1, theta, slow + kept * (theta - slow))


def mscale_amplitude(factor, mscale):
    """`0.1 mscale ln(factor) + 1`, 1 where nothing is extended."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _original(plain, original):
    """The original length L; as in the library, max_position_embeddings where it is not given."""
    if original is None:
        original = plain.max_position_embeddings
    if original is None:
        raise UserError("original_max_position_embeddings, the length that the model was trained at, is missing.")
    return original


def _window(plain, original):
    """L of a dynamic scaling: two values for it are a contradiction, since the library takes the second."""
    reach = plain.max_position_embeddings
    if None not in (original, reach) and original != reach:
        raise UserError(f"original_max_position_embeddings is {original} and max_position_embeddings {reach}, but a dynamic "
                        "scaling has one (the Hugging Face library ignores the former): give either, the length that the "
                        "model was trained at.")
    return _original(plain, original)


def _or_reach(plain, factor, original):
    if factor is not None:
        return factor
    if plain.max_position_embeddings is None:
        raise UserError("factor is missing, and so is max_position_embeddings, whose ratio to the original length it would be.")
    return plain.max_position_embeddings / original


def _at_least_1(factor):
    if not factor >= 1:
        raise UserError(f"factor is {factor:g}; it must be at least 1, which is no extension.")
    return factor


def _checked(key, value):
    """A value of the right kind: a positive number, a list of them, or one of the few that are neither."""
    if key in ("short_factor", "long_factor"):
        try:
            value = np.asarray(value, np.float64)
        except (TypeError, ValueError):
            raise UserError(f"{key} must be a list of numbers; it is {value!r}.") from None
        if value.ndim != 1 or not (np.isfinite(value) & (value > 0)).all():
            raise UserError(f"{key} must be a list of numbers above 0; it is {value.tolist()}.")
    elif key == "truncate":
        if not isinstance(value, bool):
            raise UserError(f"truncate is {value!r}; it must be true or false.")
    elif key != "ramp" and not (key.startswith("mscale") and value == 0):  # an mscale of 0 is none
        check_number(key, value)
    return value


def check_number(name, value, at_least=None):
    """Raises `ValueError` unless `value` is a finite number above 0, and of `at_least` so much."""
    if (isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 < value < math.inf
            or (at_least is not None and value < at_least)):
        allowed = "above 0" if at_least is None else f"of at least {at_least}"
        raise UserError(f"{name} is {value!r}; it must be a number {allowed}.")
