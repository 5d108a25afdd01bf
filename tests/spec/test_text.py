"""Which documents of a text file are read: the parts for training and for validation."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.files import data_at
from nanochat.sources import scan
from nanochat.splits import split_train_val
from nanochat.text import Selection
from nanochat.text_kinds import read_documents
from tests.toy import examples, some_texts, write_jsonl


@pytest.fixture(autouse=True)
def base_dir(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("base")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(folder))
    return folder


DOCUMENTS = some_texts(90, seed=8, longest=40)
FRACTIONS = st.sampled_from([0.0, 0.01, 0.1, 0.25, 0.5, 0.9]) | st.floats(0, 0.99)


@settings(max_examples=examples(1))
@given(num=st.integers(0, 90), fraction=FRACTIONS, min_chars=st.integers(0, 30))
def test_law_the_two_parts_follow_the_rule(tmp_path_factory, num, fraction, min_chars):
    path = tmp_path_factory.mktemp("law") / "a.jsonl"
    write_jsonl(path, DOCUMENTS[:num])
    parts = {}
    for part in ("train", "val"):
        every = Selection(val_fraction=fraction).for_split(part)
        long = {"min_chars": min_chars}
        skipped = {}
        parts[part] = list(read_documents(path, every))
        some = list(
            read_documents(path, Selection(val_fraction=fraction, **long).for_split(part), skipped)
        )
        assert some == [t for t in parts[part] if len(t) >= min_chars]
        assert skipped == {"count": 0, "lines": [], "short": len(parts[part]) - len(some)}
    if fraction:
        val = [i for i in range(num) if math.floor((i + 1) * fraction) > math.floor(i * fraction)]
        assert parts["val"] == [DOCUMENTS[i] for i in val] and len(val) == math.floor(
            num * fraction
        )
        assert parts["train"] == [DOCUMENTS[i] for i in range(num) if i not in val]
    else:
        assert parts["train"] == parts["val"] == DOCUMENTS[:num], (
            "without a share, both are the whole file"
        )


@given(
    lines=st.lists(st.sampled_from(["a", "some words", "x" * 300]), min_size=1, max_size=9),
    end=st.sampled_from(["", "\n", "\n\n"]),
    fraction=st.sampled_from([0.01, 0.05, 0.3, 0.5]),
)
def test_law_no_part_of_a_txt_file_is_empty(lines, end, fraction):
    """Regression: if a final newline ended the line with the cut, nothing was left for
    validation."""
    content = "\n".join(lines) + end
    train, val = (
        "".join(
            document.text
            for document in Selection(val_fraction=fraction, part=part).of_one_document(
                content, {"short": 0}
            )
        )
        for part in ("train", "val")
    )
    assert (
        train + val == content
        and train.strip()
        and (val.strip() or len(content.strip()) < 2 / fraction)
    )


# ---- flags ---------------------------------------------------------------------------------------


def test_impossible_flags_are_one_sentence(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    for values, message in (
        ({"val_fraction": 1.0}, "--val-fraction: got 1"),
        ({"min_chars": -1}, "--min-chars: got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            Selection.of(values)
    with pytest.raises(ValueError, match=r"--val-fraction: .*a\.jsonl is named for .* --val-path"):
        split_train_val(data_at(path), data_at(path), shared=True)
    with pytest.raises(ValueError, match=r"a\.jsonl: no document is left in .*--val-fraction 0\.1"):
        scan(path, selection=Selection(val_fraction=0.1, part="val"))
    with pytest.raises(
        ValueError, match=r"a\.jsonl: no document .*; skipped 2 documents shorter than --min-chars"
    ):
        scan(path, selection=Selection(min_chars=5))
    with pytest.raises(
        ValueError, match="or use 1% of the documents of every file with --val-fraction"
    ):
        split_train_val(data_at(path))
