"""A learner of the lab: real gradients, the production `Rounds` and `Exchange`, and time that is only counted. asyncio.

One step is one sleep of the virtual clock and then one inner step, computed at once; what is adopted and published
after it is as in `workers.learner`. One object is one incarnation.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from random import Random
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.run import LearnerReport, Phase
from diloco.pipeline.messages.spec import Spec
from diloco.workers.exchange.joining import Joining
from diloco.workers.exchange.work_queue import STEPS_PER_SHARD, read_blocks
from diloco.workers.parameters import FragmentParameters
from diloco.workers.rounds import Publication, Rounds
from diloco.workers.schedule import FRESH_MOMENTS_STEPS, learning_rate
from diloco.workers.trainer.recipe import update
from diloco_studies.quality.bus import LabBus
from diloco_studies.quality.curve import Recorder
from diloco_studies.quality.inner import Gradients, inner_optimizers
from diloco_studies.quality.schedule import Schedule
from diloco_studies.quality.settings import LabRun
from diloco_studies.quality.tasks.tasks import Task
from diloco_studies.virtual.chance import Chance
from diloco_studies.virtual.virtual_time import VirtualClock, inline

LEAVE_S = 20.0
POLLS_A_STEP = 50
"""How finely a learner that waits looks again."""

Flat = npt.NDArray[np.float32]


class Surroundings(Protocol):
    """What a learner must know of its run."""

    run: LabRun
    task: Task
    spec: Spec
    layout: Layout
    schedule: Schedule
    chance: Chance
    recorder: Recorder

    def link(self) -> LabBus:
        """A new connection to the bus."""
        ...

    def stepped(self, tokens: int, virtual_s: float, loss: torch.Tensor) -> None:
        """A learner has done a step, whose computing took so much virtual time."""
        ...


class LabLearner:
    """One incarnation."""

    def __init__(self, world: Surroundings, number: int, life: int, model: nn.Module) -> None:
        """model: its own; a first incarnation's has the initial parameters."""
        run = world.run
        self.world, self.number, self.model = world, number, model
        self.id = f"learner-{number}"
        self.optimizers = inner_optimizers(model, run)
        self._gradients = Gradients(world.task, model)
        self.ramp_steps = FRESH_MOMENTS_STEPS
        """Of its own steps; 0 with recovered moments."""
        self.bus = world.link()
        self._incarnation = incarnation = world.chance.hex(16, "incarnation", number, life)
        self._joining = Joining(self.bus, VirtualClock(), self.id, incarnation, self._report, offload=inline)
        self._rounds = Rounds(world.layout, world.spec.sync)
        self._parameters = FragmentParameters(model, world.layout)
        self._random = Random(incarnation)  # for reading blocks again
        self._snapshots: dict[int, Flat] = {}
        """Fragment -> its values when last published, where what is trained past that is carried on."""
        self._steps = 0
        self._step_tokens = run.batch * world.task.example_tokens
        self._stepping = False
        self._step_s = run.step_s

    async def live(self) -> None:
        """Join, train until the run drains, publish the rest and leave."""
        world, initial = self.world, self._parameters.snapshot
        self._exchange = exchange = await self._joining.join(world.spec, world.layout, lambda p: initial(p).numpy())
        shared = exchange.shared
        self._adopt(joining=True)
        running = asyncio.create_task(exchange.work())
        try:
            order = await self._blocks()
            while await self._goes_on():
                if running.done():
                    running.result()
                takes_s = world.schedule.step_s(self.number, self._steps)
                await asyncio.sleep(takes_s)
                self._train(order, takes_s)
                adopted = self._adopt()
                if shared.offer_again:
                    shared.offer_again = False
                    self._rounds.offer_again()
                published = [self._snapshot(one) for one in self._rounds.publications(shared.windows, shared.uploaded)]
                exchange.publishing.queue(published)
                if adopted:
                    exchange.reporting.soon()
                if world.run.wait and published:
                    await self._merged({item[0].base.fragment for item in published})
            last = [self._snapshot(one) for one in self._rounds.last(shared.windows, due=self._over)]
            exchange.publishing.queue(last)
            await exchange.leave(LEAVE_S)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    async def kill(self, living: asyncio.Task[None]) -> None:
        """As SIGKILL of what runs `live`: nothing more is said or done."""
        if self._stepping:
            self._stepping = False
            self.world.recorder.abandon_step(self._step_tokens)
        await self.bus.close()
        living.cancel()
        with suppress(asyncio.CancelledError):
            await living

    # --- steps -------------------------------------------------------------------------------------------

    @property
    def _over(self) -> bool:
        state = self._exchange.shared.state
        return state is not None and state.phase is not Phase.RUNNING

    async def _goes_on(self) -> bool:
        """Begin a step, if there is one left to do; else wait for the run's end, which is known only later."""
        while not self._over:
            if self.world.recorder.begin_step(self._step_tokens):
                self._stepping = True
                return True
            await asyncio.sleep(self.world.run.step_s / POLLS_A_STEP)
        return False

    async def _merged(self, fragments: set[int]) -> None:
        """Wait for newer globals of these fragments, and adopt them."""
        while fragments and not self._over:
            await asyncio.sleep(self.world.run.step_s / POLLS_A_STEP)
            fragments -= set(self._exchange.shared.adoptions)
            if self._adopt():
                self._exchange.reporting.soon()

    async def _blocks(self) -> Iterator[tuple[int, int]]:
        """The order of examples, from the run's work queue, once the first shard is here."""
        shared, claims = self._exchange.shared, self._exchange.claims
        shared.shards_wanted = (self.world.task.examples, self.world.run.batch * STEPS_PER_SHARD)
        claims.want()
        while shared.shards.empty():  # noqa: ASYNC110  # filled by code that knows no event loop
            await asyncio.sleep(0.01)
        return read_blocks(shared, shared.shards.get(), claims.finish, self._random)

    def _train(self, order: Iterator[tuple[int, int]], takes_s: float) -> None:
        world, state = self.world, self._exchange.shared.state
        run, task = world.run, world.task
        progress = 0.0 if state is None else min(1.0, state.counted_tokens / state.budget_tokens)
        with world.recorder.computing():
            batch = task.batch(list(islice(order, run.batch)))
            loss = self._gradients(batch)
            lr = learning_rate(
                progress,
                self._steps,
                peak=run.lr,
                min_ratio=run.min_lr_ratio,
                warmup=run.warmup,
                ramp_steps=self.ramp_steps,
            )
            update(self.model, self.optimizers, lr, run.clip)
        self._steps += 1
        self._step_s = 0.9 * self._step_s + 0.1 * takes_s
        self._stepping = False
        self._rounds.in_part(state)
        self._rounds.trained(self._step_tokens)
        world.stepped(self._step_tokens, takes_s, loss)

    # --- fragments ---------------------------------------------------------------------------------------

    def _adopt(self, joining: bool = False) -> bool:
        """Take over what has arrived, as the run's settings say; on joining always as it is."""
        run, arrived = self.world.run, self._exchange.shared.adoptions
        for p in (fragments := sorted(arrived)):
            base = arrived.pop(p)
            values = base.values
            if run.adopt == "blend" and not joining:
                local = self._parameters.snapshot(p).numpy()
                values = run.mixing * local + np.float32(1 - run.mixing) * values
            elif run.adopt == "carry" and p in self._snapshots:
                values = values + (self._parameters.snapshot(p).numpy() - self._snapshots.pop(p))
            self._parameters.overwrite(p, values)
            self._rounds.adopt(base)
        return bool(fragments)

    def _snapshot(self, publication: Publication) -> tuple[Publication, Callable[[], Flat]]:
        p = publication.base.fragment
        snapshot = self._parameters.snapshot(p)
        if self.world.run.adopt == "carry":
            self._snapshots[p] = snapshot.numpy().copy()  # the delta is made in its place
        return publication, snapshot.numpy

    def _report(self, left: bool) -> LearnerReport:
        counts = self._rounds.counts
        return LearnerReport(
            learner=self.id,
            incarnation=self._incarnation,
            step=counts.steps,
            tokens=counts.tokens,
            overwritten=counts.overwritten,
            published=counts.published,
            versions=self._rounds.versions,
            loss=None,
            tokens_per_s=0.0,
            step_s=self._step_s,
            step_s_median=self._step_s,
            blocked_s=0.0,
            wall_s=0.0,
            left=left,
            part_unix_s=counts.part_unix_s,
            host="",
            device="cpu",
        )
