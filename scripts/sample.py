"""
Let a trained model continue some prompts:

    python -m scripts.sample --run d12
    python -m scripts.sample --checkpoint RUN/checkpoints/checkpoint-1000 -p "Water boils at" --num-samples 3

Without -p it continues a few prompts of its own. Temperature 0 (the default) takes the most likely token each time.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from nanochat.checkpoint import load_model
from nanochat.common import Parser, run_main
from nanochat.dist import autodetect_device_type, compute_cleanup, compute_init, get_compute_dtype
from nanochat.engine import Engine
from nanochat.run_dir import find_run, list_runs

PROMPTS = (
    "The largest planet in the solar system is",
    "Two plus two is",
    "A good way to learn a new language is to",
    "If yesterday was Monday, then tomorrow is",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea,",
)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="Continue prompts with a trained model.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--run", help="run directory or model tag: its newest good checkpoint (default: the only run)")
    which.add_argument("--checkpoint", type=Path, help="a checkpoint directory")
    parser.add_argument("-p", "--prompt", action="append", help="text to continue; may be given several times")
    parser.add_argument("--num-samples", type=int, default=1, help="continuations per prompt")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens per continuation")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 = most likely token, 1 = as the model says")
    parser.add_argument("--top-k", type=int, help="draw from the k most likely tokens only")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--device-type", default="", help="cuda, mps or cpu (default: the best there is)")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    return parser.parse_args(argv)


def pick_path(args: argparse.Namespace) -> Path:
    """The run or checkpoint to load; with neither flag the one run there is. ValueError if that is not clear."""
    if args.checkpoint is not None:
        return args.checkpoint
    if args.run is not None:
        return find_run(args.run)
    runs = list_runs()
    if len(runs) != 1:
        raise ValueError(f"--run: not given, and there are {len(runs)} runs ({', '.join(runs) or 'none'}); name one")
    return find_run(runs[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Load, sample, print. Raises ValueError for bad flags and what `load_model` raises."""
    args = parse_args(argv)
    path = pick_path(args)
    *_, device = compute_init(args.device_type or autodetect_device_type())
    try:
        model, tokenizer, _ = load_model(path, device, compute_dtype=get_compute_dtype(device, args.dtype))
        engine = Engine(model, tokenizer)
        for prompt in args.prompt or PROMPTS:
            tokens = tokenizer.encode(prompt, prepend=tokenizer.get_bos_token_id())
            results, _ = engine.generate_batch(tokens, args.num_samples, max_tokens=args.max_tokens,
                                               temperature=args.temperature, top_k=args.top_k, seed=args.seed)
            for result in results:
                print(f"{'-' * 80}\n{tokenizer.decode(result[1:])}", flush=True)  # without <|bos|>
    finally:
        compute_cleanup()
    return 0


if __name__ == "__main__":
    run_main(main)
