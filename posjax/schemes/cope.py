import jax
import jax.numpy as jnp
from flax import nnx

from posjax.errors import UserError
from posjax.ops.rows import look_up, reverse_cumsum
from posjax.schemes.base import Scheme, required_rngs
from posjax.schemes.registry import register_scheme


@register_scheme("cope")
class CoPE(Scheme):
    """Contextual positions: a query counts the tokens since the key that its gates let count, and looks that number up.

    Gates `g_ij = sigmoid(q_i . k_j / sqrt(Dh))`, 0 where the query does not see the key; position
    `p_ij = min(g_ij + ... + g_ii, N - 1)`, a fraction; `logit_ij = q_i . k_j / sqrt(Dh) + q_i . E[p_ij]`, where a row of E
    between two is a linear blend of them. E `[N, Dh]` is learned, shared by all heads, and starts at zero.
    Golovneva et al. 2024 (arXiv 2405.18719). Not the "clipped RoPE" of the same name.

    Training and evaluation:
      Uses no position, only order and content: what shifts or spreads positions changes nothing. Counts above N - 1 are
      clamped, by definition: keys that far are alike. A count grows with the length only as far as the gates let it, but what
      was never reached in training is a row of E without a gradient: still zero.
      A count includes only keys that the query sees: a window or a packed document ends it.

    Where implementations differ:
      The paper's listing adds `q.E` undivided, the default here; the authors' repository divides it by sqrt(Dh) too unless
      told not to: `divided=True`. N is the block size and one in the repository, so that nothing is clamped in training.

    Args:
      max_position: N, the number of rows; counts are 0 to N - 1.
      divided: whether `q.E` is divided by sqrt(Dh), as `q.k` is.
    """
    formula = "logit + q.E[p], p = sum_(t=j..i) sigmoid(q_i.k_t / sqrt(Dh)), at most max_position - 1; E learned"
    reference = "Golovneva et al. 2024, arXiv 2405.18719"
    cost = "a running sum and a lookup a logit, O(T^2) a head"
    relative = True
    causal_only = True
    per_layer = True

    def __init__(self, *, max_position=64, divided=False, **dims):
        super().__init__(**dims)
        if not max_position >= 2:
            raise UserError(f"cope's max_position is {max_position}; it must be at least 2.")
        required_rngs("cope", dims)
        self.max_position, self.divided = max_position, divided
        self.table = nnx.Param(jnp.zeros((max_position, self.head_dim)))

    def logits(self, q, k, q_positions, k_positions, *, visible, scale, features):
        by_content = scale * jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
        gates = jnp.where(visible[:, None], jax.nn.sigmoid(by_content), 0.0)
        position = jnp.minimum(reverse_cumsum(gates), self.max_position - 1)
        below = jnp.floor(position)
        rows = jnp.einsum("bqhd,nd->bhqn", q.astype(jnp.float32), self.table[...].astype(jnp.float32))
        steps = jnp.diff(rows, axis=-1, append=rows[..., -1:])
        # A row and the step to the next together: looking them up is what costs.
        at = look_up(jnp.stack([rows, steps], -1), below.astype(jnp.int32))
        by_position = at[..., 0] + (position - below) * at[..., 1]
        return by_content + (scale * by_position if self.divided else by_position)
