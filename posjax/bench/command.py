"""`posjax bench`: its options, and a benchmark run and shown."""
import importlib
import json
import sys
import time

from posjax.errors import UserError

# What there is, in one line each. The options of each are the keyword arguments of its `run`.
BENCHMARKS = {
    "attention": "blocks under several schemes, beside jax.nn.dot_product_attention: minutes",
    "rope": "rotation of queries and keys, beside a copy of the same bytes: seconds",
    "decode": "one more token by how many are cached, with a window and without: a minute",
    "forward": "one pass of a small decoder over very many tokens: minutes",
    "train": "tokens a second of training, with one replica and four, beside x-transformers if asked: two minutes",
    "size": "the time of a training step by width, depth, tokens and replicas: four minutes",
}
_HELP = {
    "lengths": ("N,N", "numbers of tokens"), "repeats": ("N", "rounds on the clock"), "tokens": ("N", "in the one sequence"),
    "window": ("N", "visible keys with the query's own"), "scheme": ("NAME", "a registered scheme"),
    "memory_tokens": ("N", "tokens of the rows of memory alone"), "peer": ("NAME", "x-transformers, on PyTorch"),
    "replicas": ("N,N", "numbers of replicas"),
}
_OPTIONS = {"attention": ("lengths", "repeats", "memory_tokens"), "rope": ("lengths", "repeats"),
            "decode": ("lengths", "window", "scheme", "repeats"), "forward": ("tokens", "window", "scheme"),
            "train": ("peer", "replicas", "repeats"), "size": ("repeats",)}
_WORDS, _LISTS = ("scheme", "peer"), ("lengths", "replicas")


def options(parser):
    """Adds the benchmarks to the parser of `posjax bench`; imports nothing heavy."""
    kinds = parser.add_subparsers(metavar="WHAT", required=True, dest="what", parser_class=type(parser),
                                  help=", ".join(BENCHMARKS))
    for name, text in BENCHMARKS.items():
        sub = kinds.add_parser(name, help=text, description=f"{name}: {text}.", allow_abbrev=False)
        sub.set_defaults(parser=sub)
        for option in _OPTIONS[name]:
            metavar, said = _HELP[option]
            sub.add_argument(f"--{option}", metavar=metavar, help=said)
        sub.add_argument("--json", action="store_true", help="as JSON")


def run(arguments):
    """Runs a benchmark; prints its rows, as a table or as JSON, and what comes next on standard error."""
    given = {option: _read(option, value) for option in _OPTIONS[arguments.what]
             if (value := getattr(arguments, option)) is not None}
    started = time.monotonic()

    def say(text):
        print(f"[{time.monotonic() - started:5.0f} s] {text}", file=sys.stderr, flush=True)
    import jax

    from posjax import listing
    from posjax.io.environment import environment_record
    device = jax.devices()[0]
    say(f"posjax bench {arguments.what}: jax {jax.__version__}, {device.platform} {device.device_kind}")
    rows = importlib.import_module(f"posjax.bench.{arguments.what}").run(say, **given)
    if arguments.json:
        print(json.dumps({"benchmark": arguments.what, "environment": environment_record(_command(arguments.what, given)),
                          "rows": rows}, indent=2))
    else:
        print(listing.text(rows))
        if missed := [row for row in rows if row.get("met") is False]:
            print(f"\n{len(missed)} of {sum('met' in r and r['met'] is not None for r in rows)} bars missed.")


def _read(option, value):
    if option in _WORDS:
        return value
    words = value.split(",") if option in _LISTS else [value]
    try:
        numbers = tuple(int(word) for word in words)
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        kind = "whole numbers from 1 on, with commas, as 2048,4096" if option in _LISTS else "a whole number from 1 on"
        raise UserError(f"--{option}={value} cannot be read; give {kind}.")
    return numbers if option in _LISTS else numbers[0]


def _command(what, given):
    words = [f"--{key}={','.join(map(str, value)) if isinstance(value, tuple) else value}" for key, value in given.items()]
    return " ".join(["posjax", "bench", what, *words])
