"""
The GPT: nanochat's architecture, as one small module.

    tokens -> wte -> norm -> smear -> x0
    for each layer i:   x = resid_lambdas[i] * x + x0_lambdas[i] * x0
                        x = x + attention(norm(x))     every other layer adds gated value_embeds
                        x = x + mlp(norm(x))           relu(.)^2, four times as wide
    x - backout_lambda * (x after the middle layer) -> norm -> lm_head -> 15 * tanh(. / 15)

Sources of the parts: rotary positions (RoFormer, 2104.09864), RMSNorm without parameters
(1910.07467), norms on queries and keys (2302.05442), grouped query heads (2305.13245), squared ReLU
(2109.08668), value embeddings (a form of ResFormer's value residual, 2410.17897), soft-capped
logits (Gemma 2, 2408.00118). The scalars on the residual stream, smear and backout come from the
modded-nanogpt speedruns. The model has no biases and no dropout, and embedding and head are not
tied. With one or two layers, the middle layer is the last one: the norm then receives
(1 - backout_lambda) x, and keeps only the sign of that factor. Such a model is for tests.

Matrices are float32 masters and are cast to the dtype of the activations where they are used,
without autocast. `wte` and the value embeddings are stored in the compute dtype;
`GPT.compute_dtype` reads it from `wte`.

Documents in a row see the ones before them, unless masks restrict attention and smear to each
document:

    masks = model.masks(doc_ids);  loss = model(inputs, targets, masks=masks)
"""

import hashlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nanochat.attention import MODES, DocMasks, KVCache, Mask, attention, make_masks
from nanochat.dist import get_compute_dtype
from nanochat.optim import MuonAdamW

ROPE_BASE = 100_000
# the usual shape: width per layer, and size of an attention head
ASPECT_RATIO, HEAD_DIM = 64, 128
ROPE_ROOM = 10  # rotary tables cover this many times sequence_len, so generation can exceed it
VOCAB_MULTIPLE = 64
SHORT_WINDOW_MULTIPLE = 128  # a tile of the attention kernels
VE_GATE_CHANNELS = 12
SMEAR_CHANNELS = 24
QK_SCALE = 1.2
LOGIT_CAP = 15.0
LOSS_CHUNK = 8192  # tokens whose logits are in memory at once in uncompiled code

# The tensors that a step keeps for its backward pass: of each layer; before and after the layers;
# and while one layer is recomputed and differentiated. The unit is a tensor (B, T, C) in the
# compute dtype. The numbers of compiled code are counted in the records of PyTorch's allocator
# (dev/LOG.md), those of eager code in what autograd keeps.
KEPT = {  # (compiled, activation checkpointing)
    (True, False): (19.6, 4.0, 0.0),
    (True, True): (1.5, 5.0, 50.0),
    (False, False): (24.0, 0.0, 0.0),
    (False, True): (2.5, 0.0, 24.0),
}
# In graphs of more than 20 recomputed layers, Inductor (PyTorch 2.11) holds several layers at once:
# d24 takes 50 units more, d26 88. The curve is fitted to these two graphs: 8.2 k + 1.08 k^2 units
# for k layers beyond.
MANY_LAYERS = 20
BEYOND, BEYOND_SQUARED = 8.2, 1.08
SPARE = 0.04  # small tensors, workspaces of cuBLAS, gaps between tensors


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model.

    Raises ValueError for an impossible one.

    `window_pattern` is tiled over the layers. In an S layer, a token sees the sequence_len / 4
    tokens before it (rounded up to whole tiles); in an L layer, the sequence_len tokens (a training
    row) before it. The last layer is always L.
    """

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
            raise ValueError(
                f"head_dim = n_embd / n_head: got {self.n_embd} / {self.n_head}, expected an even integer"
            )
        if self.n_head % self.n_kv_head:
            raise ValueError(
                f"n_kv_head: got {self.n_kv_head}, expected a divisor of n_head ({self.n_head})"
            )
        if not self.window_pattern or set(self.window_pattern) - set("SL"):
            raise ValueError(
                f"window_pattern: got {self.window_pattern!r}, expected letters S (short) and L (long)"
            )

    @classmethod
    def from_depth(
        cls,
        depth: int,
        *,
        vocab_size: int,
        sequence_len: int,
        aspect_ratio: int = ASPECT_RATIO,
        head_dim: int = HEAD_DIM,
        window_pattern: str = window_pattern,
    ) -> "GPTConfig":
        """The shape for a given depth, the one dial.

        width = depth * aspect_ratio, rounded up to whole heads.
        """
        if min(depth, aspect_ratio, head_dim) < 1:
            raise ValueError(
                f"depth, aspect_ratio, head_dim: got {depth}, {aspect_ratio}, {head_dim}, expected >= 1"
            )
        n_embd = _round_up(depth * aspect_ratio, head_dim)
        n_head = n_embd // head_dim
        return cls(
            sequence_len=sequence_len,
            vocab_size=vocab_size,
            n_layer=depth,
            n_head=n_head,
            n_kv_head=n_head,
            n_embd=n_embd,
            window_pattern=window_pattern,
        )

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embeddings and of the head, in whole tiles.

        Logits are cropped to vocab_size.
        """
        return _round_up(self.vocab_size, VOCAB_MULTIPLE)

    @property
    def window_sizes(self) -> list[int]:
        """For each layer, how many earlier tokens a token sees."""
        long = self.sequence_len
        short = _round_up(math.ceil(long / 4), SHORT_WINDOW_MULTIPLE)
        letters = itertools.islice(itertools.cycle(self.window_pattern), self.n_layer - 1)
        sizes = [short if letter == "S" else long for letter in letters]
        return [*sizes, long]

    def has_value_embedding(self, layer: int) -> bool:
        """True for every other layer, counted back from the last."""
        return (self.n_layer - 1 - layer) % 2 == 0


# ---- parts ---------------------------------------------------------------------------------------


def norm(x: Tensor) -> Tensor:
    """RMSNorm over the last dimension, without parameters."""
    return F.rms_norm(x, (x.size(-1),))


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel pairs (c, c + D/2) of x (B, T, H, D); cos and sin of the angles: (T, 1, D/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


def recompute(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """`function(*args)`, computed a second time in the backward pass instead of kept in memory."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


class Linear(nn.Linear):
    """A linear layer without bias; its float32 master weight is cast to the dtype of the input."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


@torch.library.custom_op("nanochat::embedding_backward", mutates_args=())
def embedding_backward(grad: Tensor, idx: Tensor, num_rows: int) -> Tensor:
    """The gradient (num_rows, C) of an embedding: sums of sorted segments, in a fixed order.

    grad: (..., C), the gradient of the output; idx: (...), the rows that were looked up.
    """
    return torch.ops.aten.embedding_dense_backward(grad, idx, num_rows, -1, False)


@embedding_backward.register_fake
def _(grad: Tensor, idx: Tensor, num_rows: int) -> Tensor:
    return grad.new_empty(num_rows, grad.size(-1))


class _LookUp(torch.autograd.Function):
    """An embedding that keeps the eager backward pass in compiled code.

    Inductor's own backward pass adds with atomics, in any order.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, idx: Tensor) -> Tensor:
        ctx.save_for_backward(idx)
        ctx.num_rows = len(weight)
        return F.embedding(idx, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return embedding_backward(grad, *ctx.saved_tensors, ctx.num_rows), None


class Embedding(nn.Embedding):
    def forward(self, idx: Tensor) -> Tensor:
        return _LookUp.apply(self.weight, idx)


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

    def forward(
        self,
        x: Tensor,
        ve: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        kv_cache: KVCache | None,
        mask: Mask | None,
    ) -> Tensor:
        """x: (B, T, C).

        ve: (B, T, Hkv * D), this layer's value embedding, or None. rotary: see `apply_rotary`.
        mask: see `attention`. Returns (B, T, C).
        """
        heads = (*x.shape[:2], -1, self.head_dim)
        q = self.c_q(x).view(heads)
        k = self.c_k(x).view(heads)
        v = self.c_v(x).view(heads)
        if self.ve_gate is not None and ve is not None:
            # Each kv head adds a share of the value embedding to its values. A gate over the first
            # channels of x decides the share of each token: between 0 and 3, about 1.5 at the
            # start.
            share = 3 * torch.sigmoid(self.ve_gate(x[..., : self.ve_gate.in_features]))
            v = v + share.unsqueeze(-1) * ve.view(heads)
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


def initial_weight(name: str, shape: torch.Size, *, seed: int, n_embd: int) -> Tensor:
    """The initial value of one parameter: float32 on the CPU, a pure function of the arguments.

    Each parameter has its own generator. So its bits are the same on every device and for every
    number of processes (if their CPUs have the same instruction set), and they do not depend on
    other parameters: adding a layer leaves the matrices of the others unchanged.

    By default, a matrix is uniform (no outliers) with standard deviation 1/sqrt(n_embd). Matrices
    that write to the residual stream are called `c_proj` and start at zero, so every block starts
    as the identity.
    """
    key = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    rng = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)  # a seed has 63 bits
    weight = torch.empty(shape, dtype=torch.float32)
    # the uniform distribution from -bound to bound has that standard deviation
    bound = (3 / n_embd) ** 0.5
    depth = torch.arange(shape[0]) / max(shape[0] - 1, 1)  # 0 is the first layer, 1 the last
    match name.removesuffix(".weight").split(".")[-1]:
        case "wte":
            return weight.normal_(0, 0.8, generator=rng)
        case "lm_head":
            return weight.normal_(0, 0.001, generator=rng)
        case "c_fc":
            return weight.uniform_(-0.4 * bound, 0.4 * bound, generator=rng)
        case "c_proj" | "smear_lambda":
            return weight.zero_()
        case "ve_gate" | "smear_gate":
            return weight.uniform_(0, 0.02, generator=rng)  # slightly open
        case "resid_lambdas":
            return 1.15 - 0.10 * depth
        case "x0_lambdas":
            return 0.20 - 0.15 * depth
        case "backout_lambda":
            return weight.fill_(0.2)
        case _:
            return weight.uniform_(-bound, bound, generator=rng)


# ---- the model -----------------------------------------------------------------------------------


class GPT(nn.Module):
    """The model.

    Build it on any device; if on `meta`, call `to_empty(device=...)`. Then call `init_weights`, or
    `load_state_dict` and `set_compute_dtype`. Until then its weights are arbitrary.

    attention_mode: `causal`, or how `masks` separates documents: `sdpa_mask` (runs everywhere),
    `varlen` or `flex` (fast on CUDA). activation_checkpointing: keep only the input of each layer,
    and recompute the layer in the backward pass, which takes a third more time and far less memory.
    z_loss: weight of the z-loss, the squared logsumexp of a token's logits, which keeps logits from
    drifting (PaLM, 2204.02311). It affects gradients, not the returned loss.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        attention_mode: str = "causal",
        activation_checkpointing: bool = False,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        if attention_mode not in MODES:
            raise ValueError(
                f"--attention-mode: got {attention_mode!r}, expected one of {', '.join(MODES)}"
            )
        self.config = config
        self.attention_mode = attention_mode
        self.activation_checkpointing = activation_checkpointing
        self.z_loss = z_loss
        kv_width = config.n_kv_head * config.head_dim
        layers = range(config.n_layer)
        self.transformer = nn.ModuleDict(
            {
                "wte": Embedding(config.padded_vocab_size, config.n_embd),
                "h": nn.ModuleList(Block(config, i) for i in layers),
            }
        )
        self.value_embeds = nn.ModuleDict()
        for i in layers:
            if config.has_value_embedding(i):
                self.value_embeds[str(i)] = Embedding(config.padded_vocab_size, kv_width)
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

    @torch.no_grad()
    def init_weights(self, *, seed: int = 42, compute_dtype: torch.dtype | None = None) -> None:
        """Fill every parameter and buffer.

        The values depend on the seed alone, not on PyTorch's generator. compute_dtype: None for the
        device's default. Raises ValueError on the meta device.
        """
        if self.get_device().type == "meta":
            raise ValueError("init_weights on the meta device: call to_empty(device=...) first")
        # first, so each value is rounded once
        self.set_compute_dtype(compute_dtype or get_compute_dtype(self.get_device()))
        n_embd = self.config.n_embd
        for name, parameter in self.named_parameters():
            parameter.copy_(initial_weight(name, parameter.shape, seed=seed, n_embd=n_embd))

    @torch.no_grad()
    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        """Cast the embeddings and the rotary tables to `dtype`.

        The tables are computed in float32, and not saved.
        """
        self.transformer["wte"].to(dtype=dtype)
        self.value_embeds.to(dtype=dtype)
        half = self.config.head_dim // 2
        turns = ROPE_BASE ** (-torch.arange(half, dtype=torch.float32) / half)
        positions = torch.arange(ROPE_ROOM * self.config.sequence_len, dtype=torch.float32)
        angles = torch.outer(positions, turns)[:, None]
        device = self.get_device()  # the tables are computed on the CPU: the same bits everywhere
        self.cos = angles.cos().to(device, dtype)
        self.sin = angles.sin().to(device, dtype)

    # -- forward --

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        *,
        masks: DocMasks | None = None,
        kv_cache: KVCache | None = None,
        loss_reduction: str = "mean",
    ) -> Tensor:
        """Logits (B, T, vocab_size) float32; with targets, the loss in nats, float32."""
        start = 0 if kv_cache is None else kv_cache.get_pos()
        end = start + idx.size(1)
        if end > self.cos.size(0):
            raise ValueError(
                f"position {end:,} is past the rotary tables ({self.cos.size(0):,}); use fewer tokens"
            )
        rotary = self.cos[start:end], self.sin[start:end]
        x = x0 = middle = self._smear(norm(self.transformer["wte"](idx)), masks, kv_cache)
        for i, block in enumerate(self.transformer["h"].children()):
            mask = None if masks is None else masks.by_window[self.config.window_sizes[i]]
            ve = self.value_embeds[str(i)](idx) if str(i) in self.value_embeds else None
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = recompute(block, x, ve, rotary, kv_cache, mask)
            else:
                x = block(x, ve, rotary, kv_cache, mask)
            if i == self.config.n_layer // 2:
                middle = x
        if kv_cache is not None:
            kv_cache.advance(idx.size(1))
        x = norm(x - self.backout_lambda.to(x.dtype) * middle)

        if targets is None:
            return self._logits(x)
        losses = self._losses(x.flatten(0, 1), targets.flatten())
        if loss_reduction == "none":
            return losses.view(targets.shape)
        if loss_reduction == "sum":
            return losses.sum()
        return losses.sum() / (targets >= 0).sum()

    def _logits(self, x: Tensor) -> Tensor:
        logits = self.lm_head(x)[..., : self.config.vocab_size].float()
        return LOGIT_CAP * torch.tanh(logits / LOGIT_CAP)

    def _losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss of each of N tokens, from x (N, C); uncompiled, a chunk of tokens at a time."""
        # compiled code never stores float32 logits
        if len(x) <= LOSS_CHUNK or torch.compiler.is_compiling():
            return self._chunk_losses(x, targets)
        losses = []
        for chunk in zip(x.split(LOSS_CHUNK), targets.split(LOSS_CHUNK)):
            losses.append(recompute(self._chunk_losses, *chunk))
        return torch.cat(losses)

    def _chunk_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss of each of N tokens, from x (N, C)."""
        logits = self._logits(x)
        loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
        if self.z_loss and torch.is_grad_enabled():
            z = self.z_loss * logits.logsumexp(dim=-1).square().masked_fill(targets < 0, 0.0)
            loss = loss + (z - z.detach())  # adds 0 to the value, and the z-loss to the gradient
        return loss

    def _smear(self, x: Tensor, masks: DocMasks | None, kv_cache: KVCache | None) -> Tensor:
        """Add a gated share of the previous embedding to each position.

        The first position of a row or, with masks, of a document has none.
        """
        before = x.new_zeros(x.size(0), 1, x.size(2))
        if kv_cache is not None:
            before = kv_cache.prev_embedding
            kv_cache.prev_embedding = x[:, -1:]
        previous = torch.cat((before, x[:, :-1]), dim=1)
        gate = torch.sigmoid(self.smear_gate(x[..., : self.smear_gate.in_features]))
        gate = self.smear_lambda.to(x.dtype) * gate
        if masks is not None:
            gate = gate * masks.same_doc.unsqueeze(-1)
        return x + gate * previous

    def masks(self, doc_ids: Tensor | None, num_docs: int | None = None) -> DocMasks | None:
        """The masks that separate the documents of a batch in `forward`; None in causal mode.

        See `make_masks`. Call it outside compiled code. doc_ids: (B, T) int32, equal inside a
        document (or padding).
        """
        if self.attention_mode == "causal":
            return None
        if doc_ids is None:
            raise ValueError(
                f"--attention-mode {self.attention_mode}: the batch has no doc_ids; build the loader with "
                f"with_doc_ids=True"
            )
        return make_masks(
            doc_ids, self.config.window_sizes, mode=self.attention_mode, num_docs=num_docs
        )

    # -- accounting --

    def num_scaling_params(self) -> dict[str, int]:
        """Number of parameters by kind, including the padding of the vocabulary.

        For scaling laws with embeddings (Chinchilla, 2203.15556) and without (Kaplan et al.,
        2001.08361).
        """

        def count(module: nn.Module) -> int:
            return sum(p.numel() for p in module.parameters())

        counts = {
            "wte": count(self.transformer["wte"]),
            "value_embeds": count(self.value_embeds),
            "lm_head": count(self.lm_head),
            "transformer_matrices": count(self.transformer["h"]),
        }
        counts["scalars"] = count(self) - sum(counts.values())  # residual, x0, smear, backout
        return counts | {"total": count(self)}

    def estimate_flops(self) -> int:
        """Training FLOPs per token at full length (PaLM, 2204.02311).

        6 for each parameter of a matrix product (so none for embeddings), and for attention 12 per
        layer, channel and visible token.
        """
        matmuls = sum(m.weight.numel() for m in self.modules() if isinstance(m, Linear))
        visible = sum(min(window, self.config.sequence_len) for window in self.config.window_sizes)
        return 6 * matmuls + 12 * self.config.n_embd * visible

    def estimate_memory(
        self,
        batch_size: int,
        *,
        dtype: torch.dtype,
        compiled: bool,
        world_size: int = 1,
        num_leaves: int = 1,
        micro_batches: int = 1,
    ) -> dict[str, int]:
        """Memory that PyTorch reserves for steps on one of `world_size` GPUs, in bytes by part.

        The estimate is rather a little too high than too low. dtype: the compute dtype; num_leaves,
        micro_batches: how many of each a rank has in a step.
        """
        counts = self.num_scaling_params()
        total = counts["total"]
        embeddings = counts["wte"] + counts["value_embeds"]
        matrices = counts["transformer_matrices"]
        tokens = batch_size * self.config.sequence_len
        size = dtype.itemsize
        weights = size * embeddings + 4 * (total - embeddings)
        pending = 4 * total * (num_leaves.bit_length() - 1)

        # The backward pass uses the matrices in the compute dtype. The head's gradient has it, too,
        # before it is cast.
        casts = 2 * size * counts["lm_head"]
        if not self.activation_checkpointing:
            casts += size * matrices

        unit = tokens * self.config.n_embd * size
        all_layers, one_layer = self._kept_tensors(compiled)
        layers = int(unit * all_layers)
        gradients = weights if micro_batches == 1 else 4 * total
        # a leaf's only micro-batch has gradients when its layers are free again
        if micro_batches == num_leaves:
            gradients = max(0, gradients - layers)
        logits = 18 * min(tokens, LOSS_CHUNK) * self.config.vocab_size
        if compiled:
            logits = size * tokens * self.config.padded_vocab_size
        # The gradients of a step's first micro-batch lie where its logits were, so the second one's
        # logits do not fit there: that memory stays empty, except for the gradients.
        if compiled and micro_batches > 1:
            logits += max(0, logits - gradients - pending)

        parts = {"weights": weights, "gradients": gradients}
        parts["optimizer"] = (8 * (total - matrices) + 4 * matrices) // world_size
        parts |= {"pending leaves": pending, "casts": casts, "layers": layers}
        parts["logits or one layer"] = max(logits, int(unit * one_layer))
        return parts | {"spare": int(SPARE * sum(parts.values()))}

    def _kept_tensors(self, compiled: bool) -> tuple[float, float]:
        """How many tensors (B, T, C) a step keeps for all layers, and how many for one layer.

        The latter are in memory while the layer is recomputed and differentiated.
        """
        per_layer, ends, one_layer = KEPT[compiled, self.activation_checkpointing]
        if compiled and self.activation_checkpointing:
            beyond = max(0, self.config.n_layer - MANY_LAYERS)
            one_layer += BEYOND * beyond + BEYOND_SQUARED * beyond**2
        return per_layer * self.config.n_layer + ends, one_layer

    # -- optimizer --

    def param_groups(
        self,
        *,
        unembedding_lr: float = 0.004,
        embedding_lr: float = 0.2,
        matrix_lr: float = 0.02,
        weight_decay: float = 0.0,
        scalar_lr: float = 0.5,
    ) -> list[dict[str, Any]]:
        """The parameter groups of `MuonAdamW`.

        AdamW is for embeddings, head and scalars (the rates of embeddings and head are scaled by
        1/sqrt(width / 768)), and Muon for the matrices of the layers, one group per shape.
        """
        scale = (self.config.n_embd / 768) ** -0.5
        adamw: list[tuple[str | tuple[str, ...], float, tuple[float, float], float]] = [
            # prefix of the names, learning rate, betas, weight decay
            ("lm_head.", unembedding_lr * scale, (0.8, 0.96), 0.01),
            ("transformer.wte.", embedding_lr * scale, (0.8, 0.995), 0.001),
            ("value_embeds.", embedding_lr * scale * 0.5, (0.8, 0.995), 0.01),
            ("resid_lambdas", scalar_lr * 0.01, (0.8, 0.95), 0.05),
            ("x0_lambdas", scalar_lr, (0.96, 0.95), 0.0),
            (("smear_", "backout_lambda"), 0.2, (0.8, 0.95), 0.0),
        ]
        named = dict(self.named_parameters())
        groups: list[dict[str, Any]] = []
        for prefix, lr, betas, decay in adamw:
            names = [name for name in named if name.startswith(prefix)]
            rates = {"lr": lr, "betas": betas, "eps": 1e-10, "weight_decay": decay}
            groups.append({"kind": "adamw", **rates, "names": names})

        muon = {"momentum": 0.95, "ns_steps": 5, "beta2": 0.9, "weight_decay": weight_decay}
        matrices = {n: p.shape for n, p in named.items() if n.startswith("transformer.h.")}
        for shape in sorted(set(matrices.values())):
            names = [name for name in matrices if matrices[name] == shape]
            groups.append({"kind": "muon", "lr": matrix_lr, **muon, "names": names})

        for group in groups:
            group["initial_lr"] = group["lr"]
            group["params"] = [named[name] for name in group["names"]]
        assert sorted(n for g in groups for n in g["names"]) == sorted(named)
        return groups

    def setup_optimizer(
        self, *, num_leaves: int | None = None, **learning_rates: float
    ) -> MuonAdamW:
        """The optimizer over `param_groups(**learning_rates)`, for a step of `num_leaves`.

        It orthogonalizes in the model's compute dtype.
        """
        groups = self.param_groups(**learning_rates)
        return MuonAdamW(groups, polar_dtype=self.compute_dtype, num_leaves=num_leaves)
