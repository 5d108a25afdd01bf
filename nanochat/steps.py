"""
The plain values of training: the totals of a step, and the progress of a run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from nanochat.spikes import Window

# in a step's message: the position of the dry flag, and how many numbers precede the buckets
DRY = 4
FLAGS = 8


@dataclass(frozen=True)
class StepTotals:
    """The totals of a step over all ranks: the same on every rank, and for every number of ranks
    that divides the number of leaves. `nats`, `live` and `buckets` have one entry for each of the
    step's R rows."""

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
        counts = [int(value) for value in values[: FLAGS + num_buckets]]
        rows = values[FLAGS + num_buckets :]
        return cls(
            digest=f"{sum(part << 16 * i for i, part in enumerate(counts[:4])) % 2**64:016x}",
            dry=counts[DRY] > 0,
            stop=counts[5] > 0,
            unsaved=counts[6] > 0,
            save=counts[7] > 0,
            dropped=counts[FLAGS:],
            nats=rows[0::3],
            live=[int(live) for live in rows[1::3]],
            buckets=[int(bucket) for bucket in rows[2::3]],
        )

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


@dataclass
class Progress:
    """The progress of a run, as plain values. They are saved in trainer_state.json."""

    step: int = 0  # steps done
    tokens: int = 0  # tokens trained on, in all steps
    # running mean, weight 0.1 for the newest; not corrected for its start at 0
    smooth_loss: float = 0.0
    train_time_s: float = 0.0
    val_bpb: float | None = None
    first_val_bpb: float | None = None
    min_val_bpb: float | None = None
    # {bucket: number of lanes that have dropped it}
    dropped: dict[str, int] = field(default_factory=dict)
    # with --skip-spikes: recent applied steps, see spikes.py
    window: Window = field(default_factory=list)
    skipped: int = 0  # steps that were not applied, because they were spikes
    skipped_in_a_row: int = 0

    def count_step(self, totals: StepTotals, tokens: int, step_s: float) -> float:
        """Count a finished step. Returns the smoothed loss of the applied steps."""
        self.step += 1
        self.tokens += tokens
        self.train_time_s += step_s
        if not totals.spiked:
            self.smooth_loss = 0.9 * self.smooth_loss + 0.1 * totals.loss
        return self.smooth_loss / (1 - 0.9 ** (self.step - self.skipped))

    def record_val(self, bpb: float) -> None:
        """Record a validation result in bits per byte."""
        self.val_bpb = bpb
        self.first_val_bpb = bpb if self.first_val_bpb is None else self.first_val_bpb
        self.min_val_bpb = min(bpb, bpb if self.min_val_bpb is None else self.min_val_bpb)
