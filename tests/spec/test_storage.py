"""Data that is not on this machine: a storage is a function of the table `STORAGE` and a class with
the methods of `Remote`, as here in thirty lines, and gives the documents of a folder."""

import io
import os
from pathlib import Path

import numpy as np
import pytest

from nanochat.common import (
    STORAGE,
    Remote,
    as_local_path,
    as_path,
    begin_launch,
    get_base_dir,
    hash_bytes,
)
from nanochat.files import data_at, list_files
from nanochat.integrations.remote_files import PinnedPath
from nanochat.pins import fingerprint
from nanochat.sources import check, open_source, scan_files
from tests.token_files import Tokenizer, write_pair
from tests.toy import ByteTokenizer, some_texts, write_jsonl, write_parquet

STORED: dict[str, bytes] = {}


class Kept(Remote):
    """A path of a dict in memory, kept:/name."""

    def is_file(self):
        return str(self) in STORED

    def is_dir(self):
        return any(self.walk())

    def walk(self):
        return (Kept(name) for name in STORED if name.startswith(f"{self}/"))

    def stat(self):
        return os.stat_result((0o100444, 0, 0, 1, 0, 0, len(STORED[str(self)]), 0, 0, 0))

    def etag(self):
        return hash_bytes(STORED[str(self)])

    def open(self, mode, buffering=-1):
        return io.BytesIO(STORED[str(self)])

    def local_copy(self, cache=None):
        if str(self) not in STORED:
            raise FileNotFoundError(f"{self}: not stored")
        copy = get_base_dir() / f"{self.etag()}-{self.name}"
        copy.write_bytes(STORED[str(self)])
        return copy

    def open_reader(self, dtype):
        return KeptReader(np.frombuffer(STORED[str(self)], dtype))


class KeptReader:
    def __init__(self, elements):
        self.elements = elements

    def read(self, begin, end):
        return self.elements[begin:end]

    def read_many(self, ranges):
        return [self.read(begin, end) for begin, end in ranges]


def test_a_storage_that_is_read_in_ranges_may_know_nothing_that_a_launch_forgets():
    """Regression: RecursionError at the next launch."""

    class Ranges(PinnedPath):
        pass

    assert Ranges.forget is Remote.forget
    begin_launch()


@pytest.fixture(autouse=True)
def storage(base_dir, monkeypatch):
    monkeypatch.setitem(STORAGE, "kept", f"{__name__}:Kept")
    yield
    STORED.clear()


def keep(folder):
    """Store all files below a folder as kept://data/..."""
    for path in folder.rglob("*"):
        if path.is_file():
            STORED[f"kept://data/{path.relative_to(folder)}"] = path.read_bytes()


def write_text(folder):
    write_parquet(folder / "web" / "a.parquet", some_texts(20, seed=1), 8)
    write_jsonl(folder / "web" / "b.jsonl", some_texts(20, seed=2))


def write_tokens(folder):
    (folder / "web").mkdir(parents=True)
    entries = [[*map(int, text.encode()[:30]), 256] for text in some_texts(20, seed=3)]
    write_pair(folder / "web" / "a", entries, vocab_size=257)


def documents(path, data_format):
    """The files' names, the fingerprint, and the ids of all documents at a path."""
    data = data_at(path)
    files = list_files(data, data_format).data
    manifest = check(scan_files(data.folder, files))
    source = open_source(manifest, ByteTokenizer() if data_format == "text" else Tokenizer())
    ids = [
        document.ids[:].tolist()
        for group, number in enumerate(source.groups)
        for document in source.read(group, np.arange(number))
    ]
    return [entry["name"] for entry in manifest["files"]], len(fingerprint(manifest)), ids


@pytest.mark.parametrize("write, data_format", [(write_text, "text"), (write_tokens, "shards")])
def test_a_storage_of_one_class_gives_the_documents_of_a_folder(tmp_path, write, data_format):
    write(tmp_path / "data")
    keep(tmp_path / "data")
    here = documents(tmp_path / "data", data_format)
    there = documents("kept://data", data_format)
    assert there == here and len(here[2]) >= 20


def test_unfinished_token_files_are_refused_in_a_storage_too(tmp_path):
    """Regression: training began on those that were there."""
    write_tokens(tmp_path / "data")
    (tmp_path / "data/web/.records").mkdir()
    (tmp_path / "data/web/.records/a.json").touch()
    keep(tmp_path / "data")
    missing = (
        r"^kept://data: .*manifest.json is missing in 1 of 1 folder \(web\); .* upload the rest"
    )
    with pytest.raises(ValueError, match=missing):
        list_files(data_at("kept://data"), "shards")
    STORED["kept://data/web/manifest.json"] = b""
    assert len(list_files(data_at("kept://data"), "shards").data) == 1


def test_a_path_keeps_its_slashes_and_parts():
    path = as_path("kept://data") / "web" / "a.parquet"
    assert (str(path), path.name, path.suffix) == (
        "kept://data/web/a.parquet",
        "a.parquet",
        ".parquet",
    )
    assert str(path.relative_to(as_path("kept://data"))) == "web/a.parquet"


@pytest.mark.parametrize("kind", ["file", "memory", "gcs", "s3a"])
def test_a_url_of_another_kind_is_not_taken_for_a_folder_here(kind):
    """Regression: "no such data folder", and an output folder named like gcs:."""
    for path in (f"{kind}://data/web", Path(f"{kind}://data/web")):
        for read in (as_path, lambda path: as_local_path(path, "--output-dir")):
            with pytest.raises(ValueError, match=rf"{kind}:/.*expected s3://.*without file://"):
                read(path)


def test_a_remote_path_has_no_method_that_would_look_on_this_machine():
    """mypy refuses what is not there, so data code cannot ask for it by mistake."""
    local = {"iterdir", "glob", "rglob", "read_text", "read_bytes", "expanduser", "unlink", "mkdir"}
    assert local.isdisjoint(dir(Remote))
