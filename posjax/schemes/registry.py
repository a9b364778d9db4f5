"""The schemes that exist, and how to make one."""
from posjax.errors import UserError
from posjax.registry import Registry
from posjax.schemes.temperature import Temperature

SCHEMES = Registry("scheme", package="posjax.schemes", entry_points="posjax.schemes",
                   supplied=("num_heads", "head_dim", "model_dim", "rngs"))

register_scheme = SCHEMES.register


def make_scheme(name, *, num_heads, head_dim, model_dim=None, rngs=None, temperature=None, **hyper):
    """Makes a positional scheme by name, with no config and no model.

    Args:
      name: a registered scheme (`posjax list schemes`).
      num_heads: number of query heads, H.
      head_dim: channels a head, Dh.
      model_dim: channels of the residual stream, D; None for `num_heads * head_dim`.
      rngs: `flax.nnx.Rngs` for schemes that learn something.
      temperature: a factor on the logits (`posjax.make_temperature`), an option of every scheme; None for 1.
      **hyper: the scheme's own hyper-parameters; the others keep their defaults.

    Raises:
      ValueError: an unknown scheme or hyper-parameter (with close matches and the full list), or a bad value.
    """
    scheme = SCHEMES.make(name, hyper, num_heads=num_heads, head_dim=head_dim, model_dim=model_dim, rngs=rngs)
    if temperature is not None:
        if not isinstance(temperature, Temperature):
            raise UserError(f"temperature is {temperature!r}; it must be one, as posjax.make_temperature({temperature!r}, ...) "
                            "makes it." if isinstance(temperature, str) else
                            f"temperature is a {type(temperature).__name__}; posjax.make_temperature makes one.")
        if temperature.num_heads not in (1, num_heads):
            raise UserError(f"The temperature was made for {temperature.num_heads} heads; the scheme has {num_heads}.")
    if temperature is not None and type(temperature) is not Temperature:  # which would multiply by 1
        scheme.temperature = temperature
        scheme.relative = scheme.relative and temperature.relative
    return scheme
