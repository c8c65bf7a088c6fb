"""Lines of packets between network namespaces: a rate, a delay, a queue and losses for each, in each direction. Linux.

    party in its namespace ── tun ──┐                 ┌── tun ── Redis on the host
                                    └── this process ─┘

The kernel's own emulator (netem) is often not built in; two TUN devices and a process that passes packets on between
them are enough. What parties speak over such a line is the kernel's TCP: it meets losses, grows its window, shares the
line between connections, and sends again. A process of its own, started by `line_runs`; it needs root.

    python -m diloco_studies.bench.slow.packets NUMBER '{"learner-0": "NAMESPACE", ...}'

The number, below 256, tells the networks of several benches apart. It says a line of JSON when all lines are up. Then
each line that it reads is either `{"shape": {"learner-0": [...]}}`, with the fields of `Shape`, or `{"count": true}`,
which it answers. Until a line is shaped it carries all at once.
"""

import fcntl
import json
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

ADDRESS = "198.18.{}.{}"
"""Of a network that is for benchmarks (RFC 2544)."""
MTU = 1500
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_AT_ONCE = 64
LEAST_QUEUE_BYTES = 32 * MTU


class Shape(NamedTuple):
    """Of a line, the same in each direction."""

    bytes_per_s: float = 0.0
    """0: as many as come."""
    delay_s: float = 0.0
    """One way."""
    jitter_s: float = 0.0
    """A packet's delay differs by so much at most; none overtakes another one."""
    loss: float = 0.0
    """Share of the packets that are lost, each by chance."""
    queue_s: float = 0.2
    """What waits in front of the line takes so long at most; more is dropped, as a router does."""


class Direction:
    """One direction of a line: what came in, and when it comes out. Pure: time and chance are arguments."""

    def __init__(self, chance: random.Random) -> None:
        self.shape, self._chance = Shape(), chance
        self._free_at = self._last_out = 0.0
        self._under_way: deque[tuple[float, bytes]] = deque()
        self.carried_bytes = self.carried = self.lost = self.dropped = 0

    def put(self, packet: bytes, now: float) -> None:
        """A packet came."""
        shape, leaves = self.shape, now
        if shape.bytes_per_s:
            waits_s = max(0.0, self._free_at - now)
            if waits_s * shape.bytes_per_s > max(LEAST_QUEUE_BYTES, shape.queue_s * shape.bytes_per_s):
                self.dropped += 1
                return
            leaves = self._free_at = now + waits_s + len(packet) / shape.bytes_per_s
        self.carried += 1
        self.carried_bytes += len(packet)
        if shape.loss and self._chance.random() < shape.loss:
            self.lost += 1
            return
        out = leaves + shape.delay_s
        if shape.jitter_s:
            out += self._chance.uniform(-shape.jitter_s, shape.jitter_s)
        self._last_out = max(self._last_out, out)
        self._under_way.append((self._last_out, packet))

    def ready(self, now: float) -> Iterator[bytes]:
        """Packets that have come through."""
        while self._under_way and self._under_way[0][0] <= now:
            yield self._under_way.popleft()[1]

    @property
    def next_at(self) -> float | None:
        """When the next one comes through."""
        return self._under_way[0][0] if self._under_way else None


def _device(name: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


def _ip(*arguments: str) -> None:
    subprocess.run([shutil.which("ip") or "ip", *arguments], check=True)


class Place(NamedTuple):
    """Of a line: its two devices, and their addresses."""

    ours: str
    theirs: str
    host: str
    address: str


def place(network: int, number: int) -> Place:
    """Of line `number` of a network."""
    return Place(
        f"dl{network}x{number}h",
        f"dl{network}x{number}p",
        ADDRESS.format(network, 1),
        ADDRESS.format(network, 10 + number),
    )


def _connect(at: Place, namespace: str) -> tuple[int, int]:
    """Two devices, the host's and the party's."""
    ours, theirs, host, address = at
    descriptors = _device(ours), _device(theirs)
    _ip("link", "set", theirs, "netns", namespace)
    _ip("addr", "add", host, "peer", address, "dev", ours)
    _ip("link", "set", ours, "mtu", str(MTU), "up")
    _ip("-n", namespace, "addr", "add", address, "peer", host, "dev", theirs)
    _ip("-n", namespace, "link", "set", theirs, "mtu", str(MTU), "up")
    _ip("-n", namespace, "link", "set", "lo", "up")
    return descriptors


def _pass_on(descriptor: int, packets: Iterator[bytes]) -> None:
    for packet in packets:
        try:
            os.write(descriptor, packet)
        except OSError:  # its party is gone
            return


def _read(descriptor: int, direction: Direction, now: float) -> None:
    for _ in range(_AT_ONCE):
        try:
            packet = os.read(descriptor, 65536)
        except OSError:  # none is there, or the party is gone
            return
        if packet[0] >> 4 == 4:  # IPv6 speaks of itself on every new device
            direction.put(packet, now)


def main() -> None:
    """Until its standard input ends."""
    chance = random.Random(0)
    lines: dict[str, dict[str, Direction]] = {}
    ways: dict[int, tuple[int, Direction]] = {}
    for number, (name, namespace) in enumerate(json.loads(sys.argv[2]).items()):
        host, party = _connect(place(int(sys.argv[1]), number), namespace)
        lines[name] = {"up": Direction(chance), "down": Direction(chance)}
        ways[party], ways[host] = (host, lines[name]["up"]), (party, lines[name]["down"])
    print(json.dumps({"lines": list(lines)}), flush=True)
    told = b""
    while True:
        now = time.monotonic()
        due = [at for _, way in ways.values() if (at := way.next_at) is not None]
        wait_s = max(0.0, min(due) - now) if due else 1.0
        readable, _, _ = select.select([0, *ways], [], [], min(wait_s, 1.0))
        now = time.monotonic()
        for descriptor in readable:
            if descriptor:
                _read(descriptor, ways[descriptor][1], now)
                continue
            if not (more := os.read(0, 65536)):
                return
            *whole, told = (told + more).split(b"\n")
            for line in whole:
                _obey(json.loads(line), lines)
        for to, way in ways.values():
            _pass_on(to, way.ready(now))


def _obey(said: dict[str, dict[str, list[float]]], lines: dict[str, dict[str, Direction]]) -> None:
    for name, shape in said.get("shape", {}).items():
        for direction in lines[name].values():
            direction.shape = Shape(*shape)
    if "count" in said:
        names = ("carried_bytes", "carried", "lost", "dropped")
        counts = {
            name: {way: {one: getattr(direction, one) for one in names} for way, direction in line.items()}
            for name, line in lines.items()
        }
        print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
