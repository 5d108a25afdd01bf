"""A stream's rows depend on its data and settings alone, and a cursor belongs to one stream."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.order import open_order
from nanochat.rows import Row
from nanochat.stream import Feed, Stream, ledger
from tests.toy import (
    MemorySource,
    Ranks,
    digest_of_row,
    examples,
    fixed_source,
    json_copy,
    stream_config,
)

LAYOUTS = ("crop", "split", "concat")


# ---- digests -------------------------------------------------------------------------------------


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
    "crop": (
        "f4cf7a28cd91e743 b4b7a3672066381e 7c5de325417cbd2a b7ea6390c5a8cc6b "
        "0ec8c26643b8bdd2 e0a37aedc30dc208 c10fecc4cb895f4a f840c5f31a5e8118",
        "79fe208f59631b6d 296470a1e641f492 20283592eeb809c4 250f7f1d58df27b2 "
        "1f7335dc282536ee ca82333c55b75f7e 49537e487965942c f666ad7ab79113dd",
    ),
    "split": (
        "1ae8a65176c861d4 63468c329f4bfac3 42c8f0cc0a313a20 4d0105373eea3696 "
        "f23ee3f6c119f917 896b338f9d431935 810bb53b2903e2b2 f0d67aa8f8ee2e6e",
        "053201981e30b7ce ee586e59098f5cea 0031845d21e122c8 3583c844601ecc3c "
        "d49de1b992e90131 ee7c26b1f734f582 ff4965c8f61dd5bc 610c56af20a61bf6",
    ),
    "concat": (
        "3c236b350b1895c0 3f8a17c05f5a85d7 f267e73af7679245 183c6852d20cc5eb "
        "8129bf68acfbde60 6ee95671aa1b26a1 0fa3d8d1f9a1c092 a4c09161153cd4fb",
        "7ae44beb184cfc64 d9fa7211ed1d5289 4cf4983d14f9175c 398f205402c3e7ef "
        "19eb3f5fe6181faf c5ab32ca4fadd0ac bd725266853d2370 0029d3380ace74e4",
    ),
}


def eight_steps(layout, small, launches):
    """The digests of the first 8 steps in a run of several launches, (processes, steps) each."""
    config = stream_config(layout, T=24, V=4, seed=11, overlap=6, buffer_size=6, unit_size=4)
    source = MemorySource(fixed_source(num_groups=8, group_size=21).documents, small=small)
    digests = []
    cursors = None
    for W, steps in launches:
        with Ranks(config, {"data": source}, n=2, W=W, cursors=cursors) as ranks:
            for _ in range(min(steps, 8 - len(digests))):
                digests.append(f"{ranks.step():016x}")
            cursors = ranks.cursors()
    return digests


@pytest.mark.parametrize("layout", LAYOUTS)
def test_golden_digests_of_a_fixed_corpus_never_change(layout):
    for small, digests in zip((False, True), GOLDEN_DIGESTS[layout]):
        assert eight_steps(layout, small, [(2, 8)]) == digests.split()


@settings(max_examples=examples(1))
@given(
    st.sampled_from(LAYOUTS),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), max_size=4),
)
def test_law_stops_and_other_numbers_of_processes_change_no_digest(layout, small, launches):
    expected = GOLDEN_DIGESTS[layout][small].split()
    assert eight_steps(layout, small, [*launches, (1, 8)]) == expected


# ---- cursors -------------------------------------------------------------------------------------

BASE = stream_config("split", T=16, V=4, overlap=5, buffer_size=5, unit_size=4)


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


# ---- reading ahead -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "max_epochs, expected", [(1, "rest"), (2, "rest, next"), (0, "rest, next")]
)
def test_a_source_far_away_is_told_what_a_lane_reads_next(max_epochs, expected):
    """At the end of an epoch also the start of the following one, unless there is none. (What is
    told changes no row, so no other law notices.)"""
    told = []
    source = fixed_source(num_groups=7, group_size=10)
    source.ahead, source.expect = 100, told.extend
    config = stream_config("crop", T=24, V=3, seed=3, max_epochs=max_epochs)
    order = open_order(source, bucket="data", config=config)
    feed = Feed(config, bucket="data", lane=0, source=source, order=order, pool=None)
    feed._expect()
    rest = order.groups_ahead(0, feed.place, feed.share.stop, 100)
    share = order.share(0, 1)
    following = order.groups_ahead(1, share.start, share.stop, 100 - len(rest))
    assert told == (rest + following if expected == "rest, next" else rest)
    assert rest and following and rest != following


# ---- figures -------------------------------------------------------------------------------------


def test_a_ledger_of_something_else_is_refused():
    with pytest.raises(ValueError, match="cursor of a lane"):
        ledger([{"samples": 1}], T=16)
