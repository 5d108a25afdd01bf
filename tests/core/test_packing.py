"""What the packers drop, and the order in which lengths leave them."""

import itertools
from bisect import bisect_right, insort

import numpy as np
import pytest

from nanochat.packing import BestFit
from tests.spec.test_packing import Drive

# ---- how much is dropped -------------------------------------------------------------------------


def dropped(read, rows, T, waiting):
    """The share of the read tokens that no row holds or can hold. Pending documents can still fill
    rows."""
    return 1 - (rows * (T + 1) + sum(min(length, T + 1) for length in waiting)) / read


def dropped_by_nanochat(T, lengths, buffer_size=1000, batch=128):
    """The share that nanochat's loader drops. It takes the largest document that fits, or else cuts
    the shortest."""
    waiting = []
    rows = 0
    read = 0
    for at in range(0, len(lengths), batch):
        for length in lengths[at : at + batch]:
            insort(waiting, length)
            read += length
        while len(waiting) >= buffer_size:
            room, rows = T + 1, rows + 1
            while room:
                fitting = bisect_right(waiting, room)
                room -= min(room, waiting.pop(max(0, fitting - 1)))
    return dropped(read, rows, T, waiting)


@pytest.mark.parametrize(
    "T, median, spread", [(512, 1000, 0.8), (512, 450, 1.2), (1024, 1600, 0.7), (2048, 450, 1.2)]
)
def test_crop_drops_no_more_than_nanochats_loader_does_and_little_more_than_it_must(
    T, median, spread
):
    """Regression: if few documents were short, rows ended with half of a document that the next row
    needed. No packer can keep the tokens after the first T + 1 of a document."""
    rng = np.random.default_rng(T + median)
    lengths = (rng.lognormal(np.log(median), spread, 25_000).astype(int) + 30).tolist()
    drive = Drive(BestFit(T), lengths, 128)
    rows = sum(1 for _ in itertools.takewhile(lambda _: drive.pushed < len(lengths), drive)) + 1
    waiting = [piece.length for piece in drive.packer.waiting().values()]
    ours, theirs = dropped(sum(lengths), rows, T, waiting), dropped_by_nanochat(T, lengths)
    floor = sum(max(0, length - (T + 1)) for length in lengths) / sum(lengths)
    assert theirs > 0.05, "the case: documents longer than a row"
    assert ours <= theirs + 0.002 and (spread < 1 or ours < floor + 0.005)


# ---- the order of lengths ------------------------------------------------------------------------


@pytest.mark.parametrize("T, median", [(512, 330), (2048, 400)])
@pytest.mark.parametrize("split", [False, True])
def test_every_tenth_of_the_rows_holds_long_and_short_documents_and_all_pieces_wait_their_turn(
    T, median, split
):
    lengths = (
        np.random.default_rng(T).lognormal(np.log(median), 1.1, 60_000).astype(int) + 2
    ).tolist()
    packer = BestFit(T, split=split, overlap=64)
    drive, num_rows = Drive(packer, lengths, 128), 8_000
    tokens = []
    came = []
    waits = []
    continued = []
    for i, placements in zip(range(num_rows), drive):
        came += [i] * (drive.pushed - len(came))
        for key, start, length, _ in placements:
            tokens.append((i * 10 // num_rows, lengths[key] > T + 1, length))
            waits.append(i - came[key])
            if start:
                continued.append(waits[-1])
            came[key] = i  # its rest arrives again
    tenth, is_long, length = np.array(tokens).T
    shares = np.bincount(tenth, is_long * length) / np.bincount(tenth, length)
    if split:
        filled_by_short = 128 * np.mean([n for n in lengths if n <= T]) // (T + 1)  # rows
        assert shares.min() > 0.1 and shares.max() < 0.95 and max(waits) < 512
        assert len(continued) > 500 and min(continued) >= filled_by_short / 2
    else:
        fits = np.minimum(lengths, T + 1)
        expected = fits[np.array(lengths) > T + 1].sum() / fits.sum()
        assert 0.15 < expected < 0.75, "the case: both kinds are common"
        assert np.abs(shares - expected).max() < 0.05 and max(waits) < 300
