"""Tokenizers of other programs, each read by the usual library for its format.
`tokenizer.get_tokenizer` imports this module for any tokenizer that is not in our own format.

    --tokenizer=                     read by             copied into a run's tokenizer/ as
    FOLDER, FOLDER/tokenizer.json    tokenizers          hf_tokenizer.json
    gpt2, cl100k_base, ...           tiktoken            ranks.tiktoken, in our format
    tokenizer.pkl (nanochat's)       `read_pickle`       ranks.tiktoken, in our format
    ids:SIZE:EOD_ID                  nothing             no file: it cannot encode text

**Ids** are the library's own, with one exception: text never becomes a special token. "</s>" in a
document is four ordinary characters. Some models (Unigram, WordPiece, WordLevel) find that name in
their vocabulary anyway. Then each of its characters gets the id that it has alone:

    "a </s> b"     the library    _a  </s>  _b        here    _a  <  /  s  >  _b

All other extras of a file are switched off: special tokens around a text, padding, truncation, and
dropout, which would make ids random.

**The end of a document.** These programs have a BOS and an EOS; the stream has one id between
documents, and files that other programs tokenized have EOS there. So we use EOS if the files name
one (tokenizer_config.json or special_tokens_map.json beside tokenizer.json), then BOS, then a
special token with a usual name. --eod-token overrides all of these.

**Bytes.** A byte-level vocabulary writes each byte as one character of an alphabet of 256. Others
write a space as U+2581 and a byte without a piece of its own as <0xE6>. It also begins every text
with a space that is not in the text. That space is one byte too many, so BOS, which precedes it,
counts -1:

    "in  Zeile"     BOS  _in  _  _Z  eile      _: U+2581
                     -1    3  1   2     4      = 9 bytes

A sample text shows whether the bytes of a tokenizer's tokens add up. They do not if a normalizer
changes the text, if characters are unknown, or if WordPiece writes ##. Bits per byte would then be
wrong, so validation reports the loss in nats per token. If only rare texts do not add up
(`PROBES`), a warning names them. Example: if a tokenizer adds a space only to texts that do not
begin with one, "a" and " a" have the same ids.
"""

import json
import logging
import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from io import BytesIO
from itertools import chain, product
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import tiktoken

from nanochat.common import (
    AnyPath,
    as_path,
    check_shape,
    hash_bytes,
    hash_json,
    local_copy,
    parse_json,
)
from nanochat.tokenizer import (
    JSON_FILE,
    MAX_IDS,
    TRIAL,
    CannotEncode,
    Encoded,
    Encoder,
    RustBPETokenizer,
    Tokenizer,
    make_encoding,
    replace_surrogates,
)

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

BLANK = "\u2581"  # how vocabularies that are not byte-level write a space
SAMPLE = "Two words, a  tab\t1.\nNa\u00efve \u6f22\u5b57 \U0001f642"
PROBES = {  # {description of rare documents: an example whose bytes some tokenizers miscount}
    "begin with a space": " x",
    "end with a space": "x ",
    "are empty": "",
    f"contain U+{ord(BLANK):X}": f"x{BLANK}x",
    "contain <0x41>": "x<0x41>x",
    "contain characters that it normalizes": "xe\u0301x\u00a0x\uff21x\ufb01x\rx",
    "contain characters that it does not know": "x\U0010ffffx\u0378x\x01x",
}
# files beside tokenizer.json that may name EOS
SIBLINGS = ("tokenizer_config.json", "special_tokens_map.json")
USUAL_ENDS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|bos|>",
    "<s>",
    "<bos>",
)
NO_END = "{}: does not name the token that ends a document; set --eod-token to its text or id (one of {} ids)"


# ---- one class per format ------------------------------------------------------------------------


class ThirdPartyTokenizer(Tokenizer):
    """A tokenizer of another program. The caller sets `bos_token_id` (see `find_end`)."""

    kind: ClassVar[str]
    vocab: Mapping[str, int]  # {text of a token: id}
    size: int
    # the id of unknown characters; None: every character has an encoding
    unknown: int | None = None
    # candidates for the end of a document, by text or id, the likeliest first
    ends: list[str | int]

    def __init__(self, data: bytes, name: str):
        """`data`: the bytes of its file; `name`: its name in messages. ValueError if they cannot be
        read."""
        self.data, self.name = data, name

    def batch(self, texts: list[str]) -> list[list[int]]:
        """The library's ids of some texts, without special tokens around them."""
        raise NotImplementedError

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Yield (id, number of bytes of text) of every token that is not special."""
        raise NotImplementedError

    def spell(self, token: int) -> list[int]:
        """Encode the characters of a token's own text one by one. [token] if a character has no
        other id."""
        raise NotImplementedError

    def can_be_text(self, token: int) -> bool:
        """Whether some text cannot be encoded without this token."""
        return token == self.unknown or token in self.spell(token)

    @cached_property
    def _reserved(self) -> dict[int, list[int]]:
        """{id: ids of its characters} for BOS and the special tokens, which no text may become. The
        unknown token, and special tokens of one character, may still stand for text."""
        tokens = {*self.special_tokens.values(), self.bos_token_id}
        return {i: self.spell(i) for i in tokens if not self.can_be_text(i)}

    @property
    def encoder(self) -> Encoder:
        return self._encode

    def _encode(self, texts: Sequence[str]) -> Encoded:
        try:
            lists = self.batch(list(texts))
        except (UnicodeError, TypeError):  # a lone surrogate
            lists = self.batch([replace_surrogates(text) for text in texts])
        encoded = _flat(lists)
        if np.isin(encoded[0], list(self._reserved)).any():
            return _flat([[j for i in ids for j in self._reserved.get(i, (i,))] for ids in lists])
        return encoded

    def get_vocab_size(self) -> int:
        return self.size

    @cached_property
    def fingerprint(self) -> str:
        return hash_json(
            {"kind": self.kind, "data": hash_bytes(self.data), "bos_token_id": self.bos_token_id}
        )

    @cached_property
    def _table(self) -> np.ndarray:
        """(vocab_size,) int32: bytes of each token. They need not add up to the bytes of a text."""
        table = np.zeros(self.size, np.int32)
        for i, size in self.sizes():
            table[i] = size
        table[self.bos_token_id] = min(0, 1 - int(table[self.encode("x")].sum()))
        return table

    def _miscounted(self, text: str) -> int:
        """The bytes that the tokens of a document stand for, minus the bytes of its text."""
        try:
            sizes = self._table[self.encode_one(text)]
        except CannotEncode:
            return -len(text.encode())
        # BOS counts -1 only before another token
        return int(sizes.sum() if len(sizes) > 1 else 0) - len(text.encode())

    @cached_property
    def inexact(self) -> list[str]:
        """Descriptions of the documents for which `token_bytes` is not exact."""
        return [description for description, text in PROBES.items() if self._miscounted(text)]

    @cached_property
    def knows_bytes(self) -> bool:  # type: ignore[override]
        """Whether the bytes of a sample's tokens add up. Warns if they do not, or not for all
        documents."""
        if difference := self._miscounted(SAMPLE):
            size = len(SAMPLE.encode())
            log.warning(
                "%s: the tokens of a sample text of %d bytes stand for %d bytes%s, so bits per byte would "
                "be wrong; validation reports the loss in nats per token",
                self.name,
                size,
                size + difference,
                self._unknown_in_sample(),
            )
        elif self.inexact:
            log.warning(
                "%s: bits per byte are not exact for documents that %s",
                self.name,
                " or ".join(self.inexact),
            )
        return not difference

    def _unknown_in_sample(self) -> str:
        """How many tokens of the sample are the unknown token, in brackets; "" if none is. A
        vocabulary of another format can make all text unknown, and training on it would succeed."""
        try:
            ids = self.encode_one(SAMPLE)[1:]  # without BOS
        except CannotEncode:
            return ""
        unknown = int((ids == self.unknown).sum())
        return f" ({unknown} of its {len(ids)} tokens are the unknown token)" if unknown else ""

    def token_bytes(self) -> "torch.Tensor":
        import torch

        return torch.from_numpy(self._table if self.knows_bytes else np.ones(self.size, np.int32))

    def contents(self) -> tuple[dict[str, Any], bytes]:
        return {"kind": self.kind, "file": self.file, "bos_token_id": self.bos_token_id}, self.data

    @classmethod
    def from_saved(cls, saved: Mapping[str, Any], data: bytes, name: str) -> "ThirdPartyTokenizer":
        tokenizer = cls(data if cls.file else str(saved["vocab_size"]).encode(), name)
        tokenizer.bos_token_id = saved["bos_token_id"]
        return tokenizer


def _flat(lists: list[list[int]]) -> Encoded:
    """Concatenate lists of ids; also return their lengths."""
    lengths = np.array([len(ids) for ids in lists], np.int64)
    return np.fromiter(chain.from_iterable(lists), np.uint32, int(lengths.sum())), lengths


class HuggingFaceTokenizer(ThirdPartyTokenizer):
    """A tokenizer.json, read by the package `tokenizers`."""

    kind, file = "huggingface", "hf_tokenizer.json"

    def __init__(self, data: bytes, name: str):
        super().__init__(data, name)
        try:
            import tokenizers
        except ImportError:
            raise ValueError(
                f"--tokenizer {name}: the package tokenizers is not installed; pip install -e "
                f"'.[hf]'"
            ) from None
        try:
            self._load(tokenizers)
            assert 0 < self.size <= MAX_IDS
            self.batch([TRIAL])
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:  # a panic in Rust is not an Exception
            raise ValueError(
                f"{name}: the package tokenizers {tokenizers.__version__} cannot read it "
                f"({type(e).__name__}: {str(e)[:200]}); download it again"
            ) from None

    def _load(self, package: ModuleType) -> None:
        """Read tokenizer.json with truncation, padding and dropout switched off. May raise any
        exception for a broken file."""
        # our callers start threads themselves
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.spec = json.loads(self.data) | {"truncation": None, "padding": None}
        self.spec["model"]["dropout"] = None
        self.library = package.Tokenizer.from_str(json.dumps(self.spec))
        self.library.encode_special_tokens = True  # their names are ordinary text
        self.vocab = self.library.get_vocab()
        self.size = 1 + max(self.vocab.values())
        added = self.library.get_added_tokens_decoder()
        self.special_tokens = {token.content: i for i, token in added.items() if token.special}
        self.ends = [token for token in USUAL_ENDS if token in self.special_tokens]
        # in the model's alphabet
        self.model_vocab = self.library.get_vocab(with_added_tokens=False)
        # these parts show whether the vocabulary is byte-level, and how it writes a space
        steps = json.dumps(
            [self.spec.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")],
            ensure_ascii=False,
        )
        self.by_byte, self.blank = '"ByteLevel"' in steps, BLANK if BLANK in steps else " "
        self.alphabet = package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        model = self.spec["model"]
        if not self.by_byte and not model.get("byte_fallback"):
            self.unknown = (
                model["unk_id"] if "unk_id" in model else self.vocab.get(model.get("unk_token"))
            )

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the parts that determine ids. Others may change: decoder, post_processor, the
        file's layout."""
        parts = {
            name: self.spec.get(name)
            for name in ("normalizer", "pre_tokenizer", "model", "added_tokens")
        }
        return hash_json({"kind": self.kind, **parts, "bos_token_id": self.bos_token_id})

    def batch(self, texts: list[str]) -> list[list[int]]:
        return [
            encoding.ids
            for encoding in self.library.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def decode(self, ids: "Sequence[int] | np.ndarray | torch.Tensor") -> str:
        return self.library.decode([int(i) for i in ids], skip_special_tokens=False)

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Yield (id, bytes). In a byte-level model each character of a token is a byte; otherwise
        count UTF-8."""
        for token, i in self.vocab.items():
            if token in self.special_tokens or i == self.unknown:
                continue
            if self._is_byte(token):
                yield i, 1
            elif self.by_byte and token in self.model_vocab:
                yield i, len(token)
            else:
                yield (
                    i,
                    len(
                        (
                            token.replace(self.blank, " ") if token in self.model_vocab else token
                        ).encode()
                    ),
                )

    def spell(self, token: int) -> list[int]:
        """Write a token's text in the model's alphabet and let the model encode each character."""
        text = self.library.id_to_token(token) or ""
        if self._is_byte(text):
            return [token]
        if text not in self.model_vocab:
            text = (
                self.alphabet.pre_tokenize_str(text)[0][0]
                if self.by_byte
                else text.replace(" ", self.blank)
            )
        try:
            return [
                token.id for character in text for token in self.library.model.tokenize(character)
            ]
        except Exception:  # the vocabulary has neither this character nor an unknown token
            return [token]

    def _is_byte(self, token: str) -> bool:
        """Whether a token such as <0xE6> stands for one byte."""
        return bool(
            self.spec["model"].get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", token)
        )


class IdsTokenizer(ThirdPartyTokenizer):
    """Stands for a tokenizer that is not available. `data` is the number of ids, and one of them
    ends documents. It cannot encode text, and decodes ids to numbers."""

    kind = "ids"
    file = None
    knows_bytes = False

    def __init__(self, data: bytes, name: str):
        super().__init__(data, name)
        self.size = int(data)
        self.vocab = {}
        self.special_tokens = {}
        self.ends = []

    @property
    def encoder(self) -> Encoder:
        raise ValueError(
            f"--tokenizer {self.name}: cannot encode text; name the tokenizer that can"
        )

    def can_be_text(self, token: int) -> bool:
        return False

    def decode(self, ids: "Sequence[int] | np.ndarray | torch.Tensor") -> str:
        return " ".join(str(int(i)) for i in ids)


# ---- opening one ---------------------------------------------------------------------------------

SAVED = {kind.kind: kind for kind in (HuggingFaceTokenizer, IdsTokenizer)}


def open_third_party(name: str, eod_token: str | None = None) -> Tokenizer:
    """Open another program's tokenizer, which --tokenizer names; see
    `nanochat.tokenizer.get_tokenizer`."""
    path = as_path(name)
    if not path.exists() and name in tiktoken.list_encoding_names():
        return RustBPETokenizer.from_pretrained(name, eod_token or "<|endoftext|>")
    if name.startswith("ids:"):
        match = re.fullmatch(r"ids:(\d{1,9})(?::(\d{1,9}))?", name)
        if match is None or not 2 <= int(match[1]) <= MAX_IDS:
            raise ValueError(
                f"--tokenizer {name}: expected ids:SIZE:EOD_ID, the number of ids (at most {MAX_IDS:,}) "
                f"and the id that ends a document"
            )
        tokenizer: ThirdPartyTokenizer = IdsTokenizer(match[1].encode(), name)
        tokenizer.ends = [int(match[2] or -1)]
    else:
        path = _find_file(path)
        data = local_copy(path).read_bytes()
        if path.suffix == ".pkl":
            return read_pickle(data, str(path), eod_token)
        tokenizer = HuggingFaceTokenizer(data, str(path))
        tokenizer.ends = [*named_ends(path.parent), *tokenizer.ends]
    tokenizer.bos_token_id = find_end(tokenizer, eod_token)
    return tokenizer


def named_ends(folder: AnyPath) -> list[str | int]:
    """The EOS and BOS that the files beside a tokenizer.json name, EOS first."""
    ends: list[str | int] = []
    siblings = [folder / name for name in SIBLINGS]
    files = [file for file in siblings if file.is_file()]
    values = {
        file: parse_json(
            local_copy(file).read_bytes(), str(file), dict, remedy="repair or delete it"
        )
        for file in files
    }
    for name, file in product(("eos_token", "bos_token"), files):
        token = values[file].get(name)
        token = token.get("content", token) if isinstance(token, dict) else token
        check_shape(token, str | None, str(file), field=name)
        ends += [token] if token else []
    return ends


def _find_file(path: AnyPath) -> AnyPath:
    """The tokenizer file at a path, or in the folder at that path. FileNotFoundError if there is
    none."""
    files = [path / JSON_FILE, path / "tokenizer.pkl"] if path.is_dir() else [path]
    for file in files:
        if file.is_file() and file.suffix in (".json", ".pkl"):
            return file
    raise FileNotFoundError(
        f"--tokenizer {path}: no tokenizer here; expected a folder, tokenizer.json, "
        f"tokenizer.pkl or a tiktoken encoding ({', '.join(tiktoken.list_encoding_names())}); "
        f"SentencePiece's .model is not read: convert it with transformers' AutoTokenizer.from_pretrained(DIR)"
        f".save_pretrained(OUT); the Hugging Face Hub is not searched: download tokenizer.json and name that file, "
        f"or train a tokenizer with python -m scripts.tok_train --output-dir {path}"
    )


def find_end(tokenizer: ThirdPartyTokenizer, eod_token: str | None) -> int:
    """The id that separates documents: --eod-token, or the one that the files name. ValueError if
    neither exists, or if text can become this token."""
    ends = tokenizer.ends
    if eod_token is not None:
        ends = [eod_token, int(eod_token) if eod_token.isdecimal() else -1]
    for end in ends:
        token = tokenizer.vocab.get(end, -1) if isinstance(end, str) else end
        if 0 <= token < tokenizer.size:
            if tokenizer.can_be_text(token):
                raise ValueError(
                    f"{tokenizer.name}: text can become token {end!r}, so it cannot separate documents; "
                    f"name a special token with --eod-token"
                )
            return token
    if eod_token is not None:
        raise ValueError(
            f"--eod-token {eod_token}: {tokenizer.name} has no such token; it has {tokenizer.size:,} ids"
        )
    raise ValueError(NO_END.format(tokenizer.name, f"{tokenizer.size:,}"))


# ---- nanochat's pickle ---------------------------------------------------------------------------


class Restored:
    """Stands in for tiktoken's class while a pickle is read: it stores the state and does nothing
    else."""

    state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class OneClass(pickle.Unpickler):
    """Reads a pickle that names no class but tiktoken's Encoding. A pickle can execute only what
    `find_class` returns, and any other name is an error here."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != ("tiktoken.core", "Encoding"):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return Restored


def read_pickle(data: bytes, name: str, eod_token: str | None) -> RustBPETokenizer:
    """The tokenizer in nanochat's tokenizer.pkl, a pickle of tiktoken's Encoding; nothing in it is
    executed. ValueError for any other pickle."""
    try:
        state = OneClass(BytesIO(data)).load().state
        if isinstance(state, str):  # tiktoken pickles its own encodings by their names
            return RustBPETokenizer.from_pretrained(state, eod_token or "<|endoftext|>")
        ranks, special = dict(state["mergeable_ranks"]), dict(state["special_tokens"])
        if not (
            all(type(token) is bytes for token in ranks)
            and all(type(token) is str for token in special)
        ):
            raise ValueError("its tokens are not bytes, or its special tokens are not strings")
        encoding = make_encoding(ranks, str(state["pat_str"]), special)
    except OSError:  # tiktoken could not download a named encoding
        raise
    except Exception as e:  # a damaged pickle may raise anything
        problem = f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"
        raise ValueError(
            f"{name}: not a tokenizer that nanochat saved ({problem}); nothing in it was executed. "
            f"Copy it again"
        ) from None
    end = eod_token or next((token for token in ("<|bos|>", *USUAL_ENDS) if token in special), None)
    if end is None:
        raise ValueError(NO_END.format(name, f"{encoding.n_vocab:,}"))
    return RustBPETokenizer(encoding, end)
