"""
The settings of a run: one frozen dataclass, its command-line flags, and what a resume may change.

    warmup_steps: int = setting(40, "steps of the linear warmup of the learning rate", decides=Decides.STEP)

This field defines the flag `--warmup-steps`, its line in --help with the default, its entry in
config.json, its rule for a resume, and its row in the table of settings in docs/reference.md. To
add a flag, add one field here. A module that owns a default declares its own fields
(`ScheduleSettings` in nanochat/schedule.py); its class is listed among the bases of `Settings`.

**A run never changes what it is.** The command that starts a run also resumes it. A resume may have
different flags, on purpose or by accident:

    the run's settings   {"depth": 12, "save_every": 100, "lanes": 64}
    the command's        {"depth": 16, "save_every": 500, "lanes": -1}
                            refused      allowed            automatic: keeps the run's 64

A setting that decides which rows are read, or what a step computes from them, is fixed
(`cli.Decides`): a resume that changes it is refused, with its `note` as the reason. A setting that
only decides where, how fast and how long the run computes may change; the change is printed, with
its `note` if it has one. To train with other settings, fork the run (--fork-from). If an old
config.json lacks a setting, the default applies; if it has one that this code lacks, the resume is
refused. Rejected: a warning instead of a refusal. No one reads the log of a job that resumes at
night.
"""

import argparse
import contextlib
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from nanochat.attention import KERNELS, MODES
from nanochat.checkpoint import SaveSettings
from nanochat.cli import Decides, Parser, check_bounds, is_off, setting, value_of
from nanochat.common import (
    DATA_CACHE_GB,
    Difference,
    Remote,
    as_path,
    check_shape,
    few,
    is_remote,
    open_door,
    parse_json,
)
from nanochat.curriculum import Curriculum, CurriculumSettings, load
from nanochat.files import DATASET_NAME, FORMATS, paths_in
from nanochat.gpt import ASPECT_RATIO, HEAD_DIM, GPTConfig
from nanochat.old_flags import OLD_FLAGS
from nanochat.order import ORDERS, StreamSettings
from nanochat.pins import DATA_MANIFEST, read_manifests
from nanochat.run_dir import (
    CONFIG_NAME,
    config_at,
    curriculum_text,
    find_run_at,
    read_config,
    run_path,
    step_in,
)
from nanochat.schedule import HORIZON, HorizonSettings, ScheduleSettings
from nanochat.sinks import SinkSettings
from nanochat.text import Selection, TextSettings
from nanochat.tokenizer import TokenizerSettings

log = logging.getLogger(__name__)

# the door to a run's settings in its mirror
MIRROR = "nanochat.mirror_fetch:mirrored_config"
TARGETS = "decides which targets count in the loss"
ORIGIN = "decides how the run begins"
SPLITS = ("train", "val")
# what a change does
ROUNDING = "same data, but not the same bits: "

MAX_SEED = 2**47 - 1  # with 2^16 ranks, 63 bits: what PyTorch's generators take
MAX_RATE = 10**6  # largest learning rate: far above useful ones, far below those that overflow


# Each class below is a group of --help, titled by its docstring. `cli.setting` documents the
# keywords.


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """run"""

    model_tag: str | None = setting(
        None,
        "name of the run: its folder is <base dir>/runs/NAME, where <base dir> is $NANOCHAT_BASE_DIR or "
        "~/.cache/nanochat (default: d<depth>)",
        metavar="NAME",
    )
    resume: str = setting(
        "auto",
        "checkpoint to start from: auto (the run's newest good one, if any) | scratch (none) | path of a "
        "checkpoint | RUN@STEP",
    )
    force: bool = setting(
        False, "with --resume=scratch: rename an existing run directory instead of refusing"
    )
    device_type: str = setting(
        "",
        "cuda | mps | cpu (default: the best available)",
        note=ROUNDING + "devices round differently",
    )
    dtype: str = setting(
        "auto",
        "type of activations, embeddings and Muon's matmuls: auto | bfloat16 | float32 (without TF32)",
        auto=True,
        decides=Decides.STEP,
        note="decides the type of activations, embeddings and Muon's matmuls",
    )
    fp8: bool = setting(
        False,
        "train with FP8 matrix products; needs a GPU of compute capability 8.9 or higher",
        decides=Decides.STEP,
    )
    attention_kernel: str = setting(
        "wheel",
        "attention on CUDA: wheel is FlashAttention-2, which comes with PyTorch; cudnn is cuDNN for full "
        "windows, with --no-deterministic only; fa3 is a separate package",
        choices=KERNELS,
        decides=Decides.STEP,
    )
    compile: str = setting(
        "auto",
        "use torch.compile; auto: on CUDA only",
        choices=("auto", "on", "off"),
        note=ROUNDING + "compiled kernels round differently",
    )
    deterministic: bool = setting(
        True,
        "on CUDA, use only kernels whose results do not depend on scheduling (default: on)",
        decides=Decides.STEP,
    )
    seed: int = setting(
        42,
        "seed of the initial weights and of the data order",
        least=-MAX_SEED,
        most=MAX_SEED,
        decides=Decides.ROWS,
    )
    data_seed: int | None = setting(
        None,
        "seed of the data order alone (default: --seed)",
        type=int,
        metavar="N",
        least=-MAX_SEED,
        most=MAX_SEED,
        decides=Decides.ROWS,
    )
    world_size: int = setting(
        1,
        "number of processes of the launch",
        flag=False,
        note="same data; same bits if the number of processes divides the number of leaves",
    )
    cpu_threads: int | None = setting(
        None,
        "PyTorch's threads on a CPU (OMP_NUM_THREADS)",
        flag=False,
        note=ROUNDING + "PyTorch splits sums over its threads (OMP_NUM_THREADS)",
    )


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """model"""

    depth: int = setting(
        20,
        "number of layers; width, batch size and horizon follow from it",
        decides=Decides.WEIGHTS,
        least=1,
        most=10**4,
    )
    aspect_ratio: int = setting(
        ASPECT_RATIO,
        "model width divided by depth; the width is rounded up to whole heads",
        decides=Decides.WEIGHTS,
        least=1,
        most=10**4,
    )
    head_dim: int = setting(
        HEAD_DIM, "size of an attention head", decides=Decides.WEIGHTS, least=1, most=10**4
    )
    max_seq_len: int = setting(
        GPTConfig.sequence_len,
        "T: tokens per row that are trained on",
        decides=Decides.ROWS | Decides.WEIGHTS,
        note="decides the length of a row",
        least=2,
        most=10**8,
    )
    attention_mode: str = setting(
        "causal",
        "how attention is masked; all but causal confine it to one document",
        choices=tuple(MODES),
        decides=Decides.STEP,
        note="decides which tokens a token attends to",
    )
    window_pattern: str = setting(
        GPTConfig.window_pattern,
        "attention windows, repeated over the layers: L is max_seq_len tokens, S a quarter of that",
        decides=Decides.WEIGHTS,
    )
    vocab_size: int = setting(
        0, "vocabulary size of the tokenizer", flag=False, decides=Decides.WEIGHTS
    )


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """data"""

    data_path: str | None = setting(
        None,
        "data folder, local, in object storage or on the Hub (hf://datasets/OWNER/NAME[@REVISION][/FOLDER]); files or "
        "URLs of text, separated by commas (URLs also listed in a text file); or paths of token files without .bin, "
        f"separated by commas (default: the downloaded {DATASET_NAME} data set)",
    )
    data_cache: float = setting(
        DATA_CACHE_GB,
        "GB on disk for data fetched from the Hub or a web server, so that it is not fetched again",
        metavar="GB",
        above=0,
    )
    val_path: str | None = setting(
        None,
        "validation data, named like --data-path (default: val/ below it or files named so, else its last file)",
        auto=True,
    )
    data_format: str = setting(
        "text",
        "text: parquet, jsonl, jsonl.gz, jsonl.zst, txt, arrow | shards: token files of scripts.tok_shards | "
        "megatron: Megatron's .bin and .idx files | any other name xyz: .xyz files, read by your "
        "nanochat/source_xyz.py",
        decides=Decides.ROWS,
    )
    without_documents: str | None = setting(
        None,
        "file of documents to exclude from the loss, one FILE:DOC per line (FILE:* for a whole file; DOC counts "
        "from 0); their tokens stay in the rows",
        metavar="LIST",
        decides=Decides.STEP,
        note=TARGETS,
    )
    plan: str = setting(
        "error",
        "what to do when a forecast (plan) shows the data running out before the last step; off: make no plan",
        choices=("error", "warn", "off"),
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """optimization (base rates are for batches of 2^19 tokens and, for embeddings and head, width
    768)"""

    activation_checkpointing: bool = setting(
        False,
        "recompute each layer in the backward pass: slower, but needs far less memory",
        note=ROUNDING + "its compiled kernels differ",
    )
    device_batch_size: int = setting(
        -1,
        "B: rows per forward pass; -1: the largest power of two that fits into memory",
        auto=True,
        least=1,
        most=10**6,
        note=ROUNDING + "sums are grouped differently",
    )
    leaves: int = setting(
        -1,
        "K: number of blocks per step, whose gradients are added in a fixed order; -1: the smallest power of two "
        ">= the number of processes",
        auto=True,
        decides=Decides.STEP,
        note="decides the order in which gradients are added",
    )
    total_batch_size: int = setting(
        -1,
        "tokens per step; -1: derived from the size of the model",
        auto=True,
        decides=Decides.ROWS,
        note="decides what a step computes",
        least=1,
        most=10**12,
    )
    embedding_lr: float = setting(
        0.3, "learning rate of the embeddings (AdamW)", decides=Decides.STEP, least=0, most=MAX_RATE
    )
    unembedding_lr: float = setting(
        0.008,
        "learning rate of the output head (AdamW)",
        decides=Decides.STEP,
        least=0,
        most=MAX_RATE,
    )
    matrix_lr: float = setting(
        0.02, "learning rate of the matrices (Muon)", decides=Decides.STEP, least=0, most=MAX_RATE
    )
    scalar_lr: float = setting(
        0.5,
        "learning rate of the scalars of each layer (AdamW)",
        decides=Decides.STEP,
        least=0,
        most=MAX_RATE,
    )
    weight_decay: float = setting(
        0.28, "cautious weight decay of the matrices", decides=Decides.STEP
    )
    max_grad_norm: float | None = setting(
        None,
        "scale larger gradients down to this norm (default: off)",
        decides=Decides.STEP,
        above=0,
    )
    skip_spikes: float | None = setting(
        None,
        "skip the update of a step whose loss or gradient norm is this many robust deviations above the median "
        "of the last 128 steps (default: off)",
        metavar="SIGMA",
        decides=Decides.STEP,
        above=0,
    )
    z_loss: float = setting(
        0.0,
        "coefficient of the squared logsumexp of the logits, added to the training loss only; reported losses "
        "exclude it",
        decides=Decides.STEP,
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """evaluating (every N steps and at the end; -1: never)"""

    eval_every: int = setting(250, "steps between evaluations")
    eval_tokens: int = setting(
        80 * 524288,
        "validation tokens per evaluation",
        least=1,
        note="bits per byte before and after the change are measured on different amounts of text",
    )
    core_metric_every: int = setting(-1, "steps between evaluations of the CORE metric")
    core_metric_max_per_task: int = setting(500, "examples per CORE task; -1: all")
    sample_every: int = setting(
        2000, "steps between samples, in which the model continues validation text"
    )


@dataclass(frozen=True, kw_only=True)
class LongRunSettings:
    """long runs, and new runs from old ones"""

    max_runtime_seconds: float = setting(
        -1.0,
        "time limit; the run saves and stops before it (default: the end of the SLURM job, else "
        "NANOCHAT_MAX_RUNTIME)",
    )
    walltime_reserve_seconds: float = setting(
        120.0, "minimum time reserved for the last save before the limit", least=0
    )
    collective_timeout_seconds: float = setting(
        600.0, "end the run if a rank hangs for this long", above=0
    )
    init_from: str | None = setting(
        None,
        "start a new run with the weights of another",
        metavar="RUN[@STEP]",
        decides=Decides.STEP,
        note=ORIGIN,
    )
    fork_from: str | None = setting(
        None,
        "start a new run that continues another one from this step, with its settings except those that the "
        "command line names; --no-NAME switches off what is off by default, such as --no-skip-spikes",
        metavar="RUN@STEP",
        decides=Decides.STEP,
        note=ORIGIN,
    )
    fork: dict | None = setting(
        None, "what --fork-from found (nanochat/fork.py)", flag=False, auto=True
    )
    skip_steps: int = setting(
        0,
        "with --fork-from: skip the rows of this many steps",
        decides=Decides.STEP,
        note=ORIGIN,
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class Settings(
    LongRunSettings,
    SinkSettings,
    SaveSettings,
    EvaluationSettings,
    ScheduleSettings,
    OptimizerSettings,
    HorizonSettings,
    CurriculumSettings,
    StreamSettings,
    TokenizerSettings,
    TextSettings,
    DataSettings,
    ModelSettings,
    RunSettings,
):
    """All settings of a run. (A dataclass lists the fields of its last base first.) Raises
    ValueError for values out of bounds and for flags that contradict each other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self.differing().items():
            check_bounds(flag(name), value, fields_of(type(self))[name].metadata)
        self.is_kept(0)  # checks --save-at
        if self.fork_from is not None and self.init_from is not None:
            raise ValueError(
                "--fork-from, --init-from: use one of them; a fork continues a run in everything, and "
                "--init-from takes its weights only"
            )
        if self.fork_from is not None and self.model_tag is None:
            raise ValueError("--fork-from: a fork is a new run; name it with --model-tag=NAME")
        if self.skip_steps and self.fork_from is None:
            raise ValueError(
                f"--skip-steps={self.skip_steps}: applies only to a fork; name the run, and the step before the rows "
                f"to skip, with --fork-from=RUN@STEP"
            )
        self._check_selection()

    def _check_selection(self) -> None:
        """ValueError if settings that select documents of text differ from their defaults, but the data
        is not text. The FileSource of a fork's own kind of file receives --text-field, too."""
        if self.data_format == "text":
            return
        may_differ = () if self.data_format in FORMATS else ("text_field",)
        for name, value in Selection.of(asdict(self)).named().items():
            if name not in may_differ:
                raise ValueError(
                    f"{flag(name)}={value}: applies to text only, but --data-format is "
                    f"{self.data_format}; remove it"
                )

    @classmethod
    def of_flags(cls, flags: Mapping[str, Any]) -> dict[str, Any]:
        """{name: value} of the settings on a parsed command line. The consent to
        exhaustion in a curriculum file becomes a setting. ValueError or FileNotFoundError for
        invalid values."""
        values = {f.name: flags[f.name] for f in fields(cls) if f.name in flags}
        path = flags["curriculum"]
        if path is not None:
            inline = path.startswith(("{", "["))  # from a file of flags
            mix = load(parse_json(path, "--curriculum") if inline else path)
            values["curriculum"] = replace(mix, allow_bucket_exhaustion=False).to_json()
            values["allow_bucket_exhaustion"] |= mix.allow_bucket_exhaustion
        return values

    @staticmethod
    def from_json(value: Mapping[str, Any], path: Path | str = CONFIG_NAME) -> "Settings":
        """The settings in a run's config.json, which is at `path`. A missing setting gets its
        default; unknown entries are ignored. ValueError, which begins with `path`, for a value that
        is invalid for its setting."""
        order = value.get("order", Settings.order)
        try:
            check_shape(order, str, "order")
            kind = settings_class(order)
            types = get_type_hints(kind)
            values = {name: value[name] for name in fields_of(kind) if name in value}
            for name, setting_value in values.items():
                check_shape(setting_value, types[name], name)
            settings = kind(**values)
            _ = settings.mix  # checks the curriculum
        except ValueError as e:
            remedy = "restore it, if it was damaged or edited, or use the code that wrote it"
            raise ValueError(f"{path}: {e}; {remedy}") from None
        return settings

    def to_json(self) -> dict[str, Any]:
        """The settings as plain JSON, for `from_json`."""
        return asdict(self)

    @property
    def mix(self) -> Curriculum | None:
        """The curriculum, None without one. ValueError if config.json holds something else."""
        return None if self.curriculum is None else load(self.curriculum)

    @property
    def curriculum_tokens(self) -> int:
        """Duration of all phases of the curriculum together, in tokens; 0 without a curriculum, or if
        its last phase has none."""
        return 0 if self.mix is None else self.mix.tokens

    @property
    def curriculum_begin(self) -> int:
        """The tokens of the run from which the phases of its curriculum count: those at the fork
        that named it."""
        begin: int = (self.fork or {}).get("mix_tokens", 0)
        return begin

    @property
    def curriculum_end(self) -> int:
        """The tokens of the run at which its curriculum ends; 0 if none does."""
        return self.curriculum_begin + self.curriculum_tokens if self.curriculum_tokens else 0

    @property
    def tag(self) -> str:
        """The name of the run's folder."""
        return self.model_tag or f"d{self.depth}"

    @property
    def order_seed(self) -> int:
        """The seed of the data order."""
        return self.seed if self.data_seed is None else self.data_seed

    def since(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """{name: value} of the settings that differ from those in a run's config.json; {} for a run
        that has none yet."""
        ours = self.to_json()
        return {name: ours[name] for name in ours if name in config and config[name] != ours[name]}

    def differing(self) -> dict[str, Any]:
        """{name: value} of the settings that differ from their defaults."""
        return {
            name: getattr(self, name)
            for name, f in fields_of(type(self)).items()
            if getattr(self, name) != f.default
        }


def fields_of(kind: type[Settings]) -> dict[str, Field]:
    """{name: field} of a class of settings."""
    return {f.name: f for f in fields(kind)}


FIELDS = fields_of(Settings)


def settings_class(order: str) -> type[Settings]:
    """The class of the settings of a run with this --order, which may add its own to `Settings`.
    ValueError for an unknown order."""
    if order not in ORDERS:
        raise ValueError(f"--order: got {order!r}, expected {' or '.join(ORDERS)}")
    return open_door(ORDERS[order]).settings


# ---- the command line ---------------------------------------------------------------------------

# settings that describe how one run begins, which a fork does not take from its parent
OF_ONE_RUN = (
    "model_tag",
    "resume",
    "force",
    "fork_from",
    "fork",
    "init_from",
    "skip_steps",
    "mirror_to",
)
# settings whose default of None stands for something that is found elsewhere, not for nothing
FOUND = ("data_path", "val_path", "data_seed", "tokenizer", "eod_token", "cpu_threads")
# settings that say how a launch runs and what it reports, and change no step; a fork that has others
# is not a fork that changes something
OF_LAUNCH = (
    *("data_cache", "plan", "strict", "tokenizer", "eod_token", "tokenizer_threads"),
    *("eval_every", "core_metric_every", "core_metric_max_per_task", "sample_every"),
    *("save_every", "save_at", "sync_save", "keep_last_k"),
    *("run", "log_to", "profile_steps"),
    *("max_runtime_seconds", "walltime_reserve_seconds", "collective_timeout_seconds"),
)
# settings that say what rows hold, and that a fork may change nevertheless
OF_ROWS = ("max_seq_len", "packing", "long_docs", "overlap", "buffer_size", "curriculum")


def is_kept_by_forks(name: str, decides: Decides) -> bool:
    """Whether a fork must have its parent's value of a setting."""
    is_of_weights_or_order = bool(decides & (Decides.ROWS | Decides.WEIGHTS))
    return is_of_weights_or_order and name not in (*OF_ROWS, "total_batch_size", "pack")


def flag(name: str) -> str:
    """The flag of a setting; for a switch that is on by default, the flag that turns it off; for a
    setting without a flag, its name."""
    f = FIELDS.get(name)
    if f is not None and not f.metadata.get("flag", True):
        return name
    return ("--no-" if f is not None and f.default is True else "--") + name.replace("_", "-")


def add_flags(parser: Parser, without: Sequence[str] = (), *, listed: bool = True) -> Parser:
    """Add the flags of all settings except `without` to a parser, in their groups. Without
    `listed`, --help omits them. The flags of an --order of its own are added when it is given."""
    parser.instead = instead_of
    parser.of_run = flags_of_config
    parser.usage = "%(prog)s [flags]"
    parser.example = ", such as a run's config.json" * listed
    for group in reversed(Settings.__bases__):
        _add_group(parser, group, without, listed)
    parser.brings = ("order", partial(_add_order, parser, listed))
    parser.inherits = inherited_flags
    return parser


def _add_order(parser: Parser, listed: bool, order: str) -> None:
    """Add the flags that only runs with this --order have. An unknown order has none: argparse
    refuses it."""
    if order in ORDERS:
        parser.brings = None  # once
        _add_group(parser, settings_class(order), tuple(FIELDS), listed)


def _add_group(parser: Parser, group: type, without: Sequence[str], listed: bool) -> None:
    """Add the flags of a dataclass of settings, except those named in `without`."""
    titled = parser.add_argument_group((group.__doc__ or "").strip())
    types = get_type_hints(group)
    for f in fields(group):
        if not f.metadata.get("flag", True) or f.name in without:
            continue
        how = {
            word: f.metadata[word]
            for word in ("help", "choices", "metavar", "type")
            if word in f.metadata
        }
        [kind, *_] = get_args(types[f.name]) or (types[f.name],)  # int of int | None
        if kind is bool:
            how["action"] = argparse.BooleanOptionalAction if f.default else "store_true"
        elif kind in (int, float):
            # everything else, such as the path of a curriculum, stays text
            how = {"type": kind, "metavar": "N" if kind is int else "X", **how}
        flags = ["--" + f.name.replace("_", "-"), *f.metadata.get("also", ())]
        action = titled.add_argument(*flags, dest=f.name, default=f.default, **how)
        action.help = action.help if listed else argparse.SUPPRESS
        if is_off(f.default) and f.name not in (*OF_ONE_RUN, *FOUND):
            # switches off what a file or the parent of a fork switches on
            titled.add_argument(
                f"--no-{flags[0][2:]}",
                dest=f.name,
                action="store_const",
                const=f.default,
                default=f.default,
                help=argparse.SUPPRESS,
            )


def instead_of(name: str) -> str:
    """What to use in place of an unknown flag: one of another program, or of another --order. '' if it
    is neither."""
    if name in OLD_FLAGS:
        return OLD_FLAGS[name]
    for order in ORDERS:
        with contextlib.suppress(ModuleNotFoundError):
            own = fields_of(settings_class(order)).keys() - FIELDS.keys()
            if name.removeprefix("--").replace("-", "_") in own:
                return f"has no effect without --order={order}; remove it, or add --order={order}"
    return ""


def known_settings(config: Mapping[str, Any]) -> dict[str, Field]:
    """{name: field} of the settings that a run with this config.json has in this code."""
    order = str(config.get("order", Settings.order))
    return fields_of(settings_class(order)) if order in ORDERS else FIELDS


def flags_of_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a run's config.json that --config takes as flags: not --resume and --force,
    which describe one launch."""
    return {
        name: config[name]
        for name, f in known_settings(config).items()
        if f.metadata.get("flag", True) and name in config and name not in ("resume", "force")
    }


def flags_of_config(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """`flags_of_run` of the config.json in a folder. They name the commits that the run pinned, where
    the run named a branch, which may have moved on."""
    flags = flags_of_run(config)
    paths = {
        name: paths_in(str(flags[name])) for name in ("data_path", "val_path") if flags.get(name)
    }
    if not any(map(is_remote, itertools.chain(*paths.values()))):
        return flags
    manifests = read_manifests(folder / DATA_MANIFEST)
    train, val = [[m["root"] for m in manifests.get(split, {}).values()] for split in SPLITS]
    # where the data of a split were moved, the other split may name the commit
    for name, own, other in (("data_path", train, val), ("val_path", val, train)):
        pinned = [_as_pinned(path, own, other) for path in paths.get(name, [])]
        if pinned != paths.get(name, []):
            flags[name] = ",".join(pinned)
    return flags


def _as_pinned(path: str, *folders: Iterable[str]) -> str:
    """A path in the state that a run's pinned folders name, of which the first that name one count;
    itself if none does, and, with a warning, if they name several, as of two branches."""
    named = as_path(path)
    if not isinstance(named, Remote):
        return path
    for roots in folders:
        states = {str(state) for root in roots if (state := _state_of(named, root)) is not None}
        if len(states) > 1:
            log.warning(
                "%s: this run has read several states of it (%s); a new run reads the newest one, unless you name one",
                path,
                few(sorted(states)),
            )
            return path
        if states:
            return states.pop()
    return path


def _state_of(path: Remote, root: str) -> Remote | None:
    """The state of a path that a pinned folder names, if one of the two contains the other."""
    state = path.as_pinned(root)
    if state == path:
        return None
    folder = as_path(root)
    is_same_place = state.is_relative_to(folder) or folder.is_relative_to(state)
    return state if is_same_place else None


def inherited_flags(given: Sequence[str]) -> dict[str, Any]:
    """The flags that a fork takes from its parent, as the launch that took the step had them or,
    once it has begun, from its own config.json, here or in its mirror; {} without --fork-from.
    ValueError or FileNotFoundError if the parent cannot be found."""
    name = value_of(given, "--fork-from")
    if name is None:
        return {}
    tag = value_of(given, "--model-tag")
    if tag is not None and value_of(given, "--resume") != "scratch":
        own = run_path(tag)
        if (own / CONFIG_NAME).is_file():
            return flags_of_run(read_config(own))
        mirror = value_of(given, "--mirror-to")
        mirrored = {} if mirror is None else open_door(MIRROR)(mirror)
        if mirrored:
            return flags_of_run(mirrored)
    parent, selector = find_run_at(name)
    flags = flags_of_run(config_at(parent, step_in(selector)))
    return {name: value for name, value in flags.items() if name not in OF_ONE_RUN}


def from_flags(args: argparse.Namespace) -> Settings:
    """The settings of a parsed command line. ValueError or FileNotFoundError for invalid values."""
    kind = settings_class(args.order)
    values = kind.of_flags(vars(args))
    if args.fork_from is not None:
        values["fork"] = {"named": args.named}
        # before they are checked for what fits together, because the rest is inherited
        check_kept(args.fork_from, _flags_of_parent(args), values)
    return kind(**values)


def _flags_of_parent(args: argparse.Namespace) -> dict[str, Any]:
    """The flags of the run that a command forks; {} if the fork has begun, or the run is not here."""
    tag = args.model_tag
    if tag is not None and args.resume != "scratch" and (run_path(tag) / CONFIG_NAME).is_file():
        return {}
    with contextlib.suppress(OSError, ValueError):
        parent, selector = find_run_at(args.fork_from)
        return flags_of_run(config_at(parent, step_in(selector)))
    return {}


def check_kept(fork_from: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """ValueError if a fork changes settings that it must keep. `before`, `after`: the settings of its
    parent and its own, of which common ones are compared."""
    refused = []
    for name, f in known_settings(after).items():
        if name in before and name in after and is_kept_by_forks(name, f.metadata["decides"]):
            for _, was, now in changes_of(name, before[name], after[name]):
                refused.append(f"{flag(name)} was {was!r} and is {now!r}")
    if refused:
        raise ValueError(
            f"--fork-from={fork_from}: a fork keeps its parent's model, tokenizer and order of the data, but "
            f"{'; '.join(refused)}; leave them out, or start a new run without --fork-from, which inherits no settings "
            f"(--init-from={fork_from} gives it these weights, if its model is the same)"
        )


# ---- a later launch -----------------------------------------------------------------------------


def changes_of(name: str, before: Any, after: Any) -> list[Difference]:
    """How another value of a setting, as in config.json, changes what a run computes; [] if it does
    not. Curricula are compared by their effect: their notation does not count, nor does the duration
    of the last phase, which never ends (the length of the run is a setting of its own)."""
    if name == "curriculum" and before is not None and after is not None:
        differing = load(before).differences(load(after))
        return [Difference(f"{flag(name)}: {part}", *values) for part, *values in differing]
    # the positive form of a switch, because values follow
    what = flag(name).replace("--no-", "--")
    return [] if before == after else [Difference(what, before, after)]


class Notice(NamedTuple):
    """What to say of a setting that a later launch has changed."""

    change: str
    effect: str


def resume_settings(
    run: Mapping[str, Any],
    command: Settings,
    *,
    run_dir: Path,
    newest: Mapping[str, Any] | None = None,
) -> tuple[Settings, dict[str, Notice]]:
    """(settings, {changed setting: notice}) for a command that resumes the run in `run_dir`, whose
    config.json holds `run`. Automatic settings of the command take the run's values. `newest`:
    `config_at` the newest launch, from which a setting may go back to the run's. ValueError lists
    the changes that are not allowed."""
    path = run_dir / CONFIG_NAME
    last = Settings.from_json(run if newest is None else newest, path)
    then, now = Settings.from_json(run, path), command.to_json()
    # with another --order, which is refused, only the common settings can be compared
    known = fields_of(type(then) if type(then) is type(command) else Settings)
    notices: dict[str, Notice] = {}
    refused: list[str] = []
    for name, f in known.items():
        before, after = getattr(then, name), now[name]
        is_automatic = f.metadata.get("auto") and after == f.default
        if is_automatic or name == "fork":
            now[name] = after = before
        note = f.metadata["note"].replace("RUN/", f"{run_dir}/")
        differing = changes_of(name, before, after)
        lasted, lasts = last.curriculum_tokens, command.curriculum_tokens
        if name == "curriculum" and lasted != lasts:
            change = f"{flag(name)}: its phases had {lasted:,} tokens (0: no end), now {lasts:,}"
            notices[name] = Notice(change, HORIZON)
        if differing and f.metadata["decides"]:
            lines = []
            for what, *values in differing:
                old, new = [curriculum_text(value) or repr(value) for value in values]
                lines.append(f"{what}: the run has {old}, this launch {new}")
            refused.append("\n  ".join(lines) + f" ({note})")
        elif changed := changes_of(name, getattr(last, name), after):
            [(what, old, new)] = changed
            whose = "the run started with"
            if getattr(last, name) != before:
                whose = "the launch before had"
            notices[name] = Notice(f"{what}: {whose} {old!r}, this launch has {new!r}", note)
    unknown = run.keys() - fields_of(type(then)).keys() - {"origin", "derived"}
    refused += [
        f"{flag(name)}: the run has {run[name]!r}, but this code has no such setting; use the code that began it"
        for name in sorted(unknown)
    ]
    if refused:
        tag = run_dir.name
        listed = "\n  ".join(refused)
        raise ValueError(
            f"{path}: the run was started with different settings:\n  {listed}\n"
            f"use the run's settings (--config={path}, without these flags), or start a new run with "
            f"--model-tag=NAME: a fork of this one (--fork-from={tag}; it keeps model, tokenizer and order of the "
            f"data), or one with its weights (--init-from={tag}); --resume=scratch --force renames this run and "
            f"starts over"
        )
    return type(command)(**now), notices


def settings_table() -> str:
    """The rules for a resume as a markdown table, in the order of the code, then those of the
    settings that belong to an --order of its own. A setting without a row may change."""
    lines = ["| setting | may change | why not, or what a change does |", "| --- | --- | --- |"]
    known = dict(FIELDS)
    for order in ORDERS:
        known |= fields_of(settings_class(order))
    for name, f in known.items():
        if note := f.metadata["note"]:
            may_change = "no" if f.metadata["decides"] else "yes"
            lines.append(f"| `{flag(name)}` | {may_change} | {note} |")
    return "\n".join(lines) + "\n"
