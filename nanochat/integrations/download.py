"""Downloads and verifies the shards of a known data set over HTTP, and downloads the tasks of the
CORE metric.

    shard_00007.parquet.part   grows; after an interruption the download starts over
      -> has the server's Content-Length -> the footer opens, `text` exists -> fsync, rename
    shard_00007.parquet        complete whenever it exists

If the server is busy (429, 5xx), does not answer or stops in the middle, the request is retried
after a growing pause, or after the time in its Retry-After header. Each retry is logged. A shard is
about 100 MB; resuming inside one would need proof that the server still has the same object, and is
not worth the code.

HF_ENDPOINT names a server to use instead of huggingface.co. HF_TOKEN is sent only to that server,
and never printed.
"""

import argparse
import fcntl
import logging
import os
import re
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from tqdm import tqdm
from urllib3.util import Retry

from nanochat.cli import Parser, setup_logging
from nanochat.common import counted, each, fsync_dir, get_base_dir, public, write_json
from nanochat.files import (
    DATASET_NAME,
    DATASETS,
    HUB,
    MARKER,
    default_data_dir,
    index_to_filename,
    known_dataset,
    list_parquet_files,
)
from nanochat.text import open_parquet
from nanochat.text_kinds import read_texts

log = logging.getLogger(__name__)

ATTEMPTS = 6
BACKOFF_S = 1.0  # the first pause between attempts; each later one is twice as long
TIMEOUT_S = 60.0  # until the next byte arrives
# limits; the real archive is 0.16 GB in about 100 files
BUNDLE_BYTES, BUNDLE_ENTRIES = 2 << 30, 10_000
# as in nanochat
BUNDLE_NAME = "eval_bundle"
BUNDLE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com"


@dataclass(frozen=True)
class Downloader:
    """The source and destination of shards; see `make_downloader`."""

    base_url: str
    data_dir: Path
    token: str = field(default="", repr=False)  # sent only to the server of `base_url`

    def fetch(self, index: int) -> None:
        """Download shard `index` unless it exists. After an OSError no file has the final name."""
        final = self.data_dir / index_to_filename(index)
        part, url = Path(f"{final}.part"), f"{self.base_url}/{final.name}"
        if final.exists():
            return
        try:
            copy(url, part, self.token)
        except OSError as e:
            raise OSError(
                f"{url}: {e}; check the network, --base-url and HF_ENDPOINT (HF_TOKEN for a "
                f"401 or 403)"
            ) from e
        try:
            open_parquet(part).close()
        except ValueError as e:
            part.unlink()
            raise OSError(
                f"{url}: the complete download is not a usable shard: {e}; check --base-url"
            ) from e
        os.replace(part, final)
        fsync_dir(self.data_dir)


def hub_access() -> tuple[str, str]:
    """(address of the Hub, token), from HF_ENDPOINT and HF_TOKEN. The token is for this server only.
    ValueError if one of the variables is unusable."""
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or HUB
    check_url("HF_ENDPOINT", endpoint)
    token = os.environ.get("HF_TOKEN", "").strip()
    if not re.fullmatch(r"[!-~]*", token):  # the HTTP library's error would print it
        raise ValueError(
            "HF_TOKEN: contains characters that an HTTP header cannot carry; set it again"
        )
    return endpoint, token


def make_downloader(
    name: str = DATASET_NAME, *, base_url: str | None = None, data_dir: Path | None = None
) -> Downloader:
    """A Downloader for a known data set, with HF_ENDPOINT and HF_TOKEN from the environment.
    Creates its folder and writes the data set's name there. ValueError for an unusable variable or
    address, or if the folder holds a different data set."""
    endpoint, token = hub_access()
    url = (base_url or DATASETS[name].base_url).rstrip("/")
    if url.startswith(f"{HUB}/"):
        url = endpoint + url.removeprefix(HUB)
    check_url("--base-url", url)
    data_dir = data_dir or default_data_dir(name)
    if (held := known_dataset(data_dir) or name) != name:
        raise ValueError(
            f"{data_dir}: holds {held}, not {name}; use another --data-dir, or --dataset={held}"
        )
    data_dir.mkdir(parents=True, exist_ok=True)
    write_json(
        data_dir / MARKER,
        {"name": name, "validation": index_to_filename(DATASETS[name].last_shard)},
    )
    return Downloader(url, data_dir, token if urlsplit(url)[:2] == urlsplit(endpoint)[:2] else "")


def copy(url: str, part: Path, token: str = "") -> None:
    """Download `url` to a file and fsync it. OSError after an answer that a retry would not change,
    or after the last attempt; each retry is logged before it starts."""

    def sign(request: requests.PreparedRequest) -> requests.PreparedRequest:
        # ~/.netrc would override a session header; the library drops this one if it is redirected
        # to another server
        request.headers["Authorization"] = f"Bearer {token}"
        return request

    for attempt in range(1, ATTEMPTS + 1):
        pause = BACKOFF_S * 2 ** (attempt - 1)
        reached = url
        try:
            with requests.get(
                url, stream=True, timeout=TIMEOUT_S, auth=sign if token else None
            ) as response:
                status = response.status_code
                reached = response.url
                if status == 200:
                    with open(part, "wb") as f:
                        chunks = response.iter_content(1 << 20)
                        f.writelines(tqdm(chunks, part.name, unit="MiB", leave=False, disable=None))
                        f.flush()
                        os.fsync(f.fileno())
                    return
                if status != 429 and status < 500:
                    raise OSError(f"got HTTP {status} {response.reason}{redirected(url, reached)}")
                problem = f"got HTTP {status}, so the server is busy{redirected(url, reached)}"
                pause = Retry().get_retry_after(response.raw) or pause
        except requests.RequestException as e:
            cause = _original(e)
            if e.request is not None and e.request.url:
                reached = e.request.url
            problem = f"no complete answer ({public(str(cause))}){redirected(url, reached)}"
        if attempt < ATTEMPTS:
            log.warning(
                "%s: %s; attempt %d of %d in %.0f s", url, problem, attempt + 1, ATTEMPTS, pause
            )
            time.sleep(pause)
    raise OSError(f"gave up after {ATTEMPTS} attempts; the last: {problem}")


def _original(error: BaseException) -> BaseException:
    """The error that led to this one, by way of others: it is the most specific."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def redirected(url: str, reached: str) -> str:
    """The end of a sentence about a failed request: the server that failed, if it is not the one of
    `url`. Its address may be signed, so only its host is shown."""
    first, last = urlsplit(url).netloc, urlsplit(reached).netloc.rpartition("@")[2]
    return (
        f" from {last}, to which {first} redirects; that host must be reachable, too"
        if first != last
        else ""
    )


def check_url(given_by: str, url: str) -> None:
    """ValueError unless `url` is an HTTP address without credentials or a query."""
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ValueError(f"{given_by}: got {public(url)!r}, expected an address such as {HUB}")
    if public(url) != url:
        raise ValueError(
            f"{given_by}: got {public(url)}, which may contain a secret; set HF_TOKEN instead"
        )


def problems(call: Callable[[Any], object], items: Sequence[Any], *, num_workers: int) -> list[str]:
    """The error of `call` for each item, '' for success. Several calls run at once, with a progress
    bar."""

    def problem_of(item: object) -> str:
        try:
            call(item)
        except (OSError, ValueError) as e:
            return str(e)
        return ""

    results = each(problem_of, items, at_once=num_workers)
    return list(tqdm(results, total=len(items), unit="shard", disable=None))


def download(job: Downloader, indices: Sequence[int], *, num_workers: int) -> list[str]:
    """Download shards in parallel, once no other process downloads to this folder. Returns a
    shard's error or ''."""
    with open(job.data_dir / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return problems(job.fetch, indices, num_workers=num_workers)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .zip file. ValueError if it is damaged or would fill the disk (`zipfile` writes no
    more bytes than the entries declare)."""
    if archive.stat().st_size > BUNDLE_BYTES:
        raise ValueError(
            f"{archive.name}: it has {archive.stat().st_size:,} bytes, expected at most {BUNDLE_BYTES:,}"
        )
    try:
        with zipfile.ZipFile(archive) as opened:
            entries = opened.infolist()
            num_bytes = sum(entry.file_size for entry in entries)
            if len(entries) > BUNDLE_ENTRIES or num_bytes > BUNDLE_BYTES:
                raise ValueError(
                    f"{len(entries):,} entries with {num_bytes:,} bytes, expected at most "
                    f"{BUNDLE_ENTRIES:,} with {BUNDLE_BYTES:,}"
                )
            opened.extractall(folder)  # keeps every entry inside the folder
    except Exception as e:  # a damaged header raises one of a dozen types
        raise ValueError(f"{archive.name}: it cannot be unpacked ({type(e).__name__}: {e})") from e


def fetch_bundle(base_url: str | None, folder: Path) -> None:
    """Download the tasks of the CORE metric into `folder`, or check those that it already holds.
    The archive has no published checksum, so it counts as good if its own checksums match and all
    its items can be read. After an OSError the folder does not exist."""
    from nanochat.core_eval import read_bundle

    url = f"{(base_url or BUNDLE_URL).rstrip('/')}/{BUNDLE_NAME}.zip"
    check_url("--base-url", url)
    if not folder.exists():
        print(f"downloading {url} -> {folder}", flush=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{BUNDLE_NAME}.", dir=folder.parent) as temporary:
            archive, unpacked = Path(temporary) / "archive", Path(temporary) / BUNDLE_NAME
            try:
                copy(url, archive)
                unpack(archive, Path(temporary))
                read_bundle(unpacked)
            except (OSError, ValueError) as e:
                raise OSError(
                    f"{url}: {e}; nothing was unpacked. Set --base-url to another folder with the archive, "
                    f"or unpack {BUNDLE_NAME}.zip yourself to create {folder / 'core.yaml'}"
                ) from e
            os.replace(unpacked, folder)
        fsync_dir(folder.parent)
    tasks = read_bundle(folder)
    print(f"{folder}: {len(tasks)} tasks with {sum(len(task.items) for task in tasks):,} items")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags of the command. ValueError for numbers that cannot be."""
    parser = Parser(
        description="Download text to train on, or verify downloaded text.\n\n"
        "    python -m nanochat.dataset -n 8    # 8 shards for training and one for validation"
    )
    parser.add_argument(
        "-n",
        "--num-files",
        type=int,
        default=-1,
        help="number of training shards to download, about 100 MB each; -1: all (thousands)",
    )
    parser.add_argument(
        "-w", "--num-workers", type=int, default=4, help="number of shards to download at once"
    )
    parser.add_argument(
        "--dataset", choices=DATASETS, default=DATASET_NAME, help="data set to download or verify"
    )
    parser.add_argument(
        "--base-url", help="address of a different folder that has the shards, or eval_bundle.zip"
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        help="folder to use instead of <base dir>/data/DATASET; "
        "<base dir> is $NANOCHAT_BASE_DIR or ~/.cache/nanochat",
    )
    parser.add_argument(
        "--eval-bundle",
        action="store_true",
        help="download the tasks of the CORE metric instead, to <base dir>/eval_bundle",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="instead of downloading, read every downloaded shard in full",
    )
    args = parser.parse_args(argv)
    if args.num_files < -1 or args.num_workers < 1:
        raise ValueError(
            f"-n {args.num_files} -w {args.num_workers}: expected -n of at least -1 (all) and -w of at "
            f"least 1"
        )
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Download or verify. ValueError for bad flags; OSError, which lists the shards that failed."""
    args = parse_args(argv)
    setup_logging()
    if args.eval_bundle:
        return fetch_bundle(args.base_url, args.data_dir or get_base_dir() / BUNDLE_NAME)
    if args.verify:
        paths = list_parquet_files(args.data_dir or default_data_dir(args.dataset))
        errors = problems(
            lambda path: sum(1 for _ in read_texts(path)), paths, num_workers=args.num_workers
        )
        advice = "Delete them and run this again without --verify."
    else:
        job = make_downloader(args.dataset, base_url=args.base_url, data_dir=args.data_dir)
        last = DATASETS[args.dataset].last_shard
        num_train = last if args.num_files == -1 else min(args.num_files, last)
        indices = [last, *range(num_train)]  # validation first, because every run needs it
        print(
            f"{args.dataset}: {counted(num_train, 'training shard')} and {index_to_filename(last)} for validation "
            f"-> {job.data_dir}"
        )
        errors = download(job, indices, num_workers=args.num_workers)
        advice = "Finished shards are kept: run the same command again to continue."
    if failed := sorted(filter(None, errors)):
        lines = "".join(f"  {error}\n" for error in failed)
        raise OSError(f"{len(failed)} of {len(errors)} shards failed:\n{lines}{advice}")
    print(f"complete: {counted(len(errors), 'shard')}")
