"""Sources: damage inside files, pages and columns of parquet, what stays in memory, other text."""

import gzip
import json
import logging
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat import parquet_source, prepare, sources, text, text_kinds
from nanochat.order import StreamConfig, open_order
from nanochat.parquet_source import ParquetSource
from nanochat.pins import fingerprint
from nanochat.sources import check, scan
from tests.spec.test_sources import EXPECTED, GROUP, grouped, open_source, texts_of
from tests.token_files import patch
from tests.toy import ByteTokenizer, compressed, some_texts, write_jsonl, write_parquet


@pytest.fixture(autouse=True)
def small_groups(base_dir, monkeypatch):
    """Converted files go to the test's own folder, in small row groups."""
    monkeypatch.setattr(prepare, "GROUP_DOCUMENTS", GROUP)


@pytest.fixture
def folder(tmp_path):
    for i in range(3):
        write_parquet(tmp_path / "data" / f"s{i}.parquet", some_texts(20, seed=i), GROUP)
    return tmp_path / "data"


def all_texts(source, unit_size=4):
    """[texts of each group], read unit after unit, with `keep` at the end of the group."""
    return [
        [
            text
            for at in range(0, n, unit_size)
            for text in texts_of(source, g, range(at, min(at + unit_size, n)), n)
        ]
        for g, n in enumerate(source.groups.tolist())
    ]


# ---- refused files -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "column, how, what",
    [
        (
            pa.array([b"fine", b"\xed\xa0\x80"], pa.binary()).cast(pa.string(), safe=False),
            {},
            "row group 0.*UTF-?8",
        ),
        (
            some_texts(200),
            {"compression": "none", "use_dictionary": False, "write_page_checksum": True},
            "",
        ),
    ],
)
def test_damage_that_the_footer_does_not_show_is_an_error_when_it_is_read(
    tmp_path, column, how, what
):
    """A surrogate in UTF-8, a corrupt page."""
    path = tmp_path / "bad.parquet"
    pq.write_table(pa.table({"text": column}), path, **how)
    pq.write_table(pa.table({"text": ["whole"]}), tmp_path / "a.parquet")
    manifest = scan(tmp_path)
    if not what:
        patch(path, 40, bytes(360))
    assert check(manifest) == manifest, "the case: size and footer are unchanged"
    with pytest.raises(ValueError, match=rf"bad\.parquet: .*{what}"):
        all_texts(ParquetSource(manifest, ByteTokenizer()))


def test_columns_before_text_do_not_confuse_the_count_of_nulls(tmp_path):
    """Parquet numbers leaf columns, so a struct in front of `text` shifts its number."""
    table = pa.table(
        {"meta": pa.array([{"a": None, "b": None}, {"a": 1, "b": None}]), "text": ["x", "y"]}
    )
    pq.write_table(table, tmp_path / "s.parquet")
    assert all_texts(open_source(tmp_path)) == [["x", "y"]]
    pq.write_table(table.set_column(1, "text", [["x", None]]), tmp_path / "s.parquet")
    assert text.read_footer(tmp_path / "s.parquet").nulls == 1


# ---- parquet -------------------------------------------------------------------------------------


def test_large_strings_many_pages_other_columns_and_empty_groups_read_the_same(tmp_path):
    texts = some_texts(300)
    table = pa.table({"id": list(range(300)), "text": pa.array(texts, pa.large_string())})
    pq.write_table(table, tmp_path / "large.parquet", row_group_size=100)
    pq.write_table(
        table,
        tmp_path / "pages.parquet",
        row_group_size=100,
        data_page_size=256,
        write_batch_size=3,
        compression="none",
        dictionary_pagesize_limit=512,
    )
    with pq.ParquetWriter(tmp_path / "gaps.parquet", table.schema) as writer:
        for start in (0, 100, 100, 200):
            writer.write_table(table.slice(start, 100))
            writer.write_table(table.slice(0, 0))
    assert pa.types.is_large_string(pq.read_schema(tmp_path / "large.parquet").field("text").type)
    expected = grouped(texts, 100)
    assert all_texts(open_source(tmp_path / "large.parquet"), 7) == expected
    assert all_texts(open_source(tmp_path / "pages.parquet"), 7) == expected
    gaps = open_source(tmp_path / "gaps.parquet")
    assert [t for t in all_texts(gaps, 7) if t] == [
        expected[0],
        expected[1],
        expected[1],
        expected[2],
    ]


@pytest.fixture
def decoded(monkeypatch):
    """The groups that are decoded."""
    calls = []
    monkeypatch.setattr(
        parquet_source,
        "read_batches",
        lambda *args, **kwargs: calls.append(args[1:]) or text.read_batches(*args, **kwargs),
    )
    return calls


@pytest.mark.parametrize("unit_size", [1, 2, 3, 8])
def test_a_group_of_a_large_bucket_is_decoded_once_if_reads_say_what_to_keep(
    folder, monkeypatch, decoded, unit_size
):
    monkeypatch.setattr(sources, "SMALL_TOKENS", -1)
    source = open_source(folder)
    assert all_texts(source, unit_size) == EXPECTED
    assert len(decoded) == len(set(decoded)) == len(source.groups)
    assert not source._kept, "units that were read are not kept"
    texts_of(source, 0, [0])
    assert len(decoded) == len(source.groups) + 1 and not source._kept, (
        "nor are units that no read asked to keep"
    )


def test_metadata_of_other_programs_are_not_taken_for_ours(tmp_path):
    """Regression: "invalid literal for int()", without the name of the file."""
    column = pa.table({"text": ["a document", "another one"]})
    sizes = []
    foreign = {"text_bytes": "many"}, {"prepared_from": "raw"}
    for name, metadata in enumerate(({}, *foreign)):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(column.replace_schema_metadata(metadata), path)
        sizes.append(text.read_footer(path).text_bytes)
    assert len({*sizes}) == 1 and sizes[0] > 0


def test_the_footer_of_a_file_is_parsed_once_for_all_its_groups(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", some_texts(20), 1)
    source = open_source(path.parent)
    parsed = []
    real = pq.ParquetFile

    def spy(path, *, metadata=None, **more):
        parsed.append(metadata is None)
        return real(path, metadata=metadata, **more)

    monkeypatch.setattr(pq, "ParquetFile", spy)
    assert all_texts(source) == [[text] for text in some_texts(20)]
    assert len(parsed) > 20 and sum(parsed) == 1


def test_a_small_bucket_is_decoded_once_in_any_order_of_reads(folder, decoded):
    source = open_source(folder)
    order = [(g, number) for g, group in enumerate(EXPECTED) for number in range(len(group))] * 3
    random.Random(0).shuffle(order)
    with ThreadPoolExecutor(4) as pool:
        for (group, number), [document] in zip(
            order, pool.map(lambda at: texts_of(source, at[0], [at[1]]), order)
        ):
            assert document == EXPECTED[group][number]
    assert len(decoded) == len(set(decoded)) == len(source.groups)


def joined_source(folder, num_files):
    """The files of a folder, of which all but the first `num_files` joined the bucket in a fork."""
    manifest = scan(folder)
    manifest["joined"] = [{"files": num_files, "begins": [[0, 0]]}]
    return ParquetSource(manifest, ByteTokenizer())


def read_epoch(source, unit_size=2):
    """The number of documents that a single lane reads in an epoch, unit after unit."""
    config = StreamConfig(T=16, V=1, unit_size=unit_size)
    order = open_order(source, bucket="b", config=config)
    share = order.share(0, 0)
    place = share.start
    while place < share.stop:
        unit = order.unit(0, place, share.stop)
        for group in np.unique(unit.groups).tolist():
            source.read(group, unit.numbers[unit.groups == group], unit.keep)
        place += len(unit.numbers)
    return len(share)


@pytest.mark.parametrize("small, joined_small", [(False, False), (False, True), (True, False)])
def test_a_group_is_decoded_once_also_if_files_joined_its_bucket(
    tmp_path, monkeypatch, decoded, small, joined_small
):
    """Regression: a group was decoded once per unit, and files that joined a small bucket stayed in
    memory."""
    monkeypatch.setattr(sources, "SMALL_DOCUMENTS", 30)
    for name, is_small in (("a", small), ("b", joined_small)):
        texts = some_texts(20 if is_small else 40)
        write_parquet(tmp_path / "data" / f"{name}.parquet", texts, GROUP)
    source = joined_source(tmp_path / "data", 1)
    assert (source.small, source.joined[0].small) == (small, joined_small), "the case"
    assert read_epoch(source) == source.groups.sum()
    assert len(decoded) == len(set(decoded)) == len(source.groups)
    in_memory = source._groups.cache_info().currsize
    assert in_memory == sum(map(source.is_small, range(len(source.groups))))


# ---- other text ----------------------------------------------------------------------------------


def test_a_txt_file_is_a_document_among_other_kinds_and_files_are_converted_again_when_they_changed(
    tmp_path,
):
    documents = some_texts(5, seed=4)
    write_jsonl(tmp_path / "data" / "a.jsonl.zst", documents[:2])
    for i, document in enumerate(documents[2:]):
        (tmp_path / "data" / f"b{i}.txt").write_bytes(
            b"\xef\xbb\xbf" * (i == 1) + document.encode()
        )
    source = open_source(tmp_path / "data")
    assert all_texts(source) == [documents[:2], *([document] for document in documents[2:])]
    assert source.locate(2) == ("b1.txt", 0)
    stamps = [path.stat().st_mtime_ns for path in source.paths]
    manifest = scan(tmp_path / "data")
    assert [path.stat().st_mtime_ns for path in source.paths] == stamps, "not converted again"
    (tmp_path / "data" / "b1.txt").write_text("another")
    assert all_texts(open_source(tmp_path / "data"))[2] == ["another"]
    with pytest.raises(ValueError, match=r"b1\.txt: it has changed since this run began"):
        check(manifest)


@pytest.mark.parametrize("field", ["body", "meta.body"])
def test_the_text_field_may_have_another_name_even_inside_a_struct(tmp_path, field):
    """Each kind gives the same documents and pins. Another field of the same file is different
    data."""
    documents = ["one", "two", "three"]
    rows = [
        {"text": "other", "pad": 1, "body": t, "meta": {"n": 1, "body": t, "tail": "x"}}
        for t in documents
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    manifests = [
        scan(tmp_path / name, selection=text.Selection(field)) for name in ("a.parquet", "b.jsonl")
    ]
    opened = [ParquetSource(manifest, ByteTokenizer()) for manifest in manifests]
    assert [all_texts(source) for source in opened] == [[["one", "two"], ["three"]], [documents]]
    assert [check(manifest) for manifest in manifests] == manifests
    assert all_texts(open_source(tmp_path / "b.jsonl")) == [["other"] * 3], "its own conversion"
    assert fingerprint(scan(tmp_path / "a.parquet")) != opened[0].fingerprint
    for name in ("a.parquet", "b.jsonl"):
        with pytest.raises(ValueError, match=rf"{name}: .*`meta\.none`.*--text-field"):
            scan(tmp_path / name, selection=text.Selection("meta.none"))
    pq.write_table(pa.table({"meta": [{"body": "x"}, None]}), tmp_path / "null.parquet")
    manifest = scan(tmp_path / "null.parquet", selection=text.Selection("meta.body"))
    assert all_texts(ParquetSource(manifest, ByteTokenizer())) == [["x"]]


BROKEN = [
    b'{"text": "one"}',
    b"{broken",
    b'{"text": "two"}',
    b'{"text": "\xff"}',
    b'{"text": "three"}',
]


def test_broken_jsonl_lines_are_reported_once_per_launch_or_fatal_with_strict(
    tmp_path, base_dir, caplog
):
    path, strict = tmp_path / "s.jsonl.gz", text.Selection(strict=True)
    path.write_bytes(gzip.compress(b"\n".join(BROKEN)))

    def refused(read):
        with pytest.raises(ValueError, match=r"s\.jsonl\.gz: line 2: not JSON.*--strict"):
            read()

    refused(lambda: scan(path, selection=strict))
    assert not list(base_dir.rglob("*.parquet")) and not list(base_dir.rglob("*.tmp")), (
        "nothing half-written"
    )
    for _ in range(2):
        caplog.clear()
        text_kinds.warn_once.cache_clear()  # as in a new process
        with caplog.at_level(logging.WARNING):
            assert [all_texts(open_source(path)) for _ in range(2)] == [
                [["one", "two", "three"]]
            ] * 2
        assert (
            caplog.text.count("s.jsonl.gz: 2 broken lines skipped; the first is line 2: not JSON")
            == 1
        )
    manifest = scan(path)
    refused(lambda: scan(path, selection=strict))  # even after a conversion
    refused(lambda: check(manifest, strict=True))
    path.write_bytes(gzip.compress(BROKEN[0]))
    assert scan(path, selection=strict) == scan(path), "strict changes nothing else"


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("s.jsonl.gz", b'{"text": "plain"}\n', "truncated or not a gzip file"),
        (
            "s.jsonl.gz",
            compressed(b'{"text": "a"}\n' * 99, ".gz")[:-9],
            "truncated or not a gzip file",
        ),
        ("s.jsonl.zst", b'{"text": "plain"}\n', "truncated or not a zstd file"),
        (
            "s.jsonl.zst",
            compressed(b'{"text": "a"}\n' * 99, ".zst")[:-9],
            "truncated or not a zstd file",
        ),
        ("s.txt", "caf\u00e9".encode("latin-1"), "not UTF-8"),
        ("s.txt", "wide".encode("utf-16"), "not UTF-8"),
    ],
)
def test_unusable_text_is_named_and_leaves_no_files(tmp_path, base_dir, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{tmp_path}/{name}: .*{message}"):
        scan(tmp_path / name)
    assert not list(base_dir.rglob("*.parquet")) and not list(base_dir.rglob("*.tmp"))
