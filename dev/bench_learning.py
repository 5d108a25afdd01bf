"""Compare what models learn from the rows of several packers, with the same model, tokenizer,
tokens and seeds.

    python -m dev.bench_learning --work DIR --data-path DATA --nanochat CHECKOUT     train missing runs, print the table
    python -m dev.bench_learning --work DIR --table                                  print the table only

    nanochat   its loader, from a checkout, in its own process
    crop       bestfit; the rest of a document that does not fit a row is dropped
    split      bestfit; the rest of a document that does not fit a row comes back later
    concat     one token stream per lane, cut at the end of every row

With --arms, several passes over few documents are compared, too (they are not in the default table):

    crop-same        crop; every pass has the rows of the first one, in its order
    crop-rows        the same rows, shuffled before each pass
    crop-documents   what a run does: documents are shuffled, and packed into new rows, in each pass
    split-...        the same three for split

All documents below `--data-path` are shuffled once, into shards; the last shard is held out. A seed
determines the initial weights and the order of the rows. nanochat's loader has no seed and no
shuffle, so there it determines the weights and the first shard. Its rows are recorded in a file
once; with that file, the checkout is not needed.

Models are measured in bits per byte on held-out documents:

    whole       every token once, in windows that move by T/2, so each token sees all or at least T/2 tokens before it
    beginning   the first T tokens of each document
    late        the tokens of `whole` that are not in `beginning`
    rows        rows of nanochat's loader

All four are also reported by document length: short (below T/2 tokens), middle, long (2T or more).
"Used" is the number of tokens that were trained on or dropped, per token that was trained on (1
means no waste); "read" adds pending tokens.

Finished runs are not repeated, so a kill loses at most one run.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from dev.compare_packing import run_nanochat
from dev.measure import SHARED, print_setup
from nanochat.cli import Parser, run_main
from nanochat.common import write_json
from nanochat.files import find_files
from nanochat.gpt import GPT, GPTConfig
from nanochat.order import StreamConfig, default_lanes
from nanochat.rows import Row
from nanochat.run_facts import markdown
from nanochat.schedule import REFERENCE_BATCH_TOKENS, Schedule
from nanochat.sources import open_source, scan
from nanochat.stream import Stream, ledger
from nanochat.text_kinds import read_texts
from nanochat.tokenizer import RustBPETokenizer

ARMS: dict[str, dict[str, Any]] = {
    "nanochat": {},
    "crop": {"long_docs": "crop"},
    "split": {"long_docs": "split"},
    "concat": {"layout": "concat"},
}
# several passes over few documents: in one order, with reshuffled rows, or reshuffled and packed anew
OF_PASSES = [f"{p}-{order}" for p in ("crop", "split") for order in ("same", "rows", "documents")]
LENGTHS = ("short", "middle", "long")
SHARDS = 13  # the last one is held out

# For nanochat's loader. Its "tokens" are places in `Corpus.ids`, so the rows show which token of
# which document they contain.
RECORD_ROWS = """
split, T, num_rows, shard, offsets, output = sys.argv[1:]
T, num_rows, offsets = int(T), int(num_rows), np.load(offsets).tolist()
class Tokenizer:
    def get_bos_token_id(self):
        return None
    def encode(self, texts, prepend=None, num_threads=1):
        return [list(range(offsets[d], offsets[d + 1])) for d in map(int, texts)]
start = {"pq_idx": int(shard), "rg_idx": None, "epoch": 1}
rows = np.empty((num_rows, T + 1), np.int64)
batches = loader(Tokenizer(), 1, T, split, device="cpu", resume_state_dict=start)
for row in rows:
    inputs, targets, _ = next(batches)
    row[:-1], row[-1] = inputs[0].numpy(), targets[0, -1].item()
np.save(output, rows)
"""


# ---- the corpus ----------------------------------------------------------------------------------


def shards(num: int) -> list[range]:
    """The documents of each shard."""
    return [range(part[0], part[-1] + 1) for part in np.array_split(np.arange(num), SHARDS)]


class Corpus:
    """All documents, shuffled: text in shards, the tokenizer, and the ids of every document after
    BOS."""

    def __init__(self, work: Path, data_path: Path, vocab_size: int):
        self.work = work
        self.text = work / "text"
        self.there = work / "there"
        if not (work / "offsets.npy").exists():
            self._write(data_path, vocab_size)
        self.tokenizer = RustBPETokenizer.from_directory(work / "tokenizer")
        self.ids = np.load(work / "ids.npy", mmap_mode="r")
        self.offsets = np.load(work / "offsets.npy")
        self.lengths = np.diff(self.offsets)

    def _write(self, data_path: Path, vocab_size: int) -> None:
        texts = [text for file in find_files(data_path) for text in read_texts(file)]
        texts = [texts[i] for i in np.random.default_rng(0).permutation(len(texts))]
        numbers = [str(d) for d in range(len(texts))]  # what nanochat's loader reads
        for folder, documents in ((self.text, texts), (self.there / "base_data_climbmix", numbers)):
            folder.mkdir(parents=True, exist_ok=True)
            for i, shard in enumerate(shards(len(texts))):
                table = pa.table({"text": documents[shard.start : shard.stop]})
                pq.write_table(table, folder / f"shard_{i:05d}.parquet", row_group_size=512)
        tokenizer = RustBPETokenizer.train_from_iterator(iter(texts[: len(texts) // 4]), vocab_size)
        tokenizer.save(self.work / "tokenizer", force=True)
        ids, offsets = tokenizer.encode_flat(texts, num_threads=1)
        np.save(self.work / "ids.npy", ids)
        np.save(self.work / "offsets.npy", offsets)

    def kind(self, lengths: Any, T: int) -> np.ndarray:
        """0, 1, 2 for short, middle and long documents, by their lengths in tokens."""
        return np.searchsorted([T // 2, 2 * T], lengths, side="right")


# ---- rows ----------------------------------------------------------------------------------------

# tokens (N, T + 1); which are targets, (N, T + 1) bool; tokens of documents (read from disk, used
# up)
Rows = tuple[np.ndarray, np.ndarray, tuple[int, ...]]


def record_nanochat(
    corpus: Corpus, checkout: Path, split: str, T: int, num_rows: int, shard: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of nanochat's loader, recorded once: (number of each token's document, tokens), both
    (num_rows, T + 1)."""
    path = corpus.work / "rows" / f"nanochat-{split}-T{T}-{num_rows}-{shard}.npy"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.npy")
        run_nanochat(
            RECORD_ROWS,
            checkout,
            corpus.there,
            split,
            T,
            num_rows,
            shard,
            *(file.resolve() for file in (corpus.work / "offsets.npy", unfinished)),
        )
        unfinished.rename(path)
    places = np.load(path)
    return np.searchsorted(corpus.offsets, places, side="right") - 1, corpus.ids[places]


def nanochat_rows(corpus: Corpus, args: argparse.Namespace, T: int, seed: int) -> Rows:
    """Rows of nanochat's loader."""
    shard = seed * 4 % (SHARDS - 1)
    documents, rows = record_nanochat(corpus, args.nanochat, "train", T, args.tokens // T, shard)
    used, read = np.unique(documents), np.arange(documents.min(), documents.max() + 1)
    return (
        rows,
        np.ones_like(rows, dtype=bool),
        tuple(int(corpus.lengths[which].sum()) for which in (read, used)),
    )


def pack(
    corpus: Corpus, text: Path, args: argparse.Namespace, config: StreamConfig, num_steps: int
) -> Rows:
    """Rows of one of our packers from all files of a folder but the last, in the order of the
    steps; fewer steps if the data ends."""
    source = open_source(scan(text, find_files(text)[:-1]), corpus.tokenizer)
    per_step = args.total_batch_size // config.T
    stream = Stream(
        config,
        {"all": source},
        range(config.V),
        tokenizer=corpus.tokenizer.fingerprint,
        num_threads=0,
    )
    rows: list[Row] = []
    for _ in range(num_steps):
        of_step = stream.next_rows(per_step // config.V)
        if len(of_step) < per_step:
            break
        rows += of_step
    account = ledger(stream.cursors(), config.T)["all"]
    live = [np.ones(config.T + 1, bool) if r.live is None else r.live.astype(bool) for r in rows]
    read = account["read"] + account["bos"]
    return np.stack([row.tokens for row in rows]), np.stack(live), (read, read - account["pending"])


def our_rows(corpus: Corpus, args: argparse.Namespace, arm: str, T: int, seed: int) -> Rows:
    """Rows of one of our packers, which does not see a document twice."""
    V = default_lanes(args.total_batch_size // T)
    config = StreamConfig(T=T, V=V, seed=seed, **ARMS[arm])
    return pack(corpus, corpus.text, args, config, args.tokens // args.total_batch_size)


def rows_of_passes(corpus: Corpus, args: argparse.Namespace, arm: str, T: int, seed: int) -> Rows:
    """Rows of `--passes` passes over the same documents. `arm`: a packer and an order of passes."""
    packer, order = arm.split("-")
    num_steps = args.tokens // args.total_batch_size
    # one lane: with several, a pass would end where the first one runs dry
    config = StreamConfig(T=T, V=1, seed=seed, **ARMS[packer])
    text = few_documents(corpus, args, packer, T)
    once = replace(config, max_epochs=1)
    rows, live, taken = pack(corpus, text, args, once, num_steps)
    if order == "documents":
        steps_of_pass = len(rows) * T // args.total_batch_size
        return pack(corpus, text, args, config, args.passes * steps_of_pass)
    rng = np.random.default_rng(seed)
    passes = [np.arange(len(rows))] * args.passes
    if order == "rows":
        passes[1:] = [rng.permutation(len(rows)) for _ in passes[1:]]
    numbers = np.concatenate(passes)
    return rows[numbers], live[numbers], (args.passes * taken[0], args.passes * taken[1])


def few_documents(corpus: Corpus, args: argparse.Namespace, packer: str, T: int) -> Path:
    """A folder with as many documents as one of `--passes` passes trains on: the same for every
    seed and order."""
    folder = corpus.work / f"text-{packer}-T{T}-{args.passes}"
    if not folder.exists():
        num_tokens = args.tokens // args.passes
        part = argparse.Namespace(**{**vars(args), "tokens": num_tokens})
        _, live, taken = our_rows(corpus, part, packer, T, seed=0)
        used_per_token = taken[1] / live[:, 1:].sum()
        num = np.searchsorted(corpus.lengths.cumsum(), num_tokens * used_per_token)
        texts = [text for file in find_files(corpus.text) for text in read_texts(file)][:num]
        unfinished = folder.with_suffix(f".{os.getpid()}")
        unfinished.mkdir()
        for name in ("0", "held_out"):  # `pack` leaves the last file out
            table = pa.table({"text": texts})
            pq.write_table(table, unfinished / f"{name}.parquet", row_group_size=512)
        unfinished.rename(folder)
    return folder


# ---- training and measuring ----------------------------------------------------------------------


def train(
    corpus: Corpus, args: argparse.Namespace, rows: np.ndarray, live: np.ndarray, seed: int
) -> GPT:
    """Train a model on the rows, step by step, without weight decay."""
    T = rows.shape[1] - 1
    config = GPTConfig.from_depth(
        args.depth,
        vocab_size=corpus.tokenizer.get_vocab_size(),
        sequence_len=T,
        aspect_ratio=args.aspect_ratio,
        head_dim=args.head_dim,
    )
    per_step = args.total_batch_size // T
    num_steps = len(rows) // per_step
    scale = math.sqrt(args.total_batch_size / REFERENCE_BATCH_TOKENS)
    model = GPT(config)
    model.init_weights(seed=seed, compute_dtype=getattr(torch, args.dtype))
    optimizer = model.setup_optimizer(
        matrix_lr=args.matrix_lr * scale,
        embedding_lr=args.embedding_lr * scale,
        unembedding_lr=args.unembedding_lr * scale,
        scalar_lr=0.5 * scale,
    )
    schedule = Schedule(num_steps, warmup_steps=10)
    for step in tqdm(range(num_steps), desc="steps", disable=None):
        of_step = slice(step * per_step, (step + 1) * per_step)
        tokens = torch.from_numpy(rows[of_step].astype(np.int64))
        targets = tokens.masked_fill(~torch.from_numpy(live[of_step]), -100)[:, 1:]
        for x, y in zip(
            tokens[:, :-1].split(args.device_batch_size), targets.split(args.device_batch_size)
        ):
            model(x, y, loss_reduction="sum").div(args.total_batch_size).backward()
        schedule.apply(optimizer, step)
        optimizer.step(args.total_batch_size / int((targets >= 0).sum()))
        model.zero_grad(set_to_none=True)
    return model


Sums = np.ndarray  # (kinds, 2) float64: nats and bytes of each kind of target


@torch.no_grad()
def measure(model: GPT, corpus: Corpus, rows: np.ndarray, kinds: np.ndarray) -> Sums:
    """Nats and bytes of each kind of target. rows: (N, T + 1); kinds: (N, T), the kind of each
    target, -1 if it is off."""
    sums, token_bytes = np.zeros((2 * len(LENGTHS), 2)), corpus.tokenizer.token_bytes().numpy()
    for i in range(0, len(rows), 8):
        tokens, kind = torch.from_numpy(rows[i : i + 8].astype(np.int64)), kinds[i : i + 8]
        nats = model(tokens[:, :-1], tokens[:, 1:], loss_reduction="none").double().numpy()
        size = token_bytes[tokens[:, 1:].numpy()]
        counted = (kind >= 0) & (size > 0)
        for column, values in enumerate((nats, size)):
            sums[:, column] += np.bincount(kind[counted], values[counted], minlength=len(sums))
    return sums


def windows(corpus: Corpus, T: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """About `num_tokens` tokens of held-out documents, for `measure`, in windows that move by T/2.
    A token is a target in the first window that contains it. Kinds: 0, 1, 2 by length in a
    document's first window, 3, 4, 5 in later ones."""
    rows, kinds = [], []
    for number in shards(len(corpus.lengths))[-1]:
        document = corpus.ids[corpus.offsets[number] : corpus.offsets[number + 1]].astype(np.int64)
        kind, done = int(corpus.kind(len(document), T)), 1  # BOS is not a target
        for start in range(0, len(document), T // 2):
            if done >= len(document):
                break
            row, of_row = np.zeros(T + 1, np.int64), np.full(T, -1)
            part = document[start : start + T + 1]
            row[: len(part)] = part
            of_row[done - start - 1 : len(part) - 1] = kind + (0 if start == 0 else len(LENGTHS))
            done = start + len(part)
            rows.append(row)
            kinds.append(of_row)
        num_tokens -= len(document)
        if num_tokens <= 0:
            break
    return np.stack(rows), np.stack(kinds)


def bits(sums: Sums) -> dict[str, float]:
    """Bits per byte over all kinds, and for each length."""
    of_length = sums.reshape(-1, len(LENGTHS), 2).sum(axis=0)
    parts = {"all": of_length.sum(axis=0), **dict(zip(LENGTHS, of_length))}
    return {name: nats / (math.log(2) * size) for name, (nats, size) in parts.items() if size}


def evaluate(
    model: GPT, corpus: Corpus, args: argparse.Namespace, T: int
) -> dict[str, dict[str, float]]:
    """{measure: {length: bits per byte}}, with the measures in the head of this file."""
    sums = measure(model, corpus, *windows(corpus, T, args.eval_tokens))
    result = {"whole": bits(sums), "beginning": bits(sums[:3]), "late": bits(sums[3:])}
    if args.nanochat:
        documents, rows = record_nanochat(corpus, args.nanochat, "val", T, args.eval_tokens // T, 0)
        result["rows"] = bits(
            measure(model, corpus, rows, corpus.kind(corpus.lengths[documents[:, 1:]], T))
        )
    return result


def run(corpus: Corpus, args: argparse.Namespace, arm: str, T: int, seed: int, path: Path) -> None:
    """Train and measure, and write the results to a file."""
    began, cpu = time.perf_counter(), time.process_time()
    if arm == "nanochat":
        rows, live, taken = nanochat_rows(corpus, args, T, seed)
    elif arm in OF_PASSES:
        rows, live, taken = rows_of_passes(corpus, args, arm, T, seed)
    else:
        rows, live, taken = our_rows(corpus, args, arm, T, seed)
    model = train(corpus, args, rows, live, seed)
    trained = int(live[:, 1:].sum())
    write_json(
        path,
        {
            "arm": arm,
            "T": T,
            "seed": seed,
            "trained_tokens": trained,
            "read": taken[0] / trained,
            "used": taken[1] / trained,
            "bpb": evaluate(model, corpus, args, T),
            "seconds": time.perf_counter() - began,
            "cpu_seconds": time.process_time() - cpu,
            "parameters": model.num_scaling_params()["total"],
            "settings": {
                name: value
                for name, value in vars(args).items()
                if isinstance(value, (int, float, str))
            },
        },
    )


# ---- the table -----------------------------------------------------------------------------------


def print_tables(work: Path) -> list[dict[str, Any]]:
    """Print a table of the finished runs for each T: mean and standard deviation over seeds.
    Returns the records."""
    records = [json.loads(path.read_text()) for path in sorted(work.glob("runs/*.json"))]
    for T in sorted({record["T"] for record in records}):
        of_arm = {
            arm: [r for r in records if r["T"] == T and r["arm"] == arm]
            for arm in (*ARMS, *OF_PASSES)
        }
        of_arm = {arm: runs for arm, runs in of_arm.items() if runs}
        rows = [
            (
                f"{name} tokens per trained token",
                *(spread([r[name] for r in runs]) for runs in of_arm.values()),
            )
            for name in ("read", "used")
        ]
        for name, by_length in next(iter(of_arm.values()))[0]["bpb"].items():
            rows += [
                (
                    f"{name}, {length}",
                    *(spread([r["bpb"][name][length] for r in runs]) for runs in of_arm.values()),
                )
                for length in by_length
            ]
        heads = [f"{arm} ({len(runs)} seeds)" for arm, runs in of_arm.items()]
        print(*markdown((f"T = {T}, bits per byte", *heads), rows), sep="\n", flush=True)
    return records


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation in words."""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{deviation}"


def new_arguments() -> Parser:
    p = Parser(description=__doc__)
    p.add_argument("--work", type=Path, required=True, help="folder for corpus, rows and results")
    p.add_argument("--data-path", type=Path, default=SHARED, help="folder of text")
    p.add_argument(
        "--nanochat",
        type=Path,
        help="a checkout of nanochat (any path if its rows are already "
        "recorded); without it, its arm and its rows are skipped",
    )
    p.add_argument("--table", action="store_true", help="only print the table")
    p.add_argument("--arms", nargs="+", choices=[*ARMS, *OF_PASSES], default=list(ARMS))
    p.add_argument("--passes", type=int, default=4, help="of the arms that read documents again")
    p.add_argument("--lengths", nargs="+", type=int, default=[512, 1024], help="T")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--tokens", type=int, default=305 * 8192, help="tokens per run")
    p.add_argument("--eval-tokens", type=int, default=150_000, help="held-out tokens to measure on")
    p.add_argument("--vocab-size", type=int, default=2048)
    p.add_argument("--depth", type=int, default=4)
    p.add_argument("--aspect-ratio", type=int, default=16)
    p.add_argument("--head-dim", type=int, default=32)
    p.add_argument("--total-batch-size", type=int, default=8192)
    p.add_argument("--device-batch-size", type=int, default=4)
    p.add_argument("--dtype", default="bfloat16")
    # four times the default rates, which are for long runs, as in speedrun.sh
    p.add_argument("--matrix-lr", type=float, default=0.08)
    p.add_argument("--embedding-lr", type=float, default=1.2)
    p.add_argument("--unembedding-lr", type=float, default=0.03)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Train the missing runs and print the table."""
    args = new_arguments().parse_args(argv)
    if not args.table:
        print_setup()
        (args.work / "runs").mkdir(parents=True, exist_ok=True)
        corpus = Corpus(args.work, args.data_path, args.vocab_size)
        arms = [arm for arm in args.arms if arm != "nanochat" or args.nanochat]
        for T, seed, arm in itertools.product(args.lengths, range(args.seeds), arms):
            path = args.work / "runs" / f"T{T}-{arm}-{seed}.json"
            if not path.exists():
                print(time.strftime("%H:%M:%S"), path.stem, flush=True)
                run(corpus, args, arm, T, seed, path)
    print(json.dumps(print_tables(args.work)))
    return 0


if __name__ == "__main__":
    run_main(main)
