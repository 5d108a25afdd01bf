"""Packers written from their description alone: slow, obvious, and the same rows."""

import itertools


class Naive:
    """Best fit by a search through all pieces, written from the description alone."""

    def __init__(self, T, split, overlap):
        self.capacity = T + 1
        self.split = split
        self.overlap = overlap
        # (key, length, used, place), oldest first
        self.pieces = []
        self.arrived = 0
        self.left = 0

    def push(self, key, length, used=0):
        self.pieces.append((key, length, used, self.arrived))
        self.arrived += min(length, self.capacity)

    @property
    def fillers(self):
        return [p for p in self.pieces if p[1] < self.capacity and p[2] == 0]

    @property
    def timed(self):
        return [p for p in self.pieces if p not in self.fillers]

    @property
    def ready(self):
        return sum(length for _, length, _, _ in self.pieces) >= self.capacity

    @property
    def first(self):
        timed, fillers = self.timed, self.fillers
        return timed[0] if timed and (not fillers or timed[0][3] <= self.left) else fillers[0]

    def wants(self, target):
        counted = sum(min(p[1], self.capacity) for p in self.pieces)
        row = self.capacity if self.split else max(self.capacity, 2049)
        return not self.ready or (len(self.fillers) < target and counted < target * row)

    def choose(self, room):
        fillers = self.fillers
        exact = [p for p in fillers if p[1] == room]
        pairs = [p for p in fillers for q in fillers if p is not q and p[1] + q[1] == room]
        shortest = min((p[1] for p in fillers), default=0)
        near = [p for p in fillers if 0 < p[1] - room <= shortest and not self.split]
        if near and not exact and not pairs:
            return min(near, key=lambda p: (p[1], self.pieces.index(p)))
        fitting = exact or pairs or [p for p in fillers if p[1] < room]
        if fitting or (fillers and self.split):
            # the oldest of the largest
            return max(fitting or fillers, key=lambda p: (p[1], -self.pieces.index(p)))
        return (
            min(fillers, key=lambda p: (p[1], self.pieces.index(p))) if fillers else self.timed[0]
        )

    def next_row(self):
        room = self.capacity
        row = []
        piece = self.first
        while True:
            key, length, used, _ = piece
            self.pieces.remove(piece)
            self.left += min(length, self.capacity)
            placed = min(length, room)
            context = min(self.overlap, used - 1) if used else 0
            off = min(context, placed - 1)
            row.append((key, used - context if used else 0, placed, off))
            if placed < length and self.split:
                now = used + placed - 1 - off if used else placed
                total = length + used - 1 - context if used else length
                self.push(key, 1 + min(self.overlap, now - 1) + total - now, now)
            room -= placed
            if not room:
                return row
            piece = self.choose(room)


def back_to_back(T, lengths):
    """The rows of `concat`: all documents as one sequence of tokens, of which neighbouring rows
    share one."""
    tokens = [(key, number) for key, length in enumerate(lengths) for number in range(length)]
    rows = []
    for start in range(0, len(tokens) - T, T):
        rows.append([])
        for key, of_key in itertools.groupby(
            tokens[start : start + T + 1], key=lambda token: token[0]
        ):
            numbers = [number for _, number in of_key]
            rows[-1].append((key, numbers[0], len(numbers), 0))
    return rows
