"""The learner as a library: wrap your own model and loop; nothing here ever makes a step wait for the network.

    with Learner(model, optimizer, run="my-run", redis_url=...) as learner:
        for batch in loader:
            loss = step(batch)
            learner.step(tokens=batch.numel())
            if learner.finished:
                break

The training thread calls `step`, or its optimizer does (`attach`). A thread of its own (`exchange_thread`) does all
I/O. What the first one owns is `training`; what both see is `shared`: queues and dictionaries that neither side waits
on. Only parameters that require a gradient are synchronised; the inner optimizer's moments are kept across adoptions
(paper, learner).
"""

import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import Layout, layout_of
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.process.lifecycle import AGAIN_STATUS
from diloco.pipeline.settings import LEAVE_S, STATE_S, EncodeOn, SyncSettings
from diloco.workers.attached import Attached, alone, asking, asking_loss, say_unkept, unwrapped
from diloco.workers.batches import Batches
from diloco.workers.checks.arguments import check_arguments, one_loss, together, whole_tokens
from diloco.workers.checks.frozen_digests import check_frozen
from diloco.workers.checks.model_checks import check_model
from diloco.workers.exchange import reaching
from diloco.workers.exchange.exchange_thread import ExchangeThread, JoinedLearner
from diloco.workers.exchange.newest import Float32, read_newest
from diloco.workers.exchange.reaching import in_own_loop
from diloco.workers.life import Life
from diloco.workers.moments.optimizer_state import Optimizers
from diloco.workers.moments.own import Recover
from diloco.workers.moments.recovery import Source
from diloco.workers.moments.state_folder import StateFolder
from diloco.workers.names import state_with
from diloco.workers.parameters import tensor_table
from diloco.workers.progress_schedule import WARMUP, Shape, ShareByProgress
from diloco.workers.proposal import fitting, proposal
from diloco.workers.ranks.found import meet, ranks_of
from diloco.workers.ranks.rank_folder import RankFolder
from diloco.workers.ranks.shares import Shares
from diloco.workers.ranks.stuck import RankStopping
from diloco.workers.ranks.thread import RankThread
from diloco.workers.reading import begin_batches, begin_blocks
from diloco.workers.step_times import StepTimes
from diloco.workers.stopping import Stopped, Stopping
from diloco.workers.trainer.schedule import FRESH_MOMENTS_STEPS
from diloco.workers.training import Training, make_training


class Learner:
    """One learner of a run."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers | None = None,
        *,
        run: str | None = None,
        redis_url: str | None = None,
        learner_id: str | None = None,
        sync: SyncSettings | None = None,
        tokens: int | str | None = None,
        trainer: Mapping[str, Any] | None = None,
        leave_s: float = LEAVE_S,
        state_dir: str | Path | None = None,
        state_every_s: float = STATE_S,
        recover: Recover = "auto",
        log_losses: bool = False,
        encode_on: EncodeOn = "auto",
        same_frozen: bool = True,
        mesh: Any = None,
    ) -> None:
        """Nothing is connected before `with`, or `open`.

        Args:
            model: all its parameters that require a gradient are synchronised; they must be on their device. Which they
                are is settled on joining: `step` refuses to go on with a model that was changed since.
            optimizer: the inner one, a wrapper of it, or a list of several. Moments stay as a fragment is adopted.
            run: name of the run; default: the environment's DILOCO_RUN, else "run".
            redis_url: default: the environment's DILOCO_REDIS_URL.
            learner_id: unique among live learners; default: DILOCO_LEARNER_ID, else host, process id and a random part.
            sync: the protocol's constants, if this learner is the first; default: the run's, else defaults. A number
                of fragments that is not given is no more than the model has trained tensors.
            tokens: the run's budget, also as "2.5M": trained tokens of all learners together. The first party that has
                one sets it, this or `diloco syncer --tokens`; who comes with another one is refused.
            trainer: what else all learners must have in common (kept in the spec).
            leave_s: time to flush unpublished training when leaving.
            state_dir: a folder of this learner's own on its own disk, for the optimizer's moments, step counters and
                random states; a restart goes on from it. None: the optimizer keeps those that it has, or takes those of
                a live peer, or begins fresh.
            state_every_s: time between two savings.
            recover: "auto"; "peer": never from `state_dir`; "fresh": from nothing, whatever the optimizer has.
            log_losses: append the loss of each step to `state_dir`/losses.jsonl.
            encode_on: where deltas are encoded, and their bases and residuals lie: "cpu": in host memory; "device":
                where the model is, at 4 bytes a parameter, 8 to 12 if the codec quantizes; "auto": that, if it is CUDA.
            same_frozen: learners have the same frozen parameters, tensor by tensor, or are refused. The first one
                settles it for the run. False: they may differ (quantized in different ways, say), unlooked at.
            mesh: a DeviceMesh or a process group whose ranks are this learner together, or "world": all there are.
                Default: those of the model's DistributedDataParallel or `fully_shard`. Each makes a `Learner`, alike.

        Raises:
            UsageError: no Redis URL, losses to be logged to no folder, or an argument, a model or an optimizer that
                cannot be used, by name.
        """
        self._given = given = check_arguments(
            run=run,
            redis_url=redis_url,
            learner_id=learner_id,
            sync=sync,
            tokens=tokens,
            trainer=dict(trainer) if isinstance(trainer, Mapping) else trainer,
            leave_s=leave_s,
            state_dir=state_dir,
            state_every_s=state_every_s,
            recover=recover,
            log_losses=log_losses,
            encode_on=encode_on,
            same_frozen=same_frozen,
        )
        self._url = reaching.url_of(given.redis_url)
        self.model, self.optimizer = model, optimizer
        self.incarnation = secrets.token_hex(8)
        self.id = given.learner_id or f"{socket.gethostname()[:40]}-{os.getpid()}-{self.incarnation[:6]}"
        self.device, self._mesh = check_model(model), mesh
        self._ranks = ranks_of(model, mesh)
        if self._ranks and given.encode_on == "device":
            raise UsageError("encode_on='device' with several ranks: they gather deltas in host memory")
        if given.sync is not None:
            tensor_table(model, fitting(given.sync, model))
        self._inner = [] if optimizer is None else unwrapped(model, optimizer or [optimizer])
        if given.same_frozen:
            check_frozen(model)
        self.left_in_order = False
        """After leaving: everything unpublished got away in time."""
        self.times = StepTimes()
        self._stopping = RankStopping() if self._ranks else Stopping()
        self._life = Life(self._stopping)
        self._attached: Attached | None = None
        self._batches: Batches | None = None

    # --- what a training loop sees ------------------------------------------------------------------

    def step(self, tokens: int | torch.Tensor, loss: float | torch.Tensor | None = None) -> None:
        """Count an inner step just done, adopt what has arrived, publish what is due. Never waits for the network.

        Args:
            tokens: trained in this step: a whole number from 0 (nothing: all of the batch was masked), also as a numpy
                or torch scalar; one on a CUDA device is read at once, which waits for the device.
            loss: one number, shown in reports; a tensor is read later, in the other thread.

        Raises:
            UsageError: an argument that is none of that, the model is no longer the one that is synchronised, or the
                learner is attached to its optimizer.
        """
        if self._attached is not None:
            raise UsageError("step() beside attach(): the optimizer's own steps are counted already, so leave it out")
        self._step(whole_tokens(tokens), one_loss(loss))

    def attach(
        self,
        tokens: int | Callable[[], int | torch.Tensor],
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        loss: Callable[[], float | torch.Tensor | None] | None = None,
    ) -> None:
        """Do what `step` does by itself, at the end of each `optimizer.step()`, until the learner is closed.

        An inner step is over once the last of the optimizers has stepped. Where that one sits a step out (it steps
        seldom, or a GradScaler skips it), the step is counted right before the next one's first update. A step that
        the GradScaler skips in all of them is not counted. One on CUDA that is fused tells so a step later: it is
        counted, and the following ones are counted with as much less.

        What is adopted is there when `optimizer.step()` returns, before schedulers step and an average of weights is
        updated. Gradients that are kept beyond it are of the values before. LBFGS steps once however often it calls
        its closure, and does not know that what it has seen of curvature lies before the adoption.

        Args:
            tokens: trained in an inner step, all of its micro-batches together: a number, or what is called for it
                when the step's first update is made.
            optimizers: in the order in which they step; each may be a wrapper. Default: the learner's own, whose
                moments alone are kept. One that is not named may step as it likes: it travels with the next delta.
            loss: called with the tokens, for one number to be shown in reports; a tensor is read later, in the other
                thread. None: this step has none to tell.

        Raises:
            UsageError: the learner is not open, steps are counted already, or an optimizer trains nothing of the model.
        """
        joined = self.joined
        if self._attached is not None or joined.training.rounds.steps:
            how = "attached already: name all optimizers at once" if self._attached else "told of steps by step()"
            raise UsageError(f"attach(): the learner is {how}; each step is counted once")
        given = self.optimizer if optimizers is None else optimizers
        hooked = unwrapped(self.model, given)
        self._attached = Attached(hooked, asking(tokens), asking_loss(loss), self._step)
        say_unkept(hooked, self._inner)

    def _step(self, tokens: int, loss: float | torch.Tensor | None = None) -> None:
        entered = time.perf_counter()
        joined = self.joined
        tokens = 0 if joined.late else tokens  # a trainer may look only after a step: the finished run's sums stay
        training = joined.training
        training.watch.look(entered)
        self.times.entered(entered)
        if self._batches is not None:
            self._batches.stepped()
        tokens = joined.stepped(tokens)
        training.loss = training.loss if loss is None else loss
        training.keeper.stepped(joined.shared, joined.progress, loss)
        self.times.returned(entered, time.perf_counter(), tokens)
        self._stopping.stepped()

    @property
    def finished(self) -> bool:
        """The run has reached its budget or is asked to end, or this process is (SIGTERM, SIGHUP): leave the loop."""
        return self._life.entered.ended(self._stopping) if self._life.entered else self._stopping.asked

    @property
    def over(self) -> bool:
        """The run has reached its budget or is asked to end."""
        return self._life.entered is not None and self._life.entered.over

    @property
    def exit_status(self) -> int:
        """For `sys.exit` at the program's end: 75 if it was asked to end and the run goes on without it, else 0."""
        return AGAIN_STATUS if self._stopping.came and not self.over else 0

    @property
    def progress(self) -> float:
        """Trained tokens of the whole run / its budget, in 0..1: what learning-rate schedules go by."""
        return self._life.entered.progress if self._life.entered else 0.0

    def progress_schedule(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        shape: Shape = "cosine",
        warmup: float = WARMUP,
        decay: float = 0.2,
        final: float = 0.1,
    ) -> LambdaLR:
        """A schedule of learning rates by the run's progress, which all learners and restarts have in common.

        Its `step` is called after each `optimizer.step()`. Before joining the progress is 0. A learner that comes back
        without moments, or with young ones of its own, ramps up besides over its first 20 steps. A copy, such as a
        pickled one, stays at the progress of its making.

        Args:
            optimizer: of which the rates are, or a wrapper of it; its present rates are the peak. Default: the
                learner's.
            shape: after the warm-up a "cosine" or a "linear" fall to `final` of the peak; "constant": the peak, and a
                linear fall in the last part of the run.
            warmup: share of the budget in which rates rise linearly.
            decay: length of that last part, as share of the budget.
            final: share of the peak at the end.

        Raises:
            UsageError: one of these is out of bounds, or there is no optimizer of this model.
        """

        def at() -> tuple[float, int, int]:
            entered = self._life.entered
            young = entered is not None and self.recovered in ("checkpoint", "fresh")
            steps = entered.training.rounds.steps if entered else 0
            return self.progress, self.earlier_steps + steps, FRESH_MOMENTS_STEPS * young

        optimizer = alone(self.model, self.optimizer if optimizer is None else optimizer)
        return LambdaLR(optimizer, ShareByProgress((shape, warmup, decay, final), at))

    @property
    def recovered(self) -> Source:
        """Where the optimizer's moments came from: "start" (of the run), "checkpoint", "optimizer", "peer" or "fresh".

        "optimizer": it had them as the learner joined, as a trainer loads them with a checkpoint of its own.
        """
        return self._life.entered.training.keeper.source if self._life.entered else "start"

    @property
    def earlier_steps(self) -> int:
        """Inner steps of this learner's earlier incarnations, as its checkpoint knows them; else 0."""
        return self._life.entered.training.keeper.earlier_steps if self._life.entered else 0

    @property
    def spec(self) -> Spec:
        """What the run has agreed on."""
        return self._life.once_joined.training.spec

    @property
    def joined(self) -> JoinedLearner:
        """Its parts, while it is in its run: for this class, and for whoever measures or tests it.

        Raises:
            UsageError: it is not in a run, or not of this process.
            DilocoError: what its other thread has ended by.
        """
        return self._life.joined

    def globals(self) -> dict[str, Any]:
        """The whole model as a state dict, with the newest global values of what is trained, whatever stands here.

        Reads the run's heads once more, which waits for the network; training is not touched. The names are those of
        the plain model, without `_orig_mod.` of torch.compile or `module.` of DistributedDataParallel. Global values
        are in host memory, in the parameters' types, and as precise as learners pull them (`global_codec`). What is
        not trained is this model's own, not a copy.

        After `close` in a run that ends, its last merges are waited for: then it is the finished run's model.

        Raises:
            UsageError: the learner has not joined its run yet.
            SpecMismatch, BusError, BadPayload: the run is no longer there, or cannot be read for a minute.
        """
        layout = self._life.once_joined.training.layout
        return state_with(self.model, layout.whole(self._read(range(len(layout.fragments)))))

    def load_globals(self) -> None:
        """Put the newest global values into the model, in place, after `close`; the optimizer keeps its moments.

        What saves the model afterwards saves the run's, and not this learner's own last steps. Waits as `globals`.
        All ranks of a learner call it, and have the same values then, also in a run that goes on.

        Raises:
            UsageError: the learner is in its run, or has not joined; or the model was changed since.
            SpecMismatch, BusError, BadPayload: as `globals`.
            RankGone: another rank has not called it within minutes, or could not read.
        """
        if self._life.in_run:
            raise UsageError(
                "load_globals() in a run would undo what was trained and is not published: close() first. globals() "
                "gives the same while it trains"
            )
        training = self._life.once_joined.training
        training.watch.look(math.inf)
        for p, flat in enumerate(self._life.once_joined.newest(self._read)):
            training.parameters.overwrite(p, flat)

    def _read(self, fragments: Iterable[int]) -> list[Float32]:
        """Their newest globals (elements,)."""
        training, left = self._life.once_joined.training, not self._life.in_run
        given = self._url, self._given.run, training.spec, training.layout
        return in_own_loop(read_newest(*given, fragments, left=left))

    def blocks(self, total: int, per_shard: int) -> Iterator[tuple[int, int]]:
        """Endless (epoch, index) of data blocks from the run's work queue; a shard is acknowledged when read.

        Waits for the first shard before it returns: this is still part of joining. Of several ranks rank 0 alone may
        call it, and tells the others what to read.

        Args:
            total: blocks in an epoch; every learner must say the same.
            per_shard: blocks handed out at a time.
        """
        return begin_blocks(lambda: self.joined, self._stopping, total, per_shard)

    def batches(self, length: int, batch_size: int, *, seed: int = 0, accumulate: int = 1) -> Batches:
        """Indices of a dataset from the run's work queue: `DataLoader(dataset, batch_sampler=learner.batches(...))`.

        A shard is acknowledged when it is trained on, as `step` or `attach` tell. Waits for the first one, as `blocks`.

        Args:
            length, seed: of the dataset, and of each epoch's permutation; every learner must say the same.
            batch_size: indices in a batch; of several ranks, which all call this alike: in a batch of this one.
            accumulate: batches that an inner step trains.

        Raises:
            SpecMismatch: the run has another length or seed.
            UsageError: an argument is no such number, or the learner reads already, or is not in its run.
        """
        self._batches = begin_batches(lambda: self.joined, self._stopping, length, batch_size, seed, accumulate)
        return self._batches

    @staticmethod
    def read_spec(redis_url: str, run: str) -> Spec | None:
        """The spec of a run that is already there, else None. For a trainer that joins knowing nothing."""
        return reaching.read_spec(redis_url, run)

    # --- joining and leaving --------------------------------------------------------------------------

    def open(self) -> Self:
        """Join: connect, agree with the run, fetch the model. Whatever it raises, nothing of it is left behind.

        `with` does the same, and closes at its end. Without `with`, `close` belongs in a `finally`: a program that ends
        without it ends as if it had been killed.

        Raises:
            UsageError: it was opened before, was closed meanwhile by another thread, or is not of this process.
            IdTaken: another process has this learner's id.
            SpecMismatch: the run was set up otherwise.
            SystemExit: SIGTERM or SIGHUP came.
        """
        self._life.open(self._prepare)
        if self._life.once_joined.late:
            detail = "it has its model; to train on: diloco runs extend NAME --tokens N, or another name of the run"
            structlog.get_logger().warning("run_finished_already", learner=self.id, run=self._given.run, detail=detail)
        return self

    def __enter__(self) -> Self:
        """As `open`."""
        return self.open()

    def _prepare(self) -> tuple[Training, ExchangeThread]:
        self.device = check_model(self.model)  # it may have changed, or have been moved, since it was judged
        self._check_ranks()
        if self._ranks:
            return self._prepare_rank()
        spec = self._proposal()
        training = self._training(spec, folder=partial(RankFolder.of_one, whole=layout_of(spec.tensors).trained))
        return training, ExchangeThread(self._url, self._given.run, training)

    def _prepare_rank(self) -> tuple[Training, ExchangeThread]:
        who = self.id, self.incarnation
        assert isinstance(self._stopping, RankStopping)  # noqa: S101  # made so, for ranks
        meeting = meet(self._ranks, self.model, self._proposal, who, together(self._given))
        (self.id, self.incarnation), spec = meeting.learner, meeting.spec
        shares = Shares(layout_of(spec.tensors), meeting.held)
        folder = partial(RankFolder, whole=shares.layout.trained, held=meeting.held, rank=meeting.rank)
        training = self._training(spec, shares.local(meeting.rank), folder)
        training.ranks = len(meeting.held)
        return training, RankThread(self._url, self._given.run, training, meeting, shares, self._stopping)

    def _check_ranks(self) -> None:
        if ranks_of(self.model, self._mesh) != self._ranks:
            raise UsageError("the model has other ranks than as its learner was made: set them up, and wrap it, before")

    def _proposal(self) -> Spec:
        """By what stands already: the run's spec; or, where it has none, the budget that a syncer waits for it with."""
        beginning, where = reaching.Beginning(), (self._url, self._given.run)
        held = reaching.wait_for_spec(partial(self.read_spec, *where), self.id, self._life.go_on_joining)
        if held is None:
            beginning = reaching.wait_for_spec(partial(reaching.read_beginning, *where), self.id, self._life.go_on_joining)
        return proposal(self.model, self._given, held, beginning)

    def _training(
        self, spec: Spec, own: Layout | None = None, folder: Callable[[Path, Layout], StateFolder] = StateFolder
    ) -> Training:
        given = self.model, self._inner, self._given, self.device, self.times, own, folder, self._check_ranks
        return make_training((self.id, self.incarnation), spec, *given)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            stopped = isinstance(error, Stopped)
            self._leave(save_state=stopped, error=None if stopped else error)

    def close(self, save_state: bool = True) -> None:
        """Publish what is unpublished, flush it within `leave_s`, leave the run; sets `left_in_order`.

        Again, or never opened: nothing happens. One that is joining in another thread gives it up.

        Args:
            save_state: save the optimizer's state for a later incarnation.

        Raises:
            LearnerReplaced: another process took this learner's place meanwhile.
            DilocoError: what its other thread has ended by, if no call has told so before.
            SystemExit: SIGTERM or SIGHUP came, and nobody has asked whether the learner is `finished`.
        """
        failure = self._life.untold_failure
        if self._leave(save_state):
            if failure is not None:  # since the last step, which could not tell
                raise failure
            self._stopping.leave_if_unseen()

    def _leave(self, save_state: bool, error: BaseException | None = None) -> bool:
        """As `close`; whether it was in its run until now. error: that has ended the loop, on this rank alone."""

        def flush(joined: JoinedLearner) -> None:
            if error is not None and joined.breaks_off(error):
                return
            self.left_in_order = joined.leave(self._given.leave_s, save_state)

        if self._life.is_here:
            attached, self._attached = self._attached, None
            if attached is not None:
                attached.detach()
                self._say_if_none_stepped()
        return self._life.leave(flush)

    def _say_if_none_stepped(self) -> None:
        joined = self._life.once_joined
        if joined.training.rounds.steps == 0 and not joined.late:
            detail = "attached, but none of its optimizers has stepped: if the loop has trained, then with another one"
            structlog.get_logger().warning("no_step_counted", learner=self.id, detail=f"{detail}, made after attach()")
