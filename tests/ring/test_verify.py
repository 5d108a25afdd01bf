"""verify: each kind of damage is reported with its file and entry, and nothing else is."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.common import counted
from nanochat.run_dir import delete_checkpoint, keep_cursors, pack_cursors
from nanochat.tokenizer import RustBPETokenizer
from scripts import verify
from tests.checkpoints import files_of, reseal
from tests.finished import command
from tests.token_files import (
    E,
    Tokenizer,
    patch,
    truncate,
    windowed,
    write_folder,
    write_manifest,
    write_megatron,
    write_pair,
)
from tests.toy import examples, some_texts
from tests.training import run_dir

# Two documents, one in two windows with an overlap of 1; one more document.
ENTRIES, PREFIXES = [[1, 2, E], [3, 4, 5], [5, 6, E], [7, E]], [0, 0, 1, 0]
FIRST_OFFSET, FIRST_PREFIX = 16, 16 + 8 * (len(ENTRIES) + 1)


def run(*args):
    """(exit code, problems, printed text)."""
    outcome = command(verify.main, *args)
    return outcome.code, re.findall("PROBLEM (.*)", outcome.out), outcome.out


def good_folder(root):
    write_folder(
        root / "web",
        {"a": (ENTRIES, PREFIXES), "b": ([[8, E]], None)},
        max_length=3,
        overlap_size=1,
    )
    return root / "web"


def u16(*ids):
    return np.array(ids, "<u2").tobytes()


def test_the_help_has_each_percent_sign_once(capsys):
    with pytest.raises(SystemExit):
        verify.main(["--help"])
    out = capsys.readouterr().out
    assert "[--replay 5%|A:B]" in out and "%%" not in out


def test_good_shards_are_good(tmp_path):
    folder = good_folder(tmp_path)
    code, problems, out = run(tmp_path, "--sequence-len", 1)
    assert (code, problems) == (0, [])
    counts = "2 shards, 4 documents, 5 entries, 13 tokens"
    assert f"{folder}: {counts}, the EOD at the end of each document included" in out
    assert [line.split() for line in out.splitlines() if ".." in line] == [
        ["2", "..", "3", "5", "100.00%", "100.00%"]
    ]
    assert (
        "longer than T + 1 = 2: 60.00% of entries; 3 tokens (23.08%) are beyond that length" in out
    )
    assert out.endswith("all good\n")


def megatron_folder(root):
    """Two Megatron pairs and their manifest.json. The second of three documents has two sequences.
    The tables of the .idx begin at bytes 34 (lengths), 50 (pointers) and 82 (boundaries)."""
    documents = [[[1, 2, E]], [[3, 4], [5, E]], [[6, E]]]
    written = {name: write_megatron(root / "web" / name, documents) for name in "ab"}
    whole = [[i for s in d for i in s] for d in documents]
    write_manifest(
        root / "web", dict.fromkeys("ab", (whole, None)), written, data_format="megatron"
    )
    return root / "web"


# Damage to a.bin or a.idx of the good folder, and the problems that must be reported, in addition
# to the checksums.
DAMAGE = {
    "no idx": ("idx", lambda p: p.unlink(), ["a.idx: the file is missing; "]),
    "backwards": (
        "idx",
        lambda p: patch(p, FIRST_OFFSET + 8, b"\x08"),
        ["a.idx: the offsets of entries"],
    ),
    "empty entry": (
        "idx",
        lambda p: patch(p, FIRST_OFFSET + 8, b"\x06"),
        [
            "a.bin: entry 1 (0 ids) is empty",
            "a.bin: entry 0 (6 ids) is longer than a window of 3",
            "a.bin: entry 0 (6 ids) has the end-of-document id",
            "a.bin: entry 0 (6 ids) ends a document without",
            "a.bin: documents is 2, manifest.json says 3",
        ],
    ),
    "prefix": (
        "idx",
        lambda p: patch(p, FIRST_PREFIX + 4, b"\3"),
        ["a.bin: entry 2 (3 ids) is not longer than its"],
    ),
    "long prefix": (
        "idx",
        lambda p: patch(p, FIRST_PREFIX + 4, b"\4"),
        ["a.idx: entry 2 is shorter than its"],
    ),
    "wrong prefix": (
        "idx",
        lambda p: patch(p, FIRST_PREFIX + 2, b"\1"),
        [
            "a.bin: entry 0 (3 ids) ends with the end-of-document id",
            "a.bin: documents is 2, manifest.json says 3",
        ],
    ),
    "vocabulary": (
        "bin",
        lambda p: patch(p, 14, u16(257)),
        ["a.bin: entry 2 (3 ids) has ids outside the vocabulary of 257"],
    ),
    "lost end": (
        "bin",
        lambda p: patch(p, 16, u16(9)),
        [
            f"a.bin: entry 2 (3 ids) ends a document without the end-of-document id {E}",
            "a.bin: documents is 2, manifest.json says 3",
        ],
    ),
    "end of a window": (
        "bin",
        lambda p: patch(p, 10, u16(E)),
        ["a.bin: entry 1 (3 ids) ends with the end-of"],
    ),
    "another id": ("bin", lambda p: patch(p, 0, u16(2)), []),
}
MEGATRON = {
    "pointer": (
        "idx",
        lambda p: patch(p, 58, (100).to_bytes(8, "little")),
        [
            "a.idx: sequence 1 has 2 ids at byte 100, which is not a valid place in its .bin of 18 bytes"
        ],
    ),
    "boundary": (
        "idx",
        lambda p: patch(p, 82 + 16, (0).to_bytes(8, "little")),
        ["a.idx: the boundaries of entries"],
    ),
    "empty": (
        "idx",
        lambda p: patch(p, 82 + 16, (1).to_bytes(8, "little")),
        [
            f"a.bin: entry 2 (6 ids) has the end-of-document id {E} inside it",
            "a.bin: documents is 2",
        ],
    ),
    "lost end": (
        "bin",
        lambda p: patch(p, 12, u16(9)),
        [
            f"a.bin: entry 1 (4 ids) ends a document without the end-of-document id {E}",
            "a.bin: documents is 2",
        ],
    ),
}


@pytest.mark.parametrize("block", [None, 2])
@pytest.mark.parametrize(
    ("make", "name"),
    [*((good_folder, name) for name in DAMAGE), *((megatron_folder, name) for name in MEGATRON)],
)
def test_damage_is_found_and_only_that(tmp_path, monkeypatch, make, name, block):
    for limit in ("BLOCK_ENTRIES", "BLOCK_IDS"):
        monkeypatch.setattr(verify, limit, block or getattr(verify, limit))
    folder = make(tmp_path)
    assert run(tmp_path)[:2] == (0, [])
    which, damage, expected = (DAMAGE if make is good_folder else MEGATRON)[name]
    damage(folder / f"a.{which}")
    code, problems, out = run(tmp_path)
    assert code == 1
    if "2 shards, " in out:  # the pair could be read
        expected = [*expected, f"a.bin: {which}_hash is "]
    for text in expected:  # a table that cannot be read is reported for each block that needs it
        assert sum(p.startswith(f"{folder}/{text}") for p in problems) == 1 or (
            block and "a.idx" in text
        ), problems
    known = [any(p.startswith(f"{folder}/{text}") for text in expected) for p in problems]
    assert all(known) or (block and make is megatron_folder), problems
    assert counted(len(problems), "problem") in out


@given(windowed(), st.data())
@settings(max_examples=examples(1.2))
def test_with_a_manifest_any_changed_byte_is_found(tmp_path_factory, case, data):
    entries, prefixes, overlap = case
    root = tmp_path_factory.mktemp("root")
    write_folder(root, {"a": (entries, prefixes)}, max_length=6, overlap_size=overlap)
    assert run(root)[0] == 0
    path = root / data.draw(st.sampled_from(["a.bin", "a.idx"]))
    at = data.draw(st.integers(0, path.stat().st_size - 1))
    patch(path, at, bytes([path.read_bytes()[at] ^ data.draw(st.integers(1, 255))]))
    assert run(root)[0] == 1


def test_the_manifest_and_the_folder_must_agree(tmp_path):
    folder = good_folder(tmp_path)
    for path in folder.glob("b.*"):
        path.unlink()
    write_pair(folder / "c", [[1, E]])
    assert run(tmp_path)[:2] == (
        1,
        [
            f"{folder}/c.bin: manifest.json does not list it",
            f"{folder}/b.bin: manifest.json lists it, but it is missing",
        ],
    )
    assert run(folder / "a.idx")[:2] == (0, [])  # one pair: the others are not checked
    for path in folder.glob("?.*"):
        path.unlink()
    assert len(run(tmp_path)[1]) == 2  # only manifest.json is left


def test_counts_of_the_manifest_are_compared(tmp_path):
    folder = good_folder(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"]["a"] |= {
        "documents": 9,
        "tokens": 99,
        "entries": 8,
        "bin_bytes": 7,
        "groups": [1, 2],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert run(tmp_path)[1] == [
        f"{folder}/a.bin: {text}"
        for text in (
            "entries is 4, manifest.json says 8",
            "tokens is 11, manifest.json says 99",
            "bin_bytes is 22, manifest.json says 7",
            "documents is 3, manifest.json says 9",
            "the groups in manifest.json hold 3 entries, the file 4",
        )
    ]
    (folder / "manifest.json").write_text("{")
    [problem] = run(tmp_path)[1]
    assert problem.startswith(f"{folder}/manifest.json: not valid JSON")


def test_shards_without_a_manifest_are_checked_as_far_as_possible(tmp_path, monkeypatch):
    """Without a manifest, windows may have no overlap, and a window may repeat the end of a
    document."""
    write_pair(tmp_path / "a", [[1, 2], [3, E], [4, E], [4, E]], [0, 0, 0, 1])
    for name in (".a.bin.x.bin", ".git/a.bin"):  # no shards
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"not a shard")
    code, problems, out = run(tmp_path)
    assert (
        (code, problems) == (0, [])
        and "1 shards, 2 documents, 4 entries" in out
        and "vocabulary is unknown" in out
        and "end-of-document id is unknown (the last id" in out
    )
    write_pair(tmp_path / "b", [[5, E]] * 100)
    _, problems, out = run(tmp_path, "--vocab-size", 200)
    assert problems == [
        f"{tmp_path}/{name} has ids outside the vocabulary of 200, and {more} more"
        for name, more in (("a.bin: entry 1 (2 ids)", 2), ("b.bin: entry 0 (2 ids)", 99))
    ]
    patch(tmp_path / "a.bin", 0, u16(E))
    monkeypatch.setattr(verify, "get_tokenizer", lambda name, eod_token=None: Tokenizer())
    write_pair(tmp_path / "c", [[1, E], [2]])
    problems = [run(tmp_path / f"{name}.bin", "--tokenizer", "T")[1] for name in "ac"]
    assert problems == [
        [f"{tmp_path}/a.bin: entry 0 (2 ids) has the end-of-document id {E} inside it"],
        [f"{tmp_path}/c.bin: entry 1 (1 ids) ends a document without the end-of-document id {E}"],
    ]


def test_shards_without_a_manifest_are_checked_with_the_tokenizer_beside_them(tmp_path):
    """Regression: the vocabulary was unknown, although training finds it there."""
    tokenizer = RustBPETokenizer.train_from_iterator(some_texts(50), 280)
    tokenizer.save(tmp_path / "tokenizer")
    eod = tokenizer.get_bos_token_id()
    path = tmp_path / "train/web/a"
    write_pair(path, [[1, eod], [280, eod]], vocab_size=300)
    for place in (tmp_path, path.parent, f"{path}.bin"):
        code, problems, out = run(place)
        assert (code, problems) == (
            1,
            [f"{path}.bin: entry 1 (2 ids) has ids outside the vocabulary of 280"],
        )
        assert f"ids checked with the tokenizer {tmp_path}/tokenizer, 280 tokens" in out


def test_the_tokenizer_of_other_files_or_a_damaged_one_does_not_stop_the_check(tmp_path):
    """Regression: a tokenizer two folders above, of other files, was used; and pairs beside one that
    cannot be read were not checked at all."""
    tokenizer = RustBPETokenizer.train_from_iterator(some_texts(50), 280)
    tokenizer.save(tmp_path / "tokenizer")
    path = tmp_path / "other/ids/a"
    write_pair(path, [[290, 299]], vocab_size=300)
    code, problems, out = run(path.parent)
    assert (code, problems) == (0, []) and "the vocabulary is unknown" in out
    own = path.parent / "tokenizer/tokenizer.json"
    own.parent.mkdir()
    own.write_text("{}")
    code, problems, out = run(path.parent)
    assert (code, problems) == (0, []) and "1 shards, 1 documents" in out
    assert f"the tokenizer beside {path.parent} cannot be used: " in out


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.fixture
def trained(copied):
    """A run with the checkpoints of steps 2, 4 and 6 and `final`, and their kept cursors."""
    return run_dir()


def test_checkpoints_are_verified_file_by_file(trained, monkeypatch):
    """Regression: the losses of rows in logs/rows/ were reported as pairs that lack their .idx."""
    folder = trained / "checkpoints"
    code, problems, out = run(trained)
    number = len(files_of(folder / "final"))
    assert (code, problems) == (0, [])
    assert [line for line in out.splitlines() if "step" in line and "checkpoints/" in line] == [
        f"{folder / name}: step {step}, {number} files"
        for name, step in (
            ("checkpoint-2", 2),
            ("checkpoint-4", 4),
            ("checkpoint-6", 6),
            ("final", 8),
        )
    ]
    assert out.count("  OK ") == 4 * number and f"{trained}/logs/cursors: 4 of 4 files OK" in out
    for path, checkpoints in (
        (folder, 4),
        (folder / "final", 1),
        (trained.parent, 4),
        (trained / "logs", 0),
    ):
        code, problems, out = run(path)
        assert (code, problems, out.count("  OK ")) == (0, [], checkpoints * number)
    for here, path in (
        (folder, "final"),
        (folder, "."),
        (folder / "final", "."),
        (trained, "checkpoints"),
        (trained / "checkpoints", "../checkpoints/final"),
    ):
        monkeypatch.chdir(here)
        assert run(path)[0] == 0


def test_every_damaged_file_of_every_checkpoint_is_reported(trained):
    folder = trained / "checkpoints"
    names = files_of(folder / "final")
    assert names == files_of(folder / "checkpoint-4")
    for name in names:
        patch(folder / "final" / name, 3, b"\xff")
        patch(folder / "checkpoint-4" / name, 3, b"\xff")
        code, problems, _ = run(trained)
        assert code == 1 and len(problems) == 2 * (
            1 if name == verify.SEAL_NAME else names.index(name) + 1
        ), problems
        for of in ("checkpoint-4", "final"):
            assert (
                sum(p.startswith(f"{folder / of / name}: ") and "corrupt" in p for p in problems)
                == 1
            )
    (folder / "checkpoint-2" / "optimizer.bin").unlink()
    (folder / "checkpoint-2" / "rng" / "rank_9.pkl").write_bytes(b"unlisted")
    truncate(folder / "checkpoint-2" / "scheduler.bin", 100)
    code, problems, out = run(folder / "checkpoint-2")
    assert code == 1 and len(problems) == 3 and out.count("  OK ") == len(names) - 2
    assert f"{folder}/checkpoint-2/optimizer.bin: missing" in problems
    assert f"{folder}/checkpoint-2/rng/rank_9.pkl: {verify.SEAL_NAME} does not list it" in problems
    (folder / "checkpoint-2" / verify.SEAL_NAME).unlink()
    for path in (trained, folder, folder / "checkpoint-2"):
        code, problems, _ = run(path)
        assert code == 1 and sum("checkpoint-2" in p for p in problems) == 1
        assert any(
            p.startswith(f"{folder}/checkpoint-2/{verify.SEAL_NAME}: missing") for p in problems
        )


def test_parts_that_do_not_fit_together_and_damaged_cursors_are_reported(trained):
    folder = trained / "checkpoints"
    lanes = "dataloader_state/lanes.json.gz"
    (folder / "final" / lanes).write_bytes((folder / "checkpoint-4" / lanes).read_bytes())
    reseal(folder / "final")
    kept = trained / "logs" / "cursors"
    truncate(kept / "step-00000004.json.gz", 9)
    keep_cursors(trained, 6, pack_cursors(7, []))
    assert run(trained)[:2] == (
        1,
        [
            f"{folder}/final/{lanes}: holds cursors for step 4, but trainer_state.json is for step 8",
            f"{kept}/step-00000004.json.gz: corrupt or truncated (EOFError)",
            f"{kept}/step-00000006.json.gz: its cursors are those of step 7; delete it",
        ],
    )


def test_a_checkpoint_that_the_run_deletes_in_the_meantime_is_not_a_problem(trained, monkeypatch):
    """Regression: verify reported "never finished" for a checkpoint that retention deleted."""
    check = verify.check_checkpoint

    def deleting(path, bar):
        if path.name == "checkpoint-4":
            delete_checkpoint(path)
        return check(path, bar)

    monkeypatch.setattr(verify, "check_checkpoint", deleting)
    code, problems, out = run(trained)
    assert (code, problems) == (0, []) and "checkpoint-4: the run deleted it in the meantime" in out


# ---- links ---------------------------------------------------------------------------------------


def test_pairs_in_a_linked_folder_are_verified(tmp_path):
    write_folder(tmp_path / "disk/de", {"a": (ENTRIES, PREFIXES)})
    write_folder(tmp_path / "shards/en", {"a": (ENTRIES, PREFIXES)})
    (tmp_path / "shards/de").symlink_to(tmp_path / "disk/de")
    (tmp_path / "shards/en/again").symlink_to(tmp_path / "shards")
    assert run(tmp_path / "shards")[:2] == (0, [])
    truncate(tmp_path / "disk/de/a.bin", 4)
    code, problems, _ = run(tmp_path / "shards")
    assert code == 1 and len(problems) == 1 and "shards/de/a.bin: 2 tokens on disk" in problems[0]


def test_a_link_to_something_that_does_not_exist_is_a_problem(tmp_path):
    write_folder(tmp_path / "en", {"a": (ENTRIES, PREFIXES)})
    (tmp_path / "de").symlink_to(tmp_path / "gone")
    code, problems, _ = run(tmp_path)
    [problem] = problems
    assert code == 1 and problem.startswith(f"{tmp_path}/de: ")
    for words in (f"{tmp_path}/gone", "does not exist", "restore it, or delete the link"):
        assert words in problem


def test_empty_documents_of_megatrons_files_are_not_a_problem(tmp_path, capsys):
    """Regression: megatron-core writes and reads them."""
    write_megatron(tmp_path / "a", [[[1, E]], [], [[]], [[2, E]]])
    assert verify.main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "all good" in out and re.search(r"^ +0 +2 +50.00% +0.00%$", out, re.MULTILINE)
