"""When a syncer saves: while the run lasts, when it is told to stop, when the run is finished. asyncio.

The lead begins a checkpoint in its place, and names it in the run's state. Every syncer that sees the name, and finds
it in its own place, saves the fragments that it serves. So does the lead; then it goes through all others, backwards,
and saves those that nobody has saved yet: of a dead syncer, or of one that saves to a place of its own. Nobody waits
for anybody. The lead writes the manifest.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator

import structlog

from diloco.pipeline.errors import BusError, PeerError, UsageError
from diloco.pipeline.files.sums import SUMS_FILE
from diloco.pipeline.messages.run import Phase, RunState
from diloco.syncer.checkpoints.loading import is_saved, runs_in
from diloco.syncer.checkpoints.manifest import CHECKPOINT, STATE_FILE, Leftovers, found_fragments
from diloco.syncer.checkpoints.places import place_of
from diloco.syncer.checkpoints.saving import (
    begin_checkpoint,
    checkpoint_name,
    finish_checkpoint,
    run_folder,
    run_state,
    save_fragment,
)
from diloco.syncer.context import SyncerContext
from diloco.syncer.serving.closing import POLL_S
from diloco.syncer.serving.leases import holding

AGAIN_S = 60.0
"""A checkpoint that could not be saved is tried again so soon, if the next one is not due before."""


class Checkpoints:
    """One syncer's, in its place."""

    def __init__(
        self, context: SyncerContext, place: str, lease_s: float, served: Callable[[], Collection[int]]
    ) -> None:
        """served: the fragments that this syncer serves now.

        Raises:
            UsageError: the place is of a store that is not known here.
        """
        self._context, self._bus, self._lease_s, self._served = context, context.bus, lease_s, served
        self._shared = self._place = place_of(place)
        """What people gave; and in it the run's own folder, once its state has been seen."""
        self._known = asyncio.Event()
        self._leftovers = Leftovers()
        self._seen: str | None = None
        """The checkpoint that was last seen to be begun; "": none by the first look."""
        self._wanted = asyncio.Event()
        self.begun = self._own = ""
        """The one that this syncer is saving as the lead, for the run's state; and the last one that it began."""
        self._saved: tuple[object, ...] = ()
        """What the last one was of: tokens, and the heads' digests."""
        self.problem = ""
        """Why the last one could not be saved, in words for the status."""
        self.went_on = asyncio.Event()
        """Set when one more fragment is saved, by this syncer as the lead or by others."""
        self.in_order = True
        """False once the last one, on stopping or at the end, could not be saved."""
        self._log = structlog.get_logger()

    # --- while the run lasts ----------------------------------------------------------------------------

    async def keep(self, every_s: float, leads: Callable[[], bool]) -> None:
        """Save one every so often, while this syncer leads and something has changed.

        Raises:
            BusError: one could not be saved; call it again.
        """
        while True:
            await asyncio.sleep(min(every_s, AGAIN_S) if self.problem else every_s)
            if leads():
                await self._save(self._served())

    def see(self, state: RunState | None) -> None:
        """Look for a checkpoint that has begun. What has begun before the first look is no matter of ours."""
        if state is not None:
            self._settle(state)
        name = "" if state is None else state.checkpoint
        if not name and self._seen is not None:
            return  # the run's state was lost, and is told anew
        if self._seen not in (None, name) and name != self._own:
            self._wanted.set()
        self._seen = name

    def _settle(self, state: RunState) -> None:
        self._place = self._shared.below(run_folder(self._bus.keys.run, state))
        self._known.set()

    async def help(self) -> None:
        """Save what this syncer serves in each checkpoint that another one has begun."""
        await self._known.wait()
        await self._try()
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self._help(self._served())

    async def _try(self) -> None:
        """Whether the place can be written is said now, not first when there is something to save.

        Nobody removes what other runs have saved in it: so people are told how much that is.
        """
        own = self._place

        def look() -> tuple[list[str], int, int]:
            self._shared.check()
            others = [run for run in runs_in(self._shared) if str(run) != str(own)]
            found = [run.below(name) for run in others for name in run.names() if name.startswith(CHECKPOINT)]
            return [str(run) for run in others], len(found), sum(one.size_bytes() for one in found)

        try:
            runs, checkpoints, size_bytes = await self._context.offload(look)
        except (OSError, UsageError) as error:  # said now, not first when there is something to save
            self.problem = f"no checkpoint can be saved in {self._shared} as it is: {error}"
            self._log.error("checkpoint_place_refused", error=str(error))
            return
        if runs:
            self._log.info("other_runs_found", runs=runs, checkpoints=checkpoints, bytes=size_bytes)

    async def _help(self, fragments: Collection[int]) -> None:
        """Save those of these fragments that nobody has saved yet in the checkpoint that was seen last."""
        name, context = self._seen, self._context
        if not name:
            return
        folder = self._place.below(name)
        try:
            for p in sorted(fragments):
                names = await context.offload(folder.names)
                if STATE_FILE in names or SUMS_FILE not in names:
                    break  # it is whole without us, or in another place
                if p not in found_fragments(names):
                    await save_fragment(self._bus, context.agreed.spec, folder, p, context.offload)
                self.went_on.set()
        except (UsageError, PeerError, OSError) as error:  # whoever has begun it saves them too, or says why not
            self._log.warning("checkpoint_not_helped", checkpoint=name, error=str(error))

    # --- at the end -------------------------------------------------------------------------------------

    async def save_stopped(self, fragments: Collection[int]) -> None:
        """The checkpoint of a syncer that is told to stop, if the run has begun. fragments: served until now."""
        if all(await self._bus.read_heads(range(self._count))):
            self.in_order = await self._save(fragments, told=True)

    async def save_finished(self, state: RunState, fragments: Collection[int]) -> None:
        """The last checkpoint, unless another syncer saved it there: one begins it, whoever is left helps."""
        if len(state.manifest) < self._count:
            return  # it was stopped before all fragments had a version
        nonce = self._context.nonce
        self.see(state)
        while not await self._bus.acquire_lease(0, nonce, self._lease_s):
            self.see(await self._bus.read_state())
            if self._wanted.is_set():
                self._wanted.clear()
                await self._help(fragments)
            await asyncio.sleep(min(POLL_S, self._lease_s / 3))
        async with holding(self._bus, [0], nonce, self._lease_s):
            if not await self._is_saved(state):
                self.in_order = await self._save(fragments, told=True)
        await self._bus.release_lease(0, nonce)

    async def _is_saved(self, state: RunState) -> bool:
        try:
            saved: bool = await self._context.offload(is_saved, self._place, state)
        except OSError:  # saving says what is wrong with the place
            return False
        return saved

    # --- one checkpoint ---------------------------------------------------------------------------------

    @property
    def _count(self) -> int:
        return len(self._context.layout.fragments)

    async def _save(self, fragments: Collection[int], told: bool = False) -> bool:
        """Save one; False, and said in log and status, if that fails. The run goes on, the next try comes by itself.

        fragments: those that are this syncer's to save. told: this syncer does not move the run any more, so nobody
        else names the checkpoint in the run's state.

        Raises:
            BusError: this is said too.
        """
        context = self._context
        try:
            state = await run_state(self._bus)
            self._settle(state)
            heads = await self._bus.read_heads(range(self._count))
            now = state.tokens, *(None if head is None else head.digest for head in heads)
            if now == self._saved and not told:
                self.problem = ""
                return True
            name = checkpoint_name(state.tokens, context.random_hex)
            await begin_checkpoint(self._place, name, self._leftovers, context.offload)
            self.begun = self._own = name
            if told and 0 < len(fragments) < self._count:  # others have some, and may help
                await self._tell()
            order = [*sorted(fragments), *sorted({*range(self._count)} - {*fragments}, reverse=True)]
            told_of = self._each(order)
            folder = await finish_checkpoint(
                self._bus, context.agreed.spec, self._place, name, told_of, context.offload
            )
        except (UsageError, PeerError, OSError, BusError) as error:  # fragments are not there yet, or the disk is full
            safe = "all committed versions, on the bus"
            self._log.error("checkpoint_failed", path=str(self._place), error=str(error), safe=safe)
            if not isinstance(error, UsageError):
                self.problem = f"the last checkpoint could not be saved in {self._place}, and is tried again: {error}"
            if isinstance(error, BusError):
                raise
            return False
        finally:
            self.begun = ""
        self.problem, self._saved = "", now
        self._log.info("checkpoint_saved", path=str(folder))
        return True

    async def _tell(self) -> None:
        """Name the checkpoint in the run's state, unless another syncer leads by now: the state is its to write."""
        if not await self._bus.acquire_lease(0, self._context.nonce, self._lease_s):
            return
        state = await run_state(self._bus)
        await self._bus.write_state(state.model_copy(update={"checkpoint": self.begun}))
        if state.phase is not Phase.FINISHED:  # whoever saves the last one holds it on
            await self._bus.release_lease(0, self._context.nonce)

    def _each(self, fragments: Iterable[int]) -> Iterator[int]:
        for p in fragments:
            yield p
            self.went_on.set()
