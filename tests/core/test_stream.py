"""Single cases of the stream: resumes, memory, another curriculum. Laws with random data are in
tests/core/test_stream_laws.py."""

import numpy as np
import pytest

from nanochat.curriculum import Curriculum, Phase
from nanochat.order import StreamConfig
from nanochat.packing import LAYOUTS, Concat
from nanochat.rows import Packed
from nanochat.stream import Stream
from tests.spec.test_stream import BASE, saved
from tests.toy import MemorySource, Ranks, fixed_source, numbered, stream_config

# ---- cursors -------------------------------------------------------------------------------------


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
    config = stream_config("crop", T=64, V=2, buffer_size=64, unit_size=4)
    source = fixed_source(num_groups=20, group_size=20)
    with Ranks(config, {"b": source}, n=1, W=1) as ranks:
        for _ in range(40):
            ranks.step()
        cursors = ranks.cursors()
    waiting = sorted(tuple(p[1:3]) for c in cursors for p in c["buckets"]["b"]["waiting"])
    source.reads.clear()
    with Ranks(config, {"b": source}, n=1, W=1, cursors=cursors):
        pass  # closing waits for reads in progress
    reads = [(group, number) for group, numbers in source.reads for number in numbers]
    assert len(waiting) > 20 and set(reads) <= set(waiting) and len(reads) == len(set(reads))


# ---- long and short documents --------------------------------------------------------------------


def share_of_short_documents(sources, mix, *, beginning):
    """Of the tokens in the first (`beginning`) or last tenth of a pass over 20 books of 3,000 tokens
    and 600 notes of 100."""
    config = StreamConfig(
        T=16, V=2, max_epochs=1, long_docs="split", overlap=2, buffer_size=64, curriculum=mix
    )
    stream = Stream(config, sources, range(2), tokenizer="t", num_threads=0)
    rows = []
    while len(packed := stream.next_rows(1)) == 2:
        rows += packed
    stream.close()
    tenth = len(rows) // 10
    counts = {True: 0, False: 0}
    for row in rows[:tenth] if beginning else rows[-tenth:]:
        for key, _, length, _ in row.placed:
            is_short = row.bucket == "notes" or (row.bucket == "both" and key.group == 1)
            counts[is_short] += length
    return counts[True] / sum(counts.values())


@pytest.mark.parametrize("beginning", [True, False])
def test_split_uses_up_short_documents_before_long_ones_and_buckets_mix_them_evenly(beginning):
    """docs/data.md says so."""
    books = [np.arange(3000) for _ in range(20)]
    notes = [np.arange(100) for _ in range(600)]
    together = share_of_short_documents(
        {"both": MemorySource([books, notes], small=True)}, None, beginning=beginning
    )
    assert together > 0.85 if beginning else together < 0.05
    mix = Curriculum([Phase(10**6, {"books": 1, "notes": 1})])
    buckets = {"books": MemorySource([books]), "notes": MemorySource([notes])}
    apart = share_of_short_documents(buckets, mix, beginning=beginning)
    assert apart == pytest.approx(0.5, abs=0.05)


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


# ---- packers -------------------------------------------------------------------------------------


class Shy(Concat):
    """A packer that wants no second document, although one does not fill a row."""

    def wants(self, target):
        return not self.documents


def test_a_packer_that_wants_no_document_and_cannot_fill_a_row_is_named(monkeypatch):
    """Regression: the rest of each lane's share was skipped without a word."""
    monkeypatch.setitem(LAYOUTS, "shy", Shy)
    config = StreamConfig(T=15, V=1, layout="shy", max_epochs=1, unit_size=4)
    stream = Stream(config, {"b": numbered([[3] * 40])}, [0], tokenizer="t", num_threads=0)
    with pytest.raises(RuntimeError, match=r"Shy\.wants: got False, expected True until a row is"):
        for _ in range(40):
            stream.next_rows(1)


# ---- curricula -----------------------------------------------------------------------------------
