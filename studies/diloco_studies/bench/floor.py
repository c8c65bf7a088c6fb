"""What the machine could do at best, found in the same run: bytes through Redis by a C client, memory at its speed.

The C client is `redis-benchmark`. Where there is none, a stand-in sends commands that were packed beforehand and counts
the bytes that come back, which is the least that a client can do.
"""

import shutil
import socket
import subprocess
import threading
import time
from typing import NamedTuple
from urllib.parse import urlparse

import numpy as np

from diloco.pipeline.bus.embedded import find_server
from diloco.pipeline.errors import UsageError
from diloco.pipeline.process.cores import usable_cores
from diloco_studies.bench.plain import connected, packed

CLIENTS, PIPELINE = 4, 2
"""With which `redis-benchmark` is fastest here, and as many commands are in flight as with any other choice."""
KEY = "key:__rand_int__"
"""Where `redis-benchmark` writes unless it is told of several keys."""


class Rates(NamedTuple):
    """Bytes per second through a Redis server."""

    into: float
    out: float
    client: str


def find_benchmark() -> str | None:
    """The C client: on PATH, or beside the server binary."""
    if found := shutil.which("redis-benchmark"):
        return found
    try:
        beside = find_server().resolve().parent / "redis-benchmark"
    except UsageError:
        return None
    return str(beside) if beside.is_file() else None


def client_name(benchmark: str | None) -> str:
    """What stands beside the figures."""
    if benchmark:
        return "redis-benchmark"
    return "packed commands over plain sockets, since redis-benchmark is not on PATH"


def rates(url: str, chunk_bytes: int, into_bytes: float, out_bytes: float, benchmark: str | None) -> Rates:
    """Move so many bytes into and out of a server, one after the other.

    Raises:
        UsageError: the client failed, with what it said.
    """
    counts = [max(8, round(total / chunk_bytes)) for total in (into_bytes, out_bytes)]
    if benchmark:
        into, out = _by_benchmark(url, chunk_bytes, counts[0], counts[1], benchmark)
    else:
        into, out = _by_sockets(url, chunk_bytes, counts[0], counts[1])
    return Rates(into * chunk_bytes, out * chunk_bytes, client_name(benchmark))


def _by_benchmark(url: str, chunk_bytes: int, sets: int, gets: int, program: str) -> tuple[float, float]:
    where = urlparse(url)
    to = ["-s", where.path] if where.scheme == "unix" else ["-h", where.hostname or "", "-p", str(where.port or 6379)]
    if where.password:
        to += ["-a", where.password, *(["--user", where.username] if where.username else [])]
    found = []
    for test, count in (("set", sets), ("get", gets)):
        how = ["-t", test, "-d", str(chunk_bytes), "-n", str(count), "-c", str(CLIENTS), "-P", str(PIPELINE), "--csv"]
        done = subprocess.run([program, *to, *how], capture_output=True, text=True, check=False)
        lines = [line.split(",") for line in done.stdout.splitlines() if line.upper().startswith(f'"{test.upper()}"')]
        if done.returncode or not lines:
            raise UsageError(f"redis-benchmark failed: {(done.stderr or done.stdout).strip()[:500]}")
        found.append(float(lines[0][1].strip('"')))
    return found[0], found[1]


def _by_sockets(url: str, chunk_bytes: int, sets: int, gets: int) -> tuple[float, float]:
    """Commands per second: `PIPELINE` in flight on each of `CLIENTS` connections, all answered."""
    put, answer = packed("SET", KEY, b"x" * chunk_bytes), len(b"+OK\r\n")
    get, value = packed("GET", KEY), len(f"${chunk_bytes}\r\n\r\n") + chunk_bytes
    found = []
    for command, reply, count in ((put, answer, sets), (get, value, gets)):
        each = -(-count // CLIENTS)
        links = [connected(url) for _ in range(CLIENTS)]
        threads = [threading.Thread(target=_drive, args=(link, command, reply, each)) for link in links]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found.append(each * CLIENTS / (time.perf_counter() - began))
        for link in links:
            link.close()
    return found[0], found[1]


def _drive(link: socket.socket, command: bytes, reply: int, count: int) -> None:
    room = bytearray(2**20)
    sent = received = 0
    while received < count * reply:
        while sent < count and sent * reply - received < PIPELINE * reply:
            link.sendall(command)
            sent += 1
        received += link.recv_into(room)


class Memory:
    """Copies between large arrays on all cores at once: what anything that touches memory takes at least."""

    def __init__(self) -> None:
        each = 64 * 2**20 // usable_cores()
        self._pairs = [(np.ones(each, np.uint8), np.ones(each, np.uint8)) for _ in range(usable_cores())]

    def rate(self) -> float:
        """Bytes per second, those read and those written together."""
        threads = [threading.Thread(target=np.copyto, args=pair) for pair in self._pairs]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 2 * sum(source.nbytes for source, _ in self._pairs) / (time.perf_counter() - began)


def merge_traffic(elements: int, learners: int, item_bytes: float, momentum: bool) -> float:
    """Bytes that a merge must read and write, if nothing of a whole fragment stays in the cache between two passes.

    One pass for the norms of the deltas, one for their weighted sum, one that scales it, and the outer step: values and
    momentum read and written.
    """
    deltas, values = elements * item_bytes * learners, 4.0 * elements
    return 2 * deltas + values + values + 2 * values + (2 * values if momentum else 0.0)
