"""A learner of ranks and a plain one, whose Redis fails under them: for real, over gloo."""

import signal
import time
from pathlib import Path

import pytest

from tests.ranks.party import Party
from tests.ranks.test_rank_processes import same

pytestmark = [pytest.mark.redis, pytest.mark.slow]
PAUSED_S = 20.0
"""Longer than any call of the bus waits for its answer."""
LOGS = "trio-0", "solo-0"


def trained_on(party: Party, tens: int = 3) -> None:
    """Until both learners have made so many tens of steps more."""
    seen = {log: len(party.said(log, "step ")) for log in LOGS}
    party.until(lambda: all(len(party.said(log, "step ")) >= seen[log] + tens for log in LOGS))


def merged(party: Party) -> int:
    """Merges with something of the trio."""
    return sum('"trio"' in line for line in party.said("syncer", "fragment_merged"))


def offered_again(party: Party, times: int) -> None:
    """Until both learners offer all again for so many times, and the ranks' deltas are merged after that."""
    party.until(lambda: all(len(party.said(log, "offers again")) >= times for log in LOGS))
    before = merged(party)
    party.until(lambda: merged(party) > before)


def test_ranks_go_on_while_their_redis_is_gone_or_silent(tmp_path: Path) -> None:
    """Killed and started again with its data, then stopped for 20 s: both learners train on, offer again what may be
    lost, are merged as before, and end on the same heads.
    """
    with Party(tmp_path, sync_interval=6, fragments=4, tokens=120_000, codec="int8") as party:
        ranks = [*party.learner("plain", "solo"), *party.learner("fsdp", "trio", 3)]
        party.until(lambda: party.said("trio-0", "step 20") and party.said("solo-0", "step 20"))
        party.redis.kill()
        trained_on(party)
        party.redis.start()
        offered_again(party, 1)
        party.redis.send(signal.SIGSTOP)
        until = time.monotonic() + PAUSED_S
        trained_on(party)
        party.until(lambda: time.monotonic() > until)
        party.redis.send(signal.SIGCONT)
        offered_again(party, 2)
        assert all(rank.poll() is None for rank in ranks), party.shown()
        assert party.ended(*ranks) == [0] * 4, party.shown()
        for log in ("solo-0", "trio-0", "trio-1", "trio-2"):
            assert party.said(log, "left True"), party.shown()
            assert party.said(log, "alike True"), party.shown()
        assert same(tmp_path, "solo", "trio")
