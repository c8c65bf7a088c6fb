"""Wire types of an inner optimizer's moments, which a learner that joins may have from a peer."""

from typing import Annotated, ClassVar

from pydantic import Field, FiniteFloat

from diloco.pipeline.messages.wire import MAX_TENSORS, Count, Digest, Message, Nonce, PartyId, Text, UnixSeconds

StateName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,64}$")]
MAX_STATE_NAMES = 16
MOST_OFFERED_BYTES = 10**9
"""Moments of more are nobody's to ask for: they would be on the way for longer than anybody waits, and fill the bus."""


class OptimizerKind(Message):
    """What an inner optimizer keeps for each parameter it trains. Only equals can use each other's moments."""

    optimizer: Text
    """Its class."""
    moments: Annotated[tuple[StateName, ...], Field(max_length=MAX_STATE_NAMES, fail_fast=True)]
    """Names of the tensors shaped like the parameter, sorted."""
    numbers: Annotated[tuple[StateName, ...], Field(max_length=MAX_STATE_NAMES, fail_fast=True)]
    """Names of single numbers (Adam's `step`), sorted."""


class MomentsWish(Message):
    """A learner asks for a peer's moments."""

    max_bytes: ClassVar[int] = 2**14

    learner: PartyId
    kind: OptimizerKind
    """Others are of no use to it."""


class MomentsOffer(Message):
    """A complete upload of one learner's moments, for those that join. Float32, one payload a fragment and moment."""

    max_bytes: ClassVar[int] = 16 * 2**20
    max_parts: ClassVar[int] = 2 * MAX_STATE_NAMES
    max_items: ClassVar[int] = MAX_TENSORS

    learner: PartyId
    nonce: Nonce
    layout: Digest
    kind: OptimizerKind
    numbers: Annotated[
        tuple[Annotated[tuple[FiniteFloat, ...], Field(max_length=MAX_TENSORS, fail_fast=True)], ...],
        Field(max_length=MAX_STATE_NAMES, fail_fast=True),
    ]
    """For each name in `kind.numbers`, one value a tensor, in the spec's order."""
    steps: Count
    """Inner steps of the donor's incarnation."""
    began_unix_s: UnixSeconds
    """When the donor's run began. Others of the same name have other parameters, and no use for its moments."""
