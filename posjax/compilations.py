"""What XLA compiled, as JAX itself reports it."""
import contextlib

from jax import monitoring


@contextlib.contextmanager
def compilations():
    """Yields a list that receives the name of each function that is compiled within, as `jit(step)`.

    `_cache_size()` of a jitted function counts what its cache still holds, which may be less than what was compiled: in a long
    process entries are dropped.
    """
    names = []

    def listen(event, seconds, fun_name="", **_):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(fun_name)
    monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        monitoring.unregister_event_duration_listener(listen)
