"""
Generation: each token costs one position of compute, because keys and values of the earlier ones are kept.

    prompt  ->  one forward of batch 1 fills a cache  ->  copied to num_samples rows  ->  one column of tokens a step

    cache.k[layer], cache.v[layer]    (B, room, kv heads, head_dim); positions [0, pos) are filled
    cache.prev_embedding              (B, 1, n_embd): what smear needs of the token before

What decoding gives equals the full forward, position by position, for chunks of any length: the cache only remembers,
all arithmetic is the model's. Rows that met a stop token go on being computed, so that shapes stay the same, and their
tokens are dropped by `generate_batch`.

The samples of a seed depend on num_samples (all rows draw from one generator) and, at equal probabilities, on the
device. nanochat's calculator tool is left out: nothing here is trained to call it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nanochat.gpt import GPT, sample_next_token


class KVCache:
    """Keys and values of one generation, for `GPT.forward(kv_cache=...)`. All rows are at the same position."""

    def __init__(self, batch_size: int, seq_len: int, *, model: GPT) -> None:
        """Room for batch_size rows of seq_len tokens of `model`, on its device and in its compute type."""
        config = model.config
        shape = (config.n_layer, batch_size, seq_len, config.n_kv_head, config.head_dim)
        options: dict[str, Any] = {"dtype": model.compute_dtype, "device": model.get_device()}
        self.k = torch.zeros(shape, **options)
        self.v = torch.zeros(shape, **options)
        self.prev_embedding = torch.zeros(batch_size, 1, config.n_embd, **options)
        self.seq_len = seq_len
        self.pos = 0

    def get_pos(self) -> int:
        """How many tokens it holds."""
        return self.pos

    def reset(self) -> None:
        """Forget everything."""
        self.pos = 0
        self.prev_embedding.zero_()

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v (B, T, kv heads, head_dim) behind what `layer` holds; returns views of all its keys and values.
        The position moves by `advance`, once all layers are done. Raises ValueError when full."""
        end = self.pos + k.size(1)
        if end > self.seq_len:
            raise ValueError(f"KVCache: {end:,} tokens, room for {self.seq_len:,}; make it with a larger seq_len")
        self.k[layer, :, self.pos:end] = k
        self.v[layer, :, self.pos:end] = v
        return self.k[layer, :, :end], self.v[layer, :, :end]

    def advance(self, num_tokens: int) -> None:
        self.pos += num_tokens

    def prefill(self, other: "KVCache") -> None:
        """Take over what `other` holds; its one row becomes every row. Raises ValueError if this one is not empty,
        too small, or has another number of rows than `other`, which has more than one."""
        if self.pos or self.seq_len < other.pos or other.k.size(1) not in (1, self.k.size(1)):
            raise ValueError(f"KVCache.prefill: {other.k.size(1)} rows of {other.pos} tokens do not go into "
                             f"{self.k.size(1)} rows with room for {self.seq_len} that hold {self.pos}")
        self.k[:, :, :other.pos] = other.k[:, :, :other.pos]
        self.v[:, :, :other.pos] = other.v[:, :, :other.pos]
        self.prev_embedding[:] = other.prev_embedding
        self.pos = other.pos


class Engine:
    """Samples from a model. The tokenizer is only asked which tokens end a text: `<|bos|>`, and `<|assistant_end|>`
    where there is one."""

    def __init__(self, model: GPT, tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer

    def stop_tokens(self) -> set[int]:
        """Ids that end a row."""
        stops = {self.tokenizer.get_bos_token_id()}
        if "<|assistant_end|>" in self.tokenizer.get_special_tokens():
            stops.add(self.tokenizer.encode_special("<|assistant_end|>"))
        return stops

    @torch.inference_mode()
    def generate(self, tokens: list[int], num_samples: int = 1, max_tokens: int | None = None, temperature: float = 1.0,
                 top_k: int | None = None, seed: int = 42) -> Iterator[tuple[list[int], list[int]]]:
        """Continue the prompt `tokens` num_samples times; yields (token column, masks), each with one entry a row. A
        mask of 1 means sampled (always, here). Ends when every row has met a stop token, or after max_tokens columns
        (default: up to sequence_len). Raises ValueError for an empty prompt or one with no room behind it."""
        tokens, room = list(tokens), self.model.config.sequence_len - len(tokens)
        if not tokens or num_samples < 1:
            raise ValueError(f"generate: got {len(tokens)} prompt tokens, num_samples={num_samples}, expected >= 1")
        if max_tokens is None and room < 1:
            raise ValueError(f"generate: a prompt of {len(tokens):,} tokens fills sequence_len; pass max_tokens")
        max_tokens = room if max_tokens is None else max_tokens
        rng = torch.Generator(device=self.model.get_device()).manual_seed(seed)
        logits, cache = self._prefill(tokens, num_samples, len(tokens) + max_tokens)
        stops, running = self.stop_tokens(), set(range(num_samples))
        for i in range(max_tokens):
            drawn = sample_next_token(logits, rng, temperature=temperature, top_k=top_k)
            column = drawn[:, 0].tolist()
            yield column, [1] * num_samples
            running -= {row for row in running if column[row] in stops}
            if not running or i + 1 == max_tokens:
                return
            logits = self.model(drawn, kv_cache=cache)[:, -1]

    def _prefill(self, tokens: list[int], num_samples: int, seq_len: int) -> tuple[Tensor, KVCache]:
        """Run the prompt once: logits (num_samples, vocab) behind it, and a cache with num_samples equal rows."""
        prompt = torch.tensor([tokens], dtype=torch.int64, device=self.model.get_device())
        once = KVCache(1, len(tokens), model=self.model)
        logits = self.model(prompt, kv_cache=once)[:, -1].expand(num_samples, -1)
        cache = KVCache(num_samples, seq_len, model=self.model)
        cache.prefill(once)
        return logits, cache

    def generate_batch(self, tokens: list[int], num_samples: int = 1, **kwargs: Any) -> tuple[list[list[int]],
                                                                                            list[list[int]]]:
        """`generate` to its end: (token lists, mask lists), a list for each sample, prompt included (mask 0), the stop
        token and what came after it not."""
        stops = self.stop_tokens()
        results = [list(tokens) for _ in range(num_samples)]
        running = set(range(num_samples))
        for column, _ in self.generate(tokens, num_samples, **kwargs):
            running -= {row for row in running if column[row] in stops}
            for row in running:
                results[row].append(column[row])
        masks = [[0] * len(tokens) + [1] * (len(result) - len(tokens)) for result in results]
        return results, masks
