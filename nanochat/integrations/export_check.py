"""
Checks that an export computes what the run's own model computes, before it is published.

    gpt.GPT, which may be changed, with the weights     ->  logits  \
                                                                      apart by rounding only, or the export is refused
    the exported code, or nanochat's arithmetic, the same weights  /

An export carries the weights, and a second program supplies the code: modeling_nanochat_exact.py
for transformers, nanochat's own gpt.py for nanochat. Neither knows of a change to `gpt.py`, and the
weights would load without an error. Both sides get the same random tokens, in float32 on the CPU,
in rows that exceed the shortest window where possible.

transformers need not be installed: stand-ins replace its base classes, which load, save and
generate, but compute nothing. nanochat's module is not part of this repository, so
`nanochat_logits` states its arithmetic a second time (commit 92d63d4); dev/compare_nanochat.py
compares the real one. The checks cover logits of whole rows. They cover neither caches and padding,
which dev/compare_hf.py checks, nor a change that these weights do not show (a new activation right
after the start, while the MLPs' output matrices are zero).
"""

import dataclasses
import functools
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.gpt import GPT

ROWS, BEYOND_WINDOW = 2, 64  # rows of the batch; tokens by which they exceed the shortest window

Function = Callable[[Tensor], Tensor]  # tokens (B, T) -> logits (B, T, vocab_size)
Weight = Callable[[str], Tensor]  # a tensor's name -> its values


def check_same(model: GPT, other: Function, what: str, remedy: str) -> None:
    """ValueError, which begins with `what` and ends with `remedy`, if `other` differs from a model
    in float32 by more than rounding."""
    config = model.config
    beyond_window = min(config.window_sizes) + BEYOND_WINDOW
    length = max(2, min(config.sequence_len, beyond_window))
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (ROWS, length), generator=rng)
    with torch.no_grad():
        ours = model(tokens)
        theirs = other(tokens)
    distance = (ours - theirs).norm()
    apart = float(distance / ours.norm())
    # each layer adds sums of up to 4 * n_embd products, whose rounding errors grow with the square
    # root
    eps = torch.finfo(torch.float32).eps
    limit = eps * (config.n_layer + 1) * math.sqrt(4 * config.n_embd)
    if not apart <= limit:
        raise ValueError(
            f"{what} computes other logits than nanochat/gpt.py from the same weights: they differ by "
            f"{apart:.1e} of their norm, and rounding explains {limit:.1e}; {remedy}"
        )


# ---- transformers --------------------------------------------------------------------------------


class Config:
    """Stands in for transformers' PreTrainedConfig: it holds values."""

    output_attentions = output_hidden_states = False
    return_dict = True

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Model(nn.Module):
    """Stands in for transformers' PreTrainedModel."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def post_init(self) -> None:
        """Initialize nothing: the weights follow."""


class Layer(nn.Module):
    """Stands in for transformers' GradientCheckpointingLayer."""

    gradient_checkpointing = False


@dataclasses.dataclass
class Output:
    """Stands in for transformers' CausalLMOutputWithPast."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    cache: Any = None
    past_key_values: Any = None
    hidden_states: tuple[Tensor, ...] | None = None

    def to_tuple(self) -> tuple[Any, ...]:
        """The values that are not None."""
        values = vars(self).values()
        return tuple(value for value in values if value is not None)


class Empty:
    """Stands in for the classes of caches and of generation, which the checks do not use."""


STAND_INS: dict[str, dict[str, Any]] = {
    "transformers": {
        "DynamicCache": Empty,
        "GenerationMixin": Empty,
        "PreTrainedConfig": Config,
        "PreTrainedModel": Model,
        "__version__": "5",
    },
    "transformers.cache_utils": {"Cache": Empty, "DynamicLayer": Empty},
    "transformers.modeling_layers": {"GradientCheckpointingLayer": Layer},
    "transformers.modeling_outputs": {"CausalLMOutputWithPast": Output},
}


def load_code(path: Path) -> ModuleType:
    """The module in an exported file, with the stand-ins for transformers. ImportError if it
    imports more of it."""
    modules = {name: ModuleType(name) for name in STAND_INS}
    for name, members in STAND_INS.items():
        vars(modules[name]).update(members)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        spec.loader.exec_module(code)
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    return code


def one_line(error: Exception) -> str:
    """The beginning of an error's text, on one line."""
    words = str(error).split()
    return " ".join(words)[:400]


def check_hf(model: GPT, path: Path, config: Mapping[str, Any]) -> None:
    """ValueError if the exported code at `path`, with the values of config.json, differs from a
    model in float32."""
    what = f"--to hf: {path.name}"
    remedy = f"make the same change to nanochat/integrations/{path.name}, the code that transformers runs"
    try:
        code = load_code(path)
        with torch.device("meta"):
            exported_config = code.NanochatExactConfig(**config)
            exported = code.NanochatExactForCausalLM(exported_config).eval()
        exported.load_state_dict(model.state_dict(), assign=True)
    except (ImportError, RuntimeError) as e:
        # RuntimeError: tensors that are missing, unknown or different in shape
        raise ValueError(f"{what} cannot load this model ({one_line(e)}); {remedy}") from e

    def logits_of(tokens: Tensor) -> Tensor:
        return exported(tokens, use_cache=False).logits

    check_same(model, logits_of, what, remedy)


# ---- nanochat ------------------------------------------------------------------------------------

NANOCHAT_FIELDS = (
    "sequence_len",
    "vocab_size",
    "n_layer",
    "n_head",
    "n_kv_head",
    "n_embd",
    "window_pattern",
)


def check_nanochat(model: GPT) -> None:
    """ValueError if nanochat's GPT, given the weights and the configuration of a model in float32,
    would differ."""
    what = "--to nanochat: nanochat's gpt.py"
    remedy = (
        "make the same change to gpt.py in nanochat and copy the checkpoint's files there yourself, or export "
        "--to=hf"
    )
    config = dataclasses.asdict(model.config)
    state = model.state_dict()
    unread = {*state, *config} - {*NANOCHAT_FIELDS}

    def weight(name: str) -> Tensor:
        unread.discard(name)
        return state[name]

    def logits_of(tokens: Tensor) -> Tensor:
        return nanochat_logits(weight, config, tokens)

    try:
        check_same(model, logits_of, what, remedy)
    except (KeyError, RuntimeError) as e:  # a tensor that is missing, or of a different shape
        raise ValueError(f"{what} cannot load this model ({one_line(e)}); {remedy}") from e
    if unread:
        raise ValueError(f"{what} does not know {', '.join(sorted(unread))}; {remedy}")


def attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal attention of q (B, T, H, D) to k and v (B, T, Hkv, D), each query to `window` earlier
    tokens."""
    positions = torch.arange(q.size(1))
    back = positions[:, None] - positions
    visible = (back >= 0) & (back <= window)
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    is_grouped = q.size(1) != k.size(1)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=is_grouped)
    return y.transpose(1, 2).flatten(2)


def norm(x: Tensor) -> Tensor:
    """RMSNorm without parameters."""
    return F.rms_norm(x, (x.size(-1),))


def rotate(x: Tensor) -> Tensor:
    """Rotary positions of x (B, T, H, D)."""
    half = x.size(3) // 2
    turns = 100_000 ** (-torch.arange(half) / half)
    positions = torch.arange(x.size(1)).float()
    angles = torch.outer(positions, turns)[:, None]
    cos, sin = angles.cos(), angles.sin()
    a, b = x.split(half, dim=3)
    first = a * cos + b * sin
    second = b * cos - a * sin
    return torch.cat((first, second), dim=3)


def apply_linear(weight: Weight, name: str, x: Tensor) -> Tensor:
    """The matrix `name` times each vector of x (..., C)."""
    return F.linear(x, weight(f"{name}.weight"))


def embed(weight: Weight, tokens: Tensor) -> Tensor:
    """The embeddings (B, T, C) of tokens (B, T); each token's has some of the previous token's
    added."""
    x = norm(weight("transformer.wte.weight")[tokens])
    smear = apply_linear(weight, "smear_gate", x[:, 1:, :24]).sigmoid()
    gate = weight("smear_lambda") * smear
    mixed = x[:, 1:] + gate * x[:, :-1]
    return torch.cat((x[:, :1], mixed), dim=1)


def nanochat_logits(weight: Weight, config: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """The logits (B, T, vocab_size) that nanochat computes from tokens (B, T). weight: from a
    tensor's name to its values, float32. config: the values of nanochat's GPTConfig. Nothing here
    comes from our gpt.py."""
    project = functools.partial(apply_linear, weight)
    num_layers = config["n_layer"]
    head_size = config["n_embd"] // config["n_head"]
    heads = (*tokens.shape, -1, head_size)
    long = config["sequence_len"]
    quarter = math.ceil(long / 4)
    window = {"L": long, "S": 128 * math.ceil(quarter / 128)}
    pattern = config["window_pattern"]

    x = x0 = middle = embed(weight, tokens)
    for i in range(num_layers):
        attn, mlp = f"transformer.h.{i}.attn", f"transformer.h.{i}.mlp"
        x = weight("resid_lambdas")[i] * x + weight("x0_lambdas")[i] * x0

        # attention; every other layer, among them the last one, adds embeddings to its values
        y = norm(x)
        q = project(f"{attn}.c_q", y).view(heads)
        k = project(f"{attn}.c_k", y).view(heads)
        v = project(f"{attn}.c_v", y).view(heads)
        is_last = i == num_layers - 1
        if i % 2 == (num_layers - 1) % 2:
            gate = 3 * project(f"{attn}.ve_gate", y[..., :12]).sigmoid()
            embeds = weight(f"value_embeds.{i}.weight")[tokens]
            v = v + gate[..., None] * embeds.view(heads)
        q = 1.2 * norm(rotate(q))
        k = 1.2 * norm(rotate(k))
        kind = "L" if is_last else pattern[i % len(pattern)]
        y = attend(q, k, v, window[kind])
        x = x + project(f"{attn}.c_proj", y)

        # the MLP
        hidden = project(f"{mlp}.c_fc", norm(x)).relu().square()
        x = x + project(f"{mlp}.c_proj", hidden)
        if i == num_layers // 2:
            middle = x

    x = norm(x - weight("backout_lambda") * middle)
    logits = project("lm_head", x)[..., : config["vocab_size"]]
    return 15 * torch.tanh(logits / 15)
