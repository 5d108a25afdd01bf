"""dev.repackage_data_reference: every document once, in an order of inputs and seed alone, in
bounded memory."""

import gzip
import json
import random
from collections import Counter

import pyarrow.parquet as pq
import pytest

from dev import repackage_data_reference as module
from dev.repackage_data_reference import main, repackage
from nanochat import dataset
from tests.toy import tree, write_jsonl, write_parquet


def random_texts(n):
    rng = random.Random(0)
    tails = (rng.choice("aé漢😀") * int(rng.paretovariate(1) * 20 % 1300) for _ in range(n - 2))
    return [f"{i} {tail}" for i, tail in enumerate(tails)] + ["", "x"]


def read_all(folder):
    """[(documents of each row group, texts)] of each shard."""
    shards = []
    for path in sorted(folder.iterdir()):
        with pq.ParquetFile(path) as f:
            sizes = [f.metadata.row_group(g).num_rows for g in range(f.num_row_groups)]
            assert f.metadata.row_group(0).column(0).compression == "ZSTD"
            shards.append((sizes, f.read().column("text").to_pylist()))
    return shards


def order(folder):
    return [text for _, texts in read_all(folder) for text in texts]


@pytest.fixture
def inputs(tmp_path):
    """5,000 documents in three files of different formats."""
    folder, texts = tmp_path / "in", random_texts(5000)
    write_parquet(folder / "sub" / "b.parquet", texts[:3000], 700)
    write_jsonl(folder / "c.jsonl", texts[3000:3500])
    write_jsonl(folder / "d.jsonl.gz", texts[3500:])
    (folder / "notes.md").write_text("not data")
    return folder, texts


def test_every_document_comes_out_exactly_once_and_shuffled_in_full_row_groups(
    inputs, tmp_path, capsys
):
    folder, texts = inputs
    (tmp_path / ".out.unfinished").mkdir()  # left by a killed process
    chars = sum(map(len, texts))
    main(
        [
            "--input",
            str(folder),
            "--output-dir",
            str(tmp_path / "out"),
            f"--shard-chars={chars // 3}",
        ]
    )
    assert f"5,000 documents, {chars:,} characters in 3 shards" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}
    got = order(tmp_path / "out")
    assert Counter(got) == Counter(texts)
    early = set(texts[:2500])
    assert 400 < sum(text in early for text in got[:1000]) < 600, (
        "a thousand documents come from everywhere"
    )
    dataset.main(["--verify", f"--data-dir={tmp_path / 'out'}"])
    assert [sizes for sizes, _ in read_all(tmp_path / "out")] == [
        [1024],
        [1024] * 2,
        [1024, 5000 - 4 * 1024],
    ]


@pytest.mark.parametrize("n", [2, 1024, 1025])
def test_few_documents_still_give_a_validation_shard(tmp_path, n):
    repackage([write_parquet(tmp_path / "in.parquet", random_texts(n))], tmp_path / "out")
    assert len(read_all(tmp_path / "out")) == 2
    assert Counter(order(tmp_path / "out")) == Counter(random_texts(n))


def test_the_order_depends_on_inputs_and_seed_but_not_on_their_folder_or_the_memory(
    inputs, tmp_path, monkeypatch
):
    folder, texts = inputs
    budget = 20_000
    sorted_bytes = []
    merges = []

    def recorded(records, sort=sorted):
        sorted_bytes.append(sum(len(text) + module.RECORD_BYTES for _, text in records))
        return sort(records)

    monkeypatch.setattr(module, "sorted", recorded, raising=False)
    monkeypatch.setattr(
        module,
        "merged",
        lambda runs, merge=module.merged: (merges.append(len(runs)), merge(runs))[1],
    )
    monkeypatch.setattr(module, "RUNS_AT_ONCE", 10)
    repackage([folder], tmp_path / "large", shard_chars=100_000)
    assert len(sorted_bytes) == 1 and merges == [1]
    moved = folder.rename(tmp_path / "moved")
    repackage([moved], tmp_path / "small", shard_chars=100_000, memory_bytes=budget)
    one = max(len(text.encode()) for text in texts) + module.RECORD_BYTES
    assert max(sorted_bytes[1:]) < budget + one and len(merges) > 10 and max(merges) == 10
    assert (
        tree(tmp_path / "large") == tree(tmp_path / "small") and len(tree(tmp_path / "large")) > 2
    )
    repackage([moved], tmp_path / "seed", shard_chars=100_000, seed=2)
    assert order(tmp_path / "seed") != order(tmp_path / "large")


# ---- bad input -----------------------------------------------------------------------------------


def test_broken_lines_are_named_and_counted_or_fatal_with_strict(tmp_path, capsys):
    good = [json.dumps({"text": text}).encode() for text in ("one", "two", "three")]
    (tmp_path / "in.jsonl").write_bytes(
        b"\n".join([good[0], b'{"text": "cut', b'{"other": 1}', *good[1:]])
    )
    counts = repackage([tmp_path / "in.jsonl"], tmp_path / "out")
    assert counts["broken"] == 2 and sorted(order(tmp_path / "out")) == ["one", "three", "two"]
    assert (
        "in.jsonl: 2 broken lines skipped, the first is line 2: not JSON" in capsys.readouterr().err
    )
    with pytest.raises(ValueError, match=r"in\.jsonl: line 2: not JSON.*--strict"):
        main(
            [
                "--input",
                str(tmp_path / "in.jsonl"),
                "--output-dir",
                str(tmp_path / "strict"),
                "--strict",
            ]
        )
    assert not (tmp_path / "strict").exists()


@pytest.mark.parametrize(
    "name, content, error",
    [
        ("a.parquet", b"PAR1 rubbish", "not a parquet"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 1000, mtime=0)[:-20], "not a gzip"),
        ("a.jsonl", b'{"text": "only one"}\n', "at least 2"),
    ],
)
def test_unreadable_input_is_an_error_that_leaves_nothing_behind(tmp_path, name, content, error):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=error):
        repackage([tmp_path / name], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [name]
