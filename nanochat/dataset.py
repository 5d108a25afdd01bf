"""nanochat's names for its data sets, and the command that downloads them. No other module of this
package imports this one.

    python -m nanochat.dataset -n 8 -w 4      # 8 training shards and the validation shard, 4 at a time
    python -m nanochat.dataset --verify       # read everything on disk and name corrupt files
    python -m nanochat.dataset --eval-bundle  # the tasks of the CORE metric
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanochat.cli import run_main
from nanochat.files import (
    DATASET_NAME,
    DATASETS,
    default_data_dir,
    index_to_filename,
    list_parquet_files,
)
from nanochat.integrations import download
from nanochat.text import Skipped, open_parquet, read_batches

__all__ = [
    "download_single_file",
    "index_to_filename",
    "list_parquet_files",
    "parquets_iter_batched",
]

log = logging.getLogger(__name__)

BASE_URL, MAX_SHARD = DATASETS[DATASET_NAME]  # nanochat's names; DATA_DIR is computed on access


if not TYPE_CHECKING:

    def __getattr__(name: str) -> str:
        """DATA_DIR, nanochat's name for `default_data_dir()`."""
        if name != "DATA_DIR":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return str(default_data_dir())


def parquets_iter_batched(
    split: str, start: int = 0, step: int = 1, *, data_dir: Path | str | None = None
) -> Iterator[list[str]]:
    """Yield the texts of each row group: of all files except the last for "train", of the last one
    for "val". Rank r of W passes start=r, step=W and gets row groups r, r + W, ... of each file."""
    if split not in ("train", "val"):
        raise ValueError(f"split: got {split!r}, expected 'train' or 'val'")
    paths = list_parquet_files(data_dir)
    if len(paths) < 2:
        raise ValueError(
            f"{paths[0]}: the only file, expected at least 2 (the last one is for validation); add one"
        )
    for path in paths[:-1] if split == "train" else paths[-1:]:
        with open_parquet(path) as file:
            for group in range(start, file.num_row_groups, step):
                nulls: Skipped = {}
                columns = list(read_batches(file, group, path, skipped=nulls))
                yield [
                    text for column in columns for text in column.to_pylist() if text is not None
                ]


def download_single_file(index: int) -> bool:
    """Download a shard of climbmix unless it exists. True on success; otherwise an error is
    logged."""
    try:
        download.make_downloader().fetch(index)
    except OSError as e:
        log.error("%s: %s", index_to_filename(index), e)
        return False
    return True


def main(argv: Sequence[str] | None = None) -> None:
    """Download or verify (`download.main`)."""
    download.main(argv)


if __name__ == "__main__":
    run_main(main)
