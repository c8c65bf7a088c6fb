"""Which elements each rank holds and sends, which rank serves each fragment, and what fits into a server's memory.
Pure.

A rank holds one contiguous range of whole rows of a tensor: a shard (`fully_shard`), or all rows (a replica). Ranges
are given in elements of the flattened tensor. A shard may be empty, and the shards of different ranks may differ in
size. A rank's own flat vector of a fragment consists of the elements that it holds of each of the fragment's tensors,
in the layout's order. A piece is a run of elements that is contiguous both there and in the fragment's flat vector.

A fragment's server gathers, encodes, uploads and pulls it, and keeps its base and its error-feedback residual. It is
the same rank for the whole run: the fragments are dealt out, the largest first, each to the rank that has the fewest
elements.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile

from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import FragmentLayout, Layout, Slot, spread
from diloco.pipeline.messages.wire import AVERAGED

# Elements [start, stop) of a flattened tensor.
Range = tuple[int, int]
# Elements in one message between ranks. It bounds the memory of what is in transit.
SLICE = 2**18
# The ranges of all tensors of a layout, by tensor name.
Ranges = Mapping[str, Range]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements that is contiguous both in a fragment's flat vector and in a rank's own vector."""

    start: int
    """Offset in the fragment's vector."""
    at: int
    """Offset in the rank's own vector."""
    elements: int


def sources(ranges: Sequence[Range], elements: int, name: str, first: int) -> frozenset[int]:
    """Return the ranks that send their range of a tensor, chosen so that each element is sent once.

    Args:
        ranges: the range that each rank holds.
        elements: number of elements of the tensor.
        name: the tensor's name, for the error message.
        first: the preferred sender; where several ranks hold the same range, the next of them from this rank on sends
            it.

    Raises:
        UsageError: the ranks do not hold the tensor once, or the same number of times in equal ranges.
    """
    holders: dict[Range, list[int]] = {}
    for rank, one in enumerate(ranges):
        if one[0] < one[1]:
            holders.setdefault(one, []).append(rank)
    end = 0
    for start, stop in sorted(holders):
        if start != end:
            break
        end = stop
    if end != elements or len({len(ranks) for ranks in holders.values()}) != 1:
        held = ", ".join(f"rank {rank}: {start}..{stop}" for rank, (start, stop) in enumerate(ranges))
        raise UsageError(f"the ranks do not hold parameter {name} as shards or replicas of each other ({held})")
    return frozenset(min(ranks, key=lambda rank: (rank - first) % len(ranges)) for ranks in holders.values())


def servers_of(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return each fragment's server. sizes: number of elements of each fragment."""
    servers = spread(sorted(enumerate(sizes), key=lambda one: (-one[1], one[0])), ranks)
    return [servers[p] for p in range(len(sizes))]


def local_layout(layout: Layout, ranges: Ranges) -> Layout:
    """Return the layout of the flat vectors of a rank that holds these ranges (`Shares.local`)."""
    fragments = []
    for fragment in layout.fragments:
        slots: list[Slot] = []
        for slot in fragment.slots:
            start, stop = ranges[slot.tensor.name]
            first, last = _both((start, stop), slot)
            if first < last:
                at, tensor, row = slots[-1].stop if slots else 0, slot.tensor, math.prod(slot.tensor.shape[1:])
                if stop - start < tensor.whole.elements:
                    tensor = tensor.model_copy(update={"shape": ((stop - start) // row, *tensor.shape[1:])})
                if tensor.rows is not None:
                    rows = (first - start) // row, (last - start) // row
                    tensor = tensor.model_copy(update={"rows": None if rows == (0, tensor.shape[0]) else rows})
                slots.append(Slot(tensor, at, at + last - first))
        fragments.append(FragmentLayout(fragment.id, tuple(slots)))
    return Layout(tuple(fragments), layout.digest)


def _both(held: Range, slot: Slot) -> Range:
    """Return the intersection of a rank's range with a slot, in elements of the whole tensor; may be empty."""
    return max(held[0], slot.within.start), min(held[1], slot.within.stop)


class Shares:
    """The parts of a model's layout that the ranks of one learner hold."""

    def __init__(self, layout: Layout, held: Sequence[Ranges]) -> None:
        """held: the ranges of each rank.

        Raises:
            UsageError: they are not the whole model once, or several times.
        """
        self.layout, self.ranks = layout, len(held)
        self._held = held
        self.servers = servers_of([fragment.elements for fragment in layout.fragments], len(held))
        """The server of each fragment."""
        self.pieces, self.sent = cache(self._all_pieces), cache(self._sent_pieces)
        self.slices = cache(self._sent_slices)
        for fragment in layout.fragments:
            for slot in fragment.slots:
                self._sources(slot, self.servers[fragment.id])

    def local(self, rank: int) -> Layout:
        """Return the layout of a rank's own flat vectors, with the whole layout's digest. A fragment may be empty
        there."""
        return local_layout(self.layout, self._held[rank])

    def is_whole(self, name: str) -> bool:
        """Return whether every rank holds all of a tensor."""
        return len({held[name] for held in self._held}) == 1 and len(self._held) > 1

    def _all_pieces(self, rank: int, fragment: int) -> tuple[Piece, ...]:
        """Return all pieces of a fragment that a rank holds; together they are its own flat vector."""
        return tuple(piece for _, piece in self._pieces(rank, fragment))

    def _sent_pieces(self, rank: int, fragment: int) -> tuple[Piece, ...]:
        """Return the pieces that a rank sends when the fragment's server gathers the fragment."""
        server = self.servers[fragment]
        return tuple(piece for slot, piece in self._pieces(rank, fragment) if rank in self._sources(slot, server))

    def _sent_slices(self, rank: int, fragment: int) -> list[list[Piece]]:
        """Return the pieces that a rank sends, grouped by message."""
        return in_slices(self._sent_pieces(rank, fragment))

    def _sources(self, slot: Slot, server: int) -> frozenset[int]:
        tensor = slot.tensor
        ranges = [ranges[tensor.name] for ranges in self._held]
        # Each rank has its own values of a buffer. Rank 0's count as the learner's, as in DDP.
        return sources(ranges, tensor.whole.elements, tensor.name, 0 if tensor.rule in AVERAGED else server)

    def _pieces(self, rank: int, fragment: int) -> Iterable[tuple[Slot, Piece]]:
        at = 0
        for slot in self.layout.fragments[fragment].slots:
            first, last = _both(self._held[rank][slot.tensor.name], slot)
            if first < last:
                yield slot, Piece(slot.start + first - slot.within.start, at, last - first)
                at += last - first


def in_slices(pieces: Iterable[Piece], most: int = SLICE) -> list[list[Piece]]:
    """Split pieces into groups of at most `most` elements, one group per message; returns at least one group."""
    groups, room = list[list[Piece]]([[]]), most
    for piece in pieces:
        done = 0
        while done < piece.elements:
            if not room:
                groups.append([])
                room = most
            count = min(room, piece.elements - done)
            groups[-1].append(Piece(piece.start + done, piece.at + done, count))
            done, room = done + count, room - count
    return groups


def elements(pieces: Iterable[Piece]) -> int:
    """Return the total number of elements in the pieces."""
    return sum(piece.elements for piece in pieces)


# Elements. A server may have several fragments in flight up to this total: with small fragments one at a time would
# leave it idle, since it can carry several in one step.
SMALL = 2**22


class Capacity:
    """The memory that each server has for work in flight, in addition to what it keeps: one fragment, or several small
    ones. Pure.

    The fragment that has waited longest for a server gets it next. Otherwise a large fragment, which needs an empty
    server, would wait forever where small ones always overlap.
    """

    def __init__(self, elements: Sequence[int], servers: Sequence[int]) -> None:
        """elements, servers: number of elements and server of each fragment."""
        self._elements, self._servers = elements, servers
        self.taken: set[int] = set()
        """The fragments in flight."""
        self._waiting: dict[int, None] = {}
        """The fragments that found no memory, in the order of asking."""

    def _has(self, p: int) -> bool:
        """Return whether the server has memory for the fragment and no other fragment has waited longer."""
        server = self._servers[p]
        others = [self._elements[q] for q in self.taken if self._servers[q] == server]
        before = takewhile(lambda q: q != p, self._waiting)
        fits = not others or sum(others) + self._elements[p] <= SMALL
        return fits and all(self._servers[q] != server for q in before)

    def take(self, p: int) -> bool:
        """Reserve memory for a fragment. Return False if there is none; it then queues and must ask again."""
        if not self._has(p):
            self._waiting[p] = None
            return False
        self._waiting.pop(p, None)
        self.taken.add(p)
        return True

    def free(self, p: int) -> None:
        """Release the memory reserved for the fragment, if any."""
        self.taken.discard(p)

    def in_turn(self, asking: Collection[int]) -> list[int]:
        """Return these fragments in the order in which they should ask; all others leave the queue."""
        self._waiting = {p: None for p in self._waiting if p in asking}
        return [*self._waiting, *(p for p in asking if p not in self._waiting)]
