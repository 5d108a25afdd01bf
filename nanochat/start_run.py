"""
How a run starts or resumes: the path from the command line to the first step.

    flags ------------------ command: add this machine's tokenizer, processes, device       every rank; compared
      |
    inspect_run ------------ find the existing run and its newest good checkpoint,          rank 0; broadcast
      |                        and resolve automatic settings: lanes, leaves, steps, batch
      |       no run yet           a new run, from step 0 or from another run's weights
      |       unfinished           refuse changed settings; newest good checkpoint, or step 0
      |       completed, halted    print that; change nothing
      |       being trained        refuse, and name the process that trains it
      |
    find_data -------------- pin the files or compare them with the pinned ones, open them   rank 0, then every rank
      |
    claim_run -------------- make the plan, become the owner, clean up, write config.json,   rank 0
                             tokenizer/, data_manifest.json, plan.json

`inspect_run` returns a `Start`, whose settings alone count afterwards. Everything before
`claim_run` only reads, so a refused command leaves no trace. scripts.validate runs everything
before `claim_run`.
"""

import contextlib
import importlib.util
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanochat.attention import activate_kernel, check_mode
from nanochat.checkpoint import (
    Checkpoint,
    find_checkpoint,
    first_good,
    list_checkpoints,
    load_checkpoint,
)
from nanochat.cli import EXIT_HALTED
from nanochat.common import (
    as_path,
    begin_launch,
    counted,
    get_dist_info,
    is_remote,
    print0,
    show,
    write_json,
)
from nanochat.config import Settings, flag, resume_settings
from nanochat.core_eval import read_bundle
from nanochat.dataloader import StepLayout, default_leaves
from nanochat.dist import (
    PER_MACHINE,
    agree,
    get_compute_dtype,
    on_rank0,
    other_processors,
    peak_memory,
    same,
    versions,
    write_memory,
)
from nanochat.files import data_at, default_data_path
from nanochat.fp8 import convert
from nanochat.gpt import GPT, GPTConfig
from nanochat.order import MAX_LANES, default_lanes, fed_lanes
from nanochat.plan import rehearse
from nanochat.run_dir import (
    CONFIG_NAME,
    PLAN_NAME,
    is_run_dir,
    keep_cursors,
    newest_events,
    open_folders,
    pack_cursors,
    read_config,
    run_path,
    set_aside,
)
from nanochat.run_order import order_of, stream_config
from nanochat.run_owner import Owner, RunState, check_free, claim
from nanochat.run_state import identify
from nanochat.schedule import REFERENCE_DEPTH, Horizon, resolve_horizon
from nanochat.sources import (
    DATA_MANIFEST,
    Manifest,
    Manifests,
    RunData,
    check_files,
    counts_and_means,
    leave_out,
    open_data,
    read_manifests,
)
from nanochat.splits import describe_split, files_of, last_file_validates
from nanochat.stream import (
    carry_on,
    open_stream,
    reading_notes,
    refuse_cropping,
    sample_lengths,
    stream_identity,
)
from nanochat.tokenizer import Tokenizer, get_tokenizer

log = logging.getLogger(__name__)

# share of a GPU's memory for a step, with one process and with several (NCCL)
FIT_ALONE = 0.92
FIT_TOGETHER = 0.88
MAX_ROWS = 32  # in a forward pass, if the size of the memory is unknown


@dataclass(frozen=True)
class Start:
    """How a run starts or resumes."""

    run_dir: Path
    settings: Settings  # resolved
    horizon: Horizon
    config: dict[str, Any]  # the content of the run's config.json, {} for a new run
    checkpoint: Checkpoint | None  # the run's own; None for step 0
    # of another run: the one that --init-from names, for a new run at step 0
    origin: Checkpoint | None
    # where the data continues, None for the beginning of the data
    cursors: list[dict[str, Any]] | None
    skip: int  # number of steps whose rows `find_data` skips from there
    notices: Mapping[str, str]  # {changed setting: effect of the change}
    last_owner: bytes  # the record of the launch that last owned the run
    manifests: Manifests  # the files of a new run with --order=lanes, else {}
    # newest event of each name; "completed" only if the last launch logged it
    events: dict[str, dict[str, Any]]

    @property
    def step(self) -> int:
        """Number of steps done."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def steps_to_read(self) -> int:
        """Number of steps whose rows this launch and later ones read: those to skip, and those to
        take."""
        return self.skip + self.horizon.num_iterations - self.step

    @property
    def state(self) -> dict[str, Any]:
        """The run's state in the checkpoint; {} at step 0."""
        return {} if self.checkpoint is None else self.checkpoint.trainer_state

    def logged(self, event: str) -> dict[str, Any] | None:
        """The newest event with this name, if it was logged at the step where this launch
        begins."""
        record = self.events.get(event)
        return record if record is not None and record["step"] == self.step else None

    def over(self) -> tuple[int, str] | None:
        """(exit code, sentence) for a run that has ended; None for one that can continue, such as
        one that was killed in its last evaluation, after its final checkpoint."""
        status, where = self.state.get("status"), self.checkpoint and self.checkpoint.path
        ended = "completed" in self.events or "started" not in self.events
        if status == "completed" and self.step >= self.horizon.num_iterations and ended:
            return 0, (
                f"{self.run_dir}: completed ({where}), nothing to do; to train further, raise "
                f"--num-iterations; to start another run, use --model-tag=NAME"
            )
        allowed = self.settings.allow_bucket_exhaustion and not self.state.get("all_dry")
        if status == "halted" and not allowed:
            remedy = after_halt(self.run_dir.name, all_dry=self.state.get("all_dry", False))
            return (
                EXIT_HALTED,
                f"{self.run_dir}: halted ({where}): {self.state['halted']}; {remedy}",
            )
        return None


# ---- the command on this machine -----------------------------------------------------------------


def command(settings: Settings, world_size: int, device_type: str) -> tuple[Settings, Tokenizer]:
    """(settings, tokenizer): the settings of a command line, completed with those that follow from
    this machine. ValueError and FileNotFoundError for settings that cannot work here."""
    begin_launch(settings.object_storage_cache)
    data_path = str(as_path(settings.data_path or default_data_path()).expanduser())
    tokenizer = find_tokenizer(settings, data_path)
    if settings.data_format == "text" or settings.core_metric_every > 0:
        tokenizer.encode("")  # an error now, not hours later, if the tokenizer knows only ids
    dtype = get_compute_dtype(torch.device(device_type), settings.dtype)
    check_mode(settings.attention_mode, device_type, dtype, settings.head_dim)
    if (
        dtype == torch.bfloat16
        and device_type == "cuda"
        and torch.cuda.get_device_capability() < (8, 0)
    ):
        raise ValueError(
            f"--dtype=bfloat16: needs compute capability 8.0 or higher, which "
            f"{torch.cuda.get_device_name()} does not have; remove it"
        )
    if settings.fp8 and device_type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        raise ValueError(
            f"--fp8: needs compute capability 8.9 or higher, which {torch.cuda.get_device_name()} does "
            "not have; remove it"
        )
    activate_kernel(settings.attention_kernel, device_type, deterministic=settings.deterministic)
    for name in settings.trackers:
        if name != "wandb" and importlib.util.find_spec(name) is None:
            raise ValueError(
                f"--log-to={name}: {name} is not installed; run pip install -e '.[{name}]'"
            )
    tag = settings.model_tag or f"d{settings.depth}"
    run_path(tag)  # ValueError for an invalid name
    return replace(
        settings,
        data_path=data_path,
        model_tag=tag,
        vocab_size=tokenizer.get_vocab_size(),
        tokenizer_fingerprint=tokenizer.fingerprint,
        world_size=world_size,
        device_type=device_type,
        cpu_threads=torch.get_num_threads() if device_type == "cpu" else None,
    ), tokenizer


def find_tokenizer(settings: Settings, data_path: str) -> Tokenizer:
    """The tokenizer that the settings name; by default tokenizer/ in the data folder, or <base
    dir>/tokenizer. ValueError or FileNotFoundError if neither exists."""
    data = data_at(data_path)
    folder = data.folder
    if data.files and len(folder.parts) == 1:  # listed files without a common folder
        folder = data.files[0].parent
    beside = folder / "tokenizer" if (folder / "tokenizer/tokenizer.json").is_file() else None
    return get_tokenizer(
        settings.tokenizer or beside, eod_token=settings.eod_token, data_path=settings.data_path
    )


# ---- the existing run ----------------------------------------------------------------------------


def inspect_run(settings: Settings, device: torch.device) -> Start:
    """Collective. Find out how a command's run starts or resumes, without changing anything.
    ValueError if a fixed setting changed, if a run exists and --resume=scratch lacks --force, or if
    another launch trains the run."""
    run_dir = run_path(settings.model_tag or "")
    # every node has its own command line, tokenizer and PyTorch
    shared = {name: value for name, value in versions(device).items() if name not in PER_MACHINE}
    same({**settings.to_json(), **shared})
    for difference in other_processors():
        print0(
            f"note: {difference}; the data is the same, but bits depend on which rank computes what "
            f"(docs/exactness.md tells how to give all the same instructions)"
        )
    at_rank0 = on_rank0(lambda: is_run_dir(run_dir))

    def check_shared() -> None:
        if is_run_dir(run_dir) and not at_rank0 and settings.resume != "scratch":
            raise ValueError(
                f"{run_dir}: the run is on this machine, but not on rank 0's; share the directory between "
                f"the machines, give this machine --node-rank=0, or start over with --resume=scratch"
            )

    agree(check_shared)
    return on_rank0(lambda: _inspect(run_dir, settings, device))


def _inspect(run_dir: Path, settings: Settings, device: torch.device) -> Start:
    """Rank 0's part of `inspect_run`."""
    exists, scratch = is_run_dir(run_dir), settings.resume == "scratch"
    if exists and scratch and not settings.force:
        raise ValueError(
            f"--resume=scratch: {run_dir} already holds a run; add --force to rename it, or name a new "
            f"run with --model-tag"
        )
    # read first: if anything changes from here on, `claim` finds another record
    last_owner = check_free(run_dir)
    if settings.core_metric_every > 0:  # a missing bundle is an error now, not hours later
        read_bundle(settings.eval_bundle, settings.core_metric_max_per_task)
    config = dict[str, Any]()
    notices = dict[str, str]()
    checkpoint = None
    origin = None
    if exists and not scratch:
        config = read_config(run_dir)
        settings, notices = resume_settings(config, settings, run_dir=run_dir)
    if not scratch:
        is_auto = settings.resume == "auto"
        checkpoint = _newest_checkpoint(run_dir) if is_auto else find_checkpoint(settings.resume)
        # None: a copy outside its run; run_dir may be a link
        own_names = (None, run_dir.name, run_dir.resolve().name)
        if checkpoint is not None and describe_origin(checkpoint)["run"] not in own_names:
            raise ValueError(
                f"--resume={settings.resume}: the checkpoint does not belong to {run_dir}; to start a new "
                f"run from it, use --init-from={settings.resume}"
            )
    if settings.init_from is not None and checkpoint is None:
        origin = _find_origin(settings.init_from, config.get("origin"))
    if origin is not None and settings.init_data == "continue" and settings.lanes == -1:
        settings = replace(settings, lanes=origin.cursors[0]["stream"]["V"])
    order = order_of(settings)
    manifests = {} if config or not order.feeds_lanes else order.pin(settings)
    settings, horizon, model_config = resolve(
        settings,
        get_compute_dtype(device, settings.dtype),
        device_memory(device, settings.world_size),
        manifests.get("train"),
    )
    if (loaded := checkpoint or origin) is not None:
        loaded.check_tokenizer(settings.tokenizer_fingerprint)
        loaded.check_architecture(vars(model_config))
    continued = checkpoint or (origin if settings.init_data == "continue" else None)
    start = Start(
        run_dir=run_dir,
        settings=settings,
        horizon=horizon,
        config=config,
        checkpoint=checkpoint,
        origin=origin,
        cursors=None if continued is None else continued.cursors,
        skip=settings.skip_steps if checkpoint is None else 0,
        notices=notices,
        last_owner=last_owner,
        manifests=manifests,
        events=newest_events(run_dir, checkpoint.step if checkpoint else 0) if config else {},
    )
    return replace(
        start, settings=order.settle(settings, horizon, start.cursors, start.steps_to_read)
    )


def _newest_checkpoint(run_dir: Path) -> Checkpoint | None:
    """The newest good checkpoint of a run, or None if it has never saved one. ValueError if it has
    saved some and none can be used: a run never starts over by itself, because its first save would
    overwrite what can be repaired."""
    remedy = (
        "restore a checkpoint and run the same command again, or start over with --resume=scratch --force, which "
        "renames this run"
    )
    paths = list_checkpoints(run_dir)
    saved = newest_events(run_dir, math.inf).get("saved")
    if not paths and saved is not None:
        raise ValueError(
            f"{run_dir / 'checkpoints'}: no checkpoint, but this run has saved {saved['checkpoint']}; "
            f"{remedy}"
        )
    try:
        return first_good(paths)
    except ValueError as e:
        raise ValueError(f"{run_dir}: {e}; {remedy}") from e


def _find_origin(init_from: str, known: dict[str, Any] | None) -> Checkpoint:
    """The checkpoint that --init-from names. If this run has begun, `known` describes the
    checkpoint that it began with; ValueError if that checkpoint no longer exists."""
    checkpoint = find_checkpoint(init_from)
    # no longer the newest
    if known is not None and known["checksum"] != checkpoint.trainer_state["checksum"]:
        checkpoint = load_checkpoint(checkpoint.path.with_name(known["checkpoint"]))
        if known["checksum"] != checkpoint.trainer_state["checksum"]:
            raise ValueError(
                f"--init-from={init_from}: this run began with step {known['step']} of {known['run']}, "
                f"but {checkpoint.path} is now a different checkpoint; restore the old one, or start a "
                f"new run with --model-tag=NAME"
            )
    return checkpoint


def describe_origin(checkpoint: Checkpoint) -> dict[str, Any]:
    """The origin of a new run's weights, for its config.json. "run" is None if the checkpoint is
    outside a run directory."""
    folder = checkpoint.path.absolute().parent
    inside = folder.name == "checkpoints" and is_run_dir(folder.parent)
    return {
        "run": folder.parent.name if inside else None,
        "checkpoint": checkpoint.path.name,
        "step": checkpoint.step,
        "checksum": checkpoint.trainer_state["checksum"],
    }


# ---- what follows from the settings --------------------------------------------------------------


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
    compiled = settings.compile == "on" or (
        settings.compile == "auto" and settings.device_type == "cuda"
    )
    estimate = partial(
        build_model(settings).estimate_memory,
        settings.device_batch_size,
        dtype=getattr(torch, settings.dtype),
        compiled=compiled,
        world_size=settings.world_size,
        micro_batches=leaves * layout.micro_batches_per_leaf,
    )
    parts = estimate(num_leaves=leaves)
    if room is not None and sum(parts.values()) > room:
        return estimate(num_leaves=1)
    return parts


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
    """Whether the GPU has no room for the pending sums of leaves (see `StepLayout`), which then
    stay on the host."""
    room = device_memory(device, settings.world_size)
    return room is not None and sum(estimate_memory(settings).values()) > room


def largest_batch(settings: Settings, layout: StepLayout, room: int | None) -> int:
    """The number of rows per forward pass: the largest power of two that is at most a leaf's rows
    and fits into `room` bytes (None: at most 32 rows), not counting pending sums of leaves, which
    may be on the host. The largest also keeps a GPU busiest: the deterministic attention kernel
    runs rows x heads thread blocks in waves, one block per multiprocessor, and doubling the blocks
    never increases the idle share."""
    rows_per_leaf = -(-layout.V // layout.num_blocks) * layout.rows_per_lane

    def fits(B: int) -> bool:
        if room is None:
            return B <= MAX_ROWS
        return sum(estimate_memory(replace(settings, device_batch_size=B), room).values()) <= room

    B = 1
    while rows_per_leaf >= 2 * B and fits(2 * B):
        B *= 2
    return B


def resolve(
    settings: Settings,
    dtype: torch.dtype,
    room: int | None,
    train: Mapping[str, Manifest] | None = None,
) -> tuple[Settings, Horizon, GPTConfig]:
    """(settings, horizon, shape of the model) with all automatic settings resolved. ValueError for
    settings that do not fit together. Batch size, horizon and learning rates follow from parameter
    counts, so the model is built on the meta device first. `room`: see `device_memory`. `train`:
    training files of a new run, which limit its lanes."""
    model = build_model(settings)
    scaling = [
        sum(m.num_scaling_params()[k] for k in ("transformer_matrices", "lm_head"))
        for m in (model, build_model(settings, REFERENCE_DEPTH))
    ]
    horizon = resolve_horizon(
        num_iterations=settings.num_iterations,
        target_flops=settings.target_flops,
        target_param_data_ratio=settings.target_param_data_ratio,
        total_batch_size=settings.total_batch_size,
        weight_decay=settings.weight_decay,
        sequence_len=settings.max_seq_len,
        scaling_params=scaling[0],
        reference_scaling_params=scaling[1],
        flops_per_token=model.estimate_flops(),
        curriculum_tokens=settings.curriculum_tokens,
    )
    rows = horizon.total_batch_size // settings.max_seq_len
    lanes = settings.lanes
    if lanes == -1:
        fed = [
            fed_lanes(
                *counts_and_means(manifest),
                T=settings.max_seq_len,
                buffer_size=settings.buffer_size,
            )
            for manifest in (train or {}).values()
        ]
        lanes = default_lanes(rows, fed=min(fed, default=MAX_LANES), world_size=settings.world_size)
    leaves = (
        default_leaves(settings.world_size, lanes) if settings.leaves == -1 else settings.leaves
    )
    settings = replace(
        settings,
        total_batch_size=horizon.total_batch_size,
        lanes=lanes,
        leaves=leaves,
        dtype=str(dtype).removeprefix("torch."),
    )
    automatic = settings.device_batch_size == -1
    # both StepLayout and phase_rows raise ValueError for numbers that do not fit together
    layout = StepLayout(
        lanes, rows, 1 if automatic else settings.device_batch_size, 0, settings.world_size, leaves
    )
    if automatic:
        settings = replace(settings, device_batch_size=largest_batch(settings, layout, room))
    if settings.mix is not None:
        settings.mix.phase_rows(settings.max_seq_len, lanes)
        budget, total = settings.curriculum_tokens, horizon.total_tokens
        if abs(total - budget) > horizon.total_batch_size and not settings.allow_budget_mismatch:
            raise ValueError(
                f"--curriculum: its phases add up to {budget:,} tokens, but the run trains on {total:,} "
                f"({horizon.num_iterations:,} steps of {horizon.total_batch_size:,}); remove "
                f"--num-iterations to train as long as the curriculum lasts, change its durations, set "
                f"allow_budget_mismatch: true in it, or add --allow-budget-mismatch"
            )
    return settings, horizon, model.config


# ---- data ----------------------------------------------------------------------------------------


def find_data(start: Start, tokenizer: Tokenizer, rank: int = 0) -> tuple[Start, RunData]:
    """Collective. Rank 0 pins the files of a new run, or compares the files of an existing run with
    its pins; then every rank opens them. Returns the start, with its cursors moved past the rows to
    skip, and the data. FileNotFoundError or ValueError names a file that is missing, changed or
    unusable."""
    settings = start.settings

    def pinned() -> Manifests:
        """The manifests of a new run, or those of an existing run after a check of its files."""
        if not start.config or not (manifests := read_manifests(start.run_dir / DATA_MANIFEST)):
            return order_of(settings).pin(settings)
        if settings.without_documents is not None and as_path(settings.without_documents).is_file():
            bare = {
                bucket: {k: v for k, v in manifest.items() if k != "without"}
                for bucket, manifest in manifests["train"].items()
            }
            if leave_out(bare, settings.without_documents) != manifests["train"]:
                raise ValueError(
                    f"--without-documents={settings.without_documents}: the file has changed since "
                    f"this run began; restore it, or start a new run with --model-tag=NAME"
                )
        data = data_at(settings.data_path or "")
        val = None if settings.val_path is None else data_at(settings.val_path).folder
        return check_files(manifests, data.folder, val, strict=settings.strict)

    manifests = start.manifests or on_rank0(pinned)

    def opened() -> RunData:
        try:
            found = check_files(manifests) if rank > 0 else manifests
        except (OSError, ValueError) as e:
            raise ValueError(
                f"{e}; every machine of a launch reads the data itself: copy or mount the same files "
                "under the same path on this machine"
            ) from e
        return open_data(found, tokenizer, as_stored=settings.packing == "binned")

    data = agree(opened)
    cursors = on_rank0(lambda: _first_cursors(start, data))
    return replace(start, cursors=cursors, skip=0), data


def _first_cursors(start: Start, data: RunData) -> list[dict[str, Any]] | None:
    """Where this launch begins to read: the cursors of all lanes, or None for the beginning of the
    data. For --init-data=continue, they come from the other run; for --skip-steps, the skipped rows
    are packed here. ValueError if the data or the other run does not fit the settings."""
    settings = start.settings
    config = stream_config(start.settings)
    fingerprint = data.tokenizer.fingerprint
    order_of(settings).check(settings, data.train)
    if start.checkpoint is not None or (start.cursors is None and start.skip == 0):
        return start.cursors
    cursors, rows = start.cursors, settings.total_batch_size // settings.max_seq_len // config.V
    try:
        if cursors is not None:
            cursors = carry_on(cursors, stream_identity(config, data.train, fingerprint))
        stream = open_stream(
            config,
            data.train,
            range(config.V),
            tokenizer=fingerprint,
            cursors=cursors,
            drop_dry=settings.allow_bucket_exhaustion,
        )
    except ValueError as e:
        if start.cursors is None:
            raise
        raise ValueError(
            f"--init-data=continue: {e}, or start at the beginning of the data with "
            f"--init-data=fresh"
        ) from e
    with contextlib.closing(stream):
        for _ in range(start.skip):
            if len(stream.next_rows(rows)) < rows * config.V:
                raise ValueError(
                    f"--skip-steps={start.skip}: the data ends before that; skip fewer steps"
                )
        return stream.cursors()


def open_run(run_dir: Path) -> tuple[RunData, Any, Settings]:
    """(data, stream settings, resolved settings) of a run, from its directory alone. The files on
    disk are compared with their pins first. FileNotFoundError if the run has pinned no files."""
    settings = Settings.from_json(read_config(run_dir))
    manifests = read_manifests(run_dir / DATA_MANIFEST)
    begin_launch(settings.object_storage_cache)
    if not manifests:
        raise FileNotFoundError(
            f"{run_dir / DATA_MANIFEST}: missing, so this run has read no data; start it first"
        )
    manifests = check_files(manifests)
    tokenizer, config = get_tokenizer(run_dir / "tokenizer"), stream_config(settings)
    return open_data(manifests, tokenizer, as_stored=not config.framed), config, settings


def after_halt(tag: str, *, all_dry: bool) -> str:
    """What the user can do after the run `tag` has halted. all_dry: all buckets are used up, not
    just one."""
    others = (
        "" if all_dry else "use --allow-bucket-exhaustion to continue with the other buckets, or "
    )
    return (
        f"{others}start a new run with {'more data' if all_dry else 'a different curriculum'} (--model-tag=NAME "
        f"--init-from={tag} --init-data=continue)"
    )


# ---- the first files are written -----------------------------------------------------------------


def claim_run(start: Start, data: RunData) -> Owner:
    """Rank 0: make and print the plan, become the run's owner, and write its directory. If the plan
    shows that the run would halt: ValueError before anything is written, or a warning with
    --plan=warn. config.json holds the resolved settings and, for readers, the figures derived from
    them."""
    run_dir = start.run_dir
    settings = start.settings
    plan = None
    # planning `binned` rows finds too-long entries now, instead of at the step that needs them
    if settings.plan != "off" and (settings.mix is not None or settings.packing == "binned"):
        print0("start: planning which rows the run reads")
        plan = rehearse(start, data)
    elif settings.plan != "off" and order_of(settings).has_plan and start.checkpoint is None:
        print_passes(start, data)
    order_of(settings).shuffle(settings, data.train)
    owner = claim(run_dir, start.last_owner)
    if settings.resume == "scratch" and is_run_dir(run_dir):
        set_aside(run_dir)
        owner.release()  # the old run, under its new name
        owner = claim(run_dir, b"")
    try:
        open_folders(run_dir)
        write_json(run_dir / DATA_MANIFEST, data.manifests)
        data.tokenizer.save(run_dir / "tokenizer")
        if plan is not None:
            write_json(run_dir / PLAN_NAME, plan.to_json())
        if not (run_dir / CONFIG_NAME).exists():
            origin = {} if start.origin is None else {"origin": describe_origin(start.origin)}
            write_json(
                run_dir / CONFIG_NAME, {**settings.to_json(), **origin, "derived": derive(start)}
            )
        if start.checkpoint is None and start.cursors is not None:
            keep_cursors(run_dir, 0, pack_cursors(0, start.cursors))
    except BaseException as e:
        RunState(owner, [identify()]).close("failed", str(e))
        raise
    return owner


# ---- what is printed -----------------------------------------------------------------------------


def print_passes(start: Start, data: RunData) -> None:
    """For a run without a curriculum: print the size of its data in tokens and its passes over
    them, estimated from a few hundred documents. Its data cannot run dry, so only `binned` rows
    need a plan. ValueError with --plan=error if nearly all of a new run's tokens would be
    cropped."""
    settings, [source] = start.settings, data.train.values()
    T, lengths = settings.max_seq_len, sample_lengths(source)
    # the part of each document that follows its first full row
    beyond = np.maximum(lengths - T - 1, 0)
    cropped = repeated = 0.0
    if settings.packing == "bestfit" and settings.long_docs == "crop":
        cropped = float(beyond.sum() / lengths.sum())
    elif settings.packing == "bestfit":
        # each continuation is BOS, overlap and up to T - overlap new tokens
        again = (settings.overlap + 1) * float(np.ceil(beyond / (T - settings.overlap)).sum())
        repeated = again / (again + float(lengths.sum()))
    why = refuse_cropping("its data", cropped)
    if why and settings.plan == "error" and not start.config:
        raise ValueError(why)
    mean = float(lengths.mean()) - 1  # without BOS
    tokens, trained = round(float(source.groups.sum()) * mean), start.horizon.total_tokens
    taken = trained * (1 - repeated) / (1 - cropped)
    passes = f"{taken / tokens:.2g}"
    often = (
        "less than half of them"
        if taken < tokens / 2
        else "them once"
        if passes == "1"
        else f"them {passes} times"
    )
    print0(f"data: about {tokens:,} tokens; this run reads {often}")
    for line in reading_notes(
        "its data",
        trained=trained,
        tokens=tokens,
        passes=taken / tokens,
        cropped=cropped,
        repeated=repeated,
    ):
        log.warning("%s", line)


def derive(start: Start) -> dict[str, Any]:
    """{name: figure} for the figures that follow from the settings."""
    model, horizon = build_model(start.settings), start.horizon
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


def describe_memory(parts: dict[str, int]) -> str:
    """A memory estimate as one line."""
    sizes = ", ".join(f"{name} {size / 1e9:,.1f}" for name, size in parts.items() if size)
    return f"memory per GPU: about {sum(parts.values()) / 1e9:,.1f} GB ({sizes})"


@contextlib.contextmanager
def explain_out_of_memory(start: Start, device: torch.device) -> Iterator[None]:
    """Context manager: running out of GPU memory becomes a ValueError with the estimate, the peak,
    the settings to change, and the newest checkpoint."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        settings = start.settings
        peak = peak_memory(device)
        snapshot = write_memory(start.run_dir, get_dist_info()[1])
        room = device_memory(device, settings.world_size)
        estimate = sum(estimate_memory(settings, room).values())
        figures = f"the estimate was {estimate / 1e9:,.1f} GB" + (
            f", the peak {peak / 1e9:,.1f} GB" if peak else ""
        )
        kept = next(
            (f"{path.name} is kept" for path in list_checkpoints(start.run_dir)),
            "nothing is saved yet",
        )
        raise ValueError(
            f"out of GPU memory: {figures}; {kept}. Lower --device-batch-size (now "
            f"{settings.device_batch_size}), or add --activation-checkpointing, and run the "
            f"command again ({str(e).partition(chr(10))[0][:200]}){snapshot}"
        ) from e


def print_split(start: Start, data: RunData) -> None:
    """Print the validation files and the training files."""
    settings = start.settings
    train = data.manifests["train"]
    val = data.manifests["val"]
    # both splits are in the same files
    if any("documents" in manifest for manifest in val.values()):
        print0(
            f"data: {counted(len(files_of(train)), '.bin file')}, whose documents --split={settings.split} "
            f"divides into training, validation and test"
        )
        return
    reads = f"this run trains on {start.horizon.total_tokens:,} tokens"
    is_new = not start.config and settings.val_path is None
    chosen = is_new and last_file_validates(data_at(settings.data_path or ""))
    print0(
        *describe_split(
            files_of(train), files_of(val), reads=reads, shared=settings.val_fraction, chosen=chosen
        ),
        sep="\n",
    )


def show_short(value: Any) -> str:
    """`show` of a setting. A list of hundreds of paths is cut."""
    text = show(value)
    return text if len(text) < 2000 else f"{text[:300]} ... ({len(text):,} characters)"


def print_summary(
    start: Start, layout: StepLayout, device: torch.device, typed: Sequence[str]
) -> None:
    """Print what is about to run. For a new run: settings from the command line or its --config
    file (`typed`) that differ from the defaults, and the values that follow from these, the data
    and this machine. For a resume: the settings that differ from those of the run."""
    if start.config:
        print0(f"settings: those in {start.run_dir / CONFIG_NAME}")
        for change, effect in start.notices.items():
            print0(f"changed: {change}{effect and f' ({effect})'}")
    else:
        settings = start.settings.differing()
        print0(
            "set:",
            *(
                f"  {flag(name):32s} {show_short(settings[name])}"
                for name in settings
                if name in typed
            ),
            sep="\n",
        )
        worked_out = {
            name: value
            for name, value in {**settings, **derive(start)}.items()
            if name not in typed
        }
        print0(
            "worked out from these settings, the data and this machine:",
            *(f"  {name:32s} {show_short(value)}" for name, value in worked_out.items()),
            sep="\n",
        )
    batches = counted(len(layout.leaves) * layout.micro_batches_per_leaf, "micro-batch")
    print0(
        f"step: {layout.rows_per_step} rows of T + 1 = {start.settings.max_seq_len + 1:,} tokens (inputs and "
        f"targets overlap) from {layout.V} lanes; {counted(layout.world_size, 'process')} x {batches} of "
        f"{layout.device_batch_size} rows; {layout.num_leaves} {'leaf' if layout.num_leaves == 1 else 'leaves'}"
    )
    with contextlib.suppress(OSError):  # a system may not know its load
        load, cores = os.getloadavg()[0], os.cpu_count() or 1
        if device.type == "cpu" and torch.get_num_threads() > 1 and load > cores:
            print0(
                f"note: the load of this machine is {load:.1f} on {counted(cores, 'core')}. Threads then wait for "
                f"each other, which can make a step ten times as long. OMP_NUM_THREADS=1 avoids that"
            )
    if (room := device_memory(device, start.settings.world_size)) is not None:
        print0(
            describe_memory(estimate_memory(start.settings, room))
            + f"; {room / 1e9:,.1f} GB available"
        )
    if layout.num_leaves % layout.world_size:
        print0(
            f"note: {layout.world_size} processes do not divide {layout.num_leaves} leaves: same data, but "
            f"results are rounded differently than with a number that divides them (--leaves is fixed when a run "
            f"starts)"
        )
    if layout.dead_share > 0.1:
        print0(
            f"note: {layout.dead_share:.0%} of the computed rows are padding; to avoid that, choose a "
            f"--device-batch-size that divides {layout.rows_per_step // layout.num_blocks}, the rows of a leaf"
        )
    if start.settings.data_format in ("shards", "megatron") and not is_remote(
        start.settings.data_path or ""
    ):
        print0(
            f"note: token files are read through memory maps. If SIGBUS kills this process, a file was truncated: "
            f"scripts.status {start.run_dir.name} or the next launch names it"
        )
    if start.checkpoint is not None:
        print0(f"resuming from {start.checkpoint.path} at step {start.step:,}")
    elif start.cursors is not None and start.origin is not None:
        print0(f"the data continues where {start.origin.path} stopped")
