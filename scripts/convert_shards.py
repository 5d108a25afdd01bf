"""
Convert token shards between two formats: GPTS, the default of scripts.tok_shards, and Megatron's. nanoGPT's and
llm.c's .bin files, which have no .idx, become either.

    python -m scripts.convert_shards shards pairs --to=megatron      # and back with --to=gpts
    python -m scripts.convert_shards nanogpt/data/openwebtext shards --to=gpts --eod=50256       # train.bin, val.bin

Every pair below the folder IN becomes one of the same name below OUT, with the same documents in the same order. The
tokenizer and each manifest.json come along.

    GPTS        a b c d | c d e f | e f g E        windows of a document, prefixes 0, 2, 2
    Megatron    a b c d e f g E                    one sequence: Megatron trains on each as it is

The output holds whole documents in either format: ids that windows repeat are dropped, and a document's sequences are
joined. GPTS cannot hold empty documents, so these are left out and counted. The pairs are byte for byte those that
scripts.tok_shards writes for whole documents in that format.

    nanoGPT     a b E c d E                        uint16, nothing else; E after each document; --eod says which id
    llm.c       header E a b E c d                 256 int32, then uint16 (GPT-2) or uint32 (Llama 3); E before each

Both are cut at E, the end-of-document id, and each document gets E at its end. A file whose name has the word val goes
below OUT/val, and then the others go below OUT/train. A document that llm.c split over two files becomes two.

The same command resumes after a crash or Ctrl-C: a pair is kept if its .idx is not older than its source. Exit code: 0,
or 1 with an error if a pair cannot be converted.
"""

import argparse
import itertools
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nanochat.cli import Parser, run_main
from nanochat.common import as_local_path, counted, hash_file, write_json
from nanochat.files import check_format, data_folder, find_files
from nanochat.pretokenize import WRITERS
from nanochat.tokens import DTYPES, MANIFEST_NAME, TokenFile, new_manifest, open_tokens, read_manifest

TARGETS = {"megatron": "megatron", "gpts": "shards"}  # --to: the --data-format of OUT
BLOCK_ENTRIES = 1 << 12
TOKENIZER = "tokenizer"
HEADER_INTS = 256  # int32 in the header of llm.c's files
LLM_C = {20240520: (1, "<u2", 50256), 20240801: (7, "<u4", 128000)}  # {magic: (version, type of ids, E)}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("input", type=Path, metavar="IN",
                        help="folder of pairs, or PREFIX[,PREFIX...]; or nanoGPT's or llm.c's .bin, or their folder")
    parser.add_argument("output", type=Path, metavar="OUT", help="folder to write, not IN")
    parser.add_argument("--to", required=True, choices=list(TARGETS), help="format of OUT")
    parser.add_argument("--eod", type=int, metavar="ID",
                        help="end-of-document id of GPTS pairs that no manifest.json lists (default: the last id of "
                             "each pair), and of nanoGPT's files (50256 for GPT-2)")
    return parser.parse_args(argv)


def documents(pair: TokenFile, eod: int) -> Iterator[np.ndarray]:
    """The whole documents of a pair, each (n,), with their end-of-document id. ValueError for a prefix that differs
    from the end of the previous entry."""
    parts: list[np.ndarray] = []  # of the current document
    before = np.zeros(0, pair.dtype)  # the previous entry
    for first in range(0, len(pair), BLOCK_ENTRIES):
        last = min(first + BLOCK_ENTRIES, len(pair))
        if pair.format == "megatron":
            yield from pair.read(first, last)
            continue
        prefixes = pair.prefixes(first, last).tolist()
        ends = pair.ends_document(first, last, eod).tolist()
        for number, ids in enumerate(pair.read(first, last)):
            prefix = prefixes[number]
            if prefix and not parts and np.array_equal(ids, before[-len(ids):]):
                continue  # gpt-simple may add a window that only repeats the end of a document
            if prefix and not np.array_equal(ids[:prefix], before[-prefix:]):
                raise ValueError(f"{pair.path}: entry {first + number:,} has a prefix of {prefix:,} ids that differs "
                                 f"from the end of the previous entry, so they cannot be joined; regenerate the pair")
            parts.append(ids[prefix:])
            before = ids
            if ends[number]:
                yield np.concatenate(parts)
                parts = []
    if parts:
        yield np.concatenate(parts)


def convert(source: Path, target: Path, *, to: str, eod: int | None) -> int:
    """Convert the pair `source` to `target` (paths of the .bin). Returns how many empty documents were left out.
    ValueError if the format cannot hold its documents."""
    pair = open_tokens(source)
    if pair.record is not None and pair.manifest is not None:
        eod, vocab_size, dtype = pair.manifest["tokenizer"]["eod"], pair.manifest["tokenizer"]["vocab_size"], None
    else:  # keep the width of the ids
        vocab_size, dtype = 1 << 32, wide_or_narrow(to, pair.dtype)
        if eod is None:
            eod = int(pair.reader.read(max(0, pair.num_tokens - 1), pair.num_tokens).sum())  # the last id, 0 if none
    return write(documents(pair, eod), target, to=to, vocab_size=vocab_size, dtype=dtype)


def wide_or_narrow(to: str, dtype: np.dtype) -> Any:
    """The type of ids in the output: two bytes if they were at most that wide, else four."""
    return DTYPES[TARGETS[to]][4] if dtype.itemsize > 2 else np.uint16


def write(entries: Iterator[np.ndarray], target: Path, *, to: str, vocab_size: int, dtype: Any) -> int:
    """Write documents, each (n,), as the pair `target`. Returns how many empty ones GPTS could not hold."""
    empty = 0
    with WRITERS[TARGETS[to]](target.with_suffix(""), vocab_size=vocab_size, dtype=dtype) as writer:
        while block := list(itertools.islice(entries, BLOCK_ENTRIES)):
            kept = [ids for ids in block if len(ids) or to != "gpts"]
            empty += len(block) - len(kept)
            lengths = np.array([len(ids) for ids in kept], np.int64)
            ids = np.concatenate([block[0][:0], *kept])
            writer.add(ids, lengths, np.zeros(len(kept), np.uint16))
    return empty


# ---- files without an index ----------------------------------------------------------------------

def plain_files(path: Path) -> list[Path]:
    """The .bin files of nanoGPT or llm.c at a path, in order: a file, or those below a folder of which none has an
    .idx. [] for pairs."""
    files = [path] if path.is_file() and path.suffix == ".bin" else sorted(path.rglob("*.bin"))
    return [] if any(file.with_suffix(".idx").exists() for file in files) else files


def open_plain(path: Path, eod: int | None) -> tuple[np.ndarray, int]:
    """(ids, end-of-document id) of a file without an index; the ids are memory-mapped. ValueError for a file that is
    neither nanoGPT's nor llm.c's."""
    size, at = path.stat().st_size, 0
    header = np.fromfile(path, "<i4", HEADER_INTS)
    dtype, usual = "<u2", None
    if len(header) and header[0] in LLM_C:
        version, dtype, usual = LLM_C[int(header[0])]
        at = 4 * HEADER_INTS
        expected = at + int(header[2]) * np.dtype(dtype).itemsize if len(header) == HEADER_INTS else at
        if size != expected or header[1] != version:
            raise ValueError(f"{path}: its header names version {header[1:2].sum()} and {expected:,} bytes, but the "
                             f"file has {size:,}; expected version {version} and equal sizes: copy it again")
    if size == at or size % 2:
        raise ValueError(f"{path}: {size:,} bytes, expected ids of two bytes, or a file of llm.c; if it belongs to a "
                         f"pair, put its .idx beside it")
    if (end := usual if eod is None else eod) is None:
        raise ValueError(f"{path}: a file without a header does not name the id that ends documents; pass --eod=ID "
                         f"(50256 for GPT-2)")
    if not 0 <= end <= np.iinfo(dtype).max:
        raise ValueError(f"--eod: got {end:,}, expected 0 to {np.iinfo(dtype).max:,}, the ids that {path} can hold")
    return np.memmap(path, dtype, "r", offset=at), end


def plain_documents(ids: np.ndarray, eod: int) -> Iterator[np.ndarray]:
    """The documents between the places of `eod` in ids (n,), each with `eod` at its end."""
    begin, end = 0, np.array([eod], ids.dtype)
    for at in itertools.chain(np.flatnonzero(ids == eod).tolist(), [len(ids)]):
        if at > begin:
            yield np.concatenate((ids[begin:at], end))
        begin = at + 1


def convert_plain(files: Sequence[Path], folder: Path, out: Path, *, to: str, eod: int | None) -> None:
    """Convert nanoGPT's or llm.c's files below `folder` to pairs below `out`. ValueError for another kind of file."""
    splits = [split_of(file) for file in files]
    for file, split in zip(tqdm(files, unit=" files", disable=None), splits):
        ids, end = open_plain(file, eod)
        below = out / split if "val" in splits else out
        target = below / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        write(plain_documents(ids, end), target, to=to, vocab_size=1 << 32, dtype=wide_or_narrow(to, ids.dtype))


def split_of(file: Path) -> str:
    """The split that a file's name states: val, test, or else train."""
    words = re.split("[^a-z]+", file.stem.lower())
    names = {"val": "val", "valid": "val", "validation": "val", "test": "test"}
    return next((names[word] for word in words if word in names), "train")


# ---- manifests and the command -------------------------------------------------------------------

def write_manifest(folder: Path, target: Path, names: Sequence[str], to: str) -> None:
    """Write the manifest.json of a converted folder, if the source has one."""
    manifest = read_manifest(folder)
    if manifest is None:
        return
    shards: dict[str, Any] = {}
    for name in manifest["shards"].keys() & names:
        pair, record = open_tokens(target / f"{name}.bin"), dict(manifest["shards"][name])
        if record["entries"] != len(pair):
            record.pop("groups", None)
        shards[name] = {**record, "entries": len(pair), "tokens": pair.num_tokens,
                        "bin_bytes": pair.num_bytes, "bin_hash": hash_file(pair.path),
                        "idx_hash": hash_file(pair.idx_path)}
    arguments = {**manifest["arguments"], "max_length": 0, "overlap_size": 0}
    new = new_manifest(manifest["tokenizer"], arguments, shards, data_format=TARGETS[to])
    write_json(target / MANIFEST_NAME, new, sort_keys=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Convert all pairs. ValueError or OSError names a pair that cannot be converted."""
    args = parse_args(argv)
    plain, out = plain_files(as_local_path(args.input, "IN")), as_local_path(args.output, "OUT")
    folder = data_folder(as_local_path(args.input, "IN"))
    real_in, real_out = folder.resolve(), out.resolve()
    if real_in == real_out or real_in in real_out.parents or real_out in real_in.parents:
        raise ValueError(f"OUT {out}: it must not be IN, or inside it, or contain it; name another folder")
    if plain:
        convert_plain(plain, folder, out, to=args.to, eod=args.eod)
        print(f"{out}: {counted(len(plain), 'pair')} of --data-format {TARGETS[args.to]}, from files without an index")
        return 0
    [source_format] = {*TARGETS.values()} - {TARGETS[args.to]}
    files = find_files(args.input, source_format)
    check_format(folder, files, source_format)
    if (folder / TOKENIZER).is_dir():
        shutil.copytree(folder / TOKENIZER, out / TOKENIZER, dirs_exist_ok=True)
    names: dict[Path, list[str]] = {}
    empty = 0
    for source in tqdm(files, unit=" pairs", disable=None):
        target = out / source.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        index = target.with_suffix(".idx")
        newest = max(path.stat().st_mtime_ns for path in (source, source.with_suffix(".idx")))
        if not target.exists() or not index.exists() or index.stat().st_mtime_ns < newest:
            (target.parent / MANIFEST_NAME).unlink(missing_ok=True)
            empty += convert(source, target, to=args.to, eod=args.eod)
        names.setdefault(source.parent, []).append(source.stem)
    for source_folder, of_folder in names.items():
        write_manifest(source_folder, out / source_folder.relative_to(folder), of_folder, args.to)
    print(f"{out}: {len(files):,} pairs of --data-format {TARGETS[args.to]}"
          + (f"; {counted(empty, 'empty document')} left out, which GPTS cannot hold" if empty else ""))
    return 0


if __name__ == "__main__":
    run_main(main)
