"""What a run stores about its files: the same JSON from version to version."""

import json

import pytest

from nanochat.pins import (
    bare,
    compare_files,
    fingerprint,
    leave_out,
    not_searched,
    read_manifests,
    version_line,
)
from nanochat.sources import check_files, scan_files
from tests.token_files import write_pair
from tests.toy import some_texts, write_jsonl, write_parquet

FIELDS = ["name", "size", "footer", "groups", "tokens"]


def scan(folder, *names):
    return scan_files(folder, [folder / name for name in names])


def test_fields_on_disk_have_a_fixed_order(base_dir, tmp_path):
    write_parquet(tmp_path / "a.parquet", some_texts(9), 4)
    write_jsonl(tmp_path / "b.jsonl", some_texts(9))
    write_pair(tmp_path / "c", [[1, 2, 256]], vocab_size=257)
    manifest = scan(tmp_path, "a.parquet", "b.jsonl")
    assert list(manifest) == ["root", "files"]
    assert [list(pin) for pin in manifest["files"]] == [
        FIELDS,
        ["name", "parquet", "size", "footer", "groups", "tokens"],
    ]
    assert list(scan(tmp_path, "c.bin")["files"][0]) == [*FIELDS, "blocks"]


def test_manifests_survive_the_disk(base_dir, tmp_path):
    write_jsonl(tmp_path / "b.jsonl", some_texts(9))
    manifests = {"train": {"web": scan(tmp_path, "b.jsonl")}, "val": {}}
    path = tmp_path / "data_manifest.json"
    path.write_text(json.dumps(manifests))
    assert read_manifests(path) == manifests == check_files(read_manifests(path))


def test_leaving_out_documents_changes_neither_the_given_manifests_nor_the_fingerprint(tmp_path):
    pin = {"name": "a.parquet", "size": 1, "footer": "f", "groups": [4, 4]}
    whole = {"web": {"root": "/disk", "files": [pin]}}
    text = "\ufeffa.parquet:7\r\na.parquet:0\r\n"  # as some editors write it; regression: line 1 was refused
    (tmp_path / "list.txt").write_text(text)
    listed = leave_out(whole, tmp_path / "list.txt")
    assert listed["web"]["without"] == {"a.parquet": [0, 7]}
    assert bare(listed) == whole and "without" in listed["web"]
    assert fingerprint(listed["web"]) == fingerprint(whole["web"])


def test_a_list_for_another_version_of_a_file_is_refused(tmp_path):
    """Regression: after a new revision, the numbers of a list pointed at other documents."""
    pin = {"name": "a.parquet", "size": 1, "footer": "beef", "groups": [4, 4]}
    whole = {"web": {"root": "/disk", "files": [pin]}}
    listed = tmp_path / "list.txt"
    listed.write_text(f"{version_line('of', 'a.parquet', 'beef')}\na.parquet:7\n")
    assert leave_out(whole, listed)["web"]["without"] == {"a.parquet": [7]}
    for what in ("of", "searched"):
        listed.write_text(f"{version_line(what, 'a.parquet', 'f00d')}\na.parquet:7\n")
        with pytest.raises(
            ValueError, match=r"line 1: the list was made for another version of a\.parquet"
        ):
            leave_out(whole, listed)


def test_a_list_that_names_searched_files_tells_which_others_were_not(tmp_path):
    """Regression: a list was accepted for files that were never searched."""
    files = [
        {"name": f"{name}.parquet", "size": 1, "footer": "f", "groups": [4]} for name in ("a", "b")
    ]
    buckets = {"web": {"root": "/disk", "files": files}}
    listed = tmp_path / "list.txt"
    listed.write_text(f"{version_line('searched', 'a.parquet', 'f')}\na.parquet:0\n")
    assert not_searched(buckets, listed) == ["b.parquet"]
    listed.write_text(f"{version_line('of', 'a.parquet', 'f')}\na.parquet:0\n")
    assert not_searched(buckets, listed) == [], "older code names only the files with hits"
    assert not_searched(buckets, tmp_path / "gone.txt") == []


def test_files_of_one_run_alone_are_not_said_to_differ():
    """Regression: a file that a fork did not train on was one of the "files that differ"."""

    def run(train, val=()):
        def bucket(files):
            pins = [{"name": name, "size": 1, "footer": content} for name, content in files]
            return {"b": {"root": "/", "files": pins}}

        return {"train": bucket(train), "val": bucket(val)}

    a = run([("same", "s"), ("old", "1"), ("changed", "2"), ("left", "3")], [("left", "3")])
    b = run([("same", "s"), ("new", "1"), ("changed", "4"), ("more", "5")], [("left", "3")])
    gaps = compare_files(a, b)
    assert gaps.differ == ["changed"] and gaps.renamed == ["old is new"]
    assert gaps.alone == {
        "training files that only a has": ["left"],
        "training files that only b has": ["more"],
    }
    assert not any(compare_files(a, a))
    divided = [("x", "1"), ("old", "3")]  # --val-fraction: each file is in both splits
    others = [("x", "2"), ("new", "3")]
    gaps = compare_files(run(divided, divided), run(others, others))
    assert gaps == (["x"], {}, ["old is new"]), "regression: each was named twice"
    renamed_and_replaced = compare_files(run([("x", "1")]), run([("x", "2"), ("y", "1")]))
    assert renamed_and_replaced == (["x"], {}, ["x is y"])
