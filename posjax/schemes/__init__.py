"""Positional schemes, one file each. Importing the package registers them all."""
from posjax.schemes import (  # noqa: F401
    alibi,
    cope,
    fire,
    fox,
    hard_alibi,
    kerple,
    learned,
    nope,
    p_rope,
    rope,
    sandwich,
    scaled_rope,
    shaw,
    sinusoidal,
    t5,
    transformer_xl,
)
