"""
N-grams of words that texts share with a fixed set of items, such as the questions of a benchmark.

Texts are compared by their words alone, so case, spaces and punctuation do not matter:

    "The CAT, sat:"  --fold-->  "the cat, sat:"  --words-->  the | cat | sat

A *word* is a run of letters and digits (Unicode's categories L and N), after NFKC and case folding.
Scripts that put no spaces between words have one word per letter. All texts of a batch are hashed
at once, without a loop over words. A sum over a prefix of the characters gives the hash of any
range of them, because an odd base A has an inverse modulo 2^64:

    characters    t h e _ c a t        S[i] = sum of c[j] A^j over all j < i
    words         the: (S[3] - S[0]) A^0       cat: (S[7] - S[4]) A^-4      the same wherever it is
    n-grams       the same again, over the hashes of words instead of characters

The hash only finds candidates: `Index` compares the words of each one, so it reports no n-gram that
is not there. It misses none either, because equal words have equal hashes.

**Short items.** An item with fewer than n words is looked for as a whole, if it has at least
SHORTEST words. A shorter one would be found by chance, and is not looked for.

**Common n-grams.** The items of a task may share its instructions. An n-gram that more than COMMON
items and COMMON_SHARE of the items of a task contain says nothing about one of them, so it is not
looked for. (Questions about one passage also share it, but no passage has that many.)
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

SHORTEST = 8  # words of an item that is looked for
COMMON, COMMON_SHARE = 10, 0.1
BATCH_CHARS = 1 << 20  # hashed at once, at about 60 bytes of memory per character
CHAR_BASE = 0x9E3779B97F4A7C15  # any two odd numbers would do
WORD_BASE = 0xD1342543DE82EF95
# of scripts without spaces: Thai and Lao, Burmese, Khmer, kana, Han
SPACELESS = (
    (0x0E00, 0x0EFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x3040, 0x30FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)
_ALONE = "".join(f"{chr(first)}-{chr(last)}" for first, last in SPACELESS)
WORD = re.compile(rf"(?=\w)[{_ALONE}]|[^\W_{_ALONE}]+")
GAP = re.compile(r"[\W_]")
SEPARATOR = "\n"  # between the texts of a batch


# ---- words ---------------------------------------------------------------------------------------


def fold(text: str) -> str:
    """The text in the form in which it is compared: NFKC, then case folding, then NFKC again,
    because folding may leave letters that can be composed."""
    if text.isascii():
        return text.lower()
    composed = unicodedata.normalize("NFKC", text)
    folded = composed.casefold()
    return unicodedata.normalize("NFKC", folded)


def words_of(text: str) -> list[str]:
    """The words of a text."""
    return WORD.findall(fold(text))


@cache
def _kinds() -> np.ndarray:
    """(0x110000,) int8: 0 for a character that is not in a word, 1 for one that is, 2 for one that
    is a word by itself."""
    is_word = [chr(code).isalnum() for code in range(0x110000)]
    kinds = np.array(is_word, np.int8)
    for first, last in SPACELESS:
        kinds[first : last + 1] *= 2
    return kinds


# ---- hashes --------------------------------------------------------------------------------------


def _powers(base: int, count: int) -> np.ndarray:
    """(count,) uint64: the powers 0 to count - 1 of a base, modulo 2^64."""
    factors = np.full(count, base, np.uint64)
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _range_hashes(
    values: np.ndarray, begins: np.ndarray, ends: np.ndarray, base: int
) -> np.ndarray:
    """(R,) uint64: the hashes of the ranges `begins` to `ends` - 1, each (R,), of the values
    (N,)."""
    weighted = values.astype(np.uint64) * _powers(base, len(values))
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(weighted, out=sums[1:])
    inverse = pow(base, -1, 2**64)
    shift_back = _powers(inverse, len(values) + 1)
    return (sums[ends] - sums[begins]) * shift_back[begins]


def _is_new(values: np.ndarray) -> np.ndarray:
    """(N,) bool: whether each of the values (N,) differs from the one before it."""
    is_new = np.ones(len(values), bool)
    is_new[1:] = values[1:] != values[:-1]
    return is_new


class Batch:
    """The words of some folded texts, together.

    begins, ends    (W,) the first character of each word and the one after its last
    texts           (W,) the number of the text that has the word
    hashes          (W,) uint64
    """

    def __init__(self, folded: Sequence[str]) -> None:
        self.num_texts = len(folded)
        joined = SEPARATOR.join(folded)
        encoded = joined.encode("utf-32-le", "surrogatepass")
        self._characters = np.frombuffer(encoded, np.uint32)

        # a word is a run of characters of kind 1, or one of kind 2
        kinds = _kinds()[self._characters]
        padded = np.pad(kinds, 1)
        before = padded[:-2]
        after = padded[2:]
        is_word = kinds > 0
        is_alone = kinds == 2
        is_first = is_word & (is_alone | (before != 1))
        is_last = is_word & (is_alone | (after != 1))
        self.begins = np.flatnonzero(is_first)
        self.ends = np.flatnonzero(is_last) + 1

        # each text and its separator
        lengths = np.array([len(text) + 1 for text in folded], np.int64)
        ends_of_texts = np.cumsum(lengths)
        self.texts = np.searchsorted(ends_of_texts, self.begins, side="right")
        self.hashes = _range_hashes(self._characters, self.begins, self.ends, CHAR_BASE)

    def ngrams(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """(hash (G,) uint64, first word (G,)) of each n-gram of the texts; none spans two texts."""
        if len(self.hashes) < n:
            return np.zeros(0, np.uint64), np.zeros(0, np.int64)
        last = self.texts[n - 1 :]
        first = np.flatnonzero(self.texts[: len(last)] == last)
        hashes = _range_hashes(self.hashes, first, first + n, WORD_BASE)
        return hashes, first

    def words(self, first: int, n: int) -> list[str]:
        """The n words from word `first` on."""
        begin = self.begins[first]
        end = self.ends[first + n - 1]
        encoded = self._characters[begin:end].tobytes()
        return WORD.findall(encoded.decode("utf-32-le", "surrogatepass"))


class Piece(NamedTuple):
    """A folded text, or a piece of a long one."""

    text: int  # its number
    folded: str


def _pieces(texts: Sequence[str], n: int) -> Iterator[Piece]:
    """The texts, folded. Long ones are cut between words; a piece also has the next n words, so
    that each n-gram is in a piece."""
    for number, text in enumerate(texts):
        folded = fold(text)
        at = 0
        while len(folded) - at > BATCH_CHARS:
            cut = GAP.search(folded, at + BATCH_CHARS)
            if cut is None:
                break
            next_words = [*islice(WORD.finditer(folded, cut.start()), n)]
            end = next_words[-1].end() if next_words else len(folded)
            yield Piece(number, folded[at:end])
            at = cut.start()
        yield Piece(number, folded[at:])


def _batches(texts: Sequence[str], n: int) -> Iterator[list[Piece]]:
    """The pieces of the texts in batches of about BATCH_CHARS."""
    batch: list[Piece] = []
    size = 0
    for piece in _pieces(texts, n):
        if batch and size + len(piece.folded) > BATCH_CHARS:
            yield batch
            batch = []
            size = 0
        batch.append(piece)
        size += len(piece.folded)
    if batch:
        yield batch


# ---- items ---------------------------------------------------------------------------------------


class Shared(NamedTuple):
    """N-grams that a text shares with an item."""

    text: int  # its number
    item: int  # its number
    num_ngrams: int  # how many of the item's n-grams the text contains
    words: str  # the first of them in the item


class Table(NamedTuple):
    """The n-grams of one length of all items, in the order of their hashes."""

    hashes: np.ndarray  # (G,) uint64, ascending; an n-gram of several items occurs as often
    items: np.ndarray  # (G,) number of the item
    words: np.ndarray  # (G,) number of the first word in the item

    def take(self, entries: np.ndarray) -> "Table":
        """A table of some entries: their numbers, or a bool for each of them."""
        return Table(self.hashes[entries], self.items[entries], self.words[entries])


class Index:
    """The n-grams of a set of items.

    texts, tasks: the text of each item, and the number of its task. ValueError if n is below 1.
    `num_words` (I,): the words of each item. `sizes` (I,): how many of its n-grams are looked for.
    """

    def __init__(self, texts: Sequence[str], tasks: Sequence[int], *, n: int) -> None:
        if n < 1:
            raise ValueError(f"n-grams: got n = {n}, expected at least 1")
        self.n = n
        self._folded = [fold(text) for text in texts]
        self._words = lru_cache(4096)(self._words_of_item)
        self.num_words = np.zeros(len(texts), np.int64)
        self.sizes = np.zeros(len(texts), np.int64)

        # the n-grams of all items, batch by batch
        parts: dict[int, list[Table]] = {}
        for first, batch in self._item_batches():
            end = first + batch.num_texts
            self.num_words[first:end] = np.bincount(batch.texts, minlength=batch.num_texts)
            for length in range(min(n, SHORTEST), n + 1):
                part = self._ngrams_of(batch, first, length)
                parts.setdefault(length, []).append(part)

        # a table for each length
        of_task = np.array(tasks, np.int64)
        self._tables: dict[int, Table] = {}
        for length, of_length in parts.items():
            columns = [np.concatenate(column) for column in zip(*of_length)]
            table = _sorted(Table(*columns), of_task)
            table = _without_common(table, of_task)
            self.sizes += np.bincount(table.items, minlength=len(texts))
            if len(table.hashes):
                self._tables[length] = table

    def _words_of_item(self, item: int) -> list[str]:
        return WORD.findall(self._folded[item])

    def _item_batches(self) -> Iterator[tuple[int, Batch]]:
        """(number of the first item, words of the items from there on), for all items."""
        first = 0
        while first < len(self._folded):
            end = first
            size = 0
            while end < len(self._folded) and size < BATCH_CHARS:
                size += len(self._folded[end])
                end += 1
            yield first, Batch(self._folded[first:end])
            first = end

    def _ngrams_of(self, batch: Batch, first_item: int, length: int) -> Table:
        """The n-grams of a length of some items: of those with at least n words if it is n, else of
        those with just this number."""
        hashes, first = batch.ngrams(length)
        of_batch = batch.texts[first]
        end = first_item + batch.num_texts
        counts = self.num_words[first_item:end]
        words_before = np.cumsum(counts) - counts
        table = Table(hashes, of_batch + first_item, first - words_before[of_batch])
        if length == self.n:
            return table
        return table.take(counts[of_batch] == length)

    def find(self, texts: Sequence[str]) -> list[Shared]:
        """The items that share n-grams with a text, for each text."""
        # {(text, item): first words of their n-grams, and the length of these}
        firsts: dict[tuple[int, int], set[int]] = {}
        lengths: dict[tuple[int, int], int] = {}
        for pieces in _batches(texts, self.n):
            batch = Batch([piece.folded for piece in pieces])
            for length, table in self._tables.items():
                for piece, entry in self._common_entries(batch, table, length):
                    item = int(table.items[entry])
                    word = int(table.words[entry])
                    key = pieces[piece].text, item
                    firsts.setdefault(key, set()).add(word)
                    lengths[key] = length

        # texts and items in order, each with the first words that they share
        found = []
        for (text, item), of_pair in sorted(firsts.items()):
            first = min(of_pair)
            end = first + lengths[text, item]
            words = " ".join(self._words(item)[first:end])
            found.append(Shared(text, item, len(of_pair), words))
        return found

    def _common_entries(self, batch: Batch, table: Table, n: int) -> Iterator[tuple[int, int]]:
        """(text of the batch, entry of the table) for n-grams that are equal word by word."""
        hashes, first = batch.ngrams(n)
        order = np.argsort(hashes)  # in order, a search in a large table is three times as fast
        hashes = hashes[order]
        first = first[order]

        # the first entry of each hash in the table; the words decide
        entries = np.searchsorted(table.hashes, hashes)
        entries[entries == len(table.hashes)] = 0
        is_candidate = table.hashes[entries] == hashes
        compared: set[tuple[int, str]] = set()
        candidates = first[is_candidate].tolist()
        for word, entry in zip(candidates, entries[is_candidate].tolist()):
            words = batch.words(word, n)
            text = int(batch.texts[word])
            key = text, " ".join(words)
            if key in compared:
                continue
            compared.add(key)
            end = np.searchsorted(table.hashes, table.hashes[entry], side="right")
            for other in range(entry, int(end)):
                item = int(table.items[other])
                begin = int(table.words[other])
                if self._words(item)[begin : begin + n] == words:
                    yield text, other


def _sorted(table: Table, of_task: np.ndarray) -> Table:
    """A table in the order of hashes, then of tasks, then of items."""
    tasks = of_task[table.items]
    order = np.lexsort((table.items, tasks, table.hashes))  # the last key is the first
    return table.take(order)


def _without_common(table: Table, of_task: np.ndarray) -> Table:
    """A sorted table without the n-grams that too many items of a task contain."""
    if not len(table.hashes):
        return table
    tasks = of_task[table.items]

    # where the next n-gram of a task begins, and within it the next item
    is_new_ngram = _is_new(table.hashes) | _is_new(tasks)
    is_new_item = is_new_ngram | _is_new(table.items)

    # the number of items that have the n-gram of each entry
    begins = np.flatnonzero(is_new_ngram)
    num_items = np.add.reduceat(is_new_item.astype(np.int64), begins)
    ngram_of_entry = np.cumsum(is_new_ngram) - 1
    share = COMMON_SHARE * np.bincount(of_task)
    limits = np.maximum(COMMON, share)
    return table.take(num_items[ngram_of_entry] <= limits[tasks])
