import os
import shutil
import signal
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from posjax.errors import UserError
from posjax.io.checkpoints import Checkpoints, restore_params

KILLED = """
import os, signal, sys
import jax.numpy as jnp
from posjax.io import checkpoints
directory, moment = sys.argv[1:]
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
store = checkpoints.Checkpoints(directory)
state = lambda step: {"params": {"w": jnp.full(4_000_000, step, jnp.float32)}}
store.save(1, state(1))
store.wait()
if moment == "just before the commit":
    checkpoints._seal_all = die
store.save(2, state(2))
die()
"""

SHARDED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from posjax.io.checkpoints import Checkpoints
mesh = jax.make_mesh((2,), ("replica",), axis_types=(jax.sharding.AxisType.Auto,))
split, whole = jax.NamedSharding(mesh, jax.P("replica")), jax.NamedSharding(mesh, jax.P())
state = {"params": {"w": jax.random.normal(jax.random.key(0), (2, 500_000))},
         "keys": jax.random.split(jax.random.key(1)), "step": jnp.int32(7)}
state = jax.tree.map(lambda x: jax.device_put(x, split if x.ndim else whole), state)
abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
before = np.array(state["params"]["w"]), np.array(jax.random.key_data(state["keys"]))
train = jax.jit(lambda w: w * 0 - 1, donate_argnums=0)
with Checkpoints(sys.argv[1]) as store:
    store.save(7, state)
    w = state["params"]["w"]
    for _ in range(3):
        w = train(w)  # donates what is being saved
    jax.block_until_ready(w)
back = Checkpoints(sys.argv[1]).restore(abstract)
assert jax.tree.map(lambda x: x.sharding, back) == jax.tree.map(lambda x: x.sharding, abstract)
assert len(back["params"]["w"].addressable_shards) == 2 and back["params"]["w"].addressable_shards[0].data.shape[0] == 1
np.testing.assert_array_equal(back["params"]["w"], before[0])
np.testing.assert_array_equal(jax.random.key_data(back["keys"]), before[1])
assert jax.dtypes.issubdtype(back["keys"].dtype, jax.dtypes.prng_key) and back["step"] == 7
"""

ONE_DEVICE = """
import sys
import jax
from posjax.io.checkpoints import restore_params
assert jax.device_count() == 1
assert restore_params(sys.argv[1])[1]["w"].shape == (2, 500_000)
"""


def run_script(script, *args, **env):
    return subprocess.run([sys.executable, "-W", "error", "-c", script, *map(str, args)], check=False,
                          env={**os.environ, **env}, capture_output=True, text=True, timeout=60)


def make_state(value=1.0):
    params = {
        "embed": jnp.full((5, 3), value / 3),
        "layers": {0: {"w": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), "scheme": {}}, 1: {"w": jnp.ones((2, 3))}},
    }
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {"params": params, "opt_state": optimiser.init(params), "key": jax.random.key(3), "step": jnp.int32(value)}


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def fill(directory, *steps):
    with Checkpoints(directory) as store:
        for step in steps:
            store.save(step, make_state(step))


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """Checkpoints of steps 1 and 2; copied by the tests that damage it."""
    directory = tmp_path_factory.mktemp("two") / "checkpoints"
    fill(directory, 1, 2)
    return directory


@pytest.fixture
def copied(two_steps, tmp_path):
    return shutil.copytree(two_steps, tmp_path / "checkpoints")


def test_nothing_there_is_none_and_makes_nothing(tmp_path):
    store = Checkpoints(tmp_path / "checkpoints")
    assert store.latest() is None and store.restore(abstract(make_state())) is None
    with pytest.raises(UserError, match="no readable checkpoint"):
        restore_params(tmp_path / "checkpoints")
    assert list(tmp_path.iterdir()) == []


def test_state_comes_back_bit_for_bit(two_steps):
    store = Checkpoints(two_steps)
    assert store.latest() == 2
    assert_same(store.restore(abstract(make_state())), make_state(2))
    assert_same(store.restore(abstract(make_state()), step=1), make_state(1))


def test_the_latest_two_are_kept(tmp_path):
    fill(tmp_path, 1, 5, 9)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["5", "9"]


def test_saving_a_step_again_changes_nothing_and_saving_goes_on_after_reopening(copied):
    with Checkpoints(copied) as store:
        store.save(2, make_state(7))
        store.save(3, make_state(3))
        assert store.latest() == 3
        assert_same(store.restore(abstract(make_state()), step=2), make_state(2))


def test_params_alone_come_back_with_and_without_their_tree(two_steps):
    params = make_state(2)["params"]
    step, restored = restore_params(two_steps)
    assert step == 2 and set(restored["layers"]) == {0, 1}
    assert_same(restored, params)
    assert_same(restore_params(two_steps, abstract(params), step=1)[1], make_state(1)["params"])


def test_another_model_is_an_error_not_a_damaged_checkpoint(two_steps):
    other = abstract(make_state())
    other["params"]["embed"] = jax.ShapeDtypeStruct((5, 4), jnp.float32)
    with pytest.raises(UserError, match=r"params/embed is float32\[5,3\] there, float32\[5,4\] here"):
        Checkpoints(two_steps).restore(other)
    del other["params"]["embed"]
    with pytest.raises(UserError, match=r"params/embed is float32\[5,3\] there, absent here"):
        restore_params(two_steps, other["params"])


def test_a_missing_step_is_an_error_that_names_the_others(two_steps):
    with pytest.raises(UserError, match=r"step 7 .* Steps there: 2, 1\."):
        Checkpoints(two_steps).restore(abstract(make_state()), step=7)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x55
    path.write_bytes(data)


DAMAGE = {
    "a flipped bit in the arrays": lambda step: flip(max(step.glob("state/ocdbt.process_0/d/*"))),
    "a truncated file": lambda step: os.truncate(max(step.glob("state/d/*")), 10),
    "a missing file": lambda step: (step / "state" / "manifest.ocdbt").unlink(),
    "no seal": lambda step: (step / "seal.json").unlink(),
    "half a seal": lambda step: os.truncate(step / "seal.json", 10),
    "an empty directory": lambda step: (shutil.rmtree(step), step.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(copied, damage):
    DAMAGE[damage](copied / "2")
    store = Checkpoints(copied)
    with pytest.warns(UserWarning, match=r"checkpoints/2 is passed over: it (is|cannot)") as caught:
        restored = store.restore(abstract(make_state()))
    assert len(caught) == 1
    assert_same(restored, make_state(1))
    assert store.latest() == 1  # said once
    with pytest.raises(UserError, match="No usable checkpoint of step 2"):
        store.restore(abstract(make_state()), step=2)


def test_training_past_a_damaged_checkpoint_replaces_it(copied):
    flip(copied / "2" / "state" / "manifest.ocdbt")
    with Checkpoints(copied) as store:
        with pytest.warns(UserWarning, match="passed over"):
            assert store.latest() == 1
        store.save(2, make_state(2))
    assert_same(Checkpoints(copied).restore(abstract(make_state())), make_state(2))


def test_no_readable_checkpoint_is_none(copied):
    flip(copied / "1" / "state" / "manifest.ocdbt")
    flip(copied / "2" / "state" / "manifest.ocdbt")
    with pytest.warns(UserWarning, match="passed over") as caught:
        assert Checkpoints(copied).latest() is None
    assert len(caught) == 2


@pytest.mark.parametrize("moment", ["while writing", "just before the commit"])
def test_a_save_that_is_killed_leaves_the_previous_one(tmp_path, moment):
    result = run_script(KILLED, tmp_path, moment)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["1", "2.orbax-checkpoint-tmp"]
    store = Checkpoints(tmp_path)
    assert store.latest() == 1
    step, params = restore_params(tmp_path)
    assert step == 1 and bool((params["w"] == 1).all())
    store.save(3, {"params": {"w": jnp.full(4, 3.0)}})
    store.close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["1", "3"]  # the remains are gone
    assert store.latest() == 3


def test_a_sharded_state_survives_donation_and_comes_back_sharded(tmp_path):
    result = run_script(SHARDED, tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # orbax has nothing to say
    # Parameters can be read where there are fewer devices than wrote them.
    result = run_script(ONE_DEVICE, tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=1", JAX_PLATFORMS="cpu")
    assert result.returncode == 0, result.stderr


def test_orbax_says_nothing_when_all_is_well(tmp_path, capfd):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fill(tmp_path, 1)
        Checkpoints(tmp_path).restore(abstract(make_state()))
        restore_params(tmp_path)
    assert caught == [] and capfd.readouterr().err == ""
