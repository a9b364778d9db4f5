"""A run's directory and its records: what every table, figure and report is later made from.

    config.json         the resolved config, nested
    environment.json    versions, devices, commit, the command that reproduces the run
    metrics.jsonl       one line a logged chunk of training
    evals.jsonl         one line for each (step, seed, variant, length, condition, position policy)
    tensorboard/  checkpoints/
    DONE                a JSON summary; there when the run is finished
    FAILED              a JSON record of why it diverged (step, seeds, reason); there until it is finished after all
    lock                held by the process that writes

One process writes at a time; anybody may read at any time. See `posjax.io.jsonl` for how numbers are written.
"""
import fcntl
import os
from pathlib import Path
from typing import Self

from posjax.errors import UserError
from posjax.io import jsonl
from posjax.nested import flatten


class RunDir:
    """The records of one run. `RunDir.create` to write (and read), `RunDir.open` to read."""

    def __init__(self, path: Path, lock: int | None = None):
        self.path = path
        self._lock = lock  # file descriptor: it stays open for the process's lifetime if nobody closes it

    @classmethod
    def create(cls, path: str | os.PathLike, config: dict) -> "RunDir":
        """Makes the run directory, or opens an existing one of the same config, for writing.

        The lock is the kernel's (flock): it ends with the process, however that ends.

        Raises:
          UserError: `path` is a file or a directory of something else; it is a run of another config; another process
            writes to it; it cannot be written. Nothing is left behind then.
        """
        path = Path(path)
        text = jsonl.dumps(config, indent=2) + "\n"
        lock, made = None, []
        try:
            _check(path, config)
            made = _missing(path)
            path.mkdir(parents=True, exist_ok=True)
            lock = _lock(path / "lock")
            _check(path, config)  # again: another process may have been quicker before the lock was ours
            if not (path / "config.json").exists():
                jsonl.replace(path / "config.json", text.encode())
        except BaseException as error:
            if lock is not None:
                if not (path / "config.json").exists():
                    (path / "lock").unlink()
                os.close(lock)
            _remove(made)
            if isinstance(error, OSError):
                raise UserError(f"Cannot write to run directory {path}: {error.strerror}.") from None
            raise
        return cls(path, lock)

    @classmethod
    def open(cls, path: str | os.PathLike) -> "RunDir":
        """Opens a run for reading; it may be running. Raises `UserError` if `path` is not a run directory."""
        path = Path(path)
        if not (path / "config.json").is_file():
            why = "there is no such directory" if not path.exists() else "it has no config.json"
            raise UserError(f"{path} is not a run directory: {why}.")
        return cls(path)

    @property
    def tensorboard_dir(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoint_dir(self) -> Path:
        return self.path / "checkpoints"

    @property
    def config(self) -> dict:
        """The resolved config, as written (tuples have become lists)."""
        return jsonl.read_json(self.path / "config.json")

    @property
    def environment(self) -> dict:
        """What `environment_record` made; empty if the run stopped before it was written."""
        path = self.path / "environment.json"
        return jsonl.read_json(path) if path.exists() else {}

    @property
    def done(self) -> dict | None:
        """The summary of a finished run, None of an unfinished one."""
        path = self.path / "DONE"
        return jsonl.read_json(path) if path.exists() else None

    @property
    def failed(self) -> dict | None:
        """Why the run stopped with numbers that are not finite, None where it did not, or has finished since."""
        path = self.path / "FAILED"
        if not path.exists() or self.done is not None:
            return None
        record = jsonl.read_json(path)
        if missing := {"step", "seeds", "reason"} - record.keys():
            raise UserError(f"{path} has no {', '.join(sorted(missing))}.")
        return record

    def metrics(self) -> list[dict]:
        """The records of training, one a logged chunk, in the order written."""
        return jsonl.read_lines(self.path / "metrics.jsonl")

    def evals(self) -> list[dict]:
        """The records of evaluation; of those that differ in nothing but their results the last counts."""
        records = {}
        for row in jsonl.read_lines(self.path / "evals.jsonl"):
            for key in ("step", "seed", "length"):
                if not isinstance(row.get(key), int):
                    raise UserError(f"{self.path / 'evals.jsonl'} has a record whose {key} is {row.get(key)!r}, not a number.")
            variant, condition = (jsonl.dumps(sorted((row.get(key) or {}).items())) for key in ("variant", "condition"))
            key = (row["step"], row["seed"], variant, row["length"], condition, row.get("positions"), row.get("num_examples"))
            records[key] = row
        return list(records.values())

    def write_environment(self, environment: dict) -> None:
        self._check_writable()
        jsonl.write_json(self.path / "environment.json", environment)

    def append_metrics(self, rows) -> None:
        """Appends dicts to metrics.jsonl. In the file, safe from a kill, when this returns."""
        self._check_writable()
        jsonl.append_lines(self.path / "metrics.jsonl", rows)

    def append_evals(self, rows) -> None:
        """Appends dicts to evals.jsonl. In the file, safe from a kill, when this returns."""
        self._check_writable()
        jsonl.append_lines(self.path / "evals.jsonl", rows)

    def truncate_after(self, step: int) -> None:
        """Drops the records of steps later than `step`: they are made again by a run that resumes there."""
        self._check_writable()
        for name in ("metrics.jsonl", "evals.jsonl"):
            path = self.path / name
            lines = list(enumerate(jsonl.raw_lines(path), 1))
            kept = [line for number, line in lines if jsonl.parse_line(path, number, line)["step"] <= step]
            if len(kept) < len(lines):
                jsonl.replace(path, b"".join(kept))

    def finish(self, summary: dict) -> None:
        """Marks the run as finished, whatever happened before."""
        self._check_writable()
        jsonl.write_json(self.path / "DONE", summary)
        (self.path / "FAILED").unlink(missing_ok=True)

    def fail(self, step: int, seeds: list[int], reason: str, variants: list[dict]) -> None:
        """Records that the run diverged; its checkpoints stay, and it may go on from the last.

        `variants` has that of each of `seeds`; all are empty where nothing is varied, and not written then.
        """
        self._check_writable()
        record = {"step": step, "seeds": seeds, "reason": reason} | ({"variants": variants} if any(variants) else {})
        jsonl.write_json(self.path / "FAILED", record)

    def close(self) -> None:
        """Gives the lock back. Reading still works."""
        if self._lock is not None:
            # The file stays: were it removed, a process at the old file and one at a new one would both hold the lock.
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _check_writable(self) -> None:
        if self._lock is None:
            raise RuntimeError(f"Run {self.path} is not open for writing: use RunDir.create.")


def _check(path: Path, config: dict) -> None:
    """Refuses a path that is not, and must not become, a run of `config`."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file: a run needs a new directory or that of an earlier run.")
    if (path / "config.json").is_file():
        differences = _differences(jsonl.read_json(path / "config.json"), config)
        if differences:
            raise UserError(f"{path} is a run of another config: {'; '.join(differences)}. Choose another directory.")
    elif path.exists():
        # A process killed between its first two writes leaves a lock and perhaps a temporary file.
        foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in ("lock", ".config.json.tmp"))
        if foreign:
            names = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
            raise UserError(f"{path} is not a run directory (no config.json) and not empty ({names}): choose another.")


def _differences(there: dict, here: dict) -> list[str]:
    # As JSON text, in which a tuple equals the list read back, and NaN equals NaN.
    there, here = ({key: jsonl.dumps(value) for key, value in flatten(config).items()} for config in (there, here))
    keys = sorted(key for key in there.keys() | here.keys() if there.get(key) != here.get(key))
    return [f"{key} is {there.get(key, 'absent')} there, {here.get(key, 'absent')} here" for key in keys]


def _lock(lock_path: Path) -> int:
    """The descriptor of the locked file, our process id inside. Raises `UserError` if another process holds it."""
    lock = os.open(lock_path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(lock, 32).decode().strip()
        os.close(lock)
        if not isinstance(error, BlockingIOError):
            raise
        process = f"process {owner}" if owner else "another process"
        raise UserError(f"Run directory {lock_path.parent} is in use by {process}.") from None
    os.ftruncate(lock, 0)
    os.write(lock, f"{os.getpid()}\n".encode())
    return lock


def _missing(path: Path) -> list[Path]:
    """The directories that `mkdir(parents=True)` would make, deepest first."""
    return [directory for directory in (path, *path.parents) if not directory.exists()]


def _remove(directories: list[Path]) -> None:
    for directory in directories:
        try:
            directory.rmdir()
        except OSError:  # never made, or no longer empty: somebody else's now
            return
