"""What a run waits for, or has lost, and learners that stall each other: for the status, in words. Pure."""

from collections.abc import Mapping, Sequence

from diloco.pipeline.messages.head import Head
from diloco.pipeline.messages.run import Phase, RunState, SeenReport
from diloco.pipeline.messages.spec import Spec

AWAITED = "waiting for"
"""How the reason begins of a run that waits, unless the bus has lost a part of it."""


def crowded(reports: Sequence[SeenReport]) -> list[str]:
    """Machines on which learners have more threads together than there are cores, and could have fewer."""
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
                f"the {len(here)} learners on {host} have {threads} threads on {cores} cores, and stall each other: "
                f"start each with --threads {each} (in a loop of your own: OMP_NUM_THREADS={each})"
            )
    return found if len(found) <= 3 else [*found[:3], f"the same on {len(found) - 3} more machines"]


def awaited(spec: Spec | None, state: RunState | None, syncers: Mapping[str, str] | None, live: int) -> str:
    """What a run waits for that has not begun, or that nobody is at work on; "" of any other."""
    if state is None:
        return f"{AWAITED} the first learner" if spec is None else f"{AWAITED} a syncer; a learner is here"
    abandoned = state.phase is Phase.RUNNING and syncers is not None and not syncers and not live
    return f"{AWAITED} a syncer and learners" if abandoned else ""


def gone(spec: Spec | None, state: RunState | None, heads: Sequence[Head | None], tokens: int) -> str:
    """What the bus has lost of a run that has trained, and what to do; "" if nothing."""
    if not tokens or (state is not None and state.phase is Phase.FINISHED):
        return ""
    missing = [str(p) for p, head in enumerate(heads) if head is None]
    if spec is not None and not missing:
        return ""
    what = f"the heads of fragments {', '.join(missing)} are" if spec is not None else "the run's spec is"
    return (
        f"{what} not on the bus, so nothing is merged there: a syncer that served the run puts back what it knows, its "
        "learners what they have adopted. If that takes longer than a minute, see that `diloco syncer` runs"
    )
