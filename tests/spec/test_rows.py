"""`assemble`: from placements and documents to tokens and targets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat.packing import BestFit
from nanochat.rows import Document, Packed, assemble

BOS = 0


def ids(*numbers):
    return np.array(numbers, np.uint16)


def put(placements, *documents, T=7, framed=True, own_bos=True):
    """(tokens, live) as lists."""
    tokens, live = assemble(placements, documents, T=T, bos=BOS, framed=framed, own_bos=own_bos)
    return tokens.tolist(), None if live is None else live.tolist()


def test_whole_documents_are_targets_and_need_no_mask():
    a, b = Document(ids(BOS, 1, 2, 3, 4)), Document(ids(BOS, 5, 6))
    assert put([("a", 0, 5, 0), ("b", 0, 3, 0)], a, b) == ([BOS, 1, 2, 3, 4, BOS, 5, 6], None)


def test_a_continuation_gets_a_bos_and_its_context_is_off():
    a = Document(ids(BOS, *range(1, 20)))
    assert put([("a", 8, 8, 2)], a) == ([BOS, 8, 9, 10, 11, 12, 13, 14], [1, 0, 0, 1, 1, 1, 1, 1])


def test_without_bos_of_its_own_a_continuation_has_no_context():
    a = Document(ids(BOS, *range(1, 20)))
    assert put([("a", 8, 8, 0)], a, own_bos=False) == ([8, 9, 10, 11, 12, 13, 14, 15], None)


def test_what_a_window_repeats_is_off_and_its_bos_is_not():
    window = Document(ids(BOS, 1, 2, 3, 4, 5, 6, 7), context=3)
    assert put([("a", 0, 8, 0)], window) == ([BOS, 1, 2, 3, 4, 5, 6, 7], [1, 0, 0, 0, 1, 1, 1, 1])


def test_what_a_cut_window_still_repeats_is_off():
    window = Document(ids(BOS, *range(1, 20)), context=12)
    assert put([("a", 8, 8, 2)], window) == (
        [BOS, 8, 9, 10, 11, 12, 13, 14],
        [1, 0, 0, 0, 0, 0, 1, 1],
    )


def test_a_silent_document_is_off_and_so_is_the_token_after_it():
    silent, heard = Document(ids(BOS, 1, 2), silent=True), Document(ids(BOS, 3, 4, 5, 6))
    assert put([("a", 0, 3, 0), ("b", 0, 5, 0)], silent, heard) == (
        [BOS, 1, 2, BOS, 3, 4, 5, 6],
        [0, 0, 0, 0, 1, 1, 1, 1],
    )


def test_stored_entries_are_used_as_they_are_and_padding_is_off():
    a, b = Document(ids(1, 2, BOS)), Document(ids(3, 4, BOS))
    assert put([("a", 0, 3, 0), ("b", 0, 3, 0)], a, b, framed=False, own_bos=False) == (
        [1, 2, BOS, 3, 4, BOS, BOS, BOS],
        [1, 1, 1, 0, 1, 1, 0, 0],
    ), "EOD does not predict the next entry"


def test_a_placement_without_its_document_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        put([("a", 0, 4, 0), ("b", 0, 4, 0)], Document(ids(BOS, 1, 2, 3)))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(0, 5), st.integers(8, 20))
def test_with_split_every_token_but_bos_is_a_target_exactly_once(lengths, overlap, T):
    packer = BestFit(T, split=True, overlap=overlap)
    documents, first = {}, 1
    for key, length in enumerate(lengths):
        documents[key] = Document(ids(BOS, *range(first, first + length)))
        first += length
        packer.push(key, length + 1)
    targets = []
    while packer.ready:
        placed = packer.next_row()
        tokens, live = assemble(
            placed, [documents[key] for key, *_ in placed], T=T, bos=BOS, framed=True, own_bos=True
        )
        targets += tokens.tolist() if live is None else tokens[live == 1].tolist()
    targets = [token for token in targets if token != BOS]
    assert len(targets) == len(set(targets)), "no token twice"
    waiting = packer.waiting().values()
    pending = sum(
        piece.length - packer._lead_in(piece.used) - (piece.used == 0) for piece in waiting
    )
    assert len(targets) + pending == first - 1, "none is lost"


@given(st.lists(st.integers(0, 300), min_size=1, max_size=200), st.data())
def test_slices_of_packed_ids_are_those_of_the_array(numbers, data):
    whole, packed = np.array(numbers, np.uint16), Packed(np.array(numbers, np.uint16))
    assert len(packed) == len(whole)
    at = 0
    while at < len(whole):
        stop = data.draw(st.integers(at + 1, len(whole)))
        assert packed[at:stop].tolist() == whole[at:stop].tolist()
        at = stop
