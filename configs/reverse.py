"""Write a string of up to 16 symbols backwards; evaluated at up to 64. Argument: the scheme (default: rope)."""
import posjax


def get_config(scheme="rope"):
    config = posjax.default_config(scheme=scheme, task="reverse")
    config.eval.lengths = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64)
    return config
