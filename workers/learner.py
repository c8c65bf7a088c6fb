"""Wrap your own model and training loop as a learner of a run; no step ever waits for the network.

    with Learner(model, optimizer, run="my-run", redis_url=...) as learner:
        for batch in loader:
            loss = step(batch)
            learner.step(tokens=batch.numel())
            if learner.finished:
                break

The training thread calls `step`; after `attach`, its optimizer does so. A second thread does all I/O: `joined` says
which thread owns what, and leads from `step` to the bus. Only parameters that require a gradient are synchronised. The
inner optimizer keeps its moments when a fragment is adopted (paper, learner).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import structlog
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import Layout, layout_of
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.settings import LEAVE_S, STATE_S, EncodeOn, SyncSettings
from diloco.workers.attached import Attached, alone, asking, asking_loss, unwrapped, warn_replaced, warn_unkept
from diloco.workers.base_learner import BaseLearner
from diloco.workers.checks.arguments import check_arguments, one_loss, together, whole_tokens
from diloco.workers.checks.frozen_digests import check_frozen
from diloco.workers.checks.model_checks import check_adoptions, check_model
from diloco.workers.checks.model_watch import ModelWatch
from diloco.workers.device_encoding import OnDevice
from diloco.workers.joined import LearnerThread
from diloco.workers.moments.keeper import Keeper
from diloco.workers.moments.local_state import Recover, RecoveryOptions, own_moments
from diloco.workers.moments.optimizer_state import Optimizers
from diloco.workers.moments.recovery import Recovery
from diloco.workers.moments.state_folder import StateFolder
from diloco.workers.moments.stateful import Stateful
from diloco.workers.names import state_with
from diloco.workers.parameters import Adopted, FragmentParameters, described, trained_tensors
from diloco.workers.progress_schedule import WARMUP, Shape, ShareByProgress
from diloco.workers.proposed import Proposed
from diloco.workers.ranks.placement import Shares
from diloco.workers.ranks.rank_folder import RankFolder
from diloco.workers.ranks.rank_learner import RankThread
from diloco.workers.ranks.shutdown import RankStopping
from diloco.workers.ranks.topology import check_ranks, ranks_of, rendezvous
from diloco.workers.rounds import Rounds
from diloco.workers.spec_proposal import fitting
from diloco.workers.stopping import Stopping
from diloco.workers.training import Training

# The learners of this process, to find two of one model.
_made = WeakSet["Learner"]()


class Learner(BaseLearner):
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
        state: Mapping[str, Stateful] | None = None,
        encode_on: EncodeOn = "auto",
        same_frozen: bool = True,
        mesh: Any = None,
        adopted: Adopted | None = None,
    ) -> None:
        """Make a learner. It connects to nothing before `with` or `open`.

        Args:
            model: all parameters that require a gradient are synchronised; they must be on their device already. The
                set of trained parameters is fixed when the learner joins: `step` refuses a model that was changed
                since.
            optimizer: the inner optimizer, a wrapper of it, or a list of several. It keeps its moments when a fragment
                is adopted.
            run: name of the run; default: DILOCO_RUN from the environment, else "run".
            redis_url: default: DILOCO_REDIS_URL from the environment.
            learner_id: must be unique among live learners; default: DILOCO_LEARNER_ID, else host name, process id and a
                random part.
            sync: the protocol's constants, used if this learner is the first. Default: the run's, otherwise those of a
                waiting syncer, else the package's defaults. If no number of fragments is given, there are no more than
                trained tensors (plus one for buffers).
            tokens: the run's budget, in trained tokens of all learners together; "2.5M" is accepted too. The first
                party that has a budget sets it, by this argument or by `diloco syncer --tokens`; a party with another
                budget is refused.
            trainer: further values that all learners must have in common (kept in the spec).
            leave_s: seconds to flush unpublished training when leaving.
            state_dir: a folder on the local disk that belongs only to this learner, for the optimizer's moments, step
                counters and random states; a restart continues from it. None: the optimizer keeps the moments that it
                has, or takes those of a live peer, or begins fresh.
            recover: "auto": see `state_dir`; "peer": never read `state_dir`; "fresh": begin from nothing, even if the
                optimizer has moments.
            state_every_s: seconds between two savings.
            log_losses: append each step's loss to `state_dir`/losses.jsonl.
            state: objects with `state_dict` and `load_state_dict`, by name, such as a `StatefulDataLoader`. Their
                states are saved to `state_dir` with the moments, at the end of the same step. If the learner comes
                back, they are loaded before `open` returns, so begin to iterate after that (not with `recover` "peer"
                or "fresh"). Each rank keeps its own, but ranks that divide layers all take the first one's.
            encode_on: where deltas are encoded and their bases and residuals are kept. "cpu": in host memory; "device":
                on the model's device, at 4 bytes per parameter, or 8 to 16 if the codec quantizes; "auto": "device" if
                that is CUDA.
            same_frozen: require all learners to have the same frozen parameters, tensor by tensor; others are refused.
                The first learner settles this for the run. False: frozen parameters may differ (quantized in different
                ways, say) and are not compared.
            mesh: a DeviceMesh or a process group whose ranks form this one learner, or "world" for all ranks. Default:
                those of the model's DistributedDataParallel, `fully_shard` or tensor parallelism. Each rank makes a
                `Learner` with the same arguments.
            adopted: called with each parameter that the run's values were written into, including when it joins, with
                its previous values, in the training thread and without gradients. It is for copies of the weights from
                which the loop or its optimizer continues, such as fp32 masters: an optimizer with such copies is
                refused without it.

        Raises:
            UsageError: there is no Redis URL, or an argument, a model or an optimizer cannot be used; the message names
                it.
        """
        given = check_arguments(
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
            state=dict(state) if isinstance(state, Mapping) else state,
            encode_on=encode_on,
            same_frozen=same_frozen,
        )
        self.model, self.optimizer = model, optimizer
        self.device, self._mesh = check_model(model), mesh
        self._ranks = ranks_of(model, mesh)
        super().__init__(given, RankStopping() if self._ranks else Stopping())
        if self._ranks and given.encode_on == "device":
            raise UsageError(
                "encode_on='device' cannot be used with several ranks, which gather deltas in host "
                "memory: set encode_on='cpu'"
            )
        if given.sync is not None:
            proposed = self._proposed()
            proposed.tensor_table(fitting(given.sync, proposed))
        self._inner = [] if optimizer is None else unwrapped(model, optimizer)
        if not (adopted is None or callable(adopted)):
            raise UsageError("adopted=...: pass a function that takes a parameter and its previous values")
        self._adopted = adopted
        self._check_adoptions(self._inner)
        if given.same_frozen:
            check_frozen(model)
        self._attached: Attached | None = None
        self._parameter_ids = frozenset[int]()
        _made.add(self)

    def step(self, tokens: int | torch.Tensor, loss: float | torch.Tensor | None = None) -> None:
        """Count the inner step just done, adopt what has arrived, publish what is due. Never waits for the network.

        Args:
            tokens: number trained in this step: a whole number from 0 (0: the whole batch was masked), including a
                numpy or torch scalar. A scalar on a CUDA device is read at once, which waits for the device.
            loss: one number, shown in reports. A tensor is copied at once, so the caller may overwrite it. For one on a
                CUDA device the copy is asynchronous, and the loss is shown once it is there.

        Raises:
            UsageError: an argument is none of these, the model is no longer the one that is synchronised, or the
                learner is attached to its optimizer.
        """
        if self._attached is not None:
            raise UsageError(
                "step() after attach(): remove this call, since the optimizer's own steps are already counted"
            )
        self._step(whole_tokens(tokens), one_loss(loss))

    def attach(
        self,
        tokens: int | Callable[[], int | torch.Tensor],
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        loss: Callable[[], float | torch.Tensor | None] | None = None,
    ) -> None:
        """Do what `step` does at the end of each `optimizer.step()`, until the learner is closed.

        An inner step is over once the last of the optimizers has stepped. If the last one sits a step out (because it
        steps seldom, or a GradScaler skips it), the inner step is counted right before the first update of the next
        one. A step that the GradScaler skips in all optimizers is not counted. A fused optimizer on CUDA reveals a skip
        only a step later: the skipped step is counted at first, and the following ones are counted with that many
        tokens less.

        Adopted values are in the model when `optimizer.step()` returns, before schedulers step and before an average of
        the weights is updated. Gradients that are kept beyond that point belong to the values before. LBFGS steps once
        however often it calls its closure, and does not know that its curvature history predates the adoption.

        Args:
            tokens: number trained in an inner step, all of its micro-batches together, or a callable that returns it;
                it is called when the first update of the step is made.
            optimizers: in the order in which they step; each may be a wrapper. Default: the learner's own, which are
                also the only ones whose moments are kept. The steps of an optimizer that is not named are not counted;
                its updates travel with the next delta.
            loss: called together with `tokens`, for one number to be shown in reports, as in `step`. It may return None
                if this step has no loss to report.

        Raises:
            UsageError: the learner is not open, steps were counted already, or an optimizer trains nothing of the
                model.
        """
        joined = self.joined
        if self._attached is not None or joined.training.rounds.steps:
            how = (
                "already attached: pass all optimizers in one call"
                if self._attached
                else ("already counting by step()")
            )
            raise UsageError(f"attach(): the learner is {how}; each step must be counted only once")
        given = self.optimizer if optimizers is None else optimizers
        hooked = unwrapped(self.model, given)
        self._check_adoptions([one for one in hooked if all(one is not known for known in self._inner)])
        self._attached = Attached(hooked, asking(tokens), asking_loss(loss), self._step)
        warn_unkept(hooked, self._inner)
        warn_replaced(hooked)

    def progress_schedule(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        shape: Shape = "cosine",
        warmup: float = WARMUP,
        decay: float = 0.2,
        final: float = 0.1,
    ) -> LambdaLR:
        """Return a schedule of learning rates that follows the run's progress, which all learners and restarts share.

        Call its `step` after each `optimizer.step()`. Before joining, the progress is 0. A learner that comes back
        without moments, or with young ones of its own, also ramps up over its first 20 steps. A copy of the schedule,
        such as a pickled one, stays at the progress at which it was made.

        Args:
            optimizer: the one whose rates are scheduled, or a wrapper of it; its current rates are the peak. Default:
                the learner's.
            shape: after the warm-up, "cosine" or "linear": falls to `final` of the peak; "constant": stays at the peak,
                and falls linearly in the last part of the run.
            warmup: share of the budget over which rates rise linearly.
            decay: length of the last part of "constant", as a share of the budget.
            final: share of the peak at the end.

        Raises:
            UsageError: an argument is out of bounds, or there is no optimizer of this model.
        """
        optimizer = alone(self.model, self.optimizer if optimizer is None else optimizer)
        return LambdaLR(optimizer, ShareByProgress((shape, warmup, decay, final), self._schedule_inputs))

    def globals(self) -> dict[str, Any]:
        """Return a state dict of the whole model with the newest global values of the trained tensors.

        This reads the run's heads, and so waits for the network; the model itself is not changed, and training can go
        on. Names are the plain model's, without `_orig_mod.` of torch.compile or `module.` of DistributedDataParallel.
        Global values are in host memory, in the parameters' types, with the precision with which learners pull them.
        Tensors that are not trained are this model's own, not copies.

        After `close` in a run that is ending, this waits for the last merges: the result is then the finished run's
        model.

        Raises:
            UsageError: the learner has not joined its run yet.
            SpecMismatch, BusError, BadPayload: the run is no longer there, or could not be read for a minute.
        """
        layout = self._once_joined.training.layout
        return state_with(self.model, layout.whole(self._read(range(len(layout.fragments)))))

    def load_globals(self) -> None:
        """Write the newest global values into the model, in place, after `close`; the optimizer keeps its moments.

        A save of the model afterwards saves the run's values, and not this learner's own last steps. The call waits in
        the same way as `globals`. All ranks of a learner must call it, and then have the same values, even in a run
        that continues.

        Raises:
            UsageError: the learner is still in its run, or has never joined, or the model was changed since.
            SpecMismatch, BusError, BadPayload: see `globals`.
            RankGone: another rank has not called it within minutes, or could not read.
        """
        if self._in_run:
            raise UsageError(
                "load_globals() during a run would undo unpublished training: call close() first, or use globals(), "
                "which returns the same values during training"
            )
        training = self._once_joined.training
        assert training.watch is not None  # noqa: S101  # `_training` makes one
        training.watch.inspect(math.inf)
        for p, flat in enumerate(self._once_joined.newest(self._read)):
            training.parameters.overwrite(p, flat)

    def _prepare(self) -> LearnerThread | RankThread:
        self.device = check_model(self.model)  # the model may have changed or moved since __init__ checked it
        held = self._parameter_ids = frozenset(map(id, trained_tensors(self.model).values()))
        for other in {one for one in _made if one is not self and one._is_training}:
            if other._attached is not None and other._given.run == self._given.run:  # its optimizer keeps it
                detail = f"learner {other.id} of this run is still attached in this process, and counts as live: "
                structlog.get_logger().warning("learner_still_open", learner=self.id, detail=detail + "close() it")
            if held & other._parameter_ids:
                raise UsageError(
                    f"this model is already trained by learner {other.id}, so its steps would count twice: close() "
                    "that learner first, or use it"
                )
        check_ranks(self._ranks, self.model, self._mesh)
        run = self._url, self._given.run
        if not self._ranks:
            spec = self._proposal()
            layout = layout_of(spec.tensors)
            return LearnerThread(*run, self._training(spec, layout, partial(RankFolder.of_one, whole=layout.trained)))
        assert isinstance(self._stopping, RankStopping)  # noqa: S101  # __init__ makes one if there are ranks
        who = self.id, self.incarnation
        group = rendezvous(self._ranks, self.model, self._proposal, who, together(self._given))
        (self.id, self.incarnation), spec = group.learner, group.spec
        shares = Shares(layout_of(spec.tensors), group.held)
        folder = partial(
            RankFolder, whole=shares.layout.trained, held=group.held, rank=group.rank, of=group.place.first
        )
        training = self._training(spec, shares.local(group.rank), folder)
        training.ranks = len(group.held)
        return RankThread(*run, training, group, shares, self._stopping)

    def _check_adoptions(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if self._adopted is None:
            check_adoptions(self.model, optimizers)

    def _proposed(self, held: Spec | None = None) -> Proposed:
        return described(self.model)

    def _training(self, spec: Spec, own: Layout, make_folder: Callable[[Path, Layout], StateFolder]) -> Training:
        """own: layout of the part that this process holds: everything, unless it is one of several ranks."""
        given, layout = self._given, layout_of(spec.tensors)
        rounds, parameters = Rounds(layout, spec.sync), FragmentParameters(self.model, own, self._adopted)
        folder = None if given.state_dir is None else Path(given.state_dir)
        moments = own_moments(
            self.model,
            self._inner,
            own.trained,
            run=given.run,
            learner=self.id,
            incarnation=self.incarnation,
            options=RecoveryOptions(given.recover, folder, given.state_every_s, given.log_losses, given.state or {}),
            make_folder=make_folder,
        )
        names = {tensor.name for tensor in spec.tensors}
        # A bound method would let the exchange thread hold the learner.
        check = partial(check_ranks, self._ranks, self.model, self._mesh, names)
        watch = ModelWatch(self.model, names, check=check, optimizers=self._inner)
        who, recovery, keeper = (self.id, self.incarnation), Recovery(moments), Keeper(moments, rounds)
        training = Training(*who, spec, layout, rounds, parameters, recovery, keeper, self.times, watch)
        if given.encode_on == "device" or (given.encode_on == "auto" and self.device.type == "cuda"):
            training.on_device, training.encoder = parameters.on_device, OnDevice(self.device)
        return training

    def _leave(self, save_state: bool, error: BaseException | None = None) -> bool:
        if self._is_here:
            attached, self._attached = self._attached, None
            if attached is not None:
                attached.detach()
                self._warn_if_none_stepped()
        return super()._leave(save_state, error)

    def _warn_if_none_stepped(self) -> None:
        joined = self._once_joined
        if joined.training.rounds.steps == 0 and not joined.late:
            detail = "none of the attached optimizers has stepped: if the loop has trained, it used a different one"
            structlog.get_logger().warning(
                "no_step_counted", learner=self.id, detail=f"{detail}, created after attach()"
            )
