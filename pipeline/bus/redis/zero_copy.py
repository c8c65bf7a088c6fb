"""Large values to and from one Redis node, with one copy in user space fewer per direction than redis-py makes.

Sending: a command is sent as a list of pieces, the values directly from their memory. Receiving: the reply to an XREAD
is received into one pooled buffer and parsed in place. Connections (with login, TLS etc.) are redis-py's.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import hiredis
import redis.exceptions as rx
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection
from typing_extensions import override

from diloco.pipeline.messages.wire import CHUNK_EXTRA_BYTES
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import ChunkParts

Part = bytes | memoryview
Argument = str | bytes | int | float | ChunkParts

# Initial size of a reply's buffer, which grows if the reply does not fit.
ROOM_BYTES = 4 * 2**20 + 64 * 2**10
_MIN_ROOM = _READ_BYTES = 64 * 2**10
# No limit, for replies whose size only syncers influence.
ANY_SIZE = 2**62
# Array members that one stream entry adds to a reply: the entry, its id, its fields, a field's name and its value.
ENTRY_VALUES = 5
# Upper bound on a stream entry's protocol overhead around its value.
ENTRY_BYTES = 256
# Upper bound on the overhead of a stream and of the reply as a whole.
KEY_BYTES = 64 * 2**10


class ReplyTooLarge(rx.InvalidResponse):
    """A reply is larger than it can validly be. It was not read to its end, so the connection cannot be used again."""


def of_chunks(limit: int, chunk_bytes: int) -> tuple[int, int]:
    """Return the maximum number of bytes and of array members in the reply to an XREAD of `limit` chunks."""
    return limit * (chunk_bytes + CHUNK_EXTRA_BYTES + ENTRY_BYTES) + KEY_BYTES, ENTRY_VALUES * limit + 8


def pack(arguments: Sequence[Argument]) -> list[Part]:
    """Encode a command in Redis's protocol as a list of pieces; the data of chunks are not copied."""
    pieces: list[Part] = []
    text = bytearray(b"*%d\r\n" % len(arguments))  # a bytearray: appending many small arguments stays linear
    for argument in arguments:
        if isinstance(argument, ChunkParts):
            pieces += [bytes(text + b"$%d\r\n" % argument.nbytes + argument.head), argument.data]
            text = bytearray(argument.tail + b"\r\n")
        else:
            value = argument if isinstance(argument, bytes) else str(argument).encode()
            text += b"$%d\r\n%b\r\n" % (len(value), value)
    return [*pieces, bytes(text)]


async def send(client: Redis, commands: Iterable[Sequence[Argument]], max_bytes: int = ANY_SIZE) -> list[Any]:
    """Send several commands in one round trip; return their replies, errors included.

    Raises:
        ConnectionError: the connection was lost.
        ReplyTooLarge: all replies together have more than `max_bytes`.
    """
    made = [pack(command) for command in commands]
    connection = await client.connection_pool.get_connection()  # type: ignore[no-untyped-call]
    writer = connection._writer
    try:
        await connection.send_packed_command([part for pieces in made for part in pieces])
        replies = await _replies(connection, len(made), max_bytes)
    except BaseException:
        if writer is not None:  # redis-py may have closed it already, but a plain close still flushes unsent data
            writer.transport.abort()
        await drop(connection)  # its next user would otherwise read the rest of these replies
        raise
    finally:
        await client.connection_pool.release(connection)
    return replies


async def _replies(connection: AbstractConnection, count: int, max_bytes: int) -> list[Any]:
    """Read replies with hiredis as redis-py does, but with a limit on their size."""
    stream, left, replies = connection._reader, max_bytes, list[Any]()
    reader = hiredis.Reader(protocolError=rx.InvalidResponse, replyError=connection._parser.parse_error)
    while len(replies) < count:
        reply = reader.gets()
        if reply is not False:  # False: hiredis needs more data; no reply to our commands is false
            if isinstance(reply, rx.ConnectionError):  # e.g. the server is loading its data
                raise reply
            replies.append(reply)
            continue
        data = await stream.read(_READ_BYTES) if stream else b""
        if not data:
            raise rx.ConnectionError("connection closed")
        left -= len(data)
        if left < 0:
            raise ReplyTooLarge(f"the reply exceeds the limit of {max_bytes} bytes")
        reader.feed(data)
    return replies


async def ask(client: Redis, command: Sequence[Argument], max_bytes: int = ANY_SIZE) -> Any:
    """Send one command and return its raw reply; it does less work per call than redis-py's `execute_command`.

    Raises:
        ResponseError: the reply is an error.
        ConnectionError, ReplyTooLarge: see `send`.
    """
    (reply,) = await send(client, (command,), max_bytes)
    if isinstance(reply, Exception):
        raise reply
    return reply


async def receive(client: Redis, command: Sequence[Argument], max_bytes: int, max_values: int) -> list[memoryview]:
    """Send a command; return all strings of its reply, flattened, as views of one buffer; none if the reply is nil.

    Raises:
        ResponseError: the reply is an error.
        ConnectionError: the connection was lost.
        ReplyTooLarge: the reply has more than `max_bytes`, or more than `max_values` members of arrays.
    """
    connection = await client.connection_pool.get_connection()  # type: ignore[no-untyped-call]
    try:
        return await _exchange(connection, b"".join(pack(command)), max_bytes, max_values)
    except rx.ResponseError:
        raise
    except BaseException:
        await drop(connection)  # the rest of the reply may still arrive on it
        raise
    finally:
        await client.connection_pool.release(connection)


async def drop(connection: AbstractConnection) -> None:
    """Abort a connection: a regular close would flush megabytes of unsent data to a peer that may be dead."""
    if connection._writer is not None:
        connection._writer.transport.abort()
    await connection.disconnect(nowait=True)


async def drop_all(pool: ConnectionPool) -> None:
    """Abort all connections of a pool, busy ones included. It never suspends, so cancellation cannot cut it short."""
    for connection in (*pool._available_connections, *pool._in_use_connections):
        await drop(connection)


async def _exchange(
    connection: AbstractConnection, command: bytes, max_bytes: int, max_values: int
) -> list[memoryview]:
    if connection._writer is None:
        raise rx.ConnectionError("connection lost before the command was sent")
    transport: Any = connection._writer.transport  # redis-py has no public access to it
    usual = transport.get_protocol()
    reply = Reply(usual, max_bytes=max_bytes, max_values=max_values)
    # The transport writes into the buffer of its current protocol. So for one reply, our protocol replaces redis-py's
    # StreamReader, which would copy the data. Reading is paused during each swap, and the command is sent only
    # afterwards, so no byte of the reply reaches the wrong protocol.
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
    """A parser of one reply, which receives the bytes into its own buffer and parses them there.

    Positions in the buffer: `_at` is the start of the next value to parse, `_filled` the end of what was received, and
    `_needed` the end of the string being received: until then there is nothing to parse.
    """

    def __init__(
        self,
        usual: asyncio.BaseProtocol,
        room_bytes: int = ROOM_BYTES,
        max_bytes: int = ANY_SIZE,
        max_values: int = ANY_SIZE,
    ) -> None:
        """Expect the reply to one command.

        Args:
            usual: the connection's protocol before and afterwards; it is notified if the connection is lost.
            room_bytes: initial size of the buffer.
            max_bytes: a longer reply is refused.
            max_values: limit on the members of all arrays together; each costs time and memory, however short it is.
        """
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lost = False
        self._usual = usual
        self._room, self._room_bytes = memoryview(b""), room_bytes  # allocated on arrival: a waiting read holds none
        self._filled = self._at = self._needed = 0
        self._due, self._max_bytes = 1, max_bytes  # number of values still to parse; limit on all bytes
        self._members = max_values  # number of members that arrays may still announce
        self._strings: list[tuple[int, int]] = []
        self._error = ""

    def strings(self) -> list[memoryview]:
        """Return the received strings in order, as views of the buffer.

        Raises:
            ResponseError: the reply is an error.
        """
        if self._error:
            raise rx.ResponseError(self._error)
        return [self._room[start:stop] for start, stop in self._strings]

    # --- called by the transport ----------------------------------------------------------------------
    @override
    def get_buffer(self, sizehint: int) -> memoryview:
        if len(self._room) - self._filled < _MIN_ROOM:
            self._grow(2 * len(self._room) or self._room_bytes)
        return self._room[self._filled :]

    @override
    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        try:
            if self._filled >= self._needed:
                self._parse()
            if self._filled > self._max_bytes:
                raise ReplyTooLarge(f"the reply exceeds the limit of {self._max_bytes} bytes")
        except ReplyTooLarge as error:
            self._finish(error)
        except ValueError as error:  # int() of something that is not a length: the peer is not a Redis
            self._finish(rx.InvalidResponse(f"not a reply: {error}"))

    @override
    def connection_lost(self, exc: Exception | None) -> None:
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

    def _parse(self) -> None:
        """Parse all values that have been received completely."""
        while self._due and (line := self._line()) is not None:
            kind, text, after = line
            if kind == b"*":
                members = max(0, int(text))
                if members > self._members:
                    raise ReplyTooLarge(f"not a reply: an array of {members}, with more values than were requested")
                self._members -= members
                self._due += members - 1
            elif kind == b"$":
                size = int(text)
                stop = after + max(0, size) + (2 if size >= 0 else 0)
                self._needed = stop
                if stop > self._max_bytes:
                    raise ReplyTooLarge(
                        f"the reply exceeds the limit of {self._max_bytes} bytes, with a string of {size}"
                    )
                if stop > self._filled:
                    if stop > len(self._room):
                        self._grow(stop + _MIN_ROOM)
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
        """Return type byte, text and end position of the line at `_at`; None while it is incomplete."""
        near = bytes(self._room[self._at : min(self._filled, self._at + 64)])
        end = near.find(b"\r\n")
        if end < 0:
            if len(near) < 64:
                return None
            near = bytes(self._room[self._at : self._filled])  # only an error or a status can be longer
            if (end := near.find(b"\r\n")) < 0:
                return None
        return near[:1], near[1:end], self._at + end + 2
