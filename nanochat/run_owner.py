"""
Which launch owns a run: a lock on RUN/.owner.json, and the record in it.

Two launches that write the same run would mix two histories. So a launch takes the operating
system's lock (flock) on the owner's file before it looks at the run, and signs it, with a record
of itself, before it writes anything else. The lock ends with the process; a suspended process
keeps it:

    A   locks ............ looks ............ signs: record A ........ trains
    B           cannot lock: refused                      cannot lock: refused, and A is named
    C   locks ... looks: the command is refused, so it withdraws: what it made is removed

This module deletes the file only if its launch made it and withdraws: a process that is about to
lock it finds out, and begins again. If a user deletes or replaces it or the whole run directory,
the owner exits at its next check: within seconds, and before it writes another line or checkpoint.
On a file system without locks, a run counts as owned while its process exists on this host or its
heartbeat is recent; of two launches that look at the same time, the second to sign is refused. If
locks do not reach another host, a launch there takes over the run; the first owner finds the new
record and exits.
"""

import contextlib
import errno
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

from nanochat.common import Stop, make_folder, parse_json, reason_of
from nanochat.run_dir import finite, open_regular, set_aside
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
    is_alive_here,
    read_state,
    replace_state,
    seems_alive,
)
from nanochat.steps import Sink, StepReport

log = logging.getLogger(__name__)

OWNER_NAME = ".owner.json"
HEARTBEAT_S = 10.0
CLOSE_S = 5.0  # how long writing the last state may take
LOCK_TRIES, LOCK_TRY_S = 10, 0.1  # an inspection holds a shared lock for a moment

OWNER = {"launch": str, "since": str, **PROCESS}
MOMENT_AGO = "{}: another launch owned this run a moment ago; run the command again"


class Owner:
    """The right of one launch to write into a run directory. It lasts while the owner's file there
    is the one this launch opened and locked, and has its record."""

    def __init__(self, run_dir: Path, file: BinaryIO, made: Sequence[Path], record: bytes) -> None:
        self.run_dir = run_dir
        self._file = file
        self._record = record  # that of the last owner, until `sign`
        self._made = [] if self._record else made  # what `claim` made, the innermost first
        self.launch = uuid.uuid4().hex  # names this launch

    def sign(self) -> None:
        """Write this launch's record. ValueError if another launch owns the run by now, which can
        only happen without locks. OSError if the disk does not take it."""
        if self.lost():
            raise ValueError(MOMENT_AGO.format(self.run_dir))
        record = {
            "launch": self.launch,
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "launcher": identify_launcher(),
            **identify(),
        }
        before = self._record
        self._record = json.dumps(record).encode()
        try:
            self._write(self._record)
        except OSError:
            self._record = before
            self._write(before)  # shorter than what did not fit
            raise
        self._made = []

    def _write(self, record: bytes) -> None:
        self._file.seek(0)
        self._file.truncate(0)
        written = self._file.write(record)
        if written != len(record):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.run_dir / OWNER_NAME))

    def set_aside(self) -> None:
        """Rename the run and make an empty folder in its place, which this launch owns, too."""
        run_dir = self.run_dir.resolve()  # if it is a link, its target is renamed, and it stays
        aside = set_aside(run_dir)
        run_dir.mkdir(exist_ok=True)  # a launch that made it just now loses it by the next line
        os.rename(aside / OWNER_NAME, run_dir / OWNER_NAME)

    def lost(self) -> str:
        """'' while this launch owns the run, otherwise the error to exit with."""
        try:  # opening the file makes network file systems check their caches
            with open_regular(self.run_dir / OWNER_NAME, os.O_RDONLY) as current:
                is_ours = os.path.sameopenfile(current.fileno(), self._file.fileno())
                if is_ours and current.read() == self._record:
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
        """Give up the run: from now on another launch may claim it. If this launch has not signed,
        what it made is removed first."""
        if self._made and not self.lost():
            with contextlib.suppress(OSError):  # a folder that is no longer empty stays
                for path in self._made:
                    path.unlink() if path.name == OWNER_NAME else path.rmdir()
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
        is_active = state is not None and state["status"] in ACTIVE and seems_alive(state)
        return record, is_active or _has_just_signed(record, state)
    return record, not free


def _has_just_signed(record: bytes, state: Mapping[str, Any] | None) -> bool:
    """Whether the process of an owner's record is alive, and has not written its state yet."""
    try:
        owner = parse_json(record, "", OWNER)
    except ValueError:
        return False
    before = state["ranks"][0] if state else {}
    return is_alive_here(owner) and any(owner[name] != before.get(name) for name in PROCESS)


def check_free(run_dir: Path) -> bytes:
    """Check that no launch owns the run, without changing anything. Returns the record of the last
    owner. ValueError names the process that owns the run, or an owner's file that is not a regular
    one."""
    record, alive = last_owner(run_dir)
    if not alive:
        return record
    try:
        owner = parse_json(record, "", OWNER)
        who = f"host {owner['host']!a}, pid {owner['pid']}, since {owner['since']!a}"
        if owner["host"] == socket.gethostname() and not is_alive_here(owner):
            who = "one that is just starting"  # it has not signed: the record is an older one
    except ValueError:
        who = f"{run_dir / OWNER_NAME} does not name it"
    raise ValueError(
        f"{run_dir}: another launch owns this run: {who}; end it with python -m scripts.stop "
        f"{run_dir.name} (--force if it is suspended or hangs), or name another run with --model-tag"
    )


def claim(run_dir: Path) -> Owner:
    """Lock a run, which need not exist yet. ValueError if another launch owns it."""
    path = run_dir / OWNER_NAME
    made: list[Path] = []
    for _ in range(LOCK_TRIES):
        made += make_folder(run_dir)
        with contextlib.ExitStack() as stack:
            try:
                file, is_new = _open_or_make(path)
                stack.enter_context(file)
                made = [path, *made] if is_new else made
                locked = _lock(file, fcntl.LOCK_EX)
                # another process may have removed the file between our open and our lock
                same = os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
            except FileNotFoundError:
                continue
            if locked is not False and same:
                # without locks, `sign` is refused if another launch has signed since then
                record = file.read() if locked else check_free(run_dir)
                # a forked child would keep the lock; executed programs do not
                os.register_at_fork(after_in_child=file.close)
                stack.pop_all()
                # without locks, what this launch made may be another's by the time it withdraws
                return Owner(run_dir, file, made if locked else [], record)
        time.sleep(LOCK_TRY_S)
    check_free(run_dir)
    raise ValueError(MOMENT_AGO.format(run_dir))


def _open_or_make(path: Path) -> tuple[BinaryIO, bool]:
    """(the owner's file, whether this call has made it)."""
    try:
        return open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), True
    except FileExistsError:
        return open_regular(path, os.O_RDWR), False


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


class RunState(Sink):
    """Rank 0's writer of the state, the last sink of its journal.

    Leaving the context without a final status sets "stopped" (for a Stop) or "failed", with
    the exception as the reason. `ranks`: the values of `identify` on each rank, in rank order.
    `look_for_request`: called with the run directory and whether this launch has stopped, to look
    for a request to stop. Only `refresh` uses the disk, and the watchdog calls it, so that no step
    waits.
    """

    def __init__(
        self,
        owner: Owner,
        ranks: Sequence[dict[str, Any]],
        look_for_request: Callable[..., None] = lambda run_dir, *, has_stopped=False: None,
        **news: object,
    ) -> None:
        self.owner = owner
        self._look_for_request = look_for_request
        self._path = owner.run_dir / STATE_NAME
        empty = {name: "" if shape is str else None for name, shape in NEWS.items()}
        self._state: dict[str, Any] = {
            **empty,
            "format_version": FORMAT_VERSION,
            "status": "starting",
            "world_size": len(ranks),
            "ranks": list(ranks),
            "started": time.time(),
            "launch": owner.launch,
        }
        self._written: dict[str, Any] = {}
        self._written_at = 0.0
        self._warned = self._closed = False
        self._one_writer = threading.Lock()
        self.update(**news)
        self.refresh()

    def update(self, **news: object) -> None:
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
            lost = self.owner.lost()
            state = dict(self._state)
            if not lost:
                has_stopped = state["status"] == "stopped"
                self._look_for_request(self.owner.run_dir, has_stopped=has_stopped)
            if not lost and (
                state != self._written or time.monotonic() - self._written_at >= HEARTBEAT_S
            ):
                self._written = state
                self._written_at = time.monotonic()
                try:
                    replace_state(self._path, finite({**state, "heartbeat": time.time()}))
                except OSError as e:
                    if not self._warned:
                        log.warning(
                            "%s: cannot be written (%s); training continues",
                            self._path,
                            reason_of(e),
                        )
                    self._warned = True
            if state["status"] in EXIT_CODES:
                self.owner.release()
                self._closed = True
            return lost

    def event(self, name: str, step: int, record: dict[str, Any]) -> None:
        if name == "val":
            self.update(val_bpb=record["bpb"], val_step=step)
        elif name == "saved":
            self.update(checkpoint=record["checkpoint"])

    def step(self, report: StepReport) -> None:
        """Note the figures of a step in memory; the next `refresh` writes them."""
        self.update(
            status="running",
            step=report.step + 1,
            tokens=report.tokens,
            skipped=report.skipped,
            loss=report.smooth_loss,
            tokens_per_s=report.tokens_per_s,
            eta_s=report.eta_s,
            phase=report.phase,
        )

    def ending(self, reason: str) -> None:
        self.update(status="stopping", reason=reason)

    def end(self, status: str, reason: str = "") -> None:
        """Write how the run ended, and give up the run. The first final status stays. A disk that
        does not answer delays this by at most CLOSE_S."""
        self.update(status=status, reason=reason)
        writer = threading.Thread(target=self.refresh, name="last-state", daemon=True)
        writer.start()
        writer.join(timeout=CLOSE_S)

    def __enter__(self) -> "RunState":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Stop):
            return self.end("stopped", str(error))
        reason = (
            str(error)
            if isinstance(error, (ValueError, OSError))
            else f"{type(error).__name__}: {error}"
        )
        self.end("failed", "ended without a status" if error is None else reason)


def write_completed(run_dir: Path, step: int, reason: str) -> None:
    """Write a completed state for a `final` checkpoint, at `step`, that no launch here trained;
    `reason` names its origin."""
    owner = claim(run_dir)
    owner.sign()
    state = RunState(owner, [identify()], num_iterations=step, step=step, checkpoint="final")
    state.end("completed", reason)
