"""Makes torchtitan's `Trainer` a learner.

    from diloco.integrations.torchtitan import train

    trainer = config.build()
    train(trainer, run="my-run", tokens="1B")  # instead of trainer.train()

During training the model has this learner's own values. When `train` returns it has the run's, as has the checkpoint
of the last step, unless a signal has ended the training. Checkpoints that torchtitan saves meanwhile hold the learner's
own values. If training is resumed from one, the parameters come from the run all the same, and the moments from a state
folder, or from the checkpoint if there is none.
"""

from collections.abc import Mapping
from typing import Any

from diloco.extras import naming_extra
from diloco.integrations.hosted import Hosted, check_schedule
from diloco.pipeline.errors import UsageError

with naming_extra("diloco.integrations.torchtitan", "torchtitan"):
    from torchtitan.trainer import Trainer


def train(trainer: Trainer, *, schedule: Mapping[str, Any] | None = None, **learner: Any) -> int:
    """Train until the run is finished, at most `training.steps` steps; replaces `Trainer.train`.

    The trainer's ranks (FSDP, HSDP, DDP, tensor parallelism) form one learner.

    Args:
        schedule: arguments of `Learner.progress_schedule`, which then sets the learning rates. Default:
            torchtitan's own schedule, over `training.steps`.
        learner: arguments of `Learner`: run, tokens (of the whole run), redis_url, state_dir, sync and others.

    Returns:
        `Learner.exit_status`, for `sys.exit`.

    Raises:
        TypeError: `Learner` or `progress_schedule` takes no such argument.
        UsageError: the trainer uses pipeline or expert parallelism.
        DilocoError: raised by `Learner`, `open`, `attach`, `close` or `load_globals`.
    """
    check_schedule(schedule)
    dims = trainer.parallel_dims
    for name, used in (("pipeline", dims.pp_enabled), ("expert", dims.ep_enabled)):
        if used:
            raise UsageError(
                f"a learner has no {name} parallelism: set parallelism.{name}_parallel_degree to 1, and use FSDP "
                "(data_parallel_shard_degree), tensor parallelism or replicas (data_parallel_replicate_degree)"
            )
    hosted, steps, log = Hosted(None, learner), trainer.should_continue_training, trainer.metrics_processor.log
    seen = first = 0

    def tokens() -> int:
        nonlocal seen
        before, seen = seen, int(trainer.ntokens_seen)
        return seen - before

    def begin() -> None:
        nonlocal seen, first
        seen, first = trainer.ntokens_seen, trainer.step
        with hosted.begin(trainer.model_parts[0], list(trainer.optimizers), tokens) as joined:
            if schedule is not None:
                for scheduler, optimizer in zip(trainer.lr_schedulers, trainer.optimizers, strict=True):
                    scheduler.lr_lambdas = joined.progress_schedule(optimizer, **schedule).lr_lambdas

    def should_continue_training() -> bool:
        if hosted.learner is None:  # the first call: the trainer has loaded its checkpoint by now
            begin()
        return not hosted.present.finished and steps()

    def log_and_report(step: int, loss: float, *args: Any, **kwargs: Any) -> None:
        hosted.report_loss(loss)
        log(step, loss, *args, **kwargs)

    trainer.should_continue_training, trainer.metrics_processor.log = should_continue_training, log_and_report
    try:
        trainer.train()
    except BaseException as error:
        hosted.give_up(error)
        raise
    finally:
        trainer.should_continue_training, trainer.metrics_processor.log = steps, log
    hosted.end(f"raise training.steps={trainer.config.training.steps}")
    if not hosted.exit_status:
        # If the run was over when it joined, the checkpoint that it began with may have optimizer states, and stays.
        trainer.checkpointer.save(trainer.step + (trainer.step == first), last_step=True)
    return hosted.exit_status
