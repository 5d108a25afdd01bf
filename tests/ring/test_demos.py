"""The demonstrations of docs/exactness.md, made small."""

import numpy as np
import pytest

from dev import demo_contamination, demo_exactness, demo_kills
from nanochat.common import get_base_dir
from scripts import repeat


def test_killed_runs_end_with_the_weights_of_undisturbed_ones(monkeypatch, capsys):
    monkeypatch.setattr(demo_exactness, "WORLD_SIZES", (2, 1))
    monkeypatch.setattr(demo_exactness, "STEPS_PER_KILL", 3)
    assert demo_exactness.main(["hash"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [killed] = [line.split() for line in lines if line.startswith("4 -> 1 -> 2")]
    [undisturbed] = [line.split() for line in lines if line.startswith("1  ")]
    assert killed[-2:] == undisturbed[-2:] and killed[-3] == "2", (
        "the same batches and weights after two kills"
    )


@pytest.mark.parametrize("rerun", [0.0, 0.001])
def test_noise_draws_all_columns_and_fails_if_a_rerun_differs(tmp_path, monkeypatch, rerun):
    monkeypatch.setattr(demo_exactness.make_sample_corpus, "main", lambda argv: 0)
    monkeypatch.setattr(demo_exactness.tok_train, "main", lambda argv: 0)

    def train_all(name, flags, seeds, *args, **kwargs):
        (get_base_dir() / "repeats").mkdir(exist_ok=True)
        change = rerun * name.endswith("rerun") + 1e-4 * ("--device-batch-size=4" in flags)
        return [2.4 + 0.01 * seed + change for seed in seeds]

    monkeypatch.setattr(repeat, "train_all", train_all)
    assert demo_exactness.main(["noise", f"--picture={tmp_path / 'noise.png'}"]) == (rerun > 0)
    assert (tmp_path / "noise.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_of_kills_counts_skipped_and_repeated_tokens(monkeypatch):
    monkeypatch.setattr(demo_kills, "DOCUMENTS", 8)
    undisturbed = [np.array([1, 2, 3]), np.array([4, 5, 6]), np.array([7, 8])]
    assert demo_kills.compare(undisturbed, undisturbed) == ["0", "0", "0 of 3"]
    other_order = [np.array([3, 2, 1]), np.array([4, 5, 6]), np.array([8, 7])]
    assert demo_kills.compare(other_order, undisturbed) == ["0", "0", "0 of 3"]
    lossy = [np.array([1, 2, 3]), np.array([5, 6, 6]), np.array([7])]
    assert demo_kills.compare(lossy, undisturbed) == ["2", "1", "2 of 3"], (
        "4 and 8 are skipped, 6 is repeated"
    )
    assert demo_kills.compare(undisturbed[:2], undisturbed) == ["2", "0", "1 of 3"]


def test_a_job_resumes_from_the_newest_step_that_all_processes_saved(tmp_path):
    assert demo_kills.newest(tmp_path) == (0, [])
    for name in ("000020-0-of-2", "000020-1-of-2", "000040-0-of-2"):
        (tmp_path / f"{name}.pt").touch()
    step, files = demo_kills.newest(tmp_path)
    assert step == 20 and [file.name for file in files] == ["000020-0-of-2.pt", "000020-1-of-2.pt"]


def test_bad_input_gets_one_sentence():
    with pytest.raises(
        ValueError, match="--data-path is missing: pass a folder with one folder of text files"
    ):
        demo_exactness.main(["dry"])


def test_planted_items_are_found_and_no_others(capsys):
    assert demo_contamination.main(["--megabytes=0.1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "exactly 100 100 0" in printed and "not at all 100 0 100" in printed
    assert "word replaced 100 0 100" in printed and "wrong documents: 0" in printed
