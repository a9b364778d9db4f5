"""The judge of all backends: attention as its definition reads, in float32 at full precision, or float64 if it is given that.

Float64 takes `jax.enable_x64`; angles and biases are float32 there too, and products, softmax and sums are not.
"""
import jax
import jax.numpy as jnp

from posjax.ops.rotary import computed_in


def supports(call):
    return None


def run(call):
    group = call.q.shape[2] // call.k.shape[2]
    dtype = computed_in(call.q)
    q = call.q.astype(dtype)
    k = jnp.repeat(call.k.astype(dtype), group, axis=2)
    v = jnp.repeat(call.v.astype(dtype), group, axis=2)
    visible = call.visible()
    with jax.default_matmul_precision("highest"):
        if call.logits is not None:
            logits = call.logits(q, k, call.q_positions, call.k_positions, visible=visible, scale=call.scale).astype(dtype)
        else:
            logits = call.scale * jnp.einsum("bqhd,bkhd->bhqk", q, k)
        if call.bias is not None:
            bias = call.bias.block(call.q_positions, call.k_positions)
            logits = logits + jnp.broadcast_to(bias.astype(dtype), logits.shape)
        weights = jax.nn.softmax(logits, axis=-1, where=jnp.broadcast_to(visible[:, None], logits.shape))
        out = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        if call.values is not None:
            out = out + call.values(weights.astype(jnp.float32), call.q_positions, call.k_positions).astype(dtype)
        return out.astype(call.q.dtype)
