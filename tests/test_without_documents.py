"""A run without some documents has the same rows, but the targets of these documents are off."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from nanochat.dataset import leave_out
from nanochat.order import StreamConfig
from nanochat.stream import Stream
from scripts import compare_runs
from tests import toy, training

workplace = training.in_workplace(**training.SMALL, num_iterations=8, leaves=2, save_every=2, long_docs="split")


@pytest.mark.parametrize("layout", ["crop", "split", "concat"])
def test_rows_keep_their_tokens_and_exactly_the_targets_of_listed_documents_are_off(layout):
    """A document's targets are its own tokens and the BOS of the next one, which its last token predicts."""
    source, same_source = (toy.numbered([[5, 40, 3, 17], [9, 30, 2, 70], [11, 8, 1, 25]]) for _ in range(2))
    config = StreamConfig(T=16, V=2, layout="concat" if layout == "concat" else "bestfit", overlap=4, buffer_size=4,
                          long_docs="split" if layout == "split" else "crop", max_epochs=2)
    listed = {(0, 1), (1, 0), (2, 2)}
    ids = {token for group, row in listed for token in source.documents[group][row].tolist()}
    checked = 0
    same_source.without = {group: np.arange(4) == row for group, row in listed}
    with closing(Stream(config, {"a": source}, range(2), tokenizer="t")) as plain, \
            closing(Stream(config, {"a": same_source}, range(2), tokenizer="t")) as other:
        while rows := plain.next_rows(1):
            for row, twin in zip(rows, other.next_rows(1), strict=True):
                tokens, live = toy.row_arrays(row, 16)
                same, less = toy.row_arrays(twin, 16)
                assert np.array_equal(tokens, same) and row.placed == twin.placed
                inside = np.repeat([key[1:] in listed for key, *_ in row.placed], [p[2] for p in row.placed])
                after = np.r_[False, inside[:-1]]
                assert np.array_equal(less, live * ~(inside | after))
                assert not set(tokens[less == 1].tolist()) & ids
                checked += int(inside.sum())
    assert checked > 40


def first_difference(tag: str, other: str) -> int | None:
    """The first step whose digests differ."""
    pairs = zip(training.digests(tag), training.digests(other), strict=True)
    return next((step for step, (a, b) in enumerate(pairs) if a != b), None)


def weights(tag: str, name: str = "final") -> bytes:
    return (training.run_dir(tag) / "checkpoints" / name / "model" / "pytorch_model.bin").read_bytes()


def documents_of(step: int, tag: str = "plain") -> list[tuple[str, int]]:
    """(file, document) of all documents in the rows of a step."""
    lines = training.read_rows(tag, step)
    return [(place["file"], place["document"]) for row in lines for place in row["documents"]]


def test_two_runs_are_equal_to_the_bit_until_the_first_listed_document(tmp_path, capsys):
    training.succeed(model_tag="plain", keep_last_k=9)
    earlier = {document for step in range(5) for document in documents_of(step)}
    listed = next(document for document in documents_of(5) if document not in earlier)
    path = tmp_path / "list.txt"
    path.write_text(f"# one book\n\n{listed[0]}:{listed[1]}\n")
    training.succeed(model_tag="one", keep_last_k=9, without_documents=path)
    training.finish(2, model_tag="two", keep_last_k=9, without_documents=path)
    assert first_difference("plain", "one") == 5 and first_difference("one", "two") is None
    assert weights("plain", "checkpoint-4") == weights("one", "checkpoint-4") == weights("two", "checkpoint-4")
    assert weights("plain") != weights("one") == weights("two")
    assert compare_runs.main(["plain", "one"]) == 1
    out = capsys.readouterr().out
    assert f"step 5 is the first with a document that one leaves out ({listed[0]}:{listed[1]})" in out
    path.write_text("")
    training.succeed(model_tag="empty", keep_last_k=9, without_documents=path)
    assert weights("plain") == weights("empty") and first_difference("plain", "empty") is None


def test_the_list_is_pinned_with_the_data_and_bad_lines_are_one_sentence(tmp_path):
    path = tmp_path / "list.txt"
    name = sorted(path.name for path in (training.run_dir().parents[1] / "data").glob("*.parquet"))[0]
    path.write_text(f"{name}:*\n")
    training.succeed(num_iterations=2, without_documents=path)
    pinned = json.loads((training.run_dir() / "data_manifest.json").read_text())["train"]["data"]["without"]
    assert pinned == {name: None}
    path.write_text(f"{name}:3\n")
    assert "the file has changed since this run began" in training.refuse(num_iterations=4, without_documents=path)
    path.unlink()
    training.succeed(num_iterations=4, without_documents=path)
    assert "--without-documents" in training.refuse(num_iterations=6), "the run has a list of its own"
    for line, words in ((f"{name}:99999", "the file has documents 0 to "), ("none.parquet:1", "expected FILE:DOC"),
                        (name, "expected FILE:DOC"), (f"{name}:-1", "expected FILE:DOC")):
        path.write_text(f"\n{line}\n")
        error = training.refuse(model_tag="new", without_documents=path)
        assert words in error and f"{path}: line 2: {line}" in error
    assert not Path(training.run_dir("new")).exists()


def test_a_file_name_in_two_buckets_means_the_first(tmp_path):
    (tmp_path / "list.txt").write_text("x.bin:1\nx.bin:0\n")
    manifests = {bucket: {"root": f"/{bucket}", "files": [{"name": "x.bin", "size": 1, "footer": "", "groups": [n]}]}
                 for bucket, n in (("a", 2), ("b", 1))}
    reduced = leave_out(manifests, tmp_path / "list.txt")
    assert reduced["a"]["without"] == {"x.bin": [0, 1]} and "without" not in reduced["b"]
