"""dev.same_bits reports equal and different cases, and leaves no worktree behind."""

import shutil
import subprocess
from pathlib import Path

import pytest

from dev import same_bits
from nanochat.cli import run_main

pytestmark = pytest.mark.skipif(
    not (same_bits.ROOT / ".git").exists(), reason="this is not a git checkout"
)


@pytest.mark.parametrize(
    "loss, code, words",
    [(None, 0, "text.crop: equal bit for bit"), (9.5, 1, "text.crop: DIFFERS")],
    ids=["same", "other loss"],
)
def test_a_case_differs_if_one_logged_loss_does(finished, monkeypatch, capsys, loss, code, words):
    def stand_in(version: Path, work: Path, module: str, *flags: str, processes: int = 1) -> None:
        if module == "scripts.base_train":
            run = shutil.copytree(finished / "runs" / "run", work / "runs" / "text.crop")
            if loss and version == same_bits.ROOT:
                lines = (run / "logs" / "train.jsonl").read_text().splitlines()
                at = next(i for i, line in enumerate(lines) if '"digest"' in line)
                lines[at] = lines[at].replace('"loss": ', f'"loss": {loss}, "first_loss": ')
                (run / "logs" / "train.jsonl").write_text("\n".join(lines) + "\n")

    monkeypatch.setattr(same_bits, "python", stand_in)
    monkeypatch.setattr(same_bits.make_sample_corpus, "main", lambda argv: 0)
    assert same_bits.main(["--old=HEAD", "--only=text.crop"]) == code
    out = capsys.readouterr().out
    assert words in out and f"{code} of 1 cases differ" in out
    assert (
        "same-bits-"
        not in subprocess.run(["git", "worktree", "list"], capture_output=True, text=True).stdout
    )


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--old=no-such-commit"], "--old=no-such-commit: git cannot check it out"),
        (["--old=HEAD", "--only=sharks"], "--only: no case begins with sharks; expected text.crop"),
    ],
)
def test_bad_input_gets_one_sentence(capsys, argv, words):
    with pytest.raises(SystemExit, match="1"):
        run_main(lambda: same_bits.main(argv))
    assert words in capsys.readouterr().err
