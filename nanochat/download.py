"""
Downloads: the shards of a known data set over HTTP, and whether those that are here are whole.

    shard_00007.parquet.part   grows; whatever breaks off begins again
      -> as long as the server said -> the footer opens, `text` is there -> fsync, rename
    shard_00007.parquet        whole, or not there

One loop tries again, whatever went wrong: no answer, an answer of a busy server (429, 5xx, with its
Retry-After), a body that breaks off. A shard is some 100 MB, so going on in the middle of one, and
the proof that it is still the same object, is not worth its code.
"""

import fcntl
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from tqdm import tqdm

from nanochat.common import Parser, each, fsync_dir, setup_logging, write_json
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

ATTEMPTS = 6
BACKOFF_S = 1.0  # the first pause between attempts; it doubles
TIMEOUT_S = 60.0  # of silence
HINTS = {401: "set HF_TOKEN", 403: "set HF_TOKEN", 404: "check --dataset, --base-url and HF_ENDPOINT"}


@dataclass(frozen=True)
class Downloader:
    """Where shards come from and go to; `make_downloader` fills it from the command line and the
    environment."""

    base_url: str
    data_dir: Path
    token: str = field(default="", repr=False)  # for that server alone

    def fetch(self, index: int) -> None:
        """Bring shard `index` here unless it is. Raises OSError, and then leaves nothing under the
        final name."""
        final = self.data_dir / index_to_filename(index)
        part, url = Path(f"{final}.part"), f"{self.base_url}/{final.name}"
        if final.exists():
            return
        self._copy(url, part)
        try:
            open_parquet(part).close()
        except ValueError as e:
            part.unlink()
            raise OSError(f"{url}: it arrived in full and is no good: {e}") from e
        os.replace(part, final)
        fsync_dir(self.data_dir)

    def _copy(self, url: str, part: Path) -> None:
        """Copy what lies at `url` whole. OSError after an answer that another try will not change,
        or after the last try."""
        for attempt in range(ATTEMPTS):
            pause = BACKOFF_S * 2**attempt
            try:
                sign = self._sign if self.token else None
                with requests.get(url, auth=sign, stream=True, timeout=TIMEOUT_S) as response:
                    code = response.status_code
                    problem = f"got HTTP {code} {response.reason}"
                    if code == 200:
                        with open(part, "wb") as f:
                            f.writelines(response.iter_content(1 << 20))
                            f.flush()
                            os.fsync(f.fileno())
                        return
                    if code != 429 and code < 500:
                        raise OSError(f"{url}: {problem}; {HINTS.get(code, 'is it the right place?')}")
                    wish = response.headers.get("Retry-After", "")
                    pause = max(pause, int(wish) if wish.isdecimal() else 0)
            except requests.RequestException as e:
                problem = str(e)
            if attempt < ATTEMPTS - 1:
                time.sleep(pause)
        raise OSError(f"{url}: gave up after {ATTEMPTS} attempts; the last: {problem}; check the "
                      f"network, --base-url and HF_ENDPOINT, or try again later")

    def _sign(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """Send the token. A plain header would lose against an entry in ~/.netrc; requests drops
        what this sets when the server sends us elsewhere."""
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


def problems(call: Callable[[Any], object], items: Sequence[Any], *, num_workers: int) -> list[str]:
    """Why `call` of each item failed, '' where it did not; several at once, under a progress bar."""
    def problem_of(item: Any) -> str:
        try:
            call(item)
        except (OSError, ValueError) as e:
            return str(e)
        return ""

    found = each(problem_of, items, at_once=num_workers)
    return list(tqdm(found, total=len(items), unit="shard", disable=None))


def download(job: Downloader, indices: Sequence[int], *, num_workers: int) -> dict[str, str]:
    """Fetch shards in parallel; waits while another process does so in the same folder. Returns
    {file name: why it could not be had, or ''}."""
    with open(job.data_dir / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = problems(job.fetch, indices, num_workers=num_workers)
    return dict(zip(map(index_to_filename, indices), found))


def verify(data_dir: Path, *, num_workers: int) -> dict[str, str]:
    """Read every page of every shard in a folder. Returns {path: what is wrong, or ''}."""
    paths = list_parquet_files(data_dir)
    return dict(zip(paths, problems(lambda path: sum(1 for _ in read_texts(path)), paths, num_workers=num_workers)))


def main(argv: Sequence[str] | None = None) -> None:
    """Download or verify. Raises ValueError for bad flags and OSError that lists what failed."""
    parser = Parser(description="Download the shards of a data set, or check those that are here.")
    parser.add_argument("-n", "--num-files", type=int, default=-1, help="training shards, from the first on; -1 = all")
    parser.add_argument("-w", "--num-workers", type=int, default=4, help="shards at a time")
    parser.add_argument("--dataset", choices=DATASETS, default=DEFAULT_DATASET.name, help="which data set")
    parser.add_argument("--base-url", help="fetch the shards from here instead")
    parser.add_argument("--data-dir", type=Path, help="folder to use instead of $NANOCHAT_BASE_DIR/data/DATASET")
    parser.add_argument("--verify", action="store_true", help="download nothing; read all that is here")
    args = parser.parse_args(argv)
    setup_logging()
    if args.num_files < -1 or args.num_workers < 1:
        raise ValueError(f"got -n {args.num_files} -w {args.num_workers}, expected -n of at least "
                         f"-1 (all), -w of at least 1")
    dataset = DATASETS[args.dataset]
    if args.verify:
        found = verify(args.data_dir or dataset.data_dir, num_workers=args.num_workers)
        way_out = "Delete them and run this again without --verify."
    else:
        job = make_downloader(dataset, base_url=args.base_url, data_dir=args.data_dir)
        num_train = dataset.last_shard if args.num_files == -1 else min(args.num_files, dataset.last_shard)
        print(f"{dataset.name}: {num_train} training shards and {dataset.val_filename} for "
              f"validation -> {job.data_dir}")
        indices = [dataset.last_shard, *range(num_train)]  # validation first: nothing works without it
        found = download(job, indices, num_workers=args.num_workers)
        way_out = "What has arrived is kept: run the same command again to go on."
    if failed := {name: why for name, why in found.items() if why}:
        lines = "".join(f"  {name}: {why}\n" for name, why in sorted(failed.items()))
        raise OSError(f"{len(failed)} of {len(found)} shards failed:\n{lines}{way_out}")
    print(f"{len(found)} shards are whole")
