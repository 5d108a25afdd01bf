"""The curves of a run: what its log says, as named lists of numbers.

    line of a step     loss, lr, ...            a value per step, for the kept steps
                       loss/BUCKET              the same, smoothed
                       tokens/BUCKET            the mix: trained and planned shares, through one window
    event              val, core, ...           points, each at a number of steps done
    logs/rows          losses of rows           a band, from the 10th to the 90th percentile

Every number in the line of a step is a curve, and every number in an event a curve of points. A value
that you add to the log therefore needs no change here.

A long run has more steps than a page has room for. Of each block of steps, the one with the highest
loss is kept, so spikes stay visible:

    steps     . . . x . . . . | . . . . . . x .  |  x: highest loss of its block
    kept            x                     x

Windows are computed from all steps, and running means from all that were applied; only then are the
kept ones picked. The running means of a fork begin with the steps of its parent, so at the first step
of the fork both are equal.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nanochat.run_history import history_of
from nanochat.run_reader import ENDS, LogRecord, RunReader, flat_numbers

log = logging.getLogger(__name__)

SETTLED = 150  # number of steps after which a value has left a running mean: 0.9 ** 150 is 1e-7
BAND_POINTS = 500  # maximum number of steps for which the band of row losses is drawn
LOSS = "Loss, nats per token"
BPB = "Validation bits per byte"
BUCKETS = "Loss by bucket"
WAIT = "Data wait, ms per step"
# {number in a log line: (title of its chart, factor)}; any other number has a chart with its own
# name as the title
CHARTS = {
    "loss": (LOSS, 1),
    "smooth_loss": (LOSS, 1),
    "lr": ("Learning rate, relative to its peak", 1),
    "grad_norm": ("Gradient norm", 1),
    "tokens_per_s": ("Tokens/s", 1),
    "mfu": ("Model FLOPs utilization, %", 100),
    "wait_s": (WAIT, 1000),
    "peak_memory_bytes": ("Peak memory, GB", 1e-9),
}
# drawn as they are; a wait is rare, and a running mean would show it as a saw tooth of 20 steps
NOT_NOISY = ("loss", "smooth_loss", "lr", "wait_s", "peak_memory_bytes")
# numbers that are axes, not curves; events that become marks even if they have numbers
NOT_DRAWN = ("step", "time", "tokens", "step_s", "total_training_flops", "total_training_time")
MARKS = (
    *("saved", "save_failed", "mirrored", "mirror_failed", "dropped", "skipped", "started"),
    *("samples", "wandb", *ENDS),
)

Curve = dict[str, Any]  # made by `series`
Values = list[float | None]


def series(chart: str, name: str, y: list[Any], look: str = "line", bucket: str = "") -> Curve:
    """A curve for scripts/page.html.

    `look`: raw, smooth, line, points, plan, or edge and band, between which the area is filled.
    """
    return {"chart": chart, "name": name, "y": y, "look": look, "bucket": bucket}


def drawable(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a log record that are drawn as curves."""
    if record.get("event") in MARKS:
        return {}
    numbers = dict(flat_numbers(record))
    for name in NOT_DRAWN:
        numbers.pop(name, None)
    return numbers


# ---- curves with a value per step ---------------------------------------------------------------


def kept_steps(steps: Sequence[LogRecord], stride: int) -> list[int]:
    """Indices of the steps to draw.

    The one with the highest loss of each block of `stride`, and the last one.
    """
    if not steps:
        return []
    kept = {len(steps) - 1}
    losses = [step["loss"] or 0.0 for step in steps]
    for first in range(0, len(steps), stride):
        end = min(first + stride, len(steps))
        highest = max(range(first, end), key=losses.__getitem__)
        kept.add(highest)
    return sorted(kept)


def smooth(values: Sequence[float | None]) -> Values:
    """A running mean, computed like `smooth_loss`. None stays None, and does not count."""
    means: Values = []
    total = weight = 0.0
    for value in values:
        if value is None:
            means.append(None)
            continue
        total = 0.9 * total + 0.1 * value
        weight = 0.9 * weight + 0.1
        means.append(total / weight)
    return means


def steps_before(run: RunReader) -> list[LogRecord]:
    """The last `SETTLED` steps that the ancestors of a fork took and applied before it, ascending;
    fewer if some are not here any more."""
    before: list[LogRecord] = []
    end = run.first_step
    *ancestors, _ = history_of(run)
    for stretch in reversed(ancestors):
        if stretch.run is None or len(before) >= SETTLED:
            break
        try:
            steps = stretch.run.steps
        except ValueError as e:
            log.warning("%s: its averages begin anew: %s", run.name, e)
            break
        skipped = stretch.run.steps_not_applied
        taken = [step for step in steps if stretch.first <= step["step"] < end]
        taken = [step for step in taken if step["step"] not in skipped]
        before = [*taken, *before]
        end = stretch.first
    return before[-SETTLED:]


def names_in(steps: Sequence[LogRecord]) -> list[str]:
    """The names in the lines of steps, in the order of their first line."""
    layouts = dict.fromkeys(tuple(step) for step in steps)  # a million lines have a few
    names: dict[str, None] = {}
    for layout in layouts:
        names |= dict.fromkeys(layout)
    return [name for name in names if name not in NOT_DRAWN]


def number(value: object) -> float | None:
    """A value of the log that is a number, otherwise None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value


def step_series(run: RunReader, kept: Sequence[int], *, only_smoothed: bool) -> Iterator[Curve]:
    """Curves of the numbers in the lines of steps, with a value per kept step.

    `only_smoothed`: running means instead of noisy values.
    """
    steps = run.steps
    before = steps_before(run)
    skipped = run.steps_not_applied
    applied: list[Mapping[str, Any]] = [{} if s["step"] in skipped else s for s in steps]
    for name in names_in(steps):
        group, _, bucket = name.partition("/")
        of_bucket = group == "loss" and bool(bucket)
        is_drawn = group != "tokens" and any(number(step.get(name)) for step in steps)
        if not is_drawn or (only_smoothed and name == "loss"):
            continue

        is_noisy = name not in NOT_NOISY
        if of_bucket or (only_smoothed and is_noisy):
            means = smooth([number(step.get(name)) for step in (*before, *applied)])
            values = [means[len(before) + i] for i in kept]
            look = "smooth"
        else:
            values = [number(steps[i].get(name)) for i in kept]
            look = {"loss": "raw", "smooth_loss": "smooth"}.get(name, "line")

        if of_bucket:
            yield series(BUCKETS, bucket, values, look, bucket)
            continue
        title, factor = CHARTS.get(name, (name, 1))
        scaled = [None if value is None else factor * value for value in values]
        label = "smoothed" if name == "smooth_loss" else name
        yield series(title, label, scaled, look)


# ---- the mix ------------------------------------------------------------------------------------


def tokens_by_bucket(steps: Sequence[LogRecord]) -> tuple[list[str], np.ndarray]:
    """The buckets, and how many tokens of each a step trained on: (steps, buckets) float64.

    No buckets for a run that has only one.
    """
    columns = sorted(name for name in names_in(steps) if name.startswith("tokens/"))
    counts = np.zeros((len(steps), len(columns)))
    for i, step in enumerate(steps):
        counts[i] = [step.get(name) or 0 for name in columns]
    return [name.removeprefix("tokens/") for name in columns], counts


def in_windows(counts: np.ndarray) -> np.ndarray:
    """The sums of (steps, ...) float64 over the window that ends at each step.

    A window has a fiftieth of all steps, at least 20.
    """
    window = max(20, len(counts) // 50)
    sums = counts.cumsum(axis=0)
    sums[window:] -= sums[:-window].copy()
    return sums


def planned_tokens(run: RunReader, buckets: Sequence[str], totals: np.ndarray) -> np.ndarray:
    """How many tokens of each bucket the phase of a step asks for: (steps, buckets) float64.

    A mix is of rows, but only tokens with loss are logged, so each bucket's are scaled.
    `totals`: how many tokens each step trained on.
    """
    shares = np.zeros((len(run.phases), len(buckets)))
    with_loss = run.shares_with_loss
    for phase, of_phase in zip(run.phases, shares):
        asked = phase["asked"]
        tokens = [asked.get(bucket, 0) * with_loss.get(bucket, 1.0) for bucket in buckets]
        of_phase[:] = np.array(tokens) / max(1, sum(tokens))

    begins = [phase["first_step"] for phase in run.phases]
    steps = [step["step"] for step in run.steps]
    phases = np.searchsorted(begins, steps, side="right") - 1
    return shares[np.maximum(phases, 0)] * totals[:, None]


def mix_series(run: RunReader, kept: Sequence[int], chart: str) -> Iterator[Curve]:
    """The shares of the buckets, as trained and as planned, at each kept step.

    Both are shares of the tokens in one window, so the lines meet where the run follows its plan.
    """
    buckets, counts = tokens_by_bucket(run.steps)
    if not counts.size:
        return
    totals = counts.sum(axis=1)
    in_window = np.maximum(in_windows(totals), 1)[kept, None]
    trained = in_windows(counts)[kept] / in_window
    planned = None
    if run.phases:
        planned = in_windows(planned_tokens(run, buckets, totals))[kept] / in_window
    for i, bucket in enumerate(buckets):
        yield series(chart, bucket, trained[:, i].tolist(), bucket=bucket)
        if planned is not None:
            name = f"{bucket}, planned"
            yield series(chart, name, planned[:, i].tolist(), "plan", bucket)


# ---- curves of points ---------------------------------------------------------------------------


def point_series(run: RunReader) -> Iterator[Curve]:
    """Curves of the numbers in events, mainly validation results.

    `steps`: the steps done at each point.
    """
    curves: dict[str, dict[int, float]] = {}
    for event in run.events:
        for name, value in drawable(event).items():
            points = curves.setdefault(name, {})
            points[event["step"]] = value
    val_buckets = run.manifests.get("val", {})
    validation = BPB if "bpb" in curves else "Validation loss, nats per token"
    for name, points in curves.items():
        group, _, part = name.partition("/")
        if group == "buckets" and len(val_buckets) < 2:  # a single bucket repeats the total
            continue
        chart = validation if group in ("bpb", "loss", "buckets") else group
        curve = series(chart, part or name, [*points.values()], "points", part)
        curve["steps"] = [*points]
        yield curve


def row_tenths(run: RunReader, step: int) -> tuple[float, float] | None:
    """The 10th and 90th percentile of the row losses of a step, in nats per token.

    None without finite ones. FileNotFoundError if the step has none.
    """
    nats, live = run.row_losses.read(step)
    trained = live > 0
    if not trained.any():
        return None
    losses = nats[trained] / live[trained]
    low, high = np.quantile(losses, [0.1, 0.9])
    if not np.isfinite([low, high]).all():
        return None
    return float(low), float(high)


def band_series(run: RunReader) -> Iterator[Curve]:
    """The 10th and 90th percentile of the row losses of at most BAND_POINTS `steps`.

    Nothing if none are recorded.
    """
    if not (run.run_dir / "logs" / "rows").is_dir():
        return
    lows: dict[int, float] = {}
    highs: dict[int, float] = {}
    stride = max(1, -(-len(run.steps) // BAND_POINTS))
    for record in run.steps[::stride]:
        step = record["step"]
        try:
            tenths = row_tenths(run, step)
        except FileNotFoundError:
            continue
        if tenths is not None:
            lows[step], highs[step] = tenths
    if lows:
        edge = series(LOSS, "10 % of rows", [*lows.values()], "edge")
        band = series(LOSS, "10 to 90 % of rows", [*highs.values()], "band")
        yield edge | {"steps": [*lows]}
        yield band | {"steps": [*highs]}
