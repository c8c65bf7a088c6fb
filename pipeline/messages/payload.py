"""Wire types of payloads: the chunks in which they travel, and the updates that follow a global."""

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
    """Set on the last chunk only: xxh3-128 over all chunk digests in order, which is the payload's digest."""


class Update(Message):
    """A quantized outer step on the bus: subtracting it from the values at its base gives the next values."""

    payload: Text
    """Key of the payload."""
    chunks: Annotated[int, Field(ge=1, le=MAX_CHUNKS)]
    base: Digest
    """Digest of the values that the update is applied to."""
    averaged: bool
    """True if the outer step only averaged learners: no momentum is left after it."""
    merged: Text = ""
    """Key of the quantized pseudogradient, in as many chunks, from which the next momentum is computed. "" if the
    momentum can be computed from the update itself."""

    @property
    def payloads(self) -> tuple[str, ...]:
        """Keys of the update's payloads, each of `chunks` chunks."""
        return (self.payload, self.merged) if self.merged else (self.payload,)


class Updates(Message):
    """The head's `updates` field as stored."""

    max_parts: ClassVar[int] = MAX_UPDATES + 2
    max_items: ClassVar[int] = MAX_UPDATES

    updates: Annotated[tuple[Update, ...], Field(max_length=MAX_UPDATES, fail_fast=True)]
