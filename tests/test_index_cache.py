"""The index cache: what is stored is found, mapped; what is torn in any way is computed again; many writers at once."""

import threading
from pathlib import Path

import numpy as np
import pytest

from nanochat import index_cache, megatron
from nanochat.index_cache import cached, load, store
from nanochat.megatron import GPTDataset, GPTDatasetConfig, Split
from tests.test_megatron import Memory

ARRAY = np.arange(5000, dtype=np.uint32)


def test_what_is_stored_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.npy"
    assert load(path) is None
    store(path, ARRAY)
    found = load(path)
    assert isinstance(found, np.memmap) and found.dtype == np.uint32 and (found == ARRAY).all()
    assert not found.flags.writeable and sorted(p.name for p in path.parent.iterdir()) == ["x.npy", "x.npy.json"]
    assert (np.load(path) == ARRAY).all(), "any NumPy reads it"


def damage(path: Path, how: str) -> None:
    record, data = path.with_name("x.npy.json"), bytearray(path.read_bytes())
    if how == "no checksum":
        record.unlink()
    elif how == "torn checksum":
        record.write_bytes(record.read_bytes()[:20])
    elif how == "cut short":
        path.write_bytes(data[:-4])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "a pickle":
        np.save(path, np.array([{}]), allow_pickle=True)
    elif how == "other type":
        np.save(path, ARRAY.view(np.int32))
    elif how == "other shape":
        np.save(path, ARRAY.reshape(2, -1))
    else:
        data[{"header": 2, "first": 128, "last": -1}[how]] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["no checksum", "torn checksum", "cut short", "empty", "a pickle", "other type",
                                 "other shape", "header", "first", "last"])
def test_a_torn_one_is_told_and_built_again(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "x.npy"
    store(path, ARRAY)
    damage(path, how)
    assert load(path) is None and str(path) in caplog.text
    built, = cached([path], lambda: (ARRAY,))
    assert isinstance(built, np.memmap) and (built == ARRAY).all()
    again = load(path)
    assert again is not None and (again == ARRAY).all()


def test_only_what_is_missing_is_written_and_then_nothing_is_built(tmp_path: Path) -> None:
    paths, arrays = [tmp_path / name for name in ("a.npy", "b.npy")], (ARRAY, ARRAY + 1)
    cached(paths, lambda: arrays)
    before = paths[0].stat().st_mtime_ns, paths[0].stat().st_ino
    paths[1].write_bytes(b"torn")
    cached(paths, lambda: arrays)
    assert (paths[0].stat().st_mtime_ns, paths[0].stat().st_ino) == before
    found = cached(paths, lambda: pytest.fail("built"))
    assert all((a == b).all() for a, b in zip(found, arrays))


def test_a_mapped_index_survives_a_writer_that_replaces_it(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    store(path, ARRAY)
    found = load(path)
    store(path, ARRAY)
    path.unlink()
    assert found is not None and (found == ARRAY).all()


def test_many_builders_at_once(tmp_path: Path) -> None:
    """All have the right arrays at every moment, whoever is first; nothing else is left in the folder."""
    paths, barrier = [tmp_path / "a.npy", tmp_path / "b.npy"], threading.Barrier(6)
    wrong, built = [], []

    def build() -> tuple[np.ndarray, ...]:
        built.append(1)
        return ARRAY, ARRAY + 1

    def work() -> None:
        barrier.wait()
        for _ in range(5):
            a, b = cached(paths, build)
            if not ((a == ARRAY).all() and (b == ARRAY + 1).all()):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and built
    assert len(list(tmp_path.iterdir())) == 4 and all(load(path) is not None for path in paths)


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "x.npy"
    assert cached([path], lambda: (ARRAY,))[0] is ARRAY
    assert "not stored" in caplog.text and str(path) in caplog.text


# ---- as data sets use it --------------------------------------------------------------------------------------------

def dataset(folder: Path, *, lengths: list[int], seed: int = 0, num_samples: int = 40) -> GPTDataset:
    config = GPTDatasetConfig(random_seed=seed, sequence_length=4, path_to_cache=str(folder))
    return GPTDataset(Memory(lengths), "p", range(len(lengths)), num_samples, Split.train, config)


def test_data_sets_store_their_shuffles_and_nothing_that_is_sooner_computed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [7, 9, 4] * 4
    fresh = dataset(tmp_path, lengths=lengths)
    expected = fresh.rows(0, len(fresh))[0]
    assert not list(tmp_path.iterdir()), "a shuffle as small as this is sooner done than read"
    monkeypatch.setattr(megatron, "WORTH_STORING", 0)
    dataset(tmp_path, lengths=lengths).rows(0, 1)
    names = sorted(path.name.split("-", 1) for path in tmp_path.glob("*.npy"))
    assert [name for _, name in names] == ["GPTDataset-train-document_index.npy", "GPTDataset-train-shuffle_index.npy"]
    found = dataset(tmp_path, lengths=lengths)
    assert isinstance(found.document_index, np.memmap) and isinstance(found.shuffle_index, np.memmap)
    assert (found.rows(0, len(found))[0] == expected).all()


def test_other_data_have_other_shuffles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key holds everything that the arrays depend on: what another run left is used only if it is the same."""
    monkeypatch.setattr(megatron, "WORTH_STORING", 0)
    seen = set()
    for lengths, seed, num_samples in (([9] * 12, 0, 40), ([9] * 13, 0, 40), ([9] * 12, 1, 40), ([9] * 12, 0, 80),
                                       ([9] * 11 + [13], 0, 40)):
        one = dataset(tmp_path, lengths=lengths, seed=seed, num_samples=num_samples)
        documents, samples = one.order.shuffled()
        assert (one.document_index == documents).all() and (one.shuffle_index == samples).all()
        seen.add((documents.tobytes(), samples.tobytes()))
    assert len(seen) == 5
    assert index_cache.load(next(tmp_path.glob("*shuffle*.npy"))) is not None
