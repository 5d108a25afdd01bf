"""Small models for tests, with random weights in every part."""

import torch

from nanochat.gpt import GPT, GPTConfig

SMALL = GPTConfig(sequence_len=160, vocab_size=70, n_layer=5, n_head=4, n_kv_head=2, n_embd=32)


def build(config=SMALL, *, seed=0, dtype=torch.float32, **kwargs):
    model = GPT(config, **kwargs)
    model.init_weights(seed=seed, compute_dtype=dtype)
    return model


def shake(model, *, seed=0):
    """Make all weights random: the zeros of initial weights would hide errors."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=rng) * (0.3 if p.dim() == 2 else 0.5))
    return model


def tokens(B, T, *, vocab=70, seed=0):
    return torch.randint(vocab, (B, T), generator=torch.Generator().manual_seed(seed))
