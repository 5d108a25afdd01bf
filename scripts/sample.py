"""
Continue text with a trained model:

    python -m scripts.sample d12
    python -m scripts.sample d12@1000 -p "Water boils at"

Without -p, the prompts are the beginnings of the run's validation documents, so a model trained on
code continues code. A » marks the end of the prompt; on a terminal the prompt is dimmed instead.
"""

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from nanochat.any_step import add_data_path, add_no_keep, make_available
from nanochat.cli import Parser, run_main, setup_logging, whole
from nanochat.common import visible
from nanochat.config import MAX_SEED
from nanochat.dataloader import validation_prompts
from nanochat.dist import (
    autodetect_device_type,
    compute_cleanup,
    compute_init,
    get_compute_dtype,
    on_rank0,
)
from nanochat.engine import Engine, load_model
from nanochat.start_run import open_run

log = logging.getLogger(__name__)


def ask_for_model(parser: Parser) -> None:
    """Add the arguments that choose model, device and compute dtype."""
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="a run's name or folder, which stands for its newest "
        "good checkpoint; RUN@STEP, saved or not; or a checkpoint's folder (default: the only run)",
    )
    add_no_keep(parser)
    add_data_path(parser)
    parser.add_argument(
        "--device-type", default="", help="cuda | mps | cpu (default: the best available)"
    )
    parser.add_argument("--dtype", default="auto", help="compute dtype: auto | bfloat16 | float32")


@contextmanager
def device_of(args: argparse.Namespace) -> Iterator[tuple[torch.device, torch.dtype]]:
    """The device and compute dtype that the arguments from `ask_for_model` choose. A step that was
    not saved is replayed first."""
    setup_logging()
    *_, device = compute_init(args.device_type or autodetect_device_type())
    try:
        is_kept = not args.no_keep
        args.run = on_rank0(
            lambda: make_available(args.run, kept=is_kept, data_path=args.data_path)
        )
        yield device, get_compute_dtype(device, args.dtype)
    finally:
        compute_cleanup()


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="Continue text with a trained model.", epilog=__doc__)
    ask_for_model(parser)
    parser.add_argument(
        "-p",
        "--prompt",
        action="append",
        help="text to continue; repeatable (default: beginnings of the run's validation documents)",
    )
    parser.add_argument("--num-samples", type=whole(1), default=1, help="continuations per prompt")
    parser.add_argument("--max-tokens", type=whole(1), default=64, help="tokens per continuation")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="0: always the most likely token; 1: the model's probabilities",
    )
    parser.add_argument(
        "--top-k", type=int, default=50, help="sample from the k most likely tokens"
    )
    parser.add_argument(
        "--seed", type=whole(0, most=MAX_SEED), default=42, help="seed of the samples"
    )
    return parser.parse_args(argv)


def marked(prompt: str, text: str) -> str:
    """`text`, which begins with `prompt`, with a mark at the end of the prompt.

    A character that the prompt cuts in two belongs to the continuation.
    """
    if not text.startswith(prompt):
        prompt = prompt.rstrip("\ufffd")
    begin, end = "", "»"
    has_colors = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    if has_colors:
        begin, end = "\033[2m", "\033[0m"
    continuation = text[len(prompt) :]
    return f"{begin}{visible(prompt)}{end}{visible(continuation)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Load a model and print samples.

    Raises ValueError for bad flags, and the errors of `load_model`.
    """
    args = parse_args(argv)
    with device_of(args) as (device, dtype):
        model, tokenizer, meta = load_model(args.run, device, compute_dtype=dtype)
        bos = tokenizer.get_bos_token_id()
        prompts = [tokenizer.encode(text, prepend=bos) for text in args.prompt or ()]
        if not prompts:
            try:
                data, config, _ = open_run(meta["path"].absolute().parent.parent, args.data_path)
                prompts = validation_prompts(data.val, tokenizer, config.T)
            except (ValueError, OSError) as e:
                log.warning(
                    "the validation text cannot be read, so samples start without a prompt (%s)", e
                )
        engine = Engine(model, tokenizer)
        for tokens in prompts or [[bos]]:
            results, _ = engine.generate_batch(
                tokens,
                args.num_samples,
                max_tokens=args.max_tokens,
                temperature=args.temperature,
                top_k=args.top_k,
                seed=args.seed,
            )
            for result in results:
                # without <|bos|>
                prompt = tokenizer.decode(tokens[1:])
                text = tokenizer.decode(result[1:])
                print(f"{'-' * 80}\n{marked(prompt, text)}", flush=True)
    return 0


if __name__ == "__main__":
    run_main(main)
