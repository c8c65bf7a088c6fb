"""Connections between ranks, in one process."""

import asyncio
import os
import select
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from typing import Any

import numpy as np
import pytest

from diloco.pipeline.errors import BadPayload, BusError, BusUnavailable, LeaseLost, RankGone, UsageError
from diloco.workers.exchange.joining import in_background
from diloco.workers.ranks import transport as transport_module
from diloco.workers.ranks.placement import SLICE
from diloco.workers.ranks.rank_learner import Rank
from diloco.workers.ranks.topology import _own_address
from diloco.workers.ranks.transport import (
    _SIZES,
    INFORM_S,
    MAX_CALLERS,
    MAX_HEAD_BYTES,
    Transport,
    accept_calls,
    call_lower_ranks,
    listen,
)
from tests import HANGING_S

TOKEN = bytes(range(32))


def connections(hosts: Sequence[str], host: str = "127.0.0.1") -> list[dict[int, socket.socket]]:
    """Connect ranks at these addresses, of listeners at `host`; the connections of each."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(listen(host)) for _ in hosts]
        addresses = [(one, listener.getsockname()[1]) for one, listener in zip(hosts, listeners, strict=True)]
        called = [call_lower_ranks(rank, addresses, TOKEN) for rank in range(len(hosts))]
        accepted = [accept_calls(one, rank, len(hosts), TOKEN) for rank, one in enumerate(listeners)]
    return [mine | others for mine, others in zip(called, accepted, strict=True)]


@asynccontextmanager
async def connected_ranks(ranks: int) -> AsyncIterator[list[Transport]]:
    made = [Transport.over(rank, found) for rank, found in enumerate(connections(["127.0.0.1"] * ranks))]
    async with asyncio.timeout(HANGING_S), AsyncExitStack() as stack:
        for one in made:
            await stack.enter_async_context(one)
        yield made


async def test_each_asks_each_with_vectors_of_any_size() -> None:
    """Itself too; an empty vector is one, and large ones arrive whole while others are on their way."""
    async with connected_ranks(3) as transport:

        async def double(rank: int, factor: int, vector: np.ndarray) -> list[float]:
            return [rank, len(vector), float(factor * vector.sum(dtype=np.float64))]

        for one in transport:
            one.handle(double=double)
        for size in (0, 1, SLICE):
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

        async def never(rank: int, why: str, reported: bool) -> None:
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
    hosts = []
    for master in ("127.0.0.1", "::1"):
        monkeypatch.setenv("MASTER_ADDR", master)
        hosts.append(_own_address(beside_rank_0=False))
    assert hosts == ["127.0.0.1", "::1"]
    for order in (hosts, hosts[::-1]):
        first, second = connections(order, "")
        first[1].send(b"here")
        assert select.select([second[0]], [], [], HANGING_S)[0]
        assert second[0].recv(9) == b"here"
        first[1].close()
        second[0].close()


async def test_an_error_from_elsewhere_is_not_lost_where_somebody_watches() -> None:
    """Such as a rank that is gone by a write that failed: else the training would never hear why its exchange ended."""

    async def fail() -> None:
        async with Transport.over(0, {}) as transport, in_background(transport.watch()):
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
            with pytest.raises(RankGone, match="rank 1 of this learner has ended"):
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
        first.notify(0, "left", 0)
        first.notify(1, "left", 0)
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


async def test_a_rank_that_dies_before_its_messages_are_read_is_noticed() -> None:
    """As while its learner waits for Redis: the connection is there, and has ended."""
    (first, second) = connections(["127.0.0.1"] * 2)
    second[0].close()
    async with Transport.over(0, first) as transport:
        with pytest.raises(RankGone, match="rank 1 of this learner has ended"):
            await asyncio.wait_for(transport.watch(), HANGING_S)


def test_a_rank_that_cannot_be_reached_is_named() -> None:
    """By whoever calls it: nobody listens there."""
    with listen("127.0.0.1") as listener:
        address = listener.getsockname()[:2]
    with pytest.raises(RankGone, match="rank 1 of this learner cannot reach rank 0"):
        call_lower_ranks(1, [address], TOKEN)


def test_who_does_not_know_the_token_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is hung up on, and so is who says nothing, a rank that there is not, and one that is here already; ranks that
    have not called in time are named."""
    monkeypatch.setattr(transport_module, "CONNECT_S", 0.5)
    said = [bytes(36), TOKEN + bytes([0, 0, 0, 0]), TOKEN + bytes([3, 0, 0, 0]), b"short", TOKEN + bytes([1, 0, 0, 0])]
    with listen("127.0.0.1") as listener, ExitStack() as stack:
        strangers = list[socket.socket]()
        for words in (*said, said[-1]):
            strangers.append(stack.enter_context(socket.create_connection(listener.getsockname()[:2])))
            strangers[-1].sendall(words)
        with pytest.raises(RankGone, match=r"ranks \[2\] of this learner have not connected to rank 0"):
            accept_calls(listener, 0, 3, TOKEN)
        for one in (*strangers[:4], strangers[5]):
            one.settimeout(HANGING_S)
            assert one.recv(1) == b""


def test_strangers_that_say_nothing_hold_up_no_rank() -> None:
    """More of them than are kept, all there before the rank that is waited for: the time limit is never looked at."""
    with listen("127.0.0.1") as listener, ExitStack() as stack:
        strangers = list[socket.socket]()

        def called(hello: bytes) -> None:
            strangers.append(stack.enter_context(socket.create_connection(listener.getsockname()[:2])))
            strangers[-1].sendall(hello)

        for number in range(MAX_CALLERS + 4):
            called(TOKEN[: number % 4])
        called(TOKEN + bytes([1, 0, 0, 0]))
        (found,) = accept_calls(listener, 0, 2, TOKEN).items()
        assert found[0] == 1
        found[1].close()
        for one in strangers[:-1]:
            one.settimeout(HANGING_S)
            with suppress(ConnectionResetError):
                assert one.recv(1) == b""


@pytest.mark.parametrize(
    "sent",
    [
        _SIZES.pack(MAX_HEAD_BYTES + 1, 0),
        _SIZES.pack(4, 4 * SLICE + 4),
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
        asked = asyncio.create_task(transport[0].ask(1, "take", vector=np.ones(SLICE, np.float32)))
        while not transport[0]._asked:
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
