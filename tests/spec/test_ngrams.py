"""N-grams that texts share with items, compared with sets of tuples of words."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat import ngrams
from nanochat.ngrams import Index, Shared, fold, words_of
from tests.toy import examples

LETTERS = st.text("aAbé ß.\n_İ漢字１", max_size=40)
WORDS = st.lists(st.sampled_from(["a", "B", "cd", "é", "漢字"]), max_size=30).map(" ".join)
TEXTS = st.lists(LETTERS | WORDS, max_size=6)
law = settings(max_examples=examples(1), deadline=None, derandomize=True, database=None)


def expected(items, texts, n):
    """{(text, item): set of the shared n-grams}, one n-gram at a time."""
    found = {}
    for i, item in enumerate(items):
        words = words_of(item)
        length = min(n, len(words))
        if length < min(n, ngrams.SHORTEST):
            continue
        wanted = {tuple(words[at : at + length]) for at in range(len(words) - length + 1)}
        for t, text in enumerate(texts):
            there = words_of(text)
            shared = wanted & {tuple(there[at : at + length]) for at in range(len(there))}
            if shared:
                found[t, i] = shared
    return found


def found_in(index, texts):
    """{(text, item): (number of n-grams, the first)} as an index finds them."""
    return {(f.text, f.item): (f.num_ngrams, f.words) for f in index.find(texts)}


def check(items, texts, n):
    index = Index(items, [0] * len(items), n=n)
    found = found_in(index, texts)
    wanted = expected(items, texts, n)
    assert found.keys() == wanted.keys()
    for pair, (count, words) in found.items():
        assert count >= len(wanted[pair]), "an item may contain the same n-gram twice"
        assert words in {" ".join(ngram) for ngram in wanted[pair]}


@law
@given(TEXTS, TEXTS, st.integers(1, 10))
def test_law_exactly_the_shared_ngrams_are_found(items, texts, n):
    check(items, texts, n)


@law
@given(TEXTS, TEXTS, st.integers(1, 10))
def test_law_a_bad_hash_changes_nothing(items, texts, n):
    """With base 1, words of the same letters have equal hashes, and so have n-grams of the same
    words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngrams, "CHAR_BASE", 1)
        patch.setattr(ngrams, "WORD_BASE", 1)
        check(items, texts, n)


@law
@given(st.lists(WORDS, max_size=3), WORDS, st.integers(1, 4), st.integers(1, 20))
def test_law_long_texts_are_cut_without_a_loss(items, text, n, size):
    whole = found_in(Index(items, [0] * len(items), n=n), [text, text])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngrams, "BATCH_CHARS", size)
        assert found_in(Index(items, [0] * len(items), n=n), [text, text]) == whole


@law
@given(st.text(max_size=30))
def test_law_the_words_of_a_text_are_those_of_its_words(text):
    words = words_of(text)
    assert words_of(" ".join(words)) == words
    assert ngrams.Batch([fold(text)]).begins.size == len(words)


@pytest.mark.parametrize(
    "text",
    [
        "Straße: naïve, 12 ½ cafés!",
        "  STRASSE\tNAÏVE\n12 1⁄2 CAFÉS",
        "strasse—naïve_12… 1⁄2 ``cafe\u0301s''",
        "Ｓｔｒａｓｓｅ naïve １２ ½ cafés",
    ],
)
def test_case_spaces_punctuation_and_compatible_letters_do_not_matter(text):
    assert words_of(text) == ["strasse", "naïve", "12", "1", "2", "cafés"]


def test_a_script_without_spaces_has_one_word_per_letter():
    assert words_of("我在 Tokyo2020 で見た。") == ["我", "在", "tokyo2020", "で", "見", "た"]


def test_a_short_item_is_found_as_a_whole_and_a_shorter_one_is_not_looked_for():
    items = ["one two three four five six seven eight", "one two three four five six seven"]
    index = Index(items, [0, 0], n=13)
    assert index.sizes.tolist() == [1, 0] and index.num_words.tolist() == [8, 7]
    text = "Zero, ONE two\nthree (four) five six seven: eight nine"
    assert index.find([items[1], text]) == [Shared(1, 0, 1, items[0])]


def test_the_instructions_of_a_task_are_not_looked_for():
    instructions = "read the passage and choose the best of the following answers please"
    items = [f"{instructions} {i} apples or {i} pears" for i in range(20)]
    index = Index(items, [0] * 20, n=8)
    assert {f.item for f in index.find([instructions])} == set()
    assert {f.item for f in index.find([items[3]])} == {3}
    passages = [f"{instructions} number {i // 5} {i}" for i in range(200)]
    in_passages = Index(
        [text.replace("read", f"{i}") for i, text in enumerate(passages)], [0] * 200, n=8
    )
    assert len(in_passages.find([" ".join(passages[7].split()[-9:])])) == 5, "five share a passage"


def test_no_ngram_spans_two_texts():
    index = Index(["a b c d"], [0], n=4)
    assert index.find(["a b", "c d"]) == [] and len(index.find(["a b c d"])) == 1
