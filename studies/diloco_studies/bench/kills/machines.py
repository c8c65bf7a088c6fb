"""Data-parallel training on machines that are killed: on each of them torchrun's agent, with its rank.

    launcher (this process): monkey, torch's store for the rendezvous
      └─ spawner ──forks──▶ machines (torchrun ──fork──▶ rank ──gloo──▶ other ranks), evaluator

All of them are forked from a process that has loaded torch and the text, as the decoupled learners are: nobody waits
for that after a kill.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from diloco.launcher.display import Screen
from diloco.launcher.folder import Folder
from diloco.launcher.launch import Child, ChildDied, Children, environment, threads_for
from diloco.options import RunProcess
from diloco.pipeline.process import signals
from diloco.pipeline.units import duration
from diloco.pipeline.waiting import first_of, in_background
from diloco_studies.bench.kills import evaluate, train
from diloco_studies.bench.kills.curves import Run
from diloco_studies.bench.kills.plan import ENVIRONMENT, TORCHRUN, Method, Plan, kills, name_of, torchrun
from diloco_studies.strikes.evidence import read_steps
from diloco_studies.strikes.monkey import Monkey
from diloco_studies.strikes.spawner import PRELOADED, Spawner

START_S = 120.0
POLL_S, SAY_S = 0.5, 10.0
MAX_ENDINGS = 20
"""An agent that ends by itself more often is not started again: the run is given up."""


class Watch:
    """Follows a run: when all machines train, when the budget is spent, who ended by itself."""

    def __init__(self, folder: Folder, machines: Sequence[Child], evaluator: Child, screen: Screen) -> None:
        self._folder, self._machines, self._evaluator, self._screen = folder, machines, evaluator, screen
        self.under_way, self.done = asyncio.Event(), asyncio.Event()
        self.monkey: Monkey | None = None
        self.endings = 0
        """Agents that ended by themselves, and were started again."""

    async def follow(self) -> None:
        """Until the budget is spent.

        Raises:
            ChildDied: an agent ends again and again, or the evaluator does.
        """
        said_s = time.monotonic()
        while True:
            if self._evaluator.status == 0:
                self.done.set()
                return
            if not self._evaluator.alive:
                raise ChildDied(self._evaluator.describe_end())
            if not self.under_way.is_set() and all((await asyncio.to_thread(self._steps)).values()):
                self.under_way.set()
            self._start_again()
            if time.monotonic() - said_s > SAY_S:
                said_s = time.monotonic()
                if found := read_evaluations(self._folder.path):
                    _, tokens, loss = found[-1]
                    self._screen.note(f"{tokens} tokens trained, held-out loss {loss:.3f}")
            await asyncio.sleep(POLL_S)

    def _steps(self) -> dict[str, int]:
        return {
            child.name: sum(len(steps) for _, steps in read_steps(self._folder.learners).get(child.name, ()))
            for child in self._machines
        }

    def _start_again(self) -> None:
        """An agent that no kill has ended, as a service manager would; not once one has trained to the end."""
        if any(child.status == 0 for child in self._machines):
            return
        for child in self._machines:
            if child.alive or (self.monkey is not None and self.monkey.striking(child.name)):
                continue
            self.endings += 1
            self._screen.note(f"torchrun on {child.name} {child.ending()} on its own; starting it again")
            if self.endings > MAX_ENDINGS or not self.under_way.is_set():
                raise ChildDied(child.describe_end())
            child.restart()


def read_evaluations(out: Path) -> list[tuple[float, int, float]]:
    """Unix time, trained tokens and held-out loss of each measurement so far."""
    path = out / evaluate.EVALUATIONS
    lines = path.read_text().split("\n")[:-1] if path.is_file() else []
    return [(one["unix_s"], one["tokens"], one["loss"]) for one in map(json.loads, lines)]


async def run(method: Method, plan: Plan, settings: RunProcess, folder: Folder) -> Run | None:
    """Train until the budget or the time is spent; None: the user stopped it.

    Raises:
        DilocoError: the machines never trained, or their agents end by themselves; nothing is left running.
    """
    asked, task = asyncio.Event(), asyncio.current_task()
    assert task is not None  # noqa: S101  # this is a coroutine
    signals.install_signal_handlers(asyncio.get_running_loop(), asked, task.cancel)
    threads = threads_for(plan.machines, None)
    environ = environment(threads, None) | ENVIRONMENT
    loaded = (*PRELOADED, TORCHRUN, train.__name__, evaluate.__name__)
    with ExitStack() as stack:
        folder.make(settings)
        folder.logs.mkdir(parents=True, exist_ok=True)
        for machine in range(plan.machines):
            (folder.learners / name_of(machine)).mkdir(parents=True)
        spawner = stack.enter_context(Spawner(environ, folder.logs / "spawner.log", settings.data, loaded))
        screen = stack.enter_context(Screen())
        screen.note(f"{method.name}: output folder {folder.path}")
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        await asyncio.to_thread(spawner.wait_until_ready)
        machines = stack.enter_context(Children(folder.logs, partial(spawner.child, program=TORCHRUN)))
        beside = stack.enter_context(Children(folder.logs, partial(spawner.child, program=evaluate.__name__)))
        given = [str(folder.settings), str(folder.path)]
        for machine in range(plan.machines):
            name, script = name_of(machine), Path(train.__file__)
            machines.start(name, torchrun(method, plan, f"127.0.0.1:{store.port}", script, [*given, name]), environ)
        evaluator = beside.start("evaluator", given, environ)
        folder.write_run(None, settings, machines.pids() | beside.pids())
        watch = Watch(folder, machines.named(""), evaluator, screen)
        async with in_background(watch.follow()):
            await first_of(watch.under_way, asked, timeout_s=START_S)
            if not watch.under_way.is_set() and not asked.is_set():
                raise ChildDied(f"the machines did not begin to train. {machines[name_of(0)].describe_end()}")
            began_s = time.time()
            watch.monkey = monkey = Monkey(
                kills(plan) if method.killed else [],
                machines,
                None,
                None,
                lambda text: screen.note(f"{time.time() - began_s:7.1f} s  {text}"),
            )
            async with in_background(monkey.run()):
                await first_of(watch.done, asked, timeout_s=plan.within_s)
                monkey.relent()
        took = duration(time.time() - began_s)
        screen.note(f"{method.name}: {'spent the budget' if watch.done.is_set() else 'ended'} after {took}")
    if asked.is_set():
        return None
    steps = {name: [at for _, made in lives for _, at in made] for name, lives in read_steps(folder.learners).items()}
    measured = read_evaluations(folder.path)
    trained, final = sum(map(len, steps.values())) * plan.step_tokens, measured[-1][1]
    return Run(
        evaluations=measured,
        steps=steps,
        strikes=monkey.history,
        tokens={"trained": max(trained, final), "final": final, "lost": max(0, trained - final)},
        finished=watch.done.is_set(),
        restarted=watch.endings,
    )
