"""What is said of a number over seeds: a mean with its interval, an effective length with what it is open to."""
import dataclasses
import functools
import math

CONFIDENCE = 0.95


@functools.cache
def t_quantile(degrees):
    """Two-sided 95 % point of Student's t, for any whole number of degrees of freedom (12.706 for 1, 4.303 for 2).

    Solves the finite series of Abramowitz & Stegun 26.7.3 and 26.7.4 for the angle atan(t / sqrt(degrees)).
    """
    if degrees < 1:
        raise ValueError(f"degrees of freedom is {degrees}; it must be at least 1.")

    def inside(angle):
        odd, cos2 = degrees % 2, math.cos(angle) ** 2
        term = total = math.cos(angle) if odd else 1.0
        for k in range(2 + odd, degrees, 2):
            term *= cos2 * (k - 1) / k
            total += term
        if degrees == 1:
            return 2 * angle / math.pi
        return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < CONFIDENCE else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A proportion over seeds: every seed's value, and what follows from them.

    The interval is Student's t on the seeds' values, cut to [0, 1]. One seed has none. It is empty of width where all
    seeds agree, as at 0 and 1: the resolution is then that of one seed's examples.
    """
    values: tuple

    @property
    def n(self):
        return len(self.values)

    @property
    def mean(self):
        return math.fsum(self.values) / self.n

    @property
    def half_width(self):
        """Half the interval before it is cut to [0, 1]; None for one seed."""
        if self.n < 2:
            return None
        mean = self.mean
        variance = math.fsum((v - mean) ** 2 for v in self.values) / (self.n - 1)
        return t_quantile(self.n - 1) * math.sqrt(variance / self.n)

    @property
    def interval(self):
        """(low, high), or None for one seed."""
        half = self.half_width
        return None if half is None else (max(0.0, self.mean - half), min(1.0, self.mean + half))

    @property
    def min(self):
        return min(self.values)

    @property
    def max(self):
        return max(self.values)


@dataclasses.dataclass(frozen=True)
class EffectiveLength:
    """The longest evaluated length at which, and up to which, exact match is at least `threshold`, of each seed.

    Attributes:
      seeds: length of each seed; 0 where not even the shortest evaluated length passes.
      open: seeds that still pass at the longest length they were evaluated at: theirs is "at least that".
      shortest: the shortest evaluated length.
    """
    threshold: float
    seeds: dict
    open: frozenset
    shortest: int

    @property
    def mean(self):
        return sum(self.seeds.values()) / len(self.seeds)

    @property
    def min(self):
        return min(self.seeds.values())

    @property
    def max(self):
        return max(self.seeds.values())
