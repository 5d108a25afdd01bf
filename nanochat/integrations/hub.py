"""Data sets on the Hugging Face Hub, read in ranges: hf://datasets/OWNER/NAME[@REVISION][/FOLDER].

`common.as_path` imports this module at the first such path. A file of the data set is a `RangePath`
(nanochat/integrations/web.py), which is read in ranges and kept on disk.

    hf://datasets/OWNER/NAME@main/data
      /api/datasets/OWNER/NAME/revision/main           -> its commit, once per launch
      /api/datasets/OWNER/NAME/tree/COMMIT/data        -> size and SHA-256 of every file, in pages
      /datasets/OWNER/NAME/resolve/COMMIT/data/a.parquet  -> a redirect to the server that has the bytes

**Pins.** A run stores the commit (`HubPath.resolve` names it in the root of the manifest) and each
file's SHA-256, which is the id of a large file in Git LFS. A resume or a fork does not ask what the
branch is now: it takes the revision that the run named for the run's commit (`HubPath.remember`),
and reads no file to know that it has not changed. A commit's list of files stays on disk beside the
ranges that were read, so a run can resume, and show its rows, while the Hub is away.

**Token.** HF_TOKEN is sent to the Hub, or to HF_ENDPOINT if it is set, and to no other server: not
to the one to which a file's address redirects.
"""

import json
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import quote, urljoin

from nanochat.common import each, hash_json, parse_json, refuse_secrets, url
from nanochat.integrations.download import hub_access
from nanochat.integrations.remote_files import poll
from nanochat.integrations.web import KNOWN, File, RangePath, explain_status, own_cache
from nanochat.integrations.web_client import Answer, Key, get, origin_of
from nanochat.text import text_suffix

PAGE_BYTES = 64 << 20  # the largest answer of the Hub's API that is read
MAIN = "main"  # the revision if a path names none
COMMIT = re.compile("[0-9a-f]{40}")
# in the path of a file, a revision has no slash, but for the two kinds that the Hub itself makes
NAME = r"[\w.-]+"
REVISION = rf"refs/(?:convert|pr)/{NAME}|[^/@]+"
PATH = re.compile(rf"hf://datasets/({NAME}/{NAME})(?:@({REVISION}))?(?:/(.*))?", re.DOTALL)
SHORT_NAMES = {"~parquet": "refs/convert/parquet"}  # the Hub's own copy of any data set as parquet
ENTRY = {"type": str, "path": str, "size": int, "oid": str}


class Place(NamedTuple):
    """What a path names."""

    repo: str  # OWNER/NAME
    revision: str
    inner: str  # a file or folder of it; "" is all of it

    @classmethod
    def of(cls, path: str) -> "Place":
        """The place of a path. ValueError if it names no data set, or may hold a secret."""
        refuse_secrets(path)
        match = PATH.fullmatch(url(path))
        if match is None:
            raise ValueError(
                f"{url(path)}: expected hf://datasets/OWNER/NAME, hf://datasets/OWNER/NAME@REVISION, or a folder "
                f"or file below it"
            )
        repo, revision, inner = match.groups()
        revision = revision or MAIN
        return cls(repo, SHORT_NAMES.get(revision, revision), inner or "")

    def __str__(self) -> str:
        below = f"/{self.inner}" if self.inner else ""
        return f"hf://datasets/{self.repo}@{self.revision}{below}"

    @property
    def parents(self) -> Iterator[str]:
        """The folders that contain it, from the nearest to "", the data set."""
        inner = self.inner
        while inner:
            inner = inner.rpartition("/")[0]
            yield inner


# ---- the Hub -------------------------------------------------------------------------------------


class Hub(NamedTuple):
    """The server of the data sets."""

    endpoint: str
    key: Key

    @classmethod
    def from_environment(cls) -> "Hub":
        """The Hub that HF_ENDPOINT names, with HF_TOKEN. ValueError if one of them is unusable."""
        endpoint, token = hub_access()
        return cls(endpoint, Key(origin_of(endpoint), token))

    def address(self, kind: str, repo: str, revision: str, inner: str = "") -> str:
        """An address of its API ("revision" or "tree"), or of a file ("resolve")."""
        api = "" if kind == "resolve" else "/api"
        below = f"/{quote(inner)}" if inner else ""
        return f"{self.endpoint}{api}/datasets/{repo}/{kind}/{quote(revision, safe='')}{below}"

    def ask(self, place: Place, address: str, shape: object) -> tuple[Any, Answer]:
        """(JSON, answer) of its API. Raises the errors of `explain`."""
        answer = get(str(place), address, {}, key=self.key, most=PAGE_BYTES)
        if answer.status != 200:
            raise explain(str(place), answer)
        return parse_json(answer.body, f"{place}: answer of {answer.host}", shape), answer


def explain(path: str, answer: Answer) -> Exception:
    """Our own error for a request that the Hub refuses: one sentence, which begins with the path."""
    place = Place.of(path)
    code = answer.first.get("X-Error-Code", "") or answer.headers.get("X-Error-Code", "")
    answered = " ".join(filter(None, ["HTTP", str(answer.status), code, "from", answer.host]))
    if code == "GatedRepo":
        return PermissionError(
            f"{path}: the data set's owner asks readers to accept terms first ({answered}); accept them at "
            f"{hub_access()[0]}/datasets/{place.repo}, and set HF_TOKEN to a valid token of that account"
        )
    if code == "RevisionNotFound":
        return FileNotFoundError(
            f"{path}: the data set has no revision {place.revision} ({answered}); name another one with @REVISION. If "
            f"a run pinned it, the history was replaced: name a commit with the same files with @COMMIT (40 digits), "
            f"or a downloaded copy, or start a new run (--model-tag)"
        )
    if code == "EntryNotFound":
        return NoEntry(f"{path}: no such file or folder in this revision ({answered}); check it")
    if code == "RepoNotFound" or answer.status == 401:
        return PermissionError(
            f"{path}: no such data set, or a private one that HF_TOKEN may not read, or HF_TOKEN is refused "
            f"({answered}); check its name and HF_TOKEN"
        )
    if answer.status == 403:
        return PermissionError(f"{path}: access denied ({answered}); check HF_TOKEN")
    return explain_status(path, answer)


class NoEntry(FileNotFoundError):
    """A revision has no such file or folder."""


# ---- what a launch knows -------------------------------------------------------------------------


class Tree(NamedTuple):
    """The files below a folder of a data set, by their paths in it."""

    files: dict[str, File]
    folders: frozenset[str]


_lock = threading.RLock()
_commits: dict[tuple[str, str], str] = {}  # {(data set, revision): commit}
_trees: dict[tuple[str, str], dict[str, Tree]] = {}  # {(data set, commit): {folder: its tree}}
KNOWN += [_commits, _trees]


def find_commit(place: Place) -> str:
    """The commit of a path's revision, which this launch asks for once. FileNotFoundError if the
    data set or its revision does not exist, or if the data set has another name now."""
    if COMMIT.fullmatch(place.revision):
        return place.revision
    known = (place.repo, place.revision)
    with _lock:
        if known not in _commits:
            hub = Hub.from_environment()
            address = hub.address("revision", place.repo, place.revision)
            whole = place._replace(inner="")
            shape = {"sha": str, "id": str}
            about, _ = next(each(lambda at: hub.ask(whole, at, shape), [address], poll=poll))
            _check_name(place, about["id"])
            _commits[known] = about["sha"]
        return _commits[known]


def _check_name(place: Place, name: str) -> None:
    """FileNotFoundError if the Hub redirects to a data set of another name."""
    if name.lower() != place.repo.lower():
        raise FileNotFoundError(f"{place}: this data set has moved; name it hf://datasets/{name}")


def find_tree(place: Place) -> Tree:
    """A tree that contains a path, which this launch asks for once: that of the path, or of the
    folder around what looks like a file."""
    commit = find_commit(place)
    with _lock:
        trees = _trees.setdefault((place.repo, commit), {})
        for folder in (place.inner, *place.parents):
            if folder in trees:
                return trees[folder]
        folder = place.inner
        if text_suffix(folder):
            folder = next(place.parents)
        pinned = place._replace(revision=commit, inner=folder)
        trees[folder] = next(each(list_tree, [pinned], poll=poll))
        return trees[folder]


def list_tree(place: Place) -> Tree:
    """All files below a folder of a commit; none if it does not exist. A commit never changes, so
    the list stays on disk, also for other addresses of the Hub."""
    hub = Hub.from_environment()
    address = hub.address("tree", place.repo, place.revision, place.inner)
    name = f"tree-{hash_json([place.repo, place.revision, place.inner])}"
    listed = own_cache().read(name, lambda: json.dumps(ask_entries(hub, place, address)).encode())
    files = {entry["path"]: _as_file(hub, place, entry) for entry in json.loads(listed)}
    folders = set[str]()
    for name in files:
        folders.update(Place(place.repo, place.revision, name).parents)
    return Tree(files, frozenset(folders))


def ask_entries(hub: Hub, place: Place, address: str) -> list[dict[str, Any]]:
    """What the Hub says of the files of a tree; nothing if it does not exist."""
    files: list[dict[str, Any]] = []
    address += "?recursive=true"
    while address:
        try:
            entries, answer = hub.ask(place, address, [ENTRY])
        except NoEntry:
            break
        files += [entry for entry in entries if entry["type"] == "file"]
        link = re.search(r'<([^>]+)>;\s*rel="next"', answer.headers.get("Link", ""))
        address = urljoin(address, link[1]) if link else ""
    return files


def _as_file(hub: Hub, place: Place, entry: dict[str, Any]) -> File:
    """The file of an entry of a tree. A small file may be in Git itself, and has no SHA-256."""
    large = entry.get("lfs") or {}
    sha256 = str(large.get("oid", "")).removeprefix("sha256:")
    inner = entry["path"]
    return File(
        path=str(place._replace(inner=inner)),
        address=hub.address("resolve", place.repo, place.revision, inner),
        size=int(large.get("size", entry["size"])),
        etag=sha256 or entry["oid"],
        key=hub.key,
        sha256=sha256,
        linked=True,
        explain=explain,
    )


# ---- paths ---------------------------------------------------------------------------------------


def open_path(path: str) -> "HubPath":
    """The HubPath of a string. ValueError if it names no data set."""
    opened = HubPath(path)
    if len(opened.parts) > 1:
        Place.of(str(opened))
    return opened


class HubPath(RangePath):
    """A file or folder of a data set."""

    def is_dir(self) -> bool:
        place = self._place()
        return place is not None and place.inner in find_tree(place).folders

    def walk(self) -> Iterator["HubPath"]:
        place = self._place()
        if place is None:
            return
        above = f"{place.inner}/" if place.inner else ""
        for name in find_tree(place).files:
            if name.startswith(above):
                yield HubPath(f"{self}/{name.removeprefix(above)}")

    def find(self) -> File | None:
        """See `RangePath.find`: a path below which nothing lies may be a file, which the folder above lists."""
        place = self._place()
        if place is None or not place.inner:
            return None
        tree = find_tree(place)
        if place.inner not in (*tree.files, *tree.folders):
            # an empty tree: the path may be a file's, and the tree around it has that
            tree = find_tree(place._replace(inner=next(place.parents)))
        file = tree.files.get(place.inner)
        # messages name the path as it is here, which may not name the commit
        return None if file is None else file._replace(path=str(self))

    def resolve(self) -> "HubPath":
        """The path that names the commit."""
        place = Place.of(str(self))
        return HubPath(str(place._replace(revision=find_commit(place))))

    def is_fixed(self) -> bool:
        return COMMIT.fullmatch(Place.of(str(self)).revision) is not None

    def copy_folder(self) -> Sequence[str]:
        """See `RangePath.copy_folder`: the same for all revisions, because the name of a copy says
        which bytes it has."""
        place = Place.of(str(self))
        return "datasets", *place.repo.split("/"), *PurePosixPath(place.inner).parent.parts

    def remember(self, root: str) -> None:
        """Take this path's revision for the commit that `root` names, if it is of the same data set."""
        own = Place.of(str(self))
        match = PATH.fullmatch(root)
        if match is not None and match[1] == own.repo:
            _commits[own.repo, own.revision] = Place.of(root).revision

    def as_pinned(self, root: str) -> RangePath:
        """This path at the commit of `root`, if that is of the same data set, and this path names no
        commit itself."""
        own = Place.of(str(self))
        match = PATH.fullmatch(root)
        if match is None or match[1] != own.repo or self.is_fixed():
            return self
        return HubPath(str(own._replace(revision=Place.of(root).revision)))

    def _place(self) -> Place | None:
        """What it names; None if it is above all data sets."""
        return Place.of(str(self)) if len(self.parts) > 3 else None
