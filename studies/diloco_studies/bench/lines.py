"""Slow lines: each party has one of its own to a Redis server on this machine, with a rate in each direction."""

import asyncio
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from diloco.pipeline.clock import fast_loop
from diloco_studies.strikes.proxy import Door, Proxy

GBIT = 1e9 / 8
"""Bytes per second."""


@contextmanager
def one_line(server: Path, bytes_per_s: float) -> Iterator[tuple[str, Door]]:
    """URL of a line that several parties share, and its door, which counts their bytes; as `lines`."""
    with _doors(server, ["all"], bytes_per_s) as proxy:
        yield proxy.url("all"), proxy["all"]


@contextmanager
def lines(server: Path, parties: Iterable[str], bytes_per_s: float) -> Iterator[dict[str, str]]:
    """Party -> URL of its line to the server that listens on the socket `server`; carried by a thread of their own."""
    names = list(parties)
    with _doors(server, names, bytes_per_s) as proxy:
        yield {name: proxy.url(name) for name in names}


@contextmanager
def _doors(server: Path, names: Iterable[str], bytes_per_s: float) -> Iterator[Proxy]:
    loop, stop, ready = fast_loop(), asyncio.Event(), threading.Event()
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
        yield made
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
