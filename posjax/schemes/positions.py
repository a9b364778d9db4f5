"""Position policies: which integers a sequence gets, apart from the scheme that uses them."""
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posjax.errors import UserError
from posjax.registry import Registry

POLICIES = Registry("position policy", package="posjax.schemes.positions")


@dataclasses.dataclass(frozen=True)
class Policy:
    """A rule for the positions of a batch. `posjax list policies` shows those that exist."""
    from_task: ClassVar[bool] = False
    """Whether the task gives the positions, as `given`."""

    def positions(self, key, used, length, given=None):
        """The positions of a batch whose rows are padded at the end.

        Args:
          key: a jax random key.
          used: int32 `[B]`, the tokens of each row that are not padding, 1 to `length`; it may be traced. Padding takes no
            part in the draw: a sequence gets the positions that it would get alone.
          length: Python int, T.
          given: int32 `[B, T]`, the task's own positions where it gives any, else None.

        Returns:
          int32 `[T]`, or `[B, T]` where rows differ; rising along a row, unless the task gives them. Padding repeats the last
          position of its row, or goes on beyond it in `sequential`.
        """
        raise NotImplementedError

    def check(self, length):
        """Raises `ValueError` if a sequence of `length` positions, a Python int, has no room.

        A token takes a position of its own, unless the task gives them (`posjax.tasks.base.room`).
        """

    def span(self, length):
        """One more than the highest position that a sequence of `length` positions can get."""
        raise NotImplementedError


def _index(used, length):
    """int32 `[B, T]`: the index of each token, that of its row's last for padding."""
    return jnp.minimum(jnp.arange(length, dtype=jnp.int32)[None], used[:, None] - 1)


@POLICIES.register("sequential")
@dataclasses.dataclass(frozen=True)
class Sequential(Policy):
    """0, 1, 2, ...: what every decoder does unless told otherwise."""

    def positions(self, key, used, length, given=None):
        return jnp.arange(length, dtype=jnp.int32)

    def span(self, length):
        return length


@dataclasses.dataclass(frozen=True)
class _Bounded(Policy):
    """Positions from 0 to `max_position - 1`."""
    max_position: int = 2048

    def check(self, length):
        if length > self.max_position:
            raise UserError(f"The position policy {self.name} has max_position {self.max_position}, "
                            f"too small for {length} tokens.")

    def positions(self, key, used, length, given=None):
        return self.place(key, _index(used, length), used[:, None])

    def place(self, key, index, used):
        """Positions int32 `[B, T]` of tokens `index` `[B, T]` (padding has its row's last) of sequences of `used` `[B, 1]`."""
        raise NotImplementedError

    def span(self, length):
        return self.max_position


@POLICIES.register("random_offset")
@dataclasses.dataclass(frozen=True)
class RandomOffset(_Bounded):
    """Consecutive positions from a random start, another one for each row: every row of a learned table gets trained.

    Args:
      max_position: positions stay below it; the start is uniform over all that fit.
    """
    max_position: int = 512

    def place(self, key, index, used):
        return jax.random.randint(key, used.shape, 0, self.max_position - used + 1, jnp.int32) + index


@POLICIES.register("randomised")
@dataclasses.dataclass(frozen=True)
class Randomised(_Bounded):
    """Distinct random positions, sorted: Ruoss et al. 2023 (arXiv 2305.16843).

    Args:
      max_position: drawn without replacement from 0 to `max_position - 1` (N in the paper, above any test length).
      per: "example" draws for each row, "batch" once for all rows of one length, as the paper's code.
    """
    per: str = "example"

    def __post_init__(self):
        if self.per not in ("example", "batch"):
            raise UserError(f"per is {self.per!r}; it must be example or batch.")

    def place(self, key, index, used):
        def draw(key, index, used):
            drawn = jax.random.permutation(key, self.max_position)[: index.shape[0]].astype(jnp.int32)
            # What padding would get sorts behind all that counts, and `index` never asks for it.
            taken = jnp.sort(jnp.where(jnp.arange(drawn.shape[0]) < used, drawn, self.max_position))
            return taken.at[index].get(mode="fill", fill_value=self.max_position)
        keys = jnp.broadcast_to(key, index.shape[:1]) if self.per == "batch" else jax.random.split(key, index.shape[0])
        return jax.vmap(draw)(keys, index, used)


@POLICIES.register("even")
@dataclasses.dataclass(frozen=True)
class Even(_Bounded):
    """Evenly spaced from 0 to `max_position - 1`: how a model trained on randomised positions can be evaluated."""

    def place(self, key, index, used):
        # In whole numbers, and without a product that could leave int32.
        steps = jnp.maximum(used - 1, 1)
        return index * ((self.max_position - 1) // steps) + index * ((self.max_position - 1) % steps) // steps

    def span(self, length):
        return self.max_position if length > 1 else 1


@POLICIES.register("skips")
@dataclasses.dataclass(frozen=True)
class Skips(_Bounded):
    """Chunks of consecutive positions with random gaps between them: PoSE, Zhu et al. 2023 (arXiv 2309.10400).

    Args:
      max_position: positions stay below it.
      chunks: number of chunks of equal size (the last one takes the rest); the first starts at 0. A sequence of fewer
        tokens than chunks has a chunk for each token.
    """
    chunks: int = 2

    def __post_init__(self):
        if self.chunks < 1:
            raise UserError(f"skips has {self.chunks} chunks; it must have at least 1.")

    def place(self, key, index, used):
        gaps = jax.random.randint(key, (index.shape[0], self.chunks), 0, self.max_position - used + 1, jnp.int32)
        gaps = jnp.sort(gaps.at[:, 0].set(0), axis=1)
        chunk = jnp.minimum(index // jnp.maximum(used // self.chunks, 1), self.chunks - 1)
        return index + jnp.take_along_axis(gaps, chunk, axis=1)


@POLICIES.register("coupled")
@dataclasses.dataclass(frozen=True)
class Coupled(Policy):
    """Positions that the task gives: tokens that belong together share one. Cho et al. 2024 (arXiv 2405.20671).

    Args:
      max_position: shifts each row by a random offset, uniform over all with which its positions stay below this, so that
        every position gets trained; None for no shift.
    """
    from_task = True
    max_position: int | None = None

    def check(self, length):
        if self.max_position is not None and length > self.max_position:
            raise UserError(f"The position policy coupled has max_position {self.max_position}, "
                            f"too small for {length} positions.")

    def positions(self, key, used, length, given=None):
        placed = jnp.take_along_axis(given, _index(used, length), axis=1)
        if self.max_position is None:
            return placed
        room = self.max_position - placed.max(1, keepdims=True)
        return placed + jax.random.randint(key, room.shape, 0, room, jnp.int32)

    def span(self, length):
        return length if self.max_position is None else self.max_position
