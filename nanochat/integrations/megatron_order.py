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

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from nanochat.common import as_path, each, get_base_dir, hash_json, is_remote, open_door
from nanochat.config import Settings
from nanochat.curriculum import Mixer
from nanochat.files import check_format, data_at, list_files
from nanochat.integrations.megatron import (
    BlendedSamples,
    Part,
    SampleRules,
    Samples,
    Split,
    check_blend,
    plan_blend,
    sequences_of,
    split_matrix,
)
from nanochat.integrations.megatron_files import IndexedDataset
from nanochat.integrations.megatron_settings import MegatronSettings
from nanochat.pins import Manifest, Manifests
from nanochat.rows import Row
from nanochat.run_order import Reading
from nanochat.schedule import Horizon
from nanochat.sources import Source, scan_files
from nanochat.splits import split_train_val
from nanochat.stream import FORMAT, Cursor, LaneState, check_cursors, stream_identity
from nanochat.tokens import TokenFile, to_offsets

SPLIT = "969,30,1"  # the default --split, Megatron's
WHOLE = "1,0,0"  # the one used if validation has its own files


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
        """See `RunOrder.settle`: --split and the number of samples. A new run has as many samples as
        its steps need, or as many as the run whose data it continues, and keeps that number.
        ValueError if its steps need more."""
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
        """See `RunOrder.pin` and `find_pairs`."""
        return find_pairs(settings.data_path or "", settings.val_path, _own(settings).split or "")

    def check(self, settings: Settings, sources: Mapping[str, Source]) -> None:
        """See `RunOrder.check`."""
        open_samples(self.stream_config(settings), sources)

    def shuffle(self, settings: Settings, sources: Mapping[str, Source]) -> None:
        """See `RunOrder.shuffle`: the other ranks then read the tables from the index cache."""
        for part in open_samples(self.stream_config(settings), sources).datasets:
            _ = part.shuffle_index

    def reads(
        self,
        settings: Settings,
        sources: Mapping[str, Source],
        cursors: Sequence[Cursor] | None,
        steps: int,
    ) -> Mapping[str, Reading]:
        """See `RunOrder.reads`: the order says in advance how many samples each bucket gives."""
        samples = open_samples(self.stream_config(settings), sources)
        counts = samples.counts(samples_needed(settings, cursors, steps))
        readings = {}
        for bucket, number, part in zip(sources, counts, samples.datasets):
            trained = number * settings.max_seq_len
            readings[bucket] = Reading(trained, part.num_tokens_per_epoch)
        return readings


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


def open_samples(config: SampleConfig, sources: Mapping[str, Source]) -> Samples | BlendedSamples:
    """The data set whose sample i is row i of a run. `sources`: for each bucket, the source of a
    single pair. Reads no token and does not shuffle yet. ValueError for bad settings or data, and
    for fewer samples than the run takes."""
    pairs = list(sources.values())
    prefixes = [_prefix(source.manifest) for source in pairs]
    part = split_matrix(config.split)[Split.train.value]
    assert part is not None, "find_pairs refuses such a split"

    def open_part(prefix: str, num_samples: int | None) -> Samples:
        file = IndexedDataset(prefix)
        indices = sequences_of(part, len(file.sequence_lengths))
        return Samples(file, prefix, indices, num_samples, Split.train.name, rules)

    samples: Samples | BlendedSamples
    try:
        check_blend(prefixes, config.weights)
        rules = SampleRules(
            T=config.T,
            seed=config.seed,
            eod=pairs[0].bos,
            eod_mask_loss=config.eod_mask_loss,
            cache=config.index_cache,
        )
        if len(prefixes) == 1 and config.weights is None:  # one prefix is not a blend
            samples = open_part(prefixes[0], config.num_samples)
        else:
            plan = plan_blend(open_part, prefixes, config.weights, config.num_samples)
            samples = BlendedSamples(plan.datasets, plan.weights, plan.size, config.index_cache)
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
        """This is Megatron's reset_attention_mask. Its reset_position_ids would
        change nothing: positions are rotary, so only distances inside a document matter."""
        ends = self.tokens == self.eod
        return (np.cumsum(ends) - ends).astype(np.int32)


class SampleCounts(NamedTuple):
    """The counts in a lane's cursor."""

    taken: int  # samples that all lanes have read
    num_rows: list[int]  # of this lane, by bucket


class SamplePiece(NamedTuple):
    """Ids `start` to `stop` - 1 of a document in a sample of a run."""

    epoch: int  # how many times these ids occur earlier in the stream of their data set
    sample: int
    start: int
    stop: int


def _ids_before(part: Samples, document: int, sequence: int) -> int:
    """Ids of a document in front of one of its sequences."""
    first = part.dataset.document_indices[document]
    lengths = part.dataset.sequence_lengths[first:sequence]
    return int(lengths.sum(dtype=np.int64))


def _pieces_in_stream(part: Samples, document: int, T: int) -> list[SamplePiece]:
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
        self.taken = 0  # samples that all lanes have read
        self.num_rows = 0  # of each lane
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
        [(self.taken, self.num_rows)] = positions
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
                lane, self.num_rows + j, self.buckets[bucket], ids, mask, [], number, self.eod
            )
            rows.append(row)
            self.counts[self.lanes.index(lane), bucket] += 1
        self.taken += step
        self.num_rows += num_rows
        return rows

    def dry_bucket(self, lane: int) -> None:
        """None, because a stream ends when the run has read all its samples."""

    def close(self) -> None:
        """Does nothing: there are no threads."""

    # ---- state

    def state(self) -> list[LaneState]:
        state = []
        for lane, num_rows in zip(self.lanes, self.counts.tolist()):
            counts = SampleCounts(self.taken, num_rows)
            state.append(LaneState(lane, self.num_rows, frozenset(), counts))
        return state

    def cursors(self, state: list[LaneState] | None = None) -> list[Cursor]:
        """The cursors of all lanes at a state, by default the present one; a cursor's epochs are those
        of the samples taken by then."""
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
            for bucket, num_rows, epoch in zip(self.buckets, at.feeds.num_rows, epochs):
                accounts[bucket] = {
                    "row": num_rows,
                    "epoch": epoch,
                    "read": num_rows * T,
                    "repeated": num_rows,
                    **nothing,
                }
            cursor = {
                "format": FORMAT,
                "lane": at.lane,
                "row": at.num_rows,
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
        if isinstance(self.samples, BlendedSamples):
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


def __getattr__(name: str) -> Any:
    """megatron-core's names that were once here, for own code that imports them."""
    if name not in ("BlendedDataset", "BlendedMegatronDatasetBuilder"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return open_door(f"nanochat.integrations.megatron_api:{name}")
