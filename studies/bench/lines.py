"""Slow lines: each party has one of its own to a Redis server on this machine, with a rate in each direction."""

import asyncio
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from diloco.pipeline.clock import fast_loop
from diloco.studies.strikes.proxy import Proxy

GBIT = 1e9 / 8
"""Bytes per second."""


@contextmanager
def lines(server: Path, parties: Iterable[str], bytes_per_s: float) -> Iterator[dict[str, str]]:
    """Party -> URL of its line to the server that listens on the socket `server`; carried by a thread of their own."""
    loop, stop, ready = fast_loop(), asyncio.Event(), threading.Event()
    urls: dict[str, str] = {}

    async def serve() -> None:
        async with Proxy(server, bytes_per_s) as proxy:
            for name in parties:
                await proxy.add(name)
                urls[name] = proxy.url(name)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield urls
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
