import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posjax.errors import UserError
from posjax.ops.rotary import Rotary, apply_rotary, check_positions
from posjax.schemes.base import Scheme, required_rngs
from posjax.schemes.registry import register_scheme


@register_scheme("transformer_xl")
class TransformerXL(Scheme):
    """Queries meet a projected sinusoid of the distance, and biases of their own for content and for distance.

    `logit_ij = ((q_i + u) . k_j + (q_i + v) . W_r R_{i-j}) / sqrt(Dh)`, where `R_d = [sin(d theta), cos(d theta)]` has D
    channels; u, v `[H, Dh]` and W_r are learned. Dai et al. 2019 (arXiv 1901.02860), section 3.3.

    A sine or cosine of `i - j` is a product of those of i and of j: the second term is that of `W_r^T (q_i + v)`, turned by
    i, with `R_j`. So queries and keys get D channels more, and any attention serves, without T x T distances.

    Training and evaluation:
      Defined at any distance and sign. Distances beyond the trained length show combinations of slow sinusoids that were
      never seen. The angles are exact at any position.

    Where implementations differ:
      The authors shift a matrix of all distances, which is right only at or below the diagonal; here keys after the query
      have their own negative distance (sines are odd), as in XLNet. The authors' code can clamp the distance (clamp_len); posjax
      does not. u and v start as N(0, 0.02), as in DeepMind's JAX code, and W_r like any linear layer. Each layer has its own.

    Args:
      dim: channels D of the sinusoid, an even number; None for model_dim, as published. A smaller one is cheaper.
    """
    formula = "((q + u).k + (q + v).W R[i - j]) / sqrt(Dh), R a sinusoid of the distance; u, v, W learned"
    reference = "Dai et al. 2019, arXiv 1901.02860"
    cost = "dim more channels of q and k (of a cache too) in their product: O(T dim) a head"
    relative = True
    per_layer = True

    def __init__(self, *, dim: int | None = None, **dims):
        super().__init__(**dims)
        size = self.model_dim if dim is None else dim
        if size < 2 or size % 2:
            raise UserError(f"transformer_xl's dim is {size}{' (model_dim)' if dim is None else ''}; "
                            "it must be even, at least 2.")
        rngs = required_rngs("transformer_xl", dims)
        self.dim = size
        heads = (self.num_heads, self.head_dim)
        self.u, self.v = (nnx.Param(0.02 * jax.random.normal(rngs.params(), heads)) for _ in range(2))
        kernel = nnx.initializers.lecun_normal()(rngs.params(), (size, self.num_heads * self.head_dim))
        self.w_r = nnx.Param(kernel.reshape(size, *heads))

    def rotate(self, q, k, q_positions, k_positions):
        check_positions(k_positions, k.shape[:2], "k_positions")
        rotary = Rotary.from_inv_freq(10_000.0 ** (-np.arange(self.dim // 2) / (self.dim // 2)))

        def biased(bias):
            return (q.astype(jnp.float32) + bias[...].astype(jnp.float32)[None, None]).astype(q.dtype)
        projected = jnp.einsum("bqhd,chd->bqhc", biased(self.v), self.w_r[...].astype(q.dtype),
                               preferred_element_type=jnp.float32)
        for_sin, for_cos = jnp.split(projected, 2, axis=-1)
        # a sin(i - j) + b cos(i - j) = (b cos i + a sin i) cos j + (b sin i - a cos i) sin j
        turned = apply_rotary(jnp.concatenate([for_cos, -for_sin], -1), q_positions, rotary)
        angles = rotary.angles(k_positions if k_positions.ndim == 2 else k_positions[None])[:, :, None]
        basis = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1).astype(k.dtype)
        return (jnp.concatenate([biased(self.u), turned.astype(q.dtype)], -1),
                jnp.concatenate([k, jnp.broadcast_to(basis, (*k.shape[:3], self.dim))], -1))
