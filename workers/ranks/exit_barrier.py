"""Makes all ranks of a learner leave their loops after the same step, and detects a rank that does not. asyncio.

A rank that leaves its loop announces the step after which it left. If the others train on, they wait inside torch for
its gradients, for ever, so they cannot follow. After `PARTING_S` all ranks therefore end with an error that names the
ranks that left and their steps.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

import structlog

from diloco.pipeline.errors import RankGone
from diloco.workers.ranks.wires import TOLD_S, Wires

# Seconds from the time at which one rank leaves its loop until all must have left theirs.
PARTING_S = 40.0
# After so many seconds without a step of rank 0, a warning says which step each rank has reached.
APART_S = 60.0
EQUALLY = "all ranks of a learner must call step equally often, and then leave"


class Parting:
    """One rank's side of the barrier."""

    def __init__(self, wires: Wires) -> None:
        self._wires = wires
        self.steps = 0
        """Steps that this rank has trained. The training thread writes it."""
        self._left: dict[int, int] = {}
        """Maps a rank that has left its loop to its number of steps."""
        self._more = asyncio.Event()
        wires.handle(left=self._take_left, steps=self._say_steps)

    async def all_leave(self) -> None:
        """Announce that this rank has left its loop, and wait for the others.

        Raises:
            RankGone: other ranks train on, or left after another step.
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
        """Warn when the ranks wait for each other at different steps. Runs at rank 0 until cancelled."""
        before = 0
        while True:
            await asyncio.sleep(APART_S)
            if self.steps == before:
                with suppress(RankGone):  # either the learner ends by it, or all ranks are leaving: no warning needed
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
    """Return a rank's number of steps, or the reason why it gives none."""
    try:
        async with asyncio.timeout(within_s):
            return int(await wires.ask(rank, "steps"))
    except TimeoutError:
        return "does not answer (it is paused, or its machine is unreachable)"
    except RankGone:
        return "is gone"


async def steps_of_all(wires: Wires, within_s: float) -> str:
    """Return a text that says how far each rank is; takes at most `within_s` seconds."""
    said = await asyncio.gather(*(_steps_of(wires, rank, within_s) for rank in range(wires.ranks)))
    return _shown(dict(enumerate(said)))


def _shown(steps: Mapping[int, int | str]) -> str:
    known = {rank: at if isinstance(at, str) else f"after step {at}" for rank, at in steps.items()}
    return ", ".join(f"rank {rank} {at}" for rank, at in sorted(known.items()))
