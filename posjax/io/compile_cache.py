"""What XLA compiled is kept between processes, in the user's cache folder."""
import os
import pathlib

from posjax.errors import UserError

# The oldest entries go when all take more, in bytes. A run leaves about a megabyte.
_MOST = 2 * 2**30
# Programs that compile in less, in seconds, are not worth a file.
_LEAST = 0.2


def folder():
    """`posjax/compiled` in `$XDG_CACHE_HOME`, or in `~/.cache`."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "posjax" / "compiled"


def use_compile_cache():
    """Makes JAX keep and find compiled programs in `folder()`; a folder that was chosen with JAX's own setting stays.

    With a bound on its size JAX also locks the folder, so that several processes of one user may use it at a time. Nobody else
    may: what is read there is run.

    Raises:
      ValueError: the folder belongs to another user.
    """
    import jax

    if jax.config.jax_compilation_cache_dir is not None:
        return
    path = folder()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.stat().st_uid
        writable = os.access(path, os.W_OK)
    except OSError:  # no home to write to: nothing is kept
        return
    if owner != os.geteuid():
        raise UserError(f"The cache of compiled programs {path} belongs to another user (id {owner}); what is there would be run "
                        "as yours. Set XDG_CACHE_HOME to a folder of your own.")
    if not writable:
        return
    path.chmod(0o700)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_compilation_cache_max_size", _MOST)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
