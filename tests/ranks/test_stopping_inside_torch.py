"""Ranks that are asked to end while they wait inside torch for one that is paused: for real, over gloo."""

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco.workers.ranks.shutdown import HANG_S, SECOND_SIGNAL_S
from tests.ranks.party import Party

pytestmark = [pytest.mark.redis, pytest.mark.slow]
Pair = list[subprocess.Popen[bytes]]


@contextmanager
def paused(party: Party, kind: str) -> Iterator[Pair]:
    """A learner of two ranks of which the second is paused, so that the first waits for it inside torch."""
    pair = party.learner(kind, "duo", 2)
    party.until(lambda: party.said("duo-0", "step 20"))
    pair[1].send_signal(signal.SIGSTOP)
    time.sleep(3)
    steps = len(party.said("duo-0", "step "))
    time.sleep(2)
    assert len(party.said("duo-0", "step ")) == steps, "it does not wait"
    yield pair


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_rank_that_is_asked_to_end_inside_torch_ends_in_bounded_time(tmp_path: Path, kind: str) -> None:
    """It says where it waits and who does not answer; so does the bus, and the other rank, once it goes on."""
    with Party(tmp_path, sync_interval=6, fragments=4, tokens=10**9) as party, paused(party, kind) as pair:
        pair[0].terminate()
        began = time.monotonic()
        assert party.ended(pair[0]) == [AGAIN_STATUS], party.shown()
        assert time.monotonic() - began > 0.9 * HANG_S, "it is given the time of a step"
        (ended,) = party.said("duo-0", "rank_ended")
        assert "SIGTERM was received, and 10 s later its main thread is still waiting in " in ended
        assert "rank.py:" in ended
        assert "rank 1 is not answering (it is paused, or its machine is unreachable)" in ended
        ((who, why),) = [(one.who, one.detail) for one in party.events() if one.name == "learner_broken"]
        assert who == "duo"
        assert "rank 0 of this learner was asked to stop: SIGTERM was received" in why
        pair[1].send_signal(signal.SIGCONT)
        assert all(party.ended(pair[1])), party.shown()
        (gone,) = party.said("duo-1", "rank_gone")
        assert "rank 0 of this learner was asked to stop: SIGTERM was received" in gone


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, AGAIN_STATUS), (signal.SIGINT, 128 + signal.SIGINT)])
def test_a_second_signal_ends_a_rank_inside_torch_at_once(tmp_path: Path, number: int, status: int) -> None:
    """Within seconds, and it says why."""
    with Party(tmp_path, sync_interval=6, fragments=4, tokens=10**9) as party, paused(party, "ddp") as pair:
        pair[0].send_signal(number)
        time.sleep(1)
        pair[0].send_signal(number)
        assert party.ended(pair[0]) == [status], party.shown()
        (ended,) = party.said("duo-0", "rank_ended")
        assert f"{signal.Signals(number).name} was received again, and {SECOND_SIGNAL_S:g} s later" in ended


def test_a_rank_that_is_asked_to_end_while_it_meets_the_others_ends(tmp_path: Path) -> None:
    """One of them is paused before it has made its Learner: torch would wait for it for an hour."""
    with Party(tmp_path, sync_interval=6, fragments=4, tokens=10**9) as party:
        pair = party.learner("ddp", "duo", 2, TEST_STOPS="1 diloco.workers.ranks.topology gather_messages 1")
        party.until(lambda: party.said("duo-1", "stops"))
        time.sleep(1)
        pair[0].terminate()
        assert party.ended(pair[0]) == [AGAIN_STATUS], party.shown()
        (ended,) = party.said("duo-0", "rank_ended")
        assert "in gather_messages (topology.py:" in ended


def test_a_rank_whose_loop_goes_on_leaves_in_order_though_a_step_takes_long(tmp_path: Path) -> None:
    """A step in Python, however long: whoever comes back is not ended."""
    with Party(tmp_path, sync_interval=6, fragments=4, tokens=10**9) as party:
        pair = party.learner("ddp", "duo", 2, TEST_STEP_S="14")
        party.until(lambda: party.said("duo-0", "joined "))
        pair[1].terminate()
        assert party.ended(*pair) == [0, 0], party.shown()
        assert all(party.said(f"duo-{rank}", "left True") for rank in range(2)), party.shown()
