"""`diloco chaos`: a real run on this machine under planned strikes, and the audit of what it leaves.

    launcher (this process): proxy, monkey, census ──▶ Redis (append-only file)
      └─ spawner ──forks──▶ learners, syncers, evaluator ──TCP, a door each──▶ proxy

It ends when `--for` is over, the budget is spent, or at Ctrl-C: then nobody is struck any more, all strikes are undone,
the run drains as any other, and what it left is audited. A second Ctrl-C ends everything at once, without an audit.
"""

import asyncio
import json
import os
import shlex
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal

import typer

from chaos.audit import Evidence
from chaos.growth import Scale
from chaos.proxy import Proxy
from chaos.schedule import Manner, Party, Rule, draw, parse
from pipeline import lifecycle, logs
from pipeline.census import Census
from pipeline.codec import chunk_count
from pipeline.embedded import EmbeddedRedis
from pipeline.errors import BusError, DilocoError, UsageError
from pipeline.messages import Committed, ShardQueue
from pipeline.redis_census import RedisCensus, connect_census
from pipeline.settings import parse_duration
from pipeline.waiting import first_of

from .chaos_evidence import left_running, read_shard_notes, read_shards_per_epoch, read_step_times
from .chaos_launch import StruckLauncher, patiently
from .chaos_report import Facts, Report, build_chaos, goodput_line, markdown, summary
from .display import Screen
from .folder import Folder, choose
from .launch import Children, environment, threads_for
from .locate import open_bus
from .monkey import REDIS, Monkey
from .options import ChaosProcess, check
from .report import Outcome, build
from .spawner import Spawner

CENSUS_S = 1.0
MOST_TOKENS_PER_S = 200_000
"""More than this machine trains, so that time ends the run; the budget is this for each second."""
REPLACED_S = 130.0
"""A replaced global lives on for two minutes."""
REPORT_FILE, TEXT_FILE, PICTURE_FILE = "chaos.json", "chaos.md", "timeline.png"


def plan_of(settings: ChaosProcess) -> list[Rule]:
    """The rules of all flags.

    Raises:
        UsageError: one cannot be read.
    """
    asked = {manner: getattr(settings, manner.value) for manner in Manner}
    rules = [rule for manner, text in asked.items() for rule in parse(manner, text)]
    if settings.lose_tail and not any(one.manner is Manner.KILL and one.party is Party.REDIS for one in rules):
        raise UsageError("--lose-tail needs --kill redis:EVERY: only a killed Redis loses its last second")
    return rules


def prepared(settings: ChaosProcess, for_: str) -> tuple[ChaosProcess, float]:
    """Settings with what a struck run needs, and how long it is struck.

    Raises:
        UsageError: settings that do not fit.
    """
    for_s = parse_duration(for_)
    try:
        for_s = float(for_s)
    except ValueError:
        raise UsageError(f"--for {for_!r}: give a length of time, for instance 60s or 5m") from None
    if not 1 <= for_s < float("inf"):
        raise UsageError(f"--for {for_!r}: at least 1s")
    if sys.platform != "linux":
        raise UsageError("`diloco chaos` needs Linux: it starts processes by forking, and looks for them in /proc")
    tokens = settings.tokens or round(for_s * MOST_TOKENS_PER_S)
    return settings.model_copy(update={"tokens": tokens, "log_losses": True}), for_s


class Count:
    """Takes a census of the bus every second."""

    def __init__(self, census: RedisCensus) -> None:
        self._census = census
        self.samples: list[Census] = []

    async def follow(self) -> None:
        """Until cancelled."""
        while True:
            with suppress(BusError):  # it is struck
                self.samples.append(await self._census.take())
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
                await first_of(launcher.ending, asked)
        monkey.relent()


async def _run(settings: ChaosProcess, folder: Folder, for_s: float, rules: list[Rule]) -> tuple[Facts, Evidence]:
    asked, task = asyncio.Event(), asyncio.current_task()
    assert task is not None and settings.tokens is not None  # noqa: S101, PT018  # a coroutine, on prepared settings
    lifecycle.install_signal_handlers(asyncio.get_running_loop(), asked, task.cancel)
    fsync: Literal["always", "everysec"] = "everysec" if settings.lose_tail else "always"
    threads = threads_for(settings.learners, settings.threads)
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedRedis(appendonly=True, fsync=fsync, dies_with_us=True))
        folder.make(settings)
        folder.logs.mkdir(parents=True, exist_ok=True)
        spawner = Spawner(environment(threads, None), folder.logs / "spawner.log", settings.data)
        stack.enter_context(spawner)
        screen = stack.enter_context(Screen())
        screen.note(f"output folder {folder.path}")
        async with Proxy(server.socket_path) as proxy, open_bus(server.url, settings.run) as bus:
            await asyncio.to_thread(spawner.wait_until_ready)
            children = stack.enter_context(Children(folder.logs, spawner.child))
            others = {REDIS: server.pid} if server.pid else {}
            launcher = StruckLauncher(settings, folder, server.url, bus, children, screen, others, proxy)
            names = [f"learner-{number}" for number in range(settings.learners)]
            names += [f"syncer-{number}" for number in range(settings.syncers)] if settings.syncers > 1 else ["syncer"]
            for name in names:
                await proxy.add(name)
            census = await connect_census(server.url, settings.run)
            count = Count(census)
            counting = asyncio.create_task(count.follow())

            def note(text: str) -> None:
                screen.note(f"{time.time() - launcher.began_s:7.1f} s  {text}")

            monkey = Monkey(draw(rules, for_s, settings.seed), children, server, proxy, note, settings.lose_tail)
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
                    raise DilocoError(f"stopped before all learners trained: nothing was struck; logs in {folder.logs}")
                queue = await patiently(bus.read_shards)
                left = left_running(os.getpid(), {server.pid, spawner.pid})
            finally:
                for one in (counting, watching, striking):
                    one.cancel()
                await asyncio.gather(counting, watching, striking, return_exceptions=True)
                await census.close()
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
    return facts, _evidence(settings, folder, launcher, monkey, outcome, queue, count.samples, left)


def _evidence(
    settings: ChaosProcess,
    folder: Folder,
    launcher: StruckLauncher,
    monkey: Monkey,
    outcome: Outcome,
    queue: ShardQueue,
    census: list[Census],
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
        replaced=_most_within(sorted(one.unix_s for one in outcome.records if isinstance(one, Committed)), REPLACED_S),
        shards=shards,
    )
    return Evidence(
        layout=layout,
        records=outcome.records,
        standing=outcome.standing,
        strikes=monkey.history,
        tail_lost=settings.lose_tail,
        shards=read_shard_notes(folder.logs),
        queue=queue,
        shards_per_epoch=shards if settings.log_level == "debug" else 0,
        census=census,
        scale=scale,
        endings=launcher.endings,
        left_running=left,
    )


def _most_within(times_s: list[float], span_s: float) -> int:
    """Most of the times that lie within a span of this length."""
    most = first = 0
    for last, at in enumerate(times_s):
        while times_s[first] < at - span_s:
            first += 1
        most = max(most, last - first + 1)
    return most


def _first(error: BaseException) -> BaseException:
    """The first of those that a group of tasks has raised."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def conclude(report: Report, facts: Facts, evidence: Evidence, folder: Folder, json_file: Path | None) -> None:
    """Write and print what a struck run leaves."""
    from .chaos_plot import draw as draw_timeline

    names = sorted(facts.steps, key=lambda name: (len(name), name))
    syncers = sorted({one.name for one in evidence.strikes if one.party is Party.SYNCER})
    merges = [
        (one.unix_s, one.fragment) for one in evidence.records if isinstance(one, Committed) and one.contributions
    ]
    picture = folder.path / PICTURE_FILE
    draw_timeline(
        facts.steps,
        evidence.strikes,
        merges,
        [*names, *syncers, REDIS],
        (facts.began_s, facts.ended_s),
        f"diloco chaos, seed {facts.seed}: {report['verdict'].upper()}",
        goodput_line(report),
        picture,
    )
    command = shlex.join(["diloco", *sys.argv[1:]])
    (folder.path / TEXT_FILE).write_text(markdown(report, command, PICTURE_FILE))
    folder.report.write_text(json.dumps(build(facts.outcome), indent=1) + "\n")  # for `diloco status` and `tape`
    for path in (folder.path / REPORT_FILE, json_file):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(report, indent=1) + "\n")
    typer.echo(f"\n{summary(report)}\npicture    {picture}\nreport     {folder.path / TEXT_FILE}")


def main(settings: ChaosProcess, for_: str, json_file: Path | None) -> int:
    """Entry point of `diloco chaos`: the exit status, 1 if a promise was broken.

    Raises:
        DilocoError: what went wrong, in words; nothing is left running.
    """
    logs.configure("warning")
    rules = plan_of(settings)
    settings, for_s = prepared(settings, for_)
    check(settings)
    folder = choose(settings)
    try:
        facts, evidence = asyncio.run(_run(settings, folder, for_s, rules))
    except asyncio.CancelledError as error:
        raise DilocoError(f"a second signal ended everything at once; logs in {folder.logs}") from error
    except BaseExceptionGroup as errors:
        raise _first(errors) from errors
    report = build_chaos(facts, evidence)
    conclude(report, facts, evidence, folder, json_file)
    return 1 if report["violations"] else 0
