"""Fast encoders: the optional package fastokens encodes texts several times as fast as tiktoken,
and always to exactly tiktoken's ids. `RustBPETokenizer.encoder` imports this module if fastokens is
installed.

    texts ["ab ab", "  U+180E", "U+D800"]
            |          |           |
            fastokens  |           fastokens raises, so tiktoken
            |          tiktoken: a character on which the two disagree
            v          v           v
    (ids of all, back to back, lengths [2, 3, 3])

tiktoken defines the ids and is always installed. `fastest_encoder` returns fastokens if the pattern
is ours and the check below passes. On one core tiktoken encodes 4 million tokens per second and
fastokens 13 million. The ids are equal for every text, so no fingerprint depends on the choice, and
no row changes. Many threads may encode at once; encoding releases the GIL and starts no threads of
its own.

The check encodes a built-in sample of hard texts, to find a broken build. A full comparison of
fastokens 0.3.5 with tiktoken 0.14.0 (every character in 16 contexts, with a vocabulary of all pairs
of bytes, which shows every edge between pieces; long runs, shared prefixes, vocabularies with few
letters) found these differences:
- fastokens cuts text with PCRE2, which counts U+180E as white space; tiktoken does not. tiktoken
  fails on about a million spaces in a row, so we cut such a run into parts, which may change
  tokens. Texts with U+180E, and texts that may have 65,536 spaces in a row, go to tiktoken. So do
  texts with lone surrogates, which make fastokens raise.
- fastokens recognizes a few patterns and replaces them with its own code, which differs slightly.
  So it gets our pattern as "(?:...)", which it does not recognize. Other patterns may have
  character classes with a different meaning in PCRE2, and are left to tiktoken.

Rejected: gigatoken, which is faster, but lacks our pattern; splintr, which is slower and either
holds the GIL or starts a pool whose size the caller cannot set.
"""

import functools
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import tiktoken

from nanochat.tokenizer import (
    LONG_RUN,
    SPLIT_PATTERN,
    Encoded,
    Encoder,
    TiktokenEncoder,
    format_ranks,
)

log = logging.getLogger(__name__)

_STRIDE = 1024
# matches every 1,024th character of a long run
_SAMPLED_SPACE = re.compile(rf"\s{{{LONG_RUN // _STRIDE}}}")


@functools.lru_cache(maxsize=1)  # loading and checking fastokens takes 0.4 s
def fastest_encoder(encoding: tiktoken.Encoding) -> Encoder:
    """fastokens if it gives the ids of `encoding` on the hard sample, else tiktoken."""
    oracle = TiktokenEncoder(encoding)
    if encoding._pat_str != SPLIT_PATTERN:
        return oracle
    try:
        return checked(FastokensEncoder(oracle), oracle)
    except Exception as e:
        log.warning(
            "fastokens cannot load this tokenizer (%s); encoding with tiktoken, which is slower", e
        )
        return oracle


# ---- fastokens -----------------------------------------------------------------------------------


class FastokensEncoder:
    """Encodes a batch with fastokens, or with tiktoken if the two might differ on one of its
    texts."""

    def __init__(self, oracle: TiktokenEncoder):
        self.oracle = oracle
        self.batch = _native(oracle.encoding).encode_batch_flat

    def __call__(self, texts: Sequence[str]) -> Encoded:
        if not any(map(may_differ, texts)):
            try:
                ids, offsets = self.batch(list(texts))
                return np.frombuffer(ids, np.uint32), np.diff(np.frombuffer(offsets, np.int64))
            except (KeyboardInterrupt, SystemExit, MemoryError):
                raise
            except BaseException:  # a panic in Rust is not an Exception
                log.debug("fastokens cannot encode one of %d texts", len(texts), exc_info=True)
        return self.oracle(texts)


def may_differ(text: str) -> bool:
    """Whether fastokens might differ from tiktoken on a text, because it has U+180E or perhaps a
    long run of white space. To be fast, this checks every 1,024th character: a run of 65,536
    includes 64 consecutive ones."""
    return "\u180e" in text or (
        len(text) >= LONG_RUN and _SAMPLED_SPACE.search(text[::_STRIDE]) is not None
    )


def _native(encoding: tiktoken.Encoding) -> Any:
    """fastokens' object for an encoding, without special tokens, so that their names are ordinary
    text.

    fastokens has two thread pools. FASTOKENS_BPE_THREADS sets the size of the pool for batches at
    its first use; 1 means no pool. The other one cuts texts over 16 kB into one part per CPU that
    was visible when the process compiled its first pattern. So we compile with one CPU visible.
    That works on Linux; elsewhere the pool exists, and a forked child must not encode.
    """
    from fastokens import Tokenizer

    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else set()
    with tempfile.NamedTemporaryFile(suffix=".tiktoken") as f:
        f.write(format_ranks(encoding._mergeable_ranks))
        f.flush()
        try:
            if cpus:
                os.sched_setaffinity(0, {min(cpus)})
            return Tokenizer.from_tiktoken(
                f.name, pattern=f"(?:{encoding._pat_str})", special_tokens={}
            )
        finally:
            if cpus:
                os.sched_setaffinity(0, cpus)


# ---- the check -----------------------------------------------------------------------------------

# Characters of every class in patterns, and characters on which regex engines often disagree.
_CHARACTERS = (
    "aZ\u017f\u212a\xe9\xdf\u01c5\u02b0\u4e2d\ud55c\u0301\u20dd1\u0663\xb2\u2167 \t\n\r\x0b\x0c\x1c"
    "\x1f\x85\xa0\u1680\u180e\u200b\u2028\u3000\x00\x7f\u200d\ufeff\ufffd\u0378\ue000\U0001f642\U0010ffff"
    "._/'<|-"
)
_CONTEXTS = (
    "  {0}",
    "..{0}",
    "12{0}34",
    "{0}the",
    "a{0}b",
    "'{0}x",
    "'{0}",
    "{0}\n\n",
    "\n{0}",
    "{0}{0}{0}",
    " {0} ",
    "a'{0}",
    "{0}'s",
    "\r\n{0}\r",
    " .{0}/\n",
    "A{0}B{0}c",
    "{0}",
)


def hard_sample() -> list[str]:
    """Texts with every class of characters at every kind of edge, long texts, and texts with a long
    common prefix."""
    short = ["\n".join(context.format(c) for context in _CONTEXTS) for c in _CHARACTERS]
    long = "".join(text for text in short if not may_differ(text))
    words = (
        "It's 2024: the quick\tbrown fox, WE'LL see...\r\n\r\n  na\xefve \u4e2d\u6587 \U0001f642 [1, 23]\n"
        * 200
    )
    runs = [words[: 9000 + i] + c * 1500 + words[:9000] for i, c in enumerate(" x.\n1\u4e2d")]
    shared = [words[:5000] + "x" + " " * 700 + end for end in ("x", " ", "\n", "\tx", "y", "")]
    return ["", "<|bos|><|endoftext|>", "half \ud83d of \ud83d\ude42", *short, long, *runs, *shared]


def checked(fast: Encoder, oracle: Encoder) -> Encoder:
    """`fast` if it gives the ids of `oracle` on the hard sample, else `oracle`, with a warning."""
    for text in hard_sample():
        if not np.array_equal(fast([text])[0], oracle([text])[0]):
            log.warning(
                "%s gives different ids for %s...; encoding with tiktoken, which is slower",
                type(fast).__name__,
                ascii(text[:40]),
            )
            return oracle
    return fast
