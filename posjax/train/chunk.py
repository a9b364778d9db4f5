"""The jitted heart of training: many steps in one call, on batches made on the device."""
import dataclasses

import jax
import jax.numpy as jnp
import optax

from posjax.tasks.base import stream_key
from posjax.train.replicas import DATA, my_part, my_tokens, over_replicas, place, sequence_axis, total

METRICS = ("loss", "grad_norm", "token_accuracy")


def answer_loss(logits, batch, count):
    """Cross-entropy of the answer tokens, in nats, their sum divided by `count`: that of the answer tokens for their mean."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return (losses * batch.weights).sum() / count


def train_batch(experiment, seed, step):
    """Batch and positions of a step: a function of (seed, step) alone, so that a resumed run sees the same data."""
    train, task = experiment.config.train, experiment.task
    length_key, sample_key, position_key = jax.random.split(stream_key(seed, "train", step), 3)
    lengths = jax.random.randint(length_key, (train.batch_size,), train.lengths.min, train.lengths.max + 1, jnp.int32)
    batch = task.sample(sample_key, lengths, max_length=train.lengths.max)
    return batch, experiment.train_policy.positions(position_key, batch.used, batch.tokens.shape[1], batch.positions)


def make_step(experiment, mesh):
    """One optimiser step of one replica, within `over_replicas`: `(state, step, seed) -> (state, metrics)`."""
    parts = experiment.config.train.microbatches

    def loss_fn(params, batch, positions, count):
        logits = experiment.apply(params, batch.tokens, positions=positions, sequence_axis=sequence_axis(mesh))
        right = (logits.argmax(-1) == batch.targets) * batch.weights
        return answer_loss(logits, batch, count), right.sum() / count

    def step_fn(state, step, seed):
        batch, positions = train_batch(experiment, seed, step)
        batch, positions = my_tokens(dataclasses.replace(batch, positions=None), positions, mesh)
        rows = batch, None if positions.ndim == 1 else positions  # one `[T]` for all rows is not divided
        rows = jax.tree.map(lambda x: my_part(x, 0, DATA, mesh), rows)
        count = total(rows[0].weights.sum(), mesh)
        params, unclamp = jax.vjp(experiment.clamped, state["params"])

        def part(rows):
            batch, own = rows
            return jax.value_and_grad(loss_fn, has_aux=True)(params, batch, positions if own is None else own, count)
        (loss, accuracy), grads = total(summed_by_parts(part, parts, rows), mesh)
        grads, = unclamp(grads)
        updates, opt_state = experiment.optimiser.update(grads, state["opt_state"], state["params"])
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "token_accuracy": accuracy}
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, metrics
    return step_fn


def summed_by_parts(function, parts, rows):
    """The sum of `function(rows)` over equal parts of the leading axis of `rows`, one after another."""
    if parts == 1:
        return function(rows)
    rows = jax.tree.map(lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), rows)
    shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], rows))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(lambda sums, part: (jax.tree.map(jnp.add, sums, function(part)), None), zeros, rows)[0]


def make_chunk(experiment, mesh):
    """The jitted training function: `chunk(state, seeds, first_step, num_steps) -> (state, metrics)`.

    `state` holds params and optimiser state of all replicas and is donated; `seeds` is uint32 `[R]`, the others int32
    scalars. Each metric is float32 `[R, chunk_steps]`, of which the first `num_steps` hold. That number is traced: a
    run that checkpoints or ends off the beat of its chunks compiles once all the same. "finite" is bool `[R]`: whether
    the parameters after the last step are, which no loss has seen yet.
    """
    step_fn = make_step(experiment, mesh)
    chunk_steps = experiment.config.train.chunk_steps

    def one(replica, first_step, num_steps):
        state, seed = replica

        def body(n, carry):
            state, metrics = carry
            state, new = step_fn(state, first_step + n, seed)
            return state, {name: metrics[name].at[n].set(new[name]) for name in METRICS}
        empty = {name: jnp.zeros(chunk_steps, jnp.float32) for name in METRICS}
        state, metrics = jax.lax.fori_loop(0, num_steps, body, (state, empty))
        finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state["params"])]
        return state, metrics | {"finite": jnp.stack(finite).all()}

    def chunk(state, seeds, first_step, num_steps):
        return over_replicas(one, mesh, num_shared=2)((state, seeds), first_step, num_steps)
    return jax.jit(chunk, donate_argnums=0)


def init_state(experiment, seeds, mesh):
    """Fresh state of all replicas, laid over the mesh."""
    def one(seed):
        params = experiment.init(seed)
        return {"params": params, "opt_state": experiment.optimiser.init(params)}
    return place(jax.jit(over_replicas(one, mesh))(seeds), mesh)
