"""Data files: how they are found, pinned and refused, and which text files are readable."""

import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat import text, text_kinds
from nanochat.config import Settings
from nanochat.dataset import list_parquet_files, parquets_iter_batched
from nanochat.files import (
    check_format,
    data_at,
    default_data_dir,
    default_data_path,
    find_files,
    split_weights,
)
from nanochat.integrations.megatron_settings import MegatronSettings
from nanochat.run_order import order_of
from nanochat.sources import check_files, open_data, scan
from nanochat.splits import DataFile, describe_split, find_splits, split_train_val
from nanochat.text import open_parquet, read_batches
from nanochat.text_kinds import read_texts
from tests.token_files import Tokenizer, write_megatron, write_pair
from tests.toy import BOS, compressed, write_jsonl

pytestmark = pytest.mark.usefixtures("base_dir")


def parquet_bytes(seed, rows=300, group_size=100, **columns):
    columns = columns or {
        "text": [f"document {seed}/{i} " + "x" * (i * 7 % 90) for i in range(rows)]
    }
    sink = io.BytesIO()
    pq.write_table(
        pa.table(columns),
        sink,
        row_group_size=group_size,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    return sink.getvalue()


def write(folder, *names, **kwargs):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(parquet_bytes(name, **kwargs))


def test_listing_is_sorted_by_relative_path_and_skips_hidden_and_partial_files(tmp_path):
    write(
        tmp_path,
        "b/x.parquet",
        "a/z.parquet",
        "c.parquet",
        ".tmp/q.parquet",
        ".h.parquet",
        "d.parquet.part",
    )
    assert list_parquet_files(tmp_path) == [
        str(tmp_path / n) for n in ("a/z.parquet", "b/x.parquet", "c.parquet")
    ]
    line = write_jsonl(tmp_path / "a" / "b.jsonl.gz", ["text"])
    assert [path.name for path in find_files(tmp_path)] == [
        "b.jsonl.gz",
        "z.parquet",
        "x.parquet",
        "c.parquet",
    ]
    assert find_files(line) == [line]
    with pytest.raises(
        ValueError, match=r"b\.jsonl\.gz: expected a folder or a \.bin file.*--data-format"
    ):
        find_files(line, "shards")


def test_a_known_data_set_without_its_pinned_last_shard_is_refused(tmp_path):
    folder = default_data_dir()
    # without a marker: known by its folder
    write(folder, "shard_00000.parquet", "shard_00001.parquet")
    with pytest.raises(
        FileNotFoundError, match=r"shard_06542\.parquet is missing.*run `.* --dataset=climbmix"
    ):
        list_parquet_files()
    write(folder, "shard_06542.parquet")
    assert list_parquet_files()[-1].endswith("shard_06542.parquet")
    write(folder, "zzz.parquet")
    with pytest.raises(ValueError, match=r"zzz\.parquet"):
        list_parquet_files()


def test_the_ranks_read_each_training_row_group_once_and_the_last_file_validates(tmp_path):
    write(tmp_path, "a.parquet", "b.parquet", "c.parquet", rows=250, group_size=100)
    ranks = [list(parquets_iter_batched("train", r, 2, data_dir=tmp_path)) for r in range(2)]
    assert [[len(g) for g in rank] for rank in ranks] == [[100, 50, 100, 50], [100, 100]]
    texts = sorted(t for rank in ranks for group in rank for t in group)
    alone = [t for group in parquets_iter_batched("train", data_dir=tmp_path) for t in group]
    assert len(texts) == 500 and texts == sorted(alone)
    assert all(
        t.startswith("document c.parquet")
        for g in parquets_iter_batched("val", data_dir=tmp_path)
        for t in g
    )
    with pytest.raises(ValueError, match="split"):
        next(parquets_iter_batched("test", data_dir=tmp_path))
    write(tmp_path / "one", "only.parquet")
    with pytest.raises(ValueError, match=r"only\.parquet: the only file, expected at least 2"):
        next(parquets_iter_batched("train", data_dir=tmp_path / "one"))


# ---- text of every kind --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bomb.jsonl", "bomb.jsonl.gz", "bomb.jsonl.zst"])
def test_a_line_larger_than_any_document_is_an_error_before_it_fills_the_memory(
    tmp_path, monkeypatch, name
):
    for module in (text, text_kinds):
        monkeypatch.setattr(module, "MAX_DOCUMENT_BYTES", 1000)
    data = b'{"text": "fits"}\n{"text": "' + b"x" * 10_000_000 + b'"}\n'
    (tmp_path / name).write_bytes(compressed(data, (tmp_path / name).suffix))
    with pytest.raises(ValueError, match=rf"{name}: line 2 has more than 1,000 bytes"):
        list(read_texts(tmp_path / name))
    (tmp_path / "large.txt").write_bytes(b"x" * 1001)
    with pytest.raises(ValueError, match=r"large\.txt: a document of more than 1,000 bytes"):
        list(read_texts(tmp_path / "large.txt"))
    assert not list(tmp_path.rglob("*.parquet"))
    pq.write_table(pa.table({"text": ["fits", "x" * 1001]}), tmp_path / "big.parquet")
    with (
        open_parquet(tmp_path / "big.parquet") as file,
        pytest.raises(ValueError, match=r"big\.parquet.*1,001 bytes"),
    ):
        list(read_batches(file, 0, tmp_path / "big.parquet"))


# ---- what is printed about a split ---------------------------------------------------------------

SHARDS = [DataFile(f"web/{i}.parquet", 1000, 10) for i in range(20)]


@pytest.mark.parametrize(
    ("train", "val", "how", "expected"),
    [
        (
            SHARDS[:-1],
            SHARDS[-1:],
            {"chosen": True, "reads": "about 2.0 passes"},
            [
                r"validation: web/19.parquet \(10 documents\), 5.0% of all bytes",
                "training: 19 files, 190 documents; about 2.0 passes",
            ],
        ),
        (
            SHARDS[:3],
            SHARDS[3:4],
            {"chosen": True},
            ["25.0% of all bytes", "web/0.parquet", "25.0% .*--val-fraction"],
        ),
        (SHARDS[:3], SHARDS[3:4], {"chosen": False}, ["25.0% of all bytes", "web/0.parquet"]),
        (
            SHARDS,
            [DataFile("web/z.jsonl.gz", 10)],
            {"chosen": True},
            [
                "validation: web/z.jsonl.gz, 0.0%",
                "20 files",
                r"is .jsonl.gz, the others are .parquet.*--val-fraction",
            ],
        ),
        (
            SHARDS,
            [DataFile("wiki/0.parquet", 10, 3)],
            {"chosen": True},
            [
                "3 documents",
                "20 files",
                r"no training file is in its folder \(wiki/0.parquet\).*--val-fraction",
            ],
        ),
        (
            SHARDS,
            [DataFile("web/z.parquet", 10, 1)],
            {"chosen": True},
            [
                r"z.parquet \(1 document\), 0.0%",
                "20 files",
                "z.parquet is a single document.*--val-path",
            ],
        ),
        (
            SHARDS,
            SHARDS,
            {"shared": 0.01},
            ["0.01 of each .*20 files.*, 200 documents", "the rest of 20 files, 200"],
        ),
        (
            SHARDS[:2],  # of a fork that leaves out a bucket
            SHARDS[:3],
            {"shared": 0.01},
            [r"0.01 of each file \(3 files\), 30 documents", "the rest of 2 files, 20 documents"],
        ),
    ],
)
def test_the_lines_about_a_split_warn_if_it_looks_accidental(train, val, how, expected):
    lines = describe_split({"data": train}, {"data": val}, **how)
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected):
        assert re.search(pattern, line), line


def test_the_warning_says_what_the_last_file_means_when_the_data_grows():
    """Regression: after a branch had moved on, the old validation file was trained on."""
    *_, warning = describe_split({"data": SHARDS[:3]}, {"data": SHARDS[3:4]}, chosen=True)
    assert "a new run after more files arrive will use another one" in warning
    assert "--val-path or folders train/ and val/, or use 5% of the documents" in warning


def test_the_last_file_of_a_bucket_is_compared_with_its_bucket():
    """Regression: half of a small bucket validated without a word, beside another with validation
    files of its own."""
    train = {"web": SHARDS[:18], "code": [DataFile("code/0.parquet", 100, 10)]}
    last = [DataFile("code/1.parquet", 150, 10)]
    *_, warning = describe_split(train, {"web": SHARDS[18:19], "code": last}, chosen=True)
    assert "it has 60.0% of the bytes of code" in warning and "of web" not in warning
    stated = [DataFile("web/validation-0.parquet", 1000, 10)]
    *_, warning = describe_split(train, {"web": stated, "code": last}, chosen=True)
    assert "the last file is used for validation, but it has 60.0% of the bytes of code" in warning
    assert "--val-path" in warning and "--val-fraction" not in warning, "it would be refused"


def test_no_advice_about_a_fork_s_own_kind_of_file_names_a_flag_that_only_text_has():
    """Regression: the warning named --val-fraction, which its source does not obey."""
    files = [DataFile(f"web/{i}.xyz", 100, 10) for i in range(4)]
    *_, warning = describe_split({"web": files[:3]}, {"web": files[3:]}, chosen=True)
    assert warning.endswith("with --val-path or folders train/ and val/")


def test_no_advice_about_token_files_names_a_flag_that_only_text_has(tmp_path):
    """Regression: the warning named --val-fraction, which was refused then."""
    files = [DataFile(f"web/{i}.bin", 100, 10) for i in range(4)]
    *_, warning = describe_split({"web": files[:3]}, {"web": files[3:]}, chosen=True)
    assert "25.0% of the bytes" in warning and "--val-path or folders train/ and val/" in warning
    write_pair(tmp_path / "web" / "0", [[1, BOS]])
    with pytest.raises(ValueError, match=r"only one data file.*--val-path") as error:
        split_train_val(data_at(tmp_path), data_format="shards")
    assert "--val-fraction" not in f"{warning}{error.value}"


# ---- token files: folders, and prefixes of pairs -------------------------------------------------


def tiny(prefix, data_format="megatron"):
    if data_format == "shards":
        write_pair(prefix, [[1, BOS]] * 3)
    else:
        write_megatron(prefix, [[[1, BOS]]] * 3)
    return prefix


def test_text_beside_files_of_another_format_is_counted(tmp_path, caplog):
    """Regression: with a fork's own kind of file, a folder of books beside it was not read, without a
    word."""
    tiny(tmp_path / "a", "shards")
    (tmp_path / "book.txt").write_text("a book")
    (tmp_path / "README.txt").write_text("about the data")
    assert [file.name for file in find_files(tmp_path, "shards")] == ["a.bin"]
    find_splits(data_at(tmp_path), "shards")
    assert "1 file is not read: book.txt (text, which --data-format=shards" in caplog.text


def test_folders_have_buckets_and_prefixes_are_buckets(tmp_path):
    a, b, c = (tiny(tmp_path / name) for name in ("web/one", "web/two.x", "code/one"))
    found = split_train_val(data_at(tmp_path), data_format="megatron", by_bucket=True)
    names = {
        split: {bucket: [f.name for f in files] for bucket, files in of.items()}
        for split, of in found.items()
    }
    assert names == {
        "train": {"code": ["one.bin"], "web": ["one.bin"]},
        "val": {"web": ["two.x.bin"]},
    }
    prefixes = f"{c},{b},{a}"
    assert [f.name for f in find_files(prefixes, "megatron")] == ["one.bin", "two.x.bin", "one.bin"]
    one = split_train_val(data_at(prefixes), data_format="megatron")
    assert {
        split: [f.parent.name for f in files] for split, of in one.items() for files in of.values()
    } == {"train": ["code", "web"], "val": ["web"]}
    mixed = split_train_val(data_at(prefixes), data_at(a), data_format="megatron", by_bucket=True)
    assert list(mixed["train"]) == ["code/one", "web/two.x"]  # what validates is held out
    assert list(mixed["val"]) == ["one"]
    with pytest.raises(ValueError, match=r"only one data file, .* in a bucket, .*--val-path"):
        split_train_val(data_at(prefixes), data_format="megatron", by_bucket=True)


def test_an_idx_without_its_bin_is_found_in_linear_time(tmp_path, monkeypatch):
    for n in range(40):
        for ending in (".bin", ".idx"):
            (tmp_path / f"{n}{ending}").touch()
    compared, equal = [], Path.__eq__
    with monkeypatch.context() as patch:
        patch.setattr(
            Path, "__eq__", lambda self, other: compared.append(other) or equal(self, other)
        )
        assert len(find_files(tmp_path, "shards")) == 40
    assert len(compared) < 200
    (tmp_path / "7.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"7\.bin: missing, but 7\.idx needs it"):
        find_files(tmp_path, "shards")


def test_prefixes_are_pinned_by_names_that_survive_a_move(tmp_path):
    prefixes = ",".join(str(tiny(tmp_path / "old" / name)) for name in ("web/one", "code/two"))
    settings = Settings(
        data_path=prefixes, val_path=str(tiny(tmp_path / "old" / "val")), data_format="megatron"
    )
    pinned = order_of(settings).pin(settings)
    assert [e["name"] for e in pinned["train"]["data"]["files"]] == ["web/one.bin", "code/two.bin"]
    assert pinned["train"]["data"]["root"] == str((tmp_path / "old").resolve())
    (tmp_path / "old").rename(tmp_path / "new")
    settings = replace(
        settings, data_path=prefixes.replace("old", "new"), val_path=str(tmp_path / "new" / "val")
    )
    moved = check_files(
        pinned, data_at(settings.data_path).folder, data_at(settings.val_path).folder
    )
    assert moved["train"]["data"]["root"] == str((tmp_path / "new").resolve())
    assert len(open_data(moved, Tokenizer()).train["data"].read(1, np.arange(3))) == 3


def test_hundreds_of_prefixes_are_longer_than_any_path_and_are_found(tmp_path):
    prefixes = ",".join(
        str(tiny(tmp_path / ("a long folder name " * 4) / f"{i:04d}_text_document"))
        for i in range(60)
    )
    assert len(prefixes) > 4095
    assert len(split_train_val(data_at(prefixes), data_format="megatron")["train"]["data"]) == 59
    assert split_weights(prefixes) == (prefixes, None)
    assert split_weights("\n") == ("\n", None), "not an empty list of weights"
    data = {"data_path": prefixes, "data_format": "megatron"}
    pinned = {}
    for settings in (
        Settings(**data),
        MegatronSettings(**data, order="megatron", split="60,40,0"),
    ):
        pinned[settings.order] = order_of(settings).pin(settings)
    assert len(pinned["megatron"]["train"]) == 60
    assert (
        check_files(pinned["lanes"], data_at(prefixes).folder)["train"] == pinned["lanes"]["train"]
    )


@pytest.mark.parametrize("data_format", ["text", "megatron"])
@pytest.mark.parametrize("path", ["x" * 300, "y/" * 3000, "a" * 5000, "nul\0"])
def test_a_path_that_no_file_can_have_is_no_such_folder(path, data_format):
    with pytest.raises((FileNotFoundError, ValueError), match="no such data folder"):
        find_files(path, data_format)


@pytest.mark.parametrize(
    "make, path, data_format, message",
    [
        (
            lambda p: (tiny(p / "a"), tiny(p / "b", "shards")),
            "",
            "megatron",
            r"b\.bin: this pair needs --data-format shards.*mixes",
        ),
        (
            lambda p: (tiny(p / "a"), tiny(p / "b", "shards")),
            "",
            "shards",
            r"a\.bin: this pair needs --data-format megatron.*mixes",
        ),
        (
            lambda p: tiny(p / "a"),
            "",
            "shards",
            "this pair needs --data-format megatron, not shards",
        ),
        (
            lambda p: tiny(p / "a", "shards"),
            "a",
            "megatron",
            r"a\.bin: this pair needs --data-format shards, not megatron",
        ),
        (lambda p: tiny(p / "a"), "a", "text", r"a: no such data folder"),
        (
            lambda p: tiny(p / "a"),
            "{}/a,{}/c",
            "megatron",
            r"c: neither c\.bin nor its \.idx exists; set --data-path",
        ),
        (lambda p: tiny(p / "a").with_suffix(".idx").unlink(), "a", "megatron", r"a\.idx: .*"),
        (
            lambda p: None,
            "a",
            "megatron",
            r"no such data folder; download data .* without \.bin",
        ),
        (
            lambda p: [(p / name).mkdir() for name in ("web", "code", ".git")],
            "other",
            "text",
            r"other: no such data folder; beside it: code, web; download data .*",
        ),
        (
            lambda p: (p / "mytext").mkdir(),
            "mytxt",
            "text",
            r"mytxt: no such data folder; did you mean mytext\?$",
        ),
        (
            lambda p: tiny(p / "a"),
            "",
            "shrads",
            r"--data-format: got 'shrads'.*; did you mean shards\?$",
        ),
        (
            lambda p: tiny(p / "a"),
            "70,{}/a,30,{}/a",
            "megatron",
            r"add --order=megatron, or write "
            r"--data-path=/.*/a,/.*/a$",
        ),
    ],
)
def test_a_path_without_data_is_an_error_with_the_reason(
    tmp_path, make, path, data_format, message
):
    make(tmp_path)
    name = (
        tmp_path
        if not path
        else path.replace("{}", str(tmp_path))
        if "," in path
        else tmp_path / path
    )
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        files = find_files(name, data_format)
        check_format(name, files, data_format)
        scan(name, files)


def test_nanochats_constants_and_importing_creates_no_folder(tmp_path):
    """The numbers are those of the published data sets."""
    code = (
        "import nanochat.dataset as d, os; before = os.path.exists(os.environ['NANOCHAT_BASE_DIR']); "
        "print(before, d.DATA_DIR, d.MAX_SHARD, d.BASE_URL, d.DATASETS['fineweb-edu'].last_shard)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    url = "https://huggingface.co/datasets/karpathy/climbmix-400b-shuffle/resolve/main"
    assert out == f"False {tmp_path}/base/data/climbmix 6542 {url} 1822\n"


def test_nanochats_older_folder_is_the_data_if_no_download_exists(tmp_path):
    """Regression: base_data, which nanochat falls back to, was not found."""
    assert default_data_path() == default_data_dir()
    older = tmp_path / "base" / "base_data"
    write(older, "shard_00000.parquet", "shard_00001.parquet")
    assert default_data_path() == older
    assert [Path(path).name for path in list_parquet_files()] == [
        "shard_00000.parquet",
        "shard_00001.parquet",
    ]
    write(default_data_dir(), "shard_00000.parquet")
    assert default_data_path() == default_data_dir()
