"""Which text becomes which shard, how inputs are dealt to machines, and what counts as finished."""

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.pretokenize import Windows
from nanochat.shard_set import Input, ShardSet, deal, find_inputs
from tests.toy import examples

TOKENIZER = {"fingerprint": "f", "eod": 0, "vocab_size": 10}


def make(root, names):
    """Empty files; `find_inputs` does not look into them."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x")
    return root


def layout(root, **kwargs):
    """({shard: input}, buckets without validation)."""
    inputs, short = find_inputs(root, **kwargs)
    return {f"{i.split}/{i.bucket}/{i.stem}": i.name for i in inputs}, short


# ---- names ----------------------------------------------------------------------------------------------------------

def test_each_folder_is_a_bucket_and_its_last_file_validates(tmp_path):
    make(tmp_path, ["web/b.jsonl", "web/a/z.parquet", "web/a/y.jsonl.gz", "code/only.jsonl", "web/notes.txt",
                    "web/.hidden/x.jsonl", ".git/x.jsonl", "README.md"])
    assert layout(tmp_path) == ({
        "train/code/only": "code/only.jsonl", "train/web/a__y": "web/a/y.jsonl.gz",
        "train/web/a__z": "web/a/z.parquet", "val/web/b": "web/b.jsonl"}, ["code"])


@pytest.mark.parametrize("val_files, val, short", [(0, [], []), (1, ["c"], []), (2, ["b", "c"], []), (3, [], ["data"])])
def test_files_without_folders_are_one_bucket(tmp_path, val_files, val, short):
    shards, got = layout(make(tmp_path, ["a.jsonl", "b.jsonl", "c.parquet"]), val_files=val_files)
    assert sorted(shards) == sorted(f"{'val' if n in val else 'train'}/data/{n}" for n in "abc")
    assert got == short


def test_train_and_val_are_kept(tmp_path):
    make(tmp_path, ["train/web/a.jsonl", "train/web/b.jsonl", "train/code/a.jsonl", "val/web/a.jsonl"])
    assert layout(tmp_path) == ({
        "train/code/a": "train/code/a.jsonl", "train/web/a": "train/web/a.jsonl", "train/web/b": "train/web/b.jsonl",
        "val/web/a": "val/web/a.jsonl"}, [])


def test_names_with_dots_stay_apart(tmp_path):
    shards, _ = layout(make(tmp_path, ["w/a.v1.jsonl", "w/a.v2.jsonl", "w/a.jsonl"]))
    assert sorted(shards) == ["train/w/a", "train/w/a.v1", "val/w/a.v2"]


@pytest.mark.parametrize("names, what", [
    (["w/a.jsonl", "w/a.parquet", "w/z.jsonl"], r"w/a\.jsonl and w/a\.parquet would both become train/w/a\.bin"),
    (["w/b/a.jsonl", "w/b__a.jsonl", "w/z.jsonl"], r"w/b/a\.jsonl and w/b__a\.jsonl"),
    (["a.jsonl", "w/b.jsonl"], r"a\.jsonl lies beside folders"),
    (["train/a.jsonl", "val/a.jsonl", "c/a.jsonl"], r"c/a\.jsonl lies beside train/ and val/"),
    (["a.txt"], "no .parquet, .jsonl, .jsonl.gz file below it")])
def test_what_is_unclear_is_refused(tmp_path, names, what):
    with pytest.raises((ValueError, FileNotFoundError), match=what):
        find_inputs(make(tmp_path, names))


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        find_inputs(tmp_path / "none")
    with pytest.raises(ValueError, match="--val-files -1"):
        find_inputs(make(tmp_path, ["a.jsonl"]), val_files=-1)


# ---- dealing --------------------------------------------------------------------------------------------------------

def fake(name, size):
    return Input(None, name, "train", "b", name, size, 0)


@settings(max_examples=examples(1))
@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 6), st.randoms())
def test_dealing_is_a_partition_that_is_balanced_and_the_same_everywhere(sizes, num_tasks, random):
    inputs = [fake(str(n), size) for n, size in enumerate(sizes)]
    tasks = deal(inputs, num_tasks)
    assert sorted(i.name for task in tasks for i in task) == sorted(i.name for i in inputs)
    loads = [sum(i.size for i in task) for task in tasks]
    assert max(loads) - min(loads) <= max(sizes, default=0)
    assert all([i.size for i in task] == sorted((i.size for i in task), reverse=True) for task in tasks)
    random.shuffle(inputs)
    assert deal(inputs, num_tasks) == tasks


# ---- finished or not ------------------------------------------------------------------------------------------------

@pytest.fixture
def shard_set(tmp_path):
    """A set of three inputs in two buckets, whose pairs are stand-ins of the right sizes."""
    inputs, _ = find_inputs(make(tmp_path / "raw", ["a/1.jsonl", "a/2.jsonl", "b/1.jsonl"]))
    result = ShardSet(tmp_path / "out", inputs, Windows(), TOKENIZER)
    result.prepare(inputs)
    for i in inputs:
        fill(result, i)
    assert result.finish() == []
    return result


def fill(shard_set, i, skipped=0):
    pair = i.pair(shard_set.output)
    pair.with_name(f"{pair.name}.bin").write_bytes(b"12")
    pair.with_name(f"{pair.name}.idx").write_bytes(b"123")
    shard_set.note(i, {"documents": 1, "entries": 1, "tokens": 1, "bin_bytes": 2, "bin_hash": "h", "idx_hash": "h",
                       "skipped": {"count": skipped, "lines": [[1, "why"]] * skipped}})


def again(shard_set, **kwargs):
    """The set as the next start of the command sees it."""
    inputs, _ = find_inputs(shard_set.output.parent / "raw")
    return ShardSet(shard_set.output, inputs, kwargs.get("windows", shard_set.windows),
                    kwargs.get("tokenizer", TOKENIZER), kwargs.get("strict", False))


def test_finished_stays_finished(shard_set):
    new = again(shard_set)
    new.refuse_others(force=False)
    assert all(new.finished(i) for i in new.inputs) and len(new.inputs) == 3
    manifest = json.loads((shard_set.output / "train/a/manifest.json").read_text())
    assert manifest["shards"]["1"]["input"] == {"name": "a/1.jsonl", "size": 1}
    assert (manifest["tokenizer"], manifest["arguments"]) == (TOKENIZER, {"max_length": 2048, "overlap_size": 256})
    assert "mtime" not in json.dumps(manifest)


def damage(shard_set, what):
    """Do `what` to the shard train/a/1."""
    folder, raw = shard_set.output / "train/a", shard_set.output.parent / "raw/a/1.jsonl"
    record = folder / ".records/1.json"
    if what in ("bin", "idx"):
        (folder / f"1.{what}").unlink()
    elif what == "short":
        (folder / "1.bin").write_bytes(b"1")
    elif what == "long index":
        (folder / "1.idx").write_bytes(b"1234")
    elif what == "record":
        record.unlink()
    elif what == "torn record":
        record.write_bytes(record.read_bytes()[:-30])
    elif what == "edited record":
        record.write_text(record.read_text().replace('"documents": 1', '"documents": 2'))
    elif what == "touched":
        os.utime(raw, ns=(1, 1))
    elif what == "grown":
        stat = raw.stat()
        raw.write_bytes(b"xx")
        os.utime(raw, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("what", ["bin", "idx", "short", "long index", "record", "torn record", "edited record",
                                  "touched", "grown"])
def test_what_does_not_match_is_made_again(shard_set, what):
    damage(shard_set, what)
    new = again(shard_set)
    new.refuse_others(force=False)
    todo = [i for i in new.inputs if not new.finished(i)]
    assert [i.name for i in todo] == ["a/1.jsonl"]
    assert [i.name for i in new.finish()] == ["a/1.jsonl"]
    new.prepare(todo)
    names = {f.relative_to(new.output).as_posix() for f in new.output.rglob("*") if f.is_file()}
    assert not any(name.startswith("train/a/") for name in names), "the manifest goes before the shard does"
    assert "val/a/manifest.json" in names and "train/b/1.bin" in names


def test_strict_makes_again_what_has_broken_lines(shard_set):
    i = shard_set.inputs[0]
    fill(shard_set, i, skipped=1)
    assert again(shard_set).finished(i)
    assert [j for j in shard_set.inputs if not again(shard_set, strict=True).finished(j)] == [i]


@pytest.mark.parametrize("change, what", [
    ({"windows": Windows(1024, 256)}, r"max_length 2048 \(now 1024\); name another --output-dir.*--force"),
    ({"windows": Windows(0)}, r"max_length 2048 \(now 0\), overlap_size 256 \(now 0\)"),
    ({"tokenizer": {**TOKENIZER, "fingerprint": "g"}}, r"tokenizer f \(now g\)")])
def test_other_arguments_are_refused_or_forced(shard_set, change, what):
    new = again(shard_set, **change)
    with pytest.raises(ValueError, match=what):
        new.refuse_others(force=False)
    new.refuse_others(force=True)
    assert not any(new.finished(i) for i in new.inputs)


def test_shards_whose_input_is_gone_are_refused_or_removed(shard_set):
    raw = shard_set.output.parent / "raw"
    (raw / "b/1.jsonl").unlink()
    (raw / "a/3.jsonl").write_bytes(b"new")  # so that a/2 is for training now
    new = again(shard_set)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"train/b/1\.bin: made of b/1\.jsonl, which is gone.*--force"):
            new.refuse_others(force=False)
    new.refuse_others(force=True)
    assert not (shard_set.output / "train/b").exists() and not (shard_set.output / "val/a/2.bin").exists()
    new.refuse_others(force=False)
    assert [i.name for i in new.inputs if not new.finished(i)] == ["a/2.jsonl", "a/3.jsonl"]


def test_only_temporary_files_of_ones_own_inputs_are_removed(shard_set):
    folder = shard_set.output / "train/a"
    own = [folder / ".1.bin.abcd_123.tmp", folder / ".1.idx.abcd_123.tmp", folder / ".records/.1.json.abcd_123.tmp"]
    others = [folder / ".2.bin.abcd_123.tmp", folder / ".1.bin.x.bin.abcd_123.tmp", folder / ".1.swp"]
    for path in own + others:
        path.touch()
    shard_set.prepare([i for i in shard_set.inputs if i.name == "a/1.jsonl"])
    assert not any(path.exists() for path in own) and all(path.exists() for path in others)


def test_output_that_cannot_be_written_is_named(shard_set, tmp_path):
    (tmp_path / "file").write_text("")
    new = ShardSet(tmp_path / "file", shard_set.inputs, Windows(), TOKENIZER)
    with pytest.raises(OSError, match=r"--output-dir .*file: cannot be written"):
        new.prepare(new.inputs)
