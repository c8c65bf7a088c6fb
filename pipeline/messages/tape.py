"""Wire types of the event tape: what was merged, what was refused and why."""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from diloco.pipeline.messages.delta import DeltaHeader
from diloco.pipeline.messages.wire import (
    MAX_LEARNERS,
    MAX_STEPS,
    Count,
    Digest,
    FragmentId,
    Measure,
    Message,
    Nonce,
    PartyId,
    Seconds,
    Text,
    UnixSeconds,
    Version,
)


class RefusalReason(StrEnum):
    """Reason why a delta was refused (an enum, so that refusals can be counted)."""

    WRONG_LAYOUT = "wrong_layout"
    NON_FINITE = "non_finite"
    MERGE_NOT_FINITE = "merge_not_finite"
    ABSURD_NORM = "absurd_norm"
    NOT_POSITIVE = "not_positive"
    UNKNOWN_BASE = "unknown_base"
    TOO_STALE = "too_stale"
    BAD_PAYLOAD = "bad_payload"
    UPLOAD_TIMEOUT = "upload_timeout"
    ALREADY_MERGED = "already_merged"
    DUPLICATE = "duplicate"
    BAD_MESSAGE = "bad_message"
    FLOOD = "flood"
    RUN_FINISHED = "run_finished"


class Contribution(Message):
    """One learner's part of a merge."""

    learner: PartyId
    incarnation: Nonce
    base_version: Version
    attempt: Count
    steps: Count
    tokens: Count
    weight: Annotated[float, Field(ge=0, le=1)]
    norm: Measure
    """L2 norm of the whole delta as it was sent, before any rebase or scaling."""
    rebased: bool = False
    """True if the delta was stale and was rebased: measured from the version into which it was merged."""
    factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor that scaled the delta; below 1 if it was much longer than the window's others (`SyncSpec.delta_clip`)."""
    cosine: Annotated[float, Field(ge=-1, le=1)] | None = None
    """Cosine with the window's other deltas (`syncer.merging.fragment.cosines`); None if there were none."""


class Committed(Message):
    """A merge, with its contributions in the order in which they were summed: enough to replay it.

    The defaults are those of a version without a merge: initial parameters, a checkpoint, or a restored head.
    """

    kind: Literal["committed"] = "committed"
    fragment: FragmentId
    version: Version
    digest: Digest
    base_digest: Digest | None = None
    contributions: Annotated[tuple[Contribution, ...], Field(max_length=MAX_LEARNERS, fail_fast=True)] = ()
    reason: Text
    norm: Measure = 0.0
    """L2 norm of the merged pseudogradient."""
    quorum_s: Seconds = 0.0
    grace_s: Seconds = 0.0
    upload_s: Seconds = 0.0
    merge_s: Seconds = 0.0
    syncer: PartyId
    unix_s: UnixSeconds
    interval: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    """Sync interval in the head of the base version."""
    began_unix_s: UnixSeconds | None = None
    """For initial parameters and checkpoints only: when their run began, which distinguishes runs of the same name."""


class Rejected(Message):
    """The final refusal of a delta; the fields of its header have defaults, because its bytes may not decode."""

    kind: Literal["rejected"] = "rejected"
    fragment: FragmentId
    version: Version
    learner: Text = ""
    incarnation: Text = ""
    base_version: Count = 0
    attempt: Count = 0
    steps: int = 0
    tokens: int = 0
    lost_tokens: Count
    """Tokens of the fragment that the refusal loses (0 if another delta of the same training was merged)."""
    reason: Annotated[RefusalReason, Field(strict=False)]
    detail: Text
    unix_s: UnixSeconds
    last_told: bool = False
    """True if this is the learner's last refusal on the tape in this window; the head's totals count further ones."""

    @classmethod
    def of(cls, header: DeltaHeader | None, head: tuple[int, int], *, detail: str, **told: Any) -> "Rejected":
        """Return the record of a refused delta at `head` (fragment, version); `detail` is cut to 500 characters."""
        names = ("learner", "incarnation", "base_version", "attempt", "steps", "tokens")
        sent = {name: getattr(header, name) for name in names if header}
        return cls(fragment=head[0], version=head[1], **sent, **told, detail=detail[:500])


class WindowChanged(Message):
    """A window opened, or opened again with the next attempt. The record wakes the learners that may join it."""

    kind: Literal["window"] = "window"
    fragment: FragmentId
    version: Version
    attempt: Count
    reason: Text
    unix_s: UnixSeconds


class Rewound(Message):
    """The bus came back with an earlier head than the owner had seen, or without one, and the owner restored it."""

    kind: Literal["rewound"] = "rewound"
    fragment: FragmentId
    version: Version
    was_version: Version
    unix_s: UnixSeconds


TapeRecord = Annotated[Committed | Rejected | WindowChanged | Rewound, Field(discriminator="kind")]
