"""dev.make_sample_corpus: both buckets, distinct texts, the same corpus every time, never half-written."""

import json
import sys
from collections import Counter

import pyarrow.parquet as pq
import pytest

from dev import make_sample_corpus as corpus
from dev.make_sample_corpus import Settings, main, make_sample_corpus
from nanochat.dataset import list_parquet_files
from tests.toy import tree

SMALL = Settings(min_chars=150_000, max_chars=400_000, num_shards=3)


def write_module(path, i):
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "".join(f'def f{i}_{k}(x):\n    """Return number {k} of module {i}, times x."""\n    return {k} * x\n\n'
                   for k in range(12))
    path.write_text(f'"""Module {i} about things."""\n\n{body}')


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Two synthetic roots with 400 modules and some duplicates, an empty file, a table and a file that is not UTF-8."""
    lib, packages = (tmp_path_factory.mktemp(name) for name in ("lib", "packages"))
    for i in range(400):
        write_module((lib if i % 2 else packages) / f"p{i % 7}" / f"m{i}.py", i)
    for n in range(6):
        write_module(packages / f"copy{n}.py", 0)
    (packages / "empty.py").write_text("")
    (packages / "table.py").write_text("X = [" + "1, " * corpus.MAX_DOCUMENT_CHARS + "]")
    (packages / "latin.py").write_bytes(b"# " + b"\xe9" * 500)
    write_module(lib / "site-packages" / "hidden.py", 999_999)
    return {"stdlib": lib, "packages": packages}


def read_all(folder):
    """[(name of its shard, bucket, text)] of every document."""
    rows = []
    for path in list_parquet_files(folder):
        table = pq.read_table(path).to_pydict()
        rows += [(path.removeprefix(f"{folder}/"), b, t) for b, t in zip(table["bucket"], table["text"])]
    return rows


def test_shards_mix_both_buckets_the_last_validates_and_equal_settings_give_equal_files(roots, tmp_path):
    for name in ("one", "same"):
        assert make_sample_corpus(tmp_path / name, SMALL, roots=roots)
    assert tree(tmp_path / "one") == tree(tmp_path / "same")
    rows = read_all(tmp_path / "one")
    shards = [f"shard_{i:05d}.parquet" for i in range(4)]
    assert {row[:2] for row in rows} == {(shard, bucket) for shard in shards for bucket in ("code", "docs")}
    train = [t for shard, _, t in rows if shard != shards[-1]]
    assert 0.04 < 1 - len(train) / len(rows) < 0.06
    assert SMALL.min_chars <= sum(map(len, train))
    make_sample_corpus(tmp_path / "other", Settings(1, 150_000, 400_000, 3), roots=roots)
    assert read_all(tmp_path / "other") != rows


def test_texts_are_distinct_and_of_useful_length_and_no_module_is_in_both_buckets(roots, tmp_path):
    make_sample_corpus(tmp_path / "out", Settings(0, 1000, 4_000_000, 2, buckets=True), roots=roots)
    rows = read_all(tmp_path / "out")
    names = [f"{bucket}/shard_{i:05d}.parquet" for bucket in ("code", "docs") for i in range(3)]
    assert sorted({(name, bucket) for name, bucket, _ in rows}) == [(name, name[:4]) for name in names]
    texts = Counter(t for _, _, t in rows)
    assert max(texts.values()) == 1
    assert all(corpus.MIN_DOCUMENT_CHARS <= len(t) <= corpus.MAX_DOCUMENT_CHARS for t in texts)
    assert not any("999999" in t for t in texts)  # packages inside the library's folder are skipped
    code, docs = ([t for _, b, t in rows if b == bucket] for bucket in ("code", "docs"))
    for i in range(1, 400):
        line = f"of module {i}, times"
        assert any(line in t for t in code) + any(line in t for t in docs) == 1
    assert len(code) > 100 and len(docs) > 100


def test_a_second_run_does_nothing_and_other_settings_missing_shards_and_other_files_are_refused(roots, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"found .* characters.*--min-chars 20,000,000"):
        make_sample_corpus(out, Settings(), roots=roots)
    assert not list(tmp_path.iterdir())
    assert make_sample_corpus(out, SMALL, roots=roots)
    times = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    assert not make_sample_corpus(out, SMALL, roots=roots)
    assert times == {p.name: p.stat().st_mtime_ns for p in out.iterdir()} and len(times) == 5
    with pytest.raises(ValueError, match="delete that folder"):
        make_sample_corpus(out, Settings(5, 150_000, 400_000, 3), roots=roots)
    (out / "shard_00001.parquet").unlink()
    with pytest.raises(ValueError, match=r"corpus lacks shard_00001\.parquet"):
        make_sample_corpus(out, SMALL, roots=roots)
    (out / corpus.MANIFEST).unlink()
    before = tree(out)
    with pytest.raises(ValueError, match="already exists"):
        make_sample_corpus(out, SMALL, roots=roots)
    assert tree(out) == before


def test_this_machine_has_real_text_of_both_buckets(tmp_path, capsys):
    flags = ["--output-dir", str(tmp_path / "out"), "--min-chars", "2500000", "--max-chars", "3200000"]
    main(flags)
    out = capsys.readouterr().out
    assert "9 shards" in out and "already existed" not in out
    rows = read_all(tmp_path / "out")
    code, docs = ([t for _, b, t in rows if b == bucket] for bucket in ("code", "docs"))
    assert sum(map(len, code)) > 2_000_000 and sum(map(len, docs)) > 500_000
    assert sum(map(len, code + docs)) < 3_400_000 and any("def " in t for t in code)
    manifest = json.loads((tmp_path / "out" / corpus.MANIFEST).read_text())
    assert manifest["python"] == sys.version
    assert sum(s["documents"] for s in manifest["shards"].values()) == len(rows)
    main(flags)
    assert "already existed" in capsys.readouterr().out
