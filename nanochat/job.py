"""
From flags to a job: what was left to the program is settled, checked and told before anything is written.

    settings (with -1 for "you choose")  ->  resolve  ->  settings without, Horizon, the model on the meta device

The model is built on the meta device first, because batch size, horizon and learning rates follow from its parameter
counts, and a flag that does not fit is better told before gigabytes are filled.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nanochat.common import print0
from nanochat.curriculum import Curriculum, load
from nanochat.dataloader import Layout, default_leaves
from nanochat.dataset import data_folder
from nanochat.gpt import GPT, GPTConfig
from nanochat.order import default_lanes
from nanochat.packing import VERSION
from nanochat.sample_data import check_order, parse_weights, settle_split
from nanochat.schedule import REFERENCE_DEPTH, Horizon, resolve_horizon
from nanochat.tokenizer import RustBPETokenizer, get_tokenizer, read_description


def find_tokenizer(tokenizer_dir: Path | str | None, data_path: Path | str) -> RustBPETokenizer:
    """The tokenizer in a folder; without one, that which lies beside shards (where prefixes have no folder in common,
    beside the first), or the default one."""
    folder = data_folder(data_path)
    if len(folder.parts) == 1:
        folder = data_folder(str(data_path).partition(",")[0])
    beside = folder / "tokenizer"
    return get_tokenizer(tokenizer_dir or (beside if read_description(beside) else None), data_path=data_path)


def command_settings(flags: dict[str, Any], tokenizer: RustBPETokenizer, world_size: int, device_type: str
                     ) -> dict[str, Any]:
    """The settings that a command stands for: its flags, what its curriculum file says, where it runs. What a
    curriculum allows stands apart from what it mixes. How many samples a run in Megatron's order has is settled when
    its horizon is known (`start_run.settle_samples`)."""
    mix = None if flags["curriculum"] is None else load(flags["curriculum"])
    plain = None if mix is None else replace(mix, allow_bucket_exhaustion=False, allow_budget_mismatch=False).to_json()
    return {**flags, "curriculum": plain, "allow_budget_mismatch": mix is not None and mix.allow_budget_mismatch,
            "allow_bucket_exhaustion": flags["allow_bucket_exhaustion"] or bool(mix and mix.allow_bucket_exhaustion),
            "vocab_size": tokenizer.get_vocab_size(), "tokenizer_fingerprint": tokenizer.fingerprint,
            "blend_weights": parse_weights(flags["blend_weights"]),
            "num_samples": -1 if flags["order"] == "megatron" else 0,
            "world_size": world_size, "packer_version": VERSION, "device_type": device_type,
            "cpu_threads": torch.get_num_threads() if device_type == "cpu" else None}


def build_model(settings: dict[str, Any], depth: int) -> GPT:
    """The model of a depth on the meta device: shapes and types, no data."""
    config = GPTConfig.from_depth(depth, vocab_size=settings["vocab_size"], sequence_len=settings["max_seq_len"],
                                  aspect_ratio=settings["aspect_ratio"], head_dim=settings["head_dim"],
                                  window_pattern=settings["window_pattern"])
    with torch.device("meta"):
        return GPT(config, attention_mode=settings["attention_mode"])


def resolve(settings: dict[str, Any], world_size: int, dtype: torch.dtype) -> tuple[dict[str, Any], Horizon, GPT]:
    """Settle what was left to the program. Returns (settings, horizon, the model on the meta device)."""
    check_order(settings)
    model = build_model(settings, settings["depth"])
    scaling = [sum(m.num_scaling_params()[k] for k in ("transformer_matrices", "lm_head"))
               for m in (model, build_model(settings, REFERENCE_DEPTH))]
    horizon = resolve_horizon(
        **{k: settings[k] for k in ("num_iterations", "target_flops", "target_param_data_ratio", "total_batch_size",
                                    "weight_decay")},
        sequence_len=settings["max_seq_len"], scaling_params=scaling[0], reference_scaling_params=scaling[1],
        flops_per_token=model.estimate_flops(), curriculum_tokens=curriculum_tokens(settings))
    rows = horizon.total_batch_size // settings["max_seq_len"]
    lanes = default_lanes(rows) if settings["lanes"] == -1 else settings["lanes"]
    if lanes < 1:
        raise ValueError(f"--lanes: got {lanes}, expected at least 1 (or -1 for automatic)")
    if settings["tokenizer_threads"] < 1:
        raise ValueError(f"--tokenizer-threads: got {settings['tokenizer_threads']}, expected at least 1")
    leaves = default_leaves(world_size, lanes) if settings["leaves"] == -1 else settings["leaves"]
    Layout(lanes, rows, settings["device_batch_size"], 0, world_size, leaves)  # says what does not fit
    if settings["curriculum"] is not None:
        Curriculum.from_json(settings["curriculum"]).phase_rows(settings["max_seq_len"], lanes)  # and so does this
    check_budget(settings, horizon)
    return {**settings, "total_batch_size": horizon.total_batch_size, "lanes": lanes, "leaves": leaves,
            "split": settle_split(settings), "dtype": str(dtype).removeprefix("torch.")}, horizon, model


def curriculum_tokens(settings: dict[str, Any]) -> int:
    """What all phases of the curriculum last together, 0 without one."""
    return sum(phase["duration_tokens"] for phase in (settings["curriculum"] or {"phases": ()})["phases"])


def check_budget(settings: dict[str, Any], horizon: Horizon) -> None:
    """ValueError where training is more than a step longer or shorter than the curriculum, unless that is allowed."""
    wanted, total = curriculum_tokens(settings), horizon.total_tokens
    if wanted and abs(total - wanted) > horizon.total_batch_size and not settings["allow_budget_mismatch"]:
        raise ValueError(f"--curriculum: its phases last {wanted:,} tokens, the run {total:,} "
                         f"({horizon.num_iterations:,} steps of {horizon.total_batch_size:,}); leave out "
                         f"--num-iterations to train as long as the curriculum, mend its durations, or set "
                         f"allow_budget_mismatch: true in it")


def derive(horizon: Horizon, model: GPT) -> dict[str, Any]:
    """What follows from the settings, for people."""
    flops = model.estimate_flops()
    return {"num_iterations": horizon.num_iterations, "total_tokens": horizon.total_tokens,
            "tokens_per_step": horizon.total_batch_size, "flops_per_token": flops,
            "total_flops": float(flops * horizon.total_tokens), "batch_lr_scale": horizon.batch_lr_scale,
            "weight_decay_scaled": horizon.weight_decay_scaled,
            **{f"params_{k}": v for k, v in model.num_scaling_params().items()}}


def introduce(settings: dict[str, Any], derived: dict[str, Any], layout: Layout) -> None:
    """Print what is about to run."""
    print0(json.dumps(settings, indent=2))
    for name, value in derived.items():
        print0(f"{name:32s} {value:,}" if isinstance(value, int) else f"{name:32s} {value:.4g}")
    print0(f"step: {layout.rows_per_step} rows from {layout.V} lanes; {layout.world_size} process(es) x "
           f"{len(layout.leaves) * layout.micro_batches_per_leaf} micro-batch(es) of {layout.device_batch_size} rows; "
           f"{layout.K} leaves")
    if layout.K % layout.world_size:
        print0(f"note: {layout.world_size} processes do not divide {layout.K} leaves: same data, but other bits "
               f"than with a number that does (--leaves is chosen when a run starts)")
    if layout.dead_share > 0.1:
        print0(f"note: {layout.dead_share:.0%} of the computed rows are dead; a number of processes and a "
               f"--device-batch-size that divide {layout.rows_per_step} rows waste none")
