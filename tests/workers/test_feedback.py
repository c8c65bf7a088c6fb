"""Error feedback: what was merged and what is still owed are together what was trained, whatever becomes of deltas."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.messages.fragment import Committed, MergedBase
from diloco.pipeline.payload.codec import payload_bytes
from diloco.pipeline.payload.quantize import KINDS, Quantized
from diloco.pipeline.transfer.payloads import pull
from diloco.syncer.merging.fragment import Delta, FragmentState, Merged
from diloco.workers.encoding import MAX_SENT, ErrorFeedback, OnHost
from diloco.workers.encoding import encode_delta as encode_into
from diloco_studies.virtual.virtual_time import in_virtual_time
from tests.virtual_run import VirtualLearner, VirtualRun, sync_spec

ME = "l0", "0" * 8
ELEMENTS = 300


def encode_delta(base, values, kind, residual):
    """The delta's bytes, and what is lost of it."""
    wire = np.empty(payload_bytes(len(base), kind), np.uint8)
    return wire, encode_into(base, values, kind, residual, wire)


def told(version: int, tokens: int, who: tuple[str, str] = ME) -> list[MergedBase]:
    return [MergedBase(learner=who[0], incarnation=who[1], base_version=version, tokens=tokens)]


class Sender:
    """A learner that makes up its deltas, and a syncer that adds up those that it merges."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        self.feedback = ErrorFeedback(*ME)
        self.kind, self.rng = kind, np.random.default_rng(seed)
        self.true, self.merged = np.zeros(ELEMENTS), np.zeros(ELEMENTS)
        self.open: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def send(self, version: int, tokens: int = 1) -> None:
        delta = (self.rng.standard_normal(ELEMENTS) * 1e-3).astype(np.float32)
        fed = self.feedback.residual(0)
        wire, error = encode_delta(delta, lambda: np.zeros_like(delta), self.kind, fed)
        assert error is not None
        self.feedback.sent(0, (version, tokens), fed, error)
        self.open[version, tokens] = delta, Quantized(wire, ELEMENTS, self.kind)[:]

    def merge(self, version: int, tokens: int = 1) -> None:
        delta, wire = self.open.pop((version, tokens))
        self.true += delta
        self.merged += wire
        self.feedback.merged(0, told(version, tokens))

    @property
    def owed(self) -> np.ndarray:
        residual = self.feedback.residual(0)
        return np.zeros(ELEMENTS) if residual is None else residual

    def check(self, merges: int) -> None:
        """The sums agree within float32's rounding, a few roundings a merge."""
        np.testing.assert_allclose(self.merged + self.owed, self.true, rtol=0, atol=1e-8 * (1 + merges))


@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_of_what_is_decoded_and_the_residual_is_the_sum_of_the_deltas(kind):
    """Over many rounds, with a residual that stays as small as one encoding's error; without feedback it grows."""
    sender, none = Sender(kind), Sender(kind)
    none.feedback.residual = lambda fragment: None  # type: ignore[method-assign]
    lost = []
    for version in range(200):
        for one in (sender, none):
            one.send(version)
            one.merge(version)
        sender.check(version)
        lost.append(np.linalg.norm(sender.owed))
    assert max(lost) < 3 * lost[0]
    assert np.linalg.norm(none.merged - none.true) > 5 * lost[0]


def test_a_delta_that_is_not_merged_leaves_the_residual_as_it_was():
    """Refused, outdone or lost: the same residual goes with the next one."""
    sender = Sender("int4")
    sender.send(0)
    sender.merge(0)
    before = sender.owed.copy()
    sender.send(1)
    sender.feedback.merged(0, told(1, 1, who=("l1", ME[1])))  # another learner's
    sender.feedback.merged(0, told(1, 1, who=(ME[0], "f" * 8)))  # an earlier incarnation's
    sender.feedback.passed(0, 3)
    sender.merge(1)  # too late: it is forgotten, and the books say so
    np.testing.assert_array_equal(sender.owed, before)


def test_of_two_attempts_on_one_base_the_merged_one_counts():
    """Each is told from the other by its tokens."""
    sender = Sender("int4")
    sender.send(0, tokens=1)
    sender.send(0, tokens=2)
    sender.merge(0, tokens=1)
    sender.check(1)
    sender.feedback.merged(0, told(0, 1))  # told twice, by the tape and by the head
    sender.check(1)


@given(st.lists(st.sampled_from(["send", "merge", "merge newest", "skip"]), max_size=40), st.sampled_from(KINDS))
def test_the_sums_agree_whatever_happens(steps, kind):
    """Any order of sending, merging late or out of order, and never."""
    sender, version, merges = Sender(kind), 0, 0
    for step in steps:
        known = list(sender.feedback._sent[0])
        if step == "send":
            sender.send(version)
            version += 1
        elif step.startswith("merge") and known:
            sender.merge(*known[-1 if "newest" in step else 0])
            merges += 1
        elif step == "skip":
            sender.feedback.passed(0, version)
        sender.check(merges)
        assert len(sender.feedback._sent[0]) <= MAX_SENT


def test_after_going_back_it_begins_at_zero():
    """Of its fragment only."""
    sender = Sender("int4")
    sender.send(0)
    sender.merge(0)
    sender.send(1)
    sender.feedback.sent(1, (0, 1), None, np.ones(3, np.float32))
    sender.feedback.merged(1, told(0, 1))
    sender.feedback.reset(0)
    sender.feedback.merged(0, told(1, 1))
    assert sender.feedback.residual(0) is None
    assert sender.feedback.residual(1) is not None


def test_what_is_not_finite_never_gets_into_the_residual():
    """Such a delta is refused; its successor is sound again."""
    sender = Sender("int4")
    sender.send(0)
    sender.merge(0)
    fed = sender.feedback.residual(0)
    wire, error = encode_delta(
        np.full(ELEMENTS, np.nan, np.float32), lambda: np.zeros(ELEMENTS, np.float32), "int4", fed
    )
    assert error is not None
    assert np.isnan(Quantized(wire, ELEMENTS, "int4")[:]).all()
    sender.feedback.sent(0, (1, 1), fed, error)
    sender.send(2)
    sender.merge(2)
    assert np.isfinite(sender.owed).all()


# --- in a run ------------------------------------------------------------------------------------------


class Watched(VirtualLearner):
    """Remembers what it measured; `merged` is what of that the tape says was merged."""

    def publish(self, publication) -> None:
        p, base = publication.base.fragment, publication.base
        made = base.values.astype(np.float64) - self.values[p]
        self.__dict__.setdefault("made", {})[p, base.version, publication.tokens] = made
        super().publish(publication)

    def merged(self, tape) -> dict[int, np.ndarray]:
        """Fragment -> the sum of its merged deltas, as they were before they were encoded."""
        sums: dict[int, np.ndarray] = {}
        for record in tape:
            for part in record.contributions if isinstance(record, Committed) else ():
                if (part.learner, part.incarnation) == (self.name, self.incarnation):
                    made = self.made[record.fragment, part.base_version, part.tokens]
                    sums[record.fragment] = sums.get(record.fragment, 0) + made
        return sums


def sum_what_is_committed(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, str], np.ndarray]:
    """(fragment, learner) -> the sum of its deltas as the syncer decoded them, of the merges that were committed."""
    sums: dict[tuple[int, str], np.ndarray] = {}
    parts: dict[int, tuple[Merged, Sequence[Delta]]] = {}
    merge, advance = FragmentState.merge, FragmentState.advance

    def merging(state: FragmentState, deltas: Sequence[Delta], before: Sequence[MergedBase], *room: Any) -> Merged:
        merged = merge(state, deltas, before, *room)
        parts[id(merged)] = merged, deltas
        return merged

    def advancing(state: FragmentState, merged: Merged) -> None:
        for delta in parts[id(merged)][1]:
            key = state.layout.id, delta.offer.header.learner
            sums[key] = sums.get(key, 0) + delta.sent.values[0 : state.layout.elements].astype(np.float64)
        advance(state, merged)

    monkeypatch.setattr(FragmentState, "merge", merging)
    monkeypatch.setattr(FragmentState, "advance", advancing)
    return sums


@pytest.mark.parametrize("kind", ["fp32", *KINDS])
@in_virtual_time
async def test_a_run_in_virtual_time_learns_and_its_books_of_errors_close(kind, monkeypatch) -> None:
    """Learners of different speed, stale deltas among them: for each learner and fragment, the sum of what the syncer
    merged and what the learner still owes is the sum of what it measured."""
    sums = sum_what_is_committed(monkeypatch)
    world = VirtualRun(sync_spec(codec=kind, tokens=6000))
    world.start_syncer()
    learners = [Watched(f"l{i}", world, 0.1 + 0.07 * i, f"{i:016x}").start() for i in range(3)]
    await asyncio.sleep(1.0)
    offer = learners[2].bus.offer

    async def slowly(header: Any, renews: str = "") -> str:
        await asyncio.sleep(0.45)
        entry: str = await offer(header, renews)
        return entry

    learners[2].bus.offer = slowly
    await world.finish(*learners)
    tape = await world.tape()
    for head, fragment in zip(await world.heads(), learners[0].exchange.member.layout.fragments, strict=True):
        values = (await pull(world.bus, head.payload, fragment.elements, "fp32", 1024)).array()
        assert np.all(np.abs(values - 1.0) < 0.1)
        for learner in learners:
            residual = learner.exchange.feedback.residual(head.fragment)
            assert (residual is not None) is (kind in KINDS)
            owed = 0 if residual is None else residual
            merged, made = sums[head.fragment, learner.name], learner.merged(tape)[head.fragment]
            np.testing.assert_allclose(merged + owed, made, rtol=0, atol=1e-5)
    commits = [record for record in tape if isinstance(record, Committed)]
    assert any(part.base_version < c.version - 1 for c in commits for part in c.contributions)


@pytest.fixture
def fed(monkeypatch) -> list[bool]:
    """Of each delta that is encoded: whether a residual goes with it."""
    found: list[bool] = []

    def encoding(base, values, kind, residual, out, written):
        found.append(residual is not None)
        return encode_into(base, values, kind, residual, out, written)

    monkeypatch.setattr(OnHost, "encode", staticmethod(encoding))
    return found


@in_virtual_time
async def test_a_rewind_and_a_new_incarnation_begin_at_zero(fed) -> None:
    """Heads went back: what was owed may be owed to merges that never were."""
    world = VirtualRun(sync_spec(codec="int4", tokens=10**9, fragments=1))
    world.start_syncer()
    learner = VirtualLearner("l0", world).start()
    await world.until_version(3)
    saved = world.store.snapshot()
    await world.until_version(6)
    assert fed[0] is False
    assert all(fed[1:])
    world.store.restart(saved)
    fed.clear()
    async with asyncio.timeout(60):
        while learner.exchange.pulling.latest[0][0] > 5:
            await asyncio.sleep(0.02)
    before = len(fed)
    await world.until_version(8)
    assert False in fed[before : before + 2]
    assert any(fed)
    await learner.kill()
    fed.clear()
    again = VirtualLearner("l0", world, incarnation="f" * 16).start()
    await world.until_version(11)
    assert fed[0] is False
    assert fed[-1] is True
    await again.kill()


@in_virtual_time
async def test_a_merge_that_the_tape_could_not_tell_of_is_learnt_from_the_head(fed) -> None:
    """The connection broke just then: the record is behind the place from which the tape is read again."""
    world = VirtualRun(sync_spec(codec="int4", tokens=10**9, fragments=1))
    world.start_syncer()
    learner = VirtualLearner("l0", world).start()
    await world.until_version(0)
    read, lost = learner.bus.read_tape, list[object]()

    async def failing(*given):
        entries = await read(*given)
        merges = [e for e in entries if isinstance(e.record, Committed) and e.record.contributions]
        if merges and not lost:
            lost.extend(merges)
            raise BusUnavailable("gone for a moment")
        return entries

    learner.bus.read_tape = failing  # type: ignore[method-assign]
    await world.until_version(3)
    assert lost
    assert fed[:3] == [False, True, True]
    await learner.kill()


@in_virtual_time
async def test_while_nothing_is_merged_a_fragment_keeps_two_errors_and_its_books_close_afterwards(monkeypatch) -> None:
    """However often its delta is renewed: no older one can be merged any more."""
    sums = sum_what_is_committed(monkeypatch)
    world = VirtualRun(sync_spec(codec="int4", tokens=8000))
    world.start_syncer()
    learners = [Watched(f"l{i}", world, 0.1, f"{i:016x}").start() for i in range(2)]
    await world.until_version(3)
    assert world.syncer is not None
    await world.kill_syncer()
    before = [learner.rounds.deltas for learner in learners]
    await asyncio.sleep(15)
    for learner, deltas in zip(learners, before, strict=True):
        sent = learner.exchange.feedback._sent
        assert learner.rounds.deltas - deltas > 3 * len(sent)
        assert [len(sent[p]) for p in range(2)] == [2, 2]
    world.start_syncer()
    await world.finish(*learners)
    tape = await world.tape()
    for learner in learners:
        made = learner.merged(tape)
        for p in range(2):
            residual = learner.exchange.feedback.residual(p)
            assert residual is not None
            np.testing.assert_allclose(sums[p, learner.name] + residual, made[p], rtol=0, atol=1e-5)
