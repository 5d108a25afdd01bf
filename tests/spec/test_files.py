"""Which files below a data path are data, and what stands in the way of reading them."""

import gzip
import json

import pytest

from nanochat.files import data_at, find_files, walk
from nanochat.sources import check, scan
from nanochat.splits import pin_files, split_train_val
from nanochat.text_kinds import read_texts
from tests.toy import write_parquet

pytestmark = pytest.mark.usefixtures("base_dir")


def write(folder, *names, texts=("one", "two")):
    """Small files of text, of the kind that their names say."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        if name.lower().endswith(".parquet"):
            write_parquet(path, list(texts))
        elif name.endswith(".gz"):
            path.write_bytes(gzip.compress(lines))
        else:
            path.write_bytes(lines)
    return folder


def names_of(folder, data_format="text"):
    return [file.relative_to(folder).as_posix() for file in find_files(folder, data_format)]


# ---- links ---------------------------------------------------------------------------------------


def test_a_linked_folder_is_read_like_a_folder(tmp_path):
    write(tmp_path / "disk/web", "b.parquet", "deep/c.parquet")
    write(tmp_path / "data", "a.parquet")
    (tmp_path / "data/web").symlink_to(tmp_path / "disk/web")
    assert names_of(tmp_path / "data") == ["a.parquet", "web/b.parquet", "web/deep/c.parquet"]
    pinned = pin_files(tmp_path / "data", tmp_path / "data/a.parquet")["train"]["data"]
    names = [entry["name"] for entry in pinned["files"]]
    assert names == ["web/b.parquet", "web/deep/c.parquet"] and check(pinned) == pinned


@pytest.mark.parametrize("target", ["sub", "."])
def test_links_in_a_circle_end(tmp_path, target):
    folder = write(tmp_path / "data", "a.parquet", "sub/b.parquet")
    (folder / "sub/again").symlink_to(folder / target)
    assert names_of(folder) == ["a.parquet", "sub/b.parquet"]


@pytest.mark.parametrize("name", ["b.parquet", "B.JSONL", "web", "wiki.2024"])
def test_a_dangling_link_that_may_have_held_data_is_an_error(tmp_path, name):
    folder = write(tmp_path / "data", "a.parquet")
    (folder / name).symlink_to(tmp_path / "blobs/1f3a")
    with pytest.raises(
        FileNotFoundError,
        match=rf"1 link below it .* not exist: {name} \(-> .*1f3a\).*git annex get",
    ):
        find_files(folder)


def test_walking_reports_folders_files_and_dangling_links(tmp_path):
    folder = write(tmp_path / "data", "x/a.parquet", ".git/b.parquet")
    (folder / "gone").symlink_to("nowhere")
    kinds = {
        entry.path.relative_to(folder).as_posix(): (entry.kind, entry.linked)
        for entry in walk(folder)
    }
    assert kinds == {
        "x": ("folder", False),
        "x/a.parquet": ("file", False),
        "gone": ("dangling", True),
    }


# ---- which files are data ------------------------------------------------------------------------


def test_names_that_begin_with_an_underscore_or_a_dot_are_not_data(tmp_path, caplog):
    folder = write(
        tmp_path,
        "a.parquet",
        "b.parquet",
        "_temporary/0/p.parquet",
        ".spark/p.parquet",
        "_c.parquet",
        "x/_logs/q.jsonl",
        "_SUCCESS",
        "._d.parquet",
    )
    assert names_of(folder) == ["a.parquet", "b.parquet"]
    split_train_val(data_at(folder))
    for words in (
        "4 files",
        "._d.parquet, _c.parquet, _temporary/0/p.parquet and 1 more",
        "begins with _ or .",
    ):
        assert words in caplog.text


@pytest.mark.parametrize(
    "name", ["a.ndjson", "a.NDJSON.GZ", "a.json", "a.json.gz", "a.JSONL", "a.Parquet", "a.jsonl.GZ"]
)
def test_json_lines_and_capital_suffixes_are_read(tmp_path, name):
    folder = write(tmp_path, name.lower())
    (folder / name.lower()).rename(folder / name)
    [file] = find_files(folder)
    assert list(read_texts(file)) == ["one", "two"]
    assert sum(scan(folder)["files"][0]["groups"]) == 2


def test_a_folder_with_only_files_that_are_not_read_says_why(tmp_path):
    write(tmp_path, "_temporary/a.parquet")
    with pytest.raises(
        FileNotFoundError,
        match=r"no \.parquet.* file below it \(1 file is not "
        r"read: _temporary/a\.parquet \(a name.*check --data-path",
    ):
        find_files(tmp_path)
