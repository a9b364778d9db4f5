"""Positional schemes, one file each. Importing the package registers them all."""
from posjax.schemes import alibi, learned, nope, rope, sinusoidal  # noqa: F401
