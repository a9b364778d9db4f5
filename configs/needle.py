"""Find the value of a key planted in noise of up to 64 tokens; evaluated by depth at up to 256. Argument: the scheme."""
import posjax


def get_config(scheme="rope"):
    config = posjax.default_config(scheme=scheme, task="needle")
    config.task.update(key_length=1, value_length=2, key_symbols=16)
    config.train.lengths.update(min=4, max=64)
    config.eval.lengths = (8, 16, 32, 64, 96, 128, 256)
    return config
