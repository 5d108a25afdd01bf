"""Files are groups of documents: pinned, read in any order, and refused if they changed."""

import random
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat import prepare, sources
from nanochat.parquet_source import ParquetSource
from nanochat.pins import fingerprint
from nanochat.sources import check, scan
from tests.toy import BOS, ByteTokenizer, some_texts, write_parquet

GROUP = 8


@pytest.fixture(autouse=True)
def small_groups(base_dir, monkeypatch):
    """Converted files go to the test's own folder, in small row groups."""
    monkeypatch.setattr(prepare, "GROUP_DOCUMENTS", GROUP)


@pytest.fixture
def folder(tmp_path):
    for i in range(3):
        write_parquet(tmp_path / "data" / f"s{i}.parquet", some_texts(20, seed=i), GROUP)
    return tmp_path / "data"


def open_source(path):
    return ParquetSource(scan(path), ByteTokenizer())


def texts_of(source, group, numbers, keep=0):
    """The texts of some documents of a group."""
    documents = source.read(group, np.array(numbers), keep)
    assert all(document.ids[0] == BOS and document.ids.base is None for document in documents)
    assert not any(document.context or document.silent for document in documents)
    return [ByteTokenizer().decode(document.ids) for document in documents]


def grouped(texts, size=GROUP):
    return [texts[i : i + size] for i in range(0, len(texts), size)]


# ---- manifest ------------------------------------------------------------------------------------


def test_manifest_and_fingerprint_survive_a_move_and_follow_the_contents(folder, tmp_path):
    manifest, elsewhere = scan(folder), tmp_path / "elsewhere"
    assert check(manifest) == manifest
    folder.rename(elsewhere)
    moved = check(manifest, elsewhere)
    assert moved["files"] == manifest["files"] and moved["root"] == str(elsewhere)
    (elsewhere / "s0.parquet").rename(elsewhere / "r0.parquet")
    assert fingerprint(moved) == fingerprint(manifest) == fingerprint(scan(elsewhere))
    write_parquet(elsewhere / "r0.parquet", some_texts(20, seed=77), GROUP)
    assert fingerprint(scan(elsewhere)) != fingerprint(manifest)


def same_size(path):
    """Another footer, but the same size."""
    write_parquet(path, [t.swapcase() for t in some_texts(20, seed=1)], GROUP, **PLAIN)


PLAIN = {"compression": "none", "use_dictionary": False}


def test_another_folder_than_that_of_the_run_is_named_as_such(folder, tmp_path):
    """Regression: its first file was "missing; restore it", as if the data had been damaged."""
    other = tmp_path / "other"
    other.mkdir()
    for file in [*folder.iterdir()][1:]:
        shutil.copy(file, other)
    words = rf"^{other}/\S+: .* does not exist; .*name the folder of all files \(it was {folder}\)"
    with pytest.raises(FileNotFoundError, match=words):
        check(scan(folder), other)


@pytest.mark.parametrize(
    "damage, what",
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-20]), "truncated or not a parquet file"),
        (lambda path: path.write_bytes(b"PAR1"), "truncated or not a parquet file"),
        (
            lambda path: write_parquet(path, some_texts(20, seed=1), 5),
            r"it has changed since this run began \(",
        ),
        (same_size, r"it has changed since this run began \(hash"),
        (lambda path: path.unlink(), ".*does not exist.*--model-tag"),
    ],
)
def test_check_names_a_damaged_changed_or_missing_file(folder, damage, what):
    path = write_parquet(folder / "s1.parquet", some_texts(20, seed=1), GROUP, **PLAIN)
    manifest = scan(folder)
    source = open_source(folder)
    size = path.stat().st_size
    damage(path)
    assert damage != same_size or path.stat().st_size == size
    with pytest.raises((ValueError, FileNotFoundError), match=rf"s1\.parquet: {what}"):
        check(manifest)
    if "gone" in what:  # while a run reads it
        with pytest.raises(FileNotFoundError, match=r"s1\.parquet"):
            texts_of(source, 3, [0])
    write_parquet(path, some_texts(20, seed=1), GROUP, **PLAIN)
    assert check(manifest) == manifest


# ---- refused files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "table, what",
    [
        ({"content": ["a", "b"]}, "no `text` column.*content"),
        ({"text": [1, 2]}, "type int64, expected string"),
        ({"text": pa.array([], pa.string())}, r"the parquet file is empty \(0 rows\)"),
        (pa.Table.from_arrays([pa.array(["a"])] * 2, ["text", "text"]), "2 columns named `text`"),
    ],
)
def test_bad_parquet_is_named(tmp_path, table, what):
    write_parquet(tmp_path / "good.parquet", ["a"])
    pq.write_table(pa.table(table), tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match=r"bad\.parquet: .*" + what):
        scan(tmp_path)


# ---- parquet -------------------------------------------------------------------------------------


# what `folder` holds
EXPECTED = [group for i in range(3) for group in grouped(some_texts(20, seed=i))]


@pytest.mark.parametrize("small_tokens", [sources.SMALL_TOKENS, -1])
def test_any_order_of_reads_gives_the_texts_that_were_written(folder, monkeypatch, small_tokens):
    monkeypatch.setattr(sources, "SMALL_TOKENS", small_tokens)
    rng, source = random.Random(0), open_source(folder)
    assert sum(not t for group in EXPECTED for t in group) >= 3, "the case: empty documents"
    for _ in range(150):
        group, size = rng.randrange(len(source.groups)), rng.choice([1, 2, 4])
        if rng.random() < 0.5:  # a unit of a lane's share; otherwise documents that a cursor lists
            first = size * rng.randrange(-(-len(EXPECTED[group]) // size))
            numbers = list(range(first, min(first + size, len(EXPECTED[group]))))
            keep = rng.randint(numbers[-1] + 1, len(EXPECTED[group]))
        else:
            numbers, keep = range(len(EXPECTED[group])), 0
        numbers = rng.sample(numbers, rng.randint(1, len(numbers)) if keep == 0 else len(numbers))
        assert texts_of(source, group, numbers, keep) == [
            EXPECTED[group][number] for number in numbers
        ]
