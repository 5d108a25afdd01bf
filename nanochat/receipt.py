"""
Receipts: a small file with which others can recompute the rows of a run from the same data.

A receipt holds everything that determines the rows, and the digests that the run logged:

    settings, stream    what sets the order of the data: lanes, seed, packing, curriculum, fingerprints of data and
                        tokenizer
    files               for each bucket, one line per file: hash of its manifest entry, BLAKE2b-128 of its bytes, size,
                        name
    marks               for every 1,000th step and the last one: its digest, and a hash chained over all digests up to
                        it, chain(s) = hash(chain(s - 1), digest(s)), so one mark proves all steps before it
    first, begin        of a fork: its first step, and the cursors of all lanes there
    data                of data on the Hub: its path, with the commit
    tokenizer           the files of the run's tokenizer, so that nobody needs to ask for them
    checkpoints         {step: checksum of its seal} of those that exist
    training, horizons  the settings and lengths of the run. With them, whoever gets two of the checkpoints later can
                        train the steps between them again, and compare every bit

All of it is plain JSON: 700 kB for a vocabulary of 32,768, and 90 bytes per file. Names are
relative to the data path. Files in object storage have no hash of their bytes, because computing it
would require downloading them; those on the Hub have the SHA-256 that it lists.
"""

import contextlib
import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from tqdm import tqdm

from nanochat.checkpoint import list_checkpoints, read_seal
from nanochat.cli import Decides
from nanochat.common import (
    AnyPath,
    Remote,
    as_path,
    begin_launch,
    check_shape,
    differences,
    each,
    hash_bytes,
    hash_file,
    hash_json,
    read_json,
)
from nanochat.config import Settings, fields_of, flag
from nanochat.files import MANIFEST_NAME, data_at
from nanochat.pins import Manifest, Pin, pins_of
from nanochat.run_dir import CONFIG_NAME, read_cursors
from nanochat.run_order import stream_config
from nanochat.run_reader import Launch, RunReader
from nanochat.run_stream import Opened
from nanochat.sources import open_data, scan_all
from nanochat.start_run import open_run
from nanochat.stream import stream_identity
from nanochat.text import Selection
from nanochat.tokenizer import Tokenizer, get_tokenizer

FORMAT = 2
NAME = "receipt.json"  # of a run's own, in its folder
# settings that decide what a step computes, but name files or runs, which have their own hashes
OF_ONE_MACHINE = ("without_documents", "init_from", "fork_from")
EVERY = 1000  # steps between marks
BUCKET = {"files": [str], "others": dict}
MARK = {"digest": str, "chain": str}
SHAPE = {
    "nanochat_receipt": int,
    "run": str,
    "code": [str],
    "steps": int,
    "settings": dict,
    "stream": {"tokenizer": str},
    "files": dict,
    "marks": dict,
    "begin": list | None,
    "tokenizer": dict,
    "checkpoints": dict,
    "training": dict,
    "horizons": list,
    "checksum": str,
}
PUBLIC = "hf://"  # how a data path begins that others can read, too
SHA256 = "sha256:"  # how a hash begins that the Hub knows
REWRITE = "write it again with python -m scripts.receipt RUN"


class FileLine(NamedTuple):
    """A file in a receipt."""

    pin: str  # hash of its entry in the manifest, which a run compares when it resumes
    # hash of its bytes (for a pair, also of the .idx); "sha256:..." for a file on the Hub, "-" for
    # one in object storage
    content: str
    size: str
    name: str

    def is_other_content(self, now: "FileLine") -> bool:
        """Whether the bytes are known to differ: both have a hash, of the same kind."""
        is_known = "-" not in (self.content, now.content)
        is_same_kind = self.content.startswith(SHA256) == now.content.startswith(SHA256)
        return is_known and is_same_kind and self.content != now.content

    def differs(self, path: AnyPath, now: "FileLine") -> str:
        """A sentence that says how this file differs from the one at `path` now; empty if they are
        equal."""
        if self.size != now.size:
            return f"{path}: it has {now.size} bytes, the receipt says {self.size}"
        if self.is_other_content(now):
            return f"{path}: its contents have changed (hash {now.content[:16]}, the receipt says {self.content[:16]})"
        if now.pin != self.pin:
            what = f"its documents or groups, or the {MANIFEST_NAME} beside it, have changed"
            return f"{path}: {what} (pin {now.pin}, the receipt says {self.pin})"
        return ""


# ---- making one ---------------------------------------------------------------------------------


def describe_file(root: AnyPath, entry: Pin, *, by_sha256: bool = False) -> FileLine:
    """The line of a file below `root`, given its entry in a manifest. `by_sha256`: hash it as the
    Hub does."""
    path = root / entry["name"]
    pinned = hash_json(pins_of(entry))
    if isinstance(path, Remote):
        sha256 = path.sha256()
        content = f"{SHA256}{sha256}" if sha256 else "-"
    elif by_sha256:
        with path.open("rb") as file:
            content = f"{SHA256}{hashlib.file_digest(file, 'sha256').hexdigest()}"
    elif path.suffix == ".bin":
        content = hash_bytes(
            *(hash_file(part).encode() for part in (path, path.with_suffix(".idx")))
        )
    else:
        content = hash_file(path)
    return FileLine(pinned[:16], content, str(entry["size"]), entry["name"])


def list_files(manifests: Mapping[str, Manifest]) -> dict[str, Any]:
    """The files of all buckets, each with its hashes. Reads all local files."""
    entries = [entry for manifest in manifests.values() for entry in manifest["files"]]
    listed: dict[str, Any] = {}
    with tqdm(
        total=sum(entry["size"] for entry in entries),
        unit="B",
        unit_scale=True,
        desc="hashing the data",
        disable=None,
    ) as bar:
        for bucket, manifest in manifests.items():
            root, lines = as_path(manifest["root"]), list[FileLine]()
            for line in each(partial(describe_file, root), manifest["files"]):
                lines.append(line)
                bar.update(int(line.size))
            others = {
                name: value for name, value in manifest.items() if name not in ("root", "files")
            }
            listed[bucket] = {
                "files": [" ".join(line) for line in lines],
                "others": others,
            }
    return listed


def row_settings(settings: Settings) -> dict[str, Any]:
    """{name: value} of the settings that decide the rows of a run."""
    chosen = {
        name: getattr(settings, name)
        for name, f in fields_of(type(settings)).items()
        if Decides.ROWS in f.metadata["decides"]
    }
    return chosen if settings.fork is None else {**chosen, "fork": settings.fork}


def training_settings(settings: Settings) -> dict[str, Any]:
    """{name: value} of all settings that decide what a step computes."""
    return {
        name: getattr(settings, name)
        for name, f in fields_of(type(settings)).items()
        if f.metadata["decides"] and name not in OF_ONE_MACHINE
    }


def horizons_of(launches: Sequence[Launch]) -> list[list[Any]]:
    """[first step, number of steps of the whole run] of each launch, from which rates follow."""
    return [[launch.first, launch.started.get("num_iterations")] for launch in launches]


def seals_of(run: RunReader, steps: int) -> dict[str, str]:
    """{step: checksum of its seal} of the run's good checkpoints up to a step."""
    seals = {}
    for path in reversed(list_checkpoints(run.run_dir)):
        with contextlib.suppress(OSError, ValueError):  # a damaged one commits to nothing
            seal = read_seal(path)
            if seal["step"] <= steps:
                seals[str(seal["step"])] = seal["checksum"]
    return seals


def make_receipt(
    run: RunReader, steps: int | None = None, data_path: str | None = None
) -> dict[str, Any]:
    """The receipt of the first `steps` steps of a run (None: of all completed steps). `data_path`:
    where its data is now. ValueError or
    FileNotFoundError if the log lacks a digest, or if a file of the data has changed or is
    missing."""
    run.check_trained()
    steps, digests = run.num_steps if steps is None else steps, run.digests
    first = run.first_step
    if steps <= first:
        raise ValueError(
            f"{run.name}: a receipt would have none of its steps, which begin with {first:,}"
        )
    missing = next((step for step in range(first, steps) if step not in digests), None)
    if missing is not None:
        raise ValueError(
            f"{run.log_path}: it has no digest for step {missing}, but a receipt needs those of all steps; "
            f"resume the run, or restore the log"
        )
    data, config, _ = open_run(run.run_dir, data_path)
    # `check_launches` compares those of each launch
    settings = Settings.from_json(run.config, run.run_dir / CONFIG_NAME)
    marks, link = {}, ""
    for step in range(first, steps):
        link = next_link(link, digests[step])
        if step % EVERY == 0 or step == steps - 1:
            marks[str(step)] = {"digest": digests[step], "chain": link}
    begin = run.cursor_files.get(first)
    launches = [launch for launch in run.launches if launch.first < steps]
    roots = {str(manifest["root"]) for manifest in data.manifests["train"].values()}
    public = [root for root in roots if root.startswith(PUBLIC)]
    receipt = {
        "nanochat_receipt": FORMAT,
        "run": run.name,
        "steps": steps,
        **({"first": first} if first else {}),
        "code": sorted({launch.started.get("code") or "not known" for launch in launches}),
        "settings": row_settings(settings),
        "stream": stream_identity(config, data.train, data.tokenizer.fingerprint),
        **({"data": public[0]} if len(public) == len(roots) == 1 else {}),
        "files": list_files(data.manifests["train"]),
        "marks": marks,
        "begin": None if begin is None else read_cursors(begin)[1],
        "tokenizer": tokenizer_files(data.tokenizer),
        "checkpoints": seals_of(run, steps),
        "training": training_settings(settings),
        "horizons": horizons_of(launches),
    }
    return {**receipt, "checksum": hash_json(receipt)}


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    """{name: content} of the files that `Tokenizer.save` writes. A byte that is not UTF-8 becomes a
    lone surrogate, which JSON keeps."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return {
            path.name: path.read_bytes().decode("utf-8", "surrogateescape")
            for path in sorted(Path(folder).iterdir())
        }


def next_link(link: str, digest: str) -> str:
    """The chain of digests, extended by one; it starts from an empty link."""
    return hash_bytes(link.encode(), digest.encode())


# ---- reading one --------------------------------------------------------------------------------


def read_receipt(path: Path) -> dict[str, Any]:
    """The receipt in a file. ValueError if it is corrupt or in a different format."""
    receipt = read_json(path, {"nanochat_receipt": int}, remedy=REWRITE)
    if receipt["nanochat_receipt"] != FORMAT:
        raise ValueError(
            f"{path}: its format is {receipt['nanochat_receipt']}, but this code reads format {FORMAT}; "
            f"use the code that wrote it"
        )
    check_shape(receipt, SHAPE, path)
    check_shape(receipt["files"], dict.fromkeys(receipt["files"], BUCKET), path)
    check_shape(receipt["marks"], dict.fromkeys(receipt["marks"], MARK), path)
    if str(receipt["steps"] - 1) not in receipt["marks"]:
        raise ValueError(
            f"{path}: it has no digest for its last step, {receipt['steps'] - 1:,}; {REWRITE}"
        )
    if receipt["checksum"] != hash_json(
        {name: value for name, value in receipt.items() if name != "checksum"}
    ):
        raise ValueError(
            f"{path}: its checksum is wrong, so it was edited or is corrupt; {REWRITE}"
        )
    return receipt


def lines_of(bucket: Mapping[str, Any], path: AnyPath) -> list[FileLine]:
    """The files of a bucket of a receipt. ValueError if the list is corrupt, or a name points
    outside the data path."""
    try:
        files = [FileLine(*line.split(" ", 3)) for line in bucket["files"]]
    except TypeError as e:
        raise ValueError(f"{path}: its list of files cannot be read ({e}); {REWRITE}") from None
    for file in files:
        if PurePosixPath(file.name).is_absolute() or ".." in PurePosixPath(file.name).parts:
            raise ValueError(
                f"{path}: it names the file {file.name!r}, which is not below the data path; {REWRITE}"
            )
    return files


def check_size(file: FileLine, root: AnyPath, remedy: str) -> None:
    """ValueError or FileNotFoundError, which ends with `remedy`, if a file of a receipt is missing
    below `root`, or has another size. Fast, so it comes before text is prepared."""
    path = root / file.name
    if not path.exists():
        raise FileNotFoundError(f"{path}: missing, but the receipt lists it; {remedy}")
    size = path.stat().st_size
    is_pair = path.suffix == ".bin"  # its size is that of both files
    if not is_pair and file.size != str(size):
        raise ValueError(
            f"{path}: it has {size} bytes, the receipt says {file.size}, so the run was trained on a "
            f"different file; {remedy}"
        )


def compare_file(pair: tuple[FileLine, Pin], root: AnyPath, remedy: str) -> FileLine:
    """The line of a file as it is now, from its line in a receipt and its entry in a manifest.
    ValueError, which ends with `remedy`, if they differ."""
    file, entry = pair
    path = root / file.name
    now = describe_file(root, entry, by_sha256=file.content.startswith(SHA256))
    if problem := file.differs(path, now):
        raise ValueError(f"{problem}, so it does not give the run's rows; {remedy}")
    return now


def find_manifests(
    path: AnyPath, receipt: Mapping[str, Any], data_path: str, selection: Selection
) -> dict[str, Manifest]:
    """The manifests of a receipt's files below a data path. ValueError or FileNotFoundError names
    the first file that is missing or differs."""
    root = data_at(data_path).folder
    remedy = "restore it, or name the folder that has it with --data-path"
    if "data" in receipt:
        remedy = f"leave --data-path out: the receipt names {receipt['data']}"
    listed: dict[str, list[FileLine]] = {}
    for name, bucket in receipt["files"].items():
        listed[name] = lines_of(bucket, path)
        for file in listed[name]:
            check_size(file, root, remedy)
    paths = {name: [root / file.name for file in files] for name, files in listed.items()}
    manifests = scan_all({"train": root}, {"train": paths}, selection)["train"]
    with tqdm(unit="B", unit_scale=True, desc="comparing the data", disable=None) as bar:
        for name, bucket in receipt["files"].items():
            manifest = manifests[name]
            pairs = list(zip(listed[name], manifest["files"]))
            for line in each(partial(compare_file, root=root, remedy=remedy), pairs):
                bar.update(int(line.size))
            manifest |= bucket["others"]
    return manifests


def tokenizer_of(receipt: Mapping[str, Any], path: Path) -> Tokenizer:
    """The tokenizer in a receipt. ValueError if it is corrupt."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, content in receipt["tokenizer"].items():
                data = content.encode("utf-8", "surrogateescape")
                Path(folder, Path(name).name).write_bytes(data)
            return get_tokenizer(folder)
        except (ValueError, AttributeError, OSError) as e:
            raise ValueError(f"{path}: its tokenizer cannot be read ({e}); {REWRITE}") from None


def choose_tokenizer(path: Path, receipt: Mapping[str, Any], given: Settings) -> Tokenizer:
    """The tokenizer that --tokenizer names, else the one in the receipt. FileNotFoundError or
    ValueError if it is not the run's."""
    if given.tokenizer is None:
        return tokenizer_of(receipt, path)
    tokenizer = get_tokenizer(given.tokenizer, eod_token=given.eod_token)
    if tokenizer.fingerprint != receipt["stream"]["tokenizer"]:
        raise ValueError(
            f"{path}: the run's data was tokenized with {receipt['stream']['tokenizer']}, but this "
            f"tokenizer is {tokenizer.fingerprint}; leave --tokenizer out: the receipt contains the run's"
        )
    return tokenizer


def open_receipt(path: Path, given: Settings, last: int) -> Opened:
    """The stream of a receipt without the run, from the data that --data-path names, or on the Hub.
    ValueError or FileNotFoundError for flags beyond these, a step `last` that the run did not
    train, a different tokenizer, or a file that is missing or differs."""
    begin_launch()
    # RUN is an argument here, not a setting
    allowed = {"data_path", "tokenizer", "eod_token", "run"}
    if refused := [flag(name) for name in given.differing() if name not in allowed]:
        raise ValueError(
            f"{path} and {', '.join(refused)}: a receipt has its own settings; leave these flags out"
        )
    receipt = read_receipt(path)
    data_path = given.data_path or receipt.get("data")
    if data_path is None:
        raise ValueError(
            f"{path}: a receipt does not say where the data is, unless it is on the Hub; name its folder "
            f"with --data-path"
        )
    code, stream = ", ".join(receipt["code"]), receipt["stream"]
    if last >= receipt["steps"]:
        raise ValueError(
            f"{path}: it has no step {last:,}; the run trained steps 0 to {receipt['steps'] - 1:,}"
        )
    settings = Settings.from_json(receipt["settings"], path)
    if unknown := sorted(receipt["settings"].keys() - fields_of(type(settings)).keys()):
        raise ValueError(
            f"{path}: this code has no setting {unknown[0]!r}; use the code that trained the run ({code})"
        )
    config = stream_config(settings)
    tokenizer = choose_tokenizer(path, receipt, given)
    selection = Selection.of(settings.to_json()).for_split("train")
    manifests = find_manifests(path, receipt, data_path, selection)
    data = open_data({"train": manifests, "val": {}}, tokenizer, as_stored=not config.framed)
    here = stream_identity(config, data.train, tokenizer.fingerprint)
    differing = differences(stream, here)
    if differing:
        name, theirs, ours = differing[0]
        raise ValueError(
            f"{path}: {name} is {theirs!r} in the receipt and {ours!r} "
            f"here, though the files are the same; use the code that trained the run ({code})"
        )
    rows_per_step = settings.total_batch_size // config.T
    begin = receipt["begin"] or None
    return Opened(RunReader(path), data, config, rows_per_step, begin, receipt.get("first", 0))
