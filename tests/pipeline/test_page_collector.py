"""The page's model of whole runs in virtual time, and how it comes to those who follow it."""

import asyncio
import json
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from diloco.pipeline.bus.ports import START
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.messages.fragment import Committed, RefusalReason, Rejected
from diloco.pipeline.messages.run import Event, LearnerReport
from diloco.pipeline.messages.wire import MAX_SECONDS
from diloco.pipeline.view.page import collector as page_collector
from diloco.pipeline.view.page.collector import Collector
from diloco.pipeline.view.page.from_tape import model_of_tape
from diloco.pipeline.view.page.lanes import FragmentBits, LearnerBits
from diloco.pipeline.view.page.model import MAX_LANES, MAX_LOSSES, MAX_MARKS, Model, PageModel, Poll
from diloco.pipeline.view.page.timeline import Timeline
from diloco.pipeline.view.status import build_status
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import VirtualClock, in_virtual_time, run_virtual
from tests import samples
from tests.browser.stage import collector_of
from tests.pipeline.test_page_timeline import Follower
from tests.virtual_run import RUN, VirtualLearner, VirtualRun, end, sync_spec, under_way

pytestmark = pytest.mark.usefixtures("no_log_lines")


def lane(times: Model, name: str) -> list[tuple[float, int]]:
    """(Unix time, bits) of its buckets."""
    return [((times["first"] + at) * times["step_s"], bits) for at, bits in enumerate(b64decode(times["lanes"][name]))]


def seconds(times: Model, name: str, bit: int) -> float:
    """For how long a bit was set."""
    return sum(times["step_s"] for _, bits in lane(times, name) if bits & bit)


class Page:
    """What `model.js` makes of events."""

    def __init__(self) -> None:
        self.model: Model = {}
        self.fine, self.coarse = Follower(), Follower()
        self.last, self.kinds = b"", list[str]()

    def take(self, event: bytes) -> None:
        fields = dict(line.split(": ", 1) for line in event.decode().rstrip("\n").split("\n"))
        data, self.last = json.loads(fields["data"]), event
        self.kinds.append(fields["event"])
        if fields["event"] == "snapshot":
            self.model = {"learners": {}, "fragments": {}, "marks": [], "losses": []}
            self.fine, self.coarse = Follower(), Follower()
        for name, times in (("fine", self.fine), ("coarse", self.coarse)):
            if found := data.pop(name, None):
                times.take({"whole": found} if fields["event"] == "snapshot" else found)
        for name in ("learners", "fragments"):
            for key, row in data.pop(name, {}).items():
                if row is None:
                    del self.model[name][key]
                else:
                    self.model[name][key] = self.model[name].get(key, {}) | row
        for name in ("marks", "losses"):
            self.model[name] = [*self.model[name], *data.pop(name, [])]
        self.model |= data

    def same_as(self, snapshot: Model) -> bool:
        """Whether it is what a page that is opened now would have."""
        snapshot = json.loads(json.dumps(snapshot))
        for name, times in (("fine", self.fine), ("coarse", self.coarse)):
            whole = snapshot.pop(name)
            wanted = {lane: list(b64decode(cells)) for lane, cells in whole["lanes"].items()}
            assert (times.step_s, times.first) == (whole["step_s"], whole["first"])
            assert {lane: cells[: len(wanted[lane])] for lane, cells in times.lanes.items()} == wanted
            assert times.series == whole["series"]
        assert {key: self.model[key] for key in snapshot} == snapshot
        return True


async def next_event(events: AsyncIterator[bytes]) -> bytes:
    async with asyncio.timeout(60):
        return await anext(events)


@in_virtual_time
async def test_a_page_that_follows_has_what_one_that_is_opened_now_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through merges, a kill, a restart and the doublings of the whole run's buckets, of which there are few here."""
    monkeypatch.setattr(Timeline.__init__, "__defaults__", (300,))
    world, (first, second) = await under_way(2)
    collector, page = collector_of(world), Page()
    running = asyncio.create_task(collector.run())
    async with aclosing(collector.follow()) as events:
        for number in range(220):
            page.take(await next_event(events))
            if number == 60:
                await second.kill()
            if number == 120:
                second = VirtualLearner("l1", world, 0.1, "f" * 16).start()
        while page.last is not collector._updates[-1].data:
            page.take(await next_event(events))
        assert page.same_as(collector.model.snapshot())
    assert page.kinds.count("snapshot") == 1
    assert page.coarse.step_s > 0.25
    running.cancel()
    await end(first, second)


@in_virtual_time
async def test_who_reads_too_slowly_gets_a_snapshot_and_not_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two of its reads more has come than is kept."""
    monkeypatch.setattr(page_collector, "KEPT_PATCHES", 3)
    world, party = await under_way(1)
    collector, page = collector_of(world), Page()
    await collector.poll()
    async with aclosing(collector.follow()) as events:
        page.take(await next_event(events))
        for _ in range(10):
            await asyncio.sleep(1)
            await collector.poll()
        page.take(await next_event(events))
    assert page.kinds == ["snapshot", "snapshot"]
    assert page.same_as(collector.model.snapshot())
    await end(*party)


@in_virtual_time
async def test_a_kill_is_a_gap_in_the_lane_within_two_seconds() -> None:
    """And it ends where the learner is back, as another life."""
    world, (first, second) = await under_way(2)
    collector = collector_of(world)
    running = asyncio.create_task(collector.run())
    async with aclosing(collector.follow()) as events:
        await next_event(events)
        await asyncio.sleep(10)
        assert seconds(collector.model.snapshot()["fine"], "L/l1", LearnerBits.GONE) == 0
        await second.kill()
        await asyncio.sleep(2)
        model = collector.model.snapshot()
        assert seconds(model["fine"], "L/l1", LearnerBits.GONE) > 0
        assert seconds(model["fine"], "L/l0", LearnerBits.GONE) == 0
        assert (model["learners"]["l1"]["state"], model["learners"]["l0"]["state"]) == ("silent", "live")
        await asyncio.sleep(10)
        model = collector.model.snapshot()
        assert model["learners"]["l1"]["state"] == "dead"
        assert [(one["what"], one["who"]) for one in model["marks"] if one["what"] == "went silent"] == [
            ("went silent", "l1")
        ]
        assert model["sentence"]["text"].startswith("The run continues without l1")
        second = VirtualLearner("l1", world, 0.1, "f" * 16).start()
        await asyncio.sleep(10)
        model = collector.model.snapshot()
        assert (model["learners"]["l1"]["state"], model["learners"]["l1"]["lives"]) == ("live", 2)
        assert 10 <= seconds(model["fine"], "L/l1", LearnerBits.GONE) <= 14
        late = [bits for at, bits in lane(model["fine"], "L/l1") if at > world.clock.unix() - 5]
        assert late
        assert all(bits & LearnerBits.TRAINING and not bits & LearnerBits.GONE for bits in late[:-2])
    running.cancel()
    await end(first, second)


class Away(MemoryBus):
    """A bus that can be cut off."""

    away = False

    async def read_reports(self) -> Any:
        if self.away:
            raise BusUnavailable("cut off")
        return await super().read_reports()


@in_virtual_time
async def test_a_bus_that_was_away_leaves_no_gap_in_the_lanes_of_who_went_on() -> None:
    """Meanwhile the sentence says so, and nothing that was on the tape is lost."""
    world, party = await under_way(2)
    bus = Away(RUN, world.clock, world.store)
    collector = Collector(bus, VirtualClock())
    running = asyncio.create_task(collector.run())
    await asyncio.sleep(5)
    bus.away = True
    await asyncio.sleep(10)
    said = collector.model.snapshot()["sentence"]
    assert said["text"].startswith("Redis has not answered for")
    assert "BusUnavailable: cut off" in said["text"]
    bus.away = False
    await asyncio.sleep(5)
    await collector.poll()
    model = collector.model.snapshot()
    assert model["sentence"]["level"] == "well"
    assert seconds(model["fine"], "L/l0", LearnerBits.GONE) == 0
    merged = sum(bool(bits & FragmentBits.MERGED) for _, bits in lane(model["coarse"], "F/0"))
    assert merged >= (await world.versions())[0]
    running.cancel()
    await end(*party)


@in_virtual_time
async def test_a_server_that_took_over_with_less_is_read_from_its_start() -> None:
    """Its clock is behind: what comes next has lower ids than what was read last. Who follows gets a snapshot."""
    world, party = await under_way(2)
    bus, page = Away(RUN, world.clock, world.store), Page()
    collector = Collector(bus, VirtualClock())
    running = asyncio.create_task(collector.run())
    async with aclosing(collector.follow()) as events:
        page.take(await next_event(events))
        saved = world.store.snapshot()
        await asyncio.sleep(10)
        bus.away = True
        await asyncio.sleep(2)
        world.store.restart(saved)
        await end(*party)
        bus.away = False
        while page.kinds.count("snapshot") == 1:
            page.take(await next_event(events))
        while page.last is not collector._updates[-1].data:
            page.take(await next_event(events))
        assert page.same_as(collector.model.snapshot())
    running.cancel()
    await asyncio.sleep(BUS_TIMES.live_s + 1)  # who had no time to write since the outage is not silent yet
    fresh = collector_of(world)
    for one in (collector, fresh):
        await one.poll()
    seen, wanted = collector.model.snapshot(), fresh.model.snapshot()
    assert seen["totals"] == wanted["totals"]
    for name in ("merges", "merged"):
        of = [[one for one in model["coarse"]["series"][name] if one is not None] for model in (seen, wanted)]
        assert of[0][-1] == of[1][-1]


class Timed(VirtualLearner):
    """One that says how long it has trained."""

    began_s = 0.0

    def report(self, left: bool) -> LearnerReport:
        report, now_s = super().report(left), self.world.clock.now()
        self.began_s = self.began_s if report.step else now_s
        return report.model_copy(update={"wall_s": now_s - self.began_s})


@in_virtual_time
async def test_who_comes_late_sees_the_run_from_its_first_second() -> None:
    """Merges by time from the tape, trained tokens and lives from reports, gaps of learners that are dead since."""
    world = VirtualRun(sync_spec(tokens=10**9))
    world.start_syncer()
    early = collector_of(world)
    running = asyncio.create_task(early.run())
    first = Timed("l0", world, 0.1, "0" * 16).start()
    second = Timed("l1", world, 0.1, "1" * 16).start()
    await asyncio.sleep(60)
    await second.kill()
    await asyncio.sleep(30)
    second = Timed("l1", world, 0.1, "2" * 16).start()
    await asyncio.sleep(60)
    late = collector_of(world)
    await late.poll()
    await early.poll()
    seen, came = early.model.snapshot(), late.model.snapshot()
    begun_s = seen["coarse"]["first"] * seen["coarse"]["step_s"]
    for name in ("tokens", "merged", "merges"):
        for at_s in (20, 45, 75, 110, 140):
            wanted, found = (at(one["coarse"], name, begun_s + at_s) for one in (seen, came))
            assert found == pytest.approx(wanted, rel=0.1, abs=30), (name, at_s)
    for one in (seen, came):
        assert (
            next(sum for sum in one["coarse"]["series"]["merges"] if sum is not None) == 0
        )  # the first ones are growth
        assert [mark["who"] for mark in one["marks"] if mark["what"] == "went silent"] == ["l1"]
    assert seconds(came["coarse"], "L/l1", LearnerBits.GONE) == pytest.approx(30, abs=4)
    assert seconds(came["coarse"], "L/l0", LearnerBits.TRAINING) == pytest.approx(150, abs=4)
    assert came["learners"]["l1"]["lives"] == 2
    assert any("are known only from when this page" in note for note in came["notes"])
    running.cancel()
    await end(first, second)


def at(times: Model, name: str, unix_s: float) -> float:
    """A sum at a time: where nothing was noted it is what it was before."""
    values = times["series"][name][: int(unix_s / times["step_s"]) - times["first"] + 1]
    return next((one for one in reversed(values) if one is not None), 0.0)


@in_virtual_time
async def test_a_window_that_was_open_before_anybody_looked_is_open_since_then() -> None:
    """The tape says when: a quorum that cannot be met is seen for as long as it lasts."""
    world, (first, second) = await under_way(3, quorum=2)
    await second.kill()
    await asyncio.sleep(60)
    collector = collector_of(world)
    await collector.poll()
    model = collector.model.snapshot()
    assert model["fragments"]["0"]["state"] == "collecting"
    assert seconds(model["coarse"], "F/0", FragmentBits.COLLECTING) >= 50
    assert model["sentence"]["text"].startswith("Nothing can be merged: a merge needs 2 learners, but 1 is live")
    await end(first, second)


@in_virtual_time
async def test_a_tape_that_was_trimmed_is_said() -> None:
    """The sums are right all the same: what the tape lacks is in them from its beginning on."""
    world, party = await under_way(20)
    entries = await world.bus.read_tape({0: START}, limit=10_000)
    await world.bus.trim_tape(0, entries[len(entries) // 2].entry_id)
    collector = collector_of(world)
    await collector.poll()
    model = collector.model.snapshot()
    assert any("Earlier merges count in the totals" in note for note in model["notes"])
    merged = [one for one in model["coarse"]["series"]["merged"] if one is not None]
    assert merged[-1] == model["totals"]["merged_tokens"]
    assert merged[0] > 0.4 * merged[-1]
    assert merged == sorted(merged)
    await end(*party)


def test_outer_steps_are_drawn_as_means_over_about_one_merge_of_each_fragment() -> None:
    """Of two fragments a new value counts half; what is not known is not drawn, and version 0 is not a merge."""

    def merge(at_s: float, step_norm: float, rho: float | None, *cosines: float | None) -> Committed:
        parts = tuple(samples.contribution(f"l{n}", cosine=one) for n, one in enumerate(cosines))
        return samples.committed(unix_s=at_s, contributions=parts, norm=2.0, step_norm=step_norm, rho=rho)

    heads = [samples.head(p, version=2) for p in range(2)]
    status = build_status("run", samples.spec(), samples.run_state(), [], heads, None, [], 1010.0)
    tape = [
        merge(1001, 2, None),
        merge(1003, 2, None, None),
        merge(1005, 4, 0.5, 0.5, 0.25),
        merge(1007, 4, -0.5, 0.375),
    ]
    model = PageModel("run")
    model.see(Poll(now_s=1010.0, status=status, began_s=1000.0, records=tape))
    model.patch()
    drawn = model.snapshot()["fine"]
    for name, expected in (
        ("outer_rate", [(1003, 1.0), (1005, 1.5), (1007, 1.75)]),
        ("rho", [(1005, 0.5), (1007, 0.0)]),
        ("cosine", [(1005, 0.375), (1007, 0.375)]),
    ):
        values = enumerate(drawn["series"][name], drawn["first"])
        assert [(at * drawn["step_s"], value) for at, value in values if value is not None] == expected


@in_virtual_time
async def test_a_finished_run_stands_still_however_late_one_looks() -> None:
    """Whoever follows it, or opens its page minutes later, sees the run, not the minutes; nobody is missed."""
    world = VirtualRun(sync_spec(tokens=3000))
    world.start_syncer()
    party = [VirtualLearner(f"l{n}", world, 0.1, f"{n:016x}").start() for n in range(2)]
    follows, early, late = (collector_of(world) for _ in range(3))
    running = asyncio.create_task(follows.run())
    await world.finish(*party)
    await early.poll()
    await asyncio.sleep(10)
    before = follows.model.snapshot()
    await asyncio.sleep(540)
    await late.poll()
    running.cancel()
    assert follows.model.snapshot()["coarse"] == before["coarse"]
    assert before["learners"]["l0"]["state"] == "left"
    assert seconds(before["coarse"], "L/l0", LearnerBits.GONE) == 0
    first, second = early.model.snapshot(), late.model.snapshot()
    assert (second["now_s"], second["coarse"]) == (first["now_s"], first["coarse"])
    assert before["sentence"]["level"] == second["sentence"]["level"] == "over"
    heard = [{name: row["heard_s"] for name, row in one["learners"].items()} for one in (first, second)]
    assert heard[0] == heard[1]


def test_the_page_has_goodput_and_the_time_of_each_learner() -> None:
    """Greatest share first, and nothing of what is nearly none; before anything is known, nothing."""
    reports = [samples.seen("l0", age_s=0.0, wall_s=80.0), samples.seen("l1", age_s=40.0, wall_s=60.0, joining_s=20.0)]
    given = samples.spec(), samples.run_state(started_unix_s=1900.0), reports, [], None, [], 2000.0, 5.0
    model = PageModel("run")
    model.see(Poll(now_s=2000.0, status=build_status("run", *given), began_s=1900.0))
    model.patch()
    told = model.snapshot()
    assert told["totals"]["goodput"] == {"since_start": pytest.approx(0.35), "recent": None}
    assert told["totals"]["badput"] == {"away": 0.2, "joining": 0.1, "died": 0.35}
    assert told["learners"]["l1"]["time"] == {"training": 0.5, "away": 0.333, "joining": 0.167}
    nothing = PageModel("run")
    nothing.see(Poll(now_s=2000.0, status=build_status("run", None, None, [], [], None, [], 2000.0)))
    nothing.patch()
    assert nothing.snapshot()["totals"]["goodput"]["since_start"] is None


@pytest.mark.parametrize("told", [False, True], ids=["nobody told of it", "an event told of it"])
@pytest.mark.parametrize("back", [False, True], ids=["for good", "and came back"])
def test_who_died_in_a_finished_run_is_told_once(back: bool, told: bool) -> None:
    """By a page that is opened after the end: 60 s before it, l1 was heard last, and its event came a little later."""
    lives = [("l0", "0", 0.5, 90.0, True), ("l1", "1", 60.0, 30.0, False)]
    lives += [("l1", "2", 0.5, 30.0, True)] if back else []
    reports = [
        samples.seen(name, age_s=1000 + age_s, incarnation=life * 8, wall_s=wall_s, left=left, step=9)
        for name, life, age_s, wall_s, left in lives
    ]
    state = samples.run_state(phase="finished", started_unix_s=900.0)
    killed = Event(name="learner_killed", who="l1", detail="", unix_s=941.0)
    model = PageModel("run")
    model.see(
        Poll(
            now_s=2000.0,
            status=build_status("run", samples.spec(), state, reports, [], None, [], 2000.0, 5.0),
            began_s=900.0,
            events=[killed] if told else [],
        )
    )
    model.patch()
    found = model.snapshot()
    marks = [(mark["who"], mark["what"], mark["at_s"]) for mark in found["marks"]]
    assert marks == ([("l1", "killed", 941.0)] if told else [("l1", "went silent", 940.0)])
    assert seconds(found["coarse"], "L/l1", LearnerBits.GONE) == pytest.approx(29.5 if back else 59.5, abs=2)
    assert seconds(found["coarse"], "L/l0", LearnerBits.GONE) == 0


# --- bounds ----------------------------------------------------------------------------------------------


def poll(now_s: float = 2000.0, reports: Any = (), **given: Any) -> Poll:
    heads = [samples.head(p, version=3) for p in range(2)]
    given_here = samples.spec(), samples.run_state(), reports, heads, None, [], now_s, 5.0, {"0": "s"}, ["0", "0"]
    return Poll(now_s=now_s, status=build_status("run", *given_here), **given)


def test_what_is_kept_is_bounded() -> None:
    """More learners, events and evaluations than anybody looks at: lanes, marks and points have an end, sums do not."""
    model = PageModel("run")
    reports = [samples.seen(f"l{n}") for n in range(MAX_LANES + 50)]
    events = [Event(name="learner_joined", who=f"l{n}", detail="x" * 500, unix_s=1500.0) for n in range(2 * MAX_MARKS)]
    points = [samples.evaluation(tokens=n, unix_s=1000.0 + n / 10) for n in range(3 * MAX_LOSSES)]
    model.see(poll(reports=reports, events=events, evaluations=points))
    model.patch()
    told = model.snapshot()
    assert len(told["learners"]) == MAX_LANES
    assert told["totals"]["learners"] == MAX_LANES + 50
    assert len(told["marks"]) == MAX_MARKS
    assert all(len(one["detail"]) <= 200 for one in told["marks"])
    assert len(told["losses"]) <= 2 * MAX_LOSSES
    assert told["losses"][-1][1] == 3 * MAX_LOSSES - 1


def test_times_that_peers_make_up_do_not_stretch_the_axis() -> None:
    """A report of years, records and events of the next century and of the last one."""
    model, now_s = PageModel("run"), 2_000_000_000.0
    merge = samples.committed(version=1, unix_s=9e10, contributions=())
    refused = samples.rejected(unix_s=9e10)
    event = Event(name="learner_joined", who="l0", detail="", unix_s=9e10)
    seen = samples.seen("l0", wall_s=MAX_SECONDS, age_s=0.1)
    model.see(poll(now_s, [seen], records=[merge, refused], events=[event], began_s=1.0))
    model.patch()
    told = model.snapshot()
    coarse = told["coarse"]
    assert coarse["step_s"] * 1200 < 900 * 86400
    assert coarse["first"] * coarse["step_s"] > now_s - 900 * 86400
    assert told["marks"][0]["at_s"] <= now_s
    assert (coarse["first"] + len(coarse["series"]["tokens"]) - 1) * coarse["step_s"] <= now_s


def test_a_refused_header_of_a_made_up_name_has_no_lane() -> None:
    """Its name is not even an id."""
    model = PageModel("run")
    strange = Rejected.of(None, (0, 1), lost_tokens=0, reason=RefusalReason.BAD_MESSAGE, detail="", unix_s=1999.0)
    named = strange.model_copy(update={"learner": "<img src=x onerror=alert(1)>"})
    model.see(poll(records=[strange, named], reports=[samples.seen("l0")]))
    model.patch()
    assert set(model.snapshot()["coarse"]["lanes"]) == {"L/l0", "F/0"}


# --- from the tape alone ---------------------------------------------------------------------------------


def test_a_page_of_a_tape_has_its_merges() -> None:
    """Of a run whose learners and server are gone: lanes from contributions, sums to the token."""

    async def main() -> None:
        world, (first, second) = await under_way(3)
        await second.kill()
        await world.until_version(8)
        records = await world.tape()
        model = model_of_tape("its-folder", records, None)
        merges = [one for one in records if isinstance(one, Committed) and one.contributions]
        assert model["totals"]["outer_steps"] == len(merges)
        assert set(model["coarse"]["lanes"]) == {"L/l0", "L/l1", "F/0", "F/1"}
        assert "of 2 learners" in model["sentence"]["text"]
        wanted = sum(part.tokens for one in merges for part in one.contributions) / 2
        assert model["totals"]["merged_tokens"] == pytest.approx(wanted, abs=1)
        await end(first, second)

    run_virtual(main())
    assert model_of_tape("empty", [], None) is None
