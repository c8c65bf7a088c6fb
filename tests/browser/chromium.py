"""A headless Chromium, driven over its DevTools protocol: Debian's, with an empty profile and nothing to call home."""

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import aiohttp

from tests import HANGING_S

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
)
LOOK_S = 0.05


class Failed(AssertionError):
    """What was awaited did not come, or a script of the page failed."""


class Tab:
    """One page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0
        self.requests: list[str] = []
        """Addresses that the page has asked for."""
        self.errors: list[str] = []
        """What its scripts, its policy or its loading complained of."""
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                future = self._calls.pop(told["id"])
                if not future.done():
                    future.set_result(told)
                continue
            name, about = told["method"], told["params"]
            if name == "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])
            elif name == "Runtime.exceptionThrown":
                details = about["exceptionDetails"]
                self.errors.append(str(details.get("exception", {}).get("description") or details["text"]))
            elif name == "Log.entryAdded" and about["entry"]["level"] == "error":
                self.errors.append(about["entry"]["text"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the protocol."""
        self._number += 1
        future = self._calls[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_str(json.dumps({"id": self._number, "method": method, "params": params}))
        async with asyncio.timeout(HANGING_S):
            told = await future
        if "error" in told:
            raise Failed(f"{method}: {told['error']['message']}")
        return dict(told["result"])

    async def begin(self) -> Self:
        """Hear of what goes on in it."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        return self

    async def open(self, url: str) -> None:
        """Go somewhere."""
        self.requests.clear()
        await self.call("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """Of an expression in the page; a promise is awaited."""
        told = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise Failed(f"{script}: {told['exceptionDetails']['exception'].get('description')}")
        return told["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait until an expression is true; its value.

        Raises:
            Failed: it was not within a minute.
        """
        try:
            async with asyncio.timeout(HANGING_S):
                while True:
                    try:
                        if found := await self.value(script):
                            return found
                    except Failed:  # the page is under way
                        pass
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            text = await self.value("document.body.innerText")
            raise Failed(
                f"not within {HANGING_S:g} s: {script}\nerrors: {self.errors}\nthe page: {text[:3000]}"
            ) from None

    async def size(self, width: int, height: int, scale: float = 1.0) -> None:
        """Of its window."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    async def theme(self, name: str) -> None:
        """ "dark" or "light"."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    async def press(self, key: str) -> None:
        """A key."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    async def picture(self, file: Path) -> None:
        """Of the whole page."""
        told = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        await asyncio.to_thread(file.write_bytes, base64.b64decode(told["data"]))

    async def end(self) -> None:
        """Close the connection."""
        await self._socket.close()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


@asynccontextmanager
async def tab() -> AsyncIterator[Tab]:
    """A page in a browser of its own."""
    assert BINARY is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = (BINARY, *FLAGS, f"--user-data-dir={profile}", "about:blank")
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = await asyncio.create_subprocess_exec(*command, **quiet)
        try:
            port_file = Path(profile) / "DevToolsActivePort"
            async with asyncio.timeout(HANGING_S):
                while not (port_file.is_file() and len(port_file.read_text().split()) == 2):
                    assert process.returncode is None, "Chromium has ended"
                    await asyncio.sleep(LOOK_S)
            port = port_file.read_text().split()[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    (page,) = [one for one in await answer.json() if one["type"] == "page"]
                socket = await session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
                found = await Tab(socket).begin()
                try:
                    yield found
                finally:
                    await found.end()
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
