"""A Redis for the session, and the bus on each of its adapters.

The server is the one that DILOCO_TEST_REDIS_SERVER names; else a container where Docker runs; else a private
server: the embedded one, or one from PATH. The tests are the same, and say which one they use, and why.
"""

import gc
import os
import secrets
import signal
import subprocess
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
import structlog
from hypothesis import HealthCheck, settings

from diloco.pipeline.bus.embedded import PACKAGE, EmbeddedRedis, find_server
from diloco.pipeline.bus.ports import Bus
from tests import quiet
from tests.backdoor import Backdoor, MemoryBackdoor, RedisBackdoor

IMAGE = "redis:7"
NO_DOCKER = "DILOCO_TEST_NO_DOCKER"

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")  # by default an example may take 200 ms

gc.disable()  # until all tests are known: what a collection makes stays, and to look through it takes seconds

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # there is a worker for each core; torch has not been imported yet


@contextmanager
def _container() -> Iterator[tuple[str | None, str]]:
    """URL of a Redis container, or None and why there is none."""
    os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")  # one more image; we stop what we start
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import docker
            from testcontainers.redis import RedisContainer

            engine = docker.from_env(timeout=10)
            try:
                engine.ping()
                if not engine.images.list(IMAGE):
                    engine.images.pull(*IMAGE.split(":"))
            finally:
                engine.close()
            container = RedisContainer(IMAGE).start()
        except Exception as error:  # every way of having no Docker is the same to us
            container, why = None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        gc.collect()  # a client that found no engine leaves its socket open: collected here, where that is no error
        try:
            if container is None:
                yield None, why
            else:
                yield f"redis://{container.get_container_host_ip()}:{container.get_exposed_port(6379)}", ""
        finally:
            if container is not None:
                container.stop()


def _named_server() -> Path | None:
    named = os.environ.get("DILOCO_TEST_REDIS_SERVER")
    return Path(named) if named else None


def _version(url: str) -> str:
    with redis.Redis.from_url(url, protocol=2) as client:
        found = client.info("server")
        return str(found.get("valkey_version", found["redis_version"]))  # Valkey gives itself out for a Redis 7.2


@contextmanager
def _a_server() -> Iterator[tuple[str, str]]:
    """URL of a Redis, and in words which one that is and why."""
    named, why = _named_server(), "DILOCO_TEST_REDIS_SERVER names it"
    with ExitStack() as stack:
        if named is None and os.environ.get(NO_DOCKER):
            why = f"no container, since {NO_DOCKER} is set"
        elif named is None:
            url, why = stack.enter_context(_container())
            if url is not None:
                yield url, f"a container of {IMAGE}, version {_version(url)}"
                return
            why = f"no container: {why}"
        binary = named or find_server()
        url = stack.enter_context(EmbeddedRedis(binary=binary)).url
        kind = "the embedded one, " if PACKAGE in str(binary) else "" if named else "the one from PATH, "
        yield url, f"{kind}{binary}, version {_version(url)} ({why})"


SERVER = pytest.StashKey[tuple[str, str]]()


def _server(config: pytest.Config) -> tuple[str, str]:
    """The Redis of this test run, started when first asked for."""
    if SERVER not in config.stash:
        stack = ExitStack()
        config.stash[SERVER] = stack.enter_context(_a_server())
        config.add_cleanup(stack.close)
    return config.stash[SERVER]


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Above the tests' results: which Redis they use. Not before the collection, which says whether any needs one."""
    if config.option.collectonly or not any(item.get_closest_marker("redis") for item in items):
        return []
    return [f"redis: {_server(config)[1]}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Simulated worlds first: who runs files beside each other would have them alone at the end, for minutes."""
    items.sort(key=lambda item: item.path.parent.name != "world")


def pytest_collection_finish() -> None:
    """What is here now stays: it is not looked through again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def redis_binary() -> Path | None:
    """The server that the environment names for tests, if any."""
    return _named_server()


@pytest.fixture(scope="module")
def redis_server(pytestconfig: pytest.Config) -> str:
    """URL of a Redis that this session has to itself, empty as a file of tests begins: files may use the same names."""
    url = _server(pytestconfig)[0]
    with redis.Redis.from_url(url, protocol=2) as client:
        client.flushall()
    return url


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
def backdoor(request: pytest.FixtureRequest) -> Iterator[Backdoor]:
    """The server's side of the bus, under a run name of its own."""
    run = f"test-{secrets.token_hex(4)}"
    if request.param == "memory":
        yield MemoryBackdoor(run)
        return
    redis = RedisBackdoor(run, request.getfixturevalue("redis_server"))
    yield redis
    redis.free_memory()
    redis.client.close()


@pytest.fixture
async def bus(backdoor: Backdoor) -> AsyncIterator[Bus]:
    """A bus on each adapter."""
    bus = await backdoor.connect()
    yield bus
    await bus.close()


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In an empty folder, without a setting of whoever runs the tests."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.upper().startswith("DILOCO_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A command that runs in this process sends the log to its own stderr, which is closed when its test is over."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture
def no_log_lines() -> None:
    """A world logs thousands of outages; tests of log lines in the same process want theirs."""
    quiet()


@pytest.fixture
def popen() -> Iterator[Callable[..., "subprocess.Popen[Any]"]]:
    """`subprocess.Popen`, whose processes are killed and waited for when the test is over, with sessions they lead."""
    with ExitStack() as stack:

        def start(command: Any, **more: Any) -> "subprocess.Popen[Any]":
            process = stack.enter_context(subprocess.Popen(command, **more))  # closes its pipes and waits
            stack.callback(_kill, process, more.get("start_new_session", False))
            return process

        yield start


def _kill(process: "subprocess.Popen[Any]", session: bool) -> None:
    if session:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch's: models as small as those of tests are slower on several; and one thread rounds in one way."""
    import torch  # most tests do without

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
