"""What grows: time and memory against the size of each thing that a run has many of.

    python -m dev.bench_growth [--part=files] [--most=1000]

Each part measures one quantity at several sizes; PARTS names them. A size has a process of its own,
forked from this one, so that its peak memory is its own. Inputs are synthetic and lie in /dev/shm:
hard links to one tiny file, lengths without tokens, a log that repeats one line.

    seconds, MB     of processor time and peak memory of each measurement, at each size
    exponent        of the last two sizes: time grows with size ** exponent. A fixed cost pulls it to 0

A launch is `scripts.base_train` in the process of its size, with a model of one layer. "start" is a
new run of two steps, "resume" the same command after the last checkpoint was lost. The last line is one JSON
object.
"""

import contextlib
import gc
import importlib
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import string
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dev.measure import print_setup, seconds
from nanochat.checkpoint import OPTIMIZER_NAME, Snapshot, load_checkpoint
from nanochat.cli import Parser, run_main, whole
from nanochat.common import table, write_json
from nanochat.dataloader import StepLayout
from nanochat.gpt import GPT, GPTConfig
from nanochat.integrations.megatron_tables import blend_sources
from nanochat.order import Joined, StreamConfig, open_order
from nanochat.plan import Lengths, Rehearsal
from nanochat.reduce import lay_out
from nanochat.rows import Document
from nanochat.run_dir import find_run, iter_log, keep_cursors, pack_cursors, read_cursors
from nanochat.run_reader import RunReader
from nanochat.spikes import limits, remember
from nanochat.stream import Stream
from nanochat.tokenizer import RustBPETokenizer
from scripts import base_train, inspect_data, page, status, tok_shards

T = 32
GROUP = 1024  # documents in a group of synthetic lengths
MB = 1 << 20


class Cost(NamedTuple):
    """What a measurement took."""

    seconds: float  # of processor time, which other programs on the machine hardly change
    megabytes: float  # of peak memory, beyond what the process had


Costs = dict[str, Cost]


def memory(field: str) -> float:
    """A field of this process' status, such as VmRSS, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status: it has no {field}; measure memory on Linux")


def cost(call: Callable[[], object]) -> Cost:
    """The time and the peak memory of a call."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts over
    before = memory("VmRSS")
    spent_s = seconds(call, time.process_time)
    return Cost(spent_s, memory("VmHWM") - before)


# ---- runs ----------------------------------------------------------------------------------------


def some_texts(num: int, length: int = 60) -> list[str]:
    """Different texts of random letters."""
    rng = random.Random(num)
    return ["".join(rng.choices(string.ascii_lowercase + "    ", k=length)) for _ in range(num)]


def write_texts(path: Path, texts: Sequence[str], group_size: int = 64) -> None:
    """Write a parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": texts}), path, row_group_size=group_size)


def quietly(main: Callable[[list[str]], int], *flags: str) -> None:
    """Run a command without its output. ValueError if it fails."""
    with contextlib.redirect_stdout(io.StringIO()):
        code = main(list(flags))
    if code:
        raise ValueError(f"{main.__module__} {' '.join(flags)} ended with exit code {code}")


def train(steps: int, *flags: str, rows: int = 8) -> None:
    """Launch the run "run" of the base directory, up to a step."""
    shape = [
        "--depth=1",
        "--aspect-ratio=24",
        "--head-dim=12",
        f"--max-seq-len={T}",
        f"--total-batch-size={T * rows}",
        "--device-batch-size=8",
        "--eval-every=-1",
        "--sample-every=-1",
        "--device-type=cpu",
        "--dtype=float32",
        "--warmup-steps=0",
        "--model-tag=run",
    ]
    quietly(base_train.main, *shape, f"--num-iterations={steps}", *flags)


def launches(*flags: str, rows: int = 8) -> Costs:
    """The costs of a new run, and of its resume from the checkpoint before its last one."""
    flags = (*flags, "--save-every=1")
    start = cost(lambda: train(2, *flags, rows=rows))
    shutil.rmtree(find_run("run") / "checkpoints" / "final")
    return {"start": start, "resume": cost(lambda: train(2, *flags, rows=rows))}


def link(file: Path, folder: Path, num: int) -> None:
    """Fill a folder with hard links to a file."""
    folder.mkdir(parents=True)
    for number in range(num):
        os.link(file, folder / f"{number:06d}{file.suffix}")


# ---- the parts -----------------------------------------------------------------------------------


def files(num: int, work: Path) -> Costs:
    """parquet files of a run"""
    write_texts(work / "once.parquet", some_texts(64))
    link(work / "once.parquet", work / "data", num)
    return launches(f"--data-path={work / 'data'}")


def rows_in_group(num: int, work: Path) -> Costs:
    """documents in a row group; 10,000 documents, or one group"""
    write_texts(work / "data" / "0.parquet", some_texts(max(num, 10_000)), num)
    write_texts(work / "data" / "1.parquet", some_texts(64))
    return launches(f"--data-path={work / 'data'}")


def lanes(num: int, work: Path) -> Costs:
    """lanes of a run with 512 rows per step"""
    write_texts(work / "data" / "0.parquet", some_texts(100_000), 1024)
    write_texts(work / "data" / "1.parquet", some_texts(64))
    return launches(f"--data-path={work / 'data'}", f"--lanes={num}", rows=512)


def buckets(num: int, work: Path) -> Costs:
    """buckets of a curriculum, each with two files"""
    names = [f"b{number:03d}" for number in range(num)]
    for name, part in itertools.product(names, (0, 1)):
        write_texts(work / "data" / name / f"{part}.parquet", some_texts(256))
    mix = dict.fromkeys(names, 1 / num)
    phases = [{"duration_tokens": 2 * T * 8, "mix": mix}]
    write_json(work / "mix.json", {"curriculum": phases})
    flags = [f"--data-path={work / 'data'}", f"--curriculum={work / 'mix.json'}"]
    return launches(*flags)


def prefixes(num: int, work: Path) -> Costs:
    """paths of a blend in Megatron's order"""
    write_texts(work / "text" / "0.parquet", some_texts(256))
    write_texts(work / "text" / "1.parquet", some_texts(64))
    flags = ["--format=megatron", "--num-workers=1", f"--tokenizer={work / 'tokenizer'}"]
    folders = [f"--input-dir={work / 'text'}", f"--output-dir={work / 'once'}"]
    quietly(tok_shards.main, *folders, *flags)
    [bin_file, *_] = sorted((work / "once").rglob("*.bin"))
    for file in (bin_file, bin_file.with_suffix(".idx")):
        (work / "data").mkdir(exist_ok=True)
        for number in range(num):
            os.link(file, work / "data" / f"{number:06d}{file.suffix}")
    paths = ",".join(str(work / "data" / f"{number:06d}") for number in range(num))
    weights = ",".join(["1"] * num)
    blend = [f"--data-path={paths}", f"--blend-weights={weights}", "--split=90,10,0"]
    costs = launches("--order=megatron", "--data-format=megatron", *blend)
    costs["1M samples"] = cost(lambda: blend_sources([1 / num] * num, 1_000_000))
    return costs


class OnlyLengths:
    """A source of documents that are lengths alone, in groups of GROUP."""

    bos = 0
    lengths_known = True
    fingerprint = "lengths"

    def __init__(self, num_documents: int, mean: int = 600) -> None:
        num_groups = max(1, num_documents // GROUP)
        self.groups = np.full(num_groups, min(GROUP, num_documents), np.int64)
        self.means = np.full(num_groups, mean, np.int64)
        self.small = num_documents * mean <= 1 << 25
        self.joined: list[Joined] = []
        self.without: dict[int, np.ndarray] = {}
        self.tokenizer = self

    def lengths(self, group: int, numbers: np.ndarray) -> tuple[list[int], list[int]]:
        drawn = (numbers * 7919 + group * 104729) % (2 * int(self.means[group]))
        return (drawn + 1).tolist(), [0] * len(numbers)

    def read(self, group: int, numbers: np.ndarray, keep: int = 0) -> list[Document]:
        lengths, _ = self.lengths(group, numbers)
        return [Document(range(length)) for length in lengths]  # type: ignore[arg-type]

    def locate(self, group: int) -> tuple[str, int]:
        return "lengths", group


def open_lengths(source: Any, config: StreamConfig, **more: Any) -> Stream:
    """A stream that packs lengths."""
    return Stream(
        config,
        {"data": source},
        range(config.V),
        tokenizer="none",
        num_threads=0,
        feed=Rehearsal,
        **more,
    )


def documents(num: int, work: Path) -> Costs:
    """documents, as lengths alone; 64 lanes"""
    source: Any = OnlyLengths(num)
    config = StreamConfig(T=2048, V=64)
    order = open_order(source, bucket="data", config=config)
    group = len(source.groups) // 2
    lengths: list[Any] = []
    return {
        "order": cost(lambda: [order.share(lane, 0) for lane in range(config.V)]),
        "place": cost(lambda: [order.lane_and_place(0, group, number) for number in range(10)]),
        "plan's totals": cost(lambda: lengths.append(Lengths(source, config))),
        "64 rows": cost(lambda: open_lengths(lengths[0], config).next_rows(1)),
    }


def pending(num: int, work: Path) -> Costs:
    """pending documents of a lane (--buffer-size), as lengths alone; 100 rows when it is full"""
    source: Any = Lengths(OnlyLengths(10_000_000), StreamConfig(T=2048))  # type: ignore[arg-type]
    config = StreamConfig(T=2048, V=1, buffer_size=num)
    stream = open_lengths(source, config)
    costs = {"fill": cost(lambda: stream.next_rows(num // 2 + 1))}
    costs["100 rows"] = cost(lambda: stream.next_rows(100))
    cursors = stream.cursors()
    costs["cursor"] = cost(lambda: pack_cursors(1, cursors))
    costs["restore"] = cost(lambda: open_lengths(source, config, cursors=cursors))
    return costs


def parameters(num: int, work: Path) -> Costs:
    """parameters in a checkpoint, 12 bytes each"""
    state = {f"w{part}": torch.zeros(num // 10) for part in range(30)}
    snapshot = Snapshot(1, {OPTIMIZER_NAME: state}, {}, [], {"status": "running"})
    for folder in ("checkpoints", "logs/cursors"):
        (work / "run" / folder).mkdir(parents=True)
    path = work / "run" / "checkpoints" / "checkpoint-1"
    return {
        "write": cost(lambda: snapshot.write(work / "run", path.name)),
        "load": cost(lambda: load_checkpoint(path).load(OPTIMIZER_NAME)),
    }


def write_long_log(log: Path, num: int) -> None:
    """Continue a log up to step number `num` - 1, by its last step."""
    records = [record for record in iter_log(log) if record.get("event") != "completed"]
    last = [record for record in records if "event" not in record][-1]
    with open(log, "w") as f:
        for record in records:
            f.write(json.dumps(record) + "\n")
        for step in range(last["step"] + 1, num):
            loss = 3 + math.sin(step)
            later = {"step": step, "tokens": last["tokens"] * step, "loss": loss}
            f.write(json.dumps(last | later) + "\n")


def steps(num: int, work: Path) -> Costs:
    """steps in the log"""
    for part in (0, 1):
        write_texts(work / "data" / f"{part}.parquet", some_texts(2048))
    flags = (f"--data-path={work / 'data'}", "--save-every=4")
    train(8, *flags)
    run = find_run("run")
    write_long_log(run / "logs" / "train.jsonl", num)
    shutil.rmtree(run / "checkpoints" / "final")
    # `find` packs a lane again from the last save before its document: let there be a late one
    late = num - 100
    _, cursors = read_cursors(run / "logs" / "cursors" / "step-00000008.json.gz")
    keep_cursors(run, late, pack_cursors(late, cursors))
    losses = [[3 + math.sin(step), 0.5] for step in range(num)]

    def spikes() -> None:
        window: list[list[float]] = []
        for loss, norm in losses[:10_000]:
            window = remember(window, loss, norm)
            limits(window, 6.0)

    out = work / "page.html"
    costs = {
        "status": cost(lambda: quietly(status.main, "run")),
        "page": cost(lambda: quietly(page.main, "run", f"--out={out}")),
        "steps read": cost(lambda: RunReader(run).steps),
        "find": cost(lambda: quietly(inspect_data.main, "find", "run", "--document=0.parquet:7")),
        "10k spikes": cost(spikes),
        "resume": cost(lambda: train(8, *flags)),
    }
    costs["page size"] = Cost(0.0, out.stat().st_size / MB)
    return costs


def ranks(num: int, work: Path) -> Costs:
    """W: layouts of a step of 512 lanes on every rank, and messages of a model of 12 layers"""

    def layouts() -> None:
        for rank in range(num):
            layout = StepLayout(
                V=512,
                rows_per_step=512,
                device_batch_size=1,
                rank=rank,
                world_size=num,
                num_leaves=512,
            )
            for leaf in range(len(layout.leaves)):
                layout.rows_of(leaf, 0)

    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=12, n_embd=768, n_head=6, n_kv_head=6))
    optimizer = model.setup_optimizer()
    return {
        "layouts": cost(layouts),
        "messages": cost(lambda: lay_out(optimizer._params, num)),
    }


class Part(NamedTuple):
    """A quantity: how it is measured in a folder of its own, and its sizes."""

    measure: Callable[[int, Path], Costs]
    sizes: Sequence[int]


def powers(first: int, last: int) -> list[int]:
    """The powers of ten from 10 ** first to 10 ** last."""
    return [10**exponent for exponent in range(first, last + 1)]


PARTS = {
    "files": Part(files, powers(1, 4)),
    "documents": Part(documents, powers(4, 8)),
    "rows_in_group": Part(rows_in_group, powers(0, 6)),
    "lanes": Part(lanes, [1, 8, 64, 512]),
    "buckets": Part(buckets, [1, 4, 16, 64]),
    "pending": Part(pending, [16, 128, 1024, 8192]),
    "parameters": Part(parameters, powers(5, 8)),
    "prefixes": Part(prefixes, powers(0, 3)),
    "ranks": Part(ranks, [1, 8, 64, 512]),
    "steps": Part(steps, powers(3, 6)),
}


# ---- the table -----------------------------------------------------------------------------------


def in_child(part: Part, size: int) -> Costs:
    """Measure a size in a process and a folder of its own. ValueError if it fails."""
    results: Any = multiprocessing.get_context("fork").SimpleQueue()

    def measure(work: Path) -> None:
        os.environ["NANOCHAT_BASE_DIR"] = str(work)
        try:
            results.put(part.measure(size, work))
        except BaseException as e:
            results.put(f"{type(e).__name__}: {e}")
            raise

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        work = Path(folder)
        RustBPETokenizer.train_from_iterator(some_texts(200), 320).save(work / "tokenizer")
        child = multiprocessing.get_context("fork").Process(target=measure, args=(work,))
        child.start()
        child.join()
        if results.empty():
            raise ValueError(f"{part.measure.__name__} of {size:,}: exit code {child.exitcode}")
        found = results.get()
    if isinstance(found, str):
        raise ValueError(f"{part.measure.__name__} of {size:,}: {found}")
    return found


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """The exponent between the last two sizes; NaN with only one."""
    if len(sizes) < 2 or min(values[-2:]) <= 0:
        return math.nan
    return math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2])


def rows_of(name: str, sizes: Sequence[int], found: Mapping[int, Costs]) -> list[list[str]]:
    """The rows of the table of a part: one for each measurement."""
    rows = []
    for what in found[sizes[0]]:
        spent = [found[size][what].seconds for size in sizes]
        used = [found[size][what].megabytes for size in sizes]
        times = ", ".join(f"{value:.3g}" for value in spent)
        megabytes = ", ".join(f"{value:.0f}" for value in used)
        rows.append([name, what, times, f"{exponent(sizes, spent):.2f}", megabytes])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all parts, or the one that --part names, and print a table for each."""
    parser = Parser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, help="measure only this quantity")
    parser.add_argument("--most", type=whole(1), default=10**9, help="the largest size")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    importlib.import_module(
        "torch._dynamo"
    )  # a launch imports it, which takes longer than the rest
    result: dict[str, Any] = {"about": print_setup()}
    for name in [args.part] if args.part else PARTS:
        part = PARTS[name]
        sizes = [size for size in part.sizes if size <= args.most]
        print(f"{name}: {part.measure.__doc__}: {', '.join(f'{size:,}' for size in sizes)}")
        found = {}
        for size in sizes:
            found[size] = in_child(part, size)
        header = ["quantity", "measured", "seconds", "exponent", "MB"]
        print(*table(header, rows_of(name, sizes, found)), sep="\n", flush=True)
        result[name] = {size: found[size] for size in sizes}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    run_main(main)
