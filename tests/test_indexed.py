"""Megatron's files: what is written is read, byte for byte as Megatron writes it, and whatever is broken is named."""

import json
import os
import struct
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import indexed
from nanochat.common import hash_file
from nanochat.indexed import HEADER, IndexedDataset, IndexedDatasetBuilder, dtype_code, open_documents
from nanochat.readers import MappedReader, PreadReader, open_reader, read_near
from tests.toy import examples

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden" / "megatron"


def write(prefix: Path, documents, dtype=np.uint16) -> Path:
    """A pair of documents, each a list of sequences. Returns its .bin."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(np.array([i for s in document for i in s], np.int64), [len(s) for s in document])
    builder.finalize(f"{prefix}.idx")
    return Path(f"{prefix}.bin")


# ---- the format -----------------------------------------------------------------------------------------------------

@pytest.mark.skipif(not GOLDEN.exists(), reason=f"needs {GOLDEN}, which megatron-core wrote")
@pytest.mark.parametrize("name", ["a", "b"])
def test_files_that_megatron_wrote_are_read_and_written_again_byte_for_byte(tmp_path, name):
    told = json.loads((GOLDEN / "golden.json").read_text())["sources"][name]
    dataset = IndexedDataset(GOLDEN / name)
    assert (len(dataset), len(dataset.document_indices) - 1) == (told["documents"],) * 2
    assert int(dataset.sequence_lengths.sum()) == told["tokens"]
    builder, copy = (IndexedDatasetBuilder(tmp_path / f"{i}.bin", dtype=dataset.dtype) for i in "xy")
    for i in range(len(dataset)):
        builder.add_item(dataset[i])
        builder.end_document()
    builder.finalize(tmp_path / "x.idx")
    copy.add_index(GOLDEN / name)
    copy.finalize(tmp_path / "y.idx")
    for ending in ("bin", "idx"):
        for made in "xy":
            data = (tmp_path / f"{made}.{ending}").read_bytes()
            assert sha256(data).hexdigest() == told["files"][f"{name}.{ending}"]["sha256"]


def test_the_bytes_are_those_of_the_format(tmp_path):
    builder = IndexedDatasetBuilder(tmp_path / "a.bin", dtype=np.int32, multimodal=True)
    builder.add_document(np.array([1, 2, 3]), [2, 1], [0, 5])
    builder.add_item([4], mode=7)
    builder.end_document()
    builder.end_document()
    hashes = builder.finalize(tmp_path / "a.idx")
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<4i", 1, 2, 3, 4)
    assert (tmp_path / "a.idx").read_bytes() == (
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 3, 4) + struct.pack("<3i", 2, 1, 1) + struct.pack("<3q", 0, 8, 12)
        + struct.pack("<4q", 0, 2, 3, 3) + bytes([0, 5, 7]))
    assert hashes == tuple(hash_file(tmp_path / f"a.{ending}") for ending in ("bin", "idx"))
    read = IndexedDataset(tmp_path / "a", multimodal=True)
    assert [(ids.tolist(), int(mode)) for ids, mode in (read[0], read[2])] == [([1, 2], 0), ([4], 7)]
    assert read[1:3][1].tolist() == [5, 7]
    assert IndexedDataset(tmp_path / "a").sequence_modes is None, "modes are left alone unless asked for"


sequences = st.lists(st.integers(0, 100), max_size=5)
corpora = st.lists(st.lists(sequences, max_size=3), max_size=8)


@given(corpora, corpora, st.sampled_from(["u1", "i1", "<i2", "<i4", "<i8", "<u2"]), st.booleans())
@settings(max_examples=examples(0.8))
def test_what_is_written_is_read(tmp_path_factory, first, second, dtype, mmap):
    folder = tmp_path_factory.mktemp("p.q")
    write(folder / "a.b", first, dtype)
    builder = IndexedDatasetBuilder(folder / "c.bin", dtype=dtype)
    builder.add_index(folder / "a.b")
    flat = [s for d in second for s in d]
    for document in second:
        for ids in document:
            builder.add_item(np.array(ids, np.int64))
        builder.end_document()
    builder.finalize(folder / "c.idx")
    dataset = IndexedDataset(folder / "c", mmap=mmap)
    expected = [s for d in first for s in d] + flat
    assert IndexedDataset.exists(folder / "c") and not IndexedDataset.exists(folder / "d")
    assert (len(dataset), dataset.dtype) == (len(expected), np.dtype(dtype))
    assert [dataset[i].tolist() for i in range(len(dataset))] == expected == [s.tolist() for s in dataset[:]]
    assert [len(s) for s in expected] == dataset.sequence_lengths.tolist()
    assert [expected[a:b] for a, b in pairwise(dataset.document_indices.tolist())] == first + second
    if expected:
        ids = expected[-1]
        assert dataset[-1].tolist() == ids and dataset.get(len(expected) - 1, 1 * bool(ids)).tolist() == ids[1:]
        assert dataset.get(-1, 0, len(ids) // 2).tolist() == ids[:len(ids) // 2]
        assert not dataset[0].flags.writeable
    if first + second:
        documents = open_documents(folder / "c.bin")
        starts, ends, pieces = documents.spans(0, len(documents))
        all_ids = [i for s in expected for i in s]
        assert pieces is None
        assert [all_ids[a:b] for a, b in zip(starts, ends)] == [[i for s in d for i in s] for d in first + second]


def test_documents_that_are_scattered_in_the_file_are_named_by_their_stretches(tmp_path):
    path = write(tmp_path / "a", [[[1, 2], [3]], [[4, 5, 6]], [], [[7]]])
    idx = bytearray((tmp_path / "a.idx").read_bytes())
    idx[HEADER.size:HEADER.size + 48] = struct.pack("<4i4q", 3, 1, 2, 1, 8, 0, 2, 12)  # 5 6 7 | 1, 2 3, -, 7
    (tmp_path / "a.idx").write_bytes(idx)
    documents = open_documents(path)
    assert [d.tolist() for d in IndexedDataset(tmp_path / "a")[:]] == [[5, 6, 7], [1], [2, 3], [7]]
    starts, ends, pieces = documents.spans(0, 4)
    assert (starts.tolist(), ends.tolist()) == ([0, 4, 6, 6], [4, 6, 6, 7])
    assert pieces == [(4, 7), (0, 1), (1, 3), (6, 7)]
    starts, ends, pieces = documents.spans(1, 3)
    assert (starts.tolist(), ends.tolist(), pieces) == ([1, 3], [3, 3], None), "a part of them is in order"


# ---- what is wrong --------------------------------------------------------------------------------------------------

def patch(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as f:
        f.seek(at)
        f.write(data)


@pytest.mark.parametrize("act, message", [
    (lambda p: p.write_bytes(b"MMIDIDX"), "a.idx: 7 bytes, expected a header of 34; it was cut short"),
    (lambda p: p.write_bytes(p.read_bytes()[:-5]), r"a\.idx: \d+ bytes, expected \d+ for 3 sequences and 3 document b"),
    (lambda p: patch(p, 0, b"GPTS"), r"a\.idx: it begins with b'GPTS', expected b'MMIDIDX"),
    (lambda p: patch(p, 9, b"\2"), r"a\.idx: format version 2, expected 1"),
    (lambda p: patch(p, 17, b"\11"), r"a\.idx: type code 9, expected 1 to 8"),
    (lambda p: patch(p, 17, b"\6"), r"a\.idx: its elements are float64, expected ids"),
    (lambda p: patch(p, 17, b"\7"), r"a\.idx: its elements are float32, expected ids"),
    (lambda p: patch(p, 46 + 16, struct.pack("<q", 10)), r"a\.idx: sequence 2 is 1 ids at byte 10, which is no place "
                                                         r"in its \.bin of 10 bytes"),
    (lambda p: patch(p, 46, struct.pack("<q", -2)), r"a\.idx: sequence 0 is 2 ids at byte -2"),
    (lambda p: patch(p, 70 + 16, struct.pack("<q", 2)), r"a\.idx: its document boundaries go from 0 to 2, expected 0 "
                                                        r"to 3"),
    (lambda p: (p.parent / "a.bin").unlink(), r"a\.bin: no such file, but a\.idx is there; bring it back"),
    (lambda p: p.unlink(), r"a\.idx: no such file, but a\.bin is there; bring it back"),
    (lambda p: (p.parent / "a.bin").write_bytes(bytes(9)), r"a\.idx: sequence 2 is 1 ids at byte 8, .* of 9 bytes"),
])
def test_bad_files_are_named_when_they_are_opened(tmp_path, act, message):
    path = write(tmp_path / "a", [[[1, 2], [3, 4]], [[5]]])
    act(tmp_path / "a.idx")
    for open_it in (lambda: IndexedDataset(tmp_path / "a"), lambda: open_documents(path)):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            open_it()


def test_what_is_broken_inside_is_named_when_it_is_used(tmp_path):
    path = write(tmp_path / "a", [[[i]] for i in range(10)])
    patch(tmp_path / "a.idx", 34 + 40 + 8 * 4, struct.pack("<q", 400))
    patch(tmp_path / "a.idx", 34 + 120 + 8 * 7, struct.pack("<q", 3))
    dataset, documents = IndexedDataset(tmp_path / "a"), open_documents(path)
    assert dataset[3].tolist() == [3] and documents.spans(0, 4)[0].tolist() == [0, 1, 2, 3]
    for read in (lambda: dataset[4], lambda: dataset[2:6], lambda: documents.spans(3, 5)):
        with pytest.raises(ValueError, match=r"a\.idx: sequence 4 is 1 ids at byte 400, which is no place"):
            read()
    patch(tmp_path / "a.idx", 34 + 120 + 8 * 9, struct.pack("<q", 50))
    for first, last in ((6, 9), (8, 9)):
        with pytest.raises(ValueError, match=rf"a\.idx: the boundaries of documents {first} to {last} run backw"):
            documents.spans(first, last)


def test_what_is_asked_for_must_be_there(tmp_path):
    write(tmp_path / "a", [[[1, 2]], [[3]]])
    dataset = IndexedDataset(tmp_path / "a")
    for number in (2, -3):
        with pytest.raises(IndexError, match="it has 2"):
            dataset[number]
    for offset, length in ((0, 3), (3, None), (-1, 1), (1, -1)):
        with pytest.raises(ValueError, match=r"of sequence 0, which has 2"):
            dataset.get(0, offset, length)
    with pytest.raises(ValueError, match="step 2"):
        dataset[::2]


def test_nothing_is_there_before_the_end_and_nothing_after_an_error(tmp_path):
    for act, message in ((lambda b: b.add_item([70_000]), "that uint16 can hold"),
                         (lambda b: b.add_item([-1]), "that uint16 can hold"),
                         (lambda b: b.add_item([0.5]), "float64 ids"),
                         (lambda b: b.add_document([1, 2], [1]), "add up to 1"),
                         (lambda b: (b.add_item([1]), b.finalize(tmp_path / "a.idx")), r"1 sequence\(s\) behind")):
        builder = IndexedDatasetBuilder(tmp_path / "a.bin", dtype=np.uint16)
        with pytest.raises(ValueError, match=message):
            act(builder)
        assert not {"a.bin", "a.idx"} & set(os.listdir(tmp_path))
        assert "behind" not in message or not os.listdir(tmp_path), "finalize is the end, well or not"
        builder.abandon()
        assert os.listdir(tmp_path) == []
    builder = IndexedDatasetBuilder(tmp_path / "a.bin", dtype=np.uint16)
    del builder
    assert os.listdir(tmp_path) == []
    for bad in (np.float32, np.uint32, "S1"):
        with pytest.raises(ValueError, match="expected one of uint8, int8, int16, int32, int64, uint16"):
            dtype_code(bad)
    assert [dtype_code(indexed.best_dtype(n)) for n in (257, 65499, 65500)] == [8, 8, 4]


# ---- readers --------------------------------------------------------------------------------------------------------

@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)), max_size=8), st.integers(0, 6))
@settings(max_examples=examples(1.2))
def test_readers_give_the_ranges_asked_for_and_read_neighbours_together(tmp_path_factory, pairs, near):
    path = tmp_path_factory.mktemp("r") / "a.bin"
    ids = np.arange(100, 160, dtype=np.uint16)
    path.write_bytes(ids.tobytes())
    ranges = [(a, a + n) for a, n in pairs]
    pread = PreadReader(path, ids.dtype)
    for reader in (MappedReader(path, ids.dtype), pread):
        found = reader.read_many(ranges)
        assert [f.tolist() for f in found] == [ids[a:b].tolist() for a, b in ranges]
        assert not any(f.flags.writeable for f in found)
    reads = []
    read_near(lambda a, b: (reads.append((a, b)), pread.read(a, b))[1], ranges, near=near)
    assert all(b + near < c for (_, b), (c, _) in pairwise(reads)), "what is near is one read"
    pread.close()


def test_a_file_that_is_cut_short_is_named_and_the_environment_chooses(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(100))
    assert open_reader(path, np.dtype("<u2")).mapped
    monkeypatch.setenv("NANOCHAT_READER", "pread")
    reader = open_reader(path, np.dtype("<u2"))
    assert not reader.mapped and reader.read(40, 50).tolist() == [0] * 10
    os.truncate(path, 90)
    with pytest.raises(ValueError, match=r"a\.bin: it ends before id 50, which its index promises"):
        reader.read(40, 50)
    open_files = Path("/proc/self/fd")
    before = len(list(open_files.iterdir())) if open_files.exists() else 1
    del reader
    assert (len(list(open_files.iterdir())) if open_files.exists() else 0) == before - 1, "it is closed when it goes"
    monkeypatch.setenv("NANOCHAT_READER", "fast")
    with pytest.raises(ValueError, match="NANOCHAT_READER=fast: expected mmap or pread"):
        open_reader(path, np.dtype("<u2"))
