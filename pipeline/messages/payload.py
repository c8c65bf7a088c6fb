"""Wire types of payloads: the pieces in which they travel, and the updates that follow a global."""

from typing import Annotated, ClassVar

from pydantic import Field

from diloco.pipeline.messages.wire import (
    CHUNK_EXTRA_BYTES,
    MAX_CHUNK_BYTES,
    MAX_CHUNKS,
    MAX_UPDATES,
    Digest,
    Message,
    Text,
)


class Chunk(Message):
    """One piece of a payload; chunk i of a payload is stream entry `{i+1}-0`."""

    max_bytes: ClassVar[int] = MAX_CHUNK_BYTES + CHUNK_EXTRA_BYTES
    max_parts: ClassVar[int] = 1
    max_items: ClassVar[int] = 0

    index: Annotated[int, Field(ge=0, le=10**6)]
    data: Annotated[bytes, Field(min_length=1, max_length=MAX_CHUNK_BYTES)]
    digest: Digest
    """xxh3-128 of `data`."""
    total: Digest | None
    """On the last chunk only: xxh3-128 over all chunk digests in order, the payload's digest."""


class Update(Message):
    """An outer step as it lies on the bus, quantized: the values at its base less what it says are the next ones."""

    payload: Text
    """Its key."""
    chunks: Annotated[int, Field(ge=1, le=MAX_CHUNKS)]
    base: Digest
    """Of the values from which it leads on."""
    averaged: bool
    """It only averaged learners: no momentum is left after it."""
    merged: Text = ""
    """Key of the pseudogradient, quantized, in as many chunks: by it the momentum goes on. "": the update tells it."""

    @property
    def payloads(self) -> tuple[str, ...]:
        """Keys of what lies on the bus of it, each in `chunks`."""
        return (self.payload, self.merged) if self.merged else (self.payload,)


class Updates(Message):
    """The head's `updates` field as stored."""

    max_parts: ClassVar[int] = MAX_UPDATES + 2
    max_items: ClassVar[int] = MAX_UPDATES

    updates: Annotated[tuple[Update, ...], Field(max_length=MAX_UPDATES, fail_fast=True)]
