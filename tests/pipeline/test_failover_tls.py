"""Sentinels and a cluster that speak TLS alone, with users of their own: a primary is lost, and all go on."""

import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest

from diloco.pipeline.bus import acl
from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.bus.redis_streams import RedisBus, connect
from diloco.pipeline.errors import BusUnavailable, DilocoError, UsageError
from diloco_studies.strikes.failing.servers import ClusterServers, SentinelServers, Servers
from tests import samples
from tests.certificates import Authority, make_authority, tls_binary
from tests.pipeline.test_cluster import everything
from tests.pipeline.test_failover import make_users, moved, until_answered

pytestmark = [
    pytest.mark.redis,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="servers die with this process"),
]
SECRET = "hunter2"  # noqa: S105  # of servers that live for a test
KINDS = {"sentinels": SentinelServers, "cluster": ClusterServers}
GROUPS = {"sentinels": 1, "cluster": 6}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Authority:
    tls_binary(redis_binary)
    return make_authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def servers(kind: str, authority: Authority, redis_binary: Path | None) -> Iterator[Servers]:
    """Each asks everybody for a certificate, and for a password."""
    binary = tls_binary(redis_binary)
    with KINDS[kind](binary=binary, password=SECRET, tls=authority.lines("yes")) as servers:
        yield servers


def files(authority: Authority) -> dict[str, str]:
    certificate, key = authority.issued("client")
    return {"ssl_ca_certs": str(authority.ca), "ssl_certfile": str(certificate), "ssl_keyfile": str(key)}


def url_of(servers: Servers, authority: Authority, login: str = f":{SECRET}") -> str:
    return f"{servers.url.replace('://', f'://{login}@')}?{urlencode(files(authority))}"


async def bus_of(servers: Servers, authority: Authority, user: str, kind: str) -> RedisBus:
    bus = await connect(url_of(servers, authority, f"{user}:pw"), "r")
    bus.keys = RunKeys("r", GROUPS[kind])
    return bus


async def test_a_run_of_users_goes_on_over_tls_at_the_servers_that_take_over(
    kind: str, servers: Servers, authority: Authority
) -> None:
    """Payloads, scripts, blocking reads, before and after."""
    make_users(servers, acl.syncer("r"), acl.learner("r"))
    syncer = await bus_of(servers, authority, "syncer", kind)
    learner = await bus_of(servers, authority, "learner", kind)
    await everything(syncer, groups=GROUPS[kind])
    lost = servers.primaries()[0]
    servers.kill(lost)
    await moved(servers, lost)
    for bus in (syncer, learner):
        await until_answered(lambda bus=bus: bus.write_report(samples.report(number=7)))  # type: ignore[misc]
    for p in range(6):
        await until_answered(lambda p=p: learner.offer(samples.header("l0", fragment=p)))  # type: ignore[misc]
        key = learner.keys.delta_payload(p, "l0", "1" * 8, 0)
        await learner.write_chunks(key, 0, [b"x" * 2**19] * 5, 60)
        assert await syncer.read_chunks(key, 0, 10, 2**20, block_s=5) == [b"x" * 2**19] * 5
    heads = await syncer.read_heads(range(6))
    assert [head.version for head in heads if head] == [1] * 6
    for bus in (syncer, learner):
        await bus.close()


async def test_what_does_not_fit_is_said_and_nobody_gets_the_password(
    kind: str, servers: Servers, authority: Authority, tmp_path: Path
) -> None:
    other = make_authority(tmp_path / "theirs")
    right = files(authority)
    mistaken = {
        "DILOCO_REDIS_CA": (servers.url, right | {"ssl_ca_certs": str(other.ca)}),
        "DILOCO_REDIS_CERT": (servers.url, {"ssl_ca_certs": right["ssl_ca_certs"]}),
        "rediss": (servers.url.replace("rediss", "redis"), {}),
    }
    for said, (url, options) in mistaken.items():
        named = url.replace("://", f"://:{SECRET}@")
        with pytest.raises((UsageError, BusUnavailable), match=said) as refused:
            await connect(f"{named}?{urlencode(options)}" if options else named, "r")
        assert SECRET not in str(refused.value)


async def test_tls_to_servers_without_it_says_so(kind: str, authority: Authority) -> None:
    with KINDS[kind](password=SECRET) as servers:
        url = url_of(servers, authority).replace("redis", "rediss", 1)
        with pytest.raises(DilocoError, match="it does not speak TLS") as refused:
            await connect(url, "r")
        assert SECRET not in str(refused.value)
