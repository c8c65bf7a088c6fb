"""Warnings of the status: what a run waits for or has lost, and learners that stall each other. Pure."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from diloco.pipeline.messages.fragment import Head
from diloco.pipeline.messages.run import (
    REDIS_CHANGED,
    SCRIPTS_MISSING,
    Event,
    Phase,
    RunState,
    SeenReport,
)
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.units import duration

# Prefix of the reason of a run that waits, unless the bus has lost a part of the run.
AWAITED = "waiting for"

# Missing scripts and changes of the server are only reported for this long.
RECENT_S = 3600.0
# The most learners and changes of the server that are remembered.
MAX_TRACKED = 512


@dataclass(frozen=True, slots=True)
class EventFacts:
    """Facts about learners and the server from a run's events."""

    scriptless: Mapping[str, float] = field(default_factory=dict)
    """Learners that do not find their scripts at Redis, with the Unix time of their last event about it. Any other
    event of a learner ends that."""
    changes: tuple[float, ...] = ()
    """When the server was replaced or restarted lately, in Unix seconds."""

    def after(self, events: Iterable[Event], now_s: float) -> "EventFacts":
        """Return this with later events added. `now_s` is in Unix seconds."""
        scriptless, changes = dict(self.scriptless), list(self.changes)
        for event in events:
            scriptless.pop(event.who, None)
            if event.name == SCRIPTS_MISSING and len(scriptless) < MAX_TRACKED:
                scriptless[event.who] = event.unix_s
            if event.name == REDIS_CHANGED:
                changes.append(min(event.unix_s, now_s))
        recent = {who: told_s for who, told_s in scriptless.items() if now_s - told_s < RECENT_S}
        return EventFacts(recent, tuple(one for one in changes if now_s - one < RECENT_S)[-MAX_TRACKED:])


def changed(told: EventFacts, now_s: float) -> str:
    """Return a warning if Redis failed over or was restarted lately, otherwise "". `now_s` is in Unix seconds."""
    if not told.changes:
        return ""
    times, last_s = len(told.changes), max(0.0, now_s - max(told.changes))
    often = "once" if times == 1 else f"{times} times"
    return (
        f"Redis failed over or was restarted {often} in the last hour, last {duration(last_s)} ago: the last writes "
        "before that may be lost (`primary_moved` in the logs shows which server took over)"
    )


def crowded(reports: Sequence[SeenReport]) -> list[str]:
    """Return a warning for each machine whose learners together have more threads than cores, and could have fewer."""
    by_host: dict[str, list[SeenReport]] = {}
    for seen in reports:
        if all(seen.report.threads):
            by_host.setdefault(seen.report.host, []).append(seen)
    found = []
    for host, here in sorted(by_host.items()):
        threads, cores = sum(seen.report.threads[0] for seen in here), max(seen.report.threads[1] for seen in here)
        each = max(1, cores // len(here))
        if threads > cores and len(here) > 1 and any(seen.report.threads[0] > each for seen in here):
            found.append(
                f"the {len(here)} learners on {host} have {threads} threads on {cores} cores, and slow each other "
                f"down: start each with --threads {each} (in your own loop: OMP_NUM_THREADS={each})"
            )
    return found if len(found) <= 3 else [*found[:3], f"the same is true of {len(found) - 3} more machines"]


def without_scripts(learners: Iterable[str]) -> str:
    """Return a warning with a remedy for learners without scripts; "" if there are none."""
    names = sorted(learners)
    if not names:
        return ""
    named = ", ".join(names[:5]) + " ..." * (len(names) > 5)
    return (
        f"Redis lacks scripts that {named} needs, so what it trains may not be merged: start a syncer, which loads them"
    )


def awaited(
    spec: Spec | None, state: RunState | None, syncers: Mapping[str, str] | None, live: int, takes_writes: bool = True
) -> str:
    """Return what a run is waiting for if it has not begun or no party works on it, otherwise "".

    takes_writes: whether the bus accepts writes. If it does not, no party can report that it is there.
    """
    if not takes_writes and (state is None or state.phase is not Phase.FINISHED):
        return f"{AWAITED} Redis, which refuses all writes"
    if state is None:
        return f"{AWAITED} the first learner" if spec is None else f"{AWAITED} a syncer; a learner has joined"
    abandoned = state.phase is Phase.RUNNING and syncers is not None and not syncers and not live
    return f"{AWAITED} a syncer and learners" if abandoned else ""


def stray_leases(syncers: Mapping[str, str] | None, holders: Sequence[str | None]) -> str:
    """Return a warning about leases held by none of the current syncers; "" if there are none, or no syncers."""
    found = {p: holder for p, holder in enumerate(holders) if holder not in (None, *(syncers or ()))} if syncers else {}
    if not found:
        return ""
    named = ", ".join(map(str, found))
    return (
        f"the lease of fragments {named} is held under {next(iter(found.values()))!r:.40}, which is none of the run's "
        "syncers: these fragments are not merged until a syncer takes them over, which happens within two leases"
    )


def unreachable(away: Iterable[int]) -> str:
    """Return a warning about the fragments `away`, whose server of a bus with several does not answer; otherwise ""."""
    named = ", ".join(map(str, sorted(away)))
    if not named:
        return ""
    return (
        f"the server of fragments {named} does not answer, so they are not merged until it is back or a replica "
        "replaces it; as far as is known, none of their data is lost, but their figures here are old or missing"
    )


def gone(
    spec: Spec | None,
    state: RunState | None,
    heads: Sequence[Head | None],
    tokens: int,
    away: Collection[int] = (),
) -> str:
    """Return what the bus has lost of a run that has trained, with a remedy; "" if nothing.

    away: fragments whose heads could not be read.
    """
    if not tokens or (state is not None and state.phase is Phase.FINISHED):
        return ""
    missing = [str(p) for p, head in enumerate(heads) if head is None and p not in away]
    if spec is not None and not missing:
        return ""
    what = f"the heads of fragments {', '.join(missing)} are" if spec is not None else "the run's spec is"
    return (
        f"{what} not on the bus, so nothing is merged there: a syncer that served the run restores what it has in "
        "memory, and learners restore what they have adopted. If that takes longer than a minute, check that `diloco "
        "syncer` is running"
    )
