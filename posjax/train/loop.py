"""The host's side of training: between chunks it logs, evaluates, saves, and lets itself be interrupted."""
import contextlib
import logging
import pathlib
import shlex
import sys
import time

import jax
import numpy as np

from posjax import config as configs
from posjax.eval.extrapolation import Evaluator
from posjax.eval.statistics import evaluated_positions
from posjax.experiment import Experiment
from posjax.io.checkpoints import Checkpoints
from posjax.io.environment import environment_record
from posjax.io.run_dir import RunDir
from posjax.registry import beside_scheme, described
from posjax.train.chunk import METRICS, init_state, make_chunk
from posjax.train.curves import Curves
from posjax.train.interrupt import Interrupted, deferred_signals
from posjax.train.progress import Progress, duration
from posjax.train.replicas import place, replica_mesh
from posjax.train.speed import speed_record
from posjax.variants import text as variant_text

_log = logging.getLogger(__name__)


class Diverged(RuntimeError):
    """A loss that is not finite. The message has the step, the replicas and the last finite metrics.

    `seeds` and `variants` are those of each replica concerned.
    """

    def __init__(self, message, step, seeds, variants):
        super().__init__(message)
        self.step, self.seeds, self.variants = step, seeds, variants


def train(config, workdir, *, command=None, stream=None, profile=False):
    """Trains, evaluates and records one config; goes on where an earlier call stopped.

    Args:
      config: a `ConfigDict` as `posjax.load_config` makes it.
      workdir: the run directory.
      command: the shell command that reproduces the run, for its record.
      stream: where progress goes; None for standard error.
      profile: trace the second chunk of this call (the first if it is the last) with `jax.profiler`, into the run's
        tensorboard folder: for TensorBoard's profile plugin, xprof, or Perfetto.

    Returns:
      The path of the run directory.

    Raises:
      ValueError: a config that cannot work (nothing is written), or a directory that is in use or another run's.
      Diverged: a loss is not finite. The directory then says so (FAILED); the same call starts from its last checkpoint.
      Interrupted: SIGINT or SIGTERM came; the state is saved.
    """
    stream = stream or sys.stderr
    experiment = Experiment.build(config)
    own = f"--config={pathlib.Path(workdir) / 'config.json'}"
    command = command or shlex.join(["posjax", "train", own, f"--workdir={workdir}"])
    with RunDir.create(workdir, configs.to_json(config)) as run:
        if run.done is not None:
            if not (missing := missing_records(experiment, run.evals())):
                stream.write(f"{workdir} is finished: {config.train.steps} steps. Nothing to do.\n")
                return run.path
            stream.write(f"{workdir} has lost {missing} records of its final evaluation, which is made again.\n")
        with Checkpoints(run.checkpoint_dir) as checkpoints:
            try:
                _Training(experiment, run, checkpoints, command, stream, profile).go()
            except Diverged as error:
                run.fail(error.step, error.seeds, str(error), error.variants)
                raise
        return run.path


def missing_records(experiment, rows):
    """How many records of the final evaluation are not among `rows`: a finished run may have lost some since."""
    config = experiment.config
    own = evaluated_positions(configs.to_json(config))

    def key(seed, variant, length, condition):
        return seed, length, *sorted(variant.items()), *sorted(condition.items())
    there = {key(row["seed"], row.get("variant", {}), row["length"], row["condition"]) for row in rows
             if row["step"] == config.train.steps and row.get("positions", own) == own}
    return sum(key(*replica, length, condition) not in there for replica in experiment.replicas
               for length in config.eval.lengths for condition in experiment.task.conditions())


class _Training:
    """One call of `train`: its state on the device and what is open on the host."""

    def __init__(self, experiment, run, checkpoints, command, stream, profile):
        self.experiment, self.run, self.checkpoints, self.stream = experiment, run, checkpoints, stream
        self.profile = profile
        self.config = experiment.config
        self.mesh = replica_mesh(len(experiment.replicas))
        self.replicas = place(experiment.replica_values(), self.mesh)
        self.evaluate = Evaluator(experiment, self.mesh)
        self.step, self.seconds = 0, 0.0
        self.last_finite, self.last_read, self.compile_seconds = "none", 0.0, 0.0
        self.state = init_state(experiment, self.replicas, self.mesh)
        resumed = self._restore()
        if resumed is None or not run.environment:
            run.write_environment(environment_record(command))
        self.curves = Curves(run.tensorboard_dir, self.config, resumed)
        # A run's tokens are counted as fed to the model, padding included: that is what the time goes to.
        tokens = len(experiment.replicas) * self.config.train.batch_size * experiment.train_tokens
        self.progress = Progress(self.config.train.steps, self.step, tokens, stream=stream)
        stream.write(banner(experiment, self.mesh, tokens))
        if resumed:
            stream.write(f"Resuming at step {resumed} of {self.config.train.steps}.\n")

    def go(self):
        finished = False
        try:
            self._train()
            self._finish()
            finished = True
        finally:
            self.progress.close()
            self.curves.close(finished)

    def _restore(self):
        """Takes up the latest checkpoint; None if there is none. Records past it are dropped: they come again."""
        restored, step = self.checkpoints.restore(self.state), None
        if restored is not None:
            self.state, step = restored, self.checkpoints.latest()
            self.step = step
        self.run.truncate_after(self.step)
        if rows := self.run.metrics():
            self.seconds = rows[-1]["seconds"]
            self.last_finite = f"step {rows[-1]['step']}: loss {np.mean(rows[-1]['loss']):.6g} (mean over its chunk and replicas)"
        return step

    def _train(self):
        train, every = self.config.train, self.config.eval.every
        if self.step == train.steps:
            return
        chunk, pending, first = self._compile(), None, self.step
        with deferred_signals() as interrupt:
            while self.step < train.steps:
                stops = [train.steps, self.step + train.chunk_steps, _next(self.step, train.checkpoint_every)]
                if every:
                    stops.append(_next(self.step, every))
                count = min(stops) - self.step
                started = time.monotonic()
                with self._traced(self.step > first or self.step + count == train.steps) as wait:
                    self.state, metrics = chunk(self.state, self.replicas, np.int32(self.step), np.int32(count))
                    wait(metrics)
                # The chunk before this one is read while this one computes.
                if pending:
                    self._record(*pending)
                self.step += count
                pending = (self.step, count, metrics, started)
                signum = interrupt.signum  # once: a signal that comes from here on must not save what is not recorded
                due = self.step % train.checkpoint_every == 0 or self.step == train.steps
                evaluate = every and self.step % every == 0 and self.step < train.steps
                if due or evaluate or signum:
                    self._record(*pending)
                    pending = None
                if evaluate:
                    self._evaluate(self.config.eval.every_num_examples)
                if due or signum:
                    self.checkpoints.save(self.step, self.state)
                if signum:
                    self.checkpoints.wait()
                    raise Interrupted(f"Interrupted at step {self.step} of {train.steps}; the state is saved in "
                                      f"{self.run.path}. The same command goes on from there.", signum)

    @contextlib.contextmanager
    def _traced(self, warm):
        """Traces what is within, once, if a profile was asked for; yields what waits for its results then."""
        if not (self.profile and warm):
            yield lambda results: None
            return
        self.profile = False
        with jax.profiler.trace(self.run.tensorboard_dir):
            yield jax.block_until_ready
        self.stream.write(f"Wrote a trace to {self.run.tensorboard_dir / 'plugins' / 'profile'}.\n")

    def _compile(self):
        """The chunk, compiled ahead of its first call, so that no step's time holds the compilation."""
        started = time.monotonic()
        chunk = make_chunk(self.experiment, self.mesh)
        compiled = chunk.lower(self.state, self.replicas, np.int32(0), np.int32(0)).compile()
        self.compile_seconds = time.monotonic() - started
        self.stream.write(f"Compiled in {self.compile_seconds:.1f} s.\n")
        self.progress.start()
        return compiled

    def _record(self, step, count, metrics, started):
        """Reads a chunk's metrics, which waits for it, and logs them; stops at a loss that is not finite."""
        values = {name: np.asarray(metrics[name])[:, :count] for name in METRICS}
        now = time.monotonic()
        seconds = now - max(started, self.last_read)  # chunks overlap: one computes from when the one before is done
        self.last_read, self.seconds = now, self.seconds + seconds
        finite = np.isfinite(values["loss"]) & np.isfinite(values["grad_norm"])
        if not finite.all():
            where = int(np.argmin(finite.all(0)))
            last = _metrics_text(values, step - count, where - 1) if where else self.last_finite
            raise self._diverged("The loss or its gradient is not finite at", step - count + where + 1, finite[:, where], last)
        if not (finite := np.asarray(metrics["finite"])).all():
            last = _metrics_text(values, step - count, count - 1)
            raise self._diverged("The parameters are not finite after", step, finite, last)
        rates = np.asarray(self.experiment.schedule(self.experiment.replica_values()["optimiser"])(step - 1))
        tokens = len(self.experiment.replicas) * self.config.train.batch_size * self.experiment.train_tokens
        row = {
            "step": step, "seeds": [seed for seed, _ in self.experiment.replicas],
            "loss": values["loss"].mean(1), "grad_norm": values["grad_norm"].mean(1),
            "train_token_accuracy": values["token_accuracy"].mean(1),
            "learning_rate": float(rates[0]),
            "tokens_per_second": count * tokens / seconds, "steps_per_second": count / seconds, "seconds": self.seconds,
        }
        if self.config.vary:
            row |= {"variants": [variant for _, variant in self.experiment.replicas], "learning_rate": rates}
        self.run.append_metrics([row])
        self.curves.training(row)
        self.last_finite = _metrics_text(values, step - count, count - 1)
        self.progress.update(step, float(values["loss"][:, -1].mean()))

    def _diverged(self, what, step, finite, last):
        seeds, variants = zip(*(replica for replica, fine in zip(self.experiment.replicas, finite) if not fine))
        who = "; ".join(f"{variant_text(variant)}: seed {', '.join(str(s) for s, v in zip(seeds, variants) if v == variant)}"
                        for variant in self.experiment.variants if variant in variants).removeprefix(": ")
        return Diverged(f"{what} step {step} ({who}). Last finite metrics: {last}.", step, list(seeds), list(variants))

    def _evaluate(self, num_examples):
        rows = self.evaluate(self.state["params"], self.replicas, self.step, self.config.eval.lengths, num_examples)
        self.run.append_evals(rows)
        self.curves.evaluation(rows)
        return rows

    def _finish(self):
        started = time.monotonic()
        lengths = self.config.eval.lengths
        self.progress.close()
        self.stream.write(f"Evaluating {len(lengths)} lengths up to {lengths[-1]}, {self.config.eval.num_examples} "
                          "examples each.\n")
        rows = self._evaluate(self.config.eval.num_examples)
        self.curves.lengths(rows)
        self.checkpoints.wait()
        evaluated = time.monotonic() - started
        speed = speed_record(self.experiment, self.mesh, steps=self.step, seconds=self.seconds)
        self.run.finish({"steps": self.step, "train_seconds": self.seconds, "eval_seconds": evaluated,
                         "compile_seconds": self.compile_seconds, "eval_compilations": self.evaluate.compilations, **speed})
        self.progress.close()
        self.stream.write(f"Trained in {duration(self.seconds)} ({speed['tokens_per_second']:,.0f} tokens/s, "
                          f"{speed['model_flop_utilisation']:.0%} of what matrix products reach here), "
                          f"evaluated in {duration(evaluated)}: {self.run.path}\n")


def banner(experiment, mesh, tokens):
    """What is about to run, for a person."""
    config = experiment.config
    device = jax.devices()[0]
    variants = f" x {len(experiment.variants)} variants ({'; '.join(config.vary)})" if config.vary else ""
    return (f"posjax  jax {jax.__version__}, {mesh.size} of {jax.device_count()} {device.platform} devices "
            f"({device.device_kind})\n"
            f"scheme {', '.join([described(config.scheme), *beside_scheme(config)])}; task {described(config.task)}; "
            f"attention backend {experiment.attention_backend}\n"
            f"positions {described(config.positions.train)} in training, {described(config.positions.eval)} in evaluation\n"
            f"{experiment.num_params:,} parameters x {len(experiment.seeds)} seeds{variants}; {tokens:,} tokens a step; "
            f"{config.train.steps} steps\n")


def _metrics_text(values, first, index):
    means = ", ".join(f"{name} {values[name][:, index].mean():.6g}" for name in METRICS)
    return f"step {first + index + 1}: {means} (mean over replicas)"


def _next(step, every):
    return (step // every + 1) * every
