"""What a config describes, built and checked: the task, the policies, the model and the optimiser."""
import dataclasses
import functools
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from posjax import config as configs
from posjax.errors import UserError
from posjax.eval.extrapolation import check_eval_lengths
from posjax.models.decoder import DTYPES, Decoder, DecoderConfig
from posjax.ops.attention import choose
from posjax.schemes.attend import attend_call
from posjax.schemes.layers import make_layers
from posjax.schemes.one_of import one_of, pick
from posjax.schemes.positions import POLICIES
from posjax.schemes.registry import make_scheme
from posjax.schemes.temperature import TEMPERATURES
from posjax.tasks.base import TASKS, Task, room
from posjax.variants import configured
from posjax.variants import variants as variants_of

# JAX keys and counters hold 32 bits; a seed beyond would be cut without a word.
_LARGEST = 2**31 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Experiment:
    """A config with everything that it names. Made by `Experiment.build`, which refuses what cannot run.

    Its replicas are trained side by side: those of the first variant with each seed, then those of the next. What tells one from
    another is data (`replica_values`), so that one program serves all, and any other learning rate too.
    """
    config: Any
    task: Task
    train_policy: Any
    eval_policy: Any
    variants: tuple     # dicts of config values, see `posjax.variants`; one empty dict where nothing is varied
    schemes: tuple      # of the schemes' settings that the variants have, each once: (config, graphdef of its decoder)
    scheme_of: tuple    # for each variant, the index of its scheme's settings
    max_length: int | None
    num_params: int

    @classmethod
    def build(cls, config):
        """Checks every value and builds the parts; nothing is allocated and nothing is written.

        Raises:
          ValueError: the first thing in the config that cannot work, with its value and what is allowed.
        """
        variants = variants_of(config)
        alone = [configured(config, variant) for variant in variants]
        for own in alone:
            _check_numbers(own)
        task = _make(TASKS, config.task)
        settings = [json.dumps(own.scheme.to_dict(), sort_keys=True) for own in alone]
        schemes = {key: (own, nnx.eval_shape(lambda own=own: make_model(own, task.vocab_size, 0)))
                   for key, own in dict(zip(settings, alone)).items()}
        train_policy, eval_policy = (make_policy(config, part) for part in ("train", "eval"))
        first = next(iter(schemes.values()))[1]
        _check_lengths(config, task, train_policy, eval_policy, first.layers.max_length)
        experiment = cls(
            config=config, task=task, train_policy=train_policy, eval_policy=eval_policy, variants=variants,
            schemes=tuple((own, nnx.graphdef(model)) for own, model in schemes.values()),
            scheme_of=tuple(map(list(schemes).index, settings)), max_length=first.layers.max_length,
            num_params=sum(leaf.size for leaf in jax.tree.leaves(nnx.state(first))))
        if len(schemes) > 1:
            experiment._check_one_program()
        return experiment

    def _check_one_program(self):
        """Traces a decoder whose scheme nobody knows, which is what a step computes with."""
        def traced(scheme):
            return self.apply(self.init(0, scheme), jnp.zeros((1, 2), jnp.int32), scheme=scheme)
        try:
            jax.eval_shape(traced, jnp.int32(0))
        except UserError as error:
            keys = [key for key in self.variants[0] if key.startswith("scheme.")]
            raise UserError(f"{' and '.join(keys)} cannot be varied within a run: {error}. A sweep can vary "
                            f"{'it' if len(keys) == 1 else 'them'}.") from None

    @property
    def seeds(self):
        """As many seeds as the config asks for, from its first."""
        return tuple(range(self.config.seed, self.config.seed + self.config.num_seeds))

    @property
    def replicas(self):
        """`(seed, variant)` of each replica."""
        return tuple((seed, variant) for variant in self.variants for seed in self.seeds)

    def replica_values(self):
        """All that tells replicas apart, as numpy arrays with a leading axis over them.

        "seed" uint32; "scheme" int32, the index of the scheme's settings; "optimiser", see `optimiser_numbers`.
        """
        def each(values):
            return np.repeat(values, len(self.seeds))
        numbers = [optimiser_numbers(configured(self.config, variant).train) for variant in self.variants]
        return {"seed": np.tile(np.asarray(self.seeds, np.uint32), len(self.variants)),
                "scheme": each(np.asarray(self.scheme_of, np.int32)),
                "optimiser": jax.tree.map(lambda *values: each(np.stack(values)), *numbers)}

    def init(self, seed, scheme=0):
        """Parameters of one replica, a nested dict of float32 arrays; `seed`, and `scheme` as in `apply`, may be traced."""
        def drawn(own):
            return nnx.to_pure_dict(nnx.state(make_model(own, self.task.vocab_size, seed), nnx.Param))
        if isinstance(scheme, int):
            return drawn(self.schemes[scheme][0])
        # Only what a scheme learns can depend on its settings.
        params = [drawn(own) for own, _ in self.schemes]
        layers = {"layers": pick(scheme, [p["layers"] for p in params])} if "layers" in params[0] else {}
        return params[0] | layers

    def model(self, params, scheme=0):
        """The decoder with `params`, under the scheme's settings of index `scheme`: an int, or int32 and perhaps traced."""
        if isinstance(scheme, int):
            return nnx.merge(self.schemes[scheme][1], params)
        model, *others = (nnx.merge(graphdef, params) for _, graphdef in self.schemes)
        for n, schemes in enumerate(zip(model.layers.schemes, *(other.layers.schemes for other in others))):
            # Settings may matter to the start alone.
            if any(nnx.graphdef(other) != nnx.graphdef(schemes[0]) for other in schemes[1:]):
                model.layers.schemes[n] = one_of(schemes, scheme)
        return model

    def apply(self, params, tokens, *, scheme=0, **kwargs):
        """Logits `[B, T, V]` of the decoder with `params`; see `model` and `Decoder.__call__`."""
        return self.model(params, scheme)(tokens, **kwargs)

    def schedule(self, numbers):
        """The learning rate as a function of the step; `numbers` are those of a replica, or of several, along an axis."""
        return functools.partial(learning_rate, numbers, self.config.train.steps)

    def optimiser(self, numbers):
        """AdamW with its decay on every parameter, as the `numbers` of a replica say, which may be traced.

        Sparing norms, token vectors and what a scheme learns was tried: of two seeds of the learned table none then fits (exact
        match 0.50 at length 16), of three with the decay two do.
        """
        return optax.chain(optax.clip_by_global_norm(numbers["clip_norm"]),
                           optax.adamw(self.schedule(numbers), b1=numbers["beta1"], b2=numbers["beta2"],
                                       weight_decay=numbers["weight_decay"]))

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


def optimiser_numbers(train):
    """What a config's section "train" says to the optimiser and its schedule: float32 numbers, and int32 steps of the warm-up.

    Traced like this in every run, they compute the same whatever replicas stand beside.
    """
    numbers = {"peak": train.learning_rate, "end": train.learning_rate * train.final_lr_fraction, "beta1": train.beta1,
               "beta2": train.beta2, "weight_decay": train.weight_decay, "clip_norm": train.clip_norm}
    return {"warmup": np.int32(max(1, round(train.warmup_fraction * train.steps))),
            **{name: np.float32(value) for name, value in numbers.items()}}


def learning_rate(numbers, steps, step):
    """Linear warm-up to the peak, then a cosine down to the end; the cosine has a step even if the run ends before it."""
    peak, end, warmup = (numbers[name] for name in ("peak", "end", "warmup"))
    step = jnp.asarray(step, jnp.int32)
    rising = peak * (step / warmup)
    share = jnp.clip((step - warmup) / jnp.maximum(steps - warmup, 1), 0, 1)
    return jnp.where(step < warmup, rising, end + (peak - end) * 0.5 * (1 + jnp.cos(jnp.pi * share)))


def _check_numbers(config):
    for key, value in configs.to_flat(config).items():
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise UserError(f"{key} is {value}; it must stay below {_LARGEST + 1}.")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key} is {value}; it must be finite.")
    for key in ("num_seeds", "train.steps", "train.batch_size", "train.chunk_steps", "train.checkpoint_every",
                "train.lengths.min", "eval.num_examples", "eval.every_num_examples"):
        if configs.get(config, key) < 1:
            raise UserError(f"{key} is {configs.get(config, key)}; it must be at least 1.")
    for key in ("seed", "eval.every", "train.weight_decay"):
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
