"""nanochat's four loaders: the same names and arguments, rows of this project's stream.

    from nanochat.dataloader import tokenizing_distributed_data_loader_with_state_bos_bestfit

                          rows that start with BOS                     one token stream
    batches and state     ..._with_state_bos_bestfit(tokenizer, ...)   ..._with_state(...)
    batches alone         ..._bos_bestfit(tokenizer, ...)              tokenizing_distributed_data_loader(...)

All four are `nanochat_batches`. A run does not need this module: nanochat.dataloader opens it when
a fork of nanochat imports one of the names from there.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch

from nanochat import dist
from nanochat.common import get_dist_info
from nanochat.dataloader import DataLoader
from nanochat.files import list_parquet_files
from nanochat.order import StreamConfig
from nanochat.sources import Source, open_source, scan
from nanochat.stream import Cursor, Stream
from nanochat.tokenizer import Tokenizer, get_tokenizer

log = logging.getLogger(__name__)

LANES = 64  # of all ranks together, if the batches allow it
SAVED = ("cursors", "rank", "world_size")  # what a loader needs of a state to resume with it


class State(TypedDict):
    """Where a loader stands after a batch."""

    pq_idx: int  # the file, row group and epoch (from 1) that this rank's first lane read last
    rg_idx: int
    epoch: int
    cursors: list[Cursor]  # of this rank's lanes: what the loader resumes with
    rank: int
    world_size: int


Batch = tuple[torch.Tensor, torch.Tensor]
BatchAndState = tuple[torch.Tensor, torch.Tensor, State]


def nanochat_batches(
    tokenizer: Tokenizer,
    B: int,
    T: int,
    split: str,
    tokenizer_threads: int = 4,
    tokenizer_batch_size: int = 128,
    device: torch.device | str | None = None,
    resume_state_dict: Mapping[str, Any] | None = None,
    buffer_size: int = 1000,
    data_dir: Path | str | None = None,
    *,
    layout: str = "bestfit",
) -> Iterator[BatchAndState]:
    """Yields `inputs, targets, state_dict` without end: (B, T) int64 on `device` (None: the best
    available), rows that start with BOS, documents cropped. `data_dir`: a folder of parquet files,
    whose last file is used for validation; None: the download.

    The loader does not know the global batch size, so a step is B rows on each of the W ranks. The
    loader resumes with the very next row, on the same rank of the same number of ranks; otherwise
    ValueError (`DataLoader` resumes on any number). The lanes share `buffer_size`.
    """
    _, rank, _, world_size = get_dist_info()
    cursors = cursors_of(resume_state_dict, rank, world_size) if resume_state_dict else None
    lanes = lanes_per_rank(B, world_size)
    config = StreamConfig(
        T=T,
        V=lanes * world_size,
        layout=layout,
        buffer_size=max(16, buffer_size // lanes),
        unit_size=min(64, tokenizer_batch_size),
    )
    paths = [Path(path) for path in list_parquet_files(data_dir)]
    source = open_split(paths, split, tokenizer)
    loader = DataLoader(
        config,
        {split: source},
        tokenizer=tokenizer,
        rows_per_step=B * world_size,
        device_batch_size=B,
        device=device or dist.autodetect_device_type(),
        rank=rank,
        world_size=world_size,
        num_threads=tokenizer_threads,
        cursors=cursors,
    )
    names = [path.name for path in paths]
    with loader:
        for batch in loader:
            yield batch.inputs, batch.targets, state_of(loader, split, source, names)


def open_split(paths: Sequence[Path], split: str, tokenizer: Tokenizer) -> Source:
    """All files but the last for "train", the last one for "val"; ValueError for another split."""
    if split not in ("train", "val"):
        raise ValueError(f"split: got {split!r}, expected 'train' or 'val'")
    of_split = paths[:-1] if split == "train" else paths[-1:]
    return open_source(scan(paths[0].parent, of_split), tokenizer)


def lanes_per_rank(B: int, world_size: int) -> int:
    """The largest divisor of B that leaves at most LANES lanes on all ranks together."""
    most = max(1, LANES // world_size)
    return max(lanes for lanes in range(1, B + 1) if B % lanes == 0 and lanes <= most)


def cursors_of(state: Mapping[str, Any], rank: int, world_size: int) -> list[Cursor]:
    """The cursors to resume with. ValueError unless this rank saved the state itself, with such a
    loader."""
    missing = [repr(key) for key in SAVED if key not in state]
    if missing:
        raise ValueError(
            f"resume_state_dict: it has no {', '.join(missing)}, so another loader wrote it. The "
            f"original nanochat's state names a row group, not the next row, and this loader reads "
            f"documents in a different order: start without resume_state_dict"
        )
    if (state["rank"], state["world_size"]) != (rank, world_size):
        raise ValueError(
            f"resume_state_dict: it was saved by rank {state['rank']} of {state['world_size']}, but this "
            f"is rank {rank} of {world_size}. Give each rank the state that it saved itself, or use "
            f"nanochat.dataloader.DataLoader, which resumes on any number of ranks"
        )
    return state["cursors"]


def state_of(loader: DataLoader, bucket: str, source: Source, names: list[str]) -> State:
    """The state of a loader between two batches. `names`: all files, in order."""
    assert isinstance(loader.stream, Stream)
    cursors = loader.cursors()
    first_lane = cursors[0]
    at = first_lane["buckets"][bucket]
    order = loader.stream.feeds[bucket][first_lane["lane"]].order
    last_place = max(at["place"] - 1, 0)  # of the document that this lane read last
    groups, _, _ = order.unit(at["epoch"], last_place, last_place + 1)
    name, row_group = source.locate(int(groups[0]))
    return State(
        pq_idx=names.index(name),
        rg_idx=row_group,
        epoch=at["epoch"] + 1,
        cursors=cursors,
        rank=loader.layout.rank,
        world_size=loader.layout.world_size,
    )


# ---- nanochat's names ----------------------------------------------------------------------------


def tokenizing_distributed_data_loader_with_state_bos_bestfit(
    *args: Any, **kwargs: Any
) -> Iterator[BatchAndState]:
    """`nanochat_batches`, with a warning if there are several ranks: nanochat's state, saved by
    rank 0, serves all."""
    _, rank, _, world_size = get_dist_info()
    if world_size > 1 and rank == 0:
        log.warning(
            "the loader's state_dict has the place of its own rank only: each of the %d ranks must save its "
            "own and resume with it, or use nanochat.dataloader.DataLoader",
            world_size,
        )
    return nanochat_batches(*args, **kwargs)


def tokenizing_distributed_data_loader_bos_bestfit(*args: Any, **kwargs: Any) -> Iterator[Batch]:
    """`nanochat_batches` without the state."""
    for inputs, targets, _ in nanochat_batches(*args, **kwargs):
        yield inputs, targets


def tokenizing_distributed_data_loader_with_state(
    *args: Any, **kwargs: Any
) -> Iterator[BatchAndState]:
    """The loader with state, for the `concat` layout and the default tokenizer; arguments start
    with B, T, split."""
    return tokenizing_distributed_data_loader_with_state_bos_bestfit(
        get_tokenizer(), *args, **kwargs, layout="concat"
    )


def tokenizing_distributed_data_loader(*args: Any, **kwargs: Any) -> Iterator[Batch]:
    """`tokenizing_distributed_data_loader_with_state` without the state."""
    return tokenizing_distributed_data_loader_bos_bestfit(
        get_tokenizer(), *args, **kwargs, layout="concat"
    )
