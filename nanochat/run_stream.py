"""
The stream of a run, entered at any step: what the command line of the run, its data and its saves
say about step N.

    saved cursors:   0 . . . . . . 1000 . . . . . . 2000
    step 1234:                     restore 1000, pack 234 steps, and the next one is it

Nothing is trained: `Opened.stream_at` packs rows as the run did, so any step of a long run takes
seconds. The digest of each step that the run has taken is compared with its log: if code or data has
changed since, there is an error instead of the wrong documents. A receipt and plain flags of a run
that does not exist can be opened, too (scripts/inspect_data.py).
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nanochat.dataloader import StepLayout
from nanochat.pins import is_prepared
from nanochat.rows import Row
from nanochat.run_reader import RunReader
from nanochat.sources import Place, RunData
from nanochat.start_run import open_run
from nanochat.stream import AnyStream, Cursor, LaneState, Stream, open_stream
from nanochat.text import PLAIN_TEXT, text_suffix

log = logging.getLogger(__name__)

WORDS = 60  # characters shown from the beginning of a document
MovedTo = tuple[str | None, str | None]  # where --data-path and --val-path are now
NOT_MOVED: MovedTo = (None, None)  # both are where the run read them


@dataclass(frozen=True)
class Opened:
    """The stream of a run, of a receipt or of flags; for the last two, `run` has no directory.
    `begin`: the cursors of the first step, unless the run starts at the beginning of the data.
    `horizon`: the number of steps after which the run ends, None if its steps are known."""

    run: RunReader
    data: RunData
    config: Any
    rows_per_step: int
    begin: list[Cursor] | None = None
    first_step: int = 0  # of the run; a fork has those before it in its parent
    moved_to: MovedTo = NOT_MOVED
    horizon: int | None = None
    may_drop: bool = True  # False: the run halts where a lane's bucket has run dry

    @property
    def rows_per_lane(self) -> int:
        return self.rows_per_step // self.config.V

    @property
    def has_lines(self) -> bool:
        """Whether documents come from lines of files that were prepared (nanochat/prepare.py)."""
        manifests = self.data.manifests["train"].values()
        return any(is_prepared(entry) for manifest in manifests for entry in manifest["files"])

    def pack(self, stream: AnyStream, step: int) -> list[Row]:
        """The rows of a step, from a stream that stands before it. ValueError if there are too few."""
        rows = stream.next_rows(self.rows_per_lane)
        if len(rows) < self.rows_per_step:
            raise ValueError(f"step {step}: the data runs out before this step")
        return rows

    def take(self, stream: AnyStream, step: int) -> list[Row]:
        """`pack`. ValueError if these are not the rows that the run trained on."""
        rows = self.pack(stream, step)
        digest = f"{sum(row.digest(i) for i, row in enumerate(rows)) % 2**64:016x}"
        logged = self.run.digests.get(step, digest)
        if logged != digest:
            raise ValueError(
                f"{self.run.run_dir}: packed again, step {step} has rows with digest {digest}, but the run trained "
                f"on {logged}: the code or the data has changed since then, so the answer would be wrong; use the "
                f"code and the data of the run (inspect_data digest shows which steps differ)"
            )
        return rows

    def check_from(self, step: int) -> None:
        """ValueError if a trained step, packed again from the nearest save before it, would have
        other rows than the run trained on. Only the first step after that save is packed."""
        saved = self.run.nearest_cursors(step)
        first = saved[0] if saved else self.first_step
        with self.stream_at(first) as stream:
            self.take(stream, first)

    @contextmanager
    def stream_at(self, step: int, *, checked: bool = True) -> Iterator[Any]:
        """The stream of all lanes after `step` steps. A ValueError, even one raised while the
        caller reads, names the saved cursors that packing began with, because they may be
        damaged. Warns at the end if the run halts before it can take the steps that were read.
        `checked`: see `take`."""
        if step < self.first_step:
            raise ValueError(
                f"step {step}: {self.run.name} begins with step {self.first_step}; ask the run that it continues"
            )
        saved = self.run.nearest_cursors(step)
        done, cursors = saved or (self.first_step, self.begin)
        lanes = range(self.config.V)
        fingerprint = self.data.tokenizer.fingerprint
        try:
            with closing(
                open_stream(
                    self.config,
                    self.data.train,
                    lanes,
                    cursors=cursors,
                    tokenizer=fingerprint,
                    drop_dry=True,
                )
            ) as stream:
                pack = self.take if checked else self.pack
                for at in tqdm(
                    range(done, step), desc=f"packing from step {done}", unit="step", disable=None
                ):
                    pack(stream, at)
                yield stream
                if not self.may_drop:
                    self._warn_dry(stream.state(), cursors)
        except ValueError as e:
            if not saved:
                raise ValueError(str(e)) from None
            raise ValueError(f"{e} (packed from {self.run.cursor_files[done]})") from None

    def _warn_dry(self, lanes: Sequence[LaneState], cursors: Sequence[Cursor] | None) -> None:
        """Warn if lanes dropped a bucket after these cursors, in steps that were not trained."""
        step = max(lane.num_rows for lane in lanes) // self.rows_per_lane - 1
        if step in self.run.digests or (self.horizon is not None and step >= self.horizon):
            return
        before = {cursor["lane"]: {*cursor["dropped"]} for cursor in cursors or ()}
        dry = {bucket for lane in lanes for bucket in lane.dropped - before.get(lane.lane, set())}
        if dry:
            log.warning(
                "%s runs dry in a lane at step %s or before; the run halts there without "
                "--allow-bucket-exhaustion, and what is shown is with it",
                " and ".join(f"bucket {bucket!r}" for bucket in sorted(dry)),
                f"{step:,}",
            )


def open_stream_of(run_dir: Path, moved_to: MovedTo = NOT_MOVED) -> Opened:
    """The stream of a run. ValueError or FileNotFoundError if its data has changed or is missing, or if
    it has taken no step."""
    run = RunReader(run_dir)
    run.check_trained()
    data, config, settings = open_run(run_dir, *moved_to)
    return Opened(
        run,
        data,
        config,
        rows_per_step=settings.total_batch_size // config.T,
        first_step=run.first_step,
        moved_to=moved_to,
        horizon=run.horizon,
        may_drop=settings.allow_bucket_exhaustion,
    )


def step_digests(opened: Opened, steps: range, W: int) -> Iterator[tuple[int, list[int]]]:
    """(step, [each rank's part of its digest]) for W ranks. ValueError if the data ends before the
    last step."""
    rank_of: dict[int, int] = {}  # by lane
    for rank in range(W):
        layout = StepLayout(opened.config.V, opened.rows_per_step, 1, rank, W)
        rank_of |= dict.fromkeys(layout.lanes, rank)
    with opened.stream_at(steps.start, checked=False) as stream:
        for step in steps:
            rows = opened.pack(stream, step)
            parts = [0] * W
            for i, row in enumerate(rows):
                parts[rank_of[row.lane]] += row.digest(i)
            yield step, [part % 2**64 for part in parts]


def places_in(opened: Opened, stream: AnyStream, row: Row) -> list[dict[str, Any]]:
    """The documents of a row. Tokens `start` to `stop` - 1 of a document, which has `of` tokens and
    BOS as token 0, are in the row from position `at` on. `tokens` also counts the BOS that is put
    in front of a continuation."""
    if not isinstance(stream, Stream):  # an order of samples
        return stream.describe(row)  # type: ignore[attr-defined]
    source = opened.data.train[row.bucket]
    is_bestfit = opened.config.layout == "bestfit"
    at = 0
    documents = []
    for (epoch, group, number), start, length, _ in row.placed:
        name, local = source.locate(group)
        [document] = source.read(group, np.array([number]))
        earlier_groups = source.groups[group - local : group]  # of the same file
        inserted = 1 if is_bestfit and start > 0 else 0
        off = 0
        if row.live is not None:
            live = row.live[at : at + length]
            off = int((live == 0).sum())
        place = {
            "at": at,
            "tokens": length,
            "off": off,
            "file": name,
            "group": local,
            "document": int(earlier_groups.sum()) + number,
            "document_in_group": number,
            "epoch": epoch,
            "start": start,
            "stop": start + length - inserted,
            "of": len(document.ids),
        }
        if opened.has_lines:
            origin = source.origin_of(group, number)
            before = opened.data.tokenizer.decode(document.ids[:start].tolist())
            place["line"] = origin and line_after(origin, before)
        documents.append(place)
        at += length
    return documents


def line_after(document: Place, before: str) -> int:
    """The line of the user's own file, from 1, that follows the first characters of a document."""
    if text_suffix(document.file) in PLAIN_TEXT:  # the document is many lines of it
        return document.line + before.count("\n")
    return document.line


def row_means(run: RunReader, step: int) -> list[float | None]:
    """The mean loss over the live targets of each row of a step; None for a row without live
    targets. FileNotFoundError if the run recorded no row losses, ValueError if the record is
    corrupt."""
    means = []
    for total, targets in zip(*run.row_losses.read(step)):
        means.append(float(total / targets) if targets else None)
    return means


def recorded_losses(run: RunReader, step: int) -> list[float | None] | None:
    """The losses of a step's rows, None if they were not recorded, or are corrupt."""
    try:
        return row_means(run, step)
    except FileNotFoundError:
        return None
    except ValueError as e:
        log.warning("%s", e)
        return None


def ids_of(row: Row, place: Mapping[str, Any]) -> np.ndarray:
    """The ids of a row that belong to one of its documents, given as in `describe`."""
    begin = place["at"]
    return row.tokens[begin : begin + place["tokens"]]


def first_words(opened: Opened, ids: np.ndarray) -> str:
    """The beginning of a document, on one line."""
    tokenizer = opened.data.tokenizer
    first = ids[:WORDS]
    without_bos = first[first != tokenizer.get_bos_token_id()]
    words = tokenizer.decode(without_bos.tolist()).split()
    return " ".join(words)[:WORDS]
