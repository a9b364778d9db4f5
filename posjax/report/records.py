"""Runs as plain data, read from their directories: all that a report is made from."""
import dataclasses
import pathlib
import sys

from posjax.errors import UserError
from posjax.eval.statistics import summarize
from posjax.io.run_dir import RunDir
from posjax.variants import evals_of, metrics_of, recorded, recorded_config


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What a run directory says; of a run that varies values, what it says of one variant, as of a run of its own.

    Attributes:
      name: what the run is called: its path below the folder that was given.
      path: the directory.
      config: the resolved config, nested dicts.
      environment: versions, devices, the command that reproduces the run; empty if it was not written.
      metrics, evals: the lines of metrics.jsonl and evals.jsonl, in order.
      done: whether the run says that it is finished.
      failed: the record of a run that diverged, or None.
    """
    name: str
    path: pathlib.Path
    config: dict
    environment: dict
    metrics: list
    evals: list
    done: bool
    failed: dict | None = None

    @classmethod
    def load(cls, path, name=None):
        """Reads the run directory `path`: `UserError` if it is not one, or is damaged."""
        run = RunDir.open(path)
        record = cls(name=name or run.path.resolve().name, path=run.path, config=run.config, environment=run.environment,
                     metrics=run.metrics(), evals=run.evals(), done=run.done is not None, failed=run.failed)
        try:  # what a page is made of, so that one bad run is told by its name
            for part in record.of_each_variant():
                summarize(part.evals, part.config, finished=part.done)
                for row in part.metrics:
                    float(row["step"]), [float(loss) for loss in row["loss"]]
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"The records of {path} are damaged: {type(error).__name__}: {error}") from error
        return record

    def of_each_variant(self):
        """One record for each variant, whose config has its values."""
        return [dataclasses.replace(self, config=recorded_config(self.config, variant), evals=evals_of(self.evals, variant),
                                    metrics=metrics_of(self.metrics, variant)) for variant in recorded(self.config)]


def find_runs(paths):
    """All runs at `paths`: run directories, or folders that contain them at any depth (a sweep's).

    A damaged run in a folder is named on standard error and left out.

    Returns:
      `RunRecord`s in the order of `paths`, sorted within a folder, each directory once, with one for each of its variants.

    Raises:
      UserError: a path that does not exist or holds no run, a damaged run that is itself among `paths`, or none but damaged
        ones.
    """
    found, damaged = {}, []
    paths = [pathlib.Path(path) for path in paths]
    if not paths:
        raise UserError("No run was given; name run directories or folders that contain them.")
    for root in paths:
        if not root.exists():
            raise UserError(f"{root} does not exist; give a run directory or a folder that contains runs.")
        runs = list(walk(root)) if root.is_dir() else []
        if not runs:
            raise UserError(f"{root} holds no run: no directory in it has a config.json.")
        for run in runs:
            name = run.relative_to(root).as_posix() if run != root else run.resolve().name
            found.setdefault(run.resolve(), (run, name))
    records, named = [], {path.resolve() for path in paths}
    for place, (run, name) in found.items():
        try:
            records += RunRecord.load(run, name).of_each_variant()
        except UserError as error:
            if place in named:
                raise
            damaged.append(error)
    if not records:
        raise damaged[0]
    for error in damaged:
        sys.stderr.write(f"posjax: Left out: {error}\n")
    return records


def walk(directory):
    """The run directories at or below `directory`; a run is not searched for others."""
    if (directory / "config.json").is_file():
        yield directory
        return
    for child in sorted(directory.iterdir()):
        if child.is_dir() and not child.is_symlink():
            yield from walk(child)
