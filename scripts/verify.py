"""
Verify runs, checkpoints and token shards on disk, byte by byte, and receipts against data.

    python -m scripts.verify mine                   # a run; also several paths
    python -m scripts.verify shards                 # a folder and everything below it; one pair; one checkpoint
    python -m scripts.verify mine.json --data-path=mytext           # a receipt, from scripts.receipt

Everything except a run's data is opened as in training and read to the end; whatever training would refuse is a
problem. Pairs may be in object storage (s3://bucket/prefix). These are checked in addition:

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

A problem does not stop the check of the other files. The exit code is 1 if there is any problem. Pairs are read in
blocks, so memory does not depend on their size. A pair without a manifest.json names neither vocabulary nor
end-of-document id: ids are checked only if you pass --tokenizer or --vocab-size, and the last id of a shards file
counts as the end-of-document id (Megatron's files may have none, so for them only --tokenizer sets it).
"""

import argparse
import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nanochat.cli import Parser, run_main, setup_logging, whole
from nanochat.common import as_path, begin_launch, counted, duration, hash_file, is_remote, local_copy, table
from nanochat.files import walk
from nanochat.run_dir import CHECKPOINT_NAME, cursor_files, find_run, read_cursors
from nanochat.run_reader import RunReader
from nanochat.sources import DATA_MANIFEST, check, read_manifests
from nanochat.tokenizer import EOD_HELP, TOKENIZER_HELP, get_tokenizer
from nanochat.tokens import MANIFEST_NAME, TokenFile, open_tokens, read_manifest, to_offsets

SEAL_NAME = "trainer_state.json"
BLOCK_ENTRIES = 1 << 12
BLOCK_IDS = 1 << 21
TIMED_STEPS = 20  # steps of a receipt after which the remaining time is estimated

Check = Callable[[tqdm], Iterator[str]]  # yields lines to print, and advances a progress bar by the bytes read


class Problem(str):
    """A line that describes a problem."""


# ---- pairs --------------------------------------------------------------------------------------

def length_table(lengths: Counter[int], row: int) -> list[str]:
    """A table of lengths, {ids: entries}, by powers of two; and how many entries are longer than a row of `row` ids."""
    entries, tokens = Counter[int](), Counter[int]()  # by the power of two
    for ids, number in lengths.items():
        power = ids.bit_length() - 1  # -1 for an empty entry
        entries[power] += number
        tokens[power] += ids * number
    num_entries, num_tokens = entries.total(), max(1, tokens.total())
    rows = [("0" if power < 0 else f"{1 << power:,} .. {(2 << power) - 1:,}", number, f"{number / num_entries:.2%}",
             f"{tokens[power] / num_tokens:.2%}") for power, number in sorted(entries.items())]
    longer = {ids: number for ids, number in lengths.items() if ids > row}
    beyond = sum((ids - row) * number for ids, number in longer.items())
    return [*table(("ids", "entries", "of entries", "of tokens"), rows),
            f"longer than T + 1 = {row:,}: {sum(longer.values()) / num_entries:.2%} of entries; {beyond:,} tokens "
            f"({beyond / num_tokens:.2%}) are beyond that length"]


def check_pair(path: Path, args: argparse.Namespace, counts: Counter[str], lengths: Counter[int],
               bar: tqdm) -> Iterator[str]:
    """The problems of one pair, given by its .bin; adds its sizes to `counts` and `lengths`."""
    try:
        pair = open_tokens(path)
        record, manifest = pair.record, pair.manifest
        max_length, eod, vocab_size = 0, args.eod, args.vocab_size
        if record is not None and manifest is not None:
            max_length = manifest["arguments"]["max_length"]
            eod, vocab_size = (manifest["tokenizer"][name] for name in ("eod", "vocab_size"))
        elif eod is None and pair.format == "shards" and pair.num_tokens:
            eod = int(pair.reader.read(pair.num_tokens - 1, pair.num_tokens)[0])
        digest = hashlib.blake2b(digest_size=16)
        for at in range(0, pair.num_tokens, BLOCK_IDS):
            ids = pair.reader.read(at, min(at + BLOCK_IDS, pair.num_tokens))
            digest.update(ids.tobytes())
            bar.update(ids.nbytes)
        contents: dict[str, Any] = {
            "entries": len(pair), "tokens": pair.num_tokens, "bin_bytes": pair.num_bytes,
            "bin_hash": digest.hexdigest(), "idx_hash": hash_file(local_copy(pair.idx_path)), "documents": 0}
        wrong: dict[str, list[Any]] = {}
        try:
            for first in range(0, len(pair), BLOCK_ENTRIES):
                lengths.update(pair.lengths(first, min(first + BLOCK_ENTRIES, len(pair))).tolist())
                contents["documents"] += check_entries(pair, first, max_length, eod, vocab_size, wrong)
        except ValueError as e:
            contents["documents"] = None
            yield str(e).partition("; python -m scripts.verify")[0]
        for sentence, number in wrong.values():
            yield sentence + (f", and {number - 1:,} more" if number > 1 else "")
    except (ValueError, OSError) as e:
        yield str(e)
        return
    counts.update(shards=1, documents=contents["documents"] or 0, entries=len(pair), tokens=pair.num_tokens)
    if record is not None:
        for key, value in contents.items():
            if value not in (None, record[key]):
                yield f"{path}: {key} is {value}, {MANIFEST_NAME} says {record[key]}"
        if sum(record.get("groups") or [len(pair)]) != len(pair):
            yield (f"{path}: the groups in {MANIFEST_NAME} hold {sum(record['groups']):,} entries, "
                   f"the file {len(pair):,}")


def check_entries(pair: TokenFile, first: int, max_length: int, eod: int | None, vocab_size: int | None,
                  wrong: dict[str, list[Any]]) -> int:
    """Check the block of entries that begins at number `first`. Adds problems to `wrong`, {problem: [sentence for its
    first entry, number of entries]}, and returns how many documents end in the block."""
    last = min(first + BLOCK_ENTRIES, len(pair))
    lengths, prefixes = pair.lengths(first, last), pair.prefixes(first, last)

    def report(entries: np.ndarray, problem: str) -> None:
        if entries.any():
            i = int(np.argmax(entries))
            sentence = f"{pair.path}: entry {first + i:,} ({lengths[i]:,} ids) {problem}"
            wrong.setdefault(problem, [sentence, 0])[1] += np.count_nonzero(entries)

    full = lengths > 0
    if pair.format == "shards":  # Megatron's files may have empty documents
        report(~full, "is empty")
    report(full & (prefixes >= lengths), "is not longer than its prefix")
    if first == 0 and prefixes[0] > 0:
        report(np.arange(last) == 0, f"has a prefix of {prefixes[0]:,}, but it is the first entry")
    if max_length:
        report(lengths > max_length + 1, f"is longer than a window of {max_length:,} plus an end-of-document id")
    ids, edges = pair.read_flat(first, last)

    def count(mask: np.ndarray) -> np.ndarray:
        """For each entry, the number of ids for which `mask` is True, (n,)."""
        return np.diff(to_offsets(mask)[edges])

    if vocab_size is not None:
        report(count((ids < 0) | (ids >= vocab_size)) > 0, f"has ids outside the vocabulary of {vocab_size:,}")
    if eod is None:
        return len(lengths)
    is_end = ids == eod
    closed = np.zeros(len(lengths), bool)  # whether the entry ends with the id
    closed[full] = is_end[edges[1:][full] - 1]
    ends = np.ones(len(lengths), bool)  # whether the next entry belongs to another document
    following = pair.prefixes(first + 1, min(last + 1, len(pair)))
    ends[:len(following)] = following == 0
    must_end = ends if pair.ends_follow else np.arange(first, last) == len(pair) - 1
    end = f"the end-of-document id {eod}"
    report(count(is_end) > closed, f"has {end} inside it")
    if pair.ends_follow:
        report(closed & ~ends, f"ends with {end}, but its document continues")
    if pair.ends_follow or pair.format == "shards":
        report(must_end & full & ~closed, f"ends a document without {end}")
    return int((closed & ends).sum())


def check_pairs(folder: Path, paths: Sequence[Path], args: argparse.Namespace, bar: tqdm, *,
                whole: bool) -> Iterator[str]:
    """Verify pairs of one folder, each given by its .bin; `whole`: whether these are all of the folder's pairs."""
    manifest = read_manifest(folder)
    if manifest is not None:
        fingerprint, listed = manifest["tokenizer"]["fingerprint"], manifest["shards"]
        if args.fingerprint not in (None, fingerprint):
            yield Problem(f"{folder / MANIFEST_NAME}: made with tokenizer {fingerprint}, but {args.tokenizer} is "
                          f"{args.fingerprint}")
        yield from (Problem(f"{path}: {MANIFEST_NAME} does not list it") for path in paths if path.stem not in listed)
        on_disk = {path.stem for path in paths} if whole else listed
        yield from (Problem(f"{folder / name}.bin: {MANIFEST_NAME} lists it, but it is missing")
                    for name in listed if name not in on_disk)
    counts, lengths = Counter[str](), Counter[int]()
    for path in paths:
        yield from map(Problem, check_pair(path, args, counts, lengths, bar))
    yield f"{folder}: {', '.join(f'{number:,} {what}' for what, number in counts.items()) or 'nothing could be read'}"
    if lengths:
        yield from (f"  {line}" for line in length_table(lengths, args.sequence_len + 1))
    if manifest is None and args.vocab_size is None:
        yield "  the vocabulary is unknown: pass --tokenizer or --vocab-size to check the ids"


# ---- checkpoints and cursors --------------------------------------------------------------------

def check_checkpoint(path: Path, bar: tqdm) -> Iterator[str]:
    """Verify one checkpoint. It is not a problem if a running process deletes it meanwhile."""
    from nanochat.checkpoint import check_file, open_verified, read_seal  # imports PyTorch

    problems: list[str] = []
    try:
        state = read_seal(path)
        yield f"{path}: step {state['step']:,}, {len(state['files']) + 1} files"
        yield f"  OK {SEAL_NAME}"
        for name, record in state["files"].items():
            try:
                check_file(path, name, record)
                yield f"  OK {name} ({record['bytes']:,} bytes)"
            except (ValueError, OSError) as e:
                problems.append(str(e))
            bar.update(record["bytes"])
        on_disk = {str(p.relative_to(path)) for p in below(path) if not p.is_dir() or p.is_symlink()}
        problems += [f"{path / name}: {SEAL_NAME} does not list it"
                     for name in sorted(on_disk - state["files"].keys() - {SEAL_NAME})]
        if not problems:
            open_verified(path, state)  # raises for parts that do not fit together
    except (ValueError, OSError) as e:
        problems.append(str(e))
    if problems and not path.exists():
        yield f"{path}: the run deleted it in the meantime"
    else:
        yield from map(Problem, problems)


def check_cursors(folder: Path, bar: tqdm) -> Iterator[str]:
    """Read all cursors that a run keeps."""
    files, good = cursor_files(folder.absolute().parents[1]), 0
    for step, file in files.items():
        try:
            bar.update(file.stat().st_size)
            if (actual := read_cursors(file)[0]) != step:
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

def check_data(path: Path, args: argparse.Namespace, bar: tqdm) -> Iterator[str]:
    """Compare the files that a run has pinned in its data_manifest.json with the disk, and read those whose checksums
    are in the manifest.json beside them."""
    manifests = [manifest for buckets in read_manifests(path).values() for manifest in buckets.values()]
    files: dict[Path, dict[str, Any]] = {}  # for each file, its manifest reduced to this file
    for manifest in manifests:
        files |= {as_path(manifest["root"]) / file["name"]: {**manifest, "files": [file]} for file in manifest["files"]}
    folders: dict[Path, list[Path]] = {}
    for file, alone in files.items():
        try:
            check(alone)
            listed = (read_manifest(file.parent) or {"shards": {}})["shards"] if file.suffix == ".bin" else {}
            if file.stem in listed:
                folders.setdefault(file.parent, []).append(file)
        except (ValueError, OSError) as e:
            yield Problem(e)
    for folder, paths in folders.items():
        yield from check_pairs(folder, paths, args, bar, whole=False)
    yield f"{path}: {len(files):,} files compared, {sum(map(len, folders.values())):,} of them read completely"


# ---- receipts -----------------------------------------------------------------------------------

def check_receipt(path: Path, args: argparse.Namespace, _: tqdm) -> Iterator[str]:
    """Recompute the rows of some steps from the data, and compare their digests with those of a receipt."""
    from nanochat.config import Settings  # imports PyTorch
    from scripts.inspect_data import Opened, step_digests
    from scripts.receipt import next_link, open_receipt, read_receipt

    receipt = read_receipt(path)
    marks = {int(step): mark for step, mark in receipt["marks"].items()}
    steps = args.steps or sorted(marks)
    given = Settings(data_path=args.data_path, tokenizer=args.tokenizer, eod_token=args.eod_token)
    opened = Opened(RunReader(path), *open_receipt(path, given, max(steps)))
    yield f"{path}: the files in {args.data_path} are those of {receipt['run']}"
    last = min(step for step in marks if step >= max(steps))
    yield (f"  recomputing steps 0 to {last:,}: rows depend on earlier rows, and step {last:,} is the first "
           f"at or after step {max(steps):,} with a digest in the receipt")
    link, good, began = "", -1, time.monotonic()
    for step, [part] in tqdm(step_digests(opened, range(last + 1), 1), total=last + 1, unit="step",
                             desc="recomputed", leave=False, disable=None):
        digest = f"{part:016x}"
        link = next_link(link, digest)
        if step + 1 == TIMED_STEPS and (rest := (time.monotonic() - began) / TIMED_STEPS * (last - step)) > 5:
            yield f"  this takes about {duration(rest)}"
        if step not in marks:
            continue
        if digest != marks[step]["digest"]:
            raise ValueError(f"{path}: step {step:,} was not trained on these rows: their digest is {digest}, but the "
                             f"receipt says {marks[step]['digest']}; code, tokenizer or data differ")
        if link != marks[step]["chain"]:
            raise ValueError(f"{path}: one of steps {good + 1:,} to {step - 1:,} was not trained on these rows: the "
                             f"chain of their digests differs; code, tokenizer or data differ")
        good = step
    yield (f"  OK steps {', '.join(map(str, steps))}: trained on these rows, and so were all steps from 0 to {good:,} "
           f"(chain of digests {link})")


# ---- the command --------------------------------------------------------------------------------

def find_all(path: Path, args: argparse.Namespace) -> list[Check]:
    """The checks of everything that can be verified at or below a path, or in the run that it names. FileNotFoundError
    or ValueError if there is nothing to verify."""
    if not path.exists():
        if is_remote(path) or len(path.parts) != 1:
            raise FileNotFoundError(f"{path}: no such file or folder; name what to verify")
        path = find_run(path)
    if path.suffix == ".json" and path.is_file() and path.name not in (DATA_MANIFEST, MANIFEST_NAME):
        return [partial(check_receipt, path, args)]
    if path.suffix in (".bin", ".idx") and path.is_file():
        pair = path.with_suffix(".bin")
        return [partial(check_pairs, pair.parent, [pair], args, whole=False)]
    pairs: dict[Path, set[Path]] = {}
    checks: list[Check] = []  # of checkpoints, cursors, row losses, pinned data
    closed: set[Path] = set()  # folders whose .bin files are not pairs: checkpoints, row losses
    entries = sorted(walk(path)) if is_remote(path) or path.is_dir() else []
    for p in [path, *(entry.path for entry in entries if entry.kind != "dangling")]:
        if not closed.isdisjoint(p.parents):
            continue
        if p.suffix in (".bin", ".idx"):
            pairs.setdefault(p.parent, set()).add(p.with_suffix(".bin"))
        elif p.name == MANIFEST_NAME and is_manifest(p):
            pairs.setdefault(p.parent, set())
        elif p.name == DATA_MANIFEST:
            checks.append(partial(check_data, p, args))
        elif p.is_dir() and not is_remote(p):
            parent, name = p.absolute().parts[-2:]
            named, seal = parent == "checkpoints" and CHECKPOINT_NAME.fullmatch(name), p / SEAL_NAME
            if named or seal.is_file():
                closed.add(p)
                if named or b'"format_version"' in seal.read_bytes():  # other programs use the name, too
                    checks.append(partial(check_checkpoint, p))
            elif (parent, name) == ("logs", "cursors"):
                checks.append(partial(check_cursors, p))
            elif (parent, name) == ("logs", "rows"):
                closed.add(p)
                checks.append(partial(check_row_losses, p))
    if not (pairs or checks):
        raise ValueError(f"{path}: found nothing to verify, expected token files, checkpoints or cursors at or "
                         f"below it (text files have no checksums); name another path")
    dangling = [entry.path for entry in entries if entry.kind == "dangling" and "wandb" not in entry.path.parts]
    if dangling:
        checks.append(partial(report_dangling, dangling))
    return [*(partial(check_pairs, folder, sorted(files), args, whole=True)
              for folder, files in sorted(pairs.items())), *checks]


def report_dangling(links: Sequence[Path], _: tqdm) -> Iterator[str]:
    """Report links to files or folders that do not exist."""
    yield from (Problem(f"{link}: a link to {os.readlink(link)}, which does not exist; restore it, or delete the link")
                for link in links)


def below(path: Path) -> Iterable[Path]:
    """Everything below a folder. Unlike rglob, os.walk skips folders that a run deletes in the meantime."""
    if is_remote(path):
        return path.rglob("*")
    return (Path(folder) / name for folder, folders, files in os.walk(path) for name in (*folders, *files))


def is_manifest(path: Path) -> bool:
    """Whether a manifest.json belongs to token files: other programs use the name, too."""
    try:
        return read_manifest(path.parent) is not None
    except ValueError:
        return False


def step_list(text: str) -> list[int]:
    """argparse type: numbers of steps, separated by commas."""
    if not all(word.isdecimal() for word in text.split(",")):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected steps separated by commas, such as 0,1000")
    return [int(word) for word in text.split(",")]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=as_path, metavar="PATH", help="a run, file or folder")
    parser.add_argument("--sequence-len", type=whole(1), default=2048, metavar="T",
                        help="count entries longer than T + 1 ids")
    known = parser.add_mutually_exclusive_group()
    known.add_argument("--tokenizer", metavar="NAME", help=f"the tokenizer that produced the ids: {TOKENIZER_HELP}")
    known.add_argument("--vocab-size", type=int, metavar="N", help="number of ids, for pairs without a manifest.json")
    parser.add_argument("--eod-token", metavar="TOKEN", help=EOD_HELP)
    receipts = parser.add_argument_group("receipts")
    receipts.add_argument("--data-path", metavar="DIR", help="the data to compare a receipt with")
    receipts.add_argument("--steps", type=step_list, metavar="0,1000,41199",
                          help="steps of the run to check (default: all that have a digest in the receipt)")
    begin_launch()
    args = parser.parse_args(argv)
    args.fingerprint = args.eod = None
    if args.tokenizer is not None:
        tokenizer = get_tokenizer(args.tokenizer, eod_token=args.eod_token)
        args.fingerprint, args.eod = tokenizer.fingerprint, tokenizer.get_bos_token_id()
        args.vocab_size = tokenizer.get_vocab_size()
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Verify and print; return 1 if there is a problem. ValueError or OSError if there is nothing to verify."""
    args = parse_args(argv)
    setup_logging()
    num_problems = 0

    def run(check: Check, bar: tqdm) -> Iterator[str]:
        try:
            yield from check(bar)
        except (ValueError, OSError) as e:  # the rest of this check is impossible
            yield Problem(e)

    with tqdm(unit="B", unit_scale=True, desc="verified", disable=None) as bar:
        for check in [check for path in args.paths for check in find_all(path, args)]:
            for line in run(check, bar):
                bar.clear()
                print(f"  PROBLEM {line}" if isinstance(line, Problem) else line, flush=True)
                num_problems += isinstance(line, Problem)
    print(counted(num_problems, "problem") if num_problems else "all good", flush=True)
    return 1 if num_problems else 0


if __name__ == "__main__":
    run_main(main)
