"""Runs from Python: make one, read one back, ask it for its model and for more lengths."""
import dataclasses
import hashlib
import json
import pathlib

from posjax import config as configs
from posjax.errors import UserError
from posjax.io.run_dir import RunDir
from posjax.variants import evals_of, find, recorded_config, variants


def run_name(config):
    """`copy-rope-1a2b3c4d`: task, scheme, and a digest of the whole config, so that every config has its own directory."""
    text = json.dumps(configs.to_json(config), sort_keys=True)
    return f"{config.task.name}-{config.scheme.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def run(config, workdir=None, *, command=None, profile=False):
    """Trains and evaluates a config, or goes on with what is there; a finished run is only read.

    Args:
      config: from `posjax.load_config` or `posjax.default_config`.
      workdir: the run directory; None for `runs/` and a name made from the config.
      command: the shell command that reproduces the run, for its record; None for one made from its own config.json.
      profile: write a trace of one chunk of training into the run's tensorboard folder.

    Returns:
      A `Run`.

    Raises:
      ValueError: a config that cannot work, a directory in use or of another run.
    """
    from posjax.train.loop import train
    workdir = pathlib.Path("runs") / run_name(config) if workdir is None else workdir
    return Run(train(config, workdir, command=command, profile=profile))


def load_run(path):
    """Reads a run back; raises `ValueError` if `path` is not a run directory."""
    return Run(path)


class Run:
    """A run directory, read when asked: `config`, `environment`, `metrics()`, `evals()`, `summary()`, `model()`."""

    def __init__(self, path):
        self._records = RunDir.open(path)
        self.path = self._records.path
        self.config = configs.from_json(self._records.config)
        self.environment = self._records.environment

    @property
    def done(self):
        """The closing record of a finished run, else None."""
        return self._records.done

    def metrics(self):
        """The raw records of training, a dict for each logged chunk."""
        return self._records.metrics()

    def evals(self):
        """The raw records of evaluation, a dict for each step, seed, length and condition."""
        return self._records.evals()

    @property
    def variants(self):
        """The variants of the run, dicts of the values that differ between its replicas; one empty dict where none do."""
        return variants(self.config)

    def summary(self, *, positions=None, variant=None):
        """The result over seeds, a `posjax.eval.statistics.Summary`, under `positions` as in `evaluate`.

        `variant` has values of the variant that is meant, as `{"train.learning_rate": 0.01}`: as many as tell it from the others.
        """
        from posjax.eval.statistics import evaluated_positions, summarize
        variant = find(self.variants, variant)
        return summarize(evals_of(self.evals(), variant), recorded_config(self._records.config, variant),
                         finished=self.done is not None, failed=self._records.failed,
                         positions=evaluated_positions(configs.to_json(self._config_with(positions))))

    def params(self):
        """`(step, params)` of the latest checkpoint; every leaf has a leading axis over replicas: variants, and in them seeds."""
        from posjax.io.checkpoints import restore_params
        return restore_params(self._records.checkpoint_dir)

    def model(self, seed=None, *, variant=None):
        """The trained `Decoder` of one seed (None: the first), and `variant` as in `summary`, ready to call."""
        import jax

        from posjax.experiment import Experiment
        experiment = Experiment.build(self.config)
        variant = find(experiment.variants, variant)
        seed = experiment.seeds[0] if seed is None else seed
        if seed not in experiment.seeds:
            raise UserError(f"The run has no seed {seed}; it has {', '.join(map(str, experiment.seeds))}.")
        index = experiment.replicas.index((seed, variant))
        scheme = experiment.scheme_of[experiment.variants.index(variant)]
        return experiment.model(jax.tree.map(lambda leaf: leaf[index], self.params()[1]), scheme)

    def _config_with(self, positions):
        return self.config if positions is None else configs.override(self.config, {"positions.eval": positions})

    def evaluate(self, lengths, num_examples=None, *, positions=None):
        """Evaluates the latest checkpoint at more lengths and adds the raw records to evals.jsonl.

        Args:
          lengths: rising sizes, at least 1.
          num_examples: a length and a seed; None for the config's.
          positions: a position policy to evaluate with, by name or as `{"name": "even", "max_position": 512}`; None for the
            config's. The records name theirs, and no result mixes them.

        Returns:
          The new records.

        Raises:
          ValueError: an unknown policy or one without room, lengths that the task cannot fill, no checkpoint, or a run that
            another process is writing.
        """
        from posjax.eval.extrapolation import Evaluator, check_eval_lengths
        from posjax.experiment import Experiment, make_policy
        from posjax.train.replicas import place, replica_mesh
        config = self._config_with(positions)
        # With the config's own evaluation lengths, the other policy need have no room for them.
        experiment = dataclasses.replace(Experiment.build(self.config), config=config, eval_policy=make_policy(config, "eval"))
        check_eval_lengths(experiment.task, experiment.eval_policy, lengths)
        num_examples = self.config.eval.num_examples if num_examples is None else num_examples
        if num_examples < 1:
            raise UserError(f"num_examples is {num_examples}; it must be at least 1.")
        with RunDir.create(self.path, self._records.config) as records:
            step, params = self.params()
            mesh = replica_mesh(len(experiment.replicas))
            evaluate = Evaluator(experiment, mesh)
            rows = evaluate(place(params, mesh), place(experiment.replica_values(), mesh), step, lengths, num_examples)
            records.append_evals(rows)
        return rows
