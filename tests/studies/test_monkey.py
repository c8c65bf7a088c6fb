"""The monkey strikes as planned, undoes what it did, and never strikes anybody twice at a time."""

import asyncio
import signal
from typing import Any

import pytest

from diloco_studies.strikes.monkey import REDIS, Monkey
from diloco_studies.strikes.schedule import Manner, Party, Strike
from diloco_studies.virtual.virtual_time import run_virtual


class FakeChild:
    def __init__(self, name: str, did: list[str]) -> None:
        self.name, self._did = name, did
        self.alive, self.expected_end = True, False

    def _say(self, what: str) -> None:
        self._did.append(f"{asyncio.get_running_loop().time():.0f} {self.name} {what}")

    def kill_group(self) -> None:
        assert self.expected_end, "the launcher would take it for an accident"
        self.alive = False
        self._say("killed")

    def restart(self) -> None:
        assert not self.alive
        self.alive, self.expected_end = True, False
        self._say("started")

    def send(self, number: signal.Signals) -> None:
        self._say(number.name)


class FakeChildren:
    def __init__(self, did: list[str]) -> None:
        self.all = {name: FakeChild(name, did) for name in ("learner-0", "learner-1", "syncer-0")}

    def __getitem__(self, name: str) -> FakeChild:
        return self.all[name]

    def named(self, prefix: str) -> list[FakeChild]:
        return [child for name, child in self.all.items() if name.startswith(prefix)]


class FakeServer(FakeChild):
    """As `EmbeddedRedis`: it answers half a second after its start."""

    pid = 1
    _ready_s = 0.0

    def kill(self) -> None:
        self.expected_end = True
        self.kill_group()

    def start(self) -> None:
        self._ready_s = asyncio.get_running_loop().time() + 0.5
        self.restart()

    def answers(self) -> bool:
        return asyncio.get_running_loop().time() >= self._ready_s


class FakeDoor:
    def __init__(self, name: str, did: list[str]) -> None:
        self._name, self._did = name, did

    def __getattr__(self, what: str) -> Any:
        return lambda: self._did.append(f"{asyncio.get_running_loop().time():.0f} door {self._name} {what}")


class FakeProxy:
    def __init__(self, names: list[str], did: list[str]) -> None:
        self._doors = {name: FakeDoor(name, did) for name in names}

    def __getitem__(self, name: str) -> FakeDoor:
        return self._doors[name]

    def doors(self) -> list[FakeDoor]:
        return list(self._doors.values())


def strike(at_s: float, manner: Manner, party: Party, length_s: float = 2.0, choice: float = 0.0) -> Strike:
    return Strike(at_s, manner, party, length_s, choice)


def struck(*strikes: Strike, relent_s: float | None = None) -> tuple[list[str], Monkey]:
    """What was done, each with its second, and the monkey."""
    did: list[str] = []

    async def main() -> Monkey:
        children = FakeChildren(did)
        proxy = FakeProxy(list(children.all), did)
        monkey: Any = Monkey(strikes, children, FakeServer(REDIS, did), proxy, lambda text: None)  # type: ignore[arg-type]
        if relent_s is not None:
            asyncio.get_running_loop().call_later(relent_s, monkey.relent)
        await monkey.run()
        return monkey

    return did, run_virtual(main())


def test_a_killed_process_is_started_again_when_its_time_is_over() -> None:
    did, monkey = struck(strike(3, Manner.KILL, Party.LEARNER, 2), strike(10, Manner.KILL, Party.SYNCER, 1))
    assert did == ["3 learner-0 killed", "5 learner-0 started", "10 syncer-0 killed", "11 syncer-0 started"]
    assert [(one.kind, one.name) for one in monkey.history] == [
        ("kill learner", "learner-0"),
        ("kill syncer", "syncer-0"),
    ]


def test_a_killed_redis_is_down_until_it_answers() -> None:
    did, monkey = struck(strike(1, Manner.KILL, Party.REDIS, 2), strike(3.2, Manner.KILL, Party.REDIS))
    assert did == ["1 redis killed", "3 redis started"]
    assert monkey.missed == 1, "the second strike found it not up yet"


def test_nobody_is_struck_twice_at_a_time() -> None:
    """The next one takes the other learner, and the third finds nobody."""
    did, monkey = struck(*(strike(1 + i / 10, Manner.PAUSE, Party.LEARNER, 3) for i in range(3)))
    assert did == ["1 learner-0 SIGSTOP", "1 learner-1 SIGSTOP", "4 learner-0 SIGCONT", "4 learner-1 SIGCONT"]
    assert monkey.missed == 1


def test_a_cut_of_redis_shuts_all_doors_and_one_of_a_learner_its_own() -> None:
    did, _ = struck(strike(1, Manner.CUT, Party.LEARNER, 1, choice=0.9), strike(5, Manner.HANG, Party.REDIS, 1))
    assert did[:2] == ["1 door learner-1 cut", "2 door learner-1 restore"]
    names = ("learner-0", "learner-1", "syncer-0")
    assert did[2:] == [f"{at} door {name} {what}" for at, what in ((5, "hang"), (6, "restore")) for name in names]


def test_a_door_is_not_shut_by_two() -> None:
    did, monkey = struck(strike(1, Manner.CUT, Party.LEARNER, 5), strike(2, Manner.HANG, Party.REDIS, 1))
    assert did == ["1 door learner-0 cut", "6 door learner-0 restore"]
    assert monkey.missed == 1
    did, monkey = struck(strike(1, Manner.CUT, Party.REDIS, 5), strike(2, Manner.HANG, Party.LEARNER, 1))
    assert (len(did), monkey.missed) == (6, 1)


def test_two_doors_can_be_shut_at_a_time() -> None:
    did, monkey = struck(strike(1, Manner.CUT, Party.LEARNER, 5), strike(2, Manner.HANG, Party.SYNCER, 1))
    assert [line.split(" ", 1)[1] for line in did] == [
        "door learner-0 cut",
        "door syncer-0 hang",
        "door syncer-0 restore",
        "door learner-0 restore",
    ]
    assert monkey.missed == 0


def test_when_it_relents_all_is_undone_at_once_and_nothing_more_is_begun() -> None:
    did, monkey = struck(
        strike(1, Manner.KILL, Party.LEARNER, 100),
        strike(2, Manner.PAUSE, Party.REDIS, 100),
        strike(50, Manner.KILL, Party.SYNCER),
        relent_s=10,
    )
    assert did == ["1 learner-0 killed", "2 redis SIGSTOP", "10 learner-0 started", "10 redis SIGCONT"]
    assert len(monkey.history) == 2


def test_a_redis_that_cannot_be_started_again_ends_the_plan_with_its_error() -> None:
    async def main() -> None:
        did: list[str] = []
        server = FakeServer(REDIS, did)
        server.answers = lambda: (_ for _ in ()).throw(OSError("no space left"))  # type: ignore[method-assign]
        children = FakeChildren(did)
        plan = [strike(1, Manner.KILL, Party.REDIS)]
        await Monkey(plan, children, server, FakeProxy([], did), lambda text: None).run()  # type: ignore[arg-type]

    with pytest.raises(ExceptionGroup) as group:
        run_virtual(main())
    assert group.group_contains(OSError, match="no space left")
