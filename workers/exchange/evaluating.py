"""Keep a run's global parameters in a model and measure their loss as the heads move. Runs on asyncio.

An evaluator only reads heads and payloads and appends evaluations, so a run does not need it, and a second one does no
harm. It evaluates the global parameters, never those of one learner (Streaming DiLoCo).
"""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

import structlog
import torch
from torch import nn

from diloco.pipeline.agreement import MAX_LISTED
from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.bus.redis_streams import connect
from diloco.pipeline.errors import BadPayload, BusError, OtherFormat, PeerError, SpecMismatch, outage_event
from diloco.pipeline.fragments import Layout, layout_of
from diloco.pipeline.messages.fragment import Head
from diloco.pipeline.messages.run import Evaluation, Phase, RunState
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.transfer.globals import pull_exact
from diloco.pipeline.waiting import first_of
from diloco.workers.checks.arguments import one_number
from diloco.workers.exchange.redis_access import read_run
from diloco.workers.names import named_buffers, named_parameters
from diloco.workers.parameters import FragmentParameters
from diloco.workers.times import TIMES

# Takes a model and returns one number, which may be NaN or infinite. It must not change the model. To be comparable
# with other losses, it must be in nats per token.
LossFunction = Callable[[nn.Module], float | torch.Tensor]

log = structlog.get_logger()


class Measured(NamedTuple):
    """The model to measure, and the loss to measure it by."""

    model: nn.Module
    """Has the run's tensors. Only the evaluator uses it, since the globals are written into it."""
    loss: LossFunction


class Evaluating:
    """The global parameters as last pulled, with the last measurement of them."""

    def __init__(self, spec: Spec, measured: Measured, every_s: float) -> None:
        """Prepare; nothing is read yet.

        Args:
            spec: the run's.
            measured: the model and its loss.
            every_s: shortest time between two measurements.

        Raises:
            SpecMismatch: the model lacks a tensor of the run, or has it in another shape.
        """
        check_tensors(measured.model, spec)
        self.spec, self._every_s = spec, every_s
        self._model, self._loss = measured.model.eval(), measured.loss
        self._layout: Layout = layout_of(spec.tensors)
        self._parameters = FragmentParameters(self._model, self._layout)
        self._held: list[tuple[int, bytes] | None] = [None] * len(self._layout.fragments)
        self._measured: list[tuple[int, bytes] | None] = []
        self._next_s = 0.0
        self.last: float | None = None  # the last measured loss
        self.known: RunState | None = None  # the run's state at the last measurement

    async def look(self, bus: Bus) -> bool:
        """Evaluate if it is time and something changed; return True once the finished run has its last evaluation.

        Raises:
            RunReplaced: another run has begun under this name.
        """
        if (state := await self._read_state(bus)) is None:
            return False
        finished = state.phase is Phase.FINISHED
        if not finished and time.monotonic() < self._next_s:
            return False
        if not await self._pull(bus):
            return False
        if finished and tuple(self._held) != state.manifest:
            log.warning("manifest_not_reached", held=[held[0] for held in self._held if held])
        if finished or self._held != self._measured:
            self._next_s = time.monotonic() + self._every_s
            await self._evaluate(bus, state, finished)
        return finished

    async def measure(self, bus: Bus) -> float | None:
        """Return the loss of the parameters that the heads name now, ignoring `every_s`; None: there are none yet.

        Raises:
            RunReplaced: see `look`.
        """
        state = await self._read_state(bus)
        if state is None or not await self._pull(bus):
            return None
        if self._held != self._measured:
            await self._evaluate(bus, state, final=tuple(self._held) == state.manifest)
        return self.last

    async def _read_state(self, bus: Bus) -> RunState | None:
        if (state := await bus.read_state()) is not None:
            state.check_same_run(self.known, bus.keys.run, "This evaluator has measured")
        return state

    async def _pull(self, bus: Bus) -> bool:
        """Update the model to the heads; return False, to try again later, if one is missing or was replaced."""
        heads = [head for head in await bus.read_heads(range(len(self._held))) if head is not None]
        return len(heads) == len(self._held) and await self._pull_heads(bus, heads)

    async def _pull_heads(self, bus: Bus, heads: list[Head]) -> bool:
        for p, head in enumerate(heads):
            if self._held[p] == (head.version, head.digest):
                continue
            try:
                layout = self._layout.fragments[p]
                sync = layout.sync(self.spec.sync)
                values = await pull_exact(bus, head, layout.elements, sync, asyncio.to_thread)
            except BadPayload as error:
                log.debug("pull_failed", fragment=p, version=head.version, error=str(error))
                return False
            self._parameters.overwrite(p, values)
            self._held[p] = (head.version, head.digest)
        return True

    async def _evaluate(self, bus: Bus, state: RunState, final: bool) -> None:
        # In a thread, so that the loop continues serving its connections.
        self.last = loss = await asyncio.to_thread(self._number)
        self.known = state
        await self._read_state(bus)  # raises if another run began meanwhile: it must not get this loss
        now = bus.clock.unix()
        evaluation = Evaluation(
            loss=loss,
            tokens=state.tokens,
            versions=tuple(held[0] for held in self._held if held is not None),
            unix_s=now,
            elapsed_s=max(0.0, now - state.started_unix_s),
            final=final,
        )
        await bus.add_evaluation(evaluation)
        self._measured = list(self._held)
        log.info(
            "evaluated", loss=round(loss, 4), tokens=state.tokens, outer_steps=sum(evaluation.versions), final=final
        )

    @torch.inference_mode()
    def _number(self) -> float:
        return float(one_number(self._loss(self._model), "the evaluator's loss is {}, {}: return one number"))


def check_tensors(model: nn.Module, spec: Spec) -> None:
    """Check that a model has all tensors of a run.

    Raises:
        SpecMismatch: names the tensors that it lacks or has in another shape.
    """
    here = {buffer.name: tuple(buffer.tensor.shape) for buffer in named_buffers(model) if buffer.tensor is not None}
    here |= {name: tuple(parameter.shape) for name, parameter in named_parameters(model)}
    run = {one.name: one.shape for one in spec.tensors}
    lines = [
        f"  tensor {name}: here {list(here[name]) if name in here else 'absent'}, the run has {list(shape)}"
        for name, shape in run.items()
        if here.get(name) != shape
    ]
    if lines:
        more = [f"  ... and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else []
        told = "\n".join([*lines[:MAX_LISTED], *more])
        raise SpecMismatch(
            f"the evaluator's model is not the run's:\n{told}\nGive it the model that the learners train."
        )


async def follow(url: str, run: str, begin: Callable[[Spec], Evaluating], stop: asyncio.Event) -> bool:
    """Evaluate until the run is finished and measured (True), or `stop` is set (False).

    It retries, with backoff, while the bus is unavailable or something on it cannot be read.

    begin: called with the spec, once there is one; what it raises ends this.

    Raises:
        OtherFormat: the run's parties use another wire format, so that waiting is useless.
    """
    bus: Bus | None = None
    evaluating: Evaluating | None = None
    waits = TIMES.reach_retry.waits()  # by hand and not by `retry`: `stop` must end a pause, but not a poll in progress
    try:
        while not stop.is_set():
            pause_s = TIMES.evaluator_poll_s
            try:
                if bus is None:
                    bus = await connect(url, run)
                if evaluating is None and (spec := await read_run(bus)) is not None:
                    evaluating = begin(spec)
                if evaluating is not None and await evaluating.look(bus):
                    return True
                waits = TIMES.reach_retry.waits()
            except (SpecMismatch, OtherFormat):
                raise
            except (BusError, PeerError) as error:
                pause_s = next(waits)
                log.warning(outage_event(error), error=str(error), retry_s=pause_s)
            await first_of(stop, timeout_s=pause_s)
        return False
    finally:
        if bus is not None:
            await bus.close()
