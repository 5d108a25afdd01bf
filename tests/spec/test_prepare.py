"""Text that is not ordinary parquet becomes a plain folder of parquet, once, pinned by its origin."""

import os
import shutil

import pyarrow.parquet as pq
import pytest

from nanochat import prepare
from nanochat.pins import fingerprint
from nanochat.sources import check, open_source, scan
from nanochat.splits import pin_files
from tests.toy import ByteTokenizer, some_texts, write_jsonl

DOCUMENTS = some_texts(60, seed=4, longest=40)


@pytest.fixture(autouse=True)
def base_dir(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("base")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(folder))
    monkeypatch.setattr(prepare, "GROUP_DOCUMENTS", 8)
    return folder


@pytest.fixture
def data(tmp_path):
    """Three files of jsonl."""
    for i, name in enumerate("abc"):
        write_jsonl(tmp_path / "data" / f"{name}.jsonl", DOCUMENTS[20 * i : 20 * i + 20])
    return tmp_path / "data"


@pytest.fixture
def converted(monkeypatch):
    """The names of the files that are converted from now on."""
    names = []
    convert = prepare._convert

    def counting(file, *args):
        names.append(file.name)
        return convert(file, *args)

    monkeypatch.setattr(prepare, "_convert", counting)
    return names


def places(manifest):
    return [entry["parquet"] for entry in manifest["files"]]


def folders(base_dir):
    return sorted((base_dir / "prepared").iterdir())


# ---- the folder ----------------------------------------------------------------------------------


def test_a_prepared_folder_is_data_like_any_other(data, base_dir):
    manifests = pin_files(data)
    [folder] = folders(base_dir)
    assert sorted(path.name for path in folder.iterdir() if path.name[0] != ".") == [
        "prepared.json",
        "train",
        "val",
    ]
    again = pin_files(folder)
    for split in ("train", "val"):
        ours, theirs = manifests[split]["data"], again[split]["data"]
        assert fingerprint(ours) == fingerprint(theirs)
        assert not any("parquet" in entry for entry in theirs["files"])


def test_rows_keep_the_file_and_the_line_they_came_from(tmp_path):
    path = tmp_path / "web" / "a.jsonl"
    path.parent.mkdir()
    path.write_text('{"text": "one"}\n\n{broken\n{"text": "two"}\n')
    [place] = places(scan(tmp_path))
    assert pq.read_table(place).to_pydict() == {
        "text": ["one", "two"],
        "from_file": ["web/a.jsonl"] * 2,
        "from_line": [1, 4],
    }


# ---- once ----------------------------------------------------------------------------------------


def test_nothing_is_converted_twice(data, converted):
    first = scan(data)
    assert scan(data) == check(first) == first
    assert sorted(converted) == ["a.jsonl", "b.jsonl", "c.jsonl"]


def test_a_changed_file_alone_is_converted_again(data, converted):
    before = places(scan(data))
    write_jsonl(data / "b.jsonl", DOCUMENTS[:30])
    converted.clear()
    after = places(scan(data))
    assert converted == ["b.jsonl"]
    for i, is_same in enumerate((True, False, True)):
        assert os.path.samefile(before[i], after[i]) == is_same
    assert not set(before) & set(after), "an older run keeps its own folder"


# ---- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", ["folder", "file", "truncated", "records", "no JSON", "no record", "other types"]
)
def test_what_is_gone_or_damaged_is_prepared_again(data, base_dir, how):
    manifest = scan(data)
    [folder] = folders(base_dir)
    victim = folder / "train/b.jsonl.parquet"
    if how == "folder":
        shutil.rmtree(folder)
    elif how == "file":
        victim.unlink()
    elif how == "truncated":
        victim.write_bytes(victim.read_bytes()[:-9])
    elif how == "records":
        (folder / "prepared.json").unlink()
    elif how == "no JSON":
        (folder / "prepared.json").write_text('{"files": ')
    elif how == "no record":
        (folder / "prepared.json").write_text('{"files": {"train/a.jsonl.parquet": {}}}')
    else:
        text = (folder / "prepared.json").read_text()
        (folder / "prepared.json").write_text(text.replace('"lines": []', '"lines": 7'))
    assert check(manifest) == manifest
    source = open_source(manifest, ByteTokenizer())
    assert [text for g in range(len(source.groups)) for text in source.texts(g)] == DOCUMENTS


# ---- pins ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ['{"text": "aXc"}\n', '{"text": "longer"}\n'])
def test_a_changed_file_of_the_user_is_named(tmp_path, content):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abc"}\n')
    manifest = scan(tmp_path)
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"^{path}: it has changed since this run began"):
        check(manifest)


def test_a_vanished_file_of_the_user_is_named_although_its_parquet_exists(data):
    manifest = scan(data)
    (data / "b.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=rf"^{data}/b\.jsonl: this run reads it, but"):
        check(manifest)
