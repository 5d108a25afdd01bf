"""
Measure how well the tokenizer compresses: bytes of text per token, on samples and on the data.

    python -m scripts.tok_eval --data-path=mytext     # samples, and the first --max-chars of each split
    python -m scripts.tok_eval                        # samples only

More bytes per token mean fewer tokens for the same text, but do not measure quality: a larger
vocabulary always compresses better, and costs parameters and softmax time. So compare only
tokenizers of the same size this way, and compare models by bits per byte. GPT-2's and GPT-4's
tokenizers (50 k and 100 k tokens) are included if tiktoken has their ranks or can download them.
"""

import itertools

from nanochat.cli import Parser, run_main, setup_logging
from nanochat.common import AnyPath, table
from nanochat.files import FORMATS, data_at
from nanochat.splits import split_train_val
from nanochat.text import ALL, Selection, add_text_flags
from nanochat.text_kinds import read_texts
from nanochat.tokenizer import (
    RustBPETokenizer,
    Tokenizer,
    add_tokenizer_flags,
    default_tokenizer,
    get_tokenizer,
)

PEERS = ("gpt2", "cl100k_base")

SAMPLES = {
    "english": """The ferry left at six, an hour late, with eleven passengers and a piano on board.
Nobody knew whose piano it was. Halfway across, the wind turned to the north-east and the captain,
who had seen worse on calmer days, asked for someone to play. "You can't forget it," she told us.
""",
    "code": """def moving_average(values, window):
    total, result = 0.0, []
    for i, value in enumerate(values):
        total += value - (values[i - window] if i >= window else 0.0)
        result.append(total / min(i + 1, window))
    return result


assert moving_average([1, 2, 3, 4], window=2) == [1.0, 1.5, 2.5, 3.5]
""",
    "math": r"""\begin{lemma}\label{lem:sum} Let $a_1, \dots, a_n > 0$ with $\sum_{i=1}^{n} a_i = 1$. Then
\[ \prod_{i=1}^{n} \left(1 + \frac{1}{a_i}\right) \ge (n + 1)^n. \] \end{lemma}
""",
    "numbers": "2019-03-14,1182.46,1185.55,1172845\n2019-03-15,1193.38,1184.46,2461775\n",
    "russian": "Поезд пришёл раньше времени, и на платформе ещё никого не было.\n",
    "korean": "비가 그친 뒤 골목에는 흙냄새가 가득했다. 할머니는 창문을 열었다.\n",
    "chinese": "傍晚的集市渐渐安静下来,卖豆腐的老人把最后两块包好,递给一个放学回家的孩子。\n",
    "emoji": "moving day 📦🚚 → new flat 🏡✨ but the view!! 🌇😍 thx 🙏🏽👨‍👩‍👧‍👦 #home\n",
}


def first_texts(
    paths: list[AnyPath], max_chars: int, selection: Selection = ALL
) -> tuple[list[str], bool]:
    """The first documents of some files, until they add up to `max_chars` characters, and whether
    others follow."""
    texts: list[str] = []
    for text in itertools.chain.from_iterable(read_texts(path, selection) for path in paths):
        if max_chars <= 0:
            return texts, True
        texts.append(text)
        max_chars -= len(text)
    return texts, False


def load_peers() -> dict[str, RustBPETokenizer]:
    """tiktoken's tokenizers, for comparison. Prints which ones are not available."""
    peers = {}
    for name in PEERS:
        try:
            peers[name] = RustBPETokenizer.from_pretrained(name)
        except OSError as e:
            print(f"not available: {e}")
    return peers


def bytes_per_token(tokenizer: Tokenizer, texts: list[str]) -> float:
    """Bytes of UTF-8 per token, not counting BOS."""
    ids, _ = tokenizer.encode_flat(texts)
    num_tokens = len(ids) - len(texts)
    return num_bytes(texts) / max(1, num_tokens)


def num_bytes(texts: list[str]) -> int:
    """Bytes of UTF-8."""
    return sum(len(text.encode()) for text in texts)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__)
    add_tokenizer_flags(parser)
    parser.add_argument("--data-path", help=f"text to compress: {', '.join(FORMATS['text'])}")
    add_text_flags(parser, "text_field", "min_chars", "val_fraction")
    parser.add_argument("--val-path", help="validation files (default: the last of --data-path)")
    parser.add_argument(
        "--max-chars", type=int, default=5_000_000, help="characters of each split to compress"
    )
    args = parser.parse_args(argv)
    setup_logging()
    samples = {name: [text] for name, text in SAMPLES.items()}
    cut = []
    if args.data_path:
        selection = Selection.of(vars(args))
        val_data = None if args.val_path is None else data_at(args.val_path)
        splits = split_train_val(
            data_at(args.data_path), val_data, shared=selection.val_fraction > 0
        )
        for split, buckets in splits.items():
            files = list(itertools.chain.from_iterable(buckets.values()))
            texts, others_follow = first_texts(files, args.max_chars, selection.for_split(split))
            samples[split] = texts
            if others_follow:
                cut.append(split)
    tokenizer = get_tokenizer(args.tokenizer, eod_token=args.eod_token, data_path=args.data_path)
    place = args.tokenizer or default_tokenizer(args.data_path)
    peers = load_peers()
    rows: list[list[str | int]] = []
    for name, texts in samples.items():
        for text in texts[:100]:
            ids = tokenizer.encode_one(text)
            if tokenizer.decode(ids[1:]) != text:
                raise ValueError(
                    f"sample {name!r}: decoding its tokens does not return the text; retrain the tokenizer"
                )
        ours = bytes_per_token(tokenizer, texts)
        row: list[str | int] = [name, num_bytes(texts), f"{ours:.2f}"]
        for peer in peers.values():
            theirs = bytes_per_token(peer, texts)
            row += [f"{theirs:.2f}", f"{100 * (ours / theirs - 1):+.1f} %"]
        rows.append(row)
    print(
        f"tokenizer {place}, {tokenizer.get_vocab_size():,} tokens, fingerprint "
        f"{tokenizer.fingerprint}; bytes per token:"
    )
    header = ["text", "bytes", "ours"]
    for name in peers:
        header += [name, f"ours vs {name}"]
    print(*table(header, rows), sep="\n")
    for split in cut:
        print(f"{split}: cut after --max-chars={args.max_chars:,} characters; there is more of it")
    return 0


if __name__ == "__main__":
    run_main(main)
