"""
Turn pairs of token files from GPTS into Megatron's format or back:

    python -m scripts.convert_shards IN OUT --to megatron|gpts

Every pair below the folder IN becomes one of the same name below OUT, with the same documents in the same order. Each
manifest.json and the tokenizer come along.

    GPTS        a b c d | c d e f | e f g E        windows of a document, prefixes 0, 2, 2
    Megatron    a b c d e f g E                    one sequence, for Megatron trains on each as on a document

So both formats hold whole documents here: what windows repeat is left out, and sequences of one document are joined.
Whole documents come back byte for byte, as scripts.tok_shards would have written them in that format.

The same command goes on after a crash or Ctrl-C: a pair whose .idx is there, and no older than its source, is kept.
Exit code: 0, or 1 with a sentence where a pair cannot be converted.
"""

import argparse
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from nanochat.common import Parser, hash_file, here, run_main, write_json
from nanochat.dataset import data_folder, find_files
from nanochat.sources import check_format
from nanochat.token_writer import MegatronWriter, ShardWriter
from nanochat.tokens import DTYPES, MANIFEST_NAME, TokenFile, new_manifest, open_tokens, read_manifest

TARGETS = {"megatron": "megatron", "gpts": "shards"}  # --to: the --data-format of what is made
BLOCK_ENTRIES = 1 << 12
TOKENIZER = "tokenizer"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("input", type=Path, metavar="IN", help="folder of pairs; or PREFIX[,PREFIX...]")
    parser.add_argument("output", type=Path, metavar="OUT", help="another folder")
    parser.add_argument("--to", required=True, choices=list(TARGETS), help="the format to make")
    parser.add_argument("--eod", type=int, default=None, metavar="ID", help="what ends documents of GPTS pairs that no "
                        "manifest.json lists (default: the last id of each pair)")
    return parser.parse_args(argv)


def documents(pair: TokenFile, eod: int) -> Iterator[np.ndarray]:
    """The whole documents of a pair, each (n,), with their end-of-document id. ValueError for a prefix that is no
    repetition."""
    parts: list[np.ndarray] = []  # of the document that has not ended
    before = np.zeros(0, pair.dtype)  # the entry before
    for first in range(0, len(pair), BLOCK_ENTRIES):
        last = min(first + BLOCK_ENTRIES, len(pair))
        if pair.format == "megatron":
            yield from pair.read(first, last)
            continue
        prefixes, ends = pair.prefixes(first, last).tolist(), pair.ends_document(first, last, eod).tolist()
        for number, (ids, prefix, is_end) in enumerate(zip(pair.read(first, last), prefixes, ends), first):
            if prefix and not parts and np.array_equal(ids, before[-len(ids):]):
                continue  # gpt-simple may add a window that repeats the end of a document and nothing else
            if prefix and not np.array_equal(ids[:prefix], before[-prefix:]):
                raise ValueError(f"{pair.path}: entry {number:,} has a prefix of {prefix:,} ids that does not repeat "
                                 f"the entry before it, so no document can be made of them")
            parts.append(ids[prefix:])
            before = ids
            if is_end:
                yield np.concatenate(parts)
                parts = []
    if parts:
        yield np.concatenate(parts)


def convert(source: Path, target: Path, *, to: str, eod: int | None) -> None:
    """Make the pair `target` (its .bin) of `source`. ValueError for what the format cannot hold."""
    pair, manifest = open_tokens(source), read_manifest(source.parent)
    wide, vocab_size = pair.dtype.itemsize > 2, None
    if pair.record is not None and manifest is not None:
        eod, vocab_size = manifest["tokenizer"]["eod"], manifest["tokenizer"]["vocab_size"]
    elif eod is None:
        eod = int(pair.reader.read(pair.num_tokens - 1, pair.num_tokens)[0]) if pair.num_tokens else 0
    codes = {"megatron": 4 if wide else 8, "gpts": 4 if wide else 2}
    dtype = DTYPES[TARGETS[to]][codes[to]] if vocab_size is None else None
    writer_of = MegatronWriter if to == "megatron" else ShardWriter
    with writer_of(target.with_suffix(""), vocab_size=vocab_size or 1 << 32, dtype=dtype) as writer:
        waiting: list[np.ndarray] = []

        def write() -> None:
            lengths = [len(ids) for ids in waiting]
            writer.add(np.concatenate(waiting), np.array(lengths), np.zeros(len(waiting), np.uint16))
            waiting.clear()

        for ids in documents(pair, eod):
            waiting.append(ids)
            if len(waiting) == BLOCK_ENTRIES:
                write()
        if waiting:
            write()


def is_finished(source: Path, target: Path) -> bool:
    """Whether a pair was made, after its source was last changed."""
    files = [path.with_suffix(suffix) for path in (source, target) for suffix in (".bin", ".idx")]
    if not (files[2].exists() and files[3].exists()):
        return False
    times = [path.stat().st_mtime_ns for path in files]
    return times[3] >= max(times[:2])


def write_manifest(folder: Path, target: Path, names: Sequence[str], to: str) -> None:
    """The manifest.json of a folder that was made of one that has one."""
    manifest = read_manifest(folder)
    if manifest is None:
        return
    shards: dict[str, Any] = {}
    for name in (n for n in names if n in manifest["shards"]):
        pair, record = open_tokens(target / f"{name}.bin"), dict(manifest["shards"][name])
        if record["entries"] != len(pair):
            record.pop("groups", None)
        shards[name] = {**record, "entries": len(pair), "tokens": pair.num_tokens, "bin_bytes": pair.num_bytes,
                        "bin_hash": hash_file(pair.path), "idx_hash": hash_file(pair.idx_path)}
    made = new_manifest(manifest["tokenizer"], {**manifest["arguments"], "max_length": 0, "overlap_size": 0}, shards,
                        data_format=TARGETS[to])
    write_json(target / MANIFEST_NAME, made, sort_keys=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; 0. ValueError, OSError naming the pair that cannot be."""
    args = parse_args(argv)
    folder, out = data_folder(here(args.input, "IN")), here(args.output, "OUT")
    inside = [path.resolve() for path in (folder, out)]
    if inside[0] in (inside[1], *inside[1].parents) or inside[1] in inside[0].parents:
        raise ValueError(f"OUT {out}: it is IN, or one lies in the other; name another folder")
    source_format = next(name for name in TARGETS.values() if name != TARGETS[args.to])
    files = find_files(args.input, source_format)
    check_format(folder, files, source_format)
    if (folder / TOKENIZER).is_dir():
        shutil.copytree(folder / TOKENIZER, out / TOKENIZER, dirs_exist_ok=True)
    names: dict[Path, list[str]] = {}
    with tqdm(total=sum(f.stat().st_size for f in files), unit="B", unit_scale=True, disable=None) as bar:
        for source in files:
            target = out / source.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            if not is_finished(source, target):
                (target.parent / MANIFEST_NAME).unlink(missing_ok=True)
                convert(source, target, to=args.to, eod=args.eod)
            names.setdefault(source.parent, []).append(source.stem)
            bar.update(source.stat().st_size)
    for source_folder, made in names.items():
        write_manifest(source_folder, out / source_folder.relative_to(folder), made, args.to)
    print(f"{out}: {len(files):,} pairs of --data-format {TARGETS[args.to]}")
    return 0


if __name__ == "__main__":
    run_main(main)
