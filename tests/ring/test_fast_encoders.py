"""The fast encoder gives tiktoken's ids for every text; an encoder that does not is replaced by
tiktoken."""

import functools
import importlib.util
import itertools
import logging
import os
import pydoc_data.topics
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanochat.integrations.fast_encoders import (
    FastokensEncoder,
    checked,
    fastest_encoder,
    may_differ,
)
from nanochat.tokenizer import LONG_RUN, SPLIT_PATTERN, RustBPETokenizer, TiktokenEncoder
from tests.toy import examples

needs_fastokens = pytest.mark.skipif(
    importlib.util.find_spec("fastokens") is None,
    reason="fastokens is not installed (extra `fast`)",
)
FAST = settings(max_examples=examples(1.6))
PIECES = st.sampled_from(
    [
        "<|bos|>",
        "<|endoftext|>",
        "<|",
        "\r\n",
        " " * 40,
        "\u3000",
        "\x1c",
        "\x85",
        "\u2028",
        "12345",
        "\u0663\xb2",
        "don't",
        "I'LL",
        "'\u017f",
        "\ud55c\uad6d\uc5b4",
        "\U0001f468\u200d\U0001f469",
        "e\u0301",
        "\ufeff",
        "\x00",
        "a" * 300,
        "\n\n\n  x",
        "\u180e",
        "  \u180e",
        "\ud800",
        "\udc00",
        "\t\t",
        "./\n/",
        "\U0010ffff",
    ]
)
ANY = st.characters(exclude_categories=[])  # includes surrogates and unassigned characters
SHORT = st.one_of(
    st.text(ANY), st.lists(st.one_of(PIECES, st.text(ANY, max_size=5)), max_size=12).map("".join)
)
LONG = st.builds(
    lambda head, piece, n, tail: head + piece * n + tail,
    SHORT,
    st.sampled_from([" ", "x", "1", ".", "\n", " \n", "\u3000", "\u4e2d", "ab ", "'s", "\x1c"]),
    st.sampled_from([1000, 20_000, LONG_RUN - 1, LONG_RUN, LONG_RUN + 3, 100_000]),
    SHORT,
)


@functools.cache
def all_pairs():
    """An encoding in which all pairs of bytes are tokens, so that moving any edge between pieces
    changes the ids."""
    pairs = list(itertools.product(range(256), repeat=2))
    random.Random(3).shuffle(pairs)
    tokens = [bytes([b]) for b in range(256)] + [bytes(pair) for pair in pairs]
    ranks = {token: i for i, token in enumerate(tokens)}
    return tiktoken.Encoding(
        "pairs",
        pat_str=SPLIT_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={"<|bos|>": len(tokens)},
    )


@pytest.fixture(scope="module")
def pairs():
    """(fast encoder of `all_pairs`, which takes a second to load; oracle)."""
    return fastest_encoder(all_pairs()), TiktokenEncoder(all_pairs())


@pytest.fixture(scope="module")
def trained():
    corpus = [*pydoc_data.topics.topics.values(), " " * 5000, "\n" * 700]
    return RustBPETokenizer.train_from_iterator(corpus, 1024).enc


@pytest.fixture(scope="module", params=["trained", "pairs"])
def pair(request, trained, pairs):
    """(fast encoder, oracle)."""
    if request.param == "pairs":
        return pairs
    return FastokensEncoder(TiktokenEncoder(trained)), TiktokenEncoder(trained)


def counting(encoding):
    """tiktoken's encoder, and the list of texts that it encodes."""
    encoded = []

    class Counting(TiktokenEncoder):
        def __call__(self, texts):
            encoded.extend(texts)
            return super().__call__(texts)

    return Counting(encoding), encoded


def assert_same(pair, texts):
    (ids, lengths), (expected, expected_lengths) = (encoder(texts) for encoder in pair)
    assert ids.dtype == expected.dtype == np.uint32 and lengths.dtype == np.int64
    assert np.array_equal(lengths, expected_lengths) and np.array_equal(ids, expected)


# ---- equal ids -----------------------------------------------------------------------------------


@needs_fastokens
@FAST
@given(texts=st.lists(SHORT, max_size=8) | st.lists(LONG, min_size=1, max_size=3))
@example(texts=[])
@example(texts=["", "", "a", ""])
@example(texts=["A'\u017f", "a'\u017fb"])
@example(texts=["a", "  \u180e", "\ud800", "b\udc00", "c"])
@example(texts=["a" + " " * LONG_RUN + "b", " " * (LONG_RUN - 1), "\n" * 100_000])
def test_ids_of_all_of_unicode_and_of_very_long_pieces_are_tiktokens(pair, texts):
    assert_same(pair, texts)


@needs_fastokens
def test_ids_of_every_character_at_edges_of_pieces_are_tiktokens(pairs, monkeypatch):
    fast, _ = pairs
    assert isinstance(fast, FastokensEncoder)
    contexts = ("  {0}", "..{0}", "12{0}34 '{0}x", "\n{0}the {0}\n\n")
    characters = [
        chr(c)
        for c in range(0x110000)
        if not 0xD800 <= c < 0xE000
        and not 0xE200 <= c < 0xF800
        # of planes of ideographs and private use, every 16th
        and (c < 0x20000 or c % 16 == 0)
    ]
    odd = [c for c in characters if may_differ(c)]
    for some in (odd, sorted(set(characters) - set(odd))):
        texts = [
            "".join(context.format(c) for c in some[i : i + 64] for context in contexts)
            for i in range(0, len(some), 64)
        ]
        oracle, by_tiktoken = counting(all_pairs())
        monkeypatch.setattr(fast, "oracle", oracle)
        assert_same(pairs, texts)
        assert (not by_tiktoken) == (some[0] != odd[0])


# ---- threads -------------------------------------------------------------------------------------


@needs_fastokens
def test_several_threads_at_once_get_the_ids_of_tiktoken(pair):
    batches = [
        [f"{i} {text}", text[i:], "\u180e" * (i % 3), "\ud800" * (i % 2)]
        for i, text in enumerate(pydoc_data.topics.topics.values())
    ]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda texts: assert_same(pair, texts), batches * 2))


@needs_fastokens
@pytest.mark.skipif(
    not os.path.isdir("/proc/self/task") or not hasattr(os, "sched_setaffinity"),
    reason="counts threads and chooses CPUs as Linux does",
)
def test_it_starts_no_thread_leaves_the_cpus_as_they_were_and_survives_a_fork():
    program = """if True:
        import os, signal
        import numpy
        from nanochat.tokenizer import RustBPETokenizer
        tokens = lambda: sorted(os.listdir("/proc/self/task"))
        before, cpus = tokens(), os.sched_getaffinity(0)
        tok = RustBPETokenizer.train_from_iterator(["a b c the cat sat on the mat 123 " * 9], 270)
        texts = ["the cat " * 40_000, *["mat " * 100] * 100]
        trained = tokens()
        ids = tok.encode_flat(texts, num_threads=1)[0]
        assert type(tok.encoder).__name__ == "FastokensEncoder" and len(ids) > 80_000
        assert os.sched_getaffinity(0) == cpus
        names = {open(f"/proc/self/task/{t}/comm").read().strip() for t in tokens()}
        assert tokens() == trained and not any("fastokens" in name for name in names), names
        child = os.fork()
        if not child:
            signal.alarm(60)
            os._exit(0 if (tok.encode_flat(texts, num_threads=1)[0] == ids).all() else 3)
        assert os.waitpid(child, 0)[1] == 0
        print("done")"""
    env = {k: v for k, v in os.environ.items() if not k.startswith("FASTOKENS")} | {
        "OMP_NUM_THREADS": "1"
    }
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert run.stdout == "done\n", run.stderr


# ---- batches for tiktoken ------------------------------------------------------------------------


class Panic(BaseException):
    """Like a panic in Rust."""


@needs_fastokens
@pytest.mark.parametrize("error", [ValueError, Panic])
def test_a_batch_on_which_fastokens_raises_is_encoded_by_tiktoken(pairs, monkeypatch, error):
    fast, _ = pairs
    inner, (count, by_tiktoken) = fast.batch, counting(all_pairs())

    def batch(texts):
        if any("bad" in text for text in texts):
            raise error("no")
        return inner(texts)

    monkeypatch.setattr(fast, "batch", batch)
    monkeypatch.setattr(fast, "oracle", count)
    assert_same(pairs, ["one", "bad two", "", "three"])
    assert_same(pairs, ["one", "", "three"])
    assert by_tiktoken == ["one", "bad two", "", "three"]


# ---- the choice ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["one id", "one text", "drops the tail"])
def test_a_wrong_encoder_is_replaced_with_a_warning_that_shows_the_text(trained, caplog, wrong):
    oracle = TiktokenEncoder(trained)

    def encoder(texts):
        ids, lengths = oracle(texts)
        if (wrong == "one id" and 124 in ids) or (wrong == "one text" and "\u2028" in texts[0]):
            ids = ids ^ np.uint32(1)
        return (ids[:-1] if wrong == "drops the tail" and len(ids) > 9000 else ids), lengths

    assert checked(encoder, oracle) is oracle
    assert [r.levelno for r in caplog.records] == [
        logging.WARNING
    ] and "gives different ids for" in caplog.text


def test_without_fastokens_or_with_a_pattern_that_was_not_compared_it_is_tiktoken(
    trained, caplog, monkeypatch
):
    encoding = tiktoken.Encoding(
        "p", pat_str=r"\w+|\W", mergeable_ranks=trained._mergeable_ranks, special_tokens={}
    )
    assert type(fastest_encoder(encoding)) is TiktokenEncoder
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert (
        type(RustBPETokenizer(trained, "<|bos|>").encoder) is TiktokenEncoder and not caplog.records
    )


@needs_fastokens
def test_a_vocabulary_that_fastokens_cannot_load_is_left_to_tiktoken_with_a_warning(caplog):
    ranks = {bytes([b]): b for b in range(256)} | {b"abc": 256}  # neither ab nor bc
    encoding = tiktoken.Encoding(
        "odd", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    encoder = fastest_encoder(encoding)
    assert type(encoder) is TiktokenEncoder and "cannot load" in caplog.text
    assert encoder(["abc"])[0].tolist() == [256]
