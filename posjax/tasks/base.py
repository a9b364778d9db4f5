"""What a task is: examples made on the device from a key, with the answer marked."""
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from posjax.errors import UserError
from posjax.registry import Registry
from posjax.schemes.base import concrete

TASKS = Registry("task", package="posjax.tasks", entry_points="posjax.tasks")
register_task = TASKS.register

# Every vocabulary begins with these; a task's own symbols follow.
PAD, BOS, SEP, FILLER = range(4)
SPECIALS = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Sequences for next-token prediction.

    Attributes:
      tokens: int32 `[B, T]`, the inputs.
      targets: int32 `[B, T]`, the token that follows each input.
      weights: float32 `[B, T]`, 1 where the target is part of the answer, else 0.
      positions: int32 `[B, T]`, the positions that the task gives the inputs, or None (`Task.coupled_positions`).
    """
    tokens: Any
    targets: Any
    weights: Any
    positions: Any = None

    @property
    def used(self):
        """int32 `[B]`: how many inputs of a row come before its last target; padding follows."""
        return (self.targets != PAD).sum(1, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class Task:
    """A family of problems of any size. Subclasses are frozen dataclasses: their fields are the hyper-parameters.

    A subclass gives `vocab_size`, `sequence_length` and `example`; batches, shifting and padding are made here.
    `length` is the task's own size (symbols to copy, pairs to recall), not a number of tokens.
    """
    name: ClassVar[str]
    formula: ClassVar[str] = ""
    """One line: what an example looks like."""

    @property
    def vocab_size(self):
        """Number of token ids, special ones included."""
        raise NotImplementedError

    def sequence_length(self, length):
        """Number of tokens of an example of size `length` (a Python int): prompt and answer."""
        raise NotImplementedError

    def check_length(self, length):
        """Raises `ValueError` if no example of size `length` exists."""
        if length < 1:
            raise UserError(f"Length {length} is too short: {self.name} starts at 1.")

    def conditions(self):
        """What an evaluation varies besides length: a tuple of dicts of numbers, each passed on to `example`.

        The raw records carry them: `({"depth": 0.0}, {"depth": 0.5})` gives a recall by depth.
        """
        return ({},)

    def example(self, key, length, max_length, **condition):
        """One example.

        Args:
          key: a jax random key; all that is random comes from it.
          length: int32 scalar, possibly traced, 1 to `max_length`.
          max_length: Python int that fixes the shapes.
          **condition: one of `conditions()`, as float32 scalars; nothing in training.

        Returns:
          tokens int32 `[sequence_length(max_length)]`, `PAD` after the example's end; and a bool array of the
          same shape that is True at the tokens of the answer.
        """
        raise NotImplementedError

    coupled_positions = None
    """Positions in which tokens that belong together share one, for the position policy `coupled`: a method
    `(tokens, length, max_length)` of one example's tokens, with the arguments of `example`, that returns int32
    `[sequence_length(max_length)]`; None where the task has no such structure. What stands at the padding has no effect."""

    def num_positions(self, length):
        """One more than the highest of `coupled_positions` in an example of size `length` (a Python int)."""
        raise NotImplementedError

    def sample(self, key, lengths, *, max_length, **condition):
        """A batch with one example for each of `lengths`.

        Args:
          key: a jax random key.
          lengths: int32 `[B]`, each 1 to `max_length`.
          max_length: Python int; one compilation serves all lengths up to it.
          **condition: passed on to `example`.

        Returns:
          `Batch` with T = `sequence_length(max_length) - 1`: inputs and targets are one token apart.

        Raises:
          ValueError: `max_length`, or one of `lengths` where their values can be read, has no example.
        """
        if concrete(lengths) and lengths.size:
            lengths_now = np.asarray(lengths)  # on the host, since inside a trace any operation of jax is traced
            self.check_length(int(lengths_now.min()))
            if (longest := int(lengths_now.max())) > max_length:
                raise UserError(f"Length {longest} is above the max_length of the batch, {max_length}.")
        def one(key, length):
            tokens, answer = self.example(key, length, max_length, **condition)
            coupled = self.coupled_positions
            return tokens, answer, None if coupled is None else coupled(tokens, length, max_length)
        tokens, answer, positions = jax.vmap(one)(jax.random.split(key, lengths.shape[0]), lengths)
        return Batch(tokens[:, :-1], tokens[:, 1:], answer[:, 1:].astype(jnp.float32),
                     None if positions is None else positions[:, :-1])


def room(task, policy, length):
    """How many positions an example of size `length` takes up under a position policy, from the first to the last.

    Raises:
      ValueError: the policy takes its positions from the task, and the task gives none.
    """
    if not policy.from_task:
        return task.sequence_length(length) - 1
    if task.coupled_positions is None:
        giving = [name for name in TASKS.names() if TASKS.get(name).coupled_positions is not None]
        raise UserError(f"The position policy {policy.name} takes its positions from the task, and the task {task.name} gives "
                        f"none; those that do: {', '.join(giving)}.")
    return task.num_positions(length)


def stream_key(seed, stream, counter):
    """The key of draw `counter` (below 2**31) of a seed's "train" or "eval" stream.

    The streams cannot meet: folding under one key is a block cipher, hence a bijection of the counter, and training
    folds in even numbers, evaluation odd ones. (Two keys may still draw the same example where a task has few.)
    """
    counter = jnp.asarray(counter, jnp.uint32) * jnp.uint32(2) + jnp.uint32({"train": 0, "eval": 1}[stream])
    return jax.random.fold_in(jax.random.key(seed), counter)
