"""The built-in trainer: one loop over the `Learner` library. It does nothing that a user's own loop could not do."""

import time
from collections.abc import Callable
from functools import partial

import structlog
import torch

from diloco.pipeline.agreement import agree
from diloco.pipeline.errors import DilocoError, RankGone, SpecMismatch
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco.pipeline.settings import LearnerProcess, SyncSettings, TrainerSettings
from diloco.workers.checks.sets import check_set
from diloco.workers.exchange.redis_access import has_version_0, wait_for_spec
from diloco.workers.exchange.work_queue import STEPS_PER_SHARD
from diloco.workers.learner import Learner
from diloco.workers.schedule import FRESH_MOMENTS_STEPS, learning_rate
from diloco.workers.times import TIMES
from diloco.workers.trainer.agent import run_ranks
from diloco.workers.trainer.data.blocks import Blocks
from diloco.workers.trainer.data.tokenized import check_tokenizer, open_for
from diloco.workers.trainer.models.hf import weights_digest
from diloco.workers.trainer.models.hf_config import is_same_model, read_hf
from diloco.workers.trainer.models.named import build_model, check_model
from diloco.workers.trainer.recipe import (
    StopFlag,
    add_gradients,
    check_text,
    make_optimizers,
    trainer_spec,
    update,
    use_threads,
)
from diloco.workers.trainer.together import (
    Ranks,
    Rows,
    agree_on_spec,
    mark,
    prepare,
    process_group,
    rank_device,
    ranks_here,
)

log = structlog.get_logger()


def follow(settings: LearnerProcess, spec: Spec) -> LearnerProcess:
    """Return the settings with the run's values wherever this learner asked for nothing else.

    The path of the text may differ from the run's, since the text's fingerprint must agree. So may the folder of a
    transformers model, since the model's config must agree.

    Raises:
        SpecMismatch: this learner asked for something else; the message shows each difference.
        UsageError: there is no such model.
    """
    settings = agree(settings.with_method(), spec.sync.model_dump(), SyncSettings)
    elsewhere = {"data"}
    if "model" in settings.model_fields_set and is_same_model(settings.model, spec.trainer.get("model")):
        elsewhere.add("model")
    kept = elsewhere & settings.model_fields_set
    return agree(settings, {n: value for n, value in spec.trainer.items() if n not in kept}, TrainerSettings)


def train(settings: LearnerProcess) -> int:
    """Train as one learner until the run is finished (status 0) or a signal comes (75); return the exit status.

    Raises:
        UsageError: there is no Redis, or no such model, text or device.
        SpecMismatch: this learner's settings or text differ from the run's.
    """
    ranks = ranks_here()
    redis_url = settings.need_url()
    if ranks.count == 1 and "+" in settings.device:
        return run_ranks(len(settings.device.split("+")), settings.learner_id, settings.leave_s)
    device = rank_device(ranks, settings.device)
    read = partial(wait_for_spec, partial(Learner.read_spec, redis_url, settings.run), settings.learner_id)
    if ranks.count > 1:
        return train_together(settings, read, redis_url, device, ranks)
    stop = StopFlag()
    spec = read()
    try:
        return train_once(settings, spec, redis_url, device, stop, ranks)
    except SpecMismatch:
        if stop.training or (found := read()) == spec:
            raise
        # The spec has changed since this learner read it: another learner was quicker to propose one, or a syncer's
        # checkpoint replaced the proposal. Try once more with it; a second mismatch is about what was asked for.
        return train_once(settings, found, redis_url, device, stop, ranks)


def train_together(
    settings: LearnerProcess, read: Callable[[], Spec | None], redis_url: str, device: torch.device, ranks: Ranks
) -> int:
    """Train as one of several ranks, which all end together; return the exit status.

    The status tells the launcher whether to restart the ranks. It does so after a crash, such as one of CUDA or NCCL,
    if another rank is gone, or if the run has another spec by now. All other errors of this project (`DilocoError`)
    are raised: the rank was refused, or its learner cannot continue.
    """
    spec = None
    try:
        with process_group(ranks, device):
            spec = agree_on_spec(ranks, read)
            return train_once(settings, spec, redis_url, device, None, ranks)
    except SpecMismatch as error:
        if spec is not None and read() == spec:
            raise
        detail = f"another learner has started the run, or it continues from a checkpoint: {error}"
        log.warning("rank_ended", rank=ranks.number, detail=detail)
    except RankGone as error:
        log.error("rank_ended", rank=ranks.number, detail=str(error))
    except DilocoError:  # the rank was refused, or its learner cannot continue
        raise
    except Exception as error:
        log.exception("rank_ended", rank=ranks.number, detail=f"{type(error).__name__}: {error}")
    return AGAIN_STATUS


def wait_for_weights(begun: Callable[[], bool], learner: str | None) -> None:
    """Wait until the run has first parameters, if it begins from weights that are not on this machine.

    Another learner, which has the weights, uploads them.

    Args:
        begun: returns whether the run has them (`has_version_0`).
        learner: this learner's id.
    """
    if not wait_for_spec(begun, learner):
        detail = (
            "this run starts from weights that this learner does not have: waiting for a learner that has them "
            "(--model hf:FOLDER)"
        )
        log.warning("joining_delayed", detail=detail)
        while not wait_for_spec(begun, learner):
            time.sleep(TIMES.slow_poll_s)


def train_once(
    settings: LearnerProcess,
    spec: Spec | None,
    redis_url: str,
    device: torch.device,
    stop: StopFlag | None,
    ranks: Ranks,
) -> int:
    """Join the run and train; return the exit status.

    Args:
        settings: the settings that were asked for.
        spec: the run's spec, or None to propose one.
        redis_url: the run's Redis.
        device: the device of this process.
        stop: notes signals; None if the learner does so itself, together with its other ranks.
        ranks: the learner's ranks.
    """
    # --- agree with the run ----------------------------------------------------------------------
    if spec is not None:
        settings = follow(settings, spec)
        check_model(spec)

    # --- text, model, optimizer ------------------------------------------------------------------
    check_set(ranks.count, settings.batch, settings.sharding, settings.compile)
    use_threads(settings.threads)
    named = read_hf(settings.model)
    text = open_for(settings.data, named, settings.seq_len)
    agreed = trainer_spec(settings, text, named)
    if spec is not None:
        check_tokenizer(text, spec.trainer)
        check_text(text, settings.data, spec.trainer)
        agreed["data"] = spec.trainer["data"]
    blocks = Blocks(text.train, settings.seq_len, settings.seed)
    model = build_model(settings, named, text)
    if named is not None and named.has_weights:
        agreed["weights"] = weights_digest(model)
    elif spec is not None and "weights" in spec.trainer:
        agreed["weights"] = spec.trainer["weights"]
        wait_for_weights(partial(has_version_0, redis_url, settings.run), settings.learner_id)
    model, forward, begin, end, mesh = prepare(model, device, settings, ranks)
    optimizers = make_optimizers(model.parameters(), settings.lr, settings.weight_decay)
    step_blocks = settings.batch * settings.accumulate
    step_tokens = step_blocks * settings.seq_len // ranks.count

    # --- train -----------------------------------------------------------------------------------
    steps = 0
    with Learner(
        model,
        optimizers,
        run=settings.run,
        redis_url=redis_url,
        learner_id=settings.learner_id,
        sync=settings,
        trainer=agreed,
        leave_s=settings.leave_s,
        state_dir=settings.state_dir,
        state_every_s=settings.state_every,
        recover=settings.recover,
        log_losses=settings.log_losses,
        encode_on=settings.encode_on,
        mesh=mesh,
    ) as learner:
        fresh = settings.ramp_steps
        ramp_steps = {"start": FRESH_MOMENTS_STEPS, "fresh": fresh, "checkpoint": fresh}.get(learner.recovered, 0)
        mark(ranks, at_work=True)
        log.info("training_started", learner=learner.id, device=str(device), blocks=blocks.count, files=text.files)
        order = None if ranks.number else learner.blocks(blocks.count, step_blocks * STEPS_PER_SHARD)
        rows = Rows(blocks, order, settings, ranks)
        if stop is not None:
            stop.training = True  # only now: while the learner waits for its first shard, a signal ends it at once

        def over() -> bool:
            return learner.finished or (stop is not None and stop.asked)

        while not over():
            started = time.monotonic()
            loss = add_gradients(forward, rows.step(device), settings.accumulate, begin)
            end()
            lr = learning_rate(
                learner.progress,
                learner.earlier_steps + steps,  # the moments of a checkpoint may still be young
                peak=settings.lr,
                min_ratio=settings.min_lr_ratio,
                warmup=settings.warmup,
                ramp_steps=ramp_steps,
            )
            update(model, optimizers, lr, settings.clip)
            learner.step(step_tokens, loss)
            steps += 1
            # A signal alone does not end a sleep. `exit_status` tells of one that the ranks have not agreed on yet.
            while (left_s := started + settings.pace - time.monotonic()) > 0 and not (over() or learner.exit_status):
                time.sleep(min(left_s, TIMES.check_s))
    asked = not learner.over if stop is None else stop.asked
    log.info("training_ended", learner=learner.id, steps=steps, reason="signal" if asked else "run finished")
    if learner.left_in_order:
        mark(ranks, at_work=False)
    if asked and not learner.over:  # even if its last steps were lost: the run continues
        return AGAIN_STATUS
    return 0 if learner.left_in_order else 1
