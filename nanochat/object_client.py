"""
Clients of object stores: one question to a store, one answer or one kind of refusal. No second try is made here.

    s3://bucket/key   gs://bucket/key   az://container/key     obstore, the extra `s3`
    msc://profile/key                                          multi-storage-client, where that is installed

Everything that a store, or the network before it, may do is told apart once, here:

    no such object or bucket      FileNotFoundError     403, no credentials     PermissionError
    another object than before    Changed               anything that may pass  Transient, worth another try

What a store says in an error may hold an access key or a signed URL. So its text is never passed on: errors are ours,
with the HTTP status and the S3 code at most, and `from None`.

Measured on loopback (moto's server behind a proxy that keeps objects; 32 threads; client's CPU a request of 1 MiB; time
to import): obstore 650 MB/s, 1.2 ms, 0.05 s; pyarrow.fs 495 MB/s, 1.9 ms, 0.6 s; s3fs 190 MB/s, 3.7 ms, 0.8 s. Only
obstore sends If-Match and gives back ETag, size and range of the same answer; it releases the GIL, refuses a wrong
Content-Range and a short body by itself, and is one wheel without dependencies (s3fs pins botocore).
"""

import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, BinaryIO, Protocol

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_S3_ENDPOINT_URL", "AWS_ENDPOINT_URL")
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
               "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE")  # any of which lets a client try
LOOKED_AT = (*ENDPOINTS, *CREDENTIALS, "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "MSC_CONFIG")  # another client
RETRIED = {"408", "429"}  # beside all of 5xx
KEYS_HINT = {"s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY", "gs": "GOOGLE_APPLICATION_CREDENTIALS",
             "az": "AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY", "msc": "MSC_CONFIG"}
TROUBLES = (  # what the text of an error that has no status shows -> what we say
    ("Received non-partial", "it sent the whole object for a range"), ("Timeout", "no answer in time"),
    ("TimedOut", "no answer in time"), ("UnexpectedEof", "its answer broke off"),
    ("Interrupted", "its answer broke off"), ("dns error", "the endpoint's name cannot be resolved"),
    ("ConnectionRefused", "no connection"), ("error sending request", "no connection"))


class Transient(Exception):
    """What went wrong, and may not go wrong the next time."""


class Changed(Exception):
    """The object is not the one that was asked for."""


@dataclass(frozen=True)
class Found:
    """What a store says of an object."""

    key: str
    size: int
    etag: str  # "" where the store has none


@dataclass(frozen=True)
class Part:
    """Bytes begin .. begin + len(data) - 1 of an object, and what the same answer says of the object."""

    data: memoryview
    begin: int
    found: Found


class Client(Protocol):
    """One bucket. Called from several threads at once."""

    worked: bool  # whether it ever answered, so that the bucket is there

    def head(self, key: str) -> Found: ...

    def list(self, prefix: str) -> list[Found]: ...

    def get(self, key: str, begin: int, end: int, etag: str) -> Part: ...

    def put(self, key: str, data: bytes | BinaryIO, part_bytes: int) -> None: ...

    def delete(self, key: str) -> None: ...


def open_client(scheme: str, bucket: str, *, connect_s: float, silence_s: float) -> Client:
    """The client of a bucket; a connection, or a byte of an answer, may take so long. ValueError where a package is
    missing or the environment makes no sense, PermissionError where there are no credentials."""
    return _open(scheme, bucket, connect_s, silence_s, tuple(map(os.environ.get, LOOKED_AT)))


@functools.lru_cache(maxsize=64)
def _open(scheme: str, bucket: str, connect_s: float, silence_s: float, environment: tuple[str | None, ...]) -> Client:
    if scheme == "msc":
        return MscClient(bucket)
    return ObstoreClient(scheme, bucket, connect_s=connect_s, silence_s=silence_s)


def endpoint_url() -> str:
    """The S3 endpoint that the environment names, "" for AWS's own."""
    return next((os.environ[name] for name in ENDPOINTS if os.environ.get(name)), "")


# ---- obstore --------------------------------------------------------------------------------------------------------

class ObstoreClient:
    """S3, Google Cloud Storage or Azure, by obstore. Credentials come from the environment."""

    def __init__(self, scheme: str, bucket: str, *, connect_s: float, silence_s: float):
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise ValueError(f"{scheme}://{bucket}: object storage needs obstore; pip install 'nanochat[s3]'") from None
        self.obs: Any = obstore
        self.scheme, self.bucket = scheme, bucket
        self.worked = False  # whether an answer ever came
        endpoint = endpoint_url() if scheme == "s3" else ""
        if endpoint and not re.match(r"https?://[^/]", endpoint):
            raise ValueError(f"{scheme}://{bucket}: AWS_ENDPOINT_URL is no URL; expected http://HOST:PORT or https://HOST")
        if endpoint and not any(os.environ.get(name) for name in CREDENTIALS):
            raise self._no_credentials()  # a store that is not Amazon's knows no role of this machine
        options: dict[str, Any] = {"allow_http": endpoint.startswith("http://"), "timeout": timedelta(hours=1),
                                   "connect_timeout": timedelta(seconds=connect_s),
                                   "read_timeout": timedelta(seconds=silence_s)}
        try:
            open_store: Any = from_url  # its types want each option by name
            self.store = open_store(f"{scheme}://{bucket}", client_options=options, retry_config={"max_retries": 0},
                                    **({"endpoint": endpoint} if endpoint else {}))
        except (obstore.exceptions.BaseError, ValueError):
            raise ValueError(f"{scheme}://{bucket}: the environment does not tell how to reach it; check "
                             f"{KEYS_HINT[scheme]}{', AWS_ENDPOINT_URL' if scheme == 's3' else ''}") from None

    def head(self, key: str) -> Found:
        try:
            meta = self.obs.head(self.store, key)
        except (FileNotFoundError, self.obs.exceptions.BaseError) as e:
            raise self._error(key, e) from None
        return self._found(meta)

    def list(self, prefix: str) -> list[Found]:
        try:
            return [self._found(m) for chunk in self.obs.list(self.store, prefix or None) for m in chunk]
        except (FileNotFoundError, self.obs.exceptions.BaseError) as e:
            raise self._error(prefix, e) from None

    def get(self, key: str, begin: int, end: int, etag: str) -> Part:
        options: dict[str, Any] = {"range": (begin, end), **({"if_match": etag} if etag else {})}
        try:
            answer = self.obs.get(self.store, key, options=options)
            found, first = self._found(answer.meta), answer.range[0]
            return Part(memoryview(answer.bytes()), first, found)
        except (FileNotFoundError, self.obs.exceptions.BaseError) as e:
            raise self._error(key, e) from None

    def put(self, key: str, data: bytes | BinaryIO, part_bytes: int) -> None:
        try:
            self.obs.put(self.store, key, data, use_multipart=not isinstance(data, bytes), chunk_size=part_bytes,
                         max_concurrency=4)
        except (FileNotFoundError, self.obs.exceptions.BaseError) as e:
            raise self._error(key, e) from None

    def delete(self, key: str) -> None:
        try:
            self.obs.delete(self.store, key)
        except FileNotFoundError:
            pass
        except self.obs.exceptions.BaseError as e:
            raise self._error(key, e) from None

    def _found(self, meta: Any) -> Found:
        self.worked = True
        return Found(meta["path"], meta["size"], meta["e_tag"] or "")

    def _no_credentials(self) -> PermissionError:
        public = "; for a public bucket AWS_SKIP_SIGNATURE=true" if self.scheme == "s3" else ""
        return PermissionError(f"{self.scheme}://{self.bucket}: no credentials; set {KEYS_HINT[self.scheme]}{public}")

    def _error(self, key: str, e: Exception) -> Exception:
        """What became of a question, without a word of the store's own."""
        text, kinds = str(e), self.obs.exceptions
        path = f"{self.scheme}://{self.bucket}/{key}"
        status, code = _status(text)
        said = f"HTTP {status} {code}".rstrip()
        if code == "NoSuchBucket":
            return self.no_bucket(path)
        if isinstance(e, FileNotFoundError | kinds.NotFoundError):
            return FileNotFoundError(f"{path}: no such object")
        if isinstance(e, kinds.PreconditionError):
            return Changed()
        if isinstance(e, kinds.PermissionDeniedError | kinds.UnauthenticatedError):
            return PermissionError(f"{path}: the store refuses it ({said}); check {KEYS_HINT[self.scheme]} and what "
                                   f"they may do with {self.bucket}")
        if re.search(r"169\.254\.169\.254|metadata\.google\.internal", text) and not self.worked:
            return self._no_credentials()
        if "redirect" in text.split("\n")[0]:
            return ValueError(f"{path}: the bucket lies in another region; set AWS_DEFAULT_REGION")
        if status and status[0] != "5" and status not in RETRIED and code != "RequestTimeout":
            return OSError(f"{path}: the store refuses it ({said}); check {KEYS_HINT[self.scheme]}, and where "
                           f"AWS_ENDPOINT_URL points" if self.scheme == "s3" else f"{path}: refused ({said})")
        return Transient(said if status else _trouble(text))

    def no_bucket(self, path: str) -> FileNotFoundError:
        return FileNotFoundError(f"{path}: there is no bucket {self.bucket}; check the path"
                                 f"{', and where AWS_ENDPOINT_URL points' if self.scheme == 's3' else ''}")


def _status(text: str) -> tuple[str, str]:
    """(HTTP status, S3 code) that an error of obstore tells of, "" where there is none."""
    status, code = re.search(r"status code: (\d{3})", text), re.search(r"<Code>(\w{1,40})</Code>", text)
    return status[1] if status else "", code[1] if code else ""


def _trouble(text: str) -> str:
    wrong = re.search(r"Requested (\d+)\.\.(\d+), got (\d+)\.\.(\d+)", text)
    if wrong:
        return "it sent bytes {2} to {3} for {0} to {1}".format(*wrong.groups())
    return next((said for shown, said in TROUBLES if shown in text), "no usable answer")


# ---- multi-storage-client -------------------------------------------------------------------------------------------

class MscClient:
    """A profile of multi-storage-client, which has its own configuration and credentials. It tells no range and no
    ETag of an answer, so what it gives is held against the size asked for, and the object is looked at anew."""

    worked = False  # it does not tell

    def __init__(self, profile: str):
        try:
            import multistorageclient
        except ImportError:
            raise ValueError(f"msc://{profile}: needs multi-storage-client; pip install multi-storage-client") from None
        self.profile = profile
        try:
            self.client, _ = multistorageclient.resolve_storage_client(f"msc://{profile}/")
            self.range = multistorageclient.types.Range
        except Exception:
            raise ValueError(f"msc://{profile}: no such profile; MSC_CONFIG names the file of profiles") from None

    def _ask(self, key: str, ask: Any) -> Any:
        try:
            return ask()
        except FileNotFoundError:
            raise FileNotFoundError(f"msc://{self.profile}/{key}: no such object") from None
        except PermissionError:
            raise PermissionError(f"msc://{self.profile}/{key}: the store refuses it; check {KEYS_HINT['msc']}"
                                  ) from None
        except Exception as e:  # it has no common class of errors, and their texts may hold anything
            raise Transient(type(e).__name__) from None

    def head(self, key: str) -> Found:
        meta = self._ask(key, lambda: self.client.info(key))
        return Found(key, meta.content_length, meta.etag or "")

    def list(self, prefix: str) -> list[Found]:
        def ask() -> list[Found]:
            metas: Iterator[Any] = self.client.list(path=prefix)
            return [Found(m.key.removeprefix(f"msc://{self.profile}/"), m.content_length, m.etag or "") for m in metas]
        return self._ask(prefix, ask)

    def get(self, key: str, begin: int, end: int, etag: str) -> Part:
        data = self._ask(key, lambda: self.client.read(key, byte_range=self.range(offset=begin, size=end - begin)))
        return Part(memoryview(data), begin, self.head(key))

    def put(self, key: str, data: bytes | BinaryIO, part_bytes: int) -> None:
        self._ask(key, lambda: self.client.write(key, data if isinstance(data, bytes) else data.read()))

    def delete(self, key: str) -> None:
        self._ask(key, lambda: self.client.delete(key))
