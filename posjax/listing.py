"""What `posjax list` shows: taken from the classes themselves."""
import inspect
import pathlib

from posjax.errors import UserError


def rows(what):
    """A list of dicts with a name and, for schemes, tasks and policies, their hyper-parameters."""
    return {"schemes": _schemes, "temperatures": _temperatures, "tasks": _tasks, "policies": _policies,
            "configs": _configs}[what]()


def text(found):
    """The rows as aligned columns."""
    if not found:
        raise UserError("There is nothing to list here.")
    cells = [list(found[0])] + [[_plain(value) for value in row.values()] for row in found]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells)


def markdown(found):
    """The rows as a Markdown table, for the README."""
    cells = [list(found[0]), ["---"] * len(found[0])] + [[_plain(v).replace("|", "\\|") for v in row.values()] for row in found]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def _schemes():
    from posjax.schemes.registry import SCHEMES
    return [{"name": name, "formula": cls.formula, "relative": cls.relative, "max_length": "max_length" in SCHEMES.hyper(name),
             "hyper": SCHEMES.hyper(name), "reference": cls.reference}
            for name, cls in ((name, SCHEMES.get(name)) for name in SCHEMES.names())]


def _temperatures():
    from posjax.schemes.temperature import TEMPERATURES
    return [{"name": name, "factor": TEMPERATURES.get(name).formula, "relative": TEMPERATURES.get(name).relative,
             "hyper": TEMPERATURES.hyper(name), "what": _first_line(TEMPERATURES.get(name))} for name in TEMPERATURES.names()]


def _tasks():
    from posjax.tasks.base import TASKS
    return [{"name": name, "example": TASKS.get(name).formula, "hyper": TASKS.hyper(name)} for name in TASKS.names()]


def _policies():
    from posjax.schemes.positions import POLICIES
    return [{"name": name, "positions": _first_line(POLICIES.get(name)), "hyper": POLICIES.hyper(name)}
            for name in POLICIES.names()]


def _configs():
    from posjax.config import config_module
    return [{"name": str(path), "sweep": hasattr(module, "sweep"), "what": _first_line(module)}
            for path in sorted(pathlib.Path("configs").glob("*.py")) for module in [config_module(path)[0]]]


def _first_line(thing):
    return (inspect.getdoc(thing) or "").split("\n")[0]


def _plain(value):
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items()) or "-"
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
