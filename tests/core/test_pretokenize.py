"""Pretokenizing: windows hold every id once, documents come back from disk, errors name bad input;
the names of pairs, the tasks of several machines, and which pairs count as finished."""

import itertools
import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import pretokenize as module
from nanochat.common import remove_leftovers
from nanochat.files import data_at
from nanochat.pretokenize import Input, Pretokenizer, ShardWriter, Windows, describe_tokenizer
from nanochat.sources import scan
from nanochat.text_kinds import read_documents
from nanochat.tokens import open_tokens
from scripts.tok_shards import deal, find_inputs
from tests.token_files import Tokenizer, fresh_ids
from tests.toy import BOS, examples, some_texts, write_jsonl, write_parquet


@pytest.fixture(autouse=True)
def _bytes(monkeypatch):
    monkeypatch.setattr(module, "_load_same", lambda name, fingerprint: Tokenizer())


def make(path, folder, windows=None, **kwargs):
    """(the pair of one file, its record in the manifest)."""
    i = Input(path, path.name, "train", "b", "out", path.stat().st_size)
    job = Pretokenizer(
        folder, [i], windows or Windows(16, 4), describe_tokenizer(Tokenizer()), **kwargs
    )
    job.prepare()
    return open_tokens(job.make(i) and folder / "train" / "b" / "out.bin"), job.finished(i)["shard"]


def files_in(folder):
    return [f.name for f in folder.rglob("*") if f.is_file()]


def documents_of(pair):
    """The texts of a pair, from its entries."""
    ids = fresh_ids(pair)
    assert ids[-1] == BOS, "no EOD at the end"
    ends = [at for at, t in enumerate(ids) if t == BOS]
    return [bytes(ids[a + 1 : b]).decode() for a, b in zip([-1, *ends], ends)]


# ---- windows -------------------------------------------------------------------------------------


def flat(lengths):
    """Documents of these lengths as `encode_flat` returns them. All ids are different; BOS is 0."""
    offsets = np.concatenate([[0], np.cumsum(np.array(lengths, np.int64) + 1)]).astype(np.int64)
    ids = np.arange(int(offsets[-1]), dtype=np.uint16) + 1
    ids[offsets[:-1]] = 0
    return ids, offsets


def plain_windows(document, max_length, overlap):
    """Windows of one document, one id at a time."""
    windows, prefixes = [[]], [0]
    for t in document:
        if max_length and len(windows[-1]) == max_length:
            windows.append(windows[-1][max_length - overlap :])
            prefixes.append(overlap)
        windows[-1].append(t)
    windows[-1].append(0)
    return windows, prefixes


@settings(max_examples=examples(6))
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(0, 12), st.data())
def test_windows_hold_every_id_once_outside_prefixes(num_ids, max_length, data):
    overlap = data.draw(st.integers(0, max_length // 2))
    ids, offsets = flat(num_ids)
    got, lengths, prefixes = Windows(max_length, overlap).cut(ids, offsets, 0)
    expected = [
        plain_windows(ids[a + 1 : b].tolist(), max_length, overlap)
        for a, b in itertools.pairwise(offsets)
    ]
    windows = [w for of_document, _ in expected for w in of_document]
    assert lengths.tolist() == [len(w) for w in windows]
    assert prefixes.tolist() == [p for _, of_document in expected for p in of_document]
    assert got.tolist() == [t for w in windows for t in w]
    ends = np.cumsum(lengths)
    fresh = [t for a, b, p in zip(ends - lengths, ends, prefixes) for t in got[a + p : b].tolist()]
    assert [t for t in fresh if t] == [t for t in ids.tolist() if t]
    if max_length:
        assert lengths.max() <= max_length + 1
        assert all(n > p + (got[e - 1] == 0) for n, p, e in zip(lengths, prefixes, ends) if p), (
            "each adds ids"
        )


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
@pytest.mark.parametrize("windows", [Windows(16, 4), Windows(7, 0), Windows(0)])
def test_documents_come_back_and_batches_change_no_byte(tmp_path, ending, windows, monkeypatch):
    texts, contents = some_texts(60), set()
    path = (write_parquet if ending == ".parquet" else write_jsonl)(tmp_path / f"in{ending}", texts)
    for documents, chars in ((1, 10**9), (7, 10**9), (10**9, 10**9), (10**9, 50)):
        monkeypatch.setattr(module, "BATCH_DOCUMENTS", documents)
        monkeypatch.setattr(module, "BATCH_CHARS", chars)
        pair, record = make(path, tmp_path / f"{documents}-{chars}", windows)
        assert documents_of(pair) == texts and "" in texts
        assert (record["documents"], record["entries"], record["tokens"]) == (
            60,
            len(pair),
            pair.num_tokens,
        )
        assert record["entries"] > 60 or windows.max_length == 0
        contents.add(pair.path.read_bytes() + pair.idx_path.read_bytes())
    assert len(contents) == 1


def test_a_batch_of_large_documents_ends_at_two_million_characters(tmp_path, monkeypatch):
    batches, cut = [], module.Windows.cut
    monkeypatch.setattr(
        module.Windows,
        "cut",
        lambda windows, ids, offsets, eod: (
            batches.append(len(offsets) - 1),
            cut(windows, ids, offsets, eod),
        )[1],
    )
    make(write_jsonl(tmp_path / "in.jsonl", ["ab " * 300_000] * 5 + ["c"] * 600), tmp_path / "out")
    assert batches == [3, 256, 256, 90]


@pytest.mark.parametrize("group_size, stored", [(7, True), (1024, False), (2000, True)])
def test_whole_documents_keep_the_groups_of_parquet(tmp_path, group_size, stored):
    path = write_parquet(tmp_path / "a.parquet", some_texts(1500, longest=5), group_size)
    _, record = make(path, tmp_path / "whole", Windows(0))
    counts = pq.ParquetFile(path).metadata.to_dict()["row_groups"]
    assert record.get("groups", [1024, 476]) == [group["num_rows"] for group in counts]
    assert ("groups" in record) is stored
    assert "groups" not in make(path, tmp_path / "windows")[1]


# ---- broken input --------------------------------------------------------------------------------

NOT_ONE = "not an object with a string in its field `text`"
BROKEN = {
    b'{"text": "cut': "not JSON",
    b"[1]": NOT_ONE,
    b'{"t": "x"}': NOT_ONE,
    b"null": NOT_ONE,
    b'{"text": 5}': NOT_ONE,
    b'{"text": null}': NOT_ONE,
    b'{"text": "\\ud800"}': "surrogate",
    b'"x"': NOT_ONE,
    b"[" * 200_000: "not JSON",
}


def test_broken_lines_are_skipped_counted_and_named_as_in_streaming(tmp_path, base_dir):
    lines = [b'{"text": "first"}', b"", b"   ", *BROKEN, b'{"text": ""}', b'{"text": "last"}']
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    pair, record = make(path, tmp_path / "out")
    assert (
        documents_of(pair)
        == pq.read_table(scan(path)["files"][0]["parquet"])["text"].to_pylist()
        == ["first", "", "last"]
    )
    assert record["skipped"]["count"] == len(BROKEN)
    numbers, reasons = zip(*record["skipped"]["lines"])
    assert list(numbers) == list(range(4, 4 + len(BROKEN)))
    assert all(part in why and len(why) <= 200 for why, part in zip(reasons, BROKEN.values()))


def test_input_that_cannot_be_read_to_its_end_is_named_and_leaves_no_file(tmp_path):
    cut = write_jsonl(tmp_path / "cut.jsonl.gz", some_texts(40, longest=400))
    cut.write_bytes(cut.read_bytes()[:-200])
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"\nbroken\n")
    for path, what in (
        (cut, "truncated or not a gzip file"),
        (empty, "no document .*line 2: not JSON"),
    ):
        with pytest.raises(ValueError, match=rf"{path}.*{what}"):
            make(path, tmp_path / "out")
        assert not files_in(tmp_path / "out"), path


def test_input_that_changes_while_it_is_read_has_no_pair(tmp_path, monkeypatch):
    path, read = write_jsonl(tmp_path / "a.jsonl", some_texts(9)), module.read_documents

    def changed(*args, **kwargs):
        yield from read(*args, **kwargs)
        path.write_bytes(path.read_bytes() + b'{"text": "more"}\n')

    monkeypatch.setattr(module, "read_documents", changed)
    with pytest.raises(ValueError, match=r"a\.jsonl: it changed while being read"):
        make(path, tmp_path / "out")
    assert not files_in(tmp_path / "out")


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_a_larger_input_takes_no_more_memory(tmp_path, ending):
    peaks = []
    for copies in (50, 1000):
        path = write_jsonl(tmp_path / f"in{copies}{ending}", ["many words " * 900] * copies)
        tracemalloc.start()
        assert sum(1 for _ in read_documents(path)) == copies
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


# ---- names ---------------------------------------------------------------------------------------


def touch(root, names):
    """Make small files; `find_inputs` does not read them."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    return root


@pytest.mark.parametrize(
    "names, pairs, short",
    [
        (
            [
                "web/b.jsonl",
                "web/a/z.parquet",
                "web/a/y.jsonl.gz",
                "code/only.jsonl",
                "web/notes.md",
                "web/.hidden/x.jsonl",
                ".git/x.jsonl",
                "README.md",
            ],
            {
                "train/code/only": "code/only.jsonl",
                "train/web/a__y": "web/a/y.jsonl.gz",
                "train/web/a__z": "web/a/z.parquet",
                "val/web/b": "web/b.jsonl",
            },
            ["code"],
        ),
        (
            ["train/web/a.jsonl", "train/code/a.jsonl", "val/web/a.jsonl"],
            {
                "train/code/a": "train/code/a.jsonl",
                "train/web/a": "train/web/a.jsonl",
                "val/web/a": "val/web/a.jsonl",
            },
            [],
        ),
        (
            ["a.jsonl", "b.jsonl", "c.parquet"],
            {"train/data/a": "a.jsonl", "train/data/b": "b.jsonl", "val/data/c": "c.parquet"},
            [],
        ),
        (
            ["w/a.v1.jsonl", "w/a.v2.jsonl", "w/a.jsonl"],
            {
                "train/w/a": "w/a.jsonl",
                "train/w/a.v1": "w/a.v1.jsonl",
                "val/w/a.v2": "w/a.v2.jsonl",
            },
            [],
        ),
    ],
)
def test_each_folder_is_a_bucket_and_its_last_file_validates(tmp_path, names, pairs, short, capsys):
    assert {
        i.prefix(Path()).as_posix(): i.name for i in find_inputs(data_at(touch(tmp_path, names)))
    } == pairs
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == short


@pytest.mark.parametrize(
    "names, what",
    [
        (
            ["w/a.jsonl", "w/a.parquet", "w/z.jsonl"],
            r"w/a\.jsonl and w/a\.parquet would both become train/w/a\.bin",
        ),
        (["w/b/a.jsonl", "w/b__a.jsonl", "w/z.jsonl"], r"w/b/a\.jsonl and w/b__a\.jsonl"),
        (
            ["train/a.jsonl", "val/a.jsonl", "c/a.jsonl"],
            r"c/a\.jsonl is in neither train/ nor val/",
        ),
        (["a.md"], "no .parquet, .jsonl, .jsonl.gz, .jsonl.zst, .txt, .arrow file below it"),
        ([], "none: no such data folder"),
    ],
)
def test_ambiguous_inputs_are_refused(tmp_path, names, what):
    with pytest.raises((ValueError, FileNotFoundError), match=what):
        find_inputs(data_at(touch(tmp_path, names) if names else tmp_path / "none"))


@settings(max_examples=examples(1))
@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 6), st.randoms())
def test_dealing_is_a_partition_that_is_balanced_and_the_same_everywhere(sizes, num_tasks, random):
    inputs = [
        Input(Path(str(n)), str(n), "train", "b", str(n), size) for n, size in enumerate(sizes)
    ]
    tasks = deal(inputs, num_tasks)
    assert sorted(i.name for task in tasks for i in task) == sorted(i.name for i in inputs)
    loads = [sum(i.size for i in task) for task in tasks]
    assert max(loads) - min(loads) <= max(sizes, default=0)
    assert all(
        [i.size for i in task] == sorted((i.size for i in task), reverse=True) for task in tasks
    )
    random.shuffle(inputs)
    assert deal(inputs, num_tasks) == tasks


# ---- finished or not -----------------------------------------------------------------------------


def job_of(root, windows=None, tokenizer=None):
    """The job that each start of the command makes."""
    return Pretokenizer(
        root / "out",
        find_inputs(data_at(root / "raw")),
        windows or Windows(2048, 256),
        tokenizer or describe_tokenizer(Tokenizer()),
    )


@pytest.fixture
def root(tmp_path):
    """Three inputs in two buckets, all finished."""
    for name in ("a/1", "a/2", "b/1"):
        write_jsonl(tmp_path / "raw" / f"{name}.jsonl", some_texts(3))
    job = job_of(tmp_path)
    job.prepare()
    assert all(isinstance(result, dict) for _, result in job.make_all(job.inputs, num_workers=1))
    assert job.finish() == []
    return tmp_path


def test_finished_pairs_are_kept(root):
    job = job_of(root)
    job.refuse_others()
    before = {path: path.stat().st_ino for path in root.rglob("*")}
    assert all(job.make(i) == job.finished(i) for i in job.inputs)
    assert before == {path: path.stat().st_ino for path in root.rglob("*")}
    manifest = json.loads((root / "out/train/a/manifest.json").read_text())
    assert manifest["shards"]["1"]["input"] == {
        "name": "a/1.jsonl",
        "size": (root / "raw/a/1.jsonl").stat().st_size,
    }
    assert (manifest["tokenizer"], manifest["arguments"]) == (
        describe_tokenizer(Tokenizer()),
        {"max_length": 2048, "overlap_size": 256},
    )
    assert "mtime" not in json.dumps(manifest)


def test_pairs_that_do_not_match_are_made_again(root):
    def rewrite(path, change):
        path.write_bytes(change(path.read_bytes()))

    folder, raw = root / "out/train/a", root / "raw/a/1.jsonl"
    record, whole = folder / ".records/1.json", (folder / "1.bin").read_bytes()
    damages = {
        "no .bin": lambda: (folder / "1.bin").unlink(),
        "no .idx": lambda: (folder / "1.idx").unlink(),
        "short .bin": lambda: rewrite(folder / "1.bin", lambda data: data[:-1]),
        "long .idx": lambda: rewrite(folder / "1.idx", lambda data: data + b"1"),
        "no record": record.unlink,
        "truncated record": lambda: rewrite(record, lambda data: data[:-30]),
        "a list": lambda: rewrite(record, lambda data: b"[1]"),
        "other record": lambda: rewrite(
            record, lambda data: data.replace(b'"entries": 3', b'"entries": 4')
        ),
        "touched": lambda: os.utime(raw, ns=(1, 1)),
        "grown": lambda: rewrite(raw, lambda data: data * 2),
    }
    for what, damage in damages.items():
        damage()
        job = job_of(root)
        job.refuse_others()
        assert [i.name for i in job.inputs if not job.finished(i)] == ["a/1.jsonl"], what
        assert [i.name for i in job.finish()] == ["a/1.jsonl"], what
        assert all(map(job.make, job.inputs)) and job.finish() == []
        assert (folder / "1.bin").read_bytes() == whole * (1 + (what == "grown"))


def test_pairs_whose_input_is_gone_are_refused(root):
    (root / "raw/b/1.jsonl").unlink()
    with pytest.raises(
        ValueError, match=r"train/b/1\.bin: the input .* is no longer in --input-dir.*--output-dir"
    ):
        job_of(root).refuse_others()
    (root / "out/train/b/.records/1.json").unlink()
    write_jsonl(root / "raw/a/3.jsonl", ["new"])  # now a/2 is for training
    with pytest.raises(ValueError, match=r"val/a/2\.bin: the input .* now belongs to another pair"):
        job_of(root).refuse_others()


def test_old_leftovers_are_deleted_and_files_in_use_stay(root):
    folder = root / "out/train/a"
    old = folder / ".1.bin.abcd1234.tmp"
    fresh = folder / ".2.bin.abcd1234.tmp"
    foreign = folder / ".1.swp"
    for path in (old, fresh, foreign):
        path.touch()
    for path in (old, foreign):
        os.utime(path, (1, 1))
    with ShardWriter(folder / "busy", vocab_size=300) as writer:
        writer.add(np.array([1]), np.array([1]), np.array([0]))
        (busy,) = folder.glob(".busy.bin.*.tmp")
        os.utime(busy, (1, 1))
        remove_leftovers(folder)
        assert [path.exists() for path in (old, fresh, foreign, busy)] == [False, True, True, True]
        remove_leftovers(folder, fresh_s=0)
        assert busy.exists() and not fresh.exists()
    assert (folder / "busy.idx").exists()
