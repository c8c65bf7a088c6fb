"""A server in a test's own loop, which leaves no connection behind."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

NOTICED_S = 0.01
"""Until an end that its client has made a moment ago is seen here."""


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[int]:
    """The port, on 127.0.0.1, where each connection is answered so. Clients have closed theirs when it ends."""
    under_way = set[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        under_way.add(task)
        try:
            await answer(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.sleep(NOTICED_S)
        await asyncio.gather(*under_way)
        await asyncio.sleep(0)


async def no_events() -> AsyncIterator[bytes]:
    """What nobody follows, for the HTTP side."""
    return
    yield b""
