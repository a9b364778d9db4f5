"""Where a run computes: a mesh of devices over replicas, rows of a batch, and tokens of a sequence."""
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from posjax.errors import UserError

REPLICA, DATA, SEQUENCE = AXES = ("replica", "data", "sequence")


def replica_mesh(num_replicas, *, replica=0, data=1, sequence=1):
    """A mesh over the axes "replica", "data" and "sequence".

    Args:
      num_replicas: runs that differ by seed; each is on one place along the replica axis.
      replica: devices along that axis, a divisor of `num_replicas`; 0 for as many as there are for it.
      data: devices that share the rows of each batch.
      sequence: devices that share the tokens of each sequence.

    Raises:
      ValueError: a number that is too small, that does not divide, or more devices than there are.
    """
    devices = jax.devices()
    for name, number, least in (("replica", replica, 0), ("data", data, 1), ("sequence", sequence, 1)):
        if number < least:
            raise UserError(f"mesh.{name} is {number}; it must be at least {least}.")
    if replica and num_replicas % replica:
        raise UserError(f"mesh.replica is {replica}, which does not divide the {num_replicas} replicas.")
    most = len(devices) // (data * sequence)
    if not most or replica > most:
        asked = " x ".join(f"mesh.{name} {number}" for name, number in
                           (("replica", max(replica, 1)), ("data", data), ("sequence", sequence)))
        raise UserError(f"{asked} needs {max(replica, 1) * data * sequence} devices; there are {len(devices)} of "
                        f"{jax.default_backend()}.")
    if not replica:
        replica = max(n for n in range(1, min(num_replicas, most) + 1) if num_replicas % n == 0)
    shape = (replica, data, sequence)
    chosen = _spread(devices, math.prod(shape))
    if idle := {device.process_index for device in devices} - {device.process_index for device in chosen}:
        raise UserError(f"A mesh of replica {replica} x data {data} x sequence {sequence} devices leaves process "
                        f"{min(idle)} of {jax.process_count()} without one: choose mesh.data or mesh.replica "
                        "so that all have work.")
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=chosen)


def _spread(devices, count):
    """The first `count` devices, taken in turn from each process, in the order of processes."""
    by_process = {}
    for device in sorted(devices, key=lambda device: device.id):
        by_process.setdefault(device.process_index, []).append(device)
    in_turn = [device for one_each in itertools.zip_longest(*by_process.values()) for device in one_each if device is not None]
    return sorted(in_turn[:count], key=lambda device: (device.process_index, device.id))


def over_replicas(function, mesh, *, num_shared=0):
    """Maps `function(replica_tree, *shared)` over the leading axis of its first argument.

    Places along the replica axis hold equal shares of the replicas; within one they run one after the other. On a CPU that
    beats `vmap`, which turns every matrix product into a batched one and brings back transposed copies. Along the other axes of
    the mesh every device computes the same unless `function` divides the work by `my_part`, and sums by `total`.
    """
    def local(trees, *shared):
        return jax.lax.map(lambda tree: function(tree, *shared), trees)
    return jax.shard_map(local, mesh=mesh, in_specs=(PartitionSpec(REPLICA),) + (PartitionSpec(),) * num_shared,
                         out_specs=PartitionSpec(REPLICA), check_vma=False)


def my_part(x, dim, axis, mesh):
    """The equal part of dimension `dim` that falls to this device along an axis of the mesh; within `over_replicas`."""
    count = mesh.shape[axis]
    if count == 1:
        return x
    size = x.shape[dim] // count
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * size, size, dim)


def my_tokens(batch, positions, mesh):
    """The tokens of a batch `[B, T]` that fall to this device, and their positions, `[B, T]` or `[T]`; within `over_replicas`.

    Sequences are padded at the end to what the devices divide: tokens that count for nothing and stand where the last one does.
    """
    more = -batch.tokens.shape[1] % mesh.shape[SEQUENCE]

    def mine(x, **kind):
        if more:
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)], **kind)
        return my_part(x, x.ndim - 1, SEQUENCE, mesh)
    return jax.tree.map(mine, batch), mine(positions, mode="edge")


def whole(x, dim, axis, mesh):
    """What `my_part` divided, put together again on every device."""
    return jax.lax.all_gather(x, axis, axis=dim, tiled=True) if mesh.shape[axis] > 1 else x


def sequence_axis(mesh):
    """The name of the axis over which a sequence's tokens are spread, for the model; None where they are together."""
    return SEQUENCE if mesh.shape[SEQUENCE] > 1 else None


def total(tree, mesh):
    """The sum over all devices that share a replica's work; within `over_replicas`."""
    axes = tuple(axis for axis in (DATA, SEQUENCE) if mesh.shape[axis] > 1)
    return jax.lax.psum(tree, axes) if axes else tree


def place(tree, mesh, *axes):
    """Puts the leading axis of every leaf over the mesh: over its replica axis, or those named."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(axes or REPLICA)))


def seeds_array(seeds, mesh):
    """uint32 `[R]` over the mesh."""
    return place(np.asarray(seeds, np.uint32), mesh)
