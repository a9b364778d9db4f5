"""What devices share, and parts, change nothing of what is trained and measured."""
import functools

import jax
import numpy as np
import pytest
import tiny

from posjax.errors import UserError
from posjax.eval.extrapolation import Evaluator
from posjax.experiment import Experiment
from posjax.train import chunk as chunks
from posjax.train.replicas import replica_mesh, seeds_array

STEPS = 5
SIZES = {"num_seeds": 1, "train.batch_size": 8, "train.chunk_steps": STEPS, "model.depth": 2, "train.lengths.max": 5}


@functools.cache
def trained(scheme="rope", positions="sequential", dtype="float32", **more):
    """Losses and final parameters of a few steps, and the evaluation of those parameters."""
    own = {"scheme.max_length": 64} if scheme == "learned" else {}
    own |= {"positions.train.name": positions, "model.dtype": dtype}
    experiment = Experiment.build(tiny.config(scheme, **SIZES | own | {key.replace("__", "."): more[key] for key in more}))
    mesh = experiment.mesh
    seeds = seeds_array(experiment.seeds, mesh)
    chunk = chunks.make_chunk(experiment, mesh)
    state, metrics = chunk(chunks.init_state(experiment, seeds, mesh), seeds, np.int32(0), np.int32(STEPS))
    params = jax.tree.map(np.asarray, state["params"])
    rows = Evaluator(experiment, mesh)(state["params"], seeds, STEPS, (9,), 1000)  # several batches
    return {name: np.asarray(metrics[name]) for name in chunks.METRICS}, params, rows


def assert_same(left, right, tolerance=1e-5):
    """Sums in another order: see `assert_same_training` in test_chunk.py. A row or token lost is off by 1e-2 and more."""
    for name in chunks.METRICS:
        np.testing.assert_allclose(left[0][name], right[0][name], rtol=tolerance)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance), left[1], right[1])
    for one, other in zip(left[2], right[2], strict=True):
        assert one["exact_match"] == other["exact_match"] and one["num_examples"] == other["num_examples"]
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=tolerance)
        np.testing.assert_allclose(one["per_position"], other["per_position"])


@pytest.mark.parametrize("more", [
    {"mesh__data": 2}, {"mesh__data": 4}, {"mesh__sequence": 2}, {"mesh__sequence": 4}, {"train__microbatches": 4},
    {"model__remat": True}, {"mesh__data": 2, "mesh__sequence": 2, "train__microbatches": 2, "model__remat": True},
], ids=str)
def test_devices_and_parts_change_nothing(more):
    assert_same(trained(), trained(**more))


@pytest.mark.parametrize("scheme, positions", [
    ("kerple", "sequential"), ("pope", "randomised"), ("learned", "randomised"), ("fox", "sequential"),
    ("shaw", "coupled")])
def test_they_change_nothing_of_any_kind_of_scheme(scheme, positions):
    """What bounds its parameters, adds to the embeddings, reads hidden states, adds to values; a row's own positions."""
    more = {"positions__train__max_position": 64} if positions == "randomised" else {}
    alone = trained(scheme, positions, **more)
    assert_same(alone, trained(scheme, positions, mesh__data=2, mesh__sequence=2, train__microbatches=2, **more))


def test_replicas_and_rows_divide_the_devices():
    both = trained(num_seeds=2, mesh__data=2)
    for index, seed in enumerate((0, 1)):
        alone = trained(seed=seed)
        assert_same(alone, ({name: value[index:index + 1] for name, value in both[0].items()},
                            jax.tree.map(lambda leaf, index=index: leaf[index:index + 1], both[1]),
                            [row for row in both[2] if row["seed"] == seed]))


def test_bfloat16_trains_as_float32_does():
    half, full = trained(dtype="bfloat16"), trained()
    np.testing.assert_allclose(half[0]["loss"], full[0]["loss"], rtol=0.02)
    assert (half[0]["loss"] != full[0]["loss"]).all()
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(half[1])} == {"float32"}


def lowered(**more):
    experiment = Experiment.build(tiny.config(**SIZES | {"train.batch_size": 256, "model.depth": 4} | more))
    seeds = seeds_array(experiment.seeds, experiment.mesh)
    state = jax.eval_shape(lambda: chunks.init_state(experiment, seeds, experiment.mesh))
    return chunks.make_chunk(experiment, experiment.mesh).lower(state, seeds, np.int32(0), np.int32(0))


def test_parts_take_less_memory():
    whole, parts = (lowered(**more).compile().memory_analysis().temp_size_in_bytes for more in ({}, {"train.microbatches": 4}))
    assert parts < 0.5 * whole


def test_blocks_are_computed_again_where_it_is_asked_for():
    """In the program: what it saves shows on GPU and TPU, XLA on CPU merges the two computations into one."""
    plain, remat = (lowered(**{"model.remat": remat}).as_text() for remat in (False, True))
    products = [text.count("stablehlo.dot_general") for text in (plain, remat)]
    assert products[1] >= products[0] + 4 * 5  # of each block the projections and the first product of the MLP
    assert remat.count("optimization_barrier") >= 4


@pytest.mark.parametrize("replicas, axes, says", [
    (3, {"replica": 2}, "mesh.replica is 2, which does not divide the 3 replicas"),
    (2, {"data": 0}, "mesh.data is 0; it must be at least 1"),
    (2, {"sequence": -1}, "mesh.sequence is -1"),
    (2, {"replica": -1}, "mesh.replica is -1; it must be at least 0"),
    (2, {"replica": 2, "data": 4}, "mesh.replica 2 x mesh.data 4 x mesh.sequence 1 needs 8 devices; there are 4"),
])
def test_a_mesh_that_cannot_be_is_refused(replicas, axes, says):
    with pytest.raises(UserError, match=says):
        replica_mesh(replicas, **axes)


@pytest.mark.parametrize("overrides, says", [
    ({"mesh.data": 3}, "train.batch_size 4 does not divide by mesh.data 3 x train.microbatches 1"),
    ({"train.microbatches": 3}, "does not divide by mesh.data 1 x train.microbatches 3"),
    ({"train.microbatches": 0}, "train.microbatches is 0; it must be at least 1"),
    ({"mesh.replica": 3}, "mesh.replica is 3, which does not divide num_seeds 2"),
])
def test_a_config_that_cannot_be_divided_is_refused(overrides, says):
    with pytest.raises(UserError, match=says):
        Experiment.build(tiny.config(**overrides))


@pytest.mark.parametrize("replicas, axes, shape", [
    (1, {}, (1, 1, 1)), (3, {}, (3, 1, 1)), (5, {}, (1, 1, 1)), (6, {}, (3, 1, 1)), (8, {}, (4, 1, 1)),
    (4, {"data": 2}, (2, 2, 1)), (4, {"replica": 1}, (1, 1, 1)), (3, {"data": 2, "sequence": 2}, (1, 2, 2))])
def test_the_replica_axis_takes_the_devices_that_are_left(replicas, axes, shape):
    assert replica_mesh(replicas, **axes).devices.shape == shape
