"""
The door to a stream: lanes, or Megatron's order, which is read and loaded only by who trains in it.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Union

from nanochat.order import StreamConfig
from nanochat.rows import Row
from nanochat.sources import Source
from nanochat.stream import Cursor, Stream

if TYPE_CHECKING:
    from nanochat.blend import SampleConfig, SampleRow, SampleStream

Config = Union[StreamConfig, "SampleConfig"]
AnyStream = Union[Stream, "SampleStream"]
AnyRow = Union[Row, "SampleRow"]


def open_stream(config: Config, sources: Mapping[str, Source], lanes: Sequence[int], *, tokenizer: str,
                cursors: Sequence[Cursor] | None = None, **lanes_only: Any) -> AnyStream:
    """Some lanes of the stream that a configuration describes; `lanes_only`: what else `Stream` takes."""
    if isinstance(config, StreamConfig):
        return Stream(config, sources, lanes, tokenizer=tokenizer, cursors=cursors, **lanes_only)
    from nanochat.blend import SampleStream

    return SampleStream(config, sources, lanes, tokenizer=tokenizer, cursors=cursors)


def check_samples(config: Config, sources: Mapping[str, Source]) -> None:
    """ValueError where data have too few samples for a run in Megatron's order; nothing is shuffled yet."""
    if not isinstance(config, StreamConfig):
        from nanochat.blend import open_samples

        open_samples(config, sources)


def build_indices(config: Config, sources: Mapping[str, Source]) -> None:
    """Have the index cache hold what a stream in Megatron's order will look for there; nothing to do for lanes."""
    if not isinstance(config, StreamConfig):
        open_stream(config, sources, [0], tokenizer="")
