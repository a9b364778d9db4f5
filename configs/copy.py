"""Copy a string of up to 16 symbols that may repeat; evaluated at up to 128.

The argument is the scheme: `posjax train --config=configs/copy.py:alibi` (default: rope). What to expect, and what it
costs, is the README's first table.
"""
import posjax


def get_config(scheme="rope"):
    config = posjax.default_config(scheme=scheme, task="copy")
    if scheme == "learned":
        # A row for every training position and none beyond: the longest training sequence feeds 33 tokens. The rows
        # start at the size of the decoder's token vectors, as GPT-2's do at the size of its own.
        config.scheme.update(max_length=33, init_scale=1.0)
    return config
