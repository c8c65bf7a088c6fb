"""A callback that makes Lightning's `Trainer` a learner.

    from diloco.integrations.lightning import DilocoCallback

    trainer = Trainer(..., callbacks=[DilocoCallback(run="my-run", tokens="1B")])

The run's model is in the module when `fit` returns. Checkpoints that Lightning saves meanwhile hold this learner's own
values. If training is resumed from one, the parameters come from the run all the same, and the moments from a state
folder, or from the checkpoint if there is none. For loops with Fabric use `diloco.integrations.loops`.
"""

from collections.abc import Sequence
from typing import Any

from diloco.extras import naming_extra
from diloco.integrations.hosted import HostedCallback, tokens_of
from diloco.pipeline.process.signals import AGAIN_STATUS

with naming_extra("diloco.integrations.lightning", "lightning"):
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.utilities.exceptions import SIGTERMException


class DilocoCallback(HostedCallback, Callback):  # type: ignore[misc]
    """Joins a run when fitting begins, trains until the run is finished, and leaves the run's model in the module.

    Unless `step_tokens` is given, the tokens of a step are counted in its batches (`hosted.tokens_of`). `schedule`
    applies whatever schedule the module has. The loss that an `evaluator` measures is logged as `val_global_loss`.
    """

    _schedulers: Sequence[Any] = ()
    _held = _of_step = 0
    """Tokens of the batches since the last update, and tokens of the update that is being made."""
    _batch = 0
    """Tokens of the current batch that are not held yet: a training step that returns no loss does not train them."""
    _losses: list[Any]
    """Losses of the micro-batches since the last update."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Join the run with the module and its optimizers, which have loaded their checkpoint by now."""
        self._losses, self._held = [], 0
        with self._hosted.begin(pl_module, trainer.optimizers, self._take_tokens) as learner:
            if self._schedule is not None:
                self._schedulers = [learner.progress_schedule(one, **self._schedule) for one in trainer.optimizers]
            trainer.should_stop |= learner.finished

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Count the tokens of the batch."""
        if self._hosted.counts_batches:
            self._batch = tokens_of(batch)
            if (
                not pl_module.automatic_optimization
            ):  # with manual optimization `on_before_backward` may never be called
                self._hold()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Collect the loss of a micro-batch, which Lightning has divided by the number of micro-batches."""
        self._losses.append(loss.detach())
        self._hold()

    def _hold(self) -> None:
        self._held, self._batch = self._held + self._batch, 0

    def _take_tokens(self) -> int:
        tokens, self._of_step = self._of_step, 0
        return tokens

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Assign all batches since the last update to this one, even if a GradScaler skips it."""
        if self._losses or self._held:  # with several optimizers, the first one that steps takes them all
            self._hosted.report_loss(sum(self._losses) if self._losses else None)
            self._of_step, self._held, self._losses = self._held, 0, []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Step the schedules after an update, and stop the trainer once the run is finished."""
        if not self._losses:  # an update was made since, which has taken the losses
            for scheduler in self._schedulers:
                scheduler.step()
        trainer.should_stop |= self.learner.finished

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Evaluate the run's model too."""
        wanted = None if trainer.sanity_checking else self._evaluator
        if wanted is not None and (loss := wanted.evaluate()) is not None:
            pl_module.log("val_global_loss", loss)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the run, and put its values into the module."""
        self._end(f"raise max_steps={trainer.max_steps}, max_epochs={trainer.max_epochs}")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the run; save the learner's state only if the process was asked to end, by a signal or Ctrl-C.

        After SIGTERM, Lightning ends the program by this exception: with a status that has it restarted.
        """
        if isinstance(exception, SIGTERMException):
            exception.code = self._hosted.exit_status = AGAIN_STATUS
        self._hosted.give_up(exception, in_order=isinstance(exception, SIGTERMException))
