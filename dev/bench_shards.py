"""
Pretokenized data: how fast the loader delivers each layout on one core, beside a bare gather of contiguous rows from a
memory map; its anonymous memory along an epoch; seconds to the first batch of 1,000 shards and of 10 M documents.

This is `python -m dev.bench_loader --part shards`.
"""

import argparse
import contextlib
import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dev.measure import anonymous_mb, fastest_tenth
from nanochat.common import quiet_gc
from nanochat.dataloader import DataLoader
from nanochat.dataset import find_files
from nanochat.order import StreamConfig
from nanochat.shard_source import ShardSource
from nanochat.shards import HEADER, MAGIC, VERSION
from nanochat.sources import scan
from nanochat.stream import TURN_ROWS
from nanochat.tokenizer import RustBPETokenizer
from scripts import tok_shards

T, B, V = 2048, 16, 64
STEP_ROWS = 256  # of a step on shards: base_train's default, 524,288 tokens
WINDOW_STEPS = max(1, TURN_ROWS * V // STEP_ROWS)  # of which rows are packed in one go
COPIES = 8  # of the corpus
FLOOR = 1050e6  # tokens/s, of the machine for which the rates are wanted
LAYOUTS: dict[str, tuple[str, dict[str, Any], float]] = {  # (which shards, settings, tokens/s wanted without digest)
    "bestfit, crop": ("whole", {}, 100e6), "bestfit, split": ("whole", {"long_docs": "split"}, 100e6),
    "concat": ("whole", {"layout": "concat"}, 300e6), "binned": ("cut", {"layout": "binned"}, 60e6)}


def steps(loader: DataLoader, num: int) -> None:
    """Take whole steps."""
    for _ in range(num * loader.micro_batches_per_step):
        next(loader)


def make_shards(args: argparse.Namespace, folder: Path) -> None:
    """folder/whole and folder/cut: shards of the corpus, of whole documents and of windows of T ids, each linked a few
    times over."""
    for name, max_length in (("whole", 0), ("cut", T)):
        made = folder / f"{name} once"
        with contextlib.redirect_stdout(sys.stderr):
            tok_shards.main([f"--input-dir={args.data_path}", f"--output-dir={made}", f"--max-length={max_length}",
                             f"--tokenizer={args.tokenizer_dir}", "--val-files=0", f"--num-workers={args.threads}"])
        for i, file in itertools.product(range(COPIES), sorted((made / "train").rglob("*.*"))):
            if file.is_file() and ".records" not in file.parts:
                target = folder / name / f"copy{i}" / file.relative_to(made)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(file, target)


def open_shards(folder: Path, tokenizer: RustBPETokenizer, settings: dict[str, Any], **kwargs: Any
                ) -> tuple[DataLoader, ShardSource]:
    """A loader on all shards below a folder, and its source: 64 lanes, 256 rows a step."""
    config = StreamConfig(T=T, V=V, **settings)
    source = ShardSource(scan(folder, find_files(folder, "shards")), tokenizer, keep_eod=not config.framed)
    return DataLoader(config, {"data": source}, tokenizer=tokenizer, rows_per_step=STEP_ROWS, device_batch_size=B,
                      num_threads=1, **kwargs), source


def gather(maps: list[np.ndarray], places: Sequence[tuple[int, int]]) -> None:
    """The floor: batches of B contiguous rows from memory maps of uint16, as int64 inputs and targets. No documents, no
    order, no masks."""
    for i in range(0, len(places), B):
        rows = np.stack([maps[m][at:at + T + 1] for m, at in places[i:i + B]])
        torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))


def random_places(maps: list[np.ndarray], num: int, seed: int) -> list[tuple[int, int]]:
    """(map, first token) of so many rows."""
    rng = np.random.default_rng(seed)
    return [(m, int(rng.integers(0, len(maps[m]) - T))) for m in rng.integers(0, len(maps), num).tolist()]


WINDOWS = 4  # of a round; each has as many rows of the loader as of the floor


def windows(work: Sequence[Callable[[], None]], tokens: int) -> tuple[list[float], float]:
    """(tokens/s by the clock of each piece of work, those of processor time of all)."""
    rates, cpu = [], time.process_time()
    for part in work:
        began = time.perf_counter()
        part()
        rates.append(tokens / (time.perf_counter() - began))
    return rates, tokens * len(work) / (time.process_time() - cpu)


def shard_speed(folder: Path, tokenizer: RustBPETokenizer, rounds: int) -> dict[str, Any]:
    """Each layout with and without digest, beside the floor, round by round. Where other guests share the processor,
    the fastest tenth of the windows shows what it gives undisturbed."""
    result: dict[str, Any] = {}
    for (name, (shards, settings, wanted)), digest in itertools.product(LAYOUTS.items(), (False, True)):
        loader, source = open_shards(folder / shards, tokenizer, settings, with_digest=digest)
        opened = [source._shard(i) for i in range(len(source.manifest["files"]))]
        maps = [shard.reader.read(0, shard.index.num_tokens) for shard in opened]
        steps(loader, 40)  # past the first rows, while buffers grow
        quiet_gc()  # as base_train does after its first step
        rates: list[float] = []
        floors: list[float] = []
        ratios, cpu, floor_cpu = [], [], []
        rows = WINDOW_STEPS * STEP_ROWS
        for i in range(rounds):
            places = random_places(maps, WINDOWS * rows, i)
            theirs, rate = windows([partial(gather, maps, places[at:at + rows]) for at in
                                    range(0, len(places), rows)], rows * T)
            floors += theirs
            floor_cpu.append(rate)
            steps(loader, 1)  # into the caches
            mine, rate = windows([partial(steps, loader, WINDOW_STEPS)] * WINDOWS, rows * T)
            rates += mine
            cpu.append(rate)
            ratios.append(statistics.harmonic_mean(mine) / statistics.harmonic_mean(theirs))
        loader.close()
        found = {"tokens_per_s": statistics.median(rates), "floor": statistics.median(floors),
                 "undisturbed": fastest_tenth(rates),
                 "floor_undisturbed": fastest_tenth(floors), "ratio": statistics.median(ratios),
                 "tokens_per_cpu_s": statistics.median(cpu), "floor_per_cpu_s": statistics.median(floor_cpu)}
        result[f"{name}{', digest' if digest else ''}"] = found
        m = {key: f"{value / 1e6:.0f}" for key, value in found.items()}
        print(f"  {name:14s} {'with   ' if digest else 'without'} digest {m['tokens_per_s']:>3} M tokens/s (n="
              f"{len(rates)}, {min(rates) / 1e6:.0f} to {max(rates) / 1e6:.0f}; fastest tenth {m['undisturbed']}), "
              f"{m['tokens_per_cpu_s']:>3} M a CPU second; floor {m['floor']} M (fastest tenth {m['floor_undisturbed']}"
              f"); ratio {found['ratio']:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
              + ("" if digest else f"  (wanted: {wanted / 1e6:.0f} M, {wanted / FLOOR:.3f} of a floor of "
                                   f"{FLOOR / 1e6:,.0f} M)"), flush=True)
    return result


def shard_memory(folder: Path, tokenizer: RustBPETokenizer) -> dict[str, list[float]]:
    """Anonymous memory over that before opening, at ten places of an epoch, MB."""
    result = {}
    for name, (shards, settings, _) in LAYOUTS.items():
        gc.collect()
        before = anonymous_mb()
        loader, source = open_shards(folder / shards, tokenizer, settings)
        total = sum(e["size"] for e in source.manifest["files"]) // 2 // (STEP_ROWS * T)  # steps of an epoch, about
        marks = []
        for _ in range(10):
            steps(loader, max(1, total // 10))
            marks.append(anonymous_mb() - before)
        loader.close()
        result[name] = marks
        print(f"  {name:14s} anonymous memory along an epoch ({total} steps): {', '.join(f'{m:.0f}' for m in marks)} MB"
              f"  (wanted: flat)", flush=True)
    return result


def many_shards(folder: Path, times: int) -> Path:
    """A folder of so many pairs, links to one."""
    pair = next((folder / "whole").rglob("*.bin"))
    target = folder / "many"
    target.mkdir()
    for i in range(times):
        for end in (".bin", ".idx"):
            os.link(pair.with_suffix(end), target / f"s{i:05d}{end}")
    return target


def many_documents(folder: Path, times: int) -> Path:
    """A pair of so many documents, 400 to 1,200 ids each. Its .bin is a hole that the disk does not hold."""
    target = folder / "large"
    target.mkdir()
    lengths = np.random.default_rng(0).integers(400, 1200, times)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")
    with open(target / "a.idx", "wb") as f:
        f.write(HEADER.pack(MAGIC, VERSION, 2, times) + offsets.tobytes() + bytes(2 * times))
    with open(target / "a.bin", "wb") as f:
        f.truncate(2 * int(offsets[-1]))
    return target


def shard_first(folder: Path, tokenizer: RustBPETokenizer, rounds: int) -> dict[str, Any]:
    """Seconds from nothing open to the first batch, and anonymous memory for each document."""
    result: dict[str, Any] = {}
    for name, path in (("1,000 shards", many_shards(folder, 1000)), ("10 M documents", many_documents(folder, 10**7))):
        seconds, grown, documents = [], [], 0
        for _ in range(rounds):
            gc.collect()
            before, began = anonymous_mb(), time.perf_counter()
            loader, source = open_shards(path, tokenizer, {})
            next(loader)
            seconds.append(time.perf_counter() - began)
            grown.append((anonymous_mb() - before) * 2**20)
            documents = int(source.groups.sum())
            loader.close()
        each = max(grown) / documents
        result[name] = {"first_batch_s": statistics.median(seconds), "bytes_per_document": each}
        print(f"  {name:14s} first batch after {statistics.median(seconds):.2f} s (n={rounds}, {min(seconds):.2f} to "
              f"{max(seconds):.2f}; wanted: under 1); {documents:,} documents, anonymous memory grown by {each:.1f} "
              f"bytes each, all buffers included (wanted: under 12 for 10 M)", flush=True)
    return result


def bench_shards(args: argparse.Namespace) -> dict[str, Any]:
    """Pretokenized data on one core: speed of each layout, memory along an epoch, time to the first batch."""
    tokenizer = RustBPETokenizer.from_directory(args.tokenizer_dir)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_shards(args, folder)
        core = max(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})
        torch.set_num_threads(1)
        print(f"  pinned to core {core}; load {os.getloadavg()[0]:.1f}", flush=True)
        return {"first": shard_first(folder, tokenizer, args.rounds), "memory": shard_memory(folder, tokenizer),
                "speed": shard_speed(folder, tokenizer, 2 * args.rounds + 1), "load": os.getloadavg()[0]}
