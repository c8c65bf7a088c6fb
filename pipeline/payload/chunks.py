"""Encoded chunks without a copy of their data: what goes before it, the array's own memory, and what goes after. Pure.

A chunk is msgpack (`messages.payload.Chunk`), and `codec` reads it however it is written. Ours are all written alike,
so the bytes around the data are known beforehand: `heading` and `ending` are they.
"""

import struct
from collections.abc import Callable
from typing import NamedTuple

import msgpack
import xxhash

LEAST_PARTS = 64 * 1024
"""Chunks with less data are made whole: a copy costs less than to handle parts."""


class ChunkParts(NamedTuple):
    """An encoded chunk in three pieces."""

    head: bytes
    data: memoryview
    tail: bytes

    @property
    def nbytes(self) -> int:
        """Of all three."""
        return len(self.head) + self.data.nbytes + len(self.tail)

    def joined(self) -> bytes:
        """In one."""
        return b"".join(self)


Encoded = bytes | ChunkParts


def whole(chunk: Encoded) -> bytes:
    """An encoded chunk in one piece."""
    return chunk.joined() if isinstance(chunk, ChunkParts) else chunk


def size(chunk: Encoded | memoryview) -> int:
    """Bytes of an encoded chunk."""
    return chunk.nbytes if isinstance(chunk, ChunkParts) else len(chunk)


def heading(index: int, size: int) -> bytes:
    """What stands before `size` bytes of data in chunk `index`."""
    number = bytes([index]) if index < 2**7 else _sized(index, 0xCC)
    return _INDEX + number + _DATA + _sized(size, 0xC4)


def _sized(number: int, kind: int) -> bytes:
    """A number in 1, 2 or 4 bytes, after the type of msgpack that says in how many: `kind` and the two after it."""
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
    """What stands after the data."""
    made: bytes = _DIGEST + digest + (_NO_TOTAL if total is None else _TOTAL + total)
    return made


def read_ending(tail: bytes) -> tuple[bytes, bytes | None] | None:
    """Digest and total of what `ending` made; None if it is not from there."""
    digest, rest = tail[len(_DIGEST) : len(_DIGEST) + DIGEST_BYTES], tail[len(_DIGEST) + DIGEST_BYTES :]
    if not tail.startswith(_DIGEST) or len(digest) < DIGEST_BYTES:
        return None
    if rest == _NO_TOTAL:
        return digest, None
    if rest.startswith(_TOTAL) and len(rest) == len(_TOTAL) + DIGEST_BYTES:
        return digest, rest[len(_TOTAL) :]
    return None


Grown = Callable[[], object]
"""Called when more chunks of a payload are whole, by the thread that writes it."""


def nobody() -> None:
    """Nobody waits for what is written."""


class Payload:
    """The bytes of a payload that are written from front to back, and the digests of the chunks that are whole.

    One thread writes, another may encode what is there.
    """

    def __init__(self, data: memoryview, chunk_bytes: int, grown: Grown = nobody) -> None:
        self._data, self._chunk_bytes, self._grown = data, chunk_bytes, grown
        self._total = xxhash.xxh3_128()
        self._digests: list[bytes] = []
        self.nbytes, self.chunks = len(data), -(-len(data) // chunk_bytes)

    @property
    def ready(self) -> int:
        """Chunks that are whole."""
        return len(self._digests)

    @property
    def digest(self) -> bytes:
        """The payload's, once all chunks are whole (`codec.payload_digest`)."""
        return self._total.digest()

    def grow_to(self, upto: int) -> None:
        """All bytes before `upto` are as they will be."""
        before = len(self._digests)
        while (index := len(self._digests)) < self.chunks:
            stop = min((index + 1) * self._chunk_bytes, len(self._data))
            if stop > upto:
                break
            digest = xxhash.xxh3_128_digest(self._data[index * self._chunk_bytes : stop])
            self._total.update(digest)
            self._digests.append(digest)  # last: whoever sees the last one may ask for the total
        if len(self._digests) > before:
            self._grown()

    def encoded(self, index: int) -> Encoded:
        """A chunk that is whole; joined, it is `messages.payload.Chunk` in msgpack."""
        piece = self._data[index * self._chunk_bytes : (index + 1) * self._chunk_bytes]
        tail = ending(self._digests[index], self.digest if index == self.chunks - 1 else None)
        parts = ChunkParts(heading(index, len(piece)), piece, tail)
        return parts if len(piece) >= LEAST_PARTS else parts.joined()


def split(encoded: bytes | memoryview, index: int, size: int) -> tuple[memoryview, bytes, bytes | None] | None:
    """Data (not copied), digest and total of chunk `index`, if it has `size` bytes of data and is written as here."""
    head, view = heading(index, size), memoryview(encoded)
    if view[: len(head)] != head:
        return None
    found = read_ending(bytes(view[len(head) + size :])) if len(view) <= len(head) + size + 64 else None
    return None if found is None else (view[len(head) : len(head) + size], *found)
