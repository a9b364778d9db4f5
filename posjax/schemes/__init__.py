"""Positional schemes, one file each. Importing the package registers them all."""
from posjax.schemes import alibi, learned, nope, p_rope, rope, scaled_rope, sinusoidal  # noqa: F401
