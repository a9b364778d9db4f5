"""What `posjax list` shows: taken from the classes themselves."""
import inspect
import pathlib
import re
import shutil
import textwrap

from posjax.errors import UserError


def rows(what):
    """A list of dicts with a name and, but for configs, the hyper-parameters: all that is known, for JSON."""
    return {"schemes": _schemes, "temperatures": _temperatures, "tasks": _tasks, "policies": _policies,
            "configs": _configs}[what]()


def table(what):
    """The rows that a table shows: those of schemes without their hyper-parameters, which have pages of their own."""
    return [{key: value for key, value in row.items() if what != "schemes" or key != "hyper"} for row in rows(what)]


def text(found, width=None):
    """The rows as aligned columns, wrapped to a width (default: of the terminal, else 160); papers by author and year."""
    if not found:
        raise UserError("There is nothing to list here.")
    cells = [list(found[0])] + [[re.sub(r", arXiv [\d.]+", "", _plain(value)) for value in row.values()] for row in found]
    widths = [max(map(len, column)) for column in zip(*cells)]
    narrowest = [max(len(word) for cell in column for word in cell.split()) for column in zip(*cells)]
    excess = sum(widths) + 2 * (len(widths) - 1) - (width or shutil.get_terminal_size((160, 0)).columns)
    for _ in range(excess):
        widest = max(range(len(widths)), key=lambda i: widths[i])
        widths[widest] = max(widths[widest] - 1, narrowest[widest])
    lines = []
    for row in cells:
        wrapped = [textwrap.wrap(cell, column, break_long_words=False, break_on_hyphens=False)
                   for cell, column in zip(row, widths)]
        for i in range(max(map(len, wrapped))):
            parts = [(cell[i] if i < len(cell) else "").ljust(column) for cell, column in zip(wrapped, widths)]
            lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def markdown(found):
    """The rows as a Markdown table, for the README."""
    cells = [list(found[0]), ["---"] * len(found[0])] + [[_plain(v).replace("|", "\\|") for v in row.values()] for row in found]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def default_scheme(name):
    """A scheme as the default decoder has it, without values, and that decoder's `DecoderConfig`.

    The scheme is None if it cannot be made with the defaults: somebody's own that needs a hyper-parameter is listed too.
    """
    from flax import nnx

    from posjax.config import default_config
    from posjax.models.decoder import DecoderConfig
    from posjax.schemes.registry import make_scheme
    sizes = DecoderConfig(vocab_size=1, **default_config().model)
    try:
        return nnx.eval_shape(lambda: make_scheme(name, num_heads=sizes.num_heads, head_dim=sizes.head_dim,
                                                  model_dim=sizes.width, rngs=nnx.Rngs(0))), sizes
    except Exception:
        return None, sizes


def num_parameters(scheme, depth):
    """What a decoder of `depth` layers learns for the scheme."""
    import jax
    from flax import nnx
    own = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(scheme, nnx.Param)))
    return own * (depth if scheme.per_layer else 1)


def _schemes():
    from posjax.schemes.registry import SCHEMES
    found = []
    for name in SCHEMES.names():
        cls, (made, sizes) = SCHEMES.get(name), default_scheme(name)
        facts = cls if made is None else made
        found.append({"name": name, "formula": cls.formula,
                      "parameters": None if made is None else num_parameters(made, sizes.depth), "relative": facts.relative,
                      "max_length": facts.max_length, "cost": cls.cost, "hyper": _hyper(SCHEMES, name),
                      "reference": cls.reference})
    return found


def _temperatures():
    from posjax.schemes.temperature import TEMPERATURES
    return [{"name": name, "factor": TEMPERATURES.get(name).formula, "relative": TEMPERATURES.get(name).relative,
             "hyper": _hyper(TEMPERATURES, name), "what": _first_line(TEMPERATURES.get(name))} for name in TEMPERATURES.names()]


def _tasks():
    from posjax.tasks.base import TASKS
    return [{"name": name, "example": TASKS.get(name).formula, "hyper": _hyper(TASKS, name)} for name in TASKS.names()]


def _policies():
    from posjax.schemes.positions import POLICIES
    return [{"name": name, "positions": _first_line(POLICIES.get(name)), "hyper": _hyper(POLICIES, name)}
            for name in POLICIES.names()]


def _configs():
    from posjax.config import config_module
    return [{"name": str(path), "sweep": hasattr(module, "sweep"), "what": _first_line(module)}
            for path in sorted(pathlib.Path("configs").glob("*.py")) for module in [config_module(path)[0]]]


def _hyper(registry, name):
    """Hyper-parameters with their defaults, as JSON can have them."""
    return {key: "(required)" if default is inspect.Parameter.empty else default
            for key, default in registry.hyper(name).items()}


def _first_line(thing):
    return (inspect.getdoc(thing) or "").split("\n")[0]


def _plain(value):
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items()) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value in (None, "") else str(value)
