"""
Which launch owns a run: a lock on RUN/.owner.json, and the state that the owner writes.

Two launches that write the same run would mix two histories. So a launch takes the operating
system's lock (flock) on the owner's file, and writes its record there. The lock ends with the
process; a suspended process keeps it. A launch inspects the record first; if it is unchanged once
locked, no other launch has owned the run in between:

    A  inspects: record X, no lock ..... locks, finds X: writes record A and owns the run
    B  inspects: record X, no lock ........ cannot lock: refused, and record A names the owner
    C  inspects: record X, no lock .............. (A ends) ........ locks, finds A instead of X: refused

This module never deletes the file, because another process may be about to lock it. If a user
deletes or replaces it or the whole run directory, the owner exits at its next check: within
seconds, and before it writes another line or checkpoint. On a file system without locks, a run
counts as owned while its process exists on this host or its heartbeat is recent. If locks do not
reach another host, a launch there takes over the run; the first owner finds the new record and
exits.
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from nanochat.common import StopAsked, parse_json
from nanochat.run_dir import finite, open_regular
from nanochat.run_state import (
    ACTIVE,
    EXIT_ALIVE,
    EXIT_CODES,
    FORMAT_VERSION,
    NEWS,
    PROCESS,
    STATE_NAME,
    identify,
    identify_launcher,
    read_state,
    replace_state,
    seems_alive,
)

log = logging.getLogger(__name__)

OWNER_NAME = ".owner.json"
HEARTBEAT_S = 10.0
CLOSE_S = 5.0  # how long writing the last state may take
LOCK_TRIES, LOCK_TRY_S = 10, 0.1  # an inspection holds a shared lock for a moment

OWNER = {"launch": str, "since": str, **PROCESS}


class Owner:
    """The right of one launch to write into a run directory. It lasts while the owner's file there
    is the one this launch opened and locked, and has its record."""

    def __init__(self, run_dir: Path, file: BinaryIO, record: bytes) -> None:
        self.run_dir = run_dir
        self._file = file
        self._record = record

    def lost(self) -> str:
        """'' while this launch owns the run, otherwise the error to exit with."""
        try:  # opening the file makes network file systems check their caches
            with open_regular(self.run_dir / OWNER_NAME, os.O_RDONLY) as current:
                if (
                    os.path.sameopenfile(current.fileno(), self._file.fileno())
                    and current.read() == self._record
                ):
                    return ""
        except (FileNotFoundError, NotADirectoryError, ValueError):
            # the file is missing or was replaced
            pass
        except OSError:  # unknown; the next check may find out
            return ""
        return (
            f"{self.run_dir}: this launch no longer owns the run, because its files were removed or another launch "
            f"took it over; exiting at once"
        )

    def release(self) -> None:
        """Give up the run: from now on another launch may claim it."""
        self._file.close()


def _lock(file: BinaryIO, kind: int) -> bool | None:
    """Lock a file without waiting: True, False if another process holds it, None if the file system
    has no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def last_owner(run_dir: Path) -> tuple[bytes, bool]:
    """The record of a run's last owner, empty if there was none, and whether it still owns the
    run."""
    try:
        with open_regular(run_dir / OWNER_NAME, os.O_RDONLY) as file:
            free, record = _lock(file, fcntl.LOCK_SH), file.read()
    except (FileNotFoundError, NotADirectoryError):
        return b"", False
    if free is None:
        state = read_state(run_dir)
        return record, state is not None and state["status"] in ACTIVE and seems_alive(state)
    return record, not free


def check_free(run_dir: Path) -> bytes:
    """Check that no launch owns the run, without changing anything. Returns the last owner's record
    for `claim`. ValueError names the process that owns the run, or an owner's file that is not a
    regular one."""
    record, alive = last_owner(run_dir)
    if not alive:
        return record
    try:
        owner = parse_json(record, "", OWNER)
        who = f"host {owner['host']!a}, pid {owner['pid']}, since {owner['since']!a}"
    except ValueError:
        who = f"{run_dir / OWNER_NAME} does not name it"
    raise ValueError(
        f"{run_dir}: another launch owns this run: {who}; end it with python -m scripts.stop "
        f"{run_dir.name} (--force if it is suspended or hangs), or name another run with --model-tag"
    )


def claim(run_dir: Path, before: bytes) -> Owner:
    """Become the owner of a run whose last owner left the record `before` (see `check_free`).
    ValueError if another launch owns the run, or has owned it since."""
    outdated = ValueError(
        f"{run_dir}: another launch owned this run a moment ago; run the command again"
    )
    if not before:
        run_dir.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open_regular(run_dir / OWNER_NAME, os.O_RDWR | os.O_CREAT))
            for _ in range(LOCK_TRIES):
                if (locked := _lock(file, fcntl.LOCK_EX)) is not False:
                    break
                time.sleep(LOCK_TRY_S)
            if not locked:
                check_free(run_dir)  # raises the error that names the owner
            # another process may have replaced the file between our open and our lock
            same = os.path.samestat(os.fstat(file.fileno()), os.lstat(run_dir / OWNER_NAME))
        except FileNotFoundError:
            raise outdated from None
        if locked is False or not same or file.read() != before:
            raise outdated
        record = json.dumps(
            {
                "launch": uuid.uuid4().hex,
                "since": time.strftime("%Y-%m-%d %H:%M:%S"),
                "launcher": identify_launcher(),
                **identify(),
            }
        ).encode()
        file.seek(0)
        file.write(record)
        file.truncate(len(record))
        # a forked child would keep the lock; executed programs do not
        os.register_at_fork(after_in_child=file.close)
        stack.pop_all()
    return Owner(run_dir, file, record)


def acquire(run_dir: Path) -> Owner:
    """`check_free`, then `claim`."""
    return claim(run_dir, check_free(run_dir))


def liveness(run_dir: Path, state: Mapping[str, Any]) -> str:
    """ended (final status), alive, or dead (active status, but no process holds the run's lock). If
    it ran on another host, which locks may not reach, it is dead only if its heartbeat is old,
    too."""
    if state["status"] in EXIT_CODES:
        return "ended"
    elsewhere = state["ranks"][0]["host"] != socket.gethostname()
    return "alive" if last_owner(run_dir)[1] or (elsewhere and seems_alive(state)) else "dead"


def exit_code(run_dir: Path, state: Mapping[str, Any]) -> int:
    """The exit code of scripts.status --exit-code: 0 completed, 10 stopped (the command that
    started it resumes it), 3 halted (the user must decide), 1 failed or dead, 20 alive."""
    return {"ended": EXIT_CODES.get(state["status"], 1), "alive": EXIT_ALIVE, "dead": 1}[
        liveness(run_dir, state)
    ]


class RunState:
    """Rank 0's writer of the state. Leaving the context without a final status sets "stopped" (for
    a StopAsked) or "failed", with the exception as the reason. `ranks`: the values of `identify` on
    each rank, in rank order. `check_flag`: called with the run directory, to look for a request to
    stop. Only `refresh` uses the disk, and the heartbeat (nanochat/watchdog.py) calls it, so that
    no step waits."""

    def __init__(
        self,
        owner: Owner,
        ranks: Sequence[dict[str, Any]],
        check_flag: Callable[[Path], None] = lambda run_dir: None,
        **news: Any,
    ) -> None:
        self.owner = owner
        self._check_flag = check_flag
        self._path = owner.run_dir / STATE_NAME
        empty = {name: "" if shape is str else None for name, shape in NEWS.items()}
        self._state: dict[str, Any] = {
            **empty,
            "format_version": FORMAT_VERSION,
            "status": "starting",
            "world_size": len(ranks),
            "ranks": list(ranks),
            "started": time.time(),
        }
        self._written: dict[str, Any] = {}
        self._written_at = 0.0
        self._warned = self._closed = False
        self._one_writer = threading.Lock()
        self.update(**news)
        self.refresh()

    def update(self, **news: Any) -> None:
        """Change values (the names in NEWS); the next `refresh` writes them. A final status freezes
        the state."""
        assert news.keys() <= NEWS.keys() and news.get("status", "starting") in (
            *ACTIVE,
            *EXIT_CODES,
        )
        if self._state["status"] not in EXIT_CODES:
            self._state.update(news)

    def refresh(self) -> str:
        """Check the flag file, write the state if it changed or a heartbeat is due, and give up the
        run after a final status. Returns '', or the error to exit with if the run is lost; in that
        case nothing is written."""
        with self._one_writer:
            if self._closed:
                return ""
            self._check_flag(self.owner.run_dir)
            lost, state = self.owner.lost(), dict(self._state)
            if not lost and (
                state != self._written or time.monotonic() - self._written_at >= HEARTBEAT_S
            ):
                self._written, self._written_at = state, time.monotonic()
                try:
                    replace_state(self._path, finite({**state, "heartbeat": time.time()}))
                except OSError as e:
                    if not self._warned:
                        log.warning(
                            "%s: cannot be written (%s); training continues", self._path, e.strerror
                        )
                    self._warned = True
            if state["status"] in EXIT_CODES:
                self.owner.release()
                self._closed = True
            return lost

    def close(self, status: str, reason: str = "") -> None:
        """Write how the run ended, and give up the run. The first final status stays. A disk that
        does not answer delays this by at most CLOSE_S."""
        self.update(status=status, reason=reason)
        writer = threading.Thread(target=self.refresh, name="last-state", daemon=True)
        writer.start()
        writer.join(timeout=CLOSE_S)

    def __enter__(self) -> "RunState":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StopAsked):
            self.close("stopped", str(error))
        reason = (
            str(error)
            if isinstance(error, (ValueError, OSError))
            else f"{type(error).__name__}: {error}"
        )
        self.close("failed", "ended without a status" if error is None else reason)


def write_completed(run_dir: Path, step: int, reason: str) -> None:
    """Write a completed state for a `final` checkpoint, at `step`, that no launch here trained;
    `reason` names its origin."""
    state = RunState(
        acquire(run_dir), [identify()], num_iterations=step, step=step, checkpoint="final"
    )
    state.close("completed", reason)
