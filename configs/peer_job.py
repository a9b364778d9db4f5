"""The example job of the closest JAX peer: string duplication, trained at lengths 1 to 40, evaluated at all of 1 to 100.

As DeepMind's randomized_positional_encodings runs it (5 layers, width 64, 8 heads, batch 128, binary strings): 600 steps, then
512 strings at every length. `time posjax train --config=configs/peer_job.py`; what it takes is in experiments/throughput.
"""
import posjax


def get_config():
    config = posjax.default_config(scheme="rope", task="copy")
    config.num_seeds = 1
    config.task.update(symbols=2, times=2)
    config.model.update(depth=5, num_heads=8)
    config.train.update(steps=600, batch_size=128, learning_rate=1e-3)
    config.train.lengths.max = 40
    config.eval.update(lengths=tuple(range(1, 101)), every=0)
    return config
