"""
Exchange shards with gpt-simple 0.1.2: each program reads the shards of the other.

    python -m dev.compare_gpt_simple --python VENV/bin/python

1. gpt-simple's `tokenize_shard` turns some texts into shards (short documents, overlapping windows,
   windows without overlap, ids of 16 and of 32 bits), and its `read_idx` reads their entries.
2. We read the same entries from them, `scripts.verify` accepts them, and `ShardWriter` writes the
   same bytes from the same entries. With their tokenizer.json we tokenize the same documents, and a
   run on their shards has the digests of a run on the text. We also write shards of random entries.
3. gpt-simple's `read_idx` and `PreTokenizedDataset` read the same entries from those.

Exit code 1 if anything differs. gpt-simple needs a different NumPy from ours, so it has its own
environment (pip install torch==2.13.0 gpt-simple-lm==0.1.2). Its tokenizer is a byte-level BPE that
the `tokenizers` package trains on the same texts, so nothing is downloaded.
"""

import json
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dev import peers

EOD = "<|endoftext|>"
# name: (max_length, overlap_size, additional tokens in the vocabulary)
CASES = {
    "tiny": (8, 2, 0),
    "whole": (100_000, 256, 0),
    "no_overlap": (64, 0, 0),
    "wide_ids": (128, 32, 70_000),
}
TINY = ["abcdefghij", "ab", "abcdefgh", "a", "abcdefghijklmnopqrst", "abc abc", "Ä漢", "abcdefg"]


# ---- runs in gpt-simple's environment, without our package ---------------------------------------


def make_tokenizer(texts: list[str], folder: Path, num_added: int) -> None:
    """Write a folder that gpt-simple loads as a GPT-2 tokenizer: a few merges, EOD, added
    tokens."""
    import tokenizers

    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts, vocab_size=300, min_frequency=20, special_tokens=[EOD], show_progress=False
    )
    if num_added:
        tokenizer.add_tokens([f"<added {i}>" for i in range(num_added)])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def read_entries(idx: Path) -> dict[str, Any]:
    """The entries of a pair as gpt-simple's reader returns them."""
    from gpt_simple.pretokenize import read_idx

    code, offsets, prefixes = read_idx(idx)
    ids = np.fromfile(idx.with_suffix(".bin"), np.uint16 if code == 2 else np.uint32)
    return {
        "entries": [ids[a:b].tolist() for a, b in pairwise(offsets.tolist())],
        "prefixes": prefixes.tolist(),
        "type": code,
    }


def write_theirs(work: Path) -> None:
    """Step 1: write work/there/CASE.{bin,idx,json}."""
    from gpt_simple.pretokenize import tokenize_shard
    from gpt_simple.tokenizer import SimpleLLMTokenizer

    out = work / "there"
    out.mkdir()
    for name, (max_length, overlap, num_added) in CASES.items():
        source = work / "texts" / f"{name}.jsonl"
        texts = [json.loads(line)["text"] for line in source.read_text().splitlines()]
        folder = work / "tokenizers" / name
        make_tokenizer(texts, folder, num_added)
        result = tokenize_shard(
            str(source), str(out), str(folder), max_length, overlap, False, 0.0, 0
        )
        tokenizer = SimpleLLMTokenizer(str(folder))
        about = {
            "made_by": "gpt-simple-lm==0.1.2",
            "max_length": max_length,
            "overlap_size": overlap,
            "documents": result["docs_read"],
            "eod": tokenizer.eod_token_id,
            "vocab_size": tokenizer.vocab_size,
        }
        (out / f"{name}.json").write_text(json.dumps(about | read_entries(out / f"{name}.idx")))


def read_ours(work: Path) -> None:
    """Step 3: read work/here/*.bin, write work/here/*.json."""
    from gpt_simple.data import PreTokenizedDataset

    for path in sorted((work / "here").glob("*.bin")):
        result = read_entries(path.with_suffix(".idx"))
        longest = max(map(len, result["entries"]))
        dataset = PreTokenizedDataset(
            [path], max_length=longest, seed=1, pad_token_id=0, eod_token_id=0, pack_sequences=False
        )
        result["dataset"] = [
            item["input_ids"][: int(item["attention_mask"].sum())].tolist() for item in dataset
        ]
        packed = PreTokenizedDataset(
            [path], max_length=longest, seed=1, pad_token_id=0, eod_token_id=0
        )
        result["packed_tokens"] = sum(int(item["attention_mask"].sum()) for item in packed)
        path.with_suffix(".json").write_text(json.dumps(result))


# ---- runs here -----------------------------------------------------------------------------------


def texts_for(name: str) -> list[str]:
    """The texts of a case."""
    return TINY if name == "tiny" else peers.random_texts()


def write_ours(path: Path, entries: list[list[int]], prefixes: list[int], vocab_size: int) -> None:
    from nanochat.pretokenize import ShardWriter

    with ShardWriter(path, vocab_size=vocab_size) as writer:
        writer.add(
            np.array([i for e in entries for i in e]),
            np.array([len(e) for e in entries]),
            np.array(prefixes),
        )


def compare_theirs(work: Path, check: peers.Comparison) -> None:
    """Step 2: the shards that gpt-simple wrote, and the tokenizer.json that it used."""
    from dev.measure import digests_of

    for name in CASES:
        compare_case(work, name, check)
    flag = f"--tokenizer={work / 'tokenizers' / 'whole'}"
    texts = work / "texts"
    shards = work / "there"
    digests = digests_of(
        work,
        "theirs",
        f"--data-path={shards / 'whole'}",
        f"--val-path={shards / 'no_overlap'}",
        "--data-format=shards",
        flag,
    )
    text = digests_of(
        work,
        "text",
        f"--data-path={texts / 'whole.jsonl'}",
        f"--val-path={texts / 'no_overlap.jsonl'}",
        flag,
    )
    check.same(
        f"whole: digests of {len(digests)} steps of runs on their shards and on the text",
        digests == text,
    )


def compare_case(work: Path, name: str, check: peers.Comparison) -> None:
    """Compare the entries and the ids of a case, and write its entries to work/here."""
    from nanochat.tokenizer import get_tokenizer
    from nanochat.tokens import open_tokens
    from scripts.convert_shards import documents
    from scripts.verify import main as verify

    path = work / "there" / f"{name}.bin"
    mine = work / "here" / f"{name}.bin"
    theirs = json.loads(path.with_suffix(".json").read_text())
    entries = theirs["entries"]
    eod = theirs["eod"]
    pair = open_tokens(path, vocab_size=theirs["vocab_size"])
    check.same(
        f"{name}: {len(entries):,} entries of {theirs['documents']:,} documents written there, read here",
        [ids.tolist() for ids in pair.read(0, len(pair))] == entries
        and pair.prefixes(0, len(entries)).tolist() == theirs["prefixes"],
    )
    check.same(
        f"{name}: the stream reads them with BOS and without EOD",
        [ids.tolist() for ids in pair.documents(0, len(pair), eod)]
        == [[eod, *(e[:-1] if e[-1] == eod else e)] for e in entries],
    )
    check.same(
        f"{name}: scripts.verify accepts them",
        verify([str(path), "--vocab-size", str(theirs["vocab_size"])]) == 0,
    )
    write_ours(mine.with_suffix(""), entries, theirs["prefixes"], theirs["vocab_size"])
    check.same(
        f"{name}: the same entries, written here, have the same bytes",
        all(
            mine.with_suffix(e).read_bytes() == path.with_suffix(e).read_bytes()
            for e in (".bin", ".idx")
        ),
    )
    tokenizer = get_tokenizer(work / "tokenizers" / name)
    check.same(
        f"{name}: EOD of tokenizer.json, and its vocabulary plus the padding token that gpt-simple adds",
        (tokenizer.get_bos_token_id(), tokenizer.get_vocab_size() + 1)
        == (eod, theirs["vocab_size"]),
    )
    check.same(
        f"{name}: its ids of the documents, tokenized here and there",
        [ids.tolist() for ids in documents(pair, eod)]
        == [[*ids, eod] for ids in tokenizer.encode(texts_for(name))],
    )


def compare(python: str, work: Path) -> int:
    """Run all three steps. Returns the exit code."""
    check = peers.Comparison()
    (work / "texts").mkdir()
    (work / "here").mkdir()
    for name in CASES:
        lines = [json.dumps({"text": text}) + "\n" for text in texts_for(name)]
        (work / "texts" / f"{name}.jsonl").write_text("".join(lines))
    peers.run_step(python, "dev.compare_gpt_simple", "write", work)
    compare_theirs(work, check)
    for vocab_size in (50_257, 65_535, 65_536, 100_277):
        rng = np.random.default_rng(vocab_size)
        entries = [rng.integers(0, vocab_size, n).tolist() for n in rng.integers(1, 300, 500)]
        prefixes = [int(rng.integers(0, len(e))) for e in entries]
        write_ours(work / "here" / f"random_{vocab_size}", entries, prefixes, vocab_size)
        expected = {"entries": entries, "prefixes": prefixes}
        (work / "there" / f"random_{vocab_size}.json").write_text(json.dumps(expected))
    peers.run_step(python, "dev.compare_gpt_simple", "read", work)
    for path in sorted((work / "here").glob("*.json")):
        result, expected = (
            json.loads((work / side / path.name).read_text()) for side in ("here", "there")
        )
        entries = expected["entries"]
        check.same(
            f"{path.stem}: {len(entries):,} entries, written here and read there by read_idx",
            (result["entries"], result["prefixes"]) == (entries, expected["prefixes"]),
        )
        check.same(
            f"{path.stem}: read by PreTokenizedDataset",
            sorted(result["dataset"]) == sorted(entries),
        )
        check.same(
            f"{path.stem}: packed without loss", result["packed_tokens"] == sum(map(len, entries))
        )
    return check.end()


def main(argv: Sequence[str] | None = None) -> int:
    """Compare. Exit code 1 if anything differs."""
    from nanochat.cli import Parser

    parser = Parser(description=__doc__)
    parser.add_argument(
        "--python", required=True, help="the Python of an environment with gpt-simple"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        return compare(args.python, Path(folder))


if __name__ == "__main__":
    peers.start(main, {"write": write_theirs, "read": read_ours})
