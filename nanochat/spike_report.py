"""The spikes of a run, and the rows behind them.

    loss of a step            more than OUTLIER robust deviations above the steps before it: a spike
    loss of a row of it       the same, above the rows of its bucket in the AROUND steps before: an outlier

Any finished or running run can be asked, whatever its --skip-spikes, which decides while it trains
(nanochat/spikes.py). Rows need the losses of rows (RUN/logs/rows) and the run's data.
"""

import json
import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from nanochat.common import counted, show, table
from nanochat.rows import Row
from nanochat.run_dir import finite
from nanochat.run_stream import Opened, first_words, ids_of, places_in, row_means
from nanochat.spikes import ENOUGH, NORMAL, WINDOW
from nanochat.stream import AnyStream

log = logging.getLogger(__name__)

JUDGED = ("loss", "grad_norm")  # the numbers of a step in which spikes are looked for
OUTLIER = 4  # robust deviations above the preceding steps
AROUND = 8  # steps before a spike that define the usual loss of a bucket
WORST = 3  # rows shown per spike, and documents shown per row
# if a larger share of a step's rows stands out, the weights may be the cause, and not these rows
NEARLY_ALL = 0.9


def center_and_unit(values: np.ndarray) -> tuple[float, float]:
    """The median of (n,) values, and their robust deviation, which is never 0."""
    median = float(np.median(values))
    deviation = NORMAL * float(np.median(np.abs(values - median)))
    return median, max(deviation, 1e-6 * abs(median), 1e-12)


def deviations(values: np.ndarray) -> np.ndarray:
    """How many robust deviations each value lies above the median of the WINDOW values before it.
    NaN counts as infinitely high, and later medians ignore it. 0 if fewer than ENOUGH earlier
    values are finite."""
    scores = np.zeros(len(values))
    for i in range(ENOUGH, len(values)):
        before = values[max(0, i - WINDOW) : i]
        window = before[np.isfinite(before)]
        if len(window) < ENOUGH:
            continue
        median, unit = center_and_unit(window)
        above = (values[i] - median) / unit
        scores[i] = above if np.isfinite(above) else math.inf
    return scores


class SpikeRows(NamedTuple):
    """The rows of a step, compared with the usual losses of their buckets."""

    judged: int  # rows with a loss
    outliers: int  # those at least OUTLIER robust deviations above their bucket's median
    worst: list[dict[str, Any]]  # the WORST rows, furthest above first


def compare_rows(opened: Opened, step: int) -> SpikeRows:
    """The rows of a step, compared with those of their buckets in the AROUND + 1 steps up to it."""
    usual: dict[str, list[float]] = {}
    first = max(
        opened.first_step, step - AROUND
    )  # the steps from here on define the usual loss of each bucket
    with opened.stream_at(first) as stream:
        for at in range(first, step + 1):
            rows = opened.take(stream, at)
            losses = row_means(opened.run, at)
            for row, loss in zip(rows, losses):
                if loss is not None and math.isfinite(loss):
                    usual.setdefault(row.bucket, []).append(loss)

        found: list[dict[str, Any]] = []
        outliers = 0
        for number, (row, loss) in enumerate(zip(rows, losses)):
            if loss is None:
                continue
            median, unit = center_and_unit(np.array(usual.get(row.bucket, [0.0])))
            above = loss - median
            if not math.isfinite(above):
                above = math.inf
            outliers += above >= OUTLIER * unit
            line: dict[str, Any] = {
                "row": number,
                "lane": row.lane,
                "bucket": row.bucket,
                "loss": loss,
                "above": above,
            }
            found.append(line)
        found.sort(key=lambda line: -line["above"])

        worst = found[:WORST]
        for line in worst:
            row = rows[line["row"]]
            line["documents"] = documents_of(opened, stream, row)
    return SpikeRows(len(found), outliers, worst)


def documents_of(opened: Opened, stream: AnyStream, row: Row) -> list[dict[str, Any]]:
    """The documents of a row, each with its first words in the row."""
    documents = []
    for place in places_in(opened, stream, row):
        document = {
            "document": f"{place['file']}:{place['document']}",
            "start": place["start"],
            "stop": place["stop"],
            "text": first_words(opened, ids_of(row, place)),
        }
        documents.append(document)
    return documents


def print_judged(num_steps: int, num_spikes: int) -> None:
    """Print how many steps stand out, and how steps are compared."""
    print(
        f"{num_spikes} of {counted(num_steps, 'step')} listed: loss or gradient norm at least {OUTLIER} robust "
        f"deviations above the median of the {ENOUGH} to {WINDOW} steps before; the first {ENOUGH} are not judged"
    )


def print_spikes(opened: Opened, top: int, *, as_json: bool) -> None:
    """Print at most `top` steps whose loss or gradient norm is an outlier, the furthest above first,
    and the rows behind them."""
    empty = opened.run.steps_without_targets
    steps = [step for step in opened.run.steps if step["step"] not in empty]
    scores: dict[str, np.ndarray] = {}
    for name in JUDGED:
        values = np.array([step.get(name) for step in steps], float)  # NaN for None
        scores[name] = deviations(values)
    height = np.maximum(scores["loss"], scores["grad_norm"])
    highest = np.argsort(-height, kind="stable")[:top].tolist()
    spikes = [i for i in highest if height[i] >= OUTLIER]
    if not as_json:
        print_judged(len(steps), len(spikes))
    recorded = True
    for i in spikes:
        step = steps[i]["step"]
        rows = SpikeRows(0, 0, [])
        if recorded:
            try:
                rows = compare_rows(opened, step)
            except FileNotFoundError as e:
                log.warning("%s; spikes are shown without their rows", e)
                recorded = False
        line = {"step": step}
        for name in JUDGED:
            line[name] = steps[i].get(name)
        for name in JUDGED:
            line[f"{name}_deviations"] = float(scores[name][i])
        if as_json:
            line |= {"judged": rows.judged, "outliers": rows.outliers, "rows": rows.worst}
            print(json.dumps(finite(line), allow_nan=False))
        else:
            print_spike(line, rows, opened.run.name)


def print_spike(line: Mapping[str, Any], rows: SpikeRows, run: str) -> None:
    """Print a spike of a run, and a table of its rows."""
    parts = []
    for name in JUDGED:
        height = line[f"{name}_deviations"]
        where = "below" if height < 0 else "above"
        parts.append(
            f"{name} {show(line[name])} ({abs(height):.1f} deviations {where} earlier steps)"
        )
    print(f"step {line['step']:,}: {', '.join(parts)}")
    if rows.outliers:
        print(blame(rows, f"{run}@{line['step']}"))
    cells = []
    for row in rows.worst:
        documents = row["documents"]
        shown = [f"{document['document']} {document['text']}" for document in documents[:WORST]]
        if len(documents) > WORST:
            shown.append(f"{len(documents) - WORST} more")
        cells.append(
            [row["row"], row["lane"], row["bucket"], row["loss"], row["above"], "; ".join(shown)]
        )
    if cells:
        print(
            *table(["row", "lane", "bucket", "loss", "above median", "documents"], cells), sep="\n"
        )


def blame(rows: SpikeRows, place: str) -> str:
    """How many rows of a step RUN@STEP stand out, and what may follow if nearly all do."""
    line = f"rows at least {OUTLIER} robust deviations above their bucket's median: {rows.outliers} of {rows.judged}"
    if rows.judged > 1 and rows.outliers > NEARLY_ALL * rows.judged:
        line += (
            f"; either they are alike, as with one lane, or an earlier update damaged the weights: "
            f"base_eval {place} --eval=bpb shows which"
        )
    return line
