"""TLS against a real server: the right authority, the wrong one, none, a client certificate, a port without TLS."""

import asyncio
import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import redis as redis_py

from diloco.pipeline.bus.embedded import free_port
from diloco.pipeline.bus.redis.inspection import address_of, examine, takes_without_certificate
from diloco.pipeline.bus.redis_streams import connect
from diloco.pipeline.clock import fast_loop
from diloco.pipeline.errors import BusUnavailable, DilocoError, UsageError
from diloco.pipeline.settings import BusSettings, load
from diloco.pipeline.tls import with_tls
from diloco.pipeline.transfer.payloads import pull, push
from tests import HANGING_S
from tests.certificates import Authority, make_authority, tls_binary
from tests.serving import serving

PASSWORD = "hunter2"  # noqa: S105  # of a server that lives for a test


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def binary(redis_binary: Path | None) -> Path:
    return tls_binary(redis_binary)


@contextlib.contextmanager
def tls_server(binary: Path, authority: Authority, folder: Path, clients: str) -> Iterator[tuple[int, int]]:
    """Ports of a server, with TLS and without. `clients`: yes, no or optional: whether it wants their certificates."""
    port, plain = free_port(), free_port()
    config = folder / "redis.conf"
    lines = [f"tls-port {port}", f"port {plain}", "bind 127.0.0.1", 'save ""', f"requirepass {PASSWORD}"]
    config.write_text("\n".join([*lines, *authority.lines(clients), f"dir {folder}"]) + "\n")
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([str(binary), str(config)], stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + HANGING_S
        client = redis_py.Redis(port=plain, password=PASSWORD)
        while True:
            with contextlib.suppress(redis_py.ConnectionError):
                client.ping()
                break
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        client.close()
        yield port, plain
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def ports(binary: Path, authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """(with TLS, without)"""
    folder = tmp_path_factory.mktemp("server")
    with tls_server(binary, authority, folder, "no") as ports:
        yield ports


@pytest.fixture(scope="module")
def strict_port(binary: Path, authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a server that wants a certificate of every client."""
    folder = tmp_path_factory.mktemp("strict")
    with tls_server(binary, authority, folder, "yes") as (port, _):
        yield port


def settings(port: int, **files: Path) -> BusSettings:
    url = f"rediss://:{PASSWORD}@127.0.0.1:{port}"
    return load(BusSettings, {"redis_url": url, **{name: str(path) for name, path in files.items()}})


async def reach(settings: BusSettings) -> None:
    url = settings.bus_url()
    bus = await connect(url, "r")
    assert await bus.read_spec() is None
    assert await bus.acquire_lease(0, "aa" * 8, 10)
    await bus.release_lease(0, "aa" * 8)
    await bus.close()


@pytest.mark.redis
async def test_a_run_is_reached_over_tls_with_its_authority(ports: tuple[int, int], authority: Authority) -> None:
    await reach(settings(ports[0], redis_ca=authority.ca))


async def pushed_and_pulled(settings: BusSettings) -> None:
    """A payload of several pieces, there and back."""
    url = settings.bus_url()
    bus = await connect(url, "r")
    values = np.arange(3 * 2**20, dtype=np.float32)
    key = bus.keys.global_payload(0, 1, "ab" * 8)
    await push(bus, key, values, 512 * 1024, 60.0)
    for _ in range(2):  # the connection is as it was afterwards
        reader = await pull(bus, key, len(values), "fp32", 512 * 1024)
        assert np.array_equal(reader.array(), values)
        assert await bus.read_spec() is None
    await bus.close()


@pytest.mark.redis
@pytest.mark.parametrize("loop", [asyncio.new_event_loop, fast_loop], ids=["asyncio", "fast"])
def test_whole_payloads_travel_over_tls(
    ports: tuple[int, int], authority: Authority, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Large replies are read past the client library, which must not be past the encryption."""
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(pushed_and_pulled(settings(ports[0], redis_ca=authority.ca)))


@pytest.mark.redis
async def test_the_authority_may_stand_in_the_url_or_the_environment(
    ports: tuple[int, int], authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"rediss://:{PASSWORD}@127.0.0.1:{ports[0]}"
    bus = await connect(f"{url}?ssl_ca_certs={authority.ca}", "r")
    await bus.close()
    monkeypatch.setenv("DILOCO_REDIS_URL", url)
    monkeypatch.setenv("DILOCO_REDIS_CA", str(authority.ca))
    await reach(load(BusSettings))


@pytest.mark.redis
async def test_a_certificate_of_another_authority_is_not_trusted_and_the_setting_is_named(
    ports: tuple[int, int], tmp_path: Path
) -> None:
    """Whoever stands between is not talked to: it never gets the password."""
    other = make_authority(tmp_path / "theirs")
    for files in ({"redis_ca": other.ca}, {}):
        with pytest.raises(UsageError, match="DILOCO_REDIS_CA") as refused:
            await reach(settings(ports[0], **files))
        assert PASSWORD not in str(refused.value)


@pytest.mark.redis
async def test_a_certificate_of_another_host_is_not_trusted(ports: tuple[int, int], authority: Authority) -> None:
    url = with_tls(f"rediss://:{PASSWORD}@localhost:{ports[0]}", {"redis_ca": authority.ca})
    with pytest.raises(UsageError, match="its certificate is for a different host name") as refused:
        await connect(url, "r")
    assert PASSWORD not in str(refused.value)


@pytest.mark.redis
async def test_a_client_certificate_is_shown_where_it_is_asked_for(strict_port: int, authority: Authority) -> None:
    certificate, key = authority.issued("client")
    await reach(settings(strict_port, redis_ca=authority.ca, redis_cert=certificate, redis_key=key))
    with pytest.raises(DilocoError, match="DILOCO_REDIS_CERT") as refused:  # not every server says why it hangs up
        await reach(settings(strict_port, redis_ca=authority.ca))
    assert PASSWORD not in str(refused.value)


@pytest.mark.redis
async def test_tls_to_a_port_without_it_and_the_other_way_round_say_so(
    ports: tuple[int, int], authority: Authority
) -> None:
    port, plain = ports
    with pytest.raises(DilocoError, match="it does not speak TLS") as refused:  # a Redis waits for a line to end
        await reach(settings(plain, redis_ca=authority.ca))
    assert PASSWORD not in str(refused.value)
    with pytest.raises(BusUnavailable, match="rediss://") as unanswered:
        await connect(f"redis://:{PASSWORD}@127.0.0.1:{port}", "r")
    assert PASSWORD not in str(unanswered.value)


async def test_certificate_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    missing = tmp_path / "no.pem"
    with pytest.raises(UsageError, match=f"ssl_ca_certs.*{missing}"):
        await reach(settings(1, redis_ca=missing))
    missing.touch()
    with pytest.raises(UsageError, match="DILOCO_REDIS_CERT"):
        await reach(settings(1, redis_key=missing))


def test_certificates_for_a_url_without_tls_are_a_mistake(tmp_path: Path) -> None:
    """Or traffic would go out in the clear that somebody believes encrypted."""
    with pytest.raises(UsageError, match=r"redis_ca.*rediss://") as refused:
        load(BusSettings, {"redis_url": f"redis://:{PASSWORD}@h", "redis_ca": str(tmp_path)}).bus_url()
    assert PASSWORD not in str(refused.value)


def test_a_password_in_the_url_survives_its_certificates() -> None:
    url = with_tls("rediss://me:p%40%2Fw@h:1/0?ssl_check_hostname=false", {"redis_ca": Path("/a b/ca.pem")})
    assert url == "rediss://me:p%40%2Fw@h:1/0?ssl_check_hostname=false&ssl_ca_certs=%2Fa+b%2Fca.pem"


async def test_a_server_that_is_silent_is_not_said_to_speak_no_tls() -> None:
    """Only one that answers in the clear is; to others no advice is given that may be wrong."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(silent) as port:
        with pytest.raises(BusUnavailable) as refused:
            await connect(f"rediss://:{PASSWORD}@127.0.0.1:{port}", "r")
    assert "redis://)" not in str(refused.value)
    assert "no TLS" not in str(refused.value)


@pytest.mark.redis
async def test_who_a_connection_is_and_whether_a_certificate_is_asked_for_is_found_out(
    ports: tuple[int, int], strict_port: int, authority: Authority
) -> None:
    """By asking the server, and by a connection without a certificate, on which nobody logs in."""
    certificate, key = authority.issued("client")
    files = {"redis_ca": authority.ca, "redis_cert": certificate, "redis_key": key}
    for port, takes in ((ports[0], True), (strict_port, False)):
        url = settings(port, **files).bus_url()
        assert address_of(url).certificate == "shown"
        assert await takes_without_certificate(url) is takes
        examination = await examine(url)
        assert await examination.user() == "default"
        await examination.close()
