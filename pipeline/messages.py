"""Wire types. Frozen; every bound that a peer's bytes must keep stands here, as a field constraint.

A message is msgpack of its field dict; `codec.encode` / `codec.decode` are the only way in and out.
Units are in the names. Digests are xxh3-128 (16 bytes): integrity, no defence against forgery.
"""

from enum import StrEnum
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from .payload_messages import Update
from .spec_messages import Spec as Spec
from .spec_messages import SyncSpec as SyncSpec
from .spec_messages import TensorSpec as TensorSpec
from .wire import (
    MAX_CHUNKS,
    MAX_FRAGMENTS,
    MAX_LEARNERS,
    MAX_UPDATES,
    Codec,
    Count,
    Digest,
    FragmentId,
    Message,
    Nonce,
    PartyId,
    Samples,
    Seconds,
    SignedCount,
    Text,
    UnixSeconds,
    Version,
)

# --- deltas --------------------------------------------------------------------------------------


class DeltaHeader(Message):
    """Announces a delta: who, measured from what, how much training it carries. Chunks follow separately."""

    max_bytes: ClassVar[int] = 4096
    max_parts: ClassVar[int] = 1
    max_items: ClassVar[int] = 0

    format: Literal[1] = 1
    learner: PartyId
    incarnation: Nonce
    fragment: FragmentId
    base_version: Version
    base_digest: Digest
    attempt: Annotated[int, Field(ge=0, le=10**6)]
    serial: Annotated[int, Field(ge=0, le=2**53)]
    """Counts this incarnation's deltas and names the payload. (base, attempt) does not: after the bus came back at
    an earlier state, a learner may train on the same base once more."""
    steps: SignedCount
    """Inner steps since the base was adopted; the window refuses what is not positive."""
    tokens: SignedCount
    """Tokens since the base was adopted."""
    due: bool
    """True if the sync interval was over (may open a window); False if it follows an open window."""
    codec: Codec
    chunks: Annotated[int, Field(ge=1, le=MAX_CHUNKS)]
    layout: Digest
    step_s: Seconds
    """The learner's smoothed compute step time, for the grace window."""


# --- heads and windows ---------------------------------------------------------------------------


class WindowView(Message):
    """A window's state as its owner last published it, for learners and for people."""

    state: Literal["idle", "collecting", "grace", "uploading", "merging"]
    attempt: Annotated[int, Field(ge=0, le=10**6)]
    members: Annotated[tuple[PartyId, ...], Field(max_length=MAX_LEARNERS, fail_fast=True)]
    """Learners whose delta is in this window."""
    expected: Annotated[int, Field(ge=0)]
    """How many learners the window could hope for."""
    reason: Text
    deadline_unix_s: UnixSeconds | None
    doubted: Annotated[tuple[PartyId, ...], Field(max_length=MAX_LEARNERS, fail_fast=True)] = ()
    """Learners that are not waited for: their last deltas were refused for what was in them, or did not come."""
    merge_s: Seconds = 0.0
    """The shorter of the owner's last two merges of the fragment, so that one hold-up is no sign; 0: it made no two."""


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
    the key frame's (`globals`)."""
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
    refused: dict[str, Count] = Field(default_factory=dict, max_length=64)
    """Deltas refused since the fragment's first version on this bus, by `RefusalReason`."""

    @model_validator(mode="after")
    def _key_frame_can_be_followed(self) -> Self:
        if self.behind > len(self.updates):
            raise ValueError(f"the key frame is {self.behind} updates behind, and {len(self.updates)} are there")
        return self


class InitialUpload(Message):
    """A complete upload of version 0 by the learner that held the claim `nonce`."""

    learner: PartyId
    nonce: Nonce
    chunks: Annotated[tuple[int, ...], Field(min_length=1, max_length=MAX_FRAGMENTS, fail_fast=True)]
    """Chunk count of each fragment's payload."""


# --- learners, evaluations, events ---------------------------------------------------------------


class LearnerReport(Message):
    """A learner's last word about itself; one per incarnation, kept for the run."""

    learner: PartyId
    incarnation: Nonce
    step: Count
    tokens: Count
    """Tokens trained by this incarnation."""
    overwritten: Count
    """Token-elements (tokens x elements of the fragment, summed) trained past a snapshot and replaced."""
    published: Count
    """Token-elements in deltas of this incarnation; of several on one base, the most."""
    versions: Annotated[
        tuple[Annotated[int, Field(ge=-1, le=2**48)], ...], Field(max_length=MAX_FRAGMENTS, fail_fast=True)
    ]
    """Adopted version of each fragment; -1 before the first."""
    loss: float | None
    tokens_per_s: Seconds
    step_s: Seconds
    """Smoothed compute step time."""
    step_s_median: Seconds
    blocked_s: Seconds
    """Time the training thread has spent inside `Learner.step`. What other threads of the learner take from it, by the
    interpreter's lock and on its core, is not in here: `diloco bench cost` measures that too."""
    wall_s: Seconds
    """Time since the first step."""
    left: bool
    """True in the last report of a clean leave."""
    host: Text
    device: Text
    number: Count = 0
    """Counts this incarnation's reports, so that an older one never replaces a newer."""
    outages: Count = 0
    """Calls to the bus that failed: it may have lost what it had acknowledged."""
    threads: tuple[Count, Count] = (0, 0)
    """Torch threads that train on the CPU, and cores that they may use; zeros where another device trains."""
    generation: Count = 0
    """How many have had this learner's id, this incarnation included, at least: the greatest one holds it."""


class SeenReport(Message):
    """A report with its age by the server's clock."""

    report: LearnerReport
    age_s: Seconds


class Evaluation(Message):
    """Held-out loss of the global parameters (not of one learner's)."""

    loss: float
    """Nats per token."""
    tokens: Count
    """Trained tokens of the run when the heads were read."""
    versions: Annotated[tuple[int, ...], Field(max_length=MAX_FRAGMENTS, fail_fast=True)]
    unix_s: UnixSeconds
    elapsed_s: Seconds
    """Since the run's first step."""
    final: bool


class Event(Message):
    """Something that happened to a party: `learner_joined`, `learner_left`, `learner_killed` ..."""

    name: Annotated[str, Field(pattern=r"^[a-z_]{1,64}$")]
    who: Text
    detail: Text
    unix_s: UnixSeconds


class Phase(StrEnum):
    """A run only moves forward through these."""

    RUNNING = "running"
    DRAINING = "draining"
    """Learners publish their last deltas, which are merged."""
    CLOSING = "closing"
    """No merge begins any more: the syncers give their fragments back, and one of them ends the run."""
    FINISHED = "finished"

    @property
    def rank(self) -> int:
        """Order: a state of lower rank never replaces one of higher rank."""
        return list(Phase).index(self)


class RunState(Message):
    """Where the run stands; written by the lead syncer (owner of fragment 0), or to ask for a drain."""

    phase: Annotated[Phase, Field(strict=False)]
    tokens: Count
    """Trained tokens of all learners, earlier parts of a resumed run included."""
    base_tokens: Count
    """Of those, tokens trained before this run was resumed."""
    base_merged: Count | None = None
    """Of these, tokens merged; None: not known, or nothing was resumed."""
    budget_tokens: Count
    started_unix_s: UnixSeconds
    reason: Text
    manifest: Annotated[tuple[tuple[int, bytes], ...], Field(max_length=MAX_FRAGMENTS, fail_fast=True)]
    """Once finished: (version, digest) of every fragment."""
    samples: Samples = ()


# --- the event tape ------------------------------------------------------------------------------


class RefusalReason(StrEnum):
    """Why a delta was refused (typed, so that it can be counted)."""

    WRONG_LAYOUT = "wrong_layout"
    NON_FINITE = "non_finite"
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
    norm: Seconds
    """L2 norm of the whole delta."""


class Committed(Message):
    """A merge, in the order in which its contributions were summed: enough to replay it."""

    kind: Literal["committed"] = "committed"
    fragment: FragmentId
    version: Version
    digest: Digest
    base_digest: Digest | None
    contributions: Annotated[tuple[Contribution, ...], Field(max_length=MAX_LEARNERS, fail_fast=True)]
    reason: Text
    norm: Seconds
    """L2 norm of the merged pseudogradient."""
    quorum_s: Seconds
    grace_s: Seconds
    upload_s: Seconds
    merge_s: Seconds
    syncer: PartyId
    unix_s: UnixSeconds

    @classmethod
    def installed(
        cls, fragment: int, version: int, digest: bytes, *, reason: str, syncer: str, unix_s: float
    ) -> "Committed":
        """A version that no merge made: initial parameters, or a checkpoint's."""
        return cls(
            fragment=fragment,
            version=version,
            digest=digest,
            base_digest=None,
            contributions=(),
            reason=reason,
            norm=0.0,
            quorum_s=0.0,
            grace_s=0.0,
            upload_s=0.0,
            merge_s=0.0,
            syncer=syncer,
            unix_s=unix_s,
        )


class Rejected(Message):
    """A delta that was refused, once and for all."""

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
    """Tokens of the fragment lost by it (0 where another delta of the same training was merged)."""
    reason: Annotated[RefusalReason, Field(strict=False)]
    detail: Text
    unix_s: UnixSeconds
    last_told: bool = False
    """Further ones of this learner may be in the head's sum alone: the tape tells no more of them in this window."""

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
        """The record of a refused delta; no header: its bytes did not decode. head: (fragment, version)."""
        return cls(
            fragment=head[0],
            version=head[1],
            learner=header.learner if header else "",
            incarnation=header.incarnation if header else "",
            base_version=header.base_version if header else 0,
            attempt=header.attempt if header else 0,
            steps=header.steps if header else 0,
            tokens=header.tokens if header else 0,
            lost_tokens=lost_tokens,
            reason=reason,
            detail=detail[:500],
            unix_s=unix_s,
        )


class WindowChanged(Message):
    """A window opened, or opened again with the next attempt: wakes the learners that may follow."""

    kind: Literal["window"] = "window"
    fragment: FragmentId
    version: Version
    attempt: Count
    reason: Text
    unix_s: UnixSeconds


class Rewound(Message):
    """The bus came back at an earlier state than its owner had seen, or without the head, which was put back."""

    kind: Literal["rewound"] = "rewound"
    fragment: FragmentId
    version: Version
    was_version: Version
    unix_s: UnixSeconds


TapeRecord = Annotated[Committed | Rejected | WindowChanged | Rewound, Field(discriminator="kind")]
