"""The order of an epoch is a pure function of the data's sizes, the seed and the lanes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat.common import block, permutation, words
from nanochat.order import StreamConfig, default_lanes, fed_lanes, open_order
from nanochat.stream import Stream
from tests.toy import BOS, MemorySource, fixed_source, row_arrays, stream_config

# ---- which documents -----------------------------------------------------------------------------


def epoch_in_units(source, epoch, V, size, seed, small):
    """An epoch's sequence as [(tokens, documents)] of its units, from the head of nanochat/order.py
    alone."""
    units = []
    if small:
        everything = [
            (g, document) for g, group in enumerate(source.documents) for document in group
        ]
        return [
            (int(source.means[g]), [document])
            for g, document in (
                everything[i] for i in permutation(len(everything), seed, "b", epoch).tolist()
            )
        ]
    for g in permutation(len(source.groups), seed, "b", epoch).tolist():
        drawn = words(len(source.documents[g]), seed, "b", epoch, g).tolist()
        group = source.documents[g]
        for begin in range(0, len(group), size):
            numbers = sorted(range(begin, min(begin + size, len(group))), key=drawn.__getitem__)
            units.append(
                (int(source.means[g]) * len(numbers), [group[number] for number in numbers])
            )
    return units


@pytest.mark.parametrize("small", [False, True])
def test_concat_is_the_lanes_share_of_each_epoch_back_to_back(small):
    V, source = 2, MemorySource(fixed_source().documents, small=small)
    config = stream_config("concat", T=16, V=V, seed=5, unit_size=2)
    order = open_order(source, bucket="b", config=config)
    assert set(order.sizes.tolist()) == {1 if small else 2} and order.batch == 1
    for lane in range(V):
        expected = []
        for epoch in range(3):
            units, share = epoch_in_units(source, epoch, V, 2, 5, small), (lane + epoch) % V
            total, before = sum(tokens for tokens, _ in units), 0
            for tokens, documents in units:
                # where the unit's middle lies
                if (2 * before + tokens) * V // (2 * total) == share:
                    expected += [
                        token for document in documents for token in [BOS, *document.tolist()]
                    ]
                before += tokens
        stream = Stream(config, {"b": source}, [lane], tokenizer="t", num_threads=0)
        found = [
            row_arrays(row, 16)[0].tolist() for row in stream.next_rows((len(expected) - 1) // 16)
        ]
        assert len(found) > 10 and found == [
            expected[i * 16 : i * 16 + 17] for i in range(len(found))
        ]


# ---- blocks and permutations ---------------------------------------------------------------------


@given(st.integers(1, 200), st.integers(1, 64))
def test_law_blocks_cover_the_lanes_exactly_and_in_order(V, m):
    blocks = [block(j, m, V) for j in range(m)]
    assert [lane for lanes in blocks for lane in lanes] == list(range(V))
    assert {len(lanes) for lanes in blocks} <= {V // m, -(-V // m)}
    assert [b.start for b in blocks] == [j * V // m for j in range(m)]


def test_golden_permutations_never_change():
    assert permutation(10, 0, "data", 0).tolist() == [9, 6, 8, 5, 3, 7, 1, 0, 2, 4]
    assert permutation(12, 42, "web", 3, 7, 1).tolist() == [3, 2, 0, 7, 1, 4, 6, 9, 11, 5, 10, 8]
    assert permutation(0, 1).tolist() == [] and permutation(1, 1).tolist() == [0]
    assert sorted(permutation(1000, "x").tolist()) == list(range(1000))
    assert permutation(50, 0, "a").tolist() != permutation(50, 0, "b").tolist()


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"T": 0},
        {"V": 0},
        {"buffer_size": 0},
        {"unit_size": 0},
        {"layout": "pile"},
        {"long_docs": "burn"},
        {"long_docs": "split", "overlap": 15},
        {"long_docs": "split", "overlap": -1},
        {"packer_version": 0},
    ],
)
def test_a_configuration_that_cannot_work_is_refused(change):
    with pytest.raises(ValueError, match=r"got|packer version"):
        StreamConfig(**{"T": 16, **change})


# ---- how many lanes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "documents, mean, lanes",
    [
        (6_400, 700, 8),  # little data: never fewer than 8
        (100_000, 100, 32),
        (1_000_000, 100, 64),
        (1_000_000, 20_000, 64),
        (20_000, 20_000, 8),
    ],
)
def test_default_lanes_follow_from_the_data(documents, mean, lanes):
    fed = fed_lanes(np.full(10, documents // 10), np.full(10, mean), T=512)
    assert default_lanes(256, fed=fed) == lanes


@pytest.mark.parametrize(
    "R, fed, W, V",
    [
        # up to 64
        *((R, 64, 1, V) for R, V in ((1, 1), (64, 64), (128, 64), (96, 48), (127, 1), (130, 26))),
        (64, 100, 1, 64),
        (64, 20, 1, 16),
        (64, 0, 1, 8),
        (64, 0, 16, 16),
        (60, 0, 1, 10),
        (60, 12, 1, 12),
        (4, 0, 1, 4),
        (7, 3, 1, 7),
        (500, 64, 1, 50),
        (64, 9, 12, 16),
    ],
)
def test_default_lanes_divide_the_rows_and_little_data_gives_at_least_eight_or_one_per_process(
    R, fed, W, V
):
    assert default_lanes(R, fed=fed, world_size=W) == V


# ---- what a source may fetch ahead ---------------------------------------------------------------


@pytest.mark.parametrize("small", [False, True])
def test_the_groups_ahead_of_a_place_are_those_of_the_units_after_it(small):
    source = MemorySource(fixed_source().documents, small=small)
    order = open_order(
        source, bucket="b", config=stream_config("concat", T=16, V=2, seed=5, unit_size=2)
    )
    share = order.share(0, 1)
    assert len(share) > 8
    place = share.start
    while place < share.stop:
        told = order.groups_ahead(1, place, share.stop, 2)
        coming = {}
        at = place
        while at < share.stop and len(coming) < 2:
            unit = order.unit(1, at, share.stop)
            coming.update(dict.fromkeys(unit.groups.tolist()))
            at += len(unit.numbers)
        assert told == list(coming)
        place = order.unit_end(1, place, share.stop)
