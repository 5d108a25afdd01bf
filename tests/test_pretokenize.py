"""Pretokenizing one file: windows hold every id once, documents come back from disk, bad input is named."""

import errno
import gzip
import itertools
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import pretokenize as module
from nanochat.pairs import scan_file
from nanochat.pretokenize import Skipped, Windows, pretokenize, read_documents
from nanochat.shard_source import ShardSource
from nanochat.shards import ShardWriter, read_index, read_tokens
from nanochat.sources import ParquetSource, as_parquet, scan
from tests.toy import BOS, ByteTokenizer, examples, some_texts, write_jsonl, write_parquet

SHARED = Path(__file__).parents[2] / "shared" / "data"


class Bytes(ByteTokenizer):
    def get_vocab_size(self):
        return 257


def run(path, pair, windows=None, **kwargs):
    """(progress, record) of a whole pretokenization."""
    steps = pretokenize(path, pair, tokenizer=Bytes(), windows=windows or Windows(16, 4), **kwargs)
    progress = []
    while True:
        try:
            progress.append(next(steps))
        except StopIteration as stop:
            return progress, stop.value


def entries_of(pair):
    """[(ids, prefix)] of a pair."""
    index = read_index(pair.with_name(pair.name + ".idx"))
    ids = read_tokens(index).tolist()
    return [(ids[a:b], int(p)) for a, b, p in zip(index.offsets[:-1], index.offsets[1:], index.prefixes)]


def documents_of(pair):
    """The documents of a pair, from its entries."""
    flat = [t for ids, prefix in entries_of(pair) for t in ids[prefix:]]
    documents = [[]]
    for t in flat:
        if t == BOS:
            documents.append([])
        else:
            documents[-1].append(t)
    assert documents.pop() == [], "no EOD at the end"
    return [bytes(d).decode() for d in documents]


# ---- windows --------------------------------------------------------------------------------------------------------

def flat(lengths):
    """Documents of so many ids, all different, as `encode_flat` gives them; BOS is 0."""
    offsets = np.concatenate([[0], np.cumsum(np.array(lengths, np.int64) + 1)]).astype(np.int64)
    ids = np.arange(int(offsets[-1]), dtype=np.uint16) + 1
    ids[offsets[:-1]] = 0
    return ids, offsets


def by_hand(document, max_length, overlap):
    """Windows of one document, one id at a time."""
    windows, prefixes, at = [[]], [0], 0
    while at < len(document):
        if max_length and len(windows[-1]) == max_length:
            windows.append(windows[-1][max_length - overlap:])
            prefixes.append(overlap)
        windows[-1].append(document[at])
        at += 1
    windows[-1].append(0)
    return windows, prefixes


def test_the_example_of_the_docstring():
    ids, lengths, prefixes = Windows(6, 2).cut(*flat([11]), 0)
    assert (lengths.tolist(), prefixes.tolist()) == ([6, 6, 4], [0, 2, 2])
    a = 2  # the first id
    assert ids.tolist() == [*range(a, a + 6), *range(a + 4, a + 10), *range(a + 8, a + 11), 0]
    assert (ids.dtype, prefixes.dtype) == (np.uint16, np.uint16)


@settings(max_examples=examples(6))
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(0, 12), st.data())
def test_windows_hold_every_id_once_outside_prefixes(num_ids, max_length, data):
    overlap = data.draw(st.integers(0, max_length // 2))
    ids, offsets = flat(num_ids)
    got, lengths, prefixes = Windows(max_length, overlap).cut(ids, offsets, 0)
    want, want_prefixes = [], []
    for a, b in itertools.pairwise(offsets):
        windows, p = by_hand(ids[a + 1:b].tolist(), max_length, overlap)
        want += windows
        want_prefixes += p
    assert lengths.tolist() == [len(w) for w in want]
    assert prefixes.tolist() == want_prefixes
    assert got.tolist() == [t for w in want for t in w]
    ends = np.cumsum(lengths)
    fresh = [t for a, b, p in zip(ends - lengths, ends, prefixes) for t in got[a + p:b].tolist()]
    assert [t for t in fresh if t] == [t for t in ids.tolist() if t]
    if max_length:
        assert lengths.max() <= max_length + 1
        assert all(n > p + (got[e - 1] == 0) for n, p, e in zip(lengths, prefixes, ends) if p), "nothing new"


@pytest.mark.parametrize("max_length, overlap", [(-1, 0), (8, -1), (8, 5), (0, -2), (1 << 20, 1 << 16)])
def test_windows_that_make_no_sense_are_refused(max_length, overlap):
    with pytest.raises(ValueError, match="--overlap-size"):
        Windows(max_length, overlap)


def test_whole_documents_have_no_overlap():
    assert Windows(0, 256) == Windows(0, 0)


# ---- files ----------------------------------------------------------------------------------------------------------

def write(folder, ending, texts):
    path = folder / f"in{ending}"
    return write_parquet(path, texts) if ending == ".parquet" else write_jsonl(path, texts)


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".parquet"])
@pytest.mark.parametrize("windows", [Windows(16, 4), Windows(7, 0), Windows(0)])
def test_documents_come_back(tmp_path, ending, windows, monkeypatch):
    monkeypatch.setattr(module, "BATCH_CHARS", 300)
    texts = some_texts(60)
    path = write(tmp_path, ending, texts)
    progress, record = run(path, tmp_path / "out", windows)
    assert documents_of(tmp_path / "out") == texts
    assert "" in texts and len(progress) > 3, "no empty document, or one batch only"
    assert sum(b for b, _ in progress) == path.stat().st_size
    assert sum(t for _, t in progress) == record["tokens"] == read_index(tmp_path / "out.idx").num_tokens
    assert (record["documents"], record["entries"]) == (60, len(read_index(tmp_path / "out.idx")))
    assert record["entries"] > 60 or windows.max_length == 0


def test_the_same_bytes_from_any_ending_and_any_batches(tmp_path, monkeypatch):
    texts = some_texts(50, seed=3)
    pairs = set()
    for batch in (1, 100, 10**9):
        monkeypatch.setattr(module, "BATCH_CHARS", batch)
        for ending in (".jsonl", ".jsonl.gz", ".parquet"):
            run(write(tmp_path, ending, texts), tmp_path / "out")
            pairs.add((tmp_path / "out.bin").read_bytes() + (tmp_path / "out.idx").read_bytes())
    assert len(pairs) == 1


@settings(max_examples=examples(0.8))
@given(st.lists(st.text(max_size=60), min_size=1, max_size=8))
def test_any_text_comes_back_from_jsonl(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("text")
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"text": t}, ensure_ascii=i % 2 == 0) + "\n" for i, t in enumerate(texts)),
                    encoding="utf-8", newline="")
    run(path, folder / "out")
    assert documents_of(folder / "out") == texts


def test_large_strings_and_other_columns_are_read(tmp_path):
    texts = some_texts(20)
    table = pa.table({"id": list(range(20)), "text": pa.array(texts, pa.large_string())})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    run(tmp_path / "a.parquet", tmp_path / "out")
    assert documents_of(tmp_path / "out") == texts


def test_large_vocabularies_get_four_bytes(tmp_path):
    class Large(Bytes):
        def get_vocab_size(self):
            return 65536

    for tokenizer, size in ((Bytes(), 2), (Large(), 4)):
        list(pretokenize(write_jsonl(tmp_path / "a.jsonl", ["abc"]), tmp_path / "out", tokenizer=tokenizer,
                         windows=Windows()))
        assert (tmp_path / "out.bin").stat().st_size == 4 * size


# ---- groups: what streaming would see -------------------------------------------------------------------------------

@pytest.mark.parametrize("group_size, stored", [(7, True), (1024, False), (2000, True)])
def test_whole_documents_keep_the_groups_of_parquet(tmp_path, group_size, stored):
    texts = some_texts(1500, longest=5)
    path = write_parquet(tmp_path / "raw" / "a.parquet", texts, group_size)
    _, record = run(path, tmp_path / "a", Windows(0))
    assert ("groups" in record) is stored
    tokenizer = Bytes()
    streamed = ParquetSource(scan(tmp_path / "raw"), tokenizer)
    (tmp_path / "manifest.json").write_text(json.dumps({
        "format": "nanochat-shards", "version": 1, "tokenizer": {"fingerprint": "bytes", "eod": BOS, "vocab_size": 257},
        "arguments": {"max_length": 0, "overlap_size": 0}, "shards": {"a": {"input": "a", **record}}}))
    files = [scan_file(tmp_path / "a.bin", "a.bin")]
    stored_source = ShardSource({"root": str(tmp_path), "files": files}, tokenizer)
    assert stored_source.groups.tolist() == streamed.groups.tolist()
    for group, n in enumerate(streamed.groups):
        for unit in {0, (n - 1) // 64}:
            ours = stored_source.encode(stored_source.fetch(group, unit, 64))
            theirs = streamed.encode(streamed.fetch(group, unit, 64))
            assert [a[a != BOS].tolist() for a in ours] == [a[a != BOS].tolist() for a in theirs]


def test_windows_and_jsonl_have_plain_groups(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", some_texts(30), 7)
    assert "groups" not in run(path, tmp_path / "a", Windows(16, 4))[1]
    assert "groups" not in run(write_jsonl(tmp_path / "a.jsonl", some_texts(30)), tmp_path / "a", Windows(0))[1]


# ---- broken input ---------------------------------------------------------------------------------------------------

BROKEN = {
    b'{"text": "cut': "not JSON", b"[1]": "not a JSON object", b'{"t": "x"}': "no field", b"null": "not a JSON object",
    b'{"text": 5}': "int", b'{"text": null}': "NoneType", b'{"text": "\\ud800"}': "surrogate", b'"x"': "not a JSON",
    b"[" * 200_000: "not JSON",
}


def test_broken_lines_are_skipped_counted_and_named(tmp_path):
    lines = [b'{"text": "first"}', b"", b"   ", *BROKEN, b'{"text": "last"}']
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    _, record = run(path, tmp_path / "out")
    assert documents_of(tmp_path / "out") == ["first", "last"]
    assert record["skipped"]["count"] == len(BROKEN)
    assert [n for n, _ in record["skipped"]["lines"]] == list(range(4, 4 + len(BROKEN)))
    for (_, why), part in zip(record["skipped"]["lines"], BROKEN.values()):
        assert part in why and len(why) <= 200
    with pytest.raises(ValueError, match=r"a\.jsonl: line 4: not JSON.*--strict"):
        run(path, tmp_path / "strict", strict=True)
    assert not list(tmp_path.glob("strict*")) and not list(tmp_path.glob(".*"))


def test_the_list_of_broken_lines_is_short_and_the_count_exact(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x\n" * 1000 + b'{"text": "a"}\n')
    _, record = run(path, tmp_path / "out")
    assert (record["skipped"]["count"], len(record["skipped"]["lines"])) == (1000, 100)


def corrupt_page(path):
    """Change bytes of row group 1."""
    data = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    at = column.data_page_offset + column.total_compressed_size - 100  # past the page's header
    data[at:at + 8] = b"\xff" * 8
    path.write_bytes(bytes(data))


def bad_inputs(folder):
    """{path: what the error must say}."""
    many = some_texts(40, longest=400)
    cut = write_jsonl(folder / "cut.jsonl.gz", many)
    cut.write_bytes(cut.read_bytes()[:-200])
    no_gzip = folder / "none.jsonl.gz"
    no_gzip.write_bytes(b'{"text": "a"}\n')
    wide = folder / "wide.jsonl"
    wide.write_bytes('{"text": "a"}\n'.encode("utf-16"))
    nulls = write_parquet(folder / "nulls.parquet", [*"abcdefghij", None], 4)
    short = write_parquet(folder / "short.parquet", many)
    short.write_bytes(short.read_bytes()[:-20])
    page = write_parquet(folder / "page.parquet", many, write_page_checksum=True, use_dictionary=False)
    corrupt_page(page)
    wrong = folder / "wrong.parquet"
    raw = pa.Array.from_buffers(pa.string(), 2, [None, pa.py_buffer(np.array([0, 1, 3], np.int32)),
                                                 pa.py_buffer(b"a\xff\xfe")])
    pq.write_table(pa.table({"text": raw}), wrong)
    column = folder / "column.parquet"
    pq.write_table(pa.table({"body": ["a"]}), column)
    empty = folder / "empty.jsonl"
    empty.write_bytes(b"\nbroken\n")
    nothing = folder / "nothing.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), nothing)
    return {cut: "not a whole gzip file.*after line", no_gzip: "not a whole gzip file",
            wide: "no document in it.*not UTF-8",
            nulls: "null.*row group 2", short: "not a whole parquet",
            page: "row group 1 ", wrong: "row group 0.*(?i:utf-?8)", column: "no `text` column",
            empty: "no document in it.*line 2: not JSON", nothing: "0 rows"}


def test_input_that_cannot_be_read_is_named_and_leaves_nothing(tmp_path):
    (tmp_path / "out").mkdir()
    for path, what in bad_inputs(tmp_path).items():
        with pytest.raises(ValueError, match=what) as error:
            run(path, tmp_path / "out" / "x")
            pytest.fail(f"{path.name} was read")
        assert str(path) in str(error.value)
        assert not list((tmp_path / "out").iterdir()), path


def test_broken_lines_are_passed_over_alike_in_shards_and_when_streaming(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n{"text": "\xff"}\n\n{"text": 3}\n[1]\n{"no": 1}\n'
                     b'{"text": "\\ud800"}\n{"text": ""}\n{"text": "two"}\r\n' + b"[" * 9_999
                     + b'\n{"text": "three"}')
    skipped = Skipped()
    texts = [text for batch, _ in read_documents(path, skipped) for text in batch]
    streamed = pq.read_table(as_parquet(path))["text"].to_pylist()
    assert texts == streamed == ["one", "", "two", "three"]
    assert [number for number, _ in skipped.lines] == [2, 4, 5, 6, 7, 10]
    for read in (lambda: list(read_documents(path, Skipped(), strict=True)), lambda: as_parquet(path, strict=True)):
        with pytest.raises(ValueError, match=r"odd\.jsonl: .*line 2: not UTF-8.*--strict"):
            read()


def test_input_that_changes_meanwhile_has_no_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH_CHARS", 10)
    path = write_jsonl(tmp_path / "a.jsonl", some_texts(9))
    steps = pretokenize(path, tmp_path / "out", tokenizer=Bytes(), windows=Windows())
    next(steps)
    path.write_bytes(path.read_bytes() + b'{"text": "more"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl: it changed while it was read"):
        list(steps)
    assert not list(tmp_path.glob("out*"))


def test_a_full_disk_fails_the_input_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = write_jsonl(tmp_path / "a.jsonl", ["abc"])
    for where in ("add", "_index_parts"):
        with monkeypatch.context() as patch:
            patch.setattr(ShardWriter, where, full)
            with pytest.raises(OSError, match=r"out\.bin: cannot be written \(No space left on device\), make room"):
                run(path, tmp_path / "out")
        assert [f.name for f in tmp_path.iterdir()] == ["a.jsonl"]


def test_closing_half_way_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH_CHARS", 10)
    steps = pretokenize(write_jsonl(tmp_path / "a.jsonl", some_texts(9)), tmp_path / "out", tokenizer=Bytes(),
                        windows=Windows())
    next(steps)
    assert list(tmp_path.glob(".out.bin.*.tmp"))
    steps.close()
    assert [f.name for f in tmp_path.iterdir()] == ["a.jsonl"]


# ---- memory ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_a_larger_input_takes_no_more_memory(tmp_path, ending, monkeypatch):
    monkeypatch.setattr(module, "BATCH_CHARS", 50_000)
    peaks = []
    for copies in (1, 20):
        line = json.dumps({"text": "many words " * 900}) + "\n"
        data = line.encode() * 50 * copies
        path = tmp_path / f"in{copies}{ending}"
        path.write_bytes(gzip.compress(data, 1) if ending.endswith("gz") else data)
        del data
        tracemalloc.start()
        texts = sum(len(texts) for texts, _ in read_documents(path, Skipped()))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert texts == 50 * copies
    assert peaks[1] < 1.5 * peaks[0]


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared sample data (../shared/data)")
def test_real_text_comes_back(tmp_path):
    path = SHARED / "math" / "shard_00001.parquet"
    texts = pq.read_table(path, columns=["text"]).column("text").to_pylist()
    _, record = run(path, tmp_path / "out", Windows(2048, 256))
    assert documents_of(tmp_path / "out") == texts
    assert record["entries"] > record["documents"] == len(texts)
