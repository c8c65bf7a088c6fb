"""Whole payloads over the bus, in bounded pieces: never one huge value, never a huge pipeline."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy.typing as npt

from .chunks import Payload
from .codec import DTYPES, PayloadReader, as_bytes
from .commits import Staged
from .errors import BadPayload
from .ports import PayloadStore
from .wire import Codec

Offload = Callable[..., Awaitable[Any]]

PIECE_BYTES = 4 * 2**20
"""Bytes in flight at a time."""

BLOCK_S = 1.0
"""How long one read waits for the next chunk of a payload that is still being uploaded."""


def _piece(chunk_bytes: int) -> int:
    return max(1, PIECE_BYTES // chunk_bytes)


async def pull(
    bus: PayloadStore, key: str, elements: int, codec: Codec, chunk_bytes: int, extend_s: float = 60.0
) -> PayloadReader:
    """Read a payload that is complete on the bus; one that takes several reads is kept from expiring meanwhile.

    Raises:
        BadPayload: missing, incomplete (a replaced payload may have gone: read the head again) or corrupt.
    """
    reader, limit = PayloadReader(elements, codec, chunk_bytes), _piece(chunk_bytes)
    extend_s *= reader.expected > limit
    while not reader.complete:
        chunks = await bus.read_chunks(key, reader.received, limit, extend_s=extend_s)
        if not chunks:
            raise BadPayload(f"{key} has {reader.received} of {reader.expected} chunks")
        for chunk in chunks:
            reader.feed(chunk)
    return reader


async def follow(
    bus: PayloadStore,
    key: str,
    elements: int,
    codec: Codec,
    chunk_bytes: int,
    heard: Callable[[], None],
    offload: Offload,
    look: Callable[[PayloadReader], None],
) -> PayloadReader:
    """Read a payload while it is being uploaded, however long that takes: the caller has the deadline.

    Args:
        bus, key, elements, codec, chunk_bytes: as `pull`.
        heard: called whenever more of it has come.
        offload: runs heavy work: of a quantized payload's.
        look: heavy work, at what has come so far.

    Raises:
        BadPayload: corrupt.
    """
    reader = PayloadReader(elements, codec, chunk_bytes)

    def take(chunks: Sequence[bytes | memoryview]) -> None:
        for chunk in chunks:
            reader.feed(chunk)
            look(reader)

    while not reader.complete:
        chunks = await bus.read_chunks(key, reader.received, _piece(chunk_bytes), block_s=BLOCK_S)
        if chunks:
            # A cast and a sum take less time here, where what came is in the cache, than in another thread.
            if codec in DTYPES:
                take(chunks)
            else:
                await offload(take, chunks)
            heard()
    return reader


async def push(bus: PayloadStore, key: str, array: npt.NDArray[Any], chunk_bytes: int, ttl_s: float) -> Staged:
    """Upload a flat array (elements,) under a fresh key; it expires unless a commit makes it stay."""
    data = as_bytes(array)
    payload = Payload(data, chunk_bytes)
    written, piece = 0, _piece(chunk_bytes)
    while written < payload.chunks:
        payload.written((written + piece) * chunk_bytes if written + piece < payload.chunks else len(data))
        written = await _write(bus, key, payload, written, ttl_s, piece)
    return Staged(key, written)


async def push_growing(
    bus: PayloadStore, key: str, payload: Payload, chunk_bytes: int, ttl_s: float, more: asyncio.Event
) -> Staged:
    """As `push`, of a payload that is still being written; `more` is set whenever more of it is."""
    written, piece = 0, _piece(chunk_bytes)
    while written < payload.chunks:
        more.clear()
        if payload.ready < min(written + piece, payload.chunks):
            await more.wait()
        else:
            written = await _write(bus, key, payload, written, ttl_s, piece)
    return Staged(key, written)


async def _write(bus: PayloadStore, key: str, payload: Payload, first: int, ttl_s: float, piece: int) -> int:
    batch = [payload.encoded(index) for index in range(first, min(first + piece, payload.chunks))]
    await bus.write_chunks(key, first, batch, ttl_s)
    return first + len(batch)
