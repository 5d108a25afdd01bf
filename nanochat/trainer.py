"""
The parts of training that are not the loop: what a step of all ranks comes to, what a run carries, how it is saved.

    a step     each rank: gradients of its rows, of each leaf the sum of their losses and live targets, its part of the
               digest, whether it has rows at all, whether it should stop, how the last save went
               one small reduction brings together all but the first; loss of the step = sum of losses / live targets,
               both global, and the same bits wherever the leaves are

So every step all ranks agree on whether to go on, for the price of a reduction that they need anyway.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanochat.checkpoint import Code, Saver, save_checkpoint, to_host
from nanochat.common import get_dist_info
from nanochat.dataloader import DataLoader, Layout
from nanochat.dist import gather, wide_dtype
from nanochat.gpt import GPT
from nanochat.optim import MuonAdamW
from nanochat.schedule import Schedule


class Halt(Exception):
    """The run cannot take its next step, and a person must decide how it goes on. All ranks raise it together."""


class Stop(Exception):
    """The run was asked to stop. All ranks raise it together, after the same step."""


@dataclass(frozen=True)
class StepTotals:
    """What all ranks' rows of a step come to; the same on every rank, and for every W that divides K."""

    digest: str  # 16 hex digits
    dry: bool  # whether a rank could not give its rows
    stop: bool  # whether a rank wants to stop
    saved: Code  # how the save that ended last went
    dropped: list[int]  # how many lanes have dropped each bucket
    nats: list[float]  # sum of losses of each bucket's rows
    live: list[int]  # their live targets

    @property
    def loss(self) -> float:
        """Mean loss of a live target, nats; NaN where there is none."""
        return math.fsum(self.nats) / sum(self.live) if any(self.live) else math.nan

    def bucket_losses(self) -> list[float | None]:
        """Mean loss of a live target in each bucket, None where the step has none of it."""
        return [nats / live if live else None for nats, live in zip(self.nats, self.live)]

    def grad_scale(self, num_targets: int) -> float:
        """What a gradient of (sum of losses / num_targets) must be multiplied by to be that of the mean loss."""
        return num_targets / sum(self.live) if any(self.live) else math.nan


def leaf_sums(layout: Layout, num_buckets: int, device: torch.device) -> torch.Tensor:
    """Zeros for a rank's leaves: (leaves, 2, buckets), of each the sums of losses and the live targets."""
    return torch.zeros((len(layout.leaves), 2, num_buckets), dtype=wide_dtype(device), device=device)


def add_up(sums: torch.Tensor, layout: Layout, *, dropped: Sequence[int], digest: int, dry: bool = False,
           stop: bool = False, saved: Code = Code.NOTHING) -> StepTotals:
    """Collective. One reduction, in which nothing is rounded: `sums`, see `leaf_sums`, of all leaves travel in a table
    of which each rank fills in its own, and are then added by `math.fsum`; the digest travels as four 16-bit parts;
    the rest is counts. `dropped`: lanes that have dropped each bucket; `dry`: this rank could not give its rows;
    `stop`: it should stop; `saved`: how a save ended, rank 0's."""
    flags = torch.tensor([*(digest >> 16 * i & 0xFFFF for i in range(4)), dry, stop, saved, *dropped])
    table = torch.zeros((layout.num_blocks, *sums.shape[1:]), dtype=sums.dtype, device=sums.device)
    first = layout.rank * len(sums)
    table[first:first + len(sums)] = sums
    message = torch.cat([flags.to(sums.device, sums.dtype, non_blocking=True), table.view(-1)])
    if layout.world_size > 1:
        dist.all_reduce(message)
    values = message.tolist()
    counts, leaves = [int(value) for value in values[:len(flags)]], values[len(flags):]
    nats, live = ([leaves[i::2 * len(dropped)] for i in range(at, at + len(dropped))] for at in (0, len(dropped)))
    return StepTotals(
        digest=f"{sum(part << 16 * i for i, part in enumerate(counts[:4])) % 2**64:016x}", dry=bool(counts[4]),
        stop=bool(counts[5]), saved=Code(counts[6]), dropped=counts[7:], nats=[math.fsum(of) for of in nats],
        live=[int(math.fsum(of)) for of in live])


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


def save(run_dir: Path, name: str, *, saver: Saver, model: GPT, optimizer: MuonAdamW, schedule: Schedule,
         loader: DataLoader, progress: Progress, status: str, last: bool, extra: dict[str, Any]) -> None:
    """Collective. Collect all ranks' state in rank 0's memory, and have its `saver` write it. `last`: the run has
    nothing else to do."""
    _, rank, _, _ = get_dist_info()
    if rank == 0:
        saver.wait()  # so that there is one copy of the state in memory at most
    optimizer_state = optimizer.gather_state()
    cursors = gather(loader.cursors(progress.step))
    rng = gather({"torch": torch.get_rng_state(), "python": json.dumps(random.getstate())})
    if rank != 0:
        return
    model_state = to_host(model.state_dict())
    write = partial(
        save_checkpoint, run_dir, name, step=progress.step, model_state=model_state, model_config=asdict(model.config),
        optimizer_state=optimizer_state, scheduler_state=schedule.state(), rng_state=dict(enumerate(rng)),
        cursors=[cursor for cursors_of_rank in cursors for cursor in cursors_of_rank],
        trainer_state={"progress": asdict(progress), "status": status, **extra})
    saver.start(write, last=last)
