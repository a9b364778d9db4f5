import jax.numpy as jnp

from posjax.errors import UserError
from posjax.ops.attention import attention, check_call


def attend(scheme, q, k, v, *, q_positions=None, k_positions=None, q_segment_ids=None, k_segment_ids=None,
           window=None, causal=True, backend="auto"):
    """Attention under a positional scheme: rotates, biases, masks, and attends.

    Queries stand at the end of the keys when there are fewer of them, so one decode step is a call with one query.
    What a scheme adds to embeddings (`scheme.embed`) is the caller's to add before q, k and v are made.

    Args:
      scheme: a `posjax.Scheme`.
      q: `[B, Q, H, Dh]`.
      k, v: `[B, K, G, Dh]`; H is a multiple of G.
      q_positions, k_positions: int32 `[Q]`, `[K]`, or with a leading B; None for 0 .. K-1 and the last Q of them.
      q_segment_ids, k_segment_ids: int32 `[B, Q]`, `[B, K]`: tokens of different segments never see each other.
      window: number of visible keys with the query's own; None for all.
      causal: whether a query sees no later key.
      backend: "auto", or the name of one (`posjax.ops.attention.BACKENDS`).

    Returns:
      `[B, Q, H, Dh]` in the dtype of `q`.

    Raises:
      ValueError: shapes that do not fit, or a backend that cannot serve the call.
    """
    if q.ndim != 4 or q.shape[2:] != (scheme.num_heads, scheme.head_dim):
        raise UserError(f"{type(scheme).__name__} was made for {scheme.num_heads} heads of {scheme.head_dim} channels, so "
                        f"q must be [B, Q, {scheme.num_heads}, {scheme.head_dim}]; got shape {q.shape}.")
    q_len, k_len = q.shape[1], k.shape[1]
    if k_positions is None:
        k_positions = jnp.arange(k_len, dtype=jnp.int32)
    if q_positions is None:
        # The queries are the last of the keys, wherever those are.
        q_positions = k_positions[..., k_len - q_len:] if q_len <= k_len else jnp.arange(q_len, dtype=jnp.int32)
    # Before the rotation, which would broadcast positions of a wrong shape.
    check_call(q, k, v, q_positions, k_positions, q_segment_ids, k_segment_ids, causal, window)
    q, k = scheme.rotate(q, k, q_positions, k_positions)
    return attention(q, k, v, bias=scheme.bias(), logits=scheme.logits, q_positions=q_positions,
                     k_positions=k_positions, q_segment_ids=q_segment_ids, k_segment_ids=k_segment_ids,
                     causal=causal, window=window, scale=scheme.scale, backend=backend)
