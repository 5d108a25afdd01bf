"""
The GPT: nanochat's current architecture, as one small module.

    tokens -> wte -> norm -> smear -> x0
    for each layer i:   x = resid_lambdas[i] * x + x0_lambdas[i] * x0
                        x = x + attention(norm(x))     window_sizes[i]; on every other layer values + gated value_embeds
                        x = x + mlp(norm(x))           relu(.)^2, four times as wide
    x - backout_lambda * (x after the middle layer) -> norm -> lm_head -> 15 * tanh(. / 15)

Where the parts come from: rotary positions (RoFormer, 2104.09864), RMSNorm without parameters (1910.07467), norms on
queries and keys (2302.05442), grouped query heads (2305.13245), squared ReLU (2109.08668), value embeddings (a form of
ResFormer's value residual, 2410.17897), soft-capped logits (Gemma 2, 2408.00118); the scalars on the residual stream,
smear and backout come from the modded-nanogpt speedruns. No biases, no dropout; embedding and head are not tied.

Types: matrices are float32 masters, cast to the activations' type where they are used; `wte` and the value embeddings
are stored in the compute type, and their type is the compute type of the model. No autocast.

Documents of a row see each other, unless the batch comes with masks (made outside the compiled forward) that keep
attention and smear inside each:   masks = model.masks(doc_ids);  loss = model(inputs, targets, masks=masks)
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.attention import MODES, DocMasks, attention, make_masks
from nanochat.init_weights import initial_weight
from nanochat.optim import MuonAdamW

if TYPE_CHECKING:
    from nanochat.engine import KVCache

ROPE_BASE = 100_000
ROPE_ROOM = 10  # rotary tables reach this many times sequence_len, so that generation may run past it
VOCAB_MULTIPLE = 64
SHORT_WINDOW_MULTIPLE = 128  # a tile of the attention kernels
VE_GATE_CHANNELS = 12
SMEAR_CHANNELS = 24
QK_SCALE = 1.2
LOGIT_CAP = 15.0


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. `window_pattern` is tiled over the layers: S sees a quarter of sequence_len (rounded up to
    whole tiles), L everything; the last layer always sees everything. Raises ValueError for shapes that cannot be."""

    sequence_len: int = 2048
    vocab_size: int = 32768
    n_layer: int = 12
    n_head: int = 6
    n_kv_head: int = 6
    n_embd: int = 768
    window_pattern: str = "SSSL"

    def __post_init__(self) -> None:
        for name in ("sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: got {value!r}, expected a positive integer")
        if self.n_embd % self.n_head or self.head_dim % 2:
            raise ValueError(f"n_embd / n_head: got {self.n_embd} / {self.n_head}, expected an even integer")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head: got {self.n_kv_head}, expected a divisor of n_head ({self.n_head})")
        if not self.window_pattern or set(self.window_pattern) - set("SL"):
            raise ValueError(f"window_pattern: got {self.window_pattern!r}, expected letters S (short) and L (long)")

    @classmethod
    def from_depth(cls, depth: int, *, vocab_size: int, sequence_len: int, aspect_ratio: int = 64, head_dim: int = 128,
                   n_kv_head: int | None = None, window_pattern: str = "SSSL") -> "GPTConfig":
        """The one dial: width = depth * aspect_ratio, rounded up to whole heads; n_kv_head = n_head unless said."""
        if min(depth, aspect_ratio, head_dim) < 1:
            raise ValueError(f"depth, aspect_ratio, head_dim: got {depth}, {aspect_ratio}, {head_dim}, expected >= 1")
        n_embd = _round_up(depth * aspect_ratio, head_dim)
        n_head = n_embd // head_dim
        return cls(sequence_len=sequence_len, vocab_size=vocab_size, n_layer=depth, n_head=n_head,
                   n_kv_head=n_head if n_kv_head is None else n_kv_head, n_embd=n_embd, window_pattern=window_pattern)

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embeddings and the head: whole tiles for the matmuls. Logits are cropped to vocab_size."""
        return _round_up(self.vocab_size, VOCAB_MULTIPLE)

    @property
    def window_sizes(self) -> list[int]:
        """For each layer how many tokens back it sees; -1 is all."""
        short = _round_up(math.ceil(self.sequence_len / 4), SHORT_WINDOW_MULTIPLE)
        pattern = self.window_pattern
        sizes = [short if pattern[i % len(pattern)] == "S" else -1 for i in range(self.n_layer)]
        return sizes[:-1] + [-1]

    def has_value_embedding(self, layer: int) -> bool:
        """Every other layer, counted back from the last."""
        return (self.n_layer - 1 - layer) % 2 == 0


def norm(x: Tensor) -> Tensor:
    """RMSNorm over the last dimension, without parameters."""
    return F.rms_norm(x, (x.size(-1),))


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel pairs (c, c + D/2) of x (B, T, H, D) by angles whose cos and sin are (T, 1, D/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


def sample_next_token(logits: Tensor, rng: torch.Generator | None, *, temperature: float = 1.0,
                      top_k: int | None = None) -> Tensor:
    """Draw one token a row from logits (B, vocab) -> (B, 1) int64. Temperature 0 takes the most likely and needs no
    generator; top_k keeps the k most likely. Raises ValueError for a negative temperature or a top_k below 1."""
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(f"sampling: got temperature={temperature}, top_k={top_k}, expected >= 0 and >= 1")
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    choices, ids = (logits, None) if top_k is None else logits.topk(min(top_k, logits.size(-1)), dim=-1)
    drawn = torch.multinomial(F.softmax(choices / temperature, dim=-1), num_samples=1, generator=rng)
    return drawn if ids is None else ids.gather(1, drawn)


class Linear(nn.Linear):
    """A float32 master without bias, used in the type of what it is applied to."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Nothing: values come from `GPT.init_weights` or from a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


def embedding(num: int, width: int) -> nn.Embedding:
    """An embedding whose values come later, like those of `Linear`."""
    return nn.Embedding.from_pretrained(torch.empty(num, width), freeze=False)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.window = config.window_sizes[layer]
        self.head_dim = config.head_dim
        kv_width = config.n_kv_head * config.head_dim
        self.c_q = Linear(config.n_embd, config.n_embd)
        self.c_k = Linear(config.n_embd, kv_width)
        self.c_v = Linear(config.n_embd, kv_width)
        self.c_proj = Linear(config.n_embd, config.n_embd)
        self.ve_gate = None
        if config.has_value_embedding(layer):
            self.ve_gate = Linear(min(VE_GATE_CHANNELS, config.n_embd), config.n_kv_head)

    def forward(self, x: Tensor, ve: Tensor | None, rotary: tuple[Tensor, Tensor], kv_cache: "KVCache | None",
                mask: Any) -> Tensor:
        """x: (B, T, C); ve: (B, T, Hkv * D), this layer's value embedding, or None; mask: see `attention`. Returns
        (B, T, C)."""
        heads = (*x.shape[:2], -1, self.head_dim)  # (B, T, heads, head_dim)
        q, k, v = self.c_q(x).view(heads), self.c_k(x).view(heads), self.c_v(x).view(heads)
        if ve is not None:
            assert self.ve_gate is not None
            gate = 3 * torch.sigmoid(self.ve_gate(x[..., :self.ve_gate.in_features]))  # (B, T, kv heads), in (0, 3)
            v = v + gate.unsqueeze(-1) * ve.view(heads)
        q = norm(apply_rotary(q, *rotary)) * QK_SCALE
        k = norm(apply_rotary(k, *rotary)) * QK_SCALE
        if kv_cache is not None:
            k, v = kv_cache.append(self.layer, k, v)
        y = attention(q, k, v, window=self.window, mask=mask)
        return self.c_proj(y.reshape(x.shape))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attn = CausalSelfAttention(config, layer)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, *attn_args: Any) -> Tensor:
        x = x + self.attn(norm(x), *attn_args)
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    """Build it on any device, also `meta` (then `to_empty(device=...)`), then either `init_weights`, or
    `load_state_dict` and `set_compute_dtype`. Until then its weights are arbitrary.

    attention_mode: causal, or what `masks` makes of document ids: sdpa_mask (runs everywhere) or flex (fast on CUDA).
    """

    def __init__(self, config: GPTConfig, *, attention_mode: str = "causal") -> None:
        super().__init__()
        if attention_mode not in MODES:
            raise ValueError(f"--attention-mode: got {attention_mode!r}, expected one of {', '.join(MODES)}")
        self.config = config
        self.attention_mode = attention_mode
        kv_width = config.n_kv_head * config.head_dim
        layers = range(config.n_layer)
        self.transformer = nn.ModuleDict({
            "wte": embedding(config.padded_vocab_size, config.n_embd),
            "h": nn.ModuleList(Block(config, i) for i in layers),
        })
        self.value_embeds = nn.ModuleDict({
            str(i): embedding(config.padded_vocab_size, kv_width) for i in layers if config.has_value_embedding(i)})
        self.lm_head = Linear(config.n_embd, config.padded_vocab_size)
        self.resid_lambdas = nn.Parameter(torch.empty(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.empty(config.n_layer))
        self.smear_gate = Linear(min(SMEAR_CHANNELS, config.n_embd), 1)
        self.smear_lambda = nn.Parameter(torch.empty(1))
        self.backout_lambda = nn.Parameter(torch.empty(1))
        tables = torch.empty(2, ROPE_ROOM * config.sequence_len, 1, config.head_dim // 2)
        self.register_buffer("cos", tables[0], persistent=False)
        self.register_buffer("sin", tables[1], persistent=False)

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.get_parameter("transformer.wte.weight").dtype

    def get_device(self) -> torch.device:
        return self.lm_head.weight.device

    # ---- weights ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def init_weights(self, *, seed: int, compute_dtype: torch.dtype) -> None:
        """Fill every parameter and buffer. The bits depend on (seed, name, shape) only, not on device or world size.
        Raises ValueError on the meta device."""
        if self.get_device().type == "meta":
            raise ValueError("init_weights on the meta device: call to_empty(device=...) first")
        self.set_compute_dtype(compute_dtype)  # before the draw, so that each value is rounded once
        for name, parameter in self.named_parameters():
            parameter.copy_(initial_weight(name, parameter.shape, seed=seed, n_embd=self.config.n_embd))

    @torch.no_grad()
    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        """Recast the embeddings to `dtype` and recompute the rotary tables in it: for a checkpoint that was trained in
        another type, and after `to_empty`, which leaves the tables (they are not in a checkpoint) arbitrary."""
        self.transformer["wte"].to(dtype=dtype)
        self.value_embeds.to(dtype=dtype)
        half = self.config.head_dim // 2
        turns = ROPE_BASE ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(ROPE_ROOM * self.config.sequence_len, dtype=torch.float32), turns)[:, None]
        device = self.get_device()  # computed on the CPU: the same bits everywhere
        self.cos, self.sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)

    # ---- forward ----------------------------------------------------------------------------------------------------

    def forward(self, idx: Tensor, targets: Tensor | None = None, *, masks: DocMasks | None = None,
                kv_cache: "KVCache | None" = None, loss_reduction: str = "mean") -> Tensor:
        """Logits, or the loss where targets are given.

        idx: (B, T) int64. targets: (B, T) int64, -100 where the loss is off. masks: what `masks` made of this batch.
        kv_cache: continue behind what it holds (one more token, or a chunk), and add to it; goes without masks.
        loss_reduction: 'mean' over live targets (NaN without any), 'sum' (0 without any), 'none' (0 where off).
        Returns logits (B, T, vocab_size) float32, or the loss in nats, float32: 0-dim, or (B, T) for 'none'.
        Raises ValueError past the end of the rotary tables (ten times sequence_len).
        """
        start = 0 if kv_cache is None else kv_cache.get_pos()
        end = start + idx.size(1)
        if end > self.cos.size(0):
            raise ValueError(f"position {end:,} is past the rotary tables ({self.cos.size(0):,}); use fewer tokens")
        rotary = self.cos[start:end], self.sin[start:end]
        x = x0 = middle = self._smear(norm(self.transformer["wte"](idx)), masks, kv_cache)
        for i, block in enumerate(self.transformer["h"].children()):
            mask = None if masks is None else masks.by_window[self.config.window_sizes[i]]
            ve = self.value_embeds[str(i)](idx) if str(i) in self.value_embeds else None
            x = block(self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0, ve, rotary, kv_cache, mask)
            if i == self.config.n_layer // 2:
                middle = x
        if kv_cache is not None:
            kv_cache.advance(idx.size(1))
        x = norm(x - self.backout_lambda.to(x.dtype) * middle)
        logits = self.lm_head(x)[..., :self.config.vocab_size].float()
        logits = LOGIT_CAP * torch.tanh(logits / LOGIT_CAP)
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction=loss_reduction)
        return loss.view(targets.shape) if loss_reduction == "none" else loss

    def _smear(self, x: Tensor, masks: DocMasks | None, kv_cache: "KVCache | None") -> Tensor:
        """Add to each position a gated share of the (unsmeared) embedding before it; none to the first of a row
        or, with masks, of a document."""
        before = x.new_zeros(x.size(0), 1, x.size(2))
        if kv_cache is not None:
            before, kv_cache.prev_embedding = kv_cache.prev_embedding, x[:, -1:]
        previous = torch.cat((before, x[:, :-1]), dim=1)
        gate = self.smear_lambda.to(x.dtype) * torch.sigmoid(self.smear_gate(x[..., :self.smear_gate.in_features]))
        if masks is not None:
            gate = gate * masks.same_doc.unsqueeze(-1)
        return x + gate * previous

    def masks(self, doc_ids: Tensor | None) -> DocMasks | None:
        """What keeps the documents of a batch apart in `forward`, None in causal mode. Call it outside a compiled
        forward. doc_ids: (B, T) int32, equal inside a document; padding has an id of its own. ValueError without them
        where the mode needs them."""
        if self.attention_mode == "causal":
            return None
        if doc_ids is None:
            raise ValueError(f"--attention-mode {self.attention_mode}: got no doc_ids; make the loader with them")
        return make_masks(doc_ids, self.config.window_sizes, mode=self.attention_mode)

    @torch.inference_mode()
    def generate(self, tokens: list[int], max_tokens: int, *, temperature: float = 1.0, top_k: int | None = None,
                 seed: int = 42) -> Iterator[int]:
        """Continue `tokens`, one token at a time, by running the whole sequence anew for each: the plain reference for
        `engine.Engine`, which is what to use."""
        rng = torch.Generator(device=self.get_device()).manual_seed(seed)
        ids = torch.tensor([tokens], dtype=torch.int64, device=self.get_device())
        for _ in range(max_tokens):
            drawn = sample_next_token(self(ids)[:, -1], rng, temperature=temperature, top_k=top_k)
            ids = torch.cat((ids, drawn), dim=1)
            yield int(drawn.item())

    # ---- accounting -------------------------------------------------------------------------------------------------

    def num_scaling_params(self) -> dict[str, int]:
        """Parameters by kind, for scaling laws that count embeddings (Chinchilla, 2203.15556) and those that do not
        (Kaplan et al., 2001.08361). Padding rows are counted."""
        def count(module: nn.Module) -> int:
            return sum(p.numel() for p in module.parameters())
        counts = {"wte": count(self.transformer["wte"]), "value_embeds": count(self.value_embeds),
                  "lm_head": count(self.lm_head), "transformer_matrices": count(self.transformer["h"])}
        counts["scalars"] = count(self) - sum(counts.values())  # residual, x0, smear, backout
        return counts | {"total": count(self)}

    def estimate_flops(self) -> int:
        """Training FLOPs per token at full length: 6 for each matmul parameter, 12 per layer, channel and token in
        sight for attention (PaLM's rule, 2204.02311, appendix B); embeddings are look-ups and count nothing."""
        counts, T = self.num_scaling_params(), self.config.sequence_len
        in_sight = sum(T if w < 0 else min(w, T) for w in self.config.window_sizes)
        return 6 * (counts["lm_head"] + counts["transformer_matrices"]) + 12 * self.config.n_embd * in_sight

    # ---- optimizer --------------------------------------------------------------------------------------------------

    def param_groups(self, *, unembedding_lr: float = 0.004, embedding_lr: float = 0.2, matrix_lr: float = 0.02,
                     weight_decay: float = 0.0, scalar_lr: float = 0.5) -> list[dict[str, Any]]:
        """Every parameter in one group: AdamW for embeddings, head and scalars (the first two with learning rates
        scaled by 1/sqrt(width / 768)), Muon for the layers' matrices, one group a shape. A group is a dict with kind,
        params, names (in the same order), lr, initial_lr and its optimizer's settings."""
        scale = (self.config.n_embd / 768) ** -0.5
        adamw: list[tuple[str | tuple[str, ...], float, tuple[float, float], float]] = [  # prefix, lr, betas, decay
            ("lm_head.", unembedding_lr * scale, (0.8, 0.96), 0.01),
            ("transformer.wte.", embedding_lr * scale, (0.8, 0.995), 0.001),
            ("value_embeds.", embedding_lr * scale * 0.5, (0.8, 0.995), 0.01),
            ("resid_lambdas", scalar_lr * 0.01, (0.8, 0.95), 0.05),
            ("x0_lambdas", scalar_lr, (0.96, 0.95), 0.0),
            (("smear_", "backout_lambda"), 0.2, (0.8, 0.95), 0.0),
        ]
        groups = [self._group(prefix, {"kind": "adamw", "lr": lr, "betas": betas, "eps": 1e-10, "weight_decay": decay})
                  for prefix, lr, betas, decay in adamw]
        muon = {"kind": "muon", "lr": matrix_lr, "momentum": 0.95, "ns_steps": 5, "beta2": 0.9,
                "weight_decay": weight_decay}
        shapes = sorted({p.shape for p in self.transformer["h"].parameters()})
        groups += [self._group("transformer.h.", muon, shape=shape) for shape in shapes]
        assert sum(len(g["params"]) for g in groups) == len(list(self.parameters()))
        return groups

    def _group(self, prefix: str | tuple[str, ...], settings: dict[str, Any], *,
               shape: torch.Size | None = None) -> dict[str, Any]:
        named = [(n, p) for n, p in self.named_parameters() if n.startswith(prefix) and shape in (None, p.shape)]
        names, params = zip(*named, strict=True)
        return {**settings, "initial_lr": settings["lr"], "names": list(names), "params": list(params)}

    def setup_optimizer(self, **learning_rates: float) -> MuonAdamW:
        """The optimizer over `param_groups(...)`; same keywords."""
        return MuonAdamW(self.param_groups(**learning_rates))
