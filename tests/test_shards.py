"""Shards: what is written is read, whatever is broken is named, and entries are documents of the stream."""

import contextlib
import errno
import json
import os
import threading
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nanochat.shard_source import ShardSource

from nanochat import shard_source, shards, sources
from nanochat.common import atomic_open, hash_file, write_json
from nanochat.pairs import open_entries, scan_file
from nanochat.shards import (
    ShardWriter,
    ends_follow,
    new_manifest,
    read_index,
    read_manifest,
    read_tokens,
    shard_dtype,
)
from tests.toy import BOS, ByteTokenizer, examples

GOLDEN = Path(__file__).parent / "golden" / "gpts"
E = BOS


class Tokenizer(ByteTokenizer):
    """A byte tokenizer with a vocabulary of any size."""

    def __init__(self, vocab_size: int = BOS + 1, fingerprint: str = "bytes"):
        super().__init__(fingerprint)
        self.vocab_size = vocab_size

    def get_vocab_size(self) -> int:
        return self.vocab_size


def write_pair(path: Path, entries, prefixes=None, vocab_size: int = BOS + 1) -> shards.Written:
    """A pair of the given entries, PATH without suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with ShardWriter(path, vocab_size=vocab_size) as writer:
        writer.add(np.array([i for e in entries for i in e], np.int64), [len(e) for e in entries],
                   prefixes or [0] * len(entries))
    return writer.written


def write_folder(folder: Path, pairs, *, max_length=0, overlap_size=0, tokenizer=None, groups=None):
    """Pairs {name: (entries, prefixes)} and their manifest.json."""
    tokenizer = tokenizer or Tokenizer()
    records = {}
    for name, (entries, prefixes) in pairs.items():
        written = write_pair(folder / name, entries, prefixes, tokenizer.get_vocab_size())
        followers = [*(prefixes or [0] * len(entries))[1:], 0]
        records[name] = {"input": {"name": f"{name}.jsonl"}, **asdict(written), "documents": sum(
            entry[-1:] == [E] and not prefix for entry, prefix in zip(entries, followers)),
                         "skipped": {"count": 0, "lines": []}, **({"groups": groups} if groups else {})}
    arguments = {"max_length": max_length, "overlap_size": overlap_size}
    about = {"fingerprint": tokenizer.fingerprint, "eod": E, "vocab_size": tokenizer.get_vocab_size(), "name": "toy"}
    write_json(folder / "manifest.json", new_manifest(about, arguments, records))


def scan(root: Path) -> sources.Manifest:
    files = sorted(root.rglob("*.bin"))
    return {"root": str(root), "files": [scan_file(f, f.relative_to(root).as_posix()) for f in files]}


def open_source(root: Path, tokenizer=None, **kwargs) -> ShardSource:
    return ShardSource(scan(root), tokenizer or Tokenizer(), **kwargs)


def read_all(source: ShardSource, unit_size: int = 3) -> list[list[int]]:
    """All documents without their BOS, after checking that it is there and that lengths and overlaps agree."""
    found = []
    for group, size in enumerate(source.groups.tolist()):
        for unit in range(-(-size // unit_size)):
            documents = source.fetch(group, unit, unit_size)
            assert source.lengths(group, unit, unit_size).tolist() == list(map(len, documents))
            assert len(source.overlaps(group, unit, unit_size)) == len(documents)
            assert source.encode(documents) is documents
            if not source.keep_eod:
                assert all(d[0] == source.eod for d in documents)
            found += [d.tolist() if source.keep_eod else d.tolist()[1:] for d in documents]
    return found


def without_eod(entry):
    return entry[:-1] if entry and entry[-1] == E else entry


# ---- laws -----------------------------------------------------------------------------------------------------------

@st.composite
def batches(draw):
    """(vocab_size, [[(ids, prefix), ...], ...]): entries of any kind, cut into calls of `add`."""
    vocab_size = draw(st.sampled_from([257, 65535, 65536, 100_000]))
    ids = st.integers(0, vocab_size - 1) | st.just(vocab_size - 1)
    entry = st.tuples(st.lists(ids, max_size=6), st.integers(0, 65535))
    return vocab_size, draw(st.lists(st.lists(entry, max_size=5), max_size=5).filter(any))


@given(batches())
@settings(max_examples=examples(3))
def test_what_is_written_is_read(tmp_path_factory, case):
    vocab_size, calls = case
    path = tmp_path_factory.mktemp("pair") / "a.b"
    with ShardWriter(path, vocab_size=vocab_size) as writer:
        for call in calls:
            writer.add(np.array([i for ids, _ in call for i in ids], np.uint32),
                       np.array([len(ids) for ids, _ in call], np.int64), np.array([p for _, p in call], np.uint16))
    entries = [entry for call in calls for entry in call]
    index = read_index(path.parent / "a.b.idx")
    ids = read_tokens(index)
    assert [ids[a:b].tolist() for a, b in pairwise(index.offsets.tolist())] == [list(ids) for ids, _ in entries]
    assert index.prefixes.tolist() == [prefix for _, prefix in entries]
    assert index.dtype.itemsize == (2 if vocab_size <= 65535 else 4)
    assert sorted(os.listdir(path.parent)) == ["a.b.bin", "a.b.idx"]
    files = [path.parent / f"a.b{ending}" for ending in (".bin", ".idx")]
    assert asdict(writer.written) == {
        "entries": len(entries), "tokens": sum(len(ids) for ids, _ in entries), "bin_bytes": files[0].stat().st_size,
        "bin_hash": hash_file(files[0]), "idx_hash": hash_file(files[1])}


def test_the_bytes_are_those_of_the_format(tmp_path):
    write_pair(tmp_path / "a", [[1, 2, E], [3], [258]], [0, 7, 1], vocab_size=300)
    assert (tmp_path / "a.bin").read_bytes().hex(" ", 2) == "0100 0200 0001 0300 0201"
    assert (tmp_path / "a.idx").read_bytes() == (
        b"GPTS" b"\1\0\0\0" b"\2\0\0\0" b"\3\0\0\0"
        + b"".join(offset.to_bytes(8, "little") for offset in (0, 3, 4, 5)) + b"\0\0" b"\7\0" b"\1\0")


def test_types_by_vocabulary():
    assert [shard_dtype(n).itemsize for n in (2, 65535, 65536, 200_000)] == [2, 2, 4, 4]


@st.composite
def windowed(draw):
    """Documents cut into windows: (entries, prefixes, overlap)."""
    overlap = draw(st.integers(0, 2))
    entries, prefixes = [], []
    for _ in range(draw(st.integers(1, 12))):
        for window in range(number := draw(st.integers(1, 3))):
            prefix = overlap if window else 0
            fewest = prefix + (window + 1 < number or prefix > 0)
            ids = draw(st.lists(st.integers(0, E - 1), min_size=fewest, max_size=6))
            entries.append(ids + [E] * (window + 1 == number))
            prefixes.append(prefix)
    return entries, prefixes, overlap


@given(windowed(), st.integers(1, 5), st.integers(1, 4), st.booleans())
@settings(max_examples=examples(3))
def test_the_source_gives_entries_without_eod_with_or_without_manifest(tmp_path_factory, case, unit_size, group,
                                                                       keep_eod):
    entries, prefixes, overlap = case
    root = tmp_path_factory.mktemp("root")
    sizes = [min(group, len(entries) - i) for i in range(0, len(entries), group)]
    write_folder(root / "web", {"a": (entries, prefixes)}, max_length=6, overlap_size=overlap, groups=sizes)
    expected = entries if keep_eod else [without_eod(e) for e in entries]
    source = open_source(root, keep_eod=keep_eod)
    assert source.groups.tolist() == sizes
    assert read_all(source, unit_size) == expected
    assert [o for g in range(len(sizes)) for o in source.overlaps(g, 0, group)] == prefixes
    (root / "web" / "manifest.json").unlink()
    assert read_all(open_source(root, keep_eod=keep_eod), unit_size) == expected


def test_entries_of_eod_only_and_without_anything(tmp_path):
    entries = [[], [E], [1, E], [], [E], [2], [3, E]]
    write_pair(tmp_path / "a", entries)
    assert read_all(open_source(tmp_path)) == [[], [], [1], [], [], [2], [3]]
    assert read_all(open_source(tmp_path, keep_eod=True)) == entries
    write_folder(tmp_path / "b", {"b": (entries, None)})
    assert read_all(open_source(tmp_path / "b"))[:2] == [[], []]


def test_a_pair_of_empty_entries_has_no_ids(tmp_path):
    write_pair(tmp_path / "a", [[], []])
    assert read_all(open_source(tmp_path)) == [[], []]


class NoEnds:
    """A reader with no E in sight."""

    mapped = True

    def read(self, begin, end):
        return np.zeros(end - begin, np.uint16)


def test_the_manifest_decides_whether_ids_are_looked_at(tmp_path):
    """Where all later windows overlap the index tells; where none does, the ids must be looked at."""
    pair = {"a": ([[1, 2], [2, 3, E], [4, E]], [0, 1, 0])}
    cases = [({"max_length": 0, "overlap_size": 0}, True), ({"max_length": 2, "overlap_size": 1}, True),
             ({"max_length": 2, "overlap_size": 0}, False)]
    for number, (arguments, index_only) in enumerate(cases):
        root = tmp_path / str(number)
        write_folder(root, pair, **arguments)
        assert ends_follow(read_manifest(root)) == index_only
        source = open_source(root)
        source.fetch(0, 0, 1)
        shard = source._shards[0]
        no_ends = NoEnds()
        source._shards[0] = shard_source._Shard(shard.index, no_ends, shard.ends_follow)
        assert source.lengths(0, 0, 3).tolist() == ([3, 3, 2] if index_only else [3, 4, 3])
    assert not ends_follow(None)


def test_a_pair_that_the_manifest_does_not_list_is_a_foreign_one(tmp_path):
    write_folder(tmp_path, {"a": ([[1, E]], None)})
    write_pair(tmp_path / "b", [[1, 2], [3, E]])
    assert read_all(open_source(tmp_path)) == [[1], [1, 2], [3]]


# ---- the source -----------------------------------------------------------------------------------------------------

def test_groups_and_places_over_several_files(tmp_path):
    counts = {"code/a": 2500, "web/b": 3, "web/c": 1024}
    for name, n in counts.items():
        write_pair(tmp_path / name, [[i % 200, E] for i in range(n)])
    source = open_source(tmp_path)
    assert source.groups.tolist() == [1024, 1024, 452, 3, 1024]
    assert [source.locate(g) for g in range(5)] == [("code/a.bin", 0), ("code/a.bin", 1), ("code/a.bin", 2),
                                                    ("web/b.bin", 0), ("web/c.bin", 0)]
    assert read_all(source, 64) == [[i % 200] for n in counts.values() for i in range(n)]
    assert source.fingerprint == sources.fingerprint(scan(tmp_path))


def test_documents_behind_an_end_are_plain_read_only_views_and_files_are_opened_when_used(tmp_path):
    """The end of the document before is the BOS of this one. Others are copied: the first, and later windows."""
    write_pair(tmp_path / "a", [[1, E], [2, 3], [4, E]])
    write_pair(tmp_path / "b", [[5, E], [200, E]], vocab_size=100_000)
    source = open_source(tmp_path)
    assert source._shards == [None, None]
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    [first, a, later], [_, b] = source.fetch(0, 0, 64), source.fetch(1, 0, 64)
    assert [d.tolist() for d in (first, a, later, b)] == [[E, 1], [E, 2, 3], [E, 4], [E, 200]]
    assert {type(d) for d in (first, a, later, b)} == {np.ndarray}
    assert (first.dtype, a.dtype, later.dtype, b.dtype) == (np.uint16, np.uint16, np.uint16, np.uint32)
    assert [d.flags.owndata for d in (first, a, later, b)] == [True, False, True, False]
    assert not a.flags.writeable and not b.flags.writeable
    stored = [*open_source(tmp_path, keep_eod=True).fetch(0, 0, 64)]
    assert [d.tolist() for d in stored] == [[1, E], [2, 3], [4, E]]
    assert not any(d.flags.owndata for d in stored)
    assert before is None or len(os.listdir("/proc/self/fd")) == before  # no descriptor a shard
    write_pair(tmp_path / "wide" / "c", [[5, E], [70_000, E]], vocab_size=100_000)
    [_, wide] = open_source(tmp_path / "wide", Tokenizer(100_000)).fetch(0, 0, 64)
    assert wide.tolist() == [E, 70_000] and wide.dtype == np.uint32 and not wide.flags.owndata


def test_views_outlive_the_source(tmp_path):
    write_pair(tmp_path / "a", [[E], [1, 2, 3, E]])
    [_, view] = open_source(tmp_path).fetch(0, 0, 2)
    assert view.tolist() == [E, 1, 2, 3] and not view.flags.owndata


def test_threads_open_a_file_once(tmp_path, monkeypatch):
    write_pair(tmp_path / "a", [[i, E] for i in range(200)])
    source = open_source(tmp_path)
    opened, start, got = [], threading.Barrier(8), []
    monkeypatch.setattr(shard_source, "open_entries", lambda path: opened.append(path) or open_entries(path))

    def work() -> None:
        start.wait()
        got.append(sum(d.tolist()[1] for d in source.fetch(0, 0, 256)))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [sum(range(200))] * 8
    assert len(opened) == 1


def test_opening_looks_at_no_offsets_but_the_ends(tmp_path):
    """So it costs the same for any number of entries, and what is broken inside is told when it is read."""
    write_pair(tmp_path / "a", [[i, E] for i in range(100)])
    patch(tmp_path / "a.idx", 16 + 8 * 50, (97).to_bytes(8, "little"))
    source = open_source(tmp_path)
    assert len(source.fetch(0, 0, 10)) == 10
    with pytest.raises(ValueError, match=r"a\.idx: the offsets of entries 40 to 50 do not ascend.*verify"):
        source.fetch(0, 4, 10)
    with pytest.raises(ValueError, match="do not ascend"):
        source.lengths(0, 4, 10)


@pytest.mark.parametrize("value, unit", [(-5, 1), (1 << 40, 0)])
def test_offsets_outside_the_file_are_refused(tmp_path, value, unit):
    write_pair(tmp_path / "a", [[i, E] for i in range(20)])
    patch(tmp_path / "a.idx", 16 + 8 * 10, value.to_bytes(8, "little", signed=True))
    with pytest.raises(ValueError, match=rf"a\.idx: the offsets of entries {10 * unit} to {10 * unit + 10} do not"):
        open_source(tmp_path).fetch(0, unit, 10)


def test_a_prefix_longer_than_its_entry_is_refused(tmp_path):
    write_pair(tmp_path / "a", [[1, E], [2, E]], [0, 3])
    source = open_source(tmp_path)
    with pytest.raises(ValueError, match=r"a\.idx: entry 1 is shorter than its prefix"):
        source.overlaps(0, 0, 64)


# ---- what pins a file -----------------------------------------------------------------------------------------------

def test_a_changed_index_has_another_footer(tmp_path):
    n = 20_000
    write_pair(tmp_path / "a", [[1, 2, E]] * n)
    first = scan_file(tmp_path / "a.bin", "web/a.bin")
    assert (first["name"], first["size"], sum(first["groups"])) == ("web/a.bin", 6 * n, n)
    assert set(first) == {"name", "size", "footer", "groups"}
    patch(tmp_path / "a.idx", 16 + 8 * 5, (16).to_bytes(8, "little"))  # near the beginning
    head = scan_file(tmp_path / "a.bin", "web/a.bin")
    patch(tmp_path / "a.idx", 16 + 8 * (n + 1) + 2 * (n - 1), b"\1\0")  # the last prefix
    tail = scan_file(tmp_path / "a.bin", "web/a.bin")
    assert len({first["footer"], head["footer"], tail["footer"]}) == 3
    assert {e["size"] for e in (first, head, tail)} == {6 * n}


def test_the_manifest_must_be_of_this_pair(tmp_path):
    write_folder(tmp_path, {"a": ([[1, E], [2, E]], None)})
    write_pair(tmp_path / "a", [[1, E]])
    with pytest.raises(ValueError, match=r"a\.bin: entries 1, manifest\.json says 2; delete it and rerun"):
        scan(tmp_path)
    write_folder(tmp_path, {"a": ([[1, E], [2, E]], None)}, groups=[1, 3])
    with pytest.raises(ValueError, match=r"a\.bin: the groups in manifest\.json hold 4 entries, the file 2"):
        scan(tmp_path)


def test_manifests_are_read_once_and_again_when_they_change(tmp_path, monkeypatch):
    write_folder(tmp_path, {name: ([[1, E]], None) for name in "abc"})
    reads = []
    monkeypatch.setattr(shards, "read_json", lambda path: reads.append(path) or json.loads(Path(path).read_bytes()))
    assert len(scan(tmp_path)["files"]) == 3
    assert len(reads) == 1
    write_folder(tmp_path, {"a": ([[1, E], [2, E]], None)}, groups=[1, 1])
    assert scan_file(tmp_path / "a.bin", "a.bin")["groups"] == [1, 1]
    assert len(reads) == 2


@pytest.mark.parametrize("value, message", [
    ([], "list"), ({"format": "x", "version": 1}, "expected"), ({"format": "nanochat-shards", "version": 9}, "9"),
    (new_manifest({}, {}, {}), "tokenizer lacks eod"), ({**new_manifest({}, {}, {}), "tokenizer": 3}, "is int"),
    ({**new_manifest({"fingerprint": "t", "eod": 1, "vocab_size": 2}, {"max_length": 0, "overlap_size": 0}, {}),
      "shards": []}, "shards is list"),
    (new_manifest({"fingerprint": "t", "eod": 1, "vocab_size": 2}, {"max_length": 0, "overlap_size": 0}, {"a": {}}),
     "a lacks bin_bytes"),
])
def test_a_broken_manifest_is_named(tmp_path, value, message):
    write_json(tmp_path / "manifest.json", value)
    with pytest.raises(ValueError, match=rf"manifest\.json: .*{message}"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json: not valid JSON"):
        read_manifest(tmp_path)


# ---- bad files ------------------------------------------------------------------------------------------------------

def patch(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as f:
        f.seek(at)
        f.write(data)


def truncate(path: Path, size: int) -> None:
    with open(path, "r+b") as f:
        f.truncate(size)


@pytest.mark.parametrize("damage, message", [
    (lambda p: truncate(p / "a.bin", 6), r"a\.bin: 3 tokens on disk, header says 5; delete it and rerun "
                                         r"scripts\.tok_shards"),
    (lambda p: truncate(p / "a.bin", 7), r"a\.bin: 3\.5 tokens on disk, header says 5"),
    (lambda p: patch(p / "a.bin", 10, b"x"), r"a\.bin: 5\.5 tokens on disk, header says 5"),
    (lambda p: patch(p / "a.bin", 10, b"xx"), r"a\.bin: 6 tokens on disk, header says 5"),
    (lambda p: truncate(p / "a.idx", 40), r"a\.idx: 40 bytes, expected 44 for 2 entries"),
    (lambda p: patch(p / "a.idx", 44, b"x"), r"a\.idx: 45 bytes, expected 44"),
    (lambda p: truncate(p / "a.idx", 9), r"a\.idx: 9 bytes, expected a header of 16"),
    (lambda p: truncate(p / "a.idx", 0), r"a\.idx: 0 bytes, expected a header of 16"),
    (lambda p: patch(p / "a.idx", 0, b"MMID"), r"a\.idx: it begins with b'MMID', expected b'GPTS'"),
    (lambda p: patch(p / "a.idx", 4, b"\2"), r"a\.idx: format version 2, expected 1"),
    (lambda p: patch(p / "a.idx", 8, b"\3"), r"a\.idx: type code 3, expected 2 \(uint16\) or 4 \(uint32\)"),
    (lambda p: patch(p / "a.idx", 12, b"\0"), r"a\.idx: an empty shard \(0 entries\)"),
    (lambda p: patch(p / "a.idx", 16, b"\1"), r"a\.idx: the first offset is 1, expected 0"),
    (lambda p: (p / "a.idx").unlink(), r"a\.idx: not there, but a\.bin needs it"),
    (lambda p: (p / "a.bin").unlink(), r"a\.bin: not there, but a\.idx needs it"),
])
def test_a_bad_pair_is_named(tmp_path, damage, message):
    write_pair(tmp_path / "a", [[1, 2, E], [3, E]])
    assert len(read_index(tmp_path / "a.bin")) == 2
    manifest = scan(tmp_path)
    damage(tmp_path)
    for path in ("a.bin", "a.idx"):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            read_index(tmp_path / path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        scan_file(tmp_path / "a.bin", "a.bin")
    with pytest.raises((ValueError, FileNotFoundError), match=message):  # when it is built, or when it is first used
        ShardSource(manifest, Tokenizer()).fetch(0, 0, 64)


def test_a_pair_that_is_gone_or_another_one_is_named(tmp_path):
    write_pair(tmp_path / "a", [[1, 2, E], [3, E]])
    manifest = scan(tmp_path)
    write_pair(tmp_path / "a", [[1, 2, E], [3, 4], [4, E]])
    with pytest.raises(ValueError, match=r"a\.bin: 3 entries, 2 when this run began; bring the old file back"):
        ShardSource(manifest, Tokenizer()).fetch(0, 0, 64)
    write_pair(tmp_path / "a", [[1, 2, E, 3, E]])  # of the same size
    with pytest.raises(ValueError, match=r"a\.bin: 1 entries, 2 when this run began"):
        ShardSource(manifest, Tokenizer()).fetch(0, 0, 64)
    for path in list(tmp_path.iterdir()):
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"a\.idx: the file is gone; bring it back"):
        ShardSource(manifest, Tokenizer())


def test_shards_of_another_tokenizer_are_refused(tmp_path):
    write_folder(tmp_path / "web", {"a": ([[1, E]], None)}, tokenizer=Tokenizer(fingerprint="theirs"))
    with pytest.raises(ValueError, match=r"web: its shards were made with tokenizer theirs, this run has ours; "
                                         r".*--tokenizer-dir"):
        open_source(tmp_path, Tokenizer(fingerprint="ours"))
    assert read_all(open_source(tmp_path, Tokenizer(fingerprint="theirs"))) == [[1]]


def test_ids_too_small_for_the_vocabulary_are_refused(tmp_path):
    write_pair(tmp_path / "a", [[1, E]])
    with pytest.raises(ValueError, match=r"a\.bin: its ids are uint16, too small for a vocabulary of 65,537"):
        open_source(tmp_path, Tokenizer(65537))
    assert read_all(open_source(tmp_path, Tokenizer(65536))) == [[1]]


# ---- writing that fails ---------------------------------------------------------------------------------------------

class Disk:
    """A file on a disk that is full after some bytes, whether they are noticed when written, flushed or synced."""

    def __init__(self, file, room: int):
        self.file, self.room = file, room

    def write(self, data):
        self.room -= memoryview(data).nbytes
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("full", [".bin", ".idx", "sync"])
@pytest.mark.parametrize("old", [False, True])
def test_a_full_disk_leaves_nothing_or_what_was_there(tmp_path, monkeypatch, full, old):
    if old:
        write_pair(tmp_path / "a", [[9, E]])
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    @contextlib.contextmanager
    def small(path):
        with atomic_open(path) as f:
            yield Disk(f, 50)

    if full == "sync":
        monkeypatch.setattr(shards.os, "fsync", lambda fd: Disk(None, -1).write(b"x"))
    with pytest.raises(OSError, match="No space left"), ShardWriter(tmp_path / "a", vocab_size=300) as writer:
        if full == ".bin":
            writer._files._bin = Disk(writer._files._bin, 100)
        if full == ".idx":
            monkeypatch.setattr(shards, "atomic_open", small)
        for _ in range(100):
            writer.add(np.array([1, E]), [2], [0])
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert len(before) == 2 * old
    assert writer.written is None


def test_an_exception_or_bad_arrays_leave_nothing(tmp_path):
    add = lambda *args: lambda writer: writer.add(*map(np.array, args))
    cases = [(lambda writer: 1 / 0, ZeroDivisionError, "division"), (lambda writer: None, ValueError, "0 entries"),
             (add([1, 300], [2], [0]), ValueError, r"got id 1 \.\. 300, expected 0 \.\. 299"),
             (add([-1], [1], [0]), ValueError, r"got id -1"),
             (add([1], [1], [70_000]), ValueError, "got prefix 70000"),
             (add([1], [2], [0]), ValueError, "fit together"), (add([1], [1], [0, 0]), ValueError, "fit together"),
             (add([1], [2, -1], [0, 0]), ValueError, "fit together")]
    for act, kind, message in cases:
        with pytest.raises(kind, match=message), ShardWriter(tmp_path / "a", vocab_size=300) as writer:
            act(writer)
        assert list(tmp_path.iterdir()) == []


def test_a_crash_between_the_renames_never_shows_a_torn_pair(tmp_path, monkeypatch):
    """Whatever rename is the last one that happens, there is a whole pair or none that can be opened."""
    write_pair(tmp_path / "a", [[9, E]])
    replace, seen = os.replace, []

    def watch(source, target):
        replace(source, target)
        try:
            seen.append(read_index(tmp_path / "a.bin").num_tokens)
        except FileNotFoundError as e:
            seen.append(Path(str(e).split(":")[0]).name)

    monkeypatch.setattr(os, "replace", watch)
    write_pair(tmp_path / "a", [[1, 2, 3, E]])
    assert seen == ["a.idx", 4]


def test_a_rename_that_fails_leaves_no_half(tmp_path, monkeypatch):
    replace = os.replace

    def fail(source, target):
        if str(target).endswith(".idx"):
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="Input/output"):
        write_pair(tmp_path / "a", [[1, E]])
    assert list(tmp_path.iterdir()) == []


def test_views_of_a_pair_that_is_replaced_stay(tmp_path):
    write_pair(tmp_path / "a", [[E], [1, 2, 3, E]])
    source = open_source(tmp_path)
    [_, view] = source.fetch(0, 0, 2)
    write_pair(tmp_path / "a", [[7, E]])
    assert view.tolist() == source.fetch(0, 0, 2)[1].tolist() == [E, 1, 2, 3]


# ---- the other project's files --------------------------------------------------------------------------------------

def test_shards_written_by_gpt_simple(tmp_path):
    """A pair that gpt-simple 0.1.2 wrote, and what its own reader says of it; dev/compare_gpt_simple.py made both."""
    told = json.loads((GOLDEN / "tiny.json").read_text())
    index = read_index(GOLDEN / "tiny.bin")
    ids = read_tokens(index)
    assert [ids[a:b].tolist() for a, b in pairwise(index.offsets.tolist())] == told["entries"]
    assert index.prefixes.tolist() == told["prefixes"]
    tokenizer = Tokenizer(told["vocab_size"])
    tokenizer.get_bos_token_id = lambda: told["eod"]
    manifest = {"root": str(GOLDEN), "files": [scan_file(GOLDEN / "tiny.bin", "tiny.bin")]}
    expected = [e[:-1] if e[-1] == told["eod"] else e for e in told["entries"]]
    assert read_all(ShardSource(manifest, tokenizer)) == expected
    assert sum(map(len, expected)) < len(ids), "some entries end a document"
    assert any(p and told["entries"][i - 1][-1] == told["eod"] for i, p in enumerate(told["prefixes"])), \
        "a document's end is followed by a window that repeats its tail"
    write_pair(tmp_path / "tiny", told["entries"], told["prefixes"], vocab_size=told["vocab_size"])
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"tiny{ending}").read_bytes() == (GOLDEN / f"tiny{ending}").read_bytes()
