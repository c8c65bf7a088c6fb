"""The data-parallel baseline under the same strikes: torchrun's elastic agent restarts its ranks.

    launcher (this process): monkey ──▶ ranks
      └─ agent ──forkserver──▶ ranks                  (`agent`, `rank`)

There is no Redis, no syncer and no evaluator. What is killed, the agent starts again at once, and all others with it.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from diloco.launcher.display import Screen
from diloco.launcher.folder import Folder, plain
from diloco.launcher.launch import Child, ChildDied, Children, environment, threads_for
from diloco.pipeline.errors import DilocoError
from diloco.pipeline.process import lifecycle
from diloco.pipeline.waiting import first_of
from diloco_studies.strikes.elastic.report import ElasticFacts
from diloco_studies.strikes.evidence import of_group, read_steps
from diloco_studies.strikes.monkey import Monkey
from diloco_studies.strikes.schedule import Rule, draw
from diloco_studies.strikes.settings import ChaosProcess

CHECKPOINT_EVERY_S = 1.0
"""Unless told otherwise; a checkpoint of the default model takes about 20 ms."""
START_S, END_S, LEFT_S = 300.0, 120.0, 60.0
POLL_S = 0.2


class Agent(Child):
    """What starts the ranks."""

    program = "diloco_studies.strikes.elastic.agent"


class Rank:
    """One rank, whatever process it is at the moment; the agent starts it again."""

    def __init__(self, name: str, file: Path, agent: Child) -> None:
        """file: has the process id of its present life."""
        self.name, self._file, self._agent = name, file, agent
        self.expected_end = False
        self._paused: int | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None while it does not run."""
        try:
            pid = int(self._file.read_text())
            # All ranks are in the agent's group: a number that another process has got since is not taken for one.
            return pid if os.getpgid(pid) == self._agent.pid else None
        except (OSError, ValueError):
            return None

    @property
    def alive(self) -> bool:
        """It runs."""
        return self.pid is not None

    def kill_group(self) -> None:
        """SIGKILL to this rank alone."""
        self._signal(self.pid, signal.SIGKILL)

    def restart(self) -> None:
        """Nothing: the agent does."""

    def send(self, number: signal.Signals) -> None:
        """Send a signal; SIGCONT goes to the one that was stopped."""
        if number is signal.SIGCONT:
            self._signal(self._paused, number)
        else:
            self._paused = self.pid
            self._signal(self._paused, number)

    @staticmethod
    def _signal(pid: int | None, number: signal.Signals) -> None:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class Ranks:
    """All ranks by name."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._by_name = {rank.name: rank for rank in ranks}

    def __getitem__(self, name: str) -> Rank:
        return self._by_name[name]

    def named(self, prefix: str) -> list[Rank]:
        """Those whose name starts so."""
        return [rank for name, rank in self._by_name.items() if name.startswith(prefix)]


class Watch:
    """How far the ranks are, from their own records."""

    def __init__(self, folder: Folder, agent: Child, learners: int, until_step: int | None) -> None:
        self._folder, self._agent, self._learners, self._until = folder, agent, learners, until_step
        self.under_way, self.far_enough, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def follow(self) -> None:
        """Until the agent has ended."""
        while self._agent.alive:
            newest = await asyncio.to_thread(self.newest)
            if newest is not None:
                self.under_way.set()
                if self._until is not None and newest >= self._until:
                    self.far_enough.set()
            await asyncio.sleep(POLL_S)
        self.ended.set()

    def newest(self) -> int | None:
        """The last step that all ranks have made; None before the first one."""
        steps = [_last_step(path) for path in self._folder.learners.glob("learner-*/losses.jsonl")]
        return min(steps) if len(steps) == self._learners and all(steps) else None


def _last_step(path: Path) -> int:
    """Of a record of steps, from its last whole line; 0 if there is none."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        whole = file.read().split(b"\n")[:-1]
    try:
        return int(json.loads(whole[-1])["step"]) if whole else 0
    except ValueError:
        return 0


async def _left_of(group: int) -> list[str]:
    """Processes of the agent's group that are there a while after its end."""
    deadline = time.monotonic() + LEFT_S
    while (left := await asyncio.to_thread(of_group, group)) and time.monotonic() < deadline:  # noqa: ASYNC110  # no event of ours
        await asyncio.sleep(POLL_S)
    return left


async def strike_baseline(
    settings: ChaosProcess, folder: Folder, for_s: float, rules: list[Rule], until_step: int | None = None
) -> ElasticFacts:
    """Strike the ranks for a time at most, or until they have made so many steps.

    Raises:
        DilocoError: they never trained, or did not end; nothing is left running.
    """
    asked, task = asyncio.Event(), asyncio.current_task()
    assert task is not None and settings.tokens is not None  # noqa: S101, PT018  # a coroutine, on prepared settings
    lifecycle.install_signal_handlers(asyncio.get_running_loop(), asked, task.cancel)
    every_s = settings.checkpoint_every or CHECKPOINT_EVERY_S
    threads = threads_for(settings.learners, settings.threads)
    with ExitStack() as stack:
        folder.make(settings)
        screen = stack.enter_context(Screen())
        children = stack.enter_context(Children(folder.logs, Agent))
        arguments = map(str, (folder.settings, folder.path, settings.learners, every_s, threads))
        agent = children.start("agent", arguments, environment(threads, None))
        folder.write_run(None, settings, children.pids())
        screen.note(f"output folder {folder.path}")
        names = [f"learner-{number}" for number in range(settings.learners)]
        ranks = Ranks([Rank(name, folder.path / "ranks" / name, agent) for name in names])
        watch = Watch(folder, agent, settings.learners, until_step)
        following = asyncio.create_task(watch.follow())
        began_s = 0.0
        monkey = Monkey(
            draw(rules, for_s, settings.seed),
            ranks,
            None,
            None,
            lambda text: screen.note(f"{time.time() - began_s:7.1f} s  {text}"),
        )
        try:
            await first_of(watch.under_way, watch.ended, asked, timeout_s=START_S)
            if not watch.under_way.is_set():
                agent.kill_group()
                raise ChildDied(f"the ranks did not begin to train; nothing was struck. {agent.obituary()}")
            began_s = time.time()
            striking = asyncio.create_task(monkey.run())
            await first_of(watch.far_enough, watch.ended, asked, timeout_s=for_s)
            ended_s = time.time()
            monkey.relent()
            await striking
            screen.note("no more strikes: the run comes to its end")
            (folder.path / "stop").touch()
            await first_of(watch.ended, timeout_s=END_S)
            if agent.alive:
                raise DilocoError(f"the ranks did not end {END_S:.0f} s after they were told to; logs in {folder.logs}")
            left = await _left_of(agent.pid)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)  # what the agent has left, if it ended by itself
    result = folder.path / "result.json"
    return ElasticFacts(
        settings=plain(settings),
        seed=settings.seed,
        plan={one: getattr(settings, one) for one in ("kill", "pause")},
        learners=settings.learners,
        step_tokens=settings.batch * settings.accumulate * settings.seq_len,
        checkpoint_every_s=every_s,
        began_s=began_s,
        ended_s=ended_s,
        steps=read_steps(folder.learners),
        result=json.loads(result.read_text()) if result.is_file() else None,
        left_running=left,
        agent_ending="" if agent.status == 0 else agent.obituary(),
        strikes=monkey.history,
        missed=monkey.missed,
        late_s=monkey.late_s,
        stopped=asked.is_set(),
    )
