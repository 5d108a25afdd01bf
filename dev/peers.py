"""
What the comparisons with other programs share. Those run in environments of their own, in which nothing of ours can be
imported but what lies in `dev`:

    python -m dev.compare_x ...                        here: asks, and holds what comes back against what is ours
    THEIR_PYTHON -m dev.compare_x --there=STEP DIR     there: does one step; both leave files for one another in DIR

Each thing that was compared is a line: whether it is the same, by how much it differs, what it is.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Step = Callable[[Path], Any]


def ask(python: Path | str, module: str, step: str, work: Path, *paths: Path, **env: str) -> None:
    """Let their Python do a step of `module`, where of ours only `dev` can be imported, and what lies below `paths`."""
    link = work / "ours" / "dev"
    if not link.exists():
        link.parent.mkdir()
        link.symlink_to(Path(__file__).parent)
    below = os.pathsep.join(map(str, (*paths, link.parent)))
    run([str(python), "-m", module, f"--there={step}", str(work)], work, PYTHONPATH=below, **env)


def run(command: list[str], work: Path, **env: str) -> None:
    """Run a program of theirs, without a network. ValueError with the end of what it printed where it fails."""
    done = subprocess.run(command, cwd=work, env={**os.environ, "HF_HUB_OFFLINE": "1", **env},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise ValueError(f"{' '.join(command[:4])} ended with {done.returncode}:\n{done.stdout[-4000:]}")


def prose() -> list[str]:
    """English text that every Python has."""
    import pydoc_data.topics

    return [text for _, text in sorted(pydoc_data.topics.topics.items())]


def made_texts(seed: int = 0) -> list[str]:
    """Texts of a few words, many of them longer than a small row."""
    import numpy as np

    rng = np.random.default_rng(seed)
    words = ["alpha", " beta", " gamma", "\n", " Ä漢", " 12", "x" * 40]
    return ["".join(rng.choice(words, rng.integers(1, 200))) for _ in range(300)]


PROMPTS = (8, 300)  # tokens of the first row that are continued


def ours(source: str, num_tokens: int) -> tuple[Any, Any, Any, Any, list[list[int]]]:
    """Results of a run's model, in float32 on the CPU: (model, tokenizer, four rows of prose, the logits of the rows,
    for each of PROMPTS its continuation of so many tokens).

    The rows, (4, n) int64, are longer than sequence_len and than any prompt, so that layers with long windows no longer
    see everything."""
    import torch

    from nanochat.engine import Engine, load_model

    model, tokenizer, _ = load_model(source, "cpu", compute_dtype=torch.float32)
    T = max(*PROMPTS, model.config.sequence_len) + 100
    ids = torch.tensor(tokenizer.encode("\n".join(prose())))[:4 * (T - 1)].view(4, T - 1)
    rows = torch.cat((torch.full((4, 1), tokenizer.get_bos_token_id()), ids), dim=1)
    engine = Engine(model, tokenizer)
    engine.stop_tokens = set  # type: ignore[method-assign]  # no token stops it
    prompts = [rows[0, :n].tolist() for n in PROMPTS]
    generated = [[column[0] for column, _ in engine.generate(prompt, max_tokens=num_tokens, temperature=0.0)]
                 for prompt in prompts]
    with torch.no_grad():
        return model, tokenizer, rows, model(rows), generated


class Compared:
    """What was compared, told as it comes."""

    def __init__(self) -> None:
        self.num = self.failed = 0

    def same(self, what: str, good: bool, told: str = "") -> None:
        """Something that is equal, or is not."""
        self.num += 1
        self.failed += not good
        print(f"{'same' if good else 'DIFFERS':8} {told + ': ' if told else ''}{what}", flush=True)

    def close(self, what: str, a: Any, b: Any, limit: float = 0.0) -> None:
        """Tensors or numbers that differ by `limit` at most."""
        apart = float(abs(a - b).max()) if hasattr(a, "max") else abs(a - b)
        self.same(what, apart <= limit, f"{apart:.1e} apart")

    def end(self) -> int:
        """The exit code: 1 where something differs."""
        print(f"{self.failed} of {self.num} differ")
        return int(self.failed > 0)


def start(main: Callable[[], int], there: Mapping[str, Step]) -> None:
    """Run a comparison that was started as a command, or the step that is asked of it."""
    if len(sys.argv) == 3 and sys.argv[1].startswith("--there="):
        there[sys.argv[1].removeprefix("--there=")](Path(sys.argv[2]))
        return
    from nanochat.cli import run_main

    run_main(main)
