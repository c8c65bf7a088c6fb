"""What a simulated world takes for a window that closed too late."""

from typing import cast

import pytest

from chaos.link import Link
from chaos.surviving import Surviving
from chaos.windows import SETTLE_S, Windows

from . import samples


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


@pytest.mark.parametrize("joins_later", [False, True])
def test_whoever_joins_once_all_are_in_is_waited_for(joins_later: bool) -> None:
    """Where all are in, the owner may not wait; for one that joins meanwhile it may, for as long as the grace is."""
    at, owner = At(), cast(Link, Steady())
    sync = samples.sync_spec(fragments=1, quorum=2)
    windows = Windows(sync, 1, slowest_step_s=0.1, latency_s=0.001, now=at)
    headers = [samples.header(name, base_version=1, base_digest=b"b" * 16) for name in ("l0", "l1")]
    state = Surviving(version=1, digests={1: b"b" * 16}, pending=dict(zip("ab", headers, strict=True)), due={b"b" * 16})
    for header in headers:
        windows.joined(header.learner)
    windows.read(owner, 0)
    windows.changed(0, state)
    at.now_s = 1.0
    if joins_later:
        windows.joined("l2")
    at.now_s = SETTLE_S
    found = windows.closed(owner, 0)
    assert (found is None) == joins_later
