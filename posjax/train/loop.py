"""The host's side of training: between chunks it logs, evaluates, saves, and lets itself be interrupted."""
import contextlib
import io
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
from posjax.registry import beside_scheme, described
from posjax.train.chunk import METRICS, init_state, make_chunk
from posjax.train.curves import Curves
from posjax.train.interrupt import Interrupted, deferred_signals
from posjax.train.processes import Silent, fetch, is_first, largest, open_run
from posjax.train.progress import Progress, duration
from posjax.train.replicas import seeds_array
from posjax.train.speed import speed_record

_log = logging.getLogger(__name__)


class Diverged(RuntimeError):
    """A loss that is not finite. The message has the step, the seeds and the last finite metrics."""

    def __init__(self, message, step, seeds):
        super().__init__(message)
        self.step, self.seeds = step, seeds


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
    stream = (stream or sys.stderr) if is_first() else io.StringIO()
    experiment = Experiment.build(config)
    experiment.mesh  # noqa: B018 - refused, where there are not so many devices, before anything is written
    own = f"--config={pathlib.Path(workdir) / 'config.json'}"
    command = command or shlex.join(["posjax", "train", own, f"--workdir={workdir}"])
    with open_run(workdir, configs.to_json(config)) as run:
        if run.done is not None:
            if not (missing := missing_records(experiment, run.evals())):
                stream.write(f"{workdir} is finished: {config.train.steps} steps. Nothing to do.\n")
                return run.path
            stream.write(f"{workdir} has lost {missing} records of its final evaluation, which is made again.\n")
        with Checkpoints(run.checkpoint_dir) as checkpoints:
            try:
                _Training(experiment, run, checkpoints, command, stream, profile).go()
            except Diverged as error:
                run.fail(error.step, error.seeds, str(error))
                raise
        return run.path


def missing_records(experiment, rows):
    """How many records of the final evaluation are not among `rows`: a finished run may have lost some since."""
    config = experiment.config
    own = evaluated_positions(configs.to_json(config))
    there = {(row["seed"], row["length"], *sorted(row["condition"].items())) for row in rows
             if row["step"] == config.train.steps and row.get("positions", own) == own}
    return sum((seed, length, *sorted(condition.items())) not in there for seed in experiment.seeds
               for length in config.eval.lengths for condition in experiment.task.conditions())


class _Training:
    """One call of `train`: its state on the device and what is open on the host."""

    def __init__(self, experiment, run, checkpoints, command, stream, profile):
        self.experiment, self.run, self.checkpoints, self.stream = experiment, run, checkpoints, stream
        self.profile = profile
        self.config = experiment.config
        self.mesh = experiment.mesh
        self.seeds = seeds_array(experiment.seeds, self.mesh)
        self.evaluate = Evaluator(experiment, self.mesh)
        self.step, self.seconds = 0, 0.0
        self.last_finite, self.last_read, self.compile_seconds = "none", 0.0, 0.0
        self.state = init_state(experiment, self.seeds, self.mesh)
        resumed = self._restore()
        if resumed is None or not run.environment:
            run.write_environment(environment_record(command))
        self.curves = Curves(run, self.config, resumed) if is_first() else Silent()
        # A run's tokens are counted as fed to the model, padding included: that is what the time goes to.
        tokens = len(experiment.seeds) * self.config.train.batch_size * experiment.train_tokens
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
            self.last_finite = f"step {rows[-1]['step']}: loss {np.mean(rows[-1]['loss']):.6g} (mean over its chunk and seeds)"
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
                    self.state, metrics = chunk(self.state, self.seeds, np.int32(self.step), np.int32(count))
                    wait(metrics)
                # The chunk before this one is read while this one computes.
                if pending:
                    self._record(*pending)
                self.step += count
                pending = (self.step, count, metrics, started)
                # Once: a signal that comes from here on must not save what is not recorded. Whichever process it reached.
                signum = largest(interrupt.signum or 0)
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
        compiled = chunk.lower(self.state, self.seeds, np.int32(0), np.int32(0)).compile()
        self.compile_seconds = time.monotonic() - started
        self.stream.write(f"Compiled in {self.compile_seconds:.1f} s.\n")
        self.progress.start()
        return compiled

    def _record(self, step, count, metrics, started):
        """Reads a chunk's metrics, which waits for it, and logs them; stops at a loss that is not finite."""
        metrics = fetch(metrics)
        values = {name: metrics[name][:, :count] for name in METRICS}
        now = time.monotonic()
        seconds = now - max(started, self.last_read)  # chunks overlap: one computes from when the one before is done
        self.last_read, self.seconds = now, self.seconds + seconds
        finite = np.isfinite(values["loss"]) & np.isfinite(values["grad_norm"])
        if not finite.all():
            where = int(np.argmin(finite.all(0)))
            last = _metrics_text(values, step - count, where - 1) if where else self.last_finite
            raise self._diverged("The loss or its gradient is not finite at", step - count + where + 1, finite[:, where], last)
        if not (finite := metrics["finite"]).all():
            last = _metrics_text(values, step - count, count - 1)
            raise self._diverged("The parameters are not finite after", step, finite, last)
        tokens = len(self.experiment.seeds) * self.config.train.batch_size * self.experiment.train_tokens
        row = {
            "step": step, "seeds": list(self.experiment.seeds),
            "loss": values["loss"].mean(1), "grad_norm": values["grad_norm"].mean(1),
            "train_token_accuracy": values["token_accuracy"].mean(1),
            "learning_rate": float(self.experiment.schedule(step - 1)),
            "tokens_per_second": count * tokens / seconds, "steps_per_second": count / seconds, "seconds": self.seconds,
        }
        self.run.append_metrics([row])
        self.curves.training(row)
        self.last_finite = _metrics_text(values, step - count, count - 1)
        self.progress.update(step, float(values["loss"][:, -1].mean()))

    def _diverged(self, what, step, finite, last):
        seeds = [seed for seed, fine in zip(self.experiment.seeds, finite) if not fine]
        return Diverged(f"{what} step {step} (seed {', '.join(map(str, seeds))}). Last finite metrics: {last}.", step, seeds)

    def _evaluate(self, num_examples):
        rows = self.evaluate(self.state["params"], self.seeds, self.step, self.config.eval.lengths, num_examples)
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
    return (f"posjax  jax {jax.__version__}, {mesh.size} of {jax.device_count()} {device.platform} devices "
            f"({device.device_kind})\n"
            f"scheme {', '.join([described(config.scheme), *beside_scheme(config)])}; task {described(config.task)}; "
            f"attention backend {experiment.attention_backend}\n"
            f"positions {described(config.positions.train)} in training, {described(config.positions.eval)} in evaluation\n"
            f"{experiment.num_params:,} parameters x {len(experiment.seeds)} seeds; {tokens:,} tokens a step; "
            f"{config.train.steps} steps\n")


def _metrics_text(values, first, index):
    means = ", ".join(f"{name} {values[name][:, index].mean():.6g}" for name in METRICS)
    return f"step {first + index + 1}: {means} (mean over seeds)"


def _next(step, every):
    return (step // every + 1) * every
