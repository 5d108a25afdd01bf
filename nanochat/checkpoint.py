"""Checkpoints: written so that a crash at any instant leaves a good one, read so that a bad one
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

**Writing.** Everything goes into a folder with a hidden name, fsynced, the seal last; one rename
gives the checkpoint its name. A step that has a good checkpoint keeps it, for by the law of the
stream it is the same; a bad one is replaced. A `final` of an earlier end, where the run was made
longer, becomes the checkpoint of its step. So no instant is without the newest good one.

**Reading.** `first_good` goes from the newest checkpoint to the oldest and takes the first in
which every byte has its sum; it is not checked again. States hold tensors and plain values only,
and are loaded with `weights_only=True`: nothing is executed.

**While training goes on.** The loop is held for a copy of the state; one thread does the rest. The
next save waits for the one before, so that a slow disk holds up training and does not fill memory.

    step 100 | copy |  step 101  |  step 102  |  step 103  | ...      the loop; all collectives
                    | write, fsync, rename, prune |                   rank 0's thread: files only
                                                  ^ the next step's reduction tells how it went

**Retention.** Once a checkpoint is written, older ones may go: those that are neither among the
last `keep_last_k` nor at a step that `keep_milestone_every` divides. Without `keep_last_k`, all stay
but those that were saved because time had passed: of these the newest two stay. With 2 and 400, and 700 just
written:

    checkpoint-  100   200   300   400   500   600   700   800(rotten)   final
                  x     x     x     M     x     L     L     ?              F

What this program did not write is never touched, nor is what is newer than the good one."""

import contextlib
import errno
import io
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanochat.common import check_shape, duration, fsync_dir, hash_bytes, hash_file, hash_json, parse_json, read_json
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
TIMED_KEPT = 2  # checkpoints that were saved because time had passed
MAX_ERRORS = 3  # saves that fail one after another before the run gives up


# ---- plain states -------------------------------------------------------------------------------

def to_host(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A copy of tensors in host memory, contiguous, so that later steps do not change it."""
    def copy(tensor: torch.Tensor) -> torch.Tensor:
        # from a GPU into pinned memory, which takes the full speed of the bus
        there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return there.copy_(tensor.detach(), non_blocking=True)

    copied = {name: copy(tensor) for name, tensor in state.items()}
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return copied


def save_plain(state: Any, name: str) -> bytes:
    """A plain state as the bytes of a file. What is not plain could not be read back, so it is a
    TypeError, which begins with `name` and says what kind it is.

    They are made in memory because torch.save's C++ writer must not be left by the exception of a
    full disk halfway; so a save holds its largest file once more while that is written."""
    data = io.BytesIO()
    torch.save(state, data)
    data.seek(0)
    if kinds := torch.serialization.get_unsafe_globals_in_checkpoint(data):
        raise TypeError(f"{name}: a checkpoint holds tensors and plain values, got {', '.join(kinds)}")
    return data.getvalue()  # no copy; a view would outlive its buffer in the collector, where Python 3.12 crashes


def load_plain(file: Path) -> Any:
    """What `save_plain` wrote, executing nothing. Tensors are views of the file, on the CPU, and
    are read when they are looked at. ValueError for anything but tensors and plain values."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise
    except Exception as e:  # broken archives raise struct.error, EOFError, RuntimeError, ...
        raise ValueError(f"{file}: refused, it holds something other than tensors and plain values, or is "
                         f"broken; use another checkpoint ({type(e).__name__})") from e


# ---- writing ------------------------------------------------------------------------------------

def save_checkpoint(run_dir: Path, name: str, *, step: int, states: Mapping[str, Any],
                    model_config: dict[str, Any], cursors: list[dict[str, Any]],
                    trainer_state: dict[str, Any]) -> Path:
    """Write RUN/checkpoints/<name> and RUN/logs/cursors/step-<step>.json.gz, and return the
    checkpoint's path. A good checkpoint of that name and step is kept as it is.

    `states`: {file name: tensors and plain values} (see `to_host`); `cursors`: the JSON states of
    all lanes in order; `trainer_state`: JSON. One process calls this. Raises OSError with the
    reason if it cannot be written: older checkpoints are then as they were and nothing
    half-written stays."""
    assert name in (f"checkpoint-{step}", f"checkpoint-{step}-shutdown", "final"), name
    head = {"format_version": FORMAT_VERSION, "step": step, "architecture_hash": hash_json(model_config),
            **trainer_state}
    packed = pack_cursors(step, cursors)
    target = run_dir / "checkpoints" / name
    try:
        keep_cursors(run_dir, step, packed)
        remake_folder(target.parent)
        write_sealed(target, head, {CURSORS_NAME: packed, MODEL_CONFIG_NAME: json_bytes(model_config), **states})
    except OSError as e:
        raise OSError(e.errno or errno.EIO, f"checkpoint {name} could not be written to "
                      f"{target.parent}: {e.strerror or e}; older checkpoints are untouched") from e
    return target


def write_sealed(target: Path, head: Mapping[str, Any], contents: Mapping[str, Any]) -> None:
    """Write and seal a checkpoint, unless it is a good one of head["step"] already. `head`: the
    fields of the seal beside its sums. `contents`: bytes or a plain state for each relative name.
    Nothing half-written stays where it cannot be done."""
    try:
        there = verify_checkpoint(target)["step"]
    except (OSError, ValueError):
        there = None
    if there == head["step"]:
        log.info("%s is there already and good; it is kept", target)
        return
    temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    try:
        temporary.mkdir()
        files = {name: write_file(temporary, name, content) for name, content in contents.items()}
        seal = {**head, "files": files, "checksum": NO_CHECKSUM}
        write_file(temporary, STATE_NAME, json_bytes({**seal, "checksum": hash_bytes(json_bytes(seal))}))
        for folder in sorted({(temporary / name).parent for name in (*files, STATE_NAME)}):
            fsync_dir(folder)
        if there is not None:  # a good `final` of an earlier end
            numbered = target.with_name(f"checkpoint-{there}")
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


def write_file(folder: Path, name: str, content: Any) -> dict[str, Any]:
    """Write bytes or a plain state to a new file of a checkpoint, on disk when this returns;
    its record for the seal."""
    data = content if isinstance(content, bytes) else save_plain(content, name)
    (folder / name).parent.mkdir(exist_ok=True)
    with open(folder / name, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(data), "blake2b": hash_bytes(data)}


def json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


# ---- verifying ----------------------------------------------------------------------------------

def read_seal(path: Path) -> dict[str, Any]:
    """The seal of the checkpoint `path`, its own sum verified and its list of files well formed.
    FileNotFoundError if there is none, ValueError if it is torn, rotten or of something else; both
    name the file."""
    file = path / STATE_NAME
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing, so this checkpoint was never finished")
    raw = file.read_bytes()
    seal = parse_json(raw, f"{file}: torn or rotten", {"checksum": str, "step": int, "files": dict})
    if hash_bytes(raw.replace(seal["checksum"].encode(), NO_CHECKSUM.encode())) != seal["checksum"]:
        raise ValueError(f"{file}: rotten (its bytes do not have the checksum it states)")
    if seal.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{file}: format {seal.get('format_version')!r:.20}, this version reads "
                         f"{FORMAT_VERSION}")
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
    """Read a whole checkpoint and return its seal. Errors of `read_seal` and `check_file`."""
    seal = read_seal(path)
    for name, record in seal["files"].items():
        check_file(path, name, record)
    return seal


# ---- opening ------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. The small parts are read, the states are read when asked for."""

    path: Path
    trainer_state: dict[str, Any]  # all that the seal holds
    model_config: dict[str, Any]
    cursors: list[dict[str, Any]]  # of all V lanes, in order

    @property
    def step(self) -> int:
        return self.trainer_state["step"]

    def load(self, name: str) -> Any:
        """The state in one of its files. ValueError if that is not part of the checkpoint, or
        holds anything but tensors and plain values."""
        if name not in self.trainer_state["files"]:
            raise ValueError(f"{self.path / STATE_NAME}: does not list {name}; use another checkpoint")
        return load_plain(self.path / name)

    def model_state(self) -> dict[str, torch.Tensor]:
        return self.load(MODEL_NAME)

    def optimizer_state(self) -> dict[str, Any]:
        return self.load(OPTIMIZER_NAME)

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


def load_checkpoint(path: Path) -> Checkpoint:
    """Verify and open the checkpoint at `path`. Errors of `verify_checkpoint`."""
    return open_verified(path, verify_checkpoint(path))


def open_verified(path: Path, seal: dict[str, Any]) -> Checkpoint:
    """Read the small parts of a checkpoint whose files were verified. ValueError where they do not
    fit each other."""
    step, cursors = read_cursors(path / CURSORS_NAME)
    if step != seal["step"]:
        raise ValueError(f"{path / CURSORS_NAME}: of step {step}, {STATE_NAME} is of step {seal['step']}")
    return Checkpoint(path, seal, read_json(path / MODEL_CONFIG_NAME, dict), cursors)


def step_of(path: Path) -> float:
    """The step in a checkpoint's seal, or in its name where the seal cannot be read; else infinity."""
    try:
        return read_seal(path)["step"]
    except (OSError, ValueError):
        match = CHECKPOINT_NAME.fullmatch(path.name)
        return float((match and match["step"]) or "inf")


def list_checkpoints(run_dir: Path) -> list[Path]:
    """All checkpoints of a run, good or not, newest step first; of one step `final` comes first."""
    return sorted(checkpoint_folders(run_dir).values(), reverse=True,
                  key=lambda path: (step_of(path), path.name == "final", path.name))


def first_good(paths: Iterable[Path]) -> Checkpoint | None:
    """The first checkpoint that verifies, or None. Each bad one met on the way is named in a
    warning that says why."""
    for path in paths:
        try:
            return load_checkpoint(path)
        except (OSError, ValueError) as e:
            log.warning("checkpoint %s is passed over: %s", path.name, e)
    return None


def find_checkpoint(tag_or_path: str | os.PathLike[str] | None) -> Checkpoint:
    """The checkpoint that is meant by its path, by a run's tag or directory (the newest good one),
    or by either of these with @STEP or @NAME; None means the only run there is. FileNotFoundError
    if there is none, which says what there is; ValueError if it is damaged, and of the newest if
    all are."""
    text = os.fspath(find_run(None) if tag_or_path is None else tag_or_path)
    path = Path(text).expanduser()
    if (path / STATE_NAME).is_file() or path.absolute().parent.name == "checkpoints":
        return load_checkpoint(path)
    run, at, wanted = text.rpartition("@")
    whole = not at or path.exists() or text in list_runs()  # an @ may be part of a name
    run_dir = find_run(text if whole else run)
    there = list_checkpoints(run_dir)
    meant = [path for path in there if whole or wanted in (path.name, f"{step_of(path):.0f}")]
    if not meant:
        which = "" if whole else f" {wanted!r}, expected a step, final, or nothing for the newest"
        raise FileNotFoundError(f"{run_dir}: no checkpoint{which}; there are: "
                                f"{', '.join(path.name for path in there) or 'none yet; train it first'}")
    return first_good(meant) or load_checkpoint(meant[0])  # which says what is wrong with it


# ---- retention ----------------------------------------------------------------------------------

def prune(run_dir: Path, good_step: int, *, keep_last_k: int | None = None,
          keep_milestone_every: int | None = None) -> list[str]:
    """Delete the numbered checkpoints of a run that need not be kept, the oldest first; returns
    their names. `good_step`: of a checkpoint that this process has just written. `keep_last_k` None
    keeps all but those saved by time, of which it keeps the newest TIMED_KEPT.

    Only folders go whose seal is whole and of the step that the name says: a copy, a link or what
    another program wrote stays. What cannot be deleted stays with a warning."""
    numbered = list[tuple[int, str, Path]]()
    for name, path in checkpoint_folders(run_dir).items():
        with contextlib.suppress(OSError, ValueError):
            seal = read_seal(path)
            step = seal["step"]
            own = name in (f"checkpoint-{step}", f"checkpoint-{step}-shutdown") and not path.is_symlink()
            if own and step <= good_step and (keep_last_k is not None or seal.get("by_time")):
                numbered.append((step, name, path))
    deleted = []
    for step, name, path in sorted(numbered)[:-(keep_last_k or TIMED_KEPT)]:
        if step == good_step or (keep_milestone_every and step % keep_milestone_every == 0):
            continue
        try:
            delete_checkpoint(path)
            deleted.append(name)
        except OSError as e:
            log.warning("checkpoint %s could not be deleted and stays: %s", name, e)
    return deleted


# ---- saving while training goes on --------------------------------------------------------------

@dataclass(frozen=True)
class Outcome:
    """What came of a save, in words for people; what was written and how long that took; or the
    error with which the run must end."""

    message: str
    path: Path | None = None
    seconds: float = 0.0
    fatal: Exception | None = None


class Saver:
    """Writes checkpoints, one at a time, in a thread, and judges whether a run goes on
    where one could not be written. For rank 0.

    A full disk is no reason to lose a week, as long as an older good checkpoint is there. So an
    OSError lets the run go on, but for the third in a row, one where nothing good exists, and one
    of the save that was to be the last. Any other error is a bug, and ends the run at once.

    good: a checkpoint of the run known to be good, if there is one."""

    def __init__(self, good: Path | None) -> None:
        self._good, self._errors = good, 0  # in a row
        self._pool = ThreadPoolExecutor(1, "saver")
        self._flying: Future[Outcome] | None = None

    def start(self, write: Callable[[], Path], *, last: bool = False) -> None:
        """Let `write` save a checkpoint in the thread; it must use nothing that later steps change.
        What came of the save before must have been taken. `last`: the run ends after it, so that
        an error cannot be made good by a later save."""
        assert self._flying is None, "one save at a time"
        self._flying = self._pool.submit(self._save, write, last)

    def take(self, *, wait: bool = False) -> Outcome | None:
        """What came of the save that was started, once. None where there is none; and, unless it
        is to `wait`, where it has not ended."""
        flying = self._flying
        if flying is None or not (wait or flying.done()):
            return None
        self._flying = None
        return flying.result()

    def close(self) -> None:
        """Wait for the save in flight, and end the thread."""
        self._pool.shutdown()

    def _save(self, write: Callable[[], Path], last: bool) -> Outcome:
        began = time.perf_counter()
        try:
            path = write()
        except Exception as e:  # whatever it is, the loop must hear of it
            return self._judge(e, last) if isinstance(e, OSError) else Outcome(str(e), fatal=e)
        self._good, self._errors = path, 0
        seconds = time.perf_counter() - began
        return Outcome(f"saved {path} in {duration(seconds)}", path, seconds)

    def _judge(self, error: OSError, last: bool) -> Outcome:
        """Whether the run goes on though a checkpoint could not be written."""
        self._errors += 1
        told = error.strerror or str(error)
        kept = self._good.name if self._good and (self._good / STATE_NAME).is_file() else ""
        if kept and self._errors < MAX_ERRORS and not last:
            return Outcome(f"{told}; the run goes on, {kept} is kept (error {self._errors} of "
                           f"{MAX_ERRORS} in a row)")
        why = f"{kept} is kept" if kept else "no good checkpoint is left"
        told = f"{told}; {why}. Make room or mend the rights, then start the same command again"
        return Outcome(told, fatal=OSError(error.errno or errno.EIO, told))
