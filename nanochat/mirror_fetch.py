"""Brings a run directory up to what its mirror holds, before a launch looks at it.

    marks, newest first     the first one whose pieces all have their checksums
      records               settings, tokenizer, log, losses of rows, cursors: those that are missing here
      config.json           makes the folder a run
      checkpoint            if it is newer than all that are here: under a hidden name, then renamed

No file here is replaced by another content. Of two logs, both of which have lines that the other one
lacks, the mirror's lines are appended:

    here      A A A B B B            what this machine wrote, and was not copied
    mirror    A A A C C C C          what another machine wrote after it had fetched A
    merged    A A A B B B C C C C    the last line of a step counts; its digest must be the same in all
"""

import contextlib
import hashlib
import io
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from tqdm import tqdm

from nanochat.checkpoint import first_good, list_checkpoints, read_seal
from nanochat.common import (
    check_stop,
    duration,
    each,
    fsync_dir,
    make_folder,
    parse_json,
    print0,
    write_bytes,
)
from nanochat.config import Settings, resume_settings
from nanochat.mirror_marks import START, Mark, Piece, piece_of, read_marks
from nanochat.mirror_store import Store, open_store
from nanochat.run_dir import CONFIG_NAME, delete_checkpoint, remove_tree

log = logging.getLogger(__name__)
T = TypeVar("T")

LOG_NAME = "logs/train.jsonl"
OF_MACHINE = ("vocab_size", "tokenizer_fingerprint")  # settings that a command gets later


class Fetch:
    """Fetches from a mirror into a run directory. `marks`: newest first. Methods raise ValueError if
    nothing in the mirror can be used, OSError if it or the disk fails, Stop if a stop is requested."""

    def __init__(self, store: Store, marks: Mapping[str, Mark], run_dir: Path) -> None:
        self.store = store
        self.marks = [*marks.values()]
        self.run_dir = run_dir
        self.corrupt: set[str] = set()  # pieces that were found to be corrupt

    def first_good(
        self, marks: list[Mark], use: Callable[[Mark], T], *, required: bool
    ) -> T | None:
        """`use` of the first mark whose pieces are good; those before it are named in a warning.
        ValueError if there is none and one is `required`."""
        reasons = []
        for mark in marks:
            try:
                return use(mark)
            except (ValueError, FileNotFoundError) as e:
                log.warning("%s: %s is skipped: %s", self.store.where, mark.checkpoint, e)
                reasons.append(str(e))
        if required:
            raise ValueError(f"{self.store.where}: nothing in it can be used: {'; '.join(reasons)}")
        return None

    def check_settings(self, settings: Settings) -> None:
        """ValueError if the mirror's run has other settings than a command that would resume it."""
        config = self.first_good(self.marks, self._config, required=True)
        assert config is not None
        Settings.from_json(config, f"{self.store.where}: {CONFIG_NAME}")  # an error names this file
        known = {name: config[name] for name in OF_MACHINE if name in config}
        try:
            resume_settings(config, replace(settings, **known), run_dir=self.run_dir)
        except ValueError as e:
            changes = [line for line in str(e).splitlines() if line.startswith("  ")]
            listed = "\n".join(changes or [str(e)])
            ways = "use those, or name another place for the mirror of this run"
            if self.has_only_start():
                ways += "; to replace that run, which has no checkpoint yet, add --resume=scratch"
            raise ValueError(
                f"{self.store.where}: it holds a run that was started with different settings:\n{listed}\n{ways}"
            ) from None

    def has_only_start(self) -> bool:
        """Whether no checkpoint was copied yet."""
        return all(mark.checkpoint == START for mark in self.marks)

    def _config(self, mark: Mark) -> dict[str, Any]:
        content = self._content(mark.files[CONFIG_NAME])
        return parse_json(content, f"{self.store.where}: {CONFIG_NAME}", dict)

    def local_step(self) -> int:
        """The step of the newest good checkpoint here, -1 if there is none."""
        try:
            checkpoint = first_good(list_checkpoints(self.run_dir))
        except ValueError:  # the mirror may have a good one
            return -1
        return -1 if checkpoint is None else checkpoint.step

    # ---- pieces

    def _content(self, pieces: list[Piece]) -> bytes:
        """The content of a small file. ValueError or FileNotFoundError if a piece is corrupt or
        missing."""
        content = io.BytesIO()
        for piece in pieces:
            self._fetch_piece(piece, content)
        return content.getvalue()

    def _fetch_piece(self, piece: Piece, file: BinaryIO) -> None:
        """Append a piece to a file. ValueError or FileNotFoundError if it is corrupt or missing."""
        checksum = hashlib.blake2b(digest_size=16)
        num_bytes = 0
        for part in self.store.parts(f"pieces/{piece.blake2b}"):
            check_stop()
            file.write(part)
            checksum.update(part)
            num_bytes += len(part)
        if Piece(checksum.hexdigest(), num_bytes) != piece:
            self.corrupt.add(piece.blake2b)
            raise ValueError(f"{self.store.where}: pieces/{piece.blake2b} is corrupt")

    # ---- files besides the checkpoint

    def records(self) -> None:
        """Fetch what is missing here besides checkpoints and config.json."""
        is_new = not (self.run_dir / CONFIG_NAME).exists()
        self.first_good(self.marks, self._records, required=is_new)

    def config(self) -> None:
        """Fetch config.json if it is missing here."""
        path = self.run_dir / CONFIG_NAME
        if not path.exists():
            content = self.first_good(
                self.marks, lambda mark: self._content(mark.files[CONFIG_NAME]), required=True
            )
            assert content is not None
            write_bytes(path, content)

    def _records(self, mark: Mark) -> None:
        names = []
        for name in mark.files.keys() - mark.of_checkpoint.keys() - {CONFIG_NAME}:
            if self._is_missing(name, mark.files[name]):
                names.append(name)
        # all of them before the first is written: one that is corrupt spoils the mark
        contents = [*each(lambda name: self._content(mark.files[name]), names, poll=check_stop)]
        for name, content in zip(names, contents):
            path = self.run_dir / name
            make_folder(path.parent)
            if name == LOG_NAME:
                append_missing(path, content)
            else:
                write_bytes(path, content)

    def _is_missing(self, name: str, pieces: list[Piece]) -> bool:
        """Whether a file of the mirror has something that is not here. Losses of rows have a fixed
        place, so the longer file has all of them."""
        path = self.run_dir / name
        if not path.exists():
            return True
        if name.startswith("logs/rows/"):
            return path.stat().st_size < sum(piece.bytes for piece in pieces)
        if name != LOG_NAME:
            return False
        with open(path, "rb") as file:
            return any(piece_of(file.read(piece.bytes)) != piece for piece in pieces)

    # ---- the checkpoint

    def checkpoint(self, above: int) -> None:
        """Fetch the newest good checkpoint of the mirror if its step is above this one."""
        marks = [mark for mark in self.marks if mark.step > above]
        where = self.store.where
        if self.has_only_start():
            print0(f"{where}: it has no checkpoint yet")
            return
        if not marks:
            print0(f"{where}: nothing in it is newer than step {above:,} here")
            return
        here = "and nothing is here" if above < 0 else f"which is newer than step {above:,} here"
        print0(f"{where}: it has step {marks[0].step:,}, {here}")
        self.first_good(marks, self._checkpoint, required=above < 0)

    def _checkpoint(self, mark: Mark) -> None:
        """Write the checkpoint of a mark under its name, which is free, or that of an older or
        corrupt one."""
        began = time.monotonic()
        target = self.run_dir / "checkpoints" / mark.checkpoint
        make_folder(target.parent)
        temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
        try:
            num_bytes = self._write_files(mark, temporary)
            make_way(target)
            os.rename(temporary, target)
            fsync_dir(target.parent)
        except BaseException:
            if temporary.exists():
                remove_tree(temporary)
            raise
        seconds = time.monotonic() - began
        print0(
            f"mirror: {mark.checkpoint} fetched, {num_bytes / 1e6:,.1f} MB in {duration(seconds)}"
        )

    def _write_files(self, mark: Mark, folder: Path) -> int:
        """Write the files of a mark's checkpoint below a folder. Returns the number of bytes."""
        files = mark.of_checkpoint
        total = sum(piece.bytes for pieces in files.values() for piece in pieces)
        bar = tqdm(
            total=total, desc=mark.checkpoint, unit="B", unit_scale=True, leave=False, disable=None
        )
        with bar:
            for name, pieces in files.items():
                path = folder / name.removeprefix(f"checkpoints/{mark.checkpoint}/")
                make_folder(path.parent)
                with open(path, "xb") as file:
                    for piece in pieces:
                        self._fetch_piece(piece, file)
                        bar.update(piece.bytes)
                    file.flush()
                    os.fsync(file.fileno())
                fsync_dir(path.parent)
        return total


# ---- before a launch -----------------------------------------------------------------------------


def mirrored_config(where: str) -> dict[str, Any]:
    """The config.json of the run in a mirror; {} if it holds none yet. ValueError or OSError if it
    cannot be read."""
    store = open_store(where)
    marks = read_marks(store)
    fetch = Fetch(store, marks, Path())
    return fetch.first_good(fetch.marks, fetch._config, required=bool(marks)) or {}


# ---- helpers -------------------------------------------------------------------------------------


def make_way(target: Path) -> None:
    """Free the name of a checkpoint: a good one is a `final` of an earlier step and gets the name of
    that step, a corrupt one is deleted."""
    if not os.path.lexists(target):
        return
    with contextlib.suppress(OSError, ValueError):
        numbered = target.with_name(f"checkpoint-{read_seal(target)['step']}")
        if not os.path.lexists(numbered):
            os.rename(target, numbered)
            return
    delete_checkpoint(target)


def append_missing(path: Path, content: bytes) -> None:
    """Append to a log the lines of another copy of it that it lacks: those after the last line that
    both begin with. The later line of a step counts."""
    ours = path.read_bytes() if path.exists() else b""
    if content.startswith(ours):
        write_bytes(path, content)
        return
    missing = content[shared_lines(ours, content) :]
    if missing not in ours:
        ending = b"" if ours.endswith(b"\n") else b"\n"
        write_bytes(path, ours + ending + missing)


def shared_lines(first: bytes, second: bytes) -> int:
    """The number of bytes of the lines with which both contents begin."""
    shared = 0
    for ours, theirs in zip(first.splitlines(keepends=True), second.splitlines(keepends=True)):
        if ours != theirs:
            break
        shared += len(ours)
    return shared
