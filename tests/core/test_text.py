"""Text of any kind: skipped short documents, compressed files, data sets that Hugging Face's
`datasets` saved."""

import gzip
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat import prepare, text_kinds
from nanochat.files import data_at, find_files
from nanochat.parquet_source import ParquetSource
from nanochat.pins import fingerprint
from nanochat.sources import check, scan
from nanochat.splits import split_train_val
from nanochat.text import Selection
from nanochat.text_kinds import read_texts
from scripts import tok_eval, tok_shards, tok_train
from tests import training
from tests.spec.test_text import DOCUMENTS
from tests.toy import ByteTokenizer, write_jsonl, write_parquet


@pytest.fixture(autouse=True)
def base_dir(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("base")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(folder))
    return folder


def write_saved(folder, files, field="text"):
    """A data set as `datasets` 4 saves it: state.json lists the files, streams of Arrow batches,
    and a cache."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(files):05}.arrow" for i in range(len(files))]
    for name, documents in zip([*names, "cache-0123.arrow"], [*files, ["cached"]]):
        table = pa.table(
            {"n": range(len(documents)), "meta": [{field: t} for t in documents], field: documents}
        )
        with pa.ipc.new_stream(folder / name, table.schema) as out:
            out.write_table(table, max_chunksize=7)
    (folder / "state.json").write_text(
        json.dumps(
            {
                "_data_files": [{"filename": name} for name in names],
                "_fingerprint": "x",
                "_split": None,
            }
        )
    )
    (folder / "dataset_info.json").write_text(
        json.dumps({"features": {field: {"dtype": "string"}}})
    )
    return folder


def test_every_kind_gives_the_same_documents_and_groups_and_warns_about_skipped_ones(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(prepare, "GROUP_DOCUMENTS", 8)
    write_jsonl(tmp_path / "jsonl" / "a.jsonl.zst", DOCUMENTS)
    write_parquet(tmp_path / "parquet" / "a.parquet", DOCUMENTS, 31)
    write_saved(tmp_path / "arrow", [DOCUMENTS])
    selection = Selection(min_chars=10, val_fraction=0.3, part="train")
    expected = [
        t
        for i, t in enumerate(DOCUMENTS)
        if math.floor((i + 1) * 0.3) == math.floor(i * 0.3) and len(t) >= 10
    ]
    groups = []
    for kind in ("jsonl", "parquet", "arrow"):
        caplog.clear()
        text_kinds.warn_once.cache_clear()
        manifest = scan(tmp_path / kind, selection=selection)
        assert (
            check(manifest) == manifest
            and manifest["min_chars"] == 10
            and manifest["part"] == "train"
        )
        source = ParquetSource(manifest, ByteTokenizer())
        documents = [
            ByteTokenizer().decode(ids)
            for g, n in enumerate(source.groups.tolist())
            for ids, *_ in source.read(g, np.arange(n))
        ]
        assert documents == expected == list(read_texts(source.paths[0]))
        assert "shorter than --min-chars 10" in caplog.text
        groups.append(source.groups.tolist())
    assert groups[0] == groups[1] == groups[2] and len(groups[0]) > 3
    prints = {
        fingerprint(scan(tmp_path / "jsonl", selection=Selection(**changed)))
        for changed in (
            {},
            {"min_chars": 10},
            {"min_chars": 11},
            {"val_fraction": 0.3, "part": "train"},
            {"val_fraction": 0.3, "part": "val"},
            {"val_fraction": 0.31, "part": "val"},
        )
    }
    assert len(prints) == 6, "everything that decides the data is in the fingerprint"


@pytest.mark.parametrize(
    "content", ["one line\nanother\nthe third\nthe last\n" * 9, "no line at all " * 9]
)
def test_one_txt_file_is_cut_at_a_line(tmp_path, content):
    (tmp_path / "book.txt").write_text(content)
    train, val = (
        list(read_texts(tmp_path / "book.txt", Selection(val_fraction=0.2, part=part)))
        for part in ("train", "val")
    )
    assert train[0] + val[0] == content and len(train) == len(val) == 1
    assert 0.1 < len(val[0]) / len(content) < 0.21 and (
        "\n" not in content or train[0].endswith("\n")
    )


# ---- compressed files ----------------------------------------------------------------------------

LINES = b'{"text": "one"}\n{"text": "two"}\n'


def zipped(data):
    """Compressed without a time stamp, which would be in the tests' names."""
    return gzip.compress(data, mtime=0)


@pytest.mark.parametrize(
    "content",
    [
        zipped(LINES) + bytes(512),
        zipped(LINES[:16]) + zipped(LINES[16:]),
        zipped(LINES[:16]) + bytes(9) + zipped(LINES[16:]),
    ],
)
def test_members_of_gz_and_zeros_after_them_are_read(tmp_path, content):
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    assert list(read_texts(tmp_path / "a.jsonl.gz")) == ["one", "two"]


@pytest.mark.parametrize(
    "content",
    [
        zipped(LINES)[:-5],
        zipped(LINES)[:20],
        zipped(LINES) * 2 + zipped(LINES)[:-9],
        zipped(LINES) + b"rest",
        LINES,
        zipped(LINES)[:12] + b"\xff" * 9,
    ],
)
def test_truncated_or_corrupt_gz_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz: truncated or not a gzip file"):
        list(read_texts(tmp_path / "a.jsonl.gz"))


def test_zst_with_a_window_above_128_mib_says_how_to_compress_it_again(tmp_path):
    window_log = 31
    header = bytes.fromhex("28b52ffd 00") + bytes([(window_log - 10) << 3])
    block = (len(LINES) << 3 | 1).to_bytes(3, "little") + LINES  # the last block, not compressed
    (tmp_path / "a.jsonl.zst").write_bytes(header + block)
    with pytest.raises(
        ValueError, match=r"a\.jsonl\.zst: .* window above 128 MiB .*zstd -d --long=31"
    ) as e:
        list(read_texts(tmp_path / "a.jsonl.zst"))
    assert "truncated" not in str(e.value)
    header = header[:-1] + bytes([(27 - 10) << 3])
    (tmp_path / "a.jsonl.zst").write_bytes(header + block)
    assert list(read_texts(tmp_path / "a.jsonl.zst")) == ["one", "two"]


# ---- saved data sets -----------------------------------------------------------------------------


def test_a_saved_data_set_is_read_in_order_without_its_caches(tmp_path):
    files = [DOCUMENTS[:20], DOCUMENTS[20:50], DOCUMENTS[50:]]
    folder = write_saved(tmp_path / "saved", files)
    assert [path.name for path in find_files(folder)] == [
        f"data-0000{i}-of-00003.arrow" for i in range(3)
    ]
    assert [list(read_texts(path)) for path in find_files(folder)] == files
    assert list(read_texts(find_files(folder)[0], Selection("meta.text"))) == files[0]
    split = split_train_val(data_at(folder))
    assert [len(split[part]["data"]) for part in ("train", "val")] == [2, 1]
    with pytest.raises(ValueError, match=r"00000-of-00003\.arrow: no `body` column.*--text-field"):
        list(read_texts(find_files(folder)[0], Selection("body")))
    path = folder / "data-00001-of-00003.arrow"
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(ValueError, match=r"data-00001-of-00003\.arrow: truncated or not a stream"):
        list(read_texts(path))
    path.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"data-00001-of-00003\.arrow: missing, but state\.json lists it"
    ):
        find_files(folder)


def test_a_broken_line_of_a_file_that_trains_and_validates_is_reported_once(tmp_path, caplog):
    path = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS[:40])
    path.write_text("broken\n" + path.read_text())
    parts = [
        list(read_texts(path, Selection(val_fraction=0.5, part=part))) for part in ("train", "val")
    ]
    assert sorted(parts[0] + parts[1]) == sorted(DOCUMENTS[:40])
    assert (
        sum("1 broken line skipped; the first is line 1" in line for line in caplog.messages) == 1
    )


# ---- flags ---------------------------------------------------------------------------------------


def test_one_file_trains_validates_and_resumes_with_the_digests_of_its_shards(
    tmp_path, capsys, monkeypatch
):
    """A tokenizer, shards and two runs from one file, without its short documents."""
    with training.workplace(tmp_path, **training.SMALL, num_iterations=4, save_every=2) as base:
        table = pa.table({"doc": [{"body": t} for t in training.texts(150, seed=3)]})
        pq.write_table(table, base / "one.parquet", row_group_size=40)
        words = {"text_field": "doc.body", "min_chars": 50, "val_fraction": 0.1}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in words.items()]
        data, out = f"--data-path={base / 'one.parquet'}", f"--output-dir={base / 'own'}"
        assert tok_train.main([data, out, "--vocab-size=300", *flags]) == 0
        monkeypatch.setattr(tok_eval, "PEERS", ())
        assert tok_eval.main([data, f"--tokenizer={base / 'own'}", *flags]) == 0
        assert (
            json.loads((base / "own" / "tokenizer.json").read_text())["training"]["documents"] < 135
        )
        shards = [
            f"--input-dir={base / 'one.parquet'}",
            f"--output-dir={base / 'shards'}",
            "--max-length=0",
            f"--tokenizer={base / 'own'}",
            "--num-workers=1",
            *flags,
        ]
        assert tok_shards.main(shards) == 0
        assert "documents shorter than --min-chars 50" in capsys.readouterr().out
        manifest = json.loads((base / "shards/train/data/manifest.json").read_text())
        assert (
            manifest["arguments"]["min_chars"] == 50
            and manifest["shards"]["one"]["skipped"]["short"] > 5
        )
        with pytest.raises(ValueError, match=r"made with .*min_chars 50 \(now 60\)"):
            tok_shards.main([*shards, "--min-chars=60"])
        streamed = {"data_path": base / "one.parquet", "tokenizer": base / "own", **words}
        training.succeed(**streamed, eval_every=2)
        training.succeed(data_path=base / "shards", data_format="shards", model_tag="shards")
        assert training.digests() == training.digests("shards") and len(training.digests()) == 4
        assert "--min-chars: the run has 50, this launch 0" in training.refuse(
            **{**streamed, "min_chars": 0}
        )
        error = training.refuse(
            data_path=base / "shards", data_format="shards", min_chars=5, model_tag="other"
        )
        assert "--min-chars=5: applies to text only" in error
