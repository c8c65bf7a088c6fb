"""A rank that is killed while its learner joins, or takes the run's model at the end: for real, over gloo."""

from pathlib import Path

import pytest

from tests.ranks.party import Party

pytestmark = [pytest.mark.redis, pytest.mark.slow]
RANKS = "diloco.workers.ranks."
NOT_CONNECTED = "they meet", "it is to call the others", "it is to be called"
WHILE_JOINING = {
    "they meet": (1, f"{RANKS}topology gather_messages 3"),
    "it is to call the others": (1, f"{RANKS}topology call_lower_ranks 1"),
    "it is to be called": (1, f"{RANKS}topology accept_calls 1"),
    "it connects to Redis": (1, "diloco.workers.exchange.redis_access reach 1"),
    "it uploads version 0": (1, f"{RANKS}gather Transfers._upload_initial 1"),
    "rank 0 looks for moments": (0, f"{RANKS}rank_exchange Rank._recover 1"),
    "it enters": (2, f"{RANKS}rank_exchange Rank._enter 1"),
}


def dies(party: Party, rank: int, where: str, named: bool) -> None:
    """Start a trio with a rank that is killed there; the others end by themselves, and say why.

    named: they are connected to each other, so all of them name it, and so does the bus.
    """
    events = len(party.events())
    before = {other: len(party.said(f"trio-{other}", "")) for other in range(3)}
    trio = party.learner("fsdp", "trio", 3, TEST_DIES=f"{rank} {where}", TEST_STATE="1")
    party.until(lambda: trio[rank].poll() is not None)
    assert party.said(f"trio-{rank}", "dies"), party.shown()
    statuses = party.ended(*trio)
    assert all(statuses), party.shown()
    for other in {0, 1, 2} - {rank}:
        assert statuses[other] > 0, f"rank {other} has crashed, by {statuses[other]}\n{party.shown()}"
        said = "\n".join(party.said(f"trio-{other}", "")[before[other] :])
        assert "RankGone: " in said or "rank_gone" in said, party.shown()
        assert not named or f"rank {rank} of this learner has ended" in said, party.shown()
    broken = [one.detail for one in party.events()[events:] if one.name == "learner_broken"]
    assert [why.split(",")[0] for why in broken] == [f"rank {rank} of this learner has ended"] * named, party.shown()


def test_a_rank_that_is_killed_apart_from_training_ends_its_learner_at_once(tmp_path: Path) -> None:
    """Wherever it dies as all join, and in `load_globals`; ranks that are started again end on the heads."""
    with Party(tmp_path, sync_interval=6, fragments=4, tokens=6000) as party:
        for when, (rank, where) in WHILE_JOINING.items():
            dies(party, rank, where, when not in NOT_CONNECTED)
        assert not party.said("syncer", "fragment_merged"), party.shown()
        dies(party, 1, f"{RANKS}topology RankGroup.broadcast 2", named=False)
        assert all(party.said(f"trio-{rank}", "left True") for rank in range(3)), party.shown()
        assert party.ended(*party.learner("fsdp", "trio", 3, TEST_STATE="1")) == [0] * 3, party.shown()
        assert all(party.said(f"trio-{rank}", "alike True") for rank in range(3)), party.shown()
