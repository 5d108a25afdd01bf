"""
Downloads: the shards of a known data set over HTTP, and whether those that are here are whole.

    shard_00007.parquet.part   grows; whatever breaks off begins again
      -> as long as the server said -> the footer opens, `text` is there -> fsync, rename
    shard_00007.parquet        whole, or not there

Two layers try again, each what it can see: urllib3's Retry repeats a request that got no body
(refused, reset, 429, 5xx; exponential backoff, Retry-After); a body that breaks off is invisible
to it, so `Downloader.fetch` repeats that. A shard is some 100 MB, so going on in the middle of
one, and the proof that it is still the same object, is not worth its code.
"""

import fcntl
import logging
import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.auth import AuthBase
from tqdm import tqdm
from urllib3.util import Retry

from nanochat.common import Parser, fsync_dir, setup_logging, write_json
from nanochat.dataset import (
    DATASETS,
    DEFAULT_DATASET,
    HUB,
    MARKER,
    Dataset,
    index_to_filename,
    list_parquet_files,
    pinned_dataset,
)
from nanochat.text import open_parquet, read_texts

log = logging.getLogger(__name__)

ATTEMPTS = 6  # requests without an answer, and bodies that break off
BACKOFF_S = 1.0  # the first pause between attempts; it doubles, up to a minute
TIMEOUT_S = 60.0  # of silence


class DownloadError(OSError):
    """A shard could not be fetched; the message says from where, why, and what to do."""


HINTS = {401: "set HF_TOKEN", 403: "set HF_TOKEN", 404: "check --dataset, --base-url and "
                                                        "HF_ENDPOINT"}


@dataclass(frozen=True)
class Downloader:
    """Where shards come from and go to; `make_downloader` fills it from the command line and the
    environment."""

    base_url: str
    data_dir: Path
    token: str = field(default="", repr=False)  # for that server alone: requests drops it when it is sent elsewhere
    stop: threading.Event = field(default_factory=threading.Event)

    def fetch(self, index: int) -> Path:
        """Bring shard `index` here unless it is. Raises DownloadError, or OSError for the disk's
        troubles, and then leaves nothing under the final name."""
        final = self.data_dir / index_to_filename(index)
        part, url = Path(f"{final}.part"), f"{self.base_url}/{final.name}"
        if final.exists():
            return final
        for attempt in range(ATTEMPTS):
            try:
                self._copy(url, part)
                break
            except requests.RequestException as e:  # the body broke off
                problem = e
            if self.stop.wait(min(60.0, BACKOFF_S * 2**attempt)):
                raise DownloadError(f"{url}: interrupted")
        else:
            raise DownloadError(f"{url}: gave up after {ATTEMPTS} attempts; the last: {problem}")
        try:
            open_parquet(part).close()
        except ValueError as e:
            part.unlink()
            raise DownloadError(f"{url}: it arrived in full and is no good: {e}") from e
        os.replace(part, final)
        fsync_dir(self.data_dir)
        return final

    def _copy(self, url: str, part: Path) -> None:
        """Copy what lies at `url`. What urllib3 cannot mend by asking again, because no answer
        came or a final one, is a DownloadError; a body that breaks off is a RequestException."""
        retry = Retry(total=ATTEMPTS - 1, backoff_factor=BACKOFF_S, backoff_max=60, allowed_methods=("GET",),
                      status_forcelist=(429, 500, 502, 503, 504), raise_on_status=False)
        with requests.Session() as session:
            session.mount("http://", HTTPAdapter(max_retries=retry))
            session.mount("https://", HTTPAdapter(max_retries=retry))
            if self.token:
                session.auth = _Bearer(self.token)
            try:
                response = session.get(url, stream=True, timeout=TIMEOUT_S)
            except requests.RequestException as e:
                raise DownloadError(f"{url}: no answer ({e}); check the network, --base-url and "
                                    f"HF_ENDPOINT") from e
            with response, open(part, "wb") as f:
                if response.status_code != 200:
                    hint = HINTS.get(response.status_code, "try again later")
                    raise DownloadError(f"{url}: got HTTP {response.status_code} "
                                        f"{response.reason}; {hint}")
                for block in response.iter_content(1 << 20):
                    if self.stop.is_set():
                        raise DownloadError(f"{url}: interrupted")
                    f.write(block)
                f.flush()
                os.fsync(f.fileno())


class _Bearer(AuthBase):
    """Sends a token. As an auth object, because a plain header would lose against an entry in
    ~/.netrc."""

    def __init__(self, token: str):
        self.token = token

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self.token}"
        return request


def make_downloader(dataset: Dataset, *, base_url: str | None = None, data_dir: Path | None = None) -> Downloader:
    """A Downloader that honours HF_ENDPOINT (stands in for the hub) and HF_TOKEN (for that
    endpoint only); makes the folder and notes there which data set it holds. ValueError where one
    of these is unusable or the folder holds another data set."""
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or HUB
    url = (base_url or dataset.base_url).rstrip("/")
    url = endpoint + url.removeprefix(HUB) if url.startswith(HUB + "/") else url
    for flag, value in (("HF_ENDPOINT", endpoint), ("--base-url", url)):
        if urlsplit(value).scheme not in ("http", "https") or not urlsplit(value).netloc:
            raise ValueError(f"{flag}: got {value!r}, expected a URL such as {HUB}")
    token = os.environ.get("HF_TOKEN", "").strip()
    if not re.fullmatch(r"[!-~]*", token):  # caught here, for the HTTP library's own complaint would print it
        raise ValueError("HF_TOKEN: has characters that a header cannot carry; set it again")
    data_dir = data_dir or dataset.data_dir
    data_dir.mkdir(parents=True, exist_ok=True)
    there = pinned_dataset(data_dir) or dataset
    if there != dataset:
        raise ValueError(f"{data_dir}: holds {there.name}, got --dataset {dataset.name}; use "
                         f"another --data-dir")
    write_json(data_dir / MARKER, {"name": dataset.name, "validation": dataset.val_filename})
    return Downloader(url, data_dir, token if urlsplit(url)[:2] == urlsplit(endpoint)[:2] else "")


def download_single_file(index: int, *, dataset: Dataset = DEFAULT_DATASET, base_url: str | None = None,
                         data_dir: Path | None = None) -> bool:
    """Fetch one shard of a known data set unless it is here; True when it is. The reason for a
    False is logged."""
    try:
        make_downloader(dataset, base_url=base_url, data_dir=data_dir).fetch(index)
    except OSError as e:
        log.error("%s: %s", index_to_filename(index), e)
        return False
    return True


def download(job: Downloader, indices: Sequence[int], *, num_workers: int) -> dict[str, str]:
    """Fetch shards in parallel under one progress bar; waits while another process does so in the
    same folder. Returns {file name: reason} of those that failed."""
    failed: dict[str, str] = {}
    with (open(job.data_dir / ".lock", "w") as lock, ThreadPoolExecutor(num_workers) as pool,
          tqdm(total=len(indices), unit="shard", disable=None) as bar):
        fcntl.flock(lock, fcntl.LOCK_EX)
        futures = {pool.submit(job.fetch, i): index_to_filename(i) for i in indices}
        try:
            for future in as_completed(futures):
                try:
                    future.result()
                except (OSError, ValueError) as e:
                    failed[futures[future]] = str(e)
                bar.update()
        except BaseException:
            job.stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return dict(sorted(failed.items()))


def verify(data_dir: Path, *, num_workers: int) -> dict[str, str]:
    """Read every page of every shard in a folder. Returns {file name: what is wrong, or ''}."""

    def problem_of(path: str) -> str:
        try:
            for _ in read_texts(path):
                pass
        except (ValueError, OSError) as e:
            return str(e)
        return ""

    paths = list_parquet_files(data_dir)
    with ThreadPoolExecutor(num_workers) as pool:
        found = tqdm(pool.map(problem_of, paths), total=len(paths), unit="shard", disable=None)
        return dict(zip(paths, found, strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    """Download or verify. Raises ValueError for bad flags and OSError that lists what failed."""
    parser = Parser(description="Download the shards of a data set, or check those that are here.")
    parser.add_argument("-n", "--num-files", type=int, default=-1, help="training shards, from "
                                                                        "the first on; -1 = all")
    parser.add_argument("-w", "--num-workers", type=int, default=4, help="shards at a time")
    parser.add_argument("--dataset", choices=DATASETS, default=DEFAULT_DATASET.name, help="which "
                                                                                          "data "
                                                                                          "set")
    parser.add_argument("--base-url", help="fetch the shards from here instead")
    parser.add_argument("--data-dir", type=Path, help="folder to use instead of "
                                                      "$NANOCHAT_BASE_DIR/data/DATASET")
    parser.add_argument("--verify", action="store_true", help="download nothing; read all that is "
                                                              "here")
    args = parser.parse_args(argv)
    setup_logging()
    if args.num_files < -1 or args.num_workers < 1:
        raise ValueError(f"got -n {args.num_files} -w {args.num_workers}, expected -n of at least "
                         f"-1 (all), -w of at least 1")
    dataset = DATASETS[args.dataset]
    if args.verify:
        found = verify(args.data_dir or dataset.data_dir, num_workers=args.num_workers)
        failed, total = {name: why for name, why in found.items() if why}, len(found)
        way_out = "Delete them and run this again without --verify."
    else:
        job = make_downloader(dataset, base_url=args.base_url, data_dir=args.data_dir)
        num_train = dataset.last_shard if args.num_files == -1 else min(args.num_files, dataset.last_shard)
        indices = [dataset.last_shard, *range(num_train)]  # validation first: nothing works without it
        print(f"{dataset.name}: {num_train} training shards and {dataset.val_filename} for "
              f"validation -> {job.data_dir}")
        failed, total = download(job, indices, num_workers=args.num_workers), len(indices)
        way_out = "What has arrived is kept: run the same command again to go on."
    if failed:
        lines = "".join(f"  {name}: {why}\n" for name, why in failed.items())
        raise OSError(f"{len(failed)} of {total} shards failed:\n{lines}{way_out}")
    print(f"{total} shards are whole" if args.verify else f"{job.data_dir}: {total} shards are "
                                                          f"here")

