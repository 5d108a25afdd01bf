"""
The source of token files: pairs of .bin and .idx, in either format (nanochat/tokens.py).
"""

import functools
from typing import NamedTuple

import numpy as np

from nanochat.common import AnyPath, hash_json
from nanochat.pins import Manifest, Pin
from nanochat.rows import Document
from nanochat.sources import Source
from nanochat.text import warn_once
from nanochat.tokenizer import Tokenizer
from nanochat.tokens import GROUP_ENTRIES, TokenFile, open_tokens


class Runs(NamedTuple):
    """Where some documents of a group are."""

    pair: TokenFile
    ranges: list[tuple[int, int]]  # (first, end) of each run of consecutive entries
    positions: list[int]  # of each document, among the entries of all runs


class TokenSource(Source):
    """Pairs of .bin and .idx in either format.

    Each entry is a document: `[BOS] + ids`, or with `as_stored` the entry as it is stored. Files
    are opened when they are first used. ValueError for files that another tokenizer made.
    """

    lengths_known = True
    has_entries = True

    def __init__(self, manifest: Manifest, tokenizer: Tokenizer, *, as_stored: bool = False):
        super().__init__(manifest, tokenizer)
        self.as_stored = as_stored
        # (G,) int64: the number in its file of the first entry of each group
        firsts = [np.cumsum([0, *entry["groups"][:-1]]) for entry in manifest["files"]]
        self._first_entry = np.concatenate(firsts)
        if "documents" in manifest:
            self._limit_to(*manifest["documents"])
        self._pair = functools.cache(self._open)
        first_in_folder = {path.parent: number for number, path in enumerate(self.paths)}
        for folder, number in first_in_folder.items():
            self._check_tokenizer(folder, self._pair(number))

    def _limit_to(self, first: int, end: int) -> None:
        """Read only documents first .. end - 1 of the only pair."""
        beginnings = [*range(first, end, GROUP_ENTRIES)]
        edges = np.array([*beginnings, end])
        self.groups = np.diff(edges)
        self._first_entry = edges[:-1]
        self.means = np.full(len(self.groups), self.means[0])
        self._first_group = np.array([0, len(self.groups)])
        self.fingerprint = hash_json([self.fingerprint, first, end])

    def _check_tokenizer(self, folder: AnyPath, first: TokenFile) -> None:
        """ValueError if the manifest.json of a folder says that another tokenizer made its files. If it
        has none, a warning if its first file does not end as the run's tokenizer ends documents."""
        if first.manifest is None:
            last = len(first) - 1
            is_empty = not first.lengths(last, last + 1)[0]
            if not is_empty and not first.ends_document(last, last + 1, self.bos)[0]:
                warn_once(
                    f"{first.path}: its last document does not end with the id {self.bos}, the end of documents in "
                    f"this run; if another tokenizer made the file, name that one with --tokenizer"
                )
            return
        theirs = first.manifest["tokenizer"]["fingerprint"]
        if theirs != self.tokenizer.fingerprint:
            raise ValueError(
                f"{folder}: tokenizer {theirs} made its shards, but this run has "
                f"{self.tokenizer.fingerprint}; name the shards' tokenizer with --tokenizer, or make the "
                f"shards again with scripts.tok_shards"
            )

    @staticmethod
    def scan_file(path: AnyPath, name: str, text_field: str) -> Pin:
        return open_tokens(path).pin(name)

    @staticmethod
    def is_empty(path: AnyPath) -> bool:
        """A pair whose files contradict each other is not empty: opening it gives the reason."""
        return path.stat().st_size == 0 and len(TokenFile(path)) == 0

    def _open(self, number: int) -> TokenFile:
        """The open pair for a file in the manifest."""
        path = self.paths[number]
        pinned = self.manifest["files"][number]
        entries = sum(pinned["groups"])
        size = pinned["size"]
        pair = open_tokens(path, vocab_size=self.tokenizer.get_vocab_size())
        if (len(pair), pair.num_bytes) != (entries, size):
            raise ValueError(
                f"{path}: {len(pair):,} entries in {pair.num_bytes:,} bytes, but {entries:,} in {size:,} "
                f"when this run began; restore the old file, or start a new run (--model-tag)"
            )
        return pair

    def _runs(self, group: int, numbers: np.ndarray) -> Runs:
        """Where some documents of a group are. In a small bucket they may lie far apart."""
        # a document may be pending from two epochs
        distinct, positions = np.unique(numbers, return_inverse=True)
        entries = distinct + self._first_entry[group]
        gaps = np.flatnonzero(np.diff(entries) > 1) + 1
        runs = []
        for run in np.split(entries, gaps):
            first = int(run[0])
            last = int(run[-1])
            runs.append((first, last + 1))
        file, _ = self.file_of(group)
        return Runs(self._pair(file), runs, positions.tolist())

    def read(self, group: int, numbers: np.ndarray, keep: int = 0) -> list[Document]:
        """The documents with these numbers, in their order; neighbors are read at once."""
        pair, runs, positions = self._runs(group, numbers)
        documents: list[Document] = []
        for first, end in runs:
            if self.as_stored:
                ids = pair.read(first, end)
            else:
                ids = pair.documents(first, end, self.bos)
            contexts = pair.prefixes(first, end).tolist()
            documents += map(Document, ids, contexts)
        return [documents[position] for position in positions]

    def is_sized_by_text(self, group: int) -> bool:
        """True of shards made from whole documents: a run reads them in the order of the text."""
        file, _ = self.file_of(group)
        return self.manifest["files"][file].get("tokens") != self._pair(file).num_tokens

    def lengths(self, group: int, numbers: np.ndarray) -> tuple[list[int], list[int]]:
        """Reads no ids unless the index does not show where documents end."""
        pair, runs, positions = self._runs(group, numbers)
        lengths: list[int] = []
        contexts: list[int] = []
        for first, end in runs:
            if self.as_stored:
                of_run = pair.lengths(first, end)
            else:
                of_run = pair.document_lengths(first, end, self.bos)
            lengths += of_run.tolist()
            contexts += pair.prefixes(first, end).tolist()
        lengths = [lengths[position] for position in positions]
        contexts = [contexts[position] for position in positions]
        return lengths, contexts
