"""Runs before any test module: two virtual CPU devices, and nothing that broadcasts or promotes by accident."""
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def strict_dtypes(request):
    """posjax's array code mixes no dtypes. Only there: Flax and Optax do in places."""
    if any(part in request.path.parts for part in ("schemes", "ops", "tasks")):
        with jax.numpy_dtype_promotion("strict"):
            yield
    else:
        yield
