"""
Power loss at any instant: what may be on the disk afterwards.

    with recording(base) as recorder: run()      # every change below a folder, in order
    recorder.changes                             # create, write, sync, rename, ... (`Change`)
    for state in states(recorder, rng, 500):     # what power loss may leave after some of them
        state.write(folder)

A kill is the mild case: the kernel still writes what the process wrote. After power loss, only what
was synced is certain. The model is what POSIX promises, which is weaker than ext4, XFS and btrfs,
and about what NFS gives with `async`:

    bytes of a file     those of its last fsync. A later write may be there, or not, or up to the end of
                        a page, with zeros behind it up to the file's new size
    names in a folder   those of the folder's last fsync. Each later create, rename, link or removal may
                        be there or not, whatever became of the others; a rename is whole, also between
                        two folders
    the two together    independent: a new name may lead to an empty file, and synced bytes may have no
                        name, because a file's fsync does not cover its folder

A recorder compares the folder with what it knows before each call of `os` that syncs, renames or
removes something. So it sees every write, whoever made it: Python, or C++ as in pyarrow. All writes
to a file between two such calls count as one.
"""

import contextlib
import os
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.crashes import _is_inside, _path

PAGE = 4096
CALLS = ("fsync", "rename", "replace", "link", "mkdir", "rmdir", "unlink", "remove")
ROOT = 0  # the id of the folder that is recorded


class Change(NamedTuple):
    """A change that a program made. `names` and `gone`: the names that it adds and removes, each as
    (id of the folder, name, id of the file or folder below it)."""

    kind: str  # create, write, sync, or a call of `CALLS`; report: the program said something
    what: str  # the path, below the folder; of a report, what it said
    id: int = -1  # of the file or folder
    content: bytes = b""  # of a written file, whole
    names: tuple[tuple[int, str, int], ...] = ()
    gone: tuple[tuple[int, str, int], ...] = ()
    site: str = ""  # of a sync: the function that asked for it


@dataclass
class Folder:
    """A folder as it is now: {name: id}."""

    names: dict[str, int] = field(default_factory=dict)


# ---- recording -----------------------------------------------------------------------------------


class Recorder:
    """The changes below a folder; see `recording`."""

    def __init__(self, below: Path) -> None:
        self.below = os.path.realpath(below)
        self.changes: list[Change] = []
        self.folders: dict[int, Folder] = {ROOT: Folder()}
        self.seen: dict[int, tuple[int, ...]] = {}  # of a file: what tells that it has changed
        self.contents: dict[int, bytes] = {}
        self.lock = threading.RLock()
        self._next = ROOT + 1
        self._look_below(ROOT, self.below)
        self.changes.clear()
        # what is there at the beginning is certain
        self.first_names = {id: dict(folder.names) for id, folder in self.folders.items()}
        self.first_contents = dict(self.contents)

    def report(self, what: str) -> None:
        """Note that the program told its user something, such as that a checkpoint is saved."""
        with self.lock:
            self.look()
            self.changes.append(Change("report", what))

    def look(self) -> None:
        """Note the writes, and whatever else changed, since the last look."""
        self._look_below(ROOT, self.below)

    def _look_below(self, folder: int, path: str) -> None:
        known = self.folders[folder].names
        try:
            entries = {entry.name: entry for entry in os.scandir(path)}
        except FileNotFoundError:
            return
        for name in [name for name in known if name not in entries]:
            self._remove("unlink", os.path.join(path, name))
        for name, entry in sorted(entries.items()):
            place = os.path.join(path, name)
            if entry.is_dir(follow_symlinks=False):
                if name not in known:
                    self._add("mkdir", place, folder=True)
                self._look_below(known[name], place)
            elif entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                    self._look_at(folder, name, place)

    def _look_at(self, folder: int, name: str, path: str) -> None:
        found = os.stat(path)
        now = (found.st_ino, found.st_size, found.st_mtime_ns)
        known = self.folders[folder].names
        if name in known and self.seen[known[name]] == now:
            return
        if name in known and self.seen[known[name]][0] != now[0]:  # another file
            self._remove("unlink", path)
        if name not in known:
            self._add("create", path, folder=False)
        id = known[name]
        with open(path, "rb") as file:
            content = file.read()
        self.seen[id] = now
        if content != self.contents[id]:
            self.contents[id] = content
            self._note(Change("write", self._below(path), id, content))

    def _below(self, path: str) -> str:
        return os.path.relpath(path, self.below)

    def _note(self, change: Change) -> None:
        self.changes.append(change)

    def folder_of(self, path: str) -> int | None:
        """The id of the folder that holds a path."""
        id: int | None = ROOT
        for part in Path(self._below(path)).parts[:-1]:
            id = self.folders[id].names.get(part) if id in self.folders else None
        return id if id in self.folders else None

    def id_of(self, path: str) -> int | None:
        """The id of what a path names."""
        if path == self.below:
            return ROOT
        folder = self.folder_of(path)
        return None if folder is None else self.folders[folder].names.get(os.path.basename(path))

    def _add(self, kind: str, path: str, *, folder: bool) -> None:
        above, name = self.folder_of(path), os.path.basename(path)
        assert above is not None
        id, self._next = self._next, self._next + 1
        self.folders[above].names[name] = id
        if folder:
            self.folders[id] = Folder()
        else:
            self.contents[id] = b""
            self.seen[id] = ()
        self._note(Change(kind, self._below(path), id, names=((above, name, id),)))
        if not folder:
            self.seen[id] = (os.stat(path).st_ino, -1, -1)

    def _remove(self, kind: str, path: str) -> None:
        above, name = self.folder_of(path), os.path.basename(path)
        assert above is not None
        id = self.folders[above].names.pop(name)
        self._note(Change(kind, self._below(path), id, gone=((above, name, id),)))

    def made(self, kind: str, path: str, to: str | None) -> None:
        """Note a call that succeeded."""
        if kind == "fsync":
            id = self.id_of(path)
            if id is not None:
                self._note(Change("sync", self._below(path), id, site=_site()))
            return
        if kind == "mkdir":
            self._add(kind, path, folder=True)
        elif kind in ("rmdir", "unlink", "remove"):
            self._remove(kind, path)
        else:
            self._move(kind, path, to)

    def _move(self, kind: str, path: str, to: str | None) -> None:
        """A rename or a link."""
        assert to is not None
        id = self.id_of(path)
        above, name = self.folder_of(to), os.path.basename(to)
        assert id is not None and above is not None
        gone = []
        over = self.folders[above].names.get(name)
        if over is not None:
            gone.append((above, name, over))
        if kind != "link":
            source, old = self.folder_of(path), os.path.basename(path)
            assert source is not None
            self.folders[source].names.pop(old)
            gone.append((source, old, id))
        self.folders[above].names[name] = id
        what = f"{self._below(path)} -> {self._below(to)}"
        self._note(Change(kind, what, id, names=((above, name, id),), gone=tuple(gone)))


HELPERS = ("fsync_dir", "sync_file")


def _site() -> str:
    """The function of the project that the present sync comes from; of a helper that syncs for
    others, also the function that calls it."""
    sites: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and (not sites or sites[-1] in HELPERS):
        code = frame.f_code
        if Path(code.co_filename).parent.name in ("nanochat", "scripts", "integrations"):
            sites.append(re.sub(r"\.<.*", "", code.co_qualname))
        frame = frame.f_back
    return " in ".join(sites)


@contextlib.contextmanager
def recording(below: Path) -> Iterator[Recorder]:
    """Record every change below a folder that this process makes inside the block."""
    recorder = Recorder(below)

    def wrap(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with recorder.lock:
                folder = kwargs.get("dir_fd", kwargs.get("src_dir_fd"))
                path = _path(args[0], folder)
                to = _path(args[1]) if name in ("rename", "replace", "link") else None
                inside = path is not None and _is_inside(path, recorder.below)
                if inside:
                    recorder.look()
                result = real(*args, **kwargs)
                if inside:
                    recorder.made(name, str(path), to)
                return result

        return wrapped

    with contextlib.ExitStack() as stack:
        for name in CALLS:
            stack.enter_context(mock.patch.object(os, name, wrap(name)))
        yield recorder
    recorder.look()


# ---- what power loss may leave -------------------------------------------------------------------


class State(NamedTuple):
    """What is on the disk after power loss. `after`: the number of changes before it."""

    after: int
    how: str  # what was lost
    files: dict[str, bytes]
    folders: frozenset[str]
    ids: dict[str, int]  # of the files

    def write(self, folder: Path) -> None:
        """Write it into an empty folder."""
        for name in sorted(self.folders):
            (folder / name).mkdir(exist_ok=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)


class Disk:
    """What is certain after the first changes, and what is not."""

    def __init__(self, recorder: Recorder, changes: list[Change]) -> None:
        self.changes = changes
        self.at = 0
        self.names = {id: dict(names) for id, names in recorder.first_names.items()}
        self.versions = {id: [content] for id, content in recorder.first_contents.items()}
        self.pending: list[Change] = []  # of names
        self.is_folder = set(recorder.folders)

    def advance(self, at: int) -> None:
        """Go on to the state after `at` changes."""
        for change in self.changes[self.at : at]:
            if change.kind == "write":
                self.versions[change.id].append(change.content)
            elif change.kind == "create":
                self.versions[change.id] = [b""]
            elif change.kind == "sync":
                self._sync(change.id)
            if change.names or change.gone:
                self.pending.append(change)
        self.at = max(self.at, at)

    def _sync(self, id: int) -> None:
        if id not in self.is_folder:
            self.versions[id] = self.versions[id][-1:]
            return
        certain = [change for change in self.pending if self._touches(change, id)]
        self.pending = [change for change in self.pending if not self._touches(change, id)]
        for change in certain:
            _apply(self.names, change)

    @staticmethod
    def _touches(change: Change, folder: int) -> bool:
        return any(above == folder for above, _, _ in (*change.names, *change.gone))

    def unsynced(self) -> list[int]:
        """The files of which a part may be lost."""
        return [id for id, versions in self.versions.items() if len(versions) > 1]

    def state(
        self,
        how: str,
        name_survives: Callable[[Change], bool],
        content: Callable[[list[bytes]], bytes],
    ) -> State:
        """A state that power loss may leave now. `name_survives`: asked for each change of a name
        that was not synced. `content`: chooses the bytes of a file from its versions, of which the
        first is certain and the last is the newest."""
        names = {id: dict(below) for id, below in self.names.items()}
        for change in self.pending:
            if name_survives(change):
                _apply(names, change)
        files: dict[str, bytes] = {}
        ids: dict[str, int] = {}
        folders: set[str] = set()
        todo = [(ROOT, "")]
        while todo:
            folder, path = todo.pop()
            for name, id in names.get(folder, {}).items():
                place = os.path.join(path, name)
                if id in self.is_folder:
                    folders.add(place)
                    todo.append((id, place))
                else:
                    files[place] = content(self.versions[id])
                    ids[place] = id
        return State(self.at, how, files, frozenset(folders), ids)


def _apply(names: dict[int, dict[str, int]], change: Change) -> None:
    """Carry out a change of names, as far as what it changes is there."""
    for folder, name, id in change.gone:
        if names.get(folder, {}).get(name) == id:
            del names[folder][name]
    for folder, name, id in change.names:
        names.setdefault(folder, {})[name] = id


def torn(versions: list[bytes], rng: random.Random) -> bytes:
    """Some of the writes to a file: one of its versions, with some pages of the one before it, and
    with any size between the two. What a write did not touch is certain."""
    at = rng.randrange(len(versions))
    new, old = versions[at], versions[max(0, at - 1)]
    sizes = [len(old), len(new), *range(len(old), len(new), PAGE)]
    size = rng.choice(sizes)
    pages = []
    for begin in range(0, size, PAGE):
        arrived = rng.random() < 0.7
        page = (new if arrived else old)[begin : min(begin + PAGE, size)]
        pages.append(page.ljust(min(PAGE, size - begin), b"\0"))
    return b"".join(pages)


def extremes(disk: Disk) -> list[State]:
    """The states in which everything of one kind is lost."""
    return [
        disk.state("nothing", lambda change: True, lambda versions: versions[-1]),
        disk.state("all that was not synced", lambda change: False, lambda versions: versions[0]),
        disk.state("all bytes", lambda change: True, lambda versions: versions[0]),
        disk.state("all names", lambda change: False, lambda versions: versions[-1]),
        disk.state("removals", lambda change: bool(change.names), lambda versions: versions[-1]),
    ]


def draw(disk: Disk, rng: random.Random) -> State:
    """A state of which each part is drawn."""
    share = rng.choice((0.1, 0.5, 0.9))
    seed = rng.randrange(1 << 32)
    own = random.Random(seed)
    return disk.state(
        f"drawn by {seed}",
        lambda change: own.random() < share,
        lambda versions: torn(versions, own),
    )


def states(
    recorder: Recorder,
    rng: random.Random,
    number: int,
    *,
    changes: list[Change] | None = None,
    at: Sequence[int] | None = None,
) -> Iterator[State]:
    """About `number` different states that power loss may leave, in the order of the changes before
    them. `changes`: in place of the recorded ones. `at`: only after so many of them."""
    changes = recorder.changes if changes is None else changes
    moments = sorted(at if at is not None else range(len(changes) + 1))
    disk = Disk(recorder, changes)
    known: set[int] = set()
    for index, moment in enumerate(moments):
        disk.advance(moment)
        wanted = number * (index + 1) // len(moments) - number * index // len(moments)
        some = extremes(disk) if rng.random() < 0.5 else []
        rng.shuffle(some)
        some += [draw(disk, rng) for _ in range(max(0, wanted))]
        for state in some[:wanted]:
            key = hash((frozenset(state.files.items()), state.folders))
            if key not in known:
                known.add(key)
                yield state


def reported(changes: Sequence[Change], state: State) -> list[str]:
    """What the program had told its user before a state."""
    return [change.what for change in changes[: state.after] if change.kind == "report"]


def whole_files(changes: Sequence[Change]) -> dict[int, bytes]:
    """{id: content} of the files that got their name by a rename of their own or of their folder,
    and were not written afterwards."""
    contents: dict[int, bytes] = {}
    below: dict[int, set[int]] = {}  # {id of a folder: what it holds}
    whole: dict[int, bytes] = {}

    def rename(id: int) -> None:
        if id in contents:
            whole[id] = contents[id]
        for inner in below.get(id, ()):
            rename(inner)

    for change in changes:
        if change.kind == "write":
            contents[change.id] = change.content
            whole.pop(change.id, None)
        for folder, _, id in change.gone:
            below.get(folder, set()).discard(id)
        for folder, _, id in change.names:
            below.setdefault(folder, set()).add(id)
        if change.kind in ("rename", "replace"):
            rename(change.id)
    return whole


# ---- planted mistakes ----------------------------------------------------------------------------


def without(changes: Sequence[Change], site: str) -> list[Change]:
    """The changes as if a function did not sync."""
    return [change for change in changes if change.site != site]


def too_late(changes: Sequence[Change], site: str) -> list[Change]:
    """The changes as if a function synced only after the next rename."""
    late: list[Change] = []
    waiting: list[Change] = []
    for change in changes:
        if change.site == site:
            waiting.append(change)
            continue
        late.append(change)
        if change.kind in ("rename", "replace"):
            late += waiting
            waiting = []
    return late + waiting
