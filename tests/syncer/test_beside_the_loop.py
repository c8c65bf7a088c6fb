"""What takes longer the larger a fragment is runs beside the loop, which has leases to prolong. In virtual time."""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from diloco.syncer.serving.service import SyncerService
from diloco_studies.virtual.virtual_time import in_virtual_time, run_virtual
from tests.syncer.test_bus_recovery import flush, learners
from tests.virtual_run import VirtualRun, end, sync_spec


class Beside:
    """An `offload` that counts what it is given, and heavy work that tells whether it is done by it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch, self._working = monkeypatch, False
        self.done, self.on_the_loop = Counter[str](), Counter[str]()
        self.watch("diloco.pipeline.transfer.globals.split")
        self.watch("diloco.syncer.checkpoints.restoring.payload_digest")
        self.watch("numpy.isfinite", lambda values: np.size(values) > 1)

    def watch(self, name: str, heavy: Callable[..., bool] = lambda *_: True) -> None:
        """Count the calls of a function that the syncer makes; those that are not heavy are no matter."""
        module, _, function = name.rpartition(".")
        work = getattr(sys.modules[module], function)

        def counted(*args: Any, **given: Any) -> Any:
            caller = sys._getframe(1).f_globals["__name__"]
            if self._working:
                self.done[function] += 1
            elif caller.startswith(("diloco.syncer.", "diloco.pipeline.transfer.")) and heavy(*args):
                self.on_the_loop[function] += 1
            return work(*args, **given)

        self._monkeypatch.setattr(name, counted)

    async def _offload(self, work: Any, *args: Any) -> Any:
        self._working = True
        self.done[work.__name__] += 1
        try:
            return work(*args)
        finally:
            self._working = False

    def serves(self, service: SyncerService) -> None:
        """A syncer that has not begun yet."""
        service._offload = self._offload


@in_virtual_time
async def test_a_fragment_is_checked_and_split_beside_the_loop_as_it_gets_version_0_or_is_put_back(monkeypatch) -> None:
    """On it, a large one would let the lease lapse before the commit, each time anew."""
    beside = Beside(monkeypatch)
    world = VirtualRun(sync_spec(tokens=10**9, quorum=2, global_codec="bf16", outer_momentum=0.5))
    beside.serves(world.start_syncer())
    party = learners(world)
    await world.until_version(1)
    assert not beside.on_the_loop
    assert beside.done["grow_to"] == world.spec.sync.fragments  # of `push_global`; an outer step splits too
    flush(world)
    await world.until_version(1)
    assert not beside.on_the_loop
    assert beside.done["grow_to"] >= 2 * world.spec.sync.fragments
    await end(*party)


def test_a_fragment_is_split_and_digested_beside_the_loop_as_a_checkpoint_is_restored(tmp_path, monkeypatch) -> None:
    async def main(**given: Any) -> Beside:
        world = VirtualRun(sync_spec(tokens=10**9, global_codec="bf16"), checkpoint_dir=tmp_path)
        beside = Beside(monkeypatch)
        beside.serves(world.start_syncer(**given))
        party = learners(world)
        await world.until_version(3)
        await world.stop_syncer()
        await end(*party)
        return beside

    run_virtual(main())
    beside = run_virtual(main(resume=tmp_path))
    assert not beside.on_the_loop
    assert beside.done["split"] == beside.done["payload_digest"] == sync_spec().fragments
