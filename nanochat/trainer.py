"""
A step of all ranks, and the state that a run carries from launch to launch.

    a step     each rank has: the gradients of its rows, the loss and live targets of each row, its
               part of the digest, and flags: out of rows, stop requested, the last save failed, a
               save is due
               one small reduction adds up all of this except the gradients
               loss of the step = sum of losses / live targets, over all ranks: the same bits
               wherever the leaves run

So all ranks agree after every step on whether to continue, at the price of a reduction that the
loss needs anyway. The host reads the result only after it has launched the update, so a GPU never
waits for Python:

    host    ... launch backward | reduction | factor, update | wait, read, log | next step ...
    GPU        ... backward ............. reduction | update |

A `Training` is what a checkpoint stores and a resume restores. `Training.collect` copies it; the
loop is in scripts/base_train.py.
"""

import functools
import json
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from nanochat.checkpoint import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_NAME,
    SCHEDULER_NAME,
    Snapshot,
    to_host,
)
from nanochat.common import counted, get_dist_info, print0
from nanochat.config import Settings
from nanochat.dataloader import DataLoader, StepLayout
from nanochat.dist import broadcast, gather_all, get_peak_flops, on_all_ranks, on_rank0, wide_dtype
from nanochat.gpt import GPT
from nanochat.optim import MuonAdamW
from nanochat.reduce import LeafAccumulator
from nanochat.run_journal import check_digest
from nanochat.run_settings import build_model
from nanochat.schedule import Schedule
from nanochat.spikes import limits
from nanochat.start_run import Start
from nanochat.steps import RECENT, Progress, StepMessage, StepTotals

NEXT_STEP_S = 5.0  # how long a save waits for the rows of the next step, whose digest it stores


# ---- a step of all ranks -------------------------------------------------------------------------


def new_row_table(layout: StepLayout, device: torch.device) -> torch.Tensor:
    """(R, 3) zeros, a table with one entry for each row of a step: the sum of its token losses, the
    number of its live targets and the index of its bucket. Each rank fills in its own rows."""
    return torch.zeros((layout.rows_per_step, 3), dtype=wide_dtype(device), device=device)


def add_up(
    table: torch.Tensor,
    *,
    dropped: Sequence[int],
    digest: int,
    world_size: int = 1,
    dry: bool = False,
    stop: bool = False,
    unsaved: bool = False,
    save: bool = False,
) -> torch.Tensor:
    """Collective. Add up the ranks' messages about a step, without any rounding. Returns the sum on
    the device, for `judge` and `StepTotals.read`.

    table: the rank's, see `new_row_table`. The others: see `StepMessage`.
    """
    message = StepMessage(digest, dry, stop, unsaved, save, dropped)
    head = torch.tensor(message.numbers(), dtype=table.dtype, pin_memory=table.is_cuda)
    # the table follows: each row was filled in by exactly one rank, and x + 0 is exact
    added = torch.cat([head.to(table.device, non_blocking=True), table.view(-1)])
    if world_size > 1:
        dist.all_reduce(added)
    return added


def judge(
    message: torch.Tensor,
    num_buckets: int,
    num_targets: int,
    loss_limit: float = math.inf,
    norm_limit: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(factor, limit) for the optimizer, on the device, from the message that `add_up` returns. The
    factor turns the gradient of (sum of losses / num_targets) into the gradient of the mean loss.
    `limit` is the largest gradient norm that is applied; -1, which every norm exceeds, if a rank is
    dry or the loss is NaN, infinite or above `loss_limit`. `StepTotals.outcome` reads it."""
    table = message[StepMessage.rows_at(num_buckets) :].view(-1, 3)
    nats, live, _ = table.sum(dim=0)
    loss = nats / live
    good = (message[StepMessage.DRY] == 0) & loss.isfinite() & (loss <= loss_limit)
    limit = torch.where(good, torch.full_like(loss, norm_limit), -1.0)
    return torch.full_like(live, num_targets) / live, limit


def fetch(values: torch.Tensor) -> list[float]:
    """Copy a few numbers from the device. The host sleeps while it waits, instead of spinning on a
    core."""
    on_host = values.to("cpu", non_blocking=values.is_cuda)  # into pinned memory
    if values.is_cuda:
        arrived = torch.cuda.Event(blocking=True)
        arrived.record()
        arrived.synchronize()
    return on_host.tolist()


# ---- the state of a run --------------------------------------------------------------------------


def make_model(
    start: Start, schedule: Schedule, device: torch.device
) -> tuple[GPT, MuonAdamW, Progress]:
    """Collective. Model, optimizer and progress of a run: new, from another run's weights, or from
    its checkpoint. The random states of this process, too."""
    settings = start.settings
    scale = start.horizon.batch_lr_scale
    model = build_model(settings).to_empty(device=device)
    model.init_weights(seed=settings.seed, compute_dtype=getattr(torch, settings.dtype))
    optimizer = model.setup_optimizer(
        num_leaves=settings.leaves,
        unembedding_lr=settings.unembedding_lr * scale,
        embedding_lr=settings.embedding_lr * scale,
        scalar_lr=settings.scalar_lr * scale,
        matrix_lr=settings.matrix_lr * scale,
        weight_decay=start.horizon.weight_decay_scaled,
    )
    is_rank0 = get_dist_info()[1] == 0
    source = start.checkpoint or start.origin
    if source is not None:
        # rank 0 reads, so other machines need no access to the files
        on_rank0(lambda: source.load_weights(model))
        if start.checkpoint is not None:
            # not `on_rank0`, which would send the state to all ranks; `load_state` shards it
            optimizer.load_state(on_all_ranks(lambda: source.optimizer_state() if is_rank0 else {}))
    # also new weights: their bits depend on a processor's instructions
    for tensor in model.state_dict().values():
        broadcast(tensor)
    progress = start.first_progress()
    if (own := start.checkpoint) is not None:
        on_rank0(lambda: note_other_schedule(own.load(SCHEDULER_NAME), schedule.state()))
    if progress.step > 0:
        # a checkpoint stores the rates of the last step before it
        schedule.apply(optimizer, progress.step - 1)
    restore_random_states(start, device)
    return model, optimizer, progress


def note_other_schedule(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Print a note if the code, or a default in it, has changed the schedule since the checkpoint.
    Ignores what a longer horizon changes, and settings that the code has gained, at their defaults.
    """
    of_horizon = ("num_iterations", "peak_weight_decay")
    before = Schedule.complete(saved)
    changed = [
        f"{name} was {before.get(name)}, is {value}"
        for name, value in ours.items()
        if name not in of_horizon and before.get(name) != value
    ]
    if changed:
        print0(f"note: the schedule differs from the one in the checkpoint: {'; '.join(changed)}")


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of the global random generators of this process, as a plain state. Nothing here
    draws from them, but a fork may, for example for dropout."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": json.dumps(random.getstate()),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(start: Start, device: torch.device) -> None:
    """Collective. Set the global random generators of every rank: as the checkpoint stores them or,
    for a new run, from the seed and the rank. If the number of ranks has changed, the states fit no
    rank, and a note says so."""
    _, rank, _, world_size = get_dist_info()
    seed = start.settings.seed * 2**16 + rank
    torch.manual_seed(seed)  # also CUDA's generators
    random.seed(seed)
    checkpoint = start.checkpoint
    if checkpoint is None:
        return
    files = checkpoint.seal["files"]
    saved = [name for name in files if name.startswith(RNG_NAME.partition("{")[0])]
    if len(saved) != world_size:
        print0(
            f"note: the random states of {counted(len(saved), 'process')} are not restored on {world_size}; this "
            f"only matters to code that draws from the global generators, such as dropout in a fork"
        )
        return
    # rank 0 reads those of all ranks and sends them; they are small
    of_ranks = on_rank0(
        lambda: [checkpoint.load(RNG_NAME.format(number)) for number in range(world_size)]
    )
    states = of_ranks[rank]
    torch.set_rng_state(states["torch"])
    version, internal, gauss = json.loads(states["python"])
    random.setstate((version, tuple(internal), gauss))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


@dataclass
class Training:
    """What is trained, on this rank, and what computes it. A snapshot stores it, with the optimizer's
    state of all ranks, and adds the states of the random generators."""

    settings: Settings
    model: GPT
    compiled: Callable[..., torch.Tensor]  # the model, compiled or not
    optimizer: MuonAdamW
    leaves: LeafAccumulator
    schedule: Schedule
    loader: DataLoader
    progress: Progress
    model_code: dict[str, str]  # hashes of the code that this launch has loaded
    # seconds of this launch's newest steps, not saved
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    @functools.cached_property
    def flops_per_token(self) -> int:
        """Training FLOPs per token."""
        return self.model.estimate_flops()

    @functools.cached_property
    def mfu_per_rate(self) -> float:
        """The share of the devices' peak FLOPS that 1 token/s uses; 0 if the peak is unknown."""
        device = self.loader.device
        if device.type != "cuda":
            return 0.0
        peak_flops = get_peak_flops(torch.cuda.get_device_name(device))
        return self.flops_per_token / (peak_flops * self.loader.layout.world_size)

    def collect(self, **more: object) -> Snapshot | None:
        """Collective. Set the optimizer's rates to those of the last step that counts, and copy the
        state of all ranks into rank 0's memory; None on the others. Call it between steps, or after a
        step that does not count (`Outcome.VOID`): then the loaders of some ranks are one step ahead,
        and their cursors are taken from before it. `more`: further fields of the seal."""
        step = self.progress.step
        # a checkpoint stores the rates of the last step before it; a step that does not count (a rank
        # was out of rows, or NaN) has set its own
        self.schedule.apply(self.optimizer, max(step - 1, 0))
        optimizer = self.optimizer.gather_state()
        cursors = [
            cursor for of_rank in gather_all(self.loader.cursors(step)) for cursor in of_rank
        ]
        next_digest = self.next_digest(NEXT_STEP_S)
        random_of_ranks = gather_all(random_states(self.loader.device))
        if get_dist_info()[1] > 0:
            return None
        states = {
            OPTIMIZER_NAME: optimizer,
            MODEL_NAME: to_host(self.model.state_dict()),
            SCHEDULER_NAME: self.schedule.state(),
        }
        for rank, state in enumerate(random_of_ranks):
            states[RNG_NAME.format(rank)] = state
        seal = {
            "progress": asdict(self.progress),
            "tokens": self.progress.tokens,
            "phase": self.loader.phase(step),
            "K": self.settings.leaves,
            "tokenizer_fingerprint": self.settings.tokenizer_fingerprint,
            "model_code": self.model_code,
            "next_digest": next_digest,
            **more,
        }
        return Snapshot(step, states, asdict(self.model.config), cursors, seal)

    def next_digest(self, wait_s: float = math.inf) -> str | None:
        """Collective. The digest of the next step; None if some of its rows are not ready within
        `wait_s`."""
        parts = gather_all(self.loader.next_digest(wait_s))
        known = [part for part in parts if part is not None]
        return f"{sum(known) % 2**64:016x}" if len(known) == len(parts) else None

    def check_next_step(self, start: Start) -> None:
        """Collective. Compare the digest of the next step with the one that the checkpoint
        predicts. ValueError if they differ. After a clean stop no step is repeated, so nothing else
        would notice that the data has changed."""
        saved = start.seal.get("next_digest")
        digest = None if saved is None else self.next_digest()
        on_rank0(lambda: check_digest(start.run_dir, self.progress.step, digest, saved))


def no_beat(step: int, where: str) -> None: ...


def take_step(
    training: Training,
    table: torch.Tensor,
    *,
    dry: bool,
    stop: bool,
    unsaved: bool,
    save: bool,
    beat: Callable[[int, str], None] = no_beat,
) -> StepTotals:
    """Collective. Add up all ranks' tables, update the weights, and only then wait for the device,
    once. Returns the totals; their `outcome` says whether the weights were updated.

    `dry`, `stop`, `unsaved`, `save`: see `StepMessage`. `beat`: called at each point that all ranks
    reach.
    """
    step = training.progress.step
    loader = training.loader
    settings = training.settings
    num_buckets = len(loader.buckets)
    # launch the reduction; its result stays on the device
    beat(step, "reduction")
    message = add_up(
        table,
        dropped=list(loader.dropped().values()),
        digest=loader.digest,
        world_size=loader.layout.world_size,
        dry=dry,
        stop=stop,
        unsaved=unsaved,
        save=save,
    )
    # launch the update, which the device applies only within the limit, and drop the gradients
    beat(step, "optimizer")
    loss_limit = norm_limit = math.inf
    if settings.skip_spikes is not None:
        loss_limit, norm_limit = limits(training.progress.window, settings.skip_spikes)
    scale, limit = judge(message, num_buckets, settings.total_batch_size, loss_limit, norm_limit)
    training.schedule.apply(training.optimizer, step)
    norm = training.optimizer.step(scale, max_norm=settings.max_grad_norm or math.inf, limit=limit)
    training.model.zero_grad(set_to_none=True)
    # wait for the device: the only wait in a step
    *values, grad_norm, limited = fetch(
        torch.cat([message, torch.stack([norm.to(limit.dtype), limit])])
    )
    totals = StepTotals.read(values, num_buckets)
    can_spike = min(loss_limit, norm_limit) < math.inf
    return replace(totals, grad_norm=grad_norm, norm_limit=limited, can_spike=can_spike)
