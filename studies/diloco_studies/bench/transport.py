"""One payload into Redis and out again by the program's own code, beside a C client with the same bytes."""

import asyncio
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from diloco.pipeline.bus.redis_streams import connect
from diloco.pipeline.clock import fast_loop
from diloco.pipeline.settings import CHUNK_BYTES
from diloco.pipeline.transfer.payloads import pull, push
from diloco_studies.bench import floor
from diloco_studies.bench.end_to_end import server
from diloco_studies.bench.figures import Spread, alternate, spread
from diloco_studies.bench.machine import cpu_s, need_memory, page_faults
from diloco_studies.bench.plain import Plain

TTL_S = 600.0
RUN = "bench-transport"


@dataclass(frozen=True, slots=True)
class Payload:
    """What is moved."""

    elements: int = 12_500_000
    chunk_bytes: int = CHUNK_BYTES
    repeats: int = 7


def measure(
    payload: Payload, console: Console, redis_url: str | None, aof: bool, binary: Path | None = None
) -> tuple[dict[str, Spread], str]:
    """Rates in GB/s of each way, their ratio, and the server's version; of an embedded one what it costs that too, on
    Linux: CPU seconds for a GB, and pages that it touches for the first time, for one payload in and out."""
    size = 4 * payload.elements
    need_memory(6 * size, f"a payload of {payload.elements:,} elements")
    benchmark = floor.find_benchmark()
    values = np.random.default_rng(0).standard_normal(payload.elements, np.float32)
    with (
        server(redis_url, aof, binary) as url,
        asyncio.Runner(loop_factory=fast_loop) as runner,
        Plain(url) as redis,
    ):
        bus = runner.run(connect(url, RUN))
        key = bus.keys.initial_payload(0, "bench")

        pid = int(redis.info("process_id")) if redis_url is None and sys.platform == "linux" else None
        cpu_of: dict[str, float] = {}

        def timed(name: str, work: Coroutine[Any, Any, Any]) -> float:
            before = cpu_s(pid) if pid else 0.0
            began = time.perf_counter()
            runner.run(work)
            took_s = time.perf_counter() - began
            cpu_of[name] = (cpu_s(pid) if pid else 0.0) - before
            return size / 1e9 / took_s

        def into() -> float:
            redis.ask("UNLINK", key)
            cpu_of["pages"] = page_faults(pid) if pid else 0
            return timed("push", push(bus, key, values, payload.chunk_bytes, TTL_S))

        def out() -> float:
            rate = timed("pull", pull(bus, key, payload.elements, "fp32", payload.chunk_bytes))
            cpu_of["pages"] = (page_faults(pid) if pid else 0) - cpu_of["pages"]
            return rate

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
        if pid:
            ways |= {
                "push_redis_cpu_s_per_gb": lambda: cpu_of["push"] / (size / 1e9),
                "pull_redis_cpu_s_per_gb": lambda: cpu_of["pull"] / (size / 1e9),
                "redis_fresh_pages": lambda: cpu_of["pages"],
            }
        try:
            found = alternate(ways, payload.repeats, console, "moving")
        finally:
            redis.remove(f"diloco:{{{RUN}*")
            redis.ask("UNLINK", floor.KEY)
            runner.run(bus.close())
        version = redis.server()
    report = {name: spread(values) for name, values in found.items()}
    report["push_share"] = spread(a / b for a, b in zip(found["push_gb_s"], found["c_in_gb_s"], strict=True))
    report["pull_share"] = spread(a / b for a, b in zip(found["pull_gb_s"], found["c_out_gb_s"], strict=True))
    return report, version
