"""
Verify runs, checkpoints and token shards on disk, byte by byte, and receipts against data.

    python -m scripts.verify mine                   # a run; also several paths
    python -m scripts.verify shards                 # a folder and everything below it; one pair; one checkpoint
    python -m scripts.verify mine.json --data-path=mytext           # a receipt, from scripts.receipt
    python -m scripts.verify mine.json --run=mine --replay=5%       # do the run's weights follow from its rows?

Everything except a run's data is opened as in training and read to the end; whatever training would
refuse is a problem. Pairs may be in object storage (s3://bucket/prefix). These are checked in
addition:

    pairs         .bin and .idx, ids with an index (see nanochat/tokens.py): no empty entries (only Megatron's files
                  may have them), prefixes and windows within their limits, ids inside the vocabulary, end-of-document
                  ids at the ends of documents and nowhere else, and the records of manifest.json. Then a table of the
                  lengths of entries
    checkpoints   size and checksum of each file; files that the checkpoint does not list. Nothing is unpickled
    cursors       all those that a run keeps in logs/
    row losses    the checksum of every logged step's record in logs/rows
    data          the files that a run has pinned: size, hash of footer or header, sampled blocks; every byte of files
                  whose checksum is in a manifest.json (scripts.tok_shards writes it)

    receipt       with --data-path=DIR: the files equal those of the receipt, byte by byte; the rows of some steps
                  (--steps), recomputed without the run, have the digests that the run logged
                  with --replay=5% or --replay=1000:2000: stretches between two checkpoints that the receipt lists are
                  trained again, and every bit of the second one must follow from the first (docs/exactness.md)

A problem does not stop the check of the other files. The exit code is 1 if there is any problem.
Pairs are read in blocks, so memory does not depend on their size. A pair without a manifest.json
names neither vocabulary nor end-of-document id: they are those of --tokenizer, else of the
tokenizer that training finds beside the pair (OUT/tokenizer). Without one, ids are checked only if
you pass --vocab-size, and the last id of a shards file counts as the end-of-document id (Megatron's
files may have none). A folder that scripts.tok_shards has not finished is a problem.
"""

import argparse
import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from nanochat.any_step import replay
from nanochat.checkpoint import read_seal
from nanochat.cli import Parser, run_main, setup_logging, whole
from nanochat.common import (
    AnyPath,
    Remote,
    as_path,
    begin_launch,
    counted,
    hash_file,
    local_copy,
    table,
)
from nanochat.files import MANIFEST_NAME, OWN_TOKENIZER, unfinished, walk
from nanochat.pins import DATA_MANIFEST, Manifest, is_prepared, read_manifests
from nanochat.run_dir import CHECKPOINT_NAME, cursor_files, find_run, read_cursors
from nanochat.run_reader import RunReader
from nanochat.sources import check, check_own_file
from nanochat.tokenizer import EOD_HELP, TOKENIZER_HELP, get_tokenizer
from nanochat.tokens import TokenFile, open_tokens, read_manifest, to_offsets

SEAL_NAME = "trainer_state.json"
BLOCK_ENTRIES = 1 << 12
BLOCK_IDS = 1 << 21

# yields lines to print, and advances a progress bar by the bytes read
Check = Callable[[tqdm], Iterator[str]]


class Problem(str):
    """A line that describes a problem."""


# ---- pairs --------------------------------------------------------------------------------------


def length_table(lengths: Counter[int], row: int) -> list[str]:
    """A table of lengths, {ids: entries}, by powers of two; and how many entries are longer than a
    row of `row` ids."""
    entries, tokens = Counter[int](), Counter[int]()  # by the power of two
    for ids, number in lengths.items():
        power = ids.bit_length() - 1  # -1 for an empty entry
        entries[power] += number
        tokens[power] += ids * number
    num_entries = entries.total()
    num_tokens = max(1, tokens.total())

    rows = []
    for power, number in sorted(entries.items()):
        name = "0"
        if power >= 0:
            name = f"{1 << power:,} .. {(2 << power) - 1:,}"
        share = number / num_entries
        token_share = tokens[power] / num_tokens
        rows.append((name, number, f"{share:.2%}", f"{token_share:.2%}"))

    longer = beyond = 0
    for ids, number in lengths.items():
        if ids > row:
            longer += number
            beyond += (ids - row) * number
    return [
        *table(("ids", "entries", "of entries", "of tokens"), rows),
        f"longer than T + 1 = {row:,}: {longer / num_entries:.2%} of entries; {beyond:,} tokens "
        f"({beyond / num_tokens:.2%}) are beyond that length",
    ]


class Rules(NamedTuple):
    """What the entries of a pair must comply with."""

    max_length: int  # tokens of a window; 0: any
    eod: int | None  # the end-of-document id; None: unknown
    vocab_size: int | None  # None: unknown


@dataclass
class Found:
    """A problem: a sentence about the first entry that has it, and how many have it."""

    sentence: str
    number: int = 0


def rules_of(pair: TokenFile, args: argparse.Namespace) -> Rules:
    """The rules of a pair, from its manifest.json if that lists it, else from the command line."""
    if pair.record is not None and pair.manifest is not None:
        tokenizer = pair.manifest["tokenizer"]
        return Rules(
            pair.manifest["arguments"]["max_length"], tokenizer["eod"], tokenizer["vocab_size"]
        )
    eod = args.eod
    if eod is None and pair.format == "shards" and pair.num_tokens:
        [eod] = pair.reader.read(pair.num_tokens - 1, pair.num_tokens).tolist()
    return Rules(0, eod, args.vocab_size)


def hash_ids(pair: TokenFile, bar: tqdm) -> str:
    """The hash of all ids of a pair, as in manifest.json."""
    digest = hashlib.blake2b(digest_size=16)
    for begin in range(0, pair.num_tokens, BLOCK_IDS):
        end = min(begin + BLOCK_IDS, pair.num_tokens)
        ids = pair.reader.read(begin, end)
        digest.update(ids.tobytes())
        bar.update(ids.nbytes)
    return digest.hexdigest()


def check_pair(
    path: AnyPath, args: argparse.Namespace, counts: Counter[str], lengths: Counter[int], bar: tqdm
) -> Iterator[str]:
    """The problems of one pair, given by its .bin; adds its sizes to `counts` and `lengths`."""
    num_documents = None  # unknown
    try:
        pair = open_tokens(path)
        record = pair.record
        rules = rules_of(pair, args)
        contents: dict[str, Any] = {
            "entries": len(pair),
            "tokens": pair.num_tokens,
            "bin_bytes": pair.num_bytes,
            "bin_hash": hash_ids(pair, bar),
            "idx_hash": hash_file(local_copy(pair.idx_path)),
        }
        found: dict[str, Found] = {}
        try:
            ended = 0
            for first in range(0, len(pair), BLOCK_ENTRIES):
                last = min(first + BLOCK_ENTRIES, len(pair))
                lengths.update(pair.lengths(first, last).tolist())
                ended += check_entries(pair, first, rules, found)
            num_documents = ended
        except ValueError as e:
            yield str(e).partition("; python -m scripts.verify")[0]
        for problem in found.values():
            more = f", and {problem.number - 1:,} more" if problem.number > 1 else ""
            yield problem.sentence + more
    except (ValueError, OSError) as e:
        yield str(e)
        return
    counts.update(shards=1, documents=num_documents or 0, entries=len(pair), tokens=pair.num_tokens)
    if record is not None:
        contents["documents"] = num_documents
        yield from compare_record(path, record, contents)


def compare_record(
    path: AnyPath, record: Mapping[str, Any], contents: Mapping[str, Any]
) -> Iterator[str]:
    """The differences of a pair's record in manifest.json and its contents; a value of None is
    unknown."""
    for key, value in contents.items():
        if value not in (None, record[key]):
            yield f"{path}: {key} is {value}, {MANIFEST_NAME} says {record[key]}"
    num_entries = contents["entries"]
    in_groups = sum(record.get("groups") or [num_entries])
    if in_groups != num_entries:
        yield (
            f"{path}: the groups in {MANIFEST_NAME} hold {in_groups:,} entries, "
            f"the file {num_entries:,}"
        )


class Block:
    """Entries `first` .. `last` - 1 of a pair. Adds their problems to `found`, {problem: Found}."""

    def __init__(self, pair: TokenFile, first: int, found: dict[str, Found]) -> None:
        self.pair = pair
        self.first = first
        self.last = min(first + BLOCK_ENTRIES, len(pair))
        self.lengths = pair.lengths(first, self.last)
        self.prefixes = pair.prefixes(first, self.last)
        self.full = self.lengths > 0
        self.found = found

    def report(self, entries: np.ndarray, problem: str) -> None:
        """Count a problem of `entries`, (n,) bool."""
        if not entries.any():
            return
        i = int(np.argmax(entries))
        sentence = f"{self.pair.path}: entry {self.first + i:,} ({self.lengths[i]:,} ids) {problem}"
        found = self.found.setdefault(problem, Found(sentence))
        found.number += int(np.count_nonzero(entries))

    def check_lengths(self, max_length: int) -> None:
        """Check lengths and prefixes."""
        if self.pair.format == "shards":  # Megatron's files may have empty documents
            self.report(~self.full, "is empty")
        is_repeat = self.full & (self.prefixes >= self.lengths)
        self.report(is_repeat, "is not longer than its prefix")
        if self.first == 0 and self.prefixes[0] > 0:
            is_first = np.arange(self.last) == 0
            self.report(
                is_first, f"has a prefix of {self.prefixes[0]:,}, but it is the first entry"
            )
        if max_length:
            too_long = self.lengths > max_length + 1
            self.report(
                too_long, f"is longer than a window of {max_length:,} plus an end-of-document id"
            )

    def check_ends(self, ends_with: np.ndarray, num_ends: np.ndarray, eod: int) -> int:
        """Check end-of-document ids. `ends_with`: whether an entry ends with one, (n,) bool;
        `num_ends`: how many it has, (n,). Returns how many documents end in the block."""
        pair = self.pair
        # whether the next entry belongs to another document
        is_last = np.ones(len(self.lengths), bool)
        following = pair.prefixes(self.first + 1, min(self.last + 1, len(pair)))
        is_last[: len(following)] = following == 0
        # entries that must end with the id; if their ends do not follow from prefixes, only the
        # last one
        must_end = is_last
        if not pair.ends_follow:
            must_end = np.arange(self.first, self.last) == len(pair) - 1

        end = f"the end-of-document id {eod}"
        self.report(num_ends > ends_with, f"has {end} inside it")
        if pair.ends_follow:
            self.report(ends_with & ~is_last, f"ends with {end}, but its document continues")
        if pair.ends_follow or pair.format == "shards":
            self.report(must_end & self.full & ~ends_with, f"ends a document without {end}")
        return int((ends_with & is_last).sum())


def check_entries(pair: TokenFile, first: int, rules: Rules, found: dict[str, Found]) -> int:
    """Check the block of entries that begins at number `first`. Adds problems to `found`, {problem:
    Found}, and returns how many documents end in the block."""
    block = Block(pair, first, found)
    block.check_lengths(rules.max_length)
    ids, edges = pair.read_flat(first, block.last)

    def count(mask: np.ndarray) -> np.ndarray:
        """For each entry, the number of ids for which `mask` is True, (n,)."""
        return np.diff(to_offsets(mask)[edges])

    if rules.vocab_size is not None:
        outside = (ids < 0) | (ids >= rules.vocab_size)
        block.report(count(outside) > 0, f"has ids outside the vocabulary of {rules.vocab_size:,}")
    if rules.eod is None:
        return len(block.lengths)
    is_end = ids == rules.eod
    last_ids = edges[1:][block.full] - 1
    ends_with = np.zeros(len(block.lengths), bool)
    ends_with[block.full] = is_end[last_ids]
    return block.check_ends(ends_with, count(is_end), rules.eod)


def compare_manifest(
    folder: AnyPath,
    manifest: Mapping[str, Any],
    paths: Sequence[AnyPath],
    args: argparse.Namespace,
    *,
    whole: bool,
) -> Iterator[Problem]:
    """The differences of a folder's manifest.json and its pairs; see `check_pairs`."""
    fingerprint = manifest["tokenizer"]["fingerprint"]
    if args.fingerprint not in (None, fingerprint):
        yield Problem(
            f"{folder / MANIFEST_NAME}: made with tokenizer {fingerprint}, but {args.tokenizer} is "
            f"{args.fingerprint}"
        )
    listed = manifest["shards"]
    for path in paths:
        if path.stem not in listed:
            yield Problem(f"{path}: {MANIFEST_NAME} does not list it")
    if not whole:
        return
    on_disk = {path.stem for path in paths}
    for name in listed:
        if name not in on_disk:
            yield Problem(f"{folder / name}.bin: {MANIFEST_NAME} lists it, but it is missing")


def check_pairs(
    folder: AnyPath, paths: Sequence[AnyPath], args: argparse.Namespace, bar: tqdm, *, whole: bool
) -> Iterator[str]:
    """Verify pairs of one folder, each given by its .bin; `whole`: whether these are all of the
    folder's pairs."""
    manifest = read_manifest(folder)
    if manifest is not None:
        yield from compare_manifest(folder, manifest, paths, args, whole=whole)
    elif args.vocab_size is None:
        try:
            args = with_own_tokenizer(folder, args)
        except (OSError, ValueError) as e:
            yield f"  the tokenizer beside {folder} cannot be used: {e}"
    counts, lengths = Counter[str](), Counter[int]()
    for path in paths:
        for problem in check_pair(path, args, counts, lengths, bar):
            yield Problem(problem)
    sizes = ", ".join(f"{number:,} {what}" for what, number in counts.items())
    if counts["documents"]:  # rows have it as the BOS of the next document
        sizes += ", the EOD at the end of each document included"
    if manifest is not None and not manifest["shards"]:
        sizes = "no input has documents for this folder"
    yield f"{folder}: {sizes or 'nothing could be read'}"
    if lengths:
        for line in length_table(lengths, args.sequence_len + 1):
            yield f"  {line}"
    if manifest is not None:
        return
    if args.eod is None:
        yield "  the end-of-document id is unknown (the last id of a shards file counts as it): pass --tokenizer"
    if args.vocab_size is None:
        yield "  the vocabulary is unknown: pass --tokenizer or --vocab-size to check the ids"
    elif args.tokenizer is not None:
        yield f"  ids checked with the tokenizer {args.tokenizer}, {args.vocab_size:,} tokens"


def with_own_tokenizer(folder: AnyPath, args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with the tokenizer that scripts.tok_shards and training find beside a folder of
    pairs: OUT/tokenizer for OUT/SPLIT/BUCKET, if there is one."""
    place = folder if isinstance(folder, Remote) else folder.absolute()
    is_bucket = place.parent.name in ("train", "val")
    path = (place.parent.parent if is_bucket else place) / OWN_TOKENIZER
    if not path.is_file():
        return args
    own = argparse.Namespace(**vars(args))
    use_tokenizer(own, str(path.parent))
    return own


# ---- checkpoints and cursors --------------------------------------------------------------------


def check_checkpoint(path: Path, bar: tqdm) -> Iterator[str]:
    """Verify one checkpoint. It is not a problem if a running process deletes it meanwhile."""
    from nanochat.checkpoint import check_file, open_verified  # imports PyTorch

    problems: list[str] = []
    try:
        state = read_seal(path)
        files = state["files"]
        yield f"{path}: step {state['step']:,}, {len(files) + 1} files"
        yield f"  OK {SEAL_NAME}"
        for name, record in files.items():
            try:
                check_file(path, name, record)
                yield f"  OK {name} ({record['bytes']:,} bytes)"
            except (ValueError, OSError) as e:
                problems.append(str(e))
            bar.update(record["bytes"])
        for name in sorted(files_below(path) - files.keys() - {SEAL_NAME}):
            problems.append(f"{path / name}: {SEAL_NAME} does not list it")
        if not problems:
            open_verified(path, state)  # raises for parts that do not fit together
    except (ValueError, OSError) as e:
        problems.append(str(e))
    if problems and not path.exists():
        yield f"{path}: the run deleted it in the meantime"
        return
    for problem in problems:
        yield Problem(problem)


def check_cursors(folder: Path, bar: tqdm) -> Iterator[str]:
    """Read all cursors that a run keeps."""
    run_dir = folder.absolute().parents[1]
    files = cursor_files(run_dir)
    good = 0
    for step, file in files.items():
        try:
            bar.update(file.stat().st_size)
            actual, _ = read_cursors(file)
            if actual != step:
                raise ValueError(f"{file}: its cursors are those of step {actual}; delete it")
            good += 1
        except (ValueError, OSError) as e:
            yield Problem(e)
    yield f"{folder}: {good:,} of {len(files):,} files OK"


def check_row_losses(folder: Path, bar: tqdm) -> Iterator[str]:
    """Read the row losses of every logged step. A step without them is not a problem."""
    run = RunReader(folder.absolute().parents[1])
    if not run.digests:
        return
    losses, good = run.row_losses, 0
    for step in run.digests:
        try:
            losses.read(step)
            good += 1
            bar.update(losses.size)
        except FileNotFoundError:
            continue
        except (ValueError, OSError) as e:
            yield Problem(e)
    yield f"{folder}: row losses of {good:,} steps OK"


# ---- the data of a run --------------------------------------------------------------------------


def check_data(path: AnyPath, args: argparse.Namespace, bar: tqdm) -> Iterator[str]:
    """Compare the files that a run has pinned in its data_manifest.json with the disk, and read
    those whose checksums are in the manifest.json beside them."""
    files: dict[AnyPath, Manifest] = {}  # for each file, its manifest reduced to this file
    for buckets in read_manifests(local_copy(path)).values():
        for manifest in buckets.values():
            root = as_path(manifest["root"])
            for pin in manifest["files"]:
                files[root / pin["name"]] = {**manifest, "files": [pin]}
    folders: dict[AnyPath, list[AnyPath]] = {}
    for file, alone in files.items():
        [entry] = alone["files"]
        try:
            if is_prepared(entry):
                check_own_file(file, entry)
            else:
                check(alone)
            if has_checksum(file):
                folders.setdefault(file.parent, []).append(file)
        except (ValueError, OSError) as e:
            yield Problem(e)
    for folder, paths in folders.items():
        yield from check_pairs(folder, paths, args, bar, whole=False)
    num_read = sum(len(paths) for paths in folders.values())
    yield f"{path}: {len(files):,} files compared, {num_read:,} of them read completely"


def has_checksum(file: AnyPath) -> bool:
    """Whether a file is part of a pair that the manifest.json beside it lists."""
    if file.suffix != ".bin":
        return False
    manifest = read_manifest(file.parent)
    return manifest is not None and file.stem in manifest["shards"]


# ---- receipts -----------------------------------------------------------------------------------


def check_receipt(path: Path, args: argparse.Namespace, _: tqdm) -> Iterator[str]:
    """Recompute the rows of some steps from the data, and compare their digests with those of a
    receipt."""
    from nanochat.config import Settings  # imports PyTorch
    from nanochat.receipt_check import check_rows

    given = Settings(data_path=args.data_path, tokenizer=args.tokenizer, eod_token=args.eod_token)
    yield from check_rows(path, given, args.steps)


def check_weights(path: Path, args: argparse.Namespace, _: tqdm) -> Iterator[str]:
    """Train stretches of a run again, from one checkpoint of its receipt to the next, and compare
    bits."""
    from nanochat.receipt_check import find_stretches

    run, stretches, share = find_stretches(path, args.run, args.replay)
    names = ", ".join(f"{stretch.start:,} to {stretch.stop:,}" for stretch in stretches)
    yield f"{path}: replaying {share:.0%} of the steps of {run.name}: {names}"
    for stretch in stretches:
        words = [f"--check={stretch.start}:{stretch.stop}"]
        if args.data_path is not None:
            words.append(f"--data-path={args.data_path}")
        replay([str(run.run_dir), *words], args.processes or 1)
        yield f"  OK steps {stretch.start:,} to {stretch.stop:,}: every bit of the second checkpoint follows"


def share_or_span(text: str) -> str:
    """The type of --replay: 5% or 1000:2000."""
    if re.fullmatch(r"\d+(\.\d+)?%|\d+:\d+", text) is None:
        raise argparse.ArgumentTypeError("expected a share such as 5% or steps such as 1000:2000")
    return text


def is_receipt(path: AnyPath) -> bool:
    return (
        path.suffix == ".json"
        and path.is_file()
        and path.name not in (DATA_MANIFEST, MANIFEST_NAME)
    )


# ---- the command --------------------------------------------------------------------------------


def check_flags(paths: Sequence[AnyPath], args: argparse.Namespace) -> None:
    """ValueError for a flag that has no effect on any of the paths."""
    if not any(is_receipt(path) for path in paths):
        idle = ["replay", "steps", "data_path", "run", "processes"]
        why = "needs a receipt among the paths; python -m scripts.receipt RUN writes one"
    elif args.replay is None:
        idle = ["run", "processes"]
        why = "has no effect without --replay; the data of a receipt is named with --data-path"
    else:
        idle = ["steps"]
        why = "has no effect with --replay; name the steps with --replay=A:B"
    for name in idle:
        if getattr(args, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')}: {why}")


def locate(path: AnyPath) -> AnyPath:
    """A path that exists, or the run that it names. FileNotFoundError if there is neither."""
    if path.exists():
        return path
    if isinstance(path, Remote) or len(path.parts) != 1:
        raise FileNotFoundError(f"{path}: no such file or folder; name what to verify")
    return find_run(path)


def find_all(path: AnyPath, args: argparse.Namespace) -> list[Check]:
    """The checks of everything that can be verified at or below a path. ValueError if there is
    nothing to verify."""
    if is_receipt(path):
        what = check_weights if args.replay else check_receipt
        return [partial(what, local_copy(path), args)]
    if path.suffix in (".bin", ".idx") and path.is_file():
        pair = path.with_suffix(".bin")
        return [partial(check_pairs, pair.parent, [pair], args, whole=False)]
    checks = find_below(path, args)
    if not checks:
        raise ValueError(
            f"{path}: found nothing to verify, expected token files, checkpoints or cursors at or "
            f"below it (text files have no checksums); name another path"
        )
    return checks


def find_below(path: AnyPath, args: argparse.Namespace) -> list[Check]:
    """The checks of everything at or below a path; [] if nothing there can be verified."""
    pairs: dict[AnyPath, set[AnyPath]] = {}
    checks: list[Check] = []  # of checkpoints, cursors, row losses, pinned data
    closed: set[AnyPath] = set()  # folders whose .bin files are not pairs: checkpoints, row losses
    entries = sorted(walk(path)) if path.is_dir() else []
    paths = [path, *(entry.path for entry in entries if entry.kind in ("file", "folder"))]
    for p in paths:
        if not closed.isdisjoint(p.parents):
            continue
        if p.suffix in (".bin", ".idx"):
            of_folder = pairs.setdefault(p.parent, set())
            of_folder.add(p.with_suffix(".bin"))
        elif p.name == MANIFEST_NAME and is_manifest(p):
            pairs.setdefault(p.parent, set())
        elif p.name == DATA_MANIFEST:
            checks.append(partial(check_data, p, args))
        elif isinstance(p, Path) and p.is_dir():
            check_folder, has_pairs = folder_kind(p)
            if check_folder is not None:
                checks.append(partial(check_folder, p))
            if not has_pairs:
                closed.add(p)
    if problem := unfinished(path, entries):
        checks.append(partial(report, problem))
    if not pairs and not checks:
        return []

    of_pairs = [
        partial(check_pairs, folder, sorted(files), args, whole=True)
        for folder, files in sorted(pairs.items())
    ]
    for entry in entries:
        if entry.kind == "dangling" and "wandb" not in entry.path.parts:
            where = f"{entry.path}: a link to {os.readlink(entry.path)}"
            problem = f"{where}, which does not exist; restore it, or delete the link"
            checks.append(partial(report, problem))
    return [*of_pairs, *checks]


def folder_kind(path: Path) -> tuple[Callable[[Path, tqdm], Iterator[str]] | None, bool]:
    """(the check of a folder as a whole, None if there is none; whether .bin files below it are
    pairs)."""
    parent, name = path.absolute().parts[-2:]
    if parent == "checkpoints" and CHECKPOINT_NAME.fullmatch(name):
        return check_checkpoint, False
    seal = path / SEAL_NAME
    if seal.is_file():
        is_own = b'"format_version"' in seal.read_bytes()  # other programs use the name, too
        return check_checkpoint if is_own else None, False
    if (parent, name) == ("logs", "cursors"):
        return check_cursors, True
    if (parent, name) == ("logs", "rows"):
        return check_row_losses, False
    return None, True


def report(problem: str, _: tqdm) -> Iterator[str]:
    """Report a problem that is already known."""
    yield Problem(problem)


def files_below(path: Path) -> set[str]:
    """The names of everything below a folder except its folders. Unlike rglob, os.walk skips
    folders that a run deletes in the meantime."""
    names = set()
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            entry = Path(folder) / name
            if not entry.is_dir() or entry.is_symlink():
                names.add(str(entry.relative_to(path)))
    return names


def is_manifest(path: AnyPath) -> bool:
    """Whether a manifest.json belongs to token files: other programs use the name, too."""
    try:
        return read_manifest(path.parent) is not None
    except ValueError:
        return False


def step_list(text: str) -> list[int]:
    """argparse type: numbers of steps, separated by commas."""
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected steps separated by commas, such as 0,1000"
        )
    return [int(word) for word in words]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "paths", nargs="+", type=as_path, metavar="PATH", help="a run, file or folder"
    )
    parser.add_argument(
        "--sequence-len",
        type=whole(1),
        default=2048,
        metavar="T",
        help="count entries longer than T + 1 ids",
    )
    known = parser.add_mutually_exclusive_group()
    known.add_argument(
        "--tokenizer", metavar="NAME", help=f"the tokenizer that produced the ids: {TOKENIZER_HELP}"
    )
    known.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="number of ids, for pairs without a manifest.json",
    )
    parser.add_argument("--eod-token", metavar="TOKEN", help=EOD_HELP)
    add_receipt_flags(parser)
    begin_launch()
    args = parser.parse_args(argv)
    args.fingerprint = args.eod = None
    if args.tokenizer is not None:
        use_tokenizer(args, args.tokenizer)
    return args


def use_tokenizer(args: argparse.Namespace, name: str) -> None:
    """Set what a tokenizer says about ids."""
    tokenizer = get_tokenizer(name, eod_token=args.eod_token)
    args.tokenizer = name
    args.fingerprint = tokenizer.fingerprint
    args.eod = tokenizer.get_bos_token_id()
    args.vocab_size = tokenizer.get_vocab_size()


def add_receipt_flags(parser: Parser) -> None:
    receipts = parser.add_argument_group("receipts")
    receipts.add_argument("--data-path", metavar="DIR", help="the data to compare a receipt with")
    receipts.add_argument(
        "--steps",
        type=step_list,
        metavar="0,1000,41199",
        help="steps of the run to check (default: all that have a digest in the receipt)",
    )
    receipts.add_argument(
        "--replay",
        type=share_or_span,
        metavar="5%|A:B",
        help="train this share of the run's steps again, or those from A to B, and compare bits",
    )
    receipts.add_argument(
        "--run", metavar="RUN", help="with --replay: the run's folder (default: by its name)"
    )
    receipts.add_argument(
        "--processes", type=whole(1), metavar="W", help="with --replay: processes (default: 1)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Verify and print; return 1 if there is a problem. ValueError or OSError if there is nothing
    to verify."""
    args = parse_args(argv)
    setup_logging()
    num_problems = 0

    def run(check: Check, bar: tqdm) -> Iterator[str]:
        try:
            yield from check(bar)
        except (ValueError, OSError) as e:  # the rest of this check is impossible
            yield Problem(e)

    with tqdm(unit="B", unit_scale=True, desc="verified", disable=None) as bar:
        paths = [locate(path) for path in args.paths]
        check_flags(paths, args)
        checks: list[Check] = []
        for path in paths:
            checks += find_all(path, args)
        for check in checks:
            for line in run(check, bar):
                bar.clear()
                if isinstance(line, Problem):
                    num_problems += 1
                    print(f"  PROBLEM {line}", flush=True)
                else:
                    print(line, flush=True)
    print(counted(num_problems, "problem") if num_problems else "all good", flush=True)
    return 1 if num_problems else 0


if __name__ == "__main__":
    run_main(main)
