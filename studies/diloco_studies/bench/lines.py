"""Slow lines: each party has one of its own to a Redis server on this machine, with a rate in each direction."""

import asyncio
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from diloco.pipeline.clock import fast_loop
from diloco_studies.strikes.proxy import Proxy

GBIT = 1e9 / 8
"""Bytes per second."""


@contextmanager
def lines(server: Path, parties: Iterable[str], bytes_per_s: float) -> Iterator[dict[str, str]]:
    """Party -> URL of its line to the server that listens on the socket `server`; carried by a thread of their own."""
    names, loop, stop, ready = list(parties), fast_loop(), asyncio.Event(), threading.Event()
    made = Proxy(server, bytes_per_s)

    async def serve() -> None:
        async with made as proxy:
            for name in names:
                await proxy.add(name)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield {name: made.url(name) for name in names}
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
