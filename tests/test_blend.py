"""Blends: every index is that of a plain loop; the builder makes what megatron-core's makes; bad blends are named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import sample_index
from nanochat.blend import BlendedDataset, BlendedMegatronDatasetBuilder
from nanochat.megatron import GPTDataset, GPTDatasetConfig, IndexedDatasetBuilder, Split, normalize
from nanochat.sample_index import blend_sources
from tests.toy import examples


def plain_blend(weights: list[float], n: int, limits: list[int] | None = None) -> tuple[list[int], list[int]]:
    """The recurrence, source by source and sample by sample."""
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


def check(found: dict[str, np.ndarray], expected: tuple[list[int], list[int]]) -> None:
    sources, samples = found["dataset_index"], found["dataset_sample_index"]
    assert (sources.tolist(), samples.tolist()) == expected and (sources.dtype, samples.dtype) == (np.int16, np.int64)


WEIGHTS = st.lists(st.floats(0.01, 1) | st.integers(1, 9).map(float), min_size=1, max_size=11)


@settings(max_examples=examples(0.8))
@given(weights=WEIGHTS, n=st.integers(0, 400))
def test_a_blend_is_the_recurrence(weights: list[float], n: int) -> None:
    shares = normalize(weights)
    check(blend_sources(shares, n), plain_blend(shares, n))


@settings(max_examples=examples(0.8))
@given(sizes=st.lists(st.integers(1, 90), min_size=1, max_size=8))
def test_an_exhaustive_blend_gives_all_of_every_source(sizes: list[int]) -> None:
    n = sum(sizes)
    found = blend_sources([size / n for size in sizes], n, sizes)
    check(found, plain_blend([size / n for size in sizes], n, sizes))
    assert np.bincount(found["dataset_index"]).tolist() == sizes


def test_a_source_that_has_given_all_is_out_even_if_its_deficit_is_the_greatest() -> None:
    check(blend_sources([0.9, 0.1], 8, [2, 6]), plain_blend([0.9, 0.1], 8, [2, 6]))


# ---- data sets ------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three pairs of files: 40, 60 and 25 sequences, uint16 and int32."""
    folder, rng = tmp_path_factory.mktemp("pairs"), np.random.default_rng(0)
    for name, n, dtype in (("a", 40, np.uint16), ("b", 60, np.int32), ("c", 25, np.uint16)):
        builder = IndexedDatasetBuilder(folder / f"{name}.bin", dtype=dtype)
        for length in rng.integers(20, 60, n).tolist():
            builder.add_document(rng.integers(0, 99, length), [length])
        builder.finalize(folder / f"{name}.idx")
    return [str(folder / name) for name in "abc"]


def build(blended: Any, sizes: list[int | None], *, split: str | None = "8,1,1", **options: Any) -> list[Any]:
    config = GPTDatasetConfig(random_seed=3, sequence_length=16, blend=blended, split=split, **options)
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


def test_samples_of_a_blend_are_those_of_its_sources(prefixes: list[str]) -> None:
    train, valid, test = build((prefixes, [3.0, 2.0, 1.0]), [500, 10, 4])
    assert [len(d) for d in (train, valid, test)] == [501, 11, 5]
    assert [d.num_samples for d in train.datasets] == [252, 168, 85], "250, 167 and 84, and 1/2 % more"
    assert [d.num_samples for d in valid.datasets] == [6, 5, 3], "5, 4 and 2, and 1/2 % more, rounded up"
    assert train.datasets[0].order.num_epochs > 1 and set(train.dataset_index.tolist()) == {0, 1, 2}
    assert train.counts(501) == np.bincount(train.dataset_index).tolist() and train.counts(1) == [1, 0, 0]
    for i in range(0, 501, 7):
        source, sample = train.locate(i)
        assert (source, sample) == (train.dataset_index[i], train.dataset_sample_index[i])
        ids, live = train.row(i)
        assert (ids == train.datasets[source].row(sample)[0]).all() and live is None and len(ids) == 17
        found = train[i]
        assert found["dataset_id"] == source and found["tokens"].tolist() == ids[:-1].tolist()
    assert train[-1]["tokens"].equal(train[500]["tokens"])
    for i in (-502, 501):
        with pytest.raises(IndexError, match="there are 501"):
            train[i]


def test_what_the_builder_builds(prefixes: list[str]) -> None:
    """One prefix without weights is no blend; lengths are weights where there are none; splits may have no part."""
    assert [type(d) for d in build((prefixes[:1], None), [5, 5, 5])] == [GPTDataset] * 3
    assert [type(d) for d in build((prefixes[:1], [2.0]), [5, 5, 5])] == [BlendedDataset] * 3
    assert [d is None for d in build((prefixes, None), [5, 5, 5], split="9,1")] == [False, False, True]
    every, _, _ = build((prefixes, None), [None] * 3)
    assert every.size is None and len(every) == sum(every.weights) == sum(len(d) for d in every.datasets)
    train, valid, _ = build((prefixes, None), [10, 10**9, 10])
    assert len(train) == 10 and train.weights == normalize([len(d) for d in train.datasets])
    assert len(valid) == valid.size == sum(len(d) for d in valid.datasets)
    config = GPTDatasetConfig(random_seed=3, sequence_length=16, blend=(prefixes, None), split="1")
    assert BlendedMegatronDatasetBuilder(GPTDataset, [1] * 3, lambda: False, config).build() == [None] * 3


def test_each_split_may_have_a_blend_of_its_own(prefixes: list[str]) -> None:
    blends = [(prefixes[:2], [1.0, 1.0]), (prefixes[2:], [4.0]), None]
    train, valid, test = build(None, [20, 7, None], split=None, blend_per_split=blends)
    assert isinstance(train, BlendedDataset) and isinstance(valid, GPTDataset) and test is None
    assert valid.indices == range(25) and valid.index_split is Split.valid
    blends = [None, (prefixes, None), None]
    none, several, _ = build(None, [5, None, None], split=None, blend_per_split=blends, multiple_validation_sets=True)
    assert none is None and [len(d.indices) for d in several] == [40, 60, 25]


def test_equal_data_sets_have_equal_identities(prefixes: list[str]) -> None:
    one, other, longer = (build((prefixes, [3.0, 2.0, 1.0]), [n, 10, 4])[0].identity() for n in (500, 500, 600))
    assert one == other != longer


def test_large_indices_are_kept_in_the_cache(prefixes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                             ) -> None:
    plain = build((prefixes, [3.0, 2.0, 1.0]), [500, 10, 4])[0]
    monkeypatch.setattr(sample_index, "WORTH_STORING", 400)
    for _ in range(2):
        kept = build((prefixes, [3.0, 2.0, 1.0]), [500, 10, 4], path_to_cache=str(tmp_path))[0]
        assert isinstance(kept.dataset_index, np.memmap) and (kept.dataset_index == plain.dataset_index).all()
    (seal,) = tmp_path.glob("*.json")
    assert seal.name.endswith("-BlendedDataset-train.json") and len(list(tmp_path.iterdir())) == 3
    build((prefixes, [3.0, 2.0, 1.1]), [500, 10, 4], path_to_cache=str(tmp_path))
    assert len(list(tmp_path.glob("*.json"))) == 2, "other weights are another table"


# ---- bad input ------------------------------------------------------------------------------------------------------

def test_bad_blends_are_one_sentence(prefixes: list[str]) -> None:
    for sizes in ([1, 2], [1, -2, 3]):
        with pytest.raises(ValueError, match=r"sizes: got \["):
            build((prefixes, None), sizes)
    with pytest.raises(ValueError, match="weights and no number of samples for split train"):
        build((prefixes, [1.0] * 3), [None, 1, 1])
    with pytest.raises(ValueError, match=r"weights .* for 3 prefixes"):
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
        BlendedDataset(sources[:1] * 40_000, [1.0] * 40_000, 1, config)
