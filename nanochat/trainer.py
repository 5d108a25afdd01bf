"""
The parts of training that are not the loop: what a step of all ranks comes to, what a run carries
from launch to launch, how it is saved, and how people are told.

    a step     each rank: gradients of its rows, the loss and the live targets of each row, its part of the digest,
               whether it has rows at all, whether it should stop, how the last save went
               one small reduction brings together all but the first; loss of the step = sum of losses / live targets,
               both global, and the same bits wherever the leaves are

So every step all ranks agree on whether to go on, for the price of a reduction that they need
anyway. Nobody reads what it gave before the update is launched, so that a GPU never waits for
Python:

    host    ... launch backward | reduction | factor, update | wait, read, tell | next step ...
    GPU        ... backward ............. reduction | update |

A `Trainer` is what the loop in scripts/base_train.py hands around. Its `Journal` tells of a step
three times: a line for people, a line of JSON for programs, and wandb or TensorBoard for those who
ask for it (nanochat/integrations/trackers.py). On a terminal the lines scroll above a bar.
"""

import contextlib
import functools
import json
import logging
import math
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from nanochat.checkpoint import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_NAME,
    SCHEDULER_NAME,
    Saver,
    prune,
    save_checkpoint,
    to_host,
)
from nanochat.common import LAUNCH, StopAsked, duration, get_dist_info, print0, show
from nanochat.config import Settings
from nanochat.dataloader import DataLoader, Layout
from nanochat.dist import agree, gather_all, get_peak_flops, on_rank0, peak_memory, share, versions, wide_dtype
from nanochat.gpt import GPT
from nanochat.lifecycle import RunState, StopWatch
from nanochat.optim import MuonAdamW
from nanochat.reduce import LeafAccumulator
from nanochat.run_data import RunData
from nanochat.run_dir import RowLosses, TrainLog
from nanochat.schedule import Schedule
from nanochat.spikes import MOST_IN_A_ROW, Looks, limits, remember
from nanochat.start_run import Start, build_model

log = logging.getLogger(__name__)

LONG_S = 1800.0  # what an evaluation or a save may take
BAR = "{desc} {percentage:3.0f}% |{bar:30}| {n_fmt}/{total_fmt}{postfix}"
DRY, FLAGS = 4, 8  # in a step's message: where it says that a rank is dry, and numbers before those of buckets
NEXT_STEP_S = 5.0  # how long a save waits for the rows of the next step, whose digest it keeps
SAVE_EVERY_S = 1800.0  # with --save-every=-1: how much training can be lost


class Stop(Exception):
    """The run ends before its horizon. All ranks raise it together, after the same step. `status`:
    stopped, where it was asked to; halted, where a person must decide how it goes on. `more`: what
    else its last checkpoint should tell."""

    def __init__(self, reason: str, status: str = "stopped", **more: Any) -> None:
        super().__init__(reason)
        self.reason, self.status, self.more = reason, status, more


# ---- a step of all ranks -------------------------------------------------------------------------

@dataclass(frozen=True)
class StepTotals:
    """What all ranks' rows of a step come to; the same on every rank, and for every W that divides
    K. `nats`, `live` and `buckets` have an entry for each of the step's R rows."""

    digest: str  # 16 hex digits
    dry: bool  # whether a rank could not give its rows
    stop: bool  # whether a rank wants to stop
    unsaved: bool  # whether the last save failed so that the run must end
    save: bool  # whether a save is due by a rank's clock
    dropped: list[int]  # how many lanes have dropped each bucket
    nats: list[float]  # the sum of a row's token losses
    live: list[int]  # the live targets of a row
    buckets: list[int]  # the bucket of a row
    spiked: bool = False  # whether it was a spike, for which nothing was updated

    @classmethod
    def read(cls, values: list[float], num_buckets: int) -> "StepTotals":
        """From what `add_up` gave, fetched."""
        counts, rows = [int(value) for value in values[:FLAGS + num_buckets]], values[FLAGS + num_buckets:]
        return cls(
            digest=f"{sum(part << 16 * i for i, part in enumerate(counts[:4])) % 2**64:016x}", dry=counts[DRY] > 0,
            stop=counts[5] > 0, unsaved=counts[6] > 0, save=counts[7] > 0, dropped=counts[FLAGS:],
            nats=rows[0::3], live=[int(live) for live in rows[1::3]], buckets=[int(bucket) for bucket in rows[2::3]])

    @property
    def loss(self) -> float:
        """Mean loss of a live target, nats; NaN where there is none."""
        return self._mean(range(len(self.nats)))[0]

    def of_bucket(self, bucket: int) -> tuple[float, int]:
        """(mean loss of a live target, live targets) of a bucket's rows."""
        return self._mean([row for row, its in enumerate(self.buckets) if its == bucket])

    def _mean(self, rows: Sequence[int]) -> tuple[float, int]:
        live = sum(self.live[row] for row in rows)
        return math.fsum(self.nats[row] for row in rows) / live if live else math.nan, live


def new_row_table(layout: Layout, device: torch.device) -> torch.Tensor:
    """(R, 3) zeros for the rows of a step: of each the sum of its token losses, its live targets and
    the number of its bucket. Each rank fills in its own rows."""
    return torch.zeros((layout.rows_per_step, 3), dtype=wide_dtype(device), device=device)


def add_up(rows: torch.Tensor, *, dropped: Sequence[int], digest: int, world_size: int = 1, dry: bool = False,
           stop: bool = False, unsaved: bool = False, save: bool = False) -> torch.Tensor:
    """Collective. One reduction, in which nothing is rounded: each row of the table `rows` (see
    `new_row_table`) is filled in by one rank and zero on the others. The digest travels as four 16-bit
    parts; the rest is counts. The result stays on the device, for `grad_scale` and `StepTotals.read`.
    `dropped`: lanes that have dropped each bucket; `dry`: this rank could not give its rows; `stop`: it
    should stop; `unsaved`: it could not save, and the run must end; `save`: it is time for the next
    save."""
    flags = torch.tensor([*(digest >> 16 * i & 0xFFFF for i in range(4)), dry, stop, unsaved, save, *dropped],
                         dtype=rows.dtype, pin_memory=rows.is_cuda)
    message = torch.cat([flags.to(rows.device, non_blocking=True), rows.view(-1)])
    if world_size > 1:
        dist.all_reduce(message)
    return message


def grad_scale(message: torch.Tensor, num_buckets: int, num_targets: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a gradient of (sum of losses / num_targets) must be multiplied by to be that of the mean
    loss, and the mean loss, from what `add_up` gave. The factor is NaN, with which the optimizer
    takes no step, where a rank is dry or the loss is NaN or infinite."""
    nats, live, _ = message[FLAGS + num_buckets:].view(-1, 3).sum(dim=0)
    good = (message[DRY] == 0) & nats.isfinite() & (live > 0)
    return torch.where(good, torch.full_like(live, num_targets) / live, math.nan), nats / live


def fetch(values: torch.Tensor) -> list[float]:
    """Wait for a few numbers from the device: asleep, and not in a loop that holds a core."""
    there = values.to("cpu", non_blocking=values.is_cuda)  # into pinned memory
    if values.is_cuda:
        arrived = torch.cuda.Event(blocking=True)
        arrived.record()
        arrived.synchronize()
    return there.tolist()


# ---- what a run carries --------------------------------------------------------------------------


@dataclass
class Progress:
    """What a run has done so far; plain values, kept in trainer_state.json."""

    step: int = 0  # steps done
    tokens: int = 0  # trained on, in all steps
    smooth_loss: float = 0.0  # running mean, weight 0.1 for the newest; not yet corrected for its start at 0
    train_time_s: float = 0.0
    val_bpb: float | None = None
    first_val_bpb: float | None = None
    min_val_bpb: float | None = None
    # buckets that lanes have dropped: how many lanes
    dropped: dict[str, int] = field(default_factory=dict)
    # with --skip-spikes: what spikes are judged by, and how many steps were not applied
    window: Looks = field(default_factory=list)
    skipped: int = 0
    skipped_in_a_row: int = 0

    def note_step(self, totals: StepTotals, tokens: int, step_s: float) -> float:
        """Count a step that is done. Returns the smoothed loss, of applied steps."""
        self.step += 1
        self.tokens += tokens
        self.train_time_s += step_s
        if not totals.spiked:
            self.smooth_loss = 0.9 * self.smooth_loss + 0.1 * totals.loss
        return self.smooth_loss / (1 - 0.9**(self.step - self.skipped))

    def note_val(self, bpb: float) -> None:
        """Take in a validation result, bits per byte."""
        self.val_bpb = bpb
        self.first_val_bpb = bpb if self.first_val_bpb is None else self.first_val_bpb
        self.min_val_bpb = min(bpb, bpb if self.min_val_bpb is None else self.min_val_bpb)


def make_model(start: Start, schedule: Schedule, device: torch.device
               ) -> tuple[GPT, MuonAdamW, Progress]:
    """Collective. Model, optimizer and progress of a run: fresh, with another run's weights, or as
    they were saved."""
    settings, scale = start.settings, start.horizon.batch_lr_scale
    model = build_model(settings).to_empty(device=device)
    model.init_weights(seed=settings.seed, compute_dtype=getattr(torch, settings.dtype))
    optimizer = model.setup_optimizer(
        unembedding_lr=settings.unembedding_lr * scale, embedding_lr=settings.embedding_lr * scale,
        scalar_lr=settings.scalar_lr * scale, matrix_lr=settings.matrix_lr * scale,
        weight_decay=start.horizon.weight_decay_scaled)
    source, is_rank0 = start.checkpoint or start.origin, get_dist_info()[1] == 0
    if source is not None:
        # rank 0 reads, so that no other machine need see the files
        agree(lambda: model.load_state_dict(source.model_state()) if is_rank0 else None)
        for tensor in model.state_dict().values():
            share(tensor)
        if start.checkpoint is not None or settings.init_optimizer:
            optimizer.load_state(agree(lambda: source.optimizer_state() if is_rank0 else {}))
    progress = Progress(**start.state.get("progress", {}))
    if (val := start.logged("val")) is not None and val.get("bpb") is not None:
        progress.note_val(val["bpb"])  # measured after the save
    if progress.step > 0:
        # rates are saved with the state: those of the step before
        schedule.apply(optimizer, progress.step - 1)
    return model, optimizer, progress


@dataclass
class Trainer:
    """What the parts of the loop share."""

    start: Start
    data: RunData
    model: GPT
    compiled: Any  # the model, as it is called
    optimizer: MuonAdamW
    leaves: LeafAccumulator
    schedule: Schedule
    loader: DataLoader
    progress: Progress
    journal: Any  # of rank 0; Silence elsewhere
    dog: Any  # the watchdog
    stop: StopWatch
    saver: Saver
    saved_at: float = field(default_factory=time.monotonic)  # of this rank's clock: the last save, or the launch
    all_agreed_to_save: bool = False  # in the last step, because a rank's clock said so

    @property
    def settings(self) -> Settings:
        return self.start.settings

    @functools.cached_property
    def mfu_per_rate(self) -> float:
        """Share of the devices' peak that 1 token/s takes; 0 where the peak is unknown."""
        device = self.loader.device
        peak_flops = get_peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else math.inf
        return self.flops_per_token / (peak_flops * self.loader.layout.world_size)

    @functools.cached_property
    def flops_per_token(self) -> int:
        """Of training."""
        return self.model.estimate_flops()

    def due(self, every: int, event: str) -> bool:
        """Whether it is time for an evaluation that is due every so many steps. `event`: its name in the
        log; what a launch before logged at the step where this one begins is not repeated."""
        step = self.progress.step
        at = every > 0 and (step >= self.schedule.num_iterations or step % every == 0)
        return at and (step > self.start.step or self.start.logged(event) is None)

    def between_steps(self, what: str, function: Callable[["Trainer"], None]) -> None:
        """Evaluate, and keep as much time for it in a run with a walltime. A failure is logged with its
        reason, and the run continues: only a step can fail a run. `function` raises on all ranks, or
        without any collective after it."""
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
        """Whether this rank's clock says that a save is due, with saves by time."""
        return self.settings.save_every < 0 and time.monotonic() - self.saved_at >= SAVE_EVERY_S

    def save_is_due(self) -> bool:
        """Whether to save before the next step: the same on all ranks."""
        every = self.settings.save_every
        return self.all_agreed_to_save or (every > 0 and self.progress.step % every == 0)

    def save(self, name: str, status: str, *, last: bool = False, **more: Any) -> None:
        """Collective. Collect all ranks' state in rank 0's memory and have it written as the
        checkpoint `name`; with `last`, wait until it is. OSError on rank 0 if it cannot be."""
        p, settings, run_dir = self.progress, self.settings, self.start.run_dir
        began, step, by_time = time.perf_counter(), p.step, self.all_agreed_to_save and not last
        self.saved_at, self.all_agreed_to_save = time.monotonic(), False
        self.dog.beat(step, "save", LONG_S)
        on_rank0(self.finish_save)  # so that there is one copy of the state in memory at most
        states = {OPTIMIZER_NAME: self.optimizer.gather_state()}
        cursors = [cursor for of_rank in gather_all(self.loader.cursors(step)) for cursor in of_rank]
        next_digest = self.next_digest(NEXT_STEP_S)
        rng = gather_all({"torch": torch.get_rng_state(), "python": json.dumps(random.getstate())})
        if get_dist_info()[1] == 0:
            states |= {MODEL_NAME: to_host(self.model.state_dict()), SCHEDULER_NAME: self.schedule.state(),
                       **{RNG_NAME.format(rank): state for rank, state in enumerate(rng)}}
            told = {"progress": asdict(p), "status": status, "tokens": p.tokens, "phase": self.loader.phase,
                    "K": settings.leaves, "tokenizer_fingerprint": settings.tokenizer_fingerprint,
                    "wandb_id": self.journal.wandb_id, "by_time": by_time, "next_digest": next_digest,
                    **more}

            def write() -> Path:
                if lost := self.journal.state.owner.lost():  # the place may be another launch's by now
                    raise ValueError(lost)
                path = save_checkpoint(run_dir, name, step=step, states=states, model_config=asdict(self.model.config),
                                       cursors=cursors, trainer_state=told)
                prune(run_dir, step, keep_last_k=settings.keep_last_k,
                      keep_milestone_every=settings.keep_milestone_every)
                return path

            self.saver.start(write, last=last)
        self.stop.note("copy", time.perf_counter() - began)
        if last or settings.sync_save:
            on_rank0(self.finish_save)

    def next_digest(self, wait_s: float = math.inf) -> str | None:
        """Collective. The digest of the next step; None if some of its rows cannot be had in time."""
        parts = gather_all(self.loader.next_digest(wait_s))
        known = [part for part in parts if part is not None]
        return f"{sum(known) % 2**64:016x}" if len(known) == len(parts) else None

    def check_next_step(self) -> None:
        """Collective. Compare the next step with what it was when the checkpoint was saved. ValueError if it
        has another digest: after a clean stop, no step is repeated that would show it."""
        saved = self.start.state.get("next_digest")
        digest = None if saved is None else self.next_digest()

        def compare() -> None:
            if digest not in (None, saved):
                raise ValueError(f"step {self.progress.step}: its batch has digest {digest}, but had {saved} when "
                                 f"the checkpoint was saved: data or code changed; bring the old ones back, or "
                                 f"start a new run (--model-tag NAME --init-from={self.start.run_dir.name})")

        on_rank0(compare)

    def told_save(self, *, wait: bool = False) -> Exception | None:
        """Tell people how the save in flight went, if it has ended (or as soon as it has). Returns
        the error with which the run must end, if so. Rank 0 knows; nothing elsewhere."""
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

    def note(self, totals: StepTotals, grad_norm: float) -> None:
        """Keep what the next step is judged by, and tell of what is odd in this one: lanes that have
        dropped a bucket, and a spike, which was not applied. ArithmeticError where too many in a row
        were not."""
        p, self.all_agreed_to_save = self.progress, totals.save
        for bucket, lanes in zip(self.loader.buckets, totals.dropped):
            if lanes > p.dropped.get(bucket, 0):
                p.dropped[bucket] = lanes
                print0(f"warning: the bucket {bucket!r} has run dry in {lanes} lane(s), which go on with the others")
                self.journal.event("dropped", bucket=bucket, lanes=lanes)
        p.skipped_in_a_row = p.skipped_in_a_row + 1 if totals.spiked else 0
        if not totals.spiked:
            p.window = remember(p.window, totals.loss, grad_norm) if self.settings.skip_spikes is not None else []
            return
        p.skipped += 1
        print0(f"warning: step {p.step} is not applied: its loss is {totals.loss:.6f}, its gradient norm "
               f"{grad_norm:.4f}, beyond --skip-spikes; that makes {p.skipped}")
        self.journal.event("skipped", digest=totals.digest, loss=totals.loss, grad_norm=grad_norm, skipped=p.skipped)
        if p.skipped_in_a_row == MOST_IN_A_ROW:
            raise ArithmeticError(f"step {p.step}: {MOST_IN_A_ROW} steps in a row were skipped as spikes, so the "
                                  f"run has diverged")

    def finish_save(self) -> None:
        """Wait for the save in flight. Raises the error with which the run must end, if so."""
        if (error := self.told_save(wait=True)) is not None:
            raise error


def take_step(run: Trainer, rows: torch.Tensor, *, dry: bool, stop: bool, unsaved: bool, save: bool
              ) -> tuple[StepTotals, float]:
    """Collective. Add up what all ranks' rows come to, update the weights, and only then wait for
    the device: once. Returns the totals and the norm of the gradient, before it is clipped. Where
    a rank is dry, something is no number, or the step is a spike, nothing is updated. The arguments
    are those of `add_up`."""
    step, num_buckets, settings = run.progress.step, len(run.loader.buckets), run.settings
    run.dog.beat(step, "reduction")
    message = add_up(rows, dropped=list(run.loader.dropped().values()), digest=run.loader.digest,
                     world_size=run.loader.layout.world_size, dry=dry, stop=stop, unsaved=unsaved, save=save)
    run.dog.beat(step, "optimizer")
    run.schedule.apply(run.optimizer, step)
    scale, loss = grad_scale(message, num_buckets, settings.total_batch_size)
    limit = torch.full_like(loss, math.inf)
    if settings.skip_spikes is not None:
        loss_limit, norm_limit = limits(run.progress.window, settings.skip_spikes)
        # no norm is below 0: a spike of the loss is not applied, whatever its gradient
        limit = torch.where(loss > loss_limit, -1.0, torch.full_like(loss, norm_limit))
    norm = run.optimizer.step(scale, max_norm=settings.max_grad_norm or math.inf, limit=limit)
    run.model.zero_grad(set_to_none=True)
    *values, grad_norm, limited = fetch(torch.cat([message, torch.stack([norm.to(limit.dtype), limit])]))
    totals = StepTotals.read(values, num_buckets)
    if totals.dry and step > 0:
        run.schedule.apply(run.optimizer, step - 1)  # rates are saved: those of the step before
    # by the device's own comparison; as long as nothing is judged, what is no number ends the run
    return replace(totals, spiked=limited < math.inf and not grad_norm <= limited), grad_norm


# ---- telling people ------------------------------------------------------------------------------

class Silence:
    """Stands where ranks other than 0 have no journal and no state, and runs no trackers: whatever it is
    told, it does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class Journal:
    """For rank 0: the log of a training run, its live state, its bar on a terminal, and what it asks for of
    nanochat/integrations/trackers.py.

    The log has the id of the wandb run from the first launch on, whatever becomes of that launch.
    """

    def __init__(self, start: Start, progress: Progress, device: torch.device, state: RunState) -> None:
        self.start, self.progress, self.device, self.state = start, progress, device, state
        settings, run_dir, step = start.settings, start.run_dir, progress.step
        path = run_dir / "logs" / "train.jsonl"
        newest = start.events
        self.versions, before = {"code": code_version(), **versions(device)}, newest.get("started", {})
        for name, value in self.versions.items():
            if value != "" and before.get(name, value) not in ("", value):
                print0(f"note: the launch before was of the {name} {before[name]}, this one is of {value}")
        self.log = TrainLog(path, first_step=step, lost=state.owner.lost)
        self.rows = RowLosses(run_dir, num_rows=settings.total_batch_size // settings.max_seq_len,
                              T=settings.max_seq_len) if settings.row_losses else None
        self.bar = tqdm(total=start.horizon.num_iterations, initial=step, desc=run_dir.name, bar_format=BAR,
                        dynamic_ncols=True, leave=False, disable=None)  # where stderr is no terminal
        if not self.bar.disable:
            LAUNCH.aside = tqdm.external_write_mode
        logged_id = newest.get("wandb", {}).get("id")
        self.wandb_id = logged_id or start.state.get("wandb_id")
        self.trackers: Any = Silence()
        if settings.trackers or settings.profiled:
            from nanochat.integrations.trackers import Trackers

            self.trackers = Trackers(settings, run_dir, wandb_id=self.wandb_id, step=step)
            self.wandb_id = self.trackers.wandb_id
        if self.wandb_id != logged_id:
            self.log.write(event="wandb", step=step, time=time.time(), id=self.wandb_id)

    def started(self, world_size: int, **told: Any) -> None:
        """This launch is about to take its first step. `told`: what else the log should have of it."""
        self.event("started", world_size=world_size, device=self.device.type,
                   num_iterations=self.start.horizon.num_iterations, **self.versions, **told)
        self.trackers.at(self.progress.step)

    def event(self, name: str, **record: Any) -> None:
        """Something that happened before the next step."""
        step = self.progress.step
        self.log.write(event=name, step=step, time=time.time(), **record)
        told = record if name == "core" else {f"{name}/{k}": v for k, v in record.items()}  # CORE as nanochat names it
        self.trackers.log({"step": step, **told})
        saved = {"checkpoint": record["checkpoint"]} if name == "saved" else {}
        self.state.update(val_bpb=self.progress.val_bpb, **saved)

    def step(self, totals: StepTotals, record: dict[str, Any], line: str, **state: Any) -> None:
        """Report the step that was just counted: `line` to people (as --log-every says), `record`
        to the log and to the trackers, `totals` to the losses of rows, `state` to scripts.status and to the bar.
        ValueError if it had another digest when this run was there before."""
        p, last = self.progress, self.start.horizon.num_iterations
        logged = self.log.digest_of(p.step - 1)
        if logged not in (None, record["digest"]):
            raise ValueError(f"step {p.step - 1}: its batch has digest {record['digest']}, but had {logged} when this "
                             f"run was there before: data or code changed; go back to what it was")
        if p.step % self.start.settings.log_every == 0 or p.step == last:
            print0(f"step {p.step - 1:05d}/{last:05d} | {line}")
        if (peak := peak_memory(self.device)) is not None:
            record["peak_memory_bytes"] = peak
        self.log.write(step=p.step - 1, **record)
        if self.rows is not None:
            self.rows.write(p.step - 1, totals.nats, totals.live)
        for_trackers = {k if k.startswith("total_") else f"train/{k}": v for k, v in record.items() if k != "digest"}
        self.trackers.log({"step": p.step - 1, **for_trackers})
        self.state.update(status="running", step=p.step, tokens=p.tokens, skipped=p.skipped, **state)
        self.bar.set_postfix_str(
            f"loss {show(state['loss'])}, bits per byte {show(p.val_bpb)}, {show(state['tokens_per_s'])} tok/s, "
            f"eta {duration(state['eta_s'])}", refresh=False)
        self.bar.update()
        self.trackers.at(p.step)

    def ending(self, reason: str) -> None:
        """The run is about to end: what is left is to save it."""
        self.state.update(status="stopping", reason=reason)

    def end(self, status: str, reason: str = "") -> None:
        """The run has ended so."""
        self.event(status, reason=reason)
        self.state.close(status, reason)

    def close(self) -> None:
        """Finish trackers, bar and log."""
        self.trackers.finish()
        LAUNCH.aside = contextlib.nullcontext
        self.bar.close()
        self.log.close()


@functools.cache
def code_version() -> str:
    """The commit of this code, with a "+" where files differ from it; empty where there is no
    repository."""
    try:
        told = subprocess.run(["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
                              cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=20)
        return told.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
