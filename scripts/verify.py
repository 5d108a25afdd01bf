"""
Verify what lies on disk, to the last byte:

    python -m scripts.verify PATH...     folders: everything below them; one shard; one checkpoint

A PATH of shards may be of object storage (s3://bucket/prefix).

Pairs of .bin and .idx (nanochat/check_pairs.py), with manifest.json or without: header and sizes; entries that lie in
the file one after another (GPTS), or sequences and documents that lie in it anywhere (Megatron); no empty entry;
prefixes shorter than their entries; ids inside the vocabulary; end-of-document ids at the ends of documents and
nowhere else; counts and checksums of manifest.json; pairs that it lists and are gone, pairs that it does not list.
Then a table for each bucket: what is in it, how long entries are, how many tokens lie beyond a row of T + 1.

Checkpoints (nanochat/checkpoint.py), good or not, of a run, of its checkpoints folder, or one: a line for each file,
its size and checksum as trainer_state.json has them; files that it does not list; cursors of another step. Nothing is
unpickled. Of a run directory also the cursors that are kept in logs/.

All files are looked at, whatever is wrong with the first. The exit code is 1 if anything is. Files are read in
blocks, so memory does not depend on their size. A foreign pair names neither vocabulary nor end-of-document id: ids
have no bound unless --tokenizer or --vocab-size gives one, and the last id of each GPTS file is taken for the latter
(Megatron's need not have any: only --tokenizer tells).
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nanochat.check_pairs import LISTED, Expected, Facts, check_pair
from nanochat.checkpoint import SEAL_NAME, check_file, unsealed_files
from nanochat.common import Parser, run_main, setup_logging
from nanochat.places import begin, place
from nanochat.remote import is_remote
from nanochat.run_dir import checkpoint_folders, cursor_files, read_cursors
from nanochat.shards import MANIFEST_NAME, ends_follow, read_manifest
from nanochat.tokenizer import RustBPETokenizer

# ---- a folder of shards ---------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Bucket:
    """Pairs of one folder, by their .bin; `whole` unless they were named one by one."""

    folder: Path
    pairs: list[Path]
    whole: bool

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.pairs if path.exists())


def find_buckets(path: Path) -> list[Bucket]:
    """Shards at or below a path, folder by folder. Hidden files and what belongs to checkpoints are left out."""
    if path.is_file():
        return [Bucket(path.parent, [path.with_suffix(".bin")], False)] if path.suffix in (".bin", ".idx") else []
    checkpoints = {p.parent for p in path.rglob(SEAL_NAME)} | {item.path for item in find_checkpoints(path)}
    files = [p for p in sorted(path.rglob("*")) if (p.suffix in (".bin", ".idx") or p.name == MANIFEST_NAME)
             and checkpoints.isdisjoint(p.parents) and not any(d.startswith(".") for d in p.relative_to(path).parts)]
    buckets = []
    for folder in sorted({p.parent for p in files}):
        pairs = {p.with_suffix(".bin") for p in files if p.parent == folder and p.name != MANIFEST_NAME}
        if pairs or is_manifest(folder):
            buckets.append(Bucket(folder, sorted(pairs), True))
    return buckets


def is_manifest(folder: Path) -> bool:
    """Whether a folder's manifest.json is of shards: other programs use the name too."""
    try:
        return read_manifest(folder) is not None
    except ValueError:
        return False


def check_bucket(bucket: Bucket, args: argparse.Namespace, bar: tqdm) -> tuple[list[str], list[str]]:
    """Verify a folder of shards: (lines of its table, problems)."""
    problems: list[str] = []
    try:
        manifest = read_manifest(bucket.folder)
    except ValueError as e:
        manifest = None
        problems.append(str(e))
    names = {path.stem for path in bucket.pairs}
    if manifest is not None:
        problems += check_tokenizer(bucket.folder, manifest, args)
        if bucket.whole:
            problems += [f"{bucket.folder / name}.bin: {MANIFEST_NAME} lists it, but it is not there"
                         for name in manifest["shards"] if name not in names]
        problems += [f"{path}: {MANIFEST_NAME} does not list it" for path in bucket.pairs
                     if path.stem not in manifest["shards"]]
    facts = Facts()
    for path in bucket.pairs:
        expected = expect(manifest, path.stem, args)
        found, wrong = check_pair(path, expected, args.sequence_len, bar)
        facts += found
        problems += wrong
    notes = [] if manifest is not None or args.vocab_size is not None else [
        "  ids have no known bound: give --tokenizer or --vocab-size to check it"]
    return table(bucket.folder, facts, args.sequence_len) + notes, problems


def check_tokenizer(folder: Path, manifest: dict[str, Any], args: argparse.Namespace) -> list[str]:
    """Compare the tokenizer of a manifest with the one on the command line."""
    theirs = manifest["tokenizer"]["fingerprint"]
    if args.fingerprint in (None, theirs):
        return []
    return [f"{folder / MANIFEST_NAME}: made with tokenizer {theirs}, {args.tokenizer} is {args.fingerprint}"]


def expect(manifest: dict[str, Any] | None, name: str, args: argparse.Namespace) -> Expected:
    """What a pair must be like, from the manifest or else from the command line."""
    if manifest is None or name not in manifest["shards"]:
        return Expected(vocab_size=args.vocab_size, eod=args.eod)
    about = manifest["tokenizer"]
    return Expected(manifest["shards"][name], manifest["arguments"]["max_length"], about["vocab_size"], about["eod"],
                    ends_follow(manifest))


def table(folder: Path, facts: Facts, T: int) -> list[str]:
    """What is in a bucket, for people."""
    lines = [f"{folder}: {facts.shards:,} shards, {facts.documents:,} documents, {facts.entries:,} entries, "
             f"{facts.tokens:,} tokens"]
    if not facts.tokens:
        return lines
    lines.append(f"  {'ids':>23}  {'entries':>15}  {'of entries':>10}  {'of tokens':>10}")
    for k in np.flatnonzero(facts.entries_of_length).tolist():
        n, tokens = int(facts.entries_of_length[k]), int(facts.tokens_of_length[k])
        lines.append(f"  {f'{1 << k:,} .. {(2 << k) - 1:,}':>23}  {n:>15,}  {n / facts.entries:>10.2%}  "
                     f"{tokens / facts.tokens:>10.2%}")
    return [*lines, f"  beyond T + 1 = {T + 1:,}: {facts.beyond:,} tokens, {facts.beyond / facts.tokens:.2%}"]


# ---- checkpoints ----------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Folder:
    """A checkpoint, or the folder of cursors that a run keeps."""

    path: Path

    @property
    def num_bytes(self) -> int:
        return sum(p.stat().st_size for p in self.path.rglob("*") if p.is_file())


def find_checkpoints(path: Path) -> list[Folder]:
    """Checkpoints at or below a path, good or not, each as a folder: all that have the name of one in a folder
    `checkpoints`, and whatever else has a trainer_state.json of this program (others use the name too)."""
    if not path.is_dir() or is_remote(path):
        return []
    named = {p / folder.name for p in (path, *path.rglob("checkpoints")) if p.absolute().name == "checkpoints"
             for folder in checkpoint_folders(p.absolute().parent).values() if folder.is_dir()}
    if path.absolute() in checkpoint_folders(path.absolute().parent.parent).values():
        named.add(path)
    found = {p.parent for p in path.rglob(SEAL_NAME) if b'"format_version"' in p.read_bytes()}
    hidden = {p for p in found - named if any(d.startswith(".") for d in p.relative_to(path).parts)}
    return [Folder(p) for p in sorted((named | found) - hidden)]


def check_checkpoint(item: Folder, args: argparse.Namespace, bar: tqdm) -> tuple[list[str], list[str]]:
    """Verify one checkpoint: (a line for each good file, problems)."""
    from nanochat.checkpoint import load_checkpoint, read_state  # with PyTorch, which shards can do without

    try:
        state = read_state(item.path)
    except (ValueError, OSError) as e:
        return [f"{item.path}:"], [str(e)]
    lines = [f"{item.path}: step {state['step']:,}, {len(state['files']) + 1} files", f"  OK {SEAL_NAME}"]
    problems = []
    for name, record in state["files"].items():
        try:
            check_file(item.path, name, record)
            lines.append(f"  OK {name} ({record['bytes']:,} bytes)")
        except (ValueError, OSError) as e:
            problems.append(str(e))
        bar.update(record["bytes"])
    problems += [f"{item.path / name}: {SEAL_NAME} does not list it" for name in unsealed_files(item.path, state)]
    if not problems:
        try:
            load_checkpoint(item.path, verify=False)  # its parts fit each other
        except (ValueError, OSError) as e:
            problems.append(str(e))
    return lines, problems


def find_cursors(path: Path) -> list[Folder]:
    """The folders of kept cursors at or below a path that is a folder."""
    return [Folder(p) for p in sorted({path, *path.rglob("cursors")}) if p.is_dir()
            and p.absolute().parts[-2:] == ("logs", "cursors") and cursor_files(p.absolute().parents[1])]


def check_cursors(item: Folder, args: argparse.Namespace, bar: tqdm) -> tuple[list[str], list[str]]:
    """Read all cursors that a run keeps: (one line, problems)."""
    files, problems = cursor_files(item.path.absolute().parents[1]), []
    for step, file in files.items():
        try:
            found = read_cursors(file)[0]
            if found != step:
                problems.append(f"{file}: of step {found}")
        except (ValueError, OSError) as e:
            problems.append(str(e))
        bar.update(file.stat().st_size)
    return [f"{item.path}: {len(files) - len(problems):,} of {len(files):,} files OK"], problems


# ---- the command ----------------------------------------------------------------------------------------------------

# What can be verified: how to find it at or below a path, and how to check one of those found.
KINDS: dict[str, tuple[Callable[[Path], list[Any]], Callable[..., tuple[list[str], list[str]]]]] = {
    "shards": (find_buckets, check_bucket),
    "checkpoints": (find_checkpoints, check_checkpoint),
    "cursors": (find_cursors, check_cursors),
}


def find_all(paths: Sequence[Path]) -> list[tuple[str, Any]]:
    """(kind, item) of all that can be verified. FileNotFoundError or ValueError for a path with nothing."""
    found: list[tuple[str, Any]] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or folder; name what to verify")
        here = [(kind, item) for kind, (find, _) in KINDS.items() for item in find(path)]
        if not here:
            raise ValueError(f"{path}: found nothing to verify, expected {' or '.join(KINDS)} at or below it; name "
                             f"another path")
        found += here
    return found


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__,
                                     epilog=f"Of each kind of problem {LISTED} of a file are told, the others counted.")
    parser.add_argument("paths", nargs="+", type=place, metavar="PATH")
    parser.add_argument("--sequence-len", type=int, default=2048, metavar="T", help="tokens a row trains on")
    known = parser.add_mutually_exclusive_group()
    known.add_argument("--tokenizer", type=place, metavar="DIR", help="the tokenizer that the ids are of")
    known.add_argument("--vocab-size", type=int, metavar="N", help="bound of ids where no manifest.json tells it")
    begin()
    args = parser.parse_args(argv)
    args.fingerprint = args.eod = None
    if args.tokenizer is not None:
        tokenizer = RustBPETokenizer.from_directory(args.tokenizer)
        args.fingerprint, args.eod = tokenizer.fingerprint, tokenizer.get_bos_token_id()
        args.vocab_size = tokenizer.get_vocab_size()
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Verify and tell; 1 if anything is wrong. ValueError, OSError for paths with nothing to verify."""
    args = parse_args(argv)
    setup_logging()
    found = find_all(args.paths)
    problems: list[str] = []
    with tqdm(total=sum(item.num_bytes for _, item in found), unit="B", unit_scale=True, disable=None) as bar:
        for kind, item in found:
            lines, wrong = KINDS[kind][1](item, args, bar)
            bar.clear()
            print("\n".join([*lines, *(f"  PROBLEM {line}" for line in wrong)]), flush=True)
            problems += wrong
    print(f"{len(problems):,} problem(s)" if problems else "all good", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    run_main(main)
