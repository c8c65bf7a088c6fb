"""Whole payloads over the bus, in bounded pieces: never one huge value, never a huge pipeline."""

from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from .codec import PayloadReader, encode_chunks
from .errors import BadPayload
from .ports import Bus, Staged
from .wire import Codec

PIECE_BYTES = 4 * 2**20
"""Bytes in flight at a time."""

BLOCK_S = 1.0
"""How long one read waits for the next chunk of a payload that is still being uploaded."""


def _piece(chunk_bytes: int) -> int:
    return max(1, PIECE_BYTES // chunk_bytes)


async def pull(
    bus: Bus, key: str, elements: int, codec: Codec, chunk_bytes: int, extend_s: float = 60.0
) -> PayloadReader:
    """Read a payload that is complete on the bus; it is kept from expiring meanwhile.

    Raises:
        BadPayload: missing, incomplete (a replaced payload may have gone: read the head again) or corrupt.
    """
    reader = PayloadReader(elements, codec, chunk_bytes)
    while not reader.complete:
        chunks = await bus.read_chunks(key, reader.received, _piece(chunk_bytes), extend_s=extend_s)
        if not chunks:
            raise BadPayload(f"{key} has {reader.received} of {reader.expected} chunks")
        for chunk in chunks:
            reader.feed(chunk)
    return reader


async def follow(
    bus: Bus, key: str, elements: int, codec: Codec, chunk_bytes: int, heard: Callable[[], None]
) -> PayloadReader:
    """Read a payload while it is being uploaded, however long that takes: the caller has the deadline.

    `heard` is called whenever more of it has come.

    Raises:
        BadPayload: corrupt.
    """
    reader = PayloadReader(elements, codec, chunk_bytes)
    while not reader.complete:
        for chunk in await bus.read_chunks(key, reader.received, _piece(chunk_bytes), block_s=BLOCK_S):
            reader.feed(chunk)
            heard()
    return reader


async def push(bus: Bus, key: str, array: npt.NDArray[Any], chunk_bytes: int, ttl_s: float) -> Staged:
    """Upload a flat array (elements,) under a fresh key; it expires unless a commit makes it stay."""
    batch: list[bytes] = []
    written = 0
    for chunk in encode_chunks(array, chunk_bytes):
        batch.append(chunk)
        if len(batch) == _piece(chunk_bytes):
            await bus.write_chunks(key, written, batch, ttl_s)
            written += len(batch)
            batch = []
    if batch:
        await bus.write_chunks(key, written, batch, ttl_s)
        written += len(batch)
    return Staged(key, written)
