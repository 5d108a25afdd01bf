"""
Do two versions of the code give the same bits?

    python -m dev.same_bits --old=HEAD                           # the last commit and the working tree
    python -m dev.same_bits --old=main --only=text shards        # cases whose names begin like this

Each case trains a tiny model on a CPU, once with each version, on the same text. Each version
trains its own tokenizer and writes its own token files, so a change in either is found, too. Then
`scripts.compare_runs` compares the two runs: every digest, loss and gradient norm that was logged,
and every tensor of the last checkpoint.

    text.crop     text.split, on 2 processes     text.concat     text.curriculum: two buckets, two phases
    lines.all: jsonl     lines.some: --val-fraction and --min-chars     notes.part: .txt with --val-fraction
    shards.crop, from token files                megatron.order: Megatron's sample order

The exit code is 0 if all cases are equal, else 1. Run it before and after a change that must not
change results. If a change must change them, say so in its commit. (A commit from before nanochat/prepare.py
pinned other text than parquet differently: lines and notes then have "the same rows from different
files".) Cost: no GPU. Duration: about 10
s for each case and version.
"""

import contextlib
import io
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dev import make_sample_corpus
from nanochat.cli import Parser, run_main
from nanochat.text_kinds import read_texts
from scripts import compare_runs

ROOT = Path(__file__).parents[1]
TINY = (
    "--depth=2",
    "--aspect-ratio=16",
    "--head-dim=16",
    "--max-seq-len=128",
    "--device-batch-size=2",
    "--total-batch-size=2048",
    "--lanes=8",
    "--leaves=2",
    "--num-iterations=6",
    "--warmup-steps=2",
    "--save-every=4",
    "--eval-every=3",
    "--eval-tokens=4096",
    "--sample-every=-1",
    "--device-type=cpu",
    "--plan=off",
)
CURRICULUM = """\
curriculum:
- {duration_tokens: 6_144, mix: {code: 0.7, docs: 0.3}}
- {duration_tokens: 6_144, mix: {code: 0.2, docs: 0.8}}
"""
# name -> (processes, flags); {work} is the folder of one version
CASES = {
    "text.crop": (1, "--data-path={work}/text"),
    "text.split": (2, "--data-path={work}/text --long-docs=split --overlap=16"),
    "text.concat": (1, "--data-path={work}/text --packing=concat"),
    "text.curriculum": (
        1,
        "--data-path={work}/text --curriculum={work}/mix.yaml --allow-bucket-exhaustion",
    ),
    "lines.all": (1, "--data-path={work}/lines"),
    "lines.some": (2, "--data-path={work}/lines --val-fraction=0.4 --min-chars=200"),
    "notes.part": (1, "--data-path={work}/notes --val-fraction=0.1"),
    "shards.crop": (1, "--data-path={work}/shards --data-format=shards"),
    "megatron.order": (
        1,
        "--data-path={work}/megatron/train/code/shard_00000 --data-format=megatron "
        "--order=megatron --split=90,10,0",
    ),
}


def python(version: Path, work: Path, module: str, *flags: str, processes: int = 1) -> None:
    """Run a module of one version of the code. ValueError with the end of its output if it
    fails."""
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        if processes > 1
        else []
    )
    env = {
        **os.environ,
        "NANOCHAT_BASE_DIR": str(work),
        "PYTHONPATH": str(version),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, *launcher, "-m", module, *flags],
        cwd=version,
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise ValueError(
            f"{module} in {version} ended with exit code {done.returncode}:\n{done.stdout[-2000:]}"
        )


def prepare(version: Path, work: Path, text: Path) -> None:
    """Write the tokenizer and the token files of one version."""
    work.mkdir()
    for name in ("text", "lines", "notes"):
        (work / name).symlink_to(text.with_name(name))
    (work / "mix.yaml").write_text(CURRICULUM)
    python(version, work, "scripts.tok_train", f"--data-path={text}", "--vocab-size=1024")
    for folder, file_format in (("shards", "gpts"), ("megatron", "megatron")):
        python(
            version,
            work,
            "scripts.tok_shards",
            f"--input-dir={text}",
            f"--output-dir={work / folder}",
            f"--tokenizer={work / 'tokenizer'}",
            f"--format={file_format}",
            "--max-length=0",
            "--num-workers=1",
        )


def write_other_kinds(text: Path) -> None:
    """Write the first documents of each file of text, beside it, as jsonl and as .txt files."""
    for path in sorted(text.rglob("*.parquet")):
        documents = list(itertools.islice(read_texts(path), 200))
        name = path.relative_to(text).with_suffix("")
        lines = text.with_name("lines") / f"{name}.jsonl"
        lines.parent.mkdir(parents=True, exist_ok=True)
        lines.write_text("".join(json.dumps({"text": t}) + "\n" for t in documents))
        notes = text.with_name("notes") / f"{name}.txt"
        notes.parent.mkdir(parents=True, exist_ok=True)
        notes.write_text("\n".join(documents[:20]))


@contextlib.contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[None]:
    """A git worktree of a commit. ValueError if git cannot check it out."""
    worktree = ["git", "-C", str(ROOT), "worktree"]
    added = subprocess.run(
        [*worktree, "add", "-q", "--detach", str(folder), commit], capture_output=True, text=True
    )
    if added.returncode:
        raise ValueError(
            f"--old={commit}: git cannot check it out: {added.stderr.strip().splitlines()[-1]}"
        )
    try:
        yield
    finally:
        subprocess.run([*worktree, "remove", "--force", str(folder)], check=False)


def compare_case(name: str, versions: Mapping[Path, Path]) -> bool:
    """Train a case with both versions, and print how they compare. `versions`: {folder: code}."""
    processes, flags = CASES[name]
    for work, version in versions.items():
        python(
            version,
            work,
            "scripts.base_train",
            *TINY,
            f"--model-tag={name}",
            *flags.format(work=work).split(),
            processes=processes,
        )
    runs = [str(work / "runs" / name) for work in versions]
    with contextlib.redirect_stdout(io.StringIO()) as report:
        same = compare_runs.main(runs) == 0
    summary = report.getvalue()
    verdict = summary.splitlines()[0] if same else f"DIFFERS\n{summary}"
    print(f"{name}: {verdict}", flush=True)
    return same


def main(argv: Sequence[str] | None = None) -> int:
    """Train all cases with both versions and compare them; 1 if a case differs. ValueError names a
    run that failed."""
    p = Parser(description=__doc__)
    p.add_argument(
        "--old",
        required=True,
        metavar="COMMIT",
        help="the version to compare the working tree with",
    )
    p.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="NAME",
        help="only cases whose names begin with NAME",
    )
    args = p.parse_args(argv)
    names = [name for name in CASES if name.startswith(tuple(args.only))]
    if not names:
        raise ValueError(
            f"--only: no case begins with {' or '.join(args.only)}; expected {', '.join(CASES)}"
        )
    with tempfile.TemporaryDirectory(prefix="same-bits-") as folder:
        root = Path(folder)
        code = root / "code"
        text = root / "text"
        with checked_out(args.old, code):
            make_sample_corpus.main(
                [f"--output-dir={text}", "--buckets", "--max-chars=1500000", "--min-chars=100000"]
            )
            write_other_kinds(text)
            versions = {root / "old": code, root / "new": ROOT}
            for work, version in versions.items():
                prepare(version, work, text)
            failed = 0
            for name in names:
                failed += not compare_case(name, versions)
    print(f"{failed} of {len(names)} cases differ")
    return int(failed > 0)


if __name__ == "__main__":
    run_main(main)
