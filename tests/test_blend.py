"""Blends: every index is that of a plain loop, wherever one looks first; nothing of the size of the run is made."""

import tracemalloc
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import blend
from nanochat.blend import BlendedDataset, BlendedMegatronDatasetBuilder, Mixture
from nanochat.indexed import IndexedDatasetBuilder
from nanochat.megatron import GPTDataset, GPTDatasetConfig, Split, normalize
from tests.toy import examples

SMALL = {"BLOCK": 64, "STEPS": 8, "JUMP": 256, "SCAN": 16}


def small(**changes: int) -> Any:
    """Blocks, lanes and jumps so small that some hundred samples have all of them."""
    return patch.multiple(blend, **{**SMALL, **changes})


def plain_blend(weights: list[float], n: int, limits: list[int] | None = None) -> tuple[list[int], list[int]]:
    """The recurrence, sample by sample."""
    counts, sources, samples = [0] * len(weights), [], []
    for i in range(n):
        best, chosen = -float("inf"), -1
        for j, weight in enumerate(weights):
            deficit = weight * max(i, 1) - counts[j]
            if (limits is None or counts[j] < limits[j]) and deficit > best:
                best, chosen = deficit, j
        sources.append(chosen)
        samples.append(counts[chosen])
        counts[chosen] += 1
    return sources, samples


def check(mixture: Mixture, expected: tuple[list[int], list[int]], looks: list[int], n: int) -> None:
    """Looks at single places in any order, then at all."""
    for i in looks:
        (source,), (sample,) = mixture.at(i, i + 1)
        assert (source, sample) == (expected[0][i], expected[1][i])
    for first in (0, n // 3):
        sources, samples = mixture.at(first, n)
        assert sources.tolist() == expected[0][first:] and samples.tolist() == expected[1][first:]
    assert (sources.dtype, samples.dtype) == (np.int16, np.int64)
    for i in (*looks, n):
        assert mixture.counts(i).tolist() == np.bincount(expected[0][:i], minlength=len(mixture.weights)).tolist()


WEIGHTS = st.lists(st.floats(0.01, 1) | st.integers(1, 9).map(float), min_size=1, max_size=11)


@settings(max_examples=examples(0.8))
@given(weights=WEIGHTS, looks=st.lists(st.integers(0, 699), max_size=5))
def test_blend_is_the_recurrence(weights: list[float], looks: list[int]) -> None:
    weights = normalize(weights)
    with small():
        check(Mixture(weights, 700), plain_blend(weights, 700), looks, 700)


@settings(max_examples=examples(0.8))
@given(sizes=st.lists(st.integers(1, 90), min_size=1, max_size=8), data=st.data())
def test_exhaustive_blend_gives_all_of_every_source(sizes: list[int], data: st.DataObject) -> None:
    n = sum(sizes)
    weights = [size / n for size in sizes]
    looks = data.draw(st.lists(st.integers(0, n - 1), max_size=5))
    with small():
        mixture = Mixture(weights, n, sizes)
        check(mixture, plain_blend(weights, n, sizes), looks, n)
        assert mixture.counts(n).tolist() == sizes


def test_a_source_that_has_given_all_is_out() -> None:
    """Even if its deficit were the greatest, as rounding may have it after 10^15 samples."""
    sources, counts = Mixture([0.9, 0.1], 10, [5, 5])._lanes(np.array([[5, 3]]), np.array([8]), 2)
    assert sources.tolist() == [[1, 1]] and counts.tolist() == [[5, 5]]


@settings(max_examples=examples(0.4))
@given(weights=WEIGHTS.filter(lambda w: len(w) > 2), seed=st.integers(0, 99))
def test_a_guess_may_be_anything(weights: list[float], seed: int) -> None:
    """Whatever the first counts of lanes are guessed to be, the result is exact."""
    weights, rng = normalize(weights), np.random.default_rng(seed)
    with small(), patch.object(Mixture, "_guess", lambda self, times: rng.integers(0, 99, (len(times), len(weights)))):
        assert Mixture(weights, 300).at(0, 300)[0].tolist() == plain_blend(weights, 300)[0]


@pytest.mark.parametrize("k", [2, 3, 5, 7])
def test_far_samples_cost_nothing_with_few_sources(k: int) -> None:
    """Sample 10^9 is reached from a state that is known for certain, within two blocks before it; and the states found
    so, from different sides, agree."""
    weights = normalize((np.random.default_rng(k).random(k) + 0.1).tolist())
    mixture, ran = Mixture(weights, 2 * 10**9), []
    with patch.object(Mixture, "_run", lambda self, counts, start, n, run=Mixture._run:
                      (ran.append(n), run(self, counts, start, n))[1]):
        sources, samples = mixture.at(10**9, 10**9 + 5000)
    assert sum(ran) < 2 * blend.BLOCK
    start = 10**9 - 10**9 % blend.BLOCK
    at, counts = mixture._nearest(start - 1)
    assert 0 < at < start
    sources_before = mixture._run(counts, at, 10**9 - at)
    expected = counts + np.bincount(sources_before, minlength=k)
    assert samples[sources == 0][0] == expected[0] and mixture.counts(10**9).tolist() == expected.tolist()
    assert (abs(expected - np.array(weights) * 1e9) < k).all()


def test_known_states_are_states_of_the_recurrence() -> None:
    """Where the bounds add up to i, they are the counts; that happens for all of these weights."""
    for weights in ([0.7, 0.3], [0.5, 0.25, 0.25], normalize([3, 5, 7, 11]), normalize([0.1, 0.21, 0.33, 0.47])):
        sources = np.array(plain_blend(weights, 3000)[0])
        counts = np.cumsum(sources[:, None] == np.arange(len(weights)), axis=0)
        places = np.arange(1, 3001)
        bounds = Mixture(weights, 3000).bounds(places)
        hits = np.flatnonzero(bounds.sum(axis=0) == places)
        assert len(hits) > 50 and (counts <= bounds.T).all()
        assert (counts[hits] == bounds[:, hits].T).all()


# ---- data sets ------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three pairs of files: 40, 60 and 25 sequences, uint16 and int32."""
    folder, rng = tmp_path_factory.mktemp("pairs"), np.random.default_rng(0)
    for name, n, dtype in (("a", 40, np.uint16), ("b", 60, np.int32), ("c", 25, np.uint16)):
        builder = IndexedDatasetBuilder(folder / f"{name}.bin", dtype=dtype)
        lengths = rng.integers(20, 60, n)
        builder.add_documents(rng.integers(0, 99, lengths.sum()).astype(dtype), lengths)
        builder.finalize(folder / f"{name}.idx")
    return [str(folder / name) for name in "abc"]


def build(blended: Any, sizes: list[int | None], *, split: str | None = "8,1,1", **options: Any) -> list[Any]:
    config = GPTDatasetConfig(random_seed=3, sequence_length=16, blend=blended, split=split, **options)
    return [*BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()]


def test_rows_of_a_blend_are_the_rows_of_its_sources(prefixes: list[str]) -> None:
    train, valid, test = build((prefixes, [3.0, 2.0, 1.0]), [500, 10, 4])
    assert [len(d) for d in (train, valid, test)] == [501, 11, 5]
    assert [d.num_samples for d in train.datasets] == [252, 168, 85], "250, 167 and 84, and 1/2 % more"
    assert [d.num_samples for d in valid.datasets] == [6, 5, 3], "5, 4 and 2, and 1/2 % more, rounded up"
    assert train.datasets[0].order.num_epochs > 1 and train.dtype == np.int32
    with small():
        ids, live = train.rows(7, 300)
        sources, samples = train.dataset_index[7:300], train.dataset_sample_index[7:300]
    assert ids.dtype == np.int32 and ids.shape == (293, 17) and live is None and set(sources.tolist()) == {0, 1, 2}
    for row, source, sample in zip(ids, sources.tolist(), samples.tolist()):
        assert (row == train.datasets[source].rows(sample, sample + 1)[0]).all()
    found = train[7]
    assert found["dataset_id"] == sources[0] and found["tokens"].tolist() == ids[0, :-1].tolist()
    assert train[-1]["tokens"].equal(train[500]["tokens"]) and train.rows(4, 4)[0].shape == (0, 17)
    for i in (-502, 501):
        with pytest.raises(IndexError, match="there are 501"):
            train[i]


def test_rows_of_a_blend_keep_the_masks_of_their_sources(prefixes: list[str]) -> None:
    train, *_ = build((prefixes, None), [None] * 3, add_extra_token_to_sequence=False)
    ids, live = train.rows(0, len(train))
    assert live is not None and live[:, :-1].all() and not live[:, -1].any() and not ids[:, -1].any()
    assert len(train) == sum(train.weights) == sum(len(d) for d in train.datasets) and train.size is None
    assert np.bincount(np.asarray(train.dataset_index)).tolist() == train.weights


def test_what_the_builder_builds(prefixes: list[str]) -> None:
    """One prefix without weights is no blend; lengths are weights where there are none; splits may have no part."""
    assert [type(d) for d in build((prefixes[:1], None), [5, 5, 5])] == [GPTDataset] * 3
    assert [type(d) for d in build((prefixes[:1], [2.0]), [5, 5, 5])] == [BlendedDataset] * 3
    assert [d is None for d in build((prefixes, None), [5, 5, 5], split="9,1")] == [False, False, True]
    train, _, _ = build((prefixes, None), [10, 10**9, 10])
    assert len(train) == 10 and train.weights == normalize([len(d) for d in train.datasets])
    _, valid, _ = build((prefixes, None), [10, 10**9, 10])
    assert len(valid) == valid.size == sum(len(d) for d in valid.datasets)
    train, valid, test = build(None, [20, 7, None], split=None, blend_per_split=[
        (prefixes[:2], [1.0, 1.0]), (prefixes[2:], [4.0]), None])
    assert isinstance(train, BlendedDataset) and isinstance(valid, GPTDataset) and test is None
    assert valid.indices == range(25) and valid.index_split is Split.valid
    config = GPTDatasetConfig(random_seed=3, sequence_length=16, blend=(prefixes, None), split="1")
    assert BlendedMegatronDatasetBuilder(GPTDataset, [1] * 3, lambda: False, config).build() == [None] * 3


def test_equal_data_sets_have_equal_identities(prefixes: list[str]) -> None:
    one, other, longer = (build((prefixes, [3.0, 2.0, 1.0]), [n, 10, 4])[0].identity() for n in (500, 500, 600))
    assert one == other != longer


def test_a_run_of_any_size_is_built_at_once(prefixes: list[str]) -> None:
    """A blend of 4 * 10^9 samples: neither index is made. (Its sources are stand-ins: their shuffles would be.)"""
    sources = build((prefixes, None), [None] * 3, split="1")[0].datasets
    config = sources[0].config
    tracemalloc.start()
    with patch.object(GPTDataset, "__len__", lambda self: 2 * 10**9):
        blended = BlendedDataset(sources, [2, 1, 1], 4 * 10**9, config)
        assert sorted(blended.dataset_sample_index[-4 + 4 * 10**9:].tolist()) == [
            10**9 - 1, 10**9 - 1, 2 * 10**9 - 2, 2 * 10**9 - 1]
        total = [blended._mixture.counts(4 * 10**9).tolist(), len(blended)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == [[2 * 10**9, 10**9, 10**9], 4 * 10**9] and peak < 50_000_000


# ---- bad input ------------------------------------------------------------------------------------------------------

def test_bad_blends_are_one_sentence(prefixes: list[str]) -> None:
    with pytest.raises(ValueError, match=r"sizes: got \[1, 2\]"):
        build((prefixes, None), [1, 2])
    with pytest.raises(ValueError, match="sizes: got"):
        build((prefixes, None), [1, -2, 3])
    with pytest.raises(ValueError, match="weights and no number of samples for split train"):
        build((prefixes, [1.0] * 3), [None, 1, 1])
    with pytest.raises(ValueError, match="3 prefixes and 2 weights"):
        build((prefixes, [1.0] * 2), [1, 1, 1])
    with pytest.raises(ValueError, match=r"/b has no sample of 16 tokens in split valid; leave it out"):
        build((prefixes, None), [None] * 3, split="98,1,1")
    sources = build((prefixes, None), [None] * 3)[0].datasets
    config = sources[0].config
    for weights, size in (([1, 0, 1], 5), ([1, 1], 5), ([1, -1, 1], 5), ([0.5, 0.25, 0.25], None)):
        with pytest.raises(ValueError, match="blend: got"):
            BlendedDataset(sources, weights, size, config)
    with pytest.raises(ValueError, match=r"takes [\d,]+ samples of .*/a, which has [\d,]+; raise mid_level"):
        BlendedDataset(sources, [98, 1, 1], 1000, config)
    assert len(BlendedDataset(sources, [1, 1, 1], 60, config)) == 60
    with pytest.raises(ValueError, match="at most 32,766"):
        Mixture([1.0] * 40_000, 1)
