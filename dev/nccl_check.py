"""Check that N processes add gradients in the promised order, and take the same steps as N / 2
processes.

    torchrun --standalone --nproc_per_node=8 -m dev.nccl_check
    torchrun --standalone --nproc_per_node=2 -m dev.nccl_check --device=cpu

On a machine with one GPU, run both of these: NCCL with one process, then two processes that share
the GPU and exchange through gloo, because NCCL refuses two processes on one GPU:

    python -m dev.nccl_check
    torchrun --standalone --nproc_per_node=2 -m dev.nccl_check

Takes about a minute on GPUs and a few seconds on a CPU, where it uses gloo. N is a power of two.
All comparisons are of bits, without a tolerance:

    group          NCCL was initialized eagerly: the group is bound to this rank's device
    collectives    each collective that training uses delivers the right values
    tree           K leaves on N processes, added by LeafAccumulator and tree_reduce, against one process
    tree of nodes  the same across simulated nodes of L ranks, through subgroups (N >= 4)
    gather         an all-gather in place: the message contains this rank's own chunk
    steps          10 steps of a small model: twice on N processes, once on N / 2 (if N >= 2), all with N leaves

Ends with a table. The exit code is 1 if a check fails.
"""

import hashlib
import os
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.cli import Parser, run_main
from nanochat.common import counted, table
from nanochat.dist import (
    broadcast,
    compute_cleanup,
    compute_init,
    gather_all,
    get_compute_dtype,
    versions,
)
from nanochat.gpt import GPT, GPTConfig
from nanochat.reduce import (
    LeafAccumulator,
    Message,
    Part,
    Reduce,
    add_in_tree_order,
    reduce_over_nodes,
    tree_reduce,
)

STEPS = 10
TIMEOUT_S = 120.0
LEAVES_PER_RANK = (1, 2, 4)  # for the checks of the tree


def leaf_gradient(leaf: int, numel: int) -> Tensor:
    """(numel,) float32, with exponents so far apart that any other order of addition gives other
    bits."""
    generator = torch.Generator().manual_seed(leaf)
    exponents = torch.randint(-12, 13, (numel,), generator=generator)
    return torch.randn(numel, generator=generator) * 2.0**exponents


def tree_is_right(
    reduce: Reduce, per_rank: int, numel: int, rank: int, world_size: int, device: torch.device
) -> bool:
    """Whether this rank's chunk of the sum of all leaves has the same bits as on one process."""
    param = torch.nn.Parameter(torch.zeros(numel, device=device))
    leaves = LeafAccumulator([param], per_rank, micro_batches_per_leaf=1)
    for leaf in range(rank * per_rank, (rank + 1) * per_rank):
        param.grad = leaf_gradient(leaf, numel).to(device)
        leaves.leaf_done()
    assert param.grad is not None
    chunk = reduce(param.grad, rank, world_size)()
    alone = torch.stack([leaf_gradient(leaf, numel) for leaf in range(world_size * per_rank)])
    return torch.equal(chunk.cpu(), add_in_tree_order(alone).chunk(world_size)[rank])


def gather_is_right(rank: int, world_size: int, device: torch.device) -> bool:
    """Whether every rank's chunk arrives in a parameter that is itself the message."""
    expected = torch.arange(1000.0 * world_size, device=device)
    param = torch.nn.Parameter(torch.zeros_like(expected))
    param.detach().chunk(world_size)[rank].copy_(expected.chunk(world_size)[rank])
    parts: list[Part | None] = [
        Part("p", param, {"kind": "adamw"}, 1000 * r, 1000 * (r + 1)) for r in range(world_size)
    ]
    message = Message(parts, 1000)
    message.gather(message.parameters(), rank)()
    return torch.equal(param, expected)


def collectives_are_right(rank: int, world_size: int, device: torch.device) -> bool:
    """Whether each collective that training uses delivers the right values, even to a single
    process."""
    everyone = [torch.arange(4.0 * world_size, device=device) + 100 * r for r in range(world_size)]
    total = everyone[rank].double()
    dist.all_reduce(total)
    exchanged = torch.empty_like(everyone[rank])
    dist.all_to_all_single(exchanged, everyone[rank])
    gathered = torch.cat(everyone)
    mine = gathered.chunk(world_size)[rank]
    gathered[: mine.numel() * rank], gathered[mine.numel() * (rank + 1) :] = 0, 0
    # before PyTorch 2.13, it is all_gather_into_tensor
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(gathered, mine)
    received = [torch.empty_like(mine) for _ in everyone] if rank == 0 else None
    dist.gather(everyone[rank], received)
    shared = everyone[rank].clone()
    broadcast(shared)
    pairs = [
        (total, torch.stack(everyone).double().sum(dim=0)),
        (exchanged, torch.cat([sent.chunk(world_size)[rank] for sent in everyone])),
        (gathered, torch.cat(everyone)),
        (torch.stack(received or everyone), torch.stack(everyone)),
        (shared, everyone[0]),
    ]
    return all(torch.equal(actual, expected) for actual, expected in pairs)


def train(num_leaves: int, rank: int, world_size: int, device: torch.device, tiny: bool) -> str:
    """The hash of all norms, losses, weights and optimizer state after some steps. Ranks above 0
    hash only their part of the optimizer state."""
    shape: dict[str, Any] = {"aspect_ratio": 16, "head_dim": 16} if tiny else {}
    model = GPT(
        GPTConfig.from_depth(
            2 if tiny else 4, vocab_size=512, sequence_len=32 if tiny else 512, **shape
        )
    )
    model.to(device).init_weights(seed=0, compute_dtype=get_compute_dtype(device))
    optimizer = model.setup_optimizer(num_leaves=num_leaves)
    per_rank, tokens = num_leaves // world_size, (2, model.config.sequence_len + 1)
    leaves = LeafAccumulator(model.parameters(), per_rank, micro_batches_per_leaf=2)
    digest = hashlib.blake2b(digest_size=8)
    for step in range(STEPS):
        losses = torch.zeros(num_leaves, dtype=torch.float64)
        for leaf in range(rank * per_rank, (rank + 1) * per_rank):
            generator = torch.Generator().manual_seed(1000 * step + leaf)
            for _ in range(2):
                rows = torch.randint(512, tokens, generator=generator).to(device)
                loss = model(rows[:, :-1], rows[:, 1:]) / (2 * num_leaves)
                loss.backward()
                losses[leaf] += loss.item()
            leaves.leaf_done()
        digest.update(
            repr(
                (torch.stack(gather_all(losses)).sum(dim=0).tolist(), optimizer.step().item())
            ).encode()
        )
        model.zero_grad(set_to_none=True)
    state = optimizer.gather_state().get("state", {})
    for tensor in (
        *model.state_dict().values(),
        *(t for tensors in state.values() for t in tensors.values()),
    ):
        digest.update(
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.hexdigest()


def checks_on_all(
    rank: int, world_size: int, device: torch.device, tiny: bool
) -> Iterator[tuple[str, str, bool]]:
    """Collective. (check, its case, whether this rank has the right bits) for each check."""
    if dist.get_backend() == "nccl":
        group = dist.group.WORLD
        yield "group", "bound to its device", group is not None and group.bound_device_id == device
    yield (
        "collectives",
        "sum, exchange, gathers, broadcast",
        collectives_are_right(rank, world_size, device),
    )
    numel = world_size * (1000 if tiny else 1 << 20)
    for per_rank in LEAVES_PER_RANK:
        right = tree_is_right(tree_reduce, per_rank, numel, rank, world_size, device)
        yield "tree", f"K = {world_size * per_rank}", right
    ranks_per_node = 2
    while ranks_per_node < world_size:
        reduce = reduce_over_nodes(ranks_per_node)
        right = reduce is not tree_reduce and tree_is_right(
            reduce, 2, numel, rank, world_size, device
        )
        yield "tree of nodes", f"{world_size // ranks_per_node} of {ranks_per_node} ranks", right
        ranks_per_node *= 2
    yield "gather", "in place", gather_is_right(rank, world_size, device)


def form_smaller_group(rank: int, world_size: int, device: torch.device) -> bool:
    """Collective. Replace the group of all ranks by one of the first `world_size`. Returns whether
    it has this rank."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = gather_all(free.getsockname()[1])[0]
    backend = dist.get_backend()
    dist.destroy_process_group()
    if rank >= world_size:
        return False
    os.environ["WORLD_SIZE"] = str(world_size)
    # a larger LOCAL_WORLD_SIZE would count as ranks of another machine
    os.environ["LOCAL_WORLD_SIZE"] = str(
        min(world_size, int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
    )
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, world_size, is_master=rank == 0)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=device if backend == "nccl" else None,
    )
    return True


def be_alone() -> None:
    """Set torchrun's variables for a process that was started without it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_WORLD_SIZE": 1,
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")


def share_gpus() -> bool:
    """Let this machine's processes share its GPUs if there are too few, and join a group with gloo,
    because NCCL refuses two processes on one GPU. Returns whether they share."""
    num_gpus, local_world_size = torch.cuda.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
    if num_gpus == 0 or num_gpus >= local_world_size:
        return False
    os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % num_gpus)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks and print a table on rank 0. Exit code 1 if a check fails."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--device", default="cuda", choices=["cuda", "cpu"], help="cpu uses gloo and small sizes"
    )
    args = parser.parse_args(argv)
    if "RANK" not in os.environ:
        be_alone()
    N = int(os.environ["WORLD_SIZE"])
    if N & (N - 1):
        raise ValueError(
            f"dev.nccl_check: started as {counted(N, 'process')}, expected 1, 2, 4, 8 or another power of "
            "two; start it with torchrun --standalone --nproc_per_node=N -m dev.nccl_check"
        )
    shared = args.device == "cuda" and share_gpus()
    _, rank, _, _, device = compute_init(args.device, deterministic=True, timeout_s=TIMEOUT_S)
    backend = dist.get_backend()
    tiny = device.type == "cpu"
    rows: list[tuple[str, str, str, str]] = []

    def add(check: str, case: str, bad: Sequence[int]) -> None:
        rows.append((check, case, ", ".join(map(str, bad)), "FAILS" if bad else "good"))

    for check, case, right in checks_on_all(rank, N, device, tiny):
        add(check, case, [r for r, its in enumerate(gather_all(right)) if not its])
    first, second = (train(N, rank, N, device, tiny) for _ in range(2))
    add(
        "steps",
        f"twice on {N} processes",
        [r for r, its in enumerate(gather_all(first == second)) if not its],
    )
    if N > 1 and form_smaller_group(rank, N // 2, device):
        fewer = train(N, rank, N // 2, device, tiny)
        add("steps", f"{N} processes against {N // 2}", [0] if rank == 0 and fewer != first else [])
    compute_cleanup()
    if rank > 0:
        return 0
    print(*(f"{name:13s} {value}" for name, value in versions(device).items()), sep="\n")
    print(f"{'backend':13s} {backend}", "(processes share a GPU)\n" if shared else "\n")
    print(*table(("check", "case", "ranks that differ", "verdict"), rows), sep="\n")
    return int(any(row[-1] == "FAILS" for row in rows))


if __name__ == "__main__":
    run_main(main)
