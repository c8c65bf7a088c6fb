"""Making the next version from a window's deltas (asyncio): their sum, the outer step, its payloads, the commit.

The round trips measured here (`RoundTrips`) also set the interval of the next version, through `ramps.stretched`.

Deltas are summed as they complete, while others are still awaited. When a window closes, only about one delta is
therefore left to sum, not all. No cached state changes before the commit has succeeded.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median_high

import structlog

from diloco.pipeline.bus.commits import REPLACED_TTL_S, STAGED_TTL_S, Commit, Published, Staged
from diloco.pipeline.bus.ports import Bus, Clock, PayloadStore
from diloco.pipeline.bus.schema import head_after
from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.head import IDLE_VIEW, Head
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.messages.tape import Committed
from diloco.pipeline.pacing import known_steps
from diloco.pipeline.payload.codec import Payload
from diloco.pipeline.transfer.globals import GrowingGlobal, Kind, key_of, published
from diloco.pipeline.transfer.payloads import Offload, push_growing
from diloco.syncer.admission import Offer
from diloco.syncer.context import RandomHex, SyncerContext
from diloco.syncer.merging.fragment import Delta, Draft, FragmentState, Merged
from diloco.syncer.metrics import Metrics
from diloco.syncer.window import Merge

# Replaced globals live for `REPLACED_TTL_S`, or until those of all fragments together are larger than this. One of each
# fragment stays in any case; a learner that reads an older one could only train a delta that is too stale to be merged.
# The cap exists because held payloads make Redis touch fresh memory, its largest cost while their number still grows.
REPLACED_BYTES = 64 * 2**20


# --- payloads: staged for a commit, and replaced ones until they must go -------------------------------


class Uploads:
    """Uploads in flight of a new version's payloads."""

    def __init__(self, growing: GrowingGlobal, tasks: dict[Kind, asyncio.Task[Staged]]) -> None:
        self._growing, self._tasks = growing, tasks

    async def published(self) -> Published:
        """Wait until all payloads are on the bus and return them as the next head names them.

        The version must be written in full before this is called, or the uploads never end.

        Raises:
            BusError: an upload failed.
        """
        await asyncio.gather(*self._tasks.values())
        return published({kind: task.result() for kind, task in self._tasks.items()}, self._growing.payloads)


class Staging:
    """Uploads a fragment's new versions, and retires the payloads of replaced ones."""

    def __init__(
        self,
        bus: PayloadStore,
        clock: Clock,
        layout: FragmentLayout,
        sync: SyncSpec,
        random_hex: RandomHex = secrets.token_hex,
    ) -> None:
        self._bus, self._clock, self._layout = bus, clock, layout
        self._sync, self._random_hex = sync, random_hex
        self._more = asyncio.Event()
        """Set when more of a draft has been written."""
        self._replaced: dict[tuple[str, ...], float] = {}
        """Keys of each replaced global -> when it was replaced, oldest first."""

    def draft(self) -> Draft:
        """Make memory for a merge; whenever another thread has written more of it, the uploads are woken."""
        tell = partial(asyncio.get_running_loop().call_soon_threadsafe, self._more.set)
        return Draft(self._layout, self._sync, tell)

    @asynccontextmanager
    async def uploads(self, version: int, growing: GrowingGlobal) -> AsyncIterator[Uploads]:
        """Upload a version while the `async with` block writes it. Leaving the block cancels what is left.

        The keys are fresh, and expire unless a commit keeps them.
        """
        tasks = {
            kind: asyncio.create_task(self._push(kind, version, payload)) for kind, payload in growing.payloads.items()
        }
        try:
            yield Uploads(growing, tasks)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _push(self, kind: Kind, version: int, payload: Payload) -> Staged:
        key = key_of(self._bus.keys, kind, self._layout.id, version, self._random_hex(8))
        return await push_growing(self._bus, key, payload, self._sync.chunk_bytes, STAGED_TTL_S, self._more)

    def retire(self, head: Head) -> tuple[str, ...]:
        """Note that a head's globals are replaced; return keys of replaced ones that must go before their time.

        They are returned oldest first, as many as the fragment's part of `REPLACED_BYTES` requires.
        """
        keys, now = tuple(key for key in (head.payload, head.rest) if key), self._clock.now()
        self._replaced.pop(keys, None)  # after a rewind a head may name what was replaced before
        self._replaced[keys] = now
        while now - self._replaced[next(iter(self._replaced))] > REPLACED_TTL_S:
            del self._replaced[next(iter(self._replaced))]
        most = max(1, REPLACED_BYTES // self._sync.fragments // (4 * self._layout.elements))
        oldest = tuple(self._replaced)[: max(0, len(self._replaced) - most)]
        for gone in oldest:
            del self._replaced[gone]
        return tuple(key for keys in oldest for key in keys)


# --- the running sum -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Begun:
    """A draft with some contributions in its sum."""

    draft: Draft
    entries: tuple[str, ...] = ()
    """Header entries of the summed contributions, in order."""
    weights: tuple[tuple[float, float], ...] = ()
    """Share and clip factor of each, by which it was multiplied."""


class RunningSum:
    """Sum of a window's contributions, extended as they complete.

    The window's sound deltas are summed in the order of their completion, which is also the order of the merge. So it
    makes no difference to any bit how many were summed before the window closed. `session` passes the deltas to sum. A
    sum cannot be undone: if a summed delta has left the window (its learner has published on a newer base), or if a new
    delta has changed the shares or clip factors of summed ones, the sum is begun anew. All deltas are kept until the
    commit for that.
    """

    def __init__(
        self, fragment: FragmentState, new_draft: Callable[[], Draft], offload: Offload, metrics: Metrics
    ) -> None:
        """Begin with an empty sum; new_draft makes memory for a merge (`Staging.draft`)."""
        self._fragment, self._new_draft, self._offload, self._metrics = fragment, new_draft, offload, metrics
        self._log = structlog.get_logger().bind(fragment=fragment.layout.id)
        self._begun: _Begun | None = None
        self._wanted: Sequence[Delta] = ()
        self._task: asyncio.Task[None] | None = None

    def follow(self, deltas: Sequence[Delta]) -> None:
        """Sum these in the background: all sound deltas of the window, in order. A single delta is not summed."""
        self._wanted = deltas
        if self._task is not None and self._task.done():
            self._task.result()  # raises what ended it
            self._task = None
        if self._task is None and self._behind():
            self._task = asyncio.create_task(self._add_wanted())

    async def draft(self, deltas: Sequence[Delta]) -> Draft:
        """Return a draft for the merge of the given deltas, which may have the first ones in its sum already.

        The running sum is empty afterwards, for the next window.
        """
        self._wanted = ()  # so that `_add_wanted` stops after the addition that is in progress
        if self._task is not None:
            await self._task
        draft = self._fitting(deltas).draft
        self.close()
        return draft

    def close(self) -> None:
        """Drop the sum. An addition that still runs in another thread ends in a draft that nothing uses."""
        if self._task is not None:
            self._task.cancel()
        self._begun, self._task, self._wanted = None, None, ()

    def _behind(self) -> bool:
        """Return whether there is something to sum."""
        wanted, begun = tuple(delta.offer.entry_id for delta in self._wanted), self._begun
        if len(wanted) < 2:
            return False
        return begun is None or wanted != begun.entries or not self._continues(begun, self._wanted)

    def _fitting(self, deltas: Sequence[Delta]) -> _Begun:
        """Return the present sum if these deltas continue it, otherwise a new one."""
        begun = self._begun
        if begun is not None and self._continues(begun, deltas):
            return begun
        if begun is not None and begun.entries:
            self._log.info("sum_begun_anew", summed=len(begun.entries))
            self._metrics.sums_begun_anew.inc()
        self._begun = begun = _Begun(self._new_draft())
        return begun

    def _continues(self, begun: _Begun, deltas: Sequence[Delta]) -> bool:
        """Return whether the sum holds the first deltas, with the shares and factors that they have among all."""
        count, weights = len(begun.entries), self._weights_of(deltas)
        same = begun.entries == tuple(delta.offer.entry_id for delta in deltas[:count])
        return same and begun.weights == weights[:count]

    def _weights_of(self, deltas: Sequence[Delta]) -> tuple[tuple[float, float], ...]:
        return tuple(zip(self._fragment.shares(deltas), self._fragment.factors(deltas), strict=True))

    async def _add_wanted(self) -> None:
        while self._behind():
            deltas = tuple(self._wanted)
            begun, weights = self._fitting(deltas), self._weights_of(deltas)
            done = len(begun.entries)
            rest, (shares, factors) = deltas[done:], zip(*weights[done:], strict=True)
            new = [delta.values for delta in rest], [delta.norms for delta in rest], shares, factors
            await self._offload(begun.draft.sum.add, *new)
            begun.entries, begun.weights = tuple(delta.offer.entry_id for delta in deltas), weights


# --- the commit ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Loaded:
    """An owner's cache of its fragment: the head as last seen, and the values of that version.

    The bus is the authority: after any failed write the head is read again.
    """

    head: Head
    fragment: FragmentState

    @property
    def at(self) -> tuple[int, bytes]:
        """(version, digest) of the cached head. Each write carries it and fails if the bus has another head by then."""
        return self.head.version, self.head.digest


class RoundTrips:
    """Length of the last two round trips of one fragment, in learners' steps.

    After publishing, a learner trains on until the merge of its delta has been pulled, and adopts it after a step. The
    steps of this round trip are overwritten, and `ramps.stretched` lengthens intervals by them. The wait for a quorum
    is not part of the round trip: it depends on the other learners, not on the interval, and deltas are renewed
    meanwhile.
    """

    def __init__(self) -> None:
        self._took = (0.0, 0.0)

    def observe(self, seconds: float) -> None:
        """Take one window's grace and sync time (pull included), s."""
        self._took = self._took[1], seconds

    def steps(self, step_times: Sequence[float], latency_s: float) -> float:
        """Return the round trip in steps, including the step after which a learner adopts; 0 if it is not known yet.

        The shorter of the last two counts, so that a single delay has no effect.

        Args:
            step_times: of the learners that were merged lately, s. Values that are too short count as unknown. The
                higher median counts: of two learners, one that reports very short steps cannot stretch the interval.
            latency_s: from a learner's decision to publish to its header at the syncer.
        """
        known, round_trip_s = known_steps(step_times), min(self._took)
        return 1 + (round_trip_s + latency_s) / median_high(known) if known and round_trip_s else 0.0


class LastMerges:
    """Durations of one fragment's last two merges; the shorter one counts, so that a single delay has no effect."""

    def __init__(self, expected_outer_s: float = 0.0) -> None:
        """Begin without a merge; expected_outer_s is the calculated duration of the outer step, used until measured."""
        self._took = (0.0, 0.0)
        self._outer: tuple[float, ...] = ()
        self._expected_outer_s = expected_outer_s

    def observe(self, merge_s: float, outer_s: float | None = None) -> None:
        """Take one merge's duration, s.

        Args:
            merge_s: of the whole merge.
            outer_s: of the sum and the outer step in it; None if it only averaged, which tells nothing of a step.
        """
        self._took = self._took[1], merge_s
        if outer_s is not None:
            self._outer = *self._outer[-1:], outer_s

    @property
    def merge_s(self) -> float:
        """The shorter of the last two merges, s; 0 before there are two (`WindowView.merge_s`)."""
        return min(self._took)

    @property
    def measured(self) -> bool:
        """True if `outer_s` is measured, not calculated."""
        return len(self._outer) == 2

    @property
    def outer_s(self) -> float:
        """The shorter of the last two outer steps, s; before there are two, the calculated time (see `WindowView`)."""
        return min(self._outer) if self.measured else self._expected_outer_s


def payload_key(bus: Bus, offer: Offer) -> str:
    """Return the bus key of a delta's payload."""
    h = offer.header
    return bus.keys.delta_payload(h.fragment, h.learner, h.incarnation, h.serial)


class Committing:
    """Makes the next versions of one loaded fragment."""

    def __init__(self, context: SyncerContext, fragment: FragmentState, staging: Staging, merges: LastMerges) -> None:
        self._context, self._layout, self._staging, self._merges = context, fragment.layout, staging, merges
        self.sum = RunningSum(fragment, staging.draft, context.offload, context.metrics)
        self._log = structlog.get_logger().bind(fragment=fragment.layout.id)

    async def commit(
        self, loaded: Loaded, merge: Merge, deltas: Sequence[Delta], began: float, interval: int
    ) -> Committed | None:
        """Merge, take the outer step and commit. After success `loaded` is at the new version.

        Args:
            loaded: the version that is merged into.
            merge: the window's decision.
            deltas: the contributions of `merge`, in its order.
            began: when the merge was decided.
            interval: of the version that is made (`ramps.stretched`).

        Returns:
            The tape's record; None if the outcome would not be finite, in which case nothing has changed.

        Raises:
            LeaseLost, HeadMoved, PayloadIncomplete, BusError: `loaded` is unchanged. If the answer was lost, the
                commit may have succeeded on the bus.
        """
        merged, published, outer_s = await self._step(loaded, deltas)
        if not merged.finite:
            return None
        record = self._record(loaded, merge, merged, began)
        self._merges.observe(record.merge_s, outer_s)
        commit = self._commit(loaded, merge, merged, published, record, interval)
        await self._context.bus.commit(commit)
        loaded.fragment.advance(merged)
        loaded.fragment.interval = interval
        loaded.head = head_after(loaded.head, commit)
        self._context.metrics.merged(record, outer_s)
        self._log.info(
            "fragment_merged",
            version=merged.version,
            learners=[c.learner for c in merged.contributions],
            tokens=commit.merged_tokens,
            reason=merge.reason,
            norm=round(merged.norm, 5),
            **{name: round(getattr(record, name), 3) for name in ("quorum_s", "grace_s", "upload_s", "merge_s")},
        )
        return record

    async def _step(self, loaded: Loaded, deltas: Sequence[Delta]) -> tuple[Merged, Published, float | None]:
        """Merge and take the outer step, while the finished part of the outcome is uploaded.

        Returns:
            The outcome; its payloads; and the duration of the step including any wait for a free thread, s, or None if
            the learners were only averaged.
        """
        context, fragment, head = self._context, loaded.fragment, loaded.head
        draft = await self.sum.draft(deltas)
        outer_momentum = fragment.outer(deltas)[1]
        draft.prepare(outer_momentum)
        async with self._staging.uploads(head.version + 1, draft.growing) as uploads:
            began = context.clock.now()
            merged: Merged = await context.offload(fragment.merge, deltas, head.merged, draft)
            outer_s = context.clock.now() - began if outer_momentum else None
            if context.recorder is not None and merged.finite:
                await context.recorder.merge(fragment, deltas, merged)
            return merged, await uploads.published(), outer_s

    def _record(self, loaded: Loaded, merge: Merge, merged: Merged, began: float) -> Committed:
        return Committed(
            fragment=self._layout.id,
            version=merged.version,
            digest=merged.digest,
            base_digest=loaded.head.digest,
            contributions=merged.contributions,
            reason=merge.reason[:500],
            norm=merged.norm,
            quorum_s=merge.quorum_s,
            grace_s=merge.grace_s,
            upload_s=began - merge.fixed_at,
            merge_s=self._context.clock.now() - began,
            syncer=self._context.name,
            unix_s=self._context.clock.unix(),
            interval=loaded.head.interval,
        )

    def _commit(
        self, loaded: Loaded, merge: Merge, merged: Merged, published: Published, record: Committed, interval: int
    ) -> Commit:
        offers = merge.contributions
        return Commit(
            nonce=self._context.nonce,
            expected=loaded.at,
            version=merged.version,
            digest=merged.digest,
            published=published,
            window=IDLE_VIEW.model_copy(update={"merge_s": self._merges.merge_s, "outer_s": self._merges.outer_s}),
            merged=merged.merged,
            record=record,
            interval=interval,
            norms=merged.norms,
            entries=tuple(o.entry_id for o in offers),
            delta_payloads=tuple(payload_key(self._context.bus, o) for o in offers),
            merged_tokens=sum(o.header.tokens for o in offers),
            retired=self._staging.retire(loaded.head),
        )
