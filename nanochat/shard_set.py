"""
A set of shards: which text file becomes which pair, what is finished, and what is left to do.

    RAW/web/2024/a.jsonl.gz  ->  OUT/train/web/2024__a.bin, 2024__a.idx          one pair for each input
                                 OUT/train/web/.records/2024__a.json             last: "this pair is finished"
    all inputs of a bucket   ->  OUT/train/web/manifest.json                     put together from the records

Whoever makes shards may be killed anywhere, and several machines may make them at once. So there is no list of what is
finished, which would need a lock: each input has a record, and what its record says, the pair and the input either
match or the pair is made again.

Invariants
- A record appears when its pair is whole, a manifest when all its records are there; what is made again loses its
  manifest, its record and its pair first. So no manifest ever names a shard that is missing or another.
- Names, order and bytes of pairs and manifests depend on RAW, the tokenizer and the arguments alone. Only records,
  which are there to go on with, know when an input changed last.
- All pairs of a set are made with the same arguments and tokenizer, and belong to an input.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nanochat.common import hash_json, read_json, write_bytes
from nanochat.dataset import FORMATS
from nanochat.places import etag_of, place
from nanochat.pretokenize import Tokenizer, Windows
from nanochat.shards import MANIFEST_NAME, new_manifest

ENDINGS = FORMATS["text"]
RECORDS = ".records"
SPLITS = ("train", "val")
TOKENIZER = "tokenizer"  # the folder beside the splits
TEMPORARY = re.compile(r"\.(.+)\.(bin|idx|json|tiktoken)\..{8}\.tmp")  # as common.atomic_open names them
Record = dict[str, Any]


# ---- inputs ---------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Input:
    """A text file and where its shard goes: OUT/`split`/`bucket`/`stem`.bin. `name` is relative to RAW."""

    path: Path
    name: str
    split: str
    bucket: str
    stem: str
    size: int
    mtime_ns: int
    etag: str = ""  # of an object in a store

    def pair(self, output: Path) -> Path:
        """The shard's path without ending."""
        return output / self.split / self.bucket / self.stem

    def record(self, output: Path) -> Path:
        return output / self.split / self.bucket / RECORDS / f"{self.stem}.json"


def find_inputs(raw: Path, *, val_files: int = 1) -> tuple[list[Input], list[str]]:
    """All inputs below RAW by split, bucket and name; and the buckets that have too few files for validation.

    RAW/train/BUCKET and RAW/val/BUCKET are kept; else RAW/BUCKET, whose last `val_files` files validate. Files without
    a bucket are the bucket `data`. Raises FileNotFoundError where there is nothing, ValueError where it is unclear.
    """
    if val_files < 0:
        raise ValueError(f"--val-files {val_files}: expected 0 or more")
    raw = place(raw)
    if not raw.is_dir():
        raise FileNotFoundError(f"--input-dir {raw}: no such folder")
    found: dict[tuple[str, str], list[tuple[str, Path]]] = {}
    short = []
    if all((raw / split).is_dir() for split in SPLITS):
        if stray := [name for name, _ in _files_below(raw) if name.split("/")[0] not in SPLITS]:
            raise ValueError(f"--input-dir {raw}: {stray[0]} lies beside train/ and val/; move it into one of them")
        for split in SPLITS:
            found |= {(split, bucket): files for bucket, files in _buckets(raw / split).items()}
    else:
        for bucket, files in _buckets(raw).items():
            enough = len(files) > val_files
            short += [] if enough else [bucket]
            num_train = len(files) - (val_files if enough else 0)
            found |= {("train", bucket): files[:num_train], ("val", bucket): files[num_train:]}
    if not any(found.values()):
        raise FileNotFoundError(f"--input-dir {raw}: no {', '.join(ENDINGS)} file below it")
    inputs = [_input(raw, split, bucket, name, path)
              for (split, bucket), files in found.items() for name, path in files]
    _refuse_equal_stems(inputs)
    return sorted(inputs, key=lambda i: (i.split, i.bucket, i.stem)), short


def _files_below(folder: Path) -> list[tuple[str, Path]]:
    """(relative name, path), sorted; what is hidden is not looked at."""
    paths = ((f.relative_to(folder), f) for f in folder.rglob("*") if f.name.endswith(ENDINGS) and f.is_file())
    return sorted((name.as_posix(), f) for name, f in paths if not any(part.startswith(".") for part in name.parts))


def _buckets(folder: Path) -> dict[str, list[tuple[str, Path]]]:
    files = _files_below(folder)
    loose = [name for name, _ in files if "/" not in name]
    if loose and len(loose) < len(files):
        raise ValueError(f"{folder}: {loose[0]} lies beside folders of text; each folder is a bucket, so put it in one")
    buckets: dict[str, list[tuple[str, Path]]] = {}
    for name, path in files:
        bucket, _, rest = ("data/" + name if loose else name).partition("/")
        buckets.setdefault(bucket, []).append((rest, path))
    return buckets


def _input(raw: Path, split: str, bucket: str, name: str, path: Path) -> Input:
    ending = next(e for e in sorted(ENDINGS, key=len, reverse=True) if name.endswith(e))
    stat = path.stat()
    return Input(path, path.relative_to(raw).as_posix(), split, bucket, name.removesuffix(ending).replace("/", "__"),
                 stat.st_size, stat.st_mtime_ns, etag_of(path).get("etag", ""))


def _refuse_equal_stems(inputs: Sequence[Input]) -> None:
    seen: dict[tuple[str, str, str], Input] = {}
    for i in inputs:
        other = seen.setdefault((i.split, i.bucket, i.stem), i)
        if other is not i:
            raise ValueError(f"{other.name} and {i.name} would both become {i.split}/{i.bucket}/{i.stem}.bin; rename "
                             f"one of them")


def deal(inputs: Sequence[Input], num_tasks: int) -> list[list[Input]]:
    """Deal inputs to tasks, each to the one with the fewest bytes so far, biggest first; a task's are in that order."""
    tasks: list[list[Input]] = [[] for _ in range(num_tasks)]
    loads = [0] * num_tasks
    for i in sorted(inputs, key=lambda i: (-i.size, i.name)):
        task = loads.index(min(loads))
        tasks[task].append(i)
        loads[task] += i.size
    return tasks


# ---- the set --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class ShardSet:
    """The shards in `output` that some inputs become. `tokenizer`: what manifests say of it (`describe_tokenizer`)."""

    output: Path
    inputs: Sequence[Input]
    windows: Windows
    tokenizer: dict[str, Any]
    strict: bool = False
    data_format: str = "shards"

    @property
    def made_with(self) -> dict[str, Any]:
        """What pairs of one set have in common; sets of shards do not name their format."""
        named = {} if self.data_format == "shards" else {"data_format": self.data_format}
        return {**asdict(self.windows), "tokenizer": self.tokenizer["fingerprint"], **named}

    # -- one input

    def finished(self, i: Input) -> Record | None:
        """The record of an input whose pair is there and would come out the same again; its bytes are not read."""
        record = _read_record(i.record(self.output))
        if (record is None or record["made_with"] != self.made_with or record["source"] != _source(i)
                or (self.strict and record["shard"]["skipped"]["count"])):
            return None
        sizes = {"bin": record["shard"]["bin_bytes"], "idx": record["idx_bytes"]}
        return record if all(_size(i.pair(self.output), ending) == size for ending, size in sizes.items()) else None

    def note(self, i: Input, shard: Record) -> Record:
        """Say that the pair of an input is finished; `shard` is what `pretokenize` returned. Returns the record."""
        record = {"made_with": self.made_with, "source": _source(i), "idx_bytes": _size(i.pair(self.output), "idx"),
                  "shard": {"input": {"name": i.name, "size": i.size}, **shard}}
        record["hash"] = _hash(record)
        _write(i.record(self.output), record)
        return record

    # -- all of them

    def prepare(self, todo: Sequence[Input]) -> None:
        """Make folders for pairs, and take away what is left of earlier attempts. OSError where that cannot be."""
        try:
            for i in todo:
                i.record(self.output).parent.mkdir(parents=True, exist_ok=True)
                (i.pair(self.output).parent / MANIFEST_NAME).unlink(missing_ok=True)
                _remove_pair(i.record(self.output), i.pair(self.output))
            self.remove_temporary(todo)
        except OSError as e:
            raise OSError(f"--output-dir {self.output}: cannot be written ({e.strerror}: {e.filename}); name another "
                          f"one") from e

    def remove_temporary(self, todo: Sequence[Input]) -> None:
        """Remove temporary files that killed processes left of these inputs."""
        stems: dict[Path, set[str]] = {}
        for i in todo:
            for path in (i.pair(self.output), i.record(self.output)):
                stems.setdefault(path.parent, set()).add(i.stem)
        for folder, of_folder in stems.items():
            _remove_matching(folder, of_folder.__contains__)

    def refuse_others(self, *, force: bool) -> None:
        """ValueError if there are pairs of other arguments, another tokenizer or other inputs; with `force` the latter
        are removed (the former will be made again)."""
        planned = {i.record(self.output) for i in self.inputs}
        for path in _records(self.output):
            record = _read_record(path)
            if path not in planned:
                if not force:
                    name = record["source"]["name"] if record else path.stem
                    raise ValueError(f"{path.parents[1] / path.stem}.bin: made of {name}, which is gone from "
                                     f"--input-dir or belongs elsewhere now; bring it back, name another --output-dir, "
                                     f"or remove such shards with --force")
                (path.parents[1] / MANIFEST_NAME).unlink(missing_ok=True)
                _remove_pair(path, path.parents[1] / path.stem)
                with contextlib.suppress(OSError):  # not empty
                    path.parent.rmdir()
                    path.parents[1].rmdir()
            elif record and record["made_with"] != self.made_with and not force:
                raise ValueError(f"--output-dir {self.output}: {path.stem}.bin was made with "
                                 f"{_difference(record['made_with'], self.made_with)}; name another --output-dir, or "
                                 f"make all shards there again with --force")

    def finish(self) -> list[Input]:
        """Write the manifest of each bucket whose pairs are all finished. Returns the inputs that are not; where there
        is none, nobody is at work any more, so all temporary files go."""
        missing: list[Input] = []
        folders: dict[Path, list[Input]] = {}
        for i in self.inputs:
            folders.setdefault(i.pair(self.output).parent, []).append(i)
        for folder, inputs in folders.items():
            records = [self.finished(i) for i in inputs]
            absent = [i for i, record in zip(inputs, records) if record is None]
            missing += absent
            if not absent:
                shards = {i.stem: record["shard"] for i, record in zip(inputs, records) if record}
                _write(folder / MANIFEST_NAME, new_manifest(self.tokenizer, asdict(self.windows), shards,
                                                             data_format=self.data_format))
        if not missing:
            for folder in (self.output / TOKENIZER, *folders, *(folder / RECORDS for folder in folders)):
                _remove_matching(folder, lambda stem: True)
        return missing


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """What a manifest says of the tokenizer."""
    return {"fingerprint": tokenizer.fingerprint, "eod": tokenizer.get_bos_token_id(),
            "vocab_size": tokenizer.get_vocab_size()}


def _source(i: Input) -> Record:
    return {"name": i.name, "size": i.size, "mtime_ns": i.mtime_ns} | ({"etag": i.etag} if i.etag else {})


def _size(pair: Path, ending: str) -> int:
    path = pair.parent / f"{pair.name}.{ending}"
    return path.stat().st_size if path.is_file() else -1


def _remove_pair(record: Path, pair: Path) -> None:
    for path in (record, pair.parent / f"{pair.name}.idx", pair.parent / f"{pair.name}.bin"):
        path.unlink(missing_ok=True)


def _remove_matching(folder: Path, is_meant: Callable[[str], bool]) -> None:
    """Remove the temporary files of a folder whose stem is meant."""
    for path in folder.glob(".*.tmp"):
        match = TEMPORARY.fullmatch(path.name)
        if match and is_meant(match[1]):
            path.unlink(missing_ok=True)


def _records(output: Path) -> Iterator[Path]:
    for split in SPLITS:
        yield from sorted((output / split).glob(f"*/{RECORDS}/*.json"))


def _read_record(path: Path) -> Record | None:
    """A record, None where there is none or it is none of ours."""
    try:
        record = read_json(path)
        return record if record["hash"] == _hash(record) else None
    except (FileNotFoundError, ValueError, KeyError, AttributeError):
        return None


def _hash(record: Record) -> str:
    return hash_json({key: value for key, value in record.items() if key != "hash"})


def _write(path: Path, value: Record) -> None:
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def _difference(old: Record, new: Record) -> str:
    plain = {"data_format": "shards"}
    old, new = plain | old, plain | new
    return ", ".join(f"{key} {old.get(key)} (now {new[key]})" for key in new if old.get(key) != new[key])
