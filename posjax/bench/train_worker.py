"""A worker that trains as a run does: the same chunk of steps, compiled the same way, on as many virtual devices."""
import time

from posjax.bench.workers import serve
from posjax.cli import use_cpu_devices


def prepare(job):
    """`job` has a config's overrides of the default config. Answers "train" after so many steps, "peak" with FLOPs a second."""
    from posjax.config import default_config, override
    config = override(default_config(), job)
    use_cpu_devices(config.num_seeds)
    import jax
    import numpy as np

    from posjax.experiment import Experiment
    from posjax.train.chunk import init_state, make_chunk
    from posjax.train.replicas import replica_mesh, seeds_array
    from posjax.train.speed import matmul_peak, step_flops
    experiment = Experiment.build(config)
    mesh = replica_mesh(len(experiment.seeds))
    seeds = seeds_array(experiment.seeds, mesh)
    state, step = init_state(experiment, seeds, mesh), 0
    started = time.monotonic()
    chunk = make_chunk(experiment, mesh).lower(state, seeds, np.int32(0), np.int32(0)).compile()
    about = {"compile_seconds": time.monotonic() - started, "devices": mesh.size, "parameters": experiment.num_params,
             "flops": len(experiment.seeds) * step_flops(experiment),
             "tokens": len(experiment.seeds) * config.train.batch_size * experiment.train_tokens}

    def train(count):
        nonlocal state, step
        for _ in range(0, count, config.train.chunk_steps):
            steps = min(count, config.train.chunk_steps)
            state, metrics = chunk(state, seeds, np.int32(step), np.int32(steps))
            step, count = step + steps, count - steps
        return {"loss": float(np.asarray(metrics["loss"])[:, steps - 1].mean())}
    return about, {"train": train, "peak": lambda count: {"flops": max(matmul_peak(mesh, "float32") for _ in range(count))}}


if __name__ == "__main__":
    serve(prepare)
