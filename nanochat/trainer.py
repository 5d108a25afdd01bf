"""
Training outside the loop: step totals, saves, the log, and the state that a run carries from launch to launch.

    a step     each rank has: the gradients of its rows, the loss and live targets of each row, its part of the digest,
               and flags: out of rows, stop requested, the last save failed, a save is due
               one small reduction adds up all of this except the gradients
               loss of the step = sum of losses / live targets, over all ranks: the same bits wherever the leaves run

So all ranks agree after every step on whether to continue, at the price of a reduction that the loss needs anyway. The
host reads the result only after it has launched the update, so a GPU never waits for Python:

    host    ... launch backward | reduction | factor, update | wait, read, log | next step ...
    GPU        ... backward ............. reduction | update |

The loop in scripts/base_train.py passes a `Trainer` around. Its `Journal` reports each step in three places: a printed
line, a line of JSON in the log, and the run's trackers (nanochat/integrations/trackers.py), such as TensorBoard. On
a terminal, printed lines scroll above a progress bar.
"""

import contextlib
import functools
import json
import logging
import math
import random
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from nanochat.common import LAUNCH, StopAsked, counted, duration, get_dist_info, print0, show
from nanochat.config import Settings
from nanochat.dataloader import DataLoader, StepLayout
from nanochat.dist import (
    agree,
    gather_all,
    get_peak_flops,
    on_rank0,
    peak_memory,
    reserved_memory,
    share,
    versions,
    wide_dtype,
)
from nanochat.gpt import GPT
from nanochat.lifecycle import RunState, StopWatch
from nanochat.optim import MuonAdamW
from nanochat.reduce import LeafAccumulator
from nanochat.run_dir import RowLosses, TrainLog
from nanochat.schedule import Schedule
from nanochat.sources import RunData
from nanochat.spikes import MOST_IN_A_ROW, Window, limits, remember
from nanochat.start_run import Start, build_model
from nanochat.watchdog import Watchdog

if TYPE_CHECKING:
    from nanochat.integrations import trackers

log = logging.getLogger(__name__)

LONG_S = 1800.0  # time limit of an evaluation or a save
BAR = "{desc} {percentage:3.0f}% |{bar:30}| {n_fmt}/{total_fmt}{postfix}"
DRY, FLAGS = 4, 8  # in a step's message: the position of the dry flag, and how many numbers precede the buckets
NEXT_STEP_S = 5.0  # how long a save waits for the rows of the next step, whose digest it stores
SAVE_EVERY_S = 1800.0  # with --save-every=-1: the most training time that a crash can lose


class Stop(Exception):
    """Ends the run before its horizon. All ranks raise this together, after the same step. `status`: "stopped" on
    request, "halted" if a person must decide how to continue. `more`: extra entries for the run's last checkpoint."""

    def __init__(self, reason: str, status: str = "stopped", **more: Any) -> None:
        super().__init__(reason)
        self.reason, self.status, self.more = reason, status, more


# ---- a step of all ranks -------------------------------------------------------------------------

@dataclass(frozen=True)
class StepTotals:
    """The totals of a step over all ranks: the same on every rank, and for every number of ranks that divides the
    number of leaves. `nats`, `live` and `buckets` have one entry for each of the step's R rows."""

    digest: str  # 16 hex digits
    dry: bool  # a rank did not have all of its rows
    stop: bool  # a rank was asked to stop
    unsaved: bool  # the last save failed, and the run must end
    save: bool  # a save is due according to a rank's clock
    dropped: list[int]  # for each bucket, the number of lanes that have dropped it
    nats: list[float]  # the sum of each row's token losses
    live: list[int]  # the number of each row's live targets
    buckets: list[int]  # the index of each row's bucket
    spiked: bool = False  # the step was a spike and was not applied

    @classmethod
    def read(cls, values: list[float], num_buckets: int) -> "StepTotals":
        """The totals in a message from `add_up`, copied by `fetch`."""
        counts, rows = [int(value) for value in values[:FLAGS + num_buckets]], values[FLAGS + num_buckets:]
        return cls(
            digest=f"{sum(part << 16 * i for i, part in enumerate(counts[:4])) % 2**64:016x}", dry=counts[DRY] > 0,
            stop=counts[5] > 0, unsaved=counts[6] > 0, save=counts[7] > 0, dropped=counts[FLAGS:],
            nats=rows[0::3], live=[int(live) for live in rows[1::3]], buckets=[int(bucket) for bucket in rows[2::3]])

    @property
    def loss(self) -> float:
        """Mean loss per live target, in nats; NaN if the step has no live target."""
        return self._mean(range(len(self.nats)))[0]

    def of_bucket(self, bucket: int) -> tuple[float, int]:
        """(mean loss per live target, number of live targets) of a bucket's rows."""
        return self._mean([row for row, number in enumerate(self.buckets) if number == bucket])

    def _mean(self, rows: Sequence[int]) -> tuple[float, int]:
        live = sum(self.live[row] for row in rows)
        return math.fsum(self.nats[row] for row in rows) / live if live else math.nan, live


def new_row_table(layout: StepLayout, device: torch.device) -> torch.Tensor:
    """(R, 3) zeros, a table with one entry for each row of a step: the sum of its token losses, the number of its live
    targets and the index of its bucket. Each rank fills in its own rows."""
    return torch.zeros((layout.rows_per_step, 3), dtype=wide_dtype(device), device=device)


def add_up(rows: torch.Tensor, *, dropped: Sequence[int], digest: int, world_size: int = 1, dry: bool = False,
           stop: bool = False, unsaved: bool = False, save: bool = False) -> torch.Tensor:
    """Collective. Add up the ranks' messages about a step, without any rounding. Returns the sum on the device, for
    `grad_scale` and `StepTotals.read`.

    rows: the rank's table, see `new_row_table`. dropped: for each bucket, the number of the rank's lanes that have
    dropped it. digest: the rank's part of the batch digest. dry: it did not have all of its rows. stop: it was asked to
    stop. unsaved: its save failed, and the run must end. save: a save is due according to its clock.
    """
    # the digest (as four 16-bit parts), the flags and the counts are integers small enough to be added exactly
    flags = torch.tensor([*(digest >> 16 * i & 0xFFFF for i in range(4)), dry, stop, unsaved, save, *dropped],
                         dtype=rows.dtype, pin_memory=rows.is_cuda)
    # the table follows: each row was filled in by exactly one rank, and x + 0 is exact
    message = torch.cat([flags.to(rows.device, non_blocking=True), rows.view(-1)])
    if world_size > 1:
        dist.all_reduce(message)
    return message


def grad_scale(message: torch.Tensor, num_buckets: int, num_targets: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(factor, mean loss) of a step, from the message that `add_up` returns. The factor turns the gradient of
    (sum of losses / num_targets) into the gradient of the mean loss. If a rank is dry, or the loss is NaN or infinite,
    the factor is NaN, so that the optimizer takes no step."""
    nats, live, _ = message[FLAGS + num_buckets:].view(-1, 3).sum(dim=0)
    good = (message[DRY] == 0) & nats.isfinite() & (live > 0)
    return torch.where(good, torch.full_like(live, num_targets) / live, math.nan), nats / live


def fetch(values: torch.Tensor) -> list[float]:
    """Copy a few numbers from the device. The host sleeps while it waits, instead of spinning on a core."""
    on_host = values.to("cpu", non_blocking=values.is_cuda)  # into pinned memory
    if values.is_cuda:
        arrived = torch.cuda.Event(blocking=True)
        arrived.record()
        arrived.synchronize()
    return on_host.tolist()


# ---- the state of a run --------------------------------------------------------------------------


@dataclass
class Progress:
    """The progress of a run, as plain values. They are saved in trainer_state.json."""

    step: int = 0  # steps done
    tokens: int = 0  # tokens trained on, in all steps
    smooth_loss: float = 0.0  # running mean, weight 0.1 for the newest; not corrected for its start at 0
    train_time_s: float = 0.0
    val_bpb: float | None = None
    first_val_bpb: float | None = None
    min_val_bpb: float | None = None
    dropped: dict[str, int] = field(default_factory=dict)  # {bucket: number of lanes that have dropped it}
    window: Window = field(default_factory=list)  # with --skip-spikes: recent applied steps, see spikes.py
    skipped: int = 0  # steps that were not applied, because they were spikes
    skipped_in_a_row: int = 0

    def count_step(self, totals: StepTotals, tokens: int, step_s: float) -> float:
        """Count a finished step. Returns the smoothed loss of the applied steps."""
        self.step += 1
        self.tokens += tokens
        self.train_time_s += step_s
        if not totals.spiked:
            self.smooth_loss = 0.9 * self.smooth_loss + 0.1 * totals.loss
        return self.smooth_loss / (1 - 0.9**(self.step - self.skipped))

    def record_val(self, bpb: float) -> None:
        """Record a validation result in bits per byte."""
        self.val_bpb = bpb
        self.first_val_bpb = bpb if self.first_val_bpb is None else self.first_val_bpb
        self.min_val_bpb = min(bpb, bpb if self.min_val_bpb is None else self.min_val_bpb)


def make_model(start: Start, schedule: Schedule, device: torch.device) -> tuple[GPT, MuonAdamW, Progress]:
    """Collective. Model, optimizer and progress of a run: new, from another run's weights, or from its checkpoint."""
    settings, scale = start.settings, start.horizon.batch_lr_scale
    model = build_model(settings).to_empty(device=device)
    model.init_weights(seed=settings.seed, compute_dtype=getattr(torch, settings.dtype))
    optimizer = model.setup_optimizer(
        unembedding_lr=settings.unembedding_lr * scale, embedding_lr=settings.embedding_lr * scale,
        scalar_lr=settings.scalar_lr * scale, matrix_lr=settings.matrix_lr * scale,
        weight_decay=start.horizon.weight_decay_scaled)
    source, is_rank0 = start.checkpoint or start.origin, get_dist_info()[1] == 0
    if source is not None:
        # rank 0 reads, so other machines need no access to the files
        agree(lambda: source.load_weights(model) if is_rank0 else None)
        if start.checkpoint is not None or settings.init_optimizer:
            optimizer.load_state(agree(lambda: source.optimizer_state() if is_rank0 else {}))
    for tensor in model.state_dict().values():  # also new weights: their bits depend on a processor's instructions
        share(tensor)
    progress = Progress(**start.state.get("progress", {}))
    if (val := start.logged("val")) is not None and val.get("bpb") is not None:
        progress.record_val(val["bpb"])  # measured after the save
    if (own := start.checkpoint) is not None:
        on_rank0(lambda: note_other_schedule(own.load(SCHEDULER_NAME), schedule.state()))
    if progress.step > 0:
        schedule.apply(optimizer, progress.step - 1)  # a checkpoint stores the rates of the last step before it
    restore_random_states(start, device)
    return model, optimizer, progress


def note_other_schedule(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Print a note if the code, or a default in it, has changed the schedule since the checkpoint. What a longer
    horizon changes is no surprise."""
    of_horizon = ("num_iterations", "peak_weight_decay")
    changed = [f"{name} was {saved.get(name)}, is {value}" for name, value in ours.items()
               if name not in of_horizon and saved.get(name) != value]
    if changed:
        print0(f"note: the schedule differs from the one in the checkpoint: {'; '.join(changed)}")


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of the global random generators of this process, as a plain state. Nothing here draws from them, but a
    fork may, for example for dropout."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": json.dumps(random.getstate())}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(start: Start, device: torch.device) -> None:
    """Collective. Set the global random generators of every rank: as the checkpoint stores them or, for a new run, from
    the seed and the rank. If the number of ranks has changed, the states fit no rank, and a note says so."""
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
        print0(f"note: the random states of {counted(len(saved), 'process')} are not restored on {world_size}; this "
               f"only matters to code that draws from the global generators, such as dropout in a fork")
        return
    states = on_rank0(lambda: [checkpoint.load(RNG_NAME.format(number)) for number in range(world_size)])[rank]
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
    journal: "Journal | Silence"
    dog: Watchdog
    stop: StopWatch
    saver: Saver
    saved_at: float = field(default_factory=time.monotonic)  # last save, or the launch, on this rank's clock
    all_agreed_to_save: bool = False  # the totals of the last step had `save` set
    known_checkpoints: dict[str, bool] = field(init=False)  # {name: whether it is good}, for retention

    def __post_init__(self) -> None:
        self.known_checkpoints = {} if self.start.checkpoint is None else {self.start.checkpoint.path.name: True}

    @property
    def settings(self) -> Settings:
        return self.start.settings

    @functools.cached_property
    def mfu_per_rate(self) -> float:
        """The share of the devices' peak FLOPS that 1 token/s uses; 0 if the peak is unknown."""
        device = self.loader.device
        peak_flops = get_peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else math.inf
        return self.flops_per_token / (peak_flops * self.loader.layout.world_size)

    @functools.cached_property
    def flops_per_token(self) -> int:
        """Training FLOPs per token."""
        return self.model.estimate_flops()

    def due(self, every: int, event: str) -> bool:
        """Whether an evaluation that takes place every `every` steps is due. At the first step of a launch, it is not
        due if the previous launch has logged it as `event`."""
        step = self.progress.step
        is_due = every > 0 and (step >= self.schedule.num_iterations or step % every == 0)
        return is_due and (step > self.start.step or self.start.logged(event) is None)

    def between_steps(self, what: str, function: Callable[["Trainer"], None]) -> None:
        """Run an evaluation, and record how long it took, so that a run with a walltime can reserve that time. If the
        evaluation fails, the reason is logged and the run continues: only a failed step ends it. If `function`
        raises, it must do so on all ranks, or have no collective afterwards."""
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
        """Collective. Copy all ranks' state to rank 0's memory, and write it as the checkpoint `name` in the
        background. With `last`, wait for the write; rank 0 raises OSError if the write fails."""
        p, settings, run_dir = self.progress, self.settings, self.start.run_dir
        began, step, by_time = time.perf_counter(), p.step, self.all_agreed_to_save and not last
        self.saved_at, self.all_agreed_to_save = time.monotonic(), False
        self.dog.beat(step, "save", LONG_S)
        on_rank0(self.finish_save)  # the previous one, so that memory holds at most one copy of the state
        states = {OPTIMIZER_NAME: self.optimizer.gather_state()}
        cursors = [cursor for of_rank in gather_all(self.loader.cursors(step)) for cursor in of_rank]
        next_digest = self.next_digest(NEXT_STEP_S)
        rng = gather_all(random_states(self.loader.device))
        if get_dist_info()[1] == 0:
            states |= {MODEL_NAME: to_host(self.model.state_dict()), SCHEDULER_NAME: self.schedule.state(),
                       **{RNG_NAME.format(rank): state for rank, state in enumerate(rng)}}
            trainer_state = {
                "progress": asdict(p), "status": status, "tokens": p.tokens, "phase": self.loader.phase,
                "K": settings.leaves, "tokenizer_fingerprint": settings.tokenizer_fingerprint,
                "wandb_id": self.journal.wandb_id, "by_time": by_time, "next_digest": next_digest, **more}

            def write() -> Path:
                if lost := self.journal.lost():  # another launch may own the run directory by now
                    raise ValueError(lost)
                path = save_checkpoint(run_dir, name, step=step, states=states, model_config=asdict(self.model.config),
                                       cursors=cursors, trainer_state=trainer_state)
                self.known_checkpoints[path.name] = True
                prune(run_dir, step, self.known_checkpoints, keep_last_k=settings.keep_last_k,
                      keep_milestone_every=settings.keep_milestone_every)
                return path

            self.saver.start(write, last=last)
        self.stop.note("copy", time.perf_counter() - began)
        if last or settings.sync_save:
            on_rank0(self.finish_save)

    def next_digest(self, wait_s: float = math.inf) -> str | None:
        """Collective. The digest of the next step; None if some of its rows are not ready within `wait_s`."""
        parts = gather_all(self.loader.next_digest(wait_s))
        known = [part for part in parts if part is not None]
        return f"{sum(known) % 2**64:016x}" if len(known) == len(parts) else None

    def check_next_step(self) -> None:
        """Collective. Compare the digest of the next step with the one that the checkpoint predicts. ValueError if they
        differ. After a clean stop no step is repeated, so nothing else would notice that the data has changed."""
        saved = self.start.state.get("next_digest")
        digest = None if saved is None else self.next_digest()
        on_rank0(lambda: check_digest(self.start.run_dir, self.progress.step, digest, saved))

    def report_save(self, *, wait: bool = False) -> Exception | None:
        """On rank 0: print and log the outcome of the save in progress if it has ended; with `wait`, wait for its end
        first. Returns the error that must end the run, if any."""
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
        """Warn if lanes have dropped a bucket or the step was skipped as a spike, and update the statistics that spikes
        are measured against. ArithmeticError after too many spikes in a row."""
        p, self.all_agreed_to_save = self.progress, totals.save
        for bucket, lanes in zip(self.loader.buckets, totals.dropped):
            if lanes > p.dropped.get(bucket, 0):
                p.dropped[bucket] = lanes
                print0(f"warning: the bucket {bucket!r} has run dry in {counted(lanes, 'lane')} and is skipped there")
                self.journal.event("dropped", bucket=bucket, lanes=lanes)
        p.skipped_in_a_row = p.skipped_in_a_row + 1 if totals.spiked else 0
        if not totals.spiked:
            p.window = remember(p.window, totals.loss, grad_norm) if self.settings.skip_spikes is not None else []
            return
        p.skipped += 1
        print0(f"warning: step {p.step} exceeds the --skip-spikes limit and was not applied: loss {totals.loss:.6f}, "
               f"gradient norm {grad_norm:.4f}; {counted(p.skipped, 'step')} skipped so far")
        self.journal.event("skipped", digest=totals.digest, loss=totals.loss, grad_norm=grad_norm, skipped=p.skipped)
        if p.skipped_in_a_row == MOST_IN_A_ROW:
            raise ArithmeticError(f"step {p.step}: {MOST_IN_A_ROW} steps in a row were skipped as spikes, so the "
                                  f"run has diverged")

    def finish_save(self) -> None:
        """Wait for the save in progress. Raises the error that must end the run, if any."""
        if (error := self.report_save(wait=True)) is not None:
            raise error


def take_step(run: Trainer, rows: torch.Tensor, *, dry: bool, stop: bool, unsaved: bool, save: bool
              ) -> tuple[StepTotals, float]:
    """Collective. Add up all ranks' rows, update the weights, and only then wait for the device, once.

    Returns the totals and the gradient norm before clipping. Nothing is updated if a rank is dry, the loss or the norm
    is NaN or infinite, or the step is a spike. The arguments are those of `add_up`.
    """
    step, num_buckets, settings = run.progress.step, len(run.loader.buckets), run.settings
    # launch the reduction; its result stays on the device
    run.dog.beat(step, "reduction")
    message = add_up(rows, dropped=list(run.loader.dropped().values()), digest=run.loader.digest,
                     world_size=run.loader.layout.world_size, dry=dry, stop=stop, unsaved=unsaved, save=save)
    run.dog.beat(step, "optimizer")
    run.schedule.apply(run.optimizer, step)
    # the factor of the gradient, computed on the device: NaN makes the optimizer skip the step
    scale, loss = grad_scale(message, num_buckets, settings.total_batch_size)
    # the largest gradient norm that is applied
    limit = torch.full_like(loss, math.inf)
    if settings.skip_spikes is not None:
        loss_limit, norm_limit = limits(run.progress.window, settings.skip_spikes)
        # if the loss exceeds its limit, the norm's limit is -1, which every norm exceeds: the step is not applied
        limit = torch.where(loss > loss_limit, -1.0, torch.full_like(loss, norm_limit))
    # launch the update, and drop the gradients
    norm = run.optimizer.step(scale, max_norm=settings.max_grad_norm or math.inf, limit=limit)
    run.model.zero_grad(set_to_none=True)
    # wait for the device: the only wait in a step
    *values, grad_norm, limited = fetch(torch.cat([message, torch.stack([norm.to(limit.dtype), limit])]))
    totals = StepTotals.read(values, num_buckets)
    if totals.dry and step > 0:
        run.schedule.apply(run.optimizer, step - 1)  # a checkpoint stores the rates of the last step that was applied
    # the same comparison as on the device; while the limit is infinite, a NaN or infinite value is not a spike
    return replace(totals, spiked=limited < math.inf and not grad_norm <= limited), grad_norm


# ---- the log -------------------------------------------------------------------------------------

def check_digest(run_dir: Path, step: int, digest: str | None, expected: str | None) -> None:
    """ValueError if the batch of a step has a different digest from the one the run recorded. None: unknown."""
    if None not in (digest, expected) and digest != expected:
        raise ValueError(f"step {step}: its batch has digest {digest}, but this run recorded {expected} for it: data "
                         f"or code has changed. Restore it, or start a new run (--model-tag NAME "
                         f"--init-from={run_dir.name})")


class Silence:
    """Accepts every call and does nothing. It replaces the journal and the state on ranks other than 0, and the
    trackers of a run that has none."""

    wandb_id: str | None = None

    def started(self, world_size: int, **record: Any) -> None: ...

    def event(self, name: str, **record: Any) -> None: ...

    def step(self, totals: StepTotals, record: dict[str, Any], line: str, **state: Any) -> None: ...

    def ending(self, reason: str) -> None: ...

    def end(self, status: str, reason: str = "") -> None: ...

    def close(self, status: str = "", reason: str = "") -> None: ...

    def lost(self) -> str:
        return ""

    refresh = lost  # a method of `RunState`

    def log(self, values: Mapping[str, Any]) -> None: ...

    def at(self, step: int) -> None: ...

    def finish(self) -> None: ...


class Journal:
    """On rank 0: the log of a run, its live state, the progress bar on a terminal, and its trackers
    (nanochat/integrations/trackers.py). The first launch logs the id of the wandb run at once, so that a resume finds
    it even if that launch crashes."""

    def __init__(self, start: Start, progress: Progress, device: torch.device, state: RunState) -> None:
        self.start, self.progress, self.device, self.state = start, progress, device, state
        settings, run_dir, step = start.settings, start.run_dir, progress.step
        path, newest = run_dir / "logs" / "train.jsonl", start.events
        self.versions, previous = {"code": code_version(), **versions(device)}, newest.get("started", {})
        for name, value in self.versions.items():
            if value != "" and previous.get(name, value) not in ("", value):
                print0(f"note: the previous launch ran {name} {previous[name]}, this one runs {value}")
        self.lost = state.owner.lost  # '' while this launch owns the run, else a sentence that says why it does not
        self.log = TrainLog(path, first_step=step, lost=self.lost)
        self.rows = RowLosses(run_dir, num_rows=settings.total_batch_size // settings.max_seq_len,
                              T=settings.max_seq_len) if settings.row_losses else None
        self.bar = tqdm(total=start.horizon.num_iterations, initial=step, desc=run_dir.name, bar_format=BAR,
                        dynamic_ncols=True, leave=False, disable=None)  # None: disabled if stderr is not a terminal
        if not self.bar.disable:
            LAUNCH.aside = tqdm.external_write_mode
        logged_id = newest.get("wandb", {}).get("id")
        self.wandb_id = logged_id or start.state.get("wandb_id")
        self.val_step = newest.get("val", {}).get("step")
        self.trackers: trackers.Trackers | Silence = Silence()
        if settings.trackers or settings.profiled:
            from nanochat.integrations.trackers import Trackers

            self.trackers = Trackers(settings, run_dir, wandb_id=self.wandb_id, step=step)
            self.wandb_id = self.trackers.wandb_id
        if self.wandb_id != logged_id:
            self.log.write(event="wandb", step=step, time=time.time(), id=self.wandb_id)

    def started(self, world_size: int, **record: Any) -> None:
        """Log the start of this launch, with a `record` of its command."""
        self.event("started", world_size=world_size, device=self.device.type,
                   num_iterations=self.start.horizon.num_iterations, **self.versions, **record)
        self.trackers.at(self.progress.step)

    def event(self, name: str, **record: Any) -> None:
        """Log an event between two steps."""
        step = self.progress.step
        self.log.write(event=name, step=step, time=time.time(), **record)
        # trackers get the values of CORE under nanochat's names
        tracked = record if name == "core" else {f"{name}/{k}": v for k, v in record.items()}
        self.trackers.log({"step": step, **tracked})
        self.val_step = step if name == "val" else self.val_step
        saved = {"checkpoint": record["checkpoint"]} if name == "saved" else {}
        self.state.update(val_bpb=self.progress.val_bpb, val_step=self.val_step, **saved)

    def step(self, totals: StepTotals, record: dict[str, Any], line: str, **state: Any) -> None:
        """Report the step that was just counted: print `line` (every --log-every steps), write `record` to the log and
        the trackers, write the row losses in `totals` to their file, and show `state` in scripts.status and the bar.
        ValueError if the run took this step before with a different digest."""
        p, last = self.progress, self.start.horizon.num_iterations
        check_digest(self.start.run_dir, p.step - 1, record["digest"], self.log.digest_of(p.step - 1))
        if p.step % self.start.settings.log_every == 0 or p.step == last:
            print0(f"step {p.step - 1:05d}/{last:05d} | {line}")
        if (peak := peak_memory(self.device)) is not None:
            record["peak_memory_bytes"] = peak
            record["reserved_memory_bytes"] = reserved_memory(self.device)
        self.log.write(step=p.step - 1, **record)
        if self.rows is not None:
            self.rows.write(p.step - 1, totals.nats, totals.live)
        for_trackers = {k if k.startswith("total_") else f"train/{k}": v for k, v in record.items() if k != "digest"}
        self.trackers.log({"step": p.step - 1, **for_trackers})
        self.state.update(status="running", step=p.step, tokens=p.tokens, skipped=p.skipped, **state)
        self.bar.set_postfix_str(
            f"loss {show(state['loss'])}, bits per byte {show(p.val_bpb)} at step {show(self.val_step)}, "
            f"{show(state['tokens_per_s'])} tok/s, "
            f"eta {duration(state['eta_s'])}", refresh=False)
        self.bar.update()
        self.trackers.at(p.step)

    def ending(self, reason: str) -> None:
        """Record that the run ends after one more save."""
        self.state.update(status="stopping", reason=reason)

    def end(self, status: str, reason: str = "") -> None:
        """Record the end of the run."""
        self.event(status, reason=reason)
        self._flush()
        self.state.close(status, reason)  # from here on, another launch may own the run

    def close(self) -> None:
        """Finish trackers, bar and log."""
        self.trackers.finish()
        LAUNCH.aside = contextlib.nullcontext
        self.bar.close()
        self._flush()
        self.log.close()

    def _flush(self) -> None:
        """Write the lines and row losses that wait for a full disk."""
        if not self.lost():
            self.log.flush()
            if self.rows is not None:
                self.rows.flush()


@functools.cache
def code_version() -> str:
    """The commit of this code, with a "+" if files differ from it; empty outside a repository."""
    try:
        described = subprocess.run(["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
                              cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=20)
        return described.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
