"""A real run on this machine under planned strikes, and the evidence of what it leaves.

    launcher (this process): proxy, monkey, key usage ──▶ Redis (append-only file)
      └─ spawner ──forks──▶ learners, syncers, evaluator ──TCP, a door each──▶ proxy

Servers that fail over (`--redis sentinel|cluster`) are reached without a proxy; where a plan has partitions, each party
of the run is on a machine of its own, as each server is.

It ends when `--for` is over, the budget is spent, or at Ctrl-C: then nobody is struck any more, all strikes are undone,
the run drains as any other, and what it left is audited. A second Ctrl-C ends everything at once, without an audit.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from diloco.launcher.display import Screen
from diloco.launcher.folder import Folder
from diloco.launcher.launch import Children, environment, places_of, threads_for
from diloco.launcher.page import left_in, redis_route
from diloco.launcher.report import Outcome
from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.errors import BusError, DilocoError
from diloco.pipeline.messages.fragment import Committed, TapeRecord
from diloco.pipeline.messages.shards import ShardQueue
from diloco.pipeline.payload.codec import chunk_count
from diloco.pipeline.process import signals
from diloco.pipeline.settings import groups_on
from diloco.pipeline.waiting import first_of
from diloco.tape import read_live
from diloco_studies.strikes.audit import Evidence
from diloco_studies.strikes.evidence import left_running, read_shard_notes, read_shards_per_epoch, read_step_times
from diloco_studies.strikes.failing.network import Network
from diloco_studies.strikes.failing.servers import ClusterServers, SentinelServers, Servers
from diloco_studies.strikes.failing.topology import Topology
from diloco_studies.strikes.footprint import Life
from diloco_studies.strikes.growth import KeyUsage, Scale
from diloco_studies.strikes.key_usage import RedisKeyUsage, connect_key_usage
from diloco_studies.strikes.launch import StruckLauncher, patiently
from diloco_studies.strikes.monkey import REDIS, Monkey
from diloco_studies.strikes.proxy import Proxy
from diloco_studies.strikes.report import Facts
from diloco_studies.strikes.sampling import Footprints
from diloco_studies.strikes.schedule import NOTHING, Manner, Party, Redis, Strike
from diloco_studies.strikes.settings import ChaosProcess
from diloco_studies.strikes.spawner import Spawner

CENSUS_S = 1.0
REPLACED_S = 130.0
"""A replaced global lives on for two minutes."""


class Count:
    """Counts what is on the bus every second."""

    def __init__(self, key_usage: RedisKeyUsage) -> None:
        self._key_usage = key_usage
        self.samples: list[KeyUsage] = []

    async def follow(self) -> None:
        """Until cancelled."""
        while True:
            with suppress(BusError):  # it is struck
                self.samples.append(await self._key_usage.measure())
            await asyncio.sleep(CENSUS_S)


async def _strike(launcher: StruckLauncher, monkey: Monkey, asked: asyncio.Event, for_s: float) -> None:
    """Strike from when all is under way until the time is over, the run ends or the user asks for it."""
    await first_of(launcher.under_way, launcher.ending, asked)
    if not launcher.under_way.is_set():
        return
    async with asyncio.TaskGroup() as group:
        group.create_task(monkey.run())
        with suppress(TimeoutError):
            async with asyncio.timeout(for_s):
                await first_of(launcher.ending, launcher.merged_enough, asked)
        monkey.relent()


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a run takes place: its Redis, and how its parties reach it."""

    url: str
    server: EmbeddedRedis | None = None
    topology: Topology | None = None
    servers: Servers | None = None
    network: Network | None = None
    """On which each party is a machine of its own; None: all are here."""

    def pids(self) -> dict[str, int]:
        """Of the servers that live now."""
        if self.servers is not None:
            return {name: node.pid for name, node in self.servers.nodes.items() if node.pid}
        return {REDIS: self.server.pid} if self.server is not None and self.server.pid else {}

    @property
    def socket(self) -> Path | None:
        """Of the one server."""
        return None if self.server is None else self.server.socket_path


def _place(settings: ChaosProcess, parties: Sequence[str], stack: ExitStack) -> _Place:
    """Start Redis."""
    redis = Redis(settings.redis)
    if redis is Redis.ONE:
        fsync: Literal["always", "everysec"] = "everysec" if settings.lose_tail else "always"
        server = stack.enter_context(EmbeddedRedis(appendonly=True, fsync=fsync, dies_with_us=True))
        return _Place(server.url, server=server)
    network = stack.enter_context(Network()) if settings.partition not in NOTHING else None
    servers = stack.enter_context((SentinelServers if redis is Redis.SENTINEL else ClusterServers)(network))
    if network is not None:
        for name in parties:
            network.add(name)
    return _Place(
        servers.url,
        topology=Topology(servers, network, _far(settings, parties)),
        servers=servers,
        network=network,
    )


def _far(settings: ChaosProcess, parties: Sequence[str]) -> Callable[[Strike], list[str]]:
    """Who is cut off with a primary: one of several syncers, and as many learners as a quorum can do without."""
    learners = [name for name in parties if name.startswith("learner")]
    syncers = [name for name in parties if name.startswith("syncer")]
    spared = max(0, min(len(learners) // 2, len(learners) - settings.quorum))

    def far(strike: Strike) -> list[str]:
        return learners[:spared] + ([strike.victim(syncers)] if len(syncers) > 1 else [])

    return far


def _parties(settings: ChaosProcess) -> list[str]:
    names = [f"learner-{number}" for number in range(settings.learners)]
    return names + ([f"syncer-{number}" for number in range(settings.syncers)] if settings.syncers > 1 else ["syncer"])


async def run(
    settings: ChaosProcess, folder: Folder, for_s: float, strikes: Sequence[Strike], until_merged: int | None = None
) -> tuple[Facts, Evidence]:
    """Strike a run for a time at most, or until so many tokens are merged.

    Raises:
        DilocoError: it could not be struck, or read afterwards; nothing is left running.
    """
    asked, task = asyncio.Event(), asyncio.current_task()
    assert task is not None and settings.tokens is not None  # noqa: S101, PT018  # a coroutine, on prepared settings
    signals.install_signal_handlers(asyncio.get_running_loop(), asked, task.cancel)
    threads = threads_for(sum(place.ranks for place in places_of(settings)), settings.threads)
    parties = _parties(settings)
    with ExitStack() as stack:
        place = _place(settings, parties, stack)
        folder.make(settings, place.url)
        stack.callback(folder.mark_closing)
        folder.logs.mkdir(parents=True, exist_ok=True)
        spawner = Spawner(environment(threads, None), folder.logs / "spawner.log", settings.data)
        stack.enter_context(spawner)
        screen = stack.enter_context(Screen())
        screen.note(f"output folder {folder.path}")
        async with Proxy(place.socket) as proxy, open_bus(place.url, settings.run) as bus:
            await asyncio.to_thread(spawner.wait_until_ready)
            hosts = place.network
            machines = {name: hosts[name].namespace for name in parties} if hosts is not None else {}
            children = stack.enter_context(Children(folder.logs, partial(spawner.child, machines=machines)))
            launcher = StruckLauncher(settings, folder, place.url, bus, children, screen, place.pids(), proxy)
            launcher.until_merged = until_merged
            if place.server is not None:
                for name in parties:
                    await proxy.add(name)
            key_usage = await connect_key_usage(place.url, settings.run)
            count = Count(key_usage)
            counting = asyncio.create_task(count.follow())
            footprints = Footprints(lambda: children.pids() | place.pids())
            sampling = asyncio.create_task(footprints.follow())

            def note(text: str) -> None:
                screen.note(f"{time.time() - launcher.began_s:7.1f} s  {text}")

            monkey = Monkey(
                strikes,
                children,
                place.server,
                proxy,
                note,
                settings.lose_tail,
                place.topology,
            )
            async with left_in(folder.path, bus, settings, screen.note, redis_route(place.url, launcher.own)) as page:
                launcher.show_page(page)
                launcher.start()
                stop = asyncio.Event()
                watching = asyncio.create_task(launcher.watch(stop))
                striking = asyncio.create_task(_strike(launcher, monkey, asked, for_s))
                try:
                    await asyncio.wait([watching, striking], return_when=asyncio.FIRST_COMPLETED)
                    if watching.done():  # by its budget, or by an error
                        watching.result()
                    await striking
                    screen.note("no more strikes: the run comes to its end")
                    stop.set()
                    await watching
                    await launcher.wind_down()
                    outcome = await patiently(launcher.gather, for_s, None)
                    if outcome is None or not launcher.under_way.is_set():
                        raise DilocoError(
                            f"stopped before all learners trained: nothing was struck; logs in {folder.logs}"
                        )
                    queue, tape = await patiently(bus.read_shards), await patiently(read_live, bus)
                    left = left_running(os.getpid(), {*place.pids().values(), spawner.pid})
                finally:
                    tasks = counting, sampling, watching, striking
                    for one in tasks:
                        one.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
                    await key_usage.close()
    facts = Facts(
        outcome=outcome,
        seed=settings.seed,
        plan={manner.value: getattr(settings, manner.value) for manner in Manner},
        began_s=launcher.began_s,
        ended_s=launcher.ended_s,
        steps=read_step_times(folder.learners),
        learners=settings.learners,
        lease_s=settings.lease_s,
        sync_interval=settings.sync_interval,
        missed=monkey.missed,
        late_s=monkey.late_s,
        stopped=asked.is_set(),
    )
    lives = footprints.judged()
    return facts, _evidence(settings, folder, launcher, monkey, outcome, queue, tape, count.samples, lives, left)


def _evidence(
    settings: ChaosProcess,
    folder: Folder,
    launcher: StruckLauncher,
    monkey: Monkey,
    outcome: Outcome,
    queue: ShardQueue,
    tape: list[TapeRecord],
    key_usage: list[KeyUsage],
    lives: list[Life],
    left: list[str],
) -> Evidence:
    layout = outcome.layout
    assert layout is not None  # noqa: S101  # of a run with a syncer
    killed = [one.party for one in monkey.history if one.manner is Manner.KILL]
    shards = read_shards_per_epoch(folder.logs)
    elements = max(fragment.elements for fragment in layout.fragments)
    scale = Scale(
        learners=settings.learners,
        fragments=settings.fragments,
        chunks=chunk_count(elements, "fp32", settings.chunk_bytes),
        lives=settings.learners + killed.count(Party.LEARNER) + len(launcher.endings),
        syncer_lives=settings.syncers + killed.count(Party.SYNCER) + len(launcher.endings),
        replaced=_max_within(sorted(one.unix_s for one in outcome.records if isinstance(one, Committed)), REPLACED_S),
        shards=shards,
        groups=settings.groups or groups_on(Redis(settings.redis) is Redis.CLUSTER, len(layout.fragments)),
    )
    return Evidence(
        layout=layout,
        records=outcome.records,
        tape=tape,
        ledger_inputs=outcome.ledger_inputs,
        strikes=monkey.history,
        tail_lost=settings.lose_tail,
        shards=read_shard_notes(folder.logs),
        queue=queue,
        shards_per_epoch=shards if settings.log_level == "debug" else 0,
        key_usage=key_usage,
        scale=scale,
        lives=lives,
        endings=launcher.endings,
        left_running=left,
    )


def _max_within(times_s: list[float], span_s: float) -> int:
    """Most of the times that lie within a span of this length."""
    most = first = 0
    for last, at in enumerate(times_s):
        while times_s[first] < at - span_s:
            first += 1
        most = max(most, last - first + 1)
    return most
