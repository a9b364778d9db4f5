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
      max_length: number of positions; 0 to `max_length - 1` exist.
      init_scale: standard deviation of the rows at the start (0.02 in GPT-2, whose token embeddings have the same).
      offset: rows before that of position 0, which no position reaches: the table has `max_length + offset` of them.

    Training and evaluation:
      Rows past the longest training sequence stay as they were drawn, but for weight decay, unless the position policy
      random_offset reaches them; no position from `max_length` on has a result.

    Where implementations differ:
      Position p takes row p in GPT-2 and BERT (offset 0, the default), and row p + 2 in OPT, BART and fairseq, whose first
      rows are left to padding: their tables load with offset 2.
    """
    formula = "x + W[p + offset], W learned"
    reference = "Gehring et al. 2017, arXiv 1705.03122; Radford et al. 2019 (GPT-2)"
    cost = "adds a row to each token: O(T D)"

    def __init__(self, *, max_length=512, init_scale=0.02, offset=0, **dims):
        super().__init__(**dims)
        if max_length < 1:
            raise UserError(f"learned's max_length is {max_length}; it must be at least 1.")
        if not init_scale > 0:
            raise UserError(f"learned's init_scale is {init_scale}; it must be above 0.")
        if not isinstance(offset, int) or offset < 0:
            raise UserError(f"learned's offset is {offset}; it must be a whole number of at least 0.")
        rngs = required_rngs("learned", dims)
        self.max_length, self.offset = max_length, offset
        self.table = nnx.Param(init_scale * jax.random.normal(rngs.params(), (max_length + offset, self.model_dim)))

    def embed(self, x, positions):
        check_positions(positions, x.shape[:2])
        if concrete(positions) and positions.size:
            on_host = np.asarray(positions)  # inside a trace of something else, any operation of jax is traced
            low, high = int(on_host.min()), int(on_host.max())
            if low < 0 or high >= self.max_length:
                raise UserError(f"Position {high if low >= 0 else low} has no row: "
                                f"the learned table has max_length {self.max_length} (positions 0 to {self.max_length - 1}).")
        # Of a small integer type, neither max_length nor a row number need fit.
        positions = jnp.asarray(positions, jnp.int32)
        # Out-of-range rows are NaN; a negative index would otherwise count from the end, or reach the rows of the offset.
        exists = (positions >= 0) & (positions < self.max_length)
        rows = jnp.where(exists, positions, self.max_length) + self.offset
        added = jnp.take(self.table[...], rows, axis=0, mode="fill", fill_value=jnp.nan)
        return x + (added if added.ndim == 3 else added[None]).astype(x.dtype)
