"""
What we share with nanochat (github.com/karpathy/nanochat), against nanochat itself.

    python -m dev.compare_nanochat [RUN] --nanochat DIR [--part core|checkpoints]

    core         the CORE metric: on a made-up bundle that has every kind of task, with the same weights and the same
                 tokenizer, the same items are right, and the table has the same bytes. Some models have a sequence_len
                 of 128, and many prompts are longer
    checkpoints  a tokenizer that is trained there and a model of random weights that is saved there come here by
                 scripts.export --from=nanochat; that run, or RUN, goes there by --to=nanochat and is opened by
                 load_model. Both give the same logits and bits per byte of some rows, generated tokens, and ids, also
                 beyond the model's sequence_len of 128. In float32 on the CPU, with one PyTorch

DIR is a checkout of it, whose `nanochat` and `scripts` are imported in processes of their own. Exit code 1 on a
difference.
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

SEEDS = (0, 1, 2)  # of the weights; each is a model of another shape
STEP = 7
TOLERANCE = 1e-5  # of logits and of bits per byte
NUM_TOKENS = 200  # generated
HARD = ["", "It's 2024: WE'LL see...\r\n\r\n  naïve 中文 🙂 [1, 23]\n", "<|bos|>\t\t \u1680\u200b\x00", " a" * 500]


# ---- there: runs with nanochat's code, imports nothing of ours ------------------------------------------------------

def core_there(work: Path) -> None:
    """Its scripts.base_eval on the weights, the tokenizer and the bundle in `work`: which items are right, in the
    order in which it evaluates them. The table is where it writes it."""
    import base64

    import tiktoken

    base_eval, core_eval, gpt, tokenizer = map(import_module, (
        "scripts.base_eval", "nanochat.core_eval", "nanochat.gpt", "nanochat.tokenizer"))
    told = json.loads((work / "tokenizer" / "tokenizer.json").read_text())
    lines = map(bytes.split, (work / "tokenizer" / "ranks.tiktoken").read_bytes().splitlines())
    encoding = tiktoken.Encoding("same", pat_str=told["pattern"], special_tokens=told["special_tokens"],
                                 mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in lines})
    config = json.loads((work / "config.json").read_text())
    model = gpt.GPT(gpt.GPTConfig(**config))
    model.init_weights()  # the rotary tables, which are in no checkpoint
    model.load_state_dict(torch.load(work / "model.pt", weights_only=True))
    theirs = tokenizer.RustBPETokenizer(encoding, told["bos_token"])
    loaded = model.eval(), theirs, {"step": STEP, "model_config": config}

    right: list[bool] = []
    evaluate_example = core_eval.evaluate_example

    def noted(*args: Any) -> Any:
        value = evaluate_example(*args)
        right.append(bool(value))
        return value

    # what a checkpoint of its would give, for people who have none
    vars(base_eval).update(load_model=lambda *args, **kwargs: loaded, get_token_bytes=lambda **kwargs: None)
    vars(core_eval).update(evaluate_example=noted)
    sys.argv = ["base_eval", "--eval=core", "--device-type=cpu"]
    base_eval.main()
    (work / "told.json").write_text(json.dumps(right))


def write_there(work: Path) -> None:
    """Make a tokenizer and a checkpoint, as nanochat's own scripts save them."""
    gpt = import_module("nanochat.gpt")
    corpus = torch.load(work / "asked.pt")["corpus"]
    tokenizer = import_module("nanochat.tokenizer").RustBPETokenizer.train_from_iterator(corpus, 600)
    tokenizer.save(str(work / "tokenizer"))
    config = {"sequence_len": 128, "vocab_size": 600, "n_layer": 4, "n_head": 2, "n_kv_head": 2, "n_embd": 64,
              "window_pattern": "SSSL"}
    model = gpt.GPT(gpt.GPTConfig(**config))
    model.init_weights()
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():  # what begins as nothing, too
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=rng))
    meta = {"step": STEP, "val_bpb": None, "model_config": config, "device_batch_size": 4, "total_batch_size": 4096}
    import_module("nanochat.checkpoint_manager").save_checkpoint(
        str(work / "base_checkpoints" / "d4"), STEP, model.state_dict(), None, meta)


def read_there(work: Path) -> None:
    """What nanochat makes of an export."""
    asked = torch.load(work / "asked.pt")
    rows = asked["rows"]
    load_model = import_module("nanochat.checkpoint_manager").load_model
    model, tokenizer, _ = load_model("base", torch.device("cpu"), phase="eval")
    with torch.no_grad():
        logits = model(rows)
    endless = SimpleNamespace(encode_special=lambda text: -1, get_bos_token_id=lambda: -1)  # no token stops it
    engine = import_module("nanochat.engine").Engine(model, endless)
    prompts = [rows[0, :n].tolist() for n in peers.PROMPTS]
    generated = [[column[0] for column, _ in engine.generate(prompt, max_tokens=NUM_TOKENS, temperature=0.0)]
                 for prompt in prompts]
    batches = iter([(rows[:, :-1], rows[:, 1:].contiguous())])
    sizes = import_module("nanochat.tokenizer").get_token_bytes()
    bpb = import_module("nanochat.loss_eval").evaluate_bpb(model, batches, 1, sizes)
    torch.save({"logits": logits, "generated": generated, "bpb": bpb,
                "ids": tokenizer.encode(asked["texts"], prepend="<|bos|>")}, work / "told.pt")


# ---- here -----------------------------------------------------------------------------------------------------------

def ask(step: str, nanochat: Path, work: Path) -> None:
    """Let nanochat do a step, with `work` as its base directory."""
    peers.run_there(sys.executable, "dev.compare_nanochat", step, work, nanochat, NANOCHAT_BASE_DIR=str(work),
              NANOCHAT_DTYPE="float32")


def core(nanochat: Path, work: Path, compared: peers.Comparison) -> None:
    """The CORE metric."""
    from dev.make_eval_bundle import make_eval_bundle, make_repeater
    from nanochat.integrations.core_eval import Score, evaluate_task, read_bundle, score_of, summary, write_csv

    for seed in SEEDS:
        folder = work / f"core-{seed}"
        tasks = read_bundle(make_eval_bundle(folder / "eval_bundle"))
        model, tokenizer = make_repeater(seed)
        tokenizer.save(folder / "tokenizer")
        torch.save(model.state_dict(), folder / "model.pt")
        (folder / "config.json").write_text(json.dumps(vars(model.config)))
        ask("core", nanochat, folder)
        there = json.loads((folder / "told.json").read_text())
        scores: list[Score] = []
        for task in tasks:
            right = evaluate_task(model, tokenizer, task)
            theirs, there = there[:len(right)], there[len(right):]
            same = sum(a == b for a, b in zip(right, theirs, strict=True))
            compared.same(f"CORE, weights {seed}: {task.label}, {task.num_fewshot}-shot, {task.kind}",
                          same == len(right), f"{sum(right)} of {len(right)} right; {same} judged alike")
            scores.append(score_of(task, right))
        write_csv(folder / "ours.csv", summary(scores))
        table = (folder / "base_eval" / f"base_model_{STEP:06d}.csv").read_bytes()
        compared.same(f"CORE, weights {seed}: the metric, and the bytes of the table",
                      table == (folder / "ours.csv").read_bytes(), f"{summary(scores)['core_metric']:.6f}")


def checkpoints(nanochat: Path, work: Path, compared: peers.Comparison, run: str | None) -> None:
    """Checkpoints and tokenizers."""
    from nanochat.loss_eval import evaluate_bpb
    from scripts import export

    there, back, out = work / "there", work / "back", work / "out"
    corpus = peers.prose()
    texts = [*HARD, *corpus[:50]]
    there.mkdir()
    torch.save({"corpus": corpus}, there / "asked.pt")
    ask("write", nanochat, there)
    export.main([str(there / "base_checkpoints" / "d4"), str(back), "--from=nanochat"])

    checkpoint = run or str(back)
    export.main([checkpoint, str(out), "--to=nanochat"])
    model, tokenizer, rows, logits, generated = peers.ours(checkpoint, NUM_TOKENS)
    torch.save({"rows": rows, "texts": texts}, out / "asked.pt")
    ask("read", nanochat, out)
    told = torch.load(out / "told.pt")
    bpb = evaluate_bpb(model, [(rows[:, :-1], rows[:, 1:])], 1, tokenizer.token_bytes())
    T = model.config.sequence_len
    for where, some, theirs in (("up to", logits[:, :T], told["logits"][:, :T]),
                                ("beyond", logits[:, T:], told["logits"][:, T:])):
        compared.close(f"logits {where} position {T}, {some.numel():,}, the largest {some.abs().max():.2f}",
                       some, theirs, TOLERANCE)
    compared.close(f"bits per byte, {bpb:.6f}", bpb, told["bpb"], TOLERANCE)
    for prompt, own, theirs in zip(peers.PROMPTS, generated, told["generated"], strict=True):
        compared.same(f"{len(own)} tokens generated after a prompt of {prompt}", own == theirs)
    compared.same(f"ids of {len(texts)} texts", tokenizer.encode(texts, prepend="<|bos|>") == told["ids"])


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print."""
    from nanochat.cli import Parser

    p = Parser(description=__doc__)
    p.add_argument("--nanochat", type=Path, required=True, help="a checkout of it")
    p.add_argument("run", metavar="RUN", nargs="?", help="ours, of the part checkpoints (default: one from there)")
    p.add_argument("--part", choices=("core", "checkpoints"), help="only this one")
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
    peers.start(main, {"core": core_there, "write": write_there, "read": read_there})
