"""What the simulated world's onlooker takes for the base of a delta: a version and its values, not the values alone."""

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from diloco.pipeline.bus.commits import Refusal
from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import IDLE_VIEW, DeltaHeader, RefusalReason, Rejected
from diloco_studies.virtual.virtual_time import VirtualClock, in_virtual_time
from tests import samples
from tests.world import reference
from tests.world.link import Link
from tests.world.oracle import REPORTED_S, Oracle
from tests.world.plan import plan
from tests.world.record import WorldBus, WorldStore
from tests.world.surviving import Surviving

LOST = 4
"""A version that is lost. Its values are version 0 now: a learner that had adopted them uploaded them."""
NONCE = "ab" * 8
BROKEN = "a window opens for a due delta on the current base"


class Owner:
    """The link of fragment 0's owner, and of whoever offers it a delta; the bus takes all that it is told to do."""

    late = beside = False
    sent_s = 0.0
    party = "syncer-0"

    def __init__(self) -> None:
        self.clock, self.store, given = VirtualClock(), WorldStore(), plan(0)
        self.bus = WorldBus("run", self.clock, self.store)
        self.bus.keys = RunKeys("run", 1)
        self.sync = given.spec.sync
        self.oracle = Oracle(given, layout_of(given.spec.tensors), self.store, self.bus.keys, self.clock.now)
        self.digest = b""

    async def begins(self) -> "Owner":
        """Version 0 is there."""
        self.digest = await samples.commit(self.bus, 0, 0, np.zeros(4, np.float32), nonce=NONCE)
        state = self.oracle.fragments[0]
        state.version, state.digests = 0, {0: self.digest}
        return self

    async def offered(self, learner: str, version: int) -> tuple[str, DeltaHeader]:
        """A due delta on a version with these values comes."""
        steps = reference.interval(self.sync, version)
        header = samples.header(learner, base_version=version, base_digest=self.digest, steps=steps)
        entry = await self.bus.offer(header)
        self._saw("offer", entry, header)
        return entry, header

    async def refuses(self, entry: str, header: DeltaHeader) -> None:
        """Its base is unknown."""
        why = {"lost_tokens": header.tokens, "reason": RefusalReason.UNKNOWN_BASE, "detail": ""}
        record = Rejected.of(header, (0, 0), **why, unix_s=self.clock.unix())
        refusal = Refusal(NONCE, (0, self.digest), (entry,), (), (record,))
        self._saw("refuse", await self.bus.refuse(0, refusal), 0, refusal)

    def opens(self) -> str | None:
        """The window at version 0; returns which promise was broken by then."""
        window = IDLE_VIEW.model_copy(update={"state": "collecting"})
        self._saw("write_window", None, 0, NONCE, (0, self.digest), window, None)
        return self.oracle.violation and self.oracle.violation.promise

    def _saw(self, method: str, outcome: Any, *args: Any) -> None:
        self.oracle.observe(cast(Link, self), method, args, outcome)


@in_virtual_time
async def test_a_window_stays_due_while_deltas_on_a_lost_version_of_the_same_values_are_refused() -> None:
    """They are on the stream still when the first delta on version 0 comes, and are refused one after the other."""
    owner = await Owner().begins()
    lost = await owner.offered("learner-2", LOST)
    await owner.offered("learner-1", 0)
    await owner.refuses(*lost)
    assert owner.opens() is None


@in_virtual_time
async def test_a_due_delta_on_a_lost_version_of_the_same_values_opens_no_window() -> None:
    """It cannot be merged into version 0: nobody there is due yet."""
    owner = await Owner().begins()
    await owner.offered("learner-2", LOST)
    assert owner.opens() == BROKEN


def test_a_refused_delta_leaves_another_ones_window_due() -> None:
    """Where a merge after a rewind makes the refused delta's base anew, a pending delta on that base opens it."""
    state = Surviving.none(4)
    state.version, state.digests = 3, {3: bytes(16)}
    header = samples.header("learner-1", base_version=3, base_digest=bytes(16), due=True)
    state.due.add((3, bytes(16)))
    state.pending["entry"] = header
    state.forget_due((3, bytes(16)))
    assert state.may_open
    state.pending["entry"] = header.model_copy(update={"due": False})
    state.forget_due((3, bytes(16)))
    assert not state.may_open


@pytest.mark.parametrize(("seconds", "broken"), [(REPORTED_S - 0.1, None), (REPORTED_S + 0.1, BROKEN)])
@in_virtual_time
async def test_an_owner_that_may_have_noticed_nothing_of_a_loss_is_excused_for_a_while_and_no_longer(
    seconds: float, broken: str | None
) -> None:
    """Its window is for a due delta that was lost with the bus, and it has not read the stream since."""
    owner = await Owner().begins()
    before = owner.oracle.snapshot()
    saved = owner.store.snapshot()
    await owner.offered("learner-1", 0)
    owner.store.restart(saved)
    owner.oracle.rewind(before)
    await asyncio.sleep(seconds)
    owner.sent_s = owner.clock.now()
    assert owner.opens() == broken


def test_an_attempt_is_outdone_by_a_later_one_on_its_base_only() -> None:
    """Not by the many that were made on a lost version of the same values."""
    first, later = (samples.header("learner-1", attempt=attempt) for attempt in (1, 2))
    lost = samples.header("learner-1", base_version=LOST, attempt=17)
    assert lost.base_digest == first.base_digest
    state = Surviving.none(1)
    state.pending = {"a": first, "b": lost}
    assert not state.is_outdone(first)
    state.pending["c"] = later
    assert state.is_outdone(first)
