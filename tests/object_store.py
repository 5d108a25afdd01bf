"""
A local S3 for tests and benchmarks: moto's server behind a proxy that injects faults.

    client --> Proxy (latency, faults, swaps; records all requests) --> moto's server

    with object_store() as store:                  # environment and bucket are ready
        store.put("a.bin", b"...")                 # not through the proxy
        store.proxy.faults.append(Fault(name="a.bin", status=503, code="SlowDown", times=2))

    python -m tests.object_store [LATENCY_MS]      # prints its URL, serves until stdin is closed, and then prints the
                                                   # number of requests of each method
    python -m tests.object_store put PATH KEY      # puts a file or folder into the bucket at $AWS_ENDPOINT_URL

A fault is injected into the first `times` requests that match it.
"""

import contextlib
import http.client
import json
import logging
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import pytest

from nanochat.integrations.object_storage import Patience

# long enough for a busy machine
QUICK = Patience(connect_s=1.0, silence_s=2.0, first_answer_s=30.0, give_up_s=30.0)
ACCESS_KEY, SECRET_KEY = "AKIATESTACCESSKEY", "test/secret+key"
BUCKET = "bucket"
Headers = dict[str, str]


@dataclass
class Fault:
    """A change to requests of `method` whose path contains `name`."""

    method: str = "GET"
    name: str = ""
    times: int = 1
    status: int = 0  # answer with this status and an S3 error of this `code`
    code: str = "InternalError"
    stall: bool = False  # never answer
    cut: int = -1  # close the connection after this many bytes of the body
    shift: int = 0  # request a range that begins this many bytes later
    lose: str = ""  # drop this header of the request
    before: Callable[[], object] = lambda: None  # called first, for example to swap the object


@dataclass
class Request:
    """A request that reached the proxy; `range` is (first byte, end) or None."""

    method: str
    path: str
    range: tuple[int, int] | None
    fault: Fault | None
    if_match: str | None


class Proxy(ThreadingHTTPServer):
    """Forwards to `upstream` (host:port)."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: str):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream, self.url = upstream, f"http://127.0.0.1:{self.server_port}"
        self.faults: list[Fault] = []
        self.seen: list[Request] = []
        self.latency_s = 0.0
        self.released = threading.Event()  # ends all stalls
        self._lock = threading.Lock()
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # connections are dropped on purpose

    def pop_fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fault.times and fault.method == method and fault.name in path:
                    fault.times -= 1
                    return fault
        return None

    def gets(self, name: str = "") -> list[Request]:
        return [s for s in self.seen if s.method == "GET" and name in s.path]


class _Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 18
    disable_nagle_algorithm = True

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        span = (int(match[1]), int(match[2]) + 1) if match else None
        fault = self.server.pop_fault(self.command, self.path)
        self.server.seen.append(
            Request(self.command, self.path, span, fault, self.headers.get("If-Match"))
        )
        time.sleep(self.server.latency_s)
        fault = fault or Fault()
        fault.before()
        if fault.stall:
            self.server.released.wait(60)
            self.close_connection = True
            return
        if fault.status:
            text = (
                f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{fault.code}</Code><Message>no</Message>"
                f"<AWSAccessKeyId>{ACCESS_KEY}</AWSAccessKeyId></Error>"
            ).encode()
            status = fault.status
            headers = {"Content-Type": "application/xml"}
            data = text
        else:
            if span and fault.shift:
                self.headers.replace_header(
                    "Range", f"bytes={span[0] + fault.shift}-{span[1] - 1 + fault.shift}"
                )
            del self.headers[fault.lose]
            status, headers, data = send(
                self.server.upstream, self.command, self.path, body, dict(self.headers)
            )
        self.send_response_only(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if fault.cut >= 0:
            data, self.close_connection = data[: fault.cut], True
        self.wfile.write(data)
        self.wfile.flush()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer


def send(
    host: str, method: str, path: str, body: bytes, headers: Headers
) -> tuple[int, Headers, bytes]:
    """(status, headers, body) of the answer to a request."""
    with contextlib.closing(http.client.HTTPConnection(host)) as connection:
        connection.request(method, path, body or None, headers)
        answer = connection.getresponse()
        data = answer.read()
    own = ("connection", "transfer-encoding")  # they describe this connection
    return (
        answer.status,
        {name: value for name, value in answer.getheaders() if name.lower() not in own},
        data,
    )


@dataclass
class Store:
    """A running service with one bucket."""

    proxy: Proxy
    bucket: str = BUCKET

    def path(self, key: str = "") -> str:
        return f"s3://{self.bucket}/{key}"

    def put(self, key: str, data: bytes, bucket: str = "") -> None:
        self._moto("PUT", f"/{bucket or self.bucket}/{key}", data)

    def get(self, key: str) -> bytes:
        return self._moto("GET", f"/{self.bucket}/{key}")

    def delete(self, key: str) -> None:
        self._moto("DELETE", f"/{self.bucket}/{key}")

    def names(self) -> list[str]:
        return list(self.etags())

    def etags(self) -> dict[str, str]:
        """{key: ETag} of all objects."""
        listed = self._moto("GET", f"/{self.bucket}?list-type=2").decode()
        return dict(re.findall(r"<Key>(.*?)</Key>.*?<ETag>(.*?)</ETag>", listed, re.DOTALL))

    def calm(self) -> None:
        """Remove all faults and forget all requests."""
        self.proxy.released.set()
        self.proxy.faults.clear()
        self.proxy.seen.clear()
        self.proxy.latency_s, self.proxy.released = 0.0, threading.Event()

    def make_bucket(self, bucket: str) -> None:
        self._moto("PUT", f"/{bucket}")

    def _moto(self, method: str, path: str, body: bytes = b"") -> bytes:
        return ask(self.proxy.upstream, method, path, body)


def ask(host: str, method: str, path: str, body: bytes = b"") -> bytes:
    """The body of moto's answer to a signed request."""
    sign = f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/20260101/us-east-1/s3/aws4_request"
    status, _, data = send(host, method, path, body, {"Authorization": sign})
    assert status < 300, (method, path, status, data[:300])
    return data


def put_path(host: str, path: Path, key: str) -> None:
    """Put a file, or all files below a folder without those of hidden folders, into the bucket."""
    if path.is_file():
        ask(host, "PUT", f"/{BUCKET}/{key}", path.read_bytes())
        return
    for below in sorted(path.iterdir()):
        if not below.name.startswith("."):
            put_path(host, below, f"{key}/{below.name}")


def environment(url: str) -> dict[str, str]:
    """The environment variables of a client."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
    }


@contextlib.contextmanager
def object_store() -> Iterator[Store]:
    """A service with an empty bucket; sets this process's environment. Skips the test without moto
    or obstore."""
    pytest.importorskip("obstore", reason="no obstore: pip install -e '.[s3]'")
    pytest.importorskip("moto.server", reason="no moto: pip install -e '.[dev]'")
    with serve() as store:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        with mock.patch.dict(os.environ, {**clean, **environment(store.proxy.url)}, clear=True):
            yield store


@contextlib.contextmanager
def serve() -> Iterator[Store]:
    from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs every request
    # moto's own server would search all services for each request
    server = make_server(
        "127.0.0.1", 0, create_backend_app("s3"), threaded=True, request_handler=MotoRequestHandler
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    proxy = Proxy(f"127.0.0.1:{server.server_port}")
    store = Store(proxy)
    try:
        store.make_bucket(store.bucket)
        yield store
    finally:
        proxy.released.set()
        proxy.shutdown()
        proxy.server_close()
        server.shutdown()
        server.server_close()


if __name__ == "__main__" and sys.argv[1:2] == ["put"]:
    put_path(os.environ["AWS_ENDPOINT_URL"].removeprefix("http://"), Path(sys.argv[2]), sys.argv[3])
elif __name__ == "__main__":
    with serve() as running:
        running.proxy.latency_s = float(sys.argv[1]) / 1000 if sys.argv[1:] else 0.0
        print(running.proxy.url, flush=True)
        sys.stdin.read()
        print(json.dumps(Counter(request.method for request in running.proxy.seen)), flush=True)
