"""Runs a sweep: each config in a process of its own, several at a time if asked."""
import dataclasses
import inspect
import os
import pathlib
import signal
import subprocess
import sys
import time

from posjax import config as configs
from posjax.cli import train_words
from posjax.errors import UserError
from posjax.experiment import Experiment
from posjax.io.run_dir import RunDir
from posjax.io.tensorboard import write_experiment
from posjax.runs import run_name
from posjax.train.curves import HPARAM_METRICS, hparams
from posjax.train.progress import duration
from posjax.variants import configured, variants

# How often the state of the running jobs is looked at, and told, in seconds.
_LOOK, _TELL = 0.2, 15.0


@dataclasses.dataclass
class Job:
    """One run of a sweep."""
    name: str
    path: pathlib.Path
    overrides: dict
    config: object

    def state(self):
        """finished, failed (it diverged, and would start from its last checkpoint), interrupted (some steps are done), or new."""
        if not (self.path / "config.json").exists():
            return "new"
        run = RunDir.open(self.path)
        if run.done is not None:
            return "finished"
        if failed := run.failed:
            return f"failed: {failed['reason'].partition('. ')[0]}"
        return f"interrupted at step {self.step()}"

    def step(self):
        rows = RunDir.open(self.path).metrics() if (self.path / "config.json").exists() else []
        return rows[-1]["step"] if rows else 0


def sweep(spec, overrides=None, *, imports=(), workdir=None, dry_run=False, jobs=1, keep_going=False):
    """Runs every config of `spec`'s `sweep()`; returns 0, or 1 if a run failed.

    Args:
      spec: `FILE[:ARG]` of a config file that defines `sweep()`, which yields flat overrides (`posjax.sweeps`).
      overrides: applied to every config together with its own; the same key in both is refused.
      imports: as `load_config`.
      workdir: the folder of the runs; None for `runs/` and the config file's name.
      dry_run: list the runs and their state only.
      jobs: runs at a time; each gets its share of the cores.
      keep_going: go on past a failed run, and say at the end which failed.

    Raises:
      ValueError: no sweep, a config that cannot work (nothing has run then), or jobs below 1.
    """
    if jobs < 1:
        raise UserError(f"--jobs is {jobs}; it must be at least 1.")
    listed = plan(spec, overrides or {}, imports, workdir)
    root = listed[0].path.parent
    if not dry_run:
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"The runs cannot be written to {root}: {error.strerror}.") from None
    width = max(len(job.name) for job in listed)
    for job in listed:
        print(f"{job.name:<{width}}  {job.state()}" + (f"  {_words(job.overrides)}" if dry_run else ""))
    if dry_run:
        print(f"{len(listed)} runs; nothing was run.")
        return 0
    todo = [job for job in listed if job.state() != "finished"]
    write_experiment(root, [hparams(configured(job.config, variant)) for job in listed for variant in variants(job.config)],
                     list(HPARAM_METRICS))
    failed, stopped = _Pool(todo, spec, imports, jobs, keep_going).go() if todo else ([], 0)
    done = sum(job.state() == "finished" for job in listed)
    print(f"{done} of {len(listed)} runs are finished in {root}.")
    for job, why in failed:
        print(f"FAILED {job.name}: {why}", file=sys.stderr)
    return 128 + stopped if stopped else int(bool(failed))


def plan(spec, overrides, imports, workdir):
    """The sweep's jobs, every config checked before anything runs."""
    base = configs.load_config(spec, imports)
    module, argument = configs.config_module(spec)
    if not hasattr(module, "sweep"):
        raise UserError(f"The config {spec} defines no sweep().")
    takes = inspect.signature(module.sweep).parameters
    arguments = [argument] if argument is not None and takes else []
    items = configs.run_file(f"sweep() of {spec}", lambda: list(module.sweep(*arguments)))
    if not items:
        raise UserError(f"The sweep() of {spec} yields nothing.")
    root = pathlib.Path(workdir or pathlib.Path("runs") / pathlib.Path(str(spec).partition(":")[0]).stem)
    jobs = []
    for item in items:
        if not isinstance(item, dict):
            raise UserError(f"The sweep() of {spec} yields {item!r}; overrides as {{'train.steps': 500}} are expected.")
        if swept := sorted(configs.flatten(overrides).keys() & configs.flatten(item).keys()):
            raise UserError(f"{', '.join(swept)} is set by the sweep() of {spec}; it cannot be set for all of its runs.")
        # All at once and as text: the very config that the run's own command will read.
        item = configs.flatten(overrides) | configs.flatten(item)
        varied = {key: (value,) if isinstance(value, str) else tuple(value) for key, value in item.items() if key == "vary"}
        item = {key: f"{value}" for key, value in item.items()} | varied
        config = configs.override(base, item)
        Experiment.build(config)
        name = run_name(config)
        if name in (job.name for job in jobs):
            raise UserError(f"Two runs of the sweep have the same config: {_words(item)}.")
        jobs.append(Job(name, root / name, item, config))
    return jobs


class _Pool:
    """The processes of a sweep. A signal is passed on to them, and they save their state before they stop."""

    def __init__(self, todo, spec, imports, jobs, keep_going):
        self.waiting, self.spec, self.imports, self.keep_going = list(todo), spec, imports, keep_going
        self.todo, self.total = todo, sum(job.config.train.steps for job in todo)
        self.running, self.failed, self.signum = {}, [], 0
        self.jobs = min(jobs, len(todo))
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        # Two jobs on one core would only wait for each other: a job has cores of its own, or all of them.
        self.shares = [cores[n::self.jobs] or cores for n in range(self.jobs)]

    def go(self):
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._work()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        return self.failed, self.signum

    def _stop(self, signum, frame):
        self.signum, self.waiting = signum, []
        for process, *_ in self.running.values():
            process.send_signal(signal.SIGTERM)

    def _work(self):
        started = told = time.monotonic()
        first = sum(job.step() for job in self.todo)
        while self.waiting or self.running:
            for slot in range(self.jobs):
                if slot not in self.running and self.waiting:
                    self._start(slot, self.waiting.pop(0))
            time.sleep(_LOOK)
            for slot in [slot for slot, (process, *_) in self.running.items() if process.poll() is not None]:
                self._end(slot)
            if self.jobs > 1 and time.monotonic() - told > _TELL:
                told = time.monotonic()
                self._tell(first, told - started)

    def _start(self, slot, job):
        words = train_words(self.spec, job.overrides, self.imports, job.path)
        command = [sys.executable, "-m", "posjax.cli", *words[1:]]
        log = None
        if self.jobs > 1:  # lines of several runs would mix
            folder = job.path.parent / "logs"
            folder.mkdir(exist_ok=True)
            log = open(folder / f"{job.name}.log", "ab")
        share = self.shares[slot]
        # In a session of its own: Ctrl-C reaches the sweep, which passes it on once.
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        if share and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, share)
        print(f"{job.name}: started" + (f", log in {log.name}" if log else ""), flush=True)
        self.running[slot] = (process, job, time.monotonic(), log and log.name)
        if log:
            log.close()
        if self.signum:  # it came while the process started, which was not among the running then
            process.send_signal(signal.SIGTERM)

    def _end(self, slot):
        process, job, started, log = self.running.pop(slot)
        if process.returncode == 0:
            print(f"{job.name}: finished in {duration(time.monotonic() - started)}", flush=True)
            return
        if self.signum:
            print(f"{job.name}: stopped at step {job.step()}", flush=True)
            return
        why = f"exit code {process.returncode} at step {job.step()}" + (f": {_last_line(log)}" if log else "")
        self.failed.append((job, why))
        print(f"{job.name}: FAILED, {why}", file=sys.stderr, flush=True)
        if not self.keep_going:
            self.waiting = []

    def _tell(self, first, seconds):
        steps = sum(job.step() for job in self.todo)
        rate = (steps - first) / seconds
        left = duration((self.total - steps) / rate) if rate else "?"
        now = ", ".join(f"{job.config.scheme.name} {job.step()}/{job.config.train.steps}" for _, job, *_ in self.running.values())
        print(f"[{steps}/{self.total} steps] {rate:.1f} steps/s, {left} left: {now}", flush=True)


def _last_line(log):
    lines = pathlib.Path(log).read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "its log is empty"


def _words(overrides):
    return " ".join(f"{key}={value}" for key, value in overrides.items())
