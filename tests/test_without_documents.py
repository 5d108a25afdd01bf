"""A run without some documents: the same rows, in which their targets are off."""

from contextlib import closing

import numpy as np
import pytest

from nanochat.order import StreamConfig
from nanochat.stream import Stream
from tests import toy


@pytest.mark.parametrize("layout", ["crop", "split", "concat"])
def test_without_some_documents_rows_keep_their_tokens_and_only_those_targets_are_off(layout):
    """A document's targets are its own tokens and what its last token predicts, the BOS of the next one."""
    source = toy.numbered([[5, 40, 3, 17], [9, 30, 2, 70], [11, 8, 1, 25]])
    config = StreamConfig(T=16, V=2, layout="concat" if layout == "concat" else "bestfit", overlap=4, buffer_size=4,
                          long_docs="split" if layout == "split" else "crop", max_epochs=2)
    listed = {(0, 1), (1, 0), (2, 2)}
    ids = {token for group, row in listed for token in source.documents[group][row].tolist()}
    checked = 0
    with closing(Stream(config, {"a": source}, range(2), tokenizer="t")) as plain, \
            closing(Stream(config, {"a": source}, range(2), tokenizer="t", without={"a": listed})) as other:
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
