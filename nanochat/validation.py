"""
Validation data: the same rows for every number of processes, batch size and run.

The data alone decide lanes, layout and seed, so bits per byte of two runs compare. Nothing is dropped, and no thread
packs ahead of the evaluation.
"""

from collections.abc import Iterator

import torch

from nanochat.dataloader import Layout, MicroBatch, Slot
from nanochat.order import StreamConfig
from nanochat.rows import Row
from nanochat.sources import Source
from nanochat.stream import Stream
from nanochat.tokenizer import RustBPETokenizer


def validation_config(source: Source, T: int) -> StreamConfig:
    """Validation's own lanes, layout and seed, from the data alone: nothing of it is dropped, and the rows are the same
    for every W, B, batch size and run. One pass."""
    documents = int(source.groups.sum())
    V = 1 << min(6, max(0, (documents // 128).bit_length() - 1))
    return StreamConfig(T=T, V=V, seed=0, long_docs="split", overlap=min(64, T // 4), max_epochs=1)


def validation_loader(source: Source, *, tokenizer: RustBPETokenizer, T: int, device_batch_size: int, num_tokens: int,
                      device: torch.device | str, rank: int = 0, world_size: int = 1, num_leaves: int = 1,
                      num_threads: int = 4, with_doc_ids: bool = False) -> Iterator[MicroBatch]:
    """This rank's part of the first `num_tokens` validation tokens, in whole rows, as many from each lane (at least
    one; fewer where the data ends). A batch is of one leaf's lanes (the run's leaves, or as many as there are lanes),
    so that batches are the same for every W that divides the leaves. A rank beyond the number of lanes has none."""
    config = validation_config(source, T)
    if rank >= config.V:
        return
    layout = Layout(config.V, config.V, device_batch_size, rank, min(world_size, config.V), min(num_leaves, config.V))
    device = torch.device(device)
    slot = Slot(device_batch_size, T, tokenizer, device, with_doc_ids=with_doc_ids)
    stream = Stream(config, {"val": source}, layout.lanes, tokenizer=tokenizer.fingerprint, num_threads=num_threads)
    waiting: list[list[Row]] = [[] for _ in layout.leaves]
    leaf_of = {lane: rows for lanes, rows in zip(layout.leaves, waiting) for lane in lanes}
    steps = max(1, num_tokens // (T * config.V))
    try:
        for step in range(steps):
            more = stream.next_rows(1)
            for row in more:
                leaf_of[row.lane].append(row)
            done = not more or step == steps - 1
            for rows in waiting:
                while len(rows) >= device_batch_size or (rows and done):
                    slot.fill(rows[:device_batch_size], ["val"])
                    del rows[:device_batch_size]
                    yield slot.batch(device, 0, step, last=done and not any(waiting))
            if done:
                return
    finally:
        stream.close()
