"""Where a cache keeps its tokens. A layout holds a pytree of arrays and knows nothing of what they are.

All have three methods, with B rows, T new tokens a row, int32 `[B]` for `length` (tokens of each row so far) and `counts`
(how many of the T each row takes, the first ones):
  reserve(length, counts): the layout with room for them, and for each row whether it has it, bool `[B]`.
  extend(new, length, counts): the layout with the new tokens, arrays `[B, T, ...]`; then what attention is to look at:
    arrays `[B, K, ...]` with old and new tokens in order, the index of the first new one, and which are tokens at all,
    bool `[B, K]`, or None where those that are none come last.
  release(rows, length): the layout without the tokens of some rows, bool `[B]`.
One whose rows share room also has full(): how much is left of it, in words.
"""
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dense:
    """A slot for each token that a row may have: leaves `[B, S, ...]`."""
    slots: Any

    @classmethod
    def empty(cls, tokens, size):
        """For tokens of the shapes `tokens`, `[B, 1, ...]`."""
        return cls(_zeros(tokens, lambda shape: (shape[0], size)))

    def reserve(self, length, counts):
        return self, jnp.ones(length.shape, bool)

    def extend(self, new, length, counts):
        size = jax.tree.leaves(self.slots)[0].shape[1]
        step = _steps(new)
        # What is not taken goes past the end, each to an index of its own.
        index = jnp.where(step < counts[:, None], length[:, None], size) + step
        row = jnp.arange(length.shape[0], dtype=jnp.int32)[:, None]

        def write(slots, x):
            return slots.at[row, index].set(x.astype(slots.dtype), mode="drop", unique_indices=True, indices_are_sorted=True)
        slots = jax.tree.map(write, self.slots, new)
        return Dense(slots), slots, length, None

    def release(self, rows, length):
        # Zeros, since the weight of a masked slot is zero, but zero times what a broken row left (NaN) is not.
        return Dense(jax.tree.map(lambda x: jnp.where(_over(rows, x), jnp.zeros_like(x), x), self.slots))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sliding:
    """The last W tokens of each row, in order, at the end of W slots: leaves `[B, W, ...]`."""
    slots: Any

    @classmethod
    def empty(cls, tokens, window):
        return cls(_zeros(tokens, lambda shape: (shape[0], window)))

    def reserve(self, length, counts):
        return self, jnp.ones(length.shape, bool)

    def extend(self, new, length, counts):
        window, count = jax.tree.leaves(self.slots)[0].shape[1], _steps(new).shape[1]
        held = jax.tree.map(lambda old, x: jnp.concatenate([old, x.astype(old.dtype)], 1), self.slots, new)

        def last(x):
            return jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, window))(x, counts)
        index = jnp.arange(window + count, dtype=jnp.int32)
        return Sliding(jax.tree.map(last, held)), held, window, index[None] >= window - length[:, None]

    def release(self, rows, length):
        return Sliding(Dense(self.slots).release(rows, length).slots)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Paged:
    """Pages of a few tokens each, out of a pool that rows share.

    Attributes:
      pool: leaves `[P, page, ...]`.
      table: int32 `[B, most pages of a row]`: the pages of each row, in order; those that its length does not need are void.
      free: int32 `[P]`: the pages that no row has are the first `num_free`.
      num_free: int32 scalar.
    """
    pool: Any
    table: Any
    free: Any
    num_free: Any

    @classmethod
    def empty(cls, tokens, size, page_size, num_pages):
        batch = jax.tree.leaves(tokens)[0].shape[0]
        return cls(_zeros(tokens, lambda shape: (num_pages, page_size)),
                   jnp.zeros((batch, -(-size // page_size)), jnp.int32),
                   jnp.arange(num_pages, dtype=jnp.int32)[::-1], jnp.full((), num_pages, jnp.int32))

    @property
    def page_size(self):
        return jax.tree.leaves(self.pool)[0].shape[1]

    def reserve(self, length, counts):
        have = self._pages(length)
        more, fits = _granted(self._pages(length + counts) - have, self.num_free)
        slot = jnp.arange(self.table.shape[1], dtype=jnp.int32)[None]
        new = (slot >= have[:, None]) & (slot < (have + more)[:, None])
        taken = (jnp.cumsum(more) - more - have)[:, None] + slot  # the last of the free pages go first
        page = self.free.at[self.num_free - 1 - taken].get(mode="clip")
        table = jnp.where(new, page, self.table)
        return dataclasses.replace(self, table=table, num_free=self.num_free - more.sum(dtype=jnp.int32)), fits

    def extend(self, new, length, counts):
        batch, size = self.table.shape
        pages, size = self.free.shape[0], size * self.page_size
        step = _steps(new)
        index = length[:, None] + step
        row = jnp.arange(batch, dtype=jnp.int32)[:, None]
        page = self.table.at[row, index // self.page_size].get(mode="clip")
        # What is not taken goes past the end, each to a page of its own.
        page = jnp.where(step < counts[:, None], page, pages + row * step.shape[1] + step)

        def write(pool, x):
            return pool.at[page, index % self.page_size].set(x.astype(pool.dtype), mode="drop", unique_indices=True)
        pool = jax.tree.map(write, self.pool, new)
        written = jnp.arange(size, dtype=jnp.int32)[None] < (length + counts)[:, None]

        def read(pool):
            x = pool.at[self.table].get(mode="promise_in_bounds").reshape(batch, size, *pool.shape[2:])
            return jnp.where(_over(written, x), x, jnp.zeros_like(x))  # what another row left may be NaN
        return dataclasses.replace(self, pool=pool), jax.tree.map(read, pool), length, None

    def release(self, rows, length):
        slot = jnp.arange(self.table.shape[1], dtype=jnp.int32)[None]
        given_back = (rows[:, None] & (slot < self._pages(length)[:, None])).ravel()
        total = jnp.cumsum(given_back, dtype=jnp.int32)
        index = jnp.where(given_back, self.num_free + total - 1, self.free.shape[0])
        return dataclasses.replace(self, free=self.free.at[index].set(self.table.ravel(), mode="drop"),
                                   num_free=self.num_free + total[-1])

    def full(self):
        return f"of the pool's {self.free.shape[0]} pages of {self.page_size} tokens, {int(self.num_free)} are free"

    def _pages(self, tokens):
        return -(-tokens // self.page_size)


@jax.jit  # outside of any trace a loop would be compiled at each call
def _granted(wanted, available):
    """Of what rows want, `[B]`, each gets all or nothing, in order; and which rows do."""
    def one(left, want):
        fits = want <= left
        return left - jnp.where(fits, want, 0), fits
    _, fits = jax.lax.scan(one, available, wanted)
    return jnp.where(fits, wanted, 0), fits


def _zeros(tokens, lead):
    return jax.tree.map(lambda x: jnp.zeros((*lead(x.shape), *x.shape[2:]), x.dtype), tokens)


def _steps(new):
    """int32 `[1, T]`: 0 .. T - 1."""
    return jnp.arange(jax.tree.leaves(new)[0].shape[1], dtype=jnp.int32)[None]


def _over(mask, x):
    """`mask` with further axes, so that it selects from `x`."""
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))
