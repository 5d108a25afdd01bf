"""
The plain values of training: the totals of a step, the progress of a run, and what a run reports.
"""

import enum
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nanochat.spikes import Window


class Outcome(enum.Enum):
    """What became of a step.

             updates the weights    counts (is logged, moves the schedule)    then the run
    APPLIED  yes                    yes                                       continues
    SPIKE    no                     yes                                       continues; fails after ten in a row
    EMPTY    no                     yes                                       continues
    VOID     no                     no                                        stops, halts or fails
    """

    APPLIED = "applied"
    SPIKE = "spike"  # the loss or the gradient norm is above its limit
    EMPTY = "empty"  # no row has a live target, so there is nothing to learn
    VOID = "void"  # a rank ran out of rows, or, without limits, NaN or infinity


@dataclass(frozen=True)
class StepMessage:
    """What a rank says about a step besides the losses of its rows: numbers that all ranks add up.

        index    0  1  2  3    4    5     6        7     8 ...                  HEAD + num_buckets ...
        holds    digest        dry  stop  unsaved  save  dropped, for each of   for each row of the step:
                               (how many ranks)          num_buckets buckets    nats, live targets, bucket

    The digest is in four parts of 16 bits, the lowest first. All these are integers that are small
    enough to be added exactly, in float32, too."""

    digest: int  # the rank's part; of the sum, mod 2**64
    dry: int  # 1: the rank did not have all of its rows; of the sum, the number of such ranks
    stop: int  # it was asked to stop
    unsaved: int  # its last save failed, and the run must end
    save: int  # a save is due according to its clock
    dropped: Sequence[int]  # for each bucket, the number of the rank's lanes that have dropped it

    DRY: ClassVar = 4
    HEAD: ClassVar = 8  # how many numbers precede `dropped`

    def numbers(self) -> list[int]:
        """The message without the rows."""
        digest = [self.digest >> 16 * i & 0xFFFF for i in range(4)]
        return [*digest, self.dry, self.stop, self.unsaved, self.save, *self.dropped]

    @classmethod
    def read(cls, numbers: Sequence[float]) -> "StepMessage":
        """The sum of some ranks' `numbers`."""
        *digest, dry, stop, unsaved, save = map(int, numbers[: cls.HEAD])
        whole = sum(part << 16 * i for i, part in enumerate(digest))
        dropped = [int(lanes) for lanes in numbers[cls.HEAD :]]
        return cls(whole % 2**64, dry, stop, unsaved, save, dropped)

    @classmethod
    def rows_at(cls, num_buckets: int) -> int:
        """The index at which the rows begin."""
        return cls.HEAD + num_buckets


@dataclass(frozen=True)
class StepTotals:
    """The totals of a step over all ranks: the same on every rank, and for every number of ranks
    that divides the number of leaves. `nats`, `live` and `bucket_ids` have one entry for each of the
    step's R rows."""

    digest: str  # 16 hex digits
    dry: bool  # a rank did not have all of its rows
    stop: bool  # a rank was asked to stop
    unsaved: bool  # the last save failed, and the run must end
    save: bool  # a save is due according to a rank's clock
    dropped: list[int]  # for each bucket, the number of lanes that have dropped it
    nats: list[float]  # the sum of each row's token losses
    live: list[int]  # the number of each row's live targets
    bucket_ids: list[int]  # the index of each row's bucket
    grad_norm: float = 0.0  # before clipping
    norm_limit: float = math.inf  # the largest norm that was applied; -1: none was
    can_spike: bool = False  # there were limits for spikes

    @classmethod
    def read(cls, values: list[float], num_buckets: int) -> "StepTotals":
        """The totals in a message from `add_up`, copied by `fetch`."""
        rows_at = StepMessage.rows_at(num_buckets)
        message = StepMessage.read(values[:rows_at])
        rows = values[rows_at:]
        return cls(
            digest=f"{message.digest:016x}",
            dry=message.dry > 0,
            stop=message.stop > 0,
            unsaved=message.unsaved > 0,
            save=message.save > 0,
            dropped=[*message.dropped],
            nats=rows[0::3],
            live=[int(live) for live in rows[1::3]],
            bucket_ids=[int(bucket) for bucket in rows[2::3]],
        )

    @property
    def outcome(self) -> Outcome:
        """What became of the step. The optimizer has made the same comparison on the device."""
        if self.dry:
            return Outcome.VOID
        if not any(self.live):
            return Outcome.EMPTY
        if math.isfinite(self.grad_norm) and self.grad_norm <= self.norm_limit:
            return Outcome.APPLIED
        return Outcome.SPIKE if self.can_spike else Outcome.VOID

    @property
    def loss(self) -> float:
        """Mean loss per live target, in nats; NaN if the step has no live target."""
        return self._mean(range(len(self.nats)))[0]

    def of_bucket(self, bucket: int) -> tuple[float, int]:
        """(mean loss per live target, number of live targets) of a bucket's rows."""
        return self._mean([row for row, number in enumerate(self.bucket_ids) if number == bucket])

    def _mean(self, rows: Sequence[int]) -> tuple[float, int]:
        live = sum(self.live[row] for row in rows)
        return math.fsum(self.nats[row] for row in rows) / live if live else math.nan, live


@dataclass
class Progress:
    """The progress of a run, as plain values. They are saved in trainer_state.json."""

    step: int = 0  # steps done
    tokens: int = 0  # tokens trained on, in all steps
    # running mean, weight 0.1 for the newest; not corrected for its start at 0
    smooth_loss: float = 0.0
    train_time_s: float = 0.0
    val_bpb: float | None = None
    first_val_bpb: float | None = None  # for those who read seals
    min_val_bpb: float | None = None
    # {bucket: number of lanes that have dropped it}
    dropped: dict[str, int] = field(default_factory=dict)
    # with --skip-spikes: recent applied steps, see spikes.py
    window: Window = field(default_factory=list)
    skipped: int = 0  # steps that were not applied: spikes, and steps without a live target
    skipped_in_a_row: int = 0  # spikes

    def count_step(self, totals: StepTotals, tokens: int, step_s: float) -> float:
        """Count a finished step. Returns the smoothed loss of the applied steps, NaN if there are
        none."""
        self.step += 1
        self.tokens += tokens
        self.train_time_s += step_s
        if totals.outcome is Outcome.APPLIED:
            self.smooth_loss = 0.9 * self.smooth_loss + 0.1 * totals.loss
        return self.corrected_loss

    @property
    def corrected_loss(self) -> float:
        """The smoothed loss of the applied steps, corrected for its start at 0; NaN if there are none."""
        num_applied = self.step - self.skipped
        return self.smooth_loss / (1 - 0.9**num_applied) if num_applied else math.nan

    def record_val(self, bpb: float) -> None:
        """Record a validation result in bits per byte."""
        self.val_bpb = bpb
        self.first_val_bpb = bpb if self.first_val_bpb is None else self.first_val_bpb
        self.min_val_bpb = min(bpb, bpb if self.min_val_bpb is None else self.min_val_bpb)


RECENT = 20  # steps from which the time of the next ones is estimated


def time_left(recent_s: Sequence[float], num_steps: int) -> float:
    """The seconds that `num_steps` steps will take, if each takes the median of these recent
    ones: a slow first step, which compiles, does not count."""
    return statistics.median(recent_s) * num_steps


# ---- what a run reports --------------------------------------------------------------------------


@dataclass(frozen=True)
class StepReport:
    """What the sinks of a journal receive after each step."""

    step: int  # its number: the first one is 0
    totals: StepTotals
    record: dict[str, Any]  # its line in the log: JSON
    line: str  # for people
    smooth_loss: float
    tokens: int  # trained on so far
    tokens_per_s: float
    eta_s: float
    skipped: int  # steps so far that were not applied
    phase: int | None  # of the curriculum


class Sink:
    """Receives the steps and events of a run. A sink has those of these methods that it needs.

    answer_s: how long a call of an optional sink, once open, may take before the run continues without
    it.
    """

    answer_s = 60.0

    @staticmethod
    def check() -> None:
        """ValueError if such a sink cannot work on this machine. Called before a run starts."""

    def event(self, name: str, step: int, record: dict[str, Any]) -> None:
        """An event after `step` steps. `record`: JSON."""

    def step(self, report: StepReport) -> None:
        """A step was taken."""

    def sync(self) -> None:
        """What was received survives power loss from now on. Another thread calls this, before a
        checkpoint appears, while steps may arrive."""

    def ending(self, reason: str) -> None:
        """The run ends after one more save."""

    def end(self, status: str, reason: str) -> None:
        """The run has ended: completed, stopped, halted or failed."""

    def close(self) -> None:
        """The last call, even after an error."""


class Mirror(Sink):
    """A copy of a run in another place, which also counts as an owner of the run. This one is that
    of a run without --mirror-to: it does nothing. nanochat/mirror.py has the other one.

    slowest_s: how long its slowest copy of a checkpoint took.
    """

    slowest_s = 0.0

    def lost(self) -> str:
        """'' while this launch owns the mirror, otherwise the error to exit with."""
        return ""

    def fetch(self) -> None:
        """Bring the run directory up to date, before a launch looks at it."""

    def news(self) -> list[tuple[str, dict[str, Any]]]:
        """(name, values) of the events since the last call, for the log."""
        return []

    def finish(self) -> None:
        """Copy what is left, within the time that is reserved for the last save."""

    def release(self) -> None:
        """Give up the mirror, when the launch ends."""
