"""A run of learners and a syncer in virtual time: the production protocol on the bus in memory. asyncio.

The syncer is `syncer.serving.service` as it is; learners are `learner.LabLearner`,
failures and speeds are `schedule.Schedule`.
The globals are measured by a task that reads the heads, as the evaluator does; no step waits for it.
"""

import asyncio
import copy
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import nn

from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import Head
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.settings import SyncerProcess, SyncerSettings
from diloco.pipeline.transfer.globals import pull_exact
from diloco.syncer.metrics import Metrics
from diloco.syncer.serving.service import SyncerService
from diloco.workers.parameters import FragmentParameters, tensor_table
from diloco_studies.quality.bus import RUN, LabBus
from diloco_studies.quality.curve import Recorder
from diloco_studies.quality.learner import LabLearner
from diloco_studies.quality.schedule import Schedule
from diloco_studies.virtual.chance import Chance
from diloco_studies.virtual.memory import MemoryBus, MemoryStore
from diloco_studies.virtual.virtual_time import VirtualClock, inline, run_virtual


def train_decoupled(recorder: Recorder, model: nn.Module) -> dict[str, Any]:
    """Train to the run's budget; a result as `Recorder.result`, and what the syncer's books say.

    The model has the globals' final values then.

    Raises:
        UsageError: more fragments than tensors; or it came to no end in `LabRun.patience_s`.
        Stopped: the recorder said so.
    """
    return run_virtual(_train(recorder, model))


async def _train(recorder: Recorder, model: nn.Module) -> dict[str, Any]:
    world = LabWorld(recorder, model)
    try:
        return await world.train()
    except BaseExceptionGroup as group:  # one party's error ends all: it is the one to show
        raise group.exceptions[0] from None


LOOK_S = 0.01


class LabWorld:
    """One run."""

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        """model: with the initial parameters; it has the globals of the last measure from then on."""
        self.recorder, self.task, self.run = recorder, recorder.task, recorder.run
        run = self.run
        self.chance, self.schedule = Chance(run.seed), Schedule(run)
        self._initial = copy.deepcopy(model)
        self.spec = self._spec()
        self.layout = layout_of(self.spec.tensors)
        self.failures = 0
        self._globals = model
        self._parameters = FragmentParameters(self._globals, self.layout)
        self._held: dict[int, bytes] = {}
        """Fragment -> digest of what `_globals` holds of it."""
        self._store, self._clock = MemoryStore(), VirtualClock()
        self._bus = MemoryBus(RUN, self._clock, self._store)
        self._learners: dict[int, LabLearner] = {}
        self._due, self._ending = asyncio.Event(), asyncio.Event()
        self._ended_s = 0.0
        self._drawn = 0
        self._links: list[LabBus] = []
        """Of learners, of all their lives."""
        self._syncer_s = 0.0
        """Processor time of merges, outer steps, encoding and digests."""

    def _spec(self) -> Spec:
        sync = self.run.sync_spec(self.recorder.budget_tokens)
        return Spec(sync=sync, tensors=tensor_table(self._initial, sync), trainer={})

    # --- what learners see -------------------------------------------------------------------------------

    def link(self) -> LabBus:
        """A learner's new connection to the bus."""
        self._links.append(link := self._link())
        return link

    def _link(self) -> LabBus:
        return LabBus(self._clock, self._store, self.run.latency_s)

    def stepped(self, tokens: int, virtual_s: float, loss: torch.Tensor) -> None:
        """A learner has done a step, whose computing took so much virtual time."""
        recorder = self.recorder
        recorder.trained(tokens, virtual_s, loss)
        if recorder.due:
            self._due.set()
        if recorder.tokens >= recorder.budget_tokens and not self._ending.is_set():
            self._ending.set()
            self._ended_s = self._clock.now()

    # --- the run -----------------------------------------------------------------------------------------

    async def train(self) -> dict[str, Any]:
        """From the start to the finished run's last measure."""
        async with asyncio.TaskGroup() as group:
            evaluator, patience = group.create_task(self._evaluate()), group.create_task(self._give_up())
            group.create_task(self._drain())
            serving = group.create_task(self._syncer().run(asyncio.Event()))
            for number in range(self.run.members):
                group.create_task(self._live(number))
            await serving
            evaluator.cancel()
            patience.cancel()
        heads = await self._measure()
        return self.recorder.result(self._ended_s, failures=self.failures, **await self._books(heads))

    def _syncer(self) -> SyncerService:
        # All of it is given, so that no DILOCO_* variable of this machine has a say.
        own = {name: info.default for name, info in SyncerSettings.model_fields.items()} | {"syncer_id": "syncer"}
        settings = SyncerProcess(**own, **self.spec.sync.model_dump())
        return SyncerService(self._link(), self._clock, settings, Metrics(), offload=self._timed, random_hex=self._hex)

    async def _timed(self, work: Callable[..., Any], *args: Any) -> Any:
        """`inline`, with the processor time that it takes."""
        began = time.process_time()
        try:
            return work(*args)
        finally:
            self._syncer_s += time.process_time() - began

    def _hex(self, count: int) -> str:
        self._drawn += 1
        return self.chance.hex(2 * count, "nonce", self._drawn)

    async def _live(self, number: int) -> None:
        """All incarnations of one learner."""
        life, model, before = 0, copy.deepcopy(self._initial), None
        for gone_s, back_s in chain(self.schedule.outages(number), [(math.inf, math.inf)]):
            if self._clock.now() < gone_s:
                learner = self._begin(number, life, model, before)
                living = asyncio.create_task(learner.live())
                left_s = None if gone_s == math.inf else gone_s - self._clock.now()
                try:
                    done, _ = await asyncio.wait({living}, timeout=left_s)
                    if done:
                        living.result()
                        return
                finally:
                    await learner.kill(living)
                    del self._learners[number]
                self.failures += 1
                life, before = life + 1, learner
            with suppress(TimeoutError):
                async with asyncio.timeout(None if back_s == math.inf else back_s - self._clock.now()):
                    await self._ending.wait()
                    return  # who is away when training ends stays away

    def _begin(self, number: int, life: int, model: nn.Module, before: LabLearner | None) -> LabLearner:
        """A learner's next incarnation, with the moments of a peer, or else its own."""
        learner = LabLearner(self, number, life, model)
        peers = [peer for _, peer in sorted(self._learners.items()) if peer.optimizers[0].state]
        source = peers[0] if peers else before
        if source is not None and (before is not None or self._clock.now() > 0):
            for own, other in zip(learner.optimizers, source.optimizers, strict=True):
                own.load_state_dict(copy.deepcopy(other.state_dict()))
            learner.ramp_steps = 0
        self._learners[number] = learner
        return learner

    async def _give_up(self) -> None:
        await asyncio.sleep(self.run.patience_s)
        if not self._ending.is_set():
            raise self.recorder.give_up()

    async def _drain(self) -> None:
        """Ask for the run's end. The syncer would see it itself, were it not for what the dead could not report."""
        await self._ending.wait()
        while (state := await self._bus.read_state()) is None:  # noqa: ASYNC110  # of steps shorter than a call to it
            await asyncio.sleep(LOOK_S)
        reason = "the token budget is trained"
        await self._bus.write_state(state.model_copy(update={"phase": Phase.DRAINING, "reason": reason}))

    # --- measuring ---------------------------------------------------------------------------------------

    async def _evaluate(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            await self._measure()

    async def _measure(self) -> Sequence[Head]:
        """A point of the curve, of the heads as they are now."""
        heads = await self._bus.read_heads(range(self.run.fragments))
        found = [head for head in heads if head is not None]
        for head in found:
            if self._held.get(head.fragment) != head.digest:
                layout = self.layout.fragments[head.fragment]
                sync = layout.sync(self.spec.sync)
                values = await pull_exact(self._bus, head, layout.elements, sync, inline)
                self._parameters.overwrite(head.fragment, values)
                self._held[head.fragment] = head.digest
        self.recorder.measure(self._globals, self._mean(found, "merged_tokens"), self._clock.now())
        return found

    def _mean(self, heads: Sequence[Head], counter: str) -> float:
        """Mean of a counter of the heads over the elements."""
        total = sum(getattr(head, counter) * self.layout.fragments[head.fragment].elements for head in heads)
        return float(total / self.layout.elements)

    async def _books(self, heads: Sequence[Head]) -> dict[str, Any]:
        """Shares of what was trained, and how merges went."""
        reports = [seen.report for seen in await self._bus.read_reports()]
        trained = max(1, self.recorder.tokens)
        merges = sum(head.version for head in heads)
        return {
            "merges": merges,
            "contributions_a_merge": sum(head.merged_deltas for head in heads) / max(1, merges),
            "merged_share": self._mean(heads, "merged_tokens") / trained,
            "overwritten_share": sum(r.overwritten for r in reports) / self.layout.elements / trained,
            "rejected_share": self._mean(heads, "rejected_tokens") / trained,
            "learner_bytes": sum(link.moved_bytes for link in self._links),
            "syncer_s": self._syncer_s,
        }
