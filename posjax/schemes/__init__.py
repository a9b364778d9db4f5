"""Positional schemes, one file each. Importing the package registers them all."""
from posjax.schemes import alibi, fire, hard_alibi, kerple, learned, nope, rope, sandwich, sinusoidal, t5  # noqa: F401
