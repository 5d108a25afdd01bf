"""Small checkpoints for tests: saving them, listing their files, and forging their seals."""

import json
import os
import re
from collections import OrderedDict

import torch

from nanochat import checkpoint as ckpt
from nanochat import run_dir as rd
from nanochat.common import hash_bytes

CONFIG = {"n_layer": 2, "n_embd": 8}


def states(seed):
    """The arguments of a save: small states of every kind, different for every seed."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 8, generator=g)
    return {
        "states": {
            ckpt.MODEL_NAME: OrderedDict(
                w=weight,
                e=torch.randn(5, 3, generator=g).bfloat16(),
                odd=torch.tensor([float("nan"), float("-inf"), -0.0]),
            ),
            ckpt.OPTIMIZER_NAME: {
                "state": {
                    "w": {"exp_avg": torch.randn(4, 8, generator=g), "step": torch.tensor(seed)}
                },
                "groups": [{"lr": 0.1 + seed, "betas": (0.8, 0.95), "names": ["w"]}],
            },
            ckpt.SCHEDULER_NAME: {"format_version": 1, "num_iterations": 100},
            "rng/rank_0.pkl": {"torch": torch.get_rng_state()},
            "rng/rank_1.pkl": {"torch": g.get_state(), "words": [2**63, 1]},
        },
        "model_config": CONFIG,
        "cursors": [{"lane": i, "row": seed * 3, "ledger": {"web": {"read": i}}} for i in range(4)],
        "seal": {"tokens": seed * 1000, "version": seed, "tokenizer_fingerprint": "abc"},
    }


def save(run, step, *, name=None, **seal):
    """Write a checkpoint with further fields of its seal, such as `status`."""
    rd.open_folders(run)
    of_step = states(step)
    of_step["seal"] |= seal
    return ckpt.Snapshot(step, **of_step).write(run, name or f"checkpoint-{step}")


def newest(run):
    checkpoint = ckpt.first_good(ckpt.list_checkpoints(run))
    return checkpoint and checkpoint.path


def files_of(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def reseal(path, **changed):
    """Change the seal and make all checksums match the files, as an attacker would."""
    state = {**json.loads((path / ckpt.STATE_NAME).read_bytes()), **changed}
    for name in state["files"] if "files" not in changed else ():
        data = (path / name).read_bytes()
        state["files"][name] = {"bytes": len(data), "blake2b": hash_bytes(data)}
    state["checksum"] = ckpt.NO_CHECKSUM
    state["checksum"] = hash_bytes((json.dumps(state, indent=2) + "\n").encode())
    (path / ckpt.STATE_NAME).write_text(json.dumps(state, indent=2) + "\n")


def of_other_code(run):
    """Make the launches and checkpoints of a run those of another gpt.py."""
    log = run / "logs" / "train.jsonl"
    ours = re.compile(r'("nanochat/gpt.py": )"[0-9a-f]+"')
    log.write_text(ours.sub(rf'\1"{"0" * 32}"', log.read_text()))
    for path in sorted((run / "checkpoints").iterdir()):
        code = json.loads((path / ckpt.STATE_NAME).read_bytes())["model_code"]
        reseal(path, model_code=code | {"nanochat/gpt.py": "0" * 32})


def small(run, step, name=None, *, data=b"weights"):
    """The smallest possible checkpoint."""
    path = run / "checkpoints" / (name or f"checkpoint-{step}")
    path.parent.mkdir(parents=True, exist_ok=True)
    ckpt.write_sealed(path, {"format_version": ckpt.FORMAT_VERSION, "step": step}, {"a.bin": data})
    return path


def names(run):
    return sorted(os.listdir(run / "checkpoints"))
