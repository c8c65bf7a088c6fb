"""From a window's deltas to the next version: their sum, the outer step, its payloads, the commit. asyncio.

The interval of the next version is decided here too, by the round trips before (`RoundTrips`, `ramps.stretched`).

Deltas are summed as they complete while others are still awaited, so that closing a window costs about one more of
them, not all. Nothing that is cached here changes before the commit has succeeded.
"""

import asyncio
import secrets
from collections import deque
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
from diloco.pipeline.messages.head import Head
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.messages.tape import Committed
from diloco.pipeline.pacing import known_steps
from diloco.pipeline.payload.codec import Payload
from diloco.pipeline.transfer.global_format import Kind, key_of
from diloco.pipeline.transfer.global_formats import FORMATS
from diloco.pipeline.transfer.payloads import Offload, push_growing
from diloco.syncer.admission import Offer
from diloco.syncer.context import RandomHex, SyncerContext
from diloco.syncer.merging.fragment import Delta, Draft, FragmentState, Merged, orthogonalises
from diloco.syncer.metrics import Metrics
from diloco.syncer.serving.initial_version import IDLE_VIEW
from diloco.syncer.window import Merge

REPLACED_BYTES = 64 * 2**20
"""Replaced globals live until they are as old as `REPLACED_TTL_S`, or all fragments' are together this large.

Of each fragment one stays in any case: whoever reads an older one could only train what is too stale to be merged. What
is held is memory that Redis touches for the first time, which costs it more than all else in the rounds until then.
"""


# --- payloads: staged for a commit, and replaced ones until they must go -------------------------------


class Uploads:
    """The payloads of a draft on their way to the bus."""

    def __init__(self, head: Head, draft: Draft, tasks: dict[Kind, asyncio.Task[Staged]]) -> None:
        self._head, self._draft, self._tasks = head, draft, tasks

    async def published(self) -> Published:
        """What the next head names, once all of it is there; the draft must be written in full by now.

        Raises:
            BusError: as the bus.
        """
        await asyncio.gather(*self._tasks.values())
        return self._draft.published(self._head, {kind: task.result() for kind, task in self._tasks.items()})


class Staging:
    """What an owner has uploaded of its fragment."""

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
        """Set when more of a draft is written."""
        self._replaced: deque[tuple[tuple[str, ...], float, int]] = deque()

    def draft(self) -> Draft:
        """Memory for a merge, of which `uploads` learns when another thread has written some."""
        tell = partial(asyncio.get_running_loop().call_soon_threadsafe, self._more.set)
        return Draft(self._layout, self._sync, tell)

    @asynccontextmanager
    async def uploads(self, head: Head, draft: Draft) -> AsyncIterator[Uploads]:
        """Upload a prepared draft under fresh keys while the block writes it; they expire unless a commit keeps them.

        Args:
            head: of the version that is merged into.
            draft: from `draft`.
        """
        version = head.version + 1
        tasks = {
            kind: asyncio.create_task(self._push(kind, version, payload))
            for kind, payload in draft.uploads(version).items()
        }
        try:
            yield Uploads(head, draft, tasks)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _push(self, kind: Kind, version: int, payload: Payload) -> Staged:
        key = key_of(self._bus.keys, kind, self._layout.id, version, self._random_hex(8))
        return await push_growing(self._bus, key, payload, self._sync.chunk_bytes, STAGED_TTL_S, self._more)

    def retire(self, head: Head, published: Published) -> tuple[str, ...]:
        """Keys of replaced globals that must go before their time, oldest first (the fragment's part of the byte cap).

        head: what is replaced. After a rewind it may name again what was replaced before.
        """
        kept, now = published.keys, self._clock.now()
        named = FORMATS[self._sync.global_codec].sizes(head, self._layout.elements)
        sizes = {key: size for key, size in named.items() if key not in kept}
        if sizes:
            self._replaced.append((tuple(sizes), now, sum(sizes.values())))
        while self._replaced and now - self._replaced[0][1] > REPLACED_TTL_S:
            self._replaced.popleft()
        retired: list[str] = []
        cap = REPLACED_BYTES // self._sync.fragments
        while len(self._replaced) > 1 and sum(size for _, _, size in self._replaced) > cap:
            retired += self._replaced.popleft()[0]
        return tuple(key for key in retired if key not in kept)


# --- the running sum -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Begun:
    """A draft with some contributions in its sum."""

    draft: Draft
    entries: tuple[str, ...] = ()
    """Their header entries, in order."""
    weights: tuple[tuple[float, float], ...] = ()
    """Share and factor of each: what it was multiplied by."""


class RunningSum:
    """A window's contributions, summed as they complete.

    The sum is of the window's sound deltas in the order in which they completed, and so is the merge: what was summed
    before does not show in any bit. `session` says which those are. One that has left the window since (its learner has
    published on a newer base) is in the sum already, so that is begun anew from the deltas, which are all kept until
    the commit. So it is where one more delta has changed the others' clip factors.
    """

    def __init__(
        self, fragment: FragmentState, new_draft: Callable[[], Draft], offload: Offload, metrics: Metrics
    ) -> None:
        """new_draft: makes memory for a merge (`Staging.draft`)."""
        self._fragment, self._new_draft, self._offload, self._metrics = fragment, new_draft, offload, metrics
        self._log = structlog.get_logger().bind(fragment=fragment.layout.id)
        self._begun: _Begun | None = None
        self._wanted: Sequence[Delta] = ()
        self._task: asyncio.Task[None] | None = None

    def follow(self, deltas: Sequence[Delta]) -> None:
        """Have these summed: all sound ones of the window, in order. One alone is left as it is."""
        self._wanted = deltas
        if self._task is not None and self._task.done():
            self._task.result()  # raises what ended it
            self._task = None
        if self._task is None and self._behind():
            self._task = asyncio.create_task(self._add_wanted())

    async def draft(self, deltas: Sequence[Delta]) -> Draft:
        """A draft for the merge of these, with some of them in its sum already; the next sum is another window's."""
        self._wanted = ()
        if self._task is not None:
            await self._task
        draft = self._fitting(deltas).draft
        self.close()
        return draft

    def close(self) -> None:
        """Forget all; what is being added in another thread goes nowhere."""
        if self._task is not None:
            self._task.cancel()
        self._begun, self._task, self._wanted = None, None, ()

    def _behind(self) -> bool:
        """Whether there is something to sum."""
        wanted, begun = tuple(delta.offer.entry_id for delta in self._wanted), self._begun
        if len(wanted) < 2:
            return False
        return begun is None or wanted != begun.entries or not self._continues(begun, self._wanted)

    def _fitting(self, deltas: Sequence[Delta]) -> _Begun:
        """What was begun, if these continue it; else a new one."""
        begun = self._begun
        if begun is not None and self._continues(begun, deltas):
            return begun
        if begun is not None and begun.entries:
            self._log.info("sum_begun_anew", summed=len(begun.entries))
            self._metrics.sums_begun_anew.inc()
        self._begun = begun = _Begun(self._new_draft())
        return begun

    def _continues(self, begun: _Begun, deltas: Sequence[Delta]) -> bool:
        """Whether the sum is of the first of these, each multiplied by what it is multiplied by among all of them."""
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
    """A fragment as its owner has it: the head as last seen, and the values of that version.

    Never trusted over the bus: after any failed write the head is read again.
    """

    head: Head
    fragment: FragmentState

    @property
    def at(self) -> tuple[int, bytes]:
        """The (version, digest) by which its owner judges; a write fails if the head is another one by now."""
        return self.head.version, self.head.digest


class RoundTrips:
    """How many steps the last two of one fragment took.

    A learner goes on training on its base until what it published is merged and here, and adopts that after a step. All
    of these steps are overwritten. `ramps.stretched` makes intervals longer by them. To wait for a quorum is no part of
    it: that is as long as others take, however long the interval is, and deltas are renewed meanwhile.
    """

    def __init__(self) -> None:
        self._took = (0.0, 0.0)

    def observe(self, seconds: float) -> None:
        """One more: grace and sync time of one window, the pull in it."""
        self._took = self._took[1], seconds

    def steps(self, step_times: Sequence[float], latency_s: float) -> float:
        """The step in which a learner adopts, and what passes besides; 0: not known yet.

        The shorter one of the last two counts, so that one hold-up is no sign.

        Args:
            step_times: of the learners that were merged lately, s; too short is not known yet. The higher median
                counts, so that one of two who says little cannot stretch what the other trains.
            latency_s: from a learner's decision to publish to its header at the syncer.
        """
        known, round_trip_s = known_steps(step_times), min(self._took)
        return 1 + (round_trip_s + latency_s) / median_high(known) if known and round_trip_s else 0.0


class LastMerges:
    """How long the last two merges of one fragment took; the shorter one counts, so that one hold-up is no sign."""

    def __init__(self, expected_outer_s: float = 0.0) -> None:
        """expected_outer_s: what the outer step should take, as reckoned before the first one."""
        self._took = (0.0, 0.0)
        self._outer: tuple[float, ...] = ()
        self._expected_outer_s = expected_outer_s

    def observe(self, merge_s: float, outer_s: float | None = None) -> None:
        """One more. outer_s: of it, sum and outer step alone; None: it only averaged, which tells nothing of a step."""
        self._took = self._took[1], merge_s
        if outer_s is not None:
            self._outer = *self._outer[-1:], outer_s

    @property
    def merge_s(self) -> float:
        """As `WindowView.merge_s`: the shorter of them; 0 before there are two."""
        return min(self._took)

    @property
    def measured(self) -> bool:
        """Whether `outer_s` is what steps took, not what they should."""
        return len(self._outer) == 2

    @property
    def outer_s(self) -> float:
        """As `WindowView.outer_s`: the same of the outer step; what was expected before there are two."""
        return min(self._outer) if self.measured else self._expected_outer_s


def payload_key(bus: Bus, offer: Offer) -> str:
    """Where a delta's payload lies."""
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
        """Merge, take the outer step and commit; `loaded` is at the new version then.

        Args:
            loaded: the version that is merged into.
            merge: the decision.
            deltas: its contributions, in its order.
            began: when it was decided.
            interval: of the version that is made (`ramps.stretched`).

        Returns:
            The tape's record; None if the outcome would not be finite: nothing has changed.

        Raises:
            LeaseLost, HeadMoved, PayloadIncomplete, BusError: nothing has changed, as far as is known.
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
        """Merge and take the outer step, while what is ready of the outcome goes to the bus.

        Returns:
            The outcome, its payloads, and how long the step took, a wait for a free thread included (s); None if it
            only averaged.
        """
        context, fragment, head = self._context, loaded.fragment, loaded.head
        draft = await self.sum.draft(deltas)
        outer_momentum = fragment.outer(deltas)[1]
        draft.prepare(outer_momentum, orthogonalises(self._layout, context.sync, outer_momentum))
        async with self._staging.uploads(head, draft) as uploads:
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
            retired=self._staging.retire(loaded.head, published),
        )
