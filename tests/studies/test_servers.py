"""Real servers that fail over: another one takes over, the old one comes back as a replica, and nothing is left."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from diloco.pipeline.errors import DilocoError, UsageError
from diloco_studies.strikes.failing.network import Network, enter
from diloco_studies.strikes.failing.servers import ClusterServers, SentinelServers, Servers
from tests import HANGING_S

pytestmark = [
    pytest.mark.redis,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="servers die with this process by a call of Linux"),
]
KINDS: tuple[type[Servers], ...] = (SentinelServers, ClusterServers)
RETURNS_S = 60.0
"""Sentinels take ten seconds to tell an old primary that it is none, where the machine is not busy."""
KEY = "{a}"
"""Its slot belongs to one of a cluster's primaries."""


@pytest.fixture
def network() -> Iterator[Network]:
    with ExitStack() as stack:
        try:
            found = stack.enter_context(Network())
        except UsageError as refused:
            pytest.skip(str(refused))
        yield found


def holder(servers: Servers) -> str:
    """The primary that has the key."""
    for name in servers.serving():
        try:
            servers.nodes[name].ask("GET", KEY)
        except DilocoError:
            continue
        return name
    raise AssertionError(servers.serving())


def folder_of(servers: Servers) -> Path:
    return next(iter(servers.nodes.values())).config.parents[1]


@pytest.mark.parametrize("kind", KINDS)
def test_another_one_takes_over_with_what_was_written_and_the_old_one_returns_as_a_replica(
    kind: type[Servers], redis_binary: Path | None
) -> None:
    with kind(binary=redis_binary) as servers:
        lost = holder(servers)
        assert servers.nodes[lost].ask("SET", KEY, "kept") == "OK"
        assert servers.nodes[lost].ask("WAIT", 1, 1000) >= 1
        servers.kill(lost)
        servers.wait_until(lambda: len(servers.serving()) == servers.shares and lost not in servers.serving())
        new = holder(servers)
        assert servers.nodes[new].ask("GET", KEY) == "kept"
        servers.start(lost)
        servers.wait_until(lambda: lost in servers.replicas(), RETURNS_S)
        assert servers.lost_bytes(lost) == 0
        servers.wait_until(lambda: servers.nodes[new].ask("SET", KEY, "more") == "OK")
        pids = [node.pid for node in servers.nodes.values()]
        folder = folder_of(servers)
        assert folder.is_dir()
    assert not folder.exists()
    assert not any(pid is not None and Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_primary_that_is_cut_off_takes_writes_for_a_while_which_are_lost(
    kind: type[Servers], network: Network, redis_binary: Path | None
) -> None:
    """It refuses them by the time that another one has been elected; when it is back, it has what that one has."""
    with kind(network, redis_binary) as servers:
        old = holder(servers)
        assert servers.nodes[old].ask("SET", KEY, "before") == "OK"
        assert servers.nodes[old].ask("WAIT", 1, 1000) >= 1
        network.cut_off([old, *servers.beside(old)])
        assert servers.nodes[old].ask("SET", KEY, "lost") == "OK", "its replicas' last word is fresh"
        servers.wait_until(lambda: len(servers.serving()) == servers.shares and old not in servers.serving())
        with pytest.raises(DilocoError, match=r"NOREPLICAS|CLUSTERDOWN"):
            servers.nodes[old].ask("SET", KEY, "lost")
        new = holder(servers)
        assert servers.nodes[new].ask("GET", KEY) == "before"
        servers.wait_until(lambda: servers.nodes[new].ask("SET", KEY, "after") == "OK")
        assert servers.lost_bytes(old) > 0
        network.heal()
        servers.wait_until(lambda: old in servers.replicas(), RETURNS_S)
        servers.nodes[new].ask("WAIT", 1, 1000)
        if kind is SentinelServers:
            assert servers.nodes[old].ask("GET", KEY) == "after"


def test_those_that_are_cut_off_reach_each_other_and_nobody_else(network: Network) -> None:
    for name in ("a", "b", "c"):
        network.add(name)

    def reaches(one: str, other: str) -> bool:
        knock = f"import socket; socket.create_connection(('{network[other].address}', 9), timeout=1)"
        command = [*network[one].inside(), sys.executable, "-c", knock]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        return "ConnectionRefusedError" in said  # nobody listens there, and says so

    pairs = [(one, other) for one in "abc" for other in "abc" if one < other]
    assert [pair for pair in pairs if reaches(*pair)] == pairs
    network.cut_off("ab")
    assert [pair for pair in pairs if reaches(*pair)] == [("a", "b")]
    network.heal()
    assert [pair for pair in pairs if reaches(*pair)] == pairs


def test_nothing_is_left_of_a_network_whose_process_is_killed() -> None:
    text = (
        "import time; from diloco_studies.strikes.failing.network import Network\n"
        "with Network() as network:\n"
        "    print(network.add('a').namespace, flush=True); time.sleep(99)"
    )
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        namespace = process.stdout.readline().strip()
        if not namespace:
            pytest.skip("cannot create a separate network here")
        name = f"dlc{process.pid}"
        assert name in Path("/proc/net/dev").read_text()
        process.kill()
    deadline = time.monotonic() + HANGING_S
    while name in Path("/proc/net/dev").read_text() or Path(namespace).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_machine_that_is_none_cannot_be_entered(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot enter"):
        enter(os.fspath(tmp_path / "file"))
