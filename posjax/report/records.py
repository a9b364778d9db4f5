"""Runs as plain data, read from their directories: all that a report is made from."""
import dataclasses
import pathlib

from posjax.errors import UserError
from posjax.io.run_dir import RunDir


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What a run directory says.

    Attributes:
      name: what the run is called: its path below the folder that was given.
      path: the directory.
      config: the resolved config, nested dicts.
      environment: versions, devices, the command that reproduces the run; empty if it was not written.
      metrics, evals: the lines of metrics.jsonl and evals.jsonl, in order.
      done: whether the run says that it is finished.
    """
    name: str
    path: pathlib.Path
    config: dict
    environment: dict
    metrics: list
    evals: list
    done: bool

    @classmethod
    def load(cls, path, name=None):
        """Reads the run directory `path`; `UserError` if it is not one."""
        run = RunDir.open(path)
        return cls(name=name or run.path.resolve().name, path=run.path, config=run.config, environment=run.environment,
                   metrics=run.metrics(), evals=run.evals(), done=run.done is not None)


def find_runs(paths):
    """All runs at `paths`: run directories, or folders that contain them at any depth (a sweep's).

    Returns:
      `RunRecord`s in the order of `paths`, sorted within a folder, each directory once.

    Raises:
      UserError: a path that does not exist or holds no run.
    """
    found = {}
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
    return [RunRecord.load(run, name) for run, name in found.values()]


def walk(directory):
    """The run directories at or below `directory`; a run is not searched for others."""
    if (directory / "config.json").is_file():
        yield directory
        return
    for child in sorted(directory.iterdir()):
        if child.is_dir() and not child.is_symlink():
            yield from walk(child)
