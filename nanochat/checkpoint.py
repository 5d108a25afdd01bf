"""
Checkpoints: written so that a crash at any instant leaves a good one, read so that a bad one is never believed.

    RUN/checkpoints/checkpoint-1000/
      trainer_state.json              step, what the trainer adds, size and checksum of every file below; written last
      dataloader_state/lanes.json.gz  the V cursors; the same bytes stay for ever in RUN/logs/cursors/
      model/pytorch_model.bin         the bare module's state_dict
      model/config.json               what builds the module
      optimizer.bin  scheduler.bin  rng/rank_0.pkl

**Writing.** Every file is fsynced in a temporary folder, trainer_state.json last, then the folders, then one rename:

    .tmp-final-77/...   --fsync-->   final/   --fsync of checkpoints/-->   done       (names: see nanochat/run_dir.py)

**Reading.** trainer_state.json holds the BLAKE2b of every other file, and of itself (taken with zeros in the checksum's
place), so any changed byte is found and named. `newest_good` goes from the newest checkpoint to the oldest and
takes the first that is whole. Sizes alone would be quicker to check, and would believe a flipped bit.

torch files hold tensors and plain values and are read with `weights_only=True`: loading executes nothing.

Saving calls no collective, and touches no device when its states came from `to_host`: it may run in a thread.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

import torch

from nanochat.common import fsync_dir, get_compute_dtype, hash_bytes, hash_file, hash_json, read_json
from nanochat.run_dir import (
    CHECKPOINT_NAME,
    checkpoint_folders,
    clean_stale,
    diff_lines,
    find_run,
    keep_cursors,
    pack_cursors,
    put_in_place,
    read_cursors,
    temporary_path,
)

if TYPE_CHECKING:
    from nanochat.gpt import GPT
    from nanochat.tokenizer import RustBPETokenizer

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
STATE_NAME = "trainer_state.json"
CURSORS_NAME = "dataloader_state/lanes.json.gz"
MODEL_NAME, MODEL_CONFIG_NAME = "model/pytorch_model.bin", "model/config.json"
OPTIMIZER_NAME, SCHEDULER_NAME = "optimizer.bin", "scheduler.bin"
RESERVED = ("format_version", "step", "architecture_hash", "files", "checksum")
NO_CHECKSUM = "0" * 32


def architecture_hash(model_config: dict[str, Any]) -> str:
    """The fingerprint of a model's configuration, kept in trainer_state.json and compared before weights are loaded."""
    return hash_json(model_config)


def to_host(value: Any) -> Any:
    """A deep copy of a state (dicts, lists, tuples, tensors, plain values) with every tensor in host memory.

    Later steps do not change it, so it may be written while training goes on. TypeError, naming the place, for a value
    that could not be loaded again without executing code.
    """
    return _map_tensors(value, lambda t: t.detach().to("cpu", copy=True).contiguous(), "state")


def _map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor], where: str) -> Any:
    """Rebuild a state from plain containers, `function` applied to its tensors; TypeError for anything not plain."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {k: _map_tensors(v, function, f"{where}[{k!r}]") for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(v, function, f"{where}[{i}]") for i, v in enumerate(value))
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    raise TypeError(f"{where}: a checkpoint holds tensors and plain values, got {type(value).__name__}")


# ---- writing --------------------------------------------------------------------------------------------------------

class _HashedFile:
    """A write-only file that sums up what goes through it. An OSError is kept until `finish` instead of raised at once:
    torch.save's C++ writer must not be left by an exception halfway."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._hash = hashlib.blake2b(digest_size=16)
        self._bytes = 0
        self._error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write and hash; the first error is kept for `finish`, and what comes after it is dropped."""
        if self._error is None:
            try:
                self._raw.write(data)
            except OSError as e:
                self._error = e
        self._hash.update(data)
        num_bytes = memoryview(data).nbytes
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


class _Folder:
    """A folder being filled; remembers size and checksum of each file in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[str, dict[str, Any]] = {}
        path.mkdir()

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[_HashedFile]:
        (self.path / name).parent.mkdir(exist_ok=True)
        with open(self.path / name, "xb") as raw:
            file = _HashedFile(raw)
            yield file
            self.files[name] = file.finish()

    def put_bytes(self, name: str, data: bytes) -> None:
        with self._open(name) as f:
            f.write(data)

    def put_state(self, name: str, state: Any) -> None:
        with self._open(name) as f:
            plain = _map_tensors(state, torch.Tensor.detach, name)
            torch.save(plain, cast(IO[bytes], f))  # it needs no more than write and flush

    def sync(self) -> None:
        """Make the names of all files durable."""
        for folder in {(self.path / name).parent for name in self.files} | {self.path}:
            fsync_dir(folder)


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _state_bytes(step: int, trainer_state: dict[str, Any], model_config: dict[str, Any],
                 files: dict[str, dict[str, Any]]) -> bytes:
    """trainer_state.json whole: its checksum is that of its own bytes with zeros in the checksum's place."""
    state = {"format_version": FORMAT_VERSION, "step": step, **trainer_state,
             "architecture_hash": architecture_hash(model_config), "files": files, "checksum": NO_CHECKSUM}
    blank = _json_bytes(state)
    return _json_bytes({**state, "checksum": hash_bytes(blank)})


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
        folder.put_bytes(MODEL_CONFIG_NAME, _json_bytes(model_config))
        folder.put_state(MODEL_NAME, model_state)
        folder.put_state(OPTIMIZER_NAME, optimizer_state)
        folder.put_state(SCHEDULER_NAME, scheduler_state)
        for rank, state in rng_state.items():
            folder.put_state(f"rng/rank_{rank}.pkl", state)
        folder.put_bytes(STATE_NAME, _state_bytes(step, trainer_state, model_config, folder.files))
        folder.sync()
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


# ---- finding and verifying ------------------------------------------------------------------------------------------

def _read_state(path: Path) -> dict[str, Any]:
    """A checkpoint's trainer_state.json, its own checksum verified."""
    file = path / STATE_NAME
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing, so this checkpoint was never finished")
    raw = file.read_bytes()
    try:
        state = json.loads(raw)
        checksum = state["checksum"].encode()
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise ValueError(f"{file}: torn or rotten (not a whole JSON object with a checksum)") from e
    blank = raw.replace(checksum, NO_CHECKSUM.encode()) if checksum else raw
    if hash_bytes(blank).encode() != checksum:
        raise ValueError(f"{file}: rotten (its bytes do not have the checksum it states)")
    if state["format_version"] != FORMAT_VERSION:
        raise ValueError(f"{file}: format {state['format_version']}, this version reads {FORMAT_VERSION}")
    return state


def verify_checkpoint(path: Path) -> None:
    """Read a whole checkpoint and compare sizes and checksums. Raises FileNotFoundError for a missing file and
    ValueError for a torn or rotten one; the message begins with the file's path."""
    for name, expected in _read_state(path)["files"].items():
        file = path / name
        if not file.is_file():
            raise FileNotFoundError(f"{file}: missing")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise ValueError(f"{file}: torn ({size:,} bytes on disk, {expected['bytes']:,} were written)")
        if hash_file(file) != expected["blake2b"]:
            raise ValueError(f"{file}: rotten (its bytes do not have the checksum in {STATE_NAME})")


def list_checkpoints(run_dir: Path) -> list[Path]:
    """All checkpoints of a run, good or not, newest step first; of one step `final` comes first.

    The step is that in trainer_state.json, or in the name where that file is unreadable. Includes a checkpoint that a
    crash left aside.
    """
    found: list[tuple[float, bool, str, Path]] = []
    for name, path in checkpoint_folders(run_dir).items():
        match = CHECKPOINT_NAME.fullmatch(name)
        try:
            step = float(_read_state(path)["step"])
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

def _load_plain(file: Path) -> Any:
    """What torch.save wrote, on the CPU, executing nothing. ValueError for anything but tensors and plain values."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as e:  # broken archives raise struct.error, EOFError, RuntimeError, UnpicklingError, ...
        raise ValueError(f"{file}: refused, it holds something other than tensors and plain values, or is broken; "
                         f"use another checkpoint ({type(e).__name__})") from e


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. The small parts are read, the states are read when asked for, on the CPU."""
    path: Path
    step: int
    trainer_state: dict[str, Any]  # what the trainer gave to save_checkpoint, with step and architecture_hash
    model_config: dict[str, Any]
    cursors: list[dict[str, Any]]  # of all V lanes, in order

    def model_state(self) -> dict[str, torch.Tensor]:
        return _load_plain(self.path / MODEL_NAME)

    def optimizer_state(self) -> Any:
        return _load_plain(self.path / OPTIMIZER_NAME)

    def scheduler_state(self) -> Any:
        return _load_plain(self.path / SCHEDULER_NAME)

    def rng_state(self, rank: int) -> Any:
        """The state that `rank` saved, or None if that run had no such rank."""
        file = self.path / "rng" / f"rank_{rank}.pkl"
        return _load_plain(file) if file.is_file() else None

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
    state = _read_state(path)
    kept = {k: v for k, v in state.items() if k not in ("format_version", "files", "checksum")}
    step, cursors = read_cursors(path / CURSORS_NAME)
    if step != state["step"]:
        raise ValueError(f"{path / CURSORS_NAME}: of step {step}, {STATE_NAME} is of step {state['step']}")
    return Checkpoint(path=path, step=step, trainer_state=kept, model_config=read_json(path / MODEL_CONFIG_NAME),
                      cursors=cursors)


# ---- a model from a checkpoint alone --------------------------------------------------------------------------------

def find_checkpoint(tag_or_path: str | os.PathLike[str]) -> Path:
    """The checkpoint meant by a checkpoint's path, or the newest good one of the run meant by a tag or a run directory.
    FileNotFoundError if there is none."""
    path = Path(tag_or_path).expanduser()
    if (path / STATE_NAME).is_file() or path.absolute().parent.name == "checkpoints":
        return path
    run_dir = find_run(tag_or_path)
    found = newest_good(run_dir)
    if found is None:
        raise FileNotFoundError(f"{run_dir}: no good checkpoint yet; train it first")
    return found


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
    checkpoint = load_checkpoint(find_checkpoint(path))
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
