"""Runs every check on one scheme, and says what holds and what fails."""
import dataclasses
import importlib
import inspect
import json
import pathlib
import time

from posjax import config
from posjax.conformance import CHECKS, CheckFailed, subject
from posjax.errors import UserError, unknown
from posjax.schemes.base import Scheme
from posjax.schemes.registry import SCHEMES

_LONGEST_REASON = 400


@dataclasses.dataclass(frozen=True)
class Result:
    """What one check found.

    Attributes:
      check: its name.
      states: the property, a sentence.
      holds: whether the scheme has it.
      reason: None, or what was expected and found instead; of an error in the scheme its type, message and place.
      seconds: how long it took.
    """
    check: str
    states: str
    holds: bool
    reason: str | None
    seconds: float

    def __str__(self):
        line = f"{'holds' if self.holds else 'FAILS'}  {self.check:<18}  {self.states}"
        return line if self.holds else f"{line} -> {self.reason}"


def check_scheme(scheme, *, num_heads=4, head_dim=8, on_result=None, **hyper):
    """Checks a positional scheme: causality, documents, padding, decoding, precision, gradients, and what it declares.

    Args:
      scheme: a registered name, a subclass of `posjax.Scheme`, or a function of `num_heads`, `head_dim`, `model_dim`,
        `rngs` and hyper-parameters that makes one.
      num_heads, head_dim: of the scheme that is checked.
      on_result: called with each `Result` as it is made.
      **hyper: the scheme's hyper-parameters; the others keep their defaults.

    Returns:
      A list of `Result`, one for each check; an error in the scheme's own code is a failed check.

    Raises:
      ValueError: no scheme, an unknown hyper-parameter or a bad value.
    """
    found = config.run_file("The scheme cannot be made", lambda: subject(scheme, num_heads=num_heads, head_dim=head_dim, **hyper))
    results = []
    for check in CHECKS:
        results.append(_run(check, found))
        if on_result is not None:
            on_result(results[-1])
    return results


def _run(check, found):
    start, reason = time.perf_counter(), None
    try:
        check(found)
    except CheckFailed as error:
        reason = str(error)
    except Exception as error:
        message, place = config.told(error, f"in {check.__name__}")
        reason = f"{type(error).__name__}: {message} ({place})"
    if reason is not None and len(reason) > _LONGEST_REASON:
        reason = reason[:_LONGEST_REASON] + " ..."
    return Result(check.__name__.removeprefix("check_"), inspect.getdoc(check).split("\n")[0], reason is None, reason,
                  round(time.perf_counter() - start, 3))


def find_scheme(target):
    """The class that a word of a command line means: `package.module:Class`, `path/to/file.py:Class`, or a registered name.

    Raises:
      ValueError: no such module, file, class or name, or no scheme.
    """
    where, colon, name = target.rpartition(":")
    if not colon:
        return SCHEMES.get(target)
    module = config.import_file(pathlib.Path(where)) if where.endswith(".py") else _module(where)
    schemes = [key for key, value in vars(module).items()
               if inspect.isclass(value) and issubclass(value, Scheme) and value.__module__ == module.__name__]
    if not hasattr(module, name):
        raise unknown(f"scheme of {where}:", name, schemes)
    cls = getattr(module, name)
    if not (inspect.isclass(cls) and issubclass(cls, Scheme)):
        raise UserError(f"{target} is no subclass of posjax.Scheme; those of {where}: {', '.join(schemes) or '(none)'}.")
    return cls


def _module(name):
    try:
        return config.run_file(f"Cannot import {name}", importlib.import_module, name)
    except ValueError as error:
        if isinstance(error.__cause__, ModuleNotFoundError) and name.startswith(str(error.__cause__.name)):
            raise UserError(f"Cannot import {name}: there is no module {error.__cause__.name} here; give package.module:Class, "
                            "path/to/file.py:Class, or a registered name.") from None
        raise


def command(target, hyper, *, num_heads, head_dim, as_json):
    """`posjax check-scheme`: prints a line for each check as it is made, then how many hold; returns the exit code."""
    cls = find_scheme(target)
    known = SCHEMES.hyper_of(cls)
    for key in hyper:
        if key not in known:
            raise unknown(f"hyper-parameter of {cls.__name__}:", key, known)
    hyper = {key: config.convert(key, value, None if known[key] is inspect.Parameter.empty else known[key])
             for key, value in hyper.items()}
    results = check_scheme(cls, num_heads=num_heads, head_dim=head_dim, **hyper,
                           on_result=None if as_json else lambda result: print(result, flush=True))
    failed = [result.check for result in results if not result.holds]
    if as_json:
        print(json.dumps([dataclasses.asdict(result) for result in results], indent=2))
    else:
        print(f"{target}: all {len(results)} checks hold." if not failed else
              f"{target}: {len(results) - len(failed)} of {len(results)} checks hold; {', '.join(failed)} "
              f"{'fails' if len(failed) == 1 else 'fail'}.")
    return 1 if failed else 0
