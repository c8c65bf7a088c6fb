"""A run of a model's size without its training: `python -m diloco_studies.bench.memory.size --model 1b --fragments 24`.

Redis and the production syncer as processes of their own merge deltas of that many parameters, save a checkpoint, and
resume it on an empty Redis. Learners are the production exchange with a carrier that makes up what it sends, so that
they need memory for a fragment, not for the model. What Redis and the syncers took stands beside what `diloco plan`
says. Linux only.
"""

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import typer

from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.clock import LoopClock, fast_loop
from diloco.pipeline.errors import BadPayload, UsageError
from diloco.pipeline.fragments import Layout, layout_of
from diloco.pipeline.messages.head import Head
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.party_memory import syncer_bytes, syncer_share
from diloco.pipeline.payload.buffers import pooled
from diloco.pipeline.payload.codec import DTYPES
from diloco.pipeline.process import logs
from diloco.pipeline.redis_memory import offered_bytes, redis_bytes
from diloco.pipeline.settings import SyncSettings
from diloco.pipeline.transfer.payloads import pull_shown, push
from diloco.pipeline.units import as_bytes
from diloco.pipeline.waiting import meanwhile
from diloco.workers.encoding import ErrorFeedback
from diloco.workers.exchange.carrier import DELTA_TTL_S, SLOW_PULL_S, delta_key, push_initial
from diloco.workers.exchange.joining import Joining
from diloco.workers.exchange.member import Member
from diloco.workers.parameters import tensor_table
from diloco.workers.rounds import Publication, Rounds
from diloco_studies.bench.end_to_end import PYTHONPATH, Process, server
from diloco_studies.bench.machine import need_memory, peak_mb, reset_peak
from diloco_studies.bench.plain import Plain
from diloco_studies.quality.virtual_report import virtual_report

Float32 = npt.NDArray[np.float32]
NOTHING = np.empty(0, np.float32)
LOOK_S = 0.02
ENDS_S = 1800.0
"""A syncer that is told to stop, and has not ended by then, hangs."""
MB = 1e6
SCALES = {"initial": 0.02, "delta": 1e-4}
"""Of made up values."""
PROGRAM_BYTES = 100_000_000
"""Of a syncer that has nothing in hand."""
BESIDE_BYTES = 0.6e9
"""Of the process with the learners, beside a fragment of each: the interpreter and torch."""


class Case(NamedTuple):
    """What is run."""

    spec: Spec
    learners: int
    merges: int
    """Commits of any fragment before the checkpoint, at least."""
    syncers: int = 1
    step_s: float = 0.05
    """Of the learners."""

    @property
    def layout(self) -> Layout:
        """Of the model."""
        return layout_of(self.spec.tensors)

    def redis_bytes(self) -> float:
        """What `diloco plan` says of Redis; but for offers of moments, which nobody makes here."""
        elements, sync = self.layout.elements, self.spec.sync
        said = redis_bytes(elements, self.learners, sync.codec, sync.global_codec, sync.key_frame_interval)
        return said - offered_bytes(elements)

    def syncer_bytes(self) -> float:
        """The same of each syncer."""
        sync = self.spec.sync
        share = syncer_share(sync.fragments, self.syncers)
        return syncer_bytes(self.layout.elements, self.learners, sync.codec, sync.outer, share)


@dataclass(slots=True)
class Stage:
    """What one part of the run took."""

    name: str
    seconds: float
    redis_bytes: int
    """Peak of `used_memory` since the server began."""
    redis_resident_bytes: float
    """Of its process, likewise."""
    before_bytes: int
    """Resident memory of the largest syncer as the stage began."""
    peak_bytes: int
    """The most that it had in the stage."""


def case_of(
    model: str,
    fragments: int,
    learners: int,
    merges: int,
    syncers: int = 1,
    step_s: float = 0.05,
    *,
    at_once: bool = False,
    **changes: Any,
) -> Case:
    """A built-in model's, by its shapes alone.

    at_once: all fragments are due at every step; else they take turns.
    """
    import torch

    from diloco.workers.trainer.models.gpt import build

    with torch.device("meta"):
        made = build(model, seed=0)
    interval = 1 if at_once else 2 * fragments
    usual = {"outer_warmup": 0, "first_interval": 0, "tokens": 2**60, "quorum": learners, "sync_interval": interval}
    settings = SyncSettings(**usual | {"fragments": fragments} | changes)
    spec = Spec(sync=settings.sync_spec(), tensors=tuple(tensor_table(made, settings)), trainer={})
    return Case(spec, learners, merges, syncers, step_s)


# --- learners ------------------------------------------------------------------------------------------


class MadeUp:
    """A `Carrier` of values that are made as they are sent, and thrown away as they come."""

    lanes = 1

    def __init__(self, member: Member) -> None:
        self._member = member
        self._syncs = [fragment.sync(member.spec.sync) for fragment in member.layout.fragments]
        self._rng = np.random.default_rng(0)
        self.feedback = ErrorFeedback(member.learner, member.incarnation, member.encoder.grown)

    def _values(self, p: int, what: str) -> Float32:
        values: Float32 = pooled(self._member.layout.fragments[p].elements, np.float32)
        self._rng.standard_normal(out=values, dtype=np.float32)
        return np.multiply(values, np.float32(SCALES[what]), out=values)

    async def pull(self, choose: Callable[[], Head]) -> Any | None:
        """As `Carrier`."""
        member, head = self._member, choose()
        p = head.fragment
        elements = member.layout.fragments[p].elements
        try:
            await pull_shown(member.bus, head, elements, self._syncs[p], member.offload, SLOW_PULL_S, None)
        except BadPayload:
            return None
        return NOTHING

    async def upload(self, publication: Publication, values: Any, of_use: Callable[[], bool]) -> bool:
        """As `Carrier`."""
        member, p = self._member, publication.base.fragment
        if not of_use():
            return False
        key = delta_key(member, p, publication.serial)
        delta = (await member.offload(self._values, p, "delta")).astype(DTYPES[self._syncs[p].codec])
        await push(member.bus, key, delta, self._syncs[p].chunk_bytes, DELTA_TTL_S)
        return True

    def forget(self, fragment: int, values: Any) -> None:
        """As `Carrier`."""

    async def upload_initial(self, fragment: int, nonce: str) -> int:
        """As `Carrier`."""
        values = await self._member.offload(self._values, fragment, "initial")
        return await push_initial(self._member, fragment, nonce, values)


async def learn(url: str, run: str, case: Case, name: str, enough: Callable[[], bool]) -> None:
    """One learner: it joins, makes steps until there is enough, and waits for what becomes of them."""
    rounds, incarnation = Rounds(case.layout, case.spec.sync), secrets.token_hex(8)
    async with open_bus(url, run) as bus:
        report = lambda left: virtual_report(rounds, name, incarnation, case.step_s, left, 1000 / case.step_s)  # noqa: E731
        joining = Joining(bus, LoopClock(), name, incarnation, report)
        exchange = await joining.join_with(case.spec, case.layout, MadeUp)
        shared = exchange.shared
        async with meanwhile(exchange.work()):
            while not enough():
                for p in sorted(shared.adoptions):
                    rounds.adopt(shared.adoptions.pop(p))
                    exchange.reporting.soon()
                rounds.trained(1000)
                for publication in rounds.publications(shared.windows, shared.uploaded):
                    exchange.publishing.queue([(publication, None)])
                await asyncio.sleep(case.step_s)


async def merged(url: str, case: Case, run: str, merges: int) -> None:
    """All learners at once, until so many merges are committed beyond those that there are."""
    done = False
    first: int | None = None

    async def watch() -> None:
        nonlocal done, first
        async with open_bus(url, run) as bus:
            while not done:
                heads = [head for head in await bus.read_heads(range(case.spec.sync.fragments)) if head]
                if len(heads) == case.spec.sync.fragments:
                    count = sum(head.version for head in heads)
                    first = count if first is None else first
                    done = count >= first + merges
                await asyncio.sleep(LOOK_S)

    names = [f"learner-{number}" for number in range(case.learners)]
    await asyncio.gather(watch(), *(learn(url, run, case, name, lambda: done) for name in names))


# --- the run -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Syncers:
    """Processes of one run, and the most memory that one of them had."""

    processes: list[Process]
    url: str
    log: Path
    stages: list[Stage] = field(default_factory=list)

    async def stage(self, name: str, work: Awaitable[Any]) -> None:
        """Do a part of the run, and note what it took."""
        pids = [one.pid for one in self.processes]
        before = max(_resident(pid) for pid in pids)
        for pid in pids:
            reset_peak(pid)
        peak, began = 0.0, time.perf_counter()
        task = asyncio.ensure_future(work)
        while not task.done():
            for pid in pids:
                peak = max(peak, _peak(pid))
            await asyncio.wait({task}, timeout=LOOK_S)
        task.result()
        seconds = time.perf_counter() - began
        peak = max(peak, *(_peak(pid) for pid in pids))
        with Plain(self.url) as redis:
            held, resident = int(redis.info("used_memory_peak")), _peak(int(redis.info("process_id")))
        self.stages.append(Stage(name, seconds, held, resident, before, int(peak)))

    async def ended(self) -> None:
        """Tell all of them to stop, one after the other, and wait: the last one saves."""
        for process in self.processes:
            os.kill(process.pid, signal.SIGTERM)
            async with asyncio.timeout(ENDS_S):
                while _resident(process.pid):  # noqa: ASYNC110  # of another process
                    await asyncio.sleep(LOOK_S)

    async def said(self, event: str) -> None:
        """Until the first one's log says it."""
        while event not in self.log.read_text():
            self.processes[0].check()
            await asyncio.sleep(LOOK_S)


@contextmanager
def syncing(case: Case, run: str, folder: Path, more: Sequence[str]) -> Iterator[Syncers]:
    """A Redis of its own, and the syncers."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
    with ExitStack() as stack:
        url = stack.enter_context(server(None, False, None))
        kept_logs = Path(stack.enter_context(TemporaryDirectory(prefix="diloco_bench_")))
        path = os.pathsep.join(filter(None, (PYTHONPATH, kept.get("PYTHONPATH"))))
        environ = kept | {"PYTHONPATH": path, "DILOCO_REDIS_URL": url}
        serving = ["-m", "diloco", "syncer", "--run", run, "--http-port", "0", "--checkpoint-every", "0"]
        serving += ["--checkpoint-dir", str(folder), *more]
        processes = []
        for number in range(case.syncers):
            name = f"syncer-{number}"
            processes.append(Process(name, [*serving, "--syncer-id", name], kept_logs, environ, False))
            stack.callback(processes[-1].end)
        yield Syncers(processes, url, kept_logs / "syncer-0.log")


def measure(case: Case, folder: Path) -> list[Stage]:
    """Version 0 and merges; save; resume on another Redis, and merge once more."""

    async def first(syncers: Syncers) -> None:
        await syncers.stage("version 0", merged(syncers.url, case, "one", 0))
        await syncers.stage(f"{case.merges} merges", merged(syncers.url, case, "one", case.merges))
        await syncers.stage("stop and save", syncers.ended())

    async def second(syncers: Syncers) -> None:
        await syncers.stage("resume", syncers.said("checkpoint_restored"))
        await syncers.stage("a merge after it", merged(syncers.url, case, "two", 1))

    stages: list[Stage] = []
    with asyncio.Runner(loop_factory=fast_loop) as runner:
        for run, work, more in (("one", first, ()), ("two", second, ("--resume", str(folder)))):
            with syncing(case, run, folder, more) as syncers:
                runner.run(work(syncers))
                stages += syncers.stages
    return stages


def _peak(pid: int) -> float:
    try:
        return MB * peak_mb(pid)
    except (OSError, StopIteration):  # it has ended
        return 0.0


def _resident(pid: int) -> int:
    """Bytes; 0 once the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS")), 0)


def main(
    model: Annotated[str, typer.Option(help="A size by name, as of --model of a run")] = "1b",
    fragments: Annotated[int, typer.Option(min=1, help="Number of fragments P")] = 24,
    learners: Annotated[int, typer.Option(min=1, help="Number of learners")] = 1,
    merges: Annotated[int, typer.Option(min=1, help="Merges of any fragment before the checkpoint")] = 4,
    syncers: Annotated[int, typer.Option(min=1, help="Number of syncers")] = 1,
    step_s: Annotated[float, typer.Option(help="Of a learner; half of the time between two merges")] = 1.0,
    at_once: Annotated[bool, typer.Option("--at-once", help="All fragments are due at every step")] = False,
    folder: Annotated[Path | None, typer.Option(help="For the checkpoint (default: a temporary one)")] = None,
) -> None:
    """Merge, save and resume at a model's size."""
    logs.configure("error")
    try:
        case = case_of(model, fragments, learners, merges, syncers, step_s, at_once=at_once)
        sizes = [one.elements for one in case.layout.fragments]
        mean = sum(sizes) / len(sizes)
        share = 1.0 if at_once else min(1.0, merges / fragments)
        needed = (4 + 4 + 12 * share) * sum(sizes) + (4 * learners + 8) * 4 * mean + BESIDE_BYTES
        need_memory(int(needed), f"{sum(sizes):,} parameters")
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{model}: {sum(sizes):,} parameters, {fragments} fragments, the largest {max(sizes) / mean:.3f} of the mean")
    print(f"planned: Redis {as_bytes(case.redis_bytes())} without moments, a syncer {as_bytes(case.syncer_bytes())}")
    with TemporaryDirectory(prefix="diloco_bench_") as temporary:
        place = folder or Path(temporary)
        stages = measure(case, place)
        saved = sum(one.stat().st_size for one in place.rglob("*") if one.is_file())
    for one in stages:
        redis = f"Redis {one.redis_bytes / MB:7.0f} MB (process {one.redis_resident_bytes / MB:.0f})"
        more = (one.peak_bytes - one.before_bytes) / MB
        print(f"{one.name:18}{one.seconds:8.1f} s   {redis}   syncer {one.peak_bytes / MB:7.0f} MB, +{more:.0f}")
    print(f"checkpoint: {saved / MB:.0f} MB; a fragment with its momentum: {8 * max(sizes) / MB:.0f} MB")


if __name__ == "__main__":
    typer.run(main)
