"""The outer optimizer's state is a set of vectors by name: a rule with other ones needs nothing but its line."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.tape import Committed
from diloco.pipeline.testing.memory import MemoryBus
from diloco.pipeline.testing.virtual_time import VirtualClock, inline, run_virtual
from diloco.pipeline.transfer.global_format import STATE_RULES, MomentumState, OuterState, joined, vectors
from diloco.pipeline.transfer.payloads import pull_state
from diloco.syncer.checkpoints.loading import load_checkpoint
from diloco.syncer.checkpoints.places import place_of
from diloco.syncer.checkpoints.restoring import restore_checkpoint
from diloco.syncer.checkpoints.saving import save_checkpoint
from diloco.syncer.merging.fragment import Draft, DraftWriter
from diloco.syncer.merging.mending import LOOK_S
from diloco.syncer.replay.replay import replay
from tests.virtual_run import VirtualLearner, VirtualRun, sync_spec

NONCE = "ab" * 8


class Summing(MomentumState):
    """Nesterov's, which also sums up something of every step."""

    names = ("momentum", "total")

    def after_step(self, before: OuterState, step: np.ndarray, after: OuterState) -> None:
        np.add(before.get("total", np.float32(0)), step, out=after["total"])
        super().after_step(before, step, after)


@pytest.fixture
def summing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outer optimizer is that one; where globals are no updates, it sums up the values that it went from."""
    monkeypatch.setitem(STATE_RULES, "nesterov", Summing)
    step_writer = Draft.step_writer

    def counted(self: Draft, theta: np.ndarray, before: OuterState, lr: float, mu: float) -> DraftWriter:
        if mu:  # else it only averages
            np.add(before.get("total", np.float32(0)), theta + 1, out=self.outer_state["total"])
        return step_writer(self, theta, before, lr, mu)

    monkeypatch.setattr(Draft, "step_writer", counted)


def bits(state: OuterState) -> dict[str, bytes]:
    return {name: vector.tobytes() for name, vector in state.items()}


@pytest.mark.usefixtures("summing")
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_a_rule_with_two_vectors_is_taken_over_mended_saved_restored_and_replayed(tmp_path: Path, codec: Any) -> None:
    """Bit for bit, each by its name."""
    commits: list[Committed] = []

    async def main() -> None:
        sync = sync_spec(tokens=10**9, outer_momentum=0.5, global_codec=codec, key_frame_interval=3)
        world = VirtualRun(sync, record_deltas=tmp_path / "recording")
        service = world.start_syncer()
        learner = VirtualLearner("l0", world).start()
        await world.until_version(5)
        world.stop.set()
        assert world.syncer is not None
        await world.syncer
        was = [owner.loaded.fragment.outer_state for owner in service.owners]
        assert all(state.keys() == {"momentum", "total"} for state in was)
        assert all(state["total"].any() and bits(state)["total"] != bits(state)["momentum"] for state in was)
        service = world.start_syncer()
        async with asyncio.timeout(10):
            while len(service.owners) < 2 or not all(owner.loaded for owner in service.owners):
                await asyncio.sleep(0.001)
        assert [bits(owner.loaded.fragment.outer_state) for owner in service.owners] == list(map(bits, was))
        await world.until_version(8)
        await learner.kill()
        await asyncio.sleep(2)
        for head in await world.heads():
            world.store.delete(head.momentum)
        await asyncio.sleep(2 * LOOK_S)
        folder = await save_checkpoint(world.bus, world.spec, place_of(tmp_path / "saved"), inline)
        checkpoint, again = load_checkpoint(str(folder)), MemoryBus("again", VirtualClock())
        for p in range(sync.fragments):
            assert await again.acquire_lease(p, NONCE, 1e9)
        await restore_checkpoint(again, checkpoint, world.spec, NONCE, "s", VirtualClock(), inline)
        for fragment, owner in zip(layout_of(world.spec.tensors).fragments, service.owners, strict=True):
            due, p = bits(owner.loaded.fragment.outer_state), fragment.id
            assert bits(checkpoint.fragment(p)[1]) == due
            assert set(due) == {"momentum", "total"}
            for bus in (world.bus, again):
                (head,) = await bus.read_heads([p])
                assert head is not None
                found = await pull_state(bus, head, fragment.elements, sync, inline)
                assert bits(found[1]) == due
        commits.extend(record for record in await world.tape() if isinstance(record, Committed))
        world.stop.set()
        await world.syncer

    run_virtual(main())
    outcome = replay(tmp_path / "recording", commits, lambda _: None)
    assert outcome.differences == []
    assert outcome.repeated > 10


def test_the_payload_has_the_vectors_one_after_another_in_the_order_of_their_names() -> None:
    """One that is absent is all zeros; a single one is not copied."""
    a, b = np.arange(3, dtype=np.float32), np.arange(3, 6, dtype=np.float32)
    assert joined({"b": b, "a": a}, ("a", "b")).tolist() == [0, 1, 2, 3, 4, 5]
    assert joined({"b": b}, ("a", "b")).tolist() == [0, 0, 0, 3, 4, 5]
    assert joined({"a": a}, ("a",)) is a
    assert bits(vectors(joined({"a": a, "b": b}, ("a", "b")), ("a", "b"))) == bits({"a": a, "b": b})
