"""
Evaluate a trained model: bits per byte on validation and training data, samples, the CORE metric.

    python -m scripts.base_eval d12
    python -m scripts.base_eval d12 --eval core,bpb,sample --max-per-task 500
    torchrun --standalone --nproc_per_node=8 -m scripts.base_eval d24 --eval core
    python -m scripts.base_eval d12@1000 --json eval.json

Tokenizer, data files and row length come from the run directory. With the default --eval-tokens, the validation result
equals the one that training printed at that step. A unigram model, which only knows how frequent each token is in the
first rows of training, is evaluated for comparison. CORE needs only the run's model and tokenizer, and the eval_bundle
folder (nanochat/core_eval.py). Results are written to RUN/eval.json, and CORE's table to RUN/eval.csv.
"""

import argparse
import contextlib
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat import core_eval
from nanochat.checkpoint import find_checkpoint
from nanochat.cli import Parser, run_main, whole
from nanochat.common import get_dist_info, print0, table, visible, write_json
from nanochat.config import Settings
from nanochat.dataloader import DataLoader, Dry, validation_loader, validation_prompts
from nanochat.dist import on_rank0
from nanochat.engine import Engine, load_model
from nanochat.gpt import GPT
from nanochat.loss_eval import evaluate_bpb, evaluate_buckets, in_nats
from nanochat.sources import DATA_MANIFEST, RunData, open_data, read_manifests
from nanochat.start_run import open_run
from nanochat.tokenizer import Tokenizer
from scripts.sample import ask_for_model, device_of

MODES = ("core", "bpb", "sample")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    p = Parser(description="Evaluate a trained model.", epilog=__doc__)
    ask_for_model(p)
    p.add_argument("--eval", default="bpb,sample", metavar="MODES",
                   help=f"comma-separated list of {', '.join(MODES)}")
    p.add_argument("--max-per-task", type=whole(1, also=-1), default=-1, help="items per task of CORE; -1: all")
    p.add_argument("--eval-bundle", help="folder of CORE's tasks (default: <base dir>/eval_bundle, where <base dir> is "
                   "$NANOCHAT_BASE_DIR or ~/.cache/nanochat)")
    p.add_argument("--eval-tokens", type=whole(1, also=-1), default=-1,
                   help="tokens to evaluate from each split; -1: the run's --eval-tokens")
    p.add_argument("--unigram-tokens", type=whole(1), default=2**22,
                   help="number of training tokens that the unigram model counts")
    p.add_argument("--device-batch-size", type=whole(1, also=-1), default=-1,
                   help="rows per forward pass; -1: the run's --device-batch-size")
    p.add_argument("--json", type=Path, help="file for the result (default: RUN/eval.json)")
    args = p.parse_args(argv)
    args.eval = [mode.strip() for mode in args.eval.split(",")]
    if unknown := set(args.eval) - set(MODES):
        raise ValueError(f"--eval: got {', '.join(sorted(unknown))!r}, expected a comma-separated list of "
                         f"{', '.join(MODES)}")
    return args


def draw_samples(model: GPT, tokenizer: Tokenizer, prompts: list[list[int]]) -> dict[str, list[str]]:
    """The most likely continuation of each prompt, and texts sampled from BOS alone."""
    engine, bos = Engine(model, tokenizer), tokenizer.get_bos_token_id()
    free, _ = engine.generate_batch([bos], 4, max_tokens=96, temperature=1.0, seed=42)
    prompted = [engine.generate_batch(prompt, max_tokens=32, temperature=0.0)[0][0] for prompt in prompts]
    return {"prompted": [tokenizer.decode(tokens[1:]) for tokens in prompted],
            "unprompted": [tokenizer.decode(tokens[1:]) for tokens in free]}


def unigram_nats(data: RunData, config: Any, num_tokens: int) -> Tensor:
    """The loss of each token under the unigram model, (vocab_size,) float32. Counts targets in the first rows of the
    run's stream, the same number of rows from each lane, at least `num_tokens` tokens in all; counts start at 1."""
    counts = torch.ones(data.tokenizer.get_vocab_size(), dtype=torch.int64)
    steps = -(-num_tokens // (config.V * config.T))
    with DataLoader(config, data.train, tokenizer=data.tokenizer, rows_per_step=config.V,
                    device_batch_size=config.V, drop_dry=True) as loader, contextlib.suppress(Dry):
        for batch in itertools.islice(loader, steps):
            counts += torch.bincount(batch.targets[batch.targets >= 0], minlength=len(counts))
    return -(counts / counts.sum(dtype=torch.float64)).log().float()


def bits_per_byte(args: argparse.Namespace, model: GPT, run_dir: Path, opened: tuple[RunData, Any, Settings]
                  ) -> dict[str, Any]:
    """Collective. Bits per byte of the model on validation data and on the same number of tokens of each training
    bucket, and of the unigram model on the validation data. If the tokenizer does not know bytes, nats per token under
    other keys."""
    _, rank, _, world_size = get_dist_info()
    stored, config, settings = opened
    tokenizer = stored.tokenizer
    data = stored if config.framed else open_data(read_manifests(run_dir / DATA_MANIFEST), tokenizer)
    model.attention_mode = settings.attention_mode
    token_bytes = tokenizer.token_bytes()
    B = settings.device_batch_size if args.device_batch_size == -1 else args.device_batch_size
    num_tokens = settings.eval_tokens if args.eval_tokens == -1 else args.eval_tokens

    def batches(source: Any, num_tokens: int) -> Iterator[Any]:
        return validation_loader(
            source, tokenizer=tokenizer, T=config.T, num_tokens=num_tokens, device=model.get_device(),
            rank=rank, device_batch_size=B, world_size=world_size, num_leaves=settings.leaves,
            with_doc_ids=model.attention_mode != "causal")

    val, buckets = evaluate_buckets(model, {name: batches(source, num_tokens // len(data.val))
                                            for name, source in data.val.items()}, token_bytes)
    train = {name: evaluate_bpb(model, batches(source, num_tokens), None, token_bytes)
             for name, source in data.train.items() if len(source.groups)}
    nats = on_rank0(lambda: unigram_nats(stored, config, args.unigram_tokens)).to(model.get_device())

    def unigram(x: Tensor, y: Tensor, loss_reduction: str) -> Tensor:
        return nats[y.clamp(min=0)]

    floor, _ = evaluate_buckets(unigram, {
        name: ((batch.inputs, batch.targets) for batch in batches(source, num_tokens // len(data.val)))
        for name, source in data.val.items()}, token_bytes)
    if tokenizer.knows_bytes:
        return {"val_bpb": val, "val_buckets": buckets, "train_bpb": train, "unigram_bpb": floor}
    buckets, train = ({name: in_nats(bits) for name, bits in bpb.items()} for bpb in (buckets, train))
    return {"val_loss": in_nats(val), "val_buckets": buckets, "train_loss": train, "unigram_loss": in_nats(floor)}


def evaluate(args: argparse.Namespace, checkpoint: Path, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Collective. Run the evaluations that --eval names."""
    began, run_dir = time.perf_counter(), checkpoint.parent.parent
    model, tokenizer, meta = load_model(checkpoint, device, compute_dtype=dtype)
    _, rank, _, world_size = get_dist_info()
    result: dict[str, Any] = {"checkpoint": str(checkpoint), "step": meta["step"], "dtype": str(dtype),
                              "device": device.type, "train_bpb": {}, "samples": {}}
    if "core" in args.eval:
        tasks, scores = on_rank0(lambda: core_eval.read_bundle(args.eval_bundle, args.max_per_task)), []
        for score in core_eval.evaluate_core(model, tokenizer, tasks):
            task = score.task
            print0(f"{task.label} ({task.num_fewshot}-shot, {task.kind}, {len(task.items):,} items): "
                   f"accuracy {score.accuracy:.4f}, centered {score.centered:.4f}")
            scores.append(score)
        result["core"] = core_eval.summary(scores)
    if set(args.eval) - {"core"}:
        opened = open_run(run_dir)
        if "bpb" in args.eval:
            result |= bits_per_byte(args, model, run_dir, opened)
        if "sample" in args.eval and rank == 0:
            data, config, _ = opened
            result["samples"] = draw_samples(model, tokenizer, validation_prompts(data.val, tokenizer, config.T))
    return result | {"seconds": time.perf_counter() - began, "world_size": world_size, "torch": torch.__version__}


def report(result: dict[str, Any]) -> None:
    """Print a result."""
    for texts in result["samples"].values():
        for text in texts:
            print0(f"{'-' * 80}\n{visible(text)}")
    key, unit = ("loss", "nats per token") if "val_loss" in result else ("bpb", "bits per byte")
    title = f"{result['checkpoint']}, step {result['step']:,}"
    lines = [title]
    if f"val_{key}" in result:
        buckets = result["val_buckets"] if len(result["val_buckets"]) > 1 else {}
        rows = [("validation", result[f"val_{key}"]),
                *((f"validation, {bucket}", bpb) for bucket, bpb in buckets.items()),
                *((f"train, {bucket}", bpb) for bucket, bpb in result[f"train_{key}"].items()),
                ("validation, unigram model", result[f"unigram_{key}"])]
        lines = table((title, unit), [(name, f"{bpb:.6f}") for name, bpb in rows])
    if "core" in result:
        lines.append(f"CORE metric: {result['core']['core_metric']:.4f}")
    print0("-" * 80, *lines, sep="\n")


def store(result: dict[str, Any], path: Path) -> None:
    """Write a result, and its table of CORE's tasks if it has one. OSError names --json: the run may belong to another
    user."""
    files = [path]
    try:
        write_json(path, result)
        if "core" in result:
            files.append(path.with_suffix(".csv"))
            core_eval.write_csv(files[-1], result["core"])
    except OSError as e:
        raise OSError(e.errno, f"{files[-1]}: the result above could not be stored ({e.strerror}); name another file "
                               f"with --json=FILE") from e
    print0(f"result: {', '.join(map(str, files))}")


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate a checkpoint, write the result and print it. ValueError and OSError for bad flags and files."""
    args = parse_args(argv)
    with device_of(args) as (device, dtype):
        checkpoint = on_rank0(lambda: find_checkpoint(args.run).path.absolute())
        path = args.json or checkpoint.parent.parent / "eval.json"
        result = evaluate(args, checkpoint, device, dtype)
        report(result)  # first, because it may have taken an hour
        on_rank0(lambda: store(result, path))
    return 0


if __name__ == "__main__":
    run_main(main)
