"""convert_shards: documents are converted whole and come back byte for byte; it resumes where it
stopped."""

import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.tokenizer import RustBPETokenizer
from nanochat.tokens import open_tokens
from scripts import convert_shards, tok_shards, verify
from tests.token_files import GOLDEN, E, entries_of, write_megatron, write_pair
from tests.toy import examples, some_texts, write_jsonl, write_parquet


def convert(source, target, to, *more):
    assert convert_shards.main([str(source), str(target), "--to", to, *more]) == 0


def data_files(folder):
    """The contents of pairs and manifests."""
    return {
        f.relative_to(folder).as_posix(): f.read_bytes()
        for f in sorted(folder.rglob("*"))
        if f.name == "manifest.json" or f.suffix in (".bin", ".idx")
    }


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """The same text as windows, as whole documents and in Megatron's format."""
    root = tmp_path_factory.mktemp("sets")
    for n in range(2):
        write_jsonl(root / "raw" / "web" / f"{n}.jsonl", some_texts(60, seed=n))
        write_parquet(
            root / "raw" / "code" / f"{n}.parquet", some_texts(40, seed=10 + n), group_size=15
        )
    RustBPETokenizer.train_from_iterator(some_texts(200, seed=9), 300).save(root / "tokenizer")
    for name, flags in {
        "windows": ["--max-length=16", "--overlap-size=4"],
        "whole": ["--max-length=0"],
        "bare": ["--max-length=16", "--overlap-size=0"],
        "megatron": ["--format=megatron"],
    }.items():
        assert (
            tok_shards.main(
                [
                    f"--input-dir={root / 'raw'}",
                    f"--output-dir={root / name}",
                    "--num-workers=1",
                    f"--tokenizer={root / 'tokenizer'}",
                    *flags,
                ]
            )
            == 0
        )
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize(
    "name, block", [("windows", 7), ("whole", None), ("bare", 7), ("megatron", 7)]
)
def test_converted_shards_equal_those_of_tok_shards_from_the_same_text(
    sets, tmp_path, monkeypatch, name, block
):
    monkeypatch.setattr(convert_shards, "BLOCK_ENTRIES", block or convert_shards.BLOCK_ENTRIES)
    formats = ("gpts", "megatron") if name == "megatron" else ("megatron", "gpts")
    convert(sets[name], tmp_path / "1", formats[0])
    convert(tmp_path / "1", tmp_path / "2", formats[1])
    # the manifest lists no groups then: those of windows do not fit documents
    cut = name in ("windows", "bare")
    for folder, made in zip((tmp_path / "1", tmp_path / "2"), formats):
        expected = data_files(sets["whole" if made == "gpts" else "megatron"])
        files = data_files(folder)
        differ = [file for file in expected if files[file] != expected[file]]
        assert len(files) == 12 and all(cut and "manifest" in file for file in differ), differ
        assert RustBPETokenizer.from_directory(folder / "tokenizer").get_vocab_size() == 300
        assert verify.main([str(folder)]) == 0


def test_it_resumes_where_it_stopped_and_converts_changed_pairs_again(sets, tmp_path, monkeypatch):
    source, out = tmp_path / "in", tmp_path / "out"
    shutil.copytree(sets["windows"], source)
    original, calls = convert_shards.convert, []

    def counted(path, *args, **kwargs):
        calls.append(path.relative_to(source).as_posix())
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(path, *args, **kwargs)

    monkeypatch.setattr(convert_shards, "convert", counted)
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, "megatron")
    assert len(list(out.rglob("*.idx"))) == 2 and not list(out.rglob("manifest.json"))
    (out / "train" / "code" / "0.idx").unlink()
    convert(source, out, "megatron")
    whole, expected = data_files(out), data_files(sets["megatron"])
    assert all(whole[name] == expected[name] or "manifest" in name for name in expected)
    assert len(whole) == 12 and len(calls) == 3 + 3, (
        "the unfinished pairs and the one without an index"
    )
    os.utime(source / "val" / "web" / "1.bin")
    convert(source, out, "megatron")
    assert calls[6:] == ["val/web/1.bin"] and data_files(out) == whole


@given(
    st.lists(
        st.lists(st.integers(0, 90), max_size=9).map(lambda ids: [*ids, E]), min_size=1, max_size=8
    ),
    st.integers(2, 5),
    st.integers(0, 1),
    st.sampled_from([1, 3, 100]),
)
@settings(max_examples=examples(0.4))
def test_windows_without_a_manifest_become_whole_documents(
    tmp_path_factory, documents, size, overlap, block
):
    root = tmp_path_factory.mktemp("root")
    entries, prefixes = [], []
    for ids in documents:
        starts = [s for s in range(0, len(ids), size - overlap) if s == 0 or s + overlap < len(ids)]
        entries += [ids[s : s + size] for s in starts]
        prefixes += [overlap if s else 0 for s in starts]
    write_pair(root / "in" / "a.b", entries, prefixes)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(convert_shards, "BLOCK_ENTRIES", block)
        convert(root / "in", root / "1", "megatron", f"--eod={E}")
        convert(root / "1", root / "2", "gpts")
    for folder in "12":
        assert entries_of(open_tokens(root / folder / "a.b.bin")) == documents


def test_the_sequences_of_a_megatron_document_are_joined(tmp_path):
    write_megatron(tmp_path / "in" / "a", [[[1, 2], [3, E]], [[4, E]], [[], [5], [6, 7, E]]])
    convert(tmp_path / "in", tmp_path / "out", "gpts")
    assert entries_of(open_tokens(tmp_path / "out" / "a.bin")) == [
        [1, 2, 3, E],
        [4, E],
        [5, 6, 7, E],
    ]


def test_a_last_window_that_only_repeats_a_documents_end_is_dropped(tmp_path):
    """gpt-simple's golden shard has such windows."""
    shutil.copytree(GOLDEN, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", "megatron")
    documents = entries_of(open_tokens(tmp_path / "out" / "tiny.bin"))
    assert len(documents) == json.loads((GOLDEN / "tiny.json").read_text())["documents"]
    assert all(d.count(0) == 1 and d[-1] == 0 for d in documents)
    assert documents[0] == [*range(65, 75), 0] and documents[2] == [*range(65, 73), 0]


def test_empty_documents_of_megatrons_files_are_left_out_and_counted(tmp_path, capsys):
    """Regression: they became entries of GPTS that scripts.verify calls a problem."""
    write_megatron(tmp_path / "in" / "a", [[[1, E]], [], [[]], [[2, E]]])
    convert(tmp_path / "in", tmp_path / "out", "gpts")
    assert "; 2 empty documents left out, which GPTS cannot hold" in capsys.readouterr().out
    assert entries_of(open_tokens(tmp_path / "out" / "a.bin")) == [[1, E], [2, E]]
    assert verify.main([str(tmp_path / "out")]) == 0


def test_megatrons_files_without_an_end_of_document_id_need_one_and_come_back_whole(tmp_path):
    """Regression: their last id passed for it, so all documents came back as one."""
    source, out = tmp_path / "in", tmp_path / "out"
    write_megatron(source / "a", [[[1, 2, 3]], [[], [5, 3, 4]], [[]], [[6, 3]]])
    with pytest.raises(ValueError, match=r"a.bin: .* last id, 3, .*--eod=ID"):
        convert(source, out, "gpts")
    assert not list(out.rglob("*.bin"))
    for eod in (7, 8):  # a wrong one can be mended by the same command
        convert(source, out, "gpts", f"--eod={eod}")
        assert converted(out) == {"a.bin": [[1, 2, 3, eod], [5, 3, 4, eod], [6, 3, eod]]}
    assert verify.main([str(out)]) == 0
    convert(out, tmp_path / "back", "megatron")
    assert converted(tmp_path / "back") == converted(out)
    with pytest.raises(ValueError, match="--eod: got 65,536"):
        convert(source, out, "gpts", "--eod=65536")


def test_windows_whose_last_id_ends_no_document_are_not_joined(tmp_path):
    write_pair(tmp_path / "in" / "a", [[1, 2], [2, 3, 4], [5, 2]])
    with pytest.raises(ValueError, match=r"last id, 2, .*--eod"):
        convert(tmp_path / "in", tmp_path / "out", "megatron")


def test_another_end_of_document_id_than_the_manifests_is_refused(sets, tmp_path):
    with pytest.raises(ValueError, match=r"--eod: got 7, .*manifest.json.*leave --eod out"):
        convert(sets["windows"], tmp_path / "out", "megatron", "--eod=7")


def test_a_gpts_file_that_ends_inside_a_document_is_converted_with_its_id(tmp_path):
    """Regression: without --eod, it was asked for; with it, it was to be left out."""
    write_pair(tmp_path / "in" / "a", [[5, 2, E], [3, 5]])
    with pytest.raises(ValueError, match="pass --eod=ID"):
        convert(tmp_path / "in", tmp_path / "out", "megatron")
    convert(tmp_path / "in", tmp_path / "out", "megatron", f"--eod={E}")
    pair = open_tokens(tmp_path / "out" / "a")
    assert [ids.tolist() for ids in pair.read(0, len(pair))] == [[5, 2, E], [3, 5]]


@pytest.mark.parametrize("eod", [5, 77])
def test_an_id_that_ends_no_document_of_gpts_is_refused(tmp_path, eod):
    """Regression: all documents became one, without a word."""
    write_pair(tmp_path / "in" / "a", [[5, 1, 2, E], [5, 3, E]])
    with pytest.raises(
        ValueError, match=rf"--eod: got {eod}, but no entry of .*a.bin ends with it"
    ):
        convert(tmp_path / "in", tmp_path / "out", "megatron", f"--eod={eod}")
    assert not list((tmp_path / "out").rglob("*.bin"))


# ---- nanoGPT's and llm.c's files -----------------------------------------------------------------


def write_plain(path, ids, *, dtype="<u2", header=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    start = np.zeros(0 if header is None else 256, "<i4")
    start[:3] = header or []
    path.write_bytes(start.tobytes() + np.array(ids, dtype).tobytes())


def converted(folder):
    return {
        path.relative_to(folder).as_posix(): entries_of(open_tokens(path))
        for path in folder.rglob("*.bin")
    }


def test_nanogpts_files_become_documents_of_two_splits(tmp_path, capsys):
    write_plain(tmp_path / "in" / "train.bin", [1, 2, 7, 3, 7, 7, 4, 7])
    write_plain(tmp_path / "in" / "val.bin", [5, 7])
    convert(tmp_path / "in", tmp_path / "out", "gpts", "--eod=7")
    assert converted(tmp_path / "out") == {
        "train/train.bin": [[1, 2, 7], [3, 7], [4, 7]],
        "val/val.bin": [[5, 7]],
    }
    said = capsys.readouterr().out
    assert "2 pairs of --data-format shards" in said and "4 documents" in said
    assert verify.main([str(tmp_path / "out"), "--vocab-size=8"]) == 0
    convert(tmp_path / "in" / "train.bin", tmp_path / "one", "megatron", "--eod=7")
    assert converted(tmp_path / "one") == {"train.bin": [[1, 2, 7], [3, 7], [4, 7]]}


@pytest.mark.parametrize(
    ("header", "dtype", "end"), [((20240520, 1), "<u2", 50256), ((20240801, 7), "<u4", 128000)]
)
def test_llm_cs_files_become_documents(tmp_path, header, dtype, end):
    ids = [end, 1, 2, end, 3, end, 4]
    write_plain(
        tmp_path / "in" / "fineweb_train_000001.bin", ids, dtype=dtype, header=(*header, len(ids))
    )
    write_plain(
        tmp_path / "in" / "fineweb_val_000000.bin", ids[:3], dtype=dtype, header=(*header, 3)
    )
    convert(tmp_path / "in", tmp_path / "out", "gpts")
    assert converted(tmp_path / "out") == {
        "train/fineweb_train_000001.bin": [[1, 2, end], [3, end], [4, end]],
        "val/fineweb_val_000000.bin": [[1, 2, end]],
    }
    assert open_tokens(tmp_path / "out/train/fineweb_train_000001.bin").dtype == dtype


def test_a_file_without_the_id_that_ends_documents_is_one_document(tmp_path):
    write_plain(tmp_path / "in" / "input.bin", [1, 2, 3])
    convert(tmp_path / "in", tmp_path / "out", "gpts", "--eod=50256")
    assert converted(tmp_path / "out") == {"input.bin": [[1, 2, 3, 50256]]}


@pytest.mark.parametrize(
    ("ids", "how", "flags", "reason"),
    [
        (
            [1, 2],
            {},
            [],
            r"does not name the id that ends documents; pass --eod=ID \(50256 for GPT-2\)",
        ),
        ([1, 2], {}, ["--eod=65536"], "--eod: got 65,536, expected 0 to 65,535"),
        (
            [1, 2, 3],
            {"dtype": "u1"},
            ["--eod=0"],
            "3 bytes, expected ids of two bytes, or a file of llm.c",
        ),
        ([], {}, ["--eod=0"], "0 bytes, expected ids of two bytes"),
        (
            [1, 2],
            {"header": (20240520, 1, 3)},
            [],
            "names version 1 and 1,030 bytes, but the file has 1,028",
        ),
        (
            [1, 2],
            {"header": (20240520, 2, 2)},
            [],
            "names version 2 and 1,028 bytes, .* expected version 1",
        ),
        (
            [20240520 % 65536, 20240520 >> 16],
            {},
            [],
            "expected version 1 and equal sizes: copy it again",
        ),
        # regressions: headers and halves of ids became documents
        (
            [1, 2],
            {"header": (20240999, 1, 2)},
            ["--eod=7"],
            "a header like llm.c's, with 20240999",
        ),
        (
            [1, 2],
            {"header": np.array([20240520, 1, 2], "<i4").byteswap().tolist(), "dtype": ">u2"},
            ["--eod=7"],
            "a header like llm.c's.*little-endian",
        ),
        ([50256, 70_000] * 200, {"dtype": "<u4"}, ["--eod=7"], "ids of four bytes"),
    ],
)
def test_a_file_that_is_neither_nanogpts_nor_llm_cs_is_refused(tmp_path, ids, how, flags, reason):
    write_plain(tmp_path / "in" / "a.bin", ids, **how)
    with pytest.raises(ValueError, match=reason) as e:
        convert(tmp_path / "in", tmp_path / "out", "gpts", *flags)
    assert "\n" not in str(e.value) and not list((tmp_path / "out").rglob("*.bin"))
