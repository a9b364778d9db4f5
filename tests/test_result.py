"""What posjax is for, at reduced size: schemes trained on the same short strings come apart beyond them."""
import os
import pathlib
import subprocess
import sys

import pytest

import posjax

ROOT = pathlib.Path(__file__).resolve().parent.parent
REDUCED = {"num_seeds": 1, "train.steps": 1000, "train.checkpoint_every": 1000, "eval.every": 0,
           "eval.num_examples": 256, "eval.lengths": (1, 2, 4, 8, 16, 24, 28, 32)}


@pytest.mark.slow
def test_alibi_copies_beyond_the_training_lengths_and_rope_does_not(tmp_path):
    beyond = {}
    for name in ("alibi", "rope"):
        words = [f"--config.{key}={value}" for key, value in REDUCED.items()]
        # A process of its own, without the flags by which the other tests compile quickly and compute slowly.
        subprocess.run([sys.executable, "-m", "posjax.cli", "train", f"--config={ROOT / 'configs' / 'copy.py'}:{name}", *words,
                        f"--workdir={tmp_path / name}"], check=True, cwd=ROOT,
                       env={key: value for key, value in os.environ.items() if key != "XLA_FLAGS"})
        summary = posjax.load_run(tmp_path / name).summary()
        assert not summary.did_not_fit
        curve = summary.curves[0]
        beyond[name] = sum(curve[length].exact_match for length in (24, 28, 32)) / 3  # 1.5 to 2 times the longest trained
    assert beyond["alibi"] > 0.2
    assert beyond["rope"] < 0.05
