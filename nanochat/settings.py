"""
Which settings may change when a run goes on.

The command that started a run also restarts it, so a restart may carry other flags, by intent or by accident. Each
setting stands once in the table below: it may change, or it may not.

    the run's settings   {"depth": 12, "save_every": 100, "lanes": 64}
    the command's        {"depth": 16, "save_every": 500, "lanes": -1}
                            refused      allowed            automatic: keeps the run's 64

The line is drawn at the promise: what decides which rows come in which order, or what a step computes from them, stays
as it was. What only decides where, how fast and how long the run computes may change, with a notice where something
that people rely on does change (digests, bits, the shape of the schedule). A setting that is not in the table is
refused, so forgetting one is safe; a test of the training script's flags against the table notices it.

Warning instead of refusing was rejected: nobody reads the log of a job that restarts at night.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nanochat.curriculum import Curriculum

_UNSET = object()


@dataclass(frozen=True)
class Rule:
    """Whether a setting may change at resume. `note` says what changing it does, or why it may not; `notify` prints the
    note when it happens. A command that gives `auto` leaves the choice to the program: it keeps the run's value."""
    may_change: bool
    note: str
    notify: bool = False
    auto: Any = _UNSET


_ARCHITECTURE = Rule(False, "the shape of the model")
_STREAM = Rule(False, "decides which tokens come in which order")
_RATE = Rule(False, "what a step computes")
_INTERVAL = Rule(True, "how often the run looks at itself, not what it learns")
_HORIZON = Rule(True, "moves the end of the run: schedules stretch or shrink from here on", notify=True)
_OLD = {"order": "lanes", "num_samples": 0, "eod_mask_loss": False}  # settings that older runs do not know
_FILES = Rule(True, "a folder may move: the files are pinned by relative name and hash")
_LIMIT = Rule(True, "when this launch ends, not what it computes")
_ORIGIN = Rule(False, "what the run began with")
_SPEED = Rule(True, "speed only")

SETTINGS: dict[str, Rule] = {
    # where and how the run computes
    "run": Rule(True, "the name shown by wandb"),
    "model_tag": Rule(True, "names the run directory; the run found is the one that goes on"),
    "resume": Rule(True, "asks for this very resume"),
    "force": Rule(True, "asks for this very start"),
    "world_size": Rule(True, "same data; same bits as long as it divides the number of leaves", notify=True),
    "device_type": Rule(True, "same data, not the same bits: other devices round differently", notify=True),
    "device_batch_size": Rule(True, "same data, not the same bits: sums are grouped differently", notify=True),
    "cpu_threads": Rule(True, "same data, not the same bits: PyTorch's threads (OMP_NUM_THREADS) share out sums on a "
                        "CPU", notify=True),
    "tokenizer_threads": _SPEED,
    "prefetch": _SPEED,
    "compile": Rule(True, "same data, not the same bits: compiled kernels round differently", notify=True),
    # how long, and how large a step
    "num_iterations": _HORIZON,
    "target_flops": _HORIZON,
    "target_param_data_ratio": _HORIZON,
    "total_batch_size": Rule(True, "digests of steps differ from here on; learning rates follow the square root of the "
                             "batch size", notify=True, auto=-1),
    # looking and saving
    "eval_every": _INTERVAL,
    "eval_tokens": Rule(True, "bits per byte before and after are taken over different amounts of text", notify=True),
    "sample_every": _INTERVAL,
    "save_every": _INTERVAL,
    "log_every": _INTERVAL,
    "sync_save": _SPEED,
    "keep_last_k": Rule(True, "which checkpoints stay"),
    "keep_milestone_every": Rule(True, "which checkpoints stay"),
    # how it ends
    "max_runtime_seconds": _LIMIT,
    "walltime_reserve_seconds": _LIMIT,
    "collective_timeout_seconds": _LIMIT,
    # where it began
    "init_from": _ORIGIN,
    "init_optimizer": _ORIGIN,
    "init_data": _ORIGIN,
    "skip_steps": Rule(True, "a run keeps those it has; more may be added for steps that are not done yet"),
    # the model
    "depth": _ARCHITECTURE,
    "aspect_ratio": _ARCHITECTURE,
    "head_dim": _ARCHITECTURE,
    "window_pattern": _ARCHITECTURE,
    "vocab_size": _ARCHITECTURE,
    "attention_mode": Rule(False, "what a token attends to"),
    "dtype": Rule(False, "the type of activations and embeddings", auto="auto"),
    # the stream
    "data_path": _FILES,
    "val_path": _FILES,
    "data_format": _STREAM,
    "dataset": _STREAM,
    "plan": Rule(True, "looked at before training only"),
    "strict": Rule(True, "whether a broken line of text ends the run"),
    "tokenizer_dir": Rule(True, "a run has its own copy of its tokenizer; the fingerprint is compared"),
    "tokenizer_fingerprint": Rule(False, "decides the tokens of every text"),
    "max_seq_len": Rule(False, "the length of a row"),
    "lanes": Rule(False, "every lane has its own share of the data", auto=-1),
    "seed": _STREAM,
    "packing": _STREAM,
    "pack": _STREAM,
    "long_docs": _STREAM,
    "overlap": _STREAM,
    "buffer_size": _STREAM,
    "packer_version": _STREAM,
    "order": _STREAM,
    "split": Rule(False, "decides which documents train and which validate", auto=None),
    "blend_weights": _STREAM,
    "eod_mask_loss": Rule(False, "decides which targets count"),
    "num_samples": Rule(False, "Megatron's order is a shuffle of so many samples: another number is another order",
                        auto=-1),
    "index_cache": Rule(True, "speed only"),
    "object_storage_cache": Rule(True, "where copies of indices lie, not what they say"),
    "curriculum": Rule(False, "decides which bucket a row comes from; --allow-curriculum-change allows it"),
    "allow_curriculum_change": Rule(True, "asks for this very resume"),
    "allow_bucket_exhaustion": Rule(True, "a lane whose bucket has run dry goes on with the others, or halts the run",
                                    notify=True),
    "allow_budget_mismatch": Rule(True, "the run may be longer or shorter than its curriculum"),
    "leaves": Rule(False, "the order in which gradients are added", auto=-1),
    # what a step computes
    "embedding_lr": _RATE,
    "unembedding_lr": _RATE,
    "matrix_lr": _RATE,
    "scalar_lr": _RATE,
    "weight_decay": _RATE,
    "warmup_steps": _RATE,
    "warmdown_ratio": _RATE,
    "final_lr_frac": _RATE,
}


@dataclass(frozen=True)
class Change:
    """One setting that differs: its name, the run's value, the command's value, and what the table says of it."""
    name: str
    old: Any
    new: Any
    note: str
    notify: bool = False

    def __str__(self) -> str:
        flag = "--" + self.name.replace("_", "-")
        return f"{flag}: the run has {self.old!r}, the command says {self.new!r} ({self.note})"


@dataclass(frozen=True)
class Changes:
    """What differs between a run and a command, split by the table."""
    allowed: tuple[Change, ...]
    refused: tuple[Change, ...]

    def notices(self) -> list[str]:
        """A line for each allowed change that people should hear of."""
        return [str(c) for c in self.allowed if c.notify]


def inherit_settings(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The command's settings with every automatic one replaced by what the run has resolved it to."""
    return {k: old[k] if k in old and k in SETTINGS and new[k] == SETTINGS[k].auto else new[k] for k in new}


def compare_settings(old: dict[str, Any], new: dict[str, Any], *, defaults: dict[str, Any] | None = None) -> Changes:
    """Compare a run's resolved settings with a command's.

    `defaults` fills in what one side does not know (a setting that is newer than the run); without a default it counts
    as None. A batch size that the run's lanes do not divide is refused.
    """
    old, new = {**_OLD, **(defaults or {}), **old}, {**_OLD, **(defaults or {}), **new}
    settled = inherit_settings(old, new)
    allowed: list[Change] = []
    refused: list[Change] = []
    for name in [*old, *(n for n in settled if n not in old)]:
        before, after = old.get(name), settled.get(name)
        if before == after:
            continue
        rule = SETTINGS.get(name) or Rule(False, "not in the table of settings")
        reason = _batch_problem(old, after) if name == "total_batch_size" else None
        change = Change(name, before, after, reason or rule.note, rule.notify)
        (allowed if rule.may_change and reason is None else refused).append(change)
    return Changes(tuple(allowed), tuple(refused))


def settle_curriculum(old: dict[str, Any], new: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """(the run's settings as the command's curriculum leaves them, whether that is another curriculum). Raises
    ValueError with a diff where it is another one and --allow-curriculum-change is not given."""
    then, now = ({} if s["curriculum"] is None else json.loads(Curriculum.from_json(s["curriculum"]).identity())
                 for s in (old, new))
    settled = {**old, "curriculum": new["curriculum"]}
    if then == now:  # it may be written otherwise, and its last phase may be longer
        return settled, False
    if new["allow_curriculum_change"]:
        return settled, True
    lines = [f"  {name}: the run has {a}, the command says {b}"
             for name, a, b in ((name, _show(then, name), _show(now, name)) for name in _names(then, now)) if a != b]
    raise ValueError("--curriculum: the run was started with another one:\n" + "\n".join(lines) +
                     "\nuse the run's, allow the change with --allow-curriculum-change, or start a new run with "
                     "--model-tag NAME")


def _names(*identities: dict[str, Any]) -> list[str]:
    phases = max(len(identity.get("phases", ())) for identity in identities)
    return [*(f"phase {i + 1}" for i in range(phases)), "max_epochs"]


def _show(identity: dict[str, Any], name: str) -> str:
    """A part of a curriculum's identity, for a diff."""
    if name == "max_epochs" or not identity:
        return str(identity.get(name, "none"))
    number = int(name.removeprefix("phase ")) - 1
    if number >= len(identity["phases"]):
        return "none"
    phase = identity["phases"][number]
    length = "to the end" if phase["duration_tokens"] is None else f"{phase['duration_tokens']:,} tokens"
    return f"{length} of {', '.join(f'{bucket} {share}' for bucket, share in sorted(phase['shares'].items()))}"


def _batch_problem(old: dict[str, Any], total_batch_size: Any) -> str | None:
    """Why the run's lanes cannot give steps of so many tokens, or None if they can."""
    row_tokens, lanes = old.get("max_seq_len"), old.get("lanes")
    if row_tokens and lanes and lanes > 0 and total_batch_size % (row_tokens * lanes):
        return f"{lanes} lanes with rows of {row_tokens:,} tokens need a multiple of {row_tokens * lanes:,}"
    return None


def refuse_changes(changes: Changes, *, run_name: str) -> None:
    """If a change is refused: ValueError with a line for each and the way out. `run_name` is the run's tag."""
    if changes.refused:
        lines = "\n".join(f"  {c}" for c in changes.refused)
        raise ValueError(f"the run {run_name!r} was started with other settings:\n{lines}\n"
                         "use the run's settings, or start a new run with --model-tag NAME")


def unknown_settings(names: Iterable[str]) -> list[str]:
    """The names that the table forgets, sorted."""
    return sorted(set(names) - SETTINGS.keys())


def settings_table() -> str:
    """The table as markdown, in the order of the code."""
    rows = [f"| `--{name.replace('_', '-')}` | {'yes' if rule.may_change else 'no'} | {rule.note} |"
            for name, rule in SETTINGS.items()]
    return "\n".join(["| setting | may change | what it does, or why not |", "| --- | --- | --- |", *rows]) + "\n"
