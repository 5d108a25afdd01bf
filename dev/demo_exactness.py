"""
Small runs on a CPU that show what exactness is good for. docs/exactness.md shows their output.

    python -m dev.demo_exactness hash                          # every run ends with the same hash of its weights
    python -m dev.demo_exactness dry --data-path=DIR           # predicted and actual step at which buckets run dry
    python -m dev.demo_exactness left-out --data-path=DIR      # what one document changes, and from which step on
    python -m dev.demo_exactness noise --picture=noise.png     # how much the seed of weights or data changes the result

DIR contains one folder of text files for each bucket: `python -m dev.make_sample_corpus --buckets
--output-dir=DIR` writes two. Everything else goes to a temporary folder, which is deleted at the
end. Duration: one to five minutes each; `noise` trains 21 models in half an hour.
"""

import contextlib
import hashlib
import itertools
import math
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from matplotlib.figure import Figure

from dev import make_sample_corpus
from dev.measure import print_setup
from nanochat.cli import EXIT_HALTED, Parser, run_main
from nanochat.common import atomic_open, read_json, table
from nanochat.engine import load_model
from nanochat.files import find_files
from nanochat.run_dir import PLAN_NAME
from nanochat.splits import group_by_bucket
from nanochat.text_kinds import read_texts
from nanochat.tokenizer import RustBPETokenizer
from scripts import compare_runs, repeat, tok_shards, tok_train
from tests import training

WORLD_SIZES = (4, 4, 4, 4, 1, 1, 1, 2, 2, 2)  # processes of each launch that is killed
STEPS_PER_KILL = 12  # a launch is killed after at most this many steps
CHARS = {"dry": 1_000_000, "left-out": 6_000_000}  # characters that are used from each bucket
STEPS = 120  # length of the two runs that differ in one document
NOISE_CHARS = 8_000_000
NOISE_FLAGS = (
    "--config=runs/laptop.yaml",
    "--max-seq-len=128",
    "--total-batch-size=2048",
    "--num-iterations=100",
    "--eval-every=100",
    "--sample-every=-1",
)
# the columns of the picture: flags of scripts.repeat, and flags that are added to the training's
NOISE = (
    (("--name=weights", "--vary=weights", "--rerun"), ()),
    (("--name=data", "--vary=data"), ()),
    (("--name=both", "--vary=both"), ()),
    (("--name=batch", "--against=weights"), ("--device-batch-size=4",)),
)
MODEL: dict[str, Any] = {
    "depth": 2,
    "aspect_ratio": 32,
    "head_dim": 32,
    "max_seq_len": 128,
    "total_batch_size": 2048,
    "lanes": 16,
    "device_batch_size": 16,
    "overlap": 32,
    "buffer_size": 64,
    "matrix_lr": 0.16,
    "embedding_lr": 2.4,
    "unembedding_lr": 0.064,
}


def weights(tag: str, checkpoint: str = "final") -> str:
    """Hash the weights of a checkpoint."""
    path = training.run_dir(tag) / "checkpoints" / checkpoint / "model" / "pytorch_model.bin"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


# ---- one hash ------------------------------------------------------------------------------------


def num_logged(tag: str) -> int:
    """Count the lines of steps in the log, including repeated ones."""
    return len(training.all_steps(tag)) if training.log_file(tag).exists() else 0


def one_hash(seed: int) -> bool:
    """Train on 1, 2 and 4 processes, then move one run between them with ten kills: all end with
    the same weights."""
    settings: dict[str, Any] = {
        "leaves": 4,
        "device_batch_size": 2,
        "save_every": 5,
        "num_iterations": (STEPS_PER_KILL + 2) * len(WORLD_SIZES),
    }
    rows: list[tuple[str, int, str, str]] = []
    step_s = {}
    for W in (1, 2, 4):
        training.finish(W, model_tag=f"w{W}", **settings)
        step_s[W] = statistics.median(
            record["step_s"] for record in training.steps(f"w{W}").values()
        )
    rng, moments = random.Random(seed), []
    for W in WORLD_SIZES:
        last = num_logged("killed") + rng.randint(1, STEPS_PER_KILL)
        group = training.start(W, model_tag="killed", **settings)
        while group.processes[0].exitcode is None and num_logged("killed") < last:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, step_s[W]))
        if group.processes[0].exitcode is not None:
            raise ValueError(f"the run ended before a kill:\n{group.text()[-2000:]}")
        group.kill()
        moments.append(training.all_steps("killed")[-1]["step"])
    training.finish(WORLD_SIZES[-1], model_tag="killed", **settings)
    for name, tag in (("1", "w1"), ("2", "w2"), ("4", "w4"), ("4 -> 1 -> 2", "killed")):
        digests = hashlib.sha256("".join(training.digests(tag)).encode()).hexdigest()[:16]
        rows.append((name, len(WORLD_SIZES) * (tag == "killed"), digests, weights(tag)))
    repeated = len(training.all_steps("killed")) - settings["num_iterations"]
    print(*table(("processes", "kills", "all batches", "weights"), rows), sep="\n")
    print(
        f"killed after steps {', '.join(map(str, moments))}; the run of {settings['num_iterations']} steps repeated "
        f"{repeated} of them"
    )
    return len({row[2:] for row in rows}) == 1


# ---- dry as predicted ----------------------------------------------------------------------------


def make_data(data_path: Path, base: Path, max_chars: int) -> list[str]:
    """Write to the base directory text/BUCKET, the first documents of each bucket and a few of them
    for validation, and a tokenizer trained on them. Returns the buckets."""
    buckets = group_by_bucket(find_files(data_path), data_path)
    for bucket, files in buckets.items():
        documents, chars = [], 0
        for document in itertools.chain.from_iterable(map(read_texts, files)):
            documents.append(document)
            chars += len(document)
            if chars > max_chars:
                break
        (base / "text" / bucket).mkdir(parents=True)
        for name, part in (("a", documents[:-8]), ("b", documents[-8:])):
            pq.write_table(
                pa.table({"text": part}),
                base / "text" / bucket / f"{name}.parquet",
                row_group_size=256,
            )
    texts = (
        text for path in sorted((base / "text").rglob("a.parquet")) for text in read_texts(path)
    )
    RustBPETokenizer.train_from_iterator(texts, 2048).save(base / "tokenizer", force=True)
    return sorted(buckets)


def make_shards(base: Path, buckets: Sequence[str]) -> dict[str, int]:
    """Write the text in the base directory as token files, too. Returns how many tokens each bucket
    has for training."""
    with contextlib.redirect_stdout(None):
        code = tok_shards.main(
            [
                f"--input-dir={base / 'text'}",
                f"--output-dir={base / 'shards'}",
                "--max-length=0",
                f"--tokenizer={base / 'tokenizer'}",
                "--num-workers=1",
            ]
        )
    assert code == 0
    tokens = {}
    for bucket in buckets:
        files = (base / "shards").rglob(f"{bucket}/**/a*.bin")
        tokens[bucket] = sum(path.stat().st_size // 2 for path in files)
    return tokens


def dry(data_path: Path, base: Path) -> bool:
    """Train on a curriculum that needs more than its buckets hold: each runs dry at the step that
    the plan predicts."""
    buckets = make_data(data_path, base, CHARS["dry"])
    tokens = make_shards(base, buckets)
    step = MODEL["total_batch_size"] * 4
    steps = math.ceil(1.2 * sum(tokens.values()) / step)
    mix = ", ".join(f"{bucket}: {1 / len(buckets)}" for bucket in buckets)
    (base / "mix.yaml").write_text(
        f"curriculum:\n- duration_tokens: {steps * step}\n  mix: {{{mix}}}\n"
    )
    settings = {
        **MODEL,
        "depth": 1,
        "aspect_ratio": 24,
        "head_dim": 12,
        "total_batch_size": step,
        "plan": "warn",
        "data_path": base / "shards",
        "data_format": "shards",
        "curriculum": base / "mix.yaml",
        "allow_bucket_exhaustion": True,
        "num_iterations": steps,
        "long_docs": "split",
        "save_every": -1,
    }
    group = training.start(1, model_tag="dry", **settings)
    [code] = group.wait()
    if code not in (0, EXIT_HALTED):
        raise ValueError(f"the run failed:\n{group.text()[-2000:]}")
    plan = read_json(training.run_dir("dry") / PLAN_NAME)
    actual: dict[str, int] = {}
    for event in training.events("dropped", "dry"):
        actual.setdefault(event["bucket"], event["step"])
    rows = [
        (bucket, f"{tokens[bucket]:,}", plan["buckets"][bucket]["dry_step"], actual.get(bucket))
        for bucket in buckets
    ]
    print(*table(("bucket", "tokens", "predicted: dry at step", "actual"), rows), sep="\n")
    ended = [event["step"] for event in training.events("halted", "dry")]
    print(f"all buckets dry: predicted at step {plan['steps']}, actual {ended} (exit code {code})")
    return all(predicted == happened for *_, predicted, happened in rows) and ended == [
        plan["steps"]
    ]


# ---- one document left out -----------------------------------------------------------------------


def bits_per_byte(tag: str, text: str) -> float:
    """Bits per byte of a text, with the final weights of a run."""
    model, tokenizer, _ = load_model(tag, "cpu", compute_dtype=torch.float32)
    T = model.config.sequence_len
    ids = torch.tensor([tokenizer.get_bos_token_id(), *tokenizer.encode(text)])
    with torch.no_grad():
        nats = sum(
            float(
                model(ids[None, at : at + T], ids[None, at + 1 : at + T + 1], loss_reduction="sum")
            )
            for at in range(0, len(ids) - 1, T)
            if len(ids[at + 1 : at + T + 1]) == len(ids[at : at + T])
        )
        counted = (len(ids) - 1) // T * T
    return nats / math.log(2) / len(tokenizer.decode(ids[1 : counted + 1].tolist()).encode())


def left_out(data_path: Path, base: Path) -> bool:
    """Train twice, the second time without one document that the first run reads half-way."""
    bucket = make_data(
        data_path / max(group_by_bucket(find_files(data_path), data_path)), base, CHARS["left-out"]
    )[-1]
    settings = {
        **MODEL,
        "data_path": base / "text" / bucket,
        "num_iterations": STEPS,
        "save_every": STEPS // 2,
        "keep_last_k": 9,
        "eval_every": STEPS,
        "eval_tokens": 16_384,
    }
    training.finish(1, model_tag="plain", **settings)
    before = {
        (place["file"], place["document"])
        for step in range(STEPS // 2)
        for row in training.read_rows("plain", step)
        for place in row["documents"]
    }
    step, (file, row) = next(
        (step, (place["file"], place["document"]))
        for step in range(STEPS // 2, STEPS)
        for line in training.read_rows("plain", step)
        for place in line["documents"]
        if (place["file"], place["document"]) not in before and place["tokens"] >= 100
    )
    (base / "list.txt").write_text(f"{file}:{row}\n")
    training.finish(1, model_tag="without", without_documents=base / "list.txt", **settings)
    compare_runs.main(["plain", "without"])
    text = list(read_texts(base / "text" / bucket / file))[row]
    rows = []
    for tag in ("plain", "without"):
        [*_, val] = [event["bpb"] for event in training.events("val", tag)]
        rows.append(
            (
                tag,
                weights(tag, f"checkpoint-{STEPS // 2}"),
                weights(tag),
                f"{val:.6f}",
                f"{bits_per_byte(tag, text):.6f}",
            )
        )
    head = (
        "run",
        f"weights at step {STEPS // 2}",
        "at the end",
        "validation bits per byte",
        "of the document",
    )
    print(*table(head, rows), sep="\n")
    print(f"left out: {file}:{row}, {len(text):,} characters, first read at step {step}")
    return rows[0][1] == rows[1][1] and rows[0][2] != rows[1][2]


# ---- where noise comes from ----------------------------------------------------------------------


def draw(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a column of dots for each configuration, with the mean and its 95 % interval."""
    figure = Figure(figsize=(1.5 + 1.5 * len(records), 4), layout="constrained")
    axes = figure.subplots()
    for i, record in enumerate(records):
        values = record["bits_per_byte"]
        half = repeat.student_t(0.975, len(values) - 1) * record["stdev"] / math.sqrt(len(values))
        axes.plot([i] * len(values), values, "o", alpha=0.5)
        axes.errorbar([i + 0.15], [record["mean"]], yerr=[half], fmt="k_", capsize=4)
    axes.set(ylabel="validation bits per byte", xlim=(-0.5, len(records) - 0.4))
    axes.set_xticks(range(len(records)), [record["name"] for record in records])
    with atomic_open(path) as f:
        figure.savefig(f, format="png", dpi=120)
    print(f"written: {path}")


def noise(base: Path, picture: Path) -> bool:
    """Train five seeds of the weights, of the data and of both, then with another device batch
    size; draw all runs. A rerun with the same seeds must end with the same loss."""
    make_sample_corpus.main(
        [f"--output-dir={base / 'text'}", f"--max-chars={NOISE_CHARS}", "--min-chars=100000"]
    )
    tok_train.main([f"--data-path={base / 'text'}", "--vocab-size=2048", "--force"])
    records = []
    for flags, more in NOISE:
        repeat.main([*flags, "--", *NOISE_FLAGS, f"--data-path={base / 'text'}", *more])
        name = flags[0].removeprefix("--name=")
        records.append(read_json(base / "repeats" / f"{name}.json"))
    draw(records, picture)
    return records[0]["rerun_difference"] == 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one demonstration; 1 if its result is not the expected one."""
    parser = Parser(description=__doc__)
    parser.add_argument("part", choices=("hash", "dry", "left-out", "noise"))
    parser.add_argument(
        "--data-path", type=Path, help="contains one folder of text files for each bucket"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides when the kills happen")
    parser.add_argument(
        "--picture", type=Path, default=Path("noise.png"), help="where `noise` draws its runs"
    )
    args = parser.parse_args(argv)
    if args.part in CHARS and args.data_path is None:
        raise ValueError(
            "--data-path is missing: pass a folder with one folder of text files for each bucket; "
            "python -m dev.make_sample_corpus --buckets --output-dir=DIR writes one"
        )
    print_setup()
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="demo-") as folder,
        training.workplace(Path(folder)) as base,
    ):
        if args.part == "hash":
            good = one_hash(args.seed)
        elif args.part == "noise":
            good = noise(base, args.picture.absolute())
        else:
            good = {"dry": dry, "left-out": left_out}[args.part](args.data_path.resolve(), base)
    print(f"{'as expected' if good else 'NOT as expected'}; {time.monotonic() - began:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    run_main(main)
