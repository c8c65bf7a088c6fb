"""One delta's way: the files it passes through, from the step that publishes it to the step that adopts its global.

    python -m tests.way        prints the files in order, with the functions that put them there

A real learner publishes and a real syncer merges over a real Redis, in one process whose calls are all recorded. A file
of the project is on the way if a function of it

- is called for *every* delta, between the step that publishes it and the adoption of what came of it, and
- is not called while no delta is under way: while the same learner steps, reports and looks at heads, and the same
  syncer polls and prolongs its lease.

`Learner.step` is where the way begins, so its file counts although every step runs it. For the syncer it ends with the
call that commits: its metrics, its estimates and its next window are on no learner's way. Scripts on Redis are counted
apart. A file of types alone has no function that is called, and is on nobody's way.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn

from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.bus.redis.calls import RedisCalls
from diloco.pipeline.bus.redis.fragment_bus import RedisFragments
from diloco.pipeline.settings import SyncSettings
from diloco.syncer import installing
from diloco.syncer.times import SyncerTimes
from diloco.workers.exchange import pulling
from diloco.workers.learner import Learner
from diloco.workers.times import LearnerTimes
from tests import HANGING_S
from tests.workers.test_device_encoding import a_syncer

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("diloco", "pipeline", "studies", "syncer", "workers")
BEGINS = "workers/learner.py"
ENDS = ("workers/rounds.py", "Rounds.adopt")
SCRIPTS = "pipeline/bus/redis/lua"
DELTAS = 6
INTERVAL = 50
STEP_S = 0.02
UNSTRETCHED = {"overlap_steps": INTERVAL // 2}
"""A round trip may be half an interval, whatever else the machine does: deltas stay that far apart."""
SETTLED_STEPS = 20
"""After an adoption, until reports have told of it: what runs then belongs to neither."""

OFTEN_S = 0.5
"""Head and payloads are looked at so often, whatever happens, where it is seconds else."""

RESUMED = 0b11
"""Of a RESUME instruction's argument: a coroutine or a generator goes on, which was called before."""

Call = tuple[str, str]
"""File, and name of a function in it."""
Record = list[tuple[Call, str]]
"""Calls with the task or thread that made them, each once, in order."""


class Trace(NamedTuple):
    """What was found."""

    files: dict[str, list[str]]
    """File -> its functions that put it here, each in order of its first call, as the first delta had it."""
    before: set[tuple[str, str]]
    """(a, b): the same task is always the first to come to either, and comes to a first. Two tasks have no order."""
    scripts: list[str]
    """Scripts on Redis, in order."""


class Recorder:
    """Which functions of the project are called, in all threads that begin while it is installed."""

    def __init__(self) -> None:
        self._calls: dict[tuple[Call, str], None] = {}
        self._committed: set[int] = set()
        """Threads that have committed."""
        self._named: dict[CodeType, Call | None] = {}
        self._scripts = {RedisCalls.script.__code__: "", RedisFragments._write.__code__: "write_chunk"}
        """What calls scripts -> which; "": it is given the name."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """For the time of a block."""
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def taken(self) -> Record:
        """What was called since the last time."""
        calls, self._calls = self._calls, {}
        self._committed.clear()
        return list(calls)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_code[frame.f_lasti + 1] & RESUMED:
            return
        if self._committed and threading.get_ident() in self._committed:
            return
        if code not in self._named:
            self._named[code] = call_of(code)
        if (call := self._named[code]) is not None:
            self._calls[call, caller()] = None
        if code in self._scripts:
            self._calls[(SCRIPTS, name := self._scripts[code] or frame.f_locals["name"]), caller()] = None
            if name == "commit":
                self._committed.add(threading.get_ident())


def caller() -> str:
    """The task, or else the thread, that runs."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        task = None
    return threading.current_thread().name if task is None else task.get_name()


def call_of(code: CodeType) -> Call | None:
    """None: not the project's, or no function by name (a module, a comprehension)."""
    if code.co_name.startswith("<") or not code.co_filename.startswith(f"{ROOT}{os.sep}"):
        return None
    inside = Path(code.co_filename).resolve().relative_to(ROOT)  # diloco/pipeline is a link
    return (str(inside), code.co_qualname) if inside.parts[0] in PARTS else None


def trace(url: str, run: str = "way") -> Trace:
    """Record the ways of some deltas over this Redis."""
    recorder, model, idle, ways = Recorder(), nn.Linear(64, 64), set[Call](), list[Record]()
    sync = SyncSettings(
        fragments=1, sync_interval=INTERVAL, first_interval=0, outer_warmup=0, quorum=1, tokens=2**40, **UNSTRETCHED
    )
    with (
        patch.object(installing, "TIMES", SyncerTimes(repair_s=OFTEN_S)),
        patch.object(pulling, "TIMES", LearnerTimes(look_s=OFTEN_S)),
        recorder.installed(),
        a_syncer(url, run),
        Learner(model, torch.optim.AdamW(model.parameters()), run=run, redis_url=url, sync=sync) as learner,
    ):
        rounds = learner.joined.training.rounds

        def steps(count: int) -> None:
            for _ in range(count):
                learner.step(tokens=1)
                time.sleep(STEP_S)

        def published_and_adopted() -> None:
            versions, deltas, until = rounds.versions, rounds.deltas, time.monotonic() + HANGING_S
            steps(1)
            while rounds.deltas == deltas:  # a snapshot before may have been held for long
                assert time.monotonic() < until, "nothing was published"
                steps(1)
            while rounds.versions == versions:
                assert time.monotonic() < until, "nothing was adopted"
                steps(1)

        published_and_adopted()  # the first round begins at once
        for _ in range(DELTAS):
            steps(SETTLED_STEPS)
            recorder.taken()
            steps(INTERVAL - 1 - SETTLED_STEPS)
            idle.update(call for call, _ in recorder.taken())
            published_and_adopted()
            way = recorder.taken()
            ways.append(way[: [call for call, _ in way].index(ENDS) + 1])
    return trace_of(ways, idle)


def trace_of(ways: Sequence[Record], idle: Set[Call]) -> Trace:
    """By the rule above."""
    always = set.intersection(*({call for call, _ in way} for way in ways)) - idle
    files: dict[str, list[str]] = {BEGINS: ["step"]}
    for file, function in dict.fromkeys(call for call, _ in ways[0] if call in always):
        files.setdefault(file, []).append(function)
    scripts = files.pop(SCRIPTS, [])
    firsts = [first_calls(way, always) for way in ways]
    before = {
        (a, b)
        for a, b in permutations(firsts[0], 2)
        if all(first[a][1] == first[b][1] and first[a][0] < first[b][0] for first in firsts)
    }
    return Trace(files, before, scripts)


def first_calls(way: Record, counted: Set[Call]) -> dict[str, tuple[int, str]]:
    """File -> number of its first call, and who made it."""
    found: dict[str, tuple[int, str]] = {}
    for at, (call, who) in enumerate(way):
        if call in counted:
            found.setdefault(call[0], (at, who))
    return found


if __name__ == "__main__":
    with EmbeddedRedis(appendonly=False, dies_with_us=True) as redis:
        found = trace(redis.url)
    for place, (file, functions) in enumerate(found.files.items(), 1):
        print(f"{place:3} {file:45} {', '.join(functions)}")
    print(f"scripts: {', '.join(found.scripts)}")
