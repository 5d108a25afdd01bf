"""The tokenizer is BPE by its definition, and its files say who it is."""

import base64
import itertools
import json
import pydoc_data.topics

import numpy as np
import pytest
import regex
import tiktoken
import tiktoken.load
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.tokenizer import (
    SPECIAL_TOKENS,
    SPLIT_PATTERN,
    RustBPETokenizer,
    get_token_bytes,
)
from tests.toy import examples

pytestmark = pytest.mark.usefixtures("base_dir")


VOCAB_SIZE = 1024
CORPUS = [
    *pydoc_data.topics.topics.values(),
    *(f"{i} -> 2024 {i**3 * 7919}, naïve café 한국어 中文 🙂" for i in range(300)),
]


PIECES = st.sampled_from(
    [
        *SPECIAL_TOKENS,
        "<|endoftext|>",
        "<|",
        "\r\n",
        " " * 40,
        "\u3000",
        "\x1c",
        "12345",
        "don't",
        "I'LL",
        "한국어",
        "👨‍👩‍👧",
        "e\u0301",
        "\ufeff",
        "\x00",
        "a" * 300,
        "\n\n\n  x",
    ]
)


TEXTS = st.one_of(
    st.text(), st.lists(st.one_of(PIECES, st.text(max_size=5)), max_size=8).map("".join)
)


FAST = settings(max_examples=examples(1))


@pytest.fixture(scope="session")
def tok():
    return RustBPETokenizer.train_from_iterator(CORPUS, VOCAB_SIZE)


def brute_force_ids(tok, text):
    """BPE by its definition: in each piece, join the leftmost pair of lowest rank until no pair has
    a rank."""
    ranks, ids = tok.enc._mergeable_ranks, []
    for piece in regex.findall(SPLIT_PATTERN, text):
        parts = [bytes([b]) for b in piece.encode()]
        while True:
            pairs = [
                (ranks[a + b], i)
                for i, (a, b) in enumerate(itertools.pairwise(parts))
                if a + b in ranks
            ]
            if not pairs:
                break
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] for part in parts]
    return ids


# ---- ids -----------------------------------------------------------------------------------------


@FAST
@given(TEXTS)
def test_ids_are_those_of_brute_force_bpe_decode_to_the_text_and_count_its_bytes(tok, text):
    ids, document = tok.encode(text), tok.encode_one(text)
    assert ids == brute_force_ids(tok, text) == tok.enc.encode_ordinary(text)
    assert tok.decode(ids) == text and tok.decode(document) == "<|bos|>" + text
    assert get_token_bytes(tokenizer=tok)[document.astype(np.int64)].sum() == len(text.encode())


@FAST
@given(st.lists(TEXTS, max_size=12), st.integers(1, 5))
def test_encode_flat_is_bos_and_ordinary_ids_for_any_number_of_threads(tok, texts, num_threads):
    ids, offsets = tok.encode_flat(texts, num_threads=num_threads)
    assert ids.dtype == tok.token_dtype == np.uint16 and offsets.dtype == np.int64
    assert len(offsets) == len(texts) + 1 and offsets[0] == 0 and offsets[-1] == len(ids)
    for text, start, end in zip(texts, offsets, offsets[1:], strict=False):
        assert ids[start:end].tolist() == [tok.get_bos_token_id(), *tok.enc.encode_ordinary(text)]


# ---- disk ----------------------------------------------------------------------------------------


def test_reloading_gives_identical_ids_from_readable_files(tok, tmp_path):
    tok.save(tmp_path / "t")
    loaded = RustBPETokenizer.from_directory(tmp_path / "t")
    assert sorted(p.name for p in (tmp_path / "t").iterdir()) == [
        "ranks.tiktoken",
        "tokenizer.json",
    ]
    assert loaded.fingerprint == tok.fingerprint and loaded.get_special_tokens() == list(
        SPECIAL_TOKENS
    )
    assert loaded.training == tok.training and loaded.get_vocab_size() == VOCAB_SIZE
    assert np.array_equal(loaded.encode_flat(CORPUS)[0], tok.encode_flat(CORPUS)[0])
    assert (
        tiktoken.load.load_tiktoken_bpe(str(tmp_path / "t" / "ranks.tiktoken"))
        == tok.enc._mergeable_ranks
    )


LINES = [b"%s %d\n" % (base64.b64encode(bytes([b])), b) for b in range(256)]


@pytest.mark.parametrize(
    "ranks, edit, problem",
    [
        (None, {}, "missing"),
        (lambda data: data[:5000] + b"\xff" + data[5001:], {}, "damaged"),
        (lambda data: data[:5000], {}, ""),
        (lambda _: b"".join([*LINES, b"YWI= 255\n"]), {}, "distinct whole numbers"),
        (lambda _: b"".join(LINES[1:]), {}, "not every byte has a token"),
        (lambda _: b"".join([*LINES, b"YWI= 256 7\n"]), {}, "damaged"),
        (bytes, None, "not valid JSON"),
        (bytes, {"pattern": "x"}, "has changed since it was saved"),
        (bytes, {"bos_token": "<|user_end|>"}, "has changed since it was saved"),
        (bytes, {"version": 2}, "expected a nanochat-tokenizer of version 1"),
        (bytes, {"special_tokens": {"<|bos|>": 10**9}}, "distinct whole numbers below"),
        (bytes, {"special_tokens": {}}, "unknown; this tokenizer has"),
        (bytes, {"pattern": "("}, "tiktoken cannot use it"),
        (bytes, {"pattern": "x*"}, "tiktoken cannot use it"),
        (bytes, {"special_tokens": []}, "special_tokens"),
        (bytes, {"training": None}, "training"),
    ],
)
def test_a_damaged_or_forged_file_is_one_sentence_that_names_it(
    tok, tmp_path, ranks, edit, problem
):
    tok.save(tmp_path)
    rank_file, json_file = tmp_path / "ranks.tiktoken", tmp_path / "tokenizer.json"
    if ranks is None:
        rank_file.unlink()
    else:
        rank_file.write_bytes(ranks(rank_file.read_bytes()))
    text = json_file.read_text()
    json_file.write_text(text[:50] if edit is None else json.dumps(json.loads(text) | edit))
    pattern = rf"^{tmp_path}/\w+\.\w+(: | or ranks\.tiktoken ).*{problem}.*tok_train"
    with pytest.raises((ValueError, FileNotFoundError), match=pattern):
        RustBPETokenizer.from_directory(tmp_path)
