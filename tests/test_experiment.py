"""What a config's sections on layers and temperatures build."""
import jax
import numpy as np
import pytest
import tiny

from posjax import config as configs
from posjax.experiment import Experiment
from posjax.registry import beside_scheme


def build(scheme="rope", **overrides):
    return Experiment.build(tiny.config(scheme, **{"model.depth": 4, **overrides}))


def test_blocks_of_another_kind():
    """As Gemma 3: windowed blocks, and every n-th without a window and with another base."""
    experiment = build(**{"layers.window": 3, "layers.other_every": 2, "layers.other": "scaled_rope", "layers.other.base": 1e6,
                          "layers.other.rope_type": "linear", "layers.other.factor": 8.0})
    params = experiment.init(0)
    tokens = np.arange(8, dtype=np.int32)[None] % 5
    assert experiment.apply(params, tokens).shape == (1, 8, experiment.task.vocab_size)
    plain = build().apply(params, tokens)
    assert np.abs(plain - experiment.apply(params, tokens)).max() > 1e-4
    assert experiment.attention_backend == "dense"


def test_a_temperature_for_the_other_blocks_only():
    """As Llama 4: blocks without rotation get a temperature."""
    experiment = build(**{"layers.other_every": 2, "layers.other_temperature": "ssmax"})
    assert [leaf.shape for leaf in jax.tree.leaves(experiment.init(0)["layers"])] == [(2,)]  # one a head
    assert "layers" not in build(temperature="log_n").init(0)


def test_own_parameters_come_with_their_blocks():
    assert len(jax.tree.leaves(build("t5", **{"layers.parameters": "own"}).init(0)["layers"])) == 4
    assert build("learned", **{"layers.other_every": 4, "scheme.max_length": 20}).max_length == 20


def test_what_stands_beside_a_scheme_is_told_in_words():
    def words(**overrides):
        return beside_scheme(configs.to_json(tiny.config("rope", **overrides)))
    assert words() == []
    assert words(temperature="yarn") == ["temperature yarn (mscale=1.0, scale=4.0)"]
    assert words(**{"layers.window": 8, "layers.other_every": 4, "layers.other_temperature": "log_n",
                    "layers.parameters": "own"}) == [
        "window 8", "own parameters in its layers",
        "every layer that 4 divides nope and temperature log_n (below=False, length=512)"]


@pytest.mark.parametrize("overrides, words", [
    ({"layers.other_every": 5}, "layers.other_every is 5; it must be from 0 .none. to the number of blocks, 4"),
    ({"layers.other": "rop"}, "rope"),
    ({"layers.other": "alibi"}, "layers.other is alibi, but no block is of the other kind"),
    ({"layers.other_temperature": "log_n"}, "layers.other_temperature is log_n, but no block"),
    ({"layers.window": 0}, "window is 0"),
    ({"layers.parameters": "each"}, "own"),
    ({"temperature": "yarn", "temperature.scale": -1.0}, "scale is -1.0"),
    ({"temperature.length": 3}, "temperature.length"),
])
def test_what_cannot_be_built_is_told(overrides, words):
    with pytest.raises(ValueError, match=words):
        build(**overrides)
