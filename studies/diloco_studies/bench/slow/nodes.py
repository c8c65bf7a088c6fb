"""A run's payloads on the nodes of a Redis Cluster: how evenly they lie, and what they cost each node."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console

from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.bus.redis_streams import RedisBus, connect
from diloco.pipeline.clock import fast_loop
from diloco.pipeline.settings import CHUNK_BYTES
from diloco.pipeline.transfer.payloads import pull, push
from diloco_studies.bench.machine import need_memory
from diloco_studies.strikes.failing.servers import SERVER, Clustered, Node

TTL_S = 600.0
AT_ONCE = 4
"""Fragments on their way at a time."""


class Primaries(Clustered):
    """A cluster without replicas."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.shares = count

    @property
    def url(self) -> str:
        """One of the servers."""
        return "redis://{}:{}".format(*next(iter(self.nodes.values())).address)

    def _set_up(self) -> None:
        self._join(self.shares, *(line for line in SERVER if not line.startswith("appendonly")))
        self.wait_until(self._ok)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is moved."""

    elements: int
    fragments: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Share:
    """Of one node."""

    bytes: float
    """Payloads in and out, as the node counts them."""
    cpu_s: float

    @property
    def cpu_s_a_gb(self) -> float:
        """CPU seconds for a GB through it."""
        return self.cpu_s / self.bytes * 1e9


def _told(node: Node) -> tuple[float, float]:
    lines = (line.partition(":") for line in str(node.ask("INFO")).splitlines())
    info = {name: value for name, _, value in lines}
    moved = float(info["total_net_input_bytes"]) + float(info["total_net_output_bytes"])
    return moved, float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


async def _round(bus: RedisBus, fragments: int, values: npt.NDArray[np.float32], name: str) -> None:
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(p: int) -> None:
        async with turns:
            key = bus.keys.initial_payload(p, name)
            await push(bus, key, values, CHUNK_BYTES, TTL_S)
            await pull(bus, key, values.size, "fp32", CHUNK_BYTES)
            await bus.expire_soon(key, 0.001)

    await asyncio.gather(*map(one, range(fragments)))


def measure(nodes: int, sizes: Sizes, console: Console) -> tuple[Sequence[Share], float]:
    """Each node's share of so many rounds, in which all fragments go in and out once, and seconds of a round."""
    fragments, rounds = sizes.fragments, sizes.rounds
    need_memory(8 * sizes.elements, f"a model of {sizes.elements:,} elements")
    values = np.random.default_rng(0).standard_normal(sizes.elements // fragments, np.float32)
    with Primaries(nodes) as servers, asyncio.Runner(loop_factory=fast_loop) as runner:
        console.print(f"{nodes} nodes ...")
        bus = runner.run(connect(servers.url, "bench-nodes"))
        bus.keys = RunKeys(bus.keys.run, fragments)
        runner.run(_round(bus, fragments, values, "warm-up"))
        before = [_told(node) for node in servers.nodes.values()]
        began = time.perf_counter()
        for number in range(rounds):
            runner.run(_round(bus, fragments, values, f"{number}"))
        wall_s = (time.perf_counter() - began) / rounds
        after = [_told(node) for node in servers.nodes.values()]
        runner.run(bus.close())
    return [Share(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, after, strict=True)], wall_s
