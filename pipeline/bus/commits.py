"""What a fragment's owner writes: staged payloads, and what each atomic step changes. Pure."""

from collections import Counter
from dataclasses import dataclass

from diloco.pipeline.messages.head import Head, MergedBase, WindowView
from diloco.pipeline.messages.payload import Update
from diloco.pipeline.messages.tape import Committed, RefusalReason, Rejected

STAGED_TTL_S = 120.0
"""A payload staged for a commit that never came is gone after this."""
REPLACED_TTL_S = 120.0
"""What a head names no more lives on for so long, for those who are reading it."""
MOST_HEADERS = 64
"""Headers of one learner that may wait on a fragment: an honest one has a few, also while there is no syncer."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A payload uploaded under a fresh key, expiring until a commit makes it stay."""

    key: str
    chunks: int


@dataclass(frozen=True, slots=True)
class Rest(Staged):
    """What a staged global lacks of the exact values."""

    shown: bytes
    """Digest of the global payload beside it."""


@dataclass(frozen=True, slots=True)
class Published:
    """The payloads of a version, which its head names."""

    payload: Staged
    rest: Rest | None = None
    """None: the payload has the exact values."""
    momentum: Staged | None = None
    """None: all zeros."""
    updates: tuple[Update, ...] = ()
    behind: int = 0
    """As `Head`."""

    @property
    def payloads(self) -> tuple[Staged, ...]:
        """All of them."""
        there = tuple(one for one in (self.payload, self.rest, self.momentum) if one is not None)
        led = ((key, update.chunks) for update in self.updates for key in update.payloads)
        return (*there, *(Staged(*one) for one in led))

    @property
    def keys(self) -> frozenset[str]:
        """Of all of them."""
        return frozenset(one.key for one in self.payloads)


@dataclass(frozen=True, slots=True)
class Commit:
    """Everything one merge changes, in one atomic step.

    Checked before the first write: the lease nonce, the head (`expected`, None for a fragment without a
    head), and the lengths of the staged payloads.
    """

    nonce: str
    expected: tuple[int, bytes] | None
    """(version, digest) the head must have; None: there must be no head."""
    version: int
    """expected version + 1; for a first commit 0, or a checkpoint's version."""
    digest: bytes
    """Of the exact values."""
    published: Published
    """What the head before named may be named again: it stays."""
    window: WindowView
    merged: tuple[MergedBase, ...]
    record: Committed
    entries: tuple[str, ...] = ()
    """Header entries that go with it."""
    delta_payloads: tuple[str, ...] = ()
    """Payload keys that go with it."""
    merged_tokens: int = 0
    """Added to the head's total, as `merged_deltas` grows by the number of contributions."""
    replaced_ttl_s: float = REPLACED_TTL_S
    """How long the global payload, rest and updates live on that the head names no more."""
    retired: tuple[str, ...] = ()
    """Older replaced payloads that must go now (byte cap)."""
    interval: int = 0
    norms: tuple[float, ...] = ()
    """Both as `Head`."""
    lost: Head | None = None
    """The head of this version that the bus has lost (`expected` is None): what it counted goes on."""


@dataclass(frozen=True, slots=True)
class Republication:
    """The values of a head's version in payloads of their own, in the place of what it names.

    Checked before the first write: the lease nonce, the head, and the lengths of the staged payloads.
    """

    nonce: str
    expected: tuple[int, bytes]
    """(version, digest) the head must have, and keeps."""
    published: Published
    replaced_ttl_s: float = REPLACED_TTL_S


@dataclass(frozen=True, slots=True)
class Refusal:
    """Deltas refused in one atomic step: headers and payloads go, records go on the tape."""

    nonce: str
    expected: tuple[int, bytes]
    """(version, digest) the head must have: who judged by an older one must look again."""
    entries: tuple[str, ...]
    delta_payloads: tuple[str, ...]
    """Not those that another, accepted header still needs."""
    records: tuple[Rejected, ...]
    lost_tokens: int = 0
    untold: tuple[RefusalReason, ...] = ()
    """Reasons of refused entries that the tape does not tell of."""
    cut: str = ""
    """A learner of whose headers all but the last `MOST_HEADERS` are refused, whatever they are: by the one reason that
    is given, for each of them. Where there are no more, nothing is done."""

    def counts(self) -> dict[str, int]:
        """How many were refused for which reason."""
        return dict(Counter(reason.value for reason in (*(r.reason for r in self.records), *self.untold)))
