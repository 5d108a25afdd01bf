"""What the order of the data promises: whatever 100 steps one looks at, their rows are a fair sample of the epoch, by
the lengths of documents. That buckets come as their weights say, and groups of all files in a permutation, is exact:
tests/test_curriculum.py and tests/test_stream.py.

Chi-square tests at a level of 0.001 each, with fixed seeds. The sample is fair where few documents wait beside those
that a window begins, here 128 beside 1,600: which ones wait is the packer's choice, and at first it keeps back those
that are neither tiny nor nearly as long as a row."""

from collections import Counter
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from nanochat.order import StreamConfig, default_lanes, fed_lanes
from nanochat.packing import BestFit
from nanochat.stream import Stream
from tests.toy import MemorySource

LEVEL = 0.001
T, V, STEPS = 64, 8, 100  # steps of V rows
GROUPS, GROUP = 400, 16
EDGES = (8, 20, 40, T + 1)  # of the classes of length, tokens with BOS


def p_value(counts, shares):
    """How likely counts at least so far from these shares are, by Pearson's chi-square."""
    expected = shares / shares.sum() * counts.sum()
    assert expected.min() >= 5, "the test wants at least five of each"
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2.0), torch.tensor(statistic / 2)))


def corpus(seed):
    """Lengths as of text: log-normal with a heavy tail. Half of the documents are shorter than 25 tokens, one in six
    fills a row."""
    rng = np.random.default_rng(seed)
    def document():
        return np.zeros(int(np.clip(np.exp(rng.normal(3.2, 1.0)), 1, 60 * T)), np.uint32)
    return MemorySource([[document() for _ in range(GROUP)] for _ in range(GROUPS)])


@cache
def windows(seed, long_docs):
    """The rows of each 100 steps, as far as they go in the first epoch."""
    source = corpus(seed)
    config = StreamConfig(T=T, V=V, seed=seed, long_docs=long_docs, overlap=8, buffer_size=16)
    stream, found = Stream(config, {"web": source}, range(V), tokenizer="", num_threads=0), []
    while all(feed.epoch == 0 for feed in stream.feeds["web"].values()):
        found.append([row for _ in range(STEPS // 2) for row in stream.next_rows(1)])
    halves = found[:-1]
    return source, [a + b for a, b in pairwise(halves)]  # windows that overlap by half


def begun(rows):
    """(group, row of the group) of each document that begins in these rows."""
    return [(group, row) for of_row in rows for (_, group, row), start, *_ in of_row.placed if start == 0]


def classes(lengths):
    return np.bincount(np.searchsorted(EDGES, lengths, side="right"), minlength=len(EDGES) + 1)


def all_lengths(source):
    return np.array([1 + len(document) for group in source.documents for document in group])


@pytest.mark.parametrize("long_docs", ["crop", "split"])
def test_a_window_has_documents_of_all_lengths_as_the_epoch_has(long_docs):
    source, found = windows(0, long_docs)
    assert len(found) >= 2
    for rows in found:
        lengths = np.array([1 + len(source.documents[group][row]) for group, row in begun(rows)])
        assert p_value(classes(lengths), classes(all_lengths(source))) > LEVEL


def test_a_packer_that_loses_half_of_the_tiny_ones_is_seen(monkeypatch):
    push = BestFit.push

    def dropping(self, key, length, *rest):
        if length > 8 or hash(key) % 2:
            push(self, key, length, *rest)

    monkeypatch.setattr(BestFit, "push", dropping)
    windows.cache_clear()
    with pytest.raises(AssertionError):
        test_a_window_has_documents_of_all_lengths_as_the_epoch_has("crop")
    windows.cache_clear()


# ---- a small folder of several kinds --------------------------------------------------------------------------------

KINDS = ("book", "note", "page")
WINDOW, WINDOWS = 64, 6  # rows of a window; windows that are looked at


def folder(small=True):
    """Sixty books, each a file; one file of notes, of which a row holds several; one of pages, about a row each."""
    rng = np.random.default_rng(3)
    pages = rng.lognormal(4.0, 0.5, 400).astype(int)
    lengths = [*([n] for n in rng.integers(300, 900, 60)), rng.integers(4, 20, 900).tolist(), pages.tolist()]
    kinds = [*["book"] * 60, "note", "page"]
    return MemorySource([[np.zeros(n, np.uint32) for n in group] for group in lengths], small=small), kinds


def shares(windows):
    """(windows, kinds): the share of a window's tokens that is of each kind."""
    counts = np.array([[window[kind] for kind in KINDS] for window in windows], float)
    return counts / counts.sum(1, keepdims=True)


def windows_of_lanes(source, kinds, seed, long_docs):
    """The tokens of each kind in windows of the stream's rows, 8 lanes."""
    config = StreamConfig(T=T, V=V, seed=seed, long_docs=long_docs, overlap=8, buffer_size=16, unit_size=8)
    stream = Stream(config, {"mixed": source}, range(V), tokenizer="", num_threads=0)
    found = []
    for _ in range(WINDOWS):
        window = Counter()
        for row in stream.next_rows(WINDOW // V):
            for (_, group, _), _, length, _ in row.placed:
                window[kinds[group]] += length
        found.append(window)
    assert all(feed.epoch == 0 for feed in stream.feeds["mixed"].values()), "the case: one epoch"
    return found


def windows_of_shuffled_documents(source, kinds, seed, long_docs):
    """The same by brute force: documents in uniformly random order, dealt like cards to lanes of the same packer."""
    rng = np.random.default_rng(seed)
    documents = [(kinds[g], 1 + len(d)) for g, group in enumerate(source.documents) for d in group]
    deck = rng.permutation(len(documents)).tolist()
    lanes = [(BestFit(T, split=long_docs == "split", overlap=8), deck[lane::V]) for lane in range(V)]
    found = []
    for _ in range(WINDOWS):
        window = Counter()
        for packer, hand in lanes:
            for _ in range(WINDOW // V):
                while packer.wants(min(16, 2 * packer.row)) and hand:
                    packer.push(hand[-1], documents[hand.pop()][1])
                for key, _, length, _ in packer.next_row():
                    window[documents[key][0]] += length
        found.append(window)
    return found


def misfits(small, long_docs):
    """By how many standard deviations windows of the stream are off the brute force: (at most, on average)."""
    source, kinds = folder(small)
    wanted = np.stack([shares(windows_of_shuffled_documents(source, kinds, s, long_docs)) for s in range(40)])
    found = np.stack([shares(windows_of_lanes(source, kinds, s, long_docs)) for s in range(5)])
    sigma = wanted.std(0)
    return np.abs((found - wanted.mean(0)) / sigma).max(), np.abs((found.mean(0) - wanted.mean(0)) / sigma).mean()


@pytest.mark.parametrize("long_docs", ["crop", "split"])
def test_every_window_of_a_small_mixed_folder_has_the_mix_of_shuffled_documents(long_docs):
    """Regression: lanes were dealt equal numbers of units, a unit being one book or eight notes, and groups were
    shuffled, not documents. So books were half of the first rows and a sixth of the text."""
    largest, average = misfits(True, long_docs)
    assert largest < 4.5 and average < 0.7  # of 90 draws; a mean of 5 draws has 0.36


def test_the_same_folder_shuffled_by_files_is_seen():
    largest, average = misfits(False, "split")
    assert largest > 4.5 and average > 0.7


# ---- how many lanes -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("documents, mean, lanes", [
    (6_400, 700, 8),  # little data: never fewer than 8
    (100_000, 100, 32), (1_000_000, 100, 64), (1_000_000, 20_000, 64), (20_000, 20_000, 8)])
def test_default_lanes_follow_from_the_data(documents, mean, lanes):
    fed = fed_lanes(np.full(10, documents // 10), np.full(10, mean), T=512)
    assert default_lanes(256, fed=fed) == lanes


@pytest.mark.parametrize("R, fed, W, V", [
    (64, 100, 1, 64), (64, 20, 1, 16), (64, 0, 1, 8), (64, 0, 16, 16), (60, 0, 1, 10), (60, 12, 1, 12), (4, 0, 1, 4),
    (7, 3, 1, 7), (500, 64, 1, 50), (64, 9, 12, 16)])
def test_little_data_makes_no_fewer_than_eight_lanes_or_than_processes(R, fed, W, V):
    assert default_lanes(R, fed=fed, world_size=W) == V


def test_a_lane_keeps_pending_at_most_a_tenth_of_a_share_of_the_lanes_that_its_data_feeds():
    rng = np.random.default_rng(0)
    source = MemorySource([[np.zeros(n, np.uint32) for n in rng.exponential(60, 1000).astype(int)] for _ in range(40)],
                          small=True)
    V = default_lanes(64, fed=fed_lanes(source.groups, source.means, T=T, buffer_size=16, unit_size=8))
    assert V == 64
    config = StreamConfig(T=T, V=V, buffer_size=16, unit_size=8)
    stream = Stream(config, {"web": source}, range(V), tokenizer="", num_threads=0)
    for _ in range(40):
        stream.next_rows(1)
        for feed in stream.feeds["web"].values():
            assert 10 * len(feed.documents) <= len(feed.share)
