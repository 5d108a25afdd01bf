"""push_shards uploads a folder completely, checks it, and sends manifests last; a second push sends only the rest."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nanochat.common import hash_bytes
from nanochat.integrations.object_storage import find
from scripts import push_shards
from scripts.push_shards import main, sum_file
from tests.object_store import Fault
from tests.token_files import write_folder
from tests.training import PATIENCE_S


@pytest.fixture
def store(calm_store):
    for key in calm_store.names():
        calm_store.delete(key)
    return calm_store


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "OUT"
    for split, names in (("train", "ab"), ("val", "c")):
        write_folder(root / split / "web", {name: ([[ord(name), *range(99)]] * 30, None) for name in names})
        (root / split / "web" / ".records").mkdir()
    (root / "tokenizer").mkdir()
    (root / "tokenizer" / "tokenizer.json").write_text("{}")
    return root


def files_of(folder):
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*")
            if f.is_file() and not any(p.startswith(".") for p in f.relative_to(folder).parts)}


def puts(store):
    return [s.path.split("/bucket/")[1].split("?")[0] for s in store.proxy.seen if s.method == "PUT"]


def test_everything_arrives_with_the_manifests_last(store, folder, capsys):
    assert main([str(folder), store.path("set/1/")]) == 0
    assert {k: store.get(k) for k in store.names()} == {
        f"set/1/{name}": data for name, data in files_of(folder).items()}
    assert all(p.endswith("manifest.json") for p in puts(store)[-2:])
    assert ("train from it: python -m scripts.base_train --data-path=s3://bucket/set/1 --data-format=shards "
            "--tokenizer=s3://bucket/set/1/tokenizer\n") in capsys.readouterr().out


def test_a_second_push_sends_nothing_and_after_a_failure_only_the_rest(store, folder, capsys, monkeypatch):
    store.proxy.faults.append(Fault("PUT", "b.bin", status=403, code="AccessDenied"))
    assert main([str(folder), store.path("s")]) == 1
    err = capsys.readouterr().err
    assert "b.bin: access denied" in err and "the upload is incomplete; run the same command again" in err
    assert not [k for k in store.names() if k.endswith(".json") and "tokenizer" not in k]
    store.proxy.seen.clear()
    assert main([str(folder), store.path("s")]) == 0
    assert sorted(puts(store)) == ["s/train/web/b.bin", "s/train/web/manifest.json", "s/val/web/manifest.json"]
    sums = sum_file  # objects with other ETags are read back
    for compute in (sums, lambda file: ("none", sums(file)[1])):
        monkeypatch.setattr(push_shards, "sum_file", compute)
        store.proxy.seen.clear()
        assert main([str(folder), store.path("s")]) == 0
        assert not puts(store) and bool(store.proxy.gets("c.bin")) == (compute is not sums)
        assert "0 files sent and checked (0 bytes), 9 already stored" in capsys.readouterr().out


def test_changed_files_are_sent_again_and_manifests_are_deleted_before(store, folder, monkeypatch):
    assert main([str(folder), store.path("s")]) == 0
    store.put("s/val/web/c.bin", store.get("s/val/web/c.bin")[::-1])  # of the same size
    manifests = []
    send = push_shards.send

    def list_and_send(*args):
        manifests.append([k for k in store.names() if k.endswith("manifest.json")])
        return send(*args)

    monkeypatch.setattr(push_shards, "send", list_and_send)
    assert main([str(folder), store.path("s")]) == 0
    assert manifests[0] == [] and store.get("s/val/web/c.bin") == (folder / "val/web/c.bin").read_bytes()
    assert "s/val/web/manifest.json" in store.names()


def test_sums_equal_the_etags_of_the_store_for_one_part_and_two(store, folder):
    one, two = folder / "val/web/c.bin", folder / "train/web/a.bin"
    two.write_bytes(np.random.default_rng(0).bytes(push_shards.PART_BYTES + 1000))
    (folder / "train/web/manifest.json").unlink()
    (folder / "train/web/.records").rmdir()
    assert main([str(folder), store.path("s")]) == 0
    assert sum_file(two)[0].endswith("-2") and "-" not in sum_file(one)[0]
    for file in (one, two):
        name = file.relative_to(folder).as_posix()
        assert store.get(f"s/{name}") == file.read_bytes()
        etag = find(store.path(f"s/{name}")).etag.strip('"')
        assert sum_file(file) == (etag, hash_bytes(file.read_bytes()))


def test_damaged_files_and_uploads_are_reported_and_not_stored(store, folder, capsys):
    damaged = Fault("HEAD", "b.bin", before=lambda: store.put("s/train/web/b.bin", b"\0" * 6000))
    store.proxy.faults.append(damaged)
    file = folder / "train/web/a.bin"
    file.write_bytes(file.read_bytes()[::-1])
    assert main([str(folder), store.path("s")]) == 1
    err = capsys.readouterr().err
    assert damaged.times == 0 and "b.bin: the uploaded object differs from the file" in err
    assert re.search(r"a.bin: its checksum is \w{32}, but manifest.json says", err)
    assert not any(k.endswith(("a.bin", "b.bin", "manifest.json")) for k in store.names())


def test_bad_input_is_one_sentence_and_nothing_is_sent(store, folder, tmp_path):
    def refused(match, folder=folder, target=""):
        with pytest.raises((ValueError, OSError), match=match):
            main([str(folder), target or store.path("s")])
        assert not store.names()

    refused("no such folder", tmp_path / "none")
    refused("expected s3://bucket/prefix", target="/local/folder")
    refused("bucket nobucket does not exist", target="s3://nobucket/x")
    (tmp_path / "empty").mkdir()
    refused(r"no .bin, .idx, .parquet file below it", tmp_path / "empty")
    idx = folder / "val/web/c.idx"
    data = idx.read_bytes()
    idx.unlink()
    refused("c.bin: c.idx is missing; restore it")
    idx.write_bytes(data)
    (folder / "val/web/manifest.json").unlink()
    refused("its shards are not finished")


def test_a_signal_ends_it_at_once_and_the_command_resumes(store, folder):
    store.proxy.faults.append(Fault("PUT", "b.bin", stall=True))
    process = subprocess.Popen([sys.executable, "-m", "scripts.push_shards", str(folder), store.path("s")],
                               cwd=Path(__file__).parents[1], stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    while not (store.proxy.faults[0].times == 0 and "s/train/web/a.bin" in store.names()):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130 and err.endswith("interrupted\n")
    assert not any(k.endswith("manifest.json") for k in store.names())
    store.proxy.faults.clear()
    assert main([str(folder), store.path("s")]) == 0


def test_a_linked_folder_is_sent_and_a_dangling_link_is_an_error(store, folder, tmp_path):
    (folder / "train").rename(tmp_path / "elsewhere")
    (folder / "train").symlink_to(tmp_path / "elsewhere")
    assert main([str(folder), store.path("set/linked/")]) == 0
    assert "set/linked/train/web/a.bin" in store.names()
    (folder / "more.bin").symlink_to(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"1 link to something that does not exist: more\.bin"):
        push_shards.find_files(folder)
