"""Promises about learners in the trainers of transformers, TRL and Lightning, in this process."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from diloco.pipeline.clock import LoopClock
from diloco.pipeline.errors import UsageError
from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco.pipeline.settings import SyncSettings
from diloco.pipeline.view.status_reader import read_status
from diloco.workers.exchange import carrier
from tests.trainers import scripts
from tests.trainers.scripts import ACCUMULATE, LENGTH, MICRO, STEP_TOKENS, llama
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_evaluator_library import evaluations
from tests.workers.test_learner_life import on_bus, reports, threads

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.trainers,
    pytest.mark.redis,
    pytest.mark.filterwarnings("default"),  # of libraries that are not ours
]
SYNC = SyncSettings(fragments=2, sync_interval=2, first_interval=0, quorum=1)
BATCHES = {"per_device_train_batch_size": MICRO, "gradient_accumulation_steps": ACCUMULATE}
QUIET = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "use_cpu": True, "bf16": True}


def hf_trainer(out: Path, steps: int, callbacks: list[Any], model: Any = None, **how: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    rows, held_out = scripts.Rows("hf"), how.pop("eval_dataset", None)
    rate = {"learning_rate": 3e-3, "lr_scheduler_type": "constant", "save_steps": 4}
    arguments = TrainingArguments(output_dir=str(out), max_steps=steps, **BATCHES, **QUIET, **rate | how)
    return Trainer(model or llama(), arguments, train_dataset=rows, eval_dataset=held_out, callbacks=callbacks)


def diloco(url: str, run: str, **more: Any) -> Any:
    from diloco.integrations.transformers import DilocoCallback

    return DilocoCallback(run=run, redis_url=url, **{"sync": SYNC} | more)


def ledger(url: str, run: str) -> tuple[Any, ...]:
    status = on_bus(url, run, lambda bus: read_status(bus, LoopClock()))
    return status["phase"], status["tokens"], status["tokens_lost"]


def looking(found: dict[str, Any], learner: Any) -> Any:
    """A callback after ours, which notes what training begins with."""
    from transformers import TrainerCallback

    class Looks(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found["recovered"], found["globals"] = learner.learner.recovered, learner.learner.globals()
            found["model"] = {name: value.clone() for name, value in kwargs["model"].state_dict().items()}
            found["moments"] = {
                name: value.clone()
                for state in kwargs["optimizer"].state_dict()["state"].values()
                for name, value in state.items()
            }
            found["rate"] = kwargs["optimizer"].param_groups[0]["lr"]

    return Looks()


# --- transformers -----------------------------------------------------------------------------------------------


def held_out_loss(model: Any) -> float:
    """Of two rows."""
    rows = scripts.Rows("hf")
    held_out = torch.stack([rows[0]["input_ids"], rows[1]["input_ids"]])
    return float(model(input_ids=held_out, labels=held_out).loss)


def test_a_trainers_evaluation_brings_the_loss_of_the_runs_model(redis_server: str, tmp_path: Path) -> None:
    """Beside its own, among its metrics; and the run keeps it."""
    from diloco import Evaluator

    run, model, rows = f"evaluates-{tmp_path.name}", llama(), scripts.Rows("hf")
    with a_syncer(redis_server, run):
        evaluator = Evaluator(model, held_out_loss, run=run, redis_url=redis_server)
        ours = diloco(redis_server, run, tokens=10 * STEP_TOKENS, evaluator=evaluator)
        when = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": [rows[0], rows[1]]}
        trainer = hf_trainer(tmp_path, 4, [ours], model, **when)
        trainer.train()
    told = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert len(told) == 2
    assert evaluator.evaluate() is not None
    found: dict[str, float] = {}
    ours.on_evaluate(None, None, None, metrics=found)
    assert found["eval_global_loss"] == pytest.approx(held_out_loss(model.eval()), rel=1e-3)


def test_a_run_that_ends_in_a_trainer_has_the_loss_of_its_last_model(redis_server: str, tmp_path: Path) -> None:
    """Whenever the trainer evaluated last: here never."""
    from diloco import Evaluator

    run, model = f"last-{tmp_path.name}", llama()
    with a_syncer(redis_server, run):
        evaluator = Evaluator(model, held_out_loss, run=run, redis_url=redis_server)
        ours = diloco(redis_server, run, tokens=4 * STEP_TOKENS, evaluator=evaluator)
        hf_trainer(tmp_path, 10**6, [ours], model).train()
        (last,) = evaluations(redis_server, run)
    assert last.final
    assert last.loss == pytest.approx(held_out_loss(model.eval()), rel=1e-3)


def test_a_trainer_that_resumes_has_the_runs_parameters_and_its_checkpoints_moments(
    redis_server: str, tmp_path: Path
) -> None:
    """Or none, where it is to begin fresh; and a trainer that ends before its run says how far that is."""
    run = f"resume-{tmp_path.name}"
    with a_syncer(redis_server, run):
        with capture_logs() as log:
            hf_trainer(tmp_path, 4, [diloco(redis_server, run, tokens="1M", learner_id="l0")]).train()
        (said,) = [one for one in log if one["event"] == "trainer_ended_first"]
        assert "max_steps=4" in said["detail"]
        (report,) = [seen.report for seen in reports(redis_server, run)]
        assert (report.left, report.step, report.tokens) == (True, 4, 4 * STEP_TOKENS)
        assert report.loss is not None
        for recover, source in (("auto", "optimizer"), ("fresh", "fresh")):
            found: dict[str, Any] = {}
            callback = diloco(redis_server, run, learner_id="l0", recover=recover)
            trainer = hf_trainer(tmp_path, 5, [callback, looking(found, callback)], llama(seed=7))
            with capture_logs() as log:
                trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
            assert trainer.state.global_step == 5
            assert found["recovered"] == source
            assert [one["source"] for one in log if one["event"] == "moments_recovered"] == [source]
            assert bool(found["moments"]) == (recover == "auto")
            assert all(torch.equal(found["globals"][name], value) for name, value in found["model"].items())
            (*_, last) = sorted((seen.report for seen in reports(redis_server, run)), key=lambda one: one.generation)
            assert (last.step, last.tokens) == (1, STEP_TOKENS), "what the checkpoint had counted is not counted again"
    assert not threads()


def test_the_run_ends_training_and_its_model_is_what_is_saved(redis_server: str, tmp_path: Path) -> None:
    """By the run's progress, and with its rate where that was asked for; a second training finds the run finished."""
    from transformers import AutoModelForCausalLM

    run, found = f"ends-{tmp_path.name}", dict[str, Any]()
    schedule = {"shape": "linear", "warmup": 0.0, "final": 0.0}
    callback = diloco(redis_server, run, tokens=60 * STEP_TOKENS, schedule=schedule)
    with a_syncer(redis_server, run):
        trainer = hf_trainer(tmp_path / "out", 10_000, [callback, looking(found, callback)], save_strategy="no")
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
        assert 60 <= trainer.state.global_step < 5000
        assert found["rate"] == 3e-3
        rates = [line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line]
        assert rates == sorted(rates, reverse=True)
        assert rates[-1] < rates[0]
        before = ledger(redis_server, run)
        late = hf_trainer(tmp_path / "out", 10_000, [diloco(redis_server, run)], llama(seed=3), save_strategy="no")
        with capture_logs() as log:
            late.train()
        assert ledger(redis_server, run) == before, "the step that a Trainer makes all the same is nobody's"
        assert "run_finished_already" in [one["event"] for one in log]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="float32").state_dict()
    assert all(torch.equal(saved[name], value) for name, value in late.model.state_dict().items())


def test_a_schedule_that_cannot_be_is_refused_where_it_is_written() -> None:
    """Before training begins, and so before a learner joins."""
    from diloco.integrations import lightning, transformers

    for callback in (transformers.DilocoCallback, lightning.DilocoCallback):
        with pytest.raises(UsageError, match=r"progress_schedule\(warmup=2\)"):
            callback(run="r", schedule={"warmup": 2})
        with pytest.raises(TypeError, match="shap"):
            callback(run="r", schedule={"shap": "cosine"})


def test_what_a_step_trains_may_be_said(redis_server: str, tmp_path: Path) -> None:
    run = f"said-{tmp_path.name}"
    with a_syncer(redis_server, run):
        hf_trainer(tmp_path, 3, [diloco(redis_server, run, step_tokens=100)], save_strategy="no").train()
        assert [seen.report.tokens for seen in reports(redis_server, run)] == [300]
        model, callback = llama(), diloco(redis_server, run)
        model.main_input_name = "nothing"
        with pytest.raises(UsageError, match=r"main_input_name.*step_tokens="):
            hf_trainer(tmp_path, 3, [callback], model, save_strategy="no").train()
        assert threads(), "the Trainer tells nobody of an error"
        callback._hosted.give_up(UsageError())
    assert not threads()


def test_deepspeed_is_refused_as_training_begins(redis_server: str) -> None:
    """With the reason."""
    from types import SimpleNamespace

    model = llama()
    given = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "lr_scheduler": None}
    args = SimpleNamespace(include_num_input_tokens_seen="no", deepspeed="zero.json")
    with pytest.raises(UsageError, match="DeepSpeed trains copies of the parameters"):
        diloco(redis_server, "ranks").on_train_begin(args, None, None, **given)


# --- TRL --------------------------------------------------------------------------------------------------------


def test_of_adapters_only_the_adapters_are_on_the_wire(
    redis_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL with PEFT: the bytes of a delta are those of the adapters, and what it saves loads as an adapter."""
    from datasets import Dataset
    from peft import LoraConfig, PeftModel
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    push, pushed = carrier.push_growing, dict[str, int]()

    async def pushing(bus: Any, key: str, payload: Any, *rest: Any) -> Any:
        done = await push(bus, key, payload, *rest)
        pushed[key] = len(payload._data)
        return done

    monkeypatch.setattr(carrier, "push_growing", pushing)
    run = f"lora-{tmp_path.name}"
    words = Tokenizer(models.WordLevel({str(i): i for i in range(scripts.VOCAB)}, unk_token="0"))  # noqa: S106
    sync = SYNC.model_copy(update={"codec": "fp32", "fragments": 1})
    callback = diloco(redis_server, run, tokens=8 * STEP_TOKENS, sync=sync)
    with a_syncer(redis_server, run):
        trainer = SFTTrainer(
            llama(),
            SFTConfig(output_dir=str(tmp_path), max_steps=1000, save_strategy="no", **BATCHES, **QUIET),
            train_dataset=Dataset.from_dict({"input_ids": scripts.rows("trl").tolist()}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1"),  # noqa: S106
            peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
            callbacks=[callback],
        )
        trainer.train()
        trainer.save_model(str(tmp_path / "adapter"))
    adapters = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert adapters
    assert all("lora_" in name for name in adapters)
    everything = sum(p.numel() for p in trainer.model.parameters())
    elements = sum(p.numel() for p in adapters.values())
    assert elements < everything / 20
    assert set(pushed.values()) == {4 * elements}
    loaded = PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    found = {name: p for name, p in loaded.named_parameters() if "lora_" in name}
    assert all(torch.equal(found[name], p) for name, p in adapters.items())
    assert any(p.abs().sum() > 0 for name, p in found.items() if "lora_B" in name), "it has learned something"


# --- Lightning --------------------------------------------------------------------------------------------------


def lightning_module(rate: float = 3e-3, fails_at: int = -1) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.batches = llama(), 0

        def training_step(self, batch: Any, at: int) -> Any:
            self.batches += 1
            if self.batches == fails_at:
                raise ZeroDivisionError
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=rate)

    return Module()


def lightning_trainer(out: Path, callback: Any, steps: int = -1) -> Any:
    from lightning.pytorch import Trainer

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": -1}
    how = {"precision": "bf16-mixed", "accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": 1.0}
    return Trainer(accelerator="cpu", max_steps=steps, callbacks=[callback], default_root_dir=out, **quiet, **how)


def test_lightning_resumes_ends_with_the_run_and_leaves_on_an_error(redis_server: str, tmp_path: Path) -> None:
    from diloco.integrations.lightning import DilocoCallback

    run = f"lightning-{tmp_path.name}"
    where = {"run": run, "redis_url": redis_server, "sync": SYNC}
    with a_syncer(redis_server, run):
        with capture_logs() as log:
            first = lightning_trainer(tmp_path, DilocoCallback(learner_id="l0", tokens=20 * STEP_TOKENS, **where), 6)
            first.fit(lightning_module(), scripts.loader("lightning"))
        assert [one["event"] for one in log if one["event"] == "trainer_ended_first"] == ["trainer_ended_first"]
        (report,) = [seen.report for seen in reports(redis_server, run)]
        assert (report.step, report.tokens) == (6, 6 * MICRO * LENGTH * ACCUMULATE)
        assert 0 < float(report.loss or 0) < 4, "the step's, which is its micro-batches' mean"
        first.save_checkpoint(tmp_path / "own.ckpt")

        failing = lightning_trainer(tmp_path, DilocoCallback(learner_id="l1", **where))
        with pytest.raises(ZeroDivisionError):
            failing.fit(lightning_module(fails_at=6), scripts.loader("lightning"))
        assert not threads()
        assert [seen.report.left for seen in reports(redis_server, run)] == [True, True]

        with capture_logs() as log:
            schedule = {"shape": "linear", "warmup": 0.0, "final": 0.0}
            again = lightning_trainer(tmp_path, DilocoCallback(learner_id="l0", schedule=schedule, **where))
            module = lightning_module()
            again.fit(module, scripts.loader("lightning"), ckpt_path=tmp_path / "own.ckpt", weights_only=False)
        assert [one["source"] for one in log if one["event"] == "moments_recovered"] == ["optimizer"]
        assert [one["finished"] for one in log if one["event"] == "globals_loaded"] == [True]
        assert again.optimizers[0].param_groups[0]["lr"] < 2e-3
    assert scripts.loss_of(module.model) < scripts.loss_of(llama())


def test_lightning_leaves_on_sigterm_with_its_state_and_a_status_that_has_it_restarted(
    redis_server: str, tmp_path: Path
) -> None:
    from diloco.integrations.lightning import DilocoCallback

    run, module = f"sigterm-{tmp_path.name}", lightning_module()
    module.on_train_batch_end = lambda *_: os.kill(os.getpid(), signal.SIGTERM) if module.batches == 4 else None
    with a_syncer(redis_server, run):
        where = {"redis_url": redis_server, "sync": SYNC, "tokens": 1000 * STEP_TOKENS}
        callback = DilocoCallback(run=run, learner_id="l0", state_dir=tmp_path / "state", **where)
        with pytest.raises(SystemExit) as ended:
            lightning_trainer(tmp_path, callback).fit(module, scripts.loader("lightning"))
        assert ended.value.code == AGAIN_STATUS
        assert [seen.report.left for seen in reports(redis_server, run)] == [True]
    assert (tmp_path / "state" / "state.json").exists()
    assert not threads()


def test_lightnings_fast_dev_run_is_one_step_of_a_learner_that_leaves(redis_server: str, tmp_path: Path) -> None:
    """The run goes on without it, for its whole budget, and the module has the run's values."""
    from lightning.pytorch import Trainer

    from diloco.integrations.lightning import DilocoCallback

    run, module = f"fast-dev-{tmp_path.name}", lightning_module()
    with a_syncer(redis_server, run):
        callback = DilocoCallback(run=run, redis_url=redis_server, tokens=1000 * STEP_TOKENS, sync=SYNC)
        trainer = Trainer(fast_dev_run=True, accelerator="cpu", callbacks=[callback], enable_progress_bar=False)
        with capture_logs() as log:
            trainer.fit(module, scripts.loader("lightning"))
        assert module.batches == 1
        assert not threads()
        (report,) = [seen.report for seen in reports(redis_server, run)]
        assert (report.left, report.step, report.tokens) == (True, 1, MICRO * LENGTH)
        (said,) = [one for one in log if one["event"] == "trainer_ended_first"]
        assert [one["finished"] for one in log if one["event"] == "globals_loaded"] == [False]
        assert "max_steps=1," in said["detail"]
        assert ledger(redis_server, run)[0] == "running"


@pytest.mark.parametrize("how", ["by hand", "every second batch"])
def test_lightning_counts_what_was_trained(redis_server: str, tmp_path: Path, how: str) -> None:
    """Also where the module goes backward by hand; and nothing of a batch that gave no loss."""
    from diloco.integrations.lightning import DilocoCallback

    run, batches = f"{how.replace(' ', '-')}-{tmp_path.name}", 0

    class Counted(type(lightning_module())):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = how != "by hand"

        def training_step(self, batch: Any, at: int) -> Any:
            nonlocal batches
            if how != "by hand" and at % 2:
                return None
            batches += 1
            loss = super().training_step(batch, at)
            if self.automatic_optimization:
                return loss
            self.optimizers().zero_grad()
            loss.backward()
            self.optimizers().step()
            return None

    with a_syncer(redis_server, run):
        callback = DilocoCallback(run=run, redis_url=redis_server, sync=SYNC, tokens=1000 * STEP_TOKENS)
        trainer = lightning_trainer(tmp_path, callback, 6)
        if how == "by hand":
            trainer.accumulate_grad_batches, trainer.gradient_clip_val = 1, None
        trainer.fit(Counted(), scripts.loader("lightning"))
        (report,) = [seen.report for seen in reports(redis_server, run)]
    assert report.tokens == batches * MICRO * LENGTH > 0


def test_fabric_makes_a_learner_of_a_loop(redis_server: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run = f"fabric-{tmp_path.name}"
    with a_syncer(redis_server, run):
        where = {"run": run, "redis_url": redis_server, "sync": SYNC, "tokens": 10 * STEP_TOKENS}
        steps = scripts.fabric("fabric", tmp_path / "saved", llama(), lambda: None, **where)
        (report,) = [seen.report for seen in reports(redis_server, run)]
    assert report.step == steps >= 10
    assert report.tokens == steps * STEP_TOKENS
    assert scripts.loss_of(AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="float32")) < 3.4
