"""How fast n-grams of a benchmark are found in text, on one core.

    python -m dev.bench_ngrams --data-path=mytext --items=100000

The items are passages of random words of the text, so an n-gram of the text is hardly ever one of
theirs, as in most data. The same batches go to three contestants: `Index.find`; plain Python, which
makes a tuple of words for each n-gram and looks it up in a set (of 10,000 items, because a set of
100,000 needs gigabytes); and the tokenizer, which a run must use anyway. The last line is one JSON object.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from dev.measure import in_turns, one_core, print_figure, print_ratios, print_setup, seconds
from nanochat.cli import Parser, run_main, whole
from nanochat.files import find_files
from nanochat.ngrams import Index, words_of
from nanochat.text_kinds import read_texts
from nanochat.tokenizer import RustBPETokenizer

WORDS = 80  # in an item
MB_AT_ONCE = 4


def make_items(texts: Sequence[str], num_items: int) -> list[str]:
    """Items of WORDS random words of the texts."""
    rng = random.Random(0)
    vocabulary = sorted({word for text in texts[:2000] for word in words_of(text)})
    return [" ".join(rng.choices(vocabulary, k=WORDS)) for _ in range(num_items)]


def plain_ngrams(items: Sequence[str], n: int) -> set[tuple[str, ...]]:
    """The n-grams of items, in plain Python."""
    found = set()
    for item in items:
        words = words_of(item)
        for at in range(len(words) - n + 1):
            found.add(tuple(words[at : at + n]))
    return found


def find_plainly(texts: Sequence[str], wanted: set[tuple[str, ...]], n: int) -> int:
    """The number of texts with a wanted n-gram, in plain Python."""
    num_found = 0
    for text in texts:
        words = words_of(text)
        num_found += any(tuple(words[at : at + n]) in wanted for at in range(len(words) - n + 1))
    return num_found


def main(argv: Sequence[str] | None = None) -> int:
    """Print MB/s of each contestant, and its ratio to `Index.find` in the same round."""
    parser = Parser(description=__doc__)
    parser.add_argument("--data-path", type=Path, required=True, help="text to search")
    parser.add_argument("--items", type=whole(1), default=100_000, help="number of items")
    parser.add_argument("--ngram", type=whole(1), default=13, help="words of an n-gram")
    parser.add_argument("--rounds", type=whole(1), default=5)
    args = parser.parse_args(argv)
    one_core()
    setup = print_setup()

    all_texts = (text for file in find_files(args.data_path) for text in read_texts(file))
    texts: list[str] = []
    num_bytes = 0
    for text in all_texts:
        texts.append(text)
        num_bytes += len(text.encode())
        if num_bytes > MB_AT_ONCE * 1e6:
            break
    items = make_items(texts, args.items)
    built: list[Index] = []
    build_s = seconds(lambda: built.append(Index(items, [0] * len(items), n=args.ngram)))
    index = built[0]
    wanted = plain_ngrams(items[:10_000], args.ngram)
    tokenizer = RustBPETokenizer.train_from_iterator(texts[:500], 4096)
    print(
        f"{num_bytes / 1e6:.1f} MB of text; {index.sizes.sum():,} n-grams of {args.items:,} items"
    )
    print_figure("building the index", [build_s], "s")

    def rate(spent_s: float) -> float:
        return num_bytes / 1e6 / spent_s

    contestants = {
        "Index.find": lambda: rate(seconds(lambda: index.find(texts))),
        "plain Python": lambda: rate(seconds(lambda: find_plainly(texts, wanted, args.ngram))),
        "tokenizer": lambda: rate(seconds(lambda: tokenizer.encode_flat(texts, num_threads=1))),
    }
    figures = print_ratios(in_turns(contestants, args.rounds), "MB/s")
    result = {"setup": setup, "megabytes": num_bytes / 1e6, "build_s": build_s, "MB/s": figures}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    run_main(main)
