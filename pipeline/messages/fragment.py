"""Wire types of a fragment: headers of deltas, its head with its window, and its event tape."""

from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from diloco.pipeline.messages.wire import (
    MAX_CHUNKS,
    MAX_LEARNERS,
    MAX_STEPS,
    Codec,
    Count,
    Digest,
    FragmentId,
    Measure,
    Message,
    Nonce,
    PartyId,
    Seconds,
    SignedCount,
    StepSeconds,
    Text,
    UnixSeconds,
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


class WindowView(Message):
    """The state of a fragment's window as its owner last published it, for learners and for display."""

    state: Literal["idle", "collecting", "grace", "uploading", "merging"]
    attempt: Count
    members: Annotated[tuple[PartyId, ...], Field(max_length=MAX_LEARNERS, fail_fast=True)]
    """Learners whose delta is in this window."""
    expected: Annotated[int, Field(ge=0)]
    """Number of learners from which the window can expect a delta."""
    reason: Text
    deadline_unix_s: UnixSeconds | None
    suspected: Annotated[tuple[PartyId, ...], Field(max_length=MAX_LEARNERS, fail_fast=True)] = ()
    """Learners for which the window does not wait: their last deltas were late, missing, or refused for their
    content."""
    merge_s: Seconds = 0.0
    """The shorter duration of the owner's last two merges of the fragment, so that a single delay does not count; 0
    until it has made two."""
    outer_s: Seconds = 0.0
    """Like `merge_s`, but only sum and outer step; until the owner has made two, an estimate for the fragment's
    matrices (`outer_cost`)."""


IDLE_VIEW = WindowView(state="idle", attempt=0, members=(), expected=0, reason="", deadline_unix_s=None)

# An owner judges how long a delta may be by the norms of this many merges.
MERGES_KEPT = 32
Norms = Annotated[tuple[Measure, ...], Field(max_length=MERGES_KEPT, fail_fast=True)]


class MergedBase(Message):
    """The last delta of one learner that was merged into a fragment."""

    learner: PartyId
    incarnation: Nonce
    base_version: Version
    tokens: Count


class Head(Message):
    """The current state of a fragment: its version, where its values are, its window and its counters."""

    fragment: FragmentId
    version: Version
    digest: Digest
    """Digest of the exact float32 values; deltas name their base by it."""
    payload: Text
    """Key of the global payload, which learners pull, in the run's `global_codec`."""
    chunks: Annotated[int, Field(ge=1)]
    momentum: Text
    """Key of the outer momentum payload, or "" for all zeros."""
    previous_digest: Digest | None
    """Digest of version - 1, the base of a stale delta that may still be merged."""
    window: WindowView
    merged: Annotated[tuple[MergedBase, ...], Field(max_length=MAX_LEARNERS, fail_fast=True)]
    merged_deltas: Count
    merged_tokens: Count
    rejected_tokens: Count
    rest: Text = ""
    """Key of the payload that holds what the global payload lacks of the exact values; "" if the global is exact."""
    payload_digest: Digest | None = None
    """Digest of the global payload; None if the global is exact."""
    interval: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    """Inner steps between two syncs for learners that train on this version; 0: `ramps.interval_at` of it."""
    refused: dict[str, Count] = Field(default_factory=dict, max_length=64)
    """Deltas refused since the fragment's first version on this bus, by `RefusalReason`."""
    norms: Norms = ()
    """Median norm of the contributions of each of the last merges, oldest first. It is stored here so that a new or
    resumed owner can judge deltas by earlier merges."""


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


# A delta that is refused for one of these reasons may be sound, but came too late.
LATE = (RefusalReason.TOO_STALE, RefusalReason.UPLOAD_TIMEOUT, RefusalReason.RUN_FINISHED)


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
    """A merge, with its contributions in the order in which they were summed: enough to replay it."""

    kind: Literal["committed"] = "committed"
    fragment: FragmentId
    version: Version
    digest: Digest
    base_digest: Digest | None
    contributions: Annotated[tuple[Contribution, ...], Field(max_length=MAX_LEARNERS, fail_fast=True)]
    reason: Text
    norm: Measure
    """L2 norm of the merged pseudogradient."""
    quorum_s: Seconds
    grace_s: Seconds
    upload_s: Seconds
    merge_s: Seconds
    syncer: PartyId
    unix_s: UnixSeconds
    interval: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    """Sync interval in the head of the base version."""
    began_unix_s: UnixSeconds | None = None
    """For initial parameters and checkpoints only: when their run began, which distinguishes runs of the same name."""
    step_norm: Measure | None = None
    """L2 norm of the outer step: values of this version minus those of the version before; None without a merge."""
    rho: Annotated[float, Field(ge=-1, le=1)] | None = None
    """Cosine of the merged pseudogradient with that of the merge before, on a sample; None if this syncer did not make
    the merge before."""

    @property
    def outer_rate(self) -> float | None:
        """Effective outer learning rate, `step_norm` / `norm`; None without a merge, or if that is zero."""
        return self.step_norm / self.norm if self.norm and self.step_norm is not None else None


# Fields of the record of a version without a merge: initial parameters, a checkpoint, or a restored head.
NOTHING_MERGED: dict[str, Any] = {
    **{"base_digest": None, "contributions": (), "norm": 0.0},
    **{"quorum_s": 0.0, "grace_s": 0.0, "upload_s": 0.0, "merge_s": 0.0},
}

# Fields of the record of a refused delta whose header's bytes do not decode.
_UNREADABLE = {"learner": "", "incarnation": "", "base_version": 0, "attempt": 0, "steps": 0, "tokens": 0}


class Rejected(Message):
    """The final refusal of a delta."""

    kind: Literal["rejected"] = "rejected"
    fragment: FragmentId
    version: Version
    learner: Text
    incarnation: Text
    base_version: Count
    attempt: Count
    steps: int
    tokens: int
    lost_tokens: Count
    """Tokens of the fragment that the refusal loses (0 if another delta of the same training was merged)."""
    reason: Annotated[RefusalReason, Field(strict=False)]
    detail: Text
    unix_s: UnixSeconds
    last_told: bool = False
    """True if this is the learner's last refusal on the tape in this window; the head's totals count further ones."""

    @classmethod
    def of(
        cls,
        header: DeltaHeader | None,
        head: tuple[int, int],
        *,
        lost_tokens: int,
        reason: RefusalReason,
        detail: str,
        unix_s: float,
    ) -> "Rejected":
        """Return the record of a refused delta.

        Args:
            header: the delta's header; None if its bytes did not decode.
            head: (fragment, version).
            lost_tokens, reason, detail, unix_s: see the fields; the detail is cut to 500 characters.
        """
        sent: dict[str, Any] = {name: getattr(header, name) for name in _UNREADABLE} if header else _UNREADABLE
        return cls(
            fragment=head[0],
            version=head[1],
            **sent,
            lost_tokens=lost_tokens,
            reason=reason,
            detail=detail[:500],
            unix_s=unix_s,
        )


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
