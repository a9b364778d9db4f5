import jax.numpy as jnp
from flax import nnx

from posjax.errors import UserError
from posjax.ops.bias import distances
from posjax.ops.rows import look_up, sum_by_index
from posjax.schemes.base import Scheme, required_rngs
from posjax.schemes.registry import register_scheme


@register_scheme("shaw")
class Shaw(Scheme):
    """A learned vector for each clipped distance, added to the key, and another added to the value.

    `logit_ij = q_i . (k_j + aK_c) / sqrt(Dh)` and `out_i = sum_j w_ij (v_j + aV_c)`, with `c = clip(j - i, -k, k)`. The two
    tables `[2 k + 1, Dh]` are shared by all heads. Shaw et al. 2018 (arXiv 1803.02155). No vector of a pair of tokens is
    ever made: the products of a query with the table are looked up by distance, and weights are summed by distance.

    Training and evaluation:
      Distances beyond k look alike, at any length: there the order of tokens is lost, but nothing is undefined.
      Under the causal mask the rows of keys that lie ahead of the query (j > i) are never used and stay as they began.

    Where implementations differ:
      tensor2tensor always adds to the values too, others (Wav2Vec2-BERT) to the keys alone: `value_vectors=False`.
      The base model of the paper has k = 16 and the big one k = 8 with tables of their own in each layer. By default one pair
      of tables serves all layers: `layers.parameters = "own"` gives each its own.
      The tables begin as in tensor2tensor, Glorot uniform; the paper does not say.

    Args:
      max_distance: k, in positions.
      value_vectors: whether there is a table for the values.
    """
    formula = "q.(k + aK[c]) / sqrt(Dh), and w (v + aV[c]), c = clip(j - i, -max_distance, max_distance); aK, aV learned"
    reference = "Shaw et al. 2018, arXiv 1803.02155"
    cost = "a lookup a logit and a sum a weight, O(T^2) a head"
    relative = True

    def __init__(self, *, max_distance=16, value_vectors=True, **dims):
        super().__init__(**dims)
        if not max_distance >= 1:
            raise UserError(f"shaw's max_distance is {max_distance}; it must be at least 1.")
        rngs = required_rngs("shaw", dims)
        self.max_distance = max_distance

        def table():
            return nnx.Param(nnx.initializers.glorot_uniform()(rngs.params(), (2 * max_distance + 1, self.head_dim)))
        self.key_table = table()
        if value_vectors:
            self.value_table = table()
        else:
            self.values = None

    def logits(self, q, k, q_positions, k_positions, *, visible, scale, features):
        q = q * jnp.asarray(scale, q.dtype)
        by_content = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
        by_distance = jnp.einsum("bqhd,rd->bhqr", q, self.key_table[...].astype(q.dtype), preferred_element_type=jnp.float32)
        return by_content + look_up(by_distance, self._rows(by_content.shape, q_positions, k_positions))

    def values(self, weights, q_positions, k_positions):
        table = self.value_table[...].astype(jnp.float32)
        by_distance = sum_by_index(weights, self._rows(weights.shape, q_positions, k_positions), table.shape[0])
        return jnp.einsum("bhqr,rd->bqhd", by_distance, table)

    def _rows(self, shape, q_positions, k_positions):
        """Which row of the tables, int32 of `shape` `[B, H, Q, K]`."""
        rows = jnp.clip(-distances(q_positions, k_positions), -self.max_distance, self.max_distance) + self.max_distance
        return jnp.broadcast_to(rows[:, None] if rows.ndim == 3 else rows[None, None], shape)
