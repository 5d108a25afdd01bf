"""A fork reads on: what its parent has read stays read, files may join, and buffers may be packed
anew."""

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.fork import pack_anew
from nanochat.order import Joined, open_order
from nanochat.run_reader import unbalanced
from nanochat.stream import Stream, ledger
from tests.toy import MemorySource, examples, json_copy, numbered, row_arrays, stream_config

LAYOUTS = ("crop", "split", "concat")
V = 3
LENGTHS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=2, max_size=6)


def config_of(layout, T=16, **more):
    fixed = {"V": V, "seed": 5, "buffer_size": 5, "unit_size": 4, "max_epochs": 1}
    if layout == "split":
        more = {"overlap": 3, **more}
    return stream_config(layout, T=T, **fixed, **more)


def read(config, source, cursors=None, rows=10**6):
    """(Counter of the live tokens of at most `rows` rows of each lane, cursors afterwards)."""
    stream = Stream(config, {"b": source}, range(V), tokenizer="t", num_threads=0, cursors=cursors)
    seen = Counter()
    for _ in range(rows):
        of_step = stream.next_rows(1)
        for row in of_step:
            tokens, live = row_arrays(row, config.T)
            seen.update(tokens[live > 0].tolist())
        if not of_step:
            break
    return seen, json_copy(stream.cursors())


def tokens_of(source):
    return Counter(int(token) for group in source.documents for ids in group for token in ids)


# ---- files that join -----------------------------------------------------------------------------


def with_joined(before, added, begins, small):
    """A source of the groups of both, where those of `added` joined it."""
    name = f"{before.fingerprint} joined"
    source = MemorySource([*before.documents, *added.documents], name, small=before.small)
    source.means = np.concatenate([before.means, added.means])
    source.joined = [*before.joined, Joined(len(before.groups), small, begins)]
    return source


def order_of(source, config):
    return open_order(source, bucket="b", config=config)


def join(config, cursors, before, added, small):
    """(source, cursors) of a fork whose bucket the files of `added` join."""
    feeds = [cursor["buckets"]["b"] for cursor in cursors]
    begins = [[feed["epoch"], feed["place"]] for feed in feeds]
    source = with_joined(before, added, begins, small)
    order = order_of(source, config)
    for cursor, feed in zip(cursors, feeds):
        feed["place"] = order.share(cursor["lane"], feed["epoch"]).start
        cursor["stream"]["data b"] = source.fingerprint
    return source, cursors


JOINS = (LENGTHS, LENGTHS, st.tuples(st.booleans(), st.booleans()), st.integers(0, 12))


@settings(max_examples=examples(1))
@given(*JOINS)
def test_law_what_was_read_stays_read_and_files_that_join_are_read_once(old, new, smalls, rows):
    config = config_of("split")
    before = numbered(old, small=smalls[0])
    added = numbered(new, first=10**6)
    first, cursors = read(config, before, rows=rows)
    source, cursors = join(config, cursors, before, added, smalls[1])
    rest, cursors = read(config, source, cursors)
    seen = first + rest
    everything = tokens_of(before) + tokens_of(added)
    assert all(seen[token] <= 1 for token in everything), "a document was read twice"
    pending = sum(cursor["buckets"]["b"]["pending"] for cursor in cursors)
    missing = sum(1 for token in everything if not seen[token])
    assert missing <= pending, "a document was never read"
    assert not unbalanced(ledger(cursors, config.T))


@settings(max_examples=examples(1))
@given(LENGTHS, LENGTHS, LENGTHS, st.integers(0, 8), st.integers(0, 8))
def test_law_files_may_join_twice(old, new, newer, rows, more_rows):
    config = config_of("split")
    before = numbered(old)
    first, cursors = read(config, before, rows=rows)
    source, cursors = join(config, cursors, before, numbered(new, first=10**6), True)
    second, cursors = read(config, source, cursors, rows=more_rows)
    source, cursors = join(config, cursors, source, numbered(newer, first=2 * 10**6), False)
    third, cursors = read(config, source, cursors)
    seen = first + second + third
    everything = tokens_of(source)
    assert all(seen[token] <= 1 for token in everything), "a document was read twice"
    pending = sum(cursor["buckets"]["b"]["pending"] for cursor in cursors)
    assert sum(1 for token in everything if not seen[token]) <= pending
    assert not unbalanced(ledger(cursors, config.T))


@settings(max_examples=examples(1))
@given(*JOINS)
def test_law_a_document_is_where_its_order_says(old, new, smalls, rows):
    """For `find`: the unit at a document's place holds it."""
    config = config_of("split")
    before, added = numbered(old, small=smalls[0]), numbered(new, first=10**6)
    _, cursors = read(config, before, rows=rows)
    source, cursors = join(config, cursors, before, added, smalls[1])
    order = order_of(source, config)
    found = set()
    for lane in range(V):
        share = order.share(lane, 0)
        place = share.start
        while place < share.stop:
            unit = order.unit(0, place, share.stop)
            for group, number in zip(unit.groups.tolist(), unit.numbers.tolist()):
                of_lane, at = order.lane_and_place(0, group, number)
                assert of_lane == lane and place <= at < place + len(unit.numbers)
                found.add((group, number))
            place += len(unit.numbers)
    for group, count in enumerate(source.groups.tolist()):
        for number in range(count):
            if (group, number) not in found:
                assert order.lane_and_place(0, group, number)[1] == -1, (
                    "it was read before the fork"
                )


def test_what_is_left_of_both_parts_is_mixed():
    config = config_of("split")
    before = numbered([[8] * 300], small=True)
    added = numbered([[8] * 100], first=10**6, small=True)
    _, cursors = read(config, before, rows=20)
    source, _ = join(config, cursors, before, added, True)
    order = order_of(source, config)
    share = order.share(1, 0)
    place, is_new = share.start, []
    while place < share.stop:
        unit = order.unit(0, place, share.stop)
        is_new += (unit.groups > 0).tolist()
        place += len(unit.numbers)
    half = len(is_new) // 2
    shares = np.mean(is_new[:half]), np.mean(is_new[half:])
    assert min(shares) > 0.2 and abs(shares[0] - shares[1]) < 0.3


# ---- packing anew --------------------------------------------------------------------------------


@settings(max_examples=examples(2))
@given(
    LENGTHS,
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
    st.integers(8, 24),
    st.integers(0, 5),
    st.integers(0, 12),
)
def test_law_documents_packed_anew_are_used_once_and_the_ledger_balances(
    lengths, layout, next_layout, T, overlap, rows
):
    before = config_of(layout)
    more = {"overlap": overlap} if next_layout == "split" else {}
    limit = before.tokens_in_shares or 0
    config = config_of(next_layout, T=T, share_limit=limit, **more)
    source = numbered(lengths)
    first, cursors = read(before, source, rows=rows)
    stream = Stream(config, {"b": source}, range(V), tokenizer="t", num_threads=0)
    for cursor in cursors:
        cursor["buckets"]["b"] = pack_anew(cursor["buckets"]["b"], before, config)
        cursor["stream"] = stream.identity
    begun = ledger(cursors, config.T)
    assert not unbalanced(begun)
    rest, cursors = read(config, source, json_copy(cursors))
    ended = ledger(cursors, config.T)
    assert not unbalanced(ended)

    seen = first + rest
    everything = tokens_of(source)
    # the last token of a row of `concat` is the next one's first
    most = 2 if "concat" in (layout, next_layout) else 1
    assert all(seen[token] <= most for token in everything)
    account = ended.get("b", {})
    missing = sum(1 for token in everything if not seen[token])
    if layout != "crop":
        assert missing <= account["pending"] + account["cropped"]
    if layout == next_layout == "split":
        assert account["cropped"] == 0


def test_the_order_of_documents_stays_when_rows_get_another_length():
    """`crop` counts at most one row of a document when it cuts shares."""
    before = config_of("crop", T=8)
    source = numbered([[3] * 8, [40] * 8, [5] * 8, [30] * 8])
    order = order_of(source, before)
    longer = order_of(source, replace(before, T=32, share_limit=before.tokens_in_shares))
    other = order_of(source, replace(before, T=32))
    shares = [[o.share(lane, 0) for lane in range(V)] for o in (order, longer, other)]
    assert shares[0] == shares[1] != shares[2]


def test_documents_packed_anew_arrive_in_the_order_in_which_they_arrived():
    before, config = config_of("crop", T=16), config_of("crop", T=32)
    waiting = [[0, 0, 1, 5, 0, 20], [0, 0, 2, 6, 0, 30], [0, 0, 0, 7, 0, 10]]
    moved = pack_anew({"epoch": 0, "place": 9, "waiting": waiting}, before, config)
    pieces = sorted(moved["waiting"], key=lambda piece: piece[5])
    assert [piece[2] for piece in pieces] == [0, 1, 2]
