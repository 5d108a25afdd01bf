"""The reader of a run: everything that its directory records, for commands that report on runs.

    config.json            .config, .horizon         logs/train.jsonl    .steps, .events, .launches, .outcome
    data_manifest.json     .manifests, .files()      logs/cursors/       .cursor_files, .nearest_cursors(), .ledger()
    eval.json              .evaluation               checkpoints/        .newest_checkpoint()
    plan.json              .phases                   .run_state.json     .status()

Each part is read and checked on first use, so a command needs only the files that it uses. Reading
changes nothing. Parts that need Arrow import it when they are used, so `scripts.status`, which
clusters call in loops, starts fast.
"""

import contextlib
import json
import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from nanochat.common import check_shape, is_remote, read_json
from nanochat.run_dir import (
    CONFIG_NAME,
    PLAN_NAME,
    RowLosses,
    checkpoint_folders,
    cursor_files,
    is_step,
    iter_log,
    read_config,
    read_cursors,
)
from nanochat.run_owner import exit_code, liveness
from nanochat.run_state import STATE_NAME, heartbeat_age_s, read_state

log = logging.getLogger(__name__)

# shapes of lines of the log (see common.parse_json): a step, and some events
STEP = {
    "step": int,
    "digest": str,
    "tokens": int,
    **dict.fromkeys(("tokens_per_s", "step_s", "wait_s"), float),
    **dict.fromkeys(("loss", "smooth_loss", "lr", "grad_norm", "mfu"), float | None),
}
EVENTS = {
    "saved": {"step": int},
    "val": {"step": int, "bpb": float | None},
    "started": {"step": int, "world_size": int, "device": str, "torch": str},
    "dropped": {"step": int, "bucket": str, "lanes": int},
}
ENDS = ("completed", "stopped", "halted", "failed")  # events that end a launch
EVALUATION = {"step": int, "train_bpb": dict, "samples": dict}
Table = list[tuple[Any, ...]]


@dataclass
class Launch:
    """One launch of a run, built from its lines in the log."""

    started: dict[str, Any]  # its first event; older logs lack some fields
    first: int  # number of steps done when it began
    last: int  # number of steps done when it ended
    # one of ENDS, "killed" (another launch began), or "" if the last launch has not ended
    end: str = ""
    reason: str = ""  # of the end
    events: list[dict[str, Any]] = field(default_factory=list)  # all other events

    @property
    def world_size(self) -> int:
        return self.started["world_size"]


class RunReader:
    """Everything that the directory of a run records. Every property raises ValueError, which names
    the file, if its part is corrupt."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.name = run_dir, run_dir.name
        self.log_path = run_dir / "logs" / "train.jsonl"

    # ---- settings and files ----

    @cached_property
    def config(self) -> dict[str, Any]:
        """The settings of the run, with the numbers that follow from them in "derived".
        FileNotFoundError if the run never started."""
        config, path = read_config(self.run_dir), self.run_dir / CONFIG_NAME
        derived = config.setdefault("derived", {})
        check_shape(config, {"max_seq_len": int, "derived": dict}, path)
        check_shape(derived, dict.fromkeys(derived, float | None), f"{path}: derived")
        return config

    @property
    def typed(self) -> list[str]:
        """The names of the settings that the command line of the first launch changed."""
        return (self.launches[0].started.get("typed") if self.launches else None) or []

    @cached_property
    def manifests(self) -> dict[str, dict[str, Any]]:
        """{split: {bucket: manifest}} of the pinned files, empty if the run has pinned none."""
        from nanochat.sources import DATA_MANIFEST, read_manifests

        return read_manifests(self.run_dir / DATA_MANIFEST)

    def listed(self) -> dict[str, list[int] | None]:
        """{file: numbers of the documents that --without-documents listed when the run began, or
        None for all}."""
        return {
            name: rows
            for manifest in self.manifests.get("train", {}).values()
            for name, rows in manifest.get("without", {}).items()
        }

    def files(self) -> Table:
        """(bucket and split, folder, number, bytes, documents) of the files that the run reads.
        Bytes are those of the user's own files."""
        return [
            (
                f"{bucket} ({split})",
                m["root"],
                len(m["files"]),
                sum(f["size"] for f in m["files"]),
                sum(sum(f["groups"]) for f in m["files"]),
            )
            for split, buckets in self.manifests.items()
            for bucket, m in buckets.items()
        ]

    @cached_property
    def phases(self) -> list[dict[str, Any]]:
        """The phases of the plan, empty without a plan."""
        path = self.run_dir / PLAN_NAME
        shape = {"phases": [{"first_step": int, "asked": dict}]}
        return read_json(path, shape)["phases"] if path.is_file() else []

    # ---- the log ----

    def _check(self, record: dict[str, Any], shape: Any) -> dict[str, Any]:
        check_shape(record, shape, f"{self.log_path}: step {record['step']!r:.20}")
        return record

    @cached_property
    def _records(self) -> list[dict[str, Any]]:
        """The records of the log in the order written; events are checked."""
        records = [record for record in iter_log(self.log_path) if type(record.get("step")) is int]
        return [
            self._check(r, None if is_step(r) else EVENTS.get(str(r["event"]))) for r in records
        ]

    @cached_property
    def digests(self) -> dict[int, str]:
        """{step: digest of its batch}, from the last line of each step."""
        return {
            r["step"]: r["digest"]
            for r in self._records
            if is_step(r) and type(r.get("digest")) is str
        }

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """The last line of each step, ascending."""
        last = {record["step"]: record for record in self._records if is_step(record)}
        return [self._check(last[step], STEP) for step in sorted(last)]

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """All events, in the order of steps."""
        return sorted((r for r in self._records if not is_step(r)), key=lambda event: event["step"])

    def named(self, *names: str) -> list[dict[str, Any]]:
        """The events with any of these names, in the order of steps."""
        return [event for event in self.events if event["event"] in names]

    @property
    def row_losses(self) -> RowLosses:
        """The losses of rows; `read(step)` reads those of a step."""
        check_shape(self.config, {"total_batch_size": int}, self.run_dir / CONFIG_NAME)
        T = self.config["max_seq_len"]
        return RowLosses(self.run_dir, num_rows=self.config["total_batch_size"] // max(1, T), T=T)

    def newest(self, name: str, step: int) -> dict[str, Any] | None:
        """The newest event with this name at or before a step, None if there is none."""
        return next((event for event in reversed(self.named(name)) if event["step"] <= step), None)

    @cached_property
    def launches(self) -> list[Launch]:
        """The launches, in order."""
        launches: list[Launch] = []
        for record in self._records:
            step, event = record["step"], record.get("event")
            if event == "started":
                for previous in launches[-1:]:
                    previous.end = previous.end or "killed"
                launches.append(Launch(record, step, step))
            elif launches:
                launch = launches[-1]
                launch.last = max(launch.last, step + (event is None))
                if event in ENDS:
                    launch.end, launch.reason = event, record.get("reason") or ""
                elif event is not None:
                    launch.events.append(record)
        return launches

    # ---- figures, defined once for all commands ----

    @property
    def num_steps(self) -> int:
        """Number of steps done."""
        return self.steps[-1]["step"] + 1 if self.steps else 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens trained on."""
        return self.steps[-1]["tokens"] if self.steps else 0

    @property
    def horizon(self) -> int | None:
        """Number of steps after which the run should end, as of the last launch (in older logs, the
        first launch)."""
        last = self.launches[-1].started.get("num_iterations") if self.launches else None
        return last if isinstance(last, int) else self.config["derived"].get("num_iterations")

    @property
    def train_time_s(self) -> float:
        """Seconds spent in steps."""
        return sum(step["step_s"] for step in self.steps)

    def median(self, name: str, last: int = 0) -> float:
        """The median of a value over all steps, or over the last `last` ones; 0 without steps."""
        return statistics.median([step.get(name) or 0 for step in self.steps[-last:]] or [0.0])

    @property
    def peak_memory_bytes(self) -> int | None:
        """Peak memory of rank 0, None if no step logged it."""
        return max((step.get("peak_memory_bytes") or 0 for step in self.steps), default=0) or None

    @cached_property
    def val_bpb(self) -> dict[int, float]:
        """{steps done: bits per byte} for each validation that has a value."""
        return {
            event["step"]: event["bpb"] for event in self.named("val") if event["bpb"] is not None
        }

    def axes(self) -> dict[str, list[float]]:
        """{axis: values}: the number of each logged step, and the tokens, FLOPs and hours of
        training up to its end."""
        steps, flops = self.steps, self.config["derived"].get("flops_per_token") or 0
        spent_s = accumulate(step["step_s"] for step in steps)
        return {
            "steps": [step["step"] for step in steps],
            "tokens": [step["tokens"] for step in steps],
            "FLOPs": [step.get("total_training_flops") or flops * step["tokens"] for step in steps],
            "hours": [step.get("total_training_time", s) / 3600 for step, s in zip(steps, spent_s)],
        }

    def mix(self) -> dict[str, list[float]]:
        """{bucket: shares}: for each logged step, the bucket's share of the tokens in a window that
        ends there (a fiftieth of all steps, at least 20); empty for a run with one bucket."""
        import numpy as np

        columns = sorted(
            {name for step in self.steps for name in step if name.startswith("tokens/")}
        )
        counts = np.array([[step.get(name) or 0 for name in columns] for step in self.steps], float)
        if not counts.size:
            return {}
        sums, window = counts.cumsum(axis=0), max(20, len(counts) // 50)
        sums[window:] -= sums[:-window].copy()
        shares = sums / np.maximum(sums.sum(axis=1, keepdims=True), 1)
        return {
            name.removeprefix("tokens/"): share for name, share in zip(columns, shares.T.tolist())
        }

    @cached_property
    def evaluation(self) -> dict[str, Any]:
        """The results of scripts.base_eval, empty if it has not run."""
        path = self.run_dir / "eval.json"
        return read_json(path, EVALUATION) if path.is_file() else {}

    def samples(self) -> dict[str, list[str]]:
        """{time: texts that the model wrote}: first those from training, newest first, then those
        of scripts.base_eval."""
        training = {
            f"after {event['step']:,} steps": event.get("texts") or []
            for event in self.named("samples")[::-1]
        }
        return training | {
            f"at the evaluation, {kind}": texts
            for kind, texts in self.evaluation.get("samples", {}).items()
        }

    @property
    def outcome(self) -> str:
        """ "completed", or the end of the last launch and the newest save."""
        end, saves = self.launches[-1].end if self.launches else "", self.named("saved")
        if end == "completed":
            return end
        return (
            f"{end or 'unfinished'}, saved at step {saves[-1]['step']:,}"
            if saves
            else "nothing saved yet"
        )

    # ---- saves ----

    @cached_property
    def cursor_files(self) -> dict[int, Path]:
        """{step: file} of the cursors of all saves, ascending."""
        return cursor_files(self.run_dir)

    def nearest_cursors(self, step: int) -> tuple[int, list[dict[str, Any]]] | None:
        """(step, cursors) of the newest save at or before a step, None if there is none. Corrupt
        files are skipped with a warning."""
        for saved in sorted((s for s in self.cursor_files if s <= step), reverse=True):
            try:
                return saved, read_cursors(self.cursor_files[saved])[1]
            except ValueError as e:
                log.warning("skipped: %s", e)
        return None

    def ledger(self) -> tuple[int, dict[str, dict[str, int]], int]:
        """(step, ledger, T) of the newest save; step 0 and an empty ledger before the first."""
        from nanochat.stream import ledger

        T, step = self.config["max_seq_len"], max(self.cursor_files, default=0)
        if not self.cursor_files:
            return 0, {}, T
        path = self.cursor_files[step]
        try:
            return step, ledger(read_cursors(path)[1], T), T
        except ValueError as e:
            raise ValueError(str(e) if str(path) in str(e) else f"{path}: {e}") from None

    def newest_checkpoint(self) -> str | None:
        """The name of the checkpoint written last, None if there is none."""
        times = {}
        for name, path in checkpoint_folders(self.run_dir).items():
            with contextlib.suppress(OSError):  # deleted meanwhile
                times[name] = path.stat().st_mtime
        return max(times, key=lambda name: times[name], default=None)

    # ---- the current state ----

    def status(self) -> dict[str, Any]:
        """The run's state, liveness and newest checkpoint, read again at each call. "status" is
        None if the state is missing or corrupt; "shown" is the word that commands print for it."""
        why = f"{self.run_dir / STATE_NAME} is missing, so the run's status is unknown; see {self.log_path}"
        status = {
            "run": str(self.run_dir),
            "status": None,
            "shown": "unknown",
            "liveness": None,
            "val_bpb": None,
            "reason": why,
        }
        try:
            state = read_state(self.run_dir)
            alive = state and liveness(self.run_dir, state)
        except ValueError as e:
            return status | {"shown": "unreadable", "reason": str(e)}
        if state is None:
            return status
        status |= state | {
            "liveness": alive,
            "shown": state["status"],
            "exit_code": exit_code(self.run_dir, state),
            "heartbeat_age_s": heartbeat_age_s(state),
            "checkpoint": self.newest_checkpoint() or state["checkpoint"],
        }
        if alive == "dead":
            remedy = self.damaged_tokens() or "the same command resumes the run"
            status |= {
                "shown": "dead",
                "reason": f"its status is {state['status']}, but its process is gone; {remedy}",
            }
        return status

    def damaged_tokens(self) -> str:
        """The error for the first damaged token file that the run reads, '' if there is none. A
        process that reads a truncated file through a memory map is killed by SIGBUS, without a
        message."""
        from nanochat.tokens import open_tokens

        try:
            for buckets in self.manifests.values():
                for manifest in buckets.values():
                    for entry in manifest["files"]:
                        if entry["name"].endswith(".bin") and not is_remote(manifest["root"]):
                            open_tokens(Path(manifest["root"], entry["name"]))
        except (ValueError, OSError) as e:
            return str(e)
        return ""


# ---- helpers for several commands ---------------------------------------------------------------


def flat_numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(name, number) of all numbers in nested mappings; "/" joins nested names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat_numbers(value, f"{prefix}{name}/")
        elif type(value) in (int, float):
            yield f"{prefix}{name}", float(value)


def differing_settings(configs: Sequence[Mapping[str, Any]]) -> Table:
    """(name, one JSON value per run) of the settings that differ between runs."""
    values = [
        {name: json.dumps(value) for name, value in config.items() if name != "derived"}
        for config in configs
    ]
    rows = [
        (name, *(value.get(name) for value in values))
        for name in {k: 0 for value in values for k in value}
    ]
    return [row for row in rows if len({*row[1:]}) > 1]


def unbalanced(accounts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """{bucket: error in tokens} of the accounts that do not balance, which would be a bug in this
    program."""
    off = {
        name: a["read"] + a["bos"] + a["repeated"] - a["emitted"] - a["cropped"] - a["pending"]
        for name, a in accounts.items()
    }
    return {name: tokens for name, tokens in off.items() if tokens}


def ledger_table(
    step: int, accounts: Mapping[str, Mapping[str, int]], T: int
) -> tuple[str, tuple[str, ...], Table]:
    """The ledger after `step` steps as text: a paragraph, and the header and rows of a table."""
    from nanochat.stream import LEDGER, share

    law, off = "read + bos + repeated = emitted + cropped + pending", unbalanced(accounts)
    buckets = ", ".join(f"{name} by {tokens:,}" for name, tokens in off.items())
    verdict = f"IT DOES NOT BALANCE ({law}): off in {buckets}." if off else f"It balances: {law}."
    rows = []
    for bucket, account in accounts.items():
        cropped = f"{100 * share(account, 'cropped'):.2f}"
        rows.append((bucket, *(account[name] for name in LEDGER), cropped))
    text = (
        f"Ledger after {step:,} steps, in tokens. {verdict}\nA row has T + 1 = {T + 1:,} tokens, because inputs "
        f"and targets overlap. Emitted tokens are in rows; pending ones are not yet.\n'bos' counts inserted "
        f"tokens, 'repeated' the overlap of windows. 'cropped %' is a share of emitted + cropped;\n'epochs': "
        f"completed by at least one lane."
    )
    return text, ("bucket", *LEDGER, "cropped %"), rows
