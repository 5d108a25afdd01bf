"""Single cases of the stream: which documents a lane reads, the contents of a row, refused cursors,
and golden digests. The laws are in tests/core/test_stream_laws.py."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat.common import block, permutation, words
from nanochat.curriculum import Curriculum, Phase
from nanochat.order import StreamConfig, open_order
from nanochat.rows import Packed, Row
from nanochat.stream import Stream, carry_on, stream_identity
from tests.toy import BOS, MemorySource, Ranks, digest_of_row, fixed_source, json_copy, row_arrays

LAYOUTS = ("crop", "split", "concat")


def make_config(layout, **kwargs):
    if layout == "concat":
        return StreamConfig(layout="concat", **kwargs)
    return StreamConfig(long_docs=layout, **kwargs)


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
            rows = sorted(range(begin, min(begin + size, len(group))), key=drawn.__getitem__)
            units.append((int(source.means[g]) * len(rows), [group[row] for row in rows]))
    return units


@pytest.mark.parametrize("small", [False, True])
def test_concat_is_the_lanes_share_of_each_epoch_back_to_back(small):
    V, source = 2, MemorySource(fixed_source().documents, small=small)
    config = make_config("concat", T=16, V=V, seed=5, unit_size=2)
    order = open_order(source.groups, source.means, small=small, bucket="b", config=config)
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


# ---- blocks, permutations, digests ---------------------------------------------------------------


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


@given(
    st.integers(0, 2**20),
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 1)), min_size=2),
)
def test_law_row_digest_has_the_documented_bytes(index, pairs):
    tokens, live = (np.array(column) for column in zip(*pairs))
    expected = digest_of_row(index, tokens, live[1:])
    for ids in (tokens.astype(np.uint32), tokens):
        row = Row(0, 0, "b", ids, live.astype(np.uint8), [])
        assert row.digest(index) == expected != row.digest(index + 1)
    whole = Row(0, 0, "b", tokens, None, [])
    assert whole.digest(index) == digest_of_row(index, tokens, np.ones(len(tokens) - 1, int))


# of the first 8 steps of a large and of a small bucket; other digests would change every run's data
GOLDEN_DIGESTS = {
    "crop": [
        [
            17640452581099693891,
            13022056510885607454,
            8961568582689144106,
            13252514326933720171,
            1065315056351755730,
            16186916647297991176,
            13911598103943274314,
            17888515367825735960,
        ],
        [
            8790499322725866349,
            2982632693881238674,
            2317160913468656068,
            2670492868075792306,
            2266214257180096238,
            14592282076862963582,
            5283705637575169068,
            17755069323532112861,
        ],
    ],
    "split": [
        [
            1938982508398404052,
            7153559207173421763,
            4812360960980367904,
            5548721950734038678,
            17455639854675786007,
            9902064897615927605,
            9298725121332339378,
            17354193080268238446,
        ],
        [
            374363471878338510,
            17174598507668921578,
            13937809394049736,
            3856145901955238972,
            15320649694534238513,
            17184652823937480066,
            18395346066768516540,
            6993059631566560246,
        ],
    ],
    "concat": [
        [
            4333425142024148416,
            4578498086176458199,
            17467183920224637509,
            1746385460433569259,
            9307180561237532256,
            7992014059930855073,
            1126982728120647826,
            11871648463902790907,
        ],
        [
            8855286240414334052,
            15706992071726158473,
            5545224429312218972,
            4147569327027251183,
            1867656151589986223,
            14243534090990899372,
            13651064020788913008,
            11772711698068708,
        ],
    ],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_golden_digests_of_a_fixed_corpus_never_change(layout):
    config = make_config(layout, T=24, V=4, seed=11, overlap=6, buffer_size=6, unit_size=4)
    for small, digests in zip((False, True), GOLDEN_DIGESTS[layout]):
        source = MemorySource(fixed_source(num_groups=8, group_size=21).documents, small=small)
        with Ranks(config, {"data": source}, n=2, W=2) as ranks:
            assert [ranks.step() for _ in range(8)] == digests


# ---- cursors -------------------------------------------------------------------------------------

BASE = make_config("split", T=16, V=4, overlap=5, buffer_size=5, unit_size=4)


def saved():
    """The cursors of BASE after 3 steps."""
    with Ranks(BASE, {"b": fixed_source()}, n=1, W=1) as ranks:
        for _ in range(3):
            ranks.step()
        return json_copy(ranks.cursors())


def resume(cursors, lanes=range(4)):
    return Stream(BASE, {"b": fixed_source()}, lanes, tokenizer="t", cursors=cursors)


@pytest.mark.parametrize(
    "change, other, diff",
    [
        ({"seed": 1}, {}, "seed was 0, now 1"),
        ({"V": 8}, {}, "V was 4, now 8"),
        ({"layout": "concat"}, {}, "layout was bestfit, now concat"),
        ({"max_epochs": 2}, {}, "max_epochs was 0, now 2"),
        ({}, {"fingerprint": "other"}, "data b was fixed, now other"),
        ({}, {"name": "c"}, "data b was fixed, now None"),
        ({}, {"tokenizer": "u"}, "tokenizer was t, now u"),
    ],
)
def test_a_cursor_of_another_stream_is_refused_with_a_diff(change, other, diff):
    stream = {"name": "b", "fingerprint": "fixed", "tokenizer": "t"} | other
    sources = {stream["name"]: fixed_source(fingerprint=stream["fingerprint"])}
    with pytest.raises(ValueError, match=f"{diff}.*--model-tag"):
        Stream(
            replace(BASE, **change),
            sources,
            range(4),
            tokenizer=stream["tokenizer"],
            cursors=saved(),
        )


def test_cursors_of_another_format_missing_ones_and_duplicates_are_refused():
    cursors = saved()
    with pytest.raises(ValueError, match="format 99, expected 5"):
        resume([{**cursor, "format": 99} for cursor in cursors])
    with pytest.raises(
        ValueError, match=r"cursors of lanes \[0, 1, 3\], expected one for each of \[0, 1, 2, 3\]"
    ):
        resume([cursors[i] for i in (0, 1, 3)])
    with pytest.raises(ValueError, match=r"expected one for each of"):
        resume([*cursors, cursors[2]])
    for enough in (cursors, cursors[1:3]):
        resume(enough, range(1, 3)).close()


def test_a_pending_document_whose_tokens_changed_is_refused_at_the_row_that_needs_it():
    cursors, changed = saved(), fixed_source()
    key = tuple(cursors[2]["buckets"]["b"]["waiting"][-1][:3])
    _, group, document = key
    changed.documents[group][document] = np.append(changed.documents[group][document], 7).astype(
        np.uint16
    )
    stream = Stream(BASE, {"b": changed}, [2], tokenizer="t", cursors=cursors, num_threads=1)
    with pytest.raises(
        ValueError,
        match=rf"memory_{group // 2}: document {document} of group {group % 2} has .* "
        r"tokens, but the checkpoint says .*changed since the run began",
    ):
        stream.next_rows(30)
    stream.close()


def test_a_resume_reads_each_pending_document_once_and_no_other_document_of_the_past():
    config = make_config("crop", T=64, V=2, buffer_size=64, unit_size=4)
    source = fixed_source(num_groups=20, group_size=20)
    with Ranks(config, {"b": source}, n=1, W=1) as ranks:
        for _ in range(40):
            ranks.step()
        cursors = ranks.cursors()
    waiting = sorted(tuple(p[1:3]) for c in cursors for p in c["buckets"]["b"]["waiting"])
    source.reads.clear()
    with Ranks(config, {"b": source}, n=1, W=1, cursors=cursors):
        pass  # closing waits for reads in progress
    reads = [(group, row) for group, rows in source.reads for row in rows]
    assert len(waiting) > 20 and set(reads) <= set(waiting) and len(reads) == len(set(reads))


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


# ---- memory --------------------------------------------------------------------------------------


def test_crop_keeps_at_most_a_row_of_a_long_document():
    config = StreamConfig(T=99, V=1, buffer_size=2, max_epochs=1)
    stream = Stream(
        config,
        {"data": MemorySource([[np.arange(10_000)], [np.arange(10_000)]])},
        [0],
        tokenizer="t",
    )
    stream.next_rows(1)  # prefetches the next document
    stream.feeds["data"][0]._fill()
    held = [document.ids for document in stream.feeds["data"][0].documents.values()]
    stream.close()
    assert held and all(len(ids) == 100 and ids.base is None for ids in held)


def test_split_keeps_the_unused_part_of_a_long_document_compressed():
    config = StreamConfig(T=99, V=1, buffer_size=2, long_docs="split", overlap=9, max_epochs=1)
    ids = (np.arange(50_000) % 1000).astype(np.uint32)
    stream = Stream(config, {"data": MemorySource([[ids]])}, [0], tokenizer="t")
    feed, sizes = stream.feeds["data"][0], []
    for _ in range(400):
        feed.next_row(0)
        [document] = feed.documents.values()
        kept = document.ids
        sizes.append(sum(map(len, kept.chunks)))
    stream.close()
    assert isinstance(kept, Packed) and sizes[0] < ids.nbytes / 2 and sizes[-1] < sizes[0] / 2
    assert (kept[40_001:49_000] == ids[40_000:48_999]).all() and kept[
        49_000:49_001
    ].dtype == kept.dtype


# ---- curricula -----------------------------------------------------------------------------------


def test_another_curriculum_is_refused_and_a_new_run_continues_each_bucket_where_it_was():
    sources = {
        "a": fixed_source(),
        "b": fixed_source(4, 7, "other"),
        "c": fixed_source(6, 9, "new"),
    }
    old = StreamConfig(
        T=16,
        V=2,
        buffer_size=4,
        curriculum=Curriculum(
            [Phase(40 * 32, {"a": 3, "b": 1}), Phase(40 * 32, {"a": 1, "b": 1})],
            max_epochs={"a": 0, "b": 0},
        ),
    )
    new = StreamConfig(
        T=16,
        V=2,
        buffer_size=4,
        curriculum=Curriculum([Phase(40 * 32, {"b": 1, "c": 1})], max_epochs={"b": 0, "c": 0}),
    )
    stream = Stream(old, {k: sources[k] for k in "ab"}, range(2), tokenizer="t")
    stream.next_rows(12)
    saved = json_copy(stream.cursors())
    stream.close()
    with pytest.raises(ValueError, match="belongs to another stream"):
        Stream(new, sources, range(2), tokenizer="t", cursors=saved)
    identity = stream_identity(new, {k: sources[k] for k in "bc"}, "t")
    changed = Stream(new, sources, range(2), tokenizer="t", cursors=carry_on(saved, identity))
    now = changed.cursors()
    changed.next_rows(4)
    changed.close()
    for before, after in zip(saved, now):
        assert (
            after["row"] == 0
            and after["buckets"]["c"]["row"] == 0
            and set(after["buckets"]) == {"b", "c"}
        )
        assert after["buckets"]["b"] == before["buckets"]["b"]
    assert carry_on(saved, stream.identity) == saved, "the same curriculum continues everything"
