"""Quantization of deltas to 8 or 4 bits per element, in blocks with a common scale. Pure numpy.

    int8   -127..127 times the scale; the error of an element is at most 0.4 % of its block's largest
    int4   -7..7 times the scale, two per byte; at most 7.2 %

A block has `BLOCK` elements; the last one is padded with zeros. In half the block the scales would take twice the
bytes; in twice the block one large element would silence twice as many others. The bfloat16 scale is rounded *up*, so
nothing is clipped. On the wire each `GROUP` of elements is stored together, first the scales of its blocks, then the
codes, so that the first elements can be decoded before the last ones arrive.

Rounding is to nearest, ties to even. A block whose largest element is below `MIN_ABSMAX` is coded as zero, which keeps
subnormal numbers out; one with an element that is not finite gets such a scale, which the decoder sees. All operations
are elementwise in float32, so the decoded values are the same on every machine (docs/explanation/formats.md).
"""

from typing import Any, Final, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from diloco.pipeline.errors import BadPayload

Kind = Literal["int8", "int4"]
KINDS: Final[tuple[Kind, ...]] = ("int8", "int4")

# Elements per scale.
BLOCK = 256

# Blocks whose largest element is smaller are coded as zero: they are noise, and the reciprocals of their scales would
# not be finite.
MIN_ABSMAX = 2.0**-100

# Elements processed at a time, chosen such that a few arrays of this size fit in the cache.
GROUP = 256 * BLOCK

_ELEMENTS_A_BYTE: Final[dict[Kind, int]] = {"int8": 1, "int4": 2}
# Per block.
_SCALE_BYTES = 2

# The largest code.
_LARGEST: Final[dict[Kind, int]] = {"int8": 127, "int4": 7}

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITE = np.uint32(0x7F800000)


def _pairs() -> npt.NDArray[np.uint64]:
    """Return (256,): for each int4 byte its two elements as adjacent float32 numbers, the low nibble's first."""
    nibbles, byte = np.arange(16), np.arange(256)
    values = np.where(nibbles < 8, nibbles, nibbles - 16)
    both = np.stack([values[byte & 15], values[byte >> 4]], axis=1).astype(np.float32)
    return both.view(np.uint64).reshape(-1)


_PAIRS: Final = _pairs()


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _code_bytes(kind: Kind) -> int:
    """Return the bytes of one block's codes."""
    return BLOCK // _ELEMENTS_A_BYTE[kind]


def wire_bytes(elements: int, kind: Kind) -> int:
    """Return the size in bytes of a vector on the wire."""
    return _blocks(elements) * (_SCALE_BYTES + _code_bytes(kind))


def decodable(size: int, elements: int, kind: Kind) -> int:
    """Return how many elements the first `size` bytes of a vector hold: whole groups, or all."""
    if size >= wire_bytes(elements, kind):
        return elements
    return size // wire_bytes(GROUP, kind) * GROUP


class _Group:
    """One group's place on the wire. The arrays share the wire's memory."""

    def __init__(self, wire: Bytes, start: int, elements: int, kind: Kind) -> None:
        """Locate the group that begins at element `start` of a vector of `elements`."""
        blocks, at = _blocks(min(GROUP, elements - start)), wire_bytes(start, kind)
        codes_at, self.end = at + blocks * _SCALE_BYTES, at + wire_bytes(blocks * BLOCK, kind)
        self.scales = wire[at:codes_at].view(ml_dtypes.bfloat16)
        """(blocks,)"""
        self.codes = wire[codes_at : self.end].reshape(blocks, _code_bytes(kind))
        """(blocks, bytes per block)"""


# --- encoding ----------------------------------------------------------------------------------------


class Encoding:
    """A vector that is encoded from front to back, `GROUP` elements at a time."""

    def __init__(self, elements: int, kind: Kind, wire: Bytes | None = None) -> None:
        """Begin a vector; `wire` (`wire_bytes`,) is the array to write to, or None for a new one."""
        self._elements, self._kind, self._at = elements, kind, 0
        self.wire: Bytes = np.empty(wire_bytes(elements, kind), np.uint8) if wire is None else wire
        """Filled from front to back."""
        shape = min(GROUP // BLOCK, _blocks(elements)), BLOCK
        self._values, self._work = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self._codes = np.empty(shape, np.uint8)

    def add(self, piece: npt.NDArray[Any], error: Float32 | None = None) -> int:
        """Encode the next `GROUP` elements, or the rest if there are fewer; return how many bytes of `wire` are final.

        Args:
            piece: (elements,) float32 or bfloat16, contiguous.
            error: (elements,), overwritten with the quantization error, `piece` minus the decoded values; may be
                `piece` itself.
        """
        group = _Group(self.wire, self._at, self._elements, self._kind)
        if len(piece) != min(GROUP, self._elements - self._at):
            raise ValueError(
                f"{len(piece)} elements at {self._at} of {self._elements}: pass {GROUP} at a time, or the rest"
            )
        self._encode(piece, group.scales, group.codes)
        if error is not None:
            decoded = self._work[: len(group.scales)].reshape(-1)
            _decode(group, self._kind, decoded)
            np.subtract(piece, decoded[: len(piece)], out=error, dtype=np.float32)
        self._at += len(piece)
        return group.end

    def _encode(self, piece: npt.NDArray[Any], scales: npt.NDArray[Any], out: Bytes) -> None:
        """Encode a piece (elements,) to its scales (blocks,) and codes (blocks, bytes per block)."""
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
        if not sound.all():  # rare: the syncer will refuse such a delta
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
            # A little-endian word of two codes has the low nibble in its lower byte and the high nibble in its upper
            # byte. The shift puts both into the lower byte, which the copy keeps.
            words = codes.view("<u2")
            words |= words >> np.uint16(4)
            np.copyto(out, words, casting="unsafe")
        else:
            np.copyto(out, codes)

    def _scales(self, largest: Float32) -> Float32:
        """Return the scales (blocks,) for blocks with these largest magnitudes, each one exact in bfloat16."""
        exact = (largest / np.float32(_LARGEST[self._kind])).view(np.uint32)
        rounded_up = ((exact + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)
        return np.where(largest >= MIN_ABSMAX, rounded_up, np.float32(0))


def encode(values: npt.NDArray[Any], kind: Kind, error: Float32 | None = None) -> Bytes:
    """Return a flat vector's bytes on the wire (`wire_bytes`,). Equal vectors give equal bytes.

    error: (elements,), overwritten with the quantization error, `values` minus the decoded values; may be `values`
    itself.
    """
    encoding = Encoding(len(values), kind)
    for start in range(0, len(values), GROUP):
        stop = start + GROUP
        encoding.add(values[start:stop], None if error is None else error[start:stop])
    return encoding.wire


# --- decoding ----------------------------------------------------------------------------------------


def _decode(group: _Group, kind: Kind, out: Float32) -> None:
    """Decode whole blocks to `out` (blocks * BLOCK,)."""
    rows = out.reshape(-1, BLOCK)
    if kind == "int8":
        np.copyto(rows, group.codes.view(np.int8))
    else:
        np.take(_PAIRS, group.codes, out=rows.view(np.uint64), mode="clip")
    with np.errstate(over="ignore", invalid="ignore"):  # callers check a peer's values after decoding
        np.multiply(rows, group.scales.astype(np.float32)[:, None], out=rows)


class Quantized:
    """A flat vector (elements,) in its wire format; `vector[start:stop]` decodes that part to a new float32 array."""

    def __init__(self, wire: Bytes, elements: int, kind: Kind, sound: int = 0) -> None:
        """Wrap a vector's bytes, and check its scales.

        Args:
            wire: (`wire_bytes`,) kept, not copied.
            elements: number of elements.
            kind: the code.
            sound: number of leading elements whose scales were checked before.

        Raises:
            BadPayload: the size is wrong, or a scale is negative. A scale that is not finite decodes to values that are
                not.
        """
        if len(wire) != wire_bytes(elements, kind):
            raise BadPayload(f"{len(wire)} bytes for {elements} elements in {kind}, not {wire_bytes(elements, kind)}")
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
            raise ValueError("only slices of step 1 can be decoded")
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
