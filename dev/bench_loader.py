"""
Measure the loader's throughput and memory beside tiktoken and megatron-core, on the same data.

    python -m dev.bench_loader [--part text|tokens] [--megatron-python VENV/bin/python]

    text      tokens per second of processor time: bare tiktoken, and the loader with all its threads (`split`, with 64
              lanes and 64 rows per step); anonymous memory during a run, minus that of the bare process
    tokens    tokens per second of processor time from Megatron's files: megatron-core's GPTDataset behind a DataLoader
              without workers, and our lanes with their digests, bestfit and concat

`tokens` needs the Python of an environment with megatron-core and our packages, which
`dev/compare_megatron.sh` creates. Without it, only our layouts are measured. Token files are in
/dev/shm, because some machines drop the page cache. Both sides make batches of 16 rows of 2,048
inputs and targets, int64, on the CPU. Megatron's batches also have a loss mask and position ids.
Ours pack whole documents, copy the state at each step and come from a thread, all on the same core.
Long documents need the most memory, so measure it with `--part text --data-path=FOLDER_OF_CODE`.
Each part runs in its own process on one core. The last line is one JSON object.
"""

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from dev.measure import (
    SHARED,
    anonymous_mb,
    find_tokenizer,
    in_process,
    in_turns,
    one_core,
    print_figure,
    print_ratios,
    print_setup,
    seconds,
)
from nanochat.cli import Parser, quiet_gc, run_main
from nanochat.dataloader import DataLoader
from nanochat.files import find_files
from nanochat.order import StreamConfig
from nanochat.sources import open_source, scan
from nanochat.text_kinds import read_texts
from nanochat.tokenizer import RustBPETokenizer
from scripts import tok_shards

T = 2048
B = 16
LANES = 64
STEP = 16  # micro-batches per step from token files
COPIES = 8  # of the corpus in token files
LAYOUTS: dict[str, dict[str, Any]] = {"bestfit": {}, "concat": {"layout": "concat"}}


def open_loader(
    args: argparse.Namespace, path: Path, data_format: str, *, micro: int = STEP, **settings: Any
) -> DataLoader:
    """The loader on all files below a folder, with `micro` micro-batches per step."""
    tokenizer = RustBPETokenizer.from_directory(args.tokenizer_dir)
    source = open_source(scan(path, find_files(path, data_format)), tokenizer)
    return DataLoader(
        StreamConfig(T=T, V=LANES, **settings),
        {"data": source},
        tokenizer=tokenizer,
        rows_per_step=micro * B,
        device_batch_size=B,
        num_threads=1,
    )


def take(batches: Iterator[Any], num: int) -> None:
    for _ in range(num):
        next(batches)


@contextlib.contextmanager
def many_shards(args: argparse.Namespace) -> Iterator[Path]:
    """A folder of Megatron's files that has the corpus several times, by hard links."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as name:
        folder = Path(name)
        with contextlib.redirect_stdout(sys.stderr):
            tok_shards.main(
                [
                    f"--input-dir={args.data_path}",
                    f"--output-dir={folder / 'once'}",
                    "--format=megatron",
                    f"--tokenizer={args.tokenizer_dir}",
                    "--num-workers=1",
                ]
            )
        for i, file in itertools.product(range(COPIES), sorted((folder / "once").rglob("*.*"))):
            if file.suffix in (".bin", ".idx"):
                target = folder / "data" / f"copy{i}" / file.relative_to(folder / "once")
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(file, target)
        yield folder / "data"


# ---- text ----------------------------------------------------------------------------------------


def bench_text(args: argparse.Namespace) -> dict[str, Any]:
    one_core()
    tokenizer = RustBPETokenizer.from_directory(args.tokenizer_dir)
    bare = anonymous_mb()  # before any text is read
    micro = 4
    loader = open_loader(args, args.data_path, "text", micro=micro, long_docs="split")
    take(loader, 20 * micro)  # skip the first rows: while buffers grow, more is read than delivered
    quiet_gc()  # like training after its first step
    marks = []
    for _ in range(8):
        take(loader, 20 * micro)
        marks.append(anonymous_mb() - bare)
    result: dict[str, Any] = {
        "memory_mb": print_figure("memory over the bare process", marks, "MB")
    }
    texts = [text for file in find_files(args.data_path) for text in read_texts(file)]
    batch = [texts[i] for i in np.random.default_rng(0).permutation(len(texts))[:1500]]
    num_tokens = len(tokenizer.encode_flat(batch, num_threads=1)[0])
    del texts

    def load() -> float:
        take(loader, 2 * micro)  # these were prefetched while others ran
        return 16 * micro * B * T / seconds(lambda: take(loader, 16 * micro), time.process_time)

    def bare_tiktoken() -> None:
        for text in batch:
            tokenizer.enc.encode_ordinary(text)

    rates = in_turns(
        {
            # time of this thread only: the loader's thread may still fill its queue
            "bare tiktoken": lambda: num_tokens / seconds(bare_tiktoken, time.thread_time),
            "loader": load,
        },
        args.rounds,
    )
    loader.close()
    return result | {"tokens_per_s": print_ratios(rates, "tokens/s")}


# ---- token files ---------------------------------------------------------------------------------


def megatron_batches(prefixes: Sequence[Path], cache: Path) -> Iterator[Any]:
    """An endless iterator over batches of megatron-core's data set."""
    from megatron.core.datasets import gpt_dataset as g
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from torch import distributed as dist
    from torch.utils.data import DataLoader as TorchLoader

    # the builder needs a rank
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = g.GPTDatasetConfig(
        random_seed=1234,
        sequence_length=T,
        split="1,0,0",
        blend=(list(map(str, prefixes)), None),
        path_to_cache=str(cache),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=SimpleNamespace(eod=0, unique_identifiers={}, vocab_size=32768),
    )
    dataset = BlendedMegatronDatasetBuilder(
        g.GPTDataset, [None, None, None], lambda: True, config
    ).build()[0]
    while True:
        yield from TorchLoader(dataset, batch_size=B, num_workers=0)


def bench_tokens(args: argparse.Namespace) -> dict[str, Any]:
    with many_shards(args) as folder, tempfile.TemporaryDirectory() as cache:
        one_core()
        loaders = {
            layout: open_loader(args, folder, "megatron", **settings)
            for layout, settings in LAYOUTS.items()
        }
        batches: dict[str, Iterator[Any]] = {}
        if find_spec("megatron") is not None:
            prefixes = [Path(file).with_suffix("") for file in find_files(folder, "megatron")]
            batches["megatron-core"] = megatron_batches(prefixes, Path(cache))
        batches |= loaders

        def rate(loader: Iterator[Any]) -> Callable[[], float]:
            take(loader, 20 * STEP)  # skip the first rows, while buffers grow
            return lambda: (
                8 * STEP * B * T / seconds(lambda: take(loader, 8 * STEP), time.process_time)
            )

        rates = {name: rate(loader) for name, loader in batches.items()}
        quiet_gc()
        result = print_ratios(in_turns(rates, args.rounds), "tokens/s")
        for ours in loaders.values():
            ours.close()
    if "megatron-core" not in result:
        print("  megatron-core is not installed, so it is not measured; see --megatron-python")
    return result


PARTS = {"text": bench_text, "tokens": bench_tokens}


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts, or the one that --part names."""
    p = Parser(description=__doc__)
    p.add_argument("--data-path", type=Path, default=SHARED, help="folder of text")
    p.add_argument(
        "--tokenizer-dir", type=Path, help="default: train one of 32,768 tokens on the data"
    )
    p.add_argument(
        "--megatron-python",
        default=sys.executable,
        help="the Python of an environment with megatron-core",
    )
    p.add_argument("--part", choices=PARTS, help="run only this part")
    p.add_argument("--rounds", type=int, default=7, help="number of rounds")
    p.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args(argv)
    if args.inside:
        print(json.dumps(PARTS[args.part](args)))
        return 0
    result: dict[str, Any] = {"about": print_setup()}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer_dir = find_tokenizer(args.tokenizer_dir, args.data_path, Path(folder))
        for part in [args.part] if args.part else PARTS:
            print(f"{part}:", flush=True)
            result[part] = in_process(
                "dev.bench_loader",
                "--inside",
                f"--part={part}",
                f"--tokenizer-dir={tokenizer_dir}",
                f"--data-path={args.data_path}",
                f"--rounds={args.rounds}",
                python=args.megatron_python if part == "tokens" else sys.executable,
            )
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    run_main(main)
