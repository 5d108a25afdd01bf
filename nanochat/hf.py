"""
Tokenizers of other programs, each read by the library that its field keeps, behind the door
`nanochat.tokenizer.get_tokenizer`.

    --tokenizer=                     read by             copied into a run's tokenizer/ as
    FOLDER, FOLDER/tokenizer.json    tokenizers          hf_tokenizer.json
    FILE.model                       sentencepiece       sentencepiece.model
    gpt2, cl100k_base, ...           tiktoken            ranks.tiktoken, as our own
    tokenizer.pkl (nanochat's)       nothing: `restore`  ranks.tiktoken, as our own
    ids:VOCAB:EOD                    nothing             no file: ids are known, and no text

**Ids** are the library's own. Text never turns into a special token here either: "</s>" in a
document is four ordinary characters. What a file asks for beside ids is left out (special tokens
around a text, padding, truncation), and so is dropout, which would draw ids at random.

**The end of a document.** These programs have a BOS and an EOS; the stream has one id between
documents, and files that others tokenized hold EOS there. So it is EOS where the files name one (a
tokenizer_config.json or special_tokens_map.json beside tokenizer.json, the header of a .model), then
BOS, then a special token with one of the usual names. --eod-token comes before all of these.

**Bytes.** A byte-level vocabulary writes each byte as one character of an alphabet of 256. One of
SentencePiece's writes a blank as U+2581, bytes that it has no piece for as <0xE6>, and begins every
text with a blank that is not there. That blank is one byte too many, so BOS, which stands before
it, counts -1:

    "in  Zeile"     BOS  _in  _  _Z  eile      _: U+2581
                     -1    3  1   2     4      = 9 bytes

A tokenizer whose tokens do not add up to a text (normalizers that change it, unknown characters,
WordPiece's ##) is found by a sample. Bits per byte would be wrong for it, so validation then tells
the loss in nats a token.
"""

import importlib
import json
import logging
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import tiktoken

from nanochat.common import hash_bytes, hash_json, local, place
from nanochat.tokenizer import (
    JSON_FILE,
    MAX_IDS,
    RESTORE,
    Encoded,
    Encoder,
    RustBPETokenizer,
    Tokenizer,
    make_encoding,
    read_description,
    refuse_changed,
    replace_surrogates,
)

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

BLANK = "\u2581"  # how SentencePiece writes a blank
SAMPLE = "Two words, a  tab\t1.\nNa\u00efve \u6f22\u5b57 \U0001f642"
SIBLINGS = ("tokenizer_config.json", "special_tokens_map.json")  # of tokenizer.json
USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|bos|>", "<s>", "<bos>")
MAX_FILE_BYTES = 1 << 28  # a larger one is no tokenizer
NO_END = ("{}: nothing in it tells which token ends a document; name it with --eod-token (its text, or its id: {} "
          "ids)")


# ---- the kinds -----------------------------------------------------------------------------------

class Foreign(Tokenizer):
    """A tokenizer that another program made: `data` is its file, `name` what messages call it. Who
    opens one sets `bos_token_id`, which `find_end` finds."""

    kind: ClassVar[str]
    file: ClassVar[str | None]

    def __init__(self, data: bytes, name: str):
        self.data, self.name = data, name
        self.bos_token_id = -1

    def id_of(self, token: str) -> int | None:
        """The id of a token, given as the vocabulary writes it."""
        raise NotImplementedError

    def ends(self, folder: Path) -> Iterator[str | int]:
        """What may separate documents, texts or ids, the likeliest first. `folder`: where other
        files of the tokenizer are."""
        raise NotImplementedError

    def sizes(self) -> Iterator[tuple[int, int]]:
        """(id, bytes of text that it stands for) of all tokens but special ones."""
        raise NotImplementedError

    @cached_property
    def fingerprint(self) -> str:
        return hash_json({"kind": self.kind, "data": hash_bytes(self.data), "bos_token_id": self.bos_token_id})

    @cached_property
    def _table(self) -> np.ndarray:
        """(vocab_size,) int32: what `token_bytes` gives, before it is known to be right."""
        table = np.zeros(self.get_vocab_size(), np.int32)
        for i, size in self.sizes():
            table[i] = size
        table[self.bos_token_id] = min(0, 1 - int(table[self.encode("x")].sum()))
        return table

    @cached_property
    def knows_bytes(self) -> bool:  # type: ignore[override]
        """Whether the tokens of a sample add up to its bytes; told where they do not."""
        found, expected = int(self._table[self.encode_one(SAMPLE)].sum()), len(SAMPLE.encode())
        if found != expected:
            log.warning("%s: its tokens stand for %d bytes of a sample text of %d, so bits per byte would be wrong; "
                        "validation tells the loss in nats a token", self.name, found, expected)
        return found == expected

    def token_bytes(self) -> "torch.Tensor":
        import torch

        return torch.from_numpy(self._table) if self.knows_bytes else torch.ones(len(self._table), dtype=torch.int32)

    def contents(self) -> tuple[dict[str, Any], str | None, bytes]:
        return {"kind": self.kind, "file": self.file, "bos_token_id": self.bos_token_id}, self.file, self.data


class HuggingFaceTokenizer(Foreign):
    """A tokenizer.json, by the package `tokenizers`."""

    kind, file = "huggingface", "hf_tokenizer.json"

    def __init__(self, data: bytes, name: str):
        super().__init__(data, name)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads are the callers' own
        tokenizers = needed("tokenizers", name)
        try:
            spec = json.loads(data)
            spec |= {"truncation": None, "padding": None}
            spec["model"]["dropout"] = None
            self.spec, self.library = spec, tokenizers.Tokenizer.from_str(json.dumps(spec))
            self.vocab: dict[str, int] = self.library.get_vocab()
            self._size = 1 + max(self.vocab.values())
            assert self._size <= MAX_IDS
        except Exception as e:  # the library raises nothing more exact
            raise ValueError(f"{name}: no tokenizer.json that the package tokenizers {tokenizers.__version__} reads "
                             f"({type(e).__name__}: {str(e)[:200]}); fetch it again") from None
        self.library.encode_special_tokens = True  # as ordinary text
        added = self.library.get_added_tokens_decoder()
        self.special_tokens = {token.content: i for i, token in added.items() if token.special}

    @cached_property
    def fingerprint(self) -> str:
        """Of the parts that decide ids: others (decoder, post_processor, layout of the file) may change."""
        parts = {name: self.spec.get(name) for name in ("normalizer", "pre_tokenizer", "model", "added_tokens")}
        return hash_json({"kind": self.kind, **parts, "bos_token_id": self.bos_token_id})

    @cached_property
    def encoder(self) -> Encoder:
        return Listed(lambda texts: [found.ids for found in self.library.encode_batch_fast(
            texts, add_special_tokens=False)])

    def get_vocab_size(self) -> int:
        return self._size

    def decode(self, ids: Any) -> str:
        return self.library.decode([int(i) for i in ids], skip_special_tokens=False)

    def id_of(self, token: str) -> int | None:
        return self.library.token_to_id(token)

    def ends(self, folder: Path) -> Iterator[str | int]:
        told: list[dict[str, Any]] = []
        for file in (folder / name for name in SIBLINGS):
            if file.is_file():
                try:
                    told.append(dict(json.loads(local(file).read_bytes())))
                except (ValueError, TypeError) as e:
                    raise ValueError(f"{file}: no JSON object ({e}); mend it or take it away") from None
        for name in ("eos_token", "bos_token"):
            tokens = [about.get(name) for about in told]
            yield from (str(token["content"] if isinstance(token, dict) else token) for token in tokens if token)
        yield from (token for token in USUAL_ENDS if token in self.special_tokens)

    def sizes(self) -> Iterator[tuple[int, int]]:
        inside = self.library.get_vocab(with_added_tokens=False)
        cut = json.dumps([self.spec.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")],
                         ensure_ascii=False)
        by_byte, blank = '"ByteLevel"' in cut, BLANK if BLANK in cut else " "
        fallback, unknown = self.spec["model"].get("byte_fallback"), self.spec["model"].get("unk_token")
        for token, i in self.vocab.items():
            if token in self.special_tokens or token == unknown:
                continue
            if fallback and re.fullmatch("<0x[0-9A-F]{2}>", token):
                yield i, 1
            elif by_byte and token in inside:
                yield i, len(token)
            else:
                yield i, len((token.replace(blank, " ") if token in inside else token).encode())


class SentencePieceTokenizer(Foreign):
    """A .model, by the package `sentencepiece`."""

    kind, file = "sentencepiece", "sentencepiece.model"

    def __init__(self, data: bytes, name: str):
        super().__init__(data, name)
        sentencepiece = needed("sentencepiece", name)
        try:
            self.library = sentencepiece.SentencePieceProcessor(model_proto=data)
            size = self.library.vocab_size()
            assert 0 < size <= MAX_IDS
        except Exception as e:  # the library raises nothing more exact
            raise ValueError(f"{name}: no model that the package sentencepiece reads ({type(e).__name__}: "
                             f"{str(e)[:100]}); fetch it again") from None
        self.special_tokens = {self.library.id_to_piece(i): i for i in range(size)
                               if self.library.is_control(i) or self.library.is_unknown(i)}

    @cached_property
    def encoder(self) -> Encoder:
        return Listed(lambda texts: self.library.encode(texts, num_threads=1))

    def get_vocab_size(self) -> int:
        return self.library.vocab_size()

    def decode(self, ids: Any) -> str:
        return self.library.decode([int(i) for i in ids])

    def id_of(self, token: str) -> int | None:
        i = self.library.piece_to_id(token)  # of no piece that of the unknown one
        return i if self.library.id_to_piece(i) == token else None

    def ends(self, folder: Path) -> Iterator[str | int]:
        yield from (i for i in (self.library.eos_id(), self.library.bos_id()) if i >= 0)

    def sizes(self) -> Iterator[tuple[int, int]]:
        for i in range(self.get_vocab_size()):
            if self.library.is_byte(i):
                yield i, 1
            elif not (self.library.is_control(i) or self.library.is_unknown(i) or self.library.is_unused(i)):
                yield i, len(self.library.id_to_piece(i).replace(BLANK, " ").encode())


class IdsTokenizer(Foreign):
    """What stands for a tokenizer that is not at hand: so many ids, of which one ends documents. It
    knows no text: ids are shown as numbers."""

    kind, file, knows_bytes = "ids", None, False

    def __init__(self, vocab_size: int, bos_token_id: int):
        super().__init__(b"", f"ids:{vocab_size}:{bos_token_id}")
        self.bos_token_id, self._size, self.special_tokens = bos_token_id, vocab_size, {}

    @cached_property
    def fingerprint(self) -> str:
        return hash_json({"kind": self.kind, "vocab_size": self._size, "bos_token_id": self.bos_token_id})

    @property
    def encoder(self) -> Encoder:
        raise ValueError(f"--tokenizer {self.name}: it stands for ids and knows no text; name the tokenizer itself")

    @cached_property
    def _table(self) -> np.ndarray:
        return np.ones(self._size, np.int32)

    def get_vocab_size(self) -> int:
        return self._size

    def decode(self, ids: Any) -> str:
        return " ".join(str(int(i)) for i in ids)


class Listed:
    """An encoder from what a library gives: a list of ids for each text."""

    def __init__(self, batch: Callable[[list[str]], list[list[int]]]):
        self.batch = batch

    def __call__(self, texts: Sequence[str]) -> Encoded:
        try:
            found = self.batch(list(texts))
        except (UnicodeError, TypeError):  # a lone surrogate
            found = self.batch([replace_surrogates(text) for text in texts])
        lengths = np.array([len(ids) for ids in found], np.int64)
        return np.fromiter(chain.from_iterable(found), np.uint32, int(lengths.sum())), lengths


def needed(package: str, name: str) -> Any:
    """A package of the extra `hf`. ValueError, which names the tokenizer, where it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ValueError(f"--tokenizer {name}: needs the package {package}, which is not installed; "
                         f"pip install -e '.[hf]'") from None


# ---- opening one ---------------------------------------------------------------------------------

KINDS: Mapping[str, type[HuggingFaceTokenizer] | type[SentencePieceTokenizer]] = {
    ".json": HuggingFaceTokenizer, ".model": SentencePieceTokenizer}


def open_foreign(name: str, eod_token: str | None = None, *, data_path: Path | str | None = None) -> Tokenizer:
    """The tokenizer that a --tokenizer names and that is not in our format; see
    `nanochat.tokenizer.get_tokenizer`."""
    if name.startswith("ids:"):
        return _open_ids(name, eod_token)
    path = place(name)
    if not path.exists() and name in tiktoken.list_encoding_names():
        return RustBPETokenizer.from_pretrained(name, eod_token or "<|endoftext|>")
    path = _find_file(path, data_path)
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{path}: {path.stat().st_size:,} bytes, too large for a tokenizer")
    data = local(path).read_bytes()
    if path.suffix == ".pkl":
        return restore(data, str(path), eod_token)
    tokenizer = KINDS[path.suffix](data, str(path))
    tokenizer.bos_token_id = find_end(tokenizer, path.parent, eod_token)
    return tokenizer


def _find_file(path: Path, data_path: Path | str | None) -> Path:
    """The file of a tokenizer that a path names, itself or in a folder. FileNotFoundError with the
    ways out where there is none."""
    data = f" --data-path {data_path}" if data_path else ""
    train = f"train one with python -m scripts.tok_train{data} --output-dir {path}"
    if path.is_dir():
        found = [file for file in (path / JSON_FILE, path / "tokenizer.pkl", *sorted(path.glob("*.model")))
                 if file.is_file()]
        if not found:
            raise FileNotFoundError(f"{path}: no tokenizer here (tokenizer.json, *.model, tokenizer.pkl); {train}")
        return found[0]
    if not path.is_file():
        raise FileNotFoundError(f"--tokenizer {path}: no such file or folder, and no name of tiktoken's "
                                f"({', '.join(tiktoken.list_encoding_names())}); nothing is fetched from a hub: "
                                f"fetch its tokenizer.json and name that, or {train}")
    if path.suffix not in (*KINDS, ".pkl"):
        raise ValueError(f"--tokenizer {path}: expected a folder, tokenizer.json, FILE.model or tokenizer.pkl")
    return path


def find_end(tokenizer: Foreign, folder: Path, eod_token: str | None) -> int:
    """The id that separates documents: --eod-token, or what the files name. ValueError if they name
    none, or a token that is not there."""
    size = tokenizer.get_vocab_size()
    for end in [eod_token] if eod_token is not None else tokenizer.ends(folder):
        found = end if isinstance(end, int) else tokenizer.id_of(end)
        if found is None and eod_token is not None and eod_token.isdecimal():
            found = int(eod_token)
        if found is not None and 0 <= found < size:
            return found
        if eod_token is not None:
            raise ValueError(f"--eod-token {eod_token}: no token of {tokenizer.name}, which has {size:,} ids")
    raise ValueError(NO_END.format(tokenizer.name, f"{size:,}"))


def _open_ids(name: str, eod_token: str | None) -> IdsTokenizer:
    """ids:VOCAB[:EOD]."""
    match = re.fullmatch(r"ids:(\d{1,9})(?::(\d{1,9}))?", name)
    if match is None or not 2 <= int(match[1]) <= MAX_IDS:
        raise ValueError(f"--tokenizer {name}: expected ids:VOCAB:EOD, the number of ids (at most {MAX_IDS:,}) and "
                         f"the one that ends a document")
    size, end = int(match[1]), eod_token or match[2]
    if end is None:
        raise ValueError(NO_END.format(name, f"{size:,}"))
    if not end.isdecimal() or int(end) >= size:
        raise ValueError(f"--tokenizer {name}: its end of a document is {end}, expected an id below {size:,}")
    return IdsTokenizer(size, int(end))


def open_saved(folder: Path) -> Tokenizer:
    """What `Tokenizer.save` wrote of a tokenizer of this room. ValueError or FileNotFoundError,
    which names the file, where it has changed."""
    saved, json_path = read_description(folder) or {}, folder / JSON_FILE
    if saved["kind"] == IdsTokenizer.kind:
        tokenizer: Foreign = IdsTokenizer(int(saved.get("vocab_size", 0)), saved["bos_token_id"])
    else:
        kind = next((kind for kind in KINDS.values() if kind.kind == saved["kind"]), None)
        if kind is None:
            raise ValueError(f"{json_path}: a tokenizer of the kind {saved['kind']!r}, which this code does not know; "
                             f"{RESTORE}")
        path = folder / str(kind.file)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: missing, though {JSON_FILE} is there; {RESTORE}")
        tokenizer = kind(local(path).read_bytes(), str(path))
        tokenizer.bos_token_id = saved["bos_token_id"]
    refuse_changed(tokenizer, json_path, saved["fingerprint"], tokenizer.file)
    return tokenizer


# ---- nanochat's pickle ---------------------------------------------------------------------------

class Restored:
    """Stands in for tiktoken's class while its pickle is read: it keeps the state and does nothing."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class OneClass(pickle.Unpickler):
    """Reads a pickle that names tiktoken's Encoding and nothing else. What a pickle executes are the
    names that it looks up here; every other one ends the reading."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != ("tiktoken.core", "Encoding"):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return Restored


def restore(data: bytes, name: str, eod_token: str | None) -> RustBPETokenizer:
    """The tokenizer in nanochat's tokenizer.pkl, a pickle of tiktoken's Encoding; nothing in it is
    executed. ValueError for any other pickle."""
    try:
        found = OneClass(BytesIO(data)).load()
        state = found.state
        if isinstance(state, str):  # tiktoken pickles its own encodings by their names
            return RustBPETokenizer.from_pretrained(state, eod_token or "<|endoftext|>")
        ranks, special = dict(state["mergeable_ranks"]), dict(state["special_tokens"])
        if not (all(type(token) is bytes for token in ranks) and all(type(token) is str for token in special)):
            raise ValueError("its tokens are not bytes, or its special tokens no texts")
        encoding = make_encoding(ranks, str(state["pat_str"]), special)
    except OSError:  # of a name
        raise
    except Exception as e:  # whatever a damaged pickle leads to
        why = " ".join(str(e).split())[:200]
        raise ValueError(f"{name}: no tokenizer that nanochat saved ({type(e).__name__}: {why}); nothing in it was "
                         f"executed") from None
    end = eod_token or next((token for token in ("<|bos|>", *USUAL_ENDS) if token in special), None)
    if end is None:
        raise ValueError(NO_END.format(name, f"{encoding.n_vocab:,}"))
    return RustBPETokenizer(encoding, end)
