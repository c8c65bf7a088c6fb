"""Owner of one fragment (asyncio): while it holds the lease, it loads the fragment and runs a session for it.

`supervisor` makes one owner for each fragment of the run; `leases` sets and clears the owner's lease. After any failed
write the owner reads the head again and rebuilds the window from the streams, which hold all pending deltas.
"""

import asyncio

import structlog

from diloco.pipeline.errors import (
    BadPayload,
    BusError,
    HeadMoved,
    LeaseLost,
    PayloadIncomplete,
    PeerError,
)
from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.fragment import IDLE_VIEW, Head
from diloco.pipeline.pacing import Pace
from diloco.pipeline.ramps import interval_in_force
from diloco.pipeline.transfer.globals import pull_state
from diloco.pipeline.waiting import first_of
from diloco.syncer.committing import Loaded
from diloco.syncer.context import SyncerContext
from diloco.syncer.installing import InitialVersions, say_rewound
from diloco.syncer.merging.fragment import FragmentState, finite
from diloco.syncer.session import OwnerState, Session
from diloco.syncer.times import TIMES
from diloco.syncer.window import State


class FragmentOwner:
    """Serves one fragment while its lease is held; a merge in progress ends before the lease is given back."""

    def __init__(self, context: SyncerContext, layout: FragmentLayout, initial: InitialVersions) -> None:
        self._context, self._bus, self._clock = context, context.bus, context.clock
        self._layout, self._initial, self.id = layout, initial, layout.id
        self.lease = asyncio.Event()
        """Set while the lease is held and is not about to be given back."""
        self.idle = asyncio.Event()
        """Set while this owner does nothing that needs the lease."""
        self.idle.set()
        self.wake = asyncio.Event()
        """Set to make the window decide again."""
        self.state = OwnerState(context, layout)
        self.loaded: Loaded | None = None
        """Head and values as last seen; None before the first load, and once another syncer serves the fragment."""
        self.session: Session | None = None
        """None while the fragment is not served here."""
        self._log = structlog.get_logger().bind(fragment=layout.id)

    @property
    def pace(self) -> Pace | None:
        """Durations of the fragment's merges; None before the fragment is loaded."""
        loaded, merges = self.loaded, self.state.merges
        return None if loaded is None else Pace(self.id, loaded.head.version, merges.merge_s, merges.outer_s)

    @property
    def interval(self) -> int:
        """Inner steps between two syncs, in force for learners that train on its head; 0 before it is loaded."""
        head = None if self.loaded is None else self.loaded.head
        return 0 if head is None else interval_in_force(self._context.sync, head.version, head.interval)

    @property
    def suspected(self) -> frozenset[str]:
        """Learners for which this owner does not wait."""
        return self.state.suspects.learners if self.session is None else self.session.suspected()

    @property
    def window_open(self) -> bool:
        """True if the fragment's window is not idle."""
        return self.session is not None and self.session.window.state is not State.IDLE

    # --- life -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the run is frozen, through lost leases, moved heads and bus outages."""
        waits = TIMES.fragment_retry.waits()
        while not self._context.watch.frozen:
            await self._lease_or_freeze()
            if not self._serves():
                continue
            self.idle.clear()
            began = self._clock.now()
            try:
                await self._serve()
                continue
            except LeaseLost:
                self._log.warning("lease_lost")
                self._context.metrics.lease_losses.inc()
                self.lease.clear()
                continue
            except (HeadMoved, PayloadIncomplete) as error:
                self._log.warning("commit_refused", error=str(error))
            except (BusError, PeerError) as error:  # also raised for a payload that is gone because its head moved
                self._log.warning("fragment_reloading", error=str(error))
                self._context.metrics.bus_errors.inc()
            finally:
                self.idle.set()
            await asyncio.sleep(waits.after(self._clock.now() - began))

    def forget(self) -> None:
        """Drop the cached head and values, since another syncer serves the fragment now."""
        self.loaded = None

    def check_soon(self) -> None:
        """Check head and payloads on the bus at once, since it may have lost something."""
        self.state.repair.due_s = self._clock.now()
        self.wake.set()

    def knows(self, head: Head | None) -> bool:
        """Return whether the cached head is this one; with None, whether any head is cached."""
        loaded = self.loaded
        return loaded is not None and (head is None or (head.version, head.digest) == loaded.at)

    def _serves(self) -> bool:
        """Return whether a merge may begin."""
        return self.lease.is_set() and not self._context.watch.frozen

    async def _lease_or_freeze(self) -> None:
        while not (self.lease.is_set() or self._context.watch.frozen):
            self.wake.clear()
            await first_of(self.lease, self.wake)

    async def _serve(self) -> None:
        if (loaded := await self.load()) is None:
            return
        self.session = Session(self._context, self._layout, loaded, self.state, self.wake, self._serves)
        try:
            await self.session.run()
        finally:
            self.session = None

    # --- loading ----------------------------------------------------------------------------------------

    async def load(self) -> Loaded | None:
        """Make the cached state equal to the head on the bus, and return it.

        Returns:
            The cached state; None if this owner has to stop before there is a head.

        Raises:
            BadPayload: the values on the bus cannot be merged into.
            LeaseLost, HeadMoved, BusError: the cached state is unchanged.
        """
        if (head := await self._head()) is None:
            return None
        cached = self.loaded
        if cached is not None and cached.fragment.version > head.version:
            at = (self.id, head.version, head.digest)
            await say_rewound(self._context, at, IDLE_VIEW, was=cached.fragment.version)
            head = head.model_copy(update={"window": IDLE_VIEW})
        if cached is None or cached.at != (head.version, head.digest):
            cached = Loaded(head, await self._pull(head))
        cached.head = head
        cached.fragment.interval, cached.fragment.norms = head.interval, head.norms
        self.loaded = cached
        self.state.repair.due_s = self._clock.now()  # a commit may have been refused because something has gone
        return cached

    async def _head(self) -> Head | None:
        """Return the head on the bus, once there is one; None if this owner has to stop before."""
        while (head := (await self._bus.read_heads([self.id]))[0]) is None:
            async with self._initial.turns:
                if not self._serves():
                    return None
                installed = await self._install()
            if not installed:
                await asyncio.sleep(TIMES.poll_s)
        return head

    async def _install(self) -> bool:
        """Give the fragment the head that this owner last saw, otherwise version 0; return whether it has one."""
        if (loaded := self.loaded) is None:
            return await self._initial.commit(self._layout)
        if self._context.recorder is not None:
            await self._context.recorder.loaded(loaded.fragment)
        await self.state.repair.put_back(loaded.head, loaded.fragment)
        return True

    async def _pull(self, head: Head) -> FragmentState:
        """Pull the values and the momentum of a head's version.

        Raises:
            BadPayload: the bus has another run's spec, or the values are not finite.
        """
        context, sync = self._context, self._layout.sync(self._context.sync)
        if told := await context.agreed.another():
            raise BadPayload(f"the head may belong to another run, whose spec is on the bus:\n{told}")
        state = await pull_state(self._bus, head, self._layout.elements, sync, context.offload)
        if not await context.offload(finite, *state):
            raise BadPayload(f"version {head.version} on the bus is not finite: resume from an earlier checkpoint")
        fragment = FragmentState(self._layout, sync, head.version, head.digest, *state)
        if context.recorder is not None:
            await context.recorder.loaded(fragment)
        return fragment
