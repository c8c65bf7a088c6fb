"""The invariants, checked at every effect on the bus, by an onlooker who sees all of it.

The oracle keeps its own account of the surviving history (heads with their values, headers that are pending, bases
that were merged), which goes back together with the bus when that loses its last second. It shares no state
with the production code, and computes every merge again (`syncer.algorithm`) from the bytes on the bus (`reference`).

Invariants: no contribution merged twice; a version rises by exactly 1; no merge below the quorum, of a learner
twice, of a delta that is stale by more than one or was not offered; weights >= 0, sum 1 and as the paper has them;
the committed values are the merge of what the learners published; arrays finite; no write but under the lease; a
window opens for a due delta on the current base only, closes in time, and goes back to an earlier state with a later
attempt only; what was offered and neither merged nor refused is still on its stream; a delta is refused for a reason
that holds, and called due when its interval is over; a learner's reported tokens cover its header's, and its reported
pulls are as long as they were (`pulls`); only committed values are adopted; a shard leaves the queue when all of it was
read (`shards`); at the end the ledger closes to the token-element.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco.pipeline.bus import schema
from diloco.pipeline.bus.commits import Commit, Refusal, Republication
from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.fragment import Committed, DeltaHeader, RefusalReason, TapeRecord, WindowView
from diloco.pipeline.messages.payload import Chunk
from diloco.pipeline.messages.run import LearnerReport, Phase, RunState
from diloco.pipeline.payload.codec import DTYPES, TRAITS, chunk_count, decode
from diloco.pipeline.view import ledger
from diloco.pipeline.view.ledger_inputs import LedgerInputs
from diloco.syncer import algorithm
from diloco.workers.rounds import Base
from diloco_studies.virtual.memory_store import MemoryStore, Stream
from tests.world import reference
from tests.world.archives import Archive
from tests.world.globals import Globals
from tests.world.link import Link
from tests.world.plan import Plan
from tests.world.pulls import Pulls
from tests.world.record import Seen
from tests.world.refusals import Refusals
from tests.world.shards import Shards
from tests.world.surviving import Float64, Surviving, base_of, training_of
from tests.world.windows import CLOSED, Windows

REPORTED_S = 3.0
"""Longer than any call is on its way."""
CLOSE = 1e-4
"""Relative difference from the algorithm in float64 that float32 and its order of summing may make."""


@dataclass(frozen=True)
class Violation:
    """A promise that was broken, and how."""

    promise: str
    detail: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.detail}"


DeltaId = tuple[int, str, str, int]
"""(fragment, learner, incarnation, serial)"""


class Oracle:
    """Watches one run."""

    def __init__(self, plan: Plan, layout: Layout, store: MemoryStore, keys: RunKeys, now: Callable[[], float]) -> None:
        self._now = now
        self._together = plan.together
        self._has_little_room = plan.has_little_room
        self._spec, self._layout, self._store, self._keys = plan.spec, layout, Seen(store), keys
        self.fragments = [Surviving.none(fragment.elements) for fragment in layout.fragments]
        self.violation: Violation | None = None
        self.merges = 0
        """Commits that took effect, lost history included."""
        self.on_violation: Callable[[], None] = lambda: None
        self._syncs = [reference.constants(plan.spec.sync, (s.tensor for s in f.slots)) for f in layout.fragments]
        self._published: dict[DeltaId, Float64] = {}
        self._later: dict[DeltaId, tuple[Base, Callable[[], npt.NDArray[Any] | None]]] = {}
        """Those whose values are not looked at yet."""
        self._uploads: dict[str, tuple[DeltaId, dict[int, bytes]]] = {}
        """Key of a quantized delta's payload -> its chunks so far."""
        self._offers: dict[tuple[int, str], DeltaHeader] = {}
        self._senders: set[str] = set()
        self._committed: dict[tuple[int, int, bytes], Float64] = {}
        """(fragment, version, digest) -> the values that learners train from."""
        self._intervals: dict[tuple[int, int, bytes], set[int]] = {}
        """The same -> what heads said; several, if a bus that went back got the same values once more."""
        self._ever: dict[tuple[int, int, bytes], Surviving] = {}
        """The history up to each commit that ever was."""
        self._tape: list[TapeRecord] = []
        """All that was ever written to it, as archives have it: on both servers, where there were two."""
        self._ever_drained = self._finished = self._lost_its_end = False
        self._rewound_s = self._healed_s = -REPORTED_S
        self._rewinds = 0
        self._closing: list[set[str]] = []
        """What was pending in each fragment when the run was first said to be closing."""
        self.shards = Shards(self._store, keys, self.broken)
        self._reading: dict[tuple[Link, int], float] = {}
        """When a syncer last read a fragment's stream from its start."""
        self._merged_and_lost: set[tuple[int, str, str, int]] = set()
        """What was merged on a server that was replaced, or that went back behind it: its owner may put that back, and
        the tape that is there by then does not tell of it."""
        self._make_windows = partial(
            Windows, plan.spec.sync, len(layout.fragments), max(plan.step_s), plan.latency_s, now, self._is_uploaded
        )
        self._windows = self._make_windows()
        self._side: dict[str, Any] | None = None
        """Of those who are still with a server that was replaced: what belongs to its history, by attribute."""
        self._side_store = store
        self._pulls = Pulls(layout, plan.latency_s, now)
        self._globals = Globals(self._store, layout, plan.spec.sync, self.broken)
        self._refusals = Refusals(self._store, keys, now, self._published_as, len(layout.fragments))
        self._checks: dict[str, Callable[..., None]] = {
            "offer": self._offered,
            "read_heads": self._looked,
            "write_report": self._reported,
            "read_offers": self._read_offers,
            "write_chunks": self._staged,
            "commit": self._commit,
            "refuse": self._refuse,
            "republish": self._republish,
            "write_window": self._window,
            "write_state": self._state,
            "fill_shards": self.shards.filled,
            "claim_shard": self.shards.claimed,
            "finish_shard": self.shards.finished,
        }

    # --- what the world tells ------------------------------------------------------------------------

    def published(self, delta: DeltaId, values: Float64) -> None:
        """A learner made a delta: (elements,) as it will travel; with error feedback it is known when it does."""
        self._published[delta] = values
        if TRAITS[self._syncs[delta[0]].codec].feedback:
            self._uploads[self._keys.delta_payload(*delta)] = delta, {}

    def published_later(self, delta: DeltaId, base: Base, values: Callable[[], npt.NDArray[Any] | None]) -> None:
        """The same of a learner of several ranks: the fragment's values (elements,) as they were, once they are known.

        base: its values are not looked at.
        """
        self.published(delta, np.zeros(0))
        self._later[delta] = base, values

    def _published_as(self, header: DeltaHeader) -> Float64:
        delta = header.fragment, header.learner, header.incarnation, header.serial
        if delta in self._later:
            base, values = self._later.pop(delta)
            shown, now = self._committed[base.fragment, base.version, base.digest], values()
            if now is not None:
                self._published[delta] = self.wire_values(base.fragment, shown.astype(np.float32), now)
        return self._published[delta]

    def adopted(self, learner: str, base: Base) -> None:
        """A learner put a global into its model."""
        self.heard(learner, base)
        self.check_adopted(learner, base, base.values)

    def heard(self, learner: str, base: Base) -> None:
        """A learner has adopted something; whatever the values are."""
        for windows in (self._windows, self._side["_windows"]) if self._side else (self._windows,):
            windows.joined(learner)  # it may be with either server
        self._pulls.adopted(learner, base)

    def check_adopted(self, learner: str, base: Base, values: npt.NDArray[Any]) -> None:
        """What a learner adopted (elements,) is what was committed."""
        shown = self._committed.get((base.fragment, base.version, base.digest))
        if shown is None or not np.array_equal(values, shown):
            what = f"{values} as fragment {base.fragment} version {base.version}"
            self.broken("only committed values are adopted", f"{learner}: {what} instead of {shown}")

    def _phase(self) -> Phase | None:
        """Of the run, as the bus has it."""
        state = self._store.values.get(self._keys.state)
        found = schema.decode_state(state.get(b"blob")) if isinstance(state, dict) else None
        return None if found is None else found.phase

    def draining(self) -> None:
        """From now on windows may close below the quorum."""
        self._ever_drained = True

    def snapshot(self) -> list[Surviving]:
        """The history now, for `rewind`."""
        return [fragment.copy() for fragment in self.fragments]

    def rewind(self, saved: list[Surviving]) -> None:
        """The bus lost what came after."""
        self._refusals.lost(self.fragments, saved)
        for p, (fragment, before) in enumerate(zip(self.fragments, saved, strict=True)):
            self._merged_and_lost |= {(p, *key) for key in fragment.merged.keys() - before.merged.keys()}
        self.fragments = [fragment.copy() for fragment in saved]
        self._rewound_s = self._now()
        self._rewinds += 1
        self._pulls.rewound()
        self._finished = False
        self._lost_its_end |= self._phase() is Phase.FINISHED
        for p in range(len(self.fragments)):
            self._check_pending(p)
            self._windows.changed(p, self.fragments[p])

    def broken(self, promise: str, detail: str) -> None:
        """Note the first violation."""
        if self.violation is None:
            self.violation = Violation(promise, detail)
            self.on_violation()

    def observe(self, link: Link, method: str, args: tuple[Any, ...], outcome: Any) -> None:
        """A call took effect, or was refused by the bus."""
        if method not in self._checks:
            return
        if link.beside:
            self._turn()
        self._checks[method](link, outcome, *args)
        if link.beside:
            self._turn()

    # --- a server beside the one that took over --------------------------------------------------------

    def divide(self, store: MemoryStore) -> None:
        """From now on there are two histories: that of `store`, for links that are `beside`, is going to be lost."""
        self._side = {
            "fragments": self.snapshot(),
            "_offers": self._offers.copy(),
            "_refusals": self._refusals.copy(),
            "_windows": self._windows_beside(),
            "_closing": list(self._closing),
            "_finished": self._finished,
            "_rewound_s": self._rewound_s,
        }
        self._side_store = store

    def _windows_beside(self) -> Windows:
        """Those of the other history: nothing is known of them but who may be waited for."""
        windows = self._make_windows()
        for learner in self._windows.learners:
            windows.joined(learner)
        return windows

    def heal(self, come: Sequence[Link]) -> None:
        """Nobody is with the server that was replaced any more; who was is here now."""
        if self._side is not None:
            self._offers = self._side["_offers"] | self._offers
        self._side, self._healed_s = None, self._now()
        self._pulls.rewound()
        for link in come:
            self._windows.came(link)

    def _turn(self) -> None:
        """Judge by the other history."""
        assert self._side is not None
        mine = {name: getattr(self, name) for name in self._side}
        for name, value in self._side.items():
            setattr(self, name, value)
        self._side = mine
        self._store.store, self._side_store = self._side_store, self._store.store

    # --- the stream ------------------------------------------------------------------------------------

    def _stream(self, key: str) -> Stream | None:
        found = self._store.values.get(key)
        return found if isinstance(found, Stream) else None

    def _check_pending(self, p: int) -> None:
        there = set()
        for learner in self._senders:
            stream = self._stream(self._keys.deltas(p, learner))
            entries = zip(stream.ids, stream.data, strict=True) if stream else ()
            there |= {schema.offer_id(learner, f"{ms}-{seq}", data) for (ms, seq), data in entries}
        expected = self.fragments[p].pending.keys()
        if there != expected:
            lost, strange = sorted(expected - there), sorted(there - expected)
            self.broken("what is pending stays on its stream", f"fragment {p}: lost {lost}, unaccounted {strange}")

    def _offered(self, link: Link, outcome: Any, header: DeltaHeader, renews: str = "") -> None:
        p = header.fragment
        if not isinstance(outcome, Exception):
            state = self.fragments[p]
            self._senders.add(header.learner)
            if renews:
                self._renewed(p, header, renews)
            state.pending[outcome] = self._offers[p, outcome] = header
            self._refusals.offered(p, outcome)
            if header.due:
                state.due.add(base_of(header))
            self._windows.changed(p, state)
            self._check_report(header)
            told = self._intervals.get((p, *base_of(header)), {0})
            given = header, len(self.fragments), self._spec.sync
            late = self._has_little_room or self._is_set(header.learner)
            wrong = [reference.wrongly_due(*given, one, late) for one in sorted(told)]
            if all(wrong) and not self._ever_drained:
                self.broken("a delta is due when its interval is over", f"{header.learner}, fragment {p}: {wrong}")
        self._check_pending(p)

    def _looked(self, link: Link, outcome: Any, fragments: Sequence[int], *args: Any) -> None:
        if not isinstance(outcome, Exception):
            self._pulls.looked(link, outcome)
            if len(fragments) == 1:  # an owner begins anew
                self._windows.begins(link, fragments[0])

    def _reported(self, link: Link, outcome: Any, *args: Any) -> None:
        if not isinstance(outcome, Exception):
            self._pulls.reported(link)

    def _renewed(self, p: int, header: DeltaHeader, entry: str) -> None:
        """An earlier attempt at the same training goes, once all of the later one is on the bus. Where a later one yet
        came before it, its message is late, and of its payload nothing may be left."""
        before = self._offers[p, entry]
        same = training_of(before) == training_of(header)
        if not same or before.tokens > header.tokens or before.attempt >= header.attempt:
            self.broken("a delta is renewed by more of the same training", f"fragment {p}: {before} by {header}")
        if self.fragments[p].pending.pop(entry, None) is not None:
            self._refusals.renewed(p, before)
            too_stale = header.base_version < self.fragments[p].version - 1  # neither can be merged any more
            outdone = self.fragments[p].is_outdone(header)
            whole = self._is_uploaded(header) or (self._is_set(header.learner) and self._is_torn())
            if not (too_stale or outdone or whole) and self._now() - self._rewound_s > REPORTED_S:
                self.broken("a delta stays until what renews it is whole", f"fragment {p}: {before} by {header}")

    def _is_set(self, learner: str) -> bool:
        """It is of several ranks."""
        return self._together[int(learner.rpartition("-")[2]) % len(self._together)]

    def _is_torn(self) -> bool:
        """Ranks of one learner may be with two servers, or were a moment ago: each server has taken what it got."""
        return self._side is not None or self._now() - self._healed_s <= REPORTED_S

    def _check_report(self, header: DeltaHeader) -> None:
        table = self._store.values.get(self._keys.learners)
        blob = table.get(f"{header.learner}/{header.incarnation}".encode()) if isinstance(table, dict) else None
        report = decode(LearnerReport, blob) if blob else None
        reported = report.tokens if report else 0
        if report and (wrong := self._pulls.wrong(report)) is not None:
            self.broken("a pull is reported as long as it was", f"{header.learner}: {wrong}")
        # A header that was long on its way may come after its report was lost, with the bus or the server it was on.
        if reported < header.tokens and self._now() - max(self._rewound_s, self._healed_s) > REPORTED_S:
            self.broken("tokens are reported before their header", f"{header.learner}: {reported} < {header.tokens}")

    # --- the owner's writes ------------------------------------------------------------------------------

    def _owner_write(self, link: Link, p: int, nonce: str, what: str) -> None:
        if self._store.values.get(self._keys.lease(p)) != nonce.encode():
            self.broken("a syncer writes under its lease only", f"{link.party}: {what} of fragment {p}")

    def _window(
        self, link: Link, outcome: Any, p: int, nonce: str, expected: Any, window: WindowView, record: Any
    ) -> None:
        if isinstance(outcome, Exception):
            return
        self._owner_write(link, p, nonce, "window")
        self._tape += [record] if record is not None else []
        state = self.fragments[p]
        self._check_close(p, self._windows.shown(link, p, window, state))
        if again := self._windows.opened_again(link, p, window):
            self.broken("a window goes back with a later attempt", f"fragment {p} version {state.version}: {again}")
        state.window_closed = window.state in CLOSED
        if link.sent_s <= self._rewound_s or self._ever_drained:
            return  # decided by what was lost while it was on its way: its owner reads anew
        if self._reading.get((link, p), 0.0) <= self._rewound_s and self._now() - self._rewound_s <= REPORTED_S:
            return  # its owner has not looked since, and may have noticed nothing
        if window.state != "idle" and not state.may_open:
            self.broken("a window opens for a due delta on the current base", f"fragment {p} version {state.version}")

    def _read_offers(
        self, link: Link, outcome: Any, p: int, after: Mapping[str, str] | None = None, *args: Any
    ) -> None:
        if not after and not isinstance(outcome, Exception):
            self._reading[link, p] = self._now()
            self._windows.read(link, p, self.fragments[p].window_closed)

    def _staged(self, link: Link, outcome: Any, key: str, first: int, chunks: Sequence[bytes], ttl_s: float) -> None:
        """A quantized delta: what it says. The first chunks of a merge to be committed next: its window is closed."""
        if key in self._uploads:
            self._uploaded(key, first, chunks)
        if ":delta:" in key:
            self._refusals.written(key)
            of = int(key.split(":delta:")[1].split(":")[0])
            self._windows.changed(of, self.fragments[of])
        if (":global:" in key or ":update:" in key) and not isinstance(outcome, Exception):
            _, p, version, _ = key.rsplit(":", 3)
            if int(version) == self.fragments[int(p)].version + 1:
                self._check_close(int(p), self._windows.closed(link, int(p)))

    def _uploaded(self, key: str, first: int, chunks: Sequence[bytes]) -> None:
        delta, here = self._uploads[key]
        here |= dict(enumerate(chunks, first))
        sync, elements = self._syncs[delta[0]], self._layout.fragments[delta[0]].elements
        if len(here) == chunk_count(elements, sync.codec, sync.chunk_bytes):
            wire = b"".join(decode(Chunk, chunk).data for _, chunk in sorted(here.items()))
            self._published[delta] = reference.dequantized(wire, elements, sync.codec)
            self._later.pop(delta, None)
            del self._uploads[key]

    def _is_uploaded(self, header: DeltaHeader) -> bool:
        key = self._keys.delta_payload(header.fragment, header.learner, header.incarnation, header.serial)
        stream = self._stream(key)
        return stream is not None and len(stream.ids) >= header.chunks

    def _check_close(self, p: int, late: str | None) -> None:
        if late is not None and not self._ever_drained:
            self.broken("a window closes in time", f"fragment {p} version {self.fragments[p].version}: {late}")

    def _refuse(self, link: Link, outcome: Any, p: int, refusal: Refusal) -> None:
        if not isinstance(outcome, Exception):
            self._owner_write(link, p, refusal.nonce, "refusal")
            self._tape += refusal.records
            since_s = self._reading.get((link, p), self._now())
            for wrong in self._refusals.refused(link, p, self.fragments[p], refusal, since_s, bool(self._closing)):
                self.broken("a delta is refused for a reason that holds", f"fragment {p}: {wrong}")
            for entry, record in zip(refusal.entries, refusal.records, strict=False):
                if record.reason is RefusalReason.UNKNOWN_BASE and (header := self._offers.get((p, entry))):
                    self.fragments[p].forget_due(base_of(header))
            self._windows.changed(p, self.fragments[p])
        self._check_pending(p)

    def _commit(self, link: Link, outcome: Any, commit: Commit) -> None:
        p = commit.record.fragment
        if isinstance(outcome, Exception):
            self._check_pending(p)
            return
        self.merges += 1
        self._tape.append(commit.record)
        self._owner_write(link, p, commit.nonce, "commit")
        state = self.fragments[p]
        if commit.lost is not None:
            self._put_back(p, commit)
            return
        if commit.record.version != state.version + 1:
            self.broken("a version rises by exactly 1", f"fragment {p}: {state.version} to {commit.record.version}")
        found = self._globals.of(commit)
        if found is None:
            return
        theta, shown, momentum = found
        if commit.expected is not None:
            self._check_merge(link, p, commit, theta, momentum)
        state.before = state.theta
        state.theta = theta
        self._check_interval(p, commit, state)
        state.version, state.interval, state.window_closed = commit.record.version, commit.interval, False
        state.digests[commit.record.version] = commit.record.digest
        self._committed[p, commit.record.version, commit.record.digest] = shown
        state.momentum = momentum
        self._ever[p, commit.record.version, commit.record.digest] = state.copy()
        self._windows.moved(link, p)
        self._windows.changed(p, state)
        self._check_pending(p)
        if any(one.key in self._store.expiries for one in commit.published.payloads):
            self.broken("what a commit made stay stays", f"fragment {p} version {commit.record.version} expires")

    def _check_interval(self, p: int, commit: Commit, state: Surviving) -> None:
        """Never shorter than planned, nor longer unless that is asked for; the tape says by which the merge went."""
        version, told = commit.record.version, commit.interval
        planned = reference.interval(self._spec.sync, version)
        if told > planned and not self._spec.sync.stretch:
            self.broken("an interval is as planned", f"fragment {p} version {version}: {told}, not {planned}")
        self._intervals.setdefault((p, version, commit.record.digest), set()).add(told)
        if commit.expected is not None and (told < planned or commit.record.interval != state.interval):
            detail = f"{told} where {planned} is planned, merged at {commit.record.interval} of {state.interval}"
            self.broken("an interval is stretched only", f"fragment {p} version {version}: {detail}")

    def _put_back(self, p: int, commit: Commit) -> None:
        """A version that the bus has lost, without a head in its place: the same values, momentum and history."""
        version = commit.record.version
        state, was = self.fragments[p], self._ever.get((p, version, commit.record.digest))
        if state.version >= 0 or was is None:
            self.broken("only what was lost is put back", f"fragment {p}: version {version} on {state.version}")
            return
        found = self._globals.of(commit)
        if found is None:
            return
        theta, _, momentum = found
        state.before = was.before
        if not np.array_equal(theta, was.theta) or np.abs(momentum - was.momentum).max() > CLOSE:
            self.broken("what is put back is the same", f"fragment {p} version {version}: {theta}, {momentum}")
        if commit.interval != was.interval:
            self.broken("what is put back is the same", f"fragment {p}: interval {commit.interval}")
        state.version, state.interval, state.window_closed = was.version, was.interval, False
        state.theta, state.momentum = was.theta, was.momentum
        state.digests, state.merged, state.due = dict(was.digests), dict(was.merged), was.due | state.due

    def _republish(self, link: Link, outcome: Any, p: int, anew: Republication) -> None:
        """The same values and momentum as before, in other payloads."""
        if isinstance(outcome, Exception):
            return
        self._owner_write(link, p, anew.nonce, "republication")
        state = self.fragments[p]
        found = self._globals.whole(anew.published.payload, anew.published.rest, p, state.digests[state.version])
        at = anew.published.momentum
        momentum = self._globals.values(at.key, p, None) if at else np.zeros_like(state.momentum)
        if found is None or momentum is None or np.abs(momentum - state.momentum).max() > CLOSE:
            self.broken("what is published anew is the same", f"fragment {p} version {state.version}: {momentum}")

    def _check_merge(self, link: Link, p: int, commit: Commit, theta: Float64, momentum: Float64) -> None:
        state, parts, sync = self.fragments[p], commit.record.contributions, self._syncs[p]
        where = f"fragment {p} version {commit.record.version}"
        if len({part.learner for part in parts}) != len(parts):
            self.broken("a learner counts once", f"{where}: {[part.learner for part in parts]}")
        if len(parts) < (1 if self._ever_drained else sync.quorum):
            self.broken("no merge below the quorum", f"{where}: {len(parts)} of {sync.quorum}")
        counters, interval = [(part.steps, part.tokens) for part in parts], commit.record.interval
        interval = interval or reference.interval(sync, commit.record.version - 1)
        weights = algorithm.merge_weights(counters, sync.weights, interval=interval)
        given = np.array([part.weight for part in parts])
        if (given < 0).any() or np.abs(given - weights).max() > 1e-12 or abs(given.sum() - 1) > 1e-12:
            self.broken("weights are the paper's", f"{where}: {given} instead of {weights}")
        deltas, unclear = [], False
        for entry, part in zip(commit.entries, parts, strict=True):
            header = self._offers.get((p, entry))  # the bus may have lost it since, and its owner still have it
            if header is None:
                self.broken("what is merged was offered", f"{where}: {part.learner}'s delta on {part.base_version}")
                return
            state.pending.pop(entry, None)
            if not commit.record.version - 2 <= header.base_version < commit.record.version:
                self.broken("staleness is at most 1", f"{where}: base {header.base_version}")
            if header.base_digest != state.digests.get(header.base_version):
                self.broken("a base is on record", f"{where}: base {header.base_version} of a lost history")
            key = (header.learner, header.incarnation, header.base_version)
            if key in state.merged:
                self.broken("nothing is merged twice", f"{where}: {key}")
            state.merged[key] = header.tokens
            (self._merged_and_lost.add if link.beside else self._merged_and_lost.discard)((p, *key))
            if (header.steps, header.tokens, header.learner) != (part.steps, part.tokens, part.learner):
                self.broken("the tape tells what was merged", f"{where}: {part}")
            delta = published = self._published_as(header)
            if part.rebased:  # a new owner does not know the version before: the tape tells
                delta = algorithm.rebased(published, state.theta, state.before)
                unclear |= reference.has_lost_direction(self._layout.fragments[p].slots, published, delta, CLOSE)
                if header.base_version == state.version:
                    self.broken("only a stale delta is rebased", f"{where}: {part.learner}'s")
            deltas.append(delta)
        factors = algorithm.clip_factors([float(np.linalg.norm(delta)) for delta in deltas], sync.delta_clip)
        if np.abs(np.array(factors) - [part.factor for part in parts]).max() > CLOSE:
            self.broken("a long delta is clipped at the median", f"{where}: {factors}, and the tape has {parts}")
        deltas = [factor * delta for factor, delta in zip(factors, deltas, strict=True)]
        if unclear:
            return
        gradient = algorithm.pseudogradient(self._layout.fragments[p], deltas, weights)
        averaged = reference.averages(sync, state.version, [part.steps for part in parts], state.interval)
        lr, mu = (1.0, 0.0) if averaged else (sync.outer_lr, sync.outer_momentum)
        expected, velocity = algorithm.outer_step(
            self._layout.fragments[p], state.theta, state.momentum, gradient, lr, mu, sync.outer
        )
        scale = CLOSE * (float(np.abs(gradient).max()) + float(np.abs(expected).max()))
        if np.abs(theta - expected).max() > scale + 1e-9:
            self.broken("the global is the merge of what was published", f"{where}: {theta} instead of {expected}")
        if np.abs(momentum - velocity).max() > scale + 1e-9:
            self.broken("the momentum is Nesterov's", f"{where}: {momentum} instead of {velocity}")

    def _state(self, link: Link, outcome: Any, state: RunState) -> None:
        """What was offered before a run closed is merged or refused when it is finished; later is too late."""
        if not isinstance(outcome, RunState):
            return
        if outcome.phase is Phase.CLOSING:
            self._closing = self._closing or [set(fragment.pending) for fragment in self.fragments]
        if outcome.phase is Phase.FINISHED and not self._finished:
            self._finished = True
            for p, (fragment, before) in enumerate(zip(self.fragments, self._closing, strict=True)):
                if before & fragment.pending.keys():
                    self.broken(
                        "a finished run has nothing pending", f"fragment {p}: {before & fragment.pending.keys()}"
                    )

    # --- at the end ------------------------------------------------------------------------------------

    def check_finished(self, manifest: tuple[tuple[int, bytes], ...]) -> None:
        """The run is finished: the manifest is the truth, nothing stays for ever but the heads'."""
        heads = tuple((f.version, f.digests.get(f.version, b"")) for f in self.fragments)
        # A server that took over may know that the run is finished, and lack what was merged last.
        were = self._lost_its_end and all((p, *one) in self._ever for p, one in enumerate(manifest))
        if manifest != heads and not were:
            self.broken("the manifest is the heads", f"{manifest} but {[f.version for f in self.fragments]}")
        self.shards.check()
        needed = set()
        for p in range(len(self.fragments)):
            head = self._store.values.get(self._keys.head(p))
            decoded = schema.decode_head(p, head) if isinstance(head, dict) else None
            if decoded is not None:
                needed |= {decoded.payload, decoded.rest, decoded.momentum}
        payloads = (":delta:", ":global:", ":rest:", ":momentum:", ":initial:")
        for key in self._store.values:
            if any(kind in key for kind in payloads) and key not in needed and key not in self._store.expiries:
                self.broken("what nobody needs expires", key)

    def check_ledger(self, ledger_inputs: LedgerInputs) -> None:
        """The run is finished: every token that was trained is merged, overwritten, rejected, or died.

        Only of a bus that came back without its last second is a gap accepted, or a merge that does not hold: also of
        those that had ended before, who could not notice it.
        """
        if not self._rewinds and ledger.surviving(self._tape, ledger_inputs.heads)[1]:
            self.broken("the ledger closes", "a merge was lost, and the bus lost nothing")
        self._check_books(self._tape, ledger_inputs)

    def check_archive(self, archive: Archive, ledger_inputs: LedgerInputs) -> None:
        """The run is finished, and whoever has followed its tapes has read all that is on them: its books close too."""
        for promise, detail in archive.problems(self._store, self._keys):
            self.broken(promise, detail)
        read = {
            (one.fragment, part.learner, part.incarnation, part.base_version)
            for one in archive.records
            if isinstance(one, Committed)
            for part in one.contributions
        }
        self._check_books(archive.records, ledger_inputs, self._merged_and_lost - read)

    def _check_books(
        self,
        tape: Sequence[TapeRecord],
        ledger_inputs: LedgerInputs,
        untold: Collection[tuple[int, str, str, int]] = frozenset(),
    ) -> None:
        for p, fragment in enumerate(self.fragments):
            commits = [one for one in ledger.surviving(tape, ledger_inputs.heads)[0] if one.fragment == p]
            parts = {(one.learner, one.incarnation, one.base_version) for c in commits for one in c.contributions}
            told = {key for key in fragment.merged if key in parts or (p, *key) not in untold}
            if parts != told:
                odd = sorted(parts ^ told)
                self.broken("the tape tells which merges hold", f"fragment {p}: {odd[:4]} of {len(odd)}")
        outages = {"outages": int(self._rewinds > 0)}
        ledger_inputs = replace(
            ledger_inputs, reports=tuple(one.model_copy(update=outages) for one in ledger_inputs.reports)
        )
        for problem in ledger.problems(ledger.accounts(tape, ledger_inputs, self._layout)):
            self.broken("the ledger closes", problem)

    def wire_values(self, p: int, base: npt.NDArray[Any], values: npt.NDArray[Any]) -> Float64:
        """A fragment's pseudogradient (elements,) as its codec carries it; as it is, if that quantizes."""
        delta = np.subtract(base, values)
        wire: Float64 = delta.astype(DTYPES.get(self._syncs[p].codec, delta.dtype)).astype(np.float64)
        return wire
