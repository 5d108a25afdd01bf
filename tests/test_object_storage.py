"""Objects in a store read as files: right bytes, or one clear sentence, whatever store and network do. Against a real
S3 API on this machine (tests/object_store.py); skipped where obstore or moto are not installed."""

import contextlib
import functools
import io
import logging
import os
import signal
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

from nanochat.common import LAUNCH, StopAsked, as_path, begin_launch, is_remote, local_copy, make_local_copies
from nanochat.integrations import object_storage as room
from nanochat.integrations.megatron import IndexedDatasetBuilder
from nanochat.integrations.object_storage import (
    Patience,
    RemotePath,
    RemoteReader,
    Stat,
    find,
    list_objects,
    split,
    upload,
)
from tests.object_store import ACCESS_KEY, QUICK, SECRET_KEY, Fault
from tests.toy import examples
from tests.training import PATIENCE_S

ROOT = Path(__file__).parents[1]
TOKENS = np.random.default_rng(0).integers(0, 1 << 16, 200_000, dtype=np.uint16)
PART = 1 << 14
KEY = "a/tokens.bin"


@pytest.fixture
def store(calm_store, monkeypatch):
    monkeypatch.setattr(room, "PART_BYTES", PART)
    monkeypatch.setattr(room, "kept_range", functools.lru_cache(16)(room.read_range))
    calm_store.put(KEY, TOKENS.tobytes())
    return calm_store


def reader(store):
    begin_launch()
    return RemoteReader(as_path(store.path(KEY)), np.uint16)


# ---- paths ----------------------------------------------------------------------------------------------------------

def test_paths_of_stores_are_told_from_those_of_this_machine():
    assert all(map(is_remote, ("s3://b/k", Path("s3://b/k"), "gs://b/k", "az://c/k", "msc://p/k")))
    assert not any(map(is_remote, ("/data/s3", Path("data"), "s3", "https://x/y", "file:///x")))
    path = as_path(Path("s3://b/some")) / "key.bin"
    assert isinstance(path, RemotePath) and split(str(path)) == ("s3", "b", "some/key.bin")
    assert (str(path), path.suffix, str(path.parent)) == ("s3://b/some/key.bin", ".bin", "s3://b/some")
    assert str(as_path(f"{path},gs://c/d")) == "s3://b/some/key.bin,gs://c/d" and as_path("/a/b") == Path("/a/b")


@pytest.mark.parametrize("path", ["s3://KEY:hidden@bucket/x", "s3://KEY:hid/den@bucket/x", "s3://hidden@bucket",
                                  "s3://bucket/x?X-Amz-Signature=hidden", "gs://b/x?hidden"])
def test_what_may_be_a_secret_in_a_path_is_refused_and_not_shown(path):
    with pytest.raises(ValueError, match="credentials do not belong in a path") as e:
        as_path(path)
    assert "hid" not in str(e.value) and "KEY:" not in str(e.value)


@pytest.mark.parametrize("endpoint", ["nowhere", "http://KEY:hid/den@host", "https://host/x?hidden", "http://a hidden",
                                      "http://KEY:hidden@host:9000"])
def test_an_endpoint_that_is_none_is_one_sentence_without_it(store, monkeypatch, endpoint, capfd):
    """Regression: obstore panicked over the third, past every `except Exception`, and showed it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    begin_launch()
    with pytest.raises(ValueError, match="s3://bucket: AWS_ENDPOINT_URL is not the URL") as e:
        as_path(store.path(KEY)).exists()
    assert "hid" not in str(e.value) + capfd.readouterr().err


def test_a_missing_package_is_a_sentence_that_names_it(monkeypatch):
    begin_launch()
    for module, path, hint in (("obstore", "s3://b/k", r"pip install -e '\.\[s3\]'"),
                               ("multistorageclient", "msc://p/k", "pip install multi-storage-client")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ValueError, match=hint):
            find(path)


# ---- reading --------------------------------------------------------------------------------------------------------

def test_a_path_looks_into_one_listing(store):
    store.put("a/b/x.idx", b"1")
    root = as_path(store.path("a"))
    assert sorted(map(str, root.rglob("*"))) == [store.path("a/b/x.idx"), store.path(KEY)]
    assert [p.name for p in root.rglob("*.idx")] == ["x.idx"] and root.is_dir() and not root.is_file()
    assert (root / "tokens.bin").stat().st_size == TOKENS.nbytes and len((root / "tokens.bin").pinned().etag) > 10
    assert not (root / "none").exists() and (root / "b").is_dir() and not (root / "b" / "y").is_file()
    assert len(store.proxy.seen) == 1
    with pytest.raises(FileNotFoundError, match=r"^s3://bucket/a/none: no such object$"):
        (root / "none").open("rb")
    begin_launch()
    assert as_path(store.path(KEY)).exists(), "an object that nothing else has looked at"


def test_any_ranges_are_the_bytes_of_the_file(store):
    r, n = reader(store), len(TOKENS)
    spans = st.tuples(st.integers(0, n - 1), st.integers(0, 3000)).map(lambda t: (t[0], min(n, t[0] + t[1])))

    @settings(max_examples=examples(0.3))
    @given(st.lists(spans, min_size=1, max_size=8))
    def law(ranges):
        expected = [TOKENS[a:b].tolist() for a, b in ranges]
        assert [r.read(a, b).tolist() for a, b in ranges] == expected
        assert [ids.tolist() for ids in r.read_many(ranges)] == expected

    law()
    assert r.read(5, 9).dtype == np.uint16 and (r.read(0, n) == TOKENS).all()
    with pytest.raises(ValueError, match="read-only"):
        r.read(5, 9)[0] = 1


def test_lanes_ask_once_for_each_part_and_samples_for_their_bytes_only(store):
    r = reader(store)
    store.proxy.seen.clear()
    stretch = 2 * PART  # ids, so four parts; seven lanes read on in turn
    for at in range(0, stretch, 1024):
        for a in range(at, len(TOKENS), stretch):
            assert (r.read(a, min(a + 1024, len(TOKENS))) == TOKENS[a:a + 1024]).all()
    asked = [s.range for s in store.proxy.gets()]
    assert len(asked) == len(set(asked)) == -(-TOKENS.nbytes // PART) and len(asked) > 16
    store.proxy.seen.clear()
    r.read_many([(50_000, 50_100), (10, 20), (7, 7)])
    assert sorted(s.range for s in store.proxy.gets()) == [(20, 40), (100_000, 100_200)]  # and no byte more
    assert all(s.if_match == r.pinned.etag for s in store.proxy.gets())


def test_parquet_is_read_by_footer_and_column(store):
    sink = io.BytesIO()
    noise = [os.urandom(20_000).hex() for _ in range(12)]
    pq.write_table(pa.table({"other": noise, "text": [f"text {i}" for i in range(12)]}), sink, row_group_size=4)
    store.put("p.parquet", sink.getvalue())
    path = as_path(store.path("p.parquet"))
    with pq.ParquetFile(path.open("rb"), pre_buffer=False) as f:
        assert f.read_row_group(1, columns=["text"])["text"].to_pylist() == ["text 4", "text 5", "text 6", "text 7"]
    assert sum(b - a for a, b in (s.range for s in store.proxy.gets("p.parquet"))) < 10 * PART
    assert path.open("rb").read() == sink.getvalue() == path.open("rb", buffering=99_999).read()


def test_a_local_copy_is_made_once_and_is_of_the_listed_version(store, tmp_path):
    store.put("x/i.idx", b"one" * 1000)
    path = as_path(store.path("x/i.idx"))
    begin_launch(tmp_path)
    copy = local_copy(path)
    assert copy.read_bytes() == b"one" * 1000 and copy.parent == tmp_path / "bucket" / "x" and copy.suffix == ".idx"
    assert local_copy(path) == copy and len(store.proxy.gets("i.idx")) == 1
    store.put("x/i.idx", b"two" * 1000)  # of the same size
    copy.write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"x/i.idx: it changed since this run began"):
        local_copy(path)
    begin_launch(tmp_path)
    make_local_copies([path, path.with_name("none.idx"), Path("/etc/hosts")])
    new, old = local_copy(path), copy
    assert new.read_bytes() == b"two" * 1000 and set(copy.parent.iterdir()) == {new, old}


# ---- faults that pass -----------------------------------------------------------------------------------------------

PASSING = {"stall": Fault(stall=True), "500": Fault(status=500, times=2),
           "503": Fault(status=503, code="SlowDown", times=2), "429": Fault(status=429, code="TooManyRequests"),
           "cut": Fault(cut=1000, times=2), "cut at once": Fault(cut=0), "shifted": Fault(shift=2, times=2),
           "whole": Fault(whole=True), "slow request": Fault(status=400, code="RequestTimeout")}

@pytest.mark.parametrize("name", PASSING)
def test_a_fault_that_passes_changes_no_byte(store, name, monkeypatch):
    monkeypatch.setattr(room, "PATIENCE", replace(QUICK, silence_s=0.5))
    r = reader(store)
    for read in (lambda: r.read(1000, 5000), lambda: r.read_many([(1000, 5000)])[0]):
        fault = replace(PASSING[name], name="tokens.bin")
        store.proxy.faults.append(fault)
        assert (read() == TOKENS[1000:5000]).all() and fault.times == 0


def test_a_store_that_stays_away_is_told_and_then_an_error(store, monkeypatch, caplog):
    r = reader(store)
    find(store.path(KEY))  # it answers
    monkeypatch.setattr(room, "PATIENCE", replace(QUICK, give_up_s=0.8, log_every_s=0.2))
    store.proxy.faults.append(Fault(status=503, code="SlowDown", times=-1))
    gave_up = pytest.raises(OSError, match=r"no whole answer from http://127.0.0.1:\d+ \(HTTP 503 SlowDown\)")
    began = time.monotonic()
    with caplog.at_level(logging.WARNING), gave_up:
        r.read(0, 10)
    lines = [m for m in caplog.messages if "waiting for the store" in m]
    assert 1 <= len(lines) <= (time.monotonic() - began) / 0.2 and "s3://bucket/a/tokens.bin bytes 0 to" in lines[0]
    store.proxy.faults.clear()
    assert (r.read(0, 10) == TOKENS[:10]).all()  # what failed is not remembered


def test_a_stall_is_told_while_it_lasts_once_for_all_that_wait(store, monkeypatch, caplog):
    r = reader(store)
    monkeypatch.setattr(room, "PATIENCE", replace(QUICK, silence_s=30.0, log_every_s=0.5))
    store.proxy.faults.append(Fault(stall=True, times=4))
    threading.Timer(0.8, store.proxy.released.set).start()
    began = time.monotonic()
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(4) as pool:
        for a, ids in zip(range(0, 80_000, 20_000), pool.map(lambda a: r.read(a, a + 9), range(0, 80_000, 20_000))):
            assert (ids == TOKENS[a:a + 9]).all()
    told = sum("waiting for the store" in m for m in caplog.messages)
    assert 1 <= told <= (time.monotonic() - began) / 0.5


# ---- faults that do not pass ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("fault, why", [
    (Fault(shift=2, times=5), "127.0.0.1:.* sent another range than was asked for, 5 times; something between"),
    (Fault(whole=True, times=5), "sent another range than was asked for, 5 times"),
    (Fault(status=400, code="RequestTimeout", times=5), "did not get the whole request in time, 5 times .HTTP 400")])
def test_an_answer_that_never_fits_is_an_error_that_blames_neither_keys_nor_endpoint(store, fault, why, monkeypatch):
    monkeypatch.setattr(room.time, "sleep", lambda s: None)
    r = reader(store)
    store.proxy.faults.append(fault)
    with pytest.raises(OSError, match=rf"s3://bucket/a/tokens\.bin: .*{why}") as e:
        r.read(1000, 5000)
    assert fault.times == 0 and not any(word in str(e.value) for word in ("AWS_", "network"))
    assert (r.read(1000, 5000) == TOKENS[1000:5000]).all()


@pytest.mark.parametrize("lose", ["", "If-Match"])  # refused by the store; by us, where a proxy loses the condition
def test_a_swapped_object_is_an_error_that_names_it(store, lose):
    r = reader(store)
    assert (r.read(0, 10) == TOKENS[:10]).all()
    fault = Fault(before=lambda: store.put(KEY, TOKENS[::-1].tobytes()), lose=lose)
    store.proxy.faults.append(fault)
    with pytest.raises(ValueError, match=r"s3://bucket/a/tokens.bin: it changed since this run began \(.*ETag"):
        r.read(100_000, 100_010)
    assert fault.times == 0 and store.proxy.gets()[-1].if_match == r.pinned.etag
    assert (r.read(0, 10) == TOKENS[:10]).all()  # what was read before it is what it was


def test_an_object_that_was_cut_or_went_is_an_error_that_names_it(store):
    r = reader(store)
    r.pinned = Stat(r.pinned.path, r.pinned.size, "")  # a store without ETags: the size tells
    store.put(KEY, TOKENS[:-1].tobytes())
    with pytest.raises(ValueError, match=r"tokens.bin: it changed .* \(400,000 bytes .* then, 399,998"):
        r.read(0, 10)
    store.delete(KEY)
    with pytest.raises(FileNotFoundError, match=r"tokens.bin: no such object: this run reads it; bring the old"):
        r.read(0, 10)


@pytest.mark.parametrize("method, code, status", [("GET", "AccessDenied", 403), ("HEAD", "", 403), ("GET", "X", 401),
                                                  ("GET", "ExpiredToken", 400)])
def test_refused_credentials_are_one_try_and_one_sentence(store, method, code, status, caplog):
    r = reader(store)
    fault = Fault(method=method, status=status, code=code, times=5)
    store.proxy.faults.append(fault)
    with pytest.raises(OSError, match=f"tokens.bin: the store refuses it .HTTP {status}.*check AWS_ACCESS_KEY_ID") as e:
        find(r.pinned.path) if method == "HEAD" else r.read(0, 10)
    assert fault.times == 4
    assert e.value.__cause__ is None and e.value.__suppress_context__
    for secret in (ACCESS_KEY, SECRET_KEY):  # the store's answer has the first
        assert secret not in str(e.value) + repr(e.value) + caplog.text


def test_no_such_object_no_such_bucket_and_no_credentials(store, monkeypatch):
    assert find(store.path("a/nothing.bin")) is None
    with pytest.raises(FileNotFoundError, match="there is no bucket nobucket; check the path"):
        as_path("s3://nobucket/a.bin").exists()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    begin_launch()
    store.proxy.seen.clear()
    with pytest.raises(PermissionError, match=r"tokens\.bin: no credentials; set AWS_ACCESS_KEY_ID, AWS_SECRET"):
        find(store.path(KEY))
    assert not store.proxy.seen


@pytest.mark.parametrize("keys, odd", [
    ({"odd/a.bin", "odd/-b.bin", "odd/x/g.bin"}, {"odd//c.bin", "odd/../d.bin", "odd/./e.bin", "odd/x//f.bin"}),
    ({"mail/a@b.bin"}, {"mail/a:b@c.bin", "mail/q%3Fx.bin"})])
def test_odd_keys_are_left_out_with_a_line(store, caplog, keys, odd):
    """Regression: one such key failed the whole listing, which was repeated for 300 s."""
    for key in keys | odd:
        store.put(key, b"1")
    folder = next(iter(keys)).split("/")[0]
    assert {str(path) for path in as_path(store.path(folder)).rglob("*")} == set(map(store.path, keys))
    assert f"{len(odd)} objects are left out" in caplog.text
    for key in keys | odd:
        store.delete(key)


def test_a_permanent_answer_is_asked_for_once(store):
    with pytest.raises(ValueError, match=r"s3://bucket/odd/../x: no key may have"):
        list_objects("s3://bucket/odd/../x")
    assert not store.proxy.seen


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_S3_ENDPOINT_URL", "AWS_ENDPOINT"])
def test_an_endpoint_that_never_answers_is_named_soon_with_its_variable(store, monkeypatch, name):
    """Regression: AWS_S3_ENDPOINT_URL was ignored, and the error named AWS_ENDPOINT_URL for all of them."""
    default = Patience()
    assert default.first_answer_s + 2 * default.connect_s < 20
    monkeypatch.setattr(room, "PATIENCE", replace(QUICK, first_answer_s=0.3))
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv(name, "http://127.0.0.1:9/path")
    begin_launch()
    with pytest.raises(OSError, match=rf"no whole answer from http://127.0.0.1:9/path \(no connection.*; check the "
                                      rf"network and {name}, then"):
        find(store.path(KEY))


@pytest.mark.parametrize("path, region, contacted", [
    ("s3://b/k", None, "https://s3.us-east-1.amazonaws.com/b"), ("s3://b/k", "x", "https://s3.x.amazonaws.com/b"),
    ("gs://b/k", None, "https://storage.googleapis.com/b")])
def test_a_store_without_an_endpoint_of_its_own_is_named_by_its_address(monkeypatch, path, region, contacted):
    """Regression: "the store of s3://b" did not tell that no endpoint was set."""
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", region) if region else monkeypatch.delenv("AWS_DEFAULT_REGION", False)
    bucket = room.Bucket(path[:2], "b", 1.0, 1.0)
    assert f"no whole answer from {contacted} (no connection" in str(bucket.explain(OSError("connect"), path))


# ---- stops ----------------------------------------------------------------------------------------------------------

def test_whoever_waits_gives_up_when_the_program_is_to_stop(store, monkeypatch):
    path, asked = as_path(store.path(KEY)), []
    monkeypatch.setattr(room, "PATIENCE", replace(QUICK, silence_s=2.0 * PATIENCE_S))
    monkeypatch.setattr(LAUNCH, "stop", lambda: asked)
    store.proxy.faults.append(Fault(stall=True, times=-1))
    threading.Timer(0.3, lambda: asked.append(1)).start()
    began = time.monotonic()
    with pytest.raises(StopAsked, match=r"s3://bucket/a: not waited for any longer"):
        path.parent.is_dir()
    assert time.monotonic() - began < PATIENCE_S and LAUNCH.stop()


@pytest.mark.parametrize("how", ["ends", "Ctrl-C"])
def test_a_program_ends_though_its_store_stalls(store, how):
    code = ("from nanochat.common import as_path\nfrom nanochat.integrations.object_storage import RemoteReader\n"
            "import time\n"
            f"path = as_path('{store.path(KEY)}')\npinned = path.pinned()\n"
            "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(2)\n"
            "def wait():\n    try:\n        RemoteReader(path, 'u2').read(0, 10)\n    finally: print('given up')\n"
            "pool.submit(wait)\ninput()\nprint('end', flush=True)\n")
    store.proxy.faults.append(Fault(stall=True, times=-1))
    process = subprocess.Popen([sys.executable, "-c", code + ("wait()" if how == "Ctrl-C" else "")], cwd=ROOT,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + PATIENCE_S
    while not store.proxy.gets() and time.monotonic() < end:
        time.sleep(0.01)
    process.stdin.write("\n")  # it waits for the store by now, however slowly it began
    process.stdin.flush()
    assert process.stdout.readline() == "end\n"
    began = time.monotonic()
    if how == "Ctrl-C":
        process.send_signal(signal.SIGINT)
    out, err = process.stdout.read(), process.stderr.read()  # not communicate, which loses what readline read
    code = process.wait(timeout=PATIENCE_S)
    if how == "ends":
        assert (code, out, err) == (0, "given up\n", "")
    else:
        assert code in (1, 130, -signal.SIGINT)
    assert store.proxy.gets() and time.monotonic() - began < PATIENCE_S


# ---- multi-storage-client -------------------------------------------------------------------------------------------

class FakeMsc:
    """What we use of multi-storage-client 1.3, over a dict. Its first answers are too short."""

    def __init__(self):
        self.objects, self.short, self.types = {}, 2, SimpleNamespace(Range=lambda offset, size: (offset, size))

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

    def upload_file(self, path, file):
        self.objects[path] = Path(file).read_bytes()

    def delete(self, path):
        del self.objects[path]


@pytest.mark.parametrize("real", [True, False])
def test_profiles_of_multi_storage_client(monkeypatch, real, tmp_path):
    """With the package where it is installed; a stand-in also gives too little and hides secrets in its errors."""
    fake = FakeMsc()
    monkeypatch.setattr(room, "PATIENCE", QUICK)
    if real:
        pytest.importorskip("multistorageclient", reason="no multi-storage-client")
        (tmp_path / "msc.yaml").write_text(
            f"profiles: {{mine: {{storage_provider: {{type: file, options: {{base_path: {tmp_path / 'files'}}}}}}}}}")
        monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.yaml"))
        (tmp_path / "files").mkdir()
    else:
        monkeypatch.setitem(sys.modules, "multistorageclient", fake)
    begin_launch(tmp_path / "cache")
    (tmp_path / "one").write_bytes(TOKENS[:5000].tobytes())
    upload("msc://mine/x/t.bin", tmp_path / "one")
    path = as_path("msc://mine/x/t.bin")
    r = RemoteReader(path, np.uint16)
    assert (r.read(10, 400) == TOKENS[10:400]).all() and (real or fake.short < 0)
    assert list_objects("msc://mine/x") == [r.pinned] and local_copy(path).read_bytes() == TOKENS[:5000].tobytes()
    assert find("msc://mine/x/none") is None and not as_path("msc://mine/y").exists()
    with pytest.raises(ValueError, match="msc://yours: no such profile; MSC_CONFIG names"):
        find("msc://yours/x")
    (tmp_path / "other").write_bytes(TOKENS[:5000].tobytes()[::-1][:-1] + b"!!")
    upload("msc://mine/x/t.bin", tmp_path / "other")
    with pytest.raises(ValueError, match="it changed since this run began"):
        r.read_many([(0, 10)])
    room.delete("msc://mine/x/t.bin")
    begin_launch()
    assert not path.exists()


# ---- worker processes -----------------------------------------------------------------------------------------------

WORKERS = """
import sys
import torch
from nanochat.integrations.megatron_order import BlendedMegatronDatasetBuilder
from nanochat.integrations.megatron import GPTDataset, GPTDatasetConfig

if __name__ == "__main__":
    config = GPTDatasetConfig(random_seed=1, sequence_length=8, blend=(sys.argv[1:], None), split="1,0,0")
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [24, None, None], lambda: True, config).build()
    expected = torch.stack([train[i]["tokens"] for i in range(24)])  # so the parent has a client, and used it
    for method in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(train, batch_size=2, num_workers=2, prefetch_factor=4, timeout=100,
                                             multiprocessing_context=method)
        found = torch.cat([batch["tokens"] for batch in loader])
        assert torch.equal(found, expected) and torch.equal(train[3]["tokens"], expected[3])
        print(method, flush=True)
"""


def test_worker_processes_read_samples_from_a_store_however_they_are_started(store, tmp_path):
    """Regression: forked workers used the client of their parent, and waited forever."""
    (tmp_path / "main.py").write_text(WORKERS)
    for name in ("web", "code"):
        builder = IndexedDatasetBuilder(tmp_path / f"{name}.bin", np.uint16)
        builder.add_document(np.arange(150), [150])
        builder.finalize(tmp_path / f"{name}.idx")
        for ending in ("bin", "idx"):
            store.put(f"m/{name}.{ending}", (tmp_path / f"{name}.{ending}").read_bytes())
    process = subprocess.Popen([sys.executable, tmp_path / "main.py", store.path("m/web"), store.path("m/code")],
                               env={**os.environ, "PYTHONPATH": str(ROOT), "NANOCHAT_BASE_DIR": str(tmp_path)},
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # no worker outlives the test
    assert (process.returncode, out) == (0, "fork\nspawn\n"), err
