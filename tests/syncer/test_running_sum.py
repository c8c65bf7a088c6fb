"""Contributions summed as they complete: the same bits as all at once, in the order that the tape tells."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import Committed
from diloco.pipeline.messages.spec import SyncSpec
from diloco.pipeline.messages.wire import Codec
from diloco.pipeline.payload.codec import TRAITS
from diloco.syncer import algorithm
from diloco.syncer.admission import Offer
from diloco.syncer.committing import RunningSum
from diloco.syncer.merging.fragment import Delta, FragmentState
from diloco.syncer.merging.merge import BLOCK, MAX_SHARE, Contributions, Sum, delta_norms, merge_shares
from diloco.syncer.metrics import Metrics
from diloco.syncer.replay.replay import replay
from diloco_studies.virtual.virtual_time import in_virtual_time, inline
from tests import samples
from tests.virtual_run import VirtualLearner, VirtualRun, end, sync_spec, until_joined

LAYOUT = layout_of(
    (
        samples.tensor("rows", (3, 70), rule="rda-row"),
        samples.tensor("long", (BLOCK + 3,), rule="rda"),
        samples.tensor("none", (0, 4), rule="rda-row"),
        samples.tensor("mean", (BLOCK + 5,), rule="mean"),
        samples.tensor("wide", (2, BLOCK + 1), rule="rda-row"),
    )
).fragments[0]
INTERVAL = 24
COUNTERS = ((24, 1000), (3, 50), (24, 3000), (7, 900), (24, 1001))


def deltas_of(wire: Codec) -> list[Any]:
    rng = np.random.default_rng(0)
    made = [rng.standard_normal(LAYOUT.elements, np.float32) * (i + 1) for i in range(len(COUNTERS))]
    return [samples.on_wire(one, wire) for one in made]


DELTAS = {wire: deltas_of(wire) for wire in TRAITS}
NORMS = {wire: [delta_norms(LAYOUT, delta) for delta in deltas] for wire, deltas in DELTAS.items()}


@settings(max_examples=12)
@given(st.sampled_from(sorted(DELTAS)), st.integers(1, 5), st.lists(st.integers(1, 3), max_size=4), st.booleans())
def test_what_was_summed_before_shows_in_no_bit(wire: Codec, count: int, parts: list[int], equal: bool) -> None:
    """However many at a time, under each rule, one alone among them; measured lengths too."""
    rule = "equal" if equal else "tokens"
    deltas, norms = DELTAS[wire][:count], NORMS[wire][:count]
    shares = merge_shares(COUNTERS[:count], rule, interval=INTERVAL)  # type: ignore[arg-type]
    given = Contributions(deltas, norms, shares, [1.0] * count)
    once, partial, at = Sum(LAYOUT), Sum(LAYOUT), 0
    expected = once.close(given)
    partial.values.fill(np.nan)
    for part in parts:
        partial.add(given.part(slice(at, at + part)))
        at = min(count, at + part)
    found = partial.close(given)
    assert partial.values.tobytes() == once.values.tobytes()
    assert found.norm == expected.norm
    assert found.directions.tobytes() == expected.directions.tobytes()


@given(st.lists(st.tuples(st.integers(1, 2**40), st.integers(1, 2**62)), min_size=1, max_size=9))
def test_shares_are_weights_but_for_their_sum_and_never_large(counters: list[tuple[int, int]]) -> None:
    """Whatever learners claim to have trained, no sum leaves float32's range for it."""
    shares = merge_shares(counters, interval=INTERVAL)
    assert 0 <= min(shares) <= max(shares) <= MAX_SHARE
    np.testing.assert_allclose(
        np.array(shares) / sum(shares), algorithm.merge_weights(counters, interval=INTERVAL), rtol=1e-12
    )


def test_shares_of_the_first_do_not_depend_on_those_to_come() -> None:
    """Else nothing could be summed before all are in; one that trained next to nothing is the exception."""
    assert merge_shares(COUNTERS, interval=INTERVAL)[:2] == merge_shares(COUNTERS[:2], interval=INTERVAL)
    assert merge_shares([(1, 1), (24, 10**9), (24, 10**9)], interval=INTERVAL)[0] != 1


def delta(number: int, counters: tuple[int, int]) -> Delta:
    header = samples.header(f"l{number}", steps=counters[0], tokens=counters[1])
    return Delta(Offer(f"{number}-0", header), DELTAS["bf16"][number], NORMS["bf16"][number])


class Held:
    """An `offload` whose work begins when it is told to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.asked = 0

    async def __call__(self, work: Callable[..., Any], *args: Any) -> Any:
        self.asked += 1
        await self.go.wait()
        return work(*args)


def state(sync: SyncSpec) -> FragmentState:
    made = FragmentState(LAYOUT, sync, 0, bytes(16), np.zeros(LAYOUT.elements, np.float32), {})
    made.interval = INTERVAL
    return made


def running(offload: Callable[..., Awaitable[Any]], **settings: Any) -> tuple[RunningSum, Metrics]:
    metrics, sync = Metrics(), samples.sync_spec(**settings)
    return RunningSum(state(sync), offload, metrics), metrics


def anew(metrics: Metrics) -> float | None:
    return metrics.registry.get_sample_value("diloco_sums_restarted_total")


ALL = [delta(i, counters) for i, counters in enumerate(COUNTERS)]


def close(total: Sum, deltas: list[Delta], clip: float = 0.0) -> tuple[float, ...]:
    """The rest of these goes in: to the bit as if all had been there at once. Their factors."""
    factors = algorithm.clip_factors([one.norm for one in deltas], clip)
    shares = merge_shares([(one.offer.header.steps, one.offer.header.tokens) for one in deltas], interval=INTERVAL)
    given = Contributions([one.values for one in deltas], [one.norms for one in deltas], shares, factors)
    total.close(given)
    expected = Sum(LAYOUT)
    expected.close(given)
    assert total.values.tobytes() == expected.values.tobytes()
    return factors


@in_virtual_time
async def test_all_but_the_last_are_summed_when_a_window_closes() -> None:
    """One alone is not; what comes while others are being added is added next."""
    offload = Held()
    sums, metrics = running(offload)
    sums.follow(ALL[:1])
    await asyncio.sleep(0)
    assert offload.asked == 0
    sums.follow(ALL[:2])
    await asyncio.sleep(0)
    sums.follow(ALL[:4])
    assert offload.asked == 1
    offload.go.set()
    await asyncio.sleep(0.1)
    assert offload.asked == 2
    assert (await sums.take(ALL)).count == 4
    assert (await sums.take(ALL)).count == 0  # another window's
    assert anew(metrics) == 0


@in_virtual_time
async def test_a_merge_waits_for_what_is_being_added_and_for_nothing_more() -> None:
    """The last one goes into the pass that closes the window."""
    offload = Held()
    sums, _ = running(offload)
    sums.follow(ALL[:2])
    await asyncio.sleep(0)
    sums.follow(ALL[:3])
    taking = asyncio.create_task(sums.take(ALL[:4]))
    await asyncio.sleep(1)
    assert not taking.done()
    offload.go.set()
    assert (await taking).count == 2
    assert offload.asked == 1


@pytest.mark.parametrize("while_adding", [False, True])
@pytest.mark.parametrize(
    "then",
    [
        pytest.param([ALL[0], ALL[2], ALL[3]], id="one left"),
        pytest.param([ALL[1], ALL[0], ALL[2]], id="another order"),
        pytest.param([*ALL[:2], delta(2, (24, 1)), delta(3, (24, 1))], id="others bound what the first count"),
    ],
)
@in_virtual_time
async def test_a_sum_that_does_not_continue_is_begun_anew_and_counted(then: list[Delta], while_adding: bool) -> None:
    """When it is seen, or when the window closes; nothing of the old one is in the new one."""
    offload = Held()
    sums, metrics = running(offload)
    sums.follow(ALL[:2])
    await asyncio.sleep(0)
    if while_adding:
        sums.follow(then)
    offload.go.set()
    await asyncio.sleep(0.1)
    total = await sums.take(then)
    assert anew(metrics) == 1
    close(total, then)


@in_virtual_time
async def test_a_sum_is_begun_anew_where_one_more_delta_changes_a_factor() -> None:
    """A first delta that turns out to be long is clipped all the same."""
    sums, metrics = running(inline, delta_clip=1.0)
    deltas = [ALL[4], ALL[0], ALL[1], ALL[2]]
    for count in (2, 3):
        sums.follow(deltas[:count])
        await asyncio.sleep(0.01)
    assert anew(metrics) == 1
    assert close(await sums.take(deltas), deltas, clip=1.0)[0] < 1


@in_virtual_time
async def test_a_sum_that_fails_is_not_passed_over() -> None:
    """As a merge that fails: it would be a bug of ours."""

    async def broken(work: Callable[..., Any], *args: Any) -> Any:
        raise RuntimeError("broken")

    sums, _ = running(broken)
    sums.follow(ALL[:2])
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="broken"):
        sums.follow(ALL[:3])


@pytest.mark.parametrize("rule", ["mean", "rda", "rda-row"])
@in_virtual_time
async def test_the_tape_tells_the_order_of_completion_and_a_replay_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """The first to announce is the last to be here; the two before the last are in the sum by then."""
    added: list[int] = []
    add = Sum.add

    def counted(self: Sum, more: Contributions) -> None:
        added.append(len(more.deltas))
        add(self, more)

    monkeypatch.setattr(Sum, "add", counted)
    sync = sync_spec(fragments=1, quorum=4, tokens=10**9, codec="fp32")
    world = VirtualRun(sync, record_deltas=tmp_path)
    world.spec = world.spec.model_copy(update={"tensors": (samples.tensor("t", (8, 3), rule=rule),)})
    world.start_syncer()
    learners = [VirtualLearner(f"l{i}", world, 0.1 + 0.03 * i, f"{i:016x}").start() for i in range(4)]
    await until_joined(*learners)
    write = learners[0].bus.write_chunks

    async def late(*args: Any) -> None:
        await asyncio.sleep(1.0)
        await write(*args)

    learners[0].bus.write_chunks = late
    await world.until_version(5)
    await end(*learners)
    commits = [record for record in await world.tape() if isinstance(record, Committed)]
    merges = [[part.learner for part in record.contributions] for record in commits if record.version]
    assert len(merges) >= 5
    assert {(len(one), one[-1]) for one in merges} == {(4, "l0")}
    assert added[: 2 * len(merges)] == [2, 1] * len(merges)
    outcome = replay(tmp_path, commits, lambda _: None)
    assert outcome.differences == []
    assert outcome.repeated == len(merges)
