import os
import subprocess
import sys

import jax
import pytest

from posjax.errors import UserError
from posjax.io import compile_cache

CODE = """
import jax
from posjax.io import compile_cache
compile_cache._LEAST = 0.0
compile_cache.use_compile_cache()
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
jax.jit(lambda x: x @ x + 1)(jax.numpy.ones((7, 7))).block_until_ready()
print(len(hits), jax.config.jax_compilation_cache_dir)
"""


def start(home, **more):
    return subprocess.Popen([sys.executable, "-W", "error", "-c", CODE], stdout=subprocess.PIPE, text=True, env=os.environ
                            | {"XDG_CACHE_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)} | more)


def told(process):
    out, _ = process.communicate()
    assert process.returncode == 0
    hits, where = out.split()
    return int(hits), where


def test_a_second_process_finds_what_others_compiled_and_nobody_else_can_write_there(tmp_path):
    both = [start(tmp_path), start(tmp_path)]  # at a time
    assert all(told(process)[1] == str(tmp_path / "posjax" / "compiled") for process in both)
    assert told(start(tmp_path))[0] > 0
    assert (tmp_path / "posjax" / "compiled").stat().st_mode & 0o077 == 0


def test_a_folder_that_jax_was_given_stays(tmp_path):
    assert told(start(tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own")))[1] == str(tmp_path / "own")
    assert not (tmp_path / "posjax").exists()


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        with pytest.raises(UserError, match="belongs to another user .* Set XDG_CACHE_HOME"):
            compile_cache.use_compile_cache()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
