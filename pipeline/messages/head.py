"""Wire types of heads and windows."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from diloco.pipeline.messages.payload import Update
from diloco.pipeline.messages.wire import (
    MAX_LEARNERS,
    MAX_UPDATES,
    MOST_STEPS,
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
    """A window's state as its owner last published it, for learners and for people."""

    state: Literal["idle", "collecting", "grace", "uploading", "merging"]
    attempt: Count
    members: Annotated[tuple[PartyId, ...], Field(max_length=MAX_LEARNERS, fail_fast=True)]
    """Learners whose delta is in this window."""
    expected: Annotated[int, Field(ge=0)]
    """How many learners the window could hope for."""
    reason: Text
    deadline_unix_s: UnixSeconds | None
    doubted: Annotated[tuple[PartyId, ...], Field(max_length=MAX_LEARNERS, fail_fast=True)] = ()
    """Learners that are not waited for: their last deltas were refused for what was in them, late, or missing."""
    merge_s: Seconds = 0.0
    """The shorter of the owner's last two merges of the fragment, so that one hold-up is no sign; 0: it made no two."""
    outer_s: Seconds = 0.0
    """The same of sum and outer step alone; before it made two, what its matrices should take (`outer_cost`)."""


MERGES_KEPT = 32
"""Merges by whose norms an owner judges how long a delta may be."""
Norms = Annotated[tuple[Measure, ...], Field(max_length=MERGES_KEPT, fail_fast=True)]


class MergedBase(Message):
    """The last delta of one learner that went into a fragment."""

    learner: PartyId
    incarnation: Nonce
    base_version: Version
    tokens: Count


class Head(Message):
    """The present truth about a fragment."""

    fragment: FragmentId
    version: Version
    digest: Digest
    """Of the exact values, float32: by it bases are named."""
    payload: Text
    """Key of the global payload, in the run's `global_codec`: what learners pull. With int8: of the key frame."""
    chunks: Annotated[int, Field(ge=1)]
    momentum: Text
    """Key of the outer momentum payload, or "" for all zeros: of this version, or where it follows from the updates of
    the key frame's (`global_int8`)."""
    previous_digest: Digest | None
    """Digest of version - 1: the base on which a stale delta is still on record."""
    window: WindowView
    merged: Annotated[tuple[MergedBase, ...], Field(max_length=MAX_LEARNERS, fail_fast=True)]
    merged_deltas: Count
    merged_tokens: Count
    rejected_tokens: Count
    rest: Text = ""
    payload_digest: Digest | None = None
    """Key of what the global payload lacks of the exact values, and its digest; "" and None: it is exact."""
    updates: Annotated[tuple[Update, ...], Field(max_length=MAX_UPDATES, fail_fast=True)] = ()
    """Those that led here, oldest first, the last one to this version."""
    behind: Annotated[int, Field(ge=0, le=MAX_UPDATES)] = 0
    """How many of the last of them the key frame lacks."""
    interval: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 0
    """Inner steps between two syncs, for who trains on this version; 0: `ramps.interval_at` of it."""
    refused: dict[str, Count] = Field(default_factory=dict, max_length=64)
    """Deltas refused since the fragment's first version on this bus, by `RefusalReason`."""
    norms: Norms = ()
    """Median norm of the contributions of each of the last merges, oldest first: whoever takes the fragment over, or
    resumes it, judges deltas by what was merged before."""

    @model_validator(mode="after")
    def _key_frame_can_be_followed(self) -> Self:
        if self.behind > len(self.updates):
            raise ValueError(f"the key frame is {self.behind} updates behind, and {len(self.updates)} are there")
        return self
