"""Token files: scattered sequences, end-of-document ids, damage, failed writes, and as a source."""

import errno
import json
import os
import shutil
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.common import read_json, write_json
from nanochat.files import find_files
from nanochat.pretokenize import MegatronWriter, ShardWriter
from nanochat.sources import open_source, scan
from nanochat.tokens import MappedReader, TokenFile, open_tokens, read_manifest
from tests import crashes
from tests.spec.test_tokens import SHARED
from tests.token_files import (
    E,
    Tokenizer,
    entries_of,
    patch,
    windowed,
    write_folder,
    write_megatron,
    write_pair,
)
from tests.toy import examples, tree


def documents_of(pair, step=3):
    """All documents without their BOS, after a check of BOS and lengths."""
    texts = []
    for first in range(0, len(pair), step):
        last = min(first + step, len(pair))
        documents = pair.documents(first, last, E)
        assert pair.document_lengths(first, last, E).tolist() == list(map(len, documents))
        assert all(d[0] == E and d.base is None for d in documents), (
            "each document has its own memory"
        )
        texts += [d.tolist()[1:] for d in documents]
    return texts


# ---- write and read ------------------------------------------------------------------------------


corpora = st.lists(
    st.lists(st.lists(st.integers(0, 100), max_size=5), max_size=3), min_size=1, max_size=8
)


@given(
    corpora, st.sampled_from(["u1", "i1", "<i2", "<i4", "<i8", "<u2"]), st.booleans(), st.randoms()
)
@settings(max_examples=examples(2))
def test_megatron_documents_are_read_wherever_their_sequences_are(
    tmp_path_factory, documents, dtype, scattered, random
):
    path = tmp_path_factory.mktemp("p.q") / "a.b.bin"
    write_megatron(path.with_suffix(""), documents, dtype)
    sequences = [s for d in documents for s in d]
    if scattered:  # shuffle the sequences of the index
        order = list(range(len(sequences)))
        random.shuffle(order)
        tables = [TokenFile(path).table(name)[order] for name in ("lengths", "pointers")]
        patch(path.with_suffix(".idx"), 34, b"".join(table.tobytes() for table in tables))
        sequences = [sequences[i] for i in order]
    edges = np.cumsum([0, *map(len, documents)]).tolist()
    expected = [[i for s in sequences[a:b] for i in s] for a, b in pairwise(edges)]
    pair = open_tokens(path)
    for first in range(len(expected)):
        for last in range(first, len(expected) + 1):
            assert [ids.tolist() for ids in pair.read(first, last)] == expected[first:last]
    assert pair.lengths(0, len(pair)).tolist() == list(map(len, expected))
    assert pair.prefixes(0, len(pair)).tolist() == [0] * len(expected) and pair.dtype == np.dtype(
        dtype
    )


@pytest.mark.skipif(not SHARED.exists(), reason=f"needs {SHARED}, which megatron-core wrote")
@pytest.mark.parametrize("name", ["a", "b"])
def test_files_of_megatron_are_read_and_written_identically(tmp_path, name):
    golden = json.loads((SHARED / "golden.json").read_text())["sources"][name]
    pair = open_tokens(SHARED / f"{name}.bin")
    assert (len(pair), pair.num_tokens) == (golden["documents"], golden["tokens"])
    write_megatron(tmp_path / name, [[ids.tolist()] for ids in pair.read(0, len(pair))], pair.dtype)
    for path in sorted(tmp_path.iterdir()):
        assert sha256(path.read_bytes()).hexdigest() == golden["files"][path.name]["sha256"]


# ---- documents -----------------------------------------------------------------------------------


@given(windowed(), st.integers(1, 5), st.integers(1, 4))
@settings(max_examples=examples(3))
def test_documents_are_entries_without_eod_with_or_without_manifest(
    tmp_path_factory, case, step, group
):
    entries, prefixes, overlap = case
    folder = tmp_path_factory.mktemp("web")
    sizes = [min(group, len(entries) - i) for i in range(0, len(entries), group)]
    write_folder(
        folder, {"a": (entries, prefixes)}, max_length=6, overlap_size=overlap, groups=sizes
    )
    expected = [e[:-1] if e[-1:] == [E] else e for e in entries]
    assert open_tokens(folder / "a.bin").pin("a")["groups"] == sizes
    assert documents_of(open_tokens(folder / "a.bin"), step) == expected
    (folder / "manifest.json").unlink()
    assert documents_of(open_tokens(folder / "a.bin"), step) == expected


def test_entries_of_eod_only_and_empty_entries(tmp_path):
    write_pair(tmp_path / "a", [[], [E], [1, E], [], [E], [2, E], [3, E]])
    write_pair(tmp_path / "empty", [[], []])
    assert documents_of(open_tokens(tmp_path / "a.bin")) == [[], [], [1], [], [], [2], [3]]
    assert documents_of(open_tokens(tmp_path / "empty.bin")) == [[], []]


# ---- readers -------------------------------------------------------------------------------------


def test_mapped_ids_are_views_that_outlive_the_pair_and_its_files(tmp_path):
    write_pair(tmp_path / "a", [[E], [1, 2, 3, E]])
    fds = Path("/proc/self/fd")
    before = len(list(fds.iterdir())) if fds.exists() else 0
    pair = open_tokens(tmp_path / "a.bin")
    _, view = pair.read(0, 2)
    assert (len(list(fds.iterdir())) if fds.exists() else 0) == before, (
        "an open pair keeps no file descriptor"
    )
    assert not view.flags.owndata and not view.flags.writeable and type(view) is np.ndarray
    write_pair(tmp_path / "a", [[7, E]])  # replaces both files
    assert view.tolist() == pair.read(1, 2)[0].tolist() == [1, 2, 3, E]
    del pair
    assert view.tolist() == [1, 2, 3, E]


# ---- damage --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_pairs(tmp_path_factory):
    """A folder with a good pair of each format, gpts and megatron."""
    folder, entries = tmp_path_factory.mktemp("whole"), [[i, 2, 3, E] for i in range(12)]
    write_pair(folder / "gpts", entries, [0, 1] * 6)
    write_megatron(folder / "megatron", [[e[:1], e[1:]] for e in entries])
    return folder


@given(
    st.sampled_from(["gpts", "megatron"]),
    st.sampled_from([".bin", ".idx"]),
    st.lists(
        st.tuples(st.integers(0, 400), st.none() | st.binary(min_size=1, max_size=8)),
        min_size=1,
        max_size=2,
    ),
)
@settings(max_examples=examples(12))
def test_any_damaged_pair_is_read_or_named(tmp_path_factory, whole_pairs, name, suffix, damages):
    """A damage (at, data) overwrites bytes, beyond the end, too; without data it truncates the file
    there."""
    folder = tmp_path_factory.mktemp("bad")
    for ending in (".bin", ".idx"):
        shutil.copy(whole_pairs / f"{name}{ending}", folder / f"a{ending}")
    path = folder / f"a{suffix}"
    whole = data = path.read_bytes()
    for at, new in damages:
        data = data[:at] if new is None else data[:at] + new + data[at + len(new) :]
    path.write_bytes(data)
    try:
        pair = open_tokens(folder / "a.bin", vocab_size=300)
        for first in range(0, len(pair), 5):
            last = min(first + 5, len(pair))
            got, prefixes = pair.read(first, last), pair.prefixes(first, last)
            assert [len(ids) for ids in got] == pair.lengths(first, last).tolist()
            assert all(len(ids) >= prefix for ids, prefix in zip(got, prefixes))
            assert all(ids.max(initial=0) < 300 and ids.min(initial=0) >= 0 for ids in got)
            pair.documents(first, last, E)
        pair.pin("a")
        assert len(data) >= len(whole), "missing bytes were not noticed"
    except (ValueError, FileNotFoundError) as e:
        assert str(e).startswith(str(folder / "a.")), str(e)


@pytest.mark.parametrize("scattered", [False, True])
def test_a_megatron_bin_shorter_than_its_index_is_an_error_when_it_is_opened(tmp_path, scattered):
    write_megatron(tmp_path / "a", [[[1, 2, E]], [[3, 4, 5, E]], [[6, E]]])
    if scattered:  # the last sequence of the index is the first one of the .bin
        patch(tmp_path / "a.idx", 34 + 3 * 4, np.array([6, 10, 0], "<i8").tobytes())
    whole = (tmp_path / "a.bin").read_bytes()
    open_tokens(tmp_path / "a.bin").pin("a")
    os.truncate(tmp_path / "a.bin", 14)
    with pytest.raises(
        ValueError,
        match=r"a\.bin: 14 bytes on disk, but sequence [12] of its \.idx ends at byte 18",
    ):
        open_tokens(tmp_path / "a.bin")
    (tmp_path / "a.bin").write_bytes(whole)
    open_tokens(tmp_path / "a.bin").pin("a")


def test_a_megatron_bin_longer_than_its_index_is_read_with_a_warning(tmp_path, caplog):
    write_megatron(tmp_path / "a", [[[1, 2, E]], [[3, 4, 5, E]]])
    with open(tmp_path / "a.bin", "ab") as file:
        file.write(b"more")
    assert entries_of(open_tokens(tmp_path / "a.bin")) == [[1, 2, E], [3, 4, 5, E]]
    open_tokens(tmp_path / "a.bin")
    [message] = caplog.messages
    for words in (f"{tmp_path}/a.bin: ", "18 bytes", "byte 14", "not read", "fetch them again"):
        assert words in message


def test_opening_checks_the_ends_only_and_inner_damage_is_named_when_it_is_read(tmp_path):
    write_pair(tmp_path / "a", [[i, E] for i in range(100)], [0] * 20 + [3] + [0] * 79)
    patch(tmp_path / "a.idx", 16 + 8 * 50, (97).to_bytes(8, "little"))
    pair = open_tokens(tmp_path / "a.bin")
    assert len(pair.read(0, 10)) == 10
    for read in (pair.read, pair.lengths):
        with pytest.raises(
            ValueError, match=r"a\.idx: .* entries 40 to 50 run backwards.*scripts.verify"
        ):
            read(40, 50)
    with pytest.raises(
        ValueError, match=r"a\.idx: entry 20 is shorter than its prefix \(2 ids, 3 repeated\)"
    ):
        pair.prefixes(15, 25)


def test_ids_outside_the_vocabulary_are_named(tmp_path):
    for dtype, bad in (("<i4", 300), ("<i4", -1), ("<i8", 1 << 40)):
        write_megatron(tmp_path / "a", [[[1, bad if i == 5 else 2]] for i in range(9)], dtype)
        pair = open_tokens(tmp_path / "a.bin", vocab_size=300)
        assert len(pair.read(0, 5)) == 5
        with pytest.raises(
            ValueError,
            match=rf"a\.bin: entry 5 holds the id {bad:,}, outside the vocabulary of 300.*--tokenizer",
        ):
            pair.read(3, 9)
    write_pair(tmp_path / "b", [[1, E]])
    open_tokens(tmp_path / "b.bin", vocab_size=65536)
    with pytest.raises(
        ValueError, match=r"b\.bin: its ids are uint16, too small for a vocabulary of 65,537"
    ):
        open_tokens(tmp_path / "b.bin", vocab_size=65537)


# ---- pins and manifests --------------------------------------------------------------------------


def test_a_changed_index_has_another_footer(tmp_path):
    n, pins = 20_000, []
    write_pair(tmp_path / "a", [[1, 2, E]] * n)
    for at, data in (
        (16 + 8 * 5, b"\x0f"),
        (16 + 8 * 5, b"\x10"),
        (16 + 8 * (n + 1) + 2 * (n - 1), b"\1\0"),
    ):
        # no change, a change near the beginning, the last prefix
        patch(tmp_path / "a.idx", at, data)
        pins.append(open_tokens(tmp_path / "a.bin").pin("web/a.bin"))
    assert len({pin["footer"] for pin in pins}) == 3
    assert {(pin["size"], tuple(pin["groups"])) for pin in pins} == {(6 * n, (1024,) * 19 + (544,))}


def test_the_manifest_must_match_the_pair_and_is_read_again_when_it_changes(tmp_path):
    write_folder(tmp_path, {"a": ([[1, E], [2, E]], None)})
    write_pair(tmp_path / "a", [[1, E]])
    with pytest.raises(
        ValueError, match=r"a\.bin: entries is 1, but manifest\.json says 2; .*rerun"
    ):
        open_tokens(tmp_path / "a.bin").pin("a")
    for groups in ([1, 3], [2, 0], [3, -1]):
        write_folder(tmp_path, {"a": ([[1, E], [2, E]], None)}, groups=groups)
        with pytest.raises(
            ValueError,
            match=r"a\.bin: the groups in .* have \[.*, expected numbers that add up to 2",
        ):
            open_tokens(tmp_path / "a.bin").pin("a")
    for entries, count in ([[1, E]], 1), ([[1, E], [2, E]], 2):
        write_folder(tmp_path, {"a": (entries, None)})
        assert open_tokens(tmp_path / "a.bin").pin("a.bin")["groups"] == [count]
    whole = (tmp_path / "manifest.json").read_text()
    for text in ("{", "[" * 100_000, "[]", whole.replace('"bin_hash"', '"hash"')):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(
            ValueError, match=r"manifest\.json: (?!shards)|shards\.a: bin_hash: expected a string"
        ):
            read_manifest(tmp_path)


# ---- writing that fails --------------------------------------------------------------------------


def add(*args):
    return lambda writer: writer.add(*map(np.array, args))


@pytest.mark.parametrize("old", [False, True])
def test_a_full_disk_at_any_change_leaves_the_old_pair_or_no_half_of_a_new_one(tmp_path, old):
    kinds = ("open", "write", "fsync")
    with crashes.watching(tmp_path, kinds=kinds) as counted:
        write_pair(tmp_path / "0" / "a", [[1, 2, E]])
    for at, change in enumerate(counted.made):
        folder = tmp_path / f"{at}-full"
        folder.mkdir()
        if old:
            write_pair(folder / "a", [[1, 2, E]])
        before = tree(folder)
        with (
            crashes.failing_at(at, errno.ENOSPC, below=folder, kinds=kinds),
            pytest.raises(OSError, match="No space"),
        ):
            write_pair(folder / "a", [[1, 2, E]])
        after = tree(folder)
        assert after == before or ("fsync" in change and "a.bin" in after), (
            "the data of a complete pair was not synced"
        )
        assert "a.idx" not in after or len(open_tokens(folder / "a.bin")) == 1
    assert len(counted.made) > 5


@pytest.mark.parametrize(
    "kind, act, message",
    [
        (ShardWriter, lambda writer: 1 / 0, "division"),
        (ShardWriter, lambda writer: None, "0 entries"),
        (
            ShardWriter,
            add([1, 300], [2], [0]),
            r"uint16|int64 ids 1 \.\. 300, expected integers below 300",
        ),
        (ShardWriter, add([-1], [1], [0]), r"ids -1 \.\. -1"),
        (ShardWriter, add([0.5], [1], [0]), "float64 ids"),
        (
            ShardWriter,
            add([1], [1], [70_000]),
            r"1 prefixes for 1 entries, expected one for each, in 0 \.\. 65,535",
        ),
        (ShardWriter, add([1], [2], [0]), "add up to 2"),
        (ShardWriter, add([1], [1], [0, 0]), "2 prefixes for 1 entries"),
        (ShardWriter, add([1], [2, -1], [0, 0]), "expected the same number"),
        (MegatronWriter, add([1], [1], [1]), "Megatron's format holds whole documents only"),
        (
            MegatronWriter,
            lambda writer: writer.append([1], [1]),
            "1 sequence after the last document",
        ),
        (MegatronWriter, add([70_000], [1], [0]), "below 300"),
    ],
)
def test_an_exception_or_bad_arrays_leave_no_file(tmp_path, kind, act, message):
    with (
        pytest.raises((ValueError, ZeroDivisionError), match=message),
        kind(tmp_path / "a", vocab_size=300) as writer,
    ):
        act(writer)
    assert list(tmp_path.iterdir()) == []
    for bad in (np.float32, np.uint32, "S1"):
        with pytest.raises(ValueError, match="expected one of u1, i1, <i2, <i4, <i8, <u2"):
            MegatronWriter(tmp_path / "a", dtype=bad)


@pytest.mark.parametrize("same", [False, True])
def test_a_crash_between_the_renames_never_shows_half_of_a_pair(tmp_path, monkeypatch, same):
    """After each rename there is either a whole pair or none that can be opened. If the new pair
    equals the old one, there is always a whole one: other processes may be writing it, too."""
    write_pair(tmp_path / "a", [[1, 2, 3, E]] if same else [[9, E]])
    states = []

    def watch(change):
        def call(*args, **kwargs):
            change(*args, **kwargs)
            try:
                states.append(open_tokens(tmp_path / "a.bin").num_tokens)
            except FileNotFoundError as e:
                states.append(Path(str(e).split(":")[0]).name)

        return call

    for name in ("replace", "unlink"):
        monkeypatch.setattr(os, name, watch(getattr(os, name)))
    write_pair(tmp_path / "a", [[1, 2, 3, E]])
    assert states == ([4, 4] if same else ["a.idx", "a.idx", 4])


# ---- as a source ---------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [[5, 1], [0, 7, 3, 4, 7], [2]])
def test_a_source_reads_only_the_documents_that_are_asked_for(tmp_path, monkeypatch, numbers):
    """Regression: it also read all documents between them. In a small bucket, they are most of a
    group."""
    documents = [[i] * (i + 1) for i in range(9)]
    write_folder(tmp_path, {"a": ([[*ids, E] for ids in documents], None)})
    source = open_source(scan(tmp_path, [tmp_path / "a.bin"]), Tokenizer())
    mapped_read, num_read = MappedReader.read, []

    def read(self, begin, end):
        num_read.append(end - begin if self.path.suffix == ".bin" else 0)
        return mapped_read(self, begin, end)

    monkeypatch.setattr(MappedReader, "read", read)
    read = source.read(0, np.array(numbers))
    assert [(d.ids.tolist(), d.context) for d in read] == [
        ([E, *documents[number]], 0) for number in numbers
    ]
    assert sum(num_read) == sum(len(documents[number]) + 1 for number in set(numbers))
    assert source.lengths(0, np.array(numbers)) == (
        [len(documents[number]) + 1 for number in numbers],
        [0] * len(numbers),
    )


def test_a_source_is_sized_as_when_its_files_were_pinned(tmp_path):
    """Regression: the manifest.json of the moment decided, though a run keeps its groups."""
    write_folder(tmp_path, {"a": ([[1, 2, E]] * 3, None)})
    before = scan(tmp_path, [tmp_path / "a.bin"])
    manifest = read_json(tmp_path / "manifest.json")
    manifest["shards"]["a"]["text_bytes"] = 400
    write_json(tmp_path / "manifest.json", manifest)
    after = scan(tmp_path, [tmp_path / "a.bin"])
    sized = [open_source(pinned, Tokenizer()).is_sized_by_text(0) for pinned in (before, after)]
    assert sized == [False, True]


@pytest.mark.parametrize("last, warnings", [(E, 0), (7, 1)])
def test_files_that_end_with_another_id_than_the_runs_are_warned_of(
    tmp_path, caplog, last, warnings
):
    """Regression: a run on files of another tokenizer, without a manifest, said nothing."""
    path = write_pair(tmp_path / "a", [[1, 2, last]] * 3) and tmp_path / "a.bin"
    for _ in range(2):  # one for training, one for validation
        open_source(scan(tmp_path, [path]), Tokenizer(E + 1))
    named = [record for record in caplog.messages if "a.bin" in record and "--tokenizer" in record]
    assert len(named) == warnings


def test_a_bin_without_an_index_names_the_conversion_of_nanogpts_files(tmp_path):
    """Regressions: after the advice to delete it, and after that to read it as it is."""
    (tmp_path / "train.bin").write_bytes(b"\1\0")
    with pytest.raises(FileNotFoundError, match=r"train\.idx: .*llm\.c's.*convert_shards.* delete"):
        open_tokens(tmp_path / "train.bin")
    with pytest.raises(FileNotFoundError, match=r"llm\.c's \.bin files") as e:
        find_files(tmp_path)
    assert "scripts.convert_shards" in str(e.value)
