"""
The loader: rows of the stream as batches on the device.

    Stream --rows--> [prefetch thread] --host batches--> queue (bounded) --> next(loader): copy to the device
    Stream --rows--> next(loader)                                            mapped data on a CPU: nothing to wait for

A rank owns a block of lanes. Its rows of a step are cut into **leaves** (blocks of lanes over which gradients are added
in a fixed order), and each leaf into micro-batches of B rows. Micro-batches never cross a leaf, and every leaf has as
many of them as the longest needs; what is short is filled with dead rows, whose targets are all off, so shapes never
change:

    V = 6 lanes, n = 1, K = 4 leaves, B = 2:     leaf 0: [l0 --]   leaf 1: [l1 l2]   leaf 2: [l3 --]   leaf 3: [l4 l5]

One thread per rank packs, copies and digests ahead of the trainer; tokenizing goes on in the stream's pool. Where data
are mapped and the device is the CPU there is no thread: a row takes microseconds, on the very cores that train, and two
threads that hand over to each other take half as many again. Host buffers are a ring: pinned on CUDA, and a slot is
filled again only after the event recorded behind its copy has passed.
The snapshot of the lanes travels with the last micro-batch of its step, so what was prefetched but not used is never
part of the state.

Rejected: worker processes. Tokenizers and copies release the GIL, and forked workers would need shared memory, state
and a shutdown of their own.

At the end, nanochat's loaders under their names.
"""

import itertools
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanochat.common import get_dist_info
from nanochat.dataset import list_parquet_files
from nanochat.order import StreamConfig, block
from nanochat.rows import copy_rows
from nanochat.sample_stream import AnyRow, Config, open_stream
from nanochat.sources import ParquetSource, Source, scan
from nanochat.stream import Cursor, Stream, ledger, row_digest
from nanochat.tokenizer import RustBPETokenizer, get_tokenizer

OFF = -100  # target where the loss is off
PREFETCH = 8  # micro-batches that are ready ahead


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B rows on the device. `last` marks the last micro-batch of this rank in its step."""

    inputs: torch.Tensor  # (B, T) int64
    targets: torch.Tensor  # (B, T) int64, -100 = off
    doc_ids: torch.Tensor | None  # (B, T) int32: which document of its row an input belongs to; None unless asked for
    buckets: torch.Tensor  # (B,) int64: which of the loader's `buckets` a row is of; 0 for dead rows
    step: int
    index: int  # within this rank's step
    last: bool


class Dry(Exception):
    """A lane of this rank cannot give the rows of a step: the bucket that is due has run dry, and dropping it is not
    allowed, or all have (`bucket` is None)."""

    def __init__(self, step: int, lane: int, bucket: str | None):
        what = "all its buckets have" if bucket is None else f"the bucket {bucket!r} has"
        super().__init__(f"step {step}: lane {lane} has no row left, {what} run dry there")
        self.step, self.lane, self.bucket = step, lane, bucket


def default_leaves(world_size: int, V: int) -> int:
    """K of a new run: the next power of two >= W, but at most V."""
    return 1 << min((world_size - 1).bit_length(), V.bit_length() - 1)


@dataclass(frozen=True)
class Layout:
    """Who owns which rows of a step: the rank's leaves and their micro-batches. ValueError names the flag to mend."""

    V: int
    rows_per_step: int
    device_batch_size: int
    rank: int = 0
    world_size: int = 1
    num_leaves: int | None = None  # None: as `default_leaves` says

    def __post_init__(self) -> None:
        if self.rows_per_step % self.V:
            raise ValueError(f"--lanes {self.V} does not divide the {self.rows_per_step} rows of a step "
                             f"(total_batch_size / T); choose a divisor")
        if self.world_size > self.V:
            raise ValueError(f"{self.world_size} processes but only {self.V} lanes, and each process needs one; raise "
                             f"--lanes or start fewer processes")
        if not 1 <= self.K <= self.V or self.K & (self.K - 1):
            raise ValueError(f"--leaves: got {self.K}, expected a power of two, at most the {self.V} lanes")
        if self.device_batch_size < 1:
            raise ValueError(f"--device-batch-size: got {self.device_batch_size}, expected at least 1")

    @property
    def K(self) -> int:
        """Leaves of the step: a power of two, at most V."""
        return default_leaves(self.world_size, self.V) if self.num_leaves is None else self.num_leaves

    @property
    def num_blocks(self) -> int:
        """Leaves of all ranks: K where W divides it, else each rank's block is one."""
        return self.K if self.K % self.world_size == 0 else self.world_size

    @property
    def lanes(self) -> range:
        """This rank's lanes."""
        return block(self.rank, self.world_size, self.V)

    @property
    def leaves(self) -> list[range]:
        """This rank's leaves, as lanes."""
        each = self.num_blocks // self.world_size
        return [block(j, self.num_blocks, self.V) for j in range(self.rank * each, (self.rank + 1) * each)]

    @property
    def rows_per_lane(self) -> int:
        """n: rows that a lane gives to a step."""
        return self.rows_per_step // self.V

    @property
    def micro_batches_per_leaf(self) -> int:
        """Enough for the longest leaf of any rank, so that all ranks do the same number."""
        return -(-(-(-self.V // self.num_blocks) * self.rows_per_lane) // self.device_batch_size)

    @property
    def dead_share(self) -> float:
        """Share of the rows that all ranks compute which are dead."""
        return 1 - self.rows_per_step / (self.num_blocks * self.micro_batches_per_leaf * self.device_batch_size)


class Slot:
    """Host memory for one micro-batch: tokens and target masks. The device makes int64 of them, so that fewer bytes
    travel and nothing is written twice. What a CPU widens is as small as the tokenizer's ids; elsewhere it is int32,
    since torch can do little with uint16."""

    def __init__(self, B: int, T: int, tokenizer: RustBPETokenizer, device: torch.device, *,
                 with_doc_ids: bool = False):
        def new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")

        narrow = device.type == "cpu" and tokenizer.token_dtype == np.uint16
        self.tokens, self.live = new(torch.uint16 if narrow else torch.int32, B, T + 1), new(torch.uint8, B, T + 1)
        self.buckets = new(torch.int64, B)
        self.doc_ids = new(torch.int32, B, T + 1) if with_doc_ids else None
        self.host_tokens, self.host_live = self.tokens.numpy(), self.live.numpy()
        self.host_doc_ids = None if self.doc_ids is None else self.doc_ids.numpy()
        self.host_buckets, self.host_rows = self.buckets.numpy(), list(zip(self.host_tokens, self.host_live))
        self.bos = np.full(T + 1, tokenizer.get_bos_token_id(), self.host_tokens.dtype)
        self.live[...] = 1
        self.all_live = True  # `live` is 1 everywhere
        self.copied: torch.cuda.Event | None = None

    def fill(self, rows: Sequence[AnyRow], buckets: Sequence[str], *, first: int | None = None) -> int:
        """Write up to B rows, dead ones after them. With `first`, the first row's index in its step, returns the sum
        of the rows' digests, else 0. Waits for the copy of what the slot held."""
        if self.copied is not None:
            self.copied.synchronize()
        total, num = 0, len(rows)
        tokens, live, doc_ids, bucket_ids = self.host_tokens, self.host_live, self.host_doc_ids, self.host_buckets
        if not self.all_live:
            live[...] = 1
        if num < len(tokens):
            tokens[num:], live[num:], bucket_ids[num:] = self.bos[0], 0, 0
            if doc_ids is not None:
                doc_ids[num:] = 0
        if len(buckets) > 1:
            bucket_ids[:num] = [buckets.index(row.bucket) for row in rows]
        masked = num < len(tokens)
        if rows:
            masked |= copy_rows(rows, self.bos, tokens[:num], live[:num], None if doc_ids is None else doc_ids[:num])
        if first is not None:
            for i, (row_tokens, row_live) in enumerate(self.host_rows[:num], first):
                total += row_digest(i, row_tokens, row_live[1:])
        self.all_live = not masked or bool(live.min())
        return total

    def batch(self, device: torch.device, step: int, index: int, last: bool) -> MicroBatch:
        """Start the copies to the device, and record the event that says when this slot may be filled again."""
        def there(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True, copy=True)

        if device.type == "cpu":  # NumPy takes half the time that torch does
            inputs, targets = self._widened()
            buckets = torch.from_numpy(self.host_buckets.copy())
        else:
            buckets = there(self.buckets)
            tokens = there(self.tokens)
            inputs, targets = tokens[:, :-1].to(torch.int64), tokens[:, 1:].to(torch.int64)
            if not self.all_live:
                targets.masked_fill_(there(self.live)[:, 1:] == 0, OFF)
        doc_ids = None if self.doc_ids is None else there(self.doc_ids)[:, :-1].clone()
        if device.type == "cuda":
            self.copied = torch.cuda.Event()
            self.copied.record()
        return MicroBatch(inputs, targets, doc_ids, buckets, step, index, last)

    def _widened(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets) on the CPU."""
        tokens = self.host_tokens
        inputs, targets = tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64)
        if not self.all_live:
            np.copyto(targets, OFF, where=self.host_live[:, 1:] == 0)
        return torch.from_numpy(inputs), torch.from_numpy(targets)


@dataclass(slots=True)
class _Filled:
    slot: Slot
    batch: MicroBatch | None  # made already where that is the CPU's work: it is in its caches now
    step: int
    index: int
    end: tuple[int, Any] | None  # of the step's last micro-batch: (digest, snapshot)


class DataLoader:
    """Endless iterator over this rank's micro-batches; where epochs are limited it ends by raising `Dry`.

    `config` says which order it is: lanes, or Megatron's (`nanochat.sample_stream`). `cursors`: of all V lanes, or of
    this rank's at least; `drop_dry`, `new_curriculum`: see `Stream`; `skips`: {step: how many steps' rows are passed
    over before it}. `prefetch`: micro-batches that a thread makes ahead; 0: no thread; None: 8, or 0 for mapped data on
    the CPU. What goes wrong while prefetching is raised by the `next` that would have had the batch. Close it, or use
    it as a context manager.
    """

    def __init__(self, config: Config, sources: Mapping[str, Source], *, tokenizer: RustBPETokenizer,
                 rows_per_step: int, device_batch_size: int, device: torch.device | str = "cpu", rank: int = 0,
                 world_size: int = 1, num_leaves: int | None = None, cursors: Sequence[Cursor] | None = None,
                 start_step: int = 0, num_threads: int = 4, prefetch: int | None = None, with_doc_ids: bool = False,
                 with_digest: bool = True, drop_dry: bool = False, new_curriculum: bool = False,
                 skips: Mapping[int, int] | None = None):
        self.layout = Layout(config.V, rows_per_step, device_batch_size, rank, world_size, num_leaves)
        self.config, self.device, self.with_digest = config, torch.device(device), with_digest
        self.micro_batches_per_step = len(self.layout.leaves) * self.layout.micro_batches_per_leaf
        self.stream = open_stream(config, sources, self.layout.lanes, tokenizer=tokenizer.fingerprint, cursors=cursors,
                                  num_threads=num_threads, drop_dry=drop_dry, new_curriculum=new_curriculum)
        self.buckets = self.stream.buckets  # what MicroBatch.buckets counts
        self.skips = skips or {}
        self.step = start_step  # the step whose micro-batches come next
        self.digest = 0
        self.wait_s = 0.0
        self._ends = {start_step: self.stream.snapshot()}  # of the last two steps, by the number of steps done
        self._closed = threading.Event()
        self._filled: queue.SimpleQueue[_Filled | BaseException] = queue.SimpleQueue()  # a tenth of a Queue's time
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self._on_cpu = self.device.type == "cpu"
        if prefetch is None:
            prefetch = 0 if self._on_cpu and self.stream.mapped else PREFETCH
        slots = [Slot(device_batch_size, config.T, tokenizer, self.device, with_doc_ids=with_doc_ids)
                 for _ in range(1 if self._on_cpu else max(1, prefetch))]
        for i in range(max(1, prefetch)):
            self._free.put(slots[i % len(slots)])  # on the CPU a slot is empty again when its batch is made
        self._making = self._make()
        self._thread = threading.Thread(target=self._prefetch, name="prefetch", daemon=True) if prefetch else None
        if self._thread is not None:
            self._thread.start()

    # -- the thread

    def _prefetch(self) -> None:
        while self._make_one():
            pass

    def _make_one(self) -> bool:
        """Make the next micro-batch and put it into the queue, or the exception that came instead; False when there
        are no more."""
        try:
            self._filled.put(next(self._making))
        except StopIteration:  # closed
            return False
        except BaseException as e:  # handed to the consumer, whatever it is
            self._filled.put(e)
            return False
        return True

    def _make(self) -> Iterator[_Filled]:
        """Micro-batches, step after step, until closed. Waits for free slots."""
        n, B, lanes = self.layout.rows_per_lane, self.layout.device_batch_size, self.layout.lanes
        coming: Iterator[tuple[Sequence[AnyRow], list[tuple[Any, ...]]]] = self.stream.steps(n)
        for step in itertools.count(self.step):
            for _ in range(self.skips.get(step, 0)):
                self._whole(step, next(coming)[0])
            rows, snapshot = next(coming)
            self._whole(step, rows)
            digest, index = 0, 0
            for leaf in self.layout.leaves:
                mine = rows[(leaf.start - lanes.start) * n:(leaf.stop - lanes.start) * n]
                for at in range(0, self.layout.micro_batches_per_leaf * B, B):
                    slot = self._next_slot()
                    if slot is None:
                        return
                    first = leaf.start * n + at if self.with_digest else None
                    digest += slot.fill(mine[at:at + B], self.buckets, first=first)
                    index += 1
                    last = index == self.micro_batches_per_step
                    end = (digest % 2**64, snapshot) if last else None
                    batch = slot.batch(self.device, step, index - 1, last) if self._on_cpu else None
                    yield _Filled(slot, batch, step, index - 1, end)

    def _whole(self, step: int, rows: Sequence[AnyRow]) -> None:
        """Dry unless the rows are those of a whole step."""
        n, lanes = self.layout.rows_per_lane, self.layout.lanes
        if len(rows) < n * len(lanes):
            dry = next(lane for lane in lanes if sum(row.lane == lane for row in rows) < n)
            raise Dry(step, dry, self.stream.dry_bucket(dry))

    def _next_slot(self) -> Slot | None:
        while not self._closed.is_set():
            try:
                return self._free.get(timeout=0.1)
            except queue.Empty:
                continue
        return None

    # -- the consumer

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        if self._closed.is_set():
            raise RuntimeError("this loader is closed")
        began = time.perf_counter()
        if self._thread is None and self._filled.empty():
            self._make_one()
        filled = self._filled.get()
        self.wait_s += time.perf_counter() - began
        if isinstance(filled, BaseException):
            self._filled.put(filled)  # for the next call
            raise filled
        batch = filled.batch or filled.slot.batch(self.device, filled.step, filled.index, filled.end is not None)
        self._free.put(filled.slot)
        if filled.end is not None:
            self.digest, snapshot = filled.end
            self.step = filled.step + 1
            self._ends = {filled.step: self._ends[filled.step], self.step: snapshot}
        return batch

    def cursors(self, steps: int | None = None) -> list[Cursor]:
        """This rank's cursors after the last complete step, or after so many steps: the last one or the one before."""
        return self.stream.cursors(self._ends[self.step if steps is None else steps])

    def dropped(self) -> dict[str, int]:
        """{bucket: how many of this rank's lanes have dropped it by the end of the last complete step}."""
        lanes = [dropped for _, _, dropped, _ in self._ends[self.step]]
        return {bucket: sum(bucket in dropped for dropped in lanes) for bucket in self.buckets}

    def ledger(self) -> dict[str, dict[str, int]]:
        """This rank's accounts after the last complete step, see `stream.ledger`."""
        return ledger(self.cursors(), self.config.T)

    @property
    def phase(self) -> int | None:
        """The phase of the curriculum that this rank's first lane is in, from 1; None without one."""
        mixer, ends = self.stream.mixer, self._ends[self.step]
        return mixer.phase_of(ends[0][1])[0] + 1 if mixer is not None and ends else None

    def close(self) -> None:
        """Stop the thread and the stream's pool, and wait for both; what the thread is packing is given up."""
        self._closed.set()
        self.stream.close()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> "DataLoader":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


# ---- nanochat's loaders ---------------------------------------------------------------------------------------------

def tokenizing_distributed_data_loader_with_state_bos_bestfit(
        tokenizer: RustBPETokenizer, B: int, T: int, split: str, tokenizer_threads: int = 4,
        tokenizer_batch_size: int = 128, device: torch.device | str = "cuda",
        resume_state_dict: dict[str, Any] | None = None, buffer_size: int = 1000
        ) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
    """Yields `inputs, targets, state_dict` for ever: (B, T) int64 on `device`, BOS-aligned rows, documents cropped.

    It knows no global batch, so one step is B rows on each of the W ranks. `state_dict` shows pq_idx, rg_idx and epoch
    (from 1) of this rank's first lane, and holds the exact cursors of its lanes: resuming continues with the very next
    row, on the same rank of as many; otherwise ValueError (`DataLoader` can). `buffer_size` is shared by the lanes.
    """
    lanes = _lanes_per_rank(B)
    config = StreamConfig(T=T, V=lanes * get_dist_info()[3], buffer_size=max(16, buffer_size // lanes),
                          unit_size=min(64, tokenizer_batch_size))
    return _nanochat_loader(tokenizer, B, split, config, tokenizer_threads, device, resume_state_dict)


def tokenizing_distributed_data_loader_bos_bestfit(*args: Any, **kwargs: Any
                                                   ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`tokenizing_distributed_data_loader_with_state_bos_bestfit` without the state."""
    for inputs, targets, _ in tokenizing_distributed_data_loader_with_state_bos_bestfit(*args, **kwargs):
        yield inputs, targets


def tokenizing_distributed_data_loader_with_state(
        B: int, T: int, split: str, tokenizer_threads: int = 4, tokenizer_batch_size: int = 128,
        device: torch.device | str = "cuda", resume_state_dict: dict[str, Any] | None = None
        ) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
    """The `concat` layout with the default tokenizer; yields and resumes like the loader with `_bos_bestfit`."""
    config = StreamConfig(T=T, V=_lanes_per_rank(B) * get_dist_info()[3], layout="concat",
                          unit_size=min(64, tokenizer_batch_size))
    return _nanochat_loader(get_tokenizer(), B, split, config, tokenizer_threads, device, resume_state_dict)


def tokenizing_distributed_data_loader(*args: Any, **kwargs: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`tokenizing_distributed_data_loader_with_state` without the state."""
    for inputs, targets, _ in tokenizing_distributed_data_loader_with_state(*args, **kwargs):
        yield inputs, targets


def _lanes_per_rank(B: int) -> int:
    most = max(1, 64 // get_dist_info()[3])
    return max(d for d in range(1, B + 1) if B % d == 0 and d <= most)


def _nanochat_loader(tokenizer: RustBPETokenizer, B: int, split: str, config: StreamConfig, num_threads: int,
                     device: torch.device | str, state: dict[str, Any] | None
                     ) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
    if split not in ("train", "val"):
        raise ValueError(f"split: got {split!r}, expected 'train' or 'val'")
    _, rank, _, world_size = get_dist_info()
    if state is not None and (state["rank"], state["world_size"]) != (rank, world_size):
        raise ValueError(f"this state is of rank {state['rank']} of {state['world_size']}, here is rank {rank} of "
                         f"{world_size}; nanochat.dataloader.DataLoader resumes on any number of ranks")
    paths = [Path(p) for p in list_parquet_files()]
    names = [p.name for p in paths]
    source = ParquetSource(scan(paths[0].parent, paths[:-1] if split == "train" else paths[-1:]), tokenizer)
    with DataLoader(config, {split: source}, tokenizer=tokenizer, rows_per_step=B * world_size, device_batch_size=B,
                    device=device, rank=rank, world_size=world_size, num_threads=num_threads, with_digest=False,
                    cursors=None if state is None else state["cursors"]) as loader:
        for batch in loader:
            cursors = loader.cursors()
            assert isinstance(loader.stream, Stream)
            name, row_group = source.locate(loader.stream.position(split, cursors[0]))
            yield batch.inputs, batch.targets, {
                "pq_idx": names.index(name), "rg_idx": row_group, "epoch": cursors[0]["buckets"][split]["epoch"] + 1,
                "cursors": cursors, "rank": rank, "world_size": world_size}
