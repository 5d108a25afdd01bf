"""The packers' laws, from lengths alone."""

import itertools
from bisect import bisect_right, insort
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from nanochat.packing import BestFit, Binned, Concat
from tests.toy import examples

# Each run has the same examples, because laws also assert that their cases occurred.
LAW = settings(max_examples=examples(1.4), derandomize=True, suppress_health_check=[HealthCheck.too_slow])
OVERLAPS = st.one_of(st.just(0), st.integers(1, 4), st.integers(0, 12))


def new_packer(kind, T, overlap=3):
    return Concat(T) if kind == "concat" else BestFit(T, split=kind == "split", overlap=min(overlap, T - 2))


def renewed(packer, kind, T):
    """A packer after a resume."""
    new = new_packer(kind, T, getattr(packer, "overlap", 0))
    new.restore(*packer.state())
    return new


class Drive:
    """Pushes documents 0, 1, ... to a packer, keeping `buffer` of them pending, and empties it at the end."""

    def __init__(self, packer, lengths, buffer=4):
        self.packer, self.lengths, self.buffer = packer, lengths, buffer
        self.pushed = 0

    def __iter__(self):
        while True:
            while self.packer.wants(self.buffer) and self.pushed < len(self.lengths):
                self.packer.push(self.pushed, self.lengths[self.pushed])
                self.pushed += 1
            if not self.packer.ready:
                return
            yield self.packer.next_row()

    @property
    def pushed_tokens(self):
        return sum(self.lengths[:self.pushed])


def expand(placements, own_bos):
    """[(document, number of the token, is off)] of a row. A continuation's own BOS is token 0 of its document."""
    row = []
    for key, start, length, off in placements:
        if start and own_bos:
            tokens = [0, *range(start, start + length - 1)]
        else:
            tokens = list(range(start, start + length))
        row += [(key, token, 1 <= i <= off) for i, token in enumerate(tokens)]
    return row


@st.composite
def streams(draw, shortest_T=3):
    """(T, lengths, buffer): documents from BOS alone to several rows."""
    T = draw(st.one_of(st.integers(shortest_T, 24), st.sampled_from([70, 200, 500])))
    length = st.one_of(st.integers(1, T // 2 + 1), st.integers(1, T + 1), st.integers(1, 4 * T))
    return T, draw(st.lists(length, min_size=5, max_size=70)), draw(st.integers(1, 8))


# ---- rows -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["crop", "split", "concat"])
def test_law_every_row_has_exactly_T_plus_1_tokens_and_the_ledger_balances_at_every_row(kind):
    seen = Counter()

    @LAW
    @given(streams(), OVERLAPS)
    def law(stream, overlap):
        T, lengths, buffer = stream
        drive = Drive(new_packer(kind, T, overlap), lengths, buffer)
        emitted = 0
        for placements in drive:
            p = drive.packer
            assert sum(length for _, _, length, _ in placements) == T + 1
            assert all(length > 0 and 0 <= off < length for _, _, length, off in placements)
            emitted += T + 1
            assert drive.pushed_tokens + p.inserted + p.repeated == emitted + p.cropped + p.pending
            assert p.row * (T + 1) == emitted
            seen.update(rows=1, cropped=p.cropped > 0, repeated=p.repeated > 0)
        assert drive.pushed == len(lengths) and drive.packer.pending <= T + 1  # not enough is left to fill a row

    law()
    assert seen["rows"] > 50 and seen["cropped" if kind == "crop" else "repeated"]


def test_law_concat_rows_are_the_documents_back_to_back_sharing_one_token():
    @LAW
    @given(streams(shortest_T=1))
    def law(stream):
        T, lengths, buffer = stream
        tokens = [(key, token, False) for key, length in enumerate(lengths) for token in range(length)]
        rows = [expand(placements, False) for placements in Drive(Concat(T), lengths, buffer)]
        assert rows == [tokens[i * T:i * T + T + 1] for i in range((len(tokens) - 1) // T)]

    law()


# ---- state ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["crop", "split", "concat"])
def test_law_a_resume_at_every_row_changes_no_placement(kind):
    seen = Counter()

    @LAW
    @given(streams(), OVERLAPS)
    def law(stream, overlap):
        T, lengths, buffer = stream
        straight = list(Drive(new_packer(kind, T, overlap), lengths, buffer))
        drive, rows = Drive(new_packer(kind, T, overlap), lengths, buffer), []
        for placements in drive:
            rows.append(placements)
            old = drive.packer
            drive.packer = renewed(old, kind, T)
            assert drive.packer.state() == old.state() and drive.packer.ready == old.ready
        assert rows == straight
        seen.update(continuations=any(start for row in rows for _, start, _, _ in row))

    law()
    assert kind == "crop" or seen["continuations"]


# ---- which piece is chosen ------------------------------------------------------------------------------------------

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


def test_golden_a_document_that_fills_a_row_leaves_when_as_many_tokens_have_left_as_came_before_it():
    packer = BestFit(8)
    for key, length in zip("aLbcdeM", (3, 20, 6, 5, 9, 4, 9)):  # places 0, 3, 12, 18, 23, 32, 36
        packer.push(key, length)
    rows = [packer.next_row() for _ in range(4)]
    assert [[key for key, *_ in row] for row in rows] == [["a", "b"], ["L"], ["c", "e"], ["d"]], "ab is an exact fit"


class Naive:
    """Best fit by a search through all pieces, written from the description alone."""

    def __init__(self, T, split, overlap):
        self.capacity, self.split, self.overlap = T + 1, split, overlap
        self.pieces, self.arrived, self.left = [], 0, 0  # (key, length, used, place), oldest first

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
            return max(fitting or fillers, key=lambda p: (p[1], -self.pieces.index(p)))  # the oldest of the largest
        return min(fillers, key=lambda p: (p[1], self.pieces.index(p))) if fillers else self.timed[0]

    def next_row(self):
        room, row, piece = self.capacity, [], self.first
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


@pytest.mark.parametrize("kind", ["crop", "split"])
def test_law_the_bit_sets_choose_the_same_pieces_as_a_search_through_all(kind):
    seen = Counter()

    @settings(LAW, max_examples=examples(3.3))
    @given(streams(), st.integers(0, 5))
    @example((200, [150, 53, 30, 100, 70, 20], 6), 0)
    def law(stream, overlap):
        T, lengths, buffer = stream
        real = list(Drive(new_packer(kind, T, overlap), lengths, buffer))
        assert real == list(Drive(Naive(T, kind == "split", min(overlap, T - 2)), lengths, buffer))
        near = any(lengths[row[-1][0]] - row[-1][2] > 0 for row in real if len(row) > 1)
        seen.update(row=len(real), three=any(len(row) > 2 for row in real), near=near)

    law()
    assert seen["row"] > 150 and seen["three"] > 10 and (seen["near"] or kind == "split")


def test_crop_stays_near_the_floor_on_log_normal_lengths():
    """The floor is the share that can never fit. With 128 pending documents at T = 2048, the loss is a few hundredths
    of a point above it."""
    T, rng = 2048, np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.1, 1.1, 30_000).astype(int) + 1, 2, 200_000).tolist()
    drive = Drive(BestFit(T), lengths, 128)
    emitted = sum(T + 1 for _ in drive)
    floor = sum(max(0, length - (T + 1)) for length in lengths) / sum(lengths)
    dropped = drive.packer.cropped / (emitted + drive.packer.cropped)
    assert floor > 0.1, "the case: documents longer than a row"
    assert dropped < floor + 0.005


def dropped(read, rows, T, waiting):
    """The share of the read tokens that no row holds or can hold. Pending documents can still fill rows."""
    return 1 - (rows * (T + 1) + sum(min(length, T + 1) for length in waiting)) / read


def dropped_by_nanochat(T, lengths, buffer_size=1000, batch=128):
    """The share that nanochat's loader drops. It takes the largest document that fits, or else cuts the shortest."""
    waiting, rows, read = [], 0, 0
    for at in range(0, len(lengths), batch):
        for length in lengths[at:at + batch]:
            insort(waiting, length)
            read += length
        while len(waiting) >= buffer_size:
            room, rows = T + 1, rows + 1
            while room:
                fitting = bisect_right(waiting, room)
                room -= min(room, waiting.pop(max(0, fitting - 1)))
    return dropped(read, rows, T, waiting)


@pytest.mark.parametrize("T, median, spread", [(512, 1000, 0.8), (512, 450, 1.2), (1024, 1600, 0.7), (2048, 450, 1.2)])
def test_crop_drops_no_more_than_nanochats_loader_does(T, median, spread):
    """Regression: if few documents were short, rows ended with half of a document that the next row needed."""
    rng = np.random.default_rng(T + median)
    lengths = (rng.lognormal(np.log(median), spread, 25_000).astype(int) + 30).tolist()
    drive = Drive(BestFit(T), lengths, 128)
    rows = sum(1 for _ in itertools.takewhile(lambda _: drive.pushed < len(lengths), drive)) + 1
    waiting = [piece.length for piece in drive.packer.waiting().values()]
    ours, theirs = dropped(sum(lengths), rows, T, waiting), dropped_by_nanochat(T, lengths)
    assert theirs > 0.05, "the case: documents longer than a row"
    assert ours <= theirs + 0.002


# ---- the order of lengths -------------------------------------------------------------------------------------------

def long_shares(T, split, lengths, rows=8_000):
    """Share of the row tokens that come from documents longer than a row, by tenths of the rows, and the maximum number
    of rows for which a document or a tail was pending."""
    drive, shares, came, longest = Drive(BestFit(T, split=split), lengths, 128), np.zeros((10, 2)), [], 0
    for i, placements in zip(range(rows), drive):
        came += [i] * (drive.pushed - len(came))
        for key, _, length, _ in placements:
            shares[i * 10 // rows] += length * np.array([lengths[key] > T + 1, 1])
            longest, came[key] = max(longest, i - came[key]), i
    return shares[:, 0] / shares[:, 1], longest


@pytest.mark.parametrize("T, median", [(512, 330), (2048, 400)])
def test_rows_of_crop_hold_long_and_short_documents_like_the_data_from_the_beginning(T, median):
    lengths = np.random.default_rng(T).lognormal(np.log(median), 1.1, 60_000).astype(int) + 2
    fits = np.minimum(lengths, T + 1)
    expected = fits[lengths > T + 1].sum() / fits.sum()
    assert 0.15 < expected < 0.75, "the case: both kinds are common"
    shares, longest = long_shares(T, False, lengths.tolist())
    assert np.abs(shares - expected).max() < 0.05 and longest < 300


@pytest.mark.parametrize("T, median", [(512, 330), (2048, 400)])
def test_rows_of_split_hold_both_kinds_in_every_tenth_and_the_rest_of_a_document_waits_its_turn(T, median):
    lengths = (np.random.default_rng(T).lognormal(np.log(median), 1.1, 60_000).astype(int) + 2).tolist()
    shares, longest = long_shares(T, True, lengths)
    assert shares.min() > 0.1 and shares.max() < 0.95 and longest < 512
    drive, seen, apart = Drive(BestFit(T, split=True), lengths, 128), {}, []
    for i, placements in zip(range(4_000), drive):
        for key, start, _, _ in placements:
            if start:
                apart.append(i - seen[key])
            seen[key] = i
    waiting_rows = 128 * np.mean([n for n in lengths if n <= T]) // (T + 1)  # that the short ones fill
    assert len(apart) > 500 and min(apart) >= waiting_rows / 2


# ---- stored entries -------------------------------------------------------------------------------------------------

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
            assert all((start, length, off) == (0, lengths[key], 0) for key, start, length, off in placements)
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
    with pytest.raises(ValueError, match=r"9 tokens, but a row of the binned layout holds only 8; .*--max-length 7"):
        Binned(7).push("a", 9)
