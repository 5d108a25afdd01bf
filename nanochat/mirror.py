"""The mirror of a run, --mirror-to: a copy of what a resume needs, in another place, from which the
same command resumes the run on an empty machine.

    RUN/                                      MIRROR/
      checkpoints/checkpoint-100/*              pieces/9f3c.., 07ab..       contents, named by their checksums
      logs/train.jsonl, rows/, cursors/         marks/00000100-...json      {file of RUN: its pieces}
      config.json, tokenizer/, ...              owner.json                  see nanochat/mirror_owner.py

**Copying.** After each save, a thread copies the pieces that the mirror lacks, and then writes a
mark, which lists every file of the run at that save. A checkpoint's file is one piece, named by the
checksum in its seal; other files are cut every megabyte, so of a growing log only the last piece
changes. No piece is ever replaced, so neither a crash nor a launch that has lost the mirror can
damage what a mark lists. Training never waits: if the next saves come before a copy has ended, the
newest of them is copied next. Its files are opened at once, so retention may delete them meanwhile.

    step      100 ......... 200 ......... 300 ......... 400
    thread      | copy 100, mark              | copy 300, mark     (200 is left out)

At its start, a run without a checkpoint is copied, too: its settings, pinned files and tokenizer.

**Fetching** comes before the launch looks at the run directory: nanochat/mirror_fetch.py. It takes
the newest mark whose pieces all have their checksums.

**Retention** is that of the run directory: marks of deleted checkpoints are deleted, and then the
pieces that no mark lists.

Rejected: a plain copy of the run directory. An interrupted copy of a checkpoint, or one by a launch
that was suspended and has lost the mirror, would damage the copy that exists.
"""

import contextlib
import hashlib
import logging
import os
import threading
import time
import uuid
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from nanochat.checkpoint import STATE_NAME, list_checkpoints, read_seal
from nanochat.common import (
    duration,
    get_base_dir,
    hash_bytes,
    is_remote,
    parse_json,
    print0,
    write_json,
)
from nanochat.config import Settings
from nanochat.mirror_fetch import LOG_NAME, Fetch
from nanochat.mirror_marks import START, START_STEP, Mark, Piece, outdated, piece_of, read_marks
from nanochat.mirror_owner import Lease, claim_mirror
from nanochat.mirror_store import as_file, open_store
from nanochat.pins import DATA_MANIFEST
from nanochat.run_dir import CONFIG_NAME, PLAN_NAME, but_resume, is_run_dir, open_regular
from nanochat.run_owner import last_owner
from nanochat.run_state import MIRROR_NAME, PROCESS, read_mirror_state, renew_state
from nanochat.steps import Mirror

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20  # of a file that may grow
RETRY_S = 5.0  # after a copy that failed; twice as long after each further one
LONGEST_RETRY_S = 300.0
HURRY_S = 1.0  # instead, when the launch ends
# besides the checkpoint: what a resume needs, or readers
RECORDS = (
    CONFIG_NAME,
    DATA_MANIFEST,
    PLAN_NAME,
    "tokenizer/*",
    LOG_NAME,
    "logs/cursors/*",
    "logs/rows/*",
)


class Job(NamedTuple):
    """A checkpoint to copy, or the start of a run. Its files stay readable after they have been
    deleted."""

    checkpoint: str
    seal: dict[str, Any]
    files: dict[str, tuple[Piece, BinaryIO]]

    def close(self) -> None:
        for _, file in self.files.values():
            file.close()


def open_job(path: Path) -> Job:
    """Open the files of a checkpoint. OSError or ValueError if it is gone or corrupt."""
    seal = read_seal(path)
    raw = (path / STATE_NAME).read_bytes()
    files: dict[str, tuple[Piece, BinaryIO]] = {}
    job = Job(path.name, seal, files)
    try:
        for name, record in seal["files"].items():
            piece = Piece(record["blake2b"], record["bytes"])
            files[name] = piece, open_regular(path / name, os.O_RDONLY)
    except OSError:
        job.close()
        raise
    files[STATE_NAME] = Piece(hash_bytes(raw), len(raw)), as_file(raw)
    return job


class RunMirror(Mirror):
    """The mirror of a run, on rank 0 of a launch that owns both.

    `fetch` and the methods of a sink are called by the main thread; `_work` is the thread that
    copies. They share what `_changed` guards.
    """

    def __init__(self, settings: Settings, run_dir: Path) -> None:
        """Own the mirror. ValueError, OSError or Stop if that is not possible."""
        assert settings.mirror_to is not None
        self.settings = settings
        self.run_dir = run_dir
        check_place(settings.mirror_to)
        self.store = open_store(settings.mirror_to)
        self.lease: Lease = claim_mirror(self.store, run_dir.name, last_process(run_dir))
        self._hashed: dict[Path, tuple[tuple[int, int], list[Piece]]] = {}
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._pending: Job | None = None
        self._busy = False
        self._hurry = False  # the launch ends: try again at once
        self._over = False
        self._end_by: float | None = None
        self._news: list[tuple[str, dict[str, Any]]] = []
        self._problem = ""
        known = read_mirror_state(run_dir)
        self.run = known["run"] if known else uuid.uuid4().hex
        with contextlib.ExitStack() as stack:
            stack.callback(self.lease.give_back)
            self.pieces = self.store.names("pieces")  # {blake2b: bytes} of those that are there
            self.marks = read_marks(self.store)
            newest = next(iter(self.marks.values()), None)
            if newest is not None:
                check_run(self.store.where, newest, settings, run_dir, self.run)
                self.run = newest.run
            stack.pop_all()
        self._state: dict[str, Any] = {
            "mirror": self.store.where.removeprefix("--mirror-to="),
            "run": self.run,
            "checkpoint": newest and newest.checkpoint,
            "step": newest and newest.step,
            "copied": None,
            "pending": None,
            "bytes_left": 0,
            "problem": "",
        }

    @staticmethod
    def preview(settings: Settings, run_dir: Path) -> str:
        """What a launch would find in its mirror, as a sentence. Changes nothing, here and there, and
        does not ask for an owner. ValueError or OSError for a mirror that a launch would refuse."""
        assert settings.mirror_to is not None
        check_place(settings.mirror_to)
        store = open_store(settings.mirror_to, make=False)
        try:
            marks = read_marks(store)
        except FileNotFoundError:  # a launch would make the folder
            marks = {}
        newest = next(iter(marks.values()), None)
        if newest is not None:
            known = read_mirror_state(run_dir)
            check_run(store.where, newest, settings, run_dir, known["run"] if known else "")
        if newest is None or settings.resume == "scratch":  # which replaces a mere start
            return f"{store.where}: it has no checkpoint yet"
        if not is_run_dir(run_dir):
            Fetch(store, marks, run_dir).check_settings(settings)
        return (
            f"{store.where}: it holds this run up to {newest.checkpoint}; a launch would fetch what is newer than "
            f"here (checkpoints only with --resume=auto, the default; the run's tokenizer if none is here, so train "
            f"none), and this check is without it"
        )

    def lost(self) -> str:
        return self.lease.lost

    def release(self) -> None:
        """Give up the mirror, when the launch ends."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self.lease.give_back()

    # ---- fetching

    def fetch(self) -> None:
        """Bring the run directory up to the newest good mark, if it is older. Prints which is used.
        ValueError if the mirror holds a run with other settings, or none of its marks is good."""
        if not self.marks or self.settings.resume == "scratch":  # which replaces a mere start
            print0(f"{self.store.where}: it has no checkpoint yet")
            return
        fetch = Fetch(self.store, self.marks, self.run_dir)
        if not is_run_dir(self.run_dir):
            fetch.check_settings(self.settings)
        step = fetch.local_step()
        fetch.records()
        self._write_state()  # before config.json: this folder is a copy of the mirror's run
        fetch.config()
        if self.settings.resume == "auto":
            fetch.checkpoint(step)
        renew_state(self.run_dir)
        for blake2b in fetch.corrupt:  # to be copied again
            self.pieces.pop(blake2b, None)

    # ---- what the launch reports

    def event(self, name: str, step: int, record: dict[str, Any]) -> None:
        if name == "started":
            self._start()
            self._give_newest()
        elif name == "saved":
            self._give(self.run_dir / "checkpoints" / record["checkpoint"])

    def news(self) -> list[tuple[str, dict[str, Any]]]:
        """(name, values) of the events since the last call."""
        with self._changed:
            news = self._news
            self._news = []
        return news

    def ending(self, reason: str) -> None:
        self._end_by = time.monotonic() + self.settings.walltime_reserve_seconds

    def end(self, status: str, reason: str) -> None:
        self.finish()

    def close(self) -> None:
        self.finish()

    def finish(self) -> None:
        """Copy what the mirror lacks, with the last lines of the log, within the time that is
        reserved for the last save. Says what is left then."""
        if self._over:
            return
        end_by = self._end_by or time.monotonic() + self.settings.walltime_reserve_seconds
        self._start()
        self._give_newest()
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            while self._has_work() and time.monotonic() < end_by and not self.lease.lost:
                self._changed.wait(0.1)
            is_left = self._has_work()
            self._over = True
            self._changed.notify_all()
        if is_left and not self.lease.lost:
            reason = f"; {self._problem}" if self._problem else ""
            log.warning(
                "%s: the end of the run is not copied yet (%.1f MB of %s are left%s); the same command%s on "
                "this machine copies it",
                self.store.where,
                self._state["bytes_left"] / 1e6,
                self._state["pending"],
                reason,
                but_resume(vars(self.settings)),
            )

    def _has_work(self) -> bool:
        return self._busy or self._pending is not None

    # ---- the thread that copies

    def _start(self) -> None:
        if self._thread is None:
            self._write_state()
            self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
            self._thread.start()

    def _give_newest(self) -> None:
        """Have the newest checkpoint copied, or the start of a run that has none, with what the log
        has by now."""
        newest = next(iter(list_checkpoints(self.run_dir)), None)
        if newest is not None:
            self._give(newest)
        elif is_run_dir(self.run_dir):
            self._give_job(Job(START, {"step": START_STEP}, {}))

    def _give(self, path: Path) -> None:
        """Have a checkpoint copied."""
        try:
            job = open_job(path)
        except (OSError, ValueError) as e:
            log.warning("%s: %s is not copied: %s", self.store.where, path.name, e)
            return
        self._give_job(job)

    def _give_job(self, job: Job) -> None:
        """Have something copied, unless something newer comes before the thread begins."""
        with self._changed:
            if self._pending is not None:
                self._pending.close()
            self._pending = job
            self._changed.notify_all()

    def _take(self) -> Job | None:
        """The next checkpoint to copy; None if the launch is over."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            while self._pending is None and not self._over:
                self._changed.wait()
            job = None if self._over else self._pending
            self._pending = None
            self._busy = job is not None
        return job

    def _work(self) -> None:
        """Copy what is given until the launch is over."""
        while (job := self._take()) is not None:
            with contextlib.closing(job):
                self._copy_until_done(job)

    def _copy_until_done(self, job: Job) -> None:
        """Copy a checkpoint, again and again after an error, unless a newer one is given."""
        wait_s = RETRY_S
        while not self._over and not self.lease.lost:
            began = time.monotonic()
            try:
                num_bytes = self._copy(job)
            except Exception as e:  # also a bug: a run does not end for its mirror
                if not (self._over or self.lease.lost):
                    self._note_problem(job, e)
            else:
                self._note_copy(job, num_bytes, time.monotonic() - began)
                return
            with self._changed:
                is_newer = self._changed.wait_for(
                    lambda: self._over or self._hurry or self._pending is not None, wait_s
                )
            if is_newer and self._pending is not None:
                return
            if self._hurry:
                time.sleep(HURRY_S)
            wait_s = min(2 * wait_s, LONGEST_RETRY_S)

    def _note_problem(self, job: Job, e: Exception) -> None:
        """Warn of the first error in a row, and log it."""
        reason = str(e) if isinstance(e, (OSError, ValueError)) else f"{type(e).__name__}: {e}"
        with self._changed:
            is_first = not self._problem
            self._problem = reason
            if is_first:
                record = {"checkpoint": job.checkpoint, "reason": reason}
                self._news.append(("mirror_failed", record))
        if is_first:
            log.warning(
                "%s could not be copied: %s; training continues, and the copy is tried again",
                job.checkpoint,
                reason,
            )
        self._write_state(problem=reason)

    def _note_copy(self, job: Job, num_bytes: int, seconds: float) -> None:
        """Log a copy that is complete."""
        step = job.seal["step"]
        is_new = (job.checkpoint, step) != (self._state["checkpoint"], self._state["step"])
        with self._changed:
            self._problem = ""
            self.slowest_s = max(self.slowest_s, seconds)
            record = {"checkpoint": job.checkpoint, "seconds": seconds, "bytes": num_bytes}
            if job.checkpoint != START:
                self._news.append(("mirrored", record))
        if num_bytes and is_new:  # else some lines of the log alone
            print0(
                f"mirror: {job.checkpoint} copied, {num_bytes / 1e6:,.1f} MB in {duration(seconds)}"
            )
        self._write_state(
            checkpoint=job.checkpoint,
            step=step,
            copied=time.time(),
            pending=None,
            bytes_left=0,
            problem="",
        )

    def _copy(self, job: Job) -> int:
        """Copy a checkpoint and what belongs to it, then mark it. Returns the bytes that the mirror
        lacked."""
        left = sum(piece.bytes for piece, _ in job.files.values() if self._lacks(piece))
        self._write_state(pending=job.checkpoint, bytes_left=left)
        num_bytes = 0
        files: dict[str, list[Piece]] = {}
        for name, (piece, file) in job.files.items():
            if self._lacks(piece):
                check_content(piece, file, name)
            num_bytes += self._put(piece, file)
            self._write_state(bytes_left=left - num_bytes)
            files[f"checkpoints/{job.checkpoint}/{name}"] = [piece]
        for path in self._record_paths():
            pieces, copied = self._put_record(path)
            files[path.relative_to(self.run_dir).as_posix()] = pieces
            num_bytes += copied
        mark = Mark(
            run=self.run,
            name=self.run_dir.name,
            checkpoint=job.checkpoint,
            step=job.seal["step"],
            kept=bool(job.seal.get("kept")) or self.settings.is_kept(job.seal["step"]),
            by_time=bool(job.seal.get("by_time")),
            files=files,
        )
        if mark not in self.marks.values():
            self._write_mark(mark)
        return num_bytes

    def _write_mark(self, mark: Mark) -> None:
        """Write a mark, if this launch still owns the mirror, then delete what it replaces."""
        self._check_over()
        self.lease.renew()
        name = f"{mark.step:08d}-{mark.checkpoint}-{self.lease.launch[:8]}.json"
        self.store.write(f"marks/{name}", as_file(mark.encode()))
        self.marks[name] = mark
        old_marks = outdated(self.marks, name, self.settings)
        self.lease.renew()  # a launch that has lost the mirror deletes nothing
        for old in old_marks:
            self.store.delete(f"marks/{old}")
            del self.marks[old]
        listed = {piece.blake2b for each_mark in self.marks.values() for piece in each_mark.pieces}
        for blake2b in self.pieces.keys() - listed:
            self.store.delete(f"pieces/{blake2b}")
            del self.pieces[blake2b]

    def _check_over(self) -> None:
        """OSError if this launch must not write into the mirror any more."""
        if self._over or self.lease.lost:
            raise OSError("the launch has ended")

    def _lacks(self, piece: Piece) -> bool:
        return self.pieces.get(piece.blake2b) != piece.bytes

    def _put(self, piece: Piece, content: BinaryIO) -> int:
        """Copy a piece that the mirror lacks. Returns how many bytes that took."""
        self._check_over()
        if not self._lacks(piece):
            return 0
        self.store.write(f"pieces/{piece.blake2b}", content)
        self.pieces[piece.blake2b] = piece.bytes
        return piece.bytes

    def _record_paths(self) -> list[Path]:
        """The files of the run besides its checkpoints that a mark lists."""
        paths = [path for pattern in RECORDS for path in self.run_dir.glob(pattern)]
        return sorted(path for path in paths if path.is_file() and not path.name.startswith("."))

    def _put_record(self, path: Path) -> tuple[list[Piece], int]:
        """(pieces of a file, bytes that the mirror lacked). A file that has not changed since the
        last mark is not read again."""
        found = path.stat()
        state = (found.st_size, found.st_mtime_ns)
        known = self._hashed.get(path)
        if known is not None and known[0] == state and not any(map(self._lacks, known[1])):
            return known[1], 0
        pieces = []
        num_bytes = 0
        with open(path, "rb") as file:
            while content := file.read(PIECE_BYTES):
                piece = piece_of(content)
                num_bytes += self._put(piece, as_file(content))
                pieces.append(piece)
        self._hashed[path] = state, pieces
        return pieces, num_bytes

    def _write_state(self, **changed: object) -> None:
        """Update what scripts.status shows, and by which the next launch knows this mirror. So it is
        synced: without it, the mirror would seem to be another run's."""
        self._state |= changed
        with contextlib.suppress(OSError):
            write_json(self.run_dir / MIRROR_NAME, self._state)


# ---- helpers -------------------------------------------------------------------------------------


def check_run(where: str, newest: Mark, settings: Settings, run_dir: Path, run: str) -> None:
    """ValueError if a mirror, which has this mark, holds another run than this directory. `run`: the
    run that the directory is a copy of, in a mirror's words."""
    if newest.name != run_dir.name:
        raise ValueError(
            f"{where}: it holds the run {newest.name}, not {run_dir.name}; name another place for the mirror "
            f"of this run"
        )
    if settings.resume == "scratch" and newest.checkpoint != START:
        raise ValueError(
            f"{where}: it holds this run, which --resume=scratch would start over; name another place for the "
            f"mirror of the new run"
        )
    if is_run_dir(run_dir) and run != newest.run:
        raise ValueError(
            f"{where}: it holds a run {newest.name} that began elsewhere, and {run_dir} is not a copy of it; "
            f"rename that folder, or name another place for the mirror of this run"
        )


def check_place(where: str) -> None:
    """ValueError if --mirror-to is among the run directories."""
    runs = get_base_dir().absolute() / "runs"
    if not is_remote(where) and Path(where).expanduser().absolute().is_relative_to(runs):
        raise ValueError(
            f"--mirror-to={where}: expected a place outside of {runs}, such as a folder on another disk"
        )


def check_content(piece: Piece, file: BinaryIO, name: str) -> None:
    """ValueError if a file of a checkpoint was damaged since it was saved: the mirror would keep the
    damaged content under the name of the good one."""
    checksum = hashlib.blake2b(digest_size=16)
    file.seek(0)
    while part := file.read(PIECE_BYTES):
        checksum.update(part)
    if checksum.hexdigest() != piece.blake2b:
        raise ValueError(f"{name}: corrupt (its bytes do not match the checksum in {STATE_NAME})")


def last_process(run_dir: Path) -> dict[str, Any]:
    """The process that owned the run directory before this one; {} if there was none."""
    try:
        return parse_json(last_owner(run_dir)[0], "", PROCESS)
    except ValueError:
        return {}
