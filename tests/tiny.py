"""The smallest run that does everything: two seeds, 20 steps, seconds of compilation."""
import contextlib

import jax

from posjax import config as configs

OVERRIDES = {
    "num_seeds": 2, "task.symbols": 5, "model.width": 16, "model.depth": 1, "model.num_heads": 2,
    "train.steps": 20, "train.batch_size": 4, "train.lengths.max": 4, "train.learning_rate": 3e-3,
    "train.final_lr_fraction": 0.1, "train.weight_decay": 0.01, "train.chunk_steps": 5, "train.checkpoint_every": 10,
    "eval.lengths": (1, 4, 6, 9), "eval.num_examples": 20, "eval.every": 10, "eval.every_num_examples": 10,
}


def config(scheme="rope", task="copy", **overrides):
    """The tiny config with flat overrides; `task.symbols` only where the task has it."""
    base = configs.default_config(scheme, task)
    own = {key: value for key, value in OVERRIDES.items() if key in configs.to_flat(base)}
    return configs.override(base, own | overrides)


def words(*more):
    """The same as words of a command line."""
    return [f"--config.{key}={value}" for key, value in OVERRIDES.items()] + list(more)


@contextlib.contextmanager
def quick_compilation():
    """For tests of what is run and recorded, whatever the speed and the last bits: compiles in less than half the time."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
