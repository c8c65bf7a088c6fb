"""Deltas in 8 or 4 bits an element: blocks of whole numbers. Pure numpy.

    int8   -127..127 times the scale; the error of an element is at most 0.4 % of its block's largest
    int4   -7..7 times the scale, two a byte; at most 7.2 % of it

Elements are taken in blocks of `BLOCK`; the last one is filled up with zeros. 256 elements a block cost 0.8 % (int8) or
1.6 % (int4) for the scales; halving the blocks would double that, and doubling them would let one large element
silence twice as many others. A scale in bfloat16 has float32's range in half of its bytes, and rounding it *up* keeps
the largest element within the codes, so nothing is ever clipped.

On the wire `GROUP` elements follow each other: first the scales of their blocks, in bfloat16, then their codes. So the
first bytes are known when the first elements are, and are of use before the last have come; and the size is a function
of the number of elements alone.

Rounding is to nearest, ties to even: equal arrays give equal bytes. A block that is nowhere as large as `LEAST` is
zero, which keeps subnormal numbers out; one with an element that is not finite gets a scale that is not, so that
whoever decodes it sees so. All of it is single float32 operations, element by element: what is decoded is the same on
every machine.
"""

from typing import Any, Final, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from diloco.pipeline.errors import BadPayload

Kind = Literal["int8", "int4"]
KINDS: Final[tuple[Kind, ...]] = ("int8", "int4")

BLOCK = 256
"""Elements with one scale."""

LEAST = 2.0**-100
"""A block with nothing as large has no scale: its elements are noise, and their reciprocals would not be finite."""

GROUP = 256 * BLOCK
"""Elements worked on at a time: a few arrays of so many stay in the cache."""

_ELEMENTS_A_BYTE: Final[dict[Kind, int]] = {"int8": 1, "int4": 2}
_SCALE_BYTES = 2
"""Of one block."""

_LARGEST: Final[dict[Kind, int]] = {"int8": 127, "int4": 7}
"""Largest code times the scale."""

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITE = np.uint32(0x7F800000)


def _pairs() -> npt.NDArray[np.uint64]:
    """(256,) the two elements that a byte of int4 stands for: float32 next to each other, the low nibble's first."""
    nibbles, byte = np.arange(16), np.arange(256)
    values = np.where(nibbles < 8, nibbles, nibbles - 16)
    both = np.stack([values[byte & 15], values[byte >> 4]], axis=1).astype(np.float32)
    return both.view(np.uint64).reshape(-1)


_PAIRS: Final = _pairs()


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _code_bytes(kind: Kind) -> int:
    """Of one block."""
    return BLOCK // _ELEMENTS_A_BYTE[kind]


def wire_bytes(elements: int, kind: Kind) -> int:
    """Size of a vector of `elements` on the wire."""
    return _blocks(elements) * (_SCALE_BYTES + _code_bytes(kind))


def decodable(size: int, elements: int, kind: Kind) -> int:
    """How many of a vector's elements its first `size` bytes hold: whole groups, or all."""
    if size >= wire_bytes(elements, kind):
        return elements
    return size // wire_bytes(GROUP, kind) * GROUP


class _Group:
    """One group's place on the wire; the arrays share the wire's memory."""

    def __init__(self, wire: Bytes, start: int, elements: int, kind: Kind) -> None:
        """start: its first element, of `elements` of the vector."""
        blocks, at = _blocks(min(GROUP, elements - start)), wire_bytes(start, kind)
        codes_at, self.end = at + blocks * _SCALE_BYTES, at + wire_bytes(blocks * BLOCK, kind)
        self.scales = wire[at:codes_at].view(ml_dtypes.bfloat16)
        """(blocks,)"""
        self.codes = wire[codes_at : self.end].reshape(blocks, _code_bytes(kind))
        """(blocks, bytes of one)"""


# --- encoding ----------------------------------------------------------------------------------------


class Encoding:
    """A vector that is being encoded from front to back, `GROUP` elements at a time."""

    def __init__(self, elements: int, kind: Kind, wire: Bytes | None = None) -> None:
        """wire: (`wire_bytes`,) to write to; None: new memory."""
        self._elements, self._kind, self._at = elements, kind, 0
        self.wire: Bytes = np.empty(wire_bytes(elements, kind), np.uint8) if wire is None else wire
        """Written from the front on."""
        shape = min(GROUP // BLOCK, _blocks(elements)), BLOCK
        self._values, self._work = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self._codes = np.empty(shape, np.uint8)

    def add(self, piece: npt.NDArray[Any], error: Float32 | None = None, decoded: Float32 | None = None) -> int:
        """Encode the next `GROUP` elements, or the rest if it is less; returns how much of `wire` is final now.

        Args:
            piece: (elements,) float32 or bfloat16, contiguous.
            error: (elements,), overwritten with what the code loses, `piece` less what is decoded; it may be `piece`.
            decoded: (elements,), overwritten with what whoever decodes it will have.
        """
        group = _Group(self.wire, self._at, self._elements, self._kind)
        if len(piece) != min(GROUP, self._elements - self._at):
            raise ValueError(f"{len(piece)} elements at {self._at} of {self._elements}: {GROUP} a time, or the rest")
        self._encode(piece, group.scales, group.codes)
        if error is not None or decoded is not None:
            found = self._work[: len(group.scales)].reshape(-1)
            _decode(group, self._kind, found)
            if decoded is not None:
                np.copyto(decoded, found[: len(piece)])
            if error is not None:
                np.subtract(piece, found[: len(piece)], out=error, dtype=np.float32)
        self._at += len(piece)
        return group.end

    def _encode(self, piece: npt.NDArray[Any], scales: npt.NDArray[Any], out: Bytes) -> None:
        """A piece (elements,) into its scales (blocks,) and codes (blocks, bytes of one)."""
        blocks = len(scales)
        if piece.dtype == np.float32 and len(piece) == blocks * BLOCK:
            values = piece.reshape(blocks, BLOCK)
        else:
            values = self._values[:blocks]
            flat = values.reshape(-1)
            np.copyto(flat[: len(piece)], piece)
            flat[len(piece) :] = 0
        work = self._work[:blocks]
        magnitudes = np.bitwise_and(values.view(np.uint32), _MAGNITUDE, out=work.view(np.uint32))
        largest = magnitudes.max(axis=1)
        sound = largest < _INFINITE
        if not sound.all():  # rare: such a delta will be refused
            values = np.where(sound[:, None], values, np.float32(0))
        found, codes = self._scales(largest.view(np.float32)), self._codes[:blocks]
        with np.errstate(divide="ignore"):
            factors = np.where(found > 0, np.float32(1) / found, np.float32(0))
        np.multiply(values, factors[:, None], out=work)
        np.rint(work, out=work)
        np.copyto(codes.view(np.int8), work, casting="unsafe")
        upper = found.view(np.uint32) >> np.uint32(16)
        np.copyto(scales.view(np.uint16), np.where(sound, upper, 0x7FC0), "unsafe")
        if self._kind == "int4":
            np.bitwise_and(codes, np.uint8(15), out=codes)
            words = codes.view("<u2")  # (low, high) nibbles in one word: both in its lower byte
            words |= words >> np.uint16(4)
            np.copyto(out, words, casting="unsafe")
        else:
            np.copyto(out, codes)

    def _scales(self, largest: Float32) -> Float32:
        """Scales (blocks,) of blocks with these largest magnitudes; each one is a bfloat16."""
        exact = (largest / np.float32(_LARGEST[self._kind])).view(np.uint32)
        rounded_up = ((exact + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)
        return np.where(largest >= LEAST, rounded_up, np.float32(0))


def encode(values: npt.NDArray[Any], kind: Kind, error: Float32 | None = None) -> Bytes:
    """A flat vector as its bytes on the wire (`wire_bytes`,); equal vectors give equal bytes.

    error: (elements,), overwritten with what the code loses, `values` less what is decoded; it may be `values`.
    """
    encoding = Encoding(len(values), kind)
    for start in range(0, len(values), GROUP):
        stop = start + GROUP
        encoding.add(values[start:stop], None if error is None else error[start:stop])
    return encoding.wire


# --- decoding ----------------------------------------------------------------------------------------


def _decode(group: _Group, kind: Kind, out: Float32) -> None:
    """Whole blocks into `out` (blocks * BLOCK,)."""
    rows = out.reshape(-1, BLOCK)
    if kind == "int8":
        np.copyto(rows, group.codes.view(np.int8))
    else:
        np.take(_PAIRS, group.codes, out=rows.view(np.uint64), mode="clip")
    with np.errstate(over="ignore", invalid="ignore"):  # whoever takes it from a peer looks at what came out
        np.multiply(rows, group.scales.astype(np.float32)[:, None], out=rows)


class Quantized:
    """A flat vector (elements,) as it came: `vector[start:stop]` decodes that part of it, as a new float32 array."""

    def __init__(self, wire: Bytes, elements: int, kind: Kind, sound: int = 0) -> None:
        """A vector.

        Args:
            wire: (`wire_bytes`,) kept, not copied.
            elements: how many.
            kind: of code.
            sound: the scales of so many elements were looked at before.

        Raises:
            BadPayload: of another size, or a scale is negative. What is not finite decodes to what is not finite.
        """
        if len(wire) != wire_bytes(elements, kind):
            raise BadPayload(f"{len(wire)} bytes, and {elements} elements in {kind} have {wire_bytes(elements, kind)}")
        self.wire, self._elements, self._kind = wire, elements, kind
        for start in range(sound - sound % GROUP, elements, GROUP):
            negative = _Group(wire, start, elements, kind).scales.view(np.int16) < 0
            if negative.any():
                raise BadPayload(f"the scale of block {start // BLOCK + int(negative.argmax())} is negative")

    def __len__(self) -> int:
        return self._elements

    def __getitem__(self, part: slice) -> Float32:
        start, stop, step = part.indices(self._elements)
        if step != 1:
            raise ValueError("only whole stretches can be decoded")
        origin = start - start % BLOCK
        out = np.empty(_blocks(max(stop - origin, 0)) * BLOCK, np.float32)
        at = origin
        while at < stop:
            group = _Group(self.wire, at - at % GROUP, self._elements, self._kind)
            first = at % GROUP // BLOCK
            last = min(first + _blocks(stop - at), len(group.scales))
            group.scales, group.codes = group.scales[first:last], group.codes[first:last]
            to = at + (last - first) * BLOCK
            _decode(group, self._kind, out[at - origin : to - origin])
            at = to
        return out[start - origin : max(start, stop) - origin]
