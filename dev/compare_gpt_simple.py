"""
Shards of gpt-simple 0.1.2 are read here, and ours are read there: with gpt-simple itself, in its own environment.

    python -m dev.compare_gpt_simple --python VENV/bin/python

1. There: `tokenize_shard` turns some texts into shards (short documents, overlapping windows, windows without
   overlap, ids of 16 and of 32 bits). Its own `read_idx` says what is in them.
2. Here: the same entries are read from them, `scripts.verify` finds nothing wrong, and `ShardWriter` writes the same
   bytes from the same entries. Their tokenizer.json, opened here, gives the documents that the entries were cut from,
   and a run on their shards has the digests of a run on the text. It also writes shards of random entries.
3. There: `read_idx` and `PreTokenizedDataset` read those, unchanged, and give the same entries.

Exit code 1 on a difference. gpt-simple needs another NumPy than we do, so it has an environment of its own (pip install
torch==2.13.0 gpt-simple-lm==0.1.2). Its tokenizer is a byte-level BPE that the `tokenizers` package trains on the same
texts: nothing is downloaded.
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
# name: (max_length, overlap_size, further tokens of the vocabulary)
CASES = {"tiny": (8, 2, 0), "whole": (100_000, 256, 0), "no_overlap": (64, 0, 0), "wide_ids": (128, 32, 70_000)}
TINY = ["abcdefghij", "ab", "abcdefgh", "a", "abcdefghijklmnopqrst", "abc abc", "Ä漢", "abcdefg"]


# ---- there: runs in gpt-simple's environment, imports nothing of ours -----------------------------------------------

def make_tokenizer(texts: list[str], folder: Path, num_added: int) -> None:
    """A folder that gpt-simple loads as a GPT-2 tokenizer: a few merges, the end of documents, added tokens."""
    import tokenizers
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=300, min_frequency=20, special_tokens=[EOD], show_progress=False)
    if num_added:
        tokenizer.add_tokens([f"<added {i}>" for i in range(num_added)])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def entries_there(idx: Path) -> dict[str, Any]:
    """What gpt-simple's reader says of a pair."""
    from gpt_simple.pretokenize import read_idx
    code, offsets, prefixes = read_idx(idx)
    ids = np.fromfile(idx.with_suffix(".bin"), np.uint16 if code == 2 else np.uint32)
    return {"entries": [ids[a:b].tolist() for a, b in pairwise(offsets.tolist())], "prefixes": prefixes.tolist(),
            "type": code}


def write_there(work: Path) -> None:
    """Step 1. Writes work/there/CASE.{bin,idx,json}."""
    from gpt_simple.pretokenize import tokenize_shard
    from gpt_simple.tokenizer import SimpleLLMTokenizer
    out = work / "there"
    out.mkdir()
    for name, (max_length, overlap, num_added) in CASES.items():
        source = work / "texts" / f"{name}.jsonl"
        texts = [json.loads(line)["text"] for line in source.read_text().splitlines()]
        folder = work / "tokenizers" / name
        make_tokenizer(texts, folder, num_added)
        told = tokenize_shard(str(source), str(out), str(folder), max_length, overlap, False, 0.0, 0)
        tokenizer = SimpleLLMTokenizer(str(folder))
        about = {"made_by": "gpt-simple-lm==0.1.2", "max_length": max_length, "overlap_size": overlap,
                 "documents": told["docs_read"], "eod": tokenizer.eod_token_id, "vocab_size": tokenizer.vocab_size}
        (out / f"{name}.json").write_text(json.dumps(about | entries_there(out / f"{name}.idx")))


def read_there(work: Path) -> None:
    """Step 3. Reads work/here/*.bin, writes work/here/*.json."""
    from gpt_simple.data import PreTokenizedDataset
    for path in sorted((work / "here").glob("*.bin")):
        told = entries_there(path.with_suffix(".idx"))
        longest = max(map(len, told["entries"]))
        dataset = PreTokenizedDataset([path], max_length=longest, seed=1, pad_token_id=0, eod_token_id=0,
                                      pack_sequences=False)
        told["dataset"] = [item["input_ids"][:int(item["attention_mask"].sum())].tolist() for item in dataset]
        packed = PreTokenizedDataset([path], max_length=longest, seed=1, pad_token_id=0, eod_token_id=0)
        told["packed_tokens"] = sum(int(item["attention_mask"].sum()) for item in packed)
        path.with_suffix(".json").write_text(json.dumps(told))


# ---- here -----------------------------------------------------------------------------------------------------------

def texts_for(name: str) -> list[str]:
    """The texts of a case."""
    return TINY if name == "tiny" else peers.random_texts()


def write_here(path: Path, entries: list[list[int]], prefixes: list[int], vocab_size: int) -> None:
    from nanochat.pretokenize import ShardWriter
    with ShardWriter(path, vocab_size=vocab_size) as writer:
        writer.add(np.array([i for e in entries for i in e]), np.array([len(e) for e in entries]), np.array(prefixes))


def compare_theirs(work: Path, check: peers.Comparison) -> None:
    """Step 2, what was written there."""
    from nanochat.tokens import open_tokens
    from scripts.verify import main as verify
    for name in CASES:
        path = work / "there" / f"{name}.bin"
        told = json.loads(path.with_suffix(".json").read_text())
        entries, eod, pair = told["entries"], told["eod"], open_tokens(path, vocab_size=told["vocab_size"])
        check.same(f"{name}: {len(entries):,} entries of {told['documents']:,} documents written there, read here",
                   [ids.tolist() for ids in pair.read(0, len(pair))] == entries
                   and pair.prefixes(0, len(entries)).tolist() == told["prefixes"])
        check.same(f"{name}: the stream gets them with BOS in front and without the end of documents",
                   [ids.tolist() for ids in pair.documents(0, len(pair), eod)]
                   == [[eod, *(e[:-1] if e[-1] == eod else e)] for e in entries])
        check.same(f"{name}: scripts.verify finds nothing wrong",
                   verify([str(path), "--vocab-size", str(told["vocab_size"])]) == 0)
        mine = work / "here" / path.name
        write_here(mine.with_suffix(""), entries, told["prefixes"], told["vocab_size"])
        check.same(f"{name}: the same entries written here are the same bytes", all(
                   mine.with_suffix(e).read_bytes() == path.with_suffix(e).read_bytes() for e in (".bin", ".idx")))


def compare_tokenizers(work: Path, check: peers.Comparison) -> None:
    """Step 2, the tokenizer.json that they tokenized with."""
    from dev.measure import digests_of
    from nanochat.tokenizer import get_tokenizer
    from nanochat.tokens import open_tokens
    from scripts.convert_shards import documents
    for name in CASES:
        told = json.loads((work / "there" / f"{name}.json").read_text())
        tokenizer = get_tokenizer(work / "tokenizers" / name)
        eod = tokenizer.get_bos_token_id()
        check.same(f"{name}: tokenizer.json has the same end of documents here, and the vocabulary but for the padding "
                   f"that gpt-simple adds", (eod, tokenizer.get_vocab_size() + 1) == (told["eod"], told["vocab_size"]))
        check.same(f"{name}: it gives here the documents that were tokenized there",
                   [ids.tolist() for ids in documents(open_tokens(work / "there" / f"{name}.bin"), eod)]
                   == [[*ids, eod] for ids in tokenizer.encode(texts_for(name))])
    flags = f"--tokenizer={work / 'tokenizers' / 'whole'}", f"--val-path={work / 'there' / 'no_overlap'}"
    theirs = digests_of(work, "theirs", f"--data-path={work / 'there' / 'whole'}", "--data-format=shards", *flags)
    text = digests_of(work, "text", f"--data-path={work / 'texts' / 'whole.jsonl'}", flags[0],
                      f"--val-path={work / 'texts' / 'no_overlap.jsonl'}")
    check.same(f"whole: {len(theirs)} steps of a run on their shards have the digests of a run on the text",
               theirs == text)


def compare(python: str, work: Path) -> int:
    """All three steps; the exit code."""
    check = peers.Comparison()
    (work / "texts").mkdir()
    (work / "here").mkdir()
    for name in CASES:
        lines = [json.dumps({"text": text}) + "\n" for text in texts_for(name)]
        (work / "texts" / f"{name}.jsonl").write_text("".join(lines))
    peers.run_there(python, "dev.compare_gpt_simple", "write", work)
    compare_theirs(work, check)
    compare_tokenizers(work, check)
    for vocab_size in (50_257, 65_535, 65_536, 100_277):
        rng = np.random.default_rng(vocab_size)
        entries = [rng.integers(0, vocab_size, n).tolist() for n in rng.integers(1, 300, 500)]
        prefixes = [int(rng.integers(0, len(e))) for e in entries]
        write_here(work / "here" / f"random_{vocab_size}", entries, prefixes, vocab_size)
        wanted = {"entries": entries, "prefixes": prefixes}
        (work / "there" / f"random_{vocab_size}.json").write_text(json.dumps(wanted))
    peers.run_there(python, "dev.compare_gpt_simple", "read", work)
    for path in sorted((work / "here").glob("*.json")):
        told, wanted = (json.loads((work / where / path.name).read_text()) for where in ("here", "there"))
        entries = wanted["entries"]
        check.same(f"{path.stem}: {len(entries):,} entries written here, read there by read_idx",
                   (told["entries"], told["prefixes"]) == (entries, wanted["prefixes"]))
        check.same(f"{path.stem}: and by PreTokenizedDataset", sorted(told["dataset"]) == sorted(entries))
        check.same(f"{path.stem}: and packed, without loss", told["packed_tokens"] == sum(map(len, entries)))
    return check.end()


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; 1 on a difference."""
    from nanochat.cli import Parser

    parser = Parser(description=__doc__)
    parser.add_argument("--python", required=True, help="of an environment with gpt-simple")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        return compare(args.python, Path(folder))


if __name__ == "__main__":
    peers.start(main, {"write": write_there, "read": read_there})
