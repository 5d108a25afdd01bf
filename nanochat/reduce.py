r"""
The order in which the gradients of a step are added: a fixed binary tree over K leaves, for any
number of processes.

float32 addition commutes (a + b and b + a have the same bits) but is not associative: (a + b) + c
and a + (b + c) differ in the last bit, and after a thousand steps the models differ. So the
brackets are fixed when a run starts, and each of W processes computes a part of the same tree. Leaf
j is the gradient of block j of a step's K blocks; K = 8:

    0   1   2   3   4   5   6   7        W = 1: one process adds all of it
     \ /     \ /     \ /     \ /         W = 2: {0 1 2 3} and {4 5 6 7} inside a rank, the last + across
      +       +       +       +          W = 4: the first row of + inside a rank, the other two across
       \     /         \     /           W = 8: one leaf on each rank, every + across ranks
          +               +
           \_____________/
                  +

**In a leaf**, `backward` adds the micro-batches in order: `.grad` is the first one's gradient (not
0 + gradient), and each later gradient is added to it.

**Inside a rank**, finished leaves carry as in a binary counter: a sum of 2^i leaves is pending
until the next sum of 2^i leaves is complete. With m = K / W = 4 leaves, the pending sums after each
leaf are:

    leaf 0 -> [0]     leaf 1 -> [01]     leaf 2 -> [01, 2]     leaf 3 -> [01, 23] -> [0123] -> .grad

While leaf j is computed, as many sums are pending as j has 1-bits: at most log2(m) tensors per
parameter. With m = 1 no sum is pending, and nothing is added. A pending sum is not a copy: it is
the tensor that was `.grad`.

**Across ranks**, each message of W equal chunks goes through an all-to-all: rank r receives chunk r
of every rank's message, in rank order, and adds the W parts as in the lower part of the drawing.
Each rank sends and receives as much as in a reduce-scatter, (W - 1) / W of a message. The extra
cost is memory for the received parts, one whole message. On several nodes, the same sum takes two
stages (`reduce_over_nodes`).

All sums are float32: the gradients of a bfloat16 parameter are widened (exactly) before they are
added, in a leaf (by `grad_dtype`), inside a rank and across ranks. So a step of many micro-batches
on one GPU has the same arithmetic as a step on eight. A rank with a single micro-batch has nothing
to add: its gradients travel as bfloat16 and are widened on arrival. A gradient of None counts as
+0.0 inside a rank and across ranks; since -0.0 + 0.0 is 0.0, this zero is added and not skipped.

If W does not divide K, each rank owns one block (dataloader.StepLayout). The ranks' parts are then
added in pairs, and a leftover part is carried up: the sum is reproducible for this W, but differs
from that of another W.

Rejected: a tree in which each rank sends its sum to a partner, log2(W) times (half of the ranks are
idle, and latency grows with log2(W)); an all-gather (W times the bytes); a plain reduce-scatter
(backends choose the order by topology and size); exact sums in fixed point (three words per
element, and gradients have no bounded exponent).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def merge(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """left + right in float32, written into a float32 operand if possible.

    None counts as zeros (+0.0).
    """
    if left is None:
        left, right = right, None
    if left is None:
        return None
    if right is None:
        return left.float().add_(0.0)
    return left.float().add_(right)


class LeafAccumulator:
    """Adds up a rank's leaves: `.grad` of `params` becomes their sum in tree order.

        for i, batch in enumerate(micro_batches, start=1):
            loss(batch).backward()
            if i % micro_batches_per_leaf == 0:
                leaves.leaf_done()

    num_leaves: the rank's number of leaves in a step. Raises ValueError unless it is a power of
    two. Every `.grad` must be None when a step begins. If several micro-batches are added, `.grad`
    is float32 even for a bfloat16 parameter. on_host: keep pending sums in host memory (pinned, for
    a GPU). That costs two copies, but changes no bits.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        num_leaves: int,
        *,
        micro_batches_per_leaf: int,
        on_host: bool = False,
    ) -> None:
        if num_leaves < 1 or num_leaves & (num_leaves - 1):
            raise ValueError(
                f"leaves of a rank: got {num_leaves}, expected a power of two; choose --leaves and the "
                f"number of processes so that one divides the other"
            )
        self.num_leaves = num_leaves
        self._on_host = on_host
        self._params = list(params)
        self._done = 0  # finished leaves of this step
        # a stack of sums, each of fewer leaves than the one below; a sum has one gradient (or None)
        # per parameter
        self._pending: list[list[Tensor | None]] = []
        if num_leaves * micro_batches_per_leaf > 1:
            for param in self._params:
                param.grad_dtype = torch.float32

    @torch.no_grad()
    def leaf_done(self) -> None:
        """Call this after the last micro-batch of each leaf.

        It leaves `.grad` None until a step's last leaf.
        """
        if self.num_leaves == 1:
            return
        self._done += 1
        last = self._done == self.num_leaves
        # One carry for each trailing zero of the count: first a pending sum of one leaf is added,
        # then one of two leaves, of four, ... These sums are on top of the stack, in this order.
        carries = (self._done & -self._done).bit_length() - 1
        carried = [self._pending.pop() for _ in range(carries)]
        sums = []
        for i, param in enumerate(self._params):
            # take the leaf's gradient from the parameter; the next backward starts with None
            total = param.grad
            param.grad = None
            # add the older sums on the left, and free each of them at once
            for older in carried:
                left = older[i]
                older[i] = None
                if left is not None:
                    left = left.to(param.device, non_blocking=True)
                total = merge(left, total)
            # keep the sum: in `.grad` at the end of the step, or pending
            if last:
                param.grad = total
            elif self._on_host and total is not None:
                total = total.to("cpu", non_blocking=total.is_cuda)  # from a GPU into pinned memory
            sums.append(total)
        if last:
            self._done = 0
        else:
            self._pending.append(sums)


def add_in_tree_order(parts: Tensor) -> Tensor:
    """(W, n) float32 -> (n,): adds rows in pairs, then pairs of pairs, ...

    A leftover last row is carried up. Overwrites `parts`: on a CPU, adding in place takes a fifth
    of the time of adding into fresh memory.
    """
    while len(parts) > 2:
        paired = len(parts) // 2 * 2
        parts[0:paired:2].add_(parts[1::2])
        parts = parts[0::2]
    if len(parts) == 1:
        return parts[0]
    return parts[0] + parts[1]  # a new tensor, so `parts` can be freed


# reduce(message, rank, world_size) starts the elementwise sum of all ranks' messages, (W * chunk,)
# of one float dtype. It returns a function that waits for the sum and returns this rank's chunk of
# it, (chunk,) float32.
Reduce = Callable[[Tensor, int, int], Callable[[], Tensor]]


def tree_reduce(message: Tensor, rank: int, world_size: int) -> Callable[[], Tensor]:
    """The `Reduce` in tree order. Collective; it does not change the message."""
    if world_size == 1:
        return message.float
    received = torch.empty_like(message)
    work = dist.all_to_all_single(received, message, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return add_in_tree_order(received.view(world_size, -1).float())

    return finish


def _new_groups(ranks: Tensor) -> dist.ProcessGroup:
    """A process group for each row of `ranks`; returns this rank's. Collective."""
    # long before this timeout, the watchdog reports a rank that hangs
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timedelta(hours=1))
    return group


def reduce_over_nodes(ranks_per_node: int) -> Reduce:
    """`tree_reduce` in two stages, with the same bits. Collective: it creates process groups.

    First inside nodes of `ranks_per_node` consecutive ranks, then across nodes. If two stages gain
    nothing or would add in a different order, returns `tree_reduce` itself.

    So a node sends only 1/L of its L ranks' messages. Two nodes of L = 2 ranks (each digit is a
    chunk of the message):

        ranks 0 and 1   0123  0123   inside a node: rank 0 adds chunks 0 and 2, rank 1 adds 1 and 3
        ranks 2 and 3   0123  0123                  rank 2 adds chunks 0 and 2, rank 3 adds 1 and 3
                                     across nodes: ranks 0, 2 swap 02, ranks 1, 3 swap 13

    If L is a power of two, the tree is the same, because a node is one of its branches. With any
    other L, there is only the one all-to-all.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    sizes = [ranks_per_node] * world_size
    if world_size > 1:
        dist.all_gather_object(sizes, ranks_per_node)
    L = ranks_per_node
    nodes = world_size // L
    nodes_are_equal = set(sizes) == {L} and nodes * L == world_size
    is_power_of_two = L & (L - 1) == 0
    if not nodes_are_equal or not is_power_of_two or not 1 < L < world_size:
        return tree_reduce
    by_node = torch.arange(world_size).view(nodes, L)
    inside = _new_groups(by_node)
    across = _new_groups(by_node.T)

    def reduce(message: Tensor, rank: int, world_size: int) -> Callable[[], Tensor]:
        """A `Reduce` that starts the exchange across nodes only when its result is requested."""
        # for each rank of this node, the chunks of the ranks at its position in every node
        sent = message.view(nodes, L, -1).transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=inside, async_op=True)

        def finish() -> Tensor:
            work.wait()
            of_node = add_in_tree_order(received.view(L, -1).float())
            parts = torch.empty_like(of_node)
            dist.all_to_all_single(parts, of_node, group=across)
            return add_in_tree_order(parts.view(nodes, -1))

        return finish

    return reduce


# ---- messages ------------------------------------------------------------------------------------

SMALL_ELEMENTS = 1 << 16  # AdamW tensors below this are never cut
GRAINS = 64  # number of grains of a tensor that may be cut
ALIGNED = 64  # elements: the size of a grain is a multiple of this
MOST_STACKED = 8  # matrices that one call updates


@dataclass(frozen=True)
class Part:
    """Elements start..stop of a flattened parameter: all of them, or those that one rank owns."""

    name: str
    param: Tensor
    group: dict[str, Any]  # hyper-parameters
    start: int
    stop: int

    @property
    def grain(self) -> int:
        """The number of consecutive elements of the parameter that are never separated, for any W."""
        n = self.param.numel()
        if self.group["kind"] == "muon" or n < SMALL_ELEMENTS:
            return n
        return -(-n // (GRAINS * ALIGNED)) * ALIGNED

    def of(self, tensor: Tensor) -> Tensor:
        """These elements of the parameter or of its gradient, flat."""
        return tensor.detach().reshape(-1)[self.start : self.stop]


@dataclass(frozen=True)
class Message:
    """One chunk of `chunk` elements for each rank: the part that the rank owns, then padding.

    A rank may own nothing. The layout is the same on every rank. A matrix is never cut, and a
    large AdamW tensor only between its grains, spans that stay whole.

    With W = 2 (`.` is padding), an embedding E, matrices A B C, and small tensors s and t:

                     rank 0         rank 1
        message 1  | E E E E E E | E E E E E E |  a large AdamW tensor is cut between grains
        message 2  | A A A A A   | B B B B B   |  matrices of one shape are dealt out, one to each rank,
        message 3  | C C C C C   | . . . . .   |  larger tensors to the rank that has less
        message 4  | s s s .     | t t t t     |  small tensors are dealt out in the same way
    """

    parts: list[Part | None]  # by rank
    chunk: int
    stack: int = 1  # a stack of so many messages in a row is updated in one call

    def placed(self, message: Tensor) -> list[tuple[Part, Tensor]]:
        """Each part, with the elements of a message (W * chunk,) that belong to it."""
        placed = []
        for part, chunk in zip(self.parts, message.split(self.chunk)):
            if part is not None:
                placed.append((part, chunk[: part.stop - part.start]))
        return placed

    def gradients(self) -> Tensor:
        """(W * chunk,) in the dtype of `.grad`: the gradients, zeros for None. Read only.

        See `LeafAccumulator`.
        """
        return self._pack(lambda param: param.grad, self.first.param.grad_dtype or torch.float32)

    def parameters(self) -> Tensor:
        """The parameters, (W * chunk,) in their dtype."""
        return self._pack(lambda param: param, self.first.param.dtype)

    @property
    def first(self) -> Part:
        """The first part.

        All parts of a message have the same kind and dtype; matrices also have the same group and
        shape.
        """
        return next(part for part in self.parts if part)

    def _pack(self, of: Callable[[Tensor], Tensor | None], dtype: torch.dtype) -> Tensor:
        """Copy all parts into one message.

        A tensor that fills the message alone is not copied: it is the message.
        """
        numel = self.chunk * len(self.parts)
        first = self.first.param
        alone = of(first) if first.numel() == numel else None
        if alone is not None:
            return alone.detach().reshape(-1)
        message = torch.zeros(numel, dtype=dtype, device=first.device)
        for part, place in self.placed(message):
            tensor = of(part.param)
            if tensor is not None:
                place.copy_(part.of(tensor))
        return message

    def gather(self, message: Tensor, rank: int) -> Callable[[], None]:
        """Start an all-gather of the ranks' chunks of a message of parameters.

        Returns a function that waits for it and fills in the parameters.
        """
        work = None
        if len(self.parts) > 1:
            # before PyTorch 2.13, it is all_gather_into_tensor
            all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
            work = all_gather(message, message.split(self.chunk)[rank], async_op=True)

        def finish() -> None:
            if work is not None:
                work.wait()
            for part, place in self.placed(message):
                values = part.of(part.param)
                if values.data_ptr() != place.data_ptr():  # else the message is the parameter
                    values.copy_(place)

        return finish


def stack_size(num_matrices: int, num_leaves: int | None) -> int:
    """How many of a deck's matrices one call updates: the largest divisor of num_matrices / K.

    At most `MOST_STACKED`; 1 if K does not divide num_matrices. Batched products of another number
    of matrices may round differently, so the number must not depend on W. If W divides K, each rank
    owns K / W times num_matrices / K matrices: a whole number of stacks.
    """
    if num_leaves is None or num_matrices % num_leaves:
        return 1
    share = num_matrices // num_leaves
    return max(size for size in range(1, MOST_STACKED + 1) if share % size == 0)


def lay_out(
    params: Sequence[Part], world_size: int, *, num_leaves: int | None = None
) -> list[Message]:
    """Lay out whole parameters in messages.

    The largest message comes first: the last all-gather overlaps with no update, so it should be
    small.

    Parameters of a single grain are dealt out, separately for each group and shape of matrices: the
    W largest, one to each rank, then the next W, and so on. In each deal, larger parameters go to
    the ranks with fewer elements so far. Every other parameter is a message of its own, with the
    same number of grains for each rank (fewer for the last).

    num_leaves: K, for stacks of matrices; None: no stacks.
    """
    messages = []
    decks: dict[Any, list[Part]] = {}  # the parameters of a single grain
    for whole in sorted(params, key=lambda part: -part.stop):
        if whole.grain == whole.stop:
            kind: Any = "adamw"
            if whole.group["kind"] == "muon":
                kind = (id(whole.group), whole.param.shape)
            decks.setdefault((kind, whole.param.dtype), []).append(whole)
            continue

        # cut a large tensor between its grains
        grains = -(-whole.stop // whole.grain)
        chunk = -(-grains // world_size) * whole.grain
        if world_size == 1:
            chunk = whole.stop
        cut: list[Part | None] = [None] * world_size
        for rank, at in enumerate(range(0, whole.stop, chunk)):
            cut[rank] = replace(whole, start=at, stop=min(at + chunk, whole.stop))
        messages.append(Message(cut, chunk))

    # deal out each deck
    load = [0] * world_size  # elements of each rank so far
    for (kind, _), deck in decks.items():
        size = 1 if kind == "adamw" else stack_size(len(deck), num_leaves)
        # matrices in whole stacks of all ranks: the whole deck if W divides K
        stacked = len(deck) // (size * world_size) * size * world_size
        for first in range(0, len(deck), world_size):
            deal: list[Part | None] = [None] * world_size
            owners = sorted(range(world_size), key=load.__getitem__)
            for part, owner in zip(deck[first : first + world_size], owners):
                deal[owner] = part
                load[owner] += part.stop
            stack = size if first < stacked else 1
            messages.append(Message(deal, deck[first].stop, stack))
    return sorted(messages, key=lambda message: -message.chunk)
