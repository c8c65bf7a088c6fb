"""The page over HTTP: who gets its files, who its events, and how long those who follow may stay."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from diloco.pipeline.view.page.assets import MODULES, one_file, served
from diloco.syncer.serving import http
from diloco.syncer.serving.http import EVENTS
from diloco.syncer.times import SyncerTimes
from tests import HANGING_S
from tests.syncer.http_side import TOKEN, listening


class Feed:
    """A snapshot, and then what a test puts there."""

    def __init__(self) -> None:
        self._queues: list[asyncio.Queue[bytes]] = []
        self.sent = 0

    @property
    def following(self) -> int:
        return len(self._queues)

    def send(self, event: bytes) -> None:
        for queue in self._queues:
            queue.put_nowait(event)

    async def follow(self) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._queues.append(queue)
        try:
            yield b"event: snapshot\ndata: new\n\n"
            while True:
                yield await queue.get()
                self.sent += 1
        finally:
            self._queues.remove(queue)


@asynccontextmanager
async def page(feed: Feed, token: str | None = None) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    async with (
        listening(events=feed.follow, token=token) as port,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(HANGING_S)) as session,
    ):
        yield session, f"http://127.0.0.1:{port}"


async def until(condition: Any) -> None:
    async with asyncio.timeout(HANGING_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_files_ask_for_no_token_and_events_do() -> None:
    """The files are the same for every run; of the run nothing comes without the token, nor with another one."""
    feed, bearer = Feed(), {"Authorization": f"Bearer {TOKEN}"}
    async with page(feed, TOKEN) as (session, url):
        for path in served():
            async with session.get(url + path) as answer:
                assert answer.status == 200, path
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Cookie": f"token={TOKEN}"}):
            for path in (EVENTS, f"{EVENTS}?token={TOKEN}", "/status", "/metrics"):
                async with session.get(url + path, headers=headers) as answer:
                    assert answer.status == 401, path
                    assert b"event:" not in await answer.read()
        assert feed.following == 0
        async with session.get(url + EVENTS, headers=bearer) as answer:
            assert (answer.status, answer.content_type) == (200, "text/event-stream")
            assert await answer.content.readuntil(b"\n\n") == b"event: snapshot\ndata: new\n\n"
            feed.send(b"event: patch\ndata: {}\n\n")
            assert (await answer.content.readuntil(b"\n\n")).startswith(b"event: patch")
        await until(lambda: feed.following == 0)


async def test_what_is_shown_may_ask_nobody_else() -> None:
    """A strict policy goes with every file, and no file names another host."""
    async with page(Feed()) as (session, url):
        for path in ("/", "/page/app.js", "/page/page.css", EVENTS):
            async with session.get(url + path) as answer:
                policy = answer.headers["Content-Security-Policy"]
                assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
                assert "unsafe" not in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
    for path, (_, content) in served().items():
        ours = re.sub(r"^/\*! https://github.com/leeoniya/uPlot.*", "", content.decode())
        assert (
            not re.search(r"https?://|innerHTML|insertAdjacentHTML|document\.write|\beval\(", ours) or "uplot" in path
        )


@pytest.mark.parametrize(
    "path", ["/page/", "/page/../http.py", "/page/%2e%2e/files.py", "/page/none.js", "/static/app.js"]
)
async def test_there_is_no_other_file(path: str) -> None:
    async with page(Feed()) as (session, url), session.get(aiohttp.client.URL(url + path, encoded=True)) as answer:
        assert answer.status == 404
        assert await answer.text() == "use one of /healthz, /readyz, /status, /metrics, /\n"


async def test_files_and_events_are_only_read() -> None:
    async with page(Feed()) as (session, url):
        for path in ("/", EVENTS):
            async with session.post(url + path) as answer:
                assert answer.status == 405


async def test_who_follows_may_stay_longer_than_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for ever: after that it asks anew."""
    monkeypatch.setattr(http, "TIMES", SyncerTimes(http_connection_s=0.1, http_stream_s=3.0))
    feed = Feed()
    async with page(feed) as (session, url), session.get(url + EVENTS) as answer:
        await answer.content.readuntil(b"\n\n")
        began_s = asyncio.get_running_loop().time()
        await asyncio.sleep(0.3)
        feed.send(b"data: 1\n\n")
        assert await answer.content.readuntil(b"\n\n") == b"data: 1\n\n"
        with pytest.raises((aiohttp.ClientError, asyncio.IncompleteReadError)):
            await answer.content.readexactly(10)
        assert asyncio.get_running_loop().time() - began_s > 0.3


async def test_probes_are_answered_however_many_pages_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page too many is told why, and gets in once another one is closed."""
    monkeypatch.setattr(http, "CONNECTIONS", 8)
    feed = Feed()
    async with page(feed) as (session, url):
        pages = [await session.get(url + EVENTS) for _ in range(4)]
        async with session.get(url + EVENTS) as answer:
            assert (answer.status, await answer.text()) == (503, "4 pages already follow this run: close one\n")
        async with session.get(url + "/healthz") as answer:
            assert answer.status == 200
        pages.pop().close()
        await until(lambda: feed.following == 3)
        async with session.get(url + EVENTS) as answer:
            assert answer.status == 200
        for one in pages:
            one.close()


async def test_who_does_not_read_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much there is to send, no more of it is held than a socket takes."""
    monkeypatch.setattr(http, "TIMES", SyncerTimes(http_write_s=0.2))
    feed = Feed()
    async with page(feed) as (_, url):
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(f"GET {EVENTS} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        await until(lambda: feed.following == 1)
        for _ in range(400):
            feed.send(b"data: " + b"x" * 2**18 + b"\n\n")
        await until(lambda: feed.following == 0)
        assert feed.sent < 400
        writer.close()


def test_no_two_modules_have_a_name_in_common() -> None:
    """For the one file they stand below each other; and each imports only what stands before it."""
    names: list[str] = []
    for number, module in enumerate(MODULES):
        source = served()[f"/page/{module}"][1].decode()
        names += re.findall(r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", source, re.MULTILINE)
        names += [name for many in re.findall(r"^(?:export )?const \{(.*?)\}", source, re.MULTILINE) for name in many]
        assert set(re.findall(r'^import .* from "\./(.*)";$', source, re.MULTILINE)) <= set(MODULES[:number])
        assert len(source.splitlines()) <= 300
    assert len(names) > 40
    assert {name for name in names if names.count(name) > 1} == set()


def test_nothing_in_a_model_ends_the_element_that_holds_it() -> None:
    """Whatever peers have written: markup is escaped, in the title too."""
    text = one_file({"run": "</script><script>alert(1)</script>", "notes": ["<!--", "\u2028"]}, "<b>&")
    assert text.count("</script>") == 3
    assert "<script>alert" not in text
    assert "<title>&lt;b>&amp;</title>" in text
    assert not re.search(r"<(script|link|img)[^>]* (src|href)=", text)
