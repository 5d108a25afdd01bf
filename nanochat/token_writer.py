"""
Writing token files: a class for each of the two formats that `tokens` describes.

    with ShardWriter("OUT/web", vocab_size=32768) as writer:        .web.bin.1f2e3d4c.tmp grows
        writer.add(ids, lengths, prefixes)                          ...
    writer.written                                                  web.bin, then web.idx

Ids go to a temporary file as they come. When the `with` block ends well, the .bin is renamed, and
the .idx last: a pair without a good .idx does not exist. After an exception nothing is left, and a
pair that was there before is as it was, or has lost its .idx.

Several processes may write the same pair at once, since they write the same bytes. An old .idx goes
before the new .bin comes, so that the two never belong to different data. If it is the same it
stays, and so nobody ever sees the pair without it.
"""

import contextlib
import os
from array import array
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from nanochat.common import atomic_open, fsync_dir, hash_file
from nanochat.tokens import DTYPES, HEADERS, MAGICS, pair_paths, running

MAX_SEQUENCE = 2**31 - 1  # ids of a sequence of Megatron's


class TokenWriter:
    """What both formats have in common: the .bin, and how a pair appears. Memory: some 10 bytes an
    entry. ValueError for ids outside the vocabulary or beyond the type: they never wrap around."""

    format: ClassVar[str]  # one of `tokens.HEADERS`

    def __init__(self, prefix: Path | str, *, vocab_size: int, dtype: Any):
        self.bin_path, self.idx_path = pair_paths(prefix)
        self.dtype, codes = np.dtype(dtype), DTYPES[self.format]
        self.code = next((code for code, known in codes.items() if known == self.dtype), 0)
        if not self.code:
            raise ValueError(f"{self.bin_path}: ids of type {self.dtype.name}, expected one of "
                             f"{', '.join(codes.values())}")
        self.limit = min(vocab_size, int(np.iinfo(self.dtype).max) + 1)
        self.written: dict[str, Any] = {}  # what a finished pair holds, as manifest.json has it
        self.lengths = array("q")
        self._hash, self._num_bytes = blake2b(digest_size=16), 0
        self._files = contextlib.ExitStack()  # ends with what was opened last: the .idx appears last
        self._idx = self._files.enter_context(atomic_open(self.idx_path))
        self._bin = self._files.enter_context(atomic_open(self.bin_path))

    def append(self, ids: Any, lengths: Any) -> None:
        """Append ids, one stretch after another (sum of lengths,), and the lengths (n,)."""
        ids, lengths = np.asarray(ids).reshape(-1), np.asarray(lengths, np.int64)
        if lengths.sum() != len(ids) or lengths.min(initial=0) < 0:
            raise ValueError(f"{self.bin_path}: got {len(ids):,} ids, and lengths that add up to "
                             f"{lengths.sum():,}, expected as many")
        lowest, highest = (ids.min(), ids.max()) if len(ids) else (0, 0)
        whole = len(ids) == 0 or ids.dtype.kind in "iu"
        if not whole or lowest < np.iinfo(self.dtype).min or highest >= self.limit:
            raise ValueError(f"{self.bin_path}: got {ids.dtype.name} ids {lowest} .. {highest}, "
                             f"expected integers below {self.limit:,} that fit {self.dtype.name}; "
                             f"is it the tokenizer that they come from?")
        data = np.ascontiguousarray(ids, self.dtype).data
        self._bin.write(data)
        self._hash.update(data)
        self._num_bytes += data.nbytes
        self.lengths.frombytes(lengths.tobytes())

    def add(self, ids: np.ndarray, lengths: np.ndarray, prefixes: np.ndarray) -> None:
        """Append entries: their ids, one entry after another (sum of lengths,), the lengths (n,),
        and how many first ids of each repeat the entry before (n,)."""
        raise NotImplementedError

    def index(self) -> tuple[int, list[Any]]:
        """(number of entries, the .idx, in parts)."""
        raise NotImplementedError

    def finish(self) -> dict[str, Any]:
        """Write the index. Nothing has appeared yet: a full disk shows here, while an old pair is
        untouched, and whatever is to be on disk before the pair counts can still be written."""
        entries, parts = self.index()
        digest = blake2b(digest_size=16)
        for part in parts:
            self._idx.write(part)
            digest.update(part)
        for f in (self._bin, self._idx):
            f.flush()
            os.fsync(f.fileno())
        self.written = {
            "entries": entries, "tokens": self._num_bytes // self.dtype.itemsize,
            "bin_bytes": self._num_bytes, "bin_hash": self._hash.hexdigest(),
            "idx_hash": digest.hexdigest()}
        return self.written

    def commit(self) -> None:
        """Let both files appear, the .idx last."""
        with self._files:
            written = self.written or self.finish()
            with contextlib.suppress(FileNotFoundError):  # nothing is there, or not any more
                if hash_file(self.idx_path) != written["idx_hash"]:
                    self.idx_path.unlink()
                    fsync_dir(self.idx_path.parent)

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.commit()
        else:
            self._files.__exit__(kind, error, trace)


class ShardWriter(TokenWriter):
    """Writes GPTS. `dtype`: in place of uint16, or uint32 for more than 65,535 ids."""

    format = "shards"

    def __init__(self, prefix: Path | str, *, vocab_size: int, dtype: Any = None):
        own = DTYPES["shards"][2 if vocab_size <= 65535 else 4]
        super().__init__(prefix, vocab_size=vocab_size, dtype=dtype or own)
        self._prefixes = array("H")

    def add(self, ids: np.ndarray, lengths: np.ndarray, prefixes: np.ndarray) -> None:
        prefixes = np.asarray(prefixes)
        fits = prefixes.min(initial=0) >= 0 and prefixes.max(initial=0) < 1 << 16
        if len(lengths) != len(prefixes) or not fits:
            raise ValueError(f"{self.bin_path}: got {len(prefixes):,} prefixes for "
                             f"{len(lengths):,} entries, expected one for each, of 0 .. 65,535")
        self.append(ids, lengths)
        self._prefixes.frombytes(prefixes.astype(np.uint16).tobytes())

    def index(self) -> tuple[int, list[Any]]:
        n = len(self.lengths)
        if not 0 < n < 1 << 32:
            raise ValueError(f"{self.bin_path}: {n:,} entries, expected 1 to {(1 << 32) - 1:,}; "
                             f"leave out an input without documents, cut one with too many")
        header = HEADERS["shards"].pack(MAGICS["shards"], 1, self.code, n)
        offsets = running(np.frombuffer(self.lengths, np.int64))
        return n, [header, offsets.data, self._prefixes]


class MegatronWriter(TokenWriter):
    """Writes Megatron's format. `dtype`: in place of uint16, or int32 from 65,500 ids on, which is
    Megatron's own choice.

    `add` makes each entry a document of one sequence. For documents of several, `append` their
    sequences, then `end_documents`.
    """

    format = "megatron"

    def __init__(self, prefix: Path | str, *, vocab_size: int = 1 << 63, dtype: Any = None):
        own = DTYPES["megatron"][8 if vocab_size < 65500 else 4]
        super().__init__(prefix, vocab_size=vocab_size, dtype=dtype or own)
        self._boundaries = array("q", [0])

    def end_documents(self, counts: Iterable[int]) -> None:
        """End documents, of so many sequences each, behind the last one that was ended."""
        for count in counts:
            self._boundaries.append(self._boundaries[-1] + int(count))

    def add(self, ids: np.ndarray, lengths: np.ndarray, prefixes: np.ndarray) -> None:
        if np.count_nonzero(prefixes):
            raise ValueError(f"{self.bin_path}: entries that repeat others, but Megatron's format "
                             f"holds whole documents only")
        self.append(ids, lengths)
        self.end_documents([1] * len(lengths))

    def index(self) -> tuple[int, list[Any]]:
        """See `TokenWriter.index`; ValueError where sequences lie behind the last document."""
        n, documents = len(self.lengths), len(self._boundaries) - 1
        if self._boundaries[-1] != n:
            raise ValueError(f"{self.bin_path}: {n - self._boundaries[-1]:,} sequence(s) behind "
                             f"the last document; call end_document() before finalize()")
        lengths = np.frombuffer(self.lengths, np.int64)
        if lengths.max(initial=0) > MAX_SEQUENCE:
            raise ValueError(f"{self.bin_path}: a sequence of more than {MAX_SEQUENCE:,} ids, "
                             f"which Megatron's format cannot hold; cut it into several")
        pointers = running(lengths * self.dtype.itemsize)[:-1]
        header = HEADERS["megatron"].pack(MAGICS["megatron"], 1, self.code, n, documents + 1)
        return documents, [header, lengths.astype(np.int32).data, pointers.data, self._boundaries]


WRITERS: dict[str, type[ShardWriter] | type[MegatronWriter]] = {
    "shards": ShardWriter, "megatron": MegatronWriter}
