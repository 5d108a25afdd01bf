r"""
Encoders: from texts to flat token ids, as fast as the machine allows and always exactly tiktoken's.

    texts ["ab ab", "  \u180e", "\ud800"]
            |          |           |
            fastokens  |           fastokens raises, so tiktoken
            |          tiktoken: a character about which the two disagree
            v          v           v
    (ids [bos, ...  bos, ...  bos, ...], lengths [3, 4, 4])

tiktoken is the definition and always there. fastokens (extra `fast`) gives the same ids several times as fast;
where it is installed, knows the pattern and passes the check, `fastest_encoder` takes it, else tiktoken.

Invariants
- Every encoder gives tiktoken's ids for every text, so which one served is in no fingerprint and never changes a row.
- Before it is used the fast encoder encodes a built-in hard sample; at the first difference it is refused, with a
  warning that shows the difference. That finds a broken build; the classes below came from the full comparison.
- Calls may come from many threads at once; encoding releases the GIL and starts no threads of its own (`_native`).

Where fastokens 0.3.5 and tiktoken 0.14.0 differ. Compared: every character in 16 contexts with a vocabulary of all
pairs of bytes (so that every edge between pieces shows), long runs, shared prefixes, vocabularies of few letters.
- U+180E is white space for PCRE2, which cuts for fastokens, and not for tiktoken: texts with it go to tiktoken.
- 65,536 or more spaces: tiktoken fails at a million and is then given the run in parts, which may make other tokens
  than the whole run. Texts that may hold such a run go to tiktoken, so that there is one answer.
- A few patterns (o200k_base is one) fastokens cuts by hand, without the contraction "'" and U+017F: patterns are
  handed over as "(?:...)", in which it does not recognize them and uses PCRE2. Ours is an exception, see below.
- Lone surrogates have no UTF-8: fastokens raises, tiktoken replaces them. A text that raises goes to tiktoken.
- Other classes (`\w`, `\d`, `.`, `$`) may hold other characters for PCRE2: a pattern with a part that was not
  compared is left to tiktoken. The patterns of this project, gpt2, cl100k_base and o200k_base were compared.
- A vocabulary in which a token is not made by merges of earlier ones cannot be loaded: tiktoken, with a warning.

**Our own pattern** is that of cl100k_base but for numbers: at most two in a row are a piece, there three. fastokens
cuts cl100k_base by hand, six times as fast as PCRE2 cuts anything. So it gets that pattern, and texts that are cut
already behind every second of three or more numbers (`cut_numbers`), where our pattern cuts and none looks across:

    "in 12345 7"  ->  "in 12" "34" "5 7"  ->  in| |12  34  5| |7

Texts with U+017F go to tiktoken (fastokens knows no "'" and U+017F here), and so do those where a character that is
newer than Python's tables might be such a number.

Rejected: gigatoken, faster still, but its patterns are built in and ours is none of them; splintr, with no difference
found, but slower, and it either holds the GIL or uses a pool whose size no caller decides.
"""

import base64
import contextlib
import functools
import itertools
import logging
import os
import re
import tempfile
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import tiktoken

log = logging.getLogger(__name__)

Encoded = tuple[np.ndarray, np.ndarray]

# `\s+(?!\S)` backtracks; about a million spaces in a row exhaust the regex engine of tiktoken and of rustbpe.
LONG_RUN = 65536
_LONG_SPACE = re.compile(rf"(\s{{{LONG_RUN}}})")
_STRIDE = 1024
_SAMPLED_SPACE = re.compile(rf"\s{{{LONG_RUN // _STRIDE}}}")  # in every 1,024th character of a long run

# GPT-4's pattern, but numbers are cut after 2 digits instead of 3: a small vocabulary has better uses for 1,000 ids.
SPLIT_PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
)
# The same with 3, in the words in which fastokens knows it; there U+017F, an "s" to (?i:...), makes no contraction.
_BY_HAND = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
            r"\s*[\r\n]+|\s+(?!\S)|\s+")

# What patterns may be made of: classes compared character by character, letters, and `\s++$` (nothing is left behind
# it; other uses of `$` see a last "\n" differently). No other escape, no dot, no nested class, no range.
_CLASS = r"\\p\{(?:L[ultmo]?|M|N)\}|\\[sSrn]|[A-Za-z '/]"
_COMPARED = re.compile(rf"(?:\\s\+\+\$|{_CLASS}|\[\^?(?:{_CLASS})+\]|\((?:\?(?:i?:|!))?|[)|?*+]|\{{\d+(?:,\d*)?\}})*")


class Encoder(Protocol):
    """What serves a `RustBPETokenizer`; one object is called from many threads."""

    def __call__(self, texts: Sequence[str], first: int | None) -> Encoded:
        """Encode every text as ordinary text, with id `first` (None: nothing) in front of each.

        Returns (ids (sum of lengths,) uint32, lengths (len(texts),) int64); lengths count `first`.
        """


def fastest_encoder(encoding: tiktoken.Encoding) -> Encoder:
    """fastokens where it is installed and gives the ids of `encoding` on the hard sample, else tiktoken."""
    oracle = TiktokenEncoder(encoding)
    try:
        import fastokens  # noqa: F401  # an optional dependency, loaded by `_native`
    except ImportError:
        return oracle
    if not is_compared(encoding._pat_str):
        log.info("encoding with tiktoken: the pattern %r has parts that were not compared", encoding._pat_str)
        return oracle
    try:
        fast = FastokensEncoder(oracle)
    except Exception as e:
        log.warning("encoding with tiktoken, slower: fastokens cannot load this tokenizer: %s", e)
        return oracle
    return checked(fast, oracle)


# ---- tiktoken ------------------------------------------------------------------------------------------------------

class TiktokenEncoder:
    """The oracle. Takes tiktoken's ids as a buffer, so that no Python integer is made; releases the GIL."""

    def __init__(self, encoding: tiktoken.Encoding):
        self.encoding = encoding

    def __call__(self, texts: Sequence[str], first: int | None) -> Encoded:
        head = b"" if first is None else np.uint32(first).tobytes()
        parts: list[Any] = []
        num_bytes = np.empty(len(texts), np.int64)
        for i, text in enumerate(texts):
            ids = self._encode(text)
            parts += (head, ids)
            num_bytes[i] = len(head) + ids.nbytes
        return np.frombuffer(b"".join(parts), np.uint32), num_bytes // 4

    def _encode(self, text: str) -> memoryview:
        try:
            return memoryview(self.encoding._core_bpe.encode_to_tiktoken_buffer(text, frozenset()))
        except UnicodeEncodeError:
            return self._encode(replace_surrogates(text))
        except ValueError:  # a very long run of spaces
            pieces = cut_long_spaces(text)
            if len(pieces) < 2:
                raise
            return memoryview(b"".join(map(self._encode, pieces)))


def replace_surrogates(text: str) -> str:
    """Join pairs of surrogates to the character they mean, put U+FFFD for lone ones: what tiktoken does."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def cut_long_spaces(text: str) -> list[str]:
    """Cut a text inside runs of white space that no regex engine here survives; ["text"] where there are none."""
    return [piece for piece in _LONG_SPACE.split(text) if piece]


# ---- fastokens -----------------------------------------------------------------------------------------------------

class FastokensEncoder:
    """fastokens, with tiktoken for the texts about which they would differ. Pickled as what it encodes."""

    def __init__(self, oracle: TiktokenEncoder):
        pattern = oracle.encoding._pat_str
        self.oracle = oracle
        self.cut = cut_numbers if pattern == SPLIT_PATTERN else None
        self.batch = _native(oracle.encoding, _BY_HAND if self.cut else f"(?:{pattern})").encode_batch_flat

    def __reduce__(self) -> tuple[Any, ...]:
        return fastest_encoder, (self.oracle.encoding,)

    def __call__(self, texts: Sequence[str], first: int | None) -> Encoded:
        runs = [(odd, list(run)) for odd, run in itertools.groupby(texts, is_odd)]
        return _join([self.oracle(run, first) if odd else self._encode(run, first) for odd, run in runs])

    def _encode(self, texts: list[str], first: int | None) -> Encoded:
        try:
            pieces, bounds = self.cut(texts) if self.cut else (texts, slice(None))
            id_bytes, offset_bytes = self.batch(pieces)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException:  # a panic in Rust is no Exception
            return self.oracle(texts, first) if len(texts) == 1 else _join([self._encode([t], first) for t in texts])
        ids, offsets = np.frombuffer(id_bytes, np.uint32), np.frombuffer(offset_bytes, np.int64)[bounds]
        if first is None:
            return ids, np.diff(offsets)
        return np.insert(ids, offsets[:-1], first), np.diff(offsets) + 1


def is_odd(text: str) -> bool:
    """Whether fastokens may differ from tiktoken on a text: U+180E, U+017F, or perhaps a long run of white space.

    Costs next to nothing: a run of 65,536 spaces covers 64 neighbours among every 1,024th character.
    """
    return ("\u180e" in text or "\u017f" in text
            or (len(text) >= LONG_RUN and _SAMPLED_SPACE.search(text[::_STRIDE]) is not None))


def cut_numbers(texts: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Cut texts behind every second of three or more numbers in a row.

    Returns (pieces, bounds (len(texts) + 1,) int64): text i is pieces[bounds[i]:bounds[i + 1]]. ValueError for half a
    surrogate pair, and for such a run with a character of which it is not known whether it is a number.
    """
    cuts: dict[int, list[int]] = {}
    for kind in (True, False):  # text in ASCII, most of it, is looked through several times as fast
        which = [i for i, text in enumerate(texts) if text.isascii() is kind]
        begins = np.cumsum([0, *(len(texts[i]) + 1 for i in which)])
        found = _number_cuts("\n".join([texts[i] for i in which]))
        owners = np.searchsorted(begins, found, side="right") - 1
        for owner, cut in zip(owners.tolist(), (found - begins[owners]).tolist()):
            cuts.setdefault(which[owner], []).append(cut)
    pieces: list[str] = []
    bounds = [0]
    for i, text in enumerate(texts):
        edges = cuts.get(i)
        pieces += [text[a:b] for a, b in itertools.pairwise((0, *edges, len(text)))] if edges else [text]
        bounds.append(len(pieces))
    return pieces, np.array(bounds)


def _number_cuts(text: str) -> np.ndarray:
    """Where in a text to cut: 2, 4, ... behind the start of each run of three or more numbers."""
    unknown = np.empty(0, np.int64)
    if text.isascii():
        number = np.frombuffer(text.encode(), np.uint8) - ord("0") < 10  # unsigned: what is below "0" is above 10
    else:
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        number = codes - ord("0") < 10
        others = np.flatnonzero(codes >= 128)
        kinds = _kinds()[codes[others]]
        number[others] = kinds > 0
        unknown = others[kinds == _UNKNOWN]
    edges = np.flatnonzero(np.diff(number, prepend=False, append=False))
    starts, ends = edges[::2], edges[1::2]
    long = ends - starts > 2
    starts, ends = starts[long], ends[long]
    if (np.searchsorted(starts, unknown, side="right") > np.searchsorted(ends, unknown, side="right")).any():
        raise ValueError("a character of which it is not known whether it is a number")
    counts = (ends - starts - 1) // 2
    nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(starts, counts) + 2 * (nth + 1)


_NUMBER, _UNKNOWN = 1, 2


@functools.cache
def _kinds() -> np.ndarray:
    """(0x110000,) uint8: which characters are numbers (\\p{N}), and which Python's Unicode does not know. No planes but
    the first two have numbers."""
    kinds = np.zeros(0x110000, np.uint8)
    categories = [unicodedata.category(chr(c)) for c in range(0x20000)]
    kinds[:0x20000] = [_NUMBER if c[0] == "N" else _UNKNOWN if c == "Cn" else 0 for c in categories]
    return kinds


def is_compared(pattern: str) -> bool:
    """Whether a pattern is made of parts that mean the same to fastokens' regex engine and to tiktoken's."""
    return _COMPARED.fullmatch(pattern) is not None


def _join(results: list[Encoded]) -> Encoded:
    if len(results) == 1:
        return results[0]
    none = np.empty(0, np.uint32), np.empty(0, np.int64)
    ids, lengths = zip(none, *results)
    return np.concatenate(ids), np.concatenate(lengths)


def _native(encoding: tiktoken.Encoding, pattern: str) -> Any:
    """fastokens' own object for an encoding, without special tokens, so that their text is ordinary text.

    It has two pools. One, for batches, is sized by FASTOKENS_BPE_THREADS when first used: 1 means none. The other
    cuts texts over 16 kB, in as many parts as there were CPUs when the process compiled its first pattern: so that
    happens with one CPU in sight (on Linux; elsewhere the pool stays, and a forked child must not encode).
    """
    from fastokens import Tokenizer

    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
    with tempfile.NamedTemporaryFile(suffix=".tiktoken") as f, _one_cpu():
        f.write(format_ranks(encoding._mergeable_ranks))
        f.flush()
        return Tokenizer.from_tiktoken(f.name, pattern=pattern, special_tokens={})


@contextlib.contextmanager
def _one_cpu() -> Iterator[None]:
    """Let the calling thread see one CPU only, where the system can do that."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def format_ranks(ranks: dict[bytes, int]) -> bytes:
    """The content of a rank file: a line "base64 rank" for each token, in the order of the ranks."""
    return b"".join(b"%s %d\n" % (base64.b64encode(token), rank)
                    for token, rank in sorted(ranks.items(), key=lambda item: item[1]))


# ---- the check -----------------------------------------------------------------------------------------------------

# One character or more of every class that patterns know, and what engines like to disagree about.
_CHARACTERS = ("aZ\u017f\u212a\xe9\xdf\u01c5\u02b0\u4e2d\ud55c\u0301\u20dd1\u0663\xb2\u2167 \t\n\r\x0b\x0c\x1c"
               "\x1f\x85\xa0\u1680\u180e\u200b\u2028\u3000\x00\x7f\u200d\ufeff\ufffd\u0378\ue000\U0001f642\U0010ffff"
               "._/'<|-")
_CONTEXTS = ("  {0}", "..{0}", "12{0}34", "{0}the", "a{0}b", "'{0}x", "'{0}", "{0}\n\n", "\n{0}", "{0}{0}{0}",
             " {0} ", "a'{0}", "{0}'s", "\r\n{0}\r", " .{0}/\n", "A{0}B{0}c", "{0}")


def hard_sample() -> list[str]:
    """Texts of all classes of characters at all kinds of edges, long ones, and ones that share a long prefix."""
    short = ["\n".join(context.format(c) for context in _CONTEXTS) for c in _CHARACTERS]
    long = "".join(text for text in short if not is_odd(text))
    words = "It's 2024: the quick\tbrown fox, WE'LL see...\r\n\r\n  na\xefve \u4e2d\u6587 \U0001f642 [1, 23]\n" * 200
    runs = [words[:9000 + i] + c * 1500 + words[:9000] for i, c in enumerate(" x.\n1\u4e2d")]
    shared = [words[:5000] + "x" + " " * 700 + end for end in ("x", " ", "\n", "\tx", "y", "")]
    return ["", "<|bos|><|endoftext|>", "half \ud83d of \ud83d\ude42", *short, long, *runs, *shared]


def checked(fast: Encoder, oracle: Encoder) -> Encoder:
    """`fast` if it gives the ids of `oracle` on the hard sample, else `oracle`, with a warning of the difference."""
    for text in hard_sample():
        try:
            got = fast([text], 0)[0].tolist()
        except Exception as e:
            got = [f"{type(e).__name__}: {e}"]
        expected = oracle([text], 0)[0].tolist()
        if got != expected:
            at = next((i for i, (a, b) in enumerate(zip(got, expected)) if a != b), min(len(got), len(expected)))
            log.warning("encoding with tiktoken, slower: %s gives other ids for %s...: %s instead of %s at token %d",
                        type(fast).__name__, ascii(text[:40]), got[at:at + 5], expected[at:at + 5], at)
            return oracle
    return fast
