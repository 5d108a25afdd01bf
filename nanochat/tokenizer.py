"""Text to token ids and back: byte-pair ranks trained with rustbpe, applied with tiktoken or an
equivalent encoder. Every command opens its tokenizer, ours or another program's, with
`get_tokenizer`.

    text                pieces (by the pattern)              tokens (by the ranks)
    "in Zeile 1234"     "in" " Zeile" " " "12" "34"     ->   in| Ze|ile| |12|34

The pattern cuts text into pieces, and no token crosses the edge of a piece. Inside a piece, the
neighbours that merge into the token of the lowest rank are merged first. Ids 0..255 are the bytes,
so every text has an encoding; the trained ranks follow, then the special tokens. Text never becomes
a special token: "<|bos|>" in a document is seven ordinary characters.

Ids equal those of tiktoken's `encode_ordinary`, and decoding returns the text (a lone surrogate
becomes U+FFFD). The fingerprint hashes exactly what determines ids (ranks, pattern, special tokens,
BOS), so equal fingerprints mean equal ids. A loaded tokenizer is checked against its saved
fingerprint. Training on the same texts in the same order gives the same ranks with any number of
threads.

On disk: `ranks.tiktoken` (one line per token: base64 of its bytes, rank) and `tokenizer.json`,
written last. nanochat pickles tiktoken's object instead; but loading a pickle can execute code, and
tiktoken's classes change.

`Tokenizer` is the interface that commands use. integrations/third_party_tokenizers.py holds the
tokenizers of other programs; each is saved as a copy of its program's file beside our
`tokenizer.json`.
"""

import argparse
import base64
import contextlib
import importlib.util
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import tiktoken

from nanochat.cli import Decides, setting
from nanochat.common import (
    AnyPath,
    as_path,
    check_shape,
    each,
    fsync_dir,
    get_base_dir,
    hash_bytes,
    hash_json,
    local_copy,
    make_folder,
    open_door,
    read_json,
    write_bytes,
    write_json,
)
from nanochat.files import OWN_TOKENIZER, data_at, default_data_path

if TYPE_CHECKING:
    import torch  # takes seconds to import; only `token_bytes` needs it

log = logging.getLogger(__name__)

TOKENIZERS = {  # the door for tokenizers that are not ours, and for a faster encoder of ours
    # a name -> its tokenizer
    "other": "nanochat.integrations.third_party_tokenizers:open_third_party",
    # {kind in a saved tokenizer.json: class}
    "saved": "nanochat.integrations.third_party_tokenizers:SAVED",
    # a tiktoken.Encoding -> an `Encoder`
    "fast": "nanochat.integrations.fast_encoders:fastest_encoder",
}
SPECIAL_TOKENS = (
    "<|bos|>",  # begins every document
    # the others delimit turns of conversations and of tool use, for models fine-tuned on chats
    *("<|user_start|>", "<|user_end|>"),
    *("<|assistant_start|>", "<|assistant_end|>"),
    *("<|python_start|>", "<|python_end|>"),
    *("<|output_start|>", "<|output_end|>"),
)

# GPT-4's pattern, but numbers are split after every 2 digits, not 3: a small vocabulary has better
# uses for 1,000 ids.
SPLIT_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|"""
    r"""\s+(?!\S)|\s+"""
)

# `\s+(?!\S)` backtracks; about a million spaces in a row exhaust the regex engine of tiktoken and
# of rustbpe.
LONG_RUN = 65536
_LONG_SPACE = re.compile(rf"(\s{{{LONG_RUN}}})")

FORMAT, VERSION = "nanochat-tokenizer", 1
RANK_FILE, JSON_FILE = "ranks.tiktoken", "tokenizer.json"
TRIAL = "a text, 1\n"  # encoded once when a tokenizer is opened
MAX_IDS = 1 << 24  # tables have one entry per id, so a forged size must not fill memory
TOKENIZER_HELP = (
    "folder of a tokenizer; tokenizer.json from Hugging Face; tokenizer.pkl from nanochat; "
    "name of a tiktoken encoding (gpt2, ...); ids:SIZE:EOD_ID if only token files exist"
)
DEFAULT_HELP = (  # of `default_tokenizer`
    "default: tokenizer/ in the data folder, else <base dir>/tokenizer, where scripts.tok_train "
    "writes it"
)
EOD_HELP = "the token (text or id) that separates documents (default: the one that the tokenizer's files name)"
RESTORE = "put the original back or train again with python -m scripts.tok_train --force"
SHAPE = {"format": str, "version": int, "fingerprint": str}  # fields of every tokenizer.json
# more fields of our own
OURS = {"bos_token": str, "special_tokens": dict, "pattern": str, "training": dict}
# more fields for another program's tokenizer
FOREIGN = {"kind": str, "vocab_size": int, "bos_token_id": int}

# ids of all texts (sum of lengths,) uint32, lengths (texts,) int64
Encoded = tuple[np.ndarray, np.ndarray]
# treats special tokens as ordinary text; many threads use the same one
Encoder = Callable[[Sequence[str]], Encoded]


class TiktokenEncoder:
    """Encodes with tiktoken, which defines the ids.

    It releases the GIL and creates no Python integers.
    """

    def __init__(self, encoding: tiktoken.Encoding):
        self.encoding = encoding

    def __call__(self, texts: Sequence[str]) -> Encoded:
        encoded = [self._encode(text) for text in texts]
        lengths = np.array([len(ids) for ids in encoded], np.int64)
        return np.concatenate([np.empty(0, np.uint32), *encoded]), lengths

    def _encode(self, text: str) -> np.ndarray:
        try:
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:
            return self._encode(replace_surrogates(text))
        except ValueError:  # a very long run of spaces exhausted the regex engine
            pieces = cut_long_spaces(text)
            if len(pieces) < 2:
                raise
            return np.concatenate([self._encode(piece) for piece in pieces])


def replace_surrogates(text: str) -> str:
    """Join pairs of surrogates and replace lone ones with U+FFFD, as tiktoken does."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def cut_long_spaces(text: str) -> list[str]:
    """The pieces of a text, cut inside runs of white space that are too long for the regex engines."""
    if len(text) < LONG_RUN:
        return [text]
    return [piece for piece in _LONG_SPACE.split(text) if piece]


class CannotEncode(ValueError):
    """The tokenizer's library failed on text `number` of a batch."""

    def __init__(self, number: int, texts: Sequence[str], error: BaseException):
        reason = " ".join(str(error).split())[:150]
        self.number = number
        self.reason = (
            f"this tokenizer cannot encode it ({type(error).__name__}: {reason}); it begins with "
            f"{texts[number][:40]!a}; delete the document or use another tokenizer"
        )
        super().__init__(f"text {number} of {len(texts)}: {self.reason}")


def _first_failing(encoder: Encoder, texts: Sequence[str]) -> CannotEncode | None:
    """The error of the first text that cannot be encoded alone; None if all can be."""
    for number, text in enumerate(texts):
        try:
            encoder([text])
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as e:  # a panic in Rust is not an Exception
            return CannotEncode(number, texts, e)
    return None


# ---- the interface -------------------------------------------------------------------------------


class _Opens(type):
    """Makes `Tokenizer(name)` return what `get_tokenizer(name)` returns, an object of a subclass."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is Tokenizer:
            return get_tokenizer(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class Tokenizer(metaclass=_Opens):
    """The interface of every tokenizer.

    A subclass implements `from_saved` and the members up to `contents`. `Tokenizer(name)` is
    `get_tokenizer(name)`.

    One id, `bos_token_id`, separates documents: the stream puts it before each document, and token
    files put it after each. Other programs call it BOS, EOD or EOS.
    """

    file: ClassVar[str | None]  # the file that `save` writes beside tokenizer.json, if any
    bos_token_id: int
    special_tokens: Mapping[str, int]  # {text: id}; no text becomes one of these ids
    # if False, `token_bytes` is unknown and validation reports nats per token
    knows_bytes: bool = True

    @property
    def fingerprint(self) -> str:
        """A 128-bit hash, in hex, of everything that determines ids."""
        raise NotImplementedError

    @property
    def encoder(self) -> Encoder:
        """The function from texts to ids, without BOS.

        ValueError if the tokenizer cannot encode text.
        """
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        """Number of ids, special tokens included."""
        raise NotImplementedError

    def token_bytes(self) -> "torch.Tensor":
        """(vocab_size,) int32 on the CPU: bytes of text that each token stands for.

        Special tokens stand for 0 bytes. Over a document the numbers add up to its length in UTF-8.
        If the tokenizer adds a space before every document, BOS is -1. All are 1 if `knows_bytes`
        is False.
        """
        raise NotImplementedError

    def decode(self, ids: "Sequence[int] | np.ndarray | torch.Tensor") -> str:
        """The text of ids (a list, an array or a 1-D tensor).

        Bytes that are not UTF-8 become U+FFFD.
        """
        raise NotImplementedError

    def contents(self) -> tuple[dict[str, Any], bytes]:
        """(fields of tokenizer.json, bytes of `file`), which `save` writes."""
        raise NotImplementedError

    # -- vocabulary

    def get_special_tokens(self) -> list[str]:
        """The special tokens in the order of their ids."""
        return sorted(self.special_tokens, key=self.special_tokens.__getitem__)

    def encode_special(self, text: str) -> int:
        """The id of a special token; ValueError for any other text."""
        if text not in self.special_tokens:
            known = ", ".join(self.get_special_tokens())
            raise ValueError(f"special token {text!r}: unknown; this tokenizer has {known}")
        return self.special_tokens[text]

    def get_bos_token_id(self) -> int:
        """nanochat's name for `bos_token_id`."""
        return self.bos_token_id

    @property
    def eod(self) -> int:
        """Megatron's name for `bos_token_id`, which ends a document there."""
        return self.bos_token_id

    @property
    def pad(self) -> int:
        """Megatron's name for the id of padding: -1, which equals no id."""
        return -1

    @property
    def vocab_size(self) -> int:
        """Megatron's name for `get_vocab_size()`."""
        return self.get_vocab_size()

    @property
    def token_dtype(self) -> np.dtype:
        """uint16 if it holds every id, else uint32."""
        return np.dtype(np.uint16 if self.get_vocab_size() <= 1 << 16 else np.uint32)

    # -- text to ids

    def encode(
        self,
        text: str | list[str],
        prepend: int | str | None = None,
        append: int | str | None = None,
        num_threads: int = 8,
    ) -> list[Any]:
        """The ids of a text (list[int]), or of each text of a list (list[list[int]]).

        `prepend`, `append`: ids, or texts of special tokens. For large texts use `encode_flat`: a
        list takes 8 bytes or more per token.
        """

        def as_ids(end: int | str | None) -> list[int]:
            if end is None:
                return []
            return [self.encode_special(end) if isinstance(end, str) else end]

        first = as_ids(prepend)
        last = as_ids(append)
        texts = [text] if isinstance(text, str) else text
        ids, offsets = self.encode_flat(texts, num_threads=num_threads, bos=False)
        rows = [[*first, *ids[a:b].tolist(), *last] for a, b in pairwise(offsets.tolist())]
        return rows[0] if isinstance(text, str) else rows

    __call__ = encode

    def encode_flat(
        self, texts: Sequence[str], *, num_threads: int = 4, bos: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encode documents back to back, with BOS in front of each if `bos` is true.

        Returns (ids (num_tokens,) `token_dtype`, offsets (len(texts) + 1,) int64); document i is
        ids[offsets[i]:offsets[i + 1]]. `num_threads=1` starts no threads, for callers that are
        threads themselves. Raises CannotEncode, which names the text, if the library fails on one.
        """
        if isinstance(texts, str):
            raise TypeError("texts: got one str, expected a list of them")
        encoder = self.encoder
        # several batches per thread even out unequal lengths
        size = -(-len(texts) // (8 * num_threads)) or 1
        try:
            if num_threads == 1 or len(texts) <= 1:
                ids, lengths = encoder(texts)
            else:
                batches = [texts[i : i + size] for i in range(0, len(texts), size)]
                encoded = [*each(encoder, batches, at_once=num_threads)]
                ids = np.concatenate([ids for ids, _ in encoded])
                lengths = np.concatenate([lengths for _, lengths in encoded])
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException:  # a panic in Rust is not an Exception
            error = _first_failing(encoder, texts)
            if error is not None:
                raise error from None
            raise
        ids = ids.astype(self.token_dtype)
        if bos:
            ids = np.insert(ids, np.cumsum(lengths) - lengths, self.bos_token_id)
            lengths = lengths + 1
        return ids, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    def encode_one(self, text: str) -> np.ndarray:
        """The ids of one document, BOS first: (num_tokens,) `token_dtype`."""
        ids, _ = self.encode_flat([text], num_threads=1)
        return ids

    # -- disk

    def save(self, tokenizer_dir: Path | str, *, force: bool = False) -> None:
        """Write tokenizer.json and the file beside it, unless the folder has exactly that.

        ValueError if it holds a different tokenizer, unless `force`.
        """
        own, data = self.contents()
        json_path = Path(tokenizer_dir) / JSON_FILE
        description = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "vocab_size": self.get_vocab_size(),
            **own,
        }
        existing = None if force else read_description(tokenizer_dir)
        if existing is not None and existing["fingerprint"] != self.fingerprint:
            raise ValueError(
                f"{tokenizer_dir}: holds a different tokenizer ({existing['fingerprint']}), which data "
                f"and runs may depend on; name another folder (--output-dir), or replace it with --force"
            )
        data_path = json_path.with_name(self.file) if self.file else None
        has_same_data = True
        if data_path:
            has_same_data = data_path.is_file() and data_path.read_bytes() == data
        # Every resumed run saves its tokenizer again. Rewriting the same files would delete the
        # tokenizer for a moment, and permanently if the disk is full.
        if existing == description and has_same_data:
            return
        make_folder(json_path.parent)
        # a folder without it holds no tokenizer, so a crash never mixes two
        json_path.unlink(missing_ok=True)
        fsync_dir(json_path.parent)
        if data_path:
            write_bytes(data_path, data)
        write_json(json_path, description)

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any], data: bytes, name: str) -> "Tokenizer":
        """Build a tokenizer from `saved`, the content of tokenizer.json, and the file beside it.

        `name`: that file's name. ValueError or TypeError if they are damaged.
        """
        raise NotImplementedError

    @staticmethod
    def from_directory(
        tokenizer_dir: AnyPath | str, *, data_path: AnyPath | str | None = None
    ) -> Any:
        """Load a saved tokenizer of any kind and check its fingerprint.

        Raises FileNotFoundError if the folder holds no tokenizer; the message has the command that
        trains one (on `data_path`, if given). Raises ValueError, which names the file, if a file
        has changed.
        """
        json_path = as_path(tokenizer_dir) / JSON_FILE
        saved = read_description(tokenizer_dir)
        if saved is None:
            data = f"--data-path {data_path} " if data_path else ""
            raise FileNotFoundError(
                f"{json_path}: no tokenizer here; train one with python -m scripts.tok_train "
                f"{data}--output-dir {tokenizer_dir}, --vocab-size 4096 for a small model, and --val-fraction and "
                f"--text-field if you pass them here"
            )
        kind: type[Tokenizer] = RustBPETokenizer
        if "kind" in saved:
            kinds: Mapping[str, type[Tokenizer]] = open_door(TOKENIZERS["saved"])
            if saved["kind"] not in kinds:
                raise ValueError(
                    f"{json_path}: kind {saved['kind']!r} is unknown to this code; use the "
                    f"version that wrote it"
                )
            kind = kinds[saved["kind"]]
        path = json_path.with_name(kind.file or JSON_FILE)
        files = json_path if path == json_path else f"{json_path} or {path.name}"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: missing, although {JSON_FILE} exists; {RESTORE}")
        try:
            tokenizer = kind.from_saved(saved, local_copy(path).read_bytes(), str(path))
        except (ValueError, TypeError) as e:
            raise ValueError(f"{files} is damaged ({e}); {RESTORE}") from e
        if tokenizer.fingerprint != saved["fingerprint"]:
            raise ValueError(
                f"{files} has changed since it was saved: the fingerprint is {tokenizer.fingerprint}, "
                f"{JSON_FILE} says {saved['fingerprint']}; {RESTORE}"
            )
        return tokenizer


# ---- our own tokenizer ---------------------------------------------------------------------------


class RustBPETokenizer(Tokenizer):
    """A tiktoken encoding, and the special token that separates documents.

    `training`: a JSON dict that lists and counts what it was trained on; it is saved, but is not
    part of the fingerprint.
    """

    file = RANK_FILE

    def __init__(
        self, enc: tiktoken.Encoding, bos_token: str, *, training: dict[str, Any] | None = None
    ):
        self.enc = enc
        self.bos_token = bos_token
        self.special_tokens = enc._special_tokens
        self.bos_token_id = self.encode_special(bos_token)
        self.training = dict(training or {})

    @cached_property
    def encoder(self) -> Encoder:
        """tiktoken, or a faster encoder with the same ids if the extra `fast` is installed."""
        if importlib.util.find_spec("fastokens") is not None:
            with contextlib.suppress(ModuleNotFoundError):  # the part behind the door is removed
                return open_door(TOKENIZERS["fast"])(self.enc)
        return TiktokenEncoder(self.enc)

    @classmethod
    def train_from_iterator(
        cls, text_iterator: Iterable[str], vocab_size: int
    ) -> "RustBPETokenizer":
        """Train a vocabulary of `vocab_size` tokens, special ones included, on texts.

        ValueError if `vocab_size` has no room for the bytes and special tokens, or the texts have
        too few pairs to fill it.
        """
        num_ranks = vocab_size - len(SPECIAL_TOKENS)
        if num_ranks < 256:
            raise ValueError(
                f"vocabulary size: got {vocab_size:,}, expected at least {256 + len(SPECIAL_TOKENS)} "
                f"(256 bytes and {len(SPECIAL_TOKENS)} special tokens)"
            )
        training = {"documents": 0, "characters": 0}

        def trainable() -> Iterator[str]:
            """Yield the texts, change what would make rustbpe fail, and count them."""
            for text in text_iterator:
                training["documents"] += 1
                training["characters"] += len(text)
                yield from cut_long_spaces(replace_surrogates(text))
            log.info(
                "read %(documents)d documents with %(characters)d characters, now merging", training
            )

        import rustbpe  # only training needs it

        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(trainable(), num_ranks, pattern=SPLIT_PATTERN)
        ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
        if len(ranks) < num_ranks:
            raise ValueError(
                f"too little text for a vocabulary of {vocab_size:,}: {training['documents']:,} documents "
                f"with {training['characters']:,} characters give {len(ranks) + len(SPECIAL_TOKENS):,} "
                f"tokens; train on more text, or set a smaller --vocab-size"
            )
        special_tokens = {token: num_ranks + i for i, token in enumerate(SPECIAL_TOKENS)}
        encoding = make_encoding(ranks, SPLIT_PATTERN, special_tokens)
        return cls(encoding, SPECIAL_TOKENS[0], training=training)

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any], data: bytes, name: str) -> "RustBPETokenizer":
        encoding = _parse(data, saved["pattern"], tuple(saved["special_tokens"].items()))
        return cls(encoding, saved["bos_token"], training=saved["training"])

    @classmethod
    def from_pretrained(
        cls, tiktoken_name: str, bos_token: str = "<|endoftext|>"
    ) -> "RustBPETokenizer":
        """One of tiktoken's own encodings (gpt2, cl100k_base, ...).

        tiktoken downloads it on first use. ValueError if the name is unknown, OSError if the
        download fails.
        """
        if tiktoken_name not in tiktoken.list_encoding_names():
            known = ", ".join(tiktoken.list_encoding_names())
            raise ValueError(f"tokenizer {tiktoken_name!r}: unknown; tiktoken has {known}")
        try:
            encoding = tiktoken.get_encoding(tiktoken_name)
        except OSError as e:
            raise OSError(
                f"tokenizer {tiktoken_name!r}: not in tiktoken's cache (TIKTOKEN_CACHE_DIR), and "
                f"downloading it failed with {type(e).__name__}; download it once on a machine with "
                f"network access"
            ) from e
        return cls(encoding, bos_token)

    def get_vocab_size(self) -> int:
        return self.enc.n_vocab

    def token_bytes(self) -> "torch.Tensor":
        """See `Tokenizer`.

        The bytes of each token's decoded text would be wrong: a token that is part of a character
        decodes to U+FFFD, which has three bytes.
        """
        import torch

        num_bytes = torch.zeros(self.get_vocab_size(), dtype=torch.int32)
        for token, rank in self.enc._mergeable_ranks.items():
            num_bytes[rank] = len(token)
        return num_bytes

    @cached_property
    def fingerprint(self) -> str:
        content = {
            "ranks": hash_bytes(format_ranks(self.enc._mergeable_ranks)),
            "pattern": self.enc._pat_str,
            "bos_token": self.bos_token,
            "special_tokens": self.enc._special_tokens,
        }
        return hash_json(content)

    def decode(self, ids: "Sequence[int] | np.ndarray | torch.Tensor") -> str:
        return self.enc.decode(ids.tolist() if hasattr(ids, "tolist") else list(ids))

    def contents(self) -> tuple[dict[str, Any], bytes]:
        """(what tokenizer.json says, the ranks of tiktoken's format)."""
        own = {
            "bos_token": self.bos_token,
            "special_tokens": self.enc._special_tokens,
            "pattern": self.enc._pat_str,
            "rank_file": RANK_FILE,
            "training": self.training,
        }
        return own, format_ranks(self.enc._mergeable_ranks)


def format_ranks(ranks: dict[bytes, int]) -> bytes:
    """The content of a rank file: one line "base64 rank" per token, in the order of the ranks."""
    lines = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        lines.append(b"%s %d\n" % (base64.b64encode(token), rank))
    return b"".join(lines)


def make_encoding(
    ranks: dict[bytes, int], pattern: str, special_tokens: dict[str, int]
) -> tiktoken.Encoding:
    """tiktoken's object for some ranks. ValueError if tiktoken cannot use them."""
    ids = [*ranks.values(), *special_tokens.values()]
    are_ids = all(type(i) is int and 0 <= i < MAX_IDS for i in ids)
    if not are_ids or len(set(ids)) < len(ids):
        raise ValueError(f"the {len(ids):,} ids are not distinct whole numbers below {MAX_IDS:,}")
    if not all(bytes([b]) in ranks for b in range(256)):
        raise ValueError("not every byte has a token")
    try:
        encoding = tiktoken.Encoding(
            "nanochat", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
        )
        encoding.encode_ordinary(TRIAL)  # fails if the pattern matches the empty string
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # a panic in Rust is not an Exception
        raise ValueError(f"tiktoken cannot use it: {str(e)[:200]}") from None
    return encoding


@lru_cache(maxsize=1)
def _parse(
    rank_bytes: bytes, pattern: str, special_tokens: tuple[tuple[str, int], ...]
) -> tiktoken.Encoding:
    """The encoding in a rank file. The last one is cached, and its encoder with it."""
    ranks = {}
    for line in rank_bytes.splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    return make_encoding(ranks, pattern, dict(special_tokens))


def read_description(tokenizer_dir: AnyPath | str) -> dict[str, Any] | None:
    """The content of tokenizer.json, None if the file does not exist.

    ValueError if it is damaged or not in our format. The file beside it is not checked.
    """
    path = as_path(tokenizer_dir) / JSON_FILE
    if not path.is_file():
        return None
    saved = read_json(local_copy(path), SHAPE, remedy=RESTORE)
    if (saved["format"], saved["version"]) != (FORMAT, VERSION):
        raise ValueError(
            f"{path}: expected a {FORMAT} of version {VERSION}, got {saved['format']} "
            f"{saved['version']}; {RESTORE}"
        )
    check_shape(saved, FOREIGN if "kind" in saved else OURS, str(path), ending=f"; {RESTORE}")
    return saved


# ---- opening a tokenizer -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """tokenizer"""

    tokenizer: str | None = setting(
        None,
        f"{TOKENIZER_HELP} ({DEFAULT_HELP})",
        also=["--tokenizer-dir"],
        metavar="NAME",
    )
    eod_token: str | None = setting(None, EOD_HELP, metavar="TOKEN")
    tokenizer_fingerprint: str = setting(
        "",
        "fingerprint of the tokenizer",
        flag=False,
        decides=Decides.WEIGHTS,
        note="decides the tokens of every text; --tokenizer=RUN/tokenizer selects the run's own tokenizer",
    )
    tokenizer_threads: int = setting(4, "threads per process that read and tokenize", least=1)


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    """Add --tokenizer, whose default is `default_tokenizer`, and --eod-token to a parser."""
    parser.add_argument(
        "--tokenizer",
        "--tokenizer-dir",
        metavar="NAME",
        help=f"{TOKENIZER_HELP} ({DEFAULT_HELP})",
    )
    parser.add_argument("--eod-token", metavar="TOKEN", help=EOD_HELP)


def is_ours(folder: AnyPath) -> bool:
    """Whether a folder holds files that `Tokenizer.save` wrote, even if they are damaged."""
    if (folder / RANK_FILE).is_file():
        return True
    path = folder / JSON_FILE
    if not path.is_file():
        return False
    with local_copy(path).open("rb") as file:
        return FORMAT.encode() in file.read(100)


def default_tokenizer(data_path: AnyPath | str | None = None) -> AnyPath:
    """The folder of the tokenizer that every command on some data uses unless --tokenizer names
    one: tokenizer/ in the data folder, else <base dir>/tokenizer, which may not exist. Raises the
    errors of `data_at`."""
    own = data_at(data_path or default_data_path()).home / OWN_TOKENIZER
    return own.parent if own.is_file() else get_base_dir() / "tokenizer"


def get_tokenizer(
    name: AnyPath | str | None = None,
    *,
    eod_token: str | None = None,
    data_path: AnyPath | str | None = None,
) -> Tokenizer:
    """The tokenizer that --tokenizer names, else `default_tokenizer(data_path)`.

    `name`: a folder that `Tokenizer.save` wrote, or another program's tokenizer
    (third_party_tokenizers.py lists them). `eod_token`: the text or id of the token that separates
    documents, if the tokenizer's files do not name it. `data_path`: the data that it is for. Raises
    FileNotFoundError, OSError and ValueError.
    """
    folder = as_path(default_tokenizer(data_path) if name is None else name)
    is_missing = name is None and not (folder / JSON_FILE).is_file()
    if not is_missing and not is_ours(folder):
        return open_door(TOKENIZERS["other"])(str(name or folder), eod_token)
    if eod_token is not None:
        raise ValueError(
            f"--eod-token {eod_token}: the tokenizer in {folder} has its own; leave this flag out"
        )
    return Tokenizer.from_directory(folder, data_path=data_path)


def get_token_bytes(
    device: "torch.device | str" = "cpu", tokenizer: Tokenizer | None = None
) -> "torch.Tensor":
    """(vocab_size,) int32 on `device`: a tokenizer's `token_bytes` (None: the default tokenizer)."""
    return (tokenizer or get_tokenizer()).token_bytes().to(device)
