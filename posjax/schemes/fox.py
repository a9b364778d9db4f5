
import jax
import jax.numpy as jnp
from flax import nnx

from posjax.ops.rows import reverse_cumsum
from posjax.schemes.base import Scheme, required_rngs
from posjax.schemes.registry import register_scheme


@register_scheme("fox")
class FoX(Scheme):
    """Forgetting attention: each token, by its content, lets each head forget a share of all before it.

    Gates `f_l = sigmoid(x_l . W_f + b_f)`, one a head; `logit_ij = q_i . k_j / sqrt(Dh) + log f_{j+1} + ... + log f_i`.
    Lin et al. 2025 (arXiv 2503.02130). ALiBi is the same with gates that are constant.

    Training and evaluation:
      Uses no position, only order and content: what shifts or spreads positions changes nothing. Nothing ends or is clamped:
      what lies far is forgotten, as far as the gates say. Only tokens that the query sees make it forget: a packed
      document is untouched by the one before it. Gates are in float32 whatever the dtype of the model.

    Where implementations differ:
      b_f starts at 0 in the authors' code, so that half is forgotten at each token: `bias_init` for a longer memory. Their
      gates may also be fixed, or learned without content, with decay times spread over the heads; here they read the content.
      Their "Pro" block also has an output gate, norms of queries and keys, and shifted keys and values: no part of this.

    Args:
      bias_init: start of b_f. With b, a head remembers half after `ln 2 / ln(1 + e^-b)` tokens: 1 for 0, 38 for 4, 103 for 5.
    """
    formula = "logit + sum_(l=j+1..i) log f_l, f_l = sigmoid(x_l.W_f + b_f); W_f, b_f learned"
    reference = "Lin et al. 2025, arXiv 2503.02130"
    cost = "a running sum of gates a query, O(T^2) a head; a float32 a head and token in a cache"
    relative = True
    causal_only = True
    per_layer = True

    def __init__(self, *, bias_init=0.0, **dims):
        super().__init__(**dims)
        self.gate = nnx.Linear(self.model_dim, self.num_heads, bias_init=nnx.initializers.constant(bias_init),
                               dtype=jnp.float32, rngs=required_rngs("fox", dims))

    def features(self, x):
        """The logarithms of the forget gates, float32 `[B, T, H]`, of `x` `[B, T, D]`."""
        gate = self.gate(x.reshape(-1, x.shape[-1]))
        return jax.nn.log_sigmoid(gate).reshape(*x.shape[:-1], self.num_heads)

    def logits(self, q, k, q_positions, k_positions, *, visible, scale, features):
        by_content = scale * jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
        forgotten = jnp.where(visible[:, None], features.transpose(0, 2, 1)[:, :, None], 0.0)
        # From the key after j on.
        since = jnp.pad(reverse_cumsum(forgotten)[..., 1:], [(0, 0)] * 3 + [(0, 1)])
        return by_content + since
