"""
Faults on purpose: stop, or fail, at the n-th change that some code makes to the disk.

    with watching(run) as changes: save()               # changes.made: what was done, len() of it how often
    kill_at(n, save, below=run)                         # a forked child runs `save` and dies before change n
    with failing_at(n, ENOSPC, below=run): save()       # change n raises OSError instead, here
    with crashing_at(n, below=run): save()              # as if killed, here: no change from n on is made
    start(hook=partial(dying_at, n, below=run))         # a job of its own dies before change n (tests/training.py)
    start(hook=partial(copying_at, n, 1, ...))          # a job keeps copies of what a power cut would have left

A change is a call that creates, fills, syncs, renames or removes something below a folder. Changes are counted in all
threads, in the order in which they come. The killed process gets SIGKILL: no `finally`, no buffer flushed. The
functions of `os` and `open` are replaced while a `with` block lasts, so neither the code under test nor its environment
knows of this. Whatever opens files in C++ is not seen: the code under test hands Python files to torch.save.
"""

import builtins
import contextlib
import errno
import io
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

KINDS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")
NO_WRITES = tuple(kind for kind in KINDS if kind != "write")  # torch.save writes dozens of times a file
ALTERING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Crash(BaseException):
    """The process would be dead by now."""


class Changes:
    """Counts the changes below a folder; calls `act` before the one numbered `at` (from 0), or never for None; with
    `onwards` before all that follow, too. A change reads "kind path/below/the/folder". `match`: a pattern of those
    that count; `repeats` False: of several writes to a file in a row the first."""

    def __init__(self, below: Path, at: int | None = None, act: Callable[[], Any] = lambda: None,
                 kinds: Sequence[str] = KINDS, onwards: bool = False, match: str = "",
                 repeats: bool = True) -> None:
        self.below, self.at, self.act, self.kinds = os.path.realpath(below), at, act, kinds
        self.onwards, self.match, self.repeats = onwards, match, repeats
        self.made: list[str] = []
        self.unsynced: set[str] = set()  # files whose content a power cut would take
        self.one_at_a_time = threading.RLock()  # held from a change's note until it is made: `act` sees no other's half

    def note(self, kind: str, where: str | None, to: str | None = None) -> None:
        """A change of some kind is about to be made at a path, which it may rename."""
        if where is None or not (where + os.sep).startswith(self.below + os.sep):
            return
        try:
            self._count(kind, where)
        finally:
            if kind == "write":
                self.unsynced.add(where)
            elif kind == "fsync":
                self.unsynced.discard(where)
            elif to is not None:
                self.unsynced = {to + path.removeprefix(where) if (path + os.sep).startswith(where + os.sep) else path
                                 for path in self.unsynced}

    def _count(self, kind: str, where: str) -> None:
        if kind not in self.kinds:
            return
        change = f"{kind} {os.path.relpath(where, self.below)}"
        if not re.search(self.match, change):
            return
        if kind == "write" and not self.repeats and self.made and self.made[-1] == change:
            return
        self.made.append(change)
        past = -1 if self.at is None else len(self.made) - 1 - self.at
        if past == 0 or (self.onwards and past > 0):
            self.act()


def _path(what: Any, dir_fd: int | None = None) -> str | None:
    """Where a path, or the file of a descriptor, is; None for what is no file."""
    with contextlib.suppress(OSError, TypeError):
        if isinstance(what, int):
            return os.readlink(f"/proc/self/fd/{what}")
        folder = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        path = os.path.join(folder, os.fspath(what))
        return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    return None


class _Counted:
    """A file open for writing whose writes are noted."""

    def __init__(self, file: Any, changes: Changes, where: str) -> None:
        self._file, self._changes, self._where = file, changes, where

    def write(self, data: Any) -> Any:
        with self._changes.one_at_a_time:
            self._changes.note("write", self._where)
            return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_Counted":
        return self

    def __exit__(self, *args: Any) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._file)


def _wrap_os(name: str, changes: Changes) -> Any:
    """A function of `os` that notes its change, at its first argument, then makes it."""
    real = getattr(os, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if name == "open" and not (args[1] if len(args) > 1 else kwargs["flags"]) & ALTERING:
            return real(*args, **kwargs)
        with changes.one_at_a_time:
            to = _path(args[1]) if name in ("rename", "replace") else None
            changes.note(name, _path(args[0], kwargs.get("dir_fd", kwargs.get("src_dir_fd"))), to)
            return real(*args, **kwargs)

    return wrapped


def _wrap_open(real: Any, changes: Changes) -> Any:
    """`open` that notes a file opened for writing, and gives one whose writes are noted."""
    def wrapped(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wxa+"):
            return real(file, mode, *args, **kwargs)
        where = _path(file)
        with changes.one_at_a_time:
            if not isinstance(file, int):
                changes.note("open", where)
            opened = real(file, mode, *args, **kwargs)
        inside = where is not None and (where + os.sep).startswith(changes.below + os.sep)
        return _Counted(opened, changes, str(where)) if inside else opened

    return wrapped


@contextlib.contextmanager
def watching(below: Path, **options: Any) -> Iterator[Changes]:
    """While the block lasts, note all changes below a folder; `options` are those of `Changes`."""
    changes = Changes(below, **options)
    with contextlib.ExitStack() as stack:
        for name in NO_WRITES:
            stack.enter_context(mock.patch.object(os, name, _wrap_os(name, changes)))
        for module in (builtins, io):
            stack.enter_context(mock.patch.object(module, "open", _wrap_open(module.open, changes)))
        yield changes


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(at: int, action: Callable[[], Any], *, below: Path) -> bool:
    """Run an action in a forked child that is killed before change `at`; whether it came so far. An exception of the
    action is an AssertionError here."""
    if (pid := os.fork()) == 0:
        try:
            with watching(below, at=at, act=_die):
                action()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), f"the action failed before change {at}"
    return code != 0


@contextlib.contextmanager
def failing_at(at: int, error: int, *, below: Path, **options: Any) -> Iterator[Changes]:
    """While the block lasts, change `at` raises OSError of a number (errno.ENOSPC, ...), with `onwards` all after."""
    def fail() -> None:
        raise OSError(error, os.strerror(error))

    with watching(below, at=at, act=fail, **options) as changes:
        yield changes


def full_disk(match: str, *, below: Path) -> contextlib.AbstractContextManager[Changes]:
    """While the block lasts, no change that matches a pattern finds room."""
    return failing_at(0, errno.ENOSPC, below=below, match=match, onwards=True)


@contextlib.contextmanager
def crashing_at(at: int | None, *, below: Path, kinds: Sequence[str] = NO_WRITES) -> Iterator[Changes]:
    """While the block lasts, changes `at` and after raise `Crash`, which leaves the block silently: what the disk looks
    like then is what a kill would leave, without the cost of a process. None: no crash."""
    def die() -> None:
        raise Crash

    with contextlib.suppress(Crash), watching(below, at=at, act=die, kinds=kinds, onwards=True) as changes:
        yield changes


# ---- hooks: for a process of its own, to the end of its days ---------------------------------------------------------

_FOREVER = contextlib.ExitStack()
STEADY = r"^(?!.*run_state)"  # changes that come in the same order each time: not those of the heartbeat


def dying_at(at: int, *, below: Path) -> None:
    """From now on this process dies before change `at`, if it is rank 0 of its launch."""
    if os.environ.get("RANK", "0") == "0":
        _FOREVER.enter_context(watching(below, at=at, act=_die, match=STEADY, repeats=False))


def filling_at(at: int, number: int, *, below: Path) -> None:
    """From now on so many changes, from `at` on, find no room on the disk."""
    def fail() -> None:
        if len(changes.made) <= at + number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    changes = _FOREVER.enter_context(watching(
        below, at=at, act=fail, match=r"^(open|write|fsync|mkdir) (?!\.run_state)", onwards=True))


def copying_at(first: int, every: int, *, below: Path, into: Path) -> None:
    """Before each `every`-th change from `first` on, copy what is below the folder to INTO/<number>: what a power cut
    would leave there. A file that was written and not synced is empty then, but for the log, of which a cut leaves
    less."""
    def copy() -> None:
        number = len(changes.made) - 1
        if (number - first) % every == 0:
            shutil.copytree(below, into / f"{number:04d}")
            for path in changes.unsynced:
                lost = into / f"{number:04d}" / os.path.relpath(path, changes.below)
                if lost.exists() and lost.suffix != ".jsonl":
                    lost.write_bytes(b"")

    if os.environ.get("RANK", "0") == "0":
        changes = _FOREVER.enter_context(watching(
            below, at=first, act=copy, match=STEADY, onwards=True, repeats=False))
