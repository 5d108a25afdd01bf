"""dev.peers: other programs, in environments of their own."""

import sys
from pathlib import Path

import pytest

from dev import peers


def test_a_program_with_a_relative_path_runs_in_another_folder(tmp_path, monkeypatch):
    """Regression: it was looked for in that folder."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path)
    peers.run(["bin/python", "-c", "open('here', 'w')"], tmp_path / "work")
    assert (tmp_path / "work/here").exists()


def test_a_program_keeps_its_link_by_which_python_finds_its_environment(tmp_path):
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert peers.find_program(link) == str(link)


def test_a_program_without_a_path_is_found_as_in_a_shell():
    assert Path(peers.find_program("sh")).is_absolute()


def test_a_missing_program_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ValueError, match="VENV/bin/pyton: no such program"):
        peers.run(["VENV/bin/pyton", "-c", ""], tmp_path)
