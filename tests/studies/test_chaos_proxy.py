"""The proxy in front of Redis: one party cut off or hung alone, and let through again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from diloco_studies.strikes.proxy import HOST, MADE_UP_S, Line, Proxy
from diloco_studies.strikes.tail import Tail
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests import HANGING_S

SILENCE_S = 0.2
"""Long enough to have been answered."""


@asynccontextmanager
async def echo(tmp_path: Path) -> AsyncIterator[Path]:
    """A server that sends back what it gets."""

    writers: list[asyncio.StreamWriter] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        with suppress(ConnectionError):
            while piece := await reader.read(2**16):
                writer.write(piece)
                await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, tmp_path / "s")
    try:
        yield tmp_path / "s"
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0)


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, proxy: Proxy, name: str) -> "Client":
        return cls(*await asyncio.open_connection(HOST, proxy[name].port))

    async def says(self, text: bytes, limit_s: float = HANGING_S) -> bytes:
        self.writer.write(text)
        await self.writer.drain()
        async with asyncio.timeout(limit_s):
            return await self.reader.readexactly(len(text))

    async def ended(self) -> bool:
        async with asyncio.timeout(HANGING_S):
            try:
                return await self.reader.read() == b""
            except ConnectionError:
                return True

    def close(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def proxied(upstream: Path) -> AsyncIterator[tuple[Proxy, Client, Client]]:
    async with Proxy(upstream) as proxy:
        for name in ("a", "b"):
            await proxy.add(name)
        first, second = await Client.connect(proxy, "a"), await Client.connect(proxy, "b")
        try:
            assert await first.says(b"hello") == b"hello"
            assert await second.says(b"there") == b"there"
            yield proxy, first, second
        finally:
            first.close()
            second.close()


async def test_what_is_large_passes_whole_in_both_directions(tmp_path: Path) -> None:
    async with echo(tmp_path) as upstream, proxied(upstream) as (_, first, _second):
        sent = bytes(range(256)) * 40_000
        writing = asyncio.create_task(first.says(sent))
        assert await writing == sent


async def test_a_cut_resets_one_party_and_refuses_it_until_it_is_restored(tmp_path: Path) -> None:
    async with echo(tmp_path) as upstream, proxied(upstream) as (proxy, first, second):
        proxy["a"].cut()
        assert await first.ended()
        again = await Client.connect(proxy, "a")
        assert await again.ended()
        assert await second.says(b"still here") == b"still here"
        proxy["a"].restore()
        back = await Client.connect(proxy, "a")
        assert await back.says(b"back") == b"back"
        for one in (again, back):
            one.close()


async def test_a_hang_holds_the_bytes_and_loses_none(tmp_path: Path) -> None:
    async with echo(tmp_path) as upstream, proxied(upstream) as (proxy, first, second):
        proxy["a"].hang()
        with pytest.raises(TimeoutError):
            await first.says(b"held", SILENCE_S)
        new = await Client.connect(proxy, "a")
        with pytest.raises(TimeoutError):
            await new.says(b"too", SILENCE_S)
        assert await second.says(b"still here") == b"still here"
        proxy["a"].restore()
        async with asyncio.timeout(HANGING_S):
            assert await first.reader.readexactly(4) == b"held"
            assert await new.reader.readexactly(3) == b"too"
        new.close()


async def test_a_server_that_is_gone_ends_its_connections(tmp_path: Path) -> None:
    async with Proxy(tmp_path / "nobody") as proxy:
        await proxy.add("a")
        client = await Client.connect(proxy, "a")
        assert await client.ended()
        client.close()


# --- the last second of an append-only file ------------------------------------------------------------


def grow(file: Path, more: int) -> None:
    with file.open("ab") as out:
        out.write(b"x" * more)


def test_what_was_written_in_the_last_second_is_lost_and_no_more(tmp_path: Path) -> None:
    file, tail = tmp_path / "appendonly.aof", Tail()
    tail.note(0.0, None)
    for step in range(40):  # ten bytes every tenth of a second
        grow(file, 10)
        tail.note(step / 10, file)
    grow(file, 5)
    assert tail.lose(4.0, file) == 5 + 9 * 10
    assert file.stat().st_size == 31 * 10


def test_a_file_that_was_just_rewritten_loses_what_came_since(tmp_path: Path) -> None:
    file, tail = tmp_path / "appendonly.aof", Tail()
    grow(file, 1000)
    tail.note(0.0, file)
    new = tmp_path / "new"
    grow(new, 100)
    new.replace(file)
    tail.note(0.5, file)
    grow(file, 50)
    assert tail.lose(1.2, file) == 50


def test_without_a_file_nothing_is_lost() -> None:
    assert Tail().lose(1.0, None) == 0


@in_virtual_time
async def test_a_slow_line_carries_its_pieces_one_after_the_other() -> None:
    """Whoever sends them; what it could have carried while idle is gone, but for a sleep's lateness."""
    loop, line = asyncio.get_running_loop(), Line()
    await asyncio.sleep(5.0)
    began = loop.time()
    await asyncio.gather(*(line.carry(0.1) for _ in range(10)))
    assert 1.0 - MADE_UP_S - 1e-6 <= loop.time() - began <= 1.0 + 1e-6


async def test_a_slow_door_takes_as_long_as_its_line_says(tmp_path) -> None:
    """In each direction by itself: an echo comes back in little more than the time of one way."""
    async with echo(tmp_path) as server, Proxy(server, bytes_per_s=2**20) as proxy:
        await proxy.add("a")
        client = await Client.connect(proxy, "a")
        loop = asyncio.get_running_loop()
        began = loop.time()
        await client.says(bytes(2**18))
        assert loop.time() - began >= 0.9 * 0.25
