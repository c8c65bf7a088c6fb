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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from diloco.pipeline.errors import UsageError
from diloco.pipeline.fragments import Layout, layout_of
from diloco.pipeline.messages.spec import Spec, SyncSpec, TensorSpec
from diloco.pipeline.settings import LEAVE_S, STATE_S, EncodeOn, SyncSettings
from diloco.workers.attached import Attached, alone, asking, asking_loss, say_replaced, say_unkept, unwrapped
from diloco.workers.base_learner import BaseLearner
from diloco.workers.checks.arguments import check_arguments, one_loss, together, whole_tokens
from diloco.workers.checks.frozen_digests import check_frozen, frozen_digests
from diloco.workers.checks.model_checks import check_adoptions, check_model
from diloco.workers.exchange.exchange_thread import ExchangeThread
from diloco.workers.moments.local_state import Recover
from diloco.workers.moments.optimizer_state import Optimizers
from diloco.workers.moments.state_folder import StateFolder
from diloco.workers.names import state_with
from diloco.workers.parameters import Adopted, fitting_fragments, tensor_table, trained_tensors
from diloco.workers.progress_schedule import WARMUP, Shape, ShareByProgress
from diloco.workers.ranks.rank_folder import RankFolder
from diloco.workers.ranks.rank_thread import RankThread
from diloco.workers.ranks.row_ranges import Shares
from diloco.workers.ranks.topology import meet, ranks_of
from diloco.workers.ranks.watchdog import RankStopping
from diloco.workers.spec_proposal import fitting
from diloco.workers.stopping import Stopping
from diloco.workers.training import Training, make_training


class TorchModel:
    """A module as a run is proposed with it."""

    def __init__(self, model: nn.Module) -> None:
        """model: judged (`model_checks`)."""
        self._model = model

    @property
    def trained(self) -> int:
        """As `Proposed`."""
        return len(trained_tensors(self._model))

    def fitting_fragments(self, wanted: int) -> int:
        """As `Proposed`."""
        return fitting_fragments(self._model, wanted)

    def tensor_table(self, sync: SyncSettings | SyncSpec, held: Sequence[TensorSpec] = ()) -> tuple[TensorSpec, ...]:
        """As `Proposed`."""
        return tensor_table(self._model, sync)

    def frozen(self) -> tuple[tuple[str, bytes], ...]:
        """As `Proposed`."""
        return frozen_digests(self._model)


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
        encode_on: EncodeOn = "auto",
        same_frozen: bool = True,
        mesh: Any = None,
        adopted: Adopted | None = None,
    ) -> None:
        """Nothing is connected before `with`, or `open`.

        Args:
            model: all its parameters that require a gradient are synchronised; they must be on their device. Which they
                are is settled on joining: `step` refuses to go on with a model that was changed since.
            optimizer: the inner one, a wrapper of it, or a list of several. Moments stay as a fragment is adopted.
            run: name of the run; default: the environment's DILOCO_RUN, else "run".
            redis_url: default: the environment's DILOCO_REDIS_URL.
            learner_id: unique among live learners; default: DILOCO_LEARNER_ID, else host, process id and a random part.
            sync: the protocol's constants, if this learner is the first; default: the run's, else those of a waiting
                syncer, else defaults. A number of fragments that is not given is no more than the model has trained
                tensors.
            tokens: the run's budget, also as "2.5M": trained tokens of all learners together. The first party that has
                one sets it, this or `diloco syncer --tokens`; who comes with another one is refused.
            trainer: what else all learners must have in common (kept in the spec).
            leave_s: time to flush unpublished training when leaving.
            state_dir: a folder of this learner's own on its own disk, for the optimizer's moments, step counters and
                random states; a restart goes on from it. None: the optimizer keeps those that it has, or takes those of
                a live peer, or begins fresh.
            recover: "auto"; "peer": never from `state_dir`; "fresh": from nothing, whatever the optimizer has.
            state_every_s, log_losses: time between two savings; append each step's loss to `state_dir`/losses.jsonl.
            encode_on: where deltas are encoded, and their bases and residuals lie: "cpu": in host memory; "device":
                where the model is, at 4 bytes a parameter, 8 to 16 if the codec quantizes; "auto": that, if it is CUDA.
            same_frozen: learners have the same frozen parameters, tensor by tensor, or are refused. The first one
                settles it for the run. False: they may differ (quantized in different ways, say), unlooked at.
            mesh: a DeviceMesh or a process group whose ranks are this learner together, or "world": all there are.
                Default: those of the model's DistributedDataParallel or `fully_shard`. Each makes a `Learner`, alike.
            adopted: called with each parameter that the run's values were written into, on joining too, and with its
                values before, in the training thread and without gradients. For copies of the weights that the loop or
                its optimizer goes on from, such as fp32 masters: an optimizer that has some is refused without it.

        Raises:
            UsageError: no Redis URL; or an argument, a model or an optimizer that cannot be used, by name.
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
            encode_on=encode_on,
            same_frozen=same_frozen,
        )
        self.model, self.optimizer = model, optimizer
        self.device, self._mesh = check_model(model), mesh
        self._ranks = ranks_of(model, mesh)
        super().__init__(given, RankStopping() if self._ranks else Stopping())
        if self._ranks and given.encode_on == "device":
            raise UsageError("encode_on='device' with several ranks: they gather deltas in host memory")
        if given.sync is not None:
            tensor_table(model, fitting(given.sync, TorchModel(model)))
        self._inner = [] if optimizer is None else unwrapped(model, optimizer or [optimizer])
        if not (adopted is None or callable(adopted)):
            raise UsageError("adopted=...: pass what is called with a parameter and its values before")
        self._adopted = adopted
        self._check_adoptions(self._inner)
        if given.same_frozen:
            check_frozen(model)
        self._attached: Attached | None = None

    def step(self, tokens: int | torch.Tensor, loss: float | torch.Tensor | None = None) -> None:
        """Count an inner step just done, adopt what has arrived, publish what is due. Never waits for the network.

        Args:
            tokens: trained in this step: a whole number from 0 (nothing: all of the batch was masked), also as a numpy
                or torch scalar; one on a CUDA device is read at once, which waits for the device.
            loss: one number, shown in reports. A tensor is copied at once, so it may be written to again; one on a CUDA
                device is not waited for, and shown once the device is there.

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
            loss: called with the tokens, for one number to be shown in reports, as that of `step`. None: this step has
                none to tell.

        Raises:
            UsageError: the learner is not open, steps are counted already, or an optimizer trains nothing of the model.
        """
        joined = self.joined
        if self._attached is not None or joined.training.rounds.steps:
            how = "attached already: name all optimizers at once" if self._attached else "told of steps by step()"
            raise UsageError(f"attach(): the learner is {how}; each step is counted once")
        given = self.optimizer if optimizers is None else optimizers
        hooked = unwrapped(self.model, given)
        self._check_adoptions([one for one in hooked if all(one is not known for known in self._inner)])
        self._attached = Attached(hooked, asking(tokens), asking_loss(loss), self._step)
        say_unkept(hooked, self._inner)
        say_replaced(hooked)

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
        optimizer = alone(self.model, self.optimizer if optimizer is None else optimizer)
        return LambdaLR(optimizer, ShareByProgress((shape, warmup, decay, final), self._place))

    def globals(self) -> dict[str, Any]:
        """The whole model as a state dict, with the newest global values of what is trained, whatever stands here.

        Reads the run's heads, which waits for the network; training goes on. Names are the plain model's, without
        `_orig_mod.` of torch.compile or `module.` of DistributedDataParallel. Global values are in host memory, in the
        parameters' types, as precise as learners pull them. What is not trained is this model's own, not a copy.

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

    def _check_adoptions(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if self._adopted is None:
            check_adoptions(self.model, optimizers)

    def _training(
        self, spec: Spec, own: Layout | None = None, folder: Callable[[Path, Layout], StateFolder] = StateFolder
    ) -> Training:
        given = self.model, self._inner, self._given, self.device, self.times, own, folder, self._check_ranks
        return make_training((self.id, self.incarnation), spec, *given, self._adopted)

    def _proposed(self) -> TorchModel:
        return TorchModel(self.model)

    def _leave(self, save_state: bool, error: BaseException | None = None) -> bool:
        if self._life.is_here:
            attached, self._attached = self._attached, None
            if attached is not None:
                attached.detach()
                self._say_if_none_stepped()
        return super()._leave(save_state, error)

    def _say_if_none_stepped(self) -> None:
        joined = self._life.once_joined
        if joined.training.rounds.steps == 0 and not joined.late:
            detail = "attached, but none of its optimizers has stepped: if the loop has trained, then with another one"
            structlog.get_logger().warning("no_step_counted", learner=self.id, detail=f"{detail}, made after attach()")
