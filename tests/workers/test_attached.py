"""Promises about inner steps that optimizers count by themselves (`Learner.attach`)."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.workers import attached
from diloco.workers.attached import Attached, StepTokens, warn_replaced
from diloco.workers.learner import Learner
from diloco.workers.stopping import Stopped
from tests import HANGING_S
from tests.workers.test_device_encoding import a_syncer
from tests.workers.test_learner_life import SYNC, learner_of, reports, threads, until
from tests.workers.test_model_checks import Duck
from tests.workers.test_trial_step import Accelerated


def pair() -> tuple[nn.ParameterList, list[torch.optim.Optimizer]]:
    """A model with an optimizer for each of its two parameters, as Muon and AdamW have theirs."""
    model = nn.ParameterList([torch.ones(3), torch.ones(2)])
    return model, [torch.optim.SGD([model[0]], lr=0.1), torch.optim.AdamW([model[1]])]


def backward(model: nn.Module) -> None:
    sum(parameter.square().sum() for parameter in model.parameters()).backward()


def hooks_of(optimizers: list[torch.optim.Optimizer], tokens: Callable[[], int], counted: list[int]) -> Attached:
    """As `Learner.attach` makes them, for a learner that only notes the tokens."""
    return Attached(optimizers, tokens, lambda: None, lambda counts, _: counted.append(counts))


# --- when a step is over --------------------------------------------------------------------------------------

SEQUENCES = {
    "both": ("a b | a b | a b |", 3),
    "the first sits out, as where a scaler skips it alone": ("a b | b | a b |", 3),
    "the last sits out now and then": ("a b | a | a b | a | a b |", 5),
    "the last steps seldom": ("a | a | a | a b | a | a |", 5),  # the last one is not over yet
    "named the wrong way round": ("b | a b | a b |", 3),
    "the last alone": ("b | b |", 2),
}


@pytest.mark.parametrize("case", SEQUENCES)
def test_each_inner_step_is_counted_once_whoever_sits_it_out(case: str) -> None:
    """And is asked once for its tokens, in the step itself: a counter of the loop's has moved on by the next one."""
    sequence, steps = SEQUENCES[case]
    model, optimizers = pair()
    backward(model)
    now, counted = [0], list[int]()
    hooks = hooks_of(optimizers, lambda: now[0], counted)
    for made in sequence.split("|"):
        now[0] += 1
        for name in made.split():
            optimizers["ab".index(name)].step()
    assert counted == list(range(1, steps + 1))
    hooks.detach()
    for optimizer in optimizers:
        optimizer.step()
    assert len(counted) == steps
    assert not any(
        one._optimizer_step_post_hooks or one._optimizer_step_pre_hooks
        for one in optimizers  # type: ignore[attr-defined]
    )


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_is_not_counted(fused: bool) -> None:
    """An overflow in the gradients: nothing was trained, and nothing is counted, whoever does the skipping."""
    model = nn.Linear(3, 1)
    optimizer, counted = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused), list[int]()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    hooks_of([optimizer], lambda: 7, counted)
    for scale in (1.0, float("inf"), 1.0):
        before = model.weight.detach().clone()
        scaler.scale(model(torch.ones(2, 3)).sum() * scale).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, model.weight) == (scale != 1.0)
    assert counted == [7, 7]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_fused_skip_on_cuda_is_counted_nowhere_in_the_end() -> None:
    """At once where the device is quick; else it is taken off the next step."""
    model, counted = nn.Linear(3, 1, device="cuda"), list[int]()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0)
    hooks_of([optimizer], lambda: 7, counted)
    for scale in (1.0, float("inf"), 1.0):
        scaler.scale(model(torch.ones(2, 3, device="cuda")).sum() * scale).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        torch.cuda.synchronize()
    assert sum(counted) == 14


class LateFlag(attached.Flag):
    """As of a CUDA device: it is known when the next step is made, or only later."""

    def __init__(self, skipped: bool, known: bool = True) -> None:
        self._skipped, self._known = skipped, known

    def says_skipped(self) -> bool:
        return self._known and self._skipped


def test_a_skip_that_is_told_a_step_later_is_taken_off_what_follows() -> None:
    """Whatever sizes steps have; one that is not known even then stays counted; and of two optimizers both skip."""
    tokens, done, skipped, late = StepTokens(), LateFlag(False), LateFlag(True), LateFlag(True, known=False)
    told = [(10, done), (10, skipped), (10, skipped), (4, done), (10, done), (10, late), (10, done)]
    assert [tokens.counted(one, [flag]) for one, flag in told] == [10, 10, 0, 0, 4, 10, 10]
    for flags, next_one in (([skipped, done], 5), ([skipped, None], 5), ([skipped, skipped], 0)):
        tokens = StepTokens()
        assert [tokens.counted(5, flags), tokens.counted(5, [None])] == [5, next_one]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, as it imports its compiler
def test_a_compiled_step_calls_the_hooks_and_compiles_none_of_them() -> None:
    """Their numbers change with each step, and each would be compiled anew."""
    model, compiling = nn.Linear(4, 4), list[bool]()
    optimizer = torch.optim.AdamW(model.parameters())

    def tokens() -> int:
        compiling.append(torch.compiler.is_compiling())
        return 7

    counted = list[int]()
    hooks_of([optimizer], tokens, counted)
    optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
    for _ in range(10):
        backward(model)
        optimizer.step()
    assert counted == [7] * 10
    assert compiling == [False] * 10


def test_a_step_that_took_the_place_of_the_optimizers_own_is_told_at_once(redis_server: str) -> None:
    """Nobody calls hooks then. One that calls the one before, as schedulers and torch.compile make it, is none."""
    with a_syncer(redis_server, "replaced"), learner_of(redis_server, "replaced") as learner:
        optimizer: Any = learner.optimizer
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        with capture_logs() as log:
            learner.attach(tokens=1)
        assert log == []
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    with capture_logs() as log:
        warn_replaced([optimizer])
        assert log == []
        optimizer.step = lambda closure=None: None
        warn_replaced([optimizer])
    (said,) = log
    assert (said["event"], said["optimizers"]) == ("step_replaced", ["AdamW"])


def test_accumulation_and_a_closure_make_one_step_each() -> None:
    model, counted = nn.Linear(3, 1), list[int]()
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    adam, lbfgs = torch.optim.AdamW(model.parameters()), torch.optim.LBFGS(model.parameters(), max_iter=5)
    hooks = [hooks_of([one], lambda: 1, counted) for one in (adam, lbfgs)]
    for _ in range(2):
        for _ in range(4):
            (model(x) - y).square().mean().backward()
        adam.step()
        adam.zero_grad()
    calls = [0]

    def closure() -> torch.Tensor:
        calls[0] += 1
        lbfgs.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    lbfgs.step(closure)  # type: ignore[arg-type]
    assert calls[0] > 1
    assert counted == [1, 1, 1]
    for one in hooks:
        one.detach()


# --- a learner ------------------------------------------------------------------------------------------------


@pytest.mark.redis
@pytest.mark.parametrize("wrap", [lambda one: one, Accelerated, Duck, lambda one: Duck(Accelerated(one))])
def test_a_loop_that_is_not_changed_counts_publishes_and_adopts(redis_server: str, wrap: Any) -> None:
    """A scheduler and whatever else stands behind the optimizer in the loop see the adopted parameters."""
    run = f"attached-{id(wrap)}"
    model = nn.Linear(4, 4)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = wrap(inner)
    with a_syncer(redis_server, run):
        learner = Learner(model, optimizer, run=run, redis_url=redis_server, sync=SYNC).open()
        learner.attach(tokens=10)
        scheduler, steps = torch.optim.lr_scheduler.LambdaLR(inner, lambda _: 1.0), 0

        def version() -> int:
            return learner.joined.training.rounds.versions[0]

        while version() < 3:
            before = version()
            model(torch.ones(2, 4)).square().sum().backward()
            inner.step()
            if version() > before:  # adopted within: the model is its base
                base = learner.joined.exchange.carrier._bases[0].values
                seen = torch.cat([one.detach().flatten() for one in model.parameters()])
                assert learner.joined.exchange.pulling.latest[0][0] > version() or seen.tolist() == base.tolist()
            scheduler.step()
            inner.zero_grad()
            steps += 1
            time.sleep(0.002)
        learner.close()
        learner.close()
        assert learner.left_in_order
        inner.step()  # is a plain one again
        (seen_report,) = reports(redis_server, run)
        assert (seen_report.report.step, seen_report.report.tokens) == (steps, 10 * steps)
        assert seen_report.report.left


@pytest.mark.redis
def test_tokens_are_asked_for_once_a_step(redis_server: str) -> None:
    """As a number, a tensor, or none at all; what is no number is refused by name, in the step."""
    with a_syncer(redis_server, "asked"), learner_of(redis_server, "asked") as learner:
        told: list[Any] = [3, torch.tensor(4), 0]
        learner.attach(lambda: told.pop(0))
        for _ in range(3):
            learner.optimizer.step()  # type: ignore[union-attr]
        assert not told
        assert learner.joined.training.rounds.tokens == 7
        told.append("many")
        with pytest.raises(UsageError, match="tokens='many': a str"):
            learner.optimizer.step()  # type: ignore[union-attr]


@pytest.mark.redis
def test_losses_are_told_with_the_steps(redis_server: str) -> None:
    """The status shows the last one that was told; what is no loss, or cannot be called for one, is refused."""
    with a_syncer(redis_server, "losses"), learner_of(redis_server, "losses") as learner:
        with pytest.raises(UsageError, match=r"attach\(loss=...\): pass a function"):
            learner.attach(1, loss=2.5)  # type: ignore[arg-type]
        told: list[Any] = [3.5, torch.tensor(2.5, requires_grad=True), None]
        learner.attach(1, loss=lambda: told.pop(0))
        for shown in (3.5, 2.5, 2.5):
            learner.optimizer.step()  # type: ignore[union-attr]
            assert learner.joined.training.losses.shown() == shown
        told.append(torch.ones(2))
        with pytest.raises(UsageError, match=r"a tensor of shape \(2,\)"):
            learner.optimizer.step()  # type: ignore[union-attr]
        learner.close()
    assert [seen.report.loss for seen in reports(redis_server, "losses")] == [2.5]


@pytest.mark.redis
def test_steps_are_counted_in_one_way_only(redis_server: str) -> None:
    """By `step` or by the optimizer, and once by that; what attaching cannot mean is refused."""
    with a_syncer(redis_server, "ways"):
        closed = learner_of(redis_server, "ways")
        with pytest.raises(UsageError, match="not in a run"):
            closed.attach(1)
        with learner_of(redis_server, "ways") as learner:
            strange = torch.optim.SGD(nn.Linear(2, 2).parameters())
            own = learner.optimizer
            for tokens, optimizers, said in (
                (-1, None, "tokens=-1"),
                (1.5, None, "tokens=1.5"),
                (1, [], "the list of optimizers is empty"),
                (1, [own, own], "pass each optimizer once"),
                (1, [own, None], "pass each optimizer once"),
                (1, strange, "holds none of the model's trained parameters"),
                (1, "AdamW", "optimizer is a str"),
            ):
                with pytest.raises(UsageError, match=said):
                    learner.attach(tokens, optimizers)  # type: ignore[arg-type]
            learner.attach(1)
            with pytest.raises(UsageError, match=r"step\(\) after attach.*remove this call"):
                learner.step(1)
            with pytest.raises(UsageError, match="already attached"):
                learner.attach(1)
        with learner_of(redis_server, "ways") as learner:
            learner.step(1)
            with pytest.raises(UsageError, match="counting by step"):
                learner.attach(1)
        bare = nn.Linear(4, 4)
        with Learner(bare, run="ways", redis_url=redis_server, sync=SYNC) as learner:
            with pytest.raises(UsageError, match="create the Learner with one"):
                learner.attach(1)
            learner.attach(1, torch.optim.SGD(bare.parameters()))


@pytest.mark.redis
@pytest.mark.parametrize("where", ["tokens", "a hook before", "a hook after"])
def test_a_learner_that_is_closed_in_a_step_counts_no_more(redis_server: str, where: str) -> None:
    """By what is asked for the tokens, or by another hook: torch goes on through its hooks, and none is ours."""
    run = f"closing-{where.replace(' ', '-')}"
    with a_syncer(redis_server, run), learner_of(redis_server, run) as learner:
        asked, own = [], learner.optimizer
        assert own is not None

        def closing(*_: Any) -> int:
            if where == "tokens":
                asked.append(1)
            if len(asked) == 2:
                learner.close()
            return 5

        def counted() -> int:
            asked.append(1)
            return 5

        if where == "a hook before":
            own.register_step_post_hook(closing)
        learner.attach(closing if where == "tokens" else counted)
        if where == "a hook after":
            own.register_step_post_hook(closing)
        for _ in range(4):
            own.step()
        assert len(asked) == 2
        with pytest.raises(UsageError, match="not in a run"):
            learner.step(1)


def go_on_deaf(learner: Learner, number: int) -> None:
    """A loop that gets a signal after three steps and does not ask."""
    learner.attach(5)
    for made in range(10):
        learner.optimizer.step()  # type: ignore[union-attr]
        until(lambda: learner.joined.shared.state)  # without it no state is saved
        if made == 2:
            os.kill(os.getpid(), number)


@pytest.mark.redis
def test_a_loop_that_does_not_ask_is_ended_in_its_optimizer(redis_server: str, tmp_path: Path) -> None:
    """By SIGTERM, between two updates; all is flushed and saved, and Ctrl-C before leaves as orderly."""
    ours = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in ours.items()}  # a test may have left others
    try:
        with a_syncer(redis_server, "ended"):
            for number, error in ((signal.SIGTERM, Stopped), (signal.SIGINT, KeyboardInterrupt)):
                learner = learner_of(redis_server, "ended", state_dir=tmp_path / str(number))
                with pytest.raises(error), learner:
                    go_on_deaf(learner, number)
                assert learner.left_in_order
                assert (tmp_path / str(number) / "state.json").exists()
                assert not learner.optimizer._optimizer_step_post_hooks  # type: ignore[union-attr]
            assert all(seen.report.left for seen in reports(redis_server, "ended"))
            assert not threads()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# --- open and close -------------------------------------------------------------------------------------------


@pytest.mark.redis
def test_a_learner_that_is_closed_while_it_joins_gives_up_and_leaves_nothing(redis_server: str) -> None:
    """No syncer serves the run: `open` would wait for ever."""
    learner, ended = learner_of(redis_server, "given-up"), list[BaseException]()

    def join() -> None:
        try:
            learner.open()
        except UsageError as error:
            ended.append(error)

    learner.close()  # before it was opened: nothing
    thread = threading.Thread(target=join)
    thread.start()
    until(lambda: [seen.report.left for seen in reports(redis_server, "given-up")] == [False])
    learner.close()
    thread.join(HANGING_S)
    assert "closed before it joined" in str(ended[0])
    assert [seen.report.left for seen in reports(redis_server, "given-up")] == [True]
    assert not threads()
    with pytest.raises(UsageError, match="opened only once"):
        learner.open()


@pytest.mark.redis
def test_a_loop_that_was_told_why_its_other_thread_has_ended_is_not_told_again(redis_server: str) -> None:
    """By closing, which says it to a loop that was not."""
    with a_syncer(redis_server, "fails"):
        learner = learner_of(redis_server, "fails").open()
        thread = learner.joined.thread
        thread.failure = UsageError("as an exchange fails")
        thread.end()
        with pytest.raises(UsageError, match="as an exchange fails"):
            learner.step(1)
        learner.close()
        assert not learner.left_in_order
        assert not threads()
