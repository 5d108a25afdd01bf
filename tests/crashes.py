"""
Planned faults: stop or fail at the n-th change that some code makes to the disk.

    with watching(run) as changes: save()               # changes.made: the list of changes
    kill_at(n, save, below=run)                         # a forked child runs `save` and dies before change n
    with failing_at(n, ENOSPC, below=run): save()       # change n raises OSError instead
    with crashing_at(n, below=run): save()              # as if killed: no change from n on is made
    start(hook=partial(dying_at, n, below=run))         # a job in its own process dies before change n
    start(hook=partial(copying_at, n, 1, ...))          # a job keeps copies of what a power cut would have left
    start(2, hook=partial(on_rank, 1, hook))            # a hook acts on one rank only

A change is a call that creates, writes, syncs, renames or removes something below a folder. Changes
of all threads are counted in their order. A killed process gets SIGKILL: no `finally`, no flushed
buffers. A `with` block replaces `open` and functions of `os`, so the code under test is unchanged.
Files that C++ opens do not count; the code under test gives Python files to torch.save.
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
ALTERING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Crash(BaseException):
    """Stands for a kill."""


class Changes:
    """Counts the changes below a folder, and calls `act` before number `at` (from 0; None: never),
    with `onwards` also before all later ones. A change is a text "kind path/below/the/folder".
    `match`: a pattern of the changes that count; `repeats` False: consecutive writes to one file
    count once."""

    def __init__(
        self,
        below: Path,
        at: int | None = None,
        act: Callable[[], Any] = lambda: None,
        kinds: Sequence[str] = KINDS,
        onwards: bool = False,
        match: str = "",
        repeats: bool = True,
    ) -> None:
        self.below = os.path.realpath(below)
        self.at = at
        self.act = act
        self.kinds = kinds
        self.onwards = onwards
        self.match = match
        self.repeats = repeats
        self.made: list[str] = []
        self.unsynced: set[str] = set()  # files that a power cut would empty
        # held until a change is made, so `act` never sees half of one
        self.one_at_a_time = threading.RLock()

    def note(self, kind: str, where: str | None, to: str | None = None) -> None:
        """Count a change of the path `where`, perhaps a rename to `to`, before it is made."""
        if where is None or not _is_inside(where, self.below):
            return
        change = f"{kind} {os.path.relpath(where, self.below)}"
        repeated = kind == "write" and not self.repeats and self.made[-1:] == [change]
        if kind in self.kinds and re.search(self.match, change) and not repeated:
            self.made.append(change)
            last = len(self.made) - 1
            if last == self.at or (self.onwards and self.at is not None and last > self.at):
                self.act()
        if kind == "write":
            self.unsynced.add(where)
        elif kind == "fsync":
            self.unsynced.discard(where)
        elif to is not None:
            self.unsynced = {
                to + path.removeprefix(where) if _is_inside(path, where) else path
                for path in self.unsynced
            }


def _is_inside(path: str, folder: str) -> bool:
    return (path + os.sep).startswith(folder + os.sep)


def _path(what: Any, dir_fd: int | None = None) -> str | None:
    """The real path of a path or a file descriptor; None if it is not a file."""
    with contextlib.suppress(OSError, TypeError):
        if isinstance(what, int):
            return os.readlink(f"/proc/self/fd/{what}")
        folder = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        path = os.path.join(folder, os.fspath(what))
        return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    return None


class _Counted:
    """A file open for writing whose writes are counted."""

    def __init__(self, file: Any, changes: Changes, where: str) -> None:
        self._file = file
        self._changes = changes
        self._where = where

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
    """A function of `os` that counts the change of its first argument before it makes it."""
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
    """`open` that counts a file opened for writing, and then its writes."""

    def wrapped(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wxa+"):
            return real(file, mode, *args, **kwargs)
        where = _path(file)
        with changes.one_at_a_time:
            if not isinstance(file, int):
                changes.note("open", where)
            opened = real(file, mode, *args, **kwargs)
        return (
            _Counted(opened, changes, where)
            if where and _is_inside(where, changes.below)
            else opened
        )

    return wrapped


@contextlib.contextmanager
def watching(below: Path, **options: Any) -> Iterator[Changes]:
    """Count all changes below a folder inside the block; `options` are those of `Changes`."""
    changes = Changes(below, **options)
    with contextlib.ExitStack() as stack:
        for name in set(KINDS) - {"write"}:  # `os.write` is not used on files
            stack.enter_context(mock.patch.object(os, name, _wrap_os(name, changes)))
        for module in (builtins, io):
            stack.enter_context(mock.patch.object(module, "open", _wrap_open(module.open, changes)))
        yield changes


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_suspended(pid: int) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        return ") T" in Path(f"/proc/{pid}/stat").read_text()
    return False


def kill_at(at: int, action: Callable[[], Any], *, below: Path) -> bool:
    """Run an action in a forked child that is killed before change `at`; whether it reached that
    change. An exception in the action is an AssertionError here."""
    if (pid := os.fork()) == 0:
        try:
            with watching(below, at=at, act=die):
                action()
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), f"the action failed before change {at}"
    return code != 0


@contextlib.contextmanager
def failing_at(at: int, error: int, *, below: Path, **options: Any) -> Iterator[Changes]:
    """Inside the block, change `at` (with `onwards` also every later one) raises OSError `error`,
    such as ENOSPC."""

    def fail() -> None:
        raise OSError(error, os.strerror(error))

    with watching(below, at=at, act=fail, **options) as changes:
        yield changes


def full_disk(match: str, *, below: Path) -> contextlib.AbstractContextManager[Changes]:
    """Inside the block, the disk is full for every change that matches a pattern."""
    return failing_at(0, errno.ENOSPC, below=below, match=match, onwards=True)


@contextlib.contextmanager
def crashing_at(at: int | None, *, below: Path, kinds: Sequence[str] = KINDS) -> Iterator[Changes]:
    """Inside the block, every change from `at` on raises `Crash`, which ends the block silently.
    The disk then looks as after a kill, without the cost of a process. None: no crash."""

    def crash() -> None:
        raise Crash

    with (
        contextlib.suppress(Crash),
        watching(below, at=at, act=crash, kinds=kinds, onwards=True) as changes,
    ):
        yield changes


# ---- hooks, which last until the process ends ----------------------------------------------------

_FOREVER = contextlib.ExitStack()
STEADY = r"^(?!.*run_state)"  # changes in the same order in each run, so not the heartbeat's


def on_rank(rank: int, hook: Callable[[], None]) -> None:
    """Act only on this rank."""
    if os.environ.get("RANK", "0") == str(rank):
        hook()


def dying_at(at: int, *, below: Path) -> None:
    """This process dies before change `at` if it is rank 0."""
    if os.environ.get("RANK", "0") == "0":
        _FOREVER.enter_context(watching(below, at=at, act=die, match=STEADY, repeats=False))


def filling_at(at: int, number: int, *, below: Path) -> None:
    """The disk is full for `number` changes from `at` on."""

    def fail() -> None:
        if len(changes.made) <= at + number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    changes = _FOREVER.enter_context(
        watching(
            below, at=at, act=fail, match=r"^(open|write|fsync|mkdir) (?!\.run_state)", onwards=True
        )
    )


def copying_at(first: int, every: int, *, below: Path, into: Path) -> None:
    """Before each `every`-th change from `first` on, copy the folder to INTO/<number> as a power
    cut would leave it: a file that was written and not synced is empty, except the log."""

    def copy() -> None:
        number = len(changes.made) - 1
        if (number - first) % every == 0 and below.exists():
            shutil.copytree(below, into / f"{number:04d}")
            for path in changes.unsynced:
                lost = into / f"{number:04d}" / os.path.relpath(path, changes.below)
                if lost.exists() and lost.suffix != ".jsonl":
                    lost.write_bytes(b"")

    if os.environ.get("RANK", "0") == "0":
        changes = _FOREVER.enter_context(
            watching(below, at=first, act=copy, match=STEADY, onwards=True, repeats=False)
        )
