"""Large values to and from Redis: commands in pieces, replies looked through where they lie."""

import asyncio
import random

import hiredis
import pytest
import redis.exceptions as rx

from diloco.pipeline.bus.redis.zero_copy import Reply, ReplyTooLarge, pack
from diloco.pipeline.payload.codec import ChunkParts


class Usual(asyncio.Protocol):
    lost = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


def feed(reply: Reply, data: bytes, sizes: random.Random) -> None:
    """As a transport does, in pieces of any size."""
    while data:
        room = reply.get_buffer(-1)
        size = min(len(room), len(data), sizes.choice((1, 2, 7, 1000, 10**6)))
        room[:size], data = data[:size], data[size:]
        reply.buffer_updated(size)


def entry(at: int, data: bytes) -> bytes:
    name = b"%d-0" % at
    return b"*2\r\n$%d\r\n%b\r\n*2\r\n$1\r\nc\r\n$%d\r\n%b\r\n" % (len(name), name, len(data), data)


def xread(chunks: list[bytes]) -> bytes:
    return b"*1\r\n*2\r\n$3\r\nkey\r\n*%d\r\n" % len(chunks) + b"".join(entry(i, c) for i, c in enumerate(chunks, 1))


def test_a_command_in_pieces_is_the_command():
    """Joined, it is what the client library would send."""
    parts = ChunkParts(b"head", memoryview(b"x" * 1000), b"tail")
    made = b"".join(pack(("EVALSHA", "0" * 40, 1, "key", 3, 1.5, parts)))
    assert made == hiredis.pack_command(("EVALSHA", "0" * 40, 1, "key", 3, 1.5, parts.joined()))
    assert b"".join(pack(("XADD", b"key", parts, "last"))) == hiredis.pack_command(
        ("XADD", b"key", parts.joined(), "last")
    )


@pytest.mark.parametrize("seed", range(12))
async def test_a_reply_is_found_whatever_comes_at_a_time(seed):
    """Also one that is larger than the room at first, with line ends in its data, and with strings of length 0."""
    draw = random.Random(seed)
    chunks = [draw.choice((b"", b"\r\n$5\r\n", draw.randbytes(draw.choice((10, 3000, 400_000))))) for _ in range(6)]
    reply = Reply(Usual(), room_bytes=70_000)
    feed(reply, xread(chunks), draw)
    assert reply.done.done()
    assert [bytes(one) for one in reply.strings()[3::3]] == chunks


async def test_a_read_that_waits_holds_no_memory():
    """Many wait at the same time; only what comes is worth some."""
    reply = Reply(Usual())
    assert len(reply._room) == 0
    feed(reply, xread([b"abc"]), random.Random(0))
    assert [bytes(one) for one in reply.strings()[3::3]] == [b"abc"]


@pytest.mark.parametrize("nil", [b"*-1\r\n", b"$-1\r\n"])
async def test_nothing_is_nothing(nil):
    reply = Reply(Usual())
    feed(reply, nil, random.Random(0))
    assert reply.done.done()
    assert reply.strings() == []


async def test_an_error_is_raised_whole():
    """However long its line."""
    reply = Reply(Usual())
    feed(reply, b"-NOPERM " + b"x" * 300 + b"\r\n", random.Random(1))
    with pytest.raises(rx.ResponseError, match=r"NOPERM x{300}$"):
        reply.strings()


async def test_what_no_redis_says_ends_the_wait():
    reply = Reply(Usual())
    feed(reply, b"*many\r\n", random.Random(0))
    with pytest.raises(rx.InvalidResponse):
        await reply.done


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"*1\r\n$10000000000\r\n", "a string of 10000000000"),
        (b"*9\r\n" + b"$300\r\n%b\r\n" % bytes(300) * 9, "exceeds the limit of 1000 bytes"),
        (b"*2\r\n*8\r\n" + b"$0\r\n\r\n" * 8 + b"*9000\r\n", "an array of 9000"),
        (b"+" + b"A" * 2000, "exceeds the limit of 1000 bytes"),
    ],
    ids=["one huge string", "many strings", "many values", "a line without an end"],
)
async def test_a_reply_larger_than_what_was_asked_for_ends_the_wait(data, said):
    """As soon as it says so: what it announces is not waited for, and no room is made for it."""
    reply = Reply(Usual(), max_bytes=1000, max_values=50)
    feed(reply, data, random.Random(0))
    assert reply.done.done()
    with pytest.raises(ReplyTooLarge, match=said):
        await reply.done


async def test_a_lost_connection_ends_the_wait_and_the_usual_protocol_hears_of_it():
    usual = Usual()
    reply = Reply(usual)
    feed(reply, xread([b"abc"])[:-4], random.Random(0))
    assert not reply.done.done()
    reply.connection_lost(ConnectionResetError("reset"))
    with pytest.raises(rx.ConnectionError):
        await reply.done
    assert usual.lost
