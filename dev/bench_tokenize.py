"""
How fast text becomes ids, and text files become token files, against bare tiktoken on the same texts in the same run.

    python -m dev.bench_tokenize [--data-path ../shared/data] [--tokenizer-dir DIR] [--workers 2] [--copies 1]

    tiktoken                 `encode_ordinary_batch` with as many threads as there are workers
    encode_flat, tiktoken    the same texts through our own tokenizer and tiktoken
    encode_flat              with the encoder that the tokenizer takes by itself
    tok_shards               parquet to finished files and manifests, by a command of its own: starting processes,
                             imports and tokenizers included

Megabytes are 10^6 bytes of UTF-8. `--copies` gives tok_shards so many corpora at once, of which starting is a smaller
part. Before anything is timed the ids of both encoders are compared. The last line is one JSON object.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dev.measure import SHARED, find_tokenizer, in_turns, new_parser, seconds, tell_about, tell_ratios
from nanochat.common import run_main
from nanochat.dataset import data_folder, find_files
from nanochat.text_kinds import read_texts
from nanochat.tokenizer import RustBPETokenizer, TiktokenEncoder


def main(argv: Sequence[str] | None = None) -> int:
    p = new_parser(__doc__)
    p.add_argument("--data-path", type=Path, default=SHARED, help="folder of text")
    p.add_argument("--tokenizer-dir", type=Path, help="default: one of 32,768 tokens is trained on the data")
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--copies", type=int, default=1)
    p.add_argument("--rounds", type=int, default=5)
    args = p.parse_args(argv)
    about = tell_about()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = find_files(args.data_path)
        texts = [text for file in files for text in read_texts(file)]
        for i in range(args.copies):
            for file in files:
                link = folder / "raw" / f"copy{i}" / file.relative_to(data_folder(args.data_path))
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(file.resolve())
        tokenizer_dir = find_tokenizer(args.tokenizer_dir, args.data_path, folder)
        fast, slow = (RustBPETokenizer.from_directory(tokenizer_dir) for _ in range(2))
        slow.__dict__["encoder"] = TiktokenEncoder(slow.enc)
        megabytes = sum(len(text.encode()) for text in texts) / 1e6
        if not np.array_equal(fast.encode_flat(texts)[0], slow.encode_flat(texts)[0]):
            raise ValueError(f"the encoders give different ids for {len(texts):,} documents")
        made = 0

        def tok_shards() -> float:
            nonlocal made
            made += 1
            command = [sys.executable, "-m", "scripts.tok_shards", f"--input-dir={folder / 'raw'}",
                       f"--output-dir={folder / f'made{made}'}", f"--tokenizer={tokenizer_dir}",
                       f"--num-workers={args.workers}"]
            spent = seconds(lambda: subprocess.run(command, check=True, capture_output=True))
            return megabytes * args.copies / spent

        def encoding(tokenizer: RustBPETokenizer) -> float:
            return megabytes / seconds(lambda: tokenizer.encode_flat(texts, num_threads=args.workers))

        found = in_turns({
            "tiktoken": lambda: megabytes / seconds(
                lambda: fast.enc.encode_ordinary_batch(texts, num_threads=args.workers)),
            "encode_flat, tiktoken": lambda: encoding(slow),
            f"encode_flat, {type(fast.encoder).__name__}": lambda: encoding(fast),
            "tok_shards": tok_shards}, args.rounds)
        print(json.dumps({"about": about, "megabytes": megabytes, "mb_per_s": tell_ratios(found, "MB/s")}))
    return 0


if __name__ == "__main__":
    run_main(main)
