"""convert_shards: documents come out whole and come back byte for byte; what a format cannot hold is named."""

import json
import os
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.tokenizer import RustBPETokenizer
from nanochat.tokens import open_tokens
from scripts import convert_shards, tok_shards, verify
from tests.token_files import GOLDEN, E, write_pair
from tests.toy import examples, some_texts, write_jsonl, write_parquet


def convert(source, target, to, *more):
    assert convert_shards.main([str(source), str(target), "--to", to, *more]) == 0


def data_files(folder):
    """Pairs and manifests."""
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in sorted(folder.rglob("*"))
            if f.name == "manifest.json" or f.suffix in (".bin", ".idx")}


def entries_of(path):
    pair = open_tokens(path)
    return [ids.tolist() for ids in pair.read(0, len(pair))]


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
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
def test_what_is_made_is_what_tok_shards_makes_of_the_same_text(sets, tmp_path, monkeypatch, name, block):
    monkeypatch.setattr(convert_shards, "BLOCK_ENTRIES", block or convert_shards.BLOCK_ENTRIES)
    there, back = ("gpts", "megatron") if name == "megatron" else ("megatron", "gpts")
    convert(sets[name], tmp_path / "there", there)
    convert(tmp_path / "there", tmp_path / "back", back)
    cut = name in ("windows", "bare")  # then groups of windows are no groups of documents: they are left out
    for folder, made in (("there", there), ("back", back)):
        theirs = data_files(sets["whole" if made == "gpts" else "megatron"])
        found = data_files(tmp_path / folder)
        differ = [file for file in theirs if found[file] != theirs[file]]
        assert len(found) == 12 and all(cut and "manifest" in file for file in differ), differ
    for folder in ("there", "back"):
        assert RustBPETokenizer.from_directory(tmp_path / folder / "tokenizer").get_vocab_size() == 300
        assert verify.main([str(tmp_path / folder)]) == 0


def test_it_goes_on_where_it_stopped_and_makes_again_what_changed(sets, tmp_path, monkeypatch):
    source, out = tmp_path / "in", tmp_path / "out"
    shutil.copytree(sets["windows"], source)
    original, calls = convert_shards.convert, []

    def counted(path, *args, **kwargs):
        calls.append(path.name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(path, *args, **kwargs)

    monkeypatch.setattr(convert_shards, "convert", counted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, "megatron")
    assert len(list(out.rglob("*.idx"))) == 2 and not list(out.rglob("manifest.json"))
    (out / "train" / "code" / "0.idx").unlink()
    convert(source, out, "megatron")
    convert(sets["windows"], tmp_path / "straight", "megatron")
    assert data_files(out) == data_files(tmp_path / "straight")
    del calls[3:]
    convert(source, out, "megatron")
    assert len(calls) == 3, "nothing is made twice"
    os.utime(source / "val" / "web" / "1.bin")
    convert(source, out, "megatron")
    assert calls[3:] == ["1.bin"] and data_files(out) == data_files(tmp_path / "straight")


@given(st.lists(st.lists(st.integers(0, 90), max_size=9).map(lambda ids: [*ids, E]), min_size=1, max_size=8),
       st.integers(2, 5), st.integers(0, 1), st.sampled_from([1, 3, 100]))
@settings(max_examples=examples(0.4))
def test_foreign_windows_become_the_documents_they_were_cut_from(tmp_path_factory, documents, size, overlap, block):
    root = tmp_path_factory.mktemp("root")
    entries, prefixes = [], []
    for ids in documents:
        starts = [s for s in range(0, len(ids), size - overlap) if s == 0 or s + overlap < len(ids)]
        entries += [ids[s:s + size] for s in starts]
        prefixes += [overlap if s else 0 for s in starts]
    write_pair(root / "in" / "a.b", entries, prefixes)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(convert_shards, "BLOCK_ENTRIES", block)
        convert(root / "in", root / "there", "megatron", f"--eod={E}")
        convert(root / "there", root / "back", "gpts")
    assert entries_of(root / "there" / "a.b.bin") == entries_of(root / "back" / "a.b.bin") == documents


def test_a_last_window_that_repeats_an_end_is_gone(tmp_path):
    """gpt-simple's golden shard has such windows; its documents are known by their ids."""
    shutil.copytree(GOLDEN, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", "megatron")
    found = entries_of(tmp_path / "out" / "tiny.bin")
    told = json.loads((GOLDEN / "tiny.json").read_text())
    assert len(found) == told["documents"] and all(d.count(0) == 1 and d[-1] == 0 for d in found)
    assert found[0] == [*range(65, 75), 0] and found[2] == [*range(65, 73), 0]
