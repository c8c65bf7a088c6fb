"""Connections between ranks, in one process."""

import asyncio
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from diloco.pipeline.errors import BadPayload, BusError, BusUnavailable, LeaseLost, RankGone, UsageError
from diloco.workers.exchange.joining import meanwhile
from diloco.workers.ranks import transport as transport_module
from diloco.workers.ranks.rank_learner import Rank
from diloco.workers.ranks.topology import _own_address
from diloco.workers.ranks.transport import _SIZES, INFORM_S, MAX_HEAD_BYTES, TcpConnections, Transport, listen
from tests import HANGING_S

TOKEN, MOST = bytes(32), 3_000_000


@asynccontextmanager
async def connected_ranks(ranks: int) -> AsyncIterator[list[Transport]]:
    listeners = [listen("127.0.0.1") for _ in range(ranks)]
    addresses = [one.getsockname()[:2] for one in listeners]
    made = [
        Transport(TcpConnections(rank, addresses, listener, TOKEN), MOST) for rank, listener in enumerate(listeners)
    ]
    async with asyncio.timeout(HANGING_S), AsyncExitStack() as stack:
        await asyncio.gather(*(stack.enter_async_context(one) for one in made))
        yield made


async def test_each_asks_each_with_vectors_of_any_size() -> None:
    """Itself too; an empty vector is one, and large ones arrive whole while others are on their way."""
    async with connected_ranks(3) as transport:

        async def double(rank: int, factor: int, vector: np.ndarray) -> list[float]:
            return [rank, len(vector), float(factor * vector.sum(dtype=np.float64))]

        for one in transport:
            one.handle(double=double)
        for size in (0, 1, 3_000_000):
            vector = np.ones(size, np.float32)
            asked = [one.ask(other, "double", 2, vector=vector) for one in transport for other in range(3)]
            answers = await asyncio.gather(*asked)
            assert answers == [[one.rank, size, 2.0 * size] for one in transport for _ in range(3)]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UsageError, UsageError),
        (BadPayload, UsageError),
        (BusUnavailable, BusUnavailable),
        (LeaseLost, BusError),
    ],
)
async def test_a_refusal_is_raised_where_it_was_asked(error: type[Exception], kind: type[Exception]) -> None:
    """With its words, and as an outage where it was one: that is tried again. The connection goes on."""
    async with connected_ranks(2) as transport:

        async def refuse(rank: int) -> None:
            raise error("not finite")

        transport[1].handle(refuse=refuse)
        for _ in range(2):
            with pytest.raises(kind, match="not finite") as raised:
                await transport[0].ask(1, "refuse")
            assert raised.type is kind


async def test_ranks_that_find_out_together_do_not_wait_for_each_other() -> None:
    """Each tells the other while it is told."""
    async with connected_ranks(3) as transport:
        for rank in (0, 2):
            transport[1]._writers[rank].transport.abort()
        await asyncio.wait_for(
            asyncio.gather(transport[0].watch(), transport[2].watch(), return_exceptions=True), HANGING_S
        )
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(transport[rank].__aexit__(None, None, None) for rank in (0, 2)))
        assert asyncio.get_running_loop().time() - began < INFORM_S / 2
        assert [transport[rank].reports for rank in (0, 2)] == [True, False]


@pytest.mark.parametrize("answers", [True, False])
async def test_one_that_finds_out_alone_has_the_first_of_the_others_tell_the_run(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where rank 0's machine is away. If the first one does not answer, it tells the run itself."""
    monkeypatch.setattr(transport_module, "INFORM_S", 0.5)
    async with connected_ranks(3) as transport:

        async def never(rank: int, why: str, reporter: int) -> None:
            await asyncio.Event().wait()

        if not answers:
            transport[1].handle(broken=never)
        transport[0].leaving = True
        transport[0]._writers[2].transport.abort()
        with pytest.raises(RankGone):
            await transport[2].watch()
        await transport[2].__aexit__(None, None, None)
        assert [transport[rank].reports for rank in (1, 2)] == [answers, not answers]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6 here")
async def test_ranks_of_several_machines_call_each_other_by_ipv4_or_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each says the address by which rank 0's machine is reached."""
    listeners, hosts = [listen(), listen()], []
    for master in ("127.0.0.1", "::1"):
        monkeypatch.setenv("MASTER_ADDR", master)
        hosts.append(_own_address(beside_rank_0=False))
    assert hosts == ["127.0.0.1", "::1"]
    for order in (hosts, hosts[::-1]):
        addresses = [(host, one.getsockname()[1]) for host, one in zip(order, listeners, strict=True)]
        lines = [TcpConnections(rank, addresses, one.dup(), TOKEN) for rank, one in enumerate(listeners)]
        found = await asyncio.gather(*(one.connect() for one in lines))
        for one, others in zip(lines, found, strict=True):
            one.close()
            for _, writer in others.values():
                writer.close()
    for listener in listeners:
        listener.close()


async def test_an_error_from_elsewhere_is_not_lost_where_somebody_watches() -> None:
    """Such as a rank that is gone by a write that failed: else the training would never hear why its exchange ended."""
    lines = TcpConnections(0, [("127.0.0.1", 0)], listen("127.0.0.1"), TOKEN)

    async def fail() -> None:
        async with Transport(lines, MOST) as transport, meanwhile(transport.watch()):
            await asyncio.sleep(0)
            raise RankGone("by a write")

    with pytest.raises(RankGone, match="by a write"):
        await fail()


async def test_one_that_is_gone_as_all_leave_is_not_waited_for() -> None:
    """Neither by who asked it before, nor by who asks it later; questions to others are answered."""
    async with connected_ranks(3) as transport:

        async def never(rank: int) -> None:
            await asyncio.Event().wait()

        async def echo(rank: int) -> int:
            return rank

        for one in transport:
            one.leaving = True
            one.handle(never=never, echo=echo)
        asked = asyncio.create_task(transport[0].ask(1, "never"))
        while len(transport[1]._tasks) < 3:
            await asyncio.sleep(0)
        transport[1]._writers[0].transport.abort()
        for question in (asked, transport[0].ask(1, "echo")):
            with pytest.raises(RankGone, match="rank 1 of this learner is gone"):
                await question
        assert await transport[0].ask(2, "echo") == 0


@pytest.mark.parametrize("in_order", [True, False])
async def test_a_learner_has_left_though_the_rank_that_said_so_is_killed_before_it_lets_the_others_go(
    in_order: bool,
) -> None:
    """They end at once, and say how it left; they would wait for its next word until their time is over."""
    async with connected_ranks(2) as (first, other):
        nothing: Any = None
        for one in (first, other):
            rank = Rank(one, nothing, nothing, nothing, nothing)
        first.tell(0, "left", 0)
        first.tell(1, "left", 0)
        leaving = asyncio.create_task(rank.wait_for_goodbye(3600))
        await first.ask(1, "goodbye", in_order)
        await asyncio.sleep(0)
        assert not leaving.done()
        first.leaving = True
        for writer in first._writers.values():
            writer.close()
        assert await leaving is in_order


async def test_a_learner_has_left_though_a_rank_is_gone_before_it_says_so() -> None:
    """All have heard goodbye: one that ends without another word is not missed, and nobody waits for it."""
    async with connected_ranks(2) as (first, other):
        nothing: Any = None
        ranks = [Rank(one, nothing, nothing, nothing, nothing) for one in (first, other)]

        async def dies(_: int) -> None:
            other._writers[0].transport.abort()

        other.handle(go=dies)
        await ranks[0].send_goodbye(True)
        assert other.leaving


@pytest.mark.parametrize("how", ["before it is called", "after"])
async def test_a_rank_that_dies_before_it_connects_is_not_waited_for(how: str) -> None:
    """Its listener ends with it, so those that it would have called hear of it; naming it."""
    listeners = [listen("127.0.0.1") for _ in range(2)]
    lines = TcpConnections(0, [one.getsockname()[:2] for one in listeners], listeners[0], TOKEN)
    if how == "before it is called":
        listeners[1].close()
    connecting = asyncio.create_task(lines.connect())
    if how == "after":
        listeners[1].setblocking(False)
        called, _ = await asyncio.get_running_loop().sock_accept(listeners[1])
        listeners[1].close()
        called.close()
    with pytest.raises(RankGone, match=r"cannot reach ranks \[1\]"):
        await asyncio.wait_for(connecting, HANGING_S)


async def test_a_rank_that_dies_before_it_takes_a_call_was_never_connected() -> None:
    """The system takes calls for it: who has called names it, and not another one that has given up before."""
    listeners = [listen("127.0.0.1") for _ in range(2)]
    lines = TcpConnections(1, [one.getsockname()[:2] for one in listeners], listeners[1], TOKEN)
    connecting = asyncio.create_task(lines.connect())
    await asyncio.sleep(0.2)
    listeners[0].close()
    with pytest.raises(RankGone, match=r"cannot reach ranks \[0\]"):
        await asyncio.wait_for(connecting, HANGING_S)


async def test_who_does_not_know_the_token_is_no_rank() -> None:
    """It is hung up on, and the ranks go on."""
    async with connected_ranks(2) as transport:

        async def echo(rank: int, what: str) -> str:
            return what

        transport[0].handle(echo=echo)
        reader, writer = await asyncio.open_connection(*transport[0]._connections._addresses[0])
        writer.write(bytes([1]) * 36)
        assert await reader.read() == b""
        writer.close()
        assert await transport[1].ask(0, "echo", "here") == "here"


@pytest.mark.parametrize(
    "sent",
    [
        _SIZES.pack(MAX_HEAD_BYTES + 1, 0),
        _SIZES.pack(4, 4 * MOST + 4),
        _SIZES.pack(4, 3),
        _SIZES.pack(3, 0) + b"\xc1\xc1\xc1",
        _SIZES.pack(1, 0) + b"\x01",
        _SIZES.pack(7, 0) + b"\x93\xc2\x00\xa3foo",
    ],
    ids=["head", "vector", "odd", "msgpack", "list", "question"],
)
async def test_what_no_rank_says_ends_the_learner(sent: bytes) -> None:
    """Sizes without bounds, and what is no question: nothing is made of it, and who sent it is named."""
    async with connected_ranks(2) as transport:
        transport[1]._writers[0].write(sent)
        with pytest.raises(RankGone, match=r"rank 1 of this learner sent unreadable data"):
            await transport[0].watch()


async def test_a_question_that_is_cancelled_in_mid_vector_is_said_to_its_end() -> None:
    """What comes after it on the connection is understood."""
    async with connected_ranks(2) as transport:

        async def take(rank: int, vector: np.ndarray) -> float:
            return float(vector.sum(dtype=np.float64))

        transport[1].handle(take=take)
        asked = asyncio.create_task(transport[0].ask(1, "take", vector=np.ones(MOST, np.float32)))
        while not transport[0]._locks[1].locked():
            await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert await transport[0].ask(1, "take", vector=np.ones(10, np.float32)) == 10
        assert not transport[1]._broken.done()


async def test_a_rank_that_dies_is_noticed_though_a_child_of_it_lives() -> None:
    """A child that was forked has all that was open: it lets go of the lines, and of nothing else."""
    with tempfile.TemporaryFile() as other:
        async with connected_ranks(2) as transport:
            child = os.fork()
            if not child:
                os.write(other.fileno(), b"its own")
                signal.pause()
            try:
                transport[1]._writers[0].close()
                with pytest.raises(RankGone, match="rank 1"):
                    await transport[0].watch()
                while not os.fstat(other.fileno()).st_size:
                    await asyncio.sleep(0.01)
            finally:
                os.kill(child, signal.SIGKILL)
                await asyncio.to_thread(os.waitpid, child, 0)
        other.seek(0)
        assert other.read() == b"its own"
