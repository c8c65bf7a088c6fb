"""The evaluator: measures the held-out loss of the global parameters as the heads move.

It only reads heads and payloads and appends evaluations; a run goes on without it, and a second one does no
harm. What is evaluated is the global parameters, never one learner's (Streaming DiLoCo).
"""

import asyncio
import time

import structlog

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.bus.redis_streams import connect
from diloco.pipeline.errors import BadPayload, BusError, UsageError, outage_event
from diloco.pipeline.fragments import Layout, layout_of
from diloco.pipeline.messages.head import Head
from diloco.pipeline.messages.run import Evaluation, Phase, RunState
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.payload import codec
from diloco.pipeline.process.lifecycle import stop_event
from diloco.pipeline.retry import Backoff
from diloco.pipeline.settings import EvaluatorProcess
from diloco.pipeline.transfer.payloads import pull_exact
from diloco.pipeline.waiting import first_of
from diloco.workers.parameters import FragmentParameters
from diloco.workers.trainer.data.blocks import Blocks
from diloco.workers.trainer.data.text import open_text
from diloco.workers.trainer.models.gpt import GPT
from diloco.workers.trainer.recipe import check_text, choose_device, held_out_loss, use_threads
from diloco.workers.trainer.sample import model_of

POLL_S = 0.5
"""How often the run's state is looked at: one small read."""

BACKOFF = Backoff(0.2, 5.0)

log = structlog.get_logger()


class Evaluator:
    """The global parameters as last pulled, and what was last measured of them."""

    def __init__(self, bus: Bus, spec: Spec, eval_every_s: float, eval_tokens: int, data: str | None = None) -> None:
        """Builds the run's model and opens its text: at `data`, or where the spec says.

        Raises:
            UsageError: the run's model is not built in, or its text is not here.
            SpecMismatch: the text differs from the run's.
        """
        place, seq_len = data or spec.trainer.get("data"), spec.trainer.get("seq_len")
        self._model: GPT = model_of(spec.trainer)
        if not isinstance(place, str) or not isinstance(seq_len, int):
            raise UsageError("this run was not started by the built-in trainer: its spec names no data and seq_len")
        text = open_text(place)
        check_text(text, place, spec.trainer)
        self._validation = Blocks(text.validation, seq_len).spread(eval_tokens)
        self._device = choose_device("cpu")
        self._bus, self._spec, self._every_s = bus, spec, eval_every_s
        self._layout: Layout = layout_of(spec.tensors)
        self._parameters = FragmentParameters(self._model, self._layout)
        self._held: list[tuple[int, bytes] | None] = [None] * len(self._layout.fragments)
        self._measured: list[tuple[int, bytes] | None] = []
        self._next_s = 0.0

    async def look(self) -> bool:
        """Evaluate if it is time and something changed; True once the finished run has its last evaluation."""
        state = await self._bus.read_state()
        if state is None:
            return False
        finished = state.phase is Phase.FINISHED
        if not finished and time.monotonic() < self._next_s:
            return False
        heads = [head for head in await self._bus.read_heads(range(len(self._held))) if head is not None]
        if len(heads) < len(self._held) or not await self._pull(heads):
            return False
        if finished and tuple(self._held) != state.manifest:
            log.warning("manifest_not_reached", held=[held[0] for held in self._held if held])
        if finished or self._held != self._measured:
            self._next_s = time.monotonic() + self._every_s
            await self._evaluate(state, finished)
            self._measured = list(self._held)
        return finished

    async def _pull(self, heads: list[Head]) -> bool:
        """Make the model that of the heads; False if a payload went meanwhile: read the heads again."""
        sync = self._spec.sync
        for p, head in enumerate(heads):
            if self._held[p] == (head.version, head.digest):
                continue
            try:
                elements = self._layout.fragments[p].elements
                values = await pull_exact(self._bus, head, elements, sync, asyncio.to_thread)
            except BadPayload as error:
                log.debug("pull_failed", fragment=p, version=head.version, error=str(error))
                return False
            self._parameters.overwrite(p, values)
            self._held[p] = (head.version, head.digest)
        return True

    async def _evaluate(self, state: RunState, final: bool) -> None:
        # in a thread: the loop goes on serving its connections
        loss = await asyncio.to_thread(held_out_loss, self._model, self._validation, self._device)
        now = time.time()
        evaluation = Evaluation(
            loss=loss,
            tokens=state.tokens,
            versions=tuple(held[0] for held in self._held if held is not None),
            unix_s=now,
            elapsed_s=max(0.0, now - state.started_unix_s),
            final=final,
        )
        await self._bus.add_evaluation(evaluation)
        log.info(
            "evaluated", loss=round(loss, 4), tokens=state.tokens, outer_steps=sum(evaluation.versions), final=final
        )


async def _read_spec(bus: Bus) -> Spec | None:
    encoded = await bus.read_spec()
    return None if encoded is None else codec.decode(Spec, encoded)


async def follow_run(settings: EvaluatorProcess, stop: asyncio.Event) -> None:
    """Evaluate until the run is finished and measured, or `stop` is set; outlives an unavailable bus.

    Raises:
        UsageError, SpecMismatch: as `Evaluator`.
    """
    url = settings.bus_url()
    if url is None:
        raise UsageError("an evaluator needs a Redis: give --redis-url or set DILOCO_REDIS_URL")
    bus: Bus | None = None
    evaluator: Evaluator | None = None
    waits = BACKOFF.waits()  # by hand, not by `retry`: `stop` ends a pause, but not a look that is under way
    try:
        while not stop.is_set():
            pause_s = POLL_S
            try:
                if bus is None:
                    bus = await connect(url, settings.run)
                if evaluator is None and (spec := await _read_spec(bus)) is not None:
                    bus.use_groups(spec.sync.groups)
                    evaluator = Evaluator(bus, spec, settings.eval_every, settings.eval_tokens, settings.data)
                if evaluator is not None and await evaluator.look():
                    return
                waits = BACKOFF.waits()
            except BusError as error:
                pause_s = next(waits)
                log.warning(outage_event(error), error=str(error), retry_s=pause_s)
            await first_of(stop, timeout_s=pause_s)
    finally:
        if bus is not None:
            await bus.close()


def evaluate_run(settings: EvaluatorProcess) -> int:
    """`diloco evaluator`; returns the exit status.

    Raises:
        UsageError, SpecMismatch: as `follow_run`.
    """
    use_threads(settings.threads)

    async def main() -> None:
        await follow_run(settings, stop_event())

    asyncio.run(main())
    return 0
