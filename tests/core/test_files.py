"""The files below a data path: odd links, names that state a split, empty files, nulls."""

import errno
import gzip
import os
from pathlib import PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat import files
from nanochat.files import DataPath, data_at, find_files, list_files
from nanochat.sources import check, open_source, scan
from nanochat.splits import describe_split, files_of, pin_files, split_train_val, stated_splits
from nanochat.text import Selection
from nanochat.text_kinds import read_texts
from nanochat.tokens import HEADERS
from tests.spec.test_files import names_of, write
from tests.token_files import Tokenizer, write_megatron, write_pair
from tests.toy import compressed, write_parquet

pytestmark = pytest.mark.usefixtures("base_dir")


def split_names(folder, *args, **kwargs):
    """{split: {bucket: relative names}}."""
    found = split_train_val(data_at(folder), *map(data_at, args), **kwargs)
    return {
        split: {
            bucket: [os.path.relpath(file, folder) for file in files]
            for bucket, files in buckets.items()
        }
        for split, buckets in found.items()
    }


# ---- links ---------------------------------------------------------------------------------------


def test_a_link_to_itself_is_a_dangling_link(tmp_path):
    folder = write(tmp_path / "data", "a.parquet")
    (folder / "self.parquet").symlink_to(folder / "self.parquet")
    with pytest.raises(FileNotFoundError, match=r"1 link below it .*: self\.parquet"):
        find_files(folder)


def test_many_dangling_links_are_counted_and_some_named(tmp_path):
    folder = write(tmp_path / "data", "a.parquet")
    for i in range(9):
        (folder / f"{i}.parquet").symlink_to("gone")
    with pytest.raises(
        FileNotFoundError, match=r"9 links .*0\.parquet, 1\.parquet, 2\.parquet and 6 more"
    ):
        find_files(folder)


@pytest.mark.parametrize(
    "name", ["README.md", ".cache", "_temporary", "lib.so", "a.c", "b.jpeg", "c.csv"]
)
def test_a_dangling_link_that_is_not_data_does_not_matter(tmp_path, name):
    folder = write(tmp_path / "data", "a.parquet")
    (folder / name).symlink_to("gone")
    assert names_of(folder) == ["a.parquet"]


def test_the_missing_half_of_linked_token_files_is_an_error(tmp_path):
    write_pair(tmp_path / "disk/a", [[1, 2]])
    (tmp_path / "data").mkdir()
    for ending in (".bin", ".idx"):
        (tmp_path / f"data/a{ending}").symlink_to(tmp_path / f"disk/a{ending}")
    assert names_of(tmp_path / "data", "shards") == ["a.bin"]
    (tmp_path / "disk/a.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"1 link below it .*: a\.bin"):
        find_files(tmp_path / "data", "shards")


def test_a_file_with_two_names_is_read_twice_with_a_warning(tmp_path, caplog):
    folder = write(tmp_path / "data", "a.parquet")
    (folder / "b.parquet").symlink_to(folder / "a.parquet")
    assert names_of(folder) == ["a.parquet", "b.parquet"]
    assert (
        "1 file reachable by several names" in caplog.text
        and "b.parquet is a.parquet" in caplog.text
    )


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    folder, scandir = write(tmp_path / "data", "a.parquet", "secret/b.parquet"), os.scandir

    def denied(path):
        if str(path).endswith("secret"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(OSError, match=r"secret: it cannot be read \(Permission denied\)"):
        find_files(folder)


# ---- which files are data ------------------------------------------------------------------------


def test_a_hidden_data_path_is_read(tmp_path):
    assert names_of(write(tmp_path / "_x/.y", "a.parquet")) == ["a.parquet"]


def test_a_pair_that_megatron_names_with_an_underscore_is_data(tmp_path):
    write_megatron(tmp_path / "_text_document", [[[1]]])
    for hidden in ("_temporary/b", "_old/b", ".old/b", ".b"):
        write_megatron(tmp_path / hidden, [[[1]]])
    assert names_of(tmp_path, "megatron") == ["_text_document.bin"]


def test_in_a_format_of_a_forks_own_files_and_folders_may_begin_with_an_underscore(
    tmp_path, monkeypatch
):
    """Regression: _settings.py and __init__.py were read, but not the files in _internal/."""
    monkeypatch.setattr(files, "_check_format_name", lambda name: None)  # nanochat/source_py.py
    mine = ["__init__.py", "_internal/_parts.py", "_settings.py"]
    write(tmp_path, *mine, ".hidden.py", "__pycache__/a.py", ".git/b.py")
    listing = list_files(data_at(tmp_path), "py")
    assert [str(path.relative_to(tmp_path)) for path in listing.data] == mine
    [passed_over] = listing.ignored.values()
    assert {path.name for path in passed_over} == {".hidden.py", "a.py"}


@pytest.mark.parametrize("name", ["a.txt.gz", "a.TXT.zst"])
def test_compressed_plain_text_is_one_document(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(compressed(b"one\ntwo\n", path.suffix))
    path.with_name(f"README{name[1:]}").touch()
    [file] = find_files(tmp_path)
    assert list(read_texts(file)) == ["one\ntwo\n"]
    assert scan(tmp_path)["files"][0]["groups"] == [1]


def test_text_in_capital_suffixes_is_read(tmp_path):
    (tmp_path / "A.TXT").write_text("a book")
    assert list(read_texts(find_files(tmp_path)[0])) == ["a book"]


@pytest.mark.parametrize(
    "content",
    [
        '[{"text": "x"}, {"text": "y"}]',
        '{"text": "x"}',
        '{\n"text": "x"\n}\n',
        "1\n2\n",
        '["a"]\n["b"]\n',
        "{broken\n{broken\n",
    ],
)
def test_json_that_is_not_one_object_per_line_is_listed_and_not_read(tmp_path, caplog, content):
    folder = write(tmp_path, "a.parquet", "b.parquet")
    (folder / "x.json").write_text(content)
    assert names_of(folder) == ["a.parquet", "b.parquet"]
    split_train_val(data_at(folder))
    assert "1 file is not read: x.json (JSON, but not one object per line)" in caplog.text


def test_json_that_programs_write_beside_data_is_neither_read_nor_listed(tmp_path, caplog):
    folder = write(
        tmp_path,
        "a.parquet",
        "b.parquet",
        "dataset_info.json",
        "tokenizer/tokenizer.json",
        "README.md",
    )
    assert names_of(folder) == ["a.parquet", "b.parquet"]
    split_train_val(data_at(folder))
    assert caplog.text == ""


def test_the_files_of_the_datas_own_tokenizer_are_not_listed(tmp_path, caplog):
    """Regression: each launch warned of tokenizer/ranks.tiktoken."""
    folder = write(tmp_path, "a.parquet", "b.parquet", "tokenizer/ranks.tiktoken", "x.tiktoken")
    split_train_val(data_at(folder))
    assert "2 files are not read" in caplog.text
    caplog.clear()
    write(tmp_path, "tokenizer/tokenizer.json")
    split_train_val(data_at(folder))
    assert "1 file is not read: x.tiktoken" in caplog.text


def test_one_line_lists_all_files_that_are_not_read(tmp_path, caplog):
    folder = write(
        tmp_path,
        "a.parquet",
        "b.parquet",
        *(f"{i}.csv" for i in range(5)),
        "t.jsonl.bz2",
        "u.txt.bz2",
    )
    pin_files(folder)
    [line] = [record.message for record in caplog.records if "not read" in record.message]
    for words in (f"{folder}: 7 files", "not read", "0.csv, 1.csv, 2.csv and 4 more"):
        assert words in line


# ---- names that state a split --------------------------------------------------------------------

HUB = [
    f"{split}-0000{i}-of-00002.parquet"
    for split in ("test", "train", "validation")
    for i in range(2)
]


def test_names_of_the_hub_state_the_split_and_test_is_not_used(tmp_path, caplog):
    found = split_names(write(tmp_path, *(f"data/{name}" for name in HUB)))
    assert found == {
        "train": {"data": [f"data/train-0000{i}-of-00002.parquet" for i in range(2)]},
        "val": {"data": [f"data/validation-0000{i}-of-00002.parquet" for i in range(2)]},
    }
    assert (
        "data/test-00000-of-00002.parquet, data/test-00001-of-00002.parquet (for testing, by name)"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("names", "train", "val"),
    [
        (["train.jsonl", "validation.jsonl", "test.jsonl"], ["train.jsonl"], ["validation.jsonl"]),
        (["train.jsonl", "dev.jsonl"], ["train.jsonl"], ["dev.jsonl"]),
        (
            ["train.jsonl", "valid.jsonl", "other/x.jsonl"],
            ["other/x.jsonl", "train.jsonl"],
            ["valid.jsonl"],
        ),
        (["Train_0.parquet", "Val_0.parquet"], ["Train_0.parquet"], ["Val_0.parquet"]),
        (
            ["c4-train.00000-of-00002.json.gz", "c4-validation.00000-of-00001.json.gz"],
            ["c4-train.00000-of-00002.json.gz"],
            ["c4-validation.00000-of-00001.json.gz"],
        ),
        (
            ["TinyStories-train.txt", "TinyStories-valid.txt"],
            ["TinyStories-train.txt"],
            ["TinyStories-valid.txt"],
        ),
        (
            ["train_sft-0.parquet", "test_sft-0.parquet", "val.parquet"],
            ["train_sft-0.parquet"],
            ["val.parquet"],
        ),
        (["a.jsonl", "validation.jsonl", "z.jsonl"], ["a.jsonl", "z.jsonl"], ["validation.jsonl"]),
        (["a.jsonl", "b.jsonl", "test.jsonl"], ["a.jsonl"], ["b.jsonl"]),
        (
            ["train-0.parquet", "train-1.parquet", "test-0.parquet"],
            ["train-0.parquet"],
            ["train-1.parquet"],
        ),
        (
            ["train/a.jsonl", "validation/a.jsonl", "test/a.jsonl"],
            ["train/a.jsonl"],
            ["validation/a.jsonl"],
        ),
        (["train/a.jsonl", "dev/a.jsonl"], ["train/a.jsonl"], ["dev/a.jsonl"]),
        (
            ["en/train/a.jsonl", "en/valid/a.jsonl", "en/test/a.jsonl"],
            ["en/train/a.jsonl"],
            ["en/valid/a.jsonl"],
        ),
        # names that do not count: nothing for training is beside them, or they may be topics
        (["train-0.parquet", "train-1.parquet"], ["train-0.parquet"], ["train-1.parquet"]),
        (["test-0.parquet", "test-1.parquet"], ["test-0.parquet"], ["test-1.parquet"]),
        (["code.jsonl", "dev.jsonl", "ops.jsonl"], ["code.jsonl", "dev.jsonl"], ["ops.jsonl"]),
        (
            ["blog.jsonl", "test_cases.jsonl", "z.jsonl"],
            ["blog.jsonl", "test_cases.jsonl"],
            ["z.jsonl"],
        ),
        (["contest.jsonl", "validity.jsonl"], ["contest.jsonl"], ["validity.jsonl"]),
        (
            ["code/a.jsonl", "test/a.jsonl", "web/a.jsonl"],
            ["code/a.jsonl", "test/a.jsonl"],
            ["web/a.jsonl"],
        ),
    ],
)
def test_names_decide_if_some_are_for_training_and_others_are_not(tmp_path, names, train, val):
    found = split_names(write(tmp_path, *names))
    assert (found["train"]["data"], list(found["val"].values())) == (train, [val])


def test_buckets_with_and_without_names_keep_their_own_splits(tmp_path):
    write(tmp_path, *(f"web/{name}" for name in HUB), "code/a.parquet", "code/b.parquet")
    found = split_names(tmp_path, by_bucket=True)
    named = {
        split: [f"web/{split}-0000{i}-of-00002.parquet" for i in range(2)]
        for split in ("train", "validation")
    }
    assert found["train"] == {"code": ["code/a.parquet"], "web": named["train"]}
    assert found["val"] == {"code": ["code/b.parquet"], "web": named["validation"]}


def test_a_name_that_states_nothing_beside_names_that_do_is_an_error(tmp_path):
    write(tmp_path, *HUB, "more.parquet")
    with pytest.raises(
        ValueError,
        match=r"more\.parquet: the names of other files beside it state a split .*move it",
    ):
        split_train_val(data_at(tmp_path))


def test_a_val_path_replaces_named_validation_files_and_test_is_still_not_used(tmp_path):
    write(tmp_path / "data", *HUB)
    other = write(tmp_path / "other", "a.parquet")
    found = split_names(tmp_path / "data", other)
    assert found["train"]["data"] == [f"train-0000{i}-of-00002.parquet" for i in range(2)]
    assert split_names(tmp_path / "data", tmp_path / "data")["val"]["data"] == [
        f"validation-0000{i}-of-00002.parquet" for i in range(2)
    ]


def test_a_val_fraction_of_data_that_names_validation_files_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="the data already has validation files"):
        split_train_val(data_at(write(tmp_path, *HUB)), shared=True)


def test_several_validation_folders_are_an_error(tmp_path):
    write(tmp_path, "train/a.jsonl", "val/a.jsonl", "dev/a.jsonl")
    with pytest.raises(ValueError, match=r"it has val/ and dev/; name the one"):
        split_train_val(data_at(tmp_path))
    assert list(split_train_val(data_at(tmp_path), data_at(tmp_path / "dev"))["val"]) == ["data"]


def test_training_and_test_folders_without_validation_stop(tmp_path):
    write(tmp_path, "train/a.jsonl", "test/a.jsonl")
    with pytest.raises(
        FileNotFoundError,
        match=r"train/ but no val/; name .*--val-path",
    ):
        split_train_val(data_at(tmp_path))
    assert split_names(tmp_path, shared=True)["val"] == {"data": ["train/a.jsonl"]}


def test_files_beside_train_and_val_are_listed(tmp_path, caplog):
    write(tmp_path, "train/a.jsonl", "val/a.jsonl", "more.jsonl")
    split_train_val(data_at(tmp_path))
    assert "1 file is not read: more.jsonl (outside train/ and val/)" in caplog.text


@pytest.mark.parametrize(
    "name", ["requirements.txt", "requirements-dev.txt", "README.txt", "LICENSE.txt", "readme.TXT"]
)
def test_text_about_the_data_is_not_data(tmp_path, caplog, name):
    found = split_names(write(tmp_path, "a.parquet", "b.parquet", name))
    assert found["val"] == {"data": ["b.parquet"]} and found["train"] == {"data": ["a.parquet"]}
    assert f"{name} (about the data, by name)" in caplog.text


def test_notes_in_a_txt_file_do_not_validate(tmp_path):
    assert split_names(write(tmp_path, "a.parquet", "b.parquet", "notes.txt")) == {
        "train": {"data": ["a.parquet", "notes.txt"]},
        "val": {"data": ["b.parquet"]},
    }
    (tmp_path / "b.parquet").unlink()
    with pytest.raises(ValueError, match=r"only one data file, .* besides \.txt files.*--val-path"):
        split_train_val(data_at(tmp_path))


def test_validation_files_chosen_by_name_cause_no_warning_about_the_choice(tmp_path):
    pinned = pin_files(write(tmp_path, *HUB))
    lines = describe_split(files_of(pinned["train"]), files_of(pinned["val"]), chosen=True)
    assert len(lines) == 2 and "validation-00000" in lines[0]


def test_names_of_sources_are_topics():
    """Regression: with a reader for .py, validation.py was the validation data of a source tree, and
    test.py was not read."""
    names = [PurePosixPath(name) for name in ("a/validation.py", "a/test.py", "a/b.py", "c.py")]
    assert set(stated_splits(names).values()) == {""}
    names = [PurePosixPath(name) for name in ("train-0.npy", "val-0.npy")]
    assert list(stated_splits(names).values()) == ["train", "val"]


def test_the_topmost_name_that_counts_decides():
    names = ("train/test-0.jsonl", "train/train-0.jsonl", "validation/a.jsonl", "b.jsonl")
    assert list(stated_splits([*map(PurePosixPath, names)]).values()) == [
        "train",
        "train",
        "val",
        "",
    ]


# ---- files without documents ---------------------------------------------------------------------

EMPTY = {
    "a0.parquet": lambda path: write_parquet(path, []),
    "a1.jsonl": lambda path: path.touch(),
    "a2.jsonl.gz": lambda path: path.write_bytes(gzip.compress(b"")),
    "a3.txt": lambda path: path.touch(),
    "a4.jsonl": lambda path: path.write_bytes(b"\n  \n"),
    "a5.parquet": lambda path: path.touch(),
    "a6.jsonl.gz": lambda path: path.touch(),
    "a7.parquet": lambda path: write_parquet(path, [None, None]),
    "a8.json": lambda path: path.touch(),
    "a9.parquet": lambda path: write_parquet(path, []),
    "zz.parquet": lambda path: write_parquet(path, []),
}


def test_files_without_documents_are_skipped_with_one_warning(tmp_path, caplog):
    for name, make in EMPTY.items():
        make(tmp_path / name)
    pinned = pin_files(write(tmp_path, "b.parquet", "c.parquet"))
    assert [
        [entry["name"] for entry in pinned[split]["data"]["files"]] for split in ("train", "val")
    ] == [["b.parquet"], ["c.parquet"]]
    [message] = caplog.messages
    for words in (str(tmp_path), "11 files", "a0.parquet, a1.jsonl, a2.jsonl.gz and 8 more"):
        assert words in message


def test_data_without_any_document_is_one_error(tmp_path):
    for name, make in EMPTY.items():
        make(tmp_path / name)
    with pytest.raises(
        ValueError, match=r"11 files but no document in any of them \(a0\.parquet, .* and 8 more\)"
    ):
        pin_files(tmp_path)


def test_token_files_without_entries_are_skipped(tmp_path, caplog):
    for name in ("a", "c"):
        write_pair(tmp_path / name, [[1, 2]])
    (tmp_path / "b.bin").touch()
    (tmp_path / "b.idx").write_bytes(HEADERS["shards"].pack(b"GPTS", 1, 2, 0) + bytes(8))
    assert [
        file.name
        for file in split_train_val(data_at(tmp_path), data_format="shards")["train"]["data"]
    ] == ["a.bin"]
    assert "skipping 1 file without documents: b.bin" in caplog.text


def test_an_empty_saved_data_set_has_no_documents(tmp_path, caplog):
    table = pa.table({"text": pa.array([], pa.string())})
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as out:
        out.write_table(table)
    found = split_names(write(tmp_path, "b.parquet", "c.parquet"))
    assert found["train"] == {"data": ["b.parquet"]} and "a.arrow" in caplog.text


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.bin"])
@pytest.mark.parametrize(
    "content",
    [
        "version https://git-lfs.github.com/spec/v1\noid sha256:1f\nsize 9\n",
        "/annex/objects/SHA256E-s9--1f.txt\n",
    ],
)
def test_a_file_that_stands_for_data_that_was_not_fetched_is_an_error(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    (tmp_path / "z.txt").write_text("a book")
    with pytest.raises(
        ValueError, match=rf"1 file of Git LFS or git-annex whose data was not fetched: {name}"
    ):
        split_train_val(
            data_at(tmp_path), data_format="shards" if name.endswith(".bin") else "text"
        )


# ---- nulls ---------------------------------------------------------------------------------------


def test_nulls_are_skipped_and_counted_when_the_files_are_pinned(tmp_path, caplog):
    path = write_parquet(tmp_path / "a.parquet", ["one", None, "two", None], 2)
    assert sum(scan(path)["files"][0]["groups"]) == 2 and list(read_texts(path)) == ["one", "two"]
    [message] = caplog.messages
    assert "2 nulls" in message and str(path) in message


def test_nulls_that_the_footer_does_not_count_are_empty_texts(tmp_path, caplog):
    """Regression: nanochat's files count none, so all of them were read whole before the first
    step, and from the Hub copied."""
    texts = ["one", None, "two", None]
    path = write_parquet(tmp_path / "a.parquet", texts, 2, write_statistics=False)
    manifest = scan(path)
    assert manifest["files"][0]["groups"] == [2, 2]
    source = open_source(manifest, Tokenizer(1000))
    lengths = [
        len(document.ids) for group in (0, 1) for document in source.read(group, np.arange(2))
    ]
    assert lengths == [4, 1, 4, 1] and list(read_texts(path)) == ["one", "", "two", ""]
    [message] = caplog.messages
    assert "read as empty texts" in message and str(path) in message


def test_one_warning_lists_all_files_with_nulls(tmp_path, caplog):
    for i in range(5):
        write_parquet(tmp_path / f"{i}.parquet", ["one", None])
    manifest = scan(tmp_path)
    [message] = caplog.messages
    for words in ("5 nulls", "5 files", f"{tmp_path}/0.parquet", "2.parquet and 2 more"):
        assert words in message
    assert check(manifest) == manifest


@pytest.mark.parametrize("statistics", [True, False])
def test_with_strict_a_null_is_an_error(tmp_path, statistics):
    path = write_parquet(tmp_path / "a.parquet", ["one", None], write_statistics=statistics)
    assert scan(path)["files"][0]["groups"] == ([1] if statistics else [2])
    with pytest.raises(ValueError, match=r"a\.parquet: 1 null in column `text` of row group 0"):
        scan(path, selection=Selection(strict=True))


@pytest.mark.parametrize("how", [{}, {"write_statistics": False}])
def test_parquet_without_nulls_is_read_in_place(tmp_path, how):
    path = write_parquet(tmp_path / "a.parquet", ["one", "two"], **how)
    [entry] = scan(path)["files"]
    assert entry["size"] == path.stat().st_size and "parquet" not in entry


def test_a_column_that_cannot_hold_nulls_is_not_read(tmp_path, monkeypatch):
    schema = pa.schema([pa.field("text", pa.string(), nullable=False)])
    pq.write_table(
        pa.table({"text": ["one"]}, schema=schema), tmp_path / "a.parquet", write_statistics=False
    )
    monkeypatch.setattr("nanochat.text_kinds._read_parquet", None)
    assert sum(scan(tmp_path / "a.parquet")["files"][0]["groups"]) == 1


def test_nulls_in_a_saved_data_set_are_skipped_as_in_parquet_and_jsonl(tmp_path):
    table = pa.table({"text": ["one", None, "two"]})
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as out:
        out.write_table(table)
    pq.write_table(table, tmp_path / "b.parquet")
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n{"text": null}\n{"text": "two"}\n')
    assert [list(read_texts(file)) for file in find_files(tmp_path)] == [["one", "two"]] * 3


# ---- what a data path names ----------------------------------------------------------------------


def test_a_folder_is_a_folder_even_if_it_does_not_exist(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        assert data_at(folder) == DataPath(str(folder), folder)


def test_a_single_file_is_named_relative_to_its_folder(tmp_path):
    [file] = write(tmp_path, "web/a,b.parquet").rglob("*.parquet")
    assert data_at(file) == DataPath(str(file), file.parent, (file,))


def test_prefixes_are_named_relative_to_their_common_folder(tmp_path):
    for name in ("web/a", "code/b"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / f"{name}.bin").touch()
    text = f"{tmp_path}/web/a,{tmp_path}/code/b"
    files = tmp_path / "web/a.bin", tmp_path / "code/b.bin"
    assert data_at(text) == DataPath(text, tmp_path, files, are_prefixes=True)


def test_a_warning_counts_files_of_kinds_that_nothing_reads(tmp_path):
    for name in ("a.jsonl", "b.py", "c.md", "README.md", "LICENSE", "run.log"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    listing = list_files(data_at(tmp_path))
    names = {reason: [file.name for file in files] for reason, files in listing.ignored.items()}
    [(reason, files)] = names.items()
    assert files == ["b.py", "c.md"] and "not a kind of file that is read" in reason
    assert "docs/data.md" in reason


def test_a_warning_about_files_is_given_once_although_they_are_listed_again(tmp_path, caplog):
    folder = write(tmp_path, "a.parquet", "b.parquet", "c.csv")
    (folder / "d.jsonl").touch()
    for _ in range(2):
        split_train_val(data_at(folder))
    assert sum("not read" in message for message in caplog.messages) == 1
    assert sum("without documents" in message for message in caplog.messages) == 1


def test_what_val_path_names_below_the_data_path_is_held_out(tmp_path):
    """Regression: the model was trained on it, silently."""
    folder = write(tmp_path / "data", "a.parquet", "essays/b.parquet", "essays/c.parquet")
    splits = split_train_val(data_at(folder), data_at(folder / "essays"))
    named = {split: [file.name for file in files["data"]] for split, files in splits.items()}
    assert named == {"train": ["a.parquet"], "val": ["b.parquet", "c.parquet"]}
    with pytest.raises(ValueError, match=r"--val-path: it holds all training files of "):
        split_train_val(data_at(folder), data_at(folder))


def test_a_folder_that_tok_shards_has_only_begun_is_not_called_text(tmp_path):
    """Regression: "it has files for --data-format text", which were its tokenizer."""
    tokenizer = tmp_path / "shards/tokenizer/tokenizer.json"
    tokenizer.parent.mkdir(parents=True)
    tokenizer.write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"no \.bin file below it; .*tok_shards resumes"):
        list_files(data_at(tmp_path / "shards"), "shards")
