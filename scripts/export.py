"""
Export a model to Hugging Face transformers or nanochat, or import a nanochat checkpoint as a run.

    python -m scripts.export mine mine-hf --to=hf           # for AutoModelForCausalLM.from_pretrained("mine-hf", ...)
    python -m scripts.export mine@50 nano --to=nanochat     # step 50; then set NANOCHAT_BASE_DIR=nano in nanochat
    python -m scripts.export nano/base_checkpoints/mine --from=nanochat --model-tag=back --data-path=mytext

    run directory                          --to=hf                       --to=nanochat
    checkpoints/checkpoint-1000/
      model/pytorch_model.bin              model.safetensors             base_checkpoints/TAG/model_001000.pt
      model/config.json                    config.json                   base_checkpoints/TAG/meta_001000.json
    tokenizer/                             tokenizer.json                tokenizer/tokenizer.pkl, token_bytes.pt
                                           modeling_nanochat_exact.py
                                           README.md, the model card
    logs/train.jsonl, data_manifest.json   receipt.json (scripts.receipt)   receipt.json beside the model

Parameters keep their names and types in every direction. Before an export is written, the run's
model and the code that will run it elsewhere compute the logits of a small batch; if they differ,
for example because gpt.py was changed, the export is refused. One rename puts the output in place,
complete or not at all; it never overwrites anything. Reading executes nothing: weights are tensors
only, and in a pickled tokenizer, only tiktoken's class is accepted.

An imported checkpoint has no optimizer and no position in the data. The run counts as completed,
and can be evaluated, sampled from and trained further with --init-from.
"""

import argparse
import importlib
import inspect
import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanochat import gpt, integrations, seen
from nanochat.any_step import make_available
from nanochat.checkpoint import (
    MODEL_NAME,
    Checkpoint,
    Snapshot,
    find_checkpoint,
    json_bytes,
    load_plain,
)
from nanochat.cli import Parser, run_main, setup_logging
from nanochat.common import (
    as_local_path,
    as_path,
    begin_launch,
    fsync_dir,
    make_folder,
    read_json,
    write_json,
)
from nanochat.config import Settings
from nanochat.engine import load_model
from nanochat.files import DATASET_NAME, default_data_path, is_folder
from nanochat.gpt import GPT, GPTConfig
from nanochat.integrations.export_check import check_hf, check_nanochat
from nanochat.model_code import code_of
from nanochat.pins import DATA_MANIFEST
from nanochat.receipt import NAME as RECEIPT_NAME
from nanochat.receipt import make_receipt
from nanochat.run_dir import CONFIG_NAME, config_at, new_run_path, open_folders
from nanochat.run_facts import (
    ancestor_sentences,
    code_sentences,
    contamination_table,
    data_table,
    escape_html,
    left_out_sentences,
    markdown,
    origin_sentences,
    settings_table,
)
from nanochat.run_order import order_of
from nanochat.run_owner import write_completed
from nanochat.run_reader import RunReader
from nanochat.run_settings import build_model, resolve
from nanochat.tokenizer import RustBPETokenizer, Tokenizer, get_tokenizer, replace_surrogates

log = logging.getLogger(__name__)

NEW_FOLDER = "name a new folder"  # instead of one that exists
CODE = "modeling_nanochat_exact"  # the file of nanochat/integrations that transformers runs


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="RUN, RUN@STEP or the folder of a checkpoint; with --from: "
        "a folder of nanochat checkpoints (FOLDER@STEP for a step other than the newest)",
    )
    parser.add_argument(
        "out",
        metavar="OUT",
        nargs="?",
        type=Path,
        help="a new or empty folder (default with "
        "--from: <base dir>/runs/MODEL_TAG; <base dir> is $NANOCHAT_BASE_DIR or ~/.cache/nanochat)",
    )
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument(
        "--to", choices=("hf", "nanochat"), help="format to write; hf: for transformers"
    )
    direction.add_argument("--from", choices=("nanochat",), dest="origin", help="format to read")
    parser.add_argument(
        "--model-tag", help="with --from: name of the new run (default: the folder's name)"
    )
    parser.add_argument(
        "--data-path",
        help=f"with --from: folder of text for base_eval (default: the {DATASET_NAME} download)",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="with --from: folder or file of the model's tokenizer "
        "(default: tokenizer/ beside base_checkpoints/)",
    )
    args = parser.parse_args(argv)
    if args.to is not None and args.out is None:
        raise ValueError(
            f"--to {args.to}: no output folder was given; run: python -m scripts.export "
            f"{args.source} OUT --to={args.to}"
        )
    if args.to is not None and (args.model_tag or args.data_path or args.tokenizer):
        raise ValueError(
            f"--to {args.to}: leave out --model-tag, --data-path and --tokenizer, which go with --from"
        )
    return args


def check_is_new(out: Path, advice: str) -> Path:
    """The absolute path of OUT. ValueError, which ends with the advice, if it exists and is not an
    empty folder."""
    out = as_local_path(out, "OUT").expanduser().absolute()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out}: already exists and is never overwritten; {advice}")
    return out


@contextmanager
def new_folder(out: Path, advice: str) -> Iterator[Path]:
    """Yield a hidden folder beside `out` to fill.

    At the end of the block its files are fsynced and it is renamed to `out`; if the block raises,
    it is removed. The next call removes leftovers of a killed process. Raises what `check_is_new`
    raises.
    """
    out = check_is_new(out, advice)
    unfinished = out.with_name(f".{out.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    make_folder(out.parent)
    unfinished.mkdir()
    try:
        yield unfinished
        for path in (*unfinished.rglob("*"), unfinished):
            if path.is_dir():
                fsync_dir(path)
            else:
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        os.rename(unfinished, out)
    except BaseException:
        shutil.rmtree(unfinished)
        raise
    fsync_dir(out.parent)


def write_receipt(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the receipt of the steps up to a checkpoint, if the run has a log and a manifest."""
    run = RunReader(run_of(checkpoint))
    if run.digests and run.manifests:
        try:
            write_json(folder / RECEIPT_NAME, make_receipt(run, checkpoint.step))
        except (ValueError, OSError) as e:
            log.warning("skipping %s: %s", RECEIPT_NAME, e)


# ---- to transformers -----------------------------------------------------------------------------


def write_weights(folder: Path, state: Mapping[str, Tensor], shard_bytes: int = 5 * 10**9) -> None:
    """Write a state dict as safetensors.

    In one file, or in several with an index if it has more than `shard_bytes`.
    """
    from huggingface_hub import save_torch_state_dict

    # this logger would print the temporary name of the folder
    logging.getLogger(inspect.getfile(save_torch_state_dict)).setLevel(logging.WARNING)
    save_torch_state_dict(dict(state), folder, max_shard_size=shard_bytes)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # like the other files: safetensors lets only the owner read it


def byte_letters() -> dict[int, str]:
    """GPT-2's table of one letter per byte.

    The letter is the byte itself if it is visible, else the next one from 256 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible}
    for i, byte in enumerate(hidden):
        letters[byte] = chr(256 + i)
    return letters


def as_tokenizers(tokenizer: RustBPETokenizer) -> Any:
    """Our ranks as an object of the package `tokenizers` with the same ids.

    ValueError if the ids differ on a sample of hard texts.

    tiktoken merges any two neighbours that form a token, while `tokenizers` needs a list of pairs.
    So each token has one merge for every way to cut it into two tokens, and the merges are in the
    order of the tokens' ranks.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    from nanochat.integrations.fast_encoders import hard_sample

    # the vocabulary and its merges, in letters
    ranks = tokenizer.enc._mergeable_ranks
    special = tokenizer.enc._special_tokens
    letters = byte_letters()

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocab = {written(token): rank for token, rank in ranks.items()} | special
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in ranks and right in ranks:
                merges.append((written(left), written(right)))

    # the tokenizer
    library = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(tokenizer.enc._pat_str), "isolated")
    to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([split, to_letters])
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    library.encode_special_tokens = True  # like ours: "<|bos|>" in a text is seven characters

    # it must give the same ids
    for text in map(replace_surrogates, [*hard_sample(), *special]):
        theirs = library.encode(text, add_special_tokens=False).ids
        if theirs != tokenizer.encode(text, num_threads=1):
            raise ValueError(
                f"tokenizer.json: `tokenizers` and tiktoken give different ids for {text[:40]!a} with "
                f"the pattern {tokenizer.enc._pat_str!r}; this tokenizer cannot be exported"
            )
    return library


def tokenizer_files(tokenizer: Tokenizer, sequence_len: int) -> dict[str, bytes]:
    """{file name: content} of the tokenizer for transformers.

    It puts BOS in front of every text, as in training, even if the tokenizer's own program does
    not. Plain ids have no files.
    """
    from tokenizers import processors

    from nanochat.integrations.third_party_tokenizers import HuggingFaceTokenizer

    if isinstance(tokenizer, RustBPETokenizer):
        library = as_tokenizers(tokenizer)
    elif isinstance(tokenizer, HuggingFaceTokenizer):
        library = tokenizer.library
    else:
        log.warning(
            "the export has no tokenizer.json for transformers, because only ids are known; call the model "
            "with ids, with %d in front of each text",
            tokenizer.bos_token_id,
        )
        return {}
    bos = library.id_to_token(tokenizer.bos_token_id)
    library.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"],
        pair=[bos, "$A", bos, "$B"],
        special_tokens=[(bos, tokenizer.bos_token_id)],
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": bos,
        "pad_token": bos,
        "model_max_length": sequence_len,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # text never becomes a special token
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return {
        "tokenizer.json": library.to_str(pretty=True).encode(),
        "tokenizer_config.json": json_bytes(config),
    }


def model_files(config: GPTConfig, dtype: torch.dtype, bos: int) -> dict[str, bytes]:
    """{file name: content} of config.json and generation_config.json.

    The first has all fields of `GPTConfig` and the values that depend on them.
    """
    ids = {"bos_token_id": bos, "eos_token_id": bos, "pad_token_id": bos}
    model = {
        "architectures": ["NanochatExactForCausalLM"],
        "model_type": "nanochat_exact",
        "auto_map": {
            "AutoConfig": f"{CODE}.NanochatExactConfig",
            "AutoModelForCausalLM": f"{CODE}.NanochatExactForCausalLM",
        },
        "dtype": str(dtype).removeprefix("torch."),
        **asdict(config),
        "padded_vocab_size": config.padded_vocab_size,
        "window_sizes": config.window_sizes,
        "rope_base": float(gpt.ROPE_BASE),
        "qk_scale": gpt.QK_SCALE,
        "logit_cap": gpt.LOGIT_CAP,
        "ve_gate_channels": min(gpt.VE_GATE_CHANNELS, config.n_embd),
        "smear_channels": min(gpt.SMEAR_CHANNELS, config.n_embd),
        "tie_word_embeddings": False,
        **ids,
    }
    return {
        "config.json": json_bytes(model),
        "generation_config.json": json_bytes({"do_sample": False, **ids}),
    }


def facts_about(checkpoint: Checkpoint, run: RunReader) -> list[tuple[str, Any]]:
    """(fact, value) of a checkpoint."""
    step = checkpoint.step
    measured, value = "bits per byte", "not measured"
    val = run.validation(step)
    if val is not None and val["bpb"] is not None:
        value = f"{val['bpb']:.6f}"
    elif val is not None:
        measured, value = "loss in nats per token", f"{val['loss']:.6f}"
    if val is not None and val.get("eval_tokens"):
        measured += f", on {val['eval_tokens']:,} tokens"
    if val is not None and val["step"] < step:
        measured += f", at step {val['step']:,}"
    launch = run.launch_of(step - 1)
    code = launch.started.get("code") if launch else None
    return [
        ("steps", step),
        ("tokens", checkpoint.seal["tokens"]),
        (f"validation {measured}", value),
        ("digest of the last step's batch", run.digests.get(step - 1, "unknown")),
        ("checksum of the checkpoint", checkpoint.seal["checksum"]),
        ("code, commit", code or "unknown"),
    ]


def model_card(checkpoint: Checkpoint, run: RunReader, num_parameters: int) -> bytes:
    """README.md, the model card: facts about the model, its data, and how to use it.

    It names no path of the machine that trained it.
    """
    step = checkpoint.step
    tag = run.config.get("model_tag") or run.name
    facts = [("parameters", num_parameters), *facts_about(checkpoint, run)]
    lines = markdown(("fact", "value"), facts)
    origins = [*origin_sentences(run, paths=False), *ancestor_sentences(run, paths=False)]
    sentences = [*origins, *code_sentences(run, step), *left_out_sentences(run)]
    if sentences:
        lines += [escape_html(" ".join(sentences)), ""]
    lines += data_table(run, paths=False)
    results = seen.read_results(run.run_dir)
    if results and not run.made_of:
        lines += ["Benchmarks in the data:", "", *contamination_table(results, step), ""]
    config = run.config_of(run.launch_of(step - 1))
    settings = settings_table(run, config, paths=False)
    if settings:
        lines += ["Settings that are not defaults:", "", *settings]
    about = "\n".join(lines)
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {escape_html(tag)}, step {step:,}

A language model, pretrained and not tuned: it continues text.

{about}
The architecture is in `{CODE}.py`, which transformers (5 or newer) runs with `trust_remote_code=True`. The tokenizer
puts the BOS token in front of every text. Two runs with equal digests saw the same data.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(".", trust_remote_code=True)
tokens = model.generate(**tokenizer("Once upon", return_tensors="pt"), max_new_tokens=64)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))
```
""".encode()


def to_hf(source: str, out: Path) -> str:
    """Write a folder for transformers. Returns a sentence that describes it."""
    for package in ("safetensors.torch", "tokenizers", "huggingface_hub"):
        try:
            importlib.import_module(package)
        except ImportError as e:
            raise ValueError(
                f"--to hf: {package.partition('.')[0]} cannot be imported ({e}); pip install -e "
                f"'.[hf]'"
            ) from None
    checkpoint, config, tokenizer = open_checkpoint(source)
    state = checkpoint.model_state()
    dtype = state["transformer.wte.weight"].dtype
    num_parameters = sum(tensor.numel() for tensor in state.values())
    card = model_card(checkpoint, RunReader(run_of(checkpoint)), num_parameters)
    files = {
        **model_files(config, dtype, tokenizer.get_bos_token_id()),
        **tokenizer_files(tokenizer, config.sequence_len),
        "README.md": card,
    }
    code = Path(integrations.__file__).with_name(f"{CODE}.py")
    with new_folder(out, NEW_FOLDER) as folder:
        model, _, _ = load_model(source, "cpu", compute_dtype=torch.float32)
        check_hf(model, code, json.loads(files["config.json"]))
        write_weights(folder, state)
        shutil.copyfile(code, folder / code.name)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        write_receipt(folder, checkpoint)
    return f"{out}: step {checkpoint.step:,} of {run_of(checkpoint).name} for transformers, with trust_remote_code=True"


# ---- to nanochat ---------------------------------------------------------------------------------


def to_nanochat(source: str, out: Path) -> str:
    """Write a base directory for nanochat.

    Returns a sentence that describes it. ValueError if nanochat cannot represent the model or the
    tokenizer.
    """
    checkpoint, config, tokenizer = open_checkpoint(source)
    run_dir, step = run_of(checkpoint), checkpoint.step
    settings = Settings.from_json(config_at(run_dir, step - 1), run_dir / CONFIG_NAME)
    if config.n_embd < gpt.SMEAR_CHANNELS:
        raise ValueError(
            f"{checkpoint.path}: n_embd is {config.n_embd}, but nanochat's smear gate reads "
            f"{gpt.SMEAR_CHANNELS} channels; export --to=hf instead"
        )
    if not isinstance(tokenizer, RustBPETokenizer) or tokenizer.bos_token != "<|bos|>":
        raise ValueError(
            f"{run_dir / 'tokenizer'}: nanochat reads only byte-pair ranks with <|bos|> in front of each "
            "document; export --to=hf instead"
        )
    val = RunReader(run_dir).validation(step)
    is_of_this_step = val is not None and val["step"] == step
    meta = {
        "step": step,
        "val_bpb": val["bpb"] if val and is_of_this_step else None,
        "model_config": asdict(config),
        "user_config": settings.differing(),
        "device_batch_size": settings.device_batch_size,
        "max_seq_len": config.sequence_len,
        "total_batch_size": settings.total_batch_size,
    }
    with new_folder(out, NEW_FOLDER) as folder:
        model, _, _ = load_model(source, "cpu", compute_dtype=torch.float32)
        check_nanochat(model)
        model_folder = folder / "base_checkpoints" / run_dir.name
        model_folder.mkdir(parents=True)
        torch.save(checkpoint.model_state(), model_folder / f"model_{step:06d}.pt")
        write_json(model_folder / f"meta_{step:06d}.json", meta)
        write_receipt(model_folder, checkpoint)
        write_tokenizer(folder / "tokenizer", tokenizer)
    return f"{out}: step {step:,} of {run_dir.name} for nanochat; set NANOCHAT_BASE_DIR={out} for its commands"


def write_tokenizer(folder: Path, tokenizer: RustBPETokenizer) -> None:
    """Write a tokenizer in nanochat's format."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.pkl").write_bytes(pickle.dumps(tokenizer.enc))
    torch.save(tokenizer.token_bytes(), folder / "token_bytes.pt")


def open_checkpoint(source: str) -> tuple[Checkpoint, GPTConfig, Tokenizer]:
    """A run's checkpoint, its shape and its tokenizer.

    Raises what `find_checkpoint` raises, and ValueError if the tokenizer is not the checkpoint's.
    """
    checkpoint = find_checkpoint(make_available(source))
    tokenizer = get_tokenizer(run_of(checkpoint) / "tokenizer")
    checkpoint.check_tokenizer(tokenizer.fingerprint)
    return checkpoint, GPTConfig(**checkpoint.model_config), tokenizer


def run_of(checkpoint: Checkpoint) -> Path:
    return checkpoint.path.absolute().parent.parent


# ---- from nanochat -------------------------------------------------------------------------------


class NanochatCheckpoint(NamedTuple):
    """A checkpoint of nanochat.

    `config`: fields of `GPTConfig`; `batch`: the batch sizes that it names.
    """

    folder: Path
    step: int
    state: dict[str, Tensor]
    config: dict[str, Any]
    batch: dict[str, Any]


def from_nanochat(source: str) -> NanochatCheckpoint:
    """Read the newest checkpoint in a folder such as base_checkpoints/d12, or that of FOLDER@STEP.

    FileNotFoundError or ValueError, which names the file, if one is missing or is not nanochat's.
    """
    # the checkpoint
    text, at = source, ""
    if re.search(r"@\d+$", source):
        text, _, at = source.rpartition("@")
    folder = as_local_path(text, "SOURCE").expanduser()
    numbers = [path.stem.removeprefix("model_") for path in folder.glob("model_*.pt")]
    steps = sorted(int(number) for number in numbers if number.isdigit())
    if not steps or (at and int(at) not in steps):
        wanted = f"{int(at):06d}" if at else "STEP"
        known = ", ".join(map(str, steps)) or "none; expected a folder such as base_checkpoints/d12"
        raise FileNotFoundError(f"{folder}: no model_{wanted}.pt; steps in it: {known}")
    step = int(at) if at else steps[-1]

    # its files
    meta_path = folder / f"meta_{step:06d}.json"
    meta = read_json(meta_path, {"model_config": dict}, remedy="copy it again")
    model_path = folder / f"model_{step:06d}.pt"
    state = load_plain(model_path)
    are_tensors = isinstance(state, dict) and all(isinstance(t, Tensor) for t in state.values())
    if not are_tensors:
        raise ValueError(
            f"{model_path}: expected a dict of tensors, as nanochat saves it; copy it again"
        )

    # from torch.compile
    state = {name.removeprefix("_orig_mod."): tensor for name, tensor in state.items()}
    # older checkpoints have only long windows
    config = {"window_pattern": "L", **meta["model_config"]}
    config["window_pattern"] = str(config["window_pattern"]).upper()
    ones = torch.ones(config.get("n_layer", 0))
    # older checkpoints lack these scalars
    state = {"resid_lambdas": ones, "x0_lambdas": 0 * ones, **state}
    batch = {name: meta[name] for name in ("device_batch_size", "total_batch_size") if name in meta}
    return NanochatCheckpoint(folder.absolute(), step, state, config, batch)


def difference_from(model: GPT, source: NanochatCheckpoint, shape: GPTConfig) -> str:
    """How our model differs from a checkpoint of nanochat; "" if it does not.

    Loads the weights into the model.
    """
    ours = asdict(model.config)
    differing = []
    for name, value in asdict(shape).items():
        if value != ours[name]:
            made = f"--depth, --aspect-ratio and --head-dim make it {ours[name]}"
            differing.append(f"{name} is {value}, but {made}")
    if differing:
        return "; ".join(differing)
    try:
        model.load_state_dict(source.state, assign=True)
    except RuntimeError as e:
        # names the tensors that are missing, unknown or different in shape
        return " ".join(str(e).split())[:400]
    return ""


def settings_of(
    source: NanochatCheckpoint, args: argparse.Namespace
) -> tuple[Settings, GPTConfig, Tokenizer]:
    """The resolved settings that a run of this model would have, its shape and its tokenizer.

    ValueError if shape, weights and tokenizer do not match, or no settings produce this shape.
    """
    try:
        shape = GPTConfig(**source.config)
    except (TypeError, ValueError) as e:
        raise ValueError(
            f"{source.folder}: model_config does not fit our model: {e}; it cannot be imported"
        ) from e
    folder = args.tokenizer or source.folder.parent.parent / "tokenizer"
    tokenizer = get_tokenizer(folder)
    if tokenizer.get_vocab_size() != shape.vocab_size:
        raise ValueError(
            f"{folder}: has {tokenizer.get_vocab_size():,} tokens, but the model has "
            f"{shape.vocab_size:,}; name the model's own tokenizer with --tokenizer"
        )
    settings = Settings(
        depth=shape.n_layer,
        aspect_ratio=shape.n_embd // shape.n_layer,
        head_dim=shape.head_dim,
        max_seq_len=shape.sequence_len,
        window_pattern=shape.window_pattern,
        vocab_size=shape.vocab_size,
        tokenizer_fingerprint=tokenizer.fingerprint,
        data_path=str(args.data_path or default_data_path()),
        model_tag=args.model_tag or (args.out or source.folder).name,
        num_iterations=max(1, source.step),
        **source.batch,
    )
    difference = difference_from(build_model(settings), source, shape)
    if difference:
        raise ValueError(
            f"{source.folder}: its architecture differs from ours (nanochat's as of July 2026): "
            f"{difference}; it cannot be imported"
        )
    is_bf16 = source.state["transformer.wte.weight"].dtype == torch.bfloat16
    resolved, *_ = resolve(settings, torch.bfloat16 if is_bf16 else torch.float32, None)
    return resolved, shape, tokenizer


def import_run(args: argparse.Namespace) -> str:
    """Write nanochat's checkpoint as a run directory.

    Returns a sentence that describes it. Raises what `from_nanochat`, `settings_of` and
    `RunOrder.pin` raise.
    """
    source = from_nanochat(args.source)
    settings, shape, tokenizer = settings_of(source, args)
    out = args.out or new_run_path(settings.model_tag or "")
    advice = NEW_FOLDER if args.out else "name another run with --model-tag"
    begin_launch()
    state = {
        "status": "completed",
        "tokens": source.step * settings.total_batch_size,
        "K": settings.leaves,
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "model_code": code_of(build_model(settings)),
    }
    with new_folder(out, advice) as run_dir:
        open_folders(run_dir)
        if args.data_path or is_folder(as_path(settings.data_path or "")):
            write_json(run_dir / DATA_MANIFEST, order_of(settings).pin(settings))
        else:
            log.warning(
                "%s: no such folder, so base_eval cannot evaluate the run; set --data-path",
                settings.data_path,
            )
        snapshot = Snapshot(source.step, {MODEL_NAME: source.state}, asdict(shape), [], state)
        snapshot.write(run_dir, "final")
        tokenizer.save(run_dir / "tokenizer")
        write_completed(run_dir, source.step, f"imported from {args.source}")
        write_json(run_dir / CONFIG_NAME, settings.to_json())
    return f"{out}: a run at step {source.step:,}, from {args.source}"


def main(argv: Sequence[str] | None = None) -> int:
    """Export or import, and print a sentence about it.

    After a ValueError or OSError nothing is left behind.
    """
    args = parse_args(argv)
    setup_logging()
    if args.origin is not None:
        print(import_run(args))
        return 0
    check_is_new(args.out, NEW_FOLDER)  # before the replay of a step that was not saved
    if args.to == "hf":
        print(to_hf(args.source, args.out))
    else:
        print(to_nanochat(args.source, args.out))
    return 0


if __name__ == "__main__":
    run_main(main)
