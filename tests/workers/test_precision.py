"""Promises about training in bf16 beside fp32 masters, and about activations that are computed again."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco.pipeline.settings import LearnerProcess, LearnerSettings, load
from diloco.workers.learner import Learner
from diloco.workers.trainer import trainer
from diloco.workers.trainer.models.gpt import GPT, build
from diloco.workers.trainer.models.sizes import Size
from diloco.workers.trainer.precision import InBf16, checkpoint_activations, training_forward
from diloco.workers.trainer.recipe import add_gradients, loss_of, make_optimizers, update
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_learner_life import on_bus, until

CPU = torch.device("cpu")
SMALL = Size(layers=2, width=32, heads=2, hidden=48)


def batches(count: int, rows: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (rows, 17), generator=generator) for _ in range(count)]


def in_bf16(model: nn.Module) -> nn.Module:
    return training_forward(model, CPU, load(LearnerSettings, {"precision": "bf16"}))


def test_as_it_was_the_model_itself_is_called() -> None:
    model = build("nano", 0)
    assert training_forward(model, CPU, LearnerSettings()) is model
    assert not model.checkpoint_activations


def test_masters_stay_fp32_and_what_computes_is_rounded_from_them() -> None:
    """The model has as many parameters as before, all fp32; the copy's are theirs in bf16, ties included, at each
    call: also after somebody has put other values into the masters."""
    model = GPT(SMALL, 256, 0)
    forward = in_bf16(model)
    assert isinstance(forward, InBf16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)  # as an adoption does
    (tokens,) = batches(1)
    logits = forward(tokens)
    assert logits.dtype == torch.bfloat16
    whole = GPT(SMALL, 256, 0)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(0.01)
    assert torch.equal(logits, whole.bfloat16()(tokens))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_gradients_arrive_in_the_masters_in_fp32() -> None:
    """Of two micro-batches: the sum of what each gives in bf16, added in fp32. None is left with the copy."""
    model, parts = GPT(SMALL, 256, 0), batches(2)
    forward = in_bf16(model)
    add_gradients(forward, parts, 2)
    expected: list[torch.Tensor] = [torch.zeros_like(p) for p in model.parameters()]
    for part in parts:
        alone = GPT(SMALL, 256, 0).bfloat16()
        torch.autograd.backward(loss_of(alone, part) / 2)
        for total, p in zip(expected, alone.parameters(), strict=True):
            assert p.grad is not None
            total.add_(p.grad)
    for p, total in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None
        assert p.grad.dtype == torch.float32
        assert torch.equal(p.grad, total)
    assert all(p.grad is None for p in forward.parameters())


def test_small_steps_are_not_lost() -> None:
    """A step that bf16 would round away moves the masters, and many of them move the copy."""
    model = GPT(SMALL, 256, 0)
    before = [p.detach().clone() for p in model.parameters()]
    forward, optimizer = in_bf16(model), torch.optim.SGD(model.parameters(), lr=1.0)
    for batch in batches(3):
        add_gradients(forward, [batch], 1)
        update(model, [optimizer], 1e-5, float("inf"))
    moved = [(p.detach() - old).abs().max() for p, old in zip(model.parameters(), before, strict=True)]
    assert all(0 < change < 1e-4 for change in moved)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_computed_again_give_the_same_gradients(precision: str) -> None:
    """Bit for bit, on a CPU; and fewer are kept from the forward pass to the backward one."""
    found, kept = [], []
    for again in (False, True):
        model = GPT(SMALL, 256, 0)
        told = load(LearnerSettings, {"precision": precision, "checkpoint_activations": again})
        forward = training_forward(model, CPU, told)
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: s.append(t.numel()) or t, lambda t: t):
            loss = loss_of(forward, *batches(1))
        torch.autograd.backward(loss)
        found.append([loss, *(p.grad for p in model.parameters())])
        kept.append(sum(saved))
    assert all(a is not None and torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert kept[1] < kept[0] / 2


def test_a_model_that_cannot_compute_again_is_refused() -> None:
    class Odd(nn.Linear):
        def gradient_checkpointing_enable(self, told: Any) -> None:
            raise ValueError("Odd does not support gradient checkpointing.")

    with pytest.raises(UsageError, match="Odd does not support"):
        checkpoint_activations(Odd(2, 2))


def test_the_loss_falls_as_it_does_in_fp32() -> None:
    """The same batches, learnt by heart: both end far below a guess, and near one another."""
    ends = []
    for precision in ("fp32", "bf16"):
        model = GPT(SMALL, 256, 0)
        forward = training_forward(model, CPU, load(LearnerSettings, {"precision": precision}))
        optimizers, given = make_optimizers(model.parameters(), 1e-2, 0.0), batches(2)
        for number in range(60):
            loss = add_gradients(forward, [given[number % 2]], 1)
            update(model, optimizers, 1e-2, 1.0)
        ends.append(loss.item())
    assert ends[0] < 2
    assert ends[1] == pytest.approx(ends[0], rel=0.2)


# --- as a learner of a run -----------------------------------------------------------------------------------


class Kept(Learner):
    """A learner that can be asked afterwards."""

    made: list["Kept"]

    def __init__(self, *args: Any, **told: Any) -> None:
        super().__init__(*args, **told)
        self.source, self.joined_steps = "", 0
        Kept.made.append(self)

    def step(self, tokens: Any, loss: Any = None) -> None:
        self.source, self.joined_steps = self.recovered, self.joined_steps + 1
        super().step(tokens, loss)


class After:
    """Stands for a signal after so many steps."""

    training = False

    def __init__(self, steps: int) -> None:
        self.steps = steps

    @property
    def asked(self) -> bool:
        self.steps -= 1
        return self.steps < 0


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Kept]]:
    threads = torch.get_num_threads()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    Kept.made = []
    monkeypatch.setattr(trainer, "Learner", Kept)
    yield Kept.made
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.redis
def test_a_run_in_bf16_is_one_of_fp32_parameters(
    redis_server: str, tmp_path: Path, book: Path, kept: list[Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes to its end; the learner's parameters are the heads' to the last bit, and finer than bf16. One that leaves
    on the way has its moments again when it comes back, and takes up the run's fp32 parameters."""
    told: dict[str, Any] = {
        **{"redis_url": redis_server, "run": "bf16", "learner_id": "l0", "model": "nano", "data": str(book)},
        **{"seq_len": 32, "batch": 4, "threads": 1, "tokens": 128 * 100, "fragments": 2, "sync_interval": 2},
        **{"precision": "bf16", "checkpoint_activations": True, "state_dir": tmp_path / "state"},
        "global_codec": "fp32",
    }
    with a_syncer(redis_server, "bf16"):
        monkeypatch.setattr(trainer, "StopFlag", lambda: After(20))
        assert trainer.train(load(LearnerProcess, told)) == AGAIN_STATUS
        until(lambda: all(h and h.version for h in on_bus(redis_server, "bf16", lambda bus: bus.read_heads(range(2)))))
        monkeypatch.setattr(trainer, "StopFlag", lambda: After(10**6))
        assert trainer.train(load(LearnerProcess, told)) == 0
        first, second = kept
        assert (first.source, second.source) == ("start", "checkpoint")
        second.load_globals()
        whole = second.globals()
    (optimizer,) = second.optimizer  # type: ignore[misc]  # a list of one
    for name, parameter in second.model.named_parameters():
        state = optimizer.state[parameter]
        assert state["step"] == 20 + second.joined_steps
        assert state["exp_avg"].dtype == parameter.dtype == torch.float32
        assert torch.equal(whole[name], parameter)
        assert not torch.equal(parameter.bfloat16().float(), parameter)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("again", [False, True])
def test_on_cuda_a_bf16_copy_computes_and_fp32_masters_learn(again: bool) -> None:
    """The loss falls; parameters, gradients and moments are fp32, on the device."""
    model = GPT(SMALL, 256, 0).cuda()
    told = load(LearnerSettings, {"precision": "bf16", "checkpoint_activations": again})
    forward, optimizers = (
        training_forward(model, torch.device("cuda"), told),
        make_optimizers(model.parameters(), 1e-2, 0.0),
    )
    (batch,), losses = batches(1), []
    for _ in range(40):
        losses.append(add_gradients(forward, [batch.cuda()], 1).item())
        assert {(p.grad.dtype, p.grad.is_cuda) for p in model.parameters() if p.grad is not None} == {
            (torch.float32, True)
        }
        update(model, optimizers, 1e-2, 1.0)
    assert losses[-1] < losses[0] / 2
    assert {state["exp_avg"].dtype for one in optimizers for state in one.state.values()} == {torch.float32}
