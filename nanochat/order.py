"""
The order of the data: the settings of the stream, and which lane reads which documents when.

An epoch of a bucket (a named part of the data) is a sequence of its documents, divided into V
contiguous shares that fill about the same number of rows. In epoch e, lane (reader) l of V reads
share (l + e) mod V:

    small    d7 d2 d9 | d0 d4 | d8 | d1 d6 d3 d5      every document by itself, in a seeded permutation
             lane 0     lane 1  lane 2   lane 3       (V = 4; d8 is a book)

    large    group 7         group 2         group 0            groups in a seeded permutation
             u0 u1 u2 u3  |  u4 u5 u6     |  u7 u8 u9 u10       lane 0: u0 u1   lane 1: u2 u3 u4   ...

A lane reads one **unit** at a time: at most 64 documents. In a large bucket, a unit is a permuted
run of documents of one group (such as a row group of a parquet file). So each group is read by one
lane (or a few neighbours), unit by unit. A lane may then see one kind of document for as long as a
group lasts, which evens out if it reads many groups. In a small bucket it would not: one lane's
whole epoch could be books, another's notes. So a small bucket is shuffled document by document.

The length of a text is unknown before it is tokenized. So each document counts as the estimated
mean length in its file (`nanochat.sources`), and as at most one row if `crop` will cut it.

A permutation is the argsort of random numbers keyed by (seed, bucket, epoch, group):
`nanochat.common.permutation`.

From flags to documents, the types are:

    StreamSettings      flags that decide rows                                             order
    StreamConfig        they, and what a run derives: the configuration of lanes           order
    PackingSettings     those of it that packers use                                       packing
    OtherStreamConfig   the configuration of any other order, which opens its own stream   stream
    AnyStreamConfig     what both have                                                     stream
    RunOrder            makes the configuration of a run: `LaneOrder`, or any other        run_order
    Stream, AnyStream   the rows of some lanes; what a stream of any order can do          stream
    Order               the documents of one bucket: `SmallOrder` and others               order
    Grouped             what it needs to know of the bucket                                order
"""

import bisect
import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from nanochat.cli import Decides, setting
from nanochat.common import permutation, words
from nanochat.curriculum import Curriculum
from nanochat.packing import LAYOUTS, VERSION, Packer, token_limit

ORDERS = {  # the door for --order: {name: "module:class"}, each a `nanochat.run_order.RunOrder`
    "lanes": "nanochat.run_order:LaneOrder",
    "megatron": "nanochat.integrations.megatron_order:MegatronOrder",
}

# minimum number of units in a lane's share of an epoch, if the share has that many documents
UNITS = 8
UNIT_TOKENS = 1 << 16  # approximate maximum number of tokens in a large bucket's unit
MAX_LANES = 64  # maximum of the default V
MIN_LANES = 8  # minimum of the default V, however small the data is
PLENTY = 10  # minimum ratio of a lane's documents in an epoch to its pending ones


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """rows"""  # the title of these flags in --help

    order: str = setting(
        "lanes",
        "lanes: packed documents | any other: a part of its own, whose flags --order=NAME --help lists",
        choices=ORDERS.keys(),
        decides=Decides.ROWS,
    )
    packing: str = setting(
        "bestfit",
        "how documents are packed into rows",
        choices=LAYOUTS.keys(),
        decides=Decides.ROWS,
    )
    pack: bool = setting(
        True,
        "several documents (or pieces of long ones) per row (default: on); --no-pack: one per row, needs "
        "--packing=binned",
        decides=Decides.ROWS,
    )
    long_docs: str = setting(
        "crop",
        "what to do with the part of a document that does not fit into its row: crop drops it, split trains "
        "on it in a later row",
        choices=("crop", "split"),
        decides=Decides.ROWS,
    )
    overlap: int = setting(
        64,
        "with --long-docs=split: number of tokens repeated as context before the tail of a document",
        decides=Decides.ROWS,
    )
    buffer_size: int = setting(
        128,
        "number of pending short documents per lane, from which bestfit fills rows",
        decides=Decides.ROWS,
    )
    packer_version: int = setting(
        VERSION, "version of the packer", flag=False, decides=Decides.ROWS
    )
    lanes: int = setting(
        -1,
        "V: number of virtual readers; -1: the largest divisor of the rows per step, at most 64, that the "
        "data can feed, or the smallest from 8 on (name fewer for a few books)",
        auto=True,
        least=1,
        decides=Decides.ROWS,
        note="decides each lane's share of the data",
    )


@dataclass(frozen=True)
class StreamConfig:
    """Everything that decides the tokens of a row except the data and tokenizer.

    It is `StreamSettings`, and what a run derives. ValueError for impossible values.
    """

    T: int  # targets in a row; the row holds T + 1 tokens
    V: int = MAX_LANES
    seed: int = 0
    layout: str = StreamSettings.packing
    long_docs: str = StreamSettings.long_docs  # for bestfit
    overlap: int = StreamSettings.overlap  # for split
    buffer_size: int = StreamSettings.buffer_size  # for bestfit
    unit_size: int = 64  # maximum number of documents read and tokenized at once
    pack: bool = StreamSettings.pack  # for binned
    max_epochs: int = 0  # passes over a bucket, 0 = unlimited; a curriculum has its own limits
    curriculum: Curriculum | None = None
    packer_version: int = StreamSettings.packer_version
    # tokens of a document that count when shares are cut; None: what this packing's rows hold. 0: all
    # of them. A fork keeps its parent's, so that its lanes continue in their shares
    share_limit: int | None = None

    def __post_init__(self) -> None:
        for name in ("T", "V", "buffer_size", "unit_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, expected at least 1")
        if self.layout not in LAYOUTS:
            raise ValueError(
                f"--packing: got {self.layout!r}, expected one of {', '.join(LAYOUTS)}"
            )
        if not self.pack and self.layout != "binned":
            raise ValueError(f"--no-pack: needs --packing binned, got --packing {self.layout}")
        if self.long_docs not in ("crop", "split"):
            raise ValueError(f"--long-docs: got {self.long_docs!r}, expected crop or split")
        splits = self.layout == "bestfit" and self.long_docs == "split"
        if splits and not 0 <= self.overlap <= self.T - 2:
            raise ValueError(
                f"--overlap: got {self.overlap}, expected 0 to T - 2 = {self.T - 2}, so that the "
                f"continuation of a document has new tokens"
            )
        if self.packer_version != VERSION:
            raise ValueError(
                f"the run uses packer version {self.packer_version}, but this code has {VERSION}; resume "
                f"with the code that started it, or start a new run (--model-tag)"
            )

    def identity(self) -> dict[str, Any]:
        """All settings as JSON values: with equal identities, the same data gives the same stream."""
        identity = asdict(replace(self, curriculum=None))
        if self.share_limit is None:
            del identity["share_limit"]
        if self.curriculum is not None:
            identity["curriculum"] = self.curriculum.identity()
        return identity

    def epochs(self, bucket: str) -> int:
        """Maximum number of passes over a bucket; 0 = unlimited."""
        if self.curriculum is None:
            return self.max_epochs
        return self.curriculum.epochs(bucket)

    @property
    def framed(self) -> bool:
        """Whether documents are `[BOS] + ids`; otherwise entries are used as they are stored."""
        return LAYOUTS[self.layout].framed

    def new_packer(self) -> Packer:
        """An empty packer of this layout."""
        return LAYOUTS[self.layout].of(self)

    @property
    def tokens_in_shares(self) -> int | None:
        """How many tokens of a document count when shares are cut; None: all of them."""
        if self.share_limit is not None:
            return self.share_limit or None
        return self.new_packer().max_tokens

    def fill_target(self, row: int) -> int:
        """How many documents should be pending before row `row` of a feed is packed.

        The number grows to `buffer_size` over the first rows, so that the first step needs only one
        unit of each lane.
        """
        return min(self.buffer_size, 2 * row)


# ---- how many lanes ------------------------------------------------------------------------------


def fed_lanes(
    documents: np.ndarray,
    means: np.ndarray,
    *,
    T: int,
    buffer_size: int = StreamConfig.buffer_size,
    unit_size: int = StreamConfig.unit_size,
) -> int:
    """How many lanes a bucket can feed.

    Each lane's share of an epoch has at least `PLENTY` times as many documents as the lane keeps
    pending.

    documents, means (G,) int64: the number of documents in each group, and their estimated mean
    length in tokens. A lane reads a unit at a time, and `buffer_size` documents that are shorter
    than a row stay pending. Longer documents stay pending, too, up to the packer's token limit.
    Lengths are assumed to be exponentially distributed with this mean.
    """
    shorter = -np.expm1(-(T + 1) / means)  # the fraction of documents shorter than a row
    num_documents = float(documents.sum())
    num_shorter = float((documents * shorter).sum())
    # tokens, counting at most one row per document
    num_tokens = float((documents * means * shorter).sum())

    # pending documents in a lane, if their number limits them, and if their tokens do
    by_number = (buffer_size + unit_size) * num_documents / num_shorter
    by_tokens = unit_size + token_limit(buffer_size, T + 1) * num_documents / num_tokens
    pending = min(by_number, by_tokens)
    return int(num_documents / (PLENTY * pending))


def default_lanes(rows_per_step: int, *, fed: int = MAX_LANES, world_size: int = 1) -> int:
    """V of a new run: the largest divisor of `rows_per_step` up to 64 and up to `fed`.

    `fed`: see `fed_lanes`. Small data alone never makes V smaller than 8 or than the number of
    processes.
    """
    divisors = [v for v in range(1, MAX_LANES + 1) if rows_per_step % v == 0]
    enough = [v for v in divisors if v >= max(MIN_LANES, world_size)]
    smallest = enough[0] if enough else divisors[-1]
    return max((v for v in enough if v <= fed), default=smallest)


# ---- the order of a bucket -----------------------------------------------------------------------


class Epoch(NamedTuple):
    """The shuffled items of a bucket: its groups, or single documents."""

    items: np.ndarray  # (items,) int64, in the order of the epoch
    places: np.ndarray  # (items + 1,) int64: the place where each begins, then the end
    tokens: np.ndarray  # (items + 1,) int64: tokens before each, then the total


class UnitDocuments(NamedTuple):
    """The documents of a unit, in the order of use."""

    groups: np.ndarray  # (n,) int64: the group of each document
    numbers: np.ndarray  # (n,) int64: its number in the group, from 0
    # the lane will soon read the group's documents up to this number (exclusive); 0 in a small
    # bucket
    keep: int


class Order:
    """The order of one bucket: epochs, shares, units.

    `SmallOrder` shuffles documents, `LargeOrder` groups, and `JoinedOrder` has parts; `open_order`
    decides which. A *place* is a position in an epoch's sequence of documents, counted from 0.
    """

    # a lane reads ahead until it has this many documents more than its packer wants now
    margin: int

    def share(self, lane: int, epoch: int) -> range:
        """The places of an epoch that a lane reads."""
        raise NotImplementedError

    def lane_and_place(self, epoch: int, group: int, number: int) -> tuple[int, int]:
        """(lane, place) at which a document of a group is read in an epoch.

        In a large bucket the place is exact only to within a unit, because the documents of a unit
        are permuted. The place is -1 if a lane had read the document before files joined the bucket.
        """
        raise NotImplementedError

    def unit_end(self, epoch: int, place: int, stop: int) -> int:
        """The place after the unit that begins at a place. `stop`: the end of the lane's share."""
        raise NotImplementedError

    def unit(self, epoch: int, place: int, stop: int) -> UnitDocuments:
        """The unit that begins at a place. `stop`: the end of the lane's share."""
        raise NotImplementedError

    def groups_ahead(self, epoch: int, place: int, stop: int, count: int) -> list[int]:
        """The first groups that a lane reads from a place on, up to the place `stop`: `count` of
        them, or more if it reads them at once."""
        groups: dict[int, None] = {}
        while place < stop and len(groups) < count:
            unit = self.unit(epoch, place, stop)
            groups.update(dict.fromkeys(unit.groups.tolist()))
            place += len(unit.numbers)
        return list(groups)


class ShuffledOrder(Order):
    """An order of shuffled items, which are single documents or groups."""

    def __init__(
        self,
        counts: np.ndarray,
        means: np.ndarray,
        sizes: np.ndarray,
        *,
        bucket: str,
        config: StreamConfig,
    ):
        """Arrays, (items,) int64, describe what is shuffled.

        counts: number of documents of each item. means: their estimated mean length in tokens.
        sizes: number of documents that are read at once.
        """
        self.V = config.V
        self.key = (config.seed, bucket)  # of random numbers
        self.counts = counts
        self.sizes = sizes
        # shares have about equal numbers of tokens, counting only what rows can hold
        limit = config.tokens_in_shares or int(means.max())
        self.means = np.minimum(means, limit)
        # documents that a lane reads at once, if each may be in another group
        in_share = int(counts.sum()) // self.V
        self.batch = max(1, min(config.unit_size // 4, in_share // UNITS))
        self.margin = self.batch // 2
        self._epoch = functools.lru_cache(4)(self._new_epoch)

    def _new_epoch(self, epoch: int) -> Epoch:
        """Shuffle the items."""
        items = permutation(len(self.counts), *self.key, epoch)
        counts = self.counts[items]
        tokens = counts * self.means[items]
        return Epoch(items, places=_running(counts), tokens=_running(tokens))

    def _cut(self, epoch: int, share: int) -> int:
        """The place where a share begins.

        It is the start of the unit that is nearest to the share's first token.
        """
        items, places, tokens = self._epoch(epoch)
        if share == self.V:
            return int(places[-1])
        first_token = int(tokens[-1]) * share // self.V
        # the item that holds this token
        at = int(np.searchsorted(tokens, first_token, side="right")) - 1
        size = int(self.sizes[items[at]])
        unit_tokens = size * int(self.means[items[at]])
        # the unit of the item, rounded
        beyond = first_token - int(tokens[at])
        units = (2 * beyond + unit_tokens) // (2 * unit_tokens)
        return min(int(places[at]) + units * size, int(places[at + 1]))

    def share(self, lane: int, epoch: int) -> range:
        share = (lane + epoch) % self.V
        return range(self._cut(epoch, share), self._cut(epoch, share + 1))

    def _lane_of(self, epoch: int, place: int) -> int:
        """The lane that reads a place of an epoch."""
        beginnings = [self._cut(epoch, share) for share in range(self.V)]
        share = bisect.bisect_right(beginnings, place) - 1
        return (share - epoch) % self.V


class SmallOrder(ShuffledOrder):
    """A small bucket: its documents are shuffled one by one."""

    def __init__(
        self, documents: np.ndarray, means: np.ndarray, *, bucket: str, config: StreamConfig
    ):
        """documents, means (G,) int64: see `fed_lanes`."""
        self.first = _running(documents)  # number of each group's first document
        ones = np.ones(int(self.first[-1]), np.int64)
        super().__init__(ones, np.repeat(means, documents), ones, bucket=bucket, config=config)

    def lane_and_place(self, epoch: int, group: int, number: int) -> tuple[int, int]:
        document = self.first[group] + number
        place = int(np.flatnonzero(self._epoch(epoch).items == document)[0])
        return self._lane_of(epoch, place), place

    def unit_end(self, epoch: int, place: int, stop: int) -> int:
        return min(place + self.batch, stop)

    def unit(self, epoch: int, place: int, stop: int) -> UnitDocuments:
        end = self.unit_end(epoch, place, stop)
        documents = self._epoch(epoch).items[place:end]
        groups = np.searchsorted(self.first, documents, side="right") - 1
        return UnitDocuments(groups, documents - self.first[groups], 0)


class LargeOrder(ShuffledOrder):
    """A large bucket: its groups are shuffled.

    A lane reads a group unit by unit, and each unit's documents are permuted.
    """

    def __init__(
        self, documents: np.ndarray, means: np.ndarray, *, bucket: str, config: StreamConfig
    ):
        """documents, means (G,) int64: see `fed_lanes`."""
        # units have about equal numbers of tokens, and a lane's share has several of them
        unit_tokens = min(UNIT_TOKENS, int(documents @ means) // (UNITS * config.V))
        sizes = np.clip(unit_tokens // means, 1, config.unit_size)
        super().__init__(documents, means, sizes, bucket=bucket, config=config)
        # random numbers of the groups being read
        self._words = functools.lru_cache(config.V)(words)

    def _group_at(self, epoch: int, place: int) -> int:
        """The index of the group that holds a place, among the shuffled ones of the epoch."""
        places = self._epoch(epoch).places
        return int(np.searchsorted(places, place, side="right")) - 1

    def lane_and_place(self, epoch: int, group: int, number: int) -> tuple[int, int]:
        items, places, _ = self._epoch(epoch)
        at = int(np.flatnonzero(items == group)[0])
        place = int(places[at]) + number
        return self._lane_of(epoch, place), place

    def unit_end(self, epoch: int, place: int, stop: int) -> int:
        items, places, _ = self._epoch(epoch)
        at = self._group_at(epoch, place)
        size = int(self.sizes[items[at]])
        return min(place + size, int(places[at + 1]), stop)

    def unit(self, epoch: int, place: int, stop: int) -> UnitDocuments:
        """The unit that begins at a place: a part of one group, in a random order."""
        items, places, _ = self._epoch(epoch)
        # the group, and the lane's part of it
        at = self._group_at(epoch, place)
        group = int(items[at])
        first_place = int(places[at])
        begin = place - first_place
        last = min(int(self.counts[group]), stop - first_place)
        end = self.unit_end(epoch, place, stop) - first_place
        # permute the unit by a random number per document
        drawn = self._words(int(self.counts[group]), *self.key, epoch, group)
        numbers = begin + np.argsort(drawn[begin:end], kind="stable")
        return UnitDocuments(np.full(len(numbers), group), numbers, last)

    def groups_ahead(self, epoch: int, place: int, stop: int, count: int) -> list[int]:
        items, places, _ = self._epoch(epoch)
        at = self._group_at(epoch, place)
        end = int(np.searchsorted(places, stop, side="left"))
        return items[at : min(end, at + count)].tolist()


class Joined(NamedTuple):
    """Files that have joined a bucket, because a fork named more of them."""

    first_group: int  # of these files
    small: bool  # whether their documents are shuffled one by one; see `nanochat.sources.Source`
    begins: list[list[int]]  # for each lane: the epoch and place that it had reached


class JoinedUnits(NamedTuple):
    """The units that a lane reads in an epoch of a `JoinedOrder`, in their order."""

    ends: np.ndarray  # (n,) int64: documents read up to the end of each
    parts: np.ndarray  # (n,) uint8: 0 for the earlier files, 1 for those that joined
    places: np.ndarray  # (n,) int64: where each begins, in the order of its part


class JoinedOrder(Order):
    """A bucket that files have joined, because a fork named more of them.

    Each part keeps an order of its own. A lane continues where it was in the earlier files, so what
    it has read stays read, and reads its share of the new ones in between: the next unit comes from
    either part with a probability proportional to what is left of it.
    """

    def __init__(
        self,
        before: Order,
        added: ShuffledOrder,
        first_group: int,
        begins: Sequence[Sequence[int]],
    ):
        """first_group: number of the first group of the files that joined. begins: for each lane,
        the (epoch, place) that it had reached in the order `before`."""
        self.parts = (before, added)
        self.first_group = first_group
        self.begins = begins
        self.V = added.V
        self.key = added.key
        self.margin = max(before.margin, added.margin)
        self._units = functools.lru_cache(2 * self.V)(self._new_units)

    def _shares(self, lane: int, epoch: int) -> tuple[range, range]:
        """The places of both parts that a lane reads in an epoch."""
        of_before, of_added = (part.share(lane, epoch) for part in self.parts)
        begin_epoch, begin = self.begins[lane]
        if epoch < begin_epoch:  # before the fork
            of_added = range(0)
        elif epoch == begin_epoch:
            of_before = range(begin, of_before.stop)
        return of_before, of_added

    def _lengths(self, epoch: int) -> np.ndarray:
        """(V + 1,) int64: the places before each lane's share, in the order of lanes."""
        lengths = [sum(map(len, self._shares(lane, epoch))) for lane in range(self.V)]
        return _running(np.array(lengths))

    def share(self, lane: int, epoch: int) -> range:
        first, stop = self._lengths(epoch)[lane : lane + 2].tolist()
        return range(first, stop)

    def _lane_of(self, epoch: int, place: int) -> int:
        """The lane that reads a place of an epoch."""
        return int(np.searchsorted(self._lengths(epoch), place, side="right")) - 1

    def _new_units(self, lane: int, epoch: int) -> JoinedUnits:
        """Draw the order in which a lane reads the units of both parts."""
        shares = self._shares(lane, epoch)
        at = [share.start for share in shares]
        drawn = words(sum(map(len, shares)) or 1, *self.key, "join", epoch, lane)
        ends: list[int] = []
        parts: list[int] = []
        places: list[int] = []
        done = 0
        while any(at[part] < shares[part].stop for part in (0, 1)):
            remaining = [share.stop - place for share, place in zip(shares, at)]
            # the first part with the probability remaining[0] / sum(remaining)
            draw = int(drawn[len(ends)])  # below 2^64
            is_second = draw * sum(remaining) >= remaining[0] << 64
            part = 1 if is_second else 0
            end = self.parts[part].unit_end(epoch, at[part], shares[part].stop)
            done += end - at[part]
            ends.append(done)
            parts.append(part)
            places.append(at[part])
            at[part] = end
        return JoinedUnits(np.array(ends), np.array(parts, np.uint8), np.array(places))

    def lane_and_place(self, epoch: int, group: int, number: int) -> tuple[int, int]:
        """The lane and place of a document; place -1 if the lane had read it before the parts were
        joined."""
        part = int(group >= self.first_group)
        first_group = part * self.first_group
        lane, wanted = self.parts[part].lane_and_place(epoch, group - first_group, number)
        units = self._units(lane, epoch)
        earlier = np.flatnonzero((units.parts == part) & (units.places <= wanted))
        if not len(earlier):
            return lane, -1
        unit = int(earlier[-1])  # the document is in it
        begin = int(units.ends[unit - 1]) if unit else 0
        within = wanted - int(units.places[unit])
        return lane, self.share(lane, epoch).start + begin + within

    def _unit_at(self, epoch: int, place: int) -> tuple[int, int]:
        """(lane, index in `_units`) of the unit that begins at a place."""
        lane = self._lane_of(epoch, place)
        num_before = place - self.share(lane, epoch).start
        ends = self._units(lane, epoch).ends
        return lane, int(np.searchsorted(ends, num_before, side="right"))

    def unit_end(self, epoch: int, place: int, stop: int) -> int:
        lane, unit = self._unit_at(epoch, place)
        num_read = int(self._units(lane, epoch).ends[unit])
        return min(self.share(lane, epoch).start + num_read, stop)

    def unit(self, epoch: int, place: int, stop: int) -> UnitDocuments:
        """The unit that begins at a place: one of a part, with the numbers of its groups in the whole."""
        lane, unit = self._unit_at(epoch, place)
        _, parts, places = self._units(lane, epoch)
        part = int(parts[unit])
        # Units of the other part come in between, but the lane will read on here, to the end of its
        # share of this part. So the source keeps what it decodes.
        stop_in_part = self._shares(lane, epoch)[part].stop
        unit_of_part = self.parts[part].unit(epoch, int(places[unit]), stop_in_part)
        groups = unit_of_part.groups + part * self.first_group
        return unit_of_part._replace(groups=groups)


class Grouped(Protocol):
    """What the order of a bucket needs to know of it: a `nanochat.sources.Source`, or its lengths."""

    @property
    def groups(self) -> np.ndarray: ...  # (G,) int64: number of documents in each group
    @property
    def means(self) -> np.ndarray: ...  # (G,) int64: their estimated mean length in tokens
    @property
    def small(self) -> bool: ...  # whether documents are shuffled one by one, but for joined ones
    @property
    def joined(self) -> Sequence[Joined]: ...  # the files that joined it, in the order of forks


def open_order(source: Grouped, *, bucket: str, config: StreamConfig) -> Order:
    """The order of a bucket."""
    documents = source.groups
    means = source.means
    ends = [*(part.first_group for part in source.joined), len(documents)]
    kind = SmallOrder if source.small else LargeOrder
    order: Order = kind(documents[: ends[0]], means[: ends[0]], bucket=bucket, config=config)
    for number, (part, stop) in enumerate(zip(source.joined, ends[1:]), start=1):
        groups = slice(part.first_group, stop)
        kind = SmallOrder if part.small else LargeOrder
        name = f"{bucket} joined {number}"
        added = kind(documents[groups], means[groups], bucket=name, config=config)
        order = JoinedOrder(order, added, part.first_group, part.begins)
    return order


def _running(counts: np.ndarray) -> np.ndarray:
    """(n + 1,) int64: the sums of the first 0, 1, ... n counts."""
    return np.concatenate([[0], np.cumsum(counts)])
