"""
Upload a folder of data to object storage (S3 and others), so that runs anywhere can read it.

    python -m scripts.push_shards shards s3://bucket/prefix

Uploads everything that training reads, under the same relative names: .bin and .idx, .parquet, the tokenizer/ folder,
and each folder's manifest.json. The manifests are uploaded last, so a folder with a manifest is complete. Credentials
and endpoint come from the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION, AWS_ENDPOINT_URL).

The same command resumes after a crash or Ctrl-C: objects of the same size and checksum are not sent again. Each file is
checked against manifest.json before it is sent, and the object against the file afterwards: by the MD5 sums that most
services return as ETag, otherwise by reading it back. Exit code: 0; 1 if a file failed; 130 after Ctrl-C or SIGTERM.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from hashlib import blake2b, md5
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanochat.cli import Parser, run_main, sigterm_interrupts, whole
from nanochat.common import as_path, counted, each, few, is_remote, read_json
from nanochat.files import pair_format, walk
from nanochat.integrations import object_storage as store

DATA, LAST, TOKENIZER = (".bin", ".idx", ".parquet"), ("manifest.json", "dataset.json"), "tokenizer"
PART_BYTES, MAX_PARTS = 8 << 20, 9000  # parts of an upload; S3 allows 10,000
SHOWN = 10


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of shards, Megatron files or parquet")
    parser.add_argument("target", metavar="s3://bucket/prefix", help="destination; also gs://, az://, msc://")
    parser.add_argument("--num-workers", type=whole(1), default=8, help="number of files to send at once")
    args = parser.parse_args(argv)
    if not is_remote(args.target):
        raise ValueError(f"{args.target}: expected s3://bucket/prefix, or gs://, az://, msc://")
    args.target = str(as_path(args.target)).rstrip("/")
    return args


# ---- which files are sent -------------------------------------------------------------------------------------------

def find_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """(data and tokenizer, the largest first; manifests) below a folder. ValueError or FileNotFoundError if there is no
    data, if half of a pair is missing, or if shards are not finished."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    entries = sorted(walk(folder))
    files = [entry.path for entry in entries if entry.kind == "file"]
    if dangling := [entry.path for entry in entries if entry.kind == "dangling"]:
        raise FileNotFoundError(f"{folder}: {counted(len(dangling), 'link')} to something that does not exist: "
                                f"{few(dangling, folder)}; restore what is missing, or delete the links")
    data = [f for f in files if f.name.endswith(DATA)]
    if not data:
        raise FileNotFoundError(f"{folder}: no {', '.join(DATA)} file below it; scripts.tok_shards makes shards")
    for path in data:
        other = path.with_suffix({".bin": ".idx", ".idx": ".bin"}.get(path.suffix, path.suffix))
        if other not in data:
            raise FileNotFoundError(f"{path}: {other.name} is missing; restore it, or delete {path.name}")
    for parent in [folder, *(entry.path for entry in entries if entry.kind == "folder")]:
        if (parent / ".records").exists() and not (parent / "manifest.json").exists():
            raise ValueError(f"{parent}: its shards are not finished (no manifest.json); run "
                             f"scripts.tok_shards again to finish them")
    data += [f for f in files if f.parent == folder / TOKENIZER]
    return sorted(data, key=lambda f: -f.stat().st_size), [f for f in files if f.name in LAST]


# ---- one file -------------------------------------------------------------------------------------------------------

def part_bytes(size: int) -> int:
    """The size of each part of an upload."""
    return max(PART_BYTES, -(-size // MAX_PARTS))


def sum_file(path: Path) -> tuple[str, str]:
    """Read a file once, and return (its ETag in a store that uses MD5 sums, its BLAKE2b hash). The ETag is the MD5 of a
    single part, or the MD5 of all parts' MD5s, followed by their number."""
    size, whole, parts = path.stat().st_size, blake2b(digest_size=16), []
    with open(path, "rb") as f:
        while data := f.read(part_bytes(size)):
            whole.update(data)
            parts.append(md5(data, usedforsecurity=False).digest())
    if len(parts) == 1:
        return parts[0].hex(), whole.hexdigest()
    joined = md5(b"".join(parts), usedforsecurity=False).hexdigest()  # no parts: the MD5 of an empty file
    return f"{joined}-{len(parts)}" if parts else joined, whole.hexdigest()


def is_stored(file: Path, stat: store.Stat | None) -> bool:
    """Whether an object equals a file: by its ETag, or by reading it back if the ETag is not an MD5 sum (in encrypted
    buckets, and in some stores other than S3). ValueError if the file differs from its record in manifest.json."""
    (etag, digest), manifest = sum_file(file), file.parent / "manifest.json"
    if file.suffix in (".bin", ".idx") and manifest.exists():
        record = read_json(manifest).get("shards", {}).get(file.stem) or {}
        expected = record.get(f"{file.suffix[1:]}_hash", digest)
        if expected != digest:
            raise ValueError(f"{file}: its checksum is {digest}, but manifest.json says {expected}; python -m "
                             f"scripts.verify shows details")
    if stat is None or stat.size != file.stat().st_size:
        return False
    if stat.etag.strip('"') == etag:
        return True
    stored = blake2b(digest_size=16)
    for data in store.read_whole(stat):
        stored.update(data)
    return stored.hexdigest() == digest


def send(file: Path, path: str) -> int:
    """Upload a file and return its size. If the object differs from the file, delete it and raise ValueError."""
    size = file.stat().st_size
    store.upload(path, file, part_bytes=part_bytes(size))
    if not is_stored(file, store.find(path)):
        store.delete(path)
        raise ValueError(f"{path}: the uploaded object differs from the file; run the same command again")
    return size


# ---- all of them ----------------------------------------------------------------------------------------------------

def push(args: argparse.Namespace) -> int:
    """Send the files that the store lacks, several at once, and print how many."""
    files, manifests = find_files(args.folder)
    stored = {stat.path: stat for stat in store.list_objects(args.target)}
    path = {f: f"{args.target}/{f.relative_to(args.folder).as_posix()}" for f in [*files, *manifests]}
    failed: list[str] = []

    def for_each(work: Callable[[Path], Any], files: Sequence[Path], what: str) -> list[Any]:
        """The result of `work` for each file, None if it failed."""
        def attempt(file: Path) -> Any:
            try:
                return work(file)
            except (ValueError, OSError) as e:
                failed.append(f"{file}: {e}")
            return None

        results = each(attempt, files, at_once=args.num_workers)
        return list(tqdm(results, desc=what, total=len(files), unit=" files", disable=None))

    def missing(files: Sequence[Path]) -> list[Path]:
        equal = for_each(lambda file: is_stored(file, stored.get(path[file])), files, "comparing")
        return [file for file, same in zip(files, equal) if same is False]

    todo = missing(files)
    if todo:  # before any upload, so that no manifest ever names a file that is missing or different
        for stat in [stat for stat in stored.values() if stat.path.endswith(LAST)]:
            store.delete(stored.pop(stat.path).path)
    sent = for_each(lambda file: send(file, path[file]), todo, "sending")
    if not failed:
        sent += for_each(lambda file: send(file, path[file]), missing(manifests), "manifests")
    for why in sorted(failed)[:SHOWN]:
        print(f"failed: {why}", file=sys.stderr)
    sizes = [size for size in sent if size is not None]
    num_stored = len(files if failed else path) - len(sizes) - len(failed)
    print(f"{args.target}: {len(sizes):,} files sent and checked ({sum(sizes):,} bytes), {num_stored:,} already stored")
    if failed:
        print(f"{len(failed):,} failed, so the upload is incomplete; run the same command again", file=sys.stderr)
        return 1
    idx = next((f for f in files if f.suffix == ".idx"), None)
    words = [f"--data-path={args.target}", f"--data-format={(idx and pair_format(idx)) or 'text'}"]
    if (args.folder / TOKENIZER).is_dir():
        words.append(f"--tokenizer={args.target}/{TOKENIZER}")
    print(f"train from it: python -m scripts.base_train {shlex.join(words)}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    with sigterm_interrupts():  # objects that are already stored stay
        return push(args)


if __name__ == "__main__":
    run_main(main)
