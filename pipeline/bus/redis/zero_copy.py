"""Large values to and from one Redis node with one copy in user space less at each turn than the client library makes.

Sending: a command goes out as pieces, the values as they lie in memory. Receiving: the reply of an XREAD comes into one
buffer that is used again, and is looked through there. Connections (with login, TLS and all that) are redis-py's.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import hiredis
import redis.exceptions as rx
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection

from diloco.pipeline.messages.wire import CHUNK_EXTRA_BYTES
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import ChunkParts

Part = bytes | memoryview
Argument = str | bytes | int | float | ChunkParts

ROOM_BYTES = 4 * 2**20 + 64 * 2**10
"""Of the buffer that a reply comes into; it grows if the reply does not fit."""
_LEAST_ROOM = _READ_BYTES = 64 * 2**10
ANY_SIZE = 2**62
"""Of replies that only syncers have a say in."""
ENTRY_VALUES = 5
"""Members of arrays that each entry of a stream adds to a reply: itself, id and fields, a field and its value."""
ENTRY_BYTES = 256
"""What a stream's entry has around its value on the wire, at most."""
KEY_BYTES = 64 * 2**10
"""The same of a stream, and of the reply."""


class TooMuch(rx.InvalidResponse):
    """A reply is larger than what was asked for can be. It was not read to its end: the connection is of no use."""


def of_chunks(limit: int, chunk_bytes: int) -> tuple[int, int]:
    """Bytes and values that the reply to an XREAD of so many chunks has at most."""
    return limit * (chunk_bytes + CHUNK_EXTRA_BYTES + ENTRY_BYTES) + KEY_BYTES, ENTRY_VALUES * limit + 8


def pack(arguments: Sequence[Argument]) -> list[Part]:
    """A command as it travels, in pieces."""
    pieces: list[Part] = []
    text = bytearray(b"*%d\r\n" % len(arguments))  # of many arguments, which are not to be copied with each
    for argument in arguments:
        if isinstance(argument, ChunkParts):
            pieces += [bytes(text + b"$%d\r\n" % argument.nbytes + argument.head), argument.data]
            text = bytearray(argument.tail + b"\r\n")
        else:
            value = argument if isinstance(argument, bytes) else str(argument).encode()
            text += b"$%d\r\n%b\r\n" % (len(value), value)
    return [*pieces, bytes(text)]


async def send(client: Redis, commands: Iterable[Sequence[Argument]], most_bytes: int = ANY_SIZE) -> list[Any]:
    """Several commands in one round trip; errors are among the replies.

    Raises:
        ConnectionError: the connection was lost.
        TooMuch: the replies have more than `most_bytes`, all together.
    """
    made = [pack(command) for command in commands]
    connection = await client.connection_pool.get_connection()  # type: ignore[no-untyped-call]
    writer = connection._writer
    try:
        await connection.send_packed_command([part for pieces in made for part in pieces])
        replies = await _replies(connection, len(made), most_bytes)
    except BaseException:
        if writer is not None:  # the library may have closed it by now, which waits for what was to be sent
            writer.transport.abort()
        await drop(connection)  # or its next user would read these replies
        raise
    finally:
        await client.connection_pool.release(connection)
    return replies


async def _replies(connection: AbstractConnection, count: int, most_bytes: int) -> list[Any]:
    """As the library reads them, which takes them of any size."""
    stream, left, replies = connection._reader, most_bytes, list[Any]()
    reader = hiredis.Reader(protocolError=rx.InvalidResponse, replyError=connection._parser.parse_error)
    while len(replies) < count:
        reply = reader.gets()
        if reply is not False:  # which none of ours is
            if isinstance(reply, rx.ConnectionError):  # the server is loading its data, say
                raise reply
            replies.append(reply)
            continue
        data = await stream.read(_READ_BYTES) if stream else b""
        if not data:
            raise rx.ConnectionError("connection closed")
        left -= len(data)
        if left < 0:
            raise TooMuch(f"not a reply: more than {most_bytes} bytes")
        reader.feed(data)
    return replies


async def ask(client: Redis, command: Sequence[Argument], most_bytes: int = ANY_SIZE) -> Any:
    """One command's reply as Redis gives it, by a shorter way than the library's own.

    Raises:
        ResponseError: the reply is an error.
        ConnectionError, TooMuch: as `send`.
    """
    (reply,) = await send(client, (command,), most_bytes)
    if isinstance(reply, Exception):
        raise reply
    return reply


async def receive(client: Redis, command: Sequence[Argument], most_bytes: int, most_values: int) -> list[memoryview]:
    """All strings of a command's reply, however they are nested; none where it is nil.

    Raises:
        ResponseError: the reply is an error.
        ConnectionError: the connection was lost.
        TooMuch: the reply has more bytes, or members of arrays.
    """
    connection = await client.connection_pool.get_connection()  # type: ignore[no-untyped-call]
    try:
        return await _exchange(connection, b"".join(pack(command)), most_bytes, most_values)
    except rx.ResponseError:
        raise
    except BaseException:
        await drop(connection)  # the rest of the reply may still come
        raise
    finally:
        await client.connection_pool.release(connection)


async def drop(connection: AbstractConnection) -> None:
    """Close it now: what was to be sent on it may be megabytes, and its other end gone without a word."""
    if connection._writer is not None:
        connection._writer.transport.abort()
    await connection.disconnect(nowait=True)


async def drop_all(pool: ConnectionPool) -> None:
    """Close all its connections now, the busy ones too. It waits for nobody, so it is never cut short."""
    for connection in (*pool._available_connections, *pool._in_use_connections):
        await drop(connection)


async def _exchange(
    connection: AbstractConnection, command: bytes, most_bytes: int, most_values: int
) -> list[memoryview]:
    if connection._writer is None:
        raise rx.ConnectionError("connection lost before the command was sent")
    transport: Any = connection._writer.transport  # the library has no other way to it
    usual = transport.get_protocol()
    reply = Reply(usual, most_bytes=most_bytes, most_values=most_values)
    transport.pause_reading()
    transport.set_protocol(reply)
    transport.resume_reading()
    transport.write(command)
    try:
        await reply.done
    finally:
        if not reply.lost:
            transport.pause_reading()
            transport.set_protocol(usual)
            transport.resume_reading()
    return reply.strings()


class Reply(asyncio.BufferedProtocol):
    """One reply as it comes in."""

    def __init__(
        self,
        usual: asyncio.BaseProtocol,
        room_bytes: int = ROOM_BYTES,
        most_bytes: int = ANY_SIZE,
        most_values: int = ANY_SIZE,
    ) -> None:
        """Expect the reply to one command.

        Args:
            usual: the connection's protocol before and afterwards, which has to hear of its end.
            room_bytes: of its buffer at first.
            most_bytes: more is no reply to what was asked.
            most_values: members of arrays, in all; each takes time and memory, however short it is.
        """
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost = False
        self._usual = usual
        self._room, self._room_bytes = memoryview(b""), room_bytes  # a read that waits holds none
        self._filled = self._at = self._needed = 0
        self._due, self._most = 1, most_bytes
        """Values not yet seen; bytes that they may have."""
        self._members = most_values
        """That arrays may still announce."""
        self._strings: list[tuple[int, int]] = []
        self._error = ""

    def strings(self) -> list[memoryview]:
        """What came, in order, where it lies.

        Raises:
            ResponseError: it is an error.
        """
        if self._error:
            raise rx.ResponseError(self._error)
        return [self._room[start:stop] for start, stop in self._strings]

    # --- what the transport calls ---------------------------------------------------------------------
    def get_buffer(self, sizehint: int) -> memoryview:
        """Room for what comes next."""
        if len(self._room) - self._filled < _LEAST_ROOM:
            self._grow(2 * len(self._room) or self._room_bytes)
        return self._room[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """So much has come."""
        self._filled += nbytes
        try:
            if self._filled >= self._needed:
                self._look()
            if self._filled > self._most:
                raise TooMuch(f"not a reply: more than {self._most} bytes")
        except TooMuch as error:
            self._finish(error)
        except ValueError as error:  # int() of something else: no Redis speaks so
            self._finish(rx.InvalidResponse(f"not a reply: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more will come."""
        self.lost = True
        self._finish(rx.ConnectionError(f"connection lost: {exc or 'closed by the server'}"))
        self._usual.connection_lost(exc)

    # --- inside ---------------------------------------------------------------------------------------
    def _finish(self, error: Exception | None = None) -> None:
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)

    def _grow(self, room_bytes: int) -> None:
        larger = memoryview(pooled(room_bytes))  # type: ignore[arg-type]  # numpy's stubs lack Buffer
        larger[: self._filled] = self._room[: self._filled]
        self._room = larger

    def _look(self) -> None:
        """Walk over all values that are whole."""
        while self._due and (line := self._line()) is not None:
            kind, text, after = line
            if kind == b"*":
                members = max(0, int(text))
                if members > self._members:
                    raise TooMuch(f"not a reply: an array of {members}, with more values than were asked for")
                self._members -= members
                self._due += members - 1
            elif kind == b"$":
                size = int(text)
                stop = after + max(0, size) + (2 if size >= 0 else 0)
                self._needed = stop
                if stop > self._most:
                    raise TooMuch(f"not a reply: more than {self._most} bytes, with a string of {size}")
                if stop > self._filled:
                    if stop > len(self._room):
                        self._grow(stop + _LEAST_ROOM)
                    return
                if size >= 0:
                    self._strings.append((after, after + size))
                after = stop
                self._due -= 1
            else:
                if kind == b"-":
                    self._error = text.decode(errors="replace")
                self._due -= 1
            self._at = after
        if not self._due:
            self._finish()

    def _line(self) -> tuple[bytes, bytes, int] | None:
        """Kind and text of the line at hand, and where it ends; None while it is not whole."""
        near = bytes(self._room[self._at : min(self._filled, self._at + 64)])
        end = near.find(b"\r\n")
        if end < 0:
            if len(near) < 64:
                return None
            near = bytes(self._room[self._at : self._filled])  # an error may be long
            if (end := near.find(b"\r\n")) < 0:
                return None
        return near[:1], near[1:end], self._at + end + 2
