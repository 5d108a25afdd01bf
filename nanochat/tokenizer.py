"""
Text to token ids and back: byte-pair ranks trained with rustbpe, applied with tiktoken or an encoder equal to it.

    text                pieces (by the pattern)              tokens (by the ranks)
    "in Zeile 1234"     "in" " Zeile" " " "12" "34"     ->   in| Ze|ile| |12|34

The pattern cuts text into pieces and no token ever crosses a piece; inside a piece the neighbours whose join has the
lowest rank are joined first. Ids 0..255 are the bytes, so every text has an encoding; then come the trained ranks, then
the special tokens. Text never turns into a special token: "<|bos|>" in a document is seven ordinary characters.

Invariants
- `decode(encode(text)) == text` for every text that UTF-8 can hold (a lone surrogate becomes U+FFFD).
- `encode`, `encode_one` and `encode_flat` give the ids of tiktoken's `encode_ordinary`, for any number of threads.
- The fingerprint is a hash of everything that decides ids (ranks, pattern, special tokens, BOS) and of nothing else, so
  equal fingerprints mean equal ids. A tokenizer on disk is checked against its fingerprint whenever it is loaded.
- The same texts in the same order train the same ranks, whatever the number of threads.

On disk: `ranks.tiktoken` (a line for each token: base64 of its bytes, rank) and `tokenizer.json`, written last. A
pickle of the tiktoken object would be one file less, but to load it is to run code, and tiktoken's classes change.
"""

import base64
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import rustbpe
import tiktoken

from nanochat.common import get_base_dir, hash_bytes, hash_json, read_json, write_bytes, write_json
from nanochat.encoders import (
    SPLIT_PATTERN,
    Encoder,
    cut_long_spaces,
    fastest_encoder,
    format_ranks,
    replace_surrogates,
)
from nanochat.places import local, place

if TYPE_CHECKING:
    import torch  # takes seconds; only `token_bytes` needs it

log = logging.getLogger(__name__)

SPECIAL_TOKENS = (
    "<|bos|>",  # stands in front of every document
    # the rest delimit the turns of a conversation and of tool use, for models tuned on chats
    "<|user_start|>", "<|user_end|>",
    "<|assistant_start|>", "<|assistant_end|>",
    "<|python_start|>", "<|python_end|>",
    "<|output_start|>", "<|output_end|>",
)

FORMAT, VERSION = "nanochat-tokenizer", 1
RANK_FILE, JSON_FILE = "ranks.tiktoken", "tokenizer.json"
CHUNKS_PER_THREAD = 8  # more even out documents of unequal length, fewer cost less Python


def _bounds(texts: Sequence[str], num_chunks: int) -> list[int]:
    """Edges of at most `num_chunks` runs of consecutive texts with about equal numbers of characters."""
    if num_chunks <= 1 or len(texts) <= 1:
        return [0, len(texts)]
    ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)) + 1)
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, num_chunks) / num_chunks)
    return np.unique(np.concatenate(([0], cuts, [len(texts)]))).tolist()


# ---- the tokenizer --------------------------------------------------------------------------------------------------

class RustBPETokenizer:
    """A tiktoken encoding, the special token that separates documents, and what it was trained on.

    `training` is a JSON dict for people (files, counts); it is saved and has no part in the fingerprint.
    """

    def __init__(self, enc: tiktoken.Encoding, bos_token: str, *, training: dict[str, Any] | None = None):
        self.enc = enc
        self.bos_token = bos_token
        self.bos_token_id = self.encode_special(bos_token)
        self.training = dict(training or {})

    _kept: ClassVar[tuple[str, Encoder] | None] = None  # the last encoder, with the fingerprint of its tokenizer

    @cached_property
    def encoder(self) -> Encoder:
        """What serves this tokenizer, chosen when it is first needed: to load and check a fast one takes 0.4 s. That of
        the last one is kept, for those that are opened again."""
        kept = RustBPETokenizer._kept
        if kept is None or kept[0] != self.fingerprint:
            kept = RustBPETokenizer._kept = self.fingerprint, fastest_encoder(self.enc)
        return kept[1]

    @classmethod
    def train_from_iterator(cls, text_iterator: Iterable[str], vocab_size: int) -> "RustBPETokenizer":
        """Train `vocab_size` tokens, the special ones included, on texts.

        Raises ValueError where `vocab_size` leaves no room, or where the texts hold too few pairs to fill it.
        """
        num_ranks = vocab_size - len(SPECIAL_TOKENS)
        if num_ranks < 256:
            raise ValueError(f"vocabulary size: got {vocab_size:,}, expected at least {256 + len(SPECIAL_TOKENS)} "
                             f"(256 bytes and {len(SPECIAL_TOKENS)} special tokens)")
        training = {"documents": 0, "characters": 0}
        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(_trainable(text_iterator, training), num_ranks, pattern=SPLIT_PATTERN)
        ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
        if len(ranks) < num_ranks:
            raise ValueError(
                f"too little text for a vocabulary of {vocab_size:,}: {training['documents']:,} documents with "
                f"{training['characters']:,} characters give {len(ranks) + len(SPECIAL_TOKENS):,} tokens; "
                f"train on more text or ask for a smaller vocabulary (--vocab-size)")
        special_tokens = {token: num_ranks + i for i, token in enumerate(SPECIAL_TOKENS)}
        return cls(_encoding(ranks, SPLIT_PATTERN, special_tokens), SPECIAL_TOKENS[0], training=training)

    @classmethod
    def from_directory(cls, tokenizer_dir: Path | str) -> "RustBPETokenizer":
        """Load what `save` wrote, checked against its fingerprint.

        Raises FileNotFoundError where there is no tokenizer, ValueError (naming the file) where it has changed.
        """
        json_path, rank_path = place(tokenizer_dir) / JSON_FILE, place(tokenizer_dir) / RANK_FILE
        saved = read_description(tokenizer_dir)
        if saved is None:
            raise FileNotFoundError(f"{json_path}: no tokenizer here; train one with python -m scripts.tok_train "
                                    f"--output-dir {tokenizer_dir}")
        if not rank_path.is_file():
            raise FileNotFoundError(f"{rank_path}: missing, though {JSON_FILE} is there; {_RESTORE}")
        rank_bytes = local(rank_path).read_bytes()
        if hash_bytes(rank_bytes) != saved["rank_file_hash"]:
            raise ValueError(f"{rank_path}: changed since it was saved: hash {hash_bytes(rank_bytes)}, {JSON_FILE} "
                             f"says {saved['rank_file_hash']}; {_RESTORE}")
        encoding = _parsed(rank_bytes, saved["pattern"], tuple(saved["special_tokens"].items()))
        tokenizer = cls(encoding, saved["bos_token"], training=saved["training"])
        if tokenizer.fingerprint != saved["fingerprint"]:
            raise ValueError(f"{json_path}: changed since it was saved: its contents have fingerprint "
                             f"{tokenizer.fingerprint}, it says {saved['fingerprint']}; {_RESTORE}")
        return tokenizer

    @classmethod
    def from_pretrained(cls, tiktoken_name: str) -> "RustBPETokenizer":
        """One of tiktoken's own encodings (gpt2, cl100k_base, ...) with `<|endoftext|>` as BOS; tiktoken downloads its
        ranks on first use. Raises ValueError for an unknown name, OSError where the ranks cannot be had."""
        if tiktoken_name not in tiktoken.list_encoding_names():
            raise ValueError(f"tokenizer {tiktoken_name!r}: tiktoken knows {', '.join(tiktoken.list_encoding_names())}")
        try:
            encoding = tiktoken.get_encoding(tiktoken_name)
        except OSError as e:
            raise OSError(f"tokenizer {tiktoken_name!r}: not in tiktoken's cache (TIKTOKEN_CACHE_DIR) and its download "
                          f"failed with {type(e).__name__}; fetch it once on a machine with a network") from e
        return cls(encoding, "<|endoftext|>")

    # -- vocabulary

    def get_vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        return self.enc.n_vocab

    def get_special_tokens(self) -> list[str]:
        """The special tokens in the order of their ids."""
        return sorted(self.enc._special_tokens, key=self.enc._special_tokens.__getitem__)

    def id_to_token(self, id: int) -> str:
        """The text of one token, bytes of cut characters as U+FFFD; KeyError for an id without a token."""
        return self.enc.decode([id])

    def encode_special(self, text: str) -> int:
        """The id of a special token; ValueError for any other text."""
        try:
            return self.enc._special_tokens[text]
        except KeyError:
            known = ", ".join(self.get_special_tokens())
            raise ValueError(f"special token {text!r}: unknown; this tokenizer has {known}") from None

    def get_bos_token_id(self) -> int:
        """The id that stands in front of every document."""
        return self.bos_token_id

    @property
    def token_dtype(self) -> np.dtype:
        """The smallest type that holds every id: uint16 or uint32."""
        return np.dtype(np.uint16 if self.get_vocab_size() <= 1 << 16 else np.uint32)

    def token_bytes(self) -> "torch.Tensor":
        """(vocab_size,) int32 on the CPU: raw bytes that each token stands for, 0 for special tokens.

        Summed over the tokens of a text this is `len(text.encode())`. Counting the bytes of each token's decoded text
        would not be: a token that is part of a character decodes to U+FFFD, three bytes.
        """
        import torch

        num_bytes = torch.zeros(self.get_vocab_size(), dtype=torch.int32)
        ranks = self.enc._mergeable_ranks
        num_bytes[list(ranks.values())] = torch.tensor([len(token) for token in ranks], dtype=torch.int32)
        return num_bytes

    @cached_property
    def fingerprint(self) -> str:
        """128 bits, as hex, of everything that decides ids."""
        return hash_json({"ranks": hash_bytes(format_ranks(self.enc._mergeable_ranks)), "pattern": self.enc._pat_str,
                          "special_tokens": self.enc._special_tokens, "bos_token": self.bos_token})

    # -- text to ids and back

    def encode(self, text: str | list[str], prepend: int | str | None = None, append: int | str | None = None,
               num_threads: int = 8) -> list[Any]:
        """The ids of a text (list[int]), or of each of a list of texts (list[list[int]]). `prepend`, `append`: ids
        or the texts of special tokens. For much text use `encode_flat`: a list costs 8 bytes a token or more."""
        first = self.encode_special(prepend) if isinstance(prepend, str) else prepend
        last = self.encode_special(append) if isinstance(append, str) else append
        texts = [text] if isinstance(text, str) else text
        ids, offsets = self._encode_flat(texts, first, num_threads)
        tail = [] if last is None else [last]
        rows = [ids[start:end].tolist() + tail for start, end in itertools.pairwise(offsets.tolist())]
        return rows[0] if isinstance(text, str) else rows

    __call__ = encode

    def encode_flat(self, texts: Sequence[str], *, num_threads: int = 4) -> tuple[np.ndarray, np.ndarray]:
        """Encode documents, BOS in front of each, back to back.

        Returns (ids (num_tokens,) `token_dtype`, offsets (len(texts) + 1,) int64); document i is
        ids[offsets[i]:offsets[i + 1]]. With `num_threads=1` no pool is made: callers may be worker threads themselves.
        """
        return self._encode_flat(texts, self.bos_token_id, num_threads)

    def encode_one(self, text: str) -> np.ndarray:
        """One document: (num_tokens,) `token_dtype`, BOS first."""
        return self.encoder([text], self.bos_token_id)[0].astype(self.token_dtype)

    def _encode_flat(self, texts: Sequence[str], first: int | None, num_threads: int) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(texts, str):
            raise TypeError("texts: got one str, expected a list of them")

        def encode_run(run: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
            ids, lengths = self.encoder(texts[run[0]:run[1]], first)
            return ids.astype(self.token_dtype), lengths

        runs = list(itertools.pairwise(_bounds(texts, num_threads * CHUNKS_PER_THREAD if num_threads > 1 else 1)))
        if len(runs) == 1:
            results = [encode_run(runs[0])]
        else:
            with ThreadPoolExecutor(num_threads, thread_name_prefix="encode") as pool:
                results = list(pool.map(encode_run, runs))
        offsets = np.zeros(len(texts) + 1, np.int64)
        np.cumsum(np.concatenate([lengths for _, lengths in results]), out=offsets[1:])
        return np.concatenate([ids for ids, _ in results]) if len(results) > 1 else results[0][0], offsets

    def decode(self, ids: Any) -> str:
        """Text of ids (a list, an array or a 1-D tensor); bytes that are not UTF-8 become U+FFFD."""
        return self.enc.decode(ids.tolist() if hasattr(ids, "tolist") else list(ids))

    # -- disk

    def save(self, tokenizer_dir: Path | str, *, force: bool = False) -> None:
        """Write the two files; where they hold this already, nothing is written.

        Raises ValueError where a different tokenizer is there that runs were trained with, unless `force`.
        """
        json_path, rank_path = Path(tokenizer_dir) / JSON_FILE, Path(tokenizer_dir) / RANK_FILE
        rank_bytes = format_ranks(self.enc._mergeable_ranks)
        description = {
            "format": FORMAT, "version": VERSION, "fingerprint": self.fingerprint, "vocab_size": self.get_vocab_size(),
            "bos_token": self.bos_token, "special_tokens": self.enc._special_tokens, "pattern": self.enc._pat_str,
            "rank_file": RANK_FILE, "rank_file_hash": hash_bytes(rank_bytes), "training": self.training,
        }
        if not force:
            if (read_description(tokenizer_dir) == description and rank_path.is_file()
                    and rank_path.read_bytes() == rank_bytes):
                return
            refuse_if_in_use(tokenizer_dir, self.fingerprint)
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.unlink(missing_ok=True)  # a folder without it holds no tokenizer: never one half each of two
        write_bytes(rank_path, rank_bytes)
        write_json(json_path, description)


# ---- helpers --------------------------------------------------------------------------------------------------------

_RESTORE = "put the original back or train again with python -m scripts.tok_train --force"


def _encoding(ranks: dict[bytes, int], pattern: str, special_tokens: dict[str, int]) -> tiktoken.Encoding:
    return tiktoken.Encoding("nanochat", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens)


@lru_cache(maxsize=1)
def _parsed(rank_bytes: bytes, pattern: str, special_tokens: tuple[tuple[str, int], ...]) -> tiktoken.Encoding:
    """The encoding of a rank file; the last one is kept, as its encoder is."""
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, rank_bytes.splitlines())}
    return _encoding(ranks, pattern, dict(special_tokens))


def _trainable(texts: Iterable[str], counts: dict[str, int]) -> Iterator[str]:
    """Texts as rustbpe survives them, counted into `counts`."""
    for text in texts:
        counts["documents"] += 1
        counts["characters"] += len(text)
        if not text.isascii():
            text = replace_surrogates(text)
        yield from cut_long_spaces(text) if len(text) > 65536 else (text,)
    log.info("read %d documents with %d characters, now merging", counts["documents"], counts["characters"])


def read_description(tokenizer_dir: Path | str) -> dict[str, Any] | None:
    """What tokenizer.json says, None where there is none; ValueError if it is broken. Does not look at the ranks."""
    path = place(tokenizer_dir) / JSON_FILE
    if not path.is_file():
        return None
    saved = read_json(local(path))
    keys = {"format", "version", "fingerprint", "bos_token", "special_tokens", "pattern", "rank_file_hash", "training"}
    missing = keys - set(saved if isinstance(saved, dict) else ())
    if missing or (saved["format"], saved["version"]) != (FORMAT, VERSION):
        problem = f"missing {', '.join(sorted(missing))}" if missing else f"got {saved['format']} {saved['version']}"
        raise ValueError(f"{path}: expected a {FORMAT} of version {VERSION}, {problem}; {_RESTORE}")
    return saved


def runs_with_tokenizer(fingerprint: str) -> list[Path]:
    """The run directories in get_base_dir()/"runs" whose tokenizer has this fingerprint."""
    runs = []
    for path in sorted(get_base_dir().glob(f"runs/*/tokenizer/{JSON_FILE}")):
        try:
            if (read_description(path.parent) or {}).get("fingerprint") == fingerprint:
                runs.append(path.parent.parent)
        except ValueError as e:
            log.warning("passed over while looking for runs: %s", e)
    return runs


def refuse_if_in_use(tokenizer_dir: Path | str, new_fingerprint: str = "") -> None:
    """Raise ValueError, naming the runs, if a folder holds a tokenizer other than `new_fingerprint` that runs use."""
    old = (read_description(tokenizer_dir) or {}).get("fingerprint")
    runs = runs_with_tokenizer(old) if old and old != new_fingerprint else []
    if runs:
        raise ValueError(f"{tokenizer_dir}: holds the tokenizer ({old}) with which these runs were trained: "
                         f"{', '.join(map(str, runs))}; write the new one to another folder (--output-dir), or "
                         f"overwrite it with --force")


def get_tokenizer(tokenizer_dir: Path | str | None = None) -> RustBPETokenizer:
    """The tokenizer in a directory; by default the one that scripts.tok_train writes, get_base_dir()/"tokenizer"."""
    return RustBPETokenizer.from_directory(get_base_dir() / "tokenizer" if tokenizer_dir is None else tokenizer_dir)


def get_token_bytes(device: "torch.device | str" = "cpu", tokenizer: RustBPETokenizer | None = None) -> "torch.Tensor":
    """`RustBPETokenizer.token_bytes` of a tokenizer (None: the default one) on `device`: (vocab_size,) int32."""
    return (tokenizer or get_tokenizer()).token_bytes().to(device)
