"""Training outside the loop: a step of all ranks, saves, and the state that a run carries from
launch to launch.

    a step     each rank has: the gradients of its rows, the loss and live targets of each row, its part of the digest,
               and flags: out of rows, stop requested, the last save failed, a save is due
               one small reduction adds up all of this except the gradients
               loss of the step = sum of losses / live targets, over all ranks: the same bits wherever the leaves run

So all ranks agree after every step on whether to continue, at the price of a reduction that the
loss needs anyway. The host reads the result only after it has launched the update, so a GPU never
waits for Python:

    host    ... launch backward | reduction | factor, update | wait, read, log | next step ...
    GPU        ... backward ............. reduction | update |

The loop in scripts/base_train.py passes a `Trainer` around. Its `Journal` reports each step
(nanochat/run_journal.py).
"""

import functools
import json
import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanochat.checkpoint import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_NAME,
    SCHEDULER_NAME,
    Saver,
    Snapshot,
    prune,
    to_host,
)
from nanochat.common import StopAsked, counted, get_dist_info, print0
from nanochat.config import Settings
from nanochat.dataloader import DataLoader, StepLayout
from nanochat.dist import broadcast, gather_all, get_peak_flops, on_all_ranks, on_rank0, wide_dtype
from nanochat.gpt import GPT
from nanochat.optim import MuonAdamW
from nanochat.reduce import LeafAccumulator
from nanochat.run_journal import Journal, Silence, check_digest
from nanochat.run_stop import StopWatch
from nanochat.schedule import Schedule
from nanochat.sources import RunData
from nanochat.spikes import MOST_IN_A_ROW, limits, remember
from nanochat.start_run import Start, build_model
from nanochat.steps import DRY, FLAGS, Progress, StepTotals
from nanochat.watchdog import Watchdog

log = logging.getLogger(__name__)

LONG_S = 1800.0  # time limit of an evaluation or a save
NEXT_STEP_S = 5.0  # how long a save waits for the rows of the next step, whose digest it stores
SAVE_EVERY_S = 1800.0  # with --save-every=-1: the most training time that a crash can lose


class Stop(Exception):
    """Ends the run before its horizon. All ranks raise this together, after the same step.
    `status`: "stopped" on request, "halted" if a person must decide how to continue. `more`: extra
    entries for the run's last checkpoint."""

    def __init__(self, reason: str, status: str = "stopped", **more: Any) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status = status
        self.more = more


# ---- a step of all ranks -------------------------------------------------------------------------


def new_row_table(layout: StepLayout, device: torch.device) -> torch.Tensor:
    """(R, 3) zeros, a table with one entry for each row of a step: the sum of its token losses, the
    number of its live targets and the index of its bucket. Each rank fills in its own rows."""
    return torch.zeros((layout.rows_per_step, 3), dtype=wide_dtype(device), device=device)


def add_up(
    rows: torch.Tensor,
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
    the device, for `grad_scale` and `StepTotals.read`.

    rows: the rank's table, see `new_row_table`. dropped: for each bucket, the number of the rank's
    lanes that have dropped it. digest: the rank's part of the batch digest. dry: it did not have
    all of its rows. stop: it was asked to stop. unsaved: its save failed, and the run must end.
    save: a save is due according to its clock.
    """
    # the digest (as four 16-bit parts), the flags and the counts are integers small enough to be
    # added exactly
    flags = torch.tensor(
        [*(digest >> 16 * i & 0xFFFF for i in range(4)), dry, stop, unsaved, save, *dropped],
        dtype=rows.dtype,
        pin_memory=rows.is_cuda,
    )
    # the table follows: each row was filled in by exactly one rank, and x + 0 is exact
    message = torch.cat([flags.to(rows.device, non_blocking=True), rows.view(-1)])
    if world_size > 1:
        dist.all_reduce(message)
    return message


def grad_scale(
    message: torch.Tensor, num_buckets: int, num_targets: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(factor, mean loss) of a step, from the message that `add_up` returns. The factor turns the
    gradient of (sum of losses / num_targets) into the gradient of the mean loss. If a rank is dry,
    or the loss is NaN or infinite, the factor is NaN, so that the optimizer takes no step."""
    nats, live, _ = message[FLAGS + num_buckets :].view(-1, 3).sum(dim=0)
    good = (message[DRY] == 0) & nats.isfinite() & (live > 0)
    return torch.where(good, torch.full_like(live, num_targets) / live, math.nan), nats / live


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
    its checkpoint."""
    settings, scale = start.settings, start.horizon.batch_lr_scale
    model = build_model(settings).to_empty(device=device)
    model.init_weights(seed=settings.seed, compute_dtype=getattr(torch, settings.dtype))
    optimizer = model.setup_optimizer(
        unembedding_lr=settings.unembedding_lr * scale,
        embedding_lr=settings.embedding_lr * scale,
        scalar_lr=settings.scalar_lr * scale,
        matrix_lr=settings.matrix_lr * scale,
        weight_decay=start.horizon.weight_decay_scaled,
    )
    source, is_rank0 = start.checkpoint or start.origin, get_dist_info()[1] == 0
    if source is not None:
        # rank 0 reads, so other machines need no access to the files
        on_all_ranks(lambda: source.load_weights(model) if is_rank0 else None)
        if start.checkpoint is not None or settings.init_optimizer:
            optimizer.load_state(on_all_ranks(lambda: source.optimizer_state() if is_rank0 else {}))
    # also new weights: their bits depend on a processor's instructions
    for tensor in model.state_dict().values():
        broadcast(tensor)
    progress = Progress(**start.state.get("progress", {}))
    if (val := start.logged("val")) is not None and val.get("bpb") is not None:
        progress.record_val(val["bpb"])  # measured after the save
    if (own := start.checkpoint) is not None:
        on_rank0(lambda: note_other_schedule(own.load(SCHEDULER_NAME), schedule.state()))
    if progress.step > 0:
        # a checkpoint stores the rates of the last step before it
        schedule.apply(optimizer, progress.step - 1)
    restore_random_states(start, device)
    return model, optimizer, progress


def note_other_schedule(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Print a note if the code, or a default in it, has changed the schedule since the checkpoint.
    What a longer horizon changes is no surprise."""
    of_horizon = ("num_iterations", "peak_weight_decay")
    changed = [
        f"{name} was {saved.get(name)}, is {value}"
        for name, value in ours.items()
        if name not in of_horizon and saved.get(name) != value
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
    files = checkpoint.trainer_state["files"]
    saved = [name for name in files if name.startswith(RNG_NAME.partition("{")[0])]
    if len(saved) != world_size:
        print0(
            f"note: the random states of {counted(len(saved), 'process')} are not restored on {world_size}; this "
            f"only matters to code that draws from the global generators, such as dropout in a fork"
        )
        return
    states = on_rank0(
        lambda: [checkpoint.load(RNG_NAME.format(number)) for number in range(world_size)]
    )[rank]
    torch.set_rng_state(states["torch"])
    version, internal, gauss = json.loads(states["python"])
    random.setstate((version, tuple(internal), gauss))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


@dataclass
class Trainer:
    """The parts of a run during training, and its saves."""

    start: Start
    data: RunData
    model: GPT
    compiled: Callable[..., torch.Tensor]  # the model, compiled or not
    optimizer: MuonAdamW
    leaves: LeafAccumulator
    schedule: Schedule
    loader: DataLoader
    progress: Progress
    journal: Journal | Silence
    dog: Watchdog
    stop: StopWatch
    saver: Saver
    # last save, or the launch, on this rank's clock
    saved_at: float = field(default_factory=time.monotonic)
    all_agreed_to_save: bool = False  # the totals of the last step had `save` set
    # {name: whether it is good}, for retention
    known_checkpoints: dict[str, bool] = field(init=False)

    def __post_init__(self) -> None:
        self.known_checkpoints = (
            {} if self.start.checkpoint is None else {self.start.checkpoint.path.name: True}
        )

    @property
    def settings(self) -> Settings:
        return self.start.settings

    @functools.cached_property
    def mfu_per_rate(self) -> float:
        """The share of the devices' peak FLOPS that 1 token/s uses; 0 if the peak is unknown."""
        device = self.loader.device
        peak_flops = (
            get_peak_flops(torch.cuda.get_device_name(device))
            if device.type == "cuda"
            else math.inf
        )
        return self.flops_per_token / (peak_flops * self.loader.layout.world_size)

    @functools.cached_property
    def flops_per_token(self) -> int:
        """Training FLOPs per token."""
        return self.model.estimate_flops()

    def due(self, every: int, event: str) -> bool:
        """Whether an evaluation that takes place every `every` steps is due. At the first step of a
        launch, it is not due if the previous launch has logged it as `event`."""
        step = self.progress.step
        is_due = every > 0 and (step >= self.schedule.num_iterations or step % every == 0)
        return is_due and (step > self.start.step or self.start.logged(event) is None)

    def between_steps(self, what: str, function: Callable[["Trainer"], None]) -> None:
        """Run an evaluation, and record how long it took, so that a run with a walltime can reserve
        that time. If the evaluation fails, the reason is logged and the run continues: only a
        failed step ends it. If `function` raises, it must do so on all ranks, or have no collective
        afterwards."""
        began = time.perf_counter()
        try:
            function(self)
        except (Stop, StopAsked):
            raise
        except Exception as e:
            step, reason = self.progress.step, f"{type(e).__name__}: {e}"
            print0(f"warning: step {step}: {what} failed: {reason}; the run continues")
            self.journal.event("evaluation_failed", what=what, reason=reason)
        self.stop.note(what, time.perf_counter() - began)

    def time_to_save(self) -> bool:
        """Whether a save is due according to this rank's clock, with --save-every=-1."""
        return self.settings.save_every < 0 and time.monotonic() - self.saved_at >= SAVE_EVERY_S

    def save_is_due(self) -> bool:
        """Whether to save before the next step; the same on all ranks."""
        every = self.settings.save_every
        return self.all_agreed_to_save or (every > 0 and self.progress.step % every == 0)

    def save(self, name: str, status: str, *, last: bool = False, **more: Any) -> None:
        """Collective. Copy all ranks' state to rank 0's memory, and write it as the checkpoint
        `name` in the background. With `last`, wait for the write; rank 0 raises OSError if the
        write fails. `more`: further fields of the seal."""
        began = time.perf_counter()
        by_time = self.all_agreed_to_save and not last
        self.saved_at, self.all_agreed_to_save = time.monotonic(), False
        self.dog.beat(self.progress.step, "save", LONG_S)
        # the previous one, so that memory holds at most one copy of the state
        on_rank0(self.finish_save)
        snapshot = self.collect(status, by_time=by_time, **more)
        if snapshot is not None:
            self.saver.start(partial(self._write, snapshot, name), last=last)
        self.stop.note("copy", time.perf_counter() - began)
        if last or self.settings.sync_save:
            on_rank0(self.finish_save)

    def collect(self, status: str, *, by_time: bool, **more: Any) -> Snapshot | None:
        """Collective. A copy of the state of all ranks in rank 0's memory; None on the others."""
        p, settings = self.progress, self.settings
        optimizer = self.optimizer.gather_state()
        cursors = [
            cursor for of_rank in gather_all(self.loader.cursors(p.step)) for cursor in of_rank
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
        trainer_state = {
            "progress": asdict(p),
            "status": status,
            "tokens": p.tokens,
            "phase": self.loader.phase,
            "K": settings.leaves,
            "tokenizer_fingerprint": settings.tokenizer_fingerprint,
            "wandb_id": self.journal.wandb_id,
            "by_time": by_time,
            "next_digest": next_digest,
            **more,
        }
        return Snapshot(p.step, states, asdict(self.model.config), cursors, trainer_state)

    def _write(self, snapshot: Snapshot, name: str) -> Path:
        """Rank 0, in the saver's thread, without any collective: write a snapshot, then delete
        older checkpoints that need not be kept. ValueError if another launch owns the run directory
        by now."""
        run_dir, settings = self.start.run_dir, self.settings
        if lost := self.journal.lost():
            raise ValueError(lost)
        path = snapshot.write(run_dir, name)
        self.known_checkpoints[path.name] = True
        prune(
            run_dir,
            snapshot.step,
            self.known_checkpoints,
            keep_last_k=settings.keep_last_k,
            keep_milestone_every=settings.keep_milestone_every,
        )
        return path

    def next_digest(self, wait_s: float = math.inf) -> str | None:
        """Collective. The digest of the next step; None if some of its rows are not ready within
        `wait_s`."""
        parts = gather_all(self.loader.next_digest(wait_s))
        known = [part for part in parts if part is not None]
        return f"{sum(known) % 2**64:016x}" if len(known) == len(parts) else None

    def check_next_step(self) -> None:
        """Collective. Compare the digest of the next step with the one that the checkpoint
        predicts. ValueError if they differ. After a clean stop no step is repeated, so nothing else
        would notice that the data has changed."""
        saved = self.start.state.get("next_digest")
        digest = None if saved is None else self.next_digest()
        on_rank0(lambda: check_digest(self.start.run_dir, self.progress.step, digest, saved))

    def report_save(self, *, wait: bool = False) -> Exception | None:
        """On rank 0: print and log the outcome of the save in progress if it has ended; with
        `wait`, wait for its end first. Returns the error that must end the run, if any."""
        outcome = self.saver.take(wait=wait)
        if outcome is None:
            return None
        self.stop.note_save(outcome.seconds)
        if outcome.path is not None:
            print0(outcome.message)
            self.journal.event("saved", checkpoint=outcome.path.name, seconds=outcome.seconds)
        else:
            log.warning("%s", outcome.message)
            self.journal.event("save_failed", reason=outcome.message)
        return outcome.fatal

    def check_totals(self, totals: StepTotals, grad_norm: float) -> None:
        """Warn if lanes have dropped a bucket or the step was skipped as a spike, and update the
        statistics that spikes are measured against. ArithmeticError after too many spikes in a
        row."""
        p, self.all_agreed_to_save = self.progress, totals.save
        for bucket, lanes in zip(self.loader.buckets, totals.dropped):
            if lanes > p.dropped.get(bucket, 0):
                p.dropped[bucket] = lanes
                print0(
                    f"warning: the bucket {bucket!r} has run dry in {counted(lanes, 'lane')} and is skipped there"
                )
                self.journal.event("dropped", bucket=bucket, lanes=lanes)
        p.skipped_in_a_row = p.skipped_in_a_row + 1 if totals.spiked else 0
        if not totals.spiked:
            p.window = (
                remember(p.window, totals.loss, grad_norm)
                if self.settings.skip_spikes is not None
                else []
            )
            return
        p.skipped += 1
        print0(
            f"warning: step {p.step} exceeds the --skip-spikes limit and was not applied: loss {totals.loss:.6f}, "
            f"gradient norm {grad_norm:.4f}; {counted(p.skipped, 'step')} skipped so far"
        )
        self.journal.event(
            "skipped",
            digest=totals.digest,
            loss=totals.loss,
            grad_norm=grad_norm,
            skipped=p.skipped,
        )
        if p.skipped_in_a_row == MOST_IN_A_ROW:
            raise ArithmeticError(
                f"step {p.step}: {MOST_IN_A_ROW} steps in a row were skipped as spikes, so the "
                f"run has diverged"
            )

    def finish_save(self) -> None:
        """Wait for the save in progress. Raises the error that must end the run, if any."""
        if (error := self.report_save(wait=True)) is not None:
            raise error


def take_step(
    run: Trainer, rows: torch.Tensor, *, dry: bool, stop: bool, unsaved: bool, save: bool
) -> tuple[StepTotals, float]:
    """Collective. Add up all ranks' rows, update the weights, and only then wait for the device,
    once.

    Returns the totals and the gradient norm before clipping. Nothing is updated if a rank is dry,
    the loss or the norm is NaN or infinite, or the step is a spike. The arguments are those of
    `add_up`.
    """
    step = run.progress.step
    num_buckets = len(run.loader.buckets)
    settings = run.settings
    # launch the reduction; its result stays on the device
    run.dog.beat(step, "reduction")
    message = add_up(
        rows,
        dropped=list(run.loader.dropped().values()),
        digest=run.loader.digest,
        world_size=run.loader.layout.world_size,
        dry=dry,
        stop=stop,
        unsaved=unsaved,
        save=save,
    )
    run.dog.beat(step, "optimizer")
    run.schedule.apply(run.optimizer, step)
    # the factor of the gradient, computed on the device: NaN makes the optimizer skip the step
    scale, loss = grad_scale(message, num_buckets, settings.total_batch_size)
    # the largest gradient norm that is applied
    limit = torch.full_like(loss, math.inf)
    if settings.skip_spikes is not None:
        loss_limit, norm_limit = limits(run.progress.window, settings.skip_spikes)
        # if the loss exceeds its limit, the norm's limit is -1, which every norm exceeds: the step
        # is not applied
        limit = torch.where(loss > loss_limit, -1.0, torch.full_like(loss, norm_limit))
    # launch the update, and drop the gradients
    norm = run.optimizer.step(scale, max_norm=settings.max_grad_norm or math.inf, limit=limit)
    run.model.zero_grad(set_to_none=True)
    # wait for the device: the only wait in a step
    *values, grad_norm, limited = fetch(
        torch.cat([message, torch.stack([norm.to(limit.dtype), limit])])
    )
    totals = StepTotals.read(values, num_buckets)
    if totals.dry and step > 0:
        # a checkpoint stores the rates of the last step that was applied
        run.schedule.apply(run.optimizer, step - 1)
    # the same comparison as on the device; while the limit is infinite, a NaN or infinite value is
    # not a spike
    return replace(totals, spiked=limited < math.inf and not grad_norm <= limited), grad_norm
