"""
gpt-simple's configuration as our command line. `python -m scripts.help --translate FILE` prints it.

    model:     {n_layer: 12, n_embd: 768, n_head: 12}      --depth=12 --aspect-ratio=64 --head-dim=64
    data:      {path: shards, format: pretokenized}        --data-path=shards --data-format=shards --packing=binned
    training:  {max_steps: 1000, per_device_batch_size: 4, --num-iterations=1000 --device-batch-size=4
                gradient_accumulation_steps: 4}            --total-batch-size=32768

A value has one of three fates: a flag, a note that says why there is none, or an error because
gpt-simple 0.1.2 has no such name. Values that the file leaves out are gpt-simple's defaults where
its defaults decide which tokens a step takes; other defaults are ours. The models differ, so the
losses do, too.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nanochat.cli import did_you_mean, read_yaml

SECTIONS = ("model", "data", "optimizer", "training")
Values = Mapping[str, Any]

FLAGS = {  # names whose values are passed on
    "model.attention_mode": "attention-mode",
    "model.n_layer": "depth",
    "model.n_positions": "max-seq-len",
    "data.path": "data-path",
    "data.tokenizer": "tokenizer",
    "optimizer.weight_decay": "weight-decay",
    "optimizer.max_grad_norm": "max-grad-norm",
    "optimizer.warmup_steps": "warmup-steps",
    "optimizer.min_lr_ratio": "final-lr-frac",
    "training.per_device_batch_size": "device-batch-size",
    "training.max_steps": "num-iterations",
    "training.seed": "seed",
    "training.eval_steps": "eval-every",
    "training.save_steps": "save-every",
    "training.resume": "resume",
    "training.keep_last_k": "keep-last-k",
    "training.max_runtime_seconds": "max-runtime-seconds",
    "training.walltime_reserve_seconds": "walltime-reserve-seconds",
}
DEFAULTS = {  # gpt-simple's, of the names that decide which tokens a step takes and for how long
    "model.n_layer": 12,
    "model.n_embd": 768,
    "model.n_head": 12,
    "model.n_positions": 2048,
    "data.tokenizer": "gpt2",
    "data.format": "pretokenized",
    "data.packing": True,
    "training.per_device_batch_size": 4,
    "training.gradient_accumulation_steps": 4,
    "training.max_steps": 1000,
    "training.seed": 42,
    "optimizer.warmup_steps": 100,
    "optimizer.min_lr_ratio": 0.1,
}
ARCHITECTURE = "the architecture is nanochat's"
NOTES = {  # names without a flag, and why
    "model.vocab_size": "it follows from the tokenizer",
    **dict.fromkeys(
        (
            f"model.{name}"
            for name in (
                "n_kv_head",
                "dropout",
                "use_bias",
                "qkv_bias",
                "attn_out_bias",
                "mlp_bias",
                "activation",
                "mlp_type",
                "intermediate_size",
                "norm",
                "norm_eps",
                "tie_word_embeddings",
                "rope_base",
                "rope_scaling_type",
                "rope_scaling_factor",
            )
        ),
        ARCHITECTURE,
    ),
    **dict.fromkeys(
        ("data.max_length", "data.overlap_size"),
        "token files are cut by scripts.tok_shards; text is cut into rows, see --long-docs",
    ),
    "data.num_workers": "reading needs no processes; --tokenizer-threads is for text",
    "optimizer.learning_rate": "each kind of parameter has its own rate: --matrix-lr, --embedding-lr, "
    "--unembedding-lr, --scalar-lr",
    **dict.fromkeys(
        ("optimizer.beta1", "optimizer.beta2", "optimizer.eps"),
        "the optimizer is nanochat's MuonAdamW",
    ),
    "training.logging_steps": "every step is printed",
    "optimizer.decay_steps": "rates fall over the last part of the run, see --warmdown-ratio",
}
OTHERS = (
    "data.format",
    "data.packing",
    "data.curriculum",
    "data.allow_bucket_exhaustion",
    "data.allow_budget_mismatch",
    "model.n_embd",
    "model.n_head",
    "training.gradient_accumulation_steps",
    "training.gradient_checkpointing",
    "training.keep_milestone_every",
    "training.compile",
    "training.max_eval_batches",
    "training.output_dir",
    # see `other_flags`
    "training.mixed_precision",
    "training.wandb_project",
    "training.wandb_run_name",
)
KNOWN = (*FLAGS, *NOTES, *OTHERS)
DTYPES = {"bf16": "bfloat16", "no": "float32"}
FORMATS = {"pretokenized": "shards", "jsonl": "text"}


class Translation(NamedTuple):
    """A command line, and a sentence for each value that it does not contain."""

    flags: dict[str, str]  # without dashes; the value is empty for a switch
    notes: list[str]

    def command(self) -> str:
        """The command, one flag per line."""
        words = [
            f"--{name}" + (f"={shlex.quote(value)}" if value else "")
            for name, value in self.flags.items()
        ]
        return " \\\n    ".join(["python -m scripts.base_train", *words])


def is_sectioned(values: object) -> bool:
    """Whether the contents of a file look like gpt-simple's configuration."""
    return isinstance(values, dict) and any(isinstance(values.get(name), dict) for name in SECTIONS)


def translate_file(path: Path | str) -> Translation:
    """`translate` of a YAML or JSON file. OSError or ValueError, which names the file, for a bad
    one."""
    try:
        values = read_yaml(path)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None
    if not is_sectioned(values):
        raise ValueError(
            f"{path}: no section {', '.join(SECTIONS)} in it; expected gpt-simple's configuration"
        )
    try:
        return translate(values)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def translate(sections: Mapping[str, Any]) -> Translation:
    """Our command line for gpt-simple's configuration. ValueError for a name or a value that
    gpt-simple 0.1.2 does not know."""
    given: dict[str, Any] = {}
    for section, values in sections.items():
        if section not in SECTIONS or not isinstance(values or {}, dict):
            raise ValueError(
                f"{section}: expected a section with values, one of {', '.join(SECTIONS)}"
                f"{did_you_mean(str(section), SECTIONS)}"
            )
        given |= {f"{section}.{name}": value for name, value in (values or {}).items()}
    for name in given:
        if name not in KNOWN:
            raise ValueError(
                f"{name}: gpt-simple 0.1.2 has no such name{did_you_mean(name, KNOWN)}"
            )
    given = {name: value for name, value in given.items() if value is not None}
    values = {**DEFAULTS, **given}
    flags = {flag: str(values[name]) for name, flag in FLAGS.items() if name in values}
    notes = [f"{name}: not passed on; {NOTES[name]}" for name in given if name in NOTES]
    return Translation(flags | other_flags(values), [*notes, *other_notes(values)])


def whole(values: Values, name: str) -> int:
    """A value that must be a whole number. ValueError for any other."""
    value = values[name]
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}: got {value!r}, expected a whole number of at least 1")
    return value


def other_flags(values: Values) -> dict[str, str]:
    """The flags that need more than a new name."""
    depth, width, heads = (
        whole(values, f"model.{name}") for name in ("n_layer", "n_embd", "n_head")
    )
    if width % heads:
        raise ValueError(f"model.n_embd: got {width}, expected a multiple of n_head ({heads})")
    rows = whole(values, "training.per_device_batch_size")
    tokens = rows * whole(values, "model.n_positions")
    if values["data.format"] not in FORMATS:
        raise ValueError(
            f"data.format: got {values['data.format']!r}, expected {' or '.join(FORMATS)}"
        )
    # the width is rounded up to whole heads, so a rounded ratio gives the same width
    flags = {
        "aspect-ratio": str(width // depth),
        "head-dim": str(width // heads),
        "data-format": FORMATS[values["data.format"]],
        "packing": "binned",
        "total-batch-size": str(tokens * whole(values, "training.gradient_accumulation_steps")),
    }
    switches = {
        "no-pack": not values["data.packing"],
        "allow-bucket-exhaustion": values.get("data.allow_bucket_exhaustion"),
        "activation-checkpointing": values.get("training.gradient_checkpointing", True),
    }
    flags |= {name: "" for name, is_on in switches.items() if is_on}
    if "data.curriculum" in values:
        mix = {"curriculum": values["data.curriculum"]}
        if values.get("data.allow_budget_mismatch"):
            mix["allow_budget_mismatch"] = True
        flags["curriculum"] = json.dumps(mix)
    if "training.compile" in values:
        flags["compile"] = "on" if values["training.compile"] else "off"
    if "training.keep_milestone_every" in values:
        flags["save-at"] = f"{whole(values, 'training.keep_milestone_every')}*"
    if "training.max_eval_batches" in values:
        flags["eval-tokens"] = str(tokens * whole(values, "training.max_eval_batches"))
    if "training.output_dir" in values:
        flags["model-tag"] = Path(str(values["training.output_dir"])).name
    if dtype := DTYPES.get(str(values.get("training.mixed_precision"))):
        flags["dtype"] = dtype
    if "training.wandb_project" in values:
        flags["run"] = str(values.get("training.wandb_run_name", flags.get("model-tag", "run")))
    return flags


def other_notes(values: Values) -> Sequence[str]:
    """Sentences about values that the flags only resemble."""
    notes = [
        "training.gradient_accumulation_steps: --total-batch-size is the tokens per step of all processes; "
        "multiply it by the number of processes"
    ]
    if "training.output_dir" in values:
        notes.append(
            "training.output_dir: runs are in $NANOCHAT_BASE_DIR/runs, under the name of --model-tag"
        )
    if values.get("training.mixed_precision") == "fp16":
        notes.append(
            "training.mixed_precision: not passed on; fp16 is not here, only bfloat16 and float32"
        )
    if "training.wandb_project" in values:
        notes.append("training.wandb_project: not passed on; wandb's project is nanochat")
    return notes
