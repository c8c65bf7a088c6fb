"""What strangers can do to the HTTP side: hold connections, send what is no HTTP, come under other names."""

import asyncio
import json
import math
from typing import Any

import pytest
from structlog.testing import capture_logs

from diloco.syncer.serving import http
from diloco.syncer.serving.http import EVENTS
from diloco.syncer.times import SyncerTimes
from tests.syncer.http_side import TOKEN, listening

GET = b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


async def ask(port: int, request: bytes) -> bytes:
    """All that comes until the other side closes; nothing if it resets the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def ended(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionError:
        return b""


async def test_above_the_most_a_connection_is_closed_at_once_and_who_comes_later_is_answered(monkeypatch):
    """Those that are open stay; once they have had their time, others get in."""
    monkeypatch.setattr(http, "CONNECTIONS", 5)
    async with listening(token=TOKEN) as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        for _ in range(20):
            assert await ask(port, GET % b"/healthz") == b""
        assert not any(reader.at_eof() for reader, _ in idle)
        idle[0][1].close()
        while not (answer := await ask(port, GET % b"/healthz")):
            await asyncio.sleep(0.01)
        assert answer.endswith(b"ok\n")
        for _, writer in idle:
            writer.close()


@pytest.mark.parametrize(
    "sent", [b"", b"GET /healthz", b"GET /healthz HTTP/1.1\r\nHost: a\r\n"], ids=["nothing", "a line", "headers"]
)
async def test_a_head_that_does_not_come_is_not_waited_for(monkeypatch, sent: bytes):
    """Neither is one that comes byte by byte."""
    monkeypatch.setattr(http, "TIMES", SyncerTimes(http_head_s=0.2))
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def trickle() -> None:
            while True:
                writer.write(b"X")
                await asyncio.sleep(0.02)

        writer.write(sent)
        trickling = asyncio.create_task(trickle()) if sent else None
        assert await ended(reader) == b""
        if trickling is not None:
            trickling.cancel()
        writer.close()


async def test_an_answer_that_is_not_read_is_not_waited_for(monkeypatch):
    """And the memory that it takes is given back."""
    monkeypatch.setattr(http, "TIMES", SyncerTimes(http_connection_s=0.3))
    cut = asyncio.Event()

    async def large() -> dict[str, Any]:
        asyncio.get_running_loop().call_later(0.3, cut.set)
        return {"phase": "x" * 30_000_000}

    async with listening(large) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(GET % b"/status")
        await cut.wait()
        await asyncio.sleep(0.1)
        assert len(await ended(reader)) < 30_000_000
        writer.close()


async def test_a_connection_is_one_request():
    """None stays open after its answer, so none has to be bounded in idleness."""
    async with listening() as port:
        for path in (b"/healthz", b"/status", b"/none"):
            answer = await ask(port, GET % path + GET % path)
            assert answer.count(b"HTTP/1.1 ") == 1
            assert b"Connection: close" in answer


async def test_who_goes_away_is_not_worked_for():
    """A status is read from the bus for those only who are still there, and for one at a time."""
    began, gone, reading = asyncio.Event(), asyncio.Event(), []

    async def status() -> dict[str, Any]:
        reading.append(1)
        assert len(reading) == 1
        try:
            began.set()
            await asyncio.Event().wait()
        finally:
            reading.pop()
            gone.set()
        return {}

    async with listening(status) as port:
        pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _, writer in pairs:
            writer.write(GET % b"/status")
        for _, writer in pairs:
            await began.wait()
            began.clear()
            writer.close()
            await gone.wait()
            gone.clear()


async def test_a_status_that_does_not_come_is_said_in_words(monkeypatch):
    monkeypatch.setattr(http, "TIMES", SyncerTimes(http_status_s=0.1))

    async def never() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async with listening(never) as port:
        answer = await ask(port, GET % b"/status")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Redis is slow" in answer


BROKEN = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"BREW /status HTTP/9.9\r\n\r\n",
    b"GET /status HTTP/1.1\r\nno colon\r\n\r\n",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /status HTTP/1.1\r\nA: " + b"a" * 20_000 + b"\r\n\r\n",
    b"GET /status HTTP/1.1\r\n" + b"".join(b"A%d: a\r\n" % i for i in range(200)) + b"\r\n",
    b"GET /status HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
)


@pytest.mark.parametrize("sent", BROKEN, ids=range(len(BROKEN)))
async def test_what_is_no_request_is_refused_without_a_word(sent: bytes, capfd):
    """400, and no line in any log: whoever sends it could fill a disk. A head has a bounded size."""
    with capture_logs() as lines:
        async with listening() as port:
            assert (await ask(port, sent)).startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 "))
            assert (await ask(port, GET % b"/healthz")).endswith(b"ok\n")
    assert [line["event"] for line in lines] == ["http_listening"]
    assert "".join(capfd.readouterr()) == ""


async def test_an_answer_that_fails_is_an_error_in_the_log_and_nothing_else():
    """A bug behind one page is told to the operator, not to whoever asked."""

    async def broken() -> dict[str, Any]:
        raise KeyError("inside")

    with capture_logs() as lines:
        async with listening(broken) as port:
            answer = await ask(port, GET % b"/status")
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"inside" not in answer
    assert [line["error"] for line in lines if line["event"] == "http_answer_failed"] == ["KeyError: 'inside'"]


async def test_a_body_is_not_read():
    """Whatever length it claims, it is answered by what its head says."""
    async with listening() as port:
        post = b"POST /status HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000000\r\n\r\n"
        answer = await ask(port, post + b"a" * 100_000)
        assert answer.startswith(b"HTTP/1.1 405 ") or answer == b""  # closed with bytes unread: may be a reset


LOOPBACK, ALL = "127.0.0.1", "0.0.0.0"  # noqa: S104


@pytest.mark.parametrize(
    ("listens_on", "given", "code"),
    [
        (LOOPBACK, "localhost:8080", 200),
        (LOOPBACK, "LOCALHOST", 200),
        (LOOPBACK, "a.localhost:1", 200),
        (LOOPBACK, "127.0.0.1:8080", 200),
        (LOOPBACK, "[::1]:8080", 200),
        (LOOPBACK, "192.168.1.7:8080", 200),
        (LOOPBACK, None, 200),
        (LOOPBACK, "evil.example:8080", 421),
        (LOOPBACK, "localhost.evil.example", 421),
        (LOOPBACK, "127.0.0.1.evil.example", 421),
        (LOOPBACK, "syncer:8080", 421),
        (LOOPBACK, "", 421),
        (LOOPBACK, "[evil.example]:80", 421),
        (LOOPBACK, "1.2.3.4:80:80", 421),
        (ALL, "127.0.0.1:8080", 200),
        (ALL, "10.0.3.4:8080", 200),
        (ALL, "syncer:8080", 200),
        (ALL, "evil.example:8080", 421),
        (ALL, "", 421),
    ],
)
async def test_a_page_from_elsewhere_reads_nothing(listens_on: str, given: str | None, code: int):
    """DNS rebinding: a page's own name was made to point here. Names of containers and all addresses are answered."""
    name = b"" if given is None else b"Host: " + given.encode() + b"\r\n"
    version = b"1.0" if given is None else b"1.1"
    async with listening(host=listens_on) as port:
        guarded = (b"/status", b"/metrics", b"/", b"/page/app.js", EVENTS.encode())
        for path, expected in (*((path, code) for path in guarded), (b"/healthz", 200), (b"/readyz", 200)):
            answer = await ask(port, b"GET " + path + b" HTTP/" + version + b"\r\n" + name + b"\r\n")
            assert int(answer.split()[1]) == expected
            assert (b"running" in answer) is (path == b"/status" and code == 200)


async def test_the_name_it_listens_on_is_its_own_and_a_token_makes_any_name_good():
    """Prometheus under a name with dots sends the token, which no page from elsewhere has."""
    assert http._is_ours("node-7.example.org:8080", "node-7.example.org")
    async with listening(token=TOKEN) as port:
        head = b"GET /status HTTP/1.1\r\nHost: syncer.prod.svc.cluster.local\r\n"
        assert (await ask(port, head + b"Authorization: Bearer correct-horse\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert (await ask(port, head + b"\r\n")).startswith(b"HTTP/1.1 401 ")


async def test_a_loss_that_is_no_number_is_null():
    """What /status says is JSON for every parser, also when a learner has diverged."""

    async def diverged() -> dict[str, Any]:
        return {"loss": math.nan, "learners": [{"loss": -math.inf, "step": 3}]}

    def refuse(word: str) -> None:
        raise AssertionError(word)

    async with listening(diverged) as port:
        body = (await ask(port, GET % b"/status")).partition(b"\r\n\r\n")[2]
    assert json.loads(body, parse_constant=refuse) == {"loss": None, "learners": [{"loss": None, "step": 3}]}
