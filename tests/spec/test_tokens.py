"""Token files read back what was written, in the bytes of both formats, and name a broken file."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.common import hash_file
from nanochat.pretokenize import MegatronWriter, ShardWriter
from nanochat.tokens import open_tokens
from tests.token_files import (
    GOLDEN,
    E,
    entries_of,
    patch,
    write_megatron,
    write_pair,
)
from tests.toy import examples

SHARED = Path(__file__).resolve().parents[3] / "shared" / "golden" / "megatron"


# ---- write and read ------------------------------------------------------------------------------


@st.composite
def batches(draw):
    """(vocab_size, [[(ids, prefix), ...], ...]): any entries, in several calls of `add`."""
    vocab_size = draw(st.sampled_from([257, 65535, 65536, 100_000]))
    ids = st.integers(0, vocab_size - 1) | st.just(vocab_size - 1)
    entry = st.lists(ids, max_size=6).flatmap(
        lambda ids: st.tuples(st.just(ids), st.integers(0, len(ids)))
    )
    return vocab_size, draw(st.lists(st.lists(entry, max_size=5), max_size=5).filter(any))


@given(batches())
@settings(max_examples=examples(3))
def test_gpts_reads_back_what_was_written(tmp_path_factory, case):
    vocab_size, calls = case
    path = tmp_path_factory.mktemp("pair") / "a.b"
    with ShardWriter(path, vocab_size=vocab_size) as writer:
        for call in calls:
            writer.add(
                np.array([i for ids, _ in call for i in ids], np.int64),
                np.array([len(ids) for ids, _ in call], np.int64),
                np.array([p for _, p in call], np.uint16),
            )
    entries = [list(ids) for call in calls for ids, _ in call]
    pair, n = open_tokens(path.parent / "a.b.idx", vocab_size=vocab_size), len(entries)
    assert (len(pair), pair.num_tokens) == (n, sum(map(len, entries)))
    assert entries_of(pair) == entries
    assert pair.lengths(0, n).tolist() == list(map(len, entries))
    assert pair.prefixes(0, n).tolist() == [prefix for call in calls for _, prefix in call]
    assert pair.dtype.itemsize == (2 if vocab_size <= 65535 else 4)
    assert sorted(os.listdir(path.parent)) == ["a.b.bin", "a.b.idx"]
    assert writer.written == {
        "entries": n,
        "tokens": pair.num_tokens,
        "bin_bytes": pair.path.stat().st_size,
        "bin_hash": hash_file(pair.path),
        "idx_hash": hash_file(pair.idx_path),
    }


def test_the_bytes_follow_both_formats(tmp_path):
    """What the golden files do not have: ids of 32 bits, and documents of several sequences."""
    write_pair(tmp_path / "a", [[1, 2, E], [3]], [0, 1], vocab_size=65536)
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<4I", 1, 2, E, 3)
    assert (tmp_path / "a.idx").read_bytes() == b"GPTS" + struct.pack(
        "<3I3q2H", 1, 4, 2, 0, 3, 4, 0, 1
    )
    write_megatron(tmp_path / "m", [[[1, 2], [3]], [[4]], []], "<i4")
    assert (tmp_path / "m.bin").read_bytes() == struct.pack("<4i", 1, 2, 3, 4)
    assert (tmp_path / "m.idx").read_bytes() == b"MMIDIDX\0\0" + struct.pack(
        "<QBQQ3i3q4q", 1, 4, 3, 4, 2, 1, 1, 0, 8, 12, 0, 2, 3, 3
    )
    for kind, sizes in (
        (ShardWriter, {2: "uint16", 65535: "uint16", 65536: "uint32"}),
        (MegatronWriter, {257: "uint16", 65499: "uint16", 65500: "int32"}),
    ):
        for n, name in sizes.items():
            with kind(tmp_path / "t", vocab_size=n) as writer:
                writer.add(np.array([1]), np.array([1]), np.array([0]))
            assert open_tokens(tmp_path / "t.bin").dtype.name == name


def test_files_of_gpt_simple_are_read_and_written_identically(tmp_path):
    """A pair of gpt-simple 0.1.2 and what its own reader returns; dev/compare_gpt_simple.py made
    both."""
    golden = json.loads((GOLDEN / "tiny.json").read_text())
    entries = golden["entries"]
    prefixes = golden["prefixes"]
    eod = golden["eod"]
    pair = open_tokens(GOLDEN / "tiny.bin", vocab_size=golden["vocab_size"])
    assert entries_of(pair) == entries and pair.prefixes(0, len(pair)).tolist() == prefixes
    expected = [[eod, *(e[:-1] if e[-1] == eod else e)] for e in entries]
    assert [d.tolist() for d in pair.documents(0, len(pair), eod)] == expected
    assert 0 < pair.ends_document(0, len(pair), eod).sum() < len(pair), (
        "some entries end a document"
    )
    assert any(p and entries[i - 1][-1] == eod for i, p in enumerate(prefixes)), (
        "a window repeats a document's end"
    )
    write_pair(tmp_path / "tiny", entries, prefixes, vocab_size=golden["vocab_size"])
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"tiny{ending}").read_bytes() == (GOLDEN / f"tiny{ending}").read_bytes()


# ---- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage, message",
    [
        (
            lambda p: os.truncate(p / "a.idx", 40),
            r"a\.idx: 40 bytes that .*, expected 44 bytes for 2 entries; it is trunc",
        ),
        (lambda p: patch(p / "a.idx", 4, b"\2"), r"a\.idx: 44 bytes that begin with b'GPTS.x02"),
        (
            lambda p: patch(p / "a.idx", 16, b"\1"),
            r"a\.bin: 5 tokens on disk, but the offsets in its \.idx go from 1",
        ),
        (
            lambda p: (p / "a.idx").unlink(),
            r"a\.idx: the file is missing; .*restore it, or delete the pair",
        ),
        (
            lambda p: (p / "a.bin").unlink(),
            r"a\.bin: the file is missing; .*restore it, or delete the pair",
        ),
        (lambda p: write_megatron(p / "a", []), r"a\.idx: it has no documents \(0 entries\)"),
    ],
)
def test_a_bad_pair_is_one_sentence(tmp_path, damage, message):
    write_pair(tmp_path / "a", [[1, 2, E], [3, E]])
    damage(tmp_path)
    for name in ("a.bin", "a.idx"):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            open_tokens(tmp_path / name)


# ---- pins and manifests --------------------------------------------------------------------------


def test_pins_never_change_between_versions():
    pin = open_tokens(GOLDEN / "tiny.bin").pin("web/tiny.bin")
    assert len(pin.pop("blocks")) == 32 and pin == {
        "name": "web/tiny.bin",
        "size": 160,
        "footer": "239cbe206c1fce1fe6ee981f00e3b33a",
        "groups": [13],
        "tokens": 80,
    }
    if SHARED.exists():
        assert (
            open_tokens(SHARED / "a.bin").pin("a")["footer"] == "c587795027adadff2a1ce64bc5becd61"
        )
