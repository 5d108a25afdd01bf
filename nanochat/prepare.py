"""
Prepares text that is not ordinary parquet: once, as a plain folder of parquet, which a run reads.

    the user's files                             <base dir>/prepared/mytext-8d3f2c91a0b4e7d6/
    mytext/web/a.jsonl                             train/web/a.jsonl.parquet    text    from_file     from_line
      1  {"text": "one"}          --prepare-->                                  one     web/a.jsonl   1
      2  broken                                                                 two     web/a.jsonl   3
      3  {"text": "two"}                           val/web/b.jsonl.parquet      ...
    mytext/web/b.jsonl                             prepared.json                records: counts, skipped lines

Prepared are all kinds but parquet, and parquet if only some of its documents are used:
--val-fraction, --min-chars, nulls. The other files are read where they are. Everything above this
module sees parquet only. Rows keep the name and the line of the document in the user's own file.

**Identity.** The folder is named after what it depends on: the path, size and modification time
(in object storage, the ETag) of each file, and the options that select documents. So a folder
never changes, and a run that reads it is safe from the next one. If a file changes, a new folder
is made; the files that did not change are hard links into the older folder, which take no space.
An older folder that holds all of the files, and others, is read instead: it may also hold files of
which no document was selected, or a fork may need the validation files alone. Each parquet file
records the size and hash of the user's file. A run pins these, and not the bytes of the parquet file,
which may depend on the version of pyarrow.

**Crashes.** Each file is written under a temporary name, fsynced and renamed, so a folder holds
whole files only. An interrupted preparation is continued by the next launch. One process prepares
while others wait for its lock; without locks, two processes write the same files, which is
harmless. A folder that was deleted is made again.

    python -m nanochat.prepare            # list the folders and their sizes
    python -m nanochat.prepare --remove   # delete those that no run reads
    python -m nanochat.prepare --remove NAME    # this one, too: it is made again from the same files
"""

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from nanochat.cli import Parser, run_main
from nanochat.common import (
    WRITABLE_BASE,
    AnyPath,
    Remote,
    atomic_open,
    check_shape,
    check_stop,
    counted,
    each,
    few,
    fsync_dir,
    get_base_dir,
    hash_file,
    hash_json,
    is_remote,
    local_copy,
    make_local_copies,
    read_json,
    reason_of,
    remove_leftovers,
    table,
    write_json,
)
from nanochat.pins import DATA_MANIFEST, read_manifests
from nanochat.text import ORIGIN, TEXT_BYTES, Numbered, Selection, Skipped, prepared_dir, warn_once
from nanochat.text_kinds import describe_skipped, numbered_documents

log = logging.getLogger(__name__)

FORMAT = 1  # of the prepared files
GROUP_DOCUMENTS = 1024  # per row group
RECORDS = "prepared.json"
KEEP_S = 10.0  # time between two writes of it
POLL_S = 0.1  # time between two looks at a lock
FILE, LINE = "from_file", "from_line"  # columns: where a document is in the user's own files
USES = {"train": "training", "val": "validation"}  # of the splits, in sentences
FULL = (errno.ENOSPC, errno.EDQUOT)


class Record(NamedTuple):
    """What is known about a prepared file. `skipped`: see `numbered_documents`."""

    key: str  # of the `TextFile`
    source: str  # the user's own file
    documents: int
    num_bytes: int  # of the parquet file
    skipped: Skipped

    @property
    def has_mistakes(self) -> bool:
        """Whether broken lines or nulls were skipped, which --strict forbids."""
        return bool(self.skipped["count"] or self.skipped.get("nulls"))


RECORD = {
    "key": str,
    "source": str,
    "documents": int,
    "num_bytes": int,
    "skipped": {"count": int, "lines": [list], "short": int},
}
Records = dict[str, Record]  # by the name of the parquet file, relative to its folder


class TextFile(NamedTuple):
    """A file of the user that is to be prepared. `name`: relative to the data path."""

    path: AnyPath
    name: str
    split: str  # train or val
    selection: Selection

    def version(self) -> list[str | int]:
        """What changes when the file does, without reading it. OSError if it does not exist."""
        stat = self.path.stat()
        if isinstance(self.path, Remote):
            return [str(self.path), stat.st_size, self.path.etag()]
        return [str(self.path.resolve()), stat.st_size, stat.st_mtime_ns]

    def key(self) -> str:
        """A hash of everything that the prepared file depends on."""
        return hash_json([FORMAT, self.name, self.version(), self.selection.hashed()])


# ---- preparing -----------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """A parquet file, and the record of how it was made."""

    path: Path
    record: Record


def prepare(files: Sequence[TextFile]) -> list[Prepared]:
    """What was prepared from each of the user's files, in that order. Files that were not prepared
    before are prepared now, under a progress bar. Warns about what is skipped. ValueError names a
    file that cannot be read. OSError if the disk is full."""
    if not files:
        return []
    targets = _targets(files)
    keys = {target: file.key() for target, file in targets.items()}
    folder = prepared_dir() / f"{_title(files[0])}-{hash_json(sorted(keys.items()))[:16]}"
    records = _read_records(folder)
    missing = _missing(folder, records, targets)
    if missing and (larger := _larger(targets, keys)):
        folder = larger
        records = _read_records(folder)
        missing = []
    if missing:
        with _alone(folder):
            records = _read_records(folder)  # another process may have prepared them meanwhile
            missing = _missing(folder, records, targets)
            records = _make(folder, records, {name: targets[name] for name in missing}, keys)
    _report(folder, records, targets, was_ready=not missing)
    made = {file: Prepared(folder / name, records[name]) for name, file in targets.items()}
    return [made[file] for file in files]


def _title(file: TextFile) -> str:
    """The name of the data folder, as the readable part of the prepared folder's name."""
    root = file.path.parents[len(Path(file.name).parts) - 1]
    return re.sub(r"[^A-Za-z0-9_.]+", "-", root.name).strip("-.")[:40] or "data"


def _targets(files: Sequence[TextFile]) -> dict[str, TextFile]:
    """{parquet file, relative to the prepared folder: the user's file}. A folder train/ or val/ of
    the user's is not repeated below ours, unless another file has the name without it. So a file
    has the same name without those that hold no documents."""
    names = {(file.split, file.name) for file in files}
    targets = {}
    for file in files:
        parent, _, inner = file.name.partition("/")
        is_own = parent == file.split and (file.split, inner) not in names
        targets[f"{file.split}/{inner if is_own else file.name}.parquet"] = file
    return targets


def _read_records(folder: Path) -> Records:
    """The records of a prepared folder; {} if it does not exist, or if its file is corrupt."""
    try:
        files = read_json(folder / RECORDS, {"files": dict})["files"]
        check_shape(files, dict.fromkeys(files, RECORD), folder / RECORDS)
        return {name: Record(**record) for name, record in files.items()}
    except (FileNotFoundError, ValueError, TypeError):
        return {}


def _missing(folder: Path, records: Records, targets: dict[str, TextFile]) -> list[str]:
    """The parquet files that are not there, or not whole. With --strict, also those that were made
    although something in them was skipped: to make them again is an error that names it."""
    missing = []
    for name, file in targets.items():
        record = records.get(name)
        is_whole = record is not None and _size(folder / name) == record.num_bytes
        if record is None or not is_whole or (file.selection.strict and record.has_mistakes):
            missing.append(name)
    return missing


def _larger(targets: dict[str, TextFile], keys: dict[str, str]) -> Path | None:
    """A folder that holds all of these files, and others: an earlier launch also prepared a file
    without documents, or this one reads only the validation data."""
    for path in sorted(prepared_dir().glob(f"*/{RECORDS}")):
        records = _read_records(path.parent)
        has_all = all(name in records and records[name].key == key for name, key in keys.items())
        if has_all and not _missing(path.parent, records, targets):
            return path.parent
    return None


def _size(place: Path) -> int:
    """The size of a file in bytes, -1 if it does not exist."""
    try:
        return place.stat().st_size
    except OSError:
        return -1


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Make a prepared folder, and wait until no other process writes into it. OSError if it cannot
    be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT, 0o666)
    except OSError as e:
        raise OSError(
            f"{folder}: text cannot be prepared there ({reason_of(e)}){WRITABLE_BASE}"
        ) from None
    try:
        with contextlib.suppress(OSError):  # some file systems have no locks
            while not _is_locked(lock):
                check_stop()
                time.sleep(POLL_S)
        yield
    finally:
        os.close(lock)


def _is_locked(fd: int) -> bool:
    """Lock an open file, unless another process has locked it. OSError if it has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _make(
    folder: Path, records: Records, missing: dict[str, TextFile], keys: dict[str, str]
) -> Records:
    """Prepare the missing files, several at once, and return the records of all. After an error
    or a stop, what is finished is kept, and recorded."""
    _copy_remote(missing.values())
    elsewhere = _by_key()
    records = dict(records)
    errors: list[Exception] = []
    bar = tqdm(
        desc=f"preparing {counted(len(missing), 'file')}", unit=" documents", delay=1, disable=None
    )

    def tick(documents: int) -> None:
        bar.update(documents)
        check_stop()
        if errors:  # of another file
            raise errors[0]

    def make(name: str) -> tuple[str, Record | None]:
        """(name, record) of a file. An error is kept for the caller, and ends the other conversions."""
        file = missing[name]
        place = folder / name
        record = None
        try:
            tick(0)
            place.parent.mkdir(parents=True, exist_ok=True)
            if not file.selection.strict:
                record = _link(elsewhere.get(keys[name]), place, str(file.path))
            return name, record or _convert(file, keys[name], place, tick)
        except Exception as e:
            errors.append(e)
            return name, None

    kept_at = time.monotonic()
    try:
        with bar:
            for name, record in each(make, missing):
                if record is not None:
                    records[name] = record
                if time.monotonic() > kept_at + KEEP_S:  # for a launch that is killed
                    _write_records(folder, records)
                    kept_at = time.monotonic()
    finally:
        _keep(folder, records)
    if errors and isinstance(errors[0], OSError) and errors[0].errno in FULL:
        raise OSError(
            f"{folder}: no room for text as parquet ({reason_of(errors[0])}); make room (python -m nanochat.prepare "
            f"lists what can be deleted), or set NANOCHAT_BASE_DIR to another disk, and run the command again"
        ) from None
    if errors:
        raise errors[0]
    return records


def _copy_remote(files: Iterable[TextFile]) -> None:
    """Copy the files that are in object storage or on the Hub to this machine."""
    # once each: the parts for training and for validation are made of the same file
    copied = {str(file.path): file.path for file in files if is_remote(file.path)}
    if not copied:
        return
    num_bytes = sum(path.stat().st_size for path in copied.values())
    num_files = counted(len(copied), "file")
    log.info("text: %s are copied to prepare them (%.1f MB)", num_files, num_bytes / 1e6)
    make_local_copies(copied.values())


def _keep(folder: Path, records: Records) -> None:
    """Write the records of a folder. A folder without any files is deleted."""
    for place in {folder, *(path.parent for path in folder.rglob(".*.tmp"))}:
        remove_leftovers(place)
    if not records:
        shutil.rmtree(folder, ignore_errors=True)
        return
    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile; the next launch starts over
        _write_records(folder, records)


def _write_records(folder: Path, records: Records) -> None:
    """Write the records of a folder."""
    files = {name: record._asdict() for name, record in records.items()}
    write_json(folder / RECORDS, {"format": FORMAT, "files": files})


def _by_key() -> dict[str, tuple[Path, Record]]:
    """{key: (parquet file, its record)} of everything that is prepared."""
    known = {}
    for path in prepared_dir().glob(f"*/{RECORDS}"):
        for name, record in _read_records(path.parent).items():
            known[record.key] = path.parent / name, record
    return known


def _link(known: tuple[Path, Record] | None, place: Path, source: str) -> Record | None:
    """Make `place` a hard link to the same file in another folder, and return its record. None if
    there is none. `source`: the user's own file."""
    if known is None:
        return None
    other, record = known
    if other == place or _size(other) != record.num_bytes:
        return None
    try:
        place.unlink(missing_ok=True)
        os.link(other, place)
        fsync_dir(place.parent)
    except OSError:  # deleted meanwhile, or a file system without hard links
        return None
    return record._replace(source=source)


def _convert(file: TextFile, key: str, place: Path, tick: Callable[[int], None]) -> Record:
    """Write the selected documents of a file as parquet, and return its record. `tick` is called
    with the number of documents of each group that is written, and may raise."""
    source = local_copy(file.path)
    origin = {"size": source.stat().st_size, "hash": hash_file(source)}
    field = file.selection.text_field
    name_type = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema([(field, pa.string()), (FILE, name_type), (LINE, pa.int64())])
    skipped: Skipped = {}
    documents = numbered_documents(source, file.selection, skipped)
    num_documents = text_bytes = 0
    with (
        atomic_open(place) as out,
        pq.ParquetWriter(out, schema, compression="zstd", write_page_checksum=True) as writer,
    ):
        while group := list(itertools.islice(documents, GROUP_DOCUMENTS)):
            columns = _columns(group, file.name)
            writer.write_table(pa.table(columns, schema=schema), row_group_size=GROUP_DOCUMENTS)
            num_documents += len(group)
            text_bytes += sum(len(document.text.encode()) for document in group)
            tick(len(group))
        if file.key() != key:
            raise ValueError(
                f"{file.path}: it changed while being read; run the same command again when it is complete"
            )
        writer.add_key_value_metadata({TEXT_BYTES: str(text_bytes), ORIGIN: json.dumps(origin)})
    return Record(key, str(file.path), num_documents, place.stat().st_size, skipped)


def _columns(group: Sequence[Numbered], name: str) -> list[pa.Array]:
    """The columns of a row group: text, file, line."""
    texts = pa.array([document.text for document in group], pa.string())
    lines = pa.array([document.line for document in group], pa.int64())
    indices = pa.array([0] * len(group), pa.int32())
    return [texts, pa.DictionaryArray.from_arrays(indices, [name]), lines]


def _report(
    folder: Path, records: Records, targets: dict[str, TextFile], *, was_ready: bool
) -> None:
    """Log where the prepared files are, and warn about what was skipped in them."""
    with_nulls: dict[AnyPath, int] = {}
    made = [records[name] for name in targets]
    for record, file in zip(made, targets.values()):
        skipped = record.skipped
        if skipped.get("nulls"):
            with_nulls[file.path] = skipped["nulls"]
        for line in describe_skipped(file.path, file.selection, {**skipped, "nulls": 0}):
            warn_once(line)
    if with_nulls:
        total = counted(sum(with_nulls.values()), "null")
        files = f"{counted(len(with_nulls), 'file')}: {few(sorted(with_nulls))}"
        field = next(iter(targets.values())).selection.text_field
        warn_once(f"skipped {total} in column `{field}` of {files}")
    if was_ready:
        log.info("text: prepared before, in %s", folder)
        return
    log.info(
        "text: %s with %s prepared now as parquet in %s (%.1f MB; python -m nanochat.prepare lists such folders)",
        counted(len({file.path for file in targets.values()}), "file"),
        counted(sum(record.documents for record in made), "document"),
        folder,
        sum(record.num_bytes for record in made) / 1e6,
    )


# ---- the command ---------------------------------------------------------------------------------


def disk_bytes(folder: Path) -> int:
    """The bytes below a folder. Hard links are counted once."""
    stats = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in stats}.values())


def _users(base: Path) -> tuple[defaultdict[str, list[str]], list[str]]:
    """({prepared folder: runs that read it, at their last launch}, runs of which this is not known,
    because their manifest cannot be read)."""
    users = defaultdict[str, list[str]](list)
    unknown = []
    root = get_base_dir() / "runs"
    for run_dir in sorted(root.iterdir()) if root.is_dir() else []:
        try:
            manifests = read_manifests(run_dir / DATA_MANIFEST)
        except (OSError, ValueError):  # it is corrupt, or another user's
            unknown.append(run_dir.name)
            continue
        used = set()
        for manifest in itertools.chain(*(of.values() for of in manifests.values())):
            places = [Path(entry.get("parquet", "")) for entry in manifest["files"]]
            used |= {p.relative_to(base).parts[0] for p in places if p.is_relative_to(base)}
        for folder in used:
            users[folder].append(run_dir.name)
    return users, unknown


def main(argv: Sequence[str] | None = None) -> int:
    """List or delete the prepared folders."""
    parser = Parser(prog="python -m nanochat.prepare", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="folders (default: all)")
    parser.add_argument(
        "--remove",
        action="store_true",
        help="delete these folders (default: those that no run reads); launches that are running must not be "
        "reading them",
    )
    args = parser.parse_args(argv)
    base = prepared_dir()
    folders = sorted(path for path in base.glob("*") if (path / RECORDS).is_file())
    known = {folder.name: folder for folder in folders}
    for name in args.names:
        if name not in known:
            raise ValueError(
                f"{name}: no such folder in {base}; expected {', '.join(known) or 'none'}"
            )
    users, unknown = _users(base)
    chosen = [known[name] for name in args.names] or folders
    if args.remove and not args.names:
        chosen = [folder for folder in folders if not users[folder.name]]
        if unknown and chosen:
            raise ValueError(
                f"--remove: which text {few(unknown)} reads is not known, because {DATA_MANIFEST} in its "
                f"folder cannot be read, so nothing was deleted; name the folders to delete"
            )
    rows = []
    for folder in chosen:
        records = _read_records(folder).values()
        sources = sorted({record.source for record in records})
        rows.append(
            [
                folder.name,
                disk_bytes(folder) / 1e6,
                len(records),
                few(sources),
                few(users[folder.name]) or "-",
            ]
        )
    if rows:
        print(*table(["folder", "MB", "files", "made from", "runs"], rows), sep="\n")
    print(f"{base}: {counted(len(folders), 'folder')}, {disk_bytes(base) / 1e6:,.1f} MB")
    if args.remove:
        for folder in chosen:
            shutil.rmtree(folder)
        kept = len(folders) - len(chosen)
        others = "" if args.names or not kept else f", kept {kept:,} that a run reads"
        print(f"deleted {counted(len(chosen), 'folder')}{others}")
    return 0


if __name__ == "__main__":
    run_main(main)
