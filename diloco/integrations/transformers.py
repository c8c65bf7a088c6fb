"""A learner in transformers' `Trainer`, and in those made from it, such as TRL's.

    from diloco.integrations.transformers import DilocoCallback

    trainer = Trainer(..., callbacks=[DilocoCallback(run="my-run", tokens="1B")])

The model is its own after each step as before; the run's is in it when `train` returns. Checkpoints that the Trainer
saves meanwhile hold this learner's own values, and are for going on: parameters come from the run all the same,
moments from a state folder, else from the checkpoint.
"""

from typing import Any

from diloco.extras import naming_extra
from diloco.integrations.hosted import SAY_TOKENS, HostedCallback
from diloco.pipeline.errors import UsageError

with naming_extra("diloco.integrations.transformers", "transformers"):
    from transformers import TrainerCallback


class DilocoCallback(HostedCallback, TrainerCallback):  # type: ignore[misc]
    """Joins a run when training begins, trains until the run is finished, and leaves its model with the Trainer.

    Unless it is told (`step_tokens`), a step has trained the inputs that the Trainer counts
    (`include_num_input_tokens_seen`, which is set to "all" if it is "no"). `schedule` takes the place of the Trainer's
    own, over its own steps. What an `evaluator` measures is `eval_global_loss` of the Trainer's metrics.
    """

    _state: Any = None
    _seen_before = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Join with the Trainer's model and its optimizer, which has loaded its checkpoint by now.

        Raises:
            DilocoError: as `Learner`, `open` and `attach`; or for a Trainer whose model or schedule is not its own.
        """
        if args.deepspeed:
            raise UsageError("DeepSpeed trains copies of the parameters, so that nothing can be adopted: leave it out")
        if self._hosted.counts_itself and args.include_num_input_tokens_seen == "no":
            args.include_num_input_tokens_seen = "all"
        own = getattr(kwargs["lr_scheduler"], "scheduler", kwargs["lr_scheduler"])  # inside Accelerate's wrapper
        if self._schedule is not None and not hasattr(own, "lr_lambdas"):
            raise UsageError(f"schedule=: not with a {type(own).__name__}; say lr_scheduler_type='constant' as well")
        self._state = state
        with self._hosted.begin(kwargs["model"], [kwargs["optimizer"]], self._step_tokens) as learner:
            if self._schedule is not None:
                own.lr_lambdas = learner.progress_schedule(**self._schedule).lr_lambdas
            control.should_training_stop |= learner.finished

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What was counted until now is of earlier steps."""
        self._seen_before = state.num_input_tokens_seen

    def _step_tokens(self) -> int:
        if not self._state.num_input_tokens_seen:
            raise UsageError(f"the Trainer does not know the model's input (`main_input_name`): {SAY_TOKENS}")
        if not self._state.is_world_process_zero:  # the Trainer counts those of all ranks, and ranks' are added up
            return 0
        return int(self._state.num_input_tokens_seen) - self._seen_before

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End with the run."""
        control.should_training_stop |= self.learner.finished

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """The mean loss since the line before is what the Trainer shows of its losses."""
        if logs and "loss" in logs:
            self._hosted.tell(float(logs["loss"]))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """The run's model too."""
        if self._evaluator is not None and metrics is not None and (loss := self._evaluator.evaluate()) is not None:
            metrics["eval_global_loss"] = loss

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave, and put the run's values into the model."""
        self._hosted.end(f"give it more than max_steps={state.max_steps} (or epochs)")
