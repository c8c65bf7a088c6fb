"""Real Redis servers that fail over: a primary with replicas and sentinels, or a cluster whose primaries have replicas.

    with SentinelServers() as servers:               # or ClusterServers()
        ...                                          # parties reach it by `servers.url`
        lost = servers.primaries()[0]                # a name, for instance "redis-0"
        servers.kill(lost)                           # SIGKILL: dead for good, or until `servers.start(lost)`
        servers.wait_until(lambda: lost not in servers.primaries())

Each server is a process with a folder of its own. Leaving the block ends all of them and removes the folders. So does
the kernel with the processes if this one is killed, and the next start of a Redis of ours with the folders.

All listen on free ports of 127.0.0.1. With a `Network` each server is a machine of its own there instead, named as the
server is, and can be cut off. `ask` reaches a server that is cut off, too: it goes by a unix socket.
"""

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import hiredis

from diloco.pipeline.bus.cluster_slots import SLOTS
from diloco.pipeline.bus.embedded import KEEPS_FREED, find_server, free_port
from diloco.pipeline.bus.server import OWN_PREFIX
from diloco.pipeline.errors import DilocoError
from diloco.pipeline.files.scratch import locked
from diloco.pipeline.process import signals
from diloco_studies.bench.plain import answered
from diloco_studies.strikes.failing.network import Network

SERVICE = "diloco"
"""What the sentinels call the primary and its replicas."""
LOOPBACK = "127.0.0.1"
PORT, BUS_PORT = 6379, 16379
"""Of a server that is a machine of its own."""
DOWN_MS = 1000
"""A primary that is silent for so long is taken for dead."""
FAILOVER_MS = 4000
"""A failover that has not succeeded is tried again after twice that."""
MAX_LAG_S = 1
"""A primary whose replicas have all been silent for longer takes no writes (to the second, so up to two)."""
START_S = 20.0
ASK_S = 2.0
POLL_S = 0.05
SERVER = (
    "daemonize no",
    "protected-mode no",
    'save ""',
    "appendonly yes",
    "appendfsync everysec",
    "maxmemory-policy noeviction",
    "repl-diskless-sync yes",
    "repl-diskless-sync-delay 0",
    "repl-ping-replica-period 1",
    "repl-timeout 5",
    "client-output-buffer-limit replica 0 0 0",
    "repl-backlog-size 64mb",
)


class Node:
    """One server process, which can be killed, and started again on what its folder holds."""

    def __init__(
        self, name: str, folder: Path, command: Sequence[str], address: tuple[str, int], tls: Sequence[str] = ()
    ) -> None:
        """tls: as of `Servers`."""
        self.name, self.address, self._tls = name, address, tls
        self._folder, self._command = folder, command
        self._process: subprocess.Popen[bytes] | None = None
        self.password = ""
        """That it asks for."""
        folder.mkdir(mode=0o700)

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    @property
    def config(self) -> Path:
        """Its configuration, which it may rewrite."""
        return self._folder / "redis.conf"

    def configure(self, *lines: str) -> None:
        """Write its configuration, but for its address."""
        self.config.touch(mode=0o600)  # passwords are in it
        host, port = self.address
        own = (f"bind {host}", f"dir {self._folder}", f"unixsocket {self._folder}/redis.sock")
        ports = ("port 0", f"tls-port {port}", "tls-replication yes", "tls-cluster yes", *self._tls)
        self.config.write_text("\n".join((*own, *(ports if self._tls else (f"port {port}",)), *lines)) + "\n")

    def start(self) -> None:
        """Start it, unless it runs. From the main thread: it dies with this process."""
        if self.pid is not None:
            return
        with (self._folder / "redis.log").open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-P", signals.__file__, str(os.getpid()), *self._command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=KEEPS_FREED | os.environ,
            )

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to it and to what it has forked, as when its machine fails; its folder stays."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def ask(self, *words: str | int) -> Any:
        """Its answer to a command: text, a number, a list or None.

        Raises:
            DilocoError: it answers with an error.
            OSError: it does not answer.
        """
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(ASK_S)
            line.connect(str(self._folder / "redis.sock"))
            reader = hiredis.Reader(encoding="utf-8", errors="replace")
            if self.password:
                _answer(line, reader, "AUTH", self.password)
            return _answer(line, reader, *words)

    def last_lines(self) -> str:
        """Of its log."""
        return "\n".join((self._folder / "redis.log").read_text(errors="replace").splitlines()[-8:])


def _answer(line: socket.socket, reader: hiredis.Reader, *words: str | int) -> Any:
    answer = answered(line, reader, *words)
    if isinstance(answer, hiredis.HiredisError):
        raise DilocoError(str(answer))
    return answer


class Servers:
    """What both kinds have in common. Leaving the block leaves no process and no folder."""

    shares = 1
    """How many primaries have the keys among them."""

    def __init__(
        self,
        network: Network | None = None,
        binary: Path | None = None,
        password: str = "",
        tls: Sequence[str] = (),
    ) -> None:
        """As told.

        Args:
            network: entered; None: all on 127.0.0.1.
            binary: the server to start, instead of the one found.
            password: asked of everybody, and used among the servers; not in `url`.
            tls: lines of a configuration that name certificates: with them all speak TLS, to each other too.
        """
        self._network, self._binary, self._password, self._tls = network, binary, password, tuple(tls)
        self._scheme = "rediss" if self._tls else "redis"
        self._folder = Path()
        self._lock, self._ends = -1, contextlib.ExitStack()
        self.nodes: dict[str, Node] = {}

    @property
    def url(self) -> str:
        """How parties reach them (without the password: that belongs in the environment)."""
        raise NotImplementedError

    def primaries(self) -> list[str]:
        """Names of those that are primaries, as the others of them say."""
        raise NotImplementedError

    def serving(self) -> list[str]:
        """Those of them that say so themselves, and so take what is asked of them."""
        found = []
        for name in self.primaries():
            with contextlib.suppress(OSError, DilocoError):
                if self.nodes[name].ask("ROLE")[0] == "master":
                    found.append(name)
        return found

    def lost_bytes(self, name: str) -> int:
        """Bytes of writes that this one has taken since another one took over from it, and that nobody else has."""
        old, lost = self._replication(name), 0
        for other in self.serving():
            new = self._replication(other)
            if other != name and new["master_replid2"] == old["master_replid"]:
                lost = int(old["master_repl_offset"]) + 1 - int(new["second_repl_offset"])
        return lost

    def _replication(self, name: str) -> dict[str, str]:
        lines = self.nodes[name].ask("INFO", "replication").splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def can_spare(self, name: str) -> bool:
        """Whether the others can do without this one for good."""
        raise NotImplementedError

    def beside(self, name: str) -> list[str]:
        """Those that stand in the same place as this one, and are cut off with it."""
        sentinel = f"sentinel-{name.rpartition('-')[2]}"
        return [sentinel] if sentinel in self.nodes else []

    def _set_up(self) -> None:
        """Start all, and wait until they know each other."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._binary = self._binary or find_server()
        self._folder, self._lock = locked(Path(tempfile.gettempdir()), OWN_PREFIX)
        with contextlib.ExitStack() as stack:
            stack.callback(self._end)
            self._set_up()
            self._ends = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def _end(self) -> None:
        for node in self.nodes.values():
            node.kill()
        os.close(self._lock)
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self, name: str) -> None:
        """SIGKILL to this one; it stays dead until `start`."""
        self.nodes[name].kill()

    def start(self, name: str) -> None:
        """Start this one on what its folder holds. A dead primary finds a new one there, and becomes its replica."""
        self.nodes[name].start()

    def replicas(self) -> list[str]:
        """Names of the living ones that follow a primary, and are in touch with it."""
        found = []
        for name, node in self.nodes.items():
            with contextlib.suppress(OSError, DilocoError):
                answer = node.ask("ROLE")
                if answer[0] == "slave" and answer[3] == "connected":
                    found.append(name)
        return found

    def wait_until(self, holds: Callable[[], bool], limit_s: float = START_S) -> float:
        """Until it holds; how many seconds that took.

        Raises:
            DilocoError: it did not come to hold; the servers' last lines.
        """
        began = time.monotonic()
        while True:
            with contextlib.suppress(OSError, DilocoError):
                if holds():
                    return time.monotonic() - began
            if time.monotonic() - began > limit_s:
                told = "\n".join(f"{name}:\n{node.last_lines()}" for name, node in self.nodes.items())
                raise DilocoError(f"the Redis servers were not ready within {limit_s:g} s; their last lines:\n{told}")
            time.sleep(POLL_S)

    def _add(self, name: str, *more: str) -> Node:
        """A server's process, not yet started. more: arguments behind the configuration's file."""
        folder = self._folder / name
        address, before = (LOOPBACK, free_port(LOOPBACK)), []
        if self._network is not None:
            host = self._network.add(name)
            address, before = (host.address, PORT), host.inside()
        node = Node(name, folder, [*before, str(self._binary), str(folder / "redis.conf"), *more], address, self._tls)
        self.nodes[name] = node
        return node

    def _secrets(self, node: Node) -> list[str]:
        """Lines of a server's configuration by which it asks for the password, and uses it."""
        node.password = self._password
        if not self._password:
            return []
        users, digest = node.config.with_name("users.acl"), hashlib.sha256(self._password.encode()).hexdigest()
        users.write_text(f"user default on #{digest} ~* &* +@all\n")  # a file, for users that are made later
        quoted = self._password.replace("\\", "\\\\").replace('"', '\\"')
        return [f"aclfile {users}", f'masterauth "{quoted}"']

    def _name_of(self, address: tuple[str, int]) -> str | None:
        return next((name for name, node in self.nodes.items() if node.address == address), None)


class SentinelServers(Servers):
    """`redis-0`, at first the primary, its replicas `redis-1` and `redis-2`, and `sentinel-0` to `sentinel-2`.

    A primary without a replica in reach takes no writes: of three servers, one may be dead.
    """

    @property
    def url(self) -> str:
        """The sentinels, and the service."""
        where = (node.address for name, node in self.nodes.items() if name.startswith("sentinel"))
        return f"{self._scheme}+sentinel://{','.join(f'{host}:{port}' for host, port in where)}/{SERVICE}"

    def primaries(self) -> list[str]:
        """The one that most living sentinels name."""
        named = []
        for name, node in self.nodes.items():
            with contextlib.suppress(OSError, DilocoError):
                if name.startswith("sentinel"):
                    host, port = node.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
                    named.append(self._name_of((host, int(port))))
        found = max(named, key=named.count, default=None)
        return [] if found is None else [found]

    def can_spare(self, name: str) -> bool:
        """A primary, where another one and its replica live; a sentinel, where two others do."""
        kind = name.partition("-")[0]
        return sum(one.name.startswith(kind) and one.pid is not None for one in self.nodes.values()) > 2

    def _set_up(self) -> None:
        for number in range(3):
            node = self._add(f"redis-{number}")
            writes = ("min-replicas-to-write 1", f"min-replicas-max-lag {MAX_LAG_S}")
            follows = [] if number == 0 else ["replicaof {} {}".format(*self.nodes["redis-0"].address)]
            node.configure(*SERVER, *writes, *self._secrets(node), *follows)
            node.start()
        self.wait_until(lambda: len(self.replicas()) == 2)
        host, port = self.nodes["redis-0"].address
        secret = [f"sentinel auth-pass {SERVICE} {self._password}"] if self._password else []
        for number in range(3):
            node = self._add(f"sentinel-{number}", "--sentinel")
            node.configure(
                "daemonize no",
                "protected-mode no",
                f"sentinel monitor {SERVICE} {host} {port} 2",
                f"sentinel down-after-milliseconds {SERVICE} {DOWN_MS}",
                f"sentinel failover-timeout {SERVICE} {FAILOVER_MS}",
                f"sentinel parallel-syncs {SERVICE} 2",
                *secret,
            )
            node.start()
        self.wait_until(self._all_known)

    def _all_known(self) -> bool:
        for name, node in self.nodes.items():
            if name.startswith("sentinel"):
                answer = node.ask("SENTINEL", "MASTER", SERVICE)
                said = dict(zip(answer[::2], answer[1::2], strict=True))
                told = said["num-slaves"], said["num-other-sentinels"], said["flags"]
                if told != ("2", "2", "master"):
                    return False
        return True


class Clustered(Servers):
    """A cluster, of which the first servers share the slots."""

    def _join(self, count: int, *lines: str) -> list[str]:
        """Start so many servers, which know each other then; their ids. lines: of their configurations."""
        ids = []
        for number in range(count):
            node, bus_port = self._add(f"redis-{number}"), BUS_PORT if self._network else free_port(LOOPBACK)
            own = ("cluster-enabled yes", "cluster-config-file nodes.conf", f"cluster-port {bus_port}")
            node.configure(*lines, *self._secrets(node), *own)
            node.start()
            self.wait_until(lambda node=node: node.ask("PING") == "PONG")  # type: ignore[misc]
            ids.append(node.ask("CLUSTER", "MYID"))
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            if number:
                self.nodes["redis-0"].ask("CLUSTER", "MEET", *node.address, bus_port)
        everybody = list(self.nodes.values())
        self.wait_until(lambda: all(len(one.ask("CLUSTER", "NODES").splitlines()) == count for one in everybody))
        for number in range(self.shares):
            first, last = number * SLOTS // self.shares, (number + 1) * SLOTS // self.shares
            self.nodes[f"redis-{number}"].ask("CLUSTER", "ADDSLOTS", *range(first, last))
        return ids

    def _ok(self) -> bool:
        return all("cluster_state:ok" in one.ask("CLUSTER", "INFO") for one in self.nodes.values())


class ClusterServers(Clustered):
    """`redis-0` to `redis-2`, at first the primaries, and `redis-3` to `redis-5`, a replica of each in this order.

    Slots of a dead primary are served by its replica, and those of a pair that is dead by nobody.
    """

    shares = 3

    @property
    def url(self) -> str:
        """All the servers: who starts later finds one that lives."""
        return f"{self._scheme}://{','.join('{}:{}'.format(*node.address) for node in self.nodes.values())}"

    def primaries(self) -> list[str]:
        """Those that have slots, as most of the living say."""
        told: dict[str, int] = {}
        asked = 0
        for node in self.nodes.values():
            with contextlib.suppress(OSError, DilocoError):
                lines = [line.split() for line in node.ask("CLUSTER", "NODES").splitlines()]
                asked += 1
                for line in lines:
                    host, _, port = line[1].partition("@")[0].partition(",")[0].rpartition(":")
                    name = self._name_of((host, int(port)))
                    if "master" in line[2] and len(line) > 8 and name is not None:
                        told[name] = told.get(name, 0) + 1
        return [name for name, votes in told.items() if 2 * votes > asked]

    def can_spare(self, name: str) -> bool:
        """Where its replica is in touch with it, which no other one is."""
        number = int(name.rpartition("-")[2])
        return f"redis-{(number + 3) % 6}" in self.replicas()

    def _set_up(self) -> None:
        ids = self._join(6, *SERVER, f"cluster-node-timeout {DOWN_MS}")
        for number in range(3):
            self.nodes[f"redis-{number + 3}"].ask("CLUSTER", "REPLICATE", ids[number])
        self.wait_until(lambda: len(self.replicas()) == 3 and len(self.primaries()) == 3 and self._ok())
