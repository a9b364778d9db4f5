"""Held-out evaluation over a grid of lengths, a handful of compilations for any grid."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from posjax.errors import UserError
from posjax.registry import described
from posjax.tasks.base import room, stream_key
from posjax.train.replicas import over_replicas

# Tokens in flight: batches shrink as sequences grow, so that any length needs about the same memory. Small enough
# that few examples waste little, and that a batch stays in a CPU's cache.
_BATCH_TOKENS = 2**12


def bucket(task, length, train_max):
    """The size that a length is padded to: the training maximum times a power of two, or the task's last before it.

    The examples of a length depend on it, so it must not depend on the other lengths of the grid.
    """
    size = train_max
    while size < length:
        size *= 2
    while not _exists(task, size):  # ends at `length`, which exists
        size -= 1
    return size


def _exists(task, length):
    try:
        task.check_length(length)
    except UserError:
        return False
    return True


def check_eval_lengths(task, policy, lengths):
    """Raises `ValueError` unless `lengths` is a rising grid that the task and the position policy can fill."""
    if not lengths or list(lengths) != sorted(set(lengths)) or lengths[0] < 1:
        raise UserError(f"Evaluation lengths are {', '.join(map(str, lengths)) or 'empty'}; "
                        "give rising lengths of at least 1.")
    for length in lengths:
        if length >= 2**31:
            raise UserError(f"Evaluation length {length} is too large; lengths must stay below {2**31}.")
        task.check_length(length)
        policy.check(room(task, policy, length))


class Evaluator:
    """Scores all replicas of an experiment on held-out examples.

    One teacher-forced pass scores both numbers: exact match, where all argmaxes of an answer are right, is the same
    as greedy decoding being right; token accuracy is not, and is labelled teacher-forced wherever it is shown.

    Args:
      experiment: what to evaluate.
      mesh: the replicas' devices (`posjax.train.replicas.replica_mesh`).
    """

    def __init__(self, experiment, mesh):
        self.experiment, self.mesh = experiment, mesh
        self.compilations = 0

    def __call__(self, params, replicas, step, lengths, num_examples):
        """Raw records, one for each replica, length and condition of the task: the rows of evals.jsonl.

        Args:
          params: parameters of all replicas, leading axis R.
          replicas: their `Experiment.replica_values`, leading axis R.
          step: training step, for the record.
          lengths: sizes to evaluate.
          num_examples: held-out examples a length, a condition and a seed. Example n is the same in every call.
        """
        return [row for length in lengths for index, condition in enumerate(self.experiment.task.conditions())
                for row in self._rows(params, replicas, step, length, index, condition, num_examples)]

    def _rows(self, params, replicas, step, length, index, condition, num_examples):
        experiment = self.experiment
        num_tokens = experiment.task.sequence_length(length) - 1
        head = [{"step": step, "seed": seed, **({"variant": variant} if variant else {}), "length": length,
                 "condition": condition, "num_examples": num_examples,
                 "positions": described(experiment.config.positions.eval)} for seed, variant in experiment.replicas]
        span = experiment.eval_policy.span(room(experiment.task, experiment.eval_policy, length))
        if experiment.max_length is not None and span > experiment.max_length:
            status = f"no row past max_length {experiment.max_length}"
            return [row | {"status": status, "exact_match": None, "token_accuracy": None, "loss": None,
                           "per_position": []} for row in head]
        size = bucket(experiment.task, length, experiment.config.train.lengths.max)
        condition = {name: jnp.float32(value) for name, value in condition.items()}
        sums = self._scorer(size)(
            (params, replicas), jnp.int32(length), jnp.int32(num_tokens), jnp.int32(index), jnp.int32(num_examples), condition)
        sums = jax.tree.map(np.asarray, sums)
        rows = []
        for r, row in enumerate(head):
            shown = sums["count"][r] > 0
            total = float(sums["count"][r].sum())
            rows.append(row | {
                "status": "ok",
                "exact_match": float(sums["exact"][r]) / num_examples,
                "token_accuracy": float(sums["right"][r].sum()) / total,
                "loss": float(sums["loss"][r]) / total,
                "per_position": [round(float(share), 6) for share in sums["right"][r][shown] / sums["count"][r][shown]],
            })
        return rows

    @functools.cache  # noqa: B019 - lives as long as its evaluator, which a run holds
    def _scorer(self, size):
        """Sums over all batches, compiled once for a bucket: `[R]`, or `[R, T]` by place in the answer."""
        experiment = self.experiment
        batch_size = max(1, _BATCH_TOKENS // experiment.task.sequence_length(size))

        def batch_sums(params, replica, number, length, num_tokens, index, num_examples, condition):
            key = jax.random.fold_in(jax.random.fold_in(stream_key(replica["seed"], "eval", length), index), number)
            sample_key, position_key = jax.random.split(key)
            batch = experiment.task.sample(sample_key, jnp.full((batch_size,), length), max_length=size, **condition)
            positions = experiment.eval_policy.positions(position_key, batch.used, batch.tokens.shape[1], batch.positions)
            # Padding must not ask a learned table for rows that it lacks: their NaN would reach the sums. No answer sees it.
            positions = positions[..., jnp.minimum(jnp.arange(batch.tokens.shape[1]), num_tokens - 1)]
            logits = experiment.apply(params, batch.tokens, scheme=replica["scheme"], positions=positions)
            counted = number * batch_size + jnp.arange(batch_size) < num_examples
            weights = batch.weights * counted[:, None]
            right = (logits.argmax(-1) == batch.targets).astype(jnp.float32)
            place = jnp.cumsum(batch.weights, axis=1).astype(jnp.int32) - 1
            by_place = functools.partial(jax.ops.segment_sum, num_segments=batch.tokens.shape[1])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
            return {"exact": (((right == 1) | (batch.weights == 0)).all(1) & counted).sum(),
                    "loss": (losses * weights).sum(),
                    "right": by_place((right * weights).ravel(), place.ravel()),
                    "count": by_place(weights.ravel(), place.ravel())}

        def one(own, *shared):
            params, replica = own
            def batch(number):
                return batch_sums(params, replica, number, *shared)
            # The number of batches is traced, so that more examples need no new compilation.
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(batch, jnp.int32(0)))
            num_batches = (shared[3] + batch_size - 1) // batch_size
            return jax.lax.fori_loop(0, num_batches, lambda n, sums: jax.tree.map(jnp.add, sums, batch(n)), zeros)
        self.compilations += 1
        return jax.jit(over_replicas(one, self.mesh, num_shared=5))
