"""Which files are data, what a readable text file is, and how jsonl becomes one."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat import dataset, text, text_kinds
from nanochat.dataset import find_files, list_parquet_files, parquets_iter_batched
from nanochat.text import as_parquet, open_parquet, read_batches
from tests.toy import compressed, write_jsonl


@pytest.fixture(autouse=True)
def base_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))


def parquet_bytes(seed, rows=300, group_size=100, **columns):
    columns = columns or {"text": [f"document {seed}/{i} " + "x" * (i * 7 % 90) for i in range(rows)]}
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, row_group_size=group_size, compression="none", use_dictionary=False,
                   write_page_checksum=True)
    return sink.getvalue()


def write(folder, *names, **kwargs):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(parquet_bytes(name, **kwargs))


def test_the_table_holds_the_published_last_shards():
    assert {d.name: d.val_filename for d in dataset.DATASETS.values() if d.name != "tiny"} == {
        "climbmix": "shard_06542.parquet", "fineweb-edu": "shard_01822.parquet"}


def test_listing_is_sorted_by_relative_path_and_skips_what_is_hidden_or_partial(tmp_path):
    write(tmp_path, "b/x.parquet", "a/z.parquet", "c.parquet", ".tmp/q.parquet", ".h.parquet", "d.parquet.part")
    assert list_parquet_files(tmp_path) == [str(tmp_path / n) for n in ("a/z.parquet", "b/x.parquet", "c.parquet")]
    line = write_jsonl(tmp_path / "a" / "b.jsonl.gz", ["text"])
    assert [path.name for path in find_files(tmp_path)] == ["b.jsonl.gz", "z.parquet", "x.parquet", "c.parquet"]
    assert find_files(line) == [line]
    with pytest.raises(ValueError, match=r"b\.jsonl\.gz: expected a folder or a \.bin file.*--data-format"):
        find_files(line, "shards")


def test_a_known_data_set_without_its_pinned_last_shard_is_refused(tmp_path):
    default = dataset.DEFAULT_DATASET
    write(default.data_dir, "shard_00000.parquet", "shard_00001.parquet")  # no marker: known by its place
    with pytest.raises(FileNotFoundError, match=r"shard_06542.parquet is missing.*run `python -m nanochat.dataset"):
        list_parquet_files()
    write(default.data_dir, "shard_06542.parquet")
    assert list_parquet_files()[-1].endswith("shard_06542.parquet")
    write(default.data_dir, "zzz.parquet")
    with pytest.raises(ValueError, match=r"zzz\.parquet"):
        list_parquet_files()


def test_no_data_and_a_single_file_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.*nanochat\.dataset"):
        list_parquet_files(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError) as e:
        list_parquet_files(tmp_path / "empty")
    assert "--data-dir" not in str(e.value), "no advice points a download at a folder of the user's own"
    write(tmp_path, "only.parquet")
    with pytest.raises(ValueError, match=r"only\.parquet"):
        next(parquets_iter_batched("train", data_dir=tmp_path))


def test_ranks_together_read_every_row_group_of_train_once_and_val_is_the_last_file(tmp_path):
    write(tmp_path, "a.parquet", "b.parquet", "c.parquet", rows=250, group_size=100)
    ranks = [list(parquets_iter_batched("train", r, 2, data_dir=tmp_path)) for r in range(2)]
    assert [[len(g) for g in rank] for rank in ranks] == [[100, 50, 100, 50], [100, 100]]
    texts = sorted(t for rank in ranks for group in rank for t in group)
    alone = [t for group in parquets_iter_batched("train", data_dir=tmp_path) for t in group]
    assert len(texts) == 500 and texts == sorted(alone)
    assert all(t.startswith("document c.parquet") for g in parquets_iter_batched("val", data_dir=tmp_path) for t in g)
    with pytest.raises(ValueError, match="split"):
        next(parquets_iter_batched("test", data_dir=tmp_path))


# ---- text of every kind ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["bomb.jsonl", "bomb.jsonl.gz", "bomb.jsonl.zst"])
def test_a_line_larger_than_any_document_is_told_before_it_fills_the_memory(tmp_path, monkeypatch, name):
    for module in (text, text_kinds):
        monkeypatch.setattr(module, "MAX_DOCUMENT_BYTES", 1000)
    data = b'{"text": "fits"}\n{"text": "' + b"x" * 10_000_000 + b'"}\n'
    (tmp_path / name).write_bytes(compressed(data, (tmp_path / name).suffix))
    with pytest.raises(ValueError, match=rf"{name}: line 2 has more than 1,000 bytes"):
        as_parquet(tmp_path / name)
    (tmp_path / "large.txt").write_bytes(b"x" * 1001)
    with pytest.raises(ValueError, match=r"large\.txt: a document of more than 1,000 bytes"):
        as_parquet(tmp_path / "large.txt")
    assert not list(tmp_path.rglob("*.parquet"))
    pq.write_table(pa.table({"text": ["fits", "x" * 1001]}), tmp_path / "big.parquet")
    with open_parquet(tmp_path / "big.parquet") as file, pytest.raises(ValueError, match=r"big\.parquet.*1,001 bytes"):
        list(read_batches(file, 0, tmp_path / "big.parquet"))
