"""
Who owns what: tensors laid out in messages of W equal chunks, of which rank r owns chunk r.

Flattened tensors, W = 2; `.` is padding. Matrices A B C (B as large as A), an embedding E, small tensors s and t:

                 rank 0         rank 1
    message 1  | A A A A A A | B B B B B B |   whole tensors: the largest are dealt first, each to the rank
    message 2  | C C         | .           |   that has least; a matrix is always whole
    message 3  | E E E E E E | E E E E E E |   a large tensor of AdamW is a message, cut between its grains
    message 4  | s s s       | t t t t     |   small ones are dealt as matrices are

A **grain** is what no cut goes through, whatever W is: 1/64 of a tensor that may be cut, all of any other. So what is
added up over grains does not depend on W. Tensors and grains begin at multiples of 64 elements of a chunk, so that a
vectorized loop has the same beginnings and ends in them everywhere.

A message that is one tensor and nothing else is that tensor, or its gradient, without a copy.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

SMALL_ELEMENTS = 1 << 16  # AdamW tensors below this are never cut
GRAINS = 64  # of a tensor that may be cut
ALIGNED = 64  # elements: where tensors and grains begin in a chunk
MESSAGE_ELEMENTS = 1 << 25  # a message of whole tensors is closed when it has grown beyond this


@dataclass(frozen=True)
class Member:
    """One parameter: its name, its kind ('muon' or 'adamw') and the index of its group."""
    name: str
    param: Tensor
    kind: str
    group: int

    @property
    def grain(self) -> int:
        """So many elements stay together, whatever W is; the last grain may be shorter."""
        return self.param.numel() if self.whole else -(-self.param.numel() // (GRAINS * ALIGNED)) * ALIGNED

    @property
    def whole(self) -> bool:
        """Whether it is never cut."""
        return self.kind == "muon" or self.param.numel() < SMALL_ELEMENTS

    def state_shapes(self, numel: int | None = None) -> dict[str, tuple[int, ...]]:
        """Shapes of its state; of `numel` of its elements, flat, where AdamW has cut it."""
        if self.kind == "adamw":
            return dict.fromkeys(("exp_avg", "exp_avg_sq"), tuple(self.param.shape) if numel is None else (numel,))
        rows, cols = self.param.shape
        return {"momentum_buffer": (rows, cols), "second_momentum_buffer": (rows, 1) if rows >= cols else (1, cols)}


@dataclass(frozen=True)
class Piece:
    """Elements start..stop of a flattened parameter, at `offset` of their owner's chunk."""
    member: Member
    start: int
    stop: int
    offset: int

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.member.state_shapes(self.stop - self.start)

    def of(self, chunk: Tensor) -> Tensor:
        """This piece's part of a chunk-long tensor; in its parameter's shape where the piece is whole."""
        part = chunk[self.offset:self.offset + self.stop - self.start]
        return part.view(self.member.param.shape) if part.numel() == self.member.param.numel() else part


@dataclass
class Message:
    """Flattened parameters at fixed offsets of W chunks of `chunk` elements; the same on every rank."""
    layout: list[tuple[Member, int]]
    chunk: int
    world_size: int
    owned: list[list[Piece]] = field(init=False)  # by rank

    def __post_init__(self) -> None:
        self.owned = [list(self._cut(r * self.chunk, (r + 1) * self.chunk)) for r in range(self.world_size)]
        only = self.layout[0][0].param
        self.direct = len(self.layout) == 1 and only.numel() == self.chunk * self.world_size and only.is_contiguous()

    def _cut(self, low: int, high: int) -> Iterator[Piece]:
        for member, offset in self.layout:
            start, stop = max(low, offset), min(high, offset + member.param.numel())
            if start < stop:
                yield Piece(member, start - offset, stop - offset, start - low)

    def _empty(self) -> Tensor:
        return self.layout[0][0].param.new_empty(self.chunk * self.world_size)

    def gradients(self) -> Tensor:
        """(W * chunk,), to be read only; float32 where it is packed (what is packed may be sums of leaves, which
        bfloat16 would round), else as the gradient is, without a copy. A missing gradient is zeros."""
        grads = [(member.param.grad, member.param.numel(), offset) for member, offset in self.layout]
        if self.direct and grads[0][0] is not None:
            return grads[0][0].reshape(-1)
        message = torch.zeros(self.chunk * self.world_size, device=self.layout[0][0].param.device)
        for grad, numel, offset in grads:
            if grad is not None:
                message[offset:offset + numel].copy_(grad.reshape(-1))
        return message

    def parameters(self, rank: int) -> tuple[Tensor, Tensor]:
        """(message, this rank's chunk of it), the chunk filled with the current parameters. Direct: no copy."""
        message = self.layout[0][0].param.detach().view(-1) if self.direct else self._empty()
        chunk = message[rank * self.chunk:(rank + 1) * self.chunk]
        if not self.direct:
            chunk.zero_()
            for piece in self.owned[rank]:
                piece.of(chunk).view(-1).copy_(piece.member.param.detach().reshape(-1)[piece.start:piece.stop])
        return message, chunk

    def gather(self, message: Tensor, chunk: Tensor) -> Callable[[], None]:
        """Start the all-gather of `message`; what is returned waits for it and fills the parameters."""
        work = dist.all_gather_single(message, chunk, async_op=True) if self.world_size > 1 else None

        def finish() -> None:
            if work is not None:
                work.wait()
            if not self.direct:
                for member, offset in self.layout:
                    param = member.param.detach()
                    param.copy_(message[offset:offset + param.numel()].view(param.shape))

        return finish


def deal_whole(members: Sequence[Member], world_size: int) -> list[Message]:
    """Deal whole tensors to ranks: the W largest, one to each rank, then the next W, ...; in each round the larger
    goes to the rank that has fewer elements. Rounds are put together until a message is large enough."""
    queue = sorted(members, key=lambda member: -member.param.numel())
    load = [0] * world_size
    messages: list[Message] = []
    places: list[tuple[Member, int, int]] = []  # (member, owner, offset in the owner's chunk)
    chunk = 0
    for first in range(0, len(queue), world_size):
        round_ = queue[first:first + world_size]
        for member, owner in zip(round_, sorted(range(world_size), key=lambda r: load[r])):
            load[owner] += member.param.numel()
            places.append((member, owner, chunk))
        chunk += round_[0].param.numel() if world_size == 1 else -(-round_[0].param.numel() // ALIGNED) * ALIGNED
        if world_size == 1 or chunk * world_size >= MESSAGE_ELEMENTS or first + world_size >= len(queue):
            messages.append(Message([(m, owner * chunk + at) for m, owner, at in places], chunk, world_size))
            places, chunk = [], 0
    return messages


def cut_at_grains(members: Sequence[Member], world_size: int) -> list[Message]:
    """A message for each tensor, as many grains of it to each rank (fewer to the last)."""
    messages = []
    for member in members:
        grains = -(-member.param.numel() // member.grain)
        chunk = member.param.numel() if world_size == 1 else -(-grains // world_size) * member.grain
        messages.append(Message([(member, 0)], chunk, world_size))
    return messages
