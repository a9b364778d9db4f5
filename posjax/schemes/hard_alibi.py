import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from posjax.errors import UserError
from posjax.ops.bias import distances
from posjax.schemes.base import Scheme
from posjax.schemes.registry import register_scheme

# Below any logit, above the mask of attention, and finite in bfloat16: sums of it make no -inf, and no row a NaN.
BEYOND = -1e9
_NO_WINDOW = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowBias:
    """0 where `|i - j| < w`, `BEYOND` elsewhere, one window a head.

    A query that may see no key in its window (its own is of another segment) spreads its weight over those that it may.

    Attributes:
      windows: a number of positions for each of the H heads, or None where a head sees all. Known when traced.
    """
    windows: tuple = dataclasses.field(metadata={"static": True})
    of_distance: ClassVar[bool] = True

    def block(self, q_positions, k_positions):
        distance = jnp.abs(distances(q_positions, k_positions))[..., None, :, :]
        windows = np.array([_NO_WINDOW if w is None else w for w in self.windows], np.int32)
        windows = windows.reshape((1,) * (distance.ndim - 3) + (-1, 1, 1))
        return jnp.where(distance < windows, jnp.float32(0), jnp.float32(BEYOND))


@register_scheme("hard_alibi")
class HardALiBi(Scheme):
    """Some heads see a few keys only, the query's own and those just before it; the others see all and no position.

    Nothing is learned. Jelassi et al. 2024, "Repeat After Me" (arXiv 2402.01032). A window counts positions: gaps in
    them (randomised positions) leave it fewer keys. In an encoder (no causal mask) it reaches as far to both sides.

    Args:
      windows: keys that each of the first heads sees, its own among them, at least 1; the remaining heads see all.
        None for 1, 2, 3, ... for all heads but the last. (The paper leaves the number of windowed heads open.)

    Training and evaluation:
      A window holds as many positions at every length, so nothing in it is new; a head without one is nope's, and spreads
      over more keys as the context grows. Nothing clamps.

    Where implementations differ:
      A window of w is w keys with the query's own, as in Hugging Face's causal masks; flash-attn says (w - 1, 0) for it. Out
      of the window stands -1e9 and not -inf, of which a row with nothing else makes NaN: here it falls back on those keys.
    """
    formula = "logit if |i - j| < w_h, else -1e9; w_h = 1, 2, 3, ..., last heads without"
    reference = "Jelassi et al. 2024, arXiv 2402.01032"
    cost = "bias: O(T^2) a head"
    relative = True

    def __init__(self, *, windows=None, **dims):
        super().__init__(**dims)
        if windows is None:
            if self.num_heads == 1:
                raise UserError("hard_alibi leaves the last head without a window, so its only one (num_heads is 1): "
                                "give windows, or take the scheme nope.")
            windows = range(1, self.num_heads)
        if isinstance(windows, str) or not hasattr(windows, "__iter__"):
            raise UserError(f"hard_alibi's windows is {windows!r}; give one for each windowed head, as (1, 2, 3).")
        windows = tuple(windows)
        if not 1 <= len(windows) <= self.num_heads or not all(isinstance(w, int) and 1 <= w < _NO_WINDOW for w in windows):
            raise UserError(f"hard_alibi's windows is {windows}; allowed are 1 to {self.num_heads} (num_heads) integers of "
                            "at least 1.")
        self.windows = windows

    def bias(self):
        return WindowBias(self.windows + (None,) * (self.num_heads - len(self.windows)))
