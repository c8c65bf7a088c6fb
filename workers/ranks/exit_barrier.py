"""How the ranks of a learner come to leave their loops after the same step, and hear of one that does not. asyncio.

A rank that has left its loop says after which step. Where others train on they wait for its gradients, for ever and
inside torch, so nobody can go along: after `PARTING_S` all end with an error that names who has left, and when.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

import structlog

from diloco.pipeline.errors import RankGone
from diloco.workers.ranks.wires import TOLD_S, Wires

PARTING_S = 40.0
"""From one rank's last step until all must have left their loops."""
APART_S = 60.0
"""After so long without a step of rank 0 it is said which steps the ranks have come to."""
EQUALLY = "all ranks of a learner must call step equally often, and then leave"


class Parting:
    """One rank's."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self.steps = 0
        """That this rank has come to. Written by the training thread."""
        self._left: dict[int, int] = {}
        """Rank that has left its loop -> its steps."""
        self._more = asyncio.Event()
        wires.handle(left=self._take_left, steps=self._say_steps)

    async def all_leave(self) -> None:
        """This rank has left its loop; wait for the others.

        Raises:
            RankGone: they go on, or have left after another step.
        """
        for rank in range(self._wires.ranks):
            self._wires.tell(rank, "left", self.steps)
        with suppress(TimeoutError):
            async with asyncio.timeout(PARTING_S):
                while len(self._left) < self._wires.ranks:
                    self._more.clear()
                    await self._more.wait()
        others = [rank for rank in range(self._wires.ranks) if rank not in self._left]
        if others:
            there = _shown({rank: await _steps_of(self._wires, rank) for rank in others})
            await self._end(f"{_shown(self._left)}; in {PARTING_S:g} s these have not: {there}")
        if len(set(self._left.values())) > 1:
            await self._end(_shown(self._left))

    async def _end(self, how: str) -> None:
        why = f"ranks of this learner have left their loops: {how}. {EQUALLY[0].upper()}{EQUALLY[1:]}"
        await self._wires.end(why)
        raise RankGone(why)

    async def watch(self) -> None:
        """Rank 0's: say where ranks stand that wait for each other. Until cancelled."""
        before = 0
        while True:
            await asyncio.sleep(APART_S)
            if self.steps == before:
                with suppress(RankGone):  # which ends the learner, or all leave
                    said = await asyncio.gather(*(self._wires.ask(r, "steps") for r in range(self._wires.ranks)))
                    if len(set(said)) > 1:
                        structlog.get_logger().warning("ranks_apart", steps=said, detail=f"no step goes on: {EQUALLY}")
            before = self.steps

    async def _take_left(self, rank: int, steps: int) -> None:
        self._left[rank] = steps
        self._more.set()

    async def _say_steps(self, _: int) -> int:
        return self.steps


async def _steps_of(wires: Wires, rank: int, within_s: float = TOLD_S) -> int | str:
    """Or why it does not say."""
    try:
        async with asyncio.timeout(within_s):
            return int(await wires.ask(rank, "steps"))
    except TimeoutError:
        return "does not answer (paused, or its machine is away)"
    except RankGone:
        return "is gone"


async def steps_of_all(wires: Wires, within_s: float) -> str:
    """How far each rank is, in words; in some time."""
    said = await asyncio.gather(*(_steps_of(wires, rank, within_s) for rank in range(wires.ranks)))
    return _shown(dict(enumerate(said)))


def _shown(steps: Mapping[int, int | str]) -> str:
    known = {rank: at if isinstance(at, str) else f"after step {at}" for rank, at in steps.items()}
    return ", ".join(f"rank {rank} {at}" for rank, at in sorted(known.items()))
