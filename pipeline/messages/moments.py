"""Wire types of an inner optimizer's moments, which a joining learner may copy from a peer."""

from typing import Annotated, ClassVar

from pydantic import Field, FiniteFloat

from diloco.pipeline.messages.wire import MAX_TENSORS, Count, Digest, Message, Nonce, PartyId, Text, UnixSeconds

StateName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,64}$")]
MAX_STATE_NAMES = 16
# Learners do not ask for more than this: the transfer would take longer than anybody waits, and would fill the bus.
MAX_OFFERED_BYTES = 10**9


class OptimizerKind(Message):
    """The state that an inner optimizer keeps for each parameter. Moments can be shared only between equal kinds."""

    optimizer: Text
    """Class name of the optimizer."""
    moments: Annotated[tuple[StateName, ...], Field(max_length=MAX_STATE_NAMES, fail_fast=True)]
    """Names of the tensors shaped like the parameter, sorted."""
    numbers: Annotated[tuple[StateName, ...], Field(max_length=MAX_STATE_NAMES, fail_fast=True)]
    """Names of single numbers (Adam's `step`), sorted."""


class MomentsWish(Message):
    """A learner's request for a peer's moments."""

    max_bytes: ClassVar[int] = 2**14

    learner: PartyId
    kind: OptimizerKind
    """The only kind that the learner can use."""


class MomentsOffer(Message):
    """A complete upload of one learner's moments for joining learners: float32, one payload per fragment and moment."""

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
    """One value per tensor for each name in `kind.numbers`, in the spec's order."""
    steps: Count
    """Inner steps of the donor's incarnation."""
    began_unix_s: UnixSeconds
    """When the donor's run began. Another run of the same name has other parameters and cannot use these moments."""
