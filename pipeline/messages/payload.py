"""Wire type of payloads: the chunks in which they travel."""

from typing import Annotated, ClassVar

from pydantic import Field

from diloco.pipeline.messages.wire import CHUNK_EXTRA_BYTES, MAX_CHUNK_BYTES, Digest, Message


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
