"""Generation with a cache equals the full forward."""

import math
from types import SimpleNamespace

import pytest
import torch

from nanochat.engine import Engine, KVCache, sample_next_token
from nanochat.gpt import GPTConfig
from tests.models import build, shake, tokens
from tests.toy import assert_same_sums

CONFIG = GPTConfig(sequence_len=150, vocab_size=70, n_layer=4, n_head=4, n_kv_head=2, n_embd=32)
BOS = 69


def tokenizer(*special):
    """A fake tokenizer; the last ids are special."""
    ids = {name: BOS - i for i, name in enumerate(("<|bos|>", *special))}
    return SimpleNamespace(
        get_bos_token_id=lambda: BOS, get_special_tokens=lambda: ids, encode_special=ids.get
    )


@pytest.fixture(scope="module")
def model():
    """A model with random weights in every part, so that windows, gates, smear and backout all
    matter."""
    return shake(build(CONFIG)).eval().requires_grad_(False)


def naively(model, tokens, max_tokens, seed=42, **sampling):
    """The continuation of `tokens`, with a full forward of the whole sequence for each token."""
    rng, ids = torch.Generator().manual_seed(seed), torch.tensor([tokens])
    for _ in range(max_tokens):
        ids = torch.cat((ids, sample_next_token(model(ids)[:, -1], rng, **sampling)), dim=1)
    return ids[0, len(tokens) :].tolist()


@pytest.mark.parametrize("chunks", [[1] * 200, [150] + [1] * 50, [3, 130, 1, 66], [200]])
def test_decoding_from_the_cache_equals_the_full_forward_at_every_position(model, chunks):
    assert sum(chunks) == 200 and model.config.window_sizes == [128, 128, 128, 150]
    x = tokens(2, 200, vocab=67)
    full = model(x)
    cache = KVCache(2, 200, model=model)
    parts = [model(part, kv_cache=cache) for part in x.split(chunks, dim=1)]
    terms = 4 * (200 + 4 * CONFIG.n_embd)  # in each layer, keys and the widest matrix
    assert_same_sums(torch.cat(parts, dim=1), full, terms=terms)
    assert cache.get_pos() == 200 and full.std() > 0.5
    with pytest.raises(ValueError, match="201 tokens do not fit into 200"):
        model(x[:, :1], kv_cache=cache)
    cache.reset()
    assert_same_sums(model(x[:, :9], kv_cache=cache), full[:, :9], terms=terms)


def test_samples_equal_those_without_a_cache(model):
    engine = Engine(model, tokenizer())
    for samples, prompt, sampling in (
        (3, tokens(1, 170, vocab=67)[0].tolist(), {"temperature": 0}),
        (1, [1, 2, 3], {"temperature": 0.7, "top_k": 20, "seed": 9}),
    ):
        naive = naively(model, prompt, 20, **sampling)
        assert BOS not in naive and len(set(naive)) > 2
        rows, masks = engine.generate_batch(prompt, samples, max_tokens=20, **sampling)
        assert rows == [prompt + naive] * samples
        assert masks == [[0] * len(prompt) + [1] * 20] * samples


def test_sampling_follows_temperature_and_top_k():
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]]).log_softmax(1).expand(20000, 4)
    rng = torch.Generator().manual_seed(0)
    assert (sample_next_token(logits, None, temperature=0) == 1).all()
    for temperature, top_k in ((1.0, None), (0.5, None), (1.0, 2), (2.0, 99)):
        drawn = sample_next_token(logits, rng, temperature=temperature, top_k=top_k)
        kept = logits[0] / temperature + (0.0 if top_k != 2 else torch.tensor([-1e9, 0, 0, -1e9]))
        shares = torch.bincount(drawn[:, 0], minlength=4) / 20000
        torch.testing.assert_close(shares, kept.softmax(0), atol=0.015, rtol=0)
    for wrong in ({"temperature": -1.0}, {"temperature": math.nan}, {"top_k": 0}):
        with pytest.raises(ValueError, match="sampling: got"):
            sample_next_token(logits, rng, **wrong)


def test_a_seed_determines_the_samples_and_samples_differ_from_the_first_token(model):
    def draw(**kwargs):
        columns = Engine(model, tokenizer()).generate(
            [BOS, 1, 2], 8, max_tokens=6, temperature=2.0, **kwargs
        )
        return [column for column, _ in columns]

    torch.manual_seed(0)
    first = draw(seed=5)
    torch.manual_seed(1)
    assert draw(seed=5) == first != draw(seed=6) and len(set(first[0])) > 1
    assert len(set(zip(*first, strict=True))) == 8
    assert draw(top_k=1) == [[column[0]] * 8 for column in draw(top_k=1)]


@pytest.fixture
def scripted(model, monkeypatch):
    """A function (script, tokenizer) -> engine whose greedy decoding of row i yields row i of the
    script."""

    def engine(script, tokenizer):
        columns = iter(torch.tensor(script).T)
        monkeypatch.setattr(
            Engine,
            "_forward",
            lambda self, tokens, cache: torch.nn.functional.one_hot(
                next(columns)[: len(tokens)], 70
            ).float(),
        )
        return Engine(model, tokenizer)

    return engine


def test_stop_tokens_end_a_row_and_generation_ends_with_the_last_row(scripted):
    end = BOS - 1
    script = [[5, 6, BOS, 7, 8, 9], [5, end, 1, 2, 3, 4], [5, 6, 7, 8, BOS, 4]]
    with_end = tokenizer("<|assistant_end|>")
    columns = [
        c for c, _ in scripted(script, with_end).generate([1], 3, max_tokens=6, temperature=0)
    ]
    # all rows end within five columns
    assert columns == [list(c) for c in zip(*script, strict=True)][:5]
    rows, masks = scripted(script, with_end).generate_batch([1], 3, max_tokens=6, temperature=0)
    assert rows == [[1, 5, 6], [1, 5], [1, 5, 6, 7, 8]]
    assert masks == [[0, 1, 1], [0, 1], [0, 1, 1, 1, 1]]
    rows, _ = scripted(script, tokenizer()).generate_batch([1], 3, max_tokens=6, temperature=0)
    assert rows == [[1, 5, 6], [1, 5, end, 1, 2, 3, 4], [1, 5, 6, 7, 8]]


def test_without_max_tokens_it_fills_the_sequence_length(scripted):
    engine = scripted([[3] * 200], tokenizer())
    assert len(engine.generate_batch([1] * 140, temperature=0)[0][0]) == 150
    assert len(engine.generate_batch([1] * 140, temperature=0, max_tokens=20)[0][0]) == 160
    assert engine.generate_batch([1, 2], max_tokens=0) == ([[1, 2]], [[0, 0]])


def test_impossible_requests_are_refused(model):
    engine = Engine(model, tokenizer())
    with pytest.raises(ValueError, match="got 0 prompt tokens"):
        engine.generate_batch([])
    with pytest.raises(ValueError, match="pass max_tokens"):
        engine.generate_batch([1] * 150)
