"""
Token files in object storage, read through spans that a process keeps, or by exact ranges that it does not.

    read, will_need   units of lanes: each lane goes through some stretch of a file, many lanes at once
        file  |....|####|####|....|####|....|     blocks of 64 KiB; neighbours that are missing are one request, and
        cache   [---span----]     [span]          `read` takes what follows along, 1 MiB in all

    read_many, start_many   samples of a global shuffle: short ranges all over the file, each once
        file  ..#....##...........#.#.#.....#     sorted; those at most 64 KiB apart are one request, exactly so long
                 one  ------------ one ----

Spans serve lanes because the next unit of a lane stands behind this one. They are wrong for a shuffle, where 1 MiB
would be fetched for 8 KB of it, and kept for nothing; so would be the 256 MiB that some readers fetch at a miss.
`start_many` asks for the next N samples and returns at once: the more of them, the more neighbours. Where the 64 KiB
come from: 32 requests of 50 ms under way are 1.6 ms a request, in which a line of 100 MB/s brings 160 KB.

Whoever knows how far a lane goes on here, to the end of its group, says so (`will_need`): then nothing is taken along
that another lane will fetch once more, and the next units are there before they are read.

Memory: CACHE_BYTES a process for all files together, requests under way included, and what callers hold. Spans read to
their end go first, then those that STALE_READS reads have not touched. Where no more can go, a read fetches exactly its
range and keeps nothing: lanes that found room are served from it, the others cost a request a unit. Letting go by age
alone was rejected: lanes that in turn need a little more than there is always miss (measured: 1.8 times the bytes).
Arrays that are returned have memory of their own: a view would keep a whole span alive for as long as one of its
documents waits for a row.
"""

import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nanochat.patience import Question
from nanochat.remote import PART_BYTES, AnyPath, Stat, ask_range, head, iter_parts, near_runs

BLOCK_BYTES = 1 << 16
REACH_BYTES = 1 << 20  # what a read that misses asks for, at least
CACHE_BYTES = 256 << 20
STALE_READS = 1024  # in which each of the lanes and buckets of a process has read once
GAP_BYTES = 1 << 16


@dataclass(eq=False)
class Span:
    """Neighbouring blocks that one request fetches: bytes begin .. end - 1 of an object."""

    stat: Stat
    begin: int
    end: int
    question: Question[memoryview]
    until: int  # when bytes up to here are read, no more is expected of it
    used: int  # number of the read that touched it last


class BlockCache:
    """Spans of any files, at most `max_bytes` of them."""

    def __init__(self, *, max_bytes: int = CACHE_BYTES, block_bytes: int = BLOCK_BYTES):
        if max_bytes < block_bytes:
            raise ValueError(f"a cache of {max_bytes:,} bytes: expected at least one block of {block_bytes:,}")
        self.max_bytes, self.block_bytes = max_bytes, block_bytes
        self.bytes = 0
        self._spans: OrderedDict[Span, None] = OrderedDict()  # the one used longest ago first; or, read to its end:
        self._read: dict[Span, None] = {}
        self._where: dict[tuple[Stat, int], Span] = {}  # (object, number of a block)
        self._reads = 0
        self._lock = threading.Lock()

    def want(self, stat: Stat, begin: int, end: int, *, reach: int = 0) -> list[Span] | None:
        """Spans that hold bytes begin .. end - 1 of an object, in order; those that are not there are on their way.
        Who is about to read them says with how many bytes in all (`reach`) a request is worth its while. None where
        there is no room for what is missing."""
        blocks = range(begin // self.block_bytes, -(-end // self.block_bytes))
        with self._lock:
            self._reads += reach > 0
            held = [self._where.get((stat, block)) for block in blocks]
            spans = {span for span in held if span is not None}
            for span in spans & self._spans.keys():
                span.used = self._reads
                self._spans.move_to_end(span)
            missing = [block for block, span in zip(blocks, held) if span is None]
            if missing and missing[-1] == blocks[-1]:
                missing += self._following(stat, blocks[-1] + 1, missing[0] + reach // self.block_bytes)
            runs = near_runs([(b, b + 1) for b in missing], gap=0, longest=max(1, PART_BYTES // self.block_bytes))
            if not self._make_room(len(missing) * self.block_bytes):
                return None
            for run in runs:
                spans.add(self._fetch(stat, missing[run[0]], missing[run[-1]], stat.size if reach else end))
            if reach:
                self._note_read(spans, end)
        return sorted((span for span in spans if span.begin < end), key=lambda span: span.begin)

    def _following(self, stat: Stat, first: int, stop: int) -> list[int]:
        """Blocks from `first` on that are missing, before `stop` and the end of the file."""
        blocks = range(first, min(stop, -(-stat.size // self.block_bytes)))
        return list(itertools.takewhile(lambda block: (stat, block) not in self._where, blocks))

    def _fetch(self, stat: Stat, first: int, last: int, until: int) -> Span:
        begin, end = first * self.block_bytes, min((last + 1) * self.block_bytes, stat.size)
        span = Span(stat, begin, end, ask_range(stat, begin, end), min(end, until), self._reads)
        self._spans[span] = None
        self._where.update(((stat, block), span) for block in range(first, last + 1))
        self.bytes += end - begin
        return span

    def _note_read(self, spans: Iterable[Span], end: int) -> None:
        for span in spans:
            if end >= span.until and span in self._spans:
                del self._spans[span]
                self._read[span] = None

    def _make_room(self, num_bytes: int) -> bool:
        """Let go what has been read or is stale, until so many bytes more may come. Returns whether they may."""
        if num_bytes == 0:
            return True
        stale = itertools.takewhile(lambda span: self._reads - span.used > STALE_READS, list(self._spans))
        for span in itertools.chain(list(self._read), stale):
            if self.bytes + num_bytes <= self.max_bytes:
                break
            self._drop(span)
        return self.bytes + num_bytes <= self.max_bytes

    def _drop(self, span: Span) -> None:
        if span in self._spans or span in self._read:
            self._spans.pop(span, None)
            self._read.pop(span, None)
            self.bytes -= span.end - span.begin
            for block in range(span.begin // self.block_bytes, -(-span.end // self.block_bytes)):
                del self._where[span.stat, block]

    def wait(self, span: Span) -> memoryview:
        """The bytes of a span. A failed one is forgotten, so that another read asks again."""
        try:
            return span.question.answer()
        except BaseException:
            with self._lock:
                self._drop(span)
            raise

    def room(self) -> int:
        """Bytes that may still be asked for ahead: half of the cache, less what waits to be read to its end."""
        with self._lock:
            return self.max_bytes // 2 - sum(span.end - span.begin for span in self._spans)


@functools.cache
def shared_cache() -> BlockCache:
    """The cache of this process."""
    return BlockCache()


class RemoteReader:
    """The ids of a file in object storage (`nanochat.readers.IdReader`). May be used from several threads at once."""

    mapped = False

    def __init__(self, path: AnyPath, dtype: np.dtype | type, *, stat: Stat | None = None,
                 cache: BlockCache | None = None):
        self.dtype = np.dtype(dtype)
        self.stat = stat or head(path)
        self.cache = cache or shared_cache()

    def read(self, begin: int, end: int) -> np.ndarray:
        """Elements begin .. end - 1 of the file, (end - begin,), read-only. ValueError outside the file, or where the
        object changed; OSError where the store stays away or refuses."""
        first, stop = self._bytes(begin, end)
        ids = np.empty(max(0, end - begin), self.dtype)
        out, at = ids.view(np.uint8).data, 0
        for data in self._parts(first, stop):
            out[at:at + len(data)] = data
            at += len(data)
        ids.flags.writeable = False
        return ids

    def _parts(self, first: int, stop: int) -> Iterator[memoryview]:
        """Bytes first .. stop - 1, one part after another."""
        spans = None
        if stop - first <= self.cache.max_bytes // 4:  # a longer document would push out what lanes are about to read
            spans = self.cache.want(self.stat, first, stop, reach=min(REACH_BYTES, self.cache.max_bytes // 16))
        if spans is None:
            yield from iter_parts(self.stat, first, stop)
        else:
            for span in spans:
                yield self.cache.wait(span)[max(first, span.begin) - span.begin:min(stop, span.end) - span.begin]

    def will_need(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Have ranges (begin, end) of elements fetched that `read` will be asked for soon. Returns at once; what the
        cache has no room for is left out."""
        for begin, end in ranges:
            first, stop = self._bytes(begin, end)
            stop = min(stop, first + self.cache.room())
            if first < stop:
                self.cache.want(self.stat, first, stop)

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """`read` of each range, in their order. Neighbours are fetched together, all requests under way at once; no
        block is kept."""
        return self.start_many(ranges)()

    def start_many(self, ranges: Sequence[tuple[int, int]]) -> Callable[[], list[np.ndarray]]:
        """Begin to `read_many`; the function that is returned waits for it."""
        spans = [self._bytes(begin, end) for begin, end in ranges]
        runs = near_runs(spans, gap=GAP_BYTES, longest=PART_BYTES)
        asked = [(run, self._ask_run(spans, run)) for run in runs]
        found: list[np.ndarray] = [np.empty(0, self.dtype)] * len(ranges)

        def collect() -> list[np.ndarray]:
            """Wait for the answers: an array of each range."""
            while asked:  # so that the bytes of a run go as soon as its arrays are made
                run, questions = asked.pop()
                first = spans[run[0]][0]
                parts = [question.answer() for question in questions]
                data = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
                for i in run:
                    found[i] = np.frombuffer(data[spans[i][0] - first:spans[i][1] - first], self.dtype).copy()
                    found[i].flags.writeable = False
            return found

        return collect

    def _ask_run(self, spans: Sequence[tuple[int, int]], run: Sequence[int]) -> list[Question[memoryview]]:
        first, stop = spans[run[0]][0], max(spans[i][1] for i in run)
        return [ask_range(self.stat, a, min(a + PART_BYTES, stop)) for a in range(first, stop, PART_BYTES)]

    def _bytes(self, begin: int, end: int) -> tuple[int, int]:
        size = self.dtype.itemsize
        if not 0 <= begin <= end or end * size > self.stat.size:
            raise ValueError(f"{self.stat.path}: elements {begin:,} to {end:,} wanted, it has "
                             f"{self.stat.size // size:,}; its index is of another file")
        return begin * size, end * size

    def close(self) -> None:
        """Nothing to give back: blocks go when others need the room."""
