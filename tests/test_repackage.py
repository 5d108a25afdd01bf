"""Repackaging: every document once, in an order that depends on inputs and seed alone, within bounded memory."""

import gzip
import json
import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dev import repackage_data_reference as module
from dev.repackage_data_reference import main, repackage
from nanochat.dataset import list_parquet_files
from nanochat.download import verify


def made_up(n, seed=0):
    rng = random.Random(seed)
    tails = (rng.choice("aé漢😀") * int(rng.paretovariate(1) * 20 % 1300) for _ in range(n - 2))
    return [f"{seed}.{i} {tail}" for i, tail in enumerate(tails)] + ["", "x"]


def write_parquet(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"id": range(len(texts)), "text": pa.array(texts, pa.string())}), path, row_group_size=700)


def read_all(folder):
    """[(documents per row group, texts)] of each shard."""
    shards = []
    for path in list_parquet_files(folder):
        with pq.ParquetFile(path) as f:
            sizes = [f.metadata.row_group(g).num_rows for g in range(f.num_row_groups)]
            assert f.metadata.row_group(0).column(0).compression == "ZSTD"
            shards.append((sizes, f.read().column("text").to_pylist()))
    return shards


def order(folder):
    return [text for _, texts in read_all(folder) for text in texts]


@pytest.fixture
def inputs(tmp_path):
    """5,000 documents in four files of three formats."""
    folder, texts = tmp_path / "in", made_up(5000)
    write_parquet(folder / "a.parquet", texts[:3000])
    write_parquet(folder / "sub" / "b.parquet", texts[3000:4000])
    lines = [json.dumps({"text": t, "n": 1}) + "\n" for t in texts[4000:]]
    (folder / "c.jsonl").write_text("".join(lines[:500]))
    (folder / "d.jsonl.gz").write_bytes(gzip.compress("".join(lines[500:]).encode()))
    (folder / "notes.md").write_text("not data")
    return folder, texts


def test_every_document_comes_out_exactly_once_and_shuffled_in_full_row_groups(inputs, tmp_path):
    folder, texts = inputs
    (tmp_path / ".out.unfinished" / "scratch").mkdir(parents=True)  # of a killed run
    report = repackage([folder], tmp_path / "out", shard_chars=sum(map(len, texts)) // 3)
    got, shards = order(tmp_path / "out"), read_all(tmp_path / "out")
    assert Counter(got) == Counter(texts) and got != texts
    assert report.documents == 5000 and report.chars == sum(map(len, texts))
    place = {t: i for i, t in enumerate(texts)}
    early = sum(place[t] < 2500 for t in got[:1000] if t in place)
    assert 400 < early < 600  # a thousand documents come from everywhere
    assert not any(verify(tmp_path / "out", num_workers=1).values())
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    assert len(shards) == 3 and report.shard_chars == [sum(map(len, t)) for _, t in shards]
    assert [n for sizes, _ in shards for n in sizes] == [1024] * 4 + [5000 - 4 * 1024]


@pytest.mark.parametrize("n", [2, 1024, 1025])
def test_few_documents_still_give_a_validation_shard(tmp_path, n):
    write_parquet(tmp_path / "in.parquet", made_up(n))
    repackage([tmp_path / "in.parquet"], tmp_path / "out")
    shards = read_all(tmp_path / "out")
    assert len(shards) == 2 and all(texts for _, texts in shards)
    assert Counter(order(tmp_path / "out")) == Counter(made_up(n))


def test_memory_budget_bounds_what_is_sorted_at_once_and_changes_no_byte(inputs, tmp_path, monkeypatch):
    folder, texts = inputs
    budget, sorted_bytes = 7000, []
    assert budget > 24 + max(len(t.encode()) for t in texts)  # no single document forces more
    monkeypatch.setattr(module, "read_bucket", lambda path, read=module.read_bucket: (
        sorted_bytes.append(path.stat().st_size), read(path))[1])
    repackage([folder], tmp_path / "large", shard_chars=100_000)
    whole, largest = len(sorted_bytes), max(sorted_bytes)
    repackage([folder], tmp_path / "small", shard_chars=100_000, memory_bytes=budget)
    assert largest > budget and len(sorted_bytes) > 2 * whole + sum(size > budget for size in sorted_bytes[whole:])
    names = [Path(p).name for p in list_parquet_files(tmp_path / "large")]
    assert len(names) > 2 and names == [Path(p).name for p in list_parquet_files(tmp_path / "small")]
    assert all((tmp_path / "small" / n).read_bytes() == (tmp_path / "large" / n).read_bytes() for n in names)


def test_same_inputs_and_seed_give_the_same_files_wherever_they_lie(inputs, tmp_path):
    folder, _ = inputs
    repackage([folder], tmp_path / "one", seed=1)
    folder.rename(tmp_path / "moved")
    repackage([tmp_path / "moved"], tmp_path / "two", seed=1)
    repackage([tmp_path / "moved"], tmp_path / "three", seed=2)
    assert order(tmp_path / "one") == order(tmp_path / "two") != order(tmp_path / "three")


# ---- bad input ------------------------------------------------------------------------------------------------------

def test_broken_lines_are_named_and_counted(tmp_path, capsys):
    good = [json.dumps({"text": t}).encode() for t in ("one", "two", "three")]
    bad = [b'{"text": "cut', b'{"other": 1}']
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([good[0], *bad, good[1], b"", good[2]]))
    report = repackage([tmp_path / "in.jsonl"], tmp_path / "out")
    assert report.skipped_lines == len(bad) and sorted(order(tmp_path / "out")) == ["one", "three", "two"]
    err = capsys.readouterr().err
    assert all(f"in.jsonl:{n}:" in err for n in (2, 3))


@pytest.mark.parametrize("name, content, says", [
    ("a.parquet", b"PAR1 rubbish", "not a whole parquet"),
    ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 1000, mtime=0)[:-20], "not a whole gzip"),
    ("a.jsonl", b'{"text": "only one"}\n', "at least 2"),
])
def test_unreadable_input_is_an_error_that_leaves_nothing_behind(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=says):
        repackage([tmp_path / name], tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_an_output_that_is_there_is_never_touched(inputs, tmp_path):
    folder, _ = inputs
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(ValueError, match="is there already"):
        main(["--input", str(folder), "--output-dir", str(tmp_path / "out")])
    assert (tmp_path / "out" / "mine").read_text() == "keep"
