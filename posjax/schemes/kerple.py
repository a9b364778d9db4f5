import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from posjax.errors import unknown
from posjax.ops.bias import distances, per_head
from posjax.schemes.base import Scheme, required_rngs
from posjax.schemes.registry import register_scheme

KINDS = ("log", "power")
SMALLEST = 0.01
LARGEST_POWER = 2.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KerpleBias:
    """`-r1 ln(1 + r2 |i - j|)` or `-r1 |i - j|^r2`, with `r1`, `r2` float32 `[H]`, clamped already."""
    r1: jax.Array
    r2: jax.Array
    kind: str = dataclasses.field(metadata={"static": True})
    of_distance: ClassVar[bool] = True

    def block(self, q_positions, k_positions):
        distance = jnp.abs(distances(q_positions, k_positions)).astype(jnp.float32)[..., None, :, :]
        r1, r2 = per_head(self.r1, distance), per_head(self.r2, distance)
        return -r1 * (jnp.log1p(r2 * distance) if self.kind == "log" else distance ** r2)


@register_scheme("kerple")
class KERPLE(Scheme):
    """Logits fall with the logarithm, or with a power, of the distance; each head learns how fast.

    Chi et al. 2022 (arXiv 2205.09921). Two parameters a head, drawn as in the authors' code: r1 from U(0, 2) and r2 from
    U(0, 1) for "log", r1 from U(0, 1) and r2 from U(0, 2) for "power". At least 0.01 at every use, so that no head is
    without position; the power at most 2, above which the kernel is no longer conditionally positive definite.

    Args:
      kind: "log" for `-r1 ln(1 + r2 |i - j|)`, the better one in the paper; "power" for `-r1 |i - j|^r2`.

    Training and evaluation:
      The bias is known at every distance and has no bound; under "log" a weight falls as a power of the distance, so
      that far keys keep some. Nothing clamps but the parameters, at both times alike.

    Where implementations differ:
      The authors' code clamps the parameters themselves before each use; here their values are, and a gradient that leads
      back inside passes, to the same end. NeMo has a bias `-b ln(1 + a |i - j|^p)` whose a is 0 and not learned: no position
      at all. A variant multiplies the logits by `exp(-a |i - j|^p)` instead; it is not this scheme.
    """
    formula = "logit - r1_h ln(1 + r2_h |i - j|), or r1_h |i - j|^r2_h; r learned"
    reference = "Chi et al. 2022, arXiv 2205.09921"
    cost = "bias with a logarithm or power: O(T^2) a head"
    relative = True

    def __init__(self, *, kind="log", **dims):
        super().__init__(**dims)
        if kind not in KINDS:
            raise unknown("kind of kerple", kind, KINDS)
        rngs = required_rngs("kerple", dims)
        self.kind = kind
        r1_max, r2_max = (2.0, 1.0) if kind == "log" else (1.0, 2.0)
        self.r1 = nnx.Param(jax.random.uniform(rngs.params(), (self.num_heads,), maxval=r1_max))
        self.r2 = nnx.Param(jax.random.uniform(rngs.params(), (self.num_heads,), maxval=r2_max))

    def bounds(self):
        return {"r1": (SMALLEST, jnp.inf), "r2": (SMALLEST, jnp.inf if self.kind == "log" else LARGEST_POWER)}

    def bias(self):
        return KerpleBias(self.within("r1"), self.within("r2"), self.kind)
