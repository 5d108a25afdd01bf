"""Shards as a source: blocks, tapes and copies show the documents that the files hold, in the order of the words."""

import hashlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nanochat.rows import Tape, TapeRow, copy_rows, to_document, to_key
from nanochat.shard_source import ShardSource

from nanochat import feed as feed_module
from nanochat import shard_source
from nanochat import stream as stream_module
from nanochat.curriculum import Curriculum, Phase
from nanochat.dataset import find_files
from nanochat.order import Order, StreamConfig, words
from nanochat.shards import ShardWriter, read_index, read_tokens
from nanochat.sources import scan
from nanochat.stream import Stream
from tests.toy import BOS, ByteTokenizer, Ranks, json_copy, row_arrays

WINDOW, SHARED = 12, 3


def write_windows(folder: Path, documents: int, *, overlap: int = SHARED, seed: int = 0) -> Path:
    """Two pairs of documents of numbered ids, long ones in windows: some entries begin behind an EOD, some do not."""
    rng, at = np.random.default_rng(seed), 1000
    folder.mkdir(parents=True, exist_ok=True)
    for name in "ab":
        ids, lengths, prefixes = [], [], []
        for n in rng.integers(0, 40, documents).tolist():
            document = list(range(at, at + n))
            at += n
            for start in range(0, max(1, n - overlap), WINDOW - overlap):
                window = document[start:start + WINDOW]
                last = start + WINDOW >= n
                ids += window + [BOS] * last
                lengths.append(len(window) + last)
                prefixes.append(overlap if start else 0)
                if last:
                    break
        with ShardWriter(folder / name, vocab_size=70_000) as writer:
            writer.add(np.array(ids), np.array(lengths), np.array(prefixes))
    return folder


def open_windows(folder: Path, **kwargs: Any) -> ShardSource:
    return ShardSource(scan(folder, find_files(folder, "shards")), ByteTokenizer(), **kwargs)


def entries(folder: Path, keep_eod: bool) -> list[list[tuple[list[int], int]]]:
    """[(document as the stream sees it, its overlap)] of each file, from the files alone."""
    found = []
    for path in sorted(folder.glob("*.bin")):
        index = read_index(path)
        ids, prefixes = read_tokens(index).tolist(), index.prefixes.tolist()
        stored = [ids[a:b] for a, b in itertools.pairwise(index.offsets.tolist())]
        plain = stored if keep_eod else [[BOS, *(e[:-1] if e[-1:] == [BOS] else e)] for e in stored]
        found.append(list(zip(plain, prefixes)))
    return found


@pytest.mark.parametrize("keep_eod", [False, True])
def test_units_of_any_size_show_the_entries_whatever_blocks_are_kept(tmp_path, monkeypatch, keep_eod):
    monkeypatch.setattr("nanochat.shards.GROUP_ENTRIES", 100)  # two blocks and a part of one
    monkeypatch.setattr(shard_source, "BLOCK_ENTRIES", 32)
    monkeypatch.setattr(shard_source, "KEPT_BLOCKS", 3)
    folder = write_windows(tmp_path, 120)
    expected = [doc for file in entries(folder, keep_eod) for doc in file]
    source = open_windows(folder, keep_eod=keep_eod)
    assert source.groups.tolist().count(100) >= 4 and source.groups.min() < 100
    first = np.concatenate([[0], np.cumsum(source.groups)]).tolist()
    for size in (8, 16, 32, 3, 64, 1):
        for group in np.random.default_rng(size).permutation(len(source.groups)).tolist():
            for unit in range(-(-int(source.groups[group]) // size)):
                mine = expected[first[group]:first[group + 1]][unit * size:(unit + 1) * size]
                assert [d.tolist() for d in source.fetch(group, unit, size)] == [d for d, _ in mine]
                assert source.overlaps(group, unit, size) == [n for _, n in mine]
                assert source.lengths(group, unit, size).tolist() == [len(d) for d, _ in mine]
    assert len(source._blocks) == 3, "the case: blocks were given up"


def test_a_prefix_longer_than_its_entry_is_refused_and_named_by_whatever_reads_it(tmp_path):
    with ShardWriter(tmp_path / "a", vocab_size=BOS + 1) as writer:
        writer.add(np.full(64, BOS), np.full(32, 2), np.where(np.arange(32) == 20, 9, 0))
    source, order = open_windows(tmp_path), np.arange(8)
    for read in (lambda: source.overlaps(0, 2, 8), lambda: source.fetch(0, 2, 8), lambda: source.prefixes(0),
                 lambda: source.in_order(0, 2, 8, order), lambda: source.in_order(0, 2, 8, order, most=100)):
        with pytest.raises(ValueError, match=r"a\.idx: entry 20 is shorter than its prefix \(2 ids, 9 repeated\)"):
            read()


def test_words_are_those_of_a_new_generator_in_every_thread_whatever_came_before():
    keys = [(n, n % 7, "bucket", n * n) for n in range(1, 40)]
    expected = [np.random.Philox(key=int.from_bytes(hashlib.blake2b(
        "/".join(map(str, key)).encode(), digest_size=16).digest(), "little")).random_raw(n).tolist()
        for n, *key in keys]
    with ThreadPoolExecutor(3) as pool:
        for each in (map, pool.map):
            assert [found.tolist() for found in each(lambda key: words(*key), keys)] == expected


@given(st.integers(0, 1 << 40), st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 32) - 1))
def test_law_a_key_names_one_document_and_those_of_a_group_follow_one_another(epoch, group, row):
    key = to_key(epoch, group, 0) + row
    assert to_document(key) == (epoch, group, row) and key == to_key(epoch, group, row)


def test_the_order_of_each_unit_is_that_of_its_words(monkeypatch):
    groups = np.array([100, 7, 64, 33], np.int64)
    config = StreamConfig(T=8, V=1, seed=4, unit_size=16)
    order = Order(groups, bucket="b", config=config)
    assert order.unit_size == 16
    for epoch, group in itertools.product((0, 1), range(4)):
        n = int(groups[group])
        drawn = words(n, 4, "b", epoch, group).tolist()
        for unit in reversed(range(-(-n // 16))):  # in any sequence
            mine = drawn[16 * unit:16 * (unit + 1)]
            found = order.rows(epoch, group, unit, len(mine)).tolist()
            assert found == sorted(range(len(mine)), key=mine.__getitem__)
    assert len(order._rows) <= 2, "only the groups in use are kept"


# ---- rows of shards -------------------------------------------------------------------------------------------------

def named(row: Any, documents: list[list[list[tuple[list[int], int]]]], config: StreamConfig
          ) -> tuple[list[int], list[int]]:
    """(tokens, live) of a row, from its placements and the documents by group and number."""
    tokens, live = [], []
    for (_, group, number), start, length, off in row.placements:
        document, overlap = documents[group][number]
        mask = [1, *([0] * overlap), *([1] * len(document))][:len(document)]
        if start and config.layout == "bestfit":
            tokens += [BOS, *document[start:start + length - 1]]
            live += [1, *(0 if i < off else m for i, m in enumerate(mask[start:start + length - 1]))]
        else:
            tokens += document[start:start + length]
            live += mask[start:start + length]
    return tokens, live


LAYOUTS = {"crop": {}, "split": {"long_docs": "split", "overlap": 4}, "concat": {"layout": "concat"}}


@pytest.mark.parametrize("joined", [0, 1 << 17])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_shards_hold_what_their_placements_name_straight_and_restored(tmp_path, monkeypatch, layout, joined):
    monkeypatch.setattr(feed_module, "JOINED_TOKENS", joined)
    monkeypatch.setattr("nanochat.shards.GROUP_ENTRIES", 50)
    folder = write_windows(tmp_path, 200)
    source = open_windows(folder)
    flat = [doc for file in entries(folder, False) for doc in file]
    edges = np.concatenate([[0], np.cumsum(source.groups)]).tolist()
    documents = [flat[a:b] for a, b in itertools.pairwise(edges)]
    config = StreamConfig(T=30, V=2, seed=1, buffer_size=12, **LAYOUTS[layout])
    stream = Stream(config, {"b": source}, range(2), tokenizer="t", num_threads=1)
    assert stream.feeds["b"][0].order.unit_size >= 8, "the case: units share blocks"
    found, cuts, off = 0, 0, 0
    for _ in range(12):
        restored = Stream(config, {"b": source}, range(2), tokenizer="t", cursors=json_copy(stream.cursors()))
        for row, again in zip(stream.next_rows(5), restored.next_rows(5), strict=True):
            tokens, live = row_arrays(row, 30)
            expected = named(row, documents, config)
            assert tokens.tolist() == expected[0]
            assert live.tolist()[1:] == expected[1][1:]
            assert again.placements == row.placements
            for a, b in zip(row_arrays(again, 30), (tokens, live)):
                assert a.tolist()[1:] == b.tolist()[1:]
            assert [getattr(d, "length", None) or len(d) for d, _, _ in row.documents] == [
                len(documents[g][n][0]) for (_, g, n), *_ in row.placements]
            found += isinstance(row, TapeRow)
            cuts += any(start for _, start, _, _ in row.placements)
            off += live.tolist().count(0)
        assert stream.cursors() == restored.cursors()
        restored.close()
    stream.close()
    assert (found > 0) == (layout == "concat") and off > 0 and (cuts > 0) == (layout != "crop")


def test_short_documents_of_a_unit_are_one_piece_and_long_ones_stay_views():
    documents = [np.arange(n, dtype=np.uint16) for n in (5, 9, 2)]
    tape = Tape()
    tape.add([np.concatenate(documents)], [5, 9, 2], [0, 3, 0])
    tape.add(documents, [5, 9, 2], [])
    joined, *single = tape.pieces
    assert (joined.begin, joined.stop) == (0, 16) and joined.live.tolist() == [1] * 6 + [0] * 3 + [1] * 7
    assert [(p.begin, p.stop, p.live) for p in single] == [(16, 21, None), (21, 30, None), (30, 32, None)]
    assert all(p.tokens is d for p, d in zip(single, documents))
    assert [p.begin for p in tape.take(4, 16)] == [0] and [p.begin for p in tape.take(15, 22)] == [0, 16, 21]
    assert [p.begin for p in tape.take(21, 22)] == [21] and tape.pieces[0].begin == 21


@pytest.mark.parametrize("keep_eod", [False, True])
def test_a_unit_in_another_order_is_what_is_fetched_joined_or_not(tmp_path, keep_eod):
    source = open_windows(write_windows(tmp_path, 150), keep_eod=keep_eod)
    seen = set()
    for group, size in enumerate(source.groups.tolist()):
        for unit in range(-(-size // 8)):
            fetched, overlaps = source.fetch(group, unit, 8), source.overlaps(group, unit, 8)
            order = np.random.default_rng(unit).permutation(len(fetched))
            expected = [fetched[i].tolist() for i in order]
            for most in (0, 1 << 17):
                documents, lengths, repeated = source.in_order(group, unit, 8, order, most=most)
                assert lengths == list(map(len, expected))
                assert (repeated or [0] * len(order)) == [overlaps[i] for i in order]
                flat = [token for document in expected for token in document]
                assert [d.tolist() for d in documents] == ([flat] if most else expected)
            seen.add(any(d.base is None for d in fetched))
    assert (True in seen) != keep_eod, "the case: a BOS of its own, or views alone"


def test_joining_changes_no_digest_and_no_cursor_on_any_number_of_ranks(tmp_path, monkeypatch):
    source = open_windows(write_windows(tmp_path, 150))
    config, found = StreamConfig(T=40, V=3, layout="concat"), []
    for joined, W in ((1 << 17, 1), (0, 1), (100, 3), (1 << 17, 2)):
        monkeypatch.setattr(feed_module, "JOINED_TOKENS", joined)
        with Ranks(config, {"b": source}, n=2, W=W) as ranks:
            found.append(([ranks.step() for _ in range(60)], ranks.cursors()))
            pieces = [len(feed.tape.pieces) for feed in ranks.streams[0].feeds["b"].values()]
        assert joined or max(pieces) > 3, "the case: documents are pieces of their own"
    assert all(f == found[0] for f in found) and found[0][1][0]["buckets"]["b"]["epoch"] > 0


@pytest.mark.parametrize("pack", [True, False])
def test_binned_rows_of_shards_are_off_in_overlaps_padding_and_behind_the_end_of_a_document(tmp_path, pack):
    folder = write_windows(tmp_path, 120)
    documents = entries(folder, True)  # a file is one group
    source = open_windows(folder, keep_eod=True)
    assert source.groups.tolist() == list(map(len, documents))
    config = StreamConfig(T=29, V=2, layout="binned", pack=pack, buffer_size=12)
    stream = Stream(config, {"b": source}, range(2), tokenizer="t", num_threads=1)
    seen = dict.fromkeys(("behind an end", "padding behind a window", "overlap"), 0)
    for row in stream.next_rows(40):
        tokens, live = [], []
        for (_, group, number), start, length, _ in row.placements:
            document, overlap = documents[group][number]
            assert (start, length) == (0, len(document))
            seen["behind an end"] += bool(tokens and tokens[-1] == BOS and not overlap)
            seen["overlap"] += overlap > 0
            tokens += document
            live += [0] * overlap + [1] * (length - overlap)
        seen["padding behind a window"] += len(tokens) < 30 and tokens[-1] != BOS
        live = [*live, *[0] * (30 - len(live))]
        tokens = [*tokens, *[BOS] * (30 - len(tokens))]
        live = [0 if i and tokens[i - 1] == BOS else mask for i, mask in enumerate(live)]
        found = row_arrays(row, 29)
        assert found[0].tolist() == tokens and found[1].tolist()[1:] == live[1:]
    stream.close()
    assert seen["overlap"] and seen["padding behind a window"] and (seen["behind an end"] or not pack), seen


CASES = {"crop": {}, "split": {"long_docs": "split", "overlap": 3}, "concat": {"layout": "concat"},
         "binned": {"layout": "binned"}}


@pytest.mark.parametrize("joined", [1 << 17, 0])
@pytest.mark.parametrize("case", CASES)
def test_rows_copied_together_are_the_rows_one_by_one(tmp_path, monkeypatch, case, joined):
    monkeypatch.setattr(feed_module, "JOINED_TOKENS", joined)
    config = StreamConfig(T=17, V=2, buffer_size=5, **CASES[case])
    source, off, masked = open_windows(write_windows(tmp_path, 150), keep_eod=not config.framed), 0, set()
    stream = Stream(config, {"b": source}, range(2), tokenizer="t")
    for _ in range(40):
        rows = stream.next_rows(3)
        tokens, live = np.zeros((len(rows), 18), np.int32), np.ones((len(rows), 18), np.uint8)
        doc_ids, own = np.zeros((len(rows), 18), np.int32), np.zeros((1, 18), np.int32)
        written = copy_rows(rows, np.full(18, BOS), tokens, live, doc_ids)
        assert written or live.all()
        for row, *found in zip(rows, tokens, live, doc_ids):
            copy_rows([row], np.full(18, BOS), tokens[:1].copy(), live[:1].copy(), own)
            assert [x.tolist() for x in (*row_arrays(row, 17), own[0])] == [x.tolist() for x in found]
        off += live.size - int(live.sum())
        masked.add(written)
    stream.close()
    assert off and True in masked, "the case: some targets are off"


class Torn(ShardSource):
    """A source of which one unit of each group cannot be read."""

    torn = -1

    def in_order(self, group: int, unit: int, *args: Any, **kwargs: Any) -> Any:
        if unit == self.torn:
            raise ValueError(f"unit {unit} of group {group} is torn")
        return super().in_order(group, unit, *args, **kwargs)


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("mix", ["one bucket", "two", "two, dropped when dry"])
@pytest.mark.parametrize("case", CASES)
def test_steps_that_a_lane_packs_in_one_go_are_the_steps_one_by_one(tmp_path, monkeypatch, case, mix, torn):
    """Rows, cursors, which step is the last and why."""
    monkeypatch.setattr(shard_source, "BLOCK_ENTRIES", 16)
    names = "b" if mix == "one bucket" else "ab"
    curriculum = None if mix == "one bucket" else Curriculum((Phase(30 * 17 * 3, (("a", 1), ("b", 2))),
                                                              Phase(10**9, (("a", 1), ("b", 1)))))
    config = StreamConfig(T=17, V=3, buffer_size=5, unit_size=4, max_epochs=1, curriculum=curriculum, **CASES[case])
    folders = {name: write_windows(tmp_path / name, 100 + 50 * (name == "b"), seed=i) for i, name in enumerate(names)}
    sources = {name: open_windows(folder, keep_eod=not config.framed) for name, folder in folders.items()}
    streams = []
    for _ in range(2):
        found = {name: Torn(source.manifest, ByteTokenizer(), keep_eod=not config.framed)
                 for name, source in sources.items()}
        found["b"].torn = 20 if torn else -1
        streams.append(Stream(config, found, range(3), tokenizer="t", drop_dry="dropped" in mix))
    together, alone = streams
    coming, steps, outcomes, cursors = together.steps(2), 0, [[], []], [[], []]
    assert stream_module.TURN_ROWS >= 6, "the case: several steps of two rows in one go"
    while not isinstance(outcomes[1], str) and len(outcomes[1]) in (0, 6):
        for i, take in enumerate((lambda: next(coming), lambda: (alone.next_rows(2), alone.snapshot()))):
            try:
                rows, end = take()
            except ValueError as e:
                outcomes[i] = str(e)
                continue
            arrays = [[x.tolist() for x in row_arrays(row, 17)] for row in rows]
            outcomes[i] = [(row.lane, row.index, row.placements, pair) for row, pair in zip(rows, arrays)]
            cursors[i] = alone.cursors(end)
        assert outcomes[0] == outcomes[1] and cursors[0] == cursors[1]
        steps += 1
    assert steps > 10 and torn == isinstance(outcomes[0], str)
    if not torn:
        dry = [lane for lane in range(3) if sum(row[0] == lane for row in outcomes[0]) < 2]
        buckets = [together.dry_bucket(lane) for lane in dry]
        assert buckets == [alone.dry_bucket(lane) for lane in dry] and (None in buckets) == ("dropped" in mix)


def test_text_is_packed_step_by_step(tmp_path):
    """Its rows hold tokens; those of a map do not, so lanes go ahead."""
    for mapped, ahead in ((True, stream_module.TURN_ROWS), (False, 2)):
        source = open_windows(tmp_path / "b" if not mapped else write_windows(tmp_path / "b", 150))
        source.mapped = mapped
        stream = Stream(StreamConfig(T=17, V=3), {"b": source}, range(3), tokenizer="t")
        coming = stream.steps(2)
        next(coming)
        assert set(stream.rows.values()) == {2}, "the first step waits for no other"
        next(coming)
        assert set(stream.rows.values()) == {2 + ahead}
        stream.close()
