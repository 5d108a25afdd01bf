"""The tokenizer: nanochat's calls, sizes of ids, crashes while saving, tiktoken's encodings, and the
two scripts."""

import re

import numpy as np
import pytest
import requests
import tiktoken
import tiktoken.load
import torch

from nanochat import tokenizer as tokenizer_module
from nanochat.tokenizer import (
    SPLIT_PATTERN,
    RustBPETokenizer,
    get_token_bytes,
    get_tokenizer,
)
from scripts import tok_eval, tok_train
from tests.spec.test_tokenizer import CORPUS, VOCAB_SIZE
from tests.toy import write_parquet

pytestmark = pytest.mark.usefixtures("base_dir")


@pytest.fixture(scope="session")
def tok():
    return RustBPETokenizer.train_from_iterator(CORPUS, VOCAB_SIZE)


@pytest.fixture(scope="session")
def other():
    return RustBPETokenizer.train_from_iterator(CORPUS, VOCAB_SIZE - 100)


@pytest.fixture
def encodings(monkeypatch):
    """{name: encoding} that tiktoken can load; for other names it has no network."""
    available = {}

    def get_encoding(name):
        if name in available:
            return available[name]
        raise requests.ConnectionError("x" * 999)

    monkeypatch.setattr(tiktoken, "get_encoding", get_encoding)
    return available


# ---- ids -----------------------------------------------------------------------------------------


def test_a_run_of_a_million_spaces_is_encoded_although_the_regex_engine_fails(tok):
    text = "a" + " " * 1_000_000 + "b\ud800"
    with pytest.raises(ValueError, match="stack size"):
        tok.enc._core_bpe.encode_to_tiktoken_buffer(text[:-1], frozenset())
    ids = tok.encode_one(text)
    assert tok.decode(ids[1:]) == text[:-1] + "\ufffd" and ids[1:].tolist() == tok.encode(text)


def test_encode_keeps_nanochats_calls(tok):
    bos, end = tok.get_bos_token_id(), tok.encode_special("<|user_end|>")
    plain = tok.enc.encode_ordinary("hello")
    assert tok("hello") == tok.encode("hello") == plain and all(
        type(i) is int for i in tok("hello")
    )
    assert tok.encode("hello", prepend="<|bos|>", append=end) == [bos, *plain, end]
    assert tok.encode(["hello", ""], prepend=0, append="<|user_end|>", num_threads=2) == [
        [0, *plain, end],
        [0, end],
    ]
    assert tok.encode("hello", append=0) == [*plain, 0]
    assert tok.encode([]) == [] and tok.encode("") == []
    assert tok.decode(torch.tensor(plain)) == tok.decode(np.array(plain, np.uint16)) == "hello"
    with pytest.raises(ValueError, match=r"'<\|nope\|>'.*<\|bos\|>"):
        tok.encode_special("<|nope|>")
    with pytest.raises(TypeError, match="list"):
        tok.encode_flat("one text")


@pytest.mark.parametrize("vocab_size, dtype", [(65536, np.uint16), (65537, np.uint32)])
def test_ids_take_four_bytes_from_65537_tokens_on(tok, vocab_size, dtype):
    enc = tiktoken.Encoding(
        "t",
        pat_str=SPLIT_PATTERN,
        mergeable_ranks=tok.enc._mergeable_ranks,
        special_tokens={"<|bos|>": vocab_size - 1},
    )
    large = RustBPETokenizer(enc, "<|bos|>")
    assert large.encode_one("a").tolist() == [vocab_size - 1, 97] and large.token_dtype == dtype


# ---- training ------------------------------------------------------------------------------------


def test_too_little_text_for_the_vocabulary_is_an_error_that_counts_it():
    with pytest.raises(
        ValueError, match=r"vocabulary of 1,000: 1 documents with 17 characters give 275 tokens"
    ):
        RustBPETokenizer.train_from_iterator(["hello world hello"], 1000)
    with pytest.raises(ValueError, match="at least 265"):
        RustBPETokenizer.train_from_iterator(CORPUS, 264)


# ---- disk ----------------------------------------------------------------------------------------


def test_the_fingerprint_covers_ranks_pattern_and_special_tokens_and_not_the_training(tok):
    def fingerprint(ranks=None, pattern=SPLIT_PATTERN, bos="<|bos|>", training=None, **special):
        enc = tiktoken.Encoding(
            "t",
            pat_str=pattern,
            mergeable_ranks=ranks or tok.enc._mergeable_ranks,
            special_tokens=tok.enc._special_tokens | special,
        )
        return RustBPETokenizer(enc, bos, training=training).fingerprint

    a, b = [token for token, rank in tok.enc._mergeable_ranks.items() if rank in (500, 501)]
    swapped = tok.enc._mergeable_ranks | {
        a: tok.enc._mergeable_ranks[b],
        b: tok.enc._mergeable_ranks[a],
    }
    assert fingerprint() == fingerprint(training={"documents": 3}) == tok.fingerprint
    different = [
        tok.fingerprint,
        fingerprint(swapped),
        fingerprint(pattern=SPLIT_PATTERN + "|x"),
        fingerprint(bos="<|user_end|>"),
        fingerprint(extra=5000),
    ]
    assert len(set(different)) == 5


def test_a_different_tokenizer_is_not_written_over_another_and_the_same_one_is_not_written_again(
    tok, other, tmp_path
):
    tok.save(tmp_path)
    inodes = {path: path.stat().st_ino for path in tmp_path.iterdir()}
    tok.save(tmp_path)
    with pytest.raises(ValueError, match=r"holds a different tokenizer.*--output-dir.*--force"):
        other.save(tmp_path)
    assert {path: path.stat().st_ino for path in tmp_path.iterdir()} == inodes and len(inodes) == 2
    (tmp_path / "ranks.tiktoken").write_bytes(b"truncated")
    tok.save(tmp_path)
    assert RustBPETokenizer.from_directory(tmp_path).fingerprint == tok.fingerprint
    other.save(tmp_path, force=True)
    assert RustBPETokenizer.from_directory(tmp_path).fingerprint == other.fingerprint


def test_a_crash_between_the_two_files_leaves_no_tokenizer_rather_than_a_mixture(
    tok, other, tmp_path, monkeypatch
):
    tok.save(tmp_path)

    monkeypatch.setattr(tokenizer_module, "write_json", None)
    with pytest.raises(TypeError):
        other.save(tmp_path, force=True)
    assert (tmp_path / "ranks.tiktoken").is_file()
    with pytest.raises(FileNotFoundError, match="no tokenizer here"):
        RustBPETokenizer.from_directory(tmp_path)


def test_the_default_tokenizer_is_that_of_the_base_directory_or_an_error_with_the_next_command(
    tok, base_dir
):
    with pytest.raises(
        FileNotFoundError,
        match=r"no tokenizer here; .*scripts\.tok_train --output-dir .*--vocab-size 4096 for a small",
    ):
        get_tokenizer()
    with pytest.raises(
        FileNotFoundError, match=r"scripts\.tok_train --data-path my/texts --output-dir"
    ):
        get_tokenizer(data_path="my/texts")
    tok.save(base_dir / "tokenizer")
    assert get_tokenizer().fingerprint == tok.fingerprint
    assert torch.equal(get_token_bytes(), tok.token_bytes())


def test_the_tokenizer_in_the_data_folder_comes_before_that_of_the_base_directory(
    tok, other, tmp_path, base_dir
):
    tok.save(base_dir / "tokenizer")
    other.save(tmp_path / "data/tokenizer")
    write_parquet(tmp_path / "data/a.parquet", ["a text"])
    for data_path in (tmp_path / "data", tmp_path / "data/a.parquet"):
        assert get_tokenizer(data_path=data_path).fingerprint == other.fingerprint
    assert get_tokenizer(data_path=tmp_path).fingerprint == tok.fingerprint


def test_a_tiktoken_encoding_has_endoftext_as_bos_survives_saving_and_an_absent_one_is_one_sentence(
    tok, tmp_path, encodings
):
    with pytest.raises(OSError, match=r"'gpt2'.*TIKTOKEN_CACHE_DIR") as e:
        RustBPETokenizer.from_pretrained("gpt2")
    assert len(str(e.value)) < 200
    with pytest.raises(ValueError, match=r"'gpt9'.*gpt2"):
        RustBPETokenizer.from_pretrained("gpt9")
    encodings["gpt2"] = tiktoken.Encoding(
        "gpt2",
        pat_str=r"\w+|\W",
        mergeable_ranks=tok.enc._mergeable_ranks,
        special_tokens={"<|endoftext|>": 60000},
    )
    gpt2 = RustBPETokenizer.from_pretrained("gpt2")
    assert gpt2.get_bos_token_id() == 60000 and gpt2.get_vocab_size() == 60001
    assert gpt2.token_bytes().shape == (60001,) and gpt2.token_bytes()[5000:].sum() == 0
    gpt2.save(tmp_path)
    loaded = RustBPETokenizer.from_directory(tmp_path)
    assert loaded.fingerprint == gpt2.fingerprint and loaded.encode("a 1") == gpt2.encode("a 1")


# ---- scripts -------------------------------------------------------------------------------------


@pytest.fixture
def data_dir(tmp_path):
    for i in range(4):
        write_parquet(
            tmp_path / "data" / f"shard_{i}.parquet", [f"only in file {i}", *CORPUS[i::4]], 50
        )
    return tmp_path / "data"


def run_train(data_dir, *flags):
    return tok_train.main(["--data-path", str(data_dir), "--vocab-size", "600", *flags])


def test_tok_train_reads_the_train_files_lists_them_and_is_deterministic(
    data_dir, tmp_path, base_dir, capsys
):
    assert run_train(data_dir, "--doc-cap=100") == 0
    out, trained = capsys.readouterr().out, get_tokenizer()
    assert run_train(data_dir, "--doc-cap=100", "--output-dir", str(tmp_path / "again")) == 0
    first, again = (
        p.joinpath("tokenizer.json").read_bytes()
        for p in (base_dir / "tokenizer", tmp_path / "again")
    )
    assert first == again
    num = sum(1 + len(CORPUS[i::4]) for i in range(3))
    assert [f["name"] for f in trained.training["files"]] == [
        "shard_0.parquet",
        "shard_1.parquet",
        "shard_2.parquet",
    ]
    assert trained.training["documents"] == num and trained.training["characters"] < 100 * num
    assert (
        out.startswith("training a tokenizer of 600 tokens on ")
        and "shard_0.parquet to shard_2.parquet" in out
    )
    assert re.search(
        rf"validation: shard_3.parquet \({1 + len(CORPUS[3::4])} documents\), \d\d.\d% of all bytes",
        out,
    )
    assert re.search(
        rf"note: --doc-cap=100 truncated \d+ of {num} documents and dropped \d\d% of the char", out
    )


def test_tok_train_warns_of_a_last_book_that_validates_as_a_run_does(tmp_path, base_dir, capsys):
    """Regression: it trained without a warning, and the fix needed --force."""
    for number in range(12):
        (tmp_path / f"book{number:02d}.txt").write_text("\n".join(CORPUS))
    assert run_train(tmp_path) == 0
    out = capsys.readouterr().out
    assert "validation: book11.txt (1 document), 8.3% of all bytes" in out
    assert re.search(r"warning: .*book11.txt is a single document.*--val-fraction=0.05", out)


def test_long_documents_are_cut_only_if_the_data_has_more_characters_than_are_read(
    tmp_path, base_dir, capsys
):
    """Regression: of a folder of books, 96 % of the characters were dropped, and the note called
    that fine."""
    books = ["".join(CORPUS)[at : at + 15_000] for at in (0, 5_000, 10_000)]
    for i, book in enumerate(books):
        write_parquet(tmp_path / "data" / f"{i}.parquet", [book], 1)
    total = sum(map(len, books[:2]))
    run_train(tmp_path / "data", f"--max-chars={total}")
    assert (
        get_tokenizer().training["characters"] == total
        and "truncated" not in capsys.readouterr().out
    )
    run_train(tmp_path / "data", f"--max-chars={total - 1}", f"--output-dir={tmp_path / 'less'}")
    out = capsys.readouterr().out
    assert get_tokenizer(tmp_path / "less").training["characters"] == 20_000
    assert "note: --doc-cap=10000 truncated 2 of 2 documents" in out
    assert (
        f"because the data has more than --max-chars={total - 1:,}" in out and "fine for" not in out
    )


def test_tok_train_reuses_a_tokenizer_and_refuses_at_once_to_replace_another(
    data_dir, base_dir, capsys, monkeypatch
):
    run_train(data_dir, "--max-chars", "60000")
    assert len(get_tokenizer().training["files"]) < 3
    write_parquet(data_dir / "shard_4.parquet", ["a later shard"])
    with monkeypatch.context() as m:
        m.setattr(tok_train, "train", None)
        assert run_train(data_dir, "--max-chars", "60000") == 0  # unread shards do not matter
        assert "reused" in capsys.readouterr().out
        for changed in ("--vocab-size=500", "--max-chars=70000"):
            with pytest.raises(
                ValueError, match=r"different arguments \((vocab_size|max_chars) was .*--force"
            ):
                run_train(data_dir, "--max-chars", "60000", changed)
    (base_dir / "tokenizer" / "ranks.tiktoken").write_bytes(b"")
    with pytest.raises(
        ValueError,
        match=r"tokenizer\.json or ranks\.tiktoken is damaged .*scripts\.tok_train --force",
    ):
        run_train(data_dir, "--max-chars", "60000")
    assert run_train(data_dir, "--vocab-size=500", "--force") == 0
    assert get_tokenizer().get_vocab_size() == 500 and "reused" not in capsys.readouterr().out


def test_tok_train_says_when_commands_on_the_data_use_another_tokenizer(
    data_dir, other, base_dir, capsys
):
    assert run_train(data_dir) == 0 and "note" not in capsys.readouterr().out
    other.save(data_dir / "tokenizer")
    assert run_train(data_dir) == 0
    note = f"commands on {data_dir} use {data_dir}/tokenizer unless you pass --tokenizer={base_dir}"
    assert note in capsys.readouterr().out


def test_tok_eval_measures_the_tokenizer_in_the_data_folder(
    data_dir, tok, other, base_dir, capsys, encodings
):
    tok.save(base_dir / "tokenizer")
    other.save(data_dir / "tokenizer")
    assert tok_eval.main(["--data-path", str(data_dir)]) == 0
    out = capsys.readouterr().out
    assert f"tokenizer {data_dir}/tokenizer, " in out and other.fingerprint in out


def test_tok_eval_says_which_splits_are_cut_by_max_chars(
    data_dir, tok, base_dir, capsys, encodings
):
    """Regression: train and val looked like all of the text."""
    tok.save(base_dir / "tokenizer")
    val = sum(map(len, ["only in file 3", *CORPUS[3::4]]))
    assert tok_eval.main(["--data-path", str(data_dir), f"--max-chars={val}"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "cut after" in line]
    assert lines == [f"train: cut after --max-chars={val:,} characters; there is more of it"]


def test_tok_eval_without_a_tokenizer_names_the_command_that_trains_one_on_the_data(data_dir):
    with pytest.raises(FileNotFoundError, match=f"tok_train --data-path {data_dir} --output-dir"):
        tok_eval.main(["--data-path", str(data_dir)])


def test_tok_eval_prints_bytes_per_token_and_works_without_peers(
    data_dir, tok, tmp_path, capsys, encodings
):
    encodings["gpt2"] = tiktoken.Encoding(
        "bytes",
        pat_str=r"(?s:.)",
        special_tokens={"<|endoftext|>": 256},
        mergeable_ranks={bytes([i]): i for i in range(256)},
    )
    tok.save(tmp_path / "t")
    assert (
        tok_eval.main(["--tokenizer-dir", str(tmp_path / "t"), "--data-path", str(data_dir)]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert "not available" in lines[0] and "cl100k_base" in lines[0]
    rows = {line.split()[0]: line.split() for line in lines[2:]}
    assert {"english", "korean", "chinese", "emoji", "train", "val"} <= set(rows)
    text = tok_eval.SAMPLES["english"]
    assert rows["english"][1:4] == [
        str(len(text)),
        f"{len(text) / len(tok.encode(text)):.2f}",
        "1.00",
    ]
