r"""
In which order the gradients of a step are added: a fixed binary tree over K leaves, whatever the
number of processes.

float32 addition commutes (a + b and b + a have the same bits) but does not associate: (a + b) + c
and a + (b + c) differ in the last bit, and after a thousand steps they are different models. So the
bracketing is fixed when a run starts, and W processes are W places where parts of the same tree are
computed. Leaf j is block j of K; K = 8:

    0   1   2   3   4   5   6   7        W = 1: one process adds all of it
     \ /     \ /     \ /     \ /         W = 2: {0 1 2 3} and {4 5 6 7} inside a rank, the last + across
      +       +       +       +          W = 4: the first row of + inside a rank, the other two across
       \     /         \     /           W = 8: a leaf each, everything across
          +               +
           \_____________/
                  +

**In a leaf** micro-batches are added in order by `backward` itself: `.grad` is the first one's
gradient (not 0 + it), then each later one is added to it.

**Inside a rank** finished leaves are added like a binary counter: a sum of 2^i leaves waits for the
next sum of 2^i. m = K / W = 4, what is kept after each leaf:

    leaf 0 -> [0]     leaf 1 -> [01]     leaf 2 -> [01, 2]     leaf 3 -> [01, 23] -> [0123] -> .grad

While leaf j is computed, as many sums wait as j has 1-bits: at most log2(m) copies of the gradients,
and none for m = 1, where nothing is done at all. A waiting sum is not a copy: it is the tensor that
`.grad` was.

**Across ranks** each message of W equal chunks goes through an all-to-all, so that rank r has chunk r
of everybody's message, in rank order, and adds the W parts as the upper rows of the tree. Each rank
sends and receives what it would in a reduce-scatter, (W - 1) / W of a message. What it costs more is
room for the parts that arrive, as large as what is sent.

**Across nodes** the same sum is made in two goes, so that a network card carries 1/L of what the L
ranks of its node hold. Two nodes of L = 2 (a digit is a chunk of the message):

    ranks 0 and 1   0123  0123   inside a node: rank 0 adds all of 02, rank 1 all of 13
    ranks 2 and 3   0123  0123                  rank 2 adds all of 02, rank 3 all of 13
                                 across nodes: 0 and 2 exchange their 02, 1 and 3 their 13

The tree is the same wherever L is a power of two: a node is then one of its branches. For any other
L everything goes through the one all-to-all.

All sums are float32: the gradients of a bfloat16 parameter are widened (which is exact) before they
are added, in a leaf (by `grad_dtype`), inside a rank and across ranks. So a step of many micro-batches
on one GPU has the arithmetic of one on eight. Where a rank has a single micro-batch, there is nothing
to add: its gradients travel as bfloat16 and are widened on arrival. A gradient of None counts as
+0.0 in both places; -0.0 + 0.0 is 0.0, so it is added and not skipped.

A W that does not divide K owns a block per rank (dataloader.StepLayout). Then the same pairs are made
with an odd part carried up: rank order, reproducible for this W, and no promise for another.

**Messages.** Flattened tensors are laid out in messages of W equal chunks, and rank r owns chunk r
of every message. With W = 2 (`.` is padding), an embedding E, matrices A B C, small tensors s and t:

                 rank 0         rank 1
    message 1  | E E E E E E | E E E E E E |   a large tensor of AdamW is cut between its grains
    message 2  | A A A A A   | B B B B .   |   whole tensors are dealt, the largest first, each to
    message 3  | .           | C C         |   the rank that has least; a matrix is always whole
    message 4  | s s s .     | t t t t     |   small ones are dealt as matrices are

Rejected: a tree in which each rank sends its sum to a partner, log2(W) times (half of the ranks
idle, W times the latency); an all-gather (W times the bytes); a reduce-scatter that is asked nicely
(backends choose the order by topology and size); exact sums in fixed point (three words an element,
and gradients have no bounded exponent).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def merge(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """left + right in float32, written into one of them where that is float32. None counts as zeros
    of +0.0."""
    if left is None:
        left, right = right, None
    if left is None:
        return None
    return left.float().add_(0.0 if right is None else right)


class LeafAccumulator:
    """Adds a rank's leaves up, so that `.grad` of `params` becomes their sum in tree order.

        for i, batch in enumerate(micro_batches, start=1):
            loss(batch).backward()
            if i % micro_batches_per_leaf == 0:
                leaves.leaf_done()

    num_leaves: m, the rank's leaves a step, a power of two; anything else is a ValueError. Every
    `.grad` has to be None when a step begins. A `.grad` to which several micro-batches add is float32,
    also of a bfloat16 parameter. on_host: sums wait in the host's memory, pinned beside a GPU, which
    costs the way there and back and no bit.
    """

    def __init__(self, params: Iterable[Tensor], num_leaves: int, *, micro_batches_per_leaf: int,
                 on_host: bool = False) -> None:
        if num_leaves < 1 or num_leaves & (num_leaves - 1):
            raise ValueError(f"leaves of a rank: got {num_leaves}, expected a power of two; choose "
                             "--leaves and the number of processes so that one divides the other")
        self.num_leaves, self._on_host = num_leaves, on_host
        self._params = list(params)
        self._done = 0
        # sums of ever fewer leaves; each has a gradient (or None) for every parameter
        self._waiting: list[list[Tensor | None]] = []
        for param in self._params if num_leaves * micro_batches_per_leaf > 1 else ():
            param.grad_dtype = torch.float32

    @torch.no_grad()
    def leaf_done(self) -> None:
        """To be called when the last micro-batch of a leaf has gone backward. Only the last leaf of
        a step leaves a `.grad`."""
        if self.num_leaves == 1:
            return
        self._done += 1
        # the counter's carries: a sum of one leaf, of two, of four, ..., the nearest first
        carries = (self._done & -self._done).bit_length() - 1
        equals = [self._waiting.pop() for _ in range(carries)]
        last = self._done == self.num_leaves
        sums = []
        for i, param in enumerate(self._params):
            total, param.grad = param.grad, None
            for older in equals:
                mine, older[i] = older[i], None
                total = merge(mine if mine is None else mine.to(param.device, non_blocking=True), total)
            if last:
                param.grad = total
            elif self._on_host and total is not None:
                total = total.to("cpu", non_blocking=total.is_cuda)  # of a GPU into pinned memory
            sums.append(total)
        if last:
            self._done = 0
        else:
            self._waiting.append(sums)


def add_in_tree_order(parts: Tensor) -> Tensor:
    """(W, n) float32 -> (n,): rows added in pairs, pairs of pairs, ...; an odd last one is carried
    up. `parts` is scratch space: adding in place takes a fifth of the time that fresh memory does
    on a CPU."""
    while len(parts) > 2:
        parts[0:len(parts) // 2 * 2:2].add_(parts[1::2])
        parts = parts[0::2]
    # the sum is fresh, so that `parts` can be freed
    return parts[0] + parts[1] if len(parts) == 2 else parts[0]


# reduce(message, rank, world_size) starts adding the (W * chunk,) messages of all ranks, elementwise,
# of one float dtype. What it returns waits for the sum and gives this rank's chunk of it, (chunk,)
# float32.
Reduce = Callable[[Tensor, int, int], Callable[[], Tensor]]


def tree_reduce(message: Tensor, rank: int, world_size: int) -> Callable[[], Tensor]:
    """The `Reduce` in tree order. Collective; the message is only read."""
    if world_size == 1:
        return message.float
    received = torch.empty_like(message)
    work = dist.all_to_all_single(received, message, async_op=True)

    def finish() -> Tensor:
        work.wait()
        return add_in_tree_order(received.view(world_size, -1).float())

    return finish


def reduce_over_nodes(ranks_per_node: int) -> Reduce:
    """`tree_reduce` in two goes, first inside nodes of so many ranks, numbered node by node, then
    across them. Its bits are those of `tree_reduce`, and it is that where two goes gain nothing or
    would add in another order. Collective: it makes process groups."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    everyones = [ranks_per_node] * world_size
    if world_size > 1:
        dist.all_gather_object(everyones, ranks_per_node)
    L, nodes = ranks_per_node, world_size // ranks_per_node
    if set(everyones) != {L} or not 1 < L < world_size or L & (L - 1) or world_size % L:
        return tree_reduce
    ranks = torch.arange(world_size).view(nodes, L)
    inside, across = (
        # the watchdog finds who hangs long before this timeout
        dist.new_subgroups_by_enumeration(groups.tolist(), timeout=timedelta(hours=1))[0]
        for groups in (ranks, ranks.T))

    def reduce(message: Tensor, rank: int, world_size: int) -> Callable[[], Tensor]:
        """A `Reduce` that waits for the sums inside the node when it is asked for its chunk."""
        # chunks of the ranks with one place in their nodes, side by side
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
GRAINS = 64  # of a tensor that may be cut
ALIGNED = 64  # elements: where grains begin in a chunk


@dataclass(frozen=True)
class Part:
    """Elements start..stop of a flattened parameter: all of it, or what one rank owns of it."""

    name: str
    param: Tensor
    group: dict[str, Any]  # its hyper-parameters
    start: int
    stop: int

    @property
    def grain(self) -> int:
        """So many elements of the parameter stay together, whatever W is."""
        n = self.param.numel()
        if self.group["kind"] == "muon" or n < SMALL_ELEMENTS:
            return n
        return -(-n // (GRAINS * ALIGNED)) * ALIGNED

    def of(self, tensor: Tensor) -> Tensor:
        """These elements of the parameter, or of its gradient; flat."""
        return tensor.detach().reshape(-1)[self.start:self.stop]


@dataclass(frozen=True)
class Message:
    """A chunk of so many elements for each rank. It begins with the part that the rank owns, if
    there is one for it; what is left is padding. The same on every rank."""

    parts: list[Part | None]  # by rank
    chunk: int

    def placed(self, message: Tensor) -> list[tuple[Part, Tensor]]:
        """Each part, and its place in a tensor of all chunks."""
        return [(part, chunk[:part.stop - part.start])
                for part, chunk in zip(self.parts, message.split(self.chunk)) if part]

    def gradients(self) -> Tensor:
        """(W * chunk,), to be read only; of the type that a `.grad` has, see `LeafAccumulator`. A
        missing gradient is zeros."""
        return self._pack(lambda param: param.grad, self.first.param.grad_dtype or torch.float32)

    def parameters(self) -> Tensor:
        """(W * chunk,), of the parameters' type."""
        return self._pack(lambda param: param, self.first.param.dtype)

    @property
    def first(self) -> Part:
        """The first part that there is; all are alike in kind and type, matrices in group and shape."""
        return next(part for part in self.parts if part)

    def _pack(self, of: Callable[[Tensor], Tensor | None], dtype: torch.dtype) -> Tensor:
        """All chunks. Where that is one tensor and nothing else it is that tensor, not a copy."""
        numel, first = self.chunk * len(self.parts), self.first.param
        alone = of(first) if first.numel() == numel else None
        if alone is not None:
            return alone.detach().reshape(-1)
        message = torch.zeros(numel, dtype=dtype, device=first.device)
        for part, place in self.placed(message):
            if (tensor := of(part.param)) is not None:
                place.copy_(part.of(tensor))
        return message

    def gather(self, message: Tensor, rank: int) -> Callable[[], None]:
        """Start the all-gather of every rank's chunk of a message of parameters; what is returned
        waits for it and fills the parameters."""
        work = None
        if len(self.parts) > 1:
            mine = message.split(self.chunk)[rank]
            # its name before PyTorch 2.13
            all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
            work = all_gather(message, mine, async_op=True)

        def finish() -> None:
            if work is not None:
                work.wait()
            for part, place in self.placed(message):
                values = part.of(part.param)
                if values.data_ptr() != place.data_ptr():  # else it is the parameter
                    values.copy_(place)

        return finish


def lay_out(params: Sequence[Part], world_size: int) -> list[Message]:
    """The messages of whole parameters, the largest first: so only a small one's all-gather has no
    update to hide behind.

    Parameters of a single grain are dealt, matrices of one group and shape by themselves: the W
    largest, one to each rank, then the next W, and so on; of each deal the larger goes to the rank
    that has fewer elements so far. The others are cut: each is a message, with as many grains for
    each rank (the last: fewer).
    """
    messages = []
    decks: dict[Any, list[Part]] = {}
    for whole in sorted(params, key=lambda part: -part.stop):
        if whole.grain == whole.stop:
            same = (id(whole.group), whole.param.shape) if whole.group["kind"] == "muon" else None
            decks.setdefault((same, whole.param.dtype), []).append(whole)
            continue
        grains = -(-whole.stop // whole.grain)
        chunk = whole.stop if world_size == 1 else -(-grains // world_size) * whole.grain
        cut: list[Part | None] = [None] * world_size
        for rank, at in enumerate(range(0, whole.stop, chunk)):
            cut[rank] = replace(whole, start=at, stop=min(at + chunk, whole.stop))
        messages.append(Message(cut, chunk))
    load = [0] * world_size
    for deck in decks.values():
        for first in range(0, len(deck), world_size):
            deal: list[Part | None] = [None] * world_size
            owners = sorted(range(world_size), key=load.__getitem__)
            for part, owner in zip(deck[first:first + world_size], owners):
                deal[owner] = part
                load[owner] += part.stop
            messages.append(Message(deal, deck[first].stop))
    return sorted(messages, key=lambda message: -message.chunk)
