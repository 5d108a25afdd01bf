"""
From a document to the rows that trained on it.

    web/0007.parquet:41  --order-->  in epoch 0 lane 17 reads it at place 8,312 of its bucket's sequence
                         --kept cursors (bisection)-->  read between the saves of step 1000 and step 1250
                         --lane 17 alone, packed again from step 1000-->  step 1180, row 139: tokens 0 to 2,048

The order says which lane reads a document in an epoch. The cursors that the run kept at every save say between which
two saves it was read. So only that lane is packed again, from the save before, until no token of the document is
pending. The cost does not depend on the length of the run, and nothing is recorded for it while the run trains.

A document has the name FILE:ROW, in which ROW counts the documents of the file that are read, from 0. In pretokenized
files each entry is a document.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from nanochat.order import Order, StreamConfig
from nanochat.sources import Source
from nanochat.stream import Cursor, Row, Stream


class Document(NamedTuple):
    """One document of a source. `group` is counted over all files of the source, `row` within the group."""

    bucket: str
    name: str  # FILE:ROW
    group: int
    row: int


class Use(NamedTuple):
    """Tokens `start` to `stop` - 1 of a document in a row that was trained on. Token 0 is its BOS."""

    epoch: int
    step: int
    row: int  # of the step
    lane: int
    start: int
    stop: int


@dataclass(frozen=True)
class Pass:
    """What became of a document in one epoch."""

    epoch: int
    lane: int
    uses: list[Use]
    length: int  # tokens of the document, BOS included; 0 if it has not been read
    pending: bool = False  # the lane has read it, and will still use tokens of it
    expected: float | None = None  # the step around which it is used, if it has not been read


@dataclass(frozen=True)
class History:
    """A run in the order of lanes: what fixes its rows, and what it kept. `saves`: {step: read the V cursors}, which
    always has step 0; `trained`: steps that are done."""

    config: StreamConfig
    sources: Mapping[str, Source]
    tokenizer: str  # its fingerprint
    rows_per_lane: int  # that each lane gives to a step
    saves: Mapping[int, Callable[[], Sequence[Cursor] | None]]
    trained: int

    def passes(self, document: Document) -> Iterator[Pass]:
        """What became of a document, epoch by epoch. The last one is the first that the run has not used up."""
        source, read_cursors = self.sources[document.bucket], lru_cache(16)(lambda step: self.saves[step]())
        order = Order(source.groups, source.means, small=source.small, bucket=document.bucket, config=self.config)
        last_epoch = self.config.epochs(document.bucket)
        steps = sorted(self.saves)
        for epoch in itertools.count() if last_epoch == 0 else range(last_epoch):
            lane, place = order.find(epoch, document.group, document.row)

            def position(step: int, lane: int = lane) -> tuple[int, int]:
                """(epoch, place) up to which the lane had read at a save."""
                return position_of(read_cursors(step), lane, document.bucket, order)

            before = bisect_left(steps, True, key=lambda step: position(step) > (epoch, place)) - 1
            found = self._replay(document, epoch, place, lane, steps[before], read_cursors(steps[before]), order)
            yield found
            if found.expected is not None or found.pending:
                return

    def _replay(self, document: Document, epoch: int, place: int, lane: int, step: int,
                cursors: Sequence[Cursor] | None, order: Order) -> Pass:
        """Pack one lane again from a save before it reads the document."""
        key, uses, began = (epoch, document.group, document.row), list[Use](), step
        mine = None if cursors is None else [cursor for cursor in cursors if cursor["lane"] == lane]
        stream = Stream(self.config, self.sources, [lane], tokenizer=self.tokenizer, cursors=mine, drop_dry=True)
        with closing(stream):
            feed = stream.feeds[document.bucket][lane]
            first_row = feed.packer.row
            while step < self.trained:
                rows = stream.next_rows(self.rows_per_lane)
                uses += [use for i, row in enumerate(rows) if row.bucket == document.bucket
                         for use in uses_of(row, key, step, lane * self.rows_per_lane + i, self.config)]
                step += 1
                used_up = (feed.epoch, feed.place) > (epoch, place) and key not in feed.packer
                if used_up or len(rows) < self.rows_per_lane:
                    break
            if (feed.epoch, feed.place) > (epoch, place):
                [ids], _ = self.sources[document.bucket].read(document.group, np.array([document.row]))
                return Pass(epoch, lane, uses, len(ids), pending=key in feed.packer)
            done = total_read(order, lane, feed.epoch, feed.place)
            # documents that the lane uses up in a step: by its account of all rows, and the rows of these steps
            pending, packer = len(feed.packer.waiting()), feed.packer
            rate = (feed.num_documents - pending) / max(1, packer.row) * (packer.row - first_row) / max(1, step - began)
        before = pending + total_read(order, lane, epoch, place) - done  # documents that are used up first
        return Pass(epoch, lane, uses, 0, expected=step + before / rate if rate else math.inf)


def uses_of(row: Row, key: tuple[int, int, int], step: int, number: int, config: StreamConfig) -> Iterator[Use]:
    """The uses of a document in a row."""
    for placed, start, length, _ in row.placed:
        if placed == key:
            rest = start > 0 and config.layout == "bestfit"  # it has a BOS of its own in front
            yield Use(key[0], step, number, row.lane, start, start + length - rest)


def position_of(cursors: Sequence[Cursor] | None, lane: int, bucket: str, order: Order) -> tuple[int, int]:
    """(epoch, place) up to which a lane has read a bucket, according to cursors (None: those of the beginning)."""
    feed = next((cursor["buckets"].get(bucket) for cursor in cursors or () if cursor["lane"] == lane), None)
    return (0, order.share(lane, 0).start) if feed is None else (feed["epoch"], feed["place"])


def total_read(order: Order, lane: int, epoch: int, place: int) -> int:
    """Documents that a lane reads before it comes to a place of an epoch."""
    return sum(len(order.share(lane, e)) for e in range(epoch)) + place - order.share(lane, epoch).start


# ---- names of documents --------------------------------------------------------------------------

def find_document(sources: Mapping[str, Source], name: str) -> Document:
    """The document FILE:ROW of some sources. ValueError if there is no such file, or no such row in it."""
    file, _, number = name.rpartition(":")
    if not file or not number.isdecimal():
        raise ValueError(f"{name}: expected FILE:ROW, as web/0007.parquet:41; FILE is relative to the data path, and "
                         f"ROW counts its documents from 0")
    for bucket, source in sources.items():
        first_group = 0
        for entry in source.manifest["files"]:
            if entry["name"] == file:
                ends = np.cumsum(entry["groups"])
                if int(number) >= ends[-1]:
                    raise ValueError(f"{name}: {file} has documents 0 to {ends[-1] - 1}; name one of them")
                group = int(np.searchsorted(ends, int(number), side="right"))
                row = int(number) - int(ends[group]) + entry["groups"][group]
                return Document(bucket, name, first_group + group, row)
            first_group += len(entry["groups"])
    known = [entry["name"] for source in sources.values() for entry in source.manifest["files"]]
    raise ValueError(f"{name}: the run has no file {file}; its files are {', '.join(known[:4])}"
                     f"{', ...' if len(known) > 4 else ''}")


def documents_with(source: Source, bucket: str, text: str) -> Iterator[Document]:
    """All documents of a source in which a text occurs."""
    group = 0
    for entry in source.manifest["files"]:
        before = 0
        for count in entry["groups"]:
            for row, document in enumerate(source.texts(group)):
                if text in document:
                    yield Document(bucket, f"{entry['name']}:{before + row}", group, row)
            group, before = group + 1, before + count
