""" Checkpoints: written so that a crash at any instant leaves a good one, read so that a bad one
is never believed.

    RUN/checkpoints/checkpoint-1000/
      trainer_state.json              the seal: step, progress, size and sum of every file; last
      dataloader_state/lanes.json.gz  the V cursors; the same bytes stay for ever in RUN/logs/cursors/
      model/pytorch_model.bin         the bare module's state_dict
      model/config.json               what builds the module
      optimizer.bin  scheduler.bin  rng/rank_0.pkl

**The seal.** A checkpoint counts when its seal is whole. The seal holds a BLAKE2b sum of each
file, and one of its own bytes, taken with zeros in its place:

    {"step": 7, "files": {...}, "checksum": "00000000"}  --BLAKE2b-->  9f3c..  -->  "checksum": "9f3c.."

Sums are taken of what goes to a file, not of what comes back from it: a disk that stores other
bytes is found out.

**Writing.** Everything goes into a folder with a hidden name. Each file is fsynced, the seal is
written last, the folders are fsynced, and one rename gives the checkpoint its name. A step that has
a good checkpoint keeps it, for by the law of the stream it is the same; a bad one is replaced. A
`final` of an earlier end, where the run was made longer, becomes the checkpoint of its step. So no
instant is without the newest good one.

**Reading.** `newest_good` goes from the newest checkpoint to the oldest and takes the first in
which every byte has its sum. States hold tensors and plain values only, and are loaded with
`weights_only=True`: nothing is executed.

**While training goes on.** The loop is held for a copy of the state (`to_host`); a thread does the
rest. At most one save is in flight, so that a slow disk holds up training and does not fill memory.

    step 100 | copy |  step 101  |  step 102  |  step 103  | ...      the loop; all collectives
                    | write, fsync, rename, prune |                   rank 0's thread: files only
                                                  ^ poll() at the next step tells how it went

**Retention.** Once a checkpoint is known to be good, older ones may go: those that are neither
among the last `keep_last_k` nor at a step that `keep_milestone_every` divides. With 2 and 400, and
700 just written:

    checkpoint-  100   200   300   400   500   600   700   800(rotten)   final
                  x     x     x     M     x     L     L     ?              F

What this program did not write is never touched, nor is what is newer than the good one.

**Names for people.** `d12` is the newest good checkpoint of the run d12, `d12@1000` that of step
1000, `d12@final` its end. A path to a run directory does in place of a tag, and a path to a
checkpoint means that one. """

import contextlib
import errno
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from nanochat.common import check_shape, fsync_dir, hash_bytes, hash_file, hash_json, parse_json, read_json
from nanochat.dist import map_tensors
from nanochat.run_dir import (
    CHECKPOINT_NAME,
    checkpoint_folders,
    delete_checkpoint,
    find_run,
    keep_cursors,
    list_runs,
    pack_cursors,
    read_cursors,
    remake_folder,
    remove_tree,
)

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
STATE_NAME = "trainer_state.json"  # the seal
NO_CHECKSUM = "0" * 32
CURSORS_NAME = "dataloader_state/lanes.json.gz"
MODEL_NAME, MODEL_CONFIG_NAME = "model/pytorch_model.bin", "model/config.json"
OPTIMIZER_NAME, SCHEDULER_NAME = "optimizer.bin", "scheduler.bin"
RNG_NAME = "rng/rank_{}.pkl"
REQUIRED = (CURSORS_NAME, MODEL_NAME, MODEL_CONFIG_NAME, OPTIMIZER_NAME, SCHEDULER_NAME)
OURS = ("format_version", "files", "checksum")  # fields of the seal that are not the trainer's
MAX_ERRORS = 3  # saves that fail one after another before the run gives up


# ---- plain states -------------------------------------------------------------------------------

def to_host(value: Any) -> Any:
    """A deep copy of a plain state with every tensor in host memory, contiguous; pinned where it
    comes from CUDA.

    Later steps do not change it, and all copies are complete at return. TypeError, naming the
    place, for a value that is neither tensor nor plain. """
    streams: set[torch.cuda.Stream] = set()

    def copy(tensor: torch.Tensor, where: str) -> torch.Tensor:
        if tensor.is_cuda:
            streams.add(torch.cuda.current_stream(tensor.device))
        held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return held.copy_(tensor.detach(), non_blocking=tensor.is_cuda)

    copied = map_tensors(value, copy, "state")
    for stream in streams:
        stream.synchronize()
    return copied


def save_plain(state: Any, file: Any, name: str) -> None:
    """torch.save a plain state to a file that needs no more than write and flush. What is not
    plain could not be read back, so it is a TypeError, which begins with `name` and the place."""
    torch.save(map_tensors(state, lambda tensor, _: tensor.detach(), name), cast(IO[bytes], file))


def load_plain(file: Path, *, mapped: bool = False) -> Any:
    """What `save_plain` wrote, on the CPU, executing nothing. `mapped`: tensors are views of the
    file, read when they are looked at. ValueError for anything but tensors and plain values."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError:
        raise
    except Exception as e:  # broken archives raise struct.error, EOFError, RuntimeError, ...
        raise ValueError(f"{file}: refused, it holds something other than tensors and plain values, or is "
                         f"broken; use another checkpoint ({type(e).__name__})") from e


# ---- sealed folders -----------------------------------------------------------------------------

class HashedFile:
    """A write-only file that sums up what goes through it. An OSError is kept until `finish`,
    for torch.save's C++ writer must not be left by an exception halfway."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._hash = hashlib.blake2b(digest_size=16)
        self._bytes = 0
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        num_bytes = memoryview(data).nbytes
        try:
            if self._error is None:
                self._raw.write(data)
                self._hash.update(data)
                self._bytes += num_bytes
        except OSError as e:
            self._error = e
        return num_bytes

    def flush(self) -> None:
        """torch.save calls it; `finish` does it."""

    def finish(self) -> dict[str, Any]:
        """Force all to disk; returns size and sum. Raises the OSError of any write."""
        if self._error is not None:
            raise self._error
        self._raw.flush()
        os.fsync(self._raw.fileno())
        return {"bytes": self._bytes, "blake2b": self._hash.hexdigest()}


def json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def read_state(path: Path) -> dict[str, Any]:
    """The seal of the checkpoint `path`, its own sum verified and its list of files well formed.
    FileNotFoundError if there is none, ValueError if it is torn, rotten or of something else; both
    name the file."""
    file = path / STATE_NAME
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing, so this checkpoint was never finished")
    raw = file.read_bytes()
    seal = parse_json(raw, f"{file}: torn or rotten", {"checksum": str})
    checksum = seal["checksum"]
    blank = raw.replace(checksum.encode(), NO_CHECKSUM.encode()) if checksum else raw
    if hash_bytes(blank) != checksum:
        raise ValueError(f"{file}: rotten (its bytes do not have the checksum it states)")
    if seal.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{file}: format {seal.get('format_version')!r:.20}, this version reads "
                         f"{FORMAT_VERSION}")
    check_shape(seal, {"step": int, "files": dict}, file)
    for name, record in seal["files"].items():
        check_shape(record, {"bytes": int, "blake2b": str}, f"{file}: the sum of {name!r}")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{file}: not a seal of this program ({name!r} lies outside of it)")
    return seal


def check_file(path: Path, name: str, record: Mapping[str, Any]) -> None:
    """Compare one file of a checkpoint with its record in the seal. FileNotFoundError for a
    missing file, ValueError for a torn or rotten one; the message begins with the file's path."""
    file = path / name
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing")
    size = file.stat().st_size
    if size != record["bytes"]:
        raise ValueError(f"{file}: torn ({size:,} bytes on disk, {record['bytes']:,} were written)")
    if hash_file(file) != record["blake2b"]:
        raise ValueError(f"{file}: rotten (its bytes do not have the checksum in {STATE_NAME})")


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Read a whole checkpoint and return its seal. Errors of `read_state` and `check_file`."""
    seal = read_state(path)
    for name, record in seal["files"].items():
        check_file(path, name, record)
    return seal


def good_step(path: Path) -> int | None:
    """The step of a checkpoint in which every byte is right, None of any other."""
    try:
        return verify_checkpoint(path)["step"]
    except (OSError, ValueError):
        return None


# ---- writing a checkpoint -----------------------------------------------------------------------

def save_checkpoint(run_dir: Path, name: str, *, step: int, model_state: dict[str, Any],
                    model_config: dict[str, Any], optimizer_state: Any, scheduler_state: Any,
                    rng_state: dict[int, Any], cursors: list[dict[str, Any]],
                    trainer_state: dict[str, Any]) -> Path:
    """Write RUN/checkpoints/<name> and RUN/logs/cursors/step-<step>.json.gz, and return the
    checkpoint's path. A good checkpoint of that name and step is kept as it is.

    States hold tensors and plain values (see `to_host`); `rng_state` is {rank: state}; `cursors`
    are the JSON states of all lanes in order; `trainer_state` is JSON. One process calls this.
    Raises OSError with the reason if it cannot be written: older checkpoints are then as they were
    and nothing half-written stays. """
    match = CHECKPOINT_NAME.fullmatch(name)
    if match is None or match["step"] not in (None, str(step)):
        raise ValueError(f"checkpoint name {name!r} at step {step}: expected checkpoint-{step}, "
                         f"checkpoint-{step}-shutdown or final")
    reserved = {"format_version": FORMAT_VERSION, "step": step,
                "architecture_hash": hash_json(model_config)}
    if clash := trainer_state.keys() & {*reserved, *OURS}:
        raise ValueError(f"trainer_state: {', '.join(sorted(clash))} are written by save_checkpoint itself")
    packed = pack_cursors(step, cursors)
    contents = {CURSORS_NAME: packed, MODEL_CONFIG_NAME: json_bytes(model_config),
                MODEL_NAME: model_state, OPTIMIZER_NAME: optimizer_state, SCHEDULER_NAME: scheduler_state,
                **{RNG_NAME.format(rank): state for rank, state in rng_state.items()}}
    try:
        keep_cursors(run_dir, step, packed)
        return put_checkpoint(run_dir, name, {**reserved, **trainer_state}, contents)
    except OSError as e:
        raise OSError(e.errno or errno.EIO, f"checkpoint {name} could not be written to "
                      f"{run_dir / 'checkpoints'}: {e.strerror or e}; older checkpoints are untouched") from e


def put_checkpoint(run_dir: Path, name: str, head: Mapping[str, Any], contents: Mapping[str, Any]) -> Path:
    """Write and seal RUN/checkpoints/<name>, unless it is a good checkpoint of head["step"]
    already. `head`: the fields of the seal beside its sums. `contents`: bytes or a plain state for
    each relative name. Nothing half-written stays where it cannot be done."""
    target = run_dir / "checkpoints" / name
    temporary = target.with_name(f".tmp-{name}-{os.getpid()}")
    remake_folder(target.parent)
    there = good_step(target)
    if there == head["step"]:
        log.info("%s is there already and good; it is kept", target)
        return target
    files: dict[str, dict[str, Any]] = {}

    def put(name: str, content: Any) -> None:
        (temporary / name).parent.mkdir(exist_ok=True)
        with open(temporary / name, "xb") as raw:
            file = HashedFile(raw)
            if isinstance(content, bytes):
                file.write(content)
            else:
                save_plain(content, file, name)
            files[name] = file.finish()

    try:
        temporary.mkdir()
        for file_name, content in contents.items():
            put(file_name, content)
        seal = {**head, "files": dict(files), "checksum": NO_CHECKSUM}
        put(STATE_NAME, json_bytes({**seal, "checksum": hash_bytes(json_bytes(seal))}))
        for folder in sorted({(temporary / file_name).parent for file_name in files}, reverse=True):
            fsync_dir(folder)
        # a good `final` of another step becomes the checkpoint of its step; what is bad never counted
        numbered = target.with_name(f"checkpoint-{there}")
        if there is not None and good_step(numbered) != there:
            if os.path.lexists(numbered):
                delete_checkpoint(numbered)
            os.rename(target, numbered)
        elif os.path.lexists(target):
            delete_checkpoint(target)
        os.rename(temporary, target)
    except BaseException:
        if temporary.exists():
            remove_tree(temporary)
        raise
    fsync_dir(target.parent)
    return target


# ---- finding checkpoints ------------------------------------------------------------------------

def step_of(path: Path) -> float:
    """The step in a checkpoint's seal, or in its name where the seal cannot be read; else infinity."""
    try:
        return read_state(path)["step"]
    except (OSError, ValueError):
        match = CHECKPOINT_NAME.fullmatch(path.name)
        return float((match and match["step"]) or "inf")


def list_checkpoints(run_dir: Path) -> list[Path]:
    """All checkpoints of a run, good or not, newest step first; of one step `final` comes first."""
    return sorted(checkpoint_folders(run_dir).values(), reverse=True,
                  key=lambda path: (step_of(path), path.name == "final", path.name))


def newest_good(run_dir: Path) -> Path | None:
    """The newest checkpoint that verifies, or None. Each bad one met on the way is named in a
    warning that says why."""
    for path in list_checkpoints(run_dir):
        try:
            verify_checkpoint(path)
        except (OSError, ValueError) as e:
            log.warning("checkpoint %s is passed over: %s", path.name, e)
        else:
            return path
    return None


def find_checkpoint(tag_or_path: str | os.PathLike[str]) -> Path:
    """The checkpoint, verified, that is meant by its path, by a run's tag or directory (the newest
    good one), or by either of these with @STEP or @NAME. FileNotFoundError if there is none,
    ValueError if it is damaged; both say what there is."""
    text = os.fspath(tag_or_path)
    path = Path(text).expanduser()
    if (path / STATE_NAME).is_file() or path.absolute().parent.name == "checkpoints":
        verify_checkpoint(path)
        return path
    run, at, wanted = text.rpartition("@")
    whole = not at or path.exists() or text in list_runs()  # an @ may be part of a name
    run_dir = find_run(text if whole else run)
    there = list_checkpoints(run_dir)
    told = f"there are: {', '.join(path.name for path in there) or 'none yet; train it first'}"
    if whole:
        found = newest_good(run_dir)
        if found is None:
            raise FileNotFoundError(f"{run_dir}: no good checkpoint; {told}")
        return found
    problems = []
    for path in there:
        if wanted in (path.name, f"{step_of(path):.0f}"):
            try:
                verify_checkpoint(path)
                return path
            except (OSError, ValueError) as e:
                problems.append(str(e))
    if problems:
        raise ValueError(f"{run_dir}: no good checkpoint {wanted!r} ({'; '.join(problems)}); {told}")
    raise FileNotFoundError(f"{run_dir}: no checkpoint {wanted!r}, expected a step, final, or nothing for the "
                            f"newest; {told}")


# ---- loading ------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. The small parts are read, the states are read when asked for, on the
    CPU."""
    path: Path
    step: int
    checksum: str  # of its seal, and so of all of it
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
        name = RNG_NAME.format(rank)
        return load_plain(self.path / name) if name in self.sealed else None

    def check_architecture(self, model_config: dict[str, Any]) -> None:
        """ValueError with a diff if `model_config` is not what was saved. To be called before
        weights are loaded."""
        if hash_json(model_config) != self.trainer_state["architecture_hash"]:
            saved = self.model_config
            lines = [f"{name}: the checkpoint has {saved.get(name)!r}, the model says {model_config.get(name)!r}"
                     for name in {**saved, **model_config} if saved.get(name) != model_config.get(name)]
            raise ValueError(f"{self.path}: another architecture; no weight was loaded. Use the same settings, "
                             "or --model-tag NAME for a new run.\n  " + "\n  ".join(lines))

    def check_tokenizer(self, fingerprint: str) -> None:
        """ValueError if the checkpoint was trained with a tokenizer of another fingerprint."""
        expected = self.trainer_state.get("tokenizer_fingerprint", fingerprint)
        if fingerprint != expected:
            raise ValueError(f"{self.path}: trained with the tokenizer {expected}, got {fingerprint}; put the "
                             "run's tokenizer/ back, or use --model-tag NAME for a new run")


def load_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """Open the checkpoint at `path`. Errors as in `verify_checkpoint`; `verify=False` skips the
    sums of the large files, for a path that has just been verified."""
    seal = verify_checkpoint(path) if verify else read_state(path)
    if missing := set(REQUIRED) - seal["files"].keys():
        raise ValueError(f"{path / STATE_NAME}: does not list {', '.join(sorted(missing))}; use another "
                         f"checkpoint")
    step, cursors = read_cursors(path / CURSORS_NAME)
    if step != seal["step"]:
        raise ValueError(f"{path / CURSORS_NAME}: of step {step}, {STATE_NAME} is of step {seal['step']}")
    return Checkpoint(path=path, step=step, checksum=seal["checksum"], cursors=cursors,
                      trainer_state={k: v for k, v in seal.items() if k not in OURS},
                      model_config=read_json(path / MODEL_CONFIG_NAME, dict),
                      sealed=frozenset(seal["files"]))


def open_checkpoint(tag_or_path: str | os.PathLike[str]) -> Checkpoint:
    """Load what `find_checkpoint` finds, verified once. Errors of both."""
    return load_checkpoint(find_checkpoint(tag_or_path), verify=False)


# ---- retention ----------------------------------------------------------------------------------

def check_retention(keep_last_k: int | None, keep_milestone_every: int | None) -> None:
    """ValueError for settings that mean nothing."""
    flags = {"--keep-last-k": keep_last_k, "--keep-milestone-every": keep_milestone_every}
    for flag, value in flags.items():
        if value is not None and value < 1:
            raise ValueError(f"{flag}: got {value}, expected at least 1, or nothing to keep all")


def expendable(steps: Mapping[str, int], good_step: int, *, keep_last_k: int | None,
               keep_milestone_every: int | None) -> list[str]:
    """Which of the numbered checkpoints {name: step} may be deleted when one of step `good_step`
    is known to be good, the oldest first. `keep_last_k` None keeps all."""
    if keep_last_k is None:
        return []
    ranked = sorted((step, name) for name, step in steps.items() if step <= good_step)
    return [name for step, name in ranked[:-keep_last_k]
            if step < good_step and not (keep_milestone_every and step % keep_milestone_every == 0)]


def prune(run_dir: Path, *, good: Path, keep_last_k: int | None = None,
          keep_milestone_every: int | None = None) -> list[str]:
    """Delete what `expendable` says of a run; returns the names. `good`: a checkpoint of this run
    that is known to be good, because this process wrote it or has verified it; reading it again
    would be minutes of disk time a save.

    Only folders go whose seal is whole and of the step that the name says: a copy, a link or what
    another program wrote stays. What cannot be deleted stays with a warning. One process calls
    this, when it writes no checkpoint. OSError or ValueError if `good` is not there after all:
    then nothing is deleted."""
    newest, folders = read_state(good)["step"], checkpoint_folders(run_dir)
    own: dict[str, int] = {}
    for name, path in folders.items():
        match = CHECKPOINT_NAME.fullmatch(name)
        with contextlib.suppress(OSError, ValueError):
            step = read_state(path)["step"]
            if match and match["step"] == str(step) and not path.is_symlink():
                own[name] = step
    deleted = []
    for name in expendable(own, newest, keep_last_k=keep_last_k, keep_milestone_every=keep_milestone_every):
        try:
            delete_checkpoint(folders[name])
            deleted.append(name)
        except OSError as e:
            log.warning("checkpoint %s could not be deleted and stays: %s", name, e)
    return deleted


# ---- saving while training goes on --------------------------------------------------------------

class Code(IntEnum):
    """How a save went. Numbers, so that ranks can add them up: only rank 0's is not 0."""

    NOTHING = 0  # none has ended
    SAVED = 1
    FAILED = 2  # the run goes on: an older good checkpoint is there
    FATAL = 3  # the run must end


@dataclass(frozen=True)
class Outcome:
    """What came of a save. `message` tells it to people; `error` is what to raise where `code` is
    FATAL."""

    code: Code
    message: str
    path: Path | None = None  # of what was written, and how long that took
    seconds: float = 0.0
    error: Exception | None = None


class Saver:
    """Writes checkpoints, one at a time, in a thread, and judges whether a run goes on
    where one could not be written. For rank 0; its calls are all from one thread.

    A full disk is no reason to lose a week, as long as an older good checkpoint is there. So an
    OSError lets the run go on, but for the third in a row, one where nothing good exists, and one
    of the save that was to be the last. Any other error is a bug, and ends the run at once.

    good: a checkpoint of the run known to be good (loaded, with its sums verified), if there is
    one. prune: called in the thread with each checkpoint just written; a ValueError or OSError of
    it is a warning. asynchronous: whether `start` returns before the checkpoint is written. """

    def __init__(self, *, good: Path | None, prune: Callable[[Path], Any] = lambda good: None,
                 asynchronous: bool = True) -> None:
        self._good, self._prune = good, prune
        self._errors = 0  # in a row
        self._pool, self._asynchronous = ThreadPoolExecutor(1, "saver"), asynchronous
        self._flying: Future[Outcome] | None = None
        self._told: list[Outcome] = []  # or rather to be told

    def start(self, write: Callable[[], Path], *, last: bool = False) -> None:
        """Let `write` save a checkpoint; waits for the save in flight first. `write` must use
        nothing that later steps change. `last`: the run ends after it, so that an error cannot be
        made good by a later save."""
        self.wait()
        self._flying = self._pool.submit(self._save, write, last)
        if not self._asynchronous:
            self.wait()

    def poll(self) -> Outcome | None:
        """The outcome of the oldest save that has ended and was not told yet; never waits."""
        if self._flying is not None and self._flying.done():
            self.wait()
        return self._told.pop(0) if self._told else None

    def wait(self) -> None:
        """Wait until no save is in flight. `poll` then gives what came of it."""
        if self._flying is not None:
            self._told.append(self._flying.result())
            self._flying = None

    def close(self) -> None:
        """Wait, and end the thread. Outcomes not told yet can still be had from `poll`. Twice is
        fine."""
        self.wait()
        self._pool.shutdown()

    def _save(self, write: Callable[[], Path], last: bool) -> Outcome:
        began = time.perf_counter()
        try:
            path = write()
        except OSError as e:
            return self._judge(e, last)
        except Exception as e:  # whatever it is, the loop must hear of it
            return Outcome(Code.FATAL, str(e), error=e)
        seconds = time.perf_counter() - began
        self._good, self._errors = path, 0
        try:
            self._prune(path)
        except (OSError, ValueError) as e:
            log.warning("older checkpoints were not deleted: %s", e)
        return Outcome(Code.SAVED, f"saved {path} in {seconds:.1f} s", path, seconds)

    def _judge(self, error: OSError, last: bool) -> Outcome:
        """Whether the run goes on though a checkpoint could not be written."""
        self._errors += 1
        told = error.strerror or str(error)
        kept = self._good.name if self._good and (self._good / STATE_NAME).is_file() else ""
        if kept and self._errors < MAX_ERRORS and not last:
            return Outcome(Code.FAILED, f"{told}; the run goes on, {kept} is kept (error {self._errors} of "
                                        f"{MAX_ERRORS} in a row)", error=error)
        many = "" if last else f", but this was error {self._errors} in a row"
        why = f"{kept} is kept{many}" if kept else "no good checkpoint is left"
        told = f"{told}; {why}. Make room or mend the rights, then start the same command again"
        return Outcome(Code.FATAL, told, error=OSError(error.errno or errno.EIO, told))
