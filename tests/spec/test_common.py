"""Shared helpers: the base directory, text that is safe to print, and JSON that may be damaged."""

import errno
import json
import os
import subprocess
import sys

import pytest

from nanochat.common import (
    Bits,
    Stop,
    atomic_open,
    check_stop,
    counted,
    differences,
    duration,
    each,
    get_base_dir,
    get_dist_info,
    public,
    read_json,
    reason_of,
    remove_leftovers,
    show,
    stop_reason,
    stops_if,
    visible,
    write_bytes,
)

HOSTILE = "\x1b[2J\x9bm\r\u202e\x7f"
SHOWN = r"\u001b[2J\u009bm\u000d\u202e\u007f"


def test_a_base_directory_in_object_storage_is_refused(monkeypatch):
    for base, error in (
        ("s3://b/x", "NANOCHAT_BASE_DIR s3://b/x: expected a local folder"),
        ("https://u:hidden@h/x", "credentials do not belong in a path"),
    ):
        monkeypatch.setenv("NANOCHAT_BASE_DIR", base)
        with pytest.raises(ValueError, match=error):
            get_base_dir()


def test_visible_text_has_no_control_characters_and_keeps_all_others():
    assert visible(HOSTILE) == show(HOSTILE) == SHOWN and json.loads(f'"{SHOWN}"') == HOSTILE
    plain = "a\tb\n é漢🙂\u200d\u200f\xa0"
    assert visible(plain) == plain
    assert (
        public("no s3://b/a?x, see git+ssh://me@h/x@1 or a@b?")
        == "no s3://b/a?*** see git+ssh://***@h/x@1 or a@b?"
    )


SHAPE = {"step": int, "ranks": [{"pid": int, "start": str | None}], "rate": float}
WHOLE = '{"step": 1, "ranks": [{"pid": 2, "start": null}], "rate": 3, "more": []}'


def test_a_value_of_the_right_shape_is_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(WHOLE)
    assert (
        read_json(path, SHAPE)
        == read_json(path)
        == {"step": 1, "ranks": [{"pid": 2, "start": None}], "rate": 3, "more": []}
    )
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "b.json", SHAPE)


@pytest.mark.parametrize(
    "text, error",
    [
        (WHOLE[:-1], "not valid JSON"),
        ("\xff", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"a": ' * 100_000, "not valid JSON"),
        ("[]", "expected an object, got a list"),
        ('{"step": 1}', "ranks: expected a list, got nothing"),
        (WHOLE.replace("1", "true"), "step: expected a whole number, got"),
        (WHOLE.replace("2", '"2"'), r"ranks\[0\]\.pid: expected a whole number, got a string"),
        (WHOLE.replace("null", "[]"), r"ranks\[0\]\.start: expected a string or null, got a list"),
        (WHOLE.replace("3", "null"), "rate: expected a number, got null"),
    ],
)
def test_damaged_json_is_refused_with_file_field_and_remedy(tmp_path, text, error):
    path = tmp_path / "a.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"a\.json: {error}.*; run it again"):
        read_json(path, SHAPE, remedy="run it again")


def test_bits_per_byte_keep_three_decimals():
    """Regression: 1.9996 was shown as 2, beside 3.368."""
    assert [show(Bits.of(value)) for value in (1.9996, 3.37, 10.25, None)] == [
        "2.000",
        "3.370",
        "10.250",
        "-",
    ]


def test_values_and_durations_read_well():
    assert [show(v) for v in (1234567, 0.123456, 4.2e19, 2500.7, None, True)] == [
        "1,234,567",
        "0.1235",
        "4.2e+19",
        "2,501",
        "-",
        "yes",
    ]
    assert [duration(s) for s in (None, 0.04, 59, 60, 725, 3599.7, 11_220, 187_200)] == [
        "-",
        "0.0 s",
        "59.0 s",
        "1 min 00 s",
        "12 min 05 s",
        "1 h 00 min",
        "3 h 07 min",
        "2 d 04 h",
    ]
    assert [
        counted(n, noun)
        for n, noun in ((0, "row"), (1, "process"), (2, "process"), (1024, "micro-batch"))
    ] == ["0 rows", "1 process", "2 processes", "1,024 micro-batches"]


def test_differences_are_named_in_order_and_one_that_is_missing_is_told_apart():
    first, second = {"a": 1, "b": 2, "c": None}, {"b": 3, "a": 1, "d": 4}
    assert differences(first, second) == [("b", 2, 3), ("d", None, 4)]
    assert differences(first, second, missing="-") == [("b", 2, 3), ("c", None, "-"), ("d", "-", 4)]


# ---- stopping ------------------------------------------------------------------------------------


def test_a_file_is_locked_until_it_has_its_name(tmp_path, monkeypatch):
    """Regression: another process could remove it as a leftover between its lock and its name."""
    rename = os.replace

    def late(*names):
        remove_leftovers(tmp_path, fresh_s=0)
        rename(*names)

    monkeypatch.setattr(os, "replace", late)
    write_bytes(tmp_path / "file", b"content")
    assert (tmp_path / "file").read_bytes() == b"content"


def test_a_sentence_of_our_own_stays_whole_when_a_file_cannot_be_written(tmp_path):
    """Regression: a server that was away while a file was copied from it was "[Errno None] None"."""
    with pytest.raises(OSError, match=r"^nothing from host; check the network$") as e:
        with atomic_open(tmp_path / "copy"):
            raise OSError("nothing from host; check the network")
    assert reason_of(e.value) == str(e.value)


def test_a_full_disk_is_named_with_the_file(tmp_path):
    with pytest.raises(OSError, match=r"No space left on device: '.*/copy'") as e:
        with atomic_open(tmp_path / "copy"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert reason_of(e.value) == "No space left on device"


def test_a_wait_ends_for_the_reason_of_whoever_called_it():
    check_stop()
    with stops_if(lambda: "SIGTERM"), pytest.raises(Stop, match="SIGTERM"):
        check_stop()
    check_stop()


def test_a_stop_reaches_the_threads_below_and_no_others():
    with stops_if(lambda: "SIGTERM"):
        assert [*each(lambda _: stop_reason(), "ab")] == ["SIGTERM", "SIGTERM"]
    assert [*each(lambda _: stop_reason(), "ab")] == ["", ""]


def test_an_inner_reason_does_not_hide_the_outer_one():
    with stops_if(lambda: "SIGTERM"), stops_if(lambda: ""):
        assert stop_reason() == "SIGTERM"


KILLED_WHILE_PRINTING = """
import os, signal
from tqdm import tqdm
from nanochat.common import print0
print0("before")
child = os.fork()
if child == 0:
    with tqdm.external_write_mode():
        os.kill(os.getpid(), signal.SIGKILL)
os.waitpid(child, 0)
print0("alive")
"""


def test_a_forked_process_that_is_killed_while_it_prints_does_not_silence_its_parent():
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_PRINTING],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "RANK": "0"},
        check=True,
    )
    assert done.stdout == "before\nalive\n"


@pytest.mark.parametrize("changed", [{"LOCAL_RANK": None}, {"RANK": "2"}, {"WORLD_SIZE": "two"}])
def test_an_environment_that_torchrun_does_not_make_is_one_sentence(changed, monkeypatch):
    """Regressions: a KeyError, a wait of minutes for a process that never comes."""
    for name, value in ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"} | changed).items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    [(name, value)] = changed.items()
    with pytest.raises(ValueError, match=f"{name}={value or 'unset'}.* torchrun"):
        get_dist_info()
