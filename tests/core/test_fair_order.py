"""Fair order: in any 100 steps, the rows are a fair sample of the epoch by the lengths of
documents. The mix of buckets and the permutation of groups are exact:
tests/spec/test_curriculum.py and tests/spec/test_order.py.

Chi-square tests at a level of 0.001 each, with fixed seeds. The sample is fair if few documents are
pending compared with those that begin in a window, here 128 and 1,600. The packer chooses which
documents are pending, and at first it holds back those that are neither tiny nor almost as long as
a row."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from nanochat.order import StreamConfig, default_lanes, fed_lanes
from nanochat.packing import BestFit
from nanochat.stream import Stream
from tests.toy import MemorySource

LEVEL = 0.001
# steps of V rows
T = 64
V = 8
STEPS = 100
GROUPS, GROUP = 400, 16
EDGES = (8, 20, 40, T + 1)  # of the classes of length, tokens with BOS


def p_value(counts, shares):
    """The probability of counts at least this far from the shares, by Pearson's chi-square."""
    expected = shares / shares.sum() * counts.sum()
    assert expected.min() >= 5, "the test needs at least five of each"
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return float(
        torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2.0), torch.tensor(statistic / 2))
    )


def corpus(seed):
    """Lengths like those of text: log-normal with a heavy tail. Half of the documents are shorter
    than 25 tokens, and one in six fills a row."""
    rng = np.random.default_rng(seed)

    def document():
        return np.zeros(int(np.clip(np.exp(rng.normal(3.2, 1.0)), 1, 60 * T)), np.uint32)

    return MemorySource([[document() for _ in range(GROUP)] for _ in range(GROUPS)])


def windows(source, long_docs):
    """The rows of each 100 steps of the first epoch, in windows that overlap by half."""
    config = StreamConfig(T=T, V=V, seed=0, long_docs=long_docs, overlap=8, buffer_size=16)
    stream, halves = Stream(config, {"web": source}, range(V), tokenizer="", num_threads=0), []
    while all(feed.epoch == 0 for feed in stream.feeds["web"].values()):
        halves.append([row for _ in range(STEPS // 2) for row in stream.next_rows(1)])
    return [a + b for a, b in pairwise(halves[:-1])]


def classes(lengths):
    return np.bincount(np.searchsorted(EDGES, lengths, side="right"), minlength=len(EDGES) + 1)


@pytest.mark.parametrize("long_docs", ["crop", "split"])
def test_a_window_has_the_lengths_of_the_epoch(long_docs):
    source = corpus(0)
    found = windows(source, long_docs)
    epoch = classes([1 + len(document) for group in source.documents for document in group])
    assert len(found) >= 2
    for rows in found:
        begun = [
            (group, number)
            for of_row in rows
            for (_, group, number), start, *_ in of_row.placed
            if start == 0
        ]
        lengths = np.array([1 + len(source.documents[group][number]) for group, number in begun])
        assert p_value(classes(lengths), epoch) > LEVEL
        half_of_tiny = np.flatnonzero(lengths <= 8)[::2]
        assert p_value(classes(np.delete(lengths, half_of_tiny)), epoch) < LEVEL, (
            "the test would notice a loss"
        )


# ---- a small folder of several kinds -------------------------------------------------------------

BOOK, NOTE, PAGE = range(3)
WINDOW, WINDOWS = 64, 6  # rows of a window; number of windows


def folder(small=True):
    """Sixty books, each a file; one file of notes, several of which fit into a row; one of pages of
    about a row."""
    rng = np.random.default_rng(3)
    pages = rng.lognormal(4.0, 0.5, 400).astype(int)
    lengths = [
        *([n] for n in rng.integers(300, 900, 60)),
        rng.integers(4, 20, 900).tolist(),
        pages.tolist(),
    ]
    kinds = [*[BOOK] * 60, NOTE, PAGE]
    return MemorySource(
        [[np.zeros(n, np.uint32) for n in group] for group in lengths], small=small
    ), kinds


def shares(pieces):
    """(3,): the share of each kind in the tokens of a window, whose pieces are (kind, length)."""
    kinds, lengths = np.array(pieces).T
    return np.bincount(kinds, lengths, minlength=3) / lengths.sum()


def windows_of_lanes(source, kinds, seed, long_docs):
    """(WINDOWS, 3): the shares in windows of the stream's rows, 8 lanes."""
    config = StreamConfig(
        T=T, V=V, seed=seed, long_docs=long_docs, overlap=8, buffer_size=16, unit_size=8
    )
    stream = Stream(config, {"mixed": source}, range(V), tokenizer="", num_threads=0)
    found = [
        shares(
            [
                (kinds[group], length)
                for row in stream.next_rows(WINDOW // V)
                for (_, group, _), _, length, _ in row.placed
            ]
        )
        for _ in range(WINDOWS)
    ]
    assert all(feed.epoch == 0 for feed in stream.feeds["mixed"].values()), "the case: one epoch"
    return found


def windows_of_shuffled_documents(source, kinds, seed, long_docs):
    """The same by brute force: documents in uniformly random order, dealt to the packers of the
    lanes like cards."""
    rng = np.random.default_rng(seed)
    documents = [(kinds[g], 1 + len(d)) for g, group in enumerate(source.documents) for d in group]
    deck = rng.permutation(len(documents)).tolist()
    lanes = [
        (BestFit(T, split=long_docs == "split", overlap=8), deck[lane::V]) for lane in range(V)
    ]
    found = []
    for _ in range(WINDOWS):
        pieces = []
        for packer, hand in lanes:
            for _ in range(WINDOW // V):
                while packer.wants(min(16, 2 * packer.num_rows)) and hand:
                    packer.push(hand[-1], documents[hand.pop()][1])
                pieces += [(documents[key][0], length) for key, _, length, _ in packer.next_row()]
        found.append(shares(pieces))
    return found


def misfits(small, long_docs):
    """The deviation of the stream's windows from brute force, in standard deviations: (maximum,
    mean)."""
    source, kinds = folder(small)
    expected = np.stack(
        [windows_of_shuffled_documents(source, kinds, s, long_docs) for s in range(40)]
    )
    found = np.stack([windows_of_lanes(source, kinds, s, long_docs) for s in range(5)])
    sigma = expected.std(0)
    return np.abs((found - expected.mean(0)) / sigma).max(), np.abs(
        (found.mean(0) - expected.mean(0)) / sigma
    ).mean()


@pytest.mark.parametrize("long_docs", ["crop", "split"])
def test_every_window_of_a_small_mixed_folder_has_the_mix_of_shuffled_documents(long_docs):
    """Regression: lanes received equal numbers of units, where a unit was one book or eight notes,
    and groups were shuffled instead of documents. So books were half of the first rows, but a sixth
    of the text."""
    largest, average = misfits(True, long_docs)
    assert largest < 4.5 and average < 0.7  # of 90 draws; a mean of 5 draws has 0.36


def test_the_same_folder_shuffled_by_files_fails_the_test():
    largest, average = misfits(False, "split")
    assert largest > 4.5 and average > 0.7


# ---- how many lanes ------------------------------------------------------------------------------


def test_with_the_default_lanes_at_most_a_tenth_of_a_share_is_pending():
    rng = np.random.default_rng(0)
    source = MemorySource(
        [
            [np.zeros(n, np.uint32) for n in rng.exponential(60, 1000).astype(int)]
            for _ in range(40)
        ],
        small=True,
    )
    V = default_lanes(
        64, fed=fed_lanes(source.groups, source.means, T=T, buffer_size=16, unit_size=8)
    )
    assert V == 64
    config = StreamConfig(T=T, V=V, buffer_size=16, unit_size=8)
    stream = Stream(config, {"web": source}, range(V), tokenizer="", num_threads=0)
    for _ in range(40):
        stream.next_rows(1)
        for feed in stream.feeds["web"].values():
            assert 10 * len(feed.documents) <= len(feed.share)
