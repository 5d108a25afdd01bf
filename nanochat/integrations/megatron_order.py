"""A run in Megatron's order: it trains on the samples of a blend of Megatron's data sets. With
--order=megatron, a run opens a `SampleStream` from this module, and `MegatronOrder` tells it what
the settings mean.

Row i of the run is sample i of the blend:

    --data-path=web,code  --split=969,30,1  --blend-weights=70,30

    web    | s s s s s s s s s s s s s s s s s | v v | t     sequences: the first 96.9 % for training, the
    code   | s s s s s s s s s | v | t                       next 3 % for validation, the rest unused
                  |                |
        samples, mixed           documents, in validation's own lanes: bits per byte come from the same rows for
                                 every number of processes

    step s: R rows = samples sR .. sR + R - 1; lane l of V has n = R / V of them, starting at sR + ln

So the rows do not depend on the number of processes or lanes, or on the micro-batch. A lane has no
data of its own and no buffer; its cursor holds how many samples the run has read, and how many rows
of each bucket the lane has emitted. The shuffles cover as many epochs as the run's samples need, so
a different number of samples gives a different order.

**Accounts.** Sample k of a prefix is tokens kT .. kT + T of its stream of epochs. The first T count
as `read`; the last one is also the first of sample k + 1 and counts as `repeated`. `epoch` is the
number of tokens read, divided by those of one pass: epochs are shuffled together, so none has an
end.

Rejected: cutting the valid split into samples as well. Its bits per byte would then depend on the
number of samples.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from nanochat.common import as_path, each, get_base_dir, hash_json, is_remote
from nanochat.config import Settings
from nanochat.curriculum import Mixer
from nanochat.files import check_format, data_at, list_files
from nanochat.integrations.megatron import (
    GPTDataset,
    GPTDatasetConfig,
    Part,
    Split,
    normalize,
    split_matrix,
)
from nanochat.integrations.megatron_settings import MegatronSettings
from nanochat.integrations.megatron_tables import blend_sources, cached
from nanochat.rows import Row
from nanochat.schedule import Horizon
from nanochat.sources import Manifest, Manifests, Source, scan_files
from nanochat.splits import split_train_val
from nanochat.stream import FORMAT, Cursor, LaneState, check_cursors, stream_identity
from nanochat.tokens import TokenFile, to_offsets

if TYPE_CHECKING:
    import torch

# the default --split, Megatron's; and the one used if validation has its own files
SPLIT, WHOLE = "969,30,1", "1,0,0"


# ---- blends --------------------------------------------------------------------------------------


class BlendedDataset:
    """A mix of several data sets: `size` samples in the proportions of `weights`; or, if `size` is
    None, all samples, and `weights` are the number of samples in each data set. `dataset[i]` is a
    dict of tensors and `dataset_id`. ValueError if a data set has too few samples."""

    def __init__(
        self,
        datasets: Sequence[GPTDataset],
        weights: Sequence[float],
        size: int | None,
        config: GPTDatasetConfig,
    ):
        self.datasets = list(datasets)
        self.config = config
        self.size = size
        self.split = datasets[0].index_split
        limits: list[int] | None = None
        if size is None:
            limits = [int(weight) for weight in weights]
            total = sum(limits)
            shares = [n / total for n in limits]
            self.weights = list(weights)
        else:
            total = size
            shares = normalize(weights)
            self.weights = shares

        content = hash_json([shares, total, limits])
        name = f"{content}-{type(self).__name__}-{self.split.name}"
        tables = cached(config.path_to_cache, name, lambda: blend_sources(shares, total, limits))
        self.dataset_index = tables["dataset_index"]  # (samples,) int16: the data set of sample i
        # (samples,) int64: its sample there
        self.dataset_sample_index = tables["dataset_sample_index"]

        for dataset, count in zip(self.datasets, self.counts(total)):
            if count > len(dataset):
                raise ValueError(
                    f"blend, split {self.split.name}: it takes {count:,} samples from "
                    f"{dataset.dataset_path}, which has {len(dataset):,}; raise mid_level_dataset_surplus"
                )

    def identity(self) -> dict[str, Any]:
        """Everything that decides the contents of every sample, as JSON values."""
        return {
            "weights": self.weights,
            "size": self.size,
            "datasets": [dataset.identity() for dataset in self.datasets],
        }

    def __len__(self) -> int:
        return len(self.dataset_index)

    def counts(self, stop: int) -> list[int]:
        """See `GPTDataset.counts`."""
        taken = self.dataset_index[:stop]
        return np.bincount(taken, minlength=len(self.datasets)).tolist()

    def locate(self, i: int) -> tuple[int, int]:
        """See `GPTDataset.locate`."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i:,}: the blend has {len(self):,} samples")
        dataset = int(self.dataset_index[i])
        sample = int(self.dataset_sample_index[i])
        return dataset, sample

    def __getitem__(self, idx: int) -> "dict[str, torch.Tensor | np.int16]":
        i = int(idx)
        if i < 0:
            i += len(self)
        dataset, sample = self.locate(i)
        return {"dataset_id": np.int16(dataset), **self.datasets[dataset][sample]}


class BlendedMegatronDatasetBuilder:
    """`BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()`: the data
    sets of train, valid and test. `sizes`: the number of samples of each, None for all. No call is
    collective. ValueError or FileNotFoundError for bad settings or files."""

    def __init__(
        self,
        cls: type[GPTDataset],
        sizes: Sequence[int | None],
        is_built_on_rank: Callable[[], bool],
        config: GPTDatasetConfig,
    ):
        are_counts = all(size is None or size >= 0 for size in sizes)
        if len(sizes) != len(Split) or not are_counts:
            names = ", ".join(split.name for split in Split)
            raise ValueError(
                f"sizes: got {list(sizes)}, expected a number of samples or None for each of {names}"
            )
        self.cls = cls
        self.sizes = list(sizes)
        self.config = config
        self.is_built_on_rank = is_built_on_rank
        self._open = functools.cache(lambda prefix: cls.build_low_level_dataset(prefix, config))

    def build(self) -> list[Any]:
        """A data set for each split; None for a split without data, and on ranks without data. With
        `multiple_validation_sets`, the entry of valid is a list of data sets."""
        return [self.build_split(split) if self.is_built_on_rank() else None for split in Split]

    def build_split(self, split: Split) -> Any:
        """The data set of one split."""
        config = self.config
        size = self.sizes[split.value]
        part = config.split_matrix[split.value]
        if part is None:
            return None
        if config.mock:
            return self._of_prefix("mock data", part, size, split)

        per_split = config.blend_per_split
        blend = config.blend if per_split is None else per_split[split.value]
        assert blend is not None
        prefixes, weights = blend
        has_weights = weights is not None and not per_split
        if len(prefixes) == 1 and not has_weights:  # one prefix is not a blend
            return self._of_prefix(prefixes[0], part, size, split)
        is_separate = per_split and config.multiple_validation_sets
        if is_separate and split is Split.valid:
            return [self._of_prefix(prefix, part, size, split) for prefix in prefixes]

        if weights is None:
            return self._unweighted(prefixes, part, size, split)
        if size is None:
            raise ValueError(
                f"blend: got weights and no number of samples for split {split.name}, expected both or "
                f"neither"
            )
        shares = normalize(weights)
        surplus = 1 + config.mid_level_dataset_surplus
        taken = [math.ceil(size * share) for share in shares]
        datasets = []
        for prefix, count in zip(prefixes, taken):
            prepared = math.ceil(count * surplus)
            datasets.append(self._of_prefix(prefix, part, prepared, split))
        return BlendedDataset(datasets, shares, sum(taken), config)

    def _unweighted(
        self, prefixes: Sequence[str], part: tuple[float, float], size: int | None, split: Split
    ) -> BlendedDataset:
        """One pass over each prefix, cut after `size` samples."""
        datasets = [self._of_prefix(prefix, part, None, split) for prefix in prefixes]
        lengths = [len(dataset) for dataset in datasets]
        if 0 in lengths:
            empty = prefixes[lengths.index(0)]
            raise ValueError(
                f"blend: {empty} has no sample of {self.config.sequence_length} "
                f"tokens in split {split.name}; remove it, or set weights"
            )
        total = None if size is None else min(size, sum(lengths))
        return BlendedDataset(datasets, lengths, total, self.config)

    def _of_prefix(
        self, prefix: str, part: tuple[float, float], size: int | None, split: Split
    ) -> GPTDataset:
        """A split of one pair of files, rounded to whole sequences."""
        opened = self._open(prefix)
        num_sequences = float(len(opened.sequence_lengths))
        begin, end = part
        indices = range(round(begin * num_sequences), round(end * num_sequences))
        return self.cls(opened, prefix, indices, size, split, self.config)


# ---- a run's data --------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleConfig:
    """Everything except data and tokenizer that determines the contents of a sample, and V."""

    T: int  # tokens of a row that are trained on; a sample holds T + 1
    V: int = 64  # lanes: each has n rows of every step, but no data of its own
    seed: int = 0
    num_samples: int = 1  # in the whole run
    split: str = WHOLE  # shares of training, validation, test
    weights: tuple[float, ...] | None = None  # of the prefixes; None: one pass over each prefix
    eod_mask_loss: bool = False  # mask the target after the end of a document
    index_cache: str | None = None  # a folder; does not change the samples

    framed: ClassVar[bool] = True  # validation reads documents as `[BOS] + ids`

    @classmethod
    def of(cls, settings: MegatronSettings) -> "SampleConfig":
        """The configuration in a run's resolved settings."""
        weights = settings.blend_weights
        index_cache = settings.index_cache or get_base_dir() / "index_cache"
        return cls(
            T=settings.max_seq_len,
            V=settings.lanes,
            seed=settings.order_seed,
            num_samples=settings.num_samples,
            split=settings.split or "",
            weights=None if weights is None else tuple(weights),
            eod_mask_loss=settings.eod_mask_loss,
            index_cache=str(index_cache),
        )

    def open(
        self, sources: Mapping[str, Source], lanes: Sequence[int], **arguments: Any
    ) -> "SampleStream":
        """See `nanochat.stream.open_stream`."""
        return SampleStream(self, sources, lanes, **arguments)

    def identity(self) -> dict[str, Any]:
        """The configuration as JSON values: equal identities give equal samples from the same
        data."""
        identity = asdict(self)
        identity["order"] = "megatron"
        identity["weights"] = self.weights and [*self.weights]
        del identity["index_cache"]
        return identity


def has_own_val(data_path: Path | str, val_path: Path | str | None) -> bool:
    """Whether validation has its own files: --val-path, or DIR/val next to DIR/train."""
    return val_path is not None or data_at(data_path).has_folder("train")


def samples_needed(settings: Settings, cursors: Sequence[Cursor] | None, steps: int) -> int:
    """How many samples a run has read when it ends, including those of an earlier run whose data it
    continues."""
    before = cursors[0]["samples"] if cursors else 0
    per_step = settings.total_batch_size // settings.max_seq_len
    return before + steps * per_step


def _own(settings: Settings) -> MegatronSettings:
    """The settings of a run in this order, under their own type."""
    assert isinstance(settings, MegatronSettings)
    return settings


class MegatronOrder:
    """Megatron's order as a run's settings describe it; a `nanochat.run_order.RunOrder`."""

    settings = MegatronSettings
    feeds_lanes = has_plan = False

    def stream_config(self, settings: Settings) -> SampleConfig:
        """See `RunOrder.stream_config`."""
        return SampleConfig.of(_own(settings))

    def settle(
        self, settings: Settings, horizon: Horizon, cursors: Sequence[Cursor] | None, steps: int
    ) -> Settings:
        """See `RunOrder.settle`. Fills in --split and the number of samples. A new run has as many
        samples as its steps need, or as many as the run whose data it continues, and keeps that
        number. ValueError if its steps need more."""
        needed = samples_needed(settings, cursors, steps)
        settings = _own(settings)
        split = settings.split
        if not split:
            own_val = has_own_val(settings.data_path or "", settings.val_path)
            split = WHOLE if own_val else SPLIT
        number = settings.num_samples
        if number == -1:
            number = cursors[0]["stream"]["num_samples"] if cursors else needed
        if needed > number:
            missing_tokens = (needed - number) * settings.max_seq_len
            too_many = -(-missing_tokens // horizon.total_batch_size)
            possible = horizon.num_iterations - too_many
            raise ValueError(
                f"--num-iterations: the run would take {needed:,} samples, but its order has {number:,}, "
                f"and a different number changes the order; set --num-iterations {possible}, or start a "
                f"new run with --model-tag NAME (runs with --order lanes can be extended)"
            )
        return replace(settings, split=split, num_samples=number)

    def pin(self, settings: Settings) -> Manifests:
        """See `RunOrder.pin`."""
        return find_pairs(settings.data_path or "", settings.val_path, _own(settings).split or "")

    def check(self, settings: Settings, sources: Mapping[str, Source]) -> None:
        """See `RunOrder.check`."""
        open_samples(self.stream_config(settings), sources)

    def shuffle(self, settings: Settings, sources: Mapping[str, Source]) -> None:
        """See `RunOrder.shuffle`. The other ranks then read the tables from the index cache."""
        for part in open_samples(self.stream_config(settings), sources).datasets:
            _ = part.shuffle_index

    def describe(self, settings: Settings, cursors: Sequence[Cursor] | None, steps: int) -> str:
        """See `RunOrder.describe`."""
        needed = samples_needed(settings, cursors, steps)
        return f"Megatron's order: {needed:,} of {_own(settings).num_samples:,} samples"


def find_pairs(
    data_path: Path | str, val_path: Path | str | None, split: str
) -> dict[str, dict[str, Manifest]]:
    """{"train": {bucket: manifest}, "val": ...} of a run: each pair is a bucket, and "documents" in
    its manifest is the range [first, end) of its documents in the part. ValueError or
    FileNotFoundError names a bad or missing file."""
    data = data_at(data_path)
    train_part, val_part, *_ = split_matrix(split)
    if train_part is None:
        raise ValueError(
            f"--split: got {split!r}, which leaves nothing for training; its first share must be "
            f"above 0"
        )
    of_training = data
    if data.has_folder("train"):
        of_training = data_at(data.folder / "train")
    files = list_files(of_training, "megatron").data
    check_format(str(of_training), files, "megatron")
    manifest = scan_files(data.folder, files)
    pairs: dict[str, Manifest] = {}
    for file, entry in zip(files, manifest["files"]):
        name = file.relative_to(of_training.folder).as_posix().removesuffix(".bin")
        if name in pairs:
            raise ValueError(
                f"--data-path: it names {name} twice; name it once, with the sum of its --blend-weights"
            )
        pairs[name] = {**manifest, "files": [entry]}
    train = {name: _documents(pair, train_part) for name, pair in pairs.items()}

    if has_own_val(data_path, val_path):
        return {"train": train, "val": _find_val_pairs(data_path, val_path)}
    val = {}
    for name, pair in pairs.items():
        held_out = _documents(pair, val_part)
        begin, end = held_out["documents"]
        if begin < end:
            val[name] = held_out
    if not val:
        raise ValueError(
            f"--split: {split} leaves no whole document for validation in {', '.join(pairs)}; raise its "
            f"second share, or name validation data with --val-path"
        )
    return {"train": train, "val": val}


def _find_val_pairs(data_path: Path | str, val_path: Path | str | None) -> dict[str, Manifest]:
    """{bucket: manifest} of a run whose validation data has its own files."""
    data = data_at(data_path)
    val_data = None if val_path is None else data_at(val_path)
    of_buckets = split_train_val(data, val_data, data_format="megatron", by_bucket=True)["val"]
    root = val_data or data
    every_file = [file for files in of_buckets.values() for file in files]
    check_format(str(root), every_file, "megatron")
    return {name: scan_files(root.folder, files) for name, files in of_buckets.items()}


def _documents(manifest: Manifest, part: Part) -> Manifest:
    """A pair's manifest, limited to the documents that are entirely in a part of its sequences."""
    pair = TokenFile(_prefix(manifest) + ".bin")
    num_sequences = float(len(pair.table("lengths")))
    begin, end = part or (0.0, 0.0)
    first_sequence = round(begin * num_sequences)
    end_sequence = round(end * num_sequences)
    edges = [first_sequence, end_sequence + 1]
    first, after_last = np.searchsorted(pair.table("boundaries"), edges).tolist()
    return {**manifest, "documents": [first, max(first, after_last - 1)]}


def _prefix(manifest: Manifest) -> str:
    file = as_path(manifest["root"]) / manifest["files"][0]["name"]
    return str(file).removesuffix(".bin")


def open_samples(
    config: SampleConfig, sources: Mapping[str, Source]
) -> GPTDataset | BlendedDataset:
    """The data set whose sample i is row i of a run. `sources`: for each bucket, the source of a
    single pair. Reads no token and does not shuffle yet. ValueError for bad settings or data, and
    for fewer samples than the run takes."""
    pairs = list(sources.values())
    prefixes = [_prefix(source.manifest) for source in pairs]
    try:
        dataset_config = GPTDatasetConfig(
            random_seed=config.seed,
            sequence_length=config.T,
            blend=(prefixes, config.weights),
            split=config.split,
            tokenizer=SimpleNamespace(eod=pairs[0].bos),
            path_to_cache=config.index_cache,
            eod_mask_loss=config.eod_mask_loss,
        )
        sizes = (config.num_samples, 0, 0)
        builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, dataset_config)
        samples = builder.build_split(Split.train)
    except ValueError as e:
        raise ValueError(f"--order megatron: {e}") from e
    if len(samples) < config.num_samples:
        raise ValueError(
            f"--blend-weights: without them the run makes one pass over each prefix, which gives "
            f"{len(samples):,} samples, but the run takes {config.num_samples:,}; set them, or "
            f"shorten the run"
        )
    return samples


# ---- a run's stream ------------------------------------------------------------------------------


@dataclass(slots=True)
class SampleRow(Row):
    """A row that is one sample: pieces of documents, separated by EOD."""

    sample: int  # number of the row in the run
    eod: int

    def doc_ids(self) -> np.ndarray:
        """See `Row.doc_ids`. This is Megatron's reset_attention_mask. Its reset_position_ids would
        change nothing: positions are rotary, so only distances inside a document matter."""
        ends = self.tokens == self.eod
        return (np.cumsum(ends) - ends).astype(np.int32)


class SampleCounts(NamedTuple):
    """The counts in a lane's cursor."""

    taken: int  # samples that all lanes have read
    rows: list[int]  # of this lane, by bucket


class SamplePiece(NamedTuple):
    """Ids `start` to `stop` - 1 of a document in a sample of a run."""

    epoch: int  # how many times these ids occur earlier in the stream of their data set
    sample: int
    start: int
    stop: int


def _ids_before(part: GPTDataset, document: int, sequence: int) -> int:
    """Ids of a document in front of one of its sequences."""
    first = part.dataset.document_indices[document]
    lengths = part.dataset.sequence_lengths[first:sequence]
    return int(lengths.sum(dtype=np.int64))


def _pieces_in_stream(part: GPTDataset, document: int, T: int) -> list[SamplePiece]:
    """The pieces of a document in the stream of epochs of a data set, whose sample k has tokens kT
    .. kT + T."""
    first, end = part.dataset.document_indices[document : document + 2].tolist()
    lengths = np.asarray(part.dataset.sequence_lengths)
    sequences = part.document_index
    # where each place of document_index begins in the stream
    begins = to_offsets(lengths[sequences])
    of_document = (sequences >= first) & (sequences < end)
    epochs = Counter[int]()
    pieces = []
    for place in np.flatnonzero(of_document).tolist():
        sequence = int(sequences[place])
        begin = int(begins[place])
        length = int(lengths[sequence])
        before = _ids_before(part, document, sequence)
        first_sample = max(0, (begin - 1) // T)
        last_sample = min(len(part) - 1, (begin + length - 1) // T)
        for k in range(first_sample, last_sample + 1):
            start = max(0, k * T - begin)
            stop = min(length, k * T + T + 1 - begin)
            pieces.append(SamplePiece(epochs[sequence], k, before + start, before + stop))
        epochs[sequence] += 1
    return pieces


class SampleStream:
    """Some lanes of a run in Megatron's order, a `nanochat.stream.AnyStream`. Unless it has no
    lanes, creating it shuffles, or opens the tables in the index cache. ValueError for cursors of a
    different stream, or data with too few samples."""

    mixer: Mixer | None = None

    def __init__(
        self,
        config: SampleConfig,
        sources: Mapping[str, Source],
        lanes: Sequence[int],
        *,
        tokenizer: str,
        cursors: Sequence[Cursor] | None = None,
        **unused: Any,
    ):
        self.config = config
        self.lanes = list(lanes)
        self.buckets = list(sources)
        self.sources = dict(sources)
        self.samples = open_samples(config, sources)
        any_source = next(iter(sources.values()))
        # reads are slow, so next_rows reads several at once
        self.remote = is_remote(any_source.manifest["root"])
        self.eod = any_source.bos
        self.identity = stream_identity(config, sources, tokenizer)
        self.identity["prefixes"] = self.buckets
        self.identity["samples"] = hash_json(self.samples.identity())
        self.taken = self.row = 0  # samples that all lanes have read; rows of each lane
        # rows of each lane, by bucket
        self.counts = np.zeros((len(self.lanes), len(self.buckets)), np.int64)
        if cursors is not None:
            self._restore(cursors)
        for part in self.samples.datasets:
            part.dataset.file.vocab_size = any_source.tokenizer.get_vocab_size()
            if self.lanes:  # shuffle now: later, the other ranks would wait and could time out
                _ = part.shuffle_index

    def _restore(self, cursors: Sequence[Cursor]) -> None:
        """Continue after saved cursors. ValueError if they are from another stream, or from
        different steps."""
        check_cursors(cursors, self.lanes, self.identity)
        positions = sorted({(cursor["samples"], cursor["row"]) for cursor in cursors})
        if len(positions) > 1:
            raise ValueError(
                f"cursors from different steps, after {positions[0][0]} and {positions[1][0]} "
                f"samples; use the cursors of one checkpoint"
            )
        [(self.taken, self.row)] = positions
        accounts = {cursor["lane"]: cursor["buckets"] for cursor in cursors}
        for lane, counts in zip(self.lanes, self.counts):
            counts[:] = [accounts[lane][bucket]["row"] for bucket in self.buckets]

    def next_rows(self, num_rows: int) -> list[Row]:
        """The next `num_rows` rows of each lane, lane by lane; [] after the run's last sample."""
        step = num_rows * self.config.V
        if self.taken + step > self.config.num_samples:
            return []

        # lane l has rows l * num_rows .. (l + 1) * num_rows - 1 of the step
        numbers: list[int] = []
        for lane in self.lanes:
            first = self.taken + lane * num_rows
            numbers += range(first, first + num_rows)

        # find each row's sample, and read it
        places = [self.samples.locate(number) for number in numbers]

        def read(place: tuple[int, int]) -> tuple[np.ndarray, ...]:
            dataset, sample = place
            return self.samples.datasets[dataset].row(sample)

        samples = each(read, places, at_once=64) if self.remote else map(read, places)

        # make the rows, and count those of each bucket
        rows: list[Row] = []
        for number, (bucket, _), (ids, live, _) in zip(numbers, places, samples):
            lane, j = divmod(number - self.taken, num_rows)
            mask = None if live.all() else live
            row = SampleRow(
                lane, self.row + j, self.buckets[bucket], ids, mask, [], number, self.eod
            )
            rows.append(row)
            self.counts[self.lanes.index(lane), bucket] += 1
        self.taken += step
        self.row += num_rows
        return rows

    def dry_bucket(self, lane: int) -> None:
        """See `Stream.dry_bucket`: None, because a stream ends when the run has read all its
        samples."""

    def close(self) -> None:
        """Does nothing: there are no threads."""

    # ---- state

    def state(self) -> list[LaneState]:
        """See `AnyStream.state`."""
        state = []
        for lane, rows in zip(self.lanes, self.counts.tolist()):
            counts = SampleCounts(self.taken, rows)
            state.append(LaneState(lane, self.row, frozenset(), counts))
        return state

    def cursors(self, state: list[LaneState] | None = None) -> list[Cursor]:
        """See `AnyStream.cursors`."""
        if state is None:
            state = self.state()
        T = self.config.T
        taken = self.samples.counts(state[0].feeds.taken)
        epochs = []
        for num_samples, part in zip(taken, self.samples.datasets):
            epochs.append(num_samples * T // part.num_tokens_per_epoch)
        nothing = dict.fromkeys(("inserted", "cropped", "padded", "pending", "documents"), 0)
        cursors = []
        for at in state:
            accounts = {}
            for bucket, rows, epoch in zip(self.buckets, at.feeds.rows, epochs):
                accounts[bucket] = {
                    "row": rows,
                    "epoch": epoch,
                    "read": rows * T,
                    "repeated": rows,
                    **nothing,
                }
            cursor = {
                "format": FORMAT,
                "lane": at.lane,
                "row": at.row,
                "stream": self.identity,
                "dropped": [],
                "samples": at.feeds.taken,
                "buckets": accounts,
            }
            cursors.append(cursor)
        return cursors

    def describe(self, row: SampleRow) -> list[dict[str, Any]]:
        """The documents in a row: from token `at` on, the row holds `tokens` ids of `document` in
        `file`, namely ids start .. stop - 1 of the document's `of` ids. Ids are counted as stored,
        with an EOD at the end."""
        number, sample = self.samples.locate(row.sample)
        part = self.samples.datasets[number]
        edges = part.dataset.document_indices
        file = self.sources[row.bucket].manifest["files"][0]["name"]
        at = 0
        documents = []
        for sequence, offset, length in part.pieces(sample):
            document = int(np.searchsorted(edges, sequence, side="right")) - 1
            start = _ids_before(part, document, sequence) + offset
            place = {
                "at": at,
                "tokens": length,
                "file": file,
                "document": document,
                "start": start,
                "stop": start + length,
                "of": self.document_length(row.bucket, document),
            }
            documents.append(place)
            at += length
        return documents

    def samples_with(self, bucket: str, document: int) -> list[SamplePiece]:
        """The pieces of a document in all samples of the run, by epoch and then in order: the
        inverse of `describe`, which counts ids in the same way."""
        number = self.buckets.index(bucket)
        part = self.samples.datasets[number]
        in_stream = _pieces_in_stream(part, document, self.config.T)

        # which samples of the run come from this data set, and which samples of the data set they
        # are
        run_samples = own_samples = np.arange(self.config.num_samples)
        if isinstance(self.samples, BlendedDataset):
            of_run = self.samples.dataset_index[: len(run_samples)]
            run_samples = run_samples[of_run == number]
            own_samples = self.samples.dataset_sample_index[run_samples]

        # the run takes some of the stream's samples, in a different order
        shuffled = part.shuffle_index[own_samples]
        is_taken = np.isin(shuffled, [piece.sample for piece in in_stream])
        taken = np.flatnonzero(is_taken)
        sample_of = dict(zip(shuffled[taken].tolist(), run_samples[taken].tolist()))
        pieces = []
        for piece in in_stream:
            if piece.sample in sample_of and piece.start < piece.stop:
                pieces.append(piece._replace(sample=sample_of[piece.sample]))
        return sorted(pieces)

    def document_length(self, bucket: str, document: int) -> int:
        """Ids of a document, as `describe` counts them."""
        number = self.buckets.index(bucket)
        part = self.samples.datasets[number]
        end = part.dataset.document_indices[document + 1]
        return _ids_before(part, document, end)
