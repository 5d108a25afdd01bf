"""Megatron's samples: the indices and tensors of megatron-core (golden), of a plain loop (hypothesis); nothing of the
size of a table of samples is made; bad input is one sentence."""

import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import sample_order
from nanochat.blend import BlendedMegatronDatasetBuilder
from nanochat.megatron import GPTDataset, GPTDatasetConfig, MockGPTDataset, Split, pad_id, split_matrix
from nanochat.sample_order import STRIDE, Stream, plan_order
from tests.toy import examples

OWN = Path(__file__).parent / "golden" / "megatron"
SHARED = Path(__file__).parents[2] / "shared" / "golden" / "megatron"
OWN_CASES = json.loads((OWN / "golden.json").read_text())["cases"]
EOD = 3


class Memory:
    """Sequences in memory, as `GPTDataset` sees files: sequence i is ids 1000 i, 1000 i + 1, ... or what is given."""

    dtype, path_prefix, file_bytes, mapped = np.dtype(np.int32), "memory", 0, True

    def __init__(self, lengths: list[int], ids: np.ndarray | None = None):
        self.sequence_lengths = np.array(lengths, np.int32)
        self.begins = np.cumsum([0, *lengths])[:-1]
        numbers = [np.arange(n) + 1000 * i for i, n in enumerate(lengths)]
        self.ids = np.concatenate([np.zeros(0, np.int32), *numbers]).astype(np.int32) if ids is None else ids
        self.index = self.reader = self

    def checked(self, which: np.ndarray, file_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        return self.begins[which], self.sequence_lengths[which]

    def read_many(self, ranges: list[tuple[int, int]]) -> list[np.ndarray]:
        return [self.ids[a:b] for a, b in ranges]


def make(dataset: Any, num_samples: int | None = None, *, documents: range | None = None, split: Split = Split.train,
         T: int = 8, seed: int = 0, **options: Any) -> GPTDataset:
    tokenizer = SimpleNamespace(eod=EOD, **options.pop("tokenizer", {}))
    config = GPTDatasetConfig(random_seed=seed, sequence_length=T, tokenizer=tokenizer, **options)
    return GPTDataset(dataset, "p", documents or range(len(dataset.sequence_lengths)), num_samples, split, config)


# ---- golden ---------------------------------------------------------------------------------------------------------

def equal(array: Any, dtype: str, values: Any) -> bool:
    return np.asarray(array).dtype == dtype and np.asarray(array).tolist() == values


@pytest.mark.parametrize("case", OWN_CASES)
def test_small_cases_of_megatron_core(case: str) -> None:
    about = OWN_CASES[case]

    def placed(blend: Any) -> Any:
        return None if blend is None else ([str(OWN / name) for name in blend[0]], blend[1])

    settings = dict(about["settings"])
    for key, place in (("blend", placed), ("blend_per_split", lambda blends: [placed(blend) for blend in blends])):
        if key in settings:
            settings[key] = place(settings[key])
    config = GPTDatasetConfig(tokenizer=SimpleNamespace(eod=0), **settings)
    built = BlendedMegatronDatasetBuilder(GPTDataset, about["sizes"], lambda: True, config).build()
    for dataset, expected in zip(built, about["splits"], strict=True):
        assert (dataset is None) == (expected is None)
        if expected:
            compare(dataset, expected)


def compare(dataset: Any, expected: Any) -> None:
    indices = [name for name in expected if name.endswith("_index")]
    assert len(indices) in (2, 3)
    for name in indices:
        assert equal(getattr(dataset, name), *expected[name]), name
    for part, other in zip(getattr(dataset, "datasets", ()), expected["datasets"], strict=True):
        compare(part, other)
    for i, sample in enumerate(expected["samples"]):
        found = dataset[i]
        assert {name: np.asarray(value).astype(int).tolist() for name, value in found.items()} == sample
    types = {name: str(value.dtype) for name, value in dataset[0].items() if name != "dataset_id"}
    wanted = {"tokens": "torch.int64", "labels": "torch.int64", "loss_mask": "torch.float32",
              "position_ids": "torch.int64", "attention_mask": "torch.bool"}
    assert types == {name: wanted[name] for name in types}


def test_the_small_cases_have_what_they_are_for() -> None:
    """Several epochs with the last apart, a padded sample, masks that differ from a triangle."""
    train, valid, _ = OWN_CASES["partial"]["splits"]
    assert len(train["document_index"][1]) > 18 and len(valid["document_index"][1]) > 6
    lengths = np.fromfile(OWN / "a.idx", np.int32, 24, offset=34)
    assert lengths[18:].sum() % 8 != 1, "the last validation sample is partial"
    positions = [sample["position_ids"] for sample in train["samples"]]
    assert any(p != list(range(8)) for p in positions)


@pytest.mark.skipif(not SHARED.exists(), reason=f"no golden data in {SHARED}")
@pytest.mark.parametrize("case", ["single", "single_1epoch", "blend"])
def test_shared_golden_cases(case: str) -> None:
    golden = json.loads((SHARED / "golden.json").read_text())
    about = golden["results"][case]
    blend = [str(SHARED / name) for name in about["blend"][0]], about["blend"][1]
    config = GPTDatasetConfig(random_seed=1234, sequence_length=128, blend=blend, split=about["split"])
    assert [list(part) for part in config.split_matrix if part] == about["split_matrix"]
    built: list[Any] = [*BlendedMegatronDatasetBuilder(GPTDataset, about["sizes"], lambda: True, config).build()]
    for dataset, expected in zip(built, about["splits"].values(), strict=True):
        if "datasets" in expected:
            assert equal(dataset.dataset_index, "int16", expected["dataset_index"])
            assert equal(dataset.dataset_sample_index, "int64", expected["dataset_sample_index"])
        pairs = zip(getattr(dataset, "datasets", [dataset]), expected.get("datasets", [expected]), strict=True)
        for part, indices in pairs:
            assert (len(part), part.num_samples) == (indices["length"], indices["num_samples_asked"])
            for name, dtype in indices["dtypes"].items():
                assert equal(getattr(part, name), dtype, indices[name])
        ids, live = dataset.rows(0, len(expected["first64"]))
        assert ids.dtype == np.uint16 and ids.tolist() == expected["first64"] and live is None


# ---- a plain loop ---------------------------------------------------------------------------------------------------

def plain_order(seed: int, documents: list[int], lengths: list[int], num_samples: int | None, T: int, extra: int
                ) -> tuple[list[int], int, bool]:
    """(document_index, samples shuffled first, last epoch apart), by the rules as one would tell them."""
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


def plain_samples(order: list[int], lengths: list[int], T: int, extra: int, drop_last: bool) -> list[tuple[int, int]]:
    """Where samples begin, token by token: sample k at token k T; without the extra token behind the one before. Behind
    a partial sample: the last token, or the end of the last document."""
    tokens = [(place, offset) for place, document in enumerate(order) for offset in range(lengths[document])]
    begins = [(0, 0)]
    while len(begins) * T <= len(tokens) - extra:
        place, offset = tokens[len(begins) * T - 1 + extra]
        begins.append((place, offset + 1 - extra))
    if not drop_last and (len(begins) - 1) * T < len(tokens) - extra:
        begins.append(tokens[-1] if extra else (len(order) - 1, lengths[order[-1]]))
    return begins


@settings(max_examples=examples(1.2))
@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=90).filter(any), T=st.integers(1, 12),
       extra=st.booleans(), drop_last=st.booleans(), seed=st.integers(0, 2**32 - 1),
       num_samples=st.none() | st.integers(1, 60), cut=st.tuples(st.integers(0, 20), st.integers(0, 20)))
def test_indices_and_tokens_are_those_of_a_plain_loop(lengths: list[int], T: int, extra: bool, drop_last: bool,
                                                      seed: int, num_samples: int | None, cut: tuple[int, int]) -> None:
    documents = range(cut[0], len(lengths) - cut[1])
    if not sum(lengths[d] for d in documents):
        documents = range(len(lengths))
    dataset = make(Memory(lengths), num_samples, documents=documents, T=T, seed=seed,
                   add_extra_token_to_sequence=extra, split=Split.valid,
                   drop_last_partial_validation_sequence=drop_last)
    order, before, apart = plain_order(seed, list(documents), lengths, num_samples, T, extra)
    begins = plain_samples(order, lengths, T, extra, drop_last)
    assert dataset.document_index.tolist() == order and dataset.order.apart == apart
    assert np.asarray(dataset.sample_index).tolist() == [list(begin) for begin in begins]
    assert [tuple(dataset.sample_index[i]) for i in (0, -1)] == [begins[0], begins[-1]]
    assert len(dataset) == len(begins) - 1 >= (num_samples or 0)
    shuffle = dataset.shuffle_index.tolist()
    assert sorted(shuffle) == list(range(len(dataset)))
    if apart:
        assert sorted(shuffle[:before]) == list(range(before))
    stream = [t for document in order for t in range(1000 * document, 1000 * document + lengths[document])]
    ids, live = dataset.rows(0, len(dataset))
    padded = [*stream, *[0] * T]
    assert ids[:, :T + extra].tolist() == [padded[k * T:k * T + T + extra] for k in shuffle]
    targets = [[k * T + j + 1 < len(stream) and (extra or j < T - 1) for j in range(T)] for k in shuffle]
    assert (np.ones((len(shuffle), T), bool) if live is None else live).tolist() == targets


def test_a_partial_sample_ends_with_the_last_document_even_if_that_is_empty() -> None:
    for seed in range(9):
        dataset = make(Memory([5, 0, 0]), split=Split.valid, T=4, seed=seed, add_extra_token_to_sequence=False,
                       drop_last_partial_validation_sequence=False)
        if dataset.document_index[-1] != 0:
            break
    assert dataset.document_index[-1] != 0 and len(dataset) == 2
    assert dataset.sample_index[2].tolist() == [2, 0]


def test_order_of_many_epochs_apart_and_not() -> None:
    """100 tokens an epoch, T = 10: 9 samples an epoch. The last is apart when fewer than int(0.8 * 9) are used."""
    def plan(tokens: int, num_samples: int) -> tuple[int, bool]:
        order = plan_order(0, range(4), tokens=tokens, num_samples=num_samples, T=10, extra=True, drop_last=True)
        return order.num_epochs, order.apart

    assert [plan(100, n) for n in (9, 10, 15, 16, 19, 20)] == [
        (1, False), (2, True), (2, True), (2, False), (2, False), (3, True)]
    assert [plan(1001, 100 + n) for n in (79, 80)] == [(2, True), (2, False)]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("wide", [0, 150, 1 << 18])
def test_shuffles_are_numpys_whether_in_place_or_in_a_copy(monkeypatch: pytest.MonkeyPatch, wide: int, apart: bool
                                                           ) -> None:
    monkeypatch.setattr(sample_order, "WIDE", wide)
    order = sample_order.Order(seed=7, first=5, last=105, num_epochs=3, apart=apart, samples_before=120,
                               num_samples=180)
    state, parts = np.random.RandomState(7), []
    for values, edge in ((np.tile(np.arange(5, 105, dtype=np.int32), 3), 200), (np.arange(180, dtype=np.uint32), 120)):
        for part in (values[:edge], values[edge:]) if apart else (values,):
            state.shuffle(part)
        parts.append(values)
    for found, expected in zip(order.shuffled(), parts):
        assert found.dtype == expected.dtype and found.tolist() == expected.tolist()


def test_a_long_stream_of_many_running_sums() -> None:
    """Far more documents than one sum covers: every sample begins where a running sum over all says."""
    lengths = np.random.default_rng(0).integers(0, 9, 40 * STRIDE + 7).astype(np.int32)
    order = np.random.default_rng(1).permutation(len(lengths)).astype(np.int32)
    ends = np.cumsum(lengths[order])
    tokens = np.random.default_rng(2).permutation(int(ends[-1]))
    for side in ("right", "left"):
        at = tokens if side == "right" else tokens + 1
        places, before = Stream(lengths, order).locate(at, side)
        assert (places == np.searchsorted(ends, at, side)).all()
        assert (before == ends[places] - lengths[order][places]).all()
    assert len(Stream(lengths, order).sums) == 42


def test_samples_are_counted_in_float32_where_the_last_may_be_partial() -> None:
    """Beyond 2**24 tokens that is not the true count; it is megatron-core's."""
    def count(tokens: int, drop_last: bool) -> int:
        order = plan_order(0, range(1), tokens=tokens, num_samples=None, T=3, extra=True, drop_last=drop_last)
        return order.num_samples

    assert count(101, False) == 34 and count(101, True) == 33
    exact = [-(-(n - 1) // 3) for n in range(2**25, 2**25 + 50)]
    assert [count(n, False) for n in range(2**25, 2**25 + 50)] != exact


@pytest.mark.parametrize("num_samples", [2**32 - 3, 2**32 - 2])
def test_shuffle_index_is_wide_only_when_it_must_be(num_samples: int) -> None:
    order = plan_order(0, range(1), tokens=num_samples + 1, num_samples=None, T=1, extra=True, drop_last=True)
    assert order.num_samples == num_samples
    assert order.shuffle_dtype == (np.uint32 if num_samples < 2**32 - 2 else np.int64)


# ---- tensors and rows -----------------------------------------------------------------------------------------------

@settings(max_examples=examples(0.8))
@given(ids=st.lists(st.integers(1, 5), min_size=3, max_size=60), T=st.integers(1, 9), options=st.fixed_dictionaries({
    name: st.booleans() for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss",
                                     "create_attention_mask", "add_extra_token_to_sequence",
                                     "drop_last_partial_validation_sequence")}),
       tokenizer=st.sampled_from([{}, {"pad": 5}, {"pad": EOD}]))
def test_tensors_of_a_sample_and_rows_agree(ids: list[int], T: int, options: dict[str, bool],
                                            tokenizer: dict[str, int]) -> None:
    """Masks and positions token by token; `rows` gives the same ids, and the loss where `loss_mask` is 1."""
    dataset = make(Memory([len(ids)], np.array(ids, np.int32)), split=Split.valid, T=T, tokenizer=tokenizer, **options)
    rows, live = dataset.rows(0, len(dataset))
    for i in range(len(dataset)):
        sample = dataset[i]
        assert sorted(sample) == sorted({"tokens", "labels", "loss_mask", "position_ids"} |
                                        ({"attention_mask"} if options["create_attention_mask"] else set()))
        tokens, labels = sample["tokens"].tolist(), sample["labels"].tolist()
        assert rows[i].tolist() == [*tokens, labels[-1]]
        assert (np.ones(T) if live is None else live[i]).tolist() == sample["loss_mask"].tolist()
        begin, position = 0, []
        for at in range(T):
            position.append(at - begin if options["reset_position_ids"] else at)
            begin = at + 1 if tokens[at] == EOD else begin
        assert sample["position_ids"].tolist() == position
        if options["create_attention_mask"]:
            barred = [[k > q or (options["reset_attention_mask"] and EOD in tokens[k:q]) for k in range(T)]
                      for q in range(T)]
            assert sample["attention_mask"].tolist() == [barred]


def test_partial_sample_is_padded_without_loss_and_spoils_no_other() -> None:
    dataset = make(Memory([11], np.arange(10, 21, dtype=np.int32)), split=Split.valid, T=4,
                   drop_last_partial_validation_sequence=False)
    order = dataset.shuffle_index.tolist()
    assert sorted(order) == [0, 1, 2]
    last = dataset[order.index(2)]
    assert last["tokens"].tolist() == [18, 19, 20, 0] and last["labels"].tolist() == [19, 20, 0, 0]
    assert last["loss_mask"].tolist() == [1, 1, 0, 0]
    assert dataset[order.index(0)]["loss_mask"].tolist() == [1, 1, 1, 1]
    ids, live = dataset.rows(0, 3)
    assert ids[order.index(2)].tolist() == [18, 19, 20, 0, 0] and live is not None and live.sum() == 10
    assert len(make(Memory([11]), split=Split.train, T=4, drop_last_partial_validation_sequence=False)) == 2


def test_sample_none_has_no_loss() -> None:
    dataset = make(Memory([30]))
    assert dataset[None]["tokens"].equal(dataset[0]["tokens"]) and not dataset[None]["loss_mask"].any()


def test_pad_token(caplog: pytest.LogCaptureFixture) -> None:
    def pad(**tokenizer: Any) -> int:
        return pad_id(GPTDatasetConfig(random_seed=0, sequence_length=4, allow_ambiguous_pad_tokens=ambiguous,
                                       tokenizer=SimpleNamespace(**tokenizer)))

    ambiguous = False
    assert pad(eod=1) == -1 and pad(eod=1, pad=2) == 2 and not caplog.records
    assert pad(eod=1, pad=1) == -1 and pad(eod=1, eos=2, pad=2) == -1
    assert pad(eod=1, pad=1, special_tokens_dict={"pad_token": 1, "eos_token": 4}) == 1
    assert len(caplog.records) == 2
    ambiguous = True
    assert pad(eod=1, pad=1) == 1


def test_made_up_data() -> None:
    config = GPTDatasetConfig(random_seed=1, sequence_length=512, tokenizer=SimpleNamespace(eod=7, vocab_size=50))
    train, valid, test = BlendedMegatronDatasetBuilder(MockGPTDataset, [1000, 10, None], lambda: True, config).build()
    assert config.mock and train is not None and valid is not None and test is not None
    assert [len(d.indices) for d in (train, valid, test)] == [33333, 33334, 33333]
    ids, _ = train.rows(5, 9)
    assert ids.shape == (4, 513) and ids.max() == 49 and (train[5]["tokens"].numpy() == ids[0, :-1]).all()


# ---- laziness -------------------------------------------------------------------------------------------------------

def test_nothing_of_the_size_of_the_samples_is_made() -> None:
    """Only the two shuffles: 4 bytes a document and epoch, 4 a sample. Building makes nothing at all."""
    n = 300_000
    memory = Memory([5] * n, np.zeros(5 * n, np.int32))
    tracemalloc.start()
    dataset = make(memory, n + n // 2, T=4)
    assert len(dataset) > n and dataset.order.num_epochs == 2 and dataset.order.apart
    built = tracemalloc.get_traced_memory()[1]
    dataset.rows(0, 1)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert built < 500_000
    order = 4 * 2 * n + 4 * len(dataset)
    assert order < kept < order + n // 2 and peak < order + 4_000_000 < order + 8 * len(dataset)


def test_pieces_say_which_documents_are_in_a_sample() -> None:
    lengths = [3, 0, 9, 4, 1, 6]
    dataset = make(Memory(lengths), T=4)
    pieces = dataset.pieces(0, len(dataset))
    ends = np.cumsum(pieces.counts).tolist()
    for end, count, ids in zip(ends, pieces.counts.tolist(), dataset.rows(0, len(dataset))[0].tolist()):
        parts = zip(*(a[end - count:end].tolist() for a in (pieces.sequences, pieces.offsets, pieces.lengths)))
        assert ids == [1000 * s + offset + j for s, offset, n in parts for j in range(n)]
    with pytest.raises(IndexError, match="there are 5"):
        dataset.pieces(0, 6)


# ---- bad input ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("split", "expected"), [
    ("98,1,1", [0.98, 0.99]), ("1,1", [0.5, 1.0]), ("1", [1.0]), ("0,1,0", [0.0, 1.0])])
def test_split(split: str, expected: list[float]) -> None:
    edges = [edge for part in split_matrix(split) if part for edge in part]
    assert edges[0] == 0 and edges[-1] == 1 and set(expected) <= {round(edge, 9) for edge in edges}
    assert (split_matrix("0,1,0")[0], split_matrix("0,1,0")[2]) == (None, None)


BAD = [
    ({"split": "98,1,1,1"}, "split: got '98,1,1,1'"), ({"split": "a,b"}, "split: got 'a,b'"),
    ({"split": "-1,2"}, "split: got '-1,2'"), ({"split": "0,0,0"}, "split: got"), ({"split": None}, "split: got none"),
    ({"split": "nan"}, "split: got 'nan'"),
    ({"blend": (["a", "b"], [1.0])}, "2 prefixes and 1 weights"), ({"blend": ([], None)}, "no prefix"),
    ({"blend": (["a", "b"], [1.0, 0.0])}, "weight 0.0 for b"), ({"blend": (["a"], [-2.0])}, "weight -2.0 for a"),
    ({"blend": (["a"], [float("nan")])}, "weight nan"),
    ({"blend_per_split": [None, None, None]}, "expected it alone"), ({"sequence_length": 0}, "at least 1"),
    ({"blend": None, "split": None, "blend_per_split": [(["a"], None)]}, "got 1 blends, expected 3"),
    ({"random_seed": -1}, "random_seed"), ({"random_seed": 2**32}, "random_seed"),
    ({"mid_level_dataset_surplus": -0.1}, "mid_level_dataset_surplus"), ({"eod_mask_loss": True}, "none with an `eod`"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_settings_are_one_sentence(changes: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"random_seed": 0, "sequence_length": 8, "blend": (["a"], None), "split": "98,1,1"}
    GPTDatasetConfig(**good)
    with pytest.raises(ValueError, match=message):
        GPTDatasetConfig(**{**good, **changes})


def test_bad_data_are_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"p, split train: 5 samples of 2 sequences without a token"):
        make(Memory([0, 0]), 5)
    assert len(make(Memory([0, 0]))) == 0 and np.asarray(make(Memory([0, 0])).sample_index).tolist() == [[0, 0]]
    memory = Memory([4, 4, 4])
    memory.sequence_lengths[1] = -2
    with pytest.raises(ValueError, match=r"p\.idx: sequence 1 has -2 tokens"):
        make(memory)
    with pytest.raises(ValueError, match="`eod` and a `vocab_size`"):
        MockGPTDataset.build_low_level_dataset("", GPTDatasetConfig(random_seed=0, sequence_length=4))
    config = GPTDatasetConfig(random_seed=0, sequence_length=4, blend=(["/no/such/prefix"], None), split="1")
    with pytest.raises(FileNotFoundError, match=r"/no/such/prefix\.idx"):
        BlendedMegatronDatasetBuilder(GPTDataset, [1, 1, 1], lambda: True, config).build()
