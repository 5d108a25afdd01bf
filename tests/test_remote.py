"""Objects in a store read as files: right bytes, or one clear sentence, whatever store and network do. Against a real
S3 API on this machine (tests/object_store.py); skipped where obstore or moto are not installed."""

import io
import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import block_cache, object_client, patience, remote
from nanochat.block_cache import BlockCache, RemoteReader
from nanochat.patience import Patience
from nanochat.remote import (
    RemoteFile,
    Stat,
    fetch_index,
    head,
    is_remote,
    join,
    list_files,
    near_runs,
    read_bytes,
    split,
    url,
)
from tests.object_store import ACCESS_KEY, SECRET_KEY, Fault, object_store
from tests.toy import examples

QUICK = Patience(connect_s=1.0, silence_s=0.3, upload_s=5.0, first_backoff_s=0.001, max_backoff_s=0.01, give_up_s=30.0)
TOKENS = np.random.default_rng(0).integers(0, 1 << 16, 200_000, dtype=np.uint16)
BLOCK = 1 << 12
REACH = 4 * BLOCK  # that a read asks for which misses


@pytest.fixture(scope="module")
def running():
    with object_store() as store:
        yield store


@pytest.fixture
def store(running, monkeypatch):
    monkeypatch.setattr(patience, "PATIENCE", replace(QUICK, silence_s=2.0))  # a busy machine is not a silent store
    monkeypatch.setattr(patience, "_last_line", [float("-inf")])
    running.put("a/tokens.bin", TOKENS.tobytes())
    proxy = running.proxy
    proxy.faults.clear()
    proxy.seen.clear()
    proxy.latency_s = 0.0
    proxy.released.clear()
    yield running
    proxy.released.set()
    proxy.faults.clear()


def reader(store, **kwargs):
    cache = BlockCache(max_bytes=16 * REACH, block_bytes=BLOCK)
    return RemoteReader(store.path("a/tokens.bin"), np.uint16, cache=cache, **kwargs)


def ranges_below(n, longest=3000):
    return st.tuples(st.integers(0, n - 1), st.integers(0, longest)).map(lambda t: (t[0], min(n, t[0] + t[1])))


# ---- paths ----------------------------------------------------------------------------------------------------------

def test_paths_are_text_or_pathlib_and_local_ones_are_not_remote():
    assert [is_remote(p) for p in ("s3://b/k", Path("s3://b/k"), "gs://b/k", "az://c/k", "msc://p/k")] == [True] * 5
    assert [is_remote(p) for p in ("/data/s3", Path("data"), "s3", "https://x/y", "file:///x")] == [False] * 5
    assert split(Path("s3://b/some") / "key.bin") == split("s3://b/some/key.bin") == ("s3", "b", "some/key.bin")
    assert url(Path("gs://b/x")) == "gs://b/x" and join("s3://b/x/", "y", "z.bin") == "s3://b/x/y/z.bin"
    with pytest.raises(ValueError, match="expected s3://BUCKET/KEY"):
        split("s3://")
    with pytest.raises(ValueError, match="credentials do not belong into a path") as e:
        split("s3://key:secret@bucket/x")
    assert "key:secret" not in str(e.value)


def test_local_runs_do_not_import_a_client():
    code = ("import sys, nanochat.remote, nanochat.block_cache\n"
            "assert not {'obstore', 'multistorageclient'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_a_missing_package_is_a_sentence_that_names_the_extra(monkeypatch):
    for module, path, hint in (("obstore", "s3://b/k", r"pip install 'nanochat\[s3\]'"),
                               ("multistorageclient", "msc://p/k", "pip install multi-storage-client")):
        monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.setenv("AWS_SESSION_TOKEN", "another client, which is not kept from before")
        with pytest.raises(ValueError, match=hint):
            head(path)


@settings(max_examples=examples(0.8))
@given(st.lists(ranges_below(1000, 50), max_size=30), st.integers(0, 40), st.integers(1, 200))
def test_runs_of_near_ranges(ranges, gap, longest):
    runs = near_runs(ranges, gap=gap, longest=longest)
    assert sorted(i for run in runs for i in run) == list(range(len(ranges)))
    for run in runs:
        stop = ranges[run[0]][1]
        for i in run[1:]:
            assert ranges[i][0] <= stop + gap
            stop = max(stop, ranges[i][1])
        assert len(run) == 1 or stop - ranges[run[0]][0] <= longest
    for run, after in itertools.pairwise(runs):  # and none is cut without a reason
        first, stop = ranges[run[0]][0], max(ranges[i][1] for i in run)
        assert ranges[after[0]][0] > stop + gap or max(stop, ranges[after[0]][1]) - first > longest


# ---- reading --------------------------------------------------------------------------------------------------------

def test_head_and_list_tell_size_and_etag(store):
    stat = head(store.path("a/tokens.bin"))
    assert stat.size == TOKENS.nbytes and len(stat.etag) > 10
    store.put("a/b/x.idx", b"1")
    store.put("ab.txt", b"2")
    assert [s.path for s in list_files(store.path("a"))] == [store.path("a/b/x.idx"), store.path("a/tokens.bin")]
    assert stat in list_files(store.path()) and list_files(store.path("a/tok")) == []


def test_any_ranges_are_the_bytes_of_the_file(store):
    r = reader(store)

    @settings(max_examples=examples(0.3))
    @given(st.lists(ranges_below(len(TOKENS)), min_size=1, max_size=8))
    def law(ranges):
        expected = [TOKENS[a:b].tolist() for a, b in ranges]
        r.will_need(ranges[:2])
        assert [r.read(a, b).tolist() for a, b in ranges] == expected
        assert [ids.tolist() for ids in r.read_many(ranges)] == expected
        assert r.cache.bytes <= r.cache.max_bytes

    law()
    assert not r.mapped and r.read(5, 9).dtype == np.uint16
    with pytest.raises(ValueError, match="read-only"):
        r.read(5, 9)[0] = 1
    for bad in ((-1, 5), (7, 5), (0, len(TOKENS) + 1)):
        with pytest.raises(ValueError, match="its index is of another file"):
            r.read(*bad)


def test_neighbours_are_one_request_and_blocks_are_asked_for_once(store):
    r = reader(store)
    r.read(0, 3 * REACH // 2)  # three blocks
    assert [s.range for s in store.proxy.gets()] == [(0, 3 * REACH)]
    r.read(100, REACH)
    assert len(store.proxy.gets()) == 1
    r.read_many([(50_000, 50_100), (10, 20), (50_150, 50_300), (15, 40)])
    assert sorted(s.range for s in store.proxy.gets()[1:]) == [(20, 80), (100_000, 100_600)]  # and no byte more


def test_samples_of_a_shuffle_cost_their_bytes_not_blocks(store, monkeypatch):
    monkeypatch.setattr(block_cache, "GAP_BYTES", 64)
    samples = [(i, i + 33) for i in np.random.default_rng(1).integers(0, len(TOKENS) - 33, 50).tolist()]
    before = remote.traffic.bytes
    collect = reader(store).start_many(samples)
    assert all((TOKENS[a:b] == ids).all() for (a, b), ids in zip(samples, collect(), strict=True))
    assert collect() is collect()  # may be asked twice
    assert remote.traffic.bytes - before < 50 * (66 + 64)


def test_the_cache_keeps_its_bound_and_lets_go_what_nobody_touches(store, monkeypatch):
    monkeypatch.setattr(block_cache, "STALE_READS", 20)
    r = reader(store)
    starts = range(0, len(TOKENS) - 100, REACH // 2)  # the first ids of each span; the rest of it is left behind
    for a in starts:
        r.read(a, a + 100)
        for _ in range(3):
            r.read(0, 100)
        assert r.cache.bytes <= 16 * REACH
    assert len(starts) > 20
    assert sum(s.range[0] == 0 for s in store.proxy.gets()) == 1  # touched all the time, so kept
    before = len(store.proxy.gets())
    r.read(starts[-1], starts[-1] + 300)
    assert len(store.proxy.gets()) == before
    long = r.read(0, len(TOKENS))  # goes past the cache
    assert (long == TOKENS).all() and r.cache.bytes <= 16 * REACH


def test_a_lane_asks_once_for_each_reach_however_long_the_file(store):
    r = reader(store)
    for a in range(0, len(TOKENS), BLOCK):
        assert (r.read(a, min(a + BLOCK, len(TOKENS))) == TOKENS[a:a + BLOCK]).all()
    assert TOKENS.nbytes > 1.5 * r.cache.max_bytes
    assert len(store.proxy.gets()) == -(-TOKENS.nbytes // REACH)


@pytest.mark.parametrize("announce", [False, True])
def test_lanes_that_want_more_than_there_is_do_not_push_each_other_out(store, monkeypatch, announce):
    monkeypatch.setattr(store.proxy, "kept", {})
    tokens = np.tile(TOKENS, 5)
    store.put("a/lanes.bin", tokens.tobytes())
    r = RemoteReader(store.path("a/lanes.bin"), np.uint16, cache=reader(store).cache)
    stretch, unit = 5 * REACH // 2 - 300, 2 * BLOCK // 2  # ids; 24 lanes, the cache holds REACH bytes of each of 16
    lanes = [range(a, a + stretch, unit) for a in range(0, 24 * stretch, stretch)]
    before = remote.traffic.bytes
    for starts in zip(*lanes, strict=True):
        for lane, a in zip(lanes, starts):
            end = min(a + unit, lane.stop)
            if announce and a == lane.start:
                r.will_need([(a, lane.stop)])
            assert (r.read(a, end) == tokens[a:end]).all()
            assert r.cache.bytes <= r.cache.max_bytes
    read = 24 * stretch * 2
    assert read > 7 * r.cache.max_bytes
    assert remote.traffic.bytes - before < 1.4 * read  # some of the ends of stretches are fetched twice


def test_what_was_announced_is_on_its_way_before_it_is_read(store):
    store.proxy.latency_s = 0.05
    r = reader(store)
    r.will_need([(a, a + REACH // 2) for a in range(0, len(TOKENS) - REACH, REACH // 2)])  # more than there is room for
    asked = r.cache.bytes
    assert 7 * REACH <= asked <= 8 * REACH
    r.read(0, 10)
    assert r.cache.bytes == asked and len(store.proxy.gets()) == 8
    assert sorted(s.range for s in store.proxy.gets())[0] == (0, REACH)


def test_threads_share_blocks(store):
    store.proxy.latency_s = 0.02
    r = reader(store)
    starts = list(range(0, 8 * REACH // 2, 500)) * 2
    with ThreadPoolExecutor(8) as pool:
        for a, ids in zip(starts, pool.map(lambda a: r.read(a, a + 500), starts)):
            assert (ids == TOKENS[a:a + 500]).all()
    blocks = [s.range for s in store.proxy.gets()]
    assert len(blocks) == len(set(blocks)) and sum(b - a for a, b in blocks) <= 9 * REACH


def test_parquet_is_read_by_footer_and_column(store):
    sink = io.BytesIO()
    noise = [os.urandom(200_000).hex() for _ in range(12)]
    pq.write_table(pa.table({"other": noise, "text": [f"text {i}" for i in range(12)]}), sink, row_group_size=4)
    store.put("p.parquet", sink.getvalue())
    before = remote.traffic.bytes
    with pq.ParquetFile(RemoteFile(store.path("p.parquet")), pre_buffer=False) as f:
        assert f.metadata.num_row_groups == 3
        assert f.read_row_group(1, columns=["text"])["text"].to_pylist() == ["text 4", "text 5", "text 6", "text 7"]
    assert len(store.proxy.gets("p.parquet")) <= 2
    assert remote.traffic.bytes - before < 2 * remote.TAIL_BYTES
    whole = RemoteFile(store.path("p.parquet"))
    assert whole.read() == sink.getvalue() and whole.read(5) == b"" and whole.seek(-3, 2) == whole.size() - 3


# ---- local copies ---------------------------------------------------------------------------------------------------

def test_an_index_is_fetched_once_until_the_object_changes(store, tmp_path):
    store.put("x/i.idx", b"one" * 1000)
    path = store.path("x/i.idx")
    copy = fetch_index(path, tmp_path)
    assert copy == tmp_path / "bucket/x/i.idx" and copy.read_bytes() == b"one" * 1000
    assert fetch_index(path, tmp_path) == copy and len(store.proxy.gets("i.idx")) == 1
    store.put("x/i.idx", b"two" * 1000)  # of the same size
    assert fetch_index(path, tmp_path).read_bytes() == b"two" * 1000
    copy.write_bytes(b"torn")
    assert fetch_index(path, tmp_path).read_bytes() == b"two" * 1000
    (copy.parent / ".i.idx.json").write_text("{")  # a power cut in it
    assert fetch_index(path, tmp_path).read_bytes() == b"two" * 1000
    assert len(store.proxy.gets("i.idx")) == 4


def test_a_fetch_that_fails_leaves_no_copy_that_counts(store, tmp_path):
    store.put("x/j.idx", b"1" * 5000)
    path, stat = store.path("x/j.idx"), head(store.path("x/j.idx"))
    fetch_index(path, tmp_path)
    store.put("x/j.idx", b"2" * 5000)
    store.proxy.faults.append(Fault(name="j.idx", status=403, code="AccessDenied"))
    with pytest.raises(PermissionError):
        fetch_index(path, tmp_path)
    assert not (tmp_path / "bucket/x/.j.idx.json").exists()
    with pytest.raises(ValueError, match="changed"):
        fetch_index(path, tmp_path, stat=stat)
    assert fetch_index(path, tmp_path).read_bytes() == b"2" * 5000
    assert not list((tmp_path / "bucket/x").glob("*.tmp"))


def test_many_that_want_the_same_index_fetch_it_once(store, tmp_path):
    store.put("x/k.idx", b"k" * 9000)
    store.proxy.latency_s = 0.05
    with ThreadPoolExecutor(6) as pool:
        copies = set(pool.map(lambda _: fetch_index(store.path("x/k.idx"), tmp_path).read_bytes(), range(6)))
    assert copies == {b"k" * 9000} and len(store.proxy.gets("k.idx")) == 1


# ---- faults that pass -----------------------------------------------------------------------------------------------

PASSING = {"stall": Fault(stall=True), "500": Fault(status=500, times=3),
           "503": Fault(status=503, code="SlowDown", times=3), "429": Fault(status=429, code="TooManyRequests"),
           "cut": Fault(cut=1000, times=2), "cut at once": Fault(cut=0), "shifted": Fault(shift=2, times=2),
           "whole": Fault(whole=True), "slow request": Fault(status=400, code="RequestTimeout")}


@pytest.mark.parametrize("name", PASSING)
@pytest.mark.parametrize("many", [False, True])
def test_a_fault_that_passes_changes_no_byte(store, name, many):
    fault = replace(PASSING[name])
    store.proxy.faults.append(fault)
    r = reader(store)
    ids = r.read_many([(1000, 5000)])[0] if many else r.read(1000, 5000)
    assert (ids == TOKENS[1000:5000]).all()
    assert fault.times == 0 and len(store.proxy.gets()) == 1 + PASSING[name].times


def test_head_list_and_whole_objects_are_tried_again(store):
    for method, ask in (("HEAD", lambda: head(store.path("a/tokens.bin")).size),
                        ("GET", lambda: list_files(store.path("a"))[-1].size)):
        fault = Fault(method=method, status=503, code="SlowDown", times=2)
        store.proxy.faults.append(fault)
        assert ask() == TOKENS.nbytes and fault.times == 0
    store.proxy.faults.append(Fault(cut=10))
    assert read_bytes(store.path("a/tokens.bin")) == TOKENS.tobytes()


def test_a_store_that_stays_away_is_told_and_then_an_error(store, monkeypatch, caplog):
    monkeypatch.setattr(patience, "PATIENCE", replace(QUICK, give_up_s=0.6, log_after_s=0.05, log_every_s=0.2))
    store.proxy.faults.append(Fault(status=503, code="SlowDown", times=-1))
    r = reader(store)
    gave_up = pytest.raises(OSError, match=r"no answer in .* tries; the last: HTTP 503 SlowDown")
    with caplog.at_level(logging.WARNING), gave_up:
        r.read(0, 10)
    lines = [m for m in caplog.messages if "waiting for the store" in m]
    assert 1 <= len(lines) <= 4 and "s3://bucket/a/tokens.bin bytes 0 to" in lines[0]
    store.proxy.faults.clear()
    assert (r.read(0, 10) == TOKENS[:10]).all()  # what failed is not remembered


def test_a_stall_is_told_while_it_lasts_once_for_all_that_wait(store, monkeypatch, caplog):
    monkeypatch.setattr(patience, "PATIENCE", replace(QUICK, silence_s=10.0, log_after_s=0.4, log_every_s=10.0))
    store.proxy.faults.append(Fault(stall=True, times=4))
    threading.Timer(0.8, store.proxy.released.set).start()
    r = reader(store)
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(4) as pool:
        for a, ids in zip(range(0, 80_000, 20_000), pool.map(lambda a: r.read(a, a + 9), range(0, 80_000, 20_000))):
            assert (ids == TOKENS[a:a + 9]).all()
    assert sum("waiting for the store" in m for m in caplog.messages) == 1
    assert sum("answered after" in m for m in caplog.messages) == 1


def test_waits_grow_and_are_spread(monkeypatch):
    waits = []
    monkeypatch.setattr(patience, "PATIENCE", Patience(first_backoff_s=1.0, max_backoff_s=8.0))
    monkeypatch.setattr(patience._workers.closing, "wait", waits.append)

    def ask():
        if len(waits) < 40:
            raise object_client.Transient("busy")
        return 5

    assert patience.Question("it", ask).answer() == 5
    ceilings = [min(8.0, 2.0 ** i) for i in range(40)]
    assert all(c / 2 <= w <= c for w, c in zip(waits, ceilings, strict=True)) and len(set(waits)) > 30


class FakeMsc:
    """What we use of multi-storage-client 1.3, over a dict."""

    def __init__(self):
        self.objects, self.short, self.types = {}, 0, SimpleNamespace(Range=lambda offset, size: (offset, size))

    def resolve_storage_client(self, path):
        if not path.startswith("msc://mine/"):
            raise ValueError("a text that nobody should see")
        return self, ""

    def info(self, path):
        if path not in self.objects:
            raise FileNotFoundError("a text that nobody should see")
        return SimpleNamespace(key=path, content_length=len(self.objects[path]), etag=str(sum(self.objects[path])))

    def list(self, path):
        return (self.info(key) for key in self.objects if key.startswith(f"{path}/"))

    def read(self, path, byte_range):
        self.short -= 1
        return self.objects[path][byte_range[0]:sum(byte_range) - (self.short >= 0)]

    def write(self, path, body):
        self.objects[path] = bytes(body)

    def delete(self, path):
        del self.objects[path]


def test_profiles_of_multi_storage_client_and_a_client_that_gives_too_little(monkeypatch):
    fake = FakeMsc()
    monkeypatch.setattr(patience, "PATIENCE", QUICK)
    monkeypatch.setitem(sys.modules, "multistorageclient", fake)
    monkeypatch.setenv("MSC_CONFIG", "a client of its own for this test")
    remote.write("msc://mine/x/t.bin", TOKENS[:5000].tobytes())
    r = RemoteReader("msc://mine/x/t.bin", np.uint16, cache=BlockCache())
    fake.short = 2
    assert (r.read(10, 400) == TOKENS[10:400]).all() and fake.short < 0
    assert list_files("msc://mine/x") == [r.stat]
    with pytest.raises(FileNotFoundError, match=r"^msc://mine/x/none: no such object$"):
        head("msc://mine/x/none")
    with pytest.raises(ValueError, match="msc://yours: no such profile; MSC_CONFIG names"):
        head("msc://yours/x")
    remote.write("msc://mine/x/t.bin", lambda: io.BytesIO(TOKENS[:5000].tobytes()[::-1][:-1] + b"!"))
    with pytest.raises(ValueError, match="it changed since this run began"):
        r.read_many([(0, 10)])
    remote.delete("msc://mine/x/t.bin")
    assert fake.objects == {}


# ---- faults that do not pass ----------------------------------------------------------------------------------------

def test_a_swapped_object_is_an_error_that_names_it(store):
    for lose in ("", "If-Match"):  # refused by the store; by us, where a proxy loses the condition
        r = reader(store)
        assert (r.read(0, 10) == TOKENS[:10]).all()
        fault = Fault(before=lambda: store.put("a/tokens.bin", TOKENS[::-1].tobytes()), lose=lose)
        store.proxy.faults.append(fault)
        with pytest.raises(ValueError, match=r"s3://bucket/a/tokens.bin: it changed since this run began \(ETag"):
            r.read(100_000, 100_010)
        assert fault.times == 0 and store.proxy.gets()[-1].if_match == r.stat.etag
        assert (r.read(0, 10) == TOKENS[:10]).all()  # what was read before it is what it was
        store.put("a/tokens.bin", TOKENS.tobytes())


def test_an_object_that_was_cut_or_went_is_an_error_that_names_it(store):
    r = reader(store)
    r.stat = Stat(r.stat.path, r.stat.size, "")  # a store without ETags: the size tells
    store.put("a/tokens.bin", TOKENS[:-1].tobytes())
    with pytest.raises(ValueError, match=r"tokens.bin: it changed since this run began \(size 400000 then, 399998"):
        r.read(0, 10)
    store.delete("a/tokens.bin")
    with pytest.raises(FileNotFoundError, match=r"tokens.bin: no such object: this run reads it; bring the old"):
        r.read(0, 10)


@pytest.mark.parametrize("method, code, status", [("GET", "AccessDenied", 403), ("GET", "InvalidAccessKeyId", 403),
                                                  ("HEAD", "", 403), ("GET", "X", 401), ("GET", "ExpiredToken", 400)])
def test_refused_credentials_are_one_try_and_one_sentence(store, method, code, status, caplog):
    r = reader(store)
    store.proxy.seen.clear()
    fault = Fault(method=method, status=status, code=code, times=5)
    store.proxy.faults.append(fault)
    with pytest.raises(OSError, match=f"tokens.bin: the store refuses it .HTTP {status}.*check AWS_ACCESS_KEY_ID") as e:
        head(r.stat.path) if method == "HEAD" else r.read(0, 10)
    assert fault.times == 4
    assert e.value.__cause__ is None and e.value.__suppress_context__
    for secret in (ACCESS_KEY, SECRET_KEY):  # the store's answer has the first
        assert secret not in str(e.value) + repr(e.value) + caplog.text


def test_no_such_object_and_no_such_bucket(store):
    with pytest.raises(FileNotFoundError, match=r"^s3://bucket/a/nothing.bin: no such object$"):
        head(store.path("a/nothing.bin"))
    for ask in (head, list_files):
        with pytest.raises(FileNotFoundError, match="there is no bucket nobucket; check the path"):
            ask("s3://nobucket/a.bin")


def test_no_credentials_is_said_at_once(store, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(PermissionError, match="s3://bucket: no credentials; set AWS_ACCESS_KEY_ID, AWS_SECRET"):
        head(store.path("a/tokens.bin"))
    assert not store.proxy.seen


def test_endpoints_of_either_name(store, monkeypatch):
    monkeypatch.setenv("AWS_S3_ENDPOINT_URL", os.environ["AWS_ENDPOINT_URL"])
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    assert head(store.path("a/tokens.bin")).size == TOKENS.nbytes


def test_nobody_at_the_endpoint_and_an_endpoint_that_is_none(store, monkeypatch):
    monkeypatch.setattr(patience, "PATIENCE", replace(QUICK, give_up_s=0.05))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(OSError, match="the last: no connection"):
        head(store.path("a/tokens.bin"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "nowhere")
    with pytest.raises(ValueError, match="s3://bucket: AWS_ENDPOINT_URL is no URL"):
        head(store.path("a/tokens.bin"))


def test_a_program_ends_though_its_store_stalls(store):
    store.proxy.faults.append(Fault(stall=True, times=-1))
    code = ("from nanochat.block_cache import RemoteReader\nimport time\n"
            f"RemoteReader('{store.path('a/tokens.bin')}', 'u2').will_need([(0, 10)])\ntime.sleep(0.3)\nprint('end')")
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=15,
                          cwd=Path(__file__).parents[1])
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
    assert store.proxy.gets() and time.monotonic() - began < 10
