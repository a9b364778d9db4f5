"""`posjax inspect`: a scheme by name or of a trained run, and its figure and numbers as files."""
import csv
import pathlib

import jax
from flax import nnx

from posjax import config as configs
from posjax.errors import UserError, unknown
from posjax.inspection.draw import draw
from posjax.inspection.panels import inspect
from posjax.report.figure import png
from posjax.runs import load_run
from posjax.schemes.base import Scheme
from posjax.schemes.registry import SCHEMES, make_scheme


def inspect_to_files(what, hyper, *, options=(), num_heads=None, head_dim=None, seed=None, train_length=None, length=None,
                     head=0, out=None):
    """Draws a scheme and writes its numbers.

    Args:
      what: a registered scheme, at its initialisation; or a run directory, whose trained scheme is drawn.
      hyper: hyper-parameters of the scheme, as `{"base": "500.0"}`: strings are read as config overrides are.
      options: other names that a mistyped hyper-parameter may have meant.
      num_heads, head_dim: of a scheme; None for 8 and 64.
      seed: of the parameters, or of the run; None for 0, or the run's first.
      train_length, length, head: as of `posjax.inspect`; a run's own training length where None.
      out: a PNG file; None for inspect_NAME.png.

    Returns:
      The paths of the PNG and of the CSV file beside it.

    Raises:
      ValueError: an unknown scheme or hyper-parameter, a bad value, no run, or a file that cannot be written.
    """
    run = what not in SCHEMES.names() and pathlib.Path(what).exists()
    out = pathlib.Path(f"inspect_{pathlib.Path(what).resolve().name if run else what}.png" if out is None else out)
    if out.suffix != ".png":
        raise UserError(f"--out={out} is a PNG file; its name must end in .png.")
    if run:
        if given := [*hyper, *(name for name, value in (("num_heads", num_heads), ("head_dim", head_dim)) if value is not None)]:
            raise UserError(f"{given[0]} cannot be set: {what} is a run, whose scheme is drawn as it was trained.")
        scheme, origin, run_length = _trained(what, seed)
        train_length = run_length if train_length is None else train_length
        name = what
    else:
        scheme, name, origin = _made(what, hyper, options, num_heads or 8, head_dim or 64, seed or 0)
    found = inspect(scheme, train_length=train_length, length=length, head=head)
    facts = [type(scheme).formula, f"{scheme.num_heads} heads of {scheme.head_dim} channels", origin]
    if scheme.values is not None:
        facts.append("adds to the values too, which is not drawn")
    title = f"{name}\n{facts[0]}\n" + "; ".join(filter(None, facts[1:]))
    try:
        out.write_bytes(png(draw(found, title)))
        write_csv(found, out.with_suffix(".csv"))
    except OSError as error:
        raise UserError(f"The figure cannot be written to {out}: {error.strerror}.") from None
    return out, out.with_suffix(".csv")


def write_csv(inspection, path):
    """All numbers in long format: a line for each panel, series, x and y. Lines that are spreads end in ", std"."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["panel", "series", "x", "y"])
        for panel in inspection.panels:
            for s in panel.series:
                for label, values in ((s.label, s.y), (f"{s.label}, std", s.spread)):
                    if values is not None:
                        writer.writerows((panel.name, label, x, f"{y:.9g}") for x, y in zip(s.x, values))


def _made(name, hyper, options, num_heads, head_dim, seed):
    """A scheme by name; what it is called with what was set, and where its parameters come from."""
    known = SCHEMES.hyper(name)
    for key in hyper:
        if key not in known:
            raise unknown(f"hyper-parameter of {name}, or option,", key, [*known, *options])
    values = configs.override(configs.default_config(name), {f"scheme.{key}": value for key, value in hyper.items()}).scheme
    values = {key: value for key, value in values.items() if key != "name"}
    scheme = make_scheme(name, num_heads=num_heads, head_dim=head_dim, rngs=nnx.Rngs(seed), **values)
    called = f"{name} ({', '.join(f'{key}={values[key]}' for key in hyper)})" if hyper else name
    learns = bool(jax.tree.leaves(nnx.state(scheme, nnx.Param)))
    return scheme, called, f"learned parameters at initialisation (seed {seed})" if learns else ""


def _trained(path, seed):
    """The scheme of a run, what its parameters are, and the tokens of its longest training sequence."""
    from posjax.experiment import Experiment
    run = load_run(path)
    experiment = Experiment.build(run.config)
    seed = experiment.seeds[0] if seed is None else seed
    scheme = _scheme_of(run.model(seed))
    return scheme, f"as trained (seed {seed}, step {run.params()[0]})", experiment.train_tokens


def _scheme_of(model) -> Scheme:
    return model.scheme
