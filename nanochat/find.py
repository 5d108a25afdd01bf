"""
From a document to the rows that contain it.

    web/0007.parquet:41  --order-->  in epoch 0 lane 17 reads it at place 8,312 of its bucket's sequence
                         --kept cursors (bisection)-->  read between the saves of step 1000 and step 1250
                         --lane 17 alone, packed again from step 1000-->  step 1180, row 139: tokens 0 to 2,048

The order gives the lane that reads a document in an epoch. The cursors of the run's saves show
between which two saves the lane read it. So only that lane is packed again, from the earlier save
until no token of the document is pending. The cost does not depend on the length of the run, and
training records only the cursors of its saves.

In an order of samples, the data is not divided into shares for lanes. There, the stream's
`samples_with` inverts the tables that list the documents of each sample.

A document has the name FILE:DOC, where DOC is its number, from 0, among the documents that are read
from the file. In pretokenized files, each entry is a document.
"""

import itertools
import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from tqdm import tqdm

from nanochat.cli import did_you_mean
from nanochat.common import AnyPath, counted, few, is_remote
from nanochat.order import Order, StreamConfig, open_order
from nanochat.pins import place_of
from nanochat.rows import Row
from nanochat.sources import Source
from nanochat.stream import AnyStreamConfig, Cursor, DocumentKey, Stream

log = logging.getLogger(__name__)


class Piece(Protocol):
    """Ids `start` to `stop` - 1 of a document in a sample of a run."""

    epoch: int
    sample: int
    start: int
    stop: int


class SampleFinder(Protocol):
    """What a stream of samples tells about a document.

    That order documents the methods.
    """

    @property
    def config(self) -> AnyStreamConfig: ...
    def document_length(self, bucket: str, document: int) -> int: ...
    def samples_with(self, bucket: str, document: int) -> Sequence[Piece]: ...


class DocumentPlace(NamedTuple):
    """Where a document is in its source."""

    bucket: str
    name: str  # FILE:DOC
    number_in_file: int  # DOC
    group: int  # counted over all files of the source
    number: int  # in the group, from 0


class Use(NamedTuple):
    """Tokens `start` to `stop` - 1 of a document in a row of a completed step.

    Token 0 is its BOS.
    """

    epoch: int
    step: int
    row: int  # of the step
    lane: int
    start: int
    stop: int
    off: int = 0  # how many of the first of them have no loss there: an earlier row has them, too


@dataclass(frozen=True)
class Pass:
    """The uses of a document in one epoch."""

    epoch: int
    lane: int | None  # the lane that reads it in this epoch; None in an order of samples
    uses: list[Use]
    length: int  # tokens of the document, BOS included; 0 if it has not been read
    pending: bool = False  # whether the lane has read it, and will use more of its tokens
    expected: float | None = None  # the approximate step of its next use; infinite: not in this run

    @property
    def cropped_after(self) -> int | None:
        """The number of its tokens that are in rows, if the others were cropped; otherwise None."""
        stop = max((use.stop for use in self.uses), default=0)
        done = not self.pending and self.expected is None
        return stop if done and 0 < stop < self.length else None


@dataclass(frozen=True)
class History:
    """A run with --order=lanes: everything that fixes its rows, and its kept cursors."""

    config: StreamConfig
    sources: Mapping[str, Source]
    tokenizer: str  # fingerprint
    rows_per_lane: int  # in each step
    saves: Sequence[int]  # the first step and those of the kept cursors, ascending
    # (step, cursors) of the newest readable save at or before a step; None: the beginning of the
    # data
    nearest_cursors: Callable[[int], tuple[int, Sequence[Cursor] | None]]
    trained: int  # number of completed steps
    horizon: int  # number of steps of the whole run

    def passes(self, document: DocumentPlace) -> Iterator[Pass]:
        """The uses of a document, epoch by epoch.

        Of several epochs that lie ahead, only the first is returned.
        """
        bucket = document.bucket
        curriculum = self.config.curriculum
        if curriculum is not None and bucket not in curriculum.buckets:
            return
        source = self.sources[bucket]
        order = open_order(source, bucket=bucket, config=self.config)
        max_epochs = self.config.epochs(bucket)
        epochs = itertools.count() if max_epochs == 0 else range(max_epochs)
        is_ahead = False
        for epoch in epochs:
            of_epoch = self._pass(document, epoch, order)
            if is_ahead and of_epoch.expected is not None:
                return
            yield of_epoch
            is_ahead = of_epoch.expected is not None

    def _pass(self, document: DocumentPlace, epoch: int, order: Order) -> Pass:
        """The uses of a document in one epoch.

        Packs its lane again from the last save before the lane read it.
        """
        lane, place = order.lane_and_place(epoch, document.group, document.number)
        beginning = 0, order.share(lane, 0).start

        # the last save at which the lane had not yet passed the document's place
        def has_passed(step: int) -> bool:
            _, cursors = self.nearest_cursors(step)
            return _positions(cursors).get((lane, document.bucket), beginning) > (epoch, place)

        behind = bisect_left(self.saves, True, key=has_passed)
        step, stream = self._open([lane], self.saves[max(0, behind - 1)])
        with closing(stream):
            feed = stream.feeds[document.bucket][lane]
            key = DocumentKey(epoch, document.group, document.number)
            uses = self._uses(stream, document.bucket, key, place, step)
            if (feed.epoch, feed.place) > (epoch, place):
                numbers = np.array([document.number])
                [content] = self.sources[document.bucket].read(document.group, numbers)
                return Pass(epoch, lane, uses, len(content.ids), pending=key in feed.packer)

            # the lane has not read it yet: this many documents come before it, and it itself
            read = total_read(order, lane, feed.epoch, feed.place)
            first = total_read(order, lane, epoch, place) - read
            expected = self._expected(stream, document.bucket, first)
            return Pass(epoch, lane, uses, 0, expected=expected)

    def _open(self, lanes: Sequence[int], step: int) -> tuple[int, Stream]:
        """(step of the newest save at or before a step, the stream of some lanes from there on)."""
        saved, cursors = self.nearest_cursors(step)
        mine = None
        if cursors is not None:
            mine = [cursor for cursor in cursors if cursor["lane"] in lanes]
        stream = Stream(
            self.config, self.sources, lanes, tokenizer=self.tokenizer, cursors=mine, drop_dry=True
        )
        return saved, stream

    def _uses(
        self, stream: Stream, bucket: str, key: DocumentKey, place: int, step: int
    ) -> list[Use]:
        """The uses of a document from `step` on.

        The stream's only lane stands before the document's place in its epoch. It is packed until
        no token of the document is pending, or to the last completed step.
        """
        [lane] = stream.lanes
        feed = stream.feeds[bucket][lane]
        uses = []
        while step < self.trained:
            has_read_it = (feed.epoch, feed.place) > (key.epoch, place)
            if has_read_it and key not in feed.packer:
                break
            rows = stream.next_rows(self.rows_per_lane)
            for number, row in enumerate(rows, lane * self.rows_per_lane):
                for placed, use in self._uses_in(row, step, number):
                    if placed == key and row.bucket == bucket:
                        uses.append(use)
            step += 1
            if len(rows) < self.rows_per_lane:
                break
        return uses

    def _uses_in(self, row: Row, step: int, number: int) -> Iterator[tuple[DocumentKey, Use]]:
        """The documents of row `number` of a step, each with its use."""
        has_tail_bos = self.config.layout == "bestfit"  # a tail begins with a BOS of its own
        at = 0
        for placed, start, length, repeated in row.placed:
            key = DocumentKey(*placed)
            num_bos = 1 if start > 0 and has_tail_bos else 0
            stop = start + length - num_bos
            off = repeated
            if row.live is not None:
                live = row.live[at + num_bos : at + length]
                off = int(np.argmax(live)) if live.any() else repeated  # else it is masked
            at += length
            yield key, Use(key.epoch, step, number, row.lane, start, stop, off)

    def uses_of(self, documents: Sequence[DocumentPlace]) -> dict[DocumentPlace, list[Use]]:
        """The uses of many documents in completed steps, with a progress bar.

        The saves show which lanes used some of the documents between two saves. Each of these lanes
        is packed again, once for all documents.
        """
        uses: dict[DocumentPlace, list[Use]] = {document: [] for document in documents}
        if not documents:
            return uses
        wanted = {(place.bucket, place.group, place.number): place for place in documents}
        reads = self._reads(documents)
        begins = sorted({self.nearest_cursors(step)[0] for step in self.saves})
        spans = [*itertools.pairwise([step for step in begins if step < self.trained])]
        if begins[0] < self.trained:
            spans.append((max(step for step in begins if step < self.trained), self.trained))
        for begin, end in tqdm(spans, desc="packing again", unit="save", disable=None):
            lanes = self._lanes_using(wanted, reads, begin, end)
            for row, step, number in self._rows_between(lanes, begin, end):
                for key, use in self._uses_in(row, step, number):
                    document = wanted.get((row.bucket, key.group, key.number))
                    if document is not None:
                        uses[document].append(use)
        return uses

    def _reads(
        self, documents: Sequence[DocumentPlace]
    ) -> dict[tuple[int, str], list[tuple[int, int]]]:
        """{(lane, bucket): (epoch, place) of each read of one of the documents, ascending}, in the
        epochs that the newest save has reached."""
        _, cursors = self.nearest_cursors(self.trained)
        reads: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for bucket in {document.bucket for document in documents}:
            reached = [epoch for (_, of), (epoch, _) in _positions(cursors).items() if of == bucket]
            if not reached:
                continue
            order = open_order(self.sources[bucket], bucket=bucket, config=self.config)
            of_bucket = [document for document in documents if document.bucket == bucket]
            for epoch in range(max(reached) + 1):
                for document in of_bucket:
                    lane, place = order.lane_and_place(epoch, document.group, document.number)
                    reads.setdefault((lane, bucket), []).append((epoch, place))
        return {key: sorted(places) for key, places in reads.items()}

    def _lanes_using(
        self,
        wanted: Container[tuple[str, int, int]],
        reads: Mapping[tuple[int, str], Sequence[tuple[int, int]]],
        begin: int,
        end: int,
    ) -> list[int]:
        """The lanes that may use a wanted document (bucket, group, number) from a save at step `begin`
        up to step `end`; all of them, if there is no save at `end`."""
        saved, later = self.nearest_cursors(end)
        if saved != end:
            return list(range(self.config.V))
        _, cursors = self.nearest_cursors(begin)
        lanes = set()
        for cursor in cursors or ():
            for bucket, feed in cursor["buckets"].items():
                pending = [(bucket, group, number) for _, group, number, *_ in feed["waiting"]]
                if any(document in wanted for document in pending):
                    lanes.add(cursor["lane"])
        first = _positions(cursors)
        last = _positions(later)
        for key, places in reads.items():
            num_before = bisect_left(places, first.get(key, (0, -1)))
            if num_before < bisect_left(places, last.get(key, (math.inf, 0))):
                lanes.add(key[0])
        return sorted(lanes)

    def _rows_between(
        self, lanes: Sequence[int], begin: int, end: int
    ) -> Iterator[tuple[Row, int, int]]:
        """(row, step, its number in the step) of some lanes, from a save at step `begin` up to step
        `end`."""
        if not lanes:
            return
        _, stream = self._open(lanes, begin)
        with closing(stream):
            for step in range(begin, end):
                of_lane = itertools.groupby(stream.next_rows(self.rows_per_lane), lane_of)
                for lane, rows in of_lane:
                    for number, row in enumerate(rows, lane * self.rows_per_lane):
                        yield row, step, number

    def _expected(self, stream: Stream, bucket: str, first: int) -> float:
        """The approximate step at which a stream's only lane will have used a bucket's documents.

        Counted are the pending ones and the next `first` ones, if rows hold as many documents as
        before. The curriculum decides the bucket of each row.
        """
        [lane] = stream.lanes
        feed = stream.feeds[bucket][lane]
        pending = len(feed.packer.waiting())
        used_up = feed.num_documents - pending
        if used_up <= 0:
            return math.inf
        due = (pending + first) * feed.packer.num_rows / used_up  # rows of the bucket
        row = stream.num_rows[lane]
        while due > 0 and row < self.horizon * self.rows_per_lane:
            if stream.bucket_of(lane, row) == bucket:
                due -= 1
            row += 1
        return math.inf if due > 0 else row / self.rows_per_lane


def lane_of(row: Row) -> int:
    """The lane of a row."""
    return row.lane


def _positions(cursors: Sequence[Cursor] | None) -> dict[tuple[int, str], tuple[int, int]]:
    """{(lane, bucket): (epoch, place) that the lane had reached}. Empty at the beginning of the
    data."""
    positions = {}
    for cursor in cursors or ():
        for bucket, feed in cursor["buckets"].items():
            positions[cursor["lane"], bucket] = feed["epoch"], feed["place"]
    return positions


def sample_passes(
    stream: SampleFinder,
    document: DocumentPlace,
    *,
    rows_per_step: int,
    first_step: int,
    begin: int,
    trained: int,
) -> Iterator[Pass]:
    """The uses of a document in a run with an order of samples, epoch by epoch.

    `begin`: number of samples before `first_step`, the run's first one; they belong to an earlier
    run.
    """
    n = rows_per_step // stream.config.V
    length = stream.document_length(document.bucket, document.number_in_file)
    pieces = stream.samples_with(document.bucket, document.number_in_file)
    last_epoch = max((piece.epoch for piece in pieces), default=0)
    for epoch in range(last_epoch + 1):
        uses: list[Use] = []
        steps_ahead: list[float] = []
        covered = np.zeros(length, bool)
        for piece in pieces:
            if piece.epoch != epoch:
                continue
            covered[piece.start : piece.stop] = True
            step, row = divmod(piece.sample - begin, rows_per_step)
            step += first_step
            if step >= trained:
                steps_ahead.append(step)
            elif step >= first_step:
                uses.append(Use(epoch, step, row, row // n, piece.start, piece.stop))
        if not covered.all():
            steps_ahead.append(math.inf)  # the other tokens are in samples after the run's end
        yield Pass(epoch, None, sorted(uses), length, expected=min(steps_ahead, default=None))


def total_read(order: Order, lane: int, epoch: int, place: int) -> int:
    """The number of documents that a lane reads before it reaches a place of an epoch."""
    in_earlier_epochs = sum(len(order.share(lane, earlier)) for earlier in range(epoch))
    return in_earlier_epochs + place - order.share(lane, epoch).start


# ---- names of documents --------------------------------------------------------------------------


def groups_of(source: Source) -> Iterator[tuple[str, int, int]]:
    """For each group of a source: (file, index in it of the first document, number of documents)."""
    manifest = source.manifest
    for entry in manifest["files"]:
        first = 0
        counts = entry["groups"]
        if "documents" in manifest:  # a part of one file
            first, _ = manifest["documents"]
            counts = source.groups.tolist()
        for count in counts:
            yield entry["name"], first, count
            first += count


def find_document(data: Mapping[str, Mapping[str, Source]], name: str) -> tuple[str, DocumentPlace]:
    """(split, the document FILE:DOC) in {split: {bucket: source}}.

    ValueError if FILE or DOC is absent. If several splits share a file, a document that is not
    whole in any of them has group -1.
    """
    file, _, number = name.rpartition(":")
    if not file or not number.isdecimal():
        raise ValueError(
            f"{name}: expected FILE:DOC, for example web/0007.parquet:41; FILE is relative to the data "
            f"path, and DOC is the number of the document in it, from 0"
        )
    in_file = int(number)
    known: dict[str, tuple[str, str, int]] = {}  # {file: (split, bucket, documents)}
    for split, sources in data.items():
        for bucket, source in sources.items():
            for group, (of_file, first, count) in enumerate(groups_of(source)):
                if of_file == file and first <= in_file < first + count:
                    return split, DocumentPlace(bucket, name, in_file, group, in_file - first)
            for entry in source.manifest["files"]:
                known.setdefault(entry["name"], (split, bucket, sum(entry["groups"])))
    if file not in known:
        raise ValueError(
            f"{name}: the run has no file {file}; its files are {few(known)}{did_you_mean(file, known)}"
        )
    split, bucket, count = known[file]
    if in_file >= count:
        raise ValueError(f"{name}: {file} has documents 0 to {count - 1}; name one of them")
    return split, DocumentPlace(bucket, name, in_file, -1, -1)


def announce_search(searched: Iterable[tuple[Source, Container[str]]]) -> None:
    """Log how much a search through the files of (source, names of its files that are not searched)
    may have to fetch."""
    sizes: dict[AnyPath, int] = {}
    for source, known in searched:
        for entry in source.manifest["files"]:
            if entry["name"] not in known:
                sizes[place_of(source.manifest, entry)] = entry["size"]
    remote = [size for path, size in sizes.items() if is_remote(path)]
    if remote:
        log.info(
            "searching reads the text of %s, at most %.1f MB, and fetches what is not on this machine",
            counted(len(remote), "remote file"),
            sum(remote) / 1e6,
        )


def groups_to_search(source: Source, known: Container[str]) -> list[tuple[int, str, int]]:
    """(group, file, index in it of the first document) of a source, but for the files with a
    `known` name."""
    groups = []
    for group, (file, first, _) in enumerate(groups_of(source)):
        if file not in known:
            groups.append((group, file, first))
    return groups


def documents_with(
    source: Source, bucket: str, text: str, known: Container[str] = ()
) -> Iterator[DocumentPlace]:
    """All documents of a source that contain a text, but for those in files with a `known` name.
    Shows a progress bar."""
    groups = groups_to_search(source, known)
    bar = tqdm(groups, desc=f"searching {bucket}", unit="group", disable=None if groups else True)
    for group, file, first in bar:
        for number, document in enumerate(source.texts(group)):
            if text in document:
                in_file = first + number
                yield DocumentPlace(bucket, f"{file}:{in_file}", in_file, group, number)
