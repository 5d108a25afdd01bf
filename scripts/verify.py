"""
Verify what lies on disk, to the last byte:

    python -m scripts.verify PATH...     folders: everything below them; one shard; one checkpoint

Shards (nanochat/shards.py), with manifest.json or without: header and sizes; offsets that ascend; no empty entry;
prefixes shorter than their entries; ids inside the vocabulary; end-of-document ids at the ends of documents and
nowhere else; counts and checksums of manifest.json; pairs that it lists and are gone, pairs that it does not list.
Then a table for each bucket: what is in it, how long entries are, how many tokens lie beyond a row of T + 1.

Checkpoints (nanochat/checkpoint.py), good or not, of a run, of its checkpoints folder, or one: a line for each file,
its size and checksum as trainer_state.json has them; files that it does not list; cursors of another step. Nothing is
unpickled. Of a run directory also the cursors that are kept in logs/.

All files are looked at, whatever is wrong with the first. The exit code is 1 if anything is. Files are read in
blocks, so memory does not depend on their size. A foreign shard names neither vocabulary nor end-of-document id: the
last id of each file is taken for the latter, and ids have no bound unless --tokenizer or --vocab-size gives one.
"""

import argparse
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nanochat.common import hash_file, run_main, setup_logging
from nanochat.run_dir import checkpoint_folders, cursor_files, read_cursors
from nanochat.sealed import SEAL_NAME, check_file, unsealed_files
from nanochat.shards import MANIFEST_NAME, Index, ends_follow, read_index, read_manifest
from nanochat.tokenizer import RustBPETokenizer

BLOCK_ENTRIES = 1 << 18
BLOCK_BYTES = 1 << 22
LISTED = 20  # problems of a kind that are told one by one for a file; the others are counted


@dataclass
class Problems:
    """What is wrong with one file."""

    path: Path
    lines: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, places: np.ndarray, tell: Callable[[int], str]) -> None:
        """Problems of one kind at some places (n,) int64; `tell` puts one into words."""
        seen = self.counts.get(kind, 0)
        self.counts[kind] = seen + len(places)
        self.lines += [f"{self.path}: {tell(place)}" for place in places[:max(0, LISTED - seen)].tolist()]

    def all(self) -> list[str]:
        more = [f"{self.path}: {kind}: {n - LISTED:,} more" for kind, n in self.counts.items() if n > LISTED]
        return self.lines + more


@dataclass(frozen=True)
class Expected:
    """What is known of a pair before it is read; None where nothing is."""

    record: dict[str, Any] | None = None  # in manifest.json
    max_length: int = 0  # ids of a window, 0 = no windows or not known
    vocab_size: int | None = None
    eod: int | None = None
    ends_follow: bool = False  # whether lengths and prefixes tell which entries end a document


@dataclass
class Facts:
    """What was counted in some pairs."""

    shards: int = 0
    documents: int = 0
    entries: int = 0
    tokens: int = 0
    beyond: int = 0  # tokens behind the first T + 1 of their entry
    entries_of_length: np.ndarray = field(default_factory=lambda: np.zeros(64, np.int64))  # [k]: 2**k and up
    tokens_of_length: np.ndarray = field(default_factory=lambda: np.zeros(64, np.int64))

    def __iadd__(self, other: "Facts") -> "Facts":
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self

    def count(self, lengths: np.ndarray, T: int) -> None:
        """Count entries by their lengths (n,)."""
        power = np.frexp(np.maximum(lengths, 1))[1] - 1
        self.entries += len(lengths)
        self.tokens += int(lengths.sum())
        self.beyond += int(np.maximum(lengths - (T + 1), 0).sum())
        self.entries_of_length += np.bincount(power, minlength=64)
        self.tokens_of_length += np.bincount(power, lengths, minlength=64).astype(np.int64)


# ---- one pair -------------------------------------------------------------------------------------------------------

def check_pair(path: Path, expected: Expected, T: int, bar: tqdm) -> tuple[Facts, list[str]]:
    """Count and check one pair, given by its .bin: (facts, problems)."""
    facts, problems = Facts(), Problems(path)
    try:
        index = read_index(path)
        ascending = check_entries(index, expected, facts, problems, T)
        bin_hash = check_ids(index, expected if ascending else None, facts, problems, bar)
        if expected.record is not None:
            found = {"entries": len(index), "tokens": index.num_tokens, "bin_bytes": path.stat().st_size,
                     "bin_hash": bin_hash, "idx_hash": hash_file(path.with_suffix(".idx")),
                     **({"documents": facts.documents} if ascending else {})}
            compare_record(found, expected.record, problems)
    except (ValueError, OSError) as e:
        problems.lines.append(str(e))
        return Facts(), problems.all()
    facts.shards = 1
    return facts, problems.all()


def compare_record(found: dict[str, Any], record: dict[str, Any], problems: Problems) -> None:
    """Compare what was found in a pair with its record in manifest.json."""
    for key, value in found.items():
        if value != record[key]:
            problems.lines.append(f"{problems.path}: {key} is {value}, {MANIFEST_NAME} says {record[key]}")
    if record.get("groups") is not None and sum(record["groups"]) != found["entries"]:
        problems.lines.append(f"{problems.path}: the groups in {MANIFEST_NAME} hold {sum(record['groups']):,} "
                              f"entries, the file {found['entries']:,}")


def check_entries(index: Index, expected: Expected, facts: Facts, problems: Problems, T: int) -> bool:
    """Check what the index says by itself, in blocks of entries; False if offsets do not ascend."""
    ascending = True
    for first in range(0, len(index), BLOCK_ENTRIES):
        offsets = index.offsets[first:first + BLOCK_ENTRIES + 1]
        prefixes = index.prefixes[first:first + BLOCK_ENTRIES]
        lengths = np.diff(offsets)
        limit = np.where(ends_by_index(index, first, first + len(lengths)), 1, 0) + expected.max_length

        def places(wrong: np.ndarray, first: int = first) -> np.ndarray:
            return first + np.flatnonzero(wrong)

        def length(i: int) -> str:
            return f"{index.offsets[i + 1] - index.offsets[i]:,} ids"

        problems.add("offsets that run backwards", places(lengths < 0), lambda i:
                     f"entry {i:,}: it starts at id {index.offsets[i]:,} and ends at {index.offsets[i + 1]:,}")
        problems.add("empty entries", places(lengths == 0), lambda i: f"entry {i:,}: it is empty")
        problems.add("prefixes too long", places((prefixes >= lengths) & (lengths > 0)), lambda i:
                     f"entry {i:,}: a prefix of {index.prefixes[i]:,} in an entry of {length(i)}")
        if expected.max_length:
            problems.add("windows too long", places(lengths > limit), lambda i:
                         f"entry {i:,}: {length(i)}, but windows have at most {expected.max_length:,} and an "
                         f"end-of-document id")
        facts.count(lengths, T)
        ascending &= not (lengths < 0).any()
    problems.add("prefix of the first entry", np.flatnonzero(index.prefixes[:1]), lambda i:
                 f"entry 0: a prefix of {index.prefixes[0]:,}, but there is no entry before it")
    return ascending


def ends_by_index(index: Index, first: int, last: int) -> np.ndarray:
    """Whether entries [first, last) end a document as far as prefixes tell: (n,) bool."""
    followers = index.prefixes[first + 1:last + 1] == 0
    return followers if len(followers) == last - first else np.append(followers, True)


def check_ids(index: Index, expected: Expected | None, facts: Facts, problems: Problems, bar: tqdm) -> str:
    """Read .bin in blocks; gives back its checksum. Nothing but that if `expected` is None."""
    digest, at = hashlib.blake2b(digest_size=16), 0
    with open(index.path, "rb") as f:
        eod = None if expected is None else last_id(f, index) if expected.eod is None else expected.eod
        while data := f.read(BLOCK_BYTES):
            digest.update(data)
            ids = np.frombuffer(data, index.dtype)
            if expected is not None:
                check_vocabulary(index, ids, at, expected.vocab_size, problems)
                facts.documents += check_ends(index, ids, at, eod, expected.ends_follow, problems)
            at += len(ids)
            bar.update(len(data))
    return digest.hexdigest()


def last_id(f: Any, index: Index) -> int | None:
    """The last id of a .bin, None if there is none."""
    size = index.dtype.itemsize
    f.seek(max(0, index.num_tokens - 1) * size)
    data = f.read(size)
    f.seek(0)
    return int.from_bytes(data, "little") if data else None


def entry_of(index: Index, places: np.ndarray) -> np.ndarray:
    """The entries that some ids belong to."""
    return np.searchsorted(index.offsets, places, side="right") - 1


def check_vocabulary(index: Index, ids: np.ndarray, at: int, vocab_size: int | None, problems: Problems) -> None:
    """Check the range of a block of ids, whose first is id `at` of the file."""
    if vocab_size is None or ids.max() < vocab_size:
        return
    wrong = at + np.flatnonzero(ids >= vocab_size)
    problems.add("ids outside the vocabulary", wrong, lambda place: (
        f"entry {entry_of(index, np.array(place)):,}: id {ids[place - at]:,} at {place:,}, outside the vocabulary of "
        f"{vocab_size:,}"))


def check_ends(index: Index, ids: np.ndarray, at: int, eod: int | None, ends_follow: bool, problems: Problems) -> int:
    """Check the end-of-document ids in a block of ids, whose first is id `at` of the file. Gives back how many
    documents end in it: entries that end with one and are not followed by more of the document."""
    ends = index.offsets[1:]
    first, last = np.searchsorted(ends, [at, at + len(ids)], side="right").tolist()
    by_index = ends_by_index(index, first, last)
    there = ends[first:last] > index.offsets[first:last]  # not an empty entry
    by_id = (ids[ends[first:last] - 1 - at] == eod) & there
    must = by_index & there if ends_follow else by_index & there & (np.arange(first, last) == len(index) - 1)
    problems.add("documents without an end", first + np.flatnonzero(must & ~by_id), lambda i:
                 f"entry {i:,}: the document ends here without the end-of-document id {eod}")
    if ends_follow:
        problems.add("ends inside documents", first + np.flatnonzero(by_id & ~by_index), lambda i:
                     f"entry {i:,}: it ends with the end-of-document id {eod}, but the next entry goes on with the "
                     f"document")
    places = at + np.flatnonzero(ids == eod)
    inside = places[index.offsets[entry_of(index, places) + 1] - 1 != places]
    problems.add("end-of-document ids inside entries", inside, lambda place:
                 f"entry {entry_of(index, np.array(place)):,}: the end-of-document id {eod} at {place:,}, inside the "
                 f"entry")
    return int((by_id & by_index).sum())


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
    if not path.is_dir():
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--sequence-len", type=int, default=2048, metavar="T", help="tokens a row trains on")
    known = parser.add_mutually_exclusive_group()
    known.add_argument("--tokenizer", type=Path, metavar="DIR", help="the tokenizer that the ids are of")
    known.add_argument("--vocab-size", type=int, metavar="N", help="bound of ids where no manifest.json tells it")
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
