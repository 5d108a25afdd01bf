"""
Measure how fast a model generates, and how much memory it needs.

    python -m scripts.infer_bench d12

*Prefill* computes the whole prompt at once, in large matrix products. It is limited by arithmetic,
and determines the time to the first token. *Decoding* computes one position per row and step, and
reads all weights and the whole cache each time. It is limited by memory bandwidth, so a step takes
hardly longer for many rows than for one. The prompt is computed once, and its cache is copied to
all B rows (nanochat/engine.py). The script follows nanochat's.

Each line shows the medians of --rounds rounds, after a warm-up round. The last line is a JSON
object.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from nanochat.attention import KVCache
from nanochat.cli import Parser, run_main, whole
from nanochat.common import table
from nanochat.dist import peak_memory
from nanochat.engine import Engine, load_model
from nanochat.gpt import GPT
from scripts.sample import ask_for_model, device_of

# a tokenizer without a stop token
ENDLESS: Any = SimpleNamespace(get_bos_token_id=lambda: -1, get_special_tokens=list)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    p = Parser(description="Measure prefill and decoding.", epilog=__doc__)
    ask_for_model(p)
    p.add_argument(
        "--batch-sizes",
        type=whole(1),
        nargs="+",
        default=[1, 8, 32],
        metavar="B",
        help="rows per batch",
    )
    p.add_argument(
        "--prompt-tokens",
        type=whole(1, also=-1),
        default=-1,
        help="length of the prompt; -1: half a training row",
    )
    p.add_argument(
        "--decode-tokens", type=whole(2), default=128, help="tokens to generate for each row"
    )
    p.add_argument(
        "--rounds", type=whole(1), default=3, help="rounds per batch size; the median is reported"
    )
    return p.parse_args(argv)


def times(model: GPT, prompt: list[int], rows: int, decode_tokens: int) -> Iterator[float]:
    """Generate with `rows` rows, and yield the seconds that each column of tokens takes.

    The first includes the prompt. The host reads each column before it is yielded, so no work is in
    flight between two columns.
    """
    columns = Engine(model, ENDLESS).generate(
        prompt, rows, max_tokens=decode_tokens, temperature=0.0
    )
    while True:
        began = time.perf_counter()
        if next(columns, None) is None:
            return
        yield time.perf_counter() - began


def measure(
    model: GPT, prompt_tokens: int, rows: int, decode_tokens: int, *, rounds: int = 3
) -> dict[str, Any]:
    """The results of one batch size.

    Time to first token, tokens/s of prefill and of decoding all rows, bytes of the full cache and,
    on a GPU, peak memory.
    """
    first = []
    step = []
    for _ in range(rounds + 1):
        to_first, *steps = times(model, [1] * prompt_tokens, rows, decode_tokens)
        first.append(to_first)
        step.append(statistics.median(steps))
    # the first round warms up
    first_s = statistics.median(first[1:])
    step_s = statistics.median(step[1:])
    one = KVCache(1, 1, model=model)
    bytes_per_token = one.k.nbytes + one.v.nbytes
    return {
        "rows": rows,
        "first_token_s": first_s,
        "prefill_tokens_per_s": prompt_tokens / first_s,
        "decode_step_s": step_s,
        "decode_tokens_per_s": rows / step_s,
        "cache_bytes": bytes_per_token * rows * (prompt_tokens + decode_tokens),
        "peak_memory_bytes": peak_memory(model.get_device()),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Raises ValueError for bad flags, and the errors of `load_model`."""
    args = parse_args(argv)
    with device_of(args) as (device, dtype):
        model, _, meta = load_model(args.run, device, compute_dtype=dtype)
        prompt_tokens = args.prompt_tokens
        if prompt_tokens == -1:
            prompt_tokens = model.config.sequence_len // 2
        hardware = f"{torch.get_num_threads()} threads"
        if device.type == "cuda":
            hardware = torch.cuda.get_device_name(device)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        print(
            f"{meta['path']}: {parameters:,} parameters, {dtype}, {device.type} ({hardware}); a prompt of "
            f"{prompt_tokens:,} tokens, then {args.decode_tokens:,} per row",
            flush=True,
        )
        batches = []
        for rows in args.batch_sizes:
            figures = measure(model, prompt_tokens, rows, args.decode_tokens, rounds=args.rounds)
            batches.append(figures)
        print_batches(batches)
        result = {
            "model": str(meta["path"]),
            "parameters": parameters,
            "device": hardware,
            "dtype": str(dtype),
            "torch": torch.__version__,
            "prompt_tokens": prompt_tokens,
            "decode_tokens": args.decode_tokens,
            "rounds": args.rounds,
            "batches": batches,
        }
        print(json.dumps(result))
    return 0


def print_batches(batches: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of the results of `measure`."""
    lines: list[dict[str, Any]] = []
    for figures in batches:
        line = {
            "B": figures["rows"],
            "first token, ms": figures["first_token_s"] * 1e3,
            "prefill tok/s": figures["prefill_tokens_per_s"],
            "step, ms": figures["decode_step_s"] * 1e3,
            "decode tok/s": figures["decode_tokens_per_s"],
            "cache, MB": figures["cache_bytes"] / 1e6,
        }
        lines.append(line)
    print(*table([*lines[0]], [[*line.values()] for line in lines]), sep="\n")


if __name__ == "__main__":
    run_main(main)
