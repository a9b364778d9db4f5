"""Dense attention: all logits at once, left to XLA to fuse. For short sequences."""
import jax
import jax.numpy as jnp

# Finite, so that no sum of masks reaches -inf and no row of them turns into NaN.
MASKED = -1e30


def supports(call):
    return None


# From 256 queries on, blocks are faster on two CPU cores, forward and backward; up to 64 they are not.
MOST_QUERIES = 128


def declines(call):
    """Many queries are better served in blocks."""
    if call.q.shape[1] > MOST_QUERIES:
        return f"{call.q.shape[1]} queries are faster in blocks"
    return None


def run(call):
    q, k, v = call.q, call.k, call.v
    batch, q_len, heads, _ = q.shape
    groups = k.shape[2]
    visible = call.visible()
    if call.logits is not None:
        k = jnp.repeat(k, heads // groups, axis=2)
        logits = call.logits(q, k, call.q_positions, call.k_positions, visible=visible, scale=call.scale)
    else:
        # Scaling the queries is cheaper than scaling the logits, and keeps bf16 products in range.
        q = (q * jnp.asarray(call.scale, q.dtype)).reshape(batch, q_len, groups, heads // groups, -1)
        logits = _scores(q.transpose(0, 2, 3, 1, 4).reshape(batch, groups, heads // groups * q_len, -1), k.transpose(0, 2, 1, 3))
        logits = logits.reshape(batch, heads, q_len, -1)
    logits = logits.astype(jnp.float32)
    if call.bias is not None:
        bias = call.bias.block(call.q_positions, call.k_positions)
        logits = logits + (bias if bias.ndim == 4 else bias[None])
    logits = jnp.where(visible[:, None], logits, MASKED)
    weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    total = weights.sum(-1)  # at least 1: the largest logit of a row contributes exp(0)
    out = _mixed(weights.astype(v.dtype).reshape(batch, groups, heads // groups * q_len, -1), v.transpose(0, 2, 1, 3))
    out = out.reshape(batch, heads, q_len, -1).transpose(0, 2, 1, 3)
    if call.values is not None:
        out = out + call.values(weights, call.q_positions, call.k_positions)
    out = out / total.transpose(0, 2, 1)[..., None]
    # A row that sees nothing has spread its weight evenly over masked keys: it is zero by definition.
    return jnp.where(visible.any(-1)[..., None, None], out, 0.0).astype(call.q.dtype)


def _product(a, b, over):
    """float32 batched product of `[B, G, .., ..]` arrays, the sum going over axis `over[0]` of `a` and `over[1]` of `b`."""
    return jax.lax.dot_general(a, b, (((over[0],), (over[1],)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)


# The two products have gradients of their own for the order of the factors alone: as jax would multiply them, two of the four
# begin with a transposed copy of a [B, H, Q, K] array. At 121 tokens and 8 heads of 8 channels they took half of a training step.
@jax.custom_vjp
def _scores(q, k):
    """`q.k`, float32 `[B, G, Q, K]`, of `[B, G, Q, Dh]` and `[B, G, K, Dh]`."""
    return _product(q, k, (3, 3))


def _scores_forward(q, k):
    return _scores(q, k), (q, k)


def _scores_backward(kept, d_scores):
    q, k = kept
    d_q = _product(d_scores, k.astype(jnp.float32), (3, 2))
    d_k = _product(q.astype(jnp.float32), d_scores, (2, 2)).swapaxes(2, 3)
    return d_q.astype(q.dtype), d_k.astype(k.dtype)


_scores.defvjp(_scores_forward, _scores_backward)


@jax.custom_vjp
def _mixed(weights, v):
    """`weights.v`, float32 `[B, G, Q, Dv]`, of `[B, G, Q, K]` and `[B, G, K, Dv]`."""
    return _product(weights, v, (3, 2))


def _mixed_forward(weights, v):
    return _mixed(weights, v), (weights, v)


def _mixed_backward(kept, d_out):
    weights, v = kept
    d_weights = _product(d_out, v.astype(jnp.float32), (3, 3))
    d_v = _product(d_out, weights.astype(jnp.float32), (2, 2)).swapaxes(2, 3)
    return d_weights.astype(weights.dtype), d_v.astype(v.dtype)


_mixed.defvjp(_mixed_forward, _mixed_backward)
