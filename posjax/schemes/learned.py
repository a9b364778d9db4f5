import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posjax.errors import UserError
from posjax.ops.rotary import check_positions
from posjax.schemes.base import Scheme, concrete, required_rngs
from posjax.schemes.registry import register_scheme


@register_scheme("learned")
class Learned(Scheme):
    """A learned vector for every position, added to the token embedding.

    As in GPT-2 and BERT. A position without a row is an error where its value can be read, and NaN under jit: it is
    never clamped to the last row.

    Args:
      max_length: number of rows; positions 0 to `max_length - 1` exist.
      init_scale: standard deviation of the rows at the start (0.02 in GPT-2, whose token embeddings have the same).
    """
    formula = "x + W[p], W learned"
    reference = "Gehring et al. 2017, arXiv 1705.03122; Radford et al. 2019 (GPT-2)"

    def __init__(self, *, max_length=512, init_scale=0.02, **dims):
        super().__init__(**dims)
        if max_length < 1:
            raise UserError(f"learned's max_length is {max_length}; it must be at least 1.")
        rngs = required_rngs("learned", dims)
        self.max_length = max_length
        self.table = nnx.Param(init_scale * jax.random.normal(rngs.params(), (max_length, self.model_dim)))

    def embed(self, x, positions):
        check_positions(positions, x.shape[:2])
        if concrete(positions) and positions.size:
            on_host = np.asarray(positions)  # inside a trace of something else, any operation of jax is traced
            low, high = int(on_host.min()), int(on_host.max())
            if low < 0 or high >= self.max_length:
                raise UserError(f"Position {high if low >= 0 else low} has no row: "
                                f"the learned table has max_length {self.max_length} (positions 0 to {self.max_length - 1}).")
        # Out-of-range rows are NaN; a negative index would otherwise count from the end.
        rows = jnp.where(positions < 0, self.max_length, positions)
        added = jnp.take(self.table[...], rows, axis=0, mode="fill", fill_value=jnp.nan)
        return x + (added if added.ndim == 3 else added[None]).astype(x.dtype)
