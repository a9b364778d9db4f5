"""Keys and values of the tokens seen so far, in a buffer of fixed size."""
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posjax.errors import UserError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """What one attention layer remembers: rows `0 .. length - 1` of each buffer are written.

    Attributes:
      k, v: `[B, S, G, Dk]`, `[B, S, G, Dv]`, S being the size.
      positions, segment_ids: int32 `[B, S]`.
      features: a pytree of `[B, S, ...]` (`Scheme.features`), or None.
      length: int32 scalar, the tokens written so far; the same for all rows, since padding is written too.
    """
    k: Any
    v: Any
    positions: Any
    segment_ids: Any
    features: Any
    length: Any

    @classmethod
    def empty(cls, size, *, k, v, features=None):
        """An empty cache of `size` tokens, for tokens like the arrays or shapes `k`, `v` `[B, T, G, D]` and `features`."""
        if not isinstance(size, int | np.integer) or size < 1:
            raise UserError(f"The size of a cache is {size!r}; it must be a whole number of at least 1.")

        def buffer(like):
            return jnp.zeros((like.shape[0], size, *like.shape[2:]), like.dtype)
        index = jnp.zeros((k.shape[0], size), jnp.int32)
        return cls(buffer(k), buffer(v), index, index, jax.tree.map(buffer, features), jnp.zeros((), jnp.int32))

    @property
    def size(self):
        return self.k.shape[1]

    def following(self, count):
        """Positions and segments int32 `[B, count]` of the next tokens, unless told otherwise: each row goes on."""
        last = jnp.maximum(self.length - 1, 0)
        position = jnp.where(self.length > 0, self._at(self.positions, last), -1)
        segment = self._at(self.segment_ids, last)
        steps = jnp.arange(1, count + 1, dtype=jnp.int32)
        return position + steps[None], jnp.broadcast_to(segment, (segment.shape[0], count))

    def append(self, *, k, v, positions, segment_ids, features=None):
        """The cache with T more tokens, arrays like its own of `[B, T, ...]`.

        Raises:
          ValueError: no room for T tokens, where the length can be read. Inside a trace the tokens without room are
            dropped, what is written stays, and `overfull` says so.
        """
        count = k.shape[1]
        if not isinstance(self.length, jax.core.Tracer) and int(np.asarray(self.length)) + count > self.size:
            raise UserError(f"The cache has room for {self.size} tokens and holds {int(np.asarray(self.length))}; "
                            f"{count} more do not fit.")
        where = self.length + jnp.arange(count, dtype=jnp.int32)

        def write(buffer, new):
            if new.shape != (*buffer.shape[:1], count, *buffer.shape[2:]):
                raise UserError(f"Tokens of shape {new.shape} do not fit into a cache of shape {buffer.shape}.")
            # Not `dynamic_update_slice`, which would shift a block that does not fit onto what is written.
            return buffer.at[:, where].set(new.astype(buffer.dtype), mode="drop", unique_indices=True, indices_are_sorted=True)
        return KVCache(write(self.k, k), write(self.v, v), write(self.positions, positions),
                       write(self.segment_ids, segment_ids), jax.tree.map(write, self.features, features),
                       self.length + count)

    @property
    def overfull(self):
        """bool scalar: whether more was appended than there is room for."""
        return self.length > self.size

    @staticmethod
    def _at(x, index):
        return jax.lax.dynamic_slice_in_dim(x, jnp.minimum(index, x.shape[1] - 1), 1, axis=1)
