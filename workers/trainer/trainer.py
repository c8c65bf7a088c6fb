"""The built-in trainer: one loop over the `Learner` library, with nothing that a user's own loop could not do."""

import time
from collections.abc import Callable
from functools import partial

import structlog

from diloco.pipeline.errors import SpecMismatch, UsageError
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.settings import LearnerProcess, SyncSettings, TrainerSettings, agree
from diloco.workers.exchange.reaching import has_version_0, wait_for_spec
from diloco.workers.exchange.work_queue import STEPS_PER_SHARD
from diloco.workers.learner import Learner
from diloco.workers.trainer.data.blocks import Blocks
from diloco.workers.trainer.data.tokenized import check_tokenizer, open_for
from diloco.workers.trainer.models.hf import weights_digest
from diloco.workers.trainer.models.hf_config import lies_elsewhere, read_hf
from diloco.workers.trainer.models.named import build_model, check_model
from diloco.workers.trainer.precision import training_forward
from diloco.workers.trainer.recipe import (
    StopFlag,
    add_gradients,
    check_text,
    choose_device,
    make_optimizer,
    read_batch,
    trainer_spec,
    update,
    use_threads,
)
from diloco.workers.trainer.schedule import FRESH_MOMENTS_STEPS, learning_rate

LOOK_S = 1.0

log = structlog.get_logger()


def follow(settings: LearnerProcess, spec: Spec) -> LearnerProcess:
    """Settings with the run's values where nothing else was asked for.

    The text may lie elsewhere on this machine: its path need not agree, since its fingerprint must. So may the folder
    of a model of transformers, since its config must.

    Raises:
        SpecMismatch: something else was asked for; shows each difference.
        UsageError: no such model.
    """
    settings = agree(settings, spec.sync.model_dump(), SyncSettings)
    elsewhere = {"data"}
    if "model" in settings.model_fields_set and lies_elsewhere(settings.model, spec.trainer.get("model")):
        elsewhere.add("model")
    kept = elsewhere & settings.model_fields_set
    return agree(settings, {n: value for n, value in spec.trainer.items() if n not in kept}, TrainerSettings)


def train(settings: LearnerProcess) -> int:
    """Train as one learner until the run's budget is spent or a signal comes; returns the exit status.

    Raises:
        UsageError: no Redis, no such model, text or device.
        SpecMismatch: this learner's settings or text differ from the run's.
    """
    stop = StopFlag()
    redis_url = settings.bus_url()
    if redis_url is None:
        raise UsageError("a learner needs a Redis: give --redis-url or set DILOCO_REDIS_URL")
    read = partial(Learner.read_spec, redis_url, settings.run)
    spec = wait_for_spec(read, settings.learner_id)
    try:
        return train_once(settings, spec, redis_url, stop)
    except SpecMismatch:
        if spec is not None:
            raise
        # Another learner was quicker to propose the spec: follow it, or be refused for what was asked for.
        return train_once(settings, wait_for_spec(read, settings.learner_id), redis_url, stop)


def wait_for_weights(begun: Callable[[], bool], learner: str | None) -> None:
    """Until the run has first parameters, where it begins from weights that are not here: another learner's are those.

    begun: as `has_version_0`.
    """
    if not wait_for_spec(begun, learner):
        detail = "this run begins from weights that are not here: a learner with them (--model hf:FOLDER) is awaited"
        log.warning("joining_delayed", detail=detail)
        while not wait_for_spec(begun, learner):
            time.sleep(LOOK_S)


def train_once(settings: LearnerProcess, spec: Spec | None, redis_url: str, stop: StopFlag) -> int:
    """Join and train; `spec` is the run's, or None to propose one."""
    # --- agree with the run ----------------------------------------------------------------------
    if spec is not None:
        settings = follow(settings, spec)
        check_model(spec)

    # --- device, text, model, optimizer ----------------------------------------------------------
    device = choose_device(settings.device)
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
    model = model.to(device)
    forward = training_forward(model, device, settings)
    optimizer = make_optimizer(model, settings.lr, settings.weight_decay)
    step_blocks = settings.batch * settings.accumulate
    step_tokens = step_blocks * settings.seq_len

    # --- train -----------------------------------------------------------------------------------
    steps = 0
    with Learner(
        model,
        optimizer,
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
    ) as learner:
        fresh = settings.ramp_steps
        ramp_steps = {"start": FRESH_MOMENTS_STEPS, "fresh": fresh, "checkpoint": fresh}.get(learner.recovered, 0)
        log.info("training_started", learner=learner.id, device=str(device), blocks=blocks.count, files=text.files)
        order = learner.blocks(blocks.count, step_blocks * STEPS_PER_SHARD)
        stop.training = True  # not before: a signal ends who still waits for its first shard
        while not (learner.finished or stop.asked):
            started = time.monotonic()
            batches = (read_batch(blocks, order, settings.batch, device) for _ in range(settings.accumulate))
            loss = add_gradients(forward, batches, settings.accumulate)
            lr = learning_rate(
                learner.progress,
                learner.earlier_steps + steps,  # a checkpoint may be of moments that are young still
                peak=settings.lr,
                min_ratio=settings.min_lr_ratio,
                warmup=settings.warmup,
                ramp_steps=ramp_steps,
            )
            update(model, optimizer, lr, settings.clip)
            learner.step(step_tokens, loss)
            steps += 1
            if settings.pace:
                time.sleep(max(0.0, started + settings.pace - time.monotonic()))
    log.info("training_ended", learner=learner.id, steps=steps, reason="signal" if stop.asked else "run finished")
    return 0 if learner.left_in_order else 1
