"""The downloader against a local HTTP server with scripted faults."""

import io
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pytest

from dev.make_eval_bundle import make_eval_bundle
from nanochat import dataset, files
from nanochat.dataset import index_to_filename, list_parquet_files
from nanochat.files import Dataset, default_data_dir
from nanochat.integrations import download
from nanochat.integrations.download import fetch_bundle, make_downloader
from tests.core.test_dataset import parquet_bytes, write
from tests.token_files import patch, truncate

LAST = 3
VAL = index_to_filename(LAST)


class Server(ThreadingHTTPServer):
    """Serves `files` {name: bytes}. `script` {name: [fault, ...]} has one fault for each of the
    first requests."""

    daemon_threads = True

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.script = {}
        self.requests = []
        self.url = f"http://127.0.0.1:{self.server_port}/base"
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def handle_error(self, request, client_address):
        pass  # connections are dropped on purpose


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args):
        pass

    def do_GET(self):
        name = self.path.rsplit("/", 1)[-1]
        faults = self.server.script.get(name, [])
        fault = faults.pop(0) if faults else {}
        self.server.requests.append((name, dict(self.headers), time.monotonic()))
        body = self.server.files.get(name)
        self.send_response(
            302 if "redirect" in fault else fault.get("status", 200 if body is not None else 404)
        )
        if "redirect" in fault:
            self.send_header("Location", fault["redirect"])
        if "retry_after" in fault:
            self.send_header("Retry-After", str(fault["retry_after"]))
        if body is None or "status" in fault or "redirect" in fault:
            body = b""
        if "chunked" not in fault:
            self.send_header("Content-Length", str(fault.get("length", len(body))))
        self.end_headers()
        self.wfile.write(body[: fault.get("drop_after", len(body))])
        self.wfile.flush()
        self.close_connection = True


@pytest.fixture
def server():
    s = Server({index_to_filename(i): parquet_bytes(i) for i in range(LAST + 1)})
    yield s
    s.shutdown()
    s.server_close()


@pytest.fixture(autouse=True)
def clean_env(monkeypatch, tmp_path):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    monkeypatch.setitem(files.DATASETS, "climbmix", Dataset("http://unused.invalid", LAST))
    monkeypatch.setattr(download, "BACKOFF_S", 0.001)


@pytest.mark.parametrize("blocked", ["http://127.0.0.2:9/x?sig=HIDDEN", "http://cdn.invalid/x"])
def test_a_redirect_to_a_host_that_does_not_answer_names_that_host(
    server, tmp_path, monkeypatch, blocked
):
    monkeypatch.setattr(download, "ATTEMPTS", 1)
    server.script[VAL] = [{"redirect": blocked}]
    with pytest.raises(
        OSError, match=r"no complete answer .* from (127\.0\.0\.2:9|cdn\.invalid), to which 127\."
    ):
        try:
            job_for(server).fetch(LAST)
        except OSError as e:
            assert "HIDDEN" not in str(e)
            raise


def test_a_refusal_after_a_redirect_names_the_host_that_refused(server):
    other = Server({})
    server.script[VAL] = [{"redirect": f"{other.url}/nothing"}]
    with pytest.raises(
        OSError, match=rf"got HTTP 404 .* from 127.*:{other.server_port}, to which 127.* redirects"
    ):
        job_for(server).fetch(LAST)
    other.shutdown()
    other.server_close()


def job_for(server, data_dir=None):
    return make_downloader(base_url=server.url, data_dir=data_dir)


def fetch(job, *indices, num_workers=1):
    """{file name: error} of the shards that failed."""
    errors = download.download(job, indices, num_workers=num_workers)
    return {index_to_filename(i): error for i, error in zip(indices, errors) if error}


def on_disk(path):
    return sorted(
        p.name for p in path.iterdir() if not p.name.startswith(".") and p.name != "dataset.json"
    )


def requests_of(server, index):
    return [r for r in server.requests if r[0] == index_to_filename(index)]


def run(server, *args):
    return dataset.main(["--base-url", server.url, *args])


# ---- a server without faults ---------------------------------------------------------------------


def test_training_shards_and_always_the_validation_shard_arrive_byte_for_byte(server, capsys):
    run(server, "-n", "2", "-w", "3")
    assert on_disk(default_data_dir()) == [
        "shard_00000.parquet",
        "shard_00001.parquet",
        "shard_00003.parquet",
    ]
    assert all(
        (default_data_dir() / n).read_bytes() == server.files[n]
        for n in on_disk(default_data_dir())
    )
    assert capsys.readouterr().err == ""  # no progress bar without a terminal
    num_requests = len(server.requests)
    run(server, "--verify")
    assert "complete: 3 shards" in capsys.readouterr().out and len(server.requests) == num_requests
    run(server, "-n", "-1")
    assert [r[0] for r in server.requests[num_requests:]] == ["shard_00002.parquet"], (
        "others are not requested again"
    )


# ---- a server with faults ------------------------------------------------------------------------


@pytest.mark.parametrize("status, retry_after", [(429, 1), (503, 0)])
def test_a_busy_server_is_retried_after_its_retry_after_or_a_pause(
    server, status, retry_after, caplog
):
    server.script[index_to_filename(0)] = [
        {"status": status, "retry_after": retry_after},
        {"status": status},
    ]
    assert fetch(job_for(server), 0) == {}
    first, second, _ = requests_of(server, 0)
    assert second[2] - first[2] >= 0.95 * retry_after
    lines = [line.split("shard_00000.parquet: ")[1] for line in caplog.messages]
    assert lines == [
        f"got HTTP {status}, so the server is busy; attempt {n} of {download.ATTEMPTS} in {pause} s"
        for n, pause in ((2, retry_after), (3, 0))
    ]
    server.script[index_to_filename(1)] = [{"status": status}] * 99
    assert f"got HTTP {status}" in fetch(job_for(server), 1)[index_to_filename(1)]
    assert len(requests_of(server, 1)) == download.ATTEMPTS


def test_wrong_or_missing_content_lengths_and_dropped_connections_are_retried_a_limited_number_of_times(
    server,
):
    names, job = [index_to_filename(i) for i in range(LAST)], job_for(server)
    server.script[names[0]] = [
        {"drop_after": 1000},
        {"length": 1 << 20},
        {"drop_after": 0},
        {"chunked": True},
    ]
    server.script[names[1]] = [{"drop_after": 100}] * 99
    server.script[names[2]] = [{"length": 5000}]
    (job.data_dir / f"{names[0]}.part").write_bytes(b"x" * 100_000)  # left by a killed process
    failed = fetch(job, 0, 1, 2, num_workers=2)
    assert (
        list(failed) == names[1:]
        and "gave up" in failed[names[1]]
        and "not a parquet" in failed[names[2]]
    )
    assert len(requests_of(server, 0)) == 4 and len(requests_of(server, 1)) == download.ATTEMPTS
    assert on_disk(job.data_dir) == [names[0], f"{names[1]}.part"]
    assert (job.data_dir / names[0]).read_bytes() == server.files[names[0]]


@pytest.mark.parametrize(
    "body",
    [
        b"<html>sorry</html>",
        parquet_bytes(0)[:-50],
        parquet_bytes(0, words=["a"]),
        parquet_bytes(0, text=pa.array([], pa.string())),
        parquet_bytes(0, text=[1, 2]),
    ],
    ids=["html", "truncated", "no-text-column", "no-rows", "text-is-int"],
)
def test_a_damaged_shard_never_gets_the_final_name(server, body):
    server.files[index_to_filename(0)] = body
    job = job_for(server)
    failed = fetch(job, 0)
    assert server.url in failed["shard_00000.parquet"]
    assert on_disk(job.data_dir) == []


def test_the_error_lists_every_shard_that_failed_and_no_other_replaces_the_validation_shard(server):
    server.files[index_to_filename(1)] = b"rubbish"
    del server.files[VAL]
    with pytest.raises(
        OSError, match=rf"2 of 4 shards failed:\n  .*/shard_00001.parquet: .*\n  .*/{VAL}: .*404"
    ) as e:
        run(server)
    assert "run the same command again" in str(e.value)
    assert on_disk(default_data_dir()) == ["shard_00000.parquet", "shard_00002.parquet"]
    with pytest.raises(FileNotFoundError, match=VAL):
        list_parquet_files(default_data_dir())


def test_downloading_a_single_file_returns_whether_it_is_there(server, monkeypatch, caplog):
    monkeypatch.setitem(files.DATASETS, "climbmix", Dataset(server.url, LAST))
    assert dataset.download_single_file(0) and not dataset.download_single_file(99)
    assert on_disk(default_data_dir()) == ["shard_00000.parquet"] and "404" in caplog.text


# ---- the tasks of the CORE metric ----------------------------------------------------------------


def bundle_zip(folder, **more):
    """An archive like nanochat's: a synthetic bundle, a file of macOS, and `more` {name: bytes}."""
    bundle, packed = make_eval_bundle(folder / "eval_bundle", num_items=8), io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        files = {str(path.relative_to(folder)): path.read_bytes() for path in bundle.rglob("*.*")}
        for name, body in (files | {"__MACOSX/._core.yaml": b"?"} | more).items():
            archive.writestr(name, body)
    return packed.getvalue()


def test_a_bundle_is_downloaded_once(server, tmp_path, capsys, caplog):
    server.files["eval_bundle.zip"], folder = (
        bundle_zip(tmp_path / "made"),
        tmp_path / "base" / "eval_bundle",
    )
    server.script["eval_bundle.zip"] = [{"drop_after": 1000}]
    for _ in range(2):
        run(server, "--eval-bundle")
        assert f"{folder}: 7 tasks with 56 items" in capsys.readouterr().out
    [retry] = caplog.messages
    assert all(
        part in retry
        for part in (
            "eval_bundle.zip: no complete answer (",
            "IncompleteRead(1000 bytes",
            "attempt 2 of 6 in ",
        )
    )
    assert len(server.requests) == 2 and [p.name for p in folder.parent.iterdir()] == [
        "eval_bundle"
    ]
    for path in folder.rglob("*.*"):
        assert (
            path.read_bytes()
            == (tmp_path / "made" / "eval_bundle" / path.relative_to(folder)).read_bytes()
        )


@pytest.mark.parametrize(
    "body, problem",
    [
        (lambda folder: bundle_zip(folder)[:-40], "File is not a zip file"),
        (
            lambda folder: bundle_zip(folder).replace(b"PK\x03\x04", b"PK\x03\x05"),
            "Bad magic number",
        ),
        (
            lambda folder: bundle_zip(folder, **{"eval_bundle/core.yaml": b"icl_tasks: 1"}),
            "icl_tasks: expected a list",
        ),
        (
            lambda folder: bundle_zip(folder, **{f"eval_bundle/{i}": b"" for i in range(90)}),
            " 1.. entries with .* at most 80 ",
        ),
        (
            lambda folder: bundle_zip(folder, **{"eval_bundle/zeros": bytes(1 << 20)}),
            "bytes, expected at most",
        ),
        (lambda folder: b"0" * 600_001, "it has 600,001 bytes, expected at most 600,000"),
        (lambda folder: None, "got HTTP 404"),
    ],
    ids=["cut", "damaged", "no-tasks", "entries", "bomb", "large", "absent"],
)
def test_a_damaged_bundle_leaves_nothing_and_names_the_folder(
    server, tmp_path, monkeypatch, body, problem
):
    monkeypatch.setattr(download, "BUNDLE_BYTES", 600_000, raising=False)
    monkeypatch.setattr(download, "BUNDLE_ENTRIES", 80, raising=False)
    if (packed := body(tmp_path / "made")) is not None:
        server.files["eval_bundle.zip"] = packed
    with pytest.raises(
        OSError,
        match=rf"{server.url}/eval_bundle.zip: .*{problem}.*unpack eval_bundle.zip yourself "
        rf"to create .*/base/eval_bundle/core.yaml",
    ) as e:
        run(server, "--eval-bundle")
    assert "\n" not in str(e.value) and list((tmp_path / "base").iterdir()) == []


def test_a_bundle_cannot_write_outside_its_folder(server, tmp_path):
    outside = {"eval_bundle/../../../escaped": b"!", "/escaped": b"!"}
    server.files["eval_bundle.zip"] = bundle_zip(tmp_path / "made", **outside)
    run(server, "--eval-bundle")
    written = [*tmp_path.rglob("escaped"), *Path("/").glob("escaped")]
    assert all(path.is_relative_to(tmp_path / "base" / "eval_bundle") for path in written)


# ---- endpoint and token --------------------------------------------------------------------------


def test_the_endpoint_gets_the_token_but_redirect_targets_and_mirrors_do_not(server, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", server.url + "/")
    monkeypatch.setenv("HF_TOKEN", "hf_secret\n")
    monkeypatch.setitem(
        files.DATASETS, "climbmix", Dataset(f"{files.HUB}/datasets/x/resolve/main", LAST)
    )
    name, mirror = index_to_filename(0), Server(dict(server.files))
    server.script[name] = [{"status": 429}, {"redirect": f"{mirror.url}/{name}"}]
    try:
        job = make_downloader()
        assert job.base_url == f"{server.url}/datasets/x/resolve/main" and "secret" not in repr(job)
        assert fetch(job, 0) == {}
        assert fetch(make_downloader(base_url=mirror.url), 1) == {}
    finally:
        mirror.shutdown()
        mirror.server_close()
    assert [r[1]["Authorization"] for r in server.requests] == ["Bearer hf_secret"] * 2
    assert len(mirror.requests) == 2 and not any("Authorization" in r[1] for r in mirror.requests)


def test_the_token_is_never_printed(server, monkeypatch, capsys, caplog):
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    server.files.clear()
    with pytest.raises(OSError, match="404") as e:
        run(server, "-n", "1")
    assert server.requests[0][1]["Authorization"] == "Bearer hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_sec ret")
    with pytest.raises(ValueError, match="HF_TOKEN") as e2:
        run(server, "-n", "1")
    out = capsys.readouterr()
    assert "sec" not in str(e.value) + str(e2.value) + out.out + out.err + caplog.text


# ---- bad flags -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoint", ["https://u:hidden@h", "https://h?sig=hidden", "ftp://u:hidden@h"]
)
def test_a_secret_in_the_endpoint_is_refused_and_not_shown(tmp_path, monkeypatch, endpoint):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    for make in (make_downloader, lambda: fetch_bundle(endpoint, tmp_path / "b")):
        with pytest.raises(
            ValueError, match=r"(HF_ENDPOINT|--base-url): got '?(https|ftp)://(\*\*\*@)?h"
        ) as e:
            make()
        assert "hidden" not in str(e.value)


def test_the_folder_of_another_data_set_is_refused(server, tmp_path):
    folder = job_for(server, tmp_path / "d").data_dir
    with pytest.raises(ValueError, match="holds climbmix, not fineweb-edu; use another --data-dir"):
        run(server, "--dataset=fineweb-edu", "--data-dir", str(folder))
    with pytest.raises(ValueError, match="holds fineweb-edu, not climbmix"):  # known by its path
        run(server, "--data-dir", str(default_data_dir("fineweb-edu")))
    assert (
        on_disk(folder) == []
        and not server.requests
        and not default_data_dir("fineweb-edu").exists()
    )


# ---- verifying -----------------------------------------------------------------------------------


def test_verify_names_every_damaged_file_and_the_damage(tmp_path):
    write(tmp_path, "a.parquet", "b.parquet", "c.parquet", "d.parquet", "e.parquet")
    at = (tmp_path / "b.parquet").read_bytes().index(b"document b.parquet/150")
    # in a page of the second row group, which the footer does not show
    patch(tmp_path / "b.parquet", at, b"?")
    truncate(tmp_path / "c.parquet", 9000)
    not_utf8 = pa.array([b"ok", b"\xff\xfe"], pa.binary()).cast(pa.string(), safe=False)
    (tmp_path / "d.parquet").write_bytes(parquet_bytes(0, text=not_utf8))
    with pytest.raises(OSError, match="3 of 5 shards failed") as e:
        dataset.main(["--verify", "--data-dir", str(tmp_path)])
    b, c, d = sorted(line for line in str(e.value).splitlines() if ".parquet" in line)
    assert "b.parquet" in b and "row group 1" in b and "c.parquet" in c and "truncated or not" in c
    assert "d.parquet" in d and "row group 0" in d and "not UTF-8" in d
