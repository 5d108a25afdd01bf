""" The table of kills: the tokens that data loaders skip or repeat after kills, or when the number
of processes changes.

    python -m dev.demo_kills --work=DIR --nanochat=CHECKOUT --gpt-simple=PYTHON --megatron=PYTHON --litdata=PYTHON \\
        --streaming=PYTHON

Each loader reads one epoch of the same documents on two processes, as a training job would: in
steps of 32 rows of 256 tokens, with a saved state every 20 steps. All tokens of these documents
differ, so the program sees which ones a loader skips or repeats. It compares three runs of each
loader at the end of the epoch:

    undisturbed   |----------------------------------------|
    ten kills     |----x--x-----x---x-x----x--x---x---x----|   SIGKILL to both processes at random steps
    2 -> 1        |----------------x-----------------------|   SIGKILL half-way; the rest on one process

After a kill, the job restarts and resumes from the newest state, in the way that the loader's own
project documents. Steps after that state are trained again and count once, because the weights of
the killed process are lost as well.

    skipped       tokens of the undisturbed run that this run never trained on
    repeated      tokens that this run trained on more times than the undisturbed run
    other steps   steps whose tokens differ from those of the same step in the undisturbed run

PYTHON is the interpreter of an environment with that package, and CHECKOUT is a clone of nanochat.
Loaders without a flag are skipped. Cost: no GPU, 500 MB below DIR. Duration: about three minutes
for each loader.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dev import peers

ROOT = Path(__file__).parents[1]
# tokens
DOCUMENTS = 131_072
SHORTEST = 16
LONGEST = 250
T = 256
ROWS = 32
SAVE_EVERY = 20
KILLS = 10
STEP_S = 0.005  # shortest time of a step
# (targets (rows, T) of this process, 0 or less where masked; its state)
Batches = Iterator[tuple[Any, Any]]


# ---- the documents -------------------------------------------------------------------------------


def documents() -> tuple[np.ndarray, np.ndarray]:
    """(lengths, first token of each): document i has tokens first[i], first[i] + 1, ... No token is
    0."""
    lengths = np.random.default_rng(0).integers(SHORTEST, LONGEST + 1, DOCUMENTS)
    return lengths, np.cumsum(lengths) - lengths + 1


def blocks() -> np.ndarray:
    """Concatenate the documents into (number, T) blocks, for loaders that read samples of one
    length."""
    num = int(documents()[0].sum()) // T
    return np.arange(1, num * T + 1, dtype=np.int32).reshape(num, T)


class Numbers:
    """A tokenizer that turns the text "FIRST LENGTH" into LENGTH consecutive ids, starting at
    FIRST."""

    fingerprint, token_dtype = "numbers", np.dtype(np.uint32)

    def get_bos_token_id(self) -> int:
        return 0

    def get_vocab_size(self) -> int:
        return 1 << 30

    def encode(
        self, texts: Sequence[str], prepend: Any = None, num_threads: int = 1
    ) -> list[list[int]]:
        pairs = (map(int, text.split()) for text in texts)
        return [[0, *range(first, first + length)] for first, length in pairs]

    def encode_flat(
        self, texts: Sequence[str], *, num_threads: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        ids = self.encode(texts)
        return np.concatenate(ids).astype(self.token_dtype), np.cumsum([0, *map(len, ids)])


def write_text(folder: Path) -> None:
    """Write four parquet files for training and one for validation, in row groups of 1,024
    documents."""
    from tests.toy import write_parquet

    texts = [f"{first} {length}" for length, first in zip(*documents())]
    for i in range(5):
        part = texts[i * DOCUMENTS // 4 : (i + 1) * DOCUMENTS // 4] or texts[:1]
        write_parquet(folder / f"shard_{i:05d}.parquet", part, group_size=1024)


# ---- the loaders ---------------------------------------------------------------------------------
# Each one takes the states that all processes saved at the same step (None at the start), and
# yields its batches.


def ours(work: Path, rank: int, W: int, states: list[Any] | None) -> Batches:
    """The cursors are the same for any number of processes: docs/resuming.md."""
    from nanochat.dataloader import DataLoader, Dry
    from nanochat.files import find_files
    from nanochat.order import StreamConfig
    from nanochat.sources import open_source, scan

    tokenizer: Any = Numbers()
    source = open_source(scan(work / "text", find_files(work / "text")[:-1]), tokenizer)
    cursors = None if states is None else [cursor for state in states for cursor in state]
    with DataLoader(
        StreamConfig(T=T, V=ROWS, max_epochs=1),
        {"data": source},
        tokenizer=tokenizer,
        rank=rank,
        world_size=W,
        rows_per_step=ROWS,
        device_batch_size=ROWS // W,
        cursors=cursors,
    ) as loader:
        with contextlib.suppress(Dry):
            for batch in loader:
                yield batch.targets, loader.cursors()


def nanochat(work: Path, rank: int, W: int, states: list[Any] | None) -> Batches:
    """As in its scripts/base_train.py: rank 0 saves the next batch's state, and all ranks resume
    from it."""
    import types

    for name in ("requests", "filelock"):  # only its downloads need them
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["filelock"].FileLock = None  # type: ignore[attr-defined]
    from nanochat.dataloader import (
        tokenizing_distributed_data_loader_with_state_bos_bestfit as loader,
    )

    batches: Any = loader(
        Numbers(),
        ROWS // W,
        T,
        "train",
        device="cpu",
        resume_state_dict=None if states is None else states[0],
    )
    _, y, state = next(batches)
    while state["epoch"] == 1:
        trained = y.clone()
        _, y, state = next(batches)
        yield trained, state


def gpt_simple(work: Path, rank: int, W: int, states: list[Any] | None) -> Batches:
    """As in its _train_loop.py: each rank saves the cursors of its workers, and every rank applies
    all states."""
    from types import SimpleNamespace

    from gpt_simple.config import DataConfig
    from gpt_simple.data import StreamingDataModule

    module = StreamingDataModule(
        DataConfig(path=str(work / "gpt-simple"), max_length=T, overlap_size=0),
        SimpleNamespace(pad_token_id=0, eod_token_id=0),
        W,
        per_device_batch_size=ROWS // W,
    )
    module.prepare_data()
    module.apply_dataloader_state(states)
    committed = {}
    for batch in module.train_dataloader():
        worker, state = batch["_cursor"]
        committed[worker] = state
        yield batch["labels"], module.make_dataloader_state(committed, rank)


def write_gpt_simple(folder: Path) -> None:
    """Write sixteen shards. Each process has four workers, the default."""
    from gpt_simple.pretokenize import write_idx

    lengths, firsts = documents()
    for split in ("train", "val"):
        (folder / split / "all").mkdir(parents=True)
        for i in range(16 if split == "train" else 1):
            part = range(i, DOCUMENTS, 16)
            ids = [
                np.append(np.arange(firsts[k], firsts[k] + lengths[k]), 0).astype(np.uint32)
                for k in part
            ]
            np.concatenate(ids).tofile(folder / split / "all" / f"{i:02d}.bin")
            write_idx(
                folder / split / "all" / f"{i:02d}.idx",
                np.cumsum([0, *map(len, ids)]),
                np.zeros(len(ids), np.int64),
                4,
            )


def megatron(work: Path, rank: int, W: int, states: list[Any] | None) -> Batches:
    """As its trainer does: save consumed_train_samples, resume there, and give each rank its slice
    of a batch."""
    data = megatron_dataset(work)
    consumed = 0 if states is None else states[0]
    while consumed + ROWS <= len(data):
        mine = range(consumed + rank * ROWS // W, consumed + (rank + 1) * ROWS // W)
        consumed += ROWS
        yield np.stack([data[i]["labels"] for i in mine]), consumed


def megatron_dataset(work: Path) -> Any:
    """Open one epoch of samples. The first process that opens it writes its tables."""
    from types import SimpleNamespace

    from megatron.core.datasets import gpt_dataset as g
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder as Builder,
    )

    config = g.GPTDatasetConfig(
        random_seed=1,
        sequence_length=T,
        blend=([str(work / "megatron" / "all")], None),
        split="1,0,0",
        path_to_cache=str(work / "megatron" / "cache"),
        tokenizer=SimpleNamespace(eod=0, vocab_size=1 << 30, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    return Builder(g.GPTDataset, [len(blocks()) - 1, 0, 0], lambda: True, config).build()[0]


def write_megatron(folder: Path) -> None:
    """Write a .bin and .idx pair with the same documents."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder.mkdir()
    builder = IndexedDatasetBuilder(str(folder / "all.bin"), dtype=np.int32)
    for length, first in zip(*documents()):
        builder.add_document(torch.arange(first, first + length), [int(length)])
    builder.finalize(str(folder / "all.idx"))
    megatron_dataset(folder.parent)


def litdata(work: Path, rank: int, W: int, states: list[Any] | None) -> Batches:
    """As in its README, "Pause, resume data streaming": the loader's state_dict and
    load_state_dict."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

    data = StreamingDataset(
        str(work / "litdata"), item_loader=TokensLoader(T), shuffle=True, drop_last=True
    )
    loader = StreamingDataLoader(data, batch_size=ROWS // W, num_workers=2)
    if states is not None:
        loader.load_state_dict(states[min(rank, len(states) - 1)])
    for batch in loader:
        yield batch, loader.state_dict()


def write_litdata(folder: Path) -> None:
    from litdata import TokensLoader, optimize

    optimize(
        torch_rows,
        np.array_split(np.arange(len(blocks())), 64),
        str(folder),
        chunk_bytes="1MB",
        num_workers=1,
        item_loader=TokensLoader(T),
    )


def torch_rows(numbers: np.ndarray) -> Iterator[Any]:
    import torch

    yield from torch.from_numpy(blocks()[numbers])


def streaming(work: Path, rank: int, W: int, states: list[Any] | None) -> Batches:
    """As in its README, "Instant mid-epoch resumption": the loader's state_dict (of rank 0) and
    load_state_dict."""
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()  # its documentation advises this after a kill
    data = StreamingDataset(local=str(work / "streaming"), shuffle=True, batch_size=ROWS // W)
    loader = StreamingDataLoader(data, batch_size=ROWS // W, num_workers=2, drop_last=True)
    if states is not None:
        loader.load_state_dict(states[0])
    for batch in loader:
        yield batch["ids"], loader.state_dict()


def write_streaming(folder: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(
        out=str(folder), columns={"ids": f"ndarray:int32:{T}"}, size_limit=1 << 20
    ) as writer:
        for block in blocks():
            writer.write({"ids": block})


LOADERS = {
    "ours": ours,
    "nanochat": nanochat,
    "gpt-simple": gpt_simple,
    "megatron": megatron,
    "litdata": litdata,
    "streaming": streaming,
}
WRITERS = {
    "gpt-simple": write_gpt_simple,
    "megatron": write_megatron,
    "litdata": write_litdata,
    "streaming": write_streaming,
}


# ---- a job: one process of a launch --------------------------------------------------------------


def job(name: str, work: Path) -> None:
    """Read until the epoch ends or a signal kills this process. Writes states (STEP-RANK-of-W.pt)
    and every batch to the current folder."""
    import torch
    from torch import distributed as dist

    run = Path.cwd()
    rank, W = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    start, saved = newest(run)
    states = None if start == 0 else [torch.load(path, weights_only=False) for path in saved]
    loader = LOADERS[name](work, rank, W, states)
    with open(run / f"{start}-{rank}-of-{W}.tokens", "wb") as tokens:
        for step in range(start, sys.maxsize):
            batch, state = next(loader, (None, None))
            ended = torch.tensor(int(batch is None))
            dist.all_reduce(ended)  # like gradients: ranks stay in step, and end together
            if ended:
                break
            time.sleep(STEP_S)
            tokens.write(np.asarray(batch).reshape(ROWS // W, T).astype(np.int32).tobytes())
            tokens.flush()
            if (step + 1) % SAVE_EVERY == 0:
                torch.save(state, run / f"{rank}.new")
                dist.barrier()
                os.rename(run / f"{rank}.new", run / f"{step + 1:06d}-{rank}-of-{W}.pt")
    (run / f"ended-{rank}").touch()
    os._exit(0)  # do not wait for the loader's threads and workers


def write(name: str, work: Path) -> None:
    WRITERS[name](work / name)


STEPS = {
    **{f"job-{name}": partial(job, name) for name in LOADERS},
    **{f"write-{name}": partial(write, name) for name in WRITERS},
}


def newest(run: Path) -> tuple[int, list[Path]]:
    """(step, state files in rank order) of the newest step that all processes saved; (0, []) at the
    start."""
    for last in sorted(run.glob("*.pt"), reverse=True):
        step, W = last.name.split("-")[0], int(last.stem.split("-")[-1])
        files = [run / f"{step}-{rank}-of-{W}.pt" for rank in range(W)]
        if all(file.exists() for file in files):
            return int(step), files
    return 0, []


# ---- kills ---------------------------------------------------------------------------------------


def launch(command: list[str], env: dict[str, str], run: Path, W: int, kill_at: int | None) -> int:
    """Start the processes of a job, and kill them at a step or wait until they end. Returns the
    first step. ValueError gives the last line of a process that failed."""
    start = newest(run)[0]
    port = str(random.SystemRandom().randrange(20_000, 60_000))
    common = {
        **os.environ,
        **env,
        "WORLD_SIZE": str(W),
        "LOCAL_WORLD_SIZE": str(W),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    children = []
    for rank in range(W):
        ranks = {name: str(rank) for name in ("RANK", "LOCAL_RANK", "GLOBAL_RANK")}
        with open(run / f"{rank}.log", "wb") as log:
            children.append(
                subprocess.Popen(
                    command,
                    env={**common, **ranks},
                    stdout=log,
                    stderr=log,
                    cwd=run,
                    start_new_session=True,
                )
            )
    written = run / f"{start}-0-of-{W}.tokens"
    failed: list[int] = []
    while not failed and any(child.poll() is None for child in children):
        time.sleep(0.002)
        failed = [rank for rank, child in enumerate(children) if child.poll() not in (None, 0)]
        steps = written.stat().st_size // (ROWS // W * T * 4) if written.exists() else 0
        if kill_at is not None and start + steps >= kill_at:
            break
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            # with its loader's workers, like a node that fails
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if failed:
        lines = (run / f"{failed[0]}.log").read_text().strip().splitlines() or ["no output"]
        raise ValueError(lines[-1])
    if kill_at is not None and (run / "ended-0").exists():
        raise ValueError(f"the epoch ended before the kill at step {kill_at}")
    return start


def play(
    command: list[str], env: dict[str, str], run: Path, plan: Sequence[tuple[int, int | None]]
) -> list[np.ndarray]:
    """Run the launches of a plan: (processes, step of the kill or None) for each. Returns the
    tokens of each step that the final weights contain."""
    run.mkdir(parents=True)
    steps: list[np.ndarray] = []
    for W, kill_at in plan:
        start = launch(command, env, run, W, kill_at)
        record = ROWS // W * T
        parts = [np.fromfile(run / f"{start}-{rank}-of-{W}.tokens", np.int32) for rank in range(W)]
        num = min(len(part) for part in parts) // record
        of_ranks = [part[: num * record].reshape(num, record) for part in parts]
        steps[start:] = [row[row > 0] for row in np.concatenate(of_ranks, axis=1)]
    return steps


def compare(steps: Sequence[np.ndarray], undisturbed: Sequence[np.ndarray]) -> list[str]:
    """The last three columns of the table: skipped, repeated, other steps."""
    size = int(documents()[0].sum()) + 1
    trained, expected = (
        np.bincount(np.concatenate(run), minlength=size) for run in (steps, undisturbed)
    )
    same = sum(np.array_equal(np.sort(a), np.sort(b)) for a, b in zip(steps, undisturbed))
    skipped = np.maximum(expected - trained, 0).sum()
    repeated = np.maximum(trained - np.maximum(expected, 1), 0).sum()
    return [
        f"{skipped:,}",
        f"{repeated:,}",
        f"{max(len(steps), len(undisturbed)) - same:,} of {len(undisturbed):,}",
    ]


def measure(name: str, python: str, path: Path, work: Path, rng: random.Random) -> list[list[str]]:
    """Measure one loader, whose package may be below `path`; returns its rows of the table."""
    env = {
        "PYTHONPATH": f"{path}{os.pathsep}{work / 'link'}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "NANOCHAT_BASE_DIR": str(work / "base"),
        "USE_TF": "0",
    }

    def command(step: str) -> list[str]:
        return [python, "-m", "dev.demo_kills", f"--step={step}-{name}", str(work)]

    if name in WRITERS and not (work / name).exists():
        peers.run(command("write"), work, **env)
    runs = work / "runs" / name
    undisturbed = play(command("job"), env, runs / "undisturbed", [(2, None)])
    last = int(0.7 * len(undisturbed))  # a loader that skips tokens ends early
    kills = sorted(rng.sample(range(SAVE_EVERY, last), KILLS))
    rows = []
    for title, plan in (
        (f"{KILLS} kills", [*((2, step) for step in kills), (2, None)]),
        ("2 -> 1", [(2, rng.randrange(last // 2, last)), (1, None)]),
    ):
        try:
            steps = play(command("job"), env, runs / title.replace(" ", ""), plan)
            rows.append([name, title, *compare(steps, undisturbed)])
        except ValueError as e:
            rows.append([name, title, f"refuses: {e}"[:90], "", ""])
        print(*rows[-1], sep=" | ", flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every loader that has a flag, and print the table."""
    from dev.measure import print_setup
    from nanochat.cli import Parser
    from nanochat.common import table

    parser = Parser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--nanochat", type=Path, help="a checkout of nanochat")
    for name in WRITERS:
        parser.add_argument(
            f"--{name}", metavar="PYTHON", help=f"interpreter of an environment with {name}"
        )
    parser.add_argument(
        "--only", nargs="+", choices=LOADERS, default=[*LOADERS], help="measure only these"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides when the kills happen")
    args = parser.parse_args(argv)
    print_setup()
    work = args.work.resolve()
    write_text(work / "text")
    for link, target in (("base/base_data_climbmix", work / "text"), ("link/dev", ROOT / "dev")):
        (work / link).parent.mkdir()
        (work / link).symlink_to(target)  # other projects import only `dev` of ours
    rows = []
    for name in args.only:
        given = ROOT if name == "ours" else getattr(args, name.replace("-", "_"))
        if given is None:
            print(f"{name}: skipped, because --{name} is missing", flush=True)
            continue
        try:
            if name in WRITERS:
                python, path = peers.find_program(given), work / "link"
            else:
                python, path = sys.executable, Path(given).resolve()
            rows += measure(name, python, path, work, random.Random(args.seed))
        except ValueError as e:
            rows.append([name, "", f"failed: {e}", "", ""])
    print(
        "", *table(["loader", "what happens", "skipped", "repeated", "other steps"], rows), sep="\n"
    )
    return 0


if __name__ == "__main__":
    peers.start(main, STEPS)
