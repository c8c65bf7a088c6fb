"""The messages that a learner's ranks exchange over its gloo group when they meet. They are never pickles.

torch's own object collectives unpickle whatever arrives. Here every message has bounds (`Message`) and is preceded by
its size. All ranks read the same bytes, so either all accept a message or all refuse it.
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
    """The arguments that a rank's learner was given."""

    max_parts: ClassVar[int] = 202

    format: Literal[1] = 1
    arguments: Annotated[tuple[tuple[Text, Annotated[str, Field(max_length=2**14)]], ...], Field(max_length=100)]
    """(name, value as text) of each argument."""


class Ready(Message):
    """A rank's answer whether it can join."""

    max_bytes: ClassVar[int] = 2**17

    format: Literal[1] = 1
    refused: Annotated[str, Field(max_length=MAX_REFUSED)]
    """The reason why the rank cannot join; empty if it can."""


class Agreed(Message):
    """A rank's proposal. All ranks take rank 0's values."""

    max_bytes: ClassVar[int] = Spec.max_bytes + 2**10
    max_parts: ClassVar[int] = Spec.max_parts + 1
    max_items: ClassVar[int] = MAX_TENSORS

    format: Literal[1] = 1
    spec: Spec
    learner: PartyId
    incarnation: Nonce
    token: Annotated[bytes, Field(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
    """The secret by which the ranks authenticate their connections."""


class Rows(Message):
    """The elements that a rank holds."""

    max_bytes: ClassVar[int] = 64 * 2**20
    max_parts: ClassVar[int] = MAX_TENSORS + 2
    max_items: ClassVar[int] = MAX_TENSORS

    format: Literal[1] = 1
    machine: Text
    held: Annotated[tuple[tuple[Text, Element, Element], ...], Field(max_length=MAX_TENSORS, fail_fast=True)]
    """(name of a tensor, start, stop): the rank holds its elements [start, stop)."""


class Place(Message):
    """The address at which a rank's exchange thread accepts connections."""

    format: Literal[1] = 1
    host: Text
    port: Annotated[int, Field(ge=1, lt=2**16)]


M = TypeVar("M", bound=Message)


def said_by_all(group: Any, own: M) -> list[M]:
    """Return what each rank says, in rank order, including this one.

    Raises:
        UsageError: a rank's message cannot be read; all ranks raise this.
        RuntimeError: raised by torch if a rank is gone.
    """
    return [said_by(group, rank, own) for rank in range(distributed.get_world_size(group))]


def said_by(group: Any, rank: int, own: M) -> M:
    """Return what one rank of a group says. All ranks call this, each with its own message.

    Raises:
        UsageError, RuntimeError: for the reasons that `said_by_all` gives.
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
        raise UsageError(f"rank {rank} of this learner has sent a message that cannot be read: {error}") from error
