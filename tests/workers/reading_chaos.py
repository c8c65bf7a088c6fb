"""What may happen to learners that read from the work queue: for tests in virtual time."""

import asyncio
import random
from collections.abc import Callable
from typing import Any, TypeVar

from diloco.pipeline.errors import BusUnavailable
from tests.virtual_run import VirtualLearner

L = TypeVar("L", bound=VirtualLearner)


async def chaos(seed: int, strikes: int, made: Callable[[int, float], L]) -> tuple[list[L], list[L]]:
    """Kills, leaves, joins and lost answers in a random order; one learner lives at least.

    made: called with a number and the time of a step; gives a learner that has not begun.

    Returns: all that there were, and those that live.
    """
    chance = random.Random(seed)
    everybody = [made(0, 0.07)]
    everybody[0].start()
    living = everybody.copy()
    for number in range(1, strikes + 1):
        await asyncio.sleep(chance.uniform(0.3, 6.0))
        one = chance.choice(living)
        match chance.choice(("kill", "leave", "join", "lose")):
            case "kill" if len(living) > 1:
                living.remove(one)
                await one.kill()
            case "leave" if len(living) > 1:
                living.remove(one)
                one.stop = True
            case "lose" if one.joined:
                lose_an_answer(one, chance.choice(("claim_shard", "finish_shard", "save_position")))
            case _:
                living.append(made(number, chance.uniform(0.05, 0.3)))
                living[-1].start()
                everybody.append(living[-1])
    return everybody, living


def lose_an_answer(learner: VirtualLearner, name: str) -> None:
    """The next such call acts on the bus, and the learner never knows."""
    bus = learner.bus
    act, lost = getattr(bus, name), []

    async def once(*args: Any) -> Any:
        answer = await act(*args)
        if not lost:
            lost.append(True)
            raise BusUnavailable("the answer was lost")
        return answer

    setattr(bus, name, once)
