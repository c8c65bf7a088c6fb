"""From a decided merge to the next version: the sum, the outer step, its payloads, the commit. asyncio.

Nothing that is cached here changes before the commit has succeeded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from diloco.pipeline.bus.commits import Commit
from diloco.pipeline.bus.head_hash import head_after
from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.head import Head
from diloco.pipeline.messages.tape import Committed
from diloco.pipeline.pacing import LastMerges
from diloco.pipeline.ramps import stretched
from diloco.pipeline.transfer.global_format import Published
from diloco.syncer.admission import Offer
from diloco.syncer.context import SyncerContext
from diloco.syncer.merging.fragment import Delta, FragmentState, Merged, orthogonalises
from diloco.syncer.merging.running_sum import RunningSum
from diloco.syncer.merging.staging import REPLACED_TTL_S, Staging
from diloco.syncer.round_trips import RoundTrips
from diloco.syncer.serving.initial import IDLE_VIEW
from diloco.syncer.window import Merge


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


def payload_key(bus: Bus, offer: Offer) -> str:
    """Where a delta's payload lies."""
    h = offer.header
    return bus.keys.delta_payload(h.fragment, h.learner, h.incarnation, h.serial)


class Committing:
    """Makes the next versions of one loaded fragment."""

    def __init__(
        self,
        context: SyncerContext,
        layout: FragmentLayout,
        staging: Staging,
        merges: LastMerges,
        round_trips: RoundTrips,
    ) -> None:
        self._context, self._layout, self._staging = context, layout, staging
        self._merges, self._round_trips = merges, round_trips
        self._sum = RunningSum(layout.id, context.sync, staging.draft, context.offload, context.metrics)
        self._log = structlog.get_logger().bind(fragment=layout.id)

    def add_up(self, deltas: Sequence[Delta]) -> None:
        """Sum these, which are complete, while others are awaited."""
        self._sum.follow(deltas)

    def close(self) -> None:
        """Forget what was summed."""
        self._sum.close()

    async def commit(self, loaded: Loaded, merge: Merge, deltas: Sequence[Delta], began: float) -> Committed | None:
        """Merge, take the outer step and commit; `loaded` is at the new version then.

        Args:
            loaded: the version that is merged into.
            merge: the decision.
            deltas: its contributions, in its order.
            began: when it was decided.

        Returns:
            The tape's record; None if the outcome would not be finite: nothing has changed.

        Raises:
            LeaseLost, HeadMoved, PayloadIncomplete, BusError: nothing has changed, as far as is known.
        """
        merged, published = await self._step(loaded, deltas)
        if not merged.finite:
            return None
        record = self._record(loaded, merge, merged, began)
        self._merges.took(record.merge_s)
        commit = self._commit(loaded, merge, merged, published, record)
        await self._context.bus.commit(commit)
        loaded.fragment.advance(merged)
        loaded.fragment.interval = commit.interval
        loaded.head = head_after(loaded.head, commit)
        self._context.metrics.merged(record)
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

    async def _step(self, loaded: Loaded, deltas: Sequence[Delta]) -> tuple[Merged, Published]:
        """Merge and take the outer step, while what is ready of the outcome goes to the bus."""
        context, fragment, head = self._context, loaded.fragment, loaded.head
        draft = await self._sum.draft(deltas)
        outer_momentum = fragment.outer(deltas)[1]
        draft.prepare(outer_momentum, orthogonalises(self._layout, context.sync, outer_momentum))
        async with self._staging.uploads(head, draft) as uploads:
            merged: Merged = await context.offload(fragment.merge, deltas, head.merged, draft)
            if context.recorder is not None and merged.finite:
                await context.offload(context.recorder.merge, fragment, deltas, merged)
            return merged, await uploads.published()

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

    def _interval(self, version: int, merge: Merge) -> int:
        """Of the version that this merge makes."""
        sync, step_times = self._context.sync, [offer.header.step_s for offer in merge.contributions]
        return stretched(sync, version, self._round_trips.steps(step_times, 2 * self._context.watch.latency_s))

    def _commit(self, loaded: Loaded, merge: Merge, merged: Merged, published: Published, record: Committed) -> Commit:
        offers = merge.contributions
        return Commit(
            nonce=self._context.nonce,
            expected=loaded.at,
            version=merged.version,
            digest=merged.digest,
            payload=published.payload,
            rest=published.rest,
            momentum=published.outer_state,
            updates=published.updates,
            behind=published.behind,
            window=IDLE_VIEW.model_copy(update={"merge_s": self._merges.merge_s}),
            merged=merged.merged,
            record=record,
            interval=self._interval(merged.version, merge),
            entries=tuple(o.entry_id for o in offers),
            delta_payloads=tuple(payload_key(self._context.bus, o) for o in offers),
            merged_tokens=sum(o.header.tokens for o in offers),
            replaced_ttl_s=REPLACED_TTL_S,
            retired=self._staging.retire(loaded.head, published),
        )
