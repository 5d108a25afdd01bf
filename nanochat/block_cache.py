"""
Token files in object storage, read by blocks that a process keeps, or by exact ranges that it does not.

    read, will_need   units of lanes: each lane goes through some stretch of a file, many lanes at once
        file  |....|####|####|....|####|....|     blocks of 1 MiB; neighbours that are missing are one request
        cache  span span  span                    all files together, the span used longest ago goes first

    read_many, start_many   samples of a global shuffle: short ranges all over the file, each once
        file  ..#....##...........#.#.#.....#     sorted; those at most 64 KiB apart are one request, exactly so long
                 one  ------------ one ----

Blocks serve lanes because the next unit of a lane stands behind this one. They are wrong for a shuffle, where a block
would be fetched for 8 KB of it, and kept for nothing; so would be the 256 MiB that some readers fetch at a miss.
`start_many` asks for the next N samples and returns at once: the more of them, the more neighbours.

Where the lengths of gaps come from: 32 requests of 50 ms under way are 1.6 ms a request, in which a line of 100 MB/s
brings 160 KB. A shorter gap costs less than a request; 64 KiB keeps a batch of 8 KB samples under 9 times its bytes.

Memory: CACHE_BYTES a process, spans under way included, and what callers hold. Arrays that are returned have memory of
their own: a view would keep a whole block alive for as long as one of its documents waits for a row.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nanochat.patience import Question
from nanochat.remote import PART_BYTES, AnyPath, Stat, ask_range, head, iter_parts, near_runs

BLOCK_BYTES = 1 << 20
CACHE_BYTES = 256 << 20
GAP_BYTES = 1 << 16


@dataclass(eq=False)
class Span:
    """Neighbouring blocks that one request fetches: bytes begin .. end - 1 of an object."""

    stat: Stat
    begin: int
    end: int
    question: Question[memoryview]


class BlockCache:
    """Blocks of any files, at most `max_bytes` of them."""

    def __init__(self, *, max_bytes: int = CACHE_BYTES, block_bytes: int = BLOCK_BYTES):
        if max_bytes < block_bytes:
            raise ValueError(f"a cache of {max_bytes:,} bytes: expected at least one block of {block_bytes:,}")
        self.max_bytes, self.block_bytes = max_bytes, block_bytes
        self.bytes = 0
        self._spans: OrderedDict[Span, None] = OrderedDict()  # the one used longest ago first
        self._where: dict[tuple[Stat, int], Span] = {}  # (object, number of a block)
        self._lock = threading.Lock()

    def want(self, stat: Stat, begin: int, end: int) -> list[Span]:
        """Spans that hold bytes begin .. end - 1 of an object, in order; those that are not there are on their way."""
        blocks = range(begin // self.block_bytes, -(-end // self.block_bytes))
        spans: list[Span] = []
        with self._lock:
            missing: list[int] = []
            for block in blocks:
                span = self._where.get((stat, block))
                if span is None:
                    missing.append(block)
                    continue
                self._spans.move_to_end(span)
                spans.append(span)
            runs = near_runs([(b, b + 1) for b in missing], gap=0, longest=max(1, PART_BYTES // self.block_bytes))
            spans += [self._fetch(stat, missing[run[0]], missing[run[-1]]) for run in runs]
            self._shrink(keep=set(spans))
        return sorted(set(spans), key=lambda span: span.begin)

    def _fetch(self, stat: Stat, first: int, last: int) -> Span:
        begin, end = first * self.block_bytes, min((last + 1) * self.block_bytes, stat.size)
        span = Span(stat, begin, end, ask_range(stat, begin, end))
        self._spans[span] = None
        self._where.update(((stat, block), span) for block in range(first, last + 1))
        self.bytes += end - begin
        return span

    def _shrink(self, keep: set[Span]) -> None:
        """Let go what was used longest ago; not what the caller is about to read, which it holds anyway."""
        for span in list(self._spans):
            if self.bytes <= self.max_bytes:
                break
            if span not in keep:
                self._drop(span)

    def _drop(self, span: Span) -> None:
        if span in self._spans:
            del self._spans[span]
            self.bytes -= span.end - span.begin
            for block in range(span.begin // self.block_bytes, -(-span.end // self.block_bytes)):
                self._where.pop((span.stat, block), None)

    def wait(self, span: Span) -> memoryview:
        """The bytes of a span. A failed one is forgotten, so that another read asks again."""
        try:
            return span.question.answer()
        except BaseException:
            with self._lock:
                self._drop(span)
            raise

    def room(self) -> int:
        """Bytes that may still be asked for ahead: half of the cache, less what is under way."""
        with self._lock:
            under_way = sum(s.end - s.begin for s in self._spans if not s.question.done)
        return self.max_bytes // 2 - under_way


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
        out = ids.view(np.uint8).data
        if stop - first > self.cache.max_bytes // 4:  # a document that would push out what lanes are about to read
            at = 0
            for part in iter_parts(self.stat, first, stop):
                out[at:at + len(part)] = part
                at += len(part)
        elif stop > first:
            for span in self.cache.want(self.stat, first, stop):
                a, b = max(first, span.begin), min(stop, span.end)
                out[a - first:b - first] = self.cache.wait(span)[a - span.begin:b - span.begin]
        ids.flags.writeable = False
        return ids

    def will_need(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Have ranges (begin, end) of elements fetched that `read` will be asked for soon. Returns at once; what the
        cache has no room for is left out."""
        for begin, end in ranges:
            first, stop = self._bytes(begin, end)
            if first < stop <= first + self.cache.room():
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
