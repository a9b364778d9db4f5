"""Replicas: runs that differ by seed, trained side by side as one leading axis."""
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

AXIS = "replica"


def replica_mesh(num_replicas):
    """A mesh of as many devices as divide the replicas evenly."""
    count = max(n for n in range(1, min(num_replicas, jax.local_device_count()) + 1) if num_replicas % n == 0)
    return jax.make_mesh((count,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.local_devices()[:count])


def over_replicas(function, mesh, *, num_shared=0):
    """Maps `function(replica_tree, *shared)` over the leading axis of its first argument.

    Devices hold equal shares of the replicas; within a device they run one after the other. On a CPU that beats
    `vmap`, which turns every matrix product into a batched one and brings back transposed copies.
    """
    def local(trees, *shared):
        return jax.lax.map(lambda tree: function(tree, *shared), trees)
    return jax.shard_map(local, mesh=mesh, in_specs=(PartitionSpec(AXIS),) + (PartitionSpec(),) * num_shared,
                         out_specs=PartitionSpec(AXIS), check_vma=False)


def place(tree, mesh):
    """Puts the leading axis of every leaf over the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(AXIS)))


def seeds_array(seeds, mesh):
    """uint32 `[R]` over the mesh."""
    return place(jnp.asarray(seeds, jnp.uint32), mesh)
