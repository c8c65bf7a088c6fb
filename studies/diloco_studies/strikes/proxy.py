"""A proxy in front of a Redis, whose doors can be cut, hung and opened again one by one. asyncio.

Each party of a run has a door of its own, a TCP port on loopback, so that one of them alone can be cut off:

    open    bytes are passed on in both directions
    cut     all connections were reset, and whoever connects is reset at once
    hung    connections stand, new ones are taken, and no byte moves; what was sent is held, and passed on later

A server that is not there looks as it would without the proxy: connections end, new ones are reset.
"""

import asyncio
import contextlib
import socket
import struct
from pathlib import Path

HOST = "127.0.0.1"
PIECE_BYTES = 2**18
MADE_UP_S = 0.002
"""A slow line is late by so much at most without having been idle."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: closing resets the connection, and drops what is not sent yet."""


class Line:
    """One direction of a line: on a slow one pieces pass one after the other, each in its time."""

    def __init__(self) -> None:
        self._free_at = 0.0

    async def carry(self, duration_s: float) -> None:
        """Until a piece that takes so long is through. A sleep that lasted too long is made up for by the next ones."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now - MADE_UP_S) + duration_s
        await asyncio.sleep(self._free_at - now)


class Door:
    """One party's way to the server."""

    def __init__(self, upstream: Path, bytes_per_s: float | None = None) -> None:
        """bytes_per_s: that the line carries in each direction, all connections together; None: as many as come."""
        self._upstream, self._bytes_per_s = upstream, bytes_per_s
        self._server: asyncio.Server | None = None
        self._passing = asyncio.Event()
        self._passing.set()
        self._cut = False
        self.there, self.back = Line(), Line()
        """To the server, and from it."""
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0

    async def listen(self) -> None:
        """Take connections on a free port."""
        self._server = await asyncio.start_server(self._accept, HOST, 0, limit=PIECE_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Reset all connections, and each new one."""
        self._cut = True
        for task in self._connections:
            task.cancel()

    def hang(self) -> None:
        """Hold all bytes."""
        self._passing.clear()

    def restore(self) -> None:
        """Let everything through again."""
        self._cut = False
        self._passing.set()

    async def close(self) -> None:
        """Reset all connections and take no more."""
        self.cut()
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  # this is a coroutine
        self._connections.add(task)
        try:
            if not self._cut:
                await self._connect(reader, writer)
        except asyncio.CancelledError:
            if not self._cut:
                raise  # not by us
        finally:
            self._connections.discard(task)
            _reset(writer)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._passing.wait()
        try:
            from_server, to_server = await asyncio.open_unix_connection(self._upstream, limit=PIECE_BYTES)
        except OSError:
            return
        there, back = (
            asyncio.create_task(self._pass(reader, to_server, self.there)),
            asyncio.create_task(self._pass(from_server, writer, self.back)),
        )
        try:  # one side has ended: so does the connection
            await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
        finally:
            to_server.transport.abort()
            for one in (there, back):
                one.cancel()
            await asyncio.gather(there, back, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: "Line") -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(PIECE_BYTES):
                await self._passing.wait()
                if self._bytes_per_s is not None:
                    await line.carry(len(piece) / self._bytes_per_s)
                writer.write(piece)
                await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()


class Proxy:
    """Doors by name; leaving the block closes them."""

    def __init__(self, upstream: Path | None, bytes_per_s: float | None = None) -> None:
        """As told.

        Args:
            upstream: the server's socket; None: there are to be no doors.
            bytes_per_s: of each door's line, in each direction; None: as many as come.
        """
        self._upstream, self._bytes_per_s = upstream, bytes_per_s
        self._doors: dict[str, Door] = {}

    async def __aenter__(self) -> "Proxy":
        return self

    async def __aexit__(self, *_: object) -> None:
        for door in self._doors.values():
            await door.close()

    async def add(self, name: str) -> None:
        """Make a door."""
        assert self._upstream is not None  # noqa: S101  # of a proxy with doors
        door = Door(self._upstream, self._bytes_per_s)
        await door.listen()
        self._doors[name] = door

    def __getitem__(self, name: str) -> Door:
        return self._doors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._doors

    def url(self, name: str) -> str:
        """How a party reaches the server through its door."""
        return f"redis://{HOST}:{self._doors[name].port}"

    def doors(self) -> list[Door]:
        """All of them."""
        return list(self._doors.values())
