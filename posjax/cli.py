"""The command line: posjax train | eval | sweep | report | inspect | list | check-scheme | cache | bench.

Arguments are read before anything heavy is imported. A user's mistake ends in one line and exit code 2.
"""
import argparse
import difflib
import os
import shlex
import sys

from posjax.bench import command as bench
from posjax.errors import UserError
from posjax.errors import unknown as mistyped

COMMANDS = ("train", "eval", "sweep", "report", "inspect", "list", "check-scheme", "cache", "bench")
LISTED = ("schemes", "temperatures", "tasks", "policies", "configs", "backends")
CALL_SIZES = {"queries": "tokens (default 1024)", "keys": "tokens (default: as many as queries)",
              "heads": "of queries (default 8)", "groups": "heads of keys and values (default: as many as heads)",
              "head_dim": "channels a head (default 64)", "window": "visible keys with the query's own (default: all)"}
EPILOG = "Config values: --config.KEY=VALUE, as --config.train.steps=500 or --config.scheme=alibi."


def main(argv=None):
    """Runs one command; returns its exit code: 0, 1 for a run that failed, 2 for a mistake in the input."""
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        arguments, overrides = parse(argv)
        return arguments.command(arguments, overrides) or 0
    except UserError as error:
        return fail(error, 2)
    except BrokenPipeError:  # the reader of our output has left: `posjax list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return fail("interrupted.", 130)
    except Exception as error:
        from posjax.train.interrupt import Interrupted
        from posjax.train.loop import Diverged
        if isinstance(error, Interrupted):
            return fail(error, 128 + error.signum)
        if isinstance(error, Diverged):
            return fail(error, 1)
        if type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error):
            return fail(f"Out of memory: {str(error).splitlines()[0]} Use shorter lengths, a smaller batch or model.", 1)
        raise


def fail(message, code):
    sys.stderr.write(f"posjax: {' '.join(str(message).split())}\n")
    return code


def parse(argv):
    """The arguments, and the overrides: of a config, as `{"train.steps": "500"}`; with `inspect`, of a scheme.

    `arguments.policy` is what `eval` changes of the position policy.
    """
    parser = make_parser()
    rest, values = [], {"--config.": {}, "--positions.": {}}
    overrides = values["--config."]
    words = iter(argv)
    for word in words:
        if prefix := next((p for p in values if word.startswith(p)), None):
            key, equals, value = word.removeprefix(prefix).partition("=")
            if not equals and (value := next(words, None)) is None:
                raise UserError(f"{prefix}{key} needs a value: {prefix}{key}=VALUE.")
            values[prefix][key] = value
            if prefix == "--config." and key in ("imports", "vary"):
                raise UserError(f"{key} is set with --{'import=MODULE_OR_FILE' if key == 'imports' else 'vary=KEY=V,V'}.")
        else:
            rest.append(word)
    if rest and not rest[0].startswith("-") and rest[0] not in COMMANDS:
        raise mistyped("command", rest[0], COMMANDS)
    arguments, unknown = parser.parse_known_args(rest)
    if hasattr(arguments, "hyper"):
        arguments.hyper, unknown = hyper_words(unknown), []
    if unknown:
        options = sorted(arguments.parser._option_string_actions)
        options += ["--config.KEY"] if hasattr(arguments, "config") else []
        options += ["--positions.KEY"] if hasattr(arguments, "positions") else []
        close = difflib.get_close_matches(unknown[0].split("=")[0].split(".")[0], options, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise UserError(f"Unknown argument {unknown[0]!r}.{hint} Known: {', '.join(options)}.")
    if getattr(arguments, "config", "given") is None:  # not `required`: argparse would say so before naming a typo
        raise UserError("--config=FILE is missing, as --config=configs/copy.py:rope.")
    if overrides and not hasattr(arguments, "config"):
        raise UserError(f"--config.{next(iter(overrides))} is only for train and sweep.")
    if varied := getattr(arguments, "vary", None):
        overrides["vary"] = tuple(varied)
    if (policy := values["--positions."]) and not hasattr(arguments, "positions"):
        raise UserError(f"--positions.{next(iter(policy))} is only for eval.")
    if getattr(arguments, "positions", None) is not None:
        policy["name"] = arguments.positions
    arguments.policy = policy or None
    return arguments, overrides


def hyper_words(words):
    """`{"base": "500"}` of `--base=500`."""
    hyper = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key.startswith("--"):
            raise UserError(f"Unknown argument {word!r}. Hyper-parameters are given as --KEY=VALUE.")
        if not equals:
            raise UserError(f"{key} needs a value: {key}=VALUE.")
        hyper[key.removeprefix("--")] = value
    return hyper


class Parser(argparse.ArgumentParser):
    """argparse, with its mistakes reported as ours are."""

    def error(self, message):
        raise UserError(message[:1].upper() + message[1:] + f". See {self.prog} --help.")


def make_parser():
    parser = Parser(prog="posjax", description="Which positional scheme works beyond the length it was trained on?",
                    epilog=EPILOG, allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)

    def add(name, command, text, **kwargs):
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False, **kwargs)
        sub.set_defaults(command=command, parser=sub)
        return sub

    def imports(sub):
        sub.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE_OR_FILE",
                         help="import your own schemes or tasks first; repeatable")

    def vary(sub):
        sub.add_argument("--vary", action="append", default=[], metavar="KEY=V,V",
                         help="train with each of these values, as replicas of one run, in every combination; repeatable: "
                         "train.learning_rate=0.003,0.01 or any real number of the optimiser or the scheme")

    train = add("train", train_command, "Train one config and evaluate it; the same command again resumes.", epilog=EPILOG)
    train.add_argument("--config", metavar="FILE[:ARG]", help="as configs/copy.py:rope, or a run's config.json")
    train.add_argument("--workdir", help="run directory (default: runs/NAME, named by the config)")
    train.add_argument("--profile", action="store_true", help="write a trace of one chunk of steps, for TensorBoard or Perfetto")
    vary(train)
    imports(train)

    evaluate = add("eval", eval_command, "Evaluate a trained run at more lengths, without training.")
    evaluate.add_argument("run", metavar="RUN", help="run directory")
    evaluate.add_argument("--lengths", help="as 64,128,256")
    evaluate.add_argument("--num_examples", type=int, help="a length and a seed (default: the config's)")
    evaluate.add_argument("--positions", metavar="POLICY", help="another position policy than the config's, as "
                          "--positions=even --positions.max_position=512 (posjax list policies)")

    sweep = add("sweep", sweep_command, "Run all configs of a sweep: skips the finished, resumes the interrupted.", epilog=EPILOG)
    sweep.add_argument("--config", metavar="FILE[:ARG]", help="a config file that defines sweep()")
    sweep.add_argument("--workdir", help="folder of the runs (default: runs/NAME of the config file)")
    sweep.add_argument("--dry_run", action="store_true", help="list the runs and their state, run nothing")
    sweep.add_argument("--jobs", type=int, default=1, help="runs at a time, each on its share of the cores (default 1)")
    sweep.add_argument("--keep_going", action="store_true", help="go on past a failed run")
    vary(sweep)
    imports(sweep)

    report = add("report", report_command, "Make one self-contained HTML file, and the table, from run records.")
    report.add_argument("runs", metavar="RUN", nargs="+", help="run directories, or folders that contain them")
    report.add_argument("--out", default="report.html", help="the HTML file (default report.html)")
    report.add_argument("--figure", help="also write the extrapolation figure to this PNG file")
    report.add_argument("--markdown", action="store_true", help="print the table as Markdown")

    inspect = add("inspect", inspect_command, "Draw one positional scheme; its numbers as CSV beside the figure.",
                  epilog="The scheme's hyper-parameters are set with --KEY=VALUE, as --base=500000.")
    inspect.add_argument("scheme", metavar="SCHEME", help="a name, or a run directory: its scheme as it was trained")
    inspect.add_argument("--num_heads", type=int, help="of a named scheme (default 8)")
    inspect.add_argument("--head_dim", type=int, help="channels a head (default 64)")
    inspect.add_argument("--train_length", type=int, help="trained tokens (default: the scheme's or the run's, else 512)")
    inspect.add_argument("--length", type=int, help="tokens to look at (default: 8 times train_length)")
    inspect.add_argument("--head", type=int, default=0, help="of the map (default 0)")
    inspect.add_argument("--layer", type=int, help="of a run (default 0)")
    inspect.add_argument("--seed", type=int, help="of what is learned, or of the run (default: 0, or the run's first)")
    inspect.add_argument("--variant", action="append", metavar="KEY=V",
                         help="of a run with --vary: which of its variants, by its values; repeatable")
    inspect.add_argument("--out", help="the PNG file (default inspect_SCHEME.png); the numbers are written beside it")
    imports(inspect)
    inspect.set_defaults(hyper={})

    listing = add("list", list_command, "List what there is.")
    listing.add_argument("what", nargs="?", help=", ".join(LISTED))
    listing.add_argument("--json", action="store_true", help="as JSON, with the hyper-parameters of schemes too")
    listing.add_argument("--pages", metavar="DIR", help="of schemes: write a page for each, and their index, into a folder")
    imports(listing)
    call = listing.add_argument_group("list backends", "a call of attention: which backend serves it, and why others do not")
    call.add_argument("--scheme", help="positional scheme (default nope)")
    for name, text in CALL_SIZES.items():
        call.add_argument(f"--{name}", type=int, help=text)
    call.add_argument("--dtype", help="float32, bfloat16 or float16 (default float32)")
    call.add_argument("--platform", help="cpu, gpu or tpu (default: where jax computes here)")
    for name, text in (("segments", "the call has segment ids"), ("both_ways", "without the causal mask")):
        call.add_argument(f"--{name}", action="store_true", default=None, help=text)

    check = add("check-scheme", check_command, "Check a positional scheme, your own too: what holds and what fails.",
                epilog="Hyper-parameters of the scheme: --KEY=VALUE, as --base=500000.")
    check.add_argument("scheme", metavar="SCHEME", help="package.module:Class, path/to/file.py:Class, or a registered name")
    check.add_argument("--num_heads", type=int, default=4, help="query heads (default 4)")
    check.add_argument("--head_dim", type=int, default=8, help="channels a head (default 8)")
    check.add_argument("--json", action="store_true", help="as JSON")
    imports(check)
    check.set_defaults(hyper={})

    cache = add("cache", cache_command, "What a key-value cache takes, for a row of 4k to 1M tokens.",
                epilog="The scheme's hyper-parameters are set with --KEY=VALUE.")
    cache.add_argument("--scheme", default="rope", help="a name (default rope)")
    cache.add_argument("--layers", type=int, default=32, help="default 32")
    cache.add_argument("--heads", type=int, default=32, help="of queries (default 32)")
    cache.add_argument("--groups", type=int, help="heads of keys and values (default: as many as queries have)")
    cache.add_argument("--head_dim", type=int, default=128, help="channels a head (default 128)")
    cache.add_argument("--dtype", default="bfloat16", help="float32, bfloat16 or int8 (default bfloat16)")
    cache.add_argument("--window", type=int, help="number of visible keys, to compare with")
    cache.add_argument("--json", action="store_true", help="as JSON, in bytes")
    imports(cache)
    cache.set_defaults(hyper={})

    bench.options(add("bench", bench_command, "Measure what attention costs here: ratios within one run, and memory."))
    return parser


def train_command(arguments, overrides):
    from posjax import config as configs
    from posjax import runs
    from posjax.io.compile_cache import use_compile_cache
    from posjax.variants import num_replicas
    config = configs.load_config(arguments.config, arguments.imports, **overrides)
    use_cpu_devices(num_replicas(config))
    use_compile_cache()
    command = shlex.join(train_words(arguments.config, overrides, arguments.imports, arguments.workdir))
    runs.run(config, arguments.workdir, command=command, profile=arguments.profile)


def train_words(config, overrides, imports, workdir):
    """The command that makes this run again, as a list of words."""
    words = ["posjax", "train", f"--config={config}"]
    words += [f"--import={name}" for name in imports]
    words += [f"--config.{key}={value}" for key, value in overrides.items() if key != "vary"]
    words += [f"--vary={entry}" for entry in overrides.get("vary", ())]
    return words + ([f"--workdir={workdir}"] if workdir else [])


def use_cpu_devices(num_replicas):
    """Splits the CPU into virtual devices for the replicas, as evenly as its cores allow; must come before jax starts.

    Harmless where there is an accelerator, and where the user or a caller has set the number already.
    """
    import jax
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if jax.config.jax_num_cpu_devices < 1 and "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", max(n for n in range(1, cores + 1) if num_replicas % n == 0))


def eval_command(arguments, _):
    from posjax import runs
    from posjax.io.compile_cache import use_compile_cache
    from posjax.report.records import find_runs
    from posjax.variants import num_replicas
    if arguments.lengths is None:
        raise UserError("--lengths is missing, as --lengths=64,128,256.")
    try:
        lengths = tuple(sorted({int(word) for word in arguments.lengths.split(",")}))
    except ValueError:
        raise UserError(f"--lengths={arguments.lengths} cannot be read; give numbers with commas, as 64,128,256.") from None
    run = runs.load_run(arguments.run)
    use_cpu_devices(num_replicas(run.config))
    use_compile_cache()
    rows = run.evaluate(lengths, arguments.num_examples, positions=arguments.policy)
    print(f"{len(rows)} records added to {run.path / 'evals.jsonl'}.")
    for status in sorted({row["status"] for row in rows} - {"ok"}):
        print(f"Length {', '.join(sorted({str(row['length']) for row in rows if row['status'] == status}, key=int))}: {status}.")
    print_tables(find_runs([arguments.run]))


def sweep_command(arguments, overrides):
    from posjax import sweep_runner
    return sweep_runner.sweep(arguments.config, overrides, imports=arguments.imports, workdir=arguments.workdir,
                              dry_run=arguments.dry_run, jobs=arguments.jobs, keep_going=arguments.keep_going)


def report_command(arguments, _):
    from posjax.report.figure import extrapolation_figure
    from posjax.report.html import write_page
    from posjax.report.records import find_runs
    from posjax.report.words import sections
    if arguments.figure and not arguments.figure.endswith(".png"):
        raise UserError(f"--figure={arguments.figure} is a PNG file; its name must end in .png.")
    records = find_runs(arguments.runs)
    path = write_page(records, arguments.out)
    print_tables(records, markdown=arguments.markdown)
    print(f"Report: {path}")
    if arguments.figure:
        groups = sections(records)
        if len(groups) > 1:
            raise UserError(f"--figure draws one task with one range of training lengths; there are {len(groups)}.")
        try:
            with open(arguments.figure, "wb") as file:
                file.write(extrapolation_figure(groups[0][1]))
        except OSError as error:
            raise UserError(f"The figure cannot be written to {arguments.figure}: {error.strerror}.") from None
        print(f"Figure: {arguments.figure}")


def print_tables(records, *, markdown=False):
    from posjax.report.table import markdown_table, text_table
    from posjax.report.words import sections
    for _, summaries in sections(records):
        print(markdown_table(summaries) if markdown else text_table(summaries))


def inspect_command(arguments, _):
    from posjax import config as configs
    from posjax.inspection.command import inspect_to_files
    configs.import_modules(arguments.imports)
    names = ("num_heads", "head_dim", "layer", "seed", "variant", "train_length", "length", "head", "out")
    options = {name: getattr(arguments, name) for name in names}
    figure, numbers = inspect_to_files(arguments.scheme, arguments.hyper, **options)
    print(f"Figure: {figure}")
    print(f"Numbers: {numbers}")


def list_command(arguments, _):
    import json

    from posjax import config as configs
    from posjax import listing
    what = arguments.what
    if what is None:
        raise UserError(f"Say what to list: {', '.join(LISTED)}.")
    if what not in LISTED:
        raise mistyped("list", what, LISTED)
    if arguments.pages is not None and (what != "schemes" or arguments.json):
        raise UserError(f"--pages={arguments.pages} goes with `posjax list schemes` alone.")
    call = {name: getattr(arguments, name) for name in (*CALL_SIZES, "scheme", "dtype", "platform", "segments", "both_ways")}
    call = {name: value for name, value in call.items() if value is not None}
    if call and what != "backends":
        raise UserError(f"--{next(iter(call))} goes with `posjax list backends` alone.")
    configs.import_modules(arguments.imports)
    if arguments.pages is not None:
        from posjax import pages
        print(f"{len(pages.write_pages(arguments.pages, arguments.imports))} pages in {arguments.pages}")
    elif what == "backends":
        from posjax import backends
        call["causal"] = not call.pop("both_ways", False)
        found = backends.rows(**call)
        print(json.dumps(found, indent=2) if arguments.json else listing.text(found))
    else:
        print(json.dumps(listing.rows(what), indent=2) if arguments.json else listing.text(listing.table(what)))


def check_command(arguments, _):
    from posjax import config as configs
    from posjax.conformance import runner
    sys.path.insert(0, "")  # as `python -m` has it: the user's package is in the folder at hand
    configs.import_modules(arguments.imports)
    return runner.command(arguments.scheme, arguments.hyper, num_heads=arguments.num_heads, head_dim=arguments.head_dim,
                          as_json=arguments.json)


def cache_command(arguments, _):
    from posjax import cache_table
    from posjax import config as configs
    configs.import_modules(arguments.imports)
    options = {name: getattr(arguments, name) for name in ("layers", "heads", "groups", "head_dim", "dtype", "window")}
    cache_table.command(arguments.scheme, arguments.hyper, as_json=arguments.json, **options)


def bench_command(arguments, _):
    bench.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
