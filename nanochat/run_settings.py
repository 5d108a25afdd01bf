"""
What follows from the settings of a run: its model, its memory, and every automatic setting.

    depth, T, vocabulary --> shape of the model --> parameter counts --> batch size, horizon, rates
    rows per step, data, processes --> lanes --> leaves
    memory of the GPU --> rows per forward pass
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from nanochat.common import show
from nanochat.config import Settings, flag, known_settings
from nanochat.dataloader import StepLayout, default_leaves
from nanochat.fp8 import convert
from nanochat.gpt import GPT, GPTConfig
from nanochat.order import MAX_LANES, default_lanes, fed_lanes
from nanochat.pins import Manifest, counts_and_means
from nanochat.run_dir import curriculum_text
from nanochat.run_order import order_of
from nanochat.schedule import REFERENCE_DEPTH, Horizon, resolve_horizon

# share of a GPU's memory for a step, with one process and with several (NCCL)
FIT_ALONE = 0.92
FIT_TOGETHER = 0.88
MAX_ROWS = 32  # in a forward pass, if the size of the memory is unknown


def build_model(settings: Settings, depth: int | None = None) -> GPT:
    """The model on the meta device: shapes and types without data. `depth` overrides that of the
    settings."""
    config = GPTConfig.from_depth(
        settings.depth if depth is None else depth,
        vocab_size=settings.vocab_size,
        sequence_len=settings.max_seq_len,
        aspect_ratio=settings.aspect_ratio,
        head_dim=settings.head_dim,
        window_pattern=settings.window_pattern,
    )
    with torch.device("meta"):
        model = GPT(
            config,
            attention_mode=settings.attention_mode,
            activation_checkpointing=settings.activation_checkpointing,
            z_loss=settings.z_loss,
        )
    if settings.fp8:
        convert(model)
    return model


def estimate_memory(settings: Settings, room: int | None = None) -> dict[str, int]:
    """{part: bytes} of the GPU memory that resolved settings need, see `GPT.estimate_memory`.
    `room`: the bytes that a step may use; if they do not suffice, pending sums of leaves are not
    counted, because they stay on the host."""
    layout = StepLayout(
        settings.lanes,
        settings.total_batch_size // settings.max_seq_len,
        settings.device_batch_size,
        0,
        settings.world_size,
        settings.leaves,
    )
    leaves = len(layout.leaves)
    estimate = partial(
        build_model(settings).estimate_memory,
        settings.device_batch_size,
        dtype=getattr(torch, settings.dtype),
        compiled=is_compiled(settings),
        world_size=settings.world_size,
        micro_batches=leaves * layout.micro_batches_per_leaf,
    )
    parts = estimate(num_leaves=leaves)
    if room is not None and sum(parts.values()) > room:
        return estimate(num_leaves=1)
    return parts


def is_compiled(settings: Settings) -> bool:
    """Whether the model is compiled: by default, on CUDA."""
    if settings.compile == "auto":
        return settings.device_type == "cuda"
    return settings.compile == "on"


def device_memory(device: torch.device, world_size: int) -> int | None:
    """Bytes of a GPU's memory that a step may use: the rest is for CUDA, fragmentation and, with
    several processes, NCCL's buffers. None if the device is not a GPU."""
    if device.type != "cuda":
        return None
    return int(
        (FIT_ALONE if world_size == 1 else FIT_TOGETHER)
        * torch.cuda.get_device_properties(device).total_memory
    )


def is_tight(settings: Settings, device: torch.device) -> bool:
    """Whether the GPU has no room for the pending sums of leaves (see `LeafAccumulator`), which then
    stay on the host."""
    room = device_memory(device, settings.world_size)
    return room is not None and sum(estimate_memory(settings).values()) > room


def largest_batch(settings: Settings, layout: StepLayout, room: int | None) -> int:
    """The number of rows per forward pass: the largest power of two that is at most a leaf's rows
    and fits into `room` bytes (None: at most 32 rows), not counting pending sums of leaves, which
    may be on the host. The largest also keeps a GPU busiest: the deterministic attention kernel
    runs rows x heads thread blocks in waves, one block per multiprocessor, and doubling the blocks
    never increases the idle share."""

    def fits(B: int) -> bool:
        if room is None:
            return B <= MAX_ROWS
        return sum(estimate_memory(replace(settings, device_batch_size=B), room).values()) <= room

    B = 1
    while layout.rows_of_longest_leaf >= 2 * B and fits(2 * B):
        B *= 2
    return B


def resolve(
    settings: Settings,
    dtype: torch.dtype,
    room: int | None,
    train: Mapping[str, Manifest] | None = None,
) -> tuple[Settings, Horizon, GPTConfig]:
    """(settings, horizon, shape of the model) with all automatic settings resolved.

    `room`: see `device_memory`. `train`: training files of a new run, which limit its lanes.
    ValueError for settings that do not fit together.
    """
    # batch size, horizon and rates follow from parameter counts: the model comes first
    model = build_model(settings)
    horizon = _horizon(settings, model)
    rows = horizon.total_batch_size // settings.max_seq_len
    world_size = settings.world_size
    lanes = settings.lanes
    if lanes == -1:
        lanes = default_lanes(rows, fed=_lanes_fed(settings, train or {}), world_size=world_size)
    leaves = settings.leaves
    if leaves == -1:
        leaves = default_leaves(world_size, lanes)
    settings = replace(
        settings,
        total_batch_size=horizon.total_batch_size,
        lanes=lanes,
        leaves=leaves,
        dtype=str(dtype).removeprefix("torch."),
    )
    is_automatic = settings.device_batch_size == -1
    B = 1 if is_automatic else settings.device_batch_size
    layout = StepLayout(lanes, rows, B, 0, world_size, leaves)  # ValueError if they do not fit
    if is_automatic:
        settings = replace(settings, device_batch_size=largest_batch(settings, layout, room))
    if settings.mix is not None:
        settings.mix.phase_rows(settings.max_seq_len, lanes)  # ValueError for a short phase
        _check_budget(settings, horizon)
    return settings, horizon, model.config


def _horizon(settings: Settings, model: GPT) -> Horizon:
    """How long a run of this model is, its batch size, and how rates scale with them."""
    reference = build_model(settings, REFERENCE_DEPTH)
    fork = settings.fork or {}
    scaling_params, reference_params = [
        sum(m.num_scaling_params()[part] for part in ("transformer_matrices", "lm_head"))
        for m in (model, reference)
    ]
    return resolve_horizon(
        num_iterations=settings.num_iterations,
        target_flops=settings.target_flops,
        target_param_data_ratio=settings.target_param_data_ratio,
        total_batch_size=settings.total_batch_size,
        weight_decay=settings.weight_decay,
        sequence_len=settings.max_seq_len,
        scaling_params=scaling_params,
        reference_scaling_params=reference_params,
        flops_per_token=model.estimate_flops(),
        curriculum_tokens=settings.curriculum_end,
        first_step=fork.get("step", 0),
        first_tokens=fork.get("tokens", 0),
    )


def _lanes_fed(settings: Settings, train: Mapping[str, Manifest]) -> int:
    """How many lanes the smallest bucket can feed."""
    fed = [
        fed_lanes(
            *counts_and_means(manifest),
            T=settings.max_seq_len,
            buffer_size=settings.buffer_size,
        )
        for manifest in train.values()
    ]
    return min(fed, default=MAX_LANES)


def _check_budget(settings: Settings, horizon: Horizon) -> None:
    """ValueError if a curriculum is longer or shorter than the run, or does not get to its last
    phase. A fork may end before the phases that it inherits do, and prints a note then: so it may cut
    out a spike, or take smaller steps."""
    mix = settings.mix
    changes = (settings.fork or {}).get("changes")
    is_inherited = changes is not None and "curriculum" not in changes
    if mix is None:
        return
    begin, end = settings.curriculum_begin, settings.curriculum_end
    total = horizon.total_tokens
    if not end and settings.num_iterations < 1 and settings.target_flops <= 0:
        raise ValueError(
            "--curriculum: its last phase has no duration_tokens, so it does not say how long the run is; "
            "give the phase a duration, or name --num-iterations"
        )
    last = begin + sum(phase.duration_tokens or 0 for phase in mix.phases[:-1])
    is_short = ends_early(settings, horizon) if end else total <= last
    is_long = end > 0 and total - end > horizon.total_batch_size
    if mix.allow_budget_mismatch or not (is_long or (is_short and not is_inherited)):
        return
    ends = f" and ends at {end:,}" if end else " and has no end"
    raise ValueError(
        f"--curriculum: its phases count from token {begin:,} of the run, the last one begins at {last:,}{ends}, but "
        f"the run trains on {total:,} ({horizon.num_iterations:,} steps); give its phases {total - begin:,} tokens in "
        f"total (fewer without the last one), or change --num-iterations (-1: as long as they last, if the last one "
        f"has an end; the learning rates follow that length), or set allow_budget_mismatch: true in the curriculum"
    )


def ends_early(settings: Settings, horizon: Horizon) -> bool:
    """Whether a run ends a step or more before the phases of its curriculum do."""
    return settings.curriculum_end - horizon.total_tokens > horizon.total_batch_size


def derive(settings: Settings, horizon: Horizon) -> dict[str, Any]:
    """{name: figure} for the figures that follow from the settings."""
    model = build_model(settings)
    flops = model.estimate_flops()
    return {
        "num_iterations": horizon.num_iterations,
        "total_tokens": horizon.total_tokens,
        "tokens_per_step": horizon.total_batch_size,
        "flops_per_token": flops,
        "total_flops": float(flops * horizon.total_tokens),
        "batch_lr_scale": horizon.batch_lr_scale,
        "weight_decay_scaled": horizon.weight_decay_scaled,
        **{f"params_{k}": v for k, v in model.num_scaling_params().items()},
    }


def without_effect(settings: Settings, named: Collection[str]) -> list[str]:
    """The settings among `named` that have no effect, because of another one, each with the reason."""
    never_splits = settings.packing in ("concat", "binned")
    has_lanes = order_of(settings).feeds_lanes
    crops = has_lanes and settings.packing == "bestfit" and settings.long_docs == "crop"
    has_steps = settings.num_iterations > 0
    has_flops = settings.target_flops > 0
    has_tokens = settings.curriculum_end > 0
    rules = [
        ("long_docs", never_splits, f"with --packing={settings.packing}"),
        ("overlap", never_splits, f"with --packing={settings.packing}"),
        ("overlap", crops, "with --long-docs=crop"),
        ("overlap", not has_lanes, f"with --order={settings.order}"),
        ("buffer_size", not has_lanes, f"with --order={settings.order}"),
        ("target_flops", has_steps, "with --num-iterations"),
        ("target_param_data_ratio", has_steps, "with --num-iterations"),
        ("target_param_data_ratio", has_flops and not has_steps, "with --target-flops"),
        (
            "target_param_data_ratio",
            has_tokens and not (has_steps or has_flops),
            "with --curriculum",
        ),
        ("warmdown_ratio", settings.warmdown_steps >= 0, "with --warmdown-steps"),
        (
            "core_metric_max_per_task",
            settings.core_metric_every <= 0,
            "without --core-metric-every",
        ),
        ("allow_bucket_exhaustion", settings.mix is None, "without --curriculum"),
        ("force", settings.resume != "scratch", "without --resume=scratch"),
    ]
    return [f"{flag(name)} ({why})" for name, is_idle, why in rules if is_idle and name in named]


def describe_memory(parts: dict[str, int]) -> str:
    """A memory estimate as one line."""
    sizes = ", ".join(f"{name} {size / 1e9:,.1f}" for name, size in parts.items() if size)
    return f"memory per GPU: about {sum(parts.values()) / 1e9:,.1f} GB ({sizes})"


def setting_tables(
    config: Mapping[str, Any], typed: Sequence[str]
) -> dict[str, list[tuple[Any, ...]]]:
    """The settings in a run's config.json as three tables: "set", (name, value, default) of those
    that the command line named (`typed`); "worked out", (name, value) of those that follow from
    them, the data and the machine; "default", (name, value) of all others."""
    tables: dict[str, list[tuple[Any, ...]]] = {"set": [], "worked out": [], "default": []}
    known = known_settings(config)
    for name, value in config.items():
        if name == "fork":  # the record of a fork, which reports describe in words
            continue
        default = known[name].default if name in known else None
        text = curriculum_text(value) or json.dumps(value)
        if name in known and value == default:
            if name not in config["derived"]:  # such as an automatic length, which is worked out
                tables["default"].append((name, text))
        elif name in typed:
            tables["set"].append((name, text, json.dumps(default)))
        elif name != "derived":
            tables["worked out"].append((name, text))
    for name, value in config["derived"].items():
        is_set = name in typed and value == config.get(name)
        if not is_set:
            tables["worked out"].append((name, show(value)))
    return tables
