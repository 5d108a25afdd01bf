"""dev.fuzz: a short run finds nothing, and planted mistakes are found."""

import os
import time

import pytest

from dev import fuzz


def test_a_short_run_over_all_readers_finds_nothing(capsys):
    assert fuzz.main(["--cases=100", "--seed=7"]) == 0, capsys.readouterr().out
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:-1]] == [*fuzz.READERS, "all"]
    cases, refused, read, found = map(int, lines[-2].split()[1:])
    assert cases == refused + read >= 90 and min(refused, read) > 20 and found == 0


def refuse(base, seed):
    raise ValueError("a sentence without a name")


@pytest.mark.parametrize(
    "read, finding",
    [
        (lambda base, seed: {}["key"], "KeyError: 'key'"),
        (refuse, "ValueError: a sentence without a name"),
        (lambda base, seed: time.sleep(60), "no answer in 0 s"),
        (lambda base, seed: os._exit(9), "the process died"),
        (lambda base, seed: None, ""),
    ],
)
def test_a_reader_that_fails_without_a_sentence_hangs_or_dies_is_found(
    tmp_path, monkeypatch, read, finding
):
    (tmp_path / "whole.json").write_text('{"a": [1, 2]}')
    monkeypatch.setattr(fuzz, "LIMIT_S", 0.4 if finding.startswith("no answer") else 60.0)
    monkeypatch.setitem(fuzz.READERS, "mine", fuzz.Reader(read, ("whole.json",)))
    child = fuzz.Child(tmp_path)
    for number in range(2):
        verdict, details = fuzz.run_case(child, "mine", number, seed=1)
        assert verdict == ("found" if finding else "read") and details.startswith(
            f"whole.json: {finding}"
        )
    child.close()
    assert (tmp_path / "whole.json").read_text() == '{"a": [1, 2]}'


def test_an_altered_token_file_that_verify_passes_is_found(tmp_path, monkeypatch):
    (tmp_path / "a.bin").write_bytes(b"12345678")
    monkeypatch.setattr(fuzz, "read_verify", lambda base, seed: None)
    monkeypatch.setitem(fuzz.READERS, "verify", fuzz.Reader(lambda base, seed: None, ("a.bin",)))
    child = fuzz.Child(tmp_path)
    assert fuzz.run_case(child, "verify", 0, seed=1) == (
        "found",
        "a.bin: verify passes an altered file",
    )
    child.close()
