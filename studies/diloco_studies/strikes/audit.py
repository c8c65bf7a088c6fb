"""What must be true of a run that was struck, judged by what it left: its tape, its bus, its logs. Pure.

The audit knows nothing of how the run was made. It takes the evidence as it was read afterwards and returns every
promise that was broken, with where. Judged is the history that survived: where the bus lost its last second, or
another server took over that did not have it, what is lost may be made again, and only then may a version fall. On the
tape that survived, each version is there once, whatever was lost.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.fragment import Committed, Rewound, TapeRecord
from diloco.pipeline.messages.shards import ShardQueue
from diloco.pipeline.view.ledger import accounts, problems, surviving
from diloco.pipeline.view.ledger_inputs import LedgerInputs
from diloco_studies.strikes import footprint
from diloco_studies.strikes.growth import KeyUsage, Scale, grown
from diloco_studies.strikes.rates import Struck
from diloco_studies.strikes.schedule import BUS, Manner, Party

SETTLED_S = 5.0
"""After another server has taken over, or the old one is back, for so long the servers may still change their minds."""
REPORTS_S = 2.0
"""An acknowledgement is on its way, or was lost with the bus's last second, for as long as this."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was broken, and how."""

    promise: str
    detail: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.detail}"


@dataclass(frozen=True, slots=True)
class ShardNote:
    """What a learner's log says about a data shard."""

    unix_s: float
    consumer: str
    """`learner.incarnation`"""
    epoch: int
    index: int
    read: bool
    """It was read to its end; else it was claimed."""


@dataclass(frozen=True, slots=True)
class Ending:
    """A process that ended by itself: by no strike, and before it was told to, or not in order."""

    name: str
    how: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that the audit judges."""

    layout: Layout
    records: Sequence[TapeRecord] = ()
    """The archives of all syncers together, each fragment's in the order of its tape."""
    tape: Sequence[TapeRecord] = ()
    """What is on the bus at the end: the tape that survived."""
    ledger_inputs: LedgerInputs = field(default_factory=LedgerInputs)
    strikes: Sequence[Struck] = ()
    tail_lost: bool = False
    """Whether killing Redis loses its last second."""
    shards: Sequence[ShardNote] = ()
    queue: ShardQueue = field(default_factory=lambda: ShardQueue(epochs=0, open=()))
    """What is left on the work queue."""
    shards_per_epoch: int = 0
    key_usage: Sequence[KeyUsage] = ()
    scale: Scale | None = None
    """None: growth is not judged."""
    lives: Sequence[footprint.Life] = ()
    """Processes that lived for long enough to be judged."""
    endings: Sequence[Ending] = ()
    left_running: Sequence[str] = ()
    """Processes of the run that are there after its end."""


def audit(evidence: Evidence) -> list[Violation]:
    """Every broken promise."""
    found: list[Violation] = []
    for promise, check in CHECKS.items():
        found += [Violation(promise, detail) for detail in check(evidence)]
    return found


def losses(evidence: Evidence) -> list[tuple[float, float]]:
    """Spans in which the bus may have lost what it had acknowledged: no merge from after one is lost in it."""
    return [
        (strike.ended_s, strike.ended_s)
        if strike.party is Party.REDIS
        else (strike.began_s, strike.ended_s + SETTLED_S)
        for strike in evidence.strikes
        if strike.party is Party.PRIMARY
        or (evidence.tail_lost and (strike.manner, strike.party) == (Manner.KILL, Party.REDIS))
    ]


# --- versions --------------------------------------------------------------------------------------------


def _versions(evidence: Evidence) -> Iterator[str]:
    lost_s = losses(evidence)
    histories: dict[int, list[Committed]] = {fragment.id: [] for fragment in evidence.layout.fragments}
    for record in evidence.records:
        history = histories[record.fragment]
        if isinstance(record, Committed):
            yield from _follows(record, history, lost_s)
            history.append(record)
        elif isinstance(record, Rewound):
            gone = next((one for one in history if one.version > record.version), None)
            made_s = -math.inf if gone is None else gone.unix_s
            if not any(since_s <= record.unix_s and made_s <= until_s for since_s, until_s in lost_s):
                yield (
                    f"fragment {record.fragment}: rewound from version {record.was_version} to {record.version}, and "
                    f"the bus had lost nothing"
                )
            _cut(history, record.version + 1)
    for fragment, version, digest in evidence.ledger_inputs.heads:
        history = histories[fragment]
        last = history[-1] if history else None
        if last is None or (last.version, last.digest) != (version, digest):
            told = "nothing" if last is None else f"version {last.version}, {last.digest.hex()[:8]}"
            yield f"fragment {fragment}: the head is version {version}, {digest.hex()[:8]}, and the tape ends at {told}"


def _follows(record: Committed, history: list[Committed], lost_s: Sequence[tuple[float, float]]) -> Iterator[str]:
    """Whether a commit goes on from the one before; takes back what the bus has lost in between."""
    where = f"fragment {record.fragment}"
    if history and record.version <= history[-1].version:
        replaced = next((one for one in history if one.version >= record.version), history[-1])
        if not any(replaced.unix_s <= until_s and since_s <= record.unix_s for since_s, until_s in lost_s):
            yield (
                f"{where}: version {record.version} by {record.syncer} comes after version {history[-1].version} by "
                f"{history[-1].syncer}, and the bus had lost nothing"
            )
        _cut(history, record.version)
    if not history:
        if record.version and record.base_digest is not None:
            yield f"{where}: the tape begins with version {record.version}"
        return
    last = history[-1]
    if record.version != last.version + 1:
        yield f"{where}: version {record.version} comes after {last.version}"
    elif record.base_digest is not None and record.base_digest != last.digest:
        yield f"{where}: version {record.version} was not made from version {last.version} as it was committed"


def _cut(history: list[Committed], version: int) -> None:
    while history and history[-1].version >= version:
        history.pop()


def _one_digest(evidence: Evidence) -> Iterator[str]:
    """Holds without any excuse: what was lost is not on this tape."""
    there: dict[tuple[int, int], bytes] = {}
    for record in evidence.tape:
        if isinstance(record, Committed):
            digest = there.setdefault((record.fragment, record.version), record.digest)
            if digest != record.digest:
                yield (
                    f"fragment {record.fragment}: version {record.version} is on the surviving tape as "
                    f"{digest.hex()[:8]} and as {record.digest.hex()[:8]}"
                )


def _merged_once(evidence: Evidence) -> Iterator[str]:
    merged: dict[tuple[int, str, str, int], int] = {}
    history, _ = surviving(evidence.records, evidence.ledger_inputs.heads)
    for commit in history:
        for part in commit.contributions:
            key = commit.fragment, part.learner, part.incarnation, part.base_version
            if key in merged:
                yield (
                    f"fragment {commit.fragment}: what {part.learner}/{part.incarnation} trained on version "
                    f"{part.base_version} is in version {merged[key]} and in {commit.version}"
                )
            merged.setdefault(key, commit.version)


# --- tokens ----------------------------------------------------------------------------------------------


def _ledger(evidence: Evidence) -> Iterator[str]:
    parts = accounts(evidence.records, evidence.ledger_inputs, evidence.layout)
    yield from problems(parts)
    gap = sum(part.unaccounted for part in parts)
    if gap:
        yield f"{gap} token-elements are neither merged nor overwritten, rejected, died or pending"


# --- shards ----------------------------------------------------------------------------------------------


def _shards(evidence: Evidence) -> Iterator[str]:
    """What is read to its end leaves the queue; what left it was read; by one learner, unless a strike came between."""
    claimed: dict[tuple[int, int], dict[str, float]] = {}
    readers: dict[tuple[int, int], dict[str, float]] = {}
    for note in evidence.shards:
        book = readers if note.read else claimed
        book.setdefault((note.epoch, note.index), {}).setdefault(note.consumer, note.unix_s)
    waiting = {(shard.epoch, shard.index) for shard, _ in evidence.queue.open}
    for epoch in range(evidence.queue.epochs):
        for index in range(evidence.shards_per_epoch):
            shard = epoch, index
            by = readers.get(shard, {})
            where = f"shard {index} of epoch {epoch}"
            if not by and shard not in waiting:
                yield f"{where} left the queue, and no learner has read it to its end"
            if len(by) + (shard in waiting) > 1 and not _struck_in_hand(evidence, claimed.get(shard, {}), by):
                again = " and is on the queue again" if shard in waiting else ""
                yield f"{where} was read to its end by {', '.join(sorted(by))}{again}, and no strike came between"


def _struck_in_hand(evidence: Evidence, claimed: dict[str, float], readers: dict[str, float]) -> bool:
    """Whether one that held a shard, or the bus, was struck while the shard was in hand."""
    for consumer in {*claimed, *readers}:
        learner = consumer.rpartition(".")[0]
        until_s = readers.get(consumer, math.inf) + REPORTS_S
        since_s = claimed.get(consumer, -math.inf)
        for strike in evidence.strikes:
            hit = strike.party in BUS or strike.name == learner
            if hit and strike.began_s <= until_s and strike.ended_s >= since_s:
                return True
    return False


# --- the rest --------------------------------------------------------------------------------------------


def _bounded(evidence: Evidence) -> Iterable[str]:
    return () if evidence.scale is None else grown(evidence.key_usage, evidence.scale)


def _processes_bounded(evidence: Evidence) -> Iterable[str]:
    return footprint.grown(evidence.lives)


def _endings(evidence: Evidence) -> Iterator[str]:
    for one in evidence.endings:
        yield f"{one.name} {one.how}"


def _left_running(evidence: Evidence) -> Iterable[str]:
    return evidence.left_running


def _finished(evidence: Evidence) -> Iterator[str]:
    if not evidence.ledger_inputs.finished:
        yield "the run was not finished when its processes were gone"


CHECKS = {
    "a version rises by exactly 1": _versions,
    "a version has one digest on the tape that survived": _one_digest,
    "nothing is merged twice": _merged_once,
    "every token is accounted for": _ledger,
    "every shard is read to its end, once but for strikes": _shards,
    "no key or stream grows without bound": _bounded,
    "no process grows without bound": _processes_bounded,
    "nobody ends but by a strike or in order": _endings,
    "no process is left over": _left_running,
    "the run comes to its end": _finished,
}
