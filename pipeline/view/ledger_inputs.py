"""What a run's bus holds for its ledger at one moment: reports, heads, and headers that nobody has merged yet."""

from collections.abc import Collection
from dataclasses import dataclass

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.bus.schema import parse_offer_id
from diloco.pipeline.messages.delta import DeltaHeader
from diloco.pipeline.messages.run import LearnerReport, Phase

Incarnation = tuple[str, str]
"""(learner, incarnation)"""


@dataclass(frozen=True, slots=True)
class LedgerInputs:
    """What is known of a run besides its tape."""

    reports: tuple[LearnerReport, ...] = ()
    """The last of each incarnation, of this part of the run."""
    heads: tuple[tuple[int, int, bytes], ...] = ()
    """(fragment, version, digest)"""
    offers: tuple[DeltaHeader, ...] = ()
    """Headers still on the streams."""
    live: frozenset[Incarnation] = frozenset()
    """Incarnations that may still publish: heard from lately, not left, in a run that is not finished."""
    here: frozenset[str] = frozenset()
    """Learners that were heard from lately and have not left: perhaps they are about to."""
    finished: bool = True
    """Nothing will be merged any more."""


async def read_ledger_inputs(bus: Bus, fragments: int, live_s: float, gone: Collection[str] = ()) -> LedgerInputs:
    """What the bus's run has now. Read its tape before, so that no merge is on the tape and not in a head.

    live_s: a learner not heard from for this long is not live. gone: learners known to be dead.

    Raises:
        BusError: the bus cannot be read.
    """
    state = await bus.read_state()
    finished = state is not None and state.phase is Phase.FINISHED
    # Headers before reports, as they are written the other way round; heads before headers, so that what is merged
    # meanwhile is at worst counted as pending.
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
