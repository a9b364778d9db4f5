"""Training throughput of the small decoder, with one replica and several, beside x-transformers."""
import contextlib
import functools
import importlib.util
import pathlib
import statistics
import tempfile

from posjax.bench.measure import Clock, rounded
from posjax.bench.workers import Worker
from posjax.errors import UserError

SCHEMES = ("rope", "alibi")
# Tokens a second, as a multiple of the peer's, by replicas; and the share of the measured peak of matrix products.
PEER_BARS = {1: 1.3, 4: 2.0}
UTILISATION_BAR = 0.4
PEERS = {"x-transformers": ("torch", "x_transformers")}
PEER_THREADS = 2
_STEPS = 10
_BATCHES = 16


def run(say, *, peer=None, replicas=(1, 4), repeats=10):
    """A row for each scheme and number of replicas, and for the peer: medians over rounds in which all take turns.

    Args:
      say: is told, in a few words, what comes next.
      peer: "x-transformers", or None.
      replicas: numbers of replicas.
      repeats: rounds on the clock.

    Raises:
      ValueError: an unknown peer, or one that is not installed.
    """
    check_peer(peer)
    workers, calls, peaks = {}, {}, {}
    with contextlib.ExitStack() as stack:
        for scheme in SCHEMES:
            for count in replicas:
                say(f"{scheme}: compiling for {count} replicas")
                name = scheme, count
                workers[name] = worker = stack.enter_context(
                    Worker("posjax.bench.train_worker", {"scheme.name": scheme, "num_seeds": count}))
                calls[name] = functools.partial(worker.ask, "train", max(1, _STEPS // count))
                peaks[name] = []
                calls[(*name, "peak")] = functools.partial(_peak, worker, peaks[name])
            if peer:
                say(f"{scheme}: {peer}")
                batches = _batches(scheme, pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())))
                workers[scheme, peer] = worker = stack.enter_context(Worker("posjax.bench.peer_worker", batches))
                calls[scheme, peer] = functools.partial(worker.ask, "train", _STEPS)
        say(f"{repeats + 1} rounds of {len(workers)}, which take turns")
        clock = Clock(calls, repeats)
        return [_row(clock, scheme, of, worker.about, peaks.get((scheme, of)), peer)
                for (scheme, of), worker in workers.items()]


def check_peer(peer):
    """Raises `ValueError` unless `peer` is None or a known one that is installed."""
    if peer is None:
        return
    if peer not in PEERS:
        raise UserError(f"--peer={peer} is unknown; there is {', '.join(PEERS)}.")
    if missing := [name for name in PEERS[peer] if importlib.util.find_spec(name) is None]:
        raise UserError(f"--peer={peer} needs {' and '.join(missing)}, which is not installed: pip install 'posjax[peer]'.")


def _peak(worker, found):
    found.append(worker.ask("peak", 1)["flops"])


def _row(clock, scheme, of, about, peaks, peer):
    count = of if isinstance(of, int) else 1
    steps = max(1, _STEPS // count) if peaks else _STEPS
    seconds = clock.median((scheme, of)) / 1e3 / steps
    utilisation = of_peer = None
    bars, met = [], []
    if peaks:
        # The first round, off the clock, has measured a peak too.
        utilisation = about["flops"] / seconds / statistics.median(peaks[1:])
        bars.append(f"utilisation > {UTILISATION_BAR}")
        met.append(utilisation > UTILISATION_BAR)
    if peaks and peer:
        of_peer = clock.ratio((scheme, peer), (scheme, of)) * steps * count / _STEPS
        if count in PEER_BARS:
            bars.append(f"of_peer >= {PEER_BARS[count]:g}")
            met.append(of_peer >= PEER_BARS[count])
    return {"train": "posjax" if peaks else of, "scheme": scheme, "replicas": count, "devices": about.get("devices"),
            "parameters": about["parameters"], "tokens_a_step": about["tokens"], "step_ms": rounded(1e3 * seconds),
            "best_step_ms": rounded(clock.best((scheme, of)) / steps), "tokens_a_second": rounded(about["tokens"] / seconds),
            "step_gflop": rounded(about["flops"] / 1e9) if peaks else None,
            "peak_gflop_a_second": rounded(statistics.median(peaks[1:]) / 1e9) if peaks else None,
            "utilisation": rounded(utilisation), "of_peer": rounded(of_peer), "bar": ", ".join(bars) or None,
            "met": all(met) if met else None}


def _batches(scheme, folder):
    """The peer's job: the same sizes, optimiser and tokens as posjax's own, the latter in a file in `folder`."""
    import jax
    import numpy as np

    from posjax.config import default_config
    from posjax.experiment import Experiment
    from posjax.train.chunk import train_batch
    config = default_config(scheme=scheme)
    experiment = Experiment.build(config)
    batches = jax.vmap(lambda step: train_batch(experiment, 0, step)[0])(np.arange(_BATCHES))
    path = folder / "batches.npz"
    np.savez(path, tokens=batches.tokens, targets=np.where(batches.weights > 0, batches.targets, -100))
    sizes, train = experiment.sizes, config.train
    return {"scheme": scheme, "batches": str(path), "threads": PEER_THREADS,
            **{key: getattr(sizes, key) for key in ("vocab_size", "width", "depth", "num_heads", "head_dim", "mlp_ratio")},
            **{key: train[key] for key in ("learning_rate", "beta1", "beta2", "weight_decay", "clip_norm")}}
