"""
Checkpoints: written so that a crash at any instant leaves a good one, read so that a corrupt one is
never used.

    RUN/checkpoints/checkpoint-1000/
      trainer_state.json              the seal: step, progress, size and checksum of every file; written last
      dataloader_state/lanes.json.gz  the V cursors; RUN/logs/cursors/ keeps the same bytes forever
      model/pytorch_model.bin         the bare module's state_dict
      model/config.json               builds the module
      optimizer.bin  scheduler.bin  rng/rank_0.pkl

**The seal.** A checkpoint counts only if its seal is valid. The seal holds a BLAKE2b checksum of
each file and one of itself, computed with zeros in place of that checksum:

    {"step": 7, "files": {...}, "checksum": "00000000"}  --BLAKE2b-->  9f3c..  -->  "checksum": "9f3c.."

**Writing.** All files go into a folder with a hidden name, each one fsynced, the seal last; one
rename gives the checkpoint its name. A good checkpoint of the same name and step is kept, because it
saw the same rows (a `final` or a shutdown's only if the new one has the same status); a corrupt one
is replaced. If a completed run is extended, its old `final` is renamed to the checkpoint of the step
it was saved at. So a good checkpoint exists at every instant.

**Reading.** `first_good` goes from the newest checkpoint to the oldest, and takes the first whose
every byte matches its checksum. States hold only tensors and plain values, and are loaded with
`weights_only=True`: nothing is executed.

**While training continues.** The loop waits only for a copy of the state (and, for the digest of the
next step, up to 5 s for its rows); one thread does the rest, unless the save is the last one.
The next save waits for the one before it, so a slow disk slows training down instead of filling
memory.

    step 100 | copy |  step 101  |  step 102  |  step 103  | ...      the loop; all collectives
                    | write, fsync, rename, prune |                   rank 0's thread: files only
                                                  ^ the next step's reduction carries the outcome

**Retention.** A save may delete older checkpoints: those that are neither at a step of `save_at` nor
among the last `keep_last_k` of the others. Without `keep_last_k`, it deletes only checkpoints saved
by the 30-minute timer, except the newest two. For `keep_last_k` = 2 and `save_at` = 400*, just after
step 700 was saved:

    checkpoint-  100   200   300   400   500   600   700   800(corrupt)   final
                  x     x     x     S     x     L     L     ?              F

x: deleted. S: kept by `save_at`, L: by `keep_last_k`, which counts only good checkpoints. The seal of
a checkpoint at a step of `save_at` says "kept", so later launches without `save_at` keep it, too.
Files of other programs, `final`, and checkpoints newer than the one just written are never deleted.
"""

import contextlib
import errno
import io
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanochat.cli import setting
from nanochat.common import (
    check_shape,
    differences,
    duration,
    fsync_dir,
    hash_bytes,
    hash_file,
    hash_json,
    parse_json,
    print0,
    read_json,
    reason_of,
)
from nanochat.model_code import changed_code, code_of
from nanochat.run_dir import (
    CHECKPOINT_NAME,
    OPTIMIZER_NAME,
    checkpoint_folders,
    delete_checkpoint,
    find_run,
    find_run_at,
    keep_cursors,
    made_of,
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
SCHEDULER_NAME = "scheduler.bin"
RNG_NAME = "rng/rank_{}.pkl"
TIMED_KEPT = 2  # checkpoints saved by the 30-minute timer
MAX_ERRORS = 3  # failed saves in a row that end the run
RETRY_S = 30.0  # for which a save is repeated before its error ends the run


# ---- settings ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SaveSettings:
    """saving"""

    save_every: int = setting(
        -1,
        "steps between checkpoints; -1: one every 30 minutes, keeping the newest two; 0: only at the end",
    )
    save_at: str | None = setting(
        None,
        "also save after these numbers of steps, and never delete these checkpoints: steps, N* for every Nth "
        "step, and log for 0, 1, 2, 4, 8, ..., separated by commas, such as 0,100,5000*",
        metavar="LIST",
        type=str,  # a single step in a file of flags is a number
    )
    sync_save: bool = setting(False, "pause training until each checkpoint is written")
    keep_last_k: int | None = setting(
        None,
        "keep only the newest N numbered checkpoints (default: all, but only the newest two of those saved every "
        "30 minutes)",
        least=1,
    )
    mirror_to: str | None = setting(
        None,
        "a second place for the run, a folder or a path in object storage: each checkpoint and the log are copied "
        "there in the background, and the same command on another machine resumes from it",
        metavar="PLACE",
    )

    def is_kept(self, step: int) -> bool:
        """Whether --save-at names a step. ValueError if --save-at is malformed."""
        singles, strides, is_log = self._save_points()
        is_power = step & (step - 1) == 0  # or 0
        return step in singles or _divides(strides, step) or (is_log and is_power)

    def number_of_saves(self, end: int, *, at_intervals: bool = True) -> int:
        """The number of steps below `end` at which --save-at or --save-every=N saves; without
        `at_intervals`, --save-at alone."""
        singles, strides, is_log = self._save_points()
        if at_intervals and self.save_every > 0:
            strides.add(self.save_every)
        if is_log:
            singles |= {0} | {2**i for i in range(end.bit_length())}
        alone = {step for step in singles if step < end and not _divides(strides, step)}
        return len(alone) + _number_of_multiples([*strides], end - 1)

    def number_kept(self, end: int, *, fork_step: int | None = None) -> int:
        """The number of checkpoints that a run keeps after `end` steps, "final" included. That of
        `fork_step` is the first one of a fork."""
        begin = 0 if fork_step is None else fork_step + 1
        saved = self.number_of_saves(end) - self.number_of_saves(begin)
        forever = self.number_of_saves(end, at_intervals=False)
        forever -= self.number_of_saves(begin, at_intervals=False)
        others = saved - forever
        if fork_step is not None:
            others += 1
        if self.save_every < 0:  # how many the timer saves is not known
            others += self.keep_last_k or TIMED_KEPT
        if self.keep_last_k is not None:
            others = min(others, self.keep_last_k)
        return forever + others + 1

    def _save_points(self) -> tuple[set[int], set[int], bool]:
        """(steps, the N of each N*, whether log is among them) of --save-at."""
        words = [] if self.save_at is None else self.save_at.split(",")
        for word in words:
            if re.fullmatch(r"log|[0-9]{1,12}|[1-9][0-9]{0,11}\*", word) is None:
                raise ValueError(
                    f"--save-at: got {self.save_at!r:.100}, expected steps, N* for every Nth step, or log, "
                    f"separated by commas, such as 0,100,5000*"
                )
        singles = {int(word) for word in words if word.isdecimal()}
        strides = {int(word[:-1]) for word in words if word.endswith("*")}
        return singles, strides, "log" in words


def _divides(strides: Iterable[int], step: int) -> bool:
    """Whether a step, 0 excepted, is a multiple of one of the `strides`."""
    return step > 0 and any(step % n == 0 for n in strides)


def _number_of_multiples(strides: list[int], last: int) -> int:
    """How many of the numbers 1 to `last` are multiples of one of the `strides`."""
    if last < 1 or not strides:
        return 0
    n, *others = strides
    # of the multiples n, 2 n, 3 n, ..., those that the others count, too
    shared = [math.lcm(n, other) // n for other in others]
    return last // n + _number_of_multiples(others, last) - _number_of_multiples(shared, last // n)


# ---- plain states --------------------------------------------------------------------------------


def to_host(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A contiguous copy of tensors in host memory, which later steps do not change. The memory is
    not pinned: PyTorch rounds pinned tensors up to powers of two and keeps them until the process
    ends."""
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        for name, tensor in state.items()
    }


def save_plain(state: object, name: str) -> bytes:
    """A plain state as the bytes of a file. TypeError, which begins with `name` and lists the
    types, for a state that `load_plain` would refuse.

    The bytes are built in memory, because the exception that a full disk raises must not interrupt
    torch.save's C++ writer; so a save holds a second copy of its largest file while it writes that
    file."""
    data = io.BytesIO()
    torch.save(state, data)
    data.seek(0)
    if kinds := torch.serialization.get_unsafe_globals_in_checkpoint(data):
        raise TypeError(
            f"{name}: a checkpoint holds tensors and plain values, got {', '.join(kinds)}"
        )
    return data.getvalue()  # no copy; a getbuffer() view can crash Python 3.12's garbage collector


def load_plain(file: Path) -> Any:
    """Load a file from `save_plain` without executing anything. Tensors are views of the file on
    the CPU, read on first use. ValueError for anything but tensors and plain values."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:
        # broken archives raise struct.error, EOFError, RuntimeError, and empty ones EINVAL
        # the disk failed, which says nothing about the file
        if isinstance(e, OSError) and e.errno != errno.EINVAL:
            raise
        raise ValueError(
            f"{file}: refused, because it is corrupt or holds something other than tensors and plain "
            f"values; use another checkpoint ({type(e).__name__})"
        ) from e


# ---- writing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    """Everything that a checkpoint stores, in host memory. All ranks collect it together, between
    steps (`Training.collect`, for `Saves.save` and scripts.replay); the saver's thread on rank 0
    writes it while training continues, without any collective. So its values are copies, which no
    later step changes. `load_checkpoint` opens what was written."""

    step: int  # steps done
    states: Mapping[str, Any]  # {file name: tensors and plain values}; see `to_host`
    model_config: dict[str, Any]
    cursors: list[dict[str, Any]]  # the JSON states of all lanes, in order
    seal: dict[str, Any]  # JSON: further fields of the seal, which names no field twice

    def write(self, run_dir: Path, name: str) -> Path:
        """Write RUN/checkpoints/<name> and RUN/logs/cursors/step-<step>.json.gz, and return the
        checkpoint's path. In the saver's thread, while training continues; repeated after an error.
        A good checkpoint of that name and step is kept as it is, unless it is a stop that has become
        a halt. OSError with the reason if writing fails: older checkpoints stay unchanged, and no
        partial checkpoint is left behind. TypeError for a state that is not plain."""
        assert name in (f"checkpoint-{self.step}", f"checkpoint-{self.step}-shutdown", "final"), (
            name
        )
        head = {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "architecture_hash": hash_json(self.model_config),
            **self.seal,
        }
        packed = pack_cursors(self.step, self.cursors)
        contents = {
            CURSORS_NAME: packed,
            MODEL_CONFIG_NAME: json_bytes(self.model_config),
            **self.states,
        }
        target = run_dir / "checkpoints" / name
        try:
            keep_cursors(run_dir, self.step, packed)
            remake_folder(run_dir, "checkpoints")
            write_sealed(target, head, contents)
        except OSError as e:
            raise OSError(
                e.errno or errno.EIO,
                f"checkpoint {name} could not be written to "
                f"{target.parent}: {reason_of(e)}; older checkpoints are untouched",
            ) from e
        return target


def write_sealed(target: Path, head: Mapping[str, Any], contents: Mapping[str, Any]) -> None:
    """Write and seal a checkpoint, unless a good one of that name and step exists that need not give
    way. `head`: the fields of the seal other than its checksums. `contents`: bytes or a plain state
    for each relative name. An error leaves no partial file."""
    try:
        existing = verify_checkpoint(target)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        # another OSError may hide a good checkpoint
        existing = None
    # where a good checkpoint goes that gives its place to this one: a `final` from before the run was
    # extended, or the stop at a step that is now known to be the run's halt
    place_of_existing = None
    if existing is not None:
        numbered = target.with_name(f"checkpoint-{existing['step']}")
        is_same_step = existing["step"] == head["step"]
        is_same_status = existing.get("status") == head.get("status")
        if is_same_step and (is_same_status or target == numbered):
            log.info("%s already exists and is good; it is kept", target)
            return
        place_of_existing = numbered
    temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    try:
        temporary.mkdir()
        files = {name: write_file(temporary, name, content) for name, content in contents.items()}
        seal = {**head, "files": files, "checksum": NO_CHECKSUM}
        write_file(
            temporary, STATE_NAME, json_bytes({**seal, "checksum": hash_bytes(json_bytes(seal))})
        )
        for folder in sorted({(temporary / name).parent for name in (*files, STATE_NAME)}):
            fsync_dir(folder)
        if place_of_existing is not None:
            if os.path.lexists(place_of_existing):
                delete_checkpoint(place_of_existing)
            os.rename(target, place_of_existing)
        elif os.path.lexists(target):
            delete_checkpoint(target)
        os.rename(temporary, target)
    except BaseException:
        if temporary.exists():
            remove_tree(temporary)
        raise
    # the new name, and those of the folders above it, up to the base directory
    for above in target.parents[:4]:
        fsync_dir(above)


def write_file(folder: Path, name: str, content: object) -> dict[str, Any]:
    """Write bytes, a plain state or the copy of a file to a new file of a checkpoint, with an fsync.
    Returns its record for the seal."""
    if isinstance(content, Path):
        return copy_file(folder, name, content)
    data = content if isinstance(content, bytes) else save_plain(content, name)
    (folder / name).parent.mkdir(exist_ok=True)
    with open(folder / name, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": len(data), "blake2b": hash_bytes(data)}


def copy_file(folder: Path, name: str, source: Path) -> dict[str, Any]:
    """Link a file of another checkpoint, or copy it. Returns its record for the seal."""
    target = folder / name
    target.parent.mkdir(exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)
        with open(target, "rb") as file:
            os.fsync(file.fileno())
    return {"bytes": target.stat().st_size, "blake2b": hash_file(target)}


def json_bytes(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def adopt(checkpoint: "Checkpoint", run_dir: Path) -> None:
    """Write another run's checkpoint, whose seal and cursors may have been edited, as the first one
    of a run. Its states are hard links where the file system allows it, because no file of a
    checkpoint is ever written twice. OSError if writing fails."""
    head = {
        name: value for name, value in checkpoint.seal.items() if name not in ("files", "checksum")
    }
    packed = pack_cursors(checkpoint.step, checkpoint.cursors)
    contents: dict[str, Any] = {name: checkpoint.path / name for name in checkpoint.seal["files"]}
    contents |= {CURSORS_NAME: packed, MODEL_CONFIG_NAME: json_bytes(checkpoint.model_config)}
    keep_cursors(run_dir, checkpoint.step, packed)
    write_sealed(run_dir / "checkpoints" / f"checkpoint-{checkpoint.step}", head, contents)


# ---- verifying -----------------------------------------------------------------------------------


def read_seal(path: Path) -> dict[str, Any]:
    """The seal of the checkpoint `path`, with a verified checksum and a well-formed list of files.
    FileNotFoundError if it is missing, ValueError if it is corrupt or has a different format; both
    name the file."""
    file = path / STATE_NAME
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing, so this checkpoint was never finished")
    raw = file.read_bytes()
    seal = parse_json(raw, f"{file}: corrupt", {"checksum": str, "step": int, "files": dict})
    checksum = seal["checksum"]
    written = checksum.encode(errors="surrogatepass")
    if hash_bytes(raw.replace(written, NO_CHECKSUM.encode())) != checksum:
        raise ValueError(f"{file}: corrupt (its bytes do not match the checksum in it)")
    if seal.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{file}: format {seal.get('format_version')!r:.20}, this code reads {FORMAT_VERSION}; use "
            f"the code that wrote it"
        )
    for name, record in seal["files"].items():
        check_shape(record, {"bytes": int, "blake2b": str}, f"{file}: the checksum of {name!r}")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(
                f"{file}: not written by this program ({name!r} is outside the checkpoint)"
            )
    return seal


def check_file(path: Path, name: str, record: Mapping[str, Any]) -> None:
    """Compare one file of a checkpoint with its record in the seal. FileNotFoundError for a missing
    file, ValueError for a truncated or corrupt one; the message begins with the file's path."""
    file = path / name
    if not file.is_file():
        raise FileNotFoundError(f"{file}: missing")
    if (size := file.stat().st_size) != record["bytes"]:
        raise ValueError(
            f"{file}: corrupt ({size:,} bytes on disk, {STATE_NAME} says {record['bytes']:,})"
        )
    if hash_file(file) != record["blake2b"]:
        raise ValueError(f"{file}: corrupt (its bytes do not match the checksum in {STATE_NAME})")


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Read a whole checkpoint and return its seal. Raises the errors of `read_seal` and
    `check_file`."""
    seal = read_seal(path)
    for name, record in seal["files"].items():
        check_file(path, name, record)
    return seal


# ---- opening -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: its small files in memory, its states on disk until they are
    loaded."""

    path: Path
    seal: dict[str, Any]  # the whole seal
    model_config: dict[str, Any]
    cursors: list[dict[str, Any]]  # of all V lanes, in order

    @property
    def step(self) -> int:
        return self.seal["step"]

    def load(self, name: str) -> Any:
        """The state in one of its files. ValueError if the seal does not list the file, or if it
        holds anything but tensors and plain values."""
        if name not in self.seal["files"]:
            raise ValueError(
                f"{self.path / STATE_NAME}: does not list {name}; use another checkpoint"
            )
        return load_plain(self.path / name)

    def model_state(self) -> dict[str, torch.Tensor]:
        return self.load(MODEL_NAME)

    def load_weights(self, model: torch.nn.Module) -> list[str]:
        """Copy the saved weights into a model. ValueError, before any change, if names or shapes
        differ, because the model's code was edited since the save. Returns the files of this code that
        differ in anything else, and prints a note about them."""
        saved = self.model_state()
        ours = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        theirs = {name: tuple(tensor.shape) for name, tensor in saved.items()}
        differing = differences(ours, theirs, missing="missing")
        if differing:
            name, in_model, in_checkpoint = differing[0]
            raise ValueError(
                f"{self.path}: its weights do not fit the model of this code: {name} is "
                f"{in_checkpoint} in the checkpoint and {in_model} in the "
                f"model, and {len(differing) - 1} others differ; restore the code that trained it, or "
                f"start a new run with --model-tag=NAME"
            )
        model.load_state_dict(saved)
        changed = changed_code(self.seal.get("model_code", {}), code_of(model))
        if changed:
            print0(
                f"note: since {self.path} was saved, {', '.join(changed)} changed; if the model computes "
                f"something else now, these weights are not for it"
            )
        return changed

    def optimizer_state(self) -> dict[str, Any]:
        return self.load(OPTIMIZER_NAME)

    def check_trained(self) -> None:
        """ValueError if training cannot continue, because its weights are `made_of` others."""
        weights = made_of(self.seal)
        if weights:
            run = self.path.absolute().parents[1].name
            raise ValueError(
                f"{self.path}: its weights are {weights}, without the state of an optimizer, so training "
                f"cannot continue; start a new run from them with --init-from={run} --model-tag=NAME"
            )

    def check_architecture(self, model_config: dict[str, Any]) -> None:
        """ValueError with a diff if `model_config` differs from the saved one. Called before
        weights are loaded."""
        if hash_json(model_config) != self.seal["architecture_hash"]:
            lines = [
                f"{name}: the checkpoint has {saved!r}, the model has {ours!r}"
                for name, saved, ours in differences(self.model_config, model_config)
            ]
            raise ValueError(
                f"{self.path}: the checkpoint has a different architecture; no weights were loaded. Use "
                "the same settings, or --model-tag NAME for a new run.\n  " + "\n  ".join(lines)
            )

    def check_tokenizer(self, fingerprint: str) -> None:
        """ValueError if the checkpoint was trained with a different tokenizer, as its fingerprint
        shows."""
        expected = self.seal.get("tokenizer_fingerprint", fingerprint)
        if fingerprint != expected:
            raise ValueError(
                f"{self.path}: trained with the tokenizer {expected}, got {fingerprint}; put the "
                "run's tokenizer/ back, or use --model-tag NAME for a new run"
            )


def load_checkpoint(path: Path) -> Checkpoint:
    """Verify and open the checkpoint at `path`. Raises the errors of `verify_checkpoint`."""
    return open_verified(path, verify_checkpoint(path))


def open_verified(path: Path, seal: dict[str, Any]) -> Checkpoint:
    """Read the small files of a verified checkpoint. ValueError if they contradict each other."""
    step, cursors = read_cursors(path / CURSORS_NAME)
    if step != seal["step"]:
        raise ValueError(
            f"{path / CURSORS_NAME}: holds cursors for step {step}, but {STATE_NAME} is for step "
            f"{seal['step']}"
        )
    return Checkpoint(path, seal, read_json(path / MODEL_CONFIG_NAME, dict), cursors)


def step_of(path: Path) -> float:
    """The step in a checkpoint's seal, or in its name if the seal cannot be read, otherwise
    infinity."""
    try:
        return read_seal(path)["step"]
    except (OSError, ValueError):
        match = CHECKPOINT_NAME.fullmatch(path.name)
        return float((match and match["step"]) or "inf")


def list_checkpoints(run_dir: Path) -> list[Path]:
    """All checkpoints of a run, good or corrupt, newest step first; at the same step, `final` comes
    first."""
    return sorted(
        checkpoint_folders(run_dir).values(),
        reverse=True,
        key=lambda path: (step_of(path), path.name == "final", path.name),
    )


def first_good(paths: Iterable[Path]) -> Checkpoint | None:
    """The first checkpoint that verifies; None if there are no paths. Each one before it is named
    in a warning with the reason. ValueError, with all reasons, if there are paths and every
    checkpoint is corrupt. OSError if the disk fails: that is not corruption, and an older
    checkpoint is no substitute for one that may be good."""
    reasons = []
    for path in paths:
        try:
            return load_checkpoint(path)
        except (FileNotFoundError, NotADirectoryError, ValueError) as e:
            log.warning("%s is skipped: %s", path.name, e)
            reasons.append(str(e))
        except OSError as e:
            raise OSError(
                e.errno or errno.EIO,
                f"{path}: cannot be read ({reason_of(e)}); nothing was changed. Fix the disk or the "
                f"permissions, then run the same command again",
            ) from e
    if reasons:
        raise ValueError(f"no checkpoint can be used: {'; '.join(reasons)}")
    return None


def look_for_good(list_paths: Callable[[], list[Path]]) -> Checkpoint | None:
    """`first_good` of the paths that `list_paths` returns, of a run that may be training: if none of
    them is good, they are listed again, because the run may have saved and deleted meanwhile."""
    paths = list_paths()
    while True:
        try:
            return first_good(paths)
        except ValueError:
            before = paths
            paths = list_paths()
            if paths == before:
                raise


def find_checkpoint(tag_or_path: str | os.PathLike[str] | None) -> Checkpoint:
    """The checkpoint with this path, or the newest good one of the run with this tag or directory;
    @STEP or @NAME after a run selects one. None stands for the only run. FileNotFoundError, which
    lists what exists, if nothing matches; ValueError if every match is corrupt, with the
    reasons."""
    text = os.fspath(find_run(None) if tag_or_path is None else tag_or_path)
    path = Path(text).expanduser()
    is_in_run = path.absolute().parent.name == "checkpoints"
    if (path / STATE_NAME).is_file() or (is_in_run and path.exists()):
        return load_checkpoint(path)
    run_dir, selector = find_run_at(text)

    def matches() -> list[Path]:
        return [
            path
            for path in list_checkpoints(run_dir)
            if selector is None or selector in (path.name, f"{step_of(path):.0f}")
        ]

    checkpoint = look_for_good(matches)
    if checkpoint is None:
        which = ""
        if selector is not None:
            which = f" {selector!r}, expected a step, final, or nothing for the newest"
        existing = ", ".join(path.name for path in list_checkpoints(run_dir))
        raise FileNotFoundError(
            f"{run_dir}: no checkpoint{which}; existing checkpoints: "
            f"{existing or 'none yet; train it first'}"
        )
    return checkpoint


# ---- retention -----------------------------------------------------------------------------------


def prune(
    run_dir: Path,
    good_step: int,
    known: dict[str, bool],
    settings: SaveSettings,
) -> list[str]:
    """Delete the numbered checkpoints of a run that retention does not keep, oldest first. Returns
    their names. `good_step`: the step of a checkpoint that this process has just written. `known`:
    {name: whether the checkpoint is good}; others are verified, which reads them whole, before they
    count, and added. Corrupt ones and those that are kept forever do not count. Without keep_last_k
    in `settings`, only timed checkpoints are deleted, except the newest TIMED_KEPT of them.

    Deletes only folders whose seal is valid and is for the step in their name: a copy, a link or a
    file of another program stays. A checkpoint that cannot be deleted stays, with a warning."""
    numbered = list[tuple[int, str, Path]]()
    for name, path in checkpoint_folders(run_dir).items():
        with contextlib.suppress(OSError, ValueError):
            seal = read_seal(path)
            step = seal["step"]
            own = (
                name in (f"checkpoint-{step}", f"checkpoint-{step}-shutdown")
                and not path.is_symlink()
            )
            is_kept = seal.get("kept") or settings.is_kept(step)
            may_go = settings.keep_last_k is not None or seal.get("by_time")
            if own and step <= good_step and may_go and not is_kept:
                numbered.append((step, name, path))
    older = sorted(numbered)
    kept = 0
    while older and kept < (settings.keep_last_k or TIMED_KEPT):
        _, name, path = older.pop()
        if name not in known:
            known[name] = True
            try:
                verify_checkpoint(path)
            except (OSError, ValueError) as e:
                known[name] = False
                log.warning("%s is kept, but does not count as a good checkpoint: %s", name, e)
        kept += known[name]
    deleted = []
    for step, name, path in older:
        if step == good_step:
            continue
        try:
            delete_checkpoint(path)
            deleted.append(name)
        except OSError as e:
            log.warning("%s could not be deleted: %s", name, e)
    return deleted


# ---- saving while training continues -------------------------------------------------------------


@dataclass(frozen=True)
class SaveOutcome:
    """The outcome of a save: a message, plus the checkpoint and the duration, or the error that
    must end the run, or nothing if training continues after an error."""

    message: str
    path: Path | None = None
    seconds: float = 0.0
    fatal: Exception | None = None


class Saver:
    """Writes checkpoints on rank 0, one at a time, in a thread, and decides whether the run
    continues after an error.

    A full disk is no reason to lose a week while an older good checkpoint exists. So the run
    survives an OSError, unless it is the third in a row, no good checkpoint exists, or it is in the
    run's last save. A save whose error would end the run is first repeated for RETRY_S. Any other
    error is a bug, and ends the run at once. `good`: a checkpoint of the run that is known to be
    good, if one exists."""

    def __init__(self, good: Path | None) -> None:
        self._good = good
        self._errors = 0  # in a row
        self._pool = ThreadPoolExecutor(1, "saver")
        self._pending: Future[SaveOutcome] | None = None

    def start(self, write: Callable[[], Path], *, last: bool = False) -> None:
        """Have `write` save a checkpoint in the thread; later steps must not change what it uses.
        `take` must have returned the outcome of the previous save. `last`: the run ends after this
        save, so no later one can repair an error."""
        assert self._pending is None, "one save at a time"
        self._pending = self._pool.submit(self._save, write, last)

    def take(self, *, wait: bool = False) -> SaveOutcome | None:
        """The outcome of the save in progress; each outcome is returned only once. None if no save
        is in progress, or if it has not finished and `wait` is off."""
        pending = self._pending
        if pending is None or not (wait or pending.done()):
            return None
        self._pending = None
        return pending.result()

    def close(self) -> None:
        """Wait for the pending save, and end the thread."""
        self._pool.shutdown()

    def _save(self, write: Callable[[], Path], last: bool) -> SaveOutcome:
        """Write one checkpoint, repeatedly if its error would end the run but may pass. Every error
        becomes an outcome, so that the loop sees it."""
        began = time.perf_counter()
        outcome = self._try(write, last, began)
        while isinstance(outcome.fatal, OSError) and not isinstance(
            outcome.fatal, FileNotFoundError
        ):
            if time.perf_counter() - began >= RETRY_S:
                break
            time.sleep(1.0)
            outcome = self._try(write, last, began)
        self._errors = self._errors + 1 if outcome.path is None else 0
        return outcome

    def _try(self, write: Callable[[], Path], last: bool, began: float) -> SaveOutcome:
        """Write one checkpoint once. `began`: when the save did."""
        try:
            self._good = write()
        except OSError as e:
            number = self._errors + 1
            reason = reason_of(e)
            kept = self._good.name if self._good and (self._good / STATE_NAME).is_file() else ""
            if kept and number < MAX_ERRORS and not last:
                return SaveOutcome(
                    f"{reason}; training continues, {kept} is kept (error {number} of {MAX_ERRORS} in a "
                    f"row)"
                )
            reason = (
                f"{reason}; {f'{kept} is kept' if kept else 'no good checkpoint is left'}. Make room or fix the "
                f"permissions, then run the same command again (without --resume)"
            )
            return SaveOutcome(reason, fatal=OSError(e.errno or errno.EIO, reason))
        except Exception as e:
            return SaveOutcome(str(e), fatal=e)
        seconds = time.perf_counter() - began
        return SaveOutcome(f"saved {self._good} in {duration(seconds)}", self._good, seconds)
