"""What the benchmarks share: programs that take turns on the clock, the memory XLA plans for them, the kernels it makes."""
import os
import re
import statistics
import sys
import time

import jax

MIB = 2**20
# Not the work of a program: names for what is there already.
_NO_KERNELS = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "partition-id")


class Clock:
    """Seconds of several programs that take turns, so that what else runs on the machine meets all of them alike.

    Args:
      calls: functions of no arguments, by name; each returns what must be ready for it to be done.
      repeats: rounds that count, after one that does not.
    """

    def __init__(self, calls, repeats):
        self._seconds = {name: [] for name in calls}
        for round_ in range(repeats + 1):
            for name, call in calls.items():
                started = time.perf_counter()
                jax.block_until_ready(call())
                if round_:
                    self._seconds[name].append(time.perf_counter() - started)

    def median(self, name):
        """Milliseconds."""
        return 1e3 * statistics.median(self._seconds[name])

    def best(self, name):
        """Milliseconds."""
        return 1e3 * min(self._seconds[name])

    def ratio(self, name, other):
        """The median over rounds of what `name` took against `other` in the same round; None if one of them did not run."""
        if name not in self._seconds or other not in self._seconds:
            return None
        return statistics.median(a / b for a, b in zip(self._seconds[name], self._seconds[other]))


def compiled(function, *arguments, **options):
    """The compiled program of a function; arguments may be arrays or `jax.ShapeDtypeStruct`s. `options` are of `jax.jit`."""
    return jax.jit(function, **options).lower(*arguments).compile()


def temporaries(program):
    """The peak of the memory, in MiB, that a compiled program needs beside its arguments and its output."""
    return program.memory_analysis().temp_size_in_bytes / MIB


def kernels(program):
    """The instructions that a compiled program runs one after the other, as a list of their opcodes."""
    entry = program.as_text().split("\nENTRY ", 1)[1].split("\n}", 1)[0]
    found = re.findall(r"^\s+(?:ROOT )?\S+ = .*?[\])}] ([a-z][\w-]*)\(", entry, re.MULTILINE)
    return [name for name in found if name not in _NO_KERNELS]


def memory_of_machine():
    """MiB of main memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / MIB


def peak_resident():
    """MiB of main memory that this process has had at most."""
    import resource
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak / 1024


def rounded(value):
    """Three digits, which is more than a clock on a busy machine is good for."""
    return None if value is None else float(f"{value:.3g}") if abs(value) < 1000 else round(value)
