"""The marks of a mirror: what it holds of a run at one save.

    marks/00000100-checkpoint-100-5d1e3c07.json    {file of RUN: its pieces}; the last part names the launch
    pieces/9f3c..                                  the content of a piece, named by its checksum

A mark is written after all of its pieces, with a checksum of itself. Before the first save, a mark
named `start` lists what the run began with: its settings, tokenizer, pinned files and log.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

from nanochat.checkpoint import STATE_NAME, TIMED_KEPT, SaveSettings
from nanochat.common import check_stop, each, hash_bytes, hash_json, parse_json
from nanochat.mirror_store import Store
from nanochat.run_dir import CONFIG_NAME

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
# in place of a checkpoint, before the first one; its step is below that of every checkpoint
START = "start"
START_STEP = -1


class Piece(NamedTuple):
    """Some bytes of the mirror."""

    blake2b: str
    bytes: int


def piece_of(content: bytes) -> Piece:
    return Piece(hash_bytes(content), len(content))


class Mark(NamedTuple):
    """What the mirror holds of a run at one save."""

    run: str  # names the run, see `Lease`
    name: str  # of its folder
    checkpoint: str
    step: int
    kept: bool  # never deleted
    by_time: bool  # saved by the 30-minute timer
    files: dict[str, list[Piece]]

    def encode(self) -> bytes:
        value = {"format_version": FORMAT_VERSION, **self._asdict()}
        return json.dumps({**value, "checksum": hash_json(value)}).encode()

    @property
    def order(self) -> tuple[int, bool]:
        """Newest last."""
        return self.step, self.checkpoint == "final"

    @property
    def pieces(self) -> set[Piece]:
        return {piece for pieces in self.files.values() for piece in pieces}

    @property
    def of_checkpoint(self) -> dict[str, list[Piece]]:
        """Those of its files that are in the checkpoint."""
        return {name: self.files[name] for name in self.files if name.startswith("checkpoints/")}

    @property
    def seal(self) -> list[Piece]:
        return self.files.get(f"checkpoints/{self.checkpoint}/{STATE_NAME}", [])


MARK = {
    "format_version": int,
    "run": str,
    "name": str,
    "checkpoint": str,
    "step": int,
    "kept": bool,
    "by_time": bool,
    "files": dict,
    "checksum": str,
}


def read_mark(store: Store, name: str) -> Mark:
    """A mark of the mirror. ValueError or FileNotFoundError if it is corrupt or gone."""
    where = f"{store.where}: marks/{name}"
    value = parse_json(store.read(f"marks/{name}").content, where, MARK)
    checksum = value.pop("checksum")
    if hash_json(value) != checksum:
        raise ValueError(f"{where}: corrupt (its content does not match the checksum in it)")
    if value.pop("format_version") != FORMAT_VERSION:
        raise ValueError(f"{where}: written by another version of this code; use that one")
    files: dict[str, list[Piece]] = {}
    for path, pieces in value["files"].items():
        if path.startswith("/") or ".." in PurePosixPath(path).parts:
            raise ValueError(f"{where}: not written by this program ({path!r} is outside the run)")
        files[path] = [Piece(*piece) for piece in pieces]
    if CONFIG_NAME not in files:
        raise ValueError(f"{where}: it lists no {CONFIG_NAME}, so the run cannot be resumed")
    return Mark(**{**value, "files": files})


def read_marks(store: Store) -> dict[str, Mark]:
    """{name: mark} of all good marks of a mirror, newest first; a corrupt one is named in a warning.
    ValueError if all of them are corrupt: then its run must not begin again."""
    reasons = []

    def read(name: str) -> Mark | str:
        try:
            return read_mark(store, name)
        except (ValueError, FileNotFoundError) as e:
            return str(e)

    marks = {}
    names = sorted(store.names("marks"))
    for name, mark in zip(names, each(read, names, at_once=8, poll=check_stop)):
        if isinstance(mark, str):
            log.warning("%s is skipped: %s", name, mark)
            reasons.append(mark)
        else:
            marks[name] = mark
    if reasons and not marks:
        raise ValueError(
            f"{store.where}: none of its marks can be used ({reasons[-1]}); restore one, or name another place for "
            f"the mirror of this run"
        )
    return dict(sorted(marks.items(), key=lambda item: item[1].order, reverse=True))


# ---- retention -----------------------------------------------------------------------------------


def outdated(marks: Mapping[str, Mark], newest: str, settings: SaveSettings) -> list[str]:
    """The names of the marks that retention does not keep, and of those that the newest one
    replaces: the rules of `checkpoint.prune`. Every save replaces the start."""
    now = marks[newest]
    old = []
    may_go = []
    for name, mark in sorted(marks.items(), key=lambda item: item[1].order):
        # a `final` from before the run was extended is an ordinary checkpoint now
        is_final = mark.checkpoint == "final" and mark.step == now.step
        is_counted = settings.keep_last_k is not None or mark.by_time
        is_same = mark.checkpoint == now.checkpoint and mark.step == now.step
        is_start = mark.checkpoint == START
        if (is_same or is_start) and name != newest:
            old.append(name)
        elif is_counted and not is_final and not mark.kept and mark.step <= now.step:
            may_go.append(name)
    number = settings.keep_last_k or TIMED_KEPT
    old += [name for name in may_go[:-number] if name != newest]
    return old
