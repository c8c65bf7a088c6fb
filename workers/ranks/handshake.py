"""What the ranks of a learner tell each other as they meet, over its gloo group: messages, never pickles.

torch's own way to send objects unpickles what arrives. Here a message has bounds (`Message`), its size comes first,
and all ranks read the same bytes: they take them, or all of them refuse.
"""

from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from pydantic import Field
from torch import distributed

from diloco.pipeline.errors import BadMessage, UsageError
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.messages.wire import MAX_TENSORS, Message, Nonce, PartyId, Text
from diloco.pipeline.payload import codec
from diloco.workers.ranks.lines import TOKEN_BYTES

MAX_REFUSED = 2**14
Element = Annotated[int, Field(ge=0, le=2**62)]


class Asked(Message):
    """What a rank's learner was given."""

    max_parts: ClassVar[int] = 202

    format: Literal[1] = 1
    arguments: Annotated[tuple[tuple[Text, Annotated[str, Field(max_length=2**14)]], ...], Field(max_length=100)]
    """By name."""


class Ready(Message):
    """Whether a rank can join."""

    max_bytes: ClassVar[int] = 2**17

    format: Literal[1] = 1
    refused: Annotated[str, Field(max_length=MAX_REFUSED)]
    """Why not; empty: it can."""


class Agreed(Message):
    """What a rank would have. All others take rank 0's."""

    max_bytes: ClassVar[int] = Spec.max_bytes + 2**10
    max_parts: ClassVar[int] = Spec.max_parts + 1
    max_items: ClassVar[int] = MAX_TENSORS

    format: Literal[1] = 1
    spec: Spec
    learner: PartyId
    incarnation: Nonce
    token: Annotated[bytes, Field(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    """Of their connections."""


class Rows(Message):
    """What a rank holds."""

    max_bytes: ClassVar[int] = 64 * 2**20
    max_parts: ClassVar[int] = MAX_TENSORS + 2
    max_items: ClassVar[int] = MAX_TENSORS

    format: Literal[1] = 1
    machine: Text
    held: Annotated[tuple[tuple[Text, Element, Element], ...], Field(max_length=MAX_TENSORS, fail_fast=True)]
    """Name of each tensor, and its elements [start, stop) there."""


class Place(Message):
    """Where a rank's exchange thread can be called."""

    format: Literal[1] = 1
    host: Text
    port: Annotated[int, Field(ge=1, lt=2**16)]


M = TypeVar("M", bound=Message)


def said_by_all(group: Any, own: M) -> list[M]:
    """What each rank says, this one's own among them.

    Raises:
        UsageError: one says what cannot be read; all ranks raise it.
        RuntimeError: torch's, where a rank is gone.
    """
    return [said_by(group, rank, own) for rank in range(distributed.get_world_size(group))]


def said_by(group: Any, rank: int, own: M) -> M:
    """What one rank of a group says; all of them call this, with what they would say.

    Raises:
        UsageError, RuntimeError: as `said_by_all`.
    """
    source, kind = distributed.get_global_rank(group, rank), type(own)
    data = torch.frombuffer(bytearray(codec.encode(own)), dtype=torch.uint8)
    size = torch.tensor([len(data)], device="cpu")
    distributed.broadcast(size, source, group)
    if not 0 < (nbytes := int(size)) <= kind.max_bytes:
        raise UsageError(f"rank {rank} of this learner says {nbytes} bytes, where {kind.max_bytes} is the limit")
    if distributed.get_rank(group) != rank:
        data = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    distributed.broadcast(data, source, group)
    try:
        return codec.decode(kind, np.asarray(data).tobytes())
    except BadMessage as error:
        raise UsageError(f"rank {rank} of this learner says what this one cannot read: {error}") from error
