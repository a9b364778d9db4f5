"""Positional schemes, one file each. Importing the package registers them all."""
from posjax.schemes import (  # noqa: F401
    alibi,
    fire,
    hard_alibi,
    kerple,
    learned,
    nope,
    p_rope,
    pope,
    rope,
    sandwich,
    scaled_rope,
    sinusoidal,
    t5,
    xpos,
)
