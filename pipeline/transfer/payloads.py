"""Whole payloads over the bus, in bounded pieces: never one huge value, never a huge pipeline."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy.typing as npt

from diloco.pipeline.bus.commits import Staged
from diloco.pipeline.bus.ports import PayloadStore
from diloco.pipeline.errors import BadPayload
from diloco.pipeline.messages.wire import Codec
from diloco.pipeline.payload.chunks import Payload
from diloco.pipeline.payload.codec import PayloadReader, as_bytes

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


async def arriving(bus: PayloadStore, key: str, reader: PayloadReader) -> AsyncIterator[Sequence[bytes | memoryview]]:
    """The chunks that a reader lacks, while they are being uploaded, however long that takes: the caller has the
    deadline, and feeds the reader before it asks for more.
    """
    while not reader.complete:
        limit = _piece(reader.chunk_bytes)
        if chunks := await bus.read_chunks(key, reader.received, limit, block_s=BLOCK_S):
            yield chunks


async def push(bus: PayloadStore, key: str, array: npt.NDArray[Any], chunk_bytes: int, ttl_s: float) -> Staged:
    """Upload a flat array (elements,) under a fresh key; it expires unless a commit makes it stay."""
    return await push_payload(bus, key, Payload(as_bytes(array), chunk_bytes), chunk_bytes, ttl_s)


async def push_payload(bus: PayloadStore, key: str, payload: Payload, chunk_bytes: int, ttl_s: float) -> Staged:
    """As `push`, of a payload whose bytes are all there and none of whose chunks is whole yet."""
    sent, piece = 0, _piece(chunk_bytes)
    while sent < payload.chunks:
        payload.grow_to(min((sent + piece) * chunk_bytes, payload.nbytes))
        sent = await _write(bus, key, payload, sent, ttl_s, piece)
    return Staged(key, sent)


async def push_growing(
    bus: PayloadStore, key: str, payload: Payload, chunk_bytes: int, ttl_s: float, more: asyncio.Event
) -> Staged:
    """As `push`, of a payload that is still being written; `more` is set when more of it is, or of another one."""
    sent, piece = 0, _piece(chunk_bytes)
    while sent < payload.chunks:
        more.clear()
        if payload.ready < min(sent + piece, payload.chunks):
            await more.wait()
        else:
            sent = await _write(bus, key, payload, sent, ttl_s, piece)
    return Staged(key, sent)


async def _write(bus: PayloadStore, key: str, payload: Payload, first: int, ttl_s: float, piece: int) -> int:
    batch = [payload.encoded(index) for index in range(first, min(first + piece, payload.chunks))]
    await bus.write_chunks(key, first, batch, ttl_s)
    return first + len(batch)
