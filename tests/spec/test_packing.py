"""The packers place every token once: their laws, from lengths alone."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nanochat.packing import BestFit, Binned, Concat
from tests.naive_packing import Naive, back_to_back
from tests.toy import examples

# Each run has the same examples, because laws also assert that their cases occurred.
LAW = settings(
    max_examples=examples(3.3), derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


class Drive:
    """Pushes documents 0, 1, ... to a packer, keeping `buffer` of them pending, and empties it at
    the end."""

    def __init__(self, packer, lengths, buffer=4):
        self.packer = packer
        self.lengths = lengths
        self.buffer = buffer
        self.pushed = 0

    def __iter__(self):
        while True:
            while self.packer.wants(self.buffer) and self.pushed < len(self.lengths):
                self.packer.push(self.pushed, self.lengths[self.pushed])
                self.pushed += 1
            if not self.packer.ready:
                return
            yield self.packer.next_row()


@st.composite
def streams(draw, shortest_T=3):
    """(T, lengths, buffer): documents from BOS alone to several rows."""
    T = draw(st.one_of(st.integers(shortest_T, 24), st.sampled_from([70, 200, 500])))
    length = st.one_of(st.integers(1, T // 2 + 1), st.integers(1, T + 1), st.integers(1, 4 * T))
    return T, draw(st.lists(length, min_size=5, max_size=70)), draw(st.integers(1, 8))


# ---- which piece is chosen -----------------------------------------------------------------------


def one_row(packer, *lengths):
    for key, length in enumerate(lengths):
        packer.push("abcdefgh"[key], length)
    return packer.next_row()


def test_golden_the_example_of_the_docstring():
    crop = BestFit(7)
    assert one_row(crop, 6, 2, 9) == [("a", 0, 6, 0), ("b", 0, 2, 0)]
    assert crop.next_row() == [("c", 0, 8, 0)] and crop.cropped == 1
    split = BestFit(7, split=True, overlap=2)
    assert one_row(split, 6, 2, 9) == [("a", 0, 6, 0), ("b", 0, 2, 0)]
    assert split.next_row() == [("c", 0, 8, 0)]
    assert split.waiting() == {"c": (4, 8, 16)}  # BOS, 2 again, the 9th
    split.push("d", 4)
    assert split.next_row() == [("c", 6, 4, 2), ("d", 0, 4, 0)]
    concat = Concat(7)
    assert one_row(concat, 6, 2, 9) == [("a", 0, 6, 0), ("b", 0, 2, 0)]
    assert concat.next_row() == [("b", 1, 1, 0), ("c", 0, 7, 0)]


@pytest.mark.parametrize("kind", ["crop", "split", "concat"])
def test_law_rows_are_those_of_a_plain_search_also_after_resumes_and_the_ledger_balances(kind):
    """At every row: T + 1 tokens, a balanced ledger, and a new packer that continues from the old
    one's state."""
    seen = Counter()

    @LAW
    @given(
        streams(1 if kind == "concat" else 3),
        st.one_of(st.just(0), st.integers(1, 4), st.integers(0, 12)),
    )
    @example((200, [150, 53, 30, 100, 70, 20], 6), 0)
    def law(stream, overlap):
        T, lengths, buffer = stream

        def new_packer():
            return (
                Concat(T)
                if kind == "concat"
                else BestFit(T, split=kind == "split", overlap=min(overlap, T - 2))
            )

        straight = list(Drive(new_packer(), lengths, buffer))
        naive = Naive(T, kind == "split", min(overlap, T - 2))
        expected = (
            back_to_back(T, lengths) if kind == "concat" else list(Drive(naive, lengths, buffer))
        )
        drive, rows = Drive(new_packer(), lengths, buffer), []
        for placements in drive:
            rows.append(placements)
            assert sum(length for _, _, length, _ in placements) == T + 1
            assert all(length > 0 and 0 <= off < length for _, _, length, off in placements)
            p = drive.packer
            assert p.num_rows == len(rows)
            pushed = sum(lengths[: drive.pushed])
            assert pushed + p.inserted + p.repeated == p.num_rows * (T + 1) + p.cropped + p.pending
            drive.packer = new_packer()
            drive.packer.restore(*p.state())
            assert drive.packer.state() == p.state() and drive.packer.ready == p.ready
            seen.update(cropped=p.cropped > 0, repeated=p.repeated > 0)
        assert rows == straight == expected
        # not enough is left to fill a row
        assert drive.pushed == len(lengths) and drive.packer.pending <= T + 1
        near = any(lengths[row[-1][0]] - row[-1][2] > 0 for row in rows if len(row) > 1)
        continued = any(start for row in rows for _, start, _, _ in row)
        seen.update(
            rows=len(rows), three=any(len(row) > 2 for row in rows), near=near, continued=continued
        )

    law()
    own = {
        "crop": ("cropped", "near"),
        "split": ("repeated", "continued"),
        "concat": ("repeated", "continued"),
    }[kind]
    assert seen["rows"] > 150 and seen["three"] > 10 and all(seen[case] for case in own), seen


# ---- stored entries ------------------------------------------------------------------------------


def test_law_binned_rows_hold_whole_entries_the_oldest_first_and_pad_the_rest():
    seen = Counter()

    @LAW
    @given(streams(), st.booleans())
    def law(stream, pack):
        T, lengths, buffer = stream
        lengths = [min(length, T + 1) for length in lengths]
        drive, came = Drive(Binned(T, pack=pack), lengths, buffer), []
        for placements in drive:
            came += [key for key, *_ in placements]
            assert all(
                (start, length, off) == (0, lengths[key], 0)
                for key, start, length, off in placements
            )
            used = sum(length for _, _, length, _ in placements)
            assert used <= T + 1 and (pack or len(placements) == 1)
            assert not drive.packer.waiting() or placements[0][0] < min(drive.packer.waiting())
            if pack:  # no pending entry would have fitted
                assert all(piece.length > T + 1 - used for piece in drive.packer.waiting().values())
            seen.update(several=len(placements) > 1, padded=used <= T)
        assert sorted(came) == list(range(len(lengths)))
        assert drive.packer.padded == drive.packer.num_rows * (T + 1) - sum(lengths)

    law()
    assert seen["several"] and seen["padded"]


def test_binned_refuses_an_entry_that_is_longer_than_a_row():
    Binned(7).push("a", 8)
    with pytest.raises(
        ValueError, match=r"9 tokens, but a row of the binned layout holds only 8; .*--max-length 7"
    ):
        Binned(7).push("a", 9)
