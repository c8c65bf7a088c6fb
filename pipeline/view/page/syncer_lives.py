"""Which syncers came, went and took over from others, for the page's list of events. Pure.

Presence is known only to a page that is being served meanwhile. The tape names the syncer of each merge, so a takeover
is seen even by a page that was started after it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from diloco.pipeline.messages.fragment import Committed, TapeRecord
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.units import duration
from diloco.pipeline.view.status import Status

# A syncer that is absent for less is not gone: after a restart of Redis, syncers announce themselves again.
ABSENT_S = 5.0
# Further fragments that pass between the same two syncers within this time are the same takeover.
TAKEOVER_S = 60.0


class Mark(NamedTuple):
    """An event as the page shows it."""

    at_s: float
    """Unix time."""
    what: str
    who: str
    detail: str = ""


class SyncerLives:
    """The syncers of a run, as of the last poll."""

    def __init__(self) -> None:
        self._seen_s: dict[str, float] | None = None
        """When each was present last; None before the first poll."""
        self._gone = set[str]()
        """Syncers seen here whose death an event has told. Such a syncer stays announced until that expires."""
        self._here = set[str]()
        """Those present at the last poll."""
        self._merged: dict[int, tuple[str, float, set[tuple[str, str]]]] = {}
        """By fragment: the syncer of its last merge, when that was, and the learners in it with their incarnations."""
        self._takeovers: dict[tuple[str, str], float] = {}

    def died(self, name: str) -> None:
        """Note that an event has told of its end, so that its absence is not told as well."""
        self._gone.add(name)

    def see(self, status: Status, records: Sequence[TapeRecord], now_s: float) -> Iterator[Mark]:
        """Yield what a poll tells: its status, and the records of the tape since the last one."""
        for record in records:
            if isinstance(record, Committed) and record.contributions:
                yield from self._merge(record, min(record.unix_s, now_s))
        here = [one["id"] for one in status["syncers"]]
        before, self._here = self._here, set(here)
        if self._seen_s is None or status["phase"] not in ("waiting", Phase.RUNNING):
            self._seen_s = dict.fromkeys(here, now_s)
            self._gone.clear()  # the first poll has the events of all earlier lives
            return
        for name in here:
            if name not in self._seen_s or (name in self._gone and name not in before):
                yield Mark(now_s, "joined", _named(name))
                self._gone.discard(name)
            self._seen_s[name] = now_s
        for name, seen_s in [one for one in self._seen_s.items() if now_s - one[1] > ABSENT_S]:
            if name not in self._gone:
                detail = "" if here else "no syncer is left, so nothing is merged"
                yield Mark(seen_s, "left or died", _named(name), detail)
            del self._seen_s[name]
        self._gone &= self._seen_s.keys()

    def _merge(self, record: Committed, at_s: float) -> Iterator[Mark]:
        now = {(one.learner, one.incarnation) for one in record.contributions}
        before, before_s, _ = self._merged.get(record.fragment, (record.syncer, at_s, now))
        # If nobody goes on who was in its merges, the run has ended since, and was extended.
        went_on = any(syncer == before and now & there for syncer, _, there in self._merged.values())
        self._merged[record.fragment] = record.syncer, at_s, now
        pair = before, record.syncer
        if before != record.syncer and went_on and at_s - self._takeovers.get(pair, 0.0) > TAKEOVER_S:
            self._takeovers[pair] = at_s
            detail = f"first merge of fragment {record.fragment}, {duration(at_s - before_s)} after the last one"
            yield Mark(at_s, f"took over from {before}", _named(record.syncer), detail)


def _named(syncer: str) -> str:
    return syncer if syncer.startswith("syncer") else f"syncer {syncer}"
