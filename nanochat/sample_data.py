"""
Which flags go with which --order, and what is settled of them before a run starts.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nanochat.common import place

ORDERS = ("lanes", "megatron")
DEFAULT_SPLIT, WHOLE = "969,30,1", "1,0,0"  # Megatron's own default; where validation has data of its own
ONLY_HERE = {"split": None, "blend_weights": None, "eod_mask_loss": False}  # with --order megatron
ONLY_LANES = {"packing": "bestfit", "pack": True, "long_docs": "crop", "curriculum": None,
              "allow_bucket_exhaustion": False}


def parse_weights(text: str | None) -> list[float] | None:
    """The numbers of "30,70". ValueError for anything else, and for what is not above 0."""
    if text is None:
        return None
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--blend-weights: got {text!r}, expected a number for each prefix, as 30,70") from None
    if not all(0 < w < np.inf for w in weights):
        raise ValueError(f"--blend-weights: got {text}, expected numbers above 0; leave out a prefix that should give "
                         f"nothing")
    return weights


def check_order(settings: Mapping[str, Any]) -> None:
    """ValueError for flags of one --order beside the other, where they would do nothing."""
    order = settings["order"]
    if order == "megatron" and settings["data_format"] != "megatron":
        raise ValueError(f"--order megatron: it is an order of Megatron's files, and --data-format is "
                         f"{settings['data_format']}; take --data-format megatron, or --order lanes")
    if order == "megatron" and settings["curriculum"] is not None:
        raise ValueError("--curriculum: Megatron's order has one mix for the whole run (--blend-weights); take --order "
                         "lanes for a curriculum")
    for name, default in (ONLY_LANES if order == "megatron" else ONLY_HERE).items():
        if settings[name] != default:
            flag = "--no-pack" if name == "pack" else f"--{name.replace('_', '-')}"
            other = next(o for o in ORDERS if o != order)
            raise ValueError(f"{flag}: it does nothing with --order {order}; leave it out, or take --order {other}")


def settle_split(settings: Mapping[str, Any]) -> str | None:
    """What --split comes to: None for lanes."""
    if settings["order"] != "megatron" or settings["split"] is not None:
        return settings["split"]
    return WHOLE if has_own_val(settings["data_path"], settings["val_path"]) else DEFAULT_SPLIT


def has_own_val(data_path: Path | str, val_path: Path | str | None) -> bool:
    """Whether validation has files of its own: those of --val-path, or of DIR/val beside DIR/train."""
    return val_path is not None or (place(data_path) / "train").is_dir()
