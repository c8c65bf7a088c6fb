"""The writes of a fragment's owner: staged payloads, and the contents of each atomic step. Pure."""

from collections import Counter
from dataclasses import dataclass

from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.messages.fragment import Committed, Head, MergedBase, RefusalReason, Rejected, WindowView

# Limit on one learner's pending headers of a fragment: an honest learner has a few, even while there is no syncer.
MAX_HEADERS = 64


@dataclass(frozen=True, slots=True)
class Staged:
    """A payload uploaded under a fresh key; it expires unless a commit makes it permanent."""

    key: str
    chunks: int


@dataclass(frozen=True, slots=True)
class Remainder(Staged):
    """The staged payload that holds what a global payload lacks of the exact values."""

    shown: bytes
    """Digest of the global payload that it completes."""


@dataclass(frozen=True, slots=True)
class Published:
    """The payloads of a version, which its head names."""

    payload: Staged
    rest: Remainder | None = None
    """None: the payload has the exact values."""
    momentum: Staged | None = None
    """None: all zeros."""

    @property
    def payloads(self) -> tuple[Staged, ...]:
        """All payloads that there are."""
        return tuple(one for one in (self.payload, self.rest, self.momentum) if one is not None)

    @property
    def keys(self) -> frozenset[str]:
        """Keys of all payloads."""
        return frozenset(one.key for one in self.payloads)


@dataclass(frozen=True, slots=True)
class Commit:
    """All changes of one merge, applied in one atomic step.

    The lease nonce, the head (`expected`) and the lengths of the staged payloads are checked before the first write.
    """

    nonce: str
    expected: tuple[int, bytes] | None
    """(version, digest) the head must have; None: there must be no head."""
    published: Published
    """Payloads of the new version."""
    window: WindowView
    merged: tuple[MergedBase, ...]
    record: Committed
    """Its version, the new one, is the expected one + 1, or any without an expected head."""
    entries: tuple[str, ...] = ()
    """Names of the merged headers, which are deleted."""
    delta_payloads: tuple[str, ...] = ()
    """Keys of the merged deltas' payloads, which are deleted."""
    merged_tokens: int = 0
    """Added to the head's total; `merged_deltas` grows by the number of contributions."""
    replaced_ttl_s: float = BUS_TIMES.replaced_ttl_s
    """Lifetime of the replaced global and `rest` payloads."""
    retired: tuple[str, ...] = ()
    """Keys of earlier replaced payloads that are deleted now to keep within the byte cap."""
    interval: int = 0
    """See `Head.interval`."""
    norms: tuple[float, ...] = ()
    """See `Head.norms`."""
    lost: Head | None = None
    """The head of this version that the bus has lost (then `expected` is None): its totals are carried on."""


@dataclass(frozen=True, slots=True)
class Republication:
    """New payloads for the values of a head's version, which replace the payloads that the head names.

    The lease nonce, the head and the lengths of the staged payloads are checked before the first write.
    """

    nonce: str
    expected: tuple[int, bytes]
    """(version, digest) the head must have, and keeps."""
    published: Published
    replaced_ttl_s: float = BUS_TIMES.replaced_ttl_s


@dataclass(frozen=True, slots=True)
class Refusal:
    """Deltas refused in one atomic step: headers and payloads are deleted, records are appended to the tape."""

    nonce: str
    expected: tuple[int, bytes]
    """(version, digest) the head must have: a judgement based on an older head must be made again."""
    entries: tuple[str, ...]
    delta_payloads: tuple[str, ...]
    """Keys to delete, without those that another, accepted header still needs."""
    records: tuple[Rejected, ...]
    lost_tokens: int = 0
    untold: tuple[RefusalReason, ...] = ()
    """Reasons of refused entries that get no record on the tape."""
    cut: str = ""
    """Name of a flooding learner: all its headers but the last `MAX_HEADERS` are refused without being read, each for
    the one reason given. If it has no more than that, nothing is done."""

    def counts(self) -> dict[str, int]:
        """Return the number of refusals by reason."""
        return dict(Counter(reason.value for reason in (*(r.reason for r in self.records), *self.untold)))
