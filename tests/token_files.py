"""Shared by tests of token files: small pairs of both formats, folders with a manifest.json, and
damage."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from nanochat.common import write_json
from nanochat.pretokenize import MegatronWriter, ShardWriter
from nanochat.tokens import TokenFile, new_manifest
from tests.toy import BOS, ByteTokenizer

GOLDEN = Path(__file__).parent / "golden" / "gpts"
E = BOS  # the end-of-document id

Pairs = dict[str, tuple[list[list[int]], list[int] | None]]  # {name: (entries, prefixes)}


class Tokenizer(ByteTokenizer):
    """A byte tokenizer with a vocabulary of any size."""

    def __init__(self, vocab_size: int = BOS + 1, fingerprint: str = "bytes"):
        super().__init__(fingerprint)
        self.vocab_size = vocab_size

    def get_vocab_size(self) -> int:
        return self.vocab_size


def write_pair(
    prefix: Path,
    entries: Sequence[Sequence[int]],
    prefixes: Sequence[int] | None = None,
    vocab_size: int = BOS + 1,
) -> dict[str, Any]:
    """Write a GPTS pair."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with ShardWriter(prefix, vocab_size=vocab_size) as writer:
        ids = np.array([i for entry in entries for i in entry], np.int64)
        writer.add(
            ids, np.array([len(e) for e in entries]), np.array(prefixes or [0] * len(entries))
        )
    return writer.written


def write_megatron(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "<u2"
) -> dict[str, Any]:
    """Write a Megatron pair; each document is a list of sequences."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with MegatronWriter(prefix, dtype=dtype) as writer:
        for document in documents:
            writer.append(
                np.array([i for s in document for i in s], np.int64), [len(s) for s in document]
            )
            writer.end_documents([len(document)])
    return writer.written


def write_manifest(
    folder: Path,
    pairs: Pairs,
    written: dict[str, dict[str, Any]],
    *,
    max_length: int = 0,
    overlap_size: int = 0,
    data_format: str = "shards",
    groups: list[int] | None = None,
    fingerprint: str = "bytes",
) -> None:
    """Write the manifest.json of these pairs."""
    records: dict[str, Any] = {}
    for name, (entries, prefixes) in pairs.items():
        followers = [*(prefixes or [0] * len(entries))[1:], 0]
        documents = sum(
            entry[-1:] == [E] and not prefix for entry, prefix in zip(entries, followers)
        )
        records[name] = {
            "input": {"name": f"{name}.jsonl"},
            **written[name],
            "documents": documents,
            "skipped": {"count": 0, "lines": []},
            **({"groups": groups} if groups else {}),
        }
    about = {"fingerprint": fingerprint, "eod": E, "vocab_size": BOS + 1, "name": "toy"}
    arguments = {"max_length": max_length, "overlap_size": overlap_size}
    write_json(
        folder / "manifest.json", new_manifest(about, arguments, records, data_format=data_format)
    )


def write_folder(folder: Path, pairs: Pairs, **arguments: Any) -> None:
    """Write GPTS pairs and their manifest.json."""
    written = {name: write_pair(folder / name, *pair) for name, pair in pairs.items()}
    write_manifest(folder, pairs, written, **arguments)


def entries_of(pair: TokenFile) -> list[list[int]]:
    """The entries of a pair as lists."""
    return [ids.tolist() for ids in pair.read(0, len(pair))]


def fresh_ids(pair: TokenFile) -> list[int]:
    """The ids of a pair outside prefixes."""
    return [
        t
        for ids, prefix in zip(entries_of(pair), pair.prefixes(0, len(pair)).tolist())
        for t in ids[prefix:]
    ]


@st.composite
def windowed(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    """Documents cut into windows: (entries, prefixes, overlap)."""
    overlap = draw(st.integers(0, 2))
    entries, prefixes = [], []
    for _ in range(draw(st.integers(1, 12))):
        for window in range(number := draw(st.integers(1, 3))):
            prefix = overlap if window else 0
            fewest = prefix + (window + 1 < number or prefix > 0)
            ids = draw(st.lists(st.integers(0, E - 1), min_size=fewest, max_size=6))
            entries.append(ids + [E] * (window + 1 == number))
            prefixes.append(prefix)
    return entries, prefixes, overlap


def patch(path: Path, at: int, data: bytes) -> None:
    """Overwrite some bytes."""
    with open(path, "r+b") as f:
        f.seek(at)
        f.write(data)


def truncate(path: Path, size: int) -> None:
    """Truncate a file."""
    os.truncate(path, size)
