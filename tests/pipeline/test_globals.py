"""Globals as bf16: what learners train from, what is kept exactly, and what travels."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from diloco.pipeline.errors import BadPayload
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import Head
from diloco.pipeline.payload.codec import PayloadReader, as_bytes, payload_digest
from diloco.pipeline.transfer.globals import pull_exact, pull_shown
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import VirtualClock, in_virtual_time, inline, run_virtual
from tests import samples
from tests.virtual_run import VirtualLearner, VirtualRun, sync_spec

SYNC = samples.sync_spec(global_codec="bf16")
THETA = np.random.default_rng(0).standard_normal(600).astype(np.float32)


def nearest(values: np.ndarray) -> np.ndarray:
    """No ties among them."""
    return ((values.view(np.uint32) + 0x8000) >> 16 << 16).astype(np.uint32).view(np.float32)


STEP = np.float32(1e-5)
"""Of values around 1: bfloat16 tells apart what differs by 0.004 or more."""


@dataclass
class Creeping(VirtualLearner):
    """Begins with values of many digits, and moves each by far less than one of bfloat16."""

    based: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    """(fragment, version) -> what it began to train from."""

    def begin(self, elements: int) -> np.ndarray:
        return np.random.default_rng(elements).uniform(0.5, 2.0, elements).astype(np.float32)

    def train(self) -> None:
        for values in self.values:
            values += STEP
        self.rounds.trained(10)

    def adopt(self) -> None:
        for p, base in self.exchange.shared.adoptions.items():
            self.based[p, base.version] = base.values.copy()
        super().adopt()


async def committed(theta: np.ndarray = THETA, momentum: np.ndarray | None = None) -> tuple[MemoryBus, Head]:
    bus = MemoryBus("r", VirtualClock())
    await samples.commit(bus, 0, 0, theta, momentum=momentum, global_codec="bf16")
    (head,) = await bus.read_heads([0])
    return bus, head


@in_virtual_time
async def test_a_head_names_the_exact_values_and_shows_the_nearest() -> None:
    """Half of the bytes for a learner, and all of them, no more than float32 has, for who needs the values."""
    bus, head = await committed()
    assert head.digest == payload_digest(as_bytes(THETA), 1024)
    shown = await pull_shown(bus, head, 600, SYNC, inline)
    np.testing.assert_array_equal(shown, nearest(THETA))
    assert shown.dtype == np.float32
    exact = await pull_exact(bus, head, 600, SYNC, inline)
    assert exact.tobytes() == THETA.tobytes()
    assert (await bus.count_chunks(head.payload), await bus.count_chunks(head.rest)) == (2, 2)
    reader = PayloadReader(600, "bf16", 1024)
    for chunk in await bus.read_chunks(head.payload, 0, 10, 2**20):
        reader.feed(chunk)
    assert reader.complete
    assert reader.digest == head.payload_digest


@pytest.mark.parametrize(
    ("changes", "pull_it"),
    [
        ({"payload_digest": bytes(16)}, lambda *a: pull_shown(*a, inline)),
        ({"rest": "nowhere"}, lambda *a: pull_exact(*a, inline)),
        ({"payload": "nowhere"}, lambda *a: pull_shown(*a, inline)),
        ({"digest": bytes(16)}, lambda *a: pull_exact(*a, inline)),
    ],
)
@in_virtual_time
async def test_a_payload_that_is_not_the_heads_is_not_taken(changes: dict[str, Any], pull_it: Any) -> None:
    """Nor one whose rest is another version's."""
    bus, head = await committed()
    with pytest.raises(BadPayload):
        await pull_it(bus, head.model_copy(update=changes), 600, SYNC)


def test_steps_too_small_for_bf16_add_up_all_the_same() -> None:
    """Learners begin each round from rounded values; what they train is added to the exact ones."""
    learners: list[Creeping] = []

    async def main() -> None:
        world = VirtualRun(sync_spec(tokens=10**9, global_codec="bf16", quorum=2))
        world.start_syncer()
        learners.extend(Creeping(f"l{i}", world, incarnation=str(i + 1) * 16) for i in range(2))
        for learner in learners:
            learner.start()
        await world.until_version(12)
        for learner in learners:
            await learner.kill()
        for head, layout in zip(await world.heads(), layout_of(world.spec.tensors).fragments, strict=True):
            began = learners[0].begin(layout.elements)
            exact = await pull_exact(world.bus, head, layout.elements, world.spec.sync, inline)
            assert (exact - began > 12 * 2 * STEP).all()
            assert (exact - began < 0.002).all(), "an error has added up"
        await world.stop_syncer()

    run_virtual(main())
    one, other = learners
    assert len(one.based) >= 24
    for at, values in one.based.items():
        np.testing.assert_array_equal(values, nearest(values))
        if at in other.based:
            np.testing.assert_array_equal(values, other.based[at])


def test_who_created_the_run_trains_from_what_others_get() -> None:
    """The uploader of version 0 had exact values, and pulls the rounded ones as everybody does."""
    learners: list[Creeping] = []

    async def main() -> None:
        world = VirtualRun(sync_spec(tokens=10**9, global_codec="bf16", sync_interval=50))
        world.start_syncer()
        learners.extend(Creeping(f"l{i}", world, incarnation=str(i + 1) * 16).start() for i in range(2))
        async with asyncio.timeout(10):
            while min(len(learner.based) for learner in learners) < 2:
                await asyncio.sleep(0.01)
        for learner in learners:
            await learner.kill()
        await world.stop_syncer()

    run_virtual(main())
    first, second = (learner.based for learner in learners)
    assert first.keys() == second.keys() == {(0, 0), (1, 0)}
    for (p, _), values in first.items():
        np.testing.assert_array_equal(values, second[p, 0])
        np.testing.assert_array_equal(values, nearest(learners[0].begin(len(values))))
