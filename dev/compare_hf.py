"""
An export in transformers, beside the run that it was made from: with transformers itself, and EleutherAI's lm-eval, in
their own environment (pip install torch transformers lm-eval accelerate).

    python -m dev.compare_hf RUN --hf-python VENV/bin/python [--out FOLDER]

1. `scripts.export --to=hf`, then there, offline: `AutoModelForCausalLM.from_pretrained` gives our logits in float32,
   for texts that are padded on the left too; `generate` with its cache gives our tokens; so does the model that
   `save_pretrained` wrote, read again; `AutoTokenizer` gives our ids of hard texts and of prose.
2. `lm_eval` scores a small task of multiple choice and one of plain likelihood, made from the text that every Python
   has. Here the same requests are scored by our model: BOS + context + continuation, the sum of the log-probabilities
   of the continuation's tokens.

Prints a table; exit code 1 where something differs by more than it may. --out keeps the export.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

LOGITS, SCORES = 1e-5, 1e-4  # by how much they may differ
NUM_TOKENS = 200  # generated
NUM_ITEMS = 24  # of each task
PADDING = 7
TASKS = {
    "exact_choice": """task: exact_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/items.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
target_delimiter: " "
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
""",
    "exact_likelihood": """task: exact_likelihood
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/items.jsonl}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{query}}}}"
doc_to_target: " {{{{choices[gold]}}}}"
metric_list: [{{metric: perplexity}}, {{metric: acc}}]
"""}


# ---- there: runs with transformers, imports nothing of ours ---------------------------------------------------------

def there(work: Path) -> None:
    """Say what transformers makes of an export: work/asked.pt -> work/told.pt."""
    transformers = import_module("transformers")
    asked = torch.load(work / "asked.pt")
    rows, out = asked["rows"], asked["out"]
    rules = {"trust_remote_code": True, "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(out, **rules).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    model.save_pretrained(work / "saved")
    tokenizer.save_pretrained(work / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(work / "saved", **rules).eval()
    read = transformers.AutoTokenizer.from_pretrained(work / "saved", trust_remote_code=True)
    padding = torch.full((len(rows), PADDING), tokenizer.pad_token_id)
    mask = torch.cat((torch.zeros_like(padding), torch.ones_like(rows)), dim=1)
    prompt = rows[:1, :8]
    model.generation_config.eos_token_id = None  # all of NUM_TOKENS
    # BOS is the padding, too: without a mask, and without an end, generate would take the first token for padding
    how = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    with torch.no_grad():
        torch.save({
            "logits": model(rows).logits, "saved": again(rows).logits,
            "padded": model(torch.cat((padding, rows), dim=1), attention_mask=mask).logits[:, PADDING:],
            "generated": model.generate(prompt, **how)[0, 8:].tolist(),
            "uncached": model.generate(prompt, use_cache=False, **how)[0, 8:].tolist(),
            "beams": [model.generate(prompt, num_beams=3, use_cache=cached, **how | {"max_new_tokens": 30}).tolist()
                      for cached in (True, False)],
            "ids": [tokenizer(text)["input_ids"] for text in asked["texts"]],
            "ids again": [read(text)["input_ids"] for text in asked["texts"]],
            "transformers": transformers.__version__}, work / "told.pt")


# ---- here -----------------------------------------------------------------------------------------------------------

def prose() -> list[str]:
    """English text that every Python has."""
    import pydoc_data.topics

    return [text for _, text in sorted(pydoc_data.topics.topics.items())]


def items(num: int) -> list[dict[str, Any]]:
    """Questions of a kind: how does this text go on? One continuation is its own, three are others'."""
    texts = [" ".join(text.split()) for text in prose() if len(text) > 1500][:num]
    made = []
    for i, text in enumerate(texts):
        ends = [texts[(i + j) % num][600:600 + 20 + 9 * j].strip() for j in range(4)]
        gold = i % 4
        made.append({"query": text[300:600].strip(), "choices": ends[-gold:] + ends[:-gold], "gold": gold})
    return made


def own_scores(model: Any, tokenizer: Any, asked: list[dict[str, Any]]) -> list[list[float]]:
    """For each item the log-probability of each choice behind the query and a blank, in nats."""
    bos = tokenizer.get_bos_token_id()
    scores: list[list[float]] = []
    for item in asked:
        context = tokenizer.encode(item["query"], prepend=bos)
        scores.append([])
        for choice in item["choices"]:
            ids = torch.tensor([tokenizer.encode(f"{item['query']} {choice}", prepend=bos)])
            with torch.no_grad():
                told = torch.log_softmax(model(ids[:, :-1]), dim=-1)
            of_tokens = told.gather(2, ids[:, 1:, None])[0, :, 0]
            scores[-1].append(of_tokens[len(context) - 1:].sum().item())
    return scores


def harness_scores(python: str, out: Path, work: Path, environment: dict[str, str]) -> tuple[dict[str, Any], Any, Any]:
    """(results, log-probabilities of each item's choices, of each item's own continuation) by lm-eval."""
    folder = work / "tasks"
    folder.mkdir()
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.format(folder=folder))
    lines = [json.dumps(item) + "\n" for item in items(NUM_ITEMS)]
    (folder / "items.jsonl").write_text("".join(lines))
    run([python, "-m", "lm_eval", "run", "--model", "hf", "--model_args",
         f"pretrained={out},trust_remote_code=True,dtype=float32", "--tasks", ",".join(TASKS), "--include_path",
         str(folder), "--device", "cpu", "--batch_size", "8", "--output_path", str(work / "scores"), "--log_samples"],
        environment)
    [results] = (work / "scores").rglob("results_*.json")
    samples = {}
    for name in TASKS:
        [file] = (work / "scores").rglob(f"samples_{name}_*.jsonl")
        found = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
        samples[name] = [[float(answer[0]) for answer in sample["filtered_resps"]] for sample in found]
    return json.loads(results.read_text())["results"], samples["exact_choice"], samples["exact_likelihood"]


def run(command: list[str], environment: dict[str, str]) -> None:
    """Run a program of the other environment. ValueError with what it wrote where it fails."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{' '.join(command[:4])} fails:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")


def compare(python: str, source: str, out: Path, work: Path) -> list[tuple[str, float, float]]:
    """(what, by how much it differs, by how much it may), all of it."""
    from nanochat.encoders import hard_sample
    from nanochat.engine import Engine, load_model
    from nanochat.tokenizer import replace_surrogates
    from scripts import export

    environment = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1", "HF_HOME": str(work / "home"),
                   "TOKENIZERS_PARALLELISM": "false"}
    export.main([source, str(out), "--to=hf"])
    model, tokenizer, _ = load_model(source, "cpu", compute_dtype=torch.float32)
    bos, T = tokenizer.get_bos_token_id(), model.config.sequence_len
    texts = [*map(replace_surrogates, hard_sample()), "<|bos|>", *prose()]
    ids = torch.tensor(tokenizer.encode("\n".join(prose())))[:4 * (T - 1)].view(4, T - 1)
    rows = torch.cat((torch.full((4, 1), bos), ids), dim=1)
    torch.save({"rows": rows, "out": str(out), "texts": texts}, work / "asked.pt")
    run([python, __file__, "--there", str(work)], environment)
    told = torch.load(work / "told.pt")

    engine, prompt = Engine(model, tokenizer), rows[0, :8].tolist()
    engine.stop_tokens = set  # type: ignore[method-assign]  # all of NUM_TOKENS
    own = [column[0] for column, _ in engine.generate(prompt, max_tokens=NUM_TOKENS, temperature=0.0)]
    with torch.no_grad():
        logits = model(rows)
    encoded = [tokenizer.encode(text, prepend=bos) for text in texts]
    size = f"{logits.numel():,}, the largest {logits.abs().max():.2f}"
    compared = [
        (f"logits of {size}", apart(logits, told["logits"]), LOGITS),
        ("logits of padded rows", apart(logits, told["padded"]), LOGITS),
        ("logits after save_pretrained, from_pretrained", apart(told["logits"], told["saved"]), 0.0),
        (f"{len(own)} generated tokens, with its cache", float(own != told["generated"]), 0.0),
        ("the same without its cache", float(own != told["uncached"]), 0.0),
        ("three beams, with and without its cache", float(told["beams"][0] != told["beams"][1]), 0.0),
        (f"ids of {len(texts)} texts, {sum(map(len, encoded)):,} tokens", float(encoded != told["ids"]), 0.0),
        ("ids after save_pretrained, from_pretrained", float(encoded != told["ids again"]), 0.0)]
    results, choices, own_ends = harness_scores(python, out, work, environment)
    asked = items(NUM_ITEMS)
    scores = torch.tensor(own_scores(model, tokenizer, asked))
    gold = torch.tensor([item["gold"] for item in asked])
    accuracy = (scores.argmax(dim=1) == gold).double().mean().item()
    ends = scores.gather(1, gold[:, None])
    return [*compared,
            (f"lm-eval: log-probabilities of {scores.numel()} choices", apart(scores, torch.tensor(choices)), SCORES),
            (f"lm-eval: accuracy, {accuracy:.4f}", abs(accuracy - results["exact_choice"]["acc,none"]), SCORES),
            (f"lm-eval: log-likelihood of {len(ends)} texts", apart(ends, torch.tensor(own_ends)), SCORES)]


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; 1 on a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-python", help="Python of an environment with transformers and lm-eval")
    parser.add_argument("run", metavar="RUN", nargs="?", help="or RUN@STEP, with a tokenizer that transformers reads")
    parser.add_argument("--out", type=Path, help="where the export goes (default: nowhere that stays)")
    parser.add_argument("--there", type=Path, metavar="WORK", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.there:
        there(args.there)
        return 0
    from nanochat.common import table

    if not (args.hf_python and args.run):
        raise ValueError("name a run of ours, and with --hf-python an environment's Python")
    with tempfile.TemporaryDirectory() as folder:
        compared = compare(args.hf_python, args.run, args.out or Path(folder) / "out", Path(folder))
        version = torch.load(Path(folder) / "told.pt")["transformers"]
    rows = [(what, "no difference" if difference == 0 else f"{difference:.2e}",
             "ok" if difference <= allowed else "DIFFERS") for what, difference, allowed in compared]
    print(*table((f"with transformers {version}", "largest difference", ""), rows), sep="\n")
    failed = sum(row[2] != "ok" for row in rows)
    print(json.dumps({"compared": len(rows), "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    if "--there" in sys.argv:
        sys.exit(main())  # nothing of ours can be imported there
    from nanochat.common import run_main
    run_main(main)
