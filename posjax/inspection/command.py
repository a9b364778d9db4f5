"""`posjax inspect`: a scheme by name or of a trained run, and its figure and numbers as files."""
import csv
import pathlib

import jax
from flax import nnx

from posjax import config as configs
from posjax.errors import UserError, unknown
from posjax.experiment import Experiment
from posjax.inspection.draw import draw
from posjax.inspection.panels import inspect
from posjax.report.figure import png
from posjax.runs import load_run
from posjax.schemes.registry import SCHEMES, make_scheme
from posjax.variants import find, text, wanted


def inspect_to_files(what, hyper, *, out=None, train_length=None, length=None, head=0, seed=None, **options):
    """Draws a scheme and writes its numbers.

    Args:
      what: a registered scheme, at its initialisation; or a run directory, whose trained scheme is drawn.
      hyper: hyper-parameters of the scheme, as `{"base": "500.0"}`: strings are read as config overrides are.
      out: a PNG file; None for inspect_NAME.png.
      train_length, length, head: as of `posjax.inspect`; for None, a run has its own training length.
      seed: of the parameters, or of the run; None for 0, or the run's first.
      **options: `num_heads` and `head_dim` of a scheme, None for 8 and 64; `layer` of a run, None for 0; `variant` of a
        run, values as `["scheme.base=500.0"]`, None for its only one.

    Returns:
      The paths of the PNG and of the CSV file beside it.

    Raises:
      ValueError: an unknown scheme or hyper-parameter, a bad value, no run, or a file that cannot be written.
    """
    is_run = what not in SCHEMES.names() and pathlib.Path(what).exists()
    out = pathlib.Path(f"inspect_{pathlib.Path(what).resolve().name if is_run else what}.png" if out is None else out)
    if out.suffix != ".png":
        raise UserError(f"--out={out} is a PNG file; its name must end in .png.")
    given = {key: value for key, value in options.items() if value is not None}
    if is_run:
        scheme, title, run_length = _trained(what, seed, hyper, **given)
        train_length = run_length if train_length is None else train_length
    else:
        scheme, title = _made(what, hyper, [*options, "train_length", "length", "head", "seed", "out"], seed or 0, **given)
    found = inspect(scheme, train_length=train_length, length=length, head=head)
    if scheme.values is not None:
        title += "; adds to the attended values too, which is not drawn"
    try:
        out.write_bytes(png(draw(found, title)))
        write_csv(found, out.with_suffix(".csv"))
    except OSError as error:
        raise UserError(f"The figure and its numbers cannot be written to {out}: {error.strerror}.") from None
    return out, out.with_suffix(".csv")


def write_csv(inspection, path):
    """All numbers in long format: a line for each panel, series, x and y. Series that are spreads end in ", std"."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["panel", "series", "x", "y"])
        for panel in inspection.panels:
            for s in panel.series:
                for label, values in ((s.label, s.y), (f"{s.label}, std", s.spread)):
                    if values is not None:
                        writer.writerows((panel.name, label, x, f"{y:.9g}") for x, y in zip(s.x, values))


def _made(name, hyper, options, seed, *, num_heads=8, head_dim=64, layer=None, variant=None):
    """A scheme by name, and the title of its figure."""
    known = SCHEMES.hyper(name)
    for key in hyper:
        if key not in known:
            raise unknown(f"hyper-parameter of {name}, or option,", key, [*known, *options])
    if layer is not None:
        raise UserError(f"layer is {layer}; only a run has layers, and {name} is a scheme by name.")
    if variant is not None:
        raise UserError(f"variant is {', '.join(variant)}; only a run has variants, and {name} is a scheme by name.")
    if seed < 0:
        raise UserError(f"seed is {seed}; it must not be negative.")
    values = configs.override(configs.default_config(name), {f"scheme.{key}": value for key, value in hyper.items()}).scheme
    values = {key: value for key, value in values.items() if key != "name"}
    scheme = make_scheme(name, num_heads=num_heads, head_dim=head_dim, rngs=nnx.Rngs(seed), **values)
    called = f"{name} ({', '.join(f'{key}={values[key]}' for key in hyper)})" if hyper else name
    learns = bool(jax.tree.leaves(nnx.state(scheme, nnx.Param)))
    return scheme, _title(called, scheme, f"learned parameters at initialisation (seed {seed})" if learns else None)


def _trained(path, seed, hyper, *, layer=0, variant=(), **sizes):
    """The scheme of a layer of a run, the title of its figure, and the tokens of the longest training sequence."""
    for key in (*hyper, *sizes):
        raise UserError(f"{key} cannot be set: {path} is a run, whose scheme is drawn as it was trained.")
    run = load_run(path)
    experiment = Experiment.build(run.config)
    seed = experiment.seeds[0] if seed is None else seed
    variant = find(run.variants, wanted(variant))
    scheme, window = _of_layer(run.model(seed, variant=variant), layer)
    facts = [f"layer {layer} as trained: seed {seed}, step {run.params()[0]}", text(variant)]
    if window is not None:
        facts.append(f"a window of {window} keys, which is not drawn")
    return scheme, _title(f"{scheme.name} of {path}", scheme, *facts), experiment.train_tokens


def _of_layer(model, layer):
    """The scheme of a layer and its window, or None."""
    depth = model.config.depth
    if not 0 <= layer < depth:
        raise UserError(f"layer is {layer}; the run has layers 0 to {depth - 1}.")
    return model.layers[layer]


def _title(called, scheme, *facts):
    sizes = f"{scheme.num_heads} head{'s' * (scheme.num_heads > 1)} of {scheme.head_dim} channels"
    return "\n".join([called, type(scheme).formula, "; ".join([sizes, *filter(None, facts)])])
