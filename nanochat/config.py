"""
The settings of a run: one frozen dataclass, and everything that people see of it.

    warmup_steps: int = setting(40, "steps over which the learning rate rises", fixed=STEP)

From such a field come the flag `--warmup-steps`, its line in --help with the default, the place in
config.json, the rule for a later launch, and a row of the table in docs/reference.md. A fork that
wants a flag adds one field here; a room that owns a default declares its fields itself
(`ScheduleSettings` in nanochat/schedule.py) and is listed among the bases.

**A run never changes what it is.** The command that started a run also restarts it, so a restart
may carry other flags, by intent or by accident:

    the run's settings   {"depth": 12, "save_every": 100, "lanes": 64}
    the command's        {"depth": 16, "save_every": 500, "lanes": -1}
                            refused      allowed            automatic: keeps the run's 64

What decides which rows come in which order, or what a step computes from them, is `fixed`, and
says why. What only decides where, how fast and how long the run computes may change; a field whose
change people should know of has a `note`, and it is told. Whoever wants something else starts a new
run from the old one (--init-from). A field that an older run does not have has that field's
default; one that this code does not have is refused. Warning instead of refusing was rejected:
nobody reads the log of a job that restarts at night.
"""

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from nanochat.attention import KERNELS, MODES
from nanochat.cli import Parser, setting
from nanochat.common import check_shape, parse_json
from nanochat.dataset import NAME as DATASET_NAME
from nanochat.order import LAYOUTS, StreamConfig
from nanochat.packing import VERSION
from nanochat.schedule import MOST_STEPS, ScheduleSettings
from nanochat.text import Selection, TextSettings
from nanochat.tokenizer import EOD_HELP, TOKENIZER_HELP

if TYPE_CHECKING:
    from nanochat.curriculum import Curriculum

SHAPE = "the shape of the model"
STREAM = "decides which tokens come in which order"
STEP = "what a step computes"
ORIGIN = "what the run began with"
HORIZON = "moves the end of the run: schedules stretch or shrink from here on"
MOST_RATE = 10**6  # of learning rates: far above what trains, far below what overflows
ROUNDING = "same data, not the same bits: "


def numbers(text: str) -> list[float]:
    """The type of a flag: numbers with commas between them."""
    return [float(part) for part in text.split(",")]


# Each class is a group of --help, and its docstring the group's title. A field with `flag=False`
# follows from other fields or from the machine. Where the command gives the default of a field
# with `auto`, the run keeps its value. A value that is not the default is at least `least`, at most
# `most`, above `above`; with `of_order` it means something in that order alone.

@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """run"""

    run: str = setting("dummy", "name of the wandb run; dummy: no wandb")
    log_to: str = setting(
        "wandb", "where values are drawn, with commas between: wandb (where --run names its run), tensorboard, trackio")
    model_tag: str | None = setting(None, "name of the run directory (default: d<depth>)")
    resume: str = setting(
        "auto", "auto: newest good checkpoint, or start | scratch | a checkpoint's path or RUN@STEP")
    force: bool = setting(False, "with --resume=scratch: move the run that is there aside")
    device_type: str = setting("", "cuda | mps | cpu (default: the best there is)",
                               note=ROUNDING + "other devices round differently")
    dtype: str = setting(
        "auto", "of activations, embeddings and Muon's products: auto | bfloat16 | float32 (no TF32)", auto=True,
        fixed="the type of activations, embeddings and Muon's products")
    fp8: bool = setting(
        False, "multiply matrices in FP8 in training: GPUs of compute capability 8.9 and up", fixed=STEP)
    attention_kernel: str = setting(
        "wheel", "FlashAttention on CUDA: PyTorch's wheel has version 2; fa3 and fa4 need a package of their own",
        choices=KERNELS, fixed=STEP)
    compile: str = setting(
        "auto", "torch.compile: auto is on with CUDA", choices=("auto", "on", "off"),
        note=ROUNDING + "compiled kernels round differently")
    deterministic: bool = setting(
        True, "on CUDA only kernels whose result does not depend on scheduling", fixed=STEP)
    seed: int = setting(42, "of the weights and of the order of the data", fixed=STREAM)
    data_seed: int | None = setting(
        None, "of the order of the data alone (default: --seed)", type=int, metavar="N", fixed=STREAM)
    world_size: int = setting(
        1, "processes of the launch", flag=False,
        note="same data; same bits as long as it divides the number of leaves")
    cpu_threads: int | None = setting(
        None, "threads of PyTorch on a CPU (OMP_NUM_THREADS)", flag=False,
        note=ROUNDING + "PyTorch's threads (OMP_NUM_THREADS) share out sums on a CPU")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """model"""

    depth: int = setting(20, "layers; the one dial: width and batch follow from it", fixed=SHAPE, least=1, most=10**4)
    aspect_ratio: int = setting(64, "width = depth * aspect ratio, up to a whole head", fixed=SHAPE, least=1,
                                most=10**4)
    head_dim: int = setting(128, "size of an attention head", fixed=SHAPE, least=1, most=10**4)
    max_seq_len: int = setting(2048, "T: tokens a row trains on", fixed="the length of a row", least=1, most=10**8)
    attention_mode: str = setting(
        "causal", "all but causal keep attention inside a document", choices=tuple(MODES),
        fixed="what a token attends to")
    window_pattern: str = setting(
        "SSSL", "attention windows, tiled over layers: L is max_seq_len tokens, S a quarter of it", fixed=SHAPE)
    vocab_size: int = setting(0, "of the tokenizer", flag=False, fixed=SHAPE)


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """data"""

    data_path: str | None = setting(
        None, "folder, here or in a store (s3://, gs://, az://, msc://); of pairs also their paths "
        f"without .bin, with commas between them (default: the {DATASET_NAME} download)")
    val_path: str | None = setting(
        None, "validation files (default: the last file below --data-path; with --order=megatron "
        "the whole documents of the valid split)")
    data_format: str = setting(
        "text", "text: parquet, jsonl, jsonl.gz, jsonl.zst, txt, arrow | shards: what scripts.tok_shards makes | "
        "megatron: Megatron's pairs of .bin and .idx | xyz: .xyz files, which "
        "nanochat/source_xyz.py reads", fixed=STREAM)
    tokenizer: str | None = setting(
        None, f"{TOKENIZER_HELP} (default: the tokenizer folder beside the data, or <base dir>/tokenizer, "
        f"where scripts.tok_train puts it)", also=["--tokenizer-dir"], metavar="NAME")
    eod_token: str | None = setting(None, EOD_HELP, metavar="TOKEN")
    tokenizer_fingerprint: str = setting(
        "", "of the tokenizer", flag=False,
        fixed="decides the tokens of every text; the run's own copy is in its folder: "
        "--tokenizer=RUN/tokenizer")
    tokenizer_threads: int = setting(4, "threads per process that read and tokenize", least=1)
    object_storage_cache: str | None = setting(
        None, "where indices of data in a store are copied to (default: <base dir>/object_storage)",
        metavar="DIR")
    without_documents: str | None = setting(
        None, "switch off the targets of the documents that this file lists, one FILE:ROW per line (FILE:* for all of "
        "a file); rows keep their tokens", metavar="LIST", fixed="decides which targets count", of_order="lanes")
    packing: str = setting(
        "bestfit", "how documents become rows", choices=tuple(LAYOUTS), fixed=STREAM, of_order="lanes")
    pack: bool = setting(True, "--no-pack, with --packing=binned: one entry a row", fixed=STREAM, of_order="lanes")
    long_docs: str = setting(
        "crop", "what does not fit: dropped, or later", choices=("crop", "split"), fixed=STREAM, of_order="lanes")
    overlap: int = setting(
        64, "context tokens repeated before a split document's rest", fixed=STREAM)
    buffer_size: int = setting(
        128, "documents that wait in a lane for a row they fit", fixed=STREAM)
    packer_version: int = setting(VERSION, "of the packer", flag=False, fixed=STREAM)
    lanes: int = setting(-1, "V, virtual readers; -1: the largest divisor of the rows per step up to 64 that the data "
                         "feeds", auto=True, fixed="every lane has its own share of the data")
    leaves: int = setting(-1, "K, blocks of a step whose gradients are added in order; -1: the next power of two >= "
                          "the number of processes", auto=True,
                          fixed="the order in which gradients are added")
    plan: str = setting(
        "error", "where the data end before the run does, which is computed first: do not start | "
        "warn | do not compute it", choices=("error", "warn", "off"))
    curriculum: dict | None = setting(
        None, "YAML file: which buckets (subfolders of the data) are mixed when", metavar="YAML",
        fixed="decides which bucket a row comes from; how it is written, and how long its last "
        "phase lasts, is free", of_order="lanes")
    allow_bucket_exhaustion: bool = setting(
        False, "go on without a bucket that has run dry",
        note="a lane whose bucket has run dry goes on with the others, or halts the run", of_order="lanes")
    allow_budget_mismatch: bool = setting(
        False, "let the run take more or fewer tokens than the curriculum's phases together", of_order="lanes")


@dataclass(frozen=True, kw_only=True)
class MegatronSettings:
    """Megatron's order"""

    order: str = setting(
        "lanes", "lanes: documents, packed | megatron: its own samples in its own shuffled order, "
        "row i of the run is sample i. Instead of reset_attention_mask: --attention-mode; "
        "reset_position_ids would change nothing", choices=("lanes", "megatron"), fixed=STREAM)
    split: str | None = setting(
        None, "shares of training, validation, test (default: 969,30,1; all for training where "
        "validation has data of its own)", auto=True,
        fixed="decides which documents train and which validate", of_order="megatron")
    blend_weights: list | None = setting(
        None, "the weight of each prefix (default: all of each prefix once; of a single one as "
        "much as it takes)", type=numbers, metavar="A,B", fixed=STREAM, of_order="megatron")
    eod_mask_loss: bool = setting(
        False, "no loss where the input is EOD", fixed="decides which targets count", of_order="megatron")
    num_samples: int = setting(
        -1, "of the whole run", flag=False, auto=True,
        fixed="Megatron's order is a shuffle of so many samples: another number is another order")
    index_cache: str | None = setting(
        None, "where shuffled indices are kept (default: <base dir>/index_cache)", metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class HorizonSettings:
    """horizon (the first that is set counts; a curriculum stands before the ratio)"""

    num_iterations: int = setting(-1, "optimizer steps", note=HORIZON, least=1, most=MOST_STEPS)
    target_flops: float = setting(-1.0, "steps to spend so many FLOPs", note=HORIZON)
    target_param_data_ratio: float = setting(12.0, "tokens per scaling parameter", note=HORIZON)


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """optimization (rates are for the reference depth and batch; they are scaled from there)"""

    activation_checkpointing: bool = setting(
        False, "compute each layer again in the backward pass: slower, in far less memory",
        note=ROUNDING + "compiled, they are other kernels")
    device_batch_size: int = setting(
        -1, "B: rows in one forward pass; -1: the largest power of two that fits", auto=True, least=1, most=10**6,
        note=ROUNDING + "sums are grouped differently")
    total_batch_size: int = setting(
        -1, "tokens a step; -1: from the size of the model", auto=True, fixed=STEP, least=1, most=10**12)
    embedding_lr: float = setting(0.3, "embeddings (AdamW)", fixed=STEP, least=0, most=MOST_RATE)
    unembedding_lr: float = setting(0.008, "output head (AdamW)", fixed=STEP, least=0, most=MOST_RATE)
    matrix_lr: float = setting(0.02, "matrices (Muon)", fixed=STEP, least=0, most=MOST_RATE)
    scalar_lr: float = setting(0.5, "per-layer scalars (AdamW)", fixed=STEP, least=0, most=MOST_RATE)
    weight_decay: float = setting(0.28, "cautious weight decay of matrices", fixed=STEP)
    max_grad_norm: float | None = setting(
        None, "a longer gradient is scaled down to this norm (default: none is)", fixed=STEP, above=0)
    skip_spikes: float | None = setting(
        None, "do not apply a step whose loss or gradient norm is so many robust deviations above the "
        "last 128 (default: apply all)", metavar="SIGMA", fixed=STEP, above=0)
    z_loss: float = setting(
        0.0, "coefficient of the squared logsumexp of the logits, which is added to the loss in training "
        "alone, and told nowhere", fixed=STEP, least=0)


@dataclass(frozen=True, kw_only=True)
class LookSettings:
    """evaluating and saving (every N steps and at the end; -1: never, or for --save-every: by time)"""

    eval_every: int = setting(250, "steps between evaluations")
    eval_tokens: int = setting(
        80 * 524288, "validation tokens an evaluation reads",
        note="bits per byte before and after are taken over different amounts of text")
    core_metric_every: int = setting(-1, "steps between evaluations of the CORE metric")
    core_metric_max_per_task: int = setting(500, "items of each of its tasks; -1: all")
    eval_bundle: str | None = setting(
        None, "the folder of its tasks (default: <base dir>/eval_bundle)", metavar="DIR")
    sample_every: int = setting(2000, "steps between continuations of validation text")
    save_every: int = setting(
        -1, "steps between checkpoints; -1: one whenever 30 minutes have passed, of which the newest two stay; "
        "0: only at the end")
    row_losses: bool = setting(True, "keep the loss of every row of every step in logs/rows (6 bytes per row)")
    log_every: int = setting(1, "steps between printed lines; the log has every step", least=1)
    profile_steps: str | None = setting(
        None, "PyTorch's profile of steps A to B - 1 into the run directory", metavar="A:B")
    sync_save: bool = setting(False, "let the loop wait until a checkpoint is written")
    keep_last_k: int | None = setting(
        None, "delete older numbered checkpoints (default: keep all but those saved by time)", least=1)
    keep_milestone_every: int | None = setting(None, "but never those of steps that this divides", least=1)


@dataclass(frozen=True, kw_only=True)
class LongRunSettings:
    """long runs, and new runs from old ones"""

    max_runtime_seconds: float = setting(
        -1.0, "stop in time, saved (default: the end of the SLURM job, else NANOCHAT_MAX_RUNTIME)")
    walltime_reserve_seconds: float = setting(120.0, "kept for the last save, at least", least=0)
    collective_timeout_seconds: float = setting(600.0, "a rank that hangs for so long ends the run", above=0)
    init_from: str | None = setting(
        None, "a new run starts with the weights of another", metavar="RUN[@STEP]", fixed=ORIGIN)
    init_optimizer: bool = setting(False, "and with the state of its optimizer", fixed=ORIGIN)
    init_data: str = setting("fresh", "at the start of the data, or where the other was",
                             choices=("fresh", "continue"), fixed=ORIGIN)
    skip_steps: int = setting(
        0, "a new run passes over the rows of the next so many steps", fixed=ORIGIN, least=0)


@dataclass(frozen=True, kw_only=True)
class Settings(LongRunSettings, LookSettings, ScheduleSettings, OptimizerSettings, HorizonSettings,
               MegatronSettings, TextSettings, DataSettings, ModelSettings, RunSettings):
    """All settings of a run; a dataclass takes the fields of its last base first. Raises ValueError
    for flags that contradict each other."""

    def __post_init__(self) -> None:
        for name, value in self.differing().items():
            rule = FIELDS[name].metadata
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{flag(name)}: got {value}, expected a finite number")
            if "least" in rule and not rule["least"] <= value <= rule.get("most", value):
                most = f" and at most {rule['most']}" if "most" in rule else ""
                raise ValueError(f"{flag(name)}: got {value}, expected at least {rule['least']}{most}")
            if "above" in rule and not value > rule["above"]:
                raise ValueError(f"{flag(name)}: got {value}, expected a number above {rule['above']}")
            if rule.get("of_order", self.order) != self.order:
                raise ValueError(f"{flag(name)}: it does nothing with --order {self.order}; leave it out, or take "
                                 f"--order {rule['of_order']}")
        if not set(self.log_to.split(",")) <= {"wandb", "tensorboard", "trackio"}:
            raise ValueError(f"--log-to: got {self.log_to!r}, expected wandb, tensorboard, trackio, or several of them "
                             f"with commas between")
        if self.profile_steps is not None and self.profiled is None:
            raise ValueError(f"--profile-steps: got {self.profile_steps!r}, expected A:B, the first step and the one "
                             f"behind the last, such as 10:13")
        if not all(0 < weight < float("inf") for weight in self.blend_weights or ()):
            raise ValueError(f"--blend-weights: got {self.blend_weights}, expected numbers above "
                             f"0; leave out a prefix that should give nothing")
        if self.init_from is None and (self.init_optimizer or self.init_data != "fresh"):
            raise ValueError("--init-optimizer, --init-data: they say what else comes from "
                             "another run; name it with --init-from RUN")
        for name, value in Selection.of(asdict(self)).named().items():
            if self.data_format in ("shards", "megatron"):
                raise ValueError(f"{flag(name)} {value}: it is for text, and --data-format is "
                                 f"{self.data_format}; leave it out")
        if self.order == "megatron" and self.data_format != "megatron":
            raise ValueError(f"--order megatron: it is an order of Megatron's files, and "
                             f"--data-format is {self.data_format}; take --data-format megatron, "
                             f"or --order lanes")

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Settings":
        """The settings in a run's config.json; what it does not have has its default, what is no
        setting is left. ValueError for a value that cannot be its field's."""
        found = {name: value[name] for name in FIELDS if name in value}
        what = "config.json of the run, which this program did not write so"
        check_shape(found, {name: TYPES[name] for name in found}, what)
        try:
            settings = cls(**found)
            _ = settings.mix  # ValueError for a curriculum that is none
        except ValueError as e:
            raise ValueError(f"{what}: {e}") from None
        return settings

    def to_json(self) -> dict[str, Any]:
        """As plain JSON, for `from_json`."""
        return asdict(self)

    @property
    def mix(self) -> "Curriculum | None":
        """The curriculum, None without one. ValueError if config.json holds something else."""
        return None if self.curriculum is None else read_curriculum(self.curriculum)

    @property
    def curriculum_tokens(self) -> int:
        """What all phases of the curriculum last together, 0 without one."""
        return 0 if self.mix is None else sum(phase.duration_tokens for phase in self.mix.phases)

    @property
    def order_seed(self) -> int:
        """The seed of the order of the data."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def trackers(self) -> list[str]:
        """What draws the values of the run: of the names in `log_to` all but a wandb without a run."""
        return [name for name in self.log_to.split(",") if name != "wandb" or self.run != "dummy"]

    @property
    def profiled(self) -> tuple[int, int] | None:
        """The steps to profile, as range(first, last) takes them; None for what is no such text."""
        match = re.fullmatch(r"(\d{1,12}):(\d{1,12})", self.profile_steps or "", re.ASCII)
        first, last = (int(match[1]), int(match[2])) if match else (0, 0)
        return (first, last) if first < last else None

    def differing(self) -> dict[str, Any]:
        """Those that are not their defaults."""
        return {name: getattr(self, name) for name, f in FIELDS.items()
                if getattr(self, name) != f.default}


def read_curriculum(source: str | dict[str, Any]) -> "Curriculum":
    """The curriculum in a file, or in a run's config.json. The module is loaded here, because most runs have none."""
    from nanochat.curriculum import load

    return load(source)


FIELDS = {f.name: f for f in fields(Settings)}
TYPES = get_type_hints(Settings)


# ---- the command line ---------------------------------------------------------------------------

SECTION = ("gpt-simple's files have sections; here each flag stands at the top level, as data_path: DIR or "
           "num_iterations: 1000 (docs/coming_from.md lists the names)")
ELSEWHERE = {  # flags that people know from other programs
    "--resume-from-step": "--resume=PATH goes on from that checkpoint, --resume=auto (the default) "
                          "from the newest",
    "--allow-curriculum-change": "a run keeps its curriculum; a new run (--model-tag) goes on "
                                 "with another one: --init-from=RUN --init-optimizer "
                                 "--init-data=continue",
    "--batch-size": "--device-batch-size is the number of rows in one forward pass of one process, "
                    "--total-batch-size the number of tokens in one step of all",
    **dict.fromkeys(("--learning-rate", "--lr"), "each kind of parameter has its own: --matrix-lr, "
                    "--embedding-lr, --unembedding-lr and --scalar-lr"),
    # gpt-simple's
    **dict.fromkeys(("--data", "--training", "--optimizer", "--model"), SECTION),
    "--training.resume": "here it is --resume=auto (the default), --resume=scratch with --force, or --resume=PATH",
    "--training.max-steps": "here it is --num-iterations",
    "--training.output-dir": "here --model-tag names the run; its folder is in NANOCHAT_BASE_DIR/runs",
    "--training.wandb-run-name": "here it is --run",
    **{f"--training.{name}": f"here it is --{name}" for name in
       ("keep-last-k", "max-runtime-seconds", "walltime-reserve-seconds", "seed")},
    "--data.path": "here it is --data-path",
    "--data.tokenizer": "here it is --tokenizer",
    "--data.format": "here it is --data-format=shards (their pretokenized) or --data-format=text (their jsonl)",
}


def flag(name: str) -> str:
    """How a setting is written on the command line: what is on by default, as it is switched off. One that
    follows from others or from the machine is nowhere written, and has its name alone."""
    on = name in FIELDS and FIELDS[name].default is True
    if name in FIELDS and not FIELDS[name].metadata.get("flag", True):
        return name
    return ("--no-" if on else "--") + name.replace("_", "-")


def add_flags(parser: Parser, without: Sequence[str] = (), *, listed: bool = True) -> Parser:
    """Give a parser the flags of all settings but some, in their groups; not `listed`: --help leaves them out."""
    parser.instead, parser.of_run, parser.usage = ELSEWHERE, flags_of_run, "%(prog)s [flags]"
    for group in reversed(Settings.__bases__):
        titled = parser.add_argument_group((group.__doc__ or "").strip())
        for f in fields(group):
            how = {word: f.metadata[word] for word in ("help", "choices", "metavar", "type")
                   if word in f.metadata}
            if TYPES[f.name] is bool:
                how["action"] = argparse.BooleanOptionalAction if f.default else "store_true"
            else:  # what is no number is given as text, a curriculum as its file
                [kind, *_] = get_args(TYPES[f.name]) or (TYPES[f.name],)
                how.setdefault("type", kind if kind in (int, float) else str)
            if f.metadata.get("flag", True) and f.name not in without:
                flags = ["--" + f.name.replace("_", "-"), *f.metadata.get("also", ())]
                action = titled.add_argument(*flags, dest=f.name, default=f.default, **how)
                action.help = action.help if listed else argparse.SUPPRESS
    return parser


def flags_of_run(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a run's config.json that are flags and say what the run is: not how a launch
    began it."""
    return {name: config[name] for name, f in FIELDS.items()
            if f.metadata.get("flag", True) and name in config and name not in ("resume", "force")}


def from_flags(args: argparse.Namespace) -> Settings:
    """The settings that a command line stands for. What a curriculum file allows stands apart from
    what it mixes. ValueError or FileNotFoundError for what cannot be."""
    given = {name: value for name, value in vars(args).items() if name in FIELDS}
    if args.order == "megatron" and args.data_path:
        from nanochat.tokens import split_weights

        given["data_path"], weights = split_weights(args.data_path)
        if weights and args.blend_weights:
            raise ValueError(f"--blend-weights: got it and weights in --data-path {args.data_path}; give one of them")
        given["blend_weights"] = weights or args.blend_weights
    if args.curriculum is not None:
        # what begins so is the curriculum itself, from a file of flags
        given_inline = args.curriculum.startswith("{")
        mix = read_curriculum(parse_json(args.curriculum, "--curriculum", dict) if given_inline else args.curriculum)
        plain = replace(mix, allow_bucket_exhaustion=False, allow_budget_mismatch=False)
        given["curriculum"] = plain.to_json()
        given["allow_budget_mismatch"] |= mix.allow_budget_mismatch
        given["allow_bucket_exhaustion"] |= mix.allow_bucket_exhaustion
    return Settings(**given)


# ---- a later launch -----------------------------------------------------------------------------

def go_on(run: Mapping[str, Any], command: Settings, *, run_dir: Path
          ) -> tuple[Settings, list[str]]:
    """(settings, notices) of a command that goes on with the run in `run_dir`, whose config.json
    holds `run`: what the command leaves to the program is as the run has it. ValueError that lists
    the changes that are not allowed."""
    then, now = Settings.from_json(run), command.to_json()
    notices: list[str] = []
    refused: list[str] = []
    fits = True  # whether the weights of the run fit what is asked for
    for name, f in FIELDS.items():
        before, after = getattr(then, name), now[name]
        if f.metadata.get("auto") and after == f.default:
            now[name] = after = before
        if name == "curriculum":  # how it is written does not count
            before, after = (mix and mix.identity() for mix in (then.mix, command.mix))
        if before != after:
            fits = fits and f.metadata["fixed"] != SHAPE and name not in ("max_seq_len", "tokenizer_fingerprint")
            change = f"{flag(name)}: the run has {before!r}, this launch {after!r}"
            if f.metadata["fixed"]:
                refused.append(f"{change} ({f.metadata['fixed']})")
            elif f.metadata["note"]:
                notices.append(f"{change} ({f.metadata['note']})")
    unknown = run.keys() - FIELDS.keys() - {"origin", "derived", "tokenizer_dir"}  # the last is --tokenizer now
    refused += [f"{flag(name)}: the run has {run[name]!r}, and this code has no such setting"
                for name in sorted(unknown)]
    if refused:
        lines = "\n  ".join(refused).replace("RUN/", f"{run_dir}/")
        weights = f"; --init-from {run_dir.name} begins it with these weights" if fits else ""
        raise ValueError(f"{run_dir}/config.json: the run was started with other settings:\n  {lines}\nuse the run's "
                         f"own (--config takes that file), or start a new run with --model-tag NAME{weights}")
    return Settings(**now), notices


def stream_config(settings: Settings) -> Any:
    """What decides the rows of a run, from its resolved settings: a `StreamConfig`, or a `SampleConfig` for Megatron's
    order."""
    if settings.order == "megatron":
        from nanochat.integrations.megatron_order import SampleConfig

        return SampleConfig.of(settings)
    return StreamConfig(T=settings.max_seq_len, V=settings.lanes, seed=settings.order_seed, layout=settings.packing,
                        long_docs=settings.long_docs, overlap=settings.overlap, buffer_size=settings.buffer_size,
                        pack=settings.pack, packer_version=settings.packer_version, curriculum=settings.mix)


def settings_table() -> str:
    """The rules as markdown, in the order of the code; settings without one may change silently."""
    lines = ["| setting | may change | what it does, or why not |", "| --- | --- | --- |"]
    for name, f in FIELDS.items():
        if told := f.metadata["fixed"] or f.metadata["note"]:
            lines.append(f"| `{flag(name)}` | {'no' if f.metadata['fixed'] else 'yes'} | {told} |")
    return "\n".join(lines) + "\n"
