"""Commands that only read a run, without --run: they take the only run of a Redis, and guess nothing."""

import asyncio
import socket
from collections.abc import Iterator

import pytest
import redis as redis_py

from diloco.cli import main
from diloco.pipeline.bus import acl
from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.payload.codec import encode
from tests import samples
from tests.pipeline.conftest import as_user, known

pytestmark = pytest.mark.redis

READERS = ("status", "report", "tape", "watch")


async def begin(url: str, run: str, page: str = "") -> None:
    async with open_bus(url, run) as bus:
        await bus.propose_spec(encode(samples.spec()))
        await bus.write_state(samples.run_state())
        bus.page = page
        await bus.announce_syncer("aa" * 8, "s0", 60)


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(port=0) as made:
        yield made


def test_the_only_run_is_taken_and_a_choice_is_always_obeyed(
    server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By flag, variable or file: a run of that name that is not there is an error, not another run."""
    asyncio.run(begin(server.url, "mine"))
    given = ["status", "--redis-url", server.url, "--json"]
    assert main(given) == 0
    assert '"run": "mine"' in capsys.readouterr().out
    assert main([*given, "--run", "run"]) == 1
    assert "no run 'run'" in capsys.readouterr().err
    monkeypatch.setenv("DILOCO_RUN", "run")
    assert main(given) == 1
    assert "no run 'run'" in capsys.readouterr().err


@pytest.mark.parametrize("command", READERS)
def test_of_several_runs_none_is_taken_and_of_none_none(
    command: str, server: EmbeddedRedis, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are named, even if one has the default name."""
    given = [command, "--redis-url", server.url]
    assert main(given) == 1
    assert capsys.readouterr().err.startswith("error: no runs on this Redis; start a syncer")
    for run in ("mine", "run"):
        asyncio.run(begin(server.url, run))
    assert main(given) == 2
    assert capsys.readouterr().err == "error: this Redis has the runs mine, run; choose one with --run\n"


def test_what_ends_a_run_never_takes_one_by_itself(server: EmbeddedRedis, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(begin(server.url, "mine"))
    assert main(["finish", "--redis-url", server.url, "--no-wait"]) == 1
    assert "run 'run' has not started" in capsys.readouterr().err


def test_a_user_that_may_not_list_runs_is_told_to_choose(
    server: EmbeddedRedis, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(begin(server.url, "mine"))
    with redis_py.Redis(port=server.port, protocol=2) as admin, known(admin, [acl.viewer("mine")]):
        viewer = as_user(f"redis://127.0.0.1:{server.port}", "viewer")
        assert main(["status", "--redis-url", viewer]) == 2
        assert capsys.readouterr().err == "error: this Redis user may not list the runs; choose one with --run\n"
        assert main(["status", "--redis-url", viewer, "--run", "mine"]) == 0


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        (f"http://127.0.0.1:8080/ on {socket.gethostname()}", "http://127.0.0.1:8080/"),
        ("http://127.0.0.1:8080/ on gpu-7", "http://127.0.0.1:8080/ on gpu-7; elsewhere: diloco watch"),
        ("http://gpu-7:8080/", "http://gpu-7:8080/"),
        ("", None),
    ],
)
def test_the_page_of_a_syncer_is_shown_with_its_machine_unless_it_works_here(
    page: str, shown: str | None, server: EmbeddedRedis, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(begin(server.url, "mine", page))
    assert main(["status", "--redis-url", server.url]) == 0
    pages = [line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines() if line.startswith("page ")]
    assert pages == ([] if shown is None else [shown])
