"""Recall up to 8 key-value pairs, all asked for; evaluated at up to 32 pairs. Argument: the scheme (default: rope)."""
import posjax


def get_config(scheme="rope"):
    config = posjax.default_config(scheme=scheme, task="mqar")
    config.train.lengths.max = 8
    config.eval.lengths = (1, 2, 4, 8, 12, 16, 24, 32)
    return config
