"""convert_shards: back and forth is the identity, documents come out whole, and what was kept is not misused."""

import json
import os
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import pairs
from nanochat.convert import pack
from nanochat.indexed import IndexedDataset, IndexedDatasetBuilder
from nanochat.pretokenize import Windows
from nanochat.shards import ShardWriter, read_index, read_manifest, read_tokens
from nanochat.tokenizer import RustBPETokenizer
from scripts import convert_shards, tok_shards, verify
from tests.test_shards import GOLDEN, E, patch, write_pair
from tests.toy import examples, some_texts, write_jsonl, write_parquet


def convert(source: Path, target: Path, to: str, *more: str) -> None:
    assert convert_shards.main([str(source), str(target), "--to", to, *more]) == 0


def data_files(folder: Path) -> dict[str, bytes]:
    """Pairs and manifests."""
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in sorted(folder.rglob("*"))
            if f.name == "manifest.json" or f.suffix in (".bin", ".idx")}


def documents_of(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    return [[int(i) for ids in dataset[a:b] for i in ids] for a, b in pairwise(dataset.document_indices.tolist())]


# ---- what tok_shards makes ------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> dict[str, Path]:
    """The same text as sets of windows, of whole documents, and of Megatron's."""
    root = tmp_path_factory.mktemp("sets")
    for n in range(2):
        write_jsonl(root / "raw" / "web" / f"{n}.jsonl", some_texts(60, seed=n))
        write_parquet(root / "raw" / "code" / f"{n}.parquet", some_texts(40, seed=10 + n), group_size=15)
    RustBPETokenizer.train_from_iterator(some_texts(200, seed=9), 300).save(root / "tokenizer")
    for name, flags in {"windows": ["--max-length=16", "--overlap-size=4"], "whole": ["--max-length=0"],
                        "bare": ["--max-length=16", "--overlap-size=0"], "megatron": ["--format=megatron"]}.items():
        assert tok_shards.main([f"--input-dir={root / 'raw'}", f"--output-dir={root / name}", "--num-workers=1",
                                f"--tokenizer={root / 'tokenizer'}", *flags]) == 0
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize("name, block", [("windows", 7), ("whole", None), ("bare", 7), ("megatron", 7)])
def test_back_and_forth_is_the_identity_manifests_too(sets, tmp_path, monkeypatch, capsys, name, block):
    for limit in ("BLOCK_ENTRIES", "BLOCK_IDS"):
        monkeypatch.setattr(pairs, limit, block or getattr(pairs, limit))
    there, back = ("gpts", "megatron") if name == "megatron" else ("megatron", "gpts")
    convert(sets[name], tmp_path / "there", there)
    convert(tmp_path / "there", tmp_path / "back", back)
    assert data_files(tmp_path / "back") == data_files(sets[name]) and len(data_files(sets[name])) == 12
    other = sets["whole" if name == "megatron" else "megatron"]
    theirs, made = data_files(other), data_files(tmp_path / "there")
    if name in ("whole", "megatron"):
        assert made == theirs, "what tok_shards makes of the same text"
    assert {n: d for n, d in made.items() if "manifest" not in n} == {
        n: d for n, d in theirs.items() if "manifest" not in n}, "whole documents, however they were cut"
    for folder in ("there", "back"):
        assert RustBPETokenizer.from_directory(tmp_path / folder / "tokenizer").get_vocab_size() == 300
        assert verify.main([str(tmp_path / folder)]) == 0
    capsys.readouterr()
    convert(tmp_path / "back", tmp_path / "again", there)
    assert data_files(tmp_path / "again") == made, "and so on"


def test_it_goes_on_where_it_stopped_and_makes_again_what_changed(sets, tmp_path, monkeypatch):
    source, out = tmp_path / "in", tmp_path / "out"
    shutil.copytree(sets["windows"], source)
    original, calls = convert_shards.convert, []

    def counted(path: Path, *args, **kwargs):
        calls.append(path.name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(path, *args, **kwargs)

    monkeypatch.setattr(convert_shards, "convert", counted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, "megatron")
    assert len(list(out.rglob("*.idx"))) == 2 and not list(out.rglob("manifest.json"))
    (out / "train" / "code" / ".0.bin.12345678.tmp").touch()
    (out / "train" / "code" / "0.idx").unlink()
    convert(source, out, "megatron")
    assert len(calls) == 6 and not list(out.rglob("*.tmp"))
    convert(sets["windows"], tmp_path / "straight", "megatron")
    assert data_files(out) == data_files(tmp_path / "straight")
    del calls[3:]
    convert(source, out, "megatron")
    assert len(calls) == 3, "nothing is made twice"
    os.utime(source / "val" / "web" / "1.bin", (1, 1))
    convert(source, out, "megatron")
    assert calls[3:] == ["1.bin"] and data_files(out) == data_files(tmp_path / "straight")


# ---- foreign files --------------------------------------------------------------------------------------------------

@st.composite
def gpts(draw) -> tuple[list[list[int]], list[int]]:
    """Entries of any kind with any prefixes, many of them repetitions, ends of documents anywhere."""
    entries, prefixes = [], []
    for _ in range(draw(st.integers(1, 14))):
        ids = draw(st.lists(st.integers(0, 3) | st.just(E), max_size=6))
        before = entries[-1] if entries else []
        kind = draw(st.sampled_from(["any", "window", "tail"]))
        prefix = draw(st.integers(0, 3))
        if kind == "window" and before:
            prefix = min(prefix, len(before))
            ids = before[len(before) - prefix:] + ids
        if kind == "tail" and before[-1:] == [E] and len(before) > 1:
            prefix = min(max(prefix, 1), len(before) - 1)
            ids = before[-1 - prefix:]
        entries.append(ids)
        prefixes.append(prefix)
    return entries, prefixes


@given(gpts(), st.sampled_from([300, 100_000]), st.sampled_from([1, 3, 100]))
@settings(max_examples=examples(0.4))
def test_any_shard_comes_back_as_it_was(tmp_path_factory, case, vocab_size, block):
    entries, prefixes = case
    root = tmp_path_factory.mktemp("root")
    write_pair(root / "in" / "a.b", entries, prefixes, vocab_size=vocab_size)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pairs, "BLOCK_ENTRIES", block)
        convert(root / "in", root / "there", "megatron", f"--eod={E}")
        convert(root / "there", root / "back", "gpts")
    assert data_files(root / "back") == data_files(root / "in")
    found = [i for d in documents_of(root / "there" / "a.b") for i in d]
    assert len(found) <= sum(map(len, entries))
    assert IndexedDataset(root / "there" / "a.b").dtype == (np.uint16 if vocab_size == 300 else np.int32)


sequences = st.lists(st.lists(st.lists(st.integers(0, 90), max_size=4), max_size=3), min_size=1, max_size=8)


@given(sequences, st.sampled_from(["u1", "i1", "<i2", "<i4", "<i8", "<u2"]), st.sampled_from([1, 3, 100]))
@settings(max_examples=examples(0.2))
def test_any_megatron_file_comes_back_as_it_was(tmp_path_factory, documents, dtype, block):
    root = tmp_path_factory.mktemp("root")
    (root / "in").mkdir()
    builder = IndexedDatasetBuilder(root / "in" / "a.bin", dtype=dtype)
    for document in documents:
        builder.add_document(np.array([i for s in document for i in s], np.int64), list(map(len, document)))
    builder.finalize(root / "in" / "a.idx")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pairs, "BLOCK_ENTRIES", block)
        convert(root / "in", root / "there", "gpts")
        convert(root / "there", root / "back", "megatron")
    assert data_files(root / "back") == data_files(root / "in")
    index = read_index(root / "there" / "a.bin")
    assert [read_tokens(index)[a:b].tolist() for a, b in pairwise(index.offsets.tolist())] == [
        [i for s in d for i in s] for d in documents]


def test_windows_are_put_together_and_a_last_window_that_repeats_an_end_is_gone(tmp_path):
    """gpt-simple's golden shard has such windows; its documents are known by their ids."""
    shutil.copytree(GOLDEN, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", "megatron")
    found = documents_of(tmp_path / "out" / "tiny")
    told = json.loads((GOLDEN / "tiny.json").read_text())
    assert len(found) == told["documents"] and all(d.count(0) == 1 and d[-1] == 0 for d in found)
    assert found[0] == [*range(65, 75), 0] and found[2] == [*range(65, 73), 0]
    assert Windows(8, 2).cut(np.array([0, *found[0][:-1]]), np.array([0, 11]), 0)[1].tolist() == [8, 5]


@pytest.mark.parametrize("act, message", [
    (lambda p: patch(p / "there" / "a.bin", 0, b"\7\0"), r"a\.bin: it is not the pair that a\.conversion\.json was"),
    (lambda p: (p / "there" / "a.conversion.json").write_text("{}"), r"a\.conversion\.json: expected .*take it away"),
    (lambda p: shutil.rmtree(p / "there"), "no such data folder"),
    (lambda p: damage(p / "there" / "a.conversion.json"), r"a\.bin: converted back it is not what it was made of"),
    (lambda p: write_pair(p / "there" / "b", [[1, E]]), r"it mixes megatron \(a\.bin\) with shards \(b\.bin\)"),
])
def test_what_cannot_be_converted_back_says_why_and_leaves_nothing(tmp_path, act, message):
    write_pair(tmp_path / "in" / "a", [[1, 2, 3], [3, 4, E], [5, E]], [0, 1, 0])
    convert(tmp_path / "in", tmp_path / "there", "megatron")
    act(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        convert(tmp_path / "there", tmp_path / "back", "gpts")
    assert not list((tmp_path / "back").rglob("*.idx"))


def damage(path: Path) -> None:
    """Another length of an entry."""
    done = json.loads(path.read_text())
    done["kept"]["lengths"] = pack(np.array([2, 4], "<i8"))
    path.write_text(json.dumps(done))


def test_what_a_format_cannot_hold_is_named(tmp_path):
    with ShardWriter(tmp_path / "a", vocab_size=1 << 32) as writer:
        writer.add(np.array([1 << 31]), [1], [0])
    with pytest.raises(ValueError, match=r"a\.bin: got id 2147483648 \.\. 2147483648, expected 0 \.\. 2147483647"):
        convert(tmp_path, tmp_path.parent / f"{tmp_path.name} out", "megatron")
    (tmp_path / "m").mkdir()
    builder = IndexedDatasetBuilder(tmp_path / "m" / "a.bin", dtype=np.int32, multimodal=True)
    builder.add_document([1], [1], [3])
    builder.finalize(tmp_path / "m" / "a.idx")
    with pytest.raises(ValueError, match=r"a\.idx: its sequences have modes"):
        convert(tmp_path / "m", tmp_path / "out", "gpts")
    builder = IndexedDatasetBuilder(tmp_path / "m" / "a.bin", dtype=np.int32)
    builder.add_document([-1], [1])
    builder.finalize(tmp_path / "m" / "a.idx")
    with pytest.raises(ValueError, match=r"a\.bin: got id -1"):
        convert(tmp_path / "m", tmp_path / "out", "gpts")
    for out in (tmp_path / "m", tmp_path / "m" / "x", tmp_path):
        with pytest.raises(ValueError, match="it is IN, or one lies in the other"):
            convert(tmp_path / "m", out, "gpts")


def test_manifests_of_what_was_converted_say_so_and_groups_are_those_of_entries(sets, tmp_path):
    shutil.copytree(sets["windows"] / "train" / "web", tmp_path / "in" / "train" / "web")
    path = tmp_path / "in" / "train" / "web" / "manifest.json"
    manifest = json.loads(path.read_text())
    entries = manifest["shards"]["0"]["entries"]
    manifest["shards"]["0"]["groups"] = [70, entries - 70]
    path.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
    convert(tmp_path / "in", tmp_path / "out", "megatron")
    convert(tmp_path / "out", tmp_path / "back", "gpts")
    assert data_files(tmp_path / "back") == data_files(tmp_path / "in") and entries > 70
    manifest = read_manifest(tmp_path / "out" / "train" / "web")
    assert manifest["converted_from"]["arguments"] == {"max_length": 16, "overlap_size": 4}
    assert manifest["arguments"] == {"max_length": 0, "overlap_size": 0} and manifest["data_format"] == "megatron"
    record = manifest["shards"]["0"]
    assert record["entries"] == record["documents"] == 60 and "groups" not in record
