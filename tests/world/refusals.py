"""Whether a delta was refused for a reason that held, by the oracle's own account.

A syncer judges a delta, and its refusal takes effect later: in between only the head cannot have moved, because the
bus compares it in the step that refuses. So versions and merged bases are judged as they stand, after a rewind too. A
delta that stood in the way of another one may be gone by then: refused after the decision, or lost with the bus
while its owner, which reads on where it was, still has it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass

import numpy as np

from diloco.pipeline.bus.commits import Refusal
from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.messages.fragment import DeltaHeader, RefusalReason, Rejected
from diloco_studies.virtual.memory_store import Stream
from diloco_studies.virtual.virtual_time import UNIX_START_S
from tests.world.link import Link
from tests.world.record import Seen
from tests.world.surviving import Float64, Surviving

SKEW_S = 0.5
"""How far a syncer's clock may be ahead or behind."""
DEADLINE_S = 1.0
"""No upload has less time."""
READ_S = 0.3
"""A payload that is whole is read and judged within this, while nothing holds its reader up."""
REMEMBERED = 32


@dataclass(frozen=True, slots=True)
class Gone:
    """A header that left its stream unmerged."""

    header: DeltaHeader
    at_s: float
    lost: bool
    """With the bus."""


class Refusals:
    """The judge of one run's refusals."""

    def __init__(
        self,
        store: Seen,
        keys: RunKeys,
        now: Callable[[], float],
        published: Callable[[DeltaHeader], Float64],
        fragments: int,
    ) -> None:
        self._store, self._keys, self._now, self._published = store, keys, now, published
        self._gone: list[deque[Gone]] = [deque(maxlen=REMEMBERED) for _ in range(fragments)]
        self._offered_s: dict[tuple[int, str], float] = {}
        self._written_s: dict[str, float] = {}
        """When something of a payload came last."""
        self._last_told: dict[tuple[int, str], int] = {}
        """(fragment, learner) -> the version at which the tape said that it lists no more of its refusals."""

    def copy(self) -> "Refusals":
        """Of a history that parts from this one."""
        twin = copy(self)
        twin._gone = [deque(gone, REMEMBERED) for gone in self._gone]
        twin._offered_s, twin._written_s = dict(self._offered_s), dict(self._written_s)
        twin._last_told = dict(self._last_told)
        return twin

    def offered(self, p: int, entry: str) -> None:
        """A header came."""
        self._offered_s[p, entry] = self._now()

    def written(self, key: str) -> None:
        """Something of a payload came."""
        self._written_s[key] = self._now()

    def lost(self, before: list[Surviving], after: list[Surviving]) -> None:
        """The bus came back as it was earlier."""
        for gone, old, new in zip(self._gone, before, after, strict=True):
            gone.extend(Gone(old.pending[e], self._now(), lost=True) for e in old.pending.keys() - new.pending.keys())

    def renewed(self, p: int, header: DeltaHeader) -> None:
        """Its learner took it off the stream."""
        self._gone[p].append(Gone(header, self._now(), lost=False))

    def refused(
        self, link: Link, p: int, state: Surviving, refusal: Refusal, reading_since_s: float, closing: bool
    ) -> Iterator[str]:
        """Take refused entries off their stream; yields what was wrong about it.

        Args:
            link: the syncer's.
            p: fragment.
            state: its history; changed.
            refusal: as it took effect.
            reading_since_s: when the owner last read the stream from its start.
            closing: the run is closing, or was.
        """
        for entry in refusal.entries if not refusal.records else ():  # nothing was lost by it, so it is not told
            if (header := state.pending.get(entry)) is None or self._renewed(p, state, entry):
                continue
            if self._last_told.get((p, header.learner)) != state.version:
                yield f"{header.learner}'s on {header.base_version} at {state.version}: untold, but nothing renews it"
        for entry, record in zip(refusal.entries, refusal.records, strict=bool(refusal.records)):
            header = state.pending.get(entry)
            if header is None:
                continue  # refused before; the bus did nothing
            if record.last_told:
                self._last_told[p, record.learner] = record.version
            told = (record.learner, record.incarnation, record.base_version, record.tokens)
            if told != (header.learner, header.incarnation, header.base_version, header.tokens):
                yield f"the tape tells of {told}, not of {header}"
            wrong = self._wrong(link, p, state, entry, record, reading_since_s, closing)
            if wrong:
                yield f"{header.learner}'s on {header.base_version} at {state.version}: {record.reason.value}, {wrong}"
        for entry in refusal.entries:
            if (header := state.pending.pop(entry, None)) is not None:
                self._gone[p].append(Gone(header, self._now(), lost=False))
        for entry, other in state.pending.items() if refusal.delta_payloads and not closing else ():
            if self._key(other) not in refusal.delta_payloads or not self._mergeable(state, other):
                continue
            decided_s = (refusal.records[0].unix_s - UNIX_START_S if refusal.records else self._now()) - SKEW_S
            came_s = self._offered_s[p, entry]
            if came_s + link.held_up_s(came_s) < decided_s:  # else it may be unread
                yield f"the payload of {other.learner}'s pending delta on {other.base_version} went with it"

    def _wrong(
        self, link: Link, p: int, state: Surviving, entry: str, record: Rejected, reading_since_s: float, closing: bool
    ) -> str:
        """What does not hold, or nothing."""
        header = state.pending[entry]
        training = (header.learner, header.incarnation, header.base_version)
        match record.reason:
            case RefusalReason.TOO_STALE:
                newer = self._others(p, state, entry, record, reading_since_s)
                held = header.base_version < state.version - 1 or any(
                    other.learner == header.learner and other.base_version > header.base_version for other in newer
                )
                return "" if held else "but it is not, nor did a newer one take its place"
            case RefusalReason.ALREADY_MERGED:
                later = (base for who, life, base in state.merged if (who, life) == training[:2])
                held = training in state.merged or (
                    header.base_version < state.version - 1 and any(base > header.base_version for base in later)
                )
                return "" if held else "but it was not"
            case RefusalReason.DUPLICATE:
                others = self._others(p, state, entry, record, reading_since_s)
                held = any((o.learner, o.incarnation, o.base_version) == training for o in others)
                return "" if held or training in state.merged else "but no other delta has its training"
            case RefusalReason.UNKNOWN_BASE:
                known = state.digests.get(header.base_version)
                stale_or_ahead = not state.version - 1 <= header.base_version <= state.version
                return "" if stale_or_ahead or header.base_digest != known else "but it is on record"
            case RefusalReason.NON_FINITE:
                return "but it is finite" if np.isfinite(self._published(header)).all() else ""
            case RefusalReason.UPLOAD_TIMEOUT:
                return self._in_time(link, header, self._offered_s[header.fragment, entry])
            case RefusalReason.RUN_FINISHED:
                return "" if closing else "but it is not"
        return "for which there was no cause"

    def _renewed(self, p: int, state: Surviving, entry: str) -> bool:
        """Whether another delta has the training of this one, or had it a moment ago."""
        others = [other for at, other in state.pending.items() if at != entry]
        others += [one.header for one in self._gone[p]]
        header = state.pending[entry]
        training = (header.learner, header.incarnation, header.base_version)
        return training in state.merged or any(
            (other.learner, other.incarnation, other.base_version) == training and other.attempt >= header.attempt
            for other in others
        )

    def _mergeable(self, state: Surviving, header: DeltaHeader) -> bool:
        """Whether a pending delta may still be merged: not if a newer one of its learner, or another one of the same
        training, is there."""
        training = (header.learner, header.incarnation, header.base_version)
        others = [other for other in state.pending.values() if other.learner == header.learner]
        return (
            training not in state.merged
            and header.base_digest == state.digests.get(header.base_version)
            and header.base_version >= state.version - 1
            and bool(np.isfinite(self._published(header)).all())
            and not any(other.base_version > header.base_version for other in others)
            and not any(
                other.serial != header.serial and (other.incarnation, other.base_version) == training[1:]
                for other in others
            )
        )

    def _in_time(self, link: Link, header: DeltaHeader, offered_s: float) -> str:
        """The upload had its time, and was not there well before."""
        key, now = self._key(header), self._now()
        if (waited_s := now - offered_s) < DEADLINE_S:
            return f"but only {waited_s:.2f} s after its header"
        stream = self._store.values.get(key)
        if not isinstance(stream, Stream) or len(stream.ids) < header.chunks or key not in self._store.expiries:
            return ""
        whole_at = self._written_s[key]
        since_s = now - whole_at
        if since_s > READ_S + link.held_up_s(whole_at - READ_S):
            return f"but it was whole {since_s:.2f} s ago"
        return ""

    def _others(
        self, p: int, state: Surviving, entry: str, record: Rejected, reading_since_s: float
    ) -> Iterator[DeltaHeader]:
        """What the owner may have had besides, when it decided."""
        yield from (header for at, header in state.pending.items() if at != entry)
        decided_s = record.unix_s - UNIX_START_S - SKEW_S
        for one in self._gone[p]:
            if reading_since_s <= one.at_s if one.lost else decided_s <= one.at_s:
                yield one.header

    def _key(self, header: DeltaHeader) -> str:
        return self._keys.delta_payload(header.fragment, header.learner, header.incarnation, header.serial)
