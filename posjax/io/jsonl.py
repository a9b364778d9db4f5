"""JSON as the records need it: exact floats, numpy accepted, NaN kept, files never half-written.

A NaN or an infinity is written as Python's json does: the bare words NaN, Infinity, -Infinity. That is not strict JSON,
but a loss that became NaN must not be read back as "missing" (null).
"""
import json
import os
from pathlib import Path

import numpy as np

from posjax.errors import UserError


def _plain(value):
    if hasattr(value, "__array__"):  # numpy and jax, scalars too
        array = np.asarray(value)
        if array.dtype.kind == "V":  # bfloat16 and its like: exact in float32
            array = array.astype(np.float32)
        return array.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r}")


def dumps(value, *, indent: int | None = None) -> str:
    """`value` as JSON text; floats read back as the same bits."""
    return json.dumps(value, default=_plain, indent=indent)


def write_json(path: Path, value) -> None:
    """Replaces `path` by `value`; a reader, or a kill at any moment, sees the old file or the new one."""
    replace(path, (dumps(value, indent=2) + "\n").encode())


def replace(path: Path, data: bytes) -> None:
    """Replaces the content of `path` atomically. The temporary file is hidden and gone when this fails."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path):
    """The object in `path`; `UserError` if there is none."""
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object.")
    return value


def append_lines(path: Path, rows) -> None:
    """Appends one line a row, in one write, after dropping a line that a killed process left unfinished."""
    data = "".join(dumps(row) + "\n" for row in rows).encode()
    with open(path, "a+b") as file:
        file.truncate(_whole(file))
        file.write(data)


def _whole(file) -> int:
    """The number of bytes up to and including the last newline of a binary file."""
    end = file.seek(0, os.SEEK_END)
    block = 65_536
    while end:
        start = max(0, end - block)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def raw_lines(path: Path) -> list[bytes]:
    """The finished lines of `path`, newline included; none when there is no file.

    What follows the last newline is a record that is still being written, or never will be: it does not count.
    """
    if not path.exists():
        return []
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def parse_line(path: Path, number: int, line: bytes) -> dict:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path} line {number} is not valid JSON: {error}.") from None
    if not isinstance(record, dict):
        raise UserError(f"{path} line {number} is {line.decode(errors='replace').strip()}, not a record.")
    return record


def read_lines(path: Path) -> list[dict]:
    """The records of a JSON-lines file, in the order written; an unfinished last line is left out."""
    return [parse_line(path, number, line) for number, line in enumerate(raw_lines(path), 1)]
