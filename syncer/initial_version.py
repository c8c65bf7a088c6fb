"""Commit of version 0 of each fragment, from a learner's complete upload. Runs on asyncio."""

import asyncio

import structlog

from diloco.pipeline.bus.commits import Commit, Published
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import BadPayload
from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.head import IDLE_VIEW
from diloco.pipeline.messages.run import InitialUpload
from diloco.pipeline.messages.tape import Committed
from diloco.pipeline.transfer.globals import push_global
from diloco.pipeline.transfer.payloads import pull
from diloco.syncer.context import SyncerContext
from diloco.syncer.merging.merge import all_finite
from diloco.syncer.merging.repair import adopted, say_rewound

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
        upload, state = await self._bus.read_initial(), self._context.watch.state
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
            syncer=self._context.name,
            unix_s=self._context.clock.unix(),
            began_unix_s=state.began_unix_s,
        )
        await self._bus.commit(self._first(record, whole, upload, key))
        at = (layout.id, 0, payload.digest)
        was = adopted(self._context.watch, layout.id)
        if await say_rewound(self._bus, self._context.clock, self._context.nonce, at, IDLE_VIEW, was):
            self._context.metrics.rewinds.inc()
        return True

    def _first(self, record: Committed, whole: Published, upload: InitialUpload, key: str) -> Commit:
        """Return the commit of version 0; the learner's upload at `key` is deleted by it."""
        return Commit(
            nonce=self._context.nonce,
            expected=None,
            version=0,
            digest=record.digest,
            published=whole,
            window=IDLE_VIEW,
            merged=(),
            merged_tokens=upload.merged_tokens if upload.began_unix_s is not None else 0,
            record=record,
            delta_payloads=(key,),
        )
