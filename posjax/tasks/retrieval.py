"""Retrieval: find what was said earlier, among other things that were said."""
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from posjax.errors import UserError
from posjax.tasks.base import BOS, FILLER, PAD, SEP, SPECIALS, Task, register_task


@register_task("mqar")
@dataclasses.dataclass(frozen=True)
class MQAR(Task):
    """Multi-query associative recall: key-value pairs, a gap, then keys again, each to be followed by its value.

    The keys of an example differ, its values need not. The queries come in random order; every value after a query
    is part of the answer. `length` is the number of pairs. After Arora et al. 2023 (Zoology, arXiv 2312.04927), whose
    queries are scattered in filler; here one gap stands before them, so that its size is known.

    Args:
      keys: number of key symbols, so the largest number of pairs.
      values: number of value symbols.
      gap: number of filler tokens between the pairs and the queries.
      queries: how many pairs are asked for (all, if there are fewer); None for all.
    """
    formula = "BOS k1 v1..kn vn FILLER*gap SEP q1 v(q1)..qm v(qm)"
    keys: int = 128
    values: int = 64
    gap: int = 0
    queries: int | None = None

    def __post_init__(self):
        for field, low in (("keys", 1), ("values", 1), ("gap", 0), ("queries", 1)):
            if (given := getattr(self, field)) is not None and given < low:
                raise UserError(f"{field} is {given}; it must be at least {low}.")

    @property
    def vocab_size(self):
        return SPECIALS + self.keys + self.values

    def check_length(self, length):
        super().check_length(length)
        if length > self.keys:
            raise UserError(f"mqar of {length} pairs needs as many keys; there are {self.keys}.")

    def _asked(self, length):
        return length if self.queries is None else jnp.minimum(self.queries, length)

    def sequence_length(self, length):
        return 2 + 2 * length + self.gap + 2 * (length if self.queries is None else min(self.queries, length))

    def example(self, key, length, max_length):
        self.check_length(max_length)
        for_keys, for_values, for_order = jax.random.split(key, 3)
        keys = SPECIALS + jax.random.permutation(for_keys, self.keys)[:max_length].astype(jnp.int32)
        values = SPECIALS + self.keys + jax.random.randint(for_values, (max_length,), 0, self.values, jnp.int32)
        # The pairs that exist, shuffled, before the rest of the bucket.
        order = jax.random.permutation(for_order, max_length).astype(jnp.int32)
        order = order[jnp.argsort(order >= length, stable=True)]

        index = jnp.arange(self.sequence_length(max_length))
        pair_index, query_index = index - 1, index - (2 + 2 * length + self.gap)
        in_pairs = (pair_index >= 0) & (pair_index < 2 * length)
        in_queries = (query_index >= 0) & (query_index < 2 * self._asked(length))
        # Index 0 stands in outside of pairs and queries, where the tokens are replaced below.
        queried = order[jnp.where(in_queries, query_index // 2, 0)]
        which = jnp.where(in_queries, queried, jnp.where(in_pairs, pair_index // 2, 0))
        is_value = jnp.where(in_queries, query_index, pair_index) % 2 == 1
        tokens = jnp.where(is_value, values[which], keys[which])
        tokens = jnp.where(in_pairs | in_queries, tokens, jnp.where(query_index < 0, FILLER, PAD))
        tokens = jnp.where(index == 0, BOS, jnp.where(query_index == -1, SEP, tokens))
        return tokens, in_queries & is_value


@register_task("needle")
@dataclasses.dataclass(frozen=True)
class Needle(Task):
    """A key and its value planted at a chosen depth of noise, asked for at the end; the answer is the value alone.

    Needles are whole and never overlap, and their keys differ. Filler, keys and values have alphabets of their own,
    so noise never spells a needle. `length` is the number of tokens before the query: filler and needles. A needle
    at depth d begins as near as whole tokens allow to d times the last place where it fits.

    Args:
      needles: how many are planted; one of them is asked for.
      key_length: tokens of a key.
      value_length: tokens of a value.
      key_symbols: size of the alphabet of keys.
      value_symbols: size of the alphabet of values.
      filler_symbols: size of the alphabet of the noise.
      depth: of the needle asked for, 0 (start) to 1 (end), wherever no condition sets it; None for uniform.
      depths: those that an evaluation goes through; empty to evaluate as in training.
    """
    formula = "BOS noise.. KEY VALUE ..noise SEP KEY VALUE"
    needles: int = 1
    key_length: int = 2
    value_length: int = 4
    key_symbols: int = 26
    value_symbols: int = 10
    filler_symbols: int = 16
    depth: float | None = None
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)

    def __post_init__(self):
        for field in ("needles", "key_length", "value_length", "key_symbols", "value_symbols", "filler_symbols"):
            if getattr(self, field) < 1:
                raise UserError(f"{field} is {getattr(self, field)}; it must be at least 1.")
        for depth in (*self.depths, *(() if self.depth is None else (self.depth,))):
            if not 0 <= depth <= 1:
                raise UserError(f"Depth {depth} is not between 0 (the start) and 1 (the end).")
        if self.needles > self.key_symbols ** self.key_length:
            raise UserError(f"{self.needles} needles need as many keys; {self.key_length} of {self.key_symbols} "
                            f"symbols make {self.key_symbols ** self.key_length}.")

    @property
    def vocab_size(self):
        return SPECIALS + self.filler_symbols + self.key_symbols + self.value_symbols

    @property
    def needle_length(self):
        """Tokens of a needle: its key and its value."""
        return self.key_length + self.value_length

    def conditions(self):
        return tuple({"depth": depth} for depth in self.depths) or ({},)

    def check_length(self, length):
        super().check_length(length)
        # One needle can split the rest so that up to needle_length - 1 tokens on a side are of no use to the others.
        least = (self.needles + 1) * self.needle_length - 1 if self.needles > 1 else self.needle_length
        if length < least:
            raise UserError(f"A needle context of {length} tokens is too short: {self.needles} needle(s) of "
                            f"{self.needle_length} tokens, at any depth, need at least {least}.")

    def sequence_length(self, length):
        return 2 + length + self.needle_length

    def example(self, key, length, max_length, depth=None):
        self.check_length(max_length)
        length = jnp.asarray(length, jnp.int32)
        for_keys, for_values, for_filler, for_depth, for_starts = jax.random.split(key, 5)
        values = jax.random.randint(for_values, (self.needles, self.value_length), 0, self.value_symbols, jnp.int32)
        needles = jnp.concatenate([_distinct_words(for_keys, self.needles, self.key_length, self.key_symbols),
                                   self.key_symbols + values], axis=1) + (SPECIALS + self.filler_symbols)

        last = length - self.needle_length
        depth = self.depth if depth is None else depth
        if depth is None:
            start = jax.random.randint(for_depth, (), 0, last + 1, jnp.int32)
        else:
            start = jnp.round(depth * last.astype(jnp.float32)).astype(jnp.int32)
        starts, asked = self._place(for_starts, start, length)

        filler = jax.random.randint(for_filler, (max_length,), 0, self.filler_symbols, jnp.int32)
        planted = starts[:, None] + jnp.arange(self.needle_length)[None]
        context = (SPECIALS + filler).at[planted].set(needles, mode="drop")

        index = jnp.arange(self.sequence_length(max_length))
        in_context = (index >= 1) & (index <= length)
        in_query = index - (2 + length)
        queried = (in_query >= 0) & (in_query < self.needle_length)
        # Index 0 stands in where the token comes from elsewhere.
        tokens = jnp.where(in_context, context[jnp.where(in_context, index - 1, 0)], PAD)
        tokens = jnp.where(queried, needles[asked][jnp.where(queried, in_query, 0)], tokens)
        tokens = jnp.where(index == 0, BOS, jnp.where(in_query == -1, SEP, tokens))
        return tokens, queried & (in_query >= self.key_length)

    def _place(self, key, start, length):
        """First tokens of all needles, int32 `[needles]` rising, and the rank of the one that stands at `start`."""
        for_rank, for_filler = jax.random.split(key)
        others, width = self.needles - 1, self.needle_length
        filler = length - self.needles * width
        # With `rank` needles before it, so much filler is before it too. The others fall anywhere in the filler: a
        # rank's weight is the number of ways in which so many of them fall before this one.
        rank = jnp.arange(self.needles)
        before = start - rank * width
        possible = (before >= 0) & (before <= filler)
        before = jnp.clip(before, 0, filler)
        choices = jnp.asarray(np.array([math.log(math.comb(others, k)) for k in range(self.needles)], np.float32))
        ranks = rank.astype(jnp.float32)
        weight = choices + ranks * jnp.log1p(before) + (others - ranks) * jnp.log1p(filler - before)
        asked = jax.random.categorical(for_rank, jnp.where(possible, weight, -jnp.inf))

        before = before[asked]
        low, high = jnp.where(rank < asked, 0, before), jnp.where(rank > asked, filler, before)
        ahead = jax.random.randint(for_filler, (self.needles,), low, high + 1, jnp.int32)
        return jnp.sort(ahead) + rank * width, asked


def _distinct_words(key, count, length, symbols):
    """int32 `[count, length]`: words over an alphabet of `symbols`, all different, in random order."""
    # Words are numbers in base `symbols`; of a number past int32 the digits that fit are enough to tell words apart.
    digits = max(d for d in range(1, length + 1) if d == 1 or symbols ** d < 2**31)
    for_numbers, for_order, for_rest = jax.random.split(key, 3)

    def add(i, state):
        # Floyd's sampling without replacement: the i-th draw is from a range that grows by one, whose newest number
        # replaces a number already taken.
        numbers, keys = state
        newest = symbols ** digits - count + i
        drawn = jax.random.randint(keys[i], (), 0, newest + 1, jnp.int32)
        return numbers.at[i].set(jnp.where((numbers == drawn).any(), newest, drawn)), keys
    numbers = jnp.full(count, -1, jnp.int32)
    numbers, _ = jax.lax.fori_loop(0, count, add, (numbers, jax.random.split(for_numbers, count)))
    numbers = jax.random.permutation(for_order, numbers)

    words = [numbers // symbols ** d % symbols for d in range(digits)]
    rest = jax.random.randint(for_rest, (count, length - digits), 0, symbols, jnp.int32)
    return jnp.concatenate([jnp.stack(words, axis=1), rest], axis=1)
