"""
The parts of training that are not the loop: what a step of all ranks comes to, what a run carries, how it is saved.

    a step     each rank: gradients of its rows, sum of their losses, live targets, its part of the digest, whether it
               has rows at all, whether it should stop, how the last save went
               one small reduction adds all but the first; loss of the step = sum of losses / live targets, both global

So every step all ranks agree on whether to go on, for the price of a reduction that they need anyway.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanochat.checkpoint import save_checkpoint
from nanochat.common import get_dist_info
from nanochat.dataloader import DataLoader
from nanochat.gpt import GPT
from nanochat.optim import MuonAdamW
from nanochat.plain_state import to_host
from nanochat.ranks import gather
from nanochat.saving import Code, Saver
from nanochat.schedule import Schedule


class Halt(Exception):
    """The run cannot take its next step, and a person must decide how it goes on. All ranks raise it together."""


class Stop(Exception):
    """The run was asked to stop. All ranks raise it together, after the same step."""


@dataclass(frozen=True)
class StepTotals:
    """What all ranks' rows of a step come to. Tensors stay on the device until asked for."""

    sums: torch.Tensor  # (7 + 3 N,): four 16-bit parts of the digest, ranks that are dry, ranks that want to stop, how
    # the last save went; of N buckets: nats, targets, dropped

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
    def stop(self) -> bool:
        """Whether a rank wants to stop."""
        return bool(self.sums[5])

    @property
    def saved(self) -> Code:
        """How the save that ended last went."""
        return Code(int(self.sums[6]))

    @property
    def _by_bucket(self) -> torch.Tensor:
        return self.sums[7:].view(3, -1)

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


def add_up(nats: torch.Tensor, live: torch.Tensor, *, dropped: Sequence[int], digest: int, dry: bool = False,
           stop: bool = False, saved: Code = Code.NOTHING) -> StepTotals:
    """Collective. One reduction of float64 values. `nats`, `live`: (N,) sums of losses and live targets of this rank's
    rows of each bucket; `dropped`: lanes that have dropped it. The digest travels as four 16-bit parts, whose sums are
    exact; `dry`: this rank could not give its rows; `stop`: it should stop; `saved`: how a save ended, rank 0's."""
    device = nats.device
    wide = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64, and no process groups
    parts = torch.tensor([*(digest >> 16 * i & 0xFFFF for i in range(4)), dry, stop, saved, *dropped], dtype=wide)
    parts = parts.to(device, non_blocking=True)
    sums = torch.cat([parts[:7], nats.to(wide), live.to(wide), parts[7:]])
    if get_dist_info()[3] > 1:
        dist.all_reduce(sums)
    return StepTotals(sums)


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
        saver.wait()  # what it is still writing may be written over below
    optimizer_state = optimizer.gather_state(into=saver.held.get("optimizer"))
    cursors = gather(loader.cursors(progress.step))
    rng = gather({"torch": torch.get_rng_state(), "python": json.dumps(random.getstate())})
    if rank != 0:
        return
    model_state = to_host(model.state_dict(), into=saver.held.get("model"))
    saver.held = {"optimizer": optimizer_state, "model": model_state}
    write = partial(
        save_checkpoint, run_dir, name, step=progress.step, model_state=model_state, model_config=asdict(model.config),
        optimizer_state=optimizer_state, scheduler_state=schedule.state(), rng_state=dict(enumerate(rng)),
        cursors=[cursor for cursors_of_rank in cursors for cursor in cursors_of_rank],
        trainer_state={"progress": asdict(progress), "status": status, **extra})
    saver.start(write, last=last)
