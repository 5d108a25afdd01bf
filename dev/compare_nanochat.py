"""
Compare with nanochat (github.com/karpathy/nanochat): the CORE metric, checkpoints, tokenizers.

    python -m dev.compare_nanochat [RUN] --nanochat DIR [--part core|checkpoints]

    core         With the same weights and tokenizer, both get the same items right in a synthetic bundle with all kinds
                 of tasks, and write the same table. Some models have a sequence_len of 128; many prompts are longer.
    checkpoints  nanochat trains a tokenizer and saves a model with random weights. `scripts.export --from=nanochat`
                 imports both; `--to=nanochat` exports that run, or RUN, and nanochat's load_model opens it. Both sides
                 give the same logits, bits per byte, generated tokens and ids, also beyond the model's sequence_len of
                 128. Both run in float32 on the CPU, with the same PyTorch.

DIR is a checkout of nanochat. Its packages `nanochat` and `scripts` are imported in separate
processes. Exit code 1 if anything differs.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dev import peers

SEEDS = (0, 1, 2)  # of the weights; each seed has a different model shape
STEP = 7
TOLERANCE = 1e-5  # for logits and bits per byte
NUM_TOKENS = 200  # to generate
HARD = [
    "",
    "It's 2024: WE'LL see...\r\n\r\n  naïve 中文 🙂 [1, 23]\n",
    "<|bos|>\t\t \u1680\u200b\x00",
    " a" * 500,
]


# ---- runs with nanochat's code, without our package ----------------------------------------------


def run_core(work: Path) -> None:
    """Run nanochat's scripts.base_eval on the weights, the tokenizer and the bundle in `work`.
    Writes which items are right, in the order of evaluation; base_eval itself writes the table."""
    import base64

    import tiktoken

    base_eval, core_eval, gpt, tokenizer = map(
        import_module,
        ("scripts.base_eval", "nanochat.core_eval", "nanochat.gpt", "nanochat.tokenizer"),
    )
    about = json.loads((work / "tokenizer" / "tokenizer.json").read_text())
    lines = map(bytes.split, (work / "tokenizer" / "ranks.tiktoken").read_bytes().splitlines())
    encoding = tiktoken.Encoding(
        "same",
        pat_str=about["pattern"],
        special_tokens=about["special_tokens"],
        mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in lines},
    )
    config = json.loads((work / "config.json").read_text())
    model = gpt.GPT(gpt.GPTConfig(**config))
    model.init_weights()  # computes the rotary tables, which checkpoints do not contain
    model.load_state_dict(torch.load(work / "model.pt", weights_only=True))
    theirs = tokenizer.RustBPETokenizer(encoding, about["bos_token"])
    loaded = model.eval(), theirs, {"step": STEP, "model_config": config}

    right: list[bool] = []
    evaluate_example = core_eval.evaluate_example

    def recorded(*args: Any) -> Any:
        value = evaluate_example(*args)
        right.append(bool(value))
        return value

    # replaces loading a checkpoint
    vars(base_eval).update(
        load_model=lambda *args, **kwargs: loaded, get_token_bytes=lambda **kwargs: None
    )
    vars(core_eval).update(evaluate_example=recorded)
    sys.argv = ["base_eval", "--eval=core", "--device-type=cpu"]
    base_eval.main()
    (work / "results.json").write_text(json.dumps(right))


def write_checkpoint(work: Path) -> None:
    """Make a tokenizer and a checkpoint, as nanochat's own scripts save them."""
    gpt = import_module("nanochat.gpt")
    corpus = torch.load(work / "requests.pt")["corpus"]
    tokenizer = import_module("nanochat.tokenizer").RustBPETokenizer.train_from_iterator(
        corpus, 600
    )
    tokenizer.save(str(work / "tokenizer"))
    config = {
        "sequence_len": 128,
        "vocab_size": 600,
        "n_layer": 4,
        "n_head": 2,
        "n_kv_head": 2,
        "n_embd": 64,
        "window_pattern": "SSSL",
    }
    model = gpt.GPT(gpt.GPTConfig(**config))
    model.init_weights()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # also those that are initially zero
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=rng))
    meta = {
        "step": STEP,
        "val_bpb": None,
        "model_config": config,
        "device_batch_size": 4,
        "total_batch_size": 4096,
    }
    import_module("nanochat.checkpoint_manager").save_checkpoint(
        str(work / "base_checkpoints" / "d4"), STEP, model.state_dict(), None, meta
    )


def read_export(work: Path) -> None:
    """Compute logits, tokens, bits per byte and ids of an export with nanochat."""
    requests = torch.load(work / "requests.pt")
    rows = requests["rows"]
    load_model = import_module("nanochat.checkpoint_manager").load_model
    model, tokenizer, _ = load_model("base", torch.device("cpu"), phase="eval")
    with torch.no_grad():
        logits = model(rows)
    # no token ends it
    endless = SimpleNamespace(encode_special=lambda text: -1, get_bos_token_id=lambda: -1)
    engine = import_module("nanochat.engine").Engine(model, endless)
    prompts = [rows[0, :n].tolist() for n in peers.PROMPTS]
    generated = [
        [column[0] for column, _ in engine.generate(prompt, max_tokens=NUM_TOKENS, temperature=0.0)]
        for prompt in prompts
    ]
    batches = iter([(rows[:, :-1], rows[:, 1:].contiguous())])
    sizes = import_module("nanochat.tokenizer").get_token_bytes()
    bpb = import_module("nanochat.loss_eval").evaluate_bpb(model, batches, 1, sizes)
    torch.save(
        {
            "logits": logits,
            "generated": generated,
            "bpb": bpb,
            "ids": tokenizer.encode(requests["texts"], prepend="<|bos|>"),
        },
        work / "results.pt",
    )


# ---- runs here -----------------------------------------------------------------------------------


def run_step(step: str, nanochat: Path, work: Path) -> None:
    """Have nanochat run a step, with `work` as its base directory."""
    peers.run_step(
        sys.executable,
        "dev.compare_nanochat",
        step,
        work,
        nanochat,
        NANOCHAT_BASE_DIR=str(work),
        NANOCHAT_DTYPE="float32",
    )


def core(nanochat: Path, work: Path, compared: peers.Comparison) -> None:
    """Compare the CORE metric."""
    from dev.make_eval_bundle import make_eval_bundle, make_repeater
    from nanochat.core_eval import evaluate_core, read_bundle, summary, write_csv

    for seed in SEEDS:
        folder = work / f"core-{seed}"
        tasks = read_bundle(make_eval_bundle(folder / "eval_bundle"))
        model, tokenizer = make_repeater(seed)
        tokenizer.save(folder / "tokenizer")
        torch.save(model.state_dict(), folder / "model.pt")
        (folder / "config.json").write_text(json.dumps(vars(model.config)))
        run_step("core", nanochat, folder)
        verdicts = json.loads((folder / "results.json").read_text())
        scores = list(evaluate_core(model, tokenizer, tasks))
        for task, right in scores:
            theirs, verdicts = verdicts[: len(right)], verdicts[len(right) :]
            same = sum(a == b for a, b in zip(right, theirs, strict=True))
            compared.same(
                f"CORE, weights {seed}: {task.label}, {task.num_fewshot}-shot, {task.kind}",
                same == len(right),
                f"{sum(right)} of {len(right)} right; {same} with the same verdict",
            )
        write_csv(folder / "ours.csv", summary(scores))
        table = (folder / "base_eval" / f"base_model_{STEP:06d}.csv").read_bytes()
        compared.same(
            f"CORE, weights {seed}: the metric and the bytes of the table",
            table == (folder / "ours.csv").read_bytes(),
            f"{summary(scores)['core_metric']:.6f}",
        )


def checkpoints(nanochat: Path, work: Path, compared: peers.Comparison, run: str | None) -> None:
    """Compare checkpoints and tokenizers."""
    from nanochat.loss_eval import evaluate_bpb
    from scripts import export

    origin = work / "there"
    imported = work / "back"
    out = work / "out"
    corpus = peers.prose()
    texts = [*HARD, *corpus[:50]]
    origin.mkdir()
    torch.save({"corpus": corpus}, origin / "requests.pt")
    run_step("write", nanochat, origin)
    export.main([str(origin / "base_checkpoints" / "d4"), str(imported), "--from=nanochat"])

    checkpoint = run or str(imported)
    export.main([checkpoint, str(out), "--to=nanochat"])
    model, tokenizer, rows, logits, generated = peers.ours(checkpoint, NUM_TOKENS)
    torch.save({"rows": rows, "texts": texts}, out / "requests.pt")
    run_step("read", nanochat, out)
    theirs = torch.load(out / "results.pt")
    bpb = evaluate_bpb(model, [(rows[:, :-1], rows[:, 1:])], 1, tokenizer.token_bytes())
    T = model.config.sequence_len
    for where, positions in (("up to", slice(0, T)), ("beyond", slice(T, None))):
        some = logits[:, positions]
        compared.close(
            f"{some.numel():,} logits {where} position {T}, the largest {some.abs().max():.2f}",
            some,
            theirs["logits"][:, positions],
            TOLERANCE,
        )
    compared.close(f"bits per byte, {bpb:.6f}", bpb, theirs["bpb"], TOLERANCE)
    for prompt, tokens, other in zip(peers.PROMPTS, generated, theirs["generated"], strict=True):
        compared.same(f"{len(tokens)} tokens generated after a prompt of {prompt}", tokens == other)
    compared.same(
        f"ids of {len(texts)} texts", tokenizer.encode(texts, prepend="<|bos|>") == theirs["ids"]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print. Exit code 1 if anything differs."""
    from nanochat.cli import Parser

    p = Parser(description=__doc__)
    p.add_argument("--nanochat", type=Path, required=True, help="a checkout of nanochat")
    p.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="our run, for --part=checkpoints (default: one from nanochat)",
    )
    p.add_argument("--part", choices=("core", "checkpoints"), help="run only this part")
    args = p.parse_args(argv)
    if not (args.nanochat / "nanochat" / "core_eval.py").is_file():
        raise ValueError(f"--nanochat: got {args.nanochat}, expected a checkout of nanochat")
    compared, nanochat = peers.Comparison(), args.nanochat.resolve()
    with tempfile.TemporaryDirectory(prefix="compare_nanochat.") as work:
        if args.part != "checkpoints":
            core(nanochat, Path(work), compared)
        if args.part != "core":
            checkpoints(nanochat, Path(work), compared, args.run)
    return compared.end()


if __name__ == "__main__":
    peers.start(main, {"core": run_core, "write": write_checkpoint, "read": read_export})
