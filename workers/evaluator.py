"""Measure the loss of a run's global model, independently of the training.

    def loss(model):  # one number of held-out data
        return sum(cross_entropy(model(x), y) for x, y in held_out) / len(held_out)

    Evaluator(model, loss, run="my-run").follow()  # a process of its own, until the run is finished

In a training program, `evaluate()` measures once, whenever the program likes. Measurements appear in the run's status,
report and picture.
"""

import asyncio
import copy
import math
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import structlog
import torch
from torch import nn

from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.errors import BusError, DilocoError, NotPermitted, UsageError, outage_event
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.process.interrupts import without_traceback
from diloco.pipeline.settings import BusSettings, load
from diloco.workers.exchange.evaluating import Evaluating, LossFunction, Measured, follow
from diloco.workers.exchange.redis_access import in_own_loop, read_run, url_of

EVERY_S = 5.0


class Evaluator:
    """Measures the global parameters of a run in a model of its own; training is not affected."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        *,
        run: str | None = None,
        redis_url: str | None = None,
        every_s: float = EVERY_S,
        device: str | torch.device | None = None,
    ) -> None:
        """Copy the model; nothing is connected yet.

        Args:
            model: as learners train it, with the same values of everything that is not trained. It may be the model in
                training.
            loss_fn: called with the copy, which is in evaluation mode and records no gradients; returns one number. It
                must be in nats per token to be comparable with other runs' losses.
            run: name of the run; default: DILOCO_RUN from the environment, else "run".
            redis_url: default: DILOCO_REDIS_URL from the environment. If Redis has a user for each kind of party, this
                is the evaluator's.
            every_s: shortest time between two measurements of `follow`.
            device: where the copy is; default: where the model is.

        Raises:
            UsageError: there is no Redis URL, an argument is invalid, or the model cannot be copied.
        """
        if not isinstance(model, nn.Module):
            raise UsageError(f"Evaluator: model is a {type(model).__name__}: pass the torch.nn.Module to measure")
        if not callable(loss_fn):
            raise UsageError(
                f"Evaluator: loss_fn is a {type(loss_fn).__name__}: pass a function of the model that returns its loss"
            )
        if isinstance(every_s, bool) or not isinstance(every_s, int | float) or not 0 <= every_s < math.inf:
            raise UsageError(f"Evaluator: every_s={every_s!r}: pass a number of seconds from 0 on")
        try:
            torch.empty(0, device=device)
        except (AssertionError, RuntimeError, TypeError) as error:  # AssertionError: torch was built without CUDA
            told = str(error).splitlines()[0]
            raise UsageError(f"Evaluator: device={device!r} is not available on this machine ({told})") from None
        self._run, self._url = load(BusSettings, {"run": run}).run, url_of(redis_url)
        self._every_s = every_s
        self._measured = Measured(_copy(model, device), loss_fn)
        self._evaluating: Evaluating | None = None
        self._stopped = threading.Event()
        self._following: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def evaluate(self) -> float | None:
        """Return the loss of the run's newest model, and record it in the run.

        It waits for the network and for `loss_fn`. If nothing has changed since the last measurement, it returns that
        one. Random number generators continue as if nothing had been drawn: Python's, numpy's, and torch's of the host
        and of the copy's GPU. It returns None if the run has no parameters yet, or if Redis does not answer or does not
        permit it, which is logged.

        Raises:
            SpecMismatch: the run has another model.
            RunReplaced: another run has begun under the name since the last measurement.
            UsageError: `loss_fn` returned no number. NaN and infinities are allowed, and are null in the files.
        """
        with _randomness_kept(self._measured.model):
            return in_own_loop(self._once())

    def follow(self) -> None:
        """Measure while the run continues, until it is finished and its last model is measured, or `stop` is called.

        It may begin before the run or late. If Redis is unavailable it waits, and continues afterwards. `loss_fn` is
        called in another thread. Do not call `evaluate` meanwhile.

        Raises:
            SpecMismatch, RunReplaced, UsageError: see `evaluate`.
        """
        in_own_loop(self._follow())

    def stop(self) -> None:
        """End `follow` after its current measurement. Call it from another thread or a signal handler."""
        self._stopped.set()
        if self._following is not None:
            loop, event = self._following
            with suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(event.set)

    async def _once(self) -> float | None:
        try:
            async with open_bus(self._url, self._run) as bus:
                spec = await read_run(bus)
                return None if spec is None else await self._of(spec).measure(bus)
        except BusError as error:
            structlog.get_logger().warning(outage_event(error), error=str(error), detail="nothing was evaluated")
        except NotPermitted as error:  # only logged: a training program must not end because it cannot be measured
            detail = "nothing was evaluated: Evaluator needs redis_url= with the user `evaluator`"
            structlog.get_logger().error("evaluation_refused", error=error.problem, detail=detail)
        return None

    async def _follow(self) -> None:
        stop = asyncio.Event()
        self._following = asyncio.get_running_loop(), stop
        try:
            if not self._stopped.is_set():
                await follow(self._url, self._run, self._of, stop)
        except DilocoError as error:
            without_traceback(error)
            raise
        finally:
            self._following = None

    def _of(self, spec: Spec) -> Evaluating:
        """Return the `Evaluating` for this run; what it has pulled is kept from one measurement to the next."""
        before = self._evaluating
        if before is not None and before.spec == spec:
            return before
        self._evaluating = Evaluating(spec, self._measured, self._every_s)
        if before is not None:
            self._evaluating.known = before.known
        return self._evaluating


def _copy(model: nn.Module, device: str | torch.device | None) -> nn.Module:
    """Copy a model to a device, tensor by tensor; tied tensors stay tied."""
    made: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if type(tensor) in (torch.Tensor, nn.Parameter):
            moved = tensor.detach().to(tensor.device if device is None else device, copy=True)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved
    try:
        copied = copy.deepcopy(model, made)
    except (RuntimeError, TypeError) as error:
        first = str(error).splitlines()[0]
        raise UsageError(f"the model cannot be copied ({first}): give the evaluator a newly created model") from error
    return copied if device is None else copied.to(device)


@contextmanager
def _randomness_kept(model: nn.Module) -> Iterator[None]:
    """Restore Python's, numpy's and torch's random states afterwards, those of the model's GPUs too."""
    pythons, numpys = random.getstate(), np.random.get_state()  # the global generators, which the program draws from
    gpus = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(pythons)
        np.random.set_state(numpys)
