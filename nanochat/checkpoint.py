"""
Checkpoints: written so that a crash at any instant leaves a good one, read so that a bad one is never believed.

    RUN/checkpoints/checkpoint-1000/
      trainer_state.json              step, what the trainer adds, size and checksum of every file below; written last
      dataloader_state/lanes.json.gz  the V cursors; the same bytes stay for ever in RUN/logs/cursors/
      model/pytorch_model.bin         the bare module's state_dict
      model/config.json               what builds the module
      optimizer.bin  scheduler.bin  rng/rank_0.pkl

**Writing.** A sealed folder under a temporary name, trainer_state.json its seal, then one rename:

    .tmp-final-77/...   --fsync-->   final/   --fsync of checkpoints/-->   done       (names: see nanochat/run_dir.py)

**Reading.** The seal tells of any changed byte. `newest_good` goes from the newest checkpoint to the oldest and takes
the first that is whole. Sizes alone would be quicker to check, and would believe a flipped bit.

torch files hold plain states : loading executes nothing, and reads no file that is not sealed.

**Names for people.** `d12` is the newest good checkpoint of the run d12, `d12@1000` that of step 1000, `d12@final` its
end; a path to a run directory does in place of a tag, and a path to a checkpoint means that one.

Saving calls no collective, and touches no device when its states came from `to_host`: it may run in a thread.

Sealed folders: files whose every byte can be checked, and whose absence of a whole seal means "never finished".

    folder/
      a.bin  sub/b.json    any files
      trainer_state.json   the seal: {..., "files": {"a.bin": {"bytes", "blake2b"}, ...}, "checksum"}; written last

`checksum` is the BLAKE2b of the seal's own bytes with zeros in the checksum's place, so the seal vouches for all files
and for itself:

    {"step": 7, "files": {...}, "checksum": "00000000"}  --BLAKE2b-->  9f3c..  --put in place-->  "checksum": "9f3c.."

Sums are taken of what goes to the file, not of what comes back from it: a disk that stores other bytes is found out.
Every file is fsynced, then the folders; the caller renames the folder to its name. A list of checksums beside the
files, as sha256sum makes it, would do for the files, but then who vouches for the list?

Nothing here executes what it reads, and a seal that a stranger wrote can do no more than be refused.

Plain states: nested dicts, lists and tuples of tensors, numbers, strings and None, and nothing else.

    live state on the device --to_host--> the same in host memory --save_plain--> file --load_plain--> the same

What is plain can be read back without executing anything (torch.load with weights_only=True), so anything else is
refused when it is written, with the place where it lies, and not when it is needed.

**One copy, used again and again.** A copy that nobody will change may be written by a thread while training goes on.
Fresh memory for it costs more than copying: the system hands it out page by page, zeroed. So `to_host(value,
into=previous)` fills the tensors of the copy before, where names, shapes and types agree:

    save 1   to_host(state)            allocates   A            thread writes A ...... done
    save 2   to_host(state, into=A)    fills       A                                        thread writes A ...
    wrong    to_host(state, into=A)    fills       A while it is being written

The caller sees to it that nobody reads `previous` any more; `saving.Saver.wait` waits for that. Two copies in turn
would never wait, and cost every machine the memory of the rare save that is slower than the time between two.

Retention: which checkpoints of a run go when a new one is there.

    keep_last_k=2, keep_milestone_every=400, 700 has just been written and is good

      checkpoint-  100   200   300   400   500   600   700   800(rotten)   final
                    x     x     x     M     x     L     L     ?              F
                                      milestone   the last two  newer: none of our business

The list is short because the rules are few: only a numbered checkpoint older than one that is known to be good may go;
the newest `keep_last_k` of those up to the good one stay, and so does every step that `keep_milestone_every` divides.
What this program did not write (no whole seal, or the seal of another step than the name says: a copy, a renamed one)
is never touched, nor is what is newer than the good one: it may be rotten, or a branch that a person left there.

"Known to be good" costs nothing: a checkpoint that this process wrote, fsynced and renamed, or one that it loaded with
its checksums verified. Reading each file again before a deletion was rejected: minutes of disk time a save.

Deleting is a rename to a hidden name, then the files go (nanochat/run_dir.py): a crash leaves all of a checkpoint or
nothing that counts, and the next start clears the rest away. The oldest goes first. The cursors in logs/cursors stay.

Saving while training goes on: the loop is held for a copy, a thread does the writing.

    step 100 | copy |  step 101  |  step 102  |  step 103  | ...            the loop; all collectives
                    | write, fsync, rename, prune |                         the thread of rank 0: files only
                                                  ^ poll() at the next step tells how it went

**Order.** Rank 0 calls `wait`, all ranks gather the state (collectives, main threads), rank 0 copies what will change
into the memory of the save before (`held`, which nobody reads once `wait` has returned), then hands a function without
arguments to `start`. At most one save is in flight, so a disk that is slower than the interval between two saves holds
up training instead of filling memory. The thread calls no collective and touches no device.

**Errors.** A full disk is no reason to lose a week, as long as an older good checkpoint is there: `Policy` lets the run
go on, and gives up at the third error in a row, at the first if nothing good exists, or if the save was to be the last
thing that the run does. An error that is not the disk's (a bug) ends the run at once.

    saved -> SAVED     disk error, good one there -> FAILED, FAILED, FATAL     disk error, nothing good -> FATAL

`poll` gives one `Outcome` for each save; its `code` is a small integer that can travel in the step's reduction.
Without a thread (`asynchronous=False`) the same calls write at once, under the same policy. A process for the writing
was rejected: it would need the state in shared memory, and hashing and writing let go of the interpreter anyway. Where
cores are scarce the thread steps back behind the training (Linux): on two cores with a load of 6 the first step after a
save took 1.15 steps instead of 2.14, and the write 5 times as long.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

import torch

from nanochat.common import fsync_dir, hash_bytes, hash_file, hash_json, read_json
from nanochat.dist import get_compute_dtype, map_tensors
from nanochat.run_dir import (
    CHECKPOINT_NAME,
    checkpoint_folders,
    clean_stale,
    delete_checkpoint,
    diff_lines,
    find_run,
    is_run_dir,
    keep_cursors,
    list_runs,
    pack_cursors,
    put_in_place,
    read_config,
    read_cursors,
    temporary_path,
)

if TYPE_CHECKING:
    from nanochat.gpt import GPT
    from nanochat.tokenizer import RustBPETokenizer

log = logging.getLogger(__name__)

def to_host(value: Any, *, into: Any = None) -> Any:
    """A deep copy of a plain state with every tensor in host memory, contiguous; pinned where it comes from CUDA.

    Later steps do not change it. Tensors of `into`, an earlier result that nobody reads any more, are filled where one
    of the same name, shape and dtype is there, and then are part of this result. All copies are complete at return.
    TypeError, naming the place, for a value that is not plain.
    """
    old: dict[str, torch.Tensor] = {}
    map_tensors(into, lambda t, where: old.setdefault(where, t), "state")
    streams: set[torch.cuda.Stream] = set()

    def copy(tensor: torch.Tensor, where: str) -> torch.Tensor:
        tensor = tensor.detach()
        held = old.get(where)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if tensor.is_cuda:
            streams.add(torch.cuda.current_stream(tensor.device))
        return held.copy_(tensor, non_blocking=tensor.is_cuda)

    copied = map_tensors(value, copy, "state")
    for stream in streams:
        stream.synchronize()
    return copied


def save_plain(state: Any, file: Any, where: str) -> None:
    """torch.save a plain state to a file that needs no more than write and flush. TypeError, beginning with `where`,
    for a value that is not plain."""
    torch.save(map_tensors(state, lambda tensor, _: tensor.detach(), where), cast(IO[bytes], file))


def load_plain(file: Path, *, mapped: bool = False) -> Any:
    """What `save_plain` wrote, on the CPU, executing nothing. `mapped`: tensors are views of the file, read when they
    are looked at. ValueError for anything but tensors and plain values."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError:
        raise
    except Exception as e:  # broken archives raise struct.error, EOFError, RuntimeError, UnpicklingError, ...
        raise ValueError(f"{file}: refused, it holds something other than tensors and plain values, or is broken; "
                         f"use another checkpoint ({type(e).__name__})") from e


SEAL_NAME = "trainer_state.json"
NO_CHECKSUM = "0" * 32
SEAL_KEYS = ("files", "checksum")


# ---- writing --------------------------------------------------------------------------------------------------------

class HashedFile:
    """A write-only file that sums up what goes through it. An OSError is kept until `finish` instead of raised at once:
    torch.save's C++ writer must not be left by an exception halfway."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._hash = hashlib.blake2b(digest_size=16)
        self._bytes = 0
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write and hash; the first error is kept for `finish`, and what comes after it is dropped."""
        num_bytes = memoryview(data).nbytes
        if self._error is not None:
            return num_bytes
        try:
            self._raw.write(data)
        except OSError as e:
            self._error = e
        self._hash.update(data)
        self._bytes += num_bytes
        return num_bytes

    def flush(self) -> None:
        """torch.save calls it; `finish` does it."""

    def finish(self) -> dict[str, Any]:
        """Force all to disk; returns the size and checksum. Raises the OSError of any write."""
        if self._error is not None:
            raise self._error
        self._raw.flush()
        os.fsync(self._raw.fileno())
        return {"bytes": self._bytes, "blake2b": self._hash.hexdigest()}


class SealedFolder:
    """A new folder being filled; remembers size and checksum of each file in it. `seal` ends it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, dict[str, Any]] = {}
        path.mkdir()

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[HashedFile]:
        """Open a new file of the folder for writing; it is on disk, and listed, at the end of the block."""
        (self.path / name).parent.mkdir(exist_ok=True)
        with open(self.path / name, "xb") as raw:
            file = HashedFile(raw)
            yield file
            self.files[name] = file.finish()

    def put_bytes(self, name: str, data: bytes) -> None:
        """Write one file."""
        with self.open(name) as f:
            f.write(data)

    def put_json(self, name: str, value: Any) -> None:
        """Write one file of indented JSON."""
        self.put_bytes(name, _json_bytes(value))

    def seal(self, head: dict[str, Any]) -> None:
        """Write the seal, `head` in it, and make the names of all files durable. TypeError for what is not JSON."""
        state = {**head, "files": self.files, "checksum": NO_CHECKSUM}
        self.put_bytes(SEAL_NAME, _json_bytes({**state, "checksum": hash_bytes(_json_bytes(state))}))
        for folder in sorted({(self.path / name).parent for name in self.files}, reverse=True):
            fsync_dir(folder)


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


# ---- reading --------------------------------------------------------------------------------------------------------

def read_seal(path: Path) -> dict[str, Any]:
    """The seal of the folder `path`, whole, its own checksum verified and its list of files well-formed.
    FileNotFoundError if there is none, ValueError if it is torn, rotten or of something else; both name the file."""
    file = path / SEAL_NAME
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing, so this checkpoint was never finished")
    raw = file.read_bytes()
    try:
        state = json.loads(raw)
        checksum = state["checksum"].encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise ValueError(f"{file}: torn or rotten (not a whole JSON object with a checksum)") from e
    blank = raw.replace(checksum, NO_CHECKSUM.encode()) if checksum else raw
    if hash_bytes(blank).encode() != checksum:
        raise ValueError(f"{file}: rotten (its bytes do not have the checksum it states)")
    if not _well_formed(state.get("files")):
        raise ValueError(f"{file}: not a seal of this program (its list of files has another form)")
    return state


def _well_formed(files: Any) -> bool:
    """Whether `files` is {relative name inside the folder: {"bytes": int, "blake2b": str}}."""
    return isinstance(files, dict) and all(
        isinstance(record, dict) and type(record.get("bytes")) is int and isinstance(record.get("blake2b"), str)
        and not Path(name).is_absolute() and ".." not in Path(name).parts for name, record in files.items())


def check_file(path: Path, name: str, record: dict[str, Any]) -> None:
    """Compare one file of a sealed folder with its record in the seal. FileNotFoundError for a missing file, ValueError
    for a torn or rotten one; the message begins with the file's path."""
    file = path / name
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing")
    size = file.stat().st_size
    if size != record["bytes"]:
        raise ValueError(f"{file}: torn ({size:,} bytes on disk, {record['bytes']:,} were written)")
    if hash_file(file) != record["blake2b"]:
        raise ValueError(f"{file}: rotten (its bytes do not have the checksum in {SEAL_NAME})")


def unsealed_files(path: Path, seal: dict[str, Any]) -> list[str]:
    """Files in the folder that its seal does not list, by their relative names: nobody vouches for them."""
    there = {str(p.relative_to(path)) for p in path.rglob("*") if not p.is_dir() or p.is_symlink()}
    return sorted(there - seal["files"].keys() - {SEAL_NAME})




FORMAT_VERSION = 1
STATE_NAME = SEAL_NAME
CURSORS_NAME = "dataloader_state/lanes.json.gz"
MODEL_NAME, MODEL_CONFIG_NAME = "model/pytorch_model.bin", "model/config.json"
OPTIMIZER_NAME, SCHEDULER_NAME = "optimizer.bin", "scheduler.bin"
REQUIRED = (CURSORS_NAME, MODEL_NAME, MODEL_CONFIG_NAME, OPTIMIZER_NAME, SCHEDULER_NAME)
RESERVED = ("format_version", "step", "architecture_hash", *SEAL_KEYS)


def architecture_hash(model_config: dict[str, Any]) -> str:
    """The fingerprint of a model's configuration, kept in trainer_state.json and compared before weights are loaded."""
    return hash_json(model_config)


# ---- writing --------------------------------------------------------------------------------------------------------

class _Folder(SealedFolder):
    """A sealed folder that takes states too."""

    def put_state(self, name: str, state: Any) -> None:
        with self.open(name) as f:
            save_plain(state, f, name)


def _check_arguments(name: str, step: int, trainer_state: dict[str, Any]) -> None:
    match = CHECKPOINT_NAME.fullmatch(name)
    if match is None or match["step"] not in (None, str(step)):
        raise ValueError(f"checkpoint name {name!r} at step {step}: expected checkpoint-{step}, "
                         f"checkpoint-{step}-shutdown or final")
    clash = [k for k in RESERVED if k in trainer_state]
    if clash:
        raise ValueError(f"trainer_state: {', '.join(clash)} are written by save_checkpoint itself")


def save_checkpoint(run_dir: Path, name: str, *, step: int, model_state: dict[str, Any], model_config: dict[str, Any],
                    optimizer_state: Any, scheduler_state: Any, rng_state: dict[int, Any],
                    cursors: list[dict[str, Any]], trainer_state: dict[str, Any]) -> Path:
    """Write RUN/checkpoints/<name>, replacing one of that name, and RUN/logs/cursors/step-<step>.json.gz.

    States hold tensors and plain values (see `to_host`); `rng_state` is {rank: state}; `cursors` are the JSON states of
    all lanes in order; `trainer_state` is JSON. One process calls this. Returns the checkpoint's path. Raises OSError
    with the reason if it cannot be written: older checkpoints are then as they were and nothing half-written stays.
    """
    _check_arguments(name, step, trainer_state)
    parent = run_dir / "checkpoints"
    try:
        clean_stale(run_dir)
        parent.mkdir(parents=True, exist_ok=True)
        packed = pack_cursors(step, cursors)
        folder = _Folder(temporary_path(run_dir, name))
        folder.put_bytes(CURSORS_NAME, packed)
        folder.put_json(MODEL_CONFIG_NAME, model_config)
        folder.put_state(MODEL_NAME, model_state)
        folder.put_state(OPTIMIZER_NAME, optimizer_state)
        folder.put_state(SCHEDULER_NAME, scheduler_state)
        for rank, state in rng_state.items():
            folder.put_state(_rng_name(rank), state)
        folder.seal({"format_version": FORMAT_VERSION, "step": step, **trainer_state,
                     "architecture_hash": architecture_hash(model_config)})
        keep_cursors(run_dir, step, packed)
        put_in_place(folder.path, parent / name)
    except BaseException as e:
        with contextlib.suppress(OSError):
            clean_stale(run_dir)
        if isinstance(e, OSError):
            raise OSError(e.errno or errno.EIO, f"checkpoint {name} could not be written to {parent}: "
                          f"{e.strerror or e}; older checkpoints are untouched") from e
        raise
    return parent / name


def _rng_name(rank: int) -> str:
    return f"rng/rank_{rank}.pkl"


# ---- finding and verifying ------------------------------------------------------------------------------------------

def read_state(path: Path) -> dict[str, Any]:
    """A checkpoint's trainer_state.json, its own checksum verified. Errors as in `read_seal`; ValueError also
    for another format."""
    state = read_seal(path)
    if state.get("format_version") != FORMAT_VERSION or type(state.get("step")) is not int:
        raise ValueError(f"{path / STATE_NAME}: format {state.get('format_version')}, this version reads "
                         f"{FORMAT_VERSION}")
    return state


def verify_checkpoint(path: Path) -> None:
    """Read a whole checkpoint and compare sizes and checksums. Raises FileNotFoundError for a missing file and
    ValueError for a torn or rotten one; the message begins with the file's path."""
    for name, record in read_state(path)["files"].items():
        check_file(path, name, record)


def list_checkpoints(run_dir: Path) -> list[Path]:
    """All checkpoints of a run, good or not, newest step first; of one step `final` comes first.

    The step is that in trainer_state.json, or in the name where that file is unreadable. Includes a checkpoint that a
    crash left aside.
    """
    found: list[tuple[float, bool, str, Path]] = []
    for name, path in checkpoint_folders(run_dir).items():
        match = CHECKPOINT_NAME.fullmatch(name)
        try:
            step = float(read_state(path)["step"])
        except (OSError, ValueError):
            step = float((match and match["step"]) or "inf")
        found.append((step, name == "final", name, path))
    return [path for *_, path in sorted(found, reverse=True)]


def newest_good(run_dir: Path) -> Path | None:
    """The newest checkpoint that verifies, or None. Each bad one met on the way is named in a warning that says why."""
    for path in list_checkpoints(run_dir):
        try:
            verify_checkpoint(path)
        except (OSError, ValueError) as e:
            log.warning("checkpoint %s is passed over: %s", path.name, e)
        else:
            return path
    return None


# ---- loading --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. The small parts are read, the states are read when asked for, on the CPU."""
    path: Path
    step: int
    checksum: str  # of its trainer_state.json, and so of all of it
    trainer_state: dict[str, Any]  # what the trainer gave to save_checkpoint, with step and architecture_hash
    model_config: dict[str, Any]
    cursors: list[dict[str, Any]]  # of all V lanes, in order
    sealed: frozenset[str]  # the files that are part of it

    def model_state(self, *, mapped: bool = False) -> dict[str, torch.Tensor]:
        return load_plain(self.path / MODEL_NAME, mapped=mapped)

    def optimizer_state(self, *, mapped: bool = False) -> Any:
        return load_plain(self.path / OPTIMIZER_NAME, mapped=mapped)

    def scheduler_state(self) -> Any:
        return load_plain(self.path / SCHEDULER_NAME)

    def rng_state(self, rank: int) -> Any:
        """The state that `rank` saved, or None if that run had no such rank."""
        name = _rng_name(rank)
        return load_plain(self.path / name) if name in self.sealed else None

    def check_architecture(self, model_config: dict[str, Any]) -> None:
        """ValueError with a diff if `model_config` is not what was saved. To be called before weights are loaded."""
        if architecture_hash(model_config) != self.trainer_state["architecture_hash"]:
            lines = diff_lines(self.model_config, model_config, old_name="the checkpoint", new_name="the model")
            raise ValueError(f"{self.path}: another architecture; no weight was loaded. Use the same settings, or "
                             "--model-tag NAME for a new run.\n  " + "\n  ".join(lines))

    def check_tokenizer(self, fingerprint: str) -> None:
        """ValueError if the checkpoint was trained with a tokenizer of another fingerprint."""
        expected = self.trainer_state.get("tokenizer_fingerprint", fingerprint)
        if fingerprint != expected:
            raise ValueError(f"{self.path}: trained with the tokenizer {expected}, got {fingerprint}; put the run's "
                             "tokenizer/ back, or use --model-tag NAME for a new run")


def load_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """Open the checkpoint at `path`. Errors as in `verify_checkpoint`; `verify=False` skips the checksums of the large
    files, for a path that `newest_good` has just returned (on another rank)."""
    if verify:
        verify_checkpoint(path)
    state = read_state(path)
    if missing := set(REQUIRED) - state["files"].keys():
        raise ValueError(f"{path / STATE_NAME}: does not list {', '.join(sorted(missing))}; use another checkpoint")
    kept = {k: v for k, v in state.items() if k not in ("format_version", *SEAL_KEYS)}
    step, cursors = read_cursors(path / CURSORS_NAME)
    if step != state["step"]:
        raise ValueError(f"{path / CURSORS_NAME}: of step {step}, {STATE_NAME} is of step {state['step']}")
    return Checkpoint(path=path, step=step, checksum=state["checksum"], trainer_state=kept, cursors=cursors,
                      model_config=read_json(path / MODEL_CONFIG_NAME), sealed=frozenset(state["files"]))


# ---- from a name to a checkpoint ------------------------------------------------------------------------------------

def _split(spec: str) -> tuple[str, str | None]:
    """RUN@STEP -> (RUN, STEP); (spec, None) where no step is asked for, or where the whole is a path or a tag."""
    run, at, step = spec.rpartition("@")
    whole = not at or Path(spec).expanduser().exists() or spec in list_runs()
    return (spec, None) if whole else (run, step)


def _tell(run_dir: Path) -> str:
    """What checkpoints a run has, for an error."""
    return ", ".join(path.name for path in list_checkpoints(run_dir)) or "none yet; train it first"


def _at(run_dir: Path, wanted: str) -> Path:
    """The good checkpoint of a run at a step or of a name. Errors say what there is."""
    names = {path: name for name, path in checkpoint_folders(run_dir).items()}
    reasons = []
    for path in list_checkpoints(run_dir):
        try:
            name = names.get(path, path.name)
            match = CHECKPOINT_NAME.fullmatch(name)
            step = (match and match["step"]) or str(read_state(path)["step"])
            if wanted in (name, step):
                verify_checkpoint(path)
                return path
        except (OSError, ValueError) as e:
            reasons.append(str(e))
    if reasons:
        raise ValueError(f"{run_dir}: no good checkpoint {wanted!r} ({'; '.join(reasons)}); there are: "
                         f"{_tell(run_dir)}")
    raise FileNotFoundError(f"{run_dir}: no checkpoint {wanted!r}, expected a step, final, or nothing for the newest; "
                            f"there are: {_tell(run_dir)}")


def _resolve(tag_or_path: str | os.PathLike[str]) -> tuple[Path, bool]:
    """(the checkpoint that is meant, whether it has been verified)."""
    name, step = _split(os.fspath(tag_or_path))
    path = Path(name).expanduser()
    if step is None and ((path / STATE_NAME).is_file() or path.absolute().parent.name == "checkpoints"):
        return path, False
    run_dir = find_run(name)
    found = newest_good(run_dir) if step is None else _at(run_dir, step)
    if found is None:
        raise FileNotFoundError(f"{run_dir}: no good checkpoint; there are: {_tell(run_dir)}")
    return found, True


def find_checkpoint(tag_or_path: str | os.PathLike[str]) -> Path:
    """The checkpoint meant by a checkpoint's path, by a run's tag or directory (the newest good one), or by either of
    these with @STEP or @final. FileNotFoundError if there is none, ValueError if the one of that step is damaged; both
    say what there is."""
    return _resolve(tag_or_path)[0]


def open_checkpoint(tag_or_path: str | os.PathLike[str]) -> Checkpoint:
    """Load what `find_checkpoint` finds, verified once. Errors of both."""
    path, verified = _resolve(tag_or_path)
    return load_checkpoint(path, verify=not verified)


def load_run_weights(tag_or_path: str | os.PathLike[str]) -> tuple[Checkpoint, dict[str, Any]]:
    """(checkpoint, where it comes from) for a run that starts from another's weights; errors as in `open_checkpoint`.

    The second is JSON for config.json: run, checkpoint, step, checksum and config_hash, the fingerprint of the other
    run's config.json; run and config_hash are None for a checkpoint that lies outside a run directory.
    """
    checkpoint = open_checkpoint(tag_or_path)
    run_dir = checkpoint.path.absolute().parent.parent
    inside = checkpoint.path.absolute().parent.name == "checkpoints" and is_run_dir(run_dir)
    has_config = inside and (run_dir / "config.json").is_file()
    return checkpoint, {"run": run_dir.name if inside else None, "checkpoint": checkpoint.path.name,
                        "step": checkpoint.step, "checksum": checkpoint.checksum,
                        "config_hash": hash_json(read_config(run_dir)) if has_config else None}


# ---- a model from a checkpoint alone --------------------------------------------------------------------------------

def load_model(path: str | os.PathLike[str], device: torch.device | str, *,
               compute_dtype: torch.dtype | None = None) -> tuple["GPT", "RustBPETokenizer", dict[str, Any]]:
    """Rebuild model (in eval mode) and tokenizer from what `find_checkpoint` finds, and nothing else.

    `compute_dtype` None is the device's own. Returns (model, tokenizer, meta); meta has path, step, model_config,
    trainer_state. Raises ValueError for a damaged checkpoint, an architecture that is not the one saved or that this
    code does not know, and a tokenizer that is not the checkpoint's; FileNotFoundError for what is missing.
    """
    from nanochat.gpt import GPT, GPTConfig  # here, so that looking at runs needs no model
    from nanochat.tokenizer import RustBPETokenizer

    device = torch.device(device)
    checkpoint = open_checkpoint(path)
    checkpoint.check_architecture(checkpoint.model_config)
    unknown = checkpoint.model_config.keys() - {f.name for f in fields(GPTConfig)}
    if unknown:
        raise ValueError(f"{checkpoint.path / MODEL_CONFIG_NAME}: this code's GPTConfig lacks "
                         f"{', '.join(sorted(unknown))}; use the code that trained it")
    tokenizer = RustBPETokenizer.from_directory(checkpoint.path.absolute().parent.parent / "tokenizer")
    checkpoint.check_tokenizer(tokenizer.fingerprint)
    with torch.device("meta"):
        model = GPT(GPTConfig(**checkpoint.model_config))
    model.to_empty(device=device)
    model.set_compute_dtype(compute_dtype or get_compute_dtype(device))
    try:
        model.load_state_dict(checkpoint.model_state(), strict=True)
    except RuntimeError as e:  # names or shapes
        raise ValueError(f"{checkpoint.path / MODEL_NAME}: not the weights of this code's GPT: {e}") from e
    meta = {"path": checkpoint.path, "step": checkpoint.step, "model_config": checkpoint.model_config,
            "trainer_state": checkpoint.trainer_state}
    return model.eval(), tokenizer, meta




def check_retention(keep_last_k: int | None, keep_milestone_every: int | None) -> None:
    """ValueError for settings that mean nothing."""
    for flag, value in (("--keep-last-k", keep_last_k), ("--keep-milestone-every", keep_milestone_every)):
        if value is not None and value < 1:
            raise ValueError(f"{flag}: got {value}, expected at least 1, or nothing to keep all")


def expendable(steps: dict[str, int], good_step: int, *, keep_last_k: int | None, keep_milestone_every: int | None
               ) -> list[str]:
    """Which of the numbered checkpoints {name: step} may be deleted when one of step `good_step` is known to be good;
    the oldest first. `keep_last_k` None keeps all."""
    if keep_last_k is None:
        return []
    rank = sorted((step, name) for name, step in steps.items() if step <= good_step)
    return [name for step, name in rank[:-keep_last_k]
            if step < good_step and not (keep_milestone_every and step % keep_milestone_every == 0)]


def prune(run_dir: Path, *, good: Path, keep_last_k: int | None = None, keep_milestone_every: int | None = None
          ) -> list[str]:
    """Delete what `expendable` says of a run; returns the names. `good`: a checkpoint of this run that is known to be
    good, numbered or `final`. One process calls this, when it writes no checkpoint. What cannot be deleted stays, with
    a warning. Raises OSError or ValueError if `good` is not there after all: then nothing is deleted."""
    check_retention(keep_last_k, keep_milestone_every)
    if keep_last_k is None:
        return []
    good_step = read_state(good)["step"]
    doomed = expendable(own_steps(run_dir), good_step, keep_last_k=keep_last_k,
                        keep_milestone_every=keep_milestone_every)
    deleted = []
    for name in doomed:
        try:
            delete_checkpoint(run_dir / "checkpoints" / name)
            deleted.append(name)
        except OSError as e:
            log.warning("checkpoint %s could not be deleted and stays: %s", name, e)
    return deleted


def own_steps(run_dir: Path) -> dict[str, int]:
    """{name: step} of the numbered checkpoints that this program wrote under that name, whole or damaged inside."""
    found: dict[str, int] = {}
    for path in (run_dir / "checkpoints").iterdir():
        match = CHECKPOINT_NAME.fullmatch(path.name)
        if match is None or match["step"] is None or path.is_symlink():
            continue
        try:
            step = read_state(path)["step"]
        except (OSError, ValueError) as e:
            log.debug("checkpoint %s is left alone: %s", path.name, e)
            continue
        if str(step) == match["step"]:
            found[path.name] = step
    return found



MAX_ERRORS = 3  # in a row
NICE = 10  # of the writing thread: about a tenth of the time where it wants a core that training wants


class Code(IntEnum):
    """How a save went. Numbers, so that ranks can add them up: only rank 0's is not 0."""

    NOTHING = 0  # none has ended
    SAVED = 1
    FAILED = 2  # the run goes on: an older good checkpoint is there
    FATAL = 3  # the run must end


@dataclass(frozen=True)
class Outcome:
    """What came of a save. `message` tells it to people; `error` is what to raise where `code` is FATAL."""

    code: Code
    message: str
    path: Path | None = None
    seconds: float = 0.0  # of the writing
    error: Exception | None = None


class Policy:
    """Whether a run goes on after a save. `good`: the newest checkpoint known to be good, None if there is none."""

    def __init__(self, good: Path | None) -> None:
        self.good = good
        self.errors = 0  # in a row

    def saved(self, path: Path, seconds: float) -> Outcome:
        """A checkpoint was written, fsynced and renamed."""
        self.good, self.errors = path, 0
        return Outcome(Code.SAVED, f"saved {path} in {seconds:.1f} s", path, seconds)

    def failed(self, error: Exception, seconds: float, *, last: bool) -> Outcome:
        """A checkpoint could not be written. `last`: the run has nothing else to do."""
        self.errors += 1
        kept = self.good if self.good is not None and (self.good / SEAL_NAME).is_file() else None
        if not isinstance(error, OSError):
            return Outcome(Code.FATAL, str(error), None, seconds, error)
        told = error.strerror or str(error)
        if kept is not None and self.errors < MAX_ERRORS and not last:
            return Outcome(Code.FAILED, f"{told}; the run goes on, {kept.name} is kept (error {self.errors} of "
                                        f"{MAX_ERRORS} in a row)", None, seconds, error)
        why = ("no good checkpoint is left" if kept is None else f"{kept.name} is kept" if last else
               f"{kept.name} is kept, but this was error {self.errors} in a row")
        told = f"{told}; {why}. Make room or mend the rights, then start the same command again"
        return Outcome(Code.FATAL, told, None, seconds, OSError(error.errno or errno.EIO, told))


class Saver:
    """Writes checkpoints, one at a time, in a thread or at once. For rank 0; its calls are all from one thread.

    good: a checkpoint of the run known to be good (loaded with its checksums verified), if there is one.
    prune: called with each checkpoint just written, where it was written; a ValueError or OSError of it is a warning.
    """

    def __init__(self, *, good: Path | None, prune: Callable[[Path], Any] | None = None,
                 asynchronous: bool = True) -> None:
        self._policy = Policy(good)
        self._prune = prune
        self._pool = ThreadPoolExecutor(1, "saver", _step_back) if asynchronous else None
        self._flying: Future[Outcome] | None = None
        self._told: deque[Outcome] = deque()
        self.held: dict[str, Any] = {}  # host copies of the save before: to be filled again, once `wait` has returned

    def start(self, write: Callable[[], Path], *, last: bool = False) -> None:
        """Let `write` save a checkpoint; waits for the save in flight first. `write` must use nothing that later steps
        change. `last`: the run ends after it, so that an error cannot be made good by a later save."""
        self.wait()
        if self._pool is None:
            self._told.append(self._save(write, last))
        else:
            self._flying = self._pool.submit(self._save, write, last)

    def poll(self) -> Outcome | None:
        """The outcome of the oldest save that has ended and was not told yet; never waits."""
        if self._flying is not None and self._flying.done():
            self.wait()
        return self._told.popleft() if self._told else None

    def wait(self) -> None:
        """Wait until no save is in flight. `poll` then gives what came of it."""
        if self._flying is not None:
            self._told.append(self._flying.result())
            self._flying = None

    def close(self) -> None:
        """Wait, and end the thread. Outcomes not told yet can still be had from `poll`. Twice is fine."""
        self.wait()
        if self._pool is not None:
            self._pool.shutdown()

    def _save(self, write: Callable[[], Path], last: bool) -> Outcome:
        began = time.perf_counter()
        try:
            path = write()
        except Exception as e:  # whatever it is, the loop must hear of it
            return self._policy.failed(e, time.perf_counter() - began, last=last)
        outcome = self._policy.saved(path, time.perf_counter() - began)
        if self._prune is not None:
            try:
                self._prune(path)
            except (OSError, ValueError) as e:
                log.warning("older checkpoints were not deleted: %s", e)
        return outcome


def _step_back() -> None:
    """Lower the priority of the thread that calls this. On Linux alone: elsewhere priorities are of whole processes."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # speed only
            os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))
