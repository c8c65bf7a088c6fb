"""Snapshots that wait for the bus: a GPU that is filled by its batch has room for a part of the model, and no more."""

import asyncio
import inspect
import weakref
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import Committed
from diloco.workers.exchange.joining import Joining
from diloco.workers.joined import JoinedLearner
from diloco.workers.rounds import Base, Rounds
from diloco_studies.virtual.virtual_time import in_virtual_time, inline
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec
from tests.workers.test_renewal import rounds_of

H, P = 8, 8


class CutOff:
    """A bus that is away when told to be."""

    away = False

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._bus, name)
        if not inspect.iscoroutinefunction(found):
            return found

        async def call(*args: Any, **named: Any) -> Any:
            if self.away:
                raise BusUnavailable("away")
            return await found(*args, **named)

        return call


class Training(VirtualLearner):
    """Its training thread's side is the production one; what it has snapshot is looked after."""

    most = 0
    """Elements of snapshots held at a time."""

    def snapshot(self, p: int) -> Any:
        values = self.values[p].copy()
        self.taken.append(weakref.ref(values))
        held = [array for one in self.taken if (array := one()) is not None]
        self.most = max(self.most, sum(map(len, held)))
        return SimpleNamespace(numpy=lambda: values)

    def overwrite(self, p: int, flat: np.ndarray) -> None:
        self.values[p][:] = flat

    async def live(self) -> None:
        spec, layout = self.world.spec, layout_of(self.world.spec.tensors)
        self.taken: list[weakref.ref[np.ndarray]] = []
        self.values = [self.begin(f.elements) for f in layout.fragments]
        self.rounds, self.cut = Rounds(layout, spec.sync), CutOff(self.connect())
        bus: Any = self.cut
        joining = Joining(bus, self.world.clock, self.name, self.incarnation, self.report, offload=inline)
        exchange = await joining.join(spec, layout, lambda p: self.values[p].copy())
        training: Any = SimpleNamespace(layout=layout, rounds=self.rounds, parameters=self, on_device=None)
        thread: Any = SimpleNamespace(call=lambda what, *args: what(*args))
        joined, running = JoinedLearner(training, exchange, thread), asyncio.create_task(exchange.work())
        joined.hand_over((), joined.adopt())
        try:
            while True:
                await self.step()
                joined.stepped(10)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


@in_virtual_time
async def test_however_long_the_bus_is_away_a_quarter_of_the_model_and_a_fragment_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that found no room are snapshot when it is back, with all that was trained until then; also then at most so
    many wait at a time."""
    monkeypatch.setattr("diloco.workers.rounds.MIN_ROOM", 0)
    world = VirtualRun(sync_spec(fragments=P, sync_interval=H, tokens=10**9))
    world.start_syncer()
    learner = Training("l0", world)
    learner.start()
    await world.until_version(3)
    sizes = [fragment.elements for fragment in layout_of(world.spec.tensors).fragments]
    before, learner.cut.away, learner.most = await world.versions(), True, 0
    await asyncio.sleep(3 * H * learner.step_s)
    held, taken = learner.most, len(learner.taken)
    learner.cut.away = False
    await world.until_version(max(before) + 3)
    assert held > 0
    assert taken < len(learner.taken)
    assert max(held, learner.most) < sum(sizes) / 4 + max(sizes)
    tape = [record for record in await world.tape() if isinstance(record, Committed)]
    most = {p: max(one.tokens for r in tape if r.fragment == p for one in r.contributions) for p in range(P)}
    assert sum(tokens > 2 * H * 10 for tokens in most.values()) > P / 2, most
    await end(learner)


def test_who_waits_longest_for_room_is_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a line that is too slow for all would carry the first fragments again and again, and never the last."""
    monkeypatch.setattr("diloco.workers.rounds.MIN_ROOM", 0)
    rounds, released = rounds_of(1, P), dict[int, int]()
    published = []
    for _ in range(12):
        rounds.trained(10)
        made = list(rounds.publications({}, {}, released))
        published += [one.base.fragment for one in made]
        for one in made:
            released[one.base.fragment] = one.serial
            rounds.adopt(Base(one.base.fragment, one.base.version + 1, bytes(16), np.zeros(7, np.float32)))
    assert published[:P] == published[P : 2 * P] == list(range(P))


def test_a_small_model_has_room_for_all_of_it() -> None:
    """Short intervals at the start of a run leave no window out."""
    rounds = rounds_of(1, P)
    rounds.trained(10)
    assert len(list(rounds.publications({}, {}, {}))) == P


def test_a_server_of_a_cluster_that_is_away_takes_no_room_from_the_fragments_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own fragments fill the room; those of the other server go on, one at a time."""
    monkeypatch.setattr("diloco.workers.rounds.MIN_ROOM", 0)
    rounds, released = rounds_of(1, P, groups=2), dict[int, int]()
    went = set()
    for _ in range(20):
        rounds.trained(10)
        for one in rounds.publications({}, {}, released):
            if one.base.fragment % 2:
                went.add(one.base.fragment)
                released[one.base.fragment] = one.serial
                rounds.adopt(Base(one.base.fragment, one.base.version + 1, bytes(16), np.zeros(7, np.float32)))
    assert went == {1, 3, 5, 7}


def test_few_large_fragments_wait_for_no_payload_but_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows count headers: those of two fragments go out at once, however large these are."""
    monkeypatch.setattr("diloco.workers.rounds.MIN_ROOM", 0)
    rounds = rounds_of(1, 3)
    rounds.trained(10)
    assert len(list(rounds.publications({}, {}, {}))) == 2


def test_what_is_to_be_offered_again_and_found_no_room_goes_out_on_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bus that came back may lack all of it."""
    monkeypatch.setattr("diloco.workers.rounds.MIN_ROOM", 0)
    rounds, released = rounds_of(1, P), dict[int, int]()
    for _ in range(P):
        rounds.trained(10)
        for one in rounds.publications({}, {}, released):
            released[one.base.fragment] = one.serial
    rounds.offer_again()
    rounds.trained(10)
    at_once = [one.base.fragment for one in rounds.publications({}, {}, released)]
    left = [one.base.fragment for one in rounds.last({}, due=False)]
    assert 0 < len(at_once) < P
    assert sorted(at_once + left) == list(range(P))
