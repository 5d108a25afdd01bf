"""The rows that trained on a document, compared with a table of all rows of a small stream."""

from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.curriculum import Curriculum, Phase
from nanochat.find import DocumentPlace, History, documents_with, find_document
from nanochat.order import StreamConfig, open_order
from nanochat.sources import open_source, scan
from nanochat.stream import Stream
from tests.toy import BOS, ByteTokenizer, examples, json_copy, numbered, write_parquet

STEPS = 12


@st.composite
def cases(draw):
    """(settings of a stream, its sources, rows of each lane in a step, steps whose cursors are
    kept)."""
    buckets = {}
    for k, name in enumerate(["a", "b"][: draw(st.integers(1, 2))]):
        lengths = draw(
            st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=9), min_size=2, max_size=6)
        )
        buckets[name] = numbered(lengths, first=1000 + 100_000 * k, small=draw(st.booleans()))
    curriculum = None
    if len(buckets) == 2:
        curriculum = Curriculum([Phase(10**6, {"a": 0.5, "b": 0.5})])
    layout = draw(st.sampled_from(["crop", "split", "concat"]))
    config = StreamConfig(
        T=16,
        V=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 9)),
        buffer_size=draw(st.integers(1, 12)),
        layout="concat" if layout == "concat" else "bestfit",
        long_docs="split" if layout == "split" else "crop",
        overlap=4,
        unit_size=4,
        max_epochs=0,
        curriculum=curriculum,
    )
    return (
        config,
        buckets,
        draw(st.integers(1, 2)),
        draw(st.sets(st.integers(1, STEPS), max_size=4)),
    )


def trained_run(case, drop_dry):
    """(its history, {token: {(step, row)}}, positions at the end) of a run."""
    config, sources, n, kept = case
    saves = {0: None}
    table = {}
    trained = 0
    n_rows = n * config.V
    with closing(
        Stream(config, sources, range(config.V), tokenizer="t", num_threads=0, drop_dry=drop_dry)
    ) as stream:
        positions = positions_of(stream)
        # fewer: a bucket is dry
        while trained < STEPS and len(rows := stream.next_rows(n)) == n_rows:
            for number, row in enumerate(rows):
                for token in row.tokens[row.tokens != BOS].tolist():
                    table.setdefault(token, set()).add((trained, number))
            trained += 1
            positions = positions_of(stream)
            if trained in kept:
                saves[trained] = json_copy(stream.cursors())
    history = History(
        config,
        sources,
        "t",
        n,
        sorted(saves),
        lambda step: nearest(saves, step),
        trained,
        10 * STEPS,
    )
    return history, table, positions


@settings(max_examples=examples(0.5), deadline=None, derandomize=True, database=None)
@given(cases(), st.data())
def test_law_exactly_the_uses_of_a_document_are_found(case, data):
    config, sources, _, _ = case
    history, table, positions = trained_run(case, data.draw(st.booleans()))
    trained = history.trained
    bucket = data.draw(st.sampled_from(sorted(sources)))
    group = data.draw(st.integers(0, len(sources[bucket].groups) - 1))
    number = data.draw(st.integers(0, int(sources[bucket].groups[group]) - 1))
    tokens = [BOS, *sources[bucket].documents[group][number].tolist()]
    passes = list(history.passes(DocumentPlace(bucket, "x:0", 0, group, number)))
    uses = [use for found in passes for use in found.uses]
    expected = {place for token in tokens[1:] for place in table.get(token, ())}
    named = {
        (use.step, use.row)
        for use in uses
        if any(token != BOS for token in tokens[use.start : use.stop])
    }
    assert named == expected
    for use in uses:
        assert all(
            (use.step, use.row) in table[token]
            for token in tokens[use.start : use.stop]
            if token != BOS
        )
    assert [found.epoch for found in passes] == list(range(len(passes)))
    for found in passes:
        epoch, place, waiting = positions[bucket, found.lane]
        assert found.pending == ((found.epoch, group, number) in waiting)
        read = (epoch, place) > (found.epoch, history_place(history, bucket, found, group, number))
        assert (found.expected is None) == read and (read or found.expected >= trained)
    assert passes[-1].expected is not None or config.epochs(bucket)


@settings(max_examples=examples(0.5), deadline=None, derandomize=True, database=None)
@given(cases(), st.booleans(), st.data())
def test_law_the_uses_of_many_documents_are_those_of_each(case, drop_dry, data):
    _, sources, _, _ = case
    history, _, _ = trained_run(case, drop_dry)
    places = [
        DocumentPlace(bucket, "x:0", 0, group, number)
        for bucket, source in sources.items()
        for group, count in enumerate(source.groups.tolist())
        for number in range(count)
    ]
    chosen = data.draw(st.lists(st.sampled_from(places), max_size=12, unique=True))
    found = history.uses_of(chosen)
    assert [*found] == chosen
    for document, uses in found.items():
        passes = history.passes(document)
        of_each = [use for one_pass in passes for use in one_pass.uses]
        assert sorted(uses) == sorted(of_each)


def test_only_lanes_that_used_a_document_are_packed_again(monkeypatch):
    config = StreamConfig(T=16, V=4, layout="concat", buffer_size=4, unit_size=4, max_epochs=0)
    source = numbered([[30] * 50] * 8, small=False)
    case = config, {"a": source}, 1, {3, 6, 9, STEPS}
    history, _, _ = trained_run(case, False)
    packed = []
    real = Stream.next_rows
    monkeypatch.setattr(
        Stream, "next_rows", lambda self, n: packed.append(self.lanes) or real(self, n)
    )
    places = [DocumentPlace("a", "x:0", 0, group, 7) for group in range(8)]
    used = next(place for place, uses in history.uses_of(places).items() if uses)
    packed.clear()
    [uses] = history.uses_of([used]).values()
    assert uses and set(map(tuple, packed)) == {(uses[0].lane,)} and len(packed) < STEPS


def positions_of(stream):
    """{(bucket, lane): (epoch, place, pending documents)}."""
    return {
        (bucket, lane): (feed.epoch, feed.place, set(feed.packer.waiting()))
        for bucket, feeds in stream.feeds.items()
        for lane, feed in feeds.items()
    }


def nearest(saves, step):
    """The newest save at or before a step."""
    saved = max(s for s in saves if s <= step)
    return saved, saves[saved]


def history_place(history, bucket, found, group, number):
    source = history.sources[bucket]
    order = open_order(source, bucket=bucket, config=history.config)
    return order.lane_and_place(found.epoch, group, number)[1]


def test_a_document_has_the_name_of_its_file_and_its_number_in_it(tmp_path):
    write_parquet(tmp_path / "a.parquet", ["one", "two", "three"], group_size=2)
    write_parquet(tmp_path / "b.parquet", ["four", "five two"], group_size=1)
    source = open_source(scan(tmp_path), ByteTokenizer())
    data = {"train": {}, "val": {"web": source}}
    assert find_document(data, "a.parquet:2") == ("val", ("web", "a.parquet:2", 2, 1, 0))
    assert find_document(data, "b.parquet:1") == ("val", ("web", "b.parquet:1", 1, 3, 0))
    assert [found.name for found in documents_with(source, "web", "two")] == [
        "a.parquet:1",
        "b.parquet:1",
    ]
    for name, words in (
        ("a.parquet:3", "documents 0 to 2"),
        ("c.parquet:0", "no file c.parquet; its files are a.pa"),
        ("a.parquet", "expected FILE:DOC"),
        ("a.parquet:-1", "expected FILE:DOC"),
    ):
        with pytest.raises(ValueError, match=words):
            find_document(data, name)


@pytest.mark.parametrize(
    "file, closest",
    [("shard_0002.parquet", "shard_00002.parquet"), ("shard_00009.parquet", "shard_00000.parquet")],
)
def test_an_unknown_file_gets_the_closest_name_and_of_equally_close_ones_the_first(file, closest):
    """Regression: training files came before a validation file with a closer name."""

    class Files:
        def __init__(self, *numbers):
            names = [f"shard_{number:05d}.parquet" for number in numbers]
            self.manifest = {"files": [{"name": name, "groups": [1]} for name in names]}

    data = {"train": {"web": Files(0, 1)}, "validation": {"web": Files(2)}}
    with pytest.raises(ValueError, match=f"did you mean {closest}"):
        find_document(data, f"{file}:12")


@pytest.mark.parametrize("mixed", [False, True])
def test_an_unread_document_is_expected_near_the_step_of_its_later_use(mixed):
    curriculum = Curriculum([Phase(10**6, {"a": 0.5, "b": 0.5})]) if mixed else None
    config = StreamConfig(
        T=16, V=2, layout="concat", buffer_size=4, unit_size=4, max_epochs=0, curriculum=curriculum
    )
    sources = {"a": numbered([[30] * 50] * 8), "b": numbered([[30] * 50] * 8, first=100_000)}
    early, late = (
        History(config, sources, "t", 2, [0], lambda step: (0, None), trained, 900)
        for trained in (40, 400 * (1 + mixed))
    )
    for group in range(8):
        document = DocumentPlace("a", "x:0", 0, group, 7)
        step = next(late.passes(document)).uses[0].step
        first = next(early.passes(document))
        assert first.uses or first.expected == pytest.approx(step, rel=0.1, abs=5)
