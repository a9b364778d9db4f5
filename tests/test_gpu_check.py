"""The script for a machine with an accelerator, at tiny sizes: that it runs, finds everything right, and ends with its table."""
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "scripts/gpu_check.py"


@pytest.mark.slow
def test_it_runs_at_tiny_sizes_and_ends_with_its_table():
    done = subprocess.run([sys.executable, SCRIPT, "--small"], capture_output=True, text=True, timeout=500,
                          env={**os.environ, "COLUMNS": "250"})
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("16 right, 0 wrong.") for line in lines)
    assert lines[-1].startswith("32") and "backward" in lines[-1]
    timed = [line for line in lines if line.startswith("32") and "posjax" in line]
    assert len(timed) == 12 and not any("Error" in line for line in timed)
