"""What ranks tell each other: values and errors reach all of them, and one sentence is said. Real gloo processes."""

import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nanochat.dist import agree, broadcast, gather_all, on_rank0, same
from tests import training
from tests.training import Group, as_bytes

SIZES = pytest.mark.parametrize("world_size", [1, 2, 4])


# ---- a launch -------------------------------------------------------------------------------------------------------

@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)


def rank_main(job: Callable[[int], Any], folder: Path, argv: list[str]) -> None:
    """Do `job(rank)` as a script would, and leave its value."""
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.save(job(rank), folder / f"value-{rank}")
    if "RANK" in os.environ:
        dist.barrier()


def launch(folder: Path, world_size: int, job: Callable[[int], Any]) -> tuple[Group, list[int]]:
    group = training.launch(partial(rank_main, job, folder), [[]] * world_size, [{}] * world_size)
    return group, group.wait()


def values(folder: Path, world_size: int, job: Callable[[int], Any]) -> list[Any]:
    """Of all ranks of a launch that ends well."""
    group, codes = launch(folder, world_size, job)
    assert codes == [0] * world_size, group.text()
    return [torch.load(folder / f"value-{rank}", weights_only=True) for rank in range(world_size)]


def error(folder: Path, world_size: int, job: Callable[[int], Any]) -> str:
    """The one sentence of a launch that fails; on rank 0, and nothing else anywhere."""
    group, codes = launch(folder, world_size, job)
    assert codes == [1] * world_size and not list(folder.glob("value-*")), group.text()
    assert group.text() == group.outputs[0].read_text() and group.text().count("\n") == 1, group.text()
    return group.text().removeprefix("error: ").strip()


# ---- values ---------------------------------------------------------------------------------------------------------

def all_kinds(rank: int) -> Any:
    same({"a": 1, "b": [None]})
    return {"rank0": on_rank0(lambda: {"from": rank, "none": None}), "agree": agree(lambda: rank * 10),
            "all": gather_all((rank, None))}


@SIZES
def test_values_reach_whom_they_should(tmp_path: Path, world_size: int) -> None:
    found = values(tmp_path, world_size, all_kinds)
    for rank, value in enumerate(found):
        assert value == {"rank0": {"from": 0, "none": None}, "agree": rank * 10,
                         "all": [(r, None) for r in range(world_size)]}


def a_state() -> dict[Any, Any]:
    """Tensors of all dtypes and awkward layouts, in a nest."""
    torch.manual_seed(0)
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64,
              torch.uint16, torch.float8_e4m3fn)
    many = {str(dtype): (torch.rand(3, 5) * 100).to(dtype) for dtype in dtypes}
    whole = torch.arange(24.0).view(4, 6)
    return {"dtypes": many, "list": [torch.tensor(7), torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0)],
            "tuple": (torch.empty(3, 0, dtype=torch.int8), [], ({"deep": torch.tensor([True])},)),
            "layouts": {"transposed": whole.t(), "strided": whole[:, ::2], "expanded": torch.ones(1).expand(5, 2),
                        "offset": whole[2:], "reversed": whole.flip(0)},
            "parameter": torch.nn.Parameter(torch.full((2,), 3.0)), 5: None, "plain": [1, 2.5, "text", True]}


def broadcast_states(rank: int) -> Any:
    state: Any = a_state() if rank == 0 else {"another": "thing"}
    got = broadcast(state)
    if rank == 0:
        assert got["dtypes"]["torch.float32"] is state["dtypes"]["torch.float32"]
    else:
        assert not any(t.requires_grad or not t.is_contiguous() for t in got["layouts"].values())
    nothing: list[Any] = [{}, None, "text"]
    for plain in nothing:
        assert broadcast(plain if rank == 0 else [rank]) == plain
    return repr(as_bytes(got))


@SIZES
def test_a_state_of_any_dtype_and_layout_arrives_bit_by_bit(tmp_path: Path, world_size: int) -> None:
    assert values(tmp_path, world_size, broadcast_states) == [repr(as_bytes(a_state()))] * world_size


# ---- errors ---------------------------------------------------------------------------------------------------------

def raise_it(error: Exception) -> Any:
    raise error


def fail_on(bad: tuple[int, ...], own: bool, rank: int) -> Any:
    text = f"x.bin of {rank}: missing" if own else "x.bin: missing"
    return agree(lambda: raise_it(FileNotFoundError(text)) if rank in bad else rank)


@pytest.mark.parametrize(("bad", "own", "told"), [
    ((0, 1, 2, 3), False, "x.bin: missing"),
    ((0, 1, 2, 3), True, "x.bin of 0: missing"),
    ((3,), True, "rank 3 on host {host}: x.bin of 3: missing"),
    ((1, 3), False, "rank 1 on host {host}: x.bin: missing (2 of 4 ranks failed)"),
])
def test_where_not_all_fail_the_sentence_names_rank_and_host(tmp_path: Path, bad: tuple[int, ...], own: bool,
                                                              told: str) -> None:
    assert error(tmp_path, 4, partial(fail_on, bad, own)) == told.format(host=socket.gethostname())


def of_rank0(rank: int) -> None:
    on_rank0(lambda: raise_it(FileNotFoundError("x.bin: missing")))


def test_an_error_of_rank_0_is_one_sentence_and_all_leave(tmp_path: Path) -> None:
    assert error(tmp_path, 2, of_rank0) == "x.bin: missing"


def bug_on(bad: int, how: Callable[..., Any], rank: int) -> None:
    how(lambda: raise_it(KeyError("a bug") if rank == bad else ValueError("a bad flag")))


@pytest.mark.parametrize(("how", "bad"), [(agree, 0), (agree, 1), (on_rank0, 0)])
def test_a_bug_keeps_its_traceback_and_is_the_only_thing_told(tmp_path: Path, how: Any, bad: int) -> None:
    group, codes = launch(tmp_path, 2, partial(bug_on, bad, how))
    assert codes == [1, 1] and not list(tmp_path.glob("value-*"))
    text = group.outputs[bad].read_text()
    assert group.text() == text and "KeyError: 'a bug'" in text and "in bug_on" in text


def start_differently(rank: int) -> None:
    same({"data_path": "/data" if rank != 2 else "/other", "seed": 42, **({"extra": 1} if rank == 2 else {})})


def test_ranks_that_were_started_differently_are_told_where(tmp_path: Path) -> None:
    host = socket.gethostname()
    assert error(tmp_path, 4, start_differently) == (
        f"rank 2 on host {host}: started differently: data_path is '/other', on rank 0 it is '/data'; extra is 1, on "
        f"rank 0 it is None; start all processes with the same flags, the same files under the same paths, and the "
        f"same tokenizer")
