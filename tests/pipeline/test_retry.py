"""What has failed is tried again, after waits that double. In virtual time."""

import asyncio
from itertools import islice

import pytest

from diloco.pipeline.errors import BusError, BusUnavailable, PayloadIncomplete
from diloco.pipeline.retry import Backoff, Retries, retry
from diloco.pipeline.waiting import TICK_S
from diloco_studies.virtual.virtual_time import run_virtual

BACKOFF = Backoff(0.5, 3.0)


def test_each_wait_is_twice_the_one_before_up_to_the_longest() -> None:
    assert list(islice(BACKOFF.waits(), 5)) == [0.5, 1.0, 2.0, 3.0, 3.0]


class Calls:
    """Fails so many times, each time after a while; notes when it was tried and what was told of it."""

    def __init__(self, fails: int, lasts_s: float = 0.0, error: type[BusError] = BusUnavailable) -> None:
        self.fails, self.lasts_s, self.error = fails, lasts_s, error
        self.tried_s: list[float] = []
        self.told: list[tuple[str, float]] = []

    async def call(self) -> str:
        self.tried_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.lasts_s)
        if len(self.tried_s) <= self.fails:
            raise self.error("gone")
        return "done"

    def failed(self, error: BaseException, wait_s: float) -> None:
        self.told.append((str(error), wait_s))


def test_it_is_tried_until_it_works_and_each_failure_is_told() -> None:
    calls = Calls(3)

    async def main() -> None:
        assert await retry(calls.call, BACKOFF.waits(), BusError, calls.failed) == "done"

    run_virtual(main())
    assert calls.told == [("gone", 0.5), ("gone", 1.0), ("gone", 2.0)]
    assert calls.tried_s == pytest.approx([0.0, 0.5, 1.5, 3.5])


@pytest.mark.parametrize("lasts_s", [1.0, 4.0])
def test_the_waits_begin_anew_after_it_had_gone_well_for_longer_than_any(lasts_s: float) -> None:
    calls = Calls(3, lasts_s)
    run_virtual(retry(calls.call, BACKOFF.waits(), BusError, calls.failed))
    assert [wait_s for _, wait_s in calls.told] == ([0.5] * 3 if lasts_s > 3.0 else [0.5, 1.0, 2.0])


@pytest.mark.parametrize("error", [PayloadIncomplete, BusUnavailable])
def test_an_error_that_is_not_for_trying_again_is_raised_at_once(error: type[BusError]) -> None:
    """Also one that was not named at all."""
    calls = Calls(1, error=error)
    errors = BusError if error is PayloadIncomplete else PayloadIncomplete
    with pytest.raises(error):
        run_virtual(retry(calls.call, BACKOFF.waits(), errors, calls.failed, unless=PayloadIncomplete))
    assert len(calls.tried_s) == 1
    assert calls.told == []


def test_each_fragment_has_waits_of_its_own() -> None:
    """One that fails does not hold up another one, and is as new once it has worked."""
    retries = Retries(BACKOFF)
    assert retries.choose([], 0.0) == (None, None)
    assert retries.choose([1, 2], 0.0) == (1, None)
    retries.tried(1, False, 0.0)
    assert retries.choose([1, 2], 0.0) == (2, None)
    retries.tried(2, False, 0.25)
    assert retries.choose([1, 2], 0.25) == (None, 0.25)
    assert retries.choose([1, 2], 0.5 - TICK_S / 2) == (None, TICK_S)
    assert retries.choose([1, 2], 0.5) == (1, None)
    retries.tried(1, False, 0.5)
    assert retries.choose([1], 0.5) == (None, 1.0)
    retries.tried(1, True, 1.5)
    retries.tried(1, False, 2.0)
    assert retries.choose([1], 2.0) == (None, 0.5)
