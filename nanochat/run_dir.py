"""The run directory: one folder with everything that a training run writes. A resume needs only
this and the data.

    runs/d12/
      config.json, tokenizer/     the resolved settings, and the tokenizer; written once
      data_manifest.json          the data files that the run reads
      plan.json, .run_state.json, .owner.json     see nanochat/plan.py and run_owner.py
      logs/train.jsonl            one JSON object per step and per event
      logs/cursors/               the cursors of every save, kept forever
      logs/rows/                  the loss of every row
      checkpoints/                see nanochat/checkpoint.py

**Names in checkpoints/.** `checkpoint-STEP`, `checkpoint-STEP-shutdown` and `final` are
checkpoints. Hidden names never count: one rename makes a complete checkpoint appear, and another
hides it before any part of it is deleted (77 is the pid of the process):

    .tmp-final-77  -->  final  -->  .del-final-77  -->  deleted

**The log only grows.** A run that crashed in step 130 and resumes at step 100 writes the lines of
steps 100..130 again:

    {"step": 129, "loss": 3.1, "digest": "0f.."}
    {"step": 130, "lo                                    <- truncated by the crash; the next launch adds a newline
    {"event": "started", "step": 100}
    {"step": 100, "loss": 3.3, "digest": "a7.."}         <- now the line that counts for step 100

Readers take the last line of each step and skip truncated lines. Rejected: truncating the log at a
resume. That looks tidier, but destroys evidence: a resumed run is checked against the digests in
the log.

**Only the launch that owns a run makes its folders,** when it starts. If the log or the checkpoints
are removed while the run trains, the writer makes the folder again with a warning. If the run
directory itself is removed, writing fails.
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
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from nanochat.cli import did_you_mean
from nanochat.common import (
    check_shape,
    counted,
    fsync_dir,
    get_base_dir,
    parse_json,
    read_json,
    reason_of,
    remove_leftovers,
    show,
    visible,
    write_bytes,
)

log = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
PLAN_NAME = "plan.json"
CHECKPOINT_NAME = re.compile(r"checkpoint-(?P<step>\d+)(-shutdown)?|final")
OPTIMIZER_NAME = "optimizer.bin"  # in a checkpoint that training saved
HIDDEN_NAME = re.compile(rf"\.(tmp|del)-(?P<name>{CHECKPOINT_NAME.pattern})-\d+")
APPENDING = os.O_RDWR | os.O_CREAT | os.O_APPEND
FLUSH_S = 10.0  # how long the end of a run waits for a disk that takes no more log lines
FOLDERS = ("checkpoints", "logs", "logs/cursors", "logs/rows", "tokenizer")


# ---- finding runs -------------------------------------------------------------------------------


def run_path(tag: str) -> Path:
    """<base dir>/runs/<tag>, the path of the directory of a run that a command names, which need
    not exist. ValueError unless
    `tag` is a plain, printable name of at most 100 characters that cannot be mistaken for a
    flag."""
    if re.fullmatch(r"[\w@+=,%~ ][\w@+=,%~ .-]{0,99}", tag) is None:
        raise ValueError(
            f"--model-tag: got {tag[:120]!r}, expected a folder name of 1 to 100 letters, digits, "
            "spaces and _@+=,%~.- that does not start with . or -, such as d12"
        )
    return get_base_dir() / "runs" / tag


def new_run_path(tag: str) -> Path:
    """`run_path` for a run that may be new. ValueError for a new name that reads as a step of
    another run."""
    path = run_path(tag)
    if re.fullmatch(r".+@\d+", tag) and not is_run_dir(path):
        run, _, step = tag.rpartition("@")
        raise ValueError(
            f"--model-tag: got {tag!r}, which names step {step} of {run}; choose a name without @"
        )
    return path


def is_run_dir(path: Path) -> bool:
    """Whether a folder holds a run that has started."""
    return (path / CONFIG_NAME).is_file() or bool(checkpoint_folders(path))


def run_dirs() -> list[Path]:
    """The directories of all runs under the base directory, sorted, including runs that are just
    starting, without those that may not be read. A copied or renamed one may have a name that no
    new run may have."""
    root = get_base_dir() / "runs"
    found = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        with contextlib.suppress(PermissionError):  # another user's
            if _has_run(path):
                found.append(path)
    return found


def list_runs() -> list[str]:
    """The names of `run_dirs`."""
    return [path.name for path in run_dirs()]


def _has_run(path: Path) -> bool:
    """Whether a folder holds a run, also one that is just starting. PermissionError if it may not be
    read."""
    try:
        return is_run_dir(path) or (path / ".run_state.json").is_file()
    except PermissionError:
        raise PermissionError(
            f"{path}: you may not read this folder; ask its owner for access, or name another run"
        ) from None


def find_run(tag_or_path: str | os.PathLike[str] | None) -> Path:
    """The run directory with this tag (tried first) or path; None stands for the only run. Raises
    FileNotFoundError, PermissionError, or ValueError for None. The other runs are looked at only if
    none is found."""
    root = get_base_dir() / "runs"
    text = "" if tag_or_path is None else os.fspath(tag_or_path)
    for path in (root / text, Path(text).expanduser()):
        if text and _has_run(path):
            return path
    runs = list_runs()
    known = ", ".join(runs) or "none"
    if tag_or_path is None:
        if len(runs) != 1:
            raise ValueError(
                f"which run? {root} holds {len(runs)} runs ({known}); "
                + ("name one" if runs else "start one with scripts.base_train")
            )
        return root / runs[0]
    raise FileNotFoundError(
        f"no run {text!r}: neither a tag under {root} nor a run directory"
        f"{did_you_mean(text, runs) or f'; existing runs: {known}'}"
    )


# ---- configuration ------------------------------------------------------------------------------


def find_run_at(name: str) -> tuple[Path, str | None]:
    """(run directory, selector) of RUN@SELECTOR, where the selector is a step or the name of a
    checkpoint; None without one. The path of a checkpoint is also accepted. Raises the errors of
    `find_run`."""
    path = Path(name).expanduser().absolute()
    if path.parent.name == "checkpoints":
        return path.parent.parent, path.name
    run, at, selector = name.rpartition("@")
    # an @ may be part of a name
    is_whole = not at or path.exists() or _has_run(get_base_dir() / "runs" / name)
    return (find_run(name), None) if is_whole else (find_run(run), selector)


def read_config(run_dir: Path) -> dict[str, Any]:
    """The content of a run's config.json. FileNotFoundError if it is missing, ValueError if it is
    corrupt."""
    path = run_dir / CONFIG_NAME
    remedy = "restore it, start over with --resume=scratch --force, or start another run with --model-tag=NAME"
    if not path.is_file():
        checkpoints = ", ".join(checkpoint_folders(run_dir))
        reason = (
            f"the settings of {checkpoints} are unknown; {remedy}"
            if checkpoints
            else f"{run_dir} is not a run directory, or its run never started"
        )
        raise FileNotFoundError(f"{path}: missing, so {reason}")
    return read_json(path, dict, remedy=remedy)


# settings whose change packs documents anew
PACKING = {"max_seq_len", "packing", "long_docs", "overlap"}


class Fork(NamedTuple):
    """The record of a fork in its config.json. Steps and tokens are the parent's at the fork."""

    run: str  # the parent
    checkpoint: str
    step: int
    tokens: int
    checksum: str  # of the parent's seal
    changes: dict[str, list[Any]]  # {setting or model code: [parent's value, fork's value]}
    mix_tokens: int  # tokens that were trained when the present curriculum began
    share_limit: int | None  # see `StreamConfig`

    @classmethod
    def of(cls, record: object, where: Path | str = CONFIG_NAME) -> "Fork | None":
        """The record in a run's config.json, None if the run is not a fork. ValueError, which
        begins with `where`, if it was damaged."""
        if record is None:
            return None
        shape: dict[str, Any] = {
            "run": str,
            "checkpoint": str,
            "step": int,
            "tokens": int,
            "checksum": str,
        }
        shape |= {"changes": dict, "mix_tokens": int, "share_limit": int | None}
        check_shape(record, shape, f"{where}: fork")
        assert isinstance(record, dict)
        changes = record["changes"]
        check_shape(changes, dict.fromkeys(changes, list), f"{where}: fork: changes")
        return cls(**{name: record[name] for name in cls._fields})

    @property
    def place(self) -> str:
        """The parent and the step, such as mine@1,000."""
        return f"{self.run}@{self.step:,}"

    @property
    def packs_anew(self) -> bool:
        """Whether it packs the parent's pending documents anew, so that its ledger starts with them."""
        return not PACKING.isdisjoint(self.changes)


# ---- settings in words ---------------------------------------------------------------------------


WIDEST = 50  # maximum number of characters shown of a setting


def changes_text(changes: Mapping[str, Sequence[Any]]) -> str:
    """What a fork changed, in words."""
    words = []
    for name, values in changes.items():
        if values[1:] == values[:1]:  # a data path that the command names, so that files may join
            words.append(f"{name} named again (files may have joined)")
            continue
        shown = around_difference(setting_texts(values))
        words.append(f"{name} {' -> '.join(shown)}")
    return visible(", ".join(words)) or "nothing changed"


def setting_texts(values: Sequence[object]) -> list[str]:
    """Values of a setting as texts, different ones for different values: curricula as their mixes or,
    if these do not tell them apart, with everything else; all else as JSON."""
    exact = [json.dumps(value) for value in values]
    for words_for in (mix_text, curriculum_text):
        texts = [words_for(value) or text for value, text in zip(values, exact)]
        if len(set(texts)) == len(set(exact)):
            return texts
    return exact


def around_difference(texts: Sequence[str]) -> list[str]:
    """Texts that differ, of which only a part that differs is left if they are long."""
    if max(map(len, texts)) <= WIDEST:
        return [*texts]
    same = 0
    for characters in zip(*texts):
        if len(set(characters)) > 1:
            break
        same += 1
    begin = max(0, same - WIDEST // 2)
    parts = []
    for text in texts:
        part = text[begin : begin + WIDEST]
        before = "..." if begin else ""
        after = "..." if begin + WIDEST < len(text) else ""
        parts.append(f"{before}{part}{after}")
    return parts


def mix_text(value: object) -> str:
    """The mixes of a curriculum, such as 9 web + 1 code; '' for any other value."""
    return ", then ".join(_mixes_of(value))


def curriculum_text(value: object) -> str:
    """A whole curriculum, such as 2 phases: 3,000 tokens of 9 web + 1 code, then 1,000 of 1 web;
    '' for any other value."""
    mixes = _mixes_of(value)
    if not mixes:
        return ""
    assert isinstance(value, dict)
    phases: list[str] = []
    for phase, mix in zip(value["phases"], mixes):
        unit = "" if phases else " tokens"
        duration = phase.get("duration_tokens")
        phases.append(
            f"{mix} to the end" if duration is None else f"{show(duration)}{unit} of {mix}"
        )
    parts = [f"{counted(len(phases), 'phase')}: {', then '.join(phases)}"]
    limits = value.get("max_epochs")
    for bucket, limit in limits.items() if isinstance(limits, dict) else ():
        parts.append(f"max_epochs {show(limit)} of {bucket}")
    parts += [name for name, is_on in value.items() if is_on is True]
    return "; ".join(parts)


def _mixes_of(value: object) -> list[str]:
    """The mix of each phase of a curriculum; [] for any other value."""
    try:
        check_shape(value, {"phases": [{"mix": dict}]}, "")
    except ValueError:
        return []
    assert isinstance(value, dict)
    mixes = []
    for phase in value["phases"]:
        parts = [f"{show(weight)} {bucket}" for bucket, weight in phase["mix"].items()]
        mixes.append(" + ".join(parts))
    return mixes


# ---- names in checkpoints/ ----------------------------------------------------------------------


def checkpoint_folders(run_dir: Path) -> dict[str, Path]:
    """{name: folder} of a run's checkpoints, including corrupt ones."""
    parent = run_dir / "checkpoints"
    paths = sorted(parent.iterdir()) if parent.is_dir() else []
    return {path.name: path for path in paths if CHECKPOINT_NAME.fullmatch(path.name)}


def made_of(seal: Mapping[str, Any]) -> str:
    """What the weights of a checkpoint are, if no training saved it: the mean of others, or imported.
    "" if it has the state of an optimizer, which only training writes."""
    if OPTIMIZER_NAME in seal["files"]:
        return ""
    averaged = seal.get("averaged")
    if not averaged:
        return "imported"
    run = Path(averaged[0]).parent.parent.name
    return f"the mean of {len(averaged)} checkpoints of {run}"


def read_seals(run_dir: Path) -> dict[str, dict[str, Any]]:
    """{name: seal} of a run's checkpoints, without a look at their checksums. Those that cannot be read,
    as after a copy that was interrupted, are left out: no launch resumes from them."""
    seals = {}
    for name, path in checkpoint_folders(run_dir).items():
        file = path / "trainer_state.json"
        with contextlib.suppress(OSError, ValueError):
            written = read_json(file, {"step": int, "files": dict})
            seal = {"averaged": [], "model_code": {}, **written}
            check_shape(seal, {"averaged": [str], "model_code": dict}, file)
            check_shape(seal["model_code"], dict.fromkeys(seal["model_code"], str), file)
            seals[name] = seal
    return seals


def run_made_of(run_dir: Path) -> str:
    """What the weights of a run's checkpoints are, if no training saved them (see `made_of`); else "",
    also without checkpoints."""
    return min(map(made_of, read_seals(run_dir).values()), default="")


def delete_checkpoint(path: Path) -> None:
    """Delete a checkpoint so that a crash leaves either all of it or only a hidden name. ValueError
    if the path does not have the name of a checkpoint."""
    if CHECKPOINT_NAME.fullmatch(path.name) is None or path.parent.name != "checkpoints":
        raise ValueError(f"{path}: not deleted, because this is not the name of a checkpoint")
    doomed = path.with_name(f".del-{path.name}-{os.getpid()}")
    os.rename(path, doomed)
    try:
        fsync_dir(path.parent)
    except OSError:  # a full disk: the checkpoint stays, and a later save deletes it
        os.rename(doomed, path)
        raise
    remove_tree(doomed)


def remove_tree(path: Path) -> None:
    """Remove a file, a folder and its contents, or a symbolic link, but never the target of a
    link."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path)


# ---- the folders of a run -----------------------------------------------------------------------


def open_folders(run_dir: Path) -> None:
    """Make the folders of a run, and remove what a crash left in them: half-done saves, deletes and
    writes. Called by the launch that owns the run when it starts."""
    for name in FOLDERS:
        (run_dir / name).mkdir(parents=True, exist_ok=True)
    for path in sorted((run_dir / "checkpoints").iterdir()):  # .del- before .tmp-
        if found := HIDDEN_NAME.fullmatch(path.name):
            # without locks, another launch may be about to give it its name: all of it or nothing
            doomed = path.with_name(f".del-{found['name']}-{os.getpid()}")
            try:
                os.rename(path, doomed)
                remove_tree(doomed)
            except OSError as e:
                log.warning(
                    "%s: this unfinished save or deletion is in the way (%s); delete it",
                    path,
                    reason_of(e),
                )
    for name in ("", *FOLDERS):
        remove_leftovers(run_dir / name, fresh_s=0.0)


def remake_folder(run_dir: Path, name: str) -> Path:
    """Recreate a removed folder of a run, such as logs/rows, and warn. Returns its path.
    FileNotFoundError if the run directory was removed, too."""
    folder = run_dir
    for part in name.split("/"):
        folder = folder / part
        if not folder.is_dir():
            try:
                folder.mkdir()
            except FileNotFoundError:
                raise FileNotFoundError(
                    f"{run_dir}: removed while the run was training, so the run ends; its files "
                    "are lost"
                ) from None
            log.warning(
                "%s was removed while the run was training; the run continues with a new, empty folder",
                folder,
            )
    return folder


def set_aside(run_dir: Path) -> Path:
    """Rename a run directory, or whatever has its name, so that a new run can start there; nothing
    is deleted. Returns the new path."""
    names = (run_dir.with_name(f"{run_dir.name}.old-{number}") for number in itertools.count(1))
    aside = next(path for path in names if not os.path.lexists(path))
    os.rename(run_dir, aside)
    log.warning("%s was renamed to %s; delete the latter if you do not need it", run_dir, aside)
    return aside


# ---- the log ------------------------------------------------------------------------------------


def open_regular(path: Path, flags: int) -> BinaryIO:
    """Open a regular file, unbuffered. ValueError for folders, for symbolic links, which are not
    followed, and for FIFOs, which would block. OSError as raised by `os.open`."""
    error = ValueError(
        f"{path}: expected a regular file, not a folder, a symbolic link or a FIFO; delete it"
    )
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


def sync_file(path: Path) -> None:
    """Make a file of a run and its name survive power loss. OSError if the disk fails. A file that was
    removed meanwhile is no error."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        with open_regular(path, os.O_RDONLY) as file:
            os.fsync(file.fileno())
        fsync_dir(path.parent)


def finite(value: object) -> Any:
    """A copy of a value in which NaN and infinities are None: bare NaN is not JSON, and many
    parsers reject it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


class Backlog:
    """Writes of a run that wait in memory while the disk takes none: a disk that is full for a
    minute is no reason to end a run. The next write, or `flush`, repeats them in order."""

    MAX_BYTES = 16 << 20  # of waiting records, about 20,000 steps

    def __init__(self, path: Path, what: str) -> None:
        self._path, self._what = path, what
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._warned = False

    def write(self, num_bytes: int, write: Callable[[], None]) -> None:
        """Call `write` after all waiting ones; it is repeated if it raises OSError.
        FileNotFoundError if the run directory was removed. OSError if more than MAX_BYTES would
        wait."""
        self._waiting.append((num_bytes, write))
        error = self._write_waiting()
        if error is not None and sum(size for size, _ in self._waiting) > self.MAX_BYTES:
            raise OSError(
                error.errno,
                f"{self._path}: {self._what} cannot be written ({reason_of(error)}); free some "
                f"space and run the same command again (without --resume)",
            ) from error
        if error is not None and not self._warned:
            log.warning(
                "%s: %s cannot be written (%s); training continues, and they are written later",
                self._path,
                self._what,
                reason_of(error),
            )
        self._warned = error is not None

    def flush(self) -> None:
        """Write what still waits, when the run ends; what the disk does not take within FLUSH_S is
        lost, with a warning."""
        deadline = time.monotonic() + FLUSH_S
        with contextlib.suppress(FileNotFoundError):  # the run directory was removed
            while (error := self._write_waiting()) is not None and time.monotonic() < deadline:
                time.sleep(0.2)
            if error is not None:
                log.warning(
                    "%s: %d %s could not be written and are lost (%s)",
                    self._path,
                    len(self._waiting),
                    self._what,
                    reason_of(error),
                )
        self._waiting.clear()

    def _write_waiting(self) -> OSError | None:
        """Write until all is written, or until an error, which is returned."""
        try:
            while self._waiting:
                self._waiting[0][1]()
                self._waiting.popleft()
        except FileNotFoundError:
            raise
        except OSError as e:
            return e
        return None


class TrainLog:
    """Appends to logs/train.jsonl. Only rank 0 writes; each line goes to the operating system at
    once, so that a killed process loses none, unless the disk does not take it (see `Backlog`).

    `first_step`: digests of earlier steps are not kept in memory, because a resumed run does not
    repeat these steps. `lost`: called before each line; returns '' or the reason why this launch
    must not write any more."""

    def __init__(
        self, path: Path, *, first_step: int = 0, lost: Callable[[], str] = lambda: ""
    ) -> None:
        self._path, self._lost = path, lost
        self._backlog = Backlog(path, "lines of the log")
        path.parent.mkdir(exist_ok=True)
        self._digests = {
            r["step"]: r.get("digest")
            for r in iter_log(path)
            if is_step(r) and r["step"] >= first_step
        }
        self._file = open_regular(path, APPENDING)
        self._truncated = False  # whether the last line lacks its newline, because its writer died
        if self._file.seek(0, os.SEEK_END) > 0:
            self._file.seek(-1, os.SEEK_END)
            self._truncated = self._file.read(1) != b"\n"

    def write(self, **record: object) -> None:
        """Append one JSON object: the line of a step has `step` and no `event`, that of an event
        has `event`. NaN becomes null. TypeError for a value that is not JSON, ValueError if this
        launch no longer owns the run, the errors of `Backlog.write`."""
        if reason := self._lost():
            raise ValueError(reason)
        line = (json.dumps(finite(record), allow_nan=False) + "\n").encode()
        self._backlog.write(len(line), lambda: self._append(line))

    def _append(self, line: bytes) -> None:
        """Append a line. OSError for a full disk; the next line starts with a newline, to end a
        truncated one."""
        if os.fstat(self._file.fileno()).st_nlink == 0:  # the file was removed
            self._file.close()
            remake_folder(self._path.parents[1], self._path.parent.name)
            log.warning(
                "%s was removed while the run was training; a new log starts here", self._path
            )
            self._file = open_regular(self._path, APPENDING)
        line = b"\n" * self._truncated + line
        self._truncated = True
        while line:  # a nearly full disk takes only a part
            line = line[self._file.write(line) :]
        self._truncated = False

    def flush(self) -> None:
        """Write what waits for the disk, see `Backlog.flush`."""
        self._backlog.flush()

    def sync(self) -> None:
        """Make the lines survive power loss. OSError if the disk fails."""
        sync_file(self._path)

    def digest_of(self, step: int) -> str | None:
        """The digest that the log held for `step` when it was opened, or None."""
        return self._digests.get(step)

    def close(self) -> None:
        """Sync the log to disk and close it. A second call does nothing."""
        if not self._file.closed:
            # must not hide the error that ended the run
            with self._file, contextlib.suppress(OSError):
                os.fsync(self._file.fileno())


def is_step(record: dict[str, Any]) -> bool:
    """Whether a record in a log is the line of a step, not an event."""
    return "event" not in record and type(record.get("step")) is int


def iter_log(path: Path, *, containing: bytes = b"") -> Iterator[dict[str, Any]]:
    """Every complete line of a log as a dict, in the order written; nothing if the file does not
    exist. Lines without the bytes `containing` are not parsed, and not returned. Broken lines are
    skipped, and those whose event is not a name."""
    if not path.exists():
        return
    open_regular(path, os.O_RDONLY).close()  # ValueError for a FIFO, which `open` would wait for
    with open(path, "rb") as f:
        for line in f:
            if containing not in line:
                continue
            with contextlib.suppress(ValueError):
                record = parse_json(line, path, dict)
                if type(record.get("event", "")) is str:
                    yield record


def newest_events(run_dir: Path, step: float) -> dict[str, dict[str, Any]]:
    """{name: newest event of that name} in a run's log, up to `step`; "completed" only if the last
    launch logged it."""
    newest: dict[str, dict[str, Any]] = {}
    # a resume asks four times: with a million steps, parsing their lines took most of a minute
    for record in iter_log(run_dir / "logs" / "train.jsonl", containing=b'"event"'):
        if "event" in record and type(record.get("step")) is int and record["step"] <= step:
            if record["event"] == "started":
                newest.pop("completed", None)
            newest[record["event"]] = record
    return newest


def validations(run_dir: Path, step: float) -> dict[int, float]:
    """{steps done: bits per byte} of the validations in a run's log up to `step`, in the order of
    steps. Those of a fork's ancestors are in their own logs. (`RunReader.val_bpb`, which also tells
    amounts of text apart, belongs to programs that read runs: a run does not load it.)"""
    values: dict[int, float] = {}
    for record in iter_log(run_dir / "logs" / "train.jsonl", containing=b'"val"'):
        done = record.get("step")
        bpb = record.get("bpb")
        if record.get("event") != "val" or not isinstance(bpb, float):
            continue
        if isinstance(done, int) and done <= step:
            values[done] = bpb
    return dict(sorted(values.items()))


def newest_progress(run_dir: Path) -> dict[str, Any] | None:
    """The last line of a run's log that says how far it came: that of a step or of a launch that
    started; None if there is none. Reads the log from its end."""
    path = run_dir / "logs" / "train.jsonl"
    try:
        file = open_regular(path, os.O_RDONLY)
    except (OSError, ValueError):
        return None
    with file:
        size = file.seek(0, os.SEEK_END)
        window = 1 << 16
        while True:
            file.seek(max(0, size - window))
            lines = file.read(window).split(b"\n")
            whole = lines if window >= size else lines[1:]
            record = _last_progress(whole, path)
            if record is not None:
                return record
            if window >= size:
                return None
            window *= 16


def _last_progress(lines: Sequence[bytes], path: Path) -> dict[str, Any] | None:
    """The last record of a step or of a launch that started in some lines of a log."""
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            record = parse_json(line, path, {"step": int})
            if record.get("event") in (None, "started"):
                return record
    return None


def config_at(run_dir: Path, step: float) -> dict[str, Any]:
    """A run's config.json, with what the launch that took this step had changed, such as the device
    batch size. Raises the errors of `read_config`."""
    config = read_config(run_dir)
    changed = newest_events(run_dir, step).get("started", {}).get("changed") or {}
    return config | {name: value for name, value in changed.items() if name in config}


def but_resume(settings: Mapping[str, Any]) -> str:
    """What the command of a launch with these settings has to leave out to resume its run, as the end
    of a phrase, such as ' without --resume=scratch --force'; '' if it resumes the run as it is."""
    resume = settings.get("resume", "auto")
    if resume == "auto":
        return ""
    return f" without --resume={resume}{' --force' * bool(settings.get('force'))}"


def step_in(selector: str | None) -> float:
    """The step that RUN@SELECTOR names by its number or by the name of a checkpoint; otherwise
    infinity, for the newest."""
    named = CHECKPOINT_NAME.fullmatch(selector or "")
    number = named["step"] if named else selector
    return int(number) if number and number.isdecimal() else math.inf


# ---- losses of rows -----------------------------------------------------------------------------


class RowLosses:
    """The loss of every row of every step, in logs/rows/: one file per 10,000 steps, in which each
    step has a fixed place, so that a repeated step overwrites its record.

        record    crc32, 4 bytes | R float32: sums of token losses, nats | R uint16: counts of live targets

    R is the number of rows per step, and a live target is one with a loss. Their counts are uint32
    if T is above 65,535. The checksum covers the number of the step, too. A record that a crash
    truncated is overwritten when its step is repeated.
    """

    STEPS = 10_000  # per file

    def __init__(self, run_dir: Path, *, num_rows: int, T: int) -> None:
        self.folder, self.num_rows = run_dir / "logs" / "rows", num_rows
        self.record = np.dtype(
            [("nats", "<f4", num_rows), ("live", "<u2" if T < 1 << 16 else "<u4", num_rows)]
        )
        self.size = 4 + self.record.itemsize
        self._backlog = Backlog(self.folder, "records of row losses")
        self._unsynced: set[Path] = set()

    def _place(self, step: int) -> tuple[Path, int]:
        """(file, offset) of a step's record."""
        first = step - step % self.STEPS
        return self.folder / f"step-{first:08d}.bin", (step - first) * self.size

    def write(self, step: int, nats: Sequence[float], live: Sequence[int]) -> None:
        """Write the record of a step. Raises the errors of `Backlog.write`."""
        record = np.zeros((), self.record)
        record["nats"], record["live"] = nats, live
        data = record.tobytes()
        self._backlog.write(self.size, lambda: self._put(step, _checksum(step, data) + data))

    def _put(self, step: int, data: bytes) -> None:
        """Write the bytes of a record to its place. OSError for a full disk."""
        path, offset = self._place(step)
        remake_folder(self.folder.parents[1], "logs/rows")
        self._unsynced.add(path)
        with open_regular(path, os.O_RDWR | os.O_CREAT) as f:
            f.seek(offset)
            if f.write(data) < self.size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        """Write what waits for the disk, see `Backlog.flush`."""
        self._backlog.flush()

    def sync(self) -> None:
        """Make the records survive power loss. OSError if the disk fails."""
        for path in sorted(self._unsynced):
            self._unsynced.discard(path)
            sync_file(path)

    def read(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(nats (R,) float32, live (R,) int64) of a step. FileNotFoundError if nothing was
        recorded, ValueError if the record is corrupt."""
        path, offset = self._place(step)
        data = b""
        if path.exists():
            with open_regular(path, os.O_RDONLY) as f:
                f.seek(offset)
                data = f.read(self.size)
        if len(data) < self.size or not any(data):
            raise FileNotFoundError(
                f"no row losses for step {step}: the run has not trained that step, or its {path.parent} is gone"
            )
        if data[:4] != _checksum(step, data[4:]):
            raise ValueError(
                f"{path}: the row losses for step {step} are corrupt (wrong checksum), so they "
                "cannot be shown; training does not need them. Delete the file to hide this message"
            )
        record = np.frombuffer(data[4:], self.record)[0]
        return record["nats"].copy(), record["live"].astype(np.int64)


def _checksum(step: int, data: bytes) -> bytes:
    return zlib.crc32(data, step).to_bytes(4, "little")


# ---- cursors ------------------------------------------------------------------------------------


def pack_cursors(step: int, cursors: list[dict[str, Any]]) -> bytes:
    """The cursors of all lanes after `step` steps, compressed without a time stamp: equal cursors,
    equal bytes."""
    value = {"format_version": 1, "step": step, "cursors": cursors}
    return gzip.compress(json.dumps(value, separators=(",", ":")).encode(), mtime=0)


def keep_cursors(run_dir: Path, step: int, packed: bytes) -> None:
    """Write the packed cursors of a save to logs/cursors/, where they are never deleted."""
    write_bytes(remake_folder(run_dir, "logs/cursors") / f"step-{step:08d}.json.gz", packed)


def read_cursors(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """`unpack_cursors` of a file: lanes.json.gz of a checkpoint, or one in logs/cursors."""
    return unpack_cursors(path.read_bytes(), path)


def unpack_cursors(packed: bytes, path: Path) -> tuple[int, list[dict[str, Any]]]:
    """(step, the V cursors) from the bytes of `pack_cursors`. ValueError, which names `path`, if
    they are corrupt."""
    try:
        data = gzip.decompress(packed)
    except Exception as e:  # BadGzipFile, EOFError, zlib.error
        raise ValueError(f"{path}: corrupt or truncated ({type(e).__name__})") from e
    value = parse_json(data, path, {"step": int, "cursors": [dict]})
    return value["step"], value["cursors"]


def cursor_files(run_dir: Path) -> dict[int, Path]:
    """{step: file} of the cursors of all saves of a run, ascending."""
    files = sorted((run_dir / "logs" / "cursors").glob("step-????????.json.gz"))
    return {int(path.name[5:13]): path for path in files}
