"""Transfer of payloads over the bus in bounded pieces: never one huge value, never a huge pipeline. Runs on asyncio."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import numpy.typing as npt

from diloco.pipeline.bus.commits import Staged
from diloco.pipeline.bus.ports import PayloadStore
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import BadPayload
from diloco.pipeline.messages.wire import Codec
from diloco.pipeline.payload.codec import Payload, PayloadReader, as_bytes

# Most bytes in flight per payload.
PIECE_BYTES = 4 * 2**20


# Runs heavy work in another thread.
Offload = Callable[..., Awaitable[Any]]


def _piece(chunk_bytes: int) -> int:
    return max(1, PIECE_BYTES // chunk_bytes)


async def pull(
    bus: PayloadStore, key: str, elements: int, codec: Codec, chunk_bytes: int, extend_s: float = BUS_TIMES.pulled_ttl_s
) -> PayloadReader:
    """Read a payload that is complete on the bus. If that takes several reads, each extends its expiry.

    Raises:
        BadPayload: the payload is missing, incomplete (a replaced payload may have been deleted: read the head again)
            or corrupt.
    """
    reader = PayloadReader(elements, codec, chunk_bytes)
    several = reader.expected > _piece(chunk_bytes)
    while not reader.complete:
        await _feed(bus, key, reader, extend_s if several else 0.0)
    return reader


async def _feed(bus: PayloadStore, key: str, reader: PayloadReader, extend_s: float) -> None:
    """Read and verify one piece. This is a function of its own so that the piece is freed before the next is read."""
    limit = _piece(reader.chunk_bytes)
    chunks = await bus.read_chunks(key, reader.received, limit, reader.chunk_bytes, extend_s=extend_s)
    if not chunks:
        raise BadPayload(f"{key} has {reader.received} of {reader.expected} chunks")
    for chunk in chunks:
        reader.feed(chunk)


async def arriving(bus: PayloadStore, key: str, reader: PayloadReader) -> AsyncIterator[Sequence[bytes | memoryview]]:
    """Yield the chunks that a reader lacks, while they are still being uploaded, without a time limit.

    The caller has the deadline, and must feed the reader before it asks for more.
    """
    limit, block_s = _piece(reader.chunk_bytes), 0.0  # never block for chunks that are there already
    while not reader.complete:
        if chunks := await bus.read_chunks(key, reader.received, limit, reader.chunk_bytes, block_s=block_s):
            yield chunks
        block_s = 0.0 if chunks else BUS_TIMES.block_s


async def push(bus: PayloadStore, key: str, array: npt.NDArray[Any], chunk_bytes: int, ttl_s: float) -> Staged:
    """Upload a flat array (elements,) under a fresh key, which expires unless a commit makes it stay."""
    return await push_payload(bus, key, Payload(as_bytes(array), chunk_bytes), chunk_bytes, ttl_s)


async def push_payload(bus: PayloadStore, key: str, payload: Payload, chunk_bytes: int, ttl_s: float) -> Staged:
    """Upload like `push` a payload whose bytes are all final."""
    sent, piece = 0, _piece(chunk_bytes)
    while sent < payload.chunks:
        payload.grow_to(min((sent + piece) * chunk_bytes, payload.nbytes))
        sent = await _write(bus, key, payload, sent, ttl_s, piece)
    return Staged(key, sent)


async def push_growing(
    bus: PayloadStore, key: str, payload: Payload, chunk_bytes: int, ttl_s: float, more: asyncio.Event
) -> Staged:
    """Upload like `push` a payload that is still being written; `more` is set when it, or another one, has grown."""
    sent, piece = 0, _piece(chunk_bytes)
    while sent < payload.chunks:
        more.clear()  # before `ready` is read: growth after that read sets it again, and no wake-up is lost
        if payload.ready < min(sent + piece, payload.chunks):
            await more.wait()
        else:
            sent = await _write(bus, key, payload, sent, ttl_s, piece)
    return Staged(key, sent)


async def _write(bus: PayloadStore, key: str, payload: Payload, first: int, ttl_s: float, piece: int) -> int:
    batch = [payload.encoded(index) for index in range(first, min(first + piece, payload.chunks))]
    await bus.write_chunks(key, first, batch, ttl_s)
    return first + len(batch)
