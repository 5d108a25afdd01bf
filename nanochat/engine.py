"""Generation with a KV cache: each new token costs one position, because earlier keys and values
are kept.

    prompt  ->  one forward of batch 1 fills a cache  ->  copied to num_samples rows  ->  one column of tokens per step

Decoding gives the same logits as the full forward, position by position, for chunks of any length:
the cache only stores, and the model does all arithmetic. Rows that have reached a stop token are
still computed, so that shapes stay the same; `generate_batch` drops their tokens.

The samples for a seed depend on num_samples (all rows draw from one generator) and on the device.
There is no calculator tool, because no model here is trained to call it.
"""

import os
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanochat.attention import KVCache
from nanochat.checkpoint import MODEL_CONFIG_NAME, find_checkpoint
from nanochat.dist import get_compute_dtype
from nanochat.gpt import GPT, GPTConfig, Linear
from nanochat.tokenizer import Tokenizer, get_tokenizer


def sample_next_token(
    logits: Tensor, rng: torch.Generator | None, temperature: float = 1.0, top_k: int | None = None
) -> Tensor:
    """Draw one token per row from logits (B, vocab) -> (B, 1) int64.

    Temperature 0 takes the most likely token and needs no generator. top_k restricts the draw to
    the k most likely tokens. Raises ValueError for a negative temperature or a top_k below 1.
    """
    is_number = temperature >= 0  # NaN is none
    if not is_number or (top_k is not None and top_k < 1):
        raise ValueError(
            f"sampling: got temperature={temperature}, top_k={top_k}, expected at least 0 and 1"
        )
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is None:
        probabilities = F.softmax(logits / temperature, dim=-1)
        return torch.multinomial(probabilities, 1, generator=rng)
    choices, ids = logits.topk(min(top_k, logits.size(-1)), dim=-1)
    probabilities = F.softmax(choices / temperature, dim=-1)
    drawn = torch.multinomial(probabilities, 1, generator=rng)
    return ids.gather(1, drawn)


class Engine:
    """Samples from a model.

    The tokenizer only provides the tokens that end a text: `<|bos|>` and, if it exists,
    `<|assistant_end|>`.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer

    def stop_tokens(self) -> set[int]:
        """Ids that end a row."""
        stops = {self.tokenizer.get_bos_token_id()}
        if "<|assistant_end|>" in self.tokenizer.get_special_tokens():
            stops.add(self.tokenizer.encode_special("<|assistant_end|>"))
        return stops

    def _forward(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """Logits of the last position, (B, vocab)."""
        # Avoid cuDNN's kernel: its plan for each new length takes longer than computing a token.
        # Avoid the plain kernel, which writes all scores to memory; but if 8 does not divide the
        # head size, CUDA has no other.
        kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        if self.model.config.head_dim % 8:
            kernels.append(SDPBackend.MATH)
        with sdpa_kernel(kernels):
            return self.model(tokens, kv_cache=cache)[:, -1]

    @torch.inference_mode()
    def generate(
        self,
        tokens: list[int],
        num_samples: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 42,
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Continue the prompt `tokens` num_samples times.

        Yields (token column, masks), each with one entry per row; a mask of 1 means sampled, which
        is always the case here. Ends when every row has reached a stop token, or after max_tokens
        columns (default: up to sequence_len). Raises ValueError for an empty prompt, and for one
        that fills sequence_len if max_tokens is None.
        """
        room = self.model.config.sequence_len - len(tokens)
        if not tokens or num_samples < 1:
            raise ValueError(
                f"generate: got {len(tokens)} prompt tokens, num_samples={num_samples}, expected both "
                f"to be at least 1"
            )
        if max_tokens is None and room < 1:
            raise ValueError(
                f"generate: a prompt of {len(tokens):,} tokens fills sequence_len; pass max_tokens"
            )
        max_tokens = room if max_tokens is None else max_tokens
        device = self.model.get_device()
        rng = torch.Generator(device=device).manual_seed(seed)

        # compute the prompt once, and copy its cache to all rows
        prompt = torch.tensor([tokens], dtype=torch.int64, device=device)
        prompt_cache = KVCache(1, len(tokens), model=self.model)
        logits = self._forward(prompt, prompt_cache).expand(num_samples, -1)
        cache = KVCache(num_samples, len(tokens) + max_tokens, model=self.model)
        cache.prefill(prompt_cache)

        # draw a column, and compute it, until all rows have ended
        stops = self.stop_tokens()
        running = set(range(num_samples))
        for i in range(max_tokens):
            drawn = sample_next_token(logits, rng, temperature, top_k)
            column = drawn[:, 0].tolist()
            yield column, [1] * num_samples
            running -= {row for row in running if column[row] in stops}
            if not running or i + 1 == max_tokens:
                return
            logits = self._forward(drawn, cache)

    def generate_batch(
        self,
        tokens: list[int],
        num_samples: int = 1,
        **kwargs: Any,
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Run `generate` to its end.

        Returns (token lists, mask lists), one of each per sample: the prompt (mask 0) and the
        sampled tokens (mask 1) before the stop token.
        """
        stops = self.stop_tokens()
        running = set(range(num_samples))
        results = [list(tokens) for _ in range(num_samples)]
        for column, _ in self.generate(tokens, num_samples, **kwargs):
            running -= {row for row in running if column[row] in stops}
            for row in running:
                results[row].append(column[row])
        masks = [[0] * len(tokens) + [1] * (len(result) - len(tokens)) for result in results]
        return results, masks


# ---- a model from a checkpoint alone -------------------------------------------------------------


def load_model(
    path: str | os.PathLike[str] | None,
    device: torch.device | str,
    *,
    compute_dtype: torch.dtype | None = None,
) -> tuple[GPT, Tokenizer, dict[str, Any]]:
    """Load a model (in eval mode) and its tokenizer from a checkpoint.

    `path`: see `find_checkpoint`.
    """
    device = torch.device(device)
    checkpoint = find_checkpoint(path)
    checkpoint.check_architecture(checkpoint.model_config)
    unknown = checkpoint.model_config.keys() - {field.name for field in fields(GPTConfig)}
    if unknown:
        raise ValueError(
            f"{checkpoint.path / MODEL_CONFIG_NAME}: this code's GPTConfig lacks "
            f"{', '.join(sorted(unknown))}; use the code that trained the model"
        )
    tokenizer = get_tokenizer(checkpoint.path.absolute().parent.parent / "tokenizer")
    checkpoint.check_tokenizer(tokenizer.fingerprint)
    with torch.device("meta"):
        model = GPT(GPTConfig(**checkpoint.model_config))
    model.to_empty(device=device)
    model.set_compute_dtype(compute_dtype or get_compute_dtype(device))
    changed_code = checkpoint.load_weights(model)
    for module in model.modules():
        if isinstance(module, Linear):
            module.to(model.compute_dtype)  # cast once instead of for every token: the same bits
    meta = {
        "path": checkpoint.path,
        "step": checkpoint.step,
        "model_config": checkpoint.model_config,
        "trainer_state": checkpoint.seal,
        "changed_code": changed_code,
    }
    return model.eval(), tokenizer, meta
