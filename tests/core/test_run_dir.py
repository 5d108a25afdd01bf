"""Run directories: finding runs, a log that survives any crash, and renaming and opening a run."""

import errno
import json
import os
import shutil
from contextlib import closing
from functools import partial
from unittest import mock

import pytest

from nanochat import run_dir as rd
from tests.private import private
from tests.toy import tree


def test_runs_are_found_by_tag_and_path(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="existing runs: none"):
        rd.find_run("d4")
    for depth in (4, 12):
        rd.run_path(f"d{depth}").mkdir(parents=True)
        (rd.run_path(f"d{depth}") / "config.json").write_text(json.dumps({"depth": depth}))
    assert rd.find_run("d4") == rd.find_run(tmp_path / "runs" / "d4") == tmp_path / "runs" / "d4"
    assert rd.read_config(rd.find_run("d12")) == {"depth": 12} and rd.list_runs() == ["d12", "d4"]
    with pytest.raises(FileNotFoundError, match=r"'d5'.*existing runs: d12, d4"):
        rd.find_run("d5")
    with pytest.raises(FileNotFoundError, match=r"'dd12'.*; did you mean d12\?$"):
        rd.find_run("dd12")
    for tag in ("", ".hidden", "a/b", "..", "a\nb", "a\0b", "a*", "x" * 300):
        with pytest.raises(ValueError, match=r"^--model-tag: got .{,300} such as d12$"):
            rd.run_path(tag)


def test_a_run_that_may_not_be_read_hides_no_other_run(tmp_path, monkeypatch):
    """Regression: every command on any run ended with an error about the one of another user."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    for tag in ("mine", "theirs"):
        (rd.run_path(tag) / "checkpoints").mkdir(parents=True)
        (rd.run_path(tag) / "config.json").write_text("{}")
    mine, theirs = rd.run_path("mine"), rd.run_path("theirs")
    with private(theirs):
        assert rd.run_dirs() == [rd.find_run("mine")] == [rd.find_run(None)] == [mine]
        assert rd.find_run_at("mine@2") == (mine, "2")
        with pytest.raises(FileNotFoundError, match=r"'other'.*existing runs: mine$"):
            rd.find_run("other")
        for find, name in ((rd.find_run, "theirs"), (rd.find_run_at, "theirs@2")):
            with pytest.raises(
                PermissionError, match=r"theirs: you may not read this.*its owner"
            ) as e:
                find(name)
            assert e.value.errno is None, "no advice on another base directory"


def test_a_missing_or_corrupt_config_json_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"config\.json: missing, so .* is not a run directory"
    ):
        rd.read_config(tmp_path)
    (tmp_path / "checkpoints" / "final").mkdir(parents=True)
    assert rd.is_run_dir(tmp_path)
    with pytest.raises(
        FileNotFoundError,
        match=r"missing, so the settings of final are unknown; restore it.*--force",
    ):
        rd.read_config(tmp_path)
    for text in ("{", "[]", "[" * 100_000):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json: .*; restore it, start over"):
            rd.read_config(tmp_path)


# ---- the log -------------------------------------------------------------------------------------


def digests(path):
    return {r["step"]: r["digest"] for r in rd.iter_log(path) if rd.is_step(r)}


def test_the_last_line_of_a_step_counts_and_events_are_kept(tmp_path):
    path = tmp_path / "logs" / "train.jsonl"
    with closing(rd.TrainLog(path)) as train_log:
        for step in (1, 2, 3):
            train_log.write(step=step, loss=float(step), digest=f"{step:016x}")
        train_log.write(event="eval", step=2, bpb=float("nan"))
    with closing(rd.TrainLog(path, first_step=2)) as train_log:
        assert [train_log.digest_of(step) for step in (1, 3, 4)] == [None, f"{3:016x}", None]
        train_log.write(event="resumed", step=2)
        train_log.write(step=3, loss=-3.0, digest="f" * 16)
        assert train_log.digest_of(3) == f"{3:016x}", (
            "a repeated step is checked against the older digest"
        )
    records = [*rd.iter_log(path)]
    assert [record["bpb"] for record in records if record.get("event") == "eval"] == [None]
    assert digests(path) == {1: f"{1:016x}", 2: f"{2:016x}", 3: "f" * 16}
    assert [*rd.iter_log(tmp_path / "none")] == []


def test_a_log_truncated_at_any_byte_keeps_its_complete_lines_and_takes_new_ones(tmp_path):
    path = tmp_path / "train.jsonl"
    lines = b"".join(
        json.dumps({"step": s, "digest": f"é{s}"}, ensure_ascii=False).encode() + b"\n"
        for s in (1, 2, 3)
    )
    for size in range(len(lines) + 1):
        path.write_bytes(lines[:size])
        complete = lines[:size].count(b"\n") + (lines[size : size + 1] == b"\n")
        assert list(digests(path)) == [1, 2, 3][:complete]
        with closing(rd.TrainLog(path)) as train_log:
            train_log.write(step=9, digest="x")
        assert list(digests(path)) == [1, 2, 3][:complete] + [9]
    path.write_bytes(b'{"step": 1, "digest": "a"}\n\0\0\0\n[1]\n"text"\n' + b"[" * 100_000 + b"\n")
    assert digests(path) == {1: "a"}


def test_lines_wait_in_memory_while_the_disk_is_full(tmp_path, caplog):
    """Regression: a disk that was full for ten seconds ended the run. A nearly full one takes a
    part of a line, which readers skip."""
    path, room = tmp_path / "train.jsonl", iter([7])
    with closing(rd.TrainLog(path)) as train_log:
        train_log.write(step=1, digest="a")
        raw, write = train_log._file, train_log._file.write

        def nearly_full(data):
            if (left := next(room, 0)) == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(data[:left])

        raw.write = nearly_full
        for step, digest in ((2, "b"), (3, "c")):
            train_log.write(step=step, digest=digest)
        assert digests(path) == {1: "a"}
        del raw.write
        train_log.write(step=4, digest="d")
        assert list(digests(path).items()) == [(1, "a"), (2, "b"), (3, "c"), (4, "d")]
    assert path.read_bytes().count(b"\n") == 5 and caplog.text.count("training continues") == 1


def test_what_waits_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(rd.Backlog, "MAX_BYTES", 1000)
    backlog = rd.Backlog(tmp_path / "log", "lines")
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    for _ in range(10):
        backlog.write(100, full)
    with pytest.raises(OSError, match=r"log: lines cannot be written \(No space .*free some space"):
        backlog.write(100, full)


@pytest.mark.parametrize("failures, lost", [(3, 0), (10**9, 2)])
def test_the_end_of_a_run_waits_for_a_full_disk_and_names_what_is_lost(
    tmp_path, monkeypatch, caplog, failures, lost
):
    monkeypatch.setattr(rd, "FLUSH_S", 1.0 if lost else 600.0)
    backlog = rd.Backlog(tmp_path / "log", "lines")
    written = []
    errors = iter(range(failures))

    def write(number):
        if next(errors, None) is not None:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        written.append(number)

    for number in (1, 2):
        backlog.write(5, partial(write, number))
    backlog.flush()
    assert written == ([] if lost else [1, 2])
    assert (
        "log: 2 lines could not be written and are lost (Disk quota exceeded)" in caplog.text
    ) == bool(lost)


def test_a_log_that_is_removed_while_the_run_trains_starts_over_with_a_warning(tmp_path, caplog):
    """Otherwise, lines to the removed file would be lost silently."""
    run = tmp_path / "run"
    rd.open_folders(run)
    with closing(rd.TrainLog(run / "logs" / "train.jsonl")) as train_log:
        train_log.write(step=1)
        shutil.rmtree(run / "logs")
        train_log.write(step=2)
        train_log.write(step=3)
        assert [r["step"] for r in rd.iter_log(run / "logs" / "train.jsonl")] == [2, 3]
        assert caplog.text.count("train.jsonl was removed while the run was training") == 1
        shutil.rmtree(run)
        with pytest.raises(
            OSError, match=f"^{run}: removed while the run was training, so the run ends"
        ):
            train_log.write(step=4)
    assert not run.exists()


def test_a_log_is_never_written_through_a_link_nor_after_another_launch_took_the_run(tmp_path):
    """Regression: if the log was a link, lines were appended to its target."""
    (tmp_path / "precious").write_text("precious")
    path = tmp_path / "train.jsonl"
    for make in (lambda: path.symlink_to("precious"), path.mkdir, lambda: os.mkfifo(path)):
        make()
        for use in (rd.TrainLog, lambda path: [*rd.iter_log(path)]):
            with pytest.raises(ValueError, match=r"train\.jsonl: expected a regular file"):
                use(path)
        rd.remove_tree(path) if path.is_dir() else path.unlink()
    with closing(rd.TrainLog(path)) as train_log:
        path.unlink()
        path.symlink_to("precious")
        with pytest.raises(ValueError, match=r"train\.jsonl: expected a regular file"):
            train_log.write(step=1)
    assert (tmp_path / "precious").read_text() == "precious"
    lost = iter(["", "this launch no longer owns the run"])
    path.unlink()
    with closing(rd.TrainLog(path, lost=lambda: next(lost))) as train_log:
        train_log.write(step=1)
        with pytest.raises(ValueError, match="no longer owns"):
            train_log.write(step=2)
    assert [r["step"] for r in rd.iter_log(path)] == [1]


# ---- rename and open -----------------------------------------------------------------------------


def fill(run):
    """A run directory with files of a run, and notes of the user."""
    rd.open_folders(run)
    for name in (
        "config.json",
        "logs/train.jsonl",
        "logs/cursors/step-00000007.json.gz",
        "tokenizer/tokenizer.json",
        "checkpoints/checkpoint-7/a/b",
        "checkpoints/mine/c",
        "logs/notes.txt",
        ".mine.tmp",
    ):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("{}")
    return run


def test_a_run_is_renamed_with_everything_in_it(tmp_path, caplog):
    for number in (1, 2):
        run, elsewhere = fill(tmp_path / "run"), tmp_path / f"elsewhere-{number}"
        (run / "logs").rename(elsewhere)
        (run / "logs").symlink_to(elsewhere)
        before = tree(run)
        assert rd.set_aside(run) == tmp_path / f"run.old-{number}"
        assert not run.exists() and tree(tmp_path / f"run.old-{number}") == before and before
        assert f"was renamed to {tmp_path}/run.old-{number}; delete the latter" in caplog.text


def test_opening_a_run_removes_only_leftovers_of_crashes(tmp_path):
    before = tree(fill(tmp_path))
    for name in (
        ".config.json.0123abcd.tmp",
        "logs/cursors/.step-00000009.json.gz.ffff0000.tmp",
        "checkpoints/.del-checkpoint-5-77/x",
        "checkpoints/.tmp-checkpoint-6-shutdown-77/y",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("half")
    rd.open_folders(tmp_path)
    assert tree(tmp_path) == before


def test_the_newest_events_are_found_without_parsing_the_lines_of_steps(tmp_path):
    (tmp_path / "logs").mkdir()
    with closing(rd.TrainLog(tmp_path / "logs" / "train.jsonl")) as log:
        log.write(event="saved", step=1)
        for step in range(5):
            log.write(step=step, digest="0")
        log.write(event="saved", step=4)
    with mock.patch.object(rd, "parse_json", wraps=rd.parse_json) as parse:
        assert rd.newest_events(tmp_path, 3)["saved"]["step"] == 1
        assert rd.newest_events(tmp_path, 9)["saved"]["step"] == 4
    assert parse.call_count == 4


def test_a_new_run_has_no_name_that_reads_as_a_step_of_another(tmp_path, monkeypatch):
    """Regression: a run mix@60 stood before step 60 of mix."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    with pytest.raises(ValueError, match="step 60 of mix; choose a name without @"):
        rd.new_run_path("mix@60")
    assert rd.new_run_path("me@work") == rd.run_path("me@work")
    rd.run_path("mix@60").mkdir(parents=True)
    (rd.run_path("mix@60") / "config.json").write_text("{}")
    assert rd.new_run_path("mix@60").is_dir(), "of an older version"
