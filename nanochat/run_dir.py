"""
A run directory: one folder that holds all that one training run wrote, and so all that is needed to go on with it.

    runs/d12/
      config.json                 the resolved configuration that started the run; written once
      tokenizer/                  written once
      logs/train.jsonl            one JSON object per step and per event
      logs/cursors/               the cursors of every save, kept for ever
      checkpoints/                see nanochat/checkpoint.py

This module finds run directories, owns the files in them that are neither data nor checkpoints (config.json, the log,
the kept cursors), and the names in checkpoints/. What is inside a checkpoint is nanochat/checkpoint.py's concern.

**Names in checkpoints/.** `checkpoint-STEP`, `checkpoint-STEP-shutdown` and `final` are checkpoints. Hidden names are
work in progress of process PID: `.tmp-NAME-PID` is being written, `.del-NAME-PID` is being deleted, `.old-NAME-PID` is
aside while a new folder takes its name (a run that crashed after a save repeats its steps and saves again):

    final, .tmp-final-77   ->   .old-final-77, .tmp-final-77   ->   .old-final-77, final   ->   final

In the second state the folder that is aside counts as the checkpoint, so there is no instant without one. POSIX has no
portable exchange of two folders, and overwriting file by file would pass through mixtures of two steps.

**The log only grows.** A run that crashed at step 130 and resumes at step 100 writes the lines of steps 101..130 again:

    {"step": 129, "loss": 3.1, "digest": "0f.."}
    {"step": 130, "lo                                    <- torn by the crash; closed with a newline when reopened
    {"event": "resumed", "step": 100}
    {"step": 101, "loss": 3.3, "digest": "a7.."}         <- from now on the line of step 101 that counts

Readers take the last line of each step and pass over torn lines. Cutting the log at resume would look tidier and
destroy the evidence: the digests of the repeated steps, already there, are what a resumed run is checked against.
"""

import contextlib
import gzip
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from nanochat.common import fsync_dir, get_base_dir, read_json, write_bytes, write_json

log = logging.getLogger(__name__)

CONFIG_NAME = "config.json"
PLAN_NAME = "plan.json"
CURSORS_VERSION = 1
CHECKPOINT_NAME = re.compile(r"checkpoint-(?P<step>\d+)(-shutdown)?|final")
HIDDEN_NAME = re.compile(rf"\.(?P<kind>tmp|old|del)-(?P<name>{CHECKPOINT_NAME.pattern})-\d+")


# ---- finding runs ---------------------------------------------------------------------------------------------------

def run_path(tag: str) -> Path:
    """Where the run named `tag` lives: <base dir>/runs/<tag>. Nothing is made. ValueError if `tag` is no plain name."""
    if not tag or tag.startswith(".") or Path(tag).name != tag:
        raise ValueError(f"--model-tag: got {tag!r}, expected a plain folder name such as d12")
    return get_base_dir() / "runs" / tag


def is_run_dir(path: Path) -> bool:
    """Whether `path` is a folder in which a run was started."""
    return (path / CONFIG_NAME).is_file() or (path / "checkpoints").is_dir()


def list_runs() -> list[str]:
    """The tags of all runs under the base directory, sorted; those too that have got no further than saying that they
    start."""
    root = get_base_dir() / "runs"
    return sorted(p.name for p in root.iterdir() if _has_run(p)) if root.is_dir() else []


def _has_run(path: Path) -> bool:
    return is_run_dir(path) or (path / ".run_state.json").is_file()


def find_run(tag_or_path: str | os.PathLike[str] | None) -> Path:
    """The run directory that a tag (looked up first) or a path means; None means the only run there is.

    FileNotFoundError and, for None, ValueError list the runs there are."""
    runs = list_runs()
    known = ", ".join(runs) or "none"
    if tag_or_path is None:
        if len(runs) != 1:
            raise ValueError(f"which run? There are {len(runs)} in {get_base_dir() / 'runs'} ({known}); name one")
        return run_path(runs[0])
    text = os.fspath(tag_or_path)
    candidates = [Path(text).expanduser()]
    if text and not text.startswith(".") and Path(text).name == text:
        candidates.insert(0, run_path(text))
    for path in candidates:
        if _has_run(path):
            return path
    raise FileNotFoundError(f"no run {text!r}: neither a tag under {get_base_dir() / 'runs'} nor a run directory; "
                            f"runs there: {known}")


# ---- configuration --------------------------------------------------------------------------------------------------

def write_config(run_dir: Path, config: dict[str, Any]) -> None:
    """Write RUN/config.json atomically, making the folder. FileExistsError if the run has one: it is written once."""
    path = run_dir / CONFIG_NAME
    if path.exists():
        raise FileExistsError(f"{path} exists: a run's configuration is written once; choose another --model-tag")
    run_dir.mkdir(parents=True, exist_ok=True)
    write_json(path, config)


def read_config(run_dir: Path) -> dict[str, Any]:
    """The configuration that started the run. FileNotFoundError if it has none, ValueError if it is broken."""
    path = run_dir / CONFIG_NAME
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing, so {run_dir} is no run directory or its run never started")
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return config


def diff_lines(old: dict[str, Any], new: dict[str, Any], *, old_name: str = "the run",
               new_name: str = "the command") -> list[str]:
    """One line for every name whose value differs between two dicts; a name that one side lacks differs."""
    def show(side: dict[str, Any], name: str) -> str:
        return repr(side[name]) if name in side else "nothing"
    names = [*old, *(n for n in new if n not in old)]
    return [f"{n}: {old_name} has {show(old, n)}, {new_name} says {show(new, n)}" for n in names
            if (n in old) != (n in new) or old[n] != new[n]]


# ---- names in checkpoints/ ------------------------------------------------------------------------------------------

def temporary_path(run_dir: Path, name: str) -> Path:
    """Where this process writes the checkpoint `name` before it gets its name."""
    return run_dir / "checkpoints" / f".tmp-{name}-{os.getpid()}"


def put_in_place(temporary: Path, target: Path) -> None:
    """Rename a finished folder to its name; what had that name goes aside first and is deleted last."""
    aside = target.with_name(f".old-{target.name}-{os.getpid()}")
    if target.exists():
        os.rename(target, aside)
        fsync_dir(target.parent)
    os.rename(temporary, target)
    fsync_dir(target.parent)
    if aside.exists():
        with contextlib.suppress(OSError):  # the new one is there; the next save tries again
            _discard(aside, target.name)


def _discard(path: Path, name: str) -> None:
    """Delete the folder of a checkpoint `name`. A name that never counts comes first, so that a crash leaves no part of
    it under one that does."""
    doomed = path.with_name(f".del-{name}-{os.getpid()}")
    os.rename(path, doomed)
    fsync_dir(path.parent)
    shutil.rmtree(doomed)


def clean_stale(run_dir: Path) -> None:
    """Tidy up what a crash left: a checkpoint that is aside while its name is missing gets its name back, folders of
    other unfinished saves and deletions go. Called by the one process that writes, at start and before each save."""
    parent = run_dir / "checkpoints"
    for path in sorted(parent.glob(".*")) if parent.is_dir() else []:  # .del before .old before .tmp
        match = HIDDEN_NAME.fullmatch(path.name)
        if match is None:
            continue
        target = parent / match["name"]
        if match["kind"] != "old":
            shutil.rmtree(path, ignore_errors=True)
        elif target.exists():
            with contextlib.suppress(OSError):
                _discard(path, match["name"])
        else:
            os.rename(path, target)
            fsync_dir(parent)


def checkpoint_folders(run_dir: Path) -> dict[str, Path]:
    """{name: folder} of a run's checkpoints, good or not, with those that are aside while their name is missing."""
    parent = run_dir / "checkpoints"
    found: dict[str, Path] = {}
    for path in sorted(parent.iterdir(), reverse=True) if parent.is_dir() else []:  # hidden names come last
        hidden = HIDDEN_NAME.fullmatch(path.name)
        if hidden and hidden["kind"] == "old":
            found.setdefault(hidden["name"], path)
        elif CHECKPOINT_NAME.fullmatch(path.name):
            found[path.name] = path
    return found


def delete_checkpoint(path: Path) -> None:
    """Delete a checkpoint so that a crash leaves either all of it or nothing that counts. ValueError if it is none."""
    if CHECKPOINT_NAME.fullmatch(path.name) is None or path.parent.name != "checkpoints":
        raise ValueError(f"{path}: not the name of a checkpoint; not deleted")
    _discard(path, path.name)


# ---- the log --------------------------------------------------------------------------------------------------------

def _finite(value: Any) -> Any:
    """NaN and infinities become null: bare NaN is not JSON, and other programs' parsers stop at it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def _close_torn_tail(path: Path) -> None:
    """If the last line has no newline (its writer died), add one, so that the next line is not glued to it."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with open(path, "r+b") as f:
        f.seek(-1, os.SEEK_END)
        if f.read(1) != b"\n":
            log.info("%s: the last line was cut short by a crash; closed it", path)
            f.write(b"\n")


class TrainLog:
    """The appending side of logs/train.jsonl. One process (rank 0) writes; each line goes to the operating system at
    once, so that a killed process loses none.

    `first_step`: digests of steps before it are not kept in memory (a resumed run repeats none of them).
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _close_torn_tail(path)
        self._before = {r["step"]: r for r in iter_log(path)
                        if "event" not in r and isinstance(r.get("step"), int) and r["step"] >= first_step}
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  lives as long as the run
        self._torn = False

    def write(self, **record: Any) -> None:
        """Append one JSON object: a step's line has `step` and no `event`, an event's has `event`. NaN becomes null.

        Raises TypeError (a value that is not JSON) and OSError (a full disk; the next line is not glued to a torn one).
        """
        line = ("\n" * self._torn + json.dumps(_finite(record), allow_nan=False) + "\n").encode()
        self._torn = True
        try:
            while line:  # a nearly full disk takes a part
                line = line[self._file.write(line):]
        except OSError as e:
            raise OSError(e.errno, f"{self._path}: the log cannot be written ({e.strerror}); make room and start the "
                                   f"same command again") from e
        self._torn = False

    def digest_of(self, step: int, *, tokens: int | None = None) -> str | None:
        """The digest that the log held for `step` when it was opened, or None; with `tokens`, only if the run had
        trained on so many by the end of that step."""
        record = self._before.get(step, {})
        return record.get("digest") if tokens is None or record.get("tokens") == tokens else None

    def close(self) -> None:
        """Force the log to disk and close it. Twice is fine."""
        if self._file.closed:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as e:  # its lines may be lost, which is no reason to lose the error that ended the run
            log.warning("%s: the log may lack its last lines (%s)", self._path, e.strerror)
        finally:
            self._file.close()

    def __enter__(self) -> "TrainLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def iter_log(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line of a log in the order written, torn ones passed over; nothing if there is no file."""
    if not path.exists():
        return
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            try:
                record = json.loads(line)
            except ValueError:  # also UnicodeDecodeError
                log.debug("%s line %d: torn, passed over", path, number)
                continue
            if isinstance(record, dict):
                yield record


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log: of each step its last line, in step order, among the events, which are all kept.

    An event stays behind the step line before it (`step` of an event is not unique: two restarts may begin alike).
    """
    steps: dict[int, dict[str, Any]] = {}
    events: list[tuple[int, dict[str, Any]]] = []
    last_step = -1
    for record in iter_log(path):
        step = record.get("step")
        if "event" in record or not isinstance(step, int):
            events.append((step if isinstance(step, int) else last_step, record))
        else:
            steps[step] = record
            last_step = step
    keyed = [(step, 0, record) for step, record in steps.items()] + [(step, 1, record) for step, record in events]
    return [record for _, _, record in sorted(keyed, key=lambda k: k[:2])]


def digests(path: Path, *, first_step: int = 0) -> dict[int, str]:
    """{step: digest} from the last line of each step at or after `first_step`; empty if there is no log."""
    return {r["step"]: r["digest"] for r in iter_log(path)
            if "event" not in r and isinstance(r.get("step"), int) and isinstance(r.get("digest"), str)
            and r["step"] >= first_step}


# ---- cursors --------------------------------------------------------------------------------------------------------

def pack_cursors(step: int, cursors: list[dict[str, Any]]) -> bytes:
    """The cursors of all lanes after `step`, compressed; equal cursors give equal bytes (no time stamp inside)."""
    value = {"format_version": CURSORS_VERSION, "step": step, "cursors": cursors}
    return gzip.compress(json.dumps(value, separators=(",", ":")).encode(), mtime=0)


def keep_cursors(run_dir: Path, step: int, packed: bytes) -> None:
    """Keep the packed cursors of a save for as long as the run directory lives."""
    folder = run_dir / "logs" / "cursors"
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / f"step-{step:08d}.json.gz", packed)


def read_cursors(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """(step, the V cursors) from a lanes.json.gz or a logs/cursors file. ValueError if it is broken."""
    try:
        value = json.loads(gzip.decompress(path.read_bytes()))
        return value["step"], value["cursors"]
    except OSError as e:
        if isinstance(e, gzip.BadGzipFile):
            raise ValueError(f"{path}: torn or rotten ({e})") from e
        raise
    except Exception as e:  # EOFError, zlib.error, JSON and key errors
        raise ValueError(f"{path}: torn or rotten ({type(e).__name__})") from e


def cursor_files(run_dir: Path) -> dict[int, Path]:
    """{step: file} of all cursors ever kept by a run, ascending."""
    return {int(p.name[5:13]): p for p in sorted((run_dir / "logs" / "cursors").glob("step-????????.json.gz"))}
