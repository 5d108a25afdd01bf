"""Prepared folders: other kinds of rows, interruptions, damage, and the command."""

import contextlib
import errno
import itertools
import json
import os
import shutil
import signal
import threading
import time

import pyarrow.parquet as pq
import pytest

from nanochat import prepare
from nanochat.common import Stop, check_stop, stops_if
from nanochat.files import data_at
from nanochat.pins import fingerprint
from nanochat.sources import check, check_files, open_source, scan, warn_of_arrivals
from nanochat.splits import pin_files
from nanochat.text import ALL, Selection
from scripts import inspect_data, receipt, verify
from tests import training
from tests.private import private
from tests.spec.test_prepare import DOCUMENTS, folders, places
from tests.toy import ByteTokenizer, write_jsonl, write_parquet


@pytest.fixture(autouse=True)
def base_dir(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("base")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(folder))
    monkeypatch.setattr(prepare, "GROUP_DOCUMENTS", 8)
    return folder


@pytest.fixture
def data(tmp_path):
    """Three files of jsonl."""
    for i, name in enumerate("abc"):
        write_jsonl(tmp_path / "data" / f"{name}.jsonl", DOCUMENTS[20 * i : 20 * i + 20])
    return tmp_path / "data"


@pytest.fixture
def converted(monkeypatch):
    """The names of the files that are converted from now on."""
    names = []
    convert = prepare._convert

    def counting(file, *args):
        names.append(file.name)
        return convert(file, *args)

    monkeypatch.setattr(prepare, "_convert", counting)
    return names


# ---- the folder ----------------------------------------------------------------------------------


def test_a_row_of_parquet_with_nulls_keeps_its_number(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ["one", None, "two", None, "three"], 2)
    source = open_source(scan(path), ByteTokenizer())
    assert [source.origin_of(0, row) for row in range(3)] == [
        ("a.parquet", line) for line in (1, 3, 5)
    ]


def test_the_part_of_a_txt_file_for_validation_keeps_its_line(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\nfour\n")
    manifest = scan(tmp_path, selection=Selection(val_fraction=0.3, part="val"))
    assert open_source(manifest, ByteTokenizer()).origin_of(0, 0) == ("a.txt", 4)


def test_ordinary_parquet_beside_other_kinds_is_read_where_it_is(data):
    write_parquet(data / "0.parquet", DOCUMENTS, 8)
    manifest = scan(data)
    assert ["parquet" in entry for entry in manifest["files"]] == [False, True, True, True]
    assert open_source(manifest, ByteTokenizer()).paths[0] == data / "0.parquet"


def test_folders_train_and_val_of_the_user_are_not_repeated(tmp_path, base_dir):
    for name in ("train/web/a", "train/code/a", "val/web/a"):
        write_jsonl(tmp_path / f"{name}.jsonl", DOCUMENTS[:9])
    pin_files(tmp_path)
    [folder] = folders(base_dir)
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.parquet")) == [
        "train/code/a.jsonl.parquet",
        "train/web/a.jsonl.parquet",
        "val/web/a.jsonl.parquet",
    ]


# ---- files without documents ---------------------------------------------------------------------

TWENTIETH = Selection(val_fraction=0.05)


def names(manifests):
    """{split: names of all files}."""
    return {
        split: [entry["name"] for manifest in buckets.values() for entry in manifest["files"]]
        for split, buckets in manifests.items()
    }


def test_a_file_too_small_for_validation_is_trained_on_with_a_warning(tmp_path, caplog):
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS[:17])
    write_jsonl(tmp_path / "b.jsonl", DOCUMENTS)
    manifests = pin_files(tmp_path, selection=TWENTIETH)
    assert names(manifests) == {"train": ["a.jsonl", "b.jsonl"], "val": ["b.jsonl"]}
    assert "1 file without a document for validation with --val-fraction 0.05" in caplog.text
    assert "not used for it: a.jsonl" in caplog.text


def test_a_foreign_file_is_left_out_with_a_warning(data, caplog):
    write_jsonl(data / "logs" / "train.jsonl", ["x"]).write_text('{"step": 1}\n' * 55)
    manifests = pin_files(data, selection=TWENTIETH)
    healthy = ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert names(manifests) == {"train": healthy, "val": healthy}
    assert "logs/train.jsonl: 55 broken lines skipped" in caplog.text
    for use in ("training", "validation"):
        assert f"1 file without a document for {use} with --val-fraction" in caplog.text


def test_files_without_any_document_for_a_split_are_an_error(tmp_path):
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", DOCUMENTS[:9])
    with pytest.raises(
        ValueError, match=r"a\.jsonl: no document is left in the val part .*nor in 1 o"
    ):
        pin_files(tmp_path, selection=TWENTIETH)


def test_a_later_launch_reads_the_folder_of_the_first_although_it_holds_more(data, base_dir):
    write_jsonl(data / "d.jsonl", ["x"]).write_text('{"step": 1}\n' * 55)
    manifests = pin_files(data, selection=TWENTIETH)
    assert check_files(manifests) == manifests and check_files({"val": manifests["val"]})
    assert len(folders(base_dir)) == 1


# ---- once ----------------------------------------------------------------------------------------


def test_other_options_give_another_folder(data, base_dir):
    selections = (Selection(), Selection(min_chars=5), Selection(val_fraction=0.5, part="val"))
    prints = {fingerprint(scan(data, selection=selection)) for selection in selections}
    assert len(prints) == len(folders(base_dir)) == 3


def test_an_interrupted_preparation_is_continued(data, converted, monkeypatch):
    columns = prepare._columns

    def interrupted(group, name):
        if name == "c.jsonl":
            raise KeyboardInterrupt
        return columns(group, name)

    monkeypatch.setattr(prepare, "_columns", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scan(data)
    monkeypatch.setattr(prepare, "_columns", columns)
    converted.clear()
    manifest = scan(data)
    assert converted == ["c.jsonl"]
    assert not list(prepare.prepared_dir().rglob(".*.tmp"))
    assert manifest == scan(data)


def test_a_killed_preparation_is_continued(data, converted, monkeypatch):
    """Death leaves the records that were written last."""
    keep = prepare._keep
    monkeypatch.setattr(prepare, "KEEP_S", 0.0)
    monkeypatch.setattr(prepare, "_keep", lambda *_: None)
    manifest = scan(data)
    [folder] = prepare.prepared_dir().iterdir()
    (folder / "train/c.jsonl.parquet").unlink()
    (folder / "train/.c.jsonl.parquet.01234567.tmp").touch()
    os.utime(folder / "train/.c.jsonl.parquet.01234567.tmp", (1, 1))
    monkeypatch.setattr(prepare, "_keep", keep)
    converted.clear()
    assert scan(data) == manifest and converted == ["c.jsonl"]
    assert not list(folder.rglob(".*.tmp"))


@pytest.mark.parametrize("has_locks", [True, False])
def test_launches_that_prepare_at_once_do_not_harm_each_other(
    data, converted, monkeypatch, has_locks
):
    def no_locks(*_):
        raise OSError(errno.ENOTSUP, "no locks")

    if not has_locks:
        monkeypatch.setattr(prepare.fcntl, "flock", no_locks)
    manifests = []
    threads = [threading.Thread(target=lambda: manifests.append(scan(data))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(manifests) == 4 and all(manifest == manifests[0] for manifest in manifests)
    assert check(manifests[0]) == manifests[0]
    if has_locks:
        assert len(converted) == 3, "one prepares while the others wait"


def test_a_stop_ends_the_conversion_and_what_is_finished_is_kept(data, converted, monkeypatch):
    finished = []
    convert = prepare._convert

    def one(file, *args):
        while file.name == "c.jsonl" and len(finished) < 2:
            time.sleep(0.01)
        record = convert(file, *args)
        finished.append(file.name)
        return record

    monkeypatch.setattr(prepare, "_convert", one)
    with stops_if(lambda: "SIGTERM" * (len(finished) == 2)), pytest.raises(Stop, match="SIGTERM"):
        scan(data)
    assert sorted(finished) == ["a.jsonl", "b.jsonl"]
    converted.clear()
    scan(data)
    assert converted == ["c.jsonl"]


def test_a_stop_ends_the_wait_for_another_process_that_prepares(data):
    scan(data)
    [folder] = prepare.prepared_dir().iterdir()
    (folder / "train/c.jsonl.parquet").unlink()
    with prepare._alone(folder), stops_if(lambda: "SIGTERM"), pytest.raises(Stop, match="SIGTERM"):
        scan(data)


# ---- damage --------------------------------------------------------------------------------------


def test_a_damaged_page_is_an_error_that_names_the_prepared_file(data):
    manifest = scan(data)
    [place, *_] = places(manifest)
    with open(place, "r+b") as file:
        file.seek(40)
        file.write(b"\xff" * 9)
    with pytest.raises(
        ValueError, match=r"a\.jsonl\.parquet: .*delete the file .*; the next launch"
    ):
        list(open_source(manifest, ByteTokenizer()).texts(0))


def test_a_prepared_file_that_vanishes_while_a_run_reads_it_is_one_sentence(data):
    manifest = scan(data)
    source = open_source(manifest, ByteTokenizer())
    prepare.main(["--remove"])
    with pytest.raises(FileNotFoundError, match=r"gone; .*the next launch prepares it again$"):
        list(source.texts(0))


def test_a_full_disk_is_one_sentence_and_leaves_no_half_written_file(data, base_dir, monkeypatch):
    columns = prepare._columns

    def full(group, name):
        if name == "b.jsonl":
            raise OSError(errno.ENOSPC, "No space left on device")
        return columns(group, name)

    monkeypatch.setattr(prepare, "_columns", full)
    with pytest.raises(OSError, match=r"no room .*No space left.*NANOCHAT_BASE_DIR") as e:
        scan(data)
    assert "\n" not in str(e.value)
    assert not list(base_dir.rglob(".*.tmp"))
    for path in base_dir.rglob("*.parquet"):
        assert pq.read_table(path).num_rows == 20


def test_a_file_that_changes_while_it_is_read_is_an_error(data, monkeypatch):
    columns = prepare._columns

    def changing(group, name):
        write_jsonl(data / "b.jsonl", DOCUMENTS[:3])
        return columns(group, name)

    monkeypatch.setattr(prepare, "_columns", changing)
    with pytest.raises(ValueError, match=r"b\.jsonl: it changed while being read"):
        scan(data / "b.jsonl")


# ---- pins ----------------------------------------------------------------------------------------


def test_pins_do_not_depend_on_the_bytes_that_pyarrow_writes(data, base_dir, monkeypatch):
    before = scan(data)
    writer = pq.ParquetWriter
    monkeypatch.setattr(
        prepare.pq,
        "ParquetWriter",
        lambda *args, **kw: writer(*args, **{**kw, "compression": "gzip"}),
    )
    sizes = [os.path.getsize(place) for place in places(before)]
    shutil.rmtree(base_dir / "prepared")
    assert check(before) == before
    assert [os.path.getsize(place) for place in places(before)] != sizes


def test_a_run_finds_its_data_on_a_machine_with_another_base_dir(
    data, tmp_path, tmp_path_factory, monkeypatch
):
    manifests = pin_files(data)
    moved = tmp_path / "elsewhere" / "mytext"
    shutil.copytree(data, moved)
    shutil.rmtree(data)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path_factory.mktemp("other")))
    found = check_files(manifests, moved)
    for split in ("train", "val"):
        assert fingerprint(found[split]["data"]) == fingerprint(manifests[split]["data"])


def test_a_touched_file_is_the_same_data(data):
    manifest = scan(data)
    os.utime(data / "a.jsonl", ns=(1, 1))
    assert fingerprint(check(manifest)) == fingerprint(manifest)


def test_a_file_with_another_size_is_refused_before_anything_is_converted(data, converted):
    manifest = scan(data)
    write_jsonl(data / "b.jsonl", DOCUMENTS)
    converted.clear()
    with pytest.raises(ValueError, match=r"b\.jsonl: it has changed since this run began \(size"):
        check(manifest)
    assert converted == []


def test_a_file_that_arrives_later_does_not_change_a_run(data):
    manifests = pin_files(data)
    write_jsonl(data / "d.jsonl", DOCUMENTS)
    assert check_files(manifests, data) == manifests


def test_a_file_that_arrived_after_the_run_began_is_named(data, caplog):
    manifests = pin_files(data)
    write_jsonl(data / "new/d.jsonl", DOCUMENTS)
    began = (data / "new/d.jsonl").stat().st_ctime
    warn_of_arrivals(manifests, data_at(data), "text", began)
    assert not caplog.messages
    warn_of_arrivals(manifests, data_at(data), "text", began - 0.01)
    [message] = caplog.messages
    assert "1 file that arrived after this run began: new/d.jsonl" in message


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_lists_sizes_and_sources(data, base_dir, capsys):
    scan(data)
    prepare.main([])
    printed = capsys.readouterr().out
    assert folders(base_dir)[0].name in printed and "a.jsonl" in printed and "1 folder" in printed


def test_folders_that_runs_began_with_are_listed_with_them_and_not_removed_unless_named(
    data, base_dir, capsys
):
    # a name as of a copied folder, which no new run may have: its text was deleted
    for tag, selection in (("[mine]", TWENTIETH), ("other", Selection(val_fraction=0.5))):
        run = base_dir / "runs" / tag
        run.mkdir(parents=True)
        (run / ".run_state.json").touch()
        manifests = pin_files(data, selection=selection)
        (run / "data_manifest.json").write_text(json.dumps(manifests))
    prepare.main([])
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[-1] for line in lines[1:3]) == ["[mine]", "other"]
    with_runs = folders(base_dir)
    # what they were made from may have changed since, so nobody can make them again
    scan(data)
    assert len(folders(base_dir)) == 3
    prepare.main(["--remove"])
    assert folders(base_dir) == with_runs
    assert "deleted 1 folder, kept 2 that a run reads" in capsys.readouterr().out


@pytest.mark.parametrize("is_corrupt", [True, False])
def test_no_text_is_deleted_that_a_run_whose_manifest_cannot_be_read_may_read(
    data, base_dir, is_corrupt
):
    """Regression: it was deleted for a corrupt one; one of another user ended the command."""
    run = base_dir / "runs" / "mine"
    run.mkdir(parents=True)
    (run / ".run_state.json").touch()
    manifests = json.dumps(pin_files(data, selection=TWENTIETH))
    (run / "data_manifest.json").write_text(manifests[: -9 if is_corrupt else None])
    before = folders(base_dir)
    with contextlib.nullcontext() if is_corrupt else private(run):
        assert prepare.main([]) == 0
        with pytest.raises(
            ValueError, match=r"which text mine reads is not known.*name the folders"
        ):
            prepare.main(["--remove"])
        assert folders(base_dir) == before != []
        prepare.main([before[0].name, "--remove"])
    assert folders(base_dir) == []


def test_no_text_is_deleted_if_the_folder_of_all_runs_may_not_be_read(data, base_dir):
    """Regression: it counted as an empty one."""
    scan(data)
    before = folders(base_dir)
    (base_dir / "runs").mkdir(exist_ok=True)
    with private(base_dir / "runs"), pytest.raises(PermissionError):
        prepare.main(["--remove"])
    assert folders(base_dir) == before != []


def test_a_folder_that_is_linked_names_the_files_of_its_own(data, base_dir, capsys):
    """Regression: after a move, the files that the first folder was made from."""
    scan(data)
    moved = data.rename(data.with_name("moved"))
    scan(moved)
    prepare.main([])
    assert f"{moved}/a.jsonl, " in capsys.readouterr().out


def test_the_command_removes_all_folders(data, base_dir):
    scan(data)
    prepare.main(["--remove"])
    assert folders(base_dir) == []


def test_the_command_removes_the_named_folder_alone(data, base_dir):
    scan(data)
    scan(data, selection=Selection(min_chars=5))
    first, second = folders(base_dir)
    prepare.main([first.name, "--remove"])
    assert folders(base_dir) == [second]
    with pytest.raises(ValueError, match="no such folder"):
        prepare.main(["../runs", "--remove"])


def test_a_file_is_prepared_under_the_same_name_with_and_without_other_files(tmp_path):
    """Regression: without a file that holds no documents, others were prepared again."""
    names = ["train/a.jsonl", "train/b.jsonl", "val/a.jsonl", "dev/a.jsonl", "a.jsonl"]
    files = [
        prepare.TextFile(tmp_path / name, name, split, selection=ALL)
        for split in ("train", "val")
        for name in names
    ]
    whole = prepare._targets(files)
    assert len(whole) == len(files) and "train/b.jsonl.parquet" in whole
    kept = [file for file in files if file.name not in ("dev/a.jsonl", "train/a.jsonl")]
    assert prepare._targets(kept).items() <= whole.items()


def test_hard_links_are_counted_once(data, base_dir):
    scan(data)
    once = prepare.disk_bytes(base_dir / "prepared")
    write_jsonl(data / "d.jsonl", DOCUMENTS[:1])
    scan(data)
    assert prepare.disk_bytes(base_dir / "prepared") < 2 * once


# ---- runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
def test_sigterm_ends_a_launch_that_prepares_its_text_and_leaves_no_run(tmp_path, world_size):
    with training.workplace(tmp_path, **training.SMALL, num_iterations=4) as base:
        for name in "ab":
            write_jsonl(base / f"text/{name}.jsonl", training.texts(120, seed=1))
        group = training.start(
            world_size, hook=sigterm_in_the_second_group, data_path=base / "text"
        )
        assert group.wait() == [0] * world_size, group.text()
        assert "stopped: SIGTERM" in group.text() and "start: building" not in group.text()
        assert not training.run_dir().exists() and not [*prepare.prepared_dir().rglob("*.parquet")]


def sigterm_in_the_second_group():
    """A thread prepares each file: from the second group on, both go on only when the main thread
    has seen the signal, so neither file is finished before."""
    columns = prepare._columns
    calls = itertools.count(1)

    def watched(*args):
        call = next(calls)
        if call == 2:
            training.send(signal.SIGTERM)
        for _ in range(1000 if call >= 2 else 0):
            check_stop()
            time.sleep(0.01)
        return columns(*args)

    prepare.GROUP_DOCUMENTS = 8
    prepare._columns = watched


def test_a_run_on_jsonl_resumes_with_the_same_digests_after_its_folder_is_removed(tmp_path, capsys):
    """Also: `find` and `rows` name the line of the user's own file, and a receipt is verified on a
    machine that has prepared nothing."""
    with training.workplace(tmp_path, **training.SMALL, num_iterations=4, save_every=2) as base:
        text = base / "text"
        for name in "ab":
            write_jsonl(text / f"{name}.jsonl", training.texts(120, seed=ord(name)))
        (text / "a.jsonl").write_text("broken\n" + (text / "a.jsonl").read_text())
        training.succeed(data_path=text)
        training.succeed(data_path=text, num_iterations=2, model_tag="resumed")
        assert prepare.main([*(folder.name for folder in folders(base)), "--remove"]) == 0
        write_jsonl(text / "c.jsonl", ["new"])
        outcome = training.succeed(data_path=text, model_tag="resumed")
        assert "not reading 1 file that arrived after this run began: c.jsonl" in outcome.err
        assert training.digests() == training.digests("resumed") and len(training.digests()) == 4

        capsys.readouterr()
        assert inspect_data.main(["find", "run", "--document=a.jsonl:5"]) == 0
        assert "the document begins at line 7 of a.jsonl" in capsys.readouterr().out
        assert inspect_data.main(["rows", "run", "--step=0", "--json"]) == 0
        for line in capsys.readouterr().out.splitlines():
            for document in json.loads(line)["documents"]:
                assert document["line"] == document["document"] + 2
        assert receipt.main(["run", f"--out={base / 'r.json'}"]) == 0
        prepare.main([*(folder.name for folder in folders(base)), "--remove"])
        check_receipt = [str(base / "r.json"), f"--data-path={text}", "--steps=0,3"]
        assert verify.main(check_receipt) == 0
        assert verify.main([str(base / "runs/run")]) == 0

        content = (text / "a.jsonl").read_text()
        (text / "a.jsonl").write_text(content.replace("the", "teh", 1))
        capsys.readouterr()
        assert verify.main([str(base / "runs/run")]) == 1
        assert f"{text}/a.jsonl: it has changed" in capsys.readouterr().out
        assert verify.main(check_receipt) == 1
        assert f"{text}/a.jsonl: its contents have changed" in capsys.readouterr().out
