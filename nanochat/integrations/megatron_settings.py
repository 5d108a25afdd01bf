"""The settings that only a run in Megatron's order has. They are flags with --order=megatron alone:

    python -m scripts.base_train --order=megatron --help

Settings that decide how lanes read and pack documents have no effect in this order, and are
refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanochat.cli import Decides, setting
from nanochat.config import Settings, fields_of, flag
from nanochat.files import read_data_args, split_weights

DATA_ARGS = "file with a long --data-path, as Megatron's: paths, or weights and paths, separated by spaces or lines"
# settings of lanes, which this order ignores
OF_LANES = (
    "without_documents",
    "packing",
    "pack",
    "long_docs",
    "curriculum",
    "allow_bucket_exhaustion",
)


def numbers(text: str) -> list[float]:
    """The type of a flag: numbers separated by commas."""
    return [float(part) for part in text.split(",")]


@dataclass(frozen=True, kw_only=True)
class MegatronSettings(Settings):
    """Megatron's order (row i of the run is sample i; --attention-mode replaces reset_attention_mask;
    reset_position_ids would have no effect)"""

    data_args_path: str | None = setting(None, DATA_ARGS, metavar="FILE")
    split: str | None = setting(
        None,
        "shares of training, validation and test (default: 969,30,1; with separate validation files, all "
        "documents are used for training)",
        auto=True,
        decides=Decides.ROWS,
        note="decides which documents are used for training and which for validation",
    )
    blend_weights: list | None = setting(
        None,
        "weight of each path in --data-path (default: every sample is used once; a single path is "
        "repeated as needed)",
        type=numbers,
        metavar="A,B",
        decides=Decides.ROWS,
    )
    eod_mask_loss: bool = setting(
        False,
        "compute no loss where the input is EOD",
        decides=Decides.ROWS,
        note="decides which targets count in the loss",
    )
    num_samples: int = setting(
        -1,
        "number of samples in the whole run",
        flag=False,
        auto=True,
        decides=Decides.ROWS,
        note="decides Megatron's order, which is a shuffle of exactly this many samples",
    )
    index_cache: str | None = setting(
        None, "folder for the shuffled indices (default: <base dir>/index_cache)", metavar="DIR"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in OF_LANES:
            if getattr(self, name) != fields_of(Settings)[name].default:
                raise ValueError(
                    f"{flag(name)}: has no effect with --order=megatron; remove it from the flags or the "
                    f"--config file, or use --order=lanes"
                )
        if not all(0 < weight < float("inf") for weight in self.blend_weights or ()):
            raise ValueError(
                f"--blend-weights: got {self.blend_weights}, expected finite numbers above 0; to train "
                "without a path, remove it from --data-path"
            )
        if self.data_format != "megatron":
            raise ValueError(
                f"--order=megatron: needs Megatron's files, but --data-format is {self.data_format}; use "
                "--data-format=megatron or --order=lanes"
            )

    @classmethod
    def of_flags(cls, flags: Mapping[str, Any]) -> dict[str, Any]:
        """See `Settings.of_flags`. --data-args-path becomes --data-path, and weights in --data-path
        become --blend-weights."""
        values = super().of_flags(flags)
        list_path = values.pop("data_args_path")
        if list_path is not None:
            if values["data_path"] is not None:
                raise ValueError(
                    f"--data-args-path={list_path}: --data-path is also given; remove one of the two"
                )
            values["data_path"] = read_data_args(list_path)
        if values["data_path"]:
            values["data_path"], weights = split_weights(values["data_path"])
            if weights and values["blend_weights"]:
                raise ValueError(
                    f"--blend-weights: --data-path={values['data_path'][:200]} also has weights; remove "
                    f"one of the two"
                )
            values["blend_weights"] = weights or values["blend_weights"]
        return values
