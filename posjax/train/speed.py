"""How fast a run is, against what its devices can do."""
import resource
import sys
import time

import jax
import jax.numpy as jnp

from posjax.models.decoder import DTYPES
from posjax.train.replicas import over_replicas, place

_PEAK_SIZE = 1024


def step_flops(experiment):
    """Model FLOPs of one optimiser step of one replica: a token costs `6 N + 12 L H Dh T`.

    N counts all parameters (the token table once, for the logits); nothing that is computed twice or beside the model counts.
    After Chowdhery et al. 2022 (PaLM, arXiv 2204.02311, appendix B).
    """
    model, tokens = experiment.sizes, experiment.train_tokens
    a_token = 6 * experiment.num_params + 12 * model.depth * model.num_heads * model.head_dim * tokens
    return a_token * experiment.config.train.batch_size * tokens


def matmul_peak(mesh, dtype):
    """FLOPs a second that the devices of a mesh reach together, each on products of 1024 x 1024 matrices; the best of five."""
    count = mesh.size
    x = place(jnp.full((count, _PEAK_SIZE, _PEAK_SIZE), 1 / _PEAK_SIZE, DTYPES[dtype]), mesh)
    product = jax.jit(over_replicas(lambda x: x @ (x @ x), mesh))
    product(x).block_until_ready()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        product(x).block_until_ready()
        times.append(time.perf_counter() - started)
    return count * 4 * _PEAK_SIZE**3 / min(times)


def memory_bytes(devices):
    """The most memory that was in use: of the devices where they tell, else of this process."""
    stats = [device.memory_stats() or {} for device in devices]  # None of a CPU
    if all("peak_bytes_in_use" in found for found in stats):
        return sum(found["peak_bytes_in_use"] for found in stats)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def speed_record(experiment, mesh, *, steps, seconds):
    """What DONE says of the speed of `steps` steps of all replicas, after the compilation.

    `model_flop_utilisation` is the share of `matmul_peak`, measured now, that the model FLOPs of a step took.
    """
    peak = matmul_peak(mesh, experiment.config.model.dtype)
    replicas = len(experiment.replicas)
    flops = replicas * step_flops(experiment)
    tokens = replicas * experiment.config.train.batch_size * experiment.train_tokens
    return {
        "tokens_per_second": steps * tokens / seconds, "step_seconds": seconds / steps, "step_flops": flops,
        "matmul_flops_per_second": peak, "model_flop_utilisation": steps * flops / seconds / peak,
        "peak_memory_bytes": memory_bytes(mesh.devices.flat),
    }
