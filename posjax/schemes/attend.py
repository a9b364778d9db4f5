"""Attention under a positional scheme, over a whole sequence or from a cache."""
import functools

import jax
import jax.numpy as jnp
import numpy as np

from posjax.errors import UserError
from posjax.ops.attention import check_call, check_window, make_call, run
from posjax.ops.caches.cache import KVCache, Tokens
from posjax.ops.rotary import as_data, check_positions
from posjax.schemes.base import Scheme


def attend(scheme, q, k, v, *, q_positions=None, k_positions=None, q_segment_ids=None, k_segment_ids=None,
           features=None, window=None, causal=True, backend="auto"):
    """Attention under a positional scheme: rotates, biases, masks, and attends.

    Queries stand at the end of the keys when there are fewer of them, so one decode step is a call with one query.
    What a scheme adds to embeddings (`scheme.embed`) is the caller's to add before q, k and v are made.

    Args:
      scheme: a `posjax.Scheme`.
      q: `[B, Q, H, Dh]`.
      k, v: `[B, K, G, Dh]`; H is a multiple of G.
      q_positions, k_positions: int32 `[Q]`, `[K]`, or with a leading B; None for 0 .. K-1 and the last Q of them.
      q_segment_ids, k_segment_ids: int32 `[B, Q]`, `[B, K]`: tokens of different segments never see each other.
      features: `scheme.features(x)` of the K tokens, for a scheme that has any.
      window: number of visible keys with the query's own; None for all.
      causal: whether a query sees no later key.
      backend: "auto", or the name of one (`posjax.ops.attention.BACKENDS`).

    Returns:
      `[B, Q, H, Dh]` in the dtype of `q`.

    Raises:
      ValueError: shapes that do not fit, missing features, a scheme that is causal only without the causal mask, or a
        backend that cannot serve the call.
    """
    return run(attend_call(scheme, q, k, v, q_positions=q_positions, k_positions=k_positions, q_segment_ids=q_segment_ids,
                           k_segment_ids=k_segment_ids, features=features, window=window, causal=causal), backend)


def attend_call(scheme, q, k, v, *, q_positions=None, k_positions=None, q_segment_ids=None, k_segment_ids=None,
                features=None, window=None, causal=True, platform=None):
    """The `posjax.ops.attention.AttentionCall` by which `attend` serves these arguments, to choose a backend for.

    `platform` is where it would be computed, "cpu", "gpu" or "tpu"; None for where jax computes by default.
    """
    check_queries(scheme, q)
    check_features(scheme, features)
    check_causal(scheme, causal)
    q_len, k_len = q.shape[1], k.shape[1]
    if k_positions is None:
        k_positions = np.arange(k_len, dtype=np.int32)  # known when tracing: backends may rely on their order
    check_positions(k_positions, k.shape[:2], "k_positions")
    if q_positions is None:
        # The queries are the last of the keys, wherever those are.
        q_positions = k_positions[..., k_len - q_len:] if q_len <= k_len else np.arange(q_len, dtype=np.int32)
    # Before the rotation, which would broadcast positions of a wrong shape.
    check_call(q, k, v, q_positions, k_positions, q_segment_ids, k_segment_ids, causal, window)
    rotary = None
    if type(scheme).rotate is Scheme.rotate and scheme.logits is None and scheme.temperature is None:
        rotary = scheme.rotary_of(as_data(k_positions))  # a kernel may rotate as it goes
    else:
        q, k = scheme.rotate(q, k, as_data(q_positions), as_data(k_positions))
    return _rotated_call(scheme, q, k, v, q_positions=q_positions, k_positions=k_positions, q_segment_ids=q_segment_ids,
                         k_segment_ids=k_segment_ids, features=features, causal=causal, window=window, rotary=rotary,
                         platform=platform)


def attend_rotated(scheme, q, k, v, *, backend="auto", **options):
    """What follows the rotation in `attend`; `options` are its features, and those of `posjax.ops.attention.make_call`,
    with `bias` where it is made already."""
    return run(_rotated_call(scheme, q, k, v, **options), backend)


def _rotated_call(scheme, q, k, v, *, q_positions, features, **options):
    if "bias" not in options:
        options["bias"] = scheme.bias()
    logits = None
    if scheme.logits is not None:
        logits = functools.partial(_own_logits, scheme, features)
    elif scheme.temperature is not None:
        factor = _factor(scheme.temperature, q_positions)  # [1 or B, Q, 1 or H]
        q = (q.astype(jnp.float32) * factor[..., None]).astype(q.dtype)
    scale = scheme.head_dim ** -0.5 if scheme.logit_scale is None else scheme.logit_scale
    return make_call(q, k, v, logits=logits, values=scheme.values, q_positions=q_positions,
                     scale=scale, **options)


def _own_logits(scheme, features, q, k, q_positions, k_positions, *, visible, scale):
    """The logits that a scheme makes itself, under its temperature."""
    logits = scheme.logits(q, k, q_positions, k_positions, visible=visible, scale=scale, features=features)
    if scheme.temperature is None:
        return logits
    return logits.astype(jnp.float32) * _factor(scheme.temperature, q_positions).transpose(0, 2, 1)[..., None]


def _factor(temperature, positions):
    """float32 `[1 or B, Q, 1 or H]` for positions `[Q]` or `[B, Q]`."""
    return temperature.factor(jnp.atleast_2d(jnp.asarray(positions, jnp.int32)))


def check_queries(scheme, q):
    """Raises `ValueError` unless `q` is `[B, Q, H, Dh]` as the scheme was made for."""
    if q.ndim != 4 or q.shape[2:] != (scheme.num_heads, scheme.head_dim):
        raise UserError(f"{type(scheme).__name__} was made for {scheme.num_heads} heads of {scheme.head_dim} channels, so "
                        f"q must be [B, Q, {scheme.num_heads}, {scheme.head_dim}]; got shape {q.shape}.")


def check_features(scheme, features):
    """Raises `ValueError` unless `features` are given where the scheme has any, and only there."""
    has_features = type(scheme).features is not Scheme.features
    if has_features and features is None:
        raise UserError(f"{type(scheme).__name__} needs features=scheme.features(x), with x the layer's input [B, T, D].")
    if features is not None and not has_features:
        raise UserError(f"{type(scheme).__name__} has no features: leave features out.")


def check_causal(scheme, causal):
    """Raises `ValueError` for a scheme that is causal only without the causal mask."""
    if scheme.causal_only and not causal:
        raise UserError(f"{type(scheme).__name__} is defined under the causal mask only; causal=False does not go with it.")


def make_cache(scheme, size=None, *, batch_size, num_groups=None, value_dim=None, dtype=jnp.float32, window=None,
               page_size=None, num_pages=None, quantise=None):
    """An empty `posjax.KVCache` for one attention layer under `scheme`.

    Args:
      scheme: a `posjax.Scheme`.
      size: the most tokens that a row may have, S; None, with a window, for no end.
      batch_size: rows, B.
      num_groups: heads of keys and values, G; None for as many as queries have.
      value_dim: channels of a value; None for `head_dim`.
      dtype: of keys and values as they come, and as attention computes with them.
      window: the number of visible keys with the query's own: no more are kept. None to keep all.
      page_size, num_pages: rows share a pool of pages of so many tokens each, and a row takes a page when it needs one: memory
        for the tokens there are, not for the longest that may come. While attention looks at it, a row is laid out as one of
        S tokens. None for room of S tokens in each row.
      quantise: "int8" for keys and values as 8-bit integers, with a float32 scale for each token and head (see
        `posjax.quantisation_error`); None for as they come.

    Raises:
      ValueError: a number below 1, a cache without end, pages in a window, or an unknown `quantise`.
    """
    heads = scheme.num_heads if num_groups is None else num_groups

    def token():
        q, k = (jnp.zeros((batch_size, 1, n, scheme.head_dim), dtype) for n in (scheme.num_heads, heads))
        positions = jnp.zeros((batch_size, 1), jnp.int32)
        # What a scheme rotates may have more channels than came.
        k = k if _keeps_raw(scheme, quantise) else scheme.rotate(q, k, positions, positions)[1]
        v = jnp.zeros((batch_size, 1, heads, scheme.head_dim if value_dim is None else value_dim), dtype)
        return k, v, scheme.features(jnp.zeros((batch_size, 1, scheme.model_dim), dtype))
    k, v, features = jax.eval_shape(token)
    return KVCache.empty(size, k=k, v=v, features=features, window=window, page_size=page_size, num_pages=num_pages,
                         quantise=quantise)


def _keeps_raw(scheme, quantise):
    """Whether keys are kept as they come and rotated at each use.

    Because the rotation of an old key may change; or because they are quantised under a transform of another kind than
    a rotation, which may make some channels so much larger than others (xPos) that one scale does not serve both.
    """
    return scheme.depends_on_length or (quantise is not None and type(scheme).rotate is not Scheme.rotate)


def attend_cached(scheme, q, k, v, cache, *, positions=None, segment_ids=None, counts=None, features=None, window=None,
                  backend="auto"):
    """Causal attention of T new tokens on all that a cache holds and on themselves.

    The same as the last T rows of `attend` over the sequence so far; of the window, where the cache has one. Keys are kept
    rotated, or raw where the scheme `depends_on_length`, and then rotated at each use for the length that the row has by
    then.

    Args:
      scheme: a `posjax.Scheme`.
      q: `[B, T, H, Dh]`.
      k, v: `[B, T, G, Dh]`.
      cache: made by `make_cache`, or returned by the last call.
      positions: int32 `[T]` or `[B, T]`; None to go on from each row's last.
      segment_ids: int32 `[B, T]`; None for each row's last, 0 at the start. Give left padding a segment of its own.
      counts: int32 `[B]`: how many of the T tokens of each row are real, the first ones; None for all. The others, padding
        on the right, are neither kept nor seen; their outputs mean nothing, but are finite.
      features: `scheme.features(x)` of the T tokens, for a scheme that has any.
      window: number of visible keys with the query's own; None for the cache's own, or all.
      backend: as in `attend`.

    Returns:
      `[B, T, H, Dh]` in the dtype of `q`, and the cache with the T tokens.

    Raises:
      ValueError: as `attend`, and where the cache has no room. Inside a trace, where that cannot be read, the result of
        the rows concerned is NaN (`cache.overfull`), and what was written stays.
    """
    check_queries(scheme, q)
    check_features(scheme, features)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != cache.dtype:  # a scheme that scales its keys knows the range of their dtype, not that of another
            raise UserError(f"{name} is {x.dtype}, but the cache holds {cache.dtype}: make the cache with dtype={x.dtype}.")
    check_window(window)
    if cache.window is not None:
        window = cache.window if window is None else window
        if window > cache.window:
            raise UserError(f"window is {window}, but the cache keeps {cache.window} tokens: make it with window={window}.")
    positions, segment_ids = cache.place(q.shape[1], positions=positions, segment_ids=segment_ids, counts=counts)
    check_call(q, k, v, positions, positions, segment_ids, segment_ids, True, window)
    keeps_raw = _keeps_raw(scheme, cache.quantise)
    if not keeps_raw:
        q, k = scheme.rotate(q, k, positions, positions)
    cache, held, first = cache.extend(Tokens(k, v, positions, segment_ids, features), counts)
    keys = held.k
    if keeps_raw:
        q, keys = scheme.rotate(q, keys, positions, held.positions)
    out = attend_rotated(scheme, q, keys.astype(q.dtype), held.v.astype(q.dtype), q_positions=positions,
                         k_positions=held.positions, q_segment_ids=segment_ids, k_segment_ids=held.segment_ids,
                         features=held.features, window=window, first_query=first, backend=backend)
    return jnp.where(cache.overfull[:, None, None, None], jnp.nan, out), cache
