"""The GPT for Hugging Face transformers. `scripts.export --to=hf` copies this file beside the
weights. It needs only torch and transformers 5, nothing else from this project, and no core module
imports it.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

The arithmetic is that of `gpt.py`, whose docstring names the source of each part. Parameters have
the same names, so weights are exported unchanged. The differences follow from the interface of
transformers:

- Rows may be padded on either side. `attention_mask` marks the tokens; no token attends to padding,
  and rotary angles skip it.
- The cache is transformers' own `DynamicCache`. Smear needs the embedding of the previous token, so
  an extra layer of the cache holds embeddings, as keys of a single head; its values are empty.
  Whatever transformers does to a cache (reorder, repeat, crop) thus also happens to the embeddings.

      cache.layers    0 .. n_layer - 1    keys, values (B, kv heads, T, head_dim)
                      n_layer             embeddings (B, 1, T, n_embd), nothing (B, 1, T, 0)

- The caller does not shift `labels`: position t predicts label t + 1.
- An argument that would change the result in another model, but that this one cannot honour, is an
  error. Versions of transformers differ in what they pass: the cache, for example, is
  `past_key_values` in 5.0 and `cache` in 5.24.
"""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
import transformers
from torch import Tensor

try:
    from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import Cache, DynamicLayer
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.modeling_outputs import CausalLMOutputWithPast
except ImportError as e:
    raise ImportError(
        f"This model's code needs transformers 5, but {transformers.__version__} is installed ({e}); "
        f"pip install --upgrade transformers"
    ) from None

SHAPE = {  # the model's shape and the constants of its architecture; config.json overrides them
    "vocab_size": 32768,
    "padded_vocab_size": 32768,
    "sequence_len": 2048,
    "n_layer": 12,
    "n_head": 6,
    "n_kv_head": 6,
    "n_embd": 768,
    "window_sizes": [2048] * 12,  # how many earlier tokens a token sees in each layer; -1: all
    "rope_base": 100_000.0,
    "ve_gate_channels": 12,
    "smear_channels": 24,
    "qk_scale": 1.2,
    "logit_cap": 15.0,
}

# the name of the cache in the results of this version of transformers
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class NanochatExactConfig(PreTrainedConfig):
    """Has one attribute per field of SHAPE."""

    model_type = "nanochat_exact"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012  Trainer adds a list to it
    attribute_map = {  # noqa: RUF012  transformers reads it from the class
        "num_hidden_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head",
        "max_position_embeddings": "sequence_len",
    }

    def __init__(self, **kwargs: Any) -> None:
        for name, value in SHAPE.items():
            setattr(self, name, kwargs.pop(name, value))
        super().__init__(**{"tie_word_embeddings": False, **kwargs})

    def has_value_embedding(self, layer: int) -> bool:
        """Whether a layer has value embeddings: every other one, counted back from the last."""
        return (self.n_layer - 1 - layer) % 2 == 0


def norm(x: Tensor) -> Tensor:
    """RMSNorm over the last dimension, without parameters."""
    return F.rms_norm(x, (x.size(-1),))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel pairs (c, c + D/2) of x (B, H, T, D) by angles; cos and sin: (B or 1, 1, T,
    D/2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int, is_token: Tensor | None) -> Tensor:
    """Causal attention of q (B, H, Tq, D), at the last Tq of Tk positions, to k and v (B, Hkv, Tk,
    D).

    window: how many earlier tokens a query sees; -1: all. is_token: (B, Tk) bool; None: all
    positions are tokens. Padding attends to itself, so that its softmax is not empty. Returns (B,
    H, Tq, D)."""
    Tq = q.size(2)
    out_of_reach = 0
    if window >= 0:  # drop the keys before the first query's window
        out_of_reach = max(0, k.size(2) - Tq - window)
        k = k[:, :, out_of_reach:]
        v = v[:, :, out_of_reach:]
    Tk = k.size(2)
    grouped = q.size(1) != k.size(1)
    sees_all = window < 0 or window >= Tk - 1
    if is_token is None and sees_all and Tq == Tk:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    queries = torch.arange(Tk - Tq, Tk, device=q.device)
    keys = torch.arange(Tk, device=q.device)
    back = queries[:, None] - keys
    visible = back >= 0
    if window >= 0:
        visible = visible & (back <= window)
    if is_token is not None:
        visible = visible & is_token[:, None, None, out_of_reach:] | (back == 0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=grouped)


class Attention(nn.Module):
    def __init__(self, config: NanochatExactConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.window = config.window_sizes[layer]
        self.qk_scale = config.qk_scale
        self.head_dim = config.n_embd // config.n_head
        kv_width = config.n_kv_head * self.head_dim
        self.c_q = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.c_k = nn.Linear(config.n_embd, kv_width, bias=False)
        self.c_v = nn.Linear(config.n_embd, kv_width, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.ve_gate = None
        if config.has_value_embedding(layer):
            self.ve_gate = nn.Linear(config.ve_gate_channels, config.n_kv_head, bias=False)

    def forward(
        self,
        x: Tensor,
        ve: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        cache: Cache | None,
        is_token: Tensor | None,
    ) -> Tensor:
        """x: (B, T, C). ve: (B, T, Hkv * D), this layer's value embedding, or None. Returns (B, T,
        C)."""
        heads = (*x.shape[:2], -1, self.head_dim)
        q = self.c_q(x).view(heads)
        k = self.c_k(x).view(heads)
        v = self.c_v(x).view(heads)
        if self.ve_gate is not None and ve is not None:
            gate = 3 * torch.sigmoid(self.ve_gate(x[..., : self.ve_gate.in_features]))
            v = v + gate.unsqueeze(-1) * ve.view(heads)
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        q = norm(rotate(q, *rotary)) * self.qk_scale
        k = norm(rotate(k, *rotary)) * self.qk_scale
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        y = attend(q, k, v, self.window, is_token)
        return self.c_proj(y.transpose(1, 2).reshape(x.shape))


class MLP(nn.Module):
    def __init__(self, config: NanochatExactConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(GradientCheckpointingLayer):
    def __init__(self, config: NanochatExactConfig, layer: int) -> None:
        super().__init__()
        self.attn = Attention(config, layer)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, *attn_args: Any) -> Tensor:
        x = x + self.attn(norm(x), *attn_args)
        return x + self.mlp(norm(x))


class NanochatExactForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = NanochatExactConfig
    _no_split_modules = ("Block",)
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # Trainer passes num_items_in_batch
    # scalars are float32 in training, whatever the dtype of the activations
    _keep_in_fp32_modules_strict = ("resid_lambdas", "x0_lambdas", "smear_lambda", "backout_lambda")

    def __init__(self, config: NanochatExactConfig) -> None:
        super().__init__(config)
        kv_width = config.n_kv_head * (config.n_embd // config.n_head)
        layers = range(config.n_layer)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.padded_vocab_size, config.n_embd),
                "h": nn.ModuleList(Block(config, i) for i in layers),
            }
        )
        self.value_embeds = nn.ModuleDict(
            {
                str(i): nn.Embedding(config.padded_vocab_size, kv_width)
                for i in layers
                if config.has_value_embedding(i)
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.resid_lambdas = nn.Parameter(torch.ones(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.zeros(config.n_layer))
        self.smear_gate = nn.Linear(config.smear_channels, 1, bias=False)
        self.smear_lambda = nn.Parameter(torch.zeros(1))
        self.backout_lambda = nn.Parameter(torch.zeros(1))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.transformer["wte"]

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args: Any, **kwargs: Any
    ) -> nn.Module:
        """The input embeddings. ValueError for a different number of tokens."""
        if new_num_tokens not in (None, self.config.vocab_size):
            raise ValueError(
                f"resize_token_embeddings: got {new_num_tokens:,}, but this model has "
                f"{self.config.vocab_size:,} tokens, which several layers embed; use one of the "
                f"tokenizer's special tokens instead of new ones"
            )
        return self.get_input_embeddings()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        num_items_in_batch: int | Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits (B, T, vocab_size) float32 of input_ids (B, T); with labels (B, T), also the loss,
        see `_loss`.

        attention_mask: (B, past + T), 0 at padding. past_key_values, cache: two names for the
        cache. logits_to_keep: how many of the last positions (0: all), or which positions.
        output_hidden_states: also return n_layer + 1 tensors (B, T, n_embd): the embeddings and
        each layer's output, the last one as the head reads it. return_dict: if False, return a
        tuple. ValueError for a cache of a fixed size, for position_ids of packed documents, and for
        arguments that would be ignored."""
        cache = past_key_values if cache is None else cache
        position_ids = others.pop("position_ids", None)
        others.pop("cache_position", None)  # always equals the number of tokens in the cache
        if input_ids is None or others.pop("inputs_embeds", None) is not None:
            raise ValueError(
                "inputs_embeds: value embeddings are looked up by token, so pass input_ids"
            )
        self._refuse(cache, others)
        if cache is None and use_cache is not False and labels is None and not self._recomputes():
            cache = DynamicCache()
        with_states = output_hidden_states
        if with_states is None:
            with_states = self.config.output_hidden_states
        states = self._hidden_states(
            input_ids, attention_mask, position_ids, cache, keep_all=with_states
        )
        kept: slice | Tensor
        if isinstance(logits_to_keep, int):
            kept = slice(-logits_to_keep or None, None)
        else:
            kept = logits_to_keep
        logits = self.lm_head(states[-1][:, kept])[..., : self.config.vocab_size].float()
        logits = self.config.logit_cap * torch.tanh(logits / self.config.logit_cap)
        loss = None if labels is None else self._loss(logits, labels, num_items_in_batch)
        result = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE: cache},
            hidden_states=tuple(states) if with_states else None,
        )
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return result if as_dict else result.to_tuple()

    def _hidden_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        *,
        keep_all: bool,
    ) -> list[Tensor]:
        """The embeddings and each layer's output, (B, T, C) each, the last one as the head reads it;
        without `keep_all`, only the last one. The cache receives the new tokens."""
        start = 0 if cache is None else cache.get_seq_length()
        is_token = self._is_token(attention_mask, (input_ids.size(0), start + input_ids.size(1)))
        embeddings = norm(self.transformer["wte"](input_ids))
        x = x0 = middle = self._smear(embeddings, cache, is_token)
        rotary = self._rotary(start, x, is_token, position_ids)
        states = []
        for i, block in enumerate(self.transformer["h"].children()):
            if keep_all:
                states.append(x)
            ve = self.value_embeds[str(i)](input_ids) if str(i) in self.value_embeds else None
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            x = block(x, ve, rotary, cache, is_token)
            if i == self.config.n_layer // 2:
                middle = x
        states.append(norm(x - self.backout_lambda.to(x.dtype) * middle))
        return states

    def _recomputes(self) -> bool:
        """Whether layers are computed a second time for their gradients (gradient
        checkpointing)."""
        blocks = self.transformer["h"].children()
        return (
            self.training
            and torch.is_grad_enabled()
            and any(block.gradient_checkpointing for block in blocks)
        )

    def _refuse(self, cache: Cache | None, others: dict[str, Any]) -> None:
        """ValueError for arguments that this model cannot honour. `others`: those that `forward`
        does not name."""
        if others.pop("output_attentions", None) or self.config.output_attentions:
            raise ValueError(
                "output_attentions: attention is computed without storing its weights; remove this "
                "setting"
            )
        if cache is not None and cache.is_compileable:
            raise ValueError(
                "cache_implementation: a cache of a fixed size has no room for the embeddings "
                "that smear needs; remove this setting"
            )
        if cache is not None and self._recomputes():
            raise ValueError(
                "gradient_checkpointing: a layer that is computed twice would enter the cache twice; "
                "pass use_cache=False and no cache"
            )
        if unknown := [name for name, value in others.items() if value is not None]:
            raise ValueError(f"{', '.join(unknown)}: this model would ignore it; leave it out")

    def _is_token(self, attention_mask: Tensor | None, shape: tuple[int, int]) -> Tensor | None:
        """Which positions are tokens, (B, past + T) bool; None if all are."""
        if attention_mask is None:
            return None
        if attention_mask.shape != shape:
            raise ValueError(
                f"attention_mask: got the shape {tuple(attention_mask.shape)}, expected {shape}, for rows "
                f"of earlier and new tokens, 0 at padding"
            )
        return None if attention_mask.all() else attention_mask.bool()

    def _loss(
        self, logits: Tensor, labels: Tensor, num_items_in_batch: int | Tensor | None
    ) -> Tensor:
        """The loss in nats over the labels that are not -100: their mean, or their sum divided by
        num_items_in_batch, the number of labels in all micro-batches of a step."""
        reduction = "mean" if num_items_in_batch is None else "sum"
        predicted, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten().to(logits.device)
        loss = F.cross_entropy(predicted, targets, ignore_index=-100, reduction=reduction)
        if num_items_in_batch is None:
            return loss
        return loss / torch.as_tensor(num_items_in_batch, device=loss.device)

    def _rotary(
        self, start: int, x: Tensor, is_token: Tensor | None, position_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines (B or 1, 1, T, D/2) of the positions of x (B, T, C), which begin at
        `start`."""
        half = self.config.n_embd // self.config.n_head // 2
        turns = self.config.rope_base ** (-torch.arange(half, dtype=torch.float32) / half)
        positions = torch.arange(start, start + x.size(1))[None]
        is_new_token = torch.tensor(True)
        if is_token is not None:  # padding has no position: a row's first token is at 0
            is_new_token = is_token.cpu()[:, start:]
            positions = is_token.cpu().cumsum(dim=1)[:, start:].sub(1).clamp(min=0)
        if position_ids is not None:
            differs = position_ids.cpu() != positions
            if (is_new_token & differs).any():
                raise ValueError(
                    "position_ids: they do not count the tokens of a row from 0, but documents packed into a "
                    "row would attend to each other; pass one document per row, with padding"
                )
        angles = positions[:, None, :, None].float() * turns  # on the CPU: the same bits everywhere
        return angles.cos().to(x.device, x.dtype), angles.sin().to(x.device, x.dtype)

    def _smear(self, x: Tensor, cache: Cache | None, is_token: Tensor | None) -> Tensor:
        """Add a gated share of the previous embedding to each position of x (B, T, C), except at a
        row's first token and after padding."""
        T = x.size(1)
        embeddings = x
        if cache is not None:
            # in a layer of its own, as the keys of a single head
            while len(cache.layers) <= self.config.n_layer:
                cache.layers.append(DynamicLayer())
            no_values = x[:, None, :, :0]
            keys, _ = cache.update(x[:, None], no_values, self.config.n_layer)
            embeddings = keys[:, 0]
        previous = F.pad(embeddings, (0, 0, 1, 0))[:, -T - 1 : -1]
        gate = torch.sigmoid(self.smear_gate(x[..., : self.smear_gate.in_features]))
        gate = self.smear_lambda.to(x.dtype) * gate
        if is_token is not None:
            after_token = F.pad(is_token, (1, 0))[:, -T - 1 : -1]
            gate = gate * after_token[..., None]
        return x + gate * previous
