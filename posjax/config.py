"""Configs: the defaults, reading one, changing it, and refusing a bad one in one line."""
import ast
import importlib
import importlib.util
import inspect
import json
import pathlib
import sys
import sysconfig
import traceback

from ml_collections import ConfigDict

from posjax import nested
from posjax.errors import UserError, unknown

# The parts of a config that name a registered thing: its hyper-parameters stand beside the name.
_NAMED = ("scheme", "temperature", "layers.other", "layers.other_temperature", "task", "positions.train", "positions.eval")


def default_config(scheme="rope", task="copy"):
    """The config that every experiment starts from: a small decoder on copy, in a few minutes on two CPU cores.

    Args:
      scheme, task: registered names; their hyper-parameters join the config with their defaults.

    Returns:
      A locked `ConfigDict`; a key that is not in it cannot be set.
    """
    config = ConfigDict({
        "seed": 0,
        "num_seeds": 3,
        # "KEY=V,V" of real numbers of the optimiser or the scheme, all combinations as replicas of one run (`posjax.variants`).
        "vary": (),
        "imports": (),
        "scheme": _named("scheme", scheme),
        "temperature": _named("temperature", "none"),
        # Blocks: whose parameters they use, and which of them are of another kind (`posjax.schemes.layers.make_layers`).
        "layers": {"parameters": "published", "window": None, "other_every": 0, "other_window": None,
                   "other": _named("layers.other", "nope"), "other_temperature": _named("layers.other_temperature", "none")},
        "task": _named("task", task),
        "positions": {"train": _named("positions.train", "sequential"), "eval": _named("positions.eval", "sequential")},
        "model": {"width": 64, "depth": 2, "num_heads": 4, "head_dim": None, "mlp_ratio": 4.0, "dtype": "float32"},
        "train": {
            "steps": 1500,
            "batch_size": 64,
            # The size of a training example is uniform over min .. max: a distribution, not one length.
            "lengths": {"min": 1, "max": 16},
            "learning_rate": 1e-2,
            "warmup_fraction": 0.1,
            "final_lr_fraction": 0.01,
            "beta1": 0.9,
            "beta2": 0.98,
            "weight_decay": 0.1,
            "clip_norm": 1.0,
            "chunk_steps": 50,
            "checkpoint_every": 500,
        },
        "eval": {
            "lengths": (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 48, 64, 96, 128),
            "num_examples": 512,
            # During training, every so many steps (0: never), on fewer examples: how extrapolation comes and goes.
            "every": 500,
            "every_num_examples": 64,
            "fit_threshold": 0.95,
        },
    }, convert_dict=True)
    config.lock()
    return config


def load_config(spec, imports=(), **overrides):
    """Reads a config file and applies overrides.

    Args:
      spec: `path/to/file.py` or `path/to/file.py:argument`, whose `get_config(argument)` makes the config; or the
        config.json of a run.
      imports: modules or files with schemes and tasks of your own, imported first and recorded in the config.
      **overrides: flat keys, as `**{"train.steps": 500}`, or a section at a time, as `train={"steps": 500}`.

    Raises:
      ValueError: no such file, an argument or key that it does not know, a value of another type.
    """
    # Absolute, since a run may be evaluated from another folder than it was trained from.
    imports = [str(pathlib.Path(name).resolve()) if pathlib.Path(name).is_file() else str(name) for name in imports]
    import_modules(imports)
    if str(spec).endswith(".json"):
        config = _config_from_file(pathlib.Path(spec))
    else:
        module, argument = config_module(spec)
        if not hasattr(module, "get_config"):
            raise UserError(f"The config {spec} has no get_config().")
        takes = inspect.signature(module.get_config).parameters
        if argument is not None and not takes:
            raise UserError(f"The config {spec} takes no argument after the colon.")
        config = run_file(f"get_config() of {spec}", module.get_config, *([] if argument is None else [argument]))
        if not isinstance(config, ConfigDict):
            raise UserError(f"get_config() of {spec} returns {type(config).__name__}; a config made with "
                            "posjax.default_config() is expected.")
    new = tuple(name for name in imports if name not in config.imports)
    return override(config, {"imports": (*config.imports, *new), **overrides} if new else overrides)


def config_module(spec):
    """The imported config file, and the argument after the colon or None."""
    path, _, argument = str(spec).partition(":")
    return import_file(_existing(path)), argument or None


def import_modules(names):
    """Imports modules by dotted name, or by path where the name ends in .py, so that what they register exists."""
    for name in map(str, names):
        if not name.endswith(".py"):
            run_file(f"Cannot import {name}", importlib.import_module, name)
        else:
            import_file(pathlib.Path(name))


def override(config, overrides):
    """Returns a copy of `config` with values replaced.

    A new name (`scheme.name`, `task.name`, `positions.train.name`) brings that thing's own hyper-parameters at their
    defaults; the other overrides then apply to those.

    Args:
      config: a `ConfigDict`.
      overrides: flat or nested keys; a string given for another type is read as a Python literal.
    """
    config = config.copy_and_resolve_references()
    flat = flatten(overrides)
    for part in _NAMED:
        if (name := flat.pop(f"{part}.name", None)) is not None and name != get(config, f"{part}.name"):
            _set(config, part, ConfigDict(_named(part, name)))
    for key, value in flat.items():
        old = get(config, key)
        if isinstance(old, ConfigDict):
            raise UserError(f"{key} is a section of the config; set one of its keys: {', '.join(sorted(old))}.")
        _set(config, key, convert(key, value, old))
    config.lock()
    return config


def get(config, key):
    """The value at a dotted key; a key that does not exist is a `UserError` with close matches."""
    node = config
    for part in key.split("."):
        if not isinstance(node, ConfigDict) or part not in node:
            raise unknown("config key", key, to_flat(config))
        node = node[part]
    return node


def to_flat(config):
    """The config as `{"train.steps": 1500, ...}`."""
    return nested.flatten(config.to_dict())


def to_json(config):
    """The config as nested plain data: tuples become lists."""
    return json.loads(json.dumps(config.to_dict()))


def from_json(data):
    """The config that `to_json` wrote, with the things it imports imported."""
    if not isinstance(data.get("imports"), list):
        raise UserError("The config.json of the run is not the config of a run: it has no list of imports.")
    import_modules(data["imports"])
    config = ConfigDict(_tuples(data), convert_dict=True)
    config.lock()
    return config


def flatten(overrides):
    """Nested keys as flat ones; `scheme="alibi"` as `scheme.name`."""
    flat = nested.flatten(overrides)
    return {f"{key}.name" if key in _NAMED and isinstance(value, str) else key: value for key, value in flat.items()}


def run_file(what, function, *args):
    """Calls code of the user's; whatever goes wrong in it is told in one line with its place."""
    try:
        return function(*args)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        message, place = told(error, what)
        raise UserError(f"{place}: {type(error).__name__}: {message.rstrip('.')}.") from error


def told(error, what):
    """The message of an error in one line, and its place in the user's own code, or `what` if it is not there."""
    if isinstance(error, SyntaxError) and error.filename:
        return error.msg, f"{error.filename} line {error.lineno}"
    # The innermost line of the user's own: the libraries that it calls are not to blame.
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return " ".join(str(error).split()), f"{own[-1].filename} line {own[-1].lineno}" if own else what


def _is_users(filename):
    ours = (str(pathlib.Path(__file__).parent), sysconfig.get_path("stdlib"), "<")
    return not filename.startswith(ours) and "site-packages" not in filename


def _named(part, name):
    hyper = _registry(part).hyper(name)
    if missing := [key for key, default in hyper.items() if default is inspect.Parameter.empty]:
        raise UserError(f"{part} {name} cannot stand in a config: {', '.join(missing)} has no default.")
    return {"name": name, **hyper}


def _registry(part):
    from posjax.schemes.positions import POLICIES
    from posjax.schemes.registry import SCHEMES
    from posjax.schemes.temperature import TEMPERATURES
    from posjax.tasks.base import TASKS
    return {"scheme": SCHEMES, "other": SCHEMES, "temperature": TEMPERATURES, "other_temperature": TEMPERATURES, "task": TASKS,
            "train": POLICIES, "eval": POLICIES}[part.split(".")[-1]]


def _existing(path):
    """`path`, if it is a file; a typo is told with the files beside it."""
    file = pathlib.Path(path)
    if not file.is_file():
        folder = file.parent if file.parent.is_dir() else pathlib.Path("configs")
        raise unknown("config file", path, [str(p) for p in folder.glob(f"*{file.suffix or '.py'}")])
    return file


def _config_from_file(file):
    """The config in a config.json, with the checks of overrides: a file may have been edited by hand."""
    try:
        data = json.loads(_existing(file).read_text())
        flat = flatten(data)
        import_modules(data["imports"])
        config = override(default_config(flat["scheme.name"], flat["task.name"]), flat)
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not the config of a run: {type(error).__name__}: {error}.") from error
    if missing := to_flat(config).keys() - flat.keys():
        raise UserError(f"{file} is not the config of a run: {', '.join(sorted(missing))} is missing.")
    return config


def import_file(file):
    """Imports a file under a name of its own."""
    if not file.is_file():
        raise UserError(f"Cannot import {file}: no such file.")
    name = "posjax_file_" + "".join(c if c.isalnum() else "_" for c in str(file.resolve()))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise UserError(f"{file} is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    run_file(file, spec.loader.exec_module, module)
    return module


def _set(config, key, value):
    *path, last = key.split(".")
    for part in path:
        config = config[part]
    with config.unlocked(), config.ignore_type():
        config[last] = value


def convert(key, value, old):
    """`value` in the type of `old`; strings, as a command line gives them, are read first."""
    given = value
    if key == "vary" and isinstance(value, str):
        return (value,)
    if isinstance(value, str) and isinstance(old, float) and value.lower().lstrip("+-") in ("nan", "inf", "infinity"):
        raise UserError(f"{key}={given!r} is not finite.")
    if isinstance(value, str) and not isinstance(old, str):
        try:
            value = ast.literal_eval(value.capitalize() if value.lower() in ("true", "false", "none") else value)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # all that it is documented to raise
            raise UserError(f"{key}={given!r} cannot be read; a value like {old!r} is expected.") from None
    if isinstance(old, tuple):
        value = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if old and not all(_fits(item, old[0]) for item in value):
            raise UserError(f"{key}={given!r}: every item must be like {old[0]!r}.")
        return value
    if not _fits(value, old):
        raise UserError(f"{key}={given!r} is of another type; a value like {old!r} is expected.")
    return float(value) if isinstance(old, float) else value


def _fits(value, old):
    if old is None or value is None:
        return old is None
    if isinstance(old, bool) or isinstance(value, bool):
        return isinstance(old, bool) and isinstance(value, bool)
    if isinstance(old, float):
        return isinstance(value, (int, float))
    return isinstance(value, type(old))


def _tuples(data):
    if isinstance(data, dict):
        return {key: _tuples(value) for key, value in data.items()}
    return tuple(_tuples(item) for item in data) if isinstance(data, list) else data
