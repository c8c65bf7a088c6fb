"""The HTTP side, asked over a real socket."""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from structlog.testing import capture_logs

from diloco.pipeline.errors import BusUnavailable, UsageError
from diloco.pipeline.messages.fragment import Contribution
from diloco.pipeline.settings import HttpSettings, SyncerProcess, load
from diloco.syncer.metrics import Metrics
from diloco.syncer.serving.http import announced_page, start_http
from tests import samples
from tests.serving import no_events
from tests.syncer.http_side import TOKEN, fine, listening


@asynccontextmanager
async def http(
    *given: Any, headers: dict[str, str] | None = None, **more: Any
) -> AsyncIterator[Callable[[str], Awaitable[tuple[int, str, str]]]]:
    """Whoever asks it, with these headers."""
    async with listening(*given, **more) as port, aiohttp.ClientSession(headers=headers) as session:

        async def get(path: str) -> tuple[int, str, str]:
            async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                return answer.status, answer.content_type, await answer.text()

        yield get


async def test_health_is_the_event_loop_and_nothing_else():
    """A syncer that waits for its first learner is healthy: it must not be restarted for that."""

    async def away() -> dict[str, Any]:
        raise BusUnavailable("gone")

    async with http(away, lambda: (False, "waiting for the run's spec")) as get:
        assert (await get("/healthz"))[0] == 200


async def test_readiness_gives_its_reason():
    """503 with the reason in words until the syncer has a part in the run."""
    async with http(fine, lambda: (False, "waiting for the run's spec")) as get:
        assert (await get("/readyz"))[::2] == (503, "waiting for the run's spec\n")
    async with http(fine) as get:
        assert (await get("/readyz"))[::2] == (200, "2 of 2 leases held\n")


async def test_status_is_json_even_when_the_bus_is_away():
    """An outage of Redis is shown, not a stack trace, and the next request is served."""
    answers: list[Any] = [BusUnavailable("gone"), {"phase": "running"}]

    async def status() -> dict[str, Any]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with http(status) as get:
        code, kind, body = await get("/status")
        assert (code, kind) == (503, "application/json")
        assert "BusUnavailable: gone" in body
        assert (await get("/status"))[::2] == (200, '{\n "phase": "running"\n}\n')


async def test_metrics_are_prometheus_text():
    """A merge and a refusal are counted under their labels."""
    metrics = Metrics()
    contribution = Contribution(
        learner="l0", incarnation="0" * 8, base_version=0, attempt=0, steps=4, tokens=400, weight=1.0, norm=1.0
    )
    metrics.merged(samples.committed(fragment=3, version=1, quorum_s=0.2, contributions=(contribution,) * 2))
    metrics.refusals.labels(reason="non_finite").inc()
    async with http(fine, metrics=metrics) as get:
        code, kind, body = await get("/metrics")
    assert (code, kind) == (200, "text/plain")
    lines = body.splitlines()
    for line in (
        'diloco_merges_total{fragment="3"} 1.0',
        "diloco_contributions_total 2.0",
        'diloco_merged_tokens_total{fragment="3"} 800.0',
        'diloco_refusals_total{reason="non_finite"} 1.0',
        "diloco_quorum_seconds_sum 0.2",
        'diloco_quorum_seconds_bucket{le="0.1"} 0.0',
        'diloco_quorum_seconds_bucket{le="0.3"} 1.0',
    ):
        assert line in lines


PATHS = ("/status", "/metrics", "/no-such-page")


@pytest.mark.parametrize(
    "given",
    [
        None,
        "Bearer wrong-horse",
        "Bearer ",
        TOKEN,
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        "Bearer \udcff",
    ],
    ids=str,
)
async def test_without_its_token_nothing_but_health_and_readiness_is_told(given: str | None):
    """401 says which header is wanted, and never the token; a container's probes need none."""
    headers = {} if given is None else {"Authorization": given}
    async with http(fine, token=TOKEN, headers=headers) as get:
        assert (await get("/healthz"))[::2] == (200, "ok\n")
        assert (await get("/readyz"))[0] == 200
        for path in PATHS:
            code, _, body = await get(path)
            assert code == 401
            assert "Authorization: Bearer" in body
            assert TOKEN not in body
            assert "running" not in body


async def test_with_its_token_everything_is_as_without_one():
    async with http(fine, token=TOKEN, headers={"Authorization": f"Bearer {TOKEN}"}) as get:
        assert [(await get(path))[0] for path in ("/healthz", "/readyz", *PATHS)] == [200, 200, 200, 200, 404]


@pytest.mark.parametrize(
    ("host", "token", "warned"),
    [("0.0.0.0", None, True), ("0.0.0.0", TOKEN, False), ("127.0.0.1", None, False), ("localhost", None, False)],  # noqa: S104
)
async def test_an_open_address_without_a_token_is_warned_of(host: str, token: str | None, warned: bool):
    with capture_logs() as lines:
        async with listening(host=host, token=token):
            pass
    found = [line for line in lines if line["event"] == "http_open"]
    assert bool(found) is warned
    assert all(line["log_level"] == "warning" and "DILOCO_HTTP_TOKEN" in line["detail"] for line in found)
    assert not any(TOKEN in str(line) for line in lines)


def test_it_is_for_this_machine_alone_unless_told_otherwise(monkeypatch):
    """And its token comes from the environment or a file: no flag, which every user of the machine could read."""
    assert load(SyncerProcess).http_host == "127.0.0.1"
    assert load(SyncerProcess).http_token is None
    monkeypatch.setenv("DILOCO_HTTP_TOKEN", TOKEN)
    token = load(SyncerProcess).http_token
    assert token.get_secret_value() == TOKEN
    assert TOKEN not in repr(load(SyncerProcess))
    monkeypatch.setenv("DILOCO_HTTP_TOKEN", "hunter2")
    with pytest.raises(UsageError, match="http_token") as refused:
        load(SyncerProcess)
    assert "hunter2" not in str(refused.value)


async def test_a_taken_port_is_said_in_words():
    """The person at the command line learns which setting to change."""
    async with listening() as port:
        with pytest.raises(UsageError, match=f"http_port={port}"):
            await start_http(fine, lambda: (True, ""), Metrics().registry, no_events, HttpSettings(http_port=port))


async def test_the_next_port_is_taken_in_place_of_the_default_one_and_said_in_one_line(monkeypatch):
    """Nobody has asked for the default. A second syncer of a machine needs no flag."""
    told = list[str]()
    async with listening() as port:
        monkeypatch.setattr("diloco.syncer.serving.http.NEXT_PORTS", 50)

        class Usual(HttpSettings):
            http_port: int = port

        settings = Usual()
        runner, page = await start_http(fine, lambda: (True, ""), Metrics().registry, no_events, settings, told.append)
        await runner.cleanup()
    assert port < int(page.rpartition(":")[2].rstrip("/")) <= port + 50
    assert told == [f"page {page} (port {port} is in use)"]


def test_an_address_that_holds_on_one_machine_names_it_for_readers_elsewhere(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-7")
    assert announced_page("http://127.0.0.1:8080/", "127.0.0.1") == "http://127.0.0.1:8080/ on gpu-7"
    assert announced_page("http://[::1]:8080/", "::1") == "http://[::1]:8080/ on gpu-7"
    assert announced_page("http://127.0.0.1:8080/", "0.0.0.0") == "http://127.0.0.1:8080/ on gpu-7"  # noqa: S104
    assert announced_page("http://10.0.0.5:8080/", "10.0.0.5") == "http://10.0.0.5:8080/"


async def test_a_host_that_does_not_exist_is_refused_in_the_resolvers_words():
    settings = HttpSettings(http_host="no.such.host.invalid", http_port=0)
    with pytest.raises(UsageError, match="cannot listen on http_host=no") as refused:
        await start_http(fine, lambda: (True, ""), Metrics().registry, no_events, settings, lambda text: None)
    assert "Unknown error" not in str(refused.value)
    assert "any free port" not in str(refused.value)
