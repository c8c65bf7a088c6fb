"""A callback that makes transformers' `Trainer`, or a subclass such as TRL's trainers, a learner.

    from diloco.integrations.transformers import DilocoCallback

    trainer = Trainer(..., callbacks=[DilocoCallback(run="my-run", tokens="1B")])

During training the model has this learner's own values; when `train` returns it has the run's. Checkpoints that the
Trainer saves meanwhile hold the learner's own values. If training is resumed from one, the parameters come from the run
all the same, and the moments from a state folder, or from the checkpoint if there is none.
"""

from typing import Any

from diloco.extras import naming_extra
from diloco.integrations.hosted import SAY_TOKENS, HostedCallback
from diloco.pipeline.errors import UsageError

with naming_extra("diloco.integrations.transformers", "transformers"):
    from transformers import TrainerCallback


class DilocoCallback(HostedCallback, TrainerCallback):  # type: ignore[misc]
    """Joins a run when training begins, trains until the run is finished, and leaves the run's model with the Trainer.

    Unless `step_tokens` is given, the tokens of a step are those that the Trainer counts
    (`include_num_input_tokens_seen`, which is set to "all" if it is "no"). `schedule` replaces the Trainer's own
    schedule, and the Trainer steps it. The loss that an `evaluator` measures is `eval_global_loss` in the Trainer's
    metrics.
    """

    _state: Any = None
    _seen_before = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Join the run with the Trainer's model and its optimizer, which has loaded its checkpoint by now.

        Raises:
            DilocoError: raised by `Learner`, `open` or `attach`; or the Trainer uses DeepSpeed, or a schedule that
                cannot be replaced.
        """
        if args.deepspeed:
            raise UsageError("DeepSpeed trains copies of the parameters, so globals cannot be adopted: do not use it")
        if self._hosted.counts_batches and args.include_num_input_tokens_seen == "no":
            args.include_num_input_tokens_seen = "all"
        own = getattr(kwargs["lr_scheduler"], "scheduler", kwargs["lr_scheduler"])  # inside Accelerate's wrapper
        if self._schedule is not None and not hasattr(own, "lr_lambdas"):
            raise UsageError(
                f"schedule= cannot be combined with a {type(own).__name__}; set lr_scheduler_type='constant' too"
            )
        self._state = state
        with self._hosted.begin(kwargs["model"], [kwargs["optimizer"]], self._step_tokens) as learner:
            if self._schedule is not None:
                own.lr_lambdas = learner.progress_schedule(**self._schedule).lr_lambdas
            control.should_training_stop |= learner.finished

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the Trainer's count of tokens before the step."""
        self._seen_before = state.num_input_tokens_seen

    def _step_tokens(self) -> int:
        if not self._state.num_input_tokens_seen:
            raise UsageError(f"the Trainer does not know the model's main input (`main_input_name`): {SAY_TOKENS}")
        if (
            not self._state.is_world_process_zero
        ):  # the Trainer has summed over ranks, and `Learner` sums again: only rank 0 reports
            return 0
        return int(self._state.num_input_tokens_seen) - self._seen_before

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the Trainer once the run is finished."""
        control.should_training_stop |= self.learner.finished

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Report the loss that the Trainer logs: the mean since its last log line."""
        if logs and "loss" in logs:
            self._hosted.report_loss(float(logs["loss"]))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Evaluate the run's model too."""
        if self._evaluator is not None and metrics is not None and (loss := self._evaluator.evaluate()) is not None:
            metrics["eval_global_loss"] = loss

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the run, and put its values into the model."""
        self._end(f"raise max_steps={state.max_steps} (or the epochs)")
