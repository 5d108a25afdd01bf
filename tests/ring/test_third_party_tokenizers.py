"""Tokenizers of other programs: ids equal to the library's own, bytes that add up, folders that run
directories copy, and pickles that execute nothing."""

import collections
import functools
import json
import os
import pickle
import pydoc_data.topics
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import tiktoken
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from nanochat.integrations.third_party_tokenizers import BLANK, ThirdPartyTokenizer
from nanochat.sources import open_source, scan
from nanochat.tokenizer import RustBPETokenizer, Tokenizer, get_tokenizer
from scripts import base_eval, inspect_data, report, sample, tok_shards, verify
from tests import training
from tests.toy import examples, some_texts

SHARED = Path(__file__).parents[3] / "shared" / "data"
END = "<|endoftext|>"
TEXTS = [
    *some_texts(40, longest=400),
    "The ferry left at six, an hour late, with eleven passengers. " * 9,
    "def f(x):\n    return x  # na\u00efve \u6f22\u5b57\n" * 9,
]


def byte_level():
    """Like GPT-2: a byte-level BPE."""
    library = tokenizers.ByteLevelBPETokenizer()
    library.train_from_iterator(
        TEXTS, vocab_size=340, special_tokens=[END, "<|pad|>"], show_progress=False
    )
    return library._tokenizer


def of_json(model, trainer, pre=None, **changes):
    """A `tokenizers` object of any model, trained on texts that contain the names of its special
    tokens."""
    library = tokenizers.Tokenizer(model)
    if pre is not None:
        library.pre_tokenizer = pre
    library.train_from_iterator([*TEXTS, "a </s> b </s>x <s> [SEP] <unk> " * 50], trainer)
    spec = json.loads(library.to_str())
    spec["model"] |= changes
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def other_kinds():
    """Tokenizers whose models find the names of special tokens in a text, or add a blank only to
    some texts."""
    names = {
        "special_tokens": ["<unk>", "<s>", "</s>", "[SEP]"],
        "vocab_size": 400,
        "show_progress": False,
    }
    unigram = functools.partial(trainers.UnigramTrainer, unk_token="<unk>", **names)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    split = pre_tokenizers.WhitespaceSplit()
    fallback = json.loads(of_json(models.Unigram(), unigram(), pre_tokenizers.Metaspace()).to_str())
    fallback["model"]["vocab"] += [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
    fallback["model"]["byte_fallback"] = True
    return {
        "fallback": tokenizers.Tokenizer.from_str(json.dumps(fallback)),
        "unigram": of_json(models.Unigram(), unigram()),
        "metaspace": of_json(models.Unigram(), unigram(), pre_tokenizers.Metaspace()),
        "wordpiece": of_json(
            models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer(**names), split
        ),
        "wordlevel": of_json(
            models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer(**names), split
        ),
        "merged": of_json(
            models.BPE(unk_token="<unk>"), trainers.BpeTrainer(**names), split, ignore_merges=True
        ),
        "prefix": of_json(
            models.BPE(), trainers.BpeTrainer(initial_alphabet=alphabet, **names), byte_level
        ),
    }


def llama():
    """Like Llama 2: blanks are U+2581, unknown bytes <0x00> .. <0xFF>."""
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace(BLANK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fallback = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *fallback],
        show_progress=False,
        limit_alphabet=30,
    )
    library.train_from_iterator(TEXTS, trainer)
    spec = json.loads(library.to_str())  # the bytes are not special tokens
    spec["added_tokens"] = spec["added_tokens"][:3]
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


KINDS = ("gpt2", "llama", "pickle")  # like those of well-known models


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """{kind: path of a tokenizer}: KINDS, and those of `other_kinds`."""
    folder = tmp_path_factory.mktemp("kinds")
    for name, library in {"gpt2": byte_level(), "llama": llama(), **other_kinds()}.items():
        (folder / name).mkdir()
        library.save(str(folder / name / "tokenizer.json"))
    ranks = {bytes([b]): b for b in range(256)} | {b" t": 256, b"he": 257}
    encoding = tiktoken.Encoding(
        "rustbpe",
        pat_str=r"\s?\S+|\s+",
        mergeable_ranks=ranks,
        special_tokens={"<|bos|>": 258, "<|user_start|>": 259},
    )
    (folder / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    found = {path.stem: path for path in folder.iterdir()}
    return found | {"pickle": found["tokenizer"], "llama": found["llama"] / "tokenizer.json"}


@pytest.fixture(scope="module")
def opened(paths):
    """{kind: tokenizer}."""
    ends = dict.fromkeys(paths.keys() - {*KINDS}, "</s>")
    return {
        name: get_tokenizer(path, eod_token=ends.get(name))
        for name, path in paths.items()
        if name != "tokenizer"
    }


def real_texts():
    """The shared corpus if it lies beside the checkout, else Python's documentation."""
    if files := sorted(SHARED.rglob("*.parquet")):
        return pq.ParquetFile(files[0]).read_row_group(0)["text"].to_pylist()
    return list(pydoc_data.topics.topics.values())


# ---- ids -----------------------------------------------------------------------------------------


def test_ids_are_the_librarys_own_on_real_text(paths, opened):
    texts = [text[:2000] for text in real_texts()[:60]]
    assert sum(map(len, texts)) > 40_000
    theirs = {
        "pickle": [
            pickle.loads(paths["pickle"].read_bytes()).encode_ordinary(text) for text in texts
        ]
    }
    for name, path in (("gpt2", paths["gpt2"] / "tokenizer.json"), ("llama", paths["llama"])):
        library = tokenizers.Tokenizer.from_file(str(path))
        theirs[name] = [library.encode(text, add_special_tokens=False).ids for text in texts]
    for name in KINDS:
        assert opened[name].encode(texts) == theirs[name], name
        ids, offsets = opened[name].encode_flat(texts, num_threads=1)
        assert ids[offsets[:-1]].tolist() == [opened[name].bos_token_id] * len(texts)
        assert opened[name].decode(theirs[name][0]) == texts[0], name
        assert opened[name].encode("a\ud800b") == opened[name].encode("a\ufffdb"), (
            "surrogates as by tiktoken"
        )


PARTS = st.sampled_from(
    [
        "  ",
        "\n\n",
        "the ",
        "\u6f22\u5b57",
        "\U0001f642",
        "</s>",
        "<s>",
        END,
        "<0x41>",
        "\t",
        "x" * 40,
        "<|sep|>",
        " ",
        BLANK,
    ]
)
TEXT = st.lists(st.one_of(PARTS, st.text(max_size=8)), max_size=8).map("".join)


def bytes_counted(tokenizer, text):
    """Bytes of a document between others, as `loss_eval` counts the bytes of its targets."""
    ids = [*tokenizer.encode_one(text).tolist(), tokenizer.bos_token_id]
    sizes = tokenizer.token_bytes().tolist()
    return sum(sizes[y] + min(0, sizes[x]) for x, y in pairwise(ids) if sizes[y] > 0)


@settings(max_examples=examples(1))
@given(text=TEXT)
@example(text="a </s> b</s>c <unk><s>[SEP]<|pad|> <|sep|>x<|endoftext|>")
def test_text_never_becomes_a_special_token_and_bytes_add_up_except_for_documents_in_inexact(
    opened, text
):
    """Regression: "a </s> b" contained the delimiter with Unigram, WordPiece, WordLevel and some
    BPE models; texts that begin with a blank, empty ones, and U+2581."""
    data = text.encode("utf-8", "replace")
    for name, tokenizer in opened.items():
        ids = tokenizer.encode_one(text).astype(np.int64)
        special = {tokenizer.bos_token_id, *tokenizer.special_tokens.values()} - {
            getattr(tokenizer, "unknown", None)
        }
        assert special.isdisjoint(ids[1:].tolist()), name
        if tokenizer.knows_bytes and not any(
            does(what, text) for what in getattr(tokenizer, "inexact", [])
        ):
            assert bytes_counted(tokenizer, text) == len(data), name
        if name in ("gpt2", "pickle") or (name == "llama" and not {BLANK, "\x00"} & {*text}):
            assert tokenizer.decode(ids[1:]) == text, name


def does(what, text):
    """Whether a description in `inexact` fits a document."""
    return {
        "begin with a space": text.startswith(" "),
        "contain U+2581": BLANK in text,
        "contain <0x41>": "<0x" in text,
    }[what]


def test_inexact_bytes_are_described_and_warned_about(opened, paths, caplog):
    inexact = {
        name: tokenizer.inexact
        for name, tokenizer in opened.items()
        if isinstance(tokenizer, ThirdPartyTokenizer) and tokenizer.knows_bytes
    }
    blank = ["contain U+2581"]
    assert inexact == {
        "gpt2": [],
        "llama": blank,
        "prefix": ["begin with a space"],
        "fallback": ["begin with a space", *blank, "contain <0x41>"],
    }
    caplog.clear()
    assert get_tokenizer(paths["gpt2"]).token_bytes().max() > 1 and not caplog.text
    assert get_tokenizer(paths["llama"]).token_bytes().max() > 1
    assert "bits per byte are not exact for documents that contain U+2581" in caplog.text
    tokenizer = get_tokenizer(paths["wordpiece"], eod_token="</s>")
    assert not tokenizer.knows_bytes and set(tokenizer.token_bytes().tolist()) == {1}
    assert "tokenizer.json: the tokens of a sample text of" in caplog.text and "nats" in caplog.text


def test_a_vocabulary_that_does_not_know_the_text_is_warned_about(paths, caplog):
    assert not get_tokenizer(paths["wordlevel"], eod_token="</s>").knows_bytes
    [unknown, total] = re.search(
        r"\((\d+) of its (\d+) tokens are the unknown", caplog.text
    ).groups()
    assert (unknown, total) == ("6", "8")


@pytest.mark.parametrize(
    "kind, end", [("gpt2", "5"), ("llama", "7"), ("unigram", "<unk>"), ("wordlevel", "<unk>")]
)
def test_an_end_that_text_can_become_is_refused(paths, kind, end):
    with pytest.raises(
        ValueError, match=r"text can become token .*, so it cannot separate documents"
    ):
        get_tokenizer(paths[kind], eod_token=end)
    assert get_tokenizer(paths["llama"], eod_token="<unk>").bos_token_id == 0, (
        "every character has bytes"
    )


# ---- the end of a document -----------------------------------------------------------------------


def test_the_end_comes_from_the_flag_then_the_files_then_a_usual_name(paths, opened, tmp_path):
    library = tokenizers.Tokenizer.from_file(str(paths["llama"]))
    assert [opened[name].bos_token_id for name in KINDS] == [0, 2, 258]
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<s>"}}))
    assert get_tokenizer(tmp_path).bos_token_id == 1
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "bos_token": "<s>"})
    )
    assert get_tokenizer(tmp_path).bos_token_id == 2, "tokenizer_config.json comes first"
    assert [get_tokenizer(tmp_path, eod_token=end).bos_token_id for end in ("</s>", "1")] == [2, 1]
    fingerprints = {get_tokenizer(tmp_path, eod_token=str(end)).fingerprint for end in (1, 2, 2)}
    assert len(fingerprints) == 2, "the end of documents decides ids"
    for text, problem in (
        ("[", "not valid JSON"),
        ("[" * 200_000, "not valid JSON"),
        ("[]", "expected an object, got a list"),
        ('{"eos_token": {"x": 1}}', "eos_token: expected a string or null, got an object"),
        ('{"bos_token": [1]}', "bos_token: expected a string or null, got a list"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"tokenizer_config\.json: .*{problem}"):
            get_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def bare(paths, tmp_path_factory):
    """The folder of a tokenizer.json that names no special token."""
    folder = tmp_path_factory.mktemp("bare")
    spec = json.loads((paths["gpt2"] / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**spec, "added_tokens": []}))
    return folder


def test_a_tokenizer_json_without_an_end_is_a_sentence_that_names_the_flag(bare):
    with pytest.raises(
        ValueError,
        match=r"tokenizer\.json: does not name the token that ends.*--eod-token.*340 ids",
    ):
        get_tokenizer(bare)
    assert get_tokenizer(bare, eod_token=END).bos_token_id == 0
    for end in ("340", "<nope>"):
        with pytest.raises(
            ValueError, match=rf"--eod-token {end}: .* has no such token; it has 340 ids"
        ):
            get_tokenizer(bare, eod_token=end)


# ---- copies --------------------------------------------------------------------------------------


def test_a_copy_is_the_same_tokenizer_and_a_changed_one_is_refused(paths, opened, tmp_path):
    files = {"gpt2": "hf_tokenizer.json", "llama": "hf_tokenizer.json", "pickle": "ranks.tiktoken"}
    for name in KINDS:
        opened[name].save(tmp_path / name)
        assert sorted(os.listdir(tmp_path / name)) == sorted([files[name], "tokenizer.json"])
        copy = Tokenizer(str(tmp_path / name))
        assert (
            copy.fingerprint == opened[name].fingerprint == get_tokenizer(paths[name]).fingerprint
        )
        assert copy.encode(TEXTS) == opened[name].encode(TEXTS)
    assert len({tokenizer.fingerprint for tokenizer in opened.values()}) == len(opened)
    copy = tmp_path / "gpt2" / "hf_tokenizer.json"
    copy.write_text(copy.read_text().replace('"<|pad|>"', '"<|pod|>"'))
    with pytest.raises(
        ValueError, match=r"tokenizer\.json or hf_tokenizer\.json has changed since it was saved"
    ):
        get_tokenizer(tmp_path / "gpt2")
    copy.unlink()
    with pytest.raises(FileNotFoundError, match=r"hf_tokenizer\.json: missing"):
        get_tokenizer(tmp_path / "gpt2")
    with pytest.raises(ValueError, match=r"--eod-token </s>: the tokenizer in .* has its own"):
        get_tokenizer(tmp_path / "llama", eod_token="</s>")


def test_parts_that_do_not_decide_ids_do_not_change_the_fingerprint(paths, opened, tmp_path):
    spec = json.loads(paths["llama"].read_text())
    spec |= {
        "truncation": {
            "direction": "Right",
            "max_length": 3,
            "strategy": "LongestFirst",
            "stride": 0,
        },
        "decoder": None,
    }
    spec["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec, indent=4))
    same = get_tokenizer(tmp_path)
    assert same.fingerprint == opened["llama"].fingerprint and same.encode(TEXTS) == opened[
        "llama"
    ].encode(TEXTS)


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, content",
    [
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"not json"),
        ("tokenizer.json", b'{"model": []}'),
        ("tokenizer.pkl", b""),
    ],
)
def test_a_broken_file_is_one_sentence_that_names_it(tmp_path, name, content):
    problem = {
        "tokenizer.json": "the package tokenizers .* cannot read it",
        "tokenizer.pkl": "not a tokenizer that nanochat saved",
    }[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{tmp_path / name}: {problem}"):
        get_tokenizer(tmp_path / name)


@pytest.mark.parametrize(
    "name, problem",
    [
        ("ids:x", "expected ids:SIZE:EOD_ID"),
        ("ids:10", "--eod-token"),
        ("ids:10:10", "--eod-token.*10 ids"),
        ("ids:999999999:0", "at most"),
        ("x.vocab", "expected a folder, tokenizer.json"),
        ("meta/llama", "the Hugging Face Hub is not searched"),
        (".", "no tokenizer here"),
    ],
)
def test_a_name_without_a_tokenizer_is_one_sentence(tmp_path, monkeypatch, name, problem):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.vocab").touch()
    with pytest.raises((ValueError, FileNotFoundError), match=problem):
        get_tokenizer(name)


@pytest.mark.parametrize("name", ["x.model", "."])
def test_sentencepieces_model_is_refused_with_its_conversion(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.model").touch()
    with pytest.raises(
        FileNotFoundError, match=r"--tokenizer \S+: .* convert it with transformers' AutoTokenizer"
    ):
        get_tokenizer(name)


def test_a_saved_tokenizer_of_an_unknown_kind_names_the_other_version(opened, tmp_path):
    opened["gpt2"].save(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**saved, "kind": "sentencepiece"}))
    with pytest.raises(
        ValueError,
        match="kind 'sentencepiece' is unknown to this code; use the version that wrote it",
    ):
        get_tokenizer(tmp_path)


def test_a_package_that_is_not_installed_is_named_with_its_extra(paths, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"the package tokenizers is not installed.*\[hf\]"):
        get_tokenizer(paths["gpt2"])


# ---- texts that a library cannot encode ----------------------------------------------------------


def backtracking(folder):
    """A tokenizer.json whose pattern hits the retry limit of its regex engine on 40 letters a."""
    library = tokenizers.Tokenizer(models.BPE({chr(c): c - 32 for c in range(32, 127)}, []))
    library.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(?:(a+)+)+c"), "isolated")
    library.add_special_tokens([END])
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))


def without_matches(folder):
    """A tokenizer in our format whose pattern matches the empty text."""
    ranks, pattern = {bytes([b]): b for b in range(256)}, "(?=a{40})|[^a]+|a{1,39}"
    encoding = tiktoken.Encoding(
        "x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={END: 256}
    )
    RustBPETokenizer(encoding, END).save(folder)


@pytest.mark.parametrize("make", [backtracking, without_matches])
def test_a_document_that_makes_the_library_panic_is_one_sentence_with_its_place(
    make, tmp_path, capfd
):
    """Regression: a panic in Rust is not an Exception, and ended the process with a traceback."""
    make(tmp_path / "tokenizer")
    tokenizer, texts = get_tokenizer(tmp_path / "tokenizer"), ["ab"] * 7 + ["a" * 60] + ["b a"] * 2
    with pytest.raises(
        ValueError,
        match=r"^text 7 of 10: this tokenizer cannot encode it \(PanicException: .*; it "
        r"begins with 'aaaa",
    ) as caught:
        tokenizer.encode_flat(texts, num_threads=2)
    assert "\n" not in str(caught.value)
    training.write_shard(tmp_path / "text" / "x.parquet", texts)
    source = open_source(scan(tmp_path / "text"), tokenizer)
    with pytest.raises(
        ValueError, match=r"^x\.parquet: row group 0, row 7: this tokenizer cannot encode it"
    ):
        source.read(0, np.arange(4, 9))
    assert len(source.read(0, np.arange(4))) == 4
    assert (
        tok_shards.main(
            [
                f"--input-dir={tmp_path / 'text'}",
                f"--output-dir={tmp_path / 'out'}",
                f"--tokenizer={tmp_path / 'tokenizer'}",
                "--num-workers=1",
            ]
        )
        == 1
    )
    assert re.search(
        r"failed: x\.parquet: .*x\.parquet: document 7 \(counted from 0\): this tokenizer cannot",
        capfd.readouterr().err,
    )


class Attack:
    """Unpickling it calls a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def test_a_malicious_pickle_executes_nothing(tmp_path):
    """Functions by every opcode that names one, in every place, and methods of the one class that a
    pickle may name."""
    flag, path = tmp_path / "executed", tmp_path / "tokenizer.pkl"
    shell = f"touch {flag}"
    os.system(shell)
    assert flag.exists(), "the attack works"
    flag.unlink()
    run = Attack(os.system, shell)
    attacks = [
        run,
        Attack(eval, f"open({str(flag)!r}, 'w')"),
        Attack(Path.touch, flag),
        {"mergeable_ranks": run},
        Attack(getattr, Attack(__import__, "os"), "system"),
        Attack(collections.OrderedDict, [(1, run)]),
        Attack(tiktoken.Encoding, "x"),
    ]
    raw = [
        b"\x80\x04" + b"\x8c\x0dtiktoken.core\x8c" + bytes([len(name)]) + name + b"\x93" + tail
        for name, tail in (
            (b"Encoding.__init__.__globals__", b"."),
            (b"Encoding.__setstate__", b"."),
            (b"Encoding", b")R."),
            (b"Encoding", b")\x81}\x8c\x05stateNsb."),
            (b"get_encoding", b"."),
        )
    ]
    raw += [
        b"cos\nsystem\n(S'touch " + str(flag).encode() + b"'\ntR.",
        b"\x80\x04P1\n.",
        b"\x80\x02\x82\x01.",
        b"(i__main__\nAttack\n.",
    ]
    for data in [
        *(pickle.dumps(attack, protocol) for attack in attacks for protocol in (0, 2, 5)),
        *raw,
    ]:
        path.write_bytes(data)
        with pytest.raises(
            ValueError, match=r"tokenizer\.pkl: not a tokenizer that nanochat saved.*nothing"
        ):
            get_tokenizer(path)
        assert not flag.exists()


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"_mergeable_ranks": {"a": 1}}, "its tokens are not bytes"),
        ({"_mergeable_ranks": {}}, "not every byte"),
        ({"_special_tokens": {"<|bos|>": 0}}, "distinct whole numbers"),
        ({"_pat_str": "("}, "tiktoken cannot use it"),
        ({"_special_tokens": {"<|x|>": 300}}, "--eod-token"),
    ],
)
def test_a_pickle_of_nonsense_is_one_sentence(paths, tmp_path, change, problem):
    encoding = tiktoken.Encoding.__new__(tiktoken.Encoding)
    encoding.__dict__ |= pickle.loads(paths["pickle"].read_bytes()).__dict__ | change
    (tmp_path / "tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    with pytest.raises(ValueError, match=rf"tokenizer\.pkl: .*{problem}"):
        get_tokenizer(tmp_path)


# ---- commands with these tokenizers --------------------------------------------------------------

QUICK = ["--device-type=cpu", "--unigram-tokens=2000"]


@pytest.fixture(scope="module")
def workplace(bare, tmp_path_factory):
    """Text, and shards of it in both formats, tokenized with a tokenizer.json whose EOD the command
    line names."""
    with training.workplace(
        tmp_path_factory.mktemp("runs"), **training.SMALL, num_iterations=3
    ) as base:
        os.replace(base / "data", base / "text")
        shutil.copytree(bare, base / "bare")
        flags = [
            "--input-dir",
            base / "text",
            f"--tokenizer={bare}",
            f"--eod-token={END}",
            "--num-workers=1",
            "--max-length=0",
        ]
        for form in ("gpts", "megatron"):
            assert (
                tok_shards.main(
                    [*map(str, flags), f"--format={form}", f"--output-dir={base / form}"]
                )
                == 0
            )
        yield base


def test_shards_of_both_formats_give_the_digests_of_text_and_the_runs_are_self_contained(
    paths, workplace, capsys
):
    bare = {"tokenizer": workplace / "bare", "eod_token": END}
    training.succeed(
        data_path=workplace / "text",
        **bare,
        model_tag="text",
        save_every=2,
        eval_every=3,
        sample_every=3,
    )
    for data_format in ("shards", "megatron"):
        data = workplace / {"shards": "gpts"}.get(data_format, data_format)
        # with the shards' tokenizer
        training.succeed(data_path=data, data_format=data_format, model_tag=data_format)
        assert (
            training.digests(data_format) == training.digests("text")
            and len(training.digests("text")) == 3
        )
    shutil.rmtree(workplace / "bare")
    run = workplace / "runs" / "text"
    assert sorted(os.listdir(run / "tokenizer")) == ["hf_tokenizer.json", "tokenizer.json"]
    capsys.readouterr()
    assert (
        base_eval.main(["text", *QUICK])
        == sample.main(["text", "--device-type=cpu", "-p", "The ", "--max-tokens=3"])
        == 0
    )
    assert inspect_data.main(["rows", "text", "--step=1", "--text"]) == 0
    assert verify.main([str(workplace / "gpts" / "train"), f"--tokenizer={run / 'tokenizer'}"]) == 0
    assert "bits per byte" in capsys.readouterr().out
    error = training.refuse(data_path=workplace / "text", tokenizer=paths["gpt2"], model_tag="text")
    assert "tokenizer_fingerprint: the run has" in error and "--tokenizer=" in error
    training.succeed(
        data_path=workplace / "text",
        tokenizer=run / "tokenizer",
        model_tag="text",
        num_iterations=4,
    )


def test_ids_alone_train_and_are_reported_in_nats(workplace, capsys):
    lost = shutil.ignore_patterns("tokenizer", "manifest.json", ".records")
    shutil.copytree(workplace / "gpts", workplace / "alone", ignore=lost)
    alone = {
        "data_path": workplace / "alone",
        "data_format": "shards",
        "tokenizer": "ids:340:0",
        "model_tag": "ids",
    }
    out = training.succeed(**alone, eval_every=3, sample_every=3).out
    assert "validation loss 5.8" in out and "bits per byte" not in out, (
        "ln 340 = 5.83 before the first step"
    )
    [first, last] = training.events("val", "ids")
    assert first["bpb"] is None and first["loss"] > last["loss"] > 1
    assert base_eval.main(["ids", *QUICK]) == sample.main(["ids", "--device-type=cpu"]) == 0
    assert "nats per token" in capsys.readouterr().out
    evaluated = json.loads((workplace / "runs/ids/eval.json").read_text())
    assert (
        "val_bpb" not in evaluated
        and evaluated["val_loss"] == last["loss"] > evaluated["unigram_loss"] > 3
    )
    assert report.main(["ids"]) == 0
    with pytest.raises(ValueError, match="cannot encode text"):
        sample.main(["ids", "--device-type=cpu", "-p", "text"])
    assert "cannot encode text" in training.refuse(
        data_path=workplace / "text", tokenizer="ids:340:0", model_tag="other"
    )
    small = alone | {"tokenizer": "ids:200:0", "model_tag": "small"}
    assert "outside the vocabulary of 200" in training.refuse(**small)
