"""The judge of all backends: attention as its definition reads, in float32 at full precision."""
import jax
import jax.numpy as jnp


def supports(call):
    return None


def run(call):
    group = call.q.shape[2] // call.k.shape[2]
    q = call.q.astype(jnp.float32)
    k = jnp.repeat(call.k.astype(jnp.float32), group, axis=2)
    v = jnp.repeat(call.v.astype(jnp.float32), group, axis=2)
    visible = call.visible()
    with jax.default_matmul_precision("highest"):
        if call.logits is not None:
            logits = call.logits(q, k, call.q_positions, call.k_positions, visible=visible, scale=call.scale)
        else:
            logits = call.scale * jnp.einsum("bqhd,bkhd->bhqk", q, k)
        if call.bias is not None:
            bias = call.bias.block(call.q_positions, call.k_positions)
            logits = logits + jnp.broadcast_to(bias, logits.shape)
        weights = jax.nn.softmax(logits, axis=-1, where=jnp.broadcast_to(visible[:, None], logits.shape))
        out = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        if call.values is not None:
            out = out + call.values(weights, call.q_positions, call.k_positions)
        return out.astype(call.q.dtype)
