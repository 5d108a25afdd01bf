"""
Text on disk: which data sets we know, how their shards get here, how they are listed and read.

A data set is a run of parquet shards with a `text` column, `shard_00000.parquet` up to an index in the table below.
The last one is validation and pinned by name: always fetched, and an error where it is missing. Taking "the last file
that is here" instead would turn a failed download into a silent change of every number computed on validation.

    shard_00007.parquet.part        grows; a dropped connection or a kill leaves it, the next try asks for the rest
    shard_00007.parquet.part.json     with Range and If-Range, so that an object that changed is never spliced
      -> as long as the server said -> footer opens, `text` is there -> fsync, rename
    shard_00007.parquet             whole, or not there

Two layers retry, each what it can see: urllib3's Retry repeats a request that got no body (refused, reset, 429, 5xx;
exponential backoff, Retry-After); a body that breaks off is invisible to it, so `_Transfer` continues that.

    python -m nanochat.dataset -n 8 -w 4      # 8 training shards and the validation shard, 4 at a time
    python -m nanochat.dataset --verify       # read everything that is on disk, name what is broken
"""

import contextlib
import ctypes
import fcntl
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import requests
from requests.adapters import HTTPAdapter
from tqdm import tqdm
from urllib3.exceptions import HTTPError
from urllib3.util import Retry

from nanochat.common import Parser, fsync_dir, get_base_dir, read_json, run_main, setup_logging, write_json
from nanochat.places import local, place
from nanochat.remote import is_remote

log = logging.getLogger(__name__)

HUB = "https://huggingface.co"
LITTLE_TEXT = 1 << 18  # bytes
MARKER = "dataset.json"  # beside the shards: which data set they are, hence which one must be the last


def index_to_filename(index: int) -> str:
    """The name of shard `index`."""
    return f"shard_{index:05d}.parquet"


@dataclass(frozen=True)
class Dataset:
    """A known data set: shards 0 to last_shard lie under base_url; the last one is validation."""

    name: str
    base_url: str
    last_shard: int

    @property
    def val_filename(self) -> str:
        return index_to_filename(self.last_shard)

    @property
    def data_dir(self) -> Path:
        return get_base_dir() / "data" / self.name


DEFAULT_DATASET = Dataset("climbmix", f"{HUB}/datasets/karpathy/climbmix-400b-shuffle/resolve/main", 6542)
FINEWEB_EDU = Dataset("fineweb-edu", f"{HUB}/datasets/karpathy/fineweb-edu-100b-shuffle/resolve/main", 1822)
DATASETS = {d.name: d for d in (DEFAULT_DATASET, FINEWEB_EDU)}


# ---- what is on disk ------------------------------------------------------------------------------------------------

def open_parquet(path: Path | str, name: str = "") -> pq.ParquetFile:
    """Open a parquet file by its footer and check that it has rows and a string column `text`; ValueError with `name`
    (default: the path) if not. The caller closes it."""
    path = place(path)
    name = name or str(path)
    try:  # no pre_buffer: it would hold a whole row group's pages where a reader wants one batch
        file = pq.ParquetFile(path.open("rb") if is_remote(path) else path, pre_buffer=False,
                              page_checksum_verification=True)
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as e:
        raise ValueError(f"{name}: not a readable parquet file ({e}); delete it and fetch or write it again") from e
    columns, problem = {f.name: f.type for f in file.schema_arrow}, ""
    if "text" not in columns:
        problem = f"no column `text`, only {', '.join(columns) or 'none'}; rename the column that holds the text"
    elif columns["text"] not in (pa.string(), pa.large_string(), pa.string_view()):
        problem = f"column `text` is {columns['text']}, expected string; convert it"
    elif not file.metadata.num_rows:
        problem = "no rows; delete it"
    if problem:
        file.close()
        raise ValueError(f"{name}: {problem}")
    return file


def give_back_freed(num_bytes: int) -> None:
    """Return freed memory to the system after a row group of so much text is read, unless that is little: Arrow's pool
    keeps what the largest group took, and glibc keeps the holes that units of many sizes leave (measured over 960 steps
    of 64 lanes: 158 MB and growing, instead of 130)."""
    if num_bytes < LITTLE_TEXT:
        return
    pa.default_memory_pool().release_unused()
    with contextlib.suppress(AttributeError, OSError, TypeError):  # no glibc here
        ctypes.CDLL(None).malloc_trim(0)


def read_texts(file: pq.ParquetFile, group: int, name: str) -> list[str]:
    """The texts of one row group. ValueError names the file where pages are damaged, a text is null or not UTF-8."""
    try:
        column = file.read_row_group(group, columns=["text"], use_threads=False).column("text")
        column.validate(full=True)
    except (pa.ArrowException, OSError) as e:
        raise ValueError(f"{name}: row group {group} is damaged ({e}); delete it and fetch or write it again") from e
    if column.null_count:
        raise ValueError(f"{name}: row group {group} has {column.null_count} nulls in `text`; drop those rows")
    return column.to_pylist()


def pinned_dataset(data_dir: Path | str) -> Dataset | None:
    """The known data set that a folder holds, by the marker that the downloader left there or by its place; None for
    any other folder, in which simply the last file is validation."""
    marker = place(data_dir) / MARKER
    if not marker.exists():
        return next((d for d in DATASETS.values() if d.data_dir.resolve() == place(data_dir).resolve()), None)
    name = read_json(local(marker)).get("name")
    if name not in DATASETS:
        raise ValueError(f"{marker}: unknown data set {name!r}, expected one of {', '.join(DATASETS)}")
    return DATASETS[name]


def list_parquet_files(data_dir: Path | str | None = None) -> list[str]:
    """Full paths of the parquet files below a folder (default: the default data set's) in the order of their relative
    paths; the last one is validation. FileNotFoundError where there is none, or where the folder holds a known data
    set without its validation shard; ValueError where that shard would not be the last."""
    root = place(data_dir) if data_dir is not None else DEFAULT_DATASET.data_dir
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.parquet") if p.is_file())
    names = [n for n in names if not any(part.startswith(".") for part in n.split("/"))]
    pinned = pinned_dataset(root)
    again = f"run `python -m nanochat.dataset --dataset {(pinned or DEFAULT_DATASET).name} -n 8 --data-dir {root}`"
    if not names:
        raise FileNotFoundError(f"{root}: no parquet files; {again}")
    if pinned and pinned.val_filename not in names:
        raise FileNotFoundError(f"{root}: {pinned.name}'s validation shard {pinned.val_filename} is missing, "
                                f"{len(names)} other files are there; {again}")
    if pinned and names[-1] != pinned.val_filename:
        raise ValueError(f"{root}: last file is {names[-1]}, expected {pinned.name}'s validation shard "
                         f"{pinned.val_filename}; move what is not {pinned.name} elsewhere")
    return [str(root / n) for n in names]


def parquets_iter_batched(split: str, start: int = 0, step: int = 1, *,
                          data_dir: Path | str | None = None) -> Iterator[list[str]]:
    """Yield the texts of one row group after another: of all files but the last for "train", of the last for "val".
    Rank r of W passes start=r, step=W and gets row groups r, r + W, ... of each file."""
    if split not in ("train", "val"):
        raise ValueError(f"split: got {split!r}, expected 'train' or 'val'")
    paths = list_parquet_files(data_dir)
    if len(paths) < 2:
        raise ValueError(f"{paths[0]}: the only file here, expected at least 2 (the last one is validation); add one")
    for path in paths[:-1] if split == "train" else paths[-1:]:
        with open_parquet(path) as file:
            for group in range(start, file.num_row_groups, step):
                yield read_texts(file, group, path)


def verify_file(path: str) -> str:
    """Read every page of `text`; what is wrong with the file, or ''."""
    try:
        with open_parquet(path) as file:
            for group in range(file.num_row_groups):
                read_texts(file, group, path)
    except (ValueError, OSError) as e:
        return str(e)
    return ""


# ---- one shard over HTTP --------------------------------------------------------------------------------------------

class DownloadError(OSError):
    """A shard could not be fetched; the message says from where, why, and what to do."""


HINTS = {401: "set HF_TOKEN", 403: "set HF_TOKEN", 404: "check --dataset, --base-url and HF_ENDPOINT"}


def _bearer(token: str, endpoint: str) -> Callable[[requests.PreparedRequest], requests.PreparedRequest]:
    """Send a token to one origin only: not to other mirrors, nor along redirects (requests drops the header there).
    As an auth callable, because a plain header would lose against an entry in ~/.netrc."""
    def auth(request: requests.PreparedRequest) -> requests.PreparedRequest:
        if urlsplit(request.url or "")[:2] == urlsplit(endpoint)[:2]:
            request.headers["Authorization"] = f"Bearer {token}"
        return request
    return auth


@dataclass(frozen=True)
class Downloader:
    """Where shards come from and go to; `make_downloader` fills it from the command line and the environment."""

    base_url: str
    data_dir: Path
    auth: Callable[[requests.PreparedRequest], requests.PreparedRequest] | None = None
    backoff_s: float = 1.0      # first pause, then doubled up to a minute
    max_attempts: int = 6       # requests without an answer, and bodies in a row that bring nothing new
    timeout_s: float = 60.0     # of silence
    stop: threading.Event = field(default_factory=threading.Event)

    def session(self) -> requests.Session:
        """A session that tries again after errors that pass, with exponential backoff, and honours Retry-After."""
        retry = Retry(total=self.max_attempts - 1, backoff_factor=self.backoff_s, backoff_max=60,
                      status_forcelist=(429, 500, 502, 503, 504), allowed_methods=("GET",), raise_on_status=False)
        session = requests.Session()
        session.mount("http://", HTTPAdapter(max_retries=retry))
        session.mount("https://", HTTPAdapter(max_retries=retry))
        session.auth = self.auth
        session.headers["Accept-Encoding"] = "identity"  # so that lengths are lengths of the object
        return session

    def fetch(self, index: int, on_bytes: Callable[[int], object] = lambda n: None) -> Path:
        """Bring shard `index` here unless it is; `on_bytes` hears of every block. Raises DownloadError, or OSError for
        the disk's troubles, and then leaves nothing under the final name."""
        final = self.data_dir / index_to_filename(index)
        if final.exists():
            return final
        part, state, url = Path(f"{final}.part"), Path(f"{final}.part.json"), f"{self.base_url}/{final.name}"
        _Transfer(self, url, part, state, on_bytes).run()
        try:
            open_parquet(part, url).close()
        except ValueError as e:
            part.unlink()
            state.unlink(missing_ok=True)
            raise DownloadError(f"arrived in full but is no good: {e}") from e
        os.replace(part, final)
        fsync_dir(self.data_dir)
        state.unlink(missing_ok=True)
        return final


class _Transfer:
    """Makes a partial file as long as the object at `url`, in as many requests as that takes."""

    def __init__(self, job: Downloader, url: str, part: Path, state: Path, on_bytes: Callable[[int], object]):
        self.job, self.url, self.state, self.on_bytes = job, url, state, on_bytes
        self.part = open(part, "ab")  # noqa: SIM115 (run closes it)

    def run(self) -> None:
        """Raises DownloadError on an answer that asking again would not change, or when attempts bring nothing new."""
        failures, best = 0, self.part.tell()
        with self.part, self.job.session() as session:
            while why := self._request(session):
                failures = 0 if self.part.tell() > best else failures + 1
                best = max(best, self.part.tell())
                if failures >= self.job.max_attempts:
                    raise DownloadError(f"{self.url}: gave up after {failures} fruitless attempts; the last: {why}")
                if self.job.stop.wait(min(60.0, self.job.backoff_s * 2**(failures - 1))):
                    raise DownloadError(f"{self.url}: interrupted")
            self.part.flush()
            os.fsync(self.part.fileno())

    def _request(self, session: requests.Session) -> str:
        """Ask for what is missing. Returns '' when the file is complete, else why it is not."""
        known = read_json(self.state) if self.part.tell() and self.state.exists() else {}
        if not known.get("validator"):
            self._restart()  # nothing tells whether the object is still the one we have the start of
        start = self.part.tell()
        if start and start == known["total_bytes"]:
            return ""
        headers = {"Range": f"bytes={start}-", "If-Range": known["validator"]} if start else {}
        try:
            response = session.get(self.url, headers=headers, stream=True, timeout=self.job.timeout_s)
        except requests.RequestException as e:  # Retry has done what it could
            raise DownloadError(f"{self.url}: no answer ({e}); check the network, --base-url and HF_ENDPOINT") from e
        with response:
            if response.status_code == 200:
                self._restart()
                known = _describe(response)
                write_json(self.state, known)
            elif response.status_code not in (206, 416):
                hint = HINTS.get(response.status_code, "try again later")
                raise DownloadError(f"{self.url}: got HTTP {response.status_code} {response.reason}; {hint}")
            elif not _continues(response, known, start):
                self._restart()
                return f"the answer for the bytes from {start:,} does not continue {known}: {response.headers}"
            return self._copy_body(response, known["total_bytes"])

    def _restart(self) -> None:
        self.part.truncate(0)
        self.part.seek(0)

    def _copy_body(self, response: requests.Response, total_bytes: int | None) -> str:
        try:  # read1 hands over what is there: a block that breaks off would take its beginning with it
            while block := response.raw.read1(1 << 20, decode_content=False):
                if self.job.stop.is_set():
                    raise DownloadError(f"{self.url}: interrupted")
                self.part.write(block)
                self.on_bytes(len(block))
        except HTTPError as e:
            return f"connection lost at {self.part.tell():,} of {total_bytes} bytes ({e})"
        size = self.part.tell()
        if total_bytes is not None and size > total_bytes:
            self._restart()
        return "" if total_bytes in (None, size) else f"got {size:,} bytes, expected {total_bytes:,}"


def _describe(response: requests.Response) -> dict:
    """What the object is: its length in bytes (None if unknown) and a strong validator ('' if there is none, or no
    length: such a download cannot be continued)."""
    etag, length = response.headers.get("ETag", ""), response.headers.get("Content-Length", "")
    validator = etag if etag.startswith('"') else response.headers.get("Last-Modified", "")
    total_bytes = int(length) if length.isdigit() else None
    return {"validator": "" if total_bytes is None else validator, "total_bytes": total_bytes}


def _continues(response: requests.Response, known: dict, start: int) -> bool:
    """Whether an answer is the rest, from `start` on, of the known object (and not of a newer one)."""
    total_bytes = known.get("total_bytes") or 0
    return (response.headers.get("Content-Range") == f"bytes {start}-{total_bytes - 1}/{total_bytes}"
            and _describe(response)["validator"] in ("", known["validator"]))


# ---- command line ---------------------------------------------------------------------------------------------------

def make_downloader(dataset: Dataset, *, base_url: str | None = None, data_dir: Path | None = None,
                    backoff_s: float = 1.0) -> Downloader:
    """A Downloader that honours HF_ENDPOINT (stands in for the hub) and HF_TOKEN; makes the folder and notes there
    which data set it holds. ValueError where one of these is unusable or the folder holds another data set."""
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
        raise ValueError(f"{data_dir}: holds {there.name}, got --dataset {dataset.name}; use another --data-dir")
    write_json(data_dir / MARKER, {"name": dataset.name, "validation": dataset.val_filename})
    return Downloader(url, data_dir, _bearer(token, endpoint) if token else None, backoff_s)


def download_single_file(index: int, *, dataset: Dataset = DEFAULT_DATASET, base_url: str | None = None,
                         data_dir: Path | None = None, backoff_s: float = 1.0) -> bool:
    """Fetch one shard of a known data set unless it is here; True when it is. The reason for a False is logged."""
    job = make_downloader(dataset, base_url=base_url, data_dir=data_dir, backoff_s=backoff_s)
    try:
        job.fetch(index)
    except OSError as e:
        log.error("%s: %s", index_to_filename(index), e)
        return False
    return True


def download(job: Downloader, indices: Sequence[int], *, num_workers: int) -> dict[str, str]:
    """Fetch shards in parallel under one progress bar; waits while another process does so in the same folder.
    Returns {file name: reason} of those that failed."""
    failed: dict[str, str] = {}
    with (open(job.data_dir / ".lock", "w") as lock, ThreadPoolExecutor(num_workers) as pool,
          tqdm(total=len(indices), unit="shard", miniters=0, disable=None) as bar):
        fcntl.flock(lock, fcntl.LOCK_EX)
        bytes_lock, num_bytes = threading.Lock(), [0]

        def on_bytes(n: int) -> None:
            with bytes_lock:
                num_bytes[0] += n
                bar.set_postfix_str(f"{num_bytes[0] / 1e6:,.0f} MB", refresh=False)
                bar.update(0)

        futures = {pool.submit(job.fetch, i, on_bytes): index_to_filename(i) for i in indices}
        try:
            for future in as_completed(futures):
                try:
                    future.result()
                except (OSError, ValueError) as e:
                    failed[futures[future]] = str(e)
                bar.update()
        except BaseException:  # Ctrl-C: partial files stay and are continued next time
            job.stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return dict(sorted(failed.items()))


def verify(data_dir: Path, *, num_workers: int) -> dict[str, str]:
    """Read every page of every shard in a folder. Returns {file name: what is wrong, or ''}."""
    paths = list_parquet_files(data_dir)
    with ThreadPoolExecutor(num_workers) as pool:
        return dict(zip(paths, tqdm(pool.map(verify_file, paths), total=len(paths), unit="shard", disable=None)))


def _fail(failed: dict[str, str], total: int, way_out: str) -> None:
    if failed:
        lines = "".join(f"  {name}: {why}\n" for name, why in failed.items())
        raise OSError(f"{len(failed)} of {total} shards failed:\n{lines}{way_out}")


def main(argv: Sequence[str] | None = None) -> None:
    """Download or verify. Raises ValueError for bad flags and OSError that lists what failed."""
    parser = Parser(description="Download the shards of a data set, or check those that are here.")
    parser.add_argument("-n", "--num-files", type=int, default=-1, help="training shards, from the first on; -1 = all")
    parser.add_argument("-w", "--num-workers", type=int, default=4, help="shards at a time")
    parser.add_argument("--dataset", choices=DATASETS, default=DEFAULT_DATASET.name)
    parser.add_argument("--base-url", help="fetch the shards from here instead")
    parser.add_argument("--data-dir", type=Path, help="folder to use instead of $NANOCHAT_BASE_DIR/data/DATASET")
    parser.add_argument("--backoff", type=float, default=1.0, help="seconds before the first retry; doubles")
    parser.add_argument("--verify", action="store_true", help="download nothing; read all that is here")
    args = parser.parse_args(argv)
    setup_logging()
    if args.num_files < -1 or args.num_workers < 1 or args.backoff < 0:
        raise ValueError(f"got -n {args.num_files} -w {args.num_workers} --backoff {args.backoff}, expected -n of at "
                         "least -1 (all), -w of at least 1, --backoff of at least 0")
    dataset = DATASETS[args.dataset]
    if args.verify:
        found = verify(args.data_dir or dataset.data_dir, num_workers=args.num_workers)
        _fail({k: v for k, v in found.items() if v}, len(found), "Delete them and run this again without --verify.")
        print(f"{len(found)} shards are whole")
        return
    job = make_downloader(dataset, base_url=args.base_url, data_dir=args.data_dir, backoff_s=args.backoff)
    num_train = dataset.last_shard if args.num_files == -1 else min(args.num_files, dataset.last_shard)
    indices = [dataset.last_shard, *range(num_train)]  # validation first: nothing works without it
    print(f"{dataset.name}: {num_train} training shards and {dataset.val_filename} for validation -> {job.data_dir}")
    _fail(download(job, indices, num_workers=args.num_workers), len(indices),
          "What has arrived is kept, partial files too: run the same command again to go on.")
    print(f"{job.data_dir}: {len(indices)} shards are here")


if __name__ == "__main__":
    run_main(main)
