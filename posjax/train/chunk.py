"""The jitted heart of training: many steps in one call, on batches made on the device."""
import jax
import jax.numpy as jnp
import optax

from posjax.tasks.base import stream_key
from posjax.train.replicas import over_replicas, place

METRICS = ("loss", "grad_norm", "token_accuracy")


def answer_loss(logits, batch):
    """Mean cross-entropy over the answer tokens, in nats."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    return (losses * batch.weights).sum() / batch.weights.sum()


def train_batch(experiment, seed, step):
    """Batch and positions of a step: a function of (seed, step) alone, so that a resumed run sees the same data."""
    train, task = experiment.config.train, experiment.task
    length_key, sample_key, position_key = jax.random.split(stream_key(seed, "train", step), 3)
    lengths = jax.random.randint(length_key, (train.batch_size,), train.lengths.min, train.lengths.max + 1, jnp.int32)
    batch = task.sample(sample_key, lengths, max_length=train.lengths.max)
    return batch, experiment.train_policy.positions(position_key, batch.used, batch.tokens.shape[1], batch.positions)


def make_step(experiment):
    """One optimiser step of one replica: `(state, step, replica) -> (state, metrics)`; see `Experiment.replica_values`."""
    def loss_fn(params, batch, positions, scheme):
        logits = experiment.apply(params, batch.tokens, scheme=scheme, positions=positions)
        right = (logits.argmax(-1) == batch.targets) * batch.weights
        return answer_loss(logits, batch), right.sum() / batch.weights.sum()

    def step_fn(state, step, replica):
        batch, positions = train_batch(experiment, replica["seed"], step)
        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"], batch, positions, replica["scheme"])
        optimiser = experiment.optimiser(replica["optimiser"])
        updates, opt_state = optimiser.update(grads, state["opt_state"], state["params"])
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "token_accuracy": accuracy}
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, metrics
    return step_fn


def make_chunk(experiment, mesh):
    """The jitted training function: `chunk(state, replicas, first_step, num_steps) -> (state, metrics)`.

    `state` holds params and optimiser state of all replicas and is donated; `replicas` is `Experiment.replica_values`, the others
    int32 scalars. Each metric is float32 `[R, chunk_steps]`, of which the first `num_steps` hold. That number is traced: a
    run that checkpoints or ends off the beat of its chunks compiles once all the same. "finite" is bool `[R]`: whether
    the parameters after the last step are, which no loss has seen yet.
    """
    step_fn = make_step(experiment)
    chunk_steps = experiment.config.train.chunk_steps

    def one(own, first_step, num_steps):
        state, replica = own

        def body(n, carry):
            state, metrics = carry
            state, new = step_fn(state, first_step + n, replica)
            return state, {name: metrics[name].at[n].set(new[name]) for name in METRICS}
        empty = {name: jnp.zeros(chunk_steps, jnp.float32) for name in METRICS}
        state, metrics = jax.lax.fori_loop(0, num_steps, body, (state, empty))
        finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state["params"])]
        return state, metrics | {"finite": jnp.stack(finite).all()}

    def chunk(state, replicas, first_step, num_steps):
        return over_replicas(one, mesh, num_shared=2)((state, replicas), first_step, num_steps)
    return jax.jit(chunk, donate_argnums=0)


def init_state(experiment, replicas, mesh):
    """Fresh state of all replicas, laid over the mesh."""
    def one(replica):
        params = experiment.init(replica["seed"], replica["scheme"])
        return {"params": params, "opt_state": experiment.optimiser(replica["optimiser"]).init(params)}
    return place(jax.jit(over_replicas(one, mesh))(replicas), mesh)
