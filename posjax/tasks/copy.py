import dataclasses

import jax
import jax.numpy as jnp

from posjax.errors import UserError
from posjax.tasks.base import BOS, PAD, SEP, SPECIALS, Task, register_task


def draw_symbols(key, count, symbols, unique):
    """int32 `[count]` symbol ids from `SPECIALS` on: independent, or all different."""
    if unique:
        return SPECIALS + jax.random.permutation(key, symbols)[:count].astype(jnp.int32)
    return SPECIALS + jax.random.randint(key, (count,), 0, symbols, jnp.int32)


@dataclasses.dataclass(frozen=True)
class Strings(Task):
    """A string of symbols to be answered with a rearrangement of it: `BOS s SEP answer(s)`.

    Coupled positions: symbol i of the string, and every copy of it in the answer, stand at position i; BOS at 0. SEP stands
    where a symbol before the answer's first would: at 0 before s1 s2 .., at n + 1 before sn .. s1. So in an answer the input
    at p always predicts the symbol at its neighbour, p + 1 (copy) or p - 1 (reverse), also at the first step. After Cho et al.
    2024 (arXiv 2405.20671), who number likewise.
    """
    symbols: int = 29
    unique: bool = False

    def __post_init__(self):
        if self.symbols < 1:
            raise UserError(f"symbols is {self.symbols}; it must be at least 1.")

    @property
    def vocab_size(self):
        return SPECIALS + self.symbols

    def check_length(self, length):
        super().check_length(length)
        if self.unique and length > self.symbols:
            raise UserError(f"{self.name} of {length} unique symbols needs as many symbols; there are {self.symbols}.")

    answer_repeats = 1

    def source(self, index, length):
        """Which symbol of the string stands at `index` of the answer."""
        raise NotImplementedError

    def separator_position(self, length):
        """The coupled position of SEP."""
        raise NotImplementedError

    def sequence_length(self, length):
        return 2 + length * (1 + self.answer_repeats)

    def num_positions(self, length):
        return 1 + max(length, self.separator_position(length))

    def coupled_positions(self, tokens, length, max_length):
        index, _, source = self._places(length, max_length)
        return jnp.where(index == length + 1, self.separator_position(length), source + 1)

    def _places(self, length, max_length):
        """Of every token its index, whether it is of the answer, and which symbol of the string stands there."""
        index = jnp.arange(self.sequence_length(max_length), dtype=jnp.int32)
        in_answer = index - length - 2
        answer = (in_answer >= 0) & (in_answer < self.answer_repeats * length)
        return index, answer, jnp.where(answer, self.source(in_answer, length), index - 1)

    def example(self, key, length, max_length):
        self.check_length(max_length)
        string = draw_symbols(key, max_length, self.symbols, self.unique)
        index, answer, source = self._places(length, max_length)
        # Read out of a padded string, so that no index is out of range whatever the length.
        tokens = string[jnp.clip(source, 0, max_length - 1)]
        tokens = jnp.where(index == 0, BOS, jnp.where(index == length + 1, SEP, tokens))
        return jnp.where(index < 2 + (1 + self.answer_repeats) * length, tokens, PAD), answer


@register_task("copy")
@dataclasses.dataclass(frozen=True)
class Copy(Strings):
    """Copy a string. Whether its symbols repeat decides which schemes can look a symbol up by its neighbours.

    Args:
      symbols: size of the alphabet.
      unique: all symbols of a string differ (then its length is at most `symbols`).
      times: how often the answer repeats the string, 1 or 2.
    """
    formula = "BOS s1..sn SEP s1..sn (once or twice)"
    times: int = 1

    def __post_init__(self):
        super().__post_init__()
        if self.times not in (1, 2):
            raise UserError(f"times is {self.times}; copy answers with the string 1 or 2 times.")

    @property
    def answer_repeats(self):
        return self.times

    def source(self, index, length):
        return index % length

    def separator_position(self, length):
        return 0


@register_task("reverse")
@dataclasses.dataclass(frozen=True)
class Reverse(Strings):
    """Write a string backwards.

    Args:
      symbols: size of the alphabet.
      unique: all symbols of a string differ (then its length is at most `symbols`).
    """
    formula = "BOS s1..sn SEP sn..s1"

    def source(self, index, length):
        return length - 1 - index

    def separator_position(self, length):
        return length + 1
