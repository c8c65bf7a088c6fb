"""Reading of a run's status from its bus."""

import math
from collections.abc import Collection, Sequence

from diloco.pipeline.bus.by_group import by_group
from diloco.pipeline.bus.ports import START, Bus, BusInfo, Clock
from diloco.pipeline.bus.schema import decode_spec
from diloco.pipeline.bus.server import fill_of_run
from diloco.pipeline.errors import BadMessage
from diloco.pipeline.findings import Finding
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.liveness import live_learners, liveness_of
from diloco.pipeline.messages.fragment import Head
from diloco.pipeline.messages.run import Evaluation, Phase, RunState, SeenReport
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.view import trouble
from diloco.pipeline.view.status import NO_FACTS, Status, build_status


def _recent(clock: Clock) -> str:
    """Return a stream cursor of one hour ago, so that a long run's stream is not read from its start each time."""
    return f"{max(0, int((clock.unix() - trouble.RECENT_S) * 1000))}-0"


async def _last_evaluation(bus: Bus, clock: Clock) -> Evaluation | None:
    """Return the newest evaluation."""
    last: Evaluation | None = None
    for start in (_recent(clock), START):
        cursor = start
        while found := await bus.read_evaluations(cursor):
            cursor, last = found[-1]
        if last is not None:
            break
    return last


def as_heard(
    reports: Sequence[SeenReport], info: BusInfo, live_s: float, answers_s: float = math.inf
) -> list[SeenReport]:
    """Return reports with their ages reduced by the time in which no learner could write, which does not count as
    silence.

    That time lasts from the last report until the bus accepted writes again; it counts only if no report has come
    since.

    answers_s: for how long the bus has answered without interruption, as far as the caller knows.
    """
    writable_s = min(info.up_s, answers_s) if info.takes_writes else 0.0
    away_s = min((seen.age_s for seen in reports), default=0.0) - writable_s
    if away_s <= 0 or writable_s >= live_s:
        return list(reports)
    return [seen.model_copy(update={"age_s": seen.age_s - away_s}) for seen in reports]


def redis_fill(info: BusInfo, spec: Spec, live: Collection[str]) -> Finding:
    """Return how full the run's Redis is, as in `server.fill_of_run`."""
    return fill_of_run(info, layout_of(spec.tensors).elements, len(live), spec.sync)


class StatusReader:
    """Reads the status of the bus's run. Each read is complete, except that events are only read once."""

    def __init__(self, bus: Bus, clock: Clock, live_s: float | None = None) -> None:
        """Create a reader.

        live_s: a learner that was silent for this long is not live. None: the value of the run's syncers, from its
        state.
        """
        self._bus, self._clock, self._live_s = bus, clock, live_s
        self._told, self._cursor = NO_FACTS, START

    async def read(self, answers_s: float = math.inf) -> Status:
        """Return the status now. `answers_s`: as in `as_heard`.

        Raises:
            BusError: the bus cannot be read.
            BadMessage: what is stored is not a run of this build.
        """
        bus, clock = self._bus, self._clock
        data = await bus.read_spec()
        spec = None if data is None else decode_spec(bus.keys, data)
        if spec is not None:
            bus.use_spec(spec)
        evaluation, info = await _last_evaluation(bus, clock), await bus.info()
        while events := await bus.read_events(self._cursor):
            self._cursor, self._told = events[-1][0], self._told.after((one for _, one in events), clock.unix())
        self._told = self._told.after((), clock.unix())
        status, *_ = await read_status_of(bus, clock, spec, evaluation, info, self._live_s, self._told, answers_s)
        return status


async def read_status(bus: Bus, clock: Clock, live_s: float | None = None, answers_s: float = math.inf) -> Status:
    """Read the status once, like `StatusReader.read`."""
    return await StatusReader(bus, clock, live_s).read(answers_s)


async def read_status_of(
    bus: Bus,
    clock: Clock,
    spec: Spec | None,
    evaluation: Evaluation | None,
    info: BusInfo,
    live_s: float | None,
    told: trouble.EventFacts,
    answers_s: float = math.inf,
) -> tuple[Status, list[Head | None], RunState | None, list[SeenReport]]:
    """Read the status for a caller that already has the parts that seldom change.

    Returns:
        The status, and what it was made of: heads, the run's state, reports.

    bus: its groups are set if there is a spec. told: what events say about learners. answers_s: as in `as_heard`.
    """
    # Heads are read before reports: tokens are reported as trained before they are merged, so merged <= trained.
    fragments = range(0 if spec is None else spec.sync.fragments)
    unreadable = list[BadMessage]()
    there = await by_group(bus.keys, fragments, bus.read_heads, unreadable.append)  # absent servers become warnings
    heads = [there.get(p) for p in fragments]
    held = await by_group(bus.keys, fragments, bus.read_leases)
    syncers = await bus.read_syncers()
    if stray_leases := [
        p for p, holder in held.items() if holder not in (None, *syncers)
    ]:  # or its syncer has just left
        held |= await by_group(bus.keys, stray_leases, bus.read_leases)
    holders = [held.get(p) for p in fragments]
    reports = await bus.read_reports()
    state = await bus.read_state()
    liveness_s = liveness_of(state, live_s)
    if state is None or state.phase is not Phase.FINISHED:
        reports = as_heard(reports, info, liveness_s, answers_s)
    warnings = [*info.warnings, *map(str, unreadable)]
    if spec is not None and (found := redis_fill(info, spec, live_learners(reports, state))).level != "ok":
        warnings.append(str(found))
    status = build_status(
        bus.keys.run,
        spec,
        state,
        reports,
        heads,
        evaluation,
        warnings,
        clock.unix(),
        liveness_s,
        syncers,
        holders,
        told,
        info.takes_writes,
        [p for p in fragments if p not in there],
    )
    return status, heads, state, reports
