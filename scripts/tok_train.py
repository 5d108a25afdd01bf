"""
Train a BPE tokenizer on the training split.

    python -m scripts.tok_train --data-path=mytext --vocab-size=4096
    python -m scripts.tok_train --data-path=my.jsonl.gz --val-path=held_out.jsonl --output-dir=DIR
    python -m scripts.tok_train                  # nanochat's defaults: 2 B characters, 32,768 tokens

    all files but the last -> their documents in order -> up to MAX_CHARS characters in total -> rustbpe

If the data has more than MAX_CHARS characters, only the first DOC_CAP of each document are read, so
that there are more documents among them. Smaller data is read completely.

Files are read in the order of their relative paths, so the same files and arguments give the same
vocabulary. tokenizer.json lists the files that were read (names, sizes). If the output folder
already holds the tokenizer trained with these arguments and files, it is reused. Files are not
sampled at random: that would need every shard before training starts, and gain nothing if shards
are already shuffled.
"""

import argparse
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from tqdm import tqdm

from nanochat.cli import Parser, run_main, setup_logging, whole
from nanochat.common import AnyPath, as_local_path, differences, get_base_dir
from nanochat.files import BUCKET, DATASET_NAME, FORMATS, data_at, default_data_path
from nanochat.splits import DataFile, describe_split, last_file_validates, split_train_val
from nanochat.text import PLAIN_TEXT, Selection, add_text_flags, text_suffix
from nanochat.text_kinds import read_texts
from nanochat.tokenizer import (
    JSON_FILE,
    SPECIAL_TOKENS,
    RustBPETokenizer,
    default_tokenizer,
    read_description,
)

DOC_CAP = 10_000  # characters of a document, if there is too much data


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--max-chars", type=whole(1), default=2_000_000_000, help="stop after this many characters"
    )
    parser.add_argument(
        "--doc-cap",
        type=whole(1),
        help="read this many characters of each document (default: all; "
        f"{DOC_CAP:,} if the data has more than --max-chars)",
    )
    parser.add_argument(
        "--vocab-size",
        type=whole(256 + len(SPECIAL_TOKENS)),
        default=32_768,
        help="number of tokens, special tokens included",
    )
    parser.add_argument(
        "--data-path",
        help=f"folder or file of text, here or elsewhere, as for base_train: {', '.join(FORMATS['text'])} "
        f"(default: the {DATASET_NAME} download)",
    )
    add_text_flags(parser, "text_field", "min_chars", "val_fraction")
    parser.add_argument(
        "--val-path",
        help="validation files, which are not read (default: the last file; a run with --curriculum "
        "validates on the last one of each subfolder: name these for both)",
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        help="folder to write (default: <base dir>/tokenizer, where "
        "<base dir> is $NANOCHAT_BASE_DIR or ~/.cache/nanochat)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="train even if the output folder holds a tokenizer, and replace it",
    )
    return parser.parse_args(argv)


def find_existing(
    output_dir: Path, arguments: dict[str, Any], files: list[dict[str, Any]]
) -> RustBPETokenizer | None:
    """The tokenizer in `output_dir` if training would use the same arguments and read the same
    text, judged by names and sizes. Later files matter only if the text ran out. None if the folder
    holds no tokenizer; ValueError if it holds a different or damaged one."""
    description = read_description(output_dir)
    if description is None:
        return None
    training = description["training"]
    read = training.get("files", [])
    same_files = files == read if training.get("exhausted") else files[: len(read)] == read
    if training.get("arguments") != arguments or not same_files:
        what = "files"
        if training.get("arguments") != arguments:
            changes = differences(training.get("arguments", {}), arguments)
            listed = "; ".join(f"{name} was {was}, is {now}" for name, was, now in changes)
            what = f"arguments ({listed})"
        raise ValueError(
            f"{output_dir}: holds a tokenizer trained with different {what}, which data and runs may "
            f"depend on. Add --output-dir=DATA/tokenizer, where commands on the folder DATA find it, or "
            f"replace it with --force"
        )
    return RustBPETokenizer.from_directory(output_dir)


def has_more(
    folder: AnyPath, files: list[dict[str, Any]], selection: Selection, max_chars: int
) -> bool:
    """Whether the files have more than `max_chars` characters. Reads no further than that."""
    remaining = max_chars
    for file in files:
        for text in read_texts(folder / file["name"], selection):
            remaining -= len(text)
            if remaining < 0:
                return True
    return False


class Corpus:
    """The texts of the first files, until they add up to `max_chars` characters. Documents are cut
    at `doc_cap` characters, unless it is None. While they are read, it counts."""

    def __init__(
        self,
        folder: AnyPath,
        files: list[dict[str, Any]],
        selection: Selection,
        *,
        max_chars: int,
        doc_cap: int | None,
    ):
        self.folder = folder
        self.files = files
        self.selection = selection
        self.max_chars = max_chars
        self.doc_cap = doc_cap
        self.opened: list[dict[str, Any]] = []
        self.num_cut = 0  # documents
        self.dropped = 0  # characters

    def __iter__(self) -> Iterator[str]:
        remaining = self.max_chars
        with tqdm(
            total=remaining, unit="char", unit_scale=True, desc="reading", disable=None
        ) as bar:
            for file in self.files:
                self.opened.append(file)
                for text in read_texts(self.folder / file["name"], self.selection):
                    shown = self._cut(text)
                    remaining -= len(shown)
                    bar.update(len(shown))
                    yield shown
                    if remaining <= 0:
                        return

    def _cut(self, text: str) -> str:
        """The beginning of a text that is too long."""
        if self.doc_cap is None or len(text) <= self.doc_cap:
            return text
        self.num_cut += 1
        self.dropped += len(text) - self.doc_cap
        return text[: self.doc_cap]


def train(
    folder: AnyPath,
    files: list[dict[str, Any]],
    arguments: dict[str, Any],
    *,
    cap_always: bool = False,
) -> RustBPETokenizer:
    """Train on the first files. The tokenizer's `training` records the arguments, files and counts.
    Documents are cut at `doc_cap` characters if `cap_always`, or if the files have more than
    `max_chars`."""
    max_chars, start = arguments["max_chars"], time.monotonic()
    selection = Selection.of(arguments).for_split("train")
    capped = cap_always or has_more(folder, files, selection, max_chars)
    doc_cap = arguments["doc_cap"] if capped else None
    corpus = Corpus(folder, files, selection, max_chars=max_chars, doc_cap=doc_cap)
    tokenizer = RustBPETokenizer.train_from_iterator(iter(corpus), arguments["vocab_size"])

    opened = corpus.opened
    documents, characters = (tokenizer.training[name] for name in ("documents", "characters"))
    tokenizer.training |= {
        "arguments": arguments,
        "files": opened,
        "exhausted": characters < max_chars,
    }
    print(
        f"trained in {time.monotonic() - start:.1f} s on {documents:,} documents with {characters:,} characters from "
        f"{len(opened)} of {len(files)} files, {opened[0]['name']} to {opened[-1]['name']}"
    )
    if corpus.num_cut:
        why = "" if cap_always else f", because the data has more than --max-chars={max_chars:,}"
        share = corpus.dropped / (characters + corpus.dropped)
        print(
            f"note: --doc-cap={doc_cap} truncated {corpus.num_cut:,} of {documents:,} documents and dropped "
            f"{share:.0%} of the characters that were read{why}"
        )
    return tokenizer


def count_documents(path: AnyPath) -> int | None:
    """The number of documents in a .txt file or a local parquet file; None for other files, which
    have no cheap count."""
    if text_suffix(path.name) in PLAIN_TEXT:
        return 1
    if path.suffix == ".parquet" and isinstance(path, Path):
        return pq.read_metadata(path).num_rows
    return None


def validation_files(
    of_buckets: Mapping[str, Sequence[AnyPath]], folder: AnyPath
) -> dict[str, list[DataFile]]:
    """{bucket: validation files}. Those in the folder of the data are named by their path in it."""
    of_split: dict[str, list[DataFile]] = {}
    for bucket, paths in of_buckets.items():
        files = of_split[bucket] = []
        for path in paths:
            name = path.name
            if path.is_relative_to(folder):
                name = path.relative_to(folder).as_posix()
            files.append(DataFile(name, path.stat().st_size, count_documents(path)))
    return of_split


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    setup_logging()
    logging.getLogger("rustbpe").setLevel(logging.WARNING)  # else it logs one line per percent
    data_path = args.data_path or default_data_path()
    output_dir = as_local_path(args.output_dir or get_base_dir() / "tokenizer", "--output-dir")
    arguments = {
        "max_chars": args.max_chars,
        "doc_cap": args.doc_cap or DOC_CAP,
        "vocab_size": args.vocab_size,
    }
    arguments |= Selection.of(vars(args)).named()
    data = data_at(data_path).at_commit()
    folder = data.folder
    val_data = None if args.val_path is None else data_at(args.val_path)
    splits = split_train_val(data, val_data, shared=args.val_fraction > 0)
    files: list[dict[str, Any]] = [
        {"name": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size}
        for path in splits["train"][BUCKET]
    ]
    tokenizer = None if args.force else find_existing(output_dir, arguments, files)
    if tokenizer is not None:
        print(f"{output_dir}: reused, already trained with these arguments on these files")
    else:
        print(f"training a tokenizer of {args.vocab_size:,} tokens on {data.on_hub or data_path}")
        print(
            *describe_split(
                {BUCKET: [DataFile(file["name"], file["bytes"]) for file in files]},
                validation_files(splits["val"], folder),
                reads=f"at most --max-chars={args.max_chars:,} characters",
                shared=args.val_fraction,
                chosen=val_data is None and last_file_validates(data),
            ),
            sep="\n",
        )
        tokenizer = train(folder, files, arguments, cap_always=args.doc_cap is not None)
        tokenizer.save(output_dir, force=args.force)
    print(
        f"{output_dir}: {tokenizer.get_vocab_size():,} tokens, fingerprint {tokenizer.fingerprint}"
    )
    of_data = default_tokenizer(data_path)
    if (of_data / JSON_FILE).is_file() and of_data.resolve() != output_dir.resolve():
        print(
            f"note: commands on {data_path} use {of_data} unless you pass --tokenizer={output_dir}"
        )
    return 0


if __name__ == "__main__":
    run_main(main)
