"""What a run ran on: enough to say why two runs differ, and to run it again."""
import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path


def environment_record(command: str) -> dict:
    """The content of environment.json. `command`: the exact shell command that reproduces the run. Starts jax."""
    import jax

    packages = ("posjax", "jax", "flax", "optax", "numpy")
    return {
        **{package: _version(package) for package in packages},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "devices": [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()],
        "device_count": jax.device_count(),
        "cpu_count": os.cpu_count(),
        "git_commit": _git_commit(),
        "command": command,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is only on the path
        return "not installed"


def _git_commit() -> str | None:
    """The commit of this source file's repository; None if no repository tracks it (an installed copy)."""
    here = Path(__file__).resolve()
    try:
        for command in (["ls-files", "--error-unmatch", here.name], ["rev-parse", "HEAD"]):
            result = subprocess.run(["git", "-C", here.parent, *command], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()
