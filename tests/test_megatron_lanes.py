"""Megatron's documents in lanes: the same stream as the same documents in shards, through any reader, wherever in the
file they lie; paths of pairs, and what is said of those that name no data."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanochat.config import Settings
from nanochat.dataset import find_files, split_train_val
from nanochat.order import StreamConfig
from nanochat.run_data import find_manifests, open_data
from nanochat.sources import Source, check_format, open_source, scan
from nanochat.tokens import READER, MappedReader, TokenFile
from tests.token_files import Tokenizer, write_megatron, write_pair
from tests.toy import BOS, json_copy, load_steps

LAYOUTS: dict[str, dict[str, Any]] = {
    "crop": {}, "split": {"long_docs": "split", "overlap": 4}, "concat": {"layout": "concat"},
    "binned": {"layout": "binned"}}
DOCUMENTS = 700


def documents(seed: int) -> list[list[int]]:
    """Documents of bytes, with EOD behind most: some are empty, some have nothing but it."""
    rng = np.random.default_rng(seed)
    found = [rng.integers(0, BOS, n).tolist() for n in rng.integers(0, 39, DOCUMENTS).tolist()]
    return [d if i % 11 == 5 else [*d, BOS] for i, d in enumerate(found)]


def scatter(prefix: Path) -> None:
    """The same data set with its sequences at other places of .bin: backwards from number 100 on, with gaps."""
    idx, ids, pair = prefix.with_suffix(".idx"), np.fromfile(prefix.with_suffix(".bin"), np.uint16), TokenFile(prefix)
    lengths, begins, n = pair.table("lengths"), pair.table("pointers") // 2, len(pair.table("lengths"))
    pointers, moved, at = np.zeros(n, "<i8"), [np.zeros(0, np.uint16)], 0
    for i in [*range(100), *reversed(range(100, n))]:
        pointers[i] = 2 * at
        part = np.append(ids[begins[i]:begins[i] + lengths[i]], np.full(i % 3 if i >= 100 else 0, 7, np.uint16))
        moved.append(part.astype(np.uint16))
        at += len(part)
    data, where = bytearray(idx.read_bytes()), pair.tables["pointers"][1]
    data[where:where + 8 * n] = pointers.tobytes()
    for path, written in ((idx, bytes(data)), (prefix.with_suffix(".bin"), np.concatenate(moved).tobytes())):
        path.unlink()  # the old ones are mapped
        path.write_bytes(written)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same documents: GPTS, Megatron's of two types, and cut into sequences, which are scattered or not."""
    root = tmp_path_factory.mktemp("corpora")
    for name, seed in (("a", 1), ("b", 2)):
        whole = documents(seed)
        cut = [[part.tolist() for part in np.array_split(d, i % 4)] if i % 4 and d else [d]
               for i, d in enumerate(whole)]
        write_pair(root / "shards" / name, whole)
        write_megatron(root / "megatron" / name, [[d] for d in whole])
        write_megatron(root / "int64" / name, [[d] for d in whole], "<i8")
        write_megatron(root / "cut" / name, cut)
        write_megatron(root / "scattered" / name, cut)
        scatter(root / "scattered" / name)
    return {path.name: path for path in root.iterdir()}


def source_of(folder: Path, **kwargs: Any) -> Source:
    data_format = "shards" if folder.name == "shards" else "megatron"
    return open_source(scan(folder, find_files(folder, data_format)), Tokenizer(), **kwargs)


def stream_of(source: Source, config: StreamConfig, *, W: int, steps: int = 8) -> list[Any]:
    """[(digest, what cursors say of the bucket)] of the first steps, the second half by loaders that are restored."""
    found = list(load_steps(config, {"b": source}, R=8, W=W, B=2, steps=steps // 2, num_threads=2))
    found += load_steps(config, {"b": source}, R=8, W=W, B=2, steps=steps // 2, num_threads=2, start_step=steps // 2,
                        cursors=json_copy(found[-1][1]))
    return [(digest, [cursor["buckets"] for cursor in cursors]) for digest, cursors in found]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_stream_is_that_of_shards_for_any_type_reader_and_place_in_the_file(folders, monkeypatch, layout):
    config = StreamConfig(T=40, V=4, seed=3, buffer_size=16, **LAYOUTS[layout])
    stored = {"as_stored": not config.framed}
    expected = stream_of(source_of(folders["shards"], **stored), config, W=1)
    assert len({digest for digest, _ in expected}) == len(expected)
    for name, kind in (("shards", "pread"), ("megatron", "mmap"), ("int64", "mmap"), ("cut", "pread"),
                       ("scattered", "mmap"), ("scattered", "pread")):
        monkeypatch.setenv(READER, kind)
        source = source_of(folders[name], **stored)
        assert source.groups.tolist() == [DOCUMENTS] * 2
        assert stream_of(source, config, W=3 if name == "cut" else 1) == expected, (name, kind)
        assert isinstance(TokenFile(folders[name] / "a").reader, MappedReader) == (kind == "mmap")
    begins, ends, _ = TokenFile(folders["scattered"] / "a").stretches(300, 310)
    assert (begins[1:] < ends[:-1]).any(), "the case: they stand in no order"


# ---- which files ----------------------------------------------------------------------------------------------------

def tiny(prefix: Path, data_format: str = "megatron", n: int = 3) -> Path:
    if data_format == "shards":
        write_pair(prefix, [[1, BOS]] * n)
    else:
        write_megatron(prefix, [[[1, BOS]]] * n)
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
    settings = Settings(data_path=prefixes, val_path=str(tiny(tmp_path / "old" / "val")), data_format="megatron")
    pinned = find_manifests({}, settings)
    assert [e["name"] for e in pinned["train"]["data"]["files"]] == ["web/one.bin", "code/two.bin"]
    assert pinned["train"]["data"]["root"] == str((tmp_path / "old").resolve())
    (tmp_path / "old").rename(tmp_path / "new")
    settings = replace(settings, data_path=prefixes.replace("old", "new"), val_path=str(tmp_path / "new" / "val"))
    moved = find_manifests(pinned, settings)
    assert moved["train"]["data"]["root"] == str((tmp_path / "new").resolve())
    assert len(open_data(moved, Tokenizer()).train["data"].read(1, np.arange(3))[0]) == 3
    tiny(tmp_path / "new" / "web" / "one", n=4)
    with pytest.raises(ValueError, match=r"web/one\.bin: changed since this run began \(size"):
        find_manifests(moved, settings)


@pytest.mark.parametrize("make, path, data_format, message", [
    (lambda p: (tiny(p / "a"), tiny(p / "b", "shards")), "", "megatron",
     r"b\.bin: this pair is of --data-format shards.*mixes"),
    (lambda p: (tiny(p / "a"), tiny(p / "b", "shards")), "", "shards",
     r"a\.bin: this pair is of --data-format megatron.*mixes"),
    (lambda p: tiny(p / "a"), "", "shards", "this pair is of --data-format megatron, not shards"),
    (lambda p: tiny(p / "a"), "", "text", "there are files of --data-format shards or megatron"),
    (lambda p: tiny(p / "a", "shards"), "a", "megatron", r"a\.bin: this pair is of --data-format shards, not megatron"),
    (lambda p: tiny(p / "a"), "a", "text", r"a: the path of a pair of token files.*take --data-format shards or"),
    (lambda p: tiny(p / "a"), "{}/a,{}/c", "megatron", r"c: neither c\.bin nor its \.idx is there; --data-path takes"),
    (lambda p: (tiny(p / "a").with_suffix(".bin").unlink(), tiny(p / "b")), "", "megatron",
     r"a\.bin: not there, but a\.idx needs it"),
    (lambda p: tiny(p / "a").with_suffix(".idx").unlink(), "a", "megatron", r"a\.idx: .*"),
    (lambda p: None, "a", "megatron", "no such data folder"),
    (lambda p: tiny(p / "a"), "70,{}/a,30,{}/a", "megatron", r"write --data-path=.*/a,.*/a --order=megatron "
                                                             r"--blend-weights=70,30$"),
])
def test_paths_that_name_no_data_say_why(tmp_path, make, path, data_format, message):
    make(tmp_path)
    name = tmp_path if not path else path.replace("{}", str(tmp_path)) if "," in path else tmp_path / path
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        files = find_files(name, data_format)
        check_format(name, files, data_format)
        scan(name, files)
