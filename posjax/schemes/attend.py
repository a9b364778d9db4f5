"""Attention under a positional scheme, over a whole sequence or from a cache."""
import functools

import jax.numpy as jnp

from posjax.errors import UserError
from posjax.ops.attention import attention, check_call
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
    check_queries(scheme, q)
    if scheme.causal_only and not causal:
        raise UserError(f"{type(scheme).__name__} is defined under the causal mask only; causal=False does not go with it.")
    q_len, k_len = q.shape[1], k.shape[1]
    if k_positions is None:
        k_positions = jnp.arange(k_len, dtype=jnp.int32)
    if q_positions is None:
        # The queries are the last of the keys, wherever those are.
        q_positions = k_positions[..., k_len - q_len:] if q_len <= k_len else jnp.arange(q_len, dtype=jnp.int32)
    # Before the rotation, which would broadcast positions of a wrong shape.
    check_call(q, k, v, q_positions, k_positions, q_segment_ids, k_segment_ids, causal, window)
    q, k = scheme.rotate(q, k, q_positions, k_positions)
    return attend_rotated(scheme, q, k, v, q_positions=q_positions, k_positions=k_positions, q_segment_ids=q_segment_ids,
                          k_segment_ids=k_segment_ids, features=features, causal=causal, window=window, backend=backend)


def attend_rotated(scheme, q, k, v, *, q_positions, features, **options):
    """What follows the rotation in `attend`; `options` are those of `posjax.ops.attention.attention`."""
    if (features is None) != _has_no_features(scheme):
        raise UserError(f"{type(scheme).__name__} "
                        + ("needs features=scheme.features(x), with x the layer's input [B, K, D]." if features is None
                           else "has no features; features must be None."))
    logits = None
    if scheme.logits is not None:
        logits = functools.partial(_own_logits, scheme, features)
    elif scheme.temperature is not None:
        factor = _factor(scheme.temperature, q_positions)  # [1 or B, Q, 1 or H]
        q = (q.astype(jnp.float32) * factor[..., None]).astype(q.dtype)
    scale = scheme.head_dim ** -0.5 if scheme.logit_scale is None else scheme.logit_scale
    return attention(q, k, v, bias=scheme.bias(), logits=logits, values=scheme.values, q_positions=q_positions,
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


def _has_no_features(scheme):
    return type(scheme).features is Scheme.features
