"""Large row groups: decoded once per process, into a file that all lanes read."""

import errno
import random
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat import common, parquet_source, sources, spill
from nanochat.parquet_source import ParquetSource
from nanochat.sources import scan
from tests.core.test_sources import joined_source, read_epoch
from tests.token_files import patch
from tests.toy import ByteTokenizer, some_texts, write_parquet

APART = pytest.mark.parametrize("apart", [False, True])
TEXTS = some_texts(20, seed=1)


@pytest.fixture(autouse=True)
def large(base_dir, monkeypatch):
    """Every group is large, and belongs to a large bucket."""
    monkeypatch.setattr(parquet_source, "LARGE_BYTES", 0)
    monkeypatch.setattr(sources, "SMALL_TOKENS", -1)


@pytest.fixture
def folder(tmp_path):
    write_parquet(tmp_path / "data" / "a.parquet", TEXTS, 8)
    write_parquet(tmp_path / "data" / "b.parquet", some_texts(20, seed=2), 8)
    return tmp_path / "data"


@pytest.fixture
def decoded(monkeypatch):
    """The groups that are decoded."""
    calls, decode = [], spill.decode_group
    monkeypatch.setattr(
        parquet_source, "decode_group", lambda *args: calls.append(args[:2]) or decode(*args)
    )
    return calls


def open_source(path):
    return ParquetSource(scan(path), ByteTokenizer())


def texts_of(source, group, numbers, keep=0):
    return [
        ByteTokenizer().decode(document.ids)
        for document in source.read(group, np.array(numbers), keep)
    ]


@APART
def test_documents_are_those_that_were_written(folder, monkeypatch, apart):
    if apart:
        monkeypatch.setattr(spill, "APART_BYTES", 0)
    source = open_source(folder)
    for group in (0, 2, 1):
        expected = TEXTS[8 * group : 8 * group + 8]
        assert [*source.texts(group)] == expected
        numbers = random.Random(group).sample(range(len(expected)), len(expected))
        assert texts_of(source, group, numbers) == [expected[number] for number in numbers]


def test_lanes_that_read_one_group_decode_it_once(folder, decoded):
    source = open_source(folder)
    lanes = [range(0, 3), range(3, 5), range(5, 8)]
    with ThreadPoolExecutor(3) as pool:
        for step in range(3):  # each lane reads one document at a time
            reads = [
                pool.submit(texts_of, source, 0, [lane[step]], lane.stop)
                for lane in lanes
                if step < len(lane)
            ]
            assert [read.result() for read in reads] == [
                [TEXTS[lane[step]]] for lane in lanes if step < len(lane)
            ]
    assert len(decoded) == 1


def test_a_group_is_closed_when_its_lanes_have_read_it_and_another_is_decoded(folder, decoded):
    source = open_source(folder)
    texts_of(source, 0, [0], keep=2)
    texts_of(source, 1, [0], keep=1)
    assert [*source._spills._open] == [0, 1], "a lane still reads group 0"
    texts_of(source, 0, [1], keep=2)
    texts_of(source, 3, [0])
    assert [*source._spills._open] == [3] and len(decoded) == 3


def test_a_group_is_decoded_once_also_if_files_joined_its_bucket(folder, decoded):
    """Regression: a lane reads groups of both parts in turn, and each unit closed the other group."""
    source = joined_source(folder, 1)
    assert read_epoch(source) == source.groups.sum()
    assert len(decoded) == len(set(decoded)) == len(source.groups)


@given(st.lists(st.text(max_size=9), min_size=1, max_size=9), st.data())
def test_any_texts_are_read_back_in_any_order(tmp_path_factory, texts, data):
    path = tmp_path_factory.mktemp("any") / "x.parquet"
    pq.write_table(pa.table({"text": texts}), path)
    numbers = data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1))
    decoded = spill.decode_group(path, 0, "text", 0)
    assert decoded.read(np.array(numbers)) == [
        texts[number] for number in numbers
    ] and decoded.num_documents == len(texts)
    decoded.close()


@APART
def test_damage_is_named(tmp_path, monkeypatch, apart):
    if apart:
        monkeypatch.setattr(spill, "APART_BYTES", 0)
    path = tmp_path / "bad.parquet"
    pq.write_table(
        pa.table({"text": some_texts(200)}),
        path,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    source = open_source(tmp_path)
    patch(path, 40, bytes(360))
    with pytest.raises(ValueError, match=r"bad\.parquet: row group 0 cannot be read"):
        texts_of(source, 0, [0])


def test_a_group_that_has_become_shorter_is_named(folder):
    source = open_source(folder)
    write_parquet(folder / "a.parquet", TEXTS[:5], 8)
    with pytest.raises(
        ValueError, match=r"a\.parquet: row group 0 ends at row 5, so the file has changed"
    ):
        texts_of(source, 0, [7])


@APART
def test_a_base_directory_without_room_is_named(folder, monkeypatch, apart, base_dir):
    if apart:
        monkeypatch.setattr(spill, "APART_BYTES", 0)
    monkeypatch.setattr(spill.tempfile, "TemporaryFile", lambda dir: open("/dev/full", "wb"))  # noqa: SIM115
    source = open_source(folder)
    with pytest.raises(
        OSError, match=r"cannot be decoded there \(No space left on device\); make room"
    ) as e:
        texts_of(source, 0, [0])
    assert e.value.errno == errno.ENOSPC and str(base_dir) in str(e.value)


@APART
def test_a_server_that_is_away_is_named_and_not_the_base_directory(folder, monkeypatch, apart):
    """Regression: "cannot be decoded there (None); make room"."""
    if apart:
        monkeypatch.setattr(spill, "APART_BYTES", 0)
        monkeypatch.setattr(spill, "CHILD", "import sys; sys.exit('0 nothing from host')")
    else:
        monkeypatch.setattr(
            spill, "write_texts", mock.Mock(side_effect=OSError("nothing from host"))
        )
    with pytest.raises(OSError, match=r"^nothing from host$"):
        texts_of(open_source(folder), 0, [0])


def test_a_stop_ends_the_wait_for_a_child(folder, monkeypatch):
    monkeypatch.setattr(spill, "APART_BYTES", 0)
    with common.stops_if(lambda: "SIGTERM"), pytest.raises(common.Stop, match="SIGTERM"):
        texts_of(open_source(folder), 0, [0])


def test_two_groups_are_never_decoded_at_once(folder, monkeypatch):
    """Each may take gigabytes."""
    active = []
    counts = []
    decode = spill.decode_group

    def counted(*args):
        active.append(args)
        counts.append(len(active))
        time.sleep(0.01)  # the other threads begin meanwhile, if they may
        try:
            return decode(*args)
        finally:
            active.pop()

    monkeypatch.setattr(parquet_source, "decode_group", counted)
    source = open_source(folder)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda group: texts_of(source, group, [0], keep=4), range(6)))
    assert counts == [1] * 6
