"""Blends, and Megatron's order as a stream: indices equal those of a plain loop, rows of a run are
Megatron's samples, and every promise of the lanes holds for them, too."""

import json
import tracemalloc
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat.dataloader import DataLoader, Dry
from nanochat.integrations.megatron import BlendedSamples
from nanochat.integrations.megatron_api import (
    BlendedDataset,
    BlendedMegatronDatasetBuilder,
    GPTDataset,
    GPTDatasetConfig,
    Split,
    normalize,
)
from nanochat.integrations.megatron_order import (
    SPLIT,
    WHOLE,
    SampleConfig,
    SampleStream,
    find_pairs,
    has_own_val,
    open_samples,
)
from nanochat.integrations.megatron_tables import blend_sources
from nanochat.sources import open_source
from nanochat.stream import ledger
from tests.token_files import Tokenizer, write_megatron
from tests.toy import BOS, digest_of_row, examples, json_copy, load_steps

T = 12
V = 4
R = 8
GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden" / "megatron"


def plain_blend(weights, n, limits=None):
    """The recurrence in plain Python."""
    counts = [0] * len(weights)
    sources = []
    samples = []
    for i in range(n):
        best, chosen = -float("inf"), -1
        for j, weight in enumerate(weights):
            deficit = weight * max(i, 1) - counts[j]
            if (limits is None or counts[j] < limits[j]) and deficit > best:
                best, chosen = deficit, j
        sources.append(chosen)
        samples.append(counts[chosen])
        counts[chosen] += 1
    return sources, samples


@settings(max_examples=examples(1.6))
@given(
    weights=st.lists(st.floats(0.01, 1) | st.integers(1, 9).map(float), min_size=1, max_size=11),
    data=st.data(),
)
def test_a_blend_follows_the_recurrence(weights, data):
    """With limits, a source leaves after its last sample, even if its deficit is the greatest."""
    shares = normalize(weights)
    n = data.draw(st.integers(0, 400))
    limits = None
    if data.draw(st.booleans()):
        limits = [data.draw(st.integers(1, 90)) for _ in weights]
        n = sum(limits)
    tables = blend_sources(shares, n, limits)
    sources, samples = tables["dataset_index"], tables["dataset_sample_index"]
    assert (sources.tolist(), samples.tolist()) == plain_blend(shares, n, limits)
    assert (sources.dtype, samples.dtype) == (np.int16, np.int64)


# ---- data sets -----------------------------------------------------------------------------------


def write_pair(prefix, lengths, *, seed=0, cut=False):
    """A pair of documents of these lengths, each with an EOD at the end; with `cut` every third is
    two sequences."""
    rng, documents = np.random.default_rng(seed), []
    for i, n in enumerate(lengths):
        ids = [*rng.integers(0, BOS, n - 1), BOS] if n else []
        documents.append([ids[: n // 2], ids[n // 2 :]] if cut and i % 3 == 0 else [ids])
    write_megatron(prefix, documents)
    return prefix


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """The --data-path of three pairs."""
    root, paths = tmp_path_factory.mktemp("pairs"), []
    for seed, (name, n) in enumerate({"a": 90, "b": 60, "c": 20}.items()):
        lengths = np.random.default_rng(seed).integers(0, 31, n).tolist()
        paths.append(write_pair(root / name, lengths, seed=seed, cut=name == "b"))
    return ",".join(map(str, paths))


@pytest.fixture(scope="module")
def prefixes(pairs):
    return pairs.split(",")


def build(blended, sizes, *, split="8,1,1", **options):
    config = GPTDatasetConfig(
        random_seed=3, sequence_length=16, blend=blended, split=split, **options
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


def test_a_blend_is_counted_without_a_wider_copy_of_its_index():
    """Regression: the copy took 8 bytes per sample, 5 GB in each process of a long run."""
    index = np.arange(1 << 22).astype(np.int16) % 3
    blend = BlendedSamples.__new__(BlendedSamples)
    blend.datasets, blend.dataset_index = [None] * 4, index
    tracemalloc.start()
    try:
        counts = blend.counts(len(index) - 5)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert counts == np.bincount(index[:-5], minlength=4).tolist()
    assert peak < 3 * index.nbytes
    assert blend.counts(0) == [0, 0, 0, 0]


def test_the_builder_makes_a_data_set_or_a_blend_for_each_split(prefixes):
    """What the golden cases do not have: weights for one prefix, ranks without data, a list of
    validation sets."""
    assert [type(d) for d in build((prefixes[:1], [2.0]), [5, 5, 5])] == [BlendedDataset] * 3
    config = GPTDatasetConfig(random_seed=3, sequence_length=16, blend=(prefixes, None), split="1")
    assert (
        BlendedMegatronDatasetBuilder(GPTDataset, [1] * 3, lambda: False, config).build()
        == [None] * 3
    )
    blends = [(prefixes[:1], [4.0]), (prefixes, None), None]
    one, several, none = build(
        None, [5, None, 1], split=None, blend_per_split=blends, multiple_validation_sets=True
    )
    assert (
        type(one) is GPTDataset
        and none is None
        and [len(d.indices) for d in several] == [90, 80, 20]
    )


def test_bad_blends_are_one_sentence(prefixes):
    for sizes in ([1, 2], [1, -2, 3]):
        with pytest.raises(ValueError, match=r"sizes: got \["):
            build((prefixes, None), sizes)
    with pytest.raises(ValueError, match="weights and no number of samples for split train"):
        build((prefixes, [1.0] * 3), [None, 1, 1])
    with pytest.raises(ValueError, match=r"weights .* for 3 prefixes"):
        build((prefixes, [1.0] * 2), [1, 1, 1])
    with pytest.raises(
        ValueError, match=r"/b has no sample of 16 tokens in split valid; remove it"
    ):
        build((prefixes, None), [None] * 3, split="98,1,1")
    sources = build((prefixes, None), [None] * 3)[0].datasets
    config = sources[0].config
    with pytest.raises(
        ValueError, match=r"takes [\d,]+ samples from .*/a, which has [\d,]+; raise mid_level"
    ):
        BlendedDataset(sources, [98, 1, 1], 1000, config)
    blend = BlendedDataset(sources, [1, 1, 1], 30, config)
    assert blend[-1]["dataset_id"] == blend.locate(29)[0]
    for i in (-31, 30):
        with pytest.raises(IndexError, match="has 30 samples"):
            blend[i]
    with pytest.raises(ValueError, match=r"blend: got 32,768 sources, expected at most 32,767"):
        blend_sources([1] * 32_768, 1)


# ---- a run's stream ------------------------------------------------------------------------------


def sources_of(data_path, split=SPLIT, part="train", tokenizer=None):
    manifests = find_pairs(data_path, None, split)[part]
    return {
        bucket: open_source(manifest, tokenizer or Tokenizer())
        for bucket, manifest in manifests.items()
    }


def config_of(**changed):
    return SampleConfig(
        **{
            "T": T,
            "V": V,
            "seed": 5,
            "num_samples": 10 * R,
            "weights": (3.0, 2.0, 1.0),
            "split": SPLIT,
            **changed,
        }
    )


def stream_of(config, sources, **more):
    return SampleStream(config, sources, range(config.V), tokenizer="bytes", **more)


@pytest.mark.skipif(
    not GOLDEN.exists(), reason=f"{GOLDEN}: megatron-core's own samples are not here"
)
@pytest.mark.parametrize(
    "case, names, weights", [("single", "a", None), ("blend", "ab", (0.7, 0.3))]
)
def test_rows_are_the_samples_of_megatron_core(case, names, weights):
    expected = json.loads((GOLDEN / "golden.json").read_text())["results"][case]["splits"]["train"]
    num_samples = expected.get("num_samples_asked") or expected["size"]
    config = SampleConfig(
        T=128, V=4, seed=1234, num_samples=num_samples, split="98,1,1", weights=weights
    )
    sources = sources_of(
        ",".join(str(GOLDEN / name) for name in names), "98,1,1", tokenizer=Tokenizer(32768)
    )
    rows = stream_of(config, sources).next_rows(16)
    assert [row.tokens.tolist() for row in rows] == expected["first64"]
    assert [names.index(row.bucket) for row in rows] == expected.get("dataset_index", [0] * 64)[:64]


def test_rows_are_made_without_tensors_and_keep_the_type_on_disk(pairs, monkeypatch):
    """With a tensor of int64 per sample, a run would read half as many tokens per second."""
    monkeypatch.setattr(torch, "from_numpy", lambda array: pytest.fail("a tensor of a sample"))
    rows = stream_of(config_of(), sources_of(pairs)).next_rows(2)
    assert {row.tokens.dtype for row in rows} == {np.dtype(np.uint16)}
    assert all(row.live is None for row in rows)


def test_documents_of_a_row_end_with_their_eod(pairs):
    with DataLoader(
        config_of(),
        sources_of(pairs),
        tokenizer=Tokenizer(),
        rows_per_step=80,
        device_batch_size=80,
        with_doc_ids=True,
    ) as loader:
        batch = next(loader)
    assert batch.doc_ids is not None and batch.doc_ids.max() > 1, (
        "the case: three documents in a row"
    )
    for inputs, doc_ids in zip(batch.inputs.tolist(), batch.doc_ids.tolist()):
        assert doc_ids == [inputs[:at].count(BOS) for at in range(T)]


# ---- the same for every W, B, restart and batch size ---------------------------------------------


def as_megatron(config, sources):
    """The samples of a run as megatron-core's classes give them."""
    pairs = list(sources.values())
    names = [Path(p.manifest["root"]) / p.manifest["files"][0]["name"] for p in pairs]
    settings = GPTDatasetConfig(
        random_seed=config.seed,
        sequence_length=config.T,
        blend=([str(name.with_suffix("")) for name in names], config.weights),
        split=config.split,
        tokenizer=SimpleNamespace(eod=pairs[0].bos),
        eod_mask_loss=config.eod_mask_loss,
    )
    sizes = (config.num_samples, 0, 0)
    builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, settings)
    return builder.build_split(Split.train)


def digests_of(config, sources, first, rows):
    """The digests of steps of `rows` rows, from sample `first` on, by the definition of the
    digest."""
    samples, digests = as_megatron(config, sources), []
    for at in range(first, config.num_samples - rows + 1, rows):
        total = 0
        for i in range(rows):
            s = samples[at + i]
            total += digest_of_row(
                i, [*s["tokens"].tolist(), int(s["labels"][-1])], s["loss_mask"].int().tolist()
            )
        digests.append(total % 2**64)
    return digests


@pytest.mark.parametrize(
    "W, B, changed",
    [
        (1, 8, {}),
        (2, 3, {"eod_mask_loss": True}),
        (3, 1, {"weights": None}),
        (4, 2, {"eod_mask_loss": True}),
    ],
)
def test_digests_equal_those_of_the_samples_for_every_number_of_processes_and_micro_batch(
    pairs, W, B, changed
):
    config, sources = config_of(**changed), sources_of(pairs)
    digests = [digest for digest, _ in load_steps(config, sources, R=R, W=W, B=B, steps=10)]
    assert digests == digests_of(config, sources, 0, R) and len(set(digests)) == 10


def test_restored_at_any_step_on_any_number_of_processes_with_any_batch_size_the_next_sample_follows(
    pairs,
):
    config, sources = config_of(eod_mask_loss=True), sources_of(pairs)
    whole = list(load_steps(config, sources, R=R, W=2, B=3, steps=9))
    for step, (_, cursors) in enumerate(whole, 1):
        W, rows = 1 + step % 4, V * (1 + step % 3)
        expected = digests_of(config, sources, step * R, rows)
        restored = list(
            load_steps(
                config,
                sources,
                R=rows,
                W=W,
                B=2,
                steps=min(3, len(expected)),
                start_step=step,
                cursors=json_copy(cursors),
            )
        )
        assert [digest for digest, _ in restored] == expected[:3]
        assert [cursor["samples"] for cursor in restored[0][1]] == [step * R + rows] * V
        assert [cursor["lane"] for cursor in restored[0][1]] == list(range(V))
    with pytest.raises(Dry, match="step 10"):
        list(
            load_steps(config, sources, R=R, W=1, B=8, steps=2, start_step=9, cursors=whole[-1][1])
        )


def test_cursors_of_other_samples_data_or_steps_are_refused_with_what_differs(pairs):
    sources = sources_of(pairs)
    stream = stream_of(config_of(), sources)
    cursors = stream.cursors()
    for changed, diff in (
        ({"num_samples": 81}, "num_samples was 80, now 81"),
        ({"seed": 6}, "seed was 5, now 6"),
        ({"split": "98,1,1"}, "split was 969,30,1, now 98,1,1"),
        ({"V": 2}, "V was 4, now 2"),
        ({"weights": (3.0, 2.0, 2.0)}, r"weights was \[3.0, 2.0, 1.0\], now"),
        ({"eod_mask_loss": True}, "eod_mask_loss was F"),
        ({"T": 13}, "T was 12"),
    ):
        with pytest.raises(ValueError, match=f"belongs to another stream .*{diff}"):
            stream_of(config_of(**changed), sources, cursors=cursors)
    stream.next_rows(2)
    a, b, c = pairs.split(",")
    for those, data, message in (
        (
            [*cursors[:2], *stream.cursors()[2:]],
            pairs,
            r"from different steps, after 0 and 8 samples",
        ),
        (
            cursors[:3],
            pairs,
            r"cursors of lanes \[0, 1, 2\], expected one for each of \[0, 1, 2, 3\]",
        ),
        (cursors, f"{b},{a},{c}", r"prefixes was \['a', 'b', 'c'\], now \['b', 'a', 'c'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            stream_of(config_of(), sources_of(data), cursors=those)


def test_the_index_cache_does_not_change_the_rows(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr("nanochat.integrations.megatron_tables.WORTH_STORING", 0)
    sources = sources_of(pairs)
    cursors = stream_of(config_of(), sources).cursors()
    kept = stream_of(config_of(index_cache=str(tmp_path)), sources, cursors=cursors)
    assert len(list(tmp_path.glob("*-GPTDataset-train-*_index.npy"))) == 9
    assert len(list(tmp_path.glob("*-BlendedDataset-train-*_index.npy"))) == 2
    for row, expected in zip(
        kept.next_rows(5), stream_of(config_of(), sources).next_rows(5), strict=True
    ):
        assert (row.bucket, row.tokens.tolist()) == (expected.bucket, expected.tokens.tolist())


# ---- accounts ------------------------------------------------------------------------------------


def test_accounts_balance_after_every_step(pairs):
    config, sources = config_of(num_samples=400), sources_of(pairs)
    samples = open_samples(config, sources)
    for step, (_, cursors) in enumerate(load_steps(config, sources, R=R, W=2, B=4, steps=50), 1):
        accounts = ledger(cursors, T)
        for name, count, part in zip(sources, samples.counts(step * R), samples.datasets):
            account = accounts[name]
            assert (account["rows"], account["read"], account["repeated"]) == (
                count,
                count * T,
                count,
            )
            assert account["emitted"] == account["read"] + account["repeated"]
            assert (
                account["bos"] == account["cropped"] == account["pending"] == account["padded"] == 0
            )
            assert account["epochs"] == count * T // part.num_tokens_per_epoch
    assert max(account["epochs"] for account in accounts.values()) > 1, (
        "the case: epochs wrap around"
    )


# ---- rows and documents --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names, weights, num", [("abc", (3.0, 2.0, 1.0), 400), ("abc", None, 100), ("b", None, 400)]
)
def test_rows_name_their_documents_and_the_samples_with_a_document_are_those_that_name_it(
    pairs, names, weights, num
):
    sources = sources_of(",".join(path for path in pairs.split(",") if path[-1] in names))
    stream = stream_of(config_of(weights=weights, num_samples=num), sources)
    documents = {}
    uses = {}
    for bucket, part in zip(stream.buckets, stream.samples.datasets):
        for number, (first, end) in enumerate(pairwise(part.dataset.document_indices)):
            sequences = part.dataset[first:end]
            documents[bucket, number] = [t for ids in sequences for t in ids.tolist()]
            uses[bucket, number] = []
    for row in stream.next_rows(num // V):
        places = stream.describe(row)
        assert sum(place["tokens"] for place in places) == T + 1
        for place in places:
            document = documents[row.bucket, place["document"]]
            (start, stop) = (place["start"], place["stop"])
            assert (
                row.tokens[place["at"] : place["at"] + place["tokens"]].tolist()
                == document[start:stop]
            )
            assert (place["file"], place["of"]) == (f"{row.bucket}.bin", len(document))
            if start < stop:  # some sequences are empty
                uses[row.bucket, place["document"]].append((row.sample, start, stop))
    several = 0
    for (bucket, number), document in documents.items():
        pieces = stream.samples_with(bucket, number)
        assert sorted(piece[1:] for piece in pieces) == sorted(uses[bucket, number])
        assert stream.document_length(bucket, number) == len(document)
        of_epochs = Counter()
        for piece in pieces:
            of_epochs[piece.epoch] += piece.stop - piece.start
        assert all(ids <= len(document) + num for ids in of_epochs.values()), (
            "neighbouring samples share one id"
        )
        several += len(of_epochs) > 1
    assert (several > 10) == (weights is not None or num > 100), "the case: documents repeat"


def test_an_id_outside_the_vocabulary_is_an_error_that_names_file_and_sequence(tmp_path):
    write_megatron(
        tmp_path / "a", [[[1] * 11 + [-3 if i == 2 else 2, BOS]] for i in range(9)], "<i4"
    )
    config = config_of(weights=None, num_samples=R, split="8,1")
    with (
        DataLoader(
            config,
            sources_of(str(tmp_path / "a"), "8,1"),
            tokenizer=Tokenizer(),
            rows_per_step=R,
            device_batch_size=R,
        ) as loader,
        pytest.raises(ValueError, match=r"a\.bin: sequence 2 holds the id -3, outside"),
    ):
        next(loader)


# ---- training and validation ---------------------------------------------------------------------


def test_validation_reads_the_whole_documents_of_the_valid_split(pairs):
    split = "70,20,10"
    train, val = sources_of(pairs, split), sources_of(pairs, split, "val")
    samples = open_samples(config_of(split=split), train)
    for name, part in zip(train, samples.datasets):
        edges, n = part.dataset.document_indices, len(part.dataset)
        begins, ends = round(0.7 * n), round(0.9 * n)
        assert part.indices == range(0, begins)
        expected = [d for d in range(len(edges) - 1) if edges[d] >= begins and edges[d + 1] <= ends]
        stored = [
            np.append(BOS, np.concatenate(part.dataset[edges[d] : edges[d + 1]])[:-1]).tolist()
            if edges[d + 1] > edges[d]
            and sum(part.dataset.sequence_lengths[edges[d] : edges[d + 1]])
            else [BOS]
            for d in expected
        ]
        documents = [
            d.ids.tolist()
            for g, n in enumerate(val[name].groups)
            for d in val[name].read(g, np.arange(n))
        ]
        assert documents == stored and len(documents) > 1
        cut = [d for d in range(len(edges) - 1) if edges[d] < begins < edges[d + 1]]
        assert int(train[name].groups.sum()) + len(cut) == expected[0]
    assert any(samples.datasets[1].dataset.document_indices[:-1] != np.arange(60)), (
        "the case: several sequences"
    )


def test_validation_may_have_its_own_files_and_no_prefix_is_named_twice(pairs, tmp_path):
    own = write_pair(tmp_path / "own", [5, 6])
    val = find_pairs(pairs, own, WHOLE)["val"]
    assert list(val) == ["own"] and "documents" not in val["own"]
    for name in ("train/x/b", "train/a", "val/x/v"):
        (tmp_path / "dir" / name).parent.mkdir(parents=True, exist_ok=True)
        write_pair(tmp_path / "dir" / name, [9, 9])
    manifests = find_pairs(tmp_path / "dir", None, WHOLE)
    assert {k: [m["files"][0]["name"] for m in v.values()] for k, v in manifests.items()} == {
        "train": ["train/a.bin", "train/x/b.bin"],
        "val": ["val/x/v.bin"],
    }
    assert list(manifests["train"]) == ["a", "x/b"]
    assert has_own_val(tmp_path / "dir", None) and has_own_val(pairs, own)
    assert not has_own_val(pairs, None)
    a = pairs.split(",")[0]
    with pytest.raises(ValueError, match="--data-path: it names a twice"):
        find_pairs(f"{a},{a}", None, SPLIT)
