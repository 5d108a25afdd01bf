"""A run and its data: it prints which files validate and which train, it never trains on data that
changed after it started, and documents can be left out of its targets."""

import json
import os
import re
import shutil
from contextlib import closing

import numpy as np
import pytest

from nanochat import sources, tokens
from nanochat.order import StreamConfig
from nanochat.pins import leave_out
from nanochat.stream import Stream
from scripts import compare_runs, tok_shards, validate, verify
from tests import toy, training
from tests.training import flags, refuse, run_dir, steps, succeed

workplace = training.in_workplace(**training.SMALL, num_iterations=4, save_every=-1)


# ---- what is printed -----------------------------------------------------------------------------


def test_base_train_and_validate_report_the_split_and_the_progress_before_the_first_step(capsys):
    output = succeed(eval_every=2).out
    patterns = [
        r"validation: shard_3.parquet \(96 documents\), 2\d.\d% of all bytes",
        r"training: shard_0.parquet, shard_1.parquet, shard_2.parquet \(288 documents\); "
        r"this run trains on 2,048 tokens",
        r"warning: .*2\d.\d% of the bytes.*--val-fraction",
    ]
    assert all(re.search(pattern, output) for pattern in patterns), output
    at = [
        output.index(line)
        for line in (
            "start: reading the run directory and the data files",
            "validation:",
            "start: building the model",
            "start: packing the first step",
            "start: the first evaluation",
            "step 00000 | validation",
            "step 00000/00004",
        )
    ]
    assert at == sorted(at)
    assert "start: packing the first step" in succeed(eval_every=2, num_iterations=6).out
    capsys.readouterr()
    assert validate.main(flags(model_tag="other")) == 0
    output = capsys.readouterr().out
    assert all(re.search(pattern, output) for pattern in patterns), output
    output = succeed(model_tag="shared", val_fraction=0.25).out
    val, train = re.search(
        r"each .*4 files\), (\d+) documents\ntraining: the rest of 4 files, (\d+) doc", output
    ).groups()
    assert int(val) + int(train) == 384


# ---- data that changed ---------------------------------------------------------------------------


@pytest.fixture
def shards(workplace):
    """Settings of a run on shards, the folder of these, and its first training file."""
    folder = workplace / "shards"
    assert (
        tok_shards.main(
            [
                f"--input-dir={workplace / 'data'}",
                f"--output-dir={folder}",
                f"--tokenizer={workplace / 'tokenizer'}",
                "--num-workers=1",
            ]
        )
        == 0
    )
    return (
        {"data_path": folder, "data_format": "shards"},
        folder,
        sorted((folder / "train").rglob("*.bin"))[0],
    )


def change(path, every, first=0):
    """Change every `every`-th id from number `first` on, without changing the size and time of the
    file."""
    stat, ids = path.stat(), np.fromfile(path, np.uint16)
    ids[first::every] ^= 1
    ids.tofile(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def sample_no_blocks():
    tokens.BLOCKS = 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_token_files_that_changed_after_a_clean_stop_are_not_trained_on(
    shards, monkeypatch, world_size
):
    """Sampled blocks are compared first. Without them, the digest of the next step shows the
    change."""
    settings, folder, _ = shards
    monkeypatch.setattr(tokens, "BLOCKS", 0, raising=False)
    succeed(**settings)
    for path in folder.rglob("*.bin"):
        change(path, 20)
    group = training.start(world_size, hook=sample_no_blocks, **settings, num_iterations=8)
    assert group.wait() == [1] * world_size
    assert all(word in group.text() for word in ("step 4", "digest", "changed"))
    assert sorted(steps()) == [0, 1, 2, 3], "no step trained on the changed data"


def test_sampled_blocks_show_at_the_start_a_change_in_any_part_of_a_token_file(shards):
    """Unchanged data resumes on any number of processes, and so does a run that pinned no
    blocks."""
    settings, _, path = shards
    succeed(**settings)
    for first in (0, path.stat().st_size // 2 - 1):  # the first id, the last id
        change(path, 10**9, first)
        error = refuse(**settings, num_iterations=6)
        assert path.name in error and "changed since this run began (blocks" in error
        change(path, 10**9, first)
    training.finish(2, **settings, num_iterations=5)
    manifest = run_dir() / "data_manifest.json"
    pinned = json.loads(manifest.read_text())
    for file in [
        file
        for buckets in pinned.values()
        for bucket in buckets.values()
        for file in bucket["files"]
    ]:
        assert file.pop("blocks")
    manifest.write_text(json.dumps(pinned))
    succeed(**settings, num_iterations=6)
    assert sorted(steps()) == list(range(6))


@pytest.mark.parametrize("late", [True, False], ids=["manifests appear", "manifests vanish"])
def test_a_run_on_token_files_keeps_the_order_that_it_began_with(
    shards, tmp_path, late, monkeypatch
):
    """Regression: an error said that files had changed in which no byte had."""
    monkeypatch.setattr(sources, "SMALL_TOKENS", -1)  # shuffled by group
    settings, folder, _ = shards
    for records in folder.rglob(".records"):
        shutil.rmtree(records)
    paths = {path: tmp_path / path.parent.parent.name for path in folder.rglob("manifest.json")}

    def move(there):
        for path, away in paths.items():
            if path.exists() != there:
                os.rename(*((away, path) if there else (path, away)))

    for tag, there in (("with", True), ("without", False)):
        move(there)
        succeed(model_tag=tag, **settings, num_iterations=8)
    for there, number in ((not late, 4), (late, 8)):
        move(there)
        succeed(**settings, num_iterations=number)
    began_like, other = ("without", "with") if late else ("with", "without")
    assert training.digests() == training.digests(began_like) != training.digests(other)
    assert verify.main([str(run_dir())]) == 0


def test_a_run_begins_on_no_folder_that_tok_shards_has_not_finished(shards):
    """Regression: it trained on the files that were there."""
    settings, folder, _ = shards
    (folder / "val/data/manifest.json").unlink()
    error = refuse(**settings)
    assert "manifest.json is missing in 1 of 2 folders (val/data)" in error
    assert not run_dir().exists()


def test_verify_of_a_run_reads_its_token_files(shards, capsys, monkeypatch):
    settings, _, path = shards
    monkeypatch.setattr(tokens, "BLOCKS", 2)
    succeed(**settings)
    assert verify.main([str(run_dir())]) == 0
    change(path, 10**9, 5000)  # in none of the sampled blocks
    capsys.readouterr()
    assert verify.main(["run"]) == 1
    output = capsys.readouterr().out
    assert f"PROBLEM {path}: bin_hash is" in output and "1 problem\n" in output


def test_verify_of_a_run_names_changed_and_missing_data(workplace, capsys):
    succeed()
    path = training.write_shard(workplace / "data/shard_1.parquet", ["another text"] * 96)
    (workplace / "data/shard_2.parquet").unlink()
    assert verify.main(["run"]) == 1
    output = capsys.readouterr().out
    assert f"PROBLEM {path}: it has changed since this run began" in output
    assert "shard_2.parquet: this run reads it" in output


# ---- documents that are left out -----------------------------------------------------------------


@pytest.mark.parametrize("layout", ["crop", "split", "concat"])
def test_rows_keep_their_tokens_and_exactly_the_targets_of_listed_documents_are_off(layout):
    """A document's targets are its own tokens and the BOS of the next one, which its last token
    predicts."""
    source, same_source = (
        toy.numbered([[5, 40, 3, 17], [9, 30, 2, 70], [11, 8, 1, 25]]) for _ in range(2)
    )
    config = StreamConfig(
        T=16,
        V=2,
        layout="concat" if layout == "concat" else "bestfit",
        overlap=4,
        buffer_size=4,
        long_docs="split" if layout == "split" else "crop",
        max_epochs=2,
    )
    listed = {(0, 1), (1, 0), (2, 2)}
    ids = {token for group, row in listed for token in source.documents[group][row].tolist()}
    checked = 0
    same_source.without = {group: np.arange(4) == row for group, row in listed}
    with (
        closing(Stream(config, {"a": source}, range(2), tokenizer="t")) as plain,
        closing(Stream(config, {"a": same_source}, range(2), tokenizer="t")) as other,
    ):
        while rows := plain.next_rows(1):
            for row, twin in zip(rows, other.next_rows(1), strict=True):
                tokens, live = toy.row_arrays(row, 16)
                same, less = toy.row_arrays(twin, 16)
                assert np.array_equal(tokens, same) and row.placed == twin.placed
                inside = np.repeat(
                    [key[1:] in listed for key, *_ in row.placed], [p[2] for p in row.placed]
                )
                after = np.r_[False, inside[:-1]]
                assert np.array_equal(less, live * ~(inside | after))
                assert not set(tokens[less == 1].tolist()) & ids
                checked += int(inside.sum())
    assert checked > 40


LONG = {"num_iterations": 8, "leaves": 2, "save_every": 2, "long_docs": "split", "keep_last_k": 9}


def weights(tag, name="final"):
    return (run_dir(tag) / "checkpoints" / name / "model" / "pytorch_model.bin").read_bytes()


def documents_of(step):
    """{(file, document)} of all documents in the rows of a step."""
    return {
        (place["file"], place["document"])
        for row in training.read_rows("plain", step)
        for place in row["documents"]
    }


def test_two_runs_are_equal_to_the_bit_until_the_first_listed_document(tmp_path, capsys):
    succeed(model_tag="plain", **LONG)
    file, document = min(documents_of(5) - set().union(*map(documents_of, range(5))))
    path = tmp_path / "list.txt"
    path.write_text(f"# one book\n\n{file}:{document}\n")
    succeed(model_tag="one", without_documents=path, **LONG)
    training.finish(2, model_tag="two", without_documents=path, **LONG)
    plain, one, two = map(training.digests, ("plain", "one", "two"))
    assert [a == b for a, b in zip(plain, one, strict=True)].index(False) == 5 and one == two
    assert (
        weights("plain", "checkpoint-4")
        == weights("one", "checkpoint-4")
        == weights("two", "checkpoint-4")
    )
    assert weights("plain") != weights("one") == weights("two")
    assert compare_runs.main(["plain", "one"]) == 1
    words = f"step 5 is the first with a document that one leaves out ({file}:{document})"
    assert words in capsys.readouterr().out
    path.write_text("")
    succeed(model_tag="empty", without_documents=path, **LONG)
    assert weights("plain") == weights("empty") and training.digests("empty") == plain


def test_the_list_is_pinned_with_the_data_and_bad_lines_are_one_sentence(tmp_path):
    path, name = tmp_path / "list.txt", "shard_0.parquet"
    path.write_text(f"{name}:*\n")
    succeed(num_iterations=2, without_documents=path)
    pinned = json.loads((run_dir() / "data_manifest.json").read_text())["train"]["data"]["without"]
    assert pinned == {name: None}
    path.write_text(f"{name}:3\n")
    assert "the file has changed since this run began" in refuse(without_documents=path)
    path.unlink()
    succeed(without_documents=path)
    assert "--without-documents" in refuse(num_iterations=6), "the run has a list of its own"
    for line, words in (
        (f"{name}:99999", "the file has documents 0 to "),
        ("none.parquet:1", "expected FILE:DOC"),
        ("shard_3.parquet:1", "where FILE is a training file"),
        (name, "expected FILE:DOC"),
        (f"{name}:-1", "expected FILE:DOC"),
    ):
        path.write_text(f"\n{line}\n")
        error = refuse(model_tag="new", without_documents=path)
        assert words in error and f"{path}: line 2: {line}" in error
    assert not run_dir("new").exists()


def test_a_file_name_in_two_buckets_means_the_first(tmp_path):
    (tmp_path / "list.txt").write_text("x.bin:1\nx.bin:0\n")
    manifests = {
        bucket: {
            "root": f"/{bucket}",
            "files": [{"name": "x.bin", "size": 1, "footer": "", "groups": [n]}],
        }
        for bucket, n in (("a", 2), ("b", 1))
    }
    reduced = leave_out(manifests, tmp_path / "list.txt")
    assert reduced["a"]["without"] == {"x.bin": [0, 1]} and "without" not in reduced["b"]
