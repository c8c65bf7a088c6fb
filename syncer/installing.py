"""Versions of a fragment that no merge makes (asyncio): version 0, and those that an owner puts back from its memory.

Version 0 comes from a learner's complete upload. Later the bus may lose a head (deleted, or because it came back
empty), without which a fragment makes no progress at all; or a payload (evicted, deleted, damaged), which would stop
all that need it: learners that lack the version, learners that join, and the syncer that takes over. As long as the
fragment's owner lives, the same bits are in its memory.
"""

import asyncio

import structlog

from diloco.pipeline.bus.commits import Commit, Published, Republication
from diloco.pipeline.bus.schema import payload_names
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import BadPayload, HeadMoved
from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.fragment import IDLE_VIEW, NOTHING_MERGED, Committed, Head, Rewound, WindowView
from diloco.pipeline.transfer.globals import published_by, push_global
from diloco.pipeline.transfer.payloads import pull
from diloco.syncer.context import SyncerContext
from diloco.syncer.membership import RunWatch
from diloco.syncer.merging.fragment import FragmentState
from diloco.syncer.merging.merge import all_finite
from diloco.syncer.times import TIMES

# Fragments that get their version 0 at the same time: two, or one in 32 of all if that is more. They are bounded
# because each of them is on the bus twice meanwhile.
AT_ONCE, PART = 2, 32
FRESH = (
    "they are newly initialised, but the run has trained parameters that Redis lacks: wait up to a minute for a "
    "learner that has them to upload them, or start a syncer with the run's checkpoint, with the same command. If "
    "neither helps, stop all parties, delete the run with `diloco runs delete`, and start everything again"
)


class InitialVersions:
    """Commits version 0 of one syncer's fragments, a few at a time."""

    def __init__(self, context: SyncerContext) -> None:
        self._context, self._bus, self._sync, self._offload = context, context.bus, context.sync, context.offload
        self.turns = asyncio.Semaphore(max(AT_ONCE, context.sync.fragments // PART))
        """Must be held while `commit` is called."""
        self._unusable: set[str] = set()
        """Nonces of uploads that cannot be used. Each is reported once, for its first fragment."""

    async def commit(self, layout: FragmentLayout) -> bool:
        """Commit version 0 of a fragment if a sound upload is there; return False if there is none (yet).

        If live learners have a version already, the bus has lost it, and the tape records that the fragment was
        rewound. A run that has merged takes no fresh values: a Redis node lost its heads, or a syncer died while it
        restored a checkpoint.

        Raises:
            BusError: the bus failed; a commit that was refused changed nothing.
        """
        context, upload, state = self._context, await self._bus.read_initial(), self._context.watch.state
        # The state must exist first (the lead writes it), so that every merge belongs to the part of the run that it
        # begins.
        if upload is None or state is None:
            return False
        key = self._bus.keys.initial_payload(layout.id, upload.nonce)
        try:
            if state.has_merged and upload.began_unix_s is None:
                raise BadPayload(FRESH)
            payload = await pull(self._bus, key, layout.elements, "fp32", self._sync.chunk_bytes)
            values = payload.array()
            if not await self._offload(all_finite, values):
                raise BadPayload("the initial parameters have non-finite elements")
        except BadPayload as error:
            if upload.nonce not in self._unusable:
                self._unusable.add(upload.nonce)
                structlog.get_logger().error(
                    "initial_upload_refused", fragment=layout.id, learner=upload.learner, error=str(error)
                )
            return False
        # The values are copied, because learners may write to the key of an upload but not to the key of a global. If
        # two syncers do this with the same upload, they write the same bytes.
        sync = layout.sync(self._sync)
        whole = await push_global(
            self._bus, layout.id, 0, upload.nonce, values, sync, BUS_TIMES.staged_ttl_s, self._offload
        )
        record = Committed(
            fragment=layout.id,
            version=0,
            digest=payload.digest,
            reason=f"initial parameters of {upload.learner}",
            syncer=context.name,
            unix_s=context.clock.unix(),
            began_unix_s=state.began_unix_s,
            **NOTHING_MERGED,
        )
        await self._bus.commit(
            Commit(
                nonce=context.nonce,
                expected=None,
                published=whole,
                window=IDLE_VIEW,
                merged=(),
                merged_tokens=upload.merged_tokens if upload.began_unix_s is not None else 0,
                record=record,
                delta_payloads=(key,),  # the upload
            )
        )
        await say_rewound(context, (layout.id, 0, payload.digest), IDLE_VIEW, _adopted(context.watch, layout.id))
        return True


class Repair:
    """Checks the head and the payloads of one fragment, and puts back what is lost."""

    def __init__(self, context: SyncerContext, layout: FragmentLayout) -> None:
        self._context, self._bus, self._layout = context, context.bus, layout
        self._sync = layout.sync(context.sync)
        self.due_s = 0.0
        """When the next check is due."""

    async def check(self, head: Head, fragment: FragmentState) -> Head:
        """Check that the payloads that a head names are there, and publish them again if not; return the current head.

        `head` is the last one that its owner knows, and `fragment` is at its version.

        Raises:
            HeadMoved: the head on the bus is gone or is another one; nothing was changed.
            LeaseLost, PayloadIncomplete, BusError: nothing was changed.
        """
        self.due_s = self._context.clock.now() + TIMES.repair_s
        (there,) = await self._bus.read_heads([self._layout.id])
        if there is None or (there.version, there.digest) != (head.version, head.digest):
            raise HeadMoved(f"the head of fragment {head.fragment} is {'gone' if there is None else 'a different one'}")
        if not (why := await self._lacking(there)):
            return there
        structlog.get_logger().warning("global_republished", fragment=there.fragment, version=there.version, why=why)
        whole, at = await self._stage(there, fragment), (there.version, there.digest)
        await self._bus.republish(there.fragment, Republication(self._context.nonce, at, whole))
        return there.model_copy(update=payload_names(whole))

    async def put_back(self, head: Head, fragment: FragmentState) -> None:
        """Commit a version again whose head is gone, with the same bits, momentum, merged bases and totals.

        With the head the bus lost the pending deltas, and maybe later versions, so the tape records that the fragment
        was rewound. For the arguments see `check`.

        Raises:
            HeadMoved: there is a head by now; nothing was changed.
            LeaseLost, PayloadIncomplete, BusError: nothing was changed.
        """
        context, p = self._context, head.fragment
        reason = "restored from its syncer's memory, because the bus had lost its head"
        # The attempt must be later than any that learners know.
        view = IDLE_VIEW.model_copy(update={"attempt": head.window.attempt + 1, "reason": reason})
        there = not await self._lacking(head)
        published = self._named(head) if there else await self._stage(head, fragment)
        record = Committed(
            fragment=p,
            version=head.version,
            digest=head.digest,
            reason=reason,
            syncer=context.name,
            unix_s=context.clock.unix(),
            **NOTHING_MERGED,
        )
        commit = Commit(
            nonce=context.nonce,
            expected=None,
            published=published,
            window=view,
            merged=head.merged,
            record=record,
            interval=head.interval,
            norms=head.norms,
            retired=() if there else tuple(one.key for one in self._named(head).payloads),
            lost=head,
        )
        await self._bus.commit(commit)
        structlog.get_logger().warning("head_put_back", fragment=p, version=head.version, uploaded=not there)
        was = max(head.version, _adopted(context.watch, p))
        await say_rewound(context, (p, head.version, head.digest), view, was)

    def _named(self, head: Head) -> Published:
        return published_by(head, self._layout.elements, self._sync)

    async def _lacking(self, head: Head) -> str:
        """Return a text that names a head's payloads that are gone or incomplete; "" if there are none."""
        due = {one.key: one.chunks for one in self._named(head).payloads}
        have = await asyncio.gather(*map(self._bus.count_chunks, due))
        gone = [key for key, count in zip(due, have, strict=True) if count != due[key]]
        return f"its payloads {', '.join(gone)} are missing" if gone else ""

    async def _stage(self, head: Head, fragment: FragmentState) -> Published:
        """Upload the whole version under fresh keys."""
        at, offload = (self._layout.id, head.version, self._context.random_hex(8)), self._context.offload
        values, momentum = fragment.theta, fragment.momentum
        return await push_global(self._bus, *at, values, self._sync, BUS_TIMES.staged_ttl_s, offload, momentum)


def _adopted(watch: RunWatch, fragment: int) -> int:
    """Return the latest version of a fragment that a live learner has; -1 if none has any."""
    return max((s.report.versions[fragment] for s in watch.live() if fragment < len(s.report.versions)), default=-1)


async def say_rewound(context: SyncerContext, at: tuple[int, int, bytes], view: WindowView, was: int) -> None:
    """Record on the tape that a fragment was rewound, if it had at least its current version before.

    `at` is fragment, version and digest of the current head; `was` the version before, -1 if none is known.

    Raises:
        BusError: see `Bus.write_window`.
    """
    p, version, digest = at
    if was >= version:
        structlog.get_logger().warning("rewound", fragment=p, version=version, was_version=was)
        record = Rewound(fragment=p, version=version, was_version=was, unix_s=context.clock.unix())
        await context.bus.write_window(p, context.nonce, (version, digest), view, record)
        context.metrics.rewinds.inc()
