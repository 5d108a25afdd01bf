"""What the order of the data promises: whatever 100 steps one looks at, their rows are a fair sample of the epoch, by
the lengths of documents. That buckets come as their weights say, and groups of all files in a permutation, is exact:
tests/test_curriculum.py and tests/test_stream.py.

Chi-square tests at a level of 0.001 each, with fixed seeds. The sample is fair where few documents wait beside those
that a window begins, here 128 beside 1,600: which ones wait is the packer's choice, and at first it keeps back those
that are neither tiny nor nearly as long as a row."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from nanochat.order import StreamConfig
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
