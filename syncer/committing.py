"""Making the next version from a window's deltas (asyncio): their sum, the outer step, its payloads, the commit.

Deltas are summed as they complete, while others are still awaited. When a window closes, only about one delta is
therefore left to sum, not all. The cached head and values change only once the commit has succeeded.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import structlog

from diloco.pipeline.bus.commits import Commit, Published, Staged
from diloco.pipeline.bus.ports import Bus, Clock, PayloadStore
from diloco.pipeline.bus.schema import head_after
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.fragment import IDLE_VIEW, Committed, Head
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.payload.codec import Grown, Payload
from diloco.pipeline.transfer.globals import GrowingGlobal, Kind, key_of, published
from diloco.pipeline.transfer.payloads import Offload, push_growing
from diloco.syncer.admission import Offer
from diloco.syncer.context import RandomHex, SyncerContext
from diloco.syncer.grace import LastMerges
from diloco.syncer.merging.fragment import Delta, FragmentState, Merged
from diloco.syncer.merging.merge import Contributions, Sum
from diloco.syncer.metrics import Metrics
from diloco.syncer.window import Merge

# Replaced globals live for `replaced_ttl_s`, or until those of all fragments together are larger than this. One of each
# fragment stays in any case; a learner that reads an older one could only train a delta that is too stale to be merged.
# The cap exists because held payloads make Redis touch fresh memory, its largest cost while their number still grows.
REPLACED_BYTES = 64 * 2**20


# --- payloads: staged for a commit, and replaced ones until they must go -------------------------------


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
        """Set when more of a version has been written."""
        self._replaced: dict[tuple[str, ...], float] = {}
        """Keys of each replaced global -> when it was replaced, oldest first."""

    def grown(self) -> Grown:
        """Return what wakes the uploads once another thread has written more of a version."""
        return partial(asyncio.get_running_loop().call_soon_threadsafe, self._more.set)

    @asynccontextmanager
    async def uploads(self, version: int, growing: GrowingGlobal) -> AsyncIterator[Callable[[], Awaitable[Published]]]:
        """Upload a version while the `async with` block writes it. Leaving the block cancels what is left.

        The keys are fresh, and expire unless a commit keeps them. `growing` must tell `grown` of each growth.

        Yields:
            A function that waits until all payloads are on the bus and returns them as the next head names them. It
            waits forever unless they are written in full; it raises BusError if an upload failed.
        """
        tasks = {
            kind: asyncio.create_task(self._push(kind, version, payload)) for kind, payload in growing.payloads.items()
        }

        async def finished() -> Published:
            staged = await asyncio.gather(*tasks.values())
            return published(dict(zip(tasks, staged, strict=True)), growing.payloads)

        try:
            yield finished
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _push(self, kind: Kind, version: int, payload: Payload) -> Staged:
        key = key_of(self._bus.keys, kind, self._layout.id, version, self._random_hex(8))
        return await push_growing(self._bus, key, payload, self._sync.chunk_bytes, BUS_TIMES.staged_ttl_s, self._more)

    def retire(self, head: Head) -> tuple[str, ...]:
        """Note that a head's globals are replaced; return keys of replaced ones that must go before their time.

        They are returned oldest first, as many as the fragment's part of `REPLACED_BYTES` requires.
        """
        keys, now = tuple(key for key in (head.payload, head.rest) if key), self._clock.now()
        self._replaced.pop(keys, None)  # after a rewind a head may name what was replaced before
        self._replaced[keys] = now
        while now - self._replaced[next(iter(self._replaced))] > BUS_TIMES.replaced_ttl_s:
            del self._replaced[next(iter(self._replaced))]
        retired: tuple[str, ...] = ()
        cap = REPLACED_BYTES // self._sync.fragments
        while len(self._replaced) > 1 and 4 * self._layout.elements * len(self._replaced) > cap:
            del self._replaced[oldest := next(iter(self._replaced))]
            retired += oldest
        return retired


# --- the running sum -----------------------------------------------------------------------------------


class RunningSum:
    """Sum of a window's contributions, extended as they complete.

    The window's sound deltas are summed in the order of their completion, which is also the order of the merge. So it
    makes no difference to any bit how many were summed before the window closed. `session` passes the deltas to sum. A
    sum cannot be undone: if a summed delta has left the window (its learner has published on a newer base), or if a new
    delta has changed the shares or clip factors of summed ones, the sum is restarted. All deltas are kept until the
    commit for that.
    """

    def __init__(self, fragment: FragmentState, offload: Offload, metrics: Metrics) -> None:
        self._fragment, self._offload, self._metrics = fragment, offload, metrics
        self._log = structlog.get_logger().bind(fragment=fragment.layout.id)
        self._total: Sum | None = None
        self._parts: tuple[tuple[str, float, float], ...] = ()
        """`_parts` of the deltas in the sum, in order."""
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

    async def take(self, deltas: Sequence[Delta]) -> Sum:
        """Return a sum for the merge of the given deltas, which may have the first ones already.

        The running sum is empty afterwards, for the next window.
        """
        self._wanted = ()  # so that `_add_wanted` stops after the addition that is in progress
        if self._task is not None:
            await self._task
        total = self._fitting(deltas, self._fragment.contributions(deltas))
        self.close()
        return total

    def close(self) -> None:
        """Drop the sum. An addition that still runs in another thread ends in a sum that nothing uses."""
        if self._task is not None:
            self._task.cancel()
        self._total, self._parts, self._task, self._wanted = None, (), None, ()

    def _behind(self) -> bool:
        """Return whether there is something to sum."""
        wanted = self._wanted
        return len(wanted) > 1 and self._parts != _parts(wanted, self._fragment.contributions(wanted))

    def _fitting(self, deltas: Sequence[Delta], contributions: Contributions) -> Sum:
        """Return the current sum if it has the first of these deltas, as they are weighted among all, or a new one."""
        if self._total is None or self._parts != _parts(deltas, contributions)[: len(self._parts)]:
            if self._parts:
                self._log.info("sum_begun_anew", summed=len(self._parts))
                self._metrics.sums_restarted.inc()
            self._total, self._parts = Sum(self._fragment.layout), ()
        return self._total

    async def _add_wanted(self) -> None:
        while self._behind():
            deltas = tuple(self._wanted)
            contributions = self._fragment.contributions(deltas)
            total = self._fitting(deltas, contributions)
            await self._offload(total.add, contributions.part(slice(len(self._parts), None)))
            self._parts = _parts(deltas, contributions)


def _parts(deltas: Sequence[Delta], contributions: Contributions) -> tuple[tuple[str, float, float], ...]:
    """Return header entry, share and clip factor of each delta."""
    entries = (delta.offer.entry_id for delta in deltas)
    return tuple(zip(entries, contributions.shares, contributions.factors, strict=True))


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


def payload_key(bus: Bus, offer: Offer) -> str:
    """Return the bus key of a delta's payload."""
    h = offer.header
    return bus.keys.delta_payload(h.fragment, h.learner, h.incarnation, h.serial)


class Committing:
    """Makes the next versions of one loaded fragment."""

    def __init__(self, context: SyncerContext, fragment: FragmentState, staging: Staging, merges: LastMerges) -> None:
        self._context, self._layout, self._staging, self._merges = context, fragment.layout, staging, merges
        self.sum = RunningSum(fragment, context.offload, context.metrics)
        self._log = structlog.get_logger().bind(fragment=fragment.layout.id)

    async def commit(
        self, loaded: Loaded, merge: Merge, deltas: Sequence[Delta], began: float, interval: int
    ) -> Committed | None:
        """Merge, take the outer step and commit. After success `loaded` is at the new version.

        Args:
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
        if published is None:
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
            norm=round(record.norm, 5),
            **{name: round(getattr(record, name), 3) for name in ("quorum_s", "grace_s", "upload_s", "merge_s")},
        )
        return record

    async def _step(self, loaded: Loaded, deltas: Sequence[Delta]) -> tuple[Merged, Published | None, float | None]:
        """Merge and take the outer step, while the finished part of the outcome is uploaded.

        Returns:
            The outcome; its payloads, or None if it is not finite; and the duration of the step including any wait for
            a free thread, s, or None if the learners were only averaged.
        """
        context, fragment = self._context, loaded.fragment
        total = await self.sum.take(deltas)
        step = fragment.outer_step(deltas, total, self._staging.grown())
        async with self._staging.uploads(fragment.version + 1, step.growing) as uploaded:
            began = context.clock.now()
            merged: Merged = await context.offload(fragment.merge, deltas, loaded.head.merged, step)
            outer_s = context.clock.now() - began if fragment.outer(deltas).mu else None
            if context.recorder is not None and merged.finite:
                await context.recorder.merge(fragment, deltas, merged)
            return merged, await uploaded() if merged.finite else None, outer_s

    def _record(self, loaded: Loaded, merge: Merge, merged: Merged, began: float) -> Committed:
        return Committed(
            fragment=self._layout.id,
            version=merged.version,
            digest=merged.stepped.digest,
            base_digest=loaded.head.digest,
            contributions=merged.contributions,
            reason=merge.reason[:500],
            norm=merged.stepped.reduced.norm,
            quorum_s=merge.quorum_s,
            grace_s=merge.grace_s,
            upload_s=began - merge.fixed_at,
            merge_s=self._context.clock.now() - began,
            syncer=self._context.name,
            unix_s=self._context.clock.unix(),
            interval=loaded.head.interval,
            step_norm=merged.stepped.norm,
            rho=merged.rho,
        )

    def _commit(
        self, loaded: Loaded, merge: Merge, merged: Merged, published: Published, record: Committed, interval: int
    ) -> Commit:
        offers = merge.contributions
        return Commit(
            nonce=self._context.nonce,
            expected=loaded.at,
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
