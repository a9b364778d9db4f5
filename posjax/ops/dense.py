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
        logits = jnp.einsum("bqghd,bkgd->bghqk", q, k, preferred_element_type=jnp.float32)
        logits = logits.reshape(batch, heads, q_len, -1)
    logits = logits.astype(jnp.float32)
    if call.bias is not None:
        bias = call.bias.block(call.q_positions, call.k_positions)
        logits = logits + (bias if bias.ndim == 4 else bias[None])
    logits = jnp.where(visible[:, None], logits, MASKED)
    weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
    total = weights.sum(-1)  # at least 1: the largest logit of a row contributes exp(0)
    grouped = weights.astype(v.dtype).reshape(batch, groups, heads // groups, q_len, -1)
    out = jnp.einsum("bghqk,bkgd->bqghd", grouped, v, preferred_element_type=jnp.float32).reshape(batch, q_len, heads, -1)
    if call.values is not None:
        out = out + call.values(weights, call.q_positions, call.k_positions)
    out = out / total.transpose(0, 2, 1)[..., None]
    # A row that sees nothing has spread its weight evenly over masked keys: it is zero by definition.
    return jnp.where(visible.any(-1)[..., None, None], out, 0.0).astype(call.q.dtype)
