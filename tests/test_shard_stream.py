"""Shards in the stream: what streaming the text gives; curricula mix buckets; dry ones halt a run or are dropped."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanochat.curriculum import Curriculum, Phase
from nanochat.dataloader import Dry
from nanochat.dataset import find_files
from nanochat.order import StreamConfig
from nanochat.sources import ParquetSource, TokenSource, scan
from nanochat.stream import Stream, carry_on, ledger, stream_identity
from nanochat.token_writer import ShardWriter
from nanochat.tokenizer import RustBPETokenizer
from scripts import tok_shards
from tests.toy import (
    BOS,
    ByteTokenizer,
    Ranks,
    fixed_source,
    json_copy,
    load_steps,
    row_arrays,
    some_texts,
    write_parquet,
)

SHARED = Path(__file__).parents[2] / "shared" / "data"


def make_shards(raw: Path, out: Path, tokenizer: Path, *flags: str) -> Path:
    assert tok_shards.main([f"--input-dir={raw}", f"--output-dir={out}", f"--tokenizer={tokenizer}", "--num-workers=1",
                            *flags]) == 0
    return out


def digests(config: StreamConfig, source: Any, tokenizer: str, *, W: int, steps: int) -> list[int]:
    with Ranks(config, {"data": source}, n=2, W=W, tokenizer=tokenizer) as ranks:
        return [ranks.step() for _ in range(steps)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    RustBPETokenizer.train_from_iterator(some_texts(200, seed=9), 300).save(folder)
    return folder


@pytest.mark.parametrize("group_size", [8, 1024])
def test_shards_give_the_digests_of_streaming_the_same_files(tmp_path, tokenizer, group_size):
    for i in range(3):
        write_parquet(tmp_path / "raw" / "b" / f"s{i}.parquet", some_texts(60, seed=i), group_size)
    out = make_shards(tmp_path / "raw", tmp_path / "out", tokenizer, "--max-length=0", "--val-files=0")
    tok = RustBPETokenizer.from_directory(tokenizer)
    text = ParquetSource(scan(tmp_path / "raw"), tok)
    shards = TokenSource(scan(out, find_files(out / "train", "shards")), tok)
    assert text.groups.tolist() == shards.groups.tolist()
    for kwargs in ({}, {"long_docs": "split", "overlap": 5}, {"layout": "concat"}):
        config = StreamConfig(T=32, V=4, seed=3, buffer_size=8, **kwargs)
        assert digests(config, text, "t", W=1, steps=12) == digests(config, shards, "t", W=3, steps=12)


def test_shards_of_real_text_give_the_digests_of_streaming_it(tmp_path, tokenizer):
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is not here: the real text is not part of the project")
    raw = tmp_path / "raw" / "math"
    raw.mkdir(parents=True)
    for f in sorted((SHARED / "math").glob("*.parquet"))[:1]:
        (raw / f.name).symlink_to(f)
    out = make_shards(tmp_path / "raw", tmp_path / "out", tokenizer, "--max-length=0", "--val-files=0")
    tok = RustBPETokenizer.from_directory(tokenizer)
    text = ParquetSource(scan(tmp_path / "raw"), tok)
    shards = TokenSource(scan(out, find_files(out / "train", "shards")), tok)
    config = StreamConfig(T=512, V=8, seed=1, long_docs="split")
    assert digests(config, text, "t", W=1, steps=6) == digests(config, shards, "t", W=2, steps=6)


# ---- windows --------------------------------------------------------------------------------------------------------

def windowed(folder: Path) -> TokenSource:
    """Twelve documents of numbered ids in windows of 10 that share 3, EOD 256."""
    folder.mkdir(parents=True)
    ids, lengths, prefixes = [], [], []
    for d in range(12):
        document = list(range(1000 * (d + 1), 1000 * (d + 1) + 5 + 9 * d))
        start = 0
        while True:
            window = document[start:start + 10]
            last = start + 10 >= len(document)
            ids += window + [BOS] * last
            lengths.append(len(window) + last)
            prefixes.append(3 if start else 0)
            if last:
                break
            start += 7
    with ShardWriter(folder / "a", vocab_size=70_000) as writer:
        writer.add(np.array(ids), np.array(lengths), np.array(prefixes))
    return folder


def every_row(source: Any, **kwargs: Any) -> tuple[list[int], list[Any], dict[str, int]]:
    """(live targets, rows, ledger) of one pass on one lane."""
    config = StreamConfig(V=1, max_epochs=1, buffer_size=8, **kwargs)
    stream = Stream(config, {"data": source}, [0], tokenizer="t")
    live, rows = [], []
    while found := stream.next_rows(1):
        tokens, mask = row_arrays(found[0], config.T)
        live += tokens[1:][mask[1:] == 1].tolist()
        rows.append((tokens, mask))
    account = ledger(json_copy(stream.cursors()), config.T)["data"]
    stream.close()
    assert account["read"] + account["bos"] + account["repeated"] == (
        account["emitted"] + account["cropped"] + account["pending"])
    return live, rows, account


@pytest.mark.parametrize("kwargs", [{"long_docs": "split", "overlap": 2}, {"layout": "concat"}])
def test_overlaps_of_windows_are_off_so_each_token_is_live_once(tmp_path, kwargs):
    source = TokenSource(scan(windowed(tmp_path / "s"), data_files(tmp_path / "s")), ByteTokenizer())
    live, rows, account = every_row(source, T=16, **kwargs)
    words = [t for t in live if t != BOS]
    assert len(rows) > 20 and len(words) == len(set(words)), "an id is a live target twice"
    assert account["repeated"] > 0
    missing = sum(5 + 9 * d for d in range(12)) - len(words)
    assert missing <= account["pending"]


def data_files(folder: Path) -> list[Path]:
    return find_files(folder, "shards")


@pytest.mark.parametrize("pack", [True, False])
def test_binned_rows_hold_whole_entries_as_stored_and_pad(tmp_path, pack):
    folder = windowed(tmp_path / "s")
    source = TokenSource(scan(folder, data_files(folder)), ByteTokenizer(), as_stored=True)
    live, rows, account = every_row(source, T=30, layout="binned", pack=pack)
    assert account["bos"] == account["cropped"] == account["pending"] == 0 < account["padded"]
    words = [t for t in live if t != BOS]
    assert (len(words) == len(set(words)) and account["documents"] == len(rows)) or pack
    for tokens, mask in rows:
        after_end = np.flatnonzero(tokens[:-1] == BOS) + 1
        assert not mask[after_end].any(), "what follows the end of a document is off"
    assert sum(int((t == BOS).sum()) for t, _ in rows) >= 12


def test_binned_refuses_an_entry_that_is_longer_than_a_row(tmp_path):
    folder = windowed(tmp_path / "s")
    source = TokenSource(scan(folder, data_files(folder)), ByteTokenizer(), as_stored=True)
    with pytest.raises(ValueError, match=r"a\.bin: group 0: an entry has .* --max-length 7"):
        every_row(source, T=7, layout="binned")


# ---- curricula ------------------------------------------------------------------------------------------------------

def mixed(V: int, T: int, **kwargs: Any) -> StreamConfig:
    phases = (Phase(40 * T * V, (("a", 3), ("b", 1))), Phase(40 * T * V, (("a", 1), ("b", 1))))
    return StreamConfig(T=T, V=V, buffer_size=4, curriculum=Curriculum(phases, **kwargs))


def test_a_curriculum_gives_the_same_digests_on_any_W_and_after_restoring():
    config = mixed(6, 16, max_epochs={"a": 0, "b": 0})
    sources = {"a": fixed_source(), "b": fixed_source(4, 7, "other")}
    expected = list(load_steps(config, sources, R=12, W=1, B=5, steps=30))
    assert {bucket for cursor in expected[-1][1] for bucket in cursor["buckets"]} == {"a", "b"}
    for W in (2, 4, 6):
        assert [d for d, _ in load_steps(config, sources, R=12, W=W, B=2, steps=30)] == [d for d, _ in expected]
    for at in (1, 13, 22):
        rest = load_steps(config, sources, R=12, W=3, B=4, steps=30 - at, cursors=json_copy(expected[at - 1][1]),
                          start_step=at)
        assert [d for d, _ in rest] == [d for d, _ in expected[at:]]


def test_a_dry_bucket_ends_the_loader_or_is_dropped_where_that_is_allowed():
    config, sources = mixed(4, 16), {"a": fixed_source(), "b": fixed_source(2, 5, "small")}
    with pytest.raises(Dry, match="bucket 'b' has run dry") as dry:
        list(load_steps(config, sources, R=8, W=2, B=4, steps=40))
    assert dry.value.bucket == "b"
    with pytest.raises(Dry, match="all its buckets") as end:
        list(load_steps(config, sources, R=8, W=2, B=4, steps=400, drop_dry=True))
    assert end.value.step > dry.value.step and end.value.bucket is None


def test_another_curriculum_is_refused_and_a_new_run_goes_on_where_each_bucket_was():
    sources = {"a": fixed_source(), "b": fixed_source(4, 7, "other"), "c": fixed_source(6, 9, "new")}
    old = mixed(2, 16, max_epochs={"a": 0, "b": 0})
    new = StreamConfig(T=16, V=2, buffer_size=4, curriculum=Curriculum(
        (Phase(40 * 32, (("b", 1), ("c", 1))),), max_epochs={"b": 0, "c": 0}))
    stream = Stream(old, {k: sources[k] for k in "ab"}, range(2), tokenizer="t")
    stream.next_rows(12)
    saved = json_copy(stream.cursors())
    stream.close()
    with pytest.raises(ValueError, match="another stream"):
        Stream(new, sources, range(2), tokenizer="t", cursors=saved)
    identity = stream_identity(new, {k: sources[k] for k in "bc"}, "t")
    changed = Stream(new, sources, range(2), tokenizer="t", cursors=carry_on(saved, identity))
    now = changed.cursors()
    changed.next_rows(4)
    changed.close()
    for before, after in zip(saved, now):
        assert after["row"] == 0 and after["buckets"]["c"]["row"] == 0 and set(after["buckets"]) == {"b", "c"}
        assert after["buckets"]["b"] == before["buckets"]["b"]
    assert carry_on(saved, stream.identity) == saved, "with the same curriculum all goes on"


def test_ten_documents_on_64_lanes_work():
    config = StreamConfig(T=16, V=64, buffer_size=4, curriculum=Curriculum(
        (Phase(64 * 16 * 30, (("a", 1), ("tiny", 1))),), max_epochs={"a": 0, "tiny": 0}))
    sources = {"a": fixed_source(), "tiny": fixed_source(1, 10, "tiny")}
    steps = list(load_steps(config, sources, R=64, W=3, B=8, steps=12))
    assert len(steps) == 12 and ledger(steps[-1][1], 16)["tiny"]["rows"] > 64
