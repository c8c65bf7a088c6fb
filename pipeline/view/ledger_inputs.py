"""The input of the ledger from a run's bus at one moment: reports, heads, and headers that are not merged yet."""

from collections.abc import Collection
from dataclasses import dataclass

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.bus.schema import parse_offer_id
from diloco.pipeline.messages.fragment import DeltaHeader
from diloco.pipeline.messages.run import LearnerReport, Phase

# (learner, incarnation)
Incarnation = tuple[str, str]


@dataclass(frozen=True, slots=True)
class LedgerInputs:
    """Facts about a run that are not on its tape."""

    reports: tuple[LearnerReport, ...] = ()
    """The last report of each incarnation in this part of the run."""
    heads: tuple[tuple[int, int, bytes], ...] = ()
    """(fragment, version, digest)"""
    offers: tuple[DeltaHeader, ...] = ()
    """Headers still on the streams."""
    live: frozenset[Incarnation] = frozenset()
    """Incarnations that may still publish: heard from lately and not left, in a run that is not finished."""
    here: frozenset[str] = frozenset()
    """Learners that were heard from lately and have not left, even if the run is finished: they may be about to leave.
    """
    finished: bool = True
    """No more merges will be made."""


async def read_ledger_inputs(bus: Bus, fragments: int, live_s: float, gone: Collection[str] = ()) -> LedgerInputs:
    """Read the current state of the bus's run.

    Read the tape first: then each merge on the tape is also in a head.

    live_s: a learner that was silent for this long is not live. gone: learners known to be dead.

    Raises:
        BusError: the bus cannot be read.
    """
    state = await bus.read_state()
    finished = state is not None and state.phase is Phase.FINISHED
    # A learner writes the report that counts a delta before the delta's header. So headers are read before reports, and
    # every header is counted. Heads are read before headers, so a merge made in between at worst counts as pending.
    heads = [head for head in await bus.read_heads(range(fragments)) if head is not None]
    offers: list[DeltaHeader] = []
    for p in range(fragments):
        after: dict[str, str] = {}
        while more := await bus.read_offers(p, after):
            offers += [one.header for one in more if one.header is not None]
            after |= dict(parse_offer_id(one.entry_id) for one in more)
    seen = await bus.read_reports()
    here = [one.report for one in seen if not (one.report.left or one.report.learner in gone) and one.age_s <= live_s]
    return LedgerInputs(
        reports=tuple(one.report for one in seen if one.counts_in(state)),
        heads=tuple((head.fragment, head.version, head.digest) for head in heads),
        offers=tuple(offers),
        live=frozenset() if finished else frozenset((one.learner, one.incarnation) for one in here),
        here=frozenset(one.learner for one in here),
        finished=finished,
    )
