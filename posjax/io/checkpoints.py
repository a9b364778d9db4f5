"""Checkpoints of the training state, through orbax (this is its only user; it is imported when first needed).

    DIRECTORY/STEP/state/          the arrays, one zarr database
    DIRECTORY/STEP/seal.json       sizes and CRC-32 of the files under state/

Orbax writes to a temporary directory and renames it when all is there, so a killed save leaves the earlier checkpoints
as they were. Orbax does not notice altered bytes, and fails noisily on truncated files; hence the seal: written before
the rename, checked before orbax reads anything.

What orbax says by itself: nothing on the paths used here, neither Python warnings nor absl warnings. (It would warn
"Sharding info not provided" if a state were restored without shardings; here they are always given.) No filter is set.
"""
import json
import os
import shutil
import warnings
import zlib
from pathlib import Path

import jax
from jax.sharding import SingleDeviceSharding

from posjax.errors import UserError
from posjax.io import jsonl

_SEAL = "seal.json"


class Checkpoints:
    """The checkpoints of one run, the latest `keep` of them. Nothing is made on disk before the first save.

    One process may save (it holds the run's lock); others may read.
    """

    def __init__(self, directory: str | os.PathLike, *, keep: int = 2):
        self.directory = Path(directory).absolute()  # orbax refuses relative paths
        self._keep = keep
        self._writer = None
        self._unreadable: set[int] = set()

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint, None if there is none. Warns of each that it has to pass over."""
        if self._writer is not None:
            self.wait()
        for step in _steps(self.directory):
            if step in self._unreadable:
                continue
            problem = _problem(self.directory / str(step))
            if problem is None:
                return step
            self._pass_over(step, problem)
        return None

    def save(self, step: int, state) -> None:
        """Saves `state` as the checkpoint of `step`; a checkpoint of that step that is there already stays.

        Returns once the state is safe from the next training step, donation included; writing goes on in a thread.

        Args:
          step: the number of training steps done.
          state: nested dicts of arrays (typed PRNG keys and optax states too), on any sharding.
        """
        writer = self._open_writer()
        if any(checkpoint.step == step for checkpoint in writer.checkpoints):
            return
        writer.save_async(step, state, force=True, custom_metadata={"int_dicts": _int_dicts(state.get("params", {}))})

    def restore(self, abstract_state, step: int | None = None):
        """The state of `step`, bit for bit. By default of the latest checkpoint that can be read.

        After a restore of the default, `latest()` is the step that was restored.

        Args:
          abstract_state: the tree of `save`, with `jax.ShapeDtypeStruct`s (or arrays) for leaves. Their shardings are
            those of the result; a leaf without one goes to the first device.

        Returns:
          The state; None if `step` is None and there is no readable checkpoint.

        Raises:
          UserError: the checkpoint is of another tree (shapes, dtypes or names), or that of the given `step` is missing
            or damaged.
        """
        found = self._read(abstract_state, step, partial=False)
        return None if found is None else found[1]

    def wait(self) -> None:
        """Returns when the last save is on disk. Raises what went wrong there."""
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """Waits for the last save and ends the threads."""
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _open_writer(self):
        if self._writer is None:
            from orbax.checkpoint import v1

            for step in self._unreadable:  # training has come past them: they would only be warned of again
                shutil.rmtree(self.directory / str(step), ignore_errors=True)
            self._unreadable.clear()
            self.directory.mkdir(parents=True, exist_ok=True)
            directory = self.directory
            context = v1.Context()
            # A closure: orbax deep-copies its options, and would copy the object of a bound method.
            # Of several processes the first seals, once all have written.
            context.asynchronous.post_finalization_callback = lambda: jax.process_index() or _seal_all(directory)
            self._writer = v1.training.Checkpointer(
                self.directory,
                context=context,
                preservation_policy=v1.training.preservation_policies.LatestN(self._keep),
                cleanup_tmp_directories=True,
            )
        return self._writer

    def _pass_over(self, step: int, problem: str) -> None:
        self._unreadable.add(step)
        warnings.warn(f"Checkpoint {self.directory / str(step)} is passed over: {problem}.", stacklevel=3)

    def _read(self, abstract, step: int | None, *, partial: bool):
        """(step, tree) of the given or the latest readable step, None if there is none."""
        if step is not None:
            self.wait()
            problem = _problem(self.directory / str(step))
            if problem is not None:
                available = ", ".join(map(str, _steps(self.directory))) or "none"
                raise UserError(
                    f"No usable checkpoint of step {step} in {self.directory}: {problem}. Steps there: {available}."
                )
            return step, _load(self.directory / str(step), abstract, partial=partial)
        while (latest := self.latest()) is not None:
            try:
                return latest, _load(self.directory / str(latest), abstract, partial=partial)
            except UserError:
                raise
            except Exception as error:
                self._pass_over(latest, str(error.__cause__ or error).split("\n")[0])
        return None


def restore_params(directory: str | os.PathLike, abstract_params=None, *, step: int | None = None):
    """The sub-tree "params" of a checkpoint alone: no optimiser state is built or read.

    Args:
      directory: that of `Checkpoints`; it is only read.
      abstract_params: as in `Checkpoints.restore`. Without it, the tree on disk is taken (dicts, integer keys kept; a
        tuple comes back as a list) and all goes to the first device.
      step: by default the latest that can be read.

    Returns:
      (step, params).

    Raises:
      UserError: there is no readable checkpoint (of that step), or it is of another tree.
    """
    abstract = None if abstract_params is None else {"params": abstract_params}
    found = Checkpoints(directory)._read(abstract, step, partial=True)
    if found is None:
        raise UserError(f"There is no readable checkpoint in {directory}.")
    return found[0], found[1]["params"]


def _steps(directory: Path) -> list[int]:
    """The steps of finished saves, newest first. What orbax has not renamed yet ends in .orbax-checkpoint-tmp."""
    if not directory.is_dir():
        return []
    return sorted((int(entry.name) for entry in directory.iterdir() if entry.name.isdecimal()), reverse=True)


def _seal_all(directory: Path) -> None:
    """Seals the checkpoint that orbax is about to commit: in its thread, all arrays written, before the rename."""
    for entry in directory.iterdir():
        if (entry / "state").is_dir() and not (entry / _SEAL).exists():
            jsonl.write_json(entry / _SEAL, _sums(entry / "state"))


def _sums(directory: Path) -> dict[str, list[int]]:
    sums = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            sums[path.relative_to(directory).as_posix()] = [len(data), zlib.crc32(data)]
    return sums


def _problem(path: Path) -> str | None:
    """Why the checkpoint at `path` cannot be used, None if it can."""
    try:
        if not path.is_dir():
            return "there is no such checkpoint"
        seal = json.loads((path / _SEAL).read_text())
        sums = _sums(path / "state")
    except FileNotFoundError as error:
        return f"it is incomplete ({Path(error.filename).name} is missing)"
    except (OSError, ValueError) as error:
        return f"it cannot be read ({error})"
    damaged = sorted(name for name in seal if sums.get(name) != seal[name])
    return f"it is damaged (state/{damaged[0]})" if damaged else None


def _load(path: Path, abstract, *, partial: bool):
    from orbax.checkpoint import v1

    metadata = v1.checkpointables_metadata(path)
    saved = metadata.metadata["state"]
    if abstract is None:
        # Without the shardings on disk: to ask for one whose devices are not here raises.
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), saved.get("params", {}))
        abstract = {"params": _with_int_keys(params, metadata.custom_metadata["int_dicts"])}
    _check_same_tree(path, {"params": saved.get("params")} if partial else saved, abstract)
    context = v1.Context()
    context.pytree.loading.partial_load = partial
    with context:
        return v1.load_checkpointables(path, {"state": jax.tree.map(_abstract_leaf, abstract)})["state"]


def _abstract_leaf(leaf) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if sharding is None:
        sharding = SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _check_same_tree(path: Path, saved, expected) -> None:
    """Orbax would report a mismatch in pages, and another model must not be mistaken for a damaged checkpoint."""
    saved, expected = _leaves(saved), _leaves(expected)
    for name in sorted(saved.keys() | expected.keys()):
        if saved.get(name) != expected.get(name):
            there, here = saved.get(name, "absent"), expected.get(name, "absent")
            raise UserError(f"Checkpoint {path} is of another model: {name} is {there} there, {here} here.")


def _leaves(tree) -> dict[str, str]:
    """{"params/layers/0/w": "float32[2,6]"}; orbax keeps all keys as strings and a typed PRNG key as its data."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        leaves[name] = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    return leaves


def _int_dicts(tree, path=()) -> list[list[str]]:
    """The paths of the dicts with integer keys: orbax gives them back as strings when it has only the disk to go by."""
    if not isinstance(tree, dict):
        return []
    here = [list(path)] if any(isinstance(key, int) for key in tree) else []
    return here + [found for key, value in tree.items() for found in _int_dicts(value, (*path, str(key)))]


def _with_int_keys(tree, int_dicts: list[list[str]], path=()):
    if not isinstance(tree, dict):
        return tree
    convert = int if list(path) in int_dicts else str
    return {convert(key): _with_int_keys(value, int_dicts, (*path, str(key))) for key, value in tree.items()}
