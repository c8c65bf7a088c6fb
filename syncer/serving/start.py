"""Start of a syncer (asyncio): the spec that all agree on, a checkpoint to resume, and whether the bus has memory."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import NamedTuple, TypeVar

import structlog

from diloco.pipeline.agreement import WAITING_SYNCER, agree
from diloco.pipeline.bus.by_group import by_group
from diloco.pipeline.bus.ports import Bus, BusInfo, Clock
from diloco.pipeline.bus.schema import decode_spec
from diloco.pipeline.bus.server import room
from diloco.pipeline.errors import BusError, UsageError
from diloco.pipeline.findings import Finding
from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.run import Phase, RunState, moment
from diloco.pipeline.messages.spec import Spec, SyncSpec, Wanted
from diloco.pipeline.outer_cost import Speed, operations_of
from diloco.pipeline.pacing import min_step_s
from diloco.pipeline.process.cores import product_speed
from diloco.pipeline.retry import retry
from diloco.pipeline.settings import SyncerProcess, SyncSettings, check_outer, groups_on
from diloco.pipeline.transfer.payloads import Offload
from diloco.syncer.checkpoints.loading import Checkpoint, load_checkpoint, newest_of_run
from diloco.syncer.checkpoints.places import place_of
from diloco.syncer.checkpoints.restoring import restore_checkpoint, taken
from diloco.syncer.serving.leases import holding, release_all
from diloco.syncer.serving.retrying import EVENLY, warn
from diloco.syncer.times import TIMES

T = TypeVar("T")

# The machine's speed is measured if an outer step of all fragments has this many operations (0.1 s of one core).
WORTH_MEASURING = 1e10


class BusWarnings:
    """Logs what is wrong with the server, once each time that it comes up."""

    def __init__(self) -> None:
        self._told: frozenset[str] = frozenset()

    def log_new(self, info: BusInfo, *findings: Finding) -> None:
        """Log those warnings of the server's current state, and of further findings, that are new."""
        told = {one: one for one in info.warnings} | {one.about: str(one) for one in findings if one.level != "ok"}
        for what in sorted(told.keys() - self._told):
            structlog.get_logger().warning("bus_warning", detail=told[what])
        self._told = frozenset(told)


class StartMode(StrEnum):
    """How a syncer that starts comes to its run."""

    BEGIN = "begin"
    """It waits for the first learner's spec and parameters."""
    JOIN = "join"
    """It serves the run that is on the bus."""
    RESUME = "resume"
    """It puts its newest checkpoint of the run on the bus."""
    FINISHED = "finished"
    """It puts the finished run on the bus, for other parties that are started again, and ends."""


class OnBus(NamedTuple):
    """State of a run that has begun, as found on the bus."""

    state: RunState
    served: bool
    """True if another syncer serves the run."""
    whole: bool
    """True if each fragment has a version."""
    older: bool = False
    """True if a fragment's version is older than in the checkpoint here. Versions are compared and not tokens: the
    state's tokens are written only a few times per second, and a checkpoint has the current number."""
    newer: bool = False
    """True if a fragment's version is newer than in the checkpoint here."""

    @property
    def lacks(self) -> bool:
        """True if the checkpoint has merges that the bus lacks, and the bus has none that the checkpoint lacks."""
        return (self.older or not self.whole) and not self.newer


def start_mode(
    on_bus: OnBus | None, saved: RunState | None, tokens: int | None, overwrite: bool, run: str
) -> StartMode:
    """Return what the start command means, which is the same command throughout a run's life.

    The columns are the newest checkpoint found: none, of this run, of this run when it has finished, or of an earlier
    run of the same name.

    | bus                    | no checkpoint | of this run      | finished         | of an earlier run, same name |
    |------------------------|---------------|------------------|------------------|------------------------------|
    | nothing of the run     | begin         | resume           | finished         | (it counts as this run)      |
    | the run, served        | join          | join             | join             | refused                      |
    | the run, not served    | join          | join             | join             | refused                      |
    | ... older than saved   | join          | resume           | finished         | refused                      |
    | ... a head is missing, and no merge on the bus is newer than saved: as in the row above, even if it is served |
    | the run, finished      | join: the syncer ends at once, and has its last checkpoint                      |

    Args:
        on_bus: the run on the bus; None if there is nothing, or only a learner's proposal.
        saved: the state in the newest checkpoint of a run of this name; None if there is none, or it should be ignored.
        tokens: the budget, if one was given.
        overwrite: True if checkpoints should be ignored, because the run starts from scratch or is a different one.
        run: the run's name.

    Raises:
        UsageError: the bus has another run of that name.
    """
    if saved is None or overwrite:
        return StartMode.BEGIN if on_bus is None else StartMode.JOIN
    again = StartMode.FINISHED if saved.is_done(tokens) else StartMode.RESUME
    if on_bus is None:
        return again
    same = on_bus.state.began_unix_s == saved.began_unix_s
    if same and on_bus.lacks and not on_bus.whole:
        return again
    if on_bus.state.phase is Phase.FINISHED:
        return StartMode.JOIN
    if not same:
        raise UsageError(
            f"the run {run!r} on this Redis began {moment(on_bus.state.began_unix_s)} and has {on_bus.state.tokens} "
            "tokens; the checkpoint here is from an earlier run of that name, which began "
            f"{moment(saved.began_unix_s)} and has {saved.tokens}. To serve the run on Redis, pass --overwrite or "
            "another --checkpoint-dir. To continue from the checkpoint, stop all parties, run `diloco runs delete "
            f"{run}`, then repeat this command"
        )
    return again if on_bus.lacks and not on_bus.served else StartMode.JOIN


@dataclass(slots=True)
class Start:
    """Finds the run's spec for one syncer, and puts a checkpoint on the bus where that is needed."""

    bus: Bus
    clock: Clock
    settings: SyncerProcess
    nonce: str
    name: str
    """Name of the syncer, for the tape."""
    offload: Offload
    bus_warnings: BusWarnings
    finished: bool = False
    """True if the run had ended before this start, so that there is nothing to do."""

    def __post_init__(self) -> None:
        """Apply the settings' method.

        Raises:
            UsageError: see `SyncSettings.with_method`.
        """
        self.settings = self.settings.with_method()

    async def spec(self) -> Spec | None:
        """Return the run's spec: a checkpoint's, the one on the bus, or the first learner's, which it waits for.

        Returns:
            The spec; None if the run is finished already.

        Raises:
            DilocoError: the settings, the spec or the checkpoint cannot be used.
        """
        checkpoint = saved = await self.offload(self._saved)
        mode: Callable[[], Awaitable[StartMode]] = partial(self._find_mode, checkpoint)
        if checkpoint is None and self.settings.resume is not None:
            checkpoint = await self.offload(load_checkpoint, self.settings.resume)
            self._check_budget(checkpoint)
            mode = partial(self._mode_for_resume, checkpoint)
        found = await _retry(mode)
        if checkpoint is not None and found in (StartMode.RESUME, StartMode.FINISHED):
            if saved is not None:  # check it before the bus is changed, which may have an older but sound state
                await self.offload(saved.check)
            await self._resume(checkpoint, mode)
        if checkpoint is not None and found is StartMode.FINISHED:
            detail = (
                f"{self._extend}, or give more --tokens on an empty Redis; to start from scratch, pass --overwrite on "
                "an empty Redis"
            )
            done = {"tokens": checkpoint.state.tokens, "checkpoint": str(checkpoint.folder)}
            structlog.get_logger().info("run_was_finished", run=self.bus.keys.run, **done, detail=detail)
            self.finished = True
            return None
        if saved is not None and found is StartMode.JOIN:
            await _retry(partial(self._tell_older, saved))
        self.bus_warnings.log_new(await _retry(self.bus.info))  # early: there may be hours to fix it
        if (data := await _retry(self.bus.read_spec)) is None:
            check_outer(self.settings)
            structlog.get_logger().info("waiting_for_spec", run=self.bus.keys.run)
        given = {name: getattr(self.settings, name) for name in SyncSettings.model_fields}
        wanted = Wanted(sync={name: given[name] for name in given.keys() & self.settings.model_fields_set})
        while data is None:
            # This lets `diloco status` tell a run that waits for learners from one that does not exist.
            await self._announce()
            if wanted.sync:
                offer = partial(self.bus.offer_wanted, wanted, self.settings.lease_s)
                agree(self.settings, (await _retry(offer)).sync, SyncSettings, WAITING_SYNCER)
            await asyncio.sleep(TIMES.poll_s)
            data = await _retry(self.bus.read_spec)
        spec = decode_spec(self.bus.keys, data)
        agree(self.settings, spec.sync.model_dump(), SyncSettings)
        state = await _retry(self.bus.read_state)
        if state is not None and state.phase is Phase.FINISHED:  # this syncer will end at once
            detail = f"{self._extend}, or choose a different run name"
            structlog.get_logger().info("run_was_finished", run=self.bus.keys.run, tokens=state.tokens, detail=detail)
        return spec

    @property
    def _extend(self) -> str:
        """The remedy for a run that is finished."""
        return f"to train further, run `diloco runs extend {self.bus.keys.run} --tokens N` and repeat the commands"

    def _saved(self) -> Checkpoint | None:
        """Return the newest checkpoint of this run; None if there is none, or if it should be ignored."""
        place = self.settings.checkpoint_dir
        if place is None or self.settings.overwrite:
            return None
        return newest_of_run(place_of(place), self.bus.keys.run)

    async def _find_mode(self, saved: Checkpoint | None) -> StartMode:
        told = self.settings.model_fields_set
        tokens = self.settings.tokens if "tokens" in told else None
        state = None if saved is None else saved.state
        return start_mode(await self._on_bus(saved), state, tokens, self.settings.overwrite, self.bus.keys.run)

    async def _mode_for_resume(self, checkpoint: Checkpoint) -> StartMode:
        """Return the mode of a run that begins with the checkpoint of another one (`--resume`).

        Raises:
            UsageError: the run has begun already, without a checkpoint.
        """
        there = await self._on_bus(checkpoint)
        same = there is not None and there.state.began_unix_s == checkpoint.state.began_unix_s
        if there is None or (same and there.lacks and not there.whole):
            return StartMode.RESUME
        if not (same and there.state.base_tokens):
            raise UsageError(f"the run has already been started, without {checkpoint.folder}: {taken(self.bus)}")
        structlog.get_logger().info("already_restored", base_tokens=there.state.base_tokens)
        return StartMode.JOIN

    def _check_budget(self, checkpoint: Checkpoint) -> None:
        """Check that a run that begins with another run's checkpoint has something left to train.

        Raises:
            UsageError: the checkpoint has reached the budget.
        """
        told, trained = "tokens" in self.settings.model_fields_set, checkpoint.state.counted_tokens
        if (budget := self.settings.tokens if told else checkpoint.spec.sync.tokens) <= trained:
            raise UsageError(
                f"tokens={budget}: {checkpoint.folder} has already trained {trained}; give a larger budget"
            )

    async def _tell_older(self, checkpoint: Checkpoint) -> None:
        """Warn if the joined run has less than the checkpoint here, which later checkpoints will replace."""
        there = await self._on_bus(checkpoint)
        if there is not None and there.lacks:
            detail = (
                "another syncer serves the run on Redis. Copy the checkpoint to keep it, because a run keeps only three"
            )
            had = {"tokens": there.state.tokens, "saved_tokens": checkpoint.state.tokens}
            structlog.get_logger().warning("older_run_joined", path=str(checkpoint.folder), **had, detail=detail)

    async def _on_bus(self, saved: Checkpoint | None) -> OnBus | None:
        """Return the state of the run on the bus; None if there is nothing, or only its first learner's proposal."""
        state, data = await self.bus.read_state(), await self.bus.read_spec()
        if state is None or data is None:
            return None
        spec = decode_spec(self.bus.keys, data)
        self.bus.use_spec(spec)
        fragments = range(spec.sync.fragments)
        # A head that cannot be read does not count as missing: its owner, the learners and the status report it.
        heads = await by_group(self.bus.keys, fragments, self.bus.read_heads, lambda error: None)
        whole = None not in heads.values()
        holders = await by_group(self.bus.keys, fragments, self.bus.read_leases)
        served = any(holder not in (None, self.nonce) for holder in holders.values())
        known = saved.fragments if saved else ()
        ahead = [head.version - known[p].version for p, head in heads.items() if head is not None and p < len(known)]
        return OnBus(state, served, whole, older=min(ahead, default=0) < 0, newer=max(ahead, default=0) > 0)

    async def _resume(self, checkpoint: Checkpoint, mode: Callable[[], Awaitable[StartMode]]) -> None:
        """Put a checkpoint on the bus, or wait until another syncer has put its own there, which has no fewer.

        `mode` is called again, since the bus may have changed meanwhile.
        """
        looked_s = self.clock.now()
        while True:
            await self._announce(checkpoint.state.tokens)
            _, first, name = (await _retry(self.bus.read_savers) or [(0, self.nonce, self.name)])[-1]
            if self.clock.now() - looked_s >= min(TIMES.announced_s, self.settings.lease_s) and first == self.nonce:
                if await _retry(partial(self._put, checkpoint, mode)):
                    break
            elif first != self.nonce and await _retry(mode) is StartMode.JOIN:
                structlog.get_logger().info("resumed_by_another", syncer=name)
                break
            await asyncio.sleep(TIMES.poll_s)
        await self._announce()

    async def _announce(self, saved_tokens: int = 0) -> None:
        told = self.nonce, self.name, self.settings.lease_s, saved_tokens
        await _retry(partial(self.bus.announce_syncer, *told))

    async def _acquire(self, fragments: Sequence[int]) -> bool:
        for p in fragments:
            if not await self.bus.acquire_lease(p, self.nonce, self.settings.lease_s):
                await release_all(self.bus, self.nonce, p)  # or two syncers could wait for each other's leases
                return False
        return True

    async def _put(self, checkpoint: Checkpoint, mode: Callable[[], Awaitable[StartMode]]) -> bool:
        """Put the checkpoint on the bus, or the rest of it if an outage or a restart interrupted this before.

        A spec that a learner has proposed meanwhile is replaced. Returns False if another syncer holds leases, so that
        it must be tried again.
        """
        if (found := await mode()) is StartMode.JOIN:
            return True
        spec = checkpoint.spec
        # The placement of fragments in groups depends on this bus, not on the checkpoint's.
        anew = {"groups": self.settings.groups or groups_on((await self.bus.info()).cluster, spec.sync.fragments)}
        if "tokens" in self.settings.model_fields_set and found is not StartMode.FINISHED:
            anew["tokens"] = self.settings.tokens
        spec = spec.model_copy(update={"sync": spec.sync.model_copy(update=anew)})
        agree(self.settings, spec.sync.model_dump(), SyncSettings, "the checkpoint")
        there = await self._on_bus(checkpoint)
        self.bus.use_spec(spec)
        fragments = range(spec.sync.fragments)
        if not await self._acquire(fragments):
            return False
        if there is not None and there.older:  # safe: all its leases are ours
            by = {"by": str(checkpoint.folder), "tokens": checkpoint.state.tokens}
            structlog.get_logger().warning("older_run_replaced", had=there.state.tokens, **by)
            await self.bus.delete_run()
            if not await self._acquire(fragments):
                return False
        async with holding(self.bus, fragments, self.nonce, self.settings.lease_s):
            given = self.bus, checkpoint, spec, self.nonce, self.name, self.clock, self.offload
            await restore_checkpoint(*given, finished=found is StartMode.FINISHED)
        await release_all(self.bus, self.nonce, len(fragments))
        structlog.get_logger().info("checkpoint_restored", path=str(checkpoint.folder), tokens=checkpoint.state.tokens)
        return True


async def _retry(call: Callable[[], Awaitable[T]]) -> T:
    """Call again after an outage, or after another syncer has restored what this one was about to restore."""
    return await retry(call, EVENLY.waits(), BusError, warn)


async def check_memory(bus: Bus, layout: Layout, sync: SyncSpec) -> None:
    """Check that the bus has enough memory for the run, by the same estimate as `diloco plan`.

    Raises:
        UsageError: the bus's memory cannot hold the run.
    """
    info = await bus.info()
    found = room(info.maxmemory_bytes, layout.elements, sync, backlogs=info.backlogs_bytes)
    if found.level == "error":
        raise UsageError(f"{found} (run `diloco doctor` to check everything)")


async def speed_for(sync: SyncSpec, layout: Layout, offload: Offload) -> Speed:
    """Return how fast this machine multiplies matrices; it is measured and logged only if the outer step is large."""
    fragments = [operations_of((slot.tensor for slot in f.slots), sync.outer) for f in layout.fragments]
    if sum(fragments) < WORTH_MEASURING:
        return Speed()
    speed: Speed = await offload(product_speed)
    outer_s, together_s = max(fragments) / speed.flops, sum(fragments) / speed.flops / speed.at_once
    structlog.get_logger().info(
        "outer_step_reckoned",
        slowest_fragment_s=round(outer_s, 3),
        all_fragments_s=round(together_s, 3),
        fits_from_step_s=round(min_step_s(sync, outer_s, together_s), 3),
        gflop_per_s=round(speed.flops / 1e9, 1),
    )
    return speed
