"""
The parts of training that are not the loop: how a run begins or goes on, what ranks tell each other, how it is saved.

    begin      no RUN yet           write config.json, tokenizer/, data_manifest.json; step 0
               RUN, unfinished      refuse changed settings; newest good checkpoint, or step 0
               RUN, completed       say so; nothing changes
               RUN, halted          say why; go on only where what halted it is allowed now

    a step     each rank: gradients of its rows, sum of their losses, live targets, its part of the digest
               one small reduction adds the last three; loss of the step = sum of losses / live targets, both global

Whatever reads or writes the run directory runs on rank 0; its result or its error reaches all ranks (`on_rank0`), so
that no rank waits for one that has given up. Collective calls say so. """

import json
import logging
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nanochat.checkpoint import list_checkpoints, load_checkpoint, newest_good, save_checkpoint, to_host
from nanochat.common import get_dist_info, write_json
from nanochat.curriculum import Curriculum
from nanochat.dataloader import DataLoader
from nanochat.gpt import GPT
from nanochat.optim import MuonAdamW
from nanochat.plan import Plan
from nanochat.run_data import MANIFEST_NAME, pin_data
from nanochat.run_dir import PLAN_NAME, is_run_dir, read_config, write_config
from nanochat.schedule import Schedule
from nanochat.settings import Changes, compare_settings, inherit_settings, refuse_changes, settle_curriculum
from nanochat.sources import split_train_val
from nanochat.tokenizer import RustBPETokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")


# ---- ranks ----------------------------------------------------------------------------------------------------------

def on_rank0(function: Callable[[], T]) -> T:
    """Collective. `function()` runs on rank 0 alone; all ranks get its value. Where it raises ValueError or OSError,
    rank 0 raises that and the others leave with exit code 1 and no noise."""
    _, rank, _, world_size = get_dist_info()
    if world_size == 1:
        return function()
    box: list[Any] = [None, None]
    error: Exception | None = None
    if rank == 0:
        try:
            box[0] = function()
        except (ValueError, OSError) as e:
            error, box[1] = e, str(e)
    dist.broadcast_object_list(box, src=0)
    if error is not None:
        raise error
    if box[1] is not None:
        raise SystemExit(1)
    return box[0]


def agree(function: Callable[[], T]) -> T:
    """Collective. `function()` on every rank, for what may fail on all of them alike, such as a bad flag. Where it
    raises ValueError or OSError, all leave: the first rank where it did raises that, the others have exit code 1."""
    _, rank, _, world_size = get_dist_info()
    if world_size == 1:
        return function()
    error: Exception | None = None
    try:
        value = function()
    except (ValueError, OSError) as e:
        error = e
    failed: list[bool | None] = [None] * world_size
    dist.all_gather_object(failed, error is not None)
    if error is not None and failed.index(True) == rank:
        raise error
    if any(failed):
        raise SystemExit(1)
    return value


def gather(value: T) -> list[T]:
    """Collective. All ranks' values in rank order, on rank 0; [] on the others."""
    _, rank, _, world_size = get_dist_info()
    if world_size == 1:
        return [value]
    everyone: list[Any] | None = [None] * world_size if rank == 0 else None
    dist.gather_object(value, everyone)
    return everyone or []


def gather_all(value: T) -> list[T]:
    """Collective. All ranks' values in rank order, on every rank."""
    world_size = get_dist_info()[3]
    if world_size == 1:
        return [value]
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, value)
    return everyone


class Halt(Exception):
    """The run cannot take its next step, and a person must decide how it goes on. All ranks raise it together."""


@dataclass(frozen=True)
class StepTotals:
    """What all ranks' rows of a step come to. Tensors stay on the device until asked for."""

    sums: torch.Tensor  # (5 + 3 N,): four 16-bit parts of the digest, dry ranks; of N buckets: nats, targets, dropped

    @property
    def digest(self) -> str:
        """The step's batch digest, 16 hex digits."""
        parts = self.sums[:4].tolist()
        return f"{sum(int(part) << 16 * i for i, part in enumerate(parts)) % 2**64:016x}"

    @property
    def dry(self) -> bool:
        """Whether a rank could not give its rows."""
        return bool(self.sums[4])

    @property
    def _by_bucket(self) -> torch.Tensor:
        return self.sums[5:].view(3, -1)

    @property
    def loss(self) -> float:
        """Mean loss of a live target, nats."""
        return float(self._by_bucket[0].sum() / self._by_bucket[1].sum())

    def bucket_losses(self) -> list[float | None]:
        """Mean loss of a live target in each bucket, None where the step has none of it."""
        nats, live, _ = self._by_bucket.tolist()
        return [n / targets if targets else None for n, targets in zip(nats, live)]

    def dropped(self) -> list[int]:
        """How many lanes have dropped each bucket."""
        return [int(n) for n in self._by_bucket[2].tolist()]

    def grad_scale(self, num_targets: int) -> torch.Tensor:
        """What a gradient of (sum of losses / num_targets) must be multiplied by to be that of the mean loss."""
        return (num_targets / self._by_bucket[1].sum()).float()


def add_up(nats: torch.Tensor, live: torch.Tensor, *, dropped: Sequence[int], digest: int, dry: bool = False
           ) -> StepTotals:
    """Collective. One reduction of float64 values. `nats`, `live`: (N,) sums of losses and live targets of this rank's
    rows of each bucket; `dropped`: lanes that have dropped it. The digest travels as four 16-bit parts, whose sums are
    exact; `dry`: this rank could not give its rows."""
    device = nats.device
    wide = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64, and no process groups
    parts = torch.tensor([*(digest >> 16 * i & 0xFFFF for i in range(4)), dry, *dropped], dtype=wide)
    parts = parts.to(device, non_blocking=True)
    sums = torch.cat([parts[:5], nats.to(wide), live.to(wide), parts[5:]])
    if get_dist_info()[3] > 1:
        dist.all_reduce(sums)
    return StepTotals(sums)


# ---- begin ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Start:
    """How a run goes on. `checkpoint` is None for step 0. `completed_steps`: a completed run did so many, so there is
    nothing to do unless its horizon has moved beyond them; 0 for an unfinished one. `halted`: why the run may not go
    on, and what would let it; empty if it may. `changed`: whether its curriculum is another one from now on."""

    settings: dict[str, Any]
    checkpoint: Path | None = None
    completed_steps: int = 0
    wipe: bool = False
    notices: tuple[str, ...] = ()
    halted: str = ""
    changed: bool = False


def begin(run_dir: Path, settings: dict[str, Any], *, resume: str, force: bool) -> Start:
    """Find out where the run in a run directory stands, changing nothing. For rank 0. What a crash left half renamed
    is tidied up before (`clean_stale`), so that no checkpoint found is renamed later.

    `resume` is auto (newest good checkpoint, or from the start), scratch (an error if there is a run, unless `force`
    allows to wipe it), or a checkpoint's path. Settings that are left to the program (-1) take the run's own values.
    Raises ValueError for settings that changed and may not, and for a run in the way of scratch.
    """
    exists = is_run_dir(run_dir)
    if resume == "scratch":
        if exists and not force:
            raise ValueError(f"--resume scratch: {run_dir} holds a run already; add --force to delete it, or name a "
                             f"new one with --model-tag")
        return Start(settings, wipe=exists)
    old: dict[str, Any] = {}
    if (run_dir / "config.json").exists():
        old = {k: v for k, v in read_config(run_dir).items() if k != "derived"}
        _check_tokenizer(run_dir, old, settings)
    checkpoint = newest_good(run_dir) if resume == "auto" else Path(resume).expanduser()
    state: dict[str, Any] = {}
    if checkpoint is not None:
        if not checkpoint.is_dir():
            there = ", ".join(path.name for path in list_checkpoints(run_dir)) or "none"
            raise FileNotFoundError(f"--resume {resume}: no such folder, expected auto, scratch or a checkpoint's "
                                    f"path; checkpoints in {run_dir / 'checkpoints'}: {there}")
        loaded = load_checkpoint(checkpoint, verify=resume != "auto")
        loaded.check_tokenizer(settings["tokenizer_fingerprint"])
        state = loaded.trainer_state
    changes, changed = Changes((), ()), False
    if old:
        old["curriculum"] = state.get("curriculum", old["curriculum"])
        old, changed = settle_curriculum(old, settings)
        changes = compare_settings(old, settings)
        refuse_changes(changes, run_name=run_dir.name)
        settings = inherit_settings(old, settings)
    allowed = changed or settings["allow_bucket_exhaustion"]
    halted = state["halted"] if state.get("status") == "halted" and not allowed else ""
    return Start(settings, checkpoint, state["step"] if state.get("status") == "completed" else 0, False,
                 tuple(changes.notices()), halted, changed)


def _check_tokenizer(run_dir: Path, old: dict[str, Any], settings: dict[str, Any]) -> None:
    """ValueError unless both settings have the same tokenizer: people have no flag for fingerprints."""
    then, now = old["tokenizer_fingerprint"], settings["tokenizer_fingerprint"]
    if then != now:
        raise ValueError(f"--tokenizer-dir: the run {run_dir.name!r} was started with the tokenizer {then}, the "
                         f"command brings {now}; the run has its own copy, --tokenizer-dir {run_dir / 'tokenizer'}, "
                         f"or start a new run with --model-tag NAME")


def prepare(run_dir: Path, start: Start, settings: dict[str, Any], tokenizer: RustBPETokenizer,
            derived: dict[str, Any], plan: Plan | None = None) -> None:
    """Make the run directory, or check that its data are as they were. For rank 0. config.json, written last, holds
    the resolved settings; `derived` is what follows from them, for people."""
    if start.wipe:
        split_train_val(settings["data_path"], settings["val_path"], data_format=settings["data_format"],
                        by_bucket=settings["curriculum"] is not None)  # or keep the old
        log.warning("deleting the run in %s, as asked", run_dir)
        shutil.rmtree(run_dir)
    if not is_run_dir(run_dir):
        (run_dir / MANIFEST_NAME).unlink(missing_ok=True)  # of a start that got no further: it binds nobody
    curriculum = None if settings["curriculum"] is None else Curriculum.from_json(settings["curriculum"])
    pin_data(run_dir, settings["data_path"], settings["val_path"], data_format=settings["data_format"],
             curriculum=curriculum, strict=settings["strict"])
    tokenizer.save(run_dir / "tokenizer")
    if plan is not None:
        write_json(run_dir / PLAN_NAME, plan.to_json())
    if not (run_dir / "config.json").exists():
        write_config(run_dir, {**settings, "derived": derived})


# ---- save -----------------------------------------------------------------------------------------------------------

@dataclass
class Progress:
    """What the loop carries from step to step; in every checkpoint."""

    step: int = 0  # optimizer steps done
    tokens: int = 0  # trained on, in all steps
    smooth_loss: float = 0.0  # running mean, weight 0.1 for the newest; not yet corrected for its start at 0
    train_time_s: float = 0.0
    val_bpb: float | None = None
    first_val_bpb: float | None = None
    min_val_bpb: float | None = None
    dropped: dict[str, int] = field(default_factory=dict)  # buckets that lanes have dropped: how many lanes

    def note_val(self, bpb: float) -> None:
        """Take in a validation result, bits per byte."""
        self.val_bpb = bpb
        self.first_val_bpb = bpb if self.first_val_bpb is None else self.first_val_bpb
        self.min_val_bpb = min(bpb, bpb if self.min_val_bpb is None else self.min_val_bpb)


def save(run_dir: Path, name: str, *, model: GPT, optimizer: MuonAdamW, schedule: Schedule, loader: DataLoader,
         progress: Progress, status: str, extra: dict[str, Any]) -> Path:
    """Collective. Collect all ranks' state on the host and write it on rank 0. OSError if it cannot be written."""
    optimizer_state = optimizer.gather_state()
    cursors = gather(loader.cursors(progress.step))
    rng = gather({"torch": torch.get_rng_state(), "python": json.dumps(random.getstate())})

    def write() -> Path:
        return save_checkpoint(
            run_dir, name, step=progress.step, model_state=to_host(model.state_dict()),
            model_config=asdict(model.config), optimizer_state=optimizer_state, scheduler_state=schedule.state(),
            rng_state=dict(enumerate(rng)), cursors=[cursor for rank in cursors for cursor in rank],
            trainer_state={"progress": asdict(progress), "status": status, **extra})

    return on_rank0(write)
