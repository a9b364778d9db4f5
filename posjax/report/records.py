"""Runs as plain data, read from their directories: all that a report is made from."""
import dataclasses
import json
import pathlib

from posjax.errors import UserError


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
        path = pathlib.Path(path)
        if not (path / "config.json").is_file():
            raise UserError(f"{path} is not a run: it has no config.json.")
        environment = path / "environment.json"
        return cls(name=name or path.resolve().name, path=path, config=read_json(path / "config.json"),
                   environment=read_json(environment) if environment.is_file() else {},
                   metrics=read_lines(path / "metrics.jsonl"), evals=read_lines(path / "evals.jsonl"),
                   done=(path / "DONE").exists())


def read_json(path):
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not readable JSON ({error}).") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object.")
    return value


def read_lines(path):
    """The records of a JSON-lines file; none if it does not exist. A torn last line (a killed writer) is left out."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            if any(later.strip() for later in lines[index + 1:]):
                raise UserError(f"{path}, line {index + 1}, is not readable JSON.") from None
            continue
        if not isinstance(record, dict):
            raise UserError(f"{path}, line {index + 1}, is not a JSON object.")
        records.append(record)
    return records


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
