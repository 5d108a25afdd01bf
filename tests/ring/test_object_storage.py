"""Objects read as files: correct bytes or one clear sentence, whatever the service and the network
do. The tests use a real S3 API on this machine (tests/object_store.py) and are skipped if obstore
or moto is not installed."""

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
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.common import (
    Stop,
    as_path,
    begin_launch,
    is_remote,
    local_copy,
    make_local_copies,
    stops_if,
)
from nanochat.files import data_at, find_files
from nanochat.integrations import object_storage
from nanochat.integrations.megatron_api import IndexedDatasetBuilder
from nanochat.integrations.object_storage import (
    Patience,
    RemotePath,
    RemoteReader,
    Stat,
    find,
    list_objects,
    split,
)
from tests.object_store import ACCESS_KEY, QUICK, SECRET_KEY, Fault
from tests.toy import examples
from tests.training import PATIENCE_S

ROOT = Path(__file__).parents[2]
TOKENS = np.random.default_rng(0).integers(0, 1 << 16, 200_000, dtype=np.uint16)
PART = 1 << 14
KEY = "a/tokens.bin"


@pytest.fixture
def store(calm_store, monkeypatch):
    monkeypatch.setattr(object_storage, "PART_BYTES", PART)
    monkeypatch.setattr(
        object_storage, "kept_range", functools.lru_cache(16)(object_storage.read_range)
    )
    calm_store.put(KEY, TOKENS.tobytes())
    return calm_store


def reader(store):
    begin_launch()
    return RemoteReader(as_path(store.path(KEY)), np.uint16)


# ---- paths ---------------------------------------------------------------------------------------


def test_remote_and_local_paths_are_distinguished():
    assert all(map(is_remote, ("s3://b/k", Path("s3://b/k"), "gs://b/k", "az://c/k", "msc://p/k")))
    assert not any(map(is_remote, ("/data/s3", Path("data"), "s3", "ftp://x/y", "file:///x")))
    path = as_path(Path("s3://b/some")) / "key.bin"
    assert isinstance(path, RemotePath) and split(str(path)) == ("s3", "b", "some/key.bin")
    assert (str(path), path.suffix, str(path.parent)) == (
        "s3://b/some/key.bin",
        ".bin",
        "s3://b/some",
    )
    assert str(as_path(f"{path},gs://c/d")) == "s3://b/some/key.bin,gs://c/d" and as_path(
        "/a/b"
    ) == Path("/a/b")


@pytest.mark.parametrize(
    "path",
    [
        "s3://KEY:hidden@bucket/x",
        "s3://KEY:hid/den@bucket/x",
        "s3://hidden@bucket",
        "s3://bucket/x?X-Amz-Signature=hidden",
        "gs://b/x?hidden",
    ],
)
def test_a_possible_secret_in_a_path_is_refused_and_not_shown(path):
    with pytest.raises(ValueError, match="credentials do not belong in a path") as e:
        as_path(path)
    assert "hid" not in str(e.value) and "KEY:" not in str(e.value)


@pytest.mark.parametrize(
    "endpoint",
    [
        "nowhere",
        "http://KEY:hid/den@host",
        "https://host/x?hidden",
        "http://a hidden",
        "http://KEY:hidden@host:9000",
    ],
)
def test_an_invalid_endpoint_is_one_sentence_that_does_not_show_it(
    store, monkeypatch, endpoint, capfd
):
    """Regression: the third made obstore panic, which no `except Exception` catches, and was
    shown."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    begin_launch()
    with pytest.raises(ValueError, match="s3://bucket: AWS_ENDPOINT_URL is not the URL") as e:
        as_path(store.path(KEY)).exists()
    assert "hid" not in str(e.value) + capfd.readouterr().err


def test_a_missing_package_is_a_sentence_that_names_it(monkeypatch):
    begin_launch()
    for module, path, hint in (
        ("obstore", "s3://b/k", r"pip install -e '\.\[s3\]'"),
        ("multistorageclient", "msc://p/k", "pip install multi-storage-client"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ValueError, match=hint):
            find(path)


# ---- reading -------------------------------------------------------------------------------------


def test_a_folder_is_listed_once(store):
    store.put("a/b/x.idx", b"1")
    root = as_path(store.path("a"))
    assert sorted(map(str, root.walk())) == [store.path("a/b/x.idx"), store.path(KEY)]
    assert root.is_dir() and not root.is_file()
    assert (root / "tokens.bin").stat().st_size == TOKENS.nbytes and len(
        (root / "tokens.bin").pinned().etag
    ) > 10
    assert (
        not (root / "none").exists() and (root / "b").is_dir() and not (root / "b" / "y").is_file()
    )
    assert len(store.proxy.seen) == 1
    with pytest.raises(FileNotFoundError, match=r"^s3://bucket/a/none: no such object$"):
        (root / "none").open("rb")
    begin_launch()
    assert as_path(store.path(KEY)).exists(), "an object whose folder is not listed"


def test_any_ranges_are_the_bytes_of_the_file(store):
    r, n = reader(store), len(TOKENS)
    spans = st.tuples(st.integers(0, n - 1), st.integers(0, 3000)).map(
        lambda t: (t[0], min(n, t[0] + t[1]))
    )

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


def test_lanes_request_each_part_once_and_samples_only_their_bytes(store):
    r = reader(store)
    store.proxy.seen.clear()
    share = 2 * PART  # ids of a lane, so four parts; seven lanes read in turn
    for at in range(0, share, 1024):
        for a in range(at, len(TOKENS), share):
            assert (r.read(a, min(a + 1024, len(TOKENS))) == TOKENS[a : a + 1024]).all()
    ranges = [request.range for request in store.proxy.gets()]
    assert len(ranges) == len(set(ranges)) == -(-TOKENS.nbytes // PART) and len(ranges) > 16
    store.proxy.seen.clear()
    r.read_many([(50_000, 50_100), (10, 20), (7, 7)])
    assert sorted(s.range for s in store.proxy.gets()) == [(20, 40), (100_000, 100_200)]
    assert all(s.if_match == r.pinned.etag for s in store.proxy.gets())


def test_parquet_is_read_by_its_footer_and_one_column(store):
    sink = io.BytesIO()
    noise = [os.urandom(20_000).hex() for _ in range(12)]
    pq.write_table(
        pa.table({"other": noise, "text": [f"text {i}" for i in range(12)]}), sink, row_group_size=4
    )
    store.put("p.parquet", sink.getvalue())
    path = as_path(store.path("p.parquet"))
    with pq.ParquetFile(path.open("rb"), pre_buffer=False) as f:
        assert f.read_row_group(1, columns=["text"])["text"].to_pylist() == [
            "text 4",
            "text 5",
            "text 6",
            "text 7",
        ]
    assert sum(b - a for a, b in (s.range for s in store.proxy.gets("p.parquet"))) < 10 * PART
    assert path.open("rb").read() == sink.getvalue() == path.open("rb", buffering=99_999).read()


def test_a_local_copy_is_written_once_and_is_the_listed_version(store, tmp_path):
    store.put("x/i.idx", b"one" * 1000)
    path = as_path(store.path("x/i.idx"))
    copy = local_copy(path, tmp_path)
    assert (
        copy.read_bytes() == b"one" * 1000
        and copy.parent == tmp_path / "bucket" / "x"
        and copy.suffix == ".idx"
    )
    assert local_copy(path, tmp_path) == copy and len(store.proxy.gets("i.idx")) == 1
    store.put("x/i.idx", b"two" * 1000)  # the same size
    copy.write_bytes(b"truncated")
    with pytest.raises(ValueError, match=r"x/i.idx: it has changed since this run began"):
        local_copy(path, tmp_path)
    begin_launch()
    new, old = local_copy(path, tmp_path), copy
    assert new.read_bytes() == b"two" * 1000 and set(copy.parent.iterdir()) == {new, old}


def test_an_open_file_stays_the_version_that_its_launch_saw(store):
    """Regression: the next launch's version was read from there on, so the bytes of two mixed."""
    store.put("x/open.bin", b"one" * PART)
    file = as_path(store.path("x/open.bin")).open("rb")
    assert file.read(3) == b"one"
    store.put("x/open.bin", b"two" * PART)
    begin_launch()
    file.seek(2 * PART)
    with pytest.raises(ValueError, match=r"open\.bin: it has changed since this run began"):
        file.read()


def test_local_copies_of_objects_are_below_the_base_directory(store, base_dir):
    store.put("x/i.idx", b"one" * 1000)
    path = as_path(store.path("x/i.idx"))
    make_local_copies([path, path.with_name("none.idx"), Path("/etc/hosts")])
    [copy] = [place for place in base_dir.rglob("*") if place.is_file()]
    assert local_copy(path) == copy and copy.parent == base_dir / "object_storage/bucket/x"


def test_a_key_with_a_comma_names_one_object(store):
    store.put("x/a,b.jsonl", b'{"text": "one"}')
    path = store.path("x/a,b.jsonl")
    assert data_at(path).files == (as_path(path),)


# ---- temporary faults ----------------------------------------------------------------------------

TEMPORARY = {
    "stall": Fault(stall=True),
    "500": Fault(status=500, times=2),
    "503": Fault(status=503, code="SlowDown", times=2),
    "429": Fault(status=429, code="TooManyRequests"),
    "cut": Fault(cut=1000, times=2),
    "cut at once": Fault(cut=0),
    "shifted": Fault(shift=2, times=2),
    "whole": Fault(lose="Range"),
    "slow request": Fault(status=400, code="RequestTimeout"),
}


@pytest.mark.parametrize("name", TEMPORARY)
def test_a_temporary_fault_changes_no_byte(store, name, monkeypatch):
    monkeypatch.setattr(object_storage, "PATIENCE", replace(QUICK, silence_s=0.5))
    r = reader(store)
    for read in (lambda: r.read(1000, 5000), lambda: r.read_many([(1000, 5000)])[0]):
        fault = replace(TEMPORARY[name], name="tokens.bin")
        store.proxy.faults.append(fault)
        assert (read() == TOKENS[1000:5000]).all() and fault.times == 0


@pytest.mark.parametrize(
    "code, status",
    [
        ("InternalError", 500),
        ("BadGateway", 502),
        ("SlowDown", 503),
        ("ServiceUnavailable", 503),
        ("GatewayTimeout", 504),
        ("RequestTimeout", 400),
        ("IncompleteBody", 400),
        ("RequestThrottled", 400),
        ("RequestTimeTooSkewed", 403),
        ("OperationAborted", 409),
        ("ConditionalRequestConflict", 409),
        ("TooManyRequests", 429),
    ],
)
def test_an_error_that_s3_calls_temporary_is_repeated(store, code, status):
    r = reader(store)
    find(r.pinned.path)
    store.proxy.faults.append(Fault(name="tokens.bin", code=code, status=status, times=2))
    assert (r.read(1000, 5000) == TOKENS[1000:5000]).all()
    store.proxy.faults.append(Fault(name="list-type", code=code, status=status, times=2))
    begin_launch()
    assert as_path(store.path("a")).is_dir() and not any(
        fault.times for fault in store.proxy.faults
    )


@pytest.mark.parametrize(
    "code, status, cause",
    [
        (
            "RequestTimeTooSkewed",
            403,
            r"5 times \(HTTP 403 RequestTimeTooSkewed\); .* set this machine's clock",
        ),
        (
            "OperationAborted",
            409,
            r"could not answer just now, 5 times \(HTTP 409 OperationAborted\)",
        ),
        ("InvalidObjectState", 403, r"access denied \(HTTP 403 InvalidObjectState\)"),
        ("PermanentRedirect", 301, r"access denied \(a redirect\).*and AWS_DEFAULT_REGION"),
        ("AuthorizationHeaderMalformed", 400, "access denied .*and AWS_DEFAULT_REGION"),
        ("ExpiredToken", 400, "access denied .*AWS_SESSION_TOKEN, if they are temporary"),
        ("KMS.DisabledException", 400, r"refused the request \(HTTP 400 KMS\.DisabledException"),
        ("InvalidRequest", 400, r"refused the request \(HTTP 400 InvalidRequest\); check the path"),
    ],
)
def test_an_error_names_its_real_cause(store, monkeypatch, code, status, cause):
    monkeypatch.setattr(object_storage.time, "sleep", lambda s: None)
    r = reader(store)
    store.proxy.faults.append(Fault(name="tokens.bin", code=code, status=status, times=-1))
    with pytest.raises(OSError, match=cause):
        r.read(0, 10)


def test_markers_of_folders_are_not_files(store, caplog):
    for key in ("m/", "m/corpus.parquet/", "m/lonely.jsonl/", "m/both.parquet/", "m/x/"):
        store.put(key, b"")
    for key in ("m/corpus.parquet/part-0.parquet", "m/both.parquet", "m/b.jsonl"):
        store.put(key, b'{"text": "one"}')
    store.put("m/empty.jsonl", b"")
    root = as_path(store.path("m"))
    names = ["b.jsonl", "both.parquet", "corpus.parquet/part-0.parquet", "empty.jsonl"]
    assert [str(file.relative_to(root)) for file in find_files(root)] == names
    assert (root / "both.parquet").stat().st_size == 15


def test_a_service_that_stays_unavailable_is_a_warning_and_then_an_error(
    store, monkeypatch, caplog
):
    r = reader(store)
    find(store.path(KEY))  # it has answered once
    monkeypatch.setattr(object_storage, "PATIENCE", replace(QUICK, give_up_s=0.8, log_every_s=0.2))
    store.proxy.faults.append(Fault(status=503, code="SlowDown", times=-1))
    gave_up = pytest.raises(
        OSError, match=r"no complete answer from http://127.0.0.1:\d+ \(HTTP 503 SlowDown\)"
    )
    start = time.monotonic()
    with caplog.at_level(logging.WARNING), gave_up:
        r.read(0, 10)
    lines = [m for m in caplog.messages if "waiting for object storage" in m]
    assert (
        1 <= len(lines) <= (time.monotonic() - start) / 0.2
        and "s3://bucket/a/tokens.bin bytes 0 to" in lines[0]
    )
    store.proxy.faults.clear()
    assert (r.read(0, 10) == TOKENS[:10]).all()  # a failure is not cached


def test_a_stall_is_warned_about_once_for_all_pending_requests(store, monkeypatch, caplog):
    r = reader(store)
    monkeypatch.setattr(object_storage, "PATIENCE", replace(QUICK, silence_s=30.0, log_every_s=0.5))
    store.proxy.faults.append(Fault(stall=True, times=4))
    threading.Timer(0.8, store.proxy.released.set).start()
    start = time.monotonic()
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(4) as pool:
        for a, ids in zip(
            range(0, 80_000, 20_000), pool.map(lambda a: r.read(a, a + 9), range(0, 80_000, 20_000))
        ):
            assert (ids == TOKENS[a : a + 9]).all()
    warnings = sum("waiting for object storage" in m for m in caplog.messages)
    assert 1 <= warnings <= (time.monotonic() - start) / 0.5


# ---- permanent faults ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault, problem",
    [
        (
            Fault(shift=2, times=5),
            "127.0.0.1:.* sent a different range from the one requested, 5 times; bypass the proxy",
        ),
        (Fault(lose="Range", times=5), "sent a different range from the one requested, 5 times"),
        (
            Fault(status=400, code="RequestTimeout", times=5),
            "could not answer just now, 5 times",
        ),
    ],
)
def test_an_answer_that_never_fits_is_an_error_that_blames_no_setting(
    store, fault, problem, monkeypatch
):
    monkeypatch.setattr(object_storage.time, "sleep", lambda s: None)
    r = reader(store)
    store.proxy.faults.append(fault)
    with pytest.raises(OSError, match=rf"s3://bucket/a/tokens\.bin: .*{problem}") as e:
        r.read(1000, 5000)
    assert fault.times == 0 and not any(word in str(e.value) for word in ("AWS_", "network"))
    assert (r.read(1000, 5000) == TOKENS[1000:5000]).all()


# the service notices; we notice if a proxy drops the condition
@pytest.mark.parametrize("lose", ["", "If-Match"])
def test_a_swapped_object_is_an_error_that_names_it(store, lose):
    r = reader(store)
    assert (r.read(0, 10) == TOKENS[:10]).all()
    fault = Fault(before=lambda: store.put(KEY, TOKENS[::-1].tobytes()), lose=lose)
    store.proxy.faults.append(fault)
    with pytest.raises(
        ValueError, match=r"s3://bucket/a/tokens.bin: it has changed since this run began \(.*ETag"
    ):
        r.read(100_000, 100_010)
    assert fault.times == 0 and store.proxy.gets()[-1].if_match == r.pinned.etag
    assert (r.read(0, 10) == TOKENS[:10]).all()  # parts that were read before the change stay


def test_a_truncated_or_deleted_object_is_an_error_that_names_it(store):
    r = reader(store)
    r.pinned = Stat(r.pinned.path, r.pinned.size, "")  # a service without ETags: the size differs
    store.put(KEY, TOKENS[:-1].tobytes())
    with pytest.raises(
        ValueError, match=r"tokens.bin: it has changed .* \(from 400,000 bytes .* to 399,998"
    ):
        r.read(0, 10)
    store.delete(KEY)
    with pytest.raises(
        FileNotFoundError,
        match=r"tokens.bin: no such object, but this run reads it; restore the old",
    ):
        r.read(0, 10)


@pytest.mark.parametrize(
    "method, code, status",
    [
        ("GET", "AccessDenied", 403),
        ("HEAD", "", 403),
        ("GET", "X", 401),
        ("GET", "ExpiredToken", 400),
    ],
)
def test_denied_credentials_are_one_request_and_one_sentence(store, method, code, status, caplog):
    r = reader(store)
    fault = Fault(method=method, status=status, code=code, times=5)
    store.proxy.faults.append(fault)
    with pytest.raises(
        OSError, match=f"tokens.bin: access denied .HTTP {status}.*check AWS_ACCESS_KEY_ID"
    ) as e:
        find(r.pinned.path) if method == "HEAD" else r.read(0, 10)
    assert fault.times == 4
    assert e.value.__cause__ is None and e.value.__suppress_context__
    for secret in (ACCESS_KEY, SECRET_KEY):  # the answer contains the first
        assert secret not in str(e.value) + repr(e.value) + caplog.text


def test_no_such_object_no_such_bucket_and_no_credentials(store, monkeypatch):
    assert find(store.path("a/nothing.bin")) is None
    with pytest.raises(FileNotFoundError, match="bucket nobucket does not exist; check the path"):
        as_path("s3://nobucket/a.bin").exists()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    begin_launch()
    store.proxy.seen.clear()
    with pytest.raises(
        PermissionError, match=r"tokens\.bin: no credentials; set AWS_ACCESS_KEY_ID, AWS_SECRET"
    ):
        find(store.path(KEY))
    assert not store.proxy.seen


@pytest.mark.parametrize("kind, service", [("s3", "AWS"), ("gs", "GOOGLE"), ("az", "AZURE")])
def test_a_public_bucket_needs_the_variable_of_its_service(store, monkeypatch, kind, service):
    """Regression: AWS_SKIP_SIGNATURE, which the others do not read."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "name")
    bucket = object_storage.Bucket(kind, "bucket", 1.0, 1.0)
    error = bucket.explain(RuntimeError("no answer from 169.254.169.254"), f"{kind}://bucket/a")
    assert f"or {service}_SKIP_SIGNATURE=true" in str(error)


def test_keys_that_might_hold_a_secret_are_refused_when_they_are_read(store):
    keys = ("mail/a@b.bin", "mail/a:b@c.bin", "mail/q%3Fx.bin")
    for key in keys:
        store.put(key, b"1")
    refused = []
    for path in as_path(store.path("mail")).walk():
        try:
            assert path.open("rb").read() == b"1"
        except ValueError as e:
            assert "credentials do not belong in a path" in str(e)
            refused.append(path.name)
    assert sorted(refused) == ["a:b@c.bin", "q?x.bin"]
    # regression: the advice was to set variables for credentials
    with pytest.raises(ValueError, match=r"^s3://bucket/mail: 2 files below it with \? .* rename"):
        find_files(store.path("mail"), "shards")
    for key in keys:
        store.delete(key)


@pytest.mark.parametrize("odd", ["odd//c.bin", "odd/../d.bin", "odd/./e.bin", "odd/x//f.bin"])
def test_a_listing_with_an_unusable_key_is_refused_at_once(store, odd):
    """Regression: the listing was repeated for 300 s."""
    for key in ("odd/a.bin", odd):
        store.put(key, b"1")
    store.proxy.seen.clear()
    with pytest.raises(
        ValueError, match=r"s3://bucket/odd: the key, or one below it, has an empty part, .* rename"
    ):
        list_objects(store.path("odd"))
    assert len(store.proxy.seen) == 1
    for key in ("odd/a.bin", odd):
        store.delete(key)


def test_a_key_that_no_path_can_name_is_refused_without_a_request(store):
    with pytest.raises(
        ValueError, match=r"s3://bucket/odd/../x: the key, or one below it, has an empty"
    ):
        list_objects("s3://bucket/odd/../x")
    assert not store.proxy.seen


@pytest.mark.parametrize(
    "name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_S3_ENDPOINT_URL", "AWS_ENDPOINT"]
)
def test_an_endpoint_that_never_answers_is_soon_an_error_that_names_its_variable(
    store, monkeypatch, name
):
    """Regression: AWS_S3_ENDPOINT_URL was ignored, and the error named AWS_ENDPOINT_URL for all of
    them."""
    default = Patience()
    assert default.first_answer_s + 2 * default.connect_s < 20
    monkeypatch.setattr(object_storage, "PATIENCE", replace(QUICK, first_answer_s=0.3))
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv(name, "http://127.0.0.1:9/path")
    begin_launch()
    with pytest.raises(
        OSError,
        match=rf"no complete answer from http://127.0.0.1:9/path \(no connection.*; check the "
        rf"network and {name}, then",
    ):
        find(store.path(KEY))


@pytest.mark.parametrize(
    "path, region, contacted",
    [
        ("s3://b/k", None, "https://s3.us-east-1.amazonaws.com/b"),
        ("s3://b/k", "x", "https://s3.x.amazonaws.com/b"),
        ("gs://b/k", None, "https://storage.googleapis.com/b"),
    ],
)
def test_an_error_names_the_default_address_if_no_endpoint_is_set(
    monkeypatch, path, region, contacted
):
    """Regression: "the store of s3://b" did not show that no endpoint was set."""
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", region) if region else monkeypatch.delenv(
        "AWS_DEFAULT_REGION", False
    )
    bucket = object_storage.Bucket(path[:2], "b", 1.0, 1.0)
    assert f"no complete answer from {contacted} (no connection" in str(
        bucket.explain(OSError("connect"), path)
    )


# ---- stops ---------------------------------------------------------------------------------------


def test_a_pending_request_ends_when_the_program_should_stop(store, monkeypatch):
    path, stops = as_path(store.path(KEY)), []
    monkeypatch.setattr(object_storage, "PATIENCE", replace(QUICK, silence_s=2.0 * PATIENCE_S))
    store.proxy.faults.append(Fault(stall=True, times=-1))
    threading.Timer(0.3, lambda: stops.append("SIGTERM")).start()
    start = time.monotonic()
    with stops_if(lambda: "".join(stops)), pytest.raises(Stop, match="SIGTERM"):
        path.parent.is_dir()
    assert time.monotonic() - start < PATIENCE_S


@pytest.mark.parametrize("how", ["ends", "Ctrl-C"])
def test_a_program_ends_although_its_service_stalls(store, how):
    code = (
        "from nanochat.common import as_path\nfrom nanochat.integrations.object_storage import RemoteReader\n"
        "import time\n"
        f"path = as_path('{store.path(KEY)}')\npinned = path.pinned()\n"
        "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(2)\n"
        "def wait():\n    try:\n        RemoteReader(path, 'u2').read(0, 10)\n    finally: print('given up')\n"
        "pool.submit(wait)\ninput()\nprint('end', flush=True)\n"
    )
    store.proxy.faults.append(Fault(stall=True, times=-1))
    process = subprocess.Popen(
        [sys.executable, "-c", code + ("wait()" if how == "Ctrl-C" else "")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + PATIENCE_S
    while not store.proxy.gets() and time.monotonic() < end:
        time.sleep(0.01)
    process.stdin.write("\n")  # by now a request is pending
    process.stdin.flush()
    assert process.stdout.readline() == "end\n"
    start = time.monotonic()
    if how == "Ctrl-C":
        process.send_signal(signal.SIGINT)
    # communicate would lose what readline buffered
    out = process.stdout.read()
    err = process.stderr.read()
    code = process.wait(timeout=PATIENCE_S)
    if how == "ends":
        assert (code, out, err) == (0, "given up\n", "")
    else:
        assert code in (1, 130, -signal.SIGINT)
    assert store.proxy.gets() and time.monotonic() - start < PATIENCE_S


# ---- multi-storage-client ------------------------------------------------------------------------


class FakeMsc:
    """The part of multi-storage-client 1.3 that we use, over a dict. Its first two answers are too
    short."""

    def __init__(self):
        self.objects = {}
        self.short = 2
        self.types = SimpleNamespace(Range=lambda offset, size: (offset, size))

    def resolve_storage_client(self, path):
        if not path.startswith("msc://mine/"):
            raise ValueError("a secret")
        return self, ""

    def info(self, path):
        data = self.objects.get(path, b"")
        kind = "file"
        if not data and next(self.list(path), None) is None:
            raise FileNotFoundError("a secret")
        if not data:
            kind = "directory"
        return SimpleNamespace(key=path, content_length=len(data), etag=str(sum(data)), type=kind)

    def list(self, path):
        return (self.info(key) for key in self.objects if key.startswith(f"{path}/"))

    def read(self, path, byte_range):
        self.short -= 1
        return self.objects[path][byte_range[0] : sum(byte_range) - (self.short >= 0)]


@pytest.mark.parametrize("real", [True, False])
def test_profiles_of_multi_storage_client(monkeypatch, real, tmp_path):
    """With the real package if it is installed. The fake also sends too little, and has secrets in
    its errors."""
    fake = FakeMsc()
    monkeypatch.setattr(object_storage, "PATIENCE", QUICK)
    if real:
        pytest.importorskip("multistorageclient", reason="no multi-storage-client")
        (tmp_path / "msc.yaml").write_text(
            f"profiles: {{mine: {{storage_provider: {{type: file, options: {{base_path: {tmp_path / 'files'}}}}}}}}}"
        )
        monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.yaml"))
    else:
        monkeypatch.setitem(sys.modules, "multistorageclient", fake)
    file = tmp_path / "files/x/t.bin"
    file.parent.mkdir(parents=True)

    def put(data):
        file.write_bytes(data)
        fake.objects["x/t.bin"] = data

    begin_launch()
    put(TOKENS[:5000].tobytes())
    path = as_path("msc://mine/x/t.bin")
    r = RemoteReader(path, np.uint16)
    assert (r.read(10, 400) == TOKENS[10:400]).all() and (real or fake.short < 0)
    assert (
        list_objects("msc://mine/x") == [r.pinned]
        and local_copy(path, tmp_path / "cache").read_bytes() == TOKENS[:5000].tobytes()
    )
    assert find("msc://mine/x/none") is None and not as_path("msc://mine/y").exists()
    assert find("msc://mine/x") is None, "a folder is no file"
    with pytest.raises(
        ValueError, match="msc://yours: no such profile; check the file that MSC_CONFIG names"
    ):
        find("msc://yours/x")
    put(TOKENS[:5000].tobytes()[::-1][:-1] + b"!!")
    with pytest.raises(ValueError, match="it has changed since this run began"):
        r.read_many([(0, 10)])
    file.unlink()
    fake.objects.clear()
    begin_launch()
    assert not path.exists()


@pytest.mark.parametrize(
    "error, sentence",
    [
        (PermissionError("a secret"), "access denied (without a status)"),
        (PermissionError("a secret, status_code: 403"), "access denied (HTTP 403)"),
        (RuntimeError("a secret, status_code: 401"), "access denied (HTTP 401)"),
    ],
)
def test_a_profile_without_permission_is_not_called_a_redirect(monkeypatch, error, sentence):
    """Regression: the redirect, and the advice to set variables of S3."""
    fake = FakeMsc()
    monkeypatch.setitem(sys.modules, "multistorageclient", fake)
    monkeypatch.setattr(fake, "info", Mock(side_effect=error))
    begin_launch()
    with pytest.raises(PermissionError) as e:
        find("msc://mine/x")
    assert str(e.value) == f"msc://mine/x: {sentence}; check MSC_CONFIG, and the permissions"


# ---- worker processes ----------------------------------------------------------------------------

WORKERS = """
import sys
import torch
from nanochat.integrations.megatron_api import BlendedMegatronDatasetBuilder
from nanochat.integrations.megatron_api import GPTDataset, GPTDatasetConfig

if __name__ == "__main__":
    config = GPTDatasetConfig(random_seed=1, sequence_length=8, blend=(sys.argv[1:], None), split="1,0,0")
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [24, None, None], lambda: True, config).build()
    expected = torch.stack([train[i]["tokens"] for i in range(24)])  # so the parent has used its client
    for method in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(train, batch_size=2, num_workers=2, prefetch_factor=4, timeout=100,
                                             multiprocessing_context=method)
        samples = torch.cat([batch["tokens"] for batch in loader])
        assert torch.equal(samples, expected) and torch.equal(train[3]["tokens"], expected[3])
        print(method, flush=True)
"""


def test_forked_and_spawned_worker_processes_read_samples(store, tmp_path):
    """Regression: forked workers used their parent's client, and waited forever."""
    (tmp_path / "main.py").write_text(WORKERS)
    for name in ("web", "code"):
        builder = IndexedDatasetBuilder(tmp_path / f"{name}.bin", np.uint16)
        builder.add_document(np.arange(150), [150])
        builder.finalize(tmp_path / f"{name}.idx")
        for ending in ("bin", "idx"):
            store.put(f"m/{name}.{ending}", (tmp_path / f"{name}.{ending}").read_bytes())
    process = subprocess.Popen(
        [sys.executable, tmp_path / "main.py", store.path("m/web"), store.path("m/code")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "NANOCHAT_BASE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # no worker outlives the test
    assert (process.returncode, out) == (0, "fork\nspawn\n"), err
