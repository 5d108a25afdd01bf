"""
Evaluate a trained model: bits per byte on validation and training data, samples, the CORE metric.

    python -m scripts.base_eval d12
    python -m scripts.base_eval d12 --eval core,bpb,sample --max-per-task 500
    torchrun --standalone --nproc_per_node=8 -m scripts.base_eval d24 --eval core
    python -m scripts.base_eval d12@1000 --json eval.json
    python -m scripts.base_eval d12 --val-path=mytext    # bits per byte on a text of yours

Tokenizer, data files and row length come from the run directory. With the default --eval-tokens,
the validation result equals the one that training printed at that step. The result on training
data is that of a sample of the training files, as large as the validation data. Only a large gap,
after the run has read these files, is a sign of overfitting. For comparison, a unigram model is
evaluated, which only knows how frequent each token is in the first rows of training. CORE needs
only the run's model and tokenizer, and the eval_bundle folder (nanochat/core_eval.py).

Results are written to RUN/eval.json, and CORE's table to RUN/eval.csv. What --eval leaves out stays
there, if it is of the same step. These files are of the newest step that was evaluated; the
result of an earlier one is in RUN/eval-STEP.json. If the code of the model has changed since it was
trained, the result is not the run's, and only --json stores it; its "changed_code" names the files.

--val-path names other text, such as one that you kept aside. Then bits per byte and prompts are those
of this text, the data of the run need not be there, and only --json stores the result.
"""

import argparse
import contextlib
import errno
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanochat import core_eval
from nanochat.checkpoint import find_checkpoint
from nanochat.cli import Parser, run_main, whole
from nanochat.common import (
    begin_launch,
    get_dist_info,
    print0,
    read_json,
    reason_of,
    table,
    visible,
    write_json,
)
from nanochat.config import Settings
from nanochat.dataloader import DataLoader, Dry, MicroBatch, validation_loader, validation_prompts
from nanochat.dist import on_rank0
from nanochat.engine import Engine, load_model
from nanochat.files import find_files
from nanochat.gpt import GPT
from nanochat.loss_eval import NothingToEvaluate, evaluate_bpb, evaluate_buckets, in_nats
from nanochat.order import StreamConfig
from nanochat.pins import DATA_MANIFEST, Manifest, read_manifests
from nanochat.run_dir import CONFIG_NAME, config_at, find_run_at
from nanochat.run_order import stream_config
from nanochat.run_reader import (
    EVAL_NAME,
    TRAIN_SAMPLE,
    older_evaluation,
    unseen_note,
)
from nanochat.sources import RunData, Source, open_data, open_source
from nanochat.splits import pin_validation, warn_of_trained_copies
from nanochat.start_run import open_run
from nanochat.stream import OtherStreamConfig
from nanochat.text import Selection
from nanochat.tokenizer import Tokenizer
from scripts.sample import ask_for_model, device_of

MODES = ("core", "bpb", "sample")
SAMPLE_GROUPS = 64  # of a sample, or more if these have too few documents


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    p = Parser(description="Evaluate a trained model.", epilog=__doc__)
    ask_for_model(p)
    p.add_argument(
        "--eval",
        default="bpb,sample",
        metavar="MODES",
        help=f"comma-separated list of {', '.join(MODES)}",
    )
    p.add_argument(
        "--val-path",
        metavar="DIR",
        help="text to evaluate instead of the run's validation data (token files: of the run's format)",
    )
    p.add_argument(
        "--text-field",
        metavar="NAME",
        help="column or field that holds the text of --val-path (default: the run's)",
    )
    p.add_argument(
        "--max-per-task", type=whole(1, also=-1), default=-1, help="items per task of CORE; -1: all"
    )
    p.add_argument(
        "--eval-bundle",
        help="folder of CORE's tasks (default: <base dir>/eval_bundle, where <base dir> is "
        "$NANOCHAT_BASE_DIR or ~/.cache/nanochat)",
    )
    p.add_argument(
        "--eval-tokens",
        type=whole(1, also=-1),
        default=-1,
        help="tokens to evaluate from each split; -1: the run's --eval-tokens",
    )
    p.add_argument(
        "--unigram-tokens",
        type=whole(1),
        default=2**22,
        help="number of training tokens that the unigram model counts",
    )
    p.add_argument(
        "--device-batch-size",
        type=whole(1, also=-1),
        default=-1,
        help="rows per forward pass; -1: the run's --device-batch-size",
    )
    p.add_argument(
        "--json",
        type=Path,
        help="file for the result (default: RUN/eval.json; none with --val-path)",
    )
    args = p.parse_args(argv)
    if args.text_field is not None and args.val_path is None:
        raise ValueError("--text-field: it is for the text that --val-path names")
    if args.data_path is not None and args.val_path is not None:
        raise ValueError(
            "--data-path: with --val-path, the data of the run is not read; name only one"
        )
    args.eval = [mode.strip() for mode in args.eval.split(",")]
    unknown = set(args.eval) - set(MODES)
    if unknown:
        raise ValueError(
            f"--eval: got {', '.join(sorted(unknown))!r}, expected a comma-separated list of "
            f"{', '.join(MODES)}"
        )
    return args


def draw_samples(
    model: GPT, tokenizer: Tokenizer, prompts: list[list[int]]
) -> dict[str, list[str]]:
    """The most likely continuation of each prompt, and texts sampled from BOS alone."""
    engine = Engine(model, tokenizer)
    bos = tokenizer.get_bos_token_id()
    rows, _ = engine.generate_batch([bos], 4, max_tokens=96, temperature=1.0, seed=42)
    unprompted = [tokenizer.decode(tokens[1:]) for tokens in rows]
    prompted = []
    for prompt in prompts:
        [tokens], _ = engine.generate_batch(prompt, max_tokens=32, temperature=0.0)
        prompted.append(tokenizer.decode(tokens[1:]))
    return {"prompted": prompted, "unprompted": unprompted}


class Opened(NamedTuple):
    """What `start_run.open_run` returns."""

    data: RunData
    config: StreamConfig | OtherStreamConfig
    settings: Settings


def open_text(
    settings: Settings, args: argparse.Namespace, run_dir: Path, tokenizer: Tokenizer
) -> Opened:
    """Collective. A run without its data: the text at --val-path is for validation, with a warning if
    it is known to be in files that the run has trained on, and there is none for training. ValueError
    or FileNotFoundError if it holds none."""
    begin_launch(settings.data_cache)
    val_path = args.val_path
    data_format = settings.data_format
    if data_format != "text" and not has_files(val_path, data_format):
        data_format = "text"
    selection = Selection(text_field=args.text_field or settings.text_field)

    def pin() -> dict[str, Manifest]:
        val = pin_validation(val_path, data_format, selection)
        with contextlib.suppress(OSError, ValueError):  # the run's own manifest may be damaged
            trained = read_manifests(run_dir / DATA_MANIFEST)
            warn_of_trained_copies({"train": trained.get("train", {}), "val": val})
        return val

    val = on_rank0(pin)
    data = open_data({"train": {}, "val": val}, tokenizer)
    return Opened(data, stream_config(settings), settings)


def has_files(path: str, data_format: str) -> bool:
    """Whether a data path has files of a format."""
    try:
        return bool(find_files(path, data_format))
    except (FileNotFoundError, ValueError):
        return False


def unigram_nats(
    data: RunData, config: StreamConfig | OtherStreamConfig, num_tokens: int
) -> Tensor:
    """The loss of each token under the unigram model, (vocab_size,) float32.

    Counts targets in the first rows of the run's stream, the same number of rows from each lane, at
    least `num_tokens` tokens in all; counts start at 1.
    """
    vocab_size = data.tokenizer.get_vocab_size()
    counts = torch.ones(vocab_size, dtype=torch.int64)
    steps = -(-num_tokens // (config.V * config.T))
    loader = DataLoader(
        config,
        data.train,
        tokenizer=data.tokenizer,
        rows_per_step=config.V,
        device_batch_size=config.V,
        drop_dry=True,
    )
    with loader, contextlib.suppress(Dry):
        for batch in itertools.islice(loader, steps):
            targets = batch.targets[batch.targets >= 0]
            counts += torch.bincount(targets, minlength=vocab_size)
    shares = counts / counts.sum(dtype=torch.float64)
    return -shares.log().float()


def batches_of(
    opened: Opened, args: argparse.Namespace, model: GPT
) -> Callable[[Source, int], Iterator[MicroBatch]]:
    """A function that returns this rank's batches of the first tokens of a source."""
    _, rank, _, world_size = get_dist_info()
    settings = opened.settings
    device_batch_size = args.device_batch_size
    if device_batch_size == -1:
        device_batch_size = settings.device_batch_size

    def batches(source: Source, num_tokens: int) -> Iterator[MicroBatch]:
        return validation_loader(
            source,
            tokenizer=opened.data.tokenizer,
            T=opened.config.T,
            num_tokens=num_tokens,
            device=model.get_device(),
            rank=rank,
            device_batch_size=device_batch_size,
            world_size=world_size,
            num_leaves=settings.leaves,
            with_doc_ids=settings.attention_mode != "causal",
        )

    return batches


class Part(NamedTuple):
    """Text to evaluate: a bucket, or a sample of one."""

    source: Source
    num_tokens: int  # at most this many of it


def parts_of(data: RunData, num_tokens: int) -> tuple[dict[str, Part], dict[str, Part]]:
    """({bucket: validation data}, {bucket: sample of its training files}) to evaluate. All of
    validation has `num_tokens`, and each sample as many as the data that validates its bucket."""
    of_each = num_tokens // len(data.val)
    val = {name: Part(source, of_each) for name, source in data.val.items()}
    samples = {}
    for name, source in data.train.items():
        if len(source.groups) == 0:
            continue
        if name in data.val:
            size, limit = tokens_of(data.val[name]), of_each
        else:  # all of validation validates it
            size, limit = sum(map(tokens_of, data.val.values())), num_tokens
        samples[name] = Part(sample_of(source, size), limit)
    return val, samples


def bits_per_byte(
    args: argparse.Namespace, model: GPT, run_dir: Path, opened: Opened
) -> dict[str, Any]:
    """Bits per byte of the model and of the unigram model, under the keys of RUN/eval.json.

    Collective. The model is evaluated on validation data and on a sample of each training bucket
    (`sample_of`), the unigram model on the validation data, if there is training data to count. If
    the tokenizer does not know bytes, nats per token under other keys.
    """
    stored, config, settings = opened
    tokenizer = stored.tokenizer
    data = stored
    if stored.train and not config.framed:  # then `stored` has entries as they are stored
        manifests = read_manifests(run_dir / DATA_MANIFEST)
        data = open_data(manifests, tokenizer)
    token_bytes = tokenizer.token_bytes()
    num_tokens = settings.eval_tokens if args.eval_tokens == -1 else args.eval_tokens
    val, samples = parts_of(data, num_tokens)
    batches = batches_of(opened, args, model)

    # how much it evaluates
    parts = [*val.values(), *samples.values()]
    to_evaluate = sum(min(part.num_tokens, tokens_of(part.source)) for part in parts)
    of_which = "validation and of the training files" if samples else "this text"
    print0(
        f"evaluating about {to_evaluate:,} tokens: up to {num_tokens:,} of {of_which} (--eval-tokens)"
    )

    # the model
    model.attention_mode = settings.attention_mode
    of_val = {name: batches(*part) for name, part in val.items()}
    val_bpb, val_buckets = evaluate_buckets(model, of_val, token_bytes)
    train_bpb = {}
    for name, part in samples.items():
        with contextlib.suppress(NothingToEvaluate):  # --without-documents may list all of them
            train_bpb[name] = evaluate_bpb(model, batches(*part), None, token_bytes)
    result = {
        "eval_tokens": num_tokens,
        "val_bpb": val_bpb,
        "val_buckets": val_buckets,
        "train_bpb": train_bpb,
    }

    # the unigram model, on the same validation rows
    if data.train:
        nats = on_rank0(lambda: unigram_nats(stored, config, args.unigram_tokens))
        nats = nats.to(model.get_device())

        def unigram(x: Tensor, y: Tensor, *, loss_reduction: str) -> Tensor:
            return nats[y.clamp(min=0)]

        pairs = {name: inputs_and_targets(batches(*part)) for name, part in val.items()}
        result["unigram_bpb"], _ = evaluate_buckets(unigram, pairs, token_bytes)
    return result if tokenizer.knows_bytes else result_in_nats(result)


def tokens_of(source: Source) -> int:
    """About how many tokens a source has."""
    return int(source.groups @ source.means)


def sample_of(source: Source, num_tokens: int) -> Source:
    """About `num_tokens` tokens of a source, in whole documents, as a source of their own.

    Rows of long documents hold the beginnings first, which are easier to predict. So figures of two
    texts can be compared if the same share of each is evaluated, as of texts of the same size.
    """
    # its order continues no run's, so files that joined the bucket in a fork are like the others
    manifest = source.manifest.copy()
    manifest.pop("joined", None)
    sample = open_source(manifest, source.tokenizer)

    # the share of documents to take from each of SAMPLE_GROUPS groups; 1 if these have too few
    num_groups = len(sample.groups)
    groups_needed = num_groups * num_tokens / max(1, tokens_of(sample))
    share = min(1.0, groups_needed / min(num_groups, SAMPLE_GROUPS))
    wanted = np.ceil(share * sample.groups).astype(np.int64)

    # the first documents of groups in random order, until there are enough tokens
    order = np.random.default_rng(0).permutation(num_groups)
    tokens = (wanted * sample.means)[order]
    chosen = order[np.cumsum(tokens) - tokens < num_tokens]
    sample.groups = np.zeros_like(wanted)
    sample.groups[chosen] = wanted[chosen]
    return sample


def result_in_nats(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result of `bits_per_byte` in nats per token."""
    nats = {
        "eval_tokens": result["eval_tokens"],
        "val_loss": in_nats(result["val_bpb"]),
        "val_buckets": {name: in_nats(bits) for name, bits in result["val_buckets"].items()},
        "train_loss": {name: in_nats(bits) for name, bits in result["train_bpb"].items()},
    }
    if "unigram_bpb" in result:
        nats["unigram_loss"] = in_nats(result["unigram_bpb"])
    return nats


def inputs_and_targets(batches: Iterable[MicroBatch]) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches without ids of documents, which only attention needs."""
    for batch in batches:
        yield batch.inputs, batch.targets


def evaluate_tasks(
    args: argparse.Namespace, model: GPT, tokenizer: Tokenizer
) -> list[core_eval.Score]:
    """Collective. Evaluate the tasks of CORE, and print each result."""
    tasks = on_rank0(lambda: core_eval.read_bundle(args.eval_bundle, args.max_per_task))
    scores = []
    for score in core_eval.evaluate_core(model, tokenizer, tasks):
        task = score.task
        about = f"{task.num_fewshot}-shot, {task.kind}, {len(task.items):,} items"
        print0(
            f"{task.label} ({about}): accuracy {score.accuracy:.4f}, centered {score.centered:.4f}"
        )
        scores.append(score)
    return scores


def evaluate(
    args: argparse.Namespace, checkpoint: Path, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """Collective. Run the evaluations that --eval names."""
    began = time.perf_counter()
    run_dir = checkpoint.parent.parent
    model, tokenizer, meta = load_model(checkpoint, device, compute_dtype=dtype)
    _, rank, _, world_size = get_dist_info()
    if meta["changed_code"] and not args.json:
        print0(
            "note: the result of changed code is not stored in the run; --json=FILE stores it elsewhere"
        )
    result: dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "changed_code": meta["changed_code"],
        "step": meta["step"],
        "dtype": str(dtype),
        "device": device.type,
        "train_bpb": {},
        "samples": {},
    }
    if "core" in args.eval:
        scores = evaluate_tasks(args, model, tokenizer)
        num_items = sum(len(score.right) for score in scores)
        result["core"] = core_eval.summary(scores) | {"items": num_items}
    if "bpb" in args.eval or "sample" in args.eval:
        last_step = meta["step"] - 1
        if args.val_path is None:
            opened = Opened(*open_run(run_dir, args.data_path, step=last_step))
        else:
            settings = Settings.from_json(config_at(run_dir, last_step), run_dir / CONFIG_NAME)
            opened = open_text(settings, args, run_dir, tokenizer)
            result["data"] = args.val_path
        if "bpb" in args.eval:
            result |= bits_per_byte(args, model, run_dir, opened)
        if "sample" in args.eval and rank == 0:
            prompts = validation_prompts(opened.data.val, tokenizer, opened.config.T)
            result["samples"] = draw_samples(model, tokenizer, prompts)
    result["seconds"] = time.perf_counter() - began
    result["world_size"] = world_size
    result["torch"] = torch.__version__
    return result


def report(result: dict[str, Any]) -> None:
    """Print a result."""
    for texts in result["samples"].values():
        for text in texts:
            print0(f"{'-' * 80}\n{visible(text)}")
    title = f"{result['checkpoint']}, step {result['step']:,}"
    lines = [title]
    if "val_loss" in result:
        lines = table((title, "nats per token"), result_rows(result, "loss"))
    elif "val_bpb" in result:
        lines = table((title, "bits per byte"), result_rows(result, "bpb"))
    if result["train_bpb"] or result.get("train_loss"):
        lines.append(TRAIN_SAMPLE)
    if note := unseen_note(result):
        lines.append(note)
    if "core" in result:
        amount = core_eval.describe_items(result["core"])
        lines.append(f"CORE metric: {result['core']['core_metric']:.4f} ({amount})")
    print0("-" * 80, *lines, sep="\n")


def result_rows(result: dict[str, Any], key: str) -> list[tuple[str, str]]:
    """(data, loss on it), with losses in bits per byte (`key` is bpb) or nats per token (loss)."""
    of_text = result.get("data", "validation")
    losses = [(of_text, result[f"val_{key}"])]
    buckets = result["val_buckets"]
    if len(buckets) > 1:
        for bucket, loss in buckets.items():
            losses.append((f"{of_text}, {bucket}", loss))
    for bucket, loss in result[f"train_{key}"].items():
        losses.append((f"sample of the training files, {bucket}", loss))
    if f"unigram_{key}" in result:
        losses.append(("validation, unigram model", result[f"unigram_{key}"]))
    return [(name, f"{loss:.6f}") for name, loss in losses]


PARTS = {  # of a result, by mode
    "core": ("core",),
    "bpb": (
        *("eval_tokens", "val_bpb", "val_buckets", "train_bpb", "unigram_bpb"),
        *("val_loss", "train_loss", "unigram_loss"),
    ),
    "sample": ("samples",),
}


def with_earlier_parts(result: dict[str, Any], modes: Sequence[str], path: Path) -> dict[str, Any]:
    """A result with the parts that an earlier one of the same step has at `path`, and that
    were not computed again."""
    try:
        earlier = read_json(path, dict)
    except (FileNotFoundError, ValueError):
        return result
    same = ("step", "dtype", "device")
    if any(earlier.get(key) != result[key] for key in same):
        return result
    names = [name for mode in PARTS.keys() - set(modes) for name in PARTS[mode]]
    return result | {name: earlier[name] for name in names if name in earlier}


class Place(NamedTuple):
    """Where a result is stored. `aside`: the new name of an older result that is there."""

    path: Path
    aside: Path | None = None


def place_in(run_dir: Path, step: int) -> Place:
    """The place of a step's result in its run: `EVAL_NAME` if it is the newest step evaluated."""
    newest = run_dir / EVAL_NAME
    try:
        stored = read_json(newest, {"step": int})["step"]
    except (FileNotFoundError, ValueError):
        return Place(newest)
    if step < stored:
        return Place(older_evaluation(run_dir, step))
    return Place(newest, older_evaluation(run_dir, stored) if step > stored else None)


def store(result: dict[str, Any], place: Place) -> None:
    """Write a result, and its table of CORE's tasks if it has one.

    OSError names --json: the run may belong to another user.
    """
    path, aside = place
    files = [path]
    try:
        if aside is not None:
            for suffix in (".csv", ".json"):
                with contextlib.suppress(FileNotFoundError):
                    path.with_suffix(suffix).rename(aside.with_suffix(suffix))
            print0(f"the earlier result is now {aside}")
        write_json(path, result)
        if "core" in result:
            files.append(path.with_suffix(".csv"))
            core_eval.write_csv(files[-1], result["core"])
    except OSError as e:
        raise OSError(
            e.errno or errno.EIO,
            f"{files[-1]}: the result above could not be stored ({reason_of(e)}); name another file "
            f"with --json=FILE",
        ) from e
    print0(f"result: {', '.join(map(str, files))}")


def store_in(run_dir: Path, result: dict[str, Any], modes: Sequence[str]) -> None:
    """Write a result of some modes into its run, with the earlier ones of the other modes."""
    place = place_in(run_dir, result["step"])
    store(with_earlier_parts(result, modes, place.path), place)


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate a checkpoint, write the result and print it.

    ValueError and OSError for bad flags and files.
    """
    args = parse_args(argv)
    named = args.run
    with device_of(args) as (device, dtype):
        checkpoint = on_rank0(lambda: find_checkpoint(args.run).path.absolute())
        run_dir = checkpoint.parent.parent
        if args.run != named:  # a replay that is not kept
            run_dir, _ = find_run_at(named)
        result = evaluate(args, checkpoint, device, dtype)
        if args.run != named and args.no_keep:
            result["checkpoint"] = named  # that of the replay is about to be deleted
        report(result)  # first, because it may have taken an hour
        if args.json:
            on_rank0(lambda: store(result, Place(args.json)))
        elif args.val_path is None and not result["changed_code"]:
            on_rank0(lambda: store_in(run_dir, result, args.eval))
    return 0


if __name__ == "__main__":
    run_main(main)
