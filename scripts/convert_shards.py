"""Convert token shards between two formats: GPTS, the default of scripts.tok_shards, and
Megatron's. nanoGPT's and llm.c's .bin files, which have no .idx, become either.

    python -m scripts.convert_shards shards pairs --to=megatron      # and back with --to=gpts
    python -m scripts.convert_shards nanogpt/data/openwebtext shards --to=gpts --eod=50256       # train.bin, val.bin

Every pair below the folder IN becomes one of the same name below OUT, with the same documents in
the same order. The tokenizer and each manifest.json come along.

    GPTS        a b c d | c d e f | e f g E        windows of a document, prefixes 0, 2, 2
    Megatron    a b c d e f g E                    one sequence: Megatron trains on each as it is

The output holds whole documents in either format: ids that windows repeat are dropped, and a
document's sequences are joined. GPTS cannot hold empty documents, so these are left out and
counted. The pairs are byte for byte those that scripts.tok_shards writes for whole documents in
that format. In GPTS, each document ends with E, the end-of-document id: Megatron's files without it
need --eod, which adds it.

    nanoGPT     a b E c d E                        uint16, nothing else; E after each document; --eod says which id
    llm.c       header E a b E c d                 256 int32, then uint16 (GPT-2) or uint32 (Llama 3); E before each

Both are cut at E, and each document gets E at its end. If the names of some files have the word val,
these go below OUT/val, and the others below OUT/train. A document that llm.c split over two files
becomes two.

The same command resumes after a crash or Ctrl-C: a pair is kept if its .idx is not older than its
source, and it ends with the --eod given. Exit code: 0, or 1 with an error if a pair cannot be converted.
"""

import argparse
import itertools
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike
from tqdm import tqdm

from nanochat.cli import Parser, run_main
from nanochat.common import as_local_path, counted, hash_file, write_json
from nanochat.files import MANIFEST_NAME, check_format, data_at, find_files
from nanochat.pretokenize import WRITERS
from nanochat.tokens import (
    DTYPES,
    TokenFile,
    new_manifest,
    open_tokens,
    read_manifest,
)

TARGETS = {"megatron": "megatron", "gpts": "shards"}  # --to: the --data-format of OUT
BLOCK_ENTRIES = 1 << 12
TOKENIZER = "tokenizer"
HEADER_INTS = 256  # int32 in the header of llm.c's files
# {magic: (version, type of ids, E)}
LLM_C = {20240520: (1, "<u2", 50256), 20240801: (7, "<u4", 128000)}
# {word in a file's name: split}
SPLITS = {"val": "val", "valid": "val", "validation": "val", "test": "test"}
UNKNOWN_VOCAB = 1 << 32  # of pairs whose ids may be anything that fits into them


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "input",
        type=Path,
        metavar="IN",
        help="folder of pairs, or PREFIX[,PREFIX...]; or nanoGPT's or llm.c's .bin, or their folder",
    )
    parser.add_argument("output", type=Path, metavar="OUT", help="folder to write, not IN")
    parser.add_argument("--to", required=True, choices=list(TARGETS), help="format of OUT")
    parser.add_argument(
        "--eod",
        type=int,
        metavar="ID",
        help="end-of-document id of pairs that no manifest.json lists (default: the last id of each "
        "pair, if it ends all documents), and of nanoGPT's files (50256 for GPT-2)",
    )
    return parser.parse_args(argv)


def check_prefix(
    pair: TokenFile, number: int, ids: np.ndarray, prefix: int, before: np.ndarray
) -> None:
    """ValueError unless the first `prefix` ids of entry `number` are the last ones of `before`, the
    previous entry."""
    repeated = ids[:prefix]
    if not np.array_equal(repeated, before[-prefix:]):
        raise ValueError(
            f"{pair.path}: entry {number:,} has a prefix of {prefix:,} ids that differs "
            f"from the end of the previous entry, so they cannot be joined; regenerate the pair"
        )


def documents(pair: TokenFile, eod: int) -> Iterator[np.ndarray]:
    """The whole documents of a pair, each (n,), with their end-of-document id. ValueError for a
    prefix that differs from the end of the previous entry."""
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
            # gpt-simple may add a window that only repeats the end of a document
            if prefix and not parts and np.array_equal(ids, before[-len(ids) :]):
                continue
            if prefix:
                check_prefix(pair, first + number, ids, prefix, before)
            parts.append(ids[prefix:])
            before = ids
            if ends[number]:
                yield np.concatenate(parts)
                parts = []
    if parts:
        yield np.concatenate(parts)


def last_id(pair: TokenFile) -> int:
    """The last id of a pair, 0 if it has none."""
    end = pair.num_tokens
    ids = pair.reader.read(max(0, end - 1), end)
    return int(ids.sum())


def ends_any(pair: TokenFile, eod: int) -> bool:
    """Whether any entry of a pair ends with an id."""
    for first in range(0, len(pair), BLOCK_ENTRIES):
        last = min(first + BLOCK_ENTRIES, len(pair))
        if any(len(ids) and ids[-1] == eod for ids in pair.read(first, last)):
            return True
    return False


def find_eod(pair: TokenFile) -> int:
    """The last id of a pair. ValueError if it does not end documents: if it is inside an entry, or
    at the end of some of Megatron's documents alone."""
    eod = last_id(pair)
    for first in range(0, len(pair), BLOCK_ENTRIES):
        last = min(first + BLOCK_ENTRIES, len(pair))
        for number, ids in enumerate(pair.read(first, last), first):
            inside = eod in ids[:-1]
            missing = pair.format == "megatron" and len(ids) and ids[-1] != eod
            if inside or missing:
                raise ValueError(
                    f"{pair.path}: no manifest.json names its end-of-document id, and its last id, {eod}, is "
                    f"none: see entry {number:,}; pass --eod=ID (for --to=gpts, documents without it get it)"
                )
    return eod


def check_eod(eod: int, dtype: DTypeLike, path: Path) -> None:
    """ValueError unless ids of a type can be this end-of-document id."""
    highest = np.iinfo(dtype).max
    if not 0 <= eod <= highest:
        raise ValueError(
            f"--eod: got {eod:,}, expected 0 to {highest:,}, the ids that {path} can hold"
        )


def with_end(entries: Iterator[np.ndarray], eod: int) -> Iterator[np.ndarray]:
    """Documents, each (n,), with the end-of-document id at the end of those that are not empty."""
    for ids in entries:
        is_ended = len(ids) == 0 or ids[-1] == eod
        yield ids if is_ended else np.append(ids, ids.dtype.type(eod))


def convert(source: Path, target: Path, *, to: str, eod: int | None) -> int:
    """Convert the pair `source` to `target` (paths of the .bin). Returns how many empty documents
    were left out. ValueError if the format cannot hold its documents."""
    pair = open_tokens(source)
    if pair.record is not None and pair.manifest is not None:
        tokenizer = pair.manifest["tokenizer"]
        if eod not in (None, tokenizer["eod"]):
            raise ValueError(
                f"--eod: got {eod}, but {source.parent / MANIFEST_NAME} says {tokenizer['eod']}; leave --eod out"
            )
        eod = tokenizer["eod"]
        vocab_size = tokenizer["vocab_size"]
        dtype = None
    else:  # keep the width of the ids
        vocab_size = UNKNOWN_VOCAB
        dtype = wide_or_narrow(to, pair.dtype)
        if eod is None:
            eod = find_eod(pair)
        check_eod(eod, pair.dtype, source)
        if pair.format == "shards" and pair.num_tokens and not ends_any(pair, eod):
            raise ValueError(
                f"--eod: got {eod}, but no entry of {source} ends with it (the last one ends with {last_id(pair)}), so "
                f"all would become one document; pass the id that ends documents"
            )
    entries = documents(pair, eod)
    if to == "gpts":
        entries = with_end(entries, eod)
    return write(entries, target, to=to, vocab_size=vocab_size, dtype=dtype)


def wide_or_narrow(to: str, dtype: np.dtype) -> DTypeLike:
    """The type of ids in the output: two bytes if they were at most that wide, else four."""
    if dtype.itemsize <= 2:
        return np.uint16
    return DTYPES[TARGETS[to]][4]


def write(
    entries: Iterator[np.ndarray],
    target: Path,
    *,
    to: str,
    vocab_size: int,
    dtype: DTypeLike | None,
) -> int:
    """Write documents, each (n,), as the pair `target`. Returns how many empty ones GPTS could not
    hold."""
    num_empty = 0
    open_writer = WRITERS[TARGETS[to]]
    prefix = target.with_suffix("")
    with open_writer(prefix, vocab_size=vocab_size, dtype=dtype) as writer:
        while block := list(itertools.islice(entries, BLOCK_ENTRIES)):
            kept = block
            if to == "gpts":
                kept = [ids for ids in block if len(ids)]
            num_empty += len(block) - len(kept)
            nothing = block[0][:0]  # has the type of the ids, even if no document is kept
            ids = np.concatenate([nothing, *kept])
            lengths = np.array([len(document) for document in kept], np.int64)
            prefixes = np.zeros(len(kept), np.uint16)
            writer.add(ids, lengths, prefixes)
    return num_empty


# ---- files without an index ----------------------------------------------------------------------


def plain_files(path: Path) -> list[Path]:
    """The .bin files of nanoGPT or llm.c at a path, in order: a file, or those below a folder of
    which none has an .idx. [] for pairs."""
    if path.is_file() and path.suffix == ".bin":
        files = [path]
    else:
        files = sorted(path.rglob("*.bin"))
    are_pairs = any(file.with_suffix(".idx").exists() for file in files)
    return [] if are_pairs else files


class Layout(NamedTuple):
    """How a file without an index stores its ids."""

    dtype: str  # of an id
    begin: int  # bytes in front of the first id
    eod: int | None  # the usual end-of-document id; None if the format has none


def read_layout(path: Path, size: int) -> Layout:
    """The layout of a file of `size` bytes. ValueError for a file that is neither nanoGPT's nor
    llm.c's."""
    layout = Layout("<u2", 0, None)  # nanoGPT's
    header = np.fromfile(path, "<i4", HEADER_INTS)
    if len(header) and header[0] in LLM_C:
        version, dtype, eod = LLM_C[int(header[0])]
        layout = Layout(dtype, 4 * HEADER_INTS, eod)
        expected = layout.begin
        if len(header) == HEADER_INTS:
            num_ids = int(header[2])
            expected += num_ids * np.dtype(dtype).itemsize
        if size != expected or header[1] != version:
            raise ValueError(
                f"{path}: its header names version {header[1:2].sum()} and {expected:,} bytes, but the "
                f"file has {size:,}; expected version {version} and equal sizes: copy it again"
            )
    elif len(header) == HEADER_INTS:
        # the number of ids behind another header, in either order of bytes
        counts = (int(header[2]), int(header[2:3].byteswap()[0]))
        is_other = size - 4 * HEADER_INTS in [width * n for width in (2, 4) for n in counts if n]
        # the lower and the upper halves of ids of four bytes
        lower, upper = header.view("<u2").reshape(-1, 2).T
        is_wide = upper.max() < 4 and lower.max() >= 256
        if is_other or is_wide:
            what = f"a header like llm.c's, with {header[0]}" if is_other else "ids of four bytes"
            raise ValueError(
                f"{path}: {what}; expected nanoGPT's ids of two bytes, or llm.c's header with "
                f"{' or '.join(map(str, LLM_C))}, little-endian"
            )
    if size == layout.begin or size % 2:
        raise ValueError(
            f"{path}: {size:,} bytes, expected ids of two bytes, or a file of llm.c; if it belongs to a "
            f"pair, put its .idx beside it"
        )
    return layout


def open_plain(path: Path, eod: int | None) -> tuple[np.ndarray, int]:
    """(ids, end-of-document id) of a file without an index; the ids are memory-mapped. ValueError
    for a file that is neither nanoGPT's nor llm.c's."""
    layout = read_layout(path, path.stat().st_size)
    if eod is None:
        eod = layout.eod
    if eod is None:
        raise ValueError(
            f"{path}: a file without a header does not name the id that ends documents; pass --eod=ID "
            f"(50256 for GPT-2)"
        )
    check_eod(eod, layout.dtype, path)
    ids = np.memmap(path, layout.dtype, "r", offset=layout.begin)
    return ids, eod


def plain_documents(ids: np.ndarray, eod: int) -> Iterator[np.ndarray]:
    """The documents between the places of `eod` in ids (n,), each with `eod` at its end."""
    end = np.array([eod], ids.dtype)
    places = np.flatnonzero(ids == eod).tolist()
    begin = 0
    for place in [*places, len(ids)]:
        if place > begin:
            yield np.concatenate((ids[begin:place], end))
        begin = place + 1


def convert_plain(
    files: Sequence[Path], folder: Path, out: Path, *, to: str, eod: int | None
) -> int:
    """Convert nanoGPT's or llm.c's files below `folder` to pairs below `out`. Returns the number of
    documents. ValueError for another kind of file."""
    num_documents = 0
    splits = {file: split_of(file) for file in files}
    has_val = "val" in splits.values()
    for file in tqdm(files, unit=" files", disable=None):
        ids, end = open_plain(file, eod)
        below = out / splits[file] if has_val else out
        target = below / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        entries = plain_documents(ids, end)
        dtype = wide_or_narrow(to, ids.dtype)
        write(entries, target, to=to, vocab_size=UNKNOWN_VOCAB, dtype=dtype)
        num_documents += len(TokenFile(target))
    return num_documents


def split_of(file: Path) -> str:
    """The split that a file's name states: val, test, or else train."""
    for word in re.split("[^a-z]+", file.stem.lower()):
        if word in SPLITS:
            return SPLITS[word]
    return "train"


# ---- manifests and the command -------------------------------------------------------------------


def write_manifest(folder: Path, target: Path, names: Sequence[str], to: str) -> None:
    """Write the manifest.json of a converted folder, if the source has one."""
    manifest = read_manifest(folder)
    if manifest is None:
        return
    shards: dict[str, Any] = {}
    for name in manifest["shards"].keys() & names:
        pair = open_tokens(target / f"{name}.bin")
        record = dict(manifest["shards"][name])
        if record["entries"] != len(pair):
            record.pop("groups", None)
        record["entries"] = len(pair)
        record["tokens"] = pair.num_tokens
        record["bin_bytes"] = pair.num_bytes
        record["bin_hash"] = hash_file(target / f"{name}.bin")
        record["idx_hash"] = hash_file(target / f"{name}.idx")
        shards[name] = record
    arguments = {**manifest["arguments"], "max_length": 0, "overlap_size": 0}
    new = new_manifest(manifest["tokenizer"], arguments, shards, data_format=TARGETS[to])
    write_json(target / MANIFEST_NAME, new, sort_keys=True)


def is_converted(source: Path, target: Path, eod: int | None) -> bool:
    """Whether a pair was converted after its source was written (paths of the .bin), with this
    end-of-document id if one is given."""
    source_index = source.with_suffix(".idx")
    newest = max(source.stat().st_mtime_ns, source_index.stat().st_mtime_ns)
    index = target.with_suffix(".idx")
    if not target.exists() or not index.exists():
        return False
    if index.stat().st_mtime_ns < newest:
        return False
    return eod is None or last_id(open_tokens(target)) == eod


def check_apart(folder: Path, out: Path) -> None:
    """ValueError unless IN and OUT are separate folders."""
    real_in, real_out = folder.resolve(), out.resolve()
    below_in = real_in in (real_out, *real_out.parents)
    above_in = real_out in real_in.parents
    if below_in or above_in:
        raise ValueError(
            f"OUT {out}: it must not be IN, or inside it, or contain it; name another folder"
        )


def convert_pairs(
    files: Sequence[Path], folder: Path, out: Path, *, to: str, eod: int | None
) -> int:
    """Convert pairs below `folder` to pairs below `out`, with tokenizer and manifests. Returns how
    many empty documents were left out. ValueError or OSError names a pair that cannot be
    converted."""
    if (folder / TOKENIZER).is_dir():
        shutil.copytree(folder / TOKENIZER, out / TOKENIZER, dirs_exist_ok=True)
    names: dict[Path, list[str]] = {}
    num_empty = 0
    for source in tqdm(files, unit=" pairs", disable=None):
        target = out / source.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not is_converted(source, target, eod):
            (target.parent / MANIFEST_NAME).unlink(missing_ok=True)
            num_empty += convert(source, target, to=to, eod=eod)
        names.setdefault(source.parent, []).append(source.stem)
    for source_folder, of_folder in names.items():
        target_folder = out / source_folder.relative_to(folder)
        write_manifest(source_folder, target_folder, of_folder, to)
    return num_empty


def main(argv: Sequence[str] | None = None) -> int:
    """Convert all pairs. ValueError or OSError names a pair that cannot be converted."""
    args = parse_args(argv)
    path = as_local_path(args.input, "IN")
    plain = plain_files(path)
    out = as_local_path(args.output, "OUT")
    folder = as_local_path(data_at(path).folder, "IN")
    check_apart(folder, out)
    target_format = TARGETS[args.to]
    if plain:
        num_documents = convert_plain(plain, folder, out, to=args.to, eod=args.eod)
        print(
            f"{out}: {counted(len(plain), 'pair')} of --data-format {target_format}, "
            f"{counted(num_documents, 'document')}, from files without an index"
        )
        return 0
    [source_format] = {*TARGETS.values()} - {target_format}
    files = [Path(file) for file in find_files(args.input, source_format)]
    check_format(folder, files, source_format)
    num_empty = convert_pairs(files, folder, out, to=args.to, eod=args.eod)
    line = f"{out}: {len(files):,} pairs of --data-format {target_format}"
    if num_empty:
        line += f"; {counted(num_empty, 'empty document')} left out, which GPTS cannot hold"
    print(line)
    return 0


if __name__ == "__main__":
    run_main(main)
