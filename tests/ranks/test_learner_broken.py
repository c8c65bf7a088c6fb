"""However a learner of ranks ends, all of them hear why, and its run hears it once: connections without a bus."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.pipeline.errors import BusError, LearnerReplaced, RankGone
from diloco.pipeline.messages.run import Event
from diloco.workers.ranks.rank_exchange import RankExchange
from diloco.workers.ranks.rank_learner import Rank
from diloco.workers.ranks.shutdown import ExitBarrier
from diloco.workers.ranks.transport import Transport
from tests import HANGING_S
from tests.ranks.test_transport import connections

RANKS, STEPS = 3, 25


class Member(RankExchange):
    """One rank that is in its run, and does nothing there."""

    exit_barrier: ExitBarrier
    task: "asyncio.Task[None]"

    def _follow(self) -> None:
        self.exit_barrier = ExitBarrier(self._transport)
        self.exit_barrier.steps = STEPS

    async def _lead(self) -> None:
        self._follow()
        await asyncio.Event().wait()


class Events:
    """The bus, of which only this is used."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def add_event(self, event: Event) -> None:
        """As `Bus`; takes a while."""
        await asyncio.sleep(0.05)
        assert event.name == "learner_broken"
        self.said.append(event.detail)


async def crew() -> tuple[list[Member], Events]:
    """All of them connected."""
    bus, members = Events(), list[Member]()
    for rank, found in enumerate(connections(["127.0.0.1"] * RANKS)):
        joined: Future[Any] = Future()
        joined.set_result(None)
        training, clock = SimpleNamespace(learner="trio"), SimpleNamespace(unix=lambda: 1.0)
        given: Any = bus, clock, Transport.over(rank, found), training, None, joined
        members.append(Member(*given, lambda: False))
    for one in members:
        one.task = asyncio.create_task(one.work())
    while any(len(one._transport._writers) < RANKS - 1 for one in members):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    return members, bus


def cut(member: Member) -> None:
    """As the system does for a process that has ended."""
    member._transport.leaving = True
    for writer in member._transport._writers.values():
        writer.transport.abort()  # type: ignore[attr-defined]


async def killed(member: Member) -> str:
    """By SIGKILL."""
    cut(member)
    return f"rank {member._transport.rank} of this learner has ended"


async def asked(member: Member) -> str:
    """By SIGTERM while its main thread is inside torch."""
    await member.report_end("SIGTERM was received", 2.0)
    cut(member)
    return f"rank {member._transport.rank} of this learner was asked to stop: SIGTERM was received"


async def loop_fails(member: Member) -> str:
    """By an error of the training loop."""
    rank: Any = SimpleNamespace(_transport=member._transport)
    breaking = asyncio.create_task(Rank.break_off(rank, OSError("no data"), "its loop has failed"))
    breaking.add_done_callback(lambda _: member.task.cancel())  # the training thread has its thread end then
    return "its loop has failed"


async def task_fails(member: Member) -> str:
    """By an error of what nobody waits for."""
    member._transport.start_task(failing(MemoryError()))
    return f"rank {member._transport.rank} of this learner has ended: MemoryError()"


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("how", [killed, asked, loop_fails, task_fails])
async def test_the_run_hears_once_why_a_learner_has_ended(how: Callable[[Member], Awaitable[str]], rank: int) -> None:
    """Whichever rank it is; and so do all ranks that are left."""
    async with asyncio.timeout(HANGING_S):
        members, bus = await crew()
        why = await how(members[rank])
        left = [one for one in members if not one._transport.leaving]
        for error in await asyncio.gather(*(one.task for one in left), return_exceptions=True):
            assert why in str(error) or isinstance(error, MemoryError)
        assert len(bus.said) == 1
        assert why in bus.said[0]
        members[rank].task.cancel()


async def test_the_run_hears_once_that_ranks_left_after_different_steps() -> None:
    """All ranks find it out, about together."""
    async with asyncio.timeout(HANGING_S):
        members, bus = await crew()
        members[1].exit_barrier.steps -= 1
        leaving = [asyncio.create_task(one.exit_barrier.wait_for_all()) for one in members]
        ended = await asyncio.gather(*(one.task for one in members), return_exceptions=True)
        why = "rank 0 after step 25, rank 1 after step 24, rank 2 after step 25"
        assert [why in str(error) for error in ended] == [True] * RANKS
        assert [why in one for one in bus.said] == [True]
        for one in leaving:
            one.cancel()


async def test_a_rank_that_is_asked_to_end_says_so_though_another_one_is_gone() -> None:
    """It names that one, and the others hear why as well."""
    async with asyncio.timeout(HANGING_S):
        members, bus = await crew()
        for rank in (0, 2):  # so their exchanges go on
            members[rank]._transport.leaving = True
        members[2]._transport._writers[0].transport.abort()  # type: ignore[attr-defined]
        while 2 in members[0]._transport._writers:
            await asyncio.sleep(0.01)
        why = await asked(members[0])
        assert bus.said[0].startswith(why)
        assert "rank 1 after step 25, rank 2 has ended" in bus.said[0]
        assert members[1]._transport.reason.startswith(why)
        for one in members:
            one.task.cancel()


async def test_all_loops_that_fail_at_once_are_told_once() -> None:
    """As by one bug in all of them."""
    async with asyncio.timeout(HANGING_S):
        members, bus = await crew()
        await asyncio.gather(*(loop_fails(one) for one in members))
        ended = await asyncio.gather(*(one.task for one in members), return_exceptions=True)
        assert [str(error) for error in ended] == ["its loop has failed"] * RANKS
        assert bus.said == ["its loop has failed"]


async def test_two_ranks_that_are_gone_leave_one_that_tells_the_run() -> None:
    """As with their container: the first of the others is gone too."""
    async with asyncio.timeout(HANGING_S):
        members, bus = await crew()
        cut(members[0])
        cut(members[1])
        with pytest.raises(RankGone):
            await members[2].task
        assert len(bus.said) == 1
        for one in members[:2]:
            one.task.cancel()


async def test_an_exchange_that_fails_is_told_with_its_words_and_of_another_process_nothing() -> None:
    """Where rank 0's ends by an error; but where another process has the name, the run hears of no broken learner."""
    for error, said in (BusError("Redis refuses"), 1), (LearnerReplaced("its name is taken", 2), 0):
        async with asyncio.timeout(HANGING_S):
            members, bus = await crew()
            members[0]._transport.start_task(failing(error))
            ended = await asyncio.gather(*(one.task for one in members), return_exceptions=True)
            assert ended[0] is error
            assert [str(one) for one in ended[1:]] == [f"rank 0 of this learner has ended: {error}"] * 2
            assert len(bus.said) == said


async def failing(error: Exception) -> None:
    """As what goes on in an exchange."""
    raise error
