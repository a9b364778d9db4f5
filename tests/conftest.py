"""Runs before any test module: four virtual CPU devices, and nothing that broadcasts or promotes by accident."""
import atexit
import os
import shutil
import tempfile

import jax
import pytest

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have it from the process that starts them
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"])

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items):
    """What takes minutes comes first, so that no process is left with it alone at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def strict_dtypes(request):
    """posjax's array code mixes no dtypes. Only there: Flax and Optax do in places."""
    if {"schemes", "ops", "tasks", "conformance"}.isdisjoint(request.path.parts):
        yield
        return
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(autouse=True)
def quick_compilation(request):
    """Tasks draw integers, which no optimisation changes: compile them in less than half the time."""
    jax.config.update("jax_disable_most_optimizations", "tasks" in request.path.parts)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
