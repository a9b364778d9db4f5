"""Replicas: runs that differ by data (a seed, a learning rate), trained side by side as one leading axis."""
import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

AXIS = "replica"


def replica_mesh(num_replicas):
    """A mesh of as many devices as divide the replicas evenly."""
    count = max(n for n in range(1, min(num_replicas, jax.local_device_count()) + 1) if num_replicas % n == 0)
    return jax.make_mesh((count,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.local_devices()[:count])


def over_replicas(function, mesh, *, num_shared=0):
    """Maps `function(replica_tree, *shared)` over the leading axis of its first argument.

    Devices hold equal shares of the replicas; within a device they run as `one_by_one` says.
    """
    def local(trees, *shared):
        if one_by_one(mesh):
            return jax.lax.map(lambda tree: function(tree, *shared), trees)
        return jax.vmap(lambda tree: function(tree, *shared))(trees)
    return jax.shard_map(local, mesh=mesh, in_specs=(PartitionSpec(AXIS),) + (PartitionSpec(),) * num_shared,
                         out_specs=PartitionSpec(AXIS), check_vma=False)


def one_by_one(mesh):
    """Whether the replicas of a device run one after the other; else all at once under `vmap`, which keeps a GPU or TPU busy.

    On a CPU `vmap` loses: it turns every matrix product into a batched one and brings back transposed copies.
    """
    return mesh.devices.flat[0].platform == "cpu"


def place(tree, mesh):
    """Puts the leading axis of every leaf over the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(AXIS)))
