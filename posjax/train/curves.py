"""A run's records as TensorBoard events: curves, the length figure, and its row of the HParams table."""
import json

from posjax import config as configs
from posjax.eval.statistics import summarize
from posjax.io.tensorboard import TensorBoard
from posjax.report.figure import run_figure
from posjax.variants import configured, evals_of, metrics_of, text, variants

# The HParams table's metrics: the newest value of each of these curves.
HPARAM_METRICS = ("exact_match/training_lengths", "exact_match/beyond", "effective_length/0.9", "effective_length/0.5")


class Curves:
    """Writes what TensorBoard shows of a run; each variant of one that varies values has a folder, and curves, of its own.

    Args:
      directory: of the run's events.
      config: its `ConfigDict`.
      resume_step: the step that training goes on from, or None for a new run; later events are hidden.
    """

    def __init__(self, directory, config, resume_step):
        self.each = [(variant, _Curves(directory / text(variant).replace(" ", ""), configured(config, variant), resume_step))
                     for variant in variants(config)]

    def training(self, row):
        """`row` is a record of metrics.jsonl."""
        for variant, curves in self.each:
            curves.training(*metrics_of([row], variant))

    def evaluation(self, rows):
        """`rows` are the records of one evaluation: a point on each length's curve, and the figure."""
        for variant, curves in self.each:
            curves.evaluation(evals_of(rows, variant))

    def lengths(self, rows):
        """The final evaluation once more as curves with length, not steps, along the axis."""
        for variant, curves in self.each:
            curves.lengths(evals_of(rows, variant))

    def close(self, finished):
        for _, curves in self.each:
            curves.close(finished)


class _Curves:
    """What is written of one variant, all curves as the mean over seeds unless a seed is named."""

    def __init__(self, directory, config, resume_step):
        self.config = config
        self.board = TensorBoard(directory, resume_step=resume_step)
        if resume_step is None:
            self.board.hparams(hparams(config))
            self.board.text("config", "```json\n" + json.dumps(configs.to_json(config), indent=2) + "\n```", 0)

    def training(self, row):
        step = row["step"]
        scalars = {"speed/tokens_per_second": row["tokens_per_second"], "train/learning_rate": row["learning_rate"]}
        for name in ("loss", "grad_norm", "train_token_accuracy"):
            tag = name.removeprefix("train_").replace("token_accuracy", "token_accuracy_teacher_forced")
            scalars[f"train/{tag}"] = sum(row[name]) / len(row[name])
        for seed, loss in zip(row["seeds"], row["loss"]):
            scalars[f"loss_by_seed/{seed}"] = loss
        self.board.scalars(scalars, step)

    def evaluation(self, rows):
        summary = summarize(rows, configs.to_json(self.config), finished=False)
        step, scalars = rows[0]["step"], {}
        for length, by_name in by_length(rows).items():
            for name, value in by_name.items():
                scalars[f"{name}/length_{length:05d}"] = value
        means = {length: by_name["exact_match"] for length, by_name in by_length(rows).items()}
        trained, beyond = summary.train_max, [n for n in means if summary.train_max < n <= 2 * summary.train_max]
        if within := [n for n in means if n <= trained]:  # none: a learned table that lacks rows for all of them
            scalars["exact_match/training_lengths"] = mean(means[length] for length in within)
        if beyond:
            scalars["exact_match/beyond"] = mean(means[length] for length in beyond)
        for threshold, effective in summary.effective.items():
            scalars[f"effective_length/{threshold}"] = effective.mean
        self.board.scalars(scalars, step)
        self.board.image("extrapolation", run_figure(summary), step)

    def lengths(self, rows):
        for length, by_name in by_length(rows).items():
            self.board.scalars({f"by_length/{name}": value for name, value in by_name.items()}, length)

    def close(self, finished):
        if finished:
            self.board.session_end()
        self.board.close()


def by_length(rows):
    """`{length: {metric: mean over seeds and conditions}}` of the rows that have a result."""
    found = {}
    for row in rows:
        if row["status"] == "ok":
            found.setdefault(row["length"], []).append(row)
    names = {"exact_match": "exact_match", "token_accuracy": "token_accuracy_teacher_forced"}
    return {length: {shown: mean(row[name] for row in group) for name, shown in names.items()}
            for length, group in found.items()}


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def hparams(config):
    """What the HParams table compares: the same keys in every run, whatever the scheme and task."""
    flat = configs.to_flat(config)
    keys = ("scheme.name", "task.name", "positions.train.name", "positions.eval.name", "model.width", "model.depth",
            "model.num_heads", "model.dtype", "train.steps", "train.batch_size", "train.learning_rate",
            "train.lengths.max", "num_seeds", "seed")
    shown = {key: flat[key] for key in keys}
    for part in ("scheme", "task"):
        own = {key: value for key, value in config[part].items() if key != "name"}
        shown[f"{part}.hyper"] = ", ".join(f"{key}={value}" for key, value in own.items())
    return shown
