"""Megatron's samples equal those of megatron-core (golden) and of a plain loop (hypothesis); the
cache of indices detects corrupt files; bad input is one sentence."""

import json
import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.integrations import (
    megatron,
    megatron_api,
    megatron_files,
    megatron_order,
    megatron_tables,
)
from nanochat.integrations.megatron_api import (
    BlendedMegatronDatasetBuilder,
    BlendedMegatronDatasetConfig,
    DType,
    GPTDataset,
    GPTDatasetConfig,
    IndexedDataset,
    IndexedDatasetBuilder,
    MockGPTDataset,
    ObjectStorageConfig,
    Split,
    get_bin_path,
    get_blend_from_list,
    get_idx_path,
    is_object_storage_path,
    pad_id,
    split_matrix,
)
from nanochat.integrations.megatron_tables import cached, plan_order
from nanochat.tokenizer import get_tokenizer
from nanochat.tokens import open_tokens
from tests.token_files import write_megatron
from tests.toy import examples

OWN = Path(__file__).parents[1] / "golden" / "megatron"
SHARED = Path(__file__).parents[3] / "shared" / "golden" / "megatron"
OWN_CASES = json.loads((OWN / "golden.json").read_text())["cases"]
EOD = 3


class Memory:
    """An `IndexedDataset` in memory: sequence i is ids 1000 i, 1000 i + 1, ..., or a part of the
    given ids."""

    dtype = np.dtype(np.int32)

    def __init__(self, lengths, ids=None):
        self.sequence_lengths = np.array(lengths, np.int32)
        self.begins = np.cumsum([0, *lengths])
        numbers = [np.arange(n) + 1000 * i for i, n in enumerate(lengths)]
        self.ids = (
            np.concatenate([np.zeros(0, np.int32), *numbers]).astype(np.int32)
            if ids is None
            else ids
        )

    def get(self, sequence, offset, length):
        begin = self.begins[sequence] + offset
        assert 0 <= offset <= offset + length <= self.sequence_lengths[sequence]
        return self.ids[begin : begin + length]


def rows_of(dataset, n):
    """(ids, live targets) of the first rows."""
    samples = [dataset[i] for i in range(n)]
    return [[*s["tokens"].tolist(), int(s["labels"][-1])] for s in samples], [
        s["loss_mask"].tolist() for s in samples
    ]


def make(dataset, num_samples=None, *, documents=None, split=Split.train, T=8, seed=0, **options):
    tokenizer = SimpleNamespace(eod=EOD, **options.pop("tokenizer", {}))
    config = GPTDatasetConfig(random_seed=seed, sequence_length=T, tokenizer=tokenizer, **options)
    return GPTDataset(
        dataset, "p", documents or range(len(dataset.sequence_lengths)), num_samples, split, config
    )


# ---- golden --------------------------------------------------------------------------------------


def equal(array, dtype, values):
    return np.asarray(array).dtype == dtype and np.asarray(array).tolist() == values


@pytest.mark.parametrize("case", OWN_CASES)
def test_small_cases_of_megatron_core(case):
    about = OWN_CASES[case]

    def placed(blend):
        return None if blend is None else ([str(OWN / name) for name in blend[0]], blend[1])

    settings = dict(about["settings"])
    if "blend" in settings:
        settings["blend"] = placed(settings["blend"])
    else:
        settings["blend_per_split"] = [placed(blend) for blend in settings["blend_per_split"]]
    config = GPTDatasetConfig(tokenizer=SimpleNamespace(eod=0), **settings)
    built = BlendedMegatronDatasetBuilder(GPTDataset, about["sizes"], lambda: True, config).build()
    for dataset, expected in zip(built, about["splits"], strict=True):
        assert (dataset is None) == (expected is None)
        if expected:
            compare(dataset, expected)


def compare(dataset, expected):
    indices = [name for name in expected if name.endswith("_index")]
    assert len(indices) in (2, 3)
    for name in indices:
        assert equal(getattr(dataset, name), *expected[name]), name
    for part, other in zip(dataset.datasets, expected["datasets"]):
        compare(part, other)
    for i, sample in enumerate(expected["samples"]):
        assert {
            name: np.asarray(value).astype(int).tolist() for name, value in dataset[i].items()
        } == sample
    types = {name: str(value.dtype) for name, value in dataset[0].items() if name != "dataset_id"}
    expected = {
        "tokens": "torch.int64",
        "labels": "torch.int64",
        "loss_mask": "torch.float32",
        "position_ids": "torch.int64",
        "attention_mask": "torch.bool",
    }
    assert types == {name: expected[name] for name in types}


@pytest.mark.skipif(not SHARED.exists(), reason=f"no golden data in {SHARED}")
@pytest.mark.parametrize("case", ["single", "single_1epoch", "blend"])
def test_shared_golden_cases(case):
    golden = json.loads((SHARED / "golden.json").read_text())
    about = golden["results"][case]
    blend = [str(SHARED / name) for name in about["blend"][0]], about["blend"][1]
    config = GPTDatasetConfig(
        random_seed=1234, sequence_length=128, blend=blend, split=about["split"]
    )
    assert [list(part) for part in config.split_matrix if part] == about["split_matrix"]
    built = [
        *BlendedMegatronDatasetBuilder(GPTDataset, about["sizes"], lambda: True, config).build()
    ]
    for dataset, expected in zip(built, about["splits"].values(), strict=True):
        if "datasets" in expected:
            assert equal(dataset.dataset_index, "int16", expected["dataset_index"])
            assert equal(dataset.dataset_sample_index, "int64", expected["dataset_sample_index"])
        for part, indices in zip(
            dataset.datasets, expected.get("datasets", [expected]), strict=True
        ):
            assert (len(part), part.num_samples) == (
                indices["length"],
                indices["num_samples_asked"],
            )
            for name, dtype in indices["dtypes"].items():
                assert equal(getattr(part, name), dtype, indices[name])
        assert rows_of(dataset, len(expected["first64"]))[0] == expected["first64"]


# ---- a plain loop --------------------------------------------------------------------------------


def plain_order(seed, documents, lengths, num_samples, T, extra):
    """(document_index, samples shuffled first, whether the last epoch is shuffled separately), by
    the plain rules."""
    tokens, epochs = sum(lengths[d] for d in documents), 1
    while num_samples is not None and tokens * epochs < num_samples * T + extra:
        epochs += 1
    before = ((epochs - 1) * tokens - extra) // T
    apart = epochs > 1 and num_samples - before < int(0.8 * ((tokens - extra) // T))
    state = np.random.RandomState(seed)
    order = []
    for n in (epochs - 1, 1) if apart else (epochs,):
        part = np.array(documents * n, np.int32)
        state.shuffle(part)
        order += part.tolist()
    return order, before, apart


def plain_samples(order, lengths, T, extra, drop_last):
    """Where samples begin, token by token: sample k at token k T; without the extra token, after
    the token before. After a partial sample: at the last token, or the end of the last document."""
    tokens = [
        (place, offset)
        for place, document in enumerate(order)
        for offset in range(lengths[document])
    ]
    begins = [(0, 0)]
    while len(begins) * T <= len(tokens) - extra:
        place, offset = tokens[len(begins) * T - 1 + extra]
        begins.append((place, offset + 1 - extra))
    if not drop_last and (len(begins) - 1) * T < len(tokens) - extra:
        begins.append(tokens[-1] if extra else (len(order) - 1, lengths[order[-1]]))
    return begins


@settings(max_examples=examples(1.2))
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=90).filter(any),
    T=st.integers(1, 12),
    extra=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    num_samples=st.none() | st.integers(1, 60),
    cut=st.tuples(st.integers(0, 20), st.integers(0, 20)),
)
def test_indices_and_tokens_equal_those_of_a_plain_loop(
    lengths, T, extra, drop_last, seed, num_samples, cut
):
    """Some documents are empty."""
    documents = range(cut[0], len(lengths) - cut[1])
    if not sum(lengths[d] for d in documents):
        documents = range(len(lengths))
    dataset = make(
        Memory(lengths),
        num_samples,
        documents=documents,
        T=T,
        seed=seed,
        add_extra_token_to_sequence=extra,
        split=Split.valid,
        drop_last_partial_validation_sequence=drop_last,
    )
    order, before, apart = plain_order(seed, list(documents), lengths, num_samples, T, extra)
    begins = plain_samples(order, lengths, T, extra, drop_last)
    assert dataset.document_index.tolist() == order and dataset.order.apart == apart
    assert dataset.sample_index.tolist() == [list(begin) for begin in begins]
    assert len(dataset) == len(begins) - 1 >= (num_samples or 0)
    shuffle = dataset.shuffle_index.tolist()
    assert sorted(shuffle) == list(range(len(dataset)))
    if apart:
        assert sorted(shuffle[:before]) == list(range(before))
    stream = [
        t for document in order for t in range(1000 * document, 1000 * document + lengths[document])
    ]
    ids, live = rows_of(dataset, len(dataset))
    padded = [*stream, *[0] * T]
    assert [row[: T + extra] for row in ids] == [padded[k * T : k * T + T + extra] for k in shuffle]
    assert live == [
        [k * T + j + 1 < len(stream) and (extra or j < T - 1) for j in range(T)] for k in shuffle
    ]


def test_samples_are_counted_in_float32_if_the_last_may_be_partial():
    """Beyond 2**24 tokens the count is wrong, but it equals megatron-core's."""

    def count(tokens, drop_last):
        order = plan_order(
            0, range(1), tokens=tokens, num_samples=None, T=3, extra=True, drop_last=drop_last
        )
        return order.num_samples

    assert count(101, False) == 34 and count(101, True) == 33
    assert (
        len(make(Memory([11]), split=Split.train, T=4, drop_last_partial_validation_sequence=False))
        == 2
    )
    exact = [-(-(n - 1) // 3) for n in range(2**25, 2**25 + 50)]
    assert [count(n, False) for n in range(2**25, 2**25 + 50)] != exact


@pytest.mark.parametrize("num_samples", [2**32 - 3, 2**32 - 2])
def test_shuffle_index_is_wide_only_when_it_must_be(num_samples, monkeypatch):
    order = plan_order(
        0, range(1), tokens=num_samples + 1, num_samples=None, T=1, extra=True, drop_last=True
    )
    assert order.num_samples == num_samples
    monkeypatch.setattr(np, "arange", lambda n, stop=0, dtype=None: np.zeros(0, dtype))
    assert order.tables()[1].dtype == (np.uint32 if num_samples < 2**32 - 2 else np.int64)


# ---- tensors and rows ----------------------------------------------------------------------------


@settings(max_examples=examples(0.8))
@given(
    ids=st.lists(st.integers(1, 5), min_size=3, max_size=60),
    T=st.integers(1, 9),
    options=st.fixed_dictionaries(
        {
            name: st.booleans()
            for name in (
                "reset_position_ids",
                "reset_attention_mask",
                "eod_mask_loss",
                "create_attention_mask",
                "add_extra_token_to_sequence",
                "drop_last_partial_validation_sequence",
            )
        }
    ),
    tokenizer=st.sampled_from([{}, {"pad": 5}, {"pad": EOD}]),
)
def test_tensors_of_a_sample_and_rows_agree(ids, T, options, tokenizer):
    """Masks and positions are checked token by token; `row` has the same ids and mask as the
    tensors."""
    dataset = make(
        Memory([len(ids)], np.array(ids, np.int32)),
        split=Split.valid,
        T=T,
        tokenizer=tokenizer,
        **options,
    )
    for i in range(len(dataset)):
        sample = dataset[i]
        assert sorted(sample) == sorted(
            {"tokens", "labels", "loss_mask", "position_ids"}
            | ({"attention_mask"} if options["create_attention_mask"] else set())
        )
        tokens = sample["tokens"].tolist()
        assert sample["labels"].tolist()[:-1] == tokens[1:]
        row, live, _ = dataset.row(i)
        assert row.tolist() == [*tokens, int(sample["labels"][-1])]
        assert live[1:].tolist() == sample["loss_mask"].tolist()
        begin, position = 0, []
        for at in range(T):
            position.append(at - begin if options["reset_position_ids"] else at)
            begin = at + 1 if tokens[at] == EOD else begin
        assert sample["position_ids"].tolist() == position
        if options["create_attention_mask"]:
            barred = [
                [
                    k > q or (options["reset_attention_mask"] and EOD in tokens[k:q])
                    for k in range(T)
                ]
                for q in range(T)
            ]
            assert sample["attention_mask"].tolist() == [barred]


@pytest.mark.parametrize(
    "tokenizer, keep, pad, warnings",
    [
        ({}, False, -1, 0),
        ({"pad": 2}, False, 2, 0),
        ({"pad": 1}, False, -1, 1),
        ({"eos": 2, "pad": 2}, False, -1, 1),
        ({"pad": 1, "special_tokens_dict": {"pad_token": 1, "eos_token": 4}}, False, 1, 0),
        ({"pad": 1}, True, 1, 1),
    ],
)
def test_pad_token(tokenizer, keep, pad, warnings, caplog):
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=4,
        allow_ambiguous_pad_tokens=keep,
        tokenizer=SimpleNamespace(eod=1, **tokenizer),
    )
    assert (pad_id(config), len(caplog.records)) == (pad, warnings)


def test_mock_data():
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=512, tokenizer=SimpleNamespace(eod=7, vocab_size=50)
    )
    train, valid, test = BlendedMegatronDatasetBuilder(
        MockGPTDataset, [1000, 10, None], lambda: True, config
    ).build()
    assert config.mock and train is not None and valid is not None and test is not None
    assert [len(d.indices) for d in (train, valid, test)] == [33333, 33334, 33333]
    ids = train[5]["tokens"]
    assert ids.shape == (512,) and ids.max() == 49
    assert train[None]["tokens"].equal(train[0]["tokens"]) and not train[None]["loss_mask"].any()


# ---- files ---------------------------------------------------------------------------------------

CORPORA = st.lists(st.lists(st.lists(st.integers(0, 100), max_size=5), max_size=3), max_size=8)


@given(CORPORA, st.sampled_from(["u1", "i1", "<i2", "<i4", "<i8", "<u2"]), st.booleans())
@settings(max_examples=examples(0.8))
def test_the_data_set_reads_back_what_the_builder_wrote(tmp_path_factory, documents, dtype, mmap):
    folder = tmp_path_factory.mktemp("p.q")
    builder = IndexedDatasetBuilder(folder / "a.b.bin", dtype=dtype)
    for number, document in enumerate(documents):
        if number % 2:
            builder.add_document(
                [i for ids in document for i in ids], [len(ids) for ids in document]
            )
            continue
        for ids in document:
            builder.add_item(np.array(ids, np.int64))
        builder.end_document()
    builder.finalize(folder / "a.b.idx")
    dataset = IndexedDataset(folder / "a.b", mmap=mmap)
    expected = [ids for document in documents for ids in document]
    assert IndexedDataset.exists(folder / "a.b") and not IndexedDataset.exists(folder / "d")
    assert (len(dataset), dataset.dtype) == (len(expected), np.dtype(dtype))
    assert (
        [dataset[i].tolist() for i in range(len(dataset))]
        == expected
        == [ids.tolist() for ids in dataset[:]]
    )
    assert dataset.sequence_lengths.tolist() == list(map(len, expected))
    assert [expected[a:b] for a, b in pairwise(dataset.document_indices.tolist())] == documents
    if expected:
        ids = expected[-1]
        assert (
            dataset[-1].tolist() == ids
            and dataset.get(len(expected) - 1, 1 * bool(ids)).tolist() == ids[1:]
        )
        assert dataset.get(-1, 0, len(ids) // 2).tolist() == ids[: len(ids) // 2]
        assert not dataset[0].flags.writeable


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_without_mmap_nothing_is_mapped_and_a_truncated_file_is_an_error(tmp_path, suffix):
    write_megatron(tmp_path / "a", [[[i, 2]] for i in range(5000)])
    dataset, maps = IndexedDataset(tmp_path / "a", mmap=False), Path("/proc/self/maps")
    assert dataset[4000].tolist() == [4000, 2]
    assert not maps.exists() or str(tmp_path) not in maps.read_text()
    os.truncate(tmp_path / f"a{suffix}", 6000)
    with pytest.raises(
        ValueError, match=rf"a\{suffix}: the file was truncated or changed while it was in use"
    ):
        dataset.file.read(4000, 4001)


def test_a_pickled_data_set_does_not_contain_its_tokens(tmp_path):
    """Regression: pickling a memory map copied the whole .bin into every spawned worker."""
    write_megatron(tmp_path / "a", [[range(50_000)]])
    data = pickle.dumps(IndexedDataset(tmp_path / "a"))
    assert len(data) < 10_000 and (pickle.loads(data)[0] == np.arange(50_000)).all()


def test_sequences_and_ids_outside_the_files_are_refused(tmp_path):
    write_megatron(tmp_path / "a", [[[1, 2]], [[3]]])
    dataset = IndexedDataset(tmp_path / "a")
    for number in (2, -3):
        with pytest.raises(IndexError, match="it has 2"):
            dataset[number]
    for offset, length in ((0, 3), (3, None), (-1, 1), (1, -1)):
        with pytest.raises(ValueError, match=r"of sequence 0, which has 2"):
            dataset.get(0, offset, length)
    with pytest.raises(
        ValueError, match=r"a\.idx: its sequences have no modes; open it with multimodal=False"
    ):
        IndexedDataset(tmp_path / "a", multimodal=True)
    builder = IndexedDatasetBuilder(tmp_path / "b.bin")
    with pytest.raises(ValueError, match=r"1 sequence after the last document"):
        builder.add_item([1])
        builder.finalize(tmp_path / "b.idx")
    assert {path.name for path in tmp_path.iterdir()} == {"a.bin", "a.idx"}


def test_modes_of_sequences_are_read_but_training_refuses_them(tmp_path):
    """Regression: a pair with modes was reported as truncated, and multimodal=True refused."""
    write_megatron(tmp_path / "a", [[[1, 2, 3], [4, 5], [6]]])
    with open(tmp_path / "a.idx", "ab") as f:
        f.write(np.array([0, 1, -1], np.int8).tobytes())
    dataset = IndexedDataset(tmp_path / "a", multimodal=True)
    assert dataset.sequence_modes.dtype == np.int8 and dataset.sequence_modes.tolist() == [0, 1, -1]
    ids, mode = dataset[1]
    assert ids.tolist() == [4, 5] and mode == 1 and dataset.get(-1)[1] == -1
    ids, modes = dataset[:2]
    assert [part.tolist() for part in ids] == [[1, 2, 3], [4, 5]] and modes.tolist() == [0, 1]
    plain = IndexedDataset(tmp_path / "a")
    assert plain[1].tolist() == [4, 5] and plain.sequence_modes is None
    with pytest.raises(
        ValueError, match=r"a\.idx: it is multimodal data \(its sequences have modes\)"
    ):
        open_tokens(tmp_path / "a.bin")


# ---- the cache of indices ------------------------------------------------------------------------

ARRAYS = {"x": np.arange(5000, dtype=np.uint32), "y": np.arange(8).reshape(4, 2)}


@pytest.fixture(autouse=True)
def worth_storing(monkeypatch):
    monkeypatch.setattr(megatron_tables, "WORTH_STORING", 1000)


def kept(folder, build=lambda: ARRAYS):
    """Whether the cache in a folder returns the right arrays."""
    arrays = cached(str(folder), "key", build)
    return all(
        arrays[name].dtype == array.dtype and np.array_equal(arrays[name], array)
        for name, array in ARRAYS.items()
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda array, seal: array.unlink(),
        lambda array, seal: array.write_bytes(b""),
        lambda array, seal: array.write_bytes(array.read_bytes()[:-4]),
        lambda array, seal: array.write_bytes(array.read_bytes()[:-1] + b"?"),
        lambda array, seal: np.save(array, ARRAYS["x"].view(np.int32)),
        lambda array, seal: seal.write_bytes(seal.read_bytes()[:20]),
        lambda array, seal: seal.write_text("[1]"),
        lambda array, seal: seal.write_text("{}"),
    ],
)
def test_corrupt_arrays_are_built_again_with_a_warning(damage, tmp_path, caplog):
    assert kept(tmp_path)
    seal = tmp_path / "key.json"
    damage(tmp_path / "key-x.npy", seal)
    assert kept(tmp_path) and "cannot be used" in caplog.text and str(seal) in caplog.text
    assert kept(tmp_path, lambda: pytest.fail("built"))


def test_several_threads_that_build_at_once_all_get_the_right_arrays(tmp_path):
    barrier = threading.Barrier(6)

    def work(_):
        barrier.wait()
        return all(kept(tmp_path) for _ in range(5))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))
    assert len(list(tmp_path.iterdir())) == 3 and kept(tmp_path, lambda: pytest.fail("built"))


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert kept(tmp_path / "file") and "not stored" in caplog.text


def test_the_name_of_cached_indices_depends_on_everything_that_decides_them(tmp_path, monkeypatch):
    cases = [
        ([9] * 12, 0, 40),
        ([9] * 13, 0, 40),
        ([9] * 12, 1, 40),
        ([9] * 12, 0, 80),
        ([9] * 10 + [5, 13], 0, 40),
    ]
    make(Memory([9] * 12), 40, T=4, path_to_cache=str(tmp_path))[0]
    assert not list(tmp_path.iterdir()), "too small to be worth a file"
    monkeypatch.setattr(megatron_tables, "WORTH_STORING", 0)
    for lengths, seed, num_samples in cases * 2:
        plain = make(Memory(lengths), num_samples, T=4, seed=seed)
        kept = make(Memory(lengths), num_samples, T=4, seed=seed, path_to_cache=str(tmp_path))
        assert isinstance(kept.sample_index, np.memmap) and rows_of(kept, 40) == rows_of(plain, 40)
    assert len(list(tmp_path.glob("*.json"))) == len(cases)


# ---- bad input -----------------------------------------------------------------------------------


def test_split():
    assert split_matrix("1,1") == [(0.0, 0.5), (0.5, 1.0), None] and split_matrix("0,1,0") == [
        None,
        (0.0, 1.0),
        None,
    ]


BAD = [
    ({"split": "98,1,1,1"}, "split: got '98,1,1,1'"),
    ({"split": "a,b"}, "split: got 'a,b'"),
    ({"split": "-1,2"}, "split: got '-1,2'"),
    ({"split": "0,0,0"}, "split: got"),
    ({"split": None}, "split: got None"),
    ({"split": "nan"}, "split: got 'nan'"),
    ({"blend": (["a", "b"], [1.0])}, "weights .1.0. for 2 prefixes"),
    ({"blend": ([], None)}, "no prefix"),
    ({"blend": (["a", "b"], [1.0, 0.0])}, "weights .1.0, 0.0. for 2"),
    ({"blend": (["a"], [-2.0])}, "weights .-2.0. for 1"),
    ({"blend": (["a"], [float("nan")])}, "weights .nan."),
    ({"blend_per_split": [None, None, None]}, "pass it alone"),
    ({"sequence_length": 0}, "at least 1"),
    (
        {"blend": None, "split": None, "blend_per_split": [(["a"], None)]},
        "got 1 blends, expected 3",
    ),
    ({"random_seed": -1}, "random_seed.: got -1"),
    ({"random_seed": 2**32}, "random_seed"),
    ({"mid_level_dataset_surplus": -0.1}, "mid_level_dataset_surplus"),
    ({"eod_mask_loss": True}, "it has no `eod`"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_settings_are_one_sentence(changes, message):
    good = {"random_seed": 0, "sequence_length": 8, "blend": (["a"], None), "split": "98,1,1"}
    GPTDatasetConfig(**good)
    with pytest.raises(ValueError, match=message):
        GPTDatasetConfig(**{**good, **changes})


def test_fields_of_megatron_core_that_change_no_sample_are_accepted(caplog):
    caplog.set_level("INFO")
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=8,
        object_storage_cache_path="/somewhere",
        num_dataset_builder_threads=4,
        context_parallel_size=2,
        sequences_per_dataset={},
    )
    assert config.mock and config.object_storage_cache_path == "/somewhere"
    [message] = caplog.messages
    assert "num_dataset_builder_threads, sequences_per_dataset, context_parallel_size" in message
    assert "without effect" in message


def test_indices_of_remote_data_are_copied_into_the_configured_folder(monkeypatch):
    used = []

    def open_file(path, open_local, cache):
        used.append(cache)
        raise EOFError

    monkeypatch.setattr(megatron_files, "TokenFile", open_file)
    monkeypatch.setattr(IndexedDataset, "exists", staticmethod(lambda prefix: True))
    config = GPTDatasetConfig(
        random_seed=0, sequence_length=8, object_storage_cache_path="/somewhere"
    )
    storage = ObjectStorageConfig(path_to_idx_cache="/elsewhere", bin_chunk_nbytes=1 << 20)
    with pytest.raises(EOFError):
        GPTDataset.build_low_level_dataset("s3://bucket/web", config)
    with pytest.raises(EOFError):
        IndexedDataset("s3://bucket/web", mmap=False, object_storage_config=storage)
    assert used == ["/somewhere", "/elsewhere"]


def test_names_of_megatron_core_that_user_code_imports():
    """Users subclass BlendedMegatronDatasetConfig for their own configurations."""
    assert is_object_storage_path("s3://b/k") and not is_object_storage_path("/data/s3")
    config = BlendedMegatronDatasetConfig(
        random_seed=1, sequence_length=8, blend=(["a"], None), split="98,1,1"
    )
    assert config.split_matrix == split_matrix("98,1,1") and not config.mock
    assert issubclass(GPTDatasetConfig, BlendedMegatronDatasetConfig)
    assert [DType.optimal_dtype(n) for n in (None, 1, 65_499, 65_500)] == [
        np.int32,
        np.uint16,
        np.uint16,
        np.int32,
    ]
    kinds = (np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16)
    for code, kind in enumerate(kinds, 1):
        assert (
            DType[kind.__name__].value == DType.code_from_dtype(kind) == code
            and DType.dtype_from_code(code) is kind
        )
        assert DType.size(code) == DType.size(kind) == kind().itemsize


def test_bad_data_is_one_sentence():
    with pytest.raises(
        ValueError, match=r"p, split train: needs 5 samples, but its 2 sequences have no tokens"
    ):
        make(Memory([0, 0]), 5)
    assert len(make(Memory([0, 0]))) == 0 and make(Memory([0, 0])).sample_index.tolist() == [[0, 0]]
    memory = Memory([4, 4, 4])
    memory.sequence_lengths[1] = -2
    with pytest.raises(ValueError, match=r"p\.idx: sequence 1 has -2 tokens"):
        make(memory)
    with pytest.raises(ValueError, match="`eod` and a `vocab_size`"):
        MockGPTDataset.build_low_level_dataset(
            "", GPTDatasetConfig(random_seed=0, sequence_length=4)
        )
    config = GPTDatasetConfig(
        random_seed=0, sequence_length=4, blend=(["/no/such/prefix"], None), split="1"
    )
    with pytest.raises(
        FileNotFoundError,
        match=r"^/no/such/prefix: no such pair; missing: /no/such/prefix\.bin and "
        r"/no/such/prefix\.idx$",
    ):
        BlendedMegatronDatasetBuilder(GPTDataset, [1, 1, 1], lambda: True, config).build()


# ---- code written for megatron-core --------------------------------------------------------------


class TheirTokenizer:
    """Like most of Megatron's tokenizers, which have all properties, but raise errors for some."""

    eod, vocab_size = EOD, 100

    @property
    def pad(self):
        raise NotImplementedError

    eos = pad

    @property
    def special_tokens_dict(self):
        raise IndexError("no special tokens")


def test_a_tokenizer_whose_properties_raise_has_no_padding():
    """Regression: NotImplementedError, where megatron-core takes -1."""
    config = GPTDatasetConfig(
        random_seed=0, sequence_length=8, tokenizer=TheirTokenizer(), eod_mask_loss=True
    )
    mock = GPTDatasetConfig(random_seed=0, sequence_length=8, tokenizer=TheirTokenizer())
    assert pad_id(config) == -1
    rows, live = rows_of(GPTDataset(Memory([30, 30]), "p", range(2), None, Split.train, config), 7)
    plain = make(Memory([30, 30]), eod_mask_loss=True)
    assert (rows, live) == rows_of(plain, 7) and any(0 in row for row in live)
    datasets = BlendedMegatronDatasetBuilder(MockGPTDataset, [4, 4, 4], lambda: True, mock).build()
    assert all(len(dataset[0]["tokens"]) == 8 for dataset in datasets)


def test_our_own_tokenizer_has_megatrons_names():
    """Regression: eod_mask_loss and mock data refused it."""
    tokenizer = get_tokenizer("ids:100:3")
    assert (tokenizer.eod, tokenizer.pad, tokenizer.vocab_size) == (3, -1, 100)
    config = GPTDatasetConfig(
        random_seed=0, sequence_length=8, tokenizer=tokenizer, eod_mask_loss=True
    )
    assert MockGPTDataset.build_low_level_dataset("", config).eod == 3 and pad_id(config) == -1


def test_a_subclass_that_queries_samples_in_its_own_way_is_called():
    """Regression: it was ignored without a word."""

    class Reversed(GPTDataset):
        def _query_document_sample_shuffle_indices(self, idx):
            ids, sequences, *_ = super()._query_document_sample_shuffle_indices(idx)
            return ids[::-1], sequences, [len(ids)]

    config = GPTDatasetConfig(random_seed=0, sequence_length=8, tokenizer=SimpleNamespace(eod=EOD))
    theirs = Reversed(Memory([30]), "p", range(1), None, Split.train, config)
    ours = GPTDataset(Memory([30]), "p", range(1), None, Split.train, config)
    for i in range(3):
        assert theirs[i]["tokens"].tolist() == ours[i]["labels"].flip(0).tolist()
        assert theirs._query_document_sample_shuffle_indices(i)[1].tolist() == [0]


def test_a_sample_of_a_subclass_that_is_too_long_is_refused():
    class Long(GPTDataset):
        def _query_document_sample_shuffle_indices(self, idx):
            return np.zeros(10, np.int64), np.zeros(1, np.int64)

    config = GPTDatasetConfig(random_seed=0, sequence_length=8)
    with pytest.raises(ValueError, match="Long: a sample has 10 ids, expected at most 9"):
        _ = Long(Memory([30]), "p", range(1), None, Split.train, config)[0]


@pytest.mark.parametrize(
    "method", ["_build_document_sample_shuffle_indices", "numel_low_level_dataset"]
)
def test_a_subclass_that_replaces_a_method_that_is_never_called_is_refused(method):
    with pytest.raises(TypeError, match=f"Theirs.{method}: this GPTDataset .* never calls it"):
        type("Theirs", (GPTDataset,), {method: lambda self: None})


def test_a_configuration_can_be_extended_and_assigned_until_a_data_set_is_built():
    """Regression: a dataclass that is not frozen cannot inherit from a frozen one."""

    @dataclass
    class Extended(GPTDatasetConfig):
        rate: float = 0.0

    config = Extended(random_seed=0, sequence_length=4, rate=0.5)
    config.sequence_length = 8
    dataset = GPTDataset(Memory([30]), "p", range(1), None, Split.train, config)
    assert config.rate == 0.5 and len(dataset[0]["tokens"]) == 8
    config.sequence_length = 0
    with pytest.raises(ValueError, match="sequence_length: got 0"):
        GPTDataset(Memory([30]), "p", range(1), None, Split.train, config)


@pytest.mark.parametrize(
    "blend, expected",
    [
        (None, None),
        (["a"], (["a"], None)),
        (["a", "b"], (["a", "b"], None)),
        (["a", "b", "c"], (["a", "b", "c"], None)),
        (["70", "a", ".5", " b "], (["a", "b"], [70.0, 0.5])),
        (["70 a 30 b"], (["a", "b"], [70.0, 30.0])),
        (["/a folder/b"], (["/a folder/b"], None)),
    ],
)
def test_a_blend_is_read_from_a_list(blend, expected):
    assert get_blend_from_list(blend) == expected


@pytest.mark.parametrize("blend", [["70", "a", "b"], ["70", "a", "b", "c"], ["70"]])
def test_a_blend_with_some_weights_is_refused(blend):
    with pytest.raises(
        ValueError, match="begins with a weight; expected a weight before each prefix"
    ):
        get_blend_from_list(blend)


def write_pair(prefix, documents, *, modes=None, dtype=np.uint16):
    """Documents are lists of sequences."""
    builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=dtype, multimodal=modes is not None)
    for i, sequences in enumerate(documents):
        ids = np.array([i for sequence in sequences for i in sequence], np.int64)
        builder.add_document(ids, [len(sequence) for sequence in sequences], modes and modes[i])
    builder.finalize(get_idx_path(prefix))


@pytest.mark.parametrize("multimodal", [False, True])
def test_pairs_are_merged_as_by_megatrons_tool(tmp_path, monkeypatch, multimodal):
    """Regression: IndexedDataset.index, add_index, get_bin_path and get_idx_path were missing."""
    monkeypatch.setattr(megatron_files, "COPIED_IDS", 5)  # so that blocks end inside documents
    documents = [[[1, 2], [], [3, 4, 5]], [[6]], [[7] * 9, [8]], [[], []]]
    modes = [[0, 1, 2], [-1], [3, 4], [5, 6]] if multimodal else None
    write_pair(tmp_path / "a", documents[:2], modes=modes and modes[:2])
    write_pair(tmp_path / "b", documents[2:], modes=modes and modes[2:])
    write_pair(tmp_path / "whole", documents, modes=modes)
    index = IndexedDataset(tmp_path / "a", multimodal=multimodal).index
    assert (index.dtype, index.dtype_size, index.sequence_count, index.document_count) == (
        np.uint16,
        2,
        4,
        3,
    )
    builder = IndexedDatasetBuilder(
        get_bin_path(tmp_path / "merged"), dtype=index.dtype, multimodal=multimodal
    )
    for name in "ab":
        builder.add_index(tmp_path / name)
    builder.finalize(get_idx_path(tmp_path / "merged"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"merged{suffix}").read_bytes() == (
            tmp_path / f"whole{suffix}"
        ).read_bytes()
    merged = IndexedDataset(tmp_path / "merged", multimodal=multimodal)
    assert (merged[6][0] if multimodal else merged[6]).tolist() == [] and len(
        merged.get_document_indices()
    ) == 5
    if multimodal:
        assert merged.sequence_modes.tolist() == [0, 1, 2, -1, 3, 4, 5, 6]


def test_pairs_that_cannot_be_merged_are_refused(tmp_path):
    write_pair(tmp_path / "a", [[[1, 2]]])
    with pytest.raises(
        ValueError, match=r"a\.bin: its ids are uint16, but the pair that it is added to has int32"
    ):
        IndexedDatasetBuilder(tmp_path / "b.bin").add_index(tmp_path / "a")
    builder = IndexedDatasetBuilder(tmp_path / "b.bin", dtype=np.uint16)
    builder.add_item(np.array([1]))
    with pytest.raises(
        ValueError, match=r"the document before it has not ended; call end_document\(\) first"
    ):
        builder.add_index(tmp_path / "a")


@pytest.mark.parametrize("modes", [[1], [1, 200]])
def test_modes_that_do_not_fit_are_refused(tmp_path, modes):
    with pytest.raises(
        ValueError, match=r"modes for 2 sequences, expected one for each, in -128 \.\. 127"
    ):
        write_pair(tmp_path / "a", [[[1], [2]]], modes=[modes])


def test_an_id_below_zero_is_an_error_and_not_padding(tmp_path):
    """Regression: megatron-core's id of padding, -1, turned such ids into 0 without a word."""
    write_pair(tmp_path / "a", [[[5, 6, 7], [8, -1, 9]]], dtype=np.int32)
    dataset = make(IndexedDataset(tmp_path / "a"), T=4)
    with pytest.raises(ValueError, match=r"p\.bin: sequence 1 holds the id -1, expected 0 or more"):
        _ = [dataset[i] for i in range(len(dataset))]


def test_names_are_still_importable_where_they_once_were():
    for name in ("GPTDataset", "GPTDatasetConfig", "IndexedDatasetBuilder", "get_bin_path"):
        assert getattr(megatron, name) is getattr(megatron_api, name)
    for name in ("BlendedDataset", "BlendedMegatronDatasetBuilder"):
        assert getattr(megatron_order, name) is getattr(megatron_api, name)
    for module in (megatron, megatron_order):
        with pytest.raises(AttributeError):
            _ = module.Zeal
