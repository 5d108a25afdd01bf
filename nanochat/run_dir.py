"""A run directory: one folder that holds all that one training run wrote, and so all that is
needed to go on with it.

    runs/d12/
      config.json                 the resolved configuration; written once
      data_manifest.json          which files it reads
      tokenizer/                  written once
      logs/train.jsonl            one JSON object per step and per event
      logs/cursors/               the cursors of every save, kept for ever
      checkpoints/                see nanochat/checkpoint.py

**Names in checkpoints/.** `checkpoint-STEP`, `checkpoint-STEP-shutdown` and `final` are
checkpoints. Hidden names never count: a checkpoint appears by one rename, when it is whole, and
goes by one rename, before any part of it is deleted (77 is the process that does it):

    .tmp-final-77  -->  final  -->  .del-final-77  -->  gone

**The log only grows.** A run that crashed at step 130 and resumes at step 100 writes the lines of
steps 101..130 again:

    {"step": 129, "loss": 3.1, "digest": "0f.."}
    {"step": 130, "lo                                    <- torn by the crash; closed with a newline when reopened
    {"event": "resumed", "step": 100}
    {"step": 101, "loss": 3.3, "digest": "a7.."}         <- from now on the line of step 101 that counts

Readers take the last line of each step and pass over torn lines. Cutting the log at resume would
look tidier and destroy the evidence: a resumed run is checked against the digests that are there.

**Nothing makes a run directory by the way.** Only the launch that owns a run makes its folders,
when it starts. Where somebody removes the log or the checkpoints under a run that trains, the
writer makes them anew and says so; where the run directory itself is gone, writing is an error.
"""

import contextlib
import errno
import gzip
import itertools
import json
import logging
import math
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nanochat.cli import did_you_mean
from nanochat.common import fsync_dir, get_base_dir, parse_json, read_json, remove_leftovers, write_bytes

log = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
PLAN_NAME = "plan.json"
CURSORS_VERSION = 1
CHECKPOINT_NAME = re.compile(r"checkpoint-(?P<step>\d+)(-shutdown)?|final")
HIDDEN_NAME = re.compile(rf"\.(tmp|del)-(?P<name>{CHECKPOINT_NAME.pattern})-\d+")
APPENDING = os.O_RDWR | os.O_CREAT | os.O_APPEND
FOLDERS = ("checkpoints", "logs", "logs/cursors", "logs/rows", "tokenizer")


# ---- finding runs -------------------------------------------------------------------------------

def run_path(tag: str) -> Path:
    """Where the run named `tag` lives: <base dir>/runs/<tag>. Nothing is made. ValueError unless
    `tag` is a plain, printable name of at most 100 characters that no command takes for a flag."""
    if re.fullmatch(r"[\w@+=,%~ ][\w@+=,%~ .-]{0,99}", tag) is None:
        raise ValueError(f"--model-tag: got {tag[:120]!r}, expected a plain folder name of at most 100 "
                         f"characters and no hyphen in front, such as d12")
    return get_base_dir() / "runs" / tag


def is_run_dir(path: Path) -> bool:
    """Whether a run was started in the folder `path`."""
    return (path / CONFIG_NAME).is_file() or bool(checkpoint_folders(path))


def list_runs() -> list[str]:
    """The tags of all runs under the base directory, sorted; those too that have got no further
    than saying that they start."""
    root = get_base_dir() / "runs"
    return sorted(p.name for p in root.iterdir() if _has_run(p)) if root.is_dir() else []


def _has_run(path: Path) -> bool:
    return is_run_dir(path) or (path / ".run_state.json").is_file()


def find_run(tag_or_path: str | os.PathLike[str] | None) -> Path:
    """The run directory that a tag (looked up first) or a path means; None means the only run
    there is. FileNotFoundError and, for None, ValueError list the runs there are."""
    runs, root = list_runs(), get_base_dir() / "runs"
    known = ", ".join(runs) or "none"
    if tag_or_path is None:
        if len(runs) != 1:
            there = f"there are {len(runs)} ({known}); name one"
            raise ValueError(f"which run? In {root} {there if runs else 'there is none yet'}")
        return root / runs[0]
    text = os.fspath(tag_or_path)
    for path in (root / text, Path(text).expanduser()):
        if text and _has_run(path):
            return path
    raise FileNotFoundError(f"no run {text!r}: neither a tag under {root} nor a run directory"
                            f"{did_you_mean(text, runs) or f'; runs there: {known}'}")


# ---- configuration ------------------------------------------------------------------------------

def read_config(run_dir: Path) -> dict[str, Any]:
    """The configuration that started the run. FileNotFoundError if it has none, ValueError if it
    is broken."""
    path = run_dir / CONFIG_NAME
    if not path.is_file():
        found = ", ".join(checkpoint_folders(run_dir))
        raise FileNotFoundError(
            f"{path}: missing, so nobody knows which settings {found} belong to; put it back, begin "
            f"anew with --resume scratch --force, or start another run with --model-tag NAME" if found else
            f"{path}: missing, so {run_dir} is no run directory or its run never started")
    return read_json(path, dict, way_out="put it back, or begin anew with --resume scratch --force")


# ---- names in checkpoints/ ----------------------------------------------------------------------

def checkpoint_folders(run_dir: Path) -> dict[str, Path]:
    """{name: folder} of a run's checkpoints, good or not."""
    parent = run_dir / "checkpoints"
    paths = sorted(parent.iterdir()) if parent.is_dir() else []
    return {path.name: path for path in paths if CHECKPOINT_NAME.fullmatch(path.name)}


def delete_checkpoint(path: Path) -> None:
    """Delete a checkpoint so that a crash leaves either all of it or nothing that counts.
    ValueError if it is none."""
    if CHECKPOINT_NAME.fullmatch(path.name) is None or path.parent.name != "checkpoints":
        raise ValueError(f"{path}: not the name of a checkpoint; not deleted")
    doomed = path.with_name(f".del-{path.name}-{os.getpid()}")
    os.rename(path, doomed)
    fsync_dir(path.parent)
    remove_tree(doomed)


def remove_tree(path: Path) -> None:
    """Remove a file or a folder with all that is in it. Of a symbolic link the link goes, never
    what it points to."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)


# ---- the folders of a run -----------------------------------------------------------------------

def open_folders(run_dir: Path) -> None:
    """Make the folders that a run writes into, and tidy up what a crash left in them: unfinished
    saves and deletions, and half-written files. For the launch that owns the run, when it
    starts."""
    for name in FOLDERS:
        (run_dir / name).mkdir(parents=True, exist_ok=True)
    clean_stale(run_dir)
    for name in ("", *FOLDERS):
        remove_leftovers(run_dir / name, fresh_s=0.0)


def clean_stale(run_dir: Path) -> None:
    """Remove unfinished saves and deletions of checkpoints. What cannot be removed stays: it never
    counts."""
    parent = run_dir / "checkpoints"
    for path in list(parent.iterdir()) if parent.is_dir() else []:
        if HIDDEN_NAME.fullmatch(path.name):
            try:
                remove_tree(path)
            except OSError as e:
                log.warning("%s cannot be removed (%s); it is of no use, delete it by hand", path, e.strerror)


def remake_folder(folder: Path) -> None:
    """Make a folder of a run anew, with a warning, if somebody removed it. FileNotFoundError if what it
    lies in is gone, too."""
    if not folder.is_dir():
        try:
            folder.mkdir()
        except FileNotFoundError:
            raise FileNotFoundError(f"{folder.parent}: it was removed while the run trains, so the "
                                    f"run ends; what it had is lost") from None
        log.warning("%s was removed while the run trains; it is made anew, empty", folder)


def set_aside(run_dir: Path) -> Path:
    """Give a run, or whatever lies in its place, another name, so that a new one can begin there.
    Nothing is deleted: that is left to a person. Returns where it is now."""
    others = (run_dir.with_name(f"{run_dir.name}.old-{number}") for number in itertools.count(1))
    aside = next(path for path in others if not os.path.lexists(path))
    os.rename(run_dir, aside)
    log.warning("%s: what was there is %s now; delete it if you do not need it", run_dir, aside)
    return aside


# ---- the log ------------------------------------------------------------------------------------

def open_regular(path: Path, flags: int) -> BinaryIO:
    """Open a file that must be a regular one, unbuffered. Symbolic links are not followed, and a
    FIFO is not waited for: ValueError for those, and for folders. OSError as of `os.open`."""
    error = ValueError(f"{path}: expected a regular file, not a folder, a symbolic link or a FIFO; delete it")
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise error from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise error
    return os.fdopen(fd, "r+b", buffering=0)


def finite(value: Any) -> Any:
    """A value whose NaN and infinities are null: bare NaN is not JSON, and other programs' parsers
    stop at it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


class TrainLog:
    """The appending side of logs/train.jsonl. One process (rank 0) writes; each line goes to the
    operating system at once, so that a killed process loses none.

    `first_step`: digests of steps before it are not kept in memory (a resumed run repeats none of
    them). `lost`: called before each line; '' or why this launch must not write another one."""

    def __init__(self, path: Path, *, first_step: int = 0, lost: Callable[[], str] = lambda: "") -> None:
        self._path, self._lost = path, lost
        path.parent.mkdir(exist_ok=True)
        self._before = {r["step"]: r.get("digest") for r in iter_log(path)
                        if is_step(r) and r["step"] >= first_step}
        self._file = open_regular(path, APPENDING)
        self._torn = False
        if self._file.seek(0, os.SEEK_END) > 0:
            self._file.seek(-1, os.SEEK_END)
            self._torn = self._file.read(1) != b"\n"  # its writer died: do not glue to it

    def write(self, **record: Any) -> None:
        """Append one JSON object: a step's line has `step` and no `event`, an event's has `event`.
        NaN becomes null.

        Raises TypeError (a value that is not JSON), OSError (a full disk; the next line is not
        glued to a torn one) and ValueError (this launch no longer owns the run)."""
        if reason := self._lost():
            raise ValueError(reason)
        line = ("\n" * self._torn + json.dumps(finite(record), allow_nan=False) + "\n").encode()
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:  # somebody removed the file
                self._file.close()
                remake_folder(self._path.parent)
                log.warning("%s was removed while the run trains; a new one begins here", self._path)
                self._file = open_regular(self._path, APPENDING)
            self._torn = True
            while line:  # a nearly full disk takes a part
                line = line[self._file.write(line):]
        except FileNotFoundError:
            raise
        except OSError as e:
            raise OSError(e.errno, f"{self._path}: the log cannot be written ({e.strerror}); make room "
                                   f"and start the same command again") from e
        self._torn = False

    def digest_of(self, step: int) -> str | None:
        """The digest that the log held for `step` when it was opened, or None."""
        return self._before.get(step)

    def close(self) -> None:
        """Force the log to disk and close it. Twice is fine."""
        if not self._file.closed:
            with self._file, contextlib.suppress(OSError):  # no reason to lose the error that ended the run
                os.fsync(self._file.fileno())


def is_step(record: dict[str, Any]) -> bool:
    """Whether a record of a log is the line of a step, and no event."""
    return "event" not in record and type(record.get("step")) is int


def iter_log(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line of a log in the order written, torn ones passed over; nothing if there is
    no file."""
    if not path.exists():
        return
    open_regular(path, os.O_RDONLY).close()  # to open a FIFO would wait for its writer
    with open(path, "rb") as f:
        for line in f:
            with contextlib.suppress(ValueError):
                yield parse_json(line, path, dict)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log in the order of steps: of each step its last line, then the events that
    have its number, all of them."""
    records = [record for record in iter_log(path) if type(record.get("step")) is int]
    lines = {record["step"]: record for record in records if is_step(record)}
    events = [record for record in records if "event" in record]
    return sorted([*lines.values(), *events], key=lambda record: record["step"])


def newest_events(run_dir: Path, step: int) -> dict[str, dict[str, Any]]:
    """The newest event of each name in a run's log, up to a step; "completed" only if the last launch
    logged it."""
    newest: dict[str, dict[str, Any]] = {}
    for record in iter_log(run_dir / "logs" / "train.jsonl"):
        if "event" in record and type(record.get("step")) is int and record["step"] <= step:
            if record["event"] == "started":
                newest.pop("completed", None)
            newest[record["event"]] = record
    return newest


# ---- losses of rows -----------------------------------------------------------------------------

class RowLosses:
    """The loss of every row of every step, in logs/rows/: one file for each 10,000 steps, in which each step has
    its place, so that a repeated step overwrites its record.

        record    crc32, 4 bytes | R float32: sums of token losses, nats | R uint16: live targets

    R: rows of a step. Live targets are uint32 where T is above 65,535. The checksum covers the step's number, too. A
    record that a crash truncated is overwritten when its step is repeated.
    """

    STEPS = 10_000  # in a file

    def __init__(self, run_dir: Path, *, num_rows: int, T: int) -> None:
        self.folder, self.num_rows = run_dir / "logs" / "rows", num_rows
        self.record = np.dtype([("nats", "<f4", num_rows), ("live", "<u2" if T < 1 << 16 else "<u4", num_rows)])
        self.size = 4 + self.record.itemsize

    def _place(self, step: int) -> tuple[Path, int]:
        """(file, offset) of a step's record."""
        first = step - step % self.STEPS
        return self.folder / f"step-{first:08d}.bin", (step - first) * self.size

    def write(self, step: int, nats: Sequence[float], live: Sequence[int]) -> None:
        """Write the record of a step. OSError says what to do if the disk does not take it."""
        path, offset = self._place(step)
        remake_folder(self.folder.parent)
        remake_folder(self.folder)
        record = np.zeros((), self.record)
        record["nats"], record["live"] = nats, live
        data = record.tobytes()
        try:
            with open_regular(path, os.O_RDWR | os.O_CREAT) as f:
                f.seek(offset)
                if f.write(_checksum(step, data) + data) < self.size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as e:
            raise OSError(e.errno, f"{path}: the losses of rows cannot be written ({e.strerror}); make room and start "
                                   f"the same command again, or add --no-row-losses") from e

    def read(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(nats (R,) float32, live (R,) int64) of a step. FileNotFoundError if nothing was recorded, ValueError if
        the record is corrupt."""
        path, offset = self._place(step)
        data = b""
        if path.exists():
            with open_regular(path, os.O_RDONLY) as f:
                f.seek(offset)
                data = f.read(self.size)
        if len(data) < self.size or not any(data):
            raise FileNotFoundError(f"{path}: it has no losses of the rows of step {step}: the run has not trained "
                                    f"that step, or did so with --no-row-losses")
        if data[:4] != _checksum(step, data[4:]):
            raise ValueError(f"{path}: the losses of the rows of step {step} are corrupt (wrong checksum), so they "
                             f"cannot be shown; training does not read them. Delete the file to hide this message")
        record = np.frombuffer(data[4:], self.record)[0]
        return record["nats"].copy(), record["live"].astype(np.int64)


def _checksum(step: int, data: bytes) -> bytes:
    return zlib.crc32(data, step).to_bytes(4, "little")


# ---- cursors ------------------------------------------------------------------------------------

def pack_cursors(step: int, cursors: list[dict[str, Any]]) -> bytes:
    """The cursors of all lanes after `step`, compressed; equal cursors give equal bytes (no time
    stamp inside)."""
    value = {"format_version": CURSORS_VERSION, "step": step, "cursors": cursors}
    return gzip.compress(json.dumps(value, separators=(",", ":")).encode(), mtime=0)


def keep_cursors(run_dir: Path, step: int, packed: bytes) -> None:
    """Keep the packed cursors of a save for as long as the run directory lives."""
    folder = run_dir / "logs" / "cursors"
    remake_folder(folder.parent)
    remake_folder(folder)
    write_bytes(folder / f"step-{step:08d}.json.gz", packed)


def read_cursors(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """(step, the V cursors) from a lanes.json.gz or a logs/cursors file. ValueError if it is
    broken."""
    return unpack_cursors(path.read_bytes(), path)


def unpack_cursors(packed: bytes, path: Path) -> tuple[int, list[dict[str, Any]]]:
    """(step, the V cursors) from what `pack_cursors` gave. ValueError, which names `path`, if it is corrupt."""
    try:
        data = gzip.decompress(packed)
    except Exception as e:  # BadGzipFile, EOFError, zlib.error
        raise ValueError(f"{path}: torn or rotten ({type(e).__name__})") from e
    value = parse_json(data, path, {"step": int, "cursors": [dict]})
    return value["step"], value["cursors"]


def cursor_files(run_dir: Path) -> dict[int, Path]:
    """{step: file} of all cursors ever kept by a run, ascending."""
    files = sorted((run_dir / "logs" / "cursors").glob("step-????????.json.gz"))
    return {int(path.name[5:13]): path for path in files}
