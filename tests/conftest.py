"""A Redis for the session, and the bus on each of its adapters.

The server is the one that DILOCO_TEST_REDIS_SERVER names; else a container where Docker runs; else a private
`redis-server` from PATH or the embedded binary. The tests are the same.
"""

import gc
import os
import secrets
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from chaos.campaign import quiet
from pipeline.embedded import EmbeddedRedis
from pipeline.ports import Bus

from .backdoor import Backdoor, MemoryBackdoor, RedisBackdoor

IMAGE = "redis:7"


@contextmanager
def _container() -> Iterator[str | None]:
    """URL of a Redis container, or None where there is no engine or no image."""
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
        except Exception:  # every way of having no Docker is the same to us
            container = None
        gc.collect()  # a client that found no engine leaves its socket open: collected here, where that is no error
        try:
            if container is None:
                yield None
            else:
                yield f"redis://{container.get_container_host_ip()}:{container.get_exposed_port(6379)}"
        finally:
            if container is not None:
                container.stop()


@pytest.fixture(scope="session")
def redis_binary() -> Path | None:
    """The server that the environment names for tests, if any."""
    named = os.environ.get("DILOCO_TEST_REDIS_SERVER")
    return Path(named) if named else None


@pytest.fixture(scope="session")
def redis_server(redis_binary: Path | None) -> Iterator[str]:
    """URL of a Redis that this session has to itself."""
    if redis_binary is None and not os.environ.get("DILOCO_TEST_NO_DOCKER"):
        with _container() as url:
            if url is not None:
                yield url
                return
    with EmbeddedRedis(binary=redis_binary) as server:
        yield server.url


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
