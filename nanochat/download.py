""" Downloads: the shards of climbmix over HTTP, and whether those that are here are whole; and the
tasks of the CORE metric.

    shard_00007.parquet.part   grows; whatever breaks off begins again
      -> as long as the server said -> the footer opens, `text` is there -> fsync, rename
    shard_00007.parquet        whole, or not there

One loop tries again, whatever went wrong, and says so: no answer, an answer of a busy server (429,
5xx), a body that breaks off. A shard is some 100 MB, so going on in the middle of one, and
the proof that it is still the same object, is not worth its code.
"""

import fcntl
import logging
import os
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from tqdm import tqdm

from nanochat.common import Parser, each, fsync_dir, get_base_dir, read_json, setup_logging, write_json
from nanochat.dataset import (
    BASE_URL,
    MARKER,
    MAX_SHARD,
    NAME,
    default_data_dir,
    index_to_filename,
    list_parquet_files,
)
from nanochat.text import open_parquet
from nanochat.text_kinds import read_texts

log = logging.getLogger(__name__)

ATTEMPTS = 6
BACKOFF_S = 1.0  # the first pause between attempts; it doubles
TIMEOUT_S = 60.0  # of silence
BUNDLE_NAME, BUNDLE_URL = "eval_bundle", "https://karpathy-public.s3.us-west-2.amazonaws.com"  # where nanochat's lies


@dataclass(frozen=True)
class Downloader:
    """Where shards come from and go to: a folder, which is made and marked. ValueError for what is
    no address, and for a folder that holds another data set."""

    base_url: str
    data_dir: Path

    def __post_init__(self) -> None:
        check_url(self.base_url)
        self.data_dir.mkdir(parents=True, exist_ok=True)
        marker = self.data_dir / MARKER
        if marker.exists() and (there := read_json(marker, {"name": str})["name"]) != NAME:
            raise ValueError(f"{self.data_dir}: holds {there}; use another --data-dir")
        write_json(marker, {"name": NAME, "validation": index_to_filename(MAX_SHARD)})

    def fetch(self, index: int) -> None:
        """Bring shard `index` here unless it is. Raises OSError, and then leaves nothing under the
        final name."""
        final = self.data_dir / index_to_filename(index)
        part, url = Path(f"{final}.part"), f"{self.base_url}/{final.name}"
        if final.exists():
            return
        try:
            copy(url, part)
        except OSError as e:
            raise OSError(f"{url}: {e}; check the network, or name a mirror with --base-url") from e
        try:
            open_parquet(part).close()
        except ValueError as e:
            part.unlink()
            raise OSError(f"{url}: it arrived in full and is no good: {e}") from e
        os.replace(part, final)
        fsync_dir(self.data_dir)


def copy(url: str, part: Path) -> None:
    """Copy what lies at `url` whole. OSError after an answer that another try will not change, or
    after the last try; each try but the first is told before it."""
    for attempt in range(1, ATTEMPTS + 1):
        pause = BACKOFF_S * 2**(attempt - 1)
        try:
            with requests.get(url, stream=True, timeout=TIMEOUT_S) as response:
                code = response.status_code
                problem = f"got HTTP {code} {response.reason}"
                if code == 200:
                    with open(part, "wb") as f:
                        chunks = response.iter_content(1 << 20)
                        f.writelines(tqdm(chunks, part.name, unit="MiB", leave=False, disable=None))
                        f.flush()
                        os.fsync(f.fileno())
                    return
                if code != 429 and code < 500:
                    raise OSError(problem)
        except requests.RequestException as e:
            problem = f"no whole answer ({e})"
        if attempt < ATTEMPTS:
            log.warning("%s: %s; attempt %d of %d in %.0f s", url, problem, attempt + 1, ATTEMPTS, pause)
            time.sleep(pause)
    raise OSError(f"gave up after {ATTEMPTS} attempts; the last: {problem}")


def check_url(url: str) -> None:
    """ValueError unless it is an address of HTTP."""
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ValueError(f"--base-url: got {url!r}, expected an address such as {BASE_URL}")


def problems(call: Callable[[Any], object], items: Sequence[Any], *, num_workers: int) -> list[str]:
    """Why `call` of each item failed, '' where it did not; several at once, under a progress
    bar."""
    def problem_of(item: Any) -> str:
        try:
            call(item)
        except (OSError, ValueError) as e:
            return str(e)
        return ""

    found = each(problem_of, items, at_once=num_workers)
    return list(tqdm(found, total=len(items), unit="shard", disable=None))


def download(job: Downloader, indices: Sequence[int], *, num_workers: int) -> list[str]:
    """Fetch shards in parallel; waits while another process does so in the same folder. Returns why
    each could not be had, or ''."""
    with open(job.data_dir / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return problems(job.fetch, indices, num_workers=num_workers)


def fetch_bundle(base_url: str, folder: Path) -> None:
    """Bring the tasks of the CORE metric into `folder`, or read those that are there already.
    Nobody publishes a checksum of the archive: it is good if its own sums are right and all its
    items can be read. OSError, and then there is no folder, for what does not arrive or is no
    good."""
    from nanochat.core_eval import read_bundle

    check_url(base_url)
    url = f"{base_url}/{BUNDLE_NAME}.zip"
    if not folder.exists():
        print(f"fetching {url} -> {folder}", flush=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{BUNDLE_NAME}.", dir=folder.parent) as temporary:
            archive, unpacked = Path(temporary) / "archive", Path(temporary) / BUNDLE_NAME
            try:
                copy(url, archive)
                with zipfile.ZipFile(archive) as opened:
                    opened.extractall(temporary)  # which leads no entry outside
                read_bundle(unpacked)
            except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as e:
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
    parser.add_argument("--base-url", help="address of the folder of shards, or of eval_bundle.zip, that stands in")
    parser.add_argument("--data-dir", type=Path, help=f"folder to use instead of $NANOCHAT_BASE_DIR/data/{NAME}")
    parser.add_argument("--eval-bundle", action="store_true",
                        help="fetch the tasks of the CORE metric instead, to $NANOCHAT_BASE_DIR/eval_bundle")
    parser.add_argument("--verify", action="store_true", help="download nothing; read all that is here")
    args = parser.parse_args(argv)
    setup_logging()
    if args.num_files < -1 or args.num_workers < 1:
        raise ValueError(f"got -n {args.num_files} -w {args.num_workers}, expected -n of at least "
                         f"-1 (all), -w of at least 1")
    base_url, data_dir = (args.base_url or (BUNDLE_URL if args.eval_bundle else BASE_URL)).rstrip("/"), args.data_dir
    if args.eval_bundle:
        return fetch_bundle(base_url, data_dir or get_base_dir() / BUNDLE_NAME)
    data_dir = data_dir or default_data_dir()
    if args.verify:
        paths = list_parquet_files(data_dir)
        found = problems(lambda path: sum(1 for _ in read_texts(path)), paths, num_workers=args.num_workers)
        way_out = "Delete them and run this again without --verify."
    else:
        num_train = MAX_SHARD if args.num_files == -1 else min(args.num_files, MAX_SHARD)
        indices = [MAX_SHARD, *range(num_train)]  # validation first: nothing works without it
        print(f"{NAME}: {num_train} training shards and {index_to_filename(MAX_SHARD)} for validation -> {data_dir}")
        found = download(Downloader(base_url, data_dir), indices, num_workers=args.num_workers)
        way_out = "What has arrived is kept: run the same command again to go on."
    if failed := [why for why in found if why]:
        lines = "".join(f"  {why}\n" for why in sorted(failed))
        raise OSError(f"{len(failed)} of {len(found)} shards failed:\n{lines}{way_out}")
    print(f"{len(found)} shards are whole")
