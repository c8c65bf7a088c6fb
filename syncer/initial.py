"""Version 0 of each fragment, from a learner's complete upload. asyncio."""

import asyncio

import numpy as np
import structlog

from pipeline.agreement import differences
from pipeline.codec import decode, encode
from pipeline.errors import BadMessage, BadPayload
from pipeline.fragments import FragmentLayout
from pipeline.globals import Published, push_global
from pipeline.messages import Committed, Spec, WindowView
from pipeline.payloads import pull
from pipeline.ports import Bus, Clock, Commit

from .mending import adopted, say_rewound
from .staging import STAGED_TTL_S
from .watch import RunWatch

IDLE_VIEW = WindowView(state="idle", attempt=0, members=(), expected=0, reason="", deadline_unix_s=None)


AT_ONCE = 2
"""Fragments that get their version 0 at a time: each is on the bus twice meanwhile."""


class Beginning:
    """What all fragments of one syncer begin with."""

    def __init__(self, bus: Bus, clock: Clock, spec: Spec, *, nonce: str, syncer: str) -> None:
        self._bus, self._clock, self._sync, self._nonce, self._syncer = bus, clock, spec.sync, nonce, syncer
        self.spec, self.encoded = spec, encode(spec)
        self.turns = asyncio.Semaphore(AT_ONCE)
        """To be held for `commit`."""
        self._refused: set[tuple[int, str]] = set()
        """Fragments and nonces of uploads that cannot be used: told once."""

    async def another_spec(self) -> str:
        """How the bus's spec differs from this run's; "" if it does not, or there is none.

        Raises:
            BusError: ask again.
        """
        return self.differs(await self._bus.read_spec())

    def differs(self, found: bytes | None) -> str:
        """The same of what the bus was found to have."""
        if found is None or found == self.encoded:
            return ""
        try:
            return differences(self.spec, decode(Spec, found))
        except BadMessage as error:
            return f"  it cannot be read: {error}"

    async def commit(self, layout: FragmentLayout, watch: RunWatch) -> bool:
        """Commit version 0 of a fragment if a sound upload is there; False if there is none (yet).

        If live learners have a version, the bus has lost it: the tape says that the fragment went back.

        Raises:
            BusError: as the bus; a commit that was refused changed nothing.
        """
        upload = await self._bus.read_initial()
        if upload is None:
            return False
        key = self._bus.keys.initial_payload(layout.id, upload.nonce)
        try:
            payload = await pull(self._bus, key, layout.elements, "fp32", self._sync.chunk_bytes)
            values = payload.array()
            if not np.isfinite(values).all():
                raise BadPayload("the initial parameters have elements that are not finite")
        except BadPayload as error:
            if (layout.id, upload.nonce) not in self._refused:
                self._refused.add((layout.id, upload.nonce))
                structlog.get_logger().error(
                    "initial_upload_refused", fragment=layout.id, learner=upload.learner, error=str(error)
                )
            return False
        # A copy: learners may write to the key of an upload, and to no global. The same upload gives the same bytes.
        whole = await push_global(self._bus, layout.id, 0, upload.nonce, values, self._sync, STAGED_TTL_S)
        await self._bus.commit(self._first(layout.id, payload.digest, whole, upload.learner, key))
        at = (layout.id, 0, payload.digest)
        await say_rewound(self._bus, self._clock, self._nonce, at, IDLE_VIEW, adopted(watch, layout.id))
        return True

    def _first(self, fragment: int, digest: bytes, whole: Published, learner: str, key: str) -> Commit:
        """key: of the learner's upload, which goes with the commit."""
        reason = f"initial parameters of {learner}"
        return Commit(
            nonce=self._nonce,
            expected=None,
            version=0,
            digest=digest,
            payload=whole.payload,
            rest=whole.rest,
            momentum=None,
            window=IDLE_VIEW,
            merged=(),
            record=Committed.installed(
                fragment, 0, digest, reason=reason, syncer=self._syncer, unix_s=self._clock.unix()
            ),
            delta_payloads=(key,),
        )
