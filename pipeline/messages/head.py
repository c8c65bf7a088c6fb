"""Wire types of heads and windows."""

from typing import Annotated, Literal

from pydantic import Field

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
