"""The learner as a library: wrap your own model and loop; nothing here ever makes a step wait for the network.

    with Learner(model, optimizer, run="my-run", redis_url=...) as learner:
        for batch in loader:
            loss = step(batch)
            learner.step(tokens=batch.numel())
            if learner.finished:
                break

The training thread calls `step`; a thread of its own (`exchange`) does all I/O. Between them lie only queues
and dictionaries that neither side waits on. Only parameters that require a gradient are synchronised; the
inner optimizer's moments are kept across adoptions (paper, learner).
"""

import asyncio
import os
import queue
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog
import torch
from torch import nn

from pipeline import logs
from pipeline.clock import LoopClock, fast_loop
from pipeline.cores import usable_cores
from pipeline.errors import UsageError
from pipeline.fragments import layout_of
from pipeline.messages import LearnerReport, Phase, Spec
from pipeline.ports import Bus
from pipeline.settings import LEAVE_S, PARTIES, STATE_S, BusSettings, EncodeOn, SyncSettings, check_variables, load

from . import reaching
from .arguments import check_arguments, one_loss, whole_tokens
from .background import yield_core
from .device_encoding import OnDevice
from .encoding import AT_ONCE, OnHost
from .exchange import Exchange
from .frozen_digests import check_frozen
from .joining import meanwhile
from .model_checks import check_model, check_optimizer
from .model_watch import ModelWatch
from .other_thread import ask, result_of
from .parameters import FragmentParameters, tensor_table
from .proposal import proposal
from .recovery import Recover, Recovery, RecoveryOptions, Source
from .rounds import Publication, Rounds
from .shards import read_blocks
from .step_times import StepTimes
from .stopping import Stopped, Stopping

LOOK_FOR_SIGNAL_S = 0.2


class Learner:
    """One learner of a run."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        run: str = "run",
        redis_url: str | None = None,
        learner_id: str | None = None,
        sync: SyncSettings | None = None,
        trainer: Mapping[str, Any] | None = None,
        leave_s: float = LEAVE_S,
        state_dir: str | Path | None = None,
        state_every_s: float = STATE_S,
        recover: Recover = "auto",
        log_losses: bool = False,
        encode_on: EncodeOn = "auto",
        same_frozen: bool = True,
    ) -> None:
        """Nothing is connected before `with`.

        Args:
            model: all its parameters that require a gradient are synchronised; they must be on their device. Which they
                are is settled on joining: `step` refuses to go on with a model that was changed since.
            optimizer: the inner optimizer, or a wrapper of it. Its moments stay as they are when a fragment is adopted.
            run: name of the run.
            redis_url: default: the environment's DILOCO_REDIS_URL.
            learner_id: unique among live learners; default: host, process id and a random part.
            sync: the protocol's constants, if this learner is the first; default: the run's, else defaults.
            trainer: what else all learners must have in common (kept in the spec).
            leave_s: time to flush unpublished training when leaving.
            state_dir: a folder of this learner's own on its own disk, for the optimizer's moments, step counters and
                random states; a restart goes on from it. None: they come from a live peer, else begin fresh.
            state_every_s: time between two savings.
            recover: "auto"; "peer": never from `state_dir`; "fresh": from nothing.
            log_losses: append the loss of each step to `state_dir`/losses.jsonl.
            encode_on: where deltas are encoded, and their bases and residuals lie: "cpu": in host memory; "device":
                where the model is, at 4 bytes a parameter, 8 to 12 if the codec quantizes; "auto": that, if it is CUDA.
            same_frozen: learners have the same frozen parameters, tensor by tensor, or are refused. The first one
                settles it for the run. False: they may differ (quantized in different ways, say), unlooked at.

        Raises:
            UsageError: no Redis URL, losses to be logged to no folder, or an argument, a model or an optimizer that
                cannot be used, by name.
        """
        check_arguments(
            run=run,
            redis_url=redis_url,
            learner_id=learner_id,
            sync=sync,
            trainer=dict(trainer) if isinstance(trainer, Mapping) else trainer,
            leave_s=leave_s,
            state_dir=state_dir,
            state_every_s=state_every_s,
            recover=recover,
            log_losses=log_losses,
            encode_on=encode_on,
            same_frozen=same_frozen,
        )
        if log_losses and state_dir is None:
            raise UsageError("log_losses needs state_dir, where losses.jsonl lies (DILOCO_LOG_LOSSES, --state-dir)")
        if not structlog.is_configured():
            logs.configure("warning")  # in somebody else's program, only what needs attention
        for warning in check_variables(PARTIES, wanted=BusSettings.model_fields):
            structlog.get_logger().warning("variable_unknown", detail=warning)
        url = load(BusSettings, {"redis_url": redis_url or None}).bus_url()
        if not url:
            raise UsageError("no Redis URL: pass redis_url= or set DILOCO_REDIS_URL, e.g. redis://localhost:6379")
        self.model, self.optimizer = model, optimizer
        self.incarnation = secrets.token_hex(8)
        self.id = learner_id or f"{socket.gethostname()[:40]}-{os.getpid()}-{self.incarnation[:6]}"
        self.device = check_model(model)
        if sync is not None:
            tensor_table(model, sync)
        self._inner_optimizer = check_optimizer(model, optimizer)
        if same_frozen:
            check_frozen(model)
        self._same_frozen = same_frozen
        self._watch: ModelWatch | None = None
        self._encode_on, self._on_device = encode_on, False
        self.left_in_order = False
        """After leaving: everything unpublished got away in time."""
        self._url, self._run, self._leave_s = url, run, leave_s
        self._sync, self._trainer = sync, dict(trainer or {})
        self._spec: Spec | None = None
        folder = None if state_dir is None else Path(state_dir)
        self._recovery_options = RecoveryOptions(recover, folder, state_every_s, log_losses)
        self._recovery: Recovery | None = None
        self._rounds: Rounds | None = None
        self._parameters: FragmentParameters | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exchange: Exchange | None = None
        self._thread: threading.Thread | None = None
        self._entered = threading.Lock()
        """Taken for good on entering."""
        self._pid = os.getpid()
        self._stopping = Stopping()
        self._joined = threading.Event()
        self._abandoned = False
        """Joining came to nothing."""
        self._ended: asyncio.Event | None = None
        self._failure: BaseException | None = None
        self._loss: float | torch.Tensor | None = None
        self.times = StepTimes()

    # --- what a training loop sees ------------------------------------------------------------------

    def step(self, tokens: int | torch.Tensor, loss: float | torch.Tensor | None = None) -> None:
        """Count an inner step just done, adopt what has arrived, publish what is due. Never waits for the network.

        Args:
            tokens: trained in this step: a whole number from 0 (nothing: all of the batch was masked), also as a numpy
                or torch scalar; one on a CUDA device is read at once, which waits for the device.
            loss: one number, shown in reports; a tensor is read later, in the other thread.

        Raises:
            UsageError: an argument that is none of that, or the model is no longer the one that is synchronised.
        """
        entered = time.perf_counter()
        self._check()
        tokens, loss = whole_tokens(tokens), one_loss(loss)
        rounds, exchange, recovery = self._rounds, self._exchange, self._recovery
        assert rounds is not None and exchange is not None and recovery is not None  # noqa: S101, PT018  # _check
        assert self._watch is not None  # noqa: S101  # set with the rounds
        self._watch.look(entered)
        self.times.entered(entered)
        rounds.trained(tokens)
        adopted = self._adopt()
        if exchange.shared.republish:
            exchange.shared.republish = False
            rounds.republish()
        self._hand_over(rounds.publications(exchange.shared.windows), adopted)
        self._loss = self._loss if loss is None else loss
        recovery.stepped(exchange.shared, self.progress, loss)
        self.times.returned(entered, time.perf_counter(), tokens)
        self._stopping.stepped()

    @property
    def finished(self) -> bool:
        """The run has reached its budget or is asked to end, or this process is (SIGTERM, SIGHUP): leave the loop."""
        return self._stopping.asked or self._run_is_over()

    @property
    def progress(self) -> float:
        """Trained tokens of the whole run / its budget, in 0..1: what learning-rate schedules go by."""
        state = self._exchange.shared.state if self._exchange else None
        return 0.0 if state is None else min(1.0, state.tokens / state.budget_tokens)

    @property
    def recovered(self) -> Source:
        """Where the optimizer's moments came from: "start" (of the run), "checkpoint", "peer" or "fresh"."""
        return self._recovery.source if self._recovery else "start"

    @property
    def earlier_steps(self) -> int:
        """Inner steps of this learner's earlier incarnations, as its checkpoint knows them; else 0."""
        return self._recovery.earlier_steps if self._recovery else 0

    @property
    def spec(self) -> Spec:
        """What the run has agreed on."""
        if self._spec is None:
            raise UsageError("the learner has not joined yet: use it in a `with` block")
        return self._spec

    def blocks(self, total: int, per_shard: int) -> Iterator[tuple[int, int]]:
        """Endless (epoch, index) of data blocks from the run's work queue; a shard is acknowledged when read.

        Waits for the first shard before it returns: this is still part of joining.

        Args:
            total: blocks in an epoch; every learner must say the same.
            per_shard: blocks handed out at a time.
        """
        exchange = self._exchange
        self._check()
        assert exchange is not None  # noqa: S101  # _check
        exchange.shared.shards_wanted = (total, per_shard)
        self._tell(exchange.claims.want)
        while True:
            try:
                first = exchange.shared.shards.get(timeout=0.5)
                break
            except queue.Empty:
                self._check()
                self._stopping.leave_if_asked()
        if self._rounds is not None and not self._rounds.steps:
            self.times.begin(time.perf_counter())

        finished = partial(self._tell, exchange.claims.finish)
        return read_blocks(exchange.shared, first, finished, random.Random(self.incarnation))

    @staticmethod
    def read_spec(redis_url: str, run: str) -> Spec | None:
        """The spec of a run that is already there, else None. For a trainer that joins knowing nothing."""
        return reaching.read_spec(redis_url, run)

    # --- joining and leaving --------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Join: connect, agree with the run, fetch the model. Whatever it raises, nothing of it is left behind.

        Raises:
            UsageError: it was entered before, or is not of this process.
            IdTaken: another process has this learner's id.
            SpecMismatch: the run was set up otherwise.
            SystemExit: SIGTERM or SIGHUP came.
        """
        self._check_process()
        if not self._entered.acquire(blocking=False):
            raise UsageError("a Learner is entered once: make a new one to join again, or a second time")
        try:
            self._stopping.install()
            self._join()
        except BaseException:  # KeyboardInterrupt above all
            self._abandon()
            raise
        return self

    def _join(self) -> None:
        if self._sync is None:
            read = partial(self.read_spec, self._url, self._run)
            held = reaching.wait_for_spec(read, self.id, self._stopping.leave_if_asked)
            sync = held.sync if held else SyncSettings().sync_spec()
            self._trainer = self._trainer or (dict(held.trainer) if held else {})
        else:
            sync = self._sync.sync_spec()
        self.device = check_model(self.model)  # it may have changed, or have been moved, since it was judged
        self._on_device = self._encode_on == "device" or (self._encode_on == "auto" and self.device.type == "cuda")
        spec = proposal(self.model, sync, self._trainer, self._same_frozen)
        layout = layout_of(spec.tensors)
        self._rounds = Rounds(layout, sync)
        self._parameters = FragmentParameters(self.model, layout)
        self._watch = ModelWatch(self.model, [tensor.name for tensor in spec.tensors])
        self._recovery = Recovery(
            self.model,
            self._inner_optimizer,
            layout,
            self._rounds,
            run=self._run,
            learner=self.id,
            incarnation=self.incarnation,
            options=self._recovery_options,
        )
        self._thread = threading.Thread(target=self._exchange_thread, args=(spec,), name="exchange", daemon=True)
        self._thread.start()
        while not self._joined.wait(LOOK_FOR_SIGNAL_S):
            self._stopping.leave_if_asked()
        self._check()
        self._spec = spec
        self._recovery.restore()
        self._hand_over((), self._adopt())
        self.times.begin(time.perf_counter())

    def _abandon(self) -> None:
        """Nothing came of joining: the thread says goodbye, closes its bus and ends."""
        self._abandoned, thread, self._thread = True, self._thread, None
        self._end_thread()
        self._stopping.restore()
        if thread is not None and thread.ident:
            thread.join(timeout=10)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = self._failure if self._thread is not None else None
        self.close(save_state=error is None or isinstance(error, Stopped))
        if error is None:
            if failure is not None:  # since the last step, which could not tell
                raise failure
            self._stopping.leave_if_unseen()

    def close(self, save_state: bool = True) -> None:
        """Publish what is unpublished, flush it within `leave_s`, leave the run; sets `left_in_order`.

        save_state: save the optimizer's state for a later incarnation, unless the run is finished.

        Raises:
            LearnerReplaced: another process took this learner's place meanwhile.
        """
        if os.getpid() != self._pid:
            return  # forked inside the `with` block: the run is the parent's
        thread, self._thread = self._thread, None
        if thread is None:  # it is closed, or being closed
            return
        try:
            if thread.is_alive() and self._failure is None:
                self._leave(thread, save_state)
        finally:  # also at a second Ctrl-C: a thread that goes on would count as a learner
            self._end_thread()
            self._stopping.restore()
        thread.join(timeout=10)

    def _leave(self, thread: threading.Thread, save_state: bool) -> None:
        loop, exchange, rounds, recovery = self._loop, self._exchange, self._rounds, self._recovery
        assert loop is not None and exchange is not None  # noqa: S101, PT018  # _thread
        assert rounds is not None and recovery is not None  # noqa: S101, PT018  # _thread
        over = self._run_is_over()
        for publication in rounds.last(exchange.shared.windows, due=over):
            try:
                self._hand_over([publication], adopted=False)
            except UsageError as error:  # the model has changed
                structlog.get_logger().warning("last_delta_withheld", learner=self.id, error=str(error))
        leaving = ask(loop, exchange.leave(self._leave_s))
        recovery.close(exchange.shared, save_state and not over, self._leave_s)
        try:
            self.left_in_order = result_of(leaving, thread)
        except CancelledError:  # the thread failed meanwhile
            thread.join(timeout=10)
            raise self._failure or UsageError("the learner's own thread ended before it had left") from None
        if not self.left_in_order:
            structlog.get_logger().warning("leave_overrun", learner=self.id, safe="all that was uploaded")

    # --- inside: the training thread --------------------------------------------------------------------

    def _check(self) -> None:
        self._check_process()
        if self._failure is not None:
            raise self._failure
        if not self._joined.is_set() or self._thread is None:
            raise UsageError("the learner is not in a run: use it in a `with` block")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("this Learner was made in another process, which this one was forked from: make one here")

    def _run_is_over(self) -> bool:
        state = self._exchange.shared.state if self._exchange else None
        return state is not None and state.phase is not Phase.RUNNING

    def _adopt(self) -> bool:
        exchange, rounds, parameters = self._exchange, self._rounds, self._parameters
        assert exchange is not None and rounds is not None and parameters is not None  # noqa: S101, PT018
        arrived = sorted(exchange.shared.adoptions)
        for p in arrived:
            base = exchange.shared.adoptions.pop(p)
            parameters.overwrite(p, base.values)
            rounds.adopt(base)
        return bool(arrived)

    def _hand_over(self, publications: Iterable[Publication], adopted: bool) -> None:
        """Snapshot what is to be published and tell the exchange; waking its thread costs, so once a step."""
        exchange = self._exchange
        assert exchange is not None  # noqa: S101
        items = [(publication, self._snapshot(publication.base.fragment)) for publication in publications]
        if items or adopted:
            self._tell(exchange.stepped, items, adopted)

    def _snapshot(self, p: int) -> Callable[[], Any]:
        """What the encoder takes."""
        assert self._parameters is not None  # noqa: S101  # set with the rounds
        return self._parameters.on_device(p) if self._on_device else self._parameters.snapshot(p).numpy

    def _tell(self, what: Callable[..., None], *args: Any) -> None:
        """Have the exchange do something. One that has failed meanwhile does no more: the next step says why."""
        assert self._loop is not None  # noqa: S101
        with suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(what, *args)

    def _end_thread(self) -> None:
        """Have the exchange thread end; one that has not begun yet finds `_abandoned`."""
        if self._ended is not None:
            self._tell(self._ended.set)

    # --- inside: the exchange thread ----------------------------------------------------------------------

    def _exchange_thread(self, spec: Spec) -> None:
        try:
            with asyncio.Runner(loop_factory=fast_loop) as runner:
                runner.run(self._exchange_main(spec))
        except BaseException as error:  # shown to the training thread at its next call
            self._failure = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
        finally:
            self._joined.set()

    async def _exchange_main(self, spec: Spec) -> None:
        yield_core()
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        if self._abandoned:
            return
        work, ended = asyncio.create_task(self._take_part(spec)), asyncio.create_task(self._ended.wait())
        await asyncio.wait({work, ended}, return_when=asyncio.FIRST_COMPLETED)
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work

    async def _take_part(self, spec: Spec) -> None:
        """Until cancelled."""
        parameters, recovery = self._parameters, self._recovery
        assert parameters is not None and recovery is not None  # noqa: S101, PT018  # set before the thread starts
        bus = await reaching.reach(self._url, self._run, self.id)
        encoder = OnDevice(self.device) if self._on_device else OnHost(AT_ONCE)
        exchange = Exchange(bus, LoopClock(), self.id, self.incarnation, self._report, encoder=encoder)
        self._exchange = exchange
        try:
            await exchange.join(spec, layout_of(spec.tensors), lambda p: parameters.snapshot(p).numpy())
            async with meanwhile(exchange.run()):
                await self._recover_and_help(spec, bus, exchange, recovery)
        finally:
            if self._abandoned or not self._joined.is_set():
                await exchange.abandon()
            await bus.close()

    async def _recover_and_help(self, spec: Spec, bus: Bus, exchange: Exchange, recovery: Recovery) -> None:
        """The last part of joining, while the exchange follows the heads already; then the same for others."""
        assert self._rounds is not None  # noqa: S101  # set before the thread starts
        rounds, shared = self._rounds, exchange.shared
        peers = recovery.peers(bus, LoopClock(), spec.sync.chunk_bytes)
        await recovery.find(peers, tuple(base.version for base in shared.adoptions.values()), shared.state)
        self._joined.set()
        if peers is not None:
            await peers.answer(lambda: rounds.steps, recovery.take)
        await asyncio.Event().wait()

    def _report(self, left: bool) -> LearnerReport:
        rounds, loss = self._rounds, self._loss
        assert rounds is not None  # noqa: S101  # set before the thread starts
        counts = rounds.counts
        return LearnerReport(
            learner=self.id,
            incarnation=self.incarnation,
            step=counts.steps,
            tokens=counts.tokens,
            overwritten=counts.overwritten,
            published=counts.published,
            versions=rounds.versions,
            loss=None if loss is None else float(loss),
            left=left,
            **self.times.reported(time.perf_counter(), left),
            host=socket.gethostname(),
            device=str(self.device),
            threads=(torch.get_num_threads(), usable_cores()) if self.device.type == "cpu" else (0, 0),
        )
