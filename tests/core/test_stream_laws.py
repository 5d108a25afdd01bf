"""Laws of the whole stream: random buckets of shards and text, random curricula, lanes and layouts,
and a run that stops and resumes with other numbers of processes.

No two tokens of a corpus are equal, so the tokens of a row identify its documents. The expected
rows follow from the documents alone: each epoch uses each document once, each of its tokens is a
target once (or is dropped by `crop`, or is still pending), the ledger agrees, and stopping changes
no digest."""

import json
import math
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanochat import parquet_source, sources
from nanochat.common import block
from nanochat.curriculum import Curriculum, Mixer, Phase
from nanochat.dataloader import Dry
from nanochat.files import find_files
from nanochat.order import StreamConfig
from nanochat.parquet_source import ParquetSource
from nanochat.rows import Packed, Row
from nanochat.sources import scan
from nanochat.stream import Cursor, Stream, ledger
from nanochat.token_source import TokenSource
from nanochat.tokens import new_manifest
from tests.token_files import write_megatron, write_pair
from tests.toy import BOS, ByteTokenizer, digest_of_row, examples, json_copy, load_steps, row_arrays

LAYOUTS = ("crop", "split", "concat", "binned")
# `derandomize` derives the examples from the source of a law, so after an edit they may miss a case
# that it asserts.
LAW = settings(
    max_examples=examples(0.75),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class NumberTokenizer(ByteTokenizer):
    """The text "1000 1001" is the ids 1000 and 1001."""

    token_dtype = np.dtype(np.uint32)

    def encode_flat(self, texts, *, num_threads=4):
        ids = [[BOS, *map(int, text.split())] for text in texts]
        offsets = np.cumsum([0, *map(len, ids)])
        return np.array([i for document in ids for i in document], self.token_dtype), offsets


# ---- corpora -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A document, or a window of one. Its first `overlap` ids repeat the previous window. `closed`:
    EOD is stored."""

    ids: tuple[int, ...]
    overlap: int = 0
    closed: bool = True

    def in_stream(self, framed):
        """The ids that the stream uses."""
        return [BOS, *self.ids] if framed else [*self.ids, *[BOS] * self.closed]


def windows(ids, max_length, overlap):
    start = 0
    while max_length and start + max_length < len(ids):
        yield Entry(tuple(ids[start : start + max_length]), overlap if start else 0, False)
        start += max_length - overlap
    yield Entry(tuple(ids[start:]), overlap if start else 0)


@dataclass
class Corpus:
    """A bucket: the entries of each group of each file, and their format."""

    files: list[list[list[Entry]]]
    # text | shards | foreign (shards without manifest.json, whose files are one group) | megatron
    kind: str
    max_length: int = 0
    overlap: int = 0

    @property
    def groups(self):
        return [group for file in self.files for group in file]

    @property
    def entries(self):
        return [entry for group in self.groups for entry in group]

    def open(self, folder, *, framed):
        """Write the files, and open them as a source."""
        folder.mkdir()
        tokenizer = NumberTokenizer()
        if self.kind == "text":
            for i, file in enumerate(self.files):
                self._write_text(folder / f"{i}.parquet", file)
            return ParquetSource(scan(folder), tokenizer)
        if self.kind == "megatron":
            for i, (file,) in enumerate(self.files):
                # each of two sequences
                documents = [entry.in_stream(framed=False) for entry in file]
                write_megatron(
                    folder / str(i),
                    [[d[: n % 3], d[n % 3 :]] for n, d in enumerate(documents)],
                    "<i4",
                )
            return TokenSource(scan(folder, find_files(folder, "megatron")), tokenizer)
        records = {
            str(i): self._write_shard(folder / str(i), file) for i, file in enumerate(self.files)
        }
        if self.kind == "shards":
            manifest = new_manifest(
                {"fingerprint": tokenizer.fingerprint, "eod": BOS, "vocab_size": 1 << 20},
                {"max_length": self.max_length, "overlap_size": self.overlap},
                records,
            )
            (folder / "manifest.json").write_text(json.dumps(manifest))
        return TokenSource(
            scan(folder, find_files(folder, "shards")), tokenizer, as_stored=not framed
        )

    def _write_text(self, path, file):
        schema = pa.schema([("text", pa.string())])
        with pq.ParquetWriter(path, schema) as writer:
            for group in file:
                writer.write_table(
                    pa.table({"text": [" ".join(map(str, e.ids)) for e in group]}, schema=schema)
                )

    def _write_shard(self, path, file):
        entries = [entry for group in file for entry in group]
        stored = [entry.in_stream(framed=False) for entry in entries]
        written = write_pair(path, stored, [entry.overlap for entry in entries], vocab_size=1 << 20)
        return {
            **written,
            "input": {},
            "documents": 0,
            "skipped": {},
            "groups": list(map(len, file)),
        }


@dataclass
class World:
    """A stream, its documents, and the launches of a run: (number of processes, percentage of steps
    at which they stop)."""

    config: StreamConfig
    corpora: dict[str, Corpus]
    n: int  # rows of each lane in a step
    plan: list[tuple[int, int]]
    small: bool  # whether documents are shuffled one by one

    def open(self, folder):
        """Write all buckets to a folder, and open their sources."""
        with (
            mock.patch.object(sources, "SMALL_TOKENS", sources.SMALL_TOKENS if self.small else -1),
            # text may be all empty here
            mock.patch.object(parquet_source, "is_blank", lambda *args: False),
        ):
            return {
                name: corpus.open(Path(folder) / name, framed=self.config.framed)
                for name, corpus in self.corpora.items()
            }

    def complete(self, run, bucket):
        """Whether a run has read all of a bucket. A lane that has not must be in a phase that does
        not mix it, and in which all others are dry."""
        mixer = Mixer(
            self.config.curriculum, T=self.config.T, V=self.config.V, seed=self.config.seed
        )
        left = [cursor for cursor in run.cursors if (bucket, cursor["lane"]) in run.unread]
        for cursor in left:
            shares = self.config.curriculum.phases[mixer.phase_of(cursor["row"])[0]].proportions()
            assert bucket not in shares and set(shares) <= set(cursor["dropped"])
        return not left


@st.composite
def corpora(draw, T, layout, first):
    kinds = (
        ("shards", "foreign") if layout == "binned" else ("shards", "text", "foreign", "megatron")
    )
    kind = draw(st.sampled_from(kinds))
    cut = kind in ("shards", "foreign") and (layout == "binned" or draw(st.booleans()))
    max_length = draw(st.integers(2, T)) if cut else 0
    overlap = draw(st.integers(0, max_length // 2))
    length = st.one_of(st.integers(0, T), st.integers(0, 3 * T), st.just(0))
    sizes = st.one_of(
        st.lists(length, min_size=1, max_size=4), st.lists(length, min_size=9, max_size=16)
    )
    files = []
    for groups in draw(st.lists(st.lists(sizes, min_size=1, max_size=3), min_size=1, max_size=3)):
        file = []
        for group in groups:
            cut = []
            for num in group:
                cut += windows(range(first, first + num), max_length, overlap)
                first += num
            file.append(cut)
        files.append(
            [[entry for group in file for entry in group]]
            if kind in ("foreign", "megatron")
            else file
        )
    return Corpus(files, kind, max_length, overlap)


@st.composite
def worlds(draw, layout):
    T, V = draw(st.integers(6, 16)), draw(st.sampled_from([1, 2, 3, 5, 9]))
    names = ["a", "b", "c"][: draw(st.sampled_from([1, 2, 3, 3]))]
    found = {name: draw(corpora(T, layout, 1000 + 100_000 * i)) for i, name in enumerate(names)}
    weights = st.lists(st.integers(0, 3), min_size=len(names), max_size=len(names)).filter(any)
    phases = [
        Phase(draw(st.integers(1, 40)) * T * V, dict(zip(names, draw(weights))))
        for _ in range(draw(st.integers(0, 2)))
    ]
    # which ends with all dry
    phases.append(Phase(T * V, {name: draw(st.integers(1, 3)) for name in names}))
    curriculum = Curriculum(phases, max_epochs={name: draw(st.integers(1, 3)) for name in names})
    config = StreamConfig(
        T=T,
        V=V,
        seed=draw(st.integers(0, 3)),
        layout=layout if layout in ("concat", "binned") else "bestfit",
        long_docs=layout if layout == "split" else "crop",
        overlap=draw(st.integers(0, T - 2)),
        buffer_size=draw(st.integers(1, 6)),
        unit_size=draw(st.sampled_from([1, 2, 8])),
        curriculum=curriculum,
        pack=layout != "binned" or draw(st.booleans()),
    )
    stops = sorted(draw(st.lists(st.integers(1, 99), max_size=3)))
    return World(
        config,
        found,
        draw(st.integers(1, 2)),
        [(draw(st.integers(1, V)), stop) for stop in [*stops, 100]],
        draw(st.booleans()),
    )


# ---- a run ---------------------------------------------------------------------------------------


@dataclass
class Run:
    """The results: digests of all steps, all rows with their tokens and live masks, and the last
    cursors."""

    digests: list[int] = field(default_factory=list)
    rows: list[tuple[Row, np.ndarray, np.ndarray]] = field(default_factory=list)
    cursors: list[Cursor] = field(default_factory=list)
    # (bucket, lane) with unread documents or pending entries
    unread: set[tuple[str, int]] = field(default_factory=set)
    dropped_at_stops: int = 0  # stops at which a lane had dropped a bucket, and still had two


def drained(world, opened, plan, *, num_threads):
    """Take rows until all lanes are dry. `plan`: (number of processes, the step before which they
    stop; inf for the last). The ledger must balance at each stop."""
    run = Run()
    for W, stop in plan:
        streams = [
            Stream(
                world.config,
                opened,
                block(r, W, world.config.V),
                tokenizer="t",
                drop_dry=True,
                num_threads=num_threads,
                cursors=run.cursors or None,
            )
            for r in range(W)
        ]
        while len(run.digests) < stop:
            rows = [row for stream in streams for row in stream.next_rows(world.n)]
            if not rows:
                break
            filled = [(row, *row_arrays(row, world.config.T)) for row in rows]
            digests = [
                digest_of_row(i, tokens, live[1:]) for i, (_, tokens, live) in enumerate(filled)
            ]
            run.digests.append(sum(digests))
            run.rows += filled
            check_lookahead(streams)
        run.cursors = json_copy([cursor for stream in streams for cursor in stream.cursors()])
        run.unread = {
            (bucket, lane)
            for bucket, lane, feed in feeds_of(streams)
            if is_unread(feed, world.config.framed)
        }
        for stream in streams:
            stream.close()
        check_accounts(world, run)
        run.dropped_at_stops += stop < math.inf and any(
            0 < len(cursor["dropped"]) < len(world.corpora) - 1 for cursor in run.cursors
        )
    return run


def feeds_of(streams):
    """(bucket, lane, feed) of all streams."""
    for stream in streams:
        for bucket, feeds in stream.feeds.items():
            for lane, feed in feeds.items():
                yield bucket, lane, feed


def is_unread(feed, framed):
    """Whether a lane has unread documents of a bucket, or pending entries."""
    has_documents = feed.epoch + 1 < feed.max_epochs or feed.place < feed.share.stop
    return has_documents or (feed.packer.ready and not framed)


def check_lookahead(streams):
    """No lane has read beyond its epoch."""
    for _, _, feed in feeds_of(streams):
        # otherwise it is dry, and less than a row is pending, perhaps of several epochs
        if feed.packer.ready:
            epochs = {key[0] for key in feed.packer.waiting()}
            assert epochs <= {feed.epoch}, "read beyond an epoch"


def check_accounts(world, run):
    """Compare the ledger of each bucket with the counted rows."""
    T, account = world.config.T, ledger(run.cursors, world.config.T)
    for bucket in world.corpora:
        a = account[bucket]
        rows = [row for row, _, _ in run.rows if row.bucket == bucket]
        placed = sum(length for row in rows for _, _, length, _ in row.placed)
        assert a["read"] + a["bos"] + a["repeated"] == a["emitted"] + a["cropped"] + a["pending"]
        assert (a["rows"], a["emitted"], a["padded"]) == (
            len(rows),
            placed,
            len(rows) * (T + 1) - placed,
        )
        assert a["padded"] == 0 or world.config.layout == "binned"
        assert a["cropped"] == 0 or (world.config.layout, world.config.long_docs) == (
            "bestfit",
            "crop",
        )


# ---- the expected contents of rows ---------------------------------------------------------------


def pieces(world, run, bucket):
    """The pending entries at the end: (entry, its tokens that no row has had, number of tokens
    before them)."""
    groups = world.corpora[bucket].groups
    framed = world.config.framed
    pending = []
    for cursor in run.cursors:
        feed = cursor["buckets"][bucket]
        for i, (_, group, number, _, start, _) in enumerate(feed["waiting"]):
            # the last row ended with it
            shared = world.config.layout == "concat" and i == 0 and feed["row"] > 0
            entry = groups[group][number]
            pending.append((entry, entry.in_stream(framed)[start + shared :], start + shared))
    return pending


def check_epochs(world, run, bucket):
    """A lane begins an epoch in the row that ends the previous one. Returns the number of rows with
    two epochs."""
    mixed = 0
    for lane in range(world.config.V):
        rows = [
            [key[0] for key, *_ in row.placed]
            for row, _, _ in run.rows
            if (row.lane, row.bucket) == (lane, bucket)
        ]
        assert all(max(before) <= min(after) for before, after in pairwise(rows))
        mixed += sum(max(row) > min(row) for row in rows)
    return mixed


def check_documents(world, run, bucket):
    """Each entry of each allowed epoch begins in exactly one row, or is pending as a whole."""
    waiting = [
        (lane, *piece)
        for lane, cursor in enumerate(run.cursors)
        for piece in cursor["buckets"][bucket]["waiting"]
    ]
    begun = Counter(
        key
        for row, _, _ in run.rows
        if row.bucket == bucket
        for key, start, _, _ in row.placed
        if not start
    )
    if world.config.layout == "concat":  # if a row ends with a BOS, the next one begins with it
        for lane in range(world.config.V):
            mine = [
                row.placed for row, _, _ in run.rows if (row.lane, row.bucket) == (lane, bucket)
            ]
            begun.subtract(after[0][0] for before, after in pairwise(mine) if not after[0][1])
            if (
                mine
                and (piece := next((p for p in waiting if p[0] == lane), None))
                and piece[5] == 0
            ):
                # a row ended with its BOS, but the document is pending
                begun[tuple(piece[1:4])] -= 1
    begun.update(tuple(piece[1:4]) for piece in waiting if piece[5] == 0)
    everything = Counter(
        (epoch, group, number)
        for epoch in range(world.config.epochs(bucket))
        for group, entries in enumerate(world.corpora[bucket].groups)
        for number in range(len(entries))
    )
    assert min(begun.values(), default=0) >= 0 and begun <= everything
    assert begun.total() == ledger(run.cursors, world.config.T)[bucket]["documents"]
    assert begun == everything or not world.complete(run, bucket)


def check_tokens(world, run, bucket):
    """Each id is a live target once per epoch, or is dropped or pending. Overlaps are emitted, but
    never live."""
    epochs, corpus = world.config.epochs(bucket), world.corpora[bucket]
    emitted, live = Counter(), Counter()
    for row, tokens, is_live in run.rows:
        if row.bucket == bucket:
            placed = sum(length for _, _, length, _ in row.placed)
            emitted.update(tokens[:placed].tolist())
            live.update(tokens[1:][is_live[1:] == 1].tolist())
    for count in (emitted, live):
        del count[BOS]
    left = pieces(world, run, bucket)
    pending = Counter(
        i
        for entry, tokens, gone in left
        for i in tokens[max(0, entry.overlap + world.config.framed - gone) :]
        if i != BOS
    )
    ids = Counter({i: epochs for entry in corpus.entries for i in entry.ids[entry.overlap :]})
    account = ledger(run.cursors, world.config.T)[bucket]
    assert live.keys() <= ids.keys() and live + pending <= ids
    if world.config.layout == "bestfit":
        waits = Counter(i for _, tokens, _ in left for i in tokens if i != BOS)
        stored = Counter(i for entry in corpus.entries for i in entry.ids * epochs)
        assert world.config.long_docs == "split" or emitted + waits <= stored
    if not world.complete(run, bucket):
        return
    assert account["read"] == epochs * sum(
        len(e.in_stream(world.config.framed)) - e.overlap - world.config.framed
        for e in corpus.entries
    )
    if world.config.layout == "binned":
        assert not left and emitted == Counter(
            i for entry in corpus.entries for i in entry.ids * epochs
        )
    elif world.config.layout == "concat" or world.config.long_docs == "split":
        assert live + pending == ids
    else:
        assert (stored - emitted - waits).total() == account["cropped"]


def check_rows(world, run, bucket):
    """A row holds the tokens that its placements name, then padding. Targets are off for repeated
    tokens, padding, the row's first token and, in stored entries, the token after an EOD."""
    T = world.config.T
    framed = world.config.framed
    groups = world.corpora[bucket].groups
    for row, tokens, is_live in run.rows:
        if row.bucket != bucket:
            continue
        expected = []
        repeated = []
        doc_ids = []
        for number, ((_, group, index), start, length, context) in enumerate(row.placed):
            entry = groups[group][index]
            own = int(start > 0 and world.config.layout == "bestfit")  # a BOS of its own
            named = range(start, start + length - own)
            expected += [BOS] * own + [entry.in_stream(framed)[i] for i in named]
            repeated += [False] * own + [
                i < start + context or framed <= i < framed + entry.overlap for i in named
            ]
            doc_ids += [number] * length
        missing = T + 1 - len(expected)
        assert tokens.tolist() == expected + [BOS] * missing
        assert row.doc_ids().tolist() == doc_ids + [len(row.placed)] * missing
        after_eod = [not framed and token == BOS for token in expected]
        live = [not (off or eod) for off, eod in zip(repeated[1:], after_eod)]
        assert is_live[1:].tolist() == live + [False] * missing


# ---- the laws ------------------------------------------------------------------------------------


# what the examples of each layout must include
ALWAYS = {
    "small",
    "large",
    "buckets",
    "stopped",
    "other W",
    "phases",
    "shards",
    "foreign",
    "overlaps",
    "epochs",
    "empty",
}
FRAMED = {
    "rows of two epochs",
    "text",
    "megatron",
    "pending",
    "dropped at a stop",
    "fewer units than lanes",
}
CASES = {
    "crop": ALWAYS | FRAMED | {"cropped"},
    "split": ALWAYS | FRAMED | {"repeated"},
    "concat": ALWAYS | FRAMED | {"repeated"},
    "binned": ALWAYS | {"padded", "unpacked"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_law_each_document_is_used_once_an_epoch_and_stopping_changes_nothing(layout, monkeypatch):
    # so that these short documents are stored like long ones
    monkeypatch.setattr(Packed, "CHUNK", 7)
    seen = Counter()

    @LAW
    @given(worlds(layout))
    def law(world):
        with tempfile.TemporaryDirectory() as folder:
            opened = world.open(folder)
            straight = drained(world, opened, [(1, math.inf)], num_threads=0)
            length = len(straight.digests)
            stops = [
                (W, length * percent // 100 if percent < 100 else math.inf)
                for W, percent in world.plan
            ]
            stopped = drained(world, opened, stops, num_threads=1)
        assert stopped.digests == straight.digests and stopped.cursors == straight.cursors
        for bucket in world.corpora:
            check_documents(world, stopped, bucket)
            check_tokens(world, stopped, bucket)
            seen["rows of two epochs"] += check_epochs(world, stopped, bucket)
            check_rows(world, stopped, bucket)
            seen.update(cases_of_bucket(world, stopped, bucket))
        seen.update(cases_of(world, stopped))
        seen["stopped"] += any(0 < at < length for _, at in stops)

    law()
    assert not {case for case in CASES[layout] if not seen[case]}, seen
    assert seen["complete"] > seen["left over"]


def cases_of_bucket(world, run, bucket):
    """{case: whether a bucket of a run is one}."""
    corpus = world.corpora[bucket]
    is_complete = world.complete(run, bucket)
    return {
        corpus.kind: True,
        "complete": is_complete,
        "left over": not is_complete,
        "overlaps": any(entry.overlap for entry in corpus.entries),
        "empty": not all(entry.ids for entry in corpus.entries),
        "fewer units than lanes": len(corpus.entries) < world.config.V,
        "epochs": world.config.epochs(bucket) > 1,
    }


def cases_of(world, run):
    """{case: whether a run is one, or how many tokens or stops of it are}."""
    config = world.config
    account = ledger(run.cursors, config.T).values()
    cases = {
        "small": world.small,
        "large": not world.small,
        "buckets": len(world.corpora) > 1,
        "dropped at a stop": run.dropped_at_stops,
        "other W": len({W for W, _ in world.plan}) > 1,
        "unpacked": not config.pack,
    }
    for name in ("cropped", "padded", "repeated", "pending"):
        cases[name] = sum(of_bucket[name] for of_bucket in account)
    if len(config.curriculum.phases) > 1:
        end = config.curriculum.phase_rows(config.T, config.V)[0]  # of the first phase, in a lane
        cases["phases"] = any(row.index >= end for row, _, _ in run.rows)
    return cases


def test_law_loaders_of_a_mix_end_at_the_same_step_with_the_same_digests():
    """Through the loader, with and without dropping dry buckets, for any number of processes,
    threads and micro-batches."""
    seen = Counter()

    def until_dry(world, opened, **how):
        digests = []
        with pytest.raises(Dry) as end:
            for digest, _ in load_steps(
                world.config, opened, R=world.n * world.config.V, steps=10_000, **how
            ):
                digests.append(digest)
        return digests, str(end.value)

    @settings(LAW, max_examples=examples(0.45))
    @given(st.sampled_from(LAYOUTS).flatmap(worlds), st.integers(1, 5), st.integers(1, 3))
    def law(world, B, num_threads):
        layout = world.config.layout
        W = world.plan[-1][0]
        with tempfile.TemporaryDirectory() as folder:
            opened = world.open(folder)
            for drop_dry in (False, True):
                one = until_dry(world, opened, W=1, B=3, num_threads=1, drop_dry=drop_dry)
                assert (
                    until_dry(world, opened, W=W, B=B, num_threads=num_threads, drop_dry=drop_dry)
                    == one
                )
                seen.update({f"{drop_dry}": len(one[0])})
        seen.update(
            {"several": W > 1, layout: 1, "dead rows": -(-world.config.V // W) * world.n % B > 0}
        )

    law()
    assert {"several", "dead rows", "bestfit", "concat", "binned"} <= {
        case for case in seen if seen[case]
    }
    assert seen["True"] > seen["False"] > 0
