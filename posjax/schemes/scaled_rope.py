import warnings

import jax
import jax.numpy as jnp
import numpy as np

from posjax.errors import UserError, unknown
from posjax.ops import double_float
from posjax.ops.rotary import Rotary
from posjax.schemes.registry import register_scheme
from posjax.schemes.rope import RoPE
from posjax.schemes.rope_scaling import SCALINGS, Plain, inverse_frequencies, scale


@register_scheme("scaled_rope")
class ScaledRoPE(RoPE):
    """RoPE with frequencies, and sometimes an amplitude, changed for contexts longer than the original.

    No parameters: it can take the place of the `rope` that a model was trained with. The formulas are in
    `rope_scaling.py`, one function for each `rope_type`; names and meanings are those of the Hugging Face library
    where it has them. "dynamic", "dynamic_paper" and "longrope" depend on the length of the sequence.

    Args:
      base, fraction, layout: as in rope (rope_theta and partial_rotary_factor there).
      rope_type: "default" (none), "linear", "ntk", "dynamic", "dynamic_paper", "ntk_by_parts", "yarn", "longrope", "llama3".
      factor: how many times the original context is wanted; 1 is no extension.
      original_max_position_embeddings: tokens that the model was trained with.
      ramp: of yarn: "index" (all checkpoints) or "rotations" (the paper).
      beta_fast, beta_slow: of yarn and ntk_by_parts: pairs that turn more often in the original length are kept (None for 32),
        pairs that turn less are divided by the factor (None for 1).
      truncate: of yarn: whether the bounds of the ramp are rounded outwards, to whole pairs (None for True).
      attention_factor: of yarn and longrope: the amplitude; None for yarn's `0.1 ln(factor) + 1`, or longrope's own.
      mscale, mscale_all_dim: of yarn, together: the amplitude is the ratio of `0.1 mscale ln(factor) + 1` of both.
      low_freq_factor, high_freq_factor: of llama3: as beta_slow and beta_fast, without defaults.
      short_factor, long_factor: of longrope: divisors, one for each pair, up to the original length and beyond it.

    Training and evaluation:
      "linear", "ntk", "ntk_by_parts", "yarn" and "llama3" rotate alike at every length, so also short sequences as scaled.
      "dynamic", "dynamic_paper" and "longrope" change past the original length, each row by its own length, and rotate its
      earlier keys anew. At factor 1 (longrope: and divisors of 1) each is plain rope bit for bit. Nothing clamps.

    Where implementations differ:
      - dynamic: Hugging Face's base grows by `factor * length / L - (factor - 1)`, the YaRN paper's by `length / L`
        ("dynamic_paper"): from 10000 to 30528 and 20221 at twice the length (Dh 128, factor 2). vLLM fixes one for all lengths.
      - yarn, ramp: all code has it linear in the index of the pair (the default), the paper in turns ("rotations"): up to 4.3
        times apart on single pairs (the settings of DeepSeek-V3, gpt-oss). Its bounds are rounded in all but gpt-oss
        (`truncate=False`), and clamped to r - 1 as in Hugging Face, where others clamp to the last pair. Where no pair turns
        once in L, Hugging Face scales none; here all but the first are.
      - yarn, length: it applies at all lengths, as there; DeepSeek's own code applies it only where the context exceeds L.
      - yarn, amplitude: `attention_factor` replaces it, as there (vLLM multiplies); `mscale` without `mscale_all_dim` does
        nothing, as there (DeepSeek's code uses it). DeepSeek's factor on the softmax scale comes apart (a temperature).
      - longrope: a row switches by its own length (Hugging Face: by the longest of the batch; vLLM: once, at start-up), with
        one amplitude at all lengths (PhiMoE has two). The paper's unscaled first tokens are left out, as by everyone.

    Raises:
      ValueError: one that the `rope_type` does not use, or misses.
    """
    formula = "as rope, theta_k and the amplitude of q and k changed by linear, NTK, dynamic, YaRN, LongRoPE or Llama 3 scaling"
    reference = "Chen et al. 2023, arXiv 2306.15595; Peng et al. 2023, arXiv 2309.00071; Ding et al. 2024, arXiv 2402.13753"
    cost = "rotates q and k: O(T Dh) a head; a cache keeps raw keys where the length matters"

    def __init__(self, *, base=10_000.0, fraction=1.0, layout="half_split", rope_type="default", factor=None,
                 original_max_position_embeddings=None, ramp="index", beta_fast=None, beta_slow=None, truncate=None,
                 attention_factor=None, mscale=None, mscale_all_dim=None, low_freq_factor=None, high_freq_factor=None,
                 short_factor=None, long_factor=None, **dims):
        super().__init__(base=base, fraction=fraction, layout=layout, **dims)
        if rope_type == "proportional":
            raise UserError("rope_type proportional is a scheme of its own: p_rope.")
        if rope_type not in SCALINGS:
            raise unknown("rope_type", rope_type, SCALINGS.keys() - {"proportional"})
        options = {"factor": factor, "original_max_position_embeddings": original_max_position_embeddings,
                   "ramp": None if ramp == "index" else ramp, "beta_fast": beta_fast, "beta_slow": beta_slow,
                   "truncate": truncate, "attention_factor": attention_factor, "mscale": mscale,
                   "mscale_all_dim": mscale_all_dim, "low_freq_factor": low_freq_factor, "high_freq_factor": high_freq_factor,
                   "short_factor": short_factor, "long_factor": long_factor}
        self.rope_type = rope_type
        self.options = tuple((key, tuple(value) if key in ("short_factor", "long_factor") else value)
                             for key, value in options.items() if value is not None)
        self.original_length = original_max_position_embeddings
        self.depends_on_length = rope_type in _AT_LENGTH and not (rope_type == "dynamic" and factor == 1)
        self.relative = not self.depends_on_length
        self.frequencies()  # what is missing, not used or wrong is refused here
        if mscale and mscale_all_dim:
            warnings.warn("mscale beside mscale_all_dim lowers yarn's amplitude to their ratio, because DeepSeek's models "
                          "multiply the softmax scale as well: by posjax.softmax_scale_multiplier, which this scheme "
                          "leaves to the model.", stacklevel=2)

    def frequencies(self, length=None):
        """Inverse frequencies, float64 `[r / 2]`, and amplitude for a length, on the host."""
        return scale(Plain(self.base, self.head_dim, self.rotary_dim, length), self.rope_type, dict(self.options))

    def plain(self):
        return super().rotary()

    def rotary(self, length=None):
        if length is None or isinstance(length, int | np.integer):
            inv_freq, amplitude = self.frequencies(length)
            return Rotary.from_inv_freq(inv_freq, amplitude=amplitude, layout=self.layout)
        return _AT_LENGTH[self.rope_type](self, length) if self.depends_on_length else self.rotary()


def _switched(scheme, length):
    original = int(scheme.original_length)
    return _select(length, original, scheme.rotary(original + 1), scheme.rotary())


def _grown(scheme, length):
    """Frequencies of a dynamic scaling for lengths known on the device alone, as exact as those of the host.

    A base times `ratio ** (r / (r - 2))` is a factor of `ratio ** (-2k / (r - 2))` on frequency k.
    """
    r, original = scheme.rotary_dim, int(scheme.original_length)
    factor = dict(scheme.options).get("factor", 1.0)  # that of dynamic_paper is the ratio of lengths itself
    turns = _slowed(length, original, *(double_float.from_host(x) for x in (
        factor, 1 / original, -np.arange(0, r, 2) / (r - 2), inverse_frequencies(r, scheme.base) / (2 * np.pi))))
    return _select(length, original, Rotary.from_turns(turns, layout=scheme.layout), scheme.rotary())


@jax.jit
def _slowed(length, original, factor, share, exponents, turns):
    """`turns * (1 + factor * (length / original - 1)) ** exponents`: pairs of float32 `[..., r / 2]` for int32 `[...]`."""
    # Opaque to the compiler: it reorders sums with constants (see `double_float`).
    length, factor, share, exponents, turns = jax.lax.optimization_barrier((length, factor, share, exponents, turns))
    within = jnp.minimum(length, original)
    grown = double_float.multiply(double_float.from_int(length - within), factor)
    ratio = double_float.multiply(double_float.add(double_float.from_int(within), grown), share)
    log_ratio = [x[..., None] for x in double_float.log(ratio)]
    exponents, turns = ([x.reshape((1,) * length.ndim + (-1,)) for x in pair] for pair in (exponents, turns))
    power = double_float.expm1(double_float.multiply(log_ratio, exponents))
    # Fused with the rotation, it would be computed for every position anew, and take minutes to compile (jax 0.12, CPU).
    return jax.lax.optimization_barrier(double_float.add(turns, double_float.multiply(turns, power)))


def _select(length, original_length, beyond, within):
    """One rotation for each length: `beyond` if above the original, bit for bit `within` if not."""
    longer = (length > original_length)[..., None]

    def choose(a, b):
        return jnp.where(longer, *(x.reshape((1,) * (longer.ndim - x.ndim) + x.shape) for x in (a, b)))
    return Rotary(choose(beyond.turns, within.turns), choose(beyond.rest, within.rest), within.amplitude, within.layout)


_AT_LENGTH = {"dynamic": _grown, "dynamic_paper": _grown, "longrope": _switched}
