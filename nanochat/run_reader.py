"""The reader of a run: everything that its directory records, for commands that report on runs.

    config.json            .config, .horizon, .fork  logs/train.jsonl    .steps, .events, .launches, .outcome
    data_manifest.json     .manifests, .files()      logs/cursors/       .cursor_files, .nearest_cursors(), .ledger()
    eval.json              .evaluations              checkpoints/        .newest_checkpoint()
    plan.json              .phases                   .run_state.json     .status()

Each part is read and checked on first use, so a command needs only the files that it uses. Reading
changes nothing. Parts that need Arrow import it when they are used, so `scripts.status`, which
clusters call in loops, starts fast.

**Forks.** A fork is a run that continues its parent from one of the parent's steps; its own steps are
numbered on from there. Its config.json records the parent, which may be deleted later:

    step     0        10        20        30
    mine     |--------+---------+---------|      mine
    warm              |--------+----------|        warm       @10
    hot                        |----------|          hot      @20
    cold              |-------------------|        cold       @10
"""

import contextlib
import logging
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from nanochat.common import check_shape, few, read_json
from nanochat.model_code import changed_code, shown_code
from nanochat.run_dir import (
    CONFIG_NAME,
    PLAN_NAME,
    Fork,
    RowLosses,
    cursor_files,
    find_run_at,
    is_step,
    iter_log,
    read_config,
    read_cursors,
    read_seals,
    run_made_of,
)
from nanochat.run_owner import exit_code, liveness
from nanochat.run_state import (
    STATE_NAME,
    heartbeat_age_s,
    logged_progress,
    logged_skips,
    read_mirror_state,
    read_state,
)
from nanochat.steps import Outcome

log = logging.getLogger(__name__)

# shapes of lines of the log (see common.parse_json): a step, and some events
STEP = {
    "step": int,
    "digest": str,
    "tokens": int,
    **dict.fromkeys(("tokens_per_s", "step_s", "wait_s"), float),
    **dict.fromkeys(("loss", "smooth_loss", "lr", "grad_norm", "mfu"), float | None),
}
EVENTS: dict[str, dict[str, object]] = {
    "saved": {"step": int},
    "val": {"step": int, "bpb": float | None},
    "started": {"step": int, "world_size": int, "device": str, "torch": str},
    "dropped": {"step": int, "bucket": str, "lanes": int},
}
ENDS = ("completed", "stopped", "halted", "failed")  # events that end a launch
EVAL_NAME = "eval.json"  # the result of base_eval for the newest step that it evaluated
EVALUATION = {"step": int, "train_bpb": dict, "samples": dict}
# of its train_bpb; see `scripts.base_eval.sample_of`
TRAIN_SAMPLE = (
    "The sample of the training files is a sign of overfitting only if the run has read these files, and if the gap to "
    "validation is large; between a few documents, a gap may also be chance."
)
OF_MODES = {  # in an evaluation, unless it skipped them, or is of older code
    **dict.fromkeys(("val_bpb", "val_loss", "unigram_bpb"), float | None),
    "eval_tokens": int,
    "val_buckets": dict,
    "core": {"results": dict},
}
Table = list[tuple[Any, ...]]
LogRecord = dict[str, Any]  # a line of the log


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
    has_steps: bool = False  # whether it took a step that no later launch has taken again
    # files of the model's code that are not those of the launch before, of those with steps
    other_code: list[str] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return self.started["world_size"]

    @property
    def model_code(self) -> dict[str, str]:
        """{file: hash} of the code of the model; empty in older logs."""
        return self.started.get("model_code", {})


def unseen_note(evaluation: Mapping[str, Any]) -> str:
    """Which buckets of the training data an evaluation has no validation data of; '' if none."""
    trained = evaluation["train_bpb"] or evaluation.get("train_loss", {})
    validated = evaluation.get("val_buckets", {})
    unseen = [bucket for bucket in trained if bucket not in validated]
    if not unseen or len(unseen) == len(trained):  # other data validates all of them
        return ""
    return f"Validation has nothing of {few(unseen)}."


def older_evaluation(run_dir: Path, step: int) -> Path:
    """The file with the result of base_eval for a step, if a newer one is in `EVAL_NAME`."""
    return run_dir / f"eval-{step}.json"


def _newest(steps: Mapping[str, int]) -> str | None:
    """The checkpoint with the highest step, of {name: step}; None if there is none."""
    return max(steps, key=lambda name: (steps[name], name == "final"), default=None)


class RunReader:
    """Everything that the directory of a run records.

    Every property raises ValueError, which names the file, if its part is corrupt.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.name = run_dir.name
        self.log_path = run_dir / "logs" / "train.jsonl"

    # ---- settings and files ----

    @cached_property
    def config(self) -> dict[str, Any]:
        """The settings of the run, with the numbers that follow from them in "derived".

        FileNotFoundError if the run never started.
        """
        config = read_config(self.run_dir)
        path = self.run_dir / CONFIG_NAME
        derived = config.setdefault("derived", {})
        check_shape(config, {"max_seq_len": int, "derived": dict}, path)
        check_shape(derived, dict.fromkeys(derived, float | None), f"{path}: derived")
        return config

    @cached_property
    def fork(self) -> Fork | None:
        """Where the run branched off from its parent, None if it is not a fork."""
        return Fork.of(self.config.get("fork"), self.run_dir / CONFIG_NAME)

    @cached_property
    def parent_dir(self) -> Path | None:
        """The directory of the run's parent, None if the run is not a fork or its parent is not
        here, deleted or never copied to this machine."""
        if self.fork is None:
            return None
        beside = self.run_dir.parent / self.fork.run
        with contextlib.suppress(PermissionError):  # another user's
            if (beside / CONFIG_NAME).is_file():
                return beside
        with contextlib.suppress(OSError, ValueError):  # it is not here
            named, _ = find_run_at(str(self.config.get("fork_from")))
            if named.name == self.fork.run and (named / CONFIG_NAME).is_file():
                return named
        return None

    @property
    def begun_with(self) -> str:
        """Whose weights --init-from gave the run at step 0, in words; "" without it."""
        if not self.config.get("init_from"):
            return ""
        origin = self.config.get("origin") or {}
        if not origin.get("run"):
            return "a checkpoint outside a run"
        return f"step {origin['step']:,} of {origin['run']}"

    @cached_property
    def made_of(self) -> str:
        """What the run's weights are, if it has taken no step itself (see `run_dir.made_of`); else ""."""
        return "" if self.launches else run_made_of(self.run_dir)

    def check_trained(self) -> None:
        """ValueError if the run has taken no step itself, so that it has no rows."""
        if self.made_of:
            raise ValueError(
                f"{self.name}: its weights are {self.made_of}, and it has read no rows itself; name the run that "
                f"trained them"
            )

    @property
    def model_code(self) -> dict[str, str]:
        """{file: hash} of the model code that trained the run last (see `nanochat.model_code`); empty if
        neither a launch nor a checkpoint tells it, as those of older code."""
        return self._codes[-1]

    @property
    def shown_code(self) -> dict[str, str]:
        """{file: the first digits of its hash} of all model code that trained the run."""
        return shown_code(self._codes)

    @cached_property
    def _codes(self) -> list[dict[str, str]]:
        """The model code of all launches of which a step is left, in order. If none is left, that of the
        newest launch; if no launch has logged it, that of the newest checkpoint."""
        left = [launch for launch in self.launches if launch.has_steps]
        logged = [launch.model_code for launch in left or self.launches[-1:] if launch.model_code]
        if logged:
            return logged
        seals = read_seals(self.run_dir)
        newest = self.newest_checkpoint()
        return [seals[newest]["model_code"] if newest in seals else {}]

    @property
    def typed(self) -> list[str]:
        """The names of the settings that the command line of the first launch changed."""
        if not self.launches:
            return []
        return self.launches[0].started.get("typed") or []

    @property
    def last_config(self) -> dict[str, Any]:
        """config.json as `config_of` the newest launch."""
        return self.config_of(self.launches[-1] if self.launches else None)

    def config_of(self, launch: Launch | None) -> dict[str, Any]:
        """config.json with what a launch had changed, such as a longer curriculum, and with the figures
        that follow from its length; as it is if the launch is not known."""
        if launch is None:
            return self.config
        changed = launch.started.get("changed") or {}
        config = {name: changed.get(name, value) for name, value in self.config.items()}
        derived = dict(self.config["derived"])
        horizon = launch.started.get("num_iterations")
        if isinstance(horizon, int) and "total_flops" in derived:
            added_steps = horizon - derived["num_iterations"]
            added_tokens = added_steps * derived["tokens_per_step"]
            derived["num_iterations"] = horizon
            derived["total_tokens"] += added_tokens
            derived["total_flops"] += added_tokens * derived["flops_per_token"]
        config["derived"] = derived
        return config

    @cached_property
    def manifests(self) -> dict[str, dict[str, Any]]:
        """{split: {bucket: manifest}} of the pinned files, empty if the run has pinned none."""
        from nanochat.pins import DATA_MANIFEST, read_manifests

        return read_manifests(self.run_dir / DATA_MANIFEST)

    def listed(self) -> dict[str, list[int] | None]:
        """{file: numbers of the documents listed by --without-documents at the start, None: all}."""
        listed: dict[str, list[int] | None] = {}
        for manifest in self.manifests.get("train", {}).values():
            listed |= manifest.get("without", {})
        return listed

    def files(self) -> Table:
        """(bucket and split, folder, number, bytes, documents) of the files that the run reads.

        Bytes are those of the user's own files.
        """
        rows: Table = []
        for split, buckets in self.manifests.items():
            for bucket, manifest in buckets.items():
                entries = manifest["files"]
                num_bytes = sum(entry["size"] for entry in entries)
                documents = sum(sum(entry["groups"]) for entry in entries)
                name = f"{bucket} ({split})"
                rows.append((name, manifest["root"], len(entries), num_bytes, documents))
        return rows

    @cached_property
    def phases(self) -> list[dict[str, Any]]:
        """The phases of the plan, empty without a plan."""
        return self._plan.get("phases", [])

    @property
    def shares_with_loss(self) -> dict[str, float]:
        """By the plan, the share of each bucket's tokens in rows that count toward the loss. The
        others are padding, or the overlap that a long document's next row repeats."""
        shares = {}
        for bucket, planned in self._plan.get("buckets", {}).items():
            account = planned["account"]
            places = account["emitted"] + account["padded"]
            shares[bucket] = (account["emitted"] - account["repeated"]) / max(1, places)
        return shares

    @cached_property
    def _plan(self) -> dict[str, Any]:
        """The plan, empty if there is none."""
        path = self.run_dir / PLAN_NAME
        shape = {"phases": [{"first_step": int, "asked": dict}]}
        if not path.is_file():
            return {}
        plan = read_json(path, shape)
        for phase in plan["phases"]:
            check_shape(phase["asked"], dict.fromkeys(phase["asked"], float), f"{path}: asked")
        buckets = plan.get("buckets", {})  # not in plans of older code
        account = {"emitted": int, "padded": int, "repeated": int}
        check_shape(buckets, {name: {"account": account} for name in buckets}, path)
        return plan

    # ---- the log ----

    def _check_record(self, record: LogRecord, shape: Mapping[str, object] | None) -> None:
        check_shape(record, shape, f"{self.log_path}: step {record['step']!r:.20}")

    @cached_property
    def _records(self) -> list[LogRecord]:
        """The records of the log in the order written; events are checked."""
        records = []
        layouts: dict[tuple[str, ...], tuple[str, ...]] = {}
        for record in iter_log(self.log_path):
            if type(record.get("step")) is not int:
                continue
            if not is_step(record):
                self._check_record(record, EVENTS.get(str(record["event"])))
            # The parser makes new strings of the names in each line, which would be a third of the
            # memory of a long log: share those of the first line with the same names.
            names = tuple(record)
            names = layouts.setdefault(names, names)
            records.append(dict(zip(names, record.values())))
        return records

    @cached_property
    def digests(self) -> dict[int, str]:
        """{step: digest of its batch}, from the last line of each step."""
        digests = {}
        for record in self._records:
            if is_step(record) and type(record.get("digest")) is str:
                digests[record["step"]] = record["digest"]
        return digests

    @cached_property
    def steps(self) -> list[LogRecord]:
        """The last line of each step, ascending."""
        last = {record["step"]: record for record in self._records if is_step(record)}
        steps = [last[step] for step in sorted(last)]
        checked = set()
        for record in steps:
            # what is checked depends on names and types alone, of which a long log has a few
            layout = (*record, *map(type, record.values()))
            if layout not in checked:
                self._check_record(record, STEP)
                checked.add(layout)
        return steps

    @cached_property
    def events(self) -> list[LogRecord]:
        """All events, in the order of steps."""
        events = [record for record in self._records if not is_step(record)]
        return sorted(events, key=lambda event: event["step"])

    def named(self, *names: str) -> list[dict[str, Any]]:
        """The events with any of these names, in the order of steps."""
        return [event for event in self.events if event["event"] in names]

    @property
    def steps_not_applied(self) -> set[int]:
        """The steps that did not change the weights: spikes, and steps without a token to learn."""
        return {event["step"] for event in self.named("skipped")}

    @property
    def steps_without_targets(self) -> set[int]:
        """Those of the `steps_not_applied` in which no target had a loss."""
        skipped = self.named("skipped")
        return {event["step"] for event in skipped if event.get("why") == Outcome.EMPTY.value}

    @property
    def row_losses(self) -> RowLosses:
        """The losses of rows; `read(step)` reads those of a step."""
        check_shape(self.config, {"total_batch_size": int}, self.run_dir / CONFIG_NAME)
        T = self.config["max_seq_len"]
        num_rows = self.config["total_batch_size"] // max(1, T)
        return RowLosses(self.run_dir, num_rows=num_rows, T=T)

    def newest(self, name: str, step: int) -> dict[str, Any] | None:
        """The newest event with this name at or before a step, None if there is none."""
        return next((event for event in reversed(self.named(name)) if event["step"] <= step), None)

    @cached_property
    def launches(self) -> list[Launch]:
        """The launches, in order."""
        launches: list[Launch] = []
        taken_by: dict[int, Launch] = {}
        for record in self._records:
            step = record["step"]
            event = record.get("event")  # None for a step
            if event == "started":
                code = record.get("model_code", {})
                self._check_record({**record, "model_code": code}, {"model_code": dict})
                self._check_record(
                    {**record, "model_code": [*code.values()]}, {"model_code": [str]}
                )
                begun = Launch(record, step, step)
                if launches:
                    launches[-1].end = launches[-1].end or "killed"
                launches.append(begun)
                continue
            if not launches:
                continue
            launch = launches[-1]
            launch.last = max(launch.last, step + 1 if event is None else step)
            if event is None:
                taken_by[step] = launch
            elif event in ENDS:
                launch.end = event
                launch.reason = record.get("reason") or ""
            else:
                launch.events.append(record)
        for launch in taken_by.values():
            launch.has_steps = True
        # the record of a fork has the code of its first launch, even if that took no step
        before: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError):  # config.json is missing or corrupt
            before = launches[0].model_code if launches and self.fork else {}
        for launch in launches:
            if launch.has_steps:
                launch.other_code = changed_code(before, launch.model_code)
                before = launch.model_code
        return launches

    def launch_of(self, step: int) -> Launch | None:
        """The last launch that took a step, None if the log has none."""
        taken = [launch for launch in self.launches if launch.first <= step < launch.last]
        return taken[-1] if taken else None

    # ---- figures, defined once for all commands ----

    @property
    def first_step(self) -> int:
        """The first step that this run trained: of a fork, the one at which it left its parent."""
        return (self.config.get("fork") or {}).get("step", 0)

    @property
    def num_steps(self) -> int:
        """Number of steps done."""
        return self.steps[-1]["step"] + 1 if self.steps else 0

    @property
    def reached(self) -> int:
        """Number of steps after which the newest launch stands. `num_steps` is higher as long as
        that launch takes steps again. If it took none itself, the step of its weights."""
        if self.made_of:
            return max(self._checkpoints().values(), default=0)
        return self.launches[-1].last if self.launches else self.num_steps

    @property
    def num_tokens(self) -> int:
        """Number of tokens trained on in the steps that the run has `reached`, those of a fork's
        ancestors included."""
        reached = self.reached
        done = [step["tokens"] for step in self.steps if step["step"] < reached]
        return done[-1] if done else 0

    @property
    def own_tokens(self) -> int:
        """Number of tokens that this run itself trained on, in `train_time_s`."""
        before = self.fork.tokens if self.fork is not None else 0
        return max(0, self.num_tokens - before)

    @property
    def horizon(self) -> int | None:
        """Number of steps after which the run should end.

        It is that of the last launch (in older logs, of the first).
        """
        if self.made_of:
            return self.reached
        if self.launches:
            logged = self.launches[-1].started.get("num_iterations")
            if isinstance(logged, int):
                return logged
        return self.config["derived"].get("num_iterations")

    @property
    def train_time_s(self) -> float:
        """Seconds spent in the run's own steps."""
        return sum(step["step_s"] for step in self.steps)

    def median(self, name: str, last: int = 0) -> float:
        """The median of a value over all steps, or over the last `last` ones; 0 without steps."""
        values = [step.get(name) or 0 for step in self.steps[-last:]]
        return statistics.median(values) if values else 0.0

    @property
    def peak_memory_bytes(self) -> int | None:
        """Peak memory of rank 0, None if no step logged it."""
        logged = [step["peak_memory_bytes"] for step in self.steps if step.get("peak_memory_bytes")]
        return max(logged, default=None)

    @property
    def val_bpb(self) -> dict[int, float]:
        """{steps done: bits per byte} of those `validations` that have a value."""
        bpb = {step: event["bpb"] for step, event in self.validations.items()}
        return {step: value for step, value in bpb.items() if value is not None}

    @cached_property
    def validations(self) -> dict[int, LogRecord]:
        """{steps done: event} of each validation on as much text as the newest one: results on other
        amounts cannot be compared with it."""
        results: dict[int, tuple[LogRecord, object]] = {}
        for launch in self.launches:
            changed = launch.started.get("changed") or {}
            amount = changed.get("eval_tokens", self.config.get("eval_tokens"))
            for event in launch.events:
                if event["event"] == "val":
                    results[event["step"]] = event, amount
        newest = results[max(results)][1] if results else None
        of_newest = {step: event for step, (event, amount) in results.items() if amount == newest}
        return dict(sorted(of_newest.items()))

    def axes(self) -> dict[str, list[float]]:
        """{axis: values}: each logged step's number, and the tokens, FLOPs and hours up to its end."""
        axes: dict[str, list[float]] = {"steps": [], "tokens": [], "FLOPs": [], "hours": []}
        flops_per_token = self.config["derived"].get("flops_per_token") or 0
        spent_s = 0.0  # in older logs, a step has only its own time
        for step in self.steps:
            spent_s += step["step_s"]
            flops = step.get("total_training_flops") or flops_per_token * step["tokens"]
            axes["steps"].append(step["step"])
            axes["tokens"].append(step["tokens"])
            axes["FLOPs"].append(flops)
            axes["hours"].append(step.get("total_training_time", spent_s) / 3600)
        return axes

    @cached_property
    def origin(self) -> dict[str, float]:
        """{axis: value} before the first step; for a fork, where its parent was by then."""
        origin: dict[str, float] = {"steps": 0, "tokens": 0, "FLOPs": 0, "hours": 0}
        if self.fork is None:
            return origin
        origin["steps"] = self.fork.step
        origin["tokens"] = self.fork.tokens
        if self.steps:
            first = self.steps[0]
            axes = {name: values[0] for name, values in self.axes().items()}
            origin["FLOPs"] = axes["FLOPs"] * self.fork.tokens / first["tokens"]
            origin["hours"] = axes["hours"] - first["step_s"] / 3600
        return origin

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """The results of scripts.base_eval, one for each step that it evaluated, the newest first."""
        evaluations = []
        for path in self.run_dir.glob("eval*.json"):
            number = path.stem.removeprefix("eval-")
            if path.name != EVAL_NAME and not number.isdecimal():
                continue  # a file that the user named
            evaluation = read_json(path, EVALUATION)
            shape = {name: kind for name, kind in OF_MODES.items() if name in evaluation}
            check_shape(evaluation, shape, path, ending="; delete it and rerun scripts.base_eval")
            evaluations.append(evaluation)
        return sorted(evaluations, key=lambda evaluation: -evaluation["step"])

    @property
    def evaluation(self) -> dict[str, Any]:
        """The newest result of scripts.base_eval, empty if it has not run."""
        return self.evaluations[0] if self.evaluations else {}

    def validation(self, step: int) -> dict[str, Any] | None:
        """The newest validation result of the first `step` steps as {"step", "bpb", "loss"}, None if
        there is none. "loss", in nats per token, takes the place of "bpb" where bytes are not known.
        The result of scripts.base_eval counts if training did not evaluate after this step; then
        "eval_tokens" is its number of tokens, None if older code did not record it."""
        logged = self.newest("val", step)
        if logged is not None and logged["step"] == step:
            return logged
        for evaluation in self.evaluations:
            bpb = evaluation.get("val_bpb")
            loss = evaluation.get("val_loss")
            if evaluation["step"] == step and (bpb, loss) != (None, None):
                tokens = evaluation.get("eval_tokens")
                return {"step": step, "bpb": bpb, "loss": loss, "eval_tokens": tokens}
        return logged

    def samples(self) -> dict[str, list[str]]:
        """{time: texts that the model wrote}.

        First those from training, newest first, then the newest of scripts.base_eval.
        """
        samples = {}
        for event in reversed(self.named("samples")):
            samples[f"after {event['step']:,} steps"] = event.get("texts") or []
        for evaluation in self.evaluations:
            for kind, texts in evaluation["samples"].items():
                samples[f"at the evaluation after {evaluation['step']:,} steps, {kind}"] = texts
            if evaluation["samples"]:
                break
        return samples

    @property
    def outcome(self) -> str:
        """ "completed", or the end of the last launch and the newest save, or what it is made of."""
        if self.made_of:
            return self.made_of
        end = self.launches[-1].end if self.launches else ""
        if end == "completed":
            return end
        saves = self.named("saved")
        if not saves:
            return "nothing saved yet"
        return f"{end or 'unfinished'}, saved at step {saves[-1]['step']:,}"

    # ---- saves ----

    @cached_property
    def cursor_files(self) -> dict[int, Path]:
        """{step: file} of the cursors of all saves, ascending."""
        return cursor_files(self.run_dir)

    def nearest_cursors(self, step: int) -> tuple[int, list[dict[str, Any]]] | None:
        """(step, cursors) of the newest save at or before a step, None if there is none.

        Corrupt files are skipped with a warning.
        """
        for saved in sorted(self.cursor_files, reverse=True):
            if saved > step:
                continue
            try:
                _, cursors = read_cursors(self.cursor_files[saved])
                return saved, cursors
            except ValueError as e:
                log.warning("skipped: %s", e)
        return None

    def ledger(self) -> tuple[int, dict[str, dict[str, int]], int, str]:
        """(step, ledger, T, `ledger_note`) of the newest save; step 0 and an empty ledger before the
        first."""
        T = self.config["max_seq_len"]
        step = max(self.cursor_files, default=0)
        accounts = self._ledger_at(step)
        return step, accounts, T, self.ledger_note(accounts)

    def _ledger_at(self, step: int) -> dict[str, dict[str, int]]:
        """The ledger at the save of a step; empty if its cursors were not kept."""
        from nanochat.stream import ledger

        if step not in self.cursor_files:
            return {}
        path = self.cursor_files[step]
        try:
            _, cursors = read_cursors(path)
            return ledger(cursors, self.config["max_seq_len"])
        except ValueError as e:
            raise ValueError(str(e) if str(path) in str(e) else f"{path}: {e}") from None

    def ledger_note(self, accounts: Mapping[str, Mapping[str, int]]) -> str:
        """Which rows of a ledger of this run its ancestors took; "" if it is not a fork. A bucket that a fork
        reads no more, or packs anew, has none of theirs."""
        if self.fork is None or not accounts:
            return ""
        num_rows = sum(account["rows"] for account in accounts.values())
        before = sum(account["rows"] for account in self._ledger_at(self.fork.step).values())
        return (
            f"{before:,} of its {num_rows:,} rows are from before step {self.fork.step:,}, at which this run "
            f"left {self.fork.run}."
        )

    def newest_checkpoint(self) -> str | None:
        """The name of the checkpoint with the highest step, None if there is none. One that was written
        later may be a replay of an earlier step."""
        return _newest(self._checkpoints())

    def _checkpoints(self) -> dict[str, int]:
        """{name of a checkpoint: the step in its seal}."""
        return {name: seal["step"] for name, seal in read_seals(self.run_dir).items()}

    # ---- the current state ----

    def status(self) -> dict[str, Any]:
        """The run's state, liveness and newest checkpoint, read again at each call.

        "status" is None if the state is missing or corrupt; "shown" is the word that commands print
        for it.
        """
        why = f"{self.run_dir / STATE_NAME} is missing, so the run's status is unknown; see {self.log_path}"
        status: dict[str, Any] = {
            "run": str(self.run_dir),
            "fork": None,
            "parent": None,
            "begun_with": "",
            "status": None,
            "shown": "unknown",
            "liveness": None,
            "val_bpb": None,
            "reason": why,
        }
        with contextlib.suppress(OSError, ValueError):  # config.json is missing or corrupt
            status["fork"] = self.fork and self.fork._asdict()
            status["parent"] = self.parent_dir and str(self.parent_dir)
            status["begun_with"] = self.begun_with
        try:
            state = read_state(self.run_dir)
            alive = state and liveness(self.run_dir, state)
            steps = self._checkpoints()
        except (PermissionError, ValueError) as e:
            return status | {"shown": "unreadable", "reason": str(e)}
        if state is None:
            return status
        saved_step = max(steps.values(), default=None)
        reached = state["step"] if alive == "alive" else None
        status |= state | {
            "liveness": alive,
            "shown": state["status"],
            "exit_code": exit_code(self.run_dir, state),
            "heartbeat_age_s": heartbeat_age_s(state),
            "checkpoint": _newest(steps) or state["checkpoint"],
            "saved_step": saved_step,
            "mirror": self._mirror(saved_step if reached is None else reached),
        }
        if status["fork"] and state.get("skipped"):  # its state counts those of its ancestors, too
            status["skipped"] = logged_skips(self.run_dir)
        if alive == "dead":
            status |= logged_progress(self.run_dir)  # the last state may be older than the log
            status |= {
                "shown": "dead",
                "reason": f"its status is {state['status']}, but its process is gone; run its command again "
                "(without --resume)",
            }
        return status

    def _mirror(self, step: float | None) -> dict[str, Any] | None:
        """The state of the run's mirror as this machine knows it, with how many steps and seconds it
        is behind; None without a mirror. `step`: that which a running launch has reached, otherwise
        that of the newest checkpoint here."""
        mirror = read_mirror_state(self.run_dir)
        if mirror is None:
            return None
        copied = mirror["copied"]
        return mirror | {
            "behind_steps": max(0, int(step or 0) - max(0, mirror["step"] or 0)),
            "behind_s": None if copied is None else time.time() - copied,
        }


# ---- helpers for several commands ---------------------------------------------------------------


def flat_numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(name, number) of all numbers in nested mappings; "/" joins nested names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat_numbers(value, f"{prefix}{name}/")
        elif type(value) in (int, float):
            yield f"{prefix}{name}", float(value)


def tree_of(parents: Mapping[str, str | None]) -> dict[str, int]:
    """{run: depth} of a tree of forks: below each run its forks, in the order of `parents`, which
    holds {run: its parent}. A run whose parent is not in `parents` has depth 0."""
    forks: dict[str, list[str]] = {run: [] for run in parents}
    roots: list[str] = []
    for run, parent in parents.items():
        siblings = roots if parent is None else forks.get(parent, roots)
        siblings.append(run)
    depths: dict[str, int] = {}
    pending = [(run, 0) for run in reversed(roots)]
    while pending:
        run, depth = pending.pop()
        depths[run] = depth
        pending += [(fork, depth + 1) for fork in reversed(forks[run])]
    lost = parents.keys() - depths.keys()  # in a circle, after an edit of config.json
    return depths | dict.fromkeys(sorted(lost), 0)


def unbalanced(accounts: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """{bucket: error in tokens} of accounts that do not balance: a bug in this program."""
    errors = {}
    for bucket, account in accounts.items():
        entered = account["read"] + account["bos"] + account["repeated"]
        accounted = account["emitted"] + account["cropped"] + account["pending"]
        if entered != accounted:
            errors[bucket] = entered - accounted
    return errors


def ledger_table(
    step: int, accounts: Mapping[str, Mapping[str, int]], T: int, note: str
) -> tuple[str, tuple[str, ...], Table]:
    """The ledger after `step` steps as text: a paragraph, which ends with a note if there is one,
    and the header and rows of a table."""
    from nanochat.stream import LEDGER, token_share

    law = "read + bos + repeated = emitted + cropped + pending"
    verdict = f"It balances: {law}."
    errors = unbalanced(accounts)
    if errors:
        buckets = ", ".join(f"{name} by {tokens:,}" for name, tokens in errors.items())
        verdict = f"IT DOES NOT BALANCE ({law}): off in {buckets}."
    rows = []
    for bucket, account in accounts.items():
        cropped = f"{100 * token_share(account, 'cropped'):.2f}"
        rows.append((bucket, *(account[name] for name in LEDGER), cropped))
    text = (
        f"Ledger after {step:,} steps, in tokens. {verdict}\n"
        f"A row has T + 1 = {T + 1:,} tokens, because inputs and targets overlap. 'documents': number of those\n"
        f"that a packer took in, 0 in an order of samples; 'read': their tokens, before any of them is in a row.\n"
        f"'bos': inserted tokens; 'repeated': those that another row holds, too; 'emitted': in rows; 'cropped':\n"
        f"dropped; 'pending': not in rows yet; 'padded': in rows, of no document. 'rows': packed; 'epochs': complete\n"
        f"passes over the bucket, in the lane furthest ahead; with fewer documents than lanes, some begin with a\n"
        f"later one. 'cropped %': share of emitted + cropped."
    )
    if note:
        text += f"\n{note}"
    return text, ("bucket", *LEDGER, "cropped %"), rows
