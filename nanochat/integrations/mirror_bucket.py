"""A mirror in object storage: its files are objects below a prefix. `nanochat.mirror_store` opens
it for a --mirror-to such as s3://bucket/prefix.

Large objects are written in parts, several at once, and appear when the last part has arrived. The
parts of an interrupted upload stay in the bucket, hidden and paid for, until a lifecycle rule of
the bucket deletes them.

A record is written on condition that the object has the ETag that was read (If-Match), or does not
exist (If-None-Match). If an answer is lost, obstore repeats the request, which then fails because
of its own first success; so after a refusal the object is read again. A service that ignores the
condition would let two machines own a run. The owner finds out with a write that must be refused.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeVar

from nanochat.integrations import object_storage
from nanochat.integrations.object_storage import (
    Patience,
    find,
    list_objects,
    read_whole,
    request,
    split,
)
from nanochat.mirror_store import Versioned

T = TypeVar("T")

# a request that fails is repeated later, by the mirror's own thread
HASTE = Patience(silence_s=120.0, give_up_s=9.0, log_every_s=math.inf)
PART_BYTES = 8 << 20
MOST_PARTS = 9000  # S3 allows 10,000
AT_ONCE = 4  # parts
REFUSALS = ("AlreadyExistsError", "PreconditionError")  # obstore's, which may not be installed


class Bucket:
    """A `mirror_store.Store` below a prefix. ValueError for a path that cannot hold one."""

    def __init__(self, where: str) -> None:
        scheme, name, key = split(where.rstrip("/"))
        if scheme == "msc":
            raise ValueError(
                f"--mirror-to={where}: multi-storage-client has no conditional writes; name the bucket itself"
            )
        self.root = f"{scheme}://{name}/{key}".rstrip("/")
        self.where = f"--mirror-to={self.root}"

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _request(self, name: str, call: Callable[[object_storage.Bucket, str], T]) -> T:
        """The result of a request. An error does not advise to restart the run: the mirror's thread
        tries again."""
        try:
            return request(self._path(name), call, patience=HASTE)
        except OSError as e:
            raise type(e)(str(e).partition(", then restart")[0]) from None

    def names(self, folder: str) -> dict[str, int]:
        stats = list_objects(self._path(folder))
        return {stat.path.rpartition("/")[2]: stat.size for stat in stats}

    def read(self, name: str) -> Versioned:
        def get(bucket: object_storage.Bucket, key: str) -> Versioned:
            answer = bucket.obs.get(bucket.store, key)
            return Versioned(bytes(answer.bytes()), version_of(answer.meta))

        return self._request(name, get)

    def parts(self, name: str) -> Iterator[bytes | memoryview]:
        stat = find(self._path(name))
        if stat is None:
            raise FileNotFoundError(f"{self._path(name)}: no such object")
        return read_whole(stat)

    def write(self, name: str, content: BinaryIO) -> None:
        """See `Store.write`: a large file is sent in parts, at most AT_ONCE of them at a time."""
        size = content.seek(0, 2)
        part_bytes = max(PART_BYTES, math.ceil(size / MOST_PARTS))

        def put(bucket: object_storage.Bucket, key: str) -> None:
            content.seek(0)
            bucket.obs.put(
                bucket.store, key, content, chunk_size=part_bytes, max_concurrency=AT_ONCE
            )

        self._request(name, put)

    def swap(self, name: str, content: bytes, before: Versioned | None) -> Versioned | None:
        """See `Store.swap`; a write whose answer was lost counts if the object now has this content."""
        mode = "create" if before is None else before.version

        def put(bucket: object_storage.Bucket, key: str) -> Versioned | None:
            try:
                written = bucket.obs.put(bucket.store, key, content, mode=mode, use_multipart=False)
            except BaseException as e:  # a panic in Rust is not an Exception
                if type(e).__name__ not in REFUSALS:
                    raise
                return None
            return Versioned(content, version_of(written))

        written = self._request(name, put)
        if written is not None:
            return written
        try:
            found = self.read(name)
        except FileNotFoundError:
            return None
        return found if found.content == content else None

    def delete(self, name: str) -> None:
        def delete(bucket: object_storage.Bucket, key: str) -> None:
            try:
                bucket.obs.delete(bucket.store, key)
            except FileNotFoundError:
                return

        self._request(name, delete)

    def check(self, name: str) -> None:
        if self.swap(name, b"{}", None) is not None:
            self.delete(name)
            raise ValueError(
                f"{self.where}: this service ignores If-None-Match, so two machines could own the run; use one "
                f"with conditional writes, or a folder"
            )


def version_of(answer: dict[str, Any]) -> dict[str, str]:
    """What identifies a state of an object, for a conditional write."""
    named = {name: answer[name] for name in ("e_tag", "version")}
    return {name: value for name, value in named.items() if value is not None}
