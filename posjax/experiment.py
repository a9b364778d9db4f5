"""What a config describes, built and checked: the task, the policies, the model and the optimiser."""
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from posjax import config as configs
from posjax.errors import UserError
from posjax.eval.extrapolation import check_eval_lengths
from posjax.models.decoder import DTYPES, Decoder, DecoderConfig
from posjax.ops.attention import choose
from posjax.schemes.attend import attend_call
from posjax.schemes.layers import make_layers
from posjax.schemes.positions import POLICIES
from posjax.schemes.registry import make_scheme
from posjax.schemes.temperature import TEMPERATURES
from posjax.tasks.base import TASKS, Task, room
from posjax.train.replicas import replica_mesh

# JAX keys and counters hold 32 bits; a seed beyond would be cut without a word.
_LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Experiment:
    """A config with everything that it names. Made by `Experiment.build`, which refuses what cannot run."""
    config: Any
    task: Task
    train_policy: Any
    eval_policy: Any
    optimiser: optax.GradientTransformation
    schedule: Any
    graphdef: nnx.GraphDef
    max_length: int | None
    num_params: int

    @classmethod
    def build(cls, config):
        """Checks every value and builds the parts; nothing is allocated and nothing is written.

        Raises:
          ValueError: the first thing in the config that cannot work, with its value and what is allowed.
        """
        _check_numbers(config)
        _check_mesh(config)
        task = _make(TASKS, config.task)
        train_policy, eval_policy = (make_policy(config, part) for part in ("train", "eval"))
        abstract = nnx.eval_shape(lambda: make_model(config, task.vocab_size, 0))
        graphdef, params = nnx.split(abstract)
        max_length = abstract.layers.max_length
        _check_lengths(config, task, train_policy, eval_policy, max_length)
        schedule = _schedule(config.train)
        return cls(config=config, task=task, train_policy=train_policy, eval_policy=eval_policy, schedule=schedule,
                   optimiser=_optimiser(config.train, schedule), graphdef=graphdef, max_length=max_length,
                   num_params=sum(leaf.size for leaf in jax.tree.leaves(params)))

    @property
    def seeds(self):
        """The replicas: as many seeds as the config asks for, from its first."""
        return tuple(range(self.config.seed, self.config.seed + self.config.num_seeds))

    def init(self, seed):
        """Parameters of one replica, a nested dict of float32 arrays; `seed` may be traced."""
        return nnx.to_pure_dict(nnx.state(make_model(self.config, self.task.vocab_size, seed), nnx.Param))

    def apply(self, params, tokens, **kwargs):
        """Logits `[B, T, V]` of the decoder with `params`; see `Decoder.__call__`."""
        return nnx.merge(self.graphdef, params)(tokens, **kwargs)

    @functools.cached_property
    def mesh(self):
        """The devices of the config's mesh. Raises `ValueError` where there are not so many."""
        return replica_mesh(len(self.seeds), **self.config.mesh)

    def clamped(self, params):
        """`params` with those within their bounds that a scheme bounds (`Scheme.clamp_parameters`)."""
        model = nnx.merge(self.graphdef, params)
        for scheme in model.layers.schemes:
            scheme.clamp_parameters()
        return nnx.to_pure_dict(nnx.state(model, nnx.Param))

    @functools.cached_property
    def attention_backend(self):
        """Name of the attention backend that serves a training step; several names where blocks differ."""
        def chosen():
            model = make_model(self.config, self.task.vocab_size, 0)
            sizes = model.config
            x = jnp.zeros((self.config.train.batch_size, self.train_tokens, sizes.num_heads, sizes.head_dim),
                          DTYPES[sizes.dtype])
            positions = jnp.zeros(x.shape[:2], jnp.int32)
            for scheme, window in map(model.layers.__getitem__, range(sizes.depth)):
                features = scheme.features(jnp.zeros((*x.shape[:2], sizes.width), x.dtype))
                names.append(choose(attend_call(scheme, x, x, x, q_positions=positions, k_positions=positions,
                                                features=features, window=window)).name)
        names = []
        jax.eval_shape(chosen)
        return ", ".join(dict.fromkeys(names))

    @property
    def sizes(self):
        """`DecoderConfig` of the model."""
        return model_sizes(self.config, self.task.vocab_size)

    @functools.cached_property
    def train_tokens(self):
        """Tokens that a training sequence feeds to the model."""
        return self.task.sequence_length(self.config.train.lengths.max) - 1


def model_sizes(config, vocab_size):
    return DecoderConfig(vocab_size=vocab_size, **config.model)


def make_model(config, vocab_size, seed):
    """The decoder of a config, with freshly drawn parameters."""
    rngs = nnx.Rngs(jax.random.fold_in(jax.random.key(seed), _LARGEST))
    sizes = model_sizes(config, vocab_size)

    def maker(scheme, temperature):
        return lambda: make_scheme(
            scheme.name, num_heads=sizes.num_heads, head_dim=sizes.head_dim, model_dim=sizes.width, rngs=rngs,
            temperature=_make(TEMPERATURES, temperature, num_heads=sizes.num_heads), **_hyper(scheme))
    layers = config.layers.to_dict()
    for key in ("other", "other_temperature"):
        if not config.layers.other_every and layers[key]["name"] != {"other": "nope", "other_temperature": "none"}[key]:
            raise UserError(f"layers.{key} is {layers[key]['name']}, but no block is of the other kind: set layers.other_every.")
    other = maker(config.layers.other, config.layers.other_temperature)
    del layers["other"], layers["other_temperature"]
    return Decoder(sizes, make_layers(maker(config.scheme, config.temperature), sizes.depth, other=other, **layers), rngs=rngs)


def make_policy(config, part):
    """The position policy of a config for "train" or "eval"."""
    return _make(POLICIES, config.positions[part])


def _make(registry, section, **supplied):
    return registry.make(section.name, _hyper(section), **supplied)


def _hyper(section):
    return {key: value for key, value in section.items() if key != "name"}


def _schedule(train):
    """Linear warm-up, then a cosine down to a fraction of the peak."""
    warmup = max(1, round(train.warmup_fraction * train.steps))
    return optax.warmup_cosine_decay_schedule(  # the cosine has at least a step, even if the run ends before it
        0.0, train.learning_rate, warmup, max(warmup + 1, train.steps), train.learning_rate * train.final_lr_fraction)


def _optimiser(train, schedule):
    """AdamW with its decay on every parameter. Sparing norms, token vectors and what a scheme learns was tried: of two
    seeds of the learned table none then fits (exact match 0.50 at length 16), of three with the decay two do."""
    return optax.chain(optax.clip_by_global_norm(train.clip_norm),
                       optax.adamw(schedule, b1=train.beta1, b2=train.beta2, weight_decay=train.weight_decay))


def _check_numbers(config):
    for key, value in configs.to_flat(config).items():
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise UserError(f"{key} is {value}; it must stay below {_LARGEST + 1}.")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key} is {value}; it must be finite.")
    for key in ("num_seeds", "train.steps", "train.batch_size", "train.chunk_steps", "train.checkpoint_every",
                "train.lengths.min", "train.microbatches", "mesh.data", "mesh.sequence",
                "eval.num_examples", "eval.every_num_examples"):
        if configs.get(config, key) < 1:
            raise UserError(f"{key} is {configs.get(config, key)}; it must be at least 1.")
    for key in ("seed", "mesh.replica", "eval.every", "train.weight_decay"):
        if configs.get(config, key) < 0:
            raise UserError(f"{key} is {configs.get(config, key)}; it must not be negative.")
    if config.seed + config.num_seeds > _LARGEST:
        raise UserError(f"seed is {config.seed}; seeds must stay below {_LARGEST}.")
    for key in ("train.learning_rate", "train.clip_norm"):
        if not configs.get(config, key) > 0:
            raise UserError(f"{key} is {configs.get(config, key)}; it must be above 0.")
    for key in ("train.warmup_fraction", "train.final_lr_fraction", "eval.fit_threshold"):
        if not 0 <= configs.get(config, key) <= 1:
            raise UserError(f"{key} is {configs.get(config, key)}; it must be from 0 to 1.")
    for key in ("train.beta1", "train.beta2"):
        if not 0 <= configs.get(config, key) < 1:
            raise UserError(f"{key} is {configs.get(config, key)}; it must be at least 0 and below 1.")


def _check_mesh(config):
    mesh, train = config.mesh, config.train
    if mesh.replica and config.num_seeds % mesh.replica:
        raise UserError(f"mesh.replica is {mesh.replica}, which does not divide num_seeds {config.num_seeds}.")
    if train.batch_size % (mesh.data * train.microbatches):
        raise UserError(f"train.batch_size {train.batch_size} does not divide by mesh.data {mesh.data} x train.microbatches "
                        f"{train.microbatches}.")


def _check_lengths(config, task, train_policy, eval_policy, max_length):
    low, high = config.train.lengths.min, config.train.lengths.max
    if low > high:
        raise UserError(f"train.lengths.min is {low}, above train.lengths.max {high}.")
    for length in (low, high):
        task.check_length(length)
    check_eval_lengths(task, eval_policy, config.eval.lengths)
    if not any(low <= length <= high for length in config.eval.lengths):
        raise UserError(f"eval.lengths {', '.join(map(str, config.eval.lengths))} has none of the training lengths "
                        f"{low} to {high}, without which nobody can say whether the scheme fits.")
    needed = room(task, train_policy, high)
    train_policy.check(needed)
    span = train_policy.span(needed)
    if max_length is not None and span > max_length:
        hint = f": set scheme.max_length to at least {span}" if "max_length" in config.scheme else ", which it cannot hold"
        raise UserError(f"scheme.max_length is {max_length}, but training reaches position {span - 1} "
                        f"({config.task.name} of length {high}){hint}.")
