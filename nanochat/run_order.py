"""The order in which a run reads its data, as `order.ORDERS` names it: what its settings mean, and
which files it pins.

    --order=lanes   packed documents, each lane its own share of them (nanochat/order.py, nanochat/stream.py)
    --order=NAME    an order of its own, in nanochat/integrations/ or in a module that you add

A `RunOrder` turns the settings of a run into plain values for the stream. To add an order, write
such a class and a configuration whose `open` returns an `AnyStream`, and name the class in
`order.ORDERS`. An order with settings of its own has a subclass of `config.Settings`, whose flags
exist only with this order.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol

from nanochat.common import open_door
from nanochat.config import Settings
from nanochat.order import ORDERS, StreamConfig
from nanochat.pins import Manifests, leave_out
from nanochat.schedule import Horizon
from nanochat.sources import Source
from nanochat.splits import pin_files
from nanochat.stream import Cursor, OtherStreamConfig
from nanochat.text import Selection


class Reading(NamedTuple):
    """How much a run reads of a bucket, in tokens."""

    trained: int  # that it trains on, from its first step to its last
    tokens: int  # that the bucket has

    @property
    def passes(self) -> float:
        return self.trained / self.tokens


class RunOrder(Protocol):
    """What the rest of a run needs to know about its order."""

    # what its settings are: `Settings`, or a class that adds its own
    settings: ClassVar[type[Settings]]
    # whether each lane has a share of the data, so that data limits the number of lanes
    feeds_lanes: ClassVar[bool]
    has_plan: ClassVar[bool]  # whether a plan can say how much of each bucket the run reads

    def stream_config(self, settings: Settings) -> StreamConfig | OtherStreamConfig:
        """What decides the rows of a run, from its resolved settings."""

    def settle(
        self, settings: Settings, horizon: Horizon, cursors: Sequence[Cursor] | None, steps: int
    ) -> Settings:
        """The settings with those filled in that depend on the run's length. `cursors`: where its
        data continues. `steps`: number of steps that the run has yet to read. ValueError if it
        cannot be as long as that."""

    def pin(self, settings: Settings) -> Manifests:
        """The manifests of a new run's training and validation files. FileNotFoundError or
        ValueError names a file that is missing or unusable."""

    def check(self, settings: Settings, sources: Mapping[str, Source]) -> None:
        """ValueError if the training data does not fit the settings. Writes nothing."""

    def shuffle(self, settings: Settings, sources: Mapping[str, Source]) -> None:
        """Compute what all ranks read, once, before they do. Called on rank 0."""

    def reads(
        self,
        settings: Settings,
        sources: Mapping[str, Source],
        cursors: Sequence[Cursor] | None,
        steps: int,
    ) -> Mapping[str, Reading]:
        """How much the run reads of each bucket, for an order without a plan; see `settle`. {} if
        that is not known."""


def order_of(settings: Settings) -> RunOrder:
    """The order that --order names."""
    return open_door(ORDERS[settings.order])()


def stream_config(settings: Settings) -> StreamConfig | OtherStreamConfig:
    """The part of a run's resolved settings that decides its rows, such as a `StreamConfig`."""
    return order_of(settings).stream_config(settings)


class LaneOrder:
    """Documents, packed by lanes: each lane reads its own share of every epoch."""

    settings = Settings
    feeds_lanes = has_plan = True

    def stream_config(self, settings: Settings) -> StreamConfig:
        """See `RunOrder.stream_config`."""
        return StreamConfig(
            T=settings.max_seq_len,
            V=settings.lanes,
            seed=settings.order_seed,
            layout=settings.packing,
            long_docs=settings.long_docs,
            overlap=settings.overlap,
            buffer_size=settings.buffer_size,
            pack=settings.pack,
            packer_version=settings.packer_version,
            curriculum=settings.mix,
            share_limit=(settings.fork or {}).get("share_limit"),
        )

    def settle(
        self, settings: Settings, horizon: Horizon, cursors: Sequence[Cursor] | None, steps: int
    ) -> Settings:
        """See `RunOrder.settle`: no setting depends on the length."""
        return settings

    def pin(self, settings: Settings) -> Manifests:
        """See `RunOrder.pin`. Adds the documents that --without-documents lists."""
        selection = Selection.of(settings.to_json())
        manifests = pin_files(
            settings.data_path or "",
            settings.val_path,
            data_format=settings.data_format,
            mix=settings.mix,
            selection=selection,
        )
        if settings.without_documents is not None:
            manifests["train"] = leave_out(manifests["train"], settings.without_documents)
        return manifests

    def check(self, settings: Settings, sources: Mapping[str, Source]) -> None:
        """See `RunOrder.check`."""
        if settings.mix is not None:
            settings.mix.check_buckets(sources)

    def shuffle(self, settings: Settings, sources: Mapping[str, Source]) -> None:
        """See `RunOrder.shuffle`: each lane shuffles for itself."""

    def reads(
        self,
        settings: Settings,
        sources: Mapping[str, Source],
        cursors: Sequence[Cursor] | None,
        steps: int,
    ) -> Mapping[str, Reading]:
        """See `RunOrder.reads`: the plan says it."""
        return {}
