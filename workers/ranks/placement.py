"""Which elements each rank holds and sends, which rank serves each fragment, and what fits into a server's memory.
Pure.

A rank holds a block of each tensor: some rows (`fully_shard`, and layers that are split by their outputs), some columns
(layers that are split by their inputs), both, or all of it (a replica). A block may be empty, and the blocks of
different ranks may differ in size. A rank's own flat vector of a fragment consists of the elements that it holds of
each of the fragment's tensors, in the layout's order. A piece is a block of a fragment's tensor whose elements are
contiguous there; in the fragment's flat vector they are runs at equal distances.

A fragment's server gathers, encodes, uploads and pulls it, and keeps its base and its error-feedback residual. It is
the same rank for the whole run: the fragments are dealt out, the largest first, each to the rank that has the fewest
elements.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import FragmentLayout, Layout, Slot, spread
from diloco.pipeline.messages.spec import TensorSpec
from diloco.pipeline.messages.wire import AVERAGED

# Most elements in one message between ranks. It bounds the memory of what is in transit.
SLICE = 2**18
T = TypeVar("T", bound=Any)


class Block(NamedTuple):
    """The part of a tensor that a rank holds: rows [first, last), and of each row the elements [left, right)."""

    first: int
    last: int
    left: int
    right: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return (self.last - self.first) * (self.right - self.left)

    def both(self, other: "Block") -> "Block":
        """Return what two blocks of a tensor have in common; it may be empty."""
        first, left = max(self.first, other.first), max(self.left, other.left)
        return Block(first, max(first, min(self.last, other.last)), left, max(left, min(self.right, other.right)))

    def cut(self, flat: npt.NDArray[T], part: "Block") -> npt.NDArray[T]:
        """Return a view (rows, columns) of a part of this block. flat: this block's elements."""
        rows = slice(part.first - self.first, part.last - self.first)
        columns = slice(part.left - self.left, part.right - self.left)
        return flat.reshape(self.last - self.first, self.right - self.left)[rows, columns]


# The blocks of all tensors of a layout, by tensor name.
Blocks = Mapping[str, Block]


def row_of(tensor: TensorSpec) -> int:
    """Return the number of elements in one row of a tensor."""
    return math.prod(tensor.shape[1:])


def whole_block(tensor: TensorSpec) -> Block:
    """Return the block that is all of a tensor."""
    return Block(0, tensor.shape[0] if tensor.shape else 1, 0, row_of(tensor))


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements that are contiguous in a rank's own vector, and runs of `run` elements in a fragment's flat vector."""

    start: int
    """Offset in the fragment's vector."""
    at: int
    """Offset in the rank's own vector."""
    elements: int
    run: int
    """Length of each run; a divisor of `elements`."""
    stride: int
    """Distance between the starts of two runs, if there are several."""

    def of(self, flat: npt.NDArray[T]) -> npt.NDArray[T]:
        """Return a view (runs, run) of the piece in a fragment's vector."""
        runs = self.elements // self.run
        end = self.start + (runs - 1) * self.stride + self.run
        if not 0 <= self.start <= end <= flat.size:  # `as_strided` would read beyond it
            raise IndexError(f"elements {self.start} to {end} of {flat.size}")
        span = flat[self.start : end]
        return np.lib.stride_tricks.as_strided(span, (runs, self.run), (self.stride * flat.itemsize, flat.itemsize))

    def cut(self, flat: npt.NDArray[T]) -> npt.NDArray[T]:
        """Return the piece's elements (elements,) in a fragment's vector, a copy if they are several runs."""
        # Reshaping alone would give a view of a single column.
        return np.ascontiguousarray(self.of(flat)).reshape(-1)

    def runs(self) -> "Iterable[Piece]":
        """Return each run as a piece."""
        for number in range(self.elements // self.run):
            start, at = self.start + number * self.stride, self.at + number * self.run
            yield replace(self, start=start, at=at, elements=self.run)

    def split(self, most: int) -> "tuple[Piece | None, Piece | None]":
        """Return a part of up to `most` elements and the rest. Several runs are split only between two of them."""
        several = self.run < self.elements
        count = min(most // self.run * self.run if several else most, self.elements)
        left = self.elements - count
        skip = count // self.run * self.stride if several else count
        first = replace(self, elements=count, run=self.run if several else count) if count else None
        rest = Piece(self.start + skip, self.at + count, left, self.run if several else left, self.stride)
        return first, rest if left else None


def sources(blocks: Sequence[Block], tensor: TensorSpec, first: int) -> frozenset[int]:
    """Return the ranks that send their block of a tensor, chosen so that each element is sent once.

    Args:
        blocks: the block that each rank holds.
        tensor: the tensor.
        first: the preferred sender; where several ranks hold the same block, the next of them from this rank on sends
            it.

    Raises:
        UsageError: the ranks do not hold the tensor once, or the same number of times in equal blocks.
    """
    holders: dict[Block, list[int]] = {}
    for rank, one in enumerate(blocks):
        if one.elements:
            holders.setdefault(one, []).append(rank)
    if not tiles(holders, tensor) or len({len(ranks) for ranks in holders.values()}) != 1:
        held = ", ".join(
            f"rank {r}: rows {b.first}..{b.last}, columns {b.left}..{b.right}" for r, b in enumerate(blocks)
        )
        raise UsageError(f"the ranks do not hold parameter {tensor.name} as shards or replicas of each other ({held})")
    return frozenset(min(ranks, key=lambda rank: (rank - first) % len(blocks)) for ranks in holders.values())


def tiles(blocks: Iterable[Block], tensor: TensorSpec) -> bool:
    """Return whether these different blocks, with no empty one, hold each element of a tensor exactly once."""
    bands: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for one in blocks:
        bands[one.first, one.last].append((one.left, one.right))
    whole = whole_block(tensor)
    return _in_a_row(bands, whole.last) and all(_in_a_row(band, whole.right) for band in bands.values())


def _in_a_row(ranges: Iterable[tuple[int, int]], length: int) -> bool:
    """Return whether the ranges [start, stop) are 0..length, one after another."""
    end = 0
    for start, stop in sorted(ranges):
        if start != end:
            return False
        end = stop
    return end == length


def servers_of(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return each fragment's server. sizes: number of elements of each fragment."""
    servers = spread(sorted(enumerate(sizes), key=lambda one: (-one[1], one[0])), ranks)
    return [servers[p] for p in range(len(sizes))]


def local_layout(layout: Layout, blocks: Blocks) -> Layout:
    """Return the layout of the flat vectors of a rank that holds these blocks (`Shares.local`)."""
    fragments = []
    for fragment in layout.fragments:
        slots: list[Slot] = []
        for slot in fragment.slots:
            held = blocks[slot.tensor.name]
            if part := _part(held, slot):
                at, tensor = slots[-1].stop if slots else 0, slot.tensor
                if held != whole_block(tensor):
                    tensor = tensor.model_copy(update={"shape": _shape(held, tensor)})
                if tensor.rows is not None:
                    rows = part.first - held.first, part.last - held.first
                    tensor = tensor.model_copy(update={"rows": None if rows == (0, tensor.shape[0]) else rows})
                slots.append(Slot(tensor, at, at + part.elements))
        fragments.append(FragmentLayout(fragment.id, tuple(slots)))
    return Layout(tuple(fragments), layout.digest)


def _shape(held: Block, tensor: TensorSpec) -> tuple[int, ...]:
    """Return the shape of a block; it has some of the tensor's columns only if that has several dimensions."""
    rest = math.prod(tensor.shape[2:])
    columns = ((held.right - held.left) // rest,) if len(tensor.shape) > 1 else ()
    return (held.last - held.first, *columns, *tensor.shape[2:])


def _part(held: Block, slot: Slot) -> Block | None:
    """Return the part of a rank's block that lies in a slot; None if it is empty."""
    first, last = slot.tensor.rows or (held.first, held.last)
    part = held.both(held._replace(first=first, last=last))
    return part if part.elements else None


class Shares:
    """The parts of a model's layout that the ranks of one learner hold."""

    def __init__(self, layout: Layout, held: Sequence[Blocks]) -> None:
        """held: the blocks of each rank.

        Raises:
            UsageError: they are not the whole model once, or several times.
        """
        self.layout, self.ranks = layout, len(held)
        self._held = held
        self.servers = servers_of([fragment.elements for fragment in layout.fragments], len(held))
        """The server of each fragment."""
        self.pieces, self.sent = cache(self._all_pieces), cache(self._sent_pieces)
        self.slices, self.given = cache(self._sent_slices), cache(self._given_slices)
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
        return in_slices(self.sent(rank, fragment))

    def _given_slices(self, rank: int, fragment: int) -> list[list[Piece]]:
        """Return the pieces of a global that a rank is given, grouped by message."""
        return in_slices(self.pieces(rank, fragment))

    def _sources(self, slot: Slot, server: int) -> frozenset[int]:
        tensor = slot.tensor
        blocks = [blocks[tensor.name] for blocks in self._held]
        # Each rank has its own values of a buffer. Rank 0's count as the learner's, as in DDP.
        return sources(blocks, tensor, 0 if tensor.rule in AVERAGED else server)

    def _pieces(self, rank: int, fragment: int) -> Iterable[tuple[Slot, Piece]]:
        at = 0
        for slot in self.layout.fragments[fragment].slots:
            if part := _part(self._held[rank][slot.tensor.name], slot):
                row, size = row_of(slot.tensor), part.elements
                start = slot.start + part.first * row - slot.within.start + part.left
                run = size if part.right - part.left == row else part.right - part.left
                yield slot, Piece(start, at, size, run, row)
                at += size


def in_slices(pieces: Iterable[Piece], most: int = SLICE) -> list[list[Piece]]:
    """Split pieces into groups of at most `most` elements, one group per message; returns at least one group."""
    groups, room = list[list[Piece]]([[]]), most
    for piece in pieces:
        for part in [piece] if piece.run <= most else piece.runs():
            rest: Piece | None = part
            while rest is not None:
                taken, rest = rest.split(room)
                if taken is not None:
                    groups[-1].append(taken)
                    room -= taken.elements
                if rest is not None:
                    groups.append([])
                    room = most
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
