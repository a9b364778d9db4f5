"""Position policies: which integers a sequence gets, apart from the scheme that uses them."""
import dataclasses

import jax
import jax.numpy as jnp

from posjax.errors import UserError
from posjax.registry import Registry

POLICIES = Registry("position policy", package="posjax.schemes.positions")


@dataclasses.dataclass(frozen=True)
class Policy:
    """A rule for the positions of a batch. `posjax list policies` shows those that exist."""

    def positions(self, key, batch_size, length):
        """int32 `[length]`, or `[batch_size, length]` where rows differ; never falling along a row."""
        raise NotImplementedError

    def span(self, length):
        """One more than the highest position that a sequence of `length` tokens can get."""
        raise NotImplementedError


@POLICIES.register("sequential")
@dataclasses.dataclass(frozen=True)
class Sequential(Policy):
    """0, 1, 2, ...: what every decoder does unless told otherwise."""

    def positions(self, key, batch_size, length):
        return jnp.arange(length, dtype=jnp.int32)

    def span(self, length):
        return length


@POLICIES.register("random_offset")
@dataclasses.dataclass(frozen=True)
class RandomOffset(Policy):
    """Consecutive positions from a random start, another one for each row: every row of a learned table gets trained.

    Args:
      max_position: positions stay below it; the start is uniform over all that fit.
    """
    max_position: int = 512

    def positions(self, key, batch_size, length):
        _check_room(self, length)
        start = jax.random.randint(key, (batch_size, 1), 0, self.max_position - length + 1, jnp.int32)
        return start + jnp.arange(length, dtype=jnp.int32)[None]

    def span(self, length):
        return self.max_position


@POLICIES.register("randomised")
@dataclasses.dataclass(frozen=True)
class Randomised(Policy):
    """Distinct random positions, sorted: Ruoss et al. 2023 (arXiv 2305.16843).

    Args:
      max_position: drawn without replacement from 0 to `max_position - 1` (N in the paper, above any test length).
      per: "example" draws for each row, "batch" once for all rows, as the paper's code.
    """
    max_position: int = 2048
    per: str = "example"

    def __post_init__(self):
        if self.per not in ("example", "batch"):
            raise UserError(f"per is {self.per!r}; it must be example or batch.")

    def positions(self, key, batch_size, length):
        _check_room(self, length)

        def draw(key):
            return jnp.sort(jax.random.permutation(key, self.max_position)[:length]).astype(jnp.int32)
        return draw(key) if self.per == "batch" else jax.vmap(draw)(jax.random.split(key, batch_size))

    def span(self, length):
        return self.max_position


@POLICIES.register("even")
@dataclasses.dataclass(frozen=True)
class Even(Policy):
    """Evenly spaced from 0 to `max_position - 1`: how a model trained on randomised positions can be evaluated."""
    max_position: int = 2048

    def positions(self, key, batch_size, length):
        _check_room(self, length)
        index, steps = jnp.arange(length, dtype=jnp.int32), max(1, length - 1)
        whole, rest = divmod(self.max_position - 1, steps)
        return index * whole + index * rest // steps

    def span(self, length):
        return self.max_position if length > 1 else 1


@POLICIES.register("skips")
@dataclasses.dataclass(frozen=True)
class Skips(Policy):
    """Chunks of consecutive positions with random gaps between them: PoSE, Zhu et al. 2023 (arXiv 2309.10400).

    Args:
      max_position: positions stay below it.
      chunks: number of chunks of equal size (the last one takes the rest); the first starts at 0.
    """
    max_position: int = 2048
    chunks: int = 2

    def positions(self, key, batch_size, length):
        _check_room(self, length)
        if not 1 <= self.chunks <= length:
            raise UserError(f"skips has {self.chunks} chunks for {length} tokens; allowed are 1 to {length}.")
        room = self.max_position - length
        gaps = jax.random.randint(key, (batch_size, self.chunks), 0, room + 1, jnp.int32)
        gaps = jnp.sort(gaps.at[:, 0].set(0), axis=1)
        index = jnp.arange(length, dtype=jnp.int32)
        chunk = jnp.minimum(index // (length // self.chunks), self.chunks - 1)
        return index[None] + gaps[:, chunk]

    def span(self, length):
        return self.max_position


def _check_room(policy, length):
    if length > policy.max_position:
        raise UserError(f"The position policy {policy.name} has max_position {policy.max_position}, "
                        f"too small for {length} tokens.")
