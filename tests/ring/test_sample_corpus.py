"""dev.make_sample_corpus: both buckets, distinct texts, the same corpus every time, never
half-written."""

import json
import shutil
import sys
from collections import Counter

import pyarrow.parquet as pq
import pytest

from dev import make_sample_corpus as corpus
from dev.make_sample_corpus import Settings, main, make_sample_corpus
from nanochat.dataset import list_parquet_files
from nanochat.files import data_at
from nanochat.splits import find_splits
from tests.toy import tree

SMALL = Settings(min_chars=150_000, max_chars=400_000, num_shards=3)


def write_module(path, i):
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "".join(
        f'def f{i}_{k}(x):\n    """Return number {k} of module {i}, times x."""\n    return {k} * x\n\n'
        for k in range(12)
    )
    path.write_text(f'"""Module {i} about things."""\n\n{body}')


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """400 synthetic modules and some duplicates, an empty file, a table, a long source and a file
    that is not UTF-8."""
    root = tmp_path_factory.mktemp("packages")
    for i in range(400):
        write_module(root / f"p{i % 7}" / f"m{i}.py", i)
    for n in range(6):
        write_module(root / f"copy{n}.py", 0)
    (root / "empty.py").write_text("")
    (root / "table.py").write_text("X = [" + "1, " * corpus.MAX_DOCUMENT_CHARS + "]")
    (root / "latin.py").write_bytes(b"# " + b"\xe9" * 500)
    return {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}


def read_all(folder):
    """[(name of its shard, bucket, text)] of every document."""
    rows = []
    for path in list_parquet_files(folder):
        table = pq.read_table(path).to_pydict()
        rows += [
            (path.removeprefix(f"{folder}/"), b, t) for b, t in zip(table["bucket"], table["text"])
        ]
    return rows


def test_shards_mix_both_buckets_the_last_validates_and_equal_settings_give_equal_files(
    modules, tmp_path
):
    for name in ("one", "same"):
        assert make_sample_corpus(tmp_path / name, SMALL, modules=modules)
    assert tree(tmp_path / "one") == tree(tmp_path / "same")
    rows = read_all(tmp_path / "one")
    shards = [f"shard_{i:05d}.parquet" for i in range(4)]
    assert {row[:2] for row in rows} == {
        (shard, bucket) for shard in shards for bucket in ("code", "docs")
    }
    train = [t for shard, _, t in rows if shard != shards[-1]]
    assert 0.04 < 1 - len(train) / len(rows) < 0.06
    assert SMALL.min_chars <= sum(map(len, train))
    make_sample_corpus(tmp_path / "other", Settings(1, 150_000, 400_000, 3), modules=modules)
    assert read_all(tmp_path / "other") != rows


def test_texts_are_distinct_and_of_useful_length_and_no_module_is_in_both_buckets(
    modules, tmp_path
):
    make_sample_corpus(
        tmp_path / "out", Settings(0, 1000, 4_000_000, 2, buckets=True), modules=modules
    )
    rows = read_all(tmp_path / "out")
    names = [f"{bucket}/shard_{i:05d}.parquet" for bucket in ("code", "docs") for i in range(3)]
    assert sorted({(name, bucket) for name, bucket, _ in rows}) == [
        (name, name[:4]) for name in names
    ]
    texts = Counter(t for _, _, t in rows)
    assert max(texts.values()) == 1
    assert all(corpus.MIN_DOCUMENT_CHARS <= len(t) <= corpus.MAX_DOCUMENT_CHARS for t in texts)
    code, docs = ([t for _, b, t in rows if b == bucket] for bucket in ("code", "docs"))
    for i in range(1, 400):
        line = f"of module {i}, times"
        assert any(line in t for t in code) + any(line in t for t in docs) == 1
    assert len(code) > 100 and len(docs) > 100


def test_a_second_run_does_nothing_and_other_settings_missing_shards_and_other_files_are_refused(
    modules, tmp_path
):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"found .* characters.*--min-chars 20,000,000"):
        make_sample_corpus(out, Settings(), modules=modules)
    assert not list(tmp_path.iterdir())
    assert make_sample_corpus(out, SMALL, modules=modules)
    times = {p.name: p.stat().st_mtime_ns for p in out.iterdir()}
    assert not make_sample_corpus(out, SMALL, modules=modules)
    assert times == {p.name: p.stat().st_mtime_ns for p in out.iterdir()} and len(times) == 5
    with pytest.raises(ValueError, match="delete that folder"):
        make_sample_corpus(out, Settings(5, 150_000, 400_000, 3), modules=modules)
    (out / "shard_00001.parquet").unlink()
    with pytest.raises(ValueError, match=r"corpus lacks shard_00001\.parquet"):
        make_sample_corpus(out, SMALL, modules=modules)
    (out / corpus.MANIFEST).unlink()
    before = tree(out)
    with pytest.raises(ValueError, match="already exists"):
        make_sample_corpus(out, SMALL, modules=modules)
    assert tree(out) == before


def test_a_long_source_becomes_several_documents_in_whole_lines():
    source = "".join(f"line {i}\n" for i in range(20_000))
    parts = list(corpus.pieces(source))
    assert "".join(parts) == source and len(parts) > 3
    assert all(part.endswith("\n") and len(part) <= corpus.MAX_DOCUMENT_CHARS for part in parts)


def test_the_installed_packages_give_the_corpus_that_everyone_has(tmp_path, capsys):
    """Regression: the corpus was made of all packages that happened to be installed, and of
    Python's own library."""
    flags = [
        "--output-dir",
        str(tmp_path / "out"),
        "--min-chars",
        "2500000",
        "--max-chars",
        "3200000",
    ]
    main(flags)
    out = capsys.readouterr().out
    assert "9 shards" in out and "already existed" not in out
    rows = read_all(tmp_path / "out")
    code, docs = ([t for _, b, t in rows if b == bucket] for bucket in ("code", "docs"))
    assert sum(map(len, code)) > 2_000_000 and sum(map(len, docs)) > 200_000
    assert sum(map(len, code + docs)) < 3_400_000 and any("def " in t for t in code)
    manifest = json.loads((tmp_path / "out" / corpus.MANIFEST).read_text())
    assert sum(s["documents"] for s in manifest["shards"].values()) == len(rows)
    assert manifest["digest"] == "ae0b5ea9d82d4b2a"
    main(flags)
    assert "already existed" in capsys.readouterr().out


def install(folder, name, version, files):
    """A fake installed package: {name: text} of its files, all but those with the text None in its
    RECORD."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """An environment with two packages of which the corpus is made, each with one module, and other
    files."""
    monkeypatch.setattr(corpus, "PACKAGES", ("numpy", "pyarrow"))
    pinned = corpus.pinned_versions()
    install(
        tmp_path,
        "numpy",
        pinned["numpy"],
        {
            "numpy/core.py": "",
            "numpy/__init__.py": "",
            "numpy/distutils/log.py": "",
            "numpy/core.pyi": "",
            "numpy/__pycache__/core.cpython-311.pyc": "",
            "../../../bin/f2py.py": "",
        },
    )
    install(tmp_path, "pyarrow", pinned["pyarrow"], {"pyarrow/fs.py": ""})
    install(tmp_path, "unrelated", "1.0", {"unrelated/core.py": ""})
    (tmp_path / "numpy" / "added_by_hand.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_modules_are_those_that_pinned_packages_list_and_that_are_the_same_on_every_platform(
    environment, caplog
):
    assert corpus.find_modules() == {
        name: environment / name for name in ("numpy/core.py", "pyarrow/fs.py")
    }
    assert not caplog.text


def test_a_package_that_is_missing_or_has_another_version_is_named(environment, caplog):
    next(environment.glob("pyarrow-*")).rename(environment / "pyarrow-0.1.dist-info")
    (environment / "pyarrow-0.1.dist-info" / "METADATA").write_text("Name: pyarrow\nVersion: 0.1\n")
    shutil.rmtree(next(environment.glob("numpy-*")))
    assert corpus.find_modules() == {"pyarrow/fs.py": environment / "pyarrow/fs.py"}
    assert "numpy is not installed, so this corpus lacks its text" in caplog.text
    assert "pyarrow 0.1 is installed, but the corpus is defined with" in caplog.text


def test_every_package_of_the_corpus_is_pinned_exactly():
    pinned = corpus.pinned_versions()
    assert [
        name for name in corpus.PACKAGES if not pinned.get(name)
    ] == [] and "torch" not in corpus.PACKAGES


@pytest.mark.parametrize(
    ("digest", "noted"), [("0123456789abcdef", True), (corpus.KNOWN_DIGEST, False)]
)
def test_a_corpus_that_differs_from_everyone_elses_is_a_note(
    digest, noted, tmp_path, monkeypatch, capsys
):
    def write_only_the_manifest(output_dir, settings):
        (output_dir / corpus.MANIFEST).write_text(json.dumps({"digest": digest, "shards": {}}))

    monkeypatch.setattr(corpus, "make_sample_corpus", write_only_the_manifest)
    main([f"--output-dir={tmp_path}"])
    assert (
        f"note: everyone else's corpus has the digest {corpus.KNOWN_DIGEST}"
        in capsys.readouterr().out
    ) == noted


def test_the_record_of_the_corpus_is_not_reported_as_data_that_is_not_read(
    modules, tmp_path, caplog
):
    make_sample_corpus(tmp_path / "out", SMALL, modules=modules)
    find_splits(data_at(tmp_path / "out"))
    assert (tmp_path / "out" / corpus.MANIFEST).exists() and caplog.text == ""
