"""The packers place every token once: their laws, from lengths alone."""

import itertools
from collections import Counter

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nanochat.packing import BestFit, Binned, Concat
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


class Naive:
    """Best fit by a search through all pieces, written from the description alone."""

    def __init__(self, T, split, overlap):
        self.capacity = T + 1
        self.split = split
        self.overlap = overlap
        # (key, length, used, place), oldest first
        self.pieces = []
        self.arrived = 0
        self.left = 0

    def push(self, key, length, used=0):
        self.pieces.append((key, length, used, self.arrived))
        self.arrived += min(length, self.capacity)

    @property
    def fillers(self):
        return [p for p in self.pieces if p[1] < self.capacity and p[2] == 0]

    @property
    def timed(self):
        return [p for p in self.pieces if p not in self.fillers]

    @property
    def ready(self):
        return sum(length for _, length, _, _ in self.pieces) >= self.capacity

    @property
    def first(self):
        timed, fillers = self.timed, self.fillers
        return timed[0] if timed and (not fillers or timed[0][3] <= self.left) else fillers[0]

    def wants(self, target):
        counted = sum(min(p[1], self.capacity) for p in self.pieces)
        row = self.capacity if self.split else max(self.capacity, 2049)
        return not self.ready or (len(self.fillers) < target and counted < target * row)

    def choose(self, room):
        fillers = self.fillers
        exact = [p for p in fillers if p[1] == room]
        pairs = [p for p in fillers for q in fillers if p is not q and p[1] + q[1] == room]
        shortest = min((p[1] for p in fillers), default=0)
        near = [p for p in fillers if 0 < p[1] - room <= shortest and not self.split]
        if near and not exact and not pairs:
            return min(near, key=lambda p: (p[1], self.pieces.index(p)))
        fitting = exact or pairs or [p for p in fillers if p[1] < room]
        if fitting or (fillers and self.split):
            # the oldest of the largest
            return max(fitting or fillers, key=lambda p: (p[1], -self.pieces.index(p)))
        return (
            min(fillers, key=lambda p: (p[1], self.pieces.index(p))) if fillers else self.timed[0]
        )

    def next_row(self):
        room = self.capacity
        row = []
        piece = self.first
        while True:
            key, length, used, _ = piece
            self.pieces.remove(piece)
            self.left += min(length, self.capacity)
            placed = min(length, room)
            context = min(self.overlap, used - 1) if used else 0
            off = min(context, placed - 1)
            row.append((key, used - context if used else 0, placed, off))
            if placed < length and self.split:
                now = used + placed - 1 - off if used else placed
                total = length + used - 1 - context if used else length
                self.push(key, 1 + min(self.overlap, now - 1) + total - now, now)
            room -= placed
            if not room:
                return row
            piece = self.choose(room)


def back_to_back(T, lengths):
    """The rows of `concat`: all documents as one sequence of tokens, of which neighbouring rows
    share one."""
    tokens = [(key, number) for key, length in enumerate(lengths) for number in range(length)]
    rows = []
    for start in range(0, len(tokens) - T, T):
        rows.append([])
        for key, of_key in itertools.groupby(
            tokens[start : start + T + 1], key=lambda token: token[0]
        ):
            numbers = [number for _, number in of_key]
            rows[-1].append((key, numbers[0], len(numbers), 0))
    return rows


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
            assert p.row == len(rows)
            pushed = sum(lengths[: drive.pushed])
            assert pushed + p.inserted + p.repeated == p.row * (T + 1) + p.cropped + p.pending
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
        assert drive.packer.padded == drive.packer.row * (T + 1) - sum(lengths)

    law()
    assert seen["several"] and seen["padded"]


def test_binned_refuses_an_entry_that_is_longer_than_a_row():
    Binned(7).push("a", 8)
    with pytest.raises(
        ValueError, match=r"9 tokens, but a row of the binned layout holds only 8; .*--max-length 7"
    ):
        Binned(7).push("a", 9)
