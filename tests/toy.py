"""Small fakes for tests of the stream: a byte tokenizer, sources in memory, small corpora on
disk."""

import contextlib
import gzip
import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import settings

from nanochat.common import block
from nanochat.dataloader import DataLoader
from nanochat.order import Joined, StreamConfig
from nanochat.rows import Document, Row
from nanochat.stream import Cursor, Stream

BOS = 256


def examples(share: float) -> int:
    """Number of examples for a law that takes this share of the profile's examples
    (tests/conftest.py)."""
    return round(settings.default.max_examples * share)


class ByteTokenizer:
    """One token per byte; BOS is 256."""

    token_dtype = np.dtype(np.uint16)

    def __init__(self, fingerprint: str = "bytes"):
        self.fingerprint = fingerprint

    def get_bos_token_id(self) -> int:
        return BOS

    def get_vocab_size(self) -> int:
        return 1 << 20

    def encode_flat(
        self, texts: Sequence[str], *, num_threads: int = 4
    ) -> tuple[np.ndarray, np.ndarray]:
        raw = [text.encode() for text in texts]
        offsets = np.zeros(len(raw) + 1, np.int64)
        np.cumsum([len(r) + 1 for r in raw], out=offsets[1:])
        is_text = np.ones(int(offsets[-1]), bool)
        is_text[offsets[:-1]] = False
        ids = np.full(len(is_text), BOS, self.token_dtype)
        ids[is_text] = np.frombuffer(b"".join(raw), np.uint8)
        return ids, offsets

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i != BOS).decode()


class MemorySource:
    """Groups of documents, given as token ids without BOS. `reads` records (group, numbers) of
    each read."""

    bos = BOS
    ahead = 0

    def __init__(
        self,
        groups: Sequence[Sequence[np.ndarray]],
        fingerprint: str = "memory",
        *,
        small: bool = False,
    ):
        self.documents = [list(group) for group in groups]
        self.without: dict[int, np.ndarray] = {}  # see `nanochat.sources.Source`
        self.fingerprint = fingerprint
        self.groups = np.array([len(group) for group in groups], np.int64)
        self.means = np.array(
            [max(1, sum(map(len, group)) // max(1, len(group))) for group in groups], np.int64
        )
        self.small = small
        self.joined: list[Joined] = []
        self.reads: list[tuple[int, list[int]]] = []

    def read(self, group: int, numbers: np.ndarray, keep: int = 0) -> list[Document]:
        self.reads.append((group, numbers.tolist()))
        assert max(numbers) < keep <= len(self.documents[group]) or keep == 0, (
            "`keep` is not in the group"
        )
        return [
            Document(np.concatenate([[BOS], self.documents[group][number]]).astype(np.uint32))
            for number in numbers
        ]

    def lengths(self, group: int, numbers: np.ndarray) -> tuple[list[int], list[int]]:
        return [1 + len(self.documents[group][number]) for number in numbers], [0] * len(numbers)

    def locate(self, group: int) -> tuple[str, int]:
        return f"memory_{group // 2}", group % 2


def numbered(lengths: Sequence[Sequence[int]], first: int = 1000, **kwargs: Any) -> MemorySource:
    """A source in which no two tokens are equal, so that each token identifies its document.
    `lengths[g][d]` is the number of tokens, without BOS, of a document."""
    groups, at = [], first
    for group in lengths:
        groups.append([])
        for n in group:
            groups[-1].append(np.arange(at, at + n, dtype=np.uint32))
            at += n
    return MemorySource(groups, **kwargs)


def fixed_source(
    num_groups: int = 5, group_size: int = 9, fingerprint: str = "fixed"
) -> MemorySource:
    """The small corpus of the golden digests. Lengths and bytes come from BLAKE2b, which never
    changes."""

    def document(i: int) -> np.ndarray:
        seed = hashlib.blake2b(f"document {i}".encode()).digest()
        return np.frombuffer((seed * 2)[1 : seed[0] % 90], np.uint8).astype(np.uint16)

    return MemorySource(
        [[document(g * group_size + d) for d in range(group_size)] for g in range(num_groups)],
        fingerprint,
    )


# ---- files ---------------------------------------------------------------------------------------


def some_texts(n: int, *, seed: int = 0, longest: int = 120) -> list[str]:
    """Texts of different lengths, some empty, some not ASCII."""
    rng = np.random.default_rng(seed)
    return [
        "".join(rng.choice(list("abcdefgh é漢😀\n"), rng.integers(0, longest))) if i % 7 else ""
        for i in range(n)
    ]


def write_parquet(path: Path, texts: Sequence[str], group_size: int = 8, **kwargs: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=group_size, **kwargs
    )
    return path


def compressed(data: bytes, suffix: str) -> bytes:
    """Compress data as a file with that suffix stores it."""
    if suffix == ".zst":
        return pa.compress(data, "zstd", asbytes=True)
    return gzip.compress(data, 1, mtime=0) if suffix == ".gz" else data


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(compressed(data, path.suffix))
    return path


def tree(folder: Path) -> dict[str, bytes]:
    """{relative path: content} of all files below a folder."""
    return {
        f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()
    }


# ---- digests -------------------------------------------------------------------------------------


def digest_of_row(index: int, tokens: Sequence[int], mask: Sequence[int]) -> int:
    """A digest by its definition alone: BLAKE2b, 8 bytes, of (u64 i, tokens u32, target mask u8),
    little-endian."""
    packed = struct.pack(f"<Q{len(tokens)}I{len(mask)}B", index, *map(int, tokens), *map(int, mask))
    return struct.unpack("<Q", hashlib.blake2b(packed, digest_size=8).digest())[0]


def row_arrays(row: Row, T: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens (T + 1,), live (T + 1,)) of a row."""
    assert row.tokens.shape == (T + 1,)
    return row.tokens.astype(np.uint32), np.ones(T + 1, np.uint8) if row.live is None else row.live


EPS = torch.finfo(torch.float32).eps  # the relative distance of two neighbouring float32


def assert_same_sums(actual: torch.Tensor, expected: torch.Tensor, *, terms: int) -> None:
    """Compare float32 results of the same arithmetic in another order. Each of `terms` additions,
    counted along the path from the inputs to a value, may round by EPS of the largest value: how
    much of this a processor uses depends on its instructions, so a tolerance that one processor was
    seen to need is too tight on another."""
    largest = expected.detach().abs().max().item()
    assert largest > 0, "the case: values that are not all 0"
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=0, atol=terms * EPS * largest
    )


@contextlib.contextmanager
def if_a_fork_changed(what: str, remedy: str) -> Iterator[None]:
    """Ends the report of a failed assertion in the block with a sentence for the author of a fork,
    whose change is one reason to fail."""
    try:
        yield
    except AssertionError as e:
        sentence = f"If this fork changed {what}, {remedy}."
        raise AssertionError(f"{sentence}\n\n{e}") from None


def json_copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


def stream_config(layout: str, **settings: Any) -> StreamConfig:
    """`layout`: concat, or what bestfit does with long documents: crop or split."""
    if layout == "concat":
        return StreamConfig(layout="concat", **settings)
    return StreamConfig(long_docs=layout, **settings)


class Ranks:
    """All ranks of a stream in one process. `step()` returns the digest of the next step over all
    ranks."""

    def __init__(
        self,
        config: StreamConfig,
        sources: Mapping[str, Any],
        *,
        n: int,
        W: int,
        cursors: list[Cursor] | None = None,
        num_threads: int = 0,
        tokenizer: str = "t",
    ):
        self.config = config
        self.n = n
        self.W = W
        self.streams = [
            Stream(
                config,
                sources,
                block(r, W, config.V),
                tokenizer=tokenizer,
                num_threads=num_threads,
                cursors=None if cursors is None else json_copy(cursors),
            )
            for r in range(W)
        ]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exc: Any) -> None:
        for stream in self.streams:
            stream.close()

    def rows(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(tokens, live) of each row of the next step, in order."""
        return [
            row_arrays(row, self.config.T)
            for stream in self.streams
            for row in stream.next_rows(self.n)
        ]

    def step(self) -> int:
        return (
            sum(digest_of_row(i, tokens, live[1:]) for i, (tokens, live) in enumerate(self.rows()))
            % 2**64
        )

    def cursors(self) -> list[Cursor]:
        return [cursor for stream in self.streams for cursor in stream.cursors()]


def load_steps(
    config: StreamConfig,
    sources: Mapping[str, Any],
    *,
    R: int,
    W: int,
    B: int,
    steps: int,
    **kwargs: Any,
) -> Iterator[tuple[int, list[Cursor]]]:
    """(digest, all cursors) after each of the next steps, from the DataLoaders of W ranks in one
    process."""
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(
                DataLoader(
                    config,
                    sources,
                    tokenizer=ByteTokenizer(),
                    rows_per_step=R,
                    device_batch_size=B,
                    rank=r,
                    world_size=W,
                    **kwargs,
                )
            )
            for r in range(W)
        ]
        for _ in range(steps):
            for loader in loaders:
                for _ in range(loader.micro_batches_per_step):
                    next(loader)
            yield (
                sum(loader.digest for loader in loaders) % 2**64,
                [cursor for loader in loaders for cursor in loader.cursors()],
            )
