"""
The loader: rows of the stream as batches on the device.

    Stream --rows--> [prefetch thread: fills slots] --queue (bounded)--> next(loader): copy to the device

A rank owns a block of lanes. Its rows of a step are divided into **leaves** (blocks of lanes whose
gradients are added in a fixed order), and each leaf into micro-batches of B rows. Micro-batches
never span leaves. Every leaf has as many micro-batches as the longest leaf needs. Dead rows, whose
targets are all off, fill the gaps, so shapes never change:

    V = 6 lanes of one row, K = 4, B = 2:     leaf 0: [l0 --]   leaf 1: [l1 l2]   leaf 2: [l3 --]   leaf 3: [l4 l5]

One thread per rank packs, copies and hashes rows ahead of the trainer, while the stream's pool
tokenizes. Host buffers are a ring of **slots**. They are pinned on CUDA, and a slot is refilled
only after a CUDA event reports that its copy is done. The state of the lanes travels with the last
micro-batch of its step, so a save never includes prefetched rows that were not used.

Rejected: worker processes. Tokenizers and copies release the GIL, and forked workers would need
shared memory, state and a shutdown of their own.
"""

import contextlib
import functools
import itertools
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from nanochat.common import block, open_door, stops_if
from nanochat.order import StreamConfig
from nanochat.rows import Row
from nanochat.sources import Source
from nanochat.stream import Cursor, LaneState, OtherStreamConfig, Stream, open_stream
from nanochat.tokenizer import Tokenizer, TokenizerSettings

OFF = -100  # target where the loss is off
PREFETCH = 8  # micro-batches ready in advance, at least
NUM_PROMPTS = 6  # from validation documents
PROMPT_TOKENS = 12  # at most


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """B rows on the device."""

    inputs: torch.Tensor  # (B, T) int64
    targets: torch.Tensor  # (B, T) int64, -100 = off
    # (B, T) int32: for each input, which document of its row it belongs to; optional
    doc_ids: torch.Tensor | None
    num_docs: int | None  # documents in the inputs of all rows; None without `doc_ids`
    # (B,) int64: index of each row's bucket in the loader's `buckets`; 0 for dead rows
    bucket_ids: torch.Tensor


class Dry(Exception):
    """A lane of this rank cannot provide the rows of a step.

    The bucket of its next row has run dry and may not be dropped, or all buckets are dry (`bucket`
    is None).
    """

    def __init__(self, step: int, lane: int, bucket: str | None):
        what = "all its buckets have" if bucket is None else f"the bucket {bucket!r} has"
        super().__init__(f"step {step}: lane {lane} has no rows left, because {what} run dry")
        self.step = step
        self.lane = lane
        self.bucket = bucket


def default_leaves(world_size: int, V: int) -> int:
    """K of a new run: the smallest power of two >= W, but at most V."""
    return 1 << min((world_size - 1).bit_length(), V.bit_length() - 1)


@dataclass(frozen=True)
class StepLayout:
    """The rows of a step that a rank owns: its leaves and their micro-batches.

    ValueError names the flag to change.
    """

    V: int
    rows_per_step: int
    device_batch_size: int
    rank: int = 0
    world_size: int = 1
    num_leaves: int = 1  # K, of the whole step

    def __post_init__(self) -> None:
        if self.rows_per_step % self.V:
            raise ValueError(
                f"--lanes={self.V}: does not divide the {self.rows_per_step:,} rows of a step "
                f"(--total-batch-size / --max-seq-len); choose a divisor"
            )
        if self.world_size > self.V:
            raise ValueError(
                f"--lanes={self.V}: got {self.world_size} processes, and each needs a lane of its own; "
                f"raise --lanes, or start fewer processes"
            )
        is_power_of_two = self.num_leaves & (self.num_leaves - 1) == 0
        if not 1 <= self.num_leaves <= self.V or not is_power_of_two:
            raise ValueError(
                f"--leaves: got {self.num_leaves}, expected a power of two no larger than "
                f"--lanes={self.V}"
            )
        if self.device_batch_size < 1:
            raise ValueError(
                f"--device-batch-size: got {self.device_batch_size}, expected at least 1"
            )

    @property
    def num_blocks(self) -> int:
        """Number of leaves on all ranks: K if W divides it; otherwise each rank's block is a leaf."""
        return self.num_leaves if self.num_leaves % self.world_size == 0 else self.world_size

    @property
    def lanes(self) -> range:
        """This rank's lanes."""
        return block(self.rank, self.world_size, self.V)

    @functools.cached_property
    def leaves(self) -> list[range]:
        """The lanes of each of this rank's leaves. Cached, because each micro-batch asks: 0.16 s in a
        step of 512 leaves."""
        num_leaves = self.num_blocks // self.world_size
        first = self.rank * num_leaves
        return [block(j, self.num_blocks, self.V) for j in range(first, first + num_leaves)]

    @property
    def rows_per_lane(self) -> int:
        """n: the number of rows that each lane contributes to a step."""
        return self.rows_per_step // self.V

    def rows_of(self, leaf: int, micro_batch: int) -> range:
        """The indices of the rows in a micro-batch of one of this rank's leaves.

        They are counted over all ranks.
        """
        n = self.rows_per_lane
        B = self.device_batch_size
        lanes = self.leaves[leaf]
        stop = lanes.stop * n
        first = lanes.start * n + micro_batch * B
        return range(min(first, stop), min(first + B, stop))

    @property
    def rows_of_longest_leaf(self) -> int:
        """The most rows that a leaf of any rank has."""
        lanes_of_longest = -(-self.V // self.num_blocks)
        return lanes_of_longest * self.rows_per_lane

    @property
    def micro_batches_per_leaf(self) -> int:
        """Enough for the longest leaf of any rank, so that all ranks do the same number."""
        return -(-self.rows_of_longest_leaf // self.device_batch_size)

    @property
    def dead_share(self) -> float:
        """The share of dead rows among all rows that the ranks compute."""
        rows_per_leaf = self.micro_batches_per_leaf * self.device_batch_size
        return 1 - self.rows_per_step / (self.num_blocks * rows_per_leaf)


class Slot:
    """Reusable host memory for one micro-batch.

    Tokens are int32, which the device converts to int64.
    """

    def __init__(
        self, B: int, T: int, bos: int, device: torch.device, *, with_doc_ids: bool = False
    ):
        def new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")

        self.bos = bos
        self.device = device
        self.tokens = new(torch.int32, 2, B, T)  # inputs and targets
        self.bucket_ids = new(torch.int64, B)
        self.doc_ids = new(torch.int32, B, T) if with_doc_ids else None
        self.num_docs: int | None = None
        self.copied: torch.cuda.Event | None = None

    def fill(self, rows: Sequence[Row], buckets: Sequence[str]) -> None:
        """Write up to B rows, then dead ones.

        Waits until the slot's previous batch has been copied.
        """
        if self.copied is not None:
            self.copied.synchronize()
        inputs, targets = self.tokens.numpy()
        bucket_ids = self.bucket_ids.numpy()

        for i, row in enumerate(rows):
            inputs[i] = row.tokens[:-1]
            targets[i] = row.tokens[1:]
            if row.live is not None:
                targets[i][row.live[1:] == 0] = OFF
            bucket_ids[i] = buckets.index(row.bucket)

        # dead rows
        inputs[len(rows) :] = self.bos
        targets[len(rows) :] = OFF
        bucket_ids[len(rows) :] = 0

        if self.doc_ids is not None:
            for i, row in enumerate(rows):
                self.doc_ids.numpy()[i] = row.doc_ids()[:-1]
            self.doc_ids[len(rows) :] = 0
            ends_inside_rows = int(self.doc_ids.diff().count_nonzero())
            self.num_docs = len(self.doc_ids) + ends_inside_rows

    def batch(self) -> MicroBatch:
        """Start the copies to the device, and record an event after which the slot may be refilled."""

        def on_device(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.device, non_blocking=True, copy=True)

        inputs, targets = self.tokens.to(self.device, non_blocking=True).to(torch.int64)
        doc_ids = None if self.doc_ids is None else on_device(self.doc_ids)
        batch = MicroBatch(inputs, targets, doc_ids, self.num_docs, on_device(self.bucket_ids))
        if self.device.type == "cuda":
            self.copied = torch.cuda.Event(blocking=True)
            self.copied.record()
        return batch


class StepEnd(NamedTuple):
    """Where the stream stands after a step."""

    steps: int  # number of steps done
    state: list[LaneState]


class Filled(NamedTuple):
    """A full slot, on its way from the thread to the consumer."""

    slot: Slot
    digest: int  # this rank's part of the digest of the slot's step
    end: StepEnd | None  # with the last micro-batch of a step


class DataLoader:
    """Endless iterator over this rank's micro-batches.

    If epochs are limited, it ends by raising `Dry`.

    `config` is a `StreamConfig`, or that of another order. `cursors` are those of
    all V lanes, or at least of this rank's. `drop_dry`: see `Stream`. An error while prefetching is
    raised by the `next` that needs the batch. Close the loader, or use it as a context manager.

        method                     in training, called by             thread     waits for
        next                       each micro-batch                   main       packed rows
        next_digest                a save; the start of a launch      main       packed rows, up to `wait_s`
        cursors, phase             a save (phase: each report, too)   main       nothing
        dropped, digest, wait_s    each step, after its rows          main       nothing
        close                      the end of a launch                main       both other threads
        _prefetch                                                     prefetch   the pool, free slots

    The stream belongs to the prefetch thread. The main thread has only states of it, which are copies
    and come with the last micro-batch of a step: those after the last complete step and the one before.
    """

    def __init__(
        self,
        config: StreamConfig | OtherStreamConfig,
        sources: Mapping[str, Source],
        *,
        tokenizer: Tokenizer,
        rows_per_step: int,
        device_batch_size: int,
        device: torch.device | str = "cpu",
        rank: int = 0,
        world_size: int = 1,
        num_leaves: int = 1,
        cursors: Sequence[Cursor] | None = None,
        start_step: int = 0,
        num_threads: int = TokenizerSettings.tokenizer_threads,
        with_doc_ids: bool = False,
        drop_dry: bool = False,
    ):
        self.layout = StepLayout(
            config.V, rows_per_step, device_batch_size, rank, world_size, num_leaves
        )
        self.config = config
        self.device = torch.device(device)
        self.micro_batches_per_step = len(self.layout.leaves) * self.layout.micro_batches_per_leaf
        self._closed = threading.Event()
        with stops_if(self._why_closed):
            self.stream = open_stream(
                config,
                sources,
                self.layout.lanes,
                tokenizer=tokenizer.fingerprint,
                cursors=cursors,
                num_threads=num_threads,
                drop_dry=drop_dry,
            )
            run = copy_context().run
        self.buckets = self.stream.buckets  # names; `MicroBatch.bucket_ids` are their indices
        # where the stream stood after the last complete step, and after the one before
        self._now = StepEnd(start_step, self.stream.state())
        self._before = self._now
        self.digest = 0  # this rank's part of the last complete step's digest
        self.wait_s = 0.0  # total time that `next` has waited for batches
        # the slots travel between the thread and the consumer
        self._filled: queue.SimpleQueue[Filled | BaseException] = queue.SimpleQueue()
        self._first: Filled | BaseException | None = None  # taken from the queue, but not used yet
        self._free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        shape = device_batch_size, config.T
        bos = tokenizer.get_bos_token_id()
        # A whole step is ready in advance, because the rows of a step are packed in one go: with 8
        # of 16 micro-batches, an H200 waited for 18 % of each step.
        self.num_slots = max(PREFETCH, self.micro_batches_per_step)
        for _ in range(self.num_slots):
            self._free.put(Slot(*shape, bos, self.device, with_doc_ids=with_doc_ids))
        self._thread = threading.Thread(
            target=run, args=[self._prefetch, start_step], name="prefetch", daemon=True
        )
        self._thread.start()

    def _why_closed(self) -> str:
        """Ends the waits of this loader's threads, and of the stream's pool, once it is closed."""
        return "the loader is closed" if self._closed.is_set() else ""

    @property
    def step(self) -> int:
        """The step whose micro-batches come next."""
        return self._now.steps

    # -- the thread

    def _prefetch(self, start_step: int) -> None:
        """Fill slots, step after step, until the loader is closed.

        Errors are passed to the consumer.
        """
        try:
            if self.device.type == "cuda":
                # otherwise waiting for an event opens a context on GPU 0
                torch.cuda.set_device(self.device)
            layout = self.layout
            n = layout.rows_per_lane
            first_row = layout.lanes.start * n  # of this rank, in the step
            for step in itertools.count(start_step):
                # the rows of the step, and where the lanes stand after it
                rows = self.stream.next_rows(n)
                if len(rows) < n * len(layout.lanes):
                    dry = self._dry_lane(rows)
                    raise Dry(step, dry, self.stream.dry_bucket(dry))
                end = StepEnd(step + 1, self.stream.state())
                digest = sum(row.digest(i) for i, row in enumerate(rows, first_row)) % 2**64

                # its micro-batches, leaf after leaf
                for i in range(self.micro_batches_per_step):
                    slot = self._free.get()
                    if slot is None or self._closed.is_set():
                        return
                    leaf, micro_batch = divmod(i, layout.micro_batches_per_leaf)
                    mine = layout.rows_of(leaf, micro_batch)
                    slot.fill(rows[mine.start - first_row : mine.stop - first_row], self.buckets)
                    is_last = i + 1 == self.micro_batches_per_step
                    self._filled.put(Filled(slot, digest, end if is_last else None))
        except BaseException as e:  # every kind
            self._filled.put(e)

    def _dry_lane(self, rows: Sequence[Row]) -> int:
        """The first of this rank's lanes with fewer `rows` than a step needs."""
        counts = Counter(row.lane for row in rows)
        return next(lane for lane in self.layout.lanes if counts[lane] < self.layout.rows_per_lane)

    # -- the consumer

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        if self._closed.is_set():
            raise RuntimeError("this loader is closed")
        filled = self._peek()
        assert filled is not None
        if isinstance(filled, BaseException):  # here and at every later call
            raise filled
        self._first = None
        batch = filled.slot.batch()
        self._free.put(filled.slot)
        if filled.end is not None:
            self._before = self._now
            self._now = filled.end
            self.digest = filled.digest
        return batch

    def _peek(self, wait_s: float = math.inf) -> "Filled | BaseException | None":
        """The item that `next` will take, once it is ready; None if it takes longer than `wait_s`."""
        began = time.perf_counter()
        while self._first is None and time.perf_counter() - began < wait_s:
            with contextlib.suppress(queue.Empty):  # the timeout lets Python handle signals
                self._first = self._filled.get(timeout=0.2)
        self.wait_s += time.perf_counter() - began
        return self._first

    def next_digest(self, wait_s: float = math.inf) -> int | None:
        """This rank's part of the next step's digest.

        Call it between steps. None if its rows are not packed within `wait_s`, or if packing them
        raised an error, which `next` will raise.
        """
        filled = self._peek(wait_s)
        return filled.digest if isinstance(filled, Filled) else None

    def cursors(self, steps: int | None = None) -> list[Cursor]:
        """This rank's cursors after `steps` steps: the number of complete ones (default), or one less."""
        return self.stream.cursors(self._state(steps))

    def dropped(self) -> dict[str, int]:
        """{bucket: number of this rank's lanes that dropped it by the end of the last full step}."""
        lanes = self._now.state
        return {b: sum(b in lane.dropped for lane in lanes) for b in self.buckets}

    def phase(self, steps: int | None = None) -> int | None:
        """The curriculum's phase, from 1, of this rank's first lane. `steps`: as for `cursors`. None
        without a curriculum."""
        mixer = self.stream.mixer
        lanes = self._state(steps)
        if mixer is None or not lanes:
            return None
        number, _ = mixer.phase_of(lanes[0].num_rows)
        return number + 1

    def _state(self, steps: int | None) -> list[LaneState]:
        """The lanes' state. `steps`: as for `cursors`."""
        if steps is None or steps == self._now.steps:
            return self._now.state
        assert steps == self._before.steps, f"{steps} steps, but the loader has done {self.step}"
        return self._before.state

    def close(self) -> None:
        """Stop the thread and the stream's pool, and wait for both.

        The thread discards its unfinished step.
        """
        self._closed.set()
        self._free.put(None)
        self.stream.close()
        self._thread.join()

    def __enter__(self) -> "DataLoader":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


# ---- validation ----------------------------------------------------------------------------------


def validation_config(source: Source, T: int) -> StreamConfig:
    """Validation's lanes, layout and seed depend on its data alone.

    It makes one pass and crops nothing.
    """
    documents = int(source.groups.sum())
    # the largest power of two up to 64 for which a lane has 128 documents
    V = 1 << min(6, max(0, (documents // 128).bit_length() - 1))
    overlap = min(StreamConfig.overlap, T // 4)
    return StreamConfig(T=T, V=V, seed=0, long_docs="split", overlap=overlap, max_epochs=1)


def validation_loader(
    source: Source,
    *,
    tokenizer: Tokenizer,
    T: int,
    device_batch_size: int,
    num_tokens: int,
    device: torch.device | str,
    rank: int = 0,
    world_size: int = 1,
    num_leaves: int = 1,
    num_threads: int = TokenizerSettings.tokenizer_threads,
    with_doc_ids: bool = False,
) -> Iterator[MicroBatch]:
    """This rank's part of the first `num_tokens` validation tokens, in whole rows.

    The same number of rows (at least one) from each lane, or fewer where a lane's data ends.
    """
    config = validation_config(source, T)
    if rank >= config.V:
        return
    B = device_batch_size
    layout = StepLayout(
        V=config.V,
        rows_per_step=config.V,
        device_batch_size=B,
        rank=rank,
        world_size=min(world_size, config.V),
        num_leaves=min(num_leaves, config.V),
    )
    slot = Slot(B, T, tokenizer.get_bos_token_id(), torch.device(device), with_doc_ids=with_doc_ids)
    for lanes in layout.leaves:
        stream = Stream(
            config, {"val": source}, lanes, tokenizer=tokenizer.fingerprint, num_threads=num_threads
        )
        with contextlib.closing(stream):
            rows: list[Row] = []
            rows_left = max(1, num_tokens // (T * config.V))  # of each lane
            while rows_left or rows:
                # read until a batch is full or the data ends
                if rows_left and len(rows) < B:
                    more = stream.next_rows(1)
                    rows += more
                    rows_left = rows_left - 1 if more else 0
                    continue
                slot.fill(rows[:B], ["val"])
                del rows[:B]
                yield slot.batch()


def validation_prompts(
    sources: Mapping[str, Source], tokenizer: Tokenizer, T: int
) -> list[list[int]]:
    """The first tokens, BOS included, of the documents at the start of a few validation rows: of each
    bucket in turn."""
    by_bucket = [_prompts_of(source, tokenizer, T) for source in sources.values()]
    prompts: list[list[int]] = []
    for turn in itertools.zip_longest(*by_bucket):
        prompts += filter(None, turn)
    return prompts[:NUM_PROMPTS]


def _prompts_of(source: Source, tokenizer: Tokenizer, T: int) -> list[list[int]]:
    """The prompts that a bucket has for `validation_prompts`."""
    bos = tokenizer.get_bos_token_id()
    prompts = []
    for batch in validation_loader(
        source,
        tokenizer=tokenizer,
        T=T,
        device="cpu",
        device_batch_size=NUM_PROMPTS,
        num_tokens=NUM_PROMPTS * T,
    ):
        for row in batch.inputs[(batch.targets >= 0).any(dim=1)].tolist():  # without padding rows
            tokens = row[: min(PROMPT_TOKENS, T // 2)]
            prompts.append(tokens[: [*tokens, bos].index(bos, 1)])  # cut before the second document
    return prompts


# ---- nanochat's names ----------------------------------------------------------------------------

NANOCHAT_NAMES = (
    "tokenizing_distributed_data_loader",
    "tokenizing_distributed_data_loader_bos_bestfit",
    "tokenizing_distributed_data_loader_with_state",
    "tokenizing_distributed_data_loader_with_state_bos_bestfit",
)


def __getattr__(name: str) -> Any:
    """nanochat's four loaders, which its forks import from here. They use `DataLoader`, so their
    module is above this one."""
    if name not in NANOCHAT_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return open_door(f"nanochat.integrations.nanochat_loaders:{name}")
