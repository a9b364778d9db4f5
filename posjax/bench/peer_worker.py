"""A worker that trains x-transformers in eager PyTorch, as a user would: AdamW, clipped gradients, on two threads.

In its favour: the optimiser is the fused one, batches are made beforehand, the learning rate does not change, and the loss is
read once at the end.
"""
from posjax.bench.workers import serve


def prepare(job):
    """`job`: the scheme ("rope" or "alibi"), sizes as in `DecoderConfig`, values of the optimiser, threads, and a file of batches."""
    import numpy as np
    import torch
    import x_transformers
    from torch.nn import functional
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    data = np.load(job["batches"])
    tokens, targets = (torch.from_numpy(data[name].astype(np.int64)) for name in ("tokens", "targets"))
    heads, head_dim = job["num_heads"], job["head_dim"]
    position = {"rope": {"rotary_pos_emb": True, "rotary_emb_dim": head_dim}, "alibi": {"alibi_pos_bias": True}}[job["scheme"]]
    layers = x_transformers.Decoder(dim=job["width"], depth=job["depth"], heads=heads, attn_dim_head=head_dim,
                                    ff_mult=job["mlp_ratio"], ff_no_bias=True, use_rmsnorm=True, **position)
    model = x_transformers.TransformerWrapper(num_tokens=job["vocab_size"], max_seq_len=tokens.shape[2], attn_layers=layers,
                                              use_abs_pos_emb=False, tie_embedding=True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=job["learning_rate"], betas=(job["beta1"], job["beta2"]),
                                  weight_decay=job["weight_decay"], fused=True)

    def train(count):
        for step in range(count):
            batch = step % tokens.shape[0]
            optimiser.zero_grad()
            logits = model(tokens[batch])
            # A target that is not of the answer is -100, which PyTorch leaves out.
            loss = functional.cross_entropy(logits.flatten(0, 1), targets[batch].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), job["clip_norm"])
            optimiser.step()
        return {"loss": loss.item()}
    train(2)
    about = {"parameters": sum(p.numel() for p in model.parameters()), "tokens": tokens[0].numel(), "torch": torch.__version__}
    return about, {"train": train}


if __name__ == "__main__":
    serve(prepare)
