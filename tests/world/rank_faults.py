"""Faults of single ranks, and what a learner owes when one of its ranks is killed. asyncio."""

import asyncio
from typing import Any

from diloco.pipeline.errors import RankGone
from tests.world.parties import Party
from tests.world.plan import Fault, Kind
from tests.world.ranks import WorldRank
from tests.world.together import Crew

GONE_S = 6.0
"""A learner whose rank was killed has ended after this; what pauses and lags take comes on top."""
SLOW_CALL_S = 0.2


async def strike_rank(world: Any, fault: Fault, rank: WorldRank) -> None:
    """Do to a rank what a fault is about."""
    now, until = asyncio.get_running_loop().time(), asyncio.get_running_loop().time() + fault.lasts_s
    if fault.kind is Kind.RANK_KILLED:
        await world.strike_down(fault, rank)
        return
    world.happened(fault.kind, fault.id)
    match fault.kind:
        case Kind.RANK_TRAINING_LAGGED:
            rank.lags_until = max(rank.lags_until, until)
        case Kind.RANK_EXCHANGE_LAGGED:
            rank.link.pause(until - now)
        case Kind.RANK_CUT_OFF:
            world.cut(rank, fault.lasts_s)
        case Kind.RANK_BUS_SLOW:
            rank.link.slow_until = max(rank.link.slow_until, until)
        case Kind.RANK_LINKS_SLOW:
            rank.crew.slow_until = max(rank.crew.slow_until, until)


async def ends_as_a_whole(world: Any, crew: Crew) -> None:
    """Hold the promise that a killed rank ends its learner soon."""
    loop = asyncio.get_running_loop()
    waited_s = 0.0
    while alive := [end for end in crew.ends if end.alive]:
        await asyncio.sleep(0.1)
        now, held = loop.time(), (crew.slow_until, *(max(one.link.paused_until, _lags(one)) for one in alive))
        waited_s += 0.1 * (now >= max(held))
        if waited_s > GONE_S:
            left = [end.rank for end in alive]
            world.oracle.broken("a killed rank ends its learner", f"{crew.name}: ranks {left} after {GONE_S:.0f} s")
            return


def _lags(end: object) -> float:
    return max(end.lags_until, end.stopped_until) if isinstance(end, WorldRank) else 0.0


def may_end_by(party: Party, error: BaseException) -> bool:
    """Whether a party may end by this error: of a learner of which a rank was killed."""
    return isinstance(error, RankGone) and isinstance(party, WorldRank) and party.crew.struck
