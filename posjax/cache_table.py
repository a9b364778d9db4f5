"""`posjax cache`: what a key-value cache takes, by the shapes of the real one."""
import json

import jax
import jax.numpy as jnp
from flax import nnx

from posjax import config as configs
from posjax import listing
from posjax.errors import UserError, unknown
from posjax.schemes.attend import make_cache
from posjax.schemes.registry import SCHEMES, make_scheme

LENGTHS = (4_096, 32_768, 131_072, 1_048_576)
# How keys and values come, and how they are held.
DTYPES = {"float32": (jnp.float32, None), "bfloat16": (jnp.bfloat16, None), "int8": (jnp.bfloat16, "int8")}
CONCLUSION = "Whatever the positional trick, a cache grows with each token; only a window ends that."


def cache_bytes(scheme="rope", tokens=4_096, *, layers=1, heads=8, head_dim=64, groups=None, dtype="bfloat16", window=None,
                **hyper):
    """Bytes of the cache of one row: keys, values, scales, positions, segments, and whatever else the scheme keeps.

    Args:
      scheme: a registered name.
      tokens: that the row has.
      layers: of the model, all alike.
      heads, head_dim: of the queries, H, and channels a head, Dh; the width is taken to be their product.
      groups: heads of keys and values; None for `heads`.
      dtype: "float32", "bfloat16" or "int8".
      window: the number of visible keys; None for all.
      **hyper: the scheme's hyper-parameters.

    Raises:
      ValueError: an unknown scheme, dtype or hyper-parameter, or a number that cannot be.
    """
    if dtype not in DTYPES:
        raise unknown("dtype of a cache", dtype, DTYPES)
    for name, value in (("layers", layers), ("groups", groups)):
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1.")
    if groups is not None and heads % groups:
        raise UserError(f"The {heads} query heads are not a multiple of the {groups} key heads.")
    held, quantise = DTYPES[dtype]

    def make():
        made = make_scheme(scheme, num_heads=heads, head_dim=head_dim, rngs=nnx.Rngs(0), **hyper)
        return make_cache(made, tokens, batch_size=1, num_groups=groups, dtype=held, window=window, quantise=quantise)
    return layers * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(make)))


def cache_table(scheme="rope", *, window=None, **options):
    """`cache_bytes` for a token more and at 4k, 32k, 128k and 1M tokens, as a dict; arguments as there."""
    def totals(window):
        return {tokens: cache_bytes(scheme, tokens, window=window, **options) for tokens in LENGTHS}
    one, two = (cache_bytes(scheme, tokens, **options) for tokens in (1, 2))
    return {"bytes_per_token": two - one, "dense": totals(None), "window": None if window is None else totals(window)}


def command(scheme, hyper, *, as_json, **options):
    """Prints the table; `hyper` as `{"base": "500.0"}`, read as config overrides are."""
    known = SCHEMES.hyper(scheme)
    for key in hyper:
        if key not in known:
            raise unknown(f"hyper-parameter of {scheme}, or option,", key, [*known, *options])
    values = configs.override(configs.default_config(scheme), {f"scheme.{key}": value for key, value in hyper.items()}).scheme
    found = cache_table(scheme, **options, **{key: value for key, value in values.items() if key != "name"})
    if as_json:
        print(json.dumps({"scheme": scheme, **options, **found}, indent=2))
        return
    columns = {"all tokens": found["dense"]}
    if found["window"] is not None:
        columns[f"a window of {options['window']}"] = found["window"]
    print(listing.text([{"tokens": f"{tokens:,}", **{name: _size(of[tokens]) for name, of in columns.items()}}
                        for tokens in LENGTHS]))
    print(f"{found['bytes_per_token']:,} bytes a token. {CONCLUSION}")


def _size(count):
    return f"{count / 2**20:,.1f} MiB" if count < 2**30 else f"{count / 2**30:,.2f} GiB"
