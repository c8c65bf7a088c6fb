"""What a simulated world takes for a window that closed too late."""

from dataclasses import replace
from typing import cast

import pytest

from diloco.pipeline.messages.fragment import IDLE_VIEW
from tests import samples
from tests.world.link import Link
from tests.world.surviving import Surviving
from tests.world.windows import SETTLE_S, Windows


class Steady:
    """An owner's link that nothing holds up."""

    late = False

    def held_up_s(self, since_s: float) -> float:
        """Never."""
        return 0.0


class At:
    """A clock that is set by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now_s


def watched(at: At, uploaded: bool = True) -> Windows:
    """Those of a run of one fragment and a quorum of two."""
    sync = samples.sync_spec(fragments=1, quorum=2)
    return Windows(sync, 1, slowest_step_s=0.1, latency_s=0.001, now=at, uploaded=lambda _: uploaded)


def both_in(windows: Windows) -> Surviving:
    """A due delta of each of two learners comes."""
    headers = [samples.header(name, base_version=1, base_digest=b"b" * 16) for name in ("l0", "l1")]
    pending = dict(zip("ab", headers, strict=True))
    for header in headers:
        windows.joined(header.learner)
    state = replace(Surviving.none(1), version=1, digests={1: b"b" * 16}, pending=pending, due={(1, b"b" * 16)})
    windows.changed(0, state)
    return state


@pytest.mark.parametrize("joins_later", [False, True])
def test_whoever_joins_once_all_are_in_is_waited_for(joins_later: bool) -> None:
    """Where all are in, the owner may not wait; for one that joins meanwhile it may, for as long as the grace is."""
    at, owner = At(), cast(Link, Steady())
    windows = watched(at)
    windows.read(owner, 0, False)
    both_in(windows)
    at.now_s = 1.0
    if joins_later:
        windows.joined("l2")
    at.now_s = SETTLE_S
    found = windows.closed(owner, 0)
    assert (found is None) == joins_later


def test_what_another_that_believes_to_own_it_reads_opens_no_window_again() -> None:
    """Of two holders one reads the stream from its start; the other had closed its window in time and merges later."""
    at, owner, other = At(), cast(Link, Steady()), cast(Link, Steady())
    windows = watched(at)
    windows.read(owner, 0, False)
    both_in(windows)
    assert windows.closed(owner, 0) is None
    windows.read(other, 0, False)
    at.now_s = SETTLE_S
    assert windows.closed(owner, 0) is None
    assert windows.closed(other, 0) is not None


@pytest.mark.parametrize("here", [False, True])
def test_a_suspected_learner_is_in_once_its_payload_is_on_the_bus(here: bool) -> None:
    """Until then the window lacks a quorum, however long its header has been there."""
    at, owner = At(), cast(Link, Steady())
    windows = watched(at, here)
    windows.read(owner, 0, False)
    state = both_in(windows)
    suspecting = IDLE_VIEW.model_copy(update={"state": "collecting", "suspected": ("l1",)})
    assert windows.shown(owner, 0, suspecting, state) is None
    at.now_s = SETTLE_S
    assert (windows.closed(owner, 0) is None) != here


@pytest.mark.parametrize("open_again", ["collecting", "grace"])
@pytest.mark.parametrize("found_closed", [False, True])
def test_who_reads_anew_and_finds_a_window_closed_need_not_say_so_again(found_closed: bool, open_again: str) -> None:
    """What is shown of it much later, for another reason, closed nothing. Open again, it must close in time."""
    at, owner = At(), cast(Link, Steady())
    windows = watched(at)
    windows.read(owner, 0, found_closed)
    state = both_in(windows)
    at.now_s = SETTLE_S
    uploading, opened = (IDLE_VIEW.model_copy(update={"state": one}) for one in ("uploading", open_again))
    assert (windows.shown(owner, 0, uploading, state) is None) == found_closed
    assert windows.shown(owner, 0, opened, state) is None
    at.now_s = 3 * SETTLE_S
    assert windows.shown(owner, 0, uploading, state) is not None
