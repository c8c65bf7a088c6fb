"""From the last publish to the global adopted by all: Redis, a syncer and learners as processes of their own.

Beside each round the floor is measured: the same bytes through the same server by a C client, one after the other (the
server has one thread), and a merge's memory traffic at the speed of copies on all cores. So is the machine: what others
took of its cores, what a fresh page costs. What tells the code from it is in CPU time and counts: seconds of all
processes, Redis's over those that the C client costs it, fresh pages of Redis.
"""

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args
from urllib.parse import urlparse

from rich.console import Console

import diloco
import diloco_studies
from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.bus.ports import START
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.messages.fragment import Committed
from diloco.pipeline.messages.wire import Codec, OuterName
from diloco.pipeline.payload.codec import payload_bytes
from diloco.pipeline.payload.quantize import GROUP
from diloco.pipeline.process import signals
from diloco.pipeline.settings import CHUNK_BYTES, SyncSettings, defaults
from diloco.pipeline.units import counted
from diloco.pipeline.view.status_reader import read_status
from diloco.syncer.committing import REPLACED_BYTES
from diloco_studies.bench import floor, machine
from diloco_studies.bench.figures import Spread, progress, spread
from diloco_studies.bench.lines import GBIT, lines
from diloco_studies.bench.machine import cpu_s, need_memory, peak_mb, reset_peak
from diloco_studies.bench.plain import Plain

ITEM = {codec: payload_bytes(GROUP, codec) / GROUP for codec in get_args(Codec)}
"""Bytes of an element on the wire."""
DType = Literal["fp32", "bf16"]
BYTES: dict[DType, int] = {"fp32": 4, "bf16": 2}
PYTHONPATH = os.pathsep.join(str(Path(one.__path__[0]).resolve().parent) for one in (diloco, diloco_studies))
PROCESS_BYTES = 0.4e9
"""Of a learner beside its parameters: the interpreter and torch."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured."""

    params: int
    fragments: int = 1
    learners: int = 2
    wire: str = "bf16"
    momentum: float = 0.0
    in_turn: bool = False
    """One fragment at a time instead of all at once."""
    rounds: int = 5
    chunk_bytes: int = CHUNK_BYTES
    spread_s: float = 0.0
    """The learners publish one after another, the last one so long after the first."""
    global_codec: str = defaults(SyncSettings)["global_codec"]
    link_gbit: float = 0.0
    """Each party's line to Redis, in each direction; 0: as fast as it is."""
    dtype: DType = "fp32"
    """Of the learners' parameters; bases and globals are fp32."""
    warm_up: int | None = None
    """Rounds before those that count, in which memory is touched for the first time. None: each fragment has two."""

    outer: OuterName = defaults(SyncSettings)["outer"]

    @property
    def unmeasured(self) -> int:
        """Rounds before those that count."""
        return 2 * (self.fragments if self.in_turn else 1) if self.warm_up is None else self.warm_up

    @property
    def elements(self) -> float:
        """Elements that one round moves."""
        return self.params / self.fragments if self.in_turn else self.params

    @property
    def delta_bytes(self) -> float:
        """Of all learners, in one round."""
        return self.elements * ITEM[self.wire] * self.learners

    @property
    def into_bytes(self) -> float:
        """Into Redis in one round: deltas, and what is published."""
        return self.delta_bytes + self.published_bytes

    @property
    def published_bytes(self) -> float:
        """The new global with its rest, and its momentum."""
        return 4 * self.elements * (2 if self.momentum else 1)

    @property
    def out_bytes(self) -> float:
        """Out of Redis in one round: deltas to the syncer, the global to each learner."""
        return self.delta_bytes + self.pull_bytes * self.learners

    @property
    def pull_bytes(self) -> float:
        """Of the global, as one learner pulls it."""
        return ITEM[self.global_codec] * self.elements

    @property
    def lines_s(self) -> float:
        """What one round takes on the lines at least: all deltas come by the syncer's, the global with all that goes
        beside it leaves by it, and then comes by each learner's."""
        each = self.delta_bytes + self.published_bytes + self.pull_bytes
        return each / (self.link_gbit * GBIT) if self.link_gbit else 0.0

    def sync(self) -> SyncSettings:
        """The run's settings. One step on a base makes a delta due; in turn, each has a step of its own."""
        interval = 2 * self.fragments if self.in_turn else 1
        return SyncSettings(
            fragments=self.fragments,
            sync_interval=interval,
            quorum=self.learners,
            codec=self.wire,
            global_codec=self.global_codec,
            outer=self.outer,
            outer_momentum=self.momentum,
            outer_lr=0.7,
            outer_warmup=0,
            first_interval=0,
            merge="rda",
            tokens=2**60,
            chunk_bytes=self.chunk_bytes,
        )

    def memory_bytes(self) -> float:
        """What it takes at most, all processes together: see docs/results/performance.md."""
        whole, moving = 4.0 * self.params, 4.0 * self.elements
        learner = (1 + BYTES[self.dtype] / 4) * whole + 3 * moving + PROCESS_BYTES
        syncer = (2 if self.momentum else 1) * (whole + moving) + moving + self.delta_bytes
        syncer += moving if self.global_codec != "fp32" else 0.0
        replaced = min((self.unmeasured + self.rounds) * moving, max(whole, REPLACED_BYTES))
        redis = self.delta_bytes + (2 if self.momentum else 1) * (whole + moving) + replaced
        return self.learners * learner + syncer + redis


@dataclass(slots=True)
class Measured:
    """One entry a round in each list; of what is on the tape, one a commit."""

    publish_to_adopted_s: list[float] = field(default_factory=list)
    trainer_blocked_s: list[float] = field(default_factory=list)
    snapshot_s: list[float] = field(default_factory=list)
    adopt_s: list[float] = field(default_factory=list)
    syncer_cpu_s_per_gb: list[float] = field(default_factory=list)
    syncer_rss_mb: list[float] = field(default_factory=list)
    learner_cpu_s: list[float] = field(default_factory=list)
    learner_rss_mb: list[float] = field(default_factory=list)
    learner_wake_ups: list[float] = field(default_factory=list)
    redis_cpu_s: list[float] = field(default_factory=list)
    redis_cpu_ratio: list[float] = field(default_factory=list)
    """Over what the same bytes cost it with the C client: the code's, whatever else the machine does."""
    redis_fresh_pages: list[float] = field(default_factory=list)
    redis_in_mb: list[float] = field(default_factory=list)
    """What Redis counts as received: payloads and all small calls."""
    redis_out_mb: list[float] = field(default_factory=list)
    all_cpu_s: list[float] = field(default_factory=list)
    upload_s: list[float] = field(default_factory=list)
    """On the tape: from the set of contributions being fixed to the last of their bytes."""
    merge_s: list[float] = field(default_factory=list)
    """On the tape: merge, outer step, upload of the new values."""
    floor_s: list[float] = field(default_factory=list)
    redis_floor_ratio: list[float] = field(default_factory=list)
    floor_in_gb_s: list[float] = field(default_factory=list)
    floor_out_gb_s: list[float] = field(default_factory=list)
    memory_gb_s: list[float] = field(default_factory=list)
    fresh_page_us: list[float] = field(default_factory=list)
    others_share: list[float] = field(default_factory=list)
    steal_share: list[float] = field(default_factory=list)

    def spreads(self) -> dict[str, Spread]:
        """For the report."""
        return {name: spread(getattr(self, name)) for name in self.__dataclass_fields__ if getattr(self, name)}


class Process:
    """A child that is killed with us, and ended when its block is left."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        folder: Path,
        environ: dict[str, str],
        talks: bool,
    ) -> None:
        """arguments: of Python."""
        self.name, self._log = name, folder / f"{name}.log"
        with self._log.open("ab") as log:
            pipe = subprocess.PIPE if talks else None
            self._process = subprocess.Popen(
                [sys.executable, "-P", signals.__file__, str(os.getpid()), sys.executable, *arguments],
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or log,
                stderr=log,
                env=environ,
                start_new_session=True,  # Ctrl-C is ours alone
                text=True,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def say(self, line: str) -> None:
        """Send a line."""
        assert self._process.stdin is not None  # noqa: S101  # it talks
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self.died() from None

    def hear(self) -> dict[str, Any]:
        """The next line."""
        assert self._process.stdout is not None  # noqa: S101  # it talks
        line = self._process.stdout.readline()
        if not line:
            raise self.died()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def check(self) -> None:
        """Raises if it has ended."""
        if self._process.poll() is not None:
            raise self.died()

    def died(self) -> UsageError:
        """What its log says last."""
        lines = self._log.read_text(errors="replace").splitlines()[-8:]
        return UsageError(f"{self.name} has ended ({self._process.wait()}):\n" + "\n".join(lines))

    def end(self) -> None:
        """Kill it: nothing that it has is of further use."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def server(redis_url: str | None, aof: bool, binary: Path | None = None) -> Iterator[str]:
    """URL of the Redis to measure with: the given one, or an embedded one, of another binary if that is given."""
    if redis_url is not None:
        if aof or binary:
            option = "--aof" if aof else "--server"
            raise UsageError(f"{option} is only for the embedded Redis: leave it out and set up your own Redis")
        yield redis_url
        return
    with EmbeddedRedis(appendonly=aof, binary=binary, dies_with_us=True) as redis:
        yield redis.url


class Fleet:
    """The syncer and the learners of one case, all joined, within a `with` block; without a case, the syncer alone.

    With a rate in the case each has a line of its own.
    """

    def __init__(self, case: Case | None, url: str) -> None:
        self._case, self.url, self.run = case, url, f"bench-{secrets.token_hex(4)}"
        self._stack = ExitStack()
        self.learners: list[Process] = []

    def __enter__(self) -> "Fleet":
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="diloco_bench_")))
            stack.callback(self._clean)
            kept = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
            path = os.pathsep.join(filter(None, (PYTHONPATH, kept.get("PYTHONPATH"))))
            kept |= {"PYTHONPATH": path, "OMP_WAIT_POLICY": "passive"}
            learners = [f"learner-{number}" for number in range(self._case.learners if self._case else 0)]
            urls = dict.fromkeys(("syncer", *learners), self.url)
            if self._case and self._case.link_gbit:
                socket = Path(urlparse(self.url).path)
                urls = stack.enter_context(lines(socket, urls, self._case.link_gbit * GBIT))
            kept["DILOCO_REDIS_URL"] = urls["syncer"]

            def start(name: str, arguments: Sequence[str], talks: bool) -> Process:
                process = Process(name, arguments, folder, kept, talks)
                stack.callback(process.end)
                return process

            serving = ["-m", "diloco", "syncer", "--run", self.run, "--http-port", "0", "--log-level", "warning"]
            self.syncer = start("syncer", serving, False)
            for number, name in enumerate(learners):
                assert self._case is not None  # noqa: S101  # there are learners
                sync = self._case.sync().model_dump()
                given = {
                    "number": number,
                    "run": self.run,
                    "url": urls[name],
                    "params": self._case.params,
                    "dtype": self._case.dtype,
                    "sync": sync,
                    "delay_s": self._case.spread_s * number / max(1, self._case.learners - 1),
                }
                self.learners.append(start(name, ["-m", "diloco_studies.bench.beside.party", dumps(given)], True))
            for learner in self.learners:
                learner.hear()
            self.syncer.check()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _clean(self) -> None:
        with Plain(self.url) as redis:
            redis.remove(f"diloco:{{{self.run}*")

    def all(self, line: str) -> list[dict[str, Any]]:
        """Tell all learners the same, and hear them all."""
        for learner in self.learners:
            learner.say(line)
        return [learner.hear() for learner in self.learners]


def measure(
    case: Case, console: Console, redis_url: str | None = None, aof: bool = False, binary: Path | None = None
) -> tuple[Measured, dict[str, Any]]:
    """All rounds of one case, after those that do not count; what was measured, and with which server and client."""
    if redis_url is not None and case.link_gbit:
        raise UsageError("--link is only for the embedded Redis, on whose socket the links end: leave it out")
    need_memory(case.memory_bytes(), f"{case.params / 1e6:g}M parameters with {counted(case.learners, 'learner')}")
    found, benchmark, memory = Measured(), floor.find_benchmark(), floor.Memory()
    with server(redis_url, aof, binary) as url, Plain(url) as redis, progress(console) as bar:
        task = bar.add_task("starting Redis, syncer, learners", total=case.unmeasured + case.rounds)
        redis_pid = int(redis.info("process_id")) if redis_url is None else None
        with Fleet(case, url) as fleet:
            for done in range(case.unmeasured + case.rounds):
                number = done + 1 - case.unmeasured
                what = f"round {number} of {case.rounds}" if number > 0 else "rounds that do not count"
                bar.update(task, completed=done, description=what)
                before = _moved_mb(redis)
                one = one_round(case, fleet, redis_pid)
                names = "redis_in_mb", "redis_out_mb"
                one |= {name: b - a for name, a, b in zip(names, before, _moved_mb(redis), strict=True)}
                one |= _floor(case, url, benchmark, memory, one, redis_pid)
                redis.ask("UNLINK", floor.KEY)
                if number > 0:
                    for name, value in one.items():
                        getattr(found, name).append(value)
            commits = [one for one in asyncio.run(_commits(url, fleet.run)) if one.version > 1]
            found.upload_s, found.merge_s = [one.upload_s for one in commits], [one.merge_s for one in commits]
            note: dict[str, Any] = {
                "server": redis.server(),
                "floor_client": floor.client_name(benchmark),
                "run": fleet.run,
                "lines_s": case.lines_s,
                "merged_share": asyncio.run(_merged_share(url, fleet.run)),
            }
            note["redis_peak_mb"] = round(int(redis.info("used_memory_peak")) / 1e6, 1)
    return found, note


def _moved_mb(redis: Plain) -> tuple[float, float]:
    """Into a server and out of it since it started, MB."""
    into, out = (int(redis.info(f"total_net_{way}_bytes")) / 1e6 for way in ("input", "output"))
    return into, out


async def _commits(url: str, run: str) -> list[Committed]:
    """All merges of a run, by time."""
    async with open_bus(url, run) as bus:
        entries = await bus.read_tape({0: START}, limit=100_000)
    return [entry.record for entry in entries if isinstance(entry.record, Committed) and entry.record.contributions]


async def _merged_share(url: str, run: str) -> float | None:
    """Of all rounds' tokens, those that do not count included."""
    async with open_bus(url, run) as bus:
        share: float | None = (await read_status(bus, LoopClock()))["merged_share"]["since_start"]
    return share


def one_round(case: Case, fleet: Fleet, redis_pid: int | None) -> dict[str, float]:
    """One round's measurements; with the CPU time of Redis if its process is known."""
    fleet.all("prepare")
    syncer, learners = fleet.syncer.pid, [one.pid for one in fleet.learners]
    pids = [syncer, *learners, *([redis_pid] if redis_pid else [])]
    taken = machine.Taken(pids)
    time.sleep(0.5)  # reports have settled: every learner is known to be on the present base
    for pid in (syncer, *learners):
        reset_peak(pid)
    faults = machine.page_faults(redis_pid) if redis_pid else 0
    woken = [machine.wake_ups(pid) for pid in learners]
    before = [cpu_s(pid) for pid in pids]
    said = fleet.all("round")
    after = [cpu_s(pid) for pid in pids]
    used = [b - a for a, b in zip(before, after, strict=True)]
    fleet.syncer.check()
    one = taken.shares() | {
        "publish_to_adopted_s": max(s["adopted"] for s in said) - max(s["began"] for s in said),
        "trainer_blocked_s": max(s["publish_s"] + s["adopt_s"] for s in said),
        "snapshot_s": max(s["publish_s"] for s in said),
        "adopt_s": max(s["adopt_s"] for s in said),
        "syncer_cpu_s_per_gb": used[0] / (case.delta_bytes / 1e9),
        "syncer_rss_mb": peak_mb(syncer),
        "learner_cpu_s": sum(used[1 : 1 + case.learners]) / case.learners,
        "learner_rss_mb": max(peak_mb(pid) for pid in learners),
        "learner_wake_ups": (sum(machine.wake_ups(pid) for pid in learners) - sum(woken)) / case.learners,
    }
    if redis_pid:
        pages = machine.page_faults(redis_pid) - faults
        one |= {"redis_cpu_s": used[-1], "redis_fresh_pages": pages, "all_cpu_s": sum(used)}
    return one


def _floor(
    case: Case,
    url: str,
    benchmark: str | None,
    memory: floor.Memory,
    one: dict[str, float],
    redis_pid: int | None,
) -> dict[str, float]:
    """What the bytes of a round take at least, now, on this machine; what that says of the round."""
    before = cpu_s(redis_pid) if redis_pid else 0.0
    rates = floor.rates(url, case.chunk_bytes, case.into_bytes, case.out_bytes, benchmark)
    redis_min_s = cpu_s(redis_pid) - before if redis_pid else 0.0
    copied = memory.rate()
    traffic = floor.merge_traffic(int(case.elements), case.learners, ITEM[case.wire], case.momentum > 0)
    least = case.into_bytes / rates.into + case.out_bytes / rates.out + traffic / copied
    found = {
        "floor_s": least,
        "redis_floor_ratio": one["publish_to_adopted_s"] / least,
        "floor_in_gb_s": rates.into / 1e9,
        "floor_out_gb_s": rates.out / 1e9,
        "memory_gb_s": copied / 1e9,
        "fresh_page_us": machine.fresh_page_us(),
    }
    return found | ({"redis_cpu_ratio": one["redis_cpu_s"] / redis_min_s} if redis_pid else {})
