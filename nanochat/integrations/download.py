"""
Downloads: the shards of a known data set over HTTP, and whether the existing ones are whole; and
the tasks of the CORE metric.

    shard_00007.parquet.part   grows; a broken transfer starts over
      -> as long as the server said -> the footer opens, `text` is there -> fsync, rename
    shard_00007.parquet        whole, or not there

One loop asks again if the server is busy (429, 5xx), does not answer, or breaks off: after a growing
pause, or when its Retry-After says. Each wait is logged. A shard is some 100 MB, so resuming in the
middle of one, with the proof that it is still the same object, is not worth its code.

HF_ENDPOINT replaces the hub. HF_TOKEN is sent to that endpoint alone, and never printed.
"""

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
from nanochat.common import each, fsync_dir, get_base_dir, public, write_json
from nanochat.dataset import (
    DATASETS,
    HUB,
    MARKER,
    NAME,
    default_data_dir,
    index_to_filename,
    known_dataset,
    list_parquet_files,
)
from nanochat.text import open_parquet
from nanochat.text_kinds import read_texts

log = logging.getLogger(__name__)

ATTEMPTS = 6
BACKOFF_S = 1.0  # the first pause between attempts; it doubles
TIMEOUT_S = 60.0  # of silence
BUNDLE_BYTES, BUNDLE_ENTRIES = 2 << 30, 10_000  # the real one has 0.16 GB in some 100 files
BUNDLE_NAME, BUNDLE_URL = "eval_bundle", "https://karpathy-public.s3.us-west-2.amazonaws.com"  # where nanochat's lies


@dataclass(frozen=True)
class Downloader:
    """Where shards come from and go to; see `make_downloader`."""

    base_url: str
    data_dir: Path
    token: str = field(default="", repr=False)  # for that server alone

    def fetch(self, index: int) -> None:
        """Fetch shard `index` unless it exists. Raises OSError, and then leaves nothing under the final name."""
        final = self.data_dir / index_to_filename(index)
        part, url = Path(f"{final}.part"), f"{self.base_url}/{final.name}"
        if final.exists():
            return
        try:
            copy(url, part, self.token)
        except OSError as e:
            raise OSError(f"{url}: {e}; check the network, --base-url and HF_ENDPOINT, and HF_TOKEN where the answer "
                          f"is 401 or 403") from e
        try:
            open_parquet(part).close()
        except ValueError as e:
            part.unlink()
            raise OSError(f"{url}: it arrived in full and is no good: {e}") from e
        os.replace(part, final)
        fsync_dir(self.data_dir)


def make_downloader(name: str = NAME, *, base_url: str | None = None, data_dir: Path | None = None) -> Downloader:
    """A Downloader of a known data set; its folder is created and marked. It honours HF_ENDPOINT and HF_TOKEN.
    ValueError if one of these is unusable, for an invalid address, and for a folder that holds another data set."""
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or HUB
    url = (base_url or DATASETS[name].base_url).rstrip("/")
    if url.startswith(f"{HUB}/"):
        url = endpoint + url.removeprefix(HUB)
    check_url("HF_ENDPOINT", endpoint)
    check_url("--base-url", url)
    token = os.environ.get("HF_TOKEN", "").strip()
    if not re.fullmatch(r"[!-~]*", token):  # the HTTP library's own complaint would print it
        raise ValueError("HF_TOKEN: has characters that a header cannot carry; set it again")
    data_dir = data_dir or default_data_dir(name)
    if (held := known_dataset(data_dir) or name) != name:
        raise ValueError(f"{data_dir}: holds {held}, not {name}; use another --data-dir, or --dataset={held}")
    data_dir.mkdir(parents=True, exist_ok=True)
    write_json(data_dir / MARKER, {"name": name, "validation": index_to_filename(DATASETS[name].last_shard)})
    return Downloader(url, data_dir, token if urlsplit(url)[:2] == urlsplit(endpoint)[:2] else "")


def open_session(token: str) -> requests.Session:
    """A session that sends the token to the first server only."""
    def sign(request: requests.PreparedRequest) -> requests.PreparedRequest:
        # an entry in ~/.netrc would override a plain header; requests drops this one on a redirect elsewhere
        request.headers["Authorization"] = f"Bearer {token}"
        return request

    session = requests.Session()
    session.auth = sign if token else None
    return session


def copy(url: str, part: Path, token: str = "") -> None:
    """Copy the whole of `url`. OSError after an answer that another attempt will not change, or after the last
    attempt; each further attempt is logged before it starts."""
    for attempt in range(1, ATTEMPTS + 1):
        pause = BACKOFF_S * 2**(attempt - 1)
        try:
            with open_session(token) as session, session.get(url, stream=True, timeout=TIMEOUT_S) as response:
                status = response.status_code
                if status == 200:
                    with open(part, "wb") as f:
                        chunks = response.iter_content(1 << 20)
                        f.writelines(tqdm(chunks, part.name, unit="MiB", leave=False, disable=None))
                        f.flush()
                        os.fsync(f.fileno())
                    return
                if status != 429 and status < 500:
                    raise OSError(f"got HTTP {status} {response.reason}")
                problem = f"got HTTP {status}, a busy server"
                pause = Retry().get_retry_after(response.raw) or pause
        except requests.RequestException as e:
            cause: BaseException = e
            while cause.__context__ is not None:  # the first error says most
                cause = cause.__context__
            problem = f"no whole answer ({public(str(cause))})"
        if attempt < ATTEMPTS:
            log.warning("%s: %s; attempt %d of %d in %.0f s", url, problem, attempt + 1, ATTEMPTS, pause)
            time.sleep(pause)
    raise OSError(f"gave up after {ATTEMPTS} attempts; the last: {problem}")


def check_url(given_by: str, url: str) -> None:
    """ValueError unless `url` is an HTTP address without user information and query."""
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ValueError(f"{given_by}: got {public(url)!r}, expected an address such as {HUB}")
    if public(url) != url:
        raise ValueError(f"{given_by}: got {public(url)}, which may hold a secret; set HF_TOKEN instead")


def problems(call: Callable[[Any], object], items: Sequence[Any], *, num_workers: int) -> list[str]:
    """Why `call` failed for each item, '' if it did not; several run at once, under a progress bar."""
    def problem_of(item: Any) -> str:
        try:
            call(item)
        except (OSError, ValueError) as e:
            return str(e)
        return ""

    answers = each(problem_of, items, at_once=num_workers)
    return list(tqdm(answers, total=len(items), unit="shard", disable=None))


def download(job: Downloader, indices: Sequence[int], *, num_workers: int) -> list[str]:
    """Fetch shards in parallel; waits while another process downloads to the same folder. Returns why each one
    failed, or ''."""
    with open(job.data_dir / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return problems(job.fetch, indices, num_workers=num_workers)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a .zip file. ValueError for one that is damaged or would fill the disk: `zipfile` never writes more than
    the sizes that it states."""
    if archive.stat().st_size > BUNDLE_BYTES:
        raise ValueError(f"{archive.name}: it has {archive.stat().st_size:,} bytes, expected at most {BUNDLE_BYTES:,}")
    try:
        with zipfile.ZipFile(archive) as opened:
            entries = opened.infolist()
            num_bytes = sum(entry.file_size for entry in entries)
            if len(entries) > BUNDLE_ENTRIES or num_bytes > BUNDLE_BYTES:
                raise ValueError(f"{len(entries):,} entries of {num_bytes:,} bytes in all, expected at most "
                                 f"{BUNDLE_ENTRIES:,} of {BUNDLE_BYTES:,}")
            opened.extractall(folder)  # which leads no entry outside
    except Exception as e:  # a dozen types, for whatever a damaged header leads to
        raise ValueError(f"{archive.name}: it cannot be unpacked ({type(e).__name__}: {e})") from e


def fetch_bundle(base_url: str | None, folder: Path) -> None:
    """Fetch the tasks of the CORE metric into `folder`, or read those that it already holds. There is no published
    checksum of the archive: it is good if its own checksums are right and all its items can be read. OSError, and
    then no folder, if it does not arrive or is damaged."""
    from nanochat.integrations.core_eval import read_bundle

    url = f"{(base_url or BUNDLE_URL).rstrip('/')}/{BUNDLE_NAME}.zip"
    check_url("--base-url", url)
    if not folder.exists():
        print(f"fetching {url} -> {folder}", flush=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{BUNDLE_NAME}.", dir=folder.parent) as temporary:
            archive, unpacked = Path(temporary) / "archive", Path(temporary) / BUNDLE_NAME
            try:
                copy(url, archive)
                unpack(archive, Path(temporary))
                read_bundle(unpacked)
            except (OSError, ValueError) as e:
                raise OSError(f"{url}: {e}; nothing was unpacked. Say with --base-url where else the archive lies, or "
                              f"unpack {BUNDLE_NAME}.zip by hand, so that there is {folder / 'core.yaml'}") from e
            os.replace(unpacked, folder)
        fsync_dir(folder.parent)
    tasks = read_bundle(folder)
    print(f"{folder}: {len(tasks)} tasks with {sum(len(task.items) for task in tasks):,} items")


def main(argv: Sequence[str] | None = None) -> None:
    """Download or verify. Raises ValueError for bad flags and OSError that lists what failed."""
    parser = Parser(description="Download text to train on, or check what is here.",
                    epilog="python -m nanochat.dataset -n 8    # 8 shards for training, and the one for validation")
    parser.add_argument("-n", "--num-files", type=int, default=-1,
                        help="shards for training, some 100 MB each, from the first on; -1: all, which are thousands")
    parser.add_argument("-w", "--num-workers", type=int, default=4, help="shards at a time")
    parser.add_argument("--dataset", choices=DATASETS, default=NAME, help="which data set")
    parser.add_argument("--base-url", help="address of the folder of shards, or of eval_bundle.zip, that stands in")
    parser.add_argument("--data-dir", type=Path, help="folder to use instead of $NANOCHAT_BASE_DIR/data/DATASET")
    parser.add_argument("--eval-bundle", action="store_true",
                        help="fetch the tasks of the CORE metric instead, to $NANOCHAT_BASE_DIR/eval_bundle")
    parser.add_argument("--verify", action="store_true", help="download nothing; read all that is here")
    args = parser.parse_args(argv)
    setup_logging()
    if args.num_files < -1 or args.num_workers < 1:
        raise ValueError(f"got -n {args.num_files} -w {args.num_workers}, expected -n of at least "
                         f"-1 (all), -w of at least 1")
    if args.eval_bundle:
        return fetch_bundle(args.base_url, args.data_dir or get_base_dir() / BUNDLE_NAME)
    if args.verify:
        paths = list_parquet_files(args.data_dir or default_data_dir(args.dataset))
        found = problems(lambda path: sum(1 for _ in read_texts(path)), paths, num_workers=args.num_workers)
        way_out = "Delete them and run this again without --verify."
    else:
        job = make_downloader(args.dataset, base_url=args.base_url, data_dir=args.data_dir)
        last = DATASETS[args.dataset].last_shard
        num_train = last if args.num_files == -1 else min(args.num_files, last)
        indices = [last, *range(num_train)]  # validation first: nothing works without it
        print(f"{args.dataset}: {num_train} training shards and {index_to_filename(last)} for validation -> "
              f"{job.data_dir}")
        found = download(job, indices, num_workers=args.num_workers)
        way_out = "What has arrived is kept: run the same command again to go on."
    if failed := [why for why in found if why]:
        lines = "".join(f"  {why}\n" for why in sorted(failed))
        raise OSError(f"{len(failed)} of {len(found)} shards failed:\n{lines}{way_out}")
    print(f"{len(found)} shards are whole")
