"""
Put a folder of data into a bucket, so that others can train from there.

    python -m scripts.push_shards DIR s3://bucket/prefix [--num-workers 8] [--sequence-length T --seed S --split 98,1,1]

Everything that training reads goes up under the same relative name: .bin and .idx, .parquet, the tokenizer/ folder, and
each folder's manifest.json, which goes last: where it is, the folder is whole. settings.json beside them says how the
data were meant to be used. Credentials and endpoint are those of the environment (AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION, AWS_ENDPOINT_URL).

The same command goes on after a crash or Ctrl-C: what is there with the same size and checksum is left alone. Each
file is held against manifest.json before it goes, and the object against the file when it has arrived: by the MD5 sums
that most stores give as ETag, else by reading it back. Exit code: 0; 1 where a file failed; 130 after Ctrl-C, 143 after
SIGTERM.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b, md5
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanochat import store
from nanochat.common import Parser, Terminated, each, in_store, place, read_json, run_main, sigterm_raises

DATA, LAST, TOKENIZER = (".bin", ".idx", ".parquet"), ("manifest.json", "dataset.json"), "tokenizer"
PART_BYTES, MAX_PARTS = 8 << 20, 9000  # of an upload; S3 allows 10,000
SETTINGS_NAME, SETTINGS_FORMAT, SETTINGS_VERSION = "settings.json", "nanochat-data-settings", 1
SHOWN = 10


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of shards, Megatron files or parquet")
    parser.add_argument("target", metavar="s3://bucket/prefix", help="where it goes; also gs://, az://, msc://")
    parser.add_argument("--num-workers", type=int, default=8, help="files at once")
    parser.add_argument("--sequence-length", type=int, help="T that the data are for, noted in settings.json (default: "
                                                            "the longest window that manifest.json tells of)")
    parser.add_argument("--seed", type=int, default=42, help="of the order of the data, noted in settings.json")
    parser.add_argument("--split", help="shares of train, validation and test of Megatron files, noted in "
                                        "settings.json, as in 98,1,1 (default: as the folders lie)")
    return parser.parse_args(argv)


# ---- what goes up ---------------------------------------------------------------------------------------------------

def find_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """(data and tokenizer, manifests) below a folder. ValueError or FileNotFoundError where there is nothing, where a
    pair lacks half, or where a set of shards is not finished."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    files = [f for f in sorted(folder.rglob("*")) if f.is_file()
             and not any(part.startswith(".") for part in f.relative_to(folder).parts)]
    data = [f for f in files if f.name.endswith(DATA)]
    if not data:
        raise FileNotFoundError(f"{folder}: no {', '.join(DATA)} file below it; scripts.tok_shards makes shards")
    there = set(data)
    for path in data:
        other = path.with_suffix({".bin": ".idx", ".idx": ".bin"}.get(path.suffix, path.suffix))
        if other not in there:
            raise FileNotFoundError(f"{path}: {other.name} is missing beside it; bring it back, or delete {path.name}")
    for records in sorted(folder.rglob(".records")):
        if not (records.parent / "manifest.json").exists():
            raise ValueError(f"{records.parent}: its shards are not finished (no manifest.json); run "
                             f"scripts.tok_shards to the end")
    tokenizer = [f for f in files if f.parent == folder / TOKENIZER]
    return data + tokenizer, [f for f in files if f.name in LAST]


def make_settings(args: argparse.Namespace, data: Sequence[Path], manifests: Sequence[Path]) -> dict[str, Any]:
    """How the data are meant to be used."""
    read = [read_json(path) for path in manifests if path.name == "manifest.json"]
    tokenizers = {t["fingerprint"]: t for m in read if isinstance(t := m.get("tokenizer"), dict)}
    if len(tokenizers) > 1:
        raise ValueError(f"{args.folder}: shards of {len(tokenizers)} tokenizers ({', '.join(sorted(tokenizers))}); "
                         f"push them to a prefix each")
    longest = max((m.get("arguments", {}).get("max_length", 0) for m in read), default=0)
    data_format = _data_format(data)
    if args.split and data_format != "megatron":
        raise ValueError(f"--split {args.split}: shares of Megatron's files, and these are {data_format}; leave it "
                         f"out, folders train/ and val/ say the same")
    return {"format": SETTINGS_FORMAT, "version": SETTINGS_VERSION, "data_format": data_format,
            "tokenizer": next(iter(tokenizers.values()), None),
            "tokenizer_folder": TOKENIZER if (args.folder / TOKENIZER).is_dir() else None,
            "sequence_length": args.sequence_length or longest or None, "seed": args.seed, "split": args.split,
            "files": len(data), "bytes": sum(f.stat().st_size for f in data)}


def _data_format(data: Sequence[Path]) -> str:
    """What --data-format reads them."""
    idx = next((f for f in data if f.suffix == ".idx"), None)
    if idx is None:
        return "text"
    with open(idx, "rb") as f:
        return "megatron" if f.read(8) == b"MMIDIDX\0" else "shards"


def training_command(target: str, settings: dict[str, Any]) -> str:
    """How to train from the bucket."""
    flags = {"--data-path": target, "--data-format": settings["data_format"],
             "--order": settings["split"] and "megatron",
             "--tokenizer-dir": settings["tokenizer_folder"] and f"{target}/{settings['tokenizer_folder']}",
             "--max-seq-len": settings["sequence_length"], "--seed": settings["seed"], "--split": settings["split"]}
    return shlex.join(["python", "-m", "scripts.base_train",
                       *(str(part) for flag in flags.items() if flag[1] is not None for part in flag)])


# ---- one file -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Sums:
    """Checksums of a file: the ETag that a store gives which makes it of MD5 sums, and BLAKE2b."""

    size: int
    etag: str
    hash: str


def part_bytes(size: int) -> int:
    """How large the parts of an upload are."""
    return max(PART_BYTES, -(-size // MAX_PARTS))


def sum_file(path: Path) -> Sums:
    """Read a file once. Its ETag: the MD5 of a file of one part, else of its parts' MD5s, and their number."""
    size, whole, parts = path.stat().st_size, blake2b(digest_size=16), []
    with open(path, "rb") as f:
        while data := f.read(part_bytes(size)):
            whole.update(data)
            parts.append(md5(data, usedforsecurity=False))
    if size <= part_bytes(size):
        return Sums(size, (parts or [md5(usedforsecurity=False)])[0].hexdigest(), whole.hexdigest())
    joined = md5(b"".join(part.digest() for part in parts), usedforsecurity=False).hexdigest()
    return Sums(size, f"{joined}-{len(parts)}", whole.hexdigest())


def holds(stat: store.Stat | None, sums: Sums) -> bool:
    """Whether an object is what a file was. It is read back where its ETag does not tell: encrypted buckets, stores
    other than S3."""
    if stat is None or stat.size != sums.size:
        return False
    if stat.etag.strip('"') == sums.etag:
        return True
    back = blake2b(digest_size=16)
    for at in range(0, stat.size, PART_BYTES):
        back.update(store.read_bytes(stat, at, min(at + PART_BYTES, stat.size)))
    return back.hexdigest() == sums.hash


def recorded_hash(file: Path) -> str | None:
    """What manifest.json says of a file of shards."""
    manifest = file.parent / "manifest.json"
    if file.suffix not in (".bin", ".idx") or not manifest.exists():
        return None
    record = read_json(manifest).get("shards", {}).get(file.stem) or {}
    return record.get(f"{file.suffix[1:]}_hash")


def is_there(file: Path, stat: store.Stat | None) -> bool:
    """Whether an object is what a file is. ValueError where the file is not what manifest.json says."""
    sums, expected = sum_file(file), recorded_hash(file)
    if expected not in (None, sums.hash):
        raise ValueError(f"{file}: its checksum is {sums.hash}, manifest.json says {expected}; python -m "
                         f"scripts.verify tells more")
    return holds(stat, sums)


def send(file: Path, path: str) -> bool:
    """Have an object be what a file is. ValueError where something else has arrived, which is taken away again."""
    sums = sum_file(file)
    store.write(path, file, part_bytes=part_bytes(sums.size))
    if not holds(store.find(path), sums):
        store.delete(path)
        raise ValueError(f"{path}: what arrived is not what was sent; run the command again")
    return True


# ---- all of them ----------------------------------------------------------------------------------------------------

@dataclass
class Pushed:
    """What became of files."""

    sent: list[Path] = field(default_factory=list)
    left_alone: int = 0
    failed: list[str] = field(default_factory=list)


def push(files: Sequence[Path], paths: dict[Path, str], there: dict[str, store.Stat],
         pushed: Pushed, *, num_workers: int, bar: Any) -> None:
    """Send what is not there yet, several files at once, the largest first."""
    def tried(work: Callable[[Path], bool]) -> Callable[[Path], bool | str]:
        def work_or_say(file: Path) -> bool | str:
            try:
                return work(file)
            except (ValueError, OSError) as e:
                return f"{file}: {e}"
        return work_or_say

    def tell(file: Path, outcome: bool | str) -> None:
        bar.update(file.stat().st_size)
        if isinstance(outcome, str):
            pushed.failed.append(outcome)

    files, todo = sorted(files, key=lambda file: -file.stat().st_size), []
    compare = tried(lambda file: is_there(file, there.get(paths[file])))
    for file, same in zip(files, each(compare, files, at_once=num_workers)):
        if same is False:
            todo.append(file)
        else:
            pushed.left_alone += same is True
            tell(file, same)
    if todo:  # before anything changes: no manifest may name what is missing or another
        for path in [path for path in there if path.rsplit("/", 1)[-1] in LAST]:
            store.delete(path)
            del there[path]
    for file, done in zip(todo, each(tried(lambda file: send(file, paths[file])), todo,
                                     at_once=num_workers)):
        pushed.sent += [file] * (done is True)
        tell(file, done)


def run(args: argparse.Namespace) -> int:
    if args.num_workers < 1:
        raise ValueError(f"--num-workers {args.num_workers}: expected at least 1")
    if not in_store(args.target):
        raise ValueError(f"{args.target}: expected s3://bucket/prefix, or gs://, az://, msc://")
    files, manifests = find_files(args.folder)
    settings = make_settings(args, [f for f in files if f.name.endswith(DATA)], manifests)
    target, pushed = str(place(args.target)).rstrip("/"), Pushed()
    there = {stat.path: stat for stat in store.list_files(target)}
    paths = {f: f"{target}/{f.relative_to(args.folder).as_posix()}" for f in [*files, *manifests]}
    total = sum(file.stat().st_size for file in paths)
    with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:
        more = {"num_workers": args.num_workers, "bar": bar}
        push(files, paths, there, pushed, **more)
        if not pushed.failed:
            data = (json.dumps(settings, indent=2) + "\n").encode()
            store.write(f"{target}/{SETTINGS_NAME}", data)
            push(manifests, paths, there, pushed, **more)
    for why in sorted(pushed.failed)[:SHOWN]:
        print(f"failed: {why}", file=sys.stderr)
    num_bytes = sum(file.stat().st_size for file in pushed.sent)
    print(f"{target}: {len(pushed.sent):,} files sent and checked ({num_bytes:,} bytes), "
          f"{pushed.left_alone:,} were there")
    if pushed.failed:
        print(f"{len(pushed.failed):,} failed, so no manifest was written; run the same command "
              f"again", file=sys.stderr)
        return 1
    print(f"train from it: {training_command(target, settings)}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        with sigterm_raises():
            return run(args)
    except KeyboardInterrupt as e:
        print("interrupted: what has arrived stays; the same command goes on", file=sys.stderr)
        return 143 if isinstance(e, Terminated) else 130


if __name__ == "__main__":
    run_main(main)
