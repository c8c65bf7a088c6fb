"""Learners of one and several ranks in one run, as processes over gloo."""

import io
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from diloco.pipeline.payload.codec import as_bytes, payload_digest
from diloco.pipeline.settings import CHUNK_BYTES
from diloco.workers.moments.state_folder import STATE_FILE, read_state
from diloco.workers.ranks.rank_folder import RANDOM_FILE
from tests.ranks.party import Party

pytestmark = [pytest.mark.redis, pytest.mark.slow]


def same(folder: Path, *names: str) -> bool:
    """All learners have the same model, bit for bit."""
    first, *others = (torch.load(folder / f"{name}.pt") for name in names)
    return all(one.keys() == first.keys() and all(torch.equal(one[k], first[k]) for k in first) for one in others)


def check_rows(folder: Path, party: Party, name: str, ranks: int, halves: bool) -> int:
    """What a learner's ranks were given of each global has the digest of its head; how many there were."""
    versions = set()
    for rank in range(ranks):
        for line in party.said(f"{name}-{rank}", "pulled "):
            p, number, version, digest, shown = line.split()[1:]
            rows = [np.load(folder / f"{name}-{r}-{p}-{number}.npz") for r in range(ranks)]
            flat = np.full(max(int(one["pieces"][:, [0, 2]].sum(1).max(initial=0)) for one in rows), np.nan, np.float32)
            for one in rows:
                for start, at, elements in one["pieces"]:
                    there, here = flat[start : start + elements], one["own"][at : at + elements]
                    assert np.isnan(there).all() or np.array_equal(there, here), "replicas differ"
                    there[:] = here
            data = (flat.view(np.uint32) >> 16).astype(np.uint16) if halves else flat
            assert payload_digest(as_bytes(data), CHUNK_BYTES).hex() == (shown if halves else digest), line
            versions.add((p, version))
    return len(versions)


@pytest.mark.parametrize("codecs", [("fp32", "fp32"), ("bf16", "bf16"), ("int8", "bf16")])
def test_each_ranks_rows_have_the_heads_digests(tmp_path: Path, codecs: tuple[str, str]) -> None:
    """Whatever deltas and globals travel in, of DDP and FSDP2, with an empty shard; each fragment has one server.

    A bias of 2 over three ranks, a vocabulary of 257.
    """
    given = {"codec": codecs[0], "global_codec": codecs[1], "sync_interval": 6, "fragments": 5}
    with Party(tmp_path, tokens=12_000, **given) as party:
        counts = {"duo": ("ddp", 2), "trio": ("fsdp", 3)}
        learners = [party.learner(kind, name, ranks, TEST_KEEP="1") for name, (kind, ranks) in counts.items()]
        assert party.ended(*(rank for one in learners for rank in one)) == [0] * 5, party.shown()
        for name, (_, ranks) in counts.items():
            assert all(party.said(f"{name}-{rank}", "alike True") for rank in range(ranks)), party.shown()
            served = [{line.split()[1] for line in party.said(f"{name}-{r}", "pulled ")} for r in range(ranks)]
            assert sorted(p for one in served for p in one) == list("01234"), "a fragment has more than one server"
            assert check_rows(tmp_path, party, name, ranks, codecs[1] == "bf16") > 5
        assert same(tmp_path, "duo", "trio")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_learners_of_one_two_and_three_ranks_end_alike(tmp_path: Path, dtype: str) -> None:
    """Plain, DDP and FSDP2, of a model that no number of ranks divides: all end with the run's model, bit for bit."""
    with Party(tmp_path, sync_interval=8, fragments=4, tokens=40_000) as party:
        learners = [party.learner(*one, TEST_DTYPE=dtype) for one in [("plain", "solo", 1), ("ddp", "duo", 2)]]
        learners.append(party.learner("fsdp", "trio", 3, TEST_DTYPE=dtype))
        ranks = [rank for learner in learners for rank in learner]
        assert party.ended(*ranks) == [0] * 6, party.shown()
        assert same(tmp_path, "solo", "duo", "trio")
        for log in ("solo-0", "duo-0", "duo-1", "trio-0", "trio-1", "trio-2"):
            assert party.said(log, "left True"), party.shown()
            assert party.said(log, "alike True"), party.shown()
        steps = {party.said(f"trio-{rank}", "left True")[0].split()[2] for rank in range(3)}
        assert len(steps) == 1, "ranks of one learner leave after the same step"


def test_layers_divided_between_ranks_end_like_whole_ones(tmp_path: Path) -> None:
    """Plain, tensor parallelism of 2, and FSDP2 over it: all end with the run's model, bit for bit; tokens count once.

    Columns of an embedding and of a matrix, rows of one, an uneven head, a bias of 2 whose shards are of one row, and
    layers that stay whole.
    """
    with Party(tmp_path, sync_interval=8, fragments=4, tokens=40_000) as party:
        kinds = ("plain", "solo", 1), ("tp", "pair", 2), ("fsdp-tp", "quad", 4)
        learners = {name: party.learner(kind, name, ranks) for kind, name, ranks in kinds}
        assert party.ended(*(rank for ranks in learners.values() for rank in ranks)) == [0] * 7, party.shown()
        assert same(tmp_path, *learners)
        steps = {}
        for name, ranks in learners.items():
            said = [party.said(f"{name}-{rank}", "left True")[0].split()[2] for rank in range(len(ranks))]
            assert all(party.said(f"{name}-{rank}", "alike True") for rank in range(len(ranks))), party.shown()
            assert len(set(said)) == 1, "ranks of one learner leave after the same step"
            steps[name] = int(said[0])
        tokens = {report.learner: report.tokens for report in party.reports()}
        each = {"solo": 4 * 8, "pair": 4 * 8, "quad": 4 * (8 + 16)}
        assert tokens == {name: steps[name] * each[name] for name in steps}


def test_a_killed_rank_takes_its_learner_down_and_nobody_else(tmp_path: Path) -> None:
    """The others of its learner say that it is gone and end with an error; the other learner trains on.

    Started again with another number of ranks, under its own name, the learner takes part again.
    """
    with Party(tmp_path, sync_interval=8, fragments=4, tokens=10**9) as party:
        (solo,) = party.learner("plain", "solo")
        trio = party.learner("fsdp", "trio", 3)
        party.until(lambda: party.said("trio-0", "step 30") and party.said("solo-0", "step 30"))
        trio[1].kill()
        began = time.monotonic()
        statuses = party.ended(*trio)
        print(f"the others have ended after {time.monotonic() - began:.1f} s with {statuses}")
        assert all(statuses), party.shown()
        for rank in (0, 2):
            (gone,) = party.said(f"trio-{rank}", "rank_gone")
            assert "rank 1 of this learner has ended, so the learner ends too" in gone, party.shown()
            assert not party.said(f"trio-{rank}", "left"), party.shown()
        ((who, why),) = [(one.who, one.detail) for one in party.events() if one.name == "learner_broken"]
        assert (who, why.split(",")[0]) == ("trio", "rank 1 of this learner has ended")
        assert solo.poll() is None
        seen = len(party.said("solo-0", "step"))
        again = party.learner("fsdp", "trio", 2)
        party.until(lambda: len(party.said("trio-0", "joined ")) == 2 and len(party.said("solo-0", "step")) > seen + 2)
        assert all(rank.poll() is None for rank in (solo, *again)), party.shown()


def lives(party: Party, *kinds: tuple[str, int]) -> Iterator[int]:
    """One learner's, of these kinds and ranks: each goes on with the moments of the one before. Once it has left."""
    party.learner("plain", "solo")
    earlier = 0
    for life, (kind, ranks) in enumerate(kinds):
        learner = party.learner(kind, "them", ranks, TEST_STATE="1")
        party.until(lambda: len(party.said("them-0", "joined ")) > life)  # noqa: B023  # called here
        source, steps = party.said("them-0", "joined ")[-1].split()[1:3]
        assert (source == "checkpoint" and int(steps) > earlier) == (life > 0), (life, source, steps, earlier)
        earlier = int(steps)
        stepped = len(party.said("them-0", "step "))
        party.until(lambda: len(party.said("them-0", "step ")) > stepped + 2)  # noqa: B023
        for rank in learner:
            rank.terminate()
        assert party.ended(*learner) == [0] * ranks, party.shown()
        yield life


def test_all_ranks_load_the_same_versions_of_a_run_that_goes_on(tmp_path: Path) -> None:
    """Though they ask one after the other, while another learner trains; then they make a learner again, in place."""
    with Party(tmp_path, sync_interval=4, fragments=4, tokens=10**9) as party:
        party.learner("plain", "solo")
        trio = party.learner("fsdp", "trio", 3, TEST_GO="1")
        party.until(lambda: party.said("trio-0", "step 20") and party.said("solo-0", "step 20"))
        trio[1].terminate()
        for rank in range(3):
            seen = len(party.said("solo-0", "step "))
            party.until(lambda: len(party.said("solo-0", "step ")) > seen + 3)  # noqa: B023  # called here
            (tmp_path / f"go-{rank}").touch()
        assert party.ended(*trio) == [0] * 3, party.shown()
        first, *others = ([party.said(f"trio-{rank}", what) for what in ("took", "alike True")] for rank in range(3))
        assert [len(lines) for lines in first] == [4, 1], party.shown()
        assert others == [first, first], party.shown()
        assert all(party.said(f"trio-{rank}", "again") for rank in range(3)), party.shown()


def test_moments_come_back_for_other_ranks_and_kinds(tmp_path: Path) -> None:
    """FSDP2 of 3, one process, FSDP2 over tensor parallelism, that alone, DDP: each with those of the one before."""
    with Party(tmp_path, sync_interval=8, fragments=4, tokens=10**9) as party:
        for life in lives(party, ("fsdp", 3), ("plain", 1), ("fsdp-tp", 4), ("tp", 2), ("ddp", 2)):
            assert len(party.said("them-0", "state_resharded")) == life, party.shown()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_each_rank_of_a_killed_learner_reads_on_where_it_saved(tmp_path: Path, kind: str) -> None:
    """Even a replica that saves no moments; rank 1 reads two rows a step."""

    def saved(rank: int) -> int:
        files = [tmp_path / f"state-pair/rank-{rank}-of-2" / name for name in (STATE_FILE, RANDOM_FILE)]
        states = [read_state(file).objects["data"] for file in files if file.exists()]
        return torch.load(io.BytesIO(states[0]), weights_only=True)["read"] if states else 0

    with Party(tmp_path, sync_interval=8, fragments=4, tokens=10**9) as party:
        pair = party.learner(kind, "pair", 2, TEST_STATE="1")
        party.until(lambda: saved(0) > 20 and saved(1) > 40)
        for process in pair:
            process.kill()
        party.ended(*pair)
        positions = [saved(rank) for rank in range(2)]
        print(kind, positions)
        party.learner(kind, "pair", 2, TEST_STATE="1")
        party.until(lambda: all(len(party.said(f"pair-{rank}", "joined ")) == 2 for rank in range(2)))
        read = [int(party.said(f"pair-{rank}", "joined ")[-1].split()[3]) for rank in range(2)]
        assert read == positions
        assert positions[1] % 2 == 0


def test_replicated_shards_end_on_the_heads(tmp_path: Path) -> None:
    """HSDP of 2 x 2 ranks: both replicas of each shard have the run's values at the end."""
    with Party(tmp_path, sync_interval=8, fragments=4, tokens=10_000) as party:
        assert party.ended(*party.learner("hsdp", "quad", 4)) == [0] * 4, party.shown()
        assert all(party.said(f"quad-{rank}", "alike True") for rank in range(4)), party.shown()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_each_rank_carries_its_share_of_the_bytes(tmp_path: Path, kind: str) -> None:
    """Of six fragments of equal size each of three ranks serves two: sent and read, within 5 % of a third."""
    with Party(tmp_path, sync_interval=6, fragments=6, tokens=150_000, first_interval=0) as party:
        ranks = party.learner(kind, "trio", 3, TEST_EVEN="1", TEST_STEP_S="0.005")
        assert party.ended(*ranks) == [0] * 3, party.shown()
        said = [party.said(f"trio-{rank}", "left True")[0].split() for rank in range(3)]
        for column in (3, 4):
            carried = [int(words[column]) for words in said]
            print(kind, ("sent", "read")[column - 3], carried)
            assert max(carried) / (sum(carried) / 3) <= 1.05, carried
