"""dev.make_sample_corpus: both buckets, distinct texts, the same corpus every time, never half-written."""

import json
import sys
from collections import Counter

import pyarrow.parquet as pq
import pytest

from dev import make_sample_corpus as corpus
from dev.make_sample_corpus import Settings, main, make_sample_corpus
from nanochat import dataset
from nanochat.dataset import list_parquet_files, parquets_iter_batched

SMALL = Settings(min_chars=150_000, max_chars=400_000, num_shards=3)


def write_module(path, i, *, functions=12):
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "".join(f'def f{i}_{k}(x):\n    """Return number {k} of module {i}, times x."""\n    return {k} * x\n\n'
                   for k in range(functions))
    path.write_text(f'"""Module {i} about things."""\n\n{body}')


@pytest.fixture
def roots(tmp_path):
    """Two synthetic roots with 400 modules and some duplicates, an empty file, a table and a file that is not UTF-8."""
    for i in range(400):
        write_module(tmp_path / ("lib" if i % 2 else "packages") / f"p{i % 7}" / f"m{i}.py", i)
    for n in range(6):
        write_module(tmp_path / "packages" / f"copy{n}.py", 0)
    (tmp_path / "packages" / "empty.py").write_text("")
    (tmp_path / "packages" / "table.py").write_text("X = [" + "1, " * corpus.MAX_DOCUMENT_CHARS + "]")
    (tmp_path / "packages" / "latin.py").write_bytes(b"# " + b"\xe9" * 500)
    write_module(tmp_path / "lib" / "site-packages" / "hidden.py", 999_999)
    return {"stdlib": tmp_path / "lib", "packages": tmp_path / "packages"}


def read_all(folder):
    """[(shard, bucket, text)] of every shard."""
    rows = []
    for path in list_parquet_files(folder):
        table = pq.read_table(path).to_pydict()
        rows += [(path, b, t) for b, t in zip(table["bucket"], table["text"])]
    return rows


def test_shards_mix_both_buckets_and_the_last_one_validates_both(roots, tmp_path):
    assert make_sample_corpus(tmp_path / "out", SMALL, roots=roots)
    rows = read_all(tmp_path / "out")
    shards = sorted({path for path, _, _ in rows})
    assert [path.rsplit("/", 1)[1] for path in shards] == [f"shard_{i:05d}.parquet" for i in range(4)]
    for shard in shards:
        assert {b for path, b, _ in rows if path == shard} == {"code", "docs"}
    val = [r for r in rows if r[0] == shards[-1]]
    assert 0.04 < len(val) / len(rows) < 0.06
    assert SMALL.min_chars <= sum(len(t) for _, _, t in rows) - sum(len(t) for _, _, t in val)
    dataset.main(["--verify", f"--data-dir={tmp_path / 'out'}"])
    train = [t for group in parquets_iter_batched("train", data_dir=tmp_path / "out") for t in group]
    assert len(train) + len(val) == len(rows)


def test_texts_are_distinct_and_of_useful_length_and_no_module_is_in_both_buckets(roots, tmp_path):
    make_sample_corpus(tmp_path / "out", Settings(min_chars=1000, max_chars=4_000_000, num_shards=3), roots=roots)
    rows = read_all(tmp_path / "out")
    texts = Counter(t for _, _, t in rows)
    assert max(texts.values()) == 1
    assert all(corpus.MIN_DOCUMENT_CHARS <= len(t) <= corpus.MAX_DOCUMENT_CHARS for t in texts)
    assert not any("999999" in t for t in texts)  # packages inside the library's folder are skipped
    code = {t for _, b, t in rows if b == "code"}
    docs = {t for _, b, t in rows if b == "docs"}
    for i in range(1, 400):
        line = f"of module {i}, times"
        assert any(line in t for t in code) + any(line in t for t in docs) == 1
    assert len(code) > 100 and len(docs) > 100


def test_equal_settings_give_equal_files_and_another_seed_another_order(roots, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_sample_corpus(tmp_path / name, Settings(seed, 150_000, 400_000, 3), roots=roots)
    assert [t for _, _, t in read_all(tmp_path / "a")] != [t for _, _, t in read_all(tmp_path / "c")]
    a, b = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in "ab")
    assert a == b


def test_buckets_write_one_folder_each_with_its_own_validation_shard(roots, tmp_path):
    make_sample_corpus(tmp_path / "out", Settings(0, 100_000, 400_000, 2, buckets=True), roots=roots)
    for bucket in ("code", "docs"):
        rows = read_all(tmp_path / "out" / bucket)
        assert {b for _, b, _ in rows} == {bucket} and len({p for p, _, _ in rows}) == 3
    assert list_parquet_files(tmp_path / "out") == [
        str(tmp_path / "out" / b / f"shard_{i:05d}.parquet") for b in ("code", "docs") for i in range(3)]


def test_a_second_run_does_nothing_and_other_settings_or_missing_shards_are_refused(
        roots, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(corpus, "python_roots", lambda: roots)
    args = ["--output-dir", str(tmp_path / "out"), "--min-chars", "100000", "--max-chars", "300000",
            "--num-shards", "2"]
    main(args)
    times = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()}
    assert "already existed" not in capsys.readouterr().out
    main(args)
    assert "already existed" in capsys.readouterr().out
    assert times == {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out").iterdir()} and len(times) == 4
    with pytest.raises(ValueError, match="delete that folder"):
        main([*args, "--seed", "5"])
    (tmp_path / "out" / "shard_00001.parquet").unlink()
    with pytest.raises(ValueError, match=r"corpus lacks shard_00001\.parquet"):
        main(args)


def test_too_little_text_or_a_folder_with_other_files_is_refused_and_nothing_changes(roots, tmp_path):
    with pytest.raises(ValueError, match=r"found .* characters.*--min-chars 20,000,000"):
        make_sample_corpus(tmp_path / "out", Settings(), roots=roots)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lib", "packages"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(ValueError, match="already exists"):
        make_sample_corpus(tmp_path / "out", SMALL, roots=roots)
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"


def test_this_machine_has_real_text_of_both_buckets(tmp_path, capsys):
    main(["--output-dir", str(tmp_path / "out"), "--min-chars", "2500000", "--max-chars", "3200000"])
    rows = read_all(tmp_path / "out")
    code, docs = ([t for _, b, t in rows if b == bucket] for bucket in ("code", "docs"))
    assert sum(map(len, code)) > 2_000_000 and sum(map(len, docs)) > 500_000
    assert sum(map(len, code + docs)) < 3_400_000 and any("def " in t for t in code)
    topics = set(corpus.pydoc_topics())
    assert any(t in topics for t in docs) and sum(t not in topics for t in docs) > 10
    manifest = json.loads((tmp_path / "out" / corpus.MANIFEST).read_text())
    assert manifest["python"] == sys.version
    assert sum(s["documents"] for s in manifest["shards"].values()) == len(rows)
    assert "9 shards" in capsys.readouterr().out
