"""Wire types of deltas."""

from typing import Annotated, ClassVar

from pydantic import Field

from diloco.pipeline.messages.wire import (
    MAX_CHUNKS,
    Codec,
    Count,
    Digest,
    FragmentId,
    Message,
    Nonce,
    PartyId,
    SignedCount,
    StepSeconds,
    Version,
)


class DeltaHeader(Message):
    """Announcement of a delta: its learner, its base, and how much training it carries. Chunks follow separately."""

    max_bytes: ClassVar[int] = 4096
    max_parts: ClassVar[int] = 1
    max_items: ClassVar[int] = 0

    learner: PartyId
    incarnation: Nonce
    fragment: FragmentId
    base_version: Version
    base_digest: Digest
    attempt: Count
    serial: Annotated[int, Field(ge=0, le=2**53)]
    """Number of the delta within this incarnation; it names the payload. (base, attempt) is not unique: after the bus
    came back at an earlier state, a learner may train on the same base once more."""
    steps: SignedCount
    """Inner steps since the base was adopted; the window refuses a delta whose steps are not positive."""
    tokens: SignedCount
    """Tokens since the base was adopted."""
    due: bool
    """True if the sync interval was over (the delta may open a window); False if it joins an open window."""
    codec: Codec
    chunks: Annotated[int, Field(ge=1, le=MAX_CHUNKS)]
    layout: Digest
    step_s: StepSeconds
    """The learner's smoothed compute step time, for the grace window."""
    pull_s: StepSeconds
    """The learner's smoothed time of a pull, `LearnerReport.pull_s`; also for the grace window."""
