"""What a training step costs as the model, the sequences or the number of replicas grow."""
import functools

from posjax.bench.measure import Clock, rounded
from posjax.bench.workers import Worker

BASE = {"model.width": 64, "model.depth": 2, "tokens": 33, "num_seeds": 1}
VARIED = {"model.width": (64, 128, 256, 512), "model.depth": (2, 4, 8), "tokens": (33, 129, 513, 1025),
          "num_seeds": (1, 2, 4, 8)}
# Tokens a step and replica: sequences grow at the cost of their number.
BATCH_TOKENS = 64 * 33
# What a call on the clock does at least, in FLOPs of the model, so that short steps are not lost in the noise.
_CALL_FLOPS = 1e10


def run(say, *, repeats=5):
    """A row for each size of the decoder on copy with RoPE: one of width, depth, tokens and replicas is varied at a time.

    `of_ideal` is the time of a step as a multiple of its model FLOPs at the peak of matrix products, measured right before and
    after.

    Args:
      say: is told, in a few words, what comes next.
      repeats: calls on the clock.
    """
    rows = []
    for varied, values in VARIED.items():
        for value in values:
            sizes = BASE | {varied: value}
            say(f"{varied} {value}")
            with Worker("posjax.bench.train_worker", _job(sizes)) as worker:
                steps = max(1, round(_CALL_FLOPS / worker.about["flops"]))
                peaks = [worker.ask("peak", 2)["flops"]]
                clock = Clock({"train": functools.partial(worker.ask, "train", steps)}, repeats)
                peaks.append(worker.ask("peak", 2)["flops"])
                rows.append(_row(varied, sizes, worker.about, clock.median("train") / steps, clock.best("train") / steps,
                                 sum(peaks) / 2))
    return rows


def _job(sizes):
    tokens = sizes["tokens"]
    length = (tokens - 1) // 2
    return {"scheme.name": "rope", "train.batch_size": BATCH_TOKENS // tokens, "train.lengths.max": length,
            "eval.lengths": (length,), **{key: value for key, value in sizes.items() if key != "tokens"}}


def _row(varied, sizes, about, median, best, peak):
    return {"size": varied, "width": sizes["model.width"], "depth": sizes["model.depth"], "tokens": sizes["tokens"],
            "replicas": sizes["num_seeds"], "devices": about["devices"], "parameters": about["parameters"],
            "step_ms": rounded(median), "best_step_ms": rounded(best), "tokens_a_second": rounded(1e3 * about["tokens"] / median),
            "step_gflop": rounded(about["flops"] / 1e9), "peak_gflop_a_second": rounded(peak / 1e9),
            "of_ideal": rounded(median / 1e3 * peak / about["flops"]), "compile_seconds": rounded(about["compile_seconds"])}
