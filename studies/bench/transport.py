"""One payload into Redis and out again by the program's own code, beside a C client with the same bytes."""

import asyncio
import time
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from diloco.pipeline.bus.redis_streams import connect
from diloco.pipeline.clock import fast_loop
from diloco.pipeline.settings import CHUNK_BYTES
from diloco.pipeline.transfer.payloads import pull, push
from diloco.studies.bench import floor
from diloco.studies.bench.end_to_end import server
from diloco.studies.bench.figures import Spread, alternate, spread
from diloco.studies.bench.machine import need_memory
from diloco.studies.bench.plain import Plain

TTL_S = 600.0
RUN = "bench-transport"


@dataclass(frozen=True, slots=True)
class Payload:
    """What is moved."""

    elements: int = 12_500_000
    chunk_bytes: int = CHUNK_BYTES
    repeats: int = 7


def measure(payload: Payload, console: Console, redis_url: str | None, aof: bool) -> tuple[dict[str, Spread], str]:
    """Rates in GB/s of each way, their ratio, and the server's version."""
    size = 4 * payload.elements
    need_memory(6 * size, f"a payload of {payload.elements:,} elements")
    benchmark = floor.find_benchmark()
    values = np.random.default_rng(0).standard_normal(payload.elements, np.float32)
    with (
        server(redis_url, aof) as url,
        asyncio.Runner(loop_factory=fast_loop) as runner,
        Plain(url) as redis,
    ):
        bus = runner.run(connect(url, RUN))
        key = bus.keys.initial_payload(0, "bench")

        def into() -> float:
            redis.ask("UNLINK", key)
            began = time.perf_counter()
            runner.run(push(bus, key, values, payload.chunk_bytes, TTL_S))
            return size / 1e9 / (time.perf_counter() - began)

        def out() -> float:
            began = time.perf_counter()
            runner.run(pull(bus, key, payload.elements, "fp32", payload.chunk_bytes))
            return size / 1e9 / (time.perf_counter() - began)

        measured: list[floor.Rates] = []

        def c_into() -> float:
            measured.append(floor.rates(url, payload.chunk_bytes, size, size, benchmark))
            return measured[-1].into / 1e9

        ways = {
            "push_gb_s": into,
            "pull_gb_s": out,
            "c_in_gb_s": c_into,
            "c_out_gb_s": lambda: measured[-1].out / 1e9,
        }
        try:
            found = alternate(ways, payload.repeats, console, "moving")
        finally:
            redis.remove(f"diloco:{{{RUN}*")
            redis.ask("UNLINK", floor.KEY)
            runner.run(bus.close())
        version = redis.info("redis_version")
    report = {name: spread(values) for name, values in found.items()}
    report["push_share"] = spread(a / b for a, b in zip(found["push_gb_s"], found["c_in_gb_s"], strict=True))
    report["pull_share"] = spread(a / b for a, b in zip(found["pull_gb_s"], found["c_out_gb_s"], strict=True))
    return report, version
