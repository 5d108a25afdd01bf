"""
Convert token shards between two formats: GPTS, the default of scripts.tok_shards, and Megatron's.

    python -m scripts.convert_shards shards pairs --to=megatron      # and back with --to=gpts

Every pair below the folder IN becomes one of the same name below OUT, with the same documents in the same order. The
tokenizer and each manifest.json come along.

    GPTS        a b c d | c d e f | e f g E        windows of a document, prefixes 0, 2, 2
    Megatron    a b c d e f g E                    one sequence: Megatron trains on each as it is

The output holds whole documents in either format: ids that windows repeat are dropped, and a document's sequences are
joined. The pairs are byte for byte those that scripts.tok_shards writes for whole documents in that format.

The same command resumes after a crash or Ctrl-C: a pair is kept if its .idx is not older than its source. Exit code: 0,
or 1 with an error if a pair cannot be converted.
"""

import argparse
import itertools
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nanochat.cli import Parser, run_main
from nanochat.common import as_local_path, hash_file, write_json
from nanochat.dataset import data_folder, find_files
from nanochat.pretokenize import WRITERS
from nanochat.tokens import DTYPES, MANIFEST_NAME, TokenFile, check_format, new_manifest, open_tokens, read_manifest

TARGETS = {"megatron": "megatron", "gpts": "shards"}  # --to: the --data-format of OUT
BLOCK_ENTRIES = 1 << 12
TOKENIZER = "tokenizer"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("input", type=Path, metavar="IN", help="folder of pairs; or PREFIX[,PREFIX...]")
    parser.add_argument("output", type=Path, metavar="OUT", help="folder to write, not IN")
    parser.add_argument("--to", required=True, choices=list(TARGETS), help="format of OUT")
    parser.add_argument("--eod", type=int, metavar="ID",
                        help="end-of-document id of GPTS pairs that no manifest.json lists (default: the last id of "
                             "each pair)")
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


def convert(source: Path, target: Path, *, to: str, eod: int | None) -> None:
    """Convert the pair `source` to `target` (paths of the .bin). ValueError if the format cannot hold its documents."""
    pair = open_tokens(source)
    if pair.record is not None and pair.manifest is not None:
        eod, vocab_size, dtype = pair.manifest["tokenizer"]["eod"], pair.manifest["tokenizer"]["vocab_size"], None
    else:  # keep the width of the ids
        vocab_size, dtype = 1 << 32, DTYPES[TARGETS[to]][4] if pair.dtype.itemsize > 2 else np.uint16
        if eod is None:
            eod = int(pair.reader.read(max(0, pair.num_tokens - 1), pair.num_tokens).sum())  # the last id, 0 if none
    entries = documents(pair, eod)
    with WRITERS[TARGETS[to]](target.with_suffix(""), vocab_size=vocab_size, dtype=dtype) as writer:
        while block := list(itertools.islice(entries, BLOCK_ENTRIES)):
            lengths = np.array([len(ids) for ids in block])
            writer.add(np.concatenate(block), lengths, np.zeros(len(block), np.uint16))


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
    folder, out = data_folder(as_local_path(args.input, "IN")), as_local_path(args.output, "OUT")
    real_in, real_out = folder.resolve(), out.resolve()
    if real_in == real_out or real_in in real_out.parents or real_out in real_in.parents:
        raise ValueError(f"OUT {out}: it must not be IN, or inside it, or contain it; name another folder")
    [source_format] = {*TARGETS.values()} - {TARGETS[args.to]}
    files = find_files(args.input, source_format)
    check_format(folder, files, source_format)
    if (folder / TOKENIZER).is_dir():
        shutil.copytree(folder / TOKENIZER, out / TOKENIZER, dirs_exist_ok=True)
    names: dict[Path, list[str]] = {}
    for source in tqdm(files, unit=" pairs", disable=None):
        target = out / source.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        index = target.with_suffix(".idx")
        newest = max(path.stat().st_mtime_ns for path in (source, source.with_suffix(".idx")))
        if not target.exists() or not index.exists() or index.stat().st_mtime_ns < newest:
            (target.parent / MANIFEST_NAME).unlink(missing_ok=True)
            convert(source, target, to=args.to, eod=args.eod)
        names.setdefault(source.parent, []).append(source.stem)
    for source_folder, of_folder in names.items():
        write_manifest(source_folder, out / source_folder.relative_to(folder), of_folder, args.to)
    print(f"{out}: {len(files):,} pairs of --data-format {TARGETS[args.to]}")
    return 0


if __name__ == "__main__":
    run_main(main)
