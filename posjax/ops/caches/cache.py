"""Keys and values of the tokens seen so far: rows of their own lengths, in one of three layouts."""
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from posjax.errors import UserError
from posjax.ops.attention import check_window
from posjax.ops.caches.codecs import decode, encode
from posjax.ops.caches.layouts import Dense, Paged, Sliding
from posjax.ops.rotary import check_positions

# The segment of slots that hold no token: no query is of it.
UNWRITTEN = -2**31


class Tokens(NamedTuple):
    """What T tokens bring to attention: keys and values `[B, T, G, D]`, int32 `[B, T]`, and `Scheme.features`."""
    k: Any
    v: Any
    positions: Any
    segment_ids: Any
    features: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """What one attention layer remembers of B rows, each of its own length. Made by `posjax.make_cache`.

    Attributes:
      layout: where the tokens are (`posjax.ops.caches.layouts`).
      length: int32 `[B]`, tokens of each row so far.
      overfull: bool `[B]`: rows that were given more than there was room for. Such a row keeps what it has, takes nothing
        more and gives NaN, until it is released.
      last_position, last_segment: int32 `[B]`, of the last token of each row; -1 and 0 before the first.
      size: most tokens of a row; None where there is no end.
      window: the number of last tokens that are kept; None for all.
      quantise: how keys and values are held; None for as they come.
      dtype: of the keys and values that come.
    """
    layout: Any
    length: Any
    overfull: Any
    last_position: Any
    last_segment: Any
    size: int | None = dataclasses.field(metadata={"static": True})
    window: int | None = dataclasses.field(metadata={"static": True})
    quantise: str | None = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def empty(cls, size, *, k, v, features=None, window=None, page_size=None, num_pages=None, quantise=None):
        """An empty cache for tokens like the shapes `k`, `v` `[B, 1, G, D]` and `features`; options as in `make_cache`."""
        for name, value in (("size of a cache", size), ("page_size", page_size), ("num_pages", num_pages)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1):
                raise UserError(f"The {name} is {value!r}; it must be a whole number of at least 1.")
        check_window(window)
        if size is None and window is None:
            raise UserError("A cache without a window needs a size: the most tokens that a row may have.")
        if (page_size is None) != (num_pages is None):
            raise UserError("page_size and num_pages go together: give both, or neither.")
        if window is not None and page_size is not None:
            raise UserError(f"A cache with a window ({window}) has no pages: each row keeps as many tokens.")
        batch = k.shape[0]

        def token():
            index = jnp.zeros((batch, 1), jnp.int32)
            k_one, v_one = (encode(jnp.zeros(x.shape, x.dtype), quantise) for x in (k, v))
            return Tokens(k_one, v_one, index, index, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), features))
        like = jax.eval_shape(token)
        if window is not None:
            layout = Sliding.empty(like, window if size is None else min(window, size))
        elif page_size is not None:
            layout = Paged.empty(like, size, page_size, num_pages)
        else:
            layout = Dense.empty(like, size)
        return cls(layout, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool), jnp.full(batch, -1, jnp.int32),
                   jnp.zeros(batch, jnp.int32), size, window, quantise, jnp.dtype(k.dtype))

    def place(self, count, *, positions=None, segment_ids=None, counts=None):
        """Where the next T = `count` tokens stand, int32 `[B, T]` each: positions and segments as given, or going on.

        Args:
          positions: `[T]` or `[B, T]`; None to go on from each row's last.
          segment_ids: `[B, T]`; None for each row's last.
          counts: as in `extend`; padding stands where the last token of its row does, which is safe under every scheme.
        """
        shape = (self.length.shape[0], count)
        if positions is None:
            positions = self.last_position[:, None] + jnp.arange(1, count + 1, dtype=jnp.int32)[None]
        else:
            check_positions(positions, shape)
            positions = jnp.broadcast_to(jnp.atleast_2d(jnp.asarray(positions, jnp.int32)), shape)
        segments = self.last_segment[:, None] if segment_ids is None else jnp.asarray(segment_ids, jnp.int32)
        if segments.shape not in (shape, (shape[0], 1)):
            raise UserError(f"segment_ids must have shape {shape}; got {segments.shape}.")
        segments = jnp.broadcast_to(segments, shape)
        if counts is not None:
            counts = self._counts(counts)
            real = jnp.arange(count, dtype=jnp.int32)[None] < counts[:, None]
            positions, segments = (jnp.where(real, x, _last(x, counts, before)[:, None]) for x, before in (
                (positions, jnp.maximum(self.last_position, 0)), (segments, self.last_segment)))
        return positions, segments

    def extend(self, tokens, counts=None):
        """The cache with T more tokens a row, and what they are to attend to.

        Args:
          tokens: `Tokens`.
          counts: int32 `[B]`: how many of the T each row takes, the first ones; the others are padding. None for all.

        Returns:
          The cache; the `Tokens` `[B, K, ...]` to attend to, old and new; the index among them of the first new one, int32
          `[]` or `[B]`.

        Raises:
          ValueError: tokens of another shape, or no room for them, where that can be read. Inside a trace a row without
            room takes none, keeps what it has and is `overfull`.
        """
        batch, count = self.length.shape[0], tokens.positions.shape[1]
        if self.size is not None and count > self.size:
            raise UserError(f"The cache has room for {self.size} tokens a row; {count} at a time do not fit.")
        new = tokens._replace(k=encode(tokens.k, self.quantise), v=encode(tokens.v, self.quantise))
        self._check_shapes(new, (batch, count))
        counts = jnp.full(batch, count, jnp.int32) if counts is None else self._counts(counts)
        fits = (counts == 0) | ~self.overfull & (counts >= 0) & (counts <= count)
        if self.size is not None:
            fits &= self.length + counts <= self.size
        layout, has_room = self.layout.reserve(self.length, jnp.where(fits, counts, 0))
        if not isinstance(has_room, jax.core.Tracer):
            self._refuse(count, counts, fits, has_room)
        fits &= has_room
        taken = jnp.where(fits, counts, 0)
        layout, held, first, written = layout.extend(new, self.length, taken)
        held = held._replace(k=decode(held.k, self.dtype), v=decode(held.v, self.dtype))
        if written is not None:
            held = held._replace(segment_ids=jnp.where(written, held.segment_ids, UNWRITTEN))
        cache = dataclasses.replace(
            self, layout=layout, length=self.length + taken, overfull=self.overfull | ~fits,
            last_position=_last(tokens.positions, taken, self.last_position),
            last_segment=_last(tokens.segment_ids, taken, self.last_segment))
        return cache, held, first

    def release(self, rows):
        """The cache without the tokens of some rows, bool `[B]`: their sequences have ended, and others may begin there."""
        if getattr(rows, "shape", None) != self.length.shape or rows.dtype != bool:
            raise UserError(f"rows must be bool of shape {self.length.shape}, true where a row ends; got {rows!r}.")
        rows = jnp.asarray(rows)
        return dataclasses.replace(
            self, layout=self.layout.release(rows, self.length), length=jnp.where(rows, 0, self.length),
            overfull=self.overfull & ~rows, last_position=jnp.where(rows, -1, self.last_position),
            last_segment=jnp.where(rows, 0, self.last_segment))

    def _counts(self, counts):
        if getattr(counts, "shape", None) != self.length.shape or not jnp.issubdtype(counts.dtype, jnp.integer):
            raise UserError(f"counts must be integers of shape {self.length.shape}, one a row; got {counts!r}.")
        return jnp.asarray(counts, jnp.int32)

    def _check_shapes(self, new, lead):
        for x, held in zip(jax.tree.leaves(new), jax.tree.leaves(self.layout)):  # whose tokens come first
            if x.shape != lead + held.shape[2:]:
                raise UserError(f"Tokens of shape {x.shape} do not fit into a cache of {(*lead, *held.shape[2:])}.")

    def _refuse(self, count, counts, fits, has_room):
        """Raises for the first row without room."""
        for row in np.flatnonzero(~np.asarray(fits & has_room)):
            more, here = int(counts[row]), f"row {row} holds {int(self.length[row])}"
            if not 0 <= more <= count:
                raise UserError(f"counts is {more} for row {row}; it must be from 0 to the {count} tokens given.")
            if self.overfull[row]:
                raise UserError(f"Row {row} of the cache is overfull and takes no more: release it first.")
            if not fits[row]:
                raise UserError(f"The cache has room for {self.size} tokens a row; {here} and {more} more do not fit.")
            raise UserError(f"The cache is full: {self.layout.full()}; {here} and {more} more do not fit.")


def _last(x, counts, before):
    """Of each row the last of its first `counts` entries, `[B]`; `before` where that is 0. For `x` `[B, T]`."""
    last = jnp.take_along_axis(x, jnp.clip(counts - 1, 0, x.shape[1] - 1)[:, None], axis=1)[:, 0]
    return jnp.where(counts > 0, last, before)
