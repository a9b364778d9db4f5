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
    """A string of symbols to be answered with a rearrangement of it: `BOS s SEP answer(s)`."""
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

    def sequence_length(self, length):
        return 2 + length * (1 + self.answer_repeats)

    def example(self, key, length, max_length):
        self.check_length(max_length)
        string = draw_symbols(key, max_length, self.symbols, self.unique)
        index = jnp.arange(self.sequence_length(max_length))
        in_answer = index - length - 2
        answer = (in_answer >= 0) & (in_answer < self.answer_repeats * length)
        # Read out of a padded string, so that no index is out of range whatever the length.
        source = jnp.where(answer, self.source(in_answer, length), index - 1)
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
