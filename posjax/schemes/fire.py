import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from posjax.errors import UserError
from posjax.ops.bias import distances
from posjax.schemes.base import Scheme, required_rngs
from posjax.schemes.registry import register_scheme

# In the ratio, so that c = 0 gives 0 and not 0/0.
EPSILON = 1e-6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FireBias:
    """The bias of `FIRE`: scalars `c` and `threshold`, and an MLP `[W]`, `[W]`, `[W, H]`, all float32."""
    c: jax.Array
    threshold: jax.Array
    hidden_kernel: jax.Array
    hidden_bias: jax.Array
    out_kernel: jax.Array

    def block(self, q_positions, k_positions):
        def psi(x):
            return jnp.log1p(jnp.abs(self.c) * x)
        distance = jnp.abs(distances(q_positions, k_positions)).astype(jnp.float32)
        reach = jnp.maximum(q_positions.astype(jnp.float32), jnp.abs(self.threshold))[..., :, None]
        ratio = psi(distance) / (psi(reach) + EPSILON)
        fold = (1,) * ratio.ndim + (-1,)
        hidden = jax.nn.relu(ratio[..., None] * self.hidden_kernel.reshape(fold) + self.hidden_bias.reshape(fold))
        return jnp.einsum("...qkw,wh->...hqk", hidden, self.out_kernel, precision="highest")


@register_scheme("fire")
class FIRE(Scheme):
    """A small MLP of the distance, on a logarithmic scale and as a fraction of how far the query reaches back.

    Li et al. 2023 (arXiv 2310.04418): `f_h(psi(i - j) / psi(max(i, L)))`, `psi(x) = ln(|c x| + 1)`, i from 0. The fraction
    stays in 0 to 1 at any length, so that no distance is new to the MLP. It depends on the position of the query, which
    is thus not only relative. c, L and the MLP (one hidden layer, ReLU) are learned, and shared by all layers.

    As in the reference of McLeish et al. 2024, L is learned as a factor of its start, and the MLP starts as PyTorch's linear
    layers do: U(-1, 1) for the hidden layer, U(-1/sqrt(W), 1/sqrt(W)) for the last, whose own bias is left out: it is the
    same for all keys, so the softmax never sees it.

    Args:
      mlp_width: hidden channels W of the MLP.
      c: start of the logarithm's slope, per position.
      threshold: start of L, in positions: up to there, the fraction is of L.

    Training and evaluation:
      Up to L (512 at first) the bias is relative, and a distance above the trained ones is a new number to the MLP. Beyond L
      the distance counts as a fraction of the query's own position: never above 1, but a model trained well below L has not
      seen all fractions up to 1, and the bias of a given distance changes as the query moves on. Nothing clamps.

    Where implementations differ:
      The paper feeds real positions; McLeish et al. train on random ones (the policies randomised, random_offset). Their
      1e-6 in the divisor is kept, without which c = 0 has a NaN for gradient. The query's position counts from 0, as
      theirs, so a shift, as by left padding without its own positions, changes the result.
    """
    formula = "logit + f_h(psi(i - j) / psi(max(i, L))), psi(x) = ln(1 + |c x|); f, c, L learned"
    reference = "Li et al. 2023, arXiv 2310.04418"
    cost = "bias by an MLP on every pair of tokens: O(mlp_width T^2) a head"

    def __init__(self, *, mlp_width=32, c=0.1, threshold=512.0, **dims):
        super().__init__(**dims)
        if mlp_width < 1:
            raise UserError(f"fire's mlp_width is {mlp_width}; it must be at least 1.")
        for name, value in (("c", c), ("threshold", threshold)):
            if not value > 0:
                raise UserError(f"fire's {name} is {value}; it must be above 0.")
        rngs = required_rngs("fire", dims)

        def uniform(bound, *shape):
            return nnx.Param(jax.random.uniform(rngs.params(), shape, minval=-bound, maxval=bound))
        self.threshold = threshold
        self.c, self.threshold_factor = nnx.Param(jnp.float32(c)), nnx.Param(jnp.float32(1))
        self.hidden_kernel, self.hidden_bias = uniform(1.0, mlp_width), uniform(1.0, mlp_width)
        self.out_kernel = uniform(mlp_width ** -0.5, mlp_width, self.num_heads)

    def bias(self):
        c, factor, *mlp = (param[...].astype(jnp.float32) for param in (
            self.c, self.threshold_factor, self.hidden_kernel, self.hidden_bias, self.out_kernel))
        return FireBias(c, factor * self.threshold, *mlp)
