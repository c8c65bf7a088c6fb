"""What happened when, in buckets: bounded, and a page that follows patches has what a new one gets."""

import random
from base64 import b64decode
from typing import Any

import pytest

from diloco.pipeline.view.page.timeline import Timeline


class Follower:
    """What the page does with patches (`model.js`)."""

    def __init__(self) -> None:
        self.step_s, self.first = 0.0, 0
        self.lanes: dict[str, list[int]] = {}
        self.series: dict[str, list[float | None]] = {}

    def take(self, patch: dict[str, Any]) -> None:
        if whole := patch.get("whole"):
            self.step_s, self.first = whole["step_s"], whole["first"]
            self.lanes = {name: list(b64decode(cells)) for name, cells in whole["lanes"].items()}
            self.series = {name: list(values) for name, values in whole["series"].items()}
            return
        gone = patch["first"] - self.first
        self.first += gone
        for kept, empty in ((self.lanes, 0), (self.series, None)):
            kind = "lanes" if kept is self.lanes else "series"
            for values in kept.values():
                del values[:gone]
            for name, (number, new) in patch[kind].items():
                values, at = kept.setdefault(name, []), number - self.first
                values.extend([empty] * (at + len(new) - len(values)))
                values[at : at + len(new)] = new


def has(times: Timeline) -> tuple[Any, ...]:
    lanes = {name: list(cells) for name, cells in times.lanes.items()}
    return times.step_s, times.first, lanes, times.series


def marks(times: Timeline, lane: str) -> list[tuple[float, int]]:
    cells = times.lanes[lane]
    return [((times.first + at) * times.step_s, bits) for at, bits in enumerate(cells) if bits]


def test_a_span_sets_bits_in_all_its_buckets_and_takes_others_away() -> None:
    """Both ends belong to it; what was there before and is not cleared stays."""
    times = Timeline(100.0, 1.0, sliding=False)
    times.mark("a", 101.2, 103.9, 1)
    times.mark("a", 102.0, 102.5, 4, clear=1)
    assert marks(times, "a") == [(101.0, 1), (102.0, 4), (103.0, 1)]


def test_nothing_is_drawn_before_the_beginning() -> None:
    """A span that began earlier is drawn from the beginning on; a number of an earlier time is left out."""
    times = Timeline(100.0, 1.0, sliding=False)
    times.mark("a", 10.0, 101.0, 1)
    times.mark("b", 10.0, 20.0, 1)
    times.put("tokens", 99.0, 5.0)
    assert marks(times, "a") == [(100.0, 1), (101.0, 1)]
    assert (times.lanes.get("b"), times.series) == (None, {})


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_what_is_no_number_is_left_out(value: float | None) -> None:
    times = Timeline(100.0, 1.0, sliding=False)
    times.put("loss", 100.0, value)
    assert times.series == {}


@pytest.mark.parametrize("begin_s", [100.0, 101.0])
def test_the_whole_run_keeps_everything_in_ever_longer_buckets(begin_s: float) -> None:
    """Bits of two buckets are those of the one; of two numbers the later one stays. Memory is bounded."""
    times = Timeline(begin_s, 1.0, sliding=False, max_buckets=8)
    for at_s in (begin_s + second for second in range(64)):
        times.mark("all", at_s, at_s, 1 << int(at_s) % 2)
        times.mark(f"{at_s}", at_s, at_s, 4)
        times.put("all", at_s, at_s)
        times.put(f"{at_s}", at_s, at_s)
    assert times.step_s == 16.0
    assert {bits for _, bits in marks(times, "all")[1:-1]} == {3}
    assert times.series["all"][-1] == at_s
    assert len(times.lanes["all"]) <= 8
    for at_s in (begin_s + second for second in range(64)):
        assert marks(times, f"{at_s}") == [(at_s // 16 * 16, 4)]
        assert times.series[f"{at_s}"][int(at_s // 16) - times.first :] == [at_s]


def test_a_sliding_one_keeps_the_last_buckets_as_fine_as_they_were() -> None:
    """A gap of a second is seen in a run of days."""
    times = Timeline(0.0, 0.5, sliding=True, max_buckets=100)
    times.mark("a", 0.0, 0.0, 1)
    times.mark("a", 864_000.0, 864_000.5, 16)
    assert times.step_s == 0.5
    assert marks(times, "a") == [(864_000.0, 16), (864_000.5, 16)]
    assert len(times.lanes["a"]) <= 100


@pytest.mark.parametrize("sliding", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_who_follows_patches_has_what_a_snapshot_has(sliding: bool, seed: int) -> None:
    """However writes, slides and doublings come between two patches."""
    chance = random.Random(seed)
    times, follower, now_s = Timeline(1000.0, 1.0, sliding, max_buckets=20), Follower(), 1000.0
    for _ in range(60):
        now_s += chance.choice([0.0, 0.3, 1.0, 7.0, 40.0])
        begin_s = now_s - chance.uniform(0, 12)
        times.mark(chance.choice("abc"), begin_s, now_s, chance.choice([1, 2, 16]), clear=chance.choice([0, 16]))
        times.put(chance.choice("xy"), now_s, chance.random())
        if chance.random() < 0.5:
            follower.take(times.patch())
    follower.take(times.patch())
    step_s, first, lanes, series = has(times)
    assert (follower.step_s, follower.first) == (step_s, first)
    for kept, wanted in ((follower.lanes, lanes), (follower.series, series)):
        for name, values in wanted.items():
            assert kept[name][: len(values)] == values
            assert not any(kept[name][len(values) :])
