"""A URL with a wrong port, host or server behind it: what is said names the address, what to look at, and no secret."""

import asyncio
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import redis.exceptions as rx

from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.bus.hosts import HostPort
from diloco.pipeline.bus.redis.node_connections import Lanes
from diloco.pipeline.bus.redis.nodes import ClusterNodes, Nodes
from diloco.pipeline.bus.redis.redis_url import parse
from diloco.pipeline.bus.redis_streams import connect
from diloco.pipeline.errors import BusUnavailable, UsageError
from tests.certificates import make_authority
from tests.serving import serving


class Quiet(BaseHTTPRequestHandler):
    """Answers what is no HTTP with an error, and logs nothing."""

    def log_message(self, *args: object) -> None:
        """As it says."""


@pytest.fixture
def no_redis() -> Iterator[int]:
    """Port of a server of another kind."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


async def said(url: str) -> str:
    with pytest.raises(BusUnavailable) as error:
        await connect(url, "run")
    assert "secret" not in str(error.value)
    return str(error.value)


@pytest.mark.redis
@pytest.mark.parametrize("first", ["::1", "127.0.0.2"])
async def test_a_name_whose_first_address_nobody_listens_on_is_reached_by_the_next(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as localhost, which is ::1 first on many machines."""
    known = socket.getaddrinfo

    def twofold(host: str, *args: Any, **more: Any) -> list[Any]:
        named = [first, "127.0.0.1"] if host == "twofold" else [host]
        return [one for name in named for one in known(name, *args, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", twofold)
    with EmbeddedRedis(port=0) as server:
        bus = await connect(f"redis://twofold:{server.port}", "run")
        assert await bus.read_spec() is None
        await bus.close()


async def test_an_option_that_there_is_not_is_refused_without_the_password() -> None:
    with pytest.raises(UsageError, match="that does not exist") as error:
        await connect("redis://:secret@127.0.0.1:9?x=1", "run")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("where", "url"),
    [
        *((one, f"redis://somebody:secret@{one}/0") for one in ("127.0.0.1:9", "nowhere.invalid:6379")),
        ("/no/such.sock", "unix:///no/such.sock"),
    ],
)
async def test_where_nobody_answers_the_address_is_named_and_what_to_look_at(where: str, url: str) -> None:
    text = await said(url)
    assert text.startswith(f"Redis at {where}: ")
    assert "check that Redis is running and that DILOCO_REDIS_URL is its address" in text


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program, to make certificates")
async def test_a_tls_port_that_is_addressed_without_tls_is_named(tmp_path: Path) -> None:
    """Any listener that speaks TLS hangs up on what is none. A server with TLS on is `test_tls.py`'s."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*make_authority(tmp_path / "ours").issued("server"))
    async with await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0, ssl=context) as server:
        assert "TLS (rediss://)" in await said(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")


@pytest.mark.parametrize(("url", "asked"), [("redis://h:1", True), ("redis://h:1,h:2", False)])
async def test_a_server_that_the_url_does_not_name_is_no_reason_to_look_at_the_url(url: str, asked: bool) -> None:
    """A cluster's nodes, or sentinels, have told its address; it is named."""
    place, found = parse(url), HostPort("10.0.0.7", 6379)
    lanes = Lanes(place, Nodes(found) if asked else ClusterNodes(place), AsyncMock())
    text = str(lanes.translate(rx.ConnectionError("Error 111 connecting to 10.0.0.7:6379."), found))
    assert ("DILOCO_REDIS_URL" in text) is asked
    assert ("Redis at 10.0.0.7:6379: no server answers; start it again, unless a replica" in text) is not asked
    await lanes.close()


async def test_a_server_of_another_kind_is_told_from_a_redis(no_redis: int) -> None:
    text = await said(f"redis://somebody:secret@127.0.0.1:{no_redis}")
    assert text.startswith(f"Redis at 127.0.0.1:{no_redis}: ")
    assert "the server there is not Redis" in text


@pytest.mark.parametrize("login", ["", "somebody:secret@"])
@pytest.mark.parametrize(
    ("words", "ours"),
    [
        (
            "DENIED Redis is running in protected mode",
            "accepts no connections from other machines while it has no password",
        ),
        ("ERR max number of clients reached", "has reached its connection limit; raise its maxclients"),
    ],
)
async def test_a_server_that_refuses_a_connection_unasked_is_heard(login: str, words: str, ours: str) -> None:
    """It hangs up behind its words, which the client library may not read: that is not how a port with TLS is."""

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"-{words}\r\n".encode())
        await writer.drain()
        await asyncio.sleep(0.05)

    async with serving(refuse) as port:
        text = await said(f"redis://{login}127.0.0.1:{port}")
    assert f"Redis at 127.0.0.1:{port} {ours}" in text
    assert words.partition(" ")[2] in text
    assert "TLS" not in text


async def test_a_server_that_says_yes_to_all_is_told_from_a_redis() -> None:
    async def nod(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while asked := await reader.read(4096):
            writer.write(b"+OK\r\n" * asked.count(b"*"))

    async with serving(nod) as port:
        with pytest.raises(UsageError, match=f"the server at 127.0.0.1:{port} is not Redis"):
            await connect(f"redis://127.0.0.1:{port}", "run")
