"""
A local server that answers as the Hub does, and one that has its files, for tests and benchmarks.

    client --> Hub: revision, tree in pages, resolve: a redirect to ...
           --> Store: ranges of files, by their SHA-256; it would answer 400 to a token
    /files/NAME on the Hub is a file of an ordinary web server, /whole/NAME one without ranges; /moved/NAME
    redirects to the store

    with hub_server() as hub:                       # HF_ENDPOINT is set
        hub.commit("own/set", {"data/a.parquet": b"..."})
        hub.faults.append(Fault(name="resolve", status=429, times=2))

    python -m tests.hub_server FOLDER LATENCY_MS MB_PER_S [COPIES]    # serves own/set until stdin is closed, each file
                                                                      # under COPIES names; prints its URL
"""

import contextlib
import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit

from nanochat.common import begin_launch

TOKEN = "hf_secret"


@dataclass
class Fault:
    """What happens to the first `times` requests whose address contains `name`."""

    name: str = ""
    times: int = 1
    status: int = 0  # answer with this status
    code: str = ""  # and this X-Error-Code
    headers: dict[str, str] = field(default_factory=dict)
    cut: int = -1  # close the connection after this many bytes of the body


@dataclass
class Request:
    """A request: "hub" or "store", its path, its range, and its token."""

    server: str
    path: str
    range: str
    authorization: str


@dataclass
class Hub:
    """What both servers have, and what they have seen."""

    page: int = 1000  # entries of a page of a tree
    latency_s: float = 0.0
    bytes_per_s: float = 0.0  # of all connections together; 0: no limit
    commits: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    branches: dict[tuple[str, str], str] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)  # data sets whose files need TOKEN
    moved: dict[str, str] = field(default_factory=dict)  # {old name: new name}
    in_git: set[str] = field(default_factory=set)  # paths that are not in LFS
    files: dict[str, bytes] = field(default_factory=dict)  # of the ordinary web server
    blobs: dict[str, bytes] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    seen: list[Request] = field(default_factory=list)
    url: str = ""
    store_url: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _free_at: float = 0.0  # when the line has sent everything

    def commit(self, repo: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Make a commit with these files, and nothing else, the branch's newest. Its id."""
        content = sorted((name, sha256(data)) for name, data in files.items())
        commit = hashlib.sha1(json.dumps([repo, content]).encode()).hexdigest()
        self.commits[repo, commit] = dict(files)
        self.branches[repo, branch] = commit
        self.blobs |= {sha256(data): data for data in files.values()}
        return commit

    def commit_folder(self, repo: str, folder: Path, branch: str = "main") -> str:
        """`commit` of all files below a folder."""
        paths = [path for path in folder.rglob("*") if path.is_file()]
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        return self.commit(repo, files, branch)

    def asked(self, name: str, server: str = "") -> list[Request]:
        """The requests whose path contains `name`."""
        return [r for r in self.seen if name in r.path and server in ("", r.server)]

    def pop_fault(self, path: str) -> Fault:
        with self._lock:
            for fault in self.faults:
                if fault.times and fault.name in path:
                    fault.times -= 1
                    return fault
        return Fault()

    def wait_for_line(self, num_bytes: int) -> None:
        """Wait as long as a line of this speed, which all connections share, takes to send bytes."""
        if not self.bytes_per_s:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + num_bytes / self.bytes_per_s
            left = self._free_at - now
        time.sleep(left)


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def of_json(value: object, **headers: str) -> Answer:
    return Answer(200, json.dumps(value).encode(), headers)


def error(status: int, code: str) -> Answer:
    return Answer(status, b'{"error": "no"}', {"X-Error-Code": code})


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    kind = ""
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    disable_nagle_algorithm = True

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, path: str, query: dict[str, list[str]]) -> Answer:
        raise NotImplementedError

    def do_GET(self) -> None:
        token = self.headers.get("Authorization", "")
        span = self.headers.get("Range", "")
        self.hub.seen.append(Request(self.kind, self.path, span, token))
        time.sleep(self.hub.latency_s)
        fault = self.hub.pop_fault(self.path)
        parts = urlsplit(self.path)
        found = self.answer(unquote(parts.path), parse_qs(parts.query))
        if fault.status:
            found = error(fault.status, fault.code)
            found.headers |= fault.headers
        found = in_range(found, span)
        self.hub.wait_for_line(len(found.body))
        self.send_response_only(found.status)
        for name, value in {**found.headers, "Content-Length": str(len(found.body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if fault.cut >= 0:
            found.body, self.close_connection = found.body[: fault.cut], True
        self.wfile.write(found.body)
        self.wfile.flush()


def in_range(found: Answer, span: str) -> Answer:
    """The part of an answer that a request asks for."""
    match = re.fullmatch(r"bytes=(\d+)-(\d+)", span)
    if found.status != 200 or "ETag" not in found.headers or not match:
        return found
    size = len(found.body)
    begin = int(match[1])
    end = min(int(match[2]) + 1, size)
    if begin >= size:
        return Answer(416, b"", {"Content-Range": f"bytes */{size}"})
    headers = {**found.headers, "Content-Range": f"bytes {begin}-{end - 1}/{size}"}
    return Answer(206, found.body[begin:end], headers)


class HubHandler(Handler):
    kind = "hub"

    def answer(self, path: str, query: dict[str, list[str]]) -> Answer:
        if path.startswith(("/files/", "/whole/", "/moved/")):
            return self.web_file(path)
        api = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/(revision|tree)/(.+)", path)
        file = re.fullmatch(r"/datasets/([^/]+/[^/]+)/(resolve)/(.+)", path)
        match = api or file
        if match is None:
            return error(404, "")
        repo, kind, rest = match.groups()
        if repo in self.hub.moved:
            location = self.path.replace(repo, self.hub.moved[repo])
            return Answer(307, b"", {"Location": location})
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if not any(known == repo for known, _ in self.hub.branches):
            return error(404 if has_token else 401, "RepoNotFound")
        revision, inner = self.split_revision(repo, rest)
        commit = self.hub.branches.get((repo, revision), revision)
        if (repo, commit) not in self.hub.commits:
            return error(404, "RevisionNotFound")
        if kind == "revision":
            return of_json({"id": repo, "sha": commit})
        if kind == "tree":
            return self.tree(repo, commit, inner, int(query.get("cursor", ["0"])[0]))
        if repo in self.hub.gated and not has_token:
            return error(401, "GatedRepo")
        return self.resolve(repo, commit, inner)

    def split_revision(self, repo: str, rest: str) -> tuple[str, str]:
        for known, branch in self.hub.branches:
            if known == repo and (rest == branch or rest.startswith(f"{branch}/")):
                return branch, rest[len(branch) + 1 :]
        revision, _, inner = rest.partition("/")
        return revision, inner

    def web_file(self, path: str) -> Answer:
        _, kind, name = path.split("/", 2)
        if name not in self.hub.files:
            return error(404, "")
        if kind == "moved":
            location = f"{self.hub.store_url}/files/{name}?signature=hidden"
            return Answer(302, b"", {"Location": location})
        data = self.hub.files[name]
        if kind == "whole":
            return Answer(200, data)
        return Answer(200, data, {"ETag": f'"{sha256(data)[:8]}"'})

    def tree(self, repo: str, commit: str, inner: str, first: int) -> Answer:
        files = self.hub.commits[repo, commit]
        names = [name for name in sorted(files) if not inner or name.startswith(f"{inner}/")]
        if not names:
            return error(404, "EntryNotFound")
        page = names[first : first + self.hub.page]
        entries = [self.entry(name, files[name]) for name in page]
        more = first + self.hub.page
        below = f"/{inner}" if inner else ""
        address = (
            f"{self.hub.url}/api/datasets/{repo}/tree/{commit}{below}?recursive=true&cursor={more}"
        )
        headers = {"Link": f'<{address}>; rel="next"'} if more < len(names) else {}
        return of_json(entries, **headers)

    def entry(self, name: str, data: bytes) -> dict[str, object]:
        git_id = hashlib.sha1(data).hexdigest()
        entry = {"type": "file", "path": name, "size": len(data), "oid": git_id}
        if name in self.hub.in_git:
            return entry
        return {**entry, "lfs": {"oid": sha256(data), "size": len(data), "pointerSize": 134}}

    def resolve(self, repo: str, commit: str, inner: str) -> Answer:
        data = self.hub.commits[repo, commit].get(inner)
        if data is None:
            return error(404, "EntryNotFound")
        if inner in self.hub.in_git:
            return Answer(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"'})
        location = f"{self.hub.store_url}/{sha256(data)}?signature=hidden"
        linked = {"X-Linked-Etag": f'"{sha256(data)}"', "X-Linked-Size": str(len(data))}
        return Answer(302, b"", {"Location": location, "X-Repo-Commit": commit, **linked})


class StoreHandler(Handler):
    kind = "store"

    def answer(self, path: str, query: dict[str, list[str]]) -> Answer:
        if "Authorization" in self.headers or query.get("signature") != ["hidden"]:
            return error(400, "")
        name = path.removeprefix("/files/")
        data = self.hub.files.get(name, self.hub.blobs.get(name[1:], b""))
        return Answer(200, data, {"ETag": f'"store-{len(data)}"'})


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # connections are dropped on purpose


@contextlib.contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Both servers."""
    servers = []
    for kind in (HubHandler, StoreHandler):
        handler: type[Handler] = type(kind.__name__, (kind,), {"hub": hub})
        server = Server(("127.0.0.1", 0), handler)
        servers.append(server)
        poll = {"poll_interval": 0.01}
        threading.Thread(target=server.serve_forever, kwargs=poll, daemon=True).start()
    hub.url, hub.store_url = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
    """An empty Hub, which the environment names; no token."""
    with serve(Hub()) as hub, mock.patch.dict(os.environ, {"HF_ENDPOINT": hub.url}):
        os.environ.pop("HF_TOKEN", None)
        begin_launch()
        yield hub


def main(folder: str, latency_ms: str, mb_per_s: str, copies: str = "1") -> None:
    hub = Hub(latency_s=float(latency_ms) / 1000, bytes_per_s=float(mb_per_s) * 1e6)
    files = {path.name: path.read_bytes() for path in sorted(Path(folder).glob("*.parquet"))}
    named = {
        f"data/{number:05d}-{name}": data
        for number in range(int(copies))
        for name, data in files.items()
    }
    hub.commit("own/set", named)
    with serve(hub):
        print(hub.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
