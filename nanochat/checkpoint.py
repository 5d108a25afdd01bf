"""
Checkpoints: written so that a crash at any instant leaves a good one, read so that a bad one is never believed.

    RUN/checkpoints/checkpoint-1000/
      trainer_state.json              step, what the trainer adds, size and checksum of every file below; written last
      dataloader_state/lanes.json.gz  the V cursors; the same bytes stay for ever in RUN/logs/cursors/
      model/pytorch_model.bin         the bare module's state_dict
      model/config.json               what builds the module
      optimizer.bin  scheduler.bin  rng/rank_0.pkl

**Writing.** A sealed folder (nanochat/sealed.py) under a temporary name, trainer_state.json its seal, then one rename:

    .tmp-final-77/...   --fsync-->   final/   --fsync of checkpoints/-->   done       (names: see nanochat/run_dir.py)

**Reading.** The seal tells of any changed byte. `newest_good` goes from the newest checkpoint to the oldest and takes
the first that is whole. Sizes alone would be quicker to check, and would believe a flipped bit.

torch files hold plain states (nanochat/plain_state.py): loading executes nothing, and reads no file that is not sealed.

**Names for people.** `d12` is the newest good checkpoint of the run d12, `d12@1000` that of step 1000, `d12@final` its
end; a path to a run directory does in place of a tag, and a path to a checkpoint means that one.

Saving calls no collective, and touches no device when its states came from `to_host`: it may run in a thread.
"""

import contextlib
import errno
import logging
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanochat.common import get_compute_dtype, hash_json, read_json
from nanochat.plain_state import load_plain, save_plain
from nanochat.plain_state import to_host as to_host
from nanochat.run_dir import (
    CHECKPOINT_NAME,
    checkpoint_folders,
    clean_stale,
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
from nanochat.sealed import SEAL_KEYS, SEAL_NAME, SealedFolder, check_file, read_seal

if TYPE_CHECKING:
    from nanochat.gpt import GPT
    from nanochat.tokenizer import RustBPETokenizer

log = logging.getLogger(__name__)

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
    """A checkpoint's trainer_state.json, its own checksum verified. Errors as in `sealed.read_seal`; ValueError also
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
