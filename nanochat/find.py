"""
From a document to the rows that contain it.

    web/0007.parquet:41  --order-->  in epoch 0 lane 17 reads it at place 8,312 of its bucket's sequence
                         --kept cursors (bisection)-->  read between the saves of step 1000 and step 1250
                         --lane 17 alone, packed again from step 1000-->  step 1180, row 139: tokens 0 to 2,048

The order gives the lane that reads a document in an epoch. The cursors of the run's saves show
between which two saves the lane read it. So only that lane is packed again, from the earlier save
until no token of the document is pending. The cost does not depend on the length of the run, and
training records only the cursors of its saves.

In Megatron's order, the data is not divided into shares for lanes. There, the stream's
`samples_with` inverts the tables that list the documents of each sample.

A document has the name FILE:DOC, where DOC is its number, from 0, among the documents that are read
from the file. In pretokenized files, each entry is a document.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from tqdm import tqdm

from nanochat.order import Order, StreamConfig, open_order
from nanochat.sources import Source
from nanochat.stream import Cursor, Stream


class SampleFinder(Protocol):
    """What a stream of samples tells about a document, such as that of Megatron's order.

    That order documents the methods.
    """

    config: Any

    def document_length(self, bucket: str, document: int) -> int: ...
    def samples_with(self, bucket: str, document: int) -> list[Any]: ...


class Document(NamedTuple):
    """One document of a source.

    `group` is counted over all files of the source, `row` within the group.
    """

    bucket: str
    name: str  # FILE:DOC
    number: int  # DOC
    group: int
    row: int


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


@dataclass(frozen=True)
class Pass:
    """The uses of a document in one epoch."""

    epoch: int
    lane: int | None  # the lane that reads it in this epoch; None in Megatron's order
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
    saves: Sequence[int]  # step 0 and the steps of the kept cursors, ascending
    # (step, cursors) of the newest readable save at or before a step; None: the beginning of the
    # data
    nearest_cursors: Callable[[int], tuple[int, Sequence[Cursor] | None]]
    trained: int  # number of completed steps
    horizon: int  # number of steps of the whole run

    def passes(self, document: Document) -> Iterator[Pass]:
        """The uses of a document, epoch by epoch.

        Of several epochs that lie ahead, only the first is returned.
        """
        curriculum, source = self.config.curriculum, self.sources[document.bucket]
        if curriculum is not None and document.bucket not in curriculum.buckets:
            return
        order = open_order(
            source.groups,
            source.means,
            small=source.small,
            bucket=document.bucket,
            config=self.config,
        )
        last_epoch = self.config.epochs(document.bucket)
        epochs = itertools.count() if last_epoch == 0 else range(last_epoch)
        is_ahead = False
        for epoch in epochs:
            of_epoch = self._pass(document, epoch, order)
            if is_ahead and of_epoch.expected is not None:
                return
            yield of_epoch
            is_ahead = of_epoch.expected is not None

    def _reached(self, lane: int, bucket: str, step: int) -> tuple[int, int] | None:
        """(epoch, place) that a lane had reached in a bucket at a save.

        None at the beginning of the data.
        """
        _, cursors = self.nearest_cursors(step)
        for cursor in cursors or ():
            feed = cursor["buckets"].get(bucket)
            if cursor["lane"] == lane and feed is not None:
                return feed["epoch"], feed["place"]
        return None

    def _pass(self, document: Document, epoch: int, order: Order) -> Pass:
        """The uses of a document in one epoch.

        Packs its lane again from the last save before the lane read it.
        """
        lane, place = order.lane_and_place(epoch, document.group, document.row)
        beginning = 0, order.share(lane, 0).start

        # the last save at which the lane had not yet passed the document's place
        def has_passed(step: int) -> bool:
            return (self._reached(lane, document.bucket, step) or beginning) > (epoch, place)

        behind = bisect_left(self.saves, True, key=has_passed)
        step, cursors = self.nearest_cursors(self.saves[max(0, behind - 1)])
        mine = None if cursors is None else [cursor for cursor in cursors if cursor["lane"] == lane]
        stream = Stream(
            self.config, self.sources, [lane], tokenizer=self.tokenizer, cursors=mine, drop_dry=True
        )
        with closing(stream):
            return self._follow(stream, document, epoch, place, step, order)

    def _follow(
        self, stream: Stream, document: Document, epoch: int, place: int, step: int, order: Order
    ) -> Pass:
        """The uses of a document from `step` on; the stream's only lane stands before its place."""
        [lane] = stream.lanes
        feed = stream.feeds[document.bucket][lane]
        key, uses = (epoch, document.group, document.row), list[Use]()
        has_tail_bos = self.config.layout == "bestfit"  # a tail begins with a BOS of its own
        while step < self.trained:
            if (feed.epoch, feed.place) > (epoch, place) and key not in feed.packer:
                break  # no token of it is pending
            rows = stream.next_rows(self.rows_per_lane)
            for number, row in enumerate(rows, lane * self.rows_per_lane):
                for placed, start, length, _ in row.placed:
                    if placed == key and row.bucket == document.bucket:
                        stop = start + length - (start > 0 and has_tail_bos)
                        uses.append(Use(epoch, step, number, lane, start, stop))
            step += 1
            if len(rows) < self.rows_per_lane:
                break
        if (feed.epoch, feed.place) > (epoch, place):
            [found] = self.sources[document.bucket].read(document.group, np.array([document.row]))
            return Pass(epoch, lane, uses, len(found.ids), pending=key in feed.packer)
        # the lane has not read it yet: this many documents come before it, and it itself
        first = total_read(order, lane, epoch, place) - total_read(
            order, lane, feed.epoch, feed.place
        )
        return Pass(epoch, lane, uses, 0, expected=self._expected(stream, document.bucket, first))

    def _expected(self, stream: Stream, bucket: str, first: int) -> float:
        """The approximate step at which a stream's only lane will have used a bucket's documents.

        Counted are the pending ones and the next `first` ones, if rows hold as many documents as
        before. The curriculum decides the bucket of each row.
        """
        [lane] = stream.lanes
        feed, row = stream.feeds[bucket][lane], stream.rows[lane]
        pending = len(feed.packer.waiting())
        used_up = feed.num_documents - pending
        if used_up <= 0:
            return math.inf
        due = (pending + first) * feed.packer.row / used_up  # rows of the bucket
        while due > 0 and row < self.horizon * self.rows_per_lane:
            due -= stream.bucket_of(lane, row) == bucket
            row += 1
        return math.inf if due > 0 else row / self.rows_per_lane


def sample_passes(
    stream: SampleFinder,
    document: Document,
    *,
    rows_per_step: int,
    begin: int,
    trained: int,
) -> Iterator[Pass]:
    """The uses of a document in a run with Megatron's order, epoch by epoch.

    `begin`: number of samples before the run's first step; they belong to an earlier run.
    """
    n = rows_per_step // stream.config.V
    length = stream.document_length(document.bucket, document.number)
    pieces = stream.samples_with(document.bucket, document.number)
    for epoch in range(max((piece.epoch for piece in pieces), default=0) + 1):
        uses = list[Use]()
        steps = list[float]()
        covered = np.zeros(length, bool)
        for _, sample, start, stop in filter(lambda piece: piece.epoch == epoch, pieces):
            step, row = divmod(sample - begin, rows_per_step)
            covered[start:stop] = True
            if step >= trained:
                steps.append(step)
            elif step >= 0:
                uses.append(Use(epoch, step, row, row // n, start, stop))
        if not covered.all():
            steps.append(math.inf)  # the samples with the other tokens come after the run's end
        yield Pass(epoch, None, sorted(uses), length, expected=min(steps, default=None))


def total_read(order: Order, lane: int, epoch: int, place: int) -> int:
    """The number of documents that a lane reads before it reaches a place of an epoch."""
    return (
        sum(len(order.share(lane, e)) for e in range(epoch))
        + place
        - order.share(lane, epoch).start
    )


# ---- names of documents --------------------------------------------------------------------------


def groups_of(source: Source) -> Iterator[tuple[str, int, int]]:
    """For each group of a source: (file, index in it of the first document, number of documents)."""
    manifest = source.manifest
    for entry in manifest["files"]:
        first, counts = 0, entry["groups"]
        if "documents" in manifest:  # a part of one file
            first, counts = manifest["documents"][0], source.groups.tolist()
        for count in counts:
            yield entry["name"], first, count
            first += count


def find_document(data: Mapping[str, Mapping[str, Source]], name: str) -> tuple[str, Document]:
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
    # {file: (split, bucket, documents)}
    row = int(number)
    known = dict[str, tuple[str, str, int]]()
    for split, sources in data.items():
        for bucket, source in sources.items():
            for group, (of_file, first, count) in enumerate(groups_of(source)):
                if of_file == file and first <= row < first + count:
                    return split, Document(bucket, name, row, group, row - first)
            for entry in source.manifest["files"]:
                known.setdefault(entry["name"], (split, bucket, sum(entry["groups"])))
    if file not in known:
        raise ValueError(
            f"{name}: the run has no file {file}; its files are {', '.join([*known][:4])}"
            f"{', ...' if len(known) > 4 else ''}"
        )
    split, bucket, count = known[file]
    if row >= count:
        raise ValueError(f"{name}: {file} has documents 0 to {count - 1}; name one of them")
    return split, Document(bucket, name, row, -1, -1)


def documents_with(source: Source, bucket: str, text: str) -> Iterator[Document]:
    """All documents of a source that contain a text. Shows a progress bar."""
    groups = tqdm([*groups_of(source)], desc=f"searching {bucket}", unit="group", disable=None)
    for group, (file, first, _) in enumerate(groups):
        for row, document in enumerate(source.texts(group)):
            if text in document:
                yield Document(bucket, f"{file}:{first + row}", first + row, group, row)
