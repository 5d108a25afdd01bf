"""Megatron's documents in lanes: the same stream as the same documents in shards, through any reader, wherever in the
file they lie."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nanochat.indexed import HEADER, IndexedDatasetBuilder
from nanochat.shard_source import ShardSource
from nanochat.shards import ShardWriter

from nanochat import readers
from nanochat.dataloader import DataLoader
from nanochat.dataset import find_files, split_train_val
from nanochat.order import StreamConfig
from nanochat.plan import make_plan
from nanochat.run_data import find_data, open_data
from nanochat.sources import check_format, scan
from tests.toy import BOS, ByteTokenizer, json_copy, load_steps

LAYOUTS: dict[str, dict[str, Any]] = {
    "crop": {}, "split": {"long_docs": "split", "overlap": 4}, "concat": {"layout": "concat"},
    "binned": {"layout": "binned"}}
DOCUMENTS = 700


class Tokenizer(ByteTokenizer):
    """A byte tokenizer that knows its size."""

    def get_vocab_size(self) -> int:
        return BOS + 1


def documents(seed: int) -> list[np.ndarray]:
    """Documents of bytes, with EOD behind most: some are empty, some have nothing but it."""
    rng = np.random.default_rng(seed)
    found = [rng.integers(0, BOS, n).astype(np.uint16) for n in rng.integers(0, 39, DOCUMENTS).tolist()]
    return [d if i % 11 == 5 else np.append(d, np.uint16(BOS)) for i, d in enumerate(found)]


def write_shards(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, seed in (("a", 1), ("b", 2)):
        parts = documents(seed)
        with ShardWriter(folder / name, vocab_size=BOS + 1) as writer:
            writer.add(np.concatenate(parts), np.array(list(map(len, parts))), np.zeros(len(parts), np.uint16))
    return folder


def write_megatron(folder: Path, dtype: Any = np.uint16, *, cut: bool = False) -> Path:
    """The same; with `cut` documents are of up to three sequences."""
    folder.mkdir(parents=True)
    for name, seed in (("a", 1), ("b", 2)):
        builder = IndexedDatasetBuilder(folder / f"{name}.bin", dtype=dtype)
        for i, document in enumerate(documents(seed)):
            for part in np.array_split(document, i % 4) if cut and i % 4 and len(document) else [document]:
                builder.add_item(part)
            builder.end_document()
        builder.finalize(folder / f"{name}.idx")
    return folder


def scatter(folder: Path) -> Path:
    """The same data sets with their sequences at other places of .bin: backwards from number 100 on, with gaps."""
    for idx in folder.glob("*.idx"):
        data, ids = bytearray(idx.read_bytes()), np.fromfile(idx.with_suffix(".bin"), np.uint16)
        n = int(np.frombuffer(data, "<u8", 1, 18)[0])
        lengths = np.frombuffer(data, "<i4", n, HEADER.size)
        pointers = np.frombuffer(data, "<i8", n, HEADER.size + 4 * n)
        parts = [ids[p // 2:p // 2 + length] for p, length in zip(pointers.tolist(), lengths.tolist())]
        at, moved = 0, [np.zeros(0, np.uint16)]
        for i in [*range(100), *reversed(range(100, n))]:
            pointers[i] = 2 * at
            moved += [parts[i], np.full(i % 3, 7, np.uint16)] if i >= 100 else [parts[i]]
            at += sum(map(len, moved[-1 - (i >= 100):]))
        idx.write_bytes(data)
        np.concatenate(moved).tofile(idx.with_suffix(".bin"))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("corpora")
    return {"shards": write_shards(root / "shards"), "megatron": write_megatron(root / "megatron"),
            "int64": write_megatron(root / "int64", np.int64), "cut": write_megatron(root / "cut", cut=True),
            "scattered": scatter(write_megatron(root / "scattered", cut=True))}


def source_of(folder: Path, **kwargs: Any) -> ShardSource:
    data_format = "shards" if folder.name == "shards" else "megatron"
    return ShardSource(scan(folder, find_files(folder, data_format)), Tokenizer(), **kwargs)


def stream_of(source: ShardSource, config: StreamConfig, *, W: int, steps: int = 8) -> list[Any]:
    """[(digest, what cursors say of the bucket)] of the first steps, the second half by loaders that are restored."""
    found = list(load_steps(config, {"b": source}, R=8, W=W, B=2, steps=steps // 2, num_threads=2))
    found += load_steps(config, {"b": source}, R=8, W=W, B=2, steps=steps // 2, num_threads=2, start_step=steps // 2,
                        cursors=json_copy(found[-1][1]))
    return [(digest, [cursor["buckets"] for cursor in cursors]) for digest, cursors in found]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_stream_is_that_of_shards_for_any_type_reader_and_place_in_the_file(folders, monkeypatch, layout):
    config = StreamConfig(T=40, V=4, seed=3, buffer_size=16, **LAYOUTS[layout])
    keep = {"keep_eod": not config.framed}
    expected = stream_of(source_of(folders["shards"], **keep), config, W=1)
    assert len({digest for digest, _ in expected}) == len(expected)
    for name, kind in (("shards", "pread"), ("megatron", "mmap"), ("int64", "mmap"), ("cut", "pread"),
                       ("scattered", "mmap"), ("scattered", "pread")):
        monkeypatch.setenv(readers.ENVIRONMENT, kind)
        source = source_of(folders[name], **keep)
        assert source.mapped == (kind == "mmap") and source.groups.tolist() == [DOCUMENTS] * 2
        assert stream_of(source, config, W=3 if name == "cut" else 1) == expected, (name, kind)
    scattered = source_of(folders["scattered"])
    assert scattered._shard(0).index.spans(0, 20)[2] is None, "the case: a part stands in order"
    assert len(scattered._shard(0).index.spans(300, 310)[2]) >= 10, "the case: and a part does not"


def test_units_give_documents_of_their_own_unless_they_are_views_of_the_map(folders, monkeypatch):
    mapped = source_of(folders["megatron"])
    expected = [d.tolist() for unit in range(20) for d in mapped.fetch(0, unit, 32)]
    assert sum(not d.flags.owndata for d in mapped.fetch(0, 3, 32)) > 20
    assert sum(len(d) == 1 for d in mapped.fetch(0, 1, 32)), "the case: an empty one"
    scattered = source_of(folders["scattered"])
    assert all(d.base is None for d in scattered.fetch(0, 10, 32)) and list(scattered._blocks.values()) == [None]
    monkeypatch.setenv(readers.ENVIRONMENT, "pread")
    reads, read = [], readers.PreadReader.read
    monkeypatch.setattr(readers.PreadReader, "read", lambda self, a, b: (reads.append((a, b)), read(self, a, b))[1])
    for name in ("megatron", "scattered"):
        source = source_of(folders[name])
        del reads[:]
        units = [source.fetch(0, unit, 32) for unit in range(20)]
        assert [d.tolist() for unit in units for d in unit] == expected
        assert all(d.base is None for unit in units for d in unit), "no document holds more memory than its own"
        assert len(reads) == 20 if name == "megatron" else 20 <= len(reads) <= 60, "a unit is one read"
        del reads[:]
        assert source.overlaps(0, 3, 32) == [0] * 32 and source.prefixes(1).tolist() == [0] * DOCUMENTS
        assert not reads, "what the index knows is not read"
        assert source.lengths(0, 3, 32).tolist() == list(map(len, units[3]))


@pytest.mark.parametrize("layout", ["crop", "concat"])
def test_the_plan_of_documents_that_are_not_mapped_is_that_of_shards(folders, monkeypatch, layout):
    config = StreamConfig(T=40, V=2, buffer_size=8, max_epochs=1, **LAYOUTS[layout])

    def plan(name: str) -> Any:
        return make_plan(config, {"b": source_of(folders[name])}, rows_per_step=8, num_steps=10_000, tokenizer="bytes")

    expected = plan("shards")
    assert expected.steps < 10_000, "the case: it is dry"
    monkeypatch.setenv(readers.ENVIRONMENT, "pread")
    for name in ("megatron", "scattered"):
        found = plan(name)
        assert (found.steps, found.buckets) == (expected.steps, expected.buckets)


def test_ids_outside_the_vocabulary_are_an_error_that_names_the_file(tmp_path):
    for name, dtype, bad, message in (("a", np.int32, 300, r"s\.bin: entry 5 of group 0 holds the id 300, outside"),
                                      ("b", np.int32, -1, r"s\.bin: entry 5 of group 0 holds the id -1, outside"),
                                      ("c", np.int64, 1 << 40, r"s\.bin: entry 5 of group 0 holds the id 1,099,5")):
        builder = IndexedDatasetBuilder(tmp_path / "s.bin", dtype=dtype)
        for i in range(64):
            builder.add_document([1, bad if i == 5 else 2, BOS], [3])
        (tmp_path / name).mkdir()
        builder.finalize(tmp_path / "s.idx")
        for ending in ("bin", "idx"):
            shutil.move(tmp_path / f"s.{ending}", tmp_path / name / f"s.{ending}")
        source = source_of(tmp_path / name)
        config = StreamConfig(T=16, V=1, layout="concat")
        with (DataLoader(config, {"b": source}, tokenizer=Tokenizer(), rows_per_step=4, device_batch_size=4) as loader,
              pytest.raises(ValueError, match=message)):
            for _ in range(6):
                next(loader)


# ---- which files ----------------------------------------------------------------------------------------------------

def tiny(prefix: Path, data_format: str = "megatron", n: int = 3) -> Path:
    prefix.parent.mkdir(parents=True, exist_ok=True)
    if data_format == "shards":
        with ShardWriter(prefix, vocab_size=BOS + 1) as writer:
            writer.add(np.array([1, BOS] * n), np.full(n, 2), np.zeros(n, np.uint16))
        return prefix
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(n):
        builder.add_document([1, BOS], [2])
    builder.finalize(f"{prefix}.idx")
    return prefix


def test_folders_have_buckets_and_prefixes_are_buckets(tmp_path):
    a, b, c = (tiny(tmp_path / name) for name in ("web/one", "web/two.x", "code/one"))
    found = split_train_val(tmp_path, data_format="megatron", by_bucket=True)
    names = {split: {bucket: [f.name for f in files] for bucket, files in of.items()} for split, of in found.items()}
    assert names == {"train": {"code": ["one.bin"], "web": ["one.bin"]}, "val": {"web": ["two.x.bin"]}}
    prefixes = f"{c},{b},{a}"
    assert [f.name for f in find_files(prefixes, "megatron")] == ["one.bin", "two.x.bin", "one.bin"]
    one = split_train_val(prefixes, data_format="megatron")
    assert {split: [f.parent.name for f in files] for split, of in one.items() for files in of.values()} == {
        "train": ["code", "web"], "val": ["web"]}
    mixed = split_train_val(prefixes, a, data_format="megatron", by_bucket=True)
    assert list(mixed["train"]) == ["code/one", "web/two.x", "web/one"] and list(mixed["val"]) == ["one"]
    with pytest.raises(ValueError, match=r"one data file only \(one\.bin\) in each bucket, .*--val-path"):
        split_train_val(prefixes, data_format="megatron", by_bucket=True)


def test_prefixes_are_pinned_by_names_that_stay_when_they_move(tmp_path):
    prefixes = ",".join(str(tiny(tmp_path / "old" / name)) for name in ("web/one", "code/two"))
    pinned = find_data({}, prefixes, tiny(tmp_path / "old" / "val"), data_format="megatron")
    assert [e["name"] for e in pinned["train"]["data"]["files"]] == ["web/one.bin", "code/two.bin"]
    assert pinned["train"]["data"]["root"] == str((tmp_path / "old").resolve())
    (tmp_path / "old").rename(tmp_path / "new")
    moved = find_data(pinned, prefixes.replace("old", "new"), tmp_path / "new" / "val", data_format="megatron")
    assert moved["train"]["data"]["root"] == str((tmp_path / "new").resolve())
    assert len(open_data(moved, Tokenizer()).train["data"].fetch(1, 0, 8)) == 3
    tiny(tmp_path / "new" / "web" / "one", n=4)
    with pytest.raises(ValueError, match=r"web/one\.bin: changed since this run began \(size"):
        find_data(moved, prefixes.replace("old", "new"), tmp_path / "new" / "val", data_format="megatron")


@pytest.mark.parametrize("make, path, data_format, message", [
    (lambda p: (tiny(p / "a"), tiny(p / "b", "shards")), "", "megatron", r"mixes megatron \(a\.bin\) with shards \(b"),
    (lambda p: (tiny(p / "a"), tiny(p / "b", "shards")), "", "shards", r"mixes shards \(b\.bin\) with megatron \(a\."),
    (lambda p: tiny(p / "a"), "", "shards", "this pair is of --data-format megatron, not shards"),
    (lambda p: tiny(p / "a", "shards"), "", "megatron", "this pair is of --data-format shards"),
    (lambda p: tiny(p / "a"), "", "text", "there are files of --data-format shards or megatron"),
    (lambda p: tiny(p / "a", "shards"), "a", "megatron", r"a\.bin: this pair is of --data-format shards, not megatron"),
    (lambda p: tiny(p / "a"), "a", "text", r"a: the path of a pair of token files.*take --data-format shards or"),
    (lambda p: tiny(p / "a"), "a,{}/c", "megatron", r"c: neither c\.bin nor c\.idx is there; --data-path takes"),
    (lambda p: (tiny(p / "a").with_suffix(".bin").unlink(), tiny(p / "b")), "", "megatron",
     r"a\.bin: not there, but a\.idx needs it"),
    (lambda p: tiny(p / "a").with_suffix(".idx").unlink(), "a", "megatron", r"a\.idx: .*"),
    (lambda p: None, "a", "megatron", "no such data folder"),
])
def test_paths_that_name_no_data_say_why(tmp_path, make, path, data_format, message):
    make(tmp_path)
    name = str(tmp_path / path.format(tmp_path)) if path else tmp_path
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        files = find_files(name, data_format)
        check_format(name, files, data_format)
        scan(name, files)
