"""Occasions on which a syncer saves (asyncio): while the run lasts, when the syncer is stopped, and after the run.

The lead begins a checkpoint in its place, and names it in the run's state. Every syncer that sees the name and finds
the checkpoint in its own place saves the fragments that it serves. The lead saves its own too. Then it goes through all
others, backwards, and saves those that are still missing, because their syncer is dead or saves to another place. No
syncer waits for another. The lead writes the manifest.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress

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
from diloco.syncer.serving.leases import holding
from diloco.syncer.times import TIMES


class Checkpoints:
    """Saves the checkpoints of one syncer, in its place."""

    def __init__(
        self, context: SyncerContext, place: str, lease_s: float, served: Callable[[], Collection[int]]
    ) -> None:
        """Begin with nothing saved.

        Raises:
            UsageError: the place is in a store that is not supported.
        """
        self._context, self._bus, self._lease_s, self._served = context, context.bus, lease_s, served
        self._shared = self._place = place_of(place)
        """The configured place; and the run's own folder in it, once the run's state has been seen."""
        self._known = asyncio.Event()
        self._leftovers = Leftovers()
        self._seen: str | None = None
        """The last checkpoint seen in the run's state, "" for none; None before the first check."""
        self._wanted = asyncio.Event()
        self.begun = self._own = ""
        """The checkpoint that this syncer is saving now as the lead, for the run's state; and the last one it began."""
        self._saved: tuple[object, ...] = ()
        """Content of the last checkpoint: the number of tokens, and the heads' digests."""
        self.problem = ""
        """Why the last checkpoint could not be saved, for the status."""
        self.fragment_saved = asyncio.Event()
        """Set whenever one more fragment is saved."""
        self.in_order = True
        """False once the last checkpoint, on stopping or at the end of the run, could not be saved."""
        self._log = structlog.get_logger()

    # --- while the run lasts ----------------------------------------------------------------------------

    async def keep(self, every_s: float, leads: Callable[[], bool]) -> None:
        """Save a checkpoint every `every_s` seconds while this syncer leads, if something has changed.

        Raises:
            BusError: a checkpoint could not be saved; call it again.
        """
        while True:
            await asyncio.sleep(min(every_s, TIMES.checkpoint_again_s) if self.problem else every_s)
            if leads():
                await self._save(self._served())

    def see(self, state: RunState | None) -> None:
        """Take the run's newest state; take part in a checkpoint that another syncer has begun since the last call."""
        if state is not None:
            self._settle(state)
        name = "" if state is None else state.checkpoint
        if not name and self._seen is not None:
            return  # the run's state was lost and will be written again
        if self._seen not in (None, name) and name != self._own:
            self._wanted.set()
        self._seen = name

    def _settle(self, state: RunState) -> None:
        self._place = self._shared.below(run_folder(self._bus.keys.run, state))
        self._known.set()

    async def help(self) -> None:
        """Save the fragments that this syncer serves in each checkpoint that another syncer has begun."""
        await self._known.wait()
        await self._try()
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            await self._help(self._served())

    async def _try(self) -> None:
        """Report now, before there is something to save, whether the place can be written.

        Checkpoints of other runs are never removed, so their number and size are logged.
        """
        own = self._place

        def look() -> tuple[list[str], int, int]:
            self._shared.check()
            others = [run for run in runs_in(self._shared) if str(run) != str(own)]
            found = [run.below(name) for run in others for name in run.names() if name.startswith(CHECKPOINT)]
            return [str(run) for run in others], len(found), sum(one.size_bytes() for one in found)

        try:
            runs, checkpoints, size_bytes = await self._context.offload(look)
        except (OSError, UsageError) as error:
            self.problem = f"checkpoints cannot be saved in {self._shared}: {error}"
            self._log.error("checkpoint_place_refused", error=str(error))
            return
        if runs:
            self._log.info("other_runs_found", runs=runs, checkpoints=checkpoints, bytes=size_bytes)

    async def _help(self, fragments: Collection[int]) -> None:
        """Save the given fragments that are still missing in the checkpoint that was seen last."""
        name, context = self._seen, self._context
        if not name:
            return
        folder = self._place.below(name)
        try:
            for p in sorted(fragments):
                names = await context.offload(folder.names)
                if STATE_FILE in names or SUMS_FILE not in names:
                    break  # it is complete already, or it is in another place
                if p not in found_fragments(names):
                    await save_fragment(self._bus, context.agreed.spec, folder, p, context.offload)
                self.fragment_saved.set()
        except (UsageError, PeerError, OSError) as error:  # the lead saves them too, or reports the error
            self._log.warning("checkpoint_not_helped", checkpoint=name, error=str(error))

    # --- at the end -------------------------------------------------------------------------------------

    async def save_stopped(self, fragments: Collection[int]) -> None:
        """Save a checkpoint because this syncer is stopped, if the run has begun; fragments: served until now."""
        if all(await self._bus.read_heads(range(self._count))):
            self.in_order = await self._save(fragments, told=True)

    async def save_finished(self, state: RunState, fragments: Collection[int]) -> None:
        """Save the finished run, unless another syncer has saved it in this place.

        The syncer that gets the lease of fragment 0 begins the checkpoint; the others help until it is done.
        """
        if len(state.manifest) < self._count:
            return  # the run was stopped before all fragments had a version
        nonce = self._context.nonce
        self.see(state)
        while not await self._bus.acquire_lease(0, nonce, self._lease_s):
            self.see(await self._bus.read_state())
            if self._wanted.is_set():
                self._wanted.clear()
                await self._help(fragments)
            await asyncio.sleep(min(TIMES.watch_s, self._lease_s / 3))
        async with holding(self._bus, [0], nonce, self._lease_s):
            saved = False
            with suppress(OSError):  # `_save` then reports what is wrong with the place
                saved = await self._context.offload(is_saved, self._place, state)
            if not saved:
                self.in_order = await self._save(fragments, told=True)
        await self._bus.release_lease(0, nonce)

    # --- one checkpoint ---------------------------------------------------------------------------------

    @property
    def _count(self) -> int:
        return len(self._context.layout.fragments)

    async def _save(self, fragments: Collection[int], told: bool = False) -> bool:
        """Save a checkpoint; return False if that fails, after reporting it in the log and the status.

        The run continues meanwhile, and `keep` retries on its own.

        Args:
            told: True if this syncer no longer moves the run, so that this method must name the checkpoint in the run's
                state itself.

        Raises:
            BusError: the bus failed; this is reported in the same way.
        """
        context = self._context
        try:
            state = await run_state(self._bus)
            self._settle(state)
            heads = await self._bus.read_heads(range(self._count))
            now = state.tokens, *(None if head is None else head.digest for head in heads)
            if now == self._saved and not told:
                self.problem = ""
                context.metrics.checkpoint_unix.set(context.clock.unix())
                return True
            name = checkpoint_name(state.tokens, context.random_hex)
            await begin_checkpoint(self._place, name, self._leftovers, context.offload)
            self.begun = self._own = name
            if told and 0 < len(fragments) < self._count:  # other syncers serve the rest, and may help
                await self._tell()
            order = [*sorted(fragments), *sorted({*range(self._count)} - {*fragments}, reverse=True)]
            told_of = self._each(order)
            folder = await finish_checkpoint(
                self._bus, context.agreed.spec, self._place, name, told_of, context.offload
            )
        except (UsageError, PeerError, OSError, BusError) as error:  # for example no version 0 yet, or a full disk
            safe = "all committed versions, as long as Redis runs"
            self._log.error("checkpoint_failed", path=str(self._place), error=str(error), safe=safe)
            if not isinstance(error, UsageError):
                self.problem = f"the last checkpoint could not be saved in {self._place} (will be retried): {error}"
            if isinstance(error, BusError):
                raise
            return False
        finally:
            self.begun = ""
        self.problem, self._saved = "", now
        context.metrics.checkpoint_unix.set(context.clock.unix())
        self._log.info("checkpoint_saved", path=str(folder))
        return True

    async def _tell(self) -> None:
        """Name the checkpoint in the run's state, unless another syncer leads by now, which then writes the state."""
        if not await self._bus.acquire_lease(0, self._context.nonce, self._lease_s):
            return
        state = await run_state(self._bus)
        await self._bus.write_state(state.model_copy(update={"checkpoint": self.begun}))
        if state.phase is not Phase.FINISHED:  # `save_finished` keeps holding it
            await self._bus.release_lease(0, self._context.nonce)

    def _each(self, fragments: Iterable[int]) -> Iterator[int]:
        for p in fragments:
            yield p
            self.fragment_saved.set()
