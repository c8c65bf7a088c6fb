"""Conversion of messages to bytes and of vectors to chunks, and back. Pure: numpy, msgpack and xxhash only.

A payload is a flat array, or a vector in one of `quantize`'s codes, cut into chunks of `chunk_bytes`. Each chunk
carries its digest; the last one also carries the digest over all chunk digests, which is the payload's digest. Nothing
here unpickles.

A chunk is a msgpack map (`messages.payload.Chunk`), and any valid encoding of it is accepted. Chunks written here are
all laid out alike, so the bytes around the data are known in advance (`heading`, `ending`), and the data can be sent
and received without a copy.
"""

import reprlib
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import ml_dtypes
import msgpack
import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import TypeAdapter, ValidationError

from diloco.pipeline.errors import BadMessage, BadPayload
from diloco.pipeline.messages.fragment import Committed, TapeRecord
from diloco.pipeline.messages.payload import Chunk
from diloco.pipeline.messages.wire import CHUNK_EXTRA_BYTES, Codec, Message
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.quantize import KINDS, Quantized, decodable, wire_bytes
from diloco.pipeline.wrong_values import complaint

M = TypeVar("M", bound=Message)

# The most entries of a map in a message.
MAX_FIELDS = 256


class Traits(NamedTuple):
    """What the rest of the program must know of a codec."""

    dtype: np.dtype[Any] | None
    """Element type on the wire; None: `quantize` encodes blocks of elements."""
    feedback: bool
    """Whether a learner keeps the encoding error for its next delta."""
    quick: bool
    """Whether decoding is so fast that the syncer does it on its event loop."""


TRAITS: dict[Codec, Traits] = {
    "bf16": Traits(np.dtype(ml_dtypes.bfloat16), feedback=False, quick=True),
    "fp32": Traits(np.dtype(np.float32), feedback=False, quick=True),
    "int8": Traits(None, feedback=True, quick=False),
    "int4": Traits(None, feedback=True, quick=False),
}
# The codecs that encode each element alone.
DTYPES = {codec: traits.dtype for codec, traits in TRAITS.items() if traits.dtype is not None}

# A flat vector (elements,) in its wire format: in either case `vector[start:stop]` is an array.
Vector = npt.NDArray[Any] | Quantized

_tape: TypeAdapter[TapeRecord] = TypeAdapter(TapeRecord)


def encode(message: Message) -> bytes:
    """Encode a message in msgpack."""
    packed: bytes = msgpack.packb(message.model_dump())
    return packed


class _Shown(reprlib.Repr):
    """Shortens a peer's value for a message, however large it is."""

    def repr_bytes(self, value: bytes, _: int) -> str:
        """Shorten bytes, for which reprlib has no method."""
        return repr(value[: self.maxstring])


_shown = _Shown().repr


def _unpack(kind: type[Message], data: bytes, limit: int) -> Any:
    """Decode msgpack with no more objects, and no longer arrays, than `kind` allows.

    A peer can announce a large array in a few bytes, nested in others, and msgpack allocates all of them before it
    finds that the elements are missing. Therefore a message that may have arrays is first skipped over, which allocates
    nothing and fails if announced elements are missing.
    """
    what, parts = kind.__name__, kind.max_parts
    if len(data) > limit:
        raise BadMessage(f"{what} of {len(data)} bytes exceeds the limit of {limit}")

    def part(value: Any) -> Any:
        nonlocal parts
        parts -= 1
        if parts < 0:
            raise ValueError(f"more than {kind.max_parts} arrays and maps")
        return value

    try:
        if kind.max_items:
            walker = msgpack.Unpacker(max_buffer_size=max(1, len(data)), read_size=max(1, len(data)))
            walker.feed(data)
            walker.skip()
        return msgpack.unpackb(
            data,
            use_list=False,
            object_hook=part,
            list_hook=part,
            max_array_len=kind.max_items,
            max_map_len=MAX_FIELDS,
            max_bin_len=limit,
            max_str_len=min(limit, 2**20),
            max_ext_len=0,
        )
    except Exception as error:  # msgpack raises ValueError kinds, RecursionError and UnicodeDecodeError
        raise BadMessage(f"{what} is not valid msgpack within its bounds: {error}") from error


def _complaint(what: str, error: ValidationError) -> BadMessage:
    first = error.errors(include_url=False)[0]
    got = "" if first["type"] == "literal_error" else f" (got {_shown(first['input'])[:80]})"  # the complaint has it
    return BadMessage(f"{what}: {complaint(error)}{got}")


def decode(kind: type[M], data: bytes, limit: int | None = None) -> M:
    """Decode msgpack to a message of `kind`.

    limit: most bytes, if that is lower than the kind's own limit (`Message`).

    Raises:
        BadMessage: not msgpack, too large, or a field is out of bounds.
    """
    raw = _unpack(kind, data, kind.max_bytes if limit is None else min(limit, kind.max_bytes))
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise _complaint(kind.__name__, error) from None


def decode_tape(data: bytes) -> TapeRecord:
    """Decode msgpack to a tape record of any kind.

    Raises:
        BadMessage: as in `decode`.
    """
    raw = _unpack(Committed, data, Committed.max_bytes)  # the kind with the highest limits
    try:
        return _tape.validate_python(raw)
    except ValidationError as error:
        raise _complaint("TapeRecord", error) from None


# --- chunks ---------------------------------------------------------------------------------------

# Chunks with less data are joined: the copy costs less than sending separate parts.
MIN_PARTS = 64 * 1024


class ChunkParts(NamedTuple):
    """An encoded chunk in three parts, so that its data need not be copied."""

    head: bytes
    data: memoryview
    tail: bytes

    @property
    def nbytes(self) -> int:
        """Length of all three parts."""
        return len(self.head) + self.data.nbytes + len(self.tail)

    def joined(self) -> bytes:
        """Return the three parts in one."""
        return b"".join(self)


Encoded = bytes | ChunkParts


def heading(index: int, size: int) -> bytes:
    """Return the bytes that precede `size` bytes of data in chunk `index`."""
    number = bytes([index]) if index < 2**7 else _sized(index, 0xCC)
    return _INDEX + number + _DATA + _sized(size, 0xC4)


def _sized(number: int, kind: int) -> bytes:
    """Encode a number in 1, 2 or 4 bytes; msgpack's types for these lengths are `kind`, `kind` + 1 and `kind` + 2."""
    if number < 2**8:
        return struct.pack(">BB", kind, number)
    return struct.pack(">BH", kind + 1, number) if number < 2**16 else struct.pack(">BI", kind + 2, number)


_INDEX: bytes = b"\x84" + msgpack.packb("index")
_DATA: bytes = msgpack.packb("data")


_DIGEST = msgpack.packb("digest") + b"\xc4\x10"
_NO_TOTAL = msgpack.packb("total") + b"\xc0"
_TOTAL = msgpack.packb("total") + b"\xc4\x10"
DIGEST_BYTES = 16


def ending(digest: bytes, total: bytes | None) -> bytes:
    """Return the bytes that follow the data."""
    made: bytes = _DIGEST + digest + (_NO_TOTAL if total is None else _TOTAL + total)
    return made


def read_ending(tail: bytes) -> tuple[bytes, bytes | None] | None:
    """Return digest and total from bytes that `ending` made; None for any others."""
    digest, rest = tail[len(_DIGEST) : len(_DIGEST) + DIGEST_BYTES], tail[len(_DIGEST) + DIGEST_BYTES :]
    if not tail.startswith(_DIGEST) or len(digest) < DIGEST_BYTES:
        return None
    if rest == _NO_TOTAL:
        return digest, None
    if rest.startswith(_TOTAL) and len(rest) == len(_TOTAL) + DIGEST_BYTES:
        return digest, rest[len(_TOTAL) :]
    return None


# Callback for when more chunks of a payload are complete. The thread that writes the payload calls it.
Grown = Callable[[], object]


def do_nothing() -> None:
    """Do nothing; for a payload whose growth is not awaited."""


class Payload:
    """A payload that is written from front to back, with the digests of its complete chunks.

    One thread writes it, and another may at the same time encode the chunks that are complete.
    """

    def __init__(self, data: memoryview, chunk_bytes: int, grown: Grown = do_nothing) -> None:
        self._data, self._chunk_bytes, self._grown = data, chunk_bytes, grown
        self._total = xxhash.xxh3_128()
        self._digests: list[bytes] = []
        self.nbytes, self.chunks = len(data), -(-len(data) // chunk_bytes)

    @property
    def ready(self) -> int:
        """Number of complete chunks."""
        return len(self._digests)

    @property
    def digest(self) -> bytes:
        """The payload's digest once all chunks are complete (`payload_digest`)."""
        return self._total.digest()

    def grow_to(self, upto: int) -> None:
        """Declare all bytes before `upto` final: they are not written again."""
        before = len(self._digests)
        while (index := len(self._digests)) < self.chunks:
            stop = min((index + 1) * self._chunk_bytes, len(self._data))
            if stop > upto:
                break
            digest = xxhash.xxh3_128_digest(self._data[index * self._chunk_bytes : stop])
            self._total.update(digest)
            self._digests.append(digest)  # after the total: a reader that sees the last digest may encode the total
        if len(self._digests) > before:
            self._grown()

    def encoded(self, index: int) -> Encoded:
        """Return a complete chunk; its parts joined are `messages.payload.Chunk` in msgpack."""
        piece = self._data[index * self._chunk_bytes : (index + 1) * self._chunk_bytes]
        tail = ending(self._digests[index], self.digest if index == self.chunks - 1 else None)
        parts = ChunkParts(heading(index, len(piece)), piece, tail)
        return parts if len(piece) >= MIN_PARTS else parts.joined()


def split_chunk(encoded: bytes | memoryview, index: int, size: int) -> tuple[memoryview, bytes, bytes | None] | None:
    """Return data (not copied), digest and total of chunk `index`.

    None if the chunk does not have `size` bytes of data, or is laid out differently from chunks written here.
    """
    head, view = heading(index, size), memoryview(encoded)
    if view[: len(head)] != head:
        return None
    found = read_ending(bytes(view[len(head) + size :])) if len(view) <= len(head) + size + 64 else None
    return None if found is None else (view[len(head) : len(head) + size], *found)


# --- payloads ------------------------------------------------------------------------------------


def payload_bytes(elements: int, codec: Codec) -> int:
    """Return the size of a payload in bytes."""
    return wire_bytes(elements, codec) if codec in KINDS else elements * DTYPES[codec].itemsize


def held(size: int, elements: int, codec: Codec) -> int:
    """Return how many elements of a vector the first `size` bytes of its payload hold."""
    if codec in KINDS:
        return decodable(size, elements, codec)
    return min(size // DTYPES[codec].itemsize, elements)


def chunk_count(elements: int, codec: Codec, chunk_bytes: int) -> int:
    """Return the number of chunks of a payload; an empty fragment is not allowed."""
    return -(-payload_bytes(elements, codec) // chunk_bytes)


def as_vector(data: npt.NDArray[np.uint8], elements: int, codec: Codec, sound: int = 0) -> Vector:
    """Return a payload's bytes (`payload_bytes`,) as a vector that shares their memory.

    sound: as in `Quantized`.

    Raises:
        BadPayload: as in `Quantized`.
    """
    return Quantized(data, elements, codec, sound) if codec in KINDS else data.view(DTYPES[codec])


def digest_of(data: bytes | memoryview) -> bytes:
    """Return the xxh3-128 digest."""
    return xxhash.xxh3_128_digest(data)


def payload_digest(data: memoryview, chunk_bytes: int) -> bytes:
    """Return the digest of a payload: xxh3-128 over its chunk digests."""
    total = xxhash.xxh3_128()
    for at in range(0, len(data), chunk_bytes):
        total.update(digest_of(data[at : at + chunk_bytes]))
    return total.digest()


def as_bytes(vector: Vector) -> memoryview:
    """Return the bytes of a contiguous array, or of a vector in its wire format, without a copy."""
    array = vector.wire if isinstance(vector, Quantized) else vector
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # numpy's stubs lack Buffer


class PayloadReader:
    """Assembles a payload from its chunks. All sizes follow from the spec, never from what the peer says."""

    def __init__(self, elements: int, codec: Codec, chunk_bytes: int) -> None:
        self._elements, self._codec, self._sound = elements, codec, 0
        self.chunk_bytes = chunk_bytes
        self._size = payload_bytes(elements, codec)
        self._data = np.empty(0, np.uint8)  # allocated when the first chunk is verified
        self._total = xxhash.xxh3_128()
        self.expected = chunk_count(elements, codec, chunk_bytes)
        self.received = 0

    @property
    def complete(self) -> bool:
        """True if all chunks are here and verified."""
        return self.received == self.expected

    def feed(self, encoded: bytes | memoryview) -> None:
        """Verify and store the next chunk.

        Raises:
            BadPayload: it is out of order, of the wrong size, or corrupt.
        """
        start = self.received * self.chunk_bytes
        size = min(self.chunk_bytes, self._size - start)
        found = None if self.complete else split_chunk(encoded, self.received, size)
        data, digest, total = found or self._decoded(bytes(encoded), size)
        if digest_of(data) != digest:
            raise BadPayload(f"chunk {self.received} does not match its digest")
        if not self.received:
            self._data = pooled(self._size)
        self._data[start : start + size] = np.frombuffer(data, np.uint8)
        self._total.update(digest)
        self.received += 1
        if self.complete and total != self._total.digest():
            raise BadPayload("the payload does not match the digest of all its chunks")

    def _decoded(self, encoded: bytes, size: int) -> tuple[bytes, bytes, bytes | None]:
        """Return data, digest and total of a chunk in a different layout; raise if it is not the next one."""
        try:
            chunk = decode(Chunk, encoded, self.chunk_bytes + CHUNK_EXTRA_BYTES)
        except BadMessage as error:
            raise BadPayload(str(error)) from error
        if self.complete or chunk.index != self.received:
            raise BadPayload(f"chunk {chunk.index} came, but {self.received} of {self.expected} was expected")
        if len(chunk.data) != size:
            raise BadPayload(f"chunk {chunk.index} has {len(chunk.data)} bytes, but the spec requires {size}")
        return chunk.data, chunk.digest, chunk.total

    @property
    def digest(self) -> bytes:
        """The payload's digest, once it is complete."""
        return self._total.digest()

    def so_far(self) -> Vector:
        """Return the verified part: the first elements of `vector`.

        Raises:
            BadPayload: as in `vector`.
        """
        here = held(self.received * self.chunk_bytes, self._elements, self._codec)
        sound, self._sound = self._sound, here
        return as_vector(self._data[: payload_bytes(here, self._codec)], here, self._codec, sound)

    def vector(self) -> Vector:
        """Return the flat vector (elements,), which shares the reader's memory.

        Raises:
            BadPayload: chunks are missing, or a scale is invalid.
        """
        if not self.complete:
            raise BadPayload(f"{self.received} of {self.expected} chunks have arrived")
        return as_vector(self._data, self._elements, self._codec)

    def array(self) -> npt.NDArray[Any]:
        """Return the payload as an array (elements,), for a codec that has an element type.

        Raises:
            BadPayload: as in `vector`.
            KeyError: the codec has no element type.
        """
        self.vector()
        return self._data.view(DTYPES[self._codec])
