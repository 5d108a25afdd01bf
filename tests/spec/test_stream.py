"""A stream's rows depend on its data and settings alone, and a cursor belongs to one stream."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat.rows import Row
from nanochat.stream import Stream
from tests.spec.test_order import make_config
from tests.toy import MemorySource, Ranks, digest_of_row, fixed_source, json_copy

LAYOUTS = ("crop", "split", "concat")


# ---- blocks, permutations, digests ---------------------------------------------------------------


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
